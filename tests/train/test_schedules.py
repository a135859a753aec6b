"""The rate that the trainer applies is the schedule's formula, with warm-up both ways, planned or run, stopped or not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.disk import read_jsonl
from kinject.errors import RecipeError, TrainingError
from kinject.plan.length import model_config
from kinject.recipe import Recipe
from kinject.recipe.library_fields import ADAPTIVE_SCHEDULES, schedule_names
from kinject.train import train
from kinject.train.schedules import Schedule, planned_curve
from small import interrupt, quick

MakeRecipe = Callable[..., Recipe]
N, PER_EPOCH, TOP, WIDTH = 10, 5, 2e-3, 32
Formula = Callable[[float, float], float]
"""(updates since the warm-up, updates of the run after it) -> factor."""


def _cos(fraction: float) -> float:
    return (1 + math.cos(math.pi * fraction)) / 2


def _staircase(i: float, n: float) -> float:
    return float(0.5 ** (i // 3))


def _by_epochs(i: float, n: float) -> float:
    """Half at every fifth update of the run: an epoch, wherever the warm-up ends."""
    return float(0.5 ** ((i + N - n) // PER_EPOCH))


def _wsd(n_decay: int, floor: float) -> Formula:
    return lambda i, n: (
        1.0 if i < n - n_decay else floor + (1 - floor) * (1 - (i - n + n_decay) / n_decay)
    )


def _flat(i: float, n: float) -> float:
    n_decay = round(n * 0.5)
    return 1.0 if i < n - n_decay else 0.1 + 0.9 * _cos((i - n + n_decay) / n_decay)


FORMULAS: dict[str, tuple[dict[str, Any], Formula]] = {
    "constant": ({}, lambda i, n: 1.0),
    "constant_with_warmup": ({}, lambda i, n: 1.0),
    "linear": ({}, lambda i, n: 1 - i / n),
    "cosine": ({}, lambda i, n: _cos(i / n)),
    "cosine_with_restarts": ({"num_cycles": 2}, lambda i, n: _cos(2 * i / n % 1)),
    "cosine_with_restarts to a floor": (
        {"num_cycles": 2, "min_lr_ratio": 0.1},
        lambda i, n: 0.1 + 0.9 * _cos(2 * i / n % 1),
    ),
    "cosine_with_min_lr": ({"min_lr_rate": 0.1}, lambda i, n: 0.1 + 0.9 * _cos(i / n)),
    "polynomial": (
        {"power": 2.0, "lr_end": 1e-4},
        lambda i, n: (1e-4 + (TOP - 1e-4) * (1 - i / n) ** 2) / TOP,
    ),
    "step_decay": ({"step_size": 3, "gamma": 0.5}, _staircase),
    "step_decay by epochs": ({"step_epochs": 1, "gamma": 0.5}, _by_epochs),
    "exponential_decay": ({"gamma": 0.8}, lambda i, n: 0.8**i),
    "inverse_sqrt": ({"timescale": 4}, lambda i, n: (4 / (4 + i)) ** 0.5),
    "flat_then_cosine": ({"flat_fraction": 0.5, "min_lr_ratio": 0.1}, _flat),
    "warmup_stable_decay": ({"num_decay_steps": 4, "decay_type": "linear"}, _wsd(4, 0.0)),
}
WARMUPS = {"by steps": (3, 3), "by share": (0.25, 3), "without": (0, 0)}
"""What the recipe says -> (its number, steps in a run of N = 10; a share is rounded up)."""


def _expected(name: str, formula: Formula, warmup: int) -> list[float]:
    low = 0.1 if name == "flat_then_cosine" else 0.0  # transformers' warm-up begins at min_lr_ratio
    climb = [low + (1 - low) * i / warmup for i in range(warmup)]
    return [
        TOP * factor for factor in [*climb, *(formula(i, N - warmup) for i in range(N - warmup))]
    ]


def _one_cycle(warmup: int) -> list[float]:
    """Two half cosines: from top/25 to the top at update `warmup`, then down to top/25/1e4 at the last."""
    low, last = TOP / 25, TOP / 25 / 1e4
    climb = [low + (TOP - low) * (1 - _cos(i / warmup)) for i in range(warmup)]
    return [*climb, *(last + (TOP - last) * _cos(i / (N - 1 - warmup)) for i in range(N - warmup))]


def _noam(warmup: int) -> list[float]:
    return [TOP * WIDTH**-0.5 * min((i + 1) ** -0.5, (i + 1) * warmup**-1.5) for i in range(N)]


def _late_cosine(warmup: int) -> list[float]:
    """transformers' cosine_warmup_with_min_lr counts updates from 1."""
    down = [0.1 + 0.9 * _cos((i + 1) / (N - warmup)) for i in range(N - warmup)]
    return [TOP * factor for factor in [*((i + 1) / warmup for i in range(warmup)), *down]]


