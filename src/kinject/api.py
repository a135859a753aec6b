"""The verbs as functions. Each does what its command does, writes the same files and report, and
returns the result.

`recipe` is a recipe's path, or what `read_recipe` returned. Results have `to_frame()`, and a
notebook shows them as tables. Nothing heavy is imported before a function is called. They work
inside a running event loop, as Jupyter has one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kinject.errors import InputError, KinjectError

if TYPE_CHECKING:
    from kinject.augment import AugmentResult
    from kinject.augment.questions import QuestionsResult
    from kinject.augment.survey import Survey
    from kinject.disk import FoundRun
    from kinject.doctor import Checkup
    from kinject.eval.compare import Comparison
    from kinject.eval.scores import Score
    from kinject.export import ExportResult
    from kinject.heap.collect import DocumentsResult
    from kinject.plan.run import Plan
    from kinject.recipe import (
        AugmentRecipe,
        DocumentsSection,
        EvalRecipe,
        QuestionsRecipe,
        Recipe,
        StudyRecipe,
        TrainRecipe,
    )
    from kinject.recipe.read import Verb
    from kinject.results import Report
    from kinject.tune import BatchResult, RangeTest
    from kinject.types import TrainResult

    AnyRecipe = TypeVar("AnyRecipe", bound=Recipe)


def _checked(recipe: AnyRecipe | str | Path, verb: Verb) -> AnyRecipe:
    """Return the recipe, read for the verb if it is a path."""
    from kinject.recipe import read_recipe
    from kinject.sandbox import write_missing_inputs

    if not isinstance(recipe, str | Path):
        return recipe
    if verb in ("train", "eval"):
        # No recipe makes the sandbox's own texts: without this, train after augment failed in an
        # empty folder.
        write_missing_inputs(Path(recipe))
    checked: AnyRecipe = read_recipe(recipe, verb=verb)
    return checked


def runs(folder: str | Path = ".") -> list[FoundRun]:
    """Return the runs in a folder, each with its state and the command that continues it, as bare
    ``kinject`` shows them.

    [run.command for run in kinject.runs() if run.state == "unfinished"]
    """
    from kinject.disk import find_runs

    return find_runs(Path(folder))


def try_(
    documents: str | Path,
    *,
    endpoint: str | None = None,
    model: str | None = None,
    everything: bool = False,
    gpu: str | None = None,
    memory: str | None = None,
) -> Survey:
    """Look at a folder of documents and write recipes for it, as ``kinject try``; an endpoint is
    asked for its model's name.

    `model` is planned for a card `gpu` or so much `memory` ("24": GiB; default: this machine's
    GPU). What earlier calls chose for the folder stays. Runs and recipes of kinject in the folder,
    and wheels, are left out, unless `everything` is read.

    kinject.try_("handbook/").to_frame()
    """
    from kinject.augment.survey import own_files, try_documents
    from kinject.heap.parse import check_sources
    from kinject.recipe.own import hold_recipes

    if Path(documents).is_dir():
        # Before the folder of the run is made: of an empty one nothing stays.
        check_sources([Path(documents)])
    with hold_recipes(Path(documents)) as own:
        own.choose(endpoint=endpoint, model=model, gpu=gpu, memory=memory)
        learner = None
        if own.choices.model is not None:
            # Before the documents are read: a model that does not fit should cost nobody minutes.
            from kinject.plan.own import find_learner

            learner = find_learner(own.choices.model, own.choices.gpu, own.choices.memory)
        left_out = () if everything else own_files(Path(documents))
        return try_documents(Path(documents), own, learner, left_out)


def documents(
    *paths: str | Path,
    run_dir: str | Path | None = None,
    options: DocumentsSection | None = None,
    merge_shards: bool = False,
) -> DocumentsResult:
    """Collect folders, patterns or files into documents.jsonl; see `kinject documents`.

    `run_dir` is the folder of the results (None: runs/NAME/documents), `options` are those of a
    recipe's section documents. With `merge_shards` its shards have parsed the files
    (`documents_shard`).

    kinject.documents("handbook/").to_frame()
    """
    from kinject.heap.collect import collect, merge_parsed
    from kinject.recipe import DocumentsSection

    sources, folder = _heap(paths, run_dir)
    if merge_shards:
        return merge_parsed(sources, options or DocumentsSection(), folder)
    return collect(sources, options, folder)


def documents_shard(
    *paths: str | Path,
    shard: str,
    run_dir: str | Path | None = None,
    options: DocumentsSection | None = None,
) -> dict[str, int]:
    """Parse the files of a shard ("2/8"); return how many these are, and how many were new.

    kinject.documents_shard("handbook/", shard="1/2")
    """
    from kinject.heap.collect import parse_shard_of
    from kinject.recipe import DocumentsSection
    from kinject.shards import parse_shard

    sources, folder = _heap(paths, run_dir)
    return parse_shard_of(sources, options or DocumentsSection(), folder, parse_shard(shard))


def _heap(paths: Sequence[str | Path], run_dir: str | Path | None) -> tuple[list[Path], Path]:
    """Return the sources of documents and the folder of the results."""
    from kinject.disk import file_name
    from kinject.heap.collect import refuse_other_sources
    from kinject.heap.parse import heap_name

    if not paths:
        raise InputError("no path given. For example: kinject documents handbook/")
    sources = [Path(path) for path in paths]
    if run_dir is not None:
        return sources, Path(run_dir)
    folder = Path("runs") / file_name(heap_name(sources)) / "documents"
    refuse_other_sources(folder, sources)
    return sources, folder


def augment(
    recipe: AugmentRecipe | str | Path, *, shard: str | None = None, merge_shards: bool = False
) -> AugmentResult:
    """Rewrite documents into a corpus; a rerun requests only missing texts.

    `shard` ("2/8") is the part to do, `merge_shards` makes the corpus of all parts.

    kinject.augment("recipes/augment.yaml").to_frame()
    """
    from kinject.augment.run import augment as run
    from kinject.augment.run import merge_variants
    from kinject.shards import parse_shard

    checked: AugmentRecipe = _checked(recipe, "augment")
    if merge_shards:
        return merge_variants(checked)
    return run(checked, parse_shard(shard))


def questions(
    recipe: QuestionsRecipe | str | Path,
    *,
    retry: bool = False,
    shard: str | None = None,
    merge_shards: bool = False,
) -> QuestionsResult:
    """Write multiple-choice questions on documents; `retry` asks again where there are too few.

    `shard` and `merge_shards` are those of `augment`.

    kinject.questions("recipes/questions.yaml")
    """
    from kinject.augment.questions import make_questions, merge_questions
    from kinject.shards import parse_shard

    checked: QuestionsRecipe = _checked(recipe, "questions")
    if merge_shards:
        return merge_questions(checked)
    return make_questions(checked, retry=retry, shard=parse_shard(shard))


def styles(recipe: AugmentRecipe | str | Path | None = None) -> Mapping[str, str]:
    """Return the styles of rewriting with a line about each: the shipped ones, and those that a
    recipe names.

    kinject.styles()["paraphrase"]
    """
    from kinject.augment.styles import read_styles

    files = () if recipe is None else _checked(recipe, "augment").augment.style_files
    return {name: style.about for name, style in read_styles(files).items()}


def train(
    recipe: TrainRecipe | str | Path, *, resume: bool = False, overwrite: bool = False
) -> TrainResult:
    """Train a model on a corpus. A finished run is not repeated. See `kinject.train.run.run` for
    the errors.

    kinject.train("recipes/cpt.yaml").model_dir
    """
    from kinject.train import train as run

    return run(_checked(recipe, "train"), resume=resume, overwrite=overwrite)


def merge(
    base: str | Path,
    tuned: str | Path,
    alphas: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    out: str | Path | None = None,
) -> dict[float, Path]:
    """Average a trained model with its base; return the folder of each fraction `alphas` of the
    trained one.

    `out` is the folder of the results (None: merged, beside the trained model).

        kinject.merge("base/model", "runs/cpt/model", [0.5])
    """
    from kinject.train.merge import merge as run

    folder = Path(tuned).parent / "merged" if out is None else Path(out)
    return run(str(base), str(tuned), sorted(set(alphas)), folder)


def export(folder: str | Path, **options: Any) -> ExportResult:
    """Make the run, model or adapter in `folder` ready for use elsewhere; `options` are those of
    `kinject.export.ExportOptions`.

    kinject.export("runs/cpt", report="runs/eval", license="apache-2.0").commands
    """
    from kinject.export import ExportOptions
    from kinject.export import export as run

    paths = {
        key: Path(options[key])
        for key in ("out", "report", "prove")
        if options.get(key) is not None
    }
    copies = options.pop("copies", ())
    # A text is one copy, and no tuple of its letters.
    if isinstance(copies, str):
        copies = (copies,)
    return run(ExportOptions(Path(folder), **{**options, **paths}, copies=tuple(copies)))


def evaluate(recipe: EvalRecipe | str | Path, *, merge_shards: bool = False) -> Report:
    """Ask every model of the recipe every question, and write the report into the run folder.

    With `merge_shards` the answers are those of the shards (`evaluate_shard`). See
    `kinject.eval.run.evaluate` for the errors. Of several processes the first one writes the
    report.

        kinject.evaluate("recipes/eval.yaml").to_frame()
    """
    from kinject.eval.run import evaluate as run
    from kinject.eval.run import merge_answers
    from kinject.report.files import write_report

    checked: EvalRecipe = _checked(recipe, "eval")
    if merge_shards:
        return merge_answers(checked, draw=write_report)
    return run(checked, draw=write_report)


def evaluate_shard(recipe: EvalRecipe | str | Path, shard: str) -> int:
    """Answer the questions of a shard ("2/8") of the recipe; return the number of answers.

    kinject.evaluate_shard("recipes/eval.yaml", "1/2")
    """
    from kinject.eval.run import evaluate_shard as run
    from kinject.shards import parse_shard

    checked: EvalRecipe = _checked(recipe, "eval")
    return run(checked, parse_shard(shard))


def compare(*runs: str | Path, score: Score = "sum") -> Comparison:
    """Compare runs question by question with the first: run folders of kinject eval.

    kinject.compare("runs/eval-before", "runs/eval-after").to_frame()
    """
    from kinject.eval.compare import Comparison, compare_runs, read_run

    return Comparison(tuple(compare_runs([read_run(Path(run), score) for run in runs])))


def study(
    recipe: StudyRecipe | str | Path, *, jobs: int | str | None = None, slurm: Sequence[str] = ()
) -> Report:
    """Run the unfinished stages of a study, and write its report. `jobs` is the number of worker
    processes, or slurm; `slurm` holds options of sbatch, as train.gpus=1.

    kinject.study("recipes/studies/sandbox-quick.yaml").to_frame()
    """
    from kinject.study.run import run_study
    from kinject.study.slurm import executor_of

    return run_study(_checked(recipe, "study"), executor_of(jobs, slurm))[0]


def report(run_dir: str | Path) -> Path:
    """Draw the report of an evaluation or a study again; return the page's path.

    kinject.report("runs/eval")
    """
    from kinject.disk import refuse_outside_links
    from kinject.report.files import read_report, write_report

    refuse_outside_links(Path(run_dir))
    return write_report(Path(run_dir), read_report(Path(run_dir) / "report.json"))


def read_report(path: str | Path) -> Report:
    """Return the results in the report.json of an evaluation or a study.

    kinject.read_report("runs/eval/report.json").to_frame()
    """
    from kinject.report.files import read_report as read

    return read(Path(path))


def plan(recipe: TrainRecipe | str | Path, **options: Any) -> Plan:
    """Estimate memory, time and disk of a training run; `options` are those of
    `kinject.plan.run.plan`.

    Without devices, this machine's. `memory` may be a text ("24GiB"). `calibration` times a few
    real steps.

        kinject.plan("recipes/cpt.yaml", calibration=False).fits
    """
    from kinject.plan.run import plan as run
    from kinject.plan.ways import parse_memory

    if options.get("memory") is not None:
        options["memory"] = parse_memory(options["memory"])
    return run(_checked(recipe, "plan"), **options)


def find_lr(
    recipe: TrainRecipe | str | Path, *, low: float = 1e-6, high: float = 1.0, steps: int = 100
) -> RangeTest:
    """Find a learning rate by a range test from `low` to `high`; write its plot, find-lr/lr.png in
    the run folder.

    kinject.find_lr("recipes/cpt.yaml").suggestion
    """
    from kinject.tune import Ramp
    from kinject.tune import find_lr as run

    return run(_checked(recipe, "train"), Ramp(low, high, steps))[0]


def find_batch(recipe: TrainRecipe | str | Path, *, memory: int | str | None = None) -> BatchResult:
    """Find the largest batch that fits into `memory`: bytes, or "8GiB" (None: the GPU's, or what is
    free here).

    kinject.find_batch("recipes/cpt.yaml").batch
    """
    from kinject.plan.ways import parse_memory
    from kinject.tune import find_batch as run

    limit = None
    if memory is not None:
        limit = parse_memory(memory)
    return run(_checked(recipe, "train"), limit)


def doctor(*recipes: str | Path, offline: bool = False) -> Checkup:
    """Check this machine, and what keeps the recipes (files or folders) from running here.

    kinject.doctor("recipes", offline=True).to_frame()
    """
    from kinject.doctor import examine

    return examine(recipe_files(recipes), offline=offline)


def check(*recipes: str | Path) -> dict[str, KinjectError | None]:
    """Check whole recipes (files or folders; those of accelerate are left out); return file -> its
    faults, None without any.

    assert not any(kinject.check("recipes").values())
    """
    from kinject.recipe.yaml_lines import read_yaml

    named = {Path(path) for path in recipes}
    faults: dict[str, KinjectError | None] = {}
    for file in recipe_files(recipes):
        try:
            if file not in named and "compute_environment" in read_yaml(file).root:
                continue  # accelerate checks its own configuration files
            _check_one(file)
            faults[str(file)] = None
        except KinjectError as error:
            faults[str(file)] = error
    return faults


def recipe_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the recipes at `paths`, files or folders. Raises `InputError` if there is none."""
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.rglob("*.yaml")) if path.is_dir() else [path])
    ]
    if paths and not files:
        raise InputError(f"{paths[0]}: no recipes (*.yaml) there. Give a file or a folder.")
    return files


def _check_one(file: Path) -> None:
    from kinject.augment.plan import check_sections
    from kinject.eval.plan import check_section
    from kinject.recipe import read_recipe
    from kinject.study.arms import check_names, expand_arms
    from kinject.study.planner import check_recipes

    recipe = read_recipe(file)
    check_sections(recipe)
    check_section(recipe)
    if {"model", "corpus", "trainer"} <= recipe.raw.keys():
        # Here: it imports torch, which takes seconds that other recipes do without.
        from kinject.train.setup import check_training

        # Whether this machine has the kernel is not the recipe's fault; train and doctor say it.
        anywhere = ["model.attention=auto"]
        check_training(read_recipe(file, anywhere, verb="train", check_inputs=False))
    if recipe.study is not None:
        study = read_recipe(file, verb="study", check_inputs=False)
        check_names(study, check_inputs=False)
        check_recipes(study, expand_arms(study.study))
