"""Manifests: what a stage tells the later ones, typed.

Each stage writes manifest.json into its run folder (`kinject.disk.write_manifest`): its command,
inputs, recipe, counts and outputs. Here is what other stages read of it. A manifest of another
version or shape is refused in one line, so that a reader never guesses; keys that no class below
names are ignored, as in every file of kinject.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from kinject.disk import (
    MANIFEST_FIX,
    is_file,
    parse_fields,
    read_manifest_beside,
    read_manifest_fields,
)
from kinject.errors import InputError

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What every stage writes.

    `inputs` and `outputs` are name -> SHA-256 (or another id of the content), `versions` package ->
    version. `as_written` is the whole object, for whoever shows or copies it.
    """

    stage: str
    written: str
    command: tuple[str, ...]
    inputs: Mapping[str, str]
    versions: Mapping[str, str]
    outputs: Mapping[str, str]
    as_written: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class UnfinishedTraining:
    """The counts of a training that runs, or was ended."""

    finished: Literal[False]


@dataclass(frozen=True, kw_only=True)
class EffectiveBatch:
    """The rows and mean tokens of an update over all devices, and the factors of the rows."""

    rows_per_device: int
    accumulation: int
    devices: int
    rows: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class RowExposures:
    """How often a training read a document, in rows: that of the least, the median, the most
    read."""

    min: float
    median: float
    max: float


@dataclass(frozen=True, kw_only=True)
class Exposures:
    """How often a training read its `documents`; `rows` is None where a corpus names none."""

    documents: int
    rows: RowExposures | None = None


@dataclass(frozen=True, kw_only=True)
class FinishedTraining:
    """The counts of a finished training; tokens and `fractions` (part of the corpus -> its part of
    the tokens) are those of an epoch.

    Those with a default are missing in the manifests of the models that ship with kinject.
    """

    finished: Literal[True]
    steps: int
    epochs: float
    loss: float
    seconds: float
    cost: Mapping[str, int | float] = field(default_factory=dict)
    resumed_from: str | None
    tokens: Mapping[str, int]
    notes: tuple[str, ...]
    best_step: int | None
    learned_tokens: int | None = None
    effective_batch: EffectiveBatch
    fractions: Mapping[str, float]
    exposures: Exposures
    skipped_updates: int
    warnings: tuple[str, ...]
    ended_above_start: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a manifest holds them."""
        fields = asdict(self)
        # A corpus that names no documents has no rows a document.
        if self.exposures.rows is None:
            del fields["exposures"]["rows"]
        return fields


@dataclass(frozen=True)
class TrainedCorpus:
    """The corpus of a training's recipe."""

    path: str


@dataclass(frozen=True)
class StartModel:
    """The model of a training's recipe; its `path` is None where it starts from random weights.
    `revision` is that on the hub, `freeze` names the parameters that do not train."""

    path: str | None = None
    revision: str | None = None
    freeze: tuple[str, ...] = ()


@dataclass(frozen=True)
class TrainSections:
    """What others read of a training's recipe."""

    corpus: TrainedCorpus
    model: StartModel
    trainer: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class TrainManifest(Manifest):
    """The manifest of kinject train, written when a run starts and when it is finished."""

    recipe: TrainSections
    # The literal `finished` of a manifest tells which of the two it has.
    counts: FinishedTraining | UnfinishedTraining

    @property
    def fingerprint(self) -> str:
        """The id of all inputs and of the recipe: runs that have the same one are the same run."""
        return self.inputs.get("fingerprint", "")

    def finished(self) -> FinishedTraining | None:
        """Return the counts of a finished training; None before."""
        return self.counts if isinstance(self.counts, FinishedTraining) else None


@dataclass(frozen=True, kw_only=True)
class WritingCounts:
    """How many texts or questions were `asked` for, and how many passed (`got`); the documents,
    their passages, and the rows of a corpus, 0 where they are not counted."""

    asked: int
    got: int
    n_documents: int = 0
    n_passages: int = 0
    n_rows: int = 0


@dataclass(frozen=True)
class AugmentedDocuments:
    """The section of a writer's recipe that names its documents."""

    documents: str


@dataclass(frozen=True)
class AugmentSections:
    """What others read of the recipe of kinject augment."""

    augment: AugmentedDocuments


@dataclass(frozen=True, kw_only=True)
class AugmentManifest(Manifest):
    """The manifest of kinject augment: what a corpus was made from."""

    recipe: AugmentSections
    counts: WritingCounts


@dataclass(frozen=True, kw_only=True)
class QuestionsManifest(Manifest):
    """The manifest of kinject questions."""

    counts: WritingCounts


@dataclass(frozen=True, kw_only=True)
class DocumentsCounts:
    """`heap` identifies the files and how they are read, `fingerprint` the documents written."""

    heap: str
    fingerprint: str


@dataclass(frozen=True, kw_only=True)
class _Copies:
    exact: int
    near: int


@dataclass(frozen=True, kw_only=True)
class _Repeats:
    documents: int
    passages: int


@dataclass(frozen=True, kw_only=True)
class _Boilerplate:
    lines: int
    removed: int


@dataclass(frozen=True, kw_only=True)
class HeapCounts(DocumentsCounts):
    """The counts of a whole heap, which its summary shows; a shard of one has none of them."""

    n_files: int
    n_read: int
    n_documents: int
    n_words: int
    n_bytes: int
    kinds: Mapping[str, int]
    languages: Mapping[str, int]
    skipped: int
    left_out: int
    duplicates: _Copies
    repeats: _Repeats
    boilerplate: _Boilerplate


