"""Whole studies with a tiny model: what is run, shared, chosen, matched, reported; what a failure leaves."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from country import CLAIM, write_study
from in_process import InProcess
from study_samples import make_report
from transformers import AutoTokenizer

from kinject.corpus.questions import read_questions
from kinject.errors import InputError
from kinject.executors import Outcome
from kinject.recipe import read_recipe
from kinject.report.files import read_report, render_summary
from kinject.report.formatting import View
from kinject.report.tables import price_table
from kinject.results import Cost, Report
from kinject.study.analysis import make_prices
from kinject.study.arms import Arm
from kinject.study.records import AskSetting
from kinject.study.run import (
    _choose_k,
    _is_at_end,
    _notes,
    _plan_arms,
    _run_phases,
    render_plan,
    run_study,
)
from kinject.study.scheduler import open_study
from kinject.study.stages import Stage
from kinject.terminal import format_count
from small import draw_blank_figures, save_tiny_model

pytestmark = pytest.mark.usefixtures("blank_figures")


def go(path: Path, executor: InProcess | None = None, *overrides: str) -> tuple[Report, InProcess]:
    executor = executor or InProcess()
    result, page = run_study(read_recipe(path, overrides, "study"), lambda: executor)
    assert page.is_file()
    return result, executor


def manifest_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "manifest.json").read_text("utf-8")))


def write_whole(folder: Path, model: Path) -> Path:
    """Write a study with a choice, two K, a matched arm, an averaged arm and a claim."""
    return write_study(
        folder, model, seeds=[0, 1], validation={"new": 0.5}, keep_models=True,
        arms={
            "ft": {"description": "tuned on the country"},
            "rep": {"overrides": {"augment.styles": {}, "trainer.max_steps": 9}, "match": {"steps": "ft"}, "rag": False,
                    "seeds": [0]},
            "half": {"alpha": 0.5, "rag": False, "seeds": [0]},
        },
        tune={"rate": {"key": "trainer.learning_rate", "values": [0.0001, 0.02], "arm": "ft", "question_sets": "new"}},
        claims={"c": CLAIM},
    )  # fmt: skip


@pytest.fixture
def whole(tmp_path: Path, tiny_model: Path) -> Path:
    """A whole study that has not run."""
    return write_whole(tmp_path, tiny_model)


@dataclass(frozen=True)
class Finished:
    """A whole study that has run: its recipe, its folder, its result, and who ran it. No test changes it."""

    path: Path
    result: Report
    executor: InProcess

    @property
    def folder(self) -> Path:
        return self.path.parent


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, trained_tokenizer: Any) -> Finished:
    """A whole study that has run once for all tests that only look at it."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        draw_blank_figures(patch)
        path = write_whole(folder, save_tiny_model(folder / "tiny-model", trained_tokenizer))
        return Finished(path, *go(path))


def _report_of(folder: Path) -> dict[str, Any]:
    """Return the study's report in a folder, without when it was written, what its stages took, and their folders.

    These are named by ids, which hash the paths in the recipe.
    """
    texts = [
        path.read_text("utf-8").replace(str(folder), "") for path in folder.rglob("report.json")
    ]
    (report,) = (report for report in map(json.loads, texts) if report["kind"] == "study")
    del report["written"], report["logs"]
    for cost in report["costs"]:
        for key in ("seconds", "work_seconds", "peak_bytes"):
            del cost[key]
    return dict(report)


@pytest.mark.soak
def test_a_study_run_twice_in_two_folders_says_the_same_to_the_last_digit(
    finished: Finished, tmp_path: Path, trained_tokenizer: Any
) -> None:
    path = write_whole(tmp_path, save_tiny_model(tmp_path / "tiny-model", trained_tokenizer))
    go(path)
    first, again = (_report_of(folder) for folder in (finished.folder, tmp_path))
    assert again == first
    answers = [
        sorted(path.read_bytes() for path in folder.rglob("answers.jsonl"))
        for folder in (finished.folder, tmp_path)
    ]
    assert answers[0]
    assert answers[0] == answers[1]


