"""Versions of what kinject writes: a newer one is refused with a message, an older one is read as it stands."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.cli import main
from kinject.disk import FORMAT_VERSION, Journal, lock_dir, read_manifest, write_manifest
from kinject.errors import InputError
from kinject.eval.compare import read_run
from kinject.report.files import read_report
from kinject.requests.batch import BatchLog
from kinject.requests.cache import AnswerCache

TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")
NEWER = {"format_version": FORMAT_VERSION + 1}


def rows(path: Path, *values: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


def recipe(folder: Path, **sections: Any) -> str:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(folder / "run"), **sections}, sort_keys=False))
    return str(path)


def augment_words(folder: Path, model: Path) -> list[str]:
    documents = rows(
        folder / "documents.jsonl", *({"text": f"Person {i} was born in {TOWNS[i % 4]}."} for i in range(4))
    )
    section = {"documents": documents, "styles": {"tagged": 1}, "generator": {"kind": "sandbox"}}
    return ["augment", recipe(folder, augment=section)]


def eval_words(folder: Path, model: Path) -> list[str]:
    questions = (
        {"id": f"q{i}", "question": f"Where was {i} born?", "choices": TOWNS, "answer": i % 4} for i in range(6)
    )
    section = {"models": {"base": str(model)}, "questions": {"new": rows(folder / "questions.jsonl", *questions)}}
    return ["eval", recipe(folder, eval=section)]


def train_words(folder: Path, model: Path) -> list[str]:
    corpus = rows(folder / "corpus.jsonl", *({"text": f"Person {i} was born in {TOWNS[i % 4]}."} for i in range(12)))
    trainer = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "max_length": 32, "per_device_train_batch_size": 2,
        "gradient_checkpointing": False, "bf16": False, "logging_steps": 1,
    }  # fmt: skip
    return ["train", recipe(folder, model={"path": str(model)}, corpus={"path": corpus, "cache_dir": str(folder / "t")},
                            trainer=trainer)]  # fmt: skip


def make_unversioned(run: Path) -> None:
    """Remove the format version from a run folder."""
    (run / ".format.json").unlink()
    for path in run.glob("*.sqlite"):
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA user_version = 0")
    report = run / "report.json"
    if report.exists():
        report.write_text(
            json.dumps(
                {k: v for k, v in json.loads(report.read_text()).items() if k not in ("format_version", "crc32")}
            )
        )


@pytest.mark.parametrize("words", [augment_words, eval_words, train_words])
def test_a_folder_of_a_newer_kinject_is_refused_before_anything_in_it_changes(
    words: Any, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / ".format.json").write_text(json.dumps(NEWER))
    (run / ".corpus.jsonl.x.part").touch()
    assert main(words(tmp_path, tiny_model)) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "newer" in line)
    assert f"{run}/.format.json: written by a newer kinject (format 2; this one reads up to 1). Update kinject" in line
    assert sorted(path.name for path in run.iterdir()) == [".corpus.jsonl.x.part", ".format.json", ".lock"]


def test_an_augment_folder_without_a_version_is_read_as_it_stands(tmp_path: Path, tiny_model: Path) -> None:
    words, run = augment_words(tmp_path, tiny_model), tmp_path / "run"
    assert main(words) == 0
    make_unversioned(run)
    before = {name: (run / name).read_bytes() for name in ("variants.jsonl", "corpus.jsonl")}
    assert main(words) == 0
    assert {name: (run / name).read_bytes() for name in before} == before
    assert json.loads((run / ".format.json").read_text()) == {"format_version": FORMAT_VERSION}


def test_an_evaluation_without_a_version_is_read_as_it_stands(tmp_path: Path, tiny_model: Path) -> None:
    words, run = eval_words(tmp_path, tiny_model), tmp_path / "run"
    assert main(words) == 0
    make_unversioned(run)
    before = (run / "answers.jsonl").read_bytes()
    assert read_report(run / "report.json").results
    assert read_run(run).settings
    assert main(words) == 0
    assert (run / "answers.jsonl").read_bytes() == before
    manifest = read_manifest(run / "manifest.json")
    assert manifest is not None
    assert manifest["counts"]["scored_now"] == 0


@pytest.mark.parametrize("name", ["cache.sqlite", "batches.sqlite"])
def test_a_database_of_a_newer_kinject_is_refused_and_one_without_a_version_is_read(name: str, tmp_path: Path) -> None:
    open_one = AnswerCache if name == "cache.sqlite" else BatchLog
    path = tmp_path / name
    for version in (None, 0):
        if version is not None:
            with contextlib.closing(sqlite3.connect(path)) as database:
                database.execute(f"PRAGMA user_version = {version}")
        opened = open_one(path)
        opened.__exit__(None, None, None) if isinstance(opened, AnswerCache) else opened.close()
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA user_version").fetchone() == (FORMAT_VERSION,)
            database.execute(f"PRAGMA user_version = {FORMAT_VERSION + 1}")
    with pytest.raises(InputError, match=rf"{name}: written by a newer kinject \(format 2; this one reads up to 1\)"):
        open_one(path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format_version": "1"}', '{"format_version": 0}', '{"format_version": true}']
)
def test_a_damaged_version_is_refused_with_what_to_do(text: str, tmp_path: Path) -> None:
    (tmp_path / ".format.json").write_text(text)
    with pytest.raises(InputError, match=r"\.format\.json: damaged"), lock_dir(tmp_path):
        raise AssertionError("opened")


def test_reports_manifests_and_comparisons_of_a_newer_kinject_are_refused(tmp_path: Path) -> None:
    write_manifest(tmp_path / "manifest.json", stage="eval", inputs={}, recipe={}, counts={})
    (tmp_path / "manifest.json").write_text(
        json.dumps({**json.loads((tmp_path / "manifest.json").read_text()), **NEWER})
    )
    (tmp_path / "report.json").write_text(json.dumps({"title": "t", "cells": [], **NEWER}))
    (tmp_path / ".format.json").write_text(json.dumps(NEWER))
    Journal(tmp_path / "answers.jsonl").close()
    for read, name in ((read_manifest, "manifest.json"), (read_report, "report.json"), (read_run, "")):
        with pytest.raises(InputError, match="written by a newer kinject"):
            read(tmp_path / name)
