"""What a run trains by, made in the setup and taken by the trainer of its method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kinject.train.batches import RowDataset
from kinject.train.data import Practice, TrainingData
from kinject.train.guards import Guard
from kinject.train.objectives import TrainingLoss
from kinject.train.objectives.distillation import Teacher
from kinject.train.probes import Probes
from kinject.train.updates import UpdateRule


@dataclass(frozen=True)
class TrainingParts:
    """What a run trains by, beside model, arguments and tokenizer.

    `train` and `validation` are the rows of `data` and of the validation corpus. `load_weights`
    loads the model of a checkpoint folder as the run's own was. `make_teacher` makes the teacher of
    a distillation from the model as it is before training.
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
    practice: Sequence[Practice] = ()
    """The questions of `method: recall`."""
