"""What a study found, as values: arms, scores over seeds, curves, choices, claims, costs. Written to study.json.

Everything that a page or figure of a study shows stands here; pages compute no statistics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["shown", "opposite shown", "not shown", "cannot be tested"]


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """One arm: `model` is its base model's name in the study, `trained` whether its weights differ from the base's.

    `about` says in words what it is. `curve` names the curve for which the arm was made, "" for an arm of its own.
    `recipe` holds what its training differs in from the study's shared recipes (dotted key -> value). `step_matched_to`
    names the arm whose number of steps (or tokens) it was given, "" where it has its own.
    """

    name: str
    model: str
    about: str
    trained: bool
    curve: str
    recipe: dict[str, Any]
    step_matched_to: str = ""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A difference of accuracies paired by question: `delta` = this - the other, seeds averaged question by question.

    `low` and `high` bound it at 95% (bootstrap over source documents and seeds together); `p` is a two-sided
    sign-flip permutation test over source documents; `p_holm` is p corrected for every comparison of the same family.
    `wrong_to_right` and `right_to_wrong` count questions whose majority answer over seeds changed. `relative` is delta
    over the other's accuracy (the paper's gain), None where that is 0. `smallest` is the smallest difference that as many
    questions show with 80% power, None where there is none.
    """

    other: str
    delta: float
    low: float
    high: float
    p: float
    p_holm: float
    wrong_to_right: int
    right_to_wrong: int
    relative: float | None
    smallest: float | None


@dataclass(frozen=True, slots=True)
class Score:
    """One arm on one question set in one way, over all seeds: `by_seed` are the accuracies, in the order of the seeds.

    `accuracy` is their mean; `low` and `high` bound it at 95% (bootstrap over source documents and seeds). An arm
    without training has one seed. `k` > 0 is the arm with K retrieved passages before each question. `by_subject` holds
    (subject, n, accuracy) where there are several. `to_base` compares with the arm's base model without context.
    """

    model: str
    arm: str
    question_set: str
    role: Literal["learning", "retention", "baseline"]
    format: str
    shots: int
    k: int
    n: int
    chance: float
    by_seed: tuple[float, ...]
    accuracy: float
    low: float
    high: float
    to_base: Contrast | None
    by_subject: tuple[tuple[str, int, float], ...] = ()
    chosen_k: bool = False
    """Whether this K was chosen on validation questions (or is the only one)."""
    to_rag: Contrast | None = None
    """Compares with the base model with its chosen K: did training do better (k = 0), or add to retrieval (k > 0)?"""
    to_plain: Contrast | None = None
    """Compares a trained arm with its chosen K with the same arm without context: does retrieval add to training?"""
    subject: str = ""
    """Of one subject's questions alone, "" for the whole set. The paper's Table 1 has a row for each subject."""


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a curve and the arm that was trained (or asked) with it; `value` as in the recipe, `x` a number.

    `x` is None where values are not numbers (styles): then they are categories in the recipe's order. `control` names the
    step-matched control of this point, "" for none.
    """

    curve: str
    value: Any
    label: str
    x: float | None
    arm: str
    control: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """What was varied: `key` (dotted recipe key, ``merge.alpha`` or ``k``), and its points for one base model."""

    name: str
    key: str
    model: str
    about: str
    log_x: bool
    frontier: bool
    """Whether its points belong on the plot of learning against forgetting."""
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A hyperparameter chosen on validation questions before any test question was read.

    `candidates` are (value, mean validation accuracy, number of questions); `at_edge` says that the best lies at an end of the
    grid; `best_on_test` is the value that the test questions would have chosen, shown as what it is (None where the
    test was not asked with each).
    """

    model: str
    what: str
    arm: str
    question_set: str
    candidates: tuple[tuple[Any, float, int], ...]
    chosen: Any
    at_edge: bool
    best_on_test: Any | None = None


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that the study was set up to test, declared in its recipe, and what the data say of it.

    `statement` is the claim in words, `finding` the numbers in a sentence; p is corrected by Holm over the study's claims.
    `verdict` is "shown" when p_holm < 0.05 in the claimed direction.
    """

    name: str
    statement: str
    verdict: Verdict
    finding: str
    effect: float | None
    low: float | None
    high: float | None
    p: float | None
    p_holm: float | None
    source: str = ""
    """The paper whose claim it is."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage of one arm and seed took: wall seconds, tokens processed, peak resident bytes, money.

    `shared_by` counts the arms and seeds that used it.
    """

    arm: str
    model: str
    seed: int | None
    stage: Literal["prepare", "augment", "corpus", "train", "merge", "eval"]
    seconds: float
    tokens: int
    peak_bytes: int
    money: float
    shared_by: int


@dataclass(frozen=True, slots=True)
class QuestionLine:
    """One question with the share of seeds that answered it rightly, by arm (context-free arms and chosen K)."""

    question_set: str
    question_id: str
    subject: str
    question: str
    choices: tuple[str, ...]
    answer: int
    right: dict[str, float]


@dataclass(frozen=True, slots=True)
class ExposureBin:
    """Questions of an arm grouped by how often training read the document that answers them (times, all wordings)."""

    model: str
    arm: str
    question_set: str
    low: float
    high: float
    n: int
    accuracy: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An arm that could not be finished: the stage, the first line of what went wrong, and the log that holds it all."""

    arm: str
    model: str
    seed: int | None
    stage: str
    message: str
    log: str


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """What one base model, or one arm on it, holds of a question set's facts.

    `exposures` is how often training read the document behind a question, in any wording (mean), None where that was not
    counted (the base). `bits` are in all `n_facts`, with `low` and `high` its 95% interval over documents and seeds;
    `per_parameter` is bits over `parameters`. `most_bits` is what all the facts hold.
    """

    model: str
    arm: str
    question_set: str
    label: str
    """The value of the curve, "" for the base."""
    parameters: int
    exposures: float | None
    by_seed: tuple[float, ...]
    accuracy: float
    chance: float
    n_facts: int
    bits: float
    low: float
    high: float
    most_bits: float
    per_parameter: float


