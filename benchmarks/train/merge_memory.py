"""Peak memory of `kinject export MODEL --add INSTRUCT --minus BASE` over the size of a shard.

    python benchmarks/train/merge_memory.py [--layers 1] [--width 4096] [--inner 14336] [--vocabulary 16000] [--shard-mb 300]

Three models of random bfloat16 weights with the widths of Llama 3.1 8B, layers and vocabulary cut to what a small disk holds;
the instruct model has 8 rows more. `peak` is the most resident memory during the merge, less that before it. No network.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bytes_per_weight import Peak, resident


def write_model(folder: Path, config: Any, seed: int, shard_bytes: int) -> None:
    """Write a model folder with random weights in shards of at most `shard_bytes`, one tensor at a time in float32."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from kinject.disk import write_json
    from kinject.sandbox import BASE

    folder.mkdir()
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BASE.folder / "model" / name, folder)
    with torch.device("meta"):
        shapes = {
            name: value.shape
            for name, value in AutoModelForCausalLM.from_config(config).state_dict().items()
        }
    torch.manual_seed(seed)
    shard: dict[str, torch.Tensor] = {}
    files: dict[str, str] = {}

    def close() -> None:
        name = f"model-{len(set(files.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        n_bytes = sum(2 * tensor.numel() for tensor in shard.values())
        if shard and n_bytes + 2 * shape.numel() > shard_bytes:
            close()
        shard[name] = (0.02 * torch.randn(shape)).to(torch.bfloat16)
    close()
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def main() -> None:
    """Make the three models, merge them and print the row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--inner", type=int, default=14_336)
    parser.add_argument("--vocabulary", type=int, default=16_000)
    parser.add_argument("--shard-mb", type=float, default=300)
    arguments = parser.parse_args()
    import transformers

    from kinject.train.merge import add_difference

    config = transformers.LlamaConfig(
        vocab_size=arguments.vocabulary, hidden_size=arguments.width, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_attention_heads=32, num_key_value_heads=8, dtype="bfloat16",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for seed, name in enumerate(("model", "base", "instruct")):
            config.vocab_size = arguments.vocabulary + 8 * (name == "instruct")
            write_model(Path(scratch) / name, config, seed, int(arguments.shard_mb * 1e6))
        model, instruct, base = (
            str(Path(scratch) / name) for name in ("model", "instruct", "base")
        )
        before, start = resident(), time.perf_counter()
        with Peak() as peak:
            out = add_difference(model, instruct, base, [1.0], Path(scratch) / "out")[1.0]
        seconds = time.perf_counter() - start
        shards = [path.stat().st_size for path in out.glob("*.safetensors")]
    print(
        "| model | shards | largest shard | peak | over a shard | seconds |\n|---|---|---|---|---|---|"
    )
    sizes = f"{sum(shards) / 1e6:.0f} MB | {len(shards)} | {max(shards) / 1e6:.0f} MB | {(peak.bytes - before) / 1e6:.0f} MB"
    print(f"| {sizes} | {(peak.bytes - before) / max(shards):.2f} | {seconds:.0f} |")
    sys.exit(0)


if __name__ == "__main__":
    main()