def test_a_study_runs_each_stage_once_and_reports_every_arm(finished):
    result, executor = finished.result, finished.executor
    assert result.failures == ()
    assert max(Counter(stage.id for stage in executor.submitted).values()) == 1
    kinds = Counter(stage.kind for stage in executor.submitted)
    # two rates with a seed that is not reported, then ft with both seeds, rep; one merge
    assert kinds["train"] == 5
    assert kinds["merge"] == 1
    assert kinds["augment"] == 2
    assert {score.arm for score in result.results} == {"base", "ft", "rep", "half"}
    seeds = {
        (score.arm, score.k): len(score.by_seed)
        for score in result.results
        if score.question_set == "new"
    }
    assert seeds == {("base", k): 1 for k in (0, 1, 2)} | {("ft", k): 2 for k in (0, 1, 2)} | {
        ("rep", 0): 1,
        ("half", 0): 1,
    }
    assert all(cost.seconds > 0 for cost in result.costs if cost.stage == "train")
    assert {cost.arm for cost in result.costs if cost.stage == "train"} >= {"ft", "rep"}
    text = render_summary(finished.folder / "study", result)
    assert all(words in text for words in ("A small study", "training helps"))
    assert (
        "trained: tuned on the country; paraphrases"
        in (finished.folder / "study/report.html").read_text()
    )


def test_accuracies_are_those_of_the_stored_answers(finished):
    result, executor = finished.result, finished.executor
    stage = next(
        s for s in executor.submitted if s.kind == "eval" and s.label == "test questions to base"
    )
    rows = [
        json.loads(line)
        for line in (stage.folder / "answers.jsonl").read_text("utf-8").splitlines()
    ]
    for score in (score for score in result.results if score.arm == "base"):
        asked = (score.question_set, score.format, score.k)
        set_rows = [row for row in rows if (row["question_set"], row["format"], row["k"]) == asked]
        right = [row["log_probs"].index(max(row["log_probs"])) == row["gold"] for row in set_rows]
        assert score.accuracy == pytest.approx(sum(right) / len(right))
        assert score.n == len(set_rows)
    stored = read_report(stage.folder / "report.json")
    assert result.recalls == stored.recalls != ()
    assert (stage.folder.parents[2] / "study/flips.jsonl").read_text("utf-8") == "", (
        "so small a model changes no answer"
    )
    assert result.written == max(
        manifest_of(s.folder)["written"]
        for s in executor.submitted
        if s.parameters.get("split") == "test"
    )


def test_choices_are_made_on_questions_that_are_not_reported_and_before_those_are_asked(finished):
    result, executor, folder = finished.result, finished.executor, finished.folder
    splits = {
        part: (folder / f"study/questions/new.{part}.jsonl").read_text("utf-8")
        for part in ("validation", "test")
    }
    documents = {
        part: {json.loads(line)["document_id"] for line in text.splitlines()}
        for part, text in splits.items()
    }
    assert not documents["validation"] & documents["test"]
    assert len(documents["validation"] | documents["test"]) == 8
    known = [
        json.loads(line)
        for line in (folder / "study/questions/known.test.jsonl").read_text("utf-8").splitlines()
    ]
    assert {row["document_id"] for row in known} == documents["test"], (
        "a document that chose is asked about in another set"
    )
    assert (
        f"known: {format_count(8 - len(known), 'question')} left out, on documents that other sets choose with"
        in result.notes
    )
    order = [stage.parameters["split"] for stage in executor.submitted if stage.kind == "eval"]
    assert order.index("test") == order.count("validation"), (
        "a test question was asked before the last choice"
    )
    kinds = [stage.kind for stage in executor.submitted]
    # Behind the grid of two rates, whose first stages are two trainings.
    trained = [index for index, kind in enumerate(kinds) if kind == "train"]
    assert "eval" in kinds[trained[2] : trained[-1]], "an evaluation waited for the last training"
    rate = next(choice for choice in result.choices if choice.key == "trainer.learning_rate")
    best = max(rate.candidates, key=lambda candidate: candidate[1])
    assert rate.chosen == best[0]
    assert (
        manifest_of(train_folder_of_arm(executor, "ft, seed 1"))["recipe"]["trainer"][
            "learning_rate"
        ]
        == rate.chosen
    )
    chosen_k = {choice.arm: choice.chosen for choice in result.choices if choice.key == "k"}
    assert all(
        choice.at_edge == (choice.chosen == 2) for choice in result.choices if choice.key == "k"
    )  # of 1 and 2
    for score in result.results:
        assert score.chosen_k == (score.k == chosen_k.get(score.arm)), (
            "a set without validation takes the K of new"
        )
    assert (
        json.loads((folder / "study/choices.json").read_text("utf-8"))["choices"][0]["chosen"]
        == rate.chosen
    )


