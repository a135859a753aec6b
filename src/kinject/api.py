"""The verbs that write a report: each runs its stage and then draws the report.

`kinject.evaluate` and `kinject.train` are these functions; the command line calls them, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kinject.process import is_first_process

if TYPE_CHECKING:
    from kinject.recipe import EvalRecipe, TrainRecipe
    from kinject.results import Report
    from kinject.types import TrainResult


def evaluate(recipe: EvalRecipe) -> Report:
    """Ask every model of the recipe every question, and write the report into its run folder.

    See `kinject.eval.run.evaluate` and `kinject.report.write_report`. Of several processes the first one writes.
    """
    from kinject.eval import evaluate as run
    from kinject.report import write_report

    report = run(recipe)
    if is_first_process():
        write_report(recipe.run_dir, report)
    return report


def train(recipe: TrainRecipe, *, resume: bool = False, overwrite: bool = False) -> TrainResult:
    """Train as `recipe` says, and write the report into its run folder.

    See `kinject.train.run.run` and `kinject.report.write_training_report`. Of several processes the first one writes. A
    run that was done already keeps its report.
    """
    from kinject.report import write_training_report
    from kinject.train import train as run

    result = run(recipe, resume=resume, overwrite=overwrite)
    # A run that was killed after training and before its report has none.
    has_report = result.already_done and (recipe.run_dir / "report.html").is_file()
    if is_first_process() and not has_report:
        write_training_report(recipe.run_dir)
    return result
