"""Against forgetting: L2 to the base weights (L2-SP, arXiv 1802.01483), EWC (arXiv 1612.00796), KL to the base's predictions.

L2 and EWC are added to the gradient, once an update and before clipping: the same update as a term in the loss,
without its graph. KL is part of the loss, on the replayed tokens of each batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kinject.corpus.packing import TrainingRow
from kinject.corpus.tokenize import IGNORED
from kinject.errors import TrainingError
from kinject.recipe import RegularizationSection
from kinject.train.loss import Project, add_hidden_states, divergence, in_tiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Regularizer:
    """Keeps the base model's weights, their Fisher information and its predictions, each if its strength is not 0.

    Create it from the model before its first update (a resumed run loads the base first, so it uses the same), and before
    a trainer wraps it. With an `adapter`, the base's predictions are the model's own without it; otherwise those of a copy,
    which `load_base` makes of a sharded model.
    """

    def __init__(
        self, strengths: RegularizationSection, model: PreTrainedModel, *, adapter: bool,
        load_base: Callable[[], PreTrainedModel] | None = None,
    ) -> None:  # fmt: skip
        self.strengths = strengths
        self.base: dict[str, torch.Tensor] = {}
        self.fisher: dict[str, torch.Tensor] = {}
        self._frozen: Any = None
        if strengths.l2 or strengths.ewc:
            self.base = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        if strengths.kl and not adapter:
            base = copy.deepcopy(model) if load_base is None else load_base()
            self._frozen = base.eval().requires_grad_(False)

    def measure_fisher(self, model: Any, rows: Sequence[TrainingRow]) -> None:
        """Set the diagonal of the empirical Fisher information, the mean of a token, from `rows` of replay.

        ``F = sum over rows of (gradient of the row's summed log-likelihood)^2 / number of learned tokens``.
        Raises `TrainingError` without rows.
        """
        if not self.strengths.ewc:
            return
        if not rows:
            raise TrainingError("regularization.ewc: no rows of replay to measure on.")
        self.fisher = {name: torch.zeros_like(weight) for name, weight in self.base.items()}
        was_training = model.training
        model.eval()
        n_tokens = 0
        for row in rows:
            model.zero_grad()
            ids = torch.tensor([row.input_ids], device=model.device)
            labels = torch.tensor([row.labels], device=model.device)
            positions = torch.tensor([row.position_ids], device=model.device)
            logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum")
            loss.backward()  # type: ignore[no-untyped-call]
            n_tokens += sum(label != IGNORED for label in row.labels)
            for name, parameter in model.named_parameters():
                if name in self.fisher and parameter.grad is not None:
                    self.fisher[name] += parameter.grad.detach() ** 2
        for total in self.fisher.values():
            total /= max(n_tokens, 1)
        model.zero_grad()
        model.train(was_training)

    @torch.no_grad()
    def add_gradient(self, model: Any) -> None:
        """Add the gradient of the L2 and EWC terms: ``(l2 + ewc * F) * (w - w0)``."""
        for wrapped, parameter in model.named_parameters():
            name = wrapped.removeprefix("module.").replace("_orig_mod.", "")
            if name not in self.base or parameter.grad is None:
                continue
            difference = parameter.detach() - self.base[name]
            if self.strengths.l2:
                parameter.grad.add_(difference, alpha=self.strengths.l2)
            if self.strengths.ewc:
                parameter.grad.addcmul_(difference, self.fisher[name], value=self.strengths.ewc)

    def divergence(self, model: Any, inputs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Return the summed KL(base || model) over the tokens that `inputs["replayed"]` [batch, length] marks.

        `logits` [batch, length - 1, vocabulary] are the model's own in float32.
        """
        marked = inputs["replayed"][:, 1:]
        if not bool(marked.any()):
            return logits.sum() * 0.0
        with self.base_of(model, logits.device) as base, torch.no_grad():
            logits_of_base = base(
                input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False
            ).logits
        return divergence(logits[marked], logits_of_base[:, :-1][marked].float().log_softmax(-1)).sum()

    def divergence_in_tiles(
        self, model: Any, inputs: dict[str, Any], hidden: torch.Tensor, project: Project, tile: int
    ) -> torch.Tensor:
        """Return the same from `hidden` [batch, length, width], with the logits of `tile` tokens in memory at once."""
        marked = inputs["replayed"][:, 1:]
        if not bool(marked.any()):
            return hidden.sum() * 0.0
        with self.base_of(model, hidden.device) as base, torch.no_grad():
            of_base, project_base = base(
                input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False,
                score=lambda states, project: (states, project),
            )  # fmt: skip

        def score(states: torch.Tensor, states_of_base: torch.Tensor) -> torch.Tensor:
            with self.base_of(model, hidden.device), torch.no_grad():
                target = project_base(states_of_base)
            return divergence(project(states), target.log_softmax(-1)).sum()

        return torch.stack(in_tiles(score, tile, hidden[:, :-1][marked], of_base[:, :-1][marked])).sum()

    @contextlib.contextmanager
    def base_of(self, model: Any, device: torch.device) -> Iterator[Any]:
        """Yield the base of `model` in evaluation mode: the frozen copy, or the model itself without its adapter."""
        inner = getattr(model, "module", model)
        base = inner if self._frozen is None else self._frozen
        if base.device != device:
            base.to(device)
        was_training = base.training
        base.eval()
        with inner.disable_adapter() if self._frozen is None else contextlib.nullcontext():
            yield base
        base.train(was_training)

    def read_hidden_states(self) -> None:
        """Let the frozen copy, if there is one, return its hidden states."""
        if self._frozen is not None:
            add_hidden_states(self._frozen)
