"""What the runner of `kinject study` costs, what a finished study's rerun takes, and what kills leave.

python benchmarks/study/runner.py                       sandbox-quick, 10 kills; needs runs/sandbox/base (make demo)
python benchmarks/study/runner.py RECIPE --kills 0 key=value ...

The study is run in a cache folder of its own: once undisturbed with one worker (time between stages, in checks, in the
analysis and the report, over all), again (nothing to do), then killed (SIGKILL to the whole process group) at random
moments and run to its end; the two reports are compared but for times.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_TIMES = ("seconds", "peak_bytes")


def command(recipe: str, root: Path, overrides: list[str]) -> list[str]:
    """Return the command line of the study in `root`."""
    own = [f"run_dir={root / 'study'}", f"study.cache_dir={root / 'stages'}"]
    return [sys.executable, "-m", "kinject.cli", "study", recipe, *own, *overrides]


def timed(words: list[str]) -> float:
    """Return the seconds that a command takes; it must succeed."""
    started = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - started


def stage_seconds(root: Path) -> float:
    """Return the seconds that finished stages counted."""
    return sum(json.loads(path.read_bytes())["seconds"] for path in (root / "stages").glob("*/*/done.json"))


def without_times(value: Any, root: Path) -> Any:
    """Return a report's JSON without what time and folder put into it."""
    if isinstance(value, dict):
        return {key: without_times(item, root) for key, item in value.items() if key not in _TIMES}
    if isinstance(value, list):
        return [without_times(item, root) for item in value]
    return value.replace(str(root), "ROOT") if isinstance(value, str) else value


def killed(words: list[str], n_kills: int, longest: float, draw: random.Random) -> list[float]:
    """Start the study and kill its process group after a random time, `n_kills` times; return the times."""
    moments = []
    while len(moments) < n_kills:
        moment = draw.uniform(0.5, longest)
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )  # fmt: skip
        try:
            process.wait(moment)
            break  # it came to its end before
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            moments.append(moment)
    return moments


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", nargs="?", default="recipes/studies/sandbox-quick.yaml")
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| figure | measured | wanted |\n|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="kinject-study-") as folder:
        root = Path(folder)
        # One worker throughout: it has all threads, and sums of other parts differ in the last digit
        words = [*command(arguments.recipe, root, arguments.overrides), "--jobs", "1"]
        whole = timed(words)
        inside = stage_seconds(root)
        print(f"| undisturbed, one worker | {whole:.0f} s, of which stages {inside:.0f} s | |")
        print(
            f"| runner, checks, analysis, report | {whole - inside:.1f} s = {1 - inside / whole:.1%} | under 3% of a study |"
        )
        print(f"| rerun when finished | {timed(words):.1f} s | at most 5 s |", flush=True)
        if arguments.kills:
            wanted = without_times(json.loads((root / "study/report.json").read_bytes()), root)
            shutil.rmtree(root / "study")
            shutil.rmtree(root / "stages")
            moments = killed(words, arguments.kills, whole / 3, random.Random(arguments.seed))
            timed(words)
            same = without_times(json.loads((root / "study/report.json").read_bytes()), root) == wanted
            at = ", ".join(f"{moment:.0f}" for moment in moments)
            told = "identical" if same else "DIFFERENT"
            print(f"| killed {len(moments)} times (after {at} s) and rerun | report {told} | identical but for times |")


if __name__ == "__main__":
    main()
