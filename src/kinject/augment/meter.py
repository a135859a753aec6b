"""What a run shows while it works: rewritings done, answers refused, tokens and cost."""

from __future__ import annotations

from collections.abc import Callable

from kinject.terminal import Progress


class Meter(Progress):
    """Progress in rewritings, of which a rerun finds some done as it goes."""

    def __init__(self, total: int) -> None:
        super().__init__("augment", total, "rewritings")
        self._n_refused = 0
        self._status: Callable[[], str] = str

    def watch(self, status: Callable[[], str]) -> None:
        """Show what `status` returns (tokens, cost) beside the count."""
        self._status = status

    def find(self, n: int) -> None:
        """Count `n` more rewritings that were stored before: they say nothing about the rate."""
        self._done_before += n
        self.advance(n)

    def refuse(self) -> None:
        """Count one more refused answer."""
        self._n_refused += 1

    def advance(self, n: int = 1) -> None:
        """Count `n` more rewritings as done (stored, or given up)."""
        refused = f"{self._n_refused:,} refused" if self._n_refused else ""
        self._said = ", ".join(words for words in (refused, self._status()) if words)
        super().advance(n)
