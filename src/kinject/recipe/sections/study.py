"""The section `study`: arms over shared recipes, sweeps and claims."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kinject.disk import is_file
from kinject.errors import Problem
from kinject.recipe.check import KeyPath, suggestion
from kinject.recipe.sections.eval import QuestionSetSection
from kinject.recipe.sections.option import option
from kinject.types import RAG, ArmName


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
        help="augmented (the corpus of study.augment), random (its words, shuffled), or a corpus "
        "(JSONL).",
    )
    overrides: Mapping[str, Any] | None = option(
        None, help="Overrides of the shared recipes, as in {trainer.max_steps: 50}."
    )
    match: Mapping[Literal["steps", "tokens", "seconds"], str] | None = option(
        None,
        help="{steps: ARM}, {tokens: ARM} or {seconds: ARM}: train for as many optimizer steps, "
        "tokens of the corpus, or seconds of training (with its teacher and its own answers; on a "
        "CPU processor time) as that arm.",
    )
    alpha: float | None = option(
        None,
        help="Average the tuned weights with the base's: 0 is the base, 1 the tuned model.",
        min=0.0,
        max=1.0,
    )
    through: str | None = option(
        None,
        help="Train this model, the base of the arm's own one, instead; then its own one minus "
        "this base is added to the tuned weights (chat vector).",
    )
    after: str | None = option(
        None,
        help="Train the model of this arm, one above, further: SFT after CPT, or one set of "
        "documents after another.",
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
        return _as_names(self.question_sets)


def _as_names(value: str | tuple[str, ...]) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    return value


@dataclass(frozen=True)
class ClaimSection:
    """A statement to be tested, fixed before the study runs; all claims are one family for Holm's
    correction.

    Several question sets count as one: each question once, in its document.

    difference: `arm` is higher (or lower) than `baseline` on `question_set`. equivalence: `arm` is
    within `margin` of `baseline` (two one-sided tests). trend: accuracy on `question_set` rises
    (falls) along `sweep` (a linear contrast). above_chance: `arm` is above guessing. near_chance:
    `arm` is within `margin` of guessing (two one-sided tests). Of written answers, `outcome` names
    the part that is compared; guessing is never right, so they have no chance. An arm's name with
    ``+rag`` is that arm with its chosen number of passages, with ``+NAME`` that with those of
    study.retrievals, ``{lr: 0.001}`` the point of the sweep lr with that value.
    """

    statement: str = option(help="The claim in words, for the report.")
    test: Literal["difference", "equivalence", "trend", "above_chance", "near_chance"] = option(
        help="Statistical test."
    )
    question_set: str | tuple[str, ...] = option(
        help="Question set; several count as one.", nonempty=True
    )
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
        help="Written answers: right, wrong, abstained (of a question that has an answer), or "
        "answered (of one that has none).",
    )
    direction: Literal["higher", "lower"] = option(
        "higher", help="Direction of the difference or trend."
    )
    net: bool | None = option(
        None,
        help="Compare what each arm answers beyond its choices without the question "
        "(eval.control); default: on sets to be learned that have such a control.",
    )
    margin: float = option(
        0.1,
        help="equivalence, near_chance: largest distance from the baseline (or guessing) that "
        "counts as none.",
        min=0.0,
        max=1.0,
    )
    source: str = option("", help="Paper that makes the claim.")

    def sets(self) -> tuple[str, ...]:
        """Return the names of the question sets."""
        return _as_names(self.question_set)


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
        help="Train recipes that run first unless they are done; sandbox-corpus writes the corpus "
        "of the sandbox's base model, sandbox-base and sandbox-instruct its models as they ship, "
        "sandbox-chat the dialogues of recipes/sandbox/instruct.yaml, sandbox-sentences rows that "
        "teach to answer in sentences and to abstain.",
    )
    overrides: Mapping[str, Any] | None = option(
        None, help="Overrides of the shared recipes for every arm; eval.* too."
    )
    retrievals: Mapping[str, Mapping[str, Any]] | None = option(
        None,
        help="NAME: {kind: oracle} and other keys of eval.retrieval. The base and each arm with "
        "rag are also asked with these passages, as ARM+NAME.",
    )
    price: tuple[float, ...] = option(
        (),
        help="Prices of a million prompt tokens, of a million answer tokens and of a million "
        "tokens of training, in any currency: the report compares what each arm costs.",
        min=0.0,
    )
    # Three: a gain of 7 points with a seed SD of 1.4 is found in 82% of simulated studies, in 41%
    # with two.
    seeds: tuple[int, ...] = option((0, 1, 2), help="Seeds of training.", min=0, nonempty=True)
    new_paraphrases_per_seed: bool = option(
        False, help="Write new paraphrases for each seed (and pay an endpoint for each)."
    )
    validation: Mapping[str, float] | None = option(
        None,
        help="Question set: fraction of its documents whose questions are used for tuning only, in "
        "every set; a set of the eval recipe that names a validation file needs none.",
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
        False,
        help="Keep the trained weights. false: each arm is trained, evaluated and deleted before "
        "the next, and made again where needed.",
    )
    cache_dir: str = option(
        "runs/stages",
        help="Folder of finished stages, by content; studies share it.",
        path="output",
    )


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the checks of a study read beside it; `sets` are the question sets of its eval recipe,
    None if that is not read."""

    augment_keys: tuple[str, ...] = ()
    train_keys: tuple[str, ...] = ()
    checks_inputs: bool = True
    sets: Mapping[str, str | QuestionSetSection] | None = None
    formats: Mapping[str, str] = field(default_factory=dict)
    """Question set -> the format that decides claims on it."""
    writes: frozenset[str] = frozenset()
    """The question sets on which the answers that decide claims are written, letters or words."""
    writes_words: frozenset[str] = frozenset()
    adapters: Mapping[KeyPath, str] = field(default_factory=dict)
    """Arm or sweep -> the arm of the recipe behind it, where training leaves an adapter that is not
    folded in."""


