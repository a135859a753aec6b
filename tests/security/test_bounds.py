"""Templates and patterns of models and recipes are bounded in memory, time and output before they are used."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from kinject.bounds import check_cost, check_patterns
from kinject.corpus.templates import read_template
from kinject.errors import InputError
from kinject.models import load_model, load_tokenizer
from kinject.train.config import adapter_config, build

BOMBS = (
    "{{ 'x'|center(3000000000) }}",
    "{{ '%2000000000d'|format(1) }}",
    "{{ 'x'.ljust(2500000000) }}",
    "{% set ns = namespace(a='xxxxxxxx') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'x' * 4000 }}{% endfor %}",
    "{{ [messages] * 400000000 }}",
)


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_that_fills_memory_time_or_output_is_refused(source: str, tmp_path: Path) -> None:
    began = time.monotonic()
    (tmp_path / "t.jinja").write_text(source)
    with pytest.raises(InputError, match=r"t\.jinja: template: takes more than"):
        read_template(tmp_path / "t.jinja")
    assert time.monotonic() - began < 30


def test_a_chat_template_is_bounded_where_the_tokenizer_loads(tiny_model: Path) -> None:
    (tiny_model / "chat_template.jinja").write_text(BOMBS[0])
    with pytest.raises(InputError, match="chat_template: template: takes more than"):
        load_tokenizer(str(tiny_model))


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}",
        "{%- for m in messages %}{%- generation -%}{{ m['content'] | trim }}{%- endgeneration -%}{% endfor %}",
        "{{ raise_exception('never a system turn') }}",
        "{{ question }}{% for c in choices %}{{ letters[loop.index0] }}. {{ c }}{% endfor %}",
    ],
)
def test_templates_as_models_have_them_pass(source: str) -> None:
    check_cost(source)


@pytest.mark.parametrize("key", ["target_modules", "rank_pattern"])
def test_a_pattern_that_backtracks_for_minutes_is_refused_in_a_recipe_and_in_an_adapters_folder(
    key: str, tiny_model: Path, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    pattern = r"((\S|\s)*)*!"
    fields: dict[str, Any] = {"r": 4, "target_modules": ["q_proj"]} | {key: {pattern: 2} if "rank" in key else pattern}
    began = time.monotonic()
    _, (problem,) = build(adapter_config, fields, "adapter", "peft")
    assert problem.key == f"adapter.{key}"
    assert "takes more than 2 s to match a name" in problem.message
    plain = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model), LoraConfig(target_modules=["q_proj"]))
    plain.save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: fields[key]}))
    with pytest.raises(InputError, match=r"adapter: no usable adapter \(the pattern"):
        load_model(str(tmp_path / "adapter"), device="cpu")
    assert time.monotonic() - began < 40


def test_patterns_as_recipes_have_them_pass() -> None:
    check_patterns(
        {"target_modules": r".*layers\.[0-9]+\.(self_attn|mlp)\..*_proj", "rank_pattern": {r"^.*q_proj$": 4}}
    )
    check_patterns({"target_modules": "all-linear", "exclude_modules": ["lm_head"]})
