"""Questions shared between the processes of `accelerate launch`; alone, all of them are this process's own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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
