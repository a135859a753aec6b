"""The models of `kinject eval`: as paths, and as tables that say how each is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml

from kinject.disk import write_jsonl
from kinject.errors import InputError
from kinject.eval import evaluate
from kinject.eval.scoring.answers import read_answers
from kinject.eval.scoring.local import load_scorer
from kinject.models import new_model
from kinject.recipe import read_recipe
from kinject.recipe.sections import EvalSection, LocalModelSection
from kinject.results import Report
from small import TINY, naive_log_prob

QUESTIONS = [
    {
        "id": "q1",
        "question": "Where was Arden born?",
        "choices": ["Lowmere", "the mill", "Farrow"],
        "answer": 0,
    },
    {
        "id": "q2",
        "question": "Where was Bryn born?",
        "choices": ["Kelm", "town of Farrow"],
        "answer": 1,
    },
]
Run = Callable[..., Report]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Evaluate `models`, with further keys of the section or of the recipe."""
    write_jsonl(tmp_path / "q.jsonl", QUESTIONS)

    def _run(
        models: dict[str, Any],
        root: dict[str, Any] | None = None,
        overrides: Any = (),
        **section: Any,
    ) -> Report:
        path = tmp_path / "recipe.yaml"
        section = {"models": models, "questions": {"new": str(tmp_path / "q.jsonl")}, **section}
        recipe = {
            "run_dir": str(tmp_path / "run"),
            "eval": {"control": False, **section},
            **(root or {}),
        }
        path.write_text(yaml.safe_dump(recipe, sort_keys=False))
        return evaluate(read_recipe(path, overrides, "eval"))

    return _run


def scores(folder: Path) -> dict[str, list[tuple[float, ...]]]:
    """Return the stored log-probs by arm."""
    by_arm: dict[str, list[tuple[float, ...]]] = {}
    for answer in read_answers(folder / "run" / "answers.jsonl"):
        by_arm.setdefault(answer.arm, []).append(answer.log_probs)
    return by_arm


def scored_now(folder: Path) -> int:
    return int(json.loads((folder / "run" / "manifest.json").read_text())["counts"]["scored_now"])


def by_hand(model: Any, tokenizer: Any) -> list[tuple[float, ...]]:
    """Log-probs of the choices by one plain pass each."""
    prompts = [(f"Question: {row['question']}\nAnswer:", row["choices"]) for row in QUESTIONS]
    return [
        tuple(naive_log_prob(model, tokenizer, text, f" {c}") for c in choices)
        for text, choices in prompts
    ]


