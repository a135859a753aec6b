"""Results of an evaluation (a study with one seed) and a study. Pages compute none of them."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from kinject.types import (
    AboveZero,
    Advice,
    Amount,
    Count,
    Difference,
    Fraction,
    FromOne,
    HeldBits,
    JudgeResult,
    Price,
    PublishedResult,
    Tabular,
    Written,
    first_few,
)

Kind = Literal["evaluation", "study"]
Role = Literal["learning", "retention", "unanswerable", "baseline"]
Verdict = Literal["shown", "opposite shown", "not shown", "cannot be tested"]
Interval = Literal["Wilson", "Wilson over documents and seeds"]
"""How the 95% interval of an accuracy was computed: the second where documents have several
questions, or arms several seeds."""
Test = Literal["McNemar", "sign flips", "t over documents and seeds"]
"""The test of a difference: with one question a document and one seed an arm, several questions,
several seeds."""
Outcome = Literal["right", "wrong", "abstained", "answered"]
"""Outcomes of a written answer. right, wrong and abstained are parts of a whole: to abstain is
right where a question has no answer, and elsewhere a part of its own. answered: the wrong ones
among the questions that have no answer."""
Scope = Literal["method", "these models"]
"""The scope of a difference: the way of training with any seed, or (one seed of a trained arm)
these models only."""

ALPHA = 0.05
FEWEST = 10
"""Effective documents (a question without one counts alone) below which nothing is judged: so few
represent no others."""
MARGIN = 0.05
"""A difference that matters. Below it on both sides of a 95% interval, two accuracies are called
alike."""


def fewest_for(family: int) -> int:
    """Return how many documents it takes to judge a difference among `family` comparisons.

    Of n documents the smallest p of sign flips is 2 to the power 1 - n, and Holm's first p is
    `family` times as large.
    """
    # The next whole number: p must be below 5%, not equal to it.
    return max(FEWEST, math.floor(1 + math.log2(family / ALPHA)) + 1)


def in_these_models(scope: Scope) -> str:
    """Return the words that limit a verdict to the trained models, "" if it is on the method."""
    return "" if scope == "method" else " in these models"


class PromptFormat(NamedTuple):
    """How questions were put to a model: the format, the number of few-shot examples, and how
    choices were scored."""

    format: str
    shots: int
    score: str = "sum"


@dataclass(frozen=True, slots=True)
class ArmInfo:
    """One arm: `model` is its base model's name in the report, `trained` whether its weights differ
    from the base's.

    `description` is its description in words. `sweep` names the sweep for which the arm was made,
    "" for an arm of its own. `recipe` holds where its training differs from the study's shared
    recipes (dotted key -> value). `step_matched_to` names the arm whose number of steps (or
    seconds) it was given, "" if it has its own.
    """

    name: str
    model: str
    description: str
    trained: bool
    sweep: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    step_matched_to: str = ""


@dataclass(frozen=True, slots=True)
class Contrast:
    """A difference of accuracies on the same questions: `delta` = this arm - `other`, seeds
    averaged question by question.

    `test` names a test whose p is no larger than `p` (two-sided); `p_holm` is p corrected for every
    comparison of the same family. `low` and `high` bound delta at 95%. `n` counts questions,
    `n_clusters` their source documents (a question without one counts alone), `n_effective`
    documents as far as they count (Kish 1965): fewer where some have most of the questions.
    `accuracy` is this arm's on these questions; the other's is `delta` less. `wrong_to_right` and
    `right_to_wrong` count questions whose answer changed (the majority answer over seeds).
    `can_lose`: the other is above guessing, so that a loss could show. `family` counts the
    comparisons that p_holm is corrected for. None where a number does not exist: one document has
    no variance.
    """

    other: str
    delta: Difference
    low: Difference | None
    high: Difference | None
    p: Fraction | None
    p_holm: Fraction | None
    wrong_to_right: Count
    right_to_wrong: Count
    can_lose: bool
    test: Test
    n: Count
    n_clusters: Count
    n_effective: float
    accuracy: Fraction
    family: FromOne = 1
    scope: Scope = "method"

    @property
    def deciding_p(self) -> float | None:
        """The p that decides: Holm's where there is one."""
        return self.p if self.p_holm is None else self.p_holm

    @property
    def bounds(self) -> tuple[float, float]:
        """`low` and `high`; without an interval -1 and 1, since any difference is possible."""
        if self.low is None or self.high is None:
            return -1.0, 1.0
        return self.low, self.high

    @property
    def too_few(self) -> bool:
        """Whether there are too few documents (or questions) to judge the difference, or for so
        many comparisons."""
        # Nine documents are too few whatever p is (tests/stats/test_statistics.py).
        if self.n_effective < FEWEST:
            return True
        # A difference that passed Holm's correction had documents enough for its family.
        passed = self.deciding_p is not None and self.deciding_p < ALPHA
        return not passed and self.n_effective < fewest_for(self.family)

    @property
    def unit(self) -> str:
        """What `n_clusters` counts: questions, or documents where some have several."""
        return "questions" if self.n_clusters == self.n else "documents"

    @property
    def is_significant(self) -> bool:
        """Whether the deciding p is below 0.05 and there are documents enough to judge."""
        return not self.too_few and self.deciding_p is not None and self.deciding_p < ALPHA