def _cases() -> list[Any]:
    cases = []
    for warmup, (fields, steps) in WARMUPS.items():
        for name, (kwargs, formula) in FORMULAS.items():
            expected = _expected(name, formula, steps)
            cases.append(
                pytest.param(name.split()[0], kwargs, fields, expected, id=f"{name} {warmup}")
            )
        late = _late_cosine(steps)
        floor = {"min_lr_rate": 0.1}
        cases.append(
            pytest.param(
                "cosine_warmup_with_min_lr", floor, fields, late, id=f"late cosine {warmup}"
            )
        )
        if steps:
            cases.append(
                pytest.param("one_cycle", {}, fields, _one_cycle(steps), id=f"one_cycle {warmup}")
            )
            cases.append(pytest.param("noam", {}, fields, _noam(steps), id=f"noam {warmup}"))
    return cases


def _recipe(
    make_recipe: MakeRecipe, name: str, kwargs: dict[str, Any], warmup: float, **more: Any
) -> Recipe:
    sections = more.pop("sections", {})
    trainer = {
        "lr_scheduler_type": name,
        "learning_rate": TOP,
        "max_steps": N,
        "warmup_steps": warmup,
        **more,
    }
    if kwargs:
        trainer["lr_scheduler_kwargs"] = kwargs
    return make_recipe(**sections, trainer=trainer)


def _planned(recipe: Recipe) -> list[float]:
    return planned_curve(recipe.trainer, model_config(recipe.model), N, PER_EPOCH)


