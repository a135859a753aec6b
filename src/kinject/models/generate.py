"""Texts that a causal language model writes, in batches, each determined by its prompt and seed;
and where a text ends.

For the writer of paraphrases, answers that a model learns from, probes, and models whose prompts
cannot share a prefix. `kinject.eval.scoring.generate` has the packed row for prompts that can.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.recipe import GeneratorSection

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

OfStep = Callable[..., Any]
"""(tokens [rows, length], logits) -> a tensor: whether each row has ended [rows]."""
COLDEST = 1e-4
"""A lower temperature is 0: the likeliest token. Divided by it, logits would leave the range of
their dtype."""
_SAMPLING = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "epsilon_cutoff",
    "eta_cutoff",
)
_SEARCH = (
    "num_beams",
    "length_penalty",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "exponential_decay_length_penalty",
    "guidance_scale",
    "stop_strings",
)
_NEUTRAL = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "num_beams": 1,
    "length_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "guidance_scale": 1.0,
}
"""Fields of transformers' GenerationConfig that shape a text, and the values that change nothing.
"""


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a text of `model`: those of its generation config, then the
    tokenizer's; [] without any.

    `model` may be that config itself.
    """
    configured = getattr(model, "generation_config", model).eos_token_id
    if isinstance(configured, int):
        configured = [configured]
    ends = (*(configured or ()), tokenizer.eos_token_id)
    return list(dict.fromkeys(end for end in ends if end is not None))


def prompt_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text that a model continues: the tokenizer's own special tokens stand
    before it, and none behind it, where an end token would end it."""
    ids = list(tokenizer(text, verbose=False).input_ids)
    bare = list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
    for start in range(len(ids) - len(bare) + 1):
        if ids[start : start + len(bare)] == bare:
            return ids[: start + len(bare)]
    return ids


def generation_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings of the model's own generation_config.json that shape a text, {} for plain
    greedy search.

    Lengths, special tokens and values that change nothing are left out, and those of sampling where
    it does not sample.
    """
    return shaping_settings(vars(model.generation_config))


def shaping_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the fields of a GenerationConfig that shape a text."""
    names = (*_SEARCH, *_SAMPLING) if values.get("do_sample") else _SEARCH
    return {
        name: values[name]
        for name in names
        if values.get(name) not in (None, False, _NEUTRAL.get(name))
    }


def ends_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> list[int]:
    """Return the tokens that end an answer of the model `name`. Raises `InputError` if there are
    none."""
    ends = end_tokens(model, tokenizer)
    if not ends:
        raise InputError(f"{name}: neither model nor tokenizer has a token that ends an answer.")
    return ends


def generate(
    model: PreTrainedModel,
    settings: GeneratorSection,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    ends: Sequence[int],
    *,
    has_ended: OfStep | None = None,
) -> list[list[int]]:
    """Return the tokens that `model` writes after each of `prompts`, up to and including the first
    of `ends`.

    At temperature 0 each is the likeliest one. Neither the size of the batch nor its other rows
    change a text, unless two tokens are as close as the rounding of the weights' dtype. A text is
    empty if its logits are not finite. `has_ended` returns after each step for each row whether it
    has ended.
    """
    import torch
    from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

    # Any token, since the mask hides it.
    pad = next(iter(ends), 0)
    longest = max(map(len, prompts))
    n_pads = [longest - len(prompt) for prompt in prompts]
    config = GenerationConfig(
        # The likeliest token is a sample already: `_Sampler` has added the noise.
        do_sample=False,
        max_new_tokens=settings.max_tokens,
        pad_token_id=pad,
        eos_token_id=list(ends) or None,
        use_cache=True,
    )
    sampler = _Sampler(settings, seeds, str(model.device))
    # Padded on the left, so that each answer begins right behind its prompt.
    ids = [[pad] * n + list(prompt) for n, prompt in zip(n_pads, prompts, strict=True)]
    mask = [[0] * n + [1] * (longest - n) for n in n_pads]
    # generate() takes from the model's own settings what `config` leaves open, penalties too.
    with torch.inference_mode(), without_defaults(model):
        output = model.generate(
            torch.tensor(ids, device=model.device),
            attention_mask=torch.tensor(mask, device=model.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([sampler]),
            stopping_criteria=StoppingCriteriaList([has_ended] if has_ended else []),
        )
    written = [_until(tokens, ends) for tokens in output[:, longest:].tolist()]
    # The likeliest of logits that are no numbers is the first of the vocabulary, again and again.
    return [
        tokens if len(tokens) <= n_finite else []
        for tokens, n_finite in zip(written, sampler.n_finite(), strict=True)
    ]


@contextlib.contextmanager
def without_defaults(model: PreTrainedModel) -> Iterator[None]:
    """Ignore the model's own settings of generation (such as penalties) inside the block."""
    from transformers import GenerationConfig

    saved, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = saved


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    # A row that has ended is filled up while others of its batch are written.
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tokens[: end + 1]


class _Sampler:
    """A logits processor after which the argmax is a sample, for rows [seeds].

    Gumbel noise makes the argmax a sample: neither the size of a batch nor its other rows change an
    answer. At temperature 0 it is the likeliest token; else temperature comes first, then top_k,
    top_p and min_p, as in transformers.
    """

    def __init__(self, settings: GeneratorSection, seeds: Sequence[int], device: str) -> None:
        import torch
        from transformers import (
            MinPLogitsWarper,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self.device = device
        warpers = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
        temperature, sampling = settings.sampling_temperature, settings.extra_body or {}
        self.filters: list[Any] = []
        if temperature >= COLDEST:
            self.filters = [TemperatureLogitsWarper(temperature)]
            self.filters += [
                warper(sampling[name]) for name, warper in warpers.items() if name in sampling
            ]
        self.generators = [torch.Generator(device=device).manual_seed(seed) for seed in seeds]
        self._finite: list[torch.Tensor] = []  # for each step whether the rows' logits are

    def n_finite(self) -> list[int]:
        """Return for each row how many steps had finite logits before the first that had not."""
        import torch

        n_steps: list[int] = torch.stack(self._finite).cumprod(0).sum(0).tolist()
        return n_steps

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return `scores` [rows, vocabulary] with the noise of this step."""
        import torch

        # In bfloat16 the sum would be rounded, and near tokens become ties.
        scores = scores.float()
        self._finite.append(scores.amax(-1).isfinite())
        if not self.filters:
            return scores
        for warper in self.filters:
            scores = warper(input_ids, scores)
        uniform = torch.stack(
            [
                torch.rand(scores.shape[-1], generator=generator, device=self.device)
                for generator in self.generators
            ]
        )
        # The noise of 0 or 1 would be infinite.
        return scores - torch.log(-torch.log(uniform.clamp(1e-10, 1 - 1e-7)))
