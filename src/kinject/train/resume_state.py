"""Extra checkpoint state so that a resumed run logs the same values.

Trainer loses with its process the losses since its last log and before; the guard loses its observations. Both are put
into the checkpoint's trainer_state.json.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_pt_utils import nested_gather

from kinject.train.loss import MeanLoss

_KEY = "kinject"


def save_state(trainer: Any) -> None:
    """Add the extra state to the state of the next checkpoint. All processes call it."""
    loss = nested_gather(trainer._tr_loss, trainer.args.parallel_mode).mean().item()
    metrics = {name: [float(value) for value in values] for name, values in trainer._metrics["train"].items()}
    trainer.state.stateful_callbacks[_KEY] = {
        "loss": loss, "tokens": int(trainer._total_train_tokens), "metrics": metrics, "guard": trainer.guard.state(),
        "losses": asdict(trainer.losses), "learned_tokens": trainer.learned_before + int(trainer.learned_tokens),
    }  # fmt: skip
    if trainer.reading_plan is not None:
        trainer.state.stateful_callbacks[_KEY]["reading"] = trainer.reading_plan.state.to_json()


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
        self.trainer.losses = MeanLoss(**saved["losses"])
        self.trainer._globalstep_last_logged = max(
            (row["step"] for row in state.log_history if "loss" in row), default=0
        )
        self.trainer._total_train_tokens = saved["tokens"]
        self.trainer.learned_before = saved["learned_tokens"]
        for name, values in saved["metrics"].items():
            self.trainer._metrics["train"][name] = list(values)
        self.trainer.guard.restore(saved["guard"])
        if self.trainer.reading_plan is not None:
            self.trainer.reading_plan.restore(saved["reading"])
