"""The values that cross stage boundaries: frozen dataclasses, no I/O, no torch.

Every ``id`` is a content hash (`kinject.disk.content_id`), so the same input gives the same id and a rerun resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, str]
"""One chat message: ``{"role": "system" | "user" | "assistant", "content": text}``."""


@dataclass(frozen=True, slots=True)
class Document:
    """One source text. `source` says where it was read (file and line, or URL); `meta` is carried along unread."""

    id: str
    title: str
    text: str
    source: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Passage:
    """A slice of a document: ``text == document.text[start:end]`` (offsets in characters)."""

    id: str
    document_id: str
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a generator read and wrote; 0 where it does not count them."""

    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What a generator answered: the text, why it stopped (``stop``, ``length``, ...), and what it used."""

    text: str
    finish_reason: str = "stop"
    usage: Usage = Usage()


Generator = Callable[[list[Message], int], Completion]
"""(messages, seed of this sample) -> completion. May cost money; raises `EndpointError` when there is no answer."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One accepted rewriting of a passage; `sample` counts the variants of one passage and style from 0.

    `attempt` answers were refused before it.
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


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question; `answer` is the index of the gold choice.

    `fact_id` names the fact asked for, so that several questions on one fact can be joined; `document_id` names the
    document that answers it ("" where none does).
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    subject: str = ""
    document_id: str = ""
    fact_id: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """How one arm scored one question. Log-probs are stored; accuracy and every other score is derived from them.

    `log_probs[i]` is the summed natural-log probability of choice ``choices[i]``'s continuation tokens given the
    prompt; `n_tokens` and `n_bytes` are that continuation's lengths, for normalised scores. `gold` is the index of
    the right choice. `truncated` counts prompt tokens left out to fit the model's window: few-shot examples first, then
    passages from the last-ranked on, then from the left. `rotation` says by how many places the options were moved
    round before they were lettered (log-probs and counts are in the order asked, so is `gold`); `subject` and
    `document_id` are the question's. `greedy` says of each continuation whether each of its tokens was the likeliest.
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


@dataclass(frozen=True, slots=True)
class Difference:
    """A paired difference to the base arm on the same questions: `delta` in accuracy, exact two-sided McNemar `p`.

    `low` and `high` bound delta at 95% (bootstrap over source documents); `relative` is delta over the base's accuracy,
    the paper's gain; `p_holm` is p corrected for all comparisons of the report; `smallest` is the least difference that
    as many questions would show with 80% power. None where a number does not exist (base without a right answer).
    """

    base_arm: str
    delta: float
    wrong_to_right: int
    right_to_wrong: int
    p: float
    low: float | None = None
    high: float | None = None
    relative: float | None = None
    p_holm: float | None = None
    smallest: float | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """One subject's share of a cell: `n` questions, `n_correct` of them right, Wilson's 95% bounds."""

    name: str
    n: int
    n_correct: int
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of the results: one arm on one question set in one format.

    `arm` is ``model`` or ``model+rag`` with K in `k`; `low` and `high` bound accuracy at 95% (Wilson); `chance` is the
    mean of 1/number of choices; `n` counts every question of the set, `n_unscored` those that could not be scored
    (they count as wrong). `role` is ``learning`` or ``retention``. `score` is what was compared between choices
    (`kinject.eval.scores`). `mass` is the mean probability that lay on the letters, for lettered formats. `subjects`
    stand in the order of the questions, where there are several; `macro` is the mean of their accuracies with its 95%
    bounds (mean, low, high).
    """

    question_set: str
    role: str
    arm: str
    model: str
    format: str
    shots: int
    k: int
    n: int
    n_unscored: int
    n_correct: int
    accuracy: float
    low: float
    high: float
    chance: float
    difference: Difference | None
    score: str = "sum"
    mass: float | None = None
    subjects: tuple[Subject, ...] = ()
    macro: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True)
class Perplexity:
    """How well `model` foretells the held-out texts `name`: exp of the mean loss of a token, and bits of a byte."""

    model: str
    name: str
    n_texts: int
    n_tokens: int
    per_token: float
    bits_per_byte: float


@dataclass(frozen=True, slots=True)
class Recall:
    """For how many of `n` questions of a set (those that name a document) it is among the first `k` passages."""

    question_set: str
    k: int
    n_found: int
    n: int


@dataclass(frozen=True, slots=True)
class Report:
    """What `kinject eval` found: every cell, in the order of the recipe's sets, formats, shots and models."""

    title: str
    cells: tuple[Cell, ...]
    notes: tuple[str, ...] = ()
    perplexities: tuple[Perplexity, ...] = ()
    recalls: tuple[Recall, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What `kinject train` did: `account` counts tokens (see `kinject.corpus.TokenAccount`), `seconds` the training.

    `already_done` means that the run folder held this very run, finished, and nothing was done.
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
