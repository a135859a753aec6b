"""Runs a study: a whole experiment from one recipe to its report, in phases; or shows its plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache
from itertools import chain
from operator import itemgetter
from pathlib import Path

from kinject.corpus.questions import about_sets, read_questions
from kinject.corpus.spans import Json
from kinject.disk import (
    FORMAT_VERSION,
    lock_dir,
    write_json,
    write_jsonl,
    write_manifest,
)
from kinject.errors import InputError, Problem
from kinject.eval.judge import read_accuracy
from kinject.eval.plan import role_of
from kinject.executors import LOG
from kinject.recipe import StudyRecipe, is_model
from kinject.recipe.makers import command_for
from kinject.recipe.sections import ClaimSection, StudySection
from kinject.report.files import write_report
from kinject.results import Choice, Claim, Report, Role, Sweep, UnscoredResult, to_json
from kinject.stats.advice import advise
from kinject.study.analysis import (
    beside_published,
    count_parameters,
    make_failures,
    make_held_bits,
    make_prices,
    published_by,
    summarize_arms,
    training_logs,
)
from kinject.study.arms import (
    Arm,
    arm_infos,
    base_models,
    check_inputs,
    expand_arms,
    make_sweeps,
    n_trainings,
)
from kinject.study.claims import (
    Evidence,
    declare_claims,
    judge_claims,
    named_arms,
    render_power,
    sweeps_of,
)
from kinject.study.outlook import render_outlook
from kinject.study.planner import ArmRun, check_recipes
from kinject.study.records import AskSetting, Records, changed_answers, find_twins
from kinject.study.scheduler import (
    SplitQuestions,
    StageExecutor,
    StartExecutor,
    Study,
    family_warnings,
    make_costs,
    open_study,
    preview_paraphrases,
    render_stages,
)
from kinject.study.slurm import JobOptions, render_jobs
from kinject.study.stages import Stage
from kinject.terminal import format_count, show
from kinject.types import ArmName, Price, Question


def run_study(recipe: StudyRecipe, start_executor: StartExecutor) -> tuple[Report, Path]:
    """Run the unfinished stages of the study and write its report; return result and page.

    Failed stages are listed in `Report.failures`; the others finish. Raises `RecipeError`,
    `InputError` or `DiskError` for faults that make the whole study impossible, `KeyboardInterrupt`
    after Ctrl-C; finished stages are kept.
    """
    with lock_dir(recipe.run_dir, stage="study"):
        study = open_study(recipe)
        check_inputs(recipe)
        check_recipes(recipe, study.expanded)
        # Before it trains, while the recipe can still ask about more documents.
        for line in family_warnings(study):
            show(f"warning: {line}", file=sys.stderr)
        # Now, not with the report: the time decides whether a claim was declared late.
        declared = declare_claims(study.recipe.study, study.evaluation)
        with ExitStack() as stack:

            @cache  # the executor starts with the first stage that has to run
            def start() -> StageExecutor:
                return stack.enter_context(start_executor())

            study = replace(study, start_executor=start)
            _run_phases(study, declared)
        questions = {
            item.name: read_questions(Path(item.test["path"]), item.test["layout"])
            for item in study.question_sets
        }
        records = _read_records(study, questions)
        result = analyse(study, records, questions)
        page = _write_results(study, records, result, questions)
        return result, page


def _write_results(
    study: Study, records: Records, result: Report, questions: Mapping[str, Sequence[Question]]
) -> Path:
    """Write report.json, flips.jsonl, the page and, last, the manifest; return the page."""
    folder = study.recipe.run_dir
    write_json(folder / "report.json", {"format_version": FORMAT_VERSION, **to_json(result)})
    changed = changed_answers(records, study.arms, questions, study.chosen_k)
    write_jsonl(folder / "flips.jsonl", changed)
    page = write_report(folder, result)
    counts = {
        "arms": len(result.arms),
        "failures": len(result.failures),
        "stages": len(study.status.stages),
    }
    write_manifest(
        folder / "manifest.json",
        stage="study",
        inputs={},
        recipe=study.recipe.raw,
        counts=counts,
    )
    return page


def _record_choices(study: Study, declared: Mapping[str, float]) -> None:
    """Find the claims that were declared when all arms that they compare had answered; write
    choices.json."""
    claims = study.recipe.study.claims or {}
    study.late_claims = frozenset(
        name for name, claim in claims.items() if _is_late(study, claim, declared[name])
    )
    choices = [asdict(choice) for choice in study.choices]
    write_json(
        study.recipe.run_dir / "choices.json", {"choices": choices, "declared": dict(declared)}
    )


def _is_late(study: Study, claim: ClaimSection, declared: float) -> bool:
    """Return whether every arm of the claim had answered test questions before it was declared."""
    model = next(iter(study.recipe.study.models))
    names = {ArmName.parse(arm).answers_of for arm in named_arms(claim)}
    for sweep in sweeps_of(claim):
        points = study.expanded.sweeps.get((model, sweep), ())
        names.update(point.arm for point in points)
    ends = [
        _on_test(study, run).evaluations[-1].ended()
        for run in study.runs
        if run.arm.model == model and run.arm.name in names
    ]
    if not ends:
        return False
    return all(end is not None and end < declared for end in ends)


def _run_phases(study: Study, declared: Mapping[str, float]) -> None:
    """Run all phases. Claims and choices are recorded when every choice is made and no test
    question has been read (of models that are deleted: no choice reads one)."""
    _set_up(study)
    _measure_judge(study)
    _tune(study)
    _plan_arms(study)
    if not study.recipe.study.keep_models:
        _run_one_by_one(study)
    # Trainings have no phase of their own: an evaluation runs beside the next training, where
    # `--jobs` leaves room, and not behind the last one.
    _choose_k(study)
    _record_choices(study, declared)
    _evaluate_on_test(study)


def _all_stages(runs: Sequence[ArmRun]) -> list[Stage]:
    return list(chain.from_iterable(run.all_stages for run in runs))


def _set_up(study: Study) -> None:
    """Run the stages of study.setup and study.models. Raises `InputError` if one fails: all others
    depend on them."""
    for stages in study.planner.setup_stages():
        _run_first(study, stages, "setup")
    if study.start_executor is None:  # a plan: what setup makes is not there yet
        return
    for name in study.recipe.study.models:
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
    for item in study.question_sets:
        if item.validation:
            # Answers to validation questions are graded too.
            entries[f"{item.name} (validation)"] = item.validation
    study.judge = study.planner.judge_stage(entries)
    _run_first(study, [study.judge], "measuring the judge")


def _tune(study: Study) -> None:
    """Evaluate every value of each grid on validation questions and take the best; of equal values,
    the first.

    Then expand the arms with the chosen values. Raises `InputError` if every value failed.
    """
    grids: dict[tuple[str, str], list[tuple[Json, list[ArmRun]]]] = {}
    for key, grid in study.expanded.grids.items():
        grids[key] = []
        for value, arm in grid:
            runs = [_add_validation(study, study.plan_run(arm, seed)) for seed in arm.seeds]
            grids[key].append((value, runs))
    every = list(chain.from_iterable(grids.values()))
    # No arm reads these models: a grid has a seed of its own.
    study.run_stages(_stages_of_grid(every), "tuning", is_last=True)
    for (model, name), values in grids.items():
        _choose_value(study, model, name, values)
    # Without a chosen value the arms are those of before.
    if study.tuned:
        study.expanded = expand_arms(study.recipe.study, study.tuned)


def _stages_of_grid(values: Sequence[tuple[Json, Sequence[ArmRun]]]) -> list[Stage]:
    return list(chain.from_iterable(_all_stages(runs) for _, runs in values))


def _choose_value(
    study: Study, model: str, name: str, grid: Sequence[tuple[Json, Sequence[ArmRun]]]
) -> None:
    """Choose the value of the entry `name` of study.tune for `model`, and record the choice."""
    item = (study.recipe.study.tune or {})[name]
    candidates = []
    for value, runs in grid:
        finished = [run for run in runs if study.status.all_done(run.all_stages)]
        if not finished:
            continue
        # A value counts on all of its sets or not at all, else its rate would be of other
        # questions.
        rate = _rate(study, finished, item.sets(), 0)
        if rate is not None:
            candidates.append((value, *rate))
        else:
            study.diverged.append(
                f"{item.key} {value} of {item.arm} ({model}) diverged: it was not a candidate"
            )
    if candidates:
        best = max(candidates, key=itemgetter(1))[0]
        at_edge = _is_at_end(best, [value for value, _ in grid])
        choice_key = (model, item.key, item.arm, ", ".join(item.sets()))
        study.choices.append(Choice(*choice_key, tuple(candidates), best, at_edge))
        study.tuned[model, name] = best
    # A plan has no answers yet: nothing has failed.
    elif study.start_executor is not None:
        failure = study.status.first_failure(_stages_of_grid(grid))
        first = "it diverged"
        if failure is not None:
            stage, error = failure
            first = f"{stage.label}: {error} (its log: {stage.folder / LOG})"
        raise InputError(f"study.tune.{name}: every value failed for {model}; the first: {first}")


def _plan_arms(study: Study) -> None:
    study.runs = [study.plan_run(arm, seed) for arm in study.arms for seed in arm.seeds]


def _run_one_by_one(study: Study) -> None:
    """Train each arm and ask it all of its questions, validation questions first, before the next
    is trained, and delete its weights when no other arm reads them. The later phases find it done.

    In phases, all models of a study are there at once: 34 models of 7B had 460 GiB. What is chosen
    is the same, since no choice reads an answer to a test question.
    """
    runs = []
    for run in study.runs:
        if run.arm.rag and _chooses_k(study):
            runs.append(_on_test(study, _add_validation(study, run)))
        else:
            runs.append(_on_test(study, run))
    study.run_stages(_all_stages(runs), "arms", is_last=True)


def _chooses_k(study: Study) -> bool:
    """Return whether validation questions choose one of several K."""
    return len(study.ks) > 1 and any(item.chooses_k for item in study.question_sets)


def _choose_k(study: Study) -> None:
    """Evaluate each K on validation questions and take the best for each arm and question set.

    A set without validation questions gets the K of the first set that has some. A single K needs
    no evaluation.
    """
    if not study.ks:
        return
    with_passages = [arm for arm in study.arms if arm.rag]
    if len(study.ks) == 1:
        for arm in with_passages:
            _set_default_k(study, arm, study.ks[0])
        return
    validated = [item for item in study.question_sets if item.chooses_k]
    if _chooses_k(study):
        _evaluate_each_k(study)
    for arm in with_passages:
        for item in validated:
            _choose_k_of_set(study, arm, item)
        for item in validated:
            key = (arm.model, arm.name, item.name)
            if key in study.chosen_k:
                _set_default_k(study, arm, study.chosen_k[key])
                break


def _evaluate_each_k(study: Study) -> None:
    runs = []
    # Only arms with passages have a K to choose.
    for run in study.runs:
        if run.arm.rag:
            runs.append(_add_validation(study, run))
        else:
            runs.append(run)
    study.runs = runs
    study.run_stages(_all_stages(study.runs), "training, choosing K")


def _set_default_k(study: Study, arm: Arm, k: int) -> None:
    """Set the K of an arm for the question sets that have none."""
    for item in study.question_sets:
        study.chosen_k.setdefault((arm.model, arm.name, item.name), k)


def _choose_k_of_set(study: Study, arm: Arm, item: SplitQuestions) -> None:
    runs = [run for run in study.runs if run.arm == arm and study.status.all_done(run.all_stages)]
    if not runs:
        return
    candidates = []
    for k in study.ks:
        rate = _rate(study, runs, [item.name], k)
        if rate is not None:
            candidates.append((k, *rate))
    if not candidates:
        study.diverged.append(
            f"no K was chosen for {arm.name} on {item.name}: no validation question has a score"
        )
        return
    best = max(candidates, key=itemgetter(1))[0]
    at_edge = _is_at_end(best, study.ks) and best > 1  # there is no smaller one than 1
    choice_key = (arm.model, "k", arm.name, item.name)
    study.choices.append(Choice(*choice_key, tuple(candidates), best, at_edge))
    study.chosen_k[arm.model, arm.name, item.name] = best


def _add_validation(study: Study, run: ArmRun) -> ArmRun:
    """Return `run` with the stage that evaluates it on the validation questions."""
    questions = {
        item.name: item.validation for item in study.question_sets if item.validation is not None
    }
    return study.evaluated(run, "validation", questions)


def _is_at_end(best: Json, grid: Sequence[Json]) -> bool:
    """Return whether a better value may lie beyond those of a grid: `best` is one of its ends."""
    # Names and switches have no order, and of a single value nothing is known.
    if len(grid) == 1 or any(isinstance(value, str | bool) for value in grid):
        return False
    numbers = [value for value in grid if isinstance(value, int | float)]
    if len(numbers) == len(grid):
        # A value that widens the grid may stand anywhere in it.
        return best in (min(numbers), max(numbers))
    return best in (grid[0], grid[-1])


def _rate(
    study: Study, runs: Sequence[ArmRun], names: Sequence[str], k: int
) -> tuple[float, int] | None:
    """Return how often answers of `runs` (the seeds of one arm) to the validation questions of the
    sets `names` are right, and their number.

    None if no question of a set has a score, or none of a seed.
    """
    twins = {}
    if len(names) > 1:
        chosen = [item for item in study.question_sets if item.name in names]
        twins = find_twins({item.name: item.validation_questions() for item in chosen})
    records = Records(study.evaluation.scores, twins=twins)
    for run in runs:
        records.read(
            run.arm.model, run.arm.name, run.seed, run.evaluations[0].folder, run.arm.retrieval
        )
    arm = runs[0].arm
    if len(records.seeds(arm.model, arm.name)) < len(runs):
        return None
    settings = [AskSetting(name, *study.prompt_format(name), k) for name in names]
    return records.rate(arm.model, arm.name, settings)


def _on_test(study: Study, run: ArmRun) -> ArmRun:
    """Return `run` with the stage that evaluates it on the test questions."""
    questions = {item.name: item.test for item in study.question_sets}
    return study.evaluated(run, "test", questions)


def _evaluate_on_test(study: Study) -> None:
    study.runs = [_on_test(study, run) for run in study.runs]
    study.run_stages(_all_stages(study.runs), "training, evaluating", is_last=True)


def analyse(study: Study, records: Records, questions: Mapping[str, Sequence[Question]]) -> Report:
    """Return the result of a study whose stages have run; at least one arm was evaluated."""
    recipe, section = study.recipe, study.recipe.study
    arms = [arm for arm in study.arms if records.seeds(arm.model, arm.name)]
    roles = {item.name: role_of(item.role, questions[item.name]) for item in study.question_sets}
    results = summarize_arms(records, arms, roles, study.chosen_k)
    sweeps = make_sweeps(section, study.expanded)
    costs = make_costs(study.runs, study.status, study.judge)
    prices: Sequence[Price] = ()
    if section.price:
        prices = make_prices(records, arms, costs, study.chosen_k, section.price)
    printed = published_by((section.claims or {}).values())
    published = beside_published(printed, results, _model_sources(section))
    folders = {name: Path(study.planner.model_dir(name)) for name in section.models}
    held_bits = make_held_bits(results, count_parameters(folders), study.prompt_format)
    judge = None
    if study.judge:
        judge = read_accuracy(study.judge.folder)
    infos = arm_infos(study.arms)
    return Report(
        kind="study",
        title=section.title,
        description=section.description,
        seeds=section.seeds,
        models=tuple(section.models),
        model_sources=_model_sources(section),
        arms=infos,
        results=tuple(results),
        advice=advise(results, infos),
        about_sets=about_sets(questions),
        sweeps=tuple(sweeps),
        choices=tuple(study.choices),
        claims=tuple(_claims(study, records, sweeps, roles)),
        costs=tuple(costs),
        prices=tuple(prices),
        published=tuple(published),
        held_bits=tuple(held_bits),
        failures=tuple(make_failures(study.runs, study.status, records)),
        unscored=tuple(_unscored(records, roles)),
        logs=tuple(training_logs(study.runs, recipe.run_dir)),
        notes=tuple(_notes(study)),
        recalls=tuple(records.recalls.values()),
        shortcuts=tuple(records.shortcuts.values()),
        perplexities=records.mean_perplexities(),
        written=records.written,
        judge=judge,
        commands=(f"kinject study {recipe.path}",),
        versions=records.versions,
    )


def _unscored(records: Records, roles: Mapping[str, Role]) -> Iterator[UnscoredResult]:
    """Yield the settings in which a seed answered no question with a score: it diverged."""
    for model, arm, seed, setting, n in records.unscored:
        yield UnscoredResult(
            model,
            arm,
            setting.question_set,
            roles[setting.question_set],
            setting.format,
            setting.shots,
            setting.k,
            n,
            records.score(setting),
            seed,
        )


def _read_records(study: Study, questions: Mapping[str, Sequence[Question]]) -> Records:
    """Return the test answers of every run that finished."""
    records = Records(study.evaluation.scores, twins=find_twins(questions))
    for run in study.runs:
        if study.status.all_done(run.all_stages):
            arm, folder = run.arm, run.evaluations[-1].folder
            records.n_trainings[arm.model, arm.name] = n_trainings(arm, study.arms)
            records.read(arm.model, arm.name, run.seed, folder, arm.retrieval)
            records.read_report(arm.model, arm.name, folder, arm.retrieval)
    return records


def _model_sources(section: StudySection) -> dict[str, str]:
    """Return the folder or hub name of each base model that the study does not make itself."""
    models = base_models(section)
    return {name: item.path for name, item in models.items() if item.path is not None}


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
    questions = {item.name: study.asked(item) for item in study.question_sets}
    roles = {item.name: role_of(item.role, questions[item.name]) for item in study.question_sets}
    sweeps = make_sweeps(study.recipe.study, study.expanded)
    evidence = _evidence(study, _read_records(study, questions), sweeps, roles)
    section = study.recipe.study
    claims, n_seeds = section.claims or {}, len(section.seeds)
    yield from render_power(claims, evidence, questions, study.arms, n_seeds)


def _claims(
    study: Study, records: Records, sweeps: Sequence[Sweep], roles: Mapping[str, Role]
) -> list[Claim]:
    """Return the study's claims, judged on the first base model."""
    claims = judge_claims(study.recipe.study.claims or {}, _evidence(study, records, sweeps, roles))
    return [replace(claim, declared_late=claim.name in study.late_claims) for claim in claims]


