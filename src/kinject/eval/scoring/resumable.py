"""Resumable scoring: stored prompts are not scored again, processes divide the rest, and a killed batch resumes exactly."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kinject.disk import delete_file, read_checked_json, write_checked_json
from kinject.eval.scoring.answers import AnswerStore, PromptScore
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.scorer import Scorer
from kinject.process import is_launched, world_size

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Shard:
    """The prompts of one process of `size`. Process 0 writes to the run folder, the others to a folder in it."""

    rank: int
    size: int
    run_dir: Path

    @property
    def is_first(self) -> bool:
        """Whether this process writes the report."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """The folder to which this process appends its answers."""
        return self.run_dir if self.is_first else self.run_dir / f"process-{self.rank}"

    def other_answers(self) -> list[Path]:
        """Return the answers of other processes, of this run or of one that was killed; [] if this is not the first."""
        return sorted(self.run_dir.glob("process-*/answers.jsonl")) if self.is_first else []

    def mine(self, items: Sequence[Item], key: Callable[[Item], str]) -> list[Item]:
        """Return this process's items. Items with the same key stay together: they share a beginning."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(map(key, items)))}
        return [item for item in items if numbers[key(item)] * self.size // len(numbers) == self.rank]

    def from_first(self, value: Value) -> Value:
        """Return the first process's `value`."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        values: list[Any] = [value]
        broadcast_object_list(values, from_process=0)
        return values[0]  # type: ignore[no-any-return]

    def gather(self, mine: dict[str, Value]) -> dict[str, Value]:
        """Return the entries of all processes."""
        if self.size == 1:
            return mine
        import torch.distributed as dist

        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, mine)
        return {key: value for part in parts for key, value in part.items()}

    def finish(self) -> None:
        """Wait for the other processes; the first one then deletes their folders, whose answers it has stored."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if self.is_first:
            for folder in sorted(self.run_dir.glob("process-*")):
                shutil.rmtree(folder)


def join_processes(run_dir: Path) -> Shard:
    """Return this process's shard: of 1, or of the number that `accelerate launch` or torchrun started."""
    if world_size() == 1:
        return Shard(0, 1, run_dir)
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    return Shard(state.process_index, state.num_processes, run_dir)


def single_process_notes() -> list[str]:
    """Return a note if `accelerate launch` was to start several processes but started only this one.

    That happens without GPUs, unless it gets ``--multi_gpu`` (then gloo joins the processes) or finds MPI. The port
    that it sets for several processes shows it.
    """
    if is_launched() or not ("ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ):
        return []
    return ["accelerate launch started one process only; without GPUs it starts several with --multi_gpu"]


@dataclass(frozen=True)
class ResumableScoring:
    """Scores this process's prompts, skips those with a stored answer, and resumes an interrupted batch."""

    answers: AnswerStore
    shard: Shard

    def stored(self, keys: Collection[str]) -> dict[str, PromptScore]:
        """Return the scores of those of `keys` that the first process has stored."""
        scores = ((key, self.answers.find(key)) for key in keys)
        return self.shard.from_first({key: score for key, score in scores if score is not None})

    def mine(self, groups: Mapping[str, str]) -> list[str]:
        """Return this process's keys of `groups`; keys of one group (a question, say) stay with one process."""
        return self.shard.mine(list(groups), key=groups.__getitem__)

    def score(
        self,
        scorer: Scorer,
        prompts: Mapping[str, Encoded],
        stored: Collection[str],
        store: Callable[[str, PromptScore], None],
    ) -> dict[str, PromptScore]:
        """Return the score of each of `prompts` (by key) that is not `stored`; `store` gets each as soon as it is done.

        The scorer batches prompts. The keys of a batch are on disk (pending.json) until it is done, so that a killed
        run repeats the same batch without its stored prompts and gets the same last digit.
        """
        path = self.shard.folder / "pending.json"
        scores: dict[str, PromptScore] = {}
        for keys in _batches(path, prompts, stored):
            write_checked_json(path, {"keys": keys})
            done = {index for index, key in enumerate(keys) if key in stored}
            for index, score in scorer.score([prompts[key] for key in keys], done):
                scores[keys[index]] = score
                store(keys[index], score)
            delete_file(path)
        return scores


def _batches(path: Path, prompts: Mapping[str, Encoded], stored: Collection[str]) -> Iterator[list[str]]:
    """Yield the keys to score together: those of an interrupted batch, then all others that are not stored."""
    missing = [key for key in prompts if key not in stored]
    interrupted = _read_pending(path)
    together = set(interrupted)
    if prompts.keys() >= together and not together.isdisjoint(missing):
        yield interrupted
        missing = [key for key in missing if key not in together]
    if missing:
        yield missing


def _read_pending(path: Path) -> list[str]:
    """Return the keys in `path`; [] if it is absent or holds something else: then all missing prompts form one batch."""
    if not path.exists():
        return []
    fix = "Delete it: the prompts of its batch are scored again, and may differ in the last digit."
    keys = read_checked_json(path, fix).get("keys")
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else []
