"""A study's answers, read once: which arm got which question right, by seed and way of asking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kinject.errors import InputError
from kinject.eval.results import is_correct
from kinject.eval.scores import Score, rescored
from kinject.eval.scoring.answers import read_answers
from kinject.study.inference import Sheet
from kinject.types import Answer

Way = tuple[str, str, int, int]
"""Question set, format, shots, K."""


@dataclass
class Records:
    """Answers of finished evaluations: (model, arm, seed) -> way -> one scored answer a question, sorted by id."""

    score: Score
    found: dict[tuple[str, str, int], dict[Way, list[Answer]]] = field(default_factory=dict)
    _sheets: dict[tuple[str, str, Way, str], Sheet] = field(default_factory=dict)

    def read(self, model: str, arm: str, seed: int, folder: Path) -> None:
        """Take in the answers.jsonl of an evaluation. Raises `InputError` or `DiskError` where it is damaged."""
        ways: dict[Way, list[Answer]] = {}
        for answer in read_answers(folder / "answers.jsonl"):
            if answer.format != "perplexity":
                ways.setdefault((answer.question_set, answer.format, answer.shots, answer.k), []).append(answer)
        own = self.found.setdefault((model, arm, seed), {})
        self._sheets.clear()
        for way, answers in ways.items():
            without = ways.get((way[0], "texts-no-question", 0, 0), ())
            asked = self.score if way[1] in ("texts", "hybrid") else "sum"
            if asked == "pmi" and not without:
                raise InputError(f"{folder}: pmi needs the format texts-no-question. Add it to eval.formats.")
            own[way] = sorted(rescored(answers, asked, without), key=lambda answer: answer.question_id)

    def seeds(self, model: str, arm: str) -> list[int]:
        """Return the seeds whose answers are there."""
        return [seed for of, name, seed in self.found if (of, name) == (model, arm)]

    def ways(self, model: str, arm: str) -> list[Way]:
        """Return the ways in which every seed of the arm was asked."""
        seeds = self.seeds(model, arm)
        return [
            way for way in (self.found[model, arm, seeds[0]] if seeds else ())
            if all(way in self.found[model, arm, seed] for seed in seeds)
        ]  # fmt: skip

    def answers(self, model: str, arm: str, way: Way) -> list[Answer]:
        """Return the first seed's answers."""
        return self.found[model, arm, self.seeds(model, arm)[0]][way]

    def sheet(self, model: str, arm: str, way: Way, subject: str = "") -> Sheet:
        """Return what the arm got right in `way`, over all its seeds; with `subject`, on the questions of one subject."""
        key = (model, arm, way, subject)
        if key not in self._sheets and not subject:
            self._sheets[key] = self._make_sheet(model, arm, way)
        elif key not in self._sheets:
            own = [at for at, answer in enumerate(self.answers(model, arm, way)) if answer.subject == subject]
            self._sheets[key] = self.sheet(model, arm, way).part(own)
        return self._sheets[key]

    def _make_sheet(self, model: str, arm: str, way: Way) -> Sheet:
        import numpy as np

        seeds = self.seeds(model, arm)
        first = self.found[model, arm, seeds[0]][way]
        ids = tuple(answer.question_id for answer in first)
        rows = []
        for seed in seeds:
            own = self.found[model, arm, seed][way]
            if tuple(answer.question_id for answer in own) != ids:
                raise InputError(
                    f"{arm}, seed {seed}: {way[0]}: other questions than seed {seeds[0]}. Run the study again."
                )
            rows.append([float(is_correct(answer)) for answer in own])
        return Sheet(np.array(rows), ids, tuple(answer.document_id or f"\0{answer.question_id}" for answer in first))


def subjects_of(answers: Sequence[Answer], sheet: Sheet) -> tuple[tuple[str, int, float], ...]:
    """Return (subject, n, accuracy) of each subject in the order of the answers; () where there are not several."""
    columns: dict[str, list[int]] = {}
    for at, answer in enumerate(answers):
        columns.setdefault(answer.subject, []).append(at)
    if len(columns) < 2:
        return ()
    return tuple((name, len(own), float(sheet.right[:, own].mean())) for name, own in columns.items())
