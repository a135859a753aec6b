"""Corpus rows to token ids, with a mark for tokens in the loss, an account of every token, and a
cache on disk.

An entry of the cache is a folder, named by the content of the corpus, the tokenizer and the
settings. It holds ``ids.bin`` (uint32, all rows joined), ``learned.bin`` (one byte a token),
``ends.bin`` (int64, where each row ends), ``documents.bin`` (int64, each row's document, -1 for
none), ``left_out.bin`` (uint32, each row's tokens that its chat template leaves out),
``unread.bin`` (uint32, those that only a teacher reads), ``lines.bin`` (int64, the line of each row
in its corpus file, 0 for none), ``chat.bin`` and ``only_end.bin`` (one byte a row: it is a
conversation; none of its words is learned), ``names.bin`` and ``name_ends.bin`` (the documents' ids
joined, and where each ends, int64) and
``SHA256SUMS`` over them. It is written whole or not at all and memory-mapped by every run that
needs it; a damaged entry is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from kinject.corpus.chat import (
    ChatFormat,
    encode_conversation,
    has_template,
    learns_no_words,
)
from kinject.corpus.rows import CorpusRow, LazyRows, LineFaults
from kinject.corpus.spans import Span, common_beginning, overlapping, tokens_of
from kinject.disk import (
    cached_folder,
    content_id,
    folder_hash,
)
from kinject.disk.offsets import NameNumbers
from kinject.errors import DiskError, InputError
from kinject.language.sentences import sentence_ends
from kinject.process import is_first_process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a token that is read but not learned (PyTorch's cross-entropy skips it)."""

FORMAT = 12
"""Format of cache entries. It changes with the files or the rules of tokenisation, so that no older
entry is read."""

Row = TypeVar("Row")
_BATCH = 256  # rows that the tokenizer is given at once
_FLUSH = 1 << 17  # tokens in memory while an entry is written
_FILES: dict[str, Any] = {
    "ids": np.uint32,
    "learned": np.bool_,
    "ends": np.int64,
    "documents": np.int64,
    "left_out": np.uint32,
    "unread": np.uint32,
    "lines": np.int64,
    "chat": np.bool_,
    "only_end": np.bool_,
}


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One tokenised row. `learned[i]`: token i is in the loss; never the first, since no token
    precedes it.

    `n_left_out` counts the tokens of its text that its chat template leaves out, `n_unread` those
    at its beginning that only a teacher reads (`Tokenization.second_part`). `line` is its line in
    its corpus file, 0 if it has none. `is_chat`: it is a conversation. `only_end`: none of its
    words is learned, the end token alone.
    """

    row_id: str
    document_id: str
    origin: str
    input_ids: Sequence[int] | npt.NDArray[Any]
    learned: Sequence[bool] | npt.NDArray[Any]
    n_left_out: int = 0
    n_unread: int = 0
    line: int = 0
    is_chat: bool = False
    only_end: bool = False


@dataclass(slots=True)
class TokenAccount:
    """Counts of every token of a corpus: ``source == trained + masked + truncated + dropped``.

    `trained` are in the loss; `masked` are read only (prompts, the first token of each document,
    and what only a teacher reads); `truncated` were cut at max_length; `dropped` are in segments
    left out because none of their tokens is in the loss, or of text that a chat template leaves
    out.
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


@dataclass(frozen=True)
class Tokenization:
    """Settings by which rows become tokens: BOS and EOS at document boundaries, and the parts of
    SFT rows in the loss.

    `completion_only` None means: only the completion of prompt+completion rows. `chat` is for rows
    with messages. `second_part`: of a row with text only the part after `split_text` is learned.
    """

    bos: bool = True
    eos: bool = True
    completion_only: bool | None = None
    chat: ChatFormat = ChatFormat()
    second_part: bool = False


