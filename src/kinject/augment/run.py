"""The stage `augment`: documents in, corpus out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from kinject.augment.checks.judge import N_TRIALS, Judge, JudgeScore, render_judge_score
from kinject.augment.contamination import Contamination, ContaminationCheck, render_contamination
from kinject.augment.corpus_writer import CorpusWriter, Coverage, StyleCount, render_coverage
from kinject.augment.plan import PassageFile, Plan, make_plan
from kinject.augment.requests import Stopped
from kinject.augment.requests.limits import Limits
from kinject.augment.requests.sender import Sender, Traffic, graceful_shutdown, open_sender
from kinject.augment.rewriter import AugmentProgress, Rewriter
from kinject.augment.store import Store
from kinject.augment.validation import augment_section, limits_of
from kinject.corpus.documents import document_hashes
from kinject.disk import file_hash, lock_dir, write_manifest
from kinject.errors import EndpointError
from kinject.recipe import AugmentRecipe, AugmentSection


@dataclass(frozen=True)
class AugmentResult:
    """The result of `augment`.

    `refused` counts answers by reason, `failed` variants without an answer by error; `failures_path` lists the failed ones
    of this run. `tokens_in` and `tokens_out` are those of every stored answer, refused ones too; `n_sent` and `n_cached`
    are of this run alone. `cost` is that of everything ever answered into the run folder, in the currency of the prices;
    `cost_note` names the part of it that is estimated. `sft_path` holds the rows of styles that make prompts and completions,
    None if there are none. `contamination` is None if the recipe names no probe set, `coverage` without a style that
    lists facts; `judge` is the judge's score on planted errors.
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
    n_sent: int
    n_cached: int
    cost: float
    out_of_budget: bool
    failures_path: Path
    cost_note: str = ""
    contamination: Contamination | None = None
    coverage: Coverage | None = None
    judge: JudgeScore | None = None

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
        return asyncio.run(_augment(recipe, section, make_plan(recipe), limits_of(section)))


async def _augment(recipe: AugmentRecipe, section: AugmentSection, plan: Plan, limits: Limits) -> AugmentResult:
    contamination = ContaminationCheck(section.contamination_ngram)
    for path in section.contamination_check:
        contamination.read_questions(Path(path))
    with PassageFile(recipe.run_dir) as passages:
        # Every document is read before the first request: a fault on the last line must not cost money.
        counts = _read_documents(plan, passages, contamination if section.contamination_check else None)
        progress = AugmentProgress(counts["variants"])
        with Store(recipe.run_dir) as store, progress:
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
        tokens_out=writer.tokens["tokens_out"], n_sent=sender.traffic.n_sent, n_cached=sender.traffic.n_cached,
        cost=sender.budget.spent, out_of_budget=sender.out_of_budget, failures_path=writer.failures_path,
        cost_note=sender.traffic.cost_note(), contamination=contamination.result() if section.contamination_check else None,
        coverage=writer.coverage, judge=rewriter.judge.score if rewriter.judge else None,
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
        start = time.monotonic()
        try:
            await rewriter.run(passages, limits.concurrency)
        except EndpointError as error:
            stored = f"{store.n_variants} rewritings are stored; the same command resumes."
            raise EndpointError(f"{error} {stored}", fatal=True) from error
        sender.traffic.seconds = time.monotonic() - start
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


def _write_manifest(
    recipe: AugmentRecipe, section: AugmentSection, plan: Plan, result: AugmentResult, traffic: Traffic
) -> None:
    inputs = document_hashes(plan.documents_path)
    inputs.update({name: file_hash(Path(name)) for name in section.contamination_check})
    if plan.precomputed:
        inputs[str(plan.precomputed.path)] = file_hash(plan.precomputed.path)
    names = (
        "n_documents", "n_passages", "n_rows", "asked", "got", "refused", "failed", "tokens_in", "tokens_out", "cost",
        "out_of_budget",
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
        line += f"; {result.tokens_in:,} tokens in, {result.tokens_out:,} out"
    lines.append(line)
    if result.judge:
        lines.append(render_judge_score(result.judge))
    if result.cost:
        lines.append(f"cost {result.cost:.4f}, everything answered into {result.run_dir} included")
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
