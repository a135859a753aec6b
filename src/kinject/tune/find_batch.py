"""`kinject find-batch`: the largest per-device batch that fits, and the accumulation that keeps the global batch.

The search doubles the batch, then bisects. Each trial is a process of its own, so that running out of memory ends only the
trial. On a CPU a trial fits if its peak resident memory stays within a limit; on a GPU if the allocator refuses nothing
(and the peak stays within the limit, if one is given). A finished trial is not repeated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kinject.disk import content_id, lock_dir, read_bytes, read_checked_json, write_checked_json
from kinject.errors import InputError
from kinject.process import available_memory
from kinject.recipe import TrainRecipe
from kinject.terminal import Progress
from kinject.train.short_run import LOG, RESULT, last_log_line, run_process, short_recipe
from kinject.types import Tabular

_FORMAT = 1
_UPDATES = 2  # the first makes the optimizer's state, the second has it beside the gradients


@dataclass(frozen=True)
class BatchTrial:
    """The memory of one batch: `peak_bytes` (None if the process was killed before), and whether the device refused."""

    batch: int
    peak_bytes: int | None
    refused: bool

    def fits(self, limit: int | None) -> bool:
        """Return whether the batch ran, within `limit` bytes if one is given."""
        return not self.refused and self.peak_bytes is not None and (limit is None or self.peak_bytes <= limit)


@dataclass(frozen=True)
class BatchResult(Tabular):
    """The `largest` batch that fits, and a `batch` and `accumulation` that keep the global batch."""

    largest: int
    batch: int
    accumulation: int
    devices: int
    trials: tuple[BatchTrial, ...]
    limit: int | None

    @property
    def global_batch(self) -> int:
        """Rows of one update over all devices."""
        return self.batch * self.accumulation * self.devices

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each batch that was tried."""
        return [{"batch": one.batch, "peak bytes": one.peak_bytes, "fits": one.fits(self.limit)} for one in self.trials]


def find_batch(recipe: TrainRecipe, limit: int | None, max_batch: int | None) -> BatchResult:
    """Return the largest batch up to `max_batch` that fits into `limit` bytes (None: a GPU's memory, or what is free here).

    `max_batch` defaults to the recipe's rows of an update on one device. Trials are kept in run_dir/find-batch/trials.json.
    Raises `InputError` if not even one row fits.
    """
    from kinject.models import choose_device
    from kinject.train.config import make_sft_config

    config = make_sft_config(recipe)
    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    if limit is None and device != "cuda":
        limit = available_memory()
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    folder = recipe.run_dir / "find-batch"
    with lock_dir(folder):
        trials = _Trials(recipe, folder, device, limit)
        with Progress("trying", max((max_batch or rows).bit_length() * 2 - 1, 1), "batches") as progress:

            def fits(batch: int) -> bool:
                progress.set_status(f"batch {batch}")
                result = trials.get(batch).fits(limit)
                progress.advance()
                return result

            largest = largest_that_fits(fits, max_batch or rows)
    if largest == 0:
        raise InputError(
            f"not one row fits {_limit_text(limit)}. In the order of least cost: trainer.gradient_checkpointing: true, "
            "trainer.optim: adamw_8bit, a shorter trainer.max_length, an adapter section, a smaller model."
        )
    batch = next(size for size in range(min(largest, rows), 0, -1) if rows % size == 0)
    tried = tuple(sorted(trials.done.values(), key=lambda trial: trial.batch))
    return BatchResult(largest, batch, rows // batch, config.world_size, tried, limit)


def largest_that_fits(fits: Callable[[int], bool], max_batch: int) -> int:
    """Return the largest of 1 to `max_batch` that `fits`, 0 if none does. A larger batch needs more memory.

    Tries 1, 2, 4, ... up to the first that does not fit, then bisects between that and the last that did.
    """
    low, high = 0, 1
    while high <= max_batch and fits(high):
        low, high = high, min(2 * high, max_batch) if high < max_batch else max_batch + 1
    high = min(high, max_batch + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Trials:
    """The trials of one recipe on one machine, kept on disk."""

    def __init__(self, recipe: TrainRecipe, folder: Path, device: str, limit: int | None) -> None:
        from kinject.train.run import hash_inputs

        self.recipe, self.folder, self.device, self.limit = recipe, folder, device, limit
        files = {name: content for name, content in hash_inputs(recipe).items() if name != "fingerprint"}
        self.identity = content_id(_FORMAT, device, dict(self.trial_recipe(0, Path()).raw), files)
        self.path = folder / "trials.json"
        self.done: dict[int, BatchTrial] = {}
        if self.path.is_file():
            fix = "Delete it to repeat the trials."
            try:
                stored = read_checked_json(self.path, fix)
                if stored["id"] == self.identity:
                    self.done = {item["batch"]: BatchTrial(**item) for item in stored["trials"]}
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path}: damaged ({error!r}). {fix}") from error

    def get(self, batch: int) -> BatchTrial:
        """Return the trial of `batch`: the stored one, or one made now.

        A stored trial that was killed at a limit does not show whether it fits a higher one, so it is repeated.
        """
        stored = self.done.get(batch)
        if stored is None or (stored.peak_bytes is None and not stored.refused):
            self.done[batch] = self._try(batch)
            trials = [asdict(trial) for trial in self.done.values()]
            write_checked_json(self.path, {"id": self.identity, "trials": trials})
        return self.done[batch]

    def _try(self, batch: int) -> BatchTrial:
        folder = self.folder / f"batch-{batch}"
        limit = self.limit if self.device != "cuda" else None
        code = run_process(self.trial_recipe(batch, folder), longest_rows=True, limit=limit)
        if (folder / RESULT).is_file():
            result = json.loads(read_bytes(folder / RESULT))
            return BatchTrial(batch, result["peak_bytes"], result["out_of_memory"])
        if code in (None, -9):  # killed at the limit, or by the system when memory was used up
            return BatchTrial(batch, None, False)
        reason = last_log_line(folder) or "it printed nothing"
        raise InputError(f"the trial with batch {batch} failed: {reason} (its log: {folder / LOG})")

    def trial_recipe(self, batch: int, folder: Path) -> TrainRecipe:
        """Return the recipe of a trial: the user's own with two updates of one batch."""
        trainer = {
            "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1,
            "train_sampling_strategy": "sequential",
        }  # fmt: skip
        return short_recipe(self.recipe, folder, _UPDATES, trainer)


def _limit_text(limit: int | None) -> str:
    return "the GPU" if limit is None else f"{limit / 2**30:.2f} GiB"


def render_batch(result: BatchResult) -> str:
    """Return the trials as text, and the two recipe lines to set."""
    lines = []
    for trial in result.trials:
        peak = f"{trial.peak_bytes / 2**30:.2f} GiB" if trial.peak_bytes is not None else "killed before its peak"
        lines.append(f"batch {trial.batch:>5}  {peak:>22}  {'fits' if trial.fits(result.limit) else 'does not fit'}")
    lines.append(f"largest tried that fits {_limit_text(result.limit)}: {result.largest}")
    if result.batch != result.largest:
        lines.append(f"{result.batch} is the largest below it that divides the global batch of {result.global_batch}")
    lines += [
        "", "trainer:", f"  per_device_train_batch_size: {result.batch}",
        f"  gradient_accumulation_steps: {result.accumulation}   # global batch {result.global_batch}, as before",
    ]  # fmt: skip
    return "\n".join(lines)
