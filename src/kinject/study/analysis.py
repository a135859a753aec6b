"""From a study's finished stages to its report: results with intervals, claims and failures."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, log2, prod
from pathlib import Path
from statistics import fmean
from typing import Literal

from kinject.disk import read_jsonl
from kinject.eval.results import (
    ControlAnswers,
    Matrices,
    correct_families,
    correct_family,
    make_result,
    with_leaders,
)
from kinject.executors import LOG
from kinject.models import read_headers
from kinject.question_formats import FORMATS
from kinject.recipe.sections import ClaimSection
from kinject.results import (
    ArmResult,
    Cost,
    Failure,
    Role,
    Scope,
)
from kinject.stats.intervals import Bounded, difference_bounds, wilson
from kinject.stats.matrix import CorrectnessMatrix
from kinject.study.arms import BASE, Arm
from kinject.study.planner import ArmRun
from kinject.study.records import AskSetting, Records
from kinject.study.scheduler import StageStatus
from kinject.types import RAG, ArmName, HeldBits, Price, PublishedResult

_PAPERS = Path(__file__).parent / "papers"
_ARXIV = re.compile(r"\b\d{4}\.\d{4,5}\b")


def summarize_arms(
    records: Records,
    arms: Sequence[Arm],
    roles: Mapping[str, Role],
    chosen_k: Mapping[tuple[str, str, str], int],
) -> list[ArmResult]:
    """Return every arm in every setting it was asked in, then the recipe's own arms by subject
    where there are several.

    Comparisons are Holm-corrected in families: those of the recipe's own arms, those of sweeps
    (each in two: the headline and the other settings, `correct_families`), those by subject.
    """
    summary = _Summary(records, roles, chosen_k)
    unswept, varied, parts = [], [], []
    for arm in arms:
        for setting in records.settings(arm.model, arm.name):
            result = summary.result(arm, setting)
            if arm.sweep:
                varied.append(result)
                continue
            unswept.append(result)
            if FORMATS[setting.format].shows_question:
                subjects = summary.subjects(arm, setting)
                parts += [summary.result(arm, setting, subject) for subject in subjects]
    trained = {(arm.model, arm.name) for arm in arms if arm.trained}

    def matrix(of: ArmResult) -> CorrectnessMatrix:
        return records.matrix(of.model, of.arm, _setting_of(of))

    def net(of: ArmResult) -> CorrectnessMatrix | None:
        if not records.has_control(of.model, of.arm, _setting_of(of)):
            return None
        return records.matrix(of.model, of.arm, _setting_of(of), net=True)

    return [
        *with_leaders(correct_families(unswept), trained, matrix, net),
        *correct_families(varied),
        *correct_family(parts),
    ]


def _setting_of(result: ArmResult) -> AskSetting:
    return AskSetting(result.question_set, result.format, result.shots, result.k)


@dataclass(frozen=True)
class _Summary:
    records: Records
    roles: Mapping[str, Role]
    chosen_k: Mapping[tuple[str, str, str], int]

    def subjects(self, arm: Arm, setting: AskSetting) -> list[str]:
        """Return the subjects of a set, [] where there are not several."""
        answers = self.records.every_answer(arm.model, arm.name, setting)
        names = list(dict.fromkeys(answer.subject for answer in answers))
        # One subject is the whole set, which has a result already.
        if len(names) == 1:
            return []
        # Questions without a subject are a part of the set, but none that has a name.
        return list(filter(None, names))

    def result(self, arm: Arm, setting: AskSetting, subject: str = "") -> ArmResult:
        """Return the result of an arm in one setting; with `subject`, on that one's questions."""
        records, form = self.records, FORMATS[setting.format]
        scope: Scope = "method"
        if arm.trained and len(records.seeds(arm.model, arm.name)) == 1:
            scope = "these models"
        role = self.roles[setting.question_set]
        if not form.shows_question:
            role = "baseline"
        answers = []
        # Without answers a result has no outcomes beside right, as documented for one subject.
        if not subject:
            answers = records.every_answer(arm.model, arm.name, setting)
        return make_result(
            answers,
            partial(records.matrix, arm.model, arm.name, setting, subject),
            self._compared_with(arm, setting, subject),
            n=records.n_asked(arm.model, arm.name, setting, subject),
            scope=scope,
            control=self._control(arm, setting, subject),
            model=arm.model,
            arm=arm.name,
            question_set=setting.question_set,
            format=setting.format,
            shots=setting.shots,
            k=setting.k,
            role=role,
            n_cut=records.n_cut(arm.model, arm.name, setting, subject),
            chosen_k=self._has_chosen_k(arm, setting),
            score=records.score(setting),
            subject=subject,
        )

    def _has_chosen_k(self, arm: Arm, setting: AskSetting) -> bool:
        """Return whether the setting has passages, as many as were chosen for the arm."""
        if setting.k == 0:
            return False
        return self.chosen_k.get((arm.model, arm.name, setting.question_set)) == setting.k

    def _compared_with(
        self, arm: Arm, setting: AskSetting, subject: str
    ) -> dict[str, tuple[str, Matrices]]:
        """Return what the arm is compared with in `setting`: field of the result -> (name,
        matrices). Those that were not asked are left out."""
        rag = ArmName(BASE, arm.retrieval or RAG)  # with the same passages
        rag_k = self.chosen_k.get((arm.model, rag.answers_of, setting.question_set))
        chosen = self._has_chosen_k(arm, setting)
        candidates: list[tuple[str, str, str, int]] = []  # key, name, answers of, K
        # The base without passages would be compared with itself.
        if arm.trained or setting.k:
            candidates.append(("to_base", BASE, BASE, 0))
        # Of settings with passages only the chosen K is compared: another one was not chosen for
        # its score, and each comparison makes the family larger.
        if arm.trained and rag_k is not None and (chosen or not setting.k):
            candidates.append(("to_rag", str(rag), rag.answers_of, rag_k))
        if arm.trained and chosen:
            candidates.append(("to_plain", arm.name, arm.name, 0))
        others: dict[str, tuple[str, Matrices]] = {}
        for key, name, answers_of, k in candidates:
            other = setting._replace(k=k)
            if other in self.records.settings(arm.model, answers_of):
                matrices = partial(self.records.matrix, arm.model, answers_of, other, subject)
                others[key] = (name, matrices)
        return others

    def _control(self, arm: Arm, setting: AskSetting, subject: str) -> ControlAnswers | None:
        """Return the arm's answers without the question, with those of the base to compare."""
        control = self.records.control(arm.model, arm.name, setting, subject)
        if control is None or arm.name == BASE:
            return control
        base = self.records.control(arm.model, BASE, setting, subject)
        return replace(control, base=base)


