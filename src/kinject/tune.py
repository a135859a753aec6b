"""A learning rate and a batch size from short runs.

`find_lr` is a range test (Smith, arXiv 1506.01186) with the recipe's own trainer: the rate rises by
the same factor at every update, and the suggestion is the rate at which the smoothed loss is
lowest. `find_batch` tries smaller and smaller batches until one fits.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinject.disk import atomic_file, lock_dir, read_bytes, write_text
from kinject.errors import InputError, Problem, TrainingError
from kinject.process import available_memory
from kinject.recipe import TrainRecipe
from kinject.terminal import Progress, format_count, format_number, sparkline
from kinject.train.short_run import LOG, RESULT, last_log_line, run_process, short_recipe
from kinject.types import Tabular

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from kinject.train.trainer import KnowledgeTrainer

# With these rules all of 42 suggestions are within a factor of three of the best (docs/figures.md).
_DIVERGED = 1.5
"""A running mean of the loss of this many times its lowest value stops the test."""
_SETTLED = 8
"""Updates before the running mean may stop the test."""
_WINDOW = 0.5
"""Half of the window, in powers of ten of the rate, over which the loss is averaged."""
_FEWEST_EACH_SIDE = 3
"""Updates of half a window, however far the rates are apart."""
_FEWEST_WINDOWS = 3
"""Whole windows: of fewer, the lowest is the first or the last."""
_LEAST_RATIO = 20
"""Of the last rate to the first: up to ten times there is no whole window, however many updates."""
_LEAST_FALL = 5.0
"""Standard errors of that mean by which it must fall."""
_UPDATES = 2
"""Of a batch that is tried: the first makes the optimizer's state, the second has it beside the
gradients."""


@dataclass(frozen=True)
class Ramp:
    """The rates `low` to `high` in `steps` updates."""

    low: float = 1e-6
    high: float = 1.0
    steps: int = 100

    @property
    def factor(self) -> float:
        """The ratio of the rates of neighbouring updates."""
        return float((self.high / self.low) ** (1 / (self.steps - 1)))


@dataclass(frozen=True)
class RangeTest(Tabular):
    """The result of a range test: the loss of each update before it was made, and its mean over
    neighbouring updates.

    `suggestion` is None if `reason` says why there is none. `ended` says how the test ended.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None
    reason: str
    ended: str

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each update."""
        columns = zip(self.rates, self.losses, self.smoothed, strict=True)
        return [
            {"learning rate": rate, "loss": loss, "smoothed": mean} for rate, loss, mean in columns
        ]


def find_lr(recipe: TrainRecipe, ramp: Ramp) -> tuple[RangeTest, Path]:
    """Test the rates of `ramp`, write lr.csv and lr.png, and return the result and their folder,
    run_dir/find-lr.

    Raises `InputError` for a ramp out of range, and what `kinject.train` raises before a run
    starts.
    """
    # Of the smallest and the largest floats the ratio is none.
    if not 0 < ramp.low < ramp.high < math.inf or ramp.high / ramp.low == math.inf:
        raise InputError(
            f"--low {ramp.low:g} --high {ramp.high:g}: expected 0 < low < high, both, and their "
            "ratio, finite."
        )
    if ramp.high < _LEAST_RATIO * ramp.low:
        raise InputError(
            f"--low {ramp.low:g} --high {ramp.high:g}: expected high at least {_LEAST_RATIO} times "
            "low: the loss is averaged over a power of ten."
        )
    if ramp.steps < 20:
        raise InputError(f"--steps: found {ramp.steps}, allowed: 20 or more.")
    _check_loss_shows_a_rate(recipe)
    # After the checks, because it imports torch.
    from kinject.train.setup import make_trainer

    folder = recipe.run_dir / "find-lr"
    with lock_dir(folder):
        result = suggest(*range_test(make_trainer(ramp_recipe(recipe, ramp, folder)), ramp))
        write_text(folder / "lr.csv", _csv_of(result))
        with atomic_file(folder / "lr.png", "wb") as picture:
            picture.write(draw(result))
    return result, folder


def _check_loss_shows_a_rate(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for an optimizer or a method whose loss shows no rate."""
    from kinject.train.methods import method_of

    optim = str(recipe.trainer.get("optim", ""))
    if optim.startswith("schedule_free"):
        message = (
            f"{optim} averages over all rates so far, so a range test cannot separate them. "
            "Test AdamW with trainer.optim=adamw_torch and start from its rate: "
            "schedule-free tolerates that rate or a higher one."
        )
        recipe.raise_any([Problem("trainer.optim", message)])
    reason = method_of(recipe).no_rate_test
    if reason:
        recipe.raise_any([Problem("method", reason)])


