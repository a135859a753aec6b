"""What a checkpoint carries beside Trainer's own state, so that a run that goes on says what an undisturbed one says.

Trainer forgets with its process what it added up since it last logged, and the losses before that; the guard forgets what
it saw. Both are put into the checkpoint's trainer_state.json.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback
from transformers.trainer_pt_utils import nested_gather

_KEY = "kinject"


def mean_loss(trainer: Any) -> float:
    """Return the mean loss of all updates so far, those of earlier processes included."""
    n_updates = trainer.state.global_step
    return float((_logged(trainer.state)[0] + trainer._tr_loss.item()) / n_updates) if n_updates else 0.0


def put_into_state(trainer: Any) -> None:
    """Put what is carried into the state that a checkpoint is about to hold. All processes call it."""
    loss = nested_gather(trainer._tr_loss, trainer.args.parallel_mode).mean().item()
    metrics = {name: [float(value) for value in values] for name, values in trainer._metrics["train"].items()}
    trainer.state.stateful_callbacks[_KEY] = {
        "loss": loss, "tokens": int(trainer._total_train_tokens), "metrics": metrics, "guard": trainer.guard.seen(),
    }  # fmt: skip


class TakeUp(TrainerCallback):  # type: ignore[misc]
    """Takes up what `put_into_state` put into the checkpoint from which training goes on."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on adding, and watching."""
        carried = state.stateful_callbacks.get(_KEY)
        if carried is None:  # a run's beginning, or a checkpoint of an older kinject
            return
        self.trainer._tr_loss += carried["loss"]
        self.trainer._globalstep_last_logged = _logged(state)[1]
        self.trainer._total_train_tokens = carried["tokens"]
        for name, values in carried["metrics"].items():
            self.trainer._metrics["train"][name] = list(values)
        self.trainer.guard.go_on(carried["guard"])


def _logged(state: Any) -> tuple[float, int]:
    """Return the sum of the logged losses of all updates, and the last step that was logged."""
    total, last = 0.0, 0
    for row in state.log_history:
        if "loss" in row:
            total += row["loss"] * (row["step"] - last)
            last = row["step"]
    return total, last
