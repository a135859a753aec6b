"""What a run would do, before it costs anything."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.plan import Group, Plan
from kinject.augment.requests.limits import Limits
from kinject.augment.run import plan_of
from kinject.augment.validation import limits_of, section_of
from kinject.corpus.passages import sentences, word_spans
from kinject.disk import Places, read_jsonl
from kinject.errors import InputError
from kinject.recipe import AugmentRecipe

_TOKENS_PER_WORD = 1.35
"""Tokens of a language model over words and punctuation marks, roughly, in English."""
_JUDGE_TOKENS = 20
"""Tokens of a verdict, roughly."""
_SECONDS_PER_TOKEN = 0.02
"""What an endpoint takes to write one token, roughly."""


@dataclass(frozen=True)
class Preview:
    """What was read, and what a run would ask for: estimates, for nothing is asked. `n_stored` needs no request."""

    n_documents: int
    n_passages: int
    n_words: int
    longest: int
    n_asked: int
    n_stored: int
    n_requests: int
    tokens_in: int
    tokens_out: int
    cost: float
    seconds: float
    first: tuple[str, ...]


def preview(recipe: AugmentRecipe) -> Preview:
    """Return what `augment` would do. Asks nothing and writes nothing.

    Raises as `augment` does for documents and recipes.
    """
    plan = plan_of(recipe)
    section = section_of(recipe)
    limits = limits_of(section)
    counts = Counter[str]()
    longest, first = 0, list[str]()
    with Places() as stored:
        _note_stored(recipe, stored)
        for document, passages in plan.passages():
            counts["documents"] += 1
            for passage in passages:
                n_words = len(word_spans(passage.text))
                counts["passages"] += 1
                counts["words"] += n_words
                longest = max(longest, n_words)
                if len(first) < 3:
                    first.append(passage.text)
            for group in plan.groups_of(document, passages):
                _count(plan, group, stored, counts)
    cost = limits.cost(counts["tokens_in"], counts["tokens_out"])
    if section.judge:
        cost += _judging(limits_of(replace(section, generator=section.judge)), counts)
    rate = limits.requests_per_minute or float("inf")
    seconds = counts["requests"] / rate * 60
    if section.generator.kind in ("openai", "transformers"):  # the others write in no time
        seconds = max(counts["tokens_out"] * _SECONDS_PER_TOKEN / max(1, limits.concurrency), seconds)
    return Preview(
        n_documents=counts["documents"], n_passages=counts["passages"], n_words=counts["words"], longest=longest,
        n_asked=counts["asked"], n_stored=counts["stored"], n_requests=counts["requests"], tokens_in=counts["tokens_in"],
        tokens_out=counts["tokens_out"], cost=cost, seconds=seconds,
        first=tuple(first),
    )  # fmt: skip


def _count(plan: Plan, group: Group, stored: Places, counts: Counter[str]) -> None:
    # What the facts will be is known only when they are asked for: about as many as there are sentences.
    slots = plan.slots(group, tuple(sentences(group.passage.text)) if group.style.per_note else None)
    places = stored.of_all([slot.id for slot in slots])
    missing = [slot for slot, found in zip(slots, places, strict=True) if not found]
    counts["asked"] += len(slots)
    counts["stored"] += len(slots) - len(missing)
    if group.style.mechanical or group.given is not None or not missing:
        return
    prompt = sum(len(word_spans(message["content"])) for message in group.messages(missing[0].sample))
    per_slot = 2 if group.style.verify else 1
    counts["requests"] += len(missing) * per_slot + bool(group.style.prepare)
    counts["judged"] += len(missing)
    counts["judge_in"] += round(prompt * _TOKENS_PER_WORD * 2 * len(missing))  # source and rewriting
    counts["tokens_in"] += round(prompt * _TOKENS_PER_WORD * len(missing) * per_slot)
    counts["tokens_out"] += round(len(word_spans(group.passage.text)) * _TOKENS_PER_WORD * len(missing))


def _judging(limits: Limits, counts: Counter[str]) -> float:
    """Add the judge's requests and tokens to `counts`, those on planted errors too; return what they cost."""
    trials = 2 * N_TRIALS
    tokens_in = round(counts["judge_in"] * (1 + trials / max(1, counts["judged"])))
    tokens_out = _JUDGE_TOKENS * (counts["judged"] + trials)
    counts.update(requests=counts["judged"] + trials, tokens_in=tokens_in, tokens_out=tokens_out)
    return limits.cost(tokens_in, tokens_out)


def _note_stored(recipe: AugmentRecipe, stored: Places) -> None:
    """Note the ids of what is stored: on disk, for there may be millions."""
    path = recipe.run_dir / "variants.jsonl"
    if path.exists():
        # A run cuts a torn last line off and tells of any other damage; a preview only counts up to there.
        with contextlib.suppress(InputError):
            for number, row in read_jsonl(path):
                stored.add(str(row.get("id")), number)


def render_preview(found: Preview) -> str:
    """Return the preview as lines for a person."""
    lines = [
        f"documents   {found.n_documents:>12,}",
        f"passages    {found.n_passages:>12,}  (longest {found.longest:,} words and marks, {found.n_words:,} in all)",
        f"rewritings  {found.n_asked:>12,}  ({found.n_stored:,} of them stored already)",
        f"requests    {found.n_requests:>12,}  (at least: a refused answer is asked for again)",
        f"tokens      {found.tokens_in:>12,}  in, {found.tokens_out:,} out, by estimate",
    ]
    if found.cost:
        lines.append(f"cost        {found.cost:>12,.4f}  by estimate")
    if found.seconds:
        lines.append(f"time        {found.seconds:>12,.0f}  seconds, by estimate")
    for text in found.first:
        lines += ["", text if len(text) <= 300 else text[:297] + "..."]
    return "\n".join(lines)
