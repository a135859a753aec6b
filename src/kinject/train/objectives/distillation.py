"""Context distillation (arXiv 2209.15189, 2412.14964, 2602.16093): what the teacher reads, its
predictions, and the loss.

The teacher is the model before training, or another one. It reads a row behind a context, its head,
which the student never sees; both then predict the same tokens. Without a context the head is the
row's first token. It is frozen, so each of its predictions is made once, before training, and kept
in corpus.cache_dir by the content of weights, head and text.

An entry of that cache is a folder: ``starts.bin`` (int64, the first prediction of each row, and
their number), ``log_probs.bin`` (float32) and ``ids.bin`` (uint32), as in `Predictions`, and
``cost.json`` (the tokens that the teacher read and the seconds of that, by `work_seconds`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kinject import models
from kinject.corpus.chat import conversation_texts, encode_conversation, prepend_context
from kinject.corpus.packing import PickedRows
from kinject.corpus.passages import Bm25, best_of, split_passages, with_passages, word_spans
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.corpus.spans import common_beginning
from kinject.corpus.tokenize import (
    IGNORED,
    Tokenization,
    TokenRow,
    cached_entry,
    cached_tokens,
    entry_key,
    mapped,
    split_text,
)
from kinject.disk import content_id, read_json, write_json
from kinject.errors import fault
from kinject.gguf_files import model_folder
from kinject.heap import document_hashes, read_documents
from kinject.process import work_seconds
from kinject.recipe import DistillationSection, DocumentsSection, ModelSection, TrainRecipe
from kinject.recipe.method_rules import distillation_of
from kinject.terminal import Progress, format_count
from kinject.train.loss import Objective, Predictions, as_frozen, divergence, log_probs_of
from kinject.types import Document

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_TEACHER = -1
"""The number of a token without a prediction of the teacher."""

_HEADS_FORMAT = 3
"""Format of cached heads. It changes with the rules of the teacher's texts."""
_PASSAGE_TOKENS = 128
"""Most tokens of a passage, where a document does not fit as a whole."""
_TEMPLATE = 16
"""Tokens by which a chat template may lengthen a conversation whose first message is longer."""


