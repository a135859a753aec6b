"""Extra checkpoint state so that a resumed run logs the same values.

Trainer loses with its process the losses since its last log and before; the guard loses its observations. Both are put
into the checkpoint's trainer_state.json.
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


def save_state(trainer: Any) -> None:
    """Add the extra state to the state of the next checkpoint. All processes call it."""
    loss = nested_gather(trainer._tr_loss, trainer.args.parallel_mode).mean().item()
    metrics = {name: [float(value) for value in values] for name, values in trainer._metrics["train"].items()}
    trainer.state.stateful_callbacks[_KEY] = {
        "loss": loss, "tokens": int(trainer._total_train_tokens), "metrics": metrics, "guard": trainer.guard.state(),
    }  # fmt: skip


class RestoreState(TrainerCallback):  # type: ignore[misc]
    """Restores what `save_state` added to the checkpoint from which training resumes."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the state, if training resumes."""
        saved = state.stateful_callbacks.get(_KEY)
        if saved is None:
            return
        self.trainer._tr_loss += saved["loss"]
        self.trainer._globalstep_last_logged = _logged(state)[1]
        self.trainer._total_train_tokens = saved["tokens"]
        for name, values in saved["metrics"].items():
            self.trainer._metrics["train"][name] = list(values)
        self.trainer.guard.restore(saved["guard"])


def _logged(state: Any) -> tuple[float, int]:
    """Return the sum of the logged losses of all updates, and the last logged step."""
    total, last = 0.0, 0
    for row in state.log_history:
        if "loss" in row:
            total += row["loss"] * (row["step"] - last)
            last = row["step"]
    return total, last
