"""Many pieces of work at once on one sender, ended together by a fault, an empty budget or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from kinject.augment.generators.faults import Stopped
from kinject.augment.sender import Sender

Item = TypeVar("Item")


async def work_through(
    items: Iterator[Item], work: Callable[[Item], Awaitable[None]], sender: Sender, n_workers: int
) -> None:
    """Do `work` on every item, `n_workers` at a time; items are drawn as workers come free.

    Raises the first exception of `work` after the requests in flight have ended (`Stopped` ends the run without one),
    and `KeyboardInterrupt` the same way; a second Ctrl-C does not wait for them.
    """
    errors: list[Exception] = []

    async def draw() -> None:
        try:
            for item in items:
                if sender.stopping:
                    return
                await work(item)
        except Stopped:
            return
        except Exception as error:  # noqa: BLE001  (raised again below, when the requests in flight have ended)
            errors.append(error)
            sender.stop()

    with _interruptible(sender) as interrupted:
        await asyncio.gather(*(draw() for _ in range(n_workers)))
    if errors:
        raise errors[0]
    if interrupted:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _interruptible(sender: Sender) -> Iterator[list[int]]:
    """Turn the first Ctrl-C into `sender.stop()`; yield a list that is not empty once that happened."""
    interrupted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        interrupted.append(signal.SIGINT)
        sender.interrupt()
        if len(interrupted) > 1 and task is not None:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    except asyncio.CancelledError:
        if not interrupted:
            raise
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGINT)
