"""The stage `augment`: documents in, corpus out. The result does not depend on the order or timing
of answers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from time import monotonic
from typing import Any

from kinject.augment import sandbox
from kinject.augment.checks.judge import N_TRIALS, Judge, JudgeScore, render_judge_score
from kinject.augment.contamination import Contamination, ContaminationCheck, render_contamination
from kinject.augment.corpus_counts import CorpusCounts, Coverage, StyleCount, render_coverage
from kinject.augment.corpus_writer import CorpusWriter
from kinject.augment.groups import Group, document_groups, pair_groups
from kinject.augment.passage_file import PassageFile, PlannedDocument, PlannedDocuments, passages_of
from kinject.augment.pieces import (
    CORPUS,
    COVERAGE,
    FAILURES,
    SFT,
    Pieces,
    join_pieces,
    read_pieces,
)
from kinject.augment.plan import Plan, make_plan
from kinject.augment.rewriter import Rewriter
from kinject.augment.store import (
    DECISIONS,
    JOURNALS,
    REJECTED,
    VARIANTS,
    Store,
    WritingResult,
    common_fields,
    count_decisions,
    merge_decisions,
    render_decisions,
)
from kinject.augment.styles import SKIPPED
from kinject.corpus.passages import cut_note
from kinject.disk import file_hash, lock_dir, read_jsonl, write_manifest
from kinject.errors import EndpointError
from kinject.heap import document_hashes
from kinject.language.tables import language_of
from kinject.llm import Stopped
from kinject.llm.cache import CACHES, merge_caches
from kinject.llm.limits import limits_of
from kinject.llm.sender import (
    Opener,
    Sender,
    graceful_shutdown,
    open_cached,
    open_sender,
    run_event_loop,
)
from kinject.recipe import AugmentRecipe
from kinject.shards import (
    WHOLE,
    FinishedShard,
    Shard,
    finished_shards,
    merged_counts,
    refuse_changed,
    refuse_unmerged,
    shard_counts,
)
from kinject.terminal import Progress, format_count

log = logging.getLogger(__name__)

_MERGED = (*JOURNALS, FAILURES)
"""Files of a shard from which a merge can make all others."""


@dataclass(frozen=True, kw_only=True)
class AugmentResult(WritingResult):
    """The result of `augment`: `asked` and `got` count variants, `refused` answers; `failures_path`
    lists the failed ones.

    `sft_path` holds the rows of styles that make prompts and completions, None if there are none.
    `contamination` is None if the recipe names no probe set; `judge` is the judge's score on
    planted errors. `repairs` counts what was taken off accepted answers, `decisions` those of a
    person (decisions.jsonl) by kind.
    """

    corpus_path: Path
    sft_path: Path | None
    variants_path: Path
    failures_path: Path
    n_rows: int
    styles: Mapping[str, StyleCount]
    contamination: Contamination | None
    coverage: Coverage | None
    repairs: Mapping[str, int]
    judge: JudgeScore | None
    languages: Mapping[str, int]
    decisions: Mapping[str, int]

    @property
    def n_missing(self) -> int:
        """How many requested variants were refused or failed; an answer NONE is neither."""
        n_nothing = sum(count.nothing for count in self.styles.values())
        return self.asked - self.got - n_nothing

    @property
    def short(self) -> bool:
        """Whether there are fewer variants than requested."""
        return self.n_missing > 0

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each style."""
        return [
            {
                "style": name,
                "asked": count.asked,
                "got": count.got,
                "texts": count.texts,
                "refused": sum(count.refused.values()),
                "failed": count.failed,
            }
            for name, count in self.styles.items()
        ]


def augment(recipe: AugmentRecipe, shard: Shard = WHOLE) -> AugmentResult:
    """Write the variants and the corpus of `recipe`; a rerun requests only missing texts.

    With a `shard` those of its documents, in its own folder, for `merge_variants`. A run without
    budget left ends short, with the corpus of its texts so far. Raises `RecipeError`,
    `InputError` (documents), `EndpointError` and `DiskError`; `KeyboardInterrupt` after Ctrl-C.
    Every answer before that stays stored.
    """
    plan = make_plan(recipe, shard)
    if shard.total:
        recipe = replace(recipe, run_dir=shard.folder(recipe.run_dir))
    else:
        refuse_unmerged(recipe.run_dir, VARIANTS)
    with lock_dir(recipe.run_dir, stage="augment"):
        return run_event_loop(_augment(recipe, plan, _rewrite))


