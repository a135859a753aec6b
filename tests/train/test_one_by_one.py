"""Weights in bfloat16 with stochastic rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.models.hardware import quantization_config
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.updates.rounding import StochasticRounding, round_stochastically
from small import interrupt, quick

MakeRecipe = Callable[..., Recipe]
LOW = {"techniques": {"stochastic_rounding": True}}


def _bf16(path: Path) -> dict[str, Any]:
    return {"model": {"path": str(path), "dtype": "bfloat16"}}


def _rounded(values: torch.Tensor, seed: int) -> torch.Tensor:
    out = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(values.clone(), out, torch.Generator().manual_seed(seed))
    return out.double()


def test_the_mean_of_many_roundings_is_the_value_and_each_is_a_neighbour() -> None:
    """Within 5 standard errors, which plain rounding misses: its error does not shrink with the number of roundings."""
    torch.manual_seed(0)
    values = torch.cat(
        [
            torch.randn(300),
            torch.randn(300) * 1e-30,
            torch.tensor([1.0, -2.0, 0.0, 3e38, 1 + 2**-10]),
        ]
    )
    n = 4000
    down = values.view(torch.int32).bitwise_and(-(2**16)).view(torch.float32).double()
    up = (values.view(torch.int32).bitwise_and(-(2**16)) + 2**16).view(torch.float32).double()
    many = torch.stack([_rounded(values, seed) for seed in range(n)])
    assert ((many == down) | (many == up)).all()
    chance = (values.double() - down) / (up - down)
    error = (up - down).abs() * (chance * (1 - chance) / n).sqrt()
    bias = (many.mean(0) - values.double()).abs()
    assert (bias <= 5 * error).all()
    assert (many[:, -5:-2] == values.double()[-5:-2]).all()  # exact values stay
    plain = (values.bfloat16().double() - values.double()).abs()
    assert (plain > 5 * error).float().mean() > 0.8


def _adam(values: torch.Tensor, gradients: list[torch.Tensor], rate: float) -> torch.Tensor:
    """AdamW without decay, in float64."""
    w, m, v = values.double(), torch.zeros_like(values).double(), torch.zeros_like(values).double()
    for step, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g.double(), 0.999 * v + 0.001 * g.double() ** 2
        w = w - rate * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    return w


def test_many_small_updates_move_bfloat16_weights_as_float32_ones_on_average() -> None:
    """A rate of a fortieth of the distance between numbers: with plain rounding nothing would move."""
    torch.manual_seed(1)
    start = torch.randn(512).sign() * (1 + torch.rand(512) / 2)
    start = start.bfloat16()
    gradients = [(torch.randn(512) * 0.1 + 1).bfloat16() for _ in range(20)]
    rate, runs = 2.0**-13, 30
    wanted = _adam(start, gradients, rate)
    total = torch.zeros(512).double()
    for seed in range(runs):
        weight = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([weight], lr=rate, weight_decay=0.0)
        trainer = SimpleNamespace(
            args=SimpleNamespace(seed=seed), state=SimpleNamespace(global_step=0)
        )
        StochasticRounding(True).change_optimizer(optimizer, trainer)
        for trainer.state.global_step, gradient in enumerate(gradients):
            weight.grad = gradient.clone()
            optimizer.step()
        assert weight.dtype == torch.bfloat16
        assert optimizer.state[weight]["exp_avg_sq"].dtype == torch.float32
        total += weight.detach().double()
    moved = (wanted - start.double()).mean()
    assert (total / runs - wanted).mean().abs() < 0.02 * moved.abs()
    plain = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([plain], lr=rate, weight_decay=0.0)
    for gradient in gradients:
        plain.grad = gradient.clone()
        optimizer.step()
    assert torch.equal(plain.detach(), start)


def _train(
    make_recipe: MakeRecipe, run: Path, trainer: dict[str, Any], **sections: Any
) -> dict[str, torch.Tensor]:
    result = train(make_recipe(trainer=trainer, run_dir=str(run), **sections))
    return load_file(Path(result.model_dir) / "model.safetensors")


@pytest.mark.parametrize("optim", quick(["adamw_8bit", "adamw_torch"], "adamw_8bit"))
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path, optim: str
) -> None:
    """States stay as precise as they were (torch would cast them to bfloat16), and the random bits are those of the step."""
    options = {"optim": optim, "save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2,
               "per_device_train_batch_size": 2}  # fmt: skip
    run = tmp_path / "run"
    sections = {**_bf16(tiny_model), **LOW}
    uninterrupted = _train(make_recipe, run, options, **sections)
    assert {weight.dtype for weight in uninterrupted.values()} == {torch.bfloat16}
    interrupt(run, 2)
    result = train(make_recipe(trainer=options, run_dir=str(run), **sections), resume=True)
    resumed = load_file(Path(result.model_dir) / "model.safetensors")
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_four_bits_have_quantised_scales_and_are_stored_so_that_fsdp_shards_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, storage in ((None, torch.uint8), ("true", torch.bfloat16)):
        if variable:
            monkeypatch.setenv("ACCELERATE_USE_FSDP", variable)
        config = quantization_config("4bit", torch.bfloat16)
        assert config.bnb_4bit_use_double_quant
        assert config.bnb_4bit_quant_type == "nf4"
        assert config.bnb_4bit_quant_storage == storage
