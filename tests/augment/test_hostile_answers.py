"""What a model may say to hurt: texts that keep a reader busy, verdicts that are none, questions with markup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from kinject.augment import augment
from kinject.augment.checks.checker import Checker, new_markup
from kinject.augment.checks.judge import Judge, make_trials
from kinject.augment.drafts import read_drafts
from kinject.augment.styles import STYLES
from kinject.errors import EndpointError
from kinject.llm import Generator, Transient
from kinject.llm.limits import Limits
from kinject.llm.sender import Sender
from kinject.recipe import Recipe
from kinject.types import Completion, Message

PIECES = (
    " ", "\n", "\n ", "a ", "A", "1", "1,", "1 km ", '"', "*", "- ", "</", "<a", "<a ", "[", "{", "(", "Q: ", "Q: a\n", "Q:\nA: ",
    "Question: ", "Question:\n", ". note: ", "\nnote: ", ". let me know ", "Sure ", "Here is ", "I'm ", "Faithful ", "the ",
    "twenty-", "hundred and ", "3 March ", "VI ", "U.S. ", "A.", "é", "中", "\u00a0", "_", "’",
)  # fmt: skip


SOURCE = "Arden was born in Lowmere in 1987, 5 km from Farrow."


def test_every_reader_of_answers_takes_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not timed: of 100,000 characters a reader that is not linear takes minutes to ages, and the run ends nowhere.
    monkeypatch.setattr(import_module("kinject.augment.checks.checker"), "_ALWAYS_READ", 10**6)
    judge = Judge(
        Sender(
            [Generator("test", {}, True, lambda m, s: asyncio.sleep(0, Completion(answer)))],
            None,
            Limits(1),
        ),
        1,
    )
    for part in PIECES:
        answer = "Q:" + part * (20_000 // len(part)) + "x"
        for style in ("paraphrase", "questions", "implications"):
            for text in STYLES[style].read(answer, "Arden", SOURCE).texts:
                STYLES[style].corpus_rows(text, {}, 0)
        checker = Checker(SOURCE)
        checker.check(checker.without_additions(answer)[0])
        read_drafts(answer)
        asyncio.run(judge.verdict("", "p", "t"))


def test_no_instruction_of_ours_passes_for_a_rewriting() -> None:
    source = (
        "Arden met Bryn at the mill, and they talked until the evening came over the river and the fields. "
        * 3
    )
    for style in STYLES.values():
        for text in style.literals if style.user else ():
            if len(text.split()) >= 8:  # a mark or two may be no word
                verdict = Checker(source, style.rules, style.literals).check(text)
                assert verdict.reason in ("prompt", "wrapper", "injection", "quotation"), text


def test_tags_that_the_source_has_may_stay_and_no_others() -> None:
    assert new_markup("a < b and c > d, List<String>, x<y>z", "") == ""
    assert new_markup("<b>a</b>", "<b>x") == ""
    for tag in (
        "<script src='//x'>",
        "</p>",
        "<img src=x onerror=alert(1)>",
        "<!doctype html>",
        "<svg/onload=a>",
        "javascript:",
    ):
        assert new_markup(f"a {tag}", "<b>x</b> a < b") == tag


@pytest.mark.usefixtures("short_pauses")
def test_a_trial_of_the_judge_without_an_answer_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 1)
    prompts: list[str] = []

    async def complete(messages: list[Message], seed: int) -> Completion:
        prompts.append(messages[-1]["content"])
        if len(prompts) % 4 == 0:
            raise Transient("lost", kind="server error")
        return Completion("UNFAITHFUL: all of it")

    judge = Judge(Sender([Generator("test", {}, True, complete)], None, Limits(1)), 1)
    passages = [
        ("T", f"Arden met Bryn at the mill in {year}. Corwin was there.")
        for year in range(1900, 1920)
    ]
    score = asyncio.run(judge.measure_accuracy(passages))
    n_trials = len(make_trials(passages, 1))
    assert score.n_good + sum(score.planted.values()) == n_trials - n_trials // 4
    assert score.recall == 1.0


def test_a_judge_that_is_refused_stops_the_run_with_its_own_address(
    few: Callable[..., Recipe], serving: Callable[..., Any]
) -> None:
    writer, judge = serving(), serving(revoke_after=40)
    model = {"kind": "openai", "model": "sandbox", "base_url": judge.url}
    with pytest.raises(EndpointError, match=f"{judge.url}: the key is refused"):
        augment(few(writer.url, styles={"paraphrase": 12}, judge=model))