def _csv_of(result: RangeTest) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["learning_rate", "loss", "smoothed"])
    writer.writerows(zip(result.rates, result.losses, result.smoothed, strict=True))
    return file.getvalue()


def ramp_recipe(recipe: TrainRecipe, ramp: Ramp, folder: Path) -> TrainRecipe:
    """Return `recipe` with the ramp as its schedule, its own batch and optimizer, and no evaluation
    or checkpoint."""
    schedule = {
        "learning_rate": ramp.low,
        "lr_scheduler_type": "exponential_decay",
        "lr_scheduler_kwargs": {"gamma": ramp.factor},
        # A warm-up would lower the rates of the ramp.
        "warmup_steps": 0,
    }
    # An update that is not finite ends the test instead of being skipped.
    return short_recipe(recipe, folder, ramp.steps, schedule, {"skipped_updates": 0})


def range_test(trainer: KnowledgeTrainer, ramp: Ramp) -> tuple[list[float], list[float], str]:
    """Train on the ramp, the schedule of `trainer`; return the rates, the losses and how the test
    ended.

    Raises `TrainingError` if no update was made.
    """
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):  # type: ignore[misc]
        """Records the rate and the loss of each update, and ends training once the loss
        diverges."""

        def __init__(self) -> None:
            self.rates: list[float] = []
            self.losses: list[float] = []
            self.means: list[float] = []

        def on_step_begin(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            **kwargs: Any,
        ) -> None:
            """Keep the rate of the update."""
            # Not the optimizer's: lower layers and Muon's matrices have a factor on it.
            self.rate = ramp.low * ramp.factor**state.global_step

        def on_log(
            self,
            args: TrainingArguments,
            state: TrainerState,
            control: TrainerControl,
            logs: dict[str, float] | None = None,
            **kwargs: Any,
        ) -> None:
            """Record a row of the log."""
            if not logs or "loss" not in logs:
                return  # the last row of a training: its time and its mean loss
            self.rates.append(self.rate)
            self.losses.append(float(logs["loss"]))
            self.means.append(float(np.mean(self.losses[-_SETTLED:])))
            # Not `>`: a loss that is not a number ends the test as well.
            is_low = self.means[-1] <= _DIVERGED * min(self.means)
            if len(self.means) > _SETTLED and not is_low:
                control.should_training_stop = True

    recorder = Recorder()
    trainer.add_callback(recorder)
    rates, losses = recorder.rates, recorder.losses
    try:
        trainer.train()
    except TrainingError as error:  # the guard: a gradient that is not finite
        if not losses:
            raise
        return rates, losses, f"stopped: {error}"
    if len(losses) < ramp.steps:
        rose = f"the loss rose to {_DIVERGED:g} times its lowest value"
        return rates, losses, f"stopped at {rates[-1]:.2g}: {rose}"
    return rates, losses, "the whole range was tried"


