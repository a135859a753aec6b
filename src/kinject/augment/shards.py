"""Divides the documents of an augmentation among processes, each with its own run folder, and merges the results.

A shard is a normal run over a part of the documents, with a part of the limits and of the budget, in RUN/shards/NUMBER.
It reads the answers that the whole run has paid for. When all have ended, their rows and answers are moved into RUN,
and the run continues in this process: it finds everything stored, requests texts that are still missing, and writes the
corpus. So the corpus is that of one process, byte for byte, and a run that was killed resumes with any number of
processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.augment import sandbox
from kinject.augment.plan import PassageFile, Plan, PlannedDocument, Schedule, make_plan
from kinject.augment.run import augment, complete, open_judge
from kinject.augment.store import SHARDS, Store, merge_shards
from kinject.augment.summary import AugmentResult
from kinject.augment.validation import augment_section
from kinject.disk import content_id, lock_dir, read_manifest
from kinject.errors import EndpointError, InputError
from kinject.executors import Executor, LocalExecutor, RayExecutor
from kinject.recipe import AugmentRecipe, AugmentSection, GeneratorSection, read_recipe
from kinject.recipe.study_section import ResourcesSection
from kinject.requests.limits import limits_of, spent_so_far
from kinject.requests.sender import open_sender, run_event_loop
from kinject.terminal import Progress

MOST_JOBS = 256
_LIMITS = ("concurrency", "requests_per_minute", "tokens_per_minute")
_KINDS = ("openai", "sandbox")
_PRELOAD = ("kinject.augment.run", "kinject.requests.endpoint")
"""Modules that every shard imports: local processes are forked from one that has them."""


@dataclass(frozen=True)
class Shard:
    """The task of one process: the recipe with overrides for its part of the documents, in `folder`."""

    folder: Path
    label: str
    recipe: Path
    overrides: tuple[str, ...]
    resources: ResourcesSection = ResourcesSection()

    def run(self) -> Mapping[str, Any]:
        """Request missing texts; return the counts of the manifest."""
        recipe = read_recipe(self.recipe, self.overrides, "augment", check_inputs=False)
        result = augment(recipe, part_of=self.folder.parent.parent)
        manifest = read_manifest(result.manifest_path)
        return manifest["counts"] if manifest is not None else {}


def augment_in_shards(recipe: AugmentRecipe, start_executor: Callable[[int], Executor], n_jobs: int) -> AugmentResult:
    """Do as `augment`, with the documents divided among `n_jobs` processes of the executor.

    Raises as `augment`; `EndpointError` with the first shard's error if one fails: the same command resumes.
    """
    section = augment_section(recipe)
    if section.generator.kind not in _KINDS or section.generator.batch:
        kind = "batches" if section.generator.batch else f"kind: {section.generator.kind}"
        raise InputError(f"--jobs: {kind} cannot be divided among processes; {' and '.join(_KINDS)} can. Leave it out.")
    with lock_dir(recipe.run_dir):
        merge_shards(recipe.run_dir)
        plan = make_plan(recipe)
        folders = _write_documents(recipe, plan, n_jobs)
        if folders and section.judge is not None:
            run_event_loop(_score_judge(recipe, section, plan))
        counts = _run_shards(_shards(recipe, folders), start_executor) if folders else []
        merge_shards(recipe.run_dir)
        return complete(recipe, shards=counts)


async def _score_judge(recipe: AugmentRecipe, section: AugmentSection, plan: Plan) -> None:
    """Score the judge on the run's first passages. Its answers are stored in the run folder, where `complete` finds them."""
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(
            open_sender(
                section.generator,
                recipe.run_dir,
                limits_of(section.generator, section.budget),
                sandbox=sandbox.generate_answer,
            )
        )
        await open_judge(stack, recipe, section, plan.read_passages(), sender, None)


def _write_documents(recipe: AugmentRecipe, plan: Plan, n_jobs: int) -> list[Path]:
    """Write the documents for which something is missing into folders of shards, by a hash of their ids; return the folders."""
    files: dict[Path, PassageFile] = {}
    with Store(recipe.run_dir) as store, ExitStack() as stack:
        for document in plan.read_passages():
            if _is_done(plan, store, document):
                continue
            number = int(content_id("shard", document[0].id), 16) % n_jobs
            folder = recipe.run_dir / SHARDS / f"{number:03d}"
            if folder not in files:
                folder.mkdir(parents=True, exist_ok=True)
                files[folder] = stack.enter_context(PassageFile(folder, keep=True))
            files[folder].add(*document)
    return sorted(files)


