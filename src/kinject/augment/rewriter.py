"""Requests the variants of a plan, reads and checks the answers, and stores them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kinject.augment.answers import LISTS, says_none, says_yes
from kinject.augment.checks.additions import find_missing, source_facts
from kinject.augment.checks.checker import REFUSAL, Checker, Verdict, check_completion
from kinject.augment.checks.judge import Judge
from kinject.augment.coverage import coverage_of, top_up_group, top_up_requests
from kinject.augment.groups import Group, document_groups, pair_groups, passage_groups
from kinject.augment.passage_file import PassageFile, PlannedDocument, passages_of
from kinject.augment.plan import Plan
from kinject.augment.store import Store
from kinject.augment.styles import Item, Preparation
from kinject.augment.variant_requests import (
    MOST_AT_ONCE,
    VariantRequest,
    new_items,
    notes_id,
    request_blocks,
    sample_seed,
    statements_id,
    stored_items,
    unprepared_requests,
)
from kinject.disk import content_id
from kinject.errors import EndpointError, InputError
from kinject.llm.prompt_injection import escape_tags, has_injection
from kinject.llm.sender import Sender, gather_answers, run_workers
from kinject.terminal import Progress
from kinject.types import Completion, Document, Passage, Variant

Reply = TypeVar("Reply")
UNPREPARED = "the preparation of the style got no usable answer"
"""The error of requests that need a preparation, before the reason for which its answers were
refused."""

_INCONSISTENT = Verdict(
    "inconsistent", "asked whether it follows from the passage, the model does not say yes"
)
_UNCONFIRMED = "the answer to the question whether the text follows from the passage"
_INJECTED = Verdict(
    "injection",
    "the passage has prompt injection, so that the model's own yes to this text proves nothing",
)


@dataclass
class _Answer:
    """An answer to one request, or the error that was received instead.

    `texts` are those of its texts that passed the checks so far, each with its verdict. `verdict`
    is the first refusal of an answer without one. `repairs` are what was taken off, `refused` the
    reasons for which other texts of it were refused.
    """

    request: VariantRequest
    completion: Completion
    texts: list[tuple[str, Verdict]] = field(default_factory=list)
    verdict: Verdict = field(default_factory=Verdict)
    error: EndpointError | None = None
    repairs: tuple[str, ...] = ()
    refused: list[str] = field(default_factory=list)
    nothing: bool = False

    @property
    def accepted(self) -> bool:
        """Whether a text of the answer passed the checks so far, or it is an accepted NONE."""
        return self.error is None and (bool(self.texts) or self.nothing)

    def refuse(self, text: str, verdict: Verdict) -> None:
        """Refuse one of its texts."""
        # By identity: of two equal texts in one answer one may be kept.
        self.texts = [pair for pair in self.texts if pair[0] is not text]
        self.refused.append(verdict.reason)
        if self.verdict.accepted:
            self.verdict = verdict

    def to_variant(self, group: Group, attempt: int, generator: str) -> Variant:
        """Return the variant to store, without text for NONE; `attempt` answers were refused before
        it."""
        texts = [text for text, _ in self.texts]
        return Variant(
            id=self.request.id,
            passage_id=group.passage.id,
            document_id=group.passage.document_id,
            style=group.style.name,
            sample=self.request.sample,
            text="".join(texts[:1]),
            generator=generator,
            prompt_hash=self.request.prompt_hash,
            usage=self.completion.usage,
            checks=self._measures(),
            attempt=attempt,
            more=tuple(texts[1:]),
        )

    def _measures(self) -> dict[str, Any]:
        """Return the measures of the first text, and the facts of each text."""
        measures = dict[str, Any]()
        if self.texts:
            measures.update(self.texts[0][1].measures)
        facts = [verdict.measures["facts"] for _, verdict in self.texts]
        extra = {"facts": facts, "repairs": list(self.repairs), "refused": self.refused}
        return measures | {name: value for name, value in extra.items() if value}


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a preparation has no usable answer: a reason of `REASONS`, or the endpoint's error."""

    reason: str


