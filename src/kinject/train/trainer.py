"""SFTTrainer on kinject's own training rows, in parts: rows that are packed already, the objective,
and the updates.

An override of a private hook of transformers' Trainer has its reason, and the version that was
read. Checkpoints are in `kinject.train.checkpoints`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Sampler
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import ModelOutput
from trl import SFTConfig, SFTTrainer

from kinject.corpus.tokenize import IGNORED
from kinject.process import processes_per_row, tensor_parallel_size
from kinject.train.batches import (
    FilledRows,
    FilledSampler,
    LengthSampler,
    RoundSampler,
    RowDataset,
)
from kinject.train.callbacks import RunLog
from kinject.train.checkpoints import CheckpointMixin, over_processes
from kinject.train.config import strategies_off
from kinject.train.guards import compiler_faults
from kinject.train.loss import MeanLoss, TokenMean
from kinject.train.objectives import TrainingLoss
from kinject.train.objectives.distillation import Teacher
from kinject.train.parts import TrainingParts
from kinject.train.schedules import leave_warmup_to_schedule, schedule_of
from kinject.train.updates import UpdateRule
from kinject.train.updates.freeze import FreezeWarmup
from kinject.train.updates.regularization import Regularizer
from kinject.train.updates.sam import Batch, SharpnessAware

GradNorm: TypeAlias = torch.Tensor | float | None
"""The norm of a gradient; None where DeepSpeed's engine keeps it."""
_COLUMNS = (
    "input_ids",
    "labels",
    "position_ids",
    "length",
    "replayed",
    "weights",
    "teacher",
    "filler",
)
_OF_TOKENS = frozenset(("entropy", "mean_token_accuracy"))
"""Metrics of TRL, each the mean over the learned tokens of a batch."""
_N_LEARNED = "n_learned"
"""The number of these tokens, for each batch beside its metrics."""


class PackingMixin(SFTTrainer):  # type: ignore[misc]
    """Rows that are tokenised, packed and labelled already; `rounds` order the rows of an epoch if
    it has some."""

    rounds: Sequence[int]
    train_dataset: RowDataset

    def _set_signature_columns_if_needed(self) -> None:
        # TRL 1.16 drops every column that it does not know
        self._signature_columns = list(_COLUMNS)

    def get_train_dataloader(self) -> DataLoader[dict[str, torch.Tensor]]:
        """Return the batches of an epoch, which reads every row once."""
        n_devices = self.args.world_size // processes_per_row()
        sampler = self._get_train_sampler(self.train_dataset)
        rebalances = self.args.train_sampling_strategy == "batch_rebalance"
        loader: DataLoader[dict[str, torch.Tensor]]
        if n_devices == 1 or self.args.dataloader_drop_last or sampler is None or rebalances:
            loader = super().get_train_dataloader()
        else:
            # accelerate repeats the first rows until all processes have as many: of 22 by two
            # processes with batches of two, two counted twice.
            rows = FilledRows(self.train_dataset, self._train_batch_size * n_devices)
            fill = functools.partial(FilledSampler, sampler=sampler, data_seed=self.args.data_seed)
            loader = self._get_dataloader(
                rows, "Training", self._train_batch_size, sampler_fn=fill, is_training=True
            )
        return loader

    def _get_train_sampler(self, train_dataset: RowDataset | None = None) -> Sampler[int] | None:
        """Return the sampler of `train_sampling_strategy`; by rounds if the epoch has some."""
        # transformers 5.23 knows no rounds, and reads every row for its length
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if self.rounds and self.args.train_sampling_strategy == "random":
            return RoundSampler(self.rounds, seed)
        if self.args.train_sampling_strategy == "group_by_length":
            n_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthSampler(n_rows, self.train_dataset.rows.lengths().tolist(), seed)
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        return sampler

    def get_eval_dataloader(
        self, eval_dataset: RowDataset | None = None
    ) -> DataLoader[dict[str, torch.Tensor]]:
        """Return the batches of an evaluation, which read every row once."""
        rows: RowDataset | None = eval_dataset or self.eval_dataset
        read: RowDataset | FilledRows | None = rows
        # accelerate repeats the first rows until all processes have as many, and would count those
        # twice; dataloader_drop_last, which is for updates of one size, leaves the last ones out
        if rows is not None and (self.args.world_size > 1 or self.args.dataloader_drop_last):
            read = FilledRows(rows, self.args.eval_batch_size * self.args.world_size)
        loader: DataLoader[dict[str, torch.Tensor]] = super().get_eval_dataloader(read)
        return loader


