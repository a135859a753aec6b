"""`kinject find-lr`: a range test of the learning rate (Smith, 2015, arXiv 1506.01186) with the recipe's own trainer.

The rate climbs by the same factor at every update while the loss of each batch is noted. The model is trained in memory
and put back; nothing but the folder ``run_dir/find-lr`` is written, the token cache aside.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kinject.disk import content_id, lock_dir, read_sealed, write_sealed, write_text
from kinject.disk.atomic import atomic_file
from kinject.errors import InputError, TrainingError
from kinject.recipe import TrainRecipe

if TYPE_CHECKING:
    from kinject.train.trainer import KnowledgeTrainer

_FORMAT = 1
_MEMORY = 0.9
"""Of the running mean that tells when to stop: a weight of 0.9 on what was."""
_SETTLED = 8
"""Updates before the running mean may stop the test."""


@dataclass(frozen=True)
class Ramp:
    """From which rate to which, in how many updates; the multiple of the least loss that stops it; the margin."""

    low: float = 1e-7
    high: float = 1.0
    steps: int = 100
    diverged: float = 1.5
    margin: float = 10.0

    @property
    def factor(self) -> float:
        """What the rate is multiplied by at each update."""
        return float((self.high / self.low) ** (1 / (self.steps - 1)))


@dataclass(frozen=True)
class Found:
    """What a range test saw and what follows.

    `smoothed` are means over neighbouring updates; `steepest` is the rate at which the loss falls fastest over the
    logarithm of the rate, `lowest` that of the least smoothed loss. `suggestion` is None where the loss did not fall.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    steepest: float | None
    lowest: float | None
    suggestion: float | None
    ended: str


def find_lr(recipe: TrainRecipe, ramp: Ramp) -> tuple[Found, Path]:
    """Test the range, write find-lr/lr.json, lr.csv and lr.png, and return what was found with that folder.

    A test of the same recipe, inputs and ramp is not run again. Raises `InputError` for a ramp out of range, and what
    `kinject.train` raises before a run starts.
    """
    check_ramp(ramp)
    _check_optimizer(recipe)
    from kinject.train.run import inputs_of, trainer_of

    folder = recipe.run_dir / "find-lr"
    ramped = _ramped(recipe, ramp, folder)
    files = {name: content for name, content in inputs_of(recipe).items() if name != "fingerprint"}
    sections = {
        key: recipe.raw.get(key)
        for key in ("seed", "method", "model", "adapter", "regularization", "corpus", "techniques")
    }
    identity = content_id(_FORMAT, asdict(ramp), sections, dict(ramped.trainer), files)
    with lock_dir(folder):
        done = _stored(folder / "lr.json", identity)
        if done is not None:
            return done, folder
        rates, losses, ended = range_test(trainer_of(ramped), ramp)
        found = suggest(rates, losses, ramp, ended)
        write_text(folder / "lr.csv", _csv(found))
        with atomic_file(folder / "lr.png", "wb") as file:
            file.write(draw(found))
        write_sealed(folder / "lr.json", {"id": identity, "ramp": asdict(ramp), "found": asdict(found)})
    return found, folder


def _stored(path: Path, identity: str) -> Found | None:
    """Return what an earlier test of the same found, if there was one. Raises `InputError` for a damaged file."""
    if not path.is_file():
        return None
    try:
        held = read_sealed(path, "Delete it to test anew.")
        if held["id"] != identity:
            return None
        found: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in held["found"].items()
        }
        return Found(**found)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: damaged ({error}). Delete it to test anew.") from error


def check_ramp(ramp: Ramp) -> None:
    """Raise `InputError` for a number out of range, with what is allowed."""
    if not 0 < ramp.low < ramp.high:
        raise InputError(f"--low {ramp.low:g} --high {ramp.high:g}: expected 0 < low < high.")
    for option, value, least in (
        ("steps", ramp.steps, 20),
        ("diverged", ramp.diverged, 1.01),
        ("margin", ramp.margin, 1),
    ):
        if not value >= least:
            raise InputError(f"--{option}: found {value:g}, allowed: {least:g} or more.")


