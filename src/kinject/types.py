"""The values that cross stage boundaries: frozen dataclasses, no I/O, no torch.

Every ``id`` is a content hash (`kinject.disk.content_id`), so the same input gives the same id and
a rerun resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

Message = Mapping[str, str]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": text}``."""


_MOST_IN_REPR = 5
"""Names in a line of a result's repr."""


class Tabular:
    """A result with rows. A notebook shows it as a table.

    `ROWS` names the field with the rows' objects, and their attributes that are the columns (dots
    lead into parts); or a class has a `to_rows` of its own.
    """

    __slots__ = ()
    ROWS: ClassVar = ""

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the rows: column -> value, None where a part of the value is None."""
        field_name, _, names = self.ROWS.partition(": ")
        return [
            {name: _attribute(item, name) for name in names.split()}
            for item in getattr(self, field_name)
        ]

    def to_frame(self) -> Any:
        """Return the rows as a `pandas.DataFrame`."""
        from pandas import DataFrame  # type: ignore[import-untyped]

        return DataFrame(self.to_rows())

    def _repr_html_(self) -> str:
        """Return the rows as an HTML table; what they hold is escaped."""
        rows = self.to_rows()
        columns = rows[0] if rows else {}
        head = "".join(f"<th>{escape(str(column))}</th>" for column in columns)
        lines = ("".join(f"<td>{_cell(value)}</td>" for value in row.values()) for row in rows)
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def first_few(texts: Sequence[str], separator: str = ", ") -> str:
    """Return the first of `texts`, joined, and how many more there are."""
    shown = [f"{text:.80}" for text in texts[:_MOST_IN_REPR]]
    n_more = len(texts) - len(shown)
    if n_more:
        shown.append(f"{n_more} more")
    return separator.join(shown)


def _attribute(item: object, name: str) -> Any:
    """Return the attribute of a dotted name; None where a part of it is None."""
    value = item
    for key in name.split("."):
        if value is None:
            return None
        value = getattr(value, key)
    return value


def _cell(value: object) -> str:
    if value is None:
        return ""
    # In full where four digits would need a power of ten, which nobody reads aloud.
    if isinstance(value, float) and abs(value) >= 9_999.5:
        return f"{value:,.0f}"
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


@dataclass(frozen=True, slots=True)
class Document:
    """One source text. `source` is its origin (file and line, or URL); `meta` is passed on
    unread."""

    id: str
    title: str
    text: str
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passage:
    """A slice of a document: ``text == document.text[start:end]`` (offsets in characters).

    `path` is the document's title, if it has one, and the headings above the passage. `header` is
    the head of the table in which the passage begins, if it is before the passage. `cut`: the
    passage ends inside a sentence, a table row or a code block that is longer than a passage.
    """

    id: str
    document_id: str
    start: int
    end: int
    text: str
    path: tuple[str, ...] = ()
    header: str = ""
    cut: bool = False

    @property
    def shown(self) -> str:
        """The text for a writer or a retriever: below the head of its table if it begins inside
        one."""
        return f"{self.header}\n{self.text}" if self.header else self.text


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the prompt and of the answer; 0 if the generator does not count them.

    `tokens_thinking` are those of `tokens_out` that a reasoning model spent on its thinking.
    """

    tokens_in: int = 0
    tokens_out: int = 0
    tokens_thinking: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.tokens_in + other.tokens_in,
            self.tokens_out + other.tokens_out,
            self.tokens_thinking + other.tokens_thinking,
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of a generator: the text, the reason for its end (``stop``, ``length``, ...), and
    the tokens used.

    `thinking` is what a reasoning model wrote before its answer.
    """

    text: str
    finish_reason: str = "stop"
    usage: Usage = Usage()
    thinking: str = ""


@dataclass(frozen=True, slots=True)
class Variant:
    """One accepted paraphrase of a passage; `sample` counts the variants of one passage and style
    from 0.

    `attempt` is the number of answers that were refused before it. `more` are the other accepted
    texts of the same answer. An accepted NONE has an empty text.
    """

    id: str
    passage_id: str
    document_id: str
    style: str
    sample: int
    text: str
    generator: str
    prompt_hash: str
    usage: Usage
    checks: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    more: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts of the answer, none for NONE."""
        return (self.text, *self.more) if self.text else ()