def tokenize_rows(
    rows: Iterable[CorpusRow], tokenizer: PreTrainedTokenizerBase, tokenization: Tokenization
) -> Iterator[TokenRow]:
    """Yield each row as tokens, none after the first conversation that does not fit its chat
    template.

    Raises `InputError` if the tokenizer lacks a BOS, EOS or chat template that is needed, and in
    the end with all conversations that do not fit (the first 20).
    """
    _require_boundaries(tokenizer, tokenization)
    remaining = iter(rows)
    faults = LineFaults()
    while batch := list(islice(remaining, _BATCH)):
        # As one text, as it is read: a token may begin in the prompt and end in the completion.
        texts = [row.prompt + row.text + row.completion for row in batch]
        # Offsets cost a third more time, and where all of a text is learned they are not needed.
        has_prompts = any(row.shape == "completion" for row in batch)
        tokens = iter(tokens_of(texts, tokenizer, offsets=has_prompts))
        for row in batch:
            ids, offsets = next(tokens)
            if row.shape == "messages":
                conversation = _conversation(row, tokenizer, tokenization.chat, faults)
                if conversation is not None:
                    yield conversation
                continue
            learned = _learned(row, ids, offsets, tokenizer, tokenization)
            n_unread = split_text(row, ids, tokenizer) if tokenization.second_part else 0
            ids, learned = ids[n_unread:], learned[n_unread:]
            ids, learned = _with_boundaries(ids, learned, tokenizer, tokenization)
            if not faults:
                # The end token is learned always; a row can lose all others, if its one token is
                # the first of all, or the tokenizer's rules remove the whole completion.
                only_end = tokenization.eos and sum(learned[1:]) == 1
                yield _token_row(row, ids, learned, n_unread=n_unread, only_end=only_end)
    faults.raise_if_any()


def _with_boundaries(
    ids: Sequence[int],
    learned: Sequence[bool],
    tokenizer: PreTrainedTokenizerBase,
    tokenization: Tokenization,
) -> tuple[list[int], list[bool]]:
    """Return the tokens of a text, and which are learned, with BOS and EOS around them.

    A text may have them already, as a chat that was rendered, or completions written for another
    tool: none is there twice. TRL has the same rule for EOS, and adds no BOS by itself
    (docs/design.md).
    """
    ids, learned = [*ids], [*learned]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if tokenization.bos and ids[:1] != [bos]:
        ids, learned = [bos, *ids], [False, *learned]
    # The end of a prompt is none: nothing of a row would be learned.
    if tokenization.eos and not (ids[-1:] == [eos] and learned[-1]):
        ids, learned = [*ids, eos], [*learned, True]
    return ids, learned


