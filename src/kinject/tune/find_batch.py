"""`kinject find-batch`: the largest per-device batch that fits, and the accumulation that keeps the global batch.

Doubling, then bisection; each trial is a process of its own, so that running out of memory ends the trial alone. On the
CPU a trial fits when the peak of its resident set stays within a limit; on a GPU when the allocator refuses nothing (and
its peak stays within the limit, where one is given). A trial that was finished is not done again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from kinject.disk import content_id, lock_dir, read_sealed, write_json, write_sealed, write_text
from kinject.errors import InputError
from kinject.process import available_memory, resident_memory
from kinject.recipe import TrainRecipe
from kinject.terminal import Progress

_FORMAT = 1
_UPDATES = 2  # the first makes the optimizer's state, the second has it beside the gradients
_POLL_SECONDS = 0.1
_LEFT_OUT = ("probes", "eval", "study")
_LATE_TECHNIQUES = ("freeze_base_steps", "freeze_base_except", "patience", "histogram_steps")
"""Techniques that need more updates, evaluations or a tracker."""


@dataclass(frozen=True)
class Trial:
    """What one batch took: `peak_bytes` (None where the process was ended first), and whether the device refused."""

    batch: int
    peak_bytes: int | None
    refused: bool

    def fits(self, limit: int | None) -> bool:
        """Return whether the batch ran, within `limit` bytes where one is given."""
        return not self.refused and self.peak_bytes is not None and (limit is None or self.peak_bytes <= limit)


@dataclass(frozen=True)
class Batch:
    """What was found: the `largest` batch that fits, and `batch` times `accumulation` times `devices` = `whole`."""

    largest: int
    batch: int
    accumulation: int
    devices: int
    trials: tuple[Trial, ...]
    limit: int | None

    @property
    def whole(self) -> int:
        """The rows of one update, over all devices."""
        return self.batch * self.accumulation * self.devices


def find_batch(recipe: TrainRecipe, limit: int | None, most: int | None) -> Batch:
    """Return the largest batch that fits `limit` bytes (None: what a GPU has, or what this machine has free), up to `most`.

    `most` is the recipe's rows of an update on one device unless given. Trials stand in run_dir/find-batch/trials.json.
    Raises `InputError` when not even one row fits.
    """
    from kinject.models import choose_device
    from kinject.train.config import build_config

    config = build_config(recipe)
    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    if limit is None and device != "cuda":
        limit = available_memory()
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    folder = recipe.run_dir / "find-batch"
    with lock_dir(folder):
        trials = _Trials(recipe, folder, device, limit)
        with Progress("trying", max((most or rows).bit_length() * 2 - 1, 1), "batches") as progress:

            def fits(batch: int) -> bool:
                progress.tell(f"batch {batch}")
                found = trials.of(batch).fits(limit)
                progress.advance()
                return found

            largest = largest_that_fits(fits, most or rows)
    if largest == 0:
        held = "the GPU" if limit is None else f"{limit / 2**30:.2f} GiB"
        raise InputError(
            f"not one row fits {held}. In the order of least cost: trainer.gradient_checkpointing: true, trainer.optim: "
            "adamw_8bit, a shorter trainer.max_length, an adapter section, a smaller model."
        )
    batch = next(size for size in range(min(largest, rows), 0, -1) if rows % size == 0)
    tried = tuple(sorted(trials.done.values(), key=lambda trial: trial.batch))
    return Batch(largest, batch, rows // batch, config.world_size, tried, limit)


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest of 1 to `most` that `fits`, 0 where none does; larger ones need more.

    Tries 1, 2, 4, ... up to the first that does not fit, then bisects between that and the last that did.
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, min(2 * high, most) if high < most else most + 1
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _Trials:
    """Trials of one recipe on one machine, kept on disk."""

    def __init__(self, recipe: TrainRecipe, folder: Path, device: str, limit: int | None) -> None:
        from kinject.train.run import inputs_of

        self.recipe, self.folder, self.device, self.limit = recipe, folder, device, limit
        files = {name: content for name, content in inputs_of(recipe).items() if name != "fingerprint"}
        self.identity = content_id(_FORMAT, device, self._values(0, Path()), files)
        self.path = folder / "trials.json"
        self.done: dict[int, Trial] = {}
        if self.path.is_file():
            cure = "Delete it to try anew."
            try:
                held = read_sealed(self.path, cure)
                if held["id"] == self.identity:
                    self.done = {item["batch"]: Trial(**item) for item in held["trials"]}
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path}: damaged ({error!r}). {cure}") from error

    def of(self, batch: int) -> Trial:
        """Return the trial of `batch`, done now unless it is known.

        One that was ended at a limit says nothing of a higher one, and is done again.
        """
        known = self.done.get(batch)
        if known is None or (known.peak_bytes is None and not known.refused):
            self.done[batch] = self._try(batch)
            write_sealed(self.path, {"id": self.identity, "trials": [asdict(trial) for trial in self.done.values()]})
        return self.done[batch]

    def _try(self, batch: int) -> Trial:
        place = self.folder / f"batch-{batch}"
        place.mkdir(parents=True, exist_ok=True)
        result = place / "result.json"
        result.unlink(missing_ok=True)
        write_text(
            place / "recipe.yaml", yaml.safe_dump(self._values(batch, place), sort_keys=False, allow_unicode=True)
        )
        write_json(place / "job.json", {"recipe": str(place / "recipe.yaml"), "batch": batch, "result": str(result)})
        with (place / "log.txt").open("wb") as log:
            command = [sys.executable, "-m", "kinject.tune.batch_trial", str(place / "job.json")]
            with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
                ended = _watch(process, self.limit if self.device != "cuda" else None)
        if result.is_file():
            found = json.loads(result.read_bytes())
            return Trial(batch, found["peak_bytes"], found["out_of_memory"])
        if ended or process.returncode == -9:  # by us at the limit, or by the system when memory was gone
            return Trial(batch, None, False)
        said = (place / "log.txt").read_text("utf-8", errors="replace").strip().splitlines()
        raise InputError(
            f"the trial with batch {batch} broke: {said[-1] if said else 'no word'} (its log: {place / 'log.txt'})"
        )

    def _values(self, batch: int, place: Path) -> dict[str, Any]:
        """Return the recipe of a trial: the user's own, two updates of one batch, nothing evaluated or saved."""
        values = {key: value for key, value in self.recipe.raw.items() if key not in _LEFT_OUT}
        values["guards"] = {"unread_corpus": "ignore", "zero_loss": "ignore"}
        if "techniques" in values:
            values["techniques"] = {
                key: value for key, value in values["techniques"].items() if key not in _LATE_TECHNIQUES
            }
        values["run_dir"] = str(place)
        values["corpus"] = {key: value for key, value in values["corpus"].items() if key != "validation_corpus"}
        trainer = {
            key: list(value) if isinstance(value, tuple) else value for key, value in self.recipe.trainer.items()
        }
        values["trainer"] = {
            **trainer, "per_device_train_batch_size": batch, "gradient_accumulation_steps": 1, "max_steps": _UPDATES,
            "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant", "lr_scheduler_kwargs": None,
            "warmup_steps": 0, "save_strategy": "no", "eval_strategy": "no", "eval_on_start": False,
            "load_best_model_at_end": False, "metric_for_best_model": None, "report_to": "none",
        }  # fmt: skip
        return values


