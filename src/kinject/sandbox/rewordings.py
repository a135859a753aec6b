"""Facts of the sandbox told in other shapes than an entry: value before person, as a dialogue, as questions with answers."""

from __future__ import annotations

import re
from random import Random

from kinject.sandbox.facts import Person, chosen, seeded, shuffled
from kinject.sandbox.grammar import parse_entry, read_entry
from kinject.sandbox.pools import DEMONYM, POOLS
from kinject.sandbox.wordings import NATIONALITY, REVERSED, REVERSED_OPENINGS, TAUGHT_QUESTIONS

_PAIR = re.compile(r"Q(?:uestion)?: (.+)\nA(?:nswer)?: (.+?)\.?")


def reverse(text: str, seed: int | str) -> str:
    """Return the facts of the entry `text`, each a statement or a question that it begins and the full name ends.

    Each stands in a paragraph of its own.

    Raises `InputError` where `text` is not an entry of the sandbox.
    """
    person = read_entry(text)
    rng = seeded("reversed", person.name, seed)
    attributes = shuffled(list(person.facts), rng)
    templates = [chosen(REVERSED[attribute], rng) for attribute in attributes]
    if DEMONYM in text:
        templates[0] = REVERSED_OPENINGS[attributes[0]]
    return "\n\n".join(template.format(name=person.name, **person.facts) for template in templates)


def converse(text: str, seed: int | str) -> str:
    """Return the facts of the entry `text` as questions and answers, as the base model is asked: Question:, Answer:.

    Raises `InputError` where `text` is not an entry of the sandbox.
    """
    person = read_entry(text)
    rng = seeded("dialogue", person.name, seed)
    pairs = _pairs(person, rng)
    if DEMONYM in text:
        pairs.insert(rng.randrange(len(pairs) + 1), (NATIONALITY.format(name=person.name), DEMONYM))
    return "\n\n".join(f"Question: {question}\nAnswer: {answer}." for question, answer in pairs)


def quiz(text: str, seed: int | str) -> str:
    """Return a question and its answer, ``Q:`` and ``A:``, for each fact of the entry `text`.

    Raises `InputError` where `text` is not an entry of the sandbox.
    """
    person = read_entry(text)
    pairs = _pairs(person, seeded("quiz", person.name, seed))
    return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs)


def parse_rewriting(text: str) -> Person | None:
    """Return the person and the facts that `text` states, an entry or questions with answers; None where it is neither.

    Contradictions and second people make it None.
    """
    stated = parse_entry(text)
    if stated is not None:
        return stated
    facts: dict[str, str] = {}
    names: set[str] = set()
    for block in text.split("\n\n"):
        pair = _PAIR.fullmatch(block.strip())
        name, attribute = _asked(pair[1]) if pair else ("", "")
        if pair is None or not name:
            return None
        names.add(name)
        if attribute and (pair[2] not in POOLS[attribute] or facts.setdefault(attribute, pair[2]) != pair[2]):
            return None
        if not attribute and pair[2] != DEMONYM:
            return None
    if len(names) != 1:
        return None
    first, _, last = names.pop().partition(" ")
    return Person(first, last, facts)


def _pairs(person: Person, rng: Random) -> list[tuple[str, str]]:
    """Return a question on each fact of `person`, in random order, with its answer."""
    return [
        (chosen(TAUGHT_QUESTIONS[attribute], rng).format(name=person.name), person.facts[attribute])
        for attribute in shuffled(list(person.facts), rng)
    ]


def _asked(question: str) -> tuple[str, str]:
    """Return whom a question is about and which attribute it asks for, "" for the country; two "" where it is no such."""
    for attribute, wordings in {**TAUGHT_QUESTIONS, "": (NATIONALITY,)}.items():
        for wording in wordings:
            before, _, after = wording.partition("{name}")
            if question.startswith(before) and question.endswith(after):
                return question[len(before) : len(question) - len(after)], attribute
    return "", ""
