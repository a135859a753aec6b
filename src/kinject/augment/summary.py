"""The reports of a run of `augment`: its progress, its result, and the table at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from kinject.augment.checks.judge import JudgeScore, render_judge_score
from kinject.augment.contamination import Contamination, render_contamination
from kinject.augment.corpus_writer import Coverage, StyleCount, render_coverage
from kinject.augment.styles import SKIPPED
from kinject.corpus.passages import cut_note
from kinject.language.tables import language_of
from kinject.llm.balance import render_endpoints
from kinject.terminal import Progress
from kinject.types import Tabular

UNPREPARED = "the preparation of the style got no usable answer"
"""The error of requests that need a preparation, before the reason for which its answers were refused."""
_SECONDS_BETWEEN_TEXTS = 0.1


class AugmentProgress(Progress):
    """Progress in variants: stored, refused, tokens and cost."""

    def __init__(self, total: int) -> None:
        super().__init__("augment", total, "rewritings")
        self._n_refused = 0
        self._status: Callable[[], str] = str
        self._described = 0.0

    def watch(self, status: Callable[[], str]) -> None:
        """Show the text of `status` (tokens, cost) beside the count."""
        self._status = status

    def count_stored(self, n: int) -> None:
        """Count `n` variants that an earlier run stored. They do not count towards the rate."""
        if n:
            self._done_before += n
            self.advance(n)

    def count_refused(self) -> None:
        """Count one more refused answer."""
        self._n_refused += 1

    def advance(self, n: int = 1) -> None:
        """Count `n` more variants as done: stored, or given up."""
        now = monotonic()
        if now - self._described >= _SECONDS_BETWEEN_TEXTS or self.done + n >= self.total:
            self._described = now
            refused = f"{self._n_refused:,} refused" if self._n_refused else ""
            self._status_text = ", ".join(words for words in (refused, self._status()) if words)
        super().advance(n)


@dataclass(frozen=True)
class AugmentResult(Tabular):
    """The result of `augment`.

    `refused` counts answers by reason, `failed` variants without an answer by error; `failures_path` lists the failed ones
    of this run. `tokens_in` and `tokens_out` are those of every stored answer, refused ones too; `tokens_thinking` is the part
    of `tokens_out` that a reasoning model's thinking took. `n_sent` and `n_cached` are of this run alone. `cost` is that of
    everything ever answered into the run folder, in the currency of the prices; `cost_of_thinking` is a part of it.
    `cost_note` names the part of it that is estimated. `sft_path` holds the rows of styles that make prompts and completions,
    None if there are none. `contamination` is None if the recipe names no probe set; `judge` is the judge's score on planted
    errors. `repairs` counts what was taken off accepted answers. `endpoints` counts this run's answers by endpoint, where there
    are several.
    `n_cut` counts the passages that end inside a sentence, a table row or a code block.
    """

    run_dir: Path
    corpus_path: Path
    sft_path: Path | None
    variants_path: Path
    rejected_path: Path
    manifest_path: Path
    n_documents: int
    n_passages: int
    n_rows: int
    asked: int
    got: int
    styles: Mapping[str, StyleCount]
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    tokens_in: int
    tokens_out: int
    tokens_thinking: int
    n_sent: int
    n_cached: int
    cost: float
    cost_of_thinking: float
    out_of_budget: bool
    failures_path: Path
    cost_note: str = ""
    contamination: Contamination | None = None
    coverage: Coverage | None = None
    repairs: Mapping[str, int] = field(default_factory=dict)
    judge: JudgeScore | None = None
    languages: Mapping[str, int] = field(default_factory=dict)
    endpoints: Mapping[str, Any] = field(default_factory=dict)
    n_cut: int = 0

    @property
    def short(self) -> bool:
        """Whether there are fewer variants than requested, the answers NONE included."""
        return self.got + sum(count.nothing for count in self.styles.values()) < self.asked

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each style."""
        return [
            {
                "style": name,
                "asked": count.asked,
                "got": count.got,
                "texts": count.texts,
                "refused": sum(count.refused.values()),
                "failed": count.failed,
            }
            for name, count in self.styles.items()
        ]


