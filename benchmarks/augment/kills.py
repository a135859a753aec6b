"""Kill a run (SIGKILL) at 20 random moments, each time going on from there, and compare with an undisturbed run.

    python benchmarks/augment/kills.py

Printed are the rows after each kill, what the server answered more than once (an answer that was on the wire when the
process died has to be asked for again, nothing else may be), whether a stored row is missing at the end, and whether
the corpora are the same.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from requests import serving, write_documents, write_recipe  # type: ignore[attr-defined]

from kinject.augment.serve import ServeOptions

SCRIPT = """
import json, sys
from pathlib import Path
from kinject.augment import augment
from kinject.recipe import read_recipe
result = augment(read_recipe(Path(sys.argv[1]), [f"run_dir={sys.argv[2]}"], verb="augment"))
print(json.dumps([result.got, result.asked, result.n_sent, result.n_cached, result.refused]))
"""
CONCURRENCY = 16
FAULTS = {"429": 0.03, "500": 0.02, "truncated": 0.05, "refusal": 0.05, "echo": 0.05}
# Faults of content are drawn by the request alone, so that both runs meet the same ones.
OPTIONS = ServeOptions(latency=0.03, faults=FAULTS, by_request=True)


def _rows(path: Path) -> list[bytes]:
    return [row for row in path.read_bytes().splitlines(keepends=True) if row.endswith(b"\n")] if path.exists() else []


def _whole(command: list[str]) -> list[object]:
    done: list[object] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return done


def kill_often(command: list[str], variants: Path) -> list[list[bytes]]:
    """Start the command 20 times and kill it a random moment after it stored something; return the rows each time."""
    rng = random.Random(0)
    stored: list[list[bytes]] = []
    for _ in range(20):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        while len(_rows(variants)) <= (len(stored[-1]) if stored else 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        process.wait()
        stored.append(_rows(variants))
    return stored


def main() -> None:
    """Print what was sent, and whether the corpora are the same."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder, 100)
        command = [sys.executable, "-c", SCRIPT, str(folder / "recipe.yaml")]
        with serving(OPTIONS) as server:
            write_recipe(folder, server.url, CONCURRENCY, 10)
            print("undisturbed: got, asked, sent, cached, refused", _whole([*command, f"{folder}/whole"]))
            before = server.seen()
            variants = folder / "killed/variants.jsonl"
            stored = kill_often([*command, f"{folder}/killed"], variants)
            print("stored after each kill:", [len(rows) for rows in stored])
            print("last run: got, asked, sent, cached, refused", _whole([*command, f"{folder}/killed"]))
            again = server.seen()["answered"] - 2 * before["answered"]
        print(f"answers asked for again: {again}, of at most {20 * CONCURRENCY} on the wire when killed")
        last = set(_rows(variants))
        print("rows stored before a kill and missing at the end:", sum(len(set(rows) - last) for rows in stored))
        same = (folder / "whole/corpus.jsonl").read_bytes() == (folder / "killed/corpus.jsonl").read_bytes()
        print("corpora identical:", same)


if __name__ == "__main__":
    main()
