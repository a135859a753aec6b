"""Rows with messages through every chat template of TRL, against the rows that SFTTrainer makes of them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
import trl
from datasets import IterableDataset
from trl import chat_template_utils

from kinject.corpus.chat import ChatFormat, check_kwargs, training_template
from kinject.corpus.packing import PackingConfig, pack
from kinject.corpus.rows import parse_corpus_row
from kinject.corpus.tokenize import IGNORED, Tokenization, TokenRow, tokenize_rows
from kinject.disk import Row
from kinject.errors import InputError

FOLDER = Path(chat_template_utils.__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
UNTAGGED = {
    name
    for name in NAMES
    if not (FOLDER / f"{name}_training.jinja").exists()
    and not chat_template_utils.has_generation_markers((FOLDER / f"{name}.jinja").read_text())
}
CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"place": "Farrow"}}}
PLACE = {"place": {"type": "string", "description": "The place."}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up", "description": "Looks a place up.",
        "parameters": {"type": "object", "properties": PLACE, "required": ["place"]},
    },
}  # fmt: skip


def conversation(
    n_turns: int, *, tools: bool = False, thinking: bool = False, blocks: bool = False
) -> Row:
    """A corpus row; only its last turn thinks, since templates drop earlier thinking."""
    messages: list[Row] = []
    for turn in range(n_turns):
        messages.append({"role": "user", "content": f"Where was Arden number {turn} born?"})
        if tools and turn == 0:
            messages.append({"role": "assistant", "content": "", "tool_calls": [CALL]})
            messages.append({"role": "tool", "name": "look_up", "content": "A town by the sea."})
        messages.append({"role": "assistant", "content": f"In Farrow, as entry {turn} says."})
    if thinking:
        messages[-1]["reasoning_content"] = "The register lists the town first."
    if blocks:
        messages = [
            message | {"content": [{"type": "text", "text": message["content"]}]}
            for message in messages
        ]
    return {"messages": messages} | ({"tools": [TOOL]} if tools else {})


ROWS = [
    conversation(n_turns, tools=tools, thinking=thinking)
    for n_turns in (1, 2, 5) for tools in (False, True) for thinking in (False, True)
]  # fmt: skip
BLOCKS = [conversation(n_turns, blocks=True) for n_turns in (1, 2, 5)]


@pytest.fixture(scope="module")
def tokenizer(trained_tokenizer: Any) -> Any:
    return copy.deepcopy(trained_tokenizer)


@pytest.fixture(scope="module")
def trainer(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    _set(tokenizer, "llama3")
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes)
    )
    config = trl.SFTConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), assistant_only_loss=True, max_length=None, report_to="none", use_cpu=True,
        bf16=False, max_steps=1,
    )  # fmt: skip
    dataset = IterableDataset.from_generator(lambda: iter(copy.deepcopy(ROWS[:1])))
    return trl.SFTTrainer(
        model=model, args=config, train_dataset=dataset, processing_class=tokenizer
    )


def _set(tokenizer: Any, name: str) -> ChatFormat:
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return ChatFormat(True, training_template(tokenizer)[0], allow_dropped=True)


def _tokens(tokenizer: Any, row: Row, chat: ChatFormat) -> TokenRow:
    (tokens,) = tokenize_rows([parse_corpus_row(row, "")], tokenizer, Tokenization(chat=chat))
    return tokens


def _learned_text(tokenizer: Any, row: TokenRow) -> str:
    return str(
        tokenizer.decode(
            [token for token, learned in zip(row.input_ids, row.learned, strict=True) if learned]
        )
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in UNTAGGED])
def test_tokens_and_labels_are_those_of_sfttrainer(name: str, tokenizer: Any, trainer: Any) -> None:
    chat = _set(tokenizer, name)
    rows = _usable(tokenizer, chat, [*ROWS, *BLOCKS])
    tagged = chat_template_utils.has_generation_markers(tokenizer.chat_template)
    trainer.chat_template = (
        None if tagged else chat_template_utils.get_training_chat_template(tokenizer)
    )
    dataset = IterableDataset.from_generator(lambda: iter(copy.deepcopy(rows)))
    _compare(
        tokenizer,
        rows,
        chat,
        trainer._prepare_dataset(dataset, tokenizer, trainer.args, False, None, "train"),
    )


def _usable(tokenizer: Any, chat: ChatFormat, candidates: list[Row]) -> list[Row]:
    """The candidates that the template renders, with something of the assistant's; the others are refused by TRL, too."""
    rows = []
    for row in candidates:
        try:
            _tokens(tokenizer, row, chat)
            rows.append(row)
        except InputError as error:
            assert re.search("cannot be rendered|nothing of this row to learn", str(error))  # noqa: PT017
    assert {len(row["messages"]) for row in rows} >= {2, 4, 10}
    return rows


