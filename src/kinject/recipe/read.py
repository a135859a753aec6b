"""Reads a recipe file with overrides into a checked `Recipe`; reports every fault at once, each
with its line."""

from __future__ import annotations

import contextlib
import copy
import difflib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from glob import has_magic, iglob
from pathlib import Path
from typing import Any, Literal

from kinject.disk import check_regular, is_folder, path_exists
from kinject.errors import DiskError, InputError, Problem, RecipeError
from kinject.gguf_files import model_folder
from kinject.hub_data import find_data_set, is_saved
from kinject.recipe.adapter_fields import check_adapter, with_adapter_type
from kinject.recipe.check import SHORT_NAMES, Checker, KeyPath, suggestion, texts_in
from kinject.recipe.library_fields import REFUSED, check_new_model, check_trainer, misplaced
from kinject.recipe.makers import command_for
from kinject.recipe.sections import (
    AugmentSection,
    CorpusSection,
    DistillationSection,
    DocumentsSection,
    EvalSection,
    GuardsSection,
    ModelSection,
    ProbesSection,
    ProjectionSection,
    QuestionsSection,
    RegularizationSection,
    StudySection,
    TechniquesSection,
    option,
)
from kinject.recipe.yaml_lines import YamlFile, key_path, parse_scalar, read_yaml
from kinject.secrets import TRAINER_SECRETS, known_secrets, secret_filter

Verb = Literal["augment", "questions", "train", "eval", "study", "plan"]

MethodName = Literal["cpt", "sft", "distill", "recall"]
"""What `method` of a recipe may be; `kinject.recipe.method_rules` has the rules of each."""

NOT_NULL = frozenset({"model", "corpus", "augment", "questions", "eval", "study"})
"""Sections that some verb cannot do without: nothing there is a mistake, whatever the verb."""

NOT_TRAINING = frozenset({"run_dir", "documents", "augment", "questions", "eval", "study"})
"""Top-level keys that change nothing about a training; all others are in its fingerprint."""

MAX_SEED = 2**32 - 1
"""The largest seed that numpy takes."""
_HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$|^[A-Za-z0-9][\w-]*$")

_LONGEST_NAME = 255
"""Bytes of a file's or folder's name; names on the hub are shorter."""
_NOT_THERE = ", but nothing is there."
_SIMILAR = 0.82
"""Of difflib: documets is as similar to documents as 0.94, evaluation to validation 0.80."""
_SUFFIXES = (".yaml", ".yml", ".json")
"""Of recipes; another one may be a document's."""


