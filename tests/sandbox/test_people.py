from collections import Counter

from kinject.sandbox.people import (
    ATTRIBUTES,
    FEMALE_NAMES,
    LAST_NAMES,
    MALE_NAMES,
    POOLS,
    create_country,
    deal_evenly,
    seeded_random,
    shuffled,
)


def test_no_name_belongs_to_two_people() -> None:
    country = create_country()
    people = (*country.known, *country.new)
    names = [person.name for person in people]
    assert len(set(names)) == len(names) == 420
    assert not set(country.spare_names) & {(person.first, person.last) for person in people}


def test_one_seed_gives_one_country_and_another_seed_another() -> None:
    assert create_country(seed=3) == create_country(seed=3)
    assert create_country(seed=3).new != create_country(seed=4).new


def test_the_shuffle_is_the_same_on_every_python() -> None:
    assert shuffled("abcdefgh", seeded_random("fixed")) == list("hdbgacef")


def test_values_are_dealt_evenly() -> None:
    for group in (create_country().known, create_country().new):
        for attribute in ATTRIBUTES:
            counts = Counter(person.facts[attribute] for person in group)
            assert set(counts) == set(POOLS[attribute])
            assert max(counts.values()) - min(counts.values()) <= 1


def test_a_deal_of_fewer_than_the_pool_repeats_nothing() -> None:
    assert len(set(deal_evenly("abcdef", 5, seeded_random(1)))) == 5


def test_pools_hold_no_value_twice_and_no_value_is_a_name() -> None:
    values = [value for pool in POOLS.values() for value in pool]
    names = FEMALE_NAMES + MALE_NAMES + LAST_NAMES
    assert len(set(values)) == len(values)
    assert len(set(names)) == len(names)
    assert not set(names) & {word for value in values for word in value.split()}
    assert all(20 <= len(pool) <= 33 for pool in POOLS.values())


def test_values_of_a_pool_begin_with_different_words() -> None:
    for pool in POOLS.values():
        assert len({value.split()[0] for value in pool}) == len(pool)
