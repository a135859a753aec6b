"""Constraints for pip that hold kinject's dependencies at the floor or the ceiling of what pyproject.toml allows.

    python .ci/compat.py floor > floor.txt        every dependency at its lower bound
    python .ci/compat.py ceiling > ceiling.txt    every dependency free: pip takes the newest within the upper bound

Torch stays at constraints.txt's version in both: its other builds bring gigabytes of CUDA. At the floor so do the tools
of the tests, which are none of kinject's dependencies.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = ("documents",)
"""Extras that the quick tests need, beside the tools of `dev`."""
_NAME = re.compile(r"[A-Za-z0-9._-]+")


def name_of(requirement: str) -> str:
    """Return a requirement's package, as pip compares names."""
    match = _NAME.match(requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def floor_of(requirement: str) -> str:
    """Return the lower bound of a requirement, ``>=``. Raises `SystemExit` where it has none."""
    match = re.search(r">=\s*([0-9][^,;\s]*)", requirement)
    if match is None:
        raise SystemExit(
            f"pyproject.toml: {requirement}: no lower bound (>=). Give it the oldest version that works."
        )
    return match[1]


def constraints(which: str) -> Iterator[str]:
    """Yield the lines of a constraints file for ``floor`` or ``ceiling``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text("utf-8").split()
    )
    pinned = {name_of(name): version for name, version in pinned.items()}
    yield f"torch=={pinned['torch']}"
    if which == "ceiling":
        return
    own = [
        *project["dependencies"],
        *(item for extra in EXTRAS for item in project["optional-dependencies"][extra]),
    ]
    tools = [name_of(item) for item in project["optional-dependencies"]["dev"]]
    floors = {name_of(item): floor_of(item) for item in own if name_of(item) != "torch"}
    for name, version in (
        floors | {name: pinned[name] for name in tools if name in pinned}
    ).items():
        yield f"{name}=={version}"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("floor", "ceiling"):
        raise SystemExit(__doc__)
    print("\n".join(constraints(sys.argv[1])))
