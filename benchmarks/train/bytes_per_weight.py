"""Bytes a weight of full fine-tuning takes: tensors and peak memory of a process, against the sum of its parts.

    python benchmarks/train/bytes_per_weight.py [--layers 24] [--width 768] [--vocabulary 32000] [--only ROW ...]

Each row is a process of its own: a Llama with random weights (about 250M by default), two updates on one short row, so that
activations hardly count. `tensors` are weights, gradients and states after the second backward pass; `peak` is the most
resident memory of the process during its second update, less that before the model was made. No network.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

ROWS = {
    "float32, adamw_torch": ("float32", "adamw_torch", 16),
    "float32, adamw_8bit": ("float32", "adamw_8bit", 10),
    "bfloat16 rounded, adamw_8bit": ("bfloat16", "adamw_8bit", 6),
}
"""Name -> dtype, optimizer, bytes a weight by arithmetic (8-bit states, without the embeddings', which are in float32)."""


def resident() -> int:
    """Return the resident bytes of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


class Peak:
    """The most resident bytes while it is open, sampled every 2 ms."""

    def __enter__(self) -> Peak:
        self.bytes, self._open = resident(), True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while self._open:
            self.bytes = max(self.bytes, resident())
            time.sleep(0.002)

    def __exit__(self, *_: Any) -> None:
        self._open = False
        self._thread.join()


def measure(shape: argparse.Namespace, name: str, queue: Any) -> None:
    """Put (number of weights, bytes of tensors, peak bytes, bytes of the float32 copies of the largest weight)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from kinject.train.updates.rounding import StochasticRounding

    dtype, optim, _ = ROWS[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.width, intermediate_size=shape.width * 8 // 3 // 64 * 64,
        num_hidden_layers=shape.layers, num_attention_heads=shape.width // 64, tie_word_embeddings=False,
    )  # fmt: skip
    import bitsandbytes  # noqa: F401 - its memory is not the model's

    before = resident()
    model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, dtype))
    arguments = TrainingArguments(
        "runs/bytes", optim=optim, use_cpu=True, report_to="none", learning_rate=1e-4
    )
    trainer = Trainer(model, arguments)
    optimizer = trainer.create_optimizer()
    if dtype == "bfloat16":
        StochasticRounding(True).change_optimizer(optimizer, trainer)
    ids = torch.randint(shape.vocabulary, (1, 16))
    largest = 0
    for number in (1, 2):
        with Peak() as peak:
            model(input_ids=ids, labels=ids).loss.backward()
            tensors = [
                *model.parameters(),
                *(p.grad for p in model.parameters() if p.grad is not None),
            ]
            states = (value for state in optimizer.state.values() for value in state.values())
            tensors += [
                value for value in states if isinstance(value, torch.Tensor) and value.numel() > 256
            ]
            optimizer.step()
            optimizer.zero_grad()
        if number == 2:
            largest = 8 * max(p.numel() for p in model.parameters()) if dtype == "bfloat16" else 0
    n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    queue.put((sum(p.numel() for p in model.parameters()), n_bytes, peak.bytes - before, largest))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS)
    )
    shape = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    print(
        "| weights | bytes a weight: theory | tensors | peak | largest weight in float32, twice |\n|---|---|---|---|---|"
    )
    for name in shape.only:
        queue = context.Queue()
        process = context.Process(target=measure, args=(shape, name, queue))
        process.start()
        n, n_bytes, peak, largest = queue.get()
        process.join()
        row = (ROWS[name][-1], f"{n_bytes / n:.2f}", f"{peak / n:.2f}", f"{largest / n:.2f}")
        print(f"| {n / 1e6:.0f}M, {name} | {' | '.join(map(str, row))} |", flush=True)
    sys.exit(0)