@pytest.mark.parametrize(("fraction", "part"), [(0.05, "validation"), (0.995, "test")])
def test_a_fraction_that_leaves_no_question_names_the_part_without_any(
    tmp_path: Path, tiny_model: Path, fraction: float, part: str
) -> None:
    path = write_study(tmp_path, tiny_model, validation={"new": fraction})
    with pytest.raises(InputError, match=f"no {part} question of new: {fraction} leaves none"):
        open_study(read_recipe(path, (), "study"))


def test_the_report_says_how_many_questions_chose_whichever_set_took_their_documents(
    tmp_path: Path, tiny_model: Path
) -> None:
    path = write_study(tmp_path, tiny_model, validation={"new": 0.5, "known": 0.6})
    notes = _notes(open_study(read_recipe(path, (), "study")))
    # By the hashes of their ids one document of eight lies below 0.5, and two between 0.5 and 0.6.
    for name in ("new", "known"):
        assert f"{name}: 3 of 8 questions were used for choices and are not reported" in notes


def test_no_passages_are_chosen_for_a_set_that_is_asked_without(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {
        "new": str(tmp_path / "new.jsonl"),
        "known": {"path": str(tmp_path / "known.jsonl"), "role": "retention"},
    }
    path = write_study(
        tmp_path, tiny_model, arms={"ft": {"rag": False}}, overrides={"eval.questions": sets},
        validation={"new": 0.6, "known": 0.6},
    )  # fmt: skip
    study = open_study(read_recipe(path, (), "study"))
    for item in study.question_sets:
        chosen = {question.id for question in item.validation_questions()}
        asked = {question.id for question in read_questions(Path(item.test["path"]))}
        assert chosen
        assert not chosen & asked
    run = import_module("kinject.study.run")
    rates = {("new", 1): (0.25, 4), ("new", 2): (0.75, 4)}
    monkeypatch.setattr(run, "_rate", lambda study, runs, names, k: rates.get((*names, k)))
    monkeypatch.setattr(run, "_evaluate_each_k", lambda study: None)
    _plan_arms(study)
    _choose_k(study)
    assert [(choice.question_set, choice.chosen) for choice in study.choices] == [("new", 2)]
    assert study.diverged == []


@pytest.mark.parametrize(
    ("grid", "ends"),
    [
        ([3e-5, 1e-4, 3e-4, 1e-5], {3e-4, 1e-5}),  # widened by its last value
        ([8, 2, 4], {8, 2}),
        (["constant", "cosine", "linear"], set()),
        ([True, False], set()),
        ([5], set()),
        ([None, 2, 3], {None, 3}),
    ],
)
def test_a_choice_lies_at_an_end_of_its_grid_if_the_grid_could_be_widened_there(
    grid: list[Any], ends: set[Any]
) -> None:
    assert {value for value in grid if _is_at_end(value, grid)} == ends


def train_folder_of_arm(executor: InProcess, label: str) -> Path:
    return next(
        stage.folder
        for stage in executor.submitted
        if stage.kind == "train" and stage.label == label
    )


def test_a_step_matched_arm_trains_as_many_steps_on_its_own_corpus(finished):
    executor = finished.executor
    folder = train_folder_of_arm(executor, "rep, seed 0")
    assert manifest_of(folder)["counts"]["steps"] == 2
    assert (
        manifest_of(folder)["counts"]["tokens"]["source"]
        < manifest_of(train_folder_of_arm(executor, "ft, seed 1"))["counts"]["tokens"]["source"]
    )


def test_a_token_matched_arm_reads_as_many_tokens_of_its_own_corpus(tmp_path, tiny_model):
    overrides = {
        "trainer.max_steps": -1,
        "trainer.num_train_epochs": 3,
        "trainer.per_device_train_batch_size": 1,
    }
    arms = {
        "ft": {"rag": False},
        "rep": {"overrides": {"augment.styles": {}}, "match": {"tokens": "ft"}, "rag": False},
    }
    _, executor = go(write_study(tmp_path, tiny_model, seeds=[2], overrides=overrides, arms=arms))
    read = {}
    for name in arms:
        counts = manifest_of(train_folder_of_arm(executor, f"{name}, seed 2"))["counts"]
        read[name] = counts["epochs"] * counts["tokens"]["source"]
    assert counts["epochs"] > 3
    # Trainer ends with a whole step.
    assert read["rep"] == pytest.approx(read["ft"], rel=0.15)


@pytest.mark.soak
def test_an_arm_matched_in_seconds_trains_as_long_as_the_other(tmp_path, tiny_model, monkeypatch):
    path = write_study(
        tmp_path, tiny_model, seeds=[0], overrides={"trainer.max_steps": 6, "trainer.warmup_steps": 3},
        arms={"ft": {"rag": False}, "slow": {"overrides": {"trainer.per_device_train_batch_size": 4}, "rag": False},
              "slow in its seconds": {"overrides": {"trainer.per_device_train_batch_size": 4}, "match": {"seconds": "ft"},
                                      "rag": False}},
    )  # fmt: skip
    clock = iter([0.0, 2.0, 10.0, 16.0, 20.0, 22.0])  # begun, ended: ft takes 2 seconds, slow 6
    monkeypatch.setattr(
        import_module("kinject.train.checkpoints"), "work_seconds", lambda device: next(clock)
    )
    result, executor = go(path)
    steps = {name: manifest_of(train_folder_of_arm(executor, f"{name}, seed 0"))["counts"]["steps"]
             for name in ("ft", "slow", "slow in its seconds")}  # fmt: skip
    assert steps == {"ft": 6, "slow": 6, "slow in its seconds": 2}
    recipe = manifest_of(train_folder_of_arm(executor, "slow in its seconds, seed 0"))["recipe"]
    assert recipe["trainer"]["warmup_steps"] == 1
    kinds = Counter(cost.stage for cost in result.costs if cost.arm == "slow in its seconds")
    assert kinds == {"augment": 1, "train": 3, "eval": 1}, (
        "the corpus that it shares with the others counts once"
    )
    work = {
        arm: sum(cost.work_seconds for cost in result.costs if cost.arm == arm) for arm in steps
    }
    assert work == {"ft": 2.0, "slow": 6.0, "slow in its seconds": 2.0}


def test_a_finished_study_does_nothing_when_it_is_run_again_and_knows_what_was_declared_late(
    tmp_path, tiny_model
):
    whole = write_study(
        tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}}, claims={"c": CLAIM}
    )
    first, _ = go(whole)

    def never() -> InProcess:
        raise AssertionError("nothing was to be run")

    again, _ = run_study(read_recipe(whole, (), "study"), never)  # type: ignore[arg-type]
    assert again == first

    late = "{statement: it helps here too, test: difference, arm: ft, baseline: base, question_set: known}"
    executor = InProcess()
    with_late, _ = run_study(
        read_recipe(whole, [f"study.claims.late={late}"], "study"), lambda: executor
    )
    assert not executor.submitted
    assert {claim.name: claim.declared_late for claim in with_late.claims} == {
        "c": False,
        "late": True,
    }
    assert "it helps here too" in render_summary(tmp_path / "study", with_late)
    assert "(declared late)" in render_summary(tmp_path / "study", with_late)
    changed, _ = run_study(
        read_recipe(whole, ["study.claims.c.direction=lower"], "study"), lambda: executor
    )
    assert [claim.declared_late for claim in changed.claims] == [True]
    shutil.rmtree(tmp_path / "study")
    for marker in (tmp_path / "stages").rglob("done.json"):
        os.utime(marker)  # as in a copy of the folder
    without, _ = run_study(
        read_recipe(whole, [f"study.claims.late={late}"], "study"), lambda: executor
    )
    assert {claim.name: claim.declared_late for claim in without.claims} == {
        "c": False,
        "late": True,
    }