def _applied(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, **options: bool) -> list[float]:
    """Train, and return the rate that the optimizer had at each update."""
    rates: list[float] = []
    update = torch.optim.AdamW.step

    def _noted(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return update(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", _noted)
        train(recipe, **options)
    return rates


@pytest.mark.parametrize(("name", "kwargs", "warmup", "expected"), _cases())
def test_a_planned_curve_is_its_formula(
    make_recipe: MakeRecipe, name: str, kwargs: dict[str, Any], warmup: float, expected: list[float]
) -> None:
    rates = _planned(_recipe(make_recipe, name, kwargs, warmup))
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)


QUICK = (
    "constant by steps",
    "cosine_with_min_lr by steps",
    "step_decay by epochs by steps",
    "one_cycle by share",
)
TRAINED = [
    pytest.param(*case.values, id=case.id, marks=() if case.id in QUICK else pytest.mark.soak)
    for case in _cases() if "by steps" in str(case.id) or case.id in ("linear by share", "one_cycle by share")
]  # fmt: skip
"""Each of these trains; the curves above are held to all formulas, warm-up by share included."""


@pytest.mark.parametrize(("name", "kwargs", "warmup", "expected"), TRAINED)
def test_the_trainer_applies_the_formula(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, name: str, kwargs: dict[str, Any], warmup: float,
    expected: list[float],
) -> None:  # fmt: skip
    recipe = _recipe(make_recipe, name, kwargs, warmup)
    rates = _applied(recipe, monkeypatch)
    assert rates == pytest.approx(expected, rel=1e-9, abs=1e-15)
    logged = [
        row["learning_rate"]
        for _, row in read_jsonl(recipe.run_dir / "log.jsonl")
        if "learning_rate" in row
    ]
    assert logged == rates
    read = (
        recipe if name != "constant" else _recipe(make_recipe, "constant_with_warmup", {}, warmup)
    )
    assert _planned(read) == rates


def test_every_schedule_is_held_to_a_formula() -> None:
    assert {
        *(name.split()[0] for name in FORMULAS),
        "cosine_warmup_with_min_lr",
        "one_cycle",
        "noam",
        *ADAPTIVE_SCHEDULES,
    } == set(schedule_names())


@pytest.fixture
def watched(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A corpus section with a held-out corpus."""
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text(json.dumps({"text": "Person 7 was born in Kelm in 1907."}) + "\n")
    return {"corpus": {"path": str(corpus), "validation_corpus": str(held_out)}}


def test_reduce_on_plateau_halves_the_rate_after_evaluations_that_are_no_better(
    make_recipe: MakeRecipe, watched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = [5.0, 4.0, 4.5, 4.6, 3.0, 3.5, 3.6, 3.7, 3.8, 3.9]
    evaluations = iter(losses)

    def _evaluate(self: Any, **_: Any) -> dict[str, float]:
        metrics = {"eval_loss": next(evaluations)}
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    monkeypatch.setattr(
        import_module("kinject.train.trainer").KnowledgeTrainer, "evaluate", _evaluate
    )
    recipe = _recipe(
        make_recipe, "reduce_lr_on_plateau", {"factor": 0.5, "patience": 1}, 0, eval_strategy="steps", eval_steps=1,
        sections=watched,
    )  # fmt: skip
    expected, best, bad, factor = [], math.inf, 0, 1.0
    for loss in losses:
        expected.append(TOP * factor)
        best, bad = (loss, 0) if loss < best * (1 - 1e-4) else (best, bad + 1)
        if bad > 1:
            factor, bad = factor * 0.5, 0
    assert _applied(recipe, monkeypatch) == pytest.approx(expected, rel=1e-12)
    assert min(expected) <= TOP / 2


def test_reduce_on_plateau_takes_a_rising_accuracy_for_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    for higher_is_better, expected in ((True, 1.0), (False, 0.25)):
        optimizer = torch.optim.SGD([weight], lr=1.0)
        kwargs = {"factor": 0.5, "patience": 0}
        scheduler = Schedule(
            "reduce_lr_on_plateau", kwargs, higher_is_better=higher_is_better
        ).make_scheduler(optimizer, 9)
        for accuracy in (0.2, 0.4, 0.6):
            scheduler.step(accuracy)
        assert optimizer.param_groups[0]["lr"] == expected


RESUMED = {
    "one_cycle": {},
    "reduce_lr_on_plateau": {"patience": 0, "threshold": 1.0, "factor": 0.5},
}


@pytest.mark.parametrize("name", quick(RESUMED, "reduce_lr_on_plateau"))
def test_a_resumed_run_continues_to_the_last_bit(
    make_recipe: MakeRecipe, watched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stop = 5
    recipe = _recipe(
        make_recipe, name, RESUMED[name], 4 * (name == "one_cycle"), save_strategy="steps", save_steps=stop,
        eval_strategy="steps", eval_steps=2,
        sections=watched,
    )  # fmt: skip
    whole = _applied(recipe, monkeypatch)
    weights = load_file(recipe.run_dir / "model" / "model.safetensors")
    interrupt(recipe.run_dir, stop)
    assert _applied(recipe, monkeypatch, resume=True) == whole[stop:]
    again = load_file(recipe.run_dir / "model" / "model.safetensors")
    assert all(torch.equal(weights[key], again[key]) for key in weights)
    if name == "reduce_lr_on_plateau":
        assert whole[-1] < TOP  # it was reduced on the way


@pytest.mark.parametrize(
    ("options", "key", "message"),
    [
        ({"lr_scheduler_type": "one_cylce"}, "lr_scheduler_type", "Did you mean one_cycle?"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}}, "lr_scheduler_kwargs.num_cycle",
         "Did you mean num_cycles?"),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs.power",
         "takes none"),
        ({"lr_scheduler_type": "step_decay"}, "lr_scheduler_type", "needs step_size (updates) or step_epochs"),
        ({"lr_scheduler_type": "step_decay", "lr_scheduler_kwargs": {"step_size": 3, "step_epochs": 1}},
         "lr_scheduler_type", "found both. Keep one"),
        ({"lr_scheduler_type": "exponential_decay", "lr_scheduler_kwargs": {"gamma": 1.5}},
         "lr_scheduler_kwargs.gamma", "allowed: more than 0, at most 1"),
        ({"lr_scheduler_type": "step_decay", "lr_scheduler_kwargs": {"step_size": "often"}},
         "lr_scheduler_kwargs.step_size", "expected a whole number"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_type", "needs num_decay_steps"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_type", "One of min_lr or min_lr_rate"),
        ({"lr_scheduler_type": "one_cycle", "warmup_steps": 2, "lr_scheduler_kwargs": {"pct_start": 0.3}},
         "lr_scheduler_kwargs.pct_start", "Keep one"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "warmup_steps": 2, "eval_strategy": "epoch"}, "lr_scheduler_type",
         "has no trainer.warmup_steps"),
        ({"lr_scheduler_type": "noam"}, "lr_scheduler_type", "needs trainer.warmup_steps"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 1.0}}, "lr_scheduler_kwargs",
         "must be smaller than initial lr"),
        ({"lr_scheduler_type": "one_cycle", "lr_scheduler_kwargs": {"anneal_strategy": "cosine"}},
         "lr_scheduler_kwargs.anneal_strategy", "Did you mean cos?"),
        ({"warmup_ratio": 3}, "warmup_ratio", "allowed: 0 up to 1"),
    ],
)  # fmt: skip
def test_a_wrong_schedule_is_reported_with_its_line(
    make_recipe: MakeRecipe, tmp_path: Path, options: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        train(make_recipe(trainer=options))
    (fault,) = caught.value.problems
    assert fault.key == f"trainer.{key}"
    assert message in fault.message
    path, _, line = fault.location.rpartition(":")
    assert key.rpartition(".")[2] in Path(path).read_text("utf-8").splitlines()[int(line) - 1]


@pytest.mark.parametrize(
    "name", ["polynomial", "one_cycle", "flat_then_cosine", "warmup_stable_decay"]
)
def test_a_warm_up_that_leaves_no_room_is_refused(make_recipe: MakeRecipe, name: str) -> None:
    kwargs = {"num_decay_steps": 0.2} if name == "warmup_stable_decay" else {}
    with pytest.raises(TrainingError, match="steps of warm-up"):
        _planned(_recipe(make_recipe, name, kwargs, N))


def test_a_share_of_decay_is_a_share_of_all_steps(make_recipe: MakeRecipe) -> None:
    kwargs = {"num_decay_steps": 0.4, "decay_type": "linear"}
    curve = _planned(_recipe(make_recipe, "warmup_stable_decay", kwargs, 2))
    assert curve == pytest.approx(_expected("", _wsd(4, 0.0), 2))


def test_the_width_of_noam_is_the_models_or_as_said(
    make_recipe: MakeRecipe, tiny_config: dict[str, Any]
) -> None:
    wide = {"model": {"new": {**tiny_config, "hidden_size": 64}, "tokenizer": {"vocab_size": 300}}}
    read = _planned(_recipe(make_recipe, "noam", {}, 3, sections=wide))
    curve = _planned(_recipe(make_recipe, "noam", {"d_model": 64}, 3))
    assert read == curve == pytest.approx([rate * (WIDTH / 64) ** 0.5 for rate in _noam(3)])
