"""The memory of a step by formula, against measured runs, real optimizers and sums by hand; the ways to spread it."""

from __future__ import annotations

import re
import runpy
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from kinject.errors import InputError
from kinject.models import new_config
from kinject.plan.estimate import Shapes, Step, count_flops, estimate, optimizer_state, read_shapes
from kinject.plan.ways import (
    GIB,
    Devices,
    _possible_changes,
    choose,
    describe_batch,
    describe_traffic,
    find_devices,
    parse_memory,
)
from kinject.process import machine_memory
from kinject.train.updates.muon import add_muon

LLAMA = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 500, "max_position_embeddings": 256,
}  # fmt: skip
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
WIDE = transformers.LlamaConfig(
    **{**LLAMA, "hidden_size": 256, "intermediate_size": 640, "num_hidden_layers": 8}
)
MEASURED = {
    "1M": 1228, "15M": 1772, "15M, accumulated": 1849, "15M, checkpointing": 1539, "15M, bf16": 1581, "15M, GPT-2": 1987,
    "50M": 1800, "50M, adafactor": 1423, "50M, adamw_8bit": 1760, "50M, LoRA": 1555, "4M, eager attention": 1349,
    "33M, checkpointing": 1804, "80M": 2208,
}  # fmt: skip
"""Case of benchmarks/plan/memory.py -> the peak resident MiB of the run, Python's 584 included (docs/figures.md)."""
ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "plan" / "memory.py"


def _step(**more: Any) -> Step:
    values: dict[str, Any] = {
        "model": transformers.LlamaConfig(**LLAMA), "device": "cuda", "dtype": torch.float32, "mixed": None, "batch": 4,
        "block": 32, "accumulation": 1, "checkpointing": True, "offloading": False, "eager": False, "fused": True,
        "optim": "adamw_torch_fused", **more,
    }  # fmt: skip
    return Step(**values)


def _gpus(memory: float, count: int = 1, nodes: int = 1, link: float | None = None) -> Devices:
    return Devices("cuda", "GPU", count, int(memory), False, 0, nodes, link)


def test_steps_are_known_by_the_values_of_their_models() -> None:
    """Not by the place of a config in memory, which a later one may take."""
    first, second = (_step(model=transformers.LlamaConfig(**LLAMA)) for _ in range(2))
    assert repr(first) == repr(second)
    assert repr(first) != repr(_step(model=transformers.LlamaConfig(**{**LLAMA, "vocab_size": 77})))


@pytest.mark.parametrize("case", MEASURED)
def test_the_estimate_is_within_a_tenth_of_measured_runs(case: str) -> None:
    model, trainer, more = runpy.run_path(str(BENCHMARK))["CASES"][case]
    fields = {"per_device_train_batch_size": 16, "optim": "adamw_torch_fused", **trainer}
    step = _step(
        model=new_config(model, model["vocab_size"]), device="cpu", block=128, fused=False,
        mixed=torch.bfloat16 if fields.get("bf16") else None, batch=fields["per_device_train_batch_size"],
        accumulation=fields.get("gradient_accumulation_steps", 1), optim=fields["optim"],
        checkpointing=fields.get("gradient_checkpointing", False), eager=more.get("attention") == "eager",
        adapter=more.get("adapter"),
    )  # fmt: skip
    total = estimate(step, read_shapes(step)).peak / 2**20 + 60 + 584
    assert total == pytest.approx(MEASURED[case], rel=0.1)


@pytest.mark.parametrize(
    "optim",
    [
        "adamw_torch",
        "adamw_torch_fused",
        "adamw_8bit",
        "adafactor",
        "sgd",
        "rmsprop",
        "lion_8bit",
        "muon",
    ],
)
def test_the_state_of_an_optimizer_is_what_it_keeps_after_a_step(
    optim: str, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "hidden_size": 128})
    model = transformers.LlamaForCausalLM(config)
    is_muon, optim = optim == "muon", optim.replace("muon", "adamw_torch")
    arguments = transformers.TrainingArguments(
        str(tmp_path), optim=optim, use_cpu=True, report_to="none"
    )
    optimizer = transformers.Trainer(model, arguments).create_optimizer()
    optimizer = add_muon(optimizer, model, 1.0) if is_muon else optimizer
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    tables = {"qmap1", "qmap2"}  # one for all parameters
    kept = sum(
        value.numel() * value.element_size()
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.ndim and name not in tables
    )
    assert optimizer_state(model, _step(model=config, optim=optim, muon=is_muon)) == kept