@dataclass(frozen=True, slots=True)
class OutcomeResult:
    """How often written answers had one outcome: `rate` of `n` questions, with the fields of an
    `ArmResult`'s accuracy.

    `answered` counts only the questions that have no answer: how often the model answers one of
    them. The right answers are in the `ArmResult` itself.
    """

    outcome: Outcome
    n: Count
    by_seed: tuple[Fraction, ...]
    rate: Fraction
    low: Fraction
    high: Fraction
    to_base: Contrast | None = None


@dataclass(frozen=True, slots=True)
class Control:
    """An arm's accuracy on the same choices without the question, in the format `format`: what they
    give away by themselves.

    Questions with the same choices cannot be told apart without the question, so each counts with
    the mean of all of them. `to_base` compares this accuracy with the base's. `net` is the arm's
    gain over the base with the question less the gain without it, paired by question: what is
    called learned. Both are None for the base itself.
    """

    format: str
    by_seed: tuple[Fraction, ...]
    accuracy: Fraction
    low: Fraction
    high: Fraction
    to_base: Contrast | None = None
    net: Contrast | None = None


@dataclass(frozen=True, slots=True)
class _AskedArm:
    """One arm asked the `n` questions of one set in one prompt format."""

    model: str
    arm: str
    question_set: str
    role: Role
    format: str
    shots: Count
    k: Count
    n: Count