_BASE = "base"
_CORPORA = ("augmented", "random")
"""Values of an arm's corpus that name no file."""
_AGAINST_CHANCE = ("above_chance", "near_chance")
"""Tests of a claim that compare with guessing."""
_CLAIM_REQUIRES: Mapping[str, tuple[str, ...]] = {
    "difference": ("arm", "baseline"),
    "equivalence": ("arm", "baseline"),
    "trend": ("sweep",),
}
"""Test of a claim -> the keys that it requires; the others require an arm."""


def study_problems(study: StudySection, shared: Shared) -> Iterator[Problem]:
    """Yield the problems of the section."""
    for key, name, allowed in _names(study, shared):
        if name is not None and name not in allowed:
            hint = suggestion(name, allowed) or " There is none."
            yield Problem(("study", *key), f"found {name!r}.{hint}")
    yield from _point_problems(study)
    yield from _reserved_names(study)
    if len(study.price) not in (0, 3):
        message = (
            "expected three numbers: of a million prompt tokens, of a million answer tokens, "
            "of a million tokens of training."
        )
        yield Problem("study.price", message)
    for name, arm in study.arms.items():
        yield from _arm_problems(study, arm, ("study", "arms", name))
        yield from _corpus_problems(study, arm, ("study", "arms", name), shared)
    yield from _adapter_problems(study, shared)
    yield from _model_problems(study)
    yield from _override_problems(study, shared)
    yield from _untuned_sets(study, shared)
    yield from _repeated_seeds(study)
    yield from _tuned_twice(study)
    yield from _varied_lengths(study)
    yield from _unsorted_trends(study)
    for name, claim in (study.claims or {}).items():
        yield from _claim_problems(claim, ("study", "claims", name), shared)


_Name = tuple[KeyPath, str | None, Iterable[str]]
"""(Key below study, the name that stands there, the names that exist)."""


def _names(study: StudySection, shared: Shared) -> Iterator[_Name]:
    """Yield each name of an arm, sweep or question set, with those that exist."""
    arms, sweeps = study.arms.keys() - {_BASE}, study.sweeps or {}
    above: list[str] = []
    for name, arm in study.arms.items():
        for key, other in (arm.match or {}).items():
            yield ("arms", name, "match", key), other, arms - {name}
        yield ("arms", name, "after"), arm.after, [*above]
        above.append(name)
    for name, tune in (study.tune or {}).items():
        yield ("tune", name, "arm"), tune.arm, arms
        for index, other in enumerate(tune.arms or ()):
            yield ("tune", name, "arms", index), other, arms
    for name, sweep in sweeps.items():
        yield ("sweeps", name, "arm"), sweep.arm, arms
    for name, claim in (study.claims or {}).items():
        yield from _names_of_claim(study, claim, ("claims", name), shared)
    if shared.sets is not None:
        for name in study.validation or {}:
            yield ("validation", name), name, shared.sets


