"""Conversations through a chat template: their tokens, the assistant's part, and text that is left
out.

The assistant's part is marked by the template's ``{% generation %}`` tags, as TRL does. A template
without them is replaced by TRL's training template for it, if there is one; else the conversation
is rendered turn by turn.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kinject.corpus.rows import RESERVED_KWARGS, CorpusRow, JsonValue
from kinject.corpus.spans import Span, common_beginning, overlapping, tokens_of
from kinject.disk import Row
from kinject.errors import InputError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of a message's thinking; transformers gives a template each of them."""


@dataclass(frozen=True)
class ChatFormat:
    """The settings by which conversations become tokens. `template` replaces the tokenizer's own,
    with `kwargs` as its arguments. `assistant_only`: only the assistant's turns are learned.
    `allow_dropped`: text that the template leaves out is counted instead of refused.
    """

    assistant_only: bool = False
    template: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    allow_dropped: bool = False


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has a chat template; of several with names that is the default."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return "default" in template
    return bool(template)


def training_template(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, str]:
    """Return (TRL's training template for this tokenizer's, None to render with its own; a note on
    the choice, "" for none).

    TRL's have generation tags where the model's have none, and render a turn alike whatever
    follows.
    """
    from trl.chat_template_utils import (
        get_training_chat_template,
        has_generation_markers,
    )

    model_template = tokenizer.chat_template
    replaced, note = None, ""
    if not has_template(tokenizer):
        return replaced, note
    if not has_generation_markers(model_template):
        try:
            replaced = get_training_chat_template(tokenizer)
        # TRL renders the template to test it, and a template raises anything.
        except Exception:  # noqa: BLE001
            return None, (
                "trainer.assistant_only_loss: the chat template has no generation tags, and TRL "
                "has no training template for it. The assistant's part is found by rendering each "
                "conversation turn by turn; rows in which the template rewrites earlier turns are "
                "refused. A template with tags may be set as trainer.chat_template_path"
            )
        note = (
            "trainer.assistant_only_loss: conversations are rendered with TRL's training template "
            "for this model"
        )
    return replaced, note


def check_kwargs(kwargs: Mapping[str, Any], *templates: str | Mapping[str, str] | None) -> None:
    """Raise `InputError` for arguments that none of `templates` reads or that are kinject's own."""
    named = (
        list(template.values()) if isinstance(template, Mapping) else [template]
        for template in templates
    )
    words = _words("\n".join(text for texts in named for text in texts if text))
    for name in kwargs:
        if name in RESERVED_KWARGS:
            raise InputError(f"found {name}, which is set by kinject. Remove it.")
        if name not in words:
            raise InputError(
                f"found {name}, which the chat template does not read. Check the spelling, or "
                "remove it."
            )