@dataclass(frozen=True, slots=True)
class Question:
    """A question with choices (`answer` is the index of the gold one), or an open one with
    `answers`, or both.

    `answers` are the accepted texts, the first one is shown in examples; an open question without
    any has no answer: to abstain is correct. With `checks` (`kinject.corpus.grading`: name ->
    argument) the text of the answer must pass all of them. `messages` are the turns of a chat
    before the question. `fact_id` names its fact, so that several questions on one fact can be
    joined; `document_id` names the document that answers it ("" if none does). `about` says what
    kind of question it is, for the report.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""
    document_id: str = ""
    fact_id: str = ""
    answers: tuple[str, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    about: str = ""

    @property
    def accepted(self) -> tuple[str, ...]:
        """The texts that are correct answers: `answers`, else the gold choice; () for a question
        without an answer."""
        return self.answers or self.choices[self.answer : self.answer + 1]

    @property
    def is_answerable(self) -> bool:
        """Whether any answer is correct; without one, to abstain is."""
        return bool(self.accepted or self.checks)


@dataclass(frozen=True, slots=True)
class Answer:
    """The scores of one arm on one question. Log-probs are stored; accuracy and every other score
    is derived from them.

    `log_probs[i]` is the summed natural-log probability of choice ``choices[i]``'s continuation
    tokens given the prompt; `n_tokens` and `n_bytes` are that continuation's lengths, for
    normalised scores. `gold` is the index of the correct choice. `truncated` counts prompt tokens
    left out to fit the model's window: few-shot examples first, then passages from the last-ranked
    on, then from the left. `rotation` is the number of positions by which the choices were rotated
    before they were lettered (log-probs, counts and `gold` are in that order); `subject` and
    `document_id` are the question's. `greedy` is, for each continuation, whether each of its tokens
    was the likeliest.

    An answer that the model wrote has its `text` (as it came, up to a stop string), its number of
    tokens in `n_tokens`, the `accepted` texts or the question's `checks`, and no log-probs.
    `choices` are the options whose letter it was to write, () if it was to write a text.
    `n_thinking` counts the tokens of thinking before it, and `thinking_cut` marks thinking that did
    not end by itself. `correct` is its score (`kinject.eval.scores.rescored`); it is not stored.
    `grade` is the judge's (correct, wrong, abstained), "" without one; it is stored in
    grades.jsonl. `choice_set` identifies the choices, whatever their order, of an answer without
    the question; "" with the question.
    """

    question_id: str
    question_set: str
    arm: str
    format: str
    shots: int
    k: int
    context_ids: tuple[str, ...]
    gold: int
    log_probs: tuple[float, ...]
    n_tokens: tuple[int, ...]
    n_bytes: tuple[int, ...]
    truncated: int = 0
    n_chars: tuple[int, ...] = ()
    subject: str = ""
    document_id: str = ""
    rotation: int = 0
    greedy: tuple[bool, ...] = ()
    text: str | None = None
    accepted: tuple[str, ...] = ()
    checks: Mapping[str, Any] = field(default_factory=dict)
    choices: tuple[str, ...] = ()
    n_thinking: int = 0
    thinking_cut: bool = False
    correct: bool | None = None
    grade: str = ""
    choice_set: str = ""

    @property
    def n_choices(self) -> int:
        """The number of choices, 0 for a text that the model wrote on its own."""
        return len(self.choices if self.text is not None else self.log_probs)

    @property
    def chance(self) -> float:
        """The accuracy of guessing: 1 / number of choices, 0 without choices."""
        return 1 / self.n_choices if self.n_choices else 0.0


@dataclass(frozen=True, slots=True)
class Written:
    """Answers that a model wrote, as fractions of the questions with a score.

    `f1` is SQuAD's F1, None where instructions have no accepted text. `unread`: no letter of an
    option could be read from the text. `n_tokens` is the mean length, `n_thinking` that of the
    thinking before it, `thinking_cut` the fraction whose thinking did not end by itself. `by_rule`:
    right by kinject's own rule, where a judge graded them.
    """

    f1: float | None
    n_tokens: float
    unread: float = 0.0
    n_thinking: float = 0.0
    thinking_cut: float = 0.0
    by_rule: float | None = None


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """The accuracy of the judge `model` of written answers, on planted answers whose grade is
    known.

    `precision` (as if every grade were as frequent), `recall` and the number of answers `planted`
    are by grade; None: it never gave that grade.
    """

    model: str
    precision: Mapping[str, float | None]
    recall: Mapping[str, float | None]
    planted: Mapping[str, Count]


@dataclass(frozen=True, slots=True)
class TrainResult(Tabular):
    """The result of `kinject train`: `account` counts the tokens of an epoch
    (`kinject.corpus.TokenAccount`).

    `n_learned` counts those in the loss over all steps (None: a run of an earlier version),
    `seconds` times the training. `cost` holds work_seconds, those of the training by
    `kinject.process.work_seconds`, and, where there are any, the tokens that a teacher read and the
    model wrote for itself, with the seconds of both (teacher_tokens, teacher_seconds,
    written_tokens, written_seconds), also where a cache had them. `already_done` is True if the run
    folder held this run, finished, and nothing was done. `ended_above_start`: the loss ended far
    above where it began.
    """

    run_dir: str
    model_dir: str
    n_steps: int
    n_epochs: float
    final_loss: float | None
    account: Mapping[str, int]
    seconds: float
    notes: tuple[str, ...] = ()
    already_done: bool = False
    ended_above_start: bool = False
    n_learned: int | None = None
    cost: Mapping[str, float] = field(default_factory=dict)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row."""
        return [
            {
                "run": self.run_dir,
                "steps": self.n_steps,
                "epochs": self.n_epochs,
                "loss": self.final_loss,
                "tokens learned": self.n_learned,
                "seconds": self.seconds,
                "model": self.model_dir,
            }
        ]


