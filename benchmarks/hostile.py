"""Attack kinject by area: files, networks, disks, kills, processes beside each other, odd surroundings.

    python benchmarks/hostile.py [--seed 0] [--area NAME] [--tries N]

Each try is drawn from the seed and ends in a right result, in one clear line, or in a failure: a traceback, no end, a
wrong result. Prints a table of areas, tries and failures, and the failures with the number that repeats each:
--area NAME --seed NUMBER --tries 1. Without --tries 5,860 in all: of each area in proportion to what a try takes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
for name in ("tests", "tests/disk", "tests/hostile"):
    sys.path.insert(0, str(ROOT / name))

from attack import AREAS, attack, endpoints, files, network, runs, training  # noqa: E402

TRIES = {
    "documents": 1000, "rows and recipes": 600, "training features": 400, "GGUF": 600, "templates": 100, "gates": 500,
    "links": 120, "trees of links": 40, "escape codes": 240, "full disk": 500,
    "endpoint": 400, "runs by an endpoint": 200, "view": 200, "trainings": 400,
    "kills": 120, "sequences": 40, "pairs of processes": 60,
    "surroundings": 150, "clocks": 50, "limits": 60, "memory": 40, "export": 40,
}  # fmt: skip
"""Area -> tries of a whole attack."""
MODULES = (endpoints, files, network, runs, training)
"""Their import registers the areas."""


def main() -> None:
    """Attack, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--area", choices=sorted(AREAS), help="one area alone")
    parser.add_argument("--tries", type=int, help="of each area (default: 5,860 in all)")
    options = parser.parse_args()
    # What is logged of damaged files is not the claim.
    logging.disable(logging.CRITICAL)
    chosen = [options.area] if options.area else sorted(TRIES)
    total = failed = 0
    print(f"{'area':<20} {'tries':>6} {'failed':>6} {'seconds':>8}", flush=True)
    for area in chosen:
        began = time.monotonic()
        count = attack(area, options.tries or TRIES[area], options.seed)
        total, failed = total + count.tries, failed + len(count.failed)
        seconds = time.monotonic() - began
        print(f"{area:<20} {count.tries:>6} {len(count.failed):>6} {seconds:>8.1f}", flush=True)
        for number, fault in list(count.failed.items())[:5]:
            print(f"  --area {area!r} --seed {number} --tries 1: {fault}", flush=True)
    print(f"{'all':<20} {total:>6} {failed:>6}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