@dataclass(frozen=True, slots=True)
class ArmResult(_AskedArm):
    """One arm on one question set in one prompt format, over all seeds.

    `by_seed` holds the accuracies in the order of the seeds and `accuracy` their mean; `low` and
    `high` bound it at 95% (`interval` names the method; one document bounds nothing: 0 to 1). An
    arm without training has one seed. `k` > 0: with K retrieved passages before each question. `n`
    counts every question. `n_unscored` of them have no score (`UnscoredResult`) and are left out of
    every other number. `chance` is the mean of 1 / number of choices. `score` names the score
    compared between choices (`kinject.eval.scores`); `mass` is the mean probability on the letters,
    for lettered formats. `to_base` compares with the base without context.
    """

    chance: Fraction
    by_seed: tuple[Fraction, ...]
    accuracy: Fraction
    low: Fraction
    high: Fraction
    interval: Interval
    to_base: Contrast | None
    chosen_k: bool = False
    """Whether this K was chosen on validation questions, or is the only one."""
    to_rag: Contrast | None = None
    """Compares with the base model with retrieval: did training do better (k = 0), or add to
    retrieval (k > 0)?"""
    to_plain: Contrast | None = None
    """Compares a trained arm with its chosen K with the same arm without context: does retrieval
    add to training?"""
    to_closest: Contrast | None = None
    """Compares the best of several trained arms on a learning set with the closest other one
    (`eval.results.with_leaders`)."""
    subject: str = ""
    """Of one subject's questions alone, "" for the whole set: the paper's Table 1 has a row for
    each."""
    score: str = "sum"
    n_documents: Count | None = None
    """The source documents of the questions with a score, a question without one being its own;
    None: not counted."""
    n_effective: float | None = None
    """Documents as far as they count (Kish 1965)."""
    n_correct: Count | None = None
    """With one seed only."""
    n_unscored: Count = 0
    n_cut: Count = 0
    """Questions whose prompt did not fit the model's window and lost tokens (of any seed)."""
    prompt_tokens: float | None = None
    """Tokens of the prompts of a question, by a local model's tokenizer; None: not counted."""
    mass: float | None = None
    written: Written | None = None
    outcomes: tuple[OutcomeResult, ...] = ()
    """Of answers that the model wrote, the outcomes beside right; () for choices, and for one
    subject alone."""
    control: Control | None = None
    """The same choices without the question; None with passages, for written answers, and where
    `eval.control` is off."""

    @property
    def n_scored(self) -> int:
        """The questions with a score, of which `accuracy` and every other number is."""
        return self.n - self.n_unscored

    @property
    def gain(self) -> Contrast | None:
        """The comparison with the base that tells what was learned: beyond the control's, where
        there is one."""
        return self.to_base if self.control is None else self.control.net

    @property
    def without_question(self) -> float:
        """The part of the gain over the base that the choices alone give, from 0 to 1; 0 where
        nothing was gained."""
        rise = None if self.control is None else self.control.to_base
        if rise is None or self.to_base is None or rise.delta <= 0 or self.to_base.delta <= 0:
            return 0.0
        # The choices alone may rise by more than the whole.
        return min(1.0, rise.delta / self.to_base.delta)

    @property
    def too_few(self) -> bool:
        """Whether there are too few effective documents to judge the accuracy."""
        n = self.n_documents if self.n_effective is None else self.n_effective
        return n is not None and n < FEWEST

    @property
    def prompt_format(self) -> PromptFormat:
        """How the questions were asked."""
        return PromptFormat(self.format, self.shots, self.score)

    def outcome(self, name: str) -> OutcomeResult | None:
        """Return the outcome of that name; None if it has none."""
        return next((item for item in self.outcomes if item.outcome == name), None)

    @property
    def wrong(self) -> OutcomeResult | None:
        """How often a written answer was wrong: neither right nor abstained."""
        return self.outcome("wrong")

    @property
    def abstained(self) -> OutcomeResult | None:
        """How often a question that has an answer got none."""
        return self.outcome("abstained")

    @property
    def answered(self) -> OutcomeResult | None:
        """How often a question that has no answer got one."""
        return self.outcome("answered")


