"""`kinject doctor`: the parts of this machine, the actions of each recipe on it, and what keeps
them from running."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kinject.errors import KinjectError, RecipeError
from kinject.hub import unreachable_reason
from kinject.models import choose_device, fastest_attention, has_fast_bf16
from kinject.process import core_count, machine_memory
from kinject.recipe import GeneratorSection, Recipe, read_recipe
from kinject.recipe.read import TrainRecipe, Verb
from kinject.recipe.yaml_lines import read_yaml
from kinject.terminal import aligned, format_count
from kinject.types import Tabular

_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "flash-attn",
    "bitsandbytes",
    "sentence-transformers",
    "deepspeed",
)
_MIN_FREE_DISK = 5 * 2**30
_SECTION: Mapping[str, Verb] = {
    "augment": "augment",
    "questions": "questions",
    "eval": "eval",
    "study": "study",
    "trainer": "train",
}
"""Section -> the verb that needs it."""


@dataclass(frozen=True)
class Check:
    """One line about the machine or a recipe, and its problems."""

    name: str
    value: str
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup(Tabular):
    """All checks of the machine and of the recipes."""

    checks: tuple[Check, ...]

    @property
    def problems(self) -> list[str]:
        """Every problem, the machine's first."""
        return [problem for check in self.checks for problem in check.problems]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each check."""
        return [
            {"check": c.name, "found": c.value, "problems": "; ".join(c.problems)}
            for c in self.checks
        ]


def examine(recipes: Sequence[Path], *, offline: bool) -> Checkup:
    """Check this machine and the recipe files. With `offline`, nothing is sent over the network.

    Of keys, only their presence in the environment is reported.
    """
    keys = ", ".join(f"{name} {_is_set(name)}" for name in ("HF_TOKEN", "OPENAI_API_KEY"))
    hub = "not tried (--offline)"
    if not offline:
        hub = unreachable_reason() or "answers"
    return Checkup(
        (*_check_machine(), Check("hub", hub), Check("keys", keys), *check_recipes(recipes))
    )


def _is_set(name: str) -> str:
    return "set" if os.environ.get(name) else "not set"


def _check_machine() -> Iterator[Check]:
    import torch

    system = (
        f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, "
        f"{format_count(core_count(), 'core')}"
    )
    yield Check("system", system)
    yield Check("memory", f"{machine_memory() / 2**30:.1f} GiB")
    free = shutil.disk_usage(".").free
    text = f"{free / 2**30:.1f} GiB free in this folder"
    low = f"disk: {text}. Free some: a checkpoint of a 7B model takes tens of GiB."
    yield Check("disk", text, (low,) if free < _MIN_FREE_DISK else ())
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield Check(f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    device = choose_device("auto")
    bf16 = "yes" if has_fast_bf16(device) else "no"
    problems: tuple[str, ...] = ()
    if device == "cpu" and shutil.which("nvidia-smi"):
        problems = (f"this machine has an NVIDIA driver, but torch sees no GPU. {_unseen_fix()}",)
    yield Check("device", f"{device}; bfloat16 multiplied in hardware: {bf16}", problems)
    yield Check("attention", f"auto tries {', '.join((*fastest_attention(device), 'sdpa'))}")
    yield Check("packages", ", ".join(f"{name} {_version(name)}" for name in _PACKAGES))


def _unseen_fix() -> str:
    """Return what to do about a GPU that torch does not see."""
    import torch

    if torch.version.cuda is None:
        return "Install a torch that is built for CUDA."
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}: unset it, or name a GPU of nvidia-smi."
    return (
        f"This torch needs CUDA {torch.version.cuda}: if nvidia-smi shows an older one, update the "
        "driver, or install a torch for it."
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def check_recipes(files: Sequence[Path]) -> Iterator[Check]:
    """Yield a check of each recipe; configuration files of accelerate are skipped."""
    for file in files:
        try:
            if "compute_environment" not in read_yaml(file).root:
                yield _check_recipe(read_recipe(file))
        except KinjectError as error:
            yield Check(str(file), "cannot be read", tuple(str(error).splitlines()))


def _check_recipe(recipe: Recipe) -> Check:
    """Return the verbs of a recipe, and what keeps them from running: inputs, settings, and keys
    that are not set."""
    from kinject.train.config import make_configs

    verbs = [verb for section, verb in _SECTION.items() if section in recipe.raw]
    problems = list[str]()
    for verb in verbs:
        try:
            checked = read_recipe(recipe.path, verb=verb)
            if isinstance(checked, TrainRecipe):
                make_configs(checked)
        except RecipeError as error:
            problems += str(error).splitlines()
    for generator in _generators(recipe):
        key = generator.api_key_env
        # A server of one's own may want no key.
        if generator.kind == "openai" and generator.address is None and not os.environ.get(key):
            problems.append(
                f"{recipe.path}: the environment variable {key} is not set. export {key}=..."
            )
    return Check(str(recipe.path), ", ".join(verbs), tuple(problems))


def _generators(recipe: Recipe) -> Iterator[GeneratorSection]:
    """Yield every model that the recipe asks over a network or loads to write."""
    sections: list[GeneratorSection | None] = []
    if recipe.augment is not None:
        sections += [recipe.augment.generator, recipe.augment.judge]
    if recipe.questions is not None:
        sections.append(recipe.questions.generator)
    if recipe.eval is not None:
        sections.append(recipe.eval.judge)
        sections += [table.generator(1) for table in recipe.eval.endpoints().values()]
    for section in sections:
        if section is not None:
            yield from section.parts().values()


def _found(check: Check) -> str:
    if not check.problems:
        return check.value
    return f"{format_count(len(check.problems), 'problem')}: {check.value}"


def render(checkup: Checkup) -> str:
    """Return the checks as lines for a terminal; the problems come last."""
    rows = [(check.name, _found(check)) for check in checkup.checks]
    lines = [aligned(rows, frozenset()), ""]
    # Several verbs of a recipe find the same problem.
    different = list(dict.fromkeys(checkup.problems))
    lines += [f"- {problem}" for problem in different]
    found = "No problems"
    if different:
        found = format_count(len(different), "problem")
    return "\n".join([*lines, f"{found} found."])
