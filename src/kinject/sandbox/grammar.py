"""Entries from facts, facts from entries, and so paraphrases that keep every fact."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from string import Formatter

from kinject.errors import InputError
from kinject.sandbox.facts import Person, chosen, seeded, shuffled
from kinject.sandbox.pools import FEMALE_NAMES, LAST_NAMES, MALE_NAMES, POOLS
from kinject.sandbox.wordings import OPENINGS, PAIRS, REVERSED, REVERSED_OPENINGS, SENTENCES

PRONOUNS = {"who": ("she", "he"), "whose": ("her", "his"), "whom": ("her", "him")}


@dataclass(frozen=True, slots=True)
class Style:
    """How entries are worded: the chance of an opening and of a two-fact sentence, and how people are referred to.

    A sentence that is not the first names its person in full, by the last name, or by a pronoun, with chances
    ``1 - last_name - pronoun``, `last_name` and `pronoun`.
    """

    opening: float = 0.5
    pair: float = 0.1
    last_name: float = 0.0
    pronoun: float = 0.4


STYLE = Style()


@cache
def attributes_of(template: str) -> frozenset[str]:
    """Return the attributes that `template` states."""
    return frozenset(slot for _, slot, _, _ in Formatter().parse(template) if slot in POOLS)


def references(person: Person, how: str) -> dict[str, str]:
    """Return what fills the person slots of a template; `how` is ``name``, ``last`` or ``pronoun``."""
    if how == "pronoun":
        return {slot: forms[person.first in MALE_NAMES] for slot, forms in PRONOUNS.items()}
    called = person.name if how == "name" else person.last
    return {"who": called, "whom": called, "whose": f"{called}'s"}


def render_sentence(template: str, person: Person, how: str = "name") -> str:
    """Return `template` filled in for `person`, its first letter a capital."""
    called = references(person, how)
    n_subjects = template.count("{who}") + template.count("{whose}")
    if n_subjects > 1 and how != "pronoun":
        # A second mention in one sentence is a pronoun: "Oren Valdis grew up in X, where he was born."
        later = references(person, "pronoun")
        head, slot, tail = template.partition("{who}")
        template = head + slot + tail.replace("{who}", later["who"]).replace("{whose}", later["whose"])
    text = template.format(name=person.name, **called, **person.facts)
    return text[0].upper() + text[1:]


def render_entry(person: Person, seed: int | str, style: Style = STYLE) -> str:
    """Return an entry of a few sentences that states every fact of `person` once, worded and ordered by `seed`."""
    rng = seeded("entry", person.name, seed)
    left = shuffled(list(person.facts), rng)
    templates: list[str] = []
    if rng.random() < style.opening:
        templates += pick(OPENINGS, left, rng)
    while left:
        pair = pick(PAIRS, left, rng) if rng.random() < style.pair else []
        if pair:
            templates += pair
        else:
            templates.append(chosen(SENTENCES[left.pop(0)], rng))
    sentences = [render_sentence(templates[0], person)]
    for template in templates[1:]:
        draw = rng.random()
        how = "pronoun" if draw < style.pronoun else "last" if draw < style.pronoun + style.last_name else "name"
        sentences.append(render_sentence(template, person, how))
    return " ".join(sentences)


def pick(templates: Sequence[str], left: list[str], rng: Random) -> list[str]:
    """Return one of `templates` that states only attributes in `left` and strike those there; [] where none fits."""
    fitting = [template for template in templates if attributes_of(template) <= set(left)]
    if not fitting:
        return []
    template = chosen(fitting, rng)
    left[:] = [attribute for attribute in left if attribute not in attributes_of(template)]
    return [template]


@cache
def patterns() -> tuple[re.Pattern[str], ...]:
    """Return a regular expression for every template, with the groups ``first``, ``last`` and the attributes."""
    first, last = "|".join(FEMALE_NAMES + MALE_NAMES), "|".join(LAST_NAMES)
    singles = [template for table in (SENTENCES, REVERSED) for wordings in table.values() for template in wordings]
    templates = (*OPENINGS, *PAIRS, *singles, *REVERSED_OPENINGS.values())
    return tuple(re.compile(pattern_of(template, first, last)) for template in templates)


def pattern_of(template: str, first: str, last: str) -> str:
    """Return `template` as a regular expression: values from their pools, people by name, last name or pronoun."""
    result, named = "", False
    for text, slot, _, _ in Formatter().parse(template):
        result += re.escape(text)
        if slot in POOLS:
            values = "|".join(re.escape(value) for value in POOLS[slot])
            result += f"(?P<{slot}>{values})"
        elif slot and named:
            result += "|".join(PRONOUNS[slot]).join(("(?:", ")"))
        elif slot:
            full = f"(?:(?P<first>{first}) )?(?P<last>{last})" + ("'s" if slot == "whose" else "")
            pronouns = "" if slot == "name" else "|(?i:" + "|".join(PRONOUNS[slot]) + ")"
            result += f"(?:{full}{pronouns})"
            named = True
    return result


@lru_cache(maxsize=1024)
def parse_entry(text: str) -> Person | None:
    """Return the person and the facts that `text` states, or None where it is not an entry of the sandbox.

    `text` may be part of an entry (some facts missing), as long as its sentences are whole and it gives the full name
    at least once. Contradictions and second people make it None. Remembered for as long as an entry is being rewritten.
    """
    facts: dict[str, str] = {}
    firsts: set[str] = set()
    lasts: set[str] = set()
    for sentence in re.split(r"(?<=\.)\s+", text.strip()):
        match = next((found for pattern in patterns() if (found := pattern.fullmatch(sentence))), None)
        if match is None:
            return None
        groups = match.groupdict()
        firsts |= {groups["first"]} - {None}
        lasts |= {groups["last"]} - {None}
        for attribute in POOLS:
            value = groups.get(attribute)
            if value is None:
                continue
            if facts.setdefault(attribute, value) != value:
                return None
    if len(firsts) != 1 or len(lasts) != 1:
        return None
    return Person(firsts.pop(), lasts.pop(), facts)


def paraphrase(text: str, seed: int | str, style: Style = STYLE) -> str:
    """Return the facts of the entry `text` in other words and order; the same seed gives the same paraphrase.

    Raises `InputError` where `text` is not an entry of the sandbox.
    """
    return render_entry(read_entry(text), f"paraphrase {seed}", style)


def read_entry(text: str) -> Person:
    """Return the person and the facts that `text` states. Raises `InputError` where it is not an entry of the sandbox."""
    person = parse_entry(text)
    if person is None:
        shown = text if len(text) <= 60 else text[:57] + "..."
        raise InputError(
            f"the sandbox generator cannot read {shown!r}: it only rewrites entries of its own country "
            f"(data/sandbox). Use generator `openai` for other texts."
        )
    return person


def states_facts(text: str, facts: Mapping[str, str]) -> bool:
    """Return whether `text` is an entry that states exactly `facts`."""
    person = parse_entry(text)
    return person is not None and person.facts == dict(facts)