def suggest(rates: Sequence[float], losses: Sequence[float], ended: str = "") -> RangeTest:
    """Return the rate at which the smoothed loss is lowest, for losses at ascending rates.

    The loss is averaged over a window of one power of ten of the rate around each update, so the
    mean rises well before the loss itself does. Only whole windows count. There is no suggestion if
    the loss did not fall beyond its noise, or is lowest in the last window: then the best rate may
    be outside.
    """
    n = 0
    # What follows a loss that is not finite is of a broken model.
    while n < len(losses) and math.isfinite(losses[n]):
        n += 1
    x, y = np.log10(np.asarray(rates[:n])), np.asarray(losses[:n], dtype=np.float64)
    half = _FEWEST_EACH_SIDE
    if n > 1:
        # Rates that are all but equal have no window.
        step = max(float(x[1] - x[0]), 1e-9)
        half = max(half, round(_WINDOW / step))
    smoothed = np.array([y[max(0, i - half) : i + half + 1].mean() for i in range(n)])
    padded = (*smoothed.tolist(), *[math.nan] * (len(losses) - n))

    def result(suggestion: float | None, reason: str = "") -> RangeTest:
        return RangeTest(tuple(rates), tuple(losses), padded, suggestion, reason, ended)

    whole = range(half, n - half)
    if len(whole) < _FEWEST_WINDOWS:
        return result(None, "the loss diverged at once: lower --low, or give more --steps")
    # The steepest descent was a factor of 5 to 15 below the best rate of a sweep.
    lowest = half + int(np.argmin(smoothed[half : n - half]))
    noise = float(np.std((y - smoothed)[half : n - half]))
    if smoothed[half] - smoothed[lowest] <= _LEAST_FALL * noise / math.sqrt(2 * half + 1):
        return result(
            None,
            "the loss did not fall beyond its noise: use more --steps or a larger batch, "
            "or widen the range",
        )
    if lowest == whole[-1]:
        return result(None, "the loss is lowest at the highest rates: raise --high")
    return result(float(f"{rates[lowest]:.1e}"))


def render_range_test(result: RangeTest) -> str:
    """Return the range, the curve, how the test ended, and the line to set or what to do."""
    finite = [value for value in result.smoothed if math.isfinite(value)]
    low, high = result.rates[0], result.rates[-1]
    lines = [
        f"{format_count(len(result.losses), 'update')} from {low:.2g} to {high:.2g}; {result.ended}"
    ]
    if finite:
        curve = sparkline([value - min(finite) for value in finite])
        lines.append(f"loss  {curve}  {format_number(min(finite))} to {format_number(max(finite))}")
    if result.suggestion is None:
        lines.append(f"no suggestion: {result.reason}.")
    else:
        lines += [
            "the smoothed loss is lowest at:",
            "",
            f"trainer:\n  learning_rate: {result.suggestion:.1e}",
        ]
    return "\n".join(lines)


def _rate_label(rate: float, _: float) -> str:
    """Return a rate as ``1e-5``, for matplotlib, which gives the tick's position as well."""
    return f"{rate:.0e}".replace("e-0", "e-").replace("e+00", "")


def draw(result: RangeTest) -> bytes:
    """Return a PNG: the loss over the rate, raw and smoothed, with the suggested rate marked."""
    from kinject.report.figures import LEARNING, OTHER, RETENTION, RULE, panels, render_png, style

    with style():
        figure, (panel,) = panels([3.4])
        figure.set_size_inches(7.2, 4.2)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(_rate_label)
        panel.plot(
            result.rates, result.losses, color=OTHER, linewidth=1, label="loss of each batch"
        )
        panel.plot(result.rates, result.smoothed, color=LEARNING, linewidth=2, label="smoothed")
        if result.suggestion is not None:
            panel.axvline(
                result.suggestion,
                color=RETENTION,
                linewidth=1.5,
                label=f"lowest {result.suggestion:.2g}",
            )
        panel.grid(axis="y", color=RULE, linewidth=0.6)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.legend(loc="best")
        return render_png(figure)


