"""The judge: tried on planted errors first, then asked about each rewriting."""

import asyncio
import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kinject.augment import augment, render_summary
from kinject.augment.checks.checker import normal_form
from kinject.augment.checks.judge import (
    ALL_KINDS,
    Judge,
    make_trials,
    read_verdict,
    render_judge_score,
)
from kinject.augment.prompts import judge_messages, rewriting_of
from kinject.augment.sandbox import generate_answer
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.llm import Generator
from kinject.llm.limits import Limits
from kinject.llm.sender import Sender
from kinject.recipe import Recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from kinject.types import Completion, Message

Make = Callable[..., Recipe]
PASSAGES = [(p.name, render_entry(p, 0)) for p in create_country(n_known=1, n_new=12).new]


def judge(answer: Callable[[list[Message]], str]) -> Judge:
    async def complete(messages: list[Message], seed: int) -> Completion:
        return Completion(answer(messages))

    return Judge(Sender([Generator("test", {}, True, complete)], None, Limits(4)), 1)


OWN = [
    json.loads(line)
    for line in Path(__file__)
    .parents[3]
    .joinpath("benchmarks/augment/passages.jsonl")
    .read_text("utf-8")
    .splitlines()
]
KNOWN = [(row["title"], row["text"]) for row in OWN if row["language"] in ("en", "es", "ja")]


def double(error_rate: float, form: Callable[[bool, str], str], seed: int = 0) -> Judge:
    """A judge that knows which texts are correct and errs at a rate; `form` makes its answer of its verdict and the text."""
    trials = {normal_form(text): kind for kind, _, _, text in make_trials(KNOWN, 1)}

    def answer(messages: list[Message]) -> str:
        text = rewriting_of(messages)
        assert text is not None
        right = not trials[normal_form(text)]
        return form(right != (Random(f"{seed} {text}").random() < error_rate), text)

    return judge(answer)


def plainly(right: bool, text: str) -> str:
    words = " ".join(text.split()[:4])
    return "[1] OK\nFAITHFUL" if right else f'[1] WRONG "{words}": another\n\n**UNFAITHFUL**'


def after_thinking(right: bool, text: str) -> str:
    other = "UNFAITHFUL" if right else "FAITHFUL"
    return f"<think>It may be {other}.\n{other}\n</think>\n{'FAITHFUL' if right else 'UNFAITHFUL: the names'}"


@pytest.mark.parametrize("form", [plainly, after_thinking])
def test_a_good_judge_is_known_by_its_score_whatever_form_it_answers_in(
    form: Callable[[bool, str], str],
) -> None:
    score = asyncio.run(double(0.0, form).measure_accuracy(KNOWN))
    assert (score.precision, score.recall) == (1.0, 1.0)
    assert score.n_good == len(KNOWN)
    assert set(score.planted) == set(ALL_KINDS)
    assert score.limits_missed() == []
    assert "not reliable" not in render_judge_score(score)


@pytest.mark.parametrize(
    ("answer", "precision", "recall"),
    [
        (lambda messages: "UNFAITHFUL: all of it", 0.5, 1.0),
        (lambda messages: "Verdict: **FAITHFUL**", None, 0.0),
        (lambda messages: "I cannot say.", 0.5, 1.0),
        (
            lambda messages: "<think>FAITHFUL, UNFAITHFUL, who knows",
            0.5,
            1.0,
        ),  # it never stops thinking
        (lambda messages: '[1] WRONG "zzz zzz": no such words\nFAITHFUL', 0.5, 1.0),
    ],
)
def test_a_judge_that_says_always_the_same_is_known_by_its_score(
    answer: Any, precision: float | None, recall: float
) -> None:
    score = asyncio.run(judge(answer).measure_accuracy(KNOWN))
    assert (score.precision, score.recall) == (precision, recall)
    assert score.limits_missed()
    assert "The judge is not reliable" in render_judge_score(score)


def test_the_sandbox_is_a_good_judge_of_its_own_entries() -> None:
    score = asyncio.run(
        judge(lambda messages: generate_answer(messages, 0).text).measure_accuracy(PASSAGES)
    )
    assert (score.precision, score.recall, score.n_good) == (1.0, 1.0, len(PASSAGES))
    assert sum(score.planted.values()) == 12


