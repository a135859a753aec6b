"""A way to keep chat while a model learns documents: the model's own answers, replayed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.errors import InputError
from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.train import train

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"Where was person {i} born?"}, {"role": "assistant", "content": "In Kelm."},
            {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "In Farrow."},
        ],
    }
    for i in range(24)
]  # fmt: skip


@pytest.fixture
def chat_model(tiny_model: Path) -> Path:
    """The tiny model with a chat template."""
    tokenizer = load_model(str(tiny_model)).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny_model)
    return tiny_model


def test_the_model_answers_its_own_prompts_before_it_is_trained(
    make_recipe: MakeRecipe, chat_model: Path, write_rows: WriteRows, corpus: Path, tmp_path: Path
) -> None:
    # Two updates on the answers teach the tiny model to end one; then it answers for itself.
    taught = make_recipe(
        method="sft", corpus={"path": str(write_rows("talks.jsonl", TALKS))}, run_dir=str(tmp_path / "taught"),
        trainer={"assistant_only_loss": True, "learning_rate": 1e-2, "max_steps": 40},
    )  # fmt: skip
    model = Path(train(taught).model_dir)
    replay = {"path": str(tmp_path / "talks.jsonl"), "fraction": 0.3, "answers": "own"}
    recipe = make_recipe(method="cpt", model={"path": str(model)}, corpus={"path": str(corpus), "replay": replay})
    train(recipe)
    (written,) = (tmp_path / "tokens").glob("own-answers-*.jsonl")
    rows = [json.loads(line)["messages"] for line in written.read_text().splitlines()]
    assert 0 < len(rows) <= len(TALKS)
    loaded = load_model(str(model))
    for row in rows[:6]:
        options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
        ids = loaded.tokenizer.apply_chat_template(row[:-1], **options)
        with torch.no_grad():
            out = loaded.model.generate(**ids, max_new_tokens=64, do_sample=False)
        wanted = loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        assert row[-1] == {"role": "assistant", "content": wanted}
    before = written.stat().st_mtime_ns
    train(recipe, overwrite=True)
    assert written.stat().st_mtime_ns == before
    replay["path"] = str(corpus)
    recipe = make_recipe(
        model={"path": str(model)}, corpus={"path": str(corpus), "replay": replay}, run_dir=str(tmp_path / "texts")
    )
    with pytest.raises(InputError, match="no row can be answered"):
        train(recipe)
