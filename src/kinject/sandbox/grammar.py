"""Writes encyclopedia entries from facts and reads the facts back, so that rewritings keep every
fact."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from random import Random
from string import Formatter
from typing import Final

from kinject.errors import InputError
from kinject.sandbox.people import (
    DEMONYM,
    FEMALE_NAMES,
    LAST_NAMES,
    MALE_NAMES,
    POOLS,
    TEXTS,
    Person,
    choose_one,
    seeded_random,
    shuffled,
)

Templates = dict[str, list[str]]
OPENINGS: Final[list[str]] = TEXTS["openings"]
PAIRS: Final[list[str]] = TEXTS["pairs"]
SENTENCES: Final[Templates] = TEXTS["sentences"]
# Two thirds are questions with their answer: after statements alone reverse questions stay at .26
# to .29, where guessing has .25. The name must be produced behind `Answer:` to be learned.
REVERSED: Final[Templates] = TEXTS["reversed"]
FACT_FIRST: Final[Templates] = TEXTS["fact_first"]
TAUGHT_QUESTIONS: Final[Templates] = TEXTS["taught_questions"]
# With 40% pronouns paraphrases lead repetition by 19 to 22 points, with the full name in every
# sentence by 12 to 21; with 60% the base no longer learned to read (.71).
_OPENING, _PAIR, _PRONOUN = 0.5, 0.1, 0.4
"""Probabilities in an entry: of an opening, of a sentence with two facts, of a pronoun for the
name."""
_PRONOUNS = {"who": ("she", "he"), "whose": ("her", "his"), "whom": ("her", "him")}
_WORDS = {slot: frozenset(values) for slot, values in POOLS.items()} | {
    "first": frozenset(FEMALE_NAMES + MALE_NAMES),
    "last": frozenset(LAST_NAMES),
}
_QUESTION_PAIR = re.compile(r"Q(?:uestion)?: (.+)\nA(?:nswer)?: (.+?)\.?")


@cache
def attributes_of(template: str) -> frozenset[str]:
    """Return the attributes that `template` states."""
    return frozenset(slot for _, slot, _, _ in Formatter().parse(template) if slot in POOLS)


def render_sentence(template: str, person: Person, *, by_pronoun: bool = False) -> str:
    """Return `template` filled in for `person`, by full name or by pronoun, with a capital first
    letter."""
    is_male = person.first in MALE_NAMES
    pronouns = {slot: male if is_male else female for slot, (female, male) in _PRONOUNS.items()}
    slots = {"who": person.name, "whom": person.name, "whose": f"{person.name}'s"}
    if by_pronoun:
        slots = pronouns
    elif template.count("{who}") + template.count("{whose}") > 1:
        # A second mention in one sentence is a pronoun: "Oren Valdis grew up in X, where he was
        # born."
        head, slot, tail = template.partition("{who}")
        tail = tail.replace("{who}", pronouns["who"]).replace("{whose}", pronouns["whose"])
        template = f"{head}{slot}{tail}"
    text = template.format(name=person.name, **slots, **person.facts)
    return text[0].upper() + text[1:]


def render_entry(person: Person, seed: int | str) -> str:
    """Return an entry that states every fact of `person` once; `seed` fixes the sentences and their
    order."""
    rng = seeded_random("entry", person.name, seed)
    remaining = shuffled(list(person.facts), rng)
    templates: list[str] = []
    if rng.random() < _OPENING:
        templates += _take_template(OPENINGS, remaining, rng)
    while remaining:
        if rng.random() < _PAIR:
            pair = _take_template(PAIRS, remaining, rng)
            # Where no pair of the facts that are left has a template, one fact has a sentence
            # alone.
            if pair:
                templates += pair
                continue
        templates.append(choose_one(SENTENCES[remaining.pop(0)], rng))
    others = (
        render_sentence(template, person, by_pronoun=rng.random() < _PRONOUN)
        for template in templates[1:]
    )
    # The first sentence has the full name, without which `parse_entry` finds nobody.
    return " ".join([render_sentence(templates[0], person), *others])


def _take_template(templates: Sequence[str], remaining: list[str], rng: Random) -> list[str]:
    """Return one of `templates` whose attributes are all in `remaining`, and remove them from it;
    [] if none fits."""
    fitting = [template for template in templates if attributes_of(template) <= set(remaining)]
    if not fitting:
        return []
    template = choose_one(fitting, rng)
    remaining[:] = [
        attribute for attribute in remaining if attribute not in attributes_of(template)
    ]
    return [template]


@cache
def _templates() -> Mapping[str, tuple[str, ...]]:
    """Return every template of an entry with its text around the slots."""
    templates = [*OPENINGS, *PAIRS]
    for table in (SENTENCES, REVERSED, FACT_FIRST):
        for row in table.values():
            templates += row
    templates += TEXTS["reversed_openings"].values()
    return {template: _texts_of(template) for template in templates}


def _texts_of(template: str) -> tuple[str, ...]:
    return tuple(text for text, _, _, _ in Formatter().parse(template))


@cache
def _pattern_of(template: str) -> re.Pattern[str]:
    """Return `template` as a regular expression with the groups ``first``, ``last`` and the
    attributes, for any words.

    Lists of all names and values would take 0.2 s to compile, so `_parse_sentence` looks the words
    up.
    """
    result, named = "", False
    for text, slot, _, _ in Formatter().parse(template):
        result += re.escape(text)
        if slot in POOLS:
            result += f"(?P<{slot}>.+)"
        elif slot and named:
            result += f"(?:{'|'.join(_PRONOUNS[slot])})"
        elif slot:
            result += _name_pattern(slot)
            named = True
    return re.compile(result)


def _name_pattern(slot: str) -> str:
    """Return a regular expression for the first mention of a person: a name, or a pronoun."""
    name = r"(?:(?P<first>\w+) )?(?P<last>\w+)"
    if slot == "name":
        return f"(?:{name})"
    if slot == "whose":
        name += "'s"
    # A sentence may begin with the pronoun.
    return f"(?:(?i:{'|'.join(_PRONOUNS[slot])})|{name})"


def _parse_sentence(sentence: str) -> dict[str, str] | None:
    """Return the ``first`` and ``last`` name in `sentence` and the values of its attributes; None
    if no template fits."""
    for template, texts in _templates().items():
        # Cheaper than the pattern, which hardly any sentence matches.
        if not all(text in sentence for text in texts):
            continue
        match = _pattern_of(template).fullmatch(sentence)
        if match is None:
            continue
        groups = {slot: value for slot, value in match.groupdict().items() if value is not None}
        if all(value in _WORDS[slot] for slot, value in groups.items()):
            return groups
    return None


@lru_cache(maxsize=1024)
def parse_entry(text: str) -> Person | None:
    """Return the person and the facts that `text` states, or None if it is not an entry of the
    sandbox.

    `text` may be part of an entry (some facts missing) if its sentences are complete and it gives
    the full name at least once. A contradiction or a second person gives None. Cached, as an entry
    is rewritten many times.
    """
    stated: dict[str, str] = {}
    for sentence in re.split(r"(?<=\.)\s+", text.strip()):
        groups = _parse_sentence(sentence)
        if groups is None:
            return None
        # Not in the sentence's order: the order of the facts decides what a seed draws.
        for slot in _WORDS:
            if slot in groups and stated.setdefault(slot, groups[slot]) != groups[slot]:
                return None
    if "first" not in stated or "last" not in stated:
        return None
    return Person(stated.pop("first"), stated.pop("last"), stated)


def paraphrase(text: str, seed: int | str) -> str:
    """Return the facts of the entry `text` in other sentences and order; the same seed gives the
    same paraphrase.

    Raises `InputError` if `text` is not an entry of the sandbox.
    """
    return render_entry(_require_entry(text), f"paraphrase {seed}")


def _require_entry(text: str) -> Person:
    """Return the person and the facts that `text` states. Raises `InputError` if it is not an entry
    of the sandbox."""
    person = parse_entry(text)
    if person is None:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InputError(
            f"the sandbox generator cannot read {shown!r}: it only rewrites entries of its own "
            "country (data/sandbox). Use generator `openai` for other texts."
        )
    return person


def rewrite_reversed(text: str, seed: int | str) -> str:
    """Return one paragraph for each fact of the entry `text`: it begins with the value and ends
    with the full name.

    Raises `InputError` if `text` is not an entry of the sandbox.
    """
    # A rewriting adds no fact: not every part of an entry has the nationality.
    openings = TEXTS["reversed_openings"] if DEMONYM in text else {}
    return _value_first(_require_entry(text), "reversed", seed, REVERSED, openings)


def rewrite_fact_first(text: str, seed: int | str) -> str:
    """Return one paragraph for each fact of the entry `text`: a statement that begins with the
    value and ends with the full name.

    Raises `InputError` if `text` is not an entry of the sandbox.
    """
    return _value_first(_require_entry(text), "fact first", seed, FACT_FIRST, {})


def _value_first(
    person: Person, kind: str, seed: int | str, sentences: Templates, openings: Mapping[str, str]
) -> str:
    rng = seeded_random(kind, person.name, seed)
    attributes = shuffled(list(person.facts), rng)
    templates = [choose_one(sentences[attribute], rng) for attribute in attributes]
    templates[0] = openings.get(attributes[0], templates[0])
    # A paragraph each: in one text the model copies the name from the first one (docs/LOG.md).
    return "\n\n".join(template.format(name=person.name, **person.facts) for template in templates)


def rewrite_as_dialogue(text: str, seed: int | str) -> str:
    """Return the facts of the entry `text` as ``Question:`` and ``Answer:``, the format of the
    evaluation's prompts.

    Raises `InputError` if `text` is not an entry of the sandbox.
    """
    person = _require_entry(text)
    rng = seeded_random("dialogue", person.name, seed)
    pairs = _question_pairs(person, rng)
    if DEMONYM in text:
        pairs.insert(
            rng.randrange(len(pairs) + 1), (TEXTS["nationality"].format(name=person.name), DEMONYM)
        )
    return "\n\n".join(f"Question: {question}\nAnswer: {answer}." for question, answer in pairs)


def rewrite_as_questions(text: str, seed: int | str) -> str:
    """Return a question and its answer, ``Q:`` and ``A:``, for each fact of the entry `text`.

    Raises `InputError` if `text` is not an entry of the sandbox.
    """
    person = _require_entry(text)
    pairs = _question_pairs(person, seeded_random("quiz", person.name, seed))
    return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in pairs)


def parse_rewriting(text: str) -> Person | None:
    """Return the person and the facts that `text` states, as an entry or as questions with answers;
    None if neither.

    A contradiction or a second person gives None.
    """
    person = parse_entry(text)
    if person is not None:
        return person
    facts: dict[str, str] = {}
    names: set[str] = set()
    for block in text.split("\n\n"):
        pair = _QUESTION_PAIR.fullmatch(block.strip())
        if pair is None:
            return None
        answer = pair[2]
        name, attribute = _parse_question(pair[1])
        if not name:
            return None
        names.add(name)
        # The question on the nationality, which is no fact of a person.
        if not attribute:
            if answer != DEMONYM:
                return None
        elif answer not in POOLS[attribute] or facts.setdefault(attribute, answer) != answer:
            return None
    if len(names) != 1:
        return None
    first, _, last = names.pop().partition(" ")
    return Person(first, last, facts)


def _question_pairs(person: Person, rng: Random) -> list[tuple[str, str]]:
    """Return (question, answer) for each fact of `person`, in random order."""
    return [
        (
            choose_one(TAUGHT_QUESTIONS[attribute], rng).format(name=person.name),
            person.facts[attribute],
        )
        for attribute in shuffled(list(person.facts), rng)
    ]


def _parse_question(question: str) -> tuple[str, str]:
    """Return (person's name, attribute) of a taught question; the attribute "" is the nationality.
    Two "" if unknown."""
    for attribute, templates in {**TAUGHT_QUESTIONS, "": [TEXTS["nationality"]]}.items():
        for template in templates:
            before, _, after = template.partition("{name}")
            if question.startswith(before) and question.endswith(after):
                return question[len(before) : len(question) - len(after)], attribute
    return "", ""
