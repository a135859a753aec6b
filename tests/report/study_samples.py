"""Reports and logs made from answers, with statistics computed here, the plain way, and not by kinject."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scipy.stats import binomtest

from kinject.results import ArmInfo, ArmResult, Contrast, Report
from kinject.stats.advice import advise

Z = 1.959963984540054


def wilson(n_correct: int, n: int) -> tuple[float, float]:
    """Return Wilson's 95% bounds."""
    fraction, spread = n_correct / n, 1 + Z * Z / n
    middle = (fraction + Z * Z / (2 * n)) / spread
    half = Z * math.sqrt(fraction * (1 - fraction) / n + Z * Z / (4 * n * n)) / spread
    return middle - half, middle + half


def make_result(
    arm: str, right: Sequence[bool], base: Sequence[bool] | None, *, k: int = 0, **changes: object
) -> ArmResult:
    """Return the result of one arm from which questions it got right; `base` are the base arm's, None for base itself."""
    n, n_correct = len(right), sum(right)
    low, high = wilson(n_correct, n)
    fields: dict[str, object] = {
        "model": "base", "arm": arm.removesuffix("+rag"), "question_set": "new", "role": "learning", "format": "texts",
        "shots": 0, "k": k, "n": n, "n_correct": n_correct, "by_seed": (n_correct / n,), "accuracy": n_correct / n,
        "low": low, "high": high, "interval": "Wilson", "chance": 0.25, "to_base": None,
    }  # fmt: skip
    if base is not None:
        fields["to_base"] = make_contrast(right, base)
    return ArmResult(**(fields | changes))  # type: ignore[arg-type]


def make_contrast(right: Sequence[bool], base: Sequence[bool], **changes: object) -> Contrast:
    """Return the paired difference to base, with the exact binomial p and the adjusted Wald interval."""
    n = len(right)
    gained = sum(r and not b for r, b in zip(right, base, strict=True))
    lost = sum(b and not r for r, b in zip(right, base, strict=True))
    p = binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    more, less = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * math.sqrt((more + less - (more - less) ** 2) / (n + 2))
    fields: dict[str, object] = {
        "other": "base", "delta": (gained - lost) / n, "low": max(-1.0, more - less - half),
        "high": min(1.0, more - less + half), "p": float(p), "p_holm": None, "wrong_to_right": gained,
        "right_to_wrong": lost,
        "can_lose": sum(base) > n / 3, "test": "McNemar",
        "n": n, "n_clusters": n, "n_effective": n, "scope": "these models",
        "accuracy": sum(right) / n,
    }  # fmt: skip
    return Contrast(**(fields | changes))  # type: ignore[arg-type]


def make_evaluation(results: Sequence[ArmResult], title: str = "t", **changes: object) -> Report:
    """Return the report of an evaluation; trained arms are compared with the first K of base as if questions differed."""
    ks = {result.k for result in results if result.k}
    evaluation_results = []
    for result in results:
        setting = (result.question_set, result.format, result.shots)
        rag = next(
            (
                r
                for r in results
                if r.k and r.arm == "base" and (r.question_set, r.format, r.shots) == setting
            ),
            None,
        )
        if rag is not None and result.arm != "base" and result.k in (0, rag.k):
            delta = result.accuracy - rag.accuracy
            low = delta - math.hypot(result.accuracy - result.low, rag.high - rag.accuracy)
            high = delta + math.hypot(result.high - result.accuracy, rag.accuracy - rag.low)
            error = max((high - low) / 2 / Z, 1e-9)
            p = math.erfc(abs(delta) / error / math.sqrt(2))
            sizes = (result.n, result.n, result.n, result.accuracy)
            result = replace(
                result,
                to_rag=Contrast(
                    "base+rag", delta, low, high, p, None, 0, 0, True, "McNemar", *sizes
                ),
            )
        evaluation_results.append(replace(result, chosen_k=result.k > 0 and len(ks) == 1))
    names = dict.fromkeys(result.arm for result in results)
    arms = tuple(ArmInfo(name, "base", name, trained=name != "base") for name in names)
    report = Report("evaluation", title, ("base",), arms, tuple(evaluation_results))
    report = replace(report, **changes)  # type: ignore[arg-type]
    return replace(report, advice=advise(report.results, report.arms))


def first(n_right: int, n: int) -> list[bool]:
    """Return that the first `n_right` of `n` questions were answered rightly."""
    return [index < n_right for index in range(n)]


def answers(fraction: float, n: int, seed: int) -> list[bool]:
    """Return answers that are right with probability `fraction`."""
    draw = random.Random(seed)
    return [draw.random() < fraction for _ in range(n)]


ARMS = {"base": (0.26, 0.98), "base+rag": (0.97, 0.985), "reg": (0.55, 0.9), "reg+rag": (0.93, 0.94),
        "par": (0.86, 0.965), "par+rag": (0.965, 0.97)}  # fmt: skip
SETS = {"new": ("learning", 600), "known": ("retention", 400), "reverse": ("learning", 200)}


def make_answers() -> dict[tuple[str, str], list[bool]]:
    """Return (question set, arm) -> which questions were right, for a realistic run."""
    by_set = {}
    for which, (name, (_, n)) in enumerate(SETS.items()):
        for index, (arm, (learned, kept)) in enumerate(ARMS.items()):
            fraction = {
                "new": learned,
                "known": kept,
                "reverse": 0.25 + 0.6 * arm.endswith("+rag"),
            }[name]
            by_set[name, arm] = answers(fraction, n, 100 * which + index)
    return by_set


def make_report(
    title: str = "Sandbox: 120 people the base model never read about", **changes: object
) -> Report:
    """Return the report of `make_answers`."""
    right = make_answers()
    results = [
        make_result(
            arm,
            right[name, arm],
            None if arm == "base" else right[name, "base"],
            k=3 if arm.endswith("+rag") else 0,
            question_set=name,
            role=role,
            to_closest=_to_closest(arm, name, right) if role == "learning" else None,
        )
        for name, (role, _) in SETS.items()
        for arm in ARMS
    ]
    return make_evaluation(
        results, title, **({"notes": ("Retrieval: BM25 over 120 documents.",)} | changes)
    )


def _to_closest(
    arm: str, name: str, right: Mapping[tuple[str, str], list[bool]]
) -> Contrast | None:
    best, other = sorted(("reg", "par"), key=lambda trained: -sum(right[name, trained]))
    return (
        make_contrast(right[name, best], right[name, other], other=other) if arm == best else None
    )


def log_entries(logs: Mapping[str, Path]) -> tuple[tuple[str, str, int, str], ...]:
    """Return a report's `logs` for the logs of some arms."""
    return tuple(("base", name, 0, str(path)) for name, path in logs.items())


def write_log(path: Path, rows: Sequence[Mapping[str, object]]) -> Path:
    """Write a training log."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def write_logs(folder: Path) -> dict[str, Path]:
    """Write the logs of two runs, one over 6 epochs with a loss that steps down, one over 1."""
    runs = {}
    for name, per_epoch in (("reg", 10), ("par", 60)):
        rows = [
            {
                "step": step,
                "loss": 3 * 0.5**epoch + 0.01 * step,
                "learning_rate": 3e-4,
                "epoch": step / per_epoch,
            }
            for step in range(1, 61)
            for epoch in [step // per_epoch]
        ]
        runs[name] = write_log(
            folder / name / "log.jsonl", [*rows, {"step": 60, "eval_loss": 1.0, "epoch": 6.0}]
        )
    return runs
