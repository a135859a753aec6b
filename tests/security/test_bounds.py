"""Chat templates of models are bounded in memory, time and output before they are used."""

from __future__ import annotations

from pathlib import Path

import pytest

from kinject.errors import InputError
from kinject.models import load_tokenizer
from kinject.models.folder import check_cost

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
def test_a_template_that_fills_memory_time_or_output_is_refused(source: str) -> None:
    with pytest.raises(InputError, match="template: takes more than"):
        check_cost(source)


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
    ],
)
def test_templates_as_models_have_them_pass(source: str) -> None:
    check_cost(source)
