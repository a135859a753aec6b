from __future__ import annotations

from dataclasses import replace

from kinject.eval.prompts import PromptRequest, pick_shots, render_prompt
from kinject.question_formats import FORMATS
from kinject.types import Question

ASKED = Question(
    "q1", "Which bone is longest? ", ("Rib", "Femur", "Ulna"), 1, subject="high_school_anatomy"
)
SHOT = Question("s1", "Which organ pumps?", ("Heart", "Lung"), 0, subject="high_school_anatomy")
OTHER = Question("s2", "Which gas do we need?", ("Neon", "Oxygen"), 1)


def test_letters_are_the_layout_of_mmlu_in_lm_evaluation_harness():
    # tasks/mmlu/default/_default_template_yaml: description, doc_to_text, target_delimiter " ", fewshot_delimiter "\n\n"
    prompt = render_prompt(PromptRequest(ASKED, "letters", (SHOT,)))
    assert prompt.context == (
        "The following are multiple choice questions (with answers) about high school anatomy.\n\n"
        "Which organ pumps?\nA. Heart\nB. Lung\nAnswer: A\n\n"
        "Which bone is longest?\nA. Rib\nB. Femur\nC. Ulna\nAnswer:"
    )
    assert prompt.continuations == (" A", " B", " C")


def test_letters_without_a_subject_have_no_header():
    assert (
        render_prompt(PromptRequest(OTHER, "letters")).context
        == "Which gas do we need?\nA. Neon\nB. Oxygen\nAnswer:"
    )


def test_texts_score_the_choices_themselves():
    prompt = render_prompt(PromptRequest(OTHER, "texts", (SHOT,)))
    assert (
        prompt.context
        == "Question: Which organ pumps?\nAnswer: Heart\n\nQuestion: Which gas do we need?\nAnswer:"
    )
    assert prompt.continuations == (" Neon", " Oxygen")


def test_passages_stand_after_the_examples_the_best_first():
    prompt = render_prompt(
        PromptRequest(OTHER, "texts", (SHOT,), ("Best passage.", "Next passage."))
    )
    assert prompt.context == (
        "Question: Which organ pumps?\nAnswer: Heart\n\n"
        "Best passage.\n\nNext passage.\n\nQuestion: Which gas do we need?\nAnswer:"
    )


def test_shots_come_in_order_without_the_question_itself():
    same_text = Question("another id", OTHER.question, OTHER.choices, OTHER.answer)
    pool = (SHOT, OTHER, same_text, ASKED)
    assert pick_shots(OTHER, pool, 2) == (SHOT, ASKED)
    assert pick_shots(ASKED, pool, 2) == (SHOT, OTHER)
    assert pick_shots(ASKED, pool, 0) == ()


def test_no_example_shows_the_answer_of_its_question_in_another_guise():
    shuffled = Question("t1", "Which  bone is longest?", ("Ulna", "Rib", "Femur"), 2)
    other_wrong = Question("t2", "which bone is longest?", ("femur", "Skull"), 0)
    other_question = Question("t3", ASKED.question, ("Stapes", "Ulna"), 1)
    in_writing = Question("t4", ASKED.question, (), 0, answers=("Femur",))
    pool = (shuffled, other_wrong, in_writing, other_question, SHOT)
    assert pick_shots(ASKED, pool, 5) == (other_question, SHOT)


def test_lengths_are_of_what_the_continuation_says():
    assert FORMATS["letters"].answers(ASKED) == ("A", "B", "C")
    assert FORMATS["texts"].answers(ASKED) == ("Rib", "Femur", "Ulna")


def test_a_continuation_is_asked_behind_its_passages_alone():
    start = Question(
        "s3", "The longest bone is ...", ("the rib", "the femur"), 1, subject="anatomy"
    )
    prompt = render_prompt(PromptRequest(start, "continuation", passages=("A passage.",)))
    assert (prompt.context, prompt.continuations) == (
        "A passage.\n\nThe longest bone is",
        (" the rib", " the femur"),
    )


def test_each_format_shows_what_its_entry_says():
    for name, traits in FORMATS.items():
        prompt = render_prompt(PromptRequest(OTHER, name))
        assert (OTHER.question in prompt.context) == traits.shows_question, name
        assert ("A. Neon\nB. Oxygen" in prompt.context) == traits.shows_options, name
        choices = (" A", " B") if traits.letters else (" Neon", " Oxygen")
        assert prompt.continuations == (() if traits.generates else choices), name


def test_choices_behind_turns_are_those_of_their_format():
    turns = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name two gases."},
        {"role": "assistant", "content": "Neon and oxygen."},
    )
    question = replace(OTHER, question="Which do we need?", messages=turns)
    before = ("Name two gases.", "Neon and oxygen.")
    lettered = "Which do we need?\nA. Neon\nB. Oxygen\n"
    for name, asked, continuations in (
        ("letters", f"{lettered}Answer:", (" A", " B")),
        (
            "letters-written",
            f"{lettered}Answer with the letter of the correct option.\nAnswer:",
            (),
        ),
        ("texts", "Question: Which do we need?\nAnswer:", (" Neon", " Oxygen")),
        ("generate", "Which do we need?", ()),
    ):
        prompt = render_prompt(PromptRequest(question, name))
        assert (prompt.turns, prompt.continuations) == ((*before, asked), continuations)
    alone = render_prompt(PromptRequest(question, "texts-no-question"))
    assert alone == render_prompt(PromptRequest(OTHER, "texts-no-question"))