RAG = "rag"
"""The name of the shared retrieval (`eval.retrieval`); the others are those of study.retrievals."""


class ArmName(NamedTuple):
    """The name ARM, or ARM+RETRIEVAL of an arm that is asked with the passages of that
    retrieval."""

    arm: str
    retrieval: str = ""

    @classmethod
    def parse(cls, name: str) -> ArmName:
        """Return the parts of a name; one with a comma is a point of a sweep, whose value may hold
        a plus (1e+06)."""
        arm, _, retrieval = name.rpartition("+")
        is_asked = retrieval == RAG or (retrieval and "," not in name)
        if arm and is_asked:
            return cls(arm, retrieval)
        return cls(name)

    @classmethod
    def asked(cls, arm: str, k: int) -> str:
        """Return the name of an arm in results: ARM, or ARM+rag where it gets `k` passages of the
        shared retrieval."""
        return str(cls(arm, RAG if k else ""))

    def __str__(self) -> str:
        return "+".join(filter(None, self))

    @property
    def answers_of(self) -> str:
        """The arm that has the answers: ARM with the shared retrieval, else the whole name."""
        return self.arm if self.retrieval == RAG else str(self)

    @property
    def words(self) -> str:
        """The name in a sentence, as the tables of a report have it: ``base with passages``."""
        if not self.retrieval:
            return self.arm
        return f"{self.answers_of} with passages"


class _Within(NamedTuple):
    """The bounds of a number that is read from a file, for pydantic, which takes 0.05 s to import
    where nothing is read."""

    low: float
    high: float
    allowed: str

    def check(self, value: Any) -> Any:
        if not self.low <= value <= self.high:
            raise ValueError(f"allowed is {self.allowed}")
        return value

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], Any]
    ) -> dict[str, Any]:
        function = {"type": "no-info", "function": self.check}
        return {"type": "function-after", "function": function, "schema": handler(source)}


Fraction = Annotated[float, _Within(-1e-6, 1 + 1e-6, "0 to 1")]
Difference = Annotated[float, _Within(-1 - 1e-6, 1 + 1e-6, "-1 to 1")]
Count = Annotated[
    int, _Within(0, 2**53 - 1, "0 or more, up to the largest integer that a float holds exactly")
]

FromOne = Annotated[int, _Within(1, 2**53 - 1, "1 or more")]
Amount = Annotated[float, _Within(0, 1.7976931348623157e308, "0 or more")]
AboveZero = Annotated[float, _Within(5e-324, 1.7976931348623157e308, "above 0")]


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """An accuracy that a paper printed, over `n` questions, beside this study's in one `format`.

    `low` and `high` bound the difference, measured - published, at 95%. `k` are the passages of the
    measured one.
    """

    model: str
    arm: str
    question_set: str
    shots: Count
    k: Count
    format: str
    published: Fraction
    n: Count
    source: str
    measured: Fraction
    low: Difference
    high: Difference


@dataclass(frozen=True, slots=True)
class Price:
    """What it costs to ask an arm with `k` passages, in the currency of study.price, on the
    questions that get passages.

    `prompt_tokens` and `answer_tokens` are measured, a question; `asking` is the price of 1,000
    questions and `training` that of one training, paraphrases and teacher included; None where
    tokens were not counted. From `pays_after` questions on the arm has cost less than the base with
    passages, or the reason why from none; None: there is nothing to compare it with.
    """

    model: str
    arm: str
    k: Count
    prompt_tokens: float | None
    answer_tokens: float
    asking: float | None
    training: float
    pays_after: int | Literal["never", "within 1%", "not known"] | None


Reason = Literal["better", "alike", "not shown", "too few", "not compared", "not learned"]
"""Why an advice names its first choice, or none."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What one question set advises to someone who decides, by the rules of `kinject.stats.advice`.

    `first` is the first choice, "" where the results decide nothing, `reason` why. `arm` is the
    trained arm that it is about, `points` its difference from the base with passages (where
    retrieval was not tried, from the base). So many more questions would decide it, on so many
    more documents; 0 where it is decided. `forgotten` are the sets on which the arm forgot.
    """

    model: str
    question_set: str
    arm: str
    first: Literal["training", "retrieval", "both", ""]
    reason: Reason
    points: Difference
    n_more: Count = 0
    n_more_documents: Count = 0
    forgotten: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldBits:
    """How many bits of a question set's answers an arm holds, by its choices: a fact that is known
    is worth log2 of the number of choices, and what guessing finds is worth nothing.

    A lower bound: a fact whose value is one of a hundred is worth more than its four choices tell.
    `low` and `high` are by the accuracy's interval; `most` is what all facts are worth.
    """

    model: str
    arm: str
    question_set: str
    n_parameters: FromOne
    n_facts: Count
    bits: float
    low: float
    high: float
    most: float
