"""Against forgetting: updates that hardly change what kept texts pass through a layer
(regularization.projection).

GPM (arXiv 2103.09762) and Adam-NSCL (arXiv 2103.07113) correct the weights after each step of the
optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from accelerate.utils import broadcast
from torch import nn
from transformers.pytorch_utils import Conv1D

from kinject import models
from kinject.corpus.packing import TrainingRow
from kinject.errors import TrainingError
from kinject.terminal import format_count
from kinject.train.updates.base import RunningTrainer, UpdateInputs, UpdateRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kinject.recipe import TrainRecipe


_LEAST_IN_FLOAT32 = 1e-3
"""Free share of the kept texts' inputs beside which float32's rounding (1e-7 a sum) is nothing."""


@dataclass
class Constraint:
    """How a weight may change: the rows that may, and the directions of its inputs.

    `basis` [inputs, n] is orthonormal. With `is_free` an update keeps its part along the basis,
    otherwise it loses that part: whichever needs fewer columns. `moving` [rows, 1] holds 1 for a
    row that trains, else 0. `transposed` weights are [inputs, outputs].
    """

    basis: torch.Tensor | None = None
    is_free: bool = True
    moving: torch.Tensor | None = None
    transposed: bool = False

    def apply(self, update: torch.Tensor) -> torch.Tensor:
        """Return the allowed part of `update`."""
        if self.basis is not None:
            rows = update.T if self.transposed else update
            part = (rows @ self.basis) @ self.basis.T
            kept = part if self.is_free else rows - part
            update = kept.T if self.transposed else kept
        return update if self.moving is None else update * self.moving


class Projection(UpdateRule):
    """Projects each update of the weights onto directions of their inputs that the kept texts
    hardly use.

    An update D of a matrix [outputs, inputs] changes its output on x by ``D x``. With C the mean of
    ``x x^T`` over the kept texts' tokens, the eigenvectors of the smallest eigenvalues are free as
    long as their eigenvalues sum to at most `free` of the trace of C, and every update becomes ``D
    P`` with P the projector onto them. An embedding is a matrix whose inputs are tokens: the rarest
    ones train that make up at most `free` of the kept texts, and all that do not occur. A tied head
    obeys both. Parameters of another shape (norms, biases, experts in one tensor) do not train.

    Of LoRA only the matrices A read the layer's inputs. They are projected at the start, while B is
    zero, so that the kept texts hardly pass them; B is free.

    It works with any optimizer, since it corrects the weights after each step.
    """

    def __init__(self, path: str, rows: Sequence[TrainingRow], free: float) -> None:
        self.path, self.rows, self.free = path, rows, free
        self.n_tokens = 0
        self.constraints: dict[str, Constraint] = {}
        self.frozen: list[str] = []
        self._parameters: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe names texts to keep."""
        return recipe.projection is not None

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Projection:
        """Return the rule for the recipe's texts."""
        section = inputs.recipe.projection
        assert section is not None
        return cls(section.path, inputs.kept, section.free)

    def start(self, trainer: RunningTrainer) -> None:
        """Measure the inputs of the layers."""
        with models.without_flash(trainer.model):
            self.measure(trainer.model)

    def measure(self, model: PreTrainedModel) -> None:
        """Find the free directions of a model that has not been trained yet; the rest of it stops
        training."""
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._measure(model, self.rows)
        for name, parameter in self._parameters.items():
            if name not in self.constraints and not self._is_behind_projected(name):
                self.frozen.append(name)
                parameter.requires_grad_(False)
        if not self.constraints:
            raise TrainingError(
                "regularization.projection: no matrix of a layer trains. Remove the line."
            )
        with torch.no_grad():
            for name in self.constraints:
                if ".lora_A." in name:
                    weight = self._parameters[name]
                    weight.copy_(self.constraints[name].apply(weight.float()).to(weight.dtype))

    def _is_behind_projected(self, name: str) -> bool:
        """Return whether `name` is a matrix B of LoRA that reads what a projected A lets pass.

        Not of experts in one tensor, whose A is no layer that reads inputs, and not a bias of B:
        with these kept texts changed as much as those that were learned (logits by 0.66).
        """
        return ".lora_B." in name and name.replace(".lora_B.", ".lora_A.") in self.constraints

    def before_update(self) -> None:
        """Keep the weights as they are before an update."""
        self._before = {name: self._parameters[name].detach().clone() for name in self.constraints}

    @torch.no_grad()
    def after_update(self) -> None:
        """Leave of the update its allowed part."""
        for name, before in self._before.items():
            weight = self._parameters[name]
            update = weight.float() - before.float()
            weight.copy_((before.float() + self.constraints[name].apply(update)).to(weight.dtype))
        self._before = {}

    def note(self) -> str:
        """Return what may change."""
        matrices = [limit for limit in self.constraints.values() if limit.basis is not None]
        free = sum(map(_n_free, matrices))
        total = sum(len(limit.basis) for limit in matrices if limit.basis is not None)
        tokens = [limit.moving for limit in self.constraints.values() if limit.moving is not None]
        text = (
            f"regularization.projection: measured on {format_count(self.n_tokens, 'token')} of "
            f"{self.path}; the updates of {len(matrices)} matrices keep {free:,} of {total:,} "
            f"directions of their inputs ({free / max(total, 1):.0%})"
        )
        if tokens:
            n_moving = sum(int(rows.sum()) for rows in tokens)
            n_rows = sum(map(len, tokens))
            text += f", the embeddings of {n_moving:,} of {format_count(n_rows, 'token')} train"
        if self.frozen:
            text += f"; {len(self.frozen)} other parameters do not train"
        return text

    def _measure(self, model: PreTrainedModel, rows: Sequence[TrainingRow]) -> None:
        """Set the constraints from the inputs of the layers on `rows`. Raises `TrainingError`
        without rows."""
        if not rows:
            raise TrainingError("regularization.projection: the file of kept texts has no token.")
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        # Float32 takes half the time on a CPU (8,000 tokens, 1,536 inputs: 1.1 s for 2.3), but its
        # rounding counts as free, and a training in which nothing is free drifts along it.
        dtype = torch.float32 if self.free >= _LEAST_IN_FLOAT32 else torch.float64
        with _hooked(model, names, dtype) as moments:
            was_training = model.training
            model.eval()
            with torch.no_grad():
                for row in rows:
                    ids = torch.tensor([row.input_ids], device=model.device)
                    positions = torch.tensor([row.position_ids], device=model.device)
                    model(input_ids=ids, position_ids=positions, use_cache=False)
                    self.n_tokens += len(row.input_ids)
            model.train(was_training)
        last = None
        for module in moments.modules:
            constraint = self.constraints.setdefault(names[id(module.weight)], Constraint())
            total = broadcast(moments.sums.pop(module))  # equal in all processes, to the bit
            if isinstance(module, nn.Embedding):
                constraint.moving = _rare(total, self.free)[:, None].to(module.weight.dtype)
                continue
            constraint.transposed = isinstance(module, Conv1D)
            # Query, key and value read one tensor; its eigenvectors are the costly part.
            if last is None or not torch.equal(total, last):
                last, directions = total, _free_directions(total / self.n_tokens, self.free)
            constraint.basis, constraint.is_free = directions


