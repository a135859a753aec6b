import re
from pathlib import Path

import pytest

from kinject.augment.checks.checker import MAX_OVERLAP, REASONS, Checker, Rules, check_completion
from kinject.augment.styles import STYLES
from kinject.language import compare_languages
from kinject.types import Completion

PAGE = Path(__file__).parents[3] / "docs" / "augmentation.md"

SOURCE = "The old mill at the river was rebuilt after the fire, and it grinds corn for the whole valley to this day."
GOOD = "After the fire they built the mill by the river anew; to this day the valley has its corn ground there."


def test_a_good_paraphrase_is_accepted_and_measured() -> None:
    verdict = Checker(SOURCE).check(GOOD)
    assert verdict.accepted
    assert verdict.measures == {"language": "en", "facts": []}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  ", "empty"),
        ("I'm sorry, but I can't rewrite this text for you.", "refusal"),
        ("I cannot assist with that request.", "refusal"),
        ("As an AI language model, I do not rewrite texts.", "refusal"),
        (f"<passage>\n{GOOD}\n</passage>", "wrapper"),
        (f"{GOOD}<|im_end|>", "wrapper"),
        (SOURCE.upper() + "!", "echo"),
        (SOURCE.replace("corn", "grain"), "echo"),
        ("The mill.", "length"),
        (f"{GOOD} " * 120, "length"),
        (
            "Nach dem Brand wurde die alte Mühle am Fluss und das Tal mit Korn versorgt, was sie für das Tal auch ist.",
            "language",
        ),
        (
            "После пожара старую мельницу у реки отстроили заново, и она до сих пор мелет зерно для всей долины.",
            "language",
        ),
        (f"{GOOD} It was 1931.", "number"),
        (f"{GOOD} Petrov was there.", "name"),
    ],
)
def test_a_bad_answer_is_refused_with_its_reason(text: str, reason: str) -> None:
    verdict = Checker(SOURCE).check(text)
    assert (verdict.reason, bool(verdict.detail) or reason == "empty") == (reason, True)
    assert reason in REASONS


def test_a_text_that_differs_in_formatting_only_is_a_duplicate() -> None:
    checker = Checker(SOURCE)
    checker.accept(GOOD)
    assert checker.check(GOOD.upper().replace(" ", "  ")).reason == "duplicate"
    assert checker.check(GOOD.replace("they built", "people built")).reason == "duplicate"
    assert checker.check(
        "Corn for the whole valley is ground to this day in the riverside mill, new since it burned."
    ).accepted


@pytest.mark.parametrize(
    "source",
    ["I cannot recall, she wrote, when the mill burned down and who it was that saw it burn.",
     "Sure of her way, she went on: the mill had burned down and nobody had seen it burn."],
)  # fmt: skip
def test_words_that_the_source_says_itself_are_no_refusal(source: str) -> None:
    text = source.replace("burned down", "gone up in flames").replace(
        "who it was that saw it", "which person watched it"
    )
    assert Checker(source).check(text).reason not in ("refusal", "wrapper")