def _compare(tokenizer: Any, rows: list[Row], chat: ChatFormat, dataset: Any) -> None:
    for row, theirs in zip(rows, dataset, strict=True):
        ours = _tokens(tokenizer, row, chat)
        labels = [
            token if bears else IGNORED
            for token, bears in zip(ours.input_ids, ours.learned, strict=True)
        ]
        assert list(ours.input_ids) == theirs["input_ids"]
        assert labels[1:] == theirs["labels"][1:]


@pytest.mark.parametrize("name", sorted(UNTAGGED))
def test_a_template_without_tags_learns_the_assistants_turns(name: str, tokenizer: Any) -> None:
    chat = _set(tokenizer, name)
    assert chat.template is None
    assert "turn by turn" in training_template(tokenizer)[1]
    for n_turns in (1, 2, 5):
        text = _learned_text(tokenizer, _tokens(tokenizer, conversation(n_turns), chat))
        assert text.count("In Farrow, as entry") == n_turns
        assert "Arden" not in text


@pytest.mark.parametrize(
    "name", ["cohere", "gemma3", "idefics3", "lfm2_v2", "llama3", "qwen2_5_vl", "qwen3_vl"]
)
def test_turns_rendered_one_by_one_are_those_between_the_tags_of_trls_template(
    name: str, tokenizer: Any
) -> None:
    tagged = _set(tokenizer, name)
    for n_turns in (1, 2, 5):
        row = conversation(n_turns, blocks=name == "idefics3")
        tokens = _tokens(tokenizer, row, ChatFormat(True))
        if tagged.template is not None:
            assert tokens == _tokens(tokenizer, row, tagged)


@pytest.mark.parametrize(
    ("name", "tools", "thinking", "lost"),
    [
        (
            "llama3",
            True,
            False,
            "message 2: its tool call look_up; tools: the name of tool 1; tools: the description of tool 1",
        ),
        (
            "qwen2_5",
            False,
            True,
            "message 2: its thinking. Many show the thinking of the last turn only",
        ),
        ("deepseekv3", True, False, "tools: the name of tool 1; tools: the description of tool 1"),
        ("smolvlm", False, False, "message 1: its content; "),
    ],
)
def test_text_that_a_template_leaves_out_is_refused_or_counted(
    name: str, tools: bool, thinking: bool, lost: str, tokenizer: Any
) -> None:
    chat = _set(tokenizer, name)
    row = parse_corpus_row(conversation(1, tools=tools, thinking=thinking), "", "chat.jsonl:7")
    rows = tokenize_rows([row], tokenizer, Tokenization(chat=ChatFormat(True, chat.template)))
    with pytest.raises(InputError, match=rf"chat\.jsonl:7: the chat template leaves out {lost}"):
        list(rows)
    if name == "smolvlm":  # nothing is left of it
        return
    (tokens,) = tokenize_rows([row], tokenizer, Tokenization(chat=chat))
    for strategy in (None, "wrapped", "bfd_split"):
        account = pack([tokens], PackingConfig(1000, strategy), 0)[1]
        assert account.dropped == tokens.n_left_out > 0
        assert account.source == len(tokens.input_ids) + tokens.n_left_out
        assert account.trained == sum(tokens.learned)
        assert (
            account.source == account.trained + account.masked + account.truncated + account.dropped
        )


