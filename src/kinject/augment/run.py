"""The stage: documents in, corpus out, everything counted."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

from kinject.augment.checks.judge import N_TRIALS, Judge
from kinject.augment.contamination import check_run
from kinject.augment.corpus_writer import AugmentResult, CorpusWriter, cover
from kinject.augment.plan import Plan, Precomputed, read_precomputed
from kinject.augment.requests import Stopped, generator_identity, open_generator
from kinject.augment.requests.cache import AnswerCache
from kinject.augment.requests.limits import Limits
from kinject.augment.requests.sender import Sender, Traffic, graceful_shutdown
from kinject.augment.rewriter import AugmentProgress, Rewriter
from kinject.augment.store import Store
from kinject.augment.validation import limits_of, section_of
from kinject.corpus.documents import document_hashes
from kinject.disk import file_hash, lock_dir, write_jsonl, write_manifest
from kinject.errors import EndpointError
from kinject.recipe import AugmentRecipe, AugmentSection, GeneratorSection
from kinject.types import Usage


def augment(recipe: AugmentRecipe) -> AugmentResult:
    """Write the rewritings and the corpus that `recipe` asks for; a rerun asks only for what is missing.

    A run that comes to the end of its budget ends short, with the corpus of what it has.

    Raises `RecipeError`, `InputError` (documents), `EndpointError` and `DiskError`; `KeyboardInterrupt` after Ctrl-C.
    Whatever was answered before stays stored.
    """
    section = section_of(recipe)
    with lock_dir(recipe.run_dir):
        return asyncio.run(_augment(recipe, section, plan_of(recipe), limits_of(section)))


def plan_of(recipe: AugmentRecipe) -> Plan:
    """Return what `recipe` asks for. Raises `RecipeError` as `section_of` does."""
    section = section_of(recipe)
    return Plan(
        documents_path=Path(section.documents), passage_tokens=section.passage_tokens, tokenizer=section.tokenizer,
        styles=section.styles, seed=recipe.seed,
        identity=generator_identity(section.generator), given=_given_of(section.generator),
    )  # fmt: skip


def _given_of(generator: GeneratorSection) -> Precomputed | None:
    return read_precomputed(Path(generator.path)) if generator.kind == "file" and generator.path else None


def counts_of(plan: Plan) -> Counter[str]:
    """Return the numbers of documents, passages and rewritings. Raises as `Plan.groups` and `Precomputed.check_documents`."""
    counts = Counter[str]()
    known = set[str]()
    for document, passages in plan.passages():
        counts["documents"] += 1
        counts["passages"] += len(passages)
        counts["rewritings"] += sum(group.n_samples for group in plan.groups_of(document, passages))
        if plan.given:
            known.add(document.id)
    if plan.given:
        plan.given.check_documents(known)
    return counts


async def _augment(recipe: AugmentRecipe, section: AugmentSection, plan: Plan, limits: Limits) -> AugmentResult:
    # Reads every document before the first request: a fault on the last line must not cost money.
    counts = counts_of(plan)
    total = counts["rewritings"]
    meter = AugmentProgress(total)
    with Store(recipe.run_dir) as store, meter:
        filling = await _fill(recipe, limits, plan, store, meter)
        tally = CorpusWriter(plan, store, filling.failed)
        corpus_path, sft_path = recipe.run_dir / "corpus.jsonl", recipe.run_dir / "sft.jsonl"
        failures_path = recipe.run_dir / "failures.jsonl"
        n_rows = write_jsonl(corpus_path, tally.rows(section.include_originals))
        coverage = cover(plan, store, recipe.run_dir / "coverage.jsonl")
        n_sft_rows = write_jsonl(sft_path, tally.sft_rows()) if "questions" in plan.styles else 0
        write_jsonl(failures_path, tally.failures)
    files = {"corpus": corpus_path} | ({"sft": sft_path} if n_sft_rows else {})
    result = AugmentResult(
        run_dir=recipe.run_dir, corpus_path=corpus_path, sft_path=sft_path if n_sft_rows else None,
        variants_path=store.variants_path, rejected_path=store.rejected_path,
        manifest_path=recipe.run_dir / "manifest.json", n_documents=counts["documents"], n_passages=counts["passages"],
        n_rows=n_rows, asked=sum(count.asked for count in tally.styles.values()),
        got=sum(count.got for count in tally.styles.values()), styles=tally.styles,
        refused=tally.refused, failed=dict(tally.failed.most_common()), tokens_in=tally.tokens["tokens_in"],
        tokens_out=tally.tokens["tokens_out"], n_sent=filling.sender.traffic.n_sent,
        n_cached=filling.sender.traffic.n_cached, cost=filling.sender.budget.spent,
        out_of_budget=filling.sender.out_of_budget, unsure=filling.sender.traffic.unsure(), leaks=check_run(section, plan, files),
        coverage=coverage,
        judge=filling.judge.score if filling.judge else None, failures_path=failures_path,
    )  # fmt: skip
    _write_manifest(recipe, plan, result, filling.sender.traffic)
    return result


async def _fill(recipe: AugmentRecipe, limits: Limits, plan: Plan, store: Store, progress: AugmentProgress) -> Rewriter:
    section = recipe.augment
    async with contextlib.AsyncExitStack() as stack:
        writer = await stack.enter_async_context(open_generator(recipe, section.generator))
        cache = stack.enter_context(AnswerCache(recipe.run_dir / "cache.sqlite")) if writer.remote else None
        sender = Sender(writer, cache, limits, cache.usage() if cache else Usage())
        progress.watch(sender.status)
        judge = await _open_judge(stack, recipe, section, plan, sender) if section.judge else None
        filling = Rewriter(plan, sender, store, progress, section.max_attempts, judge=judge)
        began = time.monotonic()
        try:
            await filling.run(limits.concurrency)
        except EndpointError as error:
            kept = f"{store.n_accepted} rewritings are stored; the same command goes on from there."
            raise EndpointError(f"{error} {kept}", fatal=True) from error
        sender.traffic.seconds = time.monotonic() - began
    return filling


async def _open_judge(
    stack: contextlib.AsyncExitStack, recipe: AugmentRecipe, section: AugmentSection, plan: Plan, sender: Sender
) -> Judge:
    """Return the judge, tried on planted errors in the first passages. Its answers have a cache of their own."""
    assert section.judge is not None
    limits = limits_of(replace(section, generator=section.judge))
    writer = await stack.enter_async_context(open_generator(recipe, section.judge))
    cache = stack.enter_context(AnswerCache(recipe.run_dir / "judge.sqlite")) if writer.remote else None
    judge = Judge(Sender(writer, cache, limits, cache.usage() if cache else Usage(), sender), recipe.seed)
    pairs = ((document.title, passage.text) for document, passages in plan.passages() for passage in passages)
    with (
        graceful_shutdown(judge.sender),
        contextlib.suppress(Stopped),
    ):  # out of budget: the run ends before its first request
        await judge.measure_accuracy(list(islice(pairs, N_TRIALS)))
    return judge


def _write_manifest(recipe: AugmentRecipe, plan: Plan, result: AugmentResult, traffic: Traffic) -> None:
    inputs = document_hashes(plan.documents_path)
    inputs.update({name: file_hash(Path(name)) for name in recipe.augment.contamination_check})
    if plan.given:
        inputs[str(plan.given.path)] = file_hash(plan.given.path)
    names = (
        "n_documents", "n_passages", "n_rows", "asked", "got", "refused", "failed", "tokens_in", "tokens_out", "cost",
        "out_of_budget",
    )  # fmt: skip
    counts = {name: getattr(result, name) for name in names}
    counts["styles"] = {name: asdict(count) for name, count in result.styles.items()}
    counts["this_run"] = traffic.counts()
    if result.judge:
        counts["judge"] = result.judge.counts()
    if result.coverage:
        counts["coverage"] = result.coverage.counts()
    if result.leaks:
        counts["leaks"] = result.leaks.counts()
    counts["corpus_sha256"] = file_hash(result.corpus_path)
    written = [path.name for path in (result.corpus_path, result.sft_path) if path]
    write_manifest(
        result.manifest_path, stage="augment", inputs=inputs, recipe=recipe.raw, counts=counts, outputs=written
    )