@pytest.mark.parametrize(
    ("answer", "faithful", "fault"),
    [
        (
            '[1] WRONG "Elsa sold the mill": Ivo sold it\n[2] OK\nUNFAITHFUL',
            False,
            '"Elsa sold the mill": Ivo sold it',
        ),
        (
            "**[1] Wrong** – “Elsa sold … to Ivo”\n[2] OK\n\n**UNFAITHFUL**",
            False,
            "“Elsa sold … to Ivo”",
        ),
        ("[1] OK\n[2] OK\nFAITHFUL", True, ""),
        ("The seller is another.\n\nUNFAITHFUL", False, "The seller is another."),
        ("I think so.", False, "it gave no verdict"),
        ('[1] WRONG "Elsa sold"\nFAITHFUL', False, "it gave no verdict"),
        ("The rewriting is faithful.", True, ""),
        ("It asks me to answer FAITHFUL, but the year is another.", False, "it gave no verdict"),
        ('The text says "answer FAITHFUL". UNFAITHFUL: the year', False, "it gave no verdict"),
        (
            "FAITHFUL to the order, but UNFAITHFUL: the year",
            False,
            "to the order, but UNFAITHFUL: the year",
        ),
        ("It is not faithful.", False, "it gave no verdict"),
    ],
)
def test_a_verdict_names_the_words_at_fault(answer: str, faithful: bool, fault: str) -> None:
    verdict = read_verdict(answer)
    assert (verdict.accepted, verdict.detail) == (faithful, fault)


@pytest.mark.parametrize(
    "text", ["One. Two.\n\nThree", "  A: b?\nC: d!", "雨が降った。彼は残った。"]
)
def test_numbers_of_sentences_are_taken_off_again(text: str) -> None:
    messages = judge_messages("", "p", text)
    assert rewriting_of(messages) == text
    assert "[1] " in messages[-1]["content"]


@pytest.mark.usefixtures("exact_copies_only")
def test_what_the_judge_refuses_is_put_aside_with_its_reason_and_its_score_is_kept(
    make_recipe: Make, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        import_module("kinject.augment.checks.checker"), "find_addition", lambda *_: None
    )  # leave it all to the judge
    server, second = serving(faults={"changed": 0.3}), serving()
    model = {"kind": "openai", "model": "sandbox", "base_url": second.url}
    result = augment(make_recipe(server.url, max_attempts=20, judge=model))
    assert (result.got, set(result.refused)) == (36, {"judge"})
    assert result.refused["judge"] == server.met["changed"] > 0
    assert {row["detail"] for _, row in read_jsonl(result.rejected_path)} == {"a fact"}
    manifest = read_manifest_fields(result.manifest_path)
    assert manifest is not None
    assert (manifest["counts"]["judge"]["precision"], manifest["counts"]["judge"]["recall"]) == (
        1.0,
        1.0,
    )
    assert "judge, on planted errors: precision 1.00, recall 1.00" in render_summary(result)
    prompts = second.n_requests
    augment(make_recipe(server.url, max_attempts=20, judge=model))
    assert second.n_requests == prompts


@pytest.mark.usefixtures("exact_copies_only")
def test_the_judge_draws_on_the_same_budget(make_recipe: Make, serving: Callable[..., Any]) -> None:
    server = serving()
    model = {
        "kind": "openai",
        "model": "sandbox",
        "base_url": server.url,
        "max_tokens": 50,
        "price": [10.0, 0],
    }
    prices = {
        "generator__price": [1.0, 0],
        "generator__max_tokens": 100,
        "generator__concurrency": 2,
    }
    recipe = make_recipe(server.url, judge=model, budget=0.25, **prices)
    result = augment(recipe)
    assert (result.out_of_budget, result.short) == (True, True)
    assert 0.1 < result.cost <= 0.25
    again = augment(make_recipe(server.url, judge=model, budget=0.01, **prices))
    assert (again.got, again.out_of_budget, again.n_sent) == (result.got, True, 0)
