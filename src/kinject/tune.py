"""A learning rate and a batch size from short runs.

`kinject find-lr` is a range test of the learning rate (Smith, 2015, arXiv 1506.01186) with the recipe's own trainer. The rate
rises by the same factor at every update, and the loss of each batch is recorded. The model is trained in memory and
restored bit by bit. `kinject find-batch` finds the largest per-device batch that fits, and the accumulation that keeps the
global batch.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinject.disk import (
    atomic_file,
    content_id,
    lock_dir,
    read_bytes,
    read_json,
    write_json,
    write_text,
)
from kinject.errors import InputError, TrainingError
from kinject.process import available_memory
from kinject.recipe import TrainRecipe
from kinject.terminal import Progress
from kinject.train.short_run import LOG, RESULT, last_log_line, run_process, short_recipe
from kinject.types import Tabular

if TYPE_CHECKING:
    from kinject.train.trainer import KnowledgeTrainer

_FORMAT = 1
_DECAY = 0.9
"""Of the running mean of the loss that decides when to stop."""
_SETTLED = 8
"""Updates before the running mean may stop the test."""


@dataclass(frozen=True)
class Ramp:
    """The rates `low` to `high` in `steps` updates.

    A loss of `diverged` times the lowest stops the test. The suggestion is at most the rate of the lowest loss / `margin`.
    """

    low: float = 1e-7
    high: float = 1.0
    steps: int = 100
    diverged: float = 1.5
    margin: float = 10.0

    @property
    def factor(self) -> float:
        """The ratio of the rates of neighbouring updates."""
        return float((self.high / self.low) ** (1 / (self.steps - 1)))


@dataclass(frozen=True)
class RangeTest(Tabular):
    """The result of a range test.

    `smoothed` holds means over neighbouring updates. `steepest` is the rate at which the loss falls fastest over the
    logarithm of the rate, `lowest` that of the lowest smoothed loss. `suggestion` is None if the loss did not fall.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    lowest: float | None
    suggestion: float | None
    ended: str

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each update."""
        columns = zip(self.rates, self.losses, self.smoothed, strict=True)
        return [{"learning rate": rate, "loss": loss, "smoothed": mean} for rate, loss, mean in columns]


def find_lr(recipe: TrainRecipe, ramp: Ramp) -> tuple[RangeTest, Path]:
    """Test the rates of `ramp`, write find-lr/lr.json, lr.csv and lr.png, and return the result and that folder.

    A test of the same recipe, inputs and ramp is not repeated. Raises `InputError` for a ramp out of range, and what
    `kinject.train` raises before a run starts.
    """
    check_ramp(ramp)
    _check_optimizer(recipe)
    from kinject.train.run import hash_inputs
    from kinject.train.setup import make_trainer

    folder = recipe.run_dir / "find-lr"
    short = ramp_recipe(recipe, ramp, folder)
    files = {name: content for name, content in hash_inputs(recipe).items() if name != "fingerprint"}
    values = {key: value for key, value in short.raw.items() if key != "run_dir"}
    identity = content_id(_FORMAT, asdict(ramp), values, files)
    with lock_dir(folder):
        stored = _read_stored(folder / "lr.json", identity)
        if stored is not None:
            return stored, folder
        rates, losses, ended = range_test(make_trainer(short), ramp)
        result = suggest(rates, losses, ramp, ended)
        write_text(folder / "lr.csv", _csv(result))
        with atomic_file(folder / "lr.png", "wb") as file:
            file.write(draw(result))
        stored_result = {**asdict(result), "losses": [loss if math.isfinite(loss) else None for loss in result.losses]}
        write_json(folder / "lr.json", {"id": identity, "ramp": asdict(ramp), "result": stored_result})
    return result, folder


def _read_stored(path: Path, identity: str) -> RangeTest | None:
    """Return the stored result of the same test, None if there is none. Raises `InputError` for a damaged file."""
    if not path.is_file():
        return None
    fix = "Delete it to repeat the test."
    try:
        stored = read_json(path, fix)
        if stored["id"] != identity:
            return None
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in stored["result"].items()
        }
        fields["losses"] = tuple(math.nan if loss is None else loss for loss in fields["losses"])
        return RangeTest(**fields)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}). {fix}") from error


def check_ramp(ramp: Ramp) -> None:
    """Raise `InputError` for a number out of range, with the allowed range."""
    if not 0 < ramp.low < ramp.high < math.inf:
        raise InputError(f"--low {ramp.low:g} --high {ramp.high:g}: expected 0 < low < high, both finite.")
    for option, value, least in (
        ("steps", ramp.steps, 20),
        ("diverged", ramp.diverged, 1.01),
        ("margin", ramp.margin, 1),
    ):
        if not value >= least:
            raise InputError(f"--{option}: found {value:g}, allowed: {least:g} or more.")


def _check_optimizer(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for an optimizer whose loss does not depend on the current rate alone."""
    optim = str(recipe.trainer.get("optim", ""))
    if optim.startswith("schedule_free"):
        raise recipe.error(
            "trainer.optim",
            f"{optim} averages over all rates so far, so a range test cannot separate them. Test AdamW with "
            "trainer.optim=adamw_torch and start from its rate: schedule-free tolerates that rate or a higher one.",
        )


