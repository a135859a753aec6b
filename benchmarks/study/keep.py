"""What docs/results keeps of a study's report: the figures that docs/findings.md may name.

    python benchmarks/study/keep.py runs/studies/sandbox --claims COMMIT > docs/results/sandbox.json

COMMIT is the last one that changed the study's claims; tests/test_findings.py checks that it is older than the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

DIGITS = 6
"""Of a kept figure: findings write at most three."""
RESULT = (
    "model",
    "arm",
    "question_set",
    "subject",
    "format",
    "shots",
    "k",
    "score",
    "n",
    "accuracy",
    "low",
    "high",
    "by_seed",
)
CLAIM = (
    "name",
    "statement",
    "verdict",
    "effect",
    "low",
    "high",
    "p_holm",
    "scope",
    "declared_late",
)
CONTRAST = ("delta", "low", "high", "p_holm")
CONTRASTS = ("to_base", "to_plain", "to_rag")


def rounded(value: Any) -> Any:
    """Return a value with numbers cut to `DIGITS` decimals."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def part(item: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """Return these keys of an entry, as far as it has them."""
    return {key: rounded(item[key]) for key in keys if item.get(key) not in (None, "")}


def kept_result(item: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of an arm's accuracy on one set, with its differences and its control."""
    kept = part(item, RESULT)
    for name in CONTRASTS:
        if item.get(name):
            kept[name] = part(item[name], CONTRAST)
    if item.get("control"):
        kept["without_question"] = rounded(item["control"]["accuracy"])
        if item["control"].get("net"):
            kept["net"] = part(item["control"]["net"], CONTRAST)
    if item.get("outcomes"):
        kept["outcomes"] = [
            part(outcome, ("outcome", "rate", "low", "high")) for outcome in item["outcomes"]
        ]
    return kept


def work_of(costs: list[dict[str, Any]], arm: str) -> list[float]:
    """Return the processor seconds of an arm's trainings, one a seed."""
    return [
        rounded(cost["work_seconds"])
        for cost in costs
        if cost["arm"] == arm and cost["stage"] == "train" and cost["work_seconds"]
    ]


def keep(report: dict[str, Any], claims: str) -> dict[str, Any]:
    """Return what is kept of a report.json of a study."""
    return {
        "what": report["title"],
        "commands": report["commands"],
        "claims_commit": claims,
        "seeds": report["seeds"],
        "versions": {name: report["versions"][name] for name in ("kinject", "torch", "python")},
        "written": report["written"],
        "claims": [part(claim, CLAIM) for claim in report["claims"]],
        "perplexities": [
            part(item, ("model", "arm", "name", "per_token", "by_seed"))
            for item in report["perplexities"]
        ],
        "work_seconds": {
            arm["name"]: work_of(report["costs"], arm["name"]) for arm in report["arms"]
        },
        "results": [kept_result(item) for item in report["results"]],
    }


def main() -> None:
    """Print it, one entry a line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--claims", required=True, metavar="COMMIT")
    arguments = parser.parse_args()
    report = json.loads((arguments.run_dir / "report.json").read_text("utf-8"))
    kept = keep(report, arguments.claims)
    lines = []
    for key, value in kept.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in value)
            lines.append(f' "{key}": [\n  {entries}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value, ensure_ascii=False)}')
    sys.stdout.write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
