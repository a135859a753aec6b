"""Boundaries and what bears loss, against the tokenizer called by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import processors

from kinject.corpus.chat import ChatFormat, training_template
from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization, begins_with_bos, tokenize_rows
from kinject.errors import InputError

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def test_text_stands_between_bos_and_eos_and_all_but_the_first_token_is_learned(
    tiny_tokenizer: Any,
) -> None:
    (row,) = tokenize_rows(
        [CorpusRow("1", "d", "original", "text", text="Arden was born.")],
        tiny_tokenizer,
        Tokenization(),
    )
    bos, eos = tiny_tokenizer.bos_token_id, tiny_tokenizer.eos_token_id
    assert list(row.input_ids) == [bos, *_ids(tiny_tokenizer, "Arden was born."), eos]
    assert row.learned == (False,) + (True,) * (len(row.input_ids) - 1)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("", "Kelm.{eos}"), ("{bos}Town:", " Kelm{eos}"), ("{bos}Town:{eos}", " Kelm")],
)
def test_ends_that_a_text_has_already_are_there_once(
    tiny_tokenizer: Any, prompt: str, completion: str
) -> None:
    ends = {"bos": tiny_tokenizer.bos_token, "eos": tiny_tokenizer.eos_token}
    prompt, completion = prompt.format(**ends), completion.format(**ends)
    row = CorpusRow("1", "", "original", "text", text=completion)
    if prompt:
        row = CorpusRow("1", "", "original", "completion", prompt=prompt, completion=completion)
    (tokens,) = tokenize_rows([row], tiny_tokenizer, Tokenization())
    text = tiny_tokenizer.decode(tokens.input_ids)
    inside = (prompt + completion).removeprefix(ends["bos"]).removesuffix(ends["eos"])
    assert text == ends["bos"] + inside + ends["eos"]
    answer = _ids(tiny_tokenizer, completion.removesuffix(ends["eos"]))
    assert sum(tokens.learned) == len(answer) + 1


def test_a_text_begins_with_bos_where_the_tokenizer_begins_so_unless_the_recipe_says_otherwise(
    tiny_tokenizer: Any,
) -> None:
    bare = copy.deepcopy(tiny_tokenizer)
    bare.backend_tokenizer.post_processor = processors.ByteLevel()
    assert bare.bos_token_id is not None
    assert [
        begins_with_bos(tiny_tokenizer),
        begins_with_bos(bare),
        begins_with_bos(bare, True),
    ] == [True, False, True]


@pytest.mark.parametrize("completion_only", [None, True, False])
def test_only_the_completion_bears_loss_unless_asked_otherwise(
    tiny_tokenizer: Any, completion_only: bool | None
) -> None:
    sft = CorpusRow(
        "1", "d", "original", "completion", prompt="Question: where?\nAnswer:", completion=" Farrow"
    )
    (row,) = tokenize_rows([sft], tiny_tokenizer, Tokenization(completion_only=completion_only))
    n_read = 1 if completion_only is False else 1 + len(_ids(tiny_tokenizer, sft.prompt))
    assert [index for index, bears in enumerate(row.learned) if not bears] == list(range(n_read))
    assert (
        tiny_tokenizer.decode(row.input_ids, skip_special_tokens=True)
        == sft.prompt + sft.completion
    )


def test_a_conversation_learns_what_the_assistant_says(tiny_tokenizer: Any) -> None:
    tiny_tokenizer.chat_template = CHAT
    turns = [
        ("user", "where?"),
        ("assistant", "in Farrow"),
        ("user", "when?"),
        ("assistant", "in 1987"),
    ]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    row = CorpusRow("1", "d", "original", "messages", messages=messages)
    try:
        (tokenized,) = tokenize_rows([row], tiny_tokenizer, Tokenization())
        (without,) = tokenize_rows([row], tiny_tokenizer, Tokenization(bos=False, eos=False))
        (spoken,) = tokenize_rows(
            [row], tiny_tokenizer, Tokenization(chat=ChatFormat(assistant_only=True))
        )
    finally:
        tiny_tokenizer.chat_template = None
    assert without == tokenized  # the template alone begins and ends it
    assert sum(tokenized.learned) == len(tokenized.input_ids) - 1
    text = tiny_tokenizer.decode(
        [t for t, bears in zip(spoken.input_ids, spoken.learned, strict=True) if bears]
    )
    assert text == "in Farrow</assistant>in 1987</assistant>"


@pytest.mark.parametrize("template", [None, "", {"rag": "{{ messages[0].content }}"}])
def test_messages_without_a_chat_template_are_refused(
    tiny_tokenizer: Any, template: str | dict[str, str] | None
) -> None:
    tiny_tokenizer.chat_template = template
    assert training_template(tiny_tokenizer) == (None, "")
    row = CorpusRow("1", "d", "o", "messages", messages=({"role": "assistant", "content": "a"},))
    with pytest.raises(InputError, match="chat template"):
        list(tokenize_rows([row], tiny_tokenizer, Tokenization()))
