"""`kinject bench`: compares training strategies on one recipe, each run in a process of its own.

A run's recipe is the user's own with every technique off and one strategy on. The run's id hashes that recipe, the files it
names, the versions and the machine. Its folder is ``run_dir/runs/ID``; done.json, written last, marks it as finished, so a
stopped bench resumes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from kinject.bench.results import (
    MIN_STEPS,
    WARM_UP,
    BenchResult,
    Measurement,
    StrategyResult,
    pace,
    sort_rows,
    summarize,
    write_pages,
)
from kinject.bench.strategies import (
    BATCH,
    COMBINED,
    STRATEGIES,
    VANILLA,
    Setting,
    Strategy,
    combined_labels,
    count_devices,
    custom_strategies,
    device_strategies,
    has_bf16_autocast,
    has_compiler,
)
from kinject.disk import check_output, content_id, lock_dir, read_jsonl, read_manifest, write_text
from kinject.errors import InputError
from kinject.executors import CPU_PRELOAD, LOG, LocalExecutor
from kinject.process import core_count
from kinject.recipe import TrainRecipe
from kinject.recipe.check import suggestion
from kinject.study.arms import drop_output_folders, nest_overrides
from kinject.study.stages import Stage, input_hashes
from kinject.terminal import Progress
from kinject.train.short_run import short_fields

_FORMAT = 3
_DEFAULT_STEPS = 12
"""Optimizer steps if neither the command line nor the recipe sets them."""
_OTHER_SECTIONS = ("eval", "study", "augment", "questions", "bench")
_ACCURACY = re.compile(r"eval_(.+)_accuracy$")


@dataclass(frozen=True)
class BenchOptions:
    """Options of the command line: names of strategies (vanilla always runs), rounds, and steps (None: the recipe's)."""

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    repeats: int = 3
    steps: int | None = None


@dataclass
class _State:
    """A bench in progress."""

    recipe: TrainRecipe
    setting: Setting
    steps: int | None
    machine: str
    measured: list[Measurement] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)


def bench(recipe: TrainRecipe, options: BenchOptions) -> tuple[BenchResult, Path]:
    """Do the missing runs, write bench.json, bench.md, bench.csv and the figure into run_dir; return (table, bench.md).

    A strategy that fails gets its reason in the table, and the others continue. Raises `InputError` for options out of
    range, and if a vanilla run fails, since all others are compared with it.
    """
    chosen = choose_strategies(options, recipe)
    run = _State(recipe, find_setting(recipe), choose_steps(recipe, options.steps), describe_machine())
    running = [item for item in chosen if not item.unavailable(run.setting)]
    with lock_dir(recipe.run_dir), _compile_cache(recipe.run_dir / "compiled"):
        plan = [(number, *item) for number in range(options.repeats) for item in order_round(running, number)]
        with Progress("measuring", len(plan), "runs") as progress:
            for number, strategy, copy in plan:
                progress.set_status(strategy.label)
                _measure(run, strategy, number, copy)
                progress.advance()
        table = _make_table(run, chosen, options)
        page = write_pages(recipe.run_dir, table)
    return table, page


def order_round(strategies: Sequence[Strategy], number: int) -> list[tuple[Strategy, int]]:
    """Return the order of round `number`: (strategy, its copy in the round); vanilla runs twice.

    Vanilla runs first and again after half the round, so that every strategy has a reference nearby. The order of the others
    changes from round to round.
    """
    vanilla, *others = strategies
    first = number % max(1, len(others))
    rotated = [(item, 0) for item in (*others[first:], *others[:first])]
    half = (len(rotated) + 1) // 2
    return [(vanilla, 0), *rotated[:half], (vanilla, 1), *rotated[half:]]


