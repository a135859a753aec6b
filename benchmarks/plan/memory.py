"""The peak memory on a CPU that `kinject plan` estimates, compared with that of real training steps.

    python benchmarks/plan/memory.py [--only NAME ... | --model MODEL] [--steps N]

Trains models with random weights for a few steps, each in a process of its own, and reads the peak of its resident set. The
same run of a model of 20,000 parameters is subtracted: Python and the libraries. Prints estimate, measurement and ratio, and
the range of the ratios with Python included. --model takes a folder or a GGUF file instead, such as runs/real/smollm2, and
trains it in three ways. No network; about 20 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from kinject.plan.estimate import Memory

ROOT = Path(__file__).parents[2]
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}


def llama(width: int, layers: int, vocabulary: int, heads: int = 8) -> dict[str, Any]:
    """Return the config of a Llama."""
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": 8 * width // 3 // 16 * 16, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": heads, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "vocab_size": vocabulary,
    }  # fmt: skip


NONE = llama(16, 1, 1000, 2)
M1, M15, M50 = llama(128, 4, 1200, 4), llama(320, 6, 20_000), llama(512, 8, 50_000)
M4, M33 = llama(192, 5, 8_000, 6), llama(448, 8, 32_000)
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 320,
    "n_layer": 6,
    "n_head": 5,
    "n_positions": 1024,
    "vocab_size": 20_000,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "1M": (M1, {"per_device_train_batch_size": 64}, {}),
    "1M, eager attention": (M1, {"per_device_train_batch_size": 64}, {"attention": "eager"}),
    "15M": (M15, {}, {}),
    "15M, accumulated": (M15, {"gradient_accumulation_steps": 3}, {}),
    "15M, checkpointing": (M15, {"gradient_checkpointing": True}, {}),
    "15M, bf16": (M15, {"bf16": True}, {}),
    "15M, GPT-2": (GPT2, {}, {}),
    "50M": (M50, {"per_device_train_batch_size": 4}, {}),
    "50M, adafactor": (M50, {"per_device_train_batch_size": 4, "optim": "adafactor"}, {}),
    "50M, adamw_8bit": (M50, {"per_device_train_batch_size": 4, "optim": "adamw_8bit"}, {}),
    "50M, adamw not fused": (M50, {"per_device_train_batch_size": 1, "optim": "adamw_torch"}, {}),
    "50M, sgd": (M50, {"per_device_train_batch_size": 4, "optim": "sgd"}, {}),
    "25M": (llama(384, 7, 30_000), {"per_device_train_batch_size": 8}, {}),
    "15M, 40 rows": (M15, {"per_device_train_batch_size": 40, "gradient_checkpointing": True}, {}),
    "50M, LoRA": (M50, {"per_device_train_batch_size": 4}, {"adapter": LORA}),
    "4M": (M4, {"per_device_train_batch_size": 24}, {}),
    "4M, eager attention": (M4, {"per_device_train_batch_size": 24}, {"attention": "eager"}),
    "8M, checkpointing": (
        llama(256, 6, 12_000),
        {"per_device_train_batch_size": 32, "gradient_checkpointing": True},
        {},
    ),
    "33M": (M33, {"per_device_train_batch_size": 6}, {}),
    "33M, checkpointing": (
        M33,
        {"per_device_train_batch_size": 12, "gradient_checkpointing": True},
        {},
    ),
    "33M, bf16": (M33, {"per_device_train_batch_size": 6, "bf16": True}, {}),
    "20M, GPT-2": ({**GPT2, "n_embd": 384, "n_head": 6}, {"per_device_train_batch_size": 10}, {}),
    "80M": (llama(640, 10, 50_000, 10), {"per_device_train_batch_size": 2}, {}),
}
"""Name -> (model, trainer fields, `attention` or `adapter`)."""


def cases_of(model: str) -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Return cases like those of `CASES` for a model that is there."""
    shape = {"per_device_train_batch_size": 1, "max_length": 512}
    return {
        "rows of 512": ({"path": model}, shape, {}),
        "rows of 1,024": ({"path": model}, {**shape, "max_length": 1024}, {}),
        "rows of 512, bf16": ({"path": model}, {**shape, "bf16": True}, {}),
    }