def render_summary(result: AugmentResult) -> str:
    """Return the table at the end of a run: counts by style, refusals by reason, and the fix for a short corpus."""
    lines = [
        f"{result.n_documents} documents, {result.n_passages} passages -> {result.n_rows} rows in {result.corpus_path}",
        *filter(None, [cut_note(result.n_cut, result.n_passages, "augment.passage_tokens")]),
        "",
        f"{'style':<16}{'asked':>8}{'got':>8}{'texts':>8}{'refused':>9}{'failed':>8}",
    ]
    for name, count in result.styles.items():
        row = (
            f"{name:<16}{count.asked:>8}{count.got:>8}{count.texts:>8}{sum(count.refused.values()):>9}{count.failed:>8}"
        )
        reasons = ", ".join(f"{reason} {number}" for reason, number in count.refused.items())
        # With one style the list below has the same counts.
        lines.append(f"{row}  {reasons}" if reasons and len(result.styles) > 1 else row)
        if count.nothing:
            lines.append(f"{'':<16}{count.nothing:>8}  of them answered NONE: there was nothing to write")
        for need, number in count.skipped.items():
            lines.append(f"{'':<16}{number:>8}  {_passages(number)} skipped: {SKIPPED[need]}")
    if result.repairs:
        repairs = ", ".join(f"{_REPAIRS[name]} {n}" for name, n in result.repairs.items())
        lines += ["", f"repaired answers: {repairs}"]
    for code, number in result.languages.items():
        if off := language_of(code).not_checked:
            lines.append(f"not checked in {number} answers ({code or 'language not clear'}): {', '.join(off)}")
    if result.refused:
        lines += ["", f"answers refused (each with its text in {result.rejected_path}):"]
        lines += [f"{number:>8}  {reason}" for reason, number in result.refused.items()]
    if result.failed:
        lines += ["", f"rewritings without an answer (each in {result.failures_path}):"]
        lines += [f"{number:>8}  {error}" for error, number in result.failed.items()]
    lines.append("")
    if result.sft_path:
        lines.append(f"prompts with completions, and conversations: {result.sft_path}")
    line = f"{result.n_sent} requests sent in this run, {result.n_cached} answered from the cache"
    if result.tokens_in or result.tokens_out:
        thinking = f", {result.tokens_thinking:,} of them thinking" if result.tokens_thinking else ""
        line += f"; {result.tokens_in:,} tokens in, {result.tokens_out:,} out{thinking}"
    lines.append(line)
    lines += render_endpoints(result.endpoints)
    if result.judge:
        lines.append(render_judge_score(result.judge))
    if result.cost:
        thinking = f"; {result.cost_of_thinking:.4f} of it for thinking" if result.cost_of_thinking else ""
        lines.append(f"cost {result.cost:.4f}, everything answered into {result.run_dir} included{thinking}")
    if result.cost_note:
        lines.append(result.cost_note)
    if result.out_of_budget:
        lines.append("Stopped before the budget was exceeded.")
    if result.coverage:
        lines.append(render_coverage(result.coverage))
    if result.contamination:
        lines.append(render_contamination(result.contamination))
    lines += _short_lines(result)
    return "\n".join(lines)


def _passages(n: int) -> str:
    return "passage" if n == 1 else "passages"


def _short_lines(result: AugmentResult) -> list[str]:
    """Return the number of missing rewritings and what to do; nothing for a complete result."""
    if not result.short:
        return []
    n_short = result.asked - result.got - sum(count.nothing for count in result.styles.values())
    fixes = ["run again for what failed"] if result.failed else []
    if result.refused:
        fixes.append(
            f"{next(iter(result.refused))}: read {result.rejected_path}, raise augment.max_attempts, or take another model"
        )
    return [f"Short by {n_short}" + (f": {'; '.join(fixes)}." if fixes else ".")]


_REPAIRS: Mapping[str, str] = {
    "fence": "code fence taken off", "preamble": "words before the text taken off", "closing": "words after it taken off",
    "label": "label or title taken off", "split": "several texts in one answer parted", "loop": "repeated sentences taken off",
    "item": "items that add a fact taken off",
}  # fmt: skip
"""Name of a repair -> its words in the summary."""
