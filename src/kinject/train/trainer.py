"""SFTTrainer on kinject's own training rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer

from kinject.corpus import IGNORED
from kinject.errors import TrainingError
from kinject.train.anchor import Anchor
from kinject.train.carried import mean_loss, put_into_state
from kinject.train.checkpoints import clear_torn, mark_complete
from kinject.train.eight_bit import settle_embedding_bits
from kinject.train.fresh_layers import HeldBase
from kinject.train.guards import Guard
from kinject.train.objective import Objective
from kinject.train.probes import Probes
from kinject.train.schedule_free import leave_warmup_to_schedule
from kinject.train.schedules import schedule_of
from kinject.train.sharpness import Sharpness
from kinject.train.trainable import split_by_layer

_ISOLATION_TOLERANCE = 1e-3


class KnowledgeTrainer(SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, fed rows that are tokenised, packed and labelled already.

    With the plain loss on the CPU it computes cross-entropy from the logits: the same number as TRL's fused head,
    without the entropy and accuracy that TRL works out at every step (half of the time with a large vocabulary).

    `anchor` pulls towards the base, `guard` decides over each update, `rounds` (the round of each row) orders the epoch,
    `probes` are asked at each evaluation. `objective` is what the loss in training is, `held_base` what is left out of
    the first updates, `sharpness` where the gradient is taken.
    """

    anchor: Anchor | None = None
    layerwise_lr_decay: float = 1.0
    objective: Objective = Objective()
    held_base: HeldBase | None = None
    sharpness: Sharpness | None = None
    notes: Sequence[str] = ()
    """What is to be said of the techniques at work."""
    guard: Guard
    rounds: Sequence[int] = ()
    probes: Probes | None = None
    control: Any
    lr_scheduler: Any
    _total_train_tokens: Any
    learned_tokens: Any = 0
    """Tokens that bore loss so far in this process (a number, or a tensor that a device still adds up)."""

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "position_ids", "length", "replayed", "weights"]

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save model and tokenizer, without the pickle of the arguments: recipe.yaml and the manifest hold them."""
        super()._save(output_dir, state_dict)
        (Path(output_dir or self.args.output_dir) / TRAINING_ARGS_NAME).unlink(missing_ok=True)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save a checkpoint, mark it whole, and only then delete older ones (Trainer deletes before it is done)."""
        self._settle_weights()
        put_into_state(self)
        checkpoint = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            clear_torn(checkpoint)
        self.accelerator.wait_for_everyone()
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(checkpoint)
            best = self.state.best_model_checkpoint
            rotate_checkpoints(self.args.output_dir, save_total_limit=limit, best_model_checkpoint=best, use_mtime=True)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write TRL's model card only where it is published; beside a run the manifest says more."""
        if self.args.push_to_hub:
            super().create_model_card(*args, **kwargs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, at the end with the mean loss of all updates (Trainer's is that of this process's)."""
        if "train_loss" in logs:
            logs["train_loss"] = mean_loss(self)
        super().log(logs, start_time)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler of `train_sampling_strategy`; of spread rows, by rounds."""
        if self.rounds and self.args.train_sampling_strategy == "random":
            return RoundSampler(self.rounds, self.args.data_seed if self.args.data_seed is not None else self.args.seed)
        if self.args.train_sampling_strategy == "group_by_length" and train_dataset is None:
            # Trainer would read every row to learn its length
            n_rows = self.args.train_batch_size * self.args.gradient_accumulation_steps
            return LengthGroupedSampler(n_rows, lengths=self.train_dataset.rows.lengths().tolist())
        return super()._get_train_sampler(train_dataset)

    def create_optimizer(self, model: Any = None) -> Any:
        """Return the optimizer, its groups split by layer where the recipe's learning rate decays by layer."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if fresh and self.layerwise_lr_decay < 1.0:
            split_by_layer(optimizer, self.model, self.layerwise_lr_decay)
        if fresh:
            settle_embedding_bits(optimizer, self.model, self.args.optim_args)
            leave_warmup_to_schedule(optimizer)
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return the scheduler of `kinject.train.schedules`, which knows more names than transformers."""
        if self.lr_scheduler is None:
            schedule = schedule_of(self.args, self.model)
            self.lr_scheduler = schedule.over(self.optimizer if optimizer is None else optimizer, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Train an epoch, unless all steps are done or the run had stopped: Trainer takes one more from such a checkpoint."""
        self.control.should_training_stop |= self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """End training with the weights that are to be used."""
        self._settle_weights()
        return super()._finalize_training(*args, **kwargs)

    def _settle_weights(self) -> None:
        """Put the weights that are to be used in place of those at which gradients are taken: a schedule-free optimizer's
        averages. The next training step turns back."""
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Add a batch's gradient and return its loss; with `sharpness`, the last of an update takes all gradients anew."""
        loss: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self.sharpness is None:
            return loss
        self.sharpness.keep(inputs)
        if self.accelerator.sync_gradients:
            self._take_gradient_uphill(model, self.sharpness, num_items_in_batch)
        return loss

    def _take_gradient_uphill(self, model: Any, sharpness: Sharpness, num_items_in_batch: Any) -> None:
        batches, n_seen = sharpness.batches(), self._total_train_tokens
        if self.held_base is not None:
            self.held_base.drop(model, self.state.global_step)
        if not sharpness.climb(model):
            return
        model.zero_grad()
        try:
            for place, batch in enumerate(batches, start=1):
                waits = self.accelerator.no_sync(model) if place < len(batches) else contextlib.nullcontext()
                with waits:
                    super().training_step(model, batch, num_items_in_batch)
        finally:
            sharpness.come_back()
        self._total_train_tokens = n_seen

    def _shape_gradient(self, model: Any) -> None:
        """Leave out what holds still, add the pull to the base."""
        if self.held_base is not None:
            self.held_base.drop(model, self.state.global_step)
        if self.anchor is not None:
            self.anchor.pull(model)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Shape the gradient, then clip."""
        self._shape_gradient(model)
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the norm before clipping; leave an update out whose norm is not finite.

        Under a gradient scaler (fp16) the scaler itself leaves such updates out, and they are counted; under DeepSpeed
        its engine does both.
        """
        if grad_norm is None:
            self._shape_gradient(model)
        norm = super()._get_grad_norm(model, grad_norm)
        if norm is None or self.is_deepspeed_enabled:
            return norm
        if self.accelerator.scaler is not None:
            self.guard.watch_scaler(float(norm), float(self.accelerator.scaler.get_scale()), self.state.global_step)
        elif not self.guard.may_update(float(norm), self.state.global_step):
            model.zero_grad(set_to_none=True)
        return norm

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the held-out loss, where there is a held-out corpus, and the accuracy of every probe; log both."""
        held_out = eval_dataset is not None or self.eval_dataset is not None
        metrics: dict[str, float] = (
            super().evaluate(eval_dataset, ignore_keys, metric_key_prefix) if held_out or self.probes is None else {}
        )
        if self.probes is None:
            return metrics
        self._settle_weights()
        pad = self.processing_class.pad_token_id
        found = self.probes.ask(self.model_wrapped, 0 if pad is None else pad)
        accuracies = {f"{metric_key_prefix}_{name}": value for name, value in found.items()}
        self.log(dict(accuracies))
        metrics |= accuracies
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of one update and what its loss is divided by; note the learned tokens."""
        batches, divisor = super().get_batch_samples(*args, **kwargs)
        noted = divisor if self.objective.plain else None
        if noted is None:  # transformers does not count for models whose forward takes no further arguments
            noted = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        self.learned_tokens = self.learned_tokens + noted
        return batches, divisor

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        """Return what the loss of one update is divided by: its learned tokens, where the loss is plain."""
        n_learned = super()._get_num_items_in_batch(batch_samples, device)
        if self.objective.plain or n_learned is None:
            return n_learned
        count = torch.stack([self.objective.count(batch) for batch in batch_samples]).sum().to(device)
        shared = self.args.average_tokens_across_devices and self.args.world_size > 1
        return self.accelerator.gather(count).sum() if shared else count

    def _own_loss(self) -> bool:
        anchored = self.anchor is not None and self.anchor.strengths.kl > 0
        plain_here = self.args.loss_type == "nll" and not self.aux_loss_enabled
        return anchored or not self.objective.plain or (plain_here and self.accelerator.device.type == "cpu")

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a batch, its part of the accumulated batch's: in training as `objective` says.

        In evaluation it is the negative log-likelihood over the number of learned tokens, whatever is trained on.
        """
        if return_outputs or not self._own_loss():
            inputs = {key: value for key, value in inputs.items() if key not in ("replayed", "weights")}
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        objective = self.objective if self.model.training else Objective()
        outputs = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False)
        logits = outputs.logits.float()
        total = objective.total(logits, inputs)
        count = objective.count(inputs) if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        if self.model.training:
            self._total_train_tokens += inputs["input_ids"].numel()
            if self.anchor is not None and self.anchor.strengths.kl:
                total = total + self.anchor.strengths.kl * self.anchor.divergence(model, inputs, logits[:, :-1])
        loss = total / torch.where(count > 0, count, 1)  # without anything to learn it is zero
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes
        return loss


class RoundSampler(torch.utils.data.Sampler[int]):
    """Row numbers of one epoch: the rounds in a random order, the rows of each in a random order, both by epoch."""

    def __init__(self, rounds: Sequence[int], seed: int) -> None:
        self.rounds = [[index for index, _ in held] for _, held in groupby(enumerate(rounds), key=lambda item: item[1])]
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.rounds))

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        for number in torch.randperm(len(self.rounds), generator=generator).tolist():
            held = self.rounds[number]
            yield from (held[index] for index in torch.randperm(len(held), generator=generator).tolist())


@torch.no_grad()
def check_isolation(model: Any, row: dict[str, list[int]]) -> None:
    """Raise `TrainingError` when a document in a packed row sees the one before it.

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
    worst = float((packed.float() - alone.float()).abs().max() / alone.float().abs().max().clamp(min=1.0))
    tolerance = _ISOLATION_TOLERANCE if model.dtype == torch.float32 else 30 * _ISOLATION_TOLERANCE
    if worst > tolerance:
        raise TrainingError(
            f"packed documents see each other with this model's attention (logits differ by {worst:.2g}). Set "
            "trainer.packing: false, or packing_strategy: wrapped to accept it."
        )
