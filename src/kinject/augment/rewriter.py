"""Fills the slots of a plan: asks, checks, stores, asks again; what comes out does not depend on order or timing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from kinject.augment.checks.checker import Checker, Verdict, check_completion
from kinject.augment.checks.facts import compare_facts
from kinject.augment.checks.judge import Judge
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.plan import Group, Plan, VariantRequest
from kinject.augment.prompts import ask
from kinject.augment.requests import Stopped
from kinject.augment.requests.sender import Sender, run_workers
from kinject.augment.store import Store
from kinject.augment.styles import notes_of, says_yes
from kinject.disk import content_id
from kinject.errors import EndpointError, InputError
from kinject.terminal import Progress
from kinject.types import Completion, Message

_INCONSISTENT = Verdict("inconsistent", "asked whether it follows from the passage, the model does not say yes")
_INJECTED = Verdict("injection", "prompt injection in the passage, and only the same model confirms this text")
_BLOCK = 64
"""Slots of one group asked for at once."""


@dataclass
class Rewriter:
    """One run of the engine. `failed` maps the id of a slot without an answer to the endpoint's last error."""

    plan: Plan
    sender: Sender
    store: Store
    progress: AugmentProgress
    max_attempts: int
    failed: dict[str, str] = field(default_factory=dict)
    judge: Judge | None = None

    async def run(self, concurrency: int) -> None:
        """Fill every slot, several groups at a time.

        Raises the first fatal `EndpointError`, `InputError` or `DiskError` after the requests in flight have ended,
        and `KeyboardInterrupt` the same way; a second Ctrl-C does not wait for them.
        """
        # Some more groups than fill the line, so that a group waiting for its last sample leaves no gap.
        n_workers = max(1, min(concurrency, 2 * concurrency // max(1, self.plan.n_samples) + 2))
        await run_workers(self.plan.groups(), self._fill, self.sender, n_workers)

    async def _fill(self, group: Group) -> None:
        """Fill the slots of one group, in blocks of which each is judged in the order of samples, not of arrival."""
        style = group.style
        notes = await self._prepare(group) if style.per_note and group.n_samples else ()
        slots = self.plan.slots(group, notes)
        self.progress.total += len(slots) - group.n_samples
        stored = self.store.accepted(slots)
        self.progress.find(len(stored))
        wanted = [slot for slot in slots if slot.id not in stored]
        if not wanted:
            return
        if style.prepare and not style.per_note:
            notes = await self._prepare(group)
        if notes is None:
            self._fail(wanted, "the preparation of the style got no usable answer")
            return
        checker = Checker(group.passage.text, group.style.rules)
        for slot in slots:
            if slot.id in stored:
                checker.accept(stored[slot.id]["text"])
        for start in range(0, len(wanted), _BLOCK):
            block = wanted[start : start + _BLOCK]
            for attempt in range(self.max_attempts if group.given is None else 1):
                if block:
                    block = await self._attempt(group, block, attempt, (checker, notes))
            self.progress.advance(len(block))

    async def _prepare(self, group: Group) -> tuple[str, ...] | None:
        """Return the notes of the group's style, stored ones where there are, None where none could be had."""
        identity = self.plan.notes_id(group)
        stored = self.store.notes(identity)
        if stored:
            return stored
        messages = group.preparation()
        for attempt in range(self.max_attempts):
            seed = self.plan.sample_seed(content_id(messages), 0, attempt)
            (answer,) = await self._send_all(group, [(messages, seed)])
            if isinstance(answer, Completion) and check_completion(answer).accepted:
                notes = notes_of(answer.text)
                if notes:
                    self.store.keep_notes(identity, group, notes)
                    return notes
        return None

    async def _attempt(
        self, group: Group, block: list[VariantRequest], attempt: int, known: tuple[Checker, tuple[str, ...]]
    ) -> list[VariantRequest]:
        """Ask once for each slot; store what holds, and return the slots still open."""
        checker, notes = known
        answers = await self._ask(group, block, attempt, notes)
        opinions = await self._opinions(group, answers, checker)
        still_open = []
        for slot, answer, opinion in zip(block, answers, opinions, strict=True):
            if isinstance(answer, EndpointError) or isinstance(opinion, EndpointError):
                self._fail([slot], str(answer if isinstance(answer, EndpointError) else opinion))
                continue
            text, verdict = judge(group, answer, checker)
            if verdict.accepted and group.style.per_note:
                reason, detail = compare_facts(notes[slot.sample % len(notes)], text)
                verdict = Verdict(reason, detail, verdict.measures)
            if verdict.accepted and not opinion.accepted:
                verdict = opinion
            if verdict.accepted:
                writer = "mechanical" if group.style.mechanical else self.sender.writer.name
                self.store.accept(group, slot, attempt, answer, writer, verdict)
                checker.accept(text)
                self.progress.advance(1)
            else:
                self.store.refuse(group, slot, attempt, answer, verdict)
                self.progress.refuse()
                still_open.append(slot)
        return still_open

    async def _ask(
        self, group: Group, block: list[VariantRequest], attempt: int, notes: tuple[str, ...]
    ) -> list[Completion | EndpointError]:
        """Return the answers for a block, in order."""
        if group.given is not None:
            return [Completion(group.given[slot.sample]) for slot in block]
        seeds = [self.plan.sample_seed(slot.prompt_hash, slot.sample, attempt) for slot in block]
        if group.style.mechanical:
            rewrite = group.style.mechanical
            return [Completion(rewrite(group.document.title, group.passage.text, seed)) for seed in seeds]
        asked = [(group.messages(slot.sample, notes), seed) for slot, seed in zip(block, seeds, strict=True)]
        return await self._send_all(group, asked)

    async def _opinions(
        self, group: Group, answers: list[Completion | EndpointError], checker: Checker
    ) -> list[Verdict | EndpointError]:
        """Return for each answer what models say to it that passes the checks so far: the writer asked again, the judge."""
        opinions: list[Verdict | EndpointError] = [Verdict()] * len(answers)
        if group.style.verify:
            confirmed = await self._verify(group, answers, checker)
            refused = _INJECTED if has_injection(group.document.title, group.passage.text) else _INCONSISTENT
            opinions = [Verdict() if yes and refused is _INCONSISTENT else refused for yes in confirmed]
        if self.judge is None or group.style.mechanical:
            return opinions
        reads = self.judge.verdict
        asked: dict[int, Coroutine[Any, Any, Verdict]] = {}
        for index, (answer, opinion) in enumerate(zip(answers, opinions, strict=True)):
            text, verdict = judge(group, answer, checker) if isinstance(answer, Completion) else ("", _INCONSISTENT)
            if verdict.accepted and isinstance(opinion, Verdict) and opinion.accepted:
                asked[index] = reads(group.document.title, group.passage.text, text)
        found = await asyncio.gather(*asked.values(), return_exceptions=True)
        _raise_what_ends(found, group)
        for index, one in zip(asked, found, strict=True):
            if isinstance(one, Verdict | EndpointError):
                opinions[index] = one
        return opinions

    async def _verify(self, group: Group, answers: list[Completion | EndpointError], checker: Checker) -> list[bool]:
        """Return for each answer whether the model, asked again, says that it follows from the passage."""
        asked = []
        for answer in answers:
            text, verdict = (
                judge(group, answer, checker) if isinstance(answer, Completion) else ("", Verdict("no answer"))
            )
            if verdict.accepted:
                task = group.style.verify.format(text=text)
                messages = ask(group.document.title, group.passage.text, task)
                asked.append((messages, self.plan.sample_seed(content_id(messages), 0, 0)))
            else:
                asked.append(([], 0))
        sent = iter(await self._send_all(group, [request for request in asked if request[0]]))
        replies = [next(sent) if request[0] else None for request in asked]
        return [isinstance(reply, Completion) and says_yes(reply.text) for reply in replies]

    async def _send_all(
        self, group: Group, requests: list[tuple[list[Message], int]]
    ) -> list[Completion | EndpointError]:
        """Return an answer or the error that only it met for each request, in order. Raises what ends the run."""
        sent = (self.sender.send(messages, seed) for messages, seed in requests)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        _raise_what_ends(answers, group)
        return [answer for answer in answers if isinstance(answer, Completion | EndpointError)]

    def _fail(self, slots: list[VariantRequest], error: str) -> None:
        self.failed.update((slot.id, error) for slot in slots)
        self.progress.advance(len(slots))


def judge(group: Group, completion: Completion, checker: Checker) -> tuple[str, Verdict]:
    """Return the text in `completion` and whether it may be kept as a rewriting of the group's passage."""
    verdict = check_completion(completion)
    if not verdict.accepted:
        return "", verdict
    text = group.style.parse(completion.text)
    return text, checker.check(text)


def _raise_what_ends(answers: Sequence[object], group: Group) -> None:
    """Raise what ends the run, before anything is judged: a gap would change which of two equal answers counts."""
    faults = [answer for answer in answers if isinstance(answer, BaseException) and not _is_passing(answer)]
    if faults:
        raise _placed(next((fault for fault in faults if not isinstance(fault, Stopped)), faults[0]), group)


def _is_passing(error: BaseException) -> bool:
    """Return whether only one request failed, not the run."""
    return isinstance(error, EndpointError) and not error.fatal


def _placed(error: BaseException, group: Group) -> BaseException:
    """Return `error`, with the document it is about where it is about one."""
    return InputError(f"{group.document.source}: {error}") if isinstance(error, InputError) else error


class AugmentProgress(Progress):
    """Progress in rewritings, of which a rerun finds some done as it goes."""

    def __init__(self, total: int) -> None:
        super().__init__("augment", total, "rewritings")
        self._n_refused = 0
        self._status: Callable[[], str] = str

    def watch(self, status: Callable[[], str]) -> None:
        """Show what `status` returns (tokens, cost) beside the count."""
        self._status = status

    def find(self, n: int) -> None:
        """Count `n` more rewritings that were stored before: they say nothing about the rate."""
        self._done_before += n
        self.advance(n)

    def refuse(self) -> None:
        """Count one more refused answer."""
        self._n_refused += 1

    def advance(self, n: int = 1) -> None:
        """Count `n` more rewritings as done (stored, or given up)."""
        refused = f"{self._n_refused:,} refused" if self._n_refused else ""
        self._said = ", ".join(words for words in (refused, self._status()) if words)
        super().advance(n)
