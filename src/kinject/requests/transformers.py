"""Texts that a local causal language model writes, through transformers: in batches, deterministic by seed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kinject.disk import path_exists
from kinject.errors import EndpointError, InputError
from kinject.models import end_tokens, generation_settings, model_hash, window_of
from kinject.recipe import GeneratorSection
from kinject.requests.chat import sampling_options, split_thinking, with_thinking
from kinject.requests.generator import request_seed
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kinject.models import LoadedModel

log = logging.getLogger(__name__)

_SECONDS_TO_FILL = 0.005
"""Time that a batch waits for one more request."""
_CLOSE = 1e-4
"""Of the largest logit: two tokens as close as this are decided by a pass over the text alone."""


@lru_cache(maxsize=8)
def weights_identity(model: str) -> str:
    """Return the hash of a model folder's files, "" for a name on the hub: other weights give other answers."""
    return model_hash(Path(model)) if path_exists(Path(model)) else ""


class LocalModel:
    """A model that answers requests in batches of up to the section's `concurrency`, open inside ``async with``."""

    def __init__(self, section: GeneratorSection) -> None:
        self._section = section
        self._loaded: LoadedModel  # set by `__aenter__`
        self._waiting: list[tuple[Sequence[Message], int, asyncio.Future[Completion]]] = []
        self._has_requests = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def __aenter__(self) -> LocalModel:
        """Load the model. Raises `InputError` if it cannot be, or its tokenizer has no chat template."""
        from kinject.models import load_model

        loaded = await asyncio.to_thread(load_model, self._section.model or "")
        if not loaded.tokenizer.chat_template:
            raise InputError(
                f"{self._section.model}: its tokenizer has no chat template. Choose an instruction-tuned model."
            )
        self._loaded = loaded
        _warn_of_settings(self._section, loaded.model)
        self._worker = asyncio.create_task(self._work())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker

    async def complete(self, messages: list[Message], seed: int) -> Completion:
        """Return the model's answer. It depends on messages and seed, not on the rest of the batch.

        Raises `EndpointError` if the request does not fit the model (fatal: the batch does not fit the device).
        """
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting.append((messages, seed, future))
        self._has_requests.set()
        return await future

    async def _work(self) -> None:
        while True:
            await self._has_requests.wait()
            n_before = 0
            while n_before < min(len(self._waiting), self._section.concurrency):
                n_before = len(self._waiting)
                await asyncio.sleep(_SECONDS_TO_FILL)
            batch = self._waiting[: self._section.concurrency]
            del self._waiting[: len(batch)]
            if not self._waiting:
                self._has_requests.clear()
            try:
                answers = await asyncio.to_thread(self.answer, [(messages, seed) for messages, seed, _ in batch])
            except Exception as error:  # noqa: BLE001  (raised by each of the requests)
                answers = [error] * len(batch)
            for (_, _, future), answer in zip(batch, answers, strict=True):
                if future.cancelled():
                    continue
                if isinstance(answer, Completion):
                    future.set_result(answer)
                else:
                    future.set_exception(answer)

    def answer(self, requests: Sequence[tuple[Sequence[Message], int]]) -> list[Completion | Exception]:
        """Return a completion for each (messages, seed), or the `EndpointError` of one that does not fit the model.

        Raises `EndpointError` (fatal) if the device has no memory for the batch.
        """
        import torch

        prompts = [self._encode(messages) for messages, _ in requests]
        answers: list[Completion | Exception] = [self._too_long(len(prompt)) for prompt in prompts]
        fitting = [
            index for index, prompt in enumerate(prompts) if len(prompt) + self._section.max_tokens <= self._room
        ]
        if not fitting:
            return answers
        try:
            written = self._generate([prompts[index] for index in fitting], [requests[index][1] for index in fitting])
        except torch.OutOfMemoryError as error:
            raise EndpointError(
                f"{self._section.model}: no memory on {self._loaded.device} for a batch of {len(fitting)}. "
                "Lower augment.generator.concurrency or max_tokens.", fatal=True,
            ) from error  # fmt: skip
        for index, tokens in zip(fitting, written, strict=True):
            answers[index] = self._completion(len(prompts[index]), tokens)
        return answers

    @property
    def _room(self) -> int:
        return window_of(self._loaded.model.config) or 1 << 30

    def _too_long(self, n_tokens: int) -> EndpointError:
        return EndpointError(
            f"{self._section.model}: the model reads {self._room} tokens, max_tokens is {self._section.max_tokens}, and a "
            f"prompt has {n_tokens}. Lower augment.passage_tokens or augment.generator.max_tokens."
        )

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        tokenizer = self._loaded.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                [dict(turn) for turn in messages], add_generation_prompt=True, tokenize=False,
                **(self._section.chat_template_kwargs or {}),
            )  # fmt: skip
        except Exception as error:  # a template is a program: its expressions raise anything
            message = f"{self._section.model}: its chat template cannot be rendered ({str(error)[:200]}). Choose another model."
            raise InputError(message) from error
        encoded: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return encoded

    def _generate(self, prompts: list[list[int]], seeds: list[int]) -> list[list[int]]:
        return write_tokens(self._loaded.model, self._section, prompts, seeds, self._ends())

    def _ends(self) -> list[int]:
        return ends_of(self._loaded.model, self._loaded.tokenizer, self._section.model or "")

    def _completion(self, n_prompt: int, tokens: list[int]) -> Completion:
        ended = bool(tokens) and tokens[-1] in self._ends()
        thinking, answer = read_answer(self._loaded.tokenizer, tokens)
        usage = with_thinking(Usage(n_prompt, len(tokens)), len(thinking), len(answer))
        return Completion(answer, "stop" if ended else "length", usage, thinking)


