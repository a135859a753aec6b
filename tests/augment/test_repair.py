"""What surrounds a text is taken off, and several texts in one answer are parted."""

from __future__ import annotations

import time

import pytest

from kinject.augment.answers import repair
from small import quick

SOURCE = (
    "The old mill at the river was rebuilt after the fire in 1931 by Mara Lind, who ran it for twenty years, "
    "and it grinds corn for the whole valley to this day, as the farmers of the parish like to tell."
)
GOOD = (
    "After the fire of 1931 Mara Lind built the mill by the river anew. She ran it for twenty years. To this day the "
    "valley has its corn ground there, and the farmers of the parish like to say so."
)
OTHER = (
    "Farmers of the parish like to tell that Mara Lind, miller for twenty years, rebuilt the riverside mill that burned "
    "in 1931. The corn of the whole valley is ground in it even now."
)


@pytest.mark.parametrize(
    ("answer", "repairs"),
    [
        (GOOD, ()),
        (f"Certainly! Here is a paraphrase:\n\n{GOOD}", ("preamble",)),
        (f"Sure!\n{GOOD}", ("preamble",)),
        (f"Here's the rewritten passage: {GOOD}", ("preamble",)),
        (f"Natürlich! Hier ist die Umschreibung:\n\n{GOOD}", ("preamble",)),
        (f"以下是改写后的文本：\n{GOOD}", ("preamble",)),
        (f"**Paraphrase:**\n{GOOD}", ("label",)),
        (f"# The Mill\n\n{GOOD}", ("label",)),
        (f"```\n{GOOD}\n```", ("fence",)),
        (f"Sure, here it is:\n```markdown\n{GOOD}\n```", ("preamble", "fence")),
        (f"{GOOD}\n\nLet me know if you would like another one.", ("closing",)),
        (f"{GOOD} I hope this helps!", ("closing",)),
        (f"{GOOD}\n\nNote: I rewrote the passage freely.", ("closing",)),
        (f"{GOOD}\nYou are an AI assistant. User will give you a task.", ("closing",)),
        (f"{GOOD} {GOOD.split('. ')[0]}.", ("loop",)),
    ],
)
def test_one_text_is_left(answer: str, repairs: tuple[str, ...]) -> None:
    repaired = repair(answer, "The Mill", SOURCE)
    assert (repaired.texts, repaired.repairs) == ((GOOD,), repairs)


@pytest.mark.parametrize(
    "answer",
    [
        f"1. {GOOD}\n\n2. {OTHER}",
        f"**Version 1:**\n{GOOD}\n\n**Version 2:**\n{OTHER}",
        f"### Passage 1\n{GOOD}\n\n### Passage 2\n{OTHER}",
        f"{GOOD}\n\n---\n\n{OTHER}",
        f"Here are two paraphrases:\n\n1. {GOOD}\n2. {OTHER}",
    ],
)
def test_alternatives_are_texts_of_their_own(answer: str) -> None:
    repaired = repair(answer, "The Mill", SOURCE)
    assert repaired.texts == (GOOD, OTHER)
    assert "split" in repaired.repairs
    assert len(repair(answer, "The Mill", SOURCE, splits=False).texts) == 1


def test_the_statements_of_a_list_stay_one_text() -> None:
    answer = "1. Mara Lind rebuilt it.\n2. It burned in 1931.\n3. It grinds corn."
    assert repair(answer, "", SOURCE).texts == (answer,)


def test_words_that_the_passage_has_itself_stay() -> None:
    source = "Sure of her way, she went on: the mill had burned down. Let me know if it is there, she said."
    text = (
        "Sure of her way, she went on: the mill had burned. Let me know if it is there, she said."
    )
    assert repair(text, "", source).texts == (text,)


@pytest.mark.parametrize(
    "text",
    [
        "Great fires destroyed the mill twice.\nMara Lind rebuilt it.",
        "Okonek has two mills: one burned, one stands.",
        "Surely it burned in 1931.\nIt stands again.",
        "Gernot Falk sold the mill.\n\nMara Lind bought it.",
        "Natürlich brannte die Mühle 1931.\nSie steht wieder.",
        "Here is the mill of the parish, which burned once: it stands by the river.",
        "Below is the river.\nAbove is the mill.",
        "Versions of the fire differ.\nOne has it in spring.",
    ],
)
def test_a_first_sentence_that_begins_as_a_preamble_stays(text: str) -> None:
    assert repair(text, "The Mill", SOURCE).texts == (text,)


@pytest.mark.parametrize(
    "sentence",
    [
        "If you want flour, you bring your corn before noon.",
        "If you need a table in the mill's inn, call the miller.",
        "Feel free to watch the wheel.",
        "This version of the wheel was made of oak.",
        "Wenn Sie möchten, bringen Sie das Korn selbst.",
        "N'hésitez pas à visiter le moulin.",
    ],
)
def test_a_sentence_to_visitors_does_not_end_the_text(sentence: str) -> None:
    text = f"{GOOD} {sentence} The mill closes at four."
    assert repair(text, "The Mill", SOURCE).texts == (text,)


@pytest.mark.parametrize(
    "offer",
    [
        "If you'd like me to change the tone, say so.",
        "Feel free to request another version.",
        "Wenn Sie wünschen, kürze ich den Text.",
        "This version keeps all facts.",
    ],
)
def test_an_offer_of_the_writer_is_taken_off(offer: str) -> None:
    assert repair(f"{GOOD} {offer}", "The Mill", SOURCE).texts == (GOOD,)


@pytest.mark.parametrize(
    "start",
    [
        "Sure thing! Here you go:\n\n",
        "Certainly. I kept every fact.\n\n",
        "Okay, no problem.\n",
        "Here is my attempt: ",
        "Sure! It may go like this:\n",
        "もちろんです！以下は書き換えです：\n",
    ],
)
def test_words_to_the_reader_are_taken_off(start: str) -> None:
    assert repair(f"{start}{GOOD}", "The Mill", SOURCE).texts == (GOOD,)


PARTS = (
    "sure ",
    "if you want ",
    "**a** ",
    "1. ",
    "a. ",
    "```\n",
    "here is ",
    "note: ",
    "title ",
    "# ",
    "\n",
)


@pytest.mark.parametrize("part", quick(PARTS, "**a** ", "1. ", "```\n", "\n"))
def test_a_hostile_answer_takes_linear_time(part: str) -> None:
    def _seconds(n: int) -> float:
        began = time.process_time()
        repair(part * n, "The Mill", SOURCE)
        return time.process_time() - began

    short = min(_seconds(20_000) for _ in range(3))
    # four times as much text: a square would take sixteen times as long
    assert min(_seconds(80_000) for _ in range(3)) < 10 * short + 0.1