# A class of its own: an accuracy that may be None in every result would concern some 50 places
# that format a number; so none of them can print one that does not exist.
@dataclass(frozen=True, slots=True)
class UnscoredResult(_AskedArm):
    """An arm of which no question of a set has a score, so that it has no numbers: `accuracy` is
    always None.

    A question has no score if a log-prob is not finite (the model diverged or overflows), if all
    are equal (it prefers no choice), or if its choices exceed the model's window. `n` counts the
    questions; `seed` is a study's, None in an evaluation.
    """

    score: str = "sum"
    seed: int | None = None
    accuracy: None = None


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One value of a sweep (as in the recipe, and as a label) and the arm that was trained (or
    asked) with it."""

    value: Any
    label: str
    arm: str


@dataclass(frozen=True, slots=True)
class Sweep:
    """The values of one varied `key` (dotted recipe key, ``merge.alpha`` or ``k``) for one base
    model."""

    name: str
    key: str
    model: str
    frontier: bool
    """Whether its points belong on the plot of learning against forgetting."""
    points: tuple[SweepPoint, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A hyperparameter chosen on validation questions before any test question was read.

    `key` is the recipe key, or ``k``. `candidates` are (value, accuracy on validation questions,
    their number); `at_edge`: the best lies at an end of the grid.
    """

    model: str
    key: str
    arm: str
    question_set: str
    candidates: tuple[tuple[Any, float, int], ...]
    chosen: Any
    at_edge: bool


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that the study was set up to test, declared in its recipe, and its verdict.

    `statement` is the claim in words, `finding` the numbers in a sentence with what the difference
    rests on; p is corrected by Holm over the study's claims. `verdict` is "shown" when p_holm <
    0.05 in the claimed direction, for `scope`.
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
    source: str = ""  # the paper whose claim it is
    declared_late: bool = False
    """Whether it was written, or changed, after test questions had been answered."""
    scope: Scope = "method"

    @property
    def words(self) -> str:
        """The verdict in words: ``shown``, or of arms with one seed ``shown in these models``."""
        # The other verdicts claim nothing that had a scope.
        if self.verdict in ("shown", "opposite shown"):
            return f"{self.verdict}{in_these_models(self.scope)}"
        return self.verdict


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one stage of one arm and seed: wall seconds, tokens processed, peak resident
    bytes, money.

    `shared_by` counts the arms and seeds that used it. written_tokens: of paraphrases or own
    answers; teacher_tokens: read by a teacher; work_seconds: of a training with both, also where a
    cache had them, on a CPU processor time.
    """

    arm: str
    model: str
    seed: int | None
    stage: Literal["setup", "augment", "corpus", "train", "merge", "eval"]
    seconds: Amount
    tokens: Count
    peak_bytes: Count
    money: Amount
    shared_by: FromOne
    written_tokens: Count = 0
    teacher_tokens: Count = 0
    work_seconds: Amount = 0.0


@dataclass(frozen=True, slots=True)
class Failure:
    """An arm that could not be finished: the stage, the first line of the error, and the log that
    holds all of it."""

    arm: str
    model: str
    seed: int | None
    stage: str
    message: str
    log: str


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well `arm` predicts the texts of `name`: exp of the mean loss of a token, and bits per
    byte; None: not finite."""

    arm: str
    name: str
    n_texts: Count
    n_tokens: Count
    per_token: AboveZero | None
    bits_per_byte: float | None
    model: str = ""
    by_seed: tuple[AboveZero, ...] = ()
    """In a study; its other numbers are geometric means over the seeds."""
    losses: tuple[float, ...] = ()
    """The summed loss of each text in nats, in the order of the file; in a study its mean over the
    seeds. () where one is not finite, and in older reports."""
    lengths: tuple[Count, ...] = ()
    """The tokens of each text."""


@dataclass(frozen=True, slots=True)
class Recall:
    """For how many of `n` questions of a set (those that name a document) it is among the first `k`
    passages.

    `n_empty` counts the questions that got no passage. `retrieval` names one of study.retrievals,
    "" the shared one.
    """

    question_set: str
    k: Count
    n_found: Count
    n: Count
    n_empty: Count = 0
    retrieval: str = ""


@dataclass(frozen=True, slots=True)
class Shortcuts:
    """What the choices of `n` questions give away to someone who has not read the question.

    `right_known` and `wrong_known` are the fractions of right and wrong choices that stand in the
    documents. The others are the accuracies, expected where several choices are equal, of whoever
    picks: at random among the choices that stand in the documents (`picker`), the `most_frequent`
    there, the `longest`, the `shortest`. `guessing` is the mean of 1 / number of choices.
    """

    question_set: str
    n: Count
    right_known: Fraction
    wrong_known: Fraction
    picker: Fraction
    most_frequent: Fraction
    longest: Fraction
    shortest: Fraction
    guessing: Fraction

    def worst(self) -> tuple[str, float]:
        """Return the strategy with the highest accuracy, in words, and its accuracy."""
        named = {
            "picks among the choices that stand in the documents": self.picker,
            "picks the choice that the documents mention most often": self.most_frequent,
            "picks the longest choice": self.longest,
            "picks the shortest choice": self.shortest,
        }
        words = max(named, key=named.__getitem__)
        return words, named[words]

    def summary(self) -> str:
        """Return the numbers in a sentence."""
        words, accuracy = self.worst()
        return (
            f"{self.question_set}: {self.right_known:.0%} of the right and {self.wrong_known:.0%} "
            f"of the wrong choices stand in the documents; who reads no question and {words} has "
            f"{accuracy:.0%} of {self.n} right, guessing {self.guessing:.0%}"
        )

    def warning(self) -> str:
        """Return a sentence where a strategy that reads no question beats guessing by as much as
        matters, else ""."""
        if self.worst()[1] < self.guessing + MARGIN:
            return ""
        return (
            f"{self.summary()}. Give each question wrong choices that are right answers to others."
        )


