"""The trainer of `method: recall`. Importing it takes seconds: see `Recall.make_trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from datasets import Dataset
from transformers.trainer_callback import PrinterCallback
from trl import GRPOTrainer

from kinject.corpus.grading import matches
from kinject.train.parts import TrainingParts
from kinject.train.trainer import RunTrainer

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import GRPOConfig


def _reward(completions: list[str], accepted: list[list[str]], **_: Any) -> list[float]:
    """Return 1 for each completion that matches one of its accepted answers, else 0."""
    pairs = zip(completions, accepted, strict=True)
    return [float(matches(text, answers)) for text, answers in pairs]


class RecallTrainer(RunTrainer, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPOTrainer on questions, with kinject's updates, guards and checkpoints."""

    def __init__(
        self,
        parts: TrainingParts,
        *,
        args: GRPOConfig,
        run_dir: Path,
        callbacks: list[TrainerCallback],
        **options: Any,
    ) -> None:
        self.take(parts)
        self.practice = parts.practice

        # TRL gets a number instead of a text: _tokenize_prompts has the tokens.
        rows = [
            {"prompt": str(i), "accepted": item.accepted} for i, item in enumerate(parts.practice)
        ]
        callbacks, data = self.watchers(run_dir, callbacks), Dataset.from_list(rows)
        super().__init__(
            args=args, train_dataset=data, reward_funcs=[_reward], callbacks=callbacks, **options
        )
        self.remove_callback(PrinterCallback)

    def _tokenize_prompts(
        self, prompts: list[str]
    ) -> tuple[list[list[int]], None, dict[str, torch.Tensor]]:
        """Return the tokens of each prompt, which is the number of a question."""
        # TRL 1.16 would begin a rendered chat with another BOS token
        return [self.practice[int(number)].prompt for number in prompts], None, {}

    def _generate_and_score_completions(
        self, inputs: list[dict[str, Any]]
    ) -> dict[str, torch.Tensor]:
        """Return TRL's batch of graded answers; count their tokens."""
        # TRL 1.16 counts prompts and answers together. Of a model with an adapter it draws answers
        # past the forward pass that has autocast, in float32, which flash attention refuses.
        with self.accelerator.autocast():
            batch: dict[str, torch.Tensor] = super()._generate_and_score_completions(inputs)
        # Each process has drawn its own answers.
        n_learned = self.accelerator.gather(batch["completion_mask"].sum()).sum()
        self.learned_tokens = self.learned_tokens + int(n_learned)
        return batch
