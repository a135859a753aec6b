"""A training run's files that the disk has damaged: the same weights and log in the end, or a line that names the file."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file

from kinject.disk import read_jsonl, write_manifest
from kinject.errors import DiskError, InputError, KinjectError, TrainingError
from kinject.recipe import Recipe
from kinject.train import run as stage
from kinject.train import train
from kinject.train.checkpoints import checkpoint_to_resume, disk_faults, newest_complete
from kinject.train.merge import merge
from small import write_training

MakeRecipe = Callable[..., Recipe]
SAVE = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}


def outcome(recipe: Recipe) -> Any:
    """The weights and losses that a run comes to, resumed from what is there."""
    result = train(recipe, resume=True)
    weights = load_file(Path(result.model_dir) / "model.safetensors")
    losses = [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]
    return (
        {name: tensor.numpy().tobytes() for name, tensor in weights.items()},
        losses,
        result.n_steps,
    )


@pytest.fixture
def interrupted(make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A run of 5 steps with checkpoints, ended before its model was written."""
    recipe = make_recipe(trainer=SAVE)

    with monkeypatch.context() as patched:
        patched.setattr(stage, "_save_model", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(recipe)
    return recipe


@pytest.mark.soak
def test_no_damage_to_a_checkpoint_changes_what_a_resumed_run_comes_to(
    interrupted: Recipe, tmp_path: Path
) -> None:
    run_dir = interrupted.run_dir
    kept = shutil.copytree(run_dir, tmp_path / "kept")
    newest, wanted = newest_complete(kept), outcome(interrupted)
    assert newest is not None
    states = (
        "model.safetensors",
        "optimizer.pt",
        "trainer_state.json",
        "rng_state.pth",
        "complete.json",
        "SHA256SUMS",
    )
    names = [
        *(f"{newest.name}/{name}" for name in states),
        "log.jsonl",
        "timing.jsonl",
        "manifest.json",
    ]
    n_repaired = 0
    for number, name in enumerate(names):
        shutil.rmtree(run_dir)
        shutil.copytree(kept, run_dir)
        path = run_dir / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if number % 2 else data[: len(data) // 3])
        try:
            result: Any = outcome(interrupted)
        except KinjectError as error:
            result = str(error)
        n_repaired += result == wanted
        assert result == wanted or (
            isinstance(result, str) and (path.name in result or str(path.parent) in result)
        ), name
    assert n_repaired >= 4


def test_a_flipped_bit_in_a_finished_model_is_found_and_named_and_resume_makes_it_again(
    make_recipe: MakeRecipe, interrupted: Recipe
) -> None:
    wanted = outcome(interrupted)
    weights = interrupted.run_dir / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(
        TrainingError, match=r"model\.safetensors: its bytes are not .* --resume .* or --overwrite"
    ):
        train(interrupted)
    with pytest.raises(
        InputError,
        match=r"model\.safetensors: its bytes are not those that were written \(SHA256SUMS",
    ):
        train(
            make_recipe(
                model={"path": str(weights.parent)},
                run_dir=str(interrupted.run_dir.with_name("next")),
            )
        )
    with pytest.raises(InputError, match=r"model\.safetensors: its bytes are not"):
        merge(str(weights.parent), str(weights.parent), [0.5], interrupted.run_dir / "merged")
    assert outcome(interrupted) == wanted


def test_a_folder_without_a_checkpoint_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "checkpoint-30").mkdir()
    assert checkpoint_to_resume(tmp_path) is None
    assert len(caplog.messages) == 2
    assert "checkpoint-30: was not written whole" in caplog.messages[0]
    assert caplog.messages[1].startswith(f"{tmp_path}: no checkpoint to resume from. Training beg")


def test_a_run_that_resumes_with_other_packages_has_a_note(tmp_path: Path) -> None:
    write_training(tmp_path, {"corpus": {"path": "c.jsonl"}, "model": {"path": "m"}})
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_text())
    (tmp_path / "checkpoint-3").mkdir()
    assert stage._version_notes(tmp_path) == []
    manifest["versions"] |= {"peft": "0.19.1", "accelerate": "1.2.3"}
    path.write_text(json.dumps(manifest))
    (note,) = stage._version_notes(tmp_path)
    assert re.search(r"\(peft 0\.19\.1 then, \S+ now; accelerate 1\.2\.3 then, \S+ now\)", note)
    (tmp_path / "checkpoint-3").rmdir()
    assert stage._version_notes(tmp_path) == [], "nothing is resumed"


@pytest.mark.parametrize(
    "error",
    [
        Exception("No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        RuntimeError("basic_ios::clear: iostream error"),
    ],
)
def test_a_full_disk_is_known_by_the_error_of_any_library(tmp_path: Path, error: Exception) -> None:
    (tmp_path / "checkpoint-8").mkdir()
    with (
        pytest.raises(DiskError, match=r"disk is full.* newest complete checkpoint is none"),
        disk_faults(tmp_path),
    ):
        raise error
    assert not (tmp_path / "checkpoint-8").exists()


def test_a_corpus_that_is_not_as_augment_wrote_it_is_refused(
    make_recipe: MakeRecipe, corpus: Path
) -> None:
    write_manifest(
        corpus.parent / "manifest.json",
        stage="augment",
        inputs={},
        recipe={},
        counts={},
        outputs=["corpus.jsonl"],
    )
    corpus.write_bytes(corpus.read_bytes().replace(b"Lowmere", b"Lowmepe", 1))
    with pytest.raises(
        InputError, match=r"corpus\.jsonl: its bytes are not .* Run kinject augment again"
    ):
        train(make_recipe(corpus={"path": str(corpus)}))


def test_a_run_that_was_ended_after_its_last_checkpoint_takes_no_step_more(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make_recipe(trainer={**SAVE, "lr_scheduler_type": "constant"})
    wanted = outcome(recipe)
    shutil.rmtree(recipe.run_dir / "model")
    assert outcome(recipe) == wanted
