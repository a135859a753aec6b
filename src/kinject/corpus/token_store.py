"""Tokenised corpora on disk, by content: written once, whole or not at all, and memory-mapped by every run that needs them.

An entry is a folder: ``ids.bin`` (uint32, all rows joined), ``learned.bin`` (one byte a token), ``ends.bin`` (int64, where each
row ends), ``documents.bin`` (int64, each row's document, -1 where it has none), ``documents.json`` (their ids by number) and
``SHA256SUMS`` over them. An entry that is not as it was written is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from kinject.corpus.tokens import Tokenization, TokenRow
from kinject.disk import check_sha256sums, content_id, file_hash, folder_hash, unwritable, write_sha256sums, write_text
from kinject.errors import DiskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

FORMAT = 3
"""Changes when the files or the rules of tokenisation change, so that no older entry is read."""

_FLUSH = 1 << 17  # tokens in memory while an entry is written
_FILES: dict[str, Any] = {"ids": np.uint32, "learned": np.bool_, "ends": np.int64, "documents": np.int64}


class TokenStore(Sequence[TokenRow]):
    """The rows of one entry in order, mapped from disk; `origin` is given to each."""

    def __init__(self, folder: Path, origin: str) -> None:
        """Map the files. Raises `DiskError` when one cannot be read."""
        self.origin = origin
        try:
            held = {name: _mapped(folder / f"{name}.bin", kind) for name, kind in _FILES.items()}
            self._names: list[str] = json.loads((folder / "documents.json").read_bytes())
        except (OSError, ValueError) as error:
            raise DiskError(f"{folder}: cannot be read ({error}). Delete the folder; it is made anew.") from error
        self._ids, self._learned, self._ends, self._documents = held.values()

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> TokenRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenRow]: ...
    def __getitem__(self, index: int | slice) -> TokenRow | list[TokenRow]:
        """Return one row (its arrays are views of the files), or some."""
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        start, end = int(self._ends[at - 1]) if at else 0, int(self._ends[at])
        document = int(self._documents[at])
        name = self._names[document] if document >= 0 else ""
        return TokenRow(str(at), name, self.origin, self._ids[start:end], self._learned[start:end])


def _mapped(path: Path, kind: Any) -> npt.NDArray[Any]:
    if not path.stat().st_size:
        return np.empty(0, kind)
    return np.memmap(path, kind, mode="r")


def stored(folder: Path, key: str, make: Callable[[], Iterable[TokenRow]], origin: str) -> TokenStore:
    """Return the entry `key` of the cache `folder`, made from the rows of `make()` where it is not there.

    Processes that need the same entry wait for the first. A process that dies leaves no entry, and one that has changed
    since is made anew. Raises `DiskError` when it cannot be written.
    """
    entry = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if _fault(entry):
            with (folder / f".{key}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for torn in folder.glob(f".{key}.*.part"):  # of a process that was killed
                    shutil.rmtree(torn)
                fault = _fault(entry)  # another process may have made it meanwhile
                if fault:
                    _clear(entry, fault)
                    _write(entry, make())
    except OSError as error:
        told = unwritable(folder, error)
        raise DiskError(
            f"{told} So the tokenised corpus cannot be written; corpus.cache_dir may be another folder."
        ) from error
    return TokenStore(entry, origin)


def _fault(entry: Path) -> str:
    """Return why the entry must be made, "" where it is there as it was written."""
    if not entry.is_dir():
        return "not there"
    found, fault = check_sha256sums(entry)
    return fault or ("" if found else f"{entry}: has no SHA256SUMS")


def _clear(entry: Path, fault: str) -> None:
    """Take away what stands in the place of an entry, aloud."""
    if os.path.lexists(entry):
        log.warning(f"{fault}. These tokens are made anew.")
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def _write(entry: Path, rows: Iterable[TokenRow]) -> None:
    part = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", suffix=".part", dir=entry.parent))
    try:
        _write_files(part, rows)
        os.replace(part, entry)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_files(part: Path, rows: Iterable[TokenRow]) -> None:
    waiting: dict[str, list[Any]] = {name: [] for name in _FILES}
    numbers: dict[str, int] = {}
    files = {name: (part / f"{name}.bin").open("wb") for name in _FILES}
    end = n_waiting = 0

    def flush() -> None:
        for name, kind in _FILES.items():
            np.asarray(waiting[name], dtype=kind).tofile(files[name])
            waiting[name].clear()

    try:
        for row in rows:
            waiting["ids"].extend(row.input_ids)
            waiting["learned"].extend(row.learned)
            end += len(row.input_ids)
            waiting["ends"].append(end)
            named = bool(row.document_id)
            waiting["documents"].append(numbers.setdefault(row.document_id, len(numbers)) if named else -1)
            n_waiting += len(row.input_ids)
            if n_waiting >= _FLUSH:
                flush()
                n_waiting = 0
        flush()
        write_text(part / "documents.json", json.dumps(list(numbers)))  # escaped: an id may hold a lone surrogate
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files.values():
            file.close()
    write_sha256sums(part)


def entry_key(corpus: Path, tokenizer: PreTrainedTokenizerBase, how: Tokenization, *more: object) -> str:
    """Return the name of the entry for a corpus: it depends on the file's bytes, the tokenizer, `how`, and `more`."""
    return content_id(FORMAT, file_hash(corpus), fingerprint(tokenizer), asdict(how), more)


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of what decides a tokenizer's output: its pieces and rules, special tokens, chat template."""
    inner = getattr(tokenizer, "backend_tokenizer", None)
    if inner is not None:
        rules: object = hashlib.sha256(inner.to_str().encode("utf-8", "surrogatepass")).hexdigest()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer.save_pretrained(scratch)
            rules = folder_hash(Path(scratch))
    marks = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template)
    return content_id(type(tokenizer).__name__, rules, *map(repr, marks))
