"""A run's work: documents, their passages, and one request for each variant; also an estimate before anything is sent."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from kinject.augment.checks.judge import N_TRIALS
from kinject.augment.prompts import ask
from kinject.augment.requests import generator_identity
from kinject.augment.requests.limits import Limits
from kinject.augment.styles import STYLES, Style
from kinject.augment.validation import augment_section, limits_of
from kinject.corpus.documents import read_documents
from kinject.corpus.passages import sentences, split_passages, token_spans, word_spans
from kinject.disk import OffsetIndex, content_id, read_jsonl, unwritable
from kinject.errors import InputError
from kinject.recipe import AugmentRecipe
from kinject.types import Document, Message, Passage

_TOKENS_PER_WORD = 1.35
"""Estimate for English: tokens of a language model for each word or punctuation mark."""
_JUDGE_TOKENS = 20
"""Estimate: tokens of a judge's answer."""
_SECONDS_PER_TOKEN = 0.02
"""Estimate: time in which an endpoint writes one token."""

PlannedDocument = tuple[Document, list[Passage]]
"""A document and its passages, in order."""


@dataclass(frozen=True, slots=True)
class Group:
    """The variants of one passage in one style. They must differ from each other, so one worker requests them all.

    `texts` holds variants that a file provides; None if a generator writes them.
    """

    document: Document
    passage: Passage
    style: Style
    n_samples: int
    texts: tuple[str, ...] | None = None

    def messages(self, sample: int, notes: tuple[str, ...] = ()) -> list[Message]:
        """Return the prompt for one sample."""
        return self.style.messages(self.document.title, self.passage.text, sample, notes)

    def preparation(self) -> list[Message]:
        """Return the prompt that is sent once before all samples."""
        return ask(self.document.title, self.passage.text, self.style.prepare)


@dataclass(frozen=True, slots=True)
class VariantRequest:
    """A request for one variant. `id` is the id that the variant will have."""

    id: str
    sample: int
    prompt_hash: str


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Variants read from a file, by document in file order. `lines` maps each document id to its first line."""

    path: Path
    texts: Mapping[str, tuple[str, ...]]
    lines: Mapping[str, int]

    def check_documents(self, known: Iterable[str]) -> None:
        """Raise `InputError` (file:line) if a text belongs to no document."""
        unknown = self.texts.keys() - set(known)
        if unknown:
            first = min(unknown, key=lambda name: self.lines[name])
            raise InputError(
                f"{self.path}:{self.lines[first]}: document_id {first!r} is the id of no document. "
                f"{len(unknown)} such ids in all; they must be those of augment.documents."
            )


def read_precomputed(path: Path) -> Precomputed:
    """Read rows of ``document_id`` and ``text``, all into memory. Raises `InputError` (file:line) on any other row."""
    texts: dict[str, list[str]] = {}
    lines: dict[str, int] = {}
    for number, row in read_jsonl(path):
        for key in ("document_id", "text"):
            if not isinstance(row.get(key), str) or not row[key].strip():
                raise InputError(
                    f"{path}:{number}: {key}: found {row.get(key)!r}, expected a string that is not empty."
                )
        texts.setdefault(row["document_id"], []).append(row["text"])
        lines.setdefault(row["document_id"], number)
    if not texts:
        raise InputError(f"{path}: holds no rewritings. Expected rows with document_id and text.")
    return Precomputed(path, {name: tuple(one) for name, one in texts.items()}, lines)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides which variants a run requests. `styles` maps a style's name to samples of a passage."""

    documents_path: Path
    passage_tokens: int
    tokenizer: str | None
    styles: Mapping[str, int]
    seed: int
    identity: dict[str, Any]
    precomputed: Precomputed | None = None

    @property
    def n_samples(self) -> int:
        """Most variants of one passage, in all styles."""
        return sum(self.styles.values())

    def read_passages(self) -> Iterator[PlannedDocument]:
        """Read and split the documents, in order.

        Raises as `read_documents` and `token_spans`, and `InputError` if a precomputed text belongs to no document.
        """
        spans = token_spans(self.tokenizer)
        ids = set[str]()
        for document in read_documents(self.documents_path):
            if self.precomputed:
                ids.add(document.id)
            yield document, split_passages(document, self.passage_tokens, spans)
        if self.precomputed:
            self.precomputed.check_documents(ids)

    def groups(self, document: Document, passages: list[Passage]) -> Iterator[Group]:
        """Yield the groups of one document by passage and style.

        Raises `InputError` if a file provides variants of the whole document but it is split.
        """
        texts = self.precomputed.texts.get(document.id, ()) if self.precomputed else ()
        if texts and len(passages) > 1:
            raise InputError(
                f"{document.source}: document {document.id!r} is split into {len(passages)} passages, but "
                f"{self.precomputed.path if self.precomputed else ''} rewrites it whole. "
                f"Raise augment.passage_tokens (now {self.passage_tokens})."
            )
        for passage in passages:
            for name, n_samples in self.styles.items():
                style = STYLES[name]
                if self.precomputed is None or style.mechanical:
                    yield Group(document, passage, style, n_samples)
                else:
                    yield Group(document, passage, style, min(n_samples, len(texts)), texts)

    def requests(self, group: Group, notes: tuple[str, ...] | None = None) -> list[VariantRequest]:
        """Return the requests of `group` by sample. A style with `per_note` has `n_samples` for each of the notes."""
        n_requests = group.n_samples * (len(notes or ()) or 1 if group.style.per_note else 1)
        return [self._request(group, sample) for sample in range(n_requests)]

    def _request(self, group: Group, sample: int) -> VariantRequest:
        style = group.style
        # Without the notes of the preparation: they exist only once it was answered, and the id must not change then.
        prompt = group.messages(sample) if group.texts is None else group.texts[sample]
        prompt_hash = content_id(prompt, style.prepare, style.verify)
        identity = {} if style.mechanical else self.identity
        variant_id = content_id("variant", group.passage.id, style.name, prompt_hash, identity, self.seed, sample)
        return VariantRequest(variant_id, sample, prompt_hash)

    def notes_id(self, group: Group) -> str:
        """Return the id of the notes that the preparation of `group` makes."""
        return content_id("notes", group.passage.id, group.style.name, group.preparation(), self.identity, self.seed)

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
        styles=section.styles, seed=recipe.seed, identity=generator_identity(generator), precomputed=precomputed,
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
    # The number of facts is unknown before the preparation: about one a sentence.
    requests = plan.requests(group, tuple(sentences(group.passage.text)) if group.style.per_note else None)
    offsets = stored.offsets_of_all([request.id for request in requests])
    missing = [request for request, known in zip(requests, offsets, strict=True) if not known]
    counts["asked"] += len(requests)
    counts["stored"] += len(requests) - len(missing)
    if group.style.mechanical or group.texts is not None or not missing:
        return
    prompt = sum(len(word_spans(message["content"])) for message in group.messages(missing[0].sample))
    per_variant = 2 if group.style.verify else 1
    counts["requests"] += len(missing) * per_variant + bool(group.style.prepare)
    counts["judged"] += len(missing)
    counts["judge_in"] += round(prompt * _TOKENS_PER_WORD * 2 * len(missing))  # source and variant
    counts["tokens_in"] += round(prompt * _TOKENS_PER_WORD * len(missing) * per_variant)
    counts["tokens_out"] += round(len(word_spans(group.passage.text)) * _TOKENS_PER_WORD * len(missing))


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
