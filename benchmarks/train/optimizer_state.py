"""Bytes of optimizer state of adamw_8bit over adamw_torch, on a 50M Llama with a 50k vocabulary.

    python benchmarks/train/optimizer_state.py [--layers 8] [--vocabulary 50000]

The optimizers are made as the trainer makes them: transformers keeps the embeddings' state in float32 unless
`optim_args: embedding_bits=8` asks otherwise. One update with random gradients fills the state. No network.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings

import torch

warnings.filterwarnings("ignore")


def state_bytes(shape: argparse.Namespace, optim: str, optim_args: str | None = None, *, tied: bool) -> tuple[int, int]:
    """Return (bytes of state, number of parameters)."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from kinject.train.optimizers import set_embedding_bits

    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=512, intermediate_size=1376, num_hidden_layers=shape.layers,
        num_attention_heads=8, tie_word_embeddings=tied,
    ))  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(folder, optim=optim, use_cpu=True, report_to="none"))
        optimizer = trainer.create_optimizer()
        set_embedding_bits(optimizer, model, optim_args)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) * 1e-3
        optimizer.step()
    n_bytes = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )
    return n_bytes, sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=50_000)
    shape = parser.parse_args()
    print("| model | optimizer | MiB of state | share of adamw_torch |\n|---|---|---|---|")
    for tied in (True, False):
        full, n = state_bytes(shape, "adamw_torch", tied=tied)
        name = f"{n / 1e6:.0f}M, {'tied' if tied else 'untied'} head"
        print(f"| {name} | adamw_torch | {full >> 20} | 1 |")
        for optim_args in (None, "embedding_bits=8"):
            small, _ = state_bytes(shape, "adamw_8bit", optim_args, tied=tied)
            label = f"adamw_8bit, {optim_args}" if optim_args else "adamw_8bit"
            print(f"| {name} | {label} | {small >> 20} | {small / full:.2f} |")
