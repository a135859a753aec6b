"""The people of Tarvenia, the sandbox's fictional country, with five facts each; texts.yaml has the
names and values.

A seed gives the same people on every version of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import yaml

from kinject.disk import content_id

# Read whenever the sandbox is imported, so by libyaml where PyYAML has it.
_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TEXTS: Final[dict[str, Any]] = yaml.load(
    Path(__file__).with_name("texts.yaml").read_text("utf-8"),
    Loader=_SafeLoader,  # noqa: S506
)
"""The names, values, templates and instructions of texts.yaml."""
DEMONYM: Final[str] = TEXTS["demonym"]
FEMALE_NAMES: Final[list[str]] = TEXTS["female_names"]
MALE_NAMES: Final[list[str]] = TEXTS["male_names"]
LAST_NAMES: Final[list[str]] = TEXTS["last_names"]
BIRTH_YEARS: Final = [str(year) for year in range(1931, 1961)]
POOLS: Final[dict[str, list[str]]] = {"birth_year": BIRTH_YEARS, **TEXTS["values"]}
ATTRIBUTES: Final = tuple(POOLS)
N_KNOWN = 300
N_NEW = 120
SEED = 0

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Person:
    """One person; `facts` maps each attribute of `ATTRIBUTES` to a value of its pool."""

    first: str
    last: str
    facts: dict[str, str]

    @property
    def name(self) -> str:
        """First and last name."""
        return f"{self.first} {self.last}"


@dataclass(frozen=True, slots=True)
class Country:
    """The known people, the new people, and names that belong to neither, for throw-away people."""

    known: tuple[Person, ...]
    new: tuple[Person, ...]
    spare_names: tuple[tuple[str, str], ...]


def seeded_random(*parts: object) -> Random:
    """Return a generator seeded by a hash of `parts`. Use only random() and randrange(): the others
    vary by Python version."""
    # Python's own hash of a text differs from process to process.
    return Random(int(content_id(*(str(part) for part in parts)), 16))


def shuffled(items: Sequence[Item], rng: Random) -> list[Item]:
    """Return `items` in random order (Fisher-Yates on randrange, which is stable across Python
    versions)."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = rng.randrange(last + 1)
        result[last], result[other] = result[other], result[last]
    return result


def choose_one(items: Sequence[Item], rng: Random) -> Item:
    """Return a random one of `items`."""
    return items[rng.randrange(len(items))]


def deal_evenly(pool: Sequence[str], n: int, rng: Random) -> list[str]:
    """Return `n` values of `pool` in random order; their counts differ by at most one."""
    values: list[str] = []
    while len(values) < n:
        values += shuffled(pool, rng)
    return shuffled(values[:n], rng)


def create_people(names: Sequence[tuple[str, str]], rng: Random) -> tuple[Person, ...]:
    """Return one person for each name. Facts are dealt evenly: no value is more likely, so a guess
    scores chance."""
    columns = {
        attribute: deal_evenly(POOLS[attribute], len(names), rng) for attribute in ATTRIBUTES
    }
    return tuple(
        Person(first, last, {attribute: columns[attribute][row] for attribute in ATTRIBUTES})
        for row, (first, last) in enumerate(names)
    )


def create_country(n_known: int = N_KNOWN, n_new: int = N_NEW, seed: int = SEED) -> Country:
    """Return the country of `seed`. Full names are unique; known and new people share first and
    last names."""
    rng = seeded_random("country", seed)
    names = shuffled(list(product(FEMALE_NAMES + MALE_NAMES, LAST_NAMES)), rng)
    # In this order: another one makes other people than those in the committed files.
    known = create_people(names[:n_known], rng)
    new = create_people(names[n_known : n_known + n_new], rng)
    return Country(known, new, tuple(names[n_known + n_new :]))


def create_stranger(name: tuple[str, str], rng: Random) -> Person:
    """Return a throw-away person with random facts, for questions that only a given context can
    answer."""
    return Person(*name, {attribute: choose_one(POOLS[attribute], rng) for attribute in ATTRIBUTES})