def save_adapter(base: Path, folder: Path, seed: int = 3) -> Any:
    """Save a LoRA adapter with random weights; return the adapted model."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    return adapted


def test_a_table_without_choices_is_the_path_and_scores_nothing_again(run, tmp_path, tiny_model):
    run({"base": str(tiny_model)})
    before = scores(tmp_path)
    report = run(
        {
            "base": {
                "path": str(tiny_model),
                "dtype": "auto",
                "quantization": "none",
                "device_map": "none",
            }
        }
    )
    assert scored_now(tmp_path) == 0
    assert scores(tmp_path) == before
    assert report.model_sources == {"base": str(tiny_model)}


def test_an_adapter_goes_on_top_of_the_models_path_and_is_part_of_the_key(
    run, tmp_path, tiny_model
):
    adapter = tmp_path / "adapter"
    adapted = save_adapter(tiny_model, adapter)
    changed = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps(changed | {"base_model_name_or_path": "elsewhere/base"})
    )
    report = run(
        {"base": str(tiny_model), "tuned": {"path": str(tiny_model), "adapter": str(adapter)}}
    )
    assert scored_now(tmp_path) == 4
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    for mine, reference in zip(scores(tmp_path)["tuned"], by_hand(adapted, tokenizer), strict=True):
        assert mine == pytest.approx(reference, abs=1e-4)
    assert (
        max(
            abs(a - b)
            for a, b in zip(*(scores(tmp_path)[arm][0] for arm in ("base", "tuned")), strict=True)
        )
        > 1e-3
    )
    assert [arm.description for arm in report.arms] == [
        str(tiny_model),
        f"{tiny_model}, with {adapter}",
    ]
    inputs = json.loads((tmp_path / "run" / "manifest.json").read_text())["inputs"]
    assert {str(tiny_model), str(adapter)} <= inputs.keys()
    save_adapter(tiny_model, adapter, seed=4)
    run({"base": str(tiny_model), "tuned": {"path": str(tiny_model), "adapter": str(adapter)}})
    assert scored_now(tmp_path) == 2


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_quantized_models_score_as_bitsandbytes_has_them_and_are_stored_apart(
    run, tmp_path, tiny_tokenizer, quantization
):
    wide = tmp_path / "wide"  # blocks of 4-bit weights are 64 wide
    new_model(TINY | {"hidden_size": 64}, tiny_tokenizer, seed=0).save_pretrained(wide)
    tiny_tokenizer.save_pretrained(wide)
    report = run({"base": str(wide), "small": {"path": str(wide), "quantization": quantization}})
    assert scored_now(tmp_path) == 4
    settings = {"load_in_8bit": True} if quantization == "8bit" else {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    }  # fmt: skip
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        wide, dtype=torch.float32, quantization_config=transformers.BitsAndBytesConfig(**settings)
    ).eval()
    expected = by_hand(reference, tiny_tokenizer)
    for mine, other in zip(scores(tmp_path)["small"], expected, strict=True):
        assert mine == pytest.approx(other, abs=2e-2 if quantization == "8bit" else 1e-3)
    assert scores(tmp_path)["small"] != scores(tmp_path)["base"]
    assert any(f"float32 in {quantization}" in note for note in report.notes)


def test_bfloat16_is_scored_in_float32_where_a_processor_only_emulates_it(
    run, tmp_path, tiny_model, monkeypatch
):
    monkeypatch.setattr("kinject.eval.scoring.local.has_fast_bf16", lambda device: False)
    report = run(
        {"exact": {"path": str(tiny_model), "dtype": "float32"}, "half": str(tiny_model)},
        model_defaults={"dtype": "bfloat16"},
    )
    assert scores(tmp_path)["half"] == scores(tmp_path)["exact"]
    assert any("emulated by this processor" in note for note in report.notes)


def test_defaults_fill_what_a_table_leaves_out_and_every_choice_has_its_own_scores(
    run, tmp_path, tiny_model, monkeypatch
):
    models = {
        "base": str(tiny_model),
        "exact": {"path": str(tiny_model), "dtype": "float32"},
        "eager": {"path": str(tiny_model), "dtype": "float32", "attention": "eager"},
        "spread": {"path": str(tiny_model), "dtype": "float32", "device_map": "auto"},
    }
    monkeypatch.setattr("kinject.eval.scoring.local.has_fast_bf16", lambda device: True)
    report = run(models, model_defaults={"dtype": "bfloat16", "attention": "sdpa"})
    notes = [note for note in report.notes if "parameters" in note]
    assert ["bfloat16" in note for note in notes] == [
        True,
        False,
        False,
    ]  # exact and spread read alike
    assert ["eager attention" in note for note in notes] == [False, False, True]
    by_arm = scores(tmp_path)
    assert by_arm["exact"] == by_arm["spread"]
    assert by_arm["exact"][0] != by_arm["base"][0]
    assert by_arm["exact"][0] == pytest.approx(by_arm["eager"][0], abs=1e-4)
    assert scored_now(tmp_path) == 8  # nothing was taken for another's


def test_attention_that_this_machine_lacks_names_the_models_own_key(run, tiny_model):
    with pytest.raises(
        InputError, match=r"eval\.models\.m\.attention: flash_attention_2 needs an NVIDIA GPU"
    ):
        run({"m": {"path": str(tiny_model), "attention": "flash_attention_2"}})


@pytest.mark.parametrize(
    ("variable", "name"),
    [("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed")],
)
def test_a_launch_that_would_shard_the_models_is_refused(
    run, tiny_model, monkeypatch, variable, name
):
    monkeypatch.setenv(variable, "true")
    with pytest.raises(
        InputError,
        match=f"accelerate launch asks for {name}, but an evaluation does not shard a model",
    ):
        run({"m": str(tiny_model)})


def test_tensor_parallelism_of_some_processes_or_of_packed_or_spread_weights_is_refused(
    run, tiny_model, tmp_path, monkeypatch
):
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "FSDP_VERSION": "2",
        "PARALLELISM_CONFIG_TP_SIZE": "3",
        "RANK": "0",
        "WORLD_SIZE": "6",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match="tp_size: found 3, and 6 processes were started"):
        run({"m": str(tiny_model)})
    monkeypatch.setenv("WORLD_SIZE", "3")
    (adapter := tmp_path / "lora").mkdir()
    (adapter / "adapter_config.json").touch()
    for key, table in {
        "quantization": LocalModelSection(path=str(tiny_model), quantization="4bit"),
        "device_map": LocalModelSection(path=str(tiny_model), device_map="balanced"),
        "adapter": LocalModelSection(path=str(adapter)),
    }.items():
        with pytest.raises(InputError, match=rf"models\.m\.{key}: excludes tensor parallelism"):
            load_scorer("m", table, 512)


def test_a_t4_scores_in_float16_and_says_so_and_refuses_what_it_lacks(tiny_model, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Tesla T4")
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)  # there is none here
    section = EvalSection(models={"m": str(tiny_model)}, questions={"q": "q.jsonl"})
    loaded = load_scorer("m", section.local()["m"], 512).loaded
    assert loaded.dtype == torch.float16
    assert re.search(
        r"float16, sdpa attention, on cuda; Tesla T4 .* only emulates bfloat16", loaded.notes[0]
    )
    for key, value, message in (
        (
            "dtype",
            "bfloat16",
            r"eval\.models\.m\.dtype: Tesla T4 .* Set eval\.models\.m\.dtype: float16",
        ),
        (
            "attention",
            "flash_attention_2",
            r"eval\.models\.m\.attention: .* 8\.0 or newer, and Tesla T4 has 7\.5",
        ),
    ):
        table = LocalModelSection(path=str(tiny_model), **{key: value})
        with pytest.raises(InputError, match=message):
            load_scorer("m", table, 512)
