"""Choices made on validation questions, before any test question is read: tuned hyperparameters and the number of passages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kinject.errors import InputError
from kinject.results import Choice
from kinject.study.arms import Arm, expand_arms
from kinject.study.executors import LOG
from kinject.study.records import AskSetting, Records
from kinject.study.scheduler import SplitQuestions, Study
from kinject.study.stages import ArmRun


def tune(study: Study) -> None:
    """Evaluate every value of each grid on validation questions and take the best; of equal values, the first.

    Then expand the arms with the chosen values. Raises `InputError` if every value failed.
    """
    grids = {
        key: [(value, [_add_validation(study, study.plan_run(arm, seed)) for seed in arm.seeds]) for value, arm in grid]
        for key, grid in study.expanded.grids.items()
    }
    stages = [stage for grid in grids.values() for _, runs in grid for run in runs for stage in run.all_stages]
    study.run_stages(stages, "tuning")
    for (model, name), grid in grids.items():
        item = (study.recipe.study.tune or {})[name]
        candidates = []
        for value, runs in grid:
            done = [run for run in runs if study.status.all_done(run.all_stages)]
            if done:
                accuracies = [_accuracy(study, done, question_set, 0) for question_set in item.sets()]
                candidates.append((value, *_pool(accuracies)))
        if candidates:
            best = max(candidates, key=lambda candidate: candidate[1])[0]
            at_edge = len(grid) > 1 and best in (grid[0][0], grid[-1][0])
            question_sets = ", ".join(item.sets())
            study.choices.append(Choice(model, item.key, item.arm, question_sets, tuple(candidates), best, at_edge))
            study.tuned[model, name] = best
        elif study.start_executor is not None:
            failure = study.status.first_failure(
                [stage for _, runs in grid for run in runs for stage in run.all_stages]
            )
            first = f"{failure[0].label}: {failure[1]} (its log: {failure[0].folder / LOG})" if failure else "none ran"
            raise InputError(f"study.tune.{name}: every value failed for {model}; the first: {first}")
    if study.tuned:
        study.expanded = expand_arms(study.recipe, study.tuned)


def choose_k(study: Study) -> None:
    """Evaluate each K on validation questions and take the best for each arm and question set.

    A set without validation questions gets the K of the first set that has some. A single K needs no evaluation.
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
        candidates = [(k, *_accuracy(study, runs, item.name, k)) for k in study.ks]
        best = max(candidates, key=lambda candidate: candidate[1])[0]
        at_edge = best in (study.ks[0], study.ks[-1])
        study.choices.append(Choice(arm.model, "k", arm.name, item.name, tuple(candidates), best, at_edge))
        study.chosen_k[arm.model, arm.name, item.name] = best


def _add_validation(study: Study, run: ArmRun) -> ArmRun:
    """Return `run` with the stage that evaluates it on the validation questions."""
    questions = {item.name: item.validation for item in study.question_sets if item.validation is not None}
    return replace(run, evaluations=(study.planner.eval_stage(run, "validation", questions),))


def _accuracy(study: Study, runs: Sequence[ArmRun], question_set: str, k: int) -> tuple[float, int]:
    """Return the mean validation accuracy of `runs` (the seeds of one arm) and the number of questions."""
    records = Records(study.evaluation.scores[0])
    for run in runs:
        records.read(run.arm.model, run.arm.name, run.seed, run.evaluations[0].folder)
    arm = runs[0].arm
    matrix = records.matrix(arm.model, arm.name, AskSetting(question_set, *study.prompt_format, k))
    return round(matrix.mean(), 6), len(matrix.question_ids)


def _pool(accuracies: Sequence[tuple[float, int]]) -> tuple[float, int]:
    """Return the accuracy over the questions of several sets, and their number."""
    n_questions = sum(n for _, n in accuracies)
    return round(sum(accuracy * n for accuracy, n in accuracies) / n_questions, 6), n_questions
