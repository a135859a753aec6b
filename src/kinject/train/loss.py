"""The loss of a run and the shape of what changes it, and the mean over updates.

A loss is a sum over one batch of one device, divided by a number that is known before the batch is
read, so that accumulation and several devices change nothing: `total` is that sum, `count` the
batch's part of that number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
import torch.nn.functional as F

from kinject.corpus.tokenize import IGNORED

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from kinject.errors import Problem
    from kinject.recipe import TrainRecipe
    from kinject.recipe.launch import Launch


@dataclass(frozen=True)
class Predictions:
    """Log-probs of next tokens [tokens, k + 1]: of `ids` [tokens, k], and in the last column of all
    others together.

    With as many ids as the vocabulary has there is no last column. `has_target` [tokens] marks the
    tokens that have any.
    """

    has_target: torch.Tensor
    log_probs: torch.Tensor
    ids: torch.Tensor


def log_probs_of(logits: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Return the log-probs of `logits` [tokens, vocabulary] in the columns of `Predictions` with
    these `ids`."""
    log_probs = logits.log_softmax(-1)
    if ids is None:
        return log_probs
    selected = log_probs.gather(-1, ids)
    if ids.shape[-1] == logits.shape[-1]:
        return selected
    # One minus the sum of the others would be all rounding where these have nearly all of the mass.
    others = log_probs.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
    return torch.cat([selected, others], -1)


def divergence(
    logits: torch.Tensor, target: torch.Tensor, ids: torch.Tensor | None = None
) -> torch.Tensor:
    """Return KL(target || model) [tokens], in nats, of the model's `logits` [tokens, vocabulary]
    and the log-probs `target`.

    `ids` name the columns of `target` as in `Predictions`: with fewer than the vocabulary it is the
    divergence of the events "this token" and "another one", at most that of the whole vocabulary.
    """
    return F.kl_div(log_probs_of(logits, ids), target, reduction="none", log_target=True).sum(-1)


@contextlib.contextmanager
def as_frozen(model: PreTrainedModel | PeftModel) -> Iterator[PreTrainedModel | PeftModel]:
    """Yield `model` in evaluation mode, the adapter of a peft model switched off."""
    was_training = model.training
    trained = [(weight, weight.requires_grad) for weight in model.parameters()]
    model.eval()
    disable_adapter = getattr(model, "disable_adapter", contextlib.nullcontext)
    with disable_adapter():
        yield model
    # peft lets all of the adapter train again, also what a projection has frozen: its gradients
    # (a norm of 5.7) would have a part in clipping.
    for weight, trains in trained:
        weight.requires_grad_(trains)
    model.train(was_training)


