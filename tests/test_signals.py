"""Signals: none is lost, whatever Python was doing."""

from __future__ import annotations

import os
import signal
import time

import pytest

from kinject.errors import Terminated
from kinject.signals import terminable


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


@pytest.mark.parametrize(("sent", "raised"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_that_comes_while_an_object_is_finalised_is_not_lost(
    sent: signal.Signals, raised: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended_before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(raised) as caught:
            finalise_and_wait(sent)
    finally:
        signal.signal(signal.SIGINT, before)
    assert type(caught.value) is raised
    assert signal.getsignal(signal.SIGTERM) is ended_before
