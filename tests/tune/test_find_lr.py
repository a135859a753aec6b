"""The range test rises as its ramp says, suggests where a known loss is lowest, and refuses edges and noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import kinject.tune as finding
from kinject.cli import main
from kinject.disk import folder_hash
from kinject.errors import InputError, RecipeError
from kinject.recipe import Recipe, TechniquesSection, read_recipe
from kinject.train.setup import make_trainer
from kinject.tune import Ramp, range_test, suggest

MakeRecipe = Callable[..., Recipe]
SHORT = Ramp(low=1e-5, high=10.0, steps=24)


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> MakeRecipe:
    """A recipe on the tiny model; keyword arguments add to its trainer section."""
    rows = [
        {"text": f"Person {i} was born in {['Lowmere', 'Stonegate', 'Farrow', 'Kelm'][i % 4]}."}
        for i in range(48)
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def _make(**trainer: Any) -> Recipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)},
            "corpus": {"path": str(tmp_path / "corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
            "trainer": {"per_device_train_batch_size": 4, "max_length": 64, "bf16": False, "max_steps": 3, **trainer},
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return read_recipe(path, verb="train")

    return _make


@pytest.mark.parametrize("technique", [{"layerwise_lr_decay": 0.5}, {"muon": 3.0}])
def test_the_rate_is_the_recipes_where_some_weights_have_a_factor_on_it(
    make_recipe: MakeRecipe, tmp_path: Path, technique: dict[str, float]
) -> None:
    recipe = replace(make_recipe(), techniques=TechniquesSection(**technique))
    rates, _, _ = range_test(
        make_trainer(finding.ramp_recipe(recipe, SHORT, tmp_path / "test")), SHORT
    )
    assert rates == pytest.approx([1e-5 * 1e6 ** (i / 23) for i in range(len(rates))], rel=1e-9)


def test_a_loss_that_leaves_ends_the_test(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    ramp = Ramp(low=1e-3, high=1e6, steps=40)
    rates, losses, ended = range_test(
        make_trainer(finding.ramp_recipe(make_recipe(), ramp, tmp_path / "test")), ramp
    )
    assert ended.startswith("stopped")
    assert len(rates) == len(losses) < 40


def _simulated(best: float, seed: int, noise: float = 0.1) -> tuple[list[float], list[float]]:
    """Return rates and losses that fall around a tenth of the rate `best` and rise steeply above three times that rate."""
    rates = np.logspace(-6, 0, 100)
    x = np.log10(rates) - math.log10(best)
    losses = 3 - 1.2 / (1 + np.exp(-4 * (x + 1))) + 6 * np.clip(x - 0.5, 0, None)
    return rates.tolist(), (
        losses + noise * np.random.default_rng(seed).standard_normal(100)
    ).tolist()


@pytest.mark.parametrize("best", [2e-5, 3e-4, 5e-3])
def test_on_twenty_seeds_the_suggestion_is_within_a_factor_of_three_of_the_best_rate(
    best: float,
) -> None:
    found = [suggest(*_simulated(best, seed)).suggestion for seed in range(20)]
    outside = [rate for rate in found if rate is None or not best / 3 <= rate <= best * 3]
    assert len(outside) <= 1


def test_a_loss_that_does_not_fall_beyond_its_noise_gives_no_suggestion() -> None:
    rates = np.logspace(-6, 0, 100).tolist()
    for seed in range(20):
        noise = np.random.default_rng(seed).standard_normal(100)
        for losses in (2 + 0.1 * noise, 2 + 0.1 * noise + np.linspace(0, 1, 100)):
            found = suggest(rates, losses.tolist())
            assert found.suggestion is None
            assert "did not fall beyond its noise" in found.reason


@pytest.mark.parametrize(("best", "fix"), [(1e-6, "widen the range"), (1.0, "raise --high")])
def test_a_loss_that_is_lowest_at_an_edge_gives_no_suggestion(best: float, fix: str) -> None:
    for seed in range(5):
        found = suggest(*_simulated(best, seed, noise=0.02))
        assert found.suggestion is None
        assert fix in found.reason


@pytest.mark.parametrize("steps", [20, 33, 400])
def test_the_narrowest_ramp_has_a_suggestion(steps: int) -> None:
    rates = np.geomspace(3e-5, 6e-4, steps)
    losses = 2 + np.log10(rates / 1.3e-4) ** 2
    assert suggest(rates.tolist(), losses.tolist()).suggestion == pytest.approx(1.3e-4, rel=0.3)


def test_a_loss_that_is_no_number_ends_the_series() -> None:
    rates, losses = _simulated(3e-4, 0)
    found = suggest(rates, [*losses[:75], *[math.nan] * 25])
    assert found.suggestion is not None
    assert sum(map(math.isfinite, found.smoothed)) == 75
    assert suggest([2e-4] * 40, [3.0] * 40).suggestion is None, "rates that are all but equal"
    assert "diverged at once" in suggest(rates, [3.0, math.nan, *losses[2:]]).reason


def test_find_lr_writes_a_plot_and_numbers_and_changes_no_model(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe()
    before = folder_hash(tiny_model)
    code = main(
        ["find-lr", str(tmp_path / "recipe.yaml"), "--low", "1e-5", "--high", "1", "--steps", "40"]
    )
    assert folder_hash(tiny_model) == before
    folder = tmp_path / "run" / "find-lr"
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    lines = (folder / "lr.csv").read_text().splitlines()
    rates = [float(line.split(",")[0]) for line in lines[1:]]
    assert rates == pytest.approx([1e-5 * 1e5 ** (i / 39) for i in range(len(rates))], rel=1e-9)
    said = capsys.readouterr().out
    assert ("learning_rate: " in said, "no suggestion: " in said) == (code == 0, code == 1)
    if code == 0:
        assert (
            1e-3 < float(said.rpartition("learning_rate: ")[2].split()[0]) < 0.3
        )  # a random model of this size learns there


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        (Ramp(low=1.0, high=0.1), "0 < low < high"),
        (Ramp(low=0.0), "0 < low < high"),
        (Ramp(low=5e-323, high=1e307), "their ratio, finite"),
        (Ramp(steps=3), "20 or more"),
        (Ramp(low=2e-5, high=3e-4), "high at least 20 times low"),
    ],
)
def test_a_ramp_out_of_range_is_refused(make_recipe: MakeRecipe, ramp: Ramp, said: str) -> None:
    with pytest.raises(InputError, match=said):
        finding.find_lr(make_recipe(), ramp)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "6GiB"], "--memory: is for --batch only"),
        (["--batch", "--high", "0.3"], "--high: is for rates"),
        (["--batch", "--steps", "50", "--memory", "6GiB"], "--steps: is for rates"),
    ],
)
def test_an_option_of_the_other_search_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["find-lr", "no-such.yaml", *words]) == 2
    assert message in capsys.readouterr().err


def test_an_optimizer_that_averages_over_rates_is_refused_with_its_line(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make_recipe()
    trainer = {**recipe.trainer, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    with pytest.raises(
        RecipeError,
        match=r"trainer\.optim.*averages over all rates so far.*trainer\.optim=adamw_torch",
    ):
        finding.find_lr(replace(recipe, trainer=trainer), Ramp())
