"""A few tries of each area of the attack; `benchmarks/hostile.py` runs thousands (make soak)."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from attack import AREAS, attack, endpoints, files, network, runs, training

FEW = {
    "sequences": 1,
    "pairs of processes": 1,
    "clocks": 1,
    "limits": 1,
    "export": 1,
    "memory": 1,
    "runs by an endpoint": 2,
    "trainings": 2,
    "kills": 2,
    "surroundings": 2,
    "view": 2,
}
"""Area -> tries here, of those whose tries take a part of a second; of the others 6."""
MODULES = (endpoints, files, network, runs, training)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing of the damage."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")  # what libraries say of broken files is not the claim
@pytest.mark.parametrize("area", sorted(AREAS))
def test_no_try_ends_in_a_traceback_without_end_or_wrong(area: str) -> None:
    assert attack(area, FEW.get(area, 6), seed=1000).failed == {}


def broken(random: object, folder: object) -> str:
    raise KeyError("a bug")


def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AREAS, "broken", broken)
    (fault,) = attack("broken", 1).failed.values()
    assert fault.endswith("KeyError: 'a bug'")
