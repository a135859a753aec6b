"""SIGTERM as an exception, and neither it nor Ctrl-C lost where Python throws exceptions away."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from kinject.errors import Terminated

_PAUSE = 0.05
"""Seconds until a signal whose exception was thrown away is sent again."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` in the block when SIGTERM comes; after it the signal does what it did before.

    Python raises what a signal raises wherever it is, also while an object is finalised, where exceptions are thrown away.
    Such a signal is sent again.
    """
    hook, before = sys.unraisablehook, signal.signal(signal.SIGTERM, _terminate)

    def notice(thrown: Any) -> None:
        if not isinstance(thrown.exc_value, KeyboardInterrupt):
            hook(thrown)
            return
        sent = signal.SIGTERM if isinstance(thrown.exc_value, Terminated) else signal.SIGINT
        again = threading.Timer(_PAUSE, os.kill, (os.getpid(), sent))
        again.daemon = True
        again.start()

    sys.unraisablehook = notice
    try:
        yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGTERM, before)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a shell for the signal behind `stop`: 128 and its number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