@dataclass(frozen=True, kw_only=True)
class Sections:
    """The top level of a recipe: its run folder, its seed, and one section for each subject."""

    run_dir: Path = option(
        help="Folder for everything this run writes, for example runs/NAME.",
        nonempty=True,
        path="output",
    )
    seed: int = option(42, help="Seed of everything that is drawn.", min=0, max=MAX_SEED)
    method: MethodName | None = option(
        None,
        help="cpt (continued pretraining) or sft (instructions): the corpus must hold such rows; "
        "absent: any rows. distill (context distillation): any rows, learned by the settings of "
        "the section distillation. recall: rows with an answer, which the model gives itself and "
        "is rewarded for (GRPO).",
    )
    model: ModelSection | None = None
    adapter: Mapping[str, Any] | None = option(
        None,
        help="Train an adapter, not all weights: its type (lora) and the fields of peft's config.",
    )
    distillation: DistillationSection | None = None
    regularization: RegularizationSection | None = None
    guards: GuardsSection = GuardsSection()
    techniques: TechniquesSection = TechniquesSection()
    probes: ProbesSection | None = None
    corpus: CorpusSection | None = None
    trainer: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={
            "help": "TRL's SFTConfig (recall: GRPOConfig): batch, steps, optimizer, schedule."
        },
    )
    documents: DocumentsSection = DocumentsSection()
    augment: AugmentSection | None = None
    questions: QuestionsSection | None = None
    eval: EvalSection | None = None
    study: StudySection | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Sections):
    """A checked recipe. Sections that the file lacks are None.

    `trainer` holds SFTConfig's own keyword arguments. `raw` is the file with the command line's
    `overrides` applied. `notes` are messages for the user (a renamed key was read under its new
    name).
    """

    path: Path
    overrides: tuple[str, ...]
    raw: Mapping[str, Any]
    notes: tuple[str, ...]
    _file: YamlFile
    _overridden: frozenset[KeyPath]

    @property
    def command_line(self) -> str:
        """The recipe as shell words: its file, then its overrides, quoted."""
        return shlex.join((str(self.path), *self.overrides))

    def location(self, key: str | KeyPath) -> str:
        """Return ``file:line`` of a key (dotted, or part by part), or ``command line`` if an
        override set it."""
        path = key_path(key, self.raw) if isinstance(key, str) else key
        return _location(self._file, self._overridden, path)

    def raise_any(self, problems: Iterable[Problem]) -> None:
        """Raise `RecipeError` with each of `problems` once, at its line, if there are any."""
        located: list[Problem] = []
        for item in problems:
            if not item.location:
                item = Problem(item.dotted, item.message, self.location(item.key))
            if item not in located:
                located.append(item)
        if located:
            raise RecipeError(located)

    @contextlib.contextmanager
    def locating(self) -> Iterator[None]:
        """Give the problems of a `RecipeError` raised inside their places in this recipe."""
        try:
            yield
        except RecipeError as error:
            self.raise_any(error.problems)


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Recipe):
    """A recipe of the verbs that train: train, plan, find-lr."""

    model: ModelSection
    corpus: CorpusSection
    trainer: Mapping[str, Any]

    @property
    def device(self) -> str:
        """The device that is asked for."""
        return "cpu" if self.trainer.get("use_cpu") else self.model.device

    def training_values(self) -> dict[str, Any]:
        """Return the plain values of all sections that decide a training; those that every recipe
        has may be None."""
        always = dict.fromkeys(("seed", "method", "model", "adapter", "corpus", "trainer"))
        return always | {key: value for key, value in self.raw.items() if key not in NOT_TRAINING}

    def techniques_on(self, *names: str) -> list[str]:
        """Return the keys of those of the techniques that are on."""
        return [f"techniques.{name}" for name in names if getattr(self.techniques, name)]

    def terms_on(self, *names: str) -> list[str]:
        """Return the keys of those of the terms of regularization that are on."""
        section = self.regularization
        return [f"regularization.{name}" for name in names if getattr(section, name, None)]

    @property
    def projection(self) -> ProjectionSection | None:
        """regularization.projection, if there is one."""
        if self.regularization is None:
            return None
        return self.regularization.projection


@dataclass(frozen=True, kw_only=True)
class AugmentRecipe(Recipe):
    """A recipe of kinject augment."""

    augment: AugmentSection


@dataclass(frozen=True, kw_only=True)
class QuestionsRecipe(Recipe):
    """A recipe of kinject questions."""

    questions: QuestionsSection


@dataclass(frozen=True, kw_only=True)
class EvalRecipe(Recipe):
    """A recipe of kinject eval."""

    eval: EvalSection


@dataclass(frozen=True, kw_only=True)
class StudyRecipe(Recipe):
    """A recipe of kinject study."""

    study: StudySection


_RECIPES: Mapping[str, type[Recipe]] = {
    "augment": AugmentRecipe,
    "questions": QuestionsRecipe,
    "train": TrainRecipe,
    "eval": EvalRecipe,
    "study": StudyRecipe,
    "plan": TrainRecipe,
}
"""Verb -> its recipe: sections that the class declares again are those that the verb requires."""