def merge_variants(recipe: AugmentRecipe) -> AugmentResult:
    """Make of the finished shards of `recipe` what one run makes. No model is asked.

    Raises as `augment`, and `InputError` as `finished_shards`.
    """
    plan, command = make_plan(recipe), f"kinject augment {recipe.command_line}"
    inputs = _input_hashes(recipe, plan)
    with (
        lock_dir(recipe.run_dir, stage="augment"),
        finished_shards(recipe.run_dir, command, recipe.raw, inputs) as shards,
    ):
        refuse_changed(shards, _MERGED)
        for name in CACHES:
            merge_caches(recipe.run_dir / name, [one.folder / name for one in shards])
        merge_decisions(recipe.run_dir, [one.folder for one in shards])
        pieces = _joinable(recipe, plan, shards)
        if pieces:
            return run_event_loop(_join(recipe, plan, shards, pieces))
        with Store(recipe.run_dir, plan.catalog) as store:
            for one in shards:
                with Store(one.folder, plan.catalog) as others:
                    store.add_all(others)
        return run_event_loop(_augment(recipe, plan, partial(_replay, shards)))


def _joinable(
    recipe: AugmentRecipe, plan: Plan, shards: Sequence[FinishedShard]
) -> Sequence[Pieces]:
    """Return the pieces of all shards if their rows are those of one run as they are, else none."""
    # These rows show passages of any document, and a shard knows its own.
    if any(plan.catalog[name].rows == "quoted" for name in plan.styles):
        return ()
    # Shards are as they were before a person decided; what the merged run has stored may be more.
    if any((recipe.run_dir / name).exists() for name in (DECISIONS, *JOURNALS)):
        return ()
    found: list[Pieces] = []
    for one in shards:
        pieces = read_pieces(one.folder)
        if pieces is None or (one.folder / DECISIONS).exists():
            return ()
        found.append(pieces)
    return found


async def _join(
    recipe: AugmentRecipe, plan: Plan, shards: Sequence[FinishedShard], pieces: Sequence[Pieces]
) -> AugmentResult:
    """Put the files of shards together and add their counts; no document and no row is parsed."""
    requests = await _finished_requests(shards, recipe, plan, PlannedDocuments(plan))
    join_pieces(recipe.run_dir, [one.folder for one in shards], pieces[0].files)
    counts = CorpusCounts({style: StyleCount() for style in plan.styles})
    contamination = _open_contamination(recipe)
    paths = {"corpus": recipe.run_dir / CORPUS, "sft": recipe.run_dir / SFT}
    for one in pieces:
        counts.add(one.counts)
    in_sources = chain.from_iterable(one.in_sources for one in pieces)
    finds = chain.from_iterable(one.finds for one in pieces)
    contamination.add_shards(paths, in_sources, finds)
    return _finish(recipe, plan, counts, requests, contamination, count_decisions({}, ()))


@dataclass
class _Requests:
    """The requests of a run: their sender, the ids of those without an answer with the error, the
    judge's score on planted errors, and their counts for the manifest."""

    sender: Sender
    failed: dict[str, str]
    judge: JudgeScore | None
    counts: Mapping[str, Any]


_Fill = Callable[[AugmentRecipe, Plan, PassageFile, Store, Progress], Awaitable[_Requests]]
"""Puts the variants of a plan into the store."""


async def _augment(recipe: AugmentRecipe, plan: Plan, fill: _Fill) -> AugmentResult:
    contamination = _open_contamination(recipe)
    with PassageFile(recipe.run_dir, plan.shard) as passages:
        # Every document is read before the first request: a fault on the last line must not cost
        # money.
        n_variants = _read_documents(plan, passages, contamination)
        progress = Progress("augment", n_variants, "rewritings")
        with Store(recipe.run_dir, plan.catalog) as store, progress:
            requests = await fill(recipe, plan, passages, store, progress)
            writer = CorpusWriter(
                recipe.run_dir, plan, store, requests.failed, contamination, recipe.augment
            )
            writer.write(passages)
    decisions = count_decisions(store.decisions, store.applied)
    return _finish(recipe, plan, writer.counts, requests, contamination, decisions)