# Called for each row, with the same few templates.
@functools.lru_cache(maxsize=8)
def _words(template: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", template))


def encode_conversation(
    row: CorpusRow, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> tuple[list[int], list[bool], int]:
    """Return (token ids, whether each is learned, tokens of the row's text that the template leaves
    out).

    Raises `InputError` if the template cannot be rendered, leaves text out without permission, or
    if the assistant's part cannot be found.
    """
    # None: an empty list would select the tokenizer's template for tools.
    tools = [*row.tools] or None
    template = tokenizer.get_chat_template(chat.template, tools)
    try:
        check_kwargs(row.template_kwargs, template, tokenizer.chat_template)
    except InputError as error:
        raise InputError(f"chat_template_kwargs: {error}") from error
    # A row's own arguments come last and win (docs/training.md).
    options = {"chat_template": chat.template, "tools": tools, **chat.kwargs, **row.template_kwargs}
    row, text = _render_row(row, tokenizer, options)
    lost = _left_out(row, text)
    # Templates drop what they do not know without an error: Llama 3's has no tools.
    if lost and not chat.allow_dropped:
        raise InputError(_describe_lost(lost))
    ((ids, offsets),) = tokens_of([text], tokenizer)
    learned = [True] * len(ids)
    if chat.assistant_only and offsets is None:
        raise InputError(
            "this tokenizer is a slow one, which does not know the position of its tokens in the "
            "text, so the assistant's part "
            "cannot be marked. Set trainer.assistant_only_loss: false."
        )
    if chat.assistant_only and offsets is not None:
        learned = overlapping(offsets, _assistant_spans(row, tokenizer, template, options, text))
    # The first token is never learned: no token is before it.
    if not any(learned[1:]):
        raise InputError("the chat template leaves nothing of this row to learn. Remove the row.")
    n_lost = sum(
        len(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
        for _, part in lost
    )
    return ids, learned, n_lost


def _render_row(
    row: CorpusRow, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any]
) -> tuple[CorpusRow, str]:
    """Return a row as its template reads it, and its text.

    OpenAI's API gives the arguments of a tool call as the JSON text of an object. Nearly all
    templates want the object: of a text they would write the JSON a second time, with its quotes
    escaped, or none.
    """
    read = replace(row, messages=tuple(map(_with_objects, row.messages)))
    if read != row:
        try:
            return read, _render(tokenizer, read.messages, options, False)
        except InputError:
            pass  # DeepSeek's templates join texts, and cannot join an object
    return row, _render(tokenizer, row.messages, options, False)


def _with_objects(message: Row) -> Row:
    """Return a message whose tool calls have their arguments as an object."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    read = []
    for call in calls:
        function = dict(call.get("function", call))
        arguments = _object_in(function.get("arguments"))
        if arguments is not None:
            function["arguments"] = arguments
        read.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": read}


def _object_in(arguments: JsonValue) -> Row | None:
    """Return the object of which `arguments` are the JSON text, None if of none."""
    if not isinstance(arguments, str):
        return None
    try:
        value = json.loads(arguments)
    # Not JSONDecodeError: an integer of over 4,300 digits raises its parent.
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    prompt: bool,
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                [*messages], tokenize=False, add_generation_prompt=prompt, **options
            )
        )
    except Exception as error:  # a template is a program: its expressions raise anything
        raise InputError(
            f"the chat template cannot be rendered ({one_line(error)}). Change the row, or set "
            "trainer.chat_template_path."
        ) from error


def _render_before(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
) -> str:
    """Return what stands before the assistant's answer to `messages`, "" where a template needs a
    message to render."""
    if messages:
        return _render(tokenizer, messages, options, True)
    try:
        # A batch of one conversation without a message: transformers asks an empty one for its
        # first.
        (text,) = tokenizer.apply_chat_template(
            [[]], tokenize=False, add_generation_prompt=True, **options
        )
    except Exception:  # noqa: BLE001 - a template is a program, and many read messages[0]
        return ""  # the role of an assistant that speaks first is learned with its words
    return str(text)


def _assistant_spans(
    row: CorpusRow,
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    options: Mapping[str, Any],
    text: str,
) -> list[Span]:
    """Return the spans of `text` that the assistant writes: by the template's generation tags, else
    turn by turn.

    The tags' spans are those of the rendered text. The mask of tokens that transformers makes of
    them is not used: it marks the rest of a row where a span ends in trimmed white space (#47325
    there).
    """
    from transformers.utils.chat_template_utils import render_jinja_template
    from trl.chat_template_utils import has_generation_markers

    if has_generation_markers(template):
        arguments = {**tokenizer.special_tokens_map, **options, "chat_template": template}
        rendered: Any = render_jinja_template(
            [[*row.messages]], return_assistant_tokens_mask=True, **arguments
        )
        (again,), (tagged,) = rendered
        if again != text:
            raise InputError(
                "the chat template renders this row in two ways, so the assistant's part cannot be "
                "marked. Set trainer.assistant_only_loss: false, or another "
                "trainer.chat_template_path."
            )
        return [(start, end) for start, end in tagged if start < end]
    spans = []
    for index, message in enumerate(row.messages):
        if message["role"] != "assistant":
            continue
        before = _render_before(tokenizer, row.messages[:index], options)
        after = _render(tokenizer, row.messages[: index + 1], options, False)
        if not (after.startswith(before) and text.startswith(after.rstrip())):
            raise InputError(
                "the chat template has no generation tags and rewrites earlier turns, so the "
                f"assistant's part of message {index + 1} cannot be marked. Set a template with "
                "tags as trainer.chat_template_path, or trainer.assistant_only_loss: false."
            )
        end = len(after)
        # A template may end the last turn alone with white space: where another turn follows, its
        # beginning stands there.
        if not text.startswith(after):
            end = common_beginning(text, after)
        spans.append((len(before), end))
    return spans


def learns_no_words(
    row: CorpusRow,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    learned: Sequence[bool],
) -> bool:
    """Return whether of a conversation's tokens only those are learned that the template writes
    around the assistant's words: end tokens, tags, white space."""
    turns = tuple(message for message in row.messages if message["role"] == "assistant")
    words = "\n".join(
        text for _, text in conversation_texts(replace(row, messages=turns, tools=()))
    )
    if not words.strip():
        return True
    chosen = [token for token, is_learned in zip(ids, learned, strict=True) if is_learned]
    if tokenizer.decode(chosen, skip_special_tokens=True).strip():
        return False
    # An answer may be a special token itself, as class labels are that were added to a vocabulary.
    of_words = tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
    return set(chosen).isdisjoint(of_words)


_QUESTION, _ANSWER = "the question", "the answer"
_TURNS = (
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _QUESTION},
)


def note_on_end(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, ends: Collection[int]) -> str:
    """Return a note if no token of `ends`, at which the model stops, is learned behind the
    assistant's words; "" if one is, or if the template does not render a plain conversation.

    Two conversations are tried: some templates end a turn only when another follows, some only the
    last one. They are tried in the form that the template expects: it may want a system turn, or
    contents in blocks.
    """
    from trl.chat_template_utils import has_generation_markers

    rendered: list[str] = []
    for turns in _forms():
        tails = [_behind_answer(tokenizer, chat, part) for part in (turns[:-1], turns)]
        rendered = [tail for tail in tails if tail is not None]
        if rendered:
            break
    for tokens in tokens_of(rendered, tokenizer, offsets=False):
        if not set(tokens.ids).isdisjoint(ends):
            return ""
    if not rendered:
        return ""
    names = ", ".join(str(name) for name in tokenizer.convert_ids_to_tokens([*ends]))
    missing = (
        f"does not end with a token at which this model stops ({names or 'it has none'}), so the "
        "model may not learn to stop"
    )
    template = tokenizer.get_chat_template(chat.template)
    if chat.assistant_only and has_generation_markers(template):
        return (
            "trainer.assistant_only_loss: by the chat template's generation tags, the assistant's "
            f"turn {missing}"
        )
    return f"the assistant's turn in the chat template {missing}"


def _forms() -> Iterator[tuple[Row, ...]]:
    """Yield a conversation as it is, with its contents in blocks, and both behind a system turn."""
    for opening in ((), ({"role": "system", "content": "the rules"},)):
        turns: tuple[Row, ...] = (*opening, *_TURNS)
        yield turns
        yield tuple(
            {**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns
        )


def _behind_answer(
    tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, messages: Sequence[Row]
) -> str | None:
    """Return the learned text between the assistant's words and the next turn's; None if the
    template does not render `messages`, or changes their words."""
    row = CorpusRow("", "", "", "messages", messages=tuple(messages))
    options = {"chat_template": chat.template, "tools": None, **chat.kwargs}
    try:
        text = _render(tokenizer, messages, options, False)
        spans = [(0, len(text))]
        if chat.assistant_only:
            template = tokenizer.get_chat_template(chat.template)
            spans = _assistant_spans(row, tokenizer, template, options, text)
    except InputError:  # each row of the corpus that it concerns is a fault of its own
        return None
    before, answer, after = text.partition(_ANSWER)
    if not answer:
        return None
    start = len(before) + len(answer)
    end = start + len(after.partition(_QUESTION)[0])
    return "".join(text[max(start, first) : min(end, last)] for first, last in spans)


def _left_out(row: CorpusRow, text: str) -> list[tuple[str, str]]:
    """Return (name, text) of each part of the row that is not in the rendered `text`.

    Only letters and digits are compared, since templates trim and quote. A part is also there as
    JSON.
    """
    rendered, counts, lost = _squash(text), Counter[str](), []
    for name, part in conversation_texts(row):
        squashed = _squash(part)
        # A text that two turns hold must be rendered twice.
        counts[squashed] += 1
        forms = {squashed, _squash(json.dumps(part, ensure_ascii=False)), _squash(json.dumps(part))}
        if squashed and all(rendered.count(form) < counts[squashed] for form in forms):
            lost.append((name, part))
    return lost


def _squash(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


def conversation_texts(row: CorpusRow) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all text of a conversation that a template must render."""
    for number, message in enumerate(row.messages, 1):
        content, owner = message.get("content"), f"message {number}: its"
        text = (
            content
            if isinstance(content, str)
            else "\n".join(block["text"] for block in content or ())
        )
        # Templates such as Qwen3's take the thinking out of the content, and may leave it out.
        if message["role"] == "assistant" and "</think>" in text:
            thought, _, text = text.partition("</think>")
            yield f"{owner} thinking", thought.replace("<think>", "")
        reasoning = next((message[key] for key in REASONING if message.get(key)), "")
        yield f"{owner} thinking", reasoning
        yield f"{owner} content", text
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            for leaf in (function["name"], *_leaves(function.get("arguments"))):
                yield f"{owner} tool call {function['name']}", leaf
    for number, tool in enumerate(row.tools, 1):
        function = tool.get("function", tool)
        for key in ("name", "description"):
            yield f"tools: the {key} of tool {number}", str(function.get(key) or "")


def prepend_context(
    messages: Sequence[Mapping[str, Any]], context: str
) -> list[dict[str, Any]] | None:
    """Return `messages` with `context` in front of the user's first one; None if there is none, or
    it is no plain text."""
    turns = [dict(turn) for turn in messages]
    user_turn = next((turn for turn in turns if turn["role"] == "user"), None)
    if user_turn is None or not isinstance(user_turn.get("content"), str):
        return None
    user_turn["content"] = context + user_turn["content"]
    return turns


def _leaves(value: Any) -> Iterator[str]:
    """Yield the keys and texts of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _leaves(item)


def _describe_lost(lost: Sequence[tuple[str, str]]) -> str:
    """Return what the template leaves out of a row, and the ways to mend it."""
    names = list(dict.fromkeys(name for name, _ in lost))
    hint = ""
    if any(name.endswith("thinking") for name in names):
        hint = (
            " Many show the thinking of the last turn only: end a row with the turn whose thinking "
            "it teaches."
        )
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"the chat template leaves out {'; '.join(names[:3])}{more}.{hint} Remove it from the "
        "row, set another "
        "trainer.chat_template_path, or accept the loss with corpus.allow_dropped_tokens: true."
    )
