"""`make demo` on a fresh clone, cold and warm, against the figures it must reach.

python benchmarks/demo.py            clone, install and run, then run again with .venv there; prints one table
python benchmarks/demo.py --report FOLDER   only read FOLDER/runs/demo/report.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def timed_demo(folder: Path, target: str = "demo") -> float:
    """Return the seconds that `make demo` takes in `folder`."""
    started = time.monotonic()
    subprocess.run(["make", "--silent", target], cwd=folder, check=True)
    return time.monotonic() - started


def run_cold_and_warm(folder: Path) -> dict[str, float]:
    """Clone this checkout into `folder` and return the seconds of a cold and a warm demo."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
    cold = timed_demo(folder)
    shutil.rmtree(folder / "runs")
    return {"cold": cold, "warm": timed_demo(folder)}


def results_of(folder: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Return the report's results by (question set, arm, K)."""
    report = json.loads((folder / "runs" / "demo" / "report.json").read_text("utf-8"))
    return {
        (result["question_set"], result["arm"], result["k"]): result for result in report["results"]
    }


def figures(
    results: dict[tuple[str, str, int], dict[str, Any]],
) -> list[tuple[str, str, str, bool]]:
    """Return (figure, measured, wanted, reached) for what the issue of the demo asks."""

    def plain(set_name: str, model: str) -> dict[str, Any]:
        return results[set_name, model, 0]

    base, cpt, repeat = (plain("new", model) for model in ("base", "cpt", "repeat"))
    rag = max(
        (
            cell
            for (name, model, k), cell in results.items()
            if name == "new" and model == "base" and k
        ),
        key=lambda c: c["accuracy"],
    )
    forgotten = plain("known", "base")["accuracy"] - plain("known", "cpt")["accuracy"]
    ahead = cpt["accuracy"] - repeat["accuracy"]

    def render(c: dict[str, Any]) -> str:
        return f"{c['accuracy']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"

    return [
        (
            "new facts, base without context",
            render(base),
            "interval holds 0.25",
            base["low"] <= 0.25 <= base["high"],
        ),
        ("new facts, base + RAG", render(rag), "at least 0.90", rag["accuracy"] >= 0.90),
        (
            "new facts after CPT on paraphrases",
            render(cpt),
            "at least 0.75",
            cpt["accuracy"] >= 0.75,
        ),
        (
            "known facts lost through that CPT",
            f"{100 * forgotten:.1f} points",
            "at most 5 points",
            forgotten <= 0.05,
        ),
        (
            "paraphrases ahead of step-matched repetition",
            f"{100 * ahead:.1f} points",
            "at least 10 points",
            ahead >= 0.1,
        ),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--report", type=Path, metavar="FOLDER", help="only read the evaluation in FOLDER/runs/demo"
    )
    parser.add_argument("--test", action="store_true", help="also time make test in the clone")
    arguments = parser.parse_args()
    rows = []
    if arguments.report:
        rows += figures(results_of(arguments.report))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            clone = Path(scratch) / "kinject"
            seconds = run_cold_and_warm(clone)
            rows.append(
                (
                    "make demo, bare machine, install included",
                    f"{seconds['cold']:.0f} s",
                    "180 s",
                    seconds["cold"] <= 180,
                )
            )
            rows.append(
                (
                    "make demo, .venv there",
                    f"{seconds['warm']:.0f} s",
                    "75 s",
                    seconds["warm"] <= 75,
                )
            )
            rows += figures(results_of(clone))
            if arguments.test:
                tests = timed_demo(clone, "test")
                rows.append(("make test", f"{tests:.0f} s", "600 s", tests <= 600))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| figure | measured | wanted | reached |\n|---|---|---|---|")
    for name, measured, wanted, reached in rows:
        print(f"| {name} | {measured} | {wanted} | {'yes' if reached else 'NO'} |")


if __name__ == "__main__":
    main()
