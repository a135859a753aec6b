"""Corpus rows to token ids, with what is learned marked, and an account of every token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from kinject.corpus.rows import CorpusRow
from kinject.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 256  # rows that the tokenizer is given at once

IGNORED = -100
"""Label of a token that is read but not learned (PyTorch's cross-entropy skips it)."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One tokenised row: `learned[i]` says whether token i bears loss. The first token never does: nothing precedes it."""

    row_id: str
    document_id: str
    origin: str
    input_ids: Sequence[int] | npt.NDArray[Any]
    learned: Sequence[bool] | npt.NDArray[Any]


@dataclass(slots=True)
class TokenAccount:
    """Where every token of a corpus went: ``source == trained + masked + truncated + dropped``.

    `trained` bear loss; `masked` are read only (prompts, and the first token of each document); `truncated` were cut
    at max_length; `dropped` stand in pieces left out because nothing in them bears loss.
    """

    source: int = 0
    trained: int = 0
    masked: int = 0
    truncated: int = 0
    dropped: int = 0

    @property
    def lost(self) -> int:
        """Tokens that the trainer never sees."""
        return self.truncated + self.dropped

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name."""
        return asdict(self)


@dataclass(frozen=True)
class Tokenization:
    """How rows become tokens: BOS and EOS at document boundaries, and which parts of SFT rows bear loss.

    `completion_only` None means: only the completion of prompt+completion rows. `assistant_only`: only what the
    assistant says in messages.
    """

    bos: bool = True
    eos: bool = True
    completion_only: bool | None = None
    assistant_only: bool = False


def tokenize_rows(
    rows: Iterable[CorpusRow], tokenizer: PreTrainedTokenizerBase, how: Tokenization
) -> Iterator[TokenRow]:
    """Yield each row as tokens. Raises `InputError` when the tokenizer lacks BOS, EOS or a chat template that is needed."""
    _require_boundaries(tokenizer, how)
    waiting = iter(rows)
    while part := list(islice(waiting, _BATCH)):
        texts = [text for row in part for text in _texts(row)]
        flat = iter(tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else ())
        for row in part:
            if row.shape == "messages":
                yield _tokenize_messages(row, tokenizer, how)
                continue
            n_prompt = 0
            if row.shape == "completion":
                n_prompt = len(next(flat)) * (how.completion_only is not False)
            ids = next(flat)
            learned = [index >= n_prompt for index in range(len(ids))]
            if how.bos:
                ids, learned = [tokenizer.bos_token_id, *ids], [False, *learned]
            if how.eos:
                ids, learned = [*ids, tokenizer.eos_token_id], [*learned, True]
            yield _token_row(row, ids, learned)


def _texts(row: CorpusRow) -> tuple[str, ...]:
    """Return what the tokenizer is given for a row: its text, or the prompt and then both parts joined."""
    if row.shape == "messages":
        return ()
    return (row.text,) if row.shape == "text" else (row.prompt, row.prompt + row.completion)


def _token_row(row: CorpusRow, ids: list[int], learned: list[bool]) -> TokenRow:
    return TokenRow(row.id, row.document_id, row.origin, tuple(ids), (False, *learned[1:]))


def _require_boundaries(tokenizer: PreTrainedTokenizerBase, how: Tokenization) -> None:
    for name, wanted in (("bos", how.bos), ("eos", how.eos)):
        if wanted and getattr(tokenizer, f"{name}_token_id") is None:
            raise InputError(f"corpus.{name}: this tokenizer has no {name.upper()} token. Set corpus.{name}: false.")


def _tokenize_messages(row: CorpusRow, tokenizer: PreTrainedTokenizerBase, how: Tokenization) -> TokenRow:
    """Tokenize a conversation through the tokenizer's chat template, which sets its own boundaries.

    With `assistant_only` the learned tokens are those that the template adds between "the assistant is to speak" and
    the end of that turn, its end-of-turn token included.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            "corpus: rows with messages need a chat template, and this tokenizer has none. Set trainer.chat_template_path."
        )
    messages = list(row.messages)
    text = _render(tokenizer, messages, False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: list[int] = encoded["input_ids"]
    if not how.assistant_only:
        return _token_row(row, ids, [True] * len(ids))
    spans = []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            before, after = _render(tokenizer, messages[:index], True), _render(tokenizer, messages[: index + 1], False)
            if not (after.startswith(before) and text.startswith(after.rstrip())):
                raise InputError(
                    f"row {row.id}: the chat template rewrites earlier turns, so the assistant's part cannot be marked. "
                    "Set trainer.assistant_only_loss: false or another chat template."
                )
            spans.append((len(before), len(after)))
    learned = [any(low <= start < high for low, high in spans) for start, _ in encoded["offset_mapping"]]
    return _token_row(row, ids, learned)


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], speak: bool) -> str:
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": speak}
    try:
        return str(tokenizer.apply_chat_template(messages, **options)) if messages else ""
    except Exception as error:  # a template is a program: its expressions raise anything
        raise InputError(
            f"corpus: the tokenizer's chat template cannot be rendered ({str(error)[:200]}). Set trainer.chat_template_path."
        ) from error