def _open_contamination(recipe: AugmentRecipe) -> ContaminationCheck:
    contamination = ContaminationCheck()  # without questions it finds nothing
    for path in recipe.augment.contamination_check:
        contamination.read_questions(Path(path))
    return contamination


def _finish(
    recipe: AugmentRecipe,
    plan: Plan,
    counts: CorpusCounts,
    requests: _Requests,
    contamination: ContaminationCheck,
    decisions: Mapping[str, int],
) -> AugmentResult:
    """Return the result of a run whose files are written, and write its manifest."""
    section, run_dir = recipe.augment, recipe.run_dir
    result = AugmentResult(
        **common_fields(requests.sender, counts.passages, counts.tokens),
        run_dir=run_dir,
        corpus_path=run_dir / CORPUS,
        sft_path=run_dir / SFT if counts.n_sft_rows else None,
        variants_path=run_dir / VARIANTS,
        rejected_path=run_dir / REJECTED,
        failures_path=run_dir / FAILURES,
        manifest_path=run_dir / "manifest.json",
        n_rows=counts.n_rows,
        styles=counts.styles,
        asked=sum(count.asked for count in counts.styles.values()),
        got=sum(count.got for count in counts.styles.values()),
        refused=counts.refused,
        failed=dict(counts.failed.most_common()),
        contamination=contamination.result() if section.contamination_check else None,
        coverage=counts.coverage(run_dir / COVERAGE, section.coverage),
        judge=requests.judge,
        languages=dict(counts.languages.most_common()),
        repairs=dict(counts.repairs.most_common()),
        decisions=decisions,
    )
    _write_manifest(recipe, plan, result, requests.counts)
    return result


def _read_documents(plan: Plan, passages: PassageFile, contamination: ContaminationCheck) -> int:
    """Read, split and hash every document, once in a run; return the number of variants.

    Raises as `PlannedDocuments` and `document_groups`.
    """
    n_variants = 0
    for number, document, split in PlannedDocuments(plan).numbered():
        passages.add(document, split, number)
        if not plan.shard.has(document.id):  # it may be one of a pair
            continue
        contamination.add_source(document.text)
        n_variants += sum(map(_n_announced, document_groups(plan, document, split)))
    # Pairs are known when all documents are.
    return n_variants + sum(map(_n_announced, pair_groups(plan, passages.with_others)))


def _n_announced(group: Group) -> int:
    """Return the variants of a group, 0 where a target of tokens leaves their number open."""
    if group.skipped or group.target is not None:
        return 0
    return group.n_samples


async def _rewrite(
    recipe: AugmentRecipe, plan: Plan, passages: PassageFile, store: Store, progress: Progress
) -> _Requests:
    """Request all missing variants, then texts for facts that too few carry."""
    section = recipe.augment
    limits = limits_of(section.generator, section.budget, plan.shard)
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(
            open_sender(section.generator, recipe.run_dir, limits, opener=sandbox.open_generator)
        )
        judge = await _open_judge(stack, recipe, plan, sender)
        if judge is not None and plan.shard.is_first:
            await _measure_judge(judge, plan, passages)
        rewriter = Rewriter(plan, sender, store, progress, section.max_attempts, judge=judge)
        start = monotonic()
        try:
            await rewriter.run(passages, limits.concurrency)
            # After all texts: which facts are short is known only then.
            if section.coverage is not None:
                await rewriter.top_up(passages, limits.concurrency, section.coverage)
        except EndpointError as error:
            stored = f"{store.n_variants} rewritings are stored; the same command resumes."
            raise EndpointError(f"{error} {stored}", fatal=True) from error
        sender.traffic.seconds = monotonic() - start
    counts = {"this_run": sender.traffic.counts(), **shard_counts(plan.shard)}
    return _Requests(sender, rewriter.failed, _score_of(judge), counts)