def _is_done(plan: Plan, store: Store, document: PlannedDocument) -> bool:
    """Return whether nothing of a document is missing."""
    for group in plan.groups(*document):
        if group.skipped or not group.n_samples:
            continue
        items = plan.items(group, store.notes)
        if items is None:
            return False
        schedule = Schedule(plan, group, items)
        for requests in schedule:
            variants = store.variants(requests)
            if len(variants) < len(requests):
                return False
            schedule.count(variant.text for variant in variants.values() if variant.text)
    return True


def _shards(recipe: AugmentRecipe, folders: Sequence[Path]) -> Iterator[Shard]:
    """Yield the shards, each with its part of every limit and of the budget that is left.

    Raises `InputError` if a limit is too small to be divided.
    """
    section, n = recipe.augment, len(folders)
    generators = {"generator": section.generator, "judge": section.judge}
    parts = {name: _part(recipe, name, generator, n) for name, generator in generators.items() if generator is not None}
    for number, folder in enumerate(folders):
        changes = {**parts, "contamination_check": [], "include_originals": False}
        if section.budget is not None:
            spent = sum(
                spent_so_far(generator, limits_of(generator, section.budget), recipe.run_dir / path)
                for generator, path in ((section.generator, "cache.sqlite"), (section.judge, "judge.sqlite"))
                if generator is not None
            )
            changes["budget"] = max(0.0, section.budget - spent) / n
        overrides = [f"augment.{key}={json.dumps(value)}" for key, value in changes.items()]
        label = f"shard {number + 1} of {n}"
        run_dir = f"run_dir={json.dumps(str(folder))}"
        yield Shard(folder, label, recipe.path, (*recipe.overrides, *overrides, run_dir))


def _part(recipe: AugmentRecipe, name: str, generator: GeneratorSection, n: int) -> dict[str, Any]:
    """Return a generator as the recipe has it, with an n-th of its limits."""
    raw: dict[str, Any] = json.loads(json.dumps(recipe.raw["augment"][name]))
    for limit in _LIMITS:
        most = getattr(generator, limit)
        if most is None:
            continue
        least = generator.max_tokens + 1 if limit == "tokens_per_minute" else 1
        if most // n < least:
            raise InputError(
                f"augment.{name}.{limit}: found {most:,}, which cannot be divided among {n} processes. Raise it, or lower "
                f"--jobs to at most {max(1, most // least)}."
            )
        raw[limit] = most // n
    return raw


def _run_shards(shards: Iterator[Shard], start_executor: Callable[[int], Executor]) -> list[Mapping[str, Any]]:
    """Run the shards to their end; return their counts. Raises `EndpointError` with the first error."""
    waiting = list(shards)
    counts: list[Mapping[str, Any]] = []
    errors: list[str] = []
    n_running = 0
    with start_executor(len(waiting)) as executor, Progress("augment", len(waiting), "shards") as progress:
        while waiting or n_running:
            while waiting and executor.has_room(waiting[0]):
                executor.submit(waiting.pop(0))
                n_running += 1
            for outcome in executor.wait():
                n_running -= 1
                progress.advance()
                if outcome.result is None:
                    errors.append(f"{outcome.task.label}: {outcome.error}")
                else:
                    counts.append(outcome.result)
    if errors:
        more = f" So did {len(errors) - 1} more." if len(errors) > 1 else ""
        raise EndpointError(f"{errors[0]}{more} Stored answers are kept; the same command resumes.", fatal=True)
    return counts


def shard_executor(kind: str, n_jobs: int) -> Callable[[int], Executor]:
    """Return a function (number of shards) -> executor: ``local`` processes, or tasks on a ``ray`` cluster.

    Raises `InputError` for another kind, or a number of jobs out of range.
    """
    if not 1 <= n_jobs <= MOST_JOBS:
        raise InputError(f"--jobs: found {n_jobs}, allowed: 1 to {MOST_JOBS}.")
    if kind == "ray":
        return lambda n: RayExecutor()
    if kind != "local":
        raise InputError(f"executor: found {kind!r}, allowed: local, ray.")
    return lambda n: LocalExecutor(n, 0, _PRELOAD)