@dataclass(frozen=True, slots=True)
class Report(Tabular):
    """All results of an evaluation or a study. `models` are the base models; an evaluation has one,
    its first model.

    `logs` are (model, arm, seed, path of log.jsonl from the run folder) of the training runs.
    `notes` are for the reader (what could not be judged, how K was chosen); `commands` run it
    again. `model_sources` gives the folder or hub name of each base model that the study did not
    make; `about_sets` what kind of questions the sets have (name -> words); `judge` is the
    one that graded written answers. An evaluation leaves empty what only a study has, and the other
    way round.
    """

    kind: Kind
    title: str
    models: tuple[str, ...]
    arms: tuple[ArmInfo, ...]
    results: tuple[ArmResult, ...]
    unscored: tuple[UnscoredResult, ...] = ()
    # An evaluation is a study with one seed.
    seeds: tuple[int, ...] = (0,)
    description: str = ""
    sweeps: tuple[Sweep, ...] = ()
    choices: tuple[Choice, ...] = ()
    claims: tuple[Claim, ...] = ()
    costs: tuple[Cost, ...] = ()
    failures: tuple[Failure, ...] = ()
    perplexities: tuple[Perplexity, ...] = ()
    recalls: tuple[Recall, ...] = ()
    shortcuts: tuple[Shortcuts, ...] = ()
    prices: tuple[Price, ...] = ()
    advice: tuple[Advice, ...] = ()
    published: tuple[PublishedResult, ...] = ()
    held_bits: tuple[HeldBits, ...] = ()
    logs: tuple[tuple[str, str, int, str], ...] = ()
    notes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    written: str = ""
    """When the last of its evaluations was written (ISO 8601)."""
    versions: dict[str, str] = field(default_factory=dict)
    model_sources: dict[str, str] = field(default_factory=dict)
    about_sets: dict[str, str] = field(default_factory=dict)
    judge: JudgeResult | None = None
    # So a report is refused that `to_json` would not have written.
    __pydantic_config__: ClassVar[dict[str, bool]] = {"allow_inf_nan": False}
    ROWS: ClassVar = (
        "results: model arm question_set subject role format shots k n n_unscored accuracy low "
        "high to_base.delta to_base.deciding_p "
        "control.accuracy control.net.delta control.net.low control.net.high "
        "control.net.deciding_p "
        "wrong.rate wrong.to_base.delta wrong.to_base.deciding_p "
        "abstained.rate abstained.to_base.delta abstained.to_base.deciding_p "
        "answered.rate answered.to_base.delta answered.to_base.deciding_p"
    )

    def __repr__(self) -> str:
        """Return five lines, whatever a name holds; all fields fill screens."""
        formats, sets = dict[str, PromptFormat](), dict[str, list[str]]()
        for item in self.results:
            # One number an arm: of the whole set, without passages, in the set's first format.
            first = formats.setdefault(item.question_set, item.prompt_format)
            if item.k == 0 and not item.subject and item.prompt_format == first:
                sets.setdefault(item.question_set, []).append(f"{item.arm} {item.accuracy:.1%}")
        of_sets = [f"{name} ({first_few(texts)})" for name, texts in sets.items()]
        lines = [
            f"{self.kind}: {self.title:.80}",
            f"models: {first_few(self.models)}",
            f"arms: {first_few([arm.name for arm in self.arms])}",
            f"sets: {first_few(of_sets, '; ')}",
            f"{len(self.results)} results, {len(self.failures)} failures; to_frame() has each",
        ]
        return "\n".join(" ".join(line.split()) for line in lines)


def to_json(report: Report) -> dict[str, Any]:
    """Return `report` as JSON values. Halves of surrogate pairs, which UTF-8 cannot hold, become
    U+FFFD."""
    # With NaN the file would not be JSON.
    text = json.dumps(asdict(report), ensure_ascii=False, allow_nan=False)
    # pydantic, which reads the file, refuses half a surrogate pair.
    # They are characters here, because `ensure_ascii=False` escaped none.
    return dict(json.loads(re.sub("[\ud800-\udfff]", "\ufffd", text)))
