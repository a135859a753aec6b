"""Turns SIGTERM into an exception; neither SIGTERM nor Ctrl-C is lost if it arrives while Python ignores exceptions."""

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
"""Seconds until a signal whose exception was ignored is sent again."""


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `Terminated` in the block on SIGTERM; afterwards restore the signal's previous handler.

    A signal may arrive while Python finalises an object and ignores exceptions. Such a signal is sent again.
    """
    previous_hook, previous_handler = sys.unraisablehook, signal.signal(signal.SIGTERM, _terminate)

    def send_again(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            previous_hook(ignored)
            return
        number = signal.SIGTERM if isinstance(ignored.exc_value, Terminated) else signal.SIGINT
        timer = threading.Timer(_PAUSE, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        yield
    finally:
        sys.unraisablehook = previous_hook
        signal.signal(signal.SIGTERM, previous_handler)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a shell for the signal behind `stop`: 128 and its number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