def test_what_is_unknown_or_does_not_train_is_refused_by_name() -> None:
    for change, words in (
        ({"optim": "apollo_adamw"}, "the memory of apollo_adamw is not known"),
        ({"freeze": ("*",)}, "no parameter trains"),
        ({"adapter": {"target_modules": ["no_such"]}}, "no model can be built"),
    ):
        with pytest.raises(InputError, match=words):
            read_shapes(_step(**change))


def test_weights_in_4_bits_take_4_bits_and_a_quantised_scale_for_64() -> None:
    step = _step(quantization="4bit", adapter=LORA, dtype=torch.bfloat16, mixed=torch.bfloat16)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    linear = [
        m
        for name, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and name != "lm_head"
    ]
    n_small = sum(module.weight.numel() for module in linear)
    n_lora = sum(4 * (module.in_features + module.out_features) for module in linear)
    n_rest = sum(parameter.numel() for parameter in model.parameters()) - n_small
    shapes = read_shapes(step)
    assert shapes.weights == pytest.approx(
        n_small * (0.5 + (1 + 4 / 256) / 64) + 2 * (n_rest + n_lora), abs=1
    )
    assert (shapes.n_trained, shapes.n_parameters) == (n_lora, n_small + n_rest + n_lora)


def test_each_technique_moves_the_part_that_it_is_for() -> None:
    step = _step(checkpointing=False, batch=16, block=128)
    whole = estimate(step, read_shapes(step))

    def part(name: str, **more: Any) -> int:
        changed = replace(step, **more)
        value: int = getattr(estimate(changed, read_shapes(changed)), name)
        return value

    n_bytes = read_shapes(step).trained
    assert part("activations", checkpointing=True) < 0.6 * whole.activations
    assert part("activations", offloading=True) < whole.activations / 2
    assert part("activations", eager=True) > whole.activations
    assert part("activations", liger=True) < whole.activations
    assert (
        part("activations", mixed=torch.bfloat16) < whole.activations
    )  # less its copies of the weights
    assert part("logits", fused=False) > 0
    assert part("weights", copies=1) == whole.weights + n_bytes
    squares = 3 * (
        6 * 64**2 + 160**2
    )  # a basis of half the directions for the inputs of each matrix of three layers
    assert part("optimizer", projected=True) == whole.optimizer + 2 * squares
    assert part("host", optim="paged_adamw_8bit") > 0
    assert part("gradients", accumulation=2) == n_bytes


def test_checkpointing_keeps_no_copies_of_frozen_layers() -> None:
    def activations(n_layers: int) -> int:
        config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": n_layers})
        step = _step(model=config, mixed=torch.bfloat16, adapter={**LORA, "r": 2})
        return estimate(step, read_shapes(step)).activations

    inputs = 4 * 32 * 64 * 4  # rows, tokens, width, bytes
    # q and o, k and v, three of the MLP: their inputs and outputs, twice in rank 2
    lora = 2 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 160))
    # torch 2.13 on a CPU: 0 bytes of frozen layers at the end of the forward pass
    assert activations(9) - activations(4) == 5 * (inputs + 2 * lora)


@pytest.mark.parametrize(
    ("kind", "experts"),
    [
        ("qwen3_moe", "num_experts"),
        ("mixtral", "num_local_experts"),
        ("gpt_oss", "num_local_experts"),
    ],
)
def test_a_token_is_multiplied_by_its_own_experts_alone(kind: str, experts: str) -> None:
    """As by those of a model that has no others, but for the router's further rows."""

    def shapes_of(n_experts: int) -> Shapes:
        values = {**LLAMA, "moe_intermediate_size": 48, "head_dim": 16, "num_experts_per_tok": 3}
        return read_shapes(
            _step(model=new_config({"model_type": kind, **values, experts: n_experts}))
        )

    all_own, some = shapes_of(3), shapes_of(12)
    assert all_own.active == all_own.multiplied
    router = 3 * 9 * (64 + (kind == "gpt_oss"))  # three layers, nine more rows, gpt_oss with a bias
    assert some.active == all_own.active + router
    assert some.multiplied > 2 * some.active


