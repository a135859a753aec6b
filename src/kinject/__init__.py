"""kinject turns documents into knowledge that a language model demonstrably has.

The verbs are functions: each takes a recipe (its path, or what `read_recipe` returned), writes the
same files and report as its command, and returns a result with `to_frame()`. In a notebook the last
line of a cell shows it as a table.

    import kinject

    kinject.try_("handbook/")                      # what is in there, and recipes for it
    kinject.augment("recipes/handbook/augment.yaml")
    kinject.train("recipes/handbook/train.yaml")
    report = kinject.evaluate("recipes/handbook/eval.yaml")
    report.to_frame()
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kinject.api import (
    augment,
    check,
    compare,
    doctor,
    documents,
    documents_shard,
    evaluate,
    evaluate_shard,
    export,
    find_batch,
    find_lr,
    merge,
    plan,
    questions,
    read_report,
    report,
    runs,
    study,
    styles,
    train,
    try_,
)
from kinject.demo import demo
from kinject.errors import KinjectError
from kinject.terminal import leave_out_noise
from kinject.version import package_version

if TYPE_CHECKING:
    from kinject.recipe import Recipe, read_recipe

__version__ = package_version()
leave_out_noise()  # before a library is imported, in a notebook and in a worker process, too
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # trl would report each training to the hub

__all__ = [
    "KinjectError",
    "Recipe",
    "augment",
    "check",
    "compare",
    "demo",
    "doctor",
    "documents",
    "documents_shard",
    "evaluate",
    "evaluate_shard",
    "export",
    "find_batch",
    "find_lr",
    "merge",
    "plan",
    "questions",
    "read_recipe",
    "read_report",
    "report",
    "runs",
    "study",
    "styles",
    "train",
    "try_",
]


class _Package(ModuleType):
    """This package, in which a verb stays a function when the subpackage of its name is imported.

    The import system sets ``kinject.train`` to the subpackage when a verb imports it first. What is
    in there is imported by name: ``from kinject.train.run import run``.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in __all__ and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in ("Recipe", "read_recipe"):
        return getattr(importlib.import_module("kinject.recipe"), name)
    raise AttributeError(f"module 'kinject' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
