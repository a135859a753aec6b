"""Runs a study: a whole experiment from one recipe to its report, in phases; or shows its plan."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.disk import (
    FORMAT_VERSION,
    content_id,
    lock_dir,
    read_json,
    write_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError, Problem
from kinject.eval.judge import read_accuracy
from kinject.eval.plan import role_of
from kinject.executors import LOG
from kinject.recipe import StudyRecipe, is_model
from kinject.recipe.eval_section import ClaimSection, StudySection
from kinject.recipe.makers import command_for
from kinject.report.files import write_report
from kinject.results import Choice, Claim, Report, Role, Sweep, UnscoredResult, to_json
from kinject.study.analysis import (
    Evidence,
    judge_claims,
    make_failures,
    make_prices,
    summarize_arms,
)
from kinject.study.arms import (
    Arm,
    arm_infos,
    check_inputs,
    check_shared_recipes,
    expand_arms,
    make_sweeps,
)
from kinject.study.power import render_power
from kinject.study.records import AskSetting, Records, changed_answers
from kinject.study.scheduler import (
    SplitQuestions,
    StartExecutor,
    Study,
    family_warnings,
    make_costs,
    open_study,
    render_stages,
)
from kinject.study.stages import ArmRun, Stage
from kinject.terminal import show
from kinject.types import ArmName, Question


def run_study(recipe: StudyRecipe, start_executor: StartExecutor) -> tuple[Report, Path]:
    """Run the unfinished stages of the study and write its report; return result and page.

    Failed stages are listed in `Report.failures`; the others finish. Raises `RecipeError`,
    `InputError` or `DiskError` for faults that make the whole study impossible, `KeyboardInterrupt`
    after Ctrl-C; finished stages are kept.
    """
    with lock_dir(recipe.run_dir):
        study = open_study(recipe)
        check_inputs(recipe)
        check_shared_recipes(recipe, study.expanded)
        for line in family_warnings(study):
            show(f"warning: {line}", file=sys.stderr)
        declared = _declare(study)
        with ExitStack() as stack:  # the executor starts with the first stage that has to run
            start = cache(lambda: stack.enter_context(start_executor()))
            study = Study(recipe, study.eval_recipe, study.question_sets, study.expanded, start)
            _run_phases(study, lambda study: _before_test(study, declared))
        records = _read_records(study)
        questions = {item.name: _read_questions(item.test) for item in study.question_sets}
        result = analyse(study, records, questions)
        write_json(
            recipe.run_dir / "report.json", {"format_version": FORMAT_VERSION, **to_json(result)}
        )
        changed = changed_answers(records, study.arms, questions, study.chosen_k)
        write_jsonl(recipe.run_dir / "flips.jsonl", changed)
        page = write_report(recipe.run_dir, result)
        counts = {
            "arms": len(result.arms),
            "failures": len(result.failures),
            "stages": len(study.status.stages),
        }
        write_manifest(
            recipe.run_dir / "manifest.json",
            stage="study",
            inputs={},
            recipe=recipe.raw,
            counts=counts,
        )
        return result, page


def _declare(study: Study) -> dict[str, float]:
    """Return when each claim was declared first, by any study with these stages: a file beside them
    records it.

    A claim is its fields without the words, with the arms and the sweep that it names.
    """
    section, declared = study.recipe.study, {}
    for name, claim in (section.claims or {}).items():
        arms = [ArmName.parse(arm) for arm in (claim.arm, claim.baseline) if isinstance(arm, str)]
        sweeps = {sweep: (section.sweeps or {})[sweep] for sweep in _sweeps_of(claim)}
        meant = (
            replace(claim, statement="", source=""), *(section.arms.get(name) for name, _ in arms), *sweeps.values()
        )  # fmt: skip
        fields = [asdict(item) for item in meant if item is not None]
        retrievals = section.retrievals or {}
        fields += [dict(retrievals[name]) for _, name in arms if name in retrievals]
        path = (
            study.planner.cache_dir / "claims" / f"{content_id('claim', section.eval, fields)}.json"
        )
        if not path.is_file():
            write_json(path, {"declared": time.time()})
        declared[name] = float(
            read_json(path, "Delete it, and its claim counts as declared now.")["declared"]
        )
    return declared


def _sweeps_of(claim: ClaimSection) -> list[str]:
    """Return the sweeps whose points a claim compares."""
    points = [
        name for arm in (claim.arm, claim.baseline) if isinstance(arm, Mapping) for name in arm
    ]
    return [*points, *([claim.sweep] if claim.sweep else [])]


def _before_test(study: Study, declared: Mapping[str, float]) -> None:
    """Find the claims that were declared when all arms that they compare had answered; write
    choices.json."""
    late, section = set(), study.recipe.study
    model = next(iter(section.models))
    for name, claim in (section.claims or {}).items():
        names = {
            ArmName.parse(arm).answers_of
            for arm in (claim.arm, claim.baseline)
            if isinstance(arm, str)
        }
        names |= {
            point.arm
            for sweep in _sweeps_of(claim)
            for point in study.expanded.sweeps.get((model, sweep), ())
        }
        runs = [run for run in study.runs if run.arm.model == model and run.arm.name in names]
        markers = [_on_test(study, run).evaluations[-1].marker for run in runs]
        if markers and all(
            marker.is_file() and marker.stat().st_mtime < declared[name] for marker in markers
        ):
            late.add(name)
    study.late_claims = frozenset(late)
    choices = [asdict(choice) for choice in study.choices]
    write_json(
        study.recipe.run_dir / "choices.json", {"choices": choices, "declared": dict(declared)}
    )


def _run_phases(study: Study, before_test: Callable[[Study], None]) -> None:
    """Run all phases; `before_test` is called when every choice is made and no test question has
    been read."""
    _set_up(study)
    _measure_judge(study)
    _tune(study)
    _plan_arms(study)
    study.run_stages([stage for run in study.runs for stage in run.all_stages], "training")
    _choose_k(study)
    before_test(study)
    _evaluate_on_test(study)


def _set_up(study: Study) -> None:
    """Run the stages of study.setup and study.models. Raises `InputError` if one fails: all others
    depend on them."""
    for stages in study.planner.setup_stages():
        _run_first(study, stages, "setup")
    for name in study.recipe.study.models if study.start_executor is not None else ():
        path = study.planner.model_dir(name)
        if not is_model(path):
            command = command_for(path)
            fix = f"Make it first: {command}" if command else "Check the path."
            message = f"found {path!r}, but nothing is there. {fix}"
            study.recipe.raise_any([Problem(("study", "models", name), message)])


def _run_first(study: Study, stages: Sequence[Stage], title: str) -> None:
    """Run stages on which all others depend. Raises `InputError` if one fails."""
    study.run_stages(stages, title)
    failure = study.status.first_failure(stages)
    if failure is not None:
        raise InputError(f"{failure[0].recipe}: {failure[1]} (its log: {failure[0].folder / LOG})")


def _measure_judge(study: Study) -> None:
    """Measure the judge of written answers once, on answers planted for all questions, if the
    recipe names one."""
    if study.evaluation.judge is None:
        return
    entries = {item.name: item.test for item in study.question_sets}
    entries |= {
        f"{item.name} (validation)": item.validation
        for item in study.question_sets
        if item.validation
    }
    study.judge = study.planner.judge_stage(entries)
    _run_first(study, [study.judge], "measuring the judge")


def _tune(study: Study) -> None:
    """Evaluate every value of each grid on validation questions and take the best; of equal values,
    the first.

    Then expand the arms with the chosen values. Raises `InputError` if every value failed.
    """
    grids = {
        key: [
            (value, [_add_validation(study, study.plan_run(arm, seed)) for seed in arm.seeds])
            for value, arm in grid
        ]
        for key, grid in study.expanded.grids.items()
    }
    stages = [
        stage
        for grid in grids.values()
        for _, runs in grid
        for run in runs
        for stage in run.all_stages
    ]
    study.run_stages(stages, "tuning", is_last=True)
    for (model, name), grid in grids.items():
        item = (study.recipe.study.tune or {})[name]
        candidates = []
        for value, runs in grid:
            finished = [run for run in runs if study.status.all_done(run.all_stages)]
            if finished:
                rates = [_rate(study, finished, question_set, 0) for question_set in item.sets()]
                scored = [rate for rate in rates if rate is not None]
                if len(scored) == len(rates):
                    candidates.append((value, *_pool(scored)))
                else:
                    study.diverged.append(
                        f"{item.key} {value} of {item.arm} ({model}) diverged: it was not a candidate"
                    )
        if candidates:
            best = _best(candidates)
            at_edge = len(grid) > 1 and best in (grid[0][0], grid[-1][0])
            choice_key = (model, item.key, item.arm, ", ".join(item.sets()))
            study.choices.append(Choice(*choice_key, tuple(candidates), best, at_edge))
            study.tuned[model, name] = best
        elif study.start_executor is not None:
            failure = study.status.first_failure(
                [stage for _, runs in grid for run in runs for stage in run.all_stages]
            )
            first = (
                f"{failure[0].label}: {failure[1]} (its log: {failure[0].folder / LOG})"
                if failure
                else "it diverged"
            )
            raise InputError(
                f"study.tune.{name}: every value failed for {model}; the first: {first}"
            )
    if study.tuned:
        study.expanded = expand_arms(study.recipe.study, study.tuned)


def _plan_arms(study: Study) -> None:
    study.runs = [study.plan_run(arm, seed) for arm in study.arms for seed in arm.seeds]


def _choose_k(study: Study) -> None:
    """Evaluate each K on validation questions and take the best for each arm and question set.

    A set without validation questions gets the K of the first set that has some. A single K needs
    no evaluation.
    """
    if not study.ks:
        return
    validated = [item for item in study.question_sets if item.validation is not None]
    several = len(study.ks) > 1
    if several and validated:
        study.runs = [_add_validation(study, run) if run.arm.rag else run for run in study.runs]
        study.run_stages([stage for run in study.runs for stage in run.evaluations], "choosing K")
    for arm in (arm for arm in study.arms if arm.rag):
        for item in validated if several else ():
            _choose_k_of_set(study, arm, item)
        chosen = [study.chosen_k.get((arm.model, arm.name, item.name)) for item in validated]
        default = next((k for k in chosen if k is not None), None) if several else study.ks[0]
        for item in study.question_sets:
            if default is not None:
                study.chosen_k.setdefault((arm.model, arm.name, item.name), default)


def _choose_k_of_set(study: Study, arm: Arm, item: SplitQuestions) -> None:
    runs = [run for run in study.runs if run.arm == arm and study.status.all_done(run.all_stages)]
    if runs:
        rates = {k: _rate(study, runs, item.name, k) for k in study.ks}
        candidates = [(k, *rate) for k, rate in rates.items() if rate is not None]
        if not candidates:
            study.diverged.append(
                f"no K was chosen for {arm.name} on {item.name}: no validation question has a score"
            )
            return
        best = _best(candidates)
        at_edge = best in (study.ks[0], study.ks[-1]) and best > 1  # there is no smaller one than 1
        choice_key = (arm.model, "k", arm.name, item.name)
        study.choices.append(Choice(*choice_key, tuple(candidates), best, at_edge))
        study.chosen_k[arm.model, arm.name, item.name] = best


def _add_validation(study: Study, run: ArmRun) -> ArmRun:
    """Return `run` with the stage that evaluates it on the validation questions."""
    questions = {
        item.name: item.validation for item in study.question_sets if item.validation is not None
    }
    return replace(
        run, evaluations=(study.planner.eval_stage(run, "validation", questions, study.judge),)
    )


def _best(candidates: Sequence[tuple[Any, float, int]]) -> Any:
    """Return the value with most right answers, the first of equals."""
    return max(candidates, key=lambda candidate: candidate[1])[0]


def _rate(
    study: Study, runs: Sequence[ArmRun], question_set: str, k: int
) -> tuple[float, int] | None:
    """Return how often answers of `runs` (the seeds of one arm) to validation questions are right,
    and their number.

    None if no question has a score, or none of a seed.
    """
    records = Records(study.evaluation.scores)
    for run in runs:
        records.read(
            run.arm.model, run.arm.name, run.seed, run.evaluations[0].folder, run.arm.retrieval
        )
    arm = runs[0].arm
    setting = AskSetting(question_set, *study.prompt_format(question_set), k)
    is_asked = setting in records.settings(arm.model, arm.name)
    if not is_asked or len(records.seeds(arm.model, arm.name)) < len(runs):
        return None
    matrix = records.matrix(arm.model, arm.name, setting, "")
    return round(matrix.mean(), 6), len(matrix.question_ids)


def _pool(rates: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return the rate over the questions of several sets, and their number."""
    n_questions = sum(n for _, n in rates)
    return round(sum(rate * n for rate, n in rates) / n_questions, 6), n_questions


