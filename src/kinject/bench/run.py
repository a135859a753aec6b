"""`kinject bench`: training strategies side by side on one recipe, each run in a process of its own.

A run's id hashes its recipe after overrides, the files that it names, the versions and the machine. Its folder is
``run_dir/runs/ID``; done.json, written last, says that it is finished, so a bench that was stopped goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import yaml

from kinject.bench.pages import write_pages
from kinject.bench.recipes import look_around, machine, recipe_of, steps_of
from kinject.bench.results import LEAST_STEPS, WARM_UP, Bench, Measured, Row, in_order, pace, summarise
from kinject.bench.strategies import (
    COMBINED,
    STRATEGIES,
    Setting,
    Strategy,
    own_strategies,
    parts_of_combined,
)
from kinject.disk import check_output, content_id, lock_dir, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.recipe import TrainRecipe
from kinject.recipe.check import suggestion
from kinject.study.executors import LOG, LocalExecutor
from kinject.study.stages import Stage, drop_output_folders, input_hashes
from kinject.terminal import Progress

_FORMAT = 2
_IMPORTS = ("kinject.bench.imports",)
_ACCURACY = re.compile(r"eval_(.+)_accuracy$")


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for: names of strategies (vanilla is always among them), rounds, steps (None: the recipe's)."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    repeats: int = 3
    steps: int | None = None


@dataclass
class _Run:
    """A bench on its way."""

    recipe: TrainRecipe
    setting: Setting
    steps: int
    machine: str
    measured: list[Measured] = field(default_factory=list)
    broken: dict[str, str] = field(default_factory=dict)


def bench(recipe: TrainRecipe, wanted: Wanted) -> tuple[Bench, Path]:
    """Measure what is missing, write bench.json, bench.md, bench.csv and the figure into the recipe's run_dir.

    Returns the table and the path of bench.md. A strategy that breaks is marked with its reason, the others go on.
    Raises `InputError` for names or numbers out of range and when the vanilla run breaks: all is compared with it.
    """
    chosen = choose_strategies(wanted, recipe)
    run = _Run(recipe, look_around(recipe), steps_of(recipe, wanted.steps), machine())
    running = [item for item in chosen if not item.cannot(run.setting)]
    with lock_dir(recipe.run_dir), _compiling(recipe.run_dir / "compiled"):
        plan = [(number, *item) for number in range(wanted.repeats) for item in order_of(running, number)]
        with Progress("measuring", len(plan), "runs") as progress:
            for number, strategy, copy in plan:
                progress.set_status(strategy.label)
                _measure(run, strategy, number, copy)
                progress.advance()
        found = _table(run, chosen, wanted)
        page = write_pages(recipe.run_dir, found)
    return found, page


def order_of(strategies: Sequence[Strategy], number: int) -> list[tuple[Strategy, int]]:
    """Return the order of round `number`, each strategy with the number of its copy in the round: vanilla comes twice.

    Vanilla stands first; its second run is half a round away, so that what all are compared with was measured near each. The
    others stand elsewhere in each round.
    """
    vanilla, *others = strategies
    at = number % max(1, len(others))
    moved = [(item, 0) for item in (*others[at:], *others[:at])]
    half = (len(moved) + 1) // 2
    return [(vanilla, 0), *moved[:half], (vanilla, 1), *moved[half:]]


def choose_strategies(wanted: Wanted, recipe: TrainRecipe) -> list[Strategy]:
    """Return the strategies in the table's order. Raises `InputError` for what the command line may not ask."""
    brought = (*STRATEGIES[1:], COMBINED) if recipe.bench.built_in else ()
    every = (STRATEGIES[0], *brought, *own_strategies(recipe))
    names = [item.name for item in every]
    for option, given in (("--only", wanted.only), ("--skip", wanted.skip)):
        for name in given:
            if name not in names:
                raise InputError(f"{option}: found {name!r}.{suggestion(name, names)}")
    if "vanilla" in wanted.skip:
        raise InputError("--skip: vanilla is what all others are compared with. Leave it in.")
    if not 1 <= wanted.repeats <= 100:
        raise InputError(f"--repeats: found {wanted.repeats}, allowed: 1 to 100.")
    if wanted.steps is not None and wanted.steps < LEAST_STEPS:
        raise InputError(
            f"--steps: found {wanted.steps}, allowed: {LEAST_STEPS} or more (the first {WARM_UP} are told apart)."
        )
    kept = [item for item in every if item.name == "vanilla" or not wanted.only or item.name in wanted.only]
    return [item for item in kept if item.name not in wanted.skip]


def _measure(run: _Run, strategy: Strategy, number: int, copy: int) -> None:
    """Do one run where it is not done, and note what it measured, or why it broke."""
    if strategy.name in run.broken:
        return
    stage = _stage(run, strategy, number, copy)
    done = stage.read_done()
    if done is None:
        on_cpu = run.setting.device == "cpu"
        with LocalExecutor(1, _n_gpus(run.setting.device), _IMPORTS if on_cpu else ()) as executor:
            executor.submit(stage)
            (outcome,) = executor.wait()
        if outcome.done is None:
            why = f"{outcome.error} (its log: {stage.folder / LOG})"
            if strategy.name == "vanilla":
                raise InputError(f"the vanilla run broke: {why}")
            run.broken[strategy.name] = why
            return
    shutil.rmtree(stage.folder / "model", ignore_errors=True)
    run.measured.append(read_run(stage.folder, strategy.name, number))
    if run.setting.row_tokens is None:  # vanilla comes first in the first round
        run.setting = replace(run.setting, row_tokens=_row_tokens(stage.folder, run.setting.batch))


