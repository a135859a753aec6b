"""The section `study`: arms over shared recipes, sweeps and claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.recipe.sections.option import option


@dataclass(frozen=True)
class StudyModelSection:
    """A base model: `path`, or the train `recipe` that makes it, with `overrides`."""

    path: str | None = option(None, help="Model folder or hub name.")
    recipe: str | None = option(
        None, help="Train recipe that makes it; it runs first.", path="file"
    )
    overrides: Mapping[str, Any] | None = option(
        None, help="Overrides of `recipe`, as in {model.new.hidden_size: 64}."
    )


@dataclass(frozen=True)
class ArmSection:
    """One way of injecting knowledge: its differences from the study's shared recipes."""

    description: str = option("", help="Description of the arm for the report.")
    corpus: str = option(
        "augmented",
        help="augmented (the corpus of study.augment), random (its words, shuffled), or a corpus (JSONL).",
    )
    overrides: Mapping[str, Any] | None = option(
        None, help="Overrides of the shared recipes, as in {trainer.max_steps: 50}."
    )
    match: Mapping[Literal["steps", "seconds"], str] | None = option(
        None,
        help="{steps: ARM} or {seconds: ARM}: train for as many optimizer steps, or seconds of "
        "training (its teacher's and own answers' included, on a CPU processor time) as that arm.",
    )
    alpha: float | None = option(
        None,
        help="Average the tuned weights with the base's: 0 is the base, 1 the tuned model.",
        min=0.0,
        max=1.0,
    )
    through: str | None = option(
        None,
        help="Train this model, the base of the arm's own one, instead; then its own one minus this base is added to the tuned "
        "weights (chat vector).",
    )
    after: str | None = option(
        None,
        help="Train the model of this arm, one above, further: SFT after CPT, or one set of documents after another.",
    )
    rag: bool = option(True, help="Score it with retrieved passages as well.")
    seeds: tuple[int, ...] | None = option(
        None, help="Seeds; default: the study's.", min=0, nonempty=True
    )


@dataclass(frozen=True)
class SweepSection:
    """One key of an arm, varied over values; each value is a separate arm."""

    key: str = option(help="Dotted recipe key, or corpus, or alpha.")
    values: tuple[Any, ...] = option(help="Values of the key.", nonempty=True)
    arm: str = option(help="Arm that is varied.")
    frontier: bool = option(
        False, help="Draw its points in the plot of learning against forgetting."
    )
    seeds: tuple[int, ...] | None = option(
        None, help="Seeds; default: the study's.", min=0, nonempty=True
    )


@dataclass(frozen=True)
class TuneSection:
    """A hyperparameter that the study tunes on validation questions, before it reads a test
    question.

    Each value is trained with the seed after the largest that is reported.
    """

    key: str = option(help="Dotted recipe key, as trainer.learning_rate.")
    values: tuple[Any, ...] = option(help="The grid.", nonempty=True)
    arm: str = option(help="Arm that is trained with each value.")
    question_sets: str | tuple[str, ...] = option(
        help="Question set whose validation questions compare the values; several count as one.",
        nonempty=True,
    )
    arms: tuple[str, ...] | None = option(
        None, help="Arms that take the chosen value; default: all that do not set the key."
    )

    def sets(self) -> tuple[str, ...]:
        """Return the names of the question sets."""
        return (self.question_sets,) if isinstance(self.question_sets, str) else self.question_sets