def write_recipe(
    folder: Path, case: tuple[dict[str, Any], dict[str, Any], dict[str, Any]], steps: int
) -> Path:
    """Write the recipe of a case and its corpus; return the recipe."""
    model, trainer, more = case
    rows = [
        json.loads(line)
        for line in (ROOT / "data/sandbox/documents.jsonl").read_text("utf-8").splitlines()
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"text": f"{row['text']} {n}"}) + "\n" for n in range(16) for row in rows
        ),
        "utf-8",
    )
    values = {
        "run_dir": str(folder / "run"),
        "model": {
            **(model if "path" in model else {"new": model, "tokenizer": {"vocab_size": 1000}}),
            "device": "cpu", "attention": more.get("attention", "sdpa"),
        },
        "corpus": {"path": str(corpus), "cache_dir": str(folder / "tokens")},
        "trainer": {
            "packing": True, "packing_strategy": "wrapped", "max_length": 128, "max_steps": steps, "logging_steps": 1,
            "per_device_train_batch_size": 16, "gradient_checkpointing": False, "save_strategy": "no", "learning_rate": 1e-4,
            "bf16": False, **trainer,
        },
    }  # fmt: skip
    if "adapter" in more:
        values["adapter"] = more["adapter"]
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), "utf-8")
    return path


def measured(recipe: Path) -> int:
    """Train in a process of its own; return its peak resident bytes."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(
        [sys.executable, "-m", "kinject.cli", "train", str(recipe)],
        check=True,
        capture_output=True,
        env=environment,
    )
    timing = recipe.parent / "run" / "timing.jsonl"
    return max(json.loads(line)["peak_bytes"] for line in timing.read_text("utf-8").splitlines())


def estimated(recipe: Path) -> Memory:
    """Return the memory of a step as `kinject plan` estimates it."""
    from kinject.plan.estimate import estimate, read_shapes
    from kinject.plan.run import step_of
    from kinject.plan.ways import find_devices
    from kinject.recipe import read_recipe

    step = step_of(read_recipe(recipe, verb="train"), find_devices("cpu", None, None))
    return estimate(step, read_shapes(step))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", help="a folder or a GGUF file")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps: found {arguments.steps}, allowed: 1 or more")
    sys.path.insert(0, str(ROOT / "src"))
    from kinject.plan.ways import CPU_WORKING

    with tempfile.TemporaryDirectory() as name:
        python = measured(
            write_recipe(
                Path(name), (NONE, {"per_device_train_batch_size": 1}, {}), arguments.steps
            )
        )
    print(f"Python and libraries: {python / 2**20:.0f} MiB\n")
    print(
        "| run | tensors | heap holes | estimate | measured | estimate / measured | without Python |"
    )
    print("|---|---|---|---|---|---|---|")
    ratios = []
    cases = (
        cases_of(arguments.model)
        if arguments.model
        else {name: CASES[name] for name in arguments.only}
    )
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            recipe = write_recipe(Path(name), cases[case], arguments.steps)
            memory = estimated(recipe)
            peak = measured(recipe)
        estimate = memory.peak + CPU_WORKING
        ratios.append((estimate + python) / peak)
        sizes = (memory.peak - memory.fragmentation, memory.fragmentation, estimate + python, peak)
        columns = [case, *(f"{n_bytes / 2**20:.0f}" for n_bytes in sizes)]
        columns += [f"{ratios[-1]:.2f}", f"{estimate / (peak - python):.2f}"]
        print("| " + " | ".join(columns) + " |", flush=True)
    print(f"\nestimate / measured: {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