def test_experts_that_all_tokens_share_keep_activations_too() -> None:
    latent = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 16}
    own = {**LLAMA, "moe_intermediate_size": 48, "num_experts_per_tok": 3}
    deepseek = {**own, **latent, "num_key_value_heads": 4, "q_lora_rank": 24}
    shapes = replace(read_shapes(_step()), trained=0)

    def activations(**config: Any) -> int:
        return estimate(_step(model=new_config(config), checkpointing=False), shapes).activations

    three = activations(model_type="deepseek_v3", **deepseek, n_shared_experts=3)
    one = activations(model_type="deepseek_v3", **deepseek, n_shared_experts=1)
    wide = activations(model_type="qwen2_moe", **own, shared_expert_intermediate_size=130)
    narrow = activations(model_type="qwen2_moe", **own, shared_expert_intermediate_size=90)
    # Gate, its SiLU, up and their product, in three layers, and in one for gradients.
    assert three - one == (3 + 1) * 4 * 32 * 4 * (2 * 48) * 4
    assert wide - narrow == (3 + 1) * 4 * 32 * 4 * 40 * 4


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2},
        {"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2},
    ],
    ids=["mamba", "rwkv"],
)
def test_a_model_whose_layers_have_no_attention_is_refused_by_name(config: dict[str, Any]) -> None:
    step = _step(model=new_config(config))
    with pytest.raises(InputError, match=f"memory of a {config['model_type']} model is not known"):
        estimate(step, read_shapes(step))


def test_a_width_for_each_layer_counts_as_the_widest() -> None:
    values = {
        **LLAMA,
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": None,
    }
    steps = [
        _step(model=new_config({**values, "intermediate_size": width}))
        for width in ([96, 160, 128], 160)
    ]
    shapes = read_shapes(_step())
    assert estimate(steps[0], shapes) == estimate(steps[1], shapes)


