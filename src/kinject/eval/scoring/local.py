"""A model in memory that is ready to score (encoder, scorer, writer, hashes), and its perplexity on
texts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kinject.disk import content_id, read_jsonl
from kinject.errors import InputError
from kinject.eval.prompts import ChatStyle, PromptRequest
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.answers import (
    PERPLEXITY_FORMAT,
    ResumableScoring,
    Store,
    hash_model,
    prompt_key,
)
from kinject.eval.scoring.encode import Encoded, Encoder, encode_requests
from kinject.eval.scoring.generate import AnswerGenerator
from kinject.eval.scoring.scorer import Scorer
from kinject.hub import local_folder
from kinject.models import (
    LoadedModel,
    LoadOptions,
    check_causal,
    choose_attention,
    choose_device,
    has_fast_bf16,
    load_model,
    model_hash,
    read_sharding,
    text_start,
    window_of,
)
from kinject.recipe.sections import LocalModelSection
from kinject.results import Perplexity
from kinject.types import Answer

# lm-evaluation-harness's default, whose rolling windows these are.
_LONGEST_WINDOW = 2048
_LARGEST_LOSS = 700.0  # a float holds no larger exponential


@dataclass
class LoadedScorer:
    """A model in memory, its tokenizer as an `Encoder`, and its scorer."""

    name: str
    table: LocalModelSection
    loaded: LoadedModel
    encoder: Encoder
    scorer: Scorer

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The hash of weights, configuration and tokenizer of the model, and of the adapter on top,
        by their paths."""
        commit = getattr(self.loaded.model.config, "_commit_hash", None)
        hashes, adapter = {self.table.path: hash_model(self.table.path, commit)}, self.table.adapter
        return hashes if adapter is None else hashes | {adapter: model_hash(local_folder(adapter))}

    @cached_property
    def generator(self) -> AnswerGenerator:
        """Writes answers with the model."""
        return AnswerGenerator(self.scorer, self.loaded.tokenizer)

    def score(self, prompts: Sequence[Encoded]) -> dict[int, PromptScore]:
        """Return the score, or the written answer, of each of `prompts` by its index; nothing is
        stored."""
        parts: dict[bool, AnswerGenerator | Scorer] = {True: self.generator, False: self.scorer}
        scores: dict[int, PromptScore] = {}
        for writes, scorer in parts.items():
            indices = [
                index
                for index, prompt in enumerate(prompts)
                if (prompt.generation is not None) == writes
            ]
            scores |= {
                indices[i]: score
                for i, score in scorer.score([prompts[index] for index in indices])
            }
        return scores

    def encode(self, requests: Sequence[PromptRequest]) -> Sequence[Encoded]:
        """Return the tokens of each request, cut to the model's window."""
        return encode_requests(self.encoder, requests, window_of(self.scorer.forward.config))

    def score_missing(
        self,
        scoring: ResumableScoring,
        prompts: Mapping[str, Encoded],
        stored: Collection[str],
        store: Store,
    ) -> dict[str, PromptScore]:
        """Return the score of each of `prompts` (by key) that is not `stored`; `store` gets each as
        soon as it is done."""
        chosen = {key: encoded for key, encoded in prompts.items() if encoded.generation is None}
        written = {
            key: encoded for key, encoded in prompts.items() if encoded.generation is not None
        }
        new = scoring.score(self.scorer, chosen, stored, store)
        return new | scoring.score(self.generator, written, stored, store) if written else new

    def key(self, prompt: Encoded) -> str:
        """Return the key under which the score of `prompt` is stored."""
        weights = " ".join(self.hashes.values())
        return prompt_key(weights, f"{self.loaded.dtype} {self.table.label}".rstrip(), prompt)

    def notes(self) -> list[str]:
        """Return the decisions made while the model was loaded and used."""
        return [
            *self.loaded.notes,
            *(f"{self.name}: {note}" for note in (*self.encoder.notes, *self.scorer.notes)),
        ]


def load_scorer(
    name: str,
    table: LocalModelSection,
    batch_tokens: int,
    chat: ChatStyle | None = None,
    device: str = "auto",
) -> LoadedScorer:
    """Return the model of `table`, ready to score. Raises `InputError` if it cannot be loaded or is
    not causal.

    With `chat`, prompts go through its chat template.
    """
    dtype, device = table.dtype or "auto", choose_device(device)
    is_emulated = dtype == "bfloat16" and device == "cpu" and not has_fast_bf16("cpu")
    options = LoadOptions(
        dtype="float32" if is_emulated else dtype,
        attention=table.attention or "auto",
        device=device,
        quantization=table.quantization or "none",
        device_map=table.device_map or "none",
        revision=table.revision,
        sharding=read_sharding(None, bf16=False),
        section=f"eval.models.{name}",
    )
    if options.sharding is not None:
        _check_tensor_parallel(options, table)
    # Without autocast the weights' own type is that of the arithmetic.
    choose_attention(options.attention, device, options.section, options.torch_dtype(device))
    loaded = load_model(table.path, options, adapter=table.adapter)
    check_causal(loaded.model, table.path)
    model = LoadedScorer(
        name,
        table,
        loaded,
        Encoder(loaded.tokenizer, chat=chat),
        Scorer(loaded.model, batch_tokens),
    )
    if is_emulated:  # slower than float32, and its noise would decide how prompts are read
        model.scorer.notes.append(
            "bfloat16 is only emulated by this processor, so the model is scored in float32"
        )
    return model


