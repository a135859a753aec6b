"""A server that a verb runs until Ctrl-C."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from kinject.cli import Outcome
from kinject.errors import InputError
from kinject.process import exit_code
from kinject.terminal import show


def serve(make: Callable[[], Any], arguments: argparse.Namespace, label: str) -> Outcome:
    """Run the server that `make` returns until Ctrl-C, and open its page if that was asked for."""
    import webbrowser

    if not 0 <= arguments.port < 65536:
        raise InputError(f"--port: found {arguments.port}, allowed: 0 to 65535.")
    try:
        with make() as server:
            # At once, also into a pipe: programs wait for the address.
            show(f"{label}: {server.url} (Ctrl-C stops it)", flush=True)
            arguments.announce({"url": server.url})
            # The sandbox's endpoint has no page, and so no such option.
            if "open" in arguments and arguments.open:
                webbrowser.open(server.url)
            server.serve_forever()
    except KeyboardInterrupt as stop:
        return None, exit_code(stop)  # there is nothing to resume
    return None, 0
