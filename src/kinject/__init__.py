"""kinject turns documents into knowledge that a language model demonstrably has.

The verbs are functions: ``augment``, ``make_questions``, ``train``, ``merge``, ``evaluate``, ``study``, ``bench``, ``plan``,
``find_lr`` and ``find_batch`` take a checked recipe, return a typed result and write the same files as the command.
``compare_runs`` compares what ``read_run`` read.

    import kinject
    recipe = kinject.read_recipe(Path("recipes/cpt.yaml"), verb="train")
    result = kinject.train(recipe)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kinject.terminal import leave_out_noise

if TYPE_CHECKING:
    from kinject.api import evaluate, train
    from kinject.augment import augment
    from kinject.augment.questions.run import make_questions
    from kinject.bench.run import bench
    from kinject.errors import KinjectError
    from kinject.eval.compare import compare_runs, read_run
    from kinject.plan.run import plan
    from kinject.recipe import Recipe, read_recipe
    from kinject.report import read_report, write_report
    from kinject.study import study
    from kinject.train.merge import merge
    from kinject.tune.find_batch import find_batch
    from kinject.tune.find_lr import find_lr

__version__ = version("kinject")
leave_out_noise()  # before a library is imported, in a notebook and in a worker process, too

_HOMES = {
    "augment": "kinject.augment", "bench": "kinject.bench.run", "compare_runs": "kinject.eval.compare",
    "evaluate": "kinject.api", "find_batch": "kinject.tune.find_batch", "find_lr": "kinject.tune.find_lr",
    "KinjectError": "kinject.errors", "make_questions": "kinject.augment.questions.run",
    "merge": "kinject.train.merge", "plan": "kinject.plan.run", "read_recipe": "kinject.recipe",
    "read_report": "kinject.report", "read_run": "kinject.eval.compare", "Recipe": "kinject.recipe",
    "study": "kinject.study", "train": "kinject.api", "write_report": "kinject.report",
}  # fmt: skip
"""Public name -> the module that defines it, imported on first use."""

__all__ = [
    "KinjectError", "Recipe", "augment", "bench", "compare_runs", "evaluate", "find_batch", "find_lr", "make_questions",
    "merge", "plan", "read_recipe", "read_report", "read_run", "study", "train", "write_report",
]  # fmt: skip


class VerbPackage(ModuleType):
    """A package that is called like the verb in it: ``kinject.train`` is the package's name and the verb's, too."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Return what the verb returns."""
        verb = self.__name__.rpartition(".")[2]
        return getattr(import_module(_HOMES[verb]), verb)(*arguments, **options)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kinject' has no attribute {name!r}")
