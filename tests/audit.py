"""Look the pinned dependencies up among known vulnerabilities (pip-audit), as `make check` does.

What is found is told and fails nothing, for an advisory that is published tonight must not stop a change that has nothing to
do with it; with KINJECT_AUDIT=strict it ends with 1. Where the data cannot be reached it is skipped, aloud.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECONDS = 120
COMMAND = (
    sys.executable, "-m", "pip_audit", "--requirement", str(ROOT / "constraints.txt"), "--no-deps", "--disable-pip",
    "--format", "json", "--timeout", "5", "--progress-spinner", "off",
)  # fmt: skip


def run() -> tuple[str, str]:
    """Return what pip-audit says on standard output and beside it; it ends with 1 both for findings and for failures."""
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.stdout, done.stderr


def audit(run_audit: Callable[[], tuple[str, str]] = run, strict: bool = False) -> int:
    """Print what is known and return the exit code: 1 where something is vulnerable and `strict`, else 0."""
    try:
        out, err = run_audit()
        dependencies = json.loads(out)["dependencies"]
    except subprocess.TimeoutExpired:
        return _skipped(f"no answer within {SECONDS} s")
    except (ValueError, KeyError, TypeError):
        return _skipped((err.strip().splitlines() or ["pip-audit said nothing"])[-1][:300])
    looked_up = [item for item in dependencies if "skip_reason" not in item]
    if not looked_up:
        reason = dependencies[0]["skip_reason"] if dependencies else "no packages"
        return _skipped(f"none of {len(dependencies)} packages is known there ({reason})")
    vulnerable = [item for item in looked_up if item["vulns"]]
    for item in vulnerable:
        for one in item["vulns"]:
            fixed = ", ".join(one.get("fix_versions") or ()) or "no version yet"
            print(f"VULNERABLE: {item['name']} {item['version']}: {one['id']}; mended in: {fixed}", file=sys.stderr)
    rest = f", {len(dependencies) - len(looked_up)} unknown there" if len(looked_up) < len(dependencies) else ""
    print(
        f"audit: {len(looked_up)} of {len(dependencies)} pinned packages looked up{rest}, {len(vulnerable)} vulnerable"
    )
    return 1 if vulnerable and strict else 0


def _skipped(why: str) -> int:
    print(f"AUDIT SKIPPED: nothing is known of vulnerable dependencies today: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(audit(strict=os.environ.get("KINJECT_AUDIT") == "strict"))
