"""SFTTrainer on kinject's own training rows."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from kinject.corpus.tokenize import IGNORED
from kinject.errors import TrainingError
from kinject.models import copy_weights
from kinject.process import processes_per_row, tensor_parallel_size
from kinject.train.callbacks import save_state
from kinject.train.checkpoints import mark_complete, remove_extra, remove_incomplete, without_tied
from kinject.train.data import RoundSampler, TrainingData
from kinject.train.guards import Guard, check_weights
from kinject.train.loss import MeanLoss, Predictions, Project, TrainingLoss, in_tiles, next_tokens, token_metrics
from kinject.train.optimizers import OneByOne, SharpnessAware, add_muon, leave_warmup_to_schedule, split_by_layer
from kinject.train.probes import Probes
from kinject.train.regularization import Regularizer
from kinject.train.schedules import schedule_of
from kinject.train.teacher import Teacher
from kinject.train.trainable import FreezeWarmup

_OPTIMIZER = "optimizer"
"""The folder of a sharded optimizer in a checkpoint."""
_ISOLATION_TOLERANCE = 1e-3
_SAMPLED_TOKENS = 256
"""Tokens of which entropy and accuracy are measured between two logs, a process."""


class KnowledgeTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, for rows that are tokenised, packed and labelled already.

    With the plain loss on the CPU it computes cross-entropy from the logits: the same number as TRL's fused head,
    without the entropy and accuracy that TRL computes of every token (half of the time with a large vocabulary); here
    they are measured of a sample.

    `guard` decides over each update, `rounds` (the round of each row) orders the epoch, `probes` are scored at each
    evaluation. `preparation_cost` holds the tokens and seconds of the teacher's predictions and of the model's own answers.
    """

    training_data: TrainingData

    regularizer: Regularizer | None = None
    layerwise_lr_decay: float = 1.0
    training_loss: TrainingLoss = TrainingLoss()
    teacher: Teacher | None = None
    freeze_warmup: FreezeWarmup | None = None
    sam: SharpnessAware | None = None
    loss_tile: int | None = None
    """Tokens whose logits are in memory at once; None: all."""
    stochastic_rounding = False
    muon: float | None = None
    reinitialized: Sequence[str] = ()
    """Names of the parameters that got new weights."""
    notes: Sequence[str] = ()
    """Lines for the log about the model, the data and the techniques."""
    guard: Guard
    losses: MeanLoss
    rounds: Sequence[int] = ()
    probes: Probes | None = None
    preparation_cost: Mapping[str, float]
    control: Any
    optimizer: Any
    lr_scheduler: Any
    _total_train_tokens: Any
    router_aux_loss_coef: float
    steps_per_epoch: int = 1
    learned_tokens: Any = 0
    """Tokens in the loss so far, of all processes (a number, or a tensor on a device), since this run was started or resumed."""
    learned_before: int = 0
    """Those before the checkpoint from which it was resumed."""
    load_weights: Callable[[str], Any]
    """Loads the model of a checkpoint folder as the run's own was loaded."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "position_ids", "length", "replayed", "weights", "teacher"]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save tokenizer and model, a tied weight once (DeepSpeed gives two), and no pickle of the arguments."""
        super()._save(output_dir, without_tied(self.accelerator.unwrap_model(self.model), state_dict))
        (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, mark it complete, and only then delete older ones (Trainer deletes first).

        Raises `TrainingError` instead if a weight is not finite: nothing could resume from it.
        """
        self._use_final_weights()
        check_weights(self)
        save_state(self)
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
        if not self.is_distributed_loading_by_transformers:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        save_optimizer_distributed(self.model, self._plain_optimizer(), str(Path(output_dir) / _OPTIMIZER))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from a checkpoint folder, if there is one."""
        if checkpoint is None or not self.is_distributed_loading_by_transformers:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load_optimizer_distributed(self.model, self._plain_optimizer(), str(Path(checkpoint) / _OPTIMIZER))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _plain_optimizer(self) -> Any:
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load a checkpoint's weights; each process its part of a model that transformers has sharded."""
        if self.is_distributed_loading_by_transformers and not isinstance(self.model, PeftModel):
            copy_weights(self.load_weights(resume_from_checkpoint), self.model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint."""
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; losses are means over the updates that were made, at the end over all (Trainer: over this process)."""
        if "loss" in logs:
            logs["loss"] = self.losses.log(logs["loss"], self._tr_loss)
        if "train_loss" in logs:
            logs["train_loss"] = self.losses.mean(self._tr_loss)
        if ("loss" in logs or "eval_loss" in logs) and self._computes_loss():  # TRL's own head notes them itself
            n_tokens = torch.tensor([int(self._total_train_tokens)], device=self.accelerator.device)
            mode = "train" if self.model.training else "eval"
            n_all = int(self.accelerator.gather(n_tokens).sum())
            self._metrics[mode]["num_tokens"] = [n_all // tensor_parallel_size()]
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of `train_sampling_strategy`; by rounds if the epoch has some."""
        if self.rounds and self.args.train_sampling_strategy == "random":
            return RoundSampler(self.rounds, self.args.data_seed if self.args.data_seed is not None else self.args.seed)
        if self.args.train_sampling_strategy == "group_by_length" and train_dataset is None:
            # Trainer would read every row for its length
            n_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthGroupedSampler(n_rows, lengths=self.train_dataset.rows.lengths().tolist())
        return super()._get_train_sampler(train_dataset)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, its groups split by layer if the recipe's learning rate decays by layer."""
        is_new, optimizer = self.optimizer is None, super().create_optimizer(model)
        if not is_new:
            return optimizer
        if self.muon is not None:
            optimizer = self.optimizer = add_muon(optimizer, self.model, self.muon)
        if self.layerwise_lr_decay < 1.0:
            split_by_layer(optimizer, self.model, self.layerwise_lr_decay)
        leave_warmup_to_schedule(optimizer)
        if self.stochastic_rounding:
            OneByOne(optimizer, lambda: self.state.global_step, self.args.seed)
        return optimizer

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
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End training with the weights to use."""
        self._use_final_weights()
        return super()._finalize_training(*args, **kwargs)

    def _use_final_weights(self) -> None:
        """Switch a schedule-free optimizer to its averaged weights; the next training step switches back."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add a batch's gradient and return its loss; with `sam`, the last one of an update repeats all gradients."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.sam is None:
            return loss
        self.sam.keep(inputs)
        if self.accelerator.sync_gradients:
            self._repeat_perturbed(model, self.sam, num_items_in_batch)
        return loss

    def _repeat_perturbed(self, model: Any, sam: SharpnessAware, num_items_in_batch: Any) -> None:
        """Replace the gradient of an update by that at the perturbed weights."""
        batches, n_tokens = sam.take_batches(), self._total_train_tokens
        if self.freeze_warmup is not None:
            self.freeze_warmup.drop_gradients(model, self.state.global_step)
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

    def _change_gradient(self, model: Any) -> None:
        """Drop the gradients of a frozen base, add those of L2 and EWC."""
        if self.freeze_warmup is not None:
            self.freeze_warmup.drop_gradients(model, self.state.global_step)
            if self.state.global_step == self.freeze_warmup.steps:  # from here on the norm is that of more weights
                self.guard.norms.clear()
        if self.regularizer is not None:
            self.regularizer.add_gradient(model)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Change the gradient, then clip."""
        self._change_gradient(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm before clipping; skip an update whose norm is not finite, and its step of the schedule.

        Under a gradient scaler (fp16) the scaler itself skips such updates, and they are counted; under DeepSpeed its
        engine does both.
        """
        if grad_norm is None:
            self._change_gradient(model)
        step = self.state.global_step
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is None or self.is_deepspeed_enabled:
            made = self.guard.count(1.0 if norm is None else float(norm))
        elif self.accelerator.scaler is not None:
            made = self.guard.check_scaler(float(norm), float(self.accelerator.scaler.get_scale()), step)
        else:
            made = self.guard.may_update(float(norm), step)
            self.optimizer._is_overflow = (
                not made
            )  # accelerate's mark, by which Trainer leaves the schedule where it is
            if not made:
                model.zero_grad(set_to_none=True)
        loss = self.losses.end_update(self._tr_loss, made=made)
        if made:
            self.guard.check_progress(loss, math.nan if norm is None else float(norm), step)
        return norm

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the validation loss, if there is a validation corpus, and the accuracy of every probe; log both."""
        has_loss = eval_dataset is not None or self.eval_dataset is not None
        metrics: dict[str, float] = (
            super().evaluate(eval_dataset, ignore_keys, metric_key_prefix) if has_loss or self.probes is None else {}
        )
        if self.probes is None:
            return metrics
        self._use_final_weights()
        pad = self.processing_class.pad_token_id
        scores = self.probes.score(self.model_wrapped, 0 if pad is None else pad)
        accuracies = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        self.log(dict(accuracies))
        metrics |= accuracies
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one update and the divisor of its loss; count the learned tokens."""
        self.losses.begin_update(self._tr_loss)
        batches, divisor = super().get_batch_samples(*args, **kwargs)
        n_learned = divisor if self.training_loss.plain else None
        if n_learned is None:  # transformers does not count for models whose forward takes no further arguments
            n_learned = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
            if self.args.world_size > 1:
                n_learned = int(self.accelerator.reduce(torch.tensor(n_learned, device=self.accelerator.device)))
                n_learned //= processes_per_row()
        self.learned_tokens = self.learned_tokens + n_learned
        return batches, divisor

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Return the divisor of the loss of one update: its learned tokens, if the loss is plain."""
        n_learned = super()._get_num_items_in_batch(batch_samples, device)
        if self.training_loss.plain or n_learned is None:
            return n_learned
        count = torch.stack([self.training_loss.count(batch) for batch in batch_samples]).sum().to(device)
        averaged = self.args.average_tokens_across_devices and self.args.world_size > 1
        return self.accelerator.gather(count).sum() / processes_per_row() if averaged else count

    def _computes_loss(self) -> bool:
        """Return whether the loss is computed here; TRL computes it otherwise."""
        has_kl = self.regularizer is not None and self.regularizer.strengths.kl > 0
        nll_only = self.args.loss_type == "nll" and not self.aux_loss_enabled
        special = has_kl or not self.training_loss.plain or self.loss_tile is not None or self.teacher is not None
        return special or (nll_only and self.accelerator.device.type == "cpu")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return a batch's part of the loss of the accumulated batch: in training that of `training_loss`.

        In evaluation it is always the negative log-likelihood over the number of learned tokens.
        """
        if return_outputs or not self._computes_loss():
            inputs = {key: value for key, value in inputs.items() if key not in ("replayed", "weights", "teacher")}
            coefficient = self.router_aux_loss_coef
            self.router_aux_loss_coef = coefficient if self.model.training else 0.0  # TRL adds the routers' loss
            try:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            finally:
                self.router_aux_loss_coef = coefficient
        training_loss = self.training_loss if self.model.training else TrainingLoss()
        count = training_loss.count(inputs) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        read = {key: inputs[key] for key in ("input_ids", "position_ids")}
        teacher = self._predictions(inputs)
        if self.loss_tile is not None:
            sum_loss = functools.partial(self._total_in_tiles, training_loss, model, inputs, teacher)
            total = model(**read, use_cache=False, score=sum_loss)
        else:
            logits = model(**read, use_cache=False).logits.float()
            total = training_loss.total(logits, inputs, teacher)
            if (pull := self._divergence_term()) is not None:
                total = total + pull.strengths.kl * pull.divergence(model, inputs, logits[:, :-1])
            self._note_token_metrics(logits, next_tokens(inputs))
        if self.model.training:
            self._total_train_tokens += inputs["input_ids"].numel()
        loss = total / torch.where(count > 0, count, 1)  # zero if the batch has no token to learn
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * (self.accelerator.num_processes // tensor_parallel_size())
        return loss

    def _predictions(self, inputs: dict[str, Any]) -> Predictions | None:
        """Return the teacher's predictions: of the token after each one, with tiles of the learned ones; None without any."""
        if self.teacher is None or not self.model.training:
            return None
        return self.teacher.of_batch(inputs, None if self.loss_tile is None else inputs["labels"][:, 1:] != IGNORED)

    def _divergence_term(self) -> Regularizer | None:
        """Return the regularizer if the loss holds its KL divergence."""
        regularizer = self.regularizer
        return regularizer if self.model.training and regularizer is not None and regularizer.strengths.kl else None

    def _total_in_tiles(
        self,
        training_loss: TrainingLoss,
        model: Any,
        inputs: dict[str, Any],
        teacher: Predictions | None,
        hidden: torch.Tensor,
        project: Project,
    ) -> torch.Tensor:
        """Return the sum of the loss with the logits of `loss_tile` tokens in memory at once."""
        tile, labels = self.loss_tile or 1, inputs["labels"][:, 1:]
        learned = labels != IGNORED
        states, targets = hidden[:, :-1][learned], labels[learned]
        more = [] if teacher is None else teacher.tensors()

        def score(part: torch.Tensor, target: torch.Tensor, *predictions: torch.Tensor) -> torch.Tensor:
            return training_loss.by_token(
                project(part), target, teacher=Predictions(*predictions) if predictions else None
            )

        losses = in_tiles(score, tile, states, targets, *more)
        by_token = states.new_zeros(labels.shape, dtype=torch.float32).masked_scatter(learned, torch.cat(losses))
        total = training_loss.total_of(by_token, inputs)
        if (pull := self._divergence_term()) is not None:
            total = total + pull.strengths.kl * pull.divergence_in_tiles(model, inputs, hidden, project, tile)
        self._note_token_metrics(states.detach(), targets, project)
        return total

    @torch.no_grad()
    def _note_token_metrics(self, logits: torch.Tensor, labels: torch.Tensor, project: Project | None = None) -> None:
        """Note for the log, as TRL does, the entropy and the accuracy of the next token.

        They cost a pass over the logits each, so training measures a sample: the first tokens of the first batch after
        each log. With `project`, `logits` are the hidden states of the tokens `labels`.
        """
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if mode == "train" and "entropy" in metrics:
            return
        most = _SAMPLED_TOKENS if mode == "train" else None
        if project is None:
            sums = token_metrics(logits, labels, most)
        else:
            tile, sums = self.loss_tile or 1, torch.zeros(3, device=labels.device)
            for start in range(0, min(len(labels), most or len(labels)), tile):
                stop = min(start + tile, most or len(labels))
                sums += token_metrics(project(logits[start:stop])[None], labels[start:stop][None])
        entropy, n_correct, n_tokens = self.accelerator.gather(sums).view(-1, 3).sum(0).tolist()
        metrics["entropy"].append(entropy / max(n_tokens, 1))
        metrics["mean_token_accuracy"].append(n_correct / max(n_tokens, 1))


@torch.no_grad()
def check_isolation(model: Any, row: dict[str, list[int]]) -> None:
    """Raise `TrainingError` if a document in a packed row sees the one before it.

    The second document of `row` (columns input_ids and position_ids, at least two documents) is run packed and alone
    in float32; the logits must agree.
    """
    starts = [index for index, position in enumerate(row["position_ids"]) if position == 0]
    if len(starts) < 2:
        return
    end = starts[2] if len(starts) > 2 else len(row["input_ids"])
    ids = torch.tensor([row["input_ids"][:end]], device=model.device)
    positions = torch.tensor([row["position_ids"][:end]], device=model.device)
    was_training = model.training
    model.eval()
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, starts[1] :]
    alone = model(input_ids=ids[:, starts[1] :], position_ids=positions[:, starts[1] :], use_cache=False).logits
    model.train(was_training)
    difference = float((packed.float() - alone.float()).abs().max() / alone.float().abs().max().clamp(min=1.0))
    tolerance = _ISOLATION_TOLERANCE if model.dtype == torch.float32 else 30 * _ISOLATION_TOLERANCE
    if difference > tolerance:
        raise TrainingError(
            f"packed documents see each other with this model's attention (logits differ by {difference:.2g}). Set "
            "trainer.packing: false, or packing_strategy: wrapped to accept it."
        )
