"""From a study's finished stages to its result: scores with intervals, curves, exposures, costs, questions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kinject.disk import read_manifest, read_sealed
from kinject.eval.prompts import WITHOUT_QUESTION
from kinject.eval.statistics import chance, holm, relative_gain, smallest_difference
from kinject.recipe.study_section import StudySection
from kinject.results import (
    ArmInfo,
    Contrast,
    Cost,
    Curve,
    ExposureBin,
    Failure,
    Point,
    QuestionLine,
    Score,
)
from kinject.study.arms import BASE, RAG, Arm, StudyArms, value_label
from kinject.study.executors import LOG
from kinject.study.inference import Sheet, interval, majority_changes, sign_flip_p
from kinject.study.records import Records, Way, subjects_of
from kinject.study.scheduler import StageStatus
from kinject.study.stages import ArmRun
from kinject.types import Question


def make_scores(
    records: Records, arms: Sequence[Arm], roles: Mapping[str, str], chosen_k: Mapping[Any, int]
) -> list[Score]:
    """Return every arm in every way it was asked, then the recipe's own arms by subject where there are several.

    Comparisons are Holm-corrected in families: those of the recipe's own arms, those of curves, those by subject.
    """
    making = _Scoring(records, roles, chosen_k)
    whole = [making.score(arm, way) for arm in arms for way in records.ways(arm.model, arm.name)]
    curves = {(arm.model, arm.name) for arm in arms if arm.sweep}
    parts = [
        making.score(arm, way, subject)
        for arm in arms if not arm.sweep
        for way in records.ways(arm.model, arm.name) if way[1] not in WITHOUT_QUESTION
        for subject in making.subjects(arm, way)
    ]  # fmt: skip
    own = _corrected([score for score in whole if (score.model, score.arm) not in curves])
    varied = _corrected([score for score in whole if (score.model, score.arm) in curves])
    return [*own, *varied, *_corrected(parts)]


_COMPARISONS = ("to_base", "to_rag", "to_plain")


def _corrected(scores: Sequence[Score]) -> list[Score]:
    """Return `scores` with the p of all their comparisons corrected as one family."""
    there = [(at, name) for at, score in enumerate(scores) for name in _COMPARISONS if getattr(score, name) is not None]
    found = list(scores)
    for (at, name), p in zip(there, holm([getattr(scores[at], name).p for at, name in there]), strict=True):
        found[at] = replace(found[at], **{name: replace(getattr(found[at], name), p_holm=p)})
    return found


@dataclass(frozen=True)
class _Scoring:
    records: Records
    roles: Mapping[str, str]
    chosen_k: Mapping[Any, int]

    def subjects(self, arm: Arm, way: Way) -> list[str]:
        """Return the subjects of a set, [] where there are not several."""
        names = list(dict.fromkeys(answer.subject for answer in self.records.answers(arm.model, arm.name, way)))
        return names if len(names) > 1 else []

    def score(self, arm: Arm, way: Way, subject: str = "") -> Score:
        answers = self.records.answers(arm.model, arm.name, way)
        columns = [at for at, answer in enumerate(answers) if not subject or answer.subject == subject]

        def sheet(name: str, k: int) -> Sheet | None:
            other = (*way[:3], k)
            asked = k >= 0 and other in self.records.ways(arm.model, name)
            return self.records.sheet(arm.model, name, other, subject) if asked else None

        own = sheet(arm.name, way[3])
        assert own is not None
        base_k = self.chosen_k.get((arm.model, BASE, way[0]), -1)
        chosen = way[3] > 0 and self.chosen_k.get((arm.model, arm.name, way[0])) == way[3]
        base = sheet(BASE, 0) if arm.trained or way[3] else None
        rag = sheet(BASE, base_k) if arm.trained and (chosen or not way[3]) else None
        plain = sheet(arm.name, 0) if chosen and arm.trained else None
        low, high = interval(own)
        kind: Literal["learning", "retention"] = "retention" if self.roles[way[0]] == "retention" else "learning"
        return Score(
            model=arm.model, arm=arm.name, question_set=way[0], role="baseline" if way[1] in WITHOUT_QUESTION else kind,
            format=way[1], shots=way[2], k=way[3], n=len(columns),
            chance=chance([len(answers[at].log_probs) for at in columns]),
            by_seed=tuple(float(value) for value in own.right.mean(1)), accuracy=own.mean(), low=low, high=high,
            to_base=contrast(own, base, BASE) if base else None,
            by_subject=() if subject else subjects_of(answers, own), chosen_k=chosen,
            to_rag=contrast(own, rag, f"{BASE}{RAG}") if rag else None,
            to_plain=contrast(own, plain, arm.name) if plain else None, subject=subject,
        )  # fmt: skip


def contrast(sheet: Sheet, other: Sheet, name: str) -> Contrast:
    """Return the difference of two sheets on the same questions; `p_holm` is p until a family is known."""
    gained, lost = majority_changes(sheet, other)
    low, high = interval(sheet, other)
    p = sign_flip_p(sheet, other)
    return Contrast(
        other=name, delta=sheet.mean() - other.mean(), low=low, high=high, p=p, p_holm=p, wrong_to_right=gained,
        right_to_wrong=lost, relative=relative_gain(sheet.mean(), other.mean()),
        smallest=smallest_difference(len(sheet.question_ids), gained + lost),
    )  # fmt: skip


def arm_infos(arms: Sequence[Arm]) -> tuple[ArmInfo, ...]:
    """Return what the report says of each arm."""
    found = []
    for arm in arms:
        recipe = dict(arm.overrides)
        if arm.corpus not in ("", "augmented"):
            recipe["corpus"] = arm.corpus
        if arm.alpha is not None:
            recipe["alpha"] = arm.alpha
        found.append(
            ArmInfo(
                arm.name,
                arm.model,
                arm.description,
                arm.trained,
                arm.sweep,
                recipe,
                arm.match_steps_of or arm.match_tokens_of,
            )
        )
    return tuple(found)


def make_curves(section: StudySection, arms: StudyArms) -> list[Curve]:
    """Return each curve on each base model."""
    curves = []
    for (model, name), sweep in arms.sweeps.items():
        item = (section.sweeps or {})[name]
        points = tuple(
            Point(name, point.value, value_label(point.value), _number(point.value), point.arm, item.control or "")
            for point in sweep
        )
        curves.append(Curve(name, item.key, model, item.description, item.log_x, item.frontier, points))
    return curves


def _number(value: Any) -> float | None:
    """Return the number that a value is, or the total of a mapping's one number (styles: {paraphrase: 4})."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return None


