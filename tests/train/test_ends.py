"""Rows that teach nothing but to stop, and chat templates that do not teach to stop, are named."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from kinject.corpus.chat import ChatFormat, note_on_end
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization, tokenize_rows
from kinject.disk import read_json
from kinject.recipe import TrainRecipe
from kinject.train import train
from small import interrupt, quick, save_tiny_model

MakeRecipe = Callable[..., TrainRecipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
ONLY_END = "only the end token of this row is learned"
NO_END = "may not learn to stop"
HEAD = "{% for m in messages %}<{{ m.role }}>"
TAGGED = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}END{% endgeneration %}"
    "{% else %}{{ m.content }}END{% endif %}{% endfor %}"
)
UNTAGGED = HEAD + "{{ m.content }}END\n{% endfor %}"
OUTSIDE = (
    HEAD + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}<|eos|>{% endfor %}"
)
BEFORE_NEXT = (
    "{% for m in messages %}{% if m.role == 'user' and not loop.first %}<|eos|>{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def _conversation(*turns: str) -> dict[str, Any]:
    """Turns of the user and the assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[index % 2], "content": text} for index, text in enumerate(turns)
        ]
    }


def _warnings(recipe: TrainRecipe) -> list[str]:
    counts = read_json(recipe.run_dir / "manifest.json", "")["counts"]
    return [warning for warning in counts["warnings"] if ONLY_END in warning]


@pytest.fixture
def chat_recipe(make_recipe: MakeRecipe, write: Any) -> Callable[..., TrainRecipe]:
    """A recipe on the conversations in a file, through a template."""

    def _make(path: Path, template: str, **more: Any) -> TrainRecipe:
        file = write("template.jinja", template)
        trainer = {"chat_template_path": str(file), "assistant_only_loss": True, "max_steps": 2}
        trainer |= more.pop("trainer", {})
        return make_recipe(corpus={"path": str(path), **more}, trainer=trainer)

    return _make


def test_answers_without_words_are_warned_of_once_with_line_and_number(
    chat_recipe: Callable[..., TrainRecipe], write_rows: WriteRows
) -> None:
    rows = [_conversation(f"Who runs mill {i}?", "Bryn." if i % 3 else "  ") for i in range(1, 12)]
    recipe = chat_recipe(
        write_rows("mills.jsonl", rows),
        TAGGED.replace("END", "<|eos|>"),
        trainer={"save_strategy": "steps", "save_steps": 1},
    )
    result = train(recipe)
    (warning,) = _warnings(recipe)
    assert warning.startswith(f"{recipe.corpus.path}:3: {ONLY_END}")
    assert "There are 3 such rows" in warning
    assert not any(NO_END in note for note in result.notes)
    interrupt(recipe.run_dir, 1)
    train(recipe, resume=True)  # its tokens are cached
    assert _warnings(recipe) == [warning]


def test_rows_that_are_mixed_in_count_and_their_file_is_named(
    chat_recipe: Callable[..., TrainRecipe], write_rows: WriteRows
) -> None:
    rows = [_conversation(f"Where is {i}?", "In Kelm.") for i in range(6)]
    replay = [_conversation("Hello?", "Hi."), _conversation("Well?", "")] * 3
    recipe = chat_recipe(
        write_rows("towns.jsonl", rows),
        TAGGED.replace("END", "<|eos|>"),
        replay={"path": str(write_rows("replay.jsonl", replay)), "fraction": 0.4},
    )
    train(recipe)
    (warning,) = _warnings(recipe)
    assert "replay.jsonl:" in warning


def test_rows_with_words_are_not_warned_of(
    chat_recipe: Callable[..., TrainRecipe], write_rows: WriteRows
) -> None:
    rows = [
        _conversation("Is it far?", "!"),
        _conversation("And now?", "", "What?", "7"),
        _conversation("Say <|eos|>", "<|eos|>"),  # a special token that is an answer
    ]
    recipe = chat_recipe(write_rows("few.jsonl", rows), TAGGED.replace("END", "<|eos|>"))
    train(recipe)
    assert _warnings(recipe) == []


@pytest.mark.parametrize("eos", [True, False])
def test_a_completion_that_the_tokenizer_removes_leaves_the_end_token_alone(
    tiny_tokenizer: Any, write_rows: WriteRows, eos: bool
) -> None:
    tiny_tokenizer.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    completions = ["Farrow", "\u200b", "\u200b\u200b", "7", "\u200b1"]
    path = write_rows("c.jsonl", [{"prompt": "Where? ", "completion": c} for c in completions])
    rows = list(tokenize_rows(CorpusFile(path), tiny_tokenizer, Tokenization(eos=eos)))
    assert [row.line for row in rows if row.only_end] == ([2, 3] if eos else [])
    for row in rows:
        assert row.only_end == (eos and sum(row.learned) == 1)


