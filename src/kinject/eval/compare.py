"""Finished runs of kinject eval: two or more side by side, and the questions of one parted by
whether its base knows them."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ClassVar

from kinject.corpus.questions import read_questions
from kinject.disk import Row, file_hash, file_name, write_jsonl
from kinject.errors import InputError
from kinject.eval.plan import layout_of
from kinject.eval.results import answers_without_question, correct_family, summarize_arm
from kinject.eval.scores import PMI, SCORES, WRITTEN_SCORES, Score, is_correct, is_scored, rescored
from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, read_answers
from kinject.manifests import EvalManifest, manifest_beside, read_manifest
from kinject.question_formats import format_of
from kinject.results import ALPHA, ArmResult, Contrast
from kinject.terminal import aligned as columns
from kinject.terminal import format_count, rounded_p, show
from kinject.types import RAG, Answer, Question, Tabular

_Setting = tuple[str, str, int, int]


@dataclass(frozen=True, slots=True)
class Run:
    """One run's answers by (question set, format, shots, K), then by arm, both in the order of the
    file."""

    name: str
    settings: dict[_Setting, dict[str, list[Answer]]]
    path: str = ""


@dataclass(frozen=True, slots=True)
class Pair:
    """One comparison: `contrast` is the difference of `name` to `base_name` on the questions of
    both."""

    name: str
    base_name: str
    result: ArmResult
    contrast: Contrast
    n_left_out: int


@dataclass(frozen=True, slots=True)
class Comparison(Tabular):
    """Every comparison of some runs with the first."""

    pairs: tuple[Pair, ...]

    ROWS: ClassVar = (
        "pairs: result.question_set name base_name result.format result.shots result.k result.n "
        "result.accuracy contrast.delta contrast.low contrast.high contrast.deciding_p"
    )


def read_run(path: Path, score: Score = "sum") -> Run:
    """Return the answers of a run folder of kinject eval, or of an answers.jsonl.

    Raises `InputError` when nothing there can be compared, `DiskError` when a file cannot be read.
    """
    answers = path / "answers.jsonl" if path.is_dir() else path
    if not answers.exists():
        raise InputError(
            f"{path}: no run. Expected a run folder of kinject eval, or its answers.jsonl."
        )
    if path.is_dir() and manifest_beside(answers) is None:
        show(
            f"{path}: its evaluation was not finished (no manifest.json): answers may be missing",
            file=sys.stderr,
        )
    settings: dict[_Setting, dict[str, list[Answer]]] = {}
    for answer in read_answers(answers):
        if answer.format != PERPLEXITY_FORMAT:
            setting = (answer.question_set, answer.format, answer.shots, answer.k)
            settings.setdefault(setting, {}).setdefault(answer.arm, []).append(answer)
    if not settings:
        raise InputError(f"{path}: holds no answers. Run kinject eval first.")
    _check_score(path, settings, score)
    try:
        scored = {key: _rescored(key, arms, settings, score) for key, arms in settings.items()}
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    # What is beyond the choices by themselves needs no second control.
    own = {key for key in scored if score == PMI and not format_of(key[1]).letters}
    beyond = {(name, format_of(form).control) for name, form, _, _ in own}
    kept = {key: arms for key, arms in scored.items() if key[:2] not in beyond}
    return Run(path.name or str(path), kept, str(path))


def _check_score(path: Path, settings: Iterable[_Setting], score: Score) -> None:
    """Raise `InputError` for a score that there is not, or that no answer of the run in `path`
    has."""
    if score not in SCORES:
        raise InputError(f"--score: found {score!r}, allowed: {', '.join(SCORES)}.")
    written = {format_of(form).generates for _, form, _, _ in settings}
    if written == {False} and score in WRITTEN_SCORES:
        raise InputError(f"--score {score}: is for written answers, and {path} holds none.")
    if written == {True} and score not in ("sum", *WRITTEN_SCORES):
        raise InputError(
            f"--score {score}: is for choices, and {path} holds written answers alone."
        )


def _rescored(
    setting: _Setting,
    arms: Mapping[str, list[Answer]],
    settings: Mapping[_Setting, Mapping[str, list[Answer]]],
    score: Score,
) -> dict[str, list[Answer]]:
    """Return the scores of each arm in a setting, as the report of its run has them: letters are
    compared by their sum; controls keep the log-probs that pmi reads."""
    form = format_of(setting[1])
    if score == PMI and (form.letters or not form.control):
        score = "sum"
    alone = settings.get((setting[0], form.control, 0, 0), {})
    # A control has no passages: that of an arm with passages is the arm without.
    controls = {arm: alone.get(arm.removesuffix(f"+{RAG}"), ()) for arm in arms}
    return {arm: rescored(answers, score, controls[arm]) for arm, answers in arms.items()}


def compare_runs(runs: Sequence[Run]) -> list[Pair]:
    """Return every comparison to the first run, Holm-corrected as one family.

    In each setting (question set, format, shots, K) an arm is compared with the first run's arm of
    the same name, or else with its first arm. Where the first run has no such K it is compared
    without passages. Raises `InputError` when there is nothing to compare, or a question has other
    choices in the other run.
    """
    if len(runs) < 2:
        raise InputError(
            "found one run; give two or more. The report of one compares its own arms."
        )
    (base, *others), pairs = _told_apart(runs), list[Pair]()
    for run in others:
        for setting in sorted(run.settings, key=lambda setting: setting[3]):  # by K
            # Controls come with the settings whose controls they are.
            if not _is_control(setting, run):
                pairs += _pairs_in(setting, run, base)
    if not pairs:
        found = set()
        for run in (base, *others):
            for name, form, shots, _ in run.settings:
                found.add(f"{run.name}: {name}, {form}, {format_count(shots, 'shot')}")
        raise InputError(
            "nothing to compare: no scored question in common that was asked in the same format "
            f"with as many shots. Found {'; '.join(sorted(found))}."
        )
    results = correct_family([pair.result for pair in pairs])
    return [
        replace(pair, result=result, contrast=result.to_base or pair.contrast)
        for pair, result in zip(pairs, results, strict=True)
    ]


def _told_apart(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with their paths as names where two have one name (old/eval, new/eval)."""
    n_of = Counter(run.name for run in runs)
    named = []
    for run in runs:
        if n_of[run.name] > 1:
            run = replace(run, name=run.path or run.name)
        named.append(run)
    return named


