"""Before a run: the estimated requests and cost of `augment`; and a style on one passage: prompts, answer, verdict."""

from __future__ import annotations

import contextlib
import heapq
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.plan import LONGEST_DOCUMENT, Group, Plan, make_plan, spans_of
from kinject.augment.prompts import describe
from kinject.augment.run import augment
from kinject.augment.styles import SKIPPED, STYLES, Item, Style, read_style, read_styles
from kinject.augment.validation import augment_section
from kinject.corpus.documents import read_documents
from kinject.corpus.passages import cut_note, split_passages, token_spans, word_spans
from kinject.disk import OffsetIndex, read_jsonl
from kinject.errors import InputError
from kinject.recipe import AugmentRecipe, AugmentSection
from kinject.recipe.check import suggestion
from kinject.recipe.sections import TokenTarget
from kinject.requests.cache import stored_usage
from kinject.requests.limits import Limits, limits_of
from kinject.terminal import duration
from kinject.types import Document, Message

TOKENS_PER_WORD = 1.35
"""Estimate for English: tokens of a language model for each word or punctuation mark."""
_JUDGE_PROMPT, _JUDGE_TOKENS = 420, 8
"""Estimate: tokens of a judge's instructions, and of its answer for each sentence."""
_SECONDS_PER_TOKEN = 0.02
"""Estimate: time in which an endpoint writes one token."""
_MOST_SHOWN = 5
_LOCATION = re.compile(r":\d+\Z")


@dataclass(frozen=True, slots=True, order=True)
class Expense:
    """The expected cost and tokens of a file, or of a document where there is one file."""

    cost: float
    n_tokens: int
    name: str