def _check_optimizer(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for an optimizer whose losses do not show the rate of the moment."""
    optim = str(recipe.trainer.get("optim", ""))
    if optim.startswith("schedule_free"):
        raise recipe.error(
            "trainer.optim",
            f"{optim} averages over all rates so far, so a range test cannot tell one from another. Test AdamW with "
            "trainer.optim=adamw_torch and begin there: schedule-free bears that rate or a higher one.",
        )


def _ramped(recipe: TrainRecipe, ramp: Ramp, folder: Path) -> TrainRecipe:
    """Return `recipe` with the ramp for its schedule, its whole batch and optimizer, and nothing beside the updates."""
    changes = {
        "learning_rate": ramp.low, "lr_scheduler_type": "exponential_decay",
        "lr_scheduler_kwargs": {"gamma": ramp.factor}, "warmup_steps": 0, "max_steps": ramp.steps,
        "logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False, "save_strategy": "no",
        "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False, "metric_for_best_model": None,
        "report_to": "none",
    }  # fmt: skip
    techniques = replace(
        recipe.techniques, freeze_base_steps=None, freeze_base_except=(), patience=None, histogram_steps=None
    )
    guards = replace(
        recipe.guards, skipped_updates=0, zero_loss="ignore", norm_spike="ignore", vanishing_rate="ignore",
        unread_corpus="ignore",
    )  # fmt: skip
    return replace(
        recipe, run_dir=folder, trainer={**recipe.trainer, **changes}, probes=None, guards=guards,
        corpus=replace(recipe.corpus, validation_corpus=None), techniques=techniques,
    )  # fmt: skip


def range_test(trainer: KnowledgeTrainer, ramp: Ramp) -> tuple[list[float], list[float], str]:
    """Return the rates, the loss of each update before it was made, and how the test ended.

    `trainer` is one whose schedule is the ramp. Its model and the generators of random numbers are put back exactly.
    """
    watch = _watch(ramp)
    trainer.add_callback(watch)
    ended = "the whole range was tried"
    with restored(trainer.model):
        try:
            trainer.train()
        except TrainingError as error:  # the guard: a gradient that is not finite
            ended = f"stopped: {error}"
    if watch.diverged:
        ended = f"stopped at {watch.rates[-1]:.2g}: the loss went up to {ramp.diverged:g} times its least"
    return watch.rates, watch.losses, ended


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """Put back, bit by bit, the parameters, buffers and mode of `model` and the generators of random numbers."""
    import torch

    # state_dict leaves out buffers that are not saved
    tensors = [*model.parameters(), *model.buffers()]
    kept = [tensor.detach().to("cpu", copy=True) for tensor in tensors]
    modes = [(module, module.training) for module in model.modules()]
    states = (random.getstate(), np.random.get_state())
    devices = list(range(torch.cuda.device_count()))
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, was in zip(tensors, kept, strict=True):
                    tensor.copy_(was)
            for module, mode in modes:
                module.training = mode
            model.zero_grad(set_to_none=True)
            random.setstate(states[0])
            np.random.set_state(states[1])


def _watch(ramp: Ramp) -> Any:
    """Return a callback that notes rate and loss of each update and ends training when the loss has left."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):  # type: ignore[misc]
        """Notes rates and losses."""

        def __init__(self) -> None:
            self.rates: list[float] = []
            self.losses: list[float] = []
            self.diverged = False
            self._rate, self._sum, self._least = 0.0, 0.0, math.inf

        def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            """Keep the update's rate, that of the topmost layer where lower ones learn slower."""
            self._rate = max(float(group["lr"]) for group in optimizer.param_groups)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            """Note a row of the log, and say when to stop."""
            if "loss" not in (logs or {}):
                return
            loss = float(logs["loss"])
            self.rates.append(self._rate)
            self.losses.append(loss)
            n = len(self.losses)
            self._sum = _MEMORY * self._sum + (1 - _MEMORY) * loss
            mean = self._sum / (1 - _MEMORY**n)
            if n > _SETTLED:
                self.diverged = not mean <= ramp.diverged * self._least
                control.should_training_stop = control.should_training_stop or self.diverged
            self._least = min(self._least, mean)

    return Watch()


def suggest(rates: Sequence[float], losses: Sequence[float], ramp: Ramp, ended: str) -> Found:
    """Return what follows from the losses at the rates (ascending); losses that are not finite end the series.

    Smoothing is a mean over a window centred on each update, the slope a least-squares line over it, so neither lags
    behind. The suggestion is the steepest rate, but at most the lowest one over the margin, cut to two digits.
    """
    n = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), len(losses))
    x, y = np.log10(np.asarray(rates[:n])), np.asarray(losses[:n], dtype=np.float64)
    half = max(2, ramp.steps // 20)
    windows = [slice(max(0, i - half), min(n, i + half + 1)) for i in range(n)]
    smoothed = [float(y[window].mean()) for window in windows]
    slopes = [_slope(x[window], y[window]) for window in windows]
    empty = Found(tuple(rates), tuple(losses), tuple(smoothed), None, None, None, ended)
    if n < 4 * half:
        return empty
    at_lowest = int(np.argmin(smoothed))
    noise = float(np.std(np.diff(y[: 4 * half]))) / math.sqrt(2 * half + 1)
    if smoothed[0] - smoothed[at_lowest] <= 3 * noise or at_lowest == 0:
        return empty
    steepest = rates[int(np.argmin(slopes[: at_lowest + 1]))]
    lowest = rates[at_lowest]
    return replace(empty, steepest=steepest, lowest=lowest, suggestion=two_digits(min(steepest, lowest / ramp.margin)))


def two_digits(value: float) -> float:
    """Return `value` cut, not rounded up, to two significant digits."""
    scale = 10 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.floor(value / scale * (1 + 1e-12)) * scale:.1e}")


