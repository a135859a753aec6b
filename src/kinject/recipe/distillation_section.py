"""The recipe's distillation section: what the teacher of context distillation reads, and the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kinject.recipe.sections import option


@dataclass(frozen=True)
class DistillationSection:
    """Context distillation (`method: distill`): what the teacher reads, and the loss to its predictions.

    The teacher is the model itself with a context before the text; the student reads the text alone.
    """

    context: Literal["document", "beginning", "both"] = option(
        "document",
        help="What only the teacher reads: the row's document; the beginning of the row's own text, which the student "
        "then lacks (DiSC); or both.",
    )
    documents: str | None = option(
        None,
        help="Documents, as for augment; default: the rows of the corpus with origin original. Rows name theirs by document_id.",
        path="documents",
    )
    context_tokens: int | None = option(
        None,
        help="Most tokens of a document that the teacher reads: of a longer one the passages nearest to the row, by BM25. "
        "Default: what the model's window leaves.",
        min=8,
    )
    answers: Literal["given", "student"] = option(
        "given",
        help="student: in each step the student writes the answers of rows with a prompt, and learns the teacher's predictions "
        "of those (on-policy, SDFT); the teacher then predicts in each step.",
    )
    max_tokens: int = option(64, help="answers: student: longest answer, in tokens.", min=1)
    divergence: Literal["forward", "reverse", "jensen-shannon"] = option(
        "forward", help="forward: KL(teacher || student); reverse: KL(student || teacher)."
    )
    teacher: Literal["base", "ema"] = option(
        "base",
        help="base: the model before training, whose predictions are made once and cached; ema: the moving average of the "
        "student's weights, which predicts in each step.",
    )
    ema_decay: float = option(0.99, help="ema: what an update leaves of the average.", min=0.0, below=1.0)
    top_k: int | None = option(
        64,
        help="Most likely tokens of each prediction of the teacher that are kept; the others count as one. null: the whole "
        "vocabulary, not cached but predicted in each step.",
        min=1,
    )
    temperature: float = option(
        1.0, help="Softens the predictions of both before they are compared.", above=0.0, max=100.0
    )
    cross_entropy: float = option(
        0.0, help="Fraction of the loss that is plain cross-entropy with the text.", min=0.0, below=1.0
    )

    @property
    def is_cached(self) -> bool:
        """Whether the teacher's predictions are made once, before training."""
        return self.teacher == "base" and self.top_k is not None and self.answers == "given"