def read_recipe(
    path: str | Path,
    overrides: Sequence[str] = (),
    verb: Verb | None = None,
    *,
    check_inputs: bool = True,
) -> Any:
    """Return the recipe at `path`, overridden and checked: a `Recipe`, that of the `verb` if one is
    given.

    `overrides` are ``section.key=value`` (value in YAML). With `verb`, its sections must be present
    and, unless `check_inputs` is False or the verb is plan, the inputs that they name must exist.
    Without, the whole file is checked but no input is looked for. Raises `RecipeError` with every
    fault, or if there is no recipe at `path`; `DiskError` when the file cannot be read;
    `InputError` for a verb that reads no recipe.

        recipe = kinject.read_recipe("recipes/cpt.yaml", ["trainer.max_steps=50"], "train")
    """
    kind, required = _recipe_of(verb)
    path = Path(path)
    file = _read_file(path)
    raw = copy.deepcopy(file.root)
    overridden, problems = _apply_overrides(overrides, raw)
    # Before all checks: without general text a recipe is the one that lacks these lines.
    notes = _leave_out_general_text(raw)
    checked: tuple[str, ...] = ()
    # A plan reads no corpus: it may be made before there is one.
    if check_inputs and verb != "plan":
        checked = required
    if check_inputs and verb == "train":
        checked += ("probes", "distillation")  # used if they are there

    def report(key: KeyPath, message: str) -> None:
        dotted = ".".join(map(str, key))
        problem = Problem(dotted, message, _location(file, overridden, key))
        # A number that is not finite is found by its section and by its field.
        if problem not in problems:
            problems.append(problem)

    def check_input(key: KeyPath, kind: str, value: str) -> None:
        message = _about_input(value, kind, must_exist=key[0] in checked)
        if message:
            report(key, message)

    fault = _merge_seeds(raw)
    if fault:
        report(("trainer", "seed"), fault)
    for key, message in _find_secrets(raw):
        report(key, message)
    checker = Checker(report, check_input, misplaced)
    sections = checker.fields(Sections, raw, ())
    # A wrong path is the commonest fault; without others it is reported before TRL loads (seconds).
    if problems and all(_NOT_THERE in problem.message for problem in problems):
        raise RecipeError(problems)
    trains = verb is None or kind is TrainRecipe
    notes += _check_library_sections(raw, sections, checker, trains=trains)
    for section, fault in _missing_sections(raw, required, verb):
        report((section,), fault)
    if problems:
        raise RecipeError(problems)
    return kind(
        **sections,
        path=path,
        overrides=tuple(overrides),
        raw=raw,
        notes=tuple(notes),
        _file=file,
        _overridden=frozenset(overridden),
    )


def _recipe_of(verb: Verb | None) -> tuple[type[Recipe], tuple[str, ...]]:
    """Return the recipe of a verb (of none: any), and its sections; `InputError` if unknown."""
    if verb is None:
        return Recipe, ()
    if verb not in _RECIPES:
        raise InputError(f"verb: found {verb!r:.40}.{suggestion(verb, _RECIPES)}")
    return _RECIPES[verb], tuple(_RECIPES[verb].__annotations__)


def missing_inputs(path: str | Path, overrides: Sequence[str], verb: Verb) -> tuple[Problem, ...]:
    """Return the inputs of a recipe that do not exist, each at its line.

    Raises `RecipeError` as `read_recipe` if it has another fault.
    """
    try:
        read_recipe(path, overrides, verb)
    except RecipeError as error:
        if all(_NOT_THERE in problem.message for problem in error.problems):
            return tuple(error.problems)
        raise
    return ()


def _missing_sections(
    raw: Mapping[str, Any], required: Sequence[str], verb: Verb | None
) -> Iterator[tuple[str, str]]:
    """Yield (section, fault) of sections without content, and of those that a verb requires."""
    for section in NOT_NULL & raw.keys():
        if raw[section] is None:
            yield section, "found nothing; give it a value or remove the line."
    for section in required:
        if section not in raw:
            yield section, f"missing. kinject {verb} needs this section."


