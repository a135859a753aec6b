"""`trainer:` is SFTConfig's own fields; older names are mapped and said."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from peft import LoraConfig
from transformers.training_args import OptimizerNames
from trl import SFTConfig

from kinject.errors import RecipeError
from kinject.recipe import read_recipe
from kinject.recipe.adapter_fields import ADAPTER_REFUSED
from kinject.recipe.library_fields import REFUSED, RENAMED, RENAMED_OPTIMIZERS

Write = Callable[[str, str], Path]


def _trainer(write: Write, line: str) -> tuple[dict[str, object], tuple[str, ...]]:
    recipe = read_recipe(write("r.yaml", f"run_dir: a\ntrainer:\n  {line}\n"))
    return dict(recipe.trainer), recipe.notes


def test_every_field_of_sftconfig_is_accepted_with_its_own_default(write: Write) -> None:
    fields = [
        field for field in dataclasses.fields(SFTConfig) if field.init and field.name not in REFUSED
    ]
    assert len(fields) > 90
    for field in fields:
        default = field.default
        if default is dataclasses.MISSING or default is None:
            continue
        value = str(getattr(default, "value", default))
        if not value or value.lower() == "none":
            value = "''"
        assert field.name in _trainer(write, f"{field.name}: {value}")[0]


READ_BY = {
    "transformers.trainer": """
        num_train_epochs max_steps learning_rate lr_scheduler_kwargs optim optim_args weight_decay gradient_accumulation_steps
        average_tokens_across_devices max_grad_norm bf16 fp16 activation_checkpointing activation_checkpointing_kwargs
        torch_compile torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
        neftune_noise_alpha torch_empty_cache_steps include_num_input_tokens_seen disable_tqdm
        eval_on_start save_total_limit push_to_hub full_determinism seed data_seed accelerator_config
        dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_sampling_strategy
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph fsdp fsdp_config deepspeed debug
        skip_memory_metrics report_to""",
    "transformers.trainer_optimizer": "warmup_steps adam_beta1 adam_beta2 adam_epsilon optim_target_modules",
    "transformers.trainer_callback": """
        logging_strategy logging_first_step eval_strategy eval_delay save_strategy load_best_model_at_end
        metric_for_best_model greater_is_better""",
    "transformers.training_args": """
        per_device_train_batch_size per_device_eval_batch_size tf32 logging_steps log_on_each_node log_level log_level_replica
        eval_steps save_steps save_on_each_node use_cpu ddp_backend ddp_timeout""",
    "transformers.integrations.integration_utils": """
        run_name project trackio_space_id trackio_bucket_id trackio_static_space_id hub_private_repo""",
    "trl.trainer.sft_trainer": """
        gradient_checkpointing gradient_checkpointing_kwargs router_aux_loss_coef loss_type activation_offloading""",
    "kinject.train.setup": "label_smoothing_factor pad_to_multiple_of packing",
    "kinject.train.schedules": "lr_scheduler_type",
    "kinject.train.load": "chat_template_path assistant_only_loss",
    "kinject.train.data": "max_length packing_strategy completion_only_loss",
    "kinject.train.run": "hub_model_id hub_revision",
}
"""Module -> the fields of SFTConfig that it reads in a training of ours."""
ADAPTER_READ = """
    task_type peft_type r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save
    init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern trainable_token_indices use_dora
    layer_replication lora_bias target_parameters use_bdlora ensure_weight_tying"""
"""The fields of LoraConfig that peft reads when it adds an adapter to a model that trains."""


def test_every_field_of_the_libraries_has_an_effect_or_a_refusal() -> None:
    """A field of a newer library is in none of these, and fails here until its effect was looked up."""
    read = [(name, module) for module, names in READ_BY.items() for name in names.split()]
    known = [name for name, _ in read]
    fields = {field.name for field in dataclasses.fields(SFTConfig) if field.init}
    assert len(known) == len({*known})
    assert not REFUSED.keys() & {*known}
    assert fields - REFUSED.keys() == {*known}
    for name, module in read:
        source = inspect.getsource(importlib.import_module(module))
        assert re.search(rf"""(\.{name}\b|["']{name}["'])""", source), (
            f"{module} does not read {name}"
        )
    peft = " ".join(
        path.read_text("utf-8")
        for path in Path(inspect.getfile(LoraConfig)).parents[2].rglob("*.py")
    )
    assert {
        field.name for field in dataclasses.fields(LoraConfig) if field.init
    } - ADAPTER_REFUSED.keys() == {*ADAPTER_READ.split()}
    for name in ADAPTER_READ.split():
        assert re.search(rf"""(\.{name}\b|["']{name}["'])""", peft), name


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("evaluation_strategy: epoch", {"eval_strategy": "epoch"}),
        ("warmup_ratio: 0.03", {"warmup_steps": 0.03}),
        ("group_by_length: true", {"train_sampling_strategy": "group_by_length"}),
        ("group_by_length: false", {"train_sampling_strategy": "random"}),
        ("max_seq_length: 256", {"max_length": 256}),
        ("save_safetensors: true", {}),
        ("optim: adamw_hf", {"optim": "adamw_torch"}),
        ("optim: adamw_apex_fused", {"optim": "adamw_torch_fused"}),
    ],
)
def test_an_older_name_is_read_as_todays_and_said(
    write: Write, line: str, fields: dict[str, object]
) -> None:
    trainer, notes = _trainer(write, line)
    assert trainer == fields
    assert len(notes) == 1
    assert line.split(": ")[line.startswith("optim")] in notes[0]