def split_text(row: CorpusRow, ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """Return how many of the tokens `ids` of a row's text are before its split; 0 for a row without
    text or of one token.

    It is split after one of its sentences, which follows from the row's id alone; a text of one
    sentence is split after half of its tokens.
    """
    if row.shape != "text":
        return 0
    ends = sentence_ends(row.text.rstrip())[:-1]
    if not ends:
        return len(ids) // 2
    # By the id: the student's tokens and the teacher's head must be cut at the same sentence.
    first = row.text[: random.Random(row.id).choice(ends)]
    of_first = tokenizer(first, add_special_tokens=False, verbose=False)["input_ids"]
    # Cut off from the rest, the first part may end in other tokens than it has in the text.
    same = [token == first_token for token, first_token in zip(ids, of_first, strict=False)]
    n_first = same.index(False) if False in same else len(same)
    return n_first if 0 < n_first < len(ids) else len(ids) // 2


def _learned(
    row: CorpusRow,
    ids: Sequence[int],
    offsets: Sequence[Span] | None,
    tokenizer: PreTrainedTokenizerBase,
    tokenization: Tokenization,
) -> list[bool]:
    """Return which tokens of a row without messages are in the loss: of a prompt and its completion
    the latter's."""
    if row.shape != "completion" or tokenization.completion_only is False:
        return [True] * len(ids)
    if offsets is not None:
        return overlapping(offsets, [(len(row.prompt), len(row.prompt) + len(row.completion))])
    of_prompt = tokenizer(row.prompt, add_special_tokens=False, verbose=False)["input_ids"]
    n_prompt = common_beginning(ids, of_prompt)
    return [index >= n_prompt for index in range(len(ids))]


def _conversation(
    row: CorpusRow, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, faults: LineFaults
) -> TokenRow | None:
    """Return a conversation as tokens, None after a fault. The chat template sets its
    boundaries."""
    if not has_template(tokenizer):
        raise InputError(
            "corpus: rows with messages need a chat template, and this tokenizer has none. Set "
            "trainer.chat_template_path."
        )
    try:
        ids, learned, n_left_out = encode_conversation(row, tokenizer, chat)
    except InputError as error:
        faults.add(f"{row.location or f'row {row.id}'}: {error}")
        return None
    if faults:
        return None
    only_end = chat.assistant_only and learns_no_words(row, tokenizer, ids, learned)
    return _token_row(row, ids, learned, n_left_out, only_end=only_end)


def _token_row(
    row: CorpusRow,
    ids: list[int],
    learned: list[bool],
    n_left_out: int = 0,
    n_unread: int = 0,
    *,
    only_end: bool,
) -> TokenRow:
    return TokenRow(
        row.id,
        row.document_id,
        row.origin,
        tuple(ids),
        (False, *learned[1:]),
        n_left_out=n_left_out,
        n_unread=n_unread,
        line=row.line,
        is_chat=row.shape == "messages",
        only_end=only_end,
    )


def begins_with_bos(tokenizer: PreTrainedTokenizerBase, bos: bool | None = None) -> bool:
    """Return `bos`, or if it is None whether the tokenizer begins a text with its BOS token by
    itself."""
    if bos is not None:
        return bos
    return tokenizer.bos_token_id is not None and tokenizer("a").input_ids[:1] == [
        tokenizer.bos_token_id
    ]


def _require_boundaries(tokenizer: PreTrainedTokenizerBase, tokenization: Tokenization) -> None:
    for name, required in (("bos", tokenization.bos), ("eos", tokenization.eos)):
        if required and getattr(tokenizer, f"{name}_token_id") is None:
            raise InputError(
                f"corpus.{name}: this tokenizer has no {name.upper()} token. Set corpus.{name}: "
                "false."
            )


def count_tokens(rows: Iterable[TokenRow], cut_at: int | None) -> int:
    """Return the tokens of `rows` that are read, of each at most `cut_at`."""
    lengths = [len(row.input_ids) for row in rows]
    if cut_at is None:
        return sum(lengths)
    return sum(min(length, cut_at) for length in lengths)


def wanted_tokens(n_tokens: int, fraction: float, fractions: Sequence[float]) -> float:
    """Return how many tokens make `fraction` of a mixture whose main corpus has `n_tokens`.

    `fractions` are those of all parts together, this one included; the main corpus has the rest.
    """
    return fraction / (1 - sum(fractions)) * n_tokens


def sample_tokens(
    rows: Sequence[Row],
    tokenize: Callable[[Sequence[Row]], Iterable[TokenRow]],
    target_tokens: float,
    seed: int,
    cut_at: int | None = None,
) -> Iterator[TokenRow]:
    """Yield tokenised rows drawn without replacement until they hold `target_tokens` tokens, to
    within half a row. Of a row that is longer than `cut_at` only so many count.

    Only sampled rows are tokenised, so the corpus may be large. If it is too small, it is sampled
    again in another order. Raises `InputError` if tokens are wanted and the corpus has no rows, or
    all of them are without tokens.
    """
    if target_tokens <= 0:
        return
    if not rows:
        raise InputError("corpus: a part of the mixture has no rows to draw.")
    n_tokens = 0
    drawn = _shuffled_forever(rows, tokenize, random.Random(seed))
    for n_read, row in enumerate(drawn, 1):
        size = count_tokens([row], cut_at)
        if n_tokens + size / 2 >= target_tokens:
            return
        yield row
        n_tokens += size
        # Without BOS and EOS a tokenizer may remove all of a text: it would be drawn for ever.
        if n_tokens == 0 and n_read == len(rows):
            raise InputError("corpus: the tokenizer leaves no token of a part of the mixture.")


def _shuffled_forever(
    rows: Sequence[Row], tokenize: Callable[[Sequence[Row]], Iterable[TokenRow]], rng: random.Random
) -> Iterator[TokenRow]:
    """Yield `rows` tokenised without end, each pass in another random order."""
    order = array("q", range(len(rows)))
    pick = getattr(rows, "pick", None)
    while True:
        rng.shuffle(order)
        for start in range(0, len(order), _BATCH):
            indices = order[start : start + _BATCH]
            yield from tokenize(
                [rows[index] for index in indices] if pick is None else pick(indices)
            )


class TokenStore(LazyRows[TokenRow]):
    """The rows of one cache entry in order, mapped from disk; `origin` is given to each."""

    def __init__(self, folder: Path, origin: str) -> None:
        """Map the files. Raises `DiskError` when one cannot be read."""
        self.origin = origin
        try:
            arrays = {name: mapped(folder / f"{name}.bin", kind) for name, kind in _FILES.items()}
            self._names = mapped(folder / "names.bin", np.uint8)
            self._name_ends = mapped(folder / "name_ends.bin", np.int64)
        except (OSError, ValueError, DiskError) as error:
            raise DiskError(
                f"{folder}: cannot be read ({error}). Delete the folder; it is made again."
            ) from error
        self._ids, self._learned, self._ends = arrays["ids"], arrays["learned"], arrays["ends"]
        self.documents = arrays["documents"]
        """The number of each row's document by first appearance, -1 for none."""
        self._last_name = (-1, "")
        self._left_out, self._unread = arrays["left_out"], arrays["unread"]
        self._lines, self._chat = arrays["lines"], arrays["chat"]
        self._only_end = arrays["only_end"]

    def __len__(self) -> int:
        return len(self._ends)

    def read_row(self, index: int) -> TokenRow:
        """Return the row with this number; its arrays are views of the files."""
        start, end = _span(self._ends, index)
        name = self._name(int(self.documents[index]))
        ids, learned = self._ids[start:end], self._learned[start:end]
        return TokenRow(
            str(index),
            name,
            self.origin,
            ids,
            learned,
            n_left_out=int(self._left_out[index]),
            n_unread=int(self._unread[index]),
            line=int(self._lines[index]),
            is_chat=bool(self._chat[index]),
            only_end=bool(self._only_end[index]),
        )

    def _name(self, document: int) -> str:
        """Return the id of a document, "" for none (-1)."""
        if document < 0:
            return ""
        last, name = self._last_name
        # The rows of a document are together as a rule.
        if document == last:
            return name
        start, end = _span(self._name_ends, document)
        name = self._names[start:end].tobytes().decode("utf-8", "surrogatepass")
        self._last_name = (document, name)
        return name


def _span(ends: npt.NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return where the item with this number is, by the ends of all items."""
    start = 0
    if index:
        start = int(ends[index - 1])
    return start, int(ends[index])


def mapped(path: Path, kind: Any) -> npt.NDArray[Any]:
    """Return the numbers of a file, mapped from disk."""
    # numpy maps no empty file.
    if not path.stat().st_size:
        return np.empty(0, kind)
    # A plain array over the same pages: numpy's memmap runs Python at each look-up, of which a row
    # takes ten (11 us a row, 5 so).
    return np.asarray(np.memmap(path, kind, mode="r"))


_CACHE_FIX = "So the tokenised corpus cannot be written; corpus.cache_dir may be another folder."


def cached_tokens(
    folder: Path, key: str, make: Callable[[], Iterable[TokenRow]], origin: str
) -> TokenStore:
    """Return the entry `key` of the cache `folder`; if it is missing, it is made from the rows of
    `make()`.

    Raises `DiskError` when it cannot be written.
    """
    return TokenStore(cached_entry(folder, key, lambda part: _write_files(part, make())), origin)


def cached_entry(folder: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Return the folder of the entry `key` of the cache `folder`; if it is missing, `write` fills a
    new one.

    As `cached_folder`. Raises `DiskError` when it cannot be written.
    """
    entry = folder / key
    # The first process has just checked it.
    if entry.is_dir() and not is_first_process():
        return entry
    return cached_folder(folder, key, write, _CACHE_FIX)


def _write_files(part: Path, rows: Iterable[TokenRow]) -> None:
    buffers: dict[str, list[Any]] = {name: [] for name in _FILES}
    end = n_buffered = 0

    def flush() -> None:
        for name, kind in _FILES.items():
            np.asarray(buffers[name], dtype=kind).tofile(files[name])
            buffers[name].clear()

    with contextlib.ExitStack() as stack:
        names = (*_FILES, "names", "name_ends")
        files = {name: stack.enter_context((part / f"{name}.bin").open("w+b")) for name in names}
        numbers = NameNumbers(files["names"], files["name_ends"])
        stack.enter_context(contextlib.closing(numbers))
        for row in rows:
            buffers["ids"].extend(row.input_ids)
            buffers["learned"].extend(row.learned)
            end += len(row.input_ids)
            buffers["ends"].append(end)
            buffers["left_out"].append(row.n_left_out)
            buffers["unread"].append(row.n_unread)
            buffers["lines"].append(row.line)
            buffers["chat"].append(row.is_chat)
            buffers["only_end"].append(row.only_end)
            number = -1
            if row.document_id:
                number = numbers.number(row.document_id)
            buffers["documents"].append(number)
            n_buffered += len(row.input_ids)
            if n_buffered >= _FLUSH:
                flush()
                n_buffered = 0
        flush()
        for file in files.values():
            file.flush()
            # Before the rename, or a machine that crashes may keep the name without the bytes.
            os.fsync(file.fileno())


def entry_key(
    corpus_key: Sequence[object],
    tokenizer: PreTrainedTokenizerBase,
    tokenization: Tokenization,
    *more: object,
) -> str:
    """Return the name of the cache entry of a corpus: it depends on `corpus_key`, the tokenizer,
    `tokenization` and `more`."""
    return content_id(FORMAT, corpus_key, fingerprint(tokenizer), asdict(tokenization), more)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of all that decides a tokenizer's output: vocabulary and rules, special tokens,
    chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules: object = hashlib.sha256(
            backend.to_str().encode("utf-8", "surrogatepass")
        ).hexdigest()
    else:
        # A slow tokenizer has no rules as one text, so its files are hashed.
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            rules = folder_hash(Path(scratch))
    special = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template)
    return content_id(type(tokenizer).__name__, rules, *map(repr, special))