def _on_test(study: Study, run: ArmRun) -> ArmRun:
    """Return `run` with the stage that evaluates it on the test questions."""
    questions = {item.name: item.test for item in study.question_sets}
    return replace(
        run,
        evaluations=(
            *run.evaluations,
            study.planner.eval_stage(run, "test", questions, study.judge),
        ),
    )


def _evaluate_on_test(study: Study) -> None:
    study.runs = [_on_test(study, run) for run in study.runs]
    study.run_stages(
        [stage for run in study.runs for stage in run.all_stages], "evaluating", is_last=True
    )


def analyse(study: Study, records: Records, questions: Mapping[str, Sequence[Question]]) -> Report:
    """Return the result of a study whose stages have run; at least one arm must have been
    evaluated."""
    recipe, section = study.recipe, study.recipe.study
    arms = [arm for arm in study.arms if records.seeds(arm.model, arm.name)]
    roles = {item.name: role_of(item.role, questions[item.name]) for item in study.question_sets}
    results = summarize_arms(records, arms, roles, study.chosen_k)
    sweeps = make_sweeps(section, study.expanded)
    costs = make_costs(study.runs, study.status, study.judge)
    prices = (
        make_prices(records, arms, costs, study.chosen_k, section.price) if section.price else ()
    )
    return Report(
        kind="study", title=section.title, description=section.description, seeds=section.seeds, models=tuple(section.models),
        model_sources=_model_sources(section),
        arms=arm_infos(study.arms), results=tuple(results), sweeps=tuple(sweeps),
        choices=tuple(study.choices),
        claims=tuple(_claims(study, records, sweeps, roles)), costs=tuple(costs), prices=tuple(prices),
        failures=tuple(make_failures(study.runs, study.status, records)),
        unscored=tuple(
            UnscoredResult(
                model, arm, setting.question_set, roles[setting.question_set],
                setting.format, setting.shots, setting.k, n, records.score(setting), seed,
            ) for model, arm, seed, setting, n in records.unscored
        ),
        logs=tuple(_training_log_paths(study.runs, recipe.run_dir)), notes=tuple(_notes(study)),
        recalls=tuple(records.recalls.values()),
        shortcuts=tuple(records.shortcuts.values()), perplexities=records.mean_perplexities(), written=records.written,
        judge=read_accuracy(study.judge.folder) if study.judge else None,
        commands=(f"kinject study {recipe.path}",), versions=records.versions,
    )  # fmt: skip


