"""Before a run: the estimated requests, tokens and cost of `augment`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import comb
from pathlib import Path

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.plan import Group, Plan, make_plan, spans_of
from kinject.augment.prompts import describe
from kinject.augment.top_up import QUOTA, coverage_of
from kinject.corpus.passages import cut_note, word_spans
from kinject.disk import read_jsonl
from kinject.llm.cache import stored_usage
from kinject.llm.limits import Limits, limits_of
from kinject.recipe import AugmentRecipe, AugmentSection
from kinject.terminal import duration

TOKENS_PER_WORD = 1.35
"""Estimate for English: tokens of a language model for each word or punctuation mark."""
_JUDGE_PROMPT, _JUDGE_TOKENS = 420, 8
"""Estimate: tokens of a judge's instructions, and of its answer for each sentence."""
_SECONDS_PER_TOKEN = 0.02
"""Estimate: time in which an endpoint writes one token."""


@dataclass(frozen=True)
class Preview:
    """The requests of a run, by estimate. `n_stored` of the `n_asked` variants are stored and need no request.

    `cost` is that of the requests, `spent` that of the answers in the run folder. `n_facts` are the numbers, dates, names and
    quotations of the passages; `tokens_per_fact` the writer's tokens for each to stand in five texts, if no text loses one
    (None where a passage gets fewer).
    """

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
    spent: float = 0.0
    budget: float | None = None
    n_cut: int = 0
    n_facts: int = 0
    tokens_per_text: float | None = None
    tokens_per_fact: float | None = None


def preview(recipe: AugmentRecipe) -> Preview:
    """Return the estimate for a run of `augment`. Sends nothing and writes nothing.

    Raises as `augment` does for documents and recipes.
    """
    plan, section = make_plan(recipe), recipe.augment
    limits = limits_of(section.generator, section.budget)
    judge_limits = limits_of(section.judge, section.budget) if section.judge else None
    path = recipe.run_dir / "variants.jsonl"
    stored = {str(row.get("id")) for _, row in read_jsonl(path)} if path.exists() else set[str]()
    counts, longest = Counter[str](), 0
    for document, passages in plan.read_passages():
        counts["documents"] += 1
        for passage in passages:
            n_words = len(word_spans(passage.text))
            counts.update(passages=1, cut=passage.cut, words=n_words, facts=len(coverage_of(passage).facts))
            longest = max(longest, n_words)
        for group in plan.groups(document, passages):
            _count_group(plan, group, stored, counts, judge_limits is not None)
    for group in plan.pair_groups(plan):
        _count_group(plan, group, stored, counts, judge_limits is not None)
    if counts["judged"]:
        _count_trials(counts)
    cost = limits.cost(counts["tokens_in"], counts["tokens_out"])
    if judge_limits:
        cost += judge_limits.cost(counts["judge_in"], counts["judge_out"])
    n_texts, n_facts = counts["written"], counts["facts"]
    per_text = counts["all_out"] / n_texts if n_texts else None
    per_passage = n_texts / max(1, counts["passages"])
    per_fact = counts["all_out"] * QUOTA / per_passage / n_facts if n_facts and per_passage >= QUOTA else None
    return Preview(
        n_documents=counts["documents"], n_passages=counts["passages"], n_words=counts["words"], longest=longest,
        n_asked=counts["asked"], n_stored=counts["stored"], n_requests=counts["requests"] + counts["judge_requests"],
        tokens_in=counts["tokens_in"] + counts["judge_in"], tokens_out=counts["tokens_out"] + counts["judge_out"],
        cost=cost, seconds=_seconds(section, limits, counts), spent=_spent(recipe.run_dir, limits, judge_limits),
        budget=section.budget, n_cut=counts["cut"], n_facts=n_facts, tokens_per_text=per_text, tokens_per_fact=per_fact,
    )  # fmt: skip


def _spent(run_dir: Path, limits: Limits, judge_limits: Limits | None) -> float:
    """Return the cost of the answers in the run folder, those of several endpoints at the highest of their prices."""
    total = 0.0
    for name, prices in (("cache.sqlite", limits), ("judge.sqlite", judge_limits)):
        if prices is not None and (prices.price_in or prices.price_out):
            usage = stored_usage(run_dir / name)
            total += prices.cost(usage.tokens_in, usage.tokens_out)
    return total


