"""The shape of what changes the updates of a run, and its rules: layer-wise rates, a frozen base,
SAM, rounding, Muon."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import nn

from kinject.corpus.packing import TrainingRow
from kinject.errors import InputError, fault
from kinject.models import full_tensor, has_fast_bf16, own_part
from kinject.train.loss import Technique

if TYPE_CHECKING:
    from kinject.recipe import TrainRecipe


def leave_warmup_to_schedule(optimizer: Any) -> None:
    """Take the warm-up of a new schedule-free optimizer away: transformers gives the same warm-up
    to the schedule."""
    if {"train_mode", "warmup_steps"} <= getattr(
        optimizer, "defaults", {}
    ).keys():  # DeepSpeed's placeholder has none
        for group in optimizer.param_groups:
            group["warmup_steps"] = 0


@dataclass(frozen=True)
class UpdateInputs:
    """What rules are made from: the recipe, any of whose keys may be a rule's, and the model before
    a trainer wraps it.

    `load_base` makes a copy of a sharded model. `reinitialized` are the names of parameters with
    new weights, `kept` the rows on which a projection keeps the outputs.
    """

    recipe: TrainRecipe
    model: Any
    load_base: Callable[[], Any] | None = None
    reinitialized: Sequence[str] = ()
    kept: Sequence[TrainingRow] = field(default=())


class UpdateRule(Technique):
    """Changes the updates of a run; each kind is one file, and one line of
    `kinject.train.updates.UPDATE_RULES`.

    A rule of your own is a dataclass whose fields, made by `kinject.recipe.sections.option`, are
    its settings: a recipe sets them under techniques.custom.NAME. Of the hooks below a rule
    overrides those that it needs; they are called in the order of the table. Randomness must follow
    from the seed and the step, and state from the optimizer's: then `--resume` is exact.
    """

    copies: ClassVar[int] = 0
    """Copies of the trained weights that it keeps in float32, for the estimate of memory."""

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Self:
        """Return the rule with the recipe's settings."""
        return cls.configured(name, inputs.recipe)

    def start(self, trainer: Any) -> None:
        """Measure what is needed; the model is wrapped, has its adapter, and has not been trained."""

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer to use in place of a new one, often itself."""
        return optimizer

    def change_gradient(self, model: Any, step: int) -> None:
        """Change the accumulated gradients of a (0-based) update before they are clipped."""

    def before_update(self) -> None:
        """Read the weights before the optimizer's step."""

    def after_update(self) -> None:
        """Change the weights after the optimizer's step."""

    def note(self) -> str:
        """Return a line for the log, "" for none."""
        return ""


LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|wte|wpe|embed_in)\.")


class LayerwiseRates(UpdateRule):
    """techniques.layerwise_lr_decay: each layer has `decay` times the rate of the one above it."""

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether rates decay."""
        return recipe.techniques.layerwise_lr_decay < 1.0

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer, its groups split so that each holds the parameters of one rate
        factor, in order."""
        model, groups = trainer.model, list[dict[str, Any]]()
        n_layers = model.config.get_text_config().num_hidden_layers
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            by_factor: dict[float, list[Any]] = {}
            for parameter in group["params"]:
                by_factor.setdefault(
                    rate_factor(names[id(parameter)], n_layers, self.decay), []
                ).append(parameter)
            groups += [
                {**group, "params": parameters, "lr": group["lr"] * factor}
                for factor, parameters in sorted(by_factor.items())
            ]
        optimizer.param_groups[:] = groups
        return optimizer