def make_prices(
    records: Records,
    arms: Sequence[Arm],
    costs: Sequence[Cost],
    chosen_k: Mapping[tuple[str, str, str], int],
    price: Sequence[float],
) -> list[Price]:
    """Return what each arm of no sweep costs, without passages and with its chosen K, over the sets
    that get passages.

    `price` is study.price.
    """
    prices: list[Price] = []
    for arm in arms:
        if arm.sweep:
            continue
        heads = records.headline_settings(arm.model, BASE, chosen_k)
        sets = {setting.question_set for setting in heads if setting.k}
        own = [cost for cost in costs if (cost.model, cost.arm) == (arm.model, arm.name)]
        training = _training_price(own, price)
        plain, with_passages = [], []
        for setting in records.headline_settings(arm.model, arm.name, chosen_k):
            if setting.question_set not in sets:
                continue
            if setting.k:
                with_passages.append(setting)
            else:
                plain.append(setting)
        for settings in (plain, with_passages):
            if settings:
                found = _price(records, arm, settings, training, price)
                prices.append(_with_break_even(found, arm, prices))
    return prices


def _price(
    records: Records,
    arm: Arm,
    settings: Sequence[AskSetting],
    training: float,
    price: Sequence[float],
) -> Price:
    """Return the price of an arm in `settings`, one a question set, each by its number of
    questions."""
    n = [records.n_asked(arm.model, arm.name, setting) for setting in settings]
    answers = [records.answer_tokens(arm.model, arm.name, setting) for setting in settings]
    of_answer = fmean(answers, n)
    prompts = []
    for setting in settings:
        tokens = records.prompt_tokens.get((arm.model, arm.name, setting))
        if tokens is not None:
            prompts.append(tokens)
    of_prompt = asking = None
    # A mean over some of the sets would be of other questions than that of the answers.
    if len(prompts) == len(settings):
        of_prompt = fmean(prompts, n)
        asking = (of_prompt * price[0] + of_answer * price[1]) / 1000
    k = settings[0].k
    return Price(arm.model, arm.name, k, of_prompt, of_answer, asking, training, None)