@dataclass(frozen=True)
class TeacherRows:
    """The teacher's text for each row of the corpus: `heads[i]`, then the last tokens of `rows[i]`.

    The number of these is kept as `n_left_out` of the head; an empty head means that the row has no
    teacher. Predictions are numbered through all learned tokens of all rows that have one. `key`
    names all this by its content.
    """

    rows: Sequence[TokenRow]
    heads: Sequence[TokenRow]
    key: str
    starts: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        """Count the predictions of each row."""
        counts = []
        for row, head in zip(self.rows, self.heads, strict=True):
            has_teacher = len(head.input_ids) > 0
            counts.append(int(np.count_nonzero(np.asarray(row.learned))) if has_teacher else 0)
        object.__setattr__(self, "starts", np.cumsum([0, *counts], dtype=np.int64))

    def __len__(self) -> int:
        return len(self.rows)

    def pick(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> TeacherRows:
        """Return the rows with these numbers only."""
        # Predictions are numbered through the chosen rows, so another choice is another entry.
        key = content_id(
            self.key, hashlib.sha256(np.asarray(indices, dtype=np.int64).tobytes()).hexdigest()
        )
        return TeacherRows(PickedRows(self.rows, indices), PickedRows(self.heads, indices), key)

    def has_teacher(self, index: int) -> bool:
        """Return whether the row with this number has a teacher."""
        return bool(self.starts[index] < self.starts[index + 1])

    def numbers(self, index: int) -> npt.NDArray[np.int64]:
        """Return the number of the prediction of each token of a row, `NO_TEACHER` where there is
        none."""
        learned = np.asarray(self.rows[index].learned, dtype=np.bool_)
        if not self.has_teacher(index):
            return np.full(len(learned), NO_TEACHER, dtype=np.int64)
        return np.where(learned, self.starts[index] + np.cumsum(learned) - 1, NO_TEACHER)

    def count_read(self) -> int:
        """Return the tokens that the teacher reads."""
        read = [index for index in range(len(self)) if self.has_teacher(index)]
        return sum(
            len(self.heads[index].input_ids) + self.heads[index].n_left_out for index in read
        )

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

    `documents` are the texts of documents by id, `others` has other texts of theirs, as
    `_other_texts` returns them. `window` is the most tokens that the teacher reads (None: any
    number); of a document that leaves no room for the row it reads the passages nearest to the row.
    """

    section: DistillationSection
    tokenizer: PreTrainedTokenizerBase
    tokenization: Tokenization
    window: int | None
    documents: Mapping[str, str]
    others: Mapping[tuple[str, str], str]

    def heads(self, rows: Iterable[CorpusRow], tokens: Iterable[TokenRow]) -> Iterator[TokenRow]:
        """Yield the head of each row; an empty one if it has no context, or if head and text exceed
        the window."""
        for row, token_row in zip(rows, tokens, strict=True):
            head, n_tail = self._head(row, token_row)
            if self.window is not None and len(head) + n_tail > self.window:
                head, n_tail = [], 0
            yield TokenRow("", "", "", head, [False] * len(head), n_tail)

    def _head(self, row: CorpusRow, token_row: TokenRow) -> tuple[list[int], int]:
        """Return (the tokens of the head, how many tokens of the row follow it)."""
        if self.section.context == "none":
            ids = np.asarray(token_row.input_ids).tolist()
            # The first token is never learned, so as the head it takes no prediction from the row.
            return ids[:1], len(ids) - 1
        if row.shape == "messages":
            return self._head_of_conversation(
                row, token_row, self._context(row, len(token_row.input_ids) + _TEMPLATE)
            )
        begin = [self.tokenizer.bos_token_id] if self.tokenization.bos else []
        first: list[int] = []
        if row.shape == "text" and self.tokenization.second_part:
            ids = self._ids(row.text)
            first = ids[: split_text(row, ids, self.tokenizer)]
        context = self._context(row, len(first) + len(token_row.input_ids))
        before = [*self._ids(context), *first] if context else first
        if not before:
            return [], 0
        return [*begin, *before], len(token_row.input_ids) - len(begin)

    def _context(self, row: CorpusRow, n_tokens: int) -> str:
        """Return the text before a row of `n_tokens`: its document, or for a passage of the
        document another text of it.

        It is "" without a document, and where no passage of it fits.
        """
        if self.section.context != "document":
            return ""
        document = self.documents.get(row.document_id, "")
        # Behind itself a passage would only be copied.
        if row.shape == "text" and row.text in document:
            of_passage = self.others.get((row.document_id, row.text), "")
            document = of_passage or self.others.get((row.document_id, ""), "")
        if not document:
            return ""
        room = self.section.context_tokens
        if self.window is not None:
            left = self.window - n_tokens
            room = left if room is None else min(room, left)
        full_text = with_passages([document], "")
        if room is None or len(self._ids(full_text)) <= room:
            return full_text
        words = (
            row.text
            or f"{row.prompt}{row.completion}"
            or "\n".join(text for _, text in conversation_texts(row))
        )
        return self._nearest(document, words, room)

    def _nearest(self, document: str, words: str, room: int) -> str:
        """Return the passages of a document that are nearest to `words`, in their order, of at most
        `room` tokens."""
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

    def _head_of_conversation(
        self, row: CorpusRow, token_row: TokenRow, context: str
    ) -> tuple[list[int], int]:
        """Return the same for a conversation: the context is in front of the user's first
        message."""
        turns = prepend_context(row.messages, context) if context else None
        if turns is None:
            return [], 0
        with_context = dataclasses.replace(row, messages=tuple(turns))
        ids, _, _ = encode_conversation(with_context, self.tokenizer, self.tokenization.chat)
        student = np.asarray(token_row.input_ids).tolist()
        n_tail = common_beginning(ids[::-1], student[::-1])
        # One token stays in front, from whose logits the first of the tail is predicted.
        n_tail = min(n_tail, len(student) - 1, len(ids) - 1)
        # The teacher predicts all that is learned, or nothing: it may read the row otherwise.
        first = int(np.argmax(np.asarray(token_row.learned)))
        if n_tail < len(student) - first:
            return [], 0
        return ids[:-n_tail], n_tail

    def _spans(self, text: str) -> list[tuple[int, int]]:
        encoded = self.tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return list(encoded["offset_mapping"])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def teacher_rows(
    recipe: TrainRecipe,
    section: DistillationSection,
    corpus: CorpusFile,
    tokens: Sequence[TokenRow],
    tokenizer: PreTrainedTokenizerBase,
    tokenization: Tokenization,
) -> TeacherRows:
    """Return the teacher's text for each row of `corpus`. Raises `RecipeError` if no row has a
    context."""
    path, revision = recipe.model.path, recipe.model.revision
    if section.teacher:
        path, revision = section.teacher, None
        # Predictions are kept by token id, which must name one token in both models.
        if models.load_tokenizer(section.teacher).get_vocab() != tokenizer.get_vocab():
            raise fault(
                "distillation.teacher",
                f"{section.teacher} has another vocabulary than the model. Its answers can be "
                "learned as any other text.",
            )
    window = None
    if path is not None:
        window = models.window_of(models.load_config(path, revision))
    reads = section.context, section.context_tokens, document_inputs(section, recipe.documents)
    key = entry_key(
        corpus.cache_key, tokenizer, tokenization, "teacher", _HEADS_FORMAT, window, *reads
    )

    def make() -> Iterator[TokenRow]:
        documents, others = {}, {}
        if section.context == "document":
            documents = document_texts(section.documents, recipe.documents, corpus)
            others = _other_texts(corpus)
        writer = HeadWriter(section, tokenizer, tokenization, window, documents, others)
        return writer.heads(corpus, tokens)

    heads = cached_tokens(Path(recipe.corpus.cache_dir), key, make, "")
    read = TeacherRows(tokens, heads, key)
    if not read.starts[-1]:
        fix = "All are too short."
        if section.context == "document":
            fix = (
                "Rows need a document_id, and the documents must be in the corpus (origin: "
                "original) or at distillation.documents; context: beginning needs none."
            )
        message = f"no row of {recipe.corpus.path} has a context that fits into the model's window."
        raise fault("distillation.context", f"{section.context}: {message} {fix}")
    return read


def document_inputs(section: DistillationSection, settings: DocumentsSection) -> dict[str, str]:
    """Return the hashes of the documents that `section` names for the teacher; {} for those of the
    corpus, or for none."""
    if section.context != "document" or section.documents is None:
        return {}
    return document_hashes(Path(section.documents), settings)


def document_texts(
    path: str | None, settings: DocumentsSection, corpus: CorpusFile
) -> dict[str, str]:
    """Return the texts of the documents at `path` by id; without a path those of the corpus
    (origin: original), the passages of a document joined."""
    if path is not None:
        return {document.id: document.text for document in read_documents(Path(path), settings)}
    passages: dict[str, list[str]] = {}
    names_origins = False
    for row in corpus:
        if row.origin != "original":
            names_origins = True
        elif row.document_id and row.shape == "text":
            texts = passages.setdefault(row.document_id, [])
            if row.text not in texts:
                texts.append(row.text)
    if names_origins:  # as kinject augment does, which writes a row for each passage
        return {name: "\n\n".join(texts) for name, texts in passages.items()}
    # A corpus that names no origin may have rewritings among its originals: then the first text is
    # the document.
    return {name: texts[0] for name, texts in passages.items()}


def _other_texts(corpus: CorpusFile) -> dict[tuple[str, str], str]:
    """Return for each passage (id of its document, text) the first text of the document behind it
    that is none of its passages; for (id, "") the first such text of the document."""
    others: dict[tuple[str, str], str] = {}
    passages: dict[str, str] = {}
    for row in corpus:
        if row.shape != "text" or not row.document_id:
            continue
        if row.origin == "original":
            passages[row.document_id] = row.text
            continue
        for passage in ("", passages.get(row.document_id, "")):
            others.setdefault((row.document_id, passage), row.text)
    return others


def describe_heads(read: TeacherRows) -> str:
    """Return how many rows have a teacher, as a line to print."""
    n = sum(read.has_teacher(index) for index in range(len(read)))
    line = f"distillation: the teacher reads {n:,} of {format_count(len(read), 'row')}"
    if n < len(read):
        line += "; the others are learned by cross-entropy"
    return line


_FORMAT = 2
"""Format of cache entries. It changes with their files."""
_COST = "cost.json"
_BATCH_TOKENS = 8192
"""Tokens of one pass of the teacher, padding included, at most."""
_BATCH_LOGITS = 1 << 26
"""Logits of one pass at most (256 MiB in float32)."""


class Distillation(Objective):
    """Where a teacher's predictions are given, the loss of a token is the divergence from them
    (arXiv 2209.15189).

    A fraction of it is cross-entropy.
    """

    def __init__(self, section: DistillationSection) -> None:
        self.section = section

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe distils."""
        return distillation_of(recipe) is not None

    @classmethod
    def configured(cls, name: str, recipe: TrainRecipe) -> Distillation:
        """Return the objective with the recipe's section."""
        section = distillation_of(recipe)
        assert section is not None
        return cls(section)

    def by_token(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: Predictions | None,
    ) -> torch.Tensor:
        """Return the divergences in place of the losses of tokens that the teacher predicts."""
        if teacher is None or not bool(teacher.has_target.any()):
            return losses
        section, indices = self.section, teacher.has_target.nonzero()[:, 0]
        distances = divergence(logits[indices], teacher.log_probs[indices], teacher.ids[indices])
        weight = 1 - section.cross_entropy
        return losses.index_copy(
            0, indices, weight * distances + section.cross_entropy * losses[indices]
        )


class Teacher:
    """Predicts the tokens of rows, each by its number (`TeacherRows`), from an entry of the cache
    that is mapped from disk."""

    def __init__(self, folder: Path) -> None:
        """Map the entry in `folder`."""
        self.starts = mapped(folder / "starts.bin", np.int64)
        n = int(self.starts[-1])
        self._log_probs = mapped(folder / "log_probs.bin", np.float32).reshape(n, -1)
        self._ids = mapped(folder / "ids.bin", np.uint32).reshape(n, -1)

    def predictions(self, numbers: torch.Tensor) -> Predictions:
        """Return the predictions with these `numbers` [tokens], on their device; zeros for
        `NO_TEACHER`."""
        device, has_target = numbers.device, numbers != NO_TEACHER
        index = numbers.cpu().numpy()
        picked, positions = index[index != NO_TEACHER], has_target.nonzero()[:, 0]
        log_probs = torch.zeros(len(index), self._log_probs.shape[1], device=device)
        ids = torch.zeros(len(index), self._ids.shape[1], dtype=torch.long, device=device)
        log_probs[positions] = torch.from_numpy(self._log_probs[picked]).to(device)
        ids[positions] = torch.from_numpy(self._ids[picked].astype(np.int64)).to(device)
        return Predictions(has_target, log_probs, ids)

    def of_batch(self, batch: Mapping[str, torch.Tensor]) -> Predictions:
        """Return the predictions of the token after each one of `batch`, which holds labels and
        teacher [batch, length]."""
        # The first token of a later segment was learned in the one before: it has no loss here.
        numbers = batch["teacher"][:, 1:].masked_fill(batch["labels"][:, 1:] == IGNORED, NO_TEACHER)
        return self.predictions(F.pad(numbers, (0, 1), value=NO_TEACHER).flatten())


def make_teacher(
    recipe: TrainRecipe, read: TeacherRows, model: PreTrainedModel, weights: str, *, bf16: bool
) -> tuple[Teacher, str, dict[str, float]]:
    """Return the teacher of a run, a note, and the cost of its predictions (teacher_tokens,
    teacher_seconds).

    The predictions are in the cache, which keeps their cost, or made by the teacher and stored: by
    distillation.teacher, or `model`, the base as it was loaded, with or without an adapter;
    `weights` is its hash, "" to compute it. `bf16`: under autocast.
    """
    section, base = distillation_of(recipe), recipe.model
    assert section is not None
    is_made = False

    def write(folder: Path) -> None:
        nonlocal is_made
        began, is_made = work_seconds(model.device.type), True
        with as_frozen(_load_teacher(section.teacher, base, model)) as teacher:
            _write_predictions(folder, read, teacher, section, vocabulary, bf16=bf16)
        spent = {
            "teacher_tokens": read.count_read(),
            "teacher_seconds": round(work_seconds(model.device.type) - began, 2),
        }
        write_json(folder / _COST, spent)

    vocabulary = int(model.config.get_text_config().vocab_size)
    key = content_id(
        "predictions",
        _FORMAT,
        read.key,
        weights or _identity(section.teacher, base, model),
        str(model.dtype),
        bf16,
        section.top_k,
        base.quantization,
    )
    folder = cached_entry(Path(recipe.corpus.cache_dir), key, write)
    teacher = Teacher(folder)
    n, n_bytes = int(teacher.starts[-1]), sum(path.stat().st_size for path in folder.iterdir())
    cost = read_json(folder / _COST, "Delete it; the predictions are made again.")
    origin = f"made in {cost['teacher_seconds']:.1f} s" if is_made else "read from the cache"
    note = (
        f"distillation: {format_count(n, 'prediction')} of the teacher {origin} "
        f"({n_bytes / 2**20:,.0f} MiB in {folder})"
    )
    return teacher, note, cost


def _load_teacher(path: str | None, base: ModelSection, model: PreTrainedModel) -> PreTrainedModel:
    """Return the model at `path`, where `model` is; without a path `model` itself."""
    if path is None:
        return model
    options = models.LoadOptions(
        dtype=base.dtype, device=model.device.type, quantization=base.quantization
    )
    return models.load_model(path, options).model


def _identity(teacher: str | None, base: ModelSection, model: PreTrainedModel) -> str:
    """Return what names the teacher's weights: a hash, or a name on the hub with its commit."""
    path, config = str(base.path), model.config
    if teacher:
        path, config = teacher, models.load_config(teacher)
    folder = model_folder(path)
    if folder.exists():
        return models.hash_with_base(folder)
    return f"{path}@{getattr(config, '_commit_hash', '')}"


@torch.no_grad()
def _write_predictions(
    folder: Path,
    read: TeacherRows,
    model: PreTrainedModel,
    section: DistillationSection,
    vocabulary: int,
    *,
    bf16: bool,
) -> None:
    """Write the predictions of all rows of `read`, of the student's `vocabulary`, into `folder`."""
    n = int(read.starts[-1])
    k = min(section.top_k, vocabulary)
    read.starts.tofile(folder / "starts.bin")
    width = k + 1 if k < vocabulary else k  # the last column is that of all other tokens
    # Written as they come: the predictions of a corpus may be larger than the memory.
    ids_file = np.memmap(folder / "ids.bin", np.uint32, "w+", shape=(n, k))
    log_probs_file = np.memmap(folder / "log_probs.bin", np.float32, "w+", shape=(n, width))
    # Flash attention refuses the float32 of weights that no autocast rounds.
    reading: contextlib.AbstractContextManager[object] = models.without_flash(model)
    if bf16:
        reading = torch.autocast(model.device.type, torch.bfloat16)
    with reading, Progress("teacher", n, "tokens") as progress:
        for indices, logits in read_rows(model, read):
            logits = logits[:, :vocabulary]  # of a larger model it may be padded further
            best = logits.topk(k).indices
            positions = np.concatenate(
                [np.arange(*read.starts[index : index + 2]) for index in indices]
            )
            ids_file[positions] = best.cpu().numpy()
            log_probs_file[positions] = log_probs_of(logits, best).cpu().numpy()
            progress.advance(len(best))
    ids_file.flush()
    log_probs_file.flush()


def read_rows(
    model: PreTrainedModel, read: TeacherRows
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield (numbers, logits of their learned tokens [tokens, vocabulary] in float32) of batches of
    rows with a teacher."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    most = max(1, min(_BATCH_TOKENS, _BATCH_LOGITS // vocabulary))
    lengths = []
    for index in range(len(read)):
        if read.has_teacher(index):
            head = read.heads[index]
            lengths.append((len(head.input_ids) + head.n_left_out - 1, index))
    for batch in _batches(lengths, most):
        yield batch, _read(model, read, batch)


def _batches(lengths: Iterable[tuple[int, int]], most: int) -> Iterator[list[int]]:
    """Yield row numbers of (tokens, row number), padded to the longest at most `most` tokens; the
    longest come first."""
    batch: list[int] = []
    width = 0
    # Descending, so that the first row of a batch is its width.
    for length, index in sorted(lengths, reverse=True):
        if batch and (len(batch) + 1) * width > most:
            yield batch
            batch = []
        if not batch:
            width = length
        batch.append(index)
    if batch:
        yield batch


def _read(model: PreTrainedModel, read: TeacherRows, batch: Sequence[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] in float32 of the learned tokens of rows behind their
    heads, row after row."""
    # The last token is predicted, not read.
    texts = [[*read.head(index), *read.tail(index)[:-1]] for index in batch]
    width = max(map(len, texts))
    # Any token fills up a row without a mask: no earlier token attends to it.
    padded = [text + [0] * (width - len(text)) for text in texts]
    ids = torch.tensor(padded, device=model.device)
    positions = torch.arange(width, device=model.device).expand(len(texts), width)
    logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    rows: list[int] = []
    columns: list[int] = []
    for number, index in enumerate(batch):
        learned = read.learned_in_tail(index)
        # A token is predicted by the logits of the one before it.
        before_tail = len(read.head(index)) - 1
        rows += [number] * len(learned)
        columns += [before_tail + position for position in learned]
    return logits[rows, columns].float()
