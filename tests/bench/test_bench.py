"""Strategies side by side: paired by round, each on top of the same vanilla, resumed, marked where they cannot run."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
import yaml
from scipy.stats import ttest_1samp

from kinject.bench import results as bench_results
from kinject.bench import run as benching
from kinject.bench.results import (
    BenchResult,
    Estimate,
    Measurement,
    StrategyResult,
    mean_estimate,
    ratio_estimate,
    relative_range,
    render_bench,
    sort_rows,
    summarize,
)
from kinject.bench.run import BenchOptions, bench, choose_strategies, order_round, read_measurement, run_values
from kinject.bench.strategies import COMBINED, LORA, STRATEGIES, Setting, combined_labels
from kinject.cli import main
from kinject.disk import read_jsonl, write_manifest
from kinject.errors import InputError
from kinject.executors import Outcome
from kinject.recipe import Recipe, read_recipe
from kinject.study.stages import Stage, run_stage

CPU = Setting(
    device="cpu", batch=6, block=64, packing_strategy="bfd_split", adapter=None, bf16=True, compiler=True, bitsandbytes=True,
    row_tokens=20.0,
)  # fmt: skip
BY_NAME = {item.name: item for item in (*STRATEGIES, COMBINED)}


class InProcess:
    """Stands in for a worker process: does the stage at once, here. `breaks` names a strategy whose runs break."""

    given: list[str]
    breaks = ""

    def __init__(self, *_: object) -> None:
        self.outcome: Outcome | None = None

    def submit(self, stage: Stage) -> None:
        type(self).given.append(stage.label)
        stage.folder.mkdir(parents=True, exist_ok=True)
        broken = self.breaks and stage.label.startswith(self.breaks)
        try:
            self.outcome = Outcome(stage, None, "out of memory") if broken else Outcome(stage, run_stage(stage))
        except InputError as error:
            self.outcome = Outcome(stage, None, str(error))

    def wait(self) -> list[Outcome]:
        assert self.outcome is not None
        return [self.outcome]

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        return None


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[InProcess]:
    """Runs happen in this process; returns the class that notes them."""
    fresh = type("Fresh", (InProcess,), {"given": [], "breaks": ""})
    monkeypatch.setattr(benching, "LocalExecutor", fresh)
    return fresh


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """A recipe on the tiny model with one question set; keyword arguments add to its trainer section."""
    rows = [{"text": f"Person {i} was born in {['Lowmere', 'Stonegate', 'Farrow', 'Kelm'][i % 4]}."} for i in range(48)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    question = {"question": "Where was Person 1 born?", "choices": ["Lowmere", "Stonegate"], "answer": 1}
    (tmp_path / "questions.jsonl").write_text(json.dumps(question) + "\n")

    def _make(**trainer: Any) -> Recipe:
        values = {
            "run_dir": str(tmp_path / "bench"), "seed": 3, "model": {"path": str(tiny_model)},
            "corpus": {"path": str(tmp_path / "corpus.jsonl"), "cache_dir": str(tmp_path / "tokens")},
            "probes": {"questions": {"town": str(tmp_path / "questions.jsonl")}, "patience": 1},
            "trainer": {"max_length": 64, "per_device_train_batch_size": 6, "learning_rate": 1e-3, "max_steps": 4,
                        "eval_strategy": "epoch", "metric_for_best_model": "town_accuracy", **trainer},
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values))
        return read_recipe(path, verb="bench")

    return _make


def test_a_share_is_the_geometric_mean_of_the_ratios_within_rounds() -> None:
    found = ratio_estimate([2.0, 8.0], [1.0, 2.0])  # ratios 2 and 4: logs 1 and 2 times ln 2, standard error ln 2 / 2
    half = 12.706205 * math.log(2) / 2  # Student's t, 1 degree of freedom
    assert found.mean == pytest.approx(math.sqrt(8))
    assert found.low == pytest.approx(math.sqrt(8) * math.exp(-half), rel=1e-6)
    assert found.high == pytest.approx(math.sqrt(8) * math.exp(half), rel=1e-6)
    assert relative_range([2.0, 8.0], [1.0, 2.0]) == pytest.approx(2 / 3)


def test_a_machine_that_drifts_between_rounds_does_not_widen_the_interval() -> None:
    vanilla, own = [1.0, 3.0, 10.0], [0.5, 1.5, 5.0]
    found = ratio_estimate(own, vanilla)
    assert (found.mean, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))
    unpaired = ratio_estimate(own, [1.0] * 3)
    assert unpaired.high is not None
    assert unpaired.high > 10


def test_intervals_are_scipys() -> None:
    ratios = [0.7, 0.9, 0.75, 0.82]
    expected = ttest_1samp([math.log(ratio) for ratio in ratios], 0).confidence_interval()
    found = ratio_estimate(ratios, [1.0] * 4)
    assert (found.low, found.high) == pytest.approx((math.exp(expected.low), math.exp(expected.high)))
    assert mean_estimate([0.4]) == Estimate(0.4, None, None)


def test_rounds_without_a_vanilla_run_do_not_count() -> None:
    def measured(number: int, seconds: float, accuracy: float) -> Measurement:
        return Measurement("bf16", number, seconds, 1.0, 100, 50, 2.0, {"town": accuracy}, 9.0)

    row = summarize(
        StrategyResult("bf16", "bf16", "", {}), [measured(0, 3.0, 0.5), measured(1, 9.0, 0.9)], [measured(0, 2.0, 0.25)]
    )
    assert row.n_rounds == 1
    assert row.time_ratio == Estimate(pytest.approx(1.5), None, None)  # type: ignore[arg-type]
    assert row.gain == {"town": Estimate(0.25, None, None)}


def test_accuracies_keep_their_interval_between_0_and_1() -> None:
    runs = [
        Measurement("bf16", n, 1.0, 1.0, 100, 50, 2.0, {"town": accuracy}, 9.0) for n, accuracy in enumerate((0.5, 1.0))
    ]
    row = summarize(StrategyResult("bf16", "bf16", "", {}), runs, runs)
    assert row.accuracy == {"town": Estimate(0.75, 0.0, 1.0)}
    assert row.gain == {"town": Estimate(0.0, 0.0, 0.0)}


def test_a_set_that_one_run_could_not_score_has_no_accuracy() -> None:
    scored = Measurement("bf16", 0, 1.0, 1.0, 100, 50, 2.0, {"town": 0.5, "job": 0.5}, 9.0)
    unscored = dataclasses.replace(scored, round=1, accuracy={"job": 0.25})
    vanilla = [dataclasses.replace(scored, strategy="vanilla", round=number) for number in (0, 1)]
    row = summarize(StrategyResult("bf16", "bf16", "", {}), [scored, unscored], vanilla)
    assert list(row.accuracy or {}) == list(row.gain or {}) == ["job"]
    bench = BenchResult("r.yaml", "cpu", (row,), ("town", "job"), 2, 6, (), 0)
    assert "unscored" in render_bench(bench)


def test_a_round_is_compared_with_the_geometric_mean_of_its_two_vanilla_runs() -> None:
    def measured(number: int, seconds: float, peak: int) -> Measurement:
        return Measurement("", number, seconds, seconds, peak, 50, 2.0, {"town": 0.5}, 9.0)

    vanilla = [measured(0, 2.0, 400), measured(1, 3.0, 100), measured(0, 8.0, 100), measured(1, 3.0, 100)]
    row = summarize(StrategyResult("bf16", "bf16", "", {}), [measured(0, 2.0, 100), measured(1, 6.0, 100)], vanilla)
    assert row.time_ratio is not None
    assert row.time_ratio.mean == pytest.approx(1.0)  # 2 / sqrt(2 * 8) and 6 / 3
    assert row.spread == pytest.approx((2 - 0.5) / 1.25)
    assert row.peak_ratio is not None
    assert row.peak_ratio.mean == pytest.approx(math.sqrt(0.5))
    own = summarize(StrategyResult("vanilla", "vanilla", "", {}), vanilla, vanilla)
    assert own.time_ratio == Estimate(1.0, 1.0, 1.0)
    assert own.spread == pytest.approx((8 - 2) / 4)  # of round 1; those of round 2 are equal
    assert own.n_rounds == 2
    assert own.first_seconds == 8.0


def test_each_round_has_vanilla_twice_and_the_others_once_in_another_order() -> None:
    orders = [[(item.name, copy) for item, copy in order_round(STRATEGIES[:4], number)] for number in range(4)]
    one, two, three = (item.name for item in STRATEGIES[1:4])
    assert orders[0] == [("vanilla", 0), (one, 0), (two, 0), ("vanilla", 1), (three, 0)]
    assert orders[1] == [("vanilla", 0), (two, 0), (three, 0), ("vanilla", 1), (one, 0)]
    assert orders[3] == orders[0]
    assert [(item.name, copy) for item, copy in order_round(STRATEGIES[:1], 1)] == [("vanilla", 0), ("vanilla", 1)]


@pytest.mark.parametrize(
    ("name", "changed", "reason"),
    [
        ("fp16", {}, "needs an NVIDIA GPU"),
        ("offloading", {}, "lie in the machine's memory already"),
        ("bf16", {"bf16": False}, "no bfloat16 autocast on this cpu"),
        ("accumulation", {"batch": 1}, "nothing to split"),
        ("adamw-8bit", {"bitsandbytes": False}, "pip install bitsandbytes"),
        ("compile", {"compiler": False}, "needs a C++ compiler"),
        ("packing", {"block": None}, "needs a block length: trainer.max_length"),
    ],
)
def test_what_cannot_run_says_why(name: str, changed: dict[str, Any], reason: str) -> None:
    assert reason in BY_NAME[name].unavailable(dataclasses.replace(CPU, **changed))
    able = dataclasses.replace(CPU, device="cuda")
    assert BY_NAME[name].unavailable(able) == ""


def test_the_combination_is_made_of_what_runs_here() -> None:
    assert combined_labels(CPU) == [
        "bf16", "packing", "gradient accumulation", "gradient checkpointing", "8-bit AdamW", "torch.compile", "LoRA",
    ]  # fmt: skip
    changes = COMBINED.overrides({}, CPU)
    assert changes["trainer.optim"] == "adamw_8bit"
    assert (changes["trainer.per_device_train_batch_size"], changes["trainer.gradient_accumulation_steps"]) == (1, 2)
    poor = dataclasses.replace(CPU, bf16=False, bitsandbytes=False, compiler=False, block=0)
    assert COMBINED.overrides({}, poor)["trainer.optim"] == "adafactor"
    assert "trainer.torch_compile" not in COMBINED.overrides({}, poor)


def test_packing_keeps_the_tokens_of_a_step_and_accumulation_its_rows() -> None:
    packed = BY_NAME["packing"].overrides({}, CPU)  # 6 rows of 20 tokens: two rows of 64
    assert packed["trainer.per_device_train_batch_size"] == 2
    split = BY_NAME["accumulation"].overrides({}, dataclasses.replace(CPU, batch=10))
    assert split == {"trainer.per_device_train_batch_size": 5, "trainer.gradient_accumulation_steps": 2}


def test_a_run_is_the_recipe_with_every_technique_off_but_one(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(bf16=True, optim="adafactor", packing=True, gradient_accumulation_steps=2, warmup_ratio=0.1)
    vanilla = run_values(recipe, BY_NAME["vanilla"], CPU, 4, 7)
    trainer = vanilla["trainer"]
    assert (trainer["bf16"], trainer["packing"], trainer["gradient_accumulation_steps"]) == (False, False, 1)
    assert trainer["optim"] == "adamw_torch_fused"
    assert trainer["warmup_steps"] == 0.1  # an older name, as the recipe's reader has it
    assert (vanilla["seed"], trainer["eval_steps"], "patience" in vanilla["probes"]) == (7, 4, False)
    for strategy in STRATEGIES:
        other = run_values(recipe, strategy, CPU, 4, 7)
        changes = strategy.overrides({}, CPU)
        differs = {f"trainer.{key}" for key in trainer if trainer[key] != other["trainer"].get(key)}
        assert differs <= changes.keys()
        assert other["adapter"] == (LORA if strategy.name == "lora" else None)


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        (BenchOptions(only=("bf17",)), "--only: found 'bf17'. Did you mean bf16?"),
        (BenchOptions(skip=("vanilla",)), "--skip: vanilla cannot be skipped"),
        (BenchOptions(repeats=0), "--repeats: found 0, allowed: 1 to 100"),
        (BenchOptions(steps=3), "--steps: found 3, allowed: 4 or more"),
    ],
)
def test_what_the_command_line_may_not_ask_is_refused(
    wanted: BenchOptions, fault: str, make_recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(InputError, match=fault.replace("?", r"\?")):
        choose_strategies(wanted, make_recipe())


def _with_bench(recipe: Recipe, **section: Any) -> Recipe:
    recipe.path.write_text(yaml.safe_dump({**recipe.raw, "bench": section}, sort_keys=False))
    return read_recipe(recipe.path, verb="bench")


def test_strategies_of_the_recipe_are_measured_beside_vanilla(
    make_recipe: Callable[..., Recipe], worker: type[InProcess]
) -> None:
    mine = {"uphill": {"techniques.sam": 0.05}, "less": {"trainer.learning_rate": 1e-4, "adapter": {"r": 2}}}
    recipe = _with_bench(make_recipe(), strategies=mine, built_in=False)
    found, page = bench(recipe, BenchOptions(repeats=1))
    assert sorted(row.name for row in found.rows) == ["less", "uphill", "vanilla"]
    assert worker.given == ["vanilla, round 1", "uphill, round 1", "vanilla, round 1, again", "less, round 1"]
    held = [yaml.safe_load(path.read_text()) for path in page.parent.glob("runs/*.yaml")]
    assert sorted(item.get("techniques", {}).get("sam", 0) for item in held) == [0, 0, 0, 0.05]
    assert [item["adapter"] for item in held if item["trainer"]["learning_rate"] == 1e-4] == [{"r": 2}]
    assert all("bench" not in item for item in held)
    losses = {row.name: row.loss.mean for row in found.rows if row.loss is not None}
    assert losses["uphill"] != losses["vanilla"]
    assert "techniques.sam: 0.05" in page.read_text()
    (less,) = (row.description for row in found.rows if row.name == "less")
    assert less == 'trainer.learning_rate: 0.0001, adapter: {"r": 2}'
    beside = _with_bench(make_recipe(), strategies=mine)
    names = [item.name for item in choose_strategies(BenchOptions(), beside)]
    assert names == [*BY_NAME, "uphill", "less"]
    chosen = choose_strategies(BenchOptions(only=("less", "bf16")), beside)
    assert [item.name for item in chosen] == ["vanilla", "bf16", "less"]


class Torchrun:
    """Stands in for torchrun: the command's training happens in this process, alone."""

    commands: list[tuple[list[str], str]]

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.commands.append((command, env["OMP_NUM_THREADS"]))
        self.code = main(command[command.index("train") :])

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def wait(self) -> int:
        return self.code

    def terminate(self) -> None:
        return None


