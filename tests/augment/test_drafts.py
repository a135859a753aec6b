"""What is read from a model's questions, and what gives an answer away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kinject.augment.drafts import REASONS, Candidate, Draft, find_fault, read_drafts
from kinject.augment.prompts import Source
from kinject.augment.question_outcomes import Outcome, QuestionSelector, outcome_row
from kinject.augment.question_prompts import parse_letter, parse_specificity, propose_messages
from kinject.augment.sandbox import answer_as_sandbox
from kinject.recipe import GeneratorSection, QuestionsSection
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from kinject.types import Document, Passage

PASSAGE = "Mara Lind was born in Arvika. She finished the Falk Bridge in the spring of 1931, with Karin Ekberg."
GOOD = Draft(
    "When was the Falk Bridge finished?",
    "in 1931",
    ("in 1913", "in 1933", "in 1941"),
    PASSAGE.split(". ")[1],
)


def changed(**fields: object) -> Draft:
    return Draft(
        **{
            name: fields.get(name, getattr(GOOD, name))
            for name in ("question", "answer", "wrong", "sentence")
        }
    )  # type: ignore[arg-type]


def test_a_draft_without_a_fault_has_none() -> None:
    assert find_fault(GOOD, PASSAGE, []) == ("", "")


@pytest.mark.parametrize(
    ("reason", "draft"),
    [
        ("malformed", changed(wrong=("in 1913", "in 1933"))),
        ("malformed", changed(sentence="")),
        ("malformed", changed(answer="")),
        ("options", changed(wrong=("In 1931.", "in 1933", "in 1941"))),
        ("options", changed(wrong=("in 1933", "in 1933!", "in 1941"))),
        ("catch-all", changed(wrong=("in 1913", "in 1933", "None of the above"))),
        ("catch-all", changed(wrong=("in 1913", "in 1933", "both A and B"))),
        ("answer in question", changed(question="Which bridge was finished in 1931?")),
        ("longest", changed(answer="in the spring of 1931 with Karin Ekberg")),
        ("odd one out", changed(wrong=("in spring", "in winter", "in autumn"))),
        ("odd one out", changed(answer="in spring")),
        (
            "odd one out",
            changed(
                answer="with Karin Ekberg", wrong=("with a friend", "with no one", "with the king")
            ),
        ),
        (
            "points at the text",
            changed(question="According to the passage, when was the bridge finished?"),
        ),
        ("sentence", changed(sentence="She finished the Falk Bridge in 1931")),
    ],
)
def test_what_gives_the_answer_away_is_refused_by_name(reason: str, draft: Draft) -> None:
    assert find_fault(draft, PASSAGE, [])[0] == reason
    assert reason in REASONS


def test_a_question_asked_before_is_a_duplicate_and_another_fact_is_not() -> None:
    assert (
        find_fault(changed(question="when was the falk bridge finished"), PASSAGE, [GOOD])[0]
        == "duplicate"
    )
    assert (
        find_fault(changed(question="When was the great Falk Bridge finished?"), PASSAGE, [GOOD])[0]
        == "duplicate"
    )
    other = changed(
        question="Who helped to finish the Falk Bridge?",
        answer="Karin Ekberg",
        wrong=("Ola Berg", "Eva Dahl", "Nils Holm"),
    )
    assert find_fault(other, PASSAGE, [GOOD]) == ("", "")


def test_drafts_are_read_in_the_forms_that_models_write() -> None:
    wrong = [f"Wrong: {text}" for text in GOOD.wrong]
    lines = [
        f"Question: {GOOD.question}",
        f"Answer: {GOOD.answer}",
        *wrong,
        f'Sentence: "{GOOD.sentence}"',
    ]
    plain = "\n".join(lines)
    bold = "\n".join("**" + line.replace(":", ":**", 1) for line in lines)
    colon_outside = "\n".join("- **" + line.replace(":", "**:", 1) for line in lines)
    below = "Question 3:\n" + "\n\n".join(line.replace(": ", " (1):\n", 1) for line in lines)
    named = plain.replace("Answer:", "Correct answer：").replace("Wrong:", "Wrong answer 2:")
    numbered = "\n".join([f"1. {lines[0]}", *(f"   - {line}" for line in lines[1:])])
    for form in (
        plain,
        bold,
        colon_outside,
        below,
        named,
        numbered,
        f"```\n{plain}\n```",
        plain.lower().replace("question", "QUESTION 1"),
    ):
        (draft,) = read_drafts(form)
        assert [
            text.casefold() for text in (draft.question, draft.answer, *draft.wrong, draft.sentence)
        ] == [text.casefold() for text in (GOOD.question, GOOD.answer, *GOOD.wrong, GOOD.sentence)]
    assert len(read_drafts(f"Here you are:\n\n{plain}\n\n{bold}")) == 2
    assert read_drafts("no questions at all") == []
    assert read_drafts("Question: only this?") == [Draft("only this?", "", (), "")]


@pytest.mark.parametrize(
    ("answer", "letter", "specificity"),
    [
        ("B 7", "B", 7), ("**c** 10", "C", 10), ("The answer is D, 3", "D", 3), ("X 2", "", 2), ("Because", "", 1),
        ("A", "A", 1), ("", "", 1), ("A few of them, 6", "", 6), ("D’abord: 4", "", 4),
        ("The correct answer is: **C**. 6", "C", 6), ("Option D 4", "D", 4), ("The best option for both, 5", "", 5),
        ("A because of line 8", "A", 8), ("(B) specificity: 9/10", "B", 9),
    ],
)  # fmt: skip
def test_letter_and_number_are_read(answer: str, letter: str, specificity: int) -> None:
    assert parse_letter(answer) == letter
    assert parse_specificity(answer) == specificity


def test_the_place_of_the_right_answer_is_the_same_for_the_same_words_and_favours_none() -> None:
    positions = []
    for person in create_country(n_known=1, n_new=100).new:
        passage = render_entry(person, 0)
        written = answer_as_sandbox(propose_messages(Source("", passage), 4, ()), 1).text
        positions += [draft.choices.index(draft.answer) for draft in read_drafts(written)]
        assert [draft.choices for draft in read_drafts(written)] == [
            draft.choices for draft in read_drafts(written)
        ]
    assert len(positions) == 400
    assert all(
        70 <= positions.count(position) <= 130 for position in range(4)
    )  # 100 +- 3.5 standard deviations


def test_a_question_is_not_refused_for_what_another_sentence_of_its_passage_has() -> None:
    text = f"Set the <b>span</b> first. {PASSAGE}"
    draft = changed(question="Where in the <b>span</b> list is the Falk Bridge finished?")
    assert find_fault(draft, text, []) == ("", "")
    outcome = Outcome([Candidate(draft, 7)])
    row = outcome_row("o", Passage("p", "d", 0, len(text), text), outcome, 1, "e")
    section = QuestionsSection("documents.jsonl", GeneratorSection("sandbox"))
    selector = QuestionSelector(section, {})
    _, selected, refused = selector.select(Document("d", "Falk", text, "d.md"), row)
    assert ([one["question"] for one in selected], refused) == ([draft.question], [])


def test_where_words_are_not_parted_an_answer_gives_itself_away_as_well() -> None:
    passage = "王安石在江宁建了一座藏书楼。藏书楼里有三千卷书。"
    draft = Draft(
        "谁在江宁建了藏书楼？",
        "王安石",
        ("苏东坡", "沈存中", "司马光"),
        "王安石在江宁建了一座藏书楼",
    )
    for reason, changed_draft in (
        ("", draft),
        ("answer in question", replace(draft, question="王安石建的藏书楼是谁建的？")),
        ("longest", replace(draft, answer="王安石和他的两个学生")),
    ):
        assert find_fault(changed_draft, passage, [])[0] == reason
    again = replace(draft, question="是谁在江宁建了藏书楼？", sentence="藏书楼里有三千卷书")
    assert find_fault(again, passage, [draft])[0] == "duplicate"
