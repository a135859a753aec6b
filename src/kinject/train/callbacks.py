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
from typing import Any

import torch
from transformers import TrainerCallback
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
        self.log, self.timing, self.learned_tokens = (
            run_dir / "log.jsonl",
            run_dir / "timing.jsonl",
            learned_tokens,
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start with the rows of the checkpoint: those up to the step at which this run resumes.
        Start the clock."""
        if state.is_world_process_zero:
            write_jsonl(self.log, [_row(row) for row in state.log_history])
            write_jsonl(self.timing, [])
        self.began = monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Write one row: step, epoch and the trainer's values; the device has finished the step of
        a loss by now."""
        if not state.is_world_process_zero:
            return
        _append(self.log, _row({"step": state.global_step, "epoch": state.epoch, **(logs or {})}))
        if "loss" in (logs or {}):
            cost = {
                "step": state.global_step, "seconds": round(monotonic() - self.began, 6),
                "learned_tokens": self.learned_tokens(), "peak_bytes": peak_memory(args.device.type),
            }  # fmt: skip
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
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }


class Screen(TrainerCallback):  # type: ignore[misc]
    """Progress with loss, tokens/s, peak memory and ETA."""

    def __init__(self, tokens_per_step: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.loss = ""
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        if not state.is_world_process_zero:
            return
        self.progress = Progress("training", state.max_steps, "steps", done=state.global_step)
        self.progress.__enter__()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Keep the newest loss."""
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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

    def __init__(self, received: Sequence[int], trainer: Any) -> None:
        self.received, self.trainer = received, trainer
        self.number, self.is_requested = 0, False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint, unless the epoch or the run ends with this step."""
        self.number = self.received[0] if self.received else 0
        if self.trainer.accelerator.num_processes > 1:
            agreed = torch.tensor(self.number, device=args.device)
            torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MAX)
            self.number = int(agreed)
        if state.global_step % self.trainer.steps_per_epoch:
            self._request_checkpoint(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a checkpoint, unless the run ends with this epoch."""
        self._request_checkpoint(control)

    def _request_checkpoint(self, control: Any) -> None:
        if self.number and not control.should_training_stop:
            self.is_requested = control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
def checkpoint_on_signal(trainer: Any) -> Iterator[None]:
    """Save a checkpoint at the end of the step in which the first signal comes that ends a verb,
    and end the verb then.

    A second signal does not wait.
    """

    def announce() -> None:
        if is_first_process():
            text = "kinject train: stops after this step, with a checkpoint. Once more: at once, without."
            show(f"\n{text}", file=sys.stderr, flush=True)

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

    def __init__(self, every: int, trackers: Callable[[], list[Any]]) -> None:
        self.every, self.trackers = every, trackers

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Send the histograms of this update, if it is a multiple of `every`."""
        step = state.global_step + 1
        if step % self.every:
            return
        finite: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
                if tensor is not None and (kind == "gradients" or parameter.requires_grad):
                    values = full_tensor(tensor)  # of a sharded model all processes take part
                    if state.is_world_process_zero:
                        finite[f"{kind}/{name}"] = values[values.isfinite()].float().cpu()
        if not state.is_world_process_zero:
            return
        for tracker in self.trackers():
            if getattr(tracker, "has_failed", False):
                continue
            if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
                for name, values in finite.items():
                    if values.numel():
                        tracker.tb_writer.add_histogram(name, values, step)
            elif isinstance(tracker, WandbCallback) and tracker._wandb is not None:
                drawn = {
                    n: tracker._wandb.Histogram(v.numpy()) for n, v in finite.items() if v.numel()
                }
                tracker._wandb.log({**drawn, "train/global_step": step})


def guard_trackers(callbacks: Sequence[TrainerCallback], left_out: list[str] | None = None) -> None:
    """Let a tracker that cannot start (no database, no account) end the run with its reason in one
    line; with `left_out`, which gets the reason, the run continues without that tracker."""
    kinds = tuple(INTEGRATION_TO_CALLBACK.values())
    for callback in callbacks:
        if isinstance(callback, kinds) and hasattr(callback, "setup"):
            _guard_start(callback)
            if left_out is not None:
                _make_optional(callback, left_out)


def _guard_start(tracker: Any) -> None:
    begin = tracker.setup

    def setup(*args: Any, **kwargs: Any) -> None:
        try:
            begin(*args, **kwargs)
        except Exception as error:  # each library raises its own
            name, reason = type(tracker).__name__, first_line(error)
            message = f"{name} cannot start ({reason}). Set report_to: none, or mend it."
            raise TrainingError(f"trainer.report_to: {message}") from error

    tracker.setup = setup


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


def tracker_error(kind: type) -> str:
    """Return the library's reason why a tracker's callback cannot be made; "" if it can."""
    made = type(
        kind.__name__, (kind,), {"__del__": lambda _: None}
    )  # some fail once more there without their package
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            made()
    except Exception as error:  # noqa: BLE001 (each library raises its own)
        return " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return ""


Reason = Callable[[Any, Sequence[Mapping[str, Any]]], str]
"""(the trainer's arguments, its log) -> why the run stops now; "" if it continues."""


class EarlyStopping(TrainerCallback):  # type: ignore[misc]
    """Stops a run as soon as `reason` returns one; it is added to `messages`.

    It decides from the trainer's own log, which checkpoints hold, so resuming changes nothing. A
    run that had stopped before it was interrupted takes no further step.
    """

    def __init__(self, reason: Reason, messages: list[str]) -> None:
        self.reason, self.messages = reason, messages

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop if there is a reason."""
        reason = self.reason(args, state.log_history)
        if reason and not control.should_training_stop:
            control.should_training_stop = True
            self.messages.append(f"step {state.global_step}: {reason}")

    on_train_begin = on_evaluate


def forgetting(section: ProbesSection) -> Reason:
    """Return the reason to stop once a retention set fell by more than probes.max_forgetting."""
    names = [name for name, item in section.sets().items() if item.role == "retention"]

    def reason(args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        for name in names if section.max_forgetting is not None else ():
            key = f"eval_{name}_accuracy"
            by_step = {
                row["step"]: row[key]
                for row in history
                if row.get(key) is not None and math.isfinite(row[key])
            }
            values = list(by_step.values())
            if values and values[0] - values[-1] > (section.max_forgetting or 0.0):
                return (
                    f"{name} is down from {values[0]:.3f} to {values[-1]:.3f}, more than probes.max_forgetting: "
                    f"{section.max_forgetting:g}; the run stops."
                )
        return ""

    return reason


def patience(evaluations: int) -> Reason:
    """Return the reason to stop once the last `evaluations` were no better than the best one.

    The metric is the validation loss if the recipe names none. An evaluation before the first step
    does not count.
    """

    def reason(args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        name = f"eval_{(args.metric_for_best_model or 'loss').removeprefix('eval_')}"
        by_step = {
            row["step"]: math.nan if row[name] is None else row[name]
            for row in history
            if name in row
        }
        values = [value for step, value in by_step.items() if step > 0]
        finite = [value for value in values if math.isfinite(value)]
        since, found = len(values), "finite"
        if finite:
            best = (
                max(finite)
                if args.metric_for_best_model and args.greater_is_better
                else min(finite)
            )
            since, found = len(values) - 1 - values.index(best), f"better than {best:.3f}"
        fault = f"{name} has not been {found} for {since} evaluations (techniques.patience); the run stops."
        return fault if since >= evaluations else ""

    return reason
