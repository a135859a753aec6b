"""Stages are named by what they do: the same work once, other work never the same."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from country import write_study

from kinject.disk import write_json, write_jsonl
from kinject.errors import InputError
from kinject.executors import Outcome, run_logged
from kinject.plan.length import RunLength
from kinject.recipe import read_recipe
from kinject.study import planner, stages
from kinject.study.arms import expand_arms, override_arguments
from kinject.study.claims import declare_claims
from kinject.study.planner import ArmRun, Planner, input_hashes
from kinject.study.scheduler import StageStatus, open_study, reads_files_of, run_stages
from kinject.study.stages import Stage, run_stage
from small import write_training


def planned(path: Path, *overrides: str) -> dict[tuple[str, int], ArmRun]:
    recipe = read_recipe(path, overrides, "study")
    arms = expand_arms(recipe.study).arms
    by_name = {arm.name: arm for arm in arms}
    return {
        (arm.name, seed): Planner(recipe.study).arm_run(arm, seed, by_name)
        for arm in arms
        for seed in arm.seeds
    }


class OneByOne:
    """Runs no stage: each ends as it is told here."""

    def __init__(self, failing: str) -> None:
        self.failing = failing
        self.submitted: list[Stage] = []

    def has_room(self) -> bool:
        return not self.submitted

    def submit(self, task: Stage) -> None:
        self.submitted.append(task)

    def wait(self) -> list[Outcome]:
        stage = self.submitted.pop()
        if stage.id == self.failing:
            return [Outcome(stage, None, "no memory")]
        write_json(stage.marker, {"id": stage.id})
        return [Outcome(stage, {"id": stage.id})]


@pytest.mark.parametrize("failing", ["asked", "trained further", "none"])
def test_the_model_of_a_stage_that_failed_stays_for_the_next_run(
    tmp_path: Path, failing: str
) -> None:
    trained = Stage("trained", "train", tmp_path / "trained", "", ())
    weights = trained.folder / "model/model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.touch()
    reads = (f"model.path={trained.folder}/model",)
    pending = [trained]
    for name, kind in (("asked", "eval"), ("trained further", "train")):
        (tmp_path / name).mkdir()
        pending.append(Stage(name, kind, tmp_path / name, "", reads, ("trained",)))
    status = StageStatus()
    run_stages(status.add(pending), status, OneByOne(failing), "stages", delete_models=True)
    assert weights.exists() == (failing != "none")


def test_only_texts_that_were_refused_or_failed_are_missing_to_a_study(tmp_path: Path) -> None:
    """A writer may answer NONE where a style has nothing to say, and more attempts, no further run,
    bring what was refused."""
    documents = tmp_path / "documents.jsonl"
    rows = [{"id": str(n), "text": f"The mill of Arden has {n} wheels."} for n in range(3, 6)]
    write_jsonl(documents, rows)
    given = [{"document_id": "3", "text": "NONE"}, {"document_id": "4", "text": "NONE"}]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {tmp_path}/run\naugment:\n  documents: {documents}\n  styles: {{reversed: 1}}\n"
        f"  generator: {{kind: file, path: {tmp_path}/given.jsonl}}\n"
    )
    stage = Stage("a", "augment", tmp_path / "run", str(recipe), ())
    write_jsonl(tmp_path / "given.jsonl", given)
    assert stage.run()["tokens"] == 0
    given.append({"document_id": "5", "text": "9 wheels has the mill of Arden."})
    write_jsonl(tmp_path / "given.jsonl", given)
    more = Stage("b", "augment", tmp_path / "b", str(recipe), (f"run_dir={tmp_path}/b",))
    with pytest.raises(InputError, match=r"1 of 3 paraphrases missing \(see rejected.*Raise augm"):
        more.run()


def ids(run: ArmRun) -> dict[str, str]:
    return {stage.kind: stage.id for stage in run.stages}


def test_seeds_share_rewritings_unless_they_are_drawn_anew(tmp_path, tiny_model):
    path = write_study(tmp_path, tiny_model)
    shared = planned(path)
    assert ids(shared["ft", 0])["augment"] == ids(shared["ft", 1])["augment"]
    assert ids(shared["ft", 0])["train"] != ids(shared["ft", 1])["train"]
    redrawn = planned(path, "study.new_paraphrases_per_seed=true")
    assert ids(redrawn["ft", 0])["augment"] != ids(redrawn["ft", 1])["augment"]


def test_an_id_changes_with_a_setting_and_with_the_bytes_of_an_input_not_with_where_the_study_writes(
    tmp_path, tiny_model
):
    path = write_study(tmp_path, tiny_model)
    before = ids(planned(path)["ft", 0])
    assert (
        ids(
            planned(path, "run_dir=elsewhere", "study.title=Another", "study.cache_dir=there")[
                "ft", 0
            ]
        )
        == before
    )
    changed = ids(planned(path, "study.overrides={trainer.max_steps: 3}")["ft", 0])
    assert changed["augment"] == before["augment"]
    assert changed["train"] != before["train"]
    documents = tmp_path / "documents.jsonl"
    documents.write_text(documents.read_text("utf-8").replace("Arden", "Alden"), encoding="utf-8")
    after = ids(planned(path)["ft", 0])
    assert after["augment"] != before["augment"]
    assert after["train"] != before["train"]


def test_grades_of_another_judge_are_other_stages_and_other_scores_are_not(
    tmp_path: Path, tiny_model: Path
) -> None:
    judge = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1"}

    def stages_of(model: str, *scores: str) -> set[str]:
        overrides = {"eval.judge": {**judge, "model": model}, "eval.scores": ["judge", *scores]}
        path = write_study(tmp_path, tiny_model, overrides=overrides)
        planner = Planner(read_recipe(path, (), "study").study)
        questions = {"new": {"path": str(tmp_path / "new.jsonl")}}
        measured = planner.judge_stage(questions)
        base = ArmRun(expand_arms(planner.section).arms[0], 0, (), str(tiny_model), None)
        return {measured.id, planner.eval_stage(base, "test", questions).id}

    assert stages_of("strict") == stages_of("strict", "match")
    assert not stages_of("strict") & stages_of("lenient")


def test_a_package_that_is_a_model_is_known_by_its_model_and_not_by_what_python_writes_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "packages" / "a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "small.gguf").write_bytes(b"GGUF one")
    monkeypatch.syspath_prepend(str(package.parent))
    by_path, by_name = {"model": {"path": str(package)}}, {"model": {"path": "package:a-model"}}

    def hashes() -> list[dict[str, str]]:
        planner._hash.cache_clear()  # one planning reads each file once
        return [input_hashes(values, tmp_path / "cache") for values in (by_path, by_name)]

    before = hashes()
    assert list(before[1]) == ["package:a-model"]
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"compiled")
    assert hashes() == before
    (package / "small.gguf").write_bytes(b"GGUF two")
    assert all(old != new for old, new in zip(before, hashes(), strict=True))


def test_a_folder_of_documents_is_known_by_its_documents_and_not_by_hidden_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "manuals"
    folder.mkdir()
    (folder / "pump.md").write_text("The pump of Selmer holds 40 l.")

    def hashes() -> dict[str, str]:
        planner._hash.cache_clear()  # one planning reads each file once
        return input_hashes({"documents": str(folder)}, tmp_path / "cache")

    before = hashes()
    (folder / ".directory").write_text("how a file manager shows it")
    (folder / "Desktop.ini").write_text("an icon")
    (folder / ".git").mkdir()
    (folder / ".git" / "index").write_bytes(b"changes")
    assert hashes() == before
    (folder / "valve.md").write_text("Its valve opens at 2 bar.")
    assert hashes() != before


@pytest.mark.parametrize("named", ["manuals/*.md", "manuals/**/*.md", "manuals:all:train"])
def test_a_pattern_and_a_data_set_in_a_folder_are_known_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "manuals").mkdir()
    pump = tmp_path / "manuals" / "pump.md"

    def hashes(text: str) -> dict[str, str]:
        pump.write_text(text)
        planner._hash.cache_clear()  # one planning reads each file once
        return input_hashes({"augment": {"documents": named}}, tmp_path / "cache")

    before = hashes("The pump of Selmer holds 40 l.")
    assert before.keys() == {named}
    assert hashes("The pump of Selmer holds 50 l.") != before
    assert hashes("The pump of Selmer holds 40 l.") == before
    assert input_hashes({"stop": "Is it so? [yes/no]"}, tmp_path / "cache") == {}


def test_a_path_without_a_slash_is_known_by_its_content_and_an_option_of_its_name_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pump", "probes", "sft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.md").write_text(name)
    values = {
        "method": "sft",
        "model": {"path": "pump", "dtype": "sft"},
        "eval": {"models": {"m": "pump"}, "questions": {"q": {"path": "probes", "role": "sft"}}},
    }
    assert input_hashes(values, tmp_path / "cache").keys() == {"pump", "probes"}
    assert input_hashes("pump", tmp_path / "cache").keys() == {"pump"}


def test_a_matched_training_without_its_manifest_is_named_with_its_marker(tmp_path: Path) -> None:
    parameters = {"match_steps_of": str(tmp_path / "other")}
    stage = Stage("n", "train", tmp_path / "n", "", (), (), parameters)
    with pytest.raises(InputError, match=r"other: no manifest .* Delete .*/other/done.json, and r"):
        run_stage(stage)


def test_an_arm_matched_to_another_needs_that_ones_training(tmp_path, tiny_model):
    path = write_study(
        tmp_path,
        tiny_model,
        arms={"ft": {}, "rep": {"overrides": {"augment.styles": {}}, "match": {"steps": "ft"}}},
    )
    runs = planned(path)
    train = runs["ft", 0].train
    assert train is not None
    matched = runs["rep", 0].train
    assert matched is not None
    assert train.id in matched.dependencies
    assert matched.parameters == {"match_steps_of": str(train.folder)}


def test_a_stage_that_another_study_is_running_is_waited_for_and_not_run_again(
    tmp_path, tiny_model
):
    stage = planned(write_study(tmp_path, tiny_model))["ft", 0].stages[0]
    stage.folder.mkdir(parents=True)
    done, results = {"id": stage.id, "kind": stage.kind, "seconds": 3.0}, []
    with (stage.folder / ".stage.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting = threading.Thread(target=lambda: results.append(run_stage(stage)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        stage.marker.write_text(json.dumps(done))
    waiting.join(600)
    (result,) = results
    assert done.items() <= result.items()


def test_who_reads_a_model_is_known_in_a_folder_of_any_letters() -> None:
    made = stages.Stage("t", "train", Path("Läufe/学习/t"), "", ())
    arguments = override_arguments({"eval.models": {"model": "Läufe/学习/t/model"}})
    asked = stages.Stage("e", "eval", Path("e"), "", tuple(arguments))
    merged = stages.Stage("m", "merge", Path("m"), "", (), (), {"tuned": "Läufe/学习/t/model"})
    matched = stages.Stage("n", "train", Path("n"), "", (), (), {"match_steps_of": "Läufe/学习/t"})
    assert [reads_files_of(stage, made) for stage in (asked, merged, matched)] == [
        True,
        True,
        False,
    ]


def test_a_seed_that_is_reported_chooses_nothing(tmp_path, tiny_model):
    tune = {
        "rate": {
            "key": "trainer.learning_rate",
            "values": [0.1],
            "arm": "ft",
            "question_sets": "new",
        }
    }
    recipe = read_recipe(write_study(tmp_path, tiny_model, tune=tune), (), "study")
    assert [arm.seeds for grid in expand_arms(recipe.study).grids.values() for _, arm in grid] == [
        (2,)
    ]


def test_a_damaged_marker_is_reported_not_taken_for_done(tmp_path, tiny_model):
    stage = planned(write_study(tmp_path, tiny_model))["ft", 0].stages[0]
    stage.folder.mkdir(parents=True)
    (stage.folder / "done.json").write_text('{"id": ', encoding="utf-8")
    with pytest.raises(InputError, match=r"done\.json: damaged"):
        stage.read_done()
    (stage.folder / "done.json").write_text('{"id": "another"}', encoding="utf-8")
    assert stage.read_done() is None
    for count in ('"seconds": "2"', '"money": NaN', '"tokens": 1e999', '"peak_bytes": -4'):
        (stage.folder / "done.json").write_text(f'{{"id": "{stage.id}", {count}}}')
        with pytest.raises(InputError, match=r"done\.json: damaged: \w+ is .* to run this stage"):
            stage.read_done()
    # An earlier version counted less.
    (stage.folder / "done.json").write_text(f'{{"id": "{stage.id}", "tokens": 5}}')
    done = stage.read_done()
    assert done is not None
    assert (done["tokens"], done["teacher_tokens"], done["seconds"]) == (5, 0, 0)


def test_a_setup_is_not_done_where_its_folder_holds_another_training_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage("id", "setup", tmp_path / "base", "base.yaml", ())
    manifest = stage.folder / "manifest.json"

    def train(stage: Stage) -> dict[str, object]:
        manifest.write_text('{"steps": 40}')
        return {"tokens": 7}

    monkeypatch.setitem(stages._RUN, "setup", train)  # type: ignore[arg-type]
    done = run_stage(stage)
    assert stage.read_done() == done
    manifest.write_text('{"steps": 41}')
    assert stage.read_done() is None
    run_stage(stage)
    assert stage.read_done() is not None
    manifest.unlink()
    assert stage.read_done() is None


@pytest.mark.parametrize(
    "text", ["{}", '{"declared": "now"}', '{"declared": 2e999}', '{"declared": true}']
)
def test_a_claim_whose_file_has_no_time_is_refused(tmp_path, tiny_model, text):
    claim = {"statement": "It learns.", "test": "above_chance", "arm": "ft", "question_set": "new"}
    path = write_study(tmp_path, tiny_model, claims={"learns": claim})
    study = open_study(read_recipe(path, verb="study"))
    section, evaluation = study.recipe.study, study.evaluation
    assert declare_claims(section, evaluation) == declare_claims(section, evaluation)
    (found,) = (Path(section.cache_dir) / "claims").glob("*.json")
    found.write_text(text)
    with pytest.raises(InputError, match=r"damaged: declared is .* Delete it"):
        declare_claims(section, evaluation)


@pytest.mark.parametrize(
    "override",
    [
        "eval.formats=[generate]",
        "eval.shots=[3]",
        "eval.scores=[tokens]",
        "eval.questions.new=known",
    ],
)
def test_a_claim_about_answers_that_are_asked_in_another_way_is_another_claim(
    tmp_path, tiny_model, override
):
    """One on written answers was as old as the same one on chosen answers."""
    claim = {"statement": "It learns.", "test": "above_chance", "arm": "ft", "question_set": "new"}
    path = write_study(tmp_path, tiny_model, claims={"learns": claim})
    study = open_study(read_recipe(path, verb="study"))
    section, evaluation = study.recipe.study, study.evaluation
    records = Path(section.cache_dir) / "claims"
    for asked in (evaluation, replace(evaluation, max_new_tokens=evaluation.max_new_tokens + 1)):
        declare_claims(section, asked)
        assert len(list(records.glob("*.json"))) == 1
    key, value = override.removeprefix("eval.").split("=")
    if key == "questions.new":
        asked = replace(
            evaluation, questions={**evaluation.questions, "new": evaluation.questions[value]}
        )
    else:
        asked = replace(evaluation, **{key: tuple(yaml.safe_load(value))})
    declare_claims(section, asked)
    assert len(list(records.glob("*.json"))) == 2


def test_an_arm_through_a_base_is_merged_and_one_with_more_training_is_trained_again(
    tmp_path, tiny_model
):
    from shutil import copytree

    instruct, talks = tmp_path / "instruct", tmp_path / "talks.jsonl"
    copytree(tiny_model, instruct)
    talks.write_text('{"text": "Hello."}\n')
    arms = {
        "vector": {"through": str(instruct)},
        "after": {"after": "vector", "corpus": str(talks)},
        "less": {"through": str(instruct), "alpha": 0.25},
    }
    path = write_study(tmp_path, tiny_model)
    runs = planned(path, *(f"study.arms.{name}={json.dumps(arm)}" for name, arm in arms.items()))
    vector, after = runs["vector", 0], runs["after", 0]
    assert [stage.kind for stage in vector.stages][-2:] == ["train", "merge"]
    assert f'model.path="{instruct}"' in vector.stages[-2].overrides
    merging = vector.stages[-1].parameters
    assert (merging["add"], merging["minus"]) == (str(tiny_model), str(instruct))
    assert vector.model_dir == f"{vector.stages[-1].folder}/merged"
    # alpha 0 is the arm's own model: the base that was trained, and the difference of the two.
    averaging, adding = runs["less", 1].stages[-2:]
    assert averaging.parameters["base"] == adding.parameters["minus"] == str(instruct)
    assert adding.parameters["tuned"] == f"{averaging.folder}/alpha-0.25"
    assert after.stages[:-1] == vector.stages
    assert f'model.path="{vector.model_dir}"' in after.stages[-1].overrides
    assert f'corpus.path="{talks}"' in after.stages[-1].overrides
    assert after.stages[-1].dependencies == (after.stages[-2].id,)
    assert after.model_dir == f"{after.stages[-1].folder}/model"


def test_a_token_matched_arm_reads_what_the_other_read_without_what_was_cut_off(
    tmp_path, monkeypatch
):
    tokens = {"source": 900, "trained": 500, "masked": 100, "truncated": 260, "dropped": 40}
    recipe = {"model": {"path": "m"}, "corpus": {"path": "c.jsonl"}}
    write_training(tmp_path, recipe, epochs=4.0, tokens=tokens)
    length = RunLength(n_rows=5, steps=10, epochs=2.0, tokens=960, learned=800)
    for module, name, value in (
        ("kinject.plan.length", "measure_length", length),
        ("kinject.train.load", "load_training_tokenizer", None),
    ):
        monkeypatch.setattr(import_module(module), name, lambda *_, value=value: value)
    own = SimpleNamespace(model=None, corpus=SimpleNamespace(path="corpus.jsonl"))
    overrides = stages._matching_epochs(own, tmp_path)
    assert overrides == ["trainer.max_steps=-1", "trainer.num_train_epochs=5.0"]  # 4 x 600 / 480


def test_a_training_that_is_done_again_for_its_weights_has_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(stage: Stage) -> dict[str, int]:
        os.write(1, b"training: 3/7 steps\n")  # print would write to what pytest captures
        raise InputError("row 5: no text. Write one.")

    stage = Stage("id", "train", tmp_path / "train", "train.yaml", ())
    (stage.folder / "model").mkdir(parents=True)
    (stage.folder / "log.jsonl").write_text("{}\n")
    write_json(stage.marker, {"id": "id", "tokens": 5, "deleted": True})
    monkeypatch.setattr(stages, "_RUN", {"train": train})
    assert run_logged(stage) == (None, "row 5: no text. Write one.")
    assert (stage.folder / "stage.log").read_text() == "training: 3/7 steps\n"
    assert not (stage.folder / "log.jsonl").exists()


def test_weights_that_a_killed_run_was_deleting_are_deleted_by_the_next_one(tmp_path: Path) -> None:
    stage = Stage("id", "train", tmp_path / "train", "train.yaml", ())
    weights = stage.folder / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    done = {"id": "id", "tokens": 5}
    write_json(stage.marker, {**done, "deleted": True})
    status = StageStatus()
    assert status.add([stage]) == []
    write_json(stage.marker, done)  # another study has trained it again meanwhile
    status.delete_model(stage)
    assert weights.is_file()
    write_json(stage.marker, {**done, "deleted": True})
    status.delete_model(stage)
    assert not weights.exists()
