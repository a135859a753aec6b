"""Several processes: the ready-made configurations, the command that page and planner print, and the same losses as in one."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import trl
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader, skip_first_batches
from safetensors.torch import load_file
from torch.utils.data import BatchSampler, DataLoader

from kinject.cli import main
from kinject.corpus.tokenize import IGNORED
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.errors import InputError, RecipeError
from kinject.models import Sharding, read_sharding
from kinject.models.attention import reads_later_tokens
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.checkpoints import is_complete
from kinject.train.config import _trainer_config, make_configs
from kinject.train.load import load_training_model, take_over_sharding
from kinject.train.methods import method_of
from kinject.train.setup import make_trainer
from small import quick

MakeRecipe = Callable[..., Recipe]
ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "recipes" / "distributed").glob("*.yaml"))
NEEDS_DEEPSPEED = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs DeepSpeed: pip install 'kinject[deepspeed]'"
)
KINDS = {"ddp": "MULTI_GPU", "fsd": "FSDP", "hsd": "FSDP", "zer": "DEEPSPEED"}


def _header_command(path: Path) -> list[str]:
    """Return the words of the command in the comment at the top of a configuration, behind `accelerate launch`."""
    lines = [
        line.removeprefix("# ").strip()
        for line in path.read_text().splitlines()
        if line.startswith("#")
    ]
    start = next(
        number for number, line in enumerate(lines) if line.startswith("accelerate launch")
    )
    end = next(number for number in range(start, len(lines)) if not lines[number].endswith("\\"))
    words = shlex.split(" ".join(line.removesuffix("\\") for line in lines[start : end + 1]))
    assert words[:2] == ["accelerate", "launch"]
    return words[2:]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_accelerate_reads_each_configuration_and_its_command(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run: accelerate's own launcher up to the environment that its processes would get."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    from kinject.recipe import read_recipe

    monkeypatch.chdir(ROOT)
    words = _header_command(path)
    assert f"recipes/distributed/{path.name}" in words
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    assert defaults.distributed_type == KINDS[path.stem[:3]]
    assert args.num_processes == {"hsdp": 16, "fsdp2-offload": 1, "zero3-offload": 1}.get(
        path.stem, 2
    )
    recipe, *overrides = words[words.index("train") + 1 :]
    read_recipe(ROOT / recipe, overrides)
    if args.use_deepspeed:
        assert args.zero_stage == int(path.stem[4])
        assert args.offload_param_device == ("cpu" if "offload" in path.stem else "none")
        return
    assert args.multi_gpu or args.use_fsdp  # accelerate's launcher of several processes
    environment = prepare_multi_gpu_env(args)
    if args.use_fsdp:
        # what accelerate shards it also checkpoints; transformers shards the rest, and leaves that to the recipe
        by_accelerate = "offload" in path.stem or path.stem == "fsdp2-split"
        assert ("trainer.gradient_checkpointing=false" in overrides) == by_accelerate
        assert (environment["FSDP_VERSION"], environment["FSDP_ACTIVATION_CHECKPOINTING"]) == (
            "2",
            "true",
        )
        assert environment["FSDP_OFFLOAD_PARAMS"] == str("offload" in path.stem).lower()
    if path.stem == "fsdp2-split":
        assert environment["PARALLELISM_CONFIG_CP_SIZE"] == "2"
    if path.stem == "hsdp":
        sizes = [
            environment[f"PARALLELISM_CONFIG_DP_{kind}_SIZE"] for kind in ("REPLICATE", "SHARD")
        ]
        assert sizes == ["2", "8"]


def test_checkpointing_that_a_launcher_asks_for_reaches_the_trainer(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' Trainer reads the one name of it, TRL's the other."""
    config, _ = make_configs(make_recipe(trainer={"gradient_checkpointing": False}))
    assert not config.activation_checkpointing
    for name in ("ACCELERATE_USE_FSDP", "FSDP_ACTIVATION_CHECKPOINTING"):
        monkeypatch.setenv(name, "true")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert take_over_sharding(config, "none") == Sharding(4, 1, 1, False)
    assert (config.activation_checkpointing, config.gradient_checkpointing) == (True, True)


