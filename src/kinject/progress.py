"""How far long work is, on stderr: a bar with rate and ETA on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

from kinject.screen import printable, show

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID

_SECONDS_BETWEEN_LINES = 15.0


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