def choose_strategies(options: BenchOptions, recipe: TrainRecipe) -> list[Strategy]:
    """Return the chosen strategies in the table's order. Raises `InputError` for options out of range."""
    built_in = (*STRATEGIES[1:], COMBINED) if recipe.bench.built_in else ()
    every = (STRATEGIES[0], *built_in, *device_strategies(recipe), *custom_strategies(recipe))
    names = [item.name for item in every]
    for option, chosen in (("--only", options.only), ("--skip", options.skip)):
        for name in chosen:
            if name not in names:
                raise InputError(f"{option}: found {name!r}.{suggestion(name, names)}")
    if "vanilla" in options.skip:
        raise InputError("--skip: vanilla cannot be skipped, all others are compared with it.")
    if not 1 <= options.repeats <= 100:
        raise InputError(f"--repeats: found {options.repeats}, allowed: 1 to 100.")
    if options.steps is not None and options.steps < MIN_STEPS:
        raise InputError(
            f"--steps: found {options.steps}, allowed: {MIN_STEPS} or more (the first {WARM_UP} are reported apart)."
        )
    if options.steps is not None and recipe.bench.whole_runs:
        raise InputError("--steps: bench.whole_runs gives each run the recipe's own length. Keep one.")
    selected = [item for item in every if item.name == "vanilla" or not options.only or item.name in options.only]
    return [item for item in selected if item.name not in options.skip]


def _measure(run: _State, strategy: Strategy, number: int, copy: int) -> None:
    """Do one run unless it is done, and record its measurement, or the reason of its failure."""
    if strategy.name in run.failures:
        return
    stage = _stage(run, strategy, number, copy)
    counts = stage.read_done()
    if counts is None:
        on_cpu = run.setting.device == "cpu"
        with LocalExecutor(1, _n_gpus(run.setting.device, strategy), CPU_PRELOAD if on_cpu else ()) as executor:
            executor.submit(stage)
            (outcome,) = executor.wait()
        if outcome.result is None:
            reason = f"{outcome.error} (its log: {stage.folder / LOG})"
            if strategy.name == "vanilla":
                raise InputError(f"the vanilla run failed: {reason}")
            run.failures[strategy.name] = reason
            return
    for folder in (stage.folder / "model", *stage.folder.glob("checkpoint-*")):
        shutil.rmtree(folder, ignore_errors=True)
    run.measured.append(read_measurement(stage.folder, strategy.name, number))
    if not run.setting.row_tokens:  # vanilla runs first in the first round
        run.setting = replace(run.setting, row_tokens=_row_tokens(stage.folder, run.setting.batch))


def _stage(run: _State, strategy: Strategy, number: int, copy: int) -> Stage:
    values = run_values(run.recipe, strategy, run.setting, run.steps, run.recipe.seed + number)
    cache_dir = run.recipe.run_dir / "runs"
    hashed = drop_output_folders(values)
    parameters = {"processes": strategy.processes} if strategy.processes > 1 else {}
    identity = content_id(_FORMAT, run.machine, copy, hashed, input_hashes(hashed, cache_dir), *parameters.values())
    folder, path = cache_dir / identity, cache_dir / f"{identity}.yaml"
    write_text(path, yaml.safe_dump({"run_dir": str(folder), **values}, sort_keys=False, allow_unicode=True))
    label = f"{strategy.label}, round {number + 1}{', again' if copy else ''}"
    return Stage(identity, "train", folder, str(path), (), parameters=parameters, label=label)


def _n_gpus(device: str, strategy: Strategy) -> int:
    """Return the number of GPUs to which a run must be limited, 0 without a limit: transformers would use all of several."""
    return strategy.processes if device == "cuda" and not os.environ.get("CUDA_VISIBLE_DEVICES") else 0


def _row_tokens(folder: Path, batch: int) -> float:
    """Return the mean tokens of a row of an unpacked run: tokens of the corpus / rows, which follow from the epochs.

    Raises `InputError` without a manifest.
    """
    counts = _read_counts(folder)
    return float(counts["tokens"]["source"] * counts["epochs"] / (counts["steps"] * batch))


def _read_counts(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder / "manifest.json")
    if manifest is None:
        raise InputError(f"{folder}: its manifest.json is missing. Delete the folder to measure it again.")
    counts: dict[str, Any] = manifest["counts"]
    return counts


