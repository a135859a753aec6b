"""The completions route of an endpoint: texts that a model continues, log-probs of given choices.

Such a request is a list of messages whose roles are those of `PROMPT`, `CONTEXT` and `CHOICE`, so
that the sender's cache, limits and retries hold for it, too. Log-probs come from ``echo``: the
endpoint repeats the prompt, each token with its log-prob, as vLLM and SGLang do. Only
``token_logprobs`` and the numbers of tokens are read, from the end.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from kinject.errors import EndpointError
from kinject.llm import JsonValue, read_usage
from kinject.llm.endpoint import Endpoint
from kinject.llm.error_replies import ODD_BODY, ErrorReply
from kinject.llm.thinking import split_thinking, with_thinking
from kinject.types import Completion, Message, Usage

PROMPT: Final = "prompt"
"""Role of a text that the model continues; its answer is the text that it writes."""
CONTEXT, CHOICE = "context", "choice"
"""Roles of two lists of token ids, as JSON: the answer is the log-prob of the second after the
first (`read_choice`)."""

TOKEN_IDS = re.compile(r"\[\d+(?:, \d+)*\]")
"""A text that is token ids."""
_MOST = 1e30
"""Size from which a log-prob is none. Servers round: one of a certain token may be above 0."""
_ABOUT_LOG_PROBS = re.compile(r"echo|log_?prob", re.IGNORECASE)


class CompletionsEndpoint(Endpoint):
    """The completions route of one endpoint, open inside ``async with``."""

    route = "completions"

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the text that the model writes, or a choice's log-prob as JSON, by the roles.

        Raises as `Endpoint.complete`; an endpoint that returns no log-probs of the prompt is a
        fatal error.
        """
        parts = {message["role"]: message["content"] for message in messages}
        if PROMPT in parts:
            return await self.exchange(self._writing_body(parts[PROMPT], seed), self._read_written)
        context, choice = json.loads(parts[CONTEXT]), json.loads(parts[CHOICE])
        read = partial(self._read_scored, n_context=len(context), n_choice=len(choice))
        return await self.exchange(self._scoring_body([*context, *choice]), read)

    def _writing_body(self, prompt: str, seed: int) -> dict[str, Any]:
        """Return the body of a request for a text; prompts that are JSON lists are token ids."""
        body = self.body([], seed)
        del body["messages"]
        body["prompt"] = prompt
        if TOKEN_IDS.fullmatch(prompt):
            body["prompt"] = json.loads(prompt)
        return body

    def _scoring_body(self, prompt: list[int]) -> dict[str, Any]:
        extra = dict(self.section.extra_body or {})
        options = {self.limit: 1, "temperature": 0.0, "echo": True, "logprobs": 1}
        return {"model": self.section.model, "prompt": prompt, **options, **extra}

    async def reported_error(self, error: ErrorReply, headers: Mapping[str, str]) -> EndpointError:
        """Return the error that an endpoint reports. One about log-probs is fatal: no request would
        get any."""
        if "prompt must be a string" in error.message:  # of transformers serve
            fix = "leave out the tokenizer of its table and set eval.formats: [generate]"
            return EndpointError(f"{self.url}: it takes no token ids: {fix}.", fatal=True)
        if _ABOUT_LOG_PROBS.search(error.message) and error.status not in (401, 403, 404, 429):
            return self._no_log_probs(f"answered {error.status} ({self.shown(error.message)})")
        return await super().reported_error(error, headers)

    def _no_log_probs(self, reason: str) -> EndpointError:
        return EndpointError(
            f"{self.url}: it returns no log-probs of the prompt (echo with logprobs): {reason}. "
            "Set eval.formats: [generate], or serve the model with one that does (vLLM, SGLang).",
            fatal=True,
        )

    def _read(self, body: bytes) -> tuple[dict[str, Any], Usage]:
        """Return the first choice of a body, and the tokens used. Raises `Transient` for another
        body."""
        try:
            value = json.loads(body)
            choice, usage = value["choices"][0], read_usage(value.get("usage"))
            if not isinstance(choice, dict) or not isinstance(choice["text"], str):
                raise TypeError(type(choice).__name__)
        except ODD_BODY as error:
            raise self.malformed(body, "completion", error, lost=False) from error
        self.check_model(value.get("model"))
        return choice, usage

    def _read_written(self, body: bytes) -> Completion:
        choice, usage = self._read(body)
        thinking, text = split_thinking(choice["text"])
        usage = with_thinking(usage, len(thinking), len(text))
        return self.clean(Completion(text, self.finish_reason(choice), usage, thinking))

    def _read_scored(self, body: bytes, n_context: int, n_choice: int) -> Completion:
        """Return the sum of the log-probs of the tokens of the choice."""
        choice, usage = self._read(body)
        log_probs = choice.get("logprobs")
        if not isinstance(log_probs, Mapping):
            log_probs = {}
        values, tops = log_probs.get("token_logprobs"), log_probs.get("top_logprobs")
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise self._no_log_probs("the answer has no token_logprobs")
        # A server that adds a BOS of its own shifts the positions of the choice.
        if usage.tokens_in != n_context + n_choice:
            raise EndpointError(
                f"{self.url}: it counts {usage.tokens_in} tokens in a prompt of "
                f"{n_context + n_choice} token ids, so the tokens of the choice cannot be found.",
                fatal=True,
            )
        # Counted from the end: some leave out the BOS of a prompt, some the written token if it
        # ends the text.
        end = len(values) - usage.tokens_out
        if not usage.tokens_in - 1 <= end <= usage.tokens_in:
            raise self._no_log_probs(f"{len(values)} log-probs came for {usage.tokens_in} tokens")
        part = slice(end - (usage.tokens_in - n_context), end)
        choice_log_probs = values[part]
        if not all(map(_is_log_prob, choice_log_probs)):
            raise self._no_log_probs("tokens of the choice have none")
        if not isinstance(tops, list):
            tops = []
        score = {
            "log_prob": math.fsum(choice_log_probs),
            "n_tokens": len(choice_log_probs),
            "greedy": _is_greedy(choice_log_probs, tops[part]),
        }
        return Completion(json.dumps(score), usage=usage)


def _is_log_prob(value: JsonValue) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_MOST < value < 1


def read_choice(completion: Completion) -> tuple[float, int, bool]:
    """Return the log-prob of a choice, its number of tokens, and whether each was the likeliest."""
    score = json.loads(completion.text)
    return float(score["log_prob"]), int(score["n_tokens"]), bool(score["greedy"])


def _is_greedy(log_probs: Sequence[float], tops: Sequence[JsonValue]) -> bool:
    """Return whether every token was the likeliest, as lm-evaluation-harness finds it; False if the
    answer does not show it."""
    if len(tops) < len(log_probs) or not log_probs:
        return False
    return all(
        isinstance(top, Mapping)
        and bool(top)
        and all(map(_is_log_prob, top.values()))
        and value >= max(top.values())
        for value, top in zip(log_probs, tops, strict=True)
    )
