"""Questions shared between the processes of `accelerate launch`; alone, all of them are this process's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kinject.disk import read_sealed, remove, write_sealed
from kinject.eval.scoring.answers import AnswerBook
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.scorer import Reading, Scorer
from kinject.process import is_launched, world_size

Item = TypeVar("Item")
Value = TypeVar("Value")


@dataclass(frozen=True)
class Share:
    """One process of `size`; process 0 writes the run folder, the others a folder of their own in it, `folder`."""

    rank: int
    size: int
    run_dir: Path

    @property
    def is_first(self) -> bool:
        """Whether this process writes the report."""
        return self.rank == 0

    @property
    def folder(self) -> Path:
        """Where this process stores its answers as they come."""
        return self.run_dir if self.is_first else self.run_dir / f"process-{self.rank}"

    def parts(self) -> list[Path]:
        """Return answers that other processes stored, in this run or in one that was killed, for the first process."""
        return sorted(self.run_dir.glob("process-*/answers.jsonl")) if self.is_first else []

    def own(self, items: Sequence[Item], key: Callable[[Item], str]) -> list[Item]:
        """Return this process's items: those of one question stay together, since they share what is read."""
        numbers = {name: number for number, name in enumerate(dict.fromkeys(map(key, items)))}
        return [item for item in items if numbers[key(item)] * self.size // len(numbers) == self.rank]

    def from_first(self, value: Value) -> Value:
        """Return the first process's `value`."""
        if self.size == 1:
            return value
        from accelerate.utils import broadcast_object_list

        found: list[Any] = [value]
        broadcast_object_list(found, from_process=0)
        return found[0]  # type: ignore[no-any-return]

    def gather(self, found: dict[str, Value]) -> dict[str, Value]:
        """Return what all processes found together."""
        if self.size == 1:
            return found
        import torch.distributed as dist

        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, found)
        return {key: value for part in everyone for key, value in part.items()}

    def missing(self) -> NoReturn:
        """Say that an answer is nowhere, which can only be a fault of this module."""
        raise AssertionError("an answer that the first process knew did not reach this one")

    def finish(self) -> None:
        """Wait for the others; the first process then deletes what they stored, which it holds by now."""
        if self.size > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if self.is_first:
            _remove(self.run_dir.glob("process-*"))


def join_processes(run_dir: Path) -> Share:
    """Return this process's share: of 1, or of as many as `accelerate launch` (or torchrun) started."""
    if world_size() == 1:
        return Share(0, 1, run_dir)
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=not torch.cuda.is_available())
    return Share(state.process_index, state.num_processes, run_dir)


def lone_process_notes() -> list[str]:
    """Return a note where `accelerate launch` was asked for several processes and started this one alone.

    Without GPUs it does so unless it is told ``--multi_gpu`` (then gloo joins them) or has MPI; the port that it sets for
    several is what shows it.
    """
    if is_launched() or not ("ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ):
        return []
    return ["accelerate launch started one process only; without GPUs it starts several with --multi_gpu"]


def _remove(folders: Iterable[Path]) -> None:
    import shutil

    for folder in list(folders):
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Desk:
    """The answers of a run folder and this process's share of its prompts."""

    book: AnswerBook
    share: Share

    def stored(self, keys: Collection[str]) -> frozenset[str]:
        """Return those of `keys` that need no model, as the first process knows them."""
        return self.share.from_first(frozenset(key for key in keys if self.book.find(key) is not None))

    def own(self, together: Mapping[str, str]) -> list[str]:
        """Return this process's keys; those of one value of `together` (a question, say) stay with one process."""
        return self.share.own(list(together), key=together.__getitem__)

    def ask(
        self,
        scorer: Scorer,
        prompts: Mapping[str, Encoded],
        stored: Collection[str],
        keep: Callable[[str, Reading], None],
    ) -> dict[str, Reading]:
        """Return what the model says to each of `prompts` (by key) that is not `stored`; `keep` stores each as it comes.

        Prompts are read in passes over many. Which ones a pass holds is on disk (pending.json) until it is done, so that
        a run that was killed reads what is left as it would have been read, and comes to the same last digit.
        """
        path = self.share.folder / "pending.json"
        said: dict[str, Reading] = {}
        for keys in _passes(path, prompts, stored):
            write_sealed(path, {"keys": keys})
            known = {index for index, key in enumerate(keys) if key in stored}
            for index, reading in scorer.read([prompts[key] for key in keys], known):
                said[keys[index]] = reading
                keep(keys[index], reading)
            remove(path)
        return said


def _passes(path: Path, prompts: Mapping[str, Encoded], stored: Collection[str]) -> Iterator[list[str]]:
    """Yield the keys to read together: those of a pass that was cut short, then what else is not stored."""
    left = [key for key in prompts if key not in stored]
    begun = _begun(path)
    together = set(begun)
    if prompts.keys() >= together and not together.isdisjoint(left):
        yield begun
        left = [key for key in left if key not in together]
    if left:
        yield left


def _begun(path: Path) -> list[str]:
    """Return the keys in `path`; none where it is absent or not ours, for then all that is left is read anew."""
    if not path.exists():
        return []
    keys = read_sealed(path, "Delete it: what was being asked is asked anew, and may differ in the last digit.").get(
        "keys"
    )
    return keys if isinstance(keys, list) and all(isinstance(key, str) for key in keys) else []
