"""Learning against forgetting in the sandbox: what each way of holding the base model costs and keeps.

    python benchmarks/train/forgetting.py [--arms NAME ...] [--base RECIPE] [--limit N] [section.key=value ...]

Trains recipes/cpt.yaml at a learning rate of 1e-3 once for each arm, asks every model the sandbox's questions on the new
people and on the known ones (600 each), and prints the frontier: what was learned, how many points of what was known are
lost. Needs runs/sandbox/base and runs/augment (make demo makes both). No network.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import yaml

RATE = "trainer.learning_rate=1e-3"
REPLAY = "corpus.replay.fraction=0.25"
LORA = "adapter={r: 32, lora_alpha: 64, target_modules: all-linear, merge: true}"
ARMS: dict[str, list[str]] = {
    "no replay": [RATE, "corpus.replay.fraction=0"],
    "replay 10%": [RATE, "corpus.replay.fraction=0.1"],
    "replay 25%": [RATE, REPLAY],
    "replay 45%": [RATE, "corpus.replay.fraction=0.45"],
    "low rate, replay 25%": ["trainer.learning_rate=3e-4", REPLAY],
    "layer decay 0.7, replay 25%": [RATE, REPLAY, "techniques.layerwise_lr_decay=0.7"],
    "L2 1e-3, replay 25%": [RATE, REPLAY, "regularization.l2=1e-3"],
    "L2 3e-3, replay 25%": [RATE, REPLAY, "regularization.l2=3e-3"],
    "KL 1, replay 25%": [RATE, REPLAY, "regularization.kl=1"],
    "L2 1e-3, KL 1, replay 25%": [RATE, REPLAY, "regularization.l2=1e-3", "regularization.kl=1"],
    "LoRA, replay 25%": [RATE, REPLAY, LORA],
}
AVERAGED = ("replay 25%", (0.5, 0.75))
"""The arm that is averaged with the base, and the shares of it."""


def folder_of(root: Path, arm: str) -> Path:
    """Return the run folder of an arm."""
    return root / "".join(c if c.isalnum() else "-" for c in arm.lower()).strip("-")


def train_arm(recipe: Path, root: Path, arm: str, overrides: list[str]) -> tuple[str, float]:
    """Train one arm (again only if it is not there); return the model's folder and the seconds it took."""
    from kinject.recipe import read_recipe
    from kinject.train import train

    started = time.monotonic()
    result = train(
        read_recipe(recipe, [f"run_dir={folder_of(root, arm)}", *overrides], "train"),
        overwrite=False,
    )
    return result.model_dir, time.monotonic() - started


def evaluate_models(
    models: dict[str, str], root: Path, limit: int | None
) -> dict[tuple[str, str], float]:
    """Return accuracy by (question set, model); of each set `limit` questions, None for all."""
    from kinject.eval import evaluate
    from kinject.recipe import read_recipe

    questions = {
        "new": "eval/sandbox/new.jsonl",
        "known": {"path": "eval/sandbox/known.jsonl", "role": "retention"},
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "eval.yaml"
        section = {"models": models, "questions": questions} | ({"limit": limit} if limit else {})
        path.write_text(yaml.safe_dump({"run_dir": str(root / "eval"), "eval": section}))
        report = evaluate(read_recipe(path, verb="eval"))
    return {(result.question_set, result.arm): result.accuracy for result in report.results}


def main() -> None:
    """Print the frontier as a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument(
        "--base", type=Path, default=Path("recipes/cpt.yaml"), help="recipe that the arms change"
    )
    parser.add_argument("overrides", nargs="*", help="overrides for every arm")
    parser.add_argument("--limit", type=int, help="only so many questions a set")
    parser.add_argument("--root", type=Path, default=Path("runs/forgetting"))
    arguments = parser.parse_args()
    from kinject.train.merge import merge

    models, seconds = {"base": "runs/sandbox/base/model"}, {"base": 0.0}
    for arm in arguments.arms:
        models[arm], seconds[arm] = train_arm(
            arguments.base, arguments.root, arm, [*ARMS[arm], *arguments.overrides]
        )
    if AVERAGED[0] in models:
        done = merge(models["base"], models[AVERAGED[0]], AVERAGED[1], arguments.root / "averaged")
        for alpha, folder in done.items():
            models[f"{AVERAGED[0]}, {alpha:g} of it"] = str(folder)
    accuracies = evaluate_models(models, arguments.root, arguments.limit)
    print(json.dumps({"recipe": str(arguments.base), "set": arguments.overrides}))
    print("| arm | new facts | known facts | known lost, points | seconds |\n|---|---|---|---|---|")
    for name in models:
        new, known = accuracies["new", name], accuracies["known", name]
        lost = 100 * (accuracies["known", "base"] - known)
        print(f"| {name} | {new:.3f} | {known:.3f} | {lost:.1f} | {seconds.get(name, 0.0):.0f} |")


if __name__ == "__main__":
    main()
