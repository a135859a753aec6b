"""The groups of a run: all variants of one passage, document or pair of passages in one style."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from kinject.augment.answers import tag_source
from kinject.augment.checks.checker import Checker
from kinject.augment.passage_file import PlannedDocument
from kinject.augment.plan import Plan
from kinject.augment.prompts import Source, entities_of, source_of
from kinject.augment.styles import Item, Style
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import content_id
from kinject.errors import InputError
from kinject.terminal import format_count
from kinject.types import Document, Passage

LONGEST_DOCUMENT = 8192
"""Most tokens of a document that styles of whole documents see at once; a longer one counts as
several."""
_MOST_SHARING = 10
"""A name in more documents relates none of them in particular."""


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
        if self.style.mechanical:
            # A word of the function's own: among Chinese characters it would be a name.
            about = tag_source(about, "", 0)
        return Checker(self.passage.shown, self.style.rules, self.style.literals, about)


def document_groups(plan: Plan, document: Document, passages: list[Passage]) -> Iterator[Group]:
    """Yield the groups of one document: by passage and style, then those of styles that show whole
    documents.

    Raises `InputError` if a file provides variants of the whole document but it is split.
    """
    for passage in passages:
        yield from passage_groups(plan, document, passage, n_passages=len(passages))
    yield from whole_document_groups(plan, document)


def passage_groups(
    plan: Plan, document: Document, passage: Passage, n_passages: int = 1
) -> Iterator[Group]:
    """Yield the groups of one passage, by style. Raises as `document_groups`."""
    texts: tuple[str, ...] = ()
    if plan.precomputed is not None:
        texts = plan.precomputed.texts_of(document.id)
        if texts and n_passages > 1:
            raise InputError(
                f"{document.source}: document {document.id!r} is split into "
                f"{format_count(n_passages, 'passage')}, but {plan.precomputed.path} rewrites it "
                f"whole. Raise augment.passage_tokens (now {plan.passage_tokens})."
            )
    for style in plan.styles_of("passage"):
        if plan.precomputed is None or style.mechanical:
            yield _group(plan, document, passage, style)
        else:
            n_samples = min(plan.styles[style.name], len(texts))
            yield Group(document, passage, style, n_samples, texts)


def whole_document_groups(plan: Plan, document: Document) -> Iterator[Group]:
    """Yield the groups of the styles that show whole documents; a very long one counts as
    several."""
    styles = plan.styles_of("document")
    if not styles:
        return
    for part in split_passages(document, LONGEST_DOCUMENT, word_spans):
        for style in styles:
            yield _group(plan, document, part, style)


def pair_groups(plan: Plan, documents: Iterable[PlannedDocument]) -> Iterator[Group]:
    """Yield the groups of the styles for two passages of different documents that share a name;
    reads `documents`, those of all shards, twice."""
    styles = plan.styles_of("pair")
    if not styles:
        return
    for name, (document, first), (other, second) in _pairs(documents):
        text = f"{first.shown}\n\n{second.shown}"
        pair_id = content_id("pair", first.id, second.id, name)
        if not plan.shard.has(pair_id):
            continue
        passage = Passage(pair_id, document.id, 0, len(text), text)
        titles = " / ".join(filter(None, (document.title, other.title)))
        for style in styles:
            group = _group(plan, replace(document, title=titles), passage, style)
            yield replace(group, item={"entity": name})


def _group(plan: Plan, document: Document, passage: Passage, style: Style) -> Group:
    target = plan.targets.get(style.name)
    group = Group(document, passage, style, plan.styles[style.name], target=target)
    if not style.needs:
        return group
    return replace(group, skipped=style.missing_need(group.source))


_PassageOfDocument = tuple[Document, Passage]


def _pairs(
    documents: Iterable[PlannedDocument],
) -> Iterator[tuple[str, _PassageOfDocument, _PassageOfDocument]]:
    """Yield each name that a few documents share, with the first passages of two of them that have
    it."""
    n_documents = Counter[str]()
    for _, passages in documents:
        n_documents.update(set[str]().union(*(entities_of(passage.text) for passage in passages)))
    shared = {name for name, n in n_documents.items() if 1 < n <= _MOST_SHARING}
    found: dict[str, list[_PassageOfDocument]] = {}
    for document, passages in documents:
        for passage in passages:
            for name in shared.intersection(entities_of(passage.text)):
                known = found.setdefault(name, [])
                if len(known) < 2 and all(other.id != document.id for other, _ in known):
                    known.append((document, passage))
    # Sorted: `shared` is a set, whose order differs between processes.
    for name in sorted(found):
        yield name, found[name][0], found[name][1]
