from collections import Counter

from kinject.sandbox.people import ATTRIBUTES, POOLS, create_country, seeded_random, shuffled


def test_the_shuffle_is_the_same_on_every_python() -> None:
    assert shuffled("abcdefgh", seeded_random("fixed")) == list("hdbgacef")


def test_values_are_dealt_evenly() -> None:
    for group in (create_country().known, create_country().new):
        for attribute in ATTRIBUTES:
            counts = Counter(person.facts[attribute] for person in group)
            assert set(counts) == set(POOLS[attribute])
            assert max(counts.values()) - min(counts.values()) <= 1