async def _replay(
    shards: Sequence[FinishedShard],
    recipe: AugmentRecipe,
    plan: Plan,
    passages: PassageFile,
    store: Store,
    progress: Progress,
) -> _Requests:
    """Request nothing: the store has what the `shards` stored, their failures are its own."""
    requests = await _finished_requests(shards, recipe, plan, passages)
    progress.advance(store.n_variants, earlier=True)
    for one in shards:
        for _, row in read_jsonl(one.folder / FAILURES):
            requests.failed[row["variant_id"]] = row["error"]
    return requests


async def _finished_requests(
    shards: Sequence[FinishedShard],
    recipe: AugmentRecipe,
    plan: Plan,
    passages: Iterable[PlannedDocument],
) -> _Requests:
    """Return the requests that the `shards` have sent, without those that have no answer."""
    section = recipe.augment
    limits = limits_of(section.generator, section.budget)
    async with contextlib.AsyncExitStack() as stack:
        sender = await stack.enter_async_context(
            open_sender(section.generator, recipe.run_dir, limits, opener=open_cached)
        )
        judge = await _open_judge(stack, recipe, plan, sender, open_cached)
        if judge is not None:
            await _measure_judge(judge, plan, passages)
    sender.budget.empty = any(one.counts["out_of_budget"] for one in shards)
    counts = {"this_run": sender.traffic.counts(), **merged_counts(shards)}
    return _Requests(sender, {}, _score_of(judge), counts)


def _score_of(judge: Judge | None) -> JudgeScore | None:
    if judge is None:
        return None
    return judge.score


async def _open_judge(
    stack: contextlib.AsyncExitStack,
    recipe: AugmentRecipe,
    plan: Plan,
    partner: Sender,
    opener: Opener = sandbox.open_generator,
) -> Judge | None:
    """Return the judge, or None. Its answers have their own cache."""
    section = recipe.augment
    if section.judge is None:
        return None
    if section.judge.kind == "sandbox":  # its answers cost nothing, and are in no cache
        opener = sandbox.open_generator
    opened = open_sender(
        section.judge,
        recipe.run_dir,
        limits_of(section.judge, section.budget, plan.shard),
        # The cost so far is that of a whole cache, and the judge has prices of its own.
        cache="judge.sqlite",
        partner=partner,
        opener=opener,
    )
    return Judge(await stack.enter_async_context(opened), plan.seed)


async def _measure_judge(judge: Judge, plan: Plan, passages: Iterable[PlannedDocument]) -> None:
    """Score the judge on planted errors in the first passages of all shards."""
    if plan.shard.total:
        # The errors are drawn over all of them: of a shard's own the merge would need others.
        passages = PlannedDocuments(replace(plan, shard=WHOLE))
    pairs = ((document.title, passage.shown) for document, passage in passages_of(passages))
    # Out of budget, the run ends before its first request.
    with graceful_shutdown(judge.sender), contextlib.suppress(Stopped):
        score = await judge.measure_accuracy(list(islice(pairs, N_TRIALS)))
        for fault in score.limits_missed():
            log.warning(
                "augment.judge is not reliable: on planted errors its %s. Take a stronger model.",
                fault,
            )


def _input_hashes(recipe: AugmentRecipe, plan: Plan) -> dict[str, str]:
    """Return name -> hash of the files that a run has read."""
    inputs = document_hashes(plan.documents_path, plan.documents)
    inputs.update({name: file_hash(Path(name)) for name in recipe.augment.contamination_check})
    if plan.precomputed:
        inputs[str(plan.precomputed.path)] = file_hash(plan.precomputed.path)
    return inputs


def _write_manifest(
    recipe: AugmentRecipe, plan: Plan, result: AugmentResult, more_counts: Mapping[str, Any]
) -> None:
    """Write the manifest; `more_counts` are those of requests and shards."""
    counts = result.counts("n_rows", "repairs", "decisions")
    counts["styles"] = {name: vars(count) for name, count in result.styles.items()}
    counts["languages"] = {
        code or "unknown": {"texts": n, "not_checked": language_of(code).not_checked}
        for code, n in result.languages.items()
    }
    counts |= more_counts
    for name in ("judge", "coverage", "contamination"):
        part = getattr(result, name)
        if part is not None:
            counts[name] = part.counts()
    counts["corpus_sha256"] = file_hash(result.corpus_path)
    written = [path.name for path in (result.corpus_path, result.sft_path) if path]
    if plan.shard.total:
        written += _MERGED
    write_manifest(
        result.manifest_path,
        stage="augment",
        inputs=_input_hashes(recipe, plan),
        recipe=recipe.raw,
        counts=counts,
        outputs=written,
    )


