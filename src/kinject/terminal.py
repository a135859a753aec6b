"""Text and progress on the terminal.

Text from data is printed so that it cannot control the terminal. Progress is a bar with rate and ETA on a terminal, and a
line every 15 seconds elsewhere; both go to stderr.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 15.0
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but tab and line feed, marks that turn the direction of what follows, and half characters."""


def printable(text: str) -> str:
    """Return `text` with every character that a terminal would obey as U+FFFD."""
    return _STEERING.sub("\ufffd", text)


def show(text: object = "", *, end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print `text` on standard output, or on `file`, as `printable` has it."""
    print(printable(str(text)), end=end, file=sys.stdout if file is None else file, flush=flush)


def aligned(rows: Sequence[Sequence[str]], right: frozenset[int]) -> str:
    """Return `rows` as columns, those in `right` aligned to the right; two spaces before each line."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        columns = (
            text.rjust(width) if column in right else text.ljust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  " + "  ".join(columns).rstrip())
    return "\n".join(lines)


class Formatter(logging.Formatter):
    """Writes messages of the log as `printable` has them."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message alone."""
        return printable(super().format(record))


class Progress:
    """Counts `total` units of work inside ``with``; what a resumed run finds done is given as `done`.

    The ETA counts only what this process does, so a resumed run's is not too hopeful. `tell` sets a few words that
    stand behind the count (a loss, a number of refusals).
    """

    def __init__(self, what: str, total: int, unit: str, *, done: int = 0) -> None:
        self.what = printable(what)
        self.total = total
        self.unit = unit
        self.done = self._done_before = done
        self._said = ""
        self._began = self._last_line = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def advance(self, n: int = 1) -> None:
        """Count `n` more units."""
        self.done += n
        self._show()

    def tell(self, said: str) -> None:
        """Set the words behind the count."""
        self._said = printable(said)
        self._show()

    @property
    def rate(self) -> float:
        """Units a second, of what this process did."""
        return (self.done - self._done_before) / max(time.monotonic() - self._began, 1e-9)

    def _show(self) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, said=self._said, rate=self._rate_in_words())
            return
        now = time.monotonic()
        if now - self._last_line >= _SECONDS_BETWEEN_LINES and self.done < self.total:
            self._last_line = now
            left = f"ETA {duration((self.total - self.done) / self.rate)}" if self.rate else ""
            words = (f"{self.what}: {self.done:,}/{self.total:,} {self.unit}", self._rate_in_words(), self._said, left)
            show("  ".join(word for word in words if word), file=sys.stderr, flush=True)

    def _rate_in_words(self) -> str:
        return f"{self.rate:,.1f} {self.unit}/s" if self.rate else ""

    def __enter__(self) -> Progress:
        self._began = self._last_line = time.monotonic()
        if sys.stderr.isatty() and self.total > self.done:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"), TextColumn("{task.fields[said]}", markup=False), TimeElapsedColumn(),
                TextColumn("ETA"), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done, said="", rate="")
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def duration(seconds: float) -> str:
    """Return seconds in words: ``45 s``, ``12 min``, ``3 h 20 min``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes > 2 else f"{minutes * 60 + rest} s"
