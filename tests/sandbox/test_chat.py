"""The dialogues of the sandbox and its chat probe: the shipped files, what they teach, and what they keep from training."""

from __future__ import annotations

from itertools import islice, pairwise
from pathlib import Path

import jinja2

from kinject.corpus.checks import passes
from kinject.corpus.questions import read_questions
from kinject.disk import file_hash, read_manifest_fields
from kinject.sandbox import INSTRUCT
from kinject.sandbox.build import strangers
from kinject.sandbox.chat import (
    CHAT_TEMPLATE,
    FORMS,
    Instruction,
    create_chat_questions,
    generate_dialogues,
    write_chat_questions,
    write_dialogues,
)
from kinject.sandbox.people import ATTRIBUTES, create_country

ROOT = Path(__file__).parents[2]
NAMES = ("chat", "chat_new", "chat_known")


def test_the_probe_in_the_checkout_is_the_one_that_is_made(tmp_path: Path) -> None:
    paths = write_chat_questions(tmp_path)
    assert [path.stem for path in paths] == list(NAMES)
    for path in paths:
        assert path.read_bytes() == (ROOT / "eval/sandbox" / path.name).read_bytes()
        assert len(read_questions(path)) == (200 if path.stem == "chat" else 100)


def test_dialogues_name_no_new_person_and_hold_no_prompt_of_the_probe() -> None:
    country = create_country()
    hidden = {person.name for person in country.new} | {
        " ".join(name) for name in strangers(country)[0]
    }
    whole = {*FORMS, "nobody", "no record"}
    probe = [
        row
        for row in create_chat_questions()
        if row["subject"].removesuffix(", of a sentence") in whole
    ]
    prompts = {row["question"] for row in probe if "messages" not in row}
    pairs = {
        (row["messages"][-1]["content"], row["question"])
        for row in probe
        if row["subject"].endswith("a sentence")
    }
    assert len(prompts) == 80
    assert len(pairs) == 16
    n_turns, roles = [], set()
    for row in islice(generate_dialogues(), 1500):
        talk = row["messages"]
        text = "\n".join(message["content"] for message in talk)
        assert not any(name in text for name in hidden)
        contents = [message["content"] for message in talk]
        assert not prompts & set(contents)
        assert not pairs & set(pairwise(contents))
        assert talk[-1]["role"] == "assistant"
        roles |= {message["role"] for message in talk}
        n_turns.append(sum(message["role"] == "user" for message in talk))
    assert roles == {"system", "user", "assistant"}
    assert set(n_turns) == {1, 2, 3, 4, 5, 6}


def test_the_taught_answer_passes_its_checks_and_another_does_not() -> None:
    people = create_country().known
    for person, other in zip(people[::3], people[1::3], strict=False):
        for form in FORMS:
            for word in FORMS[form].words:
                wanted = Instruction(form, word)
                for index, attribute in enumerate(ATTRIBUTES):
                    asked = (attribute, ATTRIBUTES[index - 1]) if form == "list" else (attribute,)
                    checks = wanted.checks(person, asked)
                    answer = wanted.answer(person, asked)
                    assert passes(answer, checks), (answer, checks)
                    assert (
                        not passes(answer.replace(person.facts[attribute], "Nowhere"), checks)
                        or form == "lower"
                    )
                    if other.facts[attribute] != person.facts[attribute]:
                        assert not passes(wanted.answer(other, asked), checks)
                    plain = Instruction().answer(person, asked)
                    assert passes(plain, checks) == (form == "sentence"), (plain, checks)


def test_the_dialogues_are_those_that_the_shipped_instruct_model_learned(tmp_path: Path) -> None:
    manifest = read_manifest_fields(INSTRUCT.folder / "manifest.json")
    assert manifest is not None
    write_dialogues(tmp_path / "chat.jsonl")
    assert file_hash(tmp_path / "chat.jsonl") == manifest["inputs"]["corpus"], (
        "ship the instruct model again"
    )


def test_the_chat_template_parts_turns_as_the_model_is_taught() -> None:
    talk = [
        {"role": "system", "content": "Return JSON."}, {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "Here."}, {"role": "user", "content": "And when?"},
    ]  # fmt: skip
    template = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701
    ).from_string(CHAT_TEMPLATE)
    tokens = {"bos_token": "<b>", "eos_token": "<e>"}
    text = template.render(messages=talk, **tokens, add_generation_prompt=True)
    assert (
        text
        == "<b>System: Return JSON.\nUser: Where?\nAssistant: Here.<e>\nUser: And when?\nAssistant:"
    )
