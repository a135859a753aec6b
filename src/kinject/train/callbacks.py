"""What happens beside the steps: the log on disk, progress on the screen."""

from __future__ import annotations

import json
import math
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from kinject.disk import read_jsonl, write_jsonl
from kinject.progress import Progress


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Appends every logged row to log.jsonl; a resumed run first forgets the rows after its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the rows up to the step from which this run goes on."""
        if not state.is_world_process_zero:
            return
        kept = []
        if self.path.exists() and state.global_step > 0:
            kept = [row for _, row in read_jsonl(self.path) if row["step"] <= state.global_step]
        write_jsonl(self.path, kept)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write one row: step, epoch and what the trainer logged."""
        if not state.is_world_process_zero:
            return
        row = {"step": state.global_step, "epoch": state.epoch, **(logs or {})}
        finite = {key: value for key, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


def memory_in_use() -> str:
    """Return the most memory that this process held, in words: a GPU's where there is one, else the machine's."""
    if torch.cuda.is_available():
        return f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB GPU"
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30:.1f} GiB"


class Screen(TrainerCallback):  # type: ignore[misc]
    """Progress with loss, tokens/s, peak memory and ETA."""

    def __init__(self, tokens_per_step: float) -> None:
        self.tokens_per_step = tokens_per_step
        self.loss = ""
        self.progress: Progress | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show the bar."""
        if not state.is_world_process_zero:
            return
        self.progress = Progress("training", state.max_steps, "steps", done=state.global_step)
        self.progress.__enter__()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Remember the newest loss."""
        if logs and "loss" in logs:
            self.loss = f"loss {logs['loss']:.3f}"

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move the bar."""
        if self.progress is not None:
            self.progress.advance()
            rate = f"{self.progress.rate * self.tokens_per_step:,.0f} tokens/s"
            self.progress.tell("  ".join(word for word in (rate, self.loss, memory_in_use()) if word))

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self.progress is not None:
            self.progress.close()
