"""A run's work: documents, their passages, and one request for each variant, in groups of one style
on one passage."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import IO, Any

from kinject.augment.checks.additions import Fact, carried, facts_of, source_facts
from kinject.augment.checks.checker import Checker, normal_form
from kinject.augment.prompts import Source, entities_of, source_of
from kinject.augment.styles import Item, Preparation, Style, read_styles
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import content_id, read_jsonl, unwritable
from kinject.documents import read_documents
from kinject.errors import InputError
from kinject.llm import request_seed
from kinject.llm.prompt_injection import escape_tags
from kinject.llm.sender import generator_identity
from kinject.recipe import AugmentRecipe, DocumentsSection, Recipe
from kinject.recipe.conflicts import find_problems
from kinject.recipe.sections import MAX_SAMPLES
from kinject.types import Document, Message, Passage, Variant

LONGEST_DOCUMENT = 8192
"""Most tokens of a document that styles of whole documents see at once; a longer one counts as
several."""


@dataclass(frozen=True, slots=True)
class Group:
    """The variants of one passage in one style. They must differ from each other, so one worker
    requests them all.

    `target`, if there is one, is the number of tokens that the variants are to have together; else
    there are `n_samples` of them. `item` is known before any preparation: the name that the
    passages of a pair share. `texts` holds variants that a file provides; None if a generator
    writes them. `skipped` is the need of the style that the passage lacks; then nothing is
    requested.
    """

    document: Document
    passage: Passage
    style: Style
    n_samples: int
    texts: tuple[str, ...] | None = None
    target: int | None = None
    skipped: str = ""
    item: Item = field(default_factory=dict)

    @property
    def source(self) -> Source:
        """The part of the passage that prompts show."""
        return source_of(self.document, self.passage)

    def checker(self) -> Checker:
        """Return the checks of the answers; they read the whole passage."""
        source = self.source
        about = "\n".join((source.title, *source.headings))
        return Checker(self.passage.shown, self.style.rules, self.style.literals, about)


@dataclass(frozen=True, slots=True)
class VariantRequest:
    """A request for one variant, about `item` of the preparations. `id` is the id that the variant
    will have.

    `turn` counts the requests about the same item. `messages` is empty where no model is asked.
    """

    id: str
    sample: int
    prompt_hash: str
    turn: int = 0
    item: Item = field(default_factory=dict)
    messages: Sequence[Message] = ()


@dataclass(frozen=True, slots=True)
class Precomputed:
    """Variants read from a file, by document in file order. `lines` maps each document id to its
    first line."""

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
    """Read rows of ``document_id`` and ``text``, all into memory. Raises `InputError` (file:line)
    on any other row."""
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
    return Precomputed(path, {name: tuple(rewritings) for name, rewritings in texts.items()}, lines)


def new_items(
    group: Group, step: Preparation, items: Sequence[Item], answers: Sequence[Sequence[str]]
) -> list[Item]:
    """Return the items of a preparation: each of `items` with each line of its answer, none twice.

    With `in_passage`, lines that are not in the passage are left out.
    """
    text = group.passage.shown
    passage = f" {normal_form(text)} "
    no_spaces = passage.count(" ") < len(passage) / 20  # Chinese and Japanese part no words
    items_by_form: dict[str, Item] = {}
    for item, answer in zip(items, answers, strict=True):
        for line in answer:
            form = normal_form(line)
            if form and (
                not step.in_passage or f" {form} " in passage or (no_spaces and line in text)
            ):
                items_by_form.setdefault(form, {**item, step.name: line})
    return list(items_by_form.values())


PlannedDocument = tuple[Document, list[Passage]]
"""A document and its passages, in order."""
_Place = tuple[Document, Passage]


_BLOCK = 64
"""Requests of one group that are sent at once."""
_BARREN = 24
"""Requests in a row without a text after which a target of tokens is given up."""
_MOST_SHARING = 10
"""A name in more documents relates none of them in particular."""
Notes = Callable[[str], tuple[str, ...] | None]
"""Id of `Plan.notes_id` -> the stored items, None if there are none yet."""
Stored = Callable[[Sequence[VariantRequest]], Mapping[str, Variant]]
"""Requests -> their stored variants by id."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides which variants a run requests.

    `styles` maps a style's name to samples of a passage, `targets` to tokens; `catalog` holds the
    styles themselves.
    """

    documents_path: Path
    passage_tokens: int
    styles: Mapping[str, int]
    seed: int
    identity: dict[str, Any]
    catalog: Mapping[str, Style]
    precomputed: Precomputed | None = None
    targets: Mapping[str, int] = field(default_factory=dict)
    documents: DocumentsSection = DocumentsSection()
    judge: dict[str, Any] | None = None

    @property
    def n_samples(self) -> int:
        """Most variants of one passage, in all styles."""
        return sum(min(n, _BLOCK) for n in self.styles.values())

    def __iter__(self) -> Iterator[PlannedDocument]:
        return self.read_passages()

    def read_passages(self) -> Iterator[PlannedDocument]:
        """Read and split the documents, in order.

        Raises as `read_documents`, and `InputError` if a precomputed text belongs to no document.
        """
        ids = set[str]()
        for document in read_documents(self.documents_path, self.documents):
            if self.precomputed:
                ids.add(document.id)
            yield document, split_passages(document, self.passage_tokens, word_spans)
        if self.precomputed:
            self.precomputed.check_documents(ids)

    def groups(self, document: Document, passages: list[Passage]) -> Iterator[Group]:
        """Yield the groups of one document: by passage and style, then those of styles that show
        whole documents.

        Raises `InputError` if a file provides variants of the whole document but it is split.
        """
        for passage in passages:
            yield from self.groups_of(document, passage, n_passages=len(passages))
        yield from self.document_groups(document)

    def groups_of(
        self, document: Document, passage: Passage, n_passages: int = 1
    ) -> Iterator[Group]:
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
            if style.scope != "passage":
                continue
            if self.precomputed is None or style.mechanical:
                yield self._group(document, passage, style)
            else:
                yield Group(document, passage, style, min(n_samples, len(texts)), texts)

    def document_groups(self, document: Document) -> Iterator[Group]:
        """Yield the groups of the styles that show whole documents; a very long one counts as
        several."""
        styles = [
            self.catalog[name] for name in self.styles if self.catalog[name].scope == "document"
        ]
        if styles:
            for part in split_passages(document, LONGEST_DOCUMENT, word_spans):
                yield from (self._group(document, part, style) for style in styles)

    def pair_groups(self, documents: Iterable[PlannedDocument]) -> Iterator[Group]:
        """Yield the groups of the styles for two passages of different documents that share a name;
        reads `documents` twice."""
        styles = [self.catalog[name] for name in self.styles if self.catalog[name].scope == "pair"]
        for name, (document, first), (other, second) in _pairs(documents) if styles else ():
            text = f"{first.shown}\n\n{second.shown}"
            passage = Passage(
                content_id("pair", first.id, second.id, name), document.id, 0, len(text), text
            )
            titles = " / ".join(filter(None, (document.title, other.title)))
            for style in styles:
                yield replace(
                    self._group(replace(document, title=titles), passage, style),
                    item={"entity": name},
                )

    def _group(self, document: Document, passage: Passage, style: Style) -> Group:
        group = Group(
            document, passage, style, self.styles[style.name], target=self.targets.get(style.name)
        )
        skipped = style.missing_need(group.source) if style.needs else ""
        return replace(group, skipped=skipped) if skipped else group

    def items(self, group: Group, notes: Notes) -> list[Item] | None:
        """Return the items of a group's prompts, from stored `notes`; None if a preparation is not
        answered yet."""
        items: list[Item] = [group.item]
        for step in group.style.prepare:
            answers = [notes(self.notes_id(group, step, item)) for item in items]
            if any(answer is None for answer in answers):
                return None
            items = new_items(group, step, items, [answer or () for answer in answers])
        return items

    def requests(self, group: Group, items: Sequence[Item]) -> Iterator[VariantRequest]:
        """Yield the requests of `group` in order: its samples; for styles with preparations,
        samples of each item.

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

    def blocks(
        self, group: Group, items: Sequence[Item], stored: Stored
    ) -> Iterator[list[VariantRequest]]:
        """Yield the `requests` of a group in blocks, each of which is judged before the next is
        sent.

        With a target of tokens they end once the texts that are `stored` have as many, or `_BARREN`
        requests brought none.
        """
        requests = self.requests(group, items)
        n_texts = n_tokens = n_barren = 0
        while n_barren < _BARREN:
            size = _BLOCK
            if group.target is not None:
                mean = max(
                    1, n_tokens / n_texts if n_texts else len(word_spans(group.passage.text))
                )
                size = min(_BLOCK, max(0, -int(-(group.target - n_tokens) // mean)))
            if not (block := list(islice(requests, size))):
                return
            yield block
            if group.target is not None:
                texts = [text for variant in stored(block).values() for text in variant.texts]
                n_texts += len(texts)
                n_tokens += sum(len(word_spans(text)) for text in texts)
                n_barren = 0 if texts else n_barren + len(block)

    def unprepared(self, group: Group) -> list[VariantRequest]:
        """Return the requests that replace those of a group whose preparation has no answer."""
        n_requests = 1 if group.target or group.style.combine else group.n_samples
        ids = (
            content_id("unprepared", group.passage.id, group.style.name, turn)
            for turn in range(n_requests)
        )
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
        variant_id = content_id(
            "variant", group.passage.id, style.name, prompt_hash, identity, self.seed, turn
        )
        return VariantRequest(variant_id, sample, prompt_hash, turn, item, messages)

    def notes_id(self, group: Group, step: Preparation, item: Item) -> str:
        """Return the id of the items that a preparation of `group` makes of `item`."""
        messages = group.style.preparation(step, group.source, item)
        return content_id(
            "notes",
            group.passage.id,
            group.style.name,
            step.name,
            messages,
            self.identity,
            self.seed,
        )

    def statements_id(self, passage: Passage) -> str:
        """Return the id of the statements that the judge lists of a passage."""
        return content_id("statements", passage.id, self.judge)

    def sample_seed(self, prompt_hash: str, sample: int, attempt: int) -> int:
        """Return the seed (31 bits) of one attempt. It depends on the prompt, not on order or time."""
        return request_seed("seed", self.seed, prompt_hash, sample, attempt)


def _pairs(documents: Iterable[PlannedDocument]) -> Iterator[tuple[str, _Place, _Place]]:
    """Yield each name that a few documents share, with the first passages of two of them that have
    it."""
    n_documents = Counter[str]()
    for _, passages in documents:
        n_documents.update({name for passage in passages for name in entities_of(passage.text)})
    shared = {name for name, n in n_documents.items() if 1 < n <= _MOST_SHARING}
    found: dict[str, list[_Place]] = {}
    for document, passages in documents:
        for passage in passages:
            for name in shared.intersection(entities_of(passage.text)):
                known = found.setdefault(name, [])
                if len(known) < 2 and all(other.id != document.id for other, _ in known):
                    known.append((document, passage))
    for name in sorted(found):
        yield name, found[name][0], found[name][1]


def check_sections(recipe: Recipe) -> None:
    """Raise `RecipeError` with every problem of the augment and questions sections, if the recipe
    has them."""
    problems = find_problems("questions", recipe) if recipe.questions is not None else []
    if recipe.augment is not None:
        problems += find_problems("augment", recipe, read_styles(recipe.augment.style_files))
    recipe.raise_any(problems)


def make_plan(recipe: AugmentRecipe) -> Plan:
    """Return the plan of a recipe. Raises `RecipeError` as `check_sections`, and as
    `read_precomputed`."""
    check_sections(recipe)
    section = recipe.augment
    generator = section.generator
    precomputed = (
        read_precomputed(Path(generator.path))
        if generator.kind == "file" and generator.path
        else None
    )
    samples = {name: n if isinstance(n, int) else MAX_SAMPLES for name, n in section.styles.items()}
    return Plan(
        documents_path=Path(section.documents), passage_tokens=section.passage_tokens, styles=samples,
        targets={name: n.tokens for name, n in section.styles.items() if not isinstance(n, int)},
        catalog=read_styles(section.style_files), seed=recipe.seed,
        identity=generator_identity(generator), precomputed=precomputed, documents=recipe.documents,
        judge=generator_identity(section.judge) if section.judge else None,
    )  # fmt: skip


QUOTA = 5
"""Accepted texts in which each fact should stand, where a recipe gives no `augment.coverage`."""
_MOST_NAMED = 12
"""Facts that one request names."""
_TOP_UP_TASK = "Other versions of this passage left some of its facts out. Above all, tell these, as the passage tells them:"


@dataclass
class PassageCoverage:
    """The facts of one passage, each with the number of its texts that carry it."""

    passage: Passage
    facts: tuple[Fact, ...]
    counts: list[int] = field(init=False)
    n_texts: int = 0
    _index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.facts)
        self._index = {fact.id: index for index, fact in enumerate(self.facts)}

    def add(self, text: str, facts: Iterable[str] | None = None) -> None:
        """Count one accepted text by the ids of the facts that it carries; without these they are
        looked for in the text."""
        self.n_texts += 1
        for fact in self.carried(text) if facts is None else facts:
            if fact in self._index:
                self.counts[self._index[fact]] += 1

    def carried(self, text: str) -> list[str]:
        """Return the ids of the facts that a text carries, without statements, which a judge alone
        finds."""
        return [fact.id for fact in carried(self.facts, source_facts(self.passage.shown), text)]

    def quota(self, wanted: int | None) -> int:
        """Return the texts in which each fact should stand: `wanted`, else 5, or half of the texts
        where these are fewer."""
        return wanted if wanted is not None else max(1, min(QUOTA, -(-self.n_texts // 2)))

    def short(self, quota: int) -> list[Fact]:
        """Return the facts that fewer than `quota` texts carry, the rarest first."""
        pairs = sorted((n, index) for index, n in enumerate(self.counts) if n < quota)
        return [self.facts[index] for _, index in pairs]


def coverage_of(passage: Passage, statements: Iterable[str] = ()) -> PassageCoverage:
    """Return the coverage of a passage before its first text; `statements` are those that a judge
    listed."""
    listed = (Fact("statement", str(number), text) for number, text in enumerate(statements, 1))
    return PassageCoverage(passage, (*facts_of(source_facts(passage.shown)), *listed))


def top_up_group(groups: Iterable[Group]) -> Group | None:
    """Return the group of a passage whose style can be asked for facts by name: a model writes it
    from the passage alone."""
    return next(
        (
            group for group in groups
            if group.texts is None and not (group.skipped or group.style.mechanical or group.style.prepare)
            and group.style.rows == "text"
        ), None,
    )  # fmt: skip


def requests_for(
    plan: Plan, group: Group, coverage: PassageCoverage, quota: int
) -> Iterator[VariantRequest]:
    """Yield one request after the other for the facts that are still short, at most `quota` of
    them.

    Count the texts of each in `coverage` before the next. The requests depend on the texts alone,
    so that a rerun finds them.
    """
    for number in itertools.count():
        missing = coverage.short(quota)[:_MOST_NAMED]
        if not missing or number == quota:
            return
        messages = _top_up_messages(group, missing, number)
        prompt_hash = content_id(messages, group.style.identity)
        identity = content_id(
            "top up",
            group.passage.id,
            group.style.name,
            prompt_hash,
            plan.identity,
            plan.seed,
            number,
        )
        yield VariantRequest(
            identity, group.n_samples + number, prompt_hash, number, messages=messages
        )


def _top_up_messages(group: Group, missing: Sequence[Fact], number: int) -> list[Message]:
    messages = group.style.messages(group.source, number, {})
    facts = "\n".join(f"- {escape_tags(fact.text)}" for fact in missing)
    return [
        *messages[:-1],
        {"role": "user", "content": f"{messages[-1]['content']}\n\n{_TOP_UP_TASK}\n{facts}"},
    ]


class PassageFile:
    """The documents of a run with their passages, in a temporary file of the run folder.

    Documents are read, split and hashed once and added here. Everything later iterates over this
    file, one document in memory at a time; of `meta`, the licence stays. `counts` are those of
    documents, passages, and passages cut short.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open an empty file. Raises `DiskError` if it cannot be written."""
        self._path = run_dir / ".passages.part"  # `lock_dir` deletes a .part after a kill
        self._file = self._open("w")
        self.counts = Counter[str](documents=0, passages=0, cut=0)

    def add(self, document: Document, passages: list[Passage]) -> None:
        """Append a document. Raises `DiskError` if it cannot be written."""
        self.counts.update(
            documents=1, passages=len(passages), cut=sum(passage.cut for passage in passages)
        )
        spans = [
            (passage.id, passage.start, passage.end, passage.path, passage.header, passage.cut)
            for passage in passages
        ]
        row = [
            document.id,
            document.title,
            document.text,
            document.source,
            document.meta.get("licence"),
            spans,
        ]
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
                identity, title, text, source, licence, spans = json.loads(line)
                passages = [
                    Passage(name, identity, start, end, text[start:end], tuple(path), *others)
                    for name, start, end, path, *others in spans
                ]
                yield (
                    Document(
                        identity, title, text, source, {"licence": licence} if licence else {}
                    ),
                    passages,
                )

    def _open(self, mode: str) -> IO[str]:
        try:  # surrogatepass: a file's name may be no UTF-8
            return self._path.open(mode, encoding="utf-8", errors="surrogatepass", newline="\n")
        except OSError as error:
            raise unwritable(self._path, error, "opened") from error

    def __enter__(self) -> PassageFile:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # a full disk was reported by `add`
            self._file.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
