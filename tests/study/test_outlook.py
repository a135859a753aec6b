"""What a study takes before it runs: the operations and the disk of its stages, against counts by hand."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from country import CLAIM, write_study
from transformers import AutoModelForCausalLM

from kinject.errors import InputError
from kinject.plan.estimate import read_shapes
from kinject.plan.length import RunLength
from kinject.plan.run import step_of
from kinject.plan.ways import find_devices, render_size
from kinject.recipe import read_recipe
from kinject.recipe.yaml_lines import read_yaml
from kinject.study.outlook import Estimator, _saved_bytes, peak_bytes
from kinject.study.run import render_plan
from kinject.study.scheduler import family_warnings, open_study
from kinject.study.stages import Stage


def stage(name: str, read: str = "", matched: str = "") -> Stage:
    """Return a stage that reads the weights of `read`, and how long `matched` trained."""
    overrides, parameters = (), {}
    if read:
        overrides = (f'model.path="stages/{read}/model"',)
    if matched:
        parameters = {"match_steps_of": f"stages/{matched}"}
    dependencies = tuple(filter(None, (read, matched)))
    return Stage(name, "any", Path("stages") / name, "", overrides, dependencies, parameters)


CHAIN = (
    stage("ft"), stage("ft asked", "ft"), stage("half", "ft"), stage("half asked", "half"),
    stage("other", matched="ft"), stage("other asked", "other"),
)  # fmt: skip
SIZES = {"ft": 7, "half": 5, "other": 11}


def test_weights_go_with_their_last_reader_or_are_all_there_at_once():
    assert peak_bytes(CHAIN, SIZES, keep=False) == 7 + 5, "half is made from ft, other is not"
    assert peak_bytes(CHAIN[:2] + CHAIN[4:], SIZES, keep=False) == 11
    assert peak_bytes(CHAIN, SIZES, keep=True) == 7 + 5 + 11
    assert peak_bytes((), {}, keep=False) == 0


def row_of(text: str, name: str) -> tuple[int, list[float], str]:
    """Return (trainings, seconds of training and scoring, disk) in the row `name` of a dry run."""
    row = next(line for line in text.splitlines() if re.match(rf"  {name} +\d", line))
    cells = re.split(r" {2,}", row.strip())
    units = {"h": 3600.0, "min": 60.0, "s": 1.0}
    seconds = []
    for cell in cells[2:4]:
        parts = re.findall(r"(\d+) (h|min|s)", cell)
        seconds.append(sum(int(n) * units[unit] for n, unit in parts))
    return int(cells[1]), seconds, cells[5]


def test_a_dry_run_tells_the_hours_of_six_operations_a_weight_and_token(
    tmp_path, tiny_model, monkeypatch
):
    arms = {
        "ft": {"rag": False},
        "rep": {"overrides": {"augment.styles": {}}, "match": {"steps": "ft"}, "rag": False},
    }
    changed = {
        "trainer.max_steps": 5_000,
        "trainer.per_device_train_batch_size": 1,
        "trainer.max_length": 8,
    }
    path = write_study(
        tmp_path,
        tiny_model,
        seeds=[1],
        models={"one": str(tiny_model)},
        arms=arms,
        overrides=changed,
    )
    # A pace at which a count of operations is a time that the table shows.
    outlook = import_module("kinject.study.outlook")
    monkeypatch.setattr(outlook, "matrix_pace", lambda kind: 2e6)
    monkeypatch.setattr(outlook, "choose_device", lambda device: "cpu")
    text = render_plan(read_recipe(path, (), "study"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    n, config = model.num_parameters(), model.config
    if not config.tie_word_embeddings:
        n -= config.vocab_size * config.hidden_size  # a table is looked up
    attention = 6 * config.num_hidden_layers * 8 * config.hidden_size
    n_trainings, (training, scoring), disk = row_of(text, "one")
    assert n_trainings == 2
    assert training == pytest.approx(2 * 5_000 * 8 * (6 * n + attention) / 2e6, rel=0.2), (
        "rows are not all full"
    )
    assert 0 < scoring < training
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    assert disk == render_size(whole), "one model at a time"
    assert row_of(text, "all") == (n_trainings, [training, scoring], disk)
    kept = render_plan(read_recipe(path, ["study.keep_models=true"], "study"))
    assert row_of(kept, "one") == (n_trainings, [training, scoring], render_size(2 * whole))


@pytest.mark.parametrize(
    ("trainer", "n"),
    [
        ({"save_strategy": "epoch"}, 4),
        ({"save_strategy": "steps", "save_steps": 30}, 4),  # at 30, 60, 90, and at the last
        ({"save_strategy": "steps", "save_steps": 0.15}, 7),  # every 15
        ({"save_strategy": "steps", "save_steps": 20, "save_total_limit": 5}, 5),
        ({"save_strategy": "steps", "save_steps": 20, "save_total_limit": 0}, 5),
        ({"save_strategy": "no"}, 0),
    ],
)
def test_the_disk_of_a_training_has_each_of_its_checkpoints(
    tmp_path: Path, tiny_model: Path, trainer: dict[str, Any], n: int
) -> None:
    write_study(tmp_path, tiny_model)
    overrides = [f"trainer.{key}={value}" for key, value in trainer.items()]
    recipe = read_recipe(tmp_path / "train.yaml", overrides, "train")
    step = step_of(recipe, find_devices("cpu", 2**30, 1))
    shapes = read_shapes(step)
    model = 4 * shapes.n_parameters
    found = _saved_bytes(recipe, step, shapes, RunLength(200, 100, 3.4, 0, 0))
    assert found == model + n * 3 * model  # with AdamW's two states


def test_a_checkpoint_is_deleted_once_the_next_is_complete(
    tmp_path: Path, tiny_model: Path
) -> None:
    write_study(tmp_path, tiny_model)
    limit = ["trainer.save_strategy=steps", "trainer.save_steps=9", "trainer.save_total_limit=2"]
    found = {}
    for name, merged in (("whole", []), ("merged", ["adapter.r=2", "adapter.merge=true"])):
        recipe = read_recipe(tmp_path / "train.yaml", [*limit, *merged], "train")
        step = step_of(recipe, find_devices("cpu", 2**30, 1))
        shapes = read_shapes(step)
        found[name] = _saved_bytes(recipe, step, shapes, RunLength(200, 100, 3.4, 0, 0))
        if name == "whole":
            assert found[name] == 3 * 3 * 4 * shapes.n_parameters
        else:
            # Checkpoints have the adapter alone, and the model at the end is whole.
            assert found[name] == 4 * (shapes.n_parameters + 2 * 3 * shapes.n_trained)


@pytest.mark.parametrize("quantization", ["none", "8bit"])
def test_adapters_of_quantized_weights_are_scored_and_loaded_as_of_whole_ones(
    tmp_path, tiny_model, monkeypatch, quantization
):
    """Their base has no weight that trains, and has a download and a time to answer all the same."""
    path = write_study(tmp_path, tiny_model, seeds=[1])
    train = read_yaml(tmp_path / "train.yaml").root
    train["model"] = {"path": str(tiny_model), "quantization": quantization}
    train["adapter"] = {"r": 2, "target_modules": ["v_proj"]}
    (tmp_path / "train.yaml").write_text(json.dumps(train))
    study = open_study(read_recipe(path, (), "study"))
    estimator = Estimator(study, find_devices("cuda", None, 1, gpu="L4"), {})
    _, shapes = estimator._base_shapes(str(tiny_model))
    weights = AutoModelForCausalLM.from_pretrained(tiny_model).num_parameters()
    assert shapes.n_parameters == weights
    assert 0 < shapes.multiplied <= weights


@pytest.fixture
def estimator(tmp_path: Path, tiny_model: Path) -> Estimator:
    """An estimator of a study of one seed whose stages are planned."""
    corpus = str(tmp_path / "documents.jsonl")
    arms = {
        "long": {"overrides": {"trainer.max_steps": 70}},
        "as many": {"match": {"steps": "long"}},
        "as long": {
            "overrides": {"trainer.per_device_train_batch_size": 6},
            "match": {"seconds": "long"},
        },
        "through": {"overrides": {"trainer.save_strategy": "epoch"}, "alpha": 0.3},
    }
    arms = {name: {"corpus": corpus, **arm} for name, arm in arms.items()}
    arms["through"]["through"] = str(tiny_model)
    setup = [str(tmp_path / "train.yaml")]
    path = write_study(tmp_path, tiny_model, seeds=[1], arms=arms, setup=setup)
    study = open_study(read_recipe(path, (), "study"))
    for arm in study.arms:
        study.status.add(study.plan_run(arm, 1).all_stages)
    return Estimator(study, find_devices("cpu", 2**30, 1), {})


def stages_of(estimator: Estimator, arm: str) -> tuple[Stage, ...]:
    study = estimator.study
    return next(study.plan_run(item, 1).stages for item in study.arms if item.name == arm)


@pytest.mark.parametrize("arm", ["as many", "as long"])
def test_an_arm_takes_as_long_as_the_one_that_it_is_matched_to_and_that_is_done(
    estimator: Estimator, arm: str
) -> None:
    (matched,) = stages_of(estimator, arm)
    flops = estimator.work(matched).flops
    (long,) = stages_of(estimator, "long")
    assert flops == estimator.work(long).flops
    assert estimator.unknown == {}


def test_merged_weights_are_whole_ones_without_checkpoints_whoever_made_them(
    estimator: Estimator, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    train, averaged, added = stages_of(estimator, "through")
    assert [estimator.work(item).n_bytes for item in (added, averaged)] == [whole, whole]
    assert estimator.work(train).n_bytes > 2 * whole


def test_the_disk_of_setup_has_the_models_that_it_trains(
    estimator: Estimator, tiny_model: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    whole = sum(weight.numel() for weight in model.parameters()) * 4
    stages = [stage for stages in estimator.study.planner.setup_stages() for stage in stages]
    setup = estimator.totals(stages)["setup"]
    assert (setup.n_trainings, setup.download + setup.peak) == (1, whole)


@pytest.mark.parametrize(("of_set", "of_all", "n"), [(None, 3, 3), (5, 3, 5), (None, None, 8)])
def test_a_dry_run_tells_the_power_of_the_questions_that_are_asked(
    tmp_path, tiny_model, of_set, of_all, n
):
    asked = {"new": {"path": str(tmp_path / "new.jsonl"), "limit": of_set}}
    overrides = {"eval.questions": asked, "eval.limit": of_all}
    path = write_study(tmp_path, tiny_model, overrides=overrides, claims={"c": CLAIM})
    text = render_plan(read_recipe(path, (), "study"))
    assert f"({n} questions on {n} documents, " in text
    assert f"and there are {n}: no difference could be shown" in text


@pytest.mark.parametrize(("test", "n"), [("trend", 1), ("difference", 1), ("equivalence", 0)])
def test_a_claim_that_flips_signs_of_too_few_documents_is_warned_of(
    tmp_path: Path, tiny_model: Path, test: str, n: int
) -> None:
    sweeps = {"rate": {"key": "trainer.learning_rate", "arm": "ft", "values": [1e-5, 1e-4, 1e-3]}}
    claims = {"c": {**CLAIM, "test": test, "sweep": "rate"}}
    path = write_study(tmp_path, tiny_model, sweeps=sweeps, claims=claims)
    warnings = family_warnings(open_study(read_recipe(path, (), "study")))
    assert sum(line.startswith("claim c: the claims (1) need") for line in warnings) == n


def test_a_set_that_is_asked_without_passages_has_no_comparison_with_them(
    tmp_path: Path, tiny_model: Path
) -> None:
    sets = {
        name: {"path": str(tmp_path / "known.jsonl"), "retrieval": name != "prose"}
        for name in ("new", "prose", "known")
    }
    overrides = {"eval.questions": sets, "eval.retrieval.k": [2]}
    path = write_study(tmp_path, tiny_model, overrides=overrides)
    warnings = family_warnings(open_study(read_recipe(path, (), "study")))
    # Of both with passages six: ft and ft with passages to the base with and without, and each to
    # itself without.
    assert len(warnings) == 3
    assert "prose: the headline comparisons (13) need 10 documents" in warnings[1]


def test_without_a_model_a_dry_run_gives_no_estimate_of_0_seconds(
    tmp_path: Path, tiny_model: Path
) -> None:
    recipe = read_recipe(write_study(tmp_path, tiny_model), (), "study")
    shutil.rmtree(tiny_model)
    text = render_plan(recipe)
    assert "no estimate of time and disk:\nnot counted: " in text
    assert "  0 s  " not in text


def test_a_card_that_is_not_known_is_refused(tmp_path, tiny_model):
    recipe = read_recipe(write_study(tmp_path, tiny_model), (), "study")
    with pytest.raises(
        InputError,
        match=r"--gpu: found 'B300', allowed: H200, H100.* kinject plan and kinject try take --memory",
    ):
        render_plan(recipe, "B300")
