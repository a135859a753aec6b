"""What the runner of `kinject study` costs, and what a finished study's rerun takes.

python benchmarks/study/runner.py                       sandbox-quick; needs runs/sandbox/base (make demo)
python benchmarks/study/runner.py RECIPE key=value ...

The study is run in a cache folder of its own: once with one worker (time between stages, in checks, in the analysis and
the report, over all), then again (nothing to do).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def command(recipe: str, root: Path, overrides: list[str]) -> list[str]:
    """Return the command line of the study in `root`."""
    run_overrides = [f"run_dir={root / 'study'}", f"study.cache_dir={root / 'stages'}"]
    return [sys.executable, "-m", "kinject.cli", "study", recipe, *run_overrides, *overrides]


def timed(words: list[str]) -> float:
    """Return the seconds that a command takes; it must succeed."""
    started = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def stage_seconds(root: Path) -> float:
    """Return the seconds that finished stages counted."""
    return sum(
        json.loads(path.read_bytes())["seconds"] for path in (root / "stages").glob("*/*/done.json")
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", nargs="?", default="recipes/studies/sandbox-quick.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| figure | measured | wanted |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="kinject-study-") as folder:
        root = Path(folder)
        # One worker throughout: it has all threads, and sums of other parts differ in the last digit
        words = [*command(arguments.recipe, root, arguments.overrides), "--jobs", "1"]
        whole = timed(words)
        stage_total = stage_seconds(root)
        print(f"| undisturbed, one worker | {whole:.0f} s, of which stages {stage_total:.0f} s | |")
        print(
            f"| runner, checks, analysis, report | {whole - stage_total:.1f} s = {1 - stage_total / whole:.1%} | "
            "under 3% of a study |"
        )
        print(f"| rerun when finished | {timed(words):.1f} s | at most 5 s |", flush=True)


if __name__ == "__main__":
    main()