@pytest.mark.parametrize(
    ("steps", "ratio", "read"), [(10, 0.03, 10), (0.2, 0.03, 0.2), (0, 0.03, 0.03), (0, 0, 0)]
)
def test_warmup_steps_above_0_override_warmup_ratio_with_a_note(
    write: Write, steps: float, ratio: float, read: float
) -> None:
    for line in (
        f"warmup_steps: {steps}\n  warmup_ratio: {ratio}",
        f"warmup_ratio: {ratio}\n  warmup_steps: {steps}",
    ):
        trainer, notes = _trainer(write, line)
        assert trainer == {"warmup_steps": read}
        unread = "warmup_ratio" if steps else "warmup_steps"
        assert f"trainer.{unread} is not read" in notes[0]
    with pytest.raises(
        RecipeError, match=r"r\.yaml:4: trainer\.warmup_ratio: found 3\.0, allowed: 0 up to 1"
    ):
        _trainer(
            write, f"warmup_steps: {steps or 1}\n  warmup_ratio: 3"
        )  # also where it is not read


@pytest.mark.parametrize(
    "line",
    [
        "pad_to_multiple_of: -3",
        "pad_to_multiple_of: 3000000",
        f"data_seed: {2**70}",
        "weight_decay: -0.25",
        "adam_epsilon: 0.0",
        "neftune_noise_alpha: -0.5",
    ],
)
def test_a_number_with_which_no_library_trains_is_refused_at_its_line(
    write: Write, line: str
) -> None:
    name, _, value = line.partition(": ")
    with pytest.raises(RecipeError, match=rf"r\.yaml:3: trainer\.{name}: found {value}, allowed: "):
        _trainer(write, line)


def test_every_successor_is_a_field_of_sftconfig() -> None:
    names = {field.name for field in dataclasses.fields(SFTConfig)}
    assert not names & RENAMED.keys()
    assert {*RENAMED.values()} - {""} <= names
    today = {member.value for member in OptimizerNames}
    assert not today & RENAMED_OPTIMIZERS.keys()
    assert set(RENAMED_OPTIMIZERS.values()) <= today


def test_checkpointing_is_read_by_one_name_whichever_a_recipe_has(write: Write) -> None:
    """transformers' own name would count beside TRL's, which kinject plan reads."""
    line = (
        "activation_checkpointing: false\n  activation_checkpointing_kwargs: {use_reentrant: true}"
    )
    assert _trainer(write, line)[0] == {
        "gradient_checkpointing": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    }
    with pytest.raises(RecipeError, match=r"is the same as gradient_checkpointing\. Keep one"):
        _trainer(write, "gradient_checkpointing: true\n  activation_checkpointing: false")


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_name_says_why(write: Write, key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        _trainer(write, f"{key}: x")
    assert REFUSED[key] in str(caught.value)


def test_old_and_new_name_together_are_refused(write: Write) -> None:
    with pytest.raises(
        RecipeError, match=r"r\.yaml:4: trainer\.evaluation_strategy: is the same as eval_strategy"
    ):
        _trainer(write, "eval_strategy: no\n  evaluation_strategy: epoch")


def test_pickled_weights_are_refused(write: Write) -> None:
    with pytest.raises(RecipeError, match="weights are always safetensors"):
        _trainer(write, "save_safetensors: false")
