"""The figures of README and findings are those of the stored results, whose claims are older than they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
COMPANY: dict[str, Any] = json.loads((RESULTS / "company.json").read_text("utf-8"))
ROWS = {
    "base": ("base model", "base"),
    "documents repeated": ("documents repeated", "documents repeated"),
    "documents and paraphrases": (
        "documents and ten paraphrases of each, as many tokens",
        "documents and paraphrases",
    ),
}
"""Arm -> its row in README's table, and in that of the findings."""


def cells(page: str, heading: str, row: str) -> list[float]:
    """Return the numbers in the first row of that name below a heading (or line) of a page."""
    text = (ROOT / page).read_text("utf-8").partition(heading)[2]
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [float(number) for number in re.findall(r"\d+\.\d", line)]


@pytest.mark.parametrize("arm", ROWS)
def test_the_tables_of_the_company_are_its_results(arm: str) -> None:
    of_set = {item["set"]: item for item in COMPANY["results"] if item["arm"] == arm}
    wanted = []
    for name in ("reworded", "inferred"):
        wanted += [100 * of_set[name]["accuracy"], 100 * of_set[name]["without_question"]]
    wanted.append(100 * of_set["general"]["accuracy"])
    wanted += [item["per_token"] for item in COMPANY["perplexities"] if item["arm"] == arm]
    of_readme, of_findings = ROWS[arm]
    rounded = pytest.approx(wanted, abs=0.051)
    assert cells("README.md", "reads 128 documents", of_readme) == rounded
    assert cells("docs/findings.md", "### 128 documents of a company", of_findings) == rounded


def test_what_is_said_of_the_company_is_in_its_results() -> None:
    text = (ROOT / "docs/findings.md").read_text("utf-8")
    said = text.partition("Beyond the choices, in these two models:")[2].partition("Prose:")[0]
    found = re.findall(r"\+(\d+\.\d)\s+\((\d+\.\d)\s+to\s+(\d+\.\d)", said.replace(" points", ""))
    wanted = []
    for name in ("reworded", "inferred"):
        for arm in ("documents and paraphrases", "documents repeated"):
            (net,) = [
                item["net"]
                for item in COMPANY["results"]
                if (item["arm"], item["set"]) == (arm, name)
            ]
            wanted.append(tuple(f"{100 * net[key]:.1f}" for key in ("delta", "low", "high")))
    assert found == wanted


def test_what_is_said_of_passages_is_in_its_results() -> None:
    text = (ROOT / "docs/findings.md").read_text("utf-8").partition("with BM25's document")[2]
    said = [float(number) for number in re.findall(r"\d+\.\d", text.partition("The passage")[0])]
    found = {(item["arm"], item["k"]): item["accuracy"] for item in COMPANY["with_passages"]}
    wanted = []
    for arm in ("base", "documents and paraphrases"):
        wanted += [100 * found[arm, 1], 100 * found[arm, 0]]
    assert said == pytest.approx(wanted, abs=0.051)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_claims_are_older_than_their_results(path: Path) -> None:
    """The commit of the claims is an ancestor of the first one that has the results."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository") == "true":
        pytest.skip("the history is not here")
    claims = json.loads(path.read_text("utf-8"))["claims_commit"]
    name = str(path.relative_to(ROOT))
    added = git("log", "--diff-filter=A", "--format=%H", "--", name).splitlines()
    if not added:
        pytest.skip("not committed yet")
    ancestors = git("rev-list", added[-1]).splitlines()
    assert any(commit.startswith(claims) for commit in ancestors)