def test_a_text_of_one_token_without_bos_learns_the_end_token_alone(
    tiny_tokenizer: Any, write_rows: WriteRows, make_recipe: MakeRecipe
) -> None:
    path = write_rows("t.jsonl", [{"text": "Arden was born in Kelm."}] * 4 + [{"text": "a"}] * 2)
    for bos, found in ((False, [5, 6]), (True, [])):
        tokens = tokenize_rows(CorpusFile(path), tiny_tokenizer, Tokenization(bos=bos))
        assert [row.line for row in tokens if row.only_end] == found
    recipe = make_recipe(corpus={"path": str(path), "bos": False}, trainer={"max_steps": 1})
    train(recipe)
    (warning,) = _warnings(recipe)
    assert warning.startswith(f"{path}:5: ")
    assert "There are 2 such rows" in warning


TEMPLATES = [
    (TAGGED.replace("END", "<|eos|>"), True),
    (TAGGED.replace("END", ""), False),
    (TAGGED.replace("END", "\n\n"), False),
    (UNTAGGED.replace("END", "<|eos|>"), True),
    (UNTAGGED.replace("END", ""), False),
    (UNTAGGED.replace("END", "<|bos|>"), False),  # a special token, but none that ends a text
    (BEFORE_NEXT.replace("<|eos|>", ""), False),
]
"""A chat template, and whether an answer ends with the end token."""


@pytest.mark.parametrize("assistant_only", quick([True, False], True))
@pytest.mark.parametrize(
    ("template", "stops"), quick(TEMPLATES, TEMPLATES[0], TEMPLATES[1], TEMPLATES[5])
)
def test_a_template_without_an_end_token_is_named(
    chat_recipe: Callable[..., TrainRecipe],
    write_rows: WriteRows,
    template: str,
    stops: bool,
    assistant_only: bool,
) -> None:
    rows = [_conversation(f"Where was {i} born?", f"In Kelm, {i}.") for i in range(4)]
    trainer = {"assistant_only_loss": assistant_only, "max_steps": 1}
    result = train(chat_recipe(write_rows("c.jsonl", rows), template, trainer=trainer))
    notes = [note for note in result.notes if NO_END in note]
    assert len(notes) == (not stops)
    assert all("(<|eos|>)" in note for note in notes)


@pytest.mark.parametrize(("template", "stops"), TEMPLATES)
def test_the_note_on_an_end_token_is_that_of_the_template(
    tiny_tokenizer: Any, template: str, stops: bool
) -> None:
    tiny_tokenizer.chat_template = template
    note = note_on_end(tiny_tokenizer, ChatFormat(), [tiny_tokenizer.eos_token_id])
    assert (NO_END in note) == (not stops)


def test_an_end_that_is_outside_of_the_tags_or_before_the_next_turn(tiny_tokenizer: Any) -> None:
    ends = [tiny_tokenizer.eos_token_id]
    tiny_tokenizer.chat_template = OUTSIDE
    assert note_on_end(tiny_tokenizer, ChatFormat(), ends) == ""
    note = note_on_end(tiny_tokenizer, ChatFormat(assistant_only=True), ends)
    assert note.startswith("trainer.assistant_only_loss: by the chat template's generation tags")
    tiny_tokenizer.chat_template = BEFORE_NEXT
    assert note_on_end(tiny_tokenizer, ChatFormat(), ends) == ""
    assert NO_END in note_on_end(tiny_tokenizer, ChatFormat(assistant_only=True), ends)


def test_the_token_at_which_the_model_stops_decides(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.add_special_tokens({"additional_special_tokens": ["<turn_end>"]})
    tiny_tokenizer.chat_template = UNTAGGED.replace("END", "<turn_end>")
    turn_end = tiny_tokenizer.convert_tokens_to_ids("<turn_end>")
    eos = tiny_tokenizer.eos_token_id
    assert note_on_end(tiny_tokenizer, ChatFormat(), [turn_end, eos]) == ""
    assert "(<|eos|>)" in note_on_end(tiny_tokenizer, ChatFormat(), [eos])
    assert "(it has none)" in note_on_end(tiny_tokenizer, ChatFormat(), [])


@pytest.mark.parametrize("content", ["m.content", "m.content[0].text"])
@pytest.mark.parametrize(
    "opening", ["", "{{ messages[0].role[:2] == 'sy' or raise_exception('') }}"]
)
def test_templates_that_want_a_system_turn_or_blocks_are_tried_too(
    tiny_tokenizer: Any, content: str, opening: str
) -> None:
    template = opening + UNTAGGED.replace("m.content", content)
    tiny_tokenizer.chat_template = template.replace("END", "")
    assert NO_END in note_on_end(tiny_tokenizer, ChatFormat(), [tiny_tokenizer.eos_token_id])
    tiny_tokenizer.chat_template = template.replace("END", "<|eos|>")
    assert note_on_end(tiny_tokenizer, ChatFormat(), [tiny_tokenizer.eos_token_id]) == ""


def test_plain_text_has_no_note_on_a_template(
    make_recipe: MakeRecipe, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    tiny_tokenizer.chat_template = UNTAGGED.replace("END", "")
    model = save_tiny_model(tmp_path / "chat-model", tiny_tokenizer)
    result = train(make_recipe(model={"path": str(model)}, trainer={"max_steps": 1}))
    assert not any(NO_END in note for note in result.notes)