def next_tokens(batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the label of the token after each one [batch, length].

    Under context parallelism these are `shift_labels`, which Trainer makes before it splits the
    rows: a part of a row does not hold the token after its last one.
    """
    shifted: torch.Tensor | None = batch.get("shift_labels")
    if shifted is not None:
        return shifted
    return F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


class Technique:
    """An objective or an update rule, as a line of its table has it."""

    @classmethod
    def problems(cls, recipe: TrainRecipe, launch: Launch) -> Iterator[Problem]:
        """Yield a problem for each key that it excludes or needs."""
        yield from ()

    # the whole recipe: any of its keys may switch a row of the table on (method, regularization,
    # techniques)
    @classmethod
    def is_on(cls, name: str, recipe: TrainRecipe) -> bool:
        """Return whether the recipe asks for what the table calls `name`: by a key of techniques,
        or of custom."""
        return name in recipe.techniques.custom or bool(getattr(recipe.techniques, name, None))

    @classmethod
    def configured(cls, name: str, recipe: TrainRecipe) -> Self:
        """Return it with the recipe's settings."""
        techniques = recipe.techniques
        make: Callable[..., Self] = cls
        if name in techniques.custom:
            return make(**techniques.custom[name])
        return make(getattr(techniques, name))


class Objective(Technique):
    """Changes the loss of a run; each kind is one file, and one line of
    `kinject.train.objectives.OBJECTIVES`.

    An objective of your own is a frozen dataclass whose fields, made by
    `kinject.recipe.sections.option`, are its settings: a recipe sets them under
    techniques.custom.NAME. Of the hooks below it overrides those that it needs. Batches hold
    labels, position_ids and replayed (bool). Validation losses stay plain. Where any objective is
    on, the logits are computed whole, which the estimate of memory counts.
    """

    is_mean: ClassVar[bool] = True
    """Whether the loss is the mean over the learned tokens; if not, `count` and `total` say of
    what."""

    def by_token(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        teacher: Predictions | None,
    ) -> torch.Tensor:
        """Return the changed `losses` [tokens] of `labels`, 0 where these are ignored; `logits`
        [tokens, vocabulary]."""
        return losses

    def count(self, batch: Mapping[str, Any], learned: torch.Tensor) -> torch.Tensor:
        """Return the part of `batch` in the divisor; `learned` [batch, length - 1] marks the tokens
        with a loss."""
        return learned.sum()

    def total(self, losses: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the sum for `batch` of `losses` [batch, length - 1], each of the token after
        it."""
        return losses.sum()


@dataclass(frozen=True)
class TrainingLoss:
    """Cross-entropy of the next token, in nats, as `objectives` change it; batches hold labels and
    position_ids [batch, length].

    `smoothing`: this fraction of the target is spread evenly over the vocabulary (arXiv
    1512.00567).
    """

    smoothing: float = 0.0
    objectives: tuple[Objective, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether it is the plain mean over tokens, of cross-entropy or of a divergence."""
        return not self.smoothing and self._weighing is None

    @property
    def is_changed(self) -> bool:
        """Whether it is something else than the mean cross-entropy."""
        return bool(self.smoothing or self.objectives)

    @property
    def _weighing(self) -> Objective | None:
        return next((objective for objective in self.objectives if not objective.is_mean), None)

    def count(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the part of `batch` in the number by which the sum is divided."""
        learned = batch["labels"][:, 1:] != IGNORED
        if self._weighing is not None:
            return self._weighing.count(batch, learned)
        n_learned: torch.Tensor = learned.sum()
        return n_learned

    def total(
        self, logits: torch.Tensor, batch: Mapping[str, Any], teacher: Predictions | None = None
    ) -> torch.Tensor:
        """Return the sum for `batch`; `logits` [batch, length, vocabulary] in float32, each for the
        token after it.

        `teacher` has a row for each of them too, batch by batch. Labels are shifted, not logits: a
        copy of those costs as much as the softmax.
        """
        labels = next_tokens(batch)
        reduction = "none" if self.objectives else "sum"
        losses = self.by_token(logits.flatten(0, 1), labels.flatten(), reduction, teacher)
        if not self.objectives:
            return losses
        # Behind the last token of a row is none: next_tokens has filled that column up.
        losses = losses.view(labels.shape)[:, :-1]
        if self._weighing is not None:
            return self._weighing.total(losses, batch)
        return losses.sum()

    def by_token(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        reduction: str = "none",
        teacher: Predictions | None = None,
    ) -> torch.Tensor:
        """Return the loss of each of `labels` [tokens], 0 where it is ignored; `logits` [tokens,
        vocabulary] in float32."""
        losses = F.cross_entropy(
            logits,
            labels,
            ignore_index=IGNORED,
            label_smoothing=self.smoothing,
            reduction=reduction,
        )
        for objective in self.objectives:
            losses = objective.by_token(losses, logits, labels, teacher)
        return losses


@dataclass
class TokenMean:
    """The mean over tokens of an evaluation's losses, whatever the rows of its batches.

    `losses` are the means of batches, `counts` their learned tokens; both stay on the device, where
    reading them would wait for each batch.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    counts: list[torch.Tensor] = field(default_factory=list)

    def add(self, loss: torch.Tensor, n_learned: torch.Tensor) -> None:
        """Add a batch."""
        self.losses.append(loss.detach().float())
        self.counts.append(n_learned.to(loss.device))

    def over_processes(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> float:
        """Return the mean over the tokens of all processes, each of which has as many batches; NaN
        without a token."""
        losses = gather(torch.stack(self.losses)).cpu().double()
        counts = gather(torch.stack(self.counts)).cpu().double()
        read = counts > 0
        return float((losses[read] * counts[read]).sum() / counts.sum())


@dataclass
class MeanLoss:
    """The mean loss of the updates that were made; one that was skipped does not count, so its NaN
    spoils no other.

    Trainer sums the losses since the last log (`since_log`, a scalar tensor) and divides by the
    steps. Here are the updates among these (`made`, `skipped`), the `total` and number `n` of those
    before, and the mean that was logged `last`.
    """

    total: float = 0.0
    n: int = 0
    made: int = 0
    skipped: int = 0
    last: float = math.nan

    def begin_update(self, since_log: torch.Tensor) -> None:
        """Keep the sum before an update."""
        # A copy, since Trainer adds to the same tensor.
        self._before = since_log.clone()

    def end_update(self, since_log: torch.Tensor, *, made: bool) -> float:
        """Count an update and return its loss; that of one that was skipped is taken out of the
        sum."""
        loss = float(since_log - self._before)
        if not made:
            since_log.copy_(self._before)
        if made:
            self.made += 1
        else:
            self.skipped += 1
        return loss

    def log(self, mean_of_steps: float, since_log: torch.Tensor) -> float:
        """Return the mean loss since the last log, NaN without an update; begin the next sum."""
        made, loss = self.made, mean_of_steps
        if made and self.skipped:
            # Trainer divided by all steps, but losses of skipped ones were taken out of the sum.
            loss = mean_of_steps * (made + self.skipped) / made
        if made:
            self.last = loss
            if math.isfinite(loss):
                self.total, self.n = self.total + loss * made, self.n + made
        since_log.zero_()  # Trainer subtracts it from itself, which leaves NaN for ever
        self.made = self.skipped = 0
        return loss if made else math.nan

    def mean(self, since_log: torch.Tensor) -> float:
        """Return the mean loss of all updates, those before a resume included; NaN without one."""
        total, n = self.total, self.n + self.made
        if self.made:
            total += float(since_log)
        return total / n if n else math.nan

    def is_finite(self, since_log: torch.Tensor) -> bool:
        """Return whether the mean and the newest losses are finite."""
        newest = float(since_log) if self.made else self.last
        return math.isfinite(self.mean(since_log)) and math.isfinite(newest)