def test_an_interrupted_study_continues_and_ends_as_an_uninterrupted_one(whole, finished):
    undisturbed, executor = finished.result, finished.executor
    done: list[str] = []
    for stop_after in (1, 3, 5):
        part = InProcess(stop_after)
        with pytest.raises(KeyboardInterrupt):
            go(whole, part)
        done += [stage.id for stage in part.submitted]
    result, last = go(whole)
    done += [stage.id for stage in last.submitted]
    assert len(done) == len(set(done)) == len(executor.submitted)
    for name in ("results", "choices", "claims", "sweeps", "failures", "arms", "notes"):
        assert str(getattr(result, name)).replace(str(whole.parent), str(finished.folder)) == str(
            getattr(undisturbed, name)
        ), name


class Recorder(InProcess):
    """Keeps stages, and runs none."""

    def submit(self, stage: Stage) -> None:
        self.submitted.append(stage)
        self.outcomes.append(Outcome(stage, {}))


def test_with_kept_models_and_one_k_an_arm_is_asked_before_the_next_is_trained(
    tmp_path, tiny_model
):
    arms = {name: {"overrides": {"trainer.max_steps": n}} for name, n in (("a", 3), ("b", 5))}
    path = write_study(tmp_path, tiny_model, seeds=[4], arms=arms, keep_models=True)
    recipe = read_recipe(path, ["study.overrides={eval.retrieval.k: [2]}"], "study")
    executor = Recorder()
    study = replace(open_study(recipe), start_executor=lambda: executor)
    _run_phases(study, {})
    kinds = [stage.kind for stage in executor.submitted if stage.kind != "augment"]
    assert kinds == ["eval", "train", "eval", "train", "eval"]
    assert (tmp_path / "study/choices.json").is_file()


