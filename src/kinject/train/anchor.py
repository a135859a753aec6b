"""What holds a model to its base: L2 (L2-SP, arXiv 1802.01483), EWC (arXiv 1612.00796), and KL to the base's predictions.

L2 and EWC are added to the gradient itself, once an update and before it is clipped: the same update as a term in the
loss, without its graph. KL is part of the loss, on the replayed tokens of each batch.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from kinject.corpus import IGNORED, TrainingRow
from kinject.errors import TrainingError
from kinject.recipe import RegularizationSection, TrainRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_anchor(recipe: TrainRecipe, config: Any) -> list[tuple[str, str]]:
    """Return (key, fault) for anchors that this recipe cannot have."""
    anchor, corpus = recipe.regularization, recipe.corpus
    if anchor is None:
        return []
    faults = []
    if (anchor.kl or anchor.ewc) and (corpus is None or corpus.replay is None):
        name = "kl" if anchor.kl else "ewc"
        faults.append((f"anchor.{name}", "is measured on replay. Set corpus.replay."))
    if anchor.kl and recipe.trainer.get("packing_strategy") == "wrapped" and recipe.trainer.get("packing"):
        faults.append(("regularization.kl", "needs documents kept apart. Set trainer.packing_strategy: bfd_split."))
    if (anchor.l2 or anchor.ewc) and recipe.adapter is not None:
        faults.append(("regularization", "an adapter leaves the base weights where they are. Remove l2 and ewc."))
    if (anchor.l2 or anchor.ewc) and recipe.trainer.get("fp16"):
        faults.append(("regularization", "l2 and ewc need unscaled gradients. Set trainer.bf16: true instead of fp16."))
    if (anchor.l2 or anchor.ewc or anchor.kl) and (config.fsdp or config.deepspeed):
        faults.append(("regularization", "l2, ewc and kl need whole weights on each process. Use DDP."))
    return faults


class Anchor:
    """The base model's weights, their Fisher information and its predictions, as far as the strengths ask for them.

    Made from the model before its first update (a resumed run loads the base first, so it anchors to the same), and
    before a trainer wraps it. With an `adapter`, the base's predictions are the model's own without it.
    """

    def __init__(self, strengths: RegularizationSection, model: PreTrainedModel, *, adapter: bool) -> None:
        self.strengths = strengths
        self.base: dict[str, torch.Tensor] = {}
        self.fisher: dict[str, torch.Tensor] = {}
        self._frozen: Any = None
        if strengths.l2 or strengths.ewc:
            self.base = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        if strengths.kl and not adapter:
            self._frozen = copy.deepcopy(model).eval().requires_grad_(False)

    def measure(self, model: Any, rows: Sequence[TrainingRow]) -> None:
        """Set the diagonal of the empirical Fisher information, a token's mean, from `rows` of replay.

        ``F = sum over rows of (gradient of the row's summed log-likelihood)^2 / number of learned tokens``.
        Raises `TrainingError` without rows.
        """
        if not self.strengths.ewc:
            return
        if not rows:
            raise TrainingError("anchor.ewc: no rows of replay to measure on.")
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
    def pull(self, model: Any) -> None:
        """Add the gradient of the L2 and EWC terms: ``(l2 + ewc * F) * (w - w0)``."""
        for wrapped, parameter in model.named_parameters():
            name = wrapped.removeprefix("module.").replace("_orig_mod.", "")
            if name not in self.base or parameter.grad is None:
                continue
            away = parameter.detach() - self.base[name]
            if self.strengths.l2:
                parameter.grad.add_(away, alpha=self.strengths.l2)
            if self.strengths.ewc:
                parameter.grad.addcmul_(away, self.fisher[name], value=self.strengths.ewc)

    def divergence(self, model: Any, inputs: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
        """Return the summed KL(base || model) over the tokens that `inputs["replayed"]` [batch, length] marks.

        `logits` [batch, length - 1, vocabulary] are the model's own in float32.
        """
        marked = inputs["replayed"][:, 1:]
        if not bool(marked.any()):
            return logits.sum() * 0.0
        whole = getattr(model, "module", model)
        off = whole.disable_adapter() if self._frozen is None else contextlib.nullcontext()
        base = whole if self._frozen is None else self._frozen.to(logits.device)
        was_training = base.training
        base.eval()
        with torch.no_grad(), off:
            theirs = base(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"], use_cache=False).logits
        base.train(was_training)
        target = theirs[:, :-1][marked].float().log_softmax(-1)
        return F.kl_div(logits[marked].log_softmax(-1), target, reduction="sum", log_target=True)
