"""A few tries of each area of the attack; `benchmarks/hostile.py` runs thousands (make soak)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from attack import (
    AREAS,
    attack,
    contents,
    endpoints,
    files,
    in_child,
    network,
    runs,
    training,
)

from small import quick

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
OF_TIME_LIMITS = {"runs by an endpoint"}
"""Areas whose faults are told by limits of a second: on a busy machine other tries meet them (make soak)."""
LONG = {"templates", "trainings"}
"""Areas of which a single try takes over a second; tests/security and tests/train have some of each."""
AREAS_HERE = quick(sorted(AREAS), *sorted(AREAS.keys() - OF_TIME_LIMITS - LONG))
MODULES = (endpoints, files, network, runs, training)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Log nothing of the damage."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore")  # what libraries say of broken files is not the claim
@pytest.mark.parametrize("area", AREAS_HERE)
def test_no_try_ends_in_a_traceback_without_end_or_wrong(area: str) -> None:
    failed = attack(area, FEW.get(area, 6), seed=1000).failed
    # As a message: of two values that differ pytest shows the first lines alone.
    assert not failed, "\n".join(f"seed {seed}: {fault}" for seed, fault in failed.items())


OF_TIME = {"manifest.json", "log.jsonl", "timing.jsonl", "report.html"}
"""Files of a run that hold times beside its results."""


@pytest.mark.parametrize(
    "verb",
    [
        "augment",
        "questions",
        pytest.param("train", marks=pytest.mark.soak),
        pytest.param("eval", marks=pytest.mark.soak),
    ],
)
def test_a_verb_run_twice_writes_the_same_bytes(verb: str, tmp_path: Path) -> None:
    made = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        there = runs.copied(tmp_path / name)
        assert in_child(partial(runs.run, verb, there)).code in (0, 1)
        made.append(contents(there / "runs" / verb, without=sorted(OF_TIME)))
    one, other = made
    different = {name for name in one | other if one.get(name) != other.get(name)}
    # A checkpoint holds the log, with its seconds.
    assert {name for name in different if not name.startswith("checkpoint-")} == set()
    assert len(one) > 3


def broken(random: object, folder: object) -> str:
    raise KeyError("a bug")


def test_a_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AREAS, "broken", broken)
    (fault,) = attack("broken", 1).failed.values()
    assert fault.endswith("KeyError: 'a bug'")