@dataclass(frozen=True)
class Preview:
    """The requests of a run, by estimate. `n_stored` of the `n_asked` variants are stored and need no request.

    `cost` is that of the requests, `spent` that of the answers in the run folder. `crossed_at` names the document at which
    both together exceed the `budget`, "" if they do not. `dearest` holds the most expensive files, or documents of one file.
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
    first: tuple[str, ...]
    spent: float = 0.0
    budget: float | None = None
    crossed_at: str = ""
    dearest: tuple[Expense, ...] = ()
    n_cut: int = 0


@dataclass
class _Dearest:
    """The most expensive files and documents. Documents of one file must come one after the other."""

    files: list[Expense] = field(default_factory=list)
    documents: list[Expense] = field(default_factory=list)
    n_files: int = 0
    n_documents: int = 0
    _file: str = ""
    _n_tokens: int = 0
    _cost: float = 0.0

    def add(self, document: Document, n_tokens: int, cost: float) -> None:
        """Count one document."""
        file = _LOCATION.sub("", document.source)
        if file != self._file:
            self._end_file()
            self._file, self._n_tokens, self._cost = file, 0, 0.0
            self.n_files += 1
        self._n_tokens += n_tokens
        self._cost += cost
        self.n_documents += 1
        _push(self.documents, Expense(cost, n_tokens, _document_label(document, self.n_documents)))

    def most_expensive(self) -> tuple[Expense, ...]:
        """Return the most expensive first, files if there are several."""
        self._end_file()
        ranked = sorted(self.files if self.n_files > 1 else self.documents, reverse=True)
        return tuple(expense for expense in ranked if expense.n_tokens)

    def _end_file(self) -> None:
        if self._file:
            _push(self.files, Expense(self._cost, self._n_tokens, self._file))


def _document_label(document: Document, number: int) -> str:
    """Return the name of a document with its number, for titles may be the same."""
    return f"{document.title or document.id} (document {number:,})"


def _push(heap: list[Expense], expense: Expense) -> None:
    """Keep the most expensive of a heap."""
    heapq.heappush(heap, expense)
    if len(heap) > _MOST_SHOWN:
        heapq.heappop(heap)


def preview(recipe: AugmentRecipe) -> Preview:
    """Return the estimate for a run of `augment`. Sends nothing and writes nothing.

    Raises as `augment` does for documents and recipes.
    """
    plan = make_plan(recipe)
    section = augment_section(recipe)
    limits = limits_of(section.generator, section.budget)
    judge_limits = limits_of(section.judge, section.budget) if section.judge else None
    counts, dearest = Counter[str](), _Dearest()
    longest, first, crossed_at = 0, list[str](), ""
    spent = _spent(recipe.run_dir, limits, judge_limits)
    cost = 0.0
    stored = OffsetIndex()
    _index_stored(recipe.run_dir / "variants.jsonl", stored)
    for document, passages in plan.read_passages():
        counts["documents"] += 1
        for passage in passages:
            n_words = len(word_spans(passage.text))
            counts["passages"] += 1
            counts["cut"] += passage.cut
            counts["words"] += n_words
            longest = max(longest, n_words)
            if len(first) < 3:
                first.append(passage.shown)
        before = counts.copy()
        for group in plan.groups(document, passages):
            _count_group(plan, group, stored, counts, judge_limits is not None)
        if judge_limits and counts["judged"] and not before["judged"]:
            _count_trials(counts)
        new = counts - before
        document_cost = _cost(new, limits, judge_limits)
        cost += document_cost
        dearest.add(document, _n_tokens(new), document_cost)
        if section.budget is not None and not crossed_at and spent + cost > section.budget:
            crossed_at = _document_label(document, counts["documents"])
    return Preview(
        n_documents=counts["documents"], n_passages=counts["passages"], n_words=counts["words"], longest=longest,
        n_asked=counts["asked"], n_stored=counts["stored"], n_requests=counts["requests"] + counts["judge_requests"],
        tokens_in=counts["tokens_in"] + counts["judge_in"], tokens_out=counts["tokens_out"] + counts["judge_out"],
        cost=_cost(counts, limits, judge_limits), seconds=_seconds(section, limits, counts), first=tuple(first), spent=spent,
        budget=section.budget, crossed_at=crossed_at, dearest=dearest.most_expensive() if counts["documents"] > 1 else (),
        n_cut=counts["cut"],
    )  # fmt: skip


def _spent(run_dir: Path, limits: Limits, judge_limits: Limits | None) -> float:
    """Return the cost of the answers in the run folder, those of several endpoints at the highest of their prices."""
    total = 0.0
    for name, prices in (("cache.sqlite", limits), ("judge.sqlite", judge_limits)):
        if prices is not None and (prices.price_in or prices.price_out):
            usage = stored_usage(run_dir / name)
            total += prices.cost(usage.tokens_in, usage.tokens_out)
    return total


def _cost(counts: Counter[str], limits: Limits, judge_limits: Limits | None) -> float:
    cost = limits.cost(counts["tokens_in"], counts["tokens_out"])
    return cost + judge_limits.cost(counts["judge_in"], counts["judge_out"]) if judge_limits else cost


def _n_tokens(counts: Counter[str]) -> int:
    return sum(counts[name] for name in ("tokens_in", "tokens_out", "judge_in", "judge_out"))


def _seconds(section: AugmentSection, limits: Limits, counts: Counter[str]) -> float:
    """Return the time that the writer takes."""
    n_tokens = counts["tokens_in"] + counts["tokens_out"]
    rates = (counts["requests"], limits.requests_per_minute), (n_tokens, limits.tokens_per_minute)
    seconds = max(n / (most or float("inf")) * 60 for n, most in rates)
    if section.generator.kind in ("openai", "transformers"):  # the others take no time
        seconds = max(counts["tokens_out"] * _SECONDS_PER_TOKEN / max(1, limits.concurrency), seconds)
    return seconds


def _index_stored(path: Path, stored: OffsetIndex) -> None:
    """Add the ids of stored variants to an index on disk, for there may be millions."""
    if path.exists():
        # A run cuts off a torn last line and reports other damage; a preview counts the rows before it.
        with contextlib.suppress(InputError):
            for number, row in read_jsonl(path):
                stored.add(str(row.get("id")), number)


def _count_group(plan: Plan, group: Group, stored: OffsetIndex, counts: Counter[str], judged: bool) -> None:
    if group.skipped or not group.n_samples:
        return
    n_requests, n_preparations = _expected_requests(plan, group)
    known = 0
    if not group.style.prepare and group.target is None:  # else the prompts depend on answers
        requests = list(plan.requests(group, [{}]))
        known = sum(bool(offsets) for offsets in (stored.offsets_of(request.id) for request in requests))
    missing = n_requests - known
    counts["asked"] += n_requests
    counts["stored"] += known
    if group.style.mechanical or group.texts is not None or not missing:
        return
    shown = len(word_spans(describe(group.source, "source")))
    prompt = shown + sum(len(word_spans(text)) for text in (group.style.user, group.style.system))
    n_words = len(word_spans(group.passage.text))
    per_variant = 2 if group.style.verify else 1
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
        f"rewritings  {preview.n_asked:>12,}  ({preview.n_stored:,} of them stored already)",
        f"requests    {preview.n_requests:>12,}  (at least: a refused answer is requested again)",
        f"tokens      {preview.tokens_in:>12,}  in, {preview.tokens_out:,} out, by estimate",
    ]
    if preview.cost:
        lines.append(f"cost        {preview.cost:>12,.4f}  by estimate")
    if preview.spent:
        lines.append(f"spent       {preview.spent:>12,.4f}  so far, for the answers in the run folder")
    if preview.budget is not None:
        crossed = f"exceeded at {preview.crossed_at}: raise augment.budget, or request less"
        note = crossed if preview.crossed_at else "enough, by estimate"
        lines.append(f"budget      {preview.budget:>12,.4f}  {note}")
    if preview.seconds:
        lines.append(f"time        {duration(preview.seconds):>12}  by estimate")
    if preview.dearest:
        lines += ["", "most expensive, by estimate:"]
        priced = any(expense.cost for expense in preview.dearest)
        lines += [
            f"{f'{expense.cost:,.4f}' if priced else f'{expense.n_tokens:,} tokens':>16}  {expense.name}"
            for expense in preview.dearest
        ]
    lines += ["", "first passages:"] if preview.first else []
    for text in preview.first:
        lines += ["", text if len(text) <= 300 else text[:297] + "..."]
    return "\n".join(lines)


_EXAMPLE = Document(
    "example", "The Falk Bridge",
    "# The Falk Bridge\n\nMara Lind was born in Arvika. She built the Falk Bridge with Karin Ekberg in 1931. It is 120 m "
    "long.",
    "the built-in example",
)  # fmt: skip


@dataclass(frozen=True)
class StyleTrial:
    """The outcome of one request of a style: the texts that were accepted, and those refused, each with its reason."""

    accepted: tuple[str, ...]
    refused: tuple[tuple[str, str], ...]
    nothing: bool
    n_requests: int
    cost: float


def known_styles(recipe: AugmentRecipe | None) -> Mapping[str, Style]:
    """Return the shipped styles and those that a recipe names. Raises `RecipeError` for faults in their files."""
    return read_styles(recipe.augment.style_files) if recipe else STYLES


def find_style(name: str, recipe: AugmentRecipe | None) -> Style:
    """Return a style by its name, or the one in a YAML file. Raises `InputError` if there is none."""
    if Path(name).suffix in (".yaml", ".yml"):
        return read_style(Path(name))
    styles = known_styles(recipe)
    if name not in styles:
        raise InputError(f"{name}: unknown style.{suggestion(name, styles)}")
    return styles[name]


def find_passage(style: Style, recipe: AugmentRecipe | None, documents: Path | None, number: int) -> Group:
    """Return the group of a style on passage `number` (from 1) of the documents, the recipe's, or a built-in example.

    Raises as `read_documents`, and `InputError` if there are fewer passages.
    """
    section = recipe.augment if recipe else None
    shown: AugmentSection | type[AugmentSection] = section or AugmentSection  # the class has the defaults
    n_tokens = LONGEST_DOCUMENT if style.scope == "document" else shown.passage_tokens
    spans = token_spans(section.tokenizer if section else None)
    path = documents or (Path(section.documents) if section else None)
    groups = (
        Group(document, passage, style, 1)
        for document in (read_documents(path) if path else [_EXAMPLE])
        for passage in split_passages(document, n_tokens, spans)
    )
    group = next(islice(groups, number - 1, None), None)
    if group is None:
        raise InputError(f"{path or _EXAMPLE.source}: has no passage {number}. Give --passage a smaller number.")
    return group


def render_prompts(group: Group) -> str:
    """Return all prompts of a style on a passage; items that a model must name first are shown as (fact)."""
    style, source = group.style, group.source
    if style.mechanical:
        return style.mechanical(group.document.title, group.passage.text, 0)
    missing = style.missing_need(source)
    note = f"Such passages are skipped: {SKIPPED[missing]}.\n\n" if missing else ""
    return note + "\n\n".join(f"######## {title}\n{_render(messages)}" for title, messages in _prompts(group))


def _prompts(group: Group) -> Iterator[tuple[str, list[Message]]]:
    style, item = group.style, dict[str, object]()
    for step in style.prepare:
        frequency = f"once for each {step.for_each}" if step.for_each else f"once for each {style.scope}"
        yield f"preparation: {step.name}, {frequency}", style.preparation(step, group.source, item)
        item[step.name] = (f"({step.name} 1)", f"({step.name} 2)") if style.combine else f"({step.name})"
    known: Item = item
    yield "text", style.messages(group.source, 0, known)
    if style.verify:
        yield "verification", style.verification(group.source, known, "(the text)")


def _render(messages: list[Message]) -> str:
    return "\n".join(f"---- {message['role']}\n{message['content']}" for message in messages)


def try_style(group: Group, recipe: AugmentRecipe) -> StyleTrial:
    """Request one text in the group's style from the recipe's generator, preparations included, without the judge.

    Nothing is stored. Raises as `augment`.
    """
    with TemporaryDirectory(prefix="kinject-style-") as folder:
        path = Path(folder) / "documents.jsonl"
        heading = "".join(f"{'#' * (level + 1)} {name}\n\n" for level, name in enumerate(group.source.headings))
        row = {"id": group.document.id, "title": group.document.title, "text": heading + group.passage.text}
        path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8", errors="surrogatepass")
        section = replace(
            recipe.augment, documents=str(path), styles={group.style.name: 1 if group.style.mechanical else TokenTarget(1)},
            include_originals=False, judge=None, contamination_check=(), passage_tokens=10**9,
        )  # fmt: skip
        result = augment(replace(recipe, run_dir=Path(folder) / "run", augment=section))
        texts = [row["text"] for _, row in read_jsonl(result.variants_path)]
        refused = [
            (f"{row['reason']}: {row['detail']}".rstrip(": "), row["text"])
            for _, row in read_jsonl(result.rejected_path)
        ]
        for error in result.failed:
            raise InputError(f"style {group.style.name}: {error}.")
    return StyleTrial(tuple(filter(None, texts)), tuple(refused), "" in texts, result.n_sent, result.cost)
