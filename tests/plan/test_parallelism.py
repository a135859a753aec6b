"""Which parallelism `kinject plan` chooses, for devices and machines, and what its command has to change in the recipe."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from kinject.cli import main
from kinject.errors import InputError
from kinject.plan.devices import Devices, find_devices
from kinject.plan.memory import Memory, simulate
from kinject.plan.model import StepConfig
from kinject.plan.parallelism import (
    choose_parallelism,
    choose_way,
    describe_batch,
    describe_traffic,
    least_peak,
    share_rows,
)
from kinject.process import machine_memory
from kinject.recipe import read_recipe
from kinject.train.setup import check_training

GIB = 2**30
CONFIG = transformers.LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, vocab_size=500,
    max_position_embeddings=256,
)  # fmt: skip


def _step(**more: Any) -> StepConfig:
    values: dict[str, Any] = {
        "model": CONFIG, "device": "cuda", "dtype": torch.float32, "mixed": None, "batch": 4, "block": 32,
        "accumulation": 1, "checkpointing": True, "offloading": False, "attention": "sdpa", "masked": False, "fused": True,
        "optim": "adamw_torch_fused", "optim_args": None, **more,
    }  # fmt: skip
    return StepConfig(**values)


def _memory(**more: int) -> Memory:
    values: dict[str, Any] = {
        "weights": 16 * GIB, "gradients": 16 * GIB, "optimizer": 32 * GIB, "activations": 4 * GIB, "logits": 0,
        "fragmentation": 0, "when": "", "n_parameters": 4, "n_trained": 4, "trained_bytes": 16 * GIB,
        "largest_block": GIB, "flops": 1e13, **more,
    }  # fmt: skip
    return Memory(**values)


def _gpus(gib: int, per_node: int, nodes: int = 1, link: float | None = None) -> Devices:
    return Devices("cuda", "GPU", per_node * nodes, gib * GIB, False, GIB // 2, nodes, link)


@pytest.mark.parametrize(
    ("gib", "per_node", "nodes", "name", "config"),
    [
        (80, 1, 1, "one device", ""), (20, 1, 1, "offload", "fsdp2-offload"), (4, 1, 1, "none", ""),
        (100, 8, 1, "DDP", "ddp"), (40, 8, 1, "ZeRO-2", "zero2"), (18, 8, 1, "FSDP (ZeRO-3)", "fsdp2"),
        (11, 8, 1, "offload", "fsdp2-offload"), (6, 8, 1, "none", ""), (100, 8, 2, "DDP", "ddp"),
        (18, 8, 2, "HSDP", "hsdp"), (14, 8, 2, "FSDP (ZeRO-3)", "fsdp2"), (18, 1, 8, "FSDP (ZeRO-3)", "fsdp2"),
    ],
)  # fmt: skip
def test_of_the_parallelisms_that_fit_the_one_that_sends_least_is_taken(
    gib: int, per_node: int, nodes: int, name: str, config: str
) -> None:
    found = choose_parallelism(_step(), _memory(), _gpus(gib, per_node, nodes))
    assert found.name == name
    assert found.reason
    assert re.findall(r"distributed/([\w-]+)\.yaml", found.command) == [config][: bool(config)]
    if config:
        assert f"--num_processes {per_node * nodes}" in found.command
    assert (f"--num_machines {nodes} --machine_rank 0 --main_process_ip ADDRESS" in found.command) == (nodes > 1)


def test_a_layer_that_does_not_fit_is_named_with_its_size() -> None:
    """FSDP and offload hold two layers at a time, so that nothing but a split of the layer itself would fit."""
    found = choose_parallelism(_step(), _memory(largest_block=12 * GIB), _gpus(20, 8))
    assert (found.name, found.command) == ("none", "")
    assert "the largest layer (12.0 GiB) does not fit" in found.reason
    assert "tensor parallelism" in found.reason
    fitting = choose_parallelism(_step(), _memory(largest_block=3 * GIB), _gpus(20, 8))
    assert fitting.name == "offload"


def test_the_memory_of_fsdp_is_that_of_the_recipe_as_its_command_changes_it() -> None:
    step = _step(optim="adamw_8bit", accumulation=2, mixed=torch.bfloat16)
    whole, half = simulate(step), simulate(_step(accumulation=2, dtype=torch.bfloat16))
    assert whole.activations - half.activations > 0.2 * whole.weights  # autocast's copies, which FSDP2 does not need
    expected = (whole.weights + 3 * whole.trained_bytes) // 16 + half.activations + half.logits
    expected += 4 * half.largest_block  # two gathered, the gradients of one, and these once more to be sent
    found = choose_parallelism(step, whole, Devices("cuda", "GPU", 16, int(1.06 * expected), False, 0))
    assert (found.name, found.peak) == ("FSDP (ZeRO-3)", expected)
    assert found.sent == int(15 / 16 * 2 * (2 * (whole.weights // 2) + whole.trained_bytes))  # gathered in bfloat16
    words = shlex.split(found.command)
    assert words[words.index("RECIPE") + 1 :] == ["trainer.optim=adamw_torch_fused"]
    lora = {"r": 4, "target_modules": "all-linear"}
    offloaded = choose_parallelism(replace(step, adapter=lora, quantization="4bit"), _memory(), _gpus(20, 1))
    words = shlex.split(offloaded.command)
    assert words[words.index("RECIPE") + 1 :] == [
        "trainer.optim=adamw_torch_fused", "trainer.gradient_checkpointing=false",
        "trainer.accelerator_config={gradient_accumulation_kwargs: {sync_each_batch: true}}",
    ]  # fmt: skip


def test_zero2_holds_the_weights_in_bfloat16_and_a_part_of_the_rest() -> None:
    """By hand: 2 bytes for each weight, and of 2 + 4 + 8 bytes (gradients, weights, state) an eighth on each device."""
    step = _step(mixed=torch.bfloat16)
    n, half = 8, simulate(_step(dtype=torch.bfloat16))
    numbers, buffers = half.n_trained, half.weights - half.trained_bytes
    held = 2 * numbers + buffers + (2 + 4 + 8) * numbers // n
    expected = held + max(half.activations + half.logits + 10**9, 4 * numbers // n)
    found = choose_parallelism(
        step, _memory(optimizer=8 * numbers), Devices("cuda", "GPU", n, int(1.06 * expected), False, 0)
    )
    assert found.name == "ZeRO-2"
    assert found.peak == pytest.approx(expected, abs=64)


def test_weights_that_are_rounded_stochastically_are_sharded_in_float32() -> None:
    step = _step(dtype=torch.bfloat16, mixed=torch.bfloat16, rounding=True, accumulation=2)
    devices = Devices("cuda", "GPU", 8, 2 * 2**20, False, 0)
    words = shlex.split(choose_parallelism(step, _memory(), devices).command)
    assert words[words.index("RECIPE") + 1 :][:2] == ["techniques.stochastic_rounding=false", "model.dtype=float32"]


def test_the_bytes_sent_are_those_of_a_ring() -> None:
    """By hand, with 16 GiB of weights and as much of gradients."""
    ddp, zero2 = (choose_parallelism(_step(accumulation=3), _memory(), _gpus(gib, 8)).sent for gib in (100, 40))
    assert ddp == 2 * 16 * GIB * 7 // 8
    assert zero2 == (3 + 1) * 16 * GIB * 7 // 8
    assert choose_parallelism(_step(), _memory(), _gpus(18, 8)).sent == (2 * 16 + 16) * GIB * 7 // 8
    assert choose_parallelism(_step(), _memory(), _gpus(18, 8, 2)).sent == 2 * 16 * GIB // 2


def test_a_slow_link_is_compared_with_the_arithmetic() -> None:
    devices = _gpus(18, 8, 2, link=2e9)
    found = choose_parallelism(_step(), _memory(), devices)
    lines = describe_traffic(found, _memory(), devices)
    assert lines[0] == (
        "16.0 GiB are sent by each machine in a step: 8.59 s at 2 GB/s, beside 0.1 s of arithmetic at 100 TFLOP/s"
    )
    assert "The link is slower than the GPUs" in lines[1]
    offloaded = choose_parallelism(_step(), _memory(), _gpus(11, 8, 1, link=2e9))
    assert describe_traffic(offloaded, _memory(), _gpus(11, 8, 1, link=2e9)) == [
        "6.0 GiB go between each device and the machine's memory in a step"
    ]
    fast = _gpus(18, 8, 2, link=400e9)
    assert len(describe_traffic(found, _memory(), fast)) == 1
    assert "--link" in describe_traffic(found, _memory(), _gpus(18, 8, 2))[0]
    assert describe_traffic(choose_parallelism(_step(), _memory(), _gpus(80, 1)), _memory(), _gpus(80, 1)) == []


def test_more_devices_keep_the_batch_or_get_the_rate_of_the_larger_one() -> None:
    assert describe_batch(_step(accumulation=8), _gpus(80, 1), 1e-3, 220) == []
    rows, same, larger = describe_batch(_step(accumulation=8), _gpus(80, 4), 1e-3, 220)
    assert rows == "4 devices read 4 times the rows of one in a step (128 instead of 32)."
    assert same.endswith("trainer.per_device_train_batch_size=4 trainer.gradient_accumulation_steps=2")
    assert "trainer.learning_rate=0.002 trainer.max_steps=55 (square-root rule for Adam" in larger
    _, same, larger = describe_batch(_step(optim="sgd"), _gpus(80, 2), 1e-3, -1)
    assert same.endswith("trainer.per_device_train_batch_size=2 trainer.gradient_accumulation_steps=1")
    assert "trainer.learning_rate=0.002 (linear rule for SGD" in larger
    assert len(describe_batch(_step(batch=1), _gpus(80, 2), 1e-3, -1)) == 2  # one row cannot be divided


def test_processes_on_a_cpu_divide_its_memory() -> None:
    one, four = (find_devices("cpu", None, n) for n in (None, 4))
    assert (one.memory, four.memory) == (machine_memory(), machine_memory() // 4)
    assert find_devices("cuda", GIB, 4, 2).count == 8


def test_the_page_of_a_plan_has_machines_batch_and_a_command_that_train_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kinject.plan.parallelism.cheapest_changes", lambda *_: ([], None))  # tests/plan/test_plan.py
    sizes = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}  # 24 MiB of weights
    transformers.LlamaConfig(**{**CONFIG.to_dict(), **sizes}).save_pretrained(tmp_path / "config-only")
    values = {
        "run_dir": "runs/x", "model": {"path": "config-only"}, "corpus": {"path": "none.jsonl"},
        "trainer": {"max_length": 64, "optim": "adamw_8bit", "gradient_accumulation_steps": 8, "per_device_train_batch_size": 1},
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    words = ["plan", "recipe.yaml", "--memory", "650MiB", "--devices", "8", "--nodes", "2", "--link", "3"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 machines with 8 x GPU as given" in out
    assert "the largest layer has 2.9 MiB" in out
    assert "parallelism  HSDP" in out
    assert "batch        16 devices read 16 times the rows of one in a step" in out
    command = next(line for line in out.splitlines() if "accelerate launch" in line)
    assert "on each machine, with its own --machine_rank" in out
    overrides = shlex.split(command)[shlex.split(command).index("recipe.yaml") + 1 :]
    assert overrides[:1] == ["trainer.optim=adamw_torch_fused"]
    Path("none.jsonl").write_text('{"text": "x"}\n')
    check_training(read_recipe(Path("recipe.yaml"), overrides, "train"))
    for option in ("--nodes", "--link"):
        assert main([*words[:2], option, "0"]) == 2
        assert f"{option}: found 0, allowed: more than 0." in capsys.readouterr().err


def test_a_long_row_is_split_between_the_gpus_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is what accelerate's launcher reads, and its bytes are those of FSDP and of a ring."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    monkeypatch.chdir(Path(__file__).parents[2])
    devices = _gpus(80, 8)
    for context, tensor in ((4, None), (None, 2)):
        step = share_rows(_step(mixed=torch.bfloat16, masked=True), devices, context, tensor)
        found = choose_parallelism(step, simulate(step), devices)
        assert found.sharing == (context or tensor)
        words = shlex.split(found.command)[2:]
        args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
        environment = prepare_multi_gpu_env(args)
        sizes = [environment[f"PARALLELISM_CONFIG_{name}_SIZE"] for name in ("DP_SHARD", "CP", "TP")]
        assert sizes == (["2", "4", "1"] if context else ["4", "1", "2"])
        assert ("trainer.packing=false" in words) == bool(context)
        assert "not run" in found.notes[0]
        tokens = 4 * 32 // (context or 1)
        ring = 3 * 3 * tokens * 2 * 64 * (3 * 2 + 4)  # 3 layers, 3 other devices; keys and values, then their gradients
        sums = 12 * 0.5 * 3 * tokens * 64 * 2
        half, group = simulate(replace(step, dtype=torch.bfloat16, mixed=None)), 8 if context else 4
        weights, trained = half.weights + 2 * half.n_trained, 4 * half.n_trained
        gathered = (group - 1) / group * (2 * (weights // 2) + trained)
        assert found.sent == pytest.approx(gathered + (ring if context else sums), abs=2)
    rows, *_ = describe_batch(_step(), devices, 1e-3, 220, 4)
    assert rows == "2 groups of 4 devices read 2 times the rows of one in a step (8 instead of 4)."


@pytest.mark.parametrize(
    ("context", "tensor", "fault"),
    [
        (3, None, "--cp: found 3, allowed: a divisor of the GPUs of a machine (8 GPUs"),
        (2, 2, "--cp and --tp: give one of them"),
        (None, 8, "--tp: 8 devices cannot share num_attention_heads 4, num_key_value_heads 4. Remove"),
    ],
)
def test_devices_and_sizes_that_cannot_share_are_refused(context: Any, tensor: Any, fault: str) -> None:
    with pytest.raises(InputError, match=re.escape(fault)):
        share_rows(_step(), _gpus(80, 8), context, tensor)


def test_a_long_context_that_does_not_fit_is_split_before_anything_is_learned_less() -> None:
    """Of the changes that suffice, smaller ones are left out; activations and Liger come before the split of a row."""
    sizes = {**CONFIG.to_dict(), "max_position_embeddings": 65536}
    step = _step(model=transformers.LlamaConfig(**sizes), batch=1, block=32768, checkpointing=True)
    room = replace(step, liger=True, offloading=True)
    peaks = [least_peak(replace(room, context=n), _gpus(80, 8)) for n in (1, 2, 4)]
    assert peaks[2] < peaks[1] < peaks[0]
    devices = Devices("cuda", "GPU", 8, int(1.06 * peaks[2]), False, 0)
    way, changes, suffice = choose_way(step, simulate(step), devices)
    assert suffice
    assert [change.overrides for change in changes][-1] == ("trainer.packing=false", "model.attention=sdpa")
    assert "split between 4 devices (context parallelism), without packing; not run on a GPU" in changes[-1].cost
    assert (way.name, way.sharing) == ("FSDP, context parallel", 4)
    assert "--parallelism_config_cp_size 4" in way.command
