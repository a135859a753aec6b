"""A run's work: documents, their passages, and one request for each variant; also an estimate before anything is sent."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import islice
from math import comb
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.groups import Group, Precomputed, VariantRequest, new_items, read_precomputed
from kinject.augment.prompts import describe_source
from kinject.augment.requests import generator_identity
from kinject.augment.requests.limits import Limits
from kinject.augment.styles import Item, Preparation, Style, read_styles
from kinject.augment.validation import augment_section, limits_of
from kinject.corpus.documents import read_documents
from kinject.corpus.passages import split_passages, token_spans, word_spans
from kinject.disk import OffsetIndex, content_id, read_jsonl, unwritable
from kinject.errors import InputError
from kinject.recipe import AugmentRecipe
from kinject.recipe.sections import MAX_SAMPLES
from kinject.types import Document, Message, Passage

_TOKENS_PER_WORD = 1.35
"""Estimate for English: tokens of a language model for each word or punctuation mark."""
_JUDGE_TOKENS = 20
"""Estimate: tokens of a judge's answer."""
_SECONDS_PER_TOKEN = 0.02
"""Estimate: time in which an endpoint writes one token."""

PlannedDocument = tuple[Document, list[Passage]]
"""A document and its passages, in order."""


_BLOCK = 64
"""Requests of one group that are sent at once."""
Notes = Callable[[str], tuple[str, ...] | None]
"""Id of `Plan.notes_id` -> the stored items, None if there are none yet."""


