"""Progress is told on a terminal as a bar, elsewhere as a line now and then, always on stderr."""

from __future__ import annotations

import sys

import pytest

from kinject import progress as module
from kinject.terminal import Progress, duration


def test_without_a_terminal_lines_come_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with Progress("training", 100, "steps", done=40) as progress:
        for _ in range(4):
            progress.advance(10)
            progress.tell("loss 1.5")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert 2 <= len(lines) <= 6
    assert lines[0].startswith(("training: 50/100 steps  ", "training: 60/100 steps  "))
    assert "loss 1.5" in lines[-1]
    assert "ETA" in lines[0]


def test_the_rate_leaves_out_what_was_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress("training", 100, "steps", done=40)
    progress.advance(10)
    started = progress._began
    monkeypatch.setattr(module.time, "monotonic", lambda: started + 5.0)
    assert progress.rate == pytest.approx(2.0)


def test_on_a_terminal_it_is_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with Progress("training", 4, "steps") as progress:
        progress.advance(4)
    assert "4/4" in capsys.readouterr().err


def test_names_in_it_are_neither_markup_nor_orders_to_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    with Progress("[/red] \x1b]0;owned\x07", 4, "steps") as progress:
        progress.tell("[link=file:///etc]arm[/link] \x1b[2J")
        progress.advance(4)
    err = capsys.readouterr().err
    assert "[/red]" in err
    assert "[link=file:///etc]arm[/link]" in err
    assert "\x1b]0;" not in err
    assert "\x1b[2J" not in err


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59, "59 s"), (150, "150 s"), (240, "4 min"), (12_000, "3 h 20 min")]
)
def test_durations_read_well(seconds: float, words: str) -> None:
    assert duration(seconds) == words
