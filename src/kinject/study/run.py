"""`kinject study`: a whole experiment from one recipe to its report."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from kinject.augment.plan import preview
from kinject.corpus.questions import read_questions
from kinject.disk import (
    FORMAT_VERSION,
    content_id,
    lock_dir,
    read_checked_json,
    read_manifest,
    write_checked_json,
    write_json,
    write_manifest,
)
from kinject.recipe import StudyRecipe, read_recipe
from kinject.recipe.study_section import StudySection
from kinject.report import read_report, write_report
from kinject.results import ArmResult, Choice, Claim, Report, Sweep, to_json
from kinject.study.analysis import (
    arm_infos,
    make_costs,
    make_exposures,
    make_failures,
    make_sweeps,
    question_results,
    summarize_arms,
    training_log_paths,
    versions_of,
)
from kinject.study.check import check_inputs, check_shared_recipes
from kinject.study.choices import (
    ExecutorFactory,
    Study,
    ask_test,
    choose,
    choose_k,
    open_study,
    plan_runs,
    read_records,
    run_phases,
)
from kinject.study.claims import Evidence, judge_claims
from kinject.study.records import Records
from kinject.study.scaling import Measures, count_parameters, make_scaling
from kinject.study.stages import DONE, Stage
from kinject.terminal import aligned, duration
from kinject.types import Question

PAGE = "report.html"


def run_study(recipe: StudyRecipe, make_executor: ExecutorFactory) -> tuple[Report, Path, bool]:
    """Run what is missing of the study, write its report; return (result, page, whether all was there already).

    Stages that fail are told in `Report.failures`; the others finish. Raises `RecipeError`, `InputError` or
    `DiskError` for what makes the whole study impossible, `KeyboardInterrupt` after Ctrl-C: finished stages are kept.
    """
    with lock_dir(recipe.run_dir):
        there = _finished(recipe)
        if there is not None:
            return there, recipe.run_dir / PAGE, True
        check_inputs(recipe)
        check_shared_recipes(recipe)
        started = time.monotonic()
        with ExitStack() as stack:
            found = open_study(recipe, make_executor, stack)
            run_phases(found, _write_choices)
        result = analyse(found, time.monotonic() - started)
        write_checked_json(recipe.run_dir / "report.json", {"format_version": FORMAT_VERSION, **to_json(result)})
        page = write_report(recipe.run_dir, result)
        counts = {"arms": len(result.arms), "failures": len(result.failures), "stages": len(found.status.stages)}
        write_manifest(
            recipe.run_dir / "manifest.json", stage="study", inputs={"fingerprint": _fingerprint(found)},
            recipe=recipe.raw, counts=counts,
        )  # fmt: skip
        return result, page, False


def _finished(recipe: StudyRecipe) -> Report | None:
    """Return the result of this very study where it is whole on disk."""
    manifest = read_manifest(recipe.run_dir / "manifest.json")
    if manifest is None or not (recipe.run_dir / PAGE).is_file():
        return None
    with ExitStack() as stack:
        found = open_study(recipe, None, stack)
        run_phases(found, lambda _: None)
    whole = all(identity in found.status.done for identity in found.status.stages)  # what failed is tried again
    same = whole and manifest["inputs"].get("fingerprint") == _fingerprint(found)
    return read_report(recipe.run_dir / "report.json") if same else None


def _write_choices(found: Study) -> None:
    write_json(found.recipe.run_dir / "choices.json", [asdict(choice) for choice in found.choices])


def _fingerprint(found: Study) -> str:
    """Return a hash of everything that the report is made from: stages with their outcome, and the recipe."""
    status = found.status
    states = {identity: identity in status.done for identity in sorted(status.stages)}
    return content_id("study 1", found.recipe.raw, states)


def analyse(found: Study, seconds: float) -> Report:
    """Return the result of a study whose stages have run; needs one arm that was asked."""
    section, recipe = found.recipe.study, found.recipe
    records = read_records(found)
    arms = [arm for arm in found.arms if records.seeds(arm.model, arm.name)]
    roles = {item.name: item.role for item in found.sets}
    results = summarize_arms(records, arms, roles, found.chosen_k)
    sweeps = make_sweeps(section, found.arms)
    questions = {item.name: _questions(item.test) for item in found.sets}
    scaling = None
    if section.scaling is not None:
        sizes = {name: count_parameters(Path(found.planner.model_dir(name))) for name in section.models}
        scaling = make_scaling(section.scaling, roles, Measures(records, found.runs, sweeps, found.head, sizes))
    return Report(
        kind="study", title=section.title, description=section.description, seeds=section.seeds, models=tuple(section.models),
        model_sources=_sources(section),
        arms=arm_infos(found.arms), results=tuple(results), sweeps=tuple(sweeps),
        choices=tuple(_with_best_on_test(choice, results, found.head) for choice in found.choices),
        claims=tuple(_claims(found, records, sweeps)), costs=tuple(make_costs(found.runs, found.status)),
        questions=tuple(question_results(records, arms, questions, found.chosen_k)) if arms else (),
        exposures=tuple(make_exposures(records, found.runs)), failures=tuple(make_failures(found.runs, found.status)),
        logs=tuple(training_log_paths(found.runs, recipe.run_dir)), notes=tuple(_notes(found)),
        scaling=scaling, commands=(f"kinject study {recipe.path}",), versions=versions_of(found.runs), seconds=round(seconds, 1),
    )  # fmt: skip


def _sources(section: StudySection) -> dict[str, str]:
    """Return where each base model comes from that the study does not make."""
    sources = {name: item if isinstance(item, str) else item.path for name, item in section.models.items()}
    return {name: source for name, source in sources.items() if source is not None}


def _questions(entry: Mapping[str, Any]) -> list[Question]:
    path = Path(entry["path"])
    return [] if path.suffix in (".yaml", ".yml") else read_questions(path, entry["layout"], entry["n_choices"])


def _claims(found: Study, records: Records, sweeps: list[Sweep]) -> list[Claim]:
    section = found.recipe.study
    model = next(iter(section.models))
    format, shots = found.head
    chosen = {(arm, name): k for (of, arm, name), k in found.chosen_k.items() if of == model}
    own = {sweep.name: sweep for sweep in sweeps if sweep.model == model}
    return judge_claims(section.claims or {}, Evidence(records, model, format, shots, chosen, own))


def _with_best_on_test(choice: Choice, results: list[ArmResult], head: tuple[str, int]) -> Choice:
    """Return `choice` with the K that the test questions would have chosen; other keys are not asked on test."""
    place = (choice.model, choice.arm, choice.question_set, *head)
    asked = [
        result for result in results if choice.key == "k" and not result.subject and result.k
        and (result.model, result.arm, result.question_set, result.format, result.shots) == place
    ]  # fmt: skip
    return replace(choice, best_on_test=max(asked, key=lambda result: result.accuracy).k) if asked else choice


def _notes(found: Study) -> list[str]:
    section, format_and_shots = found.recipe.study, found.head
    notes = [
        f"choices and claims are by the first way of asking: {format_and_shots[0]}, {format_and_shots[1]} shots",
        "seeds vary the order of training"
        + (" and the rewritings" if section.new_paraphrases_per_seed else "; every seed trains on the same rewritings"),
    ]
    for name, share in (section.validation or {}).items():
        notes.append(
            f"{name}: the questions on {share:.0%} of the documents were kept for choices and are not reported"
        )
    if found.ks and len(found.ks) > 1 and all(item.validation is None for item in found.sets):
        notes.append("several K were asked and no validation questions kept: no K is chosen, each is shown")
    if len(section.models) > 1 and section.claims:
        notes.append(f"claims are judged on the first base model, {next(iter(section.models))}")
    return notes


_KINDS = ("prepare", "augment", "corpus", "train", "merge", "eval")


def render_plan(recipe: StudyRecipe) -> str:
    """Return what `study` would run and what it would find done: arms, stages, tokens, time, money, as text.

    Runs nothing and asks nothing; only the split question files are written. Time is that of finished stages of the
    same kind, money that of `kinject augment --dry-run`. Raises as `study` does for recipes.
    """
    with ExitStack() as stack:
        found = open_study(recipe, None, stack)
        first = [stage for stages in found.planner.prepare_stages() for stage in stages]
        found.do(first, "")
        ready = found.status.all_done(first)
        for phase in (choose, plan_runs, choose_k, ask_test):
            phase(found)
    stages = list(found.status.stages.values())
    lines = [
        recipe.study.title,
        recipe.study.description.strip(),
        "",
        _arm_table(found),
        "",
        _kind_table(found, stages),
    ]
    missing = [stage for stage in stages if stage.id not in found.status.done]
    lines += ["", _estimate(found, missing)]
    if not ready:
        lines.append("study.setup comes first; stages that read what it writes are counted as not done")
    unchosen = [name for name in recipe.study.tune or {} if not any(of == name for _, of in found.chosen)]
    if unchosen:
        lines.append(
            f"chosen on validation questions first: {', '.join(unchosen)}; arms then train with the chosen value"
        )
    return "\n".join(line for line in lines if line is not None)


def _arm_table(found: Study) -> str:
    rows: list[tuple[str, ...]] = [("arm", "model", "seeds", "stages", "done", "differs in")]
    for arm in found.arms:
        own = {stage.id for run in found.runs if run.stages.arm == arm for stage in run.all}
        n_done = sum(identity in found.status.done for identity in own)
        differs = ", ".join(f"{key}={json.dumps(value)}" for key, value in arm.overrides.items())
        corpus = f"corpus={arm.corpus} " if arm.corpus not in ("", "augmented") else ""
        seeds = ",".join(map(str, arm.seeds)) if arm.trained else ""
        rows.append((arm.name, arm.model, seeds, str(len(own)), str(n_done), (corpus + differs)[:70]))
    return aligned(rows, frozenset({3, 4}))


def _kind_table(found: Study, stages: Sequence[Stage]) -> str:
    rows: list[tuple[str, ...]] = [("stage", "in all", "done", "to run")]
    for kind in _KINDS:
        own = [stage for stage in stages if stage.kind == kind]
        n_done = sum(stage.id in found.status.done for stage in own)
        if own:
            rows.append((kind, str(len(own)), str(n_done), str(len(own) - n_done)))
    return aligned(rows, frozenset({1, 2, 3}))


def _estimate(found: Study, missing: Sequence[Stage]) -> str:
    if not missing:
        return "everything is done: the study would only write its report"
    seconds, tokens, unknown = 0.0, 0, set[str]()
    for kind in {stage.kind for stage in missing}:
        n = sum(stage.kind == kind for stage in missing)
        folder, cure = found.planner.cache_dir / kind, "Delete its folder to do this stage again."
        known = [read_checked_json(path, cure) for path in folder.glob(f"*/{DONE}")]
        if known:
            seconds += n * fmean(float(done["seconds"]) for done in known)
            tokens += round(n * fmean(int(done["tokens"]) for done in known))
        else:
            unknown.add(kind)
    cost = sum(
        preview(read_recipe(Path(stage.recipe), stage.overrides, "augment")).cost
        for stage in missing if stage.kind == "augment"
    )  # fmt: skip
    told = (
        f"about {tokens:,} tokens and {duration(seconds)} of work, by stages of the same kind that are done"
        if seconds
        else ""
    )
    untold = f"no finished stage tells the time of: {', '.join(sorted(unknown))}" if unknown else ""
    money = f"rewritings: at most {cost:.2f} in the currency of the prices" if cost else ""
    return "; ".join(part for part in (told, untold, money) if part)
