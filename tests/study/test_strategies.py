"""The study of training strategies: a line for each, with its time, its memory and what it learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from study_samples import make_report

from kinject.recipe import read_recipe
from kinject.report.formatting import View
from kinject.report.result_tables import headline_table
from kinject.report.tables import cost_table
from kinject.results import ArmInfo, Cost
from kinject.study.arms import expand_arms

ROOT = Path(__file__).parents[2]


def test_each_strategy_is_vanilla_with_what_its_name_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = read_recipe(Path("recipes/studies/strategies.yaml")).study
    arms = {arm.name: dict(arm.overrides) for arm in expand_arms(section).arms if arm.trained}
    vanilla = arms.pop("vanilla")
    changed = {
        name: {key for key, value in overrides.items() if vanilla.get(key) != value}
        for name, overrides in arms.items()
    }
    assert {name: keys for name, keys in changed.items() if len(keys) == 1} == {
        "bf16": {"trainer.bf16"}, "checkpointing": {"trainer.gradient_checkpointing"}, "Adafactor": {"trainer.optim"},
        "8-bit AdamW": {"trainer.optim"}, "compile": {"trainer.torch_compile"},
    }  # fmt: skip
    # The same batch in parts, the same tokens in full rows; a rate of its own.
    assert "trainer.gradient_accumulation_steps" in changed["accumulation"]
    parts = arms["accumulation"]
    n_rows = parts["trainer.per_device_train_batch_size"]
    n_rows *= parts["trainer.gradient_accumulation_steps"]
    assert n_rows == vanilla["trainer.per_device_train_batch_size"]
    assert "trainer.packing" in changed["packing"]
    assert changed["LoRA"] == {"adapter", "trainer.learning_rate"}
    single = [keys for name, keys in changed.items() if name not in ("combined", "Adafactor")]
    assert set().union(*single) == changed["combined"]


def test_whole_runs_have_a_plateau_and_keep_the_best_epoch(monkeypatch):
    monkeypatch.chdir(ROOT)
    section = read_recipe(Path("recipes/studies/whole-runs.yaml")).study
    arms = {arm.name: dict(arm.overrides) for arm in expand_arms(section).arms if arm.trained}
    plateau = arms.pop("plateau")
    assert plateau["trainer.lr_scheduler_type"] == "reduce_lr_on_plateau"
    assert plateau["trainer.load_best_model_at_end"] is True
    assert plateau["trainer.eval_strategy"] == plateau["trainer.save_strategy"] == "epoch"
    assert (plateau["trainer.max_steps"], plateau["trainer.num_train_epochs"]) == (-1, 5)
    changed = {
        name: {key: value for key, value in overrides.items() if plateau.get(key) != value}
        for name, overrides in arms.items()
    }
    assert changed == {
        "linear rate": {
            "trainer.lr_scheduler_type": "linear",
            "trainer.lr_scheduler_kwargs": None,
        },
        "last epoch": {"trainer.load_best_model_at_end": False},
    }


def test_time_and_memory_of_each_arm_stand_in_its_table():
    report = make_report()
    names = list(dict.fromkeys(result.arm for result in report.results))
    costs = []
    for i, name in enumerate(names):
        model = report.models[0]
        for seed, gib in ((0, 1.5 + i), (1, 1.25)):
            costs.append(
                Cost(arm=name, model=model, seed=seed, stage="train", seconds=100.0 * (i + 1), tokens=1_000 * (i + 1),
                     peak_bytes=int(gib * 2**30), money=0.0, shared_by=1, written_tokens=0, teacher_tokens=0,
                     work_seconds=40.0 * (i + 1))
            )  # fmt: skip
    arms = tuple(ArmInfo(name, report.models[0], "", True, "", {}, "") for name in names)
    view = View(replace(report, costs=tuple(costs), arms=arms))
    table = cost_table(view)
    for i, row in enumerate(table.lines):
        by_column = dict(zip(table.columns, (cell.text for cell in row), strict=True))
        assert by_column["peak memory"] == f"{1.5 + i:.1f} GiB"
        assert by_column["tokens trained"] == f"{2_000 * (i + 1):,}"
        assert by_column["train"] == f"{200 * (i + 1) // 60} min"
    assert len(table.lines) == len(names)
    accuracies = headline_table(view)
    assert {row[0].text.split("+")[0] for row in accuracies.lines} >= {"base"}