def _names_of_claim(
    study: StudySection, claim: ClaimSection, key: KeyPath, shared: Shared
) -> Iterator[_Name]:
    if shared.sets is not None:
        for question_set in claim.sets():
            yield (*key, "question_set"), question_set, shared.sets
    sweeps = study.sweeps or {}
    yield (*key, "sweep"), claim.sweep, sweeps
    for name, arm in (("arm", claim.arm), ("baseline", claim.baseline)):
        if isinstance(arm, str):
            bare, retrieval = ArmName.parse(arm)
            yield (*key, name), bare, {_BASE, *study.arms}
            yield (*key, name), retrieval, {"", RAG, *(study.retrievals or {})}
        elif arm is not None:
            for sweep in arm:
                yield (*key, name), sweep, sweeps


def _point_problems(study: StudySection) -> Iterator[Problem]:
    """Yield the points of sweeps that claims name, but no sweep has."""
    sweeps = study.sweeps or {}
    for name, claim in (study.claims or {}).items():
        for key, point in (("arm", claim.arm), ("baseline", claim.baseline)):
            if not isinstance(point, Mapping):
                continue
            for sweep, value in point.items():
                if sweep not in sweeps:
                    continue  # an unknown name, which is a problem of its own
                values = sweeps[sweep].values
                if len(point) > 1 or value not in values:
                    message = f"found {value}, expected one point of a sweep as {{SWEEP: VALUE}};"
                    shown = ", ".join(map(str, values))
                    fix = f"the values of the sweep {sweep} are {shown}."
                    yield Problem(("study", "claims", name, key), f"{message} {fix}")


def _reserved_names(study: StudySection) -> Iterator[Problem]:
    """Yield the names that would be taken for another arm, and keys that no retrieval has."""
    if _BASE in study.arms:
        message = "this name is the untouched model's. Choose another."
        yield Problem("study.arms.base", message)
    message = (
        "a name with '+' or a comma, and the retrieval rag, would be taken for another arm. "
        "Choose another."
    )
    for name in study.arms:
        if "+" in name or "," in name:
            yield Problem(("study", "arms", name), message)
    for name, keys in (study.retrievals or {}).items():
        if "+" in name or "," in name or name == RAG:
            yield Problem(("study", "retrievals", name), message)
        if "k" in keys:
            reason = "all arms of a study have the numbers of passages of its eval recipe."
            yield Problem(("study", "retrievals", name, "k"), f"{reason} Remove it.")


def _arm_problems(study: StudySection, arm: ArmSection, key: KeyPath) -> Iterator[Problem]:
    match = arm.match or {}
    if len(match) > 1:
        yield Problem(key, f"{' and '.join(match)} exclude each other. Keep one.")
    if arm.after and arm.through:
        yield Problem(key, "after and through name two models to begin with. Keep one.")
    for other in match.values():
        if other in study.arms and study.arms[other].match:
            yield Problem(key, f"{other} is itself matched to another arm. Name that one.")


def _corpus_problems(
    study: StudySection, arm: ArmSection, key: KeyPath, shared: Shared
) -> Iterator[Problem]:
    if arm.corpus in _CORPORA:
        if study.augment is None:
            message = f"corpus {arm.corpus} needs study.augment, the recipe that writes it."
            yield Problem(key, message)
        return
    # The file may be one that study.setup makes; a word without a suffix is a misspelt name.
    must_exist = shared.checks_inputs and not study.setup
    if not is_file(arm.corpus) and (must_exist or not Path(arm.corpus).suffix):
        message = f"found {arm.corpus!r}: neither augmented nor random, and as a file nothing is"
        yield Problem((*key, "corpus"), f"{message} there. Check the path.")