def read_measurement(folder: Path, strategy: str, number: int) -> Measurement:
    """Return the measurement of a finished run: accuracies are those of the weights that it ended with.

    Raises `InputError` if its files are damaged.
    """
    paths = (folder / "timing.jsonl", folder / "log.jsonl")
    for path in paths:
        check_output(path, f"Delete {folder} to measure it again.")
    timing, log = ([row for _, row in read_jsonl(path)] for path in paths)
    if len(timing) < MIN_STEPS:
        raise InputError(f"{folder}: its timing.jsonl has {len(timing)} steps. Delete the folder to measure it again.")
    start, end = timing[WARM_UP - 1], timing[-1]
    steps = [
        (after["seconds"] - before["seconds"], after["learned_tokens"] - before["learned_tokens"])
        for before, after in pairwise(timing[WARM_UP - 1 :])
    ]
    counts = _read_counts(folder)
    final = log if counts["best_step"] is None else [row for row in log if row["step"] == counts["best_step"]]
    accuracy = {match[1]: value for row in final for key, value in row.items() if (match := _ACCURACY.match(key))}
    return Measurement(
        strategy=strategy, round=number, seconds=1000 * pace(steps),
        first_seconds=start["seconds"], peak_bytes=end["peak_bytes"], tokens=end["learned_tokens"],
        loss=next(row["loss"] for row in reversed(log) if "loss" in row), accuracy=accuracy,
        run_seconds=counts["seconds"],
    )  # fmt: skip


def _make_table(run: _State, chosen: Sequence[Strategy], options: BenchOptions) -> BenchResult:
    vanilla = [item for item in run.measured if item.strategy == "vanilla"]
    rows = []
    for strategy in chosen:
        reason = strategy.unavailable(run.setting)
        changes = {} if reason else strategy.overrides({}, run.setting)
        description = " + ".join(combined_labels(run.setting)) if strategy is COMBINED else strategy.description
        row = StrategyResult(
            strategy.name, strategy.label, description, changes, reason or run.failures.get(strategy.name, "")
        )
        rows.append(summarize(row, [item for item in run.measured if item.strategy == strategy.name], vanilla))
    return BenchResult(
        recipe=str(run.recipe.path), device=run.machine, rows=tuple(sort_rows(rows)),
        question_sets=tuple(dict.fromkeys(name for item in run.measured for name in item.accuracy)),
        repeats=options.repeats, steps=run.steps,
        notes=tuple(_notes(run, options)), n_failed=len(run.failures),
    )  # fmt: skip


def _notes(run: _State, options: BenchOptions) -> list[str]:
    memory = (
        "peak of torch's allocator on the GPU" if run.setting.device == "cuda"
        else "peak resident set of the process up to its last step, including Python, libraries and loading the model"
    )  # fmt: skip
    length = "the recipe's own length" if run.steps is None else f"{run.steps} optimizer steps a run"
    notes = [
        "time: seconds for 1,000 learned tokens at the lower quartile of the steps, since other work on a machine only slows "
        f"steps down; start-up and the first {WARM_UP} steps are reported apart (the longest of the rounds: torch.compile "
        "compiles in the first, for rows of any length; later rounds use its cache)",
        f"memory: {memory}",
        "ratios are to the two vanilla runs of the same round; intervals are 95% (Student's t over rounds, ratios on the log "
        "scale); spread is the range of the time ratios divided by their mean, for vanilla the difference between its two "
        "runs of a round: the noise of this machine",
        f"rounds: {options.repeats}, of {length}; the runs of a round share a seed, and their order "
        "changes from round to round",
    ]
    if run.steps is not None and options.steps is None and int(run.recipe.trainer.get("max_steps", -1)) <= 0:
        notes.append(f"the recipe sets no trainer.max_steps: {run.steps} were used (--steps)")
    return notes


