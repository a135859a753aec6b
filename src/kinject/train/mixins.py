"""Parts of the trainer: checkpoints, and the optimizer with the rules that change its updates.

An override of a private hook of transformers' Trainer has its reason, and the version that was read.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import TrainerCallback
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from kinject.errors import TrainingError
from kinject.models import copy_weights
from kinject.train.checkpoints import mark_complete, remove_extra, remove_incomplete, without_tied
from kinject.train.guards import Guard, check_weights
from kinject.train.loss import MeanLoss
from kinject.train.optimizers import leave_warmup_to_schedule
from kinject.train.schedules import schedule_of
from kinject.train.updates import UpdateRule
from kinject.train.updates.layers import FreezeWarmup
from kinject.train.updates.sam import SharpnessAware

_OPTIMIZER = "optimizer"
"""The folder of a sharded optimizer in a checkpoint."""
_STATE_KEY = "kinject"


class CheckpointMixin(SFTTrainer):  # type: ignore[misc]
    """Checkpoints that are marked when whole, of sharded models too, with the state that Trainer loses with its process."""

    guard: Guard
    losses: MeanLoss
    learned_tokens: Any
    learned_before: int
    load_weights: Callable[[str], Any]

    def _save_state(self) -> None:
        """Add the extra state to that of the next checkpoint. All processes call it."""
        loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean().item()
        metrics = {name: [float(value) for value in values] for name, values in self._metrics["train"].items()}
        self.state.stateful_callbacks[_STATE_KEY] = {
            "loss": loss, "tokens": int(self._total_train_tokens), "metrics": metrics, "guard": self.guard.state(),
            "losses": asdict(self.losses), "learned_tokens": self.learned_before + int(self.learned_tokens),
        }  # fmt: skip

    def restore_state(self) -> None:
        """Restore what `_save_state` added to the checkpoint from which training resumes, if it does."""
        saved = self.state.stateful_callbacks.get(_STATE_KEY)
        if saved is None:
            return
        self._tr_loss += saved["loss"]
        self.losses = MeanLoss(**saved["losses"])
        self._globalstep_last_logged = max((row["step"] for row in self.state.log_history if "loss" in row), default=0)
        self._total_train_tokens = saved["tokens"]
        self.learned_before = saved["learned_tokens"]
        for name, values in saved["metrics"].items():
            self._metrics["train"][name] = list(values)
        self.guard.restore(saved["guard"])

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save tokenizer and model, a tied weight once (DeepSpeed gives two), and no pickle of the arguments."""
        # transformers 5.23 pickles TrainingArguments beside the model, and saves a tied weight of ZeRO-3 twice
        super()._save(output_dir, without_tied(self.accelerator.unwrap_model(self.model), state_dict))
        (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, mark it complete, and only then delete older ones (Trainer deletes first).

        Raises `TrainingError` instead if a weight is not finite: nothing could resume from it.
        """
        # transformers 5.23 deletes old checkpoints inside of this hook, before a callback could mark the new one complete
        self._use_final_weights()
        check_weights(self)
        self._save_state()
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            remove_incomplete(checkpoint)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(checkpoint)
            remove_extra(checkpoint.parent, checkpoint)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self.args.output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save both; each process its part of the optimizer of a model that transformers has sharded."""
        # transformers 5.23 saves no optimizer of a model that it has sharded itself
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer_distributed(self.model, self._plain_optimizer(), str(Path(output_dir) / _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from a checkpoint folder, if there is one."""
        # the other half of _save_optimizer_and_scheduler (transformers 5.23)
        if checkpoint is None or not self.is_distributed_loading_by_transformers:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer_distributed(self.model, self._plain_optimizer(), str(Path(checkpoint) / _OPTIMIZER))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights; each process its part of a model that transformers has sharded."""
        # transformers 5.23 would load whole weights into a model that it has sharded itself
        if self.is_distributed_loading_by_transformers and not isinstance(self.model, PeftModel):
            copy_weights(self.load_weights(resume_from_checkpoint), self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
        # transformers 5.23 does so here too, past _load_from_checkpoint
        if self.is_distributed_loading_by_transformers:
            self._load_from_checkpoint(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def init_hf_repo(self, *args: Any, **kwargs: Any) -> None:
        """Create the repository on the hub. Raises `TrainingError` if the hub refuses it."""
        from huggingface_hub.errors import HfHubHTTPError

        try:
            super().init_hf_repo(*args, **kwargs)
        except (HfHubHTTPError, OSError) as error:
            why = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TrainingError(f"trainer.push_to_hub: {why} Check HF_TOKEN and trainer.hub_model_id.") from error

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card only if the model is published; the manifest of a run holds more."""
        if self.args.push_to_hub:
            super().create_model_card(*args, **kwargs)


class TrainerState(TrainerCallback):  # type: ignore[misc]
    """Restores the state of a checkpoint; lets the rules read and change the weights around the optimizer's step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state, if training resumes."""
        self.trainer.restore_state()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the rules read the weights."""
        for rule in self.trainer.rules:
            rule.before_update()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the rules change the weights."""
        for rule in self.trainer.rules:
            rule.after_update()


class OptimizerMixin(SFTTrainer):  # type: ignore[misc]
    """The optimizer, its schedule and its updates, as `rules` change them and the guard allows them."""

    rules: Sequence[UpdateRule]
    guard: Guard
    losses: MeanLoss
    steps_per_epoch: int
    optimizer: Any
    lr_scheduler: Any
    control: Any
    _total_train_tokens: Any

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer as the rules change it."""
        if self.optimizer is not None:
            return super().create_optimizer(model)
        self.optimizer = super().create_optimizer(model)
        leave_warmup_to_schedule(self.optimizer)
        for rule in self.rules:
            self.optimizer = rule.change_optimizer(self.optimizer, self)
        return self.optimizer

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return Trainer's counts before training; keep the updates of an epoch for the schedule."""
        values = super().set_initial_training_values(*args, **kwargs)
        self.steps_per_epoch = values[1]
        return values

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the scheduler of `kinject.train.schedules`, which has more names than transformers."""
        if self.lr_scheduler is None:
            schedule = schedule_of(self.args, self.model, self.steps_per_epoch)
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = schedule.make_scheduler(optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch, unless all steps are done or the run had stopped: Trainer would take one more step."""
        # transformers 5.23 takes one more step in a run that is done, or was stopped by a callback as it began
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End training with the weights to use."""
        # transformers 5.23 saves and scores a schedule-free optimizer's last iterate, not its average
        self._use_final_weights()
        return super()._finalize_training(*args, **kwargs)

    def _use_final_weights(self) -> None:
        """Switch a schedule-free optimizer to its averaged weights; the next training step switches back."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def _clip_grad_norm(self, model: Any) -> Any:
        """Change the gradient, then clip."""
        # transformers 5.23 has no callback between the accumulated gradient and its clipping
        self._change_gradient(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm before clipping; skip an update whose norm is not finite, and its step of the schedule.

        Under a gradient scaler (fp16) the scaler itself skips such updates, and they are counted; under DeepSpeed its
        engine does both.
        """
        # transformers 5.23 logs an update that is not finite and makes it; without clipping this is the only hook before it
        if grad_norm is None:
            self._change_gradient(model)
        step = self.state.global_step
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is None or self.is_deepspeed_enabled:
            made = self.guard.count(1.0 if norm is None else float(norm))
        else:
            scaler = self.accelerator.scaler
            made = self.guard.may_update(float(norm), step, None if scaler is None else float(scaler.get_scale()))
            if not made and scaler is None:
                model.zero_grad(set_to_none=True)
        loss = self.losses.end_update(self._tr_loss, made=made)
        if made:
            self.guard.check_progress(loss, math.nan if norm is None else float(norm), step)
        return norm

    def _change_gradient(self, model: Any) -> None:
        for rule in self.rules:
            rule.change_gradient(model, self.state.global_step)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add a batch's gradient and return its loss; with SAM, the last one of an update repeats all gradients."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        for sam in (rule for rule in self.rules if isinstance(rule, SharpnessAware)):
            sam.keep(inputs)
            if self.accelerator.sync_gradients:
                self._repeat_perturbed(model, sam, num_items_in_batch)
        return loss

    def _repeat_perturbed(self, model: Any, sam: SharpnessAware, num_items_in_batch: Any) -> None:
        """Replace the gradient of an update by that at the perturbed weights."""
        batches, n_tokens = sam.take_batches(), self._total_train_tokens
        for rule in self.rules:
            if isinstance(rule, FreezeWarmup):  # a frozen base is not perturbed
                rule.change_gradient(model, self.state.global_step)
        if not sam.perturb(model):
            return
        model.zero_grad()
        try:
            for number, batch in enumerate(batches, start=1):
                sync = self.accelerator.no_sync(model) if number < len(batches) else contextlib.nullcontext()
                with sync:
                    super().training_step(model, batch, num_items_in_batch)
        finally:
            sam.restore()
        self._total_train_tokens = n_tokens
