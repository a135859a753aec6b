"""Requests the variants of a plan, reads and checks the answers, and stores them."""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeVar

from kinject.augment.answers import LISTS, says_none, says_yes
from kinject.augment.checks.additions import find_missing, source_facts
from kinject.augment.checks.checker import REFUSAL, Checker, Verdict, check_completion
from kinject.augment.checks.judge import Judge
from kinject.augment.plan import (
    Group,
    Plan,
    PlannedDocument,
    VariantRequest,
    coverage_of,
    new_items,
    requests_for,
    top_up_group,
)
from kinject.augment.store import Store
from kinject.augment.styles import Item, Preparation
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
        self.texts = [pair for pair in self.texts if pair[0] is not text]
        self.refused.append(verdict.reason)
        if self.verdict.accepted:
            self.verdict = verdict

    def measures(self) -> dict[str, Any]:
        """Return what a stored variant says of its checks: measures of its first text, and the
        facts of each text."""
        measures = dict(self.texts[0][1].measures) if self.texts else {}
        facts = [verdict.measures["facts"] for _, verdict in self.texts]
        extra = {"facts": facts, "repairs": list(self.repairs), "refused": self.refused}
        return measures | {name: value for name, value in extra.items() if value}


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

    async def run(self, documents: Iterable[PlannedDocument], concurrency: int) -> None:
        """Request every missing variant, several groups at a time.

        Raises the first fatal `EndpointError`, `InputError` or `DiskError` after the requests in
        flight have ended, and `KeyboardInterrupt` the same way; a second Ctrl-C does not wait for
        them.
        """
        of_documents = (
            group
            for document, passages in documents
            for group in self.plan.groups(document, passages)
        )
        groups = chain(of_documents, self.plan.pair_groups(documents))
        # Some spare groups, so that a group waiting for its last sample leaves no connection idle.
        n_workers = max(1, min(concurrency, 2 * concurrency // max(1, self.plan.n_samples) + 2))
        await run_workers(groups, self._fill, self.sender, n_workers)

    async def _fill(self, group: Group) -> None:
        """Request the missing variants of one group in blocks. A block is judged in sample order,
        not arrival order."""
        if group.skipped or not group.n_samples:
            return
        items = await self._request_preparations(group)
        if isinstance(items, str):
            self._fail(self.plan.unprepared(group), f"{UNPREPARED}: {items}")
            return
        checker: Checker | None = (
            None  # it reads the whole passage, which a finished group does not need
        )
        texts: list[str] = []
        n_requests, n_announced = 0, 0 if group.target else group.n_samples
        for requests in self.plan.blocks(group, items, self.store.variants):
            n_requests += len(requests)
            self.progress.total += max(
                0, min(len(requests), n_requests - n_announced)
            )  # those of several items
            stored = self.store.variants(requests)
            self._advance(len(stored), earlier=True)
            for variant in stored.values():
                texts += variant.texts
            block = [request for request in requests if request.id not in stored]
            if block:
                checker = checker or group.checker()
                while texts:
                    checker.accept(texts.pop(0))
            for attempt in range(self._n_attempts(group)):
                if block and checker:
                    block = await self._attempt(group, block, attempt, checker)
            self._advance(len(block))
        self.progress.total -= max(0, n_announced - n_requests)

    async def top_up(
        self, documents: Iterable[PlannedDocument], concurrency: int, quota: int
    ) -> None:
        """Ask for texts of the facts that fewer than `quota` texts of their passage carry. Raises
        as `run`."""
        passages = ((document, passage) for document, split in documents for passage in split)

        async def ask(pair: tuple[Document, Passage]) -> None:
            await self._top_up(*pair, quota)

        await run_workers(passages, ask, self.sender, concurrency)

    async def _top_up(self, document: Document, passage: Passage, quota: int) -> None:
        groups = list(self.plan.groups_of(document, passage))
        group = top_up_group(groups)
        if group is None:
            return
        statements = self.store.notes(self.plan.statements_id(passage)) or ()
        coverage, checker = coverage_of(passage, statements), group.checker()
        for variant in self._stored(groups):
            for text, facts in zip(variant.texts, variant.checks["facts"], strict=True):
                coverage.add(text, facts)
                checker.accept(text)
        for request in requests_for(self.plan, group, coverage, quota):
            self.progress.total += 1
            if not self.store.variants([request]):  # asked once: the next request is another one
                self._advance(len(await self._attempt(group, [request], 0, checker)))
            for variant in self.store.variants([request]).values():
                for text, facts in zip(variant.texts, variant.checks.get("facts", ()), strict=True):
                    coverage.add(text, facts)
                    checker.accept(text)

    def _stored(self, groups: Iterable[Group]) -> Iterator[Variant]:
        """Yield the stored variants with a text of the groups of one passage."""
        for group in groups:
            items = self.plan.items(group, self.store.notes)
            for requests in self.plan.blocks(group, items or [], self.store.variants):
                yield from (
                    variant for variant in self.store.variants(requests).values() if variant.text
                )

    async def _request_preparations(self, group: Group) -> list[Item] | str:
        """Return the items of the group's prompts, stored ones first; without a usable answer, the
        reason."""
        items: list[Item] = [group.item]
        for step in group.style.prepare:
            answers = await _gather(group, (self._ask_items(group, step, item) for item in items))
            read = [answer for answer in answers if isinstance(answer, tuple)]
            if len(read) < len(answers):
                return str(next(answer for answer in answers if not isinstance(answer, tuple)))
            items = new_items(group, step, items, read)
        return items

    async def _ask_items(
        self, group: Group, step: Preparation, item: Item
    ) -> tuple[str, ...] | str:
        """Return the items in the answer to one preparation, () if the model answers NONE.

        Without a usable answer to the first preparation, return the reason for which the last one
        was refused.
        """
        notes_id = self.plan.notes_id(group, step, item)
        stored = self.store.notes(notes_id)
        if stored is not None:
            return stored
        notes: tuple[str, ...] = ()
        messages = group.style.preparation(step, group.source, item)
        reason = ""
        for attempt in range(self._n_attempts(group)):
            seed = self.plan.sample_seed(content_id(messages), 0, attempt)
            completion = await self.sender.send(messages, seed)
            reason = check_completion(completion).reason or (
                "refusal" if REFUSAL.match(completion.text) else "empty"
            )
            if reason == "empty":
                nothing = says_none(completion.text)
                notes = () if nothing else tuple(LISTS[step.parser](completion.text))
                if notes or nothing:
                    break
        else:
            if step.for_each is None:
                return reason  # else it is one item of many: the others are enough
        self.store.add_notes(notes_id, group, group.style.name, step.name, notes)
        return notes

    def _n_attempts(self, group: Group) -> int:
        """Return the attempts at one request: one where another would bring the same text, from a
        file or at temperature 0."""
        is_same = group.texts is not None or self.plan.identity.get("temperature") == 0
        return 1 if is_same and not group.style.mechanical else self.max_attempts

    async def _attempt(
        self, group: Group, block: list[VariantRequest], attempt: int, checker: Checker
    ) -> list[VariantRequest]:
        """Send a block once and store the answers; return the requests that are still open."""
        completions = await self._complete(group, block, attempt)
        read = (
            self._read_answer(group, request, completion, checker)
            for request, completion in zip(block, completions, strict=True)
        )
        answers: Iterable[_Answer] = read
        if group.style.verify or (self.judge is not None and not group.style.mechanical):
            answers = list(read)
            await self._ask_models(group, answers)
        still_open = []
        for answer in (
            answers
        ):  # each is read after the one before it was accepted, unless models were asked about all
            if answer.error is not None:
                self._fail([answer.request], str(answer.error))
                continue
            self._accept_texts(answer, checker)
            if answer.accepted:
                name = self.sender.generator.name
                generator = "mechanical" if group.style.mechanical else name
                texts = [text for text, _ in answer.texts]
                self.store.accept(
                    group,
                    answer.request,
                    attempt,
                    answer.completion,
                    generator,
                    texts,
                    answer.measures(),
                )
                self._advance(1)
            else:
                self.store.refuse(group, answer.request, attempt, answer.completion, answer.verdict)
                self.n_refused += 1
                still_open.append(answer.request)
        return still_open

    def _accept_texts(self, answer: _Answer, checker: Checker) -> None:
        """Add the texts of an answer to those that later ones must differ from; refuse copies of
        earlier ones."""
        for text, _ in list(answer.texts):
            if duplicate := checker.duplicate(text):
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
            self.plan.sample_seed(request.prompt_hash, request.turn, attempt) for request in block
        ]
        if group.style.mechanical:
            rewrite = group.style.mechanical
            return [
                Completion(rewrite(group.document.title, group.passage.text, seed))
                for seed in seeds
            ]
        pairs = zip(block, seeds, strict=True)
        return await _gather(
            group, (self.sender.send(list(request.messages), seed) for request, seed in pairs)
        )

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
                item = source_facts(str(request.item[group.style.keeps]))
                if missing := find_missing(item, text):
                    verdict = Verdict(missing.reason, missing.detail)
            if verdict.accepted:
                answer.texts.append((text, verdict))
                answer.repairs += ("item",) * n_added
            else:
                answer.refuse(text, verdict)
        return answer

    async def _ask_models(self, group: Group, answers: Sequence[_Answer]) -> None:
        """Ask about each accepted text: the generator whether it follows from the passage, then the
        judge."""
        title, passage = group.document.title, group.passage.shown
        if group.style.verify:
            pairs = [
                (answer, text)
                for answer in answers
                if answer.error is None
                for text, _ in answer.texts
            ]
            prompts = [
                group.style.verification(group.source, answer.request.item, escape_tags(text))
                for answer, text in pairs
            ]
            seeds = [self.plan.sample_seed(content_id(prompt), 0, 0) for prompt in prompts]
            replies = await _gather(group, map(self.sender.send, prompts, seeds))
            injected = has_injection(title, passage)
            for (answer, text), reply in zip(pairs, replies, strict=True):
                if injected:
                    answer.refuse(text, _INJECTED)
                elif isinstance(reply, EndpointError):
                    answer.error = reply
                elif not says_yes(reply.text):
                    unread = check_completion(reply)
                    answer.refuse(
                        text,
                        _INCONSISTENT if unread.accepted else replace(unread, detail=_UNCONFIRMED),
                    )
        if self.judge is None or group.style.mechanical:
            return
        pairs = [
            (answer, text) for answer in answers if answer.error is None for text, _ in answer.texts
        ]
        judge, rules = self.judge, group.style.rules
        verdicts = await _gather(
            group, (judge.verdict(title, passage, text, rules) for _, text in pairs)
        )
        for (answer, text), verdict in zip(pairs, verdicts, strict=True):
            if isinstance(verdict, EndpointError):
                answer.error = verdict
            elif not verdict.accepted:
                answer.refuse(text, verdict)
        if group.style.scope == "passage":
            await self._count_statements(judge, group, answers)

    async def _count_statements(
        self, judge: Judge, group: Group, answers: Sequence[_Answer]
    ) -> None:
        """Add the statements of the passage that the judge finds told to the facts of each accepted
        text."""
        notes_id = self.plan.statements_id(group.passage)
        if self.store.notes(notes_id) is None:
            (listed,) = await _gather(
                group, [judge.statements(group.document.title, group.passage.shown)]
            )
            if isinstance(listed, EndpointError):
                for answer in answers:
                    answer.error = listed
                return
            if self.store.notes(notes_id) is None:  # another style may have asked meanwhile
                self.store.add_notes(notes_id, group, "", "statements", listed)
        statements = self.store.notes(notes_id) or ()
        pairs = [
            (answer, pair)
            for answer in answers
            if answer.error is None
            for pair in answer.texts
            if statements
        ]
        stated = await _gather(group, (judge.stated(statements, text) for _, (text, _) in pairs))
        for (answer, (text, verdict)), numbers in zip(pairs, stated, strict=True):
            if isinstance(numbers, EndpointError):
                answer.error = numbers
                continue
            facts = [*verdict.measures["facts"], *(f"statement:{number}" for number in numbers)]
            index = answer.texts.index((text, verdict))
            answer.texts[index] = (
                text,
                replace(verdict, measures={**verdict.measures, "facts": facts}),
            )

    def _advance(self, n: int = 1, *, earlier: bool = False) -> None:
        """Count `n` more variants as done: stored (by an `earlier` run), or given up."""
        refused = f"{self.n_refused:,} refused" if self.n_refused else ""
        self.progress.set_status(", ".join(filter(None, (refused, self.sender.status()))))
        self.progress.advance(n, earlier=earlier)

    def _fail(self, requests: list[VariantRequest], error: str) -> None:
        self.failed.update((request.id, error) for request in requests)
        self._advance(len(requests))


async def _gather(
    group: Group, requests: Iterable[Awaitable[Reply]]
) -> list[Reply | EndpointError]:
    """Return `gather_answers`, with the document's source in an `InputError`."""
    try:
        return await gather_answers(requests)
    except InputError as error:
        raise InputError(f"{group.document.source}: {error}") from error