class FreezeWarmup(UpdateRule):
    """techniques.freeze_base_steps: drops the gradients of the base in the first updates.

    `patterns` name the parameters that train from the start; without any these are `reinitialized`.
    An optimizer does not change weights without a gradient, by weight decay neither, and their
    moments begin with their first gradient. The count comes from the trainer's step, so resuming
    changes nothing.
    """

    def __init__(self, steps: int, patterns: Sequence[str], reinitialized: Sequence[str]) -> None:
        self.steps, self.patterns, self.first = steps, patterns, list(reinitialized)
        self._guard: Any = None

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> FreezeWarmup:
        """Return the rule with the recipe's steps."""
        techniques = inputs.recipe.techniques
        return cls(
            techniques.freeze_base_steps or 0, techniques.freeze_base_except, inputs.reinitialized
        )

    def start(self, trainer: Any) -> None:
        """Find the parameters that train first. Raises `RecipeError` for a pattern without a match."""
        self._guard = trainer.guard
        names = [
            name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
        ]
        for pattern in self.patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                message = f"{pattern!r} matches no parameter that trains. Names look like {', '.join(names[:3])}."
                raise fault("techniques.freeze_base_except", message)
        matched = [
            name for name in names if any(fnmatchcase(name, pattern) for pattern in self.patterns)
        ]
        self.first = matched or self.first

    def change_gradient(self, model: Any, step: int) -> None:
        """Drop the base's gradients if this update is one of the first."""
        if step == self.steps:  # from here on the norm is that of more weights
            self._guard.norms.clear()
        if step < self.steps:
            for name, parameter in model.named_parameters():
                if name.removeprefix("module.").replace("_orig_mod.", "") not in self.first:
                    parameter.grad = None

    def note(self) -> str:
        """Return what trains first."""
        names = ", ".join(summarize_names(self.first))
        return f"techniques.freeze_base_steps: for {self.steps} updates only these train: {names}"


def layer_number(name: str) -> int | None:
    """Return the number of the layer that holds the parameter `name`; None outside the layers."""
    match = LAYER.search(f".{name}")
    return None if match is None else int(match[1])


def rate_factor(name: str, n_layers: int, decay: float) -> float:
    """Return the factor of `name` on the learning rate: 1 above the layers and in the last, times
    `decay` a layer below.

    The embeddings lie under layer 0 (ULMFiT's discriminative fine-tuning, arXiv 1801.06146).
    """
    layer = layer_number(name)
    if layer is not None:
        return float(decay ** (n_layers - 1 - layer))
    return float(decay**n_layers) if _EMBEDDING.search(name) else 1.0


def summarize_names(names: Sequence[str]) -> list[str]:
    """Return names with layer numbers joined: ``model.layers.{0-3}.mlp.up_proj.weight``."""
    layers: dict[str, list[int]] = {}
    for name in names:
        match = LAYER.search(name)
        key = name if match is None else name[: match.start(1)] + "*" + name[match.end(1) :]
        layers.setdefault(key, []).extend([] if match is None else [int(match[1])])
    return [
        key.replace("*", _span(sorted(numbers))) if numbers else key
        for key, numbers in layers.items()
    ]


def _span(numbers: Sequence[int]) -> str:
    contiguous = len(numbers) == numbers[-1] - numbers[0] + 1
    return (
        f"{{{numbers[0]}-{numbers[-1]}}}" if contiguous else "{" + ",".join(map(str, numbers)) + "}"
    )