def _pairs_in(setting: _Setting, run: Run, base: Run) -> Iterator[Pair]:
    """Yield the comparison of each arm of `run` in a setting with an arm of `base`; with passages,
    where `base` has none, with the arm without."""
    name, form, shots, _ = setting
    there = base.settings.get(setting) or base.settings.get((name, form, shots, 0))
    if not there:
        return
    for arm, answers in run.settings[setting].items():
        base_arm = next(iter(there))
        # Of the same name, or the same arm without passages.
        for same in (arm.removesuffix(f"+{RAG}"), arm):
            if same in there:
                base_arm = same
        names = (f"{run.name}: {arm}", f"{base.name}: {base_arm}")
        controls = (_control_of(run, setting, arm), _control_of(base, setting, base_arm))
        pair = _pair(names, answers, there[base_arm], controls)
        if pair is not None:
            yield pair
        else:
            label = f"{names[0]} and {names[1]} on {name} ({form})"
            show(f"not compared: {label}: no question has a score in both", file=sys.stderr)


def _is_control(setting: _Setting, run: Run) -> bool:
    """Return whether the answers of a setting are the control of others of the run: the same
    choices without the question."""
    name, form, _, _ = setting
    return any(
        other == name and format_of(asked).control == form for other, asked, _, _ in run.settings
    )


def _control_of(run: Run, setting: _Setting, arm: str) -> list[Answer]:
    """Return the arm's answers without the question; [] with passages, or where it gave none."""
    name, form, _, k = setting
    control = format_of(form).control
    # A control has no passages: with them it would differ in more than the question.
    if k or not control:
        return []
    return run.settings.get((name, control, 0, 0), {}).get(arm, [])