@pytest.mark.parametrize(
    ("completion", "reason", "detail"),
    [
        (Completion("text"), "", ""),
        (Completion("text", ""), "", ""),
        (Completion("text", "eos"), "", ""),
        (Completion("text", "end_turn"), "", ""),
        (Completion("half", "length"), "truncated", "finish_reason is length"),
        (Completion(" ", "length"), "truncated", "finish_reason is length"),
        (Completion("half", "tool_calls"), "truncated", "finish_reason is tool_calls"),
        (Completion("", "content_filter"), "filtered", "finish_reason is content_filter"),
        (Completion(" ", "stop"), "no answer", "finish_reason is stop"),
        (Completion("", ""), "no answer", "finish_reason is missing"),
        (Completion("", "no choices"), "no answer", "finish_reason is no choices"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(
    completion: Completion, reason: str, detail: str
) -> None:
    verdict = check_completion(completion)
    assert (verdict.reason, verdict.detail) == (reason, detail)


def _nonsense(first: int, n: int) -> str:
    """`n` words that hold no fact and are of no language."""
    return " ".join(
        "k" + chr(97 + index // 26) + chr(97 + index % 26) for index in range(first, first + n)
    )


def test_seven_tenths_of_all_triples_may_be_shared_and_not_more() -> None:
    assert MAX_OVERLAP == 7 / 10
    nine, twelve = _nonsense(0, 9), _nonsense(0, 12)  # 7 triples, all of them among 10
    assert Checker(nine).check(twelve).accepted
    assert (
        Checker(nine).check(_nonsense(0, 11)).detail
        == "shares 78% of its word triples with the source"
    )
    checker = Checker(_nonsense(100, 12))
    checker.accept(nine)
    assert checker.check(twelve).accepted
    assert (
        checker.check(_nonsense(0, 11)).detail
        == "shares 78% of its word triples with an accepted paraphrase"
    )


def test_the_same_words_in_the_same_order_are_refused_even_where_near_texts_are_not() -> None:
    source, other = _nonsense(0, 12), _nonsense(50, 12)
    assert (
        Checker(source).check(source.upper()).detail
        == "shares 100% of its word triples with the source"
    )
    checker = Checker(source, Rules(refuse_near=False, refuse_echo=False))
    assert checker.check(other).accepted
    checker.accept(other)
    assert (
        checker.check(f"{other}!").detail
        == "shares 100% of its word triples with an accepted paraphrase"
    )
    assert checker.check(f"{_nonsense(40, 1)} {other}").accepted  # nearly the same may stand
    assert checker.check(source).accepted


def test_a_lost_fact_is_a_fault_where_a_style_is_complete_and_a_new_one_everywhere() -> None:
    source, without = f"{_nonsense(0, 9)} 1931.", _nonsense(50, 9)
    assert Checker(source).check(without).accepted
    lost = Checker(source, Rules(complete=True)).check(without)
    assert (lost.reason, lost.detail) == ("number", "1931 is lost")
    assert Checker(source).check(f"{without} 1932.").reason == "number"


def test_neither_a_short_nor_a_long_text_is_at_fault() -> None:
    assert Checker(_nonsense(0, 200)).check(_nonsense(300, 5)).accepted
    assert Checker(_nonsense(0, 20)).check(_nonsense(100, 300)).accepted


def test_a_text_without_any_common_word_has_no_language() -> None:
    assert (
        compare_languages(
            "Mount Roaring stands 7859 feet high.",
            "Der Berg ist nicht hoch, und das ist die Frage.",
        )
        == ""
    )


def test_the_page_lists_every_reason_with_its_meaning_and_every_style() -> None:
    page = PAGE.read_text("utf-8")
    reasons = page.split("\n## Which checks")[1].split("\n## ")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| (.+) \|$", reasons, re.MULTILINE)) == REASONS
    styles = re.findall(r"^\| (`[^|]+) \|", page.split("\n## What does a prompt")[0], re.MULTILINE)
    assert {name for cell in styles for name in re.findall(r"`(\w+)`", cell)} == STYLES.keys()


def test_a_plain_text_may_explain_a_hard_word_and_add_no_number() -> None:
    source = "The Falk Bridge was built in 1931 by Mara Lind. It rests on caissons and spans 120 m."
    plain = (
        "Mara Lind built the Falk Bridge in 1931. It stands on caissons. The bridge is 120 m long."
    )
    explained = f"{plain} Caissons are big boxes that keep water out. Workers sink them into the bed of a river."
    rules = STYLES["plain"].rules
    assert rules.explains
    verdict = Checker(source, rules).check(explained)
    assert verdict.reason == ""
    dated = (
        f"{plain} Caissons are big boxes that keep water out. Workers have sunk them since 1850."
    )
    assert Checker(source, rules).check(dated).reason == "number"


RULES_OF_A_POOL = (
    "The pool at Lerchenweg 14 opens on 3 May and closes on 21 September. Its basin is 50 m long and holds 2,400 "
    "cubic metres. Anna Lobo runs it, and Piet Haan teaches there on 7 days a week."
)
ABOUT_NOTHING = (
    "Swimming is good for body and soul, and many people love the water in the warm part of the year. A place to swim "
    "needs care, a person in charge and somebody who shows others how to do it well, so that all can enjoy it there."
)


def test_a_long_text_with_none_of_the_facts_is_refused_and_a_short_or_exempt_one_is_not() -> None:
    verdict = Checker(RULES_OF_A_POOL).check(ABOUT_NOTHING)
    assert (verdict.reason, verdict.detail[:8]) == ("no facts", "none of ")
    assert Checker(RULES_OF_A_POOL).check("Many people love the water in summer.").accepted
    assert Checker(RULES_OF_A_POOL).check(f"{ABOUT_NOTHING} Anna Lobo is there.").accepted
    assert Checker(RULES_OF_A_POOL, Rules(factless=True)).check(ABOUT_NOTHING).accepted
    assert STYLES["implications"].rules.factless
    # A passage of few facts teaches other things, however much is written about it.
    few = "The pool is open to all who live in Lerchenweg, and Anna Lobo runs it for them."
    assert Checker(few).check(ABOUT_NOTHING).accepted
