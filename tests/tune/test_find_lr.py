"""The range test climbs as it says, stops when the loss leaves, suggests by the slope, and leaves no trace in the model."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import kinject.tune as finding
from kinject.cli import main
from kinject.disk import folder_hash
from kinject.errors import InputError, RecipeError
from kinject.recipe import Recipe, TechniquesSection, read_recipe
from kinject.train.setup import make_trainer
from kinject.tune import Ramp, check_ramp, range_test, restored, suggest, two_digits

MakeRecipe = Callable[..., Recipe]
SHORT = Ramp(low=1e-5, high=10.0, steps=24)


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> MakeRecipe:
    """A recipe on the tiny model; keyword arguments add to its trainer section."""
    rows = [{"text": f"Person {i} was born in {['Lowmere', 'Stonegate', 'Farrow', 'Kelm'][i % 4]}."} for i in range(48)]
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


def _tensors(model: Any) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]


def test_a_test_in_memory_leaves_model_and_generators_as_they_were(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    trainer = make_trainer(finding.ramp_recipe(make_recipe(), SHORT, tmp_path / "test"))
    trainer.model.eval()
    before = _tensors(trainer.model)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rates, losses, _ = range_test(trainer, SHORT)
    assert len(losses) > 8
    assert len(set(losses)) > 1
    assert rates == pytest.approx([1e-5 * 1e6 ** (i / 23) for i in range(len(rates))], rel=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(trainer.model), strict=True))
    assert not any(module.training for module in trainer.model.modules())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(states[2], np.random.get_state(), strict=True))


def test_the_model_is_put_back_after_an_error_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    before = _tensors(model)

    def _break() -> None:
        with restored(model):
            model(torch.randn(5, 3)).sum().backward()
            with torch.no_grad():
                model[0].weight.fill_(math.nan)
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        _break()
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(model), strict=True))


def test_the_rate_is_the_topmost_layers_where_lower_ones_learn_slower(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = replace(make_recipe(), techniques=TechniquesSection(layerwise_lr_decay=0.5))
    rates, _, _ = range_test(make_trainer(finding.ramp_recipe(recipe, SHORT, tmp_path / "test")), SHORT)
    assert rates == pytest.approx([1e-5 * 1e6 ** (i / 23) for i in range(len(rates))], rel=1e-9)


def test_a_loss_that_leaves_ends_the_test(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    ramp = Ramp(low=1e-3, high=1e6, steps=40)
    rates, losses, ended = range_test(make_trainer(finding.ramp_recipe(make_recipe(), ramp, tmp_path / "test")), ramp)
    assert ended.startswith("stopped")
    assert len(rates) == len(losses) < 40


def test_the_verb_writes_a_plot_and_numbers_changes_no_model_and_does_nothing_twice(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    make_recipe()
    before = folder_hash(tiny_model)
    argv = ["find-lr", str(tmp_path / "recipe.yaml"), "--low", "1e-5", "--high", "1", "--steps", "24"]
    code = main(argv)
    assert folder_hash(tiny_model) == before
    folder = tmp_path / "run" / "find-lr"
    assert (folder / "lr.png").read_bytes().startswith(b"\x89PNG")
    held = json.loads((folder / "lr.json").read_bytes())["result"]
    lines = (folder / "lr.csv").read_text().splitlines()
    assert len(lines) == 1 + len(held["losses"])
    assert [float(line.split(",")[2]) for line in lines[1:]] == held["losses"]
    said = capsys.readouterr().out
    assert code == (1 if held["suggestion"] is None else 0)
    monkeypatch.setattr(finding, "range_test", lambda *_: pytest.fail("tested again"))
    assert main(argv) == code
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_suggestion_is_where_a_known_curve_falls_fastest(noise: float) -> None:
    ramp = Ramp(low=1e-6, high=1.0, steps=121)
    x = np.linspace(-6, 0, 121)
    wave = noise * np.sin(np.arange(121) * 2.1)
    losses = 3 - 2 / (1 + np.exp(-6 * (x + 3))) + 40 * np.clip(x + 1, 0, None) ** 2 + wave
    found = suggest(list(10**x), list(losses), ramp, "")
    assert found.steepest is not None
    assert found.lowest is not None
    assert found.suggestion is not None
    assert abs(math.log10(found.steepest) + 3) < 0.2  # the sigmoid's own steepest place
    assert -2 < math.log10(found.lowest) < -0.8
    assert found.suggestion == two_digits(min(found.steepest, found.lowest / 10))


def test_the_margin_holds_where_the_fall_ends_in_a_cliff() -> None:
    ramp = Ramp(low=1e-6, high=1.0, steps=121)
    x = np.linspace(-6, 0, 121)
    losses = np.where(x < -2, 3 - (x + 6) ** 2 / 10, 9.0)  # ever steeper, then gone
    found = suggest(list(10**x), list(losses), ramp, "")
    assert found.lowest is not None
    assert found.steepest is not None
    assert found.suggestion == two_digits(found.lowest / 10)
    assert found.suggestion < found.steepest


def test_a_loss_that_does_not_fall_gives_no_suggestion() -> None:
    ramp = Ramp(steps=60)
    flat = [2 + 0.1 * math.sin(3.7 * i) for i in range(60)]
    assert suggest([1e-5 * 1.2**i for i in range(60)], flat, ramp, "").suggestion is None
    rising = [2 + 0.05 * i for i in range(60)]
    assert suggest([1e-5 * 1.2**i for i in range(60)], rising, ramp, "").suggestion is None


def test_a_loss_that_is_no_number_ends_the_series() -> None:
    losses = [3 - 0.05 * i for i in range(40)] + [math.nan] * 5
    found = suggest([1e-5 * 1.2**i for i in range(45)], losses, Ramp(steps=60), "")
    assert len(found.smoothed) == 40
    assert found.suggestion is not None


@pytest.mark.parametrize(
    ("ramp", "said"),
    [
        (Ramp(low=1.0, high=0.1), "0 < low < high"), (Ramp(low=0.0), "0 < low < high"), (Ramp(steps=3), "20 or more"),
        (Ramp(diverged=1.0), "1.01 or more"), (Ramp(margin=0.5), "1 or more"),
    ],
)  # fmt: skip
def test_a_ramp_out_of_range_is_refused(ramp: Ramp, said: str) -> None:
    with pytest.raises(InputError, match=said):
        check_ramp(ramp)


def test_an_optimizer_that_averages_over_rates_is_refused_with_its_line(make_recipe: MakeRecipe) -> None:
    recipe = make_recipe()
    trainer = {**recipe.trainer, "optim": "schedule_free_adamw", "lr_scheduler_type": "constant"}
    with pytest.raises(
        RecipeError, match=r"trainer\.optim.*averages over all rates so far.*trainer\.optim=adamw_torch"
    ):
        finding.find_lr(replace(recipe, trainer=trainer), Ramp())


def test_two_digits_are_cut_not_rounded_up() -> None:
    assert [two_digits(value) for value in (1.99e-4, 2e-4, 0.00059999, 1.0)] == [1.9e-4, 2e-4, 5.9e-4, 1.0]