def render_comparison(pairs: Sequence[Pair]) -> str:
    """Return the comparisons as text, a block for each question set."""
    blocks = []
    for name in dict.fromkeys(pair.result.question_set for pair in pairs):
        set_pairs = [pair for pair in pairs if pair.result.question_set == name]
        rows = [_HEAD, *(_row(pair) for pair in set_pairs)]
        blocks.append(f"{name}\n{columns(rows, frozenset(range(3, len(_HEAD))))}")
    blocks.append(_LEGEND.format(comparisons=format_count(len(pairs), "comparison")))
    most = max(pair.n_left_out for pair in pairs)
    if most:
        blocks.append(
            f"note: up to {format_count(most, 'question')} left out, in one run only or without "
            "a score in one"
        )
    return "\n\n".join(blocks)


_HEAD = (
    "arm", "to", "format", "shots", "K", "n", "accuracy", "base", "change", "95% interval", "w>r",
    "r>w", "p", "p Holm", "alone", "net", "95% interval", "p Holm",
)  # fmt: skip
_LEGEND = (
    "alone: accuracy on the same choices without the question; net: the change less the change of "
    "that\n"
    "change: paired by question; w>r, r>w: wrong to right, right to wrong\n"
    "interval and p: by source document (a question without one counts alone), in these models: "
    "another training may differ\n"
    "p: the interval's, or a larger one: of signs flipped by document (McNemar for single "
    "questions), or of few documents that change most; p Holm: corrected for {comparisons}"
)


def _row(pair: Pair) -> tuple[str, ...]:
    result, contrast = pair.result, pair.contrast
    return (
        pair.name,
        pair.base_name,
        result.format,
        str(result.shots),
        str(result.k),
        str(result.n),
        f"{result.accuracy:.3f}",
        f"{contrast.accuracy - contrast.delta:.3f}",
        f"{contrast.delta:+.3f}",
        _interval(contrast),
        str(contrast.wrong_to_right),
        str(contrast.right_to_wrong),
        _p(contrast.p),
        _p(contrast.p_holm),
        *_net_columns(result),
    )


def _net_columns(result: ArmResult) -> tuple[str, str, str, str]:
    control = result.control
    if control is None or control.net is None:
        return ("", "", "", "")
    net = control.net
    return f"{control.accuracy:.3f}", f"{net.delta:+.3f}", _interval(net), _p(net.p_holm)


def _interval(contrast: Contrast) -> str:
    return "" if contrast.low is None else f"{contrast.low:+.3f} to {contrast.high:+.3f}"


def _p(p: float | None) -> str:
    if p is None:
        return ""
    return rounded_p(p, ALPHA)


def _pair(
    names: tuple[str, str],
    answers: Sequence[Answer],
    base: Sequence[Answer],
    controls: tuple[Sequence[Answer], Sequence[Answer]],
) -> Pair | None:
    """Return the comparison on the questions of both that have a score in both; None if there is
    none.

    `controls` are the answers of both without the question.
    """
    there = {answer.question_id: answer for answer in base}
    asked = {answer.question_id for answer in answers}
    shared, n_asked = there.keys() & asked, len(there.keys() | asked)
    for answer in answers:
        if answer.question_id in shared:
            _refuse_other_choices(names, answer, there[answer.question_id])
    shared -= {answer.question_id for answer in (*answers, *base) if not is_scored(answer)}
    after = [answer for answer in answers if answer.question_id in shared]
    before = [answer for answer in base if answer.question_id in shared]
    if not after:
        return None
    control = answers_without_question(after, controls[0])
    if control is not None:
        control = replace(control, base=answers_without_question(before, controls[1]))
    result = summarize_arm(after, before, model=before[0].arm, arm=after[0].arm, control=control)
    assert result.to_base is not None
    return Pair(*names, result, result.to_base, n_asked - len(after))


