"""SFTTrainer on kinject's own training rows."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import PeftModel
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import LengthGroupedSampler

from kinject.corpus.tokenize import IGNORED
from kinject.errors import TrainingError
from kinject.process import processes_per_row, tensor_parallel_size
from kinject.train.callbacks import RunLog, Timing
from kinject.train.data import RoundSampler, RowDataset, TrainingData
from kinject.train.guards import Guard
from kinject.train.loss import (
    MeanLoss,
    Predictions,
    Project,
    add_hidden_states,
    in_tiles,
    next_tokens,
    token_metrics,
)
from kinject.train.mixins import CheckpointMixin, OptimizerMixin, TrainerState
from kinject.train.objectives import TrainingLoss
from kinject.train.objectives.distillation import Teacher
from kinject.train.probes import Probes
from kinject.train.updates import UpdateRule
from kinject.train.updates.regularization import Regularizer

_ISOLATION_TOLERANCE = 1e-3
_SAMPLED_TOKENS = 256
"""Tokens of which entropy and accuracy are measured between two logs, a process."""


@dataclass(frozen=True)
class TrainingParts:
    """What a run trains by, beside model, arguments and tokenizer.

    `train` and `validation` are the rows of `data` and of the validation corpus. `loss_tile` is the number of tokens whose
    logits are in memory at once, None for all. `load_weights` loads the model of a checkpoint folder as the run's own was.
    `make_teacher` makes the teacher of a distillation from the model as it is before training.
    """

    data: TrainingData
    train: RowDataset
    validation: RowDataset | None
    loss: TrainingLoss
    rules: Sequence[UpdateRule]
    guard: Guard
    probes: Probes | None
    loss_tile: int | None
    load_weights: Callable[[str], Any]
    make_teacher: Callable[[Any], Teacher] | None
    cost: Mapping[str, float]
    """Tokens and seconds of the teacher's predictions and of the model's own answers."""


class KnowledgeTrainer(CheckpointMixin, OptimizerMixin):
    """TRL's SFTTrainer, for rows that are tokenised, packed and labelled already.

    With the plain loss on the CPU it computes cross-entropy from the logits: the same number as TRL's fused head,
    without the entropy and accuracy that TRL computes of every token (half of the time with a large vocabulary); here
    they are measured of a sample. `guard` decides over each update, the rounds of the rows order the epoch, `probes` are
    scored at each evaluation. `notes` are lines for the log about the model, the data and the techniques.
    """

    router_aux_loss_coef: float
    train_dataset: Any

    def __init__(self, parts: TrainingParts, *, args: Any, run_dir: Path, callbacks: list[Any], **options: Any) -> None:
        self.training_data, self.training_loss, self.loss_tile = parts.data, parts.loss, parts.loss_tile
        self.rules, self.guard, self.probes, self.load_weights = (
            parts.rules,
            parts.guard,
            parts.probes,
            parts.load_weights,
        )
        self.losses, self.notes = MeanLoss(), list[str]()
        self.preparation_cost = parts.cost
        self.steps_per_epoch, self.learned_before = 1, 0
        self.learned_tokens: Any = 0
        """Those in the loss so far, of all processes (a number, or a tensor on a device), since this run began or resumed."""
        self.rounds: Sequence[int] = parts.data.rows.rounds if parts.data.rows.rounds[-1] > 0 else ()
        first_row = Dataset.from_list([parts.train[0]])  # SFTTrainer needs a Dataset, which would copy every row
        with _strategies_off(args, evaluates=parts.validation is not None, saves=not _is_sharded(options["model"])):
            super().__init__(
                args=args, train_dataset=first_row, eval_dataset=first_row if parts.validation is not None else None,
                callbacks=[RunLog(run_dir / "log.jsonl"), parts.guard, *callbacks], **options,
            )  # fmt: skip
        self.train_dataset, self.eval_dataset = parts.train, parts.validation
        self.label_smoother = None  # TrainingLoss smooths; validation losses stay plain
        self.remove_callback(PrinterCallback)
        self.add_callback(Timing(run_dir / "timing.jsonl", lambda: int(self.learned_tokens)))
        self.add_callback(TrainerState(self))
        if self.loss_tile is not None:
            add_hidden_states(self.plain_model)
        self.teacher = None if parts.make_teacher is None else parts.make_teacher(self.model)

    @property
    def plain_model(self) -> Any:
        """The model without its adapter's wrapper."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns = ["input_ids", "labels", "position_ids", "length", "replayed", "weights", "teacher"]

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
        nll_only = self.args.loss_type == "nll" and not self.aux_loss_enabled
        special = self._pull is not None or self.training_loss.is_changed or self.loss_tile is not None
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
            if self.model.training and (pull := self._pull) is not None:
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

    @property
    def _pull(self) -> Regularizer | None:
        """The rule whose divergence from the base's predictions is a term of the loss."""
        pulls = (rule for rule in self.rules if isinstance(rule, Regularizer) and rule.strengths.kl)
        return next(pulls, None)

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
        if self.model.training and (pull := self._pull) is not None:
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


def _is_sharded(model: Any) -> bool:
    return bool(model.is_distributed_loading_by_transformers)


@contextlib.contextmanager
def _strategies_off(args: Any, *, evaluates: bool, saves: bool) -> Iterator[None]:
    """Let Trainer be made from `args` without evaluations or checkpoints where it would refuse these.

    It wants a dataset for evaluations, which probes do not need, and refuses to save a model that transformers has sharded,
    which `CheckpointMixin` saves.
    """
    strategies = args.eval_strategy, args.save_strategy
    args.eval_strategy = args.eval_strategy if evaluates else "no"
    args.save_strategy = args.save_strategy if saves else "no"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
    args.eval_strategy, args.save_strategy = strategies


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
