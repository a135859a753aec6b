"""The texts that the teacher of context distillation reads (arXiv 2209.15189, 2412.14964, 2602.16093).

The teacher reads a row behind a context, its head, which the student never sees; both then predict the same tokens.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kinject import models
from kinject.corpus.chat import conversation_texts, encode_conversation, prepend_context
from kinject.corpus.packing import PickedRows
from kinject.corpus.passages import split_passages, word_spans
from kinject.corpus.retrieved import Bm25, best_of, with_passages
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.corpus.tokenize import (
    Tokenization,
    TokenRow,
    cached_tokens,
    entry_key,
    split_text,
)
from kinject.disk import content_id
from kinject.documents import document_hashes, read_documents
from kinject.recipe import DistillationSection, DocumentsSection, TrainRecipe
from kinject.types import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TEACHER = -1
"""The number of a token without a prediction of the teacher."""

_FORMAT = 1
"""Format of cached heads. It changes with the rules of the teacher's texts."""
_PASSAGE_TOKENS = 128
"""Most tokens of a passage, where a document does not fit as a whole."""
_TEMPLATE = 16
"""Tokens by which a chat template may lengthen a conversation whose first message is longer."""


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's text for each row of the corpus: `heads[i]`, then the last tokens of `rows[i]`.

    The number of these is kept as `n_left_out` of the head; an empty head means that the row has no teacher. Predictions are
    numbered through all learned tokens of all rows that have one. `key` names all this by its content.
    """

    rows: Sequence[TokenRow]
    heads: Sequence[TokenRow]
    key: str
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Count the predictions of each row."""
        counts = [
            int(np.count_nonzero(np.asarray(row.learned))) if len(head.input_ids) else 0
            for row, head in zip(self.rows, self.heads, strict=True)
        ]
        object.__setattr__(self, "starts", np.cumsum([0, *counts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: Sequence[int]) -> TeacherRows:
        """Return the rows with these numbers only."""
        key = content_id(self.key, hashlib.sha256(np.asarray(indices, dtype=np.int64).tobytes()).hexdigest())
        return TeacherRows(PickedRows(self.rows, indices), PickedRows(self.heads, indices), key)

    def has_teacher(self, index: int) -> bool:
        """Return whether the row with this number has a teacher."""
        return bool(self.starts[index] < self.starts[index + 1])

    def numbers(self, index: int) -> npt.NDArray[np.int64]:
        """Return the number of the prediction of each token of a row, `NO_TEACHER` where there is none."""
        learned = np.asarray(self.rows[index].learned, dtype=np.bool_)
        if not self.has_teacher(index):
            return np.full(len(learned), NO_TEACHER, dtype=np.int64)
        return np.where(learned, self.starts[index] + np.cumsum(learned) - 1, NO_TEACHER)

    def count_read(self) -> int:
        """Return the tokens that the teacher reads."""
        read = [index for index in range(len(self)) if self.has_teacher(index)]
        return sum(len(self.heads[index].input_ids) + self.heads[index].n_left_out for index in read)

    def head(self, index: int) -> list[int]:
        """Return the tokens that only the teacher reads."""
        ids: list[int] = np.asarray(self.heads[index].input_ids).tolist()
        return ids

    def tail(self, index: int) -> list[int]:
        """Return the tokens of a row that the teacher reads behind the head."""
        ids: list[int] = np.asarray(self.rows[index].input_ids).tolist()
        return ids[len(ids) - self.heads[index].n_left_out :]

    def learned_in_tail(self, index: int) -> list[int]:
        """Return the indices of the learned tokens in the tail of a row."""
        n_tail = self.heads[index].n_left_out
        indices: list[int] = np.flatnonzero(np.asarray(self.rows[index].learned)[-n_tail:]).tolist()
        return indices


@dataclass(frozen=True)
class HeadWriter:
    """Makes the head of each row of a corpus.

    `documents` are the texts of documents by id, `others` another text of each. `window` is the most tokens that the teacher
    reads (None: any number); of a document that leaves no room for the row it reads the passages nearest to the row.
    """

    section: DistillationSection
    tokenizer: PreTrainedTokenizerBase
    tokenization: Tokenization
    window: int | None
    documents: Mapping[str, str]
    others: Mapping[str, str]

    def heads(self, rows: Iterable[CorpusRow], tokens: Iterable[TokenRow]) -> Iterator[TokenRow]:
        """Yield the head of each row; an empty one if it has no context, or if head and text exceed the window."""
        for row, token_row in zip(rows, tokens, strict=True):
            head, n_tail = self._head(row, token_row)
            if self.window is not None and len(head) + n_tail > self.window:
                head, n_tail = [], 0
            yield TokenRow("", "", "", head, [False] * len(head), n_tail)

    def _head(self, row: CorpusRow, token_row: TokenRow) -> tuple[list[int], int]:
        """Return (the tokens of the head, how many tokens of the row follow it)."""
        if row.shape == "messages":
            return self._head_of_conversation(row, token_row, self._context(row, len(token_row.input_ids) + _TEMPLATE))
        begin = [self.tokenizer.bos_token_id] if self.tokenization.bos else []
        first: list[int] = []
        if row.shape == "text" and self.tokenization.second_part:
            ids = self._ids(row.text)
            first = ids[: split_text(row, ids, self.tokenizer)]
        context = self._context(row, len(first) + len(token_row.input_ids))
        before = [*(self._ids(context) if context else []), *first]
        return ([*begin, *before], len(token_row.input_ids) - len(begin)) if before else ([], 0)

    def _context(self, row: CorpusRow, n_tokens: int) -> str:
        """Return the text before a row of `n_tokens`: its document, or for the document itself another text of it.

        It is "" without a document, and where no passage of it fits.
        """
        document = self.documents.get(row.document_id, "") if self.section.context != "beginning" else ""
        if row.shape == "text" and row.text == document:
            document = self.others.get(row.document_id, "")
        limits = [self.section.context_tokens, None if self.window is None else self.window - n_tokens]
        room = min((limit for limit in limits if limit is not None), default=None)
        if not document:
            return ""
        full_text = with_passages([document], "")
        if room is None or len(self._ids(full_text)) <= room:
            return full_text
        words = row.text or f"{row.prompt}{row.completion}" or "\n".join(text for _, text in conversation_texts(row))
        return self._nearest(document, words, room)

    def _nearest(self, document: str, words: str, room: int) -> str:
        """Return the passages of a document that are nearest to `words`, in their order, of at most `room` tokens."""
        n_tokens = max(1, min(_PASSAGE_TOKENS, room // 2))
        spans = self._spans if self.tokenizer.is_fast else word_spans
        passages = [p.text for p in split_passages(Document("", "", document, ""), n_tokens, spans)]
        chosen: list[int] = []
        for index in best_of(Bm25(passages).scores(words), len(passages)):
            n = len(self._ids(with_passages([passages[index]], "")))
            if n <= room:
                room -= n
                chosen.append(index)
        return with_passages([passages[index] for index in sorted(chosen)], "")

    def _head_of_conversation(self, row: CorpusRow, token_row: TokenRow, context: str) -> tuple[list[int], int]:
        """Return the same for a conversation: the context is in front of the user's first message."""
        turns = prepend_context(row.messages, context) if context else None
        if turns is None:
            return [], 0
        ids = encode_conversation(
            dataclasses.replace(row, messages=tuple(turns)), self.tokenizer, self.tokenization.chat
        )[0]
        student = np.asarray(token_row.input_ids).tolist()
        n_tail = next(
            (n for n, (a, b) in enumerate(zip(reversed(ids), reversed(student), strict=False)) if a != b), len(student)
        )
        n_tail = min(n_tail, len(student) - 1, len(ids) - 1)
        first = int(np.argmax(np.asarray(token_row.learned)))
        return (ids[:-n_tail], n_tail) if n_tail >= len(student) - first else ([], 0)

    def _spans(self, text: str) -> list[tuple[int, int]]:
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(encoded["offset_mapping"])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def teacher_rows(
    recipe: TrainRecipe, corpus: CorpusFile, tokens: Sequence[TokenRow], tokenizer: PreTrainedTokenizerBase,
    tokenization: Tokenization,
) -> TeacherRows | None:  # fmt: skip
    """Return the teacher's text for each row of `corpus`; None for another method.

    Raises `RecipeError` if no row has a context.
    """
    if recipe.method != "distill":
        return None
    section, path = section_of(recipe), recipe.model.path
    window = models.window_of(models.load_config(path, recipe.model.revision)) if path is not None else None
    reads = section.context, section.context_tokens, document_inputs(teacher_documents(recipe), recipe.documents)
    key = entry_key(corpus.cache_key, tokenizer, tokenization, "teacher", _FORMAT, window, *reads)

    def make() -> Iterator[TokenRow]:
        reads_documents = section.context != "beginning"
        documents = document_texts(section.documents, recipe.documents, corpus) if reads_documents else {}
        others = _other_texts(corpus) if reads_documents else {}
        return HeadWriter(section, tokenizer, tokenization, window, documents, others).heads(corpus, tokens)

    heads = cached_tokens(Path(recipe.corpus.cache_dir), key, make, "")
    read = TeacherRows(tokens, heads, key)
    if not read.starts[-1]:
        fault = (
            f"{section.context}: no row of {recipe.corpus.path} has a context that fits into the model's window. Rows need a "
            "document_id, and the documents must be in the corpus (origin: original) or at distillation.documents; context: "
            "beginning needs none."
        )
        raise recipe.error("distillation.context", fault)
    return read


def section_of(recipe: TrainRecipe) -> DistillationSection:
    """Return the section of a recipe, or its defaults."""
    return recipe.distillation or DistillationSection()


def teacher_documents(recipe: TrainRecipe) -> str | None:
    """Return the path of the documents that a recipe names for its teacher; None for those of the corpus, or for none."""
    section = section_of(recipe)
    return section.documents if section.context != "beginning" else None


def document_inputs(path: str | None, settings: DocumentsSection) -> dict[str, str]:
    """Return the hashes of the documents at `path`, a key of the recipe; {} for those of the corpus itself (None)."""
    return document_hashes(Path(path), settings) if path is not None else {}


def document_texts(path: str | None, settings: DocumentsSection, corpus: CorpusFile) -> dict[str, str]:
    """Return the texts of the documents at `path` by id; without a path those of the corpus (origin: original)."""
    if path is not None:
        return {document.id: document.text for document in read_documents(Path(path), settings)}
    documents: dict[str, str] = {}
    for row in corpus:
        if row.shape == "text" and row.document_id and row.origin == "original":
            documents.setdefault(row.document_id, row.text)
    return documents


def _other_texts(corpus: CorpusFile) -> dict[str, str]:
    """Return the first text of each document in a corpus that is not the document itself."""
    others: dict[str, str] = {}
    for row in corpus:
        if row.shape == "text" and row.document_id and row.origin != "original":
            others.setdefault(row.document_id, row.text)
    return others


def describe_heads(read: TeacherRows) -> str:
    """Return how many rows have a teacher, as a line to print."""
    n = sum(read.has_teacher(index) for index in range(len(read)))
    line = f"distillation: the teacher reads a context before {n:,} of {len(read):,} rows"
    return line if n == len(read) else f"{line}; the others are learned by cross-entropy"