def _check_tensor_parallel(options: LoadOptions, table: LocalModelSection) -> None:
    """Raise `InputError` for settings of a model that is to be held by several processes."""
    on_top = table.adapter is not None or (Path(table.path) / "adapter_config.json").is_file()
    settings = {
        "quantization": options.is_quantized,
        "device_map": options.device_map != "none",
        "adapter": on_top,
    }
    for key, is_set in settings.items():
        if is_set:
            raise InputError(
                f"{options.section}.{key}: excludes tensor parallelism. Take it out (an adapter is "
                "merged by kinject export), or start one process."
            )


def measure_perplexity(scoring: ResumableScoring, model: LoadedScorer, path: Path) -> Perplexity:
    """Return the model's perplexity on the texts in the JSONL file `path` (rows with `text`).

    As lm-evaluation-harness's rolling windows: a text's tokens are scored in windows that do not
    overlap, of the model's own length (2,048 tokens at most), each after the token before it, the
    first after the token that begins a document (`text_start`). Windows are stored like answers.
    Raises `InputError` for a row without a text.
    """
    windows: list[tuple[str, Encoded]] = []
    text_of: list[int] = []  # the number of each window's text
    n_bytes = n_texts = 0
    for number, row in read_jsonl(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}:{number}: text: missing or empty. Each row needs a text.")
        windows.extend(_windows_of(text, model))
        text_of.extend([n_texts] * (len(windows) - len(text_of)))
        n_texts, n_bytes = n_texts + 1, n_bytes + len(text.encode())
    if not windows:
        raise InputError(f"{path}: holds no texts.")
    losses, lengths = [0.0] * n_texts, [0] * n_texts
    log_probs = _score_windows(scoring, model, windows, path.stem)
    for index, (_, item), log_prob in zip(text_of, windows, log_probs, strict=True):
        losses[index] -= log_prob
        lengths[index] += len(item.continuations[0])
    # fsum: the same to the last digit, whichever process scored which window.
    total, n_tokens = math.fsum(log_probs), sum(lengths)
    loss, bits = -total / n_tokens, -total / n_bytes / math.log(2)
    per_token = math.exp(loss) if loss < _LARGEST_LOSS else math.inf
    finite = math.isfinite(per_token)
    return Perplexity(
        model.name,
        path.stem,
        n_texts,
        n_tokens,
        # report.json takes no number that is not finite.
        per_token if finite else None,
        bits if finite else None,
        losses=tuple(losses) if finite else (),
        lengths=tuple(lengths),
    )


def _windows_of(text: str, model: LoadedScorer) -> Iterator[tuple[str, Encoded]]:
    """Yield the windows of `text`, each with an id."""
    tokenizer = model.loaded.tokenizer
    start = text_start(tokenizer)
    if start is None:
        raise InputError(
            f"{model.name}: the tokenizer has neither BOS nor EOS, so the first token of a text "
            "has no context."
        )
    length = min(window_of(model.scorer.forward.config) or _LONGEST_WINDOW, _LONGEST_WINDOW)
    ids = [start, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
    for index in range(1, len(ids), length):
        context = np.asarray(ids[index - 1 : index], dtype=np.int32)
        window = np.asarray(ids[index : index + length], dtype=np.int32)
        yield f"{content_id(text)}:{index}", Encoded((context,), (window,))


def _score_windows(
    scoring: ResumableScoring,
    model: LoadedScorer,
    windows: Sequence[tuple[str, Encoded]],
    name: str,
) -> list[float]:
    """Return the log-prob of each window of the texts `name`."""
    keys = [model.key(item) for _, item in windows]
    by_key = dict(zip(keys, windows, strict=True))

    def store(key: str, score: PromptScore) -> None:
        identity, item = by_key[key]
        answer = Answer(
            identity, name, model.name, PERPLEXITY_FORMAT, 0, 0, (), 0, score.log_probs,
            n_tokens=(len(item.continuations[0]),), n_bytes=(0,), greedy=score.greedy,
        )  # fmt: skip
        scoring.answers.add(key, answer)

    stored = scoring.stored(by_key)
    mine = scoring.mine({key: identity for key, (identity, _) in by_key.items()})
    scoring.refuse_missing(model.name, sum(key not in stored for key in mine))
    new = scoring.score(model.scorer, {key: by_key[key][1] for key in mine}, stored, store)
    scores = {**stored, **scoring.shard.gather(new)}
    # Also what other processes scored; the new ones of this one are stored.
    for key, score in scores.items():
        if key not in new:
            store(key, score)
    return [scores[key].log_probs[0] for key in keys]