def _refuse_other_choices(names: tuple[str, str], answer: Answer, base: Answer) -> None:
    """Raise `InputError` if two answers with one question's id are to other choices, as far as
    their number and lengths tell, in any order."""
    question = (
        f"{names[0]} and {names[1]}: question {answer.question_id!r} of {answer.question_set}"
    )
    if answer.n_choices != base.n_choices:
        raise InputError(
            f"{question} has {format_count(answer.n_choices, 'choice')} in one and "
            f"{base.n_choices} in the other. Ask both the same questions."
        )
    if _lengths(answer) != _lengths(base):
        raise InputError(
            f"{question} has other choices, or another right one, in one than in the other. Ask "
            "both the same questions."
        )


def _lengths(answer: Answer) -> tuple[list[int], int]:
    """Return the lengths in bytes of the choices, and that of the right one; of a text that the
    model wrote none."""
    if answer.text is not None or len(answer.n_bytes) != answer.n_choices:
        return [], 0
    return sorted(answer.n_bytes), answer.n_bytes[answer.gold]


@dataclass(frozen=True, slots=True)
class KnownSplit:
    """The questions of a set, parted by whether the base answers them: in `known` and `unknown`,
    both files of questions.

    `chosen_by` and `measure_with` are the prompt formats (with shots) that chose, and those that
    did not: with these the base answers `kept` of the known questions. `n_given` others are
    answered, but without the question too: they are in neither file.
    """

    question_set: str
    n_known: int
    n_unknown: int
    n_given: int
    chosen_by: tuple[str, ...]
    measure_with: tuple[str, ...]
    kept: float | None
    known: Path
    unknown: Path


def split_known(run_dir: Path) -> list[KnownSplit]:
    """Write the questions of a finished evaluation that its base knows, and those that it does not,
    as files of questions.

    As in Fine-Tuning or Retrieval? (arXiv 2312.05934, section 3): the model knows a fact if the
    fraction of prompts that it answers correctly exceeds the accuracy of guessing. The prompts are
    every second way of asking without context (a format with a number of examples; every rotation
    of its options is one): a question that was chosen because its answer came out right by luck
    would be lost by any other model, so what the model keeps is to be measured with the other half.
    What all formats share would still choose and measure: a question whose right choice the model
    also picks without the question (the control of any of these formats) is in neither file.
    One without a score is unknown. Raises `InputError` if the run, or a file of its questions,
    cannot be used.
    """
    manifest = read_manifest(run_dir)
    if not isinstance(manifest, EvalManifest):
        raise InputError(
            f"{run_dir}: no finished evaluation. Run kinject eval there first, "
            "with the base as its first model."
        )
    base = next(iter(manifest.recipe.eval.models), "")
    by_set: dict[str, list[Answer]] = {}
    alone: dict[str, list[Answer]] = {}
    for answer in read_answers(run_dir / "answers.jsonl"):
        if answer.arm != base or answer.k or answer.format == PERPLEXITY_FORMAT:
            continue
        form = format_of(answer.format)
        if not form.shows_question:
            alone.setdefault(answer.question_set, []).append(answer)
            continue
        if form.generates:
            # By rule: this reads a finished run and asks no judge.
            (answer,) = rescored([answer], "match")
        by_set.setdefault(answer.question_set, []).append(answer)
    names = manifest.recipe.eval.questions
    for name in names:
        if name not in by_set:
            raise InputError(
                f"{run_dir}: answers.jsonl holds no answers of {base or 'a base'} to {name}. Run "
                "kinject eval again."
            )
    return [
        _split_set(run_dir, manifest, name, by_set[name], alone.get(name, [])) for name in names
    ]


def above_guessing(answers: Sequence[Answer]) -> bool:
    """Return whether more of `answers` to one question are right than guessing would have."""
    return sum(map(is_correct, answers)) > math.fsum(answer.chance for answer in answers)


def is_given_away(alone: Sequence[Answer]) -> bool:
    """Return whether one of the ways of asking without the question picks the right choice more
    often than guessing does; `alone` are one question's answers in all of these ways."""
    ways: dict[_Way, list[Answer]] = {}
    for answer in alone:
        ways.setdefault((answer.format, answer.shots), []).append(answer)
    return any(map(above_guessing, ways.values()))


