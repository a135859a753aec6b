"""Answers on disk: stored as they come, found again by what was really asked of which weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from kinject.disk import Journal, Row, checked_hashes, manifest_beside, read_journal, tree_hash
from kinject.errors import InputError
from kinject.eval.scoring.encode import Encoded
from kinject.models import base_of_adapter
from kinject.types import Answer

_Place = tuple[str, str, str, int, int, int, str]
_FIELDS = tuple(item.name for item in fields(Answer))
_LATER = frozenset({"truncated", "n_chars", "subject", "document_id", "rotation", "greedy"})
"""What an older kinject's rows may lack."""
_NEEDED = frozenset(("key", *_FIELDS)) - _LATER


@dataclass(frozen=True, slots=True)
class Scored:
    """What a model said of one prompt, whoever asks it."""

    log_probs: tuple[float, ...]
    n_tokens: tuple[int, ...]
    greedy: tuple[bool, ...]


def hash_model(path: str, revision: str | None) -> str:
    """Return a hash of the weights, configuration and tokenizer behind `path`: a folder's bytes, or a hub commit.

    An adapter's hash holds that of its base model. `revision` is the hub commit that was loaded, where there was one.
    Raises `InputError` where the folder's SHA256SUMS disagrees.
    """
    folder = Path(path)
    if not folder.is_dir():
        return hashlib.sha256(f"{path}@{revision}".encode()).hexdigest()
    known = checked_hashes(folder)
    parts = [
        tree_hash(folder, pattern, known) for pattern in ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
    ]
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        parts.append(hash_model(base_of_adapter(adapter), revision))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def prompt_key(model_hash: str, dtype: str, prompt: Encoded) -> str:
    """Return the key of one scoring: which weights and dtype were asked which tokens."""
    digest = hashlib.blake2b(f"{model_hash}\0{dtype}\0".encode(), digest_size=16)
    for ids in (*prompt.contexts, *prompt.continuations):
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    return digest.hexdigest()


class AnswerBook:
    """The open answers.jsonl of a run: rows are `Answer` plus its `key`; the last row of an arm and question counts."""

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises `InputError` when a row is none of this kinject's, `DiskError` on I/O."""
        self._journal = Journal(path, sync=False)
        self._scored: dict[str, Scored] = {}
        self._last: dict[_Place, str] = {}
        self.n_rows = len(self._journal.rows)
        try:
            for number, row in enumerate(self._journal.rows, start=1):
                answer = _answer_of(row, f"{path}: row {number}")
                if not answer.greedy:  # of an older kinject: asked again, since what it lacks cannot be known
                    continue
                self._scored[row["key"]] = Scored(answer.log_probs, answer.n_tokens, answer.greedy)
                self._last[_place(answer)] = row["key"]
            self._journal.rows.clear()
        except BaseException:
            self._journal.close()
            raise

    def find(self, key: str) -> Scored | None:
        """Return what was said under `key`, in this run or an earlier one."""
        return self._scored.get(key)

    def take_parts(self, paths: Sequence[Path]) -> None:
        """Know the answers in `paths` too, which other processes stored; they come into this file when they are added."""
        for path in paths:
            for number, row in read_journal(path):
                answer = _answer_of(row, f"{path}:{number}")
                if answer.greedy:
                    self._scored.setdefault(row["key"], Scored(answer.log_probs, answer.n_tokens, answer.greedy))

    def add(self, key: str, answer: Answer) -> None:
        """Store `answer`, unless it is the last one stored for its arm and question already."""
        self._scored[key] = Scored(answer.log_probs, answer.n_tokens, answer.greedy)
        if self._last.get(_place(answer)) != key:
            self._journal.append({"key": key, **asdict(answer), "log_probs": _finite(answer.log_probs)})
            self._last[_place(answer)] = key
            self.n_rows += 1

    def __enter__(self) -> AnswerBook:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._journal.close()


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in `path`, the last one of each arm and question, in the order of their first rows.

    Raises `DiskError` when the file cannot be read, `InputError` (file:line) when a row is no answer or not as it was written,
    and when rows are missing that the manifest beside it counts.
    """
    found: dict[_Place, Answer] = {}
    n_rows = 0
    for number, row in read_journal(path):
        answer = _answer_of(row, f"{path}:{number}")
        found[_place(answer)] = answer
        n_rows += 1
    n_written = manifest_beside(path).get("counts", {}).get("stored", 0)
    if n_rows < n_written:
        raise InputError(
            f"{path}: holds {n_rows} rows, {n_written} were written (manifest.json beside it). Run kinject eval again: it asks "
            "what is missing."
        )
    return list(found.values())


def _place(answer: Answer) -> _Place:
    return answer.question_set, answer.arm, answer.format, answer.shots, answer.k, answer.rotation, answer.question_id


def _answer_of(row: Row, where: str) -> Answer:
    if not row.keys() >= _NEEDED:
        missing = next(name for name in ("key", *_FIELDS) if name in _NEEDED and name not in row)
        raise InputError(f"{where}: no {missing}. It is not an answer of this kinject; choose another run folder.")
    values: dict[str, Any] = {
        name: tuple(v) if isinstance(v := row[name], list) else v for name in _FIELDS if name in row
    }
    for name in _FIELDS:
        if name in values and not _KINDS[name](values[name]):
            raise InputError(f"{where}: {name}: found {row[name]!r:.60}, which no kinject writes. Remove the row.")
    values["log_probs"] = tuple(math.nan if value is None else float(value) for value in row["log_probs"])
    if not 0 <= values["gold"] < max(1, len(values["log_probs"])):
        raise InputError(f"{where}: gold is {values['gold']} of {len(values['log_probs'])} choices. Remove the row.")
    if not isinstance(row["key"], str):
        raise InputError(f"{where}: key: found {row['key']!r:.60}, expected a text. Remove the row.")
    return Answer(**values)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_log_prob(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST)


def _all(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, tuple) and all(map(check, values))


_LARGEST = 1e300
_KINDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("question_id", "question_set", "arm", "format", "subject", "document_id"), _is_text),
    **dict.fromkeys(("shots", "k", "gold", "truncated", "rotation"), _is_count),
    **dict.fromkeys(("n_tokens", "n_bytes", "n_chars"), _all(_is_count)),
    "context_ids": _all(_is_text),
    "log_probs": _all(_is_log_prob),
    "greedy": _all(lambda value: isinstance(value, bool)),
}
"""Field of an answer -> whether a value read from a file is one."""


def _finite(values: Sequence[float]) -> list[float | None]:
    """Return `values` with None for what JSON cannot hold."""
    return [value if math.isfinite(value) else None for value in values]
