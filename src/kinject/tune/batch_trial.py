"""One trial of `kinject find-batch`, in a process of its own: two updates at one batch on the longest rows.

``python -m kinject.tune.batch_trial JOB``: JOB is a JSON file with `recipe` (a YAML file), `batch` and `result` (the
JSON file that this process writes last: peak_bytes, and out_of_memory where the GPU refused).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import write_json


@dataclass(frozen=True)
class Longest:
    """The rows of a dataset, the longest first, `n_rows` of them: over and over where there are fewer."""

    rows: Any
    n_rows: int

    def __post_init__(self) -> None:
        lengths = self.rows.rows.lengths().tolist()
        order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        object.__setattr__(self, "_order", order)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        order: list[int] = self._order  # type: ignore[attr-defined]
        row: dict[str, Any] = self.rows[order[index % len(order)]]
        return row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def main(path: Path) -> None:
    """Do the trial that the job file at `path` says."""
    job = json.loads(path.read_bytes())
    import torch

    from kinject.process import peak_memory
    from kinject.recipe import read_recipe
    from kinject.train.setup import make_trainer

    device, refused = "cpu", False
    try:
        trainer = make_trainer(read_recipe(Path(job["recipe"]), verb="train"))
        device = trainer.args.device.type
        trainer.train_dataset = Longest(trainer.train_dataset, trainer.args.max_steps * job["batch"])
        trainer.rounds = ()
        trainer.train()
    except torch.OutOfMemoryError:
        device, refused = "cuda", True
    write_json(Path(job["result"]), {"peak_bytes": peak_memory(device), "out_of_memory": refused})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
