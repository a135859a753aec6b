"""Against forgetting: L2 to the base weights, and KL to the base's predictions.

L2 (L2-SP, arXiv 1802.01483) is added to the gradient, once an update and before clipping: the same
update as a term in the loss, without its graph. KL is part of the loss, on the replayed tokens of
each batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from kinject.recipe import RegularizationSection
from kinject.train.loss import as_frozen, divergence
from kinject.train.names import unwrapped_name
from kinject.train.updates.base import UpdateInputs, UpdateRule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kinject.recipe import TrainRecipe


class Regularizer(UpdateRule):
    """Keeps the base model's weights and its predictions, each if its strength is not 0.

    Create it from the model before its first update (a resumed run loads the base first, so it uses
    the same), and before a trainer wraps it. With an `adapter`, the base's predictions are the
    model's own without it; otherwise those of a copy, which `load_base` makes of a sharded model.
    """

    copies = 1

    def __init__(
        self,
        strengths: RegularizationSection,
        model: PreTrainedModel,
        *,
        adapter: bool,
        load_base: Callable[[], PreTrainedModel] | None = None,
    ) -> None:
        self.strengths = strengths
        self._note = ""
        self.base: dict[str, torch.Tensor] = {}
        self._frozen: PreTrainedModel | None = None
        if strengths.l2:
            self.base = {
                name: parameter.detach().clone()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
        if strengths.kl and not adapter:
            # A copy made once SFTTrainer has the model is no frozen base: its KL was off by 5%.
            base = copy.deepcopy(model) if load_base is None else load_base()
            self._frozen = base.eval().requires_grad_(False)

    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether a term compares with the base."""
        return recipe.regularization is not None and recipe.regularization.needs_base

    @classmethod
    def make(cls, name: str, inputs: UpdateInputs) -> Regularizer:
        """Return the rule, which copies what it needs of the base."""
        section = inputs.recipe.regularization
        assert section is not None
        rule = cls(
            section,
            inputs.model,
            adapter=inputs.recipe.adapter is not None,
            load_base=inputs.load_base,
        )
        replay = inputs.recipe.corpus.replay
        # A note and no fault: a sweep of the fraction may begin at 0.
        if section.kl and replay is not None and not replay.fraction:
            rule._note = (
                "regularization.kl: no effect, since corpus.replay.fraction is 0: it is measured "
                "on replayed texts. Raise the fraction, or leave kl out"
            )
        return rule

    def note(self) -> str:
        """Return what has no effect, "" if all has."""
        return self._note

    @torch.no_grad()
    def change_gradient(self, model: nn.Module, step: int) -> None:
        """Add the gradient of the L2 term: ``l2 * (w - w0)``."""
        for wrapped, parameter in model.named_parameters():
            name = unwrapped_name(wrapped)
            if name in self.base and parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - self.base[name], alpha=self.strengths.l2)

    def divergence(
        self, model: nn.Module, inputs: Mapping[str, torch.Tensor], logits: torch.Tensor
    ) -> torch.Tensor:
        """Return the summed KL(base || model) over the tokens that `inputs["replayed"]` [batch,
        length] marks.

        `logits` [batch, length - 1, vocabulary] are the model's own in float32.
        """
        marked = inputs["replayed"][:, 1:]
        if not bool(marked.any()):
            return logits.sum() * 0.0
        base = getattr(model, "module", model)
        if self._frozen is not None:
            base = self._frozen.to(logits.device)
        with as_frozen(base), torch.no_grad():
            logits_of_base = base(
                input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False
            ).logits
        target = logits_of_base[:, :-1][marked].float().log_softmax(-1)
        return divergence(logits[marked], target).sum()
