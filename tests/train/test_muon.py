"""Muon for the matrices inside the layers: its update, what it leaves to AdamW, resuming, and what cannot be combined."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.errors import InputError
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.updates import muon
from kinject.train.updates.muon import MuonAdamW, add_muon
from small import interrupt

MakeRecipe = Callable[..., Recipe]
MUON = {"techniques": {"muon": 0.5}}


class _Model(torch.nn.Module):
    """An embedding, a layer with a matrix and a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 4)])
        self.head = torch.nn.Linear(4, 7, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](self.embed_tokens(ids)).tanh())


def _optimizer(model: torch.nn.Module) -> MuonAdamW:
    decayed = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    plain = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.02
    )
    return add_muon(plain, model, 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps with Jordan's coefficients, on the singular values alone, in float64."""
    u, s, v = torch.linalg.svd(matrix.double() / matrix.double().norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ s.diag() @ v


@pytest.mark.parametrize(
    ("name", "shape", "is_matrix"),
    [
        ("model.layers.4.mlp.router.weight", (32, 2880), True),
        ("base_model.model.model.layers.1.mlp.up_proj.lora_A.default.weight", (8, 64), True),
        ("model.layers.4.mlp.experts.down_proj_bias", (32, 2880), False),
        ("backbone.layers.0.mixer.A_log", (1536, 16), False),
        ("backbone.layers.0.mixer.x_proj.weight", (80, 1536), True),
        ("base_model.model.model.layers.1.mlp.down_proj.ia3_l.default", (1, 64), False),
        ("model.embed_tokens.weight", (300, 64), False),
    ],
)
def test_a_matrix_is_what_inputs_are_multiplied_by(
    name: str, shape: tuple[int, int], is_matrix: bool
) -> None:
    assert muon.is_muon_matrix(name, shape) == is_matrix


@pytest.mark.parametrize(("fast", "tolerance"), [(True, 0.05), (False, 1e-4)])
def test_the_update_is_that_written_by_hand(
    fast: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The matrix moves by 0.2 * sqrt(its longer side) * rate along the orthogonal momentum; the rest as in torch's AdamW.

    The momentum is made orthogonal in bfloat16 where that is fast, in float32 elsewhere.
    """
    monkeypatch.setattr(muon, "has_fast_bf16", lambda device: fast)
    torch.manual_seed(0)
    model, hand = _Model(), _Model()
    hand.load_state_dict(model.state_dict())
    optimizer = _optimizer(model)
    others = [p for name, p in hand.named_parameters() if name != "layers.0.weight"]
    adamw = torch.optim.AdamW(
        [{"params": [p for p in others if p.ndim == 2], "weight_decay": 0.1},
         {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0}], lr=0.02,
    )  # fmt: skip
    weight, momentum = hand.layers[0].weight, torch.zeros(4, 6).double()
    for step in range(3):
        ids, wanted = torch.arange(7).roll(step), torch.arange(7)
        for one in (model, hand):
            one.zero_grad()
            torch.nn.functional.cross_entropy(one(ids), wanted).backward()
        optimizer.step()
        gradient = weight.grad.double()
        momentum = momentum * 0.95 + gradient * 0.05
        with torch.no_grad():
            update = _orthogonal(gradient * 0.05 + momentum * 0.95)
            before = weight.double() * (1 - 0.01 * 0.1)
            weight.copy_(before - 0.01 * 0.2 * math.sqrt(6) * update)
        adamw.step()
        moved = (model.layers[0].weight - before).abs().max()
        assert (model.layers[0].weight - weight).abs().max() < tolerance * moved
        with torch.no_grad():
            weight.copy_(model.layers[0].weight)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, hand.get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (5, 5)])
def test_in_bfloat16_the_update_is_that_of_torch_to_the_bit(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has no Muon before 2.9")
    monkeypatch.setattr(muon, "has_fast_bf16", lambda device: True)
    torch.manual_seed(0)
    ours, torchs = (torch.nn.Parameter(torch.full(shape, 0.5)) for _ in range(2))
    ours_optimizer = MuonAdamW([], [{"params": [ours], "weight_decay": 0.1}], lr=0.02)
    torchs_optimizer = torch.optim.Muon(
        [torchs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        ours.grad = torch.randn(shape)
        torchs.grad = ours.grad.clone()
        ours_optimizer.step()
        torchs_optimizer.step()
        assert torch.equal(ours, torchs)


def _weights(
    make_recipe: MakeRecipe, run: Path, resume: bool = False, **sections: Any
) -> dict[str, torch.Tensor]:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}
    folder = Path(
        train(make_recipe(trainer=options, run_dir=str(run), **sections), resume=resume).model_dir
    )
    return load_file(next(folder.glob("*.safetensors")))


@pytest.mark.soak
def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    uninterrupted = _weights(make_recipe, run, **MUON)
    interrupt(run, 2)
    resumed = _weights(make_recipe, run, resume=True, **MUON)
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_a_model_whose_layers_do_not_train_is_refused(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    frozen = {"model": {"path": str(tiny_model), "freeze": ["*.layers.*"]}}
    with pytest.raises(
        InputError, match=r"techniques\.muon: no matrix inside the layers trains\. Remove the line"
    ):
        train(make_recipe(**frozen, **MUON))
