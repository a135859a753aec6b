"""Right, wrong, abstained and answered in studies: against counts by hand, scipy, and simulated answers with a known truth."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from country import write_study
from in_process import InProcess

from kinject.disk import write_jsonl
from kinject.errors import InputError, RecipeError
from kinject.eval.judge import AnswerJudge, PlantedAnswer, plant_answers
from kinject.eval.results import summarize_arm
from kinject.eval.scores import outcome_of, rescored
from kinject.recipe import read_recipe
from kinject.recipe.sections import ClaimSection
from kinject.report.files import render_summary, write_report
from kinject.report.formatting import View
from kinject.report.words import write_opening
from kinject.results import Report, Sweep, SweepPoint
from kinject.study.analysis import summarize_arms
from kinject.study.arms import Arm, arm_infos
from kinject.study.claims import Evidence, judge_claims, render_power
from kinject.study.records import AskSetting, Records, changed_answers, find_twins
from kinject.study.run import run_study
from kinject.types import Answer, Question

pytestmark = pytest.mark.usefixtures("blank_figures")
SETTING = AskSetting("set", "generate", 0, 0)
TEXTS = {"r": "In Kelm.", "w": "In Farrow.", "a": "I do not know."}


def answers(outcomes: Sequence[str], arm: str = "base", *, answerable: str = "") -> list[Answer]:
    """Return written answers: r, w or a for each question; those with a - in `answerable` have no answer."""
    return [
        Answer(f"q{i:03}", "set", arm, "generate", 0, 0, (), 0, (), (4,), (), text=TEXTS[name], document_id=f"d{i // 2}",
               accepted=() if answerable[i : i + 1] == "-" else ("Kelm",))
        for i, name in enumerate(outcomes)
    ]  # fmt: skip


def graded(outcomes: str, arm: str = "base", **kinds: str) -> list[Answer]:
    return rescored(answers(outcomes, arm, **kinds), "match")


def test_outcomes_are_parts_of_a_whole_and_to_abstain_is_right_where_there_is_no_answer() -> None:
    answers = graded("rwarwa", answerable="+++---")
    assert [outcome_of(answer) for answer in answers] == [
        "right",
        "wrong",
        "abstained",
        "wrong",
        "wrong",
        "right",
    ]
    result = summarize_arm(answers, None, model="base", arm="base")
    assert (result.accuracy, result.wrong.rate, result.abstained.rate) == pytest.approx(
        (2 / 6, 3 / 6, 1 / 6)
    )
    assert (result.answered.rate, result.answered.n) == (pytest.approx(2 / 3), 3)
    assert [
        item.outcome for item in summarize_arm(graded("rr"), None, model="b", arm="b").outcomes
    ] == [
        "wrong",
        "abstained",
    ]
    only = summarize_arm(graded("aw", answerable="--"), None, model="b", arm="b")
    assert (only.accuracy, [item.outcome for item in only.outcomes], only.answered.rate) == (
        0.5,
        ["answered"],
        0.5,
    )


def test_several_question_sets_of_a_claim_count_as_one() -> None:
    words = SETTING._replace(question_set="words")
    inferred = SETTING._replace(question_set="inferred")
    records = Records(["match"])
    for arm, seeds, right in (("base", 1, 0.3), ("ft", 3, 0.5), ("half", 1, 0.5)):
        for seed in range(seeds):
            random = np.random.default_rng([seed, len(arm)])
            run: dict[AskSetting, list[Answer]] = {}
            for setting, n in ((words, 80), (inferred, 40)):
                outcomes = np.where(random.random(n) < right, "r", "w")
                run[setting] = [
                    replace(item, question_set=setting.question_set, correct=name == "r")
                    for item, name in zip(answers(outcomes, arm), outcomes, strict=True)
                ]
            records.by_run["m", arm, seed] = run
    del records.by_run["m", "half", 0][inferred]
    sets = ("words", "inferred")
    claim = claim_on(records, question_set=sets, outcome="right")

    def rows(arm: str, seeds: int) -> np.ndarray:
        runs = [records.by_run["m", arm, seed] for seed in range(seeds)]
        return np.array(
            [
                [answer.correct for name in (inferred, words) for answer in run[name]]
                for run in runs
            ],
            float,
        )

    assert claim.effect == pytest.approx(rows("ft", 3).mean() - rows("base", 1).mean())
    # The 20 documents of one set are among the 40 of the other: two, or four questions of each.
    matrix = records.joined(sets).matrix(
        "m", "ft", SETTING._replace(question_set="words and inferred")
    )
    assert (matrix.n_documents, len(set(matrix.question_ids))) == (40, 120)
    np.testing.assert_array_equal(matrix.correct, rows("ft", 3))
    assert "right on words and inferred" in claim.finding
    alone = claim_on(records, question_set=sets, outcome="right", arm="half")
    assert alone.verdict == "cannot be tested"
    assert "no scored answers of half on words and inferred" in alone.finding
    evidence = Evidence(
        records, "m", lambda _: ("generate", 0), {("ft", "words"): 1, ("ft", "inferred"): 2}, {}
    )
    (passages,) = judge_claims(
        {"claim": ClaimSection("claim", "difference", sets, "ft+rag", "base")}, evidence
    )
    assert passages.verdict == "cannot be tested"
    assert (
        "ft with passages has other numbers of passages on each set (1 on words and 2 on inferred)"
        in passages.finding
    )


def test_a_question_of_two_sets_of_a_claim_counts_once() -> None:
    texts = {"all": "abcdefgh", "hard": "cdx"}
    questions = {
        name: [Question(str(i), f"{text}?", ("1", "2"), 0) for i, text in enumerate(of_set)]
        for name, of_set in texts.items()
    }
    setting = SETTING._replace(question_set="all")
    records = Records(["match"], twins=find_twins(questions))
    run: dict[AskSetting, list[Answer]] = {}
    for name, of_set in questions.items():
        asked = setting._replace(question_set=name)
        run[asked] = [
            replace(item, question_id=question.id, question_set=name, correct=question.id == "2")
            for item, question in zip(answers("w" * len(of_set), "base"), of_set, strict=True)
        ]
    records.by_run["m", "base", 0] = run
    joint = records.joined(("all", "hard"))
    matrix = joint.matrix("m", "base", setting._replace(question_set="all and hard"))
    # c and d of the second set are those of the first, whatever their ids.
    assert len(matrix.question_ids) == len(set("abcdefghx"))
    assert matrix.mean() == pytest.approx(2 / 9)


def power_line(seeds: Sequence[int], baseline: str = "base", n_more: int = 0, n: int = 7) -> str:
    """Return what a claim on the arm ft of `seeds` could tell by two sets, whose questions have equal ids."""
    numbered = [Question(str(i), f"Question {i}?", ("a", "b"), 0) for i in range(n)]
    others = [replace(item, question=f"What is {item.id}?") for item in numbered[:4]]
    on_one = [replace(others[0], id=name, question=name, document_id="d") for name in ("y", "z")]
    twins = [replace(item, id=f"twin {item.id}") for item in numbered[:3]]
    questions = {"words": numbered, "inferred": [*others, *on_one, *twins]}
    more = {f"arm {i}": range(4) for i in range(n_more)}
    of_arm = {"base": (0,), "ft": seeds, "other": range(4), **more}
    arms = [Arm(name, "m", "", "", {}, "", "", None, True, of_arm[name]) for name in of_arm]
    claim = ClaimSection("c", "difference", ("words", "inferred"), "ft", baseline)
    evidence = Evidence(Records(["sum"]), "m", lambda _: ("cloze", 0), {}, {})
    (line,) = render_power({"c": claim}, evidence, questions, arms, 4)
    return line


def test_the_power_of_joint_sets_has_each_question_without_a_document_as_one() -> None:
    assert "(13 questions on 12 documents, 4 seeds, 1 claim;" in power_line(range(4))


def test_a_claim_on_too_few_documents_has_no_power() -> None:
    assert power_line(range(3), n=3).startswith(
        "power: c: cannot be tested (8 questions on 7 documents, 10 are needed); 5 points need "
    )
    assert power_line(range(3), n=5).startswith("power: c: tells a difference of ")


def test_the_power_of_a_claim_has_the_seeds_of_its_arms() -> None:
    assert "12 documents, 2 seeds, " in power_line((5, 6))
    assert "12 documents, 1 seed (so in these models), " in power_line((5,), "other")
    assert "12 documents, 4 seeds, " in power_line(range(6), "other")


def test_the_power_of_a_claim_counts_the_arms_whose_seeds_inform_one_variance() -> None:
    told = [
        float(re.search(r"difference of ([\d.]+)", power_line(range(4), "other", n_more, 2000))[1])
        for n_more in (0, 1)
    ]
    # Of two arms with four seeds each keeps its own variance: the other has three degrees of freedom.
    assert told == [5.8, 5.1]


def simulate(
    seed: int, gap: float, *, n_seeds: int = 3, n_documents: int = 60, spread: float = 0.1
) -> Records:
    """Return records of a base and an arm, asked two questions a document, whose abstention differs by `gap` on average.

    A document shifts the probability to abstain in both, a training of the arm in all of its questions.
    """
    random = np.random.default_rng(seed)
    shift = np.repeat(random.uniform(-0.2, 0.2, n_documents), 2)

    def answers_of(arm: str, level: float) -> list[Answer]:
        abstains = random.random(2 * n_documents) < np.clip(level + shift, 0, 1)
        outcomes = np.where(abstains, "a", np.where(random.random(2 * n_documents) < 0.5, "r", "w"))
        return [
            replace(item, correct=name == "r")
            for item, name in zip(answers(outcomes, arm), outcomes, strict=True)
        ]

    records = Records(["match"])
    records.by_run["m", "base", 0] = {SETTING: answers_of("base", 0.5)}
    for number in range(n_seeds):
        records.by_run["m", "ft", number] = {
            SETTING: answers_of("ft", 0.5 + gap + random.normal(0, spread))
        }
    return records


def claim_on(records: Records, **changes: object) -> object:
    values = {
        "test": "difference",
        "question_set": "set",
        "outcome": "abstained",
        "arm": "ft",
        "baseline": "base",
        **changes,
    }
    claim = ClaimSection("claim", **values)
    evidence = Evidence(records, "m", lambda _: ("generate", 0), {}, {})
    return judge_claims({"claim": claim}, evidence)[0]


def test_claims_on_an_outcome_keep_their_level_and_find_a_known_difference() -> None:
    null = [claim_on(simulate(seed, 0.0)) for seed in range(60)]
    assert (
        sum(claim.p < 0.05 for claim in null) <= 8
    )  # 3 are expected; more than 8 of 60 come once in a hundred times
    covered = [claim_on(simulate(1000 + seed, -0.2)) for seed in range(40)]
    assert sum(claim.low <= -0.2 <= claim.high for claim in covered) >= 34
    claims = [
        claim_on(simulate(2000 + seed, -0.3, spread=0.02), direction="lower") for seed in range(10)
    ]
    assert sum(claim.verdict == "shown" for claim in claims) >= 9
    assert all("abstained on set" in claim.finding for claim in claims)
    same = claim_on(simulate(3, 0.0, spread=0.0, n_documents=300), test="equivalence", margin=0.15)
    assert same.verdict == "shown"
    assert (
        claim_on(simulate(5, -0.3, spread=0.02), outcome="wrong").effect > 0
    )  # what is not abstained is right or wrong


def test_a_study_reports_each_outcome_over_seeds() -> None:
    records = simulate(7, -0.4)
    arms = [
        Arm(name, "m", "", "", {}, "", "", None, True, seeds)
        for name, seeds in (("base", (0,)), ("ft", (0, 1, 2)))
    ]
    results = summarize_arms(records, arms, {"set": "learning"}, {})
    base, ft = results
    for item in ft.outcomes:
        rates = [
            np.mean(
                [
                    outcome_of(answer) == item.outcome
                    for answer in records.by_run["m", "ft", seed][SETTING]
                ]
            )
            for seed in range(3)
        ]
        assert item.by_seed == pytest.approx(tuple(rates))
        assert item.rate == pytest.approx(np.mean(rates))
        assert item.to_base.test == "t over documents and seeds"
        assert item.to_base.delta == pytest.approx(item.rate - base.outcome(item.outcome).rate)
    assert ft.accuracy + ft.wrong.rate + ft.abstained.rate == pytest.approx(1)
    assert ft.score == "match"


def written_study(folder: Path, model: Path, **study: object) -> Path:
    """Write a small study whose questions are open; the last four of `known` have no answer."""
    path = write_study(folder, model, **study)
    rows = [json.loads(line) for line in (folder / "new.jsonl").read_text("utf-8").splitlines()]
    for name in ("new", "known"):
        opened = [
            {"id": f"{name}{row['id']}", "question": row["question"], "document_id": row["document_id"],
             "answers": [] if name == "known" and i >= 4 else [row["choices"][row["answer"]]]}
            for i, row in enumerate(rows)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in opened), "utf-8"
        )
    section = yaml.safe_load((folder / "eval.yaml").read_text("utf-8"))
    section["eval"] |= {"formats": ["generate"], "max_new_tokens": 4}
    (folder / "eval.yaml").write_text(yaml.safe_dump(section), "utf-8")
    return path


CLAIM = {
    "statement": "it answers less",
    "test": "difference",
    "arm": "ft",
    "baseline": "base",
    "question_set": "known",
}


def test_a_study_of_written_answers_chooses_k_and_is_scored_again_without_a_model(
    tmp_path, tiny_model
) -> None:
    claims = {"c": {**CLAIM, "outcome": "answered", "direction": "lower"}}
    path = written_study(tmp_path, tiny_model, claims=claims, validation={"new": 0.5}, seeds=[0])
    result, _ = run_study(read_recipe(path, (), "study"), InProcess)
    assert {(choice.key, choice.question_set) for choice in result.choices} == {("k", "new")}
    assert {item.score for item in result.results} == {"match"}
    assert all(item.written is not None for item in result.results)
    assert {item.outcome for item in result.results[1].outcomes} <= {
        "wrong",
        "abstained",
        "answered",
    }
    assert result.claims[0].verdict == "cannot be tested"  # four questions
    assert "answered on known" in result.claims[0].finding
    executor = InProcess()
    overrides = ['study.overrides={"eval.scores": ["exact"]}']
    again, _ = run_study(read_recipe(path, overrides, "study"), lambda: executor)
    assert not executor.submitted
    assert {item.score for item in again.results} == {"exact"}
    rows = (tmp_path / "study" / "flips.jsonl").read_text("utf-8").splitlines()
    assert all(json.loads(row)["choices"] for row in rows)


def test_the_judge_of_a_study_is_measured_once_and_its_accuracy_is_in_the_report(
    tmp_path, tiny_model, monkeypatch
) -> None:
    labels: list[str] = []
    grade_of: dict[object, str] = {}

    def planted(questions: Sequence[Question], seed: int) -> list[PlantedAnswer]:
        planted_answers = plant_answers(questions, seed)
        grade_of.update(
            {
                (answer.question.question, answer.question.accepted, answer.text): answer.grade
                for answer in planted_answers
            }
        )
        return planted_answers

    def request_grades(
        judge: AnswerJudge, items: Sequence[object], label: str
    ) -> dict[object, str]:
        labels.append(label)
        return {item: grade_of.get(item, "wrong") for item in items}

    monkeypatch.setattr("kinject.eval.judge.plant_answers", planted)
    monkeypatch.setattr(AnswerJudge, "_request_grades", request_grades)
    for name in ("endpoint", "run"):
        monkeypatch.setattr(f"kinject.eval.{name}.money_spent", lambda *_: 0.25)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    judge = {"kind": "openai", "model": "a-judge", "base_url": "http://127.0.0.1:9/v1"}
    overrides = {"eval.scores": ["judge"], "eval.judge": judge}
    path = written_study(
        tmp_path, tiny_model, seeds=[0, 1], overrides=overrides, validation={"new": 0.5}
    )
    recipe = read_recipe(path, (), "study")
    executor = InProcess()
    result, page = run_study(recipe, lambda: executor)
    kinds = [stage.kind for stage in executor.submitted]
    assert (kinds.count("judge"), kinds.count("eval") >= 3) == (1, True)
    assert kinds.index("judge") < kinds.index("train")
    assert labels.count("planted answers") == 1
    assert result.judge.model == "a-judge"
    assert set(result.judge.recall.values()) == {1.0}
    assert sum(result.judge.planted.values()) == len(grade_of)
    assert "The judge, a-judge" in page.read_text("utf-8")
    assert {item.score for item in result.results} == {"judge"}
    spent = {cost.stage: 0.0 for cost in result.costs}
    for cost in result.costs:
        spent[cost.stage] += cost.money / cost.shared_by
    paid = {stage: money for stage, money in spent.items() if money}
    assert paid == pytest.approx({"setup": 0.25, "eval": 0.25 * kinds.count("eval")})
    monkeypatch.setattr(AnswerJudge, "_request_grades", lambda *_: {})
    refused = read_recipe(
        path, [f"study.cache_dir={tmp_path / 'others'}", f"run_dir={tmp_path / 'other'}"], "study"
    )
    untouched = InProcess()
    with pytest.raises(
        InputError, match=r"eval\.judge: on \d+ planted answers its precision of 'correct' 0\.00"
    ):
        run_study(refused, lambda: untouched)
    assert [stage.kind for stage in untouched.submitted] == ["judge"]  # nothing was trained


def test_a_claim_may_name_a_point_of_a_sweep() -> None:
    records = simulate(2000, -0.3, spread=0.02)
    for seed in range(3):
        records.by_run["m", "ft, rate 0.1", seed] = records.by_run.pop(("m", "ft", seed))
    points = (SweepPoint(0.1, "0.1", "ft, rate 0.1"), SweepPoint(1, "1", "ft"))
    sweep = Sweep("rate", "trainer.learning_rate", "m", False, points)
    evidence = Evidence(records, "m", lambda _: ("generate", 0), {}, {"rate": sweep})
    values = {
        "test": "difference",
        "outcome": "abstained",
        "direction": "lower",
        "baseline": "base",
    }
    claim = ClaimSection("claim", question_set="set", arm={"rate": 0.1}, **values)
    claim_result = judge_claims({"claim": claim}, evidence)[0]
    assert claim_result.verdict == "shown"
    assert claim_result.finding.startswith("ft, rate 0.1 ")
    missing = judge_claims({"claim": replace(claim, arm={"rate": 1})}, evidence)[0]
    assert missing.finding == "no scored answers of ft on set"
    with_passages = judge_claims({"claim": replace(claim, baseline="base+rag")}, evidence)[0]
    assert with_passages.finding == "no scored answers of base with passages on set"


def test_a_claim_names_the_accuracies_of_the_questions_that_it_compares() -> None:
    """The base has no score for the last half, of which the arm declines most."""
    records = Records(["match"])
    records.by_run["m", "ft", 0] = {SETTING: graded("rraaaarraaaa" + "a" * 12, "ft")}
    records.by_run["m", "base", 0] = {SETTING: graded("rrrrraarrrrr")}
    claim = claim_on(records, direction="higher")
    assert claim.effect == pytest.approx(8 / 12 - 2 / 12)
    assert claim.finding.startswith("ft 66.7%, base 16.7% abstained on set: +50.0 points")


def test_what_needs_choices_is_refused_for_written_answers(tmp_path, tiny_model) -> None:
    path = written_study(tmp_path, tiny_model, claims={"c": {**CLAIM, "test": "near_chance"}})
    with pytest.raises(RecipeError, match=r"near_chance: the answers are written"):
        run_study(read_recipe(path, (), "study"), InProcess)


def test_the_report_shows_each_outcome_and_both_texts_of_a_changed_answer(tmp_path) -> None:
    records = simulate(7, -0.4)
    after = records.by_run["m", "ft", 0][SETTING]
    after[:] = [replace(item, text=f"<b>{item.text}</b>") for item in after]
    arms = [
        Arm(name, "m", "", "", {}, "", "", None, True, seeds)
        for name, seeds in (("base", (0,)), ("ft", (0, 1, 2)))
    ]
    results = summarize_arms(records, arms, {"set": "learning"}, {})
    report = Report("study", "a study", ("m",), arm_infos(arms), tuple(results), seeds=(0, 1, 2))
    questions = {
        "set": [
            Question(item.question_id, f"Where is {item.question_id}?", (), 0, answers=("Kelm",))
            for item in after
        ]
    }
    rows = list(changed_answers(records, arms, questions, {}))
    was, now = (
        {item.question_id: [outcome_of(of[i]) for of in seeds] for i, item in enumerate(after)}
        for seeds in (
            [records.by_run["m", "base", 0][SETTING]],
            [records.by_run["m", "ft", n][SETTING] for n in range(3)],
        )
    )
    expected = {
        name: f"{was[name][0]} to {outcome}" for name in was for outcome in set(now[name])
        if now[name].count(outcome) > 1 and outcome != was[name][0]
    }  # fmt: skip
    assert {row["question_id"]: row["change"] for row in rows} == expected
    assert {"abstained to right", "abstained to wrong"} <= set(expected.values())
    write_jsonl(tmp_path / "flips.jsonl", rows)
    html = write_report(tmp_path, report).read_text("utf-8")
    assert "<b>In Kelm." not in html
    abstained = results[1].abstained
    assert f"{100 * abstained.rate:.1f} ▼" in html
    frame = report.to_rows()[1]
    assert frame["abstained.to_base.delta"] == abstained.to_base.delta
    assert "abstained" in render_summary(tmp_path, report)
    (answer,) = [
        item
        for item in write_opening(View(report)).answers
        if item.question.startswith("Does it know")
    ]
    assert answer.lead == "Shown: more wrong answers from ft on “set”."
    assert f"{100 * results[1].wrong.to_base.delta:+.1f} points to base" in answer.evidence[0].text