Layer: TypeAlias = "nn.Linear | nn.Embedding"  # or a Conv1D, which has no types


class _Moments:
    """Sums over tokens, a module: ``x x^T`` of a linear layer's inputs x, counts of an embedding's
    tokens. Products are in `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.modules: list[Layer] = []
        self.sums: dict[Layer, torch.Tensor] = {}
        self._last_inputs: torch.Tensor | None = None
        self._last_product = torch.empty(0)

    def add(self, module: Layer, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        """Add the inputs of one call."""
        if isinstance(module, nn.Embedding):
            added = torch.bincount(args[0].flatten(), minlength=module.num_embeddings)
        else:
            added = self._product(args[0])
        if module not in self.sums:
            self.modules.append(module)
            self.sums[module] = added.clone()  # several layers may share it
        else:
            self.sums[module] += added

    def _product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return ``x x^T`` summed over the tokens of `inputs` [..., width]; query, key and value
        read one tensor, and so share its product."""
        if inputs is not self._last_inputs:
            rows = inputs.detach().flatten(0, -2).to(self._dtype)
            self._last_inputs, self._last_product = inputs, rows.T @ rows
        return self._last_product


@contextlib.contextmanager
def _hooked(model: nn.Module, names: dict[int, str], dtype: torch.dtype) -> Iterator[_Moments]:
    """Yield the moments of the layers of `model` whose weights are in `names`, filled as the model
    reads."""
    moments = _Moments(dtype)
    hooks = []
    for name, module in model.named_modules():
        is_layer = isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        if is_layer and id(module.weight) in names and ".lora_B." not in name:
            hooks.append(module.register_forward_hook(moments.add))
    try:
        yield moments
    finally:
        for hook in hooks:
            hook.remove()


def _free_directions(moment: torch.Tensor, free: float) -> tuple[torch.Tensor, bool]:
    """Return (basis, whether it spans the free directions) of a second moment [inputs, inputs],
    with the fewer columns.

    Free are the eigenvectors of the smallest eigenvalues that sum to at most `free` of the trace.
    """
    values, vectors = torch.linalg.eigh(moment)
    # Rounding makes eigenvalues of 0 a little negative.
    values = values.clamp(min=0)
    # Of the trace: what a direction that no input has may come to by rounding.
    zero = len(values) * torch.finfo(values.dtype).eps
    n_free = int((values.cumsum(0) <= (free + zero) * values.sum()).sum())
    is_free = 2 * n_free <= len(values)
    basis = vectors[:, :n_free] if is_free else vectors[:, n_free:]
    return basis.float().contiguous(), is_free


def _rare(counts: torch.Tensor, free: float) -> torch.Tensor:
    """Return for each token whether it is one of the rarest that make up at most `free` of all
    `counts`."""
    ordered = counts.sort()
    is_rare = torch.zeros(len(counts), dtype=torch.bool, device=counts.device)
    is_rare[ordered.indices] = ordered.values.cumsum(0) <= free * counts.sum()
    return is_rare


def _n_free(constraint: Constraint) -> int:
    assert constraint.basis is not None
    n_inputs, n_columns = constraint.basis.shape
    return n_columns if constraint.is_free else n_inputs - n_columns
