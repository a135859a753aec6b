"""An executor for tests: each stage at once, in this process."""

from __future__ import annotations

from kinject.errors import InputError
from kinject.executors import Outcome, error_line
from kinject.study.stages import Stage, run_stage


class InProcess:
    """Does stages at once, here; keeps what it was given. `stop_after` interrupts as Ctrl-C would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.submitted: list[Stage] = []
        self.outcomes: list[Outcome] = []
        self.stop_after = stop_after

    def has_room(self) -> bool:
        return not self.outcomes

    def submit(self, stage: Stage) -> None:
        if len(self.submitted) == self.stop_after:
            raise KeyboardInterrupt
        self.submitted.append(stage)
        stage.folder.mkdir(parents=True, exist_ok=True)
        try:
            self.outcomes.append(Outcome(stage, run_stage(stage)))
        except InputError as error:
            self.outcomes.append(Outcome(stage, None, error_line(error)))

    def wait(self) -> list[Outcome]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None
