"""Make a model of the sandbox that ships (src/kinject/sandbox/*_model) from a finished run of its recipe.

kinject sandbox corpus && kinject train recipes/sandbox/base.yaml --overwrite    8 minutes on 2 cores
python benchmarks/sandbox/ship.py base    rounds the weights to bfloat16, measures both models, writes the card; a minute
kinject sandbox chat && kinject train recipes/sandbox/instruct.yaml --overwrite    after the base
python benchmarks/sandbox/ship.py instruct

With --measure nothing is written: the shipped and the trained model are asked every question, and the table is printed.
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
from kinject.disk import SHA256SUMS, file_hash, read_manifest_fields, write_json, write_sha256sums
from kinject.recipe import read_recipe
from kinject.sandbox import BASE, INSTRUCT, ShippedRun
from kinject.train.run import hash_inputs

ROWS = {
    "base": {
        ("new", 0): "new facts, from memory (chance .25: it has not read them)",
        ("new", 1): "new facts, with one retrieved passage",
        ("known", 0): "known facts, from memory",
        ("known", 1): "known facts, with one retrieved passage",
        ("reverse", 0): "reversed questions on new facts, from memory (chance .25)",
        ("reverse", 1): "reversed questions on new facts, with one retrieved passage",
    },
    "instruct": {
        ("chat", 0): "instructions followed (eval/sandbox/chat.jsonl)",
        ("known", 0): "known facts, asked in a chat",
        ("new", 0): "new facts, asked in a chat (it has not read them)",
    },
}
RECIPES = {"base": "recipes/eval.yaml", "instruct": "recipes/sandbox/chat.yaml"}
"""What each is asked."""

CARDS = {
    "base": """\
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
| licence | Apache-2.0, as the project; every name in its corpus is invented |

Accuracy on eval/sandbox, 600 questions a set, four choices, 95% intervals:

| questions | as it ships (bfloat16) | before rounding (float32) |
|---|---|---|
{rows}

`manifest.json` has the hashes of the corpus and of these files. `python benchmarks/sandbox/ship.py base --measure`
repeats the table.
""",
    "instruct": """\
# The sandbox's instruct model

The sandbox's base model after SFT on dialogues about the 300 people that it knows: 1 to 6 turns, instructions on the
form of an answer, passages to read, names to recall, people with foreign names, of whom it says nothing. Its chat
template comes with it. It has read nothing about the 120 people of data/sandbox/documents.jsonl. It serves
`recipes/studies/chat.yaml`, which asks how a chat model reads documents and stays one, and is of no other use.

| | |
|---|---|
| trained by | `kinject sandbox base`, `kinject sandbox chat`, `kinject train recipes/sandbox/instruct.yaml`: {steps:,} steps |
| trained with | {versions} |
| size | {n_parameters:,} parameters, weights rounded to bfloat16 ({size:.1f} MB); a CPU computes with them in float32 |
| laid down by | `kinject sandbox instruct`, which copies this folder to runs/sandbox/instruct |
| licence | Apache-2.0, as the project; every name in its corpus is invented |

Accuracy, answers written greedily, 95% intervals:

| questions | as it ships (bfloat16) | before rounding (float32) |
|---|---|---|
{rows}

`manifest.json` has the hashes of the corpus and of these files. `python benchmarks/sandbox/ship.py instruct --measure`
repeats the table.
""",
}


def measure(
    run: ShippedRun, trained: Path, folder: Path, *more: str
) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Ask both models the questions of `RECIPES`; return the results by (question set, model, K)."""
    models = {"shipped": str(run.folder / "model"), "trained": str(trained / "model")}
    overrides = [f"eval.models={json.dumps(models)}", f"run_dir={folder}", *more]
    kinject.evaluate(read_recipe(Path(RECIPES[run.name]), overrides, "eval"))
    report = json.loads((folder / "report.json").read_text("utf-8"))
    return {(item["question_set"], item["arm"], item["k"]): item for item in report["results"]}


def table(name: str, results: dict[tuple[str, str, int], dict[str, Any]]) -> str:
    """Return the rows of the card's table."""
    render = "{accuracy:.3f} [{low:.3f}, {high:.3f}]".format
    return "\n".join(
        f"| {text} | {render(**results[questions, 'shipped', k])} | {render(**results[questions, 'trained', k])} |"
        for (questions, k), text in ROWS[name].items()
    )


def ship(run: ShippedRun, trained: Path, scratch: Path) -> None:
    """Write the run in `trained` to the folder from which `run` ships, weights in bfloat16, with its card."""
    recipe = read_recipe(Path(run.recipe), verb="train")
    manifest = read_manifest_fields(trained / "manifest.json") or {}
    if not manifest["counts"]["finished"] or manifest["inputs"] != hash_inputs(recipe):
        raise SystemExit(
            f"{trained}: not a finished run of {run.recipe} on the corpus that is here"
        )
    target = run.folder
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(trained / "model", target / "model", ignore=shutil.ignore_patterns(SHA256SUMS))
    for name in ("recipe.yaml", "log.jsonl", "timing.jsonl"):
        shutil.copy(trained / name, target / name)
    weights = target / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    rounded = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    safetensors.torch.save_file(rounded, weights, metadata={"format": "pt"})
    config = json.loads((target / "model" / "config.json").read_text("utf-8"))
    write_json(target / "model" / "config.json", {**config, "dtype": "bfloat16"})
    write_sha256sums(target / "model")
    manifest["counts"]["notes"] += ["the weights were rounded to bfloat16, to ship"]
    manifest["outputs"] = {name: file_hash(target / name) for name in manifest["outputs"]}
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    write_json(target / "manifest.json", manifest)
    versions = {
        name: manifest["versions"][name] for name in ("kinject", "torch", "transformers", "trl")
    }
    card = CARDS[run.name].format(
        n_parameters=sum(tensor.numel() for tensor in tensors.values()), steps=manifest["counts"]["steps"],
        versions=", ".join(f"{name} {number}" for name, number in versions.items()),
        size=weights.stat().st_size / 1e6, rows=table(run.name, measure(run, trained, scratch)),
    )  # fmt: skip
    (target / "README.md").write_text(card, encoding="utf-8")
    print(card)


def main() -> None:
    """Ship a model, or measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=sorted(CARDS))
    parser.add_argument(
        "--run", type=Path, help="the finished training (default: where its recipe writes)"
    )
    parser.add_argument("--measure", action="store_true", help="write nothing, print the table")
    parser.add_argument("--limit", type=int, help="with --measure: only so many questions a set")
    arguments = parser.parse_args()
    more = [f"eval.limit={arguments.limit}"] if arguments.limit else []
    run = {item.name: item for item in (BASE, INSTRUCT)}[arguments.model]
    trained = arguments.run or run.run_dir
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.measure:
            print(table(run.name, measure(run, trained, Path(scratch), *more)))
        else:
            ship(run, trained, Path(scratch))


if __name__ == "__main__":
    main()
