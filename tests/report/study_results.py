"""Results of studies, simulated question by question; what is said of them is computed here, the plain way."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from study_samples import write_log

from kinject.results import (
    ArmInfo,
    ArmResult,
    Choice,
    Claim,
    Contrast,
    Cost,
    Failure,
    Report,
    Sweep,
    SweepPoint,
)
from kinject.stats.advice import advise

Right = list[list[bool]]  # [seeds][questions]
SEEDS = (0, 1, 2)
SETS = {"new": ("learning", 300), "known": ("retention", 240), "reverse": ("learning", 160)}
ARMS = {
    "base": ("the model as it was", (0.26, 0.985, 0.25)),
    "ft-reg": ("the documents as they are, five epochs", (0.62, 0.93, 0.28)),
    "ft-par": ("16 paraphrases of each document", (0.87, 0.955, 0.31)),
    "repeated": ("the documents again and again, as many steps as ft-par", (0.71, 0.90, 0.29)),
    "random-text": ("the documents' words, shuffled", (0.25, 0.93, 0.25)),
}
WITH_CONTEXT = {
    "base": (0.94, 0.98, 0.86),
    "ft-reg": (0.92, 0.93, 0.80),
    "ft-par": (0.975, 0.95, 0.88),
}
BY_K = {"base": (0.94, 0.71, 0.62, 0.55, 0.52), "ft-reg": (0.92, 0.80, 0.74, 0.7, 0.68),
        "ft-par": (0.975, 0.94, 0.92, 0.9, 0.88)}  # fmt: skip
CURVES: dict[str, tuple[str, bool, dict[Any, tuple[float, float, float]]]] = {
    "paraphrases": ("augment.styles", False, {
        0: (0.62, 0.93, 0.27), 1: (0.68, 0.93, 0.26), 2: (0.74, 0.94, 0.29), 4: (0.8, 0.95, 0.28),
        8: (0.84, 0.95, 0.3), 16: (0.87, 0.955, 0.31)}),
    "learning rate": ("trainer.learning_rate", True, {
        1e-5: (0.27, 0.985, 0.25), 1e-4: (0.45, 0.98, 0.26), 5e-4: (0.78, 0.97, 0.28), 1e-3: (0.87, 0.955, 0.31),
        3e-3: (0.9, 0.72, 0.3), 1e-2: (0.55, 0.31, 0.25)}),
    "replay": ("corpus.replay", True, {
        0: (0.93, 0.52, 0.3), 0.1: (0.91, 0.8, 0.3), 0.25: (0.89, 0.92, 0.31), 0.5: (0.84, 0.965, 0.3)}),
    "alpha": ("alpha", True, {
        0.25: (0.31, 0.985, 0.25), 0.5: (0.55, 0.98, 0.26), 0.75: (0.79, 0.97, 0.29), 1: (0.87, 0.955, 0.31)}),
    "LoRA": ("adapter.r", True, {
        4: (0.41, 0.975, 0.26), 16: (0.58, 0.97, 0.27), 64: (0.7, 0.96, 0.28), "full": (0.87, 0.955, 0.31)}),
    "style": ("augment.styles", False, {
        "paraphrase": (0.87, 0.955, 0.31), "permute": (0.74, 0.95, 0.28), "question-answer": (0.9, 0.94, 0.35),
        "reversed": (0.83, 0.95, 0.82), "summary": (0.7, 0.95, 0.27)}),
}  # fmt: skip


def draw(fraction: float, n: int, seed: int, n_seeds: int) -> Right:
    """Return answers that are right with about that probability; a question is about as hard for every seed."""
    hard = random.Random(n)
    hardness = [hard.random() for _ in range(n)]
    rows = []
    for seed_index in range(n_seeds):
        noise = random.Random(1000 * seed + seed_index)
        rows.append(
            [
                (threshold if noise.random() < 0.8 else noise.random()) < fraction
                for threshold in hardness
            ]
        )
    return rows


def mean(right: Right) -> float:
    """Return the accuracy over all seeds and questions."""
    return sum(map(sum, right)) / sum(map(len, right))


def by_question(right: Right) -> list[float]:
    """Return the share of seeds that had each question right."""
    return [sum(column) / len(right) for column in zip(*right, strict=True)]


def make_contrast(right: Right, other: Right, name: str) -> Contrast:
    """Return the difference, its interval and p from the normal approximation over questions."""
    ours, theirs = by_question(right), by_question(other)
    differences = [our - their for our, their in zip(ours, theirs, strict=True)]
    n, delta = len(differences), sum(differences) / len(differences)
    error = math.sqrt(max(sum((d - delta) ** 2 for d in differences), 0.25) / n / n) + 0.004
    p = max(math.erfc(abs(delta) / error / math.sqrt(2)), 5e-5)
    flips = [(our > 0.5) - (their > 0.5) for our, their in zip(ours, theirs, strict=True)]
    return Contrast(
        name, delta, delta - 1.96 * error, delta + 1.96 * error, p, min(1.0, 20 * p), flips.count(1), flips.count(-1),
        mean(other) > 0.3, "t over documents and seeds", n, n // 2, n // 2, mean(right), 20,
    )  # fmt: skip


def make_score(
    question_set: str, arm: str, right: Right, base: Right | None, **changes: Any
) -> ArmResult:
    """Return the score of one arm from what it had right; `base` is None for the base itself."""
    accuracy, n = mean(right), len(right[0])
    error = math.sqrt(accuracy * (1 - accuracy) / n) + 0.008
    fields: dict[str, Any] = {
        "model": "sandbox", "arm": arm, "question_set": question_set, "role": SETS.get(question_set, ("learning",))[0],
        "format": "texts", "shots": 0, "k": 0, "n": n, "chance": 0.25,
        "by_seed": tuple(sum(row) / n for row in right), "accuracy": accuracy, "low": max(0.0, accuracy - 1.96 * error),
        "high": min(1.0, accuracy + 1.96 * error), "to_base": base and make_contrast(right, base, "base"),
        "interval": "Wilson over documents and seeds",
    }  # fmt: skip
    return ArmResult(**(fields | changes))


def _sandbox_scores(n_seeds: int) -> tuple[list[ArmResult], dict[tuple[str, str], Right]]:
    scores: list[ArmResult] = []
    right: dict[tuple[str, str], Right] = {}
    for which, (name, (_, n)) in enumerate(SETS.items()):
        for index, (arm, (_, fractions)) in enumerate(ARMS.items()):
            right[name, arm] = draw(
                fractions[which], n, 100 * which + index, 1 if arm == "base" else n_seeds
            )
        for index, (arm, fractions) in enumerate(WITH_CONTEXT.items()):
            right[name, f"{arm}+rag"] = draw(
                fractions[which], n, 100 * which + 50 + index, 1 if arm == "base" else n_seeds
            )
        base, retrieval = right[name, "base"], right[name, "base+rag"]
        for arm in ARMS:
            arm_right = right[name, arm]
            trained = arm != "base"
            beside = make_contrast(arm_right, retrieval, "base+rag") if trained else None
            scores.append(
                make_score(name, arm, arm_right, base if trained else None, to_rag=beside)
            )
        for arm in WITH_CONTEXT:
            arm_right, plain = right[name, f"{arm}+rag"], right[name, arm]
            beside, added = (
                make_contrast(arm_right, retrieval, "base+rag"),
                make_contrast(arm_right, plain, arm),
            )
            extra = {"to_rag": beside, "to_plain": added} if arm != "base" else {}
            scores.append(make_score(name, arm, arm_right, base, k=1, chosen_k=True, **extra))
    for index, (arm, fractions) in enumerate(BY_K.items()):
        for k, fraction in enumerate(fractions[1:], 2):
            arm_right = draw(
                fraction, SETS["new"][1], 700 + 10 * index + k, 1 if arm == "base" else n_seeds
            )
            scores.append(make_score("new", arm, arm_right, right["new", "base"], k=k))
    guess = draw(0.27, SETS["new"][1], 900, 1)
    scores.append(
        make_score("new", "base", guess, None, role="baseline", format="texts-no-question")
    )
    return scores, right


def _curves(
    n_seeds: int, right: Mapping[tuple[str, str], Right]
) -> tuple[list[Sweep], list[ArmInfo], list[ArmResult]]:
    curves, arms, scores = [], [], []
    for number, (name, (key, frontier, values)) in enumerate(CURVES.items()):
        points = []
        for index, (value, fractions) in enumerate(values.items()):
            same = fractions == ARMS["ft-par"][1]
            arm = "ft-par" if same else f"{name}={value}"
            x = float(value) if isinstance(value, int | float) else None
            points.append(SweepPoint(value, f"{value:g}" if x is not None else str(value), arm))
            if same:
                continue
            arms.append(ArmInfo(arm, "sandbox", f"{name} {value}", True, name, {key: value}))
            for which, (question_set, (_, n)) in enumerate(SETS.items()):
                arm_right = draw(
                    fractions[which], n, 1000 + 100 * number + 10 * index + which, n_seeds
                )
                scores.append(make_score(question_set, arm, arm_right, right[question_set, "base"]))
        curves.append(Sweep(name, key, "sandbox", frontier, tuple(points)))
    return curves, arms, scores


CLAIMS = (
    Claim("paraphrases", "paraphrases beat the same number of steps on the originals", "shown",
          "ft-par 87.1%, repeated 71.2% on new: +15.9 points (+11.0 to +20.4)", 0.159, 0.11, 0.204, 0.00005, 0.0003,
          "arXiv 2312.05934"),
    Claim("more is better", "accuracy rises with the number of paraphrases", "shown",
          "0: 62.0%, 16: 87.1% on new; last over first +25.1 points", 0.251, 0.2, 0.3, 0.00005, 0.0003, "arXiv 2312.05934"),
    Claim("rag", "retrieval alone beats training alone", "opposite shown", "ft-par 97.5%, base+rag 94.0% on new", 0.035,
          0.01, 0.06, 0.004, 0.012, "arXiv 2312.05934"),
    Claim("replay", "replay protects what was known", "not shown", "replay 0.5 96.5%, ft-par 95.5% on known: +1.0 points",
          0.01, -0.01, 0.03, 0.31, 0.62),
    Claim("synthetic", "synthetic questions teach the reverse", "cannot be tested", "no answers of ft-syn on reverse",
          None, None, None, None, None, "arXiv 2309.14316"),
)  # fmt: skip
CHOICES = (
    Choice("sandbox", "trainer.learning_rate", "ft-par", "new",
           ((1e-4, 0.46, 120), (5e-4, 0.79, 120), (1e-3, 0.88, 120), (3e-3, 0.86, 120)), 1e-3, False),
    Choice("sandbox", "k", "base", "new", ((1, 0.95, 120), (2, 0.7, 120), (3, 0.61, 120), (4, 0.56, 120), (5, 0.5, 120)),
           1, False),
)  # fmt: skip


def _costs(arms: Sequence[ArmInfo], n_seeds: int) -> tuple[Cost, ...]:
    costs = []
    for index, arm in enumerate(arms):
        for seed in range(n_seeds if arm.trained else 1):
            of = seed if arm.trained else None
            if arm.trained:
                costs.append(
                    Cost(
                        arm.name,
                        arm.model,
                        of,
                        "augment",
                        12.5,
                        81_000,
                        300 << 20,
                        0.012,
                        2 + n_seeds,
                    )
                )
                costs.append(
                    Cost(
                        arm.name,
                        arm.model,
                        of,
                        "train",
                        40.0 + 3 * index,
                        410_000,
                        900 << 20,
                        0.0,
                        1,
                    )
                )
            costs.append(Cost(arm.name, arm.model, of, "eval", 9.0, 52_000, 700 << 20, 0.0, 1))
    return tuple(costs)


def make_logs(folder: Path, n_seeds: int = 3) -> tuple[tuple[str, str, int, str], ...]:
    """Write the logs of three arms: losses step down where an epoch ends."""
    logs = []
    for arm, per_epoch in (("ft-reg", 20), ("ft-par", 100), ("repeated", 20)):
        for seed in range(n_seeds):
            noise = random.Random(seed)
            rows = [
                {"step": step, "loss": 3 * 0.6 ** ((step - 1) // per_epoch) + 0.1 * noise.random(), "epoch": step / per_epoch,
                 "learning_rate": 1e-3}
                for step in range(1, 101)
            ]  # fmt: skip
            path = write_log(folder / f"{arm}-{seed}" / "log.jsonl", rows)
            logs.append(("sandbox", arm, seed, str(path)))
    return tuple(logs)


def make_study(folder: Path | None = None, *, n_seeds: int = 3, **changes: Any) -> Report:
    """Return the result of a study in the sandbox; with `folder`, the logs of its runs are written there."""
    scores, right = _sandbox_scores(n_seeds)
    curves, curve_arms, curve_scores = _curves(n_seeds, right)
    arms = [
        ArmInfo(name, "sandbox", about, name != "base", "", {"trainer.max_steps": 100} if name != "base" else {},
                "ft-par" if name == "repeated" else "")
        for name, (about, _) in ARMS.items()
    ]  # fmt: skip
    arms.append(ArmInfo("ft-syn", "sandbox", "questions written by a language model", True, "", {}))
    fields: dict[str, Any] = {
        "kind": "study", "title": "The sandbox: 120 people the base model never read about",
        "description": "Base, retrieval, training on originals and on paraphrases, with controls. Ten minutes on two cores.",
        "seeds": SEEDS[:n_seeds], "models": ("sandbox",), "arms": (*arms, *curve_arms),
        "results": (*scores, *curve_scores), "sweeps": tuple(curves), "choices": CHOICES, "claims": CLAIMS,
        "costs": _costs(arms[:-1], n_seeds),
        "failures": (
            Failure("ft-syn", "sandbox", None, "augment", "endpoint refused: HTTP 401 (wrong key)", "stages/9/stage.log"),
        ),
        "logs": make_logs(folder / "logs", n_seeds) if folder else (),
        "notes": ("Retrieval: BM25 over 120 documents.",),
        "commands": ("kinject study recipes/studies/sandbox.yaml",),
        "versions": {"kinject": "0.1.0", "torch": "2.13.0", "python": "3.13.1"},
    }  # fmt: skip
    report = Report(**(fields | changes))
    return replace(report, advice=advise(report.results, report.arms))


PAPER_MODELS = {"Mistral-7B": 0.05, "Llama-2-7B": -0.12, "Orca-2-7B": 0.03}
PAPER_TASKS = {"anatomy": (135, 0.56), "astronomy": (152, 0.62), "college_biology": (144, 0.65),
               "college_chemistry": (100, 0.45), "prehistory": (324, 0.7)}  # fmt: skip
PAPER_ARMS = {"base": 0.0, "ft-reg": 0.02, "ft-par": 0.06}


def make_paper_study() -> Report:
    """Return a result of the paper's shape: three models, MMLU subjects with 0 and 5 shots, current events, K to 5."""
    scores: list[ArmResult] = []
    tasks = {**PAPER_TASKS, "current-events": (910, 0.45)}
    for m, (model, offset) in enumerate(PAPER_MODELS.items()):
        for t, (task, (n, level)) in enumerate(tasks.items()):
            for shots in (0, 5) if task in PAPER_TASKS else (0,):
                setting: dict[str, Any] = {
                    "model": model,
                    "shots": shots,
                    "role": "learning",
                    "format": "letters",
                }
                base = draw(level + offset, n, 10 * m + t + shots, 1)
                retrieval = draw(level + offset + 0.08, n, 10 * m + t + shots + 500, 1)
                for a, (arm, gain) in enumerate(PAPER_ARMS.items()):
                    trained = arm != "base"
                    arm_right = (
                        draw(level + offset + gain, n, 10 * m + t + 100 * a + shots, 3)
                        if trained
                        else base
                    )
                    beside = make_contrast(arm_right, retrieval, "base+rag") if trained else None
                    scores.append(
                        make_score(
                            task,
                            arm,
                            arm_right,
                            base if trained else None,
                            to_rag=beside,
                            **setting,
                        )
                    )
                    for k in range(1, 6):
                        fraction = level + offset + gain / 2 + 0.1 - 0.02 * abs(k - 3)
                        context = draw(fraction, n, 100 * a + 7 * k + m + t, 3 if trained else 1)
                        scores.append(
                            make_score(task, arm, context, base, k=k, chosen_k=k == 3, **setting)
                        )
    arms = tuple(
        ArmInfo(arm, model, arm, arm != "base", "", {}) for model in PAPER_MODELS for arm in PAPER_ARMS
    )  # fmt: skip
    return make_study(
        title="Fine-tuning or retrieval? The paper's tables", models=tuple(PAPER_MODELS), arms=arms, results=tuple(scores),
        sweeps=(), choices=(), claims=(), costs=_costs(arms, 3), failures=(),
    )  # fmt: skip


def make_small(**changes: Any) -> Report:
    """Return a study of base and ft-par on what is new and what is known, one seed, nothing varied."""
    whole = make_study(n_seeds=1)
    arms = tuple(arm for arm in whole.arms if arm.name in ("base", "ft-par"))
    scores = tuple(
        score for score in whole.results
        if score.arm in ("base", "ft-par") and score.question_set != "reverse" and score.k < 2 and score.role != "baseline"
    )  # fmt: skip
    fields: dict[str, Any] = {
        "title": "Small", "arms": arms, "results": scores, "sweeps": (), "choices": (), "claims": (),
        "costs": (), "failures": (), "notes": (),
    }  # fmt: skip
    return replace(whole, **(fields | changes))