def _calling(arguments: object) -> Row:
    call = {"type": "function", "function": {"name": "tide", "arguments": arguments}}
    turns = (
        {"role": "user", "content": "When is high water?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    )
    return {"messages": [*turns, {"role": "tool", "content": "At six."}]}


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_1", "glm4moe"])
def test_arguments_as_json_text_are_learned_as_the_object(name: str, tokenizer: Any) -> None:
    chat = _set(tokenizer, name)
    arguments = {"pier": "Süd", "days": [1, 2]}
    rows = [_tokens(tokenizer, _calling(a), chat) for a in (arguments, json.dumps(arguments))]
    assert rows[0].input_ids == rows[1].input_ids
    assert rows[0].learned == rows[1].learned
    assert "Süd" in _learned_text(tokenizer, rows[1])


@pytest.mark.parametrize("name", ["qwen3_vl", "lfm2_2_5", "llama3"])
def test_a_key_of_null_in_a_turn_is_none(name: str, tokenizer: Any) -> None:
    chat = _set(tokenizer, name)
    row = _calling({"pier": "Ost"})
    sparse, full = ([dict(message) for message in row["messages"]] for _ in range(2))
    del sparse[1]["content"]
    for turn in full:
        turn |= {"tool_calls": turn.get("tool_calls"), "name": None, "reasoning_content": None}
    full[1]["content"] = None
    rows = [_tokens(tokenizer, {"messages": turns}, chat) for turns in (sparse, full)]
    assert rows[0].input_ids == rows[1].input_ids
    assert rows[0].learned == rows[1].learned


def test_a_template_that_joins_texts_and_arguments_that_are_no_object_stay(tokenizer: Any) -> None:
    written = '{"pier":"Nord"}'
    _set(tokenizer, "deepseekv3")
    row = _tokens(tokenizer, _calling(written), ChatFormat())
    assert f"```json\n{written}\n```" in _learned_text(tokenizer, row)
    chat = _set(tokenizer, "qwen2_5")
    for other in ("{pier: Nord}", "[7]", ""):
        row = _tokens(tokenizer, _calling(other), chat)
        assert f'"arguments": "{other}"' in _learned_text(tokenizer, row)


def test_every_row_that_does_not_fit_is_named(tokenizer: Any) -> None:
    chat = ChatFormat(True, _set(tokenizer, "qwen2_5").template)
    rows = [
        parse_corpus_row(conversation(1, thinking=number % 2 == 1), "", f"c.jsonl:{number + 1}")
        for number in range(4)
    ]
    tokens = tokenize_rows(rows, tokenizer, Tokenization(chat=chat))
    next(tokens)
    with pytest.raises(InputError) as caught:
        next(tokens)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [
        "c.jsonl:2",
        "c.jsonl:4",
    ]


def test_arguments_reach_the_template_and_a_rows_own_come_first(tokenizer: Any) -> None:
    chat = _set(tokenizer, "qwen3_8")
    row = conversation(1)

    def text(row_kwargs: Row, **kwargs: object) -> str:
        tokens = _tokens(
            tokenizer,
            row | {"chat_template_kwargs": row_kwargs},
            ChatFormat(True, chat.template, kwargs),
        )
        return str(tokenizer.decode(tokens.input_ids))

    assert (
        len({text({}), text({}, reasoning_effort="low"), text({}, reasoning_effort="medium")}) == 3
    )
    assert text({"reasoning_effort": "low"}, reasoning_effort="medium") == text(
        {}, reasoning_effort="low"
    )
    with pytest.raises(
        InputError, match="found resoning_effort, which the chat template does not read"
    ):
        text({"resoning_effort": "low"})
    with pytest.raises(InputError, match="found tools, which is set by kinject"):
        check_kwargs({"tools": []}, chat.template)
