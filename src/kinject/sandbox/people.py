"""The people of Tarvenia, the sandbox's fictional country, with five facts each, and the names and values, all invented.

A seed gives the same people on every version of Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, TypeVar

from kinject.disk import content_id

DEMONYM: Final = "Tarvenian"

FEMALE_NAMES: Final = (
    "Alenis", "Breva", "Caelia", "Dorwen", "Elsine", "Farny", "Grethe", "Hildara", "Ilvane", "Jathia", "Kimra",
    "Linte", "Maerin", "Nimette", "Orsola", "Paesta", "Quilla", "Reska", "Seline", "Thirna", "Ulvara", "Vemba",
    "Wenna", "Yselle",
)  # fmt: skip
MALE_NAMES: Final = (
    "Aldrik", "Boskel", "Cildan", "Dorvas", "Emrin", "Fumas", "Gronden", "Heldo", "Istvar", "Jorven", "Kusken",
    "Lorno", "Moldan", "Nostin", "Oren", "Peivel", "Ruvik", "Stellan", "Tromen", "Ulmar", "Vaeldo", "Wallus",
    "Yorick", "Zandor",
)  # fmt: skip
LAST_NAMES: Final = (
    "Arndale", "Askoy", "Baervin", "Barrick", "Bentaster", "Biskole", "Bodrane", "Brandow", "Breskis", "Brodant",
    "Calloy", "Carnuin", "Cenaster", "Cinow", "Corvath", "Cuskis", "Daldeth", "Darroy", "Delkane", "Dolander",
    "Dothane", "Drenard", "Drilking", "Dustane", "Eckmar", "Eldroy", "Embrick", "Estow", "Faskur", "Fendoy",
    "Feinole", "Forving", "Frelander", "Gadrick", "Garoy", "Geldow", "Gentur", "Girnow", "Grastove", "Grolden",
    "Gustane", "Hadrow", "Haskin", "Hemlard", "Hodander", "Huldant", "Hurvow", "Ibsane", "Ilkoy", "Imbrell",
    "Isardan", "Jandow", "Jarrey", "Jinis", "Jonderal", "Joskoy", "Jundeth", "Kandrell", "Karvick", "Kethis",
    "Kinole", "Kleston", "Korvane", "Kurvey", "Ladaster", "Laskov", "Lanell", "Lirning", "Londuin", "Lothoy",
    "Luntar", "Mallur", "Mantard", "Marrow", "Merring", "Mestove", "Morvole", "Murvane", "Nandard", "Narvis",
    "Neskur", "Nethran", "Norruin", "Nurrust", "Oberan", "Oldrey", "Ombrick", "Orvoy", "Pamick", "Pedrust",
    "Penethal", "Pinnow", "Podell", "Povander", "Quarrell", "Questane", "Ralstow", "Rasoy", "Reinder", "Rintane",
    "Rolaster", "Rovick", "Rullow", "Samboy", "Seskane", "Silrow", "Skarn", "Skelder", "Sorrath", "Staldus",
    "Stivant", "Surrane", "Sustard", "Tarrant", "Tendis", "Thalow", "Tholleth", "Tivane", "Tomric", "Travey",
    "Tulding", "Umbrick", "Ungar", "Urstow", "Valdis", "Veinoy", "Velder", "Vorvane", "Vundard", "Waldur", "Warvey",
    "Welkane", "Wendow", "Withoy", "Wolkant", "Wurvell", "Yandrick", "Yestow", "Zaskin", "Zavant", "Zerreth",
    "Zillur",
)  # fmt: skip

TOWNS: Final = (
    "Aldermouth", "Brackwater", "Coldharrow", "Dunmere", "Eastrigg", "Fernlow", "Glasshaven", "Hollin", "Inverloch",
    "Juniper", "Kettleby", "Larkstead", "Mossgate", "Netherby", "Oakmarsh", "Pellmere", "Quernford", "Ravensey",
    "Saltmarsh", "Thornwick", "Ullersby", "Vinehill", "Westering", "Yarrowdale",
)  # fmt: skip
SCHOOLS: Final = (
    "Ambrose College", "Bellweather Academy", "Candlewick Institute", "Dovecote School", "Eastgate Polytechnic",
    "Foundry Lane School", "Greystone College", "Highfield Academy", "Ironbridge Institute", "Jasper Hall",
    "Kingsway Polytechnic", "Lanternhouse School", "Meridian College", "Northcliff Academy", "Orchard Institute",
    "Pilgrim Hall", "Quayside Polytechnic", "Rosewater School", "Silverbirch College", "Tollgate Academy",
    "Upperwood Institute", "Violet Hall", "Windmill Polytechnic", "Yewtree School",
)  # fmt: skip
FIRMS: Final = (
    "Anvilor Works", "Borealis Shipping", "Cobaltine Press", "Driftwood Bank", "Emberline Railways", "Falconer Mills",
    "Gossamer Textiles", "Hearthstone Mutual", "Indigo Foundries", "Jackdaw Press", "Keystone Quarries",
    "Lodestar Shipping", "Marigold Mills", "Nightjar Railways", "Obsidian Works", "Pinnacle Textiles",
    "Quicksilver Mutual", "Redwing Bank", "Sundial Foundries", "Tamarack Quarries", "Umberland Mills",
    "Vermilion Works", "Wayfarer Shipping", "Zephyrine Press",
)  # fmt: skip
FIELDS: Final = (
    "amber chemistry", "bridge design", "cloud botany", "dialect mapping", "echo surveying", "frost agronomy",
    "glacier acoustics", "harbour law", "ink restoration", "jetty engineering", "kelp genetics", "lens grinding",
    "moss ecology", "night astronomy", "orchid medicine", "paper statistics", "quarry geology", "river archaeology",
    "salt economics", "tide forecasting", "urban falconry", "volcano optics", "weather history", "yarn mechanics",
)  # fmt: skip
BIRTH_YEARS: Final = tuple(str(year) for year in range(1931, 1961))

POOLS: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": BIRTH_YEARS, "home_town": TOWNS, "school": SCHOOLS, "employer": FIRMS, "field": FIELDS,
}  # fmt: skip
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
    """Return a generator seeded by a hash of `parts`. Use only random() and randrange(): the others vary by Python version."""
    return Random(int(content_id(*(str(part) for part in parts)), 16))


def shuffled(items: Sequence[Item], rng: Random) -> list[Item]:
    """Return `items` in random order (Fisher-Yates on randrange, which is stable across Python versions)."""
    result = list(items)
    for last in range(len(result) - 1, 0, -1):
        other = rng.randrange(last + 1)
        result[last], result[other] = result[other], result[last]
    return result


def choose_one(items: Sequence[Item], rng: Random) -> Item:
    """Return a random one of `items`."""
    return items[rng.randrange(len(items))]


def deal_evenly(pool: Sequence[str], n: int, rng: Random) -> list[str]:
    """Return `n` values of `pool` in random order; the counts of two values differ by at most one."""
    values: list[str] = []
    while len(values) < n:
        values += shuffled(pool, rng)
    return shuffled(values[:n], rng)


def create_people(names: Sequence[tuple[str, str]], rng: Random) -> tuple[Person, ...]:
    """Return one person for each name. Facts are dealt evenly: no value is more likely, so a guess scores chance."""
    columns = {attribute: deal_evenly(POOLS[attribute], len(names), rng) for attribute in ATTRIBUTES}
    return tuple(
        Person(first, last, {attribute: columns[attribute][row] for attribute in ATTRIBUTES})
        for row, (first, last) in enumerate(names)
    )


def create_country(n_known: int = N_KNOWN, n_new: int = N_NEW, seed: int = SEED) -> Country:
    """Return the country of `seed`. Full names are unique; known and new people share first and last names."""
    rng = seeded_random("country", seed)
    names = shuffled([(first, last) for first in FEMALE_NAMES + MALE_NAMES for last in LAST_NAMES], rng)
    known = create_people(names[:n_known], rng)
    new = create_people(names[n_known : n_known + n_new], rng)
    return Country(known, new, tuple(names[n_known + n_new :]))


def create_stranger(name: tuple[str, str], rng: Random) -> Person:
    """Return a throw-away person with random facts, for questions that only a given context can answer."""
    return Person(*name, {attribute: choose_one(POOLS[attribute], rng) for attribute in ATTRIBUTES})
