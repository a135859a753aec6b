"""Make the base model that ships (src/kinject/sandbox/base_model) from a finished run of recipes/sandbox/base.yaml.

kinject sandbox corpus && kinject train recipes/sandbox/base.yaml --overwrite    8 minutes on 2 cores
python benchmarks/sandbox/ship_base.py    rounds the weights to bfloat16, measures both models, writes the card; a minute

With --measure nothing is written: the shipped and the trained base are asked every question, and the table is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

import kinject
from kinject.disk import SHA256SUMS, file_hash, read_manifest, write_checked_json, write_json, write_sha256sums
from kinject.recipe import read_recipe
from kinject.sandbox.base import BASE_RUN, SHIPPED
from kinject.train.run import hash_inputs

ROWS = {
    ("new", 0): "new facts, from memory (chance .25: it has not read them)",
    ("new", 1): "new facts, with one retrieved passage",
    ("known", 0): "known facts, from memory",
    ("known", 1): "known facts, with one retrieved passage",
    ("reverse", 0): "reversed questions on new facts, from memory (chance .25)",
    ("reverse", 1): "reversed questions on new facts, with one retrieved passage",
}

CARD = """\
# The sandbox's base model

A Llama of {n_parameters:,} parameters (4 layers, width 128) with a tokenizer of its own (byte-level BPE). Its whole
language is that of short encyclopedia entries about Tarvenia, a country that does not exist. It knows the 300 people of
data/sandbox/known_documents.jsonl, answers a question from a passage, and has read nothing about the 120 people of
data/sandbox/documents.jsonl. It serves `kinject demo`, the studies and the tests, and is of no other use.

| | |
|---|---|
| trained by | `kinject sandbox corpus`, `kinject train recipes/sandbox/base.yaml`: {steps:,} steps of 32 rows of 128 tokens |
| trained with | {versions} |
| weights | rounded to bfloat16 ({size:.1f} MB); a CPU computes with them in float32 |
| laid down by | `kinject sandbox base`, which copies this folder to runs/sandbox/base; `kinject demo` does so, too |
| trained anew by | `kinject demo --from-scratch`; the weights then differ a little from machine to machine |
| licence | Apache-2.0, as the project; every name in its corpus is invented |

Accuracy on eval/sandbox, 600 questions a set, four choices, 95% intervals:

| questions | as it ships (bfloat16) | before rounding (float32) |
|---|---|---|
{rows}

`manifest.json` has the hashes of the corpus and of these files. `python benchmarks/sandbox/ship_base.py --measure`
repeats the table.
"""


def measure(trained: Path, folder: Path, *more: str) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Ask both models the questions of recipes/eval.yaml; return the results by (question set, model, K)."""
    models = {"shipped": str(SHIPPED / "model"), "trained": str(trained / "model")}
    overrides = [f"eval.models={json.dumps(models)}", f"run_dir={folder}", *more]
    kinject.evaluate(read_recipe(Path("recipes/eval.yaml"), overrides, "eval"))
    report = json.loads((folder / "report.json").read_text("utf-8"))
    return {(item["question_set"], item["arm"], item["k"]): item for item in report["results"]}


def table(results: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """Return the rows of the card's table."""
    say = "{accuracy:.3f} [{low:.3f}, {high:.3f}]".format
    return "\n".join(
        f"| {text} | {say(**results[name, 'shipped', k])} | {say(**results[name, 'trained', k])} |"
        for (name, k), text in ROWS.items()
    )


def ship(run: Path, scratch: Path) -> None:
    """Write the run `run` to `SHIPPED`, weights in bfloat16, with its card."""
    recipe = read_recipe(Path("recipes/sandbox/base.yaml"), verb="train")
    manifest = read_manifest(run / "manifest.json") or {}
    if not manifest["counts"]["finished"] or manifest["inputs"] != hash_inputs(recipe):
        raise SystemExit(f"{run}: not a finished run of recipes/sandbox/base.yaml on the corpus that is here")
    shutil.rmtree(SHIPPED, ignore_errors=True)
    shutil.copytree(run / "model", SHIPPED / "model", ignore=shutil.ignore_patterns(SHA256SUMS))
    for name in ("recipe.yaml", "log.jsonl", "timing.jsonl"):
        shutil.copy(run / name, SHIPPED / name)
    weights = SHIPPED / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    safetensors.torch.save_file(rounded, weights, metadata={"format": "pt"})
    config = json.loads((SHIPPED / "model" / "config.json").read_text("utf-8"))
    write_json(SHIPPED / "model" / "config.json", {**config, "dtype": "bfloat16"})
    write_sha256sums(SHIPPED / "model")
    manifest["counts"]["notes"] += ["the weights were rounded to bfloat16, to ship"]
    manifest["outputs"] = {name: file_hash(SHIPPED / name) for name in manifest["outputs"]}
    for path in SHIPPED.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    write_checked_json(SHIPPED / "manifest.json", manifest)
    versions = {name: manifest["versions"][name] for name in ("kinject", "torch", "transformers", "trl")}
    card = CARD.format(
        n_parameters=sum(tensor.numel() for tensor in tensors.values()), steps=manifest["counts"]["steps"],
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        size=weights.stat().st_size / 1e6, rows=table(measure(run, scratch)),
    )  # fmt: skip
    (SHIPPED / "README.md").write_text(card, encoding="utf-8")
    print(card)


def main() -> None:
    """Ship the base, or measure it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=BASE_RUN, help="the finished training (default: %(default)s)")
    parser.add_argument("--measure", action="store_true", help="write nothing, print the table")
    parser.add_argument("--limit", type=int, help="with --measure: only so many questions a set")
    arguments = parser.parse_args()
    more = [f"eval.limit={arguments.limit}"] if arguments.limit else []
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.measure:
            print(table(measure(arguments.run, Path(scratch), *more)))
        else:
            ship(arguments.run, Path(scratch))


if __name__ == "__main__":
    main()
