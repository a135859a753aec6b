"""Verbs in hostile environments: each case of a seeded draw does its work, or refuses in one line. See environments.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from environments import QUICK, Bench, Environment, draw, outputs

from kinject.cli import main

N_DRAWS = int(os.environ.get("KINJECT_DRAWS", "100"))


def _run_all(folder: Path, model: Path, n: int, seed: int, verbs: tuple[str, ...]) -> None:
    bench, faults = Bench(folder / "in", model), []
    for number, (verb, environment) in enumerate(draw(n, seed, verbs)):
        code, printed, fault = bench.run(verb, environment, folder / str(number))
        if fault:
            faults.append(f"{verb}, {environment.name}: {fault} (exit code {code})\n{printed[-1500:]}")
    assert not faults, "\n".join(faults)


def test_quick_verbs_in_a_few_hostile_environments(tmp_path: Path, tiny_model: Path) -> None:
    _run_all(tmp_path, tiny_model, 9, 5, QUICK)


@pytest.mark.soak
def test_training_without_streams_locale_and_home_ends_in_the_same_weights(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path / "in", tiny_model)
    monkeypatch.chdir(tmp_path)
    assert main(bench.words("train", tmp_path / "normal")) == 0
    bench.normal["train"] = outputs(tmp_path / "normal")
    assert any(name.endswith("model.safetensors") for name in bench.normal["train"])
    daemon = Environment(
        "a daemon", variables={"HOME": None, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "WORLD_SIZE": "", "TERM": None},
        streams=dict.fromkeys(range(3), "closed"),
    )  # fmt: skip
    assert bench.run("train", daemon, tmp_path / "daemon")[::2] == (0, "")


@pytest.mark.soak
def test_verbs_in_hostile_environments(tmp_path: Path, tiny_model: Path) -> None:
    _run_all(tmp_path, tiny_model, N_DRAWS, 14, (*QUICK * 7, "plan", "train", "eval"))
