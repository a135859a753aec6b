"""The commands of the README and the quickstart, in order, on a small part of the sandbox; then what builds on their runs."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from kinject.cli import main

ROOT = Path(__file__).parents[1]
SMALL = {
    "kinject train": ["trainer.max_steps=2", "trainer.warmup_steps=0"],
    "kinject augment": ["recipes/augment.yaml", "augment.styles.paraphrase=1"],
    "kinject eval": ["recipes/eval.yaml", "eval.limit=8"],
}
"""Command -> what makes it small."""


def _commands_of_the_quickstart() -> list[list[str]]:
    page = (ROOT / "docs/quickstart.md").read_text("utf-8")
    section = page.partition("## The main job, step by step")[2].partition("\n## ")[0]
    commands = [shlex.split(line[2:], comments=True) for line in section.splitlines() if line.startswith("$ kinject")]
    return [words for words in commands if words[1] != "recipes"]


def test_the_main_job_runs_as_documented_and_the_benchmarks_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("recipes", "data", "eval"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    commands = _commands_of_the_quickstart()
    assert [words[1] for words in commands] == ["sandbox", "train", "augment", "train", "train", "eval"]
    for words in commands:
        small = [word for word in SMALL.get(" ".join(words[:2]), []) if word not in words]
        assert main([*words[1:], *small]) == 0, words
        if words[1] == "sandbox":  # the base model reads the first 600 texts of 30,000
            corpus = tmp_path / "runs/sandbox/base-corpus.jsonl"
            lines = corpus.read_bytes().splitlines(keepends=True)
            corpus.write_bytes(b"".join(lines[:600]))
    assert "report: runs/eval/report.html" in capsys.readouterr().out
    assert (tmp_path / "runs/eval/report.html").stat().st_size > 10_000

    monkeypatch.setattr(sys, "argv", ["demo.py", "--report", str(tmp_path)])
    runpy.run_path(str(ROOT / "benchmarks/demo.py"), run_name="__main__")
    assert len(re.findall(r"\| (?:yes|NO) \|$", capsys.readouterr().out, re.MULTILINE)) == 5

    arguments = ["--arms", "replay 25%", "--set", "trainer.max_steps=2", "trainer.warmup_steps=0"]
    monkeypatch.setattr(sys, "argv", ["forgetting.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks/train/forgetting.py"), run_name="__main__")
    rows = re.findall(r"^\| .* \| [\d.]+ \| [\d.]+ \| -?[\d.]+ \| \d+ \|$", capsys.readouterr().out, re.MULTILINE)
    assert len(rows) == 4  # base, the arm, two averages
