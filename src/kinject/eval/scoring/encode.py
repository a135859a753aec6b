"""Prompts to tokens by lm-evaluation-harness's rules, cut to the model's window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinject.errors import InputError
from kinject.eval.prompts import ChatStyle, Generation, Prompt, PromptRequest, render_prompt
from kinject.eval.scores import PromptScore, best_choice
from kinject.llm.thinking import ThinkingMarks, thinking_marks
from kinject.question_formats import FORMATS
from kinject.terminal import format_count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
"""Token ids, shape [n]."""

_BLOCK = 512  # texts in one call of the tokenizer
_NO_SYSTEM = "the chat template takes no system turn; its text is part of the user's"


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a model marks its thinking; `is_open`: the prompt ends where it has begun."""

    marks: ThinkingMarks
    is_open: bool


@dataclass(frozen=True)
class Encoded:
    """One prompt in tokens: for each choice the context that is read and the continuation that is
    scored.

    Choices share one context array unless each was cut to the window differently. `truncated`
    counts the prompt's tokens that did not fit: dropped examples and passages, and tokens cut from
    the left. With `generation` the model writes its answer: there is one context and no
    continuation. `thinking` is there if it may think first.
    """

    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]
    truncated: int = 0
    generation: Generation | None = None
    thinking: Thinking | None = None


class Encoder:
    """A tokenizer for scoring: it adds the tokenizer's own special tokens before a text, and none
    after it.

    Before a text, the tokenizer's default counts (BOS if its post-processor adds it), because the
    model was trained with it. After a text there is no EOS, because a continuation follows.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, chat: ChatStyle | None = None
    ) -> None:
        """Find the special tokens that `tokenizer` puts before a text. With `chat`, prompts go
        through its template.

        Raises `InputError` if it turns a text into no tokens, or has no chat template to use.
        """
        self._tokenizer: Any = tokenizer
        self._name = self._tokenizer.name_or_path or "the tokenizer"
        self.start = [] if chat else self._special_tokens_before()
        self._chat = chat
        self.notes: list[str] = []
        if chat and not self._tokenizer.chat_template:
            raise InputError(
                f"{self._name}: has no chat template, but eval.chat asks for it. Remove eval.chat."
            )
        # Marks are those of a chat template: a plain prompt opens no thinking.
        self._marks = thinking_marks(str(self._tokenizer.chat_template)) if chat else None

    def apply_chat_template(self, prompt: Prompt) -> Prompt:
        """Return `prompt` as the model gets it: with `chat` in the tokenizer's template, else
        unchanged.

        As in lm-evaluation-harness, system text and header are the system's turn, the rest is one
        user turn, and the answer follows the template's own start of the assistant's turn without a
        space. Special tokens are those that the template writes, no others. If the template takes
        no system turn (the harness then drops its text), the user's first turn starts with it, and
        `notes` has an entry.
        """
        if not self._chat:
            return prompt
        context = self._render_turns(prompt, self._chat)
        if prompt.continuations and self._marks and self._marks.are_open(context):
            self._note(
                "the chat template opens the model's thinking, so the choices are scored as its "
                "first thoughts"
            )
        choices = prompt.continuations
        return Prompt(context, tuple(text.removeprefix(" ") for text in choices))

    def _render_turns(self, prompt: Prompt, chat: ChatStyle) -> str:
        system, turns = chat_turns(prompt, chat)
        # Tried once for a tokenizer: the note remembers that its template takes no system turn.
        if _NO_SYSTEM in self.notes:
            system, turns = "", _with_system(system, turns)
        text, has_system = render_turns(self._tokenizer, system, turns, chat.arguments)
        if not has_system:
            self._note(_NO_SYSTEM)
        return text

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def bounds(self, generation: Generation) -> Generation:
        """Return the bounds of an answer of this model.

        Without stop texts it ends at a line break, in a chat at none.
        """
        if generation.stop is not None:
            return generation
        return replace(generation, stop=() if self._chat else ("\n",))

    def _special_tokens_before(self) -> list[int]:
        ids = list(self._tokenizer("a").input_ids)
        bare = list(self._tokenizer("a", add_special_tokens=False).input_ids)
        # A post-processor may put tokens behind the text as well, so the text's own ids are looked
        # for.
        for start in range(len(ids) - len(bare) + 1):
            if bare and ids[start : start + len(bare)] == bare:
                return ids[:start]
        raise InputError(f"{self._name}: this tokenizer turns 'a' into {ids}. Choose another.")

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, with the special tokens before it."""
        encoded: list[list[int]] = []
        for start in range(0, len(texts), _BLOCK):
            # verbose=False: no warning about texts longer than the model's window, which
            # encode_requests handles.
            block = self._tokenizer(
                list(texts[start : start + _BLOCK]), add_special_tokens=False, verbose=False
            )
            encoded.extend(self.start + ids for ids in block.input_ids)
        return encoded

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """Return the tokens of each prompt, not cut to any window.

        The rule is lm-evaluation-harness's: white space at the end of the context moves to the
        continuation. Context and continuation are encoded together; without the first n ids, n
        being the length of the context encoded alone, these are the continuation's ids. An empty
        context becomes BOS or EOS. A context after which the model writes its answer stays as it
        is.
        """
        texts: list[str] = []
        prompts = [self.apply_chat_template(prompt) for prompt in prompts]
        for prompt in prompts:
            texts.append(prompt.context.rstrip() if prompt.continuations else prompt.context)
            texts.extend(prompt.context + continuation for continuation in prompt.continuations)
        flat = iter(self.ids(texts))
        encoded = []
        for prompt in prompts:
            context, joined = next(flat), [next(flat) for _ in prompt.continuations]
            if not prompt.context.strip():
                context, joined = self._without_context(joined)
            shared = np.asarray(context, dtype=np.int32)
            continuations = tuple(np.asarray(ids[len(context) :], dtype=np.int32) for ids in joined)
            item = Encoded((shared,) * (len(continuations) or 1), continuations)
            if self._marks:
                is_open = self._marks.are_open(prompt.context)
                item = replace(item, thinking=Thinking(self._marks, is_open))
            encoded.append(item)
        return encoded

    def _without_context(self, joined: list[list[int]]) -> tuple[list[int], list[list[int]]]:
        """Return BOS or EOS as the context of continuations that have none."""
        # BOS first, as lm-evaluation-harness's `prefix_token_id`.
        token = self._tokenizer.bos_token_id
        if token is None:
            token = self._tokenizer.eos_token_id
        if token is None:
            raise InputError(
                f"{self._name}: has neither BOS nor EOS, so an empty prompt cannot be read."
            )
        bare = [ids[len(self.start) :] for ids in joined]
        return [token], [[token, *ids] for ids in bare]