def _watch(process: subprocess.Popen[bytes], limit: int | None) -> bool:
    """Wait for `process`; end it once its resident set passes `limit` bytes, and return whether that was so.

    Where the system does not tell the resident set of another process, the trial's own last word of its peak decides.
    """
    while True:
        try:
            process.wait(_POLL_SECONDS)
            return False
        except subprocess.TimeoutExpired:
            held = resident_memory(process.pid)
            if limit is not None and held is not None and held > limit:
                process.kill()
                process.wait()
                return True


def render_batch(found: Batch) -> str:
    """Return the trials as text, and the two recipe lines to set."""
    lines = []
    for trial in found.trials:
        peak = f"{trial.peak_bytes / 2**30:.2f} GiB" if trial.peak_bytes is not None else "ended before its peak"
        lines.append(f"batch {trial.batch:>5}  {peak:>22}  {'fits' if trial.fits(found.limit) else 'does not fit'}")
    held = "the GPU" if found.limit is None else f"{found.limit / 2**30:.2f} GiB"
    lines.append(f"largest tried that fits {held}: {found.largest}")
    if found.batch != found.largest:
        lines.append(f"{found.batch} of them divide the global batch of {found.whole}")
    lines += [
        "", "trainer:", f"  per_device_train_batch_size: {found.batch}",
        f"  gradient_accumulation_steps: {found.accumulation}   # global batch {found.whole}, as before",
    ]  # fmt: skip
    return "\n".join(lines)