def _training_log_paths(runs: Sequence[ArmRun], run_dir: Path) -> list[tuple[str, str, int, str]]:
    """Return (model, arm, seed, log.jsonl as seen from `run_dir`) of each finished training run."""
    logs = [(run, run.train.folder / "log.jsonl") for run in runs if run.train is not None]
    return [
        (run.arm.model, run.arm.name, run.seed, os.path.relpath(path, run_dir))
        for run, path in logs
        if path.is_file()
    ]


def _read_records(study: Study) -> Records:
    """Return the test answers of every run that finished."""
    records = Records(study.evaluation.scores)
    for run in study.runs:
        if study.status.all_done(run.all_stages):
            arm, folder = run.arm, run.evaluations[-1].folder
            records.read(arm.model, arm.name, run.seed, folder, arm.retrieval)
            records.read_report(arm.model, arm.name, folder, arm.retrieval)
    return records


def _model_sources(section: StudySection) -> dict[str, str]:
    """Return the folder or hub name of each base model that the study does not make itself."""
    sources = {
        name: item if isinstance(item, str) else item.path for name, item in section.models.items()
    }
    return {name: source for name, source in sources.items() if source is not None}


def _read_questions(entry: Mapping[str, Any]) -> list[Question]:
    return read_questions(Path(entry["path"]), entry["layout"])