@contextlib.contextmanager
def _compile_cache(folder: Path) -> Iterator[None]:
    """Let torch.compile cache in `folder`, so that only the first round compiles, and compile once for all row lengths.

    By default torch compiles for the length of the first batch, then again for any length.
    """
    variables = {"TORCHINDUCTOR_CACHE_DIR": str(folder.absolute()), "ACCELERATE_DYNAMO_USE_DYNAMIC": "true"}
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def find_setting(recipe: TrainRecipe) -> Setting:
    """Return the setting of `recipe` on this machine."""
    from kinject.models import choose_device

    device = "cpu" if recipe.trainer.get("use_cpu") else choose_device(recipe.model.device)
    return Setting(
        device=device, batch=int(recipe.trainer.get(BATCH.split(".")[1], 8)),
        block=recipe.trainer.get("max_length", 1024) or 0,
        packing_strategy=recipe.trainer.get("packing_strategy", "bfd_split"), adapter=recipe.adapter,
        bf16=has_bf16_autocast(device), compiler=has_compiler(device), n_devices=count_devices(device),
        bitsandbytes=importlib.util.find_spec("bitsandbytes") is not None,
    )  # fmt: skip


def run_values(
    recipe: TrainRecipe, strategy: Strategy, setting: Setting, steps: int | None, seed: int
) -> dict[str, Any]:
    """Return the values of the train recipe of one run, without run_dir: the recipe, vanilla, then the strategy.

    Questions are those of the recipe's probes, or of its eval section. They are scored once, after the last step; with
    `steps` None, a whole run, when the recipe evaluates, or after each epoch.
    """
    values = {key: value for key, value in recipe.raw.items() if key not in (*_OTHER_SECTIONS, "run_dir")}
    values["trainer"] = {key: list(item) if isinstance(item, tuple) else item for key, item in recipe.trainer.items()}
    values["seed"] = seed
    probes = _probe_values(recipe, whole_run=steps is None)
    if probes is not None:
        values["probes"] = probes
    if steps is None:
        fields = {"logging_strategy": "steps", "logging_steps": 1, "report_to": "none"}
        if probes is not None and recipe.trainer.get("eval_strategy", "no") == "no":
            fields["eval_strategy"] = "epoch"
    else:
        values["corpus"] = {key: item for key, item in values["corpus"].items() if key != "validation_fraction"}
        fields = short_fields(steps) | ({"eval_strategy": "steps", "eval_steps": steps} if probes is not None else {})
    overrides = {**VANILLA, **{f"trainer.{key}": value for key, value in fields.items()}}
    overrides |= strategy.overrides({}, setting)
    return _merge(values, nest_overrides(overrides))


def _probe_values(recipe: TrainRecipe, *, whole_run: bool) -> dict[str, Any] | None:
    if recipe.probes is not None and whole_run:
        return dict(recipe.raw["probes"])
    if recipe.probes is not None:
        return {key: value for key, value in recipe.raw["probes"].items() if key not in ("patience", "max_forgetting")}
    if recipe.eval is None:
        return None
    sets: dict[str, Any] = {}
    for name, item in recipe.eval.questions.items():
        probe = (
            {"path": item} if isinstance(item, str) else {"path": item.path, "role": item.role, "layout": item.layout}
        )
        if not probe["path"].endswith((".yaml", ".yml")):  # only kinject eval reads tasks of the harness
            sets[name] = probe
    return {"questions": sets} if sets else None


def _merge(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with those of `more` merged in by section; an adapter replaces the whole section."""
    merged = dict(values)
    for key, value in more.items():
        below = merged.get(key)
        deeper = isinstance(value, Mapping) and isinstance(below, Mapping) and key != "adapter"
        merged[key] = _merge(below, value) if deeper else value  # type: ignore[arg-type]
    return merged


def choose_steps(recipe: TrainRecipe, steps: int | None) -> int | None:
    """Return the steps of every run: as given, else the recipe's, else a default; None for whole runs."""
    if recipe.bench.whole_runs:
        return None
    max_steps = int(recipe.trainer.get("max_steps", -1))
    return steps or max(max_steps if max_steps > 0 else _DEFAULT_STEPS, MIN_STEPS)


def describe_machine() -> str:
    """Return host, cores, device and library versions: a measurement is valid only for these."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "kinject"))
    return f"{platform.node()}, {platform.machine()}, {core_count()} cores, {device}, {libraries}"