def _with_break_even(price: Price, arm: Arm, prices: Sequence[Price]) -> Price:
    """Return `price` compared with that of the base with passages in `prices`, if it is there and
    the arm is trained."""
    if not arm.trained:
        return price
    for other in prices:
        if (other.model, other.arm) == (arm.model, BASE) and other.k:
            pays_after = _pays_after(price.training, price.asking, other.asking)
            return replace(price, pays_after=pays_after)
    return price


def _pays_after(
    training: float, asking: float | None, rag: float | None
) -> int | Literal["never", "within 1%", "not known"]:
    """Return from how many questions on a training pays, against those of the base with passages,
    which cost `rag`."""
    if asking is None or rag is None:
        return "not known"
    if abs(rag - asking) < _ALIKE * rag:
        return "within 1%"
    if asking >= rag:
        return "never"
    return ceil(1000 * training / (rag - asking))


_ALIKE = 0.01
"""The fraction of a price within which two are called alike: passages of one retriever differ by
less from arm to arm."""


def _training_price(costs: Sequence[Cost], price: Sequence[float]) -> float:
    """Return the price of one training: its tokens, what a teacher read and what was written,
    unless it was paid already."""
    tokens_read = tokens_written = tokens_trained = 0
    paid = 0.0
    # Of a seed whose training failed the rest alone is listed.
    trained = [cost.seed for cost in costs if cost.stage == "train" and cost.work_seconds]
    for cost in costs:
        # Of one seed: the price is that of one training.
        if cost.seed not in trained[:1]:
            continue
        tokens_read += cost.teacher_tokens
        if not cost.money:
            tokens_written += cost.written_tokens
        # The arm that this one is matched to is listed too, without seconds of its own.
        if cost.stage == "train" and cost.work_seconds:
            tokens_trained += cost.tokens
        # Of the arm that this one is matched to the money is listed too, but no written tokens.
        if cost.written_tokens:
            paid += cost.money
    tokens = (tokens_read, tokens_written, tokens_trained)
    return paid + sum(n * each for n, each in zip(tokens, price, strict=True)) / 1e6


def make_failures(runs: Sequence[ArmRun], status: StageStatus, records: Records) -> list[Failure]:
    """Return the arms and seeds that are missing, each with the stage that failed, and those that
    diverged."""
    failures = []
    for run in runs:
        failure = status.first_failure(run.all_stages)
        if failure is not None:
            stage, why = failure
            arm = run.arm
            failures.append(
                Failure(arm.name, arm.model, run.seed, stage.kind, why, str(stage.folder / LOG))
            )
        elif run.evaluations and run.seed not in records.seeds(run.arm.model, run.arm.name):
            why, log = "diverged: no question has a score", str(run.evaluations[-1].folder / LOG)
            failures.append(Failure(run.arm.name, run.arm.model, run.seed, "eval", why, log))
    return failures


def make_held_bits(
    results: Sequence[ArmResult],
    n_parameters: Mapping[str, int],
    prompt_format: Callable[[str], tuple[str, int]],
) -> list[HeldBits]:
    """Return the bits that each arm without passages holds of each question set, in the format that
    decides on the set; none unless base models of several sizes can be compared. `n_parameters`
    are those of the base models that are known."""
    if len(set(n_parameters.values())) < 2:
        return []
    found = []
    for result in results:
        head = (result.format, result.shots) == prompt_format(result.question_set)
        is_plain = head and result.k == 0 and not result.subject
        if is_plain and result.model in n_parameters and result.chance > 0:
            found.append(_held_bits(result, n_parameters[result.model]))
    return found


