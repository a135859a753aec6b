"""The whole of `kinject eval` on tiny models: what is asked, what is stored, what comes out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from kinject.disk import Journal, lock_dir
from kinject.errors import DiskError, InputError, RecipeError
from kinject.eval import evaluate
from kinject.eval.results import correct_families, summarize_arm
from kinject.eval.run import evaluate_shard, merge_answers
from kinject.eval.scoring.answers import AnswerStore, read_answers
from kinject.heap.collect import collect
from kinject.models import load_model, new_model
from kinject.recipe import read_recipe
from kinject.report.files import render_card_tables, render_summary, write_report
from kinject.results import Report
from kinject.shards import Shard
from small import naive_log_prob

ROWS = [
    {
        "id": f"q{i}",
        "question": f"Where was {name} born?",
        "choices": choices,
        "answer": i % 3,
        "document_id": name,
    }
    for i, (name, choices) in enumerate(
        [
            ("Arden", ["Lowmere", "Stonegate", "Farrow"]),
            ("Bryn", ["Kelm", "the mill", "town of Farrow"]),
            ("Kelm", ["school", "Lowmere", "1987"]),
            ("Farrow", ["Question", "Answer", "Kelm"]),
        ]
    )
]
DOCUMENTS = [
    {"id": name, "text": f"{name} was born. The town of {name}."}
    for name in ("Arden", "Bryn", "Kelm")
]
Evaluate = Callable[..., Report]


@pytest.fixture
def run(tmp_path: Path, tiny_model: Path, write_rows: Callable[..., Path]) -> Evaluate:
    """Evaluate the tiny model with `section` changed, from a recipe file below tmp_path."""
    questions = write_rows("questions.jsonl", ROWS)
    write_rows(
        "shots.jsonl",
        [{**row, "id": f"s{row['id']}", "question": f"Who is {row['id']}?"} for row in ROWS],
    )
    write_rows("documents.jsonl", DOCUMENTS)

    def _run(**section: Any) -> Report:
        whole = {
            "models": {"base": str(tiny_model)},
            "questions": {"new": str(questions)},
            **section,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(
            yaml.safe_dump(
                {"run_dir": str(tmp_path / "run"), "eval": {"control": False, **whole}},
                sort_keys=False,
            )
        )
        return evaluate(read_recipe(path, (), "eval"))

    return _run


def manifest(tmp_path: Path) -> dict[str, Any]:
    return json.loads((tmp_path / "run" / "manifest.json").read_text())


def naive(folder: Path, context: str, continuations: Sequence[str]) -> list[float]:
    """Log-probs in float64 from whole strings, by transformers alone."""
    loaded = load_model(str(folder))
    return [
        naive_log_prob(loaded.model.double(), loaded.tokenizer, context, text)
        for text in continuations
    ]


OPEN = [
    {
        "id": "o1",
        "question": "Where was Arden born?",
        "answers": ["Lowmere", "the town of Lowmere"],
        "document_id": "Arden",
    },
    {"id": "o2", "question": "Where was Bryn born?", "choices": ["Kelm", "Farrow"], "answer": 1},
    {"id": "o3", "question": "Who was born in Nowhere?", "answers": []},
]


def test_written_answers_are_stored_once_and_scored_by_any_metric_later(
    run, tmp_path, write_rows, tiny_model
):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    section: dict[str, Any] = {
        "models": {"base": str(tiny_model), "other": str(other)},
        "questions": {"open": {"path": str(write_rows("open.jsonl", OPEN)), "shots_from": str(tmp_path / "open.jsonl")}},
        "formats": ["generate"], "shots": [0, 1], "max_new_tokens": 5, "stop": [],
    }  # fmt: skip
    report = run(**section)
    answers = read_answers(tmp_path / "run" / "answers.jsonl")
    texts = {(answer.question_id, answer.arm, answer.shots): answer.text for answer in answers}
    assert [(r.arm, r.format, r.shots, r.score) for r in report.results][:2] == [
        ("base", "generate", 0, "match"), ("other", "generate", 0, "match"),
    ]  # fmt: skip
    assert all(result.chance == 0 and result.written is not None for result in report.results)
    assert {answer.question_id: answer.accepted for answer in answers} == {
        "o1": ("Lowmere", "the town of Lowmere"), "o2": ("Farrow",), "o3": (),
    }  # fmt: skip
    assert all(answer.n_tokens[0] <= 5 for answer in answers)
    loaded = load_model(str(tiny_model))
    ids = loaded.tokenizer("Question: Where was Arden born?\nAnswer: Lowmere\n\nQuestion: Where was Bryn born?\nAnswer:",
                           return_tensors="pt")  # fmt: skip
    written = loaded.model.generate(**ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    expected = loaded.tokenizer.decode(
        written[0, ids.input_ids.shape[1] :], skip_special_tokens=True
    )
    assert texts["o2", "base", 1] == expected
    again = run(**section, scores=["exact", "contains"])
    assert manifest(tmp_path)["counts"]["scored_now"] == 0
    assert {r.score for r in again.results} == {"exact", "contains"}


def test_stored_log_probs_are_those_of_the_prompts_as_documented(run, tmp_path, tiny_model):
    report = run(
        questions={
            "new": {
                "path": str(tmp_path / "questions.jsonl"),
                "shots_from": str(tmp_path / "shots.jsonl"),
            }
        },
        formats=["letters", "texts"],
        shots=[0, 1],
        retrieval={"documents": [str(tmp_path / "documents.jsonl")], "k": [1]},
    )
    answers = {
        (a.format, a.shots, a.k, a.question_id): a
        for a in read_answers(tmp_path / "run" / "answers.jsonl")
    }
    assert len(answers) == 2 * 2 * 2 * len(ROWS)
    assert sum(result.n for result in report.results) == len(answers)
    texts = answers["texts", 1, 1, "q1"]
    expected = naive(
        tiny_model,
        "Question: Who is q0?\nAnswer: Lowmere\n\nBryn was born. The town of Bryn.\n\n"
        "Question: Where was Bryn born?\nAnswer:",
        [" Kelm", " the mill", " town of Farrow"],
    )
    np.testing.assert_allclose(texts.log_probs, expected, rtol=0, atol=1e-4)
    assert texts.n_bytes == (4, 8, 14)
    letters = answers["letters", 0, 0, "q2"]
    expected = naive(
        tiny_model,
        "Where was Kelm born?\nA. school\nB. Lowmere\nC. 1987\nAnswer:",
        [" A", " B", " C"],
    )
    np.testing.assert_allclose(letters.log_probs, expected, rtol=0, atol=1e-4)
    assert (letters.gold, letters.n_bytes, letters.truncated) == (2, (1, 1, 1), 0)


def test_a_model_that_reads_later_tokens_gets_no_score(
    run: Evaluate,
    tmp_path: Path,
    tiny_model: Path,
    tiny_config: dict[str, Any],
    tiny_tokenizer: Any,
) -> None:
    """Its log-prob of a token would be that of a token that it has read."""
    both_ways = {
        **tiny_config,
        "model_type": "gemma3_text",
        "head_dim": 16,
        "use_bidirectional_attention": True,
    }
    new_model(both_ways, tiny_tokenizer, 0).save_pretrained(tmp_path / "both-ways")
    tiny_tokenizer.save_pretrained(tmp_path / "both-ways")
    with pytest.raises(
        InputError,
        match=r"both-ways: gemma3_text is no causal language model .* reads later tokens",
    ):
        run(models={"base": str(tiny_model), "other": str(tmp_path / "both-ways")})


def test_the_report_follows_from_the_stored_answers(run, tmp_path):
    report = run(retrieval={"documents": [str(tmp_path / "documents.jsonl")], "k": [1, 2]})
    answers = read_answers(tmp_path / "run" / "answers.jsonl")
    base = [answer for answer in answers if answer.k == 0]
    assert [(result.arm, result.k) for result in report.results] == [
        ("base", 0),
        ("base", 1),
        ("base", 2),
    ]
    by_k = [(k, [answer for answer in answers if answer.k == k]) for k in (0, 1, 2)]
    results = [
        summarize_arm(arm_answers, base if k else None, model="base", arm="base")
        for k, arm_answers in by_k
    ]
    assert [replace(result, prompt_tokens=None) for result in report.results] == correct_families(
        results
    )
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [result["accuracy"] for result in stored["results"]] == [
        result.accuracy for result in report.results
    ]
    assert manifest(tmp_path)["counts"] == {
        "answers": 12,
        "scored_now": 12,
        "stored": 12,
        "other_versions": "",
    }


def test_answers_that_older_packages_scored_are_said_to_be_so(run, tmp_path):
    run()
    path = tmp_path / "run" / "manifest.json"
    old = manifest(tmp_path)
    old["versions"]["transformers"] = "4.99"
    path.write_text(json.dumps(old))
    # The second run's manifest has the versions of now: the third finds none of the first there.
    for _ in range(2):
        notes = run().notes
        assert [("transformers 4.99 then" in note) for note in notes if "then" in note] == [True]
    (tmp_path / "run" / "answers.jsonl").unlink()
    assert not [note for note in run().notes if "then" in note]


def test_answers_of_an_evaluation_that_was_stopped_under_older_packages_are_said_to_be_so(
    run, tmp_path, monkeypatch
):
    """It has no manifest, which has the versions of one that was finished."""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("kinject.eval.run.make_report", stop)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert not (tmp_path / "run" / "manifest.json").exists()
    path = tmp_path / "run" / "versions.json"
    versions = json.loads(path.read_text())
    assert not [note for note in run().notes if "then" in note]
    (tmp_path / "run" / "manifest.json").unlink()
    path.write_text(json.dumps(versions | {"torch": "2.0"}))
    for _ in range(2):
        assert [("torch 2.0 then" in note) for note in run().notes if "then" in note] == [True]
    assert "torch 2.0" in manifest(tmp_path)["counts"]["other_versions"]


def test_retrieved_passages_are_named_with_their_recall(run, tmp_path):
    report = run(retrieval={"documents": [str(tmp_path / "documents.jsonl")], "k": [2]})
    with_context = [a for a in read_answers(tmp_path / "run" / "answers.jsonl") if a.k == 2]
    assert all(len(set(answer.context_ids)) == 2 for answer in with_context)
    assert [(recall.k, recall.n_found, recall.n) for recall in report.recalls] == [(2, 3, 4)]
    with pytest.raises(
        RecipeError, match=r"eval\.retrieval\.k: found 99, but the documents hold only \d+ passages"
    ):
        run(retrieval={"documents": [str(tmp_path / "documents.jsonl")], "k": [1, 99]})


def test_the_manifest_names_a_folder_of_documents_by_what_was_collected(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    heap = tmp_path / "heap"
    heap.mkdir()
    for name in ("Bryn", "Kelm"):
        (heap / f"{name}.txt").write_text(f"{name} was born. The town of {name}.\n")
    hashes = []
    for text in ("Doran went to school.", "Doran went to sea."):
        (heap / "Doran.txt").write_text(text)
        run(retrieval={"documents": [str(heap)], "k": [1]})
        hashes.append(manifest(tmp_path)["inputs"][str(heap)])
    assert hashes[0] != hashes[1]
    assert hashes[1] == collect([heap]).fingerprint


def test_a_first_run_reads_none_of_its_answers_from_disk(run, tmp_path, write_rows, monkeypatch):
    texts = write_rows("texts.jsonl", [{"id": "x", "text": "Bryn was born in Kelm."}])
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "row_at", None)
        report = run(formats=["texts", "rotations"], perplexity_corpus=str(texts))
    rows = (tmp_path / "run" / "answers.jsonl").read_bytes().splitlines()
    assert len(rows) == manifest(tmp_path)["counts"]["stored"] == len({*rows})
    assert run(formats=["texts", "rotations"], perplexity_corpus=str(texts)) == report


def test_a_resumed_run_reads_each_of_its_answers_again_once(run, monkeypatch):
    settings: dict[str, Any] = {"formats": ["letters", "rotations"]}
    n_prompts = len(ROWS) * (1 + 3)
    report = run(**settings)
    read_at, offsets = Journal.row_at, []

    def counted(journal, offset):
        offsets.append(offset)
        return read_at(journal, offset)

    monkeypatch.setattr(Journal, "row_at", counted)
    assert run(**settings) == report
    assert len(offsets) == len({*offsets}) <= n_prompts


def killed_at(monkeypatch, n_rows):
    """Let the answer book fail as a killed process does: in the middle of its `n_rows`-th row."""
    add = AnswerStore.add
    n_added = [0]

    def add_some(book, key, answer):
        n_added[0] += 1
        if n_added[0] > n_rows:
            raise KeyboardInterrupt
        add(book, key, answer)

    monkeypatch.setattr(AnswerStore, "add", add_some)


@pytest.mark.parametrize("n_rows", [0, 3])
def test_a_killed_run_continues_and_ends_as_an_uninterrupted_one(
    run, tmp_path, monkeypatch, n_rows
):
    settings = {"formats": ["letters", "texts"]}
    undisturbed = run(**settings)
    path = tmp_path / "run" / "answers.jsonl"
    written = path.read_bytes()
    assert (run(**settings), path.read_bytes()) == (undisturbed, written)  # a rerun scores nothing
    whole = {row["key"]: row for row in map(json.loads, path.read_bytes().splitlines())}
    shutil.rmtree(tmp_path / "run")
    with monkeypatch.context() as patch:
        killed_at(patch, n_rows)
        with pytest.raises(KeyboardInterrupt):
            run(**settings)
    with path.open("ab") as file:
        file.write(path.read_bytes()[:50])  # a torn row
    assert [result.n_correct for result in run(**settings).results] == [
        r.n_correct for r in undisturbed.results
    ]
    rows = {row["key"]: row for row in map(json.loads, path.read_bytes().splitlines())}
    assert rows.keys() == whole.keys()
    for key, row in rows.items():  # sums of other batches differ in the last digits
        np.testing.assert_allclose(
            row.pop("log_probs"), whole[key].pop("log_probs"), rtol=0, atol=2e-5
        )
        assert row == whole[key]
    assert manifest(tmp_path)["counts"]["scored_now"] == 8 - n_rows


def test_another_checkpoint_at_the_same_path_gets_answers_of_its_own(run, tmp_path, tiny_model):
    run()
    before = read_answers(tmp_path / "run" / "answers.jsonl")
    loaded = load_model(str(tiny_model))
    loaded.model.model.layers[0].mlp.up_proj.weight.data += 0.5
    loaded.model.save_pretrained(tiny_model)
    run()
    after = read_answers(tmp_path / "run" / "answers.jsonl")
    assert manifest(tmp_path)["counts"]["scored_now"] == 4
    assert [a.question_id for a in before] == [a.question_id for a in after]
    assert all(a.log_probs != b.log_probs for a, b in zip(before, after, strict=True))


def test_a_rerun_stores_corrected_answers_and_leaves_removed_questions_out(
    run, tmp_path, write_rows
):
    run(formats=["letters"])
    write_rows("questions.jsonl", [{**ROWS[1], "answer": 2}, *ROWS[2:]])
    run(formats=["letters"])
    stored = read_answers(tmp_path / "run" / "answers.jsonl")
    assert [(answer.question_id, answer.gold) for answer in stored] == [
        ("q1", 2),
        ("q2", 2),
        ("q3", 0),
    ]
    assert manifest(tmp_path)["counts"]["scored_now"] == 0


def test_a_limit_asks_the_first_questions_only(run, tmp_path):
    assert run(limit=2).results[0].n == 2
    assert {a.question_id for a in read_answers(tmp_path / "run" / "answers.jsonl")} == {"q0", "q1"}


def test_a_set_may_have_a_limit_of_its_own(run, write_rows):
    path = str(write_rows("asked.jsonl", ROWS))
    sets = {"short": {"path": path, "limit": 1}, "full": path}
    n_asked = {result.question_set: result.n for result in run(questions=sets, limit=3).results}
    assert n_asked == {"short": 1, "full": 3}


@pytest.fixture
def diverge(monkeypatch):
    """A function that makes every model from now on one whose log-probs are NaN, or all equal."""

    def break_models(weight):
        def load(path, options, **others):
            loaded = load_model(path, options, **others)
            loaded.model.model.norm.weight.data[:] = weight
            return loaded

        monkeypatch.setattr("kinject.eval.scoring.local.load_model", load)

    return break_models


def test_questions_beyond_the_window_are_in_no_percentage_and_counted_beside_it(
    run, tmp_path, write_rows
):
    long = {**ROWS[0], "id": "long", "choices": ["Kelm", "Farrow", "the mill of Kelm " * 200]}
    questions = write_rows("questions.jsonl", [*ROWS, long])
    report = run(questions={"new": str(questions)}, control=True)
    (result,) = (result for result in report.results if result.role == "learning")
    assert (result.n, result.n_unscored, result.n_scored) == (5, 1, 4)
    assert result.accuracy == result.n_correct / 4
    assert result.n_documents == 4
    (stored,) = json.loads((tmp_path / "run" / "report.json").read_text())["results"][:1]
    assert (stored["n"], stored["n_unscored"]) == (5, 1)
    assert report.to_frame()["n_unscored"][0] == 1
    text = render_summary(tmp_path / "run", report)
    card = render_card_tables(tmp_path / "run", report)
    for said in (text, card):
        assert f"{100 * result.accuracy:.1f}% of 4 questions" in said
        assert "of 5 questions “new”" not in said
        assert "1 more has no score" in said
        assert "1 unscored" in said


@pytest.mark.parametrize("weight", [float("nan"), 0.0])
def test_a_model_that_scores_nothing_has_no_number_anywhere(
    run, diverge, tmp_path, weight, write_rows
):
    diverge(weight)
    held_out = write_rows("held.jsonl", [{"text": "Bryn was born in Farrow."}])
    report = run(formats=["letters", "rotations"], perplexity_corpus=str(held_out))
    assert report.results == ()
    assert [(item.arm, item.n, item.accuracy) for item in report.unscored] == [
        ("base", 4, None)
    ] * 2
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [item["accuracy"] for item in stored["unscored"]] == [None, None]
    write_report(tmp_path / "run", report)
    page = (tmp_path / "run" / "report.html").read_text()
    for text in (render_summary(tmp_path / "run", report), page):
        assert "base on new (letters, 0 shots): none of 4 questions has a score" in text
        assert "0.000" not in text.split("perplexity")[0]
        assert "0.0%" not in text
    if weight != 0.0:
        assert (report.perplexities[0].per_token, report.perplexities[0].bits_per_byte) == (
            None,
            None,
        )
        assert "not finite" in page
    assert (tmp_path / "run" / "flips.jsonl").read_text() == ""


def test_prompts_cut_to_the_window_are_counted_and_reported(run, tmp_path, write_rows):
    long = [{**ROWS[0], "question": "Where was Bryn born? " * 40}, ROWS[1]]
    report = run(questions={"new": str(write_rows("long.jsonl", long))})
    assert report.results[0].n_cut == 1
    assert "prompts were cut" in render_summary(tmp_path / "run", report)
    cut = {
        answer.question_id: answer.truncated
        for answer in read_answers(tmp_path / "run" / "answers.jsonl")
    }
    assert cut["q0"] > 0
    assert cut["q1"] == 0


def test_faults_of_the_recipe_come_together_with_their_lines(run, tmp_path):
    with pytest.raises(RecipeError) as error:
        run(shots=[0, 2], budget=1.0)
    faults = {fault.key: str(fault) for fault in error.value.problems}
    assert set(faults) == {"eval.questions.new", "eval.budget"}
    assert (
        f"{tmp_path}/recipe.yaml:7: eval.questions.new: eval.shots asks for 2"
        in faults["eval.questions.new"]
    )
    assert "without prices all is free" in faults["eval.budget"]


def test_more_choices_than_letters_are_refused_for_letters_only(run, write_rows):
    many = str(
        write_rows(
            "many.jsonl",
            [{"question": "Which?", "choices": [f"town {i}" for i in range(27)], "answer": 0}],
        )
    )
    with pytest.raises(InputError, match="has 27 choices, format letters has 26 letters"):
        run(questions={"new": many}, formats=["letters"])
    assert run(questions={"new": many}).results[0].chance == pytest.approx(1 / 27)


def test_a_run_folder_in_use_is_refused(run, tmp_path):
    with lock_dir(tmp_path / "run"), pytest.raises(DiskError, match="in use by"):
        run()


@pytest.mark.parametrize("total", [1, 3])
def test_merged_shards_are_the_report_of_one_process(
    run: Evaluate, tmp_path: Path, write_rows: Callable[..., Path], total: int
) -> None:
    texts = write_rows("texts.jsonl", [{"text": "Bryn was born in Kelm."}])
    whole = run(
        shots=[0, 1],
        questions={"new": {"path": str(tmp_path / "questions.jsonl"),
                           "shots_from": str(tmp_path / "shots.jsonl")}},
        perplexity_corpus=str(texts),
    )  # fmt: skip
    recipe = replace(read_recipe(tmp_path / "recipe.yaml", (), "eval"), run_dir=tmp_path / "parts")
    n_answers = 0
    for number in range(1, total + 1):
        n_answers += evaluate_shard(recipe, Shard(number, total))
    assert n_answers == 8
    merged = merge_answers(recipe)
    counts = json.loads((recipe.run_dir / "manifest.json").read_text())["counts"]
    assert counts["shards"]["total"] == total
    assert counts["answers"] == 8
    assert len(merged.results) == len(whole.results)
    for ours, theirs in zip(merged.results, whole.results, strict=True):
        assert (ours.arm, ours.accuracy, ours.n) == (theirs.arm, theirs.accuracy, theirs.n)
    assert merged.perplexities[0].per_token == pytest.approx(whole.perplexities[0].per_token)
    for path in (*recipe.run_dir.glob("shards/*/answers.jsonl"), recipe.run_dir / "answers.jsonl"):
        path.write_text("")
    with pytest.raises(
        InputError, match=r"1-of-\d/answers.jsonl: its bytes are not .* Run it again"
    ):
        merge_answers(recipe)
    # With other weights the shards' files are as they were written, and have none of the answers.
    for path in recipe.run_dir.glob("shards/*/manifest.json"):
        written = json.loads(path.read_text())
        path.write_text(json.dumps({**written, "outputs": {}}))
    with pytest.raises(InputError, match="the shards lack 8 of its answers"):
        merge_answers(recipe)


def test_a_shard_that_was_stopped_under_older_packages_is_named_by_the_merge(
    run: Evaluate, tmp_path: Path
) -> None:
    run()
    recipe = replace(read_recipe(tmp_path / "recipe.yaml", (), "eval"), run_dir=tmp_path / "parts")
    evaluate_shard(recipe, Shard(1, 1))
    folder = recipe.run_dir / "shards" / "1-of-1"
    (folder / "manifest.json").unlink()
    versions = json.loads((folder / "versions.json").read_text())
    (folder / "versions.json").write_text(json.dumps(versions | {"torch": "2.0"}))
    evaluate_shard(recipe, Shard(1, 1))
    (note,) = (note for note in merge_answers(recipe).notes if "then" in note)
    assert "torch 2.0 then" in note
    assert f"Delete {recipe.run_dir / 'shards'} to score all anew" in note


def test_the_report_has_its_advice_and_the_kind_of_the_questions(
    run, tmp_path, write_rows, tiny_model
):
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    rows = write_rows("about.jsonl", [{**row, "about": "written by hand"} for row in ROWS])
    report = run(models={"base": str(tiny_model), "same": str(other)}, questions={"new": str(rows)})
    assert report.about_sets == {"new": "written by hand"}
    (advice,) = report.advice
    assert (advice.arm, advice.first, advice.reason) == ("same", "", "too few")
    assert advice.n_more_documents == 6  # of ten, the fewest for any verdict
    stored = json.loads((tmp_path / "run" / "report.json").read_text())
    assert stored["advice"][0]["reason"] == "too few"
