import pytest

from kinject.augment.checks import REASONS, Checker, check_completion
from kinject.augment.language import compare_languages
from kinject.types import Completion

SOURCE = "The old mill at the river was rebuilt after the fire, and it grinds corn for the whole valley to this day."
GOOD = "After the fire they built the mill by the river anew; to this day the valley has its corn ground there."


def test_a_good_paraphrase_is_accepted_and_measured() -> None:
    verdict = Checker(SOURCE).check(GOOD)
    assert verdict.accepted
    assert verdict.measures == {"length_ratio": 0.955, "source_overlap": 0.054, "sibling_overlap": 0.0}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("  ", "empty"),
        ("I'm sorry, but I can't rewrite this text for you.", "refusal"),
        ("I cannot assist with that request.", "refusal"),
        ("As an AI language model, I do not rewrite texts.", "refusal"),
        (f"Sure, here is a paraphrase:\n\n{GOOD}", "wrapper"),
        (f"Sure! {GOOD}", "wrapper"),
        (f"Here's the rewritten passage: {GOOD}", "wrapper"),
        (f"**Paraphrase:**\n{GOOD}", "wrapper"),
        (f"Paraphrased text: {GOOD}", "wrapper"),
        (f"{GOOD}\n\nLet me know if you would like another one.", "wrapper"),
        (f"{GOOD} I hope this helps!", "wrapper"),
        (f"{GOOD}\n\nNote: I rewrote the passage freely.", "wrapper"),
        (f"<passage>\n{GOOD}\n</passage>", "wrapper"),
        (f"{GOOD}<|im_end|>", "wrapper"),
        (SOURCE.upper() + "!", "echo"),
        (SOURCE.replace("corn", "grain"), "echo"),
        ("The old mill.", "length"),
        (f"{GOOD} " * 3, "length"),
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


def test_what_differs_in_dress_only_is_a_duplicate() -> None:
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
    ("completion", "reason"),
    [
        (Completion("text"), ""),
        (Completion("text", ""), ""),
        (Completion("half", "length"), "truncated"),
        (Completion("half", "tool_calls"), "truncated"),
        (Completion("", "content_filter"), "filtered"),
        (Completion(" ", "stop"), "no answer"),
        (Completion("", "no choices"), "no answer"),
    ],
)
def test_an_answer_that_is_not_whole_is_refused(completion: Completion, reason: str) -> None:
    assert check_completion(completion).reason == reason


def test_a_text_without_any_common_word_has_no_language() -> None:
    assert (
        compare_languages("Mount Roaring stands 7859 feet high.", "Der Berg ist nicht hoch, und das ist die Frage.")
        == ""
    )