def _stage(run: _Run, strategy: Strategy, number: int, copy: int) -> Stage:
    values = recipe_of(run.recipe, strategy, run.setting, run.steps, run.recipe.seed + number)
    cache_dir = run.recipe.run_dir / "runs"
    read = drop_output_folders(values)
    identity = content_id(_FORMAT, run.machine, copy, read, input_hashes(read, cache_dir))
    folder, path = cache_dir / identity, cache_dir / f"{identity}.yaml"
    write_text(path, yaml.safe_dump({"run_dir": str(folder), **values}, sort_keys=False, allow_unicode=True))
    return Stage(
        identity,
        "train",
        folder,
        str(path),
        (),
        label=f"{strategy.label}, round {number + 1}{', again' if copy else ''}",
    )


def _n_gpus(device: str) -> int:
    """Return 1 where a run must be kept to one GPU: of several, transformers would take all."""
    return int(device == "cuda" and not os.environ.get("CUDA_VISIBLE_DEVICES"))


def _row_tokens(folder: Path, batch: int) -> float:
    """Return the mean tokens of a row of an unpacked run: its corpus over its rows, which its epochs tell."""
    manifest = read_manifest(folder / "manifest.json")
    assert manifest is not None
    counts = manifest["counts"]
    return float(counts["tokens"]["source"] * counts["epochs"] / (counts["steps"] * batch))


def read_run(folder: Path, strategy: str, number: int) -> Measured:
    """Return what a finished run measured. Raises `InputError` when its files are damaged."""
    paths = (folder / "timing.jsonl", folder / "log.jsonl")
    for path in paths:
        check_output(path, f"Delete {folder} to measure it again.")
    timing, log = ([row for _, row in read_jsonl(path)] for path in paths)
    if len(timing) < LEAST_STEPS:
        raise InputError(f"{folder}: its timing.jsonl has {len(timing)} steps. Delete the folder to measure it again.")
    start, end = timing[WARM_UP - 1], timing[-1]
    steps = [
        (after["seconds"] - before["seconds"], after["learned_tokens"] - before["learned_tokens"])
        for before, after in pairwise(timing[WARM_UP - 1 :])
    ]
    accuracy = {match[1]: value for row in log for key, value in row.items() if (match := _ACCURACY.match(key))}
    return Measured(
        strategy=strategy, round=number, seconds=1000 * pace(steps),
        first_seconds=start["seconds"], peak_bytes=end["peak_bytes"], tokens=end["learned_tokens"],
        loss=next(row["loss"] for row in reversed(log) if "loss" in row), accuracy=accuracy,
    )  # fmt: skip


def _table(run: _Run, chosen: Sequence[Strategy], wanted: Wanted) -> Bench:
    vanilla = [item for item in run.measured if item.strategy == "vanilla"]
    rows = []
    for strategy in chosen:
        reason = strategy.cannot(run.setting)
        changes = {} if reason else strategy.change({}, run.setting)
        about = strategy.about
        if strategy is COMBINED:
            about = " + ".join(parts_of_combined(run.setting))
        row = Row(strategy.name, strategy.label, about, changes, reason or run.broken.get(strategy.name, ""))
        rows.append(summarise(row, [item for item in run.measured if item.strategy == strategy.name], vanilla))
    return Bench(
        recipe=str(run.recipe.path), device=run.machine, rows=tuple(in_order(rows)),
        sets=tuple(run.measured[0].accuracy), repeats=wanted.repeats, steps=run.steps,
        notes=tuple(_notes(run, wanted)), failed=len(run.broken),
    )  # fmt: skip


def _notes(run: _Run, wanted: Wanted) -> list[str]:
    memory = (
        "what torch's allocator gave out on the GPU" if run.setting.device == "cuda"
        else "the process's resident set up to its last step, with Python, libraries and the loading of the model"
    )  # fmt: skip
    said = [
        "time: seconds for 1,000 learned tokens at the lower quartile of the steps, since what a machine does beside only holds "
        f"steps up; start-up and the first {WARM_UP} steps stand apart (the longest of the rounds: torch.compile compiles in "
        "the first, for rows of any length; later rounds find its cache)",
        f"memory: {memory}",
        "shares are of the vanilla runs of the same round, of which there are two; intervals are 95% (Student's t over "
        "rounds, shares on the log scale); spread is the range of the time shares over their mean, vanilla's how far its "
        "two runs of a round lie apart: what this machine's noise is",
        f"rounds: {wanted.repeats}, of {run.steps} optimizer steps a run; a round's runs share a seed, and their order "
        "changes from round to round",
    ]
    if wanted.steps is None and int(run.recipe.trainer.get("max_steps", -1)) <= 0:
        said.append(f"the recipe sets no trainer.max_steps: {run.steps} were taken (--steps)")
    return said


@contextlib.contextmanager
def _compiling(folder: Path) -> Iterator[None]:
    """Let torch.compile keep what it makes in `folder`, so that the first round is one without it, and make it once.

    Rows differ in length: left to itself, torch compiles for the first batch's length, then for any.
    """
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(folder.absolute()), "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
