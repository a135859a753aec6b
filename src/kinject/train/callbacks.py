"""Callbacks of a training run: logs on disk, progress on the screen, histograms in a tracker, early
stopping, signals."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import torch
from transformers import (
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.integrations import INTEGRATION_TO_CALLBACK, TensorBoardCallback, WandbCallback

from kinject.disk import write_jsonl
from kinject.errors import TrainingError
from kinject.models import first_line, full_tensor
from kinject.process import deferred, interruption, is_first_process, peak_memory
from kinject.recipe.sections import ProbesSection
from kinject.terminal import Progress, show

log = logging.getLogger(__name__)


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Writes log.jsonl, a row for all that is logged, and timing.jsonl, the cost of training at
    each logged loss.

    A resumed run first drops the rows of log.jsonl after its checkpoint, and all of timing.jsonl,
    whose rows hold step, seconds (since training began in this process), learned_tokens (those in
    the loss: no padding, no masked ones) and peak_bytes (`peak_memory`).
    """

    def __init__(self, run_dir: Path, learned_tokens: Callable[[], int]) -> None:
        self.log, self.timing = run_dir / "log.jsonl", run_dir / "timing.jsonl"
        self.learned_tokens = learned_tokens

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start with the rows of the checkpoint: those up to the step at which this run resumes.
        Start the clock."""
        if state.is_world_process_zero:
            write_jsonl(self.log, [_row(row) for row in state.log_history])
            write_jsonl(self.timing, [])
        self.began = monotonic()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write one row: step, epoch and the trainer's values; the device has finished the step of
        a loss by now."""
        if not state.is_world_process_zero:
            return
        _append(self.log, _row({"step": state.global_step, "epoch": state.epoch, **(logs or {})}))
        if "loss" in (logs or {}):
            cost = {
                "step": state.global_step,
                "seconds": round(monotonic() - self.began, 6),
                "learned_tokens": self.learned_tokens(),
                "peak_bytes": peak_memory(args.device.type),
            }
            _append(self.timing, cost)