def _held_bits(result: ArmResult, n_parameters: int) -> HeldBits:
    n_facts = result.n - result.n_unscored
    most = n_facts * log2(1 / result.chance)

    def bits(accuracy: float) -> float:
        # Who knows a part of the facts and guesses at the rest is right in this part, and in the
        # chance of the rest.
        known = (accuracy - result.chance) / (1 - result.chance)
        return most * max(known, 0.0)

    return HeldBits(
        model=result.model,
        arm=result.arm,
        question_set=result.question_set,
        n_parameters=n_parameters,
        n_facts=n_facts,
        bits=bits(result.accuracy),
        low=bits(result.low),
        high=bits(result.high),
        most=most,
    )


def count_parameters(folders: Mapping[str, Path]) -> dict[str, int]:
    """Return the parameters of each base model whose weights are in its folder."""
    counts = {}
    for name, folder in folders.items():
        if any(folder.glob("*.safetensors")):
            headers = read_headers(folder).values()
            counts[name] = sum(prod(tensor.shape) for tensor in headers)
    return counts


def training_logs(runs: Sequence[ArmRun], run_dir: Path) -> list[tuple[str, str, int, str]]:
    """Return (model, arm, seed, log.jsonl as seen from `run_dir`) of each finished training run."""
    logs = [(run, run.train.folder / "log.jsonl") for run in runs if run.train is not None]
    return [
        (run.arm.model, run.arm.name, run.seed, os.path.relpath(path, run_dir))
        for run, path in logs
        if path.is_file()
    ]


@dataclass(frozen=True)
class PublishedRow:
    """An accuracy that a paper printed. `model` is the model's name on the hub; `k` is None where
    the paper chose its number of passages."""

    model: str
    arm: str
    question_set: str
    shots: int
    accuracy: float
    n: int
    source: str
    k: int | None = None


def published_by(claims: Iterable[ClaimSection]) -> list[PublishedRow]:
    """Return what the papers printed that the claims name by their arXiv number, as far as it
    ships."""
    numbers: dict[str, None] = {}
    for claim in claims:
        numbers |= dict.fromkeys(_ARXIV.findall(claim.source))
    rows: list[PublishedRow] = []
    for number in numbers:
        path = _PAPERS / f"{number}.jsonl"
        if path.is_file():
            rows += [PublishedRow(**row) for _, row in read_jsonl(path)]
    return rows


def beside_published(
    rows: Sequence[PublishedRow], results: Sequence[ArmResult], sources: Mapping[str, str]
) -> list[PublishedResult]:
    """Return each published accuracy beside the results of the same model, arm, question set and
    shots, one for each format that shows the question; those of nothing that was measured are left
    out. `sources` are the names on the hub of the study's base models."""
    found: list[PublishedResult] = []
    for row in rows:
        found += [_beside(row, result) for result in results if _is_same(row, result, sources)]
    return found


def _beside(row: PublishedRow, result: ArmResult) -> PublishedResult:
    published = Bounded(row.accuracy, *wilson(row.accuracy, row.n))
    own = Bounded(result.accuracy, result.low, result.high)
    low, high = difference_bounds(own, published)
    return PublishedResult(
        model=result.model,
        arm=row.arm,
        question_set=row.question_set,
        shots=row.shots,
        k=result.k,
        format=result.format,
        published=row.accuracy,
        n=row.n,
        source=row.source,
        measured=result.accuracy,
        low=low,
        high=high,
    )


def _is_same(row: PublishedRow, result: ArmResult, sources: Mapping[str, str]) -> bool:
    """Return whether a result is of what a published accuracy is of."""
    # With the K that each chose, where the paper does not name it.
    same_k = result.k == row.k
    if row.k is None:
        same_k = result.k == 0 or result.chosen_k
    arm = ArmName.asked(result.arm, result.k)
    same = (sources.get(result.model), arm, result.question_set, result.shots)
    wanted = (row.model, row.arm, row.question_set, row.shots)
    shows = FORMATS[result.format].shows_question
    return same == wanted and same_k and shows and not result.subject
