"""A study's answers by seed and setting."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from tests.report.study_samples import first, make_evaluation, make_result

from kinject.disk import write_json, write_manifest
from kinject.errors import DiskError, InputError
from kinject.eval.scoring.answers import PERPLEXITY_FORMAT, AnswerStore
from kinject.results import Perplexity, Recall, Report, to_json
from kinject.stats.intervals import family_variances
from kinject.study.analysis import summarize_arms
from kinject.study.arms import Arm, n_trainings
from kinject.study.records import AskSetting, Records, changed_answers, find_twins
from kinject.types import Answer, Question


def test_a_damaged_file_of_a_done_stage_is_named_with_the_way_to_make_it_again(tmp_path):
    again = r"For this stage of the study: delete \S+done\.json, and run the study again\."
    (tmp_path / "answers.jsonl").write_text('{"key": "k1", "question_id"\n')
    with pytest.raises(InputError, match=rf"answers\.jsonl:1: not JSON: .* {again}"):
        Records(("sum",)).read("m", "ft", 0, tmp_path)
    with pytest.raises(DiskError, match=rf"report\.json: cannot be read: .* {again}"):
        Records(("sum",)).read_report("m", "ft", tmp_path)


def test_a_seed_that_diverged_is_no_seed_and_a_question_it_has_no_score_for_is_left_out(tmp_path):
    def write(seed, *log_probs):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for i, value in enumerate(log_probs):
                answer = Answer(
                    f"q{i}",
                    "set",
                    "ft",
                    "texts",
                    0,
                    0,
                    (),
                    0,
                    (value, -1.0),
                    (1, 1),
                    (1, 1),
                    n_chars=(1, 1),
                )
                store.add(f"k{i}", answer)
        records.read("m", "ft", seed, folder)

    records, setting = Records(["sum"]), AskSetting("set", "texts", 0, 0)
    write(0, -0.5, math.nan, -2.0)
    write(1, -0.5, -0.5, -0.5)
    write(2, math.nan, math.nan, math.nan)
    assert records.seeds("m", "ft") == [0, 1]
    assert records.settings("m", "ft") == [setting]
    assert records.matrix("m", "ft", setting).correct.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert list(records.by_question("m", "ft", setting)) == ["q0", "q2"]
    assert records.n_asked("m", "ft", setting) == 3
    assert records.unscored == [("m", "ft", 2, setting, 3)]


def test_seeds_of_an_arm_are_informed_by_the_other_arms_of_its_base_model_and_setting(tmp_path):
    records, setting = Records(["sum"]), AskSetting("set", "texts", 0, 0)
    right = {"a": (12, 13, 11), "b": (10, 13, 7), "c": (10, 12, 8), "alone": (12,)}
    for arm, counts in right.items():
        for seed, n_right in enumerate(counts):
            folder = tmp_path / f"{arm}-{seed}"
            folder.mkdir()
            with AnswerStore(folder / "answers.jsonl") as store:
                for i in range(20):
                    value = -0.5 if i < n_right else -2.0
                    store.add(
                        f"k{i}",
                        Answer(
                            f"q{i}", "set", arm, "texts", 0, 0, (), 0, (value, -1.0), (1, 1), (1, 1)
                        ),
                    )
            records.read("m", arm, seed, folder)
    a, b, c, alone = (records.matrix("m", arm, setting) for arm in right)
    own = [of.seed_variance for of in (a, b, c)]
    assert [a.pooled, b.pooled, c.pooled] == family_variances(own)
    assert a.seed_variance[0] < a.pooled[0] == b.pooled[0] < b.seed_variance[0]
    assert alone.pooled is None
    assert a.chances == (0.5,) * 20
    assert records.matrix("m", "a", setting, "nothing").pooled is None
    # An arm that was trained three times one after the other scatters as none of the others.
    records.n_trainings["m", "b"] = 3
    records.read("m", "alone", 0, tmp_path / "alone-0")
    a, b, c = (records.matrix("m", arm, setting) for arm in "abc")
    assert [a.pooled, c.pooled] == family_variances([own[0], own[2]])
    assert b.pooled == own[1]


def test_a_question_of_two_sets_counts_once_in_their_rate(tmp_path):
    """Two of the three questions of "hard" are in "plain" too."""
    texts = {"plain": ["a", "b", "c", "d", "e"], "hard": ["d", "e", "f"]}
    questions = {
        name: [
            Question(f"{i}", f"Who is {text}?", ("x", "y"), 0, "", "")
            for i, text in enumerate(of_set)
        ]
        for name, of_set in texts.items()
    }
    records = Records(["sum"], twins=find_twins(questions))
    settings = [AskSetting(name, "texts", 0, 0) for name in texts]
    for seed, right in enumerate(({"a", "b", "d", "f"}, {"a", "f"})):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for name, of_set in texts.items():
                for i, text in enumerate(of_set):
                    values = (-0.5 if text in right else -2.0, -1.0)
                    answer = Answer(
                        f"{i}", name, "ft", "texts", 0, 0, (), 0, values, (1, 1), (1, 1)
                    )
                    store.add(f"{name}{i}", answer)
        records.read("m", "ft", seed, folder)
    assert records.rate("m", "ft", settings[:1]) == (0.4, 5)
    assert records.rate("m", "ft", settings) == (0.5, 6)
    assert records.rate("m", "ft", settings[::-1]) == (0.5, 6)
    elsewhere = settings[0]._replace(shots=5)
    assert records.rate("m", "ft", [*settings, elsewhere]) is None


def test_pmi_is_net_of_the_choices_alone_and_has_no_control_besides(tmp_path):
    """Both arms prefer the first choice by itself, which is right for five of six questions; the
    trained one's pmi is right for four, the base's for two."""
    records = {score: Records([score]) for score in ("pmi", "bytes")}
    golds = [0, 0, 0, 0, 0, 1]
    for arm, right in (("base", {0, 5}), ("ft", {0, 1, 2, 5})):
        folder = tmp_path / arm
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for i, gold in enumerate(golds):
                alone = (-2.0, -7.0)
                chosen = gold if i in right else 1 - gold
                asked = tuple(value + (choice == chosen) for choice, value in enumerate(alone))
                for form, values in (("texts", asked), ("texts-no-question", alone)):
                    answer = Answer(
                        f"q{i}", "set", arm, form, 0, 0, (), gold, values, (1, 1), (1, 1)
                    )
                    store.add(f"{form}{i}", answer)
        for of_score in records.values():
            of_score.read("m", arm, 0, folder)
    arms = [Arm(name, "m", "", "", {}, "", "", None, False, (0,)) for name in ("base", "ft")]
    found = {
        score: summarize_arms(of_score, arms, {"set": "learning"}, {})
        for score, of_score in records.items()
    }
    asked = [item for item in found["pmi"] if item.arm == "ft" and item.score == "pmi"]
    assert [(item.accuracy, item.control) for item in asked] == [(4 / 6, None)]
    assert asked[0].gain == asked[0].to_base
    assert asked[0].to_base.delta == pytest.approx(2 / 6)
    assert all(item.control for item in found["bytes"] if item.role == "learning")


def test_questions_without_a_subject_are_no_second_result_of_the_whole_set(tmp_path):
    records = Records(["sum"])
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        for i, subject in enumerate(("rivers", "", "rivers", "", "mills")):
            answer = Answer(
                f"q{i}", "set", "base", "texts", 0, 0, (), 0, (-1.0, -2.0), (1, 1), (1, 1),
                subject=subject,
            )  # fmt: skip
            store.add(f"{i}", answer)
    records.read("m", "base", 0, tmp_path)
    base = Arm("base", "m", "", "", {}, "", "", None, False, (0,))
    results = summarize_arms(records, [base], {"set": "learning"}, {})
    assert [(item.subject, item.n) for item in results] == [("", 5), ("rivers", 2), ("mills", 1)]


def test_an_arm_after_another_counts_the_trainings_before_it() -> None:
    first, second, third = (
        Arm(name, "m", "", "", {}, "", "", None, False, (0,), after=before)
        for name, before in (("x", ""), ("y", "x"), ("z", "y"))
    )
    elsewhere = replace(second, model="n")
    arms = [third, elsewhere, replace(first, model="n"), second, first]
    assert [n_trainings(arm, arms) for arm in (first, second, third, elsewhere)] == [1, 2, 3, 2]


def test_an_answer_changed_where_most_seeds_answer_otherwise_than_base(tmp_path):
    """Questions 0 to 4; of three seeds 3, 2, 1, 0, 3 are right, base at 0, 3; the last loses tokens; with context all are."""
    records = Records(["sum"])
    right = {("base", 0, 0): {0, 3}, ("ft", 0, 0): {0, 1, 4}, ("ft", 1, 0): {0, 1, 4}, ("ft", 2, 0): {0, 2, 4},
             ("base", 0, 1): {0, 1, 2, 3, 4}}  # fmt: skip
    for arm, seed in dict.fromkeys((arm, seed) for arm, seed, _ in right):
        folder = tmp_path / f"{arm}-{seed}"
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for k in (k for of, number, k in right if (of, number) == (arm, seed)):
                for i in range(5):
                    value, cut = (
                        -0.5 - seed if i in right[arm, seed, k] else -9.0,
                        7 * (i == 4 and arm == "ft"),
                    )
                    store.add(f"k{k}{i}", Answer(f"q{i}", "set", arm, "texts", 0, k, ("p", "gone")[:k], 0, (value, -8.0),
                                                 (1, 1), (1, 1), cut))  # fmt: skip
            n = store.n_rows
        report = Report("evaluation", "t", ("m",), (), (), recalls=(Recall("set", 1, 3, 5),))
        write_json(folder / "report.json", {"format_version": 1, **to_json(report)})
        write_manifest(
            folder / "manifest.json", stage="eval", inputs={},
            recipe={"eval": {"models": {"m": "m"}, "questions": {"set": "set.jsonl"}}},
            counts={"answers": n, "scored_now": n, "stored": n},
        )  # fmt: skip
        manifest = json.loads((folder / "manifest.json").read_text())
        write_json(folder / "manifest.json", {**manifest, "written": f"2026-0{seed + 1}-02"})
        records.read("m", arm, seed, folder)
        records.read_report("m", arm, folder)
    questions = {
        "set": [Question(f"q{i}", f"Who is {i}?", ("a", "b"), 0, "", f"d{i}") for i in range(5)]
    }
    arms = [
        Arm(name, "m", "", "", {}, "", "", None, name == "base", (0,)) for name in ("base", "ft")
    ]
    rows = list(changed_answers(records, arms, questions, {("m", "base", "set"): 1}))
    assert [(row["arm"], row["question_id"], row["change"]) for row in rows] == [
        ("base+rag", "q1", "wrong to right"), ("base+rag", "q2", "wrong to right"), ("base+rag", "q4", "wrong to right"),
        ("ft", "q1", "wrong to right"), ("ft", "q3", "right to wrong"), ("ft", "q4", "wrong to right"),
    ]  # fmt: skip
    assert [row["seeds"] for row in rows] == [[]] * 3 + [[2, 3], [0, 3], [3, 3]]
    assert [(row["chosen"], row["base_chosen"], row["gold"]) for row in rows[3:]] == [
        (0, 1, 0),
        (1, 0, 0),
        (0, 1, 0),
    ]
    assert [row["context_ids"] for row in rows[2:4]] == [("p",), ()]
    assert (records.written, list(records.recalls)) == ("2026-03-02", [("", "set", 1)])
    assert records.n_cut("m", "ft", AskSetting("set", "texts", 0, 0)) == 1
    assert records.n_cut("m", "base", AskSetting("set", "texts", 0, 0)) == 0


def test_an_answer_has_the_tokens_of_the_choice_that_was_taken_and_a_written_one_its_own_and_its_thinking():
    records = Records(["sum"])
    fields = {
        "question_set": "set",
        "arm": "ft",
        "shots": 0,
        "k": 0,
        "context_ids": (),
        "gold": 0,
        "n_bytes": (),
    }
    choices = [
        Answer(f"q{i}", format="texts", log_probs=(-1, -i), n_tokens=(1, 4), **fields)
        for i in (0, 2)
    ]
    written = [
        Answer(
            "q", format="generate", log_probs=(), n_tokens=(7,), text="Kelm", n_thinking=2, **fields
        )
    ]
    settings = [AskSetting("set", name, 0, 0) for name in ("texts", "generate")]
    records.by_run["m", "ft", 0] = dict(zip(settings, (choices, written), strict=True))
    assert [records.answer_tokens("m", "ft", setting) for setting in settings] == [2.5, 9]


def test_perplexity_of_held_out_texts_is_the_geometric_mean_over_the_seeds(tmp_path):
    records = Records(["sum"])
    for seed, per_token, bits in ((0, 4.0, 1.0), (1, 9.0, 2.0)):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            answer = Answer(
                "q", "set", "m", "texts", 0, 0, (), 0, (-1.0, -2.0), (1, 1), (1, 1), n_chars=(1, 1)
            )
            read = Answer(
                "t",
                "stories",
                "m",
                PERPLEXITY_FORMAT,
                0,
                0,
                (),
                0,
                (-5.0,),
                (3,),
                (9,),
                n_chars=(9,),
            )
            store.add("a", answer)
            store.add("b", read)
        measured = Perplexity("model", "stories", 1, 3, per_token, bits)
        report = Report("evaluation", "", ("model",), (), (), perplexities=(measured,))
        write_json(folder / "report.json", to_json(report))
        records.read("m", "ft", seed, folder)
        assert len(records.perplexities) == seed, (
            "a choice on validation questions needs no report.json"
        )
        records.read_report("m", "ft", folder)
    (mean,) = records.mean_perplexities()
    assert (mean.model, mean.arm, mean.name, mean.by_seed) == ("m", "ft", "stories", (4.0, 9.0))
    assert math.isclose(mean.per_token, 6.0)  # the root of 4 x 9: the exponential of the mean loss
    assert mean.bits_per_byte == 1.5


def test_a_question_set_costs_the_prompts_of_all_its_subjects(tmp_path):
    whole = replace(make_result("ft", first(4, 10), None), prompt_tokens=31.5)
    results = [whole, replace(whole, subject="towns", prompt_tokens=20.0)]
    report = replace(make_evaluation(results), arms=())
    write_json(tmp_path / "report.json", {"format_version": 1, **to_json(report)})
    records = Records(["sum"])
    records.read_report("m", "ft", tmp_path)
    assert [*records.prompt_tokens.values()] == [31.5]
