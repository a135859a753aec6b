"""Weights and gradients as histograms in the tracker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.integrations import TensorBoardCallback, WandbCallback

TRACKERS = ("tensorboard", "wandb")
"""Those of trainer.report_to that take histograms."""


class Histograms(TrainerCallback):  # type: ignore[misc]
    """At every `every`-th update, hands each weight and the gradient that is about to be applied to the tracker.

    Gradients are whole: accumulated, unscaled and clipped. Both go by ``weights/NAME`` and ``gradients/NAME``, the step
    being that of the update, as in the log. `trackers` returns the trainer's callbacks.
    """

    def __init__(self, every: int, trackers: Callable[[], list[Any]]) -> None:
        self.every, self.trackers = every, trackers

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Hand over, if it is this update's turn."""
        step = state.global_step + 1
        if step % self.every or not state.is_world_process_zero:
            return
        held: dict[str, torch.Tensor] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                held[f"weights/{name}"] = parameter.detach()
            if parameter.grad is not None:
                held[f"gradients/{name}"] = parameter.grad
        finite = {name: values[values.isfinite()].float().cpu() for name, values in held.items()}
        for tracker in self.trackers():
            if isinstance(tracker, TensorBoardCallback) and tracker.tb_writer is not None:
                for name, values in finite.items():
                    if values.numel():
                        tracker.tb_writer.add_histogram(name, values, step)
            elif isinstance(tracker, WandbCallback) and tracker._wandb is not None:
                drawn = {n: tracker._wandb.Histogram(v.numpy()) for n, v in finite.items() if v.numel()}
                tracker._wandb.log({**drawn, "train/global_step": step})
