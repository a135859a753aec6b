"""Sharpness-aware minimisation: the update is that of the gradient taken uphill, over all accumulated batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.updates.sam import SharpnessAware
from small import quick

MakeRecipe = Callable[..., Recipe]
RATE, STEPS, BATCH, RHO, CLIP = 0.5, 3, 8, 0.3, 0.4
PLAIN = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": CLIP, "max_steps": STEPS,
         "train_sampling_strategy": "sequential", "per_device_train_batch_size": BATCH}  # fmt: skip


def _gradient(hand: Any, step: int, autocast: bool) -> list[torch.Tensor]:
    """The gradient of the mean over the tokens of an update's rows."""
    total: Any = 0.0
    n_tokens = 0
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for row in hand.rows_of(step):
            for positions, losses in hand.losses(
                row, lambda logp, ids: -logp.float().gather(1, ids[:, None])
            ):
                total, n_tokens = total + losses.sum(), n_tokens + len(positions)
    return list(torch.autograd.grad(total / n_tokens, list(hand.model.parameters())))


def _by_hand(hand: Any, *, autocast: bool = False) -> dict[str, torch.Tensor]:
    weights = list(hand.model.parameters())
    for step in range(STEPS):
        gradient = _gradient(hand, step, autocast)
        norm = sum((g.double() ** 2).sum() for g in gradient) ** 0.5
        before = [weight.detach().clone() for weight in weights]
        with torch.no_grad():
            for weight, g in zip(weights, gradient, strict=True):
                weight.add_(g * RHO / norm)
        gradient = _gradient(hand, step, autocast)
        norm = sum((g.double() ** 2).sum() for g in gradient) ** 0.5
        with torch.no_grad():
            for weight, g, w in zip(weights, gradient, before, strict=True):
                weight.copy_(w - RATE * g * min(1.0, CLIP / (norm + 1e-6)))
    return {name: weight.detach() for name, weight in hand.model.named_parameters()}


def _distance(one: Any, two: Any) -> float:
    return sum(((one[name].double() - two[name].double()) ** 2).sum().item() for name in one) ** 0.5


@pytest.mark.parametrize("micro", quick([BATCH, 2], 2))
def test_the_update_is_the_hand_written_one_with_and_without_accumulation(
    make_recipe: MakeRecipe, by_hand: Any, tiny_model: Path, tmp_path: Path, micro: int
) -> None:
    options = {
        **PLAIN,
        "packing": False,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": BATCH // micro,
    }
    recipe = make_recipe(trainer=options, techniques={"sam": RHO})
    wanted = _by_hand(by_hand(recipe, BATCH))
    actual = dict(load_model(train(recipe).model_dir).model.named_parameters())
    without = make_recipe(trainer=options, run_dir=str(tmp_path / "without"))
    other = dict(load_model(train(without).model_dir).model.named_parameters())
    base = dict(load_model(str(tiny_model)).model.named_parameters())
    error = _distance(actual, wanted)
    assert error < 1e-5 * _distance(base, wanted)
    assert _distance(actual, other) > 100 * error


def test_in_bf16_the_update_follows_the_hand_written_one_to_rounding(
    make_recipe: MakeRecipe, by_hand: Any, tmp_path: Path
) -> None:
    recipe = make_recipe(trainer={**PLAIN, "packing": False, "bf16": True}, techniques={"sam": RHO})
    hand = by_hand(recipe, BATCH)
    hand.model.float()
    wanted = _by_hand(hand, autocast=True)
    actual = dict(load_model(train(recipe).model_dir).model.named_parameters())
    without = make_recipe(
        trainer={**PLAIN, "packing": False, "bf16": True}, run_dir=str(tmp_path / "without")
    )
    other = dict(load_model(train(without).model_dir).model.named_parameters())
    assert _distance(actual, wanted) < 0.05 * _distance(actual, other)


def test_the_perturbation_has_length_rho_and_is_undone_bitwise() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    moves = []
    for scale in (1.0, 65536.0):  # as an fp16 scaler makes gradients
        for number, weight in enumerate(model.parameters()):
            weight.grad = scale * torch.ones_like(weight) * (number + 1)
        sharpness = SharpnessAware(0.05)
        assert sharpness.perturb(model)
        moves.append(
            torch.cat([(w.detach() - before[n]).flatten() for n, w in model.named_parameters()])
        )
        sharpness.restore()
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert float(moves[0].norm()) == pytest.approx(0.05, rel=1e-5)
    assert torch.allclose(moves[0], moves[1], rtol=1e-5)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
def test_a_gradient_that_shows_no_way_up_moves_nothing(value: float) -> None:
    model = torch.nn.Linear(2, 2)
    before = [weight.detach().clone() for weight in model.parameters()]
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, value)
    assert not SharpnessAware(0.1).perturb(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
