"""The sections of a training beside model, corpus and trainer: what is learned and kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kinject.recipe.sections.option import option

Reaction = Literal["stop", "warn", "ignore"]


@dataclass(frozen=True)
class ProjectionSection:
    """Texts on which the model's outputs should stay: updates keep to directions that the layers'
    inputs hardly use there."""

    path: str = option(
        help="Corpus (JSONL) of the texts to keep; nothing is learned from it.", path="file"
    )
    # On stories3M 0.2 learned .92 / .83 / .72 (memorised, reworded, inferred) at a perplexity of
    # stories of 25, plain training by AdamW .92 / .85 / .72 at 2,619; the base has 4.
    free: float = option(
        0.2,
        help="Fraction of the inputs' energy on these texts whose directions may change; less "
        "keeps more.",
        min=0.0,
        max=1.0,
    )


@dataclass(frozen=True)
class RegularizationSection:
    """Terms that keep the model near its base; 0 leaves a term out.

    Strengths are in units of the loss per token: the update follows loss + l2/2 |w - w0|^2 + kl *
    KL(base || model), the last on replayed tokens.
    """

    # In the sandbox with 25% replay, 1e-3 lost 4.8 points of known facts instead of 6.3, and
    # learned .950 of the new ones instead of .967.
    l2: float = option(0.0, help="Strength of the L2 pull to the base weights.", min=0.0, max=1e6)
    # There 1 lost 5.0 points, and learned .960.
    kl: float = option(
        0.0,
        help="Weight of the KL divergence from the base's predictions on replay.",
        min=0.0,
        max=1e6,
    )
    projection: ProjectionSection | None = option(
        None, help="Project updates away from what other texts use."
    )

    @property
    def needs_base(self) -> bool:
        """Whether a term compares with the base: L2 or KL."""
        return bool(self.l2 or self.kl)


@dataclass(frozen=True)
class GuardsSection:
    """The reaction to each fault of training: stop, warn, or ignore."""

    skipped_updates: int = option(
        3,
        help="Updates with a non-finite gradient that are skipped; one more stops the run.",
        min=0,
    )
    nothing_learned: Reaction = option(
        "stop", help="A batch has no token to learn, or its loss is exactly 0."
    )
    instability: Reaction = option(
        "warn",
        help="The loss stays far above its lowest, a gradient norm exceeds 10 times its median or "
        "stays almost 0, or the learning rate is too small to move the weights. ignore also "
        "silences the note on steps that end before the corpus was read once.",
    )


@dataclass(frozen=True)
class ProbeSection:
    """One question set that is scored while the model trains."""

    path: str = option(help="Questions (JSONL, or MMLU's CSV).", path="file")
    role: Literal["learning", "retention"] = option("learning", help="learning or retention.")


@dataclass(frozen=True)
class ProbesSection:
    """Questions scored during training, whenever trainer.eval_strategy evaluates, and once before
    the first step.

    Each set is logged as eval_NAME_accuracy and their mean as eval_accuracy;
    trainer.metric_for_best_model takes NAME_accuracy, accuracy, or (with corpus.validation_corpus
    or validation_fraction) loss.
    """

    questions: Mapping[str, str | ProbeSection] = option(
        help="name: path, or path with role.", nonempty=True, path="file"
    )
    limit: int | None = option(None, help="First N questions of each set only.", min=1)
    max_forgetting: float | None = option(
        None,
        help="Stop if the accuracy on a retention set falls by more than this below the one before "
        "training.",
        min=0.0,
        max=1.0,
    )

    def sets(self) -> dict[str, ProbeSection]:
        """Return the question sets by name."""
        return {
            name: ProbeSection(item) if isinstance(item, str) else item
            for name, item in self.questions.items()
        }


@dataclass(frozen=True)
class DistillationSection:
    """Context distillation (`method: distill`): the teacher's context, and the loss to its
    predictions.

    The teacher is the model itself with a context before the text; the student reads the text
    alone. Or it is another model: a larger one, or the one that was there before a training, to
    give back what that has cost.
    """

    teacher: str | None = option(
        None,
        help="The teacher: a model folder or hub name, of the model's vocabulary; default: the "
        "model itself.",
        path="model",
    )
    # A teacher teaches what it does with its context: in the sandbox, of the new facts, document
    # had 65.7% from paraphrases and 98.8% from questions; beginning 22.0%, since the beginning of
    # an entry does not hold the facts of its end.
    context: Literal["document", "beginning", "none"] = option(
        "document",
        help="The context of the teacher: the row's document, or the beginning of the row's own "
        "text, which the "
        "student then lacks (DiSC); none: it reads the row itself (with `teacher`).",
    )
    documents: str | None = option(
        None,
        help="Documents, as for augment; default: the rows of the corpus with origin original. "
        "Rows name theirs by document_id.",
        path="documents",
    )
    context_tokens: int | None = option(
        None,
        help="Most tokens of a document that the teacher reads: of a longer one the passages "
        "nearest to the row, by BM25. Default: the room that the model's window leaves.",
        min=8,
    )
    top_k: int = option(
        64,
        help="Most likely tokens of each prediction of the teacher that are kept; the others count "
        "as one.",
        min=1,
    )
    # In the sandbox half of it raised what paraphrases teach from 65.7 to 91.3% of the new facts.
    cross_entropy: float = option(
        0.0,
        help="Fraction of the loss that is plain cross-entropy with the text.",
        min=0.0,
        below=1.0,
    )


@dataclass(frozen=True)
class HardExampleMiningSection:
    """Learn only from the fraction with the highest loss, chosen in each batch of each device."""

    fraction: float = option(
        help="Fraction that is kept, rounded up to whole tokens or rows.", min=0.001, max=1.0
    )
    # Rows count alike, however long: the tokens of the chosen ones are not known before all
    # accumulated batches are read.
    unit: Literal["tokens", "rows"] = option(
        "tokens",
        help="tokens, or rows: texts (parts of them, if packing splits them) by their mean loss.",
    )


@dataclass(frozen=True)
class RowWeightsSection:
    """How much each row of the corpus counts, by one of its columns. Rows of replay and mix count
    1."""

    column: str = option(
        help="Key of the corpus row, as in weight, or meta.date for one inside another.",
        nonempty=True,
    )
    half_life: float | None = option(
        None,
        help="The column holds dates; a row counts half as much for every so many days before the "
        "newest.",
        min=0.001,
    )


@dataclass(frozen=True)
class TechniquesSection:
    """Changes to an update beside SFTConfig's own fields; docs/techniques.md compares them."""

    # No moving average of weights among them: a falling rate does the same, and schedule-free AdamW
    # averages with checkpoints and resume.
    freeze_base_steps: int | None = option(
        None, help="Updates for which only freeze_base_except trains; then everything does.", min=1
    )
    freeze_base_except: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of parameter names that train while the base is frozen; default: "
        "re-initialised layers.",
    )
    reinitialize_last_layers: int = option(
        0, help="Last layers whose weights are re-initialised before training.", min=0
    )
    # Not torchao's: it takes 3 s to import, wherever it is installed peft does so, and it rounds
    # from torch's global random numbers.
    stochastic_rounding: bool = option(
        False,
        help="Round bfloat16 weights up or down at random, so that small updates count (with "
        "model.dtype: bfloat16).",
    )
    sam: float = option(
        0.0,
        help="Sharpness-aware minimisation: its rho; an update takes twice the time.",
        min=0.0,
        max=100.0,
    )
    # In the sandbox 1 had 96.8% of new and 99.7% of known facts, AdamW 95.7 and 99.3; 4 and 8
    # forget.
    muon: float | None = option(
        None,
        help="Update the matrices inside the layers by Muon, at this factor of "
        "trainer.learning_rate (1: AdamW's).",
        min=0.01,
        max=100.0,
    )
    hard_example_mining: HardExampleMiningSection | None = option(
        None, help="Learn only from the tokens or rows with the highest loss."
    )
    # In the sandbox with 25% replay, 0.7 lost 4.2 points of known facts, 1 lost 6.3.
    layerwise_lr_decay: float = option(
        1.0,
        help="Learning rate of a layer over that of the layer above it; the embeddings are the "
        "lowest layer.",
        min=0.0,
        max=1.0,
    )
    row_weights: RowWeightsSection | None = option(
        None, help="Weigh corpus rows by a column or by their age."
    )
    patience: int | None = option(
        None,
        help="Stop after so many evaluations without a better trainer.metric_for_best_model "
        "(default: loss).",
        min=1,
    )
    custom: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={
            "help": "name: settings of an objective or update rule of your own (CONTRIBUTING.md)."
        },
    )
    histogram_steps: int | None = option(
        None,
        help="Updates between two histograms of weights and gradients (tensorboard, wandb).",
        min=1,
    )
