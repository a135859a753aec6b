"""Many pieces of work at once on one sender, ended together by a fault, an empty budget or Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar

from kinject.augment.generators.faults import Stopped
from kinject.augment.sender import Sender
from kinject.errors import Terminated

Item = TypeVar("Item")


async def work_through(
    items: Iterator[Item], work: Callable[[Item], Awaitable[None]], sender: Sender, n_workers: int
) -> None:
    """Do `work` on every item, `n_workers` at a time; items are drawn as workers come free.

    Raises the first exception of `work` after the requests in flight have ended (`Stopped` ends the run without one),
    and `KeyboardInterrupt` as `ending_gently` does.
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

    with ending_gently(sender):
        await asyncio.gather(*(draw() for _ in range(n_workers)))
        if errors:
            raise errors[0]


@contextlib.contextmanager
def ending_gently(sender: Sender) -> Iterator[None]:
    """Turn the first Ctrl-C or SIGTERM into `sender.interrupt()`, so that what is in flight is answered and stored.

    When the block has ended, `KeyboardInterrupt` (`Terminated`) is raised; a second signal does not wait for that.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def end() -> None:
        sender.interrupt()
        if len(came) > 1 and task is not None:
            task.cancel()

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)
        loop.call_soon_threadsafe(end)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except asyncio.CancelledError:
        if not came:
            raise
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    if came:
        raise Terminated if came[0] == signal.SIGTERM else KeyboardInterrupt