def render_summary(result: AugmentResult) -> str:
    """Return the table at the end of a run: counts by style, refusals by reason, and the fix for a
    short corpus."""
    cut = cut_note(result.n_cut, result.n_passages, "augment.passage_tokens")
    lines = [
        f"{format_count(result.n_documents, 'document')}, "
        f"{format_count(result.n_passages, 'passage')} -> "
        f"{format_count(result.n_rows, 'row')} in {result.corpus_path}",
        *filter(None, [cut]),
        "",
        f"{'style':<16}{'asked':>8}{'got':>8}{'texts':>8}{'refused':>9}{'failed':>8}",
    ]
    for name, count in result.styles.items():
        lines += _style_lines(name, count, is_only=len(result.styles) == 1)
    lines += render_decisions(result.decisions)
    if result.repairs:
        repairs = ", ".join(f"{_REPAIRS[name]} {n}" for name, n in result.repairs.items())
        lines += ["", f"repaired answers: {repairs}"]
    for code, number in result.languages.items():
        off = ", ".join(language_of(code).not_checked)
        if off:
            answers = format_count(number, "answer")
            lines.append(f"not checked in {answers} ({code or 'language not clear'}): {off}")
    if result.refused:
        lines += ["", f"answers refused (each with its text in {result.rejected_path}):"]
        lines += [f"{number:>8}  {reason}" for reason, number in result.refused.items()]
    failed = f"rewritings without an answer (each in {result.failures_path}):"
    lines += [*result.render_failed(failed), ""]
    if result.sft_path:
        lines.append(f"prompts with completions, and conversations: {result.sft_path}")
    lines += result.render_requests()
    if result.judge:
        lines.append(render_judge_score(result.judge))
    lines += result.render_cost()
    if result.coverage:
        lines.append(render_coverage(result.coverage))
    if result.contamination:
        lines.append(render_contamination(result.contamination))
    lines += _short_lines(result)
    return "\n".join(lines)


def _style_lines(name: str, count: StyleCount, *, is_only: bool) -> Iterator[str]:
    """Yield the row of a style, and what was not asked for or not written."""
    n_refused = sum(count.refused.values())
    row = f"{name:<16}{count.asked:>8}{count.got:>8}{count.texts:>8}{n_refused:>9}{count.failed:>8}"
    if count.refused and not is_only:  # with one style, the list of all refusals has the same
        reasons = (f"{reason} {number}" for reason, number in count.refused.items())
        row += f"  {', '.join(reasons)}"
    yield row
    if count.nothing:
        yield f"{'':<16}{count.nothing:>8}  of them answered NONE: there was nothing to write"
    for need, number in count.skipped.items():
        yield f"{'':<16}{number:>8}  {_passages(number)} skipped: {SKIPPED[need]}"


def _passages(n: int) -> str:
    return "passage" if n == 1 else "passages"


def _short_lines(result: AugmentResult) -> list[str]:
    """Return the number of missing rewritings and what to do; nothing for a complete result."""
    if not result.short:
        return []
    fixes = []
    if result.failed:
        fixes.append("run again for what failed")
    if "truncated" in result.refused:
        # First: what was cut at the limit is cut there again, however often it is requested.
        fixes.append("truncated: raise augment.generator.max_tokens first")
    others = [reason for reason in result.refused if reason != "truncated"]
    if others:
        more = "raise augment.max_attempts (at temperature 0: the temperature)"
        fixes.append(f"{others[0]}: read {result.rejected_path}, {more}, or take another model")
    if not fixes:
        return [f"Short by {result.n_missing}."]
    return [f"Short by {result.n_missing}: {'; '.join(fixes)}."]


_REPAIRS: Mapping[str, str] = {
    "fence": "code fence taken off",
    "preamble": "words before the text taken off",
    "closing": "words after it taken off",
    "label": "label or title taken off",
    "split": "several texts in one answer parted",
    "loop": "repeated sentences taken off",
    "item": "items that add a fact taken off",
}
"""Name of a repair -> its words in the summary."""