@dataclass(frozen=True, slots=True)
class ScalingFit:
    """A least-squares line through accuracies of single seeds over log2 of what is doubled.

    `slope` is accuracy gained at each doubling, with its 95% interval (Student's t), `intercept` the accuracy at 1.
    `at` names what stays the same: a value of the curve ("" for the base), or a base model.
    """

    question_set: str
    along: Literal["parameters", "exposures"]
    at: str
    n: int
    slope: float
    low: float
    high: float
    intercept: float
    r_squared: float | None


@dataclass(frozen=True, slots=True)
class Scaling:
    """What base models of several sizes hold, and how that grows."""

    points: tuple[ScalingPoint, ...]
    fits: tuple[ScalingFit, ...]


@dataclass(frozen=True, slots=True)
class StudyResult:
    """Everything that a study found. `logs` are (model, arm, seed, path of log.jsonl from the run folder) of the training runs.

    `notes` are for the reader (what could not be judged, how K was chosen); `commands` run it again.
    """

    title: str
    card: str
    seeds: tuple[int, ...]
    models: tuple[str, ...]
    arms: tuple[ArmInfo, ...]
    scores: tuple[Score, ...]
    curves: tuple[Curve, ...]
    choices: tuple[Choice, ...]
    claims: tuple[Claim, ...]
    costs: tuple[Cost, ...]
    questions: tuple[QuestionLine, ...]
    exposures: tuple[ExposureBin, ...]
    failures: tuple[Failure, ...]
    logs: tuple[tuple[str, str, int, str], ...]
    notes: tuple[str, ...]
    commands: tuple[str, ...]
    versions: dict[str, str]
    seconds: float
    model_sources: dict[str, str] = field(default_factory=dict)
    """Base model -> the folder or hub name it was loaded from, where it is not made by the study itself."""
    scaling: Scaling | None = None