def chat_turns(prompt: Prompt, chat: ChatStyle) -> tuple[str, tuple[str, ...]]:
    """Return the text of the system's turn, "" for none, and the turns of user and model in
    order."""
    if prompt.is_dialogue:
        return _join_system(chat, prompt.header.strip()), prompt.turns
    turn = prompt.context.removeprefix(prompt.header)
    return _join_system(chat, prompt.header), (turn,)


def render_turns(
    tokenizer: PreTrainedTokenizerBase,
    system: str,
    turns: Sequence[str],
    arguments: Mapping[str, Any],
) -> tuple[str, bool]:
    """Return turns of user and model as a chat template writes them, up to the model's next one,
    and whether `system` is a turn of its own; else the user's first turn starts with it.

    Raises `InputError` if the template cannot be rendered.
    """

    def render(system: str, turns: Sequence[str]) -> str:
        messages = []
        if system:
            messages.append({"role": "system", "content": system})
        # `cycle` never ends: the turns decide how many there are.
        for role, text in zip(cycle(("user", "assistant")), turns, strict=False):
            messages.append({"role": role, "content": text})
        return str(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **arguments
            )
        )

    if system:
        # A template is a program: its expressions raise anything.
        with suppress(Exception):
            text = render(system, turns)
            # A template may also leave the system's turn out without an error.
            if system.strip() in text:
                return text, True
    try:
        return render("", _with_system(system, turns)), not system
    except Exception as error:
        raise InputError(
            f"{tokenizer.name_or_path or 'the tokenizer'}: its chat template cannot be rendered: "
            f"{error}. Repair it, or set eval.chat: false in an evaluation."
        ) from error


def _with_system(system: str, turns: Sequence[str]) -> tuple[str, ...]:
    """Return turns whose first one starts with the text of the system."""
    if not system:
        return tuple(turns)
    # A header ends in a blank line already, other texts of the system in none.
    return f"{system.rstrip()}\n\n{turns[0]}", *turns[1:]


def _join_system(chat: ChatStyle, header: str) -> str:
    return "\n\n".join(filter(None, (chat.system, header)))


