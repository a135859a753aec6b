"""Is this checkout as fast as another one, and are its results the same? Verbs of both, in turn, on the sandbox.

    git worktree add /tmp/earlier a8f5d4d1
    python benchmarks/side_by_side.py /tmp/earlier                    # ten minutes of one core
    python benchmarks/side_by_side.py /tmp/earlier --only help train  # some of them, after those that they need

An eval of this checkout asks without the question too; one from before 2026-11-28 did not: give
`--here eval.control=false`, and both answer the same prompts.

Each verb is a process of its own with one thread, and its processor seconds count, not the clock:
a busy machine moves both sides alike. Which side begins alternates, and the median ratio of the rounds is
printed. Both read the same recipes, data and weights. At the end the results are compared: texts
and ids of the corpus, trained weights, log-probabilities of the answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INPUTS = ("recipes", "data", "eval")

VERBS = {
    "help": ["--help"],
    "base": ["sandbox", "base"],
    "base-corpus": ["sandbox", "corpus"],
    "augment": ["augment", "recipes/augment.yaml", "augment.styles={paraphrase: 48}"],
    "check": ["recipes", "check", "recipes/cpt.yaml"],
    "plan": ["plan", "recipes/cpt.yaml", "--memory", "24GiB"],
    "train": ["train", "recipes/cpt.yaml", "trainer.max_steps=80"],
    "eval": ["eval", "recipes/eval.yaml"],
}
"""Name -> the arguments of `kinject`, in the order in which they need each other's files."""
RESULTS = {
    "augment": ("runs/augment", "runs/tokens"),
    "train": ("runs/cpt", "runs/tokens"),
    "eval": ("runs/eval",),
}
"""Verb -> what it wrote, removed before it runs again."""


def processor_seconds(source: Path, folder: Path, arguments: list[str]) -> float:
    """Return the processor seconds of one verb of the checkout `source`, run in `folder`."""
    environment = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "kinject.cli", *arguments]
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=output
        )
        # Of this child alone: RUSAGE_CHILDREN would be the sum over all of them.
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = (folder / "output.txt").read_text("utf-8")[-2000:]
        raise SystemExit(f"{source}: kinject {' '.join(arguments)} failed:\n{last}")
    return used.ru_utime + used.ru_stime


def arguments_of(verb: str, source: Path, here: list[str]) -> list[str]:
    """Return what follows `kinject` for a verb of a checkout; `here`: overrides of this one's eval."""
    if verb == "eval" and source == ROOT:
        return [*VERBS[verb], *here]
    return VERBS[verb]


def measure(verb: str, sides: dict[Path, Path], rounds: int, here: list[str]) -> list[list[float]]:
    """Return for each round the seconds of each of `sides` (checkout -> its folder), in their
    order."""
    measured = []
    for number in range(rounds):
        seconds = {}
        # The first to run finds a colder cache of files; so each side is first in turn.
        order = list(sides) if number % 2 == 0 else list(reversed(sides))
        for source in order:
            for written in RESULTS.get(verb, ()):
                shutil.rmtree(sides[source] / written, ignore_errors=True)
            seconds[source] = processor_seconds(
                source, sides[source], arguments_of(verb, source, here)
            )
        measured.append([seconds[source] for source in sides])
    return measured


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def log_probs_of(folder: Path) -> dict[tuple[str | int, ...], list[float]]:
    """Return the log-probabilities of each answer of an evaluation."""
    names = ("question_set", "question_id", "arm", "k", "format")
    rows = rows_of(folder / "runs/eval/answers.jsonl")
    return {tuple(row[name] for name in names): row["log_probs"] for row in rows}


def differences(first: Path, second: Path) -> list[str]:
    """Return a line on each kind of result that both folders have."""
    lines = []
    for name in (
        "runs/sandbox/base-corpus.jsonl",
        "runs/augment/corpus.jsonl",
        "runs/cpt/model/model.safetensors",
    ):
        if (first / name).exists():
            same = (first / name).read_bytes() == (second / name).read_bytes()
            lines.append(f"{name}: {'the same bytes' if same else 'DIFFERENT'}")
    if (first / "runs/eval/answers.jsonl").exists():
        ours, theirs = log_probs_of(first), log_probs_of(second)
        common = ours.keys() & theirs.keys()
        largest = 0.0
        for key in common:
            for a, b in zip(ours[key], theirs[key], strict=True):
                largest = max(largest, abs(a - b))
        lines.append(
            f"answers: {len(ours)} and {len(theirs)}, {len(common)} in common; "
            f"the largest difference of a log-probability is {largest:.2g}"
        )
    return lines


def main() -> None:
    """Print the ratios, then what differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="the other checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=VERBS, default=list(VERBS))
    parser.add_argument(
        "--here", nargs="*", default=[], metavar="KEY=VALUE", help="overrides of this side's eval"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        sides = {ROOT: Path(parent, "this"), arguments.other.resolve(): Path(parent, "other")}
        if len(sides) == 1:
            raise SystemExit("the other checkout is this one: a comparison needs two")
        for folder in sides.values():
            for name in INPUTS:
                shutil.copytree(ROOT / name, folder / name)
        print("| verb | this, s | other, s | this over other |\n|---|---|---|---|")
        for verb in VERBS:
            if verb in arguments.only:
                measured = measure(verb, sides, arguments.rounds, arguments.here)
                ours, theirs = (statistics.median(side) for side in zip(*measured, strict=True))
                ratio = statistics.median(a / b for a, b in measured)
                print(f"| {verb} | {ours:.2f} | {theirs:.2f} | {ratio:.3f} |", flush=True)
        print("\n".join(differences(*sides.values())))


if __name__ == "__main__":
    main()
