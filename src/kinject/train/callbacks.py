"""What happens beside the steps: the log on disk, progress on the screen."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from kinject.disk import write_jsonl
from kinject.process import peak_memory
from kinject.terminal import Progress


class RunLog(TrainerCallback):  # type: ignore[misc]
    """Appends every logged row to log.jsonl; a resumed run first forgets the rows after its checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin with the rows that the checkpoint holds, which are those up to the step from which this run goes on."""
        if state.is_world_process_zero:
            write_jsonl(self.path, [_row(row) for row in state.log_history])

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write one row: step, epoch and what the trainer logged."""
        if not state.is_world_process_zero:
            return
        row = _row({"step": state.global_step, "epoch": state.epoch, **(logs or {})})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _row(logged: Mapping[str, Any]) -> dict[str, Any]:
    """Return a logged row as JSON can hold it: values that are not finite left out, the keys in an order that is the same
    for a row as it is logged and as a checkpoint, which sorts its keys, gives it back.
    """
    first = {key: logged[key] for key in ("step", "epoch", "loss") if key in logged}
    row = first | dict(sorted(logged.items()))
    return {key: value for key, value in row.items() if not isinstance(value, float) or math.isfinite(value)}


class Timing(TrainerCallback):  # type: ignore[misc]
    """Writes timing.jsonl: at each logged step, before any evaluation, what training took so far.

    A row holds step, seconds (since training began in this process), learned_tokens (that bore loss, padding and masked
    ones left out) and peak_bytes (`peak_memory`). What an earlier process wrote is replaced.
    """

    def __init__(self, path: Path, learned_tokens: Callable[[], int]) -> None:
        self.path, self.learned_tokens = path, learned_tokens
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        if state.is_world_process_zero:
            write_jsonl(self.path, [])
        self.began = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write a row; the trainer has read the loss by now, so the device has finished the step."""
        if not state.is_world_process_zero or "loss" not in (logs or {}):
            return
        row = {
            "step": state.global_step, "seconds": round(time.perf_counter() - self.began, 6),
            "learned_tokens": self.learned_tokens(), "peak_bytes": peak_memory(args.device.type),
        }  # fmt: skip
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def memory_in_use() -> str:
    """Return the most memory that this process held, in words: a GPU's where there is one, else the machine's."""
    if torch.cuda.is_available():
        return f"{peak_memory('cuda') / 2**30:.1f} GiB GPU"
    return f"{peak_memory() / 2**30:.1f} GiB"


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
            self.progress.set_status("  ".join(word for word in (rate, self.loss, memory_in_use()) if word))

    def close(self) -> None:
        """Give the terminal back, also after an error."""
        if self.progress is not None:
            self.progress.close()