def _notes(study: Study) -> list[str]:
    section = study.recipe.study
    varied = "seeds vary the order of training; every seed trains on the same paraphrases"
    if section.new_paraphrases_per_seed:
        varied = "seeds vary the order of training and the paraphrases"
    notes = [
        "choices and claims are judged in the first format, and the first number of shots, "
        "of each question set",
        varied,
    ]
    notes += [
        f"{item.name}: {item.n_chosen:,} of {format_count(item.n_questions, 'question')} were used "
        "for choices and are not reported"
        for item in study.question_sets
        if item.n_chosen
    ]
    notes += [
        f"{item.name}: {format_count(item.n_left_out, 'question')} left out, "
        "on documents that other sets choose with"
        for item in study.question_sets
        if item.n_left_out
    ]
    return notes + study.diverged


def render_plan(recipe: StudyRecipe, gpu: str | None = None, jobs: JobOptions | None = None) -> str:
    """Return the plan of a study as text: its arms and stages, which are done, its `jobs`, and the
    money, the hours and the disk to come, on cards `gpu` or on this machine's own device.

    Nothing is run; only the files of split questions are written. Money is counted as `kinject
    augment --dry-run` does, hours as `kinject plan` does. Raises as `run_study` does for faults in
    recipes, and `InputError` for an unknown card.
    """
    study = open_study(recipe)
    check_recipes(recipe, study.expanded)
    setup = list(chain.from_iterable(study.planner.setup_stages()))
    # Without an executor nothing runs: it reads what is done.
    study.run_stages(setup, "")
    is_set_up = study.status.all_done(setup)
    _measure_judge(study)
    _tune(study)
    _plan_arms(study)
    if not recipe.study.keep_models:
        _run_one_by_one(study)  # the same stages, in the order in which they run
    _choose_k(study)
    _evaluate_on_test(study)
    written = preview_paraphrases(study)
    lines = [recipe.study.title, recipe.study.description.strip(), ""]
    lines.append(render_stages(study, written))
    if jobs is not None:
        lines += render_jobs(study.status, jobs)
    outlook = render_outlook(study, written, gpu)
    if outlook:
        lines.append(outlook)
    if not is_set_up:
        lines.append("study.setup comes first; stages that read its files are counted as not done")
    tuned = {name for _, name in study.tuned}
    untuned = [name for name in recipe.study.tune or {} if name not in tuned]
    if untuned:
        lines.append(
            f"tuned on validation questions first: {', '.join(untuned)}; "
            "arms then train with the chosen value"
        )
    lines += [f"warning: {line}" for line in family_warnings(study)]
    lines += _power(study)
    return "\n".join(lines)
