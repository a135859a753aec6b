"""What a stage wrote is read by the others with its types, or refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kinject.disk import write_manifest
from kinject.errors import InputError
from kinject.manifests import (
    AskedQuestions,
    CorpusManifest,
    EvalManifest,
    Exposures,
    FinishedTraining,
    StartModel,
    TrainManifest,
    documents_behind,
    manifest_beside,
    read_documents_manifest,
    read_manifest,
    read_train_manifest,
)
from kinject.sandbox.shipped import BASE, INSTRUCT, ShippedRun

RECIPE = {
    "corpus": {"path": "corpus.jsonl"},
    "model": {"path": "base"},
    "trainer": {"max_steps": 4},
}
FIX = "Delete it and run the same command again (kinject train: with --resume)."


def write(folder: Path, stage: str, recipe: dict[str, Any], counts: dict[str, Any]) -> Path:
    write_manifest(
        folder / "manifest.json", stage=stage, inputs={"a": "1"}, recipe=recipe, counts=counts
    )
    return folder


@pytest.mark.parametrize("run", [BASE, INSTRUCT])
def test_the_counts_of_a_finished_training_are_written_as_they_were_read(run: ShippedRun) -> None:
    training = read_train_manifest(run.folder)
    assert training is not None
    counts = training.finished()
    assert counts is not None
    written = training.as_written["counts"]
    assert written["exposures"].pop("tokens")  # no longer counted
    later: dict[str, Any] = {"cost": {}, "learned_tokens": None, "ended_above_start": False}
    assert json.loads(json.dumps(counts.to_json())) == {**later, **written}
    assert "rows" not in FinishedTraining.to_json(
        FinishedTraining(**{**vars(counts), "exposures": Exposures(documents=0)})
    )["exposures"]  # fmt: skip


def test_a_training_names_its_corpus_its_model_and_whether_it_is_finished(tmp_path: Path) -> None:
    manifest = read_manifest(write(tmp_path, "train", RECIPE, {"finished": False}))
    assert isinstance(manifest, TrainManifest)
    assert manifest.finished() is None
    assert manifest.recipe.corpus.path == "corpus.jsonl"
    assert manifest.recipe.model == StartModel("base")
    assert manifest.recipe.trainer == {"max_steps": 4}
    assert manifest_beside(tmp_path / "log.jsonl") == manifest
    assert read_documents_manifest(tmp_path) is None


def test_the_models_and_questions_of_an_evaluation_may_be_paths_or_tables(tmp_path: Path) -> None:
    section = {
        "models": {
            "base": "hub/name", "tuned": {"path": "b", "adapter": "c"}, "plain": {"path": "d", "chat": True},
            "served": {"endpoint": "http://localhost", "model": "m"},
        },
        "questions": {"new": "q.jsonl", "old": {"path": "o.jsonl", "formats": ["letters"]}},
    }  # fmt: skip
    counts = {"answers": 1, "scored_now": 1, "stored": 1, "endpoints": {}}
    manifest = read_manifest(write(tmp_path, "eval", {"eval": section}, counts))
    assert isinstance(manifest, EvalManifest)
    evaluation = manifest.recipe.eval
    assert evaluation.model_paths() == {"base": "hub/name", "tuned": "c", "plain": "d"}
    assert evaluation.formats == ("texts",)
    assert evaluation.question_set("new") == AskedQuestions(path="q.jsonl")
    assert evaluation.question_set("old") == AskedQuestions(path="o.jsonl", formats=("letters",))


@pytest.mark.parametrize(
    ("stage", "recipe", "counts", "message"),
    [
        ("train", RECIPE, {}, "counts.FinishedTraining.finished: found {}: Field required"),
        (
            "train",
            {**RECIPE, "corpus": {"path": 3}},
            {"finished": False},
            "recipe.corpus.path: found 3: Input should be a valid string",
        ),
        ("augment", {"augment": {"documents": "d"}}, {"asked": 3},
         "counts.got: found {'asked': 3}: Field required"),
        ("eval", {"eval": {"models": {}, "questions": {}}}, {"answers": 1, "scored_now": 1, "stored": "1"},
         "counts.stored: found '1': Input should be a valid integer"),
        ("documents", {}, {"heap": "h"}, "counts.fingerprint: found {'heap': 'h'}: Field required"),
    ],
)  # fmt: skip
def test_a_manifest_of_another_shape_is_refused_in_one_line(
    tmp_path: Path, stage: str, recipe: dict[str, Any], counts: dict[str, Any], message: str
) -> None:
    write(tmp_path, stage, recipe, counts)
    with pytest.raises(InputError) as caught:
        read_manifest(tmp_path)
    assert str(caught.value) == f"{tmp_path}/manifest.json: damaged manifest: {message}. {FIX}"


def test_an_unknown_stage_and_a_newer_version_are_refused_and_no_manifest_is_none(
    tmp_path: Path,
) -> None:
    assert read_manifest(tmp_path) is None
    assert manifest_beside(tmp_path / "corpus.jsonl") is None
    assert isinstance(read_manifest(write(tmp_path, "corpus", {}, {})), CorpusManifest)
    write(tmp_path, "bake", {}, {})
    with pytest.raises(InputError, match=r"damaged: found the stage 'bake', one of train, .* is"):
        read_manifest(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 2}))
    with pytest.raises(InputError, match=r"written by a newer kinject \(format 2; .* Update"):
        read_manifest(tmp_path)


def test_a_corpus_of_a_name_that_no_file_has_is_no_corpus(tmp_path: Path) -> None:
    far = {**RECIPE, "corpus": {"path": f"{'c' * 270}/corpus.jsonl"}}
    assert documents_behind(write(tmp_path, "train", far, {"finished": False})) == ()