@dataclass(frozen=True)
class ClaimSection:
    """A statement to be tested, fixed before the study runs; all claims are one family for Holm's
    correction.

    difference: `arm` is higher (or lower) than `baseline` on `question_set`. equivalence: `arm` is
    within `margin` of `baseline` (two one-sided tests). trend: accuracy on `question_set` rises
    (falls) along `sweep` (Page's test). above_chance: `arm` is above guessing. near_chance: `arm`
    is within `margin` of guessing (two one-sided tests). Of written answers, `outcome` names the
    part that is compared; guessing is never right, so they have no chance. An arm's name with
    ``+rag`` is that arm with its chosen number of passages, with ``+NAME`` that with those of
    study.retrievals, ``{lr: 0.001}`` the point of the sweep lr with that value.
    """

    statement: str = option(help="The claim in words, for the report.")
    test: Literal["difference", "equivalence", "trend", "above_chance", "near_chance"] = option(
        help="Statistical test."
    )
    question_set: str = option(help="Question set.")
    arm: str | Mapping[str, Any] | None = option(
        None, help="Arm of the claim, or a point of a sweep as {SWEEP: VALUE}.", nonempty=True
    )
    baseline: str | Mapping[str, Any] | None = option(
        None,
        help="difference, equivalence: the arm (or the point of a sweep) it is compared with.",
        nonempty=True,
    )
    sweep: str | None = option(None, help="trend: the sweep.")
    outcome: Literal["right", "wrong", "abstained", "answered"] = option(
        "right",
        help="Written answers: right, wrong, abstained (of a question that has an answer), or answered (of one that has none).",
    )
    direction: Literal["higher", "lower"] = option(
        "higher", help="Direction of the difference or trend."
    )
    net: bool | None = option(
        None,
        help="Compare what each arm answers beyond its choices without the question (eval.control); default: on sets to be "
        "learned that have such a control.",
    )
    margin: float = option(
        0.1,
        help="equivalence, near_chance: largest distance from the baseline (or guessing) that counts as none.",
        min=0.0,
        max=1.0,
    )
    source: str = option("", help="Paper that makes the claim.")


@dataclass(frozen=True)
class StudySection:
    """A whole experiment: arms x models x seeds x question sets, over shared recipes."""

    title: str = option(help="Title of the report.")
    train: str = option(help="Shared train recipe.", path="file")
    eval: str = option(
        help="Shared eval recipe; its models are replaced by the arms'.", path="file"
    )
    models: Mapping[str, str | StudyModelSection] = option(
        help="name: base model folder or hub name, or path/recipe/overrides.", nonempty=True
    )
    arms: Mapping[str, ArmSection] = option(help="Arms by name; base is always there.")
    description: str = option(
        "", help="Summary of the study for the report: its subject and how long it takes."
    )
    augment: str | None = option(
        None, help="Shared augment recipe, for arms on an augmented corpus.", path="file"
    )
    setup: tuple[str, ...] = option(
        (),
        help="Train recipes that run first unless they are done; sandbox-corpus writes the corpus of the sandbox's base model, "
        "sandbox-base and sandbox-instruct its models as they ship, sandbox-chat the dialogues of recipes/sandbox/instruct.yaml, "
        "sandbox-sentences rows that teach to answer in sentences and to abstain.",
    )
    overrides: Mapping[str, Any] | None = option(
        None, help="Overrides of the shared recipes for every arm; eval.* too."
    )
    retrievals: Mapping[str, Mapping[str, Any]] | None = option(
        None, help="NAME: {kind: oracle} and other keys of eval.retrieval. The base and each arm with rag are also asked with "
        "these passages, as ARM+NAME.",
    )  # fmt: skip
    price: tuple[float, ...] = option(
        (), help="Prices of a million prompt tokens, of a million answer tokens and of a million tokens of training, in any "
        "currency: the report compares what each arm costs.", min=0.0,
    )  # fmt: skip
    seeds: tuple[int, ...] = option((0, 1, 2), help="Seeds of training.", min=0, nonempty=True)
    new_paraphrases_per_seed: bool = option(
        False, help="Write new paraphrases for each seed (and pay an endpoint for each)."
    )
    validation: Mapping[str, float] | None = option(
        None,
        help="Question set: fraction of its documents whose questions are used for tuning only, in every set; "
        "a set of the eval recipe that names a validation file needs none.",
        min=0.001,
        max=0.999,
    )
    sweeps: Mapping[str, SweepSection] | None = option(
        None, help="Curves: a key of an arm over values."
    )
    tune: Mapping[str, TuneSection] | None = option(
        None, help="Hyperparameters that the study tunes on validation questions."
    )
    claims: Mapping[str, ClaimSection] | None = option(None, help="Claims that it tests.")
    keep_models: bool = option(
        True,
        help="Keep the trained weights. false: they are deleted once they are evaluated, and made again where needed.",
    )
    cache_dir: str = option(
        "runs/stages",
        help="Folder of finished stages, by content; studies share it.",
        path="output",
    )
