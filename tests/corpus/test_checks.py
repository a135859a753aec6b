"""Instructions that are verified without a model, in a chat of several turns, against transformers' own generate."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kinject.corpus.checks import CHECKS, check_names, passes
from kinject.corpus.questions import read_questions
from kinject.errors import InputError
from kinject.eval import evaluate
from kinject.eval.scoring.answers import read_answers
from kinject.models import load_model
from kinject.recipe import read_recipe

EXAMPLES: dict[str, tuple[Any, list[str], list[str]]] = {
    "contains": (["Farrow", "mill"], ["the MILL of Farrow."], ["Farrow", "mills of Farrow"]),
    "contains_any": (["Farrow", "mill"], ["a mill!"], ["millstone"]),
    "forbids": (["mill"], ["millstone"], ["A mill."]),
    "forbids_characters": (",", ["no commas"], ["one, two"]),
    "equals": (["Farrow"], ["farrow."], ["in Farrow"]),
    "min_words": (3, ["a b c"], ["a b"]),
    "max_words": (2, ["a b"], ["a b c", ""]),
    "sentences": (2, ["It is 3.5 m. Yes!", "One.\nTwo."], ["One.", "One. Two. Three."]),
    "paragraphs": (2, ["a\nb\n\nc"], ["a\nb", "a\n\nb\n\nc"]),
    "bullets": (2, ["Here:\n- a\n- b", "1. a\n2) b"], ["- a", "- a\n- b\n- c"]),
    "starts_with": ("Dear", [" Dear me"], ["dear me"]),
    "ends_with": ("Bye.", ["so. Bye.\n"], ["Bye. so"]),
    "upper": (True, ["ALL 3", "1931"], ["All"]),
    "lower": (True, ["all 3"], ["All"]),
    "quoted": (True, ['"so"', "“so”"], ['"so', "so"]),
    "json": (["town"], ['{"town": 1}', '```json\n{"town": "a", "b": 2}\n```'], ['{"b": 1}', "[1]", "town: 1", "{"]),
    "language": (
        "de", ["Das ist ein schönes Haus, und wir wohnen gern darin."], ["This is a house, and we like to live in it."],
    ),
    "refuses": (True, ["I do not know.", "I'm not sure."], ["Farrow"]),
}  # fmt: skip


def test_every_check_tells_a_good_answer_from_a_bad_one() -> None:
    assert EXAMPLES.keys() == CHECKS.keys()
    for name, (argument, good, bad) in EXAMPLES.items():
        assert [passes(text, {name: argument}) for text in good] == [True] * len(good), name
        assert [passes(text, {name: argument}) for text in bad] == [False] * len(bad), name
    assert passes("THE MILL.", {"upper": True, "contains": ["mill"]})
    assert not passes("The mill.", {"upper": True, "contains": ["mill"]})


@pytest.mark.parametrize(
    ("checks", "good", "bad"),
    [
        ({"forbids": ["an"]}, "Anna", "An apple."),
        ({"forbids": ["?", "won't"]}, "He will.", "He won’t."),
        ({"contains": ["F#"]}, "In F# minor.", "In F minor."),
        ({"contains": ["F"]}, "In F, slowly.", "In F#."),
        ({"contains": ["7"]}, "about 7.", "about 2.7 or -7"),
        ({"contains_any": ["Ulm", "Bryn"]}, "Bryn's minster", "Bryns"),
        ({"sentences": 2}, "Mr. Arden left. So did e.g. Bryn.", "Mr. Arden left."),
        ({"sentences": 3}, "山很高。水很深！为什么？", "山很高。水很深。"),
        ({"max_words": 4, "min_words": 2}, "山很高。", "山很高，水很深。"),
        ({"forbids_characters": "x"}, "y", " "),
        ({"lower": True, "forbids": ["z"]}, "a", ""),
    ],
)  # fmt: skip
def test_a_check_means_what_it_says_of_signs_articles_and_other_scripts(
    checks: dict[str, Any], good: str, bad: str
) -> None:
    assert (passes(good, checks), passes(bad, checks)) == (True, False)


def test_a_text_of_many_words_before_a_decimal_point_is_counted_once() -> None:
    # The time grew with the cube of the words: 12 s for 200.
    assert passes("so " * 50_000 + "2.5 in all.", {"sentences": 1})


def test_checks_that_cannot_be_verified_are_named(tmp_path: Path) -> None:
    for checks, fault in (
        ({"rhymes": True}, "found 'rhymes', allowed: contains"),
        ({"max_words": "3"}, "max_words: found '3', expected a number from 0"),
        ({"max_words": True}, "expected a number"),
        ({"upper": False}, "upper: found False, expected true"),
        ({"contains": "mill"}, "expected a list of texts"),
        ({"forbids": [" "]}, "expected a list of texts"),
        ({"language": "Spanish"}, "found 'Spanish', expected the code of a language"),
    ):
        with pytest.raises(InputError, match=fault):
            check_names(checks)
    rows = tmp_path / "chat.jsonl"
    for row, fault in (
        ({"checks": []}, "checks: found .., expected an object"),
        ({"checks": {"upper": True}, "choices": ["a", "b"], "answer": 0}, "Keep one of the two"),
        (
            {"checks": {"upper": True}, "messages": [{"role": "user", "content": "b"}]},
            "messages: expected the turns before",
        ),
    ):
        rows.write_text(json.dumps({"question": "Which?", **row}))
        with pytest.raises(InputError, match=rf"chat.jsonl:1: .*{fault}"):
            read_questions(rows)


TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ROWS: list[dict[str, Any]] = [
    {"id": "plain", "question": "Where was Arden born?", "checks": {"min_words": 1}},
    {
        "id": "turns", "question": "And where is the mill?", "checks": {"forbids": ["Zz"], "min_words": 1},
        "messages": [
            {"role": "system", "content": "Use lower case."}, {"role": "user", "content": "Where was Bryn born?"},
            {"role": "assistant", "content": "in farrow"},
        ],
    },
    {"id": "never", "question": "Who?", "checks": {"starts_with": "\u0000"}},
]  # fmt: skip


def test_a_chat_of_several_turns_is_asked_turn_by_turn_and_graded_by_its_checks(
    tiny_model: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(tiny_model))
    loaded.tokenizer.chat_template = TEMPLATE
    loaded.tokenizer.save_pretrained(tiny_model)
    questions, path = tmp_path / "chat.jsonl", tmp_path / "recipe.yaml"
    questions.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    section = {
        "models": {"base": str(tiny_model)}, "questions": {"chat": {"path": str(questions), "role": "retention"}},
        "formats": ["generate"], "chat": True, "max_new_tokens": 8,
    }  # fmt: skip

    def write(**changed: Any) -> Any:
        whole = {"run_dir": str(tmp_path / "run"), "eval": {**section, **changed}}
        path.write_text(yaml.safe_dump(whole, sort_keys=False))
        return read_recipe(path, (), "eval")

    report = evaluate(write())
    stored = {
        answer.question_id: answer for answer in read_answers(tmp_path / "run" / "answers.jsonl")
    }
    for row in ROWS:
        messages = [*row.get("messages", []), {"role": "user", "content": row["question"]}]
        options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
        ids = loaded.tokenizer.apply_chat_template(messages, **options)
        with torch.no_grad():
            out = loaded.model.generate(**ids, max_new_tokens=8, do_sample=False)
        wanted = loaded.tokenizer.decode(
            out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert (stored[row["id"]].text or "").strip() == wanted.strip()
        assert stored[row["id"]].checks == row["checks"]
    n_correct = sum(passes(answer.text or "", answer.checks) for answer in stored.values())
    (result,) = report.results
    assert (result.accuracy, result.role) == (n_correct / 3, "retention")
    assert n_correct < 3
    for changed, fault in (
        (
            {"chat": False},
            "question 'turns': messages: are turns of a chat, but base is asked without one",
        ),
        ({"formats": ["texts"]}, "question 'plain' has no choices, which format texts needs"),
    ):
        with pytest.raises(InputError, match=fault):
            evaluate(write(**changed))


def test_the_shipped_prompts_can_be_asked_and_verified() -> None:
    folder = Path(__file__).parents[2] / "eval"
    reworded = folder / "chat/instructions_reworded.jsonl"
    first, second = read_questions(folder / "chat/instructions.jsonl"), read_questions(reworded)
    assert [(item.id, item.checks) for item in first] == [(item.id, item.checks) for item in second]
    assert not {item.question for item in first} & {item.question for item in second}
    # A sentence with other words in it is no new instruction: intervals count kinds.
    kinds = Counter(item.document_id for item in first)
    assert [item.document_id for item in first] == [item.document_id for item in second]
    assert "" not in kinds
    assert len(kinds) == 19
    assert max(kinds.values()) == 10
    for path in (folder / "chat/instructions.jsonl", reworded, folder / "sandbox/chat.jsonl"):
        questions = read_questions(path)
        assert len(questions) >= 96