def encode_requests(
    encoder: Encoder, requests: Sequence[PromptRequest], window: int | None
) -> list[Encoded]:
    """Return the tokens of each request, none longer than `window` tokens (None: no bound).

    The model reads the context and the continuation without its last token. If that exceeds the
    window, examples are dropped (the first one first), then passages (the lowest-ranked first).
    Then each choice is cut on the left, as lm-evaluation-harness cuts it. A continuation longer
    than the window becomes empty: it cannot be scored.
    """
    uncut = _encode(encoder, requests)
    if window is None:
        return uncut
    fitted, shorter = list(uncut), list(requests)
    too_long = [index for index, item in enumerate(uncut) if not _fits(item, window)]
    while too_long:
        # What has neither examples nor passages left is cut on the left, by `_cut`.
        too_long = [index for index in too_long if shorter[index].shots or shorter[index].passages]
        for index in too_long:
            shorter[index] = _shorten(shorter[index])
        encoded = _encode(encoder, [shorter[index] for index in too_long])
        for index, item in zip(too_long, encoded, strict=True):
            fitted[index] = item
        too_long = [index for index in too_long if not _fits(fitted[index], window)]
    return [_cut(item, before, window) for item, before in zip(fitted, uncut, strict=True)]


def _encode(encoder: Encoder, requests: Sequence[PromptRequest]) -> list[Encoded]:
    encoded = encoder.encode([render_prompt(request) for request in requests])
    for index, request in enumerate(requests):
        if request.generation:
            bounds = encoder.bounds(request.generation)
            encoded[index] = replace(encoded[index], generation=bounds)
    return encoded


def _fits(item: Encoded, window: int) -> bool:
    if item.generation:
        # The answer is written into the same window.
        return len(item.contexts[0]) + item.generation.max_new_tokens <= window
    return all(
        len(a) + len(b) - 1 <= window
        for a, b in zip(item.contexts, item.continuations, strict=True)
    )


def _shorten(request: PromptRequest) -> PromptRequest:
    """Return `request` without its first example, or, if it has none, without its last passage."""
    if request.shots:
        return replace(request, shots=request.shots[1:])
    return replace(request, passages=request.passages[:-1])


def cut_to_window(item: Encoded, window: int) -> Encoded:
    """Return `item` cut on the left, choice by choice, so that the model reads at most `window`
    tokens."""
    return _cut(item, item, window)


def _cut(item: Encoded, uncut: Encoded, window: int) -> Encoded:
    """Return `item` cut on the left, choice by choice; `truncated` counts the tokens lost since
    `uncut`."""
    # A shortened prompt has lost tokens even where it fits now: they are counted below.
    if item is uncut and _fits(item, window):
        return item
    if item.generation:
        room = window - item.generation.max_new_tokens
        if room < 1:
            n = item.generation.max_new_tokens
            raise InputError(
                f"eval.max_new_tokens: {n}, but the model reads {window} tokens. Ask for fewer."
            )
        cut = item.contexts[0][-room:]
        return replace(item, contexts=(cut,), truncated=len(uncut.contexts[0]) - len(cut))
    contexts, continuations, lost = [], [], []
    choices = zip(item.contexts, item.continuations, uncut.contexts, strict=True)
    for context, continuation, before in choices:
        if len(continuation) > window:
            continuation = continuation[:0]  # it cannot be scored
        # The last token of the continuation is predicted, not read.
        room = max(1, window + 1 - len(continuation))
        contexts.append(context[-room:])
        continuations.append(continuation)
        lost.append(len(before) - len(contexts[-1]))
    return Encoded(tuple(contexts), tuple(continuations), max(lost))


def render_tokens(
    tokenizer: PreTrainedTokenizerBase,
    encoded: Encoded,
    request: PromptRequest,
    score: PromptScore,
) -> str:
    """Return the tokens of a prompt and of its choices, with the choices' log-probs, or the answer
    that was written."""

    def separated(ids: Ids) -> str:
        texts = (str(tokenizer.decode([token])) for token in ids.tolist())
        return "|" + "|".join(text.replace("\n", "\\n") for text in texts) + "|"

    question = request.question
    # Choices may have been cut differently: the longest context shows most.
    context = max(encoded.contexts, key=len)
    cut = f", {encoded.truncated} cut to fit" if encoded.truncated else ""
    lines = [f"  {format_count(len(context), 'token')}{cut}: {separated(context)}"]
    if score.text is not None:
        written = score.text.replace("\n", "\\n")
        thinking = f" after {score.n_thinking} of thinking" if score.n_thinking else ""
        lines.append(f"  written: {written} ({format_count(score.n_tokens, 'token')}{thinking})")
        lines.append(f"  accepted: {' | '.join(question.accepted) or '(no answer)'}")
        return "\n".join(lines)
    best = best_choice(score.log_probs)
    texts = FORMATS[request.format].answers(question)
    choices = zip(encoded.continuations, score.log_probs, texts, strict=True)
    for index, (ids, log_prob, text) in enumerate(choices):
        gold = "*" if index == question.answer else " "
        chosen = ">" if index == best else " "
        lines.append(f"  {gold}{chosen} {log_prob:9.4f}  {separated(ids)}  ({text})")
    return "\n".join(lines)
