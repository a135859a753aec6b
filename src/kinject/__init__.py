"""kinject turns documents into knowledge that a language model demonstrably has.

The verbs are functions: ``augment``, ``train``, ``evaluate`` and ``study`` each take a checked recipe, return a typed result and
write the same files as the command.

    import kinject
    recipe = kinject.read_recipe(Path("recipes/cpt.yaml"), verb="train")
    result = kinject.train(recipe)
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kinject.api import evaluate, train
    from kinject.augment import augment
    from kinject.errors import KinjectError
    from kinject.recipe import Recipe, read_recipe
    from kinject.report import read_report, write_report
    from kinject.study import study

__version__ = version("kinject")

_HOMES = {
    "augment": "kinject.augment",
    "evaluate": "kinject.api",
    "KinjectError": "kinject.errors",
    "read_recipe": "kinject.recipe",
    "read_report": "kinject.report",
    "Recipe": "kinject.recipe",
    "study": "kinject.study",
    "train": "kinject.api",
    "write_report": "kinject.report",
}

__all__ = [
    "KinjectError",
    "Recipe",
    "augment",
    "evaluate",
    "read_recipe",
    "read_report",
    "study",
    "train",
    "write_report",
]


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
