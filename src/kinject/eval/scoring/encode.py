"""Prompts to tokens by lm-evaluation-harness's rules, and into the model's window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kinject.errors import InputError
from kinject.eval.prompts import Ask, Prompt, render_prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]
"""Token ids, shape [n]."""

_BLOCK = 512  # texts handed to the tokenizer at once


@dataclass(frozen=True)
class Encoded:
    """One prompt in tokens: for each choice the context that is read and the continuation that is scored.

    Choices share one context array unless the window cut them apart. `truncated` counts the prompt's tokens that did
    not fit: dropped examples and passages, and what was cut from the left.
    """

    contexts: tuple[Ids, ...]
    continuations: tuple[Ids, ...]
    truncated: int = 0


class Encoder:
    """A tokenizer as scoring needs it: special tokens before a text as the tokenizer itself puts them, none after it.

    The special tokens before a text are the tokenizer's own default (BOS where its post-processor adds it, nothing
    where it does not): a model has seen what its tokenizer does. Special tokens after a text (EOS) are left out,
    because the text goes on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat: bool = False) -> None:
        """Find out what `tokenizer` puts before a text. With `chat`, prompts become the user's turn of its template.

        Raises `InputError` when it turns text into nothing, or has no chat template to use.
        """
        self._tokenizer: Any = tokenizer
        self._name = self._tokenizer.name_or_path or "the tokenizer"
        self.start = self._special_tokens_before()
        self._chat = chat
        self.notes: list[str] = []
        if chat and not self._tokenizer.chat_template:
            raise InputError(f"{self._name}: has no chat template, but eval.chat asks for it. Take eval.chat out.")

    def as_asked(self, prompt: Prompt) -> Prompt:
        """Return `prompt` as the model gets it: with `chat` in the tokenizer's template, else as it is.

        As in lm-evaluation-harness the header is the system's turn, the rest one user turn, and the answer follows the
        template's own beginning of the assistant's turn without a space. A BOS that the template writes is left to the
        tokenizer. Where the template refuses a system turn (the harness then drops the header), the header begins the
        user's, and `notes` says so.
        """
        if not self._chat:
            return prompt
        context = self._in_turns(prompt)
        if self.start and self._tokenizer.bos_token_id == self.start[0]:
            context = context.removeprefix(self._tokenizer.bos_token)
        return Prompt(context, tuple(text.removeprefix(" ") for text in prompt.continuations))

    def _in_turns(self, prompt: Prompt) -> str:
        from jinja2 import TemplateError

        def applied(*turns: tuple[str, str]) -> str:
            messages = [{"role": role, "content": text} for role, text in turns]
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

        if prompt.header and not self.notes:
            try:
                return applied(("system", prompt.header), ("user", prompt.context.removeprefix(prompt.header)))
            except TemplateError:
                self.notes.append("the chat template takes no system turn; headers stand in the user's")
        try:
            return applied(("user", prompt.context))
        except Exception as error:  # a template is a program: its expressions raise anything
            raise InputError(
                f"{self._name}: its chat template cannot be rendered: {error}. Set eval.chat: false."
            ) from error

    def _special_tokens_before(self) -> list[int]:
        whole = list(self._tokenizer("a").input_ids)
        bare = list(self._tokenizer("a", add_special_tokens=False).input_ids)
        for at in range(len(whole) - len(bare) + 1):
            if bare and whole[at : at + len(bare)] == bare:
                return whole[:at]
        raise InputError(f"{self._name}: this tokenizer turns 'a' into {whole}. Choose another.")

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text, the tokenizer's own start included."""
        found: list[list[int]] = []
        for at in range(0, len(texts), _BLOCK):
            # verbose=False: no warning about texts longer than the model's window, which encode_asks handles
            block = self._tokenizer(list(texts[at : at + _BLOCK]), add_special_tokens=False, verbose=False)
            found.extend(self.start + ids for ids in block.input_ids)
        return found

    def encode(self, prompts: Sequence[Prompt]) -> list[Encoded]:
        """Return the tokens of each prompt; no window yet.

        The rule is lm-evaluation-harness's: white space at the end of the context moves to the continuation, and the
        continuation's ids are those of context and continuation together after the first n, where n is the number of
        ids of the context alone. An empty context becomes BOS or EOS.
        """
        texts: list[str] = []
        prompts = [self.as_asked(prompt) for prompt in prompts]
        for prompt in prompts:
            stripped = prompt.context.rstrip()
            texts.append(stripped)
            texts.extend(prompt.context + continuation for continuation in prompt.continuations)
        flat = iter(self.ids(texts))
        encoded = []
        for prompt in prompts:
            context, whole = next(flat), [next(flat) for _ in prompt.continuations]
            if not prompt.context.strip():
                context, whole = self._without_context(whole)
            shared = np.asarray(context, dtype=np.int32)
            continuations = tuple(np.asarray(ids[len(context) :], dtype=np.int32) for ids in whole)
            encoded.append(Encoded((shared,) * len(continuations), continuations))
        return encoded

    def _without_context(self, whole: list[list[int]]) -> tuple[list[int], list[list[int]]]:
        """Return BOS or EOS as the context of continuations that have none."""
        given = self._tokenizer.bos_token_id
        given = self._tokenizer.eos_token_id if given is None else given
        if given is None:
            raise InputError(f"{self._name}: has neither BOS nor EOS, so an empty prompt cannot be read.")
        bare = [ids[len(self.start) :] for ids in whole]
        return [given], [[given, *ids] for ids in bare]


