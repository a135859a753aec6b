"""Before a run: what `augment` would request, by estimate, and the prompts of one style on one
passage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import comb
from pathlib import Path

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.coverage import QUOTA, coverage_of
from kinject.augment.groups import LONGEST_DOCUMENT, Group, document_groups, pair_groups
from kinject.augment.passage_file import PlannedDocuments
from kinject.augment.plan import Plan, make_plan
from kinject.augment.prompts import describe
from kinject.augment.styles import SKIPPED, STYLES, Style, read_style
from kinject.augment.variant_requests import variant_requests
from kinject.corpus.passages import cut_note, split_passages, word_spans
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.heap import read_documents
from kinject.llm.cache import CACHES
from kinject.llm.limits import limits_of, spent_so_far
from kinject.recipe import AugmentRecipe, AugmentSection, QuestionsRecipe
from kinject.recipe.check import suggestion
from kinject.terminal import CURRENCY, format_count
from kinject.types import Document, Message

TOKENS_PER_WORD = 1.35
"""Estimate for English: tokens of a language model for each word or punctuation mark."""
_JUDGE_PROMPT, _JUDGE_TOKENS = 420, 8
"""Estimate: tokens of a judge's instructions, and of its answer for each sentence."""
_EXAMPLE = Document(
    "example",
    "The Falk Bridge",
    "# The Falk Bridge\n\nMara Lind was born in Arvika. "
    "She built the Falk Bridge with Karin Ekberg in 1931. It is 120 m long.",
    "the built-in example",
)