def _planned_command(recipe: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the command that the planner gives a recipe for two processes."""
    assert main(["plan", str(recipe), "--devices", "2", "--no-calibration"]) == 0
    (planned,) = re.findall("^ +(accelerate launch .*)$", capsys.readouterr().out, re.MULTILINE)
    return str(planned)


def test_page_planner_and_header_have_one_command(
    make_recipe: MakeRecipe, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(model={"path": str(tiny_model), "device": "cpu"})
    planned = _planned_command(recipe.path, capsys)
    page = re.sub(r"\\\n *", "", (ROOT / "docs" / "distributed.md").read_text())
    (documented,) = re.findall(r"^\$ (accelerate launch .*/ddp-cpu.yaml .*)$", page, re.MULTILINE)
    assert planned == documented.replace("recipes/cpt.yaml", str(recipe.path)).replace(
        "ddp-cpu.yaml", "ddp-cpu.yaml --num_processes 2"
    )
    assert shlex.split(documented)[2:] == _header_command(
        ROOT / "recipes" / "distributed" / "ddp-cpu.yaml"
    )


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_the_command_of_the_planner_starts_two_processes_that_learn_as_one(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"path": str(tiny_model), "device": "cpu"}
    sizes = {"max_steps": 2, "per_device_train_batch_size": 2}
    one = train(
        make_recipe(
            run_dir=str(tmp_path / "one"), trainer={**sizes, "gradient_accumulation_steps": 2}
        )
    )
    recipe = make_recipe(run_dir=str(tmp_path / "two"), model=model, trainer=sizes)
    planned = _planned_command(recipe.path, capsys)
    command = [sys.executable, "-m", "accelerate.commands.launch", *shlex.split(planned)[2:]]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=4000, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [
        [row["loss"] for _, row in read_jsonl(tmp_path / name / "log.jsonl") if "loss" in row]
        for name in ("one", "two")
    ]
    assert len(losses[1]) == 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    ours, theirs = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two")
    )
    assert all((ours[name] - theirs[name]).abs().max() < 1e-5 for name in ours)
    assert one.n_steps == 2
    assert "started one process only" not in done.stderr


def _environment(name: str) -> dict[str, str]:
    """Return what accelerate's launcher sets for a shipped configuration, for processes on the CPU in float32."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    words = [
        "--config_file",
        str(ROOT / "recipes" / "distributed" / f"{name}.yaml"),
        "-m",
        "kinject.cli",
    ]
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    args.deepspeed_fields_from_accelerate_config = ""  # as accelerate's launch_command does
    made = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    device = {"DS_ACCELERATOR": "cpu"} if args.use_deepspeed else {"ACCELERATE_USE_CPU": "true"}
    kept = {
        key: value
        for key, value in made.items()
        if key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_"))
    }
    return {**kept, **device, "ACCELERATE_MIXED_PRECISION": "no"}