def _read_items(step: Preparation, completion: Completion) -> tuple[str, ...] | _Refusal:
    """Return the items in an answer to a preparation, () for NONE."""
    verdict = check_completion(completion)
    if not verdict.accepted:
        return _Refusal(verdict.reason)
    if REFUSAL.match(completion.text):
        return _Refusal("refusal")
    if says_none(completion.text):
        return ()
    return tuple(LISTS[step.parser](completion.text)) or _Refusal("empty")


def _accepted_texts(answers: Iterable[_Answer]) -> list[tuple[_Answer, str]]:
    """Return each text that passed the checks so far, with its answer."""
    pairs = []
    for answer in answers:
        if answer.error is None:
            pairs += [(answer, text) for text, _ in answer.texts]
    return pairs


@dataclass
class Rewriter:
    """Fills a store with the variants of a plan. `failed` maps ids of requests without an answer to
    the last error."""

    plan: Plan
    sender: Sender
    store: Store
    progress: Progress
    max_attempts: int
    failed: dict[str, str] = field(default_factory=dict)
    judge: Judge | None = None
    n_refused: int = 0

    async def run(self, documents: PassageFile, concurrency: int) -> None:
        """Request every missing variant, several groups at a time.

        Raises the first fatal `EndpointError`, `InputError` or `DiskError` after the requests in
        flight have ended, and `KeyboardInterrupt` the same way; a second Ctrl-C does not wait for
        them.
        """
        n_variants = sum(min(n, MOST_AT_ONCE) for n in self.plan.styles.values())  # of a passage
        # Some spare groups, so that a group waiting for its last sample leaves no connection idle.
        n_workers = max(1, min(concurrency, 2 * concurrency // max(1, n_variants) + 2))
        await run_workers(self._groups(documents), self._fill, self.sender, n_workers)

    def _groups(self, documents: PassageFile) -> Iterator[Group]:
        for document, passages in documents:
            yield from document_groups(self.plan, document, passages)
        yield from pair_groups(self.plan, documents.with_others)

    async def _fill(self, group: Group) -> None:
        """Request the missing variants of one group in blocks. A block is judged in sample order,
        not arrival order."""
        if group.skipped or not group.n_samples:
            return
        items = await self._request_preparations(group)
        if isinstance(items, _Refusal):
            self._fail(unprepared_requests(group), f"{UNPREPARED}: {items.reason}")
            return
        checker: Checker | None = None
        unseen: list[str] = []  # stored texts that the checker does not know yet
        n_requests = n_announced = 0
        if group.target is None:
            n_announced = group.n_samples
        for requests in request_blocks(self.plan, group, items, self.store.variants):
            n_requests += len(requests)
            # How many items a preparation names was not known when the requests were announced.
            self.progress.total += max(0, min(len(requests), n_requests - n_announced))
            stored = self.store.variants(requests)
            self._advance(len(stored), earlier=True)
            for variant in stored.values():
                unseen += variant.texts
            missing = [request for request in requests if request.id not in stored]
            if not missing:
                continue
            # Made where something is missing: a checker reads the whole passage, and with one for
            # each group a rerun of 2,000 passages took 7.8 s instead of 2.2.
            checker = checker or group.checker()
            for text in unseen:
                checker.accept(text)
            unseen.clear()
            for attempt in range(self._n_attempts(group)):
                if missing:
                    missing = await self._attempt(group, missing, attempt, checker)
            # What is still missing was given up: the progress line ends all the same.
            self._advance(len(missing))
        self.progress.total -= max(0, n_announced - n_requests)

    async def top_up(
        self, documents: Iterable[PlannedDocument], concurrency: int, quota: int
    ) -> None:
        """Ask for texts of the facts that fewer than `quota` texts of their passage carry. Raises
        as `run`."""

        async def ask(pair: tuple[Document, Passage]) -> None:
            await self._top_up(*pair, quota)

        await run_workers(passages_of(documents), ask, self.sender, concurrency)

    async def _top_up(self, document: Document, passage: Passage, quota: int) -> None:
        groups = list(passage_groups(self.plan, document, passage))
        group = top_up_group(groups)
        if group is None:
            return
        statements = self.store.notes(statements_id(self.plan, passage)) or ()
        coverage, checker = coverage_of(passage, statements), group.checker()

        def add_texts(variant: Variant, facts_by_text: Sequence[Sequence[str] | None]) -> None:
            for text, facts in zip(variant.texts, facts_by_text, strict=True):
                coverage.add(text, facts)
                checker.accept(text)

        for variant in self._stored(groups):
            add_texts(variant, variant.checks["facts"])
        for request in top_up_requests(self.plan, group, coverage, quota):
            self.progress.total += 1
            if not self.store.variants([request]):
                # One attempt: the request after it names the facts that are then still short.
                self._advance(len(await self._attempt(group, [request], 0, checker)))
            for variant in self.store.variants([request]).values():
                add_texts(variant, variant.checks.get("facts", ()))

    def _stored(self, groups: Iterable[Group]) -> Iterator[Variant]:
        """Yield the stored variants with a text of the groups of one passage."""
        for group in groups:
            items = stored_items(self.plan, group, self.store.notes) or []
            for requests in request_blocks(self.plan, group, items, self.store.variants):
                variants = self.store.variants(requests).values()
                yield from (variant for variant in variants if variant.text)

    async def _request_preparations(self, group: Group) -> list[Item] | _Refusal:
        """Return the items of the group's prompts, stored ones first."""
        items: list[Item] = [group.item]
        for step in group.style.prepare:
            answers = await _gather(group, (self._items_of(group, step, item) for item in items))
            read: list[tuple[str, ...]] = []
            for answer in answers:
                if isinstance(answer, EndpointError):
                    return _Refusal(str(answer))
                if isinstance(answer, _Refusal):
                    return answer
                read.append(answer)
            items = new_items(group, step, items, read)
        return items

    async def _items_of(
        self, group: Group, step: Preparation, item: Item
    ) -> tuple[str, ...] | _Refusal:
        """Return the items that one preparation makes of `item`, stored or requested; () if the
        model answers NONE."""
        name = notes_id(self.plan, group, step, item)
        items: tuple[str, ...] | _Refusal | None = self.store.notes(name)
        if items is not None:
            return items
        items = await self._request_items(group, step, item)
        if isinstance(items, _Refusal):
            if step.for_each is None:
                return items
            items = ()  # it is one item of many: the others are enough
        self.store.add_notes(name, group, group.style.name, step.name, items)
        return items

    async def _request_items(
        self, group: Group, step: Preparation, item: Item
    ) -> tuple[str, ...] | _Refusal:
        """Return the items in the first usable answer to a preparation, else the last refusal."""
        messages = group.style.preparation(step, group.source, item)
        items: tuple[str, ...] | _Refusal = _Refusal("")
        for attempt in range(self._n_attempts(group)):
            seed = sample_seed(self.plan, content_id(messages), 0, attempt)
            items = _read_items(step, await self.sender.send(messages, seed))
            if not isinstance(items, _Refusal):
                break
        return items

    def _n_attempts(self, group: Group) -> int:
        """Return the attempts at one request: one where another would bring the same text, from a
        file or at temperature 0."""
        is_same = group.texts is not None or self.plan.identity.get("temperature") == 0
        if is_same and not group.style.mechanical:
            return 1
        return self.max_attempts

    async def _attempt(
        self, group: Group, block: list[VariantRequest], attempt: int, checker: Checker
    ) -> list[VariantRequest]:
        """Send a block once and store the answers; return the requests that are still open."""
        completions = await self._complete(group, block, attempt)
        # Lazy: an answer is read after the one before it was accepted, so that copies are found.
        answers: Iterable[_Answer] = (
            self._read_answer(group, request, completion, checker)
            for request, completion in zip(block, completions, strict=True)
        )
        if group.style.verify or (self.judge is not None and not group.style.mechanical):
            # Models are asked about all texts of the block at once. `_accept_texts` finds copies.
            answers = list(answers)
            await self._ask_models(group, answers)
        generator = self.sender.generator.name
        if group.style.mechanical:
            generator = "mechanical"
        still_open = []
        for answer in answers:
            request = answer.request
            if answer.error is not None:
                self._fail([request], str(answer.error))
                continue
            self._accept_texts(answer, checker)
            if answer.accepted:
                self.store.accept(answer.to_variant(group, attempt, generator))
                self._advance(1)
            else:
                self.store.refuse(group, request, attempt, answer.completion, answer.verdict)
                self.n_refused += 1
                still_open.append(request)
        return still_open

    def _accept_texts(self, answer: _Answer, checker: Checker) -> None:
        """Add the texts of an answer to those that later ones must differ from; refuse copies of
        earlier ones."""
        # Checked again where models were asked: then the block was read before any of it was
        # accepted.
        for text, _ in list(answer.texts):
            duplicate = checker.duplicate(text)
            if duplicate:
                answer.refuse(text, Verdict("duplicate", duplicate))
            else:
                checker.accept(text)

    async def _complete(
        self, group: Group, block: list[VariantRequest], attempt: int
    ) -> list[Completion | EndpointError]:
        """Return the completions of a block, in order."""
        if group.texts is not None:
            return [Completion(group.texts[request.sample]) for request in block]
        seeds = [
            sample_seed(self.plan, request.prompt_hash, request.turn, attempt) for request in block
        ]
        rewrite = group.style.mechanical
        if rewrite:
            title, text = group.document.title, group.passage.text
            return [Completion(rewrite(title, text, seed)) for seed in seeds]
        prompts = [list(request.messages) for request in block]
        return await _gather(group, map(self.sender.send, prompts, seeds))

    def _read_answer(
        self,
        group: Group,
        request: VariantRequest,
        completion: Completion | EndpointError,
        checker: Checker,
    ) -> _Answer:
        """Parse and check one completion. The text of an accepted NONE is empty."""
        if isinstance(completion, EndpointError):
            return _Answer(request, Completion(""), error=completion)
        verdict = check_completion(completion)
        if not verdict.accepted:
            return _Answer(request, completion, verdict=verdict)
        if group.style.none and says_none(completion.text):
            return _Answer(request, completion, nothing=True)
        repaired = group.style.read(completion.text, group.document.title, group.passage.shown)
        answer = _Answer(request, completion, repairs=repaired.repairs)
        for text in repaired.texts or ("",):
            n_added = 0
            if not group.style.mechanical:
                text, n_added = checker.without_additions(text)
            verdict = checker.check(text)
            if verdict.accepted and group.style.keeps:
                verdict = _check_item(request.item[group.style.keeps], text) or verdict
            if verdict.accepted:
                answer.texts.append((text, verdict))
                answer.repairs += ("item",) * n_added
            else:
                answer.refuse(text, verdict)
        return answer

    async def _ask_models(self, group: Group, answers: Sequence[_Answer]) -> None:
        """Ask about each accepted text: the generator whether it follows from the passage, then the
        judge."""
        if group.style.verify:
            await self._verify(group, answers)
        if self.judge is None or group.style.mechanical:
            return
        # After the generator's own answer: a text that it does not confirm costs no request to the
        # judge.
        await self._judge_texts(self.judge, group, answers)
        if group.style.scope == "passage":
            await self._count_statements(self.judge, group, answers)

    async def _verify(self, group: Group, answers: Sequence[_Answer]) -> None:
        """Refuse each text of which the generator does not confirm that it follows from the
        passage."""
        pairs = _accepted_texts(answers)
        prompts = [
            group.style.verification(group.source, answer.request.item, escape_tags(text))
            for answer, text in pairs
        ]
        seeds = [sample_seed(self.plan, content_id(prompt), 0, 0) for prompt in prompts]
        replies = await _gather(group, map(self.sender.send, prompts, seeds))
        injected = has_injection(group.document.title, group.passage.shown)
        for (answer, text), reply in zip(pairs, replies, strict=True):
            # The passage may order the model to say yes, so that its answer is worth nothing.
            if injected:
                answer.refuse(text, _INJECTED)
            elif isinstance(reply, EndpointError):
                answer.error = reply
            elif not says_yes(reply.text):
                unread = check_completion(reply)
                if unread.accepted:
                    answer.refuse(text, _INCONSISTENT)
                else:
                    answer.refuse(text, replace(unread, detail=_UNCONFIRMED))

    async def _judge_texts(self, judge: Judge, group: Group, answers: Sequence[_Answer]) -> None:
        """Refuse each text in which the judge finds a fault."""
        title, passage, rules = group.document.title, group.passage.shown, group.style.rules
        pairs = _accepted_texts(answers)
        asked = (judge.verdict(title, passage, text, rules) for _, text in pairs)
        for (answer, text), verdict in zip(pairs, await _gather(group, asked), strict=True):
            if isinstance(verdict, EndpointError):
                answer.error = verdict
            elif not verdict.accepted:
                answer.refuse(text, verdict)

    async def _count_statements(
        self, judge: Judge, group: Group, answers: Sequence[_Answer]
    ) -> None:
        """Add the statements of the passage that the judge finds told to the facts of each accepted
        text."""
        statements = await self._statements(judge, group)
        if isinstance(statements, EndpointError):
            for answer in answers:
                answer.error = statements
            return
        if not statements:
            return
        pairs: list[tuple[_Answer, int]] = []
        for answer in answers:
            if answer.error is None:
                pairs += [(answer, index) for index in range(len(answer.texts))]
        asked = (judge.stated(statements, answer.texts[index][0]) for answer, index in pairs)
        for (answer, index), numbers in zip(pairs, await _gather(group, asked), strict=True):
            if isinstance(numbers, EndpointError):
                answer.error = numbers
                continue
            text, verdict = answer.texts[index]
            facts = [*verdict.measures["facts"], *(f"statement:{number}" for number in numbers)]
            measures = {**verdict.measures, "facts": facts}
            answer.texts[index] = (text, replace(verdict, measures=measures))

    async def _statements(self, judge: Judge, group: Group) -> tuple[str, ...] | EndpointError:
        """Return the statements that the judge lists of the passage, stored ones first."""
        name = statements_id(self.plan, group.passage)
        stored = self.store.notes(name)
        if stored is not None:
            return stored
        asked = judge.statements(group.document.title, group.passage.shown)
        (listed,) = await _gather(group, [asked])
        if isinstance(listed, EndpointError):
            return listed
        stored = self.store.notes(name)
        if stored is None:  # else another style of the passage has asked meanwhile
            self.store.add_notes(name, group, "", "statements", listed)
            stored = listed
        return stored

    def _advance(self, n: int = 1, *, earlier: bool = False) -> None:
        """Count `n` more variants as done: stored (by an `earlier` run), or given up."""
        notes = []
        if self.n_refused:
            notes.append(f"{self.n_refused:,} refused")
        notes.append(self.sender.status())
        self.progress.set_status(", ".join(filter(None, notes)))
        self.progress.advance(n, earlier=earlier)

    def _fail(self, requests: list[VariantRequest], error: str) -> None:
        self.failed.update((request.id, error) for request in requests)
        self._advance(len(requests))


def _check_item(item: str | tuple[str, ...], text: str) -> Verdict | None:
    """Return the refusal of a text that lost a fact of its item, None if it has all."""
    missing = find_missing(source_facts(str(item)), text)
    if missing is None:
        return None
    return Verdict(missing.reason, missing.detail)


async def _gather(
    group: Group, requests: Iterable[Awaitable[Reply]]
) -> list[Reply | EndpointError]:
    """Return `gather_answers`, with the document's source in an `InputError`."""
    try:
        return await gather_answers(requests)
    except InputError as error:
        raise InputError(f"{group.document.source}: {error}") from error
