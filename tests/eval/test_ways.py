"""Formats, scores, validation of K, perplexity and processes, through the whole of `kinject eval`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from kinject.cli import main
from kinject.disk import read_jsonl
from kinject.eval import evaluate
from kinject.eval.compare import compare_runs, is_given_away, read_run
from kinject.eval.prompts import ChatStyle, PromptRequest, render_prompt
from kinject.eval.scores import PromptScore, rescored
from kinject.eval.scoring.answers import read_answers
from kinject.eval.scoring.encode import Encoder
from kinject.eval.scoring.generate import AnswerGenerator
from kinject.models import load_model
from kinject.recipe import read_recipe
from kinject.report.files import read_report, render_summary, write_report
from kinject.report.formatting import View
from kinject.report.result_tables import results_table
from kinject.types import Answer, Question
from small import naive_log_prob

NAMES = ["Arden", "Bryn", "Kelm", "Farrow"]
ROWS = [
    {
        "id": f"q{i}", "question": f"Where was {name} born?", "choices": ["Lowmere", "the mill", "town of Farrow"],
        "answer": i % 3, "document_id": name, "subject": "births" if i < 2 else "towns",
    }
    for i, name in enumerate(NAMES)
]  # fmt: skip
QUESTION = Question("q", "Where?", ("a b", "c"), 1, subject="some_towns")


@pytest.fixture
def recipe(tmp_path, tiny_model, write_rows):
    """Write a recipe with the eval section changed and return its path."""
    questions = write_rows("questions.jsonl", ROWS)

    def _recipe(**section) -> Path:
        whole = {
            "control": False,
            "models": {"base": str(tiny_model)},
            "questions": {"new": str(questions)},
            **section,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(
            yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": whole}, sort_keys=False)
        )
        return path

    return _recipe


def test_a_set_may_be_asked_in_formats_of_its_own(recipe, write_rows):
    checked = write_rows(
        "checked.jsonl", [{"id": "c", "question": "Say so.", "checks": {"min_words": 1}}]
    )
    sets = {
        "new": recipe().with_name("questions.jsonl").as_posix(),
        "kept": {"path": str(checked), "role": "retention", "formats": ["generate"]},
    }
    results = evaluate(
        read_recipe(recipe(questions=sets, formats=["texts"], max_new_tokens=2), verb="eval")
    ).results
    assert {(result.question_set, result.format) for result in results} == {
        ("new", "texts"),
        ("kept", "generate"),
    }


def run(path: Path):
    return evaluate(read_recipe(path, (), "eval"))


def stored(tmp_path: Path) -> dict:
    answers = read_answers(tmp_path / "run" / "answers.jsonl")
    return {(a.format, a.k, a.rotation, a.question_id): a for a in answers}


def test_formats_are_written_as_documented():
    header = "The following are multiple choice questions (with answers) about some towns.\n\n"
    options = "A. a b\nB. c\nAnswer:"
    expected = {
        "hybrid": (f"{header}Where?\n{options}", (" a b", " c")),
        "letters-no-question": (f"{header}{options}", (" A", " B")),
        "texts-no-question": ("Answer:", (" a b", " c")),
    }
    for format, (context, continuations) in expected.items():
        prompt = render_prompt(PromptRequest(QUESTION, format))
        assert (prompt.context, prompt.continuations) == (context, continuations)


def test_rotations_ask_each_option_at_each_letter(recipe, tmp_path):
    report = run(recipe(formats=["rotations", "letters"]))
    answers = stored(tmp_path)
    assert len(answers) == 4 * 3 + 4
    np.testing.assert_array_equal(
        answers["rotations", 0, 0, "q1"].log_probs, answers["letters", 0, 0, "q1"].log_probs
    )
    assert [answers["rotations", 0, n, "q2"].gold for n in range(3)] == [2, 1, 0]
    assert [(result.format, result.n) for result in report.results[:2]] == [
        ("rotations", 4),
        ("letters", 4),
    ]
    assert report.results[1].mass == pytest.approx(
        np.mean([sum(map(math.exp, answers["letters", 0, 0, f"q{i}"].log_probs)) for i in range(4)])
    )


def test_each_score_has_results_of_its_own(recipe, tmp_path):
    report = run(recipe(scores=["sum", "tokens"], formats=["texts", "texts-no-question"]))
    assert [(result.format, result.score) for result in report.results[:4]] == [
        ("texts", "sum"), ("texts", "tokens"), ("texts-no-question", "sum"), ("texts-no-question", "tokens"),
    ]  # fmt: skip
    right = sum(
        int(np.argmax(np.divide(answer.log_probs, answer.n_tokens)) == answer.gold)
        for (form, *_), answer in stored(tmp_path).items() if form == "texts"
    )  # fmt: skip
    assert report.results[1].n_correct == right
    assert read_report(tmp_path / "run" / "report.json") == report


def test_a_chat_template_wraps_the_prompt_once(recipe, tmp_path, tiny_model):
    loaded = load_model(str(tiny_model))
    loaded.tokenizer.chat_template = (
        "{{ bos_token }}U: {{ messages[0].content }}\nA:{% if x %}{% endif %}"
    )
    loaded.tokenizer.save_pretrained(tiny_model)
    run(recipe(chat=True))
    context = "U: Question: Where was Arden born?\nAnswer:\nA:"
    expected = naive_log_prob(loaded.model.double(), loaded.tokenizer, context, "Lowmere")
    assert stored(tmp_path)["texts", 0, 0, "q0"].log_probs[0] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("refuses", [False, True])
def test_the_header_is_the_systems_turn_of_a_chat(tiny_tokenizer, refuses):
    template = "{% for m in messages %}{% if X and m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    template += "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    tiny_tokenizer.chat_template = template.replace("X", str(refuses).lower())
    encoder = Encoder(tiny_tokenizer, chat=ChatStyle())
    rendered = encoder.apply_chat_template(
        render_prompt(PromptRequest(QUESTION, "letters", (QUESTION,)))
    )
    header = "The following are multiple choice questions (with answers) about some towns.\n\n"
    middle = f"<user>{header}" if refuses else f"<system>{header}<user>"
    question = "Where?\nA. a b\nB. c\nAnswer:"
    assert rendered.context == f"{middle}{question} B\n\n{question}<assistant>"
    assert rendered.continuations == ("A", "B")
    assert encoder.notes == (
        ["the chat template takes no system turn; its text is part of the user's"]
        if refuses
        else []
    )


def test_subjects_have_intervals_of_their_own(recipe):
    report = run(recipe())
    assert [(result.subject, result.n) for result in report.results] == [
        ("", 4),
        ("births", 2),
        ("towns", 2),
    ]
    assert report.results[0].n_correct == sum(
        result.n_correct or 0 for result in report.results[1:]
    )
    table = results_table(View(report))
    assert [line[0].text for line in table.lines] == ["new", "new: births", "new: towns"]


def test_the_tokens_of_prompts_by_subject_are_those_of_its_own_questions(
    recipe, tiny_model, write_rows
):
    long = "Where was Kelm born, whose town has a school and a mill?"
    rows = [ROWS[0], {**ROWS[2], "question": long}, {**ROWS[3], "subject": "births"}]
    questions = write_rows("three.jsonl", rows)
    tokenizer = load_model(str(tiny_model)).tokenizer
    first, towns, third = (
        len(tokenizer(f"Question: {row['question']}\nAnswer:").input_ids) for row in rows
    )
    report = run(recipe(questions={"new": str(questions)}, formats=["texts"]))
    assert {result.subject: result.prompt_tokens for result in report.results} == {
        "": pytest.approx((first + towns + third) / 3),
        "births": (first + third) / 2,
        "towns": towns,
    }


def test_the_work_of_results_by_subject_does_not_grow_with_their_square(
    recipe, write_rows, monkeypatch
):
    n_scored = []

    def counted(answers, *more):
        n_scored.append(len(answers))
        return rescored(answers, *more)

    monkeypatch.setattr("kinject.eval.results.rescored", counted)
    rows = [
        {**ROWS[i % 4], "id": f"q{i}", "question": f"Who is {i}?", "subject": f"s{i}"}
        for i in range(40)
    ]
    questions = write_rows("many.jsonl", rows)
    report = run(recipe(questions={"new": str(questions)}, scores=["chars"]))
    assert len(report.results) == 41
    # All answers of all subjects were scored again for each subject: 40 times 40.
    assert sum(n_scored) <= 10 * len(rows)


def test_flips_are_the_questions_whose_rightness_changed(recipe, tmp_path, tiny_model, write_rows):
    model = load_model(str(tiny_model)).model
    for parameter in model.parameters():
        parameter.data.mul_(20 if parameter.ndim > 1 else 1)  # so that the context matters
    model.save_pretrained(tiny_model)
    documents = write_rows(
        "documents.jsonl", [{"id": name, "text": f"{name} was born in Lowmere."} for name in NAMES]
    )
    run(
        recipe(
            formats=["letters", "rotations"], retrieval={"documents": [str(documents)], "k": [1, 2]}
        )
    )
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "flips.jsonl").read_text().splitlines()
    ]
    flips = {(row["k"], row["question_id"]): row for row in rows if row["format"] == "letters"}
    answers = stored(tmp_path)
    expected = {}
    for k in (1, 2):
        for i in range(4):
            now, was = (np.argmax(answers["letters", n, 0, f"q{i}"].log_probs) for n in (k, 0))
            if (now == i % 3) != (was == i % 3):
                expected[k, f"q{i}"] = (
                    int(now),
                    int(was),
                    "wrong to right" if now == i % 3 else "right to wrong",
                )
    assert expected
    assert {
        key: (r["chosen"], r["base_chosen"], r["change"]) for key, r in flips.items()
    } == expected
    for (k, name), row in flips.items():
        assert [item["id"] for item in row["passages"]] == list(
            answers["letters", k, 0, name].context_ids
        )
        assert row["choices"] == ROWS[0]["choices"]
        assert row["gold"] == int(name[1]) % 3
    page = write_report(tmp_path / "run", read_report(tmp_path / "run" / "report.json")).read_text()
    assert rows[0]["question"] in page


def test_held_out_perplexity_is_that_of_the_plain_loss(recipe, tmp_path, tiny_model, write_rows):
    texts = ["Arden was born in Lowmere.", "Bryn works for the mill at Stonegate. " * 20]
    path = write_rows("held_out.jsonl", [{"text": text} for text in texts])
    report = run(recipe(perplexity_corpus=str(path)))
    loaded, total, n = load_model(str(tiny_model)), 0.0, 0
    losses, lengths = [], []
    for text in texts:
        before, n_before = total, n
        ids = [
            loaded.tokenizer.bos_token_id,
            *loaded.tokenizer(text, add_special_tokens=False).input_ids,
        ]
        for start in range(1, len(ids), 256):
            part = ids[start - 1 : start + 256]
            with torch.no_grad():
                log_probs = loaded.model.double()(torch.tensor([part])).logits[0].log_softmax(-1)
            total += sum(float(log_probs[i - 1, part[i]]) for i in range(1, len(part)))
            n += len(part) - 1
        losses.append(before - total)
        lengths.append(n - n_before)
    (perplexity,) = report.perplexities
    assert perplexity.losses == pytest.approx(losses, rel=1e-5)  # the second text has two windows
    assert perplexity.lengths == tuple(lengths)
    assert (perplexity.n_tokens, perplexity.n_texts) == (n, 2)
    assert perplexity.per_token == pytest.approx(math.exp(-total / n), rel=1e-5)
    assert "Perplexity of held-out texts (held_out)" in render_summary(tmp_path / "run", report)
    assert run(recipe(perplexity_corpus=str(path))) == report
    assert compare_runs([read_run(tmp_path / "run"), read_run(tmp_path / "run")])[0].result.n == 4


def test_show_prints_prompts_as_tokenised_and_stores_nothing(recipe, tmp_path, capsys):
    assert main(["eval", str(recipe()), "--show", "1"]) == 0
    shown = capsys.readouterr().out
    assert "base on new: texts, 0 shots, K 0, question q0" in shown
    assert shown.count("(Lowmere)") == 1
    assert shown.count("*") == 1
    assert not (tmp_path / "run").exists()


WHOLE = ("--multi_gpu",)
TENSOR_PARALLEL = (
    *("--use_fsdp", "--fsdp_version", "2"),
    *("--use_parallelism_config", "--parallelism_config_tp_size", "2"),
)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(WHOLE, id="whole"),
        pytest.param(TENSOR_PARALLEL, id="tensor-parallel", marks=pytest.mark.soak),
    ],
)
def test_two_processes_share_the_questions_or_the_model_and_answer_as_one(
    recipe, tmp_path, write_rows, flags
):
    held_out = write_rows(
        "held_out.jsonl", [{"text": f"Town {n} lies on the Ard. " * 9 * (n + 1)} for n in range(5)]
    )
    path = recipe(formats=["letters", "texts"], perplexity_corpus=str(held_out))
    alone = run(path)
    first = {key: answer.log_probs for key, answer in stored(tmp_path).items()}
    (tmp_path / "run").rename(tmp_path / "alone")
    command = [
        "-m",
        "accelerate.commands.launch",
        *flags,
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
    ]
    command += ["-m", "kinject.cli", "eval", str(path)]
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=4000, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("base on new: ") == 2
    second = stored(tmp_path)
    assert second.keys() == first.keys()
    for key, log_probs in first.items():
        np.testing.assert_allclose(second[key].log_probs, log_probs, rtol=0, atol=2e-5)
    together = read_report(tmp_path / "run" / "report.json")
    for result, other in zip(together.results, alone.results, strict=True):
        assert (other.mass is None) == (result.mass is None)
        assert other.mass is None or result.mass == pytest.approx(other.mass, abs=1e-5)
        assert replace(result, mass=None) == replace(other, mass=None)
    shared = [
        note.replace(", sharded over processes (tensor parallel over 2)", "")
        for note in together.notes
    ]
    assert (shared != list(together.notes)) == (flags == TENSOR_PARALLEL)
    assert tuple(shared) == alone.notes
    (perplexity,), (expected,) = together.perplexities, alone.perplexities
    assert perplexity.per_token == pytest.approx(expected.per_token, rel=1e-6)
    assert (perplexity.n_tokens, perplexity.n_texts) == (expected.n_tokens, expected.n_texts)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["scored_now"] == 8
    assert not list((tmp_path / "run").glob("process-*"))
    # One process takes up what two have answered.
    assert replace(run(path), notes=()) == replace(together, notes=())
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["scored_now"] == 0


def test_letters_that_are_written_are_read_and_counted_apart_where_they_cannot_be(
    recipe, tmp_path, monkeypatch
):
    texts = iter(["The answer is (A).", "**B**", "Who knows.", "I don't know."])
    monkeypatch.setattr(AnswerGenerator, "score", lambda self, prompts: (
        (i, PromptScore((), (), next(texts), 3, 5, thinking_cut=i == 0)) for i in range(len(prompts))
    ))  # fmt: skip
    path = recipe(formats=["letters-written"])
    result, *parts = run(path).results
    read = stored(tmp_path)
    assert [answer.accepted[1] for answer in read.values()] == ["A", "B", "C", "A"]
    assert (result.n_correct, result.chance, result.score) == (2, pytest.approx(1 / 3), "sum")
    assert (result.abstained.rate, result.written.unread) == (0.25, 0.25)
    assert (result.written.n_thinking, result.written.thinking_cut) == (5.0, 0.25)
    again = run(path)  # nothing is left to write
    assert again.results == (result, *parts)
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["scored_now"] == 0


def test_a_choice_that_one_way_picks_without_the_question_is_given_away() -> None:
    def answer(form: str, best: int, gold: int) -> Answer:
        log_probs = tuple(-1.0 if i == best else -4.0 for i in range(5))
        return Answer("q", "s", "base", form, 0, 0, (), gold, log_probs, (1,) * 5, (3,) * 5)

    right, wrong = answer("texts-no-question", 3, 3), answer("texts-no-question", 1, 3)
    turned = [answer("rotations-no-question", best, 0) for best in (0, 0, 2, 4, 1)]
    once = [answer("rotations-no-question", best, 0) for best in (0, 3, 2, 4, 1)]
    assert is_given_away([right])
    assert not is_given_away([wrong])
    assert is_given_away([wrong, *turned])  # two of five, where guessing has one
    assert not is_given_away([wrong, *once])
    assert not is_given_away([])


def test_questions_that_the_base_answers_more_often_than_by_guessing_are_parted(
    recipe, tmp_path, tiny_model, capsys, monkeypatch
):
    path = recipe(
        formats=["texts", "rotations", "texts-no-question"],
        models={"base": str(tiny_model), "b": str(tiny_model)},
    )
    run(path)
    base_answers = [
        answer
        for answer in read_answers(tmp_path / "run" / "answers.jsonl")
        if answer.arm == "base"
    ]
    known, kept, given = set(), [], set()
    for name in {row["id"] for row in ROWS}:
        answers = [a for a in base_answers if a.question_id == name]
        right = {form: [a.log_probs.index(max(a.log_probs)) == a.gold for a in answers if a.format == form]
                 for form in ("rotations", "texts", "texts-no-question")}  # fmt: skip
        assert [len(of) for of in right.values()] == [3, 1, 1]
        if any(right["texts"]):
            known.add(name)
            kept += right["rotations"]
        if any(right["texts"]) and any(right["texts-no-question"]):
            given.add(name)

    def parted() -> tuple[set[str], str]:
        assert main(["questions", "--drop-known", str(tmp_path / "run")]) == 0
        rows = {
            name: [row for _, row in read_jsonl(tmp_path / "run" / name / "new.jsonl")]
            for name in ("known", "unknown")
        }
        assert rows["unknown"] == [row for row in ROWS if row["id"] not in known]
        return {row["id"] for row in rows["known"]}, capsys.readouterr().out

    found, output = parted()
    assert given
    assert found == known - given
    assert f"{len(given)} are in neither: the base picks their right choice without" in output
    monkeypatch.setattr("kinject.eval.compare.is_given_away", lambda alone: False)
    found, output = parted()
    assert found == known
    assert f"the base knows {len(known)} of 4 questions, as asked by texts" in output
    assert (
        f"by rotations, which chose none of them: so the base answers {sum(kept) / len(kept):.1%}."
        in output
    )
    monkeypatch.setattr("kinject.eval.compare.above_guessing", lambda answers: False)
    known.clear()
    found, output = parted()
    assert not found
    assert "so the base answers" not in output  # there is nothing that it could answer
    words = ["questions", "--drop-known", str(tmp_path / "run")]
    assert main([*words, "--job", "slurm", "--retry"]) == 2
    assert "--job, --retry has no effect" in capsys.readouterr().err
    (tmp_path / "questions.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    assert main(words) == 2
    assert "is not the file that" in capsys.readouterr().err