def _seconds(section: AugmentSection, limits: Limits, counts: Counter[str]) -> float:
    """Return the time that the writer takes."""
    n_tokens = counts["tokens_in"] + counts["tokens_out"]
    rates = (counts["requests"], limits.requests_per_minute), (n_tokens, limits.tokens_per_minute)
    seconds = max(n / (most or float("inf")) * 60 for n, most in rates)
    if section.generator.kind in ("openai", "transformers"):  # the others take no time
        seconds = max(counts["tokens_out"] * _SECONDS_PER_TOKEN / max(1, limits.concurrency), seconds)
    return seconds


def _count_group(plan: Plan, group: Group, stored: set[str], counts: Counter[str], judged: bool) -> None:
    if group.skipped or not group.n_samples:
        return
    n_requests, n_preparations = _expected_requests(plan, group)
    known = 0
    if not group.style.prepare and group.target is None:  # else the prompts depend on answers
        known = sum(request.id in stored for request in plan.requests(group, [group.item]))
    missing = n_requests - known
    counts.update(asked=n_requests, stored=known)
    if group.style.mechanical or group.texts is not None:
        return
    shown = len(word_spans(describe(group.source, "source")))
    prompt = shown + sum(len(word_spans(text)) for text in (group.style.user, group.style.system))
    n_words = len(word_spans(group.passage.text))
    per_variant = 2 if group.style.verify else 1
    counts.update(written=n_requests, all_out=round(n_words * TOKENS_PER_WORD * (n_requests + n_preparations)))
    if not missing:
        return
    counts["requests"] += missing * per_variant + n_preparations
    if judged:
        counts["judged"] += missing
        counts["judge_requests"] += missing
        counts["judge_in"] += (_JUDGE_PROMPT + round((shown + n_words) * TOKENS_PER_WORD)) * missing
        counts["judge_out"] += _JUDGE_TOKENS * (1 + describe(group.source, "n_sentences")) * missing
    counts["tokens_in"] += round(prompt * TOKENS_PER_WORD * (missing * per_variant + n_preparations))
    counts["tokens_out"] += round(n_words * TOKENS_PER_WORD * (missing + n_preparations))


def _expected_requests(plan: Plan, group: Group) -> tuple[int, int]:
    """Return the expected numbers of variants and of preparations of a group."""
    n_items, n_preparations = 1, 0
    for step in group.style.prepare:
        n_preparations += n_items
        per = 1 if step.per == "answer" else describe(group.source, f"n_{step.per}s")
        n_items *= step.expected * max(1, per)
    n_all = sum(comb(n_items, size) for size in group.style.combine)
    n_requests = min(n_all, group.n_samples) if group.style.combine else n_items * group.n_samples
    if group.target is not None:
        n_requests = min(n_requests, -(-group.target // max(1, len(spans_of(plan.tokenizer)(group.passage.text)))))
    return n_requests, n_preparations


def _count_trials(counts: Counter[str]) -> None:
    """Add the judge's trial on planted errors, which comes first."""
    trials = 2 * N_TRIALS
    for name in ("judge_in", "judge_out"):
        counts[name] += round(counts[name] / counts["judged"] * trials)
    counts["judge_requests"] += trials


def render_preview(preview: Preview) -> str:
    """Return the preview as lines of text."""
    lines = [
        f"documents   {preview.n_documents:>12,}",
        f"passages    {preview.n_passages:>12,}  (longest {preview.longest:,} words and marks, {preview.n_words:,} in all)",
        *filter(None, [cut_note(preview.n_cut, preview.n_passages, "augment.passage_tokens")]),
        f"facts       {preview.n_facts:>12,}  (numbers, dates, names and quotations)",
        f"rewritings  {preview.n_asked:>12,}  ({preview.n_stored:,} of them stored already)",
        f"requests    {preview.n_requests:>12,}  (at least: a refused answer is requested again)",
        f"tokens      {preview.tokens_in:>12,}  in, {preview.tokens_out:,} out, by estimate",
    ]
    if preview.tokens_per_text is not None:
        line = f"            {preview.tokens_per_text:>12,.0f}  out for each accepted text"
        per_fact = preview.tokens_per_fact
        lines.append(line + (f", {per_fact:,.0f} for each fact in five of them" if per_fact is not None else ""))
    if preview.cost:
        lines.append(f"cost        {preview.cost:>12,.4f}  by estimate")
    if preview.spent:
        lines.append(f"spent       {preview.spent:>12,.4f}  so far, for the answers in the run folder")
    if preview.budget is not None:
        enough = preview.spent + preview.cost <= preview.budget
        note = "enough, by estimate" if enough else "exceeded: raise augment.budget, or request less"
        lines.append(f"budget      {preview.budget:>12,.4f}  {note}")
    if preview.seconds:
        lines.append(f"time        {duration(preview.seconds):>12}  by estimate")
    return "\n".join(lines)
