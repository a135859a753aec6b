"""Held-out perplexity by the same machinery as questions: each window of a text is one continuation."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kinject.disk import content_id, read_jsonl
from kinject.errors import InputError
from kinject.eval.scoring.answers import Scored, prompt_key
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.resumable import Desk
from kinject.eval.scoring.scorer import Reading, Scorer
from kinject.results import Perplexity
from kinject.terminal import Progress, show
from kinject.types import Answer

FORMAT = "perplexity"
"""The `format` of stored windows; they are no answers to questions."""

_LONGEST = 2048


def measure_perplexity(
    name: str, path: Path, scorer: Scorer, tokenizer: Any, desk: Desk, weights: tuple[str, str]
) -> Perplexity:
    """Return how well the model foretells the texts in the JSONL file `path` (rows with `text`).

    As lm-evaluation-harness's rolling windows: a text's tokens are asked in windows that do not overlap, of the model's
    own length (2,048 tokens at most), each after the token before it, the first after BOS or EOS. Windows are stored in
    `desk` under `weights` (hash and dtype). Raises `InputError` for a row without a text.
    """
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise InputError(f"{name}: the tokenizer has neither BOS nor EOS, so the first token of a text has no context.")
    length = min(scorer.passes.window() or _LONGEST, _LONGEST)
    windows: list[tuple[str, Encoded]] = []
    n_bytes = n_texts = 0
    for number, row in read_jsonl(path):
        text = row.get("text")
        if not isinstance(text, str) or not text:
            raise InputError(f"{path}:{number}: text: missing or empty. Each row needs a text.")
        n_texts, n_bytes = n_texts + 1, n_bytes + len(text.encode())
        ids = [start, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
        for at in range(1, len(ids), length):
            part = np.asarray(ids[at : at + length], dtype=np.int32)
            context = np.asarray(ids[at - 1 : at], dtype=np.int32)
            windows.append((f"{content_id(text)}:{at}", Encoded((context,), (part,))))
    if not windows:
        raise InputError(f"{path}: holds no texts.")
    total, n_tokens = _score(name, path, windows, scorer, desk, weights)
    return Perplexity(name, path.stem, n_texts, n_tokens, math.exp(-total / n_tokens), -total / n_bytes / math.log(2))


def _score(
    name: str,
    path: Path,
    windows: list[tuple[str, Encoded]],
    scorer: Scorer,
    desk: Desk,
    weights: tuple[str, str],
) -> tuple[float, int]:
    """Return the summed log-prob of all windows and the number of their tokens."""
    keys = [prompt_key(*weights, item) for _, item in windows]
    by_key = dict(zip(keys, windows, strict=True))

    def keep(key: str, said: Reading | Scored) -> None:
        identity, item = by_key[key]
        size = (len(item.continuations[0]),)
        answer = Answer(identity, path.stem, name, FORMAT, 0, 0, (), 0, said.log_probs, size, (0,), greedy=said.greedy)
        desk.book.add(key, answer)

    stored = desk.stored(by_key)
    own = desk.own({key: identity for key, (identity, _) in by_key.items()})
    said = desk.ask(scorer, {key: by_key[key][1] for key in own}, stored, keep)
    for key, reading in desk.share.gather(said).items():
        keep(key, reading)  # what other processes read
    sums = []
    for key in keys:
        found = desk.book.find(key) or desk.share.missing()
        sums.append(found.log_probs[0])
    return math.fsum(sums), sum(len(item.continuations[0]) for _, item in windows)


@contextmanager
def show_progress(what: str, n_total: int, n_stored: int) -> Iterator[Progress]:
    """Yield a counter for `n_total` prompts, `n_stored` of which need no model; say the rate when the block ends."""
    start = time.monotonic()
    with Progress(what, n_total - n_stored, "questions") as progress:
        yield progress
    seconds = time.monotonic() - start
    stored = f", {n_stored} found in answers.jsonl" if n_stored else ""
    rate = f", {progress.done / seconds:.1f} a second" if progress.done and seconds else ""
    show(f"{what}: {n_total} prompts{stored}, {progress.done} scored in {seconds:.1f} s{rate}", file=sys.stderr)
