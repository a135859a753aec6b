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
    divergence: Literal["forward", "reverse", "jensen-shannon"] = option(
        "forward", help="forward: KL(teacher || student); reverse: KL(student || teacher)."
    )
    top_k: int = option(
        64, help="Most likely tokens of each prediction of the teacher that are kept; the others count as one.", min=1
    )
    temperature: float = option(
        1.0, help="Softens the predictions of both before they are compared.", above=0.0, max=100.0
    )
    cross_entropy: float = option(
        0.0, help="Fraction of the loss that is plain cross-entropy with the text.", min=0.0, below=1.0
    )