def test_numbers_of_devices_are_compared_at_the_same_batch(
    make_recipe: Callable[..., Recipe], worker: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = type("Fresh", (Torchrun,), {"commands": []})
    monkeypatch.setattr("kinject.study.stages.subprocess.Popen", fresh)
    monkeypatch.setattr(benching, "count_devices", lambda _: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    recipe = _with_bench(make_recipe(), devices=[2, 4, 64], built_in=False)
    found, page = bench(recipe, BenchOptions(repeats=1))
    reasons = {row.name: row.reason for row in found.rows}
    assert reasons == {
        "vanilla": "", "devices-2": "", "devices-64": "this machine has 4 cores",
        "devices-4": "trainer.per_device_train_batch_size is 6: no whole rows for each of 4",
    }  # fmt: skip
    ((command, n_threads),) = fresh.commands
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert n_threads == "2"
    values = yaml.safe_load(Path(command[command.index("train") + 1]).read_text())
    assert values["trainer"]["per_device_train_batch_size"] == 3
    assert "2 devices" in page.read_text()
    assert bench(recipe, BenchOptions(repeats=1))[0] == found  # nothing is run again
    assert len(fresh.commands) == 1
    monkeypatch.setattr(fresh, "wait", lambda _: 1)
    shutil.rmtree(values["run_dir"])
    again, _ = bench(recipe, BenchOptions(repeats=1))
    (row,) = (row for row in again.rows if row.name == "devices-2")
    assert row.reason.startswith("training in 2 processes ended with code 1")


def test_every_fault_of_a_recipes_strategies_is_told_with_its_line(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = _with_bench(
        make_recipe(),
        strategies={"lora": {}, "high": {"trainer.learning_rat": 1}, "mine": {"seed": 4, "techniques.sam": "x"}},
    )
    assert main(["bench", str(recipe.path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 4
    assert any("bench.strategies.lora: bench already has a strategy of this name" in line for line in told)
    assert any("high: trainer.learning_rat" in line and "Did you mean learning_rate?" in line for line in told)
    assert any("mine.seed: a strategy cannot change this section" in line for line in told)
    assert any("mine: techniques.sam: found 'x'" in line for line in told)
    at = next(number for number, line in enumerate(recipe.path.read_text().splitlines(), 1) if "high:" in line)
    assert any(f"{recipe.path}:{at}: high: trainer.learning_rat" in line for line in told)
    assert main(["check", str(recipe.path)]) == 2


def test_time_is_the_lower_quartile_of_the_steps_after_the_first_two(tmp_path: Path) -> None:
    timing = [(1, 5.0, 100, 7), (2, 6.0, 200, 8), (3, 8.0, 240, 9), (4, 19.0, 300, 9), (5, 21.0, 350, 9)]
    per_token = [2 / 40, 11 / 60, 2 / 50]
    keys = ("step", "seconds", "learned_tokens", "peak_bytes")
    (tmp_path / "timing.jsonl").write_text(
        "".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in timing)
    )
    log = [
        {"step": 5, "loss": 2.5},
        {"step": 4, "eval_new_accuracy": 0.5, "eval_accuracy": 0.5},
        {"step": 4, "train_loss": 3},
    ]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    manifest = tmp_path / "manifest.json"
    write_manifest(manifest, stage="train", inputs={}, recipe={}, counts={"best_step": None, "seconds": 30.5})
    found = read_measurement(tmp_path, "bf16", 1)
    assert found.seconds == pytest.approx(1000 * float(numpy.quantile(per_token, 0.25)))  # one step was held up
    assert dataclasses.replace(found, seconds=1) == Measurement("bf16", 1, 1, 6.0, 9, 350, 2.5, {"new": 0.5}, 30.5)
    (tmp_path / "timing.jsonl").write_text("")
    with pytest.raises(InputError, match="has 0 steps"):
        read_measurement(tmp_path, "bf16", 1)


def test_whole_runs_keep_epochs_plateau_and_the_best_epoch(
    make_recipe: Callable[..., Recipe], worker: type[InProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(
        max_steps=-1, num_train_epochs=3, save_strategy="epoch", load_best_model_at_end=True, learning_rate=0.4,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    )  # fmt: skip
    patient = {"questions": recipe.raw["probes"]["questions"]}  # the recipe's patience would end a run after two epochs
    recipe = dataclasses.replace(recipe, raw={**recipe.raw, "probes": patient})
    last = {"last": {"trainer.load_best_model_at_end": False}}
    recipe = _with_bench(recipe, built_in=False, whole_runs=True, strategies=last)
    accuracies = iter(4 * [0.1, 0.9, 0.4, 0.2])  # before the first step, and after each epoch

    def _score(self: Any, model: Any, pad_token_id: int) -> dict[str, float]:
        model.eval()
        value = next(accuracies)
        return {"town_accuracy": value, "accuracy": value}

    monkeypatch.setattr("kinject.train.probes.Probes.score", _score)
    found, page = bench(recipe, BenchOptions(repeats=1))
    rows = {row.name: row for row in found.rows}
    assert rows["vanilla"].accuracy == {"town": Estimate(0.9, None, None)}  # the first epoch's weights
    assert rows["last"].accuracy == {"town": Estimate(0.2, None, None)}
    folders = [path.parent for path in page.parent.glob("runs/*/done.json")]
    assert len(folders) == 3
    for folder in folders:
        rates = [row["learning_rate"] for _, row in read_jsonl(folder / "log.jsonl") if "learning_rate" in row]
        assert rates == [0.4] * 16 + [0.2] * 8  # 48 rows in sixes; worse after the second epoch
        assert not list(folder.glob("checkpoint-*"))
    assert all(row.run_time is not None and row.run_time.mean > 0 for row in found.rows)
    assert "whole run" in page.read_text()
    assert "rounds: 1, of the recipe's own length" in render_bench(found)
    with pytest.raises(InputError, match=r"--steps: bench\.whole_runs gives each run"):
        choose_strategies(BenchOptions(steps=5), recipe)


def test_a_bench_measures_resumes_and_writes_its_table(
    make_recipe: Callable[..., Recipe], worker: type[InProcess], tmp_path: Path
) -> None:
    wanted = BenchOptions(only=("fp16", "accumulation", "packing"), repeats=2)
    found, page = bench(make_recipe(), wanted)
    assert worker.given == [
        "vanilla, round 1", "packing, round 1", "vanilla, round 1, again", "gradient accumulation, round 1",
        "vanilla, round 2", "gradient accumulation, round 2", "vanilla, round 2, again", "packing, round 2",
    ]  # fmt: skip
    rows = {row.name: row for row in found.rows}
    assert [row.name for row in found.rows if row.time is None] == ["fp16"]
    assert "needs an NVIDIA GPU" in rows["fp16"].reason
    assert rows["vanilla"].time_ratio == Estimate(1.0, 1.0, 1.0)
    assert rows["accumulation"].loss is not None  # the same batches in parts: the same loss
    assert rows["vanilla"].loss is not None
    assert rows["accumulation"].loss.mean == pytest.approx(rows["vanilla"].loss.mean, abs=1e-4)
    assert rows["accumulation"].tokens == rows["vanilla"].tokens
    assert found.question_sets == ("town",)
    assert not list((tmp_path / "bench" / "runs").glob("*/model"))
    for suffix in ("json", "csv", "md", "png", "svg"):
        assert (tmp_path / "bench" / f"bench.{suffix}").stat().st_size > 0
    lines = list(csv.DictReader((tmp_path / "bench" / "bench.csv").read_text().splitlines()))
    assert [line["strategy"] for line in lines] == [row.name for row in found.rows]
    assert float(lines[0]["time_ratio"]) == pytest.approx(found.rows[0].time_ratio.mean)  # type: ignore[union-attr]
    assert "fp16: not run: float16 training needs an NVIDIA GPU" in render_bench(found)
    assert "not run: float16 training needs" in page.read_text()

    worker.given.clear()
    again, _ = bench(make_recipe(), wanted)  # done: nothing is run, the numbers stay
    assert (worker.given, again) == ([], found)
    victim = next(path.parent for path in (tmp_path / "bench" / "runs").glob("*/done.json"))
    shutil.rmtree(victim)  # as a kill in the middle of a run leaves it
    bench(make_recipe(), wanted)
    assert len(worker.given) == 1
    bench(
        make_recipe(learning_rate=2e-3), BenchOptions(only=("vanilla",), repeats=1)
    )  # another recipe is measured anew
    assert worker.given[1:] == ["vanilla, round 1", "vanilla, round 1, again"]


def test_a_strategy_that_breaks_is_marked_and_vanilla_breaking_ends_it(
    make_recipe: Callable[..., Recipe], worker: type[InProcess]
) -> None:
    worker.breaks = "Adafactor"
    found, _ = bench(make_recipe(), BenchOptions(only=("adafactor",), repeats=2))
    assert found.n_failed == 1
    assert found.rows[-1].reason.startswith("out of memory (its log: ")
    vanilla = [f"vanilla, round {number}{again}" for number in (1, 2) for again in ("", ", again")]
    assert worker.given == [vanilla[0], "Adafactor, round 1", *vanilla[1:]]  # not tried twice in one go
    worker.breaks = "vanilla"
    with pytest.raises(InputError, match="the vanilla run failed: out of memory"):
        bench(make_recipe(learning_rate=3e-3), BenchOptions(only=("adafactor",), repeats=1))


def test_rows_stand_by_time_and_those_that_did_not_run_last() -> None:
    timed = [StrategyResult(str(share), "", "", {}, time_ratio=Estimate(share, None, None)) for share in (1.0, 0.4)]
    rows = [StrategyResult("a", "", "", {}, reason="no"), *timed]
    assert [row.name for row in sort_rows(rows)] == ["0.4", "1.0", "a"]


def test_the_verb_says_what_is_wrong_in_one_line(
    make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(make_recipe().path)
    assert main(["bench", path, "--only", "bf17"]) == 2
    assert capsys.readouterr().err.strip() == "kinject bench: --only: found 'bf17'. Did you mean bf16?"


def test_hostile_names_break_no_table_and_are_no_formulas(tmp_path: Path) -> None:
    hostile = "=cmd|'/C calc'!A0 <script>x</script> [a](javascript:b)\n| c | d |\n# e `f` \x1b[2J"
    found = Estimate(1.0, 0.9, 1.1)
    row = StrategyResult(
        hostile, hostile, hostile, {"trainer.x": hostile}, time=found, time_ratio=found, peak=found, peak_ratio=found,
        loss=found, accuracy={hostile: found}, gain={hostile: found}, tokens=-1.0,
    )  # fmt: skip
    bench = BenchResult(
        hostile,
        hostile,
        (row, StrategyResult(hostile, hostile, "", {}, reason=hostile)),
        (hostile,),
        1,
        2,
        (hostile,),
        1,
    )
    text = bench_results.write_pages(tmp_path, bench).read_text("utf-8")
    assert not re.search(r"<(?!\s)|(?<!\\)\]\((?!bench\.svg)", re.sub(r"`.*?`", "", text))
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables} == {len(bench_results._table_cells(bench)[0]) + 1}
    assert len(tables) == 4
    assert not [line for line in text.splitlines() if line.startswith("# e")]
    with (tmp_path / "bench.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len({len(cells) for cells in rows}) == 1
    assert rows[1][0] == f"'{hostile}"
    assert rows[1][5] == "-1.0"  # a number is one
    assert not [cell for cells in rows for cell in cells if cell[:1] in ("=", "@", "+")]
    ElementTree.parse(tmp_path / "bench.svg")  # noqa: S314 - written by this test
