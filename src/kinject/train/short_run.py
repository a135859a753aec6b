"""A few training steps with nothing saved, which `kinject plan` and `kinject find-lr` measure.

``python -m kinject.train.short_run RECIPE [--longest-rows]`` takes the steps in a process of its
own. Its memory can then be measured, and running out of memory ends that process alone.
"""

from __future__ import annotations

import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import yaml

from kinject.disk import Row, parse_row, write_json, write_text
from kinject.errors import KinjectError
from kinject.process import exit_code, peak_memory, resident_memory, terminable
from kinject.recipe import TrainRecipe, read_recipe
from kinject.recipe.read import NOT_TRAINING
from kinject.terminal import Progress, protect_streams, show

RESULT = "result.json"
"""Written last: peak_bytes, and out_of_memory if the GPU refused an allocation."""
LOG = "log.txt"
"""The output of the process."""
_NEEDS_LONG_RUN = (
    "num_train_epochs",
    "metric_for_best_model",
    "greater_is_better",
    "eval_steps",
    "save_steps",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
)
"""Trainer fields that need evaluations or more steps. None of them changes the time or memory of a
step."""
_TECHNIQUES_OFF: Mapping[str, Any] = {
    "freeze_base_steps": None,
    "freeze_base_except": (),
    "patience": None,
    "histogram_steps": None,
}
"""Techniques that need more steps, evaluations or a tracker."""
# A few steps neither read the corpus nor have to learn.
_GUARDS = dict.fromkeys(("nothing_learned", "instability"), "ignore")
_POLL_SECONDS = 0.1

logging.getLogger("bitsandbytes").setLevel(
    logging.ERROR
)  # its import warns of kernels that no run asked for


def short_fields(steps: int) -> dict[str, Any]:
    """Return the trainer fields of a run of `steps` that logs each step and neither evaluates,
    saves nor reports."""
    return {
        "max_steps": steps,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "save_strategy": "no",
        "eval_strategy": "no",
        "eval_on_start": False,
        "load_best_model_at_end": False,
        "metric_for_best_model": None,
        "report_to": "none",
    }


def short_recipe(
    recipe: TrainRecipe,
    run_dir: Path,
    steps: int,
    trainer: Mapping[str, Any],
    guards: Mapping[str, Any] | None = None,
) -> TrainRecipe:
    """Return `recipe` with `steps` optimizer steps in `run_dir` and nothing evaluated or saved.

    `trainer` and `guards` hold further fields; the learning rate is constant unless `trainer` has a
    schedule. Parts that need a longer run are left out: probes, the validation corpus, some
    techniques. The faults of the result name the lines of `recipe`'s file.
    """
    fields = {key: value for key, value in recipe.trainer.items() if key not in _NEEDS_LONG_RUN}
    fields |= {"lr_scheduler_type": "constant", **short_fields(steps), **trainer}
    guards = {**_GUARDS, **(guards or {})}
    raw = {
        key: value
        for key, value in recipe.raw.items()
        if key not in NOT_TRAINING and key != "probes"
    }
    raw["run_dir"] = str(run_dir)
    validation: dict[str, Any] = {"validation_corpus": None, "validation_fraction": 0.0}
    raw["corpus"] = {key: value for key, value in raw["corpus"].items() if key not in validation}
    raw["guards"] = {**recipe.raw.get("guards", {}), **guards}
    if isinstance(raw.get("techniques"), Mapping):
        raw["techniques"] = {
            key: value for key, value in raw["techniques"].items() if key not in _TECHNIQUES_OFF
        }
    raw["trainer"] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }
    return replace(
        recipe,
        run_dir=run_dir,
        trainer=fields,
        probes=None,
        raw=raw,
        guards=replace(recipe.guards, **guards),
        corpus=replace(recipe.corpus, **validation),
        techniques=replace(recipe.techniques, **_TECHNIQUES_OFF),
    )


def run_process(
    recipe: TrainRecipe,
    *,
    longest_rows: bool = False,
    seconds: float = math.inf,
    limit: int | None = None,
    progress: Progress | None = None,
) -> int | None:
    """Take the steps of a `short_recipe` in a process of its own and return its exit code.

    With `longest_rows`, it trains on the longest rows of the corpus. `progress` counts its steps.
    The process is killed, and None returned, after `seconds`, or once its resident memory passes
    `limit` bytes. Its run_dir then holds recipe.yaml, timing.jsonl (a row a step), log.txt, and
    result.json unless the process was killed or failed.
    """
    folder = recipe.run_dir
    folder.mkdir(parents=True, exist_ok=True)
    for name in (RESULT, "timing.jsonl"):
        (folder / name).unlink(missing_ok=True)
    path = folder / "recipe.yaml"
    write_text(path, yaml.safe_dump(dict(recipe.raw), sort_keys=False, allow_unicode=True))
    command = [sys.executable, "-m", "kinject.train.short_run", str(path)]
    command += ["--longest-rows"] if longest_rows else []
    end = monotonic() + seconds
    with (
        (folder / LOG).open("wb") as log,
        # Its input stays empty; when that closes, this process has ended, and the child exits.
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log) as process,
    ):
        try:
            while True:
                try:
                    return process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    if progress is not None:
                        progress.advance(len(read_timing(folder)) - progress.done)
                    over_limit = limit is not None and (resident_memory(process.pid) or 0) > limit
                    if over_limit or monotonic() > end:
                        return None
        finally:
            process.kill()


def last_log_line(run_dir: Path) -> str:
    """Return the last line that the process printed, "" if it printed none."""
    lines = (run_dir / LOG).read_text("utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def read_timing(run_dir: Path) -> list[Row]:
    """Return the rows of timing.jsonl. A last row that a killed process did not finish is left
    out."""
    path = run_dir / "timing.jsonl"
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [
        parse_row(line, f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.endswith(b"\n")
    ]


def main(arguments: Sequence[str]) -> int:
    """Take the steps of the recipe at `arguments[0]` and write `RESULT`; return the exit code."""
    import torch

    from kinject.train.guards import check_updates
    from kinject.train.setup import make_trainer

    device, refused = "cpu", False
    try:
        recipe = read_recipe(Path(arguments[0]), verb="train")
        trainer = make_trainer(recipe)
        device = trainer.args.device.type
        if "--longest-rows" in arguments:
            n_rows = trainer.args.max_steps * trainer.args.per_device_train_batch_size
            order = trainer.train_dataset.rows.lengths().argsort()[::-1].tolist()
            longest = [order[index % len(order)] for index in range(n_rows)]
            # The rounds number the rows of the whole corpus.
            trainer.train_dataset, trainer.rounds = (
                torch.utils.data.Subset(trainer.train_dataset, longest),
                (),
            )
        trainer.train()
        check_updates(
            trainer
        )  # without one the optimizer has no state, and its memory is not measured
    except torch.OutOfMemoryError:
        # Only a GPU raises this, also while the model is loaded, before `device` is known.
        device, refused = "cuda", True
    except KinjectError as error:
        show(error, file=sys.stderr)
        return 2
    write_json(
        recipe.run_dir / RESULT, {"peak_bytes": peak_memory(device), "out_of_memory": refused}
    )
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)  # returns when the parent, which writes nothing, has ended
    os._exit(1)


def program() -> int:
    """Run `main` as a program that `run_process` started; it ends when that process does, however
    it ends."""
    protect_streams()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        with terminable():
            return main(sys.argv[1:])
    except KeyboardInterrupt as stop:
        return exit_code(stop)


if __name__ == "__main__":
    raise SystemExit(program())
