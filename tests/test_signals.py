"""Signals: none is lost, whatever Python was doing."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from kinject import process
from kinject.errors import Terminated
from kinject.llm.sender import run_event_loop
from kinject.process import SIGNALS, deferred, exit_code, terminable


class Finalised:
    """Gets a signal while it is finalised."""

    def __init__(self, sent: signal.Signals) -> None:
        self.sent = sent

    def __del__(self) -> None:
        os.kill(os.getpid(), self.sent)
        sum(range(100))  # the handler runs here, and what it raises is thrown away


def finalise_and_wait(sent: signal.Signals) -> None:
    with terminable():
        dying = Finalised(sent)
        del dying
        for _ in range(6000):
            time.sleep(0.01)


RAISED = [
    (number, KeyboardInterrupt if number == signal.SIGINT else Terminated) for number in SIGNALS
]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the handlers after a test."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("sent", "raised"), RAISED)
def test_a_signal_that_comes_while_an_object_is_finalised_is_not_lost(
    sent: signal.Signals, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(sent)
    with pytest.raises(raised) as caught:
        finalise_and_wait(sent)
    assert type(caught.value) is raised
    assert exit_code(caught.value) == 128 + sent
    assert signal.getsignal(sent) is before


def test_nor_is_one_that_is_sent_again_before_the_hook_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a loaded machine, where the thread that sends it is there first."""
    later = process._send_later

    def at_once(number: int) -> None:
        monkeypatch.setattr(process, "_send_later", later)
        os.kill(os.getpid(), number)
        sum(range(100))  # the handler runs here, in the hook

    monkeypatch.setattr(process, "_send_later", at_once)
    with pytest.raises(Terminated):
        finalise_and_wait(signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored_but_a_batch_systems(
    number: signal.Signals,
) -> None:
    signal.signal(number, signal.SIG_IGN)
    with terminable():
        assert (signal.getsignal(number) is signal.SIG_IGN) == (
            number not in (signal.SIGTERM, signal.SIGUSR1)
        )
    assert signal.getsignal(number) is signal.SIG_IGN


class Clock:
    """A clock that moves by hand alone: on a loaded machine a second passes between two lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 1.0
        monkeypatch.setattr("kinject.process.monotonic", lambda: self.ahead)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_runs_inside_a_running_event_loop(number: signal.Signals) -> None:
    ended: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("ended")
        return "slept"

    async def cell() -> None:
        assert run_event_loop(asyncio.sleep(0, "a result")) == "a result"
        threading.Timer(0.2, os.kill, (os.getpid(), number)).start()
        run_event_loop(work())

    with terminable(), pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated):
        asyncio.run(cell())
    assert ended == ["ended"]


def test_a_deferred_signal_comes_at_the_end_of_the_block_and_a_second_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, announced = Clock(monkeypatch), threading.Event()

    def send(pause: float, times: int) -> None:
        with deferred(announced.set) as received:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
                clock.ahead += pause
            assert received == [signal.SIGTERM]
            assert announced.wait(600)
            ends.append(times)

    ends: list[int] = []
    with pytest.raises(Terminated):
        send(0.1, 2)  # a launcher repeats it
    with pytest.raises(Terminated):
        send(2.0, 3)
    assert ends == [2]


def test_after_the_warning_of_a_batch_system_only_the_terminal_ends_the_block_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch)
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def receive(*sent: signal.Signals) -> None:
        with deferred(lambda: None) as received:
            for number in (signal.SIGUSR1, *sent):
                os.kill(os.getpid(), number)
                time.sleep(0.01)
                clock.ahead += 2
            ends.append(list(received))

    ends: list[list[int]] = []
    with pytest.raises(Terminated) as stopped:
        receive(signal.SIGUSR1, signal.SIGTERM)
    assert exit_code(stopped.value) == 138
    assert ends == [[signal.SIGUSR1]]
    with pytest.raises(KeyboardInterrupt) as stopped:
        receive(signal.SIGINT)
    assert exit_code(stopped.value) == 130
    assert len(ends) == 1