def _check_library_sections(
    raw: dict[str, Any], sections: dict[str, Any], checker: Checker, *, trains: bool
) -> list[str]:
    """Check the sections whose fields are a library's, put the trainer's keyword arguments into
    `sections`, and return notes for the user. Unless the verb `trains`, no library is imported."""
    notes: list[str] = []
    trainer = raw.get("trainer")
    if isinstance(trainer, Mapping) and trains:
        sections["trainer"], notes = check_trainer(trainer, checker)
    elif isinstance(trainer, Mapping):
        # the section is not used, but written into the manifest
        for name in trainer.keys() & set(TRAINER_SECRETS):
            checker.report(("trainer", name), REFUSED[name])
    if sections.get("model") and sections["model"].new:
        check_new_model(sections["model"].new, checker)
    if isinstance(raw.get("adapter"), Mapping) and trains:
        raw["adapter"] = with_adapter_type(raw["adapter"], checker)
        check_adapter(raw["adapter"], checker)
    return notes


def read_section(path: str | Path | None, overrides: Sequence[str] = ()) -> DocumentsSection:
    """Return the section documents of the recipe at `path` (None: its defaults) after `overrides`.

    Raises `RecipeError` with every fault of the section.
    """
    raw: dict[str, Any] = {}
    source = "command line"
    if path is not None:
        source = str(path)
        values = read_values(Path(path))
        if "documents" in values:
            raw["documents"] = values["documents"]
    _, problems = _apply_overrides(overrides, raw)

    def report(key: KeyPath, message: str) -> None:
        problems.append(Problem(".".join(map(str, key)), message, source))

    checker = Checker(report)
    section = checker.section(DocumentsSection, raw.get("documents", {}), ("documents",))
    if problems or section is None:
        raise RecipeError(problems)
    return section


def _leave_out_general_text(raw: dict[str, Any]) -> list[str]:
    """Remove what `corpus.general_text: false` leaves out from a recipe's values; return a warning
    if there was any."""
    corpus, trainer = raw.get("corpus"), raw.get("trainer")
    if not isinstance(corpus, dict) or corpus.get("general_text", True) is not False:
        return []
    kinds = ("replay", "validation_corpus")
    left_out = [f"corpus.{name}" for name in kinds if corpus.pop(name, None) is not None]
    evaluates = corpus.get("validation_fraction") or raw.get("probes")
    if isinstance(trainer, dict) and not evaluates:
        if "eval_strategy" in trainer:
            trainer["eval_strategy"] = "no"
        if "eval_on_start" in trainer:
            trainer["eval_on_start"] = False
    if not left_out:
        return []
    return [
        f"warning: corpus.general_text: false leaves out {' and '.join(left_out)}. Nothing "
        "protects the model's earlier knowledge, and the log does not show forgetting."
    ]


def _merge_seeds(raw: dict[str, Any]) -> str:
    """Make `trainer.seed` the recipe's `seed` if that is absent or equal; return the fault if not.

    SFTConfig's seed draws dropout and the order of batches, the recipe's own draws everything else:
    two values would mix to a run that neither seed names.
    """
    trainer = raw.get("trainer")
    if not isinstance(trainer, dict) or type(trainer.get("seed")) is not int:
        return ""  # absent, or of a wrong type, which the check of the trainer's fields reports
    seed = trainer["seed"]
    if not 0 <= seed <= MAX_SEED:
        return ""
    if type(raw.get("seed", seed)) is not int:
        return ""  # 7.0 and true are equal to whole numbers, and are refused as its values
    if raw.get("seed", seed) != seed:
        fix = "Remove this line: seed, at the top of the recipe, holds for the trainer too."
        return f"found {seed}, but seed is {raw['seed']}: a run has one seed. {fix}"
    raw["seed"] = seed
    return ""


