"""The stage `augment`: documents in, corpus out. The result does not depend on the order or timing of answers."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from kinject.augment import sandbox
from kinject.augment.answers import LISTS, says_none, says_yes
from kinject.augment.checks.checker import Checker, Refusals, Verdict, check_completion, declines
from kinject.augment.checks.facts import checks_off, compare_facts
from kinject.augment.checks.judge import N_TRIALS, Judge
from kinject.augment.contamination import ContaminationCheck
from kinject.augment.corpus_writer import CorpusWriter
from kinject.augment.plan import (
    Group,
    PassageFile,
    Plan,
    PlannedDocument,
    Schedule,
    VariantRequest,
    make_plan,
    new_items,
)
from kinject.augment.store import Store
from kinject.augment.styles import Item, Preparation
from kinject.augment.summary import UNPREPARED, AugmentProgress, AugmentResult
from kinject.augment.validation import augment_section
from kinject.corpus.documents import document_hashes
from kinject.disk import content_id, file_hash, lock_dir, write_manifest
from kinject.errors import EndpointError, InputError
from kinject.recipe import AugmentRecipe, AugmentSection
from kinject.requests import Stopped
from kinject.requests.generator import items_in, list_structure
from kinject.requests.limits import Limits, limits_of
from kinject.requests.prompt_injection import escape_tags, has_injection
from kinject.requests.sender import (
    Sender,
    gather_answers,
    graceful_shutdown,
    open_sender,
    run_event_loop,
    run_workers,
)
from kinject.types import Completion

Reply = TypeVar("Reply")
log = logging.getLogger(__name__)

_INCONSISTENT = Verdict("inconsistent", "asked whether it follows from the passage, the model does not say yes")
_UNCONFIRMED = "the answer to the question whether the text follows from the passage"
_INJECTED = Verdict(
    "injection", "the passage has prompt injection, so that the model's own yes to this text proves nothing"
)


def augment(recipe: AugmentRecipe) -> AugmentResult:
    """Write the variants and the corpus of `recipe`; a rerun requests only missing texts.

    A run without budget left ends short, with the corpus of its texts so far.
    Raises `RecipeError`, `InputError` (documents), `EndpointError` and `DiskError`; `KeyboardInterrupt` after Ctrl-C.
    Every answer before that stays stored.
    """
    with lock_dir(recipe.run_dir):
        section = augment_section(recipe)
        plan, limits = make_plan(recipe), limits_of(section.generator, section.budget)
        return run_event_loop(_augment(recipe, section, plan, limits))


async def _augment(recipe: AugmentRecipe, section: AugmentSection, plan: Plan, limits: Limits) -> AugmentResult:
    contamination = ContaminationCheck()
    for path in section.contamination_check:
        contamination.read_questions(Path(path))
    with PassageFile(recipe.run_dir) as passages:
        # Every document is read before the first request: a fault on the last line must not cost money.
        counts = _read_documents(
            plan, plan.read_passages(), passages, contamination if section.contamination_check else None
        )
        progress = AugmentProgress(counts["variants"])
        with Store(recipe.run_dir) as store, progress:
            rewriter = await _rewrite(recipe, section, limits, plan, passages, store, progress)
            writer = CorpusWriter(recipe.run_dir, plan, store, rewriter.failed, contamination, section)
            contamination.check_prompts(plan.catalog[name] for name in plan.styles)
            writer.write(passages)
    sender, styles = rewriter.sender, writer.styles
    result = AugmentResult(
        run_dir=recipe.run_dir, corpus_path=writer.corpus_path, sft_path=writer.sft_path if writer.n_sft_rows else None,
        variants_path=store.variants_path, rejected_path=store.rejected_path,
        manifest_path=recipe.run_dir / "manifest.json", n_documents=counts["documents"], n_passages=counts["passages"],
        n_cut=counts["cut"],
        n_rows=writer.n_rows, asked=sum(count.asked for count in styles.values()),
        got=sum(count.got for count in styles.values()), styles=styles, refused=writer.refused,
        failed=dict(writer.failed.most_common()), tokens_in=writer.tokens["tokens_in"],
        tokens_out=writer.tokens["tokens_out"], tokens_thinking=writer.tokens["tokens_thinking"],
        n_sent=sender.traffic.n_sent,
        n_cached=sender.traffic.n_cached, cost=sender.budget.spent,
        cost_of_thinking=sender.cost_of_thinking, out_of_budget=sender.out_of_budget, failures_path=writer.failures_path,
        cost_note=sender.traffic.cost_note(), contamination=contamination.result() if section.contamination_check else None,
        coverage=writer.coverage, judge=rewriter.judge.score if rewriter.judge else None,
        languages=dict(writer.languages.most_common()),
        endpoints=sender.traffic.endpoints(),
        paused={name: dict(count) for name, count in rewriter.paused.items()},
    )  # fmt: skip
    _write_manifest(recipe, section, plan, result, sender.traffic.counts())
    return result


def _read_documents(
    plan: Plan, documents: Iterable[PlannedDocument], passages: PassageFile, contamination: ContaminationCheck | None
) -> Counter[str]:
    """Read, split and hash every document, once in a run; return the numbers of documents, passages and variants.

    Raises as `Plan.read_passages` and `Plan.groups`.
    """
    counts = Counter[str]()
    for document, split in documents:
        passages.add(document, split)
        if contamination is not None:
            contamination.add_source(document.text)
        counts["documents"] += 1
        counts["passages"] += len(split)
        counts["cut"] += sum(passage.cut for passage in split)
        counts["variants"] += sum(
            group.n_samples for group in plan.groups(document, split) if not group.skipped and group.target is None
        )
    return counts


async def _rewrite(
    recipe: AugmentRecipe, section: AugmentSection, limits: Limits, plan: Plan, passages: PassageFile, store: Store,
    progress: AugmentProgress,
) -> Rewriter:  # fmt: skip
    """Request all missing variants; return the rewriter with its counts."""
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(
            open_sender(section.generator, recipe.run_dir, limits, sandbox=sandbox.generate_answer)
        )
        progress.watch(sender.status)
        judge = await open_judge(stack, recipe, section, passages, sender)
        rewriter = Rewriter(plan, sender, store, progress, section.max_attempts, judge=judge)
        start = monotonic()
        try:
            await rewriter.run(passages, limits.concurrency)
        except EndpointError as error:
            stored = f"{store.n_variants} rewritings are stored; the same command resumes."
            raise EndpointError(f"{error} {stored}", fatal=True) from error
        sender.traffic.seconds = monotonic() - start
    return rewriter


async def open_judge(
    stack: contextlib.AsyncExitStack, recipe: AugmentRecipe, section: AugmentSection,
    passages: Iterable[PlannedDocument], partner: Sender,
) -> Judge | None:  # fmt: skip
    """Return the judge, scored on planted errors in the first passages, or None. Its answers have their own cache."""
    if section.judge is None:
        return None
    limits = limits_of(section.judge, section.budget)
    opened = open_sender(
        section.judge, recipe.run_dir, limits, cache="judge.sqlite", partner=partner,
        sandbox=sandbox.generate_answer,
    )  # fmt: skip
    sender = await stack.enter_async_context(opened)
    judge = Judge(sender, recipe.seed)
    pairs = ((document.title, passage.shown) for document, split in passages for passage in split)
    # Out of budget, the run ends before its first request.
    with graceful_shutdown(sender), contextlib.suppress(Stopped):
        score = await judge.measure_accuracy(list(islice(pairs, N_TRIALS)))
        for fault in score.limits_missed():
            log.warning("augment.judge is not reliable: on planted errors its %s. Take a stronger model.", fault)
    return judge


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
    """Fills a store with the variants of a plan. `failed` maps ids of requests without an answer to the last error.

    `paused` counts by style and reason the passages that a style was given up for: nothing was accepted, and several
    answers in a row were refused at the same point.
    """

    plan: Plan
    sender: Sender
    store: Store
    progress: AugmentProgress
    max_attempts: int
    failed: dict[str, str] = field(default_factory=dict)
    judge: Judge | None = None
    paused: dict[str, Counter[str]] = field(default_factory=dict)

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
        if group.skipped or not group.n_samples:
            return
        items = await self._request_preparations(group)
        if isinstance(items, str):
            self._fail(self.plan.unprepared(group), f"{UNPREPARED}: {items}")
            return
        schedule = Schedule(self.plan, group, items)
        checker: Checker | None = None  # it reads the whole passage, which a finished group does not need
        texts: list[str] = []
        n_requests, n_announced = 0, group.n_samples if group.target is None else 0
        refusals = Refusals()
        for requests in schedule:
            n_requests += len(requests)
            self.progress.total += max(0, n_requests - n_announced)
            n_announced = max(n_announced, n_requests)
            stored = self.store.variants(requests)
            self.progress.count_stored(len(stored))
            for variant in stored.values():
                refusals.accept()
                texts += [variant.text] if variant.text else []
            block = [request for request in requests if request.id not in stored]
            if block:
                checker = checker or group.checker()
                while texts:
                    checker.accept(texts.pop(0))
            for attempt in range(self.max_attempts if group.texts is None else 1):
                if block and checker and not refusals.stuck:
                    block = await self._attempt(group, block, attempt, checker, refusals)
            if block:
                self.progress.advance(len(block))
            if refusals.stuck:
                self.paused.setdefault(group.style.name, Counter())[refusals.stuck] += 1
                break
            if group.target is not None:
                schedule.count(variant.text for variant in self.store.variants(requests).values() if variant.text)
        self.progress.total += n_requests - n_announced

    async def _request_preparations(self, group: Group) -> list[Item] | str:
        """Return the items of the group's prompts, stored ones first; without a usable answer, the reason."""
        items: list[Item] = [{}]
        for step in group.style.prepare:
            answers = await _gather(group, (self._ask_items(group, step, item) for item in items))
            read = [answer for answer in answers if isinstance(answer, tuple)]
            if len(read) < len(answers):
                return str(next(answer for answer in answers if not isinstance(answer, tuple)))
            items = new_items(group, step, items, read)
        return items

    async def _ask_items(self, group: Group, step: Preparation, item: Item) -> tuple[str, ...] | str:
        """Return the items in the answer to one preparation, () if the model answers NONE.

        Without a usable answer to the first preparation, return the reason for which the last one was refused.
        """
        notes_id = self.plan.notes_id(group, step, item)
        stored = self.store.notes(notes_id)
        if stored is not None:
            return stored
        notes: tuple[str, ...] = ()
        messages = group.style.preparation(step, group.source, item)
        structure = list_structure(messages) if step.parser == "lines" else None
        reason = ""
        for attempt in range(self.max_attempts):
            seed = self.plan.sample_seed(content_id(messages), 0, attempt)
            completion = await self.sender.send(messages, seed, structure)
            reason = check_completion(completion).reason or ("refusal" if declines(completion.text) else "empty")
            if reason == "empty":
                items = items_in(completion.text)
                nothing = says_none(completion.text) or items == []
                notes = () if nothing else tuple(items or LISTS[step.parser](completion.text))
                if notes or nothing:
                    break
        else:
            if step.for_each is None:
                return reason  # else it is one item of many: the others are enough
        self.store.add_notes(notes_id, group, step.name, notes)
        return notes

    async def _attempt(
        self, group: Group, block: list[VariantRequest], attempt: int, checker: Checker, refusals: Refusals
    ) -> list[VariantRequest]:
        """Send a block once and store the answers; return the requests that are still open."""
        completions = await self._complete(group, block, attempt)
        read = (
            self._read_answer(group, request, completion, checker)
            for request, completion in zip(block, completions, strict=True)
        )
        answers: Iterable[_Answer] = read
        asks_models = bool(group.style.verify) or (self.judge is not None and not group.style.mechanical)
        if asks_models:
            answers = list(read)
            await self._ask_models(group, answers)
        asks_writer = group.texts is None and not group.style.mechanical
        still_open = []
        for answer in answers:  # each is read after the one before it was accepted, unless models were asked about all
            if answer.error is not None:
                self._fail([answer.request], str(answer.error))
                continue
            if asks_models and answer.accepted and answer.text:
                answer.verdict = checker.compare_accepted(answer.text, answer.verdict)
            if answer.accepted:
                refusals.accept()
                if answer.text:
                    checker.accept(answer.text)
                name = answer.completion.generator or self.sender.generator.name
                generator = "mechanical" if group.style.mechanical else name
                self.store.accept(
                    group, answer.request, attempt, answer.completion, generator, answer.text, answer.verdict
                )
                self.progress.advance(1)
            else:
                self.store.refuse(group, answer.request, attempt, answer.completion, answer.verdict)
                self.progress.count_refused()
                if asks_writer:
                    refusals.refuse(answer.verdict)
                still_open.append(answer.request)
        return still_open

    async def _complete(
        self, group: Group, block: list[VariantRequest], attempt: int
    ) -> list[Completion | EndpointError]:
        """Return the completions of a block, in order."""
        if group.texts is not None:
            return [Completion(group.texts[request.sample]) for request in block]
        seeds = [self.plan.sample_seed(request.prompt_hash, request.turn, attempt) for request in block]
        if group.style.mechanical:
            rewrite = group.style.mechanical
            return [Completion(rewrite(group.document.title, group.passage.text, seed)) for seed in seeds]
        pairs = zip(block, seeds, strict=True)
        return await _gather(
            group, (self.sender.send(self.plan.messages(group, request), seed) for request, seed in pairs)
        )

    def _read_answer(
        self, group: Group, request: VariantRequest, completion: Completion | EndpointError, checker: Checker
    ) -> _Answer:
        """Parse and check one completion. The text of an accepted NONE is empty."""
        if isinstance(completion, EndpointError):
            return _Answer(request, Completion(""), error=completion)
        verdict = check_completion(completion)
        if not verdict.accepted:
            return _Answer(request, completion, verdict=verdict)
        if group.style.none and says_none(completion.text):
            return _Answer(request, completion)
        text = group.style.parse(completion.text)
        verdict = checker.check(text)
        if verdict.accepted and group.style.keeps:
            compared = compare_facts(str(request.item[group.style.keeps]), text)
            verdict = replace(
                verdict, reason=compared.reason, detail=compared.detail, doubts=verdict.doubts + compared.doubts
            )
        return _Answer(request, completion, text, verdict)

    async def _ask_models(self, group: Group, answers: Sequence[_Answer]) -> None:
        """Ask about each accepted answer: the generator whether it follows from the passage, then the judge."""
        title, passage = group.document.title, group.passage.shown
        if group.style.verify:
            accepted = [answer for answer in answers if answer.accepted and answer.text]
            prompts = [
                group.style.verification(group.source, answer.request.item, escape_tags(answer.text))
                for answer in accepted
            ]
            seeds = [self.plan.sample_seed(content_id(prompt), 0, 0) for prompt in prompts]
            replies = await _gather(group, map(self.sender.send, prompts, seeds))
            injected = has_injection(title, passage)
            for answer, reply in zip(accepted, replies, strict=True):
                if injected:
                    answer.verdict = _INJECTED
                elif isinstance(reply, EndpointError):
                    answer.error = reply
                elif not says_yes(reply.text):
                    unread = check_completion(reply)
                    answer.verdict = _INCONSISTENT if unread.accepted else replace(unread, detail=_UNCONFIRMED)
        if self.judge is None or group.style.mechanical:
            return
        accepted = [answer for answer in answers if answer.accepted and answer.text]
        judge, rules = self.judge, group.style.rules
        verdicts = await _gather(group, (judge.verdict(title, passage, answer.text, rules) for answer in accepted))
        for answer, verdict in zip(accepted, verdicts, strict=True):
            if isinstance(verdict, EndpointError):
                answer.error = verdict
            elif not verdict.accepted:
                answer.verdict = replace(verdict, doubts=answer.verdict.doubts)

    def _fail(self, requests: list[VariantRequest], error: str) -> None:
        self.failed.update((request.id, error) for request in requests)
        self.progress.advance(len(requests))