def _slope(x: Any, y: Any) -> float:
    spread = x - x.mean()
    return float((spread * (y - y.mean())).sum() / max(float((spread**2).sum()), 1e-300))


def _csv(found: Found) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["update", "learning_rate", "loss", "smoothed"])
    smoothed = [*found.smoothed, *[None] * (len(found.losses) - len(found.smoothed))]
    for row in zip(range(len(found.rates)), found.rates, found.losses, smoothed, strict=True):
        writer.writerow(row)
    return file.getvalue()


def render_found(found: Found, ramp: Ramp) -> str:
    """Return what a user wants to read: how it ended, the rates, and the line to set."""
    lines = [f"{len(found.losses)} updates from {found.rates[0]:.2g} to {found.rates[-1]:.2g}; {found.ended}"]
    if found.suggestion is None:
        return "\n".join([*lines, "the loss did not fall beyond its noise: no suggestion. Widen --low and --high, give it "
                          "more --steps, or a larger batch."])  # fmt: skip
    lines += [
        f"loss falls fastest at {found.steepest:.2g}, is least at {found.lowest:.2g} (suggestion: the first, at most the "
        f"second over {ramp.margin:g})", "", f"trainer:\n  learning_rate: {found.suggestion:.1e}",
    ]  # fmt: skip
    return "\n".join(lines)


def draw(found: Found) -> bytes:
    """Return a PNG: the loss over the rate, raw and smoothed, with the rates that matter marked by line and word."""
    from kinject.report.plots.style import LEARNING, MUTED, OTHER, RETENTION, RULE, panels, render_png, style

    with style():
        figure, (panel,), _ = panels(1, 1, 3.4)
        figure.set_size_inches(7.2, 4.2)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(lambda rate, _: f"{rate:.0e}".replace("e-0", "e-").replace("e+00", ""))
        panel.plot(found.rates, found.losses, color=OTHER, linewidth=1, label="loss of each batch")
        panel.plot(found.rates[: len(found.smoothed)], found.smoothed, color=LEARNING, linewidth=2, label="smoothed")
        marks = (("suggested", found.suggestion, RETENTION, "-"), ("steepest", found.steepest, MUTED, ":"),
                 ("least loss", found.lowest, MUTED, "--"))  # fmt: skip
        for name, rate, colour, line in marks:
            if rate is not None:
                panel.axvline(rate, color=colour, linestyle=line, linewidth=1.5, label=f"{name} {rate:.2g}")
        if found.smoothed:
            low, high = min(found.smoothed), max(found.smoothed)
            panel.set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.25 * (high - low) + 1e-3)
        panel.grid(axis="y", color=RULE, linewidth=0.6)
        panel.set_xlabel("learning rate")
        panel.set_ylabel("loss")
        panel.legend(loc="best")
        return render_png(figure)
