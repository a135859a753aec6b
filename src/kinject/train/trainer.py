"""SFTTrainer on kinject's own training rows."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback

from kinject.errors import TrainingError
from kinject.train.callbacks import RunLog, Timing
from kinject.train.checkpoints import CheckpointMixin
from kinject.train.data import RowDataset, TrainingData
from kinject.train.guards import Guard
from kinject.train.loss import MeanLoss
from kinject.train.mixins import ObjectiveMixin, OptimizerMixin, PackingMixin, TrainerState
from kinject.train.objectives import TrainingLoss
from kinject.train.objectives.distillation import Teacher
from kinject.train.probes import Probes
from kinject.train.updates import UpdateRule

_ISOLATION_TOLERANCE = 1e-3


@dataclass(frozen=True)
class TrainingParts:
    """What a run trains by, beside model, arguments and tokenizer.

    `train` and `validation` are the rows of `data` and of the validation corpus. `load_weights` loads the model of a
    checkpoint folder as the run's own was.
    `make_teacher` makes the teacher of a distillation from the model as it is before training.
    """

    data: TrainingData
    train: RowDataset
    validation: RowDataset | None
    loss: TrainingLoss
    rules: Sequence[UpdateRule]
    guard: Guard
    probes: Probes | None
    load_weights: Callable[[str], Any]
    make_teacher: Callable[[Any], Teacher] | None
    cost: Mapping[str, float]
    """Tokens and seconds of the teacher's predictions and of the model's own answers."""


class KnowledgeTrainer(PackingMixin, ObjectiveMixin, OptimizerMixin, CheckpointMixin):
    """TRL's SFTTrainer on kinject's own rows, in four parts: rows, objective, updates and checkpoints.

    `guard` decides over each update, `probes` are scored at each evaluation. `notes` are lines for the log about the model,
    the data and the techniques.
    """

    def __init__(self, parts: TrainingParts, *, args: Any, run_dir: Path, callbacks: list[Any], **options: Any) -> None:
        self.training_data, self.training_loss = parts.data, parts.loss
        self.rules, self.guard, self.probes = parts.rules, parts.guard, parts.probes
        self.load_weights = parts.load_weights
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
        self.teacher = None if parts.make_teacher is None else parts.make_teacher(self.model)

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
