"""An objective and an update rule from outside of the package: a class, and one entry in a table (CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.errors import Problem, RecipeError
from kinject.models import load_model
from kinject.recipe import TrainRecipe
from kinject.recipe.launch import Launch
from kinject.recipe.sections import option
from kinject.train import train
from kinject.train.objectives import OBJECTIVES, Objective
from kinject.train.setup import check_training
from kinject.train.updates import UPDATE_RULES, UpdateRule

MakeRecipe = Callable[..., TrainRecipe]
RATE, STEPS, BATCH = 0.5, 2, 8
SGD = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": 0.0, "max_steps": STEPS,
       "train_sampling_strategy": "sequential", "per_device_train_batch_size": BATCH}  # fmt: skip


@dataclass(frozen=True)
class Focal(Objective):
    """Tokens that are likely already count less (arXiv 1708.02002)."""

    gamma: float = option(help="Exponent.", min=0.0)

    @classmethod
    def problems(cls, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """It knows no soft labels."""
        if launch["label_smoothing_factor"]:
            yield Problem("trainer.label_smoothing_factor", "focal needs hard labels.")

    def by_token(
        self, losses: torch.Tensor, logits: Any, labels: Any, teacher: Any
    ) -> torch.Tensor:
        """Multiply each loss by (1 - p) ** gamma."""
        return (1 - torch.exp(-losses)) ** self.gamma * losses


@dataclass
class SignDescent(UpdateRule):
    """Each weight moves by as much, in the direction of its gradient."""

    size: float = option(help="Size of the gradient of a weight.", above=0.0)

    def change_gradient(self, model: Any, step: int) -> None:
        """Keep the signs."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = self.size * parameter.grad.sign()

    def note(self) -> str:
        """Return the size."""
        return f"sign descent by {self.size:g}"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add both to their tables."""
    monkeypatch.setitem(OBJECTIVES, "focal", Focal)
    monkeypatch.setitem(UPDATE_RULES, "sign_descent", SignDescent)


@pytest.mark.usefixtures("tables")
def test_an_objective_from_outside_trains_by_its_own_loss(
    make_recipe: MakeRecipe, by_hand: Any
) -> None:
    techniques = {"custom": {"focal": {"gamma": 1.5}}}
    recipe = make_recipe(trainer=SGD, techniques=techniques)
    hand = by_hand(recipe, BATCH)
    weights = list(hand.model.parameters())
    for step in range(STEPS):
        total: Any = 0.0
        n_tokens = 0
        for row in hand.rows_of(step):
            for positions, losses in hand.losses(
                row, lambda logp, ids: -logp.gather(1, ids[:, None])
            ):
                total = total + ((1 - torch.exp(-losses)) ** 1.5 * losses).sum()
                n_tokens += len(positions)
        gradients = torch.autograd.grad(total / n_tokens, weights)
        with torch.no_grad():
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.sub_(RATE * gradient)
    trained = dict(load_model(train(recipe).model_dir).model.named_parameters())
    for name, weight in hand.model.named_parameters():
        assert torch.allclose(trained[name].double(), weight, atol=2e-6), name


@pytest.mark.usefixtures("tables")
def test_an_update_rule_from_outside_changes_the_update_and_notes_it(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    trainer = {**SGD, "max_steps": 1, "learning_rate": 0.125}
    result = train(
        make_recipe(trainer=trainer, techniques={"custom": {"sign_descent": {"size": 0.25}}})
    )
    before = dict(load_model(str(tiny_model)).model.named_parameters())
    steps = torch.cat([
        (weight - before[name]).detach().abs().flatten() for name, weight in load_model(result.model_dir).model.named_parameters()
    ])  # fmt: skip
    moved = steps[steps > 0]
    assert moved.numel() > 0.5 * steps.numel()  # rows of tokens that do not occur have no gradient
    assert torch.allclose(moved, torch.full_like(moved, 0.125 * 0.25), atol=1e-6)
    assert "sign descent by 0.25" in result.notes


@pytest.mark.usefixtures("tables")
@pytest.mark.parametrize(
    ("custom", "trainer", "key", "message"),
    [
        ({"focl": {}}, {}, "techniques.custom.focl", "Did you mean focal?"),
        ({"focal": {"gama": 1}}, {}, "techniques.custom.focal.gama", "Did you mean gamma?"),
        ({"focal": {"gamma": -1}}, {}, "techniques.custom.focal.gamma", "found -1"),
        ({"focal": {}}, {}, "techniques.custom.focal.gamma", "missing. Exponent."),
        (
            {"focal": {"gamma": 2.0}},
            {"label_smoothing_factor": 0.1},
            "trainer.label_smoothing_factor",
            "hard labels",
        ),
    ],
)
def test_settings_and_conflicts_of_an_objective_from_outside_are_checked(
    make_recipe: MakeRecipe,
    custom: Mapping[str, Any],
    trainer: dict[str, Any],
    key: str,
    message: str,
) -> None:
    with pytest.raises(RecipeError) as caught:
        check_training(make_recipe(techniques={"custom": custom}, trainer=trainer))
    assert any(fault.key == key and message in fault.message for fault in caught.value.problems)