@dataclass(frozen=True, kw_only=True)
class DocumentsManifest(Manifest):
    """The manifest of the documents that were collected from a heap of files."""

    counts: DocumentsCounts


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel:
    """A model of an evaluation's recipe: one in a folder or on the hub, or one behind an
    endpoint."""

    path: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, kw_only=True)
class AskedQuestions:
    """A question set of an evaluation's recipe."""

    path: str
    # As in a recipe, which a manifest has as it was written.
    layout: Literal["auto", "open"] = "auto"
    formats: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    """The `eval` section of a recipe: name -> model (the first is the base), name -> questions."""

    models: Mapping[str, str | EvaluatedModel]
    questions: Mapping[str, str | AskedQuestions]
    # A manifest has the recipe as it was written, so its defaults are needed here as well.
    formats: tuple[str, ...] = ("texts",)

    def model_paths(self) -> dict[str, str]:
        """Return the folder or hub name of each model that is loaded here; of an adapter on a base,
        the adapter's."""
        paths = {}
        for name, model in self.models.items():
            path = model if isinstance(model, str) else model.adapter or model.path
            if path is not None:
                paths[name] = path
        return paths

    def question_set(self, name: str) -> AskedQuestions:
        """Return a question set; one that is only a path has the defaults."""
        questions = self.questions[name]
        return AskedQuestions(path=questions) if isinstance(questions, str) else questions


@dataclass(frozen=True)
class EvalSections:
    """What others read of an evaluation's recipe."""

    eval: EvaluationSection


@dataclass(frozen=True, kw_only=True)
class EvalCounts:
    """`stored` counts the rows of answers.jsonl; `other_versions` are the packages that had another
    version when some of them were scored."""

    answers: int
    scored_now: int
    stored: int
    other_versions: str = ""


@dataclass(frozen=True, kw_only=True)
class EvalManifest(Manifest):
    """The manifest of kinject eval."""

    recipe: EvalSections
    counts: EvalCounts


@dataclass(frozen=True, kw_only=True)
class StudyManifest(Manifest):
    """The manifest of kinject study; its stages have manifests of their own."""


@dataclass(frozen=True, kw_only=True)
class CorpusManifest(Manifest):
    """The manifest of a corpus that a study makes from another one."""


AnyManifest: TypeAlias = (
    TrainManifest
    | AugmentManifest
    | QuestionsManifest
    | DocumentsManifest
    | EvalManifest
    | StudyManifest
    | CorpusManifest
)

_BY_STAGE: Mapping[str, type[AnyManifest]] = {
    "train": TrainManifest,
    "augment": AugmentManifest,
    "questions": QuestionsManifest,
    "documents": DocumentsManifest,
    "eval": EvalManifest,
    "study": StudyManifest,
    "corpus": CorpusManifest,
}


def read_manifest(run_dir: Path) -> AnyManifest | None:
    """Return the manifest of the stage that wrote `run_dir`; None if there is none.

    Raises `InputError` if it is damaged, of another shape, or written by a newer kinject.
    """
    path = run_dir / MANIFEST
    fields = read_manifest_fields(path)
    return None if fields is None else _typed(fields, path)


def manifest_beside(path: Path) -> AnyManifest | None:
    """Return the manifest in the folder of the file `path`; None if kinject wrote none there.

    Raises as `read_manifest`.
    """
    fields = read_manifest_beside(path)
    return None if fields is None else _typed(fields, path.with_name(MANIFEST))


def read_train_manifest(run_dir: Path) -> TrainManifest | None:
    """Return the manifest of the training in `run_dir`; None if no training wrote one there."""
    manifest = read_manifest(run_dir)
    return manifest if isinstance(manifest, TrainManifest) else None


def read_eval_manifest(run_dir: Path) -> EvalManifest | None:
    """Return the manifest of the evaluation in `run_dir`; None if no evaluation wrote one there."""
    manifest = read_manifest(run_dir)
    return manifest if isinstance(manifest, EvalManifest) else None


def read_documents_manifest(folder: Path) -> DocumentsManifest | None:
    """Return the manifest of the documents in `folder`; None if none were collected there."""
    manifest = read_manifest(folder)
    return manifest if isinstance(manifest, DocumentsManifest) else None


def _typed(fields: Mapping[str, Any], path: Path) -> AnyManifest:
    stage = str(fields.get("stage"))
    # Refused: readers that guess do so in different ways.
    if stage not in _BY_STAGE:
        raise InputError(
            f"{path}: damaged: found the stage {stage!r:.40}, "
            f"one of {', '.join(_BY_STAGE)} is needed. {MANIFEST_FIX}"
        )
    manifest: AnyManifest = parse_fields(
        _BY_STAGE[stage],
        {**fields, "as_written": fields},
        f"{path}: damaged manifest",
        MANIFEST_FIX,
    )
    return manifest


def documents_behind(run_dir: Path) -> tuple[str, ...]:
    """Return the file of documents that the corpus of a training was made from; () if it was made
    otherwise, or from a folder."""
    training = manifest_beside(run_dir / MANIFEST)
    if not isinstance(training, TrainManifest):
        return ()
    augmented = manifest_beside(Path(training.recipe.corpus.path))
    if not isinstance(augmented, AugmentManifest):
        return ()
    documents = augmented.recipe.augment.documents
    return (documents,) if is_file(documents) else ()