class SharpnessAware(UpdateRule):
    """Sharpness-aware minimisation (SAM, arXiv 2010.01412): the gradient is taken near the highest
    loss nearby.

    The optimizer sees the gradient at ``w + rho * g / |g|`` with g over all accumulated batches. A
    scaled gradient (fp16) perturbs the weights in the same way. `restore` puts them back bitwise.
    Nothing is kept from one update to the next.
    """

    copies = 1

    def __init__(self, rho: float) -> None:
        self.rho = rho
        self._batches: list[Any] = []
        self._weights: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(self) -> str:
        """Return where gradients are taken."""
        return f"techniques.sam: gradients are taken {self.rho:g} uphill, in two passes an update"

    def keep(self, batch: Any) -> None:
        """Keep a batch of the current update."""
        self._batches.append(batch)

    def take_batches(self) -> list[Any]:
        """Return the batches kept, in order, and forget them."""
        batches, self._batches = self._batches, []
        return batches

    @torch.no_grad()
    def perturb(self, model: Any) -> bool:
        """Move the weights uphill; False (and no weight moves) if the gradient is zero or not
        finite."""
        moving = [parameter for parameter in model.parameters() if parameter.grad is not None]
        if not moving:
            return False
        norm = full_tensor(
            torch.nn.utils.get_total_norm([parameter.grad.float() for parameter in moving])
        )
        if not bool(norm.isfinite()) or float(norm) == 0.0:
            return False
        self._weights = [(parameter, parameter.detach().clone()) for parameter in moving]
        for parameter in moving:
            step = own_part(parameter.grad).float() * (self.rho / norm)
            own_part(parameter).add_(step.to(parameter.dtype))
        return True

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back to their values before `perturb`."""
        for parameter, before in self._weights:
            parameter.copy_(before)
        self._weights = []


_SLICE = 2**24
"""Numbers that are rounded at a time."""


def round_stochastically(
    values: torch.Tensor, rounded: torch.Tensor, generator: torch.Generator
) -> None:
    """Write `values` (float32) into `rounded` (bfloat16 of the same shape), up or down at random;
    `values` are changed too.

    A value goes to the neighbour away from zero with the probability of its distance to the other
    one, so that its mean is the value. bfloat16 is the upper half of float32: adding random bits to
    the lower half carries with that probability.
    """
    bits, out = values.view(torch.int32).view(-1), rounded.view(-1)
    for start in range(0, len(bits), _SLICE):
        part = bits[start : start + _SLICE]
        part += torch.randint(
            2**16, part.shape, dtype=torch.int32, device=part.device, generator=generator
        )
        part &= -(2**16)
        out[start : start + _SLICE] = part.view(torch.float32)


class StochasticRounding(UpdateRule):
    """techniques.stochastic_rounding: one parameter is updated at a time, and rounded at random
    (arXiv 2010.06192).

    bfloat16 weights are updated in float32 and rounded stochastically, so that updates below half
    of the distance to the next number count on average. Their state is that of float32 weights. The
    random bits follow from the seed, the number of the update and the parameter: the same in every
    process, and after resuming. Beside the model, the float32 copies of one parameter and its
    gradient are in memory.
    """

    def __init__(self, rounds: bool) -> None:
        assert rounds

    def note(self) -> str:
        """Return how weights are rounded."""
        return "techniques.stochastic_rounding: bfloat16 weights, each update rounded up or down at random"

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return the optimizer, whose step is another."""
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self._numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        self._positions = [
            (g["params"], index)
            for g in optimizer.param_groups
            for index in range(len(g["params"]))
        ]
        self.trainer, self.optimizer, self._update_all = trainer, optimizer, optimizer.step
        self._update_all()  # without gradients: bitsandbytes finds its settings by parameter in its first step
        # a method, since torch's schedulers wrap it as one
        optimizer.step = types.MethodType(lambda _, closure=None: self._step(), optimizer)
        optimizer.register_load_state_dict_pre_hook(self._keep)
        optimizer.register_load_state_dict_post_hook(self._restore_precision)
        return optimizer

    @torch.no_grad()
    def _step(self) -> None:
        """Update every parameter that has a gradient; the gradients stay."""
        gradients = [parameter.grad for parameter in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is not None:
                self._update(parameter, gradient)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Update one parameter, while no other has a gradient.

        Its float32 copy takes its position and its state: to change the parameter's own dtype would
        detach DDP from it.
        """
        if parameter.dtype != torch.bfloat16:
            parameter.grad = gradient
            self._update_all()
            parameter.grad = None
            return
        number, state = self._numbers[id(parameter)], self.optimizer.state
        positions, index = self._positions[number]
        copy = torch.nn.Parameter(parameter.detach().float())
        copy.grad = gradient.float()
        if parameter in state:
            state[copy] = state.pop(parameter)
        positions[index] = copy
        self._update_all()
        positions[index] = parameter
        state[parameter] = state.pop(copy)
        generator = torch.Generator(parameter.device)
        generator.manual_seed(
            hash((self.trainer.args.seed, self.trainer.state.global_step, number)) % 2**63
        )
        round_stochastically(copy.detach(), parameter.detach(), generator)

    def _keep(self, optimizer: Any, state_dict: dict[str, Any]) -> None:
        """Keep a state that is about to be loaded."""
        self._loaded = state_dict

    def _restore_precision(self, optimizer: Any) -> None:
        """Put the loaded states back in their own dtypes: torch has cast them to that of the
        parameters."""
        numbers = [number for group in self._loaded["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, self.parameters, strict=True):
            for key, value in self._loaded["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and key != "step":
                    optimizer.state[parameter][key] = value.to(parameter.device, copy=True)
        del self._loaded


_MUON_MOMENTUM = 0.95


class Muon(UpdateRule):
    """techniques.muon: Muon updates the matrices inside the layers, at `factor` of the learning
    rate."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def change_optimizer(self, optimizer: Any, trainer: Any) -> Any:
        """Return an AdamW whose matrices inside the layers are updated by Muon."""
        return add_muon(optimizer, trainer.model, self.factor)

    def note(self) -> str:
        """Return what is updated by what."""
        return f"techniques.muon: the layers' matrices by Muon at {self.factor:g} of the rate, the rest by AdamW"


def is_muon_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether Muon updates a parameter: a matrix inside the layers (of an adapter too), not
    an embedding."""
    return len(shape) == 2 and layer_number(name) is not None


class MuonAdamW(torch.optim.AdamW):
    """torch's AdamW, whose parameter groups `matrices` are updated by Muon (Jordan et al. 2024;
    arXiv 2502.16982).

    Muon makes the momentum of a matrix nearly orthogonal, so that all directions of the matrix move
    equally far. The update is scaled to the usual size of AdamW's: the same numbers as torch's own
    Muon, which always computes in bfloat16.
    """

    def __init__(
        self, others: Sequence[dict[str, Any]], matrices: Sequence[dict[str, Any]], **options: Any
    ) -> None:
        super().__init__(
            [*others, *({**group, "muon_momentum": _MUON_MOMENTUM} for group in matrices)],
            **options,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a state; AdamW is not shown the matrices, whose state has no number of steps."""
        groups = state["param_groups"]
        super().__setstate__(
            {**state, "param_groups": [group for group in groups if "muon_momentum" not in group]}
        )  # type: ignore[no-untyped-call]
        self.param_groups = groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient. A closure would be called twice, so none is
        taken."""
        assert closure is None
        groups = self.param_groups
        for group in groups:
            if "muon_momentum" in group:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update_matrix(parameter, group)
        self.param_groups = [group for group in groups if "muon_momentum" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _update_matrix(self, matrix: torch.Tensor, group: dict[str, Any]) -> None:
        gradient, state, rate = matrix.grad, self.state[matrix], float(group["lr"])
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["muon_momentum"])
        update = orthogonalize(gradient.lerp(momentum, group["muon_momentum"]))
        matrix.mul_(1 - rate * group["weight_decay"])
        matrix.add_(update, alpha=-rate * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return `matrix` with its singular values brought near 1, by five Newton-Schulz steps with
    Jordan's coefficients.

    They are computed in bfloat16 where the device multiplies it in hardware; elsewhere in float32,
    since a CPU without it takes 36 times as long in bfloat16.
    """
    fast = has_fast_bf16(matrix.device.type)
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(torch.bfloat16 if fast else torch.float32, copy=True)
    x.div_(x.norm().clamp(min=1e-7))
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def add_muon(optimizer: Any, model: nn.Module, factor: float) -> MuonAdamW:
    """Return an optimizer with the groups of `optimizer`, a new AdamW, in which Muon updates the
    matrices inside the layers.

    Their learning rate is `factor` times that of their group; the weight decay stays. Raises
    `InputError` if none trains.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    others: list[dict[str, Any]] = []
    matrices: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        parts: tuple[list[Any], list[Any]] = [], []
        for parameter in group["params"]:
            parts[is_muon_matrix(names[id(parameter)], parameter.shape)].append(parameter)
        others += [{**group, "params": parts[0]}] if parts[0] else []
        matrices += [{**group, "params": parts[1], "lr": group["lr"] * factor}] if parts[1] else []
    if not matrices:
        raise InputError(
            "techniques.muon: no matrix inside the layers trains. Remove the line, or train more of the model."
        )
    options = {
        key: value for key, value in optimizer.defaults.items() if key != "decoupled_weight_decay"
    }  # fixed
    return MuonAdamW(others, matrices, **options)
