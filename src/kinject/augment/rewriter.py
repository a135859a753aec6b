"""Requests the variants of a plan, checks and stores them. The result does not depend on order or timing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kinject.augment.checks.checker import Checker, Verdict, check_completion
from kinject.augment.checks.facts import compare_facts
from kinject.augment.checks.judge import Judge
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.plan import Group, Plan, PlannedDocument, VariantRequest
from kinject.augment.prompts import ask
from kinject.augment.requests.sender import Sender, gather_answers, run_workers
from kinject.augment.store import Store
from kinject.augment.styles import notes_of, says_yes
from kinject.disk import content_id
from kinject.errors import EndpointError, InputError
from kinject.terminal import Progress
from kinject.types import Completion

Reply = TypeVar("Reply")

_INCONSISTENT = Verdict("inconsistent", "asked whether it follows from the passage, the model does not say yes")
_INJECTED = Verdict("injection", "the passage gives orders, so that the model's own yes to this text proves nothing")
_BLOCK = 64
"""Requests of one group that are sent at once."""


@dataclass
class _Answer:
    """An answer to one request: its text and verdict, or the error that was received instead."""

    request: VariantRequest
    completion: Completion
    text: str = ""
    verdict: Verdict = field(default_factory=Verdict)
    error: EndpointError | None = None

    @property
    def accepted(self) -> bool:
        """Whether the answer passed the checks so far."""
        return self.error is None and self.verdict.accepted


@dataclass
class Rewriter:
    """Fills a store with the variants of a plan. `failed` maps ids of requests without an answer to the last error."""

    plan: Plan
    sender: Sender
    store: Store
    progress: AugmentProgress
    max_attempts: int
    failed: dict[str, str] = field(default_factory=dict)
    judge: Judge | None = None

    async def run(self, documents: Iterable[PlannedDocument], concurrency: int) -> None:
        """Request every missing variant, several groups at a time.

        Raises the first fatal `EndpointError`, `InputError` or `DiskError` after the requests in flight have ended,
        and `KeyboardInterrupt` the same way; a second Ctrl-C does not wait for them.
        """
        groups = (group for document, passages in documents for group in self.plan.groups(document, passages))
        # Some spare groups, so that a group waiting for its last sample leaves no connection idle.
        n_workers = max(1, min(concurrency, 2 * concurrency // max(1, self.plan.n_samples) + 2))
        await run_workers(groups, self._fill, self.sender, n_workers)

    async def _fill(self, group: Group) -> None:
        """Request the missing variants of one group in blocks. A block is judged in sample order, not arrival order."""
        style = group.style
        notes = await self._prepare(group) if style.per_note and group.n_samples else ()
        requests = self.plan.requests(group, notes)
        self.progress.total += len(requests) - group.n_samples
        stored = self.store.variants(requests)
        self.progress.count_stored(len(stored))
        missing = [request for request in requests if request.id not in stored]
        if not missing:
            return
        if style.prepare and not style.per_note:
            notes = await self._prepare(group)
        if notes is None:
            self._fail(missing, "the preparation of the style got no usable answer")
            return
        checker = Checker(group.passage.text, group.style.rules)
        for variant in stored.values():
            checker.accept(variant.text)
        for start in range(0, len(missing), _BLOCK):
            block = missing[start : start + _BLOCK]
            for attempt in range(self.max_attempts if group.texts is None else 1):
                if block:
                    block = await self._attempt(group, block, attempt, checker, notes)
            self.progress.advance(len(block))

    async def _prepare(self, group: Group) -> tuple[str, ...] | None:
        """Return the notes of the group's style, from the store if they are there. None without a usable answer."""
        notes_id = self.plan.notes_id(group)
        stored = self.store.notes(notes_id)
        if stored:
            return stored
        messages = group.preparation()
        for attempt in range(self.max_attempts):
            seed = self.plan.sample_seed(content_id(messages), 0, attempt)
            (answer,) = await _gather(group, [self.sender.send(messages, seed)])
            if isinstance(answer, Completion) and check_completion(answer).accepted:
                notes = notes_of(answer.text)
                if notes:
                    self.store.add_notes(notes_id, group, notes)
                    return notes
        return None

    async def _attempt(
        self, group: Group, block: list[VariantRequest], attempt: int, checker: Checker, notes: tuple[str, ...]
    ) -> list[VariantRequest]:
        """Send a block once and store the answers; return the requests that are still open."""
        completions = await self._complete(group, block, attempt, notes)
        read = (
            self._read_answer(group, request, completion, checker, notes)
            for request, completion in zip(block, completions, strict=True)
        )
        answers: Iterable[_Answer] = read
        asks_models = bool(group.style.verify) or (self.judge is not None and not group.style.mechanical)
        if asks_models:
            answers = list(read)
            await self._ask_models(group, answers)
        still_open = []
        for answer in answers:  # each is read after the one before it was accepted, unless models were asked about all
            if answer.error is not None:
                self._fail([answer.request], str(answer.error))
                continue
            if asks_models and answer.accepted:
                answer.verdict = checker.compare_accepted(answer.text, answer.verdict)
            if answer.accepted:
                checker.accept(answer.text)
                generator = "mechanical" if group.style.mechanical else self.sender.generator.name
                self.store.accept(
                    group, answer.request, attempt, answer.completion, generator, answer.text, answer.verdict
                )
                self.progress.advance(1)
            else:
                self.store.refuse(group, answer.request, attempt, answer.completion, answer.verdict)
                self.progress.count_refused()
                still_open.append(answer.request)
        return still_open

    async def _complete(
        self, group: Group, block: list[VariantRequest], attempt: int, notes: tuple[str, ...]
    ) -> list[Completion | EndpointError]:
        """Return the completions of a block, in order."""
        if group.texts is not None:
            return [Completion(group.texts[request.sample]) for request in block]
        seeds = [self.plan.sample_seed(request.prompt_hash, request.sample, attempt) for request in block]
        if group.style.mechanical:
            rewrite = group.style.mechanical
            return [Completion(rewrite(group.document.title, group.passage.text, seed)) for seed in seeds]
        prompts = (group.messages(request.sample, notes) for request in block)
        return await _gather(group, map(self.sender.send, prompts, seeds))

    def _read_answer(
        self, group: Group, request: VariantRequest, completion: Completion | EndpointError, checker: Checker,
        notes: tuple[str, ...],
    ) -> _Answer:  # fmt: skip
        """Parse and check one completion."""
        if isinstance(completion, EndpointError):
            return _Answer(request, Completion(""), error=completion)
        verdict = check_completion(completion)
        if not verdict.accepted:
            return _Answer(request, completion, verdict=verdict)
        text = group.style.parse(completion.text)
        verdict = checker.check(text)
        if verdict.accepted and group.style.per_note:
            reason, detail = compare_facts(notes[request.sample % len(notes)], text)
            verdict = Verdict(reason, detail, verdict.measures)
        return _Answer(request, completion, text, verdict)

    async def _ask_models(self, group: Group, answers: Sequence[_Answer]) -> None:
        """Ask about each accepted answer: the generator whether it follows from the passage, then the judge."""
        title, passage = group.document.title, group.passage.text
        if group.style.verify:
            accepted = [answer for answer in answers if answer.accepted]
            prompts = [ask(title, passage, group.style.verify.format(text=answer.text)) for answer in accepted]
            seeds = [self.plan.sample_seed(content_id(prompt), 0, 0) for prompt in prompts]
            replies = await _gather(group, map(self.sender.send, prompts, seeds))
            injected = has_injection(title, passage)
            for answer, reply in zip(accepted, replies, strict=True):
                if injected:
                    answer.verdict = _INJECTED
                elif not (isinstance(reply, Completion) and says_yes(reply.text)):
                    answer.verdict = _INCONSISTENT
        if self.judge is None or group.style.mechanical:
            return
        accepted = [answer for answer in answers if answer.accepted]
        judge = self.judge
        verdicts = await _gather(group, (judge.verdict(title, passage, answer.text) for answer in accepted))
        for answer, verdict in zip(accepted, verdicts, strict=True):
            if isinstance(verdict, EndpointError):
                answer.error = verdict
            elif not verdict.accepted:
                answer.verdict = verdict

    def _fail(self, requests: list[VariantRequest], error: str) -> None:
        self.failed.update((request.id, error) for request in requests)
        self.progress.advance(len(requests))


async def _gather(group: Group, requests: Iterable[Awaitable[Reply]]) -> list[Reply | EndpointError]:
    """Return `gather_answers`, with the document's source in an `InputError`."""
    try:
        return await gather_answers(requests)
    except InputError as error:
        raise InputError(f"{group.document.source}: {error}") from error


class AugmentProgress(Progress):
    """Progress in variants: stored, refused, tokens and cost."""

    def __init__(self, total: int) -> None:
        super().__init__("augment", total, "rewritings")
        self._n_refused = 0
        self._status: Callable[[], str] = str

    def watch(self, status: Callable[[], str]) -> None:
        """Show what `status` returns (tokens, cost) beside the count."""
        self._status = status

    def count_stored(self, n: int) -> None:
        """Count `n` variants that an earlier run stored. They do not count towards the rate."""
        self._done_before += n
        self.advance(n)

    def count_refused(self) -> None:
        """Count one more refused answer."""
        self._n_refused += 1

    def advance(self, n: int = 1) -> None:
        """Count `n` more variants as done: stored, or given up."""
        refused = f"{self._n_refused:,} refused" if self._n_refused else ""
        self._status_text = ", ".join(words for words in (refused, self._status()) if words)
        super().advance(n)
