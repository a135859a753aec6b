"""Which runs of a folder are done, and the command that continues each."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kinject.cli import main
from kinject.disk import find_runs, lock_dir, write_manifest


def _recipe(folder: Path, name: str, run_dir: str, section: str) -> None:
    path = folder / "recipes" / "book" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'run_dir: "{run_dir}" # here\n{section}:\n  x: 1\n')


def _run(
    folder: Path,
    run_dir: str,
    stage: str,
    files: tuple[str, ...],
    counts: dict[str, Any],
    *words: str,
) -> None:
    """Write a run folder as a command leaves it; without counts, one that was stopped before its manifest."""
    path = folder / run_dir
    with lock_dir(path):
        for name in files:
            (path / name).write_text("")
        if counts:
            write_manifest(path / "manifest.json", stage=stage, inputs={}, recipe={}, counts=counts)
            manifest = json.loads((path / "manifest.json").read_text())
            (path / "manifest.json").write_text(
                json.dumps({**manifest, "command": ["kinject", *words]})
            )


def test_each_state_has_its_command(tmp_path: Path) -> None:
    folder = tmp_path
    sections = {"augment": "augment", "questions": "questions", "train": "trainer", "eval": "eval"}
    for verb, section in sections.items():
        _recipe(folder, f"{verb}.yaml", f"runs/book/{verb}", section)
    done = {"asked": 4, "got": 3, "styles": {"paraphrase": {"nothing": 1}}}
    _run(
        folder,
        "runs/book/augment",
        "augment",
        ("corpus.jsonl",),
        done,
        "augment",
        "recipes/book/augment.yaml",
    )
    _run(folder, "runs/book/questions", "", ("outcomes.jsonl",), {})
    words = ("train", "recipes/book/train.yaml", "trainer.max_steps=5", "--overwrite")
    _run(folder, "runs/book/train", "train", ("log.jsonl",), {"finished": False}, *words)
    _run(
        folder,
        "runs/other",
        "augment",
        ("corpus.jsonl",),
        {"asked": 4, "got": 3},
        "augment",
        "x.yaml",
        "run_dir=runs/other",
    )
    _run(folder, "runs/deep/one/eval", "eval", ("report.html",), {"n": 1}, "-m", "pytest")
    (folder / "runs" / "stages" / "abc").mkdir(parents=True)
    (folder / "runs" / "stages" / "abc" / ".lock").write_text("")
    runs = {str(run.run_dir): (run.verb, run.state, run.command) for run in find_runs(folder)}
    assert runs == {
        "runs/book/augment": ("augment", "done", "kinject augment recipes/book/augment.yaml"),
        "runs/book/questions": (
            "questions",
            "unfinished",
            "kinject questions recipes/book/questions.yaml",
        ),
        "runs/book/train": (
            "train",
            "unfinished",
            "kinject train recipes/book/train.yaml trainer.max_steps=5 --resume",
        ),
        "runs/book/eval": ("eval", "not started", "kinject eval recipes/book/eval.yaml"),
        "runs/other": ("augment", "short", "kinject augment x.yaml run_dir=runs/other"),
        "runs/deep/one/eval": ("eval", "done", ""),
    }
    with lock_dir(folder / "runs/book/train"):
        assert [run.state for run in find_runs(folder) if run.verb == "train"] == ["running"]


def test_the_bare_command_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _recipe(tmp_path, "train.yaml", "runs/book/train", "trainer")
    words = ("train", "recipes/book/train.yaml")
    _run(tmp_path, "runs/book/train", "train", (), {"finished": False}, *words)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "  unfinished  runs/book/train  kinject train recipes/book/train.yaml --resume\n" in out
    assert out.endswith("\nNext: kinject train recipes/book/train.yaml --resume\n")


def test_of_a_short_run_it_promises_only_what_its_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in all attempts, a text is not requested again; of questions only with --retry."""
    monkeypatch.chdir(tmp_path)
    counts = {"asked": 7, "got": 5, "failed": {}, "refused": {"echo": 4}}
    _run(tmp_path, "runs/q", "questions", ("questions.jsonl",), counts, "questions", "q.yaml")
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "\n  short  runs/q  kinject questions q.yaml\n" in out
    assert "requests again what failed, and prints what brings those that were refused.\n" in out


def test_names_that_no_file_has_and_pipes_neither_end_the_list_nor_hold_it_up(
    tmp_path: Path,
) -> None:
    (tmp_path / "runs").mkdir()
    _recipe(tmp_path, "train.yaml", f"runs/{'b' * 280}", "trainer")
    _recipe(tmp_path, "eval.yaml", "runs/ev", "eval")
    _run(tmp_path, "runs/other", "train", (), {"finished": False}, "train", "other.yaml")
    os.mkfifo(tmp_path / "recipes" / "pipe.yaml")
    for name in ("ev", "locked"):
        (tmp_path / "runs" / name).mkdir()
    os.mkfifo(tmp_path / "runs" / "ev" / "manifest.json")
    os.mkfifo(tmp_path / "runs" / "locked" / ".lock")
    states = {str(run.run_dir): run.state for run in find_runs(tmp_path)}
    assert states == {
        f"runs/{'b' * 280}": "not started",
        "runs/ev": "unfinished",
        "runs/other": "unfinished",
    }


def test_of_two_recipes_with_a_folder_the_first_counts_however_it_names_it(tmp_path: Path) -> None:
    """A recipe of one's own comes before a copied one below recipes/."""
    (tmp_path / "recipes").mkdir()
    for name, run_dir in (
        ("own.yaml", "runs/one"),
        ("recipes/copied.yaml", "./runs/one/"),
        ("whole.yaml", str(tmp_path / "runs" / "two")),
    ):
        (tmp_path / name).write_text(f"run_dir: {run_dir}\neval: {{}}\n")
    for name in ("one", "two"):
        folder = tmp_path / "runs" / name
        with lock_dir(folder):
            write_manifest(folder / "manifest.json", stage="eval", inputs={}, recipe={}, counts={})
    assert [(run.run_dir.name, run.recipe) for run in find_runs(tmp_path)] == [
        ("one", "own.yaml"),
        ("two", "whole.yaml"),
    ]
