"""timing.jsonl: what training took so far, at each logged step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kinject.disk import read_jsonl
from kinject.recipe import Recipe
from kinject.train import train


def test_tokens_of_an_epoch_are_those_of_the_account_however_batches_are_split(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    for accumulation in (1, 2):
        trainer = {
            "max_steps": -1,
            "num_train_epochs": 1,
            "packing": False,
            "gradient_accumulation_steps": accumulation,
        }
        result = train(make_recipe(run_dir=str(tmp_path / f"run-{accumulation}"), trainer=trainer))
        rows = [row for _, row in read_jsonl(Path(result.run_dir) / "timing.jsonl")]
        assert [row["step"] for row in rows] == list(range(1, result.n_steps + 1))
        assert rows[-1]["learned_tokens"] == result.account["trained"]
        for key in ("seconds", "learned_tokens", "peak_bytes"):
            values = [row[key] for row in rows]
            assert values == sorted(values)
            assert values[0] > 0
