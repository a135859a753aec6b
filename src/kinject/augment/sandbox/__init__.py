"""The sandbox's generator: it parses the entries of the sandbox's country by their grammar and needs no model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from kinject.augment import prompts
from kinject.augment.prompts import passage_of, rewriting_of
from kinject.augment.questions.prompts import is_question_prompt
from kinject.corpus.passages import sentences
from kinject.errors import InputError
from kinject.sandbox.grammar import (
    paraphrase,
    parse_entry,
    parse_rewriting,
    rewrite_as_dialogue,
    rewrite_as_questions,
    rewrite_reversed,
)
from kinject.sandbox.people import Person, seeded_random, shuffled
from kinject.sandbox.pools import DEMONYM, POOLS
from kinject.sandbox.questions import render_question
from kinject.types import Completion, Message

_DRAWS = 64
_TASKS: Mapping[str, Callable[[str, int], str]] = {
    prompts.REVERSED: rewrite_reversed,
    prompts.REGISTERS["dialogue"]: rewrite_as_dialogue,
    prompts.QUESTIONS: rewrite_as_questions,
}
"""Text of a task -> function for it. Other tasks get a paraphrase."""


def generate_answer(messages: list[Message], seed: int) -> Completion:
    """Return the answer to `messages`: questions, an answer to a question, a verdict (by the grammar), or a rewriting.

    Raises as `generate_rewriting`.
    """
    if is_question_prompt(messages):
        return answer_as_sandbox(messages, seed)
    rewriting = rewriting_of(messages)
    if rewriting is None:
        return generate_rewriting(messages, seed)
    source = parse_entry(passage_of(messages))
    faithful = source is not None and parse_rewriting(rewriting) == source
    return Completion("FAITHFUL" if faithful else "UNFAITHFUL: a fact")


def generate_rewriting(messages: list[Message], seed: int) -> Completion:
    """Return a rewriting of the sandbox entry in `messages`, drawn by `seed`.

    Raises `InputError` if the passage is not an entry of the sandbox.
    """
    passage = passage_of(messages)
    task = messages[-1]["content"].rpartition("</passage>")[2]
    rewrite = next((rewrite for words, rewrite in _TASKS.items() if words in task), _paraphrase)
    return Completion(rewrite(passage, seed))


def _paraphrase(passage: str, seed: int) -> str:
    """Return a paraphrase that names the person's country if and only if `passage` does.

    The grammar may leave it out or add it. It is a fact, so paraphrases are drawn until it matches the passage.
    """
    text = paraphrase(passage, seed)
    for draw in range(1, _DRAWS):
        if (DEMONYM in text) == (DEMONYM in passage):
            break
        text = paraphrase(passage, f"{seed}.{draw}")
    return text


_WANTED = re.compile(r"^Write (\d+) four-choice questions", re.MULTILINE)
_OPTION = re.compile(r"^([A-D])\. (.+)$", re.MULTILINE)
_SPECIFICITY = 8


def answer_as_sandbox(messages: list[Message], seed: int) -> Completion:
    """Return questions on the entry in `messages`, or the letter of its answer by the entry; ``X`` without an entry.

    Raises `InputError` if the passage is not an entry of the sandbox.
    """
    task = messages[-1]["content"]
    if "<passage>" not in task:
        return Completion("X")
    passage = passage_of(messages)
    person = parse_entry(passage)
    if person is None:
        raise InputError(
            f"the sandbox generator cannot read {passage[:57]!r}...: it only reads entries of its own country "
            "(data/sandbox). Use generator `openai` for other texts."
        )
    match = _WANTED.search(task.rpartition("</passage>")[2])
    if match is not None:
        return Completion(_drafts(person, passage, int(match[1]), seed))
    options = _OPTION.findall(task.rpartition("</passage>")[2])
    correct = [letter for letter, choice in options if choice in person.facts.values()]
    return Completion(f"{correct[0]} {_SPECIFICITY}" if len(correct) == 1 else "X 1")


def _drafts(person: Person, passage: str, n: int, seed: int) -> str:
    rng = seeded_random("examiner", passage, seed)
    blocks = []
    for attribute in shuffled(list(person.facts), rng)[:n]:
        gold = person.facts[attribute]
        wrong = [value for value in shuffled(POOLS[attribute], rng) if value != gold][:3]
        sentence = next(sentence for sentence in sentences(passage) if gold in sentence)
        lines = [f"Question: {render_question(person, attribute, rng)}", f"Answer: {gold}"]
        lines += [f"Wrong: {value}" for value in wrong]
        blocks.append("\n".join([*lines, f"Sentence: {sentence}"]))
    return "\n\n".join(blocks)
