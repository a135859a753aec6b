"""Tokens a second of kinject train beside a bare PyTorch loop and SFTTrainer's own packing: same model, same text.

    python benchmarks/train/throughput.py [--size 1m|50m | --model MODEL] [--steps N] [--rounds N] [--bf16] [--cpu-time]

The three take turns, `--rounds` times, in one process; the median of each is printed, with kinject's ratio to it. Only
steps are timed, not loading, tokenising or packing. --cpu-time counts this process's CPU seconds instead of the wall's,
for machines that others use too. No network; the text is made here. --model takes a folder or a GGUF file, such as
runs/real/smollm2 (kinject demo --real), which reads the company's documents in nine wordings.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml

warnings.filterwarnings("ignore")
SIZES: dict[str, dict[str, Any]] = {
    "1m": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 4, "vocab_size": 1200, "block": 128, "batch": 16},
    "50m": {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 8, "vocab_size": 50_000, "block": 256, "batch": 4},
}  # fmt: skip
CLOCK = {"now": time.perf_counter}
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]


def make_inputs(folder: Path, shape: dict[str, Any], n_texts: int) -> tuple[Path, Path]:
    """Write a corpus of short texts and a model with random weights; return both."""
    from kinject.models import new_model, train_tokenizer

    rng = random.Random(0)
    texts = [
        " ".join(rng.choices(WORDS, k=rng.randint(8, 60))).capitalize() + "."
        for _ in range(n_texts)
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_tokenizer(texts, 1200)
    fields = {
        key: value for key, value in shape.items() if key not in ("vocab_size", "block", "batch")
    }
    model = new_model(
        {
            "model_type": "llama",
            **fields,
            "tie_word_embeddings": True,
            "max_position_embeddings": 1024,
        },
        tokenizer,
        0,
    )
    model.resize_token_embeddings(shape["vocab_size"])
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return corpus, folder / "model"


def read_inputs(folder: Path, model: Path) -> tuple[Path, Path]:
    """Write the shipped documents and paraphrases as a corpus; return it and the folder of `model`."""
    from kinject.gguf import converted_folder, gguf_file

    data = Path(__file__).parents[2] / "data" / "company"
    lines = [
        line
        for name in ("documents", "paraphrases")
        for line in (data / f"{name}.jsonl").read_text().splitlines()
    ]
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": json.loads(line)["text"]}) + "\n" for line in lines)
    )
    file = gguf_file(model)
    return corpus, model if file is None else converted_folder(file)


def steps_of(trainer: Any) -> list[tuple[float, int]]:
    """Train and return (seconds, tokens) after each step, tokens without padding."""
    from transformers import TrainerCallback

    marks: list[tuple[float, int]] = []
    seen = {"tokens": 0}

    class _Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            marks.append((CLOCK["now"](), seen["tokens"]))

    training_step = trainer.training_step

    def _counted(model: Any, inputs: Any, *rest: Any) -> Any:
        seen["tokens"] += int((inputs["labels"] != -100).sum())
        return training_step(model, inputs, *rest)

    trainer.training_step = _counted
    trainer.add_callback(_Clock())
    trainer.train()
    return marks


def rate(marks: list[tuple[float, int]]) -> float:
    """Return tokens a second from the second step on: the first warms up."""
    (start, before), (end, after) = marks[1], marks[-1]
    return (after - before) / (end - start)


def run_kinject(
    folder: Path, corpus: Path, model: Path, shape: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Return the rate of kinject train, and its batches (for the bare loop)."""
    from kinject.recipe import read_recipe
    from kinject.train.setup import make_trainer

    path = folder / "recipe.yaml"
    trainer = {"packing": True, "packing_strategy": "bfd_split", "max_length": shape["block"], "save_strategy": "no",
               "per_device_train_batch_size": shape["batch"], "gradient_checkpointing": False,
               "logging_steps": 5, **options}  # fmt: skip
    recipe = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model)},
        "corpus": {"path": str(corpus), "cache_dir": str(folder / "tokens")},
        "trainer": trainer,
    }
    path.write_text(yaml.safe_dump(recipe))
    (folder / "run").mkdir(exist_ok=True)
    knowledge_trainer = make_trainer(read_recipe(path, verb="train"))
    return rate(steps_of(knowledge_trainer)), list(knowledge_trainer.get_train_dataloader())


def run_bare(model_dir: Path, batches: list[Any], steps: int, bf16: bool) -> float:
    """Return the rate of a plain loop on the batches that kinject made."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    marks, seen = [], 0
    for step in range(steps):
        batch = batches[step % len(batches)]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(
                input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
            ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += int((batch["labels"] != -100).sum())
        marks.append((CLOCK["now"](), seen))
    return rate(marks)


def run_sft(
    folder: Path, corpus: Path, model_dir: Path, shape: dict[str, Any], options: dict[str, Any]
) -> float:
    """Return the rate of SFTTrainer with its own packing."""
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder / "sft"), packing=True, packing_strategy="bfd_split", max_length=shape["block"],
        per_device_train_batch_size=shape["batch"], gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        save_strategy="no", use_cpu=True, logging_steps=5, **options,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), args=config,
        processing_class=AutoTokenizer.from_pretrained(model_dir),
        train_dataset=load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(folder / "cache")),
    )  # fmt: skip
    return rate(steps_of(trainer))


def main() -> int:
    """Print the rates side by side."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--model", type=Path, help="a folder or a GGUF file, instead of --size")
    parser.add_argument("--block", type=int, default=512, help="tokens in a row, of --model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu-time", action="store_true")
    arguments = parser.parse_args()
    for option, least in (("steps", 3), ("rounds", 1)):  # the first steps are not timed
        if getattr(arguments, option) < least:
            parser.error(
                f"--{option}: found {getattr(arguments, option)}, allowed: {least} or more"
            )
    CLOCK["now"] = time.process_time if arguments.cpu_time else time.perf_counter
    shape = {"block": arguments.block, "batch": 1} if arguments.model else SIZES[arguments.size]
    options = {"max_steps": arguments.steps, "bf16": arguments.bf16}
    rates: dict[str, list[float]] = {
        "bare loop": [],
        "kinject train": [],
        "SFTTrainer, bfd_split": [],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.model:
            corpus, model = read_inputs(folder, arguments.model)
        else:
            corpus, model = make_inputs(folder, shape, 4000 if arguments.size == "1m" else 1500)
        for _ in range(arguments.rounds):
            ours, batches = run_kinject(folder, corpus, model, shape, options)
            gc.collect()  # of three models one is in memory at a time
            rates["kinject train"].append(ours)
            rates["bare loop"].append(run_bare(model, batches, arguments.steps, arguments.bf16))
            gc.collect()
            rates["SFTTrainer, bfd_split"].append(run_sft(folder, corpus, model, shape, options))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"{arguments.model or arguments.size}, {'bf16' if arguments.bf16 else 'fp32'}, {torch.get_num_threads()} threads, "
        f"{arguments.steps} steps x {arguments.rounds}, {'CPU' if arguments.cpu_time else 'wall'} time"
    )
    for name, median in medians.items():
        print(
            f"{name:24} {median:9,.0f} tokens/s   kinject / it = {medians['kinject train'] / median:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
