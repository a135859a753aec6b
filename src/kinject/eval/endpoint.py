"""Models behind endpoints: log-probs of choices from completions, written answers from completions
or chats.

Requests go through `kinject.llm`, whose cache, limits, retries and budget hold for them. The
weights of an endpoint cannot be hashed: scores are stored under its model's name, its revision and
its parameters.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from kinject.disk import content_id, file_name
from kinject.errors import EndpointError, InputError
from kinject.eval.prompts import ChatStyle, Generation, Prompt, PromptRequest, render_prompt
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.answers import Store
from kinject.eval.scoring.encode import Encoded, Encoder, chat_turns, encode_requests
from kinject.llm import Stopped
from kinject.llm.cache import CACHES, stored_usage
from kinject.llm.completions import CHOICE, CONTEXT, PROMPT, read_choice
from kinject.llm.limits import limits_of, spent_so_far
from kinject.llm.sender import (
    Sender,
    estimate_tokens,
    gather_answers,
    generator_identity,
    open_generator,
    open_sender,
    run_event_loop,
    run_workers,
)
from kinject.recipe import GeneratorSection
from kinject.recipe.sections import EndpointModelSection, EvalSection
from kinject.terminal import CURRENCY, format_count
from kinject.types import Message, Usage

Messages = tuple[Message, ...]
JUDGE_CACHE = CACHES[1]
_LOG_PROBS = Generation(1)
"""The bounds of a request for log-probs."""


@dataclass(frozen=True)
class EndpointPrompt(Encoded):
    """One prompt as its endpoint gets it: one request for a written answer, else one for each
    choice.

    `contexts` and `continuations` are there if prompts go as token ids, and empty if they go as
    text. `prompt` is the text.
    """

    requests: tuple[Messages, ...] = ()
    prompt: Prompt = field(default_factory=lambda: Prompt("", ()))


class EndpointScorer:
    """The model `name` of an evaluation, which an endpoint has. `notes` are its notes for the
    user."""

    def __init__(
        self, name: str, table: EndpointModelSection, section: EvalSection, run_dir: Path, seed: int
    ) -> None:
        """Load the tokenizer, if the table names one. Raises `InputError` if that fails."""
        self.name, self.table, self.section, self.run_dir, self.seed = (
            name,
            table,
            section,
            run_dir,
            seed,
        )
        chat = table.chat_settings
        self.style = ChatStyle(chat.system, chat.chat_template_kwargs or {})
        self.encoder: Encoder | None = None
        if table.tokenizer is not None:
            from kinject.models import load_tokenizer

            self.encoder = Encoder(
                load_tokenizer(table.tokenizer), chat=self.style if table.chat else None
            )
        self.hashes: dict[str, str] = {}

    def encode(self, requests: Sequence[PromptRequest]) -> list[EndpointPrompt]:
        """Return the prompt of each request: in tokens by the rules of local models, as text, or as
        a chat."""
        if self.encoder is not None and self.table.api == "completions":
            # The server's window is not known here.
            encoded = encode_requests(self.encoder, requests, None)
            pairs = zip(encoded, requests, strict=True)
            return [
                self._in_tokens(item, self.encoder.apply_chat_template(render_prompt(r)))
                for item, r in pairs
            ]
        return [self._as_text(render_prompt(request), request.generation) for request in requests]

    def _in_tokens(self, item: Encoded, prompt: Prompt) -> EndpointPrompt:
        context = [json.dumps(ids.tolist()) for ids in item.contexts]
        if item.generation is not None:
            requests: tuple[Messages, ...] = ((_message(PROMPT, context[0]),),)
        else:
            choices = [json.dumps(ids.tolist()) for ids in item.continuations]
            requests = tuple(
                (_message(CONTEXT, a), _message(CHOICE, b))
                for a, b in zip(context, choices, strict=True)
            )
        return EndpointPrompt(
            item.contexts,
            item.continuations,
            item.truncated,
            item.generation,
            item.thinking,
            requests=requests,
            prompt=prompt,
        )

    def _as_text(self, prompt: Prompt, generation: Generation | None) -> EndpointPrompt:
        assert generation is not None  # log-probs need a tokenizer
        if self.table.api == "chat":
            system, turns = chat_turns(prompt, self.style)
            roles = ("user", "assistant") * len(turns)
            messages = [_message(role, text) for role, text in zip(roles, turns, strict=False)]
            if system.strip():
                messages.insert(0, _message("system", system.strip()))
            requests = (tuple(messages),)
            # In a chat a turn ends the answer, not a line break (docs/scoring.md).
            stop = generation.stop or ()
        else:
            requests = ((_message(PROMPT, prompt.context),),)
            stop = ("\n",) if generation.stop is None else generation.stop
        bounds = replace(generation, stop=stop)
        return EndpointPrompt((), (), 0, bounds, requests=requests, prompt=prompt)

    def key(self, prompt: Encoded) -> str:
        """Return the key of an answer: a hash of the model's name, its revision, its parameters and
        the prompt."""
        prompt = _of_endpoint(prompt)
        return content_id(
            "endpoint", self._identity(prompt.generation or _LOG_PROBS), prompt.requests, self.seed
        )

    def _generator(self, generation: Generation) -> GeneratorSection:
        return self.table.generator(generation.max_new_tokens, generation.stop or ())

    def _identity(self, generation: Generation) -> dict[str, Any]:
        return {**generator_identity(self._generator(generation)), **self._label}

    @property
    def _label(self) -> dict[str, str]:
        return {"api": self.table.api, "revision": self.table.revision or ""}

    def score_missing(
        self,
        prompts: Mapping[str, Encoded],
        store: Store,
        show_status: Callable[[str], None],
    ) -> dict[str, PromptScore]:
        """Return the score of each of `prompts` (by key); `store` gets each as soon as it is there.

        Raises `EndpointError` if some got no answer, after all others were stored, and `InputError`
        if the budget ended.
        """
        scores: dict[str, PromptScore] = {}

        def keep(key: str, score: PromptScore) -> None:
            scores[key] = score
            store(key, score)

        bounds = dict.fromkeys(prompt.generation or _LOG_PROBS for prompt in prompts.values())
        # A sender has one set of parameters, so each length of answers has one of its own.
        for generation in bounds:
            part = {
                k: _of_endpoint(p)
                for k, p in prompts.items()
                if (p.generation or _LOG_PROBS) == generation
            }
            run_event_loop(self._score_all(part, generation, keep, show_status))
        return scores

    async def _score_all(
        self,
        prompts: Mapping[str, EndpointPrompt],
        generation: Generation,
        keep: Store,
        show_status: Callable[[str], None],
    ) -> None:
        """Ask all `prompts` of one length of answers, as many at a time as the endpoint takes."""
        generator = self._generator(generation)
        # The budget is that of all endpoints and the judge together (docs/scoring.md).
        limits = limits_of(generator, budget_left(self.section, self.run_dir, cache_of(self.name)))
        failed = Counter[str]()
        async with open_sender(
            generator,
            self.run_dir,
            limits,
            cache=cache_of(self.name),
            opener=partial(
                open_generator, completions=self.table.api == "completions", label=self._label
            ),
        ) as sender:

            async def work(item: tuple[str, EndpointPrompt]) -> None:
                key, prompt = item
                try:
                    score = await self._score_prompt(sender, prompt)
                except EndpointError as error:
                    if error.fatal:
                        raise
                    failed[str(error)] += 1
                else:
                    keep(key, score)
                show_status(sender.status())

            try:
                # Before all others are paid for: not every server returns log-probs of a prompt.
                if generation is _LOG_PROBS and prompts:
                    with suppress(Stopped):  # the budget is spent already
                        await self._check_log_probs(sender)
                await run_workers(iter(prompts.items()), work, sender, limits.concurrency)
            except EndpointError as error:
                message = f"eval.models.{self.name}: {error}"
                # Where the first request failed there is nothing to resume.
                if sender.traffic.n_answered:
                    message += " Every answer is stored; the same command resumes."
                raise EndpointError(message, fatal=True) from error
        if sender.out_of_budget:
            raise InputError(
                f"eval.budget: {self.section.budget} are spent (eval.models.{self.name}). "
                "Raise it and run again: every answer is stored, and none is paid twice."
            )
        if failed:
            most_common, n = failed.most_common(1)[0][0], failed.total()
            raise EndpointError(
                f"eval.models.{self.name}: {n} of {format_count(len(prompts), 'prompt')} got no "
                f"answer. The most common error: {most_common} All other answers are stored; the "
                "same command asks these again."
            )

    async def _check_log_probs(self, sender: Sender) -> None:
        """Ask for the log-prob of one token. Raises `EndpointError` (fatal) if the endpoint returns
        none."""
        try:
            assert self.encoder is not None
            *context, last = self.encoder.ids(["One, two, three"])[0]
            await self._choose(sender, json.dumps(context), json.dumps([last]))
        except EndpointError as error:
            if error.fatal:
                raise
            raise EndpointError(
                f"the first request for log-probs failed: {error}", fatal=True
            ) from error

    async def _score_prompt(self, sender: Sender, prompt: EndpointPrompt) -> PromptScore:
        """Return the answer to one prompt, or the log-probs of its choices."""
        if prompt.generation is not None:
            completion = await sender.send(list(prompt.requests[0]), self.seed)
            text = completion.text
            starts = [
                index for stop in prompt.generation.stop or () if (index := text.find(stop)) >= 0
            ]
            usage, fills_bound = completion.usage, completion.finish_reason == "length"
            # Thinking that the prompt opened and that never ends has no mark of its own.
            is_open = prompt.thinking is not None and prompt.thinking.is_open
            if fills_bound and is_open and not completion.thinking:
                return PromptScore((), (), "", 0, usage.tokens_out, thinking_cut=True)
            # Thinking filled the bound: there is no answer, and it is counted so.
            is_cut = fills_bound and not text
            n_own = max(0, usage.tokens_out - usage.tokens_thinking)
            return PromptScore(
                (), (), text[: min(starts, default=None)], n_own, usage.tokens_thinking, is_cut
            )
        answers = await gather_answers(
            self._choose(sender, context["content"], choice["content"])
            for context, choice in prompt.requests
        )
        scored: list[tuple[float, int, bool]] = []
        for answer in answers:
            if isinstance(answer, EndpointError):
                raise answer
            scored.append(answer)
        log_probs, lengths, greedy = zip(*scored, strict=True)
        return PromptScore(log_probs, greedy, lengths=lengths)

    async def _choose(self, sender: Sender, context: str, choice: str) -> tuple[float, int, bool]:
        """Return the log-prob of a choice after its context, its number of tokens, and whether each
        was the likeliest."""
        if choice == "[]":  # longer than the window
            return float("nan"), 0, False
        return read_choice(
            await sender.send([_message(CONTEXT, context), _message(CHOICE, choice)], self.seed)
        )

    def preview(self, prompts: Sequence[Encoded], stored: Collection[str]) -> str:
        """Return the requests for those of `prompts` that are not `stored` (by key), and the most
        that they can cost."""
        missing = {
            key: _of_endpoint(prompt)
            for prompt in prompts
            if (key := self.key(prompt)) not in stored
        }
        n_requests = n_in = n_out = 0
        for prompt in missing.values():
            n_requests += len(prompt.requests)
            for message in chain.from_iterable(prompt.requests):
                n_in += self._n_tokens(message["content"])
            if prompt.generation:
                n_out += prompt.generation.max_new_tokens
            else:  # the log-probs of a choice come with one token that is written
                n_out += len(prompt.requests)
        price = ", no prices in its table"
        if self.table.endpoint.has_prices:
            cost = limits_of(self.table.generator(1), None).cost(n_in, n_out)
            price = f", at most {cost:.4f} {CURRENCY}"
        return (
            f"{self.name}: {self.table}: "
            f"{format_count(len(set(map(self.key, prompts))), 'prompt')}, "
            f"{len(missing):,} without a stored answer; {format_count(n_requests, 'request')}, "
            f"about {n_in:,} tokens in, at most {n_out:,} out{price}"
        )

    def _n_tokens(self, text: str) -> int:
        """Return the tokens of a message: exact for token ids, of a text rather too many."""
        if self.encoder is not None:
            return len(json.loads(text))
        return estimate_tokens(text)

    def counts(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        usage, cost = used(self.name, self.table, self.run_dir)
        return {
            "endpoint": self.table.address,
            "model": self.table.endpoint.model,
            "revision": self.table.revision,
            "tokens_in": usage.tokens_in,
            "tokens_out": usage.tokens_out,
            "tokens_thinking": usage.tokens_thinking,
            "cost": round(cost, 6),
        }

    def notes(self) -> list[str]:
        """Return notes for the user on its answers."""
        usage, cost = used(self.name, self.table, self.run_dir)
        price = f", cost {cost:.4f} {CURRENCY}" if cost else ""
        revision = "scores count for this revision" if self.table.revision else "set a revision"
        lines = [
            f"{self.name}: {self.table}; {format_count(usage.tokens_in, 'token')} in, "
            f"{usage.tokens_out:,} out{price} in this run folder. Its weights cannot be hashed: "
            f"{revision}, and change it when the server's model changes."
        ]
        if self.encoder:
            lines += [f"{self.name}: {note}" for note in self.encoder.notes]
        return lines


def render_messages(prompt: Encoded) -> str:
    """Return a prompt as it would be sent, for a terminal."""
    messages = [message for request in _of_endpoint(prompt).requests for message in request]
    return "\n".join(f"  {message['role']}: {message['content']!r}" for message in messages)


def _of_endpoint(prompt: Encoded) -> EndpointPrompt:
    assert isinstance(prompt, EndpointPrompt)
    return prompt


def cache_of(name: str) -> str:
    """Return the name of the file, in the run folder, of the paid answers of the model `name`."""
    return f"cache-{file_name(name)}.sqlite"


def used(name: str, table: EndpointModelSection, run_dir: Path) -> tuple[Usage, float]:
    """Return the tokens of all answers of the model `name` in the run folder, and their cost at the
    table's prices."""
    usage = stored_usage(run_dir / cache_of(name))
    return usage, limits_of(table.endpoint, None).cost(usage.tokens_in, usage.tokens_out)


def budget_left(section: EvalSection, run_dir: Path, cache: str) -> float | None:
    """Return eval.budget less the cost of the other endpoints and the judge; `cache` is the file of
    this one."""
    if section.budget is None:
        return None
    return max(
        0.0, section.budget - money_spent(section, run_dir, {*_paid_by_cache(section)} - {cache})
    )


def money_spent(
    section: EvalSection, run_dir: Path, caches: Collection[str] | None = None
) -> float:
    """Return the cost of all answers in the run folder, of endpoints and of the judge, or of those
    in `caches` alone."""
    paid = {
        path: generator
        for path, generator in _paid_by_cache(section).items()
        if caches is None or path in caches
    }
    return math.fsum(spent_so_far(generator, run_dir / path) for path, generator in paid.items())


def _paid_by_cache(section: EvalSection) -> dict[str, GeneratorSection]:
    """Return the endpoints and the judge of an evaluation, by the file of their answers."""
    paid = {cache_of(name): table.generator(1) for name, table in section.endpoints().items()}
    if section.judge is not None:
        paid[JUDGE_CACHE] = section.judge
    return paid


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