@pytest.mark.parametrize(
    ("kind", "rows", "more"),
    [
        ("gpt2", "max_position_embeddings", {}),
        ("opt", "max_position_embeddings", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
        (
            "gemma3n_text",
            "vocab_size_per_layer_input",
            {"num_kv_shared_layers": 0, "activation_sparsity_pattern": None},
        ),
    ],
)
def test_rows_that_are_looked_up_are_no_operations(
    kind: str, rows: str, more: dict[str, Any]
) -> None:
    values = {**LLAMA, **more, "model_type": kind}
    few, many = (read_shapes(_step(model=new_config({**values, rows: n}))) for n in (70, 900))
    assert many.n_parameters - few.n_parameters >= 830 * 64
    assert (many.multiplied, many.active) == (few.multiplied, few.active)


def test_the_operations_are_six_for_each_weight_and_token_and_attentions() -> None:
    step = _step(checkpointing=False)
    shapes = read_shapes(step)
    assert count_flops(step, shapes) == 4 * 32 * (6 * shapes.multiplied + 6 * 3 * 32 * 64)
    assert count_flops(replace(step, checkpointing=True), shapes) > 1.3 * count_flops(step, shapes)
    # Heads of 24 numbers: the queries of a token are 96, in a model of 64.
    wide = replace(step, model=transformers.LlamaConfig(**LLAMA, head_dim=24))
    shapes = read_shapes(wide)
    assert count_flops(wide, shapes) == 4 * 32 * (6 * shapes.multiplied + 6 * 3 * 32 * 96)


def test_heads_of_latent_attention_are_as_wide_as_their_queries_and_values() -> None:
    sizes = {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 16}
    values = {**LLAMA, "num_key_value_heads": 4, "q_lora_rank": 24, **sizes}
    shapes = read_shapes(_step())
    steps = {}
    for kind in ("minicpm3", "deepseek_v3"):
        model = new_config({"model_type": kind, **values})
        steps[kind] = _step(model=model, checkpointing=False)
        attention = count_flops(steps[kind], shapes) - 4 * 32 * 6 * shapes.multiplied
        # Scores of 24 + 8 numbers, and values of 20, in each of four heads; half of the square.
        assert attention == 4 * 32 * 3 * (3 * 32 * 4 * (32 + 20))
    wide = new_config({"model_type": "deepseek_v3", **values, "v_head_dim": 40})
    frozen = replace(shapes, trained=0)
    kept = [
        estimate(replace(steps["deepseek_v3"], model=model), frozen).activations
        for model in (steps["deepseek_v3"].model, wide)
    ]
    # A token keeps value and output of each head, in three layers, and in one for gradients.
    assert kept[1] - kept[0] == (3 + 1) * 4 * 32 * 4 * (20 + 20) * 4


@pytest.mark.parametrize(
    ("sixteenths", "count", "nodes", "name", "config"),
    [
        (20, 1, 1, "one device", ""), (30, 8, 1, "DDP", "ddp"), (11, 8, 1, "ZeRO-2", "zero2"), (5, 8, 1, "FSDP", "fsdp2"),
        (30, 16, 2, "DDP", "ddp"), (4.5, 16, 2, "HSDP", "hsdp"), (5, 8, 8, "FSDP", "fsdp2"),
    ],
)  # fmt: skip
def test_of_the_ways_that_fit_the_one_that_sends_least_is_taken(
    sixteenths: float, count: int, nodes: int, name: str, config: str
) -> None:
    step = _step(model=WIDE, batch=1, block=8)
    weights = read_shapes(
        step
    ).weights  # weights, gradients and state are 16 bytes a weight, four times these
    way, changes = choose(step, _gpus(1.06 * 4 * weights * sixteenths / 16, count, nodes))
    assert (way.name, changes) == (name, [])
    assert re.findall(r"distributed/([\w-]+)\.yaml", way.command) == [config][: bool(config)]
    assert (
        f"--num_machines {nodes} --machine_rank 0 --main_process_ip ADDRESS" in way.command
    ) == (nodes > 1)


def test_what_is_divided_is_changed_so_that_it_can_be() -> None:
    step = _step(
        model=WIDE, dtype=torch.bfloat16, mixed=torch.bfloat16, rounding=True, optim="adamw_8bit", accumulation=2,
        muon=True, projected=True, checkpointing=False,
    )  # fmt: skip
    shapes = read_shapes(
        replace(
            step, rounding=False, dtype=torch.float32, projected=False, optim="adamw_torch_fused"
        )
    )
    way, _ = choose(step, _gpus(1.06 * 1.2 * shapes.weights, 8))
    words = shlex.split(way.command)
    assert way.name == "FSDP"
    assert words[words.index("RECIPE") + 1 :] == [
        "techniques.stochastic_rounding=false", "model.dtype=float32",
        "regularization.projection=null", "techniques.muon=null", "trainer.optim=adamw_torch_fused",
        "trainer.gradient_checkpointing=true",
    ]  # fmt: skip
    assert way.memory.weights == shapes.weights // 8
    assert way.memory.gathered == 4 * shapes.layer


def test_the_bytes_sent_are_those_of_a_ring_and_compared_with_the_arithmetic() -> None:
    step = _step(model=WIDE, batch=1, block=8, accumulation=3)
    size = read_shapes(step).weights
    sent = {}
    for sixteenths, count, nodes in ((40, 8, 1), (11, 8, 1), (4.5, 16, 2), (5, 8, 8)):
        way, _ = choose(step, _gpus(1.06 * 4 * size * sixteenths / 16, count, nodes))
        sent[way.name] = way.sent
    assert sent == {
        "DDP": 2 * size * 7 // 8, "ZeRO-2": 4 * size * 7 // 8, "HSDP": 3 * 2 * size // 2,
        "FSDP": 3 * 3 * size * 7 // 8,
    }  # fmt: skip
    slow, fast = (describe_traffic(way, 1e13, _gpus(1, 16, 2, link)) for link in (1e3, 1e12))
    assert "beside 0.1 s of arithmetic" in slow[0]
    assert "The link is slower than the GPUs" in slow[1]
    assert len(fast) == 1
    assert "--link" in describe_traffic(way, 1e13, _gpus(1, 16, 2))[0]


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 8), (4, 8), (3, 8)])
def test_between_machines_only_gradients_are_sent_where_each_machine_holds_the_model(
    nodes: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    step = _step(model=WIDE, batch=1, block=8, accumulation=5)
    shapes = read_shapes(step)
    way, changes = choose(step, _gpus(1.06 * 4.2 / 4 * shapes.weights, nodes * per_node, nodes))
    assert (way.name, changes) == ("HSDP", [])
    assert way.memory == estimate(step, shapes, "FSDP", per_node), "a machine's own devices divide"
    assert way.sent == 5 * 2 * shapes.trained * (nodes - 1) // nodes
    words = shlex.split(way.command)
    replicas, parts = (
        words[words.index(f"--parallelism_config_dp_{kind}_size") + 1]
        for kind in ("replicate", "shard")
    )
    assert (replicas, parts) == (str(nodes), str(per_node))
    monkeypatch.chdir(ROOT)
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words[2:]))
    environment = prepare_multi_gpu_env(args)
    assert environment["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] == str(nodes)
    assert environment["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == str(per_node)


def test_only_what_is_needed_is_changed_and_the_cheapest_first() -> None:
    step = _step(device="cpu", fused=False, batch=4, block=128)
    full = estimate(step, read_shapes(step)).peak
    way, changes = choose(step, Devices("cpu", "CPU", 1, full * 9 // 10, False, 0))
    assert [change.overrides for change in changes] == [
        ("trainer.per_device_train_batch_size=2", "trainer.gradient_accumulation_steps=2")
    ]
    assert way.command.startswith("kinject train RECIPE trainer.per_device_train_batch_size=2")
    assert way.memory.peak <= full * 9 // 10
    way, changes = choose(
        _step(device="cpu", batch=1, block=16), Devices("cpu", "CPU", 1, 1000, False, 0)
    )
    assert (way.name, way.command) == ("none", "")
    assert changes[-1].overrides[-1] == "model.quantization=4bit"


@pytest.mark.parametrize(("batch", "parts"), [(9, {3: 3, 1: 9}), (7, {1: 7}), (12, {6: 2, 4: 3})])
def test_a_smaller_batch_is_accumulated_to_the_same_update(
    batch: int, parts: dict[int, int]
) -> None:
    changes = _possible_changes(_step(batch=batch, accumulation=2), _gpus(GIB))
    fields = [change.fields for change in changes if "batch" in change.fields]
    assert all(item["batch"] * item["accumulation"] == 2 * batch for item in fields)
    found = {item["batch"]: item["accumulation"] // 2 for item in fields}
    assert found.items() >= parts.items()
    assert list(found) == sorted(found, reverse=True)


def test_a_device_that_only_4_bits_fit_gets_an_adapter_with_them() -> None:
    """Without the adapter nothing would train: it is never taken out as needless."""
    step = _step(model=WIDE, batch=1, block=8, mixed=torch.bfloat16, optim="adamw_8bit", offloading=True, rounding=True,
                 dtype=torch.bfloat16)  # fmt: skip
    lora = {"r": 64, "lora_alpha": 128, "target_modules": "all-linear"}
    small = replace(step, adapter=lora, quantization="4bit", rounding=False)
    way, changes = choose(step, _gpus(1.06 * estimate(small, read_shapes(small)).peak))
    assert way.name == "one device"
    assert changes[-1].overrides[0].startswith("adapter=")
    assert changes[-1].overrides[-1] == "model.quantization=4bit"


def test_a_base_in_16_bits_is_tried_beside_an_adapter_before_4_bits() -> None:
    step = _step(model=WIDE, batch=1, block=8, adapter=LORA, mixed=torch.float16)
    half = replace(step, dtype=torch.float16)
    way, changes = choose(step, _gpus(1.06 * estimate(half, read_shapes(half)).peak))
    assert way.name == "one device"
    assert [change.overrides for change in changes] == [("model.dtype=float16",)]


def test_a_layer_that_does_not_fit_is_named_with_its_size() -> None:
    way, _ = choose(_step(model=WIDE), _gpus(2**20, 8))
    assert way.name == "none"
    assert "the largest layer (2." in way.why
    assert "fsdp2-split.yaml" in way.why


def test_more_devices_get_the_rate_of_the_larger_batch() -> None:
    assert describe_batch(_step(), _gpus(1), 1e-3) == []
    assert (
        "trainer.learning_rate=0.002 (square-root rule for Adam"
        in describe_batch(_step(), _gpus(1, 4), 1e-3)[0]
    )
    assert (
        "trainer.learning_rate=0.002 (linear rule for SGD"
        in describe_batch(_step(optim="sgd"), _gpus(1, 2), 1e-3)[0]
    )


def test_devices_are_named_described_or_this_machines() -> None:
    one, four = (find_devices("cpu", None, n) for n in (None, 4))
    assert (one.memory, four.memory) == (machine_memory(), machine_memory() // 4)
    assert find_devices("cuda", GIB, 4, 2).count == 8
    small = find_devices("cuda", None, None, gpu="a100-40gb")
    assert (round(small.memory / GIB, 1), small.has_bf16) == (39.4, True)
    assert not find_devices("cuda", None, None, gpu="T4").has_bf16
    with pytest.raises(InputError, match="--gpu: found 'H1', allowed: H200"):
        find_devices("cuda", None, None, gpu="H1")


@pytest.mark.parametrize("memory", [None, 12 * GIB])
def test_an_older_gpu_of_this_machine_has_no_bfloat16(
    memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = SimpleNamespace(name="Quadro RTX 6000", total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    # It emulates it, which torch counts by default.
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert not find_devices("cuda", memory, 1).has_bf16


def test_sizes_are_read_as_gibibytes() -> None:
    assert [parse_memory(text) for text in ("24GiB", "24 GB", "24", "512MiB")] == [
        24 * 2**30
    ] * 3 + [512 * 2**20]
    for wrong in ("", "x", "0", "-3GiB", "3 apples", "8" * 350 + "TiB"):
        with pytest.raises(InputError, match="--memory"):
            parse_memory(wrong)