class ObjectiveMixin(SFTTrainer):  # type: ignore[misc]
    """The loss of `training_loss`, and what the log says of it.

    With the plain loss on the CPU it is computed from the logits: the same number as TRL's fused
    head, without the entropy and accuracy that TRL computes of every token (half of the time with a
    large vocabulary).
    """

    training_loss: TrainingLoss
    fused_head_fits: bool = True
    """Whether TRL's head gives the logits of the model."""
    losses: MeanLoss
    rules: Sequence[UpdateRule]
    teacher: Teacher | None
    learned_tokens: int | torch.Tensor
    router_aux_loss_coef: float
    evaluated: TokenMean
    _total_train_tokens: int | torch.Tensor

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the tokens read so far; TRL's metrics are means over tokens."""
        metrics = self._current_metrics
        if "loss" in logs or "eval_loss" in logs:
            n_tokens = torch.tensor([int(self._total_train_tokens)], device=self.accelerator.device)
            n_all = int(self.accelerator.gather(n_tokens).sum())
            metrics["num_tokens"] = [n_all // tensor_parallel_size()]
        counts = metrics.pop(_N_LEARNED, [])
        for name in _OF_TOKENS & metrics.keys():
            total = sum(mean * n for mean, n in zip(metrics[name], counts, strict=True))
            metrics[name] = [total / max(1, sum(counts))]
        super().log(logs, start_time)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one update and the divisor of its loss; count the learned
        tokens."""
        batches, divisor = super().get_batch_samples(*args, **kwargs)
        n_learned = divisor
        if not self.training_loss.plain:
            n_learned = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
            if self.args.world_size > 1:
                n_learned = int(
                    self.accelerator.reduce(torch.tensor(n_learned, device=self.accelerator.device))
                )
                n_learned //= processes_per_row()
        self.learned_tokens = self.learned_tokens + n_learned
        return batches, divisor

    def _get_num_items_in_batch(
        self, batch_samples: list[Batch], device: torch.device
    ) -> torch.Tensor | int | None:
        """Return the divisor of the loss of one update: its learned tokens, if the loss is
        plain."""
        # transformers 5.23 counts the labels that are not masked; a loss that weighs tokens has
        # another divisor
        n_learned: torch.Tensor | int | None = super()._get_num_items_in_batch(
            batch_samples, device
        )
        if self.training_loss.plain or n_learned is None:
            return n_learned
        counts = [self.training_loss.count(batch) for batch in batch_samples]
        count = torch.stack(counts).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            # Several processes may share a row, of context or tensor parallelism.
            count = self.accelerator.gather(count).sum() / processes_per_row()
        return count

    def _computes_loss(self) -> bool:
        """Return whether the loss is computed here; TRL computes it otherwise."""
        # By TRL a validation of dft would be of dft's loss: 0.018 in place of 5.77.
        if self.args.loss_type == "dft" and not self.model.training:
            return True
        return self.computes_training_loss()

    def computes_training_loss(self) -> bool:
        """Return whether the loss of the training is computed here; TRL computes it otherwise."""
        nll_only = self.args.loss_type == "nll" and not self.aux_loss_enabled
        special = self._pull is not None or self.training_loss.is_changed
        needs_logits = self.accelerator.device.type == "cpu" or not self.fused_head_fits
        return special or (nll_only and needs_logits)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Return a batch's part of the loss of the accumulated batch: in training that of
        `training_loss`.

        In evaluation it is always the negative log-likelihood over the number of learned tokens.
        """
        if return_outputs or not self._computes_loss():
            return self._loss_of_trl(model, inputs, return_outputs, num_items_in_batch)
        # The loss of an evaluation is always the plain one, so that runs can be compared.
        training_loss = self.training_loss if self.model.training else TrainingLoss()
        n_items = num_items_in_batch
        if n_items is None:
            n_items = training_loss.count(inputs)
        count = torch.as_tensor(n_items)
        teacher = None
        if self.teacher is not None and self.model.training:
            teacher = self.teacher.of_batch(inputs)
        # With the cache, restarting positions do not keep packed documents apart (off by 0.44).
        output = model(
            input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False
        )
        logits = output.logits.float()
        total = training_loss.total(logits, inputs, teacher)
        if self.model.training:
            pull = self._pull
            if pull is not None:
                with self.accelerator.autocast():  # as the model: the base's copy has none
                    distance = pull.divergence(model, inputs, logits[:, :-1])
                total = total + pull.strengths.kl * distance
            self._total_train_tokens += inputs["input_ids"].numel()
        loss = total / torch.where(count > 0, count, 1)  # zero if the batch has no token to learn
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            # Processes of tensor parallelism read the same rows, which count once.
            loss = loss * (self.accelerator.num_processes // tensor_parallel_size())
        return loss

    def _loss_of_trl(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> torch.Tensor | tuple[torch.Tensor, ModelOutput]:
        """Return the loss as TRL computes it, in evaluation without its routers' loss."""
        own = ("replayed", "weights", "teacher")
        inputs = {key: value for key, value in inputs.items() if key not in own}
        coefficient = self.router_aux_loss_coef
        if not self.model.training:
            self.router_aux_loss_coef = 0.0
            # Only the routers' loss reads it, and with it packed documents would see each other.
            inputs.pop("attention_mask", None)
        n_tokens = self._total_train_tokens
        try:
            loss: torch.Tensor | tuple[torch.Tensor, ModelOutput] = super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch
            )
        finally:
            self.router_aux_loss_coef = coefficient
        self._note_tokens(inputs, n_tokens)
        return loss

    def _note_tokens(
        self, inputs: Mapping[str, torch.Tensor], n_tokens: int | torch.Tensor
    ) -> None:
        """Count the tokens of a batch that TRL has read, after `n_tokens` in training."""
        # TRL 1.16 counts one row of a batch that is not flattened, and has means of batches
        if self.model.training:
            self._total_train_tokens = n_tokens + inputs["input_ids"].numel()
        n_learned = self.accelerator.gather((inputs["labels"][:, 1:] != IGNORED).sum()).sum()
        self._current_metrics[_N_LEARNED].append(int(n_learned))

    @property
    def _current_metrics(self) -> dict[str, list[float]]:
        """TRL's metrics since the last log, a value a batch."""
        metrics: dict[str, list[float]] = self._metrics["train" if self.model.training else "eval"]
        return metrics

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None, None]:
        """Return the loss of a batch; add it to the mean of the evaluation."""
        n_learned = (inputs["labels"][:, 1:] != IGNORED).sum()
        step: tuple[torch.Tensor, None, None] = super().prediction_step(
            model, inputs, *args, **kwargs
        )
        self.evaluated.add(step[0], n_learned)
        return step

    def evaluation_loop(
        self,
        dataloader: DataLoader[Batch],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return what Trainer measures, the loss as the mean over all tokens."""
        # transformers 5.23 takes the mean of the batches' means, each as often as it has rows
        self.evaluated = TokenMean()
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        name = f"{metric_key_prefix}_loss"
        if name in output.metrics:
            output.metrics[name] = self.evaluated.over_processes(self.accelerator.gather)
        rows = dataloader.dataset
        if isinstance(rows, FilledRows):
            output = output._replace(num_samples=len(rows.rows))
        return output

    @property
    def _pull(self) -> Regularizer | None:
        """The rule whose divergence from the base's predictions is a term of the loss."""
        for rule in self.rules:
            if isinstance(rule, Regularizer) and rule.strengths.kl:
                return rule
        return None


class OptimizerMixin(Trainer):  # type: ignore[misc]
    """The optimizer, its schedule and its updates, as `rules` change them and the guard allows
    them."""

    optimizer: Optimizer | None
    lr_scheduler: LRScheduler | None
    control: TrainerControl
    _total_train_tokens: int | torch.Tensor

    def take(self, parts: TrainingParts) -> None:
        """Keep the parts of a run, and begin its counts."""
        self.training_data, self.probes = parts.data, parts.probes
        self.rules, self.guard = parts.rules, parts.guard
        self.load_weights, self.preparation_cost = parts.load_weights, parts.cost
        self.losses = MeanLoss()
        self.notes: list[str] = []
        self.steps_per_epoch = 1
        self.learned_before, self.spent_before = 0, (0.0, 0.0)
        self.learned_tokens: int | torch.Tensor = 0
        """Those in the loss so far, of all processes (a number, or a tensor on a device), since
        this run began or resumed."""

    def watchers(
        self, run_dir: Path, callbacks: Sequence[TrainerCallback]
    ) -> list[TrainerCallback]:
        """Return the callbacks of a trainer that is to be made: `callbacks`, after those that every
        training has."""
        return [
            RunLog(run_dir, lambda: int(self.learned_tokens)),
            self.guard,
            *callbacks,
            TrainingHooks(self),
        ]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log; losses are means over the updates that were made, at the end over all (Trainer: over
        this process)."""
        if "loss" in logs:
            logs["loss"] = self.losses.log(logs["loss"], self._tr_loss)
        if "train_loss" in logs:
            logs["train_loss"] = self.losses.mean(over_processes(self._tr_loss, self.args))
        super().log(logs, start_time)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one update and the divisor of its loss."""
        self.losses.begin_update(self._tr_loss)
        return super().get_batch_samples(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """Return the optimizer as the rules change it."""
        is_new = self.optimizer is None
        optimizer: Optimizer = super().create_optimizer(model)
        if is_new:
            leave_warmup_to_schedule(optimizer)
            for rule in self.rules:
                optimizer = rule.change_optimizer(optimizer, self)
            self.optimizer = optimizer
        return optimizer

    def set_initial_training_values(self, *args: Any, **kwargs: Any) -> Any:
        """Return Trainer's counts before training; keep the updates of an epoch for the
        schedule."""
        values = super().set_initial_training_values(*args, **kwargs)
        self.steps_per_epoch = values[1]
        return values

    def create_scheduler(
        self, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> LRScheduler:
        """Return the scheduler of `kinject.train.schedules`, which has more names than
        transformers."""
        if self.lr_scheduler is None:
            schedule = schedule_of(self.args, self.model, self.steps_per_epoch)
            scheduled = optimizer or self.optimizer
            assert scheduled is not None
            self.lr_scheduler = schedule.make_scheduler(scheduled, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _run_epoch(self, **kwargs: Any) -> None:
        """Train an epoch, unless all steps are done or the run had stopped: Trainer would take one
        more step."""
        # transformers 5.23 sets the epoch after the batches that a resumed one skips. Of several
        # processes it does not reach the sampler then: the second epoch had the order of the first.
        kwargs["train_dataloader"].set_epoch(kwargs["epoch"])
        # transformers 5.23 takes one more step in a run that is done, or was stopped by a callback
        # as it began
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(**kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End training with the weights to use."""
        # transformers 5.23 saves and scores a schedule-free optimizer's last iterate, not its
        # average
        self._use_final_weights()
        return super()._finalize_training(*args, **kwargs)

    def _use_final_weights(self) -> None:
        """Switch a schedule-free optimizer to its averaged weights, until the next step."""
        use_average = getattr(self.optimizer, "eval", None)
        if callable(use_average):
            use_average()

    def _clip_grad_norm(self, model: nn.Module) -> GradNorm:
        """Change the gradient, then clip."""
        # transformers 5.23 has no callback between the accumulated gradient and its clipping
        self._change_gradient(model)
        norm: GradNorm = super()._clip_grad_norm(model)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: GradNorm = None) -> GradNorm:
        """Return the norm before clipping; skip an update whose norm is not finite, and its step of
        the schedule.

        Under a gradient scaler (fp16) the scaler itself skips such updates, and they are counted;
        under DeepSpeed its engine does both.
        """
        # transformers 5.23 logs an update that is not finite and makes it; without clipping this is
        # the only hook before it
        if grad_norm is None:
            self._change_gradient(model)
        step = self.state.global_step
        norm: GradNorm = super()._get_grad_norm(model, grad_norm)
        # DeepSpeed's engine skips by itself, and may keep the norm to itself.
        if norm is None or self.is_deepspeed_enabled:
            made = self.guard.count(1.0 if norm is None else float(norm))
        else:
            scaler = self.accelerator.scaler
            scale = None if scaler is None else float(scaler.get_scale())
            made = self.guard.may_update(float(norm), step, scale)
            # Without gradients the optimizer's step changes nothing.
            if not made and scaler is None:
                model.zero_grad(set_to_none=True)
        loss = self.losses.end_update(self._tr_loss, made=made)
        if made:
            # Each process has the loss of its own rows, and all must come to the same decision.
            mean = over_processes(torch.tensor(loss, device=self.args.device), self.args)
            self.guard.check_progress(float(mean), math.nan if norm is None else float(norm), step)
        return norm

    def _change_gradient(self, model: nn.Module) -> None:
        for rule in self.rules:
            rule.change_gradient(model, self.state.global_step)

    def training_step(
        self, model: nn.Module, inputs: Batch, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """Add a batch's gradient and return its loss; with SAM, the last one of an update repeats
        all gradients."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        for rule in self.rules:
            if isinstance(rule, SharpnessAware):
                rule.keep(inputs)
                if self.accelerator.sync_gradients:
                    self._repeat_perturbed(model, rule, num_items_in_batch)
        return loss

    def _repeat_perturbed(
        self,
        model: nn.Module,
        sam: SharpnessAware,
        num_items_in_batch: torch.Tensor | int | None,
    ) -> None:
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
                # Gradients are reduced over the devices once an update, with its last batch.
                is_last = number == len(batches)
                with contextlib.nullcontext() if is_last else self.accelerator.no_sync(model):
                    super().training_step(model, batch, num_items_in_batch)
        finally:
            sam.restore()
        self._total_train_tokens = n_tokens  # the second pass reads the same tokens


class TrainingHooks(TrainerCallback):  # type: ignore[misc]
    """Restores a checkpoint's state; lets the rules change weights around the optimizer's step."""

    def __init__(self, trainer: OptimizerMixin) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Restore the state, if training resumes; start the clock."""
        self.trainer.restore_state()
        self.trainer.start_clock()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the rules read the weights."""
        for rule in self.trainer.rules:
            rule.before_update()

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the rules change the weights."""
        for rule in self.trainer.rules:
            rule.after_update()


class RunTrainer(OptimizerMixin, CheckpointMixin):
    """What the trainer of every method has: its updates and its checkpoints."""

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train. Raises `TrainingError` where torch's compiler fails."""
        with compiler_faults():
            return super().train(*args, **kwargs)


class KnowledgeTrainer(RunTrainer, PackingMixin, ObjectiveMixin):
    """TRL's SFTTrainer on kinject's own rows, in four parts: rows, objective, updates and
    checkpoints.

    `guard` decides over each update, `probes` are scored at each evaluation. `notes` are lines for
    the log about the model, the data and the techniques.
    """

    def __init__(
        self,
        parts: TrainingParts,
        *,
        args: SFTConfig,
        run_dir: Path,
        callbacks: list[TrainerCallback],
        **options: Any,
    ) -> None:
        self.take(parts)
        self.training_loss = parts.loss
        rounds = parts.data.rows.rounds
        self.rounds: Sequence[int] = rounds if rounds[-1] > 0 else ()
        # SFTTrainer needs a Dataset, which would copy every row: it gets the first, then all.
        first_row = Dataset.from_list([parts.train[0]])
        evaluates = parts.validation is not None
        is_sharded = bool(options["model"].is_distributed_loading_by_transformers)
        with strategies_off(args, evaluates=evaluates, saves=not is_sharded):
            super().__init__(
                args=args,
                train_dataset=first_row,
                eval_dataset=first_row if evaluates else None,
                callbacks=self.watchers(run_dir, callbacks),
                **options,
            )
        self.train_dataset, self.eval_dataset = parts.train, parts.validation
        # Of Gemma 3n and 4 transformers 5.23 takes the mean of the accumulated batches' means
        # (7.409 for 7.325), since their own loss is a mean. No loss of a run is the model's own.
        self.model_accepts_loss_kwargs = True
        self.label_smoother = None  # TrainingLoss smooths; validation losses stay plain
        self.remove_callback(PrinterCallback)
        self.teacher = None if parts.make_teacher is None else parts.make_teacher(self.model)

    def evaluate(
        self,
        eval_dataset: RowDataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Return the validation loss, if there is a validation corpus, and the accuracy of every
        probe; log both."""
        has_loss = eval_dataset is not None or self.eval_dataset is not None
        metrics: dict[str, float] = {}
        if has_loss or self.probes is None:
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        if self.probes is None:
            return metrics
        self._use_final_weights()
        pad = self.processing_class.pad_token_id
        scores = self.probes.score(self.model_wrapped, 0 if pad is None else pad)
        accuracies = {f"{metric_key_prefix}_{name}": value for name, value in scores.items()}
        self.log(dict(accuracies))
        metrics |= accuracies
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics
