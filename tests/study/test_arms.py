"""What a study's recipe may say, and what becomes of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from country import write_study

from kinject.errors import RecipeError
from kinject.recipe import StudyRecipe, read_recipe
from kinject.study.arms import (
    check_inputs,
    check_names,
    check_shared_recipes,
    expand_arms,
    nest_overrides,
    override_arguments,
)
from kinject.study.planner import check_recipes
from kinject.study.run import render_plan
from kinject.types import ArmName


def arms(path: Path, *overrides: str) -> dict[str, object]:
    return {arm.name: arm for arm in expand_arms(read_recipe(path, overrides, "study").study).arms}


def check_shared(recipe: StudyRecipe) -> None:
    check_shared_recipes(recipe, expand_arms(recipe.study))


def faults(path: Path) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        check_names(read_recipe(path, (), "study"))
    return [str(fault) for fault in caught.value.problems]


def test_the_base_is_always_an_arm_and_stands_first(tmp_path, tiny_model):
    assert list(arms(write_study(tmp_path, tiny_model))) == ["base", "ft"]


def test_an_arm_whose_texts_no_training_reads_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    overrides = {"augment.styles": {"tagged": 1, "knowledge_instruct": 2}}
    path = write_study(tmp_path, tiny_model, arms={"taught": {"overrides": overrides}})
    recipe = read_recipe(path, (), "study")
    with pytest.raises(RecipeError, match="'taught': knowledge_instruct writes prompts"):
        check_recipes(recipe, expand_arms(recipe.study))
    overrides |= {"augment.one_corpus": True}
    path = write_study(tmp_path, tiny_model, arms={"taught": {"overrides": overrides}})
    recipe = read_recipe(path, (), "study")
    check_recipes(recipe, expand_arms(recipe.study))


def test_a_curve_makes_an_arm_of_each_value_but_of_those_that_do_as_another(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model,
        arms={"ft": {"overrides": {"augment.styles": {"tagged": 2}}}},
        sweeps={"n": {"key": "augment.styles.tagged", "arm": "ft", "values": [0, 2, 4]},
                "a": {"key": "alpha", "arm": "ft", "values": [0.5, 1.0]}},
    )  # fmt: skip
    assert list(arms(path)) == ["base", "ft", "ft, tagged 0", "ft, tagged 4", "ft, alpha 0.5"]


def test_a_point_goes_over_the_whole_section_that_its_arm_has(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model, overrides={"augment.styles.tagged": 1},
        arms={"ft": {"overrides": {"augment.styles": {"tagged": 2, "faq": 1}}}},
        sweeps={"n": {"key": "augment.styles.tagged", "arm": "ft", "values": [3, 5]}},
    )  # fmt: skip
    (*_, last) = arms(path).values()
    assert nest_overrides(last.augment_overrides) == {
        "augment": {"styles": {"tagged": 5, "faq": 1}}
    }


def test_a_point_that_the_shared_recipe_says_already_is_the_arm_itself(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model,
        arms={"ft": {}, "plain": {"overrides": {"augment.styles": {}}}},
        sweeps={"steps": {"key": "trainer.max_steps", "arm": "ft", "values": [1, 2, 3]},
                "texts": {"key": "augment.styles.tagged", "arm": "ft", "values": [1, 2]},
                "plain steps": {"key": "trainer.max_steps", "arm": "plain", "values": [2, 7]}},
    )  # fmt: skip
    assert list(arms(path)) == [
        "base", "ft", "plain", "ft, max_steps 1", "ft, max_steps 3", "ft, tagged 2", "plain, max_steps 7",
    ]  # fmt: skip


def test_a_point_with_a_default_that_no_recipe_writes_is_the_arm_itself(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model,
        arms={"ft": {"overrides": {"adapter.r": 4, "adapter.merge": True}}},
        sweeps={"decay": {"key": "trainer.adam_beta2", "arm": "ft", "values": [0.999, 0.95]},
                "alpha": {"key": "adapter.lora_alpha", "arm": "ft", "values": [8, 16]},
                "kind": {"key": "adapter.type", "arm": "ft", "values": ["loha", "lora"]},
                "pull": {"key": "regularization.l2", "arm": "ft", "values": [0, 0.5]},
                "climb": {"key": "techniques.sam", "arm": "ft", "values": [0.1, 0.0]},
                "text": {"key": "augment.judge.rounds", "arm": "ft", "values": [1]}},
    )  # fmt: skip
    assert list(arms(path)) == [
        "base", "ft", "ft, adam_beta2 0.95", "ft, lora_alpha 16", "ft, type loha", "ft, l2 0.5", "ft, sam 0.1", "ft, rounds 1",
    ]  # fmt: skip
    # GRPO's own defaults are others.
    assert "ft, adam_beta2 0.999" in arms(path, "study.overrides={method: recall}")


def test_points_are_named_apart_and_two_of_one_name_are_refused(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model,
        sweeps={"more": {"key": "corpus.replay.fraction", "arm": "ft", "values": [0.25]},
                "other": {"key": "corpus.mix.chat.fraction", "arm": "ft", "values": [0.25]},
                "rate": {"key": "trainer.learning_rate", "arm": "ft", "values": [0.00300000001, 0.003]}},
    )  # fmt: skip
    assert list(arms(path))[2:] == [
        "ft, replay.fraction 0.25", "ft, chat.fraction 0.25", "ft, learning_rate 0.00300000001", "ft, learning_rate 0.003",
    ]  # fmt: skip
    path = write_study(
        tmp_path, tiny_model,
        sweeps={"one": {"key": "trainer.warmup_steps", "arm": "ft", "values": [5]},
                "two": {"key": "trainer.warmup_steps", "arm": "ft", "values": [5], "seeds": [8, 9]}},
    )  # fmt: skip
    with pytest.raises(
        RecipeError, match=r"study\.sweeps\.two: 'ft, warmup_steps 5' is the name of two"
    ):
        check_shared(read_recipe(path, (), "study"))


def test_overrides_of_an_arm_go_over_those_of_the_study_and_a_chosen_value_between_them(
    tmp_path, tiny_model
):
    path = write_study(
        tmp_path, tiny_model, overrides={"trainer.learning_rate": 1e-4, "trainer.max_steps": 3}, validation={"new": 0.5},
        tune={"rate": {"key": "trainer.learning_rate", "values": [1e-3], "arm": "ft", "question_sets": "new"}},
        arms={"ft": {}, "own": {"overrides": {"trainer.learning_rate": 7.0}}},
    )  # fmt: skip
    by_name = {
        arm.name: arm
        for arm in expand_arms(read_recipe(path, (), "study").study, {("tiny", "rate"): 1e-3}).arms
    }
    assert by_name["ft"].train_overrides == {"trainer.learning_rate": 1e-3, "trainer.max_steps": 3}
    assert by_name["own"].train_overrides == {"trainer.learning_rate": 7.0, "trainer.max_steps": 3}


def test_dotted_keys_become_one_mapping_with_the_later_ones_on_top():
    assert nest_overrides({"a.b": {"x": 1}, "a.b.y": 2, "a.c": 3, "a.b.x": 4}) == {
        "a": {"b": {"x": 4, "y": 2}, "c": 3}
    }


def test_every_name_that_stands_for_nothing_is_reported_at_its_line(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model, validation={"new": 0.5},
        arms={"ft": {"match": {"steps": "od"}}, "base": {},
              "odd": {"overrides": {"trainr.max_steps": 2}, "corpus": "nowhere.jsonl"},
              "both": {"match": {"steps": "ft", "seconds": "odd"}}},
        sweeps={"c": {"key": "eval.shots", "arm": "ftt", "values": [1]}},
        tune={"r": {"key": "trainer.learning_rate", "values": [1.0], "arm": "ft", "question_sets": "nw"}},
        claims={"x": {"statement": "s", "test": "difference", "arm": "ft", "question_set": "new"}},
    )  # fmt: skip
    messages = "\n".join(faults(path))
    for words in (
        "study.arms.ft.match.steps: found 'od'. Did you mean odd?",
        "study.arms.base: this name is the untouched model's",
        "study.arms.odd.overrides.trainr.max_steps: found 'trainr.max_steps'; it must begin with one of",
        "study.arms.odd.corpus: found 'nowhere.jsonl': neither augmented nor random, and as a file nothing is there.",
        "study.sweeps.c.arm: found 'ftt'. Did you mean ft?",
        "study.claims.x: baseline: missing; test difference needs it.",
        "study.arms.both: steps and seconds exclude each other. Keep one.",
    ):
        assert words in messages
    with pytest.raises(RecipeError, match=r"study\.arms\.ft\.match\.steps") as caught:
        check_names(read_recipe(path, (), "study"), check_inputs=False)
    assert "nowhere.jsonl" not in str(caught.value)  # as any input that is not there yet
    lines = path.read_text("utf-8").splitlines()
    line_number = next(number for number, line in enumerate(lines, 1) if "steps: od" in line)
    assert f"{path}:{line_number}: study.arms.ft.match.steps" in messages


def test_what_a_shared_recipe_says_of_an_override_is_reported_at_the_arm(tmp_path, tiny_model):
    path = write_study(
        tmp_path, tiny_model, arms={"ft": {"overrides": {"trainer.learning_rat": 1.0}}}
    )
    with pytest.raises(
        RecipeError,
        match=r"study\.yaml:\d+: trainer\.learning_rat: unknown key\. Did you mean learning_rate",
    ):
        check_shared(read_recipe(path, (), "study"))


def test_an_adapter_is_refused_where_whole_weights_are_needed_before_anything_trains(
    tmp_path, tiny_model
):
    def check(adapter: dict[str, object], *more: str) -> None:
        path = write_study(
            tmp_path,
            tiny_model,
            arms={"ft": {"overrides": {"adapter": adapter}}, "next": {"after": "ft"}},
        )
        check_shared(read_recipe(path, more, "study"))

    whole, message = {"r": 2, "merge": True}, "leaves an adapter.*Set adapter.merge: true"
    check(whole)
    check({"r": 2}, "study.arms.ft.alpha=1")  # an average has whole weights
    with pytest.raises(RecipeError, match=rf"study\.yaml:\d+: study\.arms\.ft: {message}"):
        check({"r": 2})
    ranks = "study.sweeps={rank: {key: adapter, arm: next, values: [{r: 2}]}}"
    with pytest.raises(RecipeError, match=rf"study\.sweeps\.rank: {message}"):
        check(whole, ranks, f"study.arms.next={{through: {tiny_model}}}")


def test_the_name_of_an_arm_has_the_retrieval_behind_its_plus_and_a_value_of_a_sweep_may_hold_one():
    assert [tuple(ArmName.parse(name)) for name in ("ft", "ft+rag", "ft+own", "a+b+rag", "ft+")] == [
        ("ft", ""), ("ft", "rag"), ("ft", "own"), ("a+b", "rag"), ("ft+", ""),
    ]  # fmt: skip
    for name in ("ft, max_steps 1e+06", "ft, styles paraphrase 1 + faq 2"):
        assert ArmName.parse(name) == (name, "")
    assert [ArmName.parse(name).answers_of for name in ("ft", "ft+rag", "ft+own")] == [
        "ft",
        "ft",
        "ft+own",
    ]
    assert all(str(ArmName.parse(name)) == name for name in ("ft", "ft+rag", "ft+own"))
    assert [ArmName.parse(name).words for name in ("ft", "ft+rag", "ft+own")] == [
        "ft",
        "ft with passages",
        "ft+own with passages",
    ]


def test_a_choice_is_made_on_sets_with_validation_questions(tmp_path, tiny_model):
    def choose(on):
        return {
            "r": {
                "key": "trainer.learning_rate",
                "values": [1e-3],
                "arm": "ft",
                "question_sets": on,
            }
        }

    path = write_study(tmp_path, tiny_model, validation={"new": 0.5}, tune=choose("nw"))
    with pytest.raises(
        RecipeError, match=r"study\.tune\.r\.question_sets: 'nw' has no validation questions"
    ):
        check_shared(read_recipe(path, (), "study"))
    path = write_study(tmp_path, tiny_model, tune=choose(["new"]))
    with pytest.raises(
        RecipeError, match=r"Name a set in study\.validation, or its validation file in eval"
    ):
        check_shared(read_recipe(path, (), "study"))


def test_missing_documents_and_questions_are_reported_before_anything_is_trained(
    tmp_path, tiny_model
):
    recipe = read_recipe(write_study(tmp_path, tiny_model), (), "study")
    check_inputs(recipe)
    (tmp_path / "known.jsonl").unlink()
    (tmp_path / "documents.jsonl").unlink()
    with pytest.raises(RecipeError) as caught:
        check_inputs(recipe)
    message = str(caught.value)
    assert "known.jsonl', but nothing is there" in message
    assert "augment.documents" in message
    assert "eval.retrieval.documents" in message


@pytest.mark.parametrize("key", ["path", "validation", "shots_from"])
def test_a_dry_run_names_the_command_that_makes_missing_questions(
    tmp_path, tiny_model, monkeypatch, key
):
    monkeypatch.chdir(tmp_path)
    questions = {"path": str(tmp_path / "new.jsonl"), key: "data/mmlu/test/marketing_test.csv"}
    path = write_study(
        tmp_path,
        tiny_model,
        overrides={"eval.questions": {"new": questions}, "eval.retrieval": None},
    )
    with pytest.raises(RecipeError) as caught:
        render_plan(read_recipe(path, (), "study"))
    (problem,) = caught.value.problems
    assert problem.dotted == f"eval.questions.new.{key}"
    assert problem.message.endswith("Make it first: kinject recipes data get mmlu")


def test_every_method_of_the_frontier_reads_half_of_the_tokens_of_cpt_but_those_that_say_so(
    monkeypatch,
):
    monkeypatch.chdir(Path(__file__).parents[2])

    def n_tokens(recipe: str, overrides: dict[str, object]) -> int:
        trainer = read_recipe(
            recipe, override_arguments(overrides), "train", check_inputs=False
        ).trainer
        return trainer["max_steps"] * trainer["per_device_train_batch_size"] * trainer["max_length"]

    study = read_recipe("recipes/studies/frontier.yaml", (), "study")
    trained = [
        arm
        for arm in expand_arms(study.study).arms
        if arm.trained and not (arm.match_seconds_of or arm.after)
    ]
    read = {arm.name: n_tokens(study.study.train, arm.train_overrides) for arm in trained}
    full = n_tokens("recipes/cpt.yaml", {})
    twice = {name for name, tokens in read.items() if tokens == full}
    assert twice == {
        "cpt.yaml",
        "best.yaml",
        "fact first at twice the tokens",
        "Muon at twice the tokens",
    }
    assert {tokens for name, tokens in read.items() if name not in twice} == {full // 2}
    assert n_tokens("recipes/sandbox/best.yaml", {}) == full


@pytest.mark.parametrize("name", ["strategies", "techniques", "whole-runs"])
def test_each_strategy_changes_vanilla_in_its_own_lines(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    study = read_recipe(f"recipes/studies/{name}.yaml", (), "study")
    arms = {arm.name: arm for arm in expand_arms(study.study).arms if arm.trained}
    raw = {
        key: read_recipe(
            "recipes/cpt.yaml", override_arguments(arm.train_overrides), "train", check_inputs=False
        ).raw
        for key, arm in arms.items()
    }
    own = {key: arm.overrides or {} for key, arm in study.study.arms.items()}
    vanilla, *others = own
    assert own[vanilla] == {}
    assert all(raw[key] != raw[vanilla] for key in others)
    for key in others:
        changed = {
            section for section in raw[key] if raw[key][section] != raw[vanilla].get(section)
        }
        assert changed == {line.partition(".")[0] for line in own[key]}