def read_values(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plain values of the recipe at `path` after `overrides`, unchecked.

    Raises `RecipeError` for bad YAML or an override that cannot be put in.
    """
    raw = copy.deepcopy(_read_file(path).root)
    _, problems = _apply_overrides(overrides, raw)
    if problems:
        raise RecipeError(problems)
    return raw


def _location(file: YamlFile, overridden: frozenset[KeyPath], key: KeyPath) -> str:
    if any(key[: len(prefix)] == prefix for prefix in overridden):
        return "command line"
    return file.location(key)


def _find_secrets(raw: Mapping[str, object]) -> Iterator[tuple[KeyPath, str]]:
    """Yield (key, fault) for each secret of the environment in the values of a recipe."""
    texts = list(texts_in(raw))
    known = known_secrets(text for key, text in texts if key[-1:] == ("api_key_env",))
    for key, text in texts:
        for name, value in known.items():
            if secret_filter((value,)).redact(text) is not text:
                fault = f"(part of) the value of the environment variable {name} is written here."
                yield key, f"{fault} Take it out."


def _apply_overrides(
    overrides: Sequence[str], raw: dict[str, Any]
) -> tuple[frozenset[KeyPath], list[Problem]]:
    """Put each ``section.key=value`` into `raw`; return (the keys, the problems of the others)."""
    overridden: set[KeyPath] = set()
    problems: list[Problem] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            message = "expected section.key=value, for example trainer.learning_rate=1e-5."
            problems.append(Problem(f"{override:.200}", message, "command line"))
            continue
        fault = _apply_override(key, text, raw)
        if fault:
            problems.append(Problem(key, fault, "command line"))
        else:
            overridden.add(key_path(key, raw))
    return frozenset(overridden), problems


def _apply_override(key: str, text: str, raw: dict[str, Any]) -> str:
    """Put a value (YAML) at a dotted key of `raw`; return the fault if it cannot be, else ""."""
    try:
        value = parse_scalar(text)
    except RecipeError as error:
        return f"the value {text!r:.200} cannot be read: {error.problems[0].message}"
    parts = key_path(key, raw)
    if parts[0] not in {section.name for section in fields(Sections)}:
        return f"unknown key.{_hint_at_section(parts[0], raw)}"
    mapping: Any = raw
    for part in parts[:-1]:
        mapping = mapping.setdefault(part, {})
        if not isinstance(mapping, dict):
            return f"{part} is no mapping in this recipe."
    mapping[parts[-1]] = value
    return ""


def _hint_at_section(name: str, raw: Mapping[str, Any]) -> str:
    """Return a hint for a first part that is no section: often the section itself was left out."""
    sections = {section.name: section.name for section in fields(Sections)}
    inside: dict[str, str] = {}
    for section, values in raw.items():
        if isinstance(values, dict):
            inside |= {key: f"{section}.{key}" for key in values}
    if name in SHORT_NAMES:
        return f" Did you mean trainer.{SHORT_NAMES[name]}?"
    near = difflib.get_close_matches(name, [*inside, *sections], n=1)
    if near:
        return f" Did you mean {(inside | sections)[near[0]]}?"
    return suggestion(name, sections)


def _about_input(value: str, kind: str, *, must_exist: bool) -> str:
    """Return the problem of an input's path, "" without one."""
    longest = max(
        (len(part.encode("utf-8", "surrogatepass")) for part in Path(value).parts), default=0
    )
    # Of every input and output: a draw of random values found paths of 300 characters in keys that
    # nothing else checks.
    if longest > _LONGEST_NAME:
        message = f"found {len(value):,} characters. No file, folder or name on the hub is that"
        return f"{message} long: give a shorter one."
    if kind == "output":
        return ""
    if must_exist and not _is_input(value, kind):
        return f"found {value!r}{_NOT_THERE}{_hint_at_path(value)}"
    may_be_folder = kind in ("documents", "files") and is_folder(value)
    may_be_folder = may_be_folder or (kind == "corpus" and is_saved(Path(value)))
    if must_exist and kind != "model" and path_exists(Path(value)) and not may_be_folder:
        try:
            check_regular(Path(value))
        except DiskError as error:
            return str(error)
    return ""


def _is_input(value: str, kind: str) -> bool:
    """Return whether an input exists. A name on the hub counts: only loading it shows whether it
    exists."""
    path = model_folder(value) if kind == "model" else Path(value)
    if path_exists(path):
        return True
    if kind in ("documents", "corpus") and find_data_set(value) is not None:
        return True
    if kind in ("documents", "files") and has_magic(value):
        return next(iglob(value, recursive=True), None) is not None
    # By its form alone: to ask for a name took huggingface_hub 47 to 54 s without a network.
    return kind == "model" and _HUB_NAME.match(value) is not None


def is_model(value: str) -> bool:
    """Return whether `value` is a folder that exists, or could be a model's name on the hub."""
    return _is_input(value, "model")


def _hint_at_path(entry: str) -> str:
    """Return a hint for a path that does not exist: the command that makes it, else a file that
    may be meant."""
    parent, hint = Path(entry).parent, ""
    if not is_folder(parent):
        first = next((folder for folder in Path(entry).parents if is_folder(folder)), Path())
        hint = f" The folder {parent} does not exist"
        hint += "." if str(first) == "." else f" ({first} does)."
    command = command_for(entry)
    if command:
        return f"{hint} Make it first: {command}"
    similar = _similar_file(Path(entry))
    if similar is not None:
        return f"{hint} Did you mean {similar}?"
    return f"{hint} Check the path."


def _similar_file(path: Path) -> Path | None:
    """Return the file or folder beside a missing `path` whose name differs by a typing error, or
    only by its suffix."""
    if not is_folder(path.parent):
        return None
    names = sorted(child.name for child in path.parent.iterdir())
    for name in names:
        if Path(name).stem == path.stem:
            return path.with_name(name)
    # By the stem: with a common suffix, corpus.jsonl is similar to documents.jsonl.
    stems = {Path(name).stem: name for name in names if Path(name).suffix == path.suffix}
    near = difflib.get_close_matches(path.stem, stems, n=1, cutoff=_SIMILAR)
    if near:
        return path.with_name(stems[near[0]])
    return None


def _read_file(path: Path) -> YamlFile:
    """Read a recipe file. Raises as `read_yaml`; for a missing one with what makes it."""
    if is_folder(path):
        raise RecipeError([Problem("", _about_folder(path), str(path))])
    if not path_exists(path):
        raise RecipeError([Problem("", _about_missing(path), str(path))])
    try:
        return read_yaml(path)
    except RecipeError as error:
        if path.suffix in _SUFFIXES:
            raise
        fix = f"A recipe is a YAML file. For documents: kinject try {shlex.quote(str(path))}"
        raise RecipeError([*error.problems, Problem("", fix, str(path))]) from error


def _about_folder(path: Path) -> str:
    """Return the problem of a folder in the place of a recipe."""
    expected = "a YAML file"
    recipes = [*sorted(path.glob("*.yaml")), *sorted(path.glob("*/*.yaml"))]
    if recipes:
        expected = f"as {recipes[0]}"
    fix = f"For the documents in it: kinject try {shlex.quote(str(path))}"
    return f"found a folder, expected a recipe ({expected}). {fix}"


def _about_missing(path: Path) -> str:
    """Return the problem of a recipe that does not exist."""
    command = command_for(str(path))
    if command.startswith("kinject recipes copy"):
        return f"not in this folder. {command} puts it here."
    similar = _similar_file(path)
    if similar is not None and not is_folder(similar):
        return f"no recipe is there. Did you mean {similar}?"
    return (
        "no recipe is there. Check the path; kinject try FOLDER writes recipes for your documents, "
        "and kinject recipes lists those that ship."
    )