_Way = tuple[str, int]
"""A prompt format and its number of examples."""


def _split_set(
    run_dir: Path,
    manifest: EvalManifest,
    name: str,
    answers: Sequence[Answer],
    alone: Sequence[Answer],
) -> KnownSplit:
    section = manifest.recipe.eval
    item = section.question_set(name)
    path = Path(item.path)
    if manifest.inputs.get(str(path)) != file_hash(path):
        raise InputError(f"{path}: is not the file that {run_dir} asked. Run kinject eval again.")
    formats = item.formats or section.formats
    ways = _ways_asked(answers, formats)
    if len(ways) < 2:
        form, shots = ways[0]
        raise InputError(
            f"{run_dir}: {name} was asked in one way ({form}, {shots} shots), by which luck looks "
            "like knowledge. Ask in two, as eval.formats=[rotations,texts]: one chooses, the other "
            "measures."
        )
    # Measured as they were chosen, nothing forgotten reads as forgotten in 90.5% of simulated
    # studies, by the other half in 2.2% (docs/figures.md).
    choosing = _by_question(answers, ways[::2])
    measuring = _by_question(answers, ways[1::2])
    # A preference for some choices that a training moves: without the controls nothing forgotten
    # reads as forgotten in 27 to 95%, with them in under 1% (docs/figures.md).
    controls = _by_question(alone, sorted({(answer.format, answer.shots) for answer in alone}))
    asked = {answer.question_id for answer in answers}
    known: list[Row] = []
    unknown: list[Row] = []
    n_given = 0
    kept: list[bool] = []  # for each answer to a known question that did not choose it
    for question in read_questions(path, layout_of(item.layout, formats)):
        if question.id not in asked:  # eval.limit left it out
            continue
        if not above_guessing(choosing.get(question.id, [])):
            unknown.append(_row_of(question))
        elif is_given_away(controls.get(question.id, [])):
            # Among the unknown ones it would make of a moved preference a net gain, in 23%.
            n_given += 1
        else:
            known.append(_row_of(question))
            kept += map(is_correct, measuring.get(question.id, ()))
    known_path, unknown_path = (
        run_dir / part / f"{file_name(name)}.jsonl" for part in ("known", "unknown")
    )
    write_jsonl(known_path, known)
    write_jsonl(unknown_path, unknown)
    labels = [f"{form} ({shots} shots)" if shots else form for form, shots in ways]
    fraction_kept = None
    if kept:
        fraction_kept = sum(kept) / len(kept)
    return KnownSplit(
        name,
        len(known),
        len(unknown),
        n_given,
        chosen_by=tuple(labels[::2]),
        measure_with=tuple(labels[1::2]),
        kept=fraction_kept,
        known=known_path,
        unknown=unknown_path,
    )


def _ways_asked(answers: Sequence[Answer], formats: Sequence[str]) -> list[_Way]:
    """Return the ways in which `answers` were asked, in the order of the recipe's `formats`."""

    def order(way: _Way) -> tuple[int, str, int]:
        form, shots = way
        return formats.index(form) if form in formats else len(formats), form, shots

    return sorted({(answer.format, answer.shots) for answer in answers}, key=order)


def _by_question(answers: Sequence[Answer], ways: Sequence[_Way]) -> dict[str, list[Answer]]:
    """Return the answers with a score that were asked in one of `ways`, by question."""
    found: dict[str, list[Answer]] = {}
    for answer in filter(is_scored, answers):
        if (answer.format, answer.shots) in ways:
            found.setdefault(answer.question_id, []).append(answer)
    return found


def _row_of(question: Question) -> Row:
    """Return the row of a file of questions: the fields that are not empty, and the answer of a
    question with choices."""
    row = {}
    for key, value in asdict(question).items():
        is_needed = bool(value) and key != "answer"
        if is_needed or key == ("answer" if question.choices else "answers"):
            row[key] = value
    return row