def _append(path: Path, row: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _row(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return a logged row for JSON: null where a value is not finite, and the order of keys is
    fixed.

    It is the same for a row as it is logged and as a checkpoint, which sorts its keys, returns it.
    """
    first = {key: logged[key] for key in ("step", "epoch", "loss") if key in logged}
    row = first | dict(sorted(logged.items()))
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            row[key] = None
    return row


class Screen(TrainerCallback):  # type: ignore[misc]
    """Progress with loss, tokens/s, peak memory and ETA."""

    def __init__(self, tokens_per_step: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.loss = ""
        self.progress: Progress | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Show the bar."""
        if not state.is_world_process_zero:
            return
        self.progress = Progress("training", state.max_steps, "steps", done=state.global_step)
        self.progress.__enter__()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the newest loss."""
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Advance the bar."""
        if self.progress is not None:
            self.progress.advance()
            rate = f"{self.progress.rate * self.tokens_per_step:,.0f} tokens/s"
            memory = f"{peak_memory(args.device.type) / 2**30:.1f} GiB"
            self.progress.set_status("  ".join(word for word in (self.loss, rate, memory) if word))

    def close(self) -> None:
        """Release the terminal, also after an error."""
        if self.progress is not None:
            self.progress.close()


class _SignalCheckpoint(TrainerCallback):  # type: ignore[misc]
    """Saves a checkpoint at the end of the step in which a signal was `received`, then raises the
    signal's exception.

    At the end of an epoch its evaluation and log come first, since a resumed run begins with the
    next epoch. Of several processes each may receive the signal in another step, so they agree at
    each.
    """

    def __init__(self, received: Sequence[int], trainer: Trainer) -> None:
        self.received, self.trainer = received, trainer
        self.number, self.is_requested = 0, False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a checkpoint, unless the epoch or the run ends with this step."""
        self.number = next(iter(self.received), 0)
        if self.trainer.accelerator.num_processes > 1:
            # A process that saved alone would wait for the others for ever.
            agreed = torch.tensor(self.number, device=args.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            self.number = int(agreed)
        # At the end of an epoch `on_epoch_end` asks, after the evaluation and its log.
        if state.global_step % self.trainer.steps_per_epoch:
            self._request_checkpoint(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Request a checkpoint, unless the run ends with this epoch."""
        self._request_checkpoint(control)

    def _request_checkpoint(self, control: TrainerControl) -> None:
        if self.number and not control.should_training_stop:
            self.is_requested = control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """If there was a signal, end the run in all processes, once the checkpoint is whole.

        A process that ended earlier would let its launcher stop the first one while that writes
        hashes.
        """
        if not self.is_requested:
            return
        if state.is_world_process_zero:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            show(f"{checkpoint} is written", file=sys.stderr, flush=True)
        self.trainer.accelerator.wait_for_everyone()
        raise interruption(self.number)


@contextlib.contextmanager
def checkpoint_on_signal(trainer: Trainer) -> Iterator[None]:
    """Save a checkpoint at the end of the step in which the first signal comes that ends a verb,
    and end the verb then.

    A second signal does not wait.
    """

    def announce() -> None:
        if is_first_process():
            show(
                "\nkinject train: stops after this step, with a checkpoint. Once more: at once, "
                "without.",
                file=sys.stderr,
                flush=True,
            )

    with deferred(announce) as received:
        trainer.add_callback(_SignalCheckpoint(received, trainer))
        yield


class Histograms(TrainerCallback):  # type: ignore[misc]
    """At every `every`-th update, sends each weight and the gradient that is about to be applied to
    the tracker.

    Gradients are whole: accumulated, unscaled and clipped. The names are ``weights/NAME`` and
    ``gradients/NAME``, the step is that of the update, as in the log. `trackers` returns the
    trainer's callbacks.
    """

    def __init__(self, every: int, trackers: Callable[[], list[TrainerCallback]]) -> None:
        self.every, self.trackers = every, trackers

    def on_pre_optimizer_step(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: PreTrainedModel = None,
        **kwargs: Any,
    ) -> None:
        """Send the histograms of this update, if it is a multiple of `every`."""
        step = state.global_step + 1
        if step % self.every:
            return
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                tensors[f"weights/{name}"] = parameter
            if parameter.grad is not None:
                tensors[f"gradients/{name}"] = parameter.grad
        finite: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            values = full_tensor(tensor)  # of a sharded model all processes take part
            if state.is_world_process_zero:
                # numpy, which draws W&B's bins, refuses a range that is not finite.
                values = values[values.isfinite()].float().cpu()
                if values.numel():
                    finite[name] = values
        if state.is_world_process_zero:
            for tracker in self.trackers():
                if not getattr(tracker, "has_failed", False):
                    _send_histograms(tracker, finite, step)


def _send_histograms(
    tracker: TrainerCallback, tensors: Mapping[str, torch.Tensor], step: int
) -> None:
    """Send `tensors` as histograms, if the tracker draws any."""
    if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
        for name, values in tensors.items():
            tracker.tb_writer.add_histogram(name, values, step)
    elif isinstance(tracker, WandbCallback) and tracker._wandb is not None:
        histogram = tracker._wandb.Histogram
        drawn = {name: histogram(values.numpy()) for name, values in tensors.items()}
        tracker._wandb.log({**drawn, "train/global_step": step})


def guard_trackers(callbacks: Sequence[TrainerCallback], left_out: list[str] | None = None) -> None:
    """Let a tracker that cannot start (no database, no account) end the run with its reason in one
    line; with `left_out`, which gets the reason, the run continues without that tracker."""
    trackers = tuple(INTEGRATION_TO_CALLBACK.values())
    for callback in callbacks:
        if isinstance(callback, trackers) and hasattr(callback, "setup"):
            callback.setup = _guarded(callback.setup, type(callback).__name__)
            if left_out is not None:
                _make_optional(callback, left_out)


def _guarded(begin: Callable[..., None], name: str) -> Callable[..., None]:
    """Return the method by which a tracker starts, its errors as a `TrainingError`."""

    def setup(*args: Any, **kwargs: Any) -> None:
        try:
            begin(*args, **kwargs)
        except Exception as error:  # each library raises its own
            raise TrainingError(
                f"trainer.report_to: {name} cannot start ({first_line(error)}). Set report_to: "
                "none, or mend it."
            ) from error

    return setup


def _make_optional(tracker: Any, left_out: list[str]) -> None:
    """Let a tracker that cannot start ignore this event and all later ones.

    It stays among the trainer's callbacks, over which the trainer iterates while it starts.
    """
    tracker.has_failed = False

    def without_fault(react: Callable[..., Any]) -> Callable[..., Any]:
        def event(*args: Any, **kwargs: Any) -> Any:
            if tracker.has_failed:
                return None
            try:
                return react(*args, **kwargs)
            except TrainingError as error:
                tracker.has_failed = True
                reason = str(error).removeprefix("trainer.report_to: ").partition(". Set ")[0]
                left_out.append(f"trainer.report_to: all is without a tracker: {reason}.")
                log.warning(left_out[-1])
                return None

        return event

    for name in dir(tracker):
        if name.startswith("on_"):
            setattr(tracker, name, without_fault(getattr(tracker, name)))


def _do_nothing(_: TrainerCallback) -> None:
    """Take the place of a `__del__`."""


def tracker_error(kind: type) -> str:
    """Return the library's reason why a tracker's callback cannot be made; "" if it can."""
    # Without their package some fail once more when they are deleted.
    trial = type(kind.__name__, (kind,), {"__del__": _do_nothing})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            trial()
    except Exception as error:  # noqa: BLE001 (each library raises its own)
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ""


History: TypeAlias = Sequence[Mapping[str, Any]]
"""The trainer's log."""
Reason: TypeAlias = "Callable[[TrainingArguments, History], str]"
"""(the trainer's arguments, its log) -> why the run stops now; "" if it continues."""


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops a run as soon as `reason` returns one; it is added to `messages`.

    It decides from the trainer's own log, which checkpoints hold, so resuming changes nothing. A
    run that had stopped before it was interrupted takes no further step.
    """

    def __init__(self, reason: Reason, messages: list[str]) -> None:
        self.reason, self.messages = reason, messages

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop if there is a reason."""
        reason = self.reason(args, state.log_history)
        if reason and not control.should_training_stop:
            control.should_training_stop = True
            self.messages.append(f"step {state.global_step}: {reason}")

    on_train_begin = on_evaluate


def forgetting(section: ProbesSection) -> Reason:
    """Return the reason to stop once a retention set fell by more than probes.max_forgetting."""
    names = [name for name, item in section.sets().items() if item.role == "retention"]

    most = section.max_forgetting

    def reason(args: TrainingArguments, history: History) -> str:
        if most is None:
            return ""
        for name in names:
            key = f"eval_{name}_accuracy"
            scored = [row for row in history if row.get(key) is not None]
            values = list(
                _by_step([row for row in scored if math.isfinite(row[key])], key).values()
            )
            # The first is from before the first step: with probes eval_on_start is set.
            if values and values[0] - values[-1] > most:
                return (
                    f"{name} is down from {values[0]:.3f} to {values[-1]:.3f}, more than "
                    f"probes.max_forgetting: {most:g}; the run stops."
                )
        return ""

    return reason


def _by_step(history: History, name: str) -> dict[int, float]:
    """Return the values of `name` that were logged, NaN for null, by their step: a step may be
    evaluated twice, at the end of an epoch and by its number."""
    values: dict[int, float] = {}
    for row in history:
        if name in row:
            values[row["step"]] = math.nan if row[name] is None else row[name]
    return values


def patience(evaluations: int) -> Reason:
    """Return the reason to stop once the last `evaluations` were no better than the best one.

    The metric is the validation loss if the recipe names none. An evaluation before the first step
    does not count.
    """

    def reason(args: TrainingArguments, history: History) -> str:
        metric = args.metric_for_best_model
        name = f"eval_{(metric or 'loss').removeprefix('eval_')}"
        values = [value for step, value in _by_step(history, name).items() if step > 0]
        # A NaN is no improvement, and min and max of values with one depend on their order.
        finite = [value for value in values if math.isfinite(value)]
        since, found = len(values), "finite"
        if finite:
            # greater_is_better has a default of its own where no metric is named.
            best = max(finite) if metric and args.greater_is_better else min(finite)
            since, found = len(values) - 1 - values.index(best), f"better than {best:.3f}"
        if since < evaluations:
            return ""
        return (
            f"{name} has not been {found} for {since} evaluations (techniques.patience); the run "
            "stops."
        )

    return reason
