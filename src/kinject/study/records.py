"""A study's answers, read once: the correct ones of each arm, by seed and setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kinject.errors import InputError
from kinject.eval.correctness import CorrectnessMatrix
from kinject.eval.prompts import FROM_TASK, LETTERED, PMI_BASELINE, WITHOUT_QUESTION
from kinject.eval.results import is_correct, is_scored
from kinject.eval.scores import Score, rescored
from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers
from kinject.eval.statistics import moderated
from kinject.results import Subject
from kinject.types import Answer


class AskSetting(NamedTuple):
    """The setting of an evaluation: question set, format, few-shot examples, retrieved passages."""

    question_set: str
    format: str
    shots: int
    k: int


@dataclass
class Records:
    """Answers of finished evaluations: (model, arm, seed) -> setting -> one scored answer a question, sorted by id."""

    score: Score
    by_run: dict[tuple[str, str, int], dict[AskSetting, list[Answer]]] = field(default_factory=dict)
    unscored: list[tuple[str, str, int, AskSetting, int]] = field(default_factory=list)
    """(model, arm, seed, setting, number of questions) where no question has a score: the model diverged."""
    _matrices: dict[tuple[str, str, AskSetting, str], CorrectnessMatrix] = field(default_factory=dict)

    def read(self, model: str, arm: str, seed: int, folder: Path) -> None:
        """Add the answers.jsonl of an evaluation. Raises `InputError` or `DiskError` if it is damaged."""
        settings: dict[AskSetting, list[Answer]] = {}
        for answer in read_answers(folder / "answers.jsonl"):
            if answer.format != PERPLEXITY_FORMAT:
                setting = AskSetting(answer.question_set, answer.format, answer.shots, answer.k)
                settings.setdefault(setting, []).append(answer)
        of_run: dict[AskSetting, list[Answer]] = {}
        self._matrices.clear()
        for setting, answers in settings.items():
            without = settings.get(AskSetting(setting.question_set, PMI_BASELINE, 0, 0), ())
            score = "sum" if setting.format in LETTERED | WITHOUT_QUESTION | FROM_TASK else self.score
            if score == "pmi" and not without:
                raise InputError(f"{folder}: pmi needs the format {PMI_BASELINE}. Add it to eval.formats.")
            merged = sorted(rescored(answers, score, without), key=lambda answer: answer.question_id)
            if any(map(is_scored, merged)):
                of_run[setting] = merged
            else:
                self.unscored.append((model, arm, seed, setting, len(merged)))
        if of_run:
            self.by_run[model, arm, seed] = of_run

    def seeds(self, model: str, arm: str) -> list[int]:
        """Return the seeds with answers."""
        return [seed for of, name, seed in self.by_run if (of, name) == (model, arm)]

    def settings(self, model: str, arm: str) -> list[AskSetting]:
        """Return the settings in which every seed of the arm was evaluated and some question has a score from each."""
        seeds = self.seeds(model, arm)
        return [
            setting for setting in (self.by_run[model, arm, seeds[0]] if seeds else ())
            if all(setting in self.by_run[model, arm, seed] for seed in seeds)
            and self.matrix(model, arm, setting).question_ids
        ]  # fmt: skip

    def answers(self, model: str, arm: str, setting: AskSetting) -> list[Answer]:
        """Return the first seed's answers to the questions of the matrix, those that every seed has a score for."""
        scored = set(self.matrix(model, arm, setting).question_ids)
        return [answer for answer in self._first(model, arm, setting) if answer.question_id in scored]

    def n_asked(self, model: str, arm: str, setting: AskSetting, subject: str = "") -> int:
        """Return the number of questions asked, with a score or without; with `subject`, of that one."""
        return sum(not subject or answer.subject == subject for answer in self._first(model, arm, setting))

    def _first(self, model: str, arm: str, setting: AskSetting) -> list[Answer]:
        return self.by_run[model, arm, self.seeds(model, arm)[0]][setting]

    def matrix(self, model: str, arm: str, setting: AskSetting, subject: str = "") -> CorrectnessMatrix:
        """Return the correct answers of the arm over all its seeds; with `subject`, on one subject's questions.

        Questions that a seed has no score for are left out. What all arms of the setting say of the variance between
        seeds is in `pooled`, but for one subject's.
        """
        key = (model, arm, setting, subject)
        if key not in self._matrices and not subject:
            arms = [name for of, name in dict.fromkeys((of, name) for of, name, _ in self.by_run) if of == model]
            asked = [
                name for name in arms if all(setting in self.by_run[model, name, s] for s in self.seeds(model, name))
            ]
            matrices = {name: self._make_matrix(model, name, setting) for name in asked}
            several = {name: found for name, found in matrices.items() if found.n_seeds > 1 and found.question_ids}
            pooled = moderated([found.seed_variance for found in several.values()])
            for (name, found), variance in zip(several.items(), pooled, strict=True):
                matrices[name] = replace(found, pooled=variance)
            self._matrices |= {(model, name, setting, ""): found for name, found in matrices.items()}
        elif key not in self._matrices:
            answers = self.answers(model, arm, setting)
            columns = [i for i, answer in enumerate(answers) if answer.subject == subject]
            self._matrices[key] = self.matrix(model, arm, setting).part(columns)
        return self._matrices[key]

    def _make_matrix(self, model: str, arm: str, setting: AskSetting) -> CorrectnessMatrix:
        import numpy as np

        seeds = self.seeds(model, arm)
        first = self.by_run[model, arm, seeds[0]][setting]
        ids = tuple(answer.question_id for answer in first)
        rows: list[list[Answer]] = []
        for seed in seeds:
            answers = self.by_run[model, arm, seed][setting]
            if tuple(answer.question_id for answer in answers) != ids:
                raise InputError(
                    f"{arm}, seed {seed}: {setting.question_set}: other questions than seed {seeds[0]}. Run the study again."
                )
            rows.append(answers)
        kept = [i for i in range(len(first)) if all(is_scored(answers[i]) for answers in rows)]
        documents = tuple(first[i].document_id or "" for i in kept)
        correct = np.array([[float(is_correct(answers[i])) for i in kept] for answers in rows])
        chances = tuple(1 / len(first[i].log_probs) for i in kept)
        return CorrectnessMatrix(correct, tuple(ids[i] for i in kept), documents, chances)


def subjects_of(answers: Sequence[Answer], matrix: CorrectnessMatrix) -> tuple[Subject, ...]:
    """Return each subject in the order of the answers; () if there is only one."""
    columns: dict[str, list[int]] = {}
    for i, answer in enumerate(answers):
        columns.setdefault(answer.subject, []).append(i)
    if len(columns) < 2:
        return ()
    return tuple(Subject(name, len(part), float(matrix.correct[:, part].mean())) for name, part in columns.items())