def _warn_of_settings(section: GeneratorSection, model: PreTrainedModel) -> None:
    """Log, once for each model, the settings of its own generation_config.json that the recipe does not have."""
    model_settings = {
        name: value for name, value in generation_settings(model).items()
        if name != "do_sample" and {"temperature": section.sampling_temperature, **(section.extra_body or {})}.get(name) != value
    }  # fmt: skip
    if model_settings and (section.model, *model_settings) not in _warned:
        _warned.add((section.model, *model_settings))
        settings = ", ".join(f"{name} {value}" for name, value in model_settings.items())
        recipe_settings = {"temperature": section.sampling_temperature, **(section.extra_body or {})}
        recipe = ", ".join(f"{name} {value}" for name, value in recipe_settings.items() if value is not None)
        log.warning(
            f"{section.model}: its generation_config.json sets {settings}, which is not used; the recipe's {recipe} is."
        )


_warned: set[tuple[str | None, ...]] = set()


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Return the tokens that end an answer of the model `name`. Raises `InputError` if there are none."""
    ends = end_tokens(model, tokenizer)
    if not ends:
        raise InputError(f"{name}: neither model nor tokenizer has a token that ends an answer.")
    return ends


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> tuple[str, str]:
    """Return (thinking, answer) of the generated `tokens`."""
    text = str(tokenizer.decode(tokens))  # special tokens mark channels and, in some vocabularies, thinking
    thinking, answer = split_thinking(text)
    if answer == text:
        return thinking, str(tokenizer.decode(tokens, skip_special_tokens=True))
    for token in tokenizer.all_special_tokens:
        answer = answer.replace(token, "")
    return thinking, answer


def write_tokens(
    model: PreTrainedModel, section: GeneratorSection, prompts: Sequence[Sequence[int]], seeds: Sequence[int],
    ends: Sequence[int], others: Sequence[Sequence[int]] = (), weight: float = 0.0,
) -> list[list[int]]:  # fmt: skip
    """Return the tokens that `model` writes after each of `prompts`, up to and including the first of `ends`.

    With `others`, a second prompt of each, every token is drawn with probability `weight` from the model's prediction
    after that prompt instead: a sample of the mixture of the two predictions (MixSD, arXiv 2605.16865). At temperature
    0 it is the likeliest token of the one drawn. In float32 neither the size of the batch nor its other rows change a
    text.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList

    if others and weight in (0, 1):
        prompts, others = (others if weight else prompts), ()
    rows = [*prompts, *others]
    longest = max(map(len, rows))
    n_pads = [longest - len(row) for row in rows]
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=section.max_tokens,
        pad_token_id=ends[0],
        eos_token_id=list(ends),
        use_cache=True,
    )
    sampler = _draw(seeds, section, str(model.device), weight if others else 0.0)
    if model.dtype in (torch.float32, torch.float64):
        sampler.decide_alone(model, n_pads)
    ids = [[ends[0]] * n + list(row) for n, row in zip(n_pads, rows, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in n_pads]
    with torch.inference_mode(), without_defaults(model):
        output = model.generate(
            torch.tensor(ids, device=model.device), attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config, logits_processor=LogitsProcessorList([sampler]),
        )  # fmt: skip
    return [_until(tokens, ends) for tokens in output[: len(prompts), longest:].tolist()]


@contextlib.contextmanager
def without_defaults(model: Any) -> Iterator[None]:
    """Ignore the model's own settings of generation (such as penalties) inside the block."""
    from transformers import GenerationConfig

    saved, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end + 1]


