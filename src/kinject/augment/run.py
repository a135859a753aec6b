"""The stage `augment`: documents in, corpus out. The result does not depend on the order or timing of answers."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kinject.augment.checks.checker import Checker, Verdict, check_completion
from kinject.augment.checks.facts import compare_facts
from kinject.augment.checks.judge import N_TRIALS, Judge, JudgeScore, render_judge_score
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.contamination import Contamination, ContaminationCheck, render_contamination
from kinject.augment.corpus_writer import CorpusWriter, Coverage, StyleCount, render_coverage
from kinject.augment.plan import Group, PassageFile, Plan, PlannedDocument, VariantRequest, make_plan
from kinject.augment.prompts import ask
from kinject.augment.requests import Stopped
from kinject.augment.requests.balance import render_endpoints
from kinject.augment.requests.limits import Limits
from kinject.augment.requests.sender import (
    Sender,
    Traffic,
    gather_answers,
    graceful_shutdown,
    open_sender,
    run_event_loop,
    run_workers,
)
from kinject.augment.store import Store
from kinject.augment.styles import notes_of, says_yes
from kinject.augment.validation import augment_section, limits_of
from kinject.corpus.documents import document_hashes
from kinject.disk import content_id, file_hash, lock_dir, write_manifest
from kinject.errors import EndpointError, InputError
from kinject.recipe import AugmentRecipe, AugmentSection
from kinject.signals import running_time
from kinject.terminal import Progress
from kinject.types import Completion

Reply = TypeVar("Reply")

_INCONSISTENT = Verdict("inconsistent", "asked whether it follows from the passage, the model does not say yes")
_INJECTED = Verdict("injection", "the passage gives orders, so that the model's own yes to this text proves nothing")
_BLOCK = 64
"""Requests of one group that are sent at once."""


@dataclass(frozen=True)
class AugmentResult:
    """The result of `augment`.

    `refused` counts answers by reason, `failed` variants without an answer by error; `failures_path` lists the failed ones
    of this run. `tokens_in` and `tokens_out` are those of every stored answer, refused ones too; `tokens_thinking` is the part
    of `tokens_out` that a reasoning model's thinking took. `n_sent` and `n_cached` are of this run alone. `cost` is that of
    everything ever answered into the run folder, in the currency of the prices; `cost_of_thinking` is a part of it.
    `cost_note` names the part of it that is estimated. `sft_path` holds the rows of styles that make prompts and completions,
    None if there are none. `contamination` is None if the recipe names no probe set, `coverage` without a style that
    lists facts; `judge` is the judge's score on planted errors. `endpoints` counts this run's answers by endpoint, where there
    are several.
    """

    run_dir: Path
    corpus_path: Path
    sft_path: Path | None
    variants_path: Path
    rejected_path: Path
    manifest_path: Path
    n_documents: int
    n_passages: int
    n_rows: int
    asked: int
    got: int
    styles: Mapping[str, StyleCount]
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    tokens_in: int
    tokens_out: int
    tokens_thinking: int
    n_sent: int
    n_cached: int
    cost: float
    cost_of_thinking: float
    out_of_budget: bool
    failures_path: Path
    cost_note: str = ""
    contamination: Contamination | None = None
    coverage: Coverage | None = None
    judge: JudgeScore | None = None
    endpoints: Mapping[str, Any] = field(default_factory=dict)

    @property
    def short(self) -> bool:
        """Whether there are fewer variants than requested."""
        return self.got < self.asked


def augment(recipe: AugmentRecipe) -> AugmentResult:
    """Write the variants and the corpus of `recipe`; a rerun requests only what is missing.

    A run whose budget is spent ends short, with the corpus of what it has.

    Raises `RecipeError`, `InputError` (documents), `EndpointError` and `DiskError`; `KeyboardInterrupt` after Ctrl-C.
    Every answer before that stays stored.
    """
    section = augment_section(recipe)
    with lock_dir(recipe.run_dir):
        return run_event_loop(_augment(recipe, section, make_plan(recipe), limits_of(section)))


async def _augment(recipe: AugmentRecipe, section: AugmentSection, plan: Plan, limits: Limits) -> AugmentResult:
    contamination = ContaminationCheck(section.contamination_ngram)
    for path in section.contamination_check:
        contamination.read_questions(Path(path))
    with PassageFile(recipe.run_dir) as passages:
        # Every document is read before the first request: a fault on the last line must not cost money.
        counts = _read_documents(plan, passages, contamination if section.contamination_check else None)
        progress = AugmentProgress(counts["variants"])
        with Store(recipe.run_dir, keep_thinking=section.keep_thinking) as store, progress:
            rewriter = await _rewrite(recipe, section, limits, plan, passages, store, progress)
            writer = CorpusWriter(recipe.run_dir, plan, store, rewriter.failed, contamination)
            contamination.check_prompts(plan.styles)
            writer.write(passages, include_originals=section.include_originals)
    sender, styles = rewriter.sender, writer.styles
    result = AugmentResult(
        run_dir=recipe.run_dir, corpus_path=writer.corpus_path, sft_path=writer.sft_path if writer.n_sft_rows else None,
        variants_path=store.variants_path, rejected_path=store.rejected_path,
        manifest_path=recipe.run_dir / "manifest.json", n_documents=counts["documents"], n_passages=counts["passages"],
        n_rows=writer.n_rows, asked=sum(count.asked for count in styles.values()),
        got=sum(count.got for count in styles.values()), styles=styles, refused=writer.refused,
        failed=dict(writer.failed.most_common()), tokens_in=writer.tokens["tokens_in"],
        tokens_out=writer.tokens["tokens_out"], tokens_thinking=writer.tokens["tokens_thinking"],
        n_sent=sender.traffic.n_sent, n_cached=sender.traffic.n_cached, cost=sender.budget.spent,
        cost_of_thinking=sender.cost_of_thinking, out_of_budget=sender.out_of_budget, failures_path=writer.failures_path,
        cost_note=sender.traffic.cost_note(), contamination=contamination.result() if section.contamination_check else None,
        coverage=writer.coverage, judge=rewriter.judge.score if rewriter.judge else None,
        endpoints=sender.traffic.endpoints(),
    )  # fmt: skip
    _write_manifest(recipe, section, plan, result, sender.traffic)
    return result


def _read_documents(plan: Plan, passages: PassageFile, contamination: ContaminationCheck | None) -> Counter[str]:
    """Read, split and hash every document, once in a run; return the numbers of documents, passages and variants.

    Raises as `Plan.read_passages` and `Plan.groups`.
    """
    counts = Counter[str]()
    for document, split in plan.read_passages():
        passages.add(document, split)
        if contamination is not None:
            contamination.add_source(document.text)
        counts["documents"] += 1
        counts["passages"] += len(split)
        counts["variants"] += sum(group.n_samples for group in plan.groups(document, split))
    return counts


async def _rewrite(
    recipe: AugmentRecipe, section: AugmentSection, limits: Limits, plan: Plan, passages: PassageFile, store: Store,
    progress: AugmentProgress,
) -> Rewriter:  # fmt: skip
    """Request all missing variants; return the rewriter with its counts."""
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(open_sender(section.generator, recipe.run_dir, limits))
        progress.watch(sender.status)
        judge = await _open_judge(stack, recipe, section, passages, sender)
        rewriter = Rewriter(plan, sender, store, progress, section.max_attempts, judge=judge)
        start = running_time()
        try:
            await rewriter.run(passages, limits.concurrency)
        except EndpointError as error:
            stored = f"{store.n_variants} rewritings are stored; the same command resumes."
            raise EndpointError(f"{error} {stored}", fatal=True) from error
        sender.traffic.seconds = running_time() - start
    return rewriter


async def _open_judge(
    stack: contextlib.AsyncExitStack,
    recipe: AugmentRecipe,
    section: AugmentSection,
    passages: PassageFile,
    partner: Sender,
) -> Judge | None:
    """Return the judge, scored on planted errors in the first passages, or None. Its answers have their own cache."""
    if section.judge is None:
        return None
    limits = limits_of(replace(section, generator=section.judge))
    sender = await stack.enter_async_context(
        open_sender(section.judge, recipe.run_dir, limits, cache="judge.sqlite", partner=partner)
    )
    judge = Judge(sender, recipe.seed)
    pairs = ((document.title, passage.text) for document, split in passages for passage in split)
    # Out of budget, the run ends before its first request.
    with graceful_shutdown(sender), contextlib.suppress(Stopped):
        await judge.measure_accuracy(list(islice(pairs, N_TRIALS)))
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
                name = answer.completion.generator or self.sender.generator.name
                generator = "mechanical" if group.style.mechanical else name
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
            compared = compare_facts(notes[request.sample % len(notes)], text)
            verdict = replace(
                verdict, reason=compared.reason, detail=compared.detail, doubts=verdict.doubts + compared.doubts
            )
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


def _write_manifest(
    recipe: AugmentRecipe, section: AugmentSection, plan: Plan, result: AugmentResult, traffic: Traffic
) -> None:
    inputs = document_hashes(plan.documents_path)
    inputs.update({name: file_hash(Path(name)) for name in section.contamination_check})
    if plan.precomputed:
        inputs[str(plan.precomputed.path)] = file_hash(plan.precomputed.path)
    names = (
        "n_documents", "n_passages", "n_rows", "asked", "got", "refused", "failed", "tokens_in", "tokens_out",
        "tokens_thinking", "cost", "cost_of_thinking", "out_of_budget",
    )  # fmt: skip
    counts = {name: getattr(result, name) for name in names}
    counts["styles"] = {name: asdict(count) for name, count in result.styles.items()}
    counts["this_run"] = traffic.counts()
    for name in ("judge", "coverage", "contamination"):
        if (part := getattr(result, name)) is not None:
            counts[name] = part.counts()
    counts["corpus_sha256"] = file_hash(result.corpus_path)
    written = [path.name for path in (result.corpus_path, result.sft_path) if path]
    write_manifest(
        result.manifest_path, stage="augment", inputs=inputs, recipe=recipe.raw, counts=counts, outputs=written
    )


def render_summary(result: AugmentResult) -> str:
    """Return the table at the end of a run: counts by style, refusals by reason, and the fix for a short corpus."""
    lines = [
        f"{result.n_documents} documents, {result.n_passages} passages -> {result.n_rows} rows in {result.corpus_path}",
        "",
        f"{'style':<16}{'asked':>8}{'got':>8}{'refused':>9}{'failed':>8}",
    ]
    for name, count in result.styles.items():
        row = f"{name:<16}{count.asked:>8}{count.got:>8}{sum(count.refused.values()):>9}{count.failed:>8}"
        reasons = ", ".join(f"{reason} {number}" for reason, number in count.refused.items())
        # With one style the list below has the same counts.
        lines.append(f"{row}  {reasons}" if reasons and len(result.styles) > 1 else row)
    if result.refused:
        lines += ["", f"answers refused (each with its text in {result.rejected_path}):"]
        lines += [f"{number:>8}  {reason}" for reason, number in result.refused.items()]
    if result.failed:
        lines += ["", f"rewritings without an answer (each in {result.failures_path}):"]
        lines += [f"{number:>8}  {error}" for error, number in result.failed.items()]
    lines.append("")
    if result.sft_path:
        lines.append(f"prompts and completions: {result.sft_path}")
    line = f"{result.n_sent} requests sent in this run, {result.n_cached} answered from the cache"
    if result.tokens_in or result.tokens_out:
        thinking = f", {result.tokens_thinking:,} of them thinking" if result.tokens_thinking else ""
        line += f"; {result.tokens_in:,} tokens in, {result.tokens_out:,} out{thinking}"
    lines.append(line)
    lines += render_endpoints(result.endpoints)
    if result.judge:
        lines.append(render_judge_score(result.judge))
    if result.cost:
        thinking = f"; {result.cost_of_thinking:.4f} of it for thinking" if result.cost_of_thinking else ""
        lines.append(f"cost {result.cost:.4f}, everything answered into {result.run_dir} included{thinking}")
    if result.cost_note:
        lines.append(result.cost_note)
    if result.out_of_budget:
        lines.append("Stopped before the budget was exceeded.")
    if result.coverage:
        lines.append(render_coverage(result.coverage))
    if result.contamination:
        lines.append(render_contamination(result.contamination))
    if result.short:
        fixes = ["run again for what failed"] if result.failed else []
        fixes += ["raise augment.max_attempts for what was refused"] if result.refused and result.n_sent else []
        lines.append(f"Short by {result.asked - result.got}" + (f": {'; '.join(fixes)}." if fixes else "."))
    return "\n".join(lines)