@dataclass(frozen=True)
class Preview:
    """The requests of a run, by estimate. `n_stored` of the `n_asked` variants are stored and need
    no request.

    `cost` is that of the requests, `spent` that of the answers in the run folder. `n_facts` are the
    numbers, dates, names and quotations of the passages; `tokens_per_fact` the writer's tokens for
    each to stand in five texts, if no text loses one (None where a passage gets fewer).
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
    spent: float = 0.0
    budget: float | None = None
    n_cut: int = 0
    n_facts: int = 0
    tokens_per_text: float | None = None
    tokens_per_fact: float | None = None


def preview(recipe: AugmentRecipe, *, count_facts: bool = True) -> Preview:
    """Return the estimate for a run of `augment`. Sends nothing and writes nothing.

    Without `count_facts` its facts are 0: they take most of the time.

    Raises as `augment` does for documents and recipes.
    """
    plan, section = make_plan(recipe), recipe.augment
    path = recipe.run_dir / "variants.jsonl"
    stored = set[str]()
    if path.exists():
        stored = {str(row.get("id")) for _, row in read_jsonl(path)}
    counts, longest = Counter[str](), 0
    documents = PlannedDocuments(plan)
    for document, passages in documents:
        counts["documents"] += 1
        for passage in passages:
            n_words = len(word_spans(passage.text))
            counts.update(passages=1, cut=passage.cut, words=n_words)
            if count_facts:
                counts["facts"] += len(coverage_of(passage).facts)
            longest = max(longest, n_words)
        for group in document_groups(plan, document, passages):
            _count_group(plan, group, stored, counts, section.judge is not None)
    for group in pair_groups(plan, documents):
        _count_group(plan, group, stored, counts, section.judge is not None)
    if counts["judged"]:
        # Beside the verdicts: the trial on planted errors with and without one, the statements of
        # each passage, and those that each text tells.
        n_more = 2 * N_TRIALS + counts["passages"] + counts["counted"]
        for name in ("judge_in", "judge_out"):
            counts[name] += round(counts[name] / counts["judged"] * n_more)
        counts["judge_requests"] = counts["judged"] + n_more
    spent = cost = 0.0
    generators = (section.generator, section.judge)
    for generator, cache, name in zip(generators, CACHES, ("tokens", "judge"), strict=True):
        if generator is not None:
            spent += spent_so_far(generator, recipe.run_dir / cache)
            cost += limits_of(generator, None).cost(counts[f"{name}_in"], counts[f"{name}_out"])
    tokens_per_text = tokens_per_fact = None
    n_texts, n_facts = counts["written"], counts["facts"]
    if n_texts:
        tokens_per_text = counts["all_out"] / n_texts
    n_for_five = QUOTA * counts["passages"]
    # With fewer than five texts a passage no fact can stand in five.
    if tokens_per_text and n_texts >= n_for_five and n_facts:
        tokens_per_fact = counts["all_out"] * n_for_five / n_texts / n_facts
    return Preview(
        n_documents=counts["documents"],
        n_passages=counts["passages"],
        n_words=counts["words"],
        longest=longest,
        n_asked=counts["asked"],
        n_stored=counts["stored"],
        n_requests=counts["requests"] + counts["judge_requests"],
        tokens_in=counts["tokens_in"] + counts["judge_in"],
        tokens_out=counts["tokens_out"] + counts["judge_out"],
        cost=cost,
        spent=spent,
        budget=section.budget,
        n_cut=counts["cut"],
        n_facts=n_facts,
        tokens_per_text=tokens_per_text,
        tokens_per_fact=tokens_per_fact,
    )


def preview_questions(recipe: QuestionsRecipe) -> str:
    """Return the documents, passages and planned questions of `recipe` in a line; nothing is sent
    or kept."""
    section = recipe.questions
    model = section.generator.model or section.generator.kind
    n_documents = n_passages = 0
    for document in read_documents(Path(section.documents), recipe.documents):
        n_documents += 1
        n_passages += len(split_passages(document, section.passage_tokens, word_spans))
    return (
        f"{format_count(n_documents, 'document')}, {format_count(n_passages, 'passage')}: "
        f"{format_count(n_passages * section.n_questions, 'question')}, "
        f"{format_count(n_passages, 'request')} or more go to {model} for "
        "them (each is also answered with and without its passage)"
    )


def _count_group(
    plan: Plan, group: Group, stored: set[str], counts: Counter[str], judged: bool
) -> None:
    if group.skipped or not group.n_samples:
        return
    n_requests, n_preparations = _expected_requests(plan, group)
    known = 0
    # Without stored texts no id is needed: they hash the prompts, a fifth of a study's dry run.
    if stored and not group.style.prepare and group.target is None:  # else ids depend on answers
        known = sum(request.id in stored for request in variant_requests(plan, group, [group.item]))
    missing = n_requests - known
    counts.update(asked=n_requests, stored=known)
    if group.style.mechanical or group.texts is not None:
        return
    shown = len(word_spans(describe(group.source, "source")))
    prompt = shown + sum(len(word_spans(text)) for text in (group.style.user, group.style.system))
    n_words = len(word_spans(group.passage.text))
    n_sent = missing + n_preparations
    if group.style.verify:
        n_sent += missing
    n_out = n_words * TOKENS_PER_WORD
    counts.update(written=n_requests, all_out=round(n_out * (n_requests + n_preparations)))
    # After `written`: stored texts cost nothing more, but count in the tokens of a text.
    if not missing:
        return
    counts["requests"] += n_sent
    if judged:
        counts["judged"] += missing
        if group.style.scope == "passage":
            counts["counted"] += missing
        counts["judge_in"] += (_JUDGE_PROMPT + round((shown + n_words) * TOKENS_PER_WORD)) * missing
        counts["judge_out"] += _JUDGE_TOKENS * (1 + describe(group.source, "n_sentences")) * missing
    counts["tokens_in"] += round(prompt * TOKENS_PER_WORD * n_sent)
    counts["tokens_out"] += round(n_out * (missing + n_preparations))


def _expected_requests(plan: Plan, group: Group) -> tuple[int, int]:
    """Return the expected numbers of variants and of preparations of a group."""
    n_items, n_preparations = 1, 0
    for step in group.style.prepare:
        n_preparations += n_items
        n_items *= step.expected
        if step.per != "answer":
            n_items *= max(1, describe(group.source, f"n_{step.per}s"))
    n_requests = n_items * group.n_samples
    if group.style.combine:
        n_all = sum(comb(n_items, size) for size in group.style.combine)
        n_requests = min(n_all, group.n_samples)
    if group.target is not None:
        n_words = max(1, len(word_spans(group.passage.text)))
        # By texts as long as the passage, as `request_blocks` begins.
        n_requests = min(n_requests, -(-group.target // n_words))
    return n_requests, n_preparations


def render_preview(preview: Preview) -> str:
    """Return the preview as lines of text."""
    cut = cut_note(preview.n_cut, preview.n_passages, "augment.passage_tokens")
    lines = [
        f"documents   {preview.n_documents:>12,}",
        f"passages    {preview.n_passages:>12,}  (longest {preview.longest:,} words and marks, "
        f"{preview.n_words:,} in all)",
        *filter(None, [cut]),
        f"facts       {preview.n_facts:>12,}  (numbers, dates, names and quotations)",
        f"rewritings  {preview.n_asked:>12,}  ({preview.n_stored:,} of them stored already)",
        f"requests    {preview.n_requests:>12,}  (at least: a refused answer is requested again)",
        f"tokens      {preview.tokens_in:>12,}  in, {preview.tokens_out:,} out, by estimate",
    ]
    if preview.tokens_per_text is not None:
        line = f"            {preview.tokens_per_text:>12,.0f}  out for each accepted text"
        if preview.tokens_per_fact is not None:
            line += f", {preview.tokens_per_fact:,.0f} for each fact in five of them"
        lines.append(line)
    if preview.cost:
        lines.append(f"cost        {preview.cost:>12,.4f}  by estimate, {CURRENCY}")
    if preview.spent:
        lines.append(
            f"spent       {preview.spent:>12,.4f}  so far, for the answers in the run folder"
        )
    if preview.budget is not None:
        note = "enough, by estimate"
        if preview.spent + preview.cost > preview.budget:
            note = "exceeded: raise augment.budget, or request less"
        lines.append(f"budget      {preview.budget:>12,.4f}  {note}")
    return "\n".join(lines)


def find_style(name: str) -> Style:
    """Return a shipped style by its name, or the one in a YAML file. Raises `InputError` if there
    is none."""
    if Path(name).suffix in (".yaml", ".yml"):
        return read_style(Path(name))
    if name not in STYLES:
        raise InputError(f"{name}: unknown style.{suggestion(name, STYLES)}")
    return STYLES[name]


def first_group(style: Style, documents: Path | None) -> Group:
    """Return the group of a style on the first passage of the documents, or of a built-in example.

    Raises as `read_documents`.
    """
    if style.scope == "pair":
        raise InputError(
            f"style {style.name}: needs passages of two documents; "
            "kinject augment --dry-run counts them."
        )
    n_tokens, document = AugmentSection.passage_tokens, _EXAMPLE
    if style.scope == "document":
        n_tokens = LONGEST_DOCUMENT
    if documents:
        document = next(iter(read_documents(documents)))
    return Group(document, split_passages(document, n_tokens, word_spans)[0], style, 1)


def render_prompts(group: Group) -> str:
    """Return all prompts of a style on a passage; items that a model must name first are shown as
    (fact)."""
    style, source = group.style, group.source
    if style.mechanical:
        return style.mechanical(group.document.title, group.passage.text, 0)
    parts = []
    missing = style.missing_need(source)
    if missing:
        parts.append(f"Such passages are skipped: {SKIPPED[missing]}.")
    for title, messages in _prompts(group):
        parts.append(f"######## {title}\n{_render(messages)}")
    return "\n\n".join(parts)


def _prompts(group: Group) -> Iterator[tuple[str, list[Message]]]:
    style, items = group.style, dict[str, str | tuple[str, ...]]()
    for step in style.prepare:
        prompt = style.preparation(step, group.source, items)
        yield f"preparation: {step.name}, once for each {step.for_each or style.scope}", prompt
        items[step.name] = f"({step.name})"
        if style.combine:
            items[step.name] = (f"({step.name} 1)", f"({step.name} 2)")
    yield "text", style.messages(group.source, 0, items)
    if style.verify:
        yield "verification", style.verification(group.source, items, "(the text)")


def _render(messages: list[Message]) -> str:
    return "\n".join(f"---- {message['role']}\n{message['content']}" for message in messages)
