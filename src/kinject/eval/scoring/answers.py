"""Answers on disk: appended as they are scored, and found again by the hash of weights and prompt
tokens.

So a stored prompt is not scored again. Processes divide the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kinject.disk import (
    Journal,
    Row,
    content_id,
    read_journal,
    read_jsonl,
    read_lines,
    write_versions,
)
from kinject.disk.offsets import OffsetIndex
from kinject.errors import InputError
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.encode import Encoded
from kinject.gguf_files import model_folder
from kinject.llm.judges import GRADES
from kinject.manifests import EvalManifest, manifest_beside
from kinject.models import base_of_adapter, check_trained_base, model_hash
from kinject.process import is_first_process, tensor_parallel_size, what_shards, world_size
from kinject.question_formats import FORMATS
from kinject.terminal import format_count, show
from kinject.types import Answer

if TYPE_CHECKING:
    from kinject.eval.scoring.generate import AnswerGenerator
    from kinject.eval.scoring.scorer import Scorer

Item = TypeVar("Item")
Value = TypeVar("Value")

PERPLEXITY_FORMAT = "perplexity"
"""The `format` of stored windows of texts; they are no answers to questions."""

GRADES_FILE = "grades.jsonl"
"""The judge's grades of a run folder: rows of question_set, question_id, question, accepted, text,
grade."""

VERSIONS_FILE = "versions.json"
"""The packages' versions when the first answers of a run folder were scored: an evaluation that was
stopped has no manifest."""

_Identity = tuple[str, str, str, int, int, int, str]
_WRITTEN = ("text", "accepted", "checks", "choices", "n_thinking", "thinking_cut")
"""Fields of an answer that the model wrote; rows of others do not have them."""
_STORED = frozenset(item.name for item in fields(Answer)) - {"correct", "grade"}
_SCORE = (
    *("log_probs", "n_tokens", "greedy", "text"),
    *("n_thinking", "thinking_cut", "correct", "grade"),
)
_GIVEN = tuple(item.name for item in fields(Answer) if item.name not in _SCORE)
"""Fields of an answer that the recipe and its questions give: two answers with one key may differ
in them."""
_RARE = ("choice_set",)
"""Fields that only the rows of some formats have."""
_FIELDS = tuple(
    item.name for item in fields(Answer) if item.name not in (*_WRITTEN, *_RARE, "correct", "grade")
)


def hash_model(path: str, revision: str | None) -> str:
    """Return a hash of the weights, configuration and tokenizer in `path`: of a folder's bytes, or
    of a hub commit.

    An adapter's hash includes that of its base model. `revision` is the hub commit that was loaded,
    if any. Raises `InputError` if the folder's SHA256SUMS disagrees, or an adapter's base has
    changed since its training.
    """
    folder = model_folder(path)
    if not folder.exists():
        return hashlib.sha256(f"{path}@{revision}".encode()).hexdigest()
    parts = [model_hash(folder)]
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        check_trained_base(folder)
        parts.append(hash_model(base_of_adapter(adapter), revision))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def prompt_key(model_hash: str, dtype: str, prompt: Encoded) -> str:
    """Return the key of one scored prompt: a hash of weights, dtype, the tokens of contexts and
    continuations.

    If the model writes its answer, the most tokens and the stop strings count too, and the marks of
    its thinking.
    """
    digest = hashlib.blake2b(f"{model_hash}\0{dtype}\0".encode(), digest_size=16)
    for ids in (*prompt.contexts, *prompt.continuations):
        # With the lengths, tokens that move from a context to a continuation change the key.
        digest.update(len(ids).to_bytes(4, "little") + ids.tobytes())
    # Nothing else is hashed for choices, so their keys do not depend on the bounds of answers.
    if prompt.generation:
        digest.update(repr((prompt.generation.max_new_tokens, prompt.generation.stop)).encode())
    if prompt.generation and prompt.thinking:
        digest.update(repr(prompt.thinking).encode())
    return digest.hexdigest()


class AnswerStore:
    """The open answers.jsonl of a run: rows are `Answer` plus its `key`; of several rows of one
    prompt the last counts. Neither rows nor their index are in memory.

    A row with `asked` false takes an arm's answer to a question out again: its score is kept.
    """

    def __init__(self, path: Path) -> None:
        """Open or create `path`. Raises `InputError` if a row is not an answer, `DiskError` on
        I/O."""
        self._by_key, self._by_identity, self._by_content = (OffsetIndex() for _ in range(3))
        self._current = OffsetIndex()
        """The rows that this run has added, or found as they are."""
        self._others: dict[str, PromptScore] = {}
        self.n_rows = 0

        def index(offset: int, row: Row) -> None:
            answer = _parse_answer(row, f"{path}: row {self.n_rows + 1}")
            self._index(offset, row["key"], answer, asked=_is_asked(row))

        # An answer that is lost can be scored again, so rows are not synced one by one.
        self._journal = Journal(path, sync=False, on_row=index)

    def _index(self, offset: int, key: str, answer: Answer, *, asked: bool) -> None:
        self._by_key.add(key, offset)
        self._by_identity.add(repr(_identity(answer)), offset)
        if asked:
            self._by_content.add(_content_of(key, answer), offset)
        self.n_rows += 1

    def find(self, key: str) -> PromptScore | None:
        """Return the score stored under `key`, by this run or an earlier one."""
        for offset in reversed(self._by_key.get(key)):
            row = self._journal.row_at(offset)
            if row["key"] == key:
                return _score_of(_parse_answer(row, f"{self._journal.path}: byte {offset}"))
        return self._others.get(key)

    def read_others(self, paths: Sequence[Path]) -> None:
        """Read the answers in `paths`, which other processes stored; `add` writes them into this
        file."""
        for path in paths:
            for number, row in read_journal(path):
                answer = _parse_answer(row, f"{path}:{number}")
                self._others.setdefault(row["key"], _score_of(answer))

    def add(self, key: str, answer: Answer) -> None:
        """Store `answer`, unless it is the last one stored for its arm and question already."""
        offset = self._last_offset(key, answer)
        if offset is None:
            names = _FIELDS if answer.text is None else (*_FIELDS, *_written_fields(answer))
            row = {name: getattr(answer, name) for name in names}
            row |= {name: getattr(answer, name) for name in _RARE if getattr(answer, name)}
            row = {"key": key, **row, "log_probs": finite_or_none(answer.log_probs)}
            offset = self._journal.append(row)
            self._index(offset, key, answer, asked=True)
        self._current.add(str(offset), offset)

    def _last_offset(self, key: str, answer: Answer) -> int | None:
        """Return the offset of the last row of an arm and question, None unless it has this key and
        what the question gives now: its right answer may have been corrected since."""
        rows = self._by_identity.get(repr(_identity(answer)))
        # By the indices alone: a resumed run adds each answer that it found.
        if rows and rows[-1] in self._by_content.get(_content_of(key, answer)):
            return rows[-1]
        return None

    def leave_out_others(self) -> None:
        """Take the answers out that this run did not add: of questions, arms or formats that its
        recipe has no more."""
        lasts = self._by_identity.lasts()
        others = [offset for offset in lasts if not self._current.get(str(offset))]
        for offset in others:
            row = self._journal.row_at(offset)
            if _is_asked(row):
                row = {**row, "asked": False}
                answer = _parse_answer(row, f"{self._journal.path}: byte {offset}")
                self._index(self._journal.append(row), row["key"], answer, asked=False)

    def __enter__(self) -> AnswerStore:
        return self

    def __exit__(self, *error: object) -> None:
        self._journal.close()
        for index in (self._by_key, self._by_identity, self._by_content, self._current):
            index.close()


def read_answers(path: Path) -> list[Answer]:
    """Return the answers in `path`, the last one of each arm and question, in the order of their
    first rows; those that the last run did not ask for are left out.

    Written answers have the grades in grades.jsonl beside it, where a judge gave some.

    Raises `DiskError` if the file cannot be read, and `InputError` if a row (file:line) is not an
    answer or was changed, or if there are other rows than the manifest beside the file counts.
    """
    answers: list[Answer] = []
    left_out = set[int]()
    values: dict[object, object] = {}
    n_rows = 0
    with contextlib.closing(OffsetIndex()) as numbers:
        for number, row in read_journal(path):
            answer = _parse_answer(row, f"{path}:{number}")
            _share_values(answer, values)
            name = repr(_identity(answer))
            # Of two identities with one hash (once in 10^19) both are kept.
            same = [n for n in numbers.get(name) if _identity(answers[n]) == _identity(answer)]
            if same:
                place = same[0]
                answers[place] = answer
            else:
                place = len(answers)
                numbers.add(name, place)
                answers.append(answer)
            if _is_asked(row):
                left_out.discard(place)
            else:
                left_out.add(place)
            n_rows += 1
    del values
    answers = [answer for place, answer in enumerate(answers) if place not in left_out]
    manifest = manifest_beside(path)
    if isinstance(manifest, EvalManifest):
        _check_rows(path, n_rows, manifest.counts.stored)
    check_stored(path)
    grades = _read_grades(path.with_name(GRADES_FILE))
    if not grades:
        return answers
    return [with_grade(answer, grades) for answer in answers]


def open_answers(path: Path) -> AnswerStore:
    """Return the open answers of a run folder. Raises as `AnswerStore`, and `InputError` for rows
    that were changed."""
    if path.exists():
        check_stored(path)
    answers = AnswerStore(path)
    if not answers.n_rows:
        write_versions(path.with_name(VERSIONS_FILE))
    return answers


def check_stored(path: Path) -> None:
    """Raise `InputError` if the rows that the last finished run counted in `path` are no longer as
    it wrote them, by the hash in the manifest beside it. Rows may have been added behind them."""
    manifest = manifest_beside(path)
    if not isinstance(manifest, EvalManifest) or path.name not in manifest.outputs:
        return
    digest, n_rows = hashlib.sha256(), 0
    for _, line in islice(read_lines(path), manifest.counts.stored):
        # A last row that was cut is a missing one.
        if line.endswith(b"\n"):
            digest.update(line)
            n_rows += 1
    # Of missing rows the prompts are scored again: a damaged line is to be deleted.
    if n_rows == manifest.counts.stored and digest.hexdigest() != manifest.outputs[path.name]:
        raise InputError(
            f"{path}: its rows are not those that were written (manifest.json beside it has their "
            "hash). Move it away to score all prompts again, or delete manifest.json to take it as "
            "it is, and run kinject eval again."
        )


def _check_rows(path: Path, n_rows: int, n_written: int) -> None:
    """Raise `InputError` unless `path` has the rows that the last finished run counted."""
    again = "Run kinject eval again: it scores the missing prompts."
    # A file that was cut at the end of a line looks whole (tests/eval/test_damage.py).
    if n_rows < n_written:
        raise InputError(
            f"{path}: holds {format_count(n_rows, 'row')}, {n_written} were written (manifest.json "
            f"beside it). {again}"
        )
    # Of a model that was trained again some answers are new, and the others still the old one's.
    if n_rows > n_written:
        raise InputError(
            f"{path}: holds {format_count(n_rows, 'row')}, {n_written} of them of the last "
            "finished run (manifest.json beside it): an evaluation runs there, or was stopped. "
            f"{again}"
        )


_NO_CHECKS: Mapping[str, Any] = {}
_SHARED = (
    "question_id",
    "question_set",
    "arm",
    "format",
    "context_ids",
    "n_tokens",
    "n_bytes",
    "n_chars",
    "subject",
    "document_id",
    "greedy",
    "choice_set",
)
"""Fields whose values many answers have: the arms of a run ask the same questions."""


def _share_values(answer: Answer, values: dict[object, object]) -> None:
    """Let an answer that was just parsed hold the equal values of earlier ones, which are in
    `values`: 1.0 kB an answer becomes 0.5 kB."""
    for name in _SHARED:
        value = getattr(answer, name)
        # Not `replace`, which would parse nothing but check and copy all fields again.
        object.__setattr__(answer, name, values.setdefault(value, value))
    if not answer.checks:
        object.__setattr__(answer, "checks", _NO_CHECKS)


def is_judged(answer: Answer) -> bool:
    """Return whether a judge grades an answer: one that the model wrote freely. Letters and checks
    are graded by rule."""
    return answer.text is not None and not (answer.choices or answer.checks)


def with_grade(answer: Answer, grades: Mapping[tuple[str, str, str], str]) -> Answer:
    """Return an answer that a judge grades with its grade, if there is one for its question set,
    question id and text."""
    # A letter may be written in the words of a free answer, and is not graded with it.
    if not is_judged(answer):
        return answer
    grade = grades.get((answer.question_set, answer.question_id, answer.text or ""), "")
    return replace(answer, grade=grade)


def _read_grades(path: Path) -> dict[tuple[str, str, str], str]:
    """Return the grades in `path`, {} if there are none. Raises `InputError` for a row (file:line)
    that is no grade."""
    grades: dict[tuple[str, str, str], str] = {}
    for number, row in read_jsonl(path) if path.exists() else ():
        values = [row.get(name) for name in ("question_set", "question_id", "text", "grade")]
        if not all(isinstance(value, str) for value in values) or values[-1] not in GRADES:
            raise InputError(
                f"{path}:{number}: no grade of kinject. Run kinject eval again: it writes the file."
            )
        question_set, question_id, text, grade = map(str, values)
        grades[question_set, question_id, text] = grade
    return grades


def _score_of(answer: Answer) -> PromptScore:
    if answer.text is None:
        return PromptScore(answer.log_probs, answer.greedy, lengths=answer.n_tokens)
    return PromptScore(
        (), (), answer.text, sum(answer.n_tokens), answer.n_thinking, answer.thinking_cut
    )


def _written_fields(answer: Answer) -> tuple[str, ...]:
    """Return the fields of a written answer that a row has: those without a value are left out."""
    return tuple(name for name in _WRITTEN if name in ("text", "accepted") or getattr(answer, name))


def _identity(answer: Answer) -> _Identity:
    return (
        answer.question_set,
        answer.arm,
        answer.format,
        answer.shots,
        answer.k,
        answer.rotation,
        answer.question_id,
    )


def _content_of(key: str, answer: Answer) -> str:
    """Return what identifies a row but for the score, which follows from its key."""
    return content_id(key, *(getattr(answer, name) for name in _GIVEN))


def _is_asked(row: Row) -> bool:
    return row.get("asked") is not False


@cache
def _adapter() -> Any:
    # Here, so that a verb starts without pydantic.
    from pydantic import TypeAdapter

    return TypeAdapter(Answer)


def _parse_answer(row: Row, location: str) -> Answer:
    from pydantic import ValidationError

    log_probs = row.get("log_probs")
    if isinstance(log_probs, list):
        row = {**row, "log_probs": [math.nan if value is None else value for value in log_probs]}
    try:
        answer: Answer = _adapter().validate_python(
            {name: row[name] for name in row if name in _STORED}
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            f"{location}: {first['loc'][0]}: {first['msg']}. kinject writes no such row: remove it."
        ) from None
    # An open question has no choices, and 0 as its gold.
    n_choices = len(answer.choices or answer.log_probs)
    if not 0 <= answer.gold < max(1, n_choices) or not isinstance(row.get("key"), str):
        fault = (
            f"found key {row.get('key')!r:.60}, gold {answer.gold} of "
            f"{format_count(n_choices, 'choice')}"
        )
        raise InputError(f"{location}: {fault}. kinject writes no such row: remove it.")
    fault = _fault_of(answer)
    if fault:
        raise InputError(f"{location}: {fault}. kinject writes no such row: remove it.")
    return answer


def _fault_of(answer: Answer) -> str:
    """Return which fields of a stored answer do not belong together, "" if all do."""
    form, n = FORMATS.get(answer.format), len(answer.log_probs)
    # Of another program's format it is not known whether it writes.
    if form is not None and form.generates != (answer.text is not None):
        return f"text: found {answer.text!r:.40} in the format {answer.format}"
    if answer.text is not None:
        n = 1
    if n == 0:
        return "log_probs: is empty"
    if len(answer.n_tokens) != n:
        return f"n_tokens: found {format_count(len(answer.n_tokens), 'number')}, needed are {n}"
    for value, n_tokens in zip(answer.log_probs, answer.n_tokens, strict=False):
        # Each token's is 0 at most, but servers round: below 1 is read from them.
        if value > max(1, n_tokens):
            return f"log_probs: found {value:g}, which is no log-prob"
    return ""


def finite_or_none(values: Sequence[float]) -> list[float | None]:
    """Return `values` with None for NaN and infinities, which JSON cannot hold."""
    return [value if math.isfinite(value) else None for value in values]


Store = Callable[[str, PromptScore], None]
"""Stores the score of a prompt under its key."""


@dataclass(frozen=True)
class ProcessShard:
    """The prompts of one process of `size`. Process 0 writes to the run folder, the others to a
    folder in it.

    Those of tensor parallelism hold the model together, so that each reads every prompt: what one
    skipped, the others would wait for.
    """

    rank: int
    size: int
    run_dir: Path
    is_tensor_parallel: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes the report."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """The folder to which this process appends its answers."""
        return self.run_dir if self.is_first else self.run_dir / f"process-{self.rank}"

    def other_answers(self) -> list[Path]:
        """Return the answers of other processes, of this run or of one that was killed; [] if this
        is not the first."""
        return sorted(self.run_dir.glob("process-*/answers.jsonl")) if self.is_first else []

    def mine(self, items: Sequence[Item], key: Callable[[Item], str]) -> list[Item]:
        """Return this process's items. Items with the same key stay together: they share a
        beginning."""
        if self.is_tensor_parallel:
            return list(items)
        numbers = {name: number for number, name in enumerate(dict.fromkeys(map(key, items)))}
        return [
            # Neighbours stay with one process too, as they share beginnings.
            item
            for item in items
            if numbers[key(item)] * self.size // len(numbers) == self.rank
        ]

    def from_first(self, value: Value) -> Value:
        """Return the first process's `value`."""
        if self.size == 1:
            return value
        # Here, because one process needs no accelerate.
        from accelerate.utils import broadcast_object_list

        values: list[Any] = [value]
        broadcast_object_list(values, from_process=0)
        return values[0]  # type: ignore[no-any-return]

    def gather(self, mine: dict[str, Value]) -> dict[str, Value]:
        """Return the entries of all processes."""
        if self.size == 1 or self.is_tensor_parallel:
            return mine
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, mine)
        return {key: value for part in parts for key, value in part.items()}

    def finish(self) -> None:
        """Wait for the other processes; the first one then deletes their folders, whose answers it
        has stored."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if self.is_first:
            for folder in sorted(self.run_dir.glob("process-*")):
                shutil.rmtree(folder)


def join_processes(run_dir: Path) -> ProcessShard:
    """Return this process's shard: of 1, or of the number that `accelerate launch` or torchrun
    started.

    Raises `InputError` if the launcher asks for weights in parts, other than by tensor parallelism
    over all processes: transformers would load none in most processes.
    """
    n_together = tensor_parallel_size()
    if what_shards() and (n_together == 1 or what_shards() == "DeepSpeed"):
        raise InputError(
            f"accelerate launch asks for {what_shards()}, but an evaluation does not shard a "
            "model. "
            "Launch it with --multi_gpu, each process with the whole model, or start one process "
            "and spread a model over its GPUs: device_map: auto in its table of eval.models."
        )
    if world_size() == 1:
        return ProcessShard(0, 1, run_dir)
    if n_together not in (1, world_size()):
        raise InputError(
            f"parallelism_config_tp_size: found {n_together}, and {world_size()} processes were "
            "started. In an evaluation all of them hold each model together: make both the same."
        )
    import torch
    from accelerate import PartialState

    text = "processes share the questions; each loads every model whole"
    if n_together > 1:
        text = "processes hold each model together (tensor parallel) and read the same questions"
    if is_first_process():
        show(f"{world_size()} {text}", file=sys.stderr)
    state = PartialState(cpu=not torch.cuda.is_available())
    return ProcessShard(state.process_index, state.num_processes, run_dir, n_together > 1)


@dataclass(frozen=True)
class ResumableScoring:
    """Scores this process's prompts, and skips those with a stored answer.

    If it `is_complete`, all answers were stored by shards, and nothing is scored.
    """

    answers: AnswerStore
    shard: ProcessShard
    is_complete: bool = False

    def refuse_missing(self, model: str, n_missing: int) -> None:
        """Raise `InputError` for prompts of a model that no shard has scored."""
        if self.is_complete and n_missing:
            raise InputError(
                f"{model}: the shards lack {n_missing:,} of its answers: its weights have changed "
                "since, or this machine reads them in another dtype (device, dtype of its table in "
                "eval.models). Merge where the shards ran, or run them again."
            )

    def stored(self, keys: Collection[str]) -> dict[str, PromptScore]:
        """Return the scores of those of `keys` that the first process has stored."""
        scores = ((key, self.answers.find(key)) for key in keys)
        # Only the first process has read what earlier runs stored.
        return self.shard.from_first({key: score for key, score in scores if score is not None})

    def mine(self, groups: Mapping[str, str]) -> list[str]:
        """Return this process's keys of `groups`; keys of one group (a question, say) stay with one
        process."""
        return self.shard.mine(list(groups), key=groups.__getitem__)

    def score(
        self,
        scorer: Scorer | AnswerGenerator,
        prompts: Mapping[str, Encoded],
        stored: Collection[str],
        store: Store,
    ) -> dict[str, PromptScore]:
        """Return the score of each of `prompts` (by key) that is not `stored`; `store` gets each as
        soon as it is done."""
        keys = [key for key in prompts if key not in stored]
        scores: dict[str, PromptScore] = {}
        for index, score in scorer.score([prompts[key] for key in keys]):
            scores[keys[index]] = score
            store(keys[index], score)
        return scores
