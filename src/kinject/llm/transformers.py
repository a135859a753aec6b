"""Texts that a local causal language model writes, through transformers or vLLM: in batches,
deterministic by seed."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kinject.disk import path_exists
from kinject.errors import EndpointError, InputError, one_line
from kinject.gguf_files import model_folder
from kinject.llm.completions import PROMPT, TOKEN_IDS
from kinject.llm.thinking import split_thinking, with_thinking
from kinject.models import hash_with_base, window_of
from kinject.models.generate import ends_of, generate, prompt_ids
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kinject.models import LoadedModel

_SECONDS_TO_FILL = 0.005
"""Time that a batch waits for one more request."""


@lru_cache(maxsize=8)
def weights_identity(model: str) -> str:
    """Return the hash of a model folder's files, "" for a name on the hub: other weights give other
    answers."""
    folder = model_folder(model)
    if not path_exists(folder):
        return ""
    return hash_with_base(folder)


class LocalModel:
    """A model that answers requests in batches of up to the section's `concurrency`, open inside
    ``async with``."""

    def __init__(self, section: GeneratorSection) -> None:
        self._section = section
        self._loaded: LoadedModel  # these are set by `_load`
        self._tokenizer: PreTrainedTokenizerBase
        self._config: Any
        self._waiting: list[tuple[Sequence[Message], int, asyncio.Future[Completion]]] = []
        self._has_requests = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LocalModel:
        """Load the model. Raises `InputError` if it cannot be, or has no chat template."""
        await asyncio.to_thread(self._load, self._section.model or "")
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    def _load(self, model: str) -> None:
        from kinject.models import load_model

        self._loaded = load_model(model)
        self._tokenizer, self._config = self._loaded.tokenizer, self._loaded.model.config
        if not self._tokenizer.chat_template:
            raise InputError(
                f"{model}: its tokenizer has no chat template. Choose an instruction-tuned model."
            )

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the model's answer. It depends on messages and seed, not on the rest of the batch.

        Raises `EndpointError` if the request does not fit the model (fatal: the batch does not fit
        the device).
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, seed, future))
        self._has_requests.set()
        return await future

    async def _work(self) -> None:
        while True:
            await self._has_requests.wait()
            n_before = 0
            # As long as requests still come: the first one must not be a batch of its own.
            while n_before < min(len(self._waiting), self._section.concurrency):
                n_before = len(self._waiting)
                await asyncio.sleep(_SECONDS_TO_FILL)
            batch = self._waiting[: self._section.concurrency]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._has_requests.clear()
            try:
                requests = [(messages, seed) for messages, seed, _ in batch]
                answers = await asyncio.to_thread(self.answer, requests)
            except Exception as error:  # noqa: BLE001  (raised by each of the requests)
                answers = [error] * len(batch)
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answer, Completion):
                    future.set_result(answer)
                else:
                    future.set_exception(answer)

    def answer(
        self, requests: Sequence[tuple[Sequence[Message], int]]
    ) -> list[Completion | Exception]:
        """Return a completion for each (messages, seed), or the `EndpointError` of one that does
        not fit the model.

        Raises `EndpointError` (fatal) if the device has no memory for the batch.
        """
        import torch

        prompts = [self._encode(messages) for messages, _ in requests]
        answers: list[Completion | Exception] = [self._too_long(len(prompt)) for prompt in prompts]
        fitting = [
            index
            for index, prompt in enumerate(prompts)
            if len(prompt) + self._section.max_tokens <= self._room
        ]
        if not fitting:
            return answers
        try:
            written = self._generate(
                [prompts[index] for index in fitting], [requests[index][1] for index in fitting]
            )
        except torch.OutOfMemoryError as error:
            raise EndpointError(
                f"{self._section.model}: no memory on {self._loaded.device} for a batch of "
                f"{len(fitting)}. Lower augment.generator.concurrency or max_tokens.",
                fatal=True,
            ) from error
        for index, tokens in zip(fitting, written, strict=True):
            answers[index] = self._completion(len(prompts[index]), tokens)
        return answers

    @property
    def _room(self) -> int:
        return window_of(self._config) or 1 << 30

    def _too_long(self, n_tokens: int) -> EndpointError:
        return EndpointError(
            f"{self._section.model}: the model reads {self._room} tokens, "
            f"max_tokens is {self._section.max_tokens}, and a prompt has {n_tokens}. "
            "Lower augment.passage_tokens or augment.generator.max_tokens."
        )

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        """Return a conversation in tokens, or a text that the model continues, which may be token
        ids already (JSON)."""
        tokenizer = self._tokenizer
        if messages[0]["role"] == PROMPT:
            text = messages[0]["content"]
            if TOKEN_IDS.fullmatch(text):
                ids: list[int] = json.loads(text)
                return ids
            return prompt_ids(tokenizer, text)
        try:
            text = tokenizer.apply_chat_template(
                [dict(turn) for turn in messages],
                add_generation_prompt=True,
                tokenize=False,
                **(self._section.chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is a program: its expressions raise anything
            fault = f"its chat template cannot be rendered ({one_line(error)})"
            raise InputError(f"{self._section.model}: {fault}. Choose another model.") from error
        encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        return generate(self._loaded.model, self._section, prompts, seeds, self._ends())

    def _ends(self) -> list[int]:
        return ends_of(self._loaded.model, self._tokenizer, self._section.model or "")

    def _completion(self, n_prompt: int, tokens: list[int]) -> Completion:
        ended = bool(tokens) and tokens[-1] in self._ends()
        thinking, answer = read_answer(self._tokenizer, tokens)
        usage = with_thinking(Usage(n_prompt, len(tokens)), len(thinking), len(answer))
        return Completion(answer, "stop" if ended else "length", usage, thinking)


class VllmModel(LocalModel):
    """The same through the engine of vLLM, inside this process."""

    def _load(self, model: str) -> None:
        from transformers import GenerationConfig

        from kinject.hub import find_source
        from kinject.models import check_model, load_config, load_tokenizer

        try:
            from vllm import LLM
        except ImportError as error:
            raise InputError(
                f"kind: vllm needs the package vllm, which needs a GPU ({error}). "
                "Install it (pip install vllm), or set kind: transformers."
            ) from error
        check_model(model)
        source = find_source(model, "model")
        self._tokenizer, self._config = load_tokenizer(source), load_config(source)
        # Its ends are the engine's: Phi-3's config.json has no <|end|>.
        try:
            self._generation = GenerationConfig.from_pretrained(source)
        except OSError:  # there is no generation_config.json
            self._generation = GenerationConfig.from_model_config(self._config)
        # A fixed seed for the engine; each request brings its own.
        self._engine = LLM(model=source, seed=0)

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        from vllm import SamplingParams

        section = self._section
        settings = {
            **(section.extra_body or {}),
            "max_tokens": section.max_tokens,
            "stop": list(section.stop),
        }
        parameters = [
            SamplingParams(temperature=section.sampling_temperature, seed=seed, **settings)
            for seed in seeds
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        written = self._engine.generate(inputs, parameters, use_tqdm=False)
        return [list(request.outputs[0].token_ids) for request in written]

    def _completion(self, n_prompt: int, tokens: list[int]) -> Completion:
        """Return what stands before a text of `stop`, at which the engine ends an answer: its
        tokens hold that text."""
        whole = super()._completion(n_prompt, tokens)
        starts = [whole.text.find(stop) for stop in self._section.stop]
        start = min((start for start in starts if start >= 0), default=-1)
        if start < 0:
            return whole
        return replace(whole, text=whole.text[:start], finish_reason="stop")

    @property
    def _room(self) -> int:
        return int(self._engine.llm_engine.model_config.max_model_len)

    def _ends(self) -> list[int]:
        return ends_of(self._generation, self._tokenizer, self._section.model or "")


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, str]:
    """Return (thinking, answer) of the generated `tokens`."""
    # With the special tokens: they mark channels and, in some vocabularies, thinking.
    text = str(tokenizer.decode(tokens))
    thinking, answer = split_thinking(text)
    # No thinking was found: the special tokens may go by their ids.
    if answer == text:
        return thinking, str(tokenizer.decode(tokens, skip_special_tokens=True))
    for token in tokenizer.all_special_tokens:
        answer = answer.replace(token, "")
    return thinking, answer
