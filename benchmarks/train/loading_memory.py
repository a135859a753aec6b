"""Memory of each process while a model is loaded for training: whole (DDP), with FSDP2, and with ZeRO-3.

    python benchmarks/train/loading_memory.py [--shape 500m] [--processes 2] [--kinds ddp fsdp2 zero3] [--dir DIR]

It writes a model with random weights (bfloat16, files of 200 MB) into DIR (by default a temporary folder), starts so many
processes on the CPU for each kind, and prints a table. Peak: the most resident memory less that before loading, sampled
every 5 ms. Shard: the bytes of the parameters and buffers that the process holds afterwards. Anonymous memory leaves out
pages of the weights' files that are mapped, which the system takes back when it needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "500m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 26, "num_attention_heads": 16,
             "vocab_size": 32_000},
}  # fmt: skip
LAUNCH = {
    "ddp": {"ACCELERATE_USE_CPU": "true"},
    "fsdp2": {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true"},
    "zero3": {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "DS_ACCELERATOR": "cpu",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    },
}  # fmt: skip


class Peak(threading.Thread):
    """Samples this process's resident memory; `most` has the peaks in bytes of all of it and of its anonymous part."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.stopped = _resident(), False

    def run(self) -> None:
        """Sample until `stopped`."""
        while not self.stopped:
            self.most = tuple(map(max, self.most, _resident()))
            time.sleep(0.005)


def _resident() -> tuple[int, ...]:
    text = Path("/proc/self/status").read_text()
    return tuple(
        int(re.findall(rf"^{name}:\s*(\d+)", text, re.M)[0]) * 1024 for name in ("VmRSS", "RssAnon")
    )


def write_model(folder: Path, shape: str) -> None:
    """Write a Llama of `shape` with random weights, and a tokenizer, into `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kinject.models import train_tokenizer

    tokenizer = train_tokenizer(["Lowmere lies at a river."] * 4, 300)
    values = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, **SHAPES[shape]}
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(LlamaConfig(**values), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="200MB")
    tokenizer.save_pretrained(folder)
    (folder / "corpus.jsonl").write_text('{"text": "Lowmere lies at a river."}\n' * 4)


def measure(folder: Path) -> dict[str, float]:
    """Load the model of `folder` as a training run does, in this process of a launch."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    import kinject.train.trainer  # noqa: F401
    from kinject import models
    from kinject.recipe import read_recipe
    from kinject.train.config import make_configs
    from kinject.train.load import load_training_model, load_training_tokenizer, take_over_sharding

    path = folder / f"recipe-{os.environ['RANK']}.yaml"
    path.write_text(json.dumps({"run_dir": str(folder / "run"), "model": {"path": str(folder), "device": "cpu"},
                                "corpus": {"path": str(folder / "corpus.jsonl")}, "trainer": {"max_steps": 1}}))  # fmt: skip
    recipe = read_recipe(path, verb="train")
    if os.environ.get("DS_ACCELERATOR"):
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    config, _ = make_configs(recipe)
    sharding = take_over_sharding(config, recipe.model.quantization)
    tokenizer = load_training_tokenizer(recipe.model, ())
    torch.distributed.barrier()
    before, sampler = _resident(), Peak()
    sampler.start()
    with models.sharded_by_transformers(sharding):
        model, _ = load_training_model(recipe.model, tokenizer, recipe.seed, "cpu", sharding)
    sampler.stopped = True
    sampler.join()
    tensors = [*model.parameters(), *model.buffers()]
    n_bytes = sum(part.numel() * part.element_size() for part in map(models.own_part, tensors))
    whole = sum(models.size_of(tensor) * tensor.element_size() for tensor in tensors)
    peaks = [most - start for most, start in zip(sampler.most, before, strict=True)]
    return {
        "rank": int(os.environ["RANK"]),
        "shard": n_bytes,
        "model": whole,
        "peak": peaks[0],
        "anonymous": peaks[1],
    }


def launch(folder: Path, kind: str, n: int) -> list[dict[str, float]]:
    """Return what each of `n` processes measured that were started as accelerate starts them for `kind`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, "--measure", str(folder)]
    started = [
        subprocess.Popen(command, env={**common, **LAUNCH[kind], "RANK": str(rank), "LOCAL_RANK": str(rank)},
                         stdout=subprocess.PIPE, text=True)
        for rank in range(n)
    ]  # fmt: skip
    texts = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        sys.exit(f"{kind}: a process failed")
    return [json.loads(text.strip().splitlines()[-1]) for text in texts]


def main() -> None:
    """Measure each kind, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="500m")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kinds", nargs="+", choices=LAUNCH, default=list(LAUNCH))
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        write_model(folder, options.shape)
        print(
            "| kind | process | model, MiB | shard, MiB | peak, MiB | peak / shard | anonymous / shard |"
        )
        print("|---|---|---|---|---|---|---|")
        for kind in options.kinds:
            for row in launch(folder, kind, options.processes):
                model, n_bytes, peak = (row[key] / 2**20 for key in ("model", "shard", "peak"))
                ratios = f"{row['peak'] / row['shard']:.2f} | {row['anonymous'] / row['shard']:.2f}"
                print(
                    f"| {kind} | {row['rank']} | {model:.0f} | {n_bytes:.0f} | {peak:.0f} | {ratios} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