class Schedule:
    """The requests of one group in blocks, each of which must be counted before the next.

    With a target of tokens the blocks end once the accepted texts have as many, or a block brought none.
    """

    def __init__(self, plan: Plan, group: Group, items: Sequence[Item]) -> None:
        self._requests = plan.requests(group, items)
        self._target, self._spans = group.target, _spans(plan.tokenizer)
        self._expected = max(1, len(word_spans(group.passage.text))) if group.target else 0
        self._n_texts = self._n_tokens = 0

    def __iter__(self) -> Iterator[list[VariantRequest]]:
        size = self._size()
        while size and (block := list(islice(self._requests, size))):
            before = self._n_texts
            yield block
            size = self._size() if self._target is None or self._n_texts > before else 0

    def count(self, texts: Iterable[str]) -> None:
        """Count the accepted texts of the last block."""
        if self._target is not None:
            for text in texts:
                self._n_texts += 1
                self._n_tokens += len(self._spans(text))

    def _size(self) -> int:
        """Return the number of requests in the next block."""
        if self._target is None:
            return _BLOCK
        mean = self._n_tokens / self._n_texts if self._n_texts else self._expected
        return min(_BLOCK, max(0, -int(-(self._target - self._n_tokens) // max(1, mean))))


_spans = lru_cache(maxsize=4)(token_spans)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides which variants a run requests.

    `styles` maps a style's name to samples of a passage, `targets` to tokens; `catalog` holds the styles themselves.
    """

    documents_path: Path
    passage_tokens: int
    tokenizer: str | None
    styles: Mapping[str, int]
    seed: int
    identity: dict[str, Any]
    catalog: Mapping[str, Style]
    precomputed: Precomputed | None = None
    targets: Mapping[str, int] = field(default_factory=dict)
    document_tokens: int = 0

    @property
    def n_samples(self) -> int:
        """Most variants of one passage, in all styles."""
        return sum(min(n, _BLOCK) for n in self.styles.values())

    def read_passages(self) -> Iterator[PlannedDocument]:
        """Read and split the documents, in order.

        Raises as `read_documents` and `token_spans`, and `InputError` if a precomputed text belongs to no document.
        """
        spans = _spans(self.tokenizer)
        ids = set[str]()
        for document in read_documents(self.documents_path):
            if self.precomputed:
                ids.add(document.id)
            yield document, split_passages(document, self.passage_tokens, spans)
        if self.precomputed:
            self.precomputed.check_documents(ids)

    def groups(self, document: Document, passages: list[Passage]) -> Iterator[Group]:
        """Yield the groups of one document: by passage and style, then those of styles that show whole documents.

        Raises `InputError` if a file provides variants of the whole document but it is split.
        """
        for passage in passages:
            yield from self.groups_of(document, passage, n_passages=len(passages))
        yield from self.document_groups(document)

    def groups_of(self, document: Document, passage: Passage, n_passages: int = 1) -> Iterator[Group]:
        """Yield the groups of one passage, by style. Raises as `groups`."""
        texts = self.precomputed.texts.get(document.id, ()) if self.precomputed else ()
        if texts and n_passages > 1:
            raise InputError(
                f"{document.source}: document {document.id!r} is split into {n_passages} passages, but "
                f"{self.precomputed.path if self.precomputed else ''} rewrites it whole. "
                f"Raise augment.passage_tokens (now {self.passage_tokens})."
            )
        for name, n_samples in self.styles.items():
            style = self.catalog[name]
            if style.scope == "document":
                continue
            if self.precomputed is None or style.mechanical:
                yield self._group(document, passage, style)
            else:
                yield Group(document, passage, style, min(n_samples, len(texts)), texts)

    def document_groups(self, document: Document) -> Iterator[Group]:
        """Yield the groups of the styles that show whole documents; a very long one counts as several."""
        styles = [self.catalog[name] for name in self.styles if self.catalog[name].scope == "document"]
        if styles:
            for part in split_passages(document, self.document_tokens, _spans(self.tokenizer)):
                yield from (self._group(document, part, style) for style in styles)

    def _group(self, document: Document, passage: Passage, style: Style) -> Group:
        group = Group(document, passage, style, self.styles[style.name], target=self.targets.get(style.name))
        skipped = style.missing_need(group.source) if style.needs else ""
        return replace(group, skipped=skipped) if skipped else group

    def items(self, group: Group, notes: Notes) -> list[Item] | None:
        """Return what the prompts of a group are about, from stored `notes`; None if a preparation is not answered yet."""
        items: list[Item] = [{}]
        for step in group.style.prepare:
            answers = [notes(self.notes_id(group, step, item)) for item in items]
            if any(answer is None for answer in answers):
                return None
            items = new_items(group, step, items, [answer or () for answer in answers])
        return items

    def requests(self, group: Group, items: Sequence[Item]) -> Iterator[VariantRequest]:
        """Yield the requests of `group` in order: its samples; for styles with preparations, samples of each item.

        A style that combines items has `n_samples` of all combinations, each once.
        """
        if group.skipped:
            return
        style, n = group.style, group.n_samples
        if style.combine:
            schedule = style.schedule(items, content_id("schedule", self.seed, group.passage.id))
            pairs: Iterator[tuple[int, Item]] = ((0, item) for item in islice(schedule, n))
        else:
            pairs = ((turn, item) for turn in range(n) for item in items)
        for sample, (turn, item) in enumerate(pairs):
            yield self._request(group, sample, turn, item)

    def unprepared(self, group: Group) -> list[VariantRequest]:
        """Return requests that stand for those of a group whose preparation has no answer."""
        n_requests = 1 if group.target or group.style.combine else group.n_samples
        ids = (content_id("unprepared", group.passage.id, group.style.name, turn) for turn in range(n_requests))
        return [VariantRequest(name, sample, "") for sample, name in enumerate(ids)]

    def _request(self, group: Group, sample: int, turn: int, item: Item) -> VariantRequest:
        style = group.style
        messages: list[Message] = []
        if group.texts is not None:
            prompt_hash = content_id(group.texts[sample], style.identity)
        elif style.mechanical:
            prompt_hash = content_id(group.document.title, group.passage.text, style.name)
        else:
            messages = style.messages(group.source, turn, item)
            prompt_hash = content_id(messages, style.identity)
        identity = {} if style.mechanical else self.identity
        variant_id = content_id("variant", group.passage.id, style.name, prompt_hash, identity, self.seed, turn)
        return VariantRequest(variant_id, sample, prompt_hash, turn, item, messages)

    def notes_id(self, group: Group, step: Preparation, item: Item) -> str:
        """Return the id of the items that a preparation of `group` makes of `item`."""
        messages = group.style.preparation(step, group.source, item)
        return content_id("notes", group.passage.id, group.style.name, step.name, messages, self.identity, self.seed)

    def sample_seed(self, prompt_hash: str, sample: int, attempt: int) -> int:
        """Return the seed (31 bits) of one attempt. It depends on the prompt, not on order or time."""
        return int(content_id("seed", self.seed, prompt_hash, sample, attempt)[:8], 16) & 0x7FFFFFFF


def make_plan(recipe: AugmentRecipe) -> Plan:
    """Return the plan of a recipe. Raises `RecipeError` as `augment_section`, and as `read_precomputed`."""
    section = augment_section(recipe)
    generator = section.generator
    precomputed = read_precomputed(Path(generator.path)) if generator.kind == "file" and generator.path else None
    return Plan(
        documents_path=Path(section.documents), passage_tokens=section.passage_tokens, tokenizer=section.tokenizer,
        styles={name: n if isinstance(n, int) else MAX_SAMPLES for name, n in section.styles.items()},
        targets={name: n.tokens for name, n in section.styles.items() if not isinstance(n, int)},
        catalog=read_styles(section.style_files), document_tokens=section.document_tokens, seed=recipe.seed,
        identity=generator_identity(generator), precomputed=precomputed,
    )  # fmt: skip


class PassageFile:
    """The documents of a run with their passages, in a temporary file of the run folder.

    Documents are read, split and hashed once and added here. Everything later iterates over this file, one document in
    memory at a time.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open an empty file. Raises `DiskError` if it cannot be written."""
        self._path = run_dir / ".passages.part"  # `lock_dir` deletes such a name after a kill
        self._file = self._open("w")

    def add(self, document: Document, passages: list[Passage]) -> None:
        """Append a document. Raises `DiskError` if it cannot be written."""
        spans = [(passage.id, passage.start, passage.end) for passage in passages]
        row = [document.id, document.title, document.text, document.source, spans]
        try:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            raise unwritable(self._path, error) from error

    def __iter__(self) -> Iterator[PlannedDocument]:
        try:
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        with self._open("r") as file:
            for line in file:
                identity, title, text, source, spans = json.loads(line)
                passages = [Passage(name, identity, start, end, text[start:end]) for name, start, end in spans]
                yield Document(identity, title, text, source), passages

    def _open(self, mode: str) -> IO[str]:
        try:  # surrogatepass: a file's name may be no UTF-8
            return self._path.open(mode, encoding="utf-8", errors="surrogatepass", newline="\n")
        except OSError as error:
            raise unwritable(self._path, error, "opened") from error

    def __enter__(self) -> PassageFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by `add`
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Preview:
    """What a run would request, by estimate. `n_stored` of the `n_asked` variants are stored and need no request."""

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
    """Return what `augment` would do. Sends nothing and writes nothing.

    Raises as `augment` does for documents and recipes.
    """
    plan = make_plan(recipe)
    section = augment_section(recipe)
    limits = limits_of(section)
    counts = Counter[str]()
    longest, first = 0, list[str]()
    with OffsetIndex() as stored:
        _index_stored(recipe.run_dir / "variants.jsonl", stored)
        for document, passages in plan.read_passages():
            counts["documents"] += 1
            for passage in passages:
                n_words = len(word_spans(passage.text))
                counts["passages"] += 1
                counts["words"] += n_words
                longest = max(longest, n_words)
                if len(first) < 3:
                    first.append(passage.text)
            for group in plan.groups(document, passages):
                _count_group(plan, group, stored, counts)
    cost = limits.cost(counts["tokens_in"], counts["tokens_out"])
    if section.judge:
        cost += _count_judge(limits_of(replace(section, generator=section.judge)), counts)
    n_tokens = counts["tokens_in"] + counts["tokens_out"]
    rates = (counts["requests"], limits.requests_per_minute), (n_tokens, limits.tokens_per_minute)
    seconds = max(n / (most or float("inf")) * 60 for n, most in rates)
    if section.generator.kind in ("openai", "transformers"):  # the others take no time
        seconds = max(counts["tokens_out"] * _SECONDS_PER_TOKEN / max(1, limits.concurrency), seconds)
    return Preview(
        n_documents=counts["documents"], n_passages=counts["passages"], n_words=counts["words"], longest=longest,
        n_asked=counts["asked"], n_stored=counts["stored"], n_requests=counts["requests"], tokens_in=counts["tokens_in"],
        tokens_out=counts["tokens_out"], cost=cost, seconds=seconds, first=tuple(first),
    )  # fmt: skip


def _index_stored(path: Path, stored: OffsetIndex) -> None:
    """Add the ids of stored variants to an index on disk, for there may be millions."""
    if path.exists():
        # A run cuts off a torn last line and reports other damage; a preview counts the rows before it.
        with contextlib.suppress(InputError):
            for number, row in read_jsonl(path):
                stored.add(str(row.get("id")), number)


def _count_group(plan: Plan, group: Group, stored: OffsetIndex, counts: Counter[str]) -> None:
    if group.skipped or not group.n_samples:
        return
    n_requests, n_preparations = _expected_requests(plan, group)
    known = 0
    if not group.style.prepare and group.target is None:  # else the prompts depend on answers
        requests = list(plan.requests(group, [{}]))
        known = sum(bool(offsets) for offsets in stored.offsets_of_all([request.id for request in requests]))
    missing = n_requests - known
    counts["asked"] += n_requests
    counts["stored"] += known
    if group.style.mechanical or group.texts is not None or not missing:
        return
    shown = len(word_spans(describe_source(group.source)["source"]))
    prompt = shown + sum(len(word_spans(text)) for text in (group.style.user, group.style.system))
    per_variant = 2 if group.style.verify else 1
    counts["requests"] += missing * per_variant + n_preparations
    counts["judged"] += missing
    counts["judge_in"] += round(prompt * _TOKENS_PER_WORD * 2 * missing)  # source and variant
    counts["tokens_in"] += round(prompt * _TOKENS_PER_WORD * (missing * per_variant + n_preparations))
    n_words = len(word_spans(group.passage.text))
    counts["tokens_out"] += round(n_words * _TOKENS_PER_WORD * (missing + n_preparations))


def _expected_requests(plan: Plan, group: Group) -> tuple[int, int]:
    """Return the expected numbers of variants and of preparations of a group."""
    described = describe_source(group.source)
    per = {"answer": 1, "sentence": described["n_sentences"], "name": described["n_names"]}
    n_items, n_preparations = 1, 0
    for step in group.style.prepare:
        n_preparations += n_items
        n_items *= step.expected * max(1, per[step.per])
    n_all = sum(comb(n_items, size) for size in group.style.combine)
    n_requests = min(n_all, group.n_samples) if group.style.combine else n_items * group.n_samples
    if group.target is not None:
        n_requests = min(n_requests, -(-group.target // max(1, len(_spans(plan.tokenizer)(group.passage.text)))))
    return n_requests, n_preparations


def _count_judge(limits: Limits, counts: Counter[str]) -> float:
    """Add the judge's requests and tokens to `counts`, its trial on planted errors included; return their cost."""
    trials = 2 * N_TRIALS
    tokens_in = round(counts["judge_in"] * (1 + trials / max(1, counts["judged"])))
    tokens_out = _JUDGE_TOKENS * (counts["judged"] + trials)
    counts.update(requests=counts["judged"] + trials, tokens_in=tokens_in, tokens_out=tokens_out)
    return limits.cost(tokens_in, tokens_out)


def render_preview(preview: Preview) -> str:
    """Return the preview as lines of text."""
    lines = [
        f"documents   {preview.n_documents:>12,}",
        f"passages    {preview.n_passages:>12,}  (longest {preview.longest:,} words and marks, {preview.n_words:,} in all)",
        f"rewritings  {preview.n_asked:>12,}  ({preview.n_stored:,} of them stored already)",
        f"requests    {preview.n_requests:>12,}  (at least: a refused answer is requested again)",
        f"tokens      {preview.tokens_in:>12,}  in, {preview.tokens_out:,} out, by estimate",
    ]
    if preview.cost:
        lines.append(f"cost        {preview.cost:>12,.4f}  by estimate")
    if preview.seconds:
        lines.append(f"time        {preview.seconds:>12,.0f}  seconds, by estimate")
    for text in preview.first:
        lines += ["", text if len(text) <= 300 else text[:297] + "..."]
    return "\n".join(lines)