def ramp_recipe(recipe: TrainRecipe, ramp: Ramp, folder: Path) -> TrainRecipe:
    """Return `recipe` with the ramp as its schedule, its own batch and optimizer, and no evaluation or checkpoint."""
    schedule = {
        "learning_rate": ramp.low, "lr_scheduler_type": "exponential_decay",
        "lr_scheduler_kwargs": {"gamma": ramp.factor}, "warmup_steps": 0,
    }  # fmt: skip
    return short_recipe(recipe, folder, ramp.steps, schedule, {"skipped_updates": 0})


def range_test(trainer: KnowledgeTrainer, ramp: Ramp) -> tuple[list[float], list[float], str]:
    """Return the rates, the loss of each update before it was made, and how the test ended.

    The schedule of `trainer` is the ramp. Its model and the random number generators are restored exactly. Raises
    `TrainingError` if no update was made.
    """
    recorder = _make_recorder(ramp)
    trainer.add_callback(recorder)
    ended = "the whole range was tried"
    with restored(trainer.model):
        try:
            trainer.train()
        except TrainingError as error:  # the guard: a gradient that is not finite
            if not recorder.losses:
                raise
            ended = f"stopped: {error}"
    if recorder.diverged:
        ended = f"stopped at {recorder.rates[-1]:.2g}: the loss rose to {ramp.diverged:g} times its lowest value"
    return recorder.rates, recorder.losses, ended


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Restore, bit by bit, the parameters, buffers and mode of `model` and the random number generators."""
    import torch

    # state_dict leaves out buffers that are not saved
    tensors = [*model.parameters(), *model.buffers()]
    copies = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    states = (random.getstate(), np.random.get_state())
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)
            for module, mode in modes:
                module.training = mode
            model.zero_grad(set_to_none=True)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _make_recorder(ramp: Ramp) -> Any:
    """Return a callback that records rate and loss of each update and ends training once the loss diverges."""
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Records rates and losses."""

        def __init__(self) -> None:
            self.rates: list[float] = []
            self.losses: list[float] = []
            self.diverged = False
            self._rate, self._sum, self._lowest = 0.0, 0.0, math.inf

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            """Keep the rate of the update: the top layer's if lower layers have smaller ones."""
            self._rate = max(float(group["lr"]) for group in optimizer.param_groups)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Record a row of the log, and stop training once the loss diverges."""
            if "loss" not in (logs or {}):
                return
            loss = float(logs["loss"])
            self.rates.append(self._rate)
            self.losses.append(loss)
            n = len(self.losses)
            self._sum = _DECAY * self._sum + (1 - _DECAY) * loss
            mean = self._sum / (1 - _DECAY**n)
            if n > _SETTLED:
                self.diverged = not mean <= ramp.diverged * self._lowest
                control.should_training_stop = control.should_training_stop or self.diverged
            self._lowest = min(self._lowest, mean)

    return Recorder()


def suggest(rates: Sequence[float], losses: Sequence[float], ramp: Ramp, ended: str) -> RangeTest:
    """Return the suggestion for the losses at ascending rates. The first loss that is not finite ends the series.

    Smoothing is a mean over a window centred on each update, the slope a least-squares line over the same window, so neither
    lags. The suggestion is the steepest rate, at most the rate of the lowest loss / margin, cut to two digits.
    """
    n = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    x, y = np.log10(np.asarray(rates[:n])), np.asarray(losses[:n], dtype=np.float64)
    half = max(2, ramp.steps // 20)
    windows = [slice(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    smoothed = [float(y[window].mean()) for window in windows]
    slopes = [_slope(x[window], y[window]) for window in windows]
    empty = RangeTest(tuple(rates), tuple(losses), tuple(smoothed), None, None, None, ended)
    if n < 4 * half:
        return empty
    lowest_index = int(np.argmin(smoothed))
    noise = float(np.std(np.diff(y[: 4 * half]))) / math.sqrt(2 * half + 1)
    if smoothed[0] - smoothed[lowest_index] <= 3 * noise or lowest_index == 0:
        return empty
    steepest = rates[int(np.argmin(slopes[: lowest_index + 1]))]
    lowest = rates[lowest_index]
    return replace(empty, steepest=steepest, lowest=lowest, suggestion=two_digits(min(steepest, lowest / ramp.margin)))


def two_digits(value: float) -> float:
    """Return `value` cut, not rounded up, to two significant digits."""
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / scale * (1 + 1e-12)) * scale:.1e}")


def _slope(x: Any, y: Any) -> float:
    spread = x - x.mean()
    return float((spread * (y - y.mean())).sum() / max(float((spread**2).sum()), 1e-300))


def _csv(result: RangeTest) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["update", "learning_rate", "loss", "smoothed"])
    smoothed = [*result.smoothed, *[None] * (len(result.losses) - len(result.smoothed))]
    for row in zip(range(len(result.rates)), result.rates, result.losses, smoothed, strict=True):
        writer.writerow(row)
    return file.getvalue()


def render_range_test(result: RangeTest, ramp: Ramp) -> str:
    """Return the range, how the test ended, the rates of interest, and the line to set, as text."""
    lines = [f"{len(result.losses)} updates from {result.rates[0]:.2g} to {result.rates[-1]:.2g}; {result.ended}"]
    if result.suggestion is None:
        return "\n".join([*lines, "the loss did not fall beyond its noise: no suggestion. Widen --low and --high, use "
                          "more --steps, or a larger batch."])  # fmt: skip
    lines += [
        f"the loss falls fastest at {result.steepest:.2g} and is lowest at {result.lowest:.2g} (suggestion: the first, at most "
        f"the second / {ramp.margin:g})", "", f"trainer:\n  learning_rate: {result.suggestion:.1e}",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(result: RangeTest) -> bytes:
    """Return a PNG: the loss over the rate, raw and smoothed, with the suggested, steepest and lowest rates marked."""
    from kinject.report.plots.style import LEARNING, MUTED, OTHER, RETENTION, RULE, panels, render_png, style

    with style():
        figure, (panel,), _ = panels(1, 1, 3.4)
        figure.set_size_inches(7.2, 4.2)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-").replace("e+00", ""))
        panel.plot(result.rates, result.losses, color=OTHER, linewidth=1, label="loss of each batch")
        panel.plot(result.rates[: len(result.smoothed)], result.smoothed, color=LEARNING, linewidth=2, label="smoothed")
        marks = (("suggested", result.suggestion, RETENTION, "-"), ("steepest", result.steepest, MUTED, ":"),
                 ("lowest loss", result.lowest, MUTED, "--"))  # fmt: skip
        for name, rate, colour, line in marks:
            if rate is not None:
                panel.axvline(rate, color=colour, linestyle=line, linewidth=1.5, label=f"{name} {rate:.2g}")
        if result.smoothed:
            low, high = min(result.smoothed), max(result.smoothed)
            panel.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.25 * (high - low) + 1e-3)
        panel.grid(axis="y", color=RULE, linewidth=0.6)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.legend(loc="best")
        return render_png(figure)


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
        return [
            {"batch": trial.batch, "peak bytes": trial.peak_bytes, "fits": trial.fits(self.limit)}
            for trial in self.trials
        ]


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
    tried = tuple(sorted(trials.trials.values(), key=lambda trial: trial.batch))
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
        self.trials: dict[int, BatchTrial] = {}
        if self.path.is_file():
            fix = "Delete it to repeat the trials."
            try:
                stored = read_json(self.path, fix)
                if stored["id"] == self.identity:
                    self.trials = {item["batch"]: BatchTrial(**item) for item in stored["trials"]}
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{self.path}: damaged ({error!r}). {fix}") from error

    def get(self, batch: int) -> BatchTrial:
        """Return the trial of `batch`: the stored one, or one made now.

        A stored trial that was killed at a limit does not show whether it fits a higher one, so it is repeated.
        """
        stored = self.trials.get(batch)
        if stored is None or (stored.peak_bytes is None and not stored.refused):
            self.trials[batch] = self._try(batch)
            trials = [asdict(trial) for trial in self.trials.values()]
            write_json(self.path, {"id": self.identity, "trials": trials})
        return self.trials[batch]

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