@pytest.mark.soak
def test_models_are_deleted_once_they_are_evaluated_and_made_again_where_another_arm_reads_them(
    tmp_path, tiny_model
):
    arms = {"ft": {"rag": False}, "half": {"alpha": 0.5, "rag": False}}
    path = write_study(tmp_path, tiny_model, seeds=[0], arms=arms)
    result, _ = go(path, None, "study.keep_models=false")
    assert result.failures == ()
    assert not list((tmp_path / "stages").rglob("*.safetensors"))
    assert len(list((tmp_path / "stages" / "train").glob("*/log.jsonl"))) == 1
    _, none = go(path, None, "study.keep_models=false")
    assert none.submitted == []
    _, again = go(path, None, "study.keep_models=false", "study.arms.half.alpha=0.25")
    assert sorted(stage.kind for stage in again.submitted) == ["eval", "merge", "train"]
    assert not list((tmp_path / "stages").rglob("*.safetensors"))


class Counting(InProcess):
    """Counts the folders that hold weights whenever a stage begins."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []

    def submit(self, stage: Stage) -> None:
        stages = stage.folder.parents[1]
        self.held.append(len({path.parent for path in stages.rglob("*.safetensors")}))
        super().submit(stage)


def test_by_default_an_arm_is_asked_and_deleted_before_the_next_is_trained(tmp_path, tiny_model):
    arms = {name: {"overrides": {"trainer.learning_rate": rate}, "rag": rate == 0.02}
            for name, rate in (("slow", 0.001), ("fast", 0.02))}  # fmt: skip
    path = write_study(tmp_path, tiny_model, seeds=[3], validation={"new": 0.5}, arms=arms)
    lean, executor = go(path, Counting())
    assert lean.failures == ()
    assert max(executor.held) == 1
    order = [(stage.kind, stage.parameters.get("split")) for stage in executor.submitted]
    assert order.count(("eval", "validation")) == 2, (
        "the base and one arm have two K to choose from"
    )
    assert order[order.index(("eval", "validation")) + 1] == ("eval", "test")
    everything, _ = go(path, None, "study.keep_models=true", f"study.cache_dir={tmp_path / 'kept'}")
    assert lean.results == everything.results
    assert lean.choices == everything.choices


def test_a_failed_arm_is_reported_with_its_log_and_the_others_finish(tmp_path, tiny_model):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n", encoding="utf-8")
    path = write_study(
        tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}, "bad": {"corpus": str(empty), "rag": False}},
        claims={"c": {"statement": "bad is good", "test": "difference", "arm": "bad", "baseline": "base", "question_set": "new"}},
    )  # fmt: skip
    result, _ = go(path)
    (failure,) = result.failures
    assert (failure.arm, failure.stage) == ("bad", "train")
    assert "empty.jsonl" in failure.message
    assert {score.arm for score in result.results} == {"base", "ft"}
    assert result.claims[0].verdict == "cannot be tested"
    assert "failed: bad" in render_summary(tmp_path / "study", result)
    empty.write_text('{"text": "Arden was born in Lowmere."}\n', encoding="utf-8")
    mended, executor = go(path)
    assert mended.failures == ()
    assert [stage.kind for stage in executor.submitted] == ["train", "eval"]


def test_each_retrieval_is_asked_for_each_arm_and_what_an_answer_costs_is_counted(
    tmp_path, tiny_model
):
    claim = {
        "statement": "s",
        "test": "difference",
        "arm": "ft+own",
        "baseline": "base+own",
        "question_set": "new",
    }
    path = write_study(
        tmp_path, tiny_model, seeds=[0], arms={"ft": {}, "other": {"rag": False}}, overrides={"eval.retrieval.k": [1]},
        retrievals={"own": {"kind": "oracle"}, "nothing": {"min_score": 99.0}}, price=[1.0, 2.0, 3.0], claims={"c": claim},
    )  # fmt: skip
    result, executor = go(path)
    assert Counter(stage.kind for stage in executor.submitted) == {
        "augment": 1,
        "train": 1,
        "eval": 7,
    }
    asked = {(score.arm, score.k) for score in result.results}
    assert asked == {(arm, k) for arm in ("base", "ft") for k in (0, 1)} | {("other", 0)} | {
        (f"{arm}+{name}", 1) for arm in ("base", "ft") for name in ("own", "nothing")
    }
    recalls = {
        r.retrieval: (r.n_found, r.n, r.n_empty) for r in result.recalls if r.question_set == "new"
    }
    assert recalls == {"": (8, 8, 0), "own": (8, 8, 0), "nothing": (0, 8, 8)}
    to_rag = {score.arm: score.to_rag.other for score in result.results if score.k and score.to_rag}
    assert to_rag == {"ft": "base+rag", "ft+own": "base+own", "ft+nothing": "base+nothing"}

    prices = {(item.arm, item.k): item for item in result.prices}
    assert prices.keys() == asked
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    documents = [
        json.loads(line)["text"]
        for line in (tmp_path / "documents.jsonl").read_text("utf-8").splitlines()
    ]
    prompts = [f"Question: Where was {text.split()[0]} born?\nAnswer:" for text in documents]
    shown = [f"{text}\n\n{prompt}" for text, prompt in zip(documents, prompts, strict=True)]
    for arm, k, texts in (("base", 0, prompts), ("ft+nothing", 1, prompts), ("ft", 1, shown)):
        assert prices[arm, k].prompt_tokens == pytest.approx(
            sum(len(tokenizer(text).input_ids) for text in texts) / 8
        )
    plain, rag = prices["ft", 0], prices["base", 1]
    assert [plain.training] == [
        3 * cost.tokens / 1e6 for cost in result.costs if (cost.arm, cost.stage) == ("ft", "train")
    ]
    assert plain.pays_after == math.ceil(plain.training / (rag.asking - plain.asking) * 1000)
    assert "What an answer costs" in render_summary(tmp_path / "study", result)
    assert "ft+own" in result.claims[0].finding


def test_training_pays_from_the_question_on_at_which_its_price_is_saved():
    asked = [AskSetting("new", "texts", 0, k) for k in (0, 1)]
    measured = SimpleNamespace(
        prompt_tokens={("m", arm, item): 40 + 200.0 * item.k for arm in ("base", "ft") for item in asked},
        headline_settings=lambda *_: asked, n_asked=lambda *_: 64, answer_tokens=lambda *_: 5.0,
    )  # fmt: skip
    arms = [Arm(name, "m", "", "", {}, "", "", None, True, (0,)) for name in ("base", "ft")]
    costs = [
        Cost("ft", "m", 0, "augment", 1.0, 900, 0, 0.5, 1, 400),  # it was paid for
        Cost("ft", "m", 0, "train", 1.0, 20_000, 0, 0.0, 1, 1_000, 2_000, 9.0),
        Cost("ft", "m", 0, "train", 1.0, 70_000, 0, 0.0, 1),  # of the arm that it is matched to
        Cost("ft", "m", 0, "augment", 1.0, 800, 0, 7.0, 2),  # which paid for other paraphrases
        Cost("ft", "m", 1, "train", 1.0, 20_000, 0, 0.0, 1, 0, 0, 9.0),
    ]
    prices = make_prices(measured, arms, costs, {}, (10.0, 40.0, 50.0))  # type: ignore[arg-type]
    # a question: 40 x 10 + 5 x 40 = 600 millionths, 2,600 with a passage; training 0.5 + 2,000 x 10 + 1,000 x 40 + 20,000 x 50
    assert [(p.arm, p.k, p.asking, p.training) for p in prices] == [
        ("base", 0, 0.6, 0.0), ("base", 1, 2.6, 0.0), ("ft", 0, 0.6, 1.56), ("ft", 1, 2.6, 1.56),
    ]  # fmt: skip
    assert [p.pays_after for p in prices] == [None, None, 780, "within 1%"]

    # Of seed 2 the training failed, and its paraphrases are those of all seeds.
    failed = [Cost("ft", "m", 2, "augment", 1.0, 900, 0, 0.5, 2, 400), *costs]
    again = make_prices(measured, arms, failed, {}, (10.0, 40.0, 50.0))  # type: ignore[arg-type]
    assert again == prices

    for extra, pays in (
        (-0.5, "within 1%"),
        (3.0, "never"),
        (None, "not known"),
    ):  # tokens of a prompt
        measured.prompt_tokens["m", "ft", asked[1]] = None if extra is None else 240 + extra
        prices = make_prices(measured, arms, costs, {}, (10.0, 40.0, 50.0))  # type: ignore[arg-type]
        assert prices[-1].pays_after == pays
    table = price_table(View(replace(make_report(), prices=tuple(prices))))
    assert [cell.text for cell in table.lines[-1]] == [
        "ft with passages",
        "not known",
        "5.0",
        "not known",
        "1.5600",
        "not known",
    ]


def test_random_text_has_the_corpus_own_words_and_row_lengths(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model, seeds=[0], arms={"noise": {"corpus": "random", "rag": False}}
    )
    _, executor = go(path)
    corpora = {
        stage.kind: [json.loads(line)["text"].split() for line in (stage.folder / "corpus.jsonl").read_text("utf-8").splitlines()]
        for stage in executor.submitted if stage.kind in ("augment", "corpus")
    }  # fmt: skip
    assert [len(row) for row in corpora["corpus"]] == [len(row) for row in corpora["augment"]]
    assert {word for row in corpora["corpus"] for word in row} <= {
        word for row in corpora["augment"] for word in row
    }
    assert corpora["corpus"] != corpora["augment"]


def test_a_dry_run_tells_what_would_run_and_runs_nothing(whole, finished, tmp_path):
    text = render_plan(read_recipe(whole, (), "study"))
    assert "ft" in text
    assert "warning: known: the headline comparisons (20) need 10 documents" in text
    assert "warning: claim c: the claims (1) need 10 documents" in text
    assert not (tmp_path / "stages").exists()
    assert "everything is done" in render_plan(read_recipe(finished.path, (), "study"))
