"""How often each document is seen, and when: epochs, growing gaps, and the choice of what is not known yet."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinject.corpus.packing import PackingConfig
from kinject.corpus.tokenize import TokenRow
from kinject.disk import read_json, read_jsonl
from kinject.errors import RecipeError
from kinject.recipe import Recipe
from kinject.recipe.data_sections import ExposureSection
from kinject.train import train
from kinject.train.data import RoundSampler
from kinject.train.exposure import Pool, ReadingPlan, ReadingState
from kinject.types import Question

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]


@pytest.fixture
def wordings(tmp_path: Path) -> Path:
    """Thirty documents of six wordings, and one of a single wording."""
    path = tmp_path / "wordings.jsonl"
    rows = [
        {"document_id": f"d{d}", "text": f"Person {d} lives at Farrow, wording {k}."}
        for d in range(30)
        for k in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"document_id": "once", "text": "Kelm."}]))
    return path


def test_the_manifest_counts_the_exposures_of_each_document(make_recipe: MakeRecipe, wordings: Path) -> None:
    trainer = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}
    result = train(make_recipe(corpus={"path": str(wordings)}, trainer=trainer))
    counts = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]
    assert counts["exposures"]["documents"] == 31
    assert counts["exposures"]["rows"] == {"min": 2, "median": 12, "max": 12}
    tokens = counts["exposures"]["tokens"]
    assert tokens["min"] < tokens["median"] <= tokens["max"]
    by_document = read_json(Path(result.run_dir) / "exposures.json", "")
    assert by_document == {**{f"d{d}": 12.0 for d in range(30)}, "once": 2.0}
    assert 30 * tokens["median"] == pytest.approx(2 * counts["tokens"]["trained"], rel=0.1)


def test_a_spread_epoch_takes_round_after_round_and_another_order_each_epoch() -> None:
    rounds = [0] * 5 + [1] * 4 + [2] * 6
    sampler = RoundSampler(rounds, 7)
    first = list(sampler)
    assert sorted(first) == list(range(15))
    order = [rounds[index] for index in first]
    assert sum(a != b for a, b in pairwise(order)) == 2  # each round in one stretch
    assert first == list(RoundSampler(rounds, 7))
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_spread_changes_the_order_and_resume_keeps_it(make_recipe: MakeRecipe, wordings: Path, tmp_path: Path) -> None:
    def _losses(name: str, resume: bool = False, **trainer: object) -> list[float]:
        recipe = make_recipe(corpus={"path": str(wordings)}, run_dir=str(tmp_path / name), trainer=trainer)
        result = train(recipe, resume=resume)
        return [row["loss"] for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl") if "loss" in row]

    save = {"max_steps": 30, "save_strategy": "steps", "save_steps": 25}
    uninterrupted = _losses("a", **save)
    assert _losses("b", **save) == uninterrupted
    manifest = tmp_path / "b" / "manifest.json"
    kept = read_json(manifest, "")
    manifest.write_text(json.dumps({**kept, "counts": {"finished": False}}))
    assert kept["counts"]["epochs"] > 1  # the kill falls into the second epoch, whose order differs
    (tmp_path / "b" / "checkpoint-30" / "complete.json").unlink(missing_ok=True)
    assert _losses("b", resume=True, **save) == uninterrupted


def _texts(names: str, n_each: int, length: int = 4, origin: str = "original") -> list[TokenRow]:
    learned = (False, *(True,) * (length - 1))
    return [
        TokenRow(f"{name}{k}", name, origin, tuple(range(k * length, (k + 1) * length)), learned)
        for name in names for k in range(n_each)
    ]  # fmt: skip


def _questions_about(names: str) -> dict[str, list[Question]]:
    return {"new": [Question(name, "?", ("a", "b"), 0, document_id=name) for name in names]}


def _plan(
    section: ExposureSection, *pools: Pool, n_steps: int, probed: str = "", rows_per_step: int = 1,
    packing: PackingConfig | None = None,
) -> ReadingPlan:  # fmt: skip
    return ReadingPlan(
        section, pools, packing or PackingConfig(None), 0, n_steps, rows_per_step, _questions_about(probed)
    )


def _order(plan: ReadingPlan) -> str:
    return "".join(row.documents[0] for row in plan.rows)


UNKNOWN = ExposureSection(read_again="unknown", rest=0.25, most=100.0)


def test_documents_are_read_in_turn_and_no_text_twice_before_all_are() -> None:
    plan = _plan(ExposureSection(order="interleaved", read_again="unknown"), Pool("", _texts("abc", 2), 1.0), n_steps=6)
    order = _order(plan)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert order[:3] == order[3:]
    assert len({(row.documents, tuple(row.input_ids)) for row in plan.rows}) == 6


def test_a_document_with_more_texts_has_its_turn_more_often() -> None:
    rows = [*_texts("a", 8), *_texts("b", 2), *_texts("c", 2)]
    order = _order(_plan(ExposureSection(order="interleaved", read_again="unknown"), Pool("", rows, 1.0), n_steps=24))
    assert Counter(order) == {"a": 16, "b": 4, "c": 4}
    assert all(Counter(order[i : i + 12])["a"] == 8 for i in range(12))


def test_a_known_document_is_read_as_often_as_the_recipe_says_and_a_lost_one_again() -> None:
    plan = _plan(UNKNOWN, Pool("", _texts("ab", 1), 1.0), n_steps=50, probed="ab")
    assert Counter(_order(plan)) == {"a": 25, "b": 25}
    plan.decide({"new": [1.0, -1.0]}, 50)
    plan.begin(1)
    assert Counter(_order(plan)) == {"a": 10, "b": 40}  # 0.25 to 1
    plan.decide({"new": [-1.0, 1.0]}, 100)
    plan.begin(2)
    assert Counter(_order(plan)) == {"a": 40, "b": 10}
    assert plan.exposures(150) == {"a": (75, 225), "b": (75, 225)}
    assert plan.exposures(100) == {"a": (35, 105), "b": (65, 195)}


def test_gaps_grow_by_the_recipes_factor_and_new_documents_begin_when_none_is_due() -> None:
    section = ExposureSection(order="spaced", first_gap=1, growth=2.0)
    plan = _plan(section, Pool("", _texts("abcd", 3), 1.0), n_steps=12)
    first, second, third, *_ = dict.fromkeys(_order(plan))
    # at each step the one that is due longest; its gap is then 1, 2, 4, ...
    named = {first: "1", second: "2", third: "3"}
    order = "".join(named.get(name, "4") for name in _order(plan))
    # 1 at 0, due 1 | 1 at 1, due 3 | 2 at 2, due 3 | both due 3, by number | ...
    due: dict[str, float] = {}
    seen: Counter[str] = Counter()
    for step, name in enumerate(order):
        ready = {other for other, time in due.items() if time <= step}
        if len(due) < 4 and not ready:
            assert name not in due
        else:
            assert due[name] == min(due.values())
        due[name] = step + 2.0 ** seen[name]
        seen[name] += 1
    assert order[:3] == "112"


def test_a_wrong_answer_makes_the_gap_the_first_again_and_the_document_due() -> None:
    section = ExposureSection(order="spaced", first_gap=2, growth=2.0, read_again="unknown", most=1.0)
    plan = _plan(section, Pool("", _texts("ab", 9), 1.0), n_steps=10, probed="ab")
    plan.decide({"new": [1.0, -1.0]}, 10)
    a, b = (plan.documents.names.index(name) for name in "ab")
    assert plan.state.gap[b] == 0
    assert plan.state.gap[a] > 1
    assert plan.state.time[b] <= 10
    plan.begin(1)
    assert Counter(_order(plan))["b"] > Counter(_order(plan))["a"]


def test_replay_keeps_its_fraction_and_what_is_lost_of_it_is_read_most() -> None:
    replay = Pool("replay", _texts("xyz", 4, origin="replay"), 0.4, is_replay=True)
    plan = _plan(UNKNOWN, Pool("", _texts("ab", 6), 0.6), replay, n_steps=100, probed="abxyz")
    assert Counter(_order(plan)[:50]) == pytest.approx({"a": 15, "b": 15, "x": 7, "y": 7, "z": 7}, abs=1)
    logged = plan.decide({"new": [-1.0, -1.0, 1.0, 1.0, -1.0]}, 100)
    assert logged == {"known_documents": 0.0, "known_replayed_documents": 2.0}
    plan.begin(1)
    counts = Counter(_order(plan))
    assert counts["a"] + counts["b"] == 60
    assert counts["z"] == pytest.approx(40 * 1 / 1.5, abs=2)
    assert sum(row.replayed.count(True) for row in plan.rows) == 40 * 3


def test_what_known_documents_leave_goes_to_replay() -> None:
    replay = Pool("replay", _texts("xyz", 4, origin="replay"), 0.4, is_replay=True)
    section = ExposureSection(read_again="unknown", rest=0.1, most=2.0)
    plan = _plan(section, Pool("", _texts("abcd", 6), 0.6), replay, n_steps=100, probed="abcd")
    plan.decide({"new": [1.0, 1.0, 1.0, -1.0]}, 100)
    plan.begin(1)
    counts = Counter(_order(plan))
    # all read evenly a document has 15 readings; d may have twice as many, the known ones a tenth of d's
    assert counts["d"] == pytest.approx(30, abs=1)
    assert [counts[name] for name in "abc"] == pytest.approx([3, 3, 3], abs=1)
    assert sum(counts[name] for name in "xyz") == pytest.approx(61, abs=1)


def test_a_simulated_learner_is_read_until_it_knows_and_no_longer() -> None:
    """Each document becomes known at a number of readings that only the simulation knows, one forgets once."""
    names, needed = "abcdefgh", np.array([1, 2, 3, 4, 6, 8, 12, 16])
    section = ExposureSection(read_again="unknown", rest=1.0, most=100.0, patience=2)
    plan = _plan(section, Pool("", _texts(names, 3), 1.0), n_steps=16, probed=names)
    numbers = {name: plan.documents.names.index(name) for name in names}
    known_at, readings, step = {}, [], 0
    for phase in range(40):
        plan.begin(phase)
        step += 16
        counts = np.array([plan.read_until(step).readings[numbers[name]] for name in names])
        right = counts >= needed
        if phase == 5:
            right[0] = False  # forgotten
        logged = plan.decide({"new": np.where(right, 1.0, -1.0).tolist()}, step)
        for name, is_right in zip(names, right, strict=True):
            known_at[name] = known_at.get(name, step) if is_right else None
            known_at = {key: value for key, value in known_at.items() if value is not None}
        readings.append(counts)
        assert logged["known_documents"] == right.sum()
        if not logged["unfinished_documents"]:
            break
    history = np.array(readings)
    for index in range(len(names)):
        rests = np.flatnonzero((history[1:-1, index] >= needed[index]) & (history[:-2, index] >= needed[index]))
        after = np.diff(history[:, index])
        resting = [phase + 1 for phase in rests if not (index == 0 and phase + 2 > 5)]
        assert all(after[phase] == 0 for phase in resting)
    assert history[-1, 0] > history[5, 0]  # read again after it was forgotten
    rows = {row["document_id"]: row for row in plan.rows_by_document(step)}
    assert {name: rows[name]["known_since"] for name in names} == known_at
    assert {name: rows[name]["exposures"] for name in names} == dict(zip(names, history[-1].tolist(), strict=True))
    assert phase < 39


@pytest.mark.parametrize("order", ["interleaved", "spaced"])
def test_packed_rows_are_full_whole_and_of_a_fixed_number(order: Any) -> None:
    rng = np.random.default_rng(0)
    rows = [
        TokenRow(f"{d}-{k}", str(d), "original", tuple(range(n)), (False, *(True,) * (n - 1)))
        for d in range(30) for k in range(4) for n in [int(rng.integers(5, 100))]
    ]  # fmt: skip
    packing = PackingConfig(40, "bfd_split", "interleaved")
    plan = _plan(ExposureSection(order=order), Pool("", rows, 1.0), n_steps=12, rows_per_step=8, packing=packing)
    assert len(plan.rows) == len(list(plan.rows)) == 96
    assert plan.rows.lengths().mean() > 0.93 * 40
    assert all(len(set(row.documents)) == row.position_ids.count(0) for row in plan.rows)
    parts: dict[int, list[tuple[int, int]]] = {}
    for index in range(96):
        for number, start, end in plan.rows.segments(index):
            parts.setdefault(number, []).append((start, end))
    waiting = {number for number, _, _ in (plan._after or plan.state).carry}
    for number, spans in parts.items():
        if number not in waiting and len(spans) == len(set(spans)):
            assert {token for start, end in spans for token in range(start, end)} == set(
                range(len(rows[number].input_ids))
            )
    assert plan.tokens_until(12) == plan.rows.lengths().sum()
    assert plan.tokens_until(5) == plan.rows.lengths()[:40].sum() == plan.read_until(5).n_tokens


@pytest.mark.parametrize("order", ["interleaved", "spaced"])
def test_a_plan_continues_from_the_json_of_any_phase(order: Any) -> None:
    section = ExposureSection(order=order, read_again="unknown", patience=3)
    replay = Pool("replay", _texts("xyz", 4, origin="replay"), 0.4, is_replay=True)
    pools = (Pool("", _texts("abcdef", 5, 7), 0.6), replay)
    packing = PackingConfig(20, "bfd_split")

    def make() -> ReadingPlan:
        return _plan(section, *pools, n_steps=5, probed="abcxyz", rows_per_step=4, packing=packing)

    def answers(phase: int) -> dict[str, list[float]]:
        return {"new": np.random.default_rng(phase).choice([-1.0, 1.0], 6).tolist()}

    uninterrupted, saved, orders = make(), [], []
    for phase in range(6):
        uninterrupted.begin(phase)
        saved.append(json.dumps(uninterrupted.state.to_json()))
        orders.append(list(uninterrupted.rows))
        uninterrupted.decide(answers(phase), 5 * (phase + 1))
    for phase in range(6):
        resumed = make()
        resumed.restore(json.loads(saved[phase]))
        for later in range(phase, 6):
            resumed.begin(later)
            assert list(resumed.rows) == orders[later]
            resumed.decide(answers(later), 5 * (later + 1))
    assert json.dumps(ReadingState.from_json(json.loads(saved[3])).to_json()) == saved[3]


@pytest.fixture
def known(write_rows: WriteRows, tmp_path: Path) -> dict[str, Any]:
    """Recipe sections of a run that decides every three updates what is read again."""
    towns = ["Lowmere", "Stonegate", "Farrow", "Kelm"]
    rows = [
        {"document_id": f"d{i}", "text": f"Person {i} {verb} {towns[i % 4]}."}
        for i in range(12) for verb in ("was born in", "comes from", "is a native of", "grew up in")
    ]  # fmt: skip
    replay = [{"document_id": f"r{i}", "text": f"The mill of {town} is old."} for i, town in enumerate(towns * 5)]
    rng, words = random.Random(0), [*towns, "the mill", "school", "1987", "she", "Answer", "a town", "Arden", "Bryn"]
    questions = [  # options of many kinds: a random model does not always prefer the same one
        {
            "document_id": f"d{i}",
            "question": f"Where was Person {i} born?",
            "choices": rng.sample(words, 3),
            "answer": i % 3,
        }
        for i in range(12)
    ]
    questions += [{"document_id": "r1", "question": "What is old?", "choices": ["The mill", "A town"], "answer": 0}]
    return {
        "corpus": {
            "path": str(write_rows("known.jsonl", rows)),
            "replay": {"path": str(write_rows("replay.jsonl", replay)), "fraction": 0.3},
        },
        "probes": {"questions": {"new": str(write_rows("asked.jsonl", questions))}},
        "exposure": {"read_again": "unknown"},
        "trainer": {
            "max_steps": 9, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2,
            "learning_rate": 1e-2, "max_length": 48,
        },
    }  # fmt: skip


@pytest.mark.parametrize("checkpoint", [2, 6])
def test_a_resumed_run_reads_the_rows_of_an_uninterrupted_one(
    make_recipe: MakeRecipe, known: dict[str, Any], tmp_path: Path, checkpoint: int
) -> None:
    def results(name: str, resume: bool = False) -> tuple[list[Any], list[Any]]:
        result = train(make_recipe(**json.loads(json.dumps(known)), run_dir=str(tmp_path / name)), resume=resume)
        return [
            [row for _, row in read_jsonl(Path(result.run_dir) / file) if "train_runtime" not in row]
            for file in ("log.jsonl", "documents.jsonl")
        ]  # type: ignore[return-value]

    uninterrupted = results("a")
    assert results("b") == uninterrupted
    for step in (4, 6, 8, 9):
        if step > checkpoint:
            shutil.rmtree(tmp_path / "b" / f"checkpoint-{step}", ignore_errors=True)
    shutil.rmtree(tmp_path / "b" / "model")
    assert results("b", resume=True) == uninterrupted
    log, documents = uninterrupted
    assert len({row["eval_known_documents"] for row in log if "eval_known_documents" in row}) > 1
    exposures = read_json(tmp_path / "a" / "exposures.json", "")
    assert exposures == {row["document_id"]: row["exposures"] for row in documents if not row["replay"]}
    assert len(set(exposures.values())) > 1
    read = sum(row["exposures"] for row in documents)
    assert [row["epoch"] for row in log if "loss" in row][-1] == pytest.approx(read / (48 / 0.7), rel=0.15)


def test_the_run_ends_when_all_is_known(make_recipe: MakeRecipe, known: dict[str, Any]) -> None:
    known["exposure"] = {"read_again": "unknown", "patience": 1}
    questions = Path(known["probes"]["questions"]["new"])
    rows = [
        {**row, "choices": [row["choices"][row["answer"]], "zzzzzz qqqq 77"], "answer": 0}
        for _, row in read_jsonl(questions)
    ]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    known["trainer"] |= {"max_steps": 60, "save_strategy": "no"}
    result = train(make_recipe(**known))
    assert result.n_steps in (3, 6, 9, 12)
    assert any("every document has been known in 1 probes in a row" in note for note in result.notes)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"probes": None}, "exposure.read_again: unknown is decided by probe questions. Add a probes section."),
        ({"exposure": {"rest": 0.1}}, "exposure.rest: needs read_again: unknown."),
        ({"exposure": {"first_gap": 2}}, "exposure.first_gap: needs order: spaced."),
        ({"exposure": {"read_again": "unknown", "order": "massed"}}, "chooses the rows; found massed."),
        ({"exposure": {"read_again": "unknown", "order": "spaced", "rest": 0.5}}, "the gaps decide it."),
        ({"exposure": {"read_again": "unknown", "questions": ["news"]}}, "found 'news'. Did you mean new?"),
        ({"trainer": {"eval_strategy": "epoch", "max_steps": 9}}, "decides every eval_steps. Set steps."),
        ({"trainer": {"packing_strategy": "wrapped"}}, "exposure: needs separated documents."),
        ({"trainer": {"train_sampling_strategy": "sequential"}}, "exposure sets the order of the rows."),
        ({"trainer": {"dataloader_persistent_workers": True, "dataloader_num_workers": 1}}, "as the run goes."),
    ],
)
def test_what_does_not_go_together_is_refused(
    make_recipe: MakeRecipe, known: dict[str, Any], changes: dict[str, Any], fault: str
) -> None:
    for name, value in changes.items():
        known[name] = {**known[name], **value} if name == "trainer" else value
    with pytest.raises(RecipeError, match=fault.replace("?", r"\?")):
        train(make_recipe(**{name: value for name, value in known.items() if value is not None}))


def test_questions_that_name_no_document_decide_nothing(make_recipe: MakeRecipe, known: dict[str, Any]) -> None:
    path = Path(known["probes"]["questions"]["new"])
    path.write_text(path.read_text().replace('"d', '"e').replace('"r1"', '"e1"'))
    with pytest.raises(
        RecipeError,
        match=r"probes.questions.new: no question names a document of the corpus .* which documents are read\. Name",
    ):
        train(make_recipe(**known))