def make_costs(runs: Sequence[ArmRun], status: StageStatus) -> list[Cost]:
    """Return what each finished stage of each arm took. A shared stage stands with every arm that used it."""
    users: dict[str, int] = {}
    for run in runs:
        for identity in {stage.id for stage in run.all_stages}:
            users[identity] = users.get(identity, 0) + 1
    return [
        Cost(
            arm=run.arm.name, model=run.arm.model, seed=run.seed if run.arm.trained else None,
            stage=stage.kind, seconds=done["seconds"], tokens=done["tokens"],  # type: ignore[arg-type]
            peak_bytes=done["peak_bytes"], money=done["money"], shared_by=users[stage.id],
        )
        for run in runs for stage in run.all_stages if (done := status.done.get(stage.id)) is not None
    ]  # fmt: skip


def make_failures(runs: Sequence[ArmRun], status: StageStatus) -> list[Failure]:
    """Return the arms and seeds that are missing, each with the stage that failed."""
    found = []
    for run in runs:
        failure = status.first_failure(run.all_stages)
        if failure is not None:
            stage, why = failure
            arm = run.arm
            found.append(
                Failure(arm.name, arm.model, run.seed, stage.kind, why, str(stage.folder / LOG))
            )  # fmt: skip
    return found


def question_lines(
    records: Records, arms: Sequence[Arm], questions: Mapping[str, Sequence[Question]], chosen_k: Mapping[Any, int]
) -> list[QuestionLine]:
    """Return each test question with the share of seeds that had it right, by arm (on the first base model)."""
    model = arms[0].model
    columns: dict[str, dict[str, dict[str, float]]] = {}
    for arm in (arm for arm in arms if arm.model == model):
        for way in _headline_ways(records, arm, chosen_k):
            sheet = records.sheet(model, arm.name, way)
            label = f"{arm.name}+rag" if way[3] else arm.name
            shares = zip(sheet.question_ids, sheet.right.mean(0), strict=True)
            columns.setdefault(way[0], {})[label] = {identity: float(share) for identity, share in shares}
    return [
        QuestionLine(
            name, question.id, question.subject, question.question, question.choices, question.answer,
            {label: shares[question.id] for label, shares in columns.get(name, {}).items() if question.id in shares},
        )
        for name, own in questions.items() for question in own
    ]  # fmt: skip


