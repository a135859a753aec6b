"""Stages in the order of their needs, each once; what fails stops only what needs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinject.study.executors import Executor
from kinject.study.stages import Stage
from kinject.terminal import Progress


@dataclass
class StageStatus:
    """What became of stages, by id: what they counted, or why they are missing; `fresh` ran in this process."""

    done: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    fresh: set[str] = field(default_factory=set)
    stages: dict[str, Stage] = field(default_factory=dict)

    def all_done(self, stages: Sequence[Stage]) -> bool:
        """Return whether all of `stages` are done."""
        return all(stage.id in self.done for stage in stages)

    def first_failure(self, stages: Sequence[Stage]) -> tuple[Stage, str] | None:
        """Return the first of `stages` that failed, with its reason; None where none did."""
        return next(((stage, self.failed[stage.id]) for stage in stages if stage.id in self.failed), None)


def schedule_stages(stages: Sequence[Stage], status: StageStatus, executor: Executor | None, what: str) -> None:
    """Do those of `stages` that are not done, as soon as their needs are; note what came of them in `status`.

    A stage whose need failed is not started and has no entry of its own. `executor` None: only look at what is done.
    """
    waiting: dict[str, Stage] = {}
    for stage in stages:
        status.stages[stage.id] = stage
        if stage.id in status.done or stage.id in status.failed:
            continue
        found = stage.done()
        if found is not None:
            status.done[stage.id] = found
        else:
            waiting.setdefault(stage.id, stage)
    if not waiting or executor is None:
        return
    running: set[str] = set()
    with Progress(what, len(waiting), "stages") as progress:
        while waiting or running:
            for stage in _ready(waiting, status):
                if not executor.has_room(stage):
                    break
                executor.submit(waiting.pop(stage.id))
                running.add(stage.id)
                progress.set_status(stage.label)
            if not running:
                break  # what is left needs something that failed
            for outcome in executor.wait():
                running.discard(outcome.stage.id)
                if outcome.done is None:
                    status.failed[outcome.stage.id] = outcome.error
                else:
                    status.done[outcome.stage.id] = outcome.done
                    status.fresh.add(outcome.stage.id)
                progress.advance()


def _ready(waiting: Mapping[str, Stage], status: StageStatus) -> list[Stage]:
    return [stage for stage in waiting.values() if all(need in status.done for need in stage.needs)]
