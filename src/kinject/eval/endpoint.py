"""Models behind endpoints: the answers that they write in chats.

Requests go through `kinject.llm`, whose cache, limits, retries and budget hold for them. The weights of an endpoint
cannot be hashed: scores are stored under its model's name, its revision and its parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinject.disk import content_id, file_name
from kinject.errors import EndpointError, InputError
from kinject.eval.prompts import ChatStyle, Generation, Prompt, PromptRequest, render_prompt
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.answers import Store
from kinject.eval.scoring.encode import Encoded, chat_turns
from kinject.llm import generator_identity
from kinject.llm.cache import CACHES, stored_usage
from kinject.llm.limits import limits_of, spent_so_far
from kinject.llm.sender import (
    CHARACTERS_PER_TOKEN,
    Sender,
    open_sender,
    run_event_loop,
    run_workers,
)
from kinject.recipe import GeneratorSection
from kinject.recipe.eval_section import EndpointModelSection, EvalSection
from kinject.types import Message, Usage

JUDGE_CACHE = CACHES[1]


@dataclass(frozen=True)
class EndpointPrompt(Encoded):
    """One prompt as its endpoint gets it: a request for a written answer. There are no tokens."""

    messages: tuple[Message, ...] = ()


class EndpointScorer:
    """The model `name` of an evaluation, which an endpoint has."""

    def __init__(self, name: str, table: EndpointModelSection, section: EvalSection, run_dir: Path, seed: int) -> None:
        self.name, self.table, self.section, self.run_dir, self.seed = name, table, section, run_dir, seed
        chat = table.chat_settings
        self.style = ChatStyle(chat.system, chat.chat_template_kwargs or {}, chat.fewshot_as_multiturn)
        self.hashes: dict[str, str] = {}
        self._ends = Counter[str]()

    def encode(self, requests: Sequence[PromptRequest]) -> list[EndpointPrompt]:
        """Return the prompt of each request, which has a `generation`, as a chat."""
        return [self._as_chat(render_prompt(request), request.generation) for request in requests]

    def _as_chat(self, prompt: Prompt, generation: Generation | None) -> EndpointPrompt:
        assert generation is not None, "eval.formats was checked"
        system, turns = chat_turns(prompt, self.style)
        roles = ("user", "assistant") * len(turns)
        messages = [_message(role, text) for role, text in zip(roles, turns, strict=False)]
        if system.strip():
            messages.insert(0, _message("system", system.strip()))
        bounds = replace(generation, stop=generation.stop or ())
        return EndpointPrompt((), (), 0, bounds, messages=tuple(messages))

    def key(self, prompt: Encoded) -> str:
        """Return the key of an answer: a hash of the model's name, its revision, its parameters and the prompt."""
        identity = {**generator_identity(self._generator(_bounds(prompt))), **self._label}
        return content_id("endpoint", identity, (_of_endpoint(prompt).messages,), self.seed)

    def _generator(self, generation: Generation) -> GeneratorSection:
        return self.table.generator(generation.most, generation.stop or ())

    @property
    def _label(self) -> dict[str, str]:
        return {"api": "chat", "revision": self.table.revision or ""}

    def score_missing(
        self,
        prompts: Mapping[str, Encoded],
        store: Store,
        show_status: Callable[[str], None],
    ) -> dict[str, PromptScore]:
        """Return the score of each of `prompts` (by key); `store` gets each as soon as it is there.

        Raises `EndpointError` if some got no answer, after all others were stored, and `InputError` if the budget ended.
        """
        scores: dict[str, PromptScore] = {}

        def keep(key: str, score: PromptScore) -> None:
            scores[key] = score
            store(key, score)

        for generation in dict.fromkeys(map(_bounds, prompts.values())):
            part = {key: _of_endpoint(prompt) for key, prompt in prompts.items() if _bounds(prompt) == generation}
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
        limits = limits_of(generator, budget_left(self.section, self.run_dir, cache_of(self.name)))
        failed = Counter[str]()
        async with open_sender(
            generator,
            self.run_dir,
            limits,
            cache=cache_of(self.name),
            label=self._label,
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
                await run_workers(iter(prompts.items()), work, sender, limits.concurrency)
            except EndpointError as error:
                hint = " Every answer is stored; the same command resumes." if sender.traffic.n_answered else ""
                raise EndpointError(f"eval.models.{self.name}: {error}{hint}", fatal=True) from error
        if sender.out_of_budget:
            raise InputError(
                f"eval.budget: {self.section.budget} are spent (eval.models.{self.name}). Raise it and run again: every answer "
                "is stored, and none is paid twice."
            )
        if failed:
            most_common, n = failed.most_common(1)[0][0], failed.total()
            raise EndpointError(
                f"eval.models.{self.name}: {n} of {len(prompts)} prompts got no answer. The most common error: {most_common} All "
                "other answers are stored; the same command asks these again."
            )

    async def _score_prompt(self, sender: Sender, prompt: EndpointPrompt) -> PromptScore:
        """Return the answer to one prompt."""
        completion = await sender.send(list(prompt.messages), self.seed)
        text = completion.text
        starts = [index for stop in _bounds(prompt).stop or () if (index := text.find(stop)) >= 0]
        usage, is_cut = completion.usage, completion.finish_reason == "length" and not text
        if completion.finish_reason not in ("stop", "length", ""):
            self._ends[completion.finish_reason] += 1
        n_own = max(0, usage.tokens_out - usage.tokens_thinking)
        return PromptScore((), (), text[: min(starts, default=None)], n_own, usage.tokens_thinking, is_cut)

    def preview(self, prompts: Sequence[Encoded], stored: Collection[str]) -> str:
        """Return the requests for those of `prompts` that are not `stored` (by key), and the most that they can cost."""
        missing = {key: _of_endpoint(prompt) for prompt in prompts if (key := self.key(prompt)) not in stored}
        texts = (message["content"] for prompt in missing.values() for message in prompt.messages)
        n_in = sum(math.ceil(len(text) / CHARACTERS_PER_TOKEN) for text in texts)  # rather too many
        n_out = sum(_bounds(prompt).most for prompt in missing.values())
        cost = limits_of(self.table.generator(1), None).cost(n_in, n_out)
        price = f", at most {cost:.4f}" if self.table.endpoint.has_prices else ", no prices in its table"
        return (
            f"{self.name}: {self.table}: {len(set(map(self.key, prompts))):,} prompts; {len(missing):,} requests for answers "
            f"that are not stored, about {n_in:,} tokens in, at most {n_out:,} out{price}"
        )

    def counts(self) -> dict[str, Any]:
        """Return the manifest's entry."""
        usage, cost = used(self.name, self.table, self.run_dir)
        return {
            "endpoint": self.table.address, "model": self.table.endpoint.model, "revision": self.table.revision,
            "tokens_in": usage.tokens_in, "tokens_out": usage.tokens_out, "tokens_thinking": usage.tokens_thinking,
            "cost": round(cost, 6),
        }  # fmt: skip

    def notes(self) -> list[str]:
        """Return notes for the user on its answers."""
        usage, cost = used(self.name, self.table, self.run_dir)
        price = f", cost {cost:.4f}" if cost else ""
        lines = [
            f"{self.name}: {self.table}; {usage.tokens_in:,} tokens in, {usage.tokens_out:,} out{price} in this run folder. Its "
            f"weights cannot be hashed: {'scores count for this revision' if self.table.revision else 'set a revision'}, and "
            "change it when the server's model changes."
        ]
        return lines + [f"{self.name}: {n} answers ended with {reason!r}" for reason, n in self._ends.items()]


def render_messages(prompt: Encoded) -> str:
    """Return a prompt as it would be sent, for a terminal."""
    return "\n".join(f"  {message['role']}: {message['content']!r}" for message in _of_endpoint(prompt).messages)


def _of_endpoint(prompt: Encoded) -> EndpointPrompt:
    assert isinstance(prompt, EndpointPrompt)
    return prompt


def _bounds(prompt: Encoded) -> Generation:
    assert prompt.generation is not None
    return prompt.generation


def cache_of(name: str) -> str:
    """Return the name of the file, in the run folder, of the paid answers of the model `name`."""
    return f"cache-{file_name(name)}.sqlite"


def used(name: str, table: EndpointModelSection, run_dir: Path) -> tuple[Usage, float]:
    """Return the tokens of all answers of the model `name` in the run folder, and their cost at the table's prices."""
    usage = stored_usage(run_dir / cache_of(name))
    return usage, limits_of(table.endpoint, None).cost(usage.tokens_in, usage.tokens_out)


def budget_left(section: EvalSection, run_dir: Path, cache: str) -> float | None:
    """Return eval.budget less the cost of the other endpoints and the judge; `cache` is the file of this one."""
    if section.budget is None:
        return None
    return max(0.0, section.budget - money_spent(section, run_dir, {*_paid_by_cache(section)} - {cache}))


def money_spent(section: EvalSection, run_dir: Path, caches: Collection[str] | None = None) -> float:
    """Return the cost of all answers in the run folder, of endpoints and of the judge, or of those in `caches` alone."""
    paid = {path: generator for path, generator in _paid_by_cache(section).items() if caches is None or path in caches}
    return math.fsum(spent_so_far(generator, run_dir / path) for path, generator in paid.items())


def _paid_by_cache(section: EvalSection) -> dict[str, GeneratorSection]:
    """Return the endpoints and the judge of an evaluation, by the file of their answers."""
    endpoints = {cache_of(name): table.generator(1) for name, table in section.endpoints().items()}
    return endpoints | ({JUDGE_CACHE: section.judge} if section.judge is not None else {})


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