def _evidence(
    study: Study, records: Records, sweeps: Sequence[Sweep], roles: Mapping[str, Role]
) -> Evidence:
    """Return the evidence for claims, which are judged on the first base model."""
    model = next(iter(study.recipe.study.models))
    chosen_k = {
        (arm, name): k for (other, arm, name), k in study.chosen_k.items() if other == model
    }
    by_name = {sweep.name: sweep for sweep in sweeps if sweep.model == model}
    return Evidence(records, model, study.prompt_format, chosen_k, by_name, roles)


def _power(study: Study) -> Iterator[str]:
    """Yield what each claim can tell, by the answers of finished stages where there are any."""
    questions = {item.name: _read_questions(item.test) for item in study.question_sets}
    roles = {item.name: role_of(item.role, questions[item.name]) for item in study.question_sets}
    sweeps = make_sweeps(study.recipe.study, study.expanded)
    evidence = _evidence(study, _read_records(study), sweeps, roles)
    section = study.recipe.study
    yield from render_power(section.claims or {}, evidence, questions, len(section.seeds))


def _claims(
    study: Study, records: Records, sweeps: Sequence[Sweep], roles: Mapping[str, Role]
) -> list[Claim]:
    """Return the study's claims, judged on the first base model."""
    claims = judge_claims(study.recipe.study.claims or {}, _evidence(study, records, sweeps, roles))
    return [replace(claim, declared_late=claim.name in study.late_claims) for claim in claims]


