"""One model of a recipe: loaded, its prompts encoded and scored, its answers stored; and its held-out perplexity."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from kinject.disk import content_id, read_jsonl
from kinject.errors import InputError
from kinject.eval.plan import Arm, QuestionSet
from kinject.eval.prompts import PromptRequest, scored_texts
from kinject.eval.scoring.answers import PromptScore, hash_model, prompt_key
from kinject.eval.scoring.encode import Encoded, Encoder, encode_requests
from kinject.eval.scoring.resumable import ResumableScoring
from kinject.eval.scoring.scorer import Scorer
from kinject.models import LoadedModel, load_model
from kinject.recipe.sections import EvalSection
from kinject.results import Perplexity
from kinject.terminal import Progress, show
from kinject.types import Answer

PERPLEXITY_FORMAT = "perplexity"
"""The `format` of stored windows of texts; they are no answers to questions."""

_LONGEST_WINDOW = 2048


@dataclass
class LoadedScorer:
    """A model in memory, its tokenizer as an `Encoder`, and its scorer."""

    name: str
    path: str
    loaded: LoadedModel
    encoder: Encoder
    scorer: Scorer

    @cached_property
    def model_hash(self) -> str:
        """The hash of weights, configuration and tokenizer."""
        return hash_model(self.path, getattr(self.loaded.model.config, "_commit_hash", None))

    def key(self, prompt: Encoded) -> str:
        """Return the key under which the score of `prompt` is stored."""
        return prompt_key(self.model_hash, str(self.loaded.dtype), prompt)

    def notes(self) -> list[str]:
        """Return what was decided while the model was loaded and used."""
        return [*self.loaded.notes, *(f"{self.name}: {note}" for note in (*self.encoder.notes, *self.scorer.notes))]


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """One prompt of one arm in tokens; `context_ids` are the ids of the passages in it."""

    arm: Arm
    request: PromptRequest
    encoded: Encoded
    context_ids: tuple[str, ...]


def load_scorer(name: str, path: str, section: EvalSection) -> LoadedScorer:
    """Return the model in `path`, ready to score."""
    loaded = load_model(path)
    scorer = Scorer(loaded.model, section.batch_tokens)
    return LoadedScorer(name, path, loaded, Encoder(loaded.tokenizer, chat=section.chat), scorer)


def encode_arms(question_set: QuestionSet, model: LoadedScorer, template: str) -> list[PendingPrompt]:
    """Return the prompts of every arm of `model` on `question_set`, in the order of arms and questions."""
    arms = [arm for arm in question_set.arms if arm.model == model.name]
    rows = [(arm, *item) for arm in arms for item in question_set.requests(arm, template)]
    encoded = encode_requests(model.encoder, [request for _, request, _ in rows], model.scorer.forward.window())
    return [
        PendingPrompt(arm, request, item, ids) for (arm, request, ids), item in zip(rows, encoded, strict=True)
    ]  # fmt: skip


def score_prompts(
    scoring: ResumableScoring, question_set: QuestionSet, model: LoadedScorer, prompts: Sequence[PendingPrompt]
) -> tuple[list[Answer], int]:
    """Return the answer of each of `prompts` and the number of those that were not stored before; all are stored now."""
    keys = [model.key(prompt.encoded) for prompt in prompts]
    by_key: dict[str, list[PendingPrompt]] = {}
    for key, prompt in zip(keys, prompts, strict=True):
        by_key.setdefault(key, []).append(prompt)
    stored = scoring.stored(by_key)
    mine = scoring.mine({key: same[0].request.question.id for key, same in by_key.items()})
    n_stored = sum(len(by_key[key]) for key in stored)
    n_new = sum(len(by_key[key]) for key in mine if key not in stored)
    with show_progress(f"{model.name} on {question_set.name}", n_stored + n_new, n_stored) as progress:

        def store(key: str, score: PromptScore) -> None:
            for prompt in by_key[key]:
                scoring.answers.add(key, _make_answer(question_set, prompt, score))
                progress.advance()

        new = scoring.score(model.scorer, {key: by_key[key][0].encoded for key in mine}, stored, store)
    scores = {**stored, **scoring.shard.gather(new)}
    answers = [_make_answer(question_set, prompt, scores[key]) for key, prompt in zip(keys, prompts, strict=True)]
    for key, answer in zip(keys, answers, strict=True):
        scoring.answers.add(key, answer)
    return answers, sum(key not in stored for key in keys)


def _make_answer(question_set: QuestionSet, prompt: PendingPrompt, score: PromptScore) -> Answer:
    question = prompt.request.question
    texts = scored_texts(question, prompt.arm.format)
    return Answer(
        question_id=question.id,
        question_set=question_set.name,
        arm=prompt.arm.name,
        format=prompt.arm.format,
        shots=prompt.arm.shots,
        k=prompt.arm.k,
        context_ids=prompt.context_ids,
        gold=question.answer,
        log_probs=score.log_probs,
        n_tokens=tuple(len(ids) for ids in prompt.encoded.continuations),
        n_bytes=tuple(len(text.encode("utf-8")) for text in texts),
        truncated=prompt.encoded.truncated,
        n_chars=tuple(map(len, texts)),
        subject=question.subject,
        document_id=question.document_id,
        rotation=prompt.request.rotation,
        greedy=score.greedy,
    )


@contextmanager
def show_progress(title: str, n_total: int, n_stored: int) -> Iterator[Progress]:
    """Yield a counter for `n_total` prompts, `n_stored` of which need no model; print the rate when the block ends."""
    start = time.monotonic()
    with Progress(title, n_total - n_stored, "questions") as progress:
        yield progress
    seconds = time.monotonic() - start
    stored = f", {n_stored} found in answers.jsonl" if n_stored else ""
    rate = f", {progress.done / seconds:.1f} a second" if progress.done and seconds else ""
    show(f"{title}: {n_total} prompts{stored}, {progress.done} scored in {seconds:.1f} s{rate}", file=sys.stderr)


def measure_perplexity(scoring: ResumableScoring, model: LoadedScorer, path: Path) -> Perplexity:
    """Return the model's perplexity on the texts in the JSONL file `path` (rows with `text`).

    As lm-evaluation-harness's rolling windows: a text's tokens are scored in windows that do not overlap, of the
    model's own length (2,048 tokens at most), each after the token before it, the first after BOS or EOS. Windows are
    stored like answers. Raises `InputError` for a row without a text.
    """
    windows: list[tuple[str, Encoded]] = []
    n_bytes = n_texts = 0
    for number, row in read_jsonl(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}:{number}: text: missing or empty. Each row needs a text.")
        n_texts, n_bytes = n_texts + 1, n_bytes + len(text.encode())
        windows.extend(_windows_of(text, model))
    if not windows:
        raise InputError(f"{path}: holds no texts.")
    total = _score_windows(scoring, model, windows, path.stem)
    n_tokens = sum(len(item.continuations[0]) for _, item in windows)
    per_token = math.exp(-total / n_tokens)
    return Perplexity(model.name, path.stem, n_texts, n_tokens, per_token, -total / n_bytes / math.log(2))


def _windows_of(text: str, model: LoadedScorer) -> Iterator[tuple[str, Encoded]]:
    """Yield the windows of `text`, each with an id."""
    tokenizer = model.loaded.tokenizer
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError(
            f"{model.name}: the tokenizer has neither BOS nor EOS, so the first token of a text has no context."
        )
    length = min(model.scorer.forward.window() or _LONGEST_WINDOW, _LONGEST_WINDOW)
    ids = [start, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
    for index in range(1, len(ids), length):
        context = np.asarray(ids[index - 1 : index], dtype=np.int32)
        window = np.asarray(ids[index : index + length], dtype=np.int32)
        yield f"{content_id(text)}:{index}", Encoded((context,), (window,))


def _score_windows(
    scoring: ResumableScoring, model: LoadedScorer, windows: Sequence[tuple[str, Encoded]], name: str
) -> float:
    """Return the summed log-prob of all windows of the texts `name`."""
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
    new = scoring.score(model.scorer, {key: by_key[key][1] for key in mine}, stored, store)
    scores = {**stored, **scoring.shard.gather(new)}
    for key, score in scores.items():
        store(key, score)
    return math.fsum(scores[key].log_probs[0] for key in keys)
