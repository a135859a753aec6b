"""The sandbox's own examiner: it writes and answers questions on the sandbox's entries, and needs no model."""

from __future__ import annotations

import re

from kinject.augment.prompts import passage_of
from kinject.corpus.passages import sentences
from kinject.errors import InputError
from kinject.sandbox.grammar import parse_entry
from kinject.sandbox.people import Person, seeded_random, shuffled
from kinject.sandbox.pools import POOLS
from kinject.sandbox.questions import render_question
from kinject.types import Completion, Message

_WANTED = re.compile(r"^Write (\d+) four-choice questions", re.MULTILINE)
_OPTION = re.compile(r"^([A-D])\. (.+)$", re.MULTILINE)
_SPECIFICITY = 8


def answer_as_sandbox(messages: list[Message], seed: int) -> Completion:
    """Return questions on the entry in `messages`, or the letter that it holds right; without an entry, ``X``.

    Raises `InputError` where the passage is not an entry of the sandbox.
    """
    task = messages[-1]["content"]
    if "<passage>" not in task:
        return Completion("X")
    passage = passage_of(messages)
    person = parse_entry(passage)
    if person is None:
        raise InputError(
            f"the sandbox generator cannot read {passage[:57]!r}...: it only asks about entries of its own country "
            "(data/sandbox). Use generator `openai` for other texts."
        )
    wanted = _WANTED.search(task.rpartition("</passage>")[2])
    if wanted is not None:
        return Completion(_drafts(person, passage, int(wanted[1]), seed))
    options = _OPTION.findall(task.rpartition("</passage>")[2])
    right = [letter for letter, choice in options if choice in person.facts.values()]
    return Completion(f"{right[0]} {_SPECIFICITY}" if len(right) == 1 else "X 1")


def _drafts(person: Person, passage: str, n: int, seed: int) -> str:
    rng = seeded_random("examiner", passage, seed)
    blocks = []
    for attribute in shuffled(list(person.facts), rng)[:n]:
        gold = person.facts[attribute]
        wrong = [value for value in shuffled(POOLS[attribute], rng) if value != gold][:3]
        sentence = next(sentence for sentence in sentences(passage) if gold in sentence)
        lines = [
            f"Question: {render_question(person, attribute, rng)}",
            f"Answer: {gold}",
            *(f"Wrong: {value}" for value in wrong),
        ]
        blocks.append("\n".join([*lines, f"Sentence: {sentence}"]))
    return "\n\n".join(blocks)