def _run_in_two(runs: list[dict[str, Any]], folder: Path) -> None:
    """Train `runs` in two processes that are started once."""
    path, port = folder / "runs.json", _free_port()
    path.write_text(json.dumps(runs))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    started = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("two_processes.py")), str(path)], cwd=ROOT, text=True,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    errors = [process.communicate(timeout=4000)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(
        error[-3000:] for error in errors
    )


def _free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _rows(folder: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the logged steps of a run."""
    return [
        row
        for _, row in read_jsonl(folder / "log.jsonl")
        if all(key in row for key in ("loss", *keys))
    ]


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def _assert_sharded_as_ddp(folder: Path, kind: str) -> None:
    """Compare a run of sharded weights, resumed from its second step, with that of DDP."""
    ours, theirs = folder / kind, folder / "ddp"
    losses = [[row["loss"] for row in _rows(run)] for run in (ours, theirs)]
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], abs=1e-3), kind
    models = _weights(ours), _weights(theirs)
    assert models[0].keys() == models[1].keys(), kind
    assert all(
        (models[0][name] - weight).abs().max() < 1e-5 for name, weight in models[1].items()
    ), kind
    files = [sorted(path.name for path in (run / "model").iterdir()) for run in (ours, theirs)]
    assert files[0] == files[1]
    manifest = read_manifest_fields(ours / "manifest.json")
    assert manifest is not None
    assert manifest["counts"]["resumed_from"] == "checkpoint-2"
    last = ours / "checkpoint-4"
    parts = [*last.glob("optimizer/*.distcp"), *last.glob("global_step4/*_optim_states.pt")]
    assert len(parts) == 2, kind  # each process has its part of the optimizer


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "ways", quick(["ddp 4, fsdp2 4, TP 4", "ddp 1, ddp 11 packed"], "ddp 4, fsdp2 4, TP 4")
)
def test_two_processes_validate_the_mean_over_tokens_that_one_does(
    ways: str, make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    """Eleven rows of odd lengths: their last batches are not full, and no row may count twice.

    By DDP, by FSDP2 and by tensor parallelism, whose processes read the same rows; `ways` has the rows of each batch.
    """
    rows = [
        {"text": " ".join(f"Kelm sold {n + 7 * i}." for n in range(1 + i % 4))} for i in range(11)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = {"path": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "tokens")}
    corpus["validation_corpus"] = corpus["path"]
    sizes = {"max_steps": 1, "eval_strategy": "epoch", "eval_on_start": True}
    environments = {"ddp": _environment("ddp"), "fsdp2": _environment("fsdp2")}
    split = {**_environment("fsdp2-split"), "PARALLELISM_CONFIG_CP_SIZE": "1"}
    split["PARALLELISM_CONFIG_TP_SIZE"] = "2"
    del split["ACCELERATE_USE_FSDP"]
    environments["TP"] = split
    runs, names = [], []
    for way in ("one 11", *ways.split(", ")):
        kind, batch, *packed = way.split()
        names.append(f"{kind}-{batch}")
        trainer = {**sizes, "per_device_eval_batch_size": int(batch), "packing": bool(packed)}
        recipe = make_recipe(
            run_dir=str(tmp_path / names[-1]),
            trainer=trainer,
            corpus=corpus,
            model={"path": str(tiny_model), "device": "cpu"},
        )
        if kind == "one":
            train(recipe)
            continue
        path = recipe.path.rename(tmp_path / f"{names[-1]}.yaml")
        runs.append(
            {
                "recipe": str(path),
                "overrides": [],
                "environment": environments[kind],
                "interrupted": False,
            }
        )
    _run_in_two(runs, tmp_path)
    losses = []
    for name in names:
        log = [row for _, row in read_jsonl(tmp_path / name / "log.jsonl")]
        losses.append(next(row["eval_loss"] for row in log if "eval_loss" in row))
    assert losses[1:] == pytest.approx(losses[:1] * len(runs), rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "n_processes", "batch"),
    [("random", 2, 3), ("sequential", 4, 1), ("group_by_length", 3, 5)],
)
def test_each_row_of_an_epoch_is_read_once_by_all_processes_together(
    make_recipe: MakeRecipe,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    n_processes: int,
    batch: int,
) -> None:
    """Eleven rows: accelerate alone would repeat the first ones of the epoch until all have as many batches."""
    trainer = {
        "packing": True, "max_length": 96, "per_device_train_batch_size": batch, "train_sampling_strategy": strategy,
    }  # fmt: skip
    one = make_trainer(make_recipe(trainer=trainer))
    n_rows = len(one.train_dataset)
    assert n_rows % (n_processes * batch)
    in_order = list(one.get_train_dataloader().batch_sampler.sampler)
    monkeypatch.setattr(type(one.args), "world_size", n_processes)
    for epoch in (0, 1):
        drawn: list[list[int]] = []
        shards = []
        for number in range(n_processes):  # each process has a sampler of its own
            sampler = one.get_train_dataloader().batch_sampler.sampler
            sampler.set_epoch(epoch)
            batches = BatchSampler(sampler, batch, drop_last=False)
            shards.append(BatchSamplerShard(batches, n_processes, number))
        for of_processes in zip(*shards, strict=True):
            drawn += of_processes
        numbers = [index for indices in drawn for index in indices]
        assert len(numbers) == len(set(numbers)) == len(sampler)
        # The fillers come last, so that each update has the rows of one process.
        assert sorted(numbers[:n_rows]) == list(range(n_rows))
        assert epoch or numbers[:n_rows] == in_order
    filler = one.get_train_dataloader().dataset[n_rows]
    assert set(filler["labels"]) == {IGNORED}
    assert not any(filler["replayed"])


@pytest.mark.parametrize("strategy", ["random", "group_by_length"])
def test_an_epoch_that_two_processes_resume_has_its_own_order(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    """Trainer sets the epoch of the loader that skips the first batches, which has the sampler too deep inside."""
    seen: list[list[list[int]]] = []

    def skip_one(self: Any, epoch: int, train_dataloader: Any) -> None:
        rest = skip_first_batches(train_dataloader, 1)
        rest.set_epoch(epoch)
        seen.append(list(rest.batch_sampler))

    monkeypatch.setattr(transformers.Trainer, "_run_epoch", skip_one)
    trainer: Any = make_trainer(make_recipe(trainer={"train_sampling_strategy": strategy}))
    trainer.state.max_steps = 9
    monkeypatch.setattr(type(trainer.args), "world_size", 2)

    def make_loader() -> Any:
        loader = trainer.get_train_dataloader()
        rows = DataLoader(loader.dataset, 2, sampler=loader.batch_sampler.sampler)
        return prepare_data_loader(rows, num_processes=2, process_index=1)

    whole = make_loader()
    whole.set_epoch(3)
    trainer._run_epoch(epoch=3, train_dataloader=make_loader())
    assert seen == [list(whole.batch_sampler)[1:]]
    assert seen != [list(make_loader().batch_sampler)[1:]]


def test_one_process_has_one_device_however_many_gpus_there_are(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a launcher transformers gives a process all GPUs, by DataParallel."""
    for method, name in (("cpt", "SFTConfig"), ("recall", "GRPOConfig")):
        kind = getattr(trl, name)
        begin = kind.__post_init__

        def begin_with_three(self: Any, begin: Callable[[Any], None] = begin) -> None:
            begin(self)
            self._n_gpu = 3

        monkeypatch.setattr(kind, "__post_init__", begin_with_three)
        recipe = dataclasses.replace(make_recipe(), method=method)
        config = _trainer_config(recipe, {}, "cpu", method_of(recipe).make_config)
        assert config.n_gpu == 1
        assert config.train_batch_size == config.per_device_train_batch_size


@NEEDS_DEEPSPEED
def test_zero_learns_saves_resumes_and_exports_as_ddp(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    recipe = make_recipe(trainer=sizes, model={"path": str(tiny_model), "device": "cpu"})
    runs = [
        {"recipe": str(recipe.path), "overrides": [f"run_dir={tmp_path / kind}"], "environment": _environment(kind),
         "interrupted": kind != "ddp"}
        for kind in ("ddp", "zero2", "zero3")
    ]  # fmt: skip
    _run_in_two(runs, tmp_path)
    for kind in ("zero2", "zero3"):
        _assert_sharded_as_ddp(tmp_path, kind)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("kinds", quick(["ddp fsdp2 TP CP", "bf16 distill"], "ddp fsdp2 TP CP"))
def test_two_processes_learn_what_one_learns_however_they_share_the_work(
    kinds: str, make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    """Runs of one launch: FSDP2 against DDP; DDP in bf16 and with a teacher, tensor and context parallelism against one.

    Tensor and context parallelism run on CPUs, past accelerate and torch, which have GPUs only. Their rows are documents of odd
    lengths, or documents joined and cut. They and FSDP2 are resumed from their second step.
    """
    texts = [
        {"document_id": f"d{i}", "origin": origin, "text": f"{text} {1900 + i}."}
        for i in range(12)
        for origin, text in (
            ("original", "The mill at Kelm was built in"),
            ("variant", "Kelm has had a mill since"),
        )
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    corpus = {"path": str(tmp_path / "rows.jsonl"), "cache_dir": str(tmp_path / "tokens")}
    model = {"path": str(tiny_model), "device": "cpu"}
    sizes = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    parallel = {**sizes, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
    sections: dict[str, dict[str, Any]] = {
        "ddp": {"trainer": sizes}, "fsdp2": {"trainer": sizes}, "bf16": {"trainer": {**sizes, "bf16": True, "use_cpu": True}},
        "distill": {"trainer": sizes, "method": "distill", "corpus": corpus},
        "TP": {"trainer": {**parallel, "packing": False, "label_smoothing_factor": 0.1}},
        "CP": {"trainer": {**parallel, "packing": True, "packing_strategy": "wrapped"}},
    }  # fmt: skip
    runs = []
    for kind in kinds.split():
        section = sections[kind]
        recipe = make_recipe(**section, run_dir=str(tmp_path / kind), model=model)
        environment = _environment(kind if kind == "fsdp2" else "ddp")
        if kind in ("TP", "CP"):
            environment = {**_environment("fsdp2-split"), "PARALLELISM_CONFIG_CP_SIZE": "1"}
            environment[f"PARALLELISM_CONFIG_{kind}_SIZE"] = "2"
        if kind == "TP":
            del environment["ACCELERATE_USE_FSDP"]
        path = recipe.path.rename(tmp_path / f"{kind}.yaml")
        interrupted = kind in ("fsdp2", "TP", "CP")
        runs.append(
            {
                "recipe": str(path),
                "overrides": [],
                "environment": environment,
                "interrupted": interrupted,
            }
        )
        if kind not in ("ddp", "fsdp2"):
            accumulated = {"gradient_accumulation_steps": 2}
            train(make_recipe(**{**section, "trainer": {**section["trainer"], **accumulated}}, model=model,
                              run_dir=str(tmp_path / f"one-{kind}")))  # fmt: skip
    _run_in_two(runs, tmp_path)
    if "fsdp2" in kinds:
        _assert_sharded_as_ddp(tmp_path, "fsdp2")
    for kind in kinds.split():
        if kind in ("ddp", "fsdp2"):
            continue
        one, two = tmp_path / f"one-{kind}", tmp_path / kind
        ours, theirs = _weights(one), _weights(two)
        assert ours.keys() == theirs.keys()
        assert all(
            (ours[name] - theirs[name]).abs().max() < (5e-3 if kind == "bf16" else 1e-5)
            for name in ours
        ), kind
        assert {weight.dtype for weight in theirs.values()} == {torch.float32}
        for key in ("loss", "grad_norm") if kind != "bf16" else ():
            values = [[row[key] for row in _rows(run, "grad_norm")] for run in (two, one)]
            assert len(values[0]) == 4
            assert values[0] == pytest.approx(values[1], rel=1e-4 if kind == "distill" else 1e-5), (
                kind,
                key,
            )
    for kind in {"TP", "CP"} & set(kinds.split()):
        learned = [
            [row["learned_tokens"] for _, row in read_jsonl(tmp_path / name / "timing.jsonl")]
            for name in (f"one-{kind}", kind)
        ]
        assert [n - learned[0][1] for n in learned[0][2:]] == learned[
            1
        ]  # those since it was resumed


def test_context_parallelism_is_seen_in_the_environment(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate drops the mask without an error, and a process sees a part of a row."""
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    with pytest.raises(RecipeError, match="context parallelism has no mask"):
        make_configs(make_recipe())


def test_weights_stay_off_the_gpu_until_fsdp_has_sharded_them(
    make_recipe: MakeRecipe, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that fits no single GPU would end the run if each process moved the whole of it there first."""
    moved: list[Any] = []
    real = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
        moved.append(args)
        return real(module, *args, **options)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    recipe: Any = make_recipe()
    load_training_model(recipe.model, tiny_tokenizer, 0, recipe.device)
    assert moved == [("cpu",)]
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    model, notes = load_training_model(recipe.model, tiny_tokenizer, 0, recipe.device)
    assert len(moved) == 1
    assert "on cpu once it is sharded" in notes[0]
    model.config._attn_implementation = "flash_attention_2"  # runs on GPUs only
    assert not reads_later_tokens(model)


SIGNALLED = """
import os, signal, sys
from kinject.cli import main
from kinject.train import callbacks

def kill(self, args, state, control, **rest):
    if os.environ["RANK"] == "1" and state.global_step == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGUSR1)

callbacks.Screen.on_step_begin = kill
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.usefixtures("forked")
def test_a_signal_to_one_of_two_processes_stops_both_after_its_step_and_they_resume_there(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    sizes = {"max_steps": 5, "per_device_train_batch_size": 2}
    train(
        make_recipe(
            run_dir=str(tmp_path / "one"), trainer={**sizes, "gradient_accumulation_steps": 2}
        )
    )
    model = {"path": str(tiny_model), "device": "cpu"}
    recipe = make_recipe(
        run_dir=str(tmp_path / "two"), model=model, trainer={**sizes, "use_cpu": True}
    )
    (tmp_path / "signalled.py").write_text(SIGNALLED)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    launch += [
        str(ROOT / "recipes" / "distributed" / "ddp-cpu.yaml"),
        str(tmp_path / "signalled.py"),
    ]

    def run(step: int, *words: str) -> subprocess.CompletedProcess[str]:
        command = [*launch, str(step), "train", str(recipe.path), *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=4000, check=False, cwd=tmp_path
        )

    stopped = run(2)
    assert stopped.returncode != 0
    assert (
        "stopped by SIGUSR1. Finished work is kept. Resume with (under the same launcher): kinject train"
        in stopped.stderr
    )
    assert [path.name for path in (tmp_path / "two").glob("checkpoint-*")] == ["checkpoint-3"]
    assert is_complete(tmp_path / "two" / "checkpoint-3")
    steps = [row["step"] for _, row in read_jsonl(tmp_path / "two" / "log.jsonl")]
    assert max(steps) == 3  # no step is lost
    resumed = run(9, "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    losses = [
        [row["loss"] for _, row in read_jsonl(tmp_path / name / "log.jsonl") if "loss" in row]
        for name in ("one", "two")
    ]
    assert len(losses[1]) == 5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize(
    ("environment", "fsdp_config", "expected"),
    [
        ({}, None, None),
        ({"ACCELERATE_USE_FSDP": "true"}, None, Sharding(8)),
        ({}, {"version": 2}, Sharding(8)),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, None, None),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}, None, None),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, None, None),
        ({"ACCELERATE_USE_FSDP": "true", "REPLICATE": "2", "SHARD": "4"}, None, Sharding(4, 2)),
        ({"ACCELERATE_USE_FSDP": "true", "TP": "2"}, None, Sharding(4, tensor=2)),
        ({"TP": "8"}, None, Sharding(1, tensor=8)),
        ({"ACCELERATE_USE_FSDP": "true", "CP": "2", "SHARD": "4"}, None, None),
        (
            {"ACCELERATE_USE_FSDP": "true", "REPLICATE": "3"},
            None,
            "3 replicas x 2 shards x 1 tensor parallel are not the 8",
        ),
    ],
)
def test_what_a_launch_asks_for(
    environment: dict[str, str], fsdp_config: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    for key, value in environment.items():
        is_size = not key.startswith(("ACC", "FSDP"))
        monkeypatch.setenv(
            f"PARALLELISM_CONFIG_{'DP_' * (len(key) > 2)}{key}_SIZE" if is_size else key, value
        )
        if is_size:
            monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            read_sharding(fsdp_config, bf16=False)
    else:
        assert read_sharding(fsdp_config, bf16=False) == expected
