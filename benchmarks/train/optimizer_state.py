"""Bytes of optimizer state of adamw_8bit over adamw_torch, on a 50M Llama with a 50k vocabulary.

    python benchmarks/train/optimizer_state.py

The optimizers are made as the trainer makes them (bitsandbytes keeps the embeddings' state in float32 there); one
update with random gradients fills the state. No network.
"""

from __future__ import annotations

import tempfile
import warnings

import torch

warnings.filterwarnings("ignore")


def state_bytes(optim: str, *, tied: bool) -> tuple[int, int]:
    """Return (bytes of state, number of parameters)."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=50_000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
        tie_word_embeddings=tied,
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(folder, optim=optim, use_cpu=True, report_to="none"))
        optimizer = trainer.create_optimizer()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer.step()
    held = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return held, sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    for tied in (True, False):
        (full, n), (small, _) = state_bytes("adamw_torch", tied=tied), state_bytes("adamw_8bit", tied=tied)
        kind = "tied" if tied else "untied"
        share = small / full
        print(f"{n / 1e6:.0f}M, {kind} head: torch {full >> 20} MiB, 8bit {small >> 20} MiB, {share:.2f}")