def _adapter_problems(study: StudySection, shared: Shared) -> Iterator[Problem]:
    """Yield the arms that leave an adapter where whole weights are needed."""
    followed = {arm.after for arm in study.arms.values()}
    for key, name in shared.adapters.items():
        arm = study.arms[name]
        # With alpha the weights are averaged, so the adapter is folded in anyway.
        if arm.alpha is None and (arm.through or name in followed):
            message = "leaves an adapter, but through adds whole weights, and after trains them."
            yield Problem(key, f"{message} Set adapter.merge: true.")


def _model_problems(study: StudySection) -> Iterator[Problem]:
    for name, model in study.models.items():
        if isinstance(model, str) or model.recipe is not None:
            continue
        if model.path is None or model.overrides:
            message = "has neither path nor recipe, or overrides without the recipe that they"
            yield Problem(("study", "models", name), f"{message} change. Give a recipe.")


def _override_problems(study: StudySection, shared: Shared) -> Iterator[Problem]:
    """Yield the overrides that no shared recipe reads, or that the study sets itself."""
    allowed = {*shared.augment_keys, *shared.train_keys}
    for key, name in _override_keys(study):
        section = name.split(".")[0]
        if section not in allowed or name in ("corpus", "model"):
            message = f"found {name!r}; it must begin with one of {', '.join(sorted(allowed))}."
            yield Problem(key, message)
        if name.startswith(("corpus.path", "model.path")):
            message = f"{name} is set by the study. Use the arm's corpus, or study.models."
            yield Problem(key, message)
        if section in shared.augment_keys and study.augment is None:
            yield Problem(key, f"{name} changes study.augment, which is missing.")


def _override_keys(study: StudySection) -> Iterator[tuple[KeyPath, str]]:
    """Yield each override, tuned key and sweep: (its place, the dotted key that it changes)."""
    for name in study.overrides or {}:
        # Overrides of eval are the eval recipe's, which is read with them; models are the arms'.
        if not name.startswith("eval.") or name.startswith("eval.models"):
            yield ("study", "overrides", name), name
    for arm_name, arm in study.arms.items():
        for name in arm.overrides or {}:
            yield ("study", "arms", arm_name, "overrides", name), name
    for tune_name, tune in (study.tune or {}).items():
        yield ("study", "tune", tune_name, "key"), tune.key
    for sweep_name, sweep in (study.sweeps or {}).items():
        if sweep.key not in ("alpha", "corpus"):  # keys of an arm, not of a recipe
            yield ("study", "sweeps", sweep_name, "key"), sweep.key


def _untuned_sets(study: StudySection, shared: Shared) -> Iterator[Problem]:
    """Yield the sets on which a study tunes, but which have no questions for it."""
    if shared.sets is None:
        return
    tunable = set(study.validation or {})
    for name, item in shared.sets.items():
        if not isinstance(item, str) and item.validation:
            tunable.add(name)
    for name, tune in (study.tune or {}).items():
        for question_set in tune.sets():
            if question_set not in tunable:
                message = f"{question_set!r} has no validation questions."
                fix = "Name a set in study.validation, or its validation file in eval."
                yield Problem(("study", "tune", name, "question_sets"), f"{message} {fix}")


def _repeated_seeds(study: StudySection) -> Iterator[Problem]:
    """Yield the seeds that are there twice: one training would count as two."""
    lists: list[tuple[KeyPath, tuple[int, ...]]] = [(("study", "seeds"), study.seeds)]
    lists += [
        (("study", "arms", name, "seeds"), arm.seeds or ()) for name, arm in study.arms.items()
    ]
    for name, sweep in (study.sweeps or {}).items():
        lists.append((("study", "sweeps", name, "seeds"), sweep.seeds or ()))
    for key, seeds in lists:
        if len(set(seeds)) < len(seeds):
            shown = ", ".join(map(str, seeds))
            yield Problem(key, f"found {shown}: a seed is there twice. Name each once.")