def _draw(seeds: Sequence[int], section: GeneratorSection, device: str, weight: float = 0.0) -> _Sampler:
    """Return the logits processor that samples from the section's distribution, with one seed for each row.

    Temperature comes first, then top_k, top_p and min_p, as in transformers.
    """
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    temperature, sampling = section.sampling_temperature, section.extra_body or {}
    filters: list[Any] = []
    if temperature:
        filters = [TemperatureLogitsWarper(temperature)]
        filters += [warper(sampling[name]) for name, warper in warpers.items() if name in sampling]
    return _Sampler(filters, seeds, device, weight)


class _Sampler:
    """A logits processor after which the argmax is a sample, for rows [seeds], or for two halves of a batch that are mixed.

    Gumbel noise makes the argmax a sample: neither the size of a batch nor its other rows change an answer. Without `filters`
    it is the likeliest token. With a `weight`, rows and seeds are half as many: each row is drawn from the second half with
    that probability, from the first otherwise, and both halves get the same token.
    """

    def __init__(self, filters: Sequence[Any], seeds: Sequence[int], device: str, weight: float) -> None:
        import torch

        self.filters, self.n, self.device, self.weight = filters, len(seeds), device, weight
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self.coins = [torch.Generator().manual_seed(request_seed("mixture", seed)) for seed in seeds if weight]
        self.model: Any = None
        self.n_pads: Sequence[int] = ()

    def decide_alone(self, model: Any, n_pads: Sequence[int]) -> None:
        """Let `model` read a row alone, without its padding, where two tokens are as close as rounding."""
        self.model, self.n_pads = model, n_pads

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` [rows, vocabulary] with the noise of this step."""
        import torch

        rows = torch.arange(self.n, device=scores.device)
        if self.weight:
            drawn = torch.stack([torch.rand((), generator=coin, dtype=torch.float64) for coin in self.coins])
            rows = rows + self.n * (drawn < self.weight).to(rows)
        scores = scores[rows].float()
        noise = self._noise(scores)
        drawn_scores = self._filtered(input_ids, scores) + noise
        if self.model is not None:
            best = drawn_scores.topk(2).values
            scale = self.filters[0].temperature if self.filters else 1.0
            close = (best[:, 0] - best[:, 1]) * scale < _CLOSE * scores.abs().amax(-1)
            for i in close.nonzero()[:, 0].tolist():
                row = int(rows[i])
                text = input_ids[row : row + 1, self.n_pads[row] :]
                alone = self.model(input_ids=text, use_cache=False).logits[:, -1].float()
                drawn_scores[i] = (self._filtered(text, alone) + noise[i : i + 1])[0]
        return drawn_scores.repeat(2, 1) if self.weight else drawn_scores

    def _filtered(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for warper in self.filters:
            scores = warper(input_ids, scores)
        return scores

    def _noise(self, scores: torch.Tensor) -> torch.Tensor:
        import torch

        if not self.filters:
            return torch.zeros_like(scores)
        uniform = torch.stack(
            [torch.rand(scores.shape[-1], generator=generator, device=self.device) for generator in self.generators]
        )
        return -torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))


def model_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return everything besides messages and seed that shapes the answers."""
    return {
        "kind": "transformers", "model": section.model, "weights": weights_identity(section.model or ""),
        "temperature": section.sampling_temperature, "max_tokens": section.max_tokens, **sampling_options(section),
    }  # fmt: skip