def _notes(study: Study) -> list[str]:
    section = study.recipe.study
    per_seed = section.new_paraphrases_per_seed
    notes = [
        "choices and claims are judged in the first format, and the first number of shots, of each question set",
        "seeds vary the order of training"
        + (" and the paraphrases" if per_seed else "; every seed trains on the same paraphrases"),
    ]
    notes += [
        f"{name}: the questions on {fraction:.0%} of the documents were used for choices and are not reported"
        for name, fraction in (section.validation or {}).items()
    ]
    notes += [
        f"{item.name}: {item.n_left_out:,} questions left out, on documents that other sets choose with"
        for item in study.question_sets if item.n_left_out
    ]  # fmt: skip
    notes += study.diverged
    return notes


def render_plan(recipe: StudyRecipe) -> str:
    """Return the plan of a study as text: its arms and stages, which are done, and the money to
    come.

    Nothing is run; only the files of split questions are written. Money is counted as `kinject
    augment --dry-run` does. Raises as `run_study` does for faults in recipes.
    """
    study = open_study(recipe)
    check_shared_recipes(recipe, study.expanded)
    setup = [stage for stages in study.planner.setup_stages() for stage in stages]
    study.run_stages(setup, "")
    is_set_up = study.status.all_done(setup)
    for phase in (_measure_judge, _tune, _plan_arms, _choose_k, _evaluate_on_test):
        phase(study)
    lines = [recipe.study.title, recipe.study.description.strip(), "", render_stages(study)]
    if not is_set_up:
        lines.append("study.setup comes first; stages that read its files are counted as not done")
    untuned = [
        name
        for name in recipe.study.tune or {}
        if not any(name == tuned for _, tuned in study.tuned)
    ]
    if untuned:
        lines.append(
            f"tuned on validation questions first: {', '.join(untuned)}; arms then train with the chosen value"
        )
    lines += [f"warning: {line}" for line in family_warnings(study)]
    lines += _power(study)
    return "\n".join(lines)