def _tuned_twice(study: StudySection) -> Iterator[Problem]:
    """Yield the arms that would train with another value than the one that is chosen for them."""
    chosen_by: dict[tuple[str, str], str] = {}
    for name, tune in (study.tune or {}).items():
        for arm_name in tune.arms or study.arms:
            arm = study.arms.get(arm_name)
            if arm is None:
                continue  # an unknown name, which is a problem of its own
            own = [key for key in arm.overrides or {} if f"{tune.key}.".startswith(f"{key}.")]
            # Without a list of arms, one that sets the key keeps its value.
            if own and (tune.arms or arm_name == tune.arm):
                message = f"study.tune.{name} chooses {tune.key} for this arm. Remove one of them."
                yield Problem(("study", "arms", arm_name, "overrides", own[0]), message)
            if own:
                continue
            first = chosen_by.setdefault((arm_name, tune.key), name)
            if first != name:
                message = f"{first} chooses {tune.key} for {arm_name}, too."
                yield Problem(("study", "tune", name), f"{message} Give each its arms.")


_LENGTHS = ("trainer.max_steps", "trainer.num_train_epochs")
"""Keys that an arm with `match` has of another arm."""


def _varied_lengths(study: StudySection) -> Iterator[Problem]:
    """Yield the sweeps and tunings of a length that their arm takes from another one."""
    sweeps, tunings = study.sweeps or {}, study.tune or {}
    varied = [
        (("study", "sweeps", name, "key"), item.key, item.arm) for name, item in sweeps.items()
    ]
    varied += [
        (("study", "tune", name, "key"), item.key, item.arm) for name, item in tunings.items()
    ]
    for key_path, key, arm in varied:
        if key in _LENGTHS and arm in study.arms and study.arms[arm].match:
            message = f"{key} has no effect on {arm}, which is matched to another arm."
            yield Problem(key_path, f"{message} Vary an arm without match.")


def _unsorted_trends(study: StudySection) -> Iterator[Problem]:
    """Yield the sweeps of numbers in no order along which a claim tests a trend."""
    for name, claim in (study.claims or {}).items():
        sweep = (study.sweeps or {}).get(claim.sweep or "")
        if claim.test != "trend" or sweep is None:
            continue
        numbers = [value for value in sweep.values if isinstance(value, int | float)]
        rising = sorted(numbers)
        if len(numbers) == len(sweep.values) and numbers not in (rising, rising[::-1]):
            shown = ", ".join(map(str, numbers))
            message = f"found {shown}, but claim {name} tests a trend along them. Sort them."
            yield Problem(("study", "sweeps", str(claim.sweep), "values"), message)


def _claim_problems(claim: ClaimSection, key: KeyPath, shared: Shared) -> Iterator[Problem]:
    yield from _joint_set_problems(claim, (*key, "question_set"), shared)
    for name in _CLAIM_REQUIRES.get(claim.test, ("arm",)):
        if getattr(claim, name) is None:
            yield Problem(key, f"{name}: missing; test {claim.test} needs it.")
    if claim.test in _AGAINST_CHANCE:
        if not shared.writes_words.isdisjoint(claim.sets()):
            message = f"{claim.test}: the answers are written, which has no chance of guessing."
            fix = "Compare with a baseline (difference, equivalence)."
            yield Problem((*key, "test"), f"{message} {fix}")
        if claim.net:
            message = f"has no effect on {claim.test}, which compares with guessing."
            fix = "Take it out, or compare with a baseline (difference)."
            yield Problem((*key, "net"), f"{message} {fix}")
    if shared.sets is None or claim.outcome == "right" or shared.writes.issuperset(claim.sets()):
        return
    message = f"found {claim.outcome}, but the answers are choices: right or wrong."
    fix = "Put generate first in eval.formats, or take it out."
    yield Problem((*key, "outcome"), f"{message} {fix}")


def _joint_set_problems(claim: ClaimSection, key: KeyPath, shared: Shared) -> Iterator[Problem]:
    """Yield why the question sets of a claim cannot count as one."""
    sets = claim.sets()
    for name in dict.fromkeys(sets):
        if sets.count(name) > 1:
            yield Problem(key, f"{name!r} is there twice; its questions count once. Name it once.")
    formats = {name: shared.formats[name] for name in sets if name in shared.formats}
    if len(set(formats.values())) > 1:
        shown = ", ".join(f"{name} in {format_name}" for name, format_name in formats.items())
        message = f"claims on {shown}: the answers of several formats are not one."
        fix = "Put the same format first in their formats, or make a claim of each set."
        yield Problem(key, f"{message} {fix}")