async def _gather(group: Group, requests: Iterable[Awaitable[Reply]]) -> list[Reply | EndpointError]:
    """Return `gather_answers`, with the document's source in an `InputError`."""
    try:
        return await gather_answers(requests)
    except InputError as error:
        raise InputError(f"{group.document.source}: {error}") from error


def _write_manifest(
    recipe: AugmentRecipe, section: AugmentSection, plan: Plan, result: AugmentResult, traffic: Mapping[str, Any]
) -> None:  # fmt: skip
    inputs = document_hashes(plan.documents_path, plan.documents)
    inputs.update({name: file_hash(Path(name)) for name in section.contamination_check})
    if plan.precomputed:
        inputs[str(plan.precomputed.path)] = file_hash(plan.precomputed.path)
    names = (
        "n_documents", "n_passages", "n_cut", "n_rows", "asked", "got", "refused", "failed", "tokens_in", "tokens_out",
        "tokens_thinking", "cost", "cost_of_thinking", "out_of_budget", "paused",
    )  # fmt: skip
    counts = {name: getattr(result, name) for name in names}
    counts["styles"] = {name: asdict(count) for name, count in result.styles.items()}
    counts["languages"] = {
        code or "unknown": {"texts": n, "not_checked": checks_off(code)} for code, n in result.languages.items()
    }
    counts["this_run"] = traffic
    for name in ("judge", "coverage", "contamination"):
        if (part := getattr(result, name)) is not None:
            counts[name] = part.counts()
    counts["corpus_sha256"] = file_hash(result.corpus_path)
    written = [path.name for path in (result.corpus_path, result.sft_path) if path]
    write_manifest(
        result.manifest_path, stage="augment", inputs=inputs, recipe=recipe.raw, counts=counts, outputs=written
    )
