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