def encode_pair(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of `context` and of `continuation` after it, by the rules of `Encoder.encode`."""
    encoded = Encoder(tokenizer).encode([Prompt(context, (continuation,))])[0]
    return encoded.contexts[0].tolist(), encoded.continuations[0].tolist()


def encode_asks(encoder: Encoder, asks: Sequence[Ask], window: int | None) -> list[Encoded]:
    """Return the tokens of each ask, none longer than `window` tokens (None: no bound).

    The model reads context and continuation but for its last token. Where that exceeds the window, examples go first
    (from the first), then passages (the last-ranked first), then the left of what remains, choice by choice, as
    lm-evaluation-harness cuts it. A continuation that is longer than the window becomes empty: it cannot be scored.
    """
    whole = encoder.encode([render_prompt(ask) for ask in asks])
    if window is None:
        return whole
    fitted, shorter = list(whole), list(asks)
    waiting = [index for index, item in enumerate(whole) if not _fits(item, window)]
    while waiting:
        waiting = [index for index in waiting if shorter[index].shots or shorter[index].passages]
        for index in waiting:
            shorter[index] = _shortened(shorter[index])
        again = encoder.encode([render_prompt(shorter[index]) for index in waiting])
        for index, item in zip(waiting, again, strict=True):
            fitted[index] = item
        waiting = [index for index in waiting if not _fits(fitted[index], window)]
    return [_cut(item, before, window) for item, before in zip(fitted, whole, strict=True)]


def _fits(item: Encoded, window: int) -> bool:
    return all(len(a) + len(b) - 1 <= window for a, b in zip(item.contexts, item.continuations, strict=True))


def _shortened(ask: Ask) -> Ask:
    """Return `ask` without its first example, or, where it has none, without its last passage."""
    return replace(ask, shots=ask.shots[1:]) if ask.shots else replace(ask, passages=ask.passages[:-1])


def _cut(item: Encoded, whole: Encoded, window: int) -> Encoded:
    """Return `item` cut on the left, choice by choice, with the tokens that it lost since it was `whole`."""
    if item is whole and _fits(item, window):
        return item
    continuations = tuple(ids if len(ids) <= window else ids[:0] for ids in item.continuations)
    pairs = zip(item.contexts, continuations, strict=True)
    contexts = tuple(context[-max(1, window + 1 - len(ids)) :] for context, ids in pairs)
    lost = max(len(before) - len(after) for before, after in zip(whole.contexts, contexts, strict=True))
    return Encoded(contexts, continuations, lost)