@dataclass(frozen=True)
class BatchResult(Tabular):
    """The largest `batch` that fits and divides the rows of an update, with the `accumulation` that
    keeps them.

    `peaks` has the bytes of each batch that was tried (None: it did not fit).
    """

    batch: int
    accumulation: int
    devices: int
    peaks: dict[int, int | None]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each batch that was tried."""
        return [{"batch": batch, "peak bytes": peak} for batch, peak in self.peaks.items()]


def find_batch(recipe: TrainRecipe, limit: int | None) -> BatchResult:
    """Return the largest batch that fits into `limit` bytes (None: a GPU's memory, or what is free
    here).

    Tried are the divisors of the recipe's rows of an update on one device, from the largest on,
    with two updates on the longest rows in a process of their own. Raises `InputError` if not even
    one row fits.
    """
    from kinject.models import choose_device
    from kinject.train.config import make_configs
    from kinject.train.methods import method_of

    config, _ = make_configs(recipe, make_config=method_of(recipe).make_config)
    on_gpu = choose_device(recipe.device) == "cuda"
    most = limit or None
    # On a GPU torch says itself when memory is full.
    if most is None and not on_gpu:
        most = available_memory()
    rows = config.per_device_train_batch_size * config.gradient_accumulation_steps
    batches = [size for size in range(rows, 0, -1) if rows % size == 0]
    folder, peaks = recipe.run_dir / "find-batch", dict[int, int | None]()
    with lock_dir(folder), Progress("trying", len(batches), "batches") as progress:
        for batch in batches:
            progress.set_status(f"batch {batch}")
            # A second batch of an update has the gradients of the first beside its activations; a
            # third needs no more.
            n_batches = min(rows // batch, 2)
            trial = folder / f"batch-{batch}"
            peaks[batch] = _peak_of(recipe, batch, n_batches, trial, most)
            progress.advance()
            if peaks[batch] is not None:
                return BatchResult(batch, rows // batch, config.world_size, peaks)
    size = "the GPU"
    if most is not None:
        size = f"{most / 2**30:.2f} GiB"
    raise InputError(
        f"not one row fits {size}. In the order of least cost: "
        "trainer.optim: adamw_8bit, trainer.gradient_checkpointing: true, "
        "a shorter trainer.max_length, an adapter section, a smaller model."
    )


def _peak_of(
    recipe: TrainRecipe, batch: int, n_batches: int, folder: Path, limit: int | None
) -> int | None:
    """Return the peak bytes of two updates of `n_batches` batches of `batch` rows, None if they
    need more than `limit` or the device has."""
    trainer = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": n_batches,
        "train_sampling_strategy": "sequential",
    }
    from kinject.models import choose_device

    # Of a GPU's trial the process itself may hold more: a model passes through its memory.
    resident = limit
    if choose_device(recipe.device) == "cuda":
        resident = None
    code = run_process(
        short_recipe(recipe, folder, _UPDATES, trainer), longest_rows=True, limit=resident
    )
    if (folder / RESULT).is_file():
        result = json.loads(read_bytes(folder / RESULT))
        peak = int(result["peak_bytes"])
        if result["out_of_memory"] or (limit is not None and peak > limit):
            return None
        return peak
    if code in (None, -9):  # killed at the limit, or by the system when memory was used up
        return None
    reason = last_log_line(folder) or "it printed nothing"
    raise InputError(f"the trial with batch {batch} failed: {reason} (its log: {folder / LOG})")


def render_batch(result: BatchResult) -> str:
    """Return the trials as text, and the two recipe lines to set."""
    lines = []
    for batch, peak in result.peaks.items():
        found = "does not fit"
        if peak is not None:
            found = f"{peak / 2**30:.2f} GiB, fits"
        lines.append(f"batch {batch:>5}  {found}")
    rows = result.batch * result.accumulation * result.devices
    lines += [
        "",
        "trainer:",
        f"  per_device_train_batch_size: {result.batch}",
        f"  gradient_accumulation_steps: {result.accumulation}   # global batch {rows}, as before",
    ]
    return "\n".join(lines)
