"""Turns the signals that end a process into exceptions. None is lost if it arrives while Python ignores exceptions.

SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal is gone), SIGQUIT (Ctrl-\\) and SIGUSR1 (a batch system's warning) end a
verb the same way. A signal that was ignored when the process started stays ignored, as under nohup or in the background of
a script; SIGTERM and SIGUSR1 never are, so that a batch script may let its launcher ignore them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from kinject.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""The signals that end a verb."""
_FROM_BATCH_SYSTEM = frozenset((signal.SIGTERM, signal.SIGUSR1))
"""Those that a batch system sends: Slurm's --signal, and what it sends before it kills."""
FROM_TERMINAL = frozenset((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Those that a terminal sends to all processes of a command."""
_REPEATED = 1.0
"""Seconds in which further signals are the first one again."""
_PAUSE = 0.05
"""Seconds until a signal whose exception was ignored is sent again."""


@contextlib.contextmanager
def handled_by(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """Let `handler` receive the signals that end a verb in the block; afterwards restore the previous handlers."""
    received = [number for number in SIGNALS if number in _FROM_BATCH_SYSTEM or not _is_ignored(number)]
    before = [(number, signal.signal(number, handler)) for number in received]
    try:
        yield
    finally:
        for number, previous in before:
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block on SIGINT, and `Terminated` on the other signals that end a verb.

    A signal may arrive while Python finalises an object and ignores exceptions. Such a signal is sent again.
    """
    previous_hook = sys.unraisablehook

    def send_again(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            previous_hook(ignored)
            return
        timer = threading.Timer(_PAUSE, os.kill, (os.getpid(), _number(ignored.exc_value)))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = send_again
    try:
        with handled_by(_raise):
            yield
    finally:
        sys.unraisablehook = previous_hook


@contextlib.contextmanager
def deferred(announce: Callable[[], None]) -> Iterator[list[int]]:
    """Keep the first signal that ends a verb in the list until the block ends, then raise it; `announce` it at once.

    A further signal a second later, or more, raises immediately (a launcher repeats a signal of the terminal). After SIGUSR1
    only a signal of the terminal does: a batch system sends SIGTERM next. In a thread other than the main one, nothing is
    received.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    first = 0.0

    def receive(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if signal.SIGUSR1 in received and signum in _FROM_BATCH_SYSTEM:
            return
        if received and time.monotonic() - first >= _REPEATED:
            raise interruption(signum)
        if not received:
            first = time.monotonic()
            received.append(signum)
            threading.Thread(target=announce, daemon=True).start()  # the signal may have come in the middle of a print

    with handled_by(receive):
        yield received
    if received:
        raise interruption(received[0])


def _raise(signum: int, frame: FrameType | None) -> None:
    raise interruption(signum)


def interruption(signum: int) -> KeyboardInterrupt:
    """Return the exception to raise for a signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)


def _number(stop: KeyboardInterrupt) -> signal.Signals:
    return signal.Signals(stop.number) if isinstance(stop, Terminated) else signal.SIGINT


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a shell for the signal behind `stop`: 128 and its number."""
    return 128 + _number(stop)