def _headline_ways(records: Records, arm: Arm, chosen_k: Mapping[Any, int]) -> Iterator[Way]:
    """Yield each set's first format and shots, without context and with the chosen K."""
    heads: dict[str, Way] = {}
    for way in records.ways(arm.model, arm.name):
        heads.setdefault(way[0], (*way[:3], 0))
    for head in heads.values():
        for k in (0, chosen_k.get((arm.model, arm.name, head[0]), 0)):
            if (*head[:3], k) in records.ways(arm.model, arm.name) and (k == 0 or k != head[3]):
                yield (*head[:3], k)


def make_exposures(records: Records, runs: Sequence[ArmRun]) -> list[ExposureBin]:
    """Return accuracy by how often training read the document that answers a question: bins double in width."""
    grouped: dict[tuple[str, str, str, int], list[float]] = {}
    for run in runs:
        arm, train = run.arm, run.train
        if train is None or arm.alpha is not None or run.seed not in records.seeds(arm.model, arm.name):
            continue
        read: dict[str, float] = read_sealed(train.folder / "exposures.json", "Delete its folder to train again.")
        for way in _headline_ways(records, arm, {}):
            answers = records.found[arm.model, arm.name, run.seed][way]
            sheet = records.sheet(arm.model, arm.name, way)
            row = records.seeds(arm.model, arm.name).index(run.seed)
            for at, answer in enumerate(answers):
                if answer.document_id in read:
                    bin_at = max(0, int(read[answer.document_id])).bit_length()
                    grouped.setdefault((arm.model, arm.name, way[0], bin_at), []).append(float(sheet.right[row, at]))
    return [
        ExposureBin(model, arm, name, 2.0 ** (at - 1) if at else 0.0, 2.0**at, len(own), sum(own) / len(own))
        for (model, arm, name, at), own in sorted(grouped.items())
    ]


def training_log_paths(runs: Sequence[ArmRun], run_dir: Path) -> list[tuple[str, str, int, str]]:
    """Return (model, arm, seed, log.jsonl as seen from `run_dir`) of each finished training run."""
    found = []
    for run in runs:
        train = run.train
        if train is not None and (train.folder / "log.jsonl").is_file():
            path = os.path.relpath(train.folder / "log.jsonl", run_dir)
            found.append((run.arm.model, run.arm.name, run.seed, path))
    return found


def versions_of(runs: Sequence[ArmRun]) -> dict[str, str]:
    """Return the versions that the last finished evaluation was made with."""
    for run in reversed(runs):
        for stage in run.evaluations:
            manifest = read_manifest(Path(stage.folder) / "manifest.json")
            if manifest is not None:
                return dict(manifest["versions"])
    return {}
