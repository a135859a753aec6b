"""`kinject doctor`: the parts of this machine, the actions of each recipe on it, and a fix for each problem."""

from __future__ import annotations

import os
import platform
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinject.corpus.public_data import command_for
from kinject.disk import path_exists
from kinject.errors import KinjectError, Problem, RecipeError
from kinject.models import (
    choose_attention,
    choose_device,
    fastest_attention,
    has_fast_bf16,
)
from kinject.process import core_count, machine_memory
from kinject.recipe import GeneratorSection, Recipe, read_recipe
from kinject.recipe.read import TrainRecipe, Verb
from kinject.recipe.yaml_lines import read_yaml
from kinject.terminal import aligned
from kinject.types import Tabular

_PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "flash-attn", "bitsandbytes", "sentence-transformers",
    "pypdfium2", "selectolax", "deepspeed",
)  # fmt: skip
"""Those whose versions are shown; the second half is optional."""
_MIN_FREE_DISK = 5 * 2**30
_SECONDS = 3.0
"""Longest wait for an answer from the network."""
_SECTION: Mapping[str, Verb] = {
    "augment": "augment", "questions": "questions", "eval": "eval", "study": "study", "trainer": "train",
}  # fmt: skip
"""Section -> the verb that needs it."""


@dataclass(frozen=True)
class Advice:
    """Something that will not work: its place (a file, a line, a package), the fault, and the fix."""

    location: str
    message: str
    fix: str


@dataclass(frozen=True)
class Check:
    """One line about the machine or a recipe: its problems, and the environment variables from which it reads keys."""

    name: str
    value: str
    problems: tuple[Advice, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup(Tabular):
    """All checks of the machine and of the recipes."""

    machine: tuple[Check, ...]
    recipes: tuple[Check, ...]

    @property
    def problems(self) -> list[Advice]:
        """Every problem, the machine's first."""
        return [problem for check in (*self.machine, *self.recipes) for problem in check.problems]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each check, with the fixes of its problems."""
        return [
            {
                "check": check.name, "found": check.value, "problems": "; ".join(problem.message for problem in check.problems),
                "fixes": "; ".join(problem.fix for problem in check.problems),
            } for check in (*self.machine, *self.recipes)
        ]  # fmt: skip


def examine(recipes: Sequence[Path], *, offline: bool) -> Checkup:
    """Check this machine and the recipe files. With `offline`, nothing is sent over the network.

    Of keys, only their presence in the environment is reported.
    """
    hub, reachable = _check_hub(offline)
    checks = tuple(check_recipes(recipes, hub_reachable=reachable, offline=offline))
    keys = sorted({"HF_TOKEN", "OPENAI_API_KEY", *(key for check in checks for key in check.keys)})
    found = ", ".join(f"{name} {'set' if os.environ.get(name) else 'not set'}" for name in keys)
    return Checkup((*_check_system(), *_check_devices(), _check_packages(), hub, Check("keys", found)), checks)


def answers(url: str) -> bool:
    """Return whether something listens at the host and port of `url`; waits at most a few seconds and sends nothing."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname:  # "" would be this machine
            return False
        with socket.create_connection((parts.hostname, port), timeout=_SECONDS):
            return True
    except (OSError, ValueError):  # ValueError: not a valid address
        return False


def _check_system() -> Iterator[Check]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {core_count()} cores"
    yield Check("system", system)
    yield Check("memory", f"{machine_memory() / 2**30:.1f} GiB")
    free = shutil.disk_usage(".").free
    text = f"{free / 2**30:.1f} GiB free in this folder"
    problem = Advice("disk", text, "Free some: a checkpoint of a 7B model takes tens of GiB.")
    yield Check("disk", text, (problem,) if free < _MIN_FREE_DISK else ())


def _check_devices() -> Iterator[Check]:
    import torch

    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield Check(f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    device = choose_device("auto")
    name = {"cuda": "NVIDIA GPU", "mps": "Apple GPU", "cpu": "CPU (no GPU found)"}[device]
    bf16 = "yes" if has_fast_bf16(device) else "no"
    yield Check("device", f"{name}; bfloat16 multiplied in hardware: {bf16}")
    yield Check("attention", f"auto tries {', '.join((*fastest_attention(device), 'sdpa'))}")
    if device == "cpu" and shutil.which("nvidia-smi"):
        fault = f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU"
        fix = "Install a torch that is built for CUDA (pip install torch, without the CPU index)."
        yield Check("torch", "sees no GPU", (Advice("torch", fault, fix),))


def _check_packages() -> Check:
    """Return the versions of the packages, with a problem for each required one that is missing or outside its range."""
    from packaging.requirements import Requirement

    problems = []
    for requirement in map(Requirement, requires("kinject") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = _version(requirement.name)
        if not found or not requirement.specifier.contains(found, prereleases=True):
            fault = f"{found or 'no version'} is installed, kinject needs {requirement.specifier}"
            problems.append(Advice(requirement.name, fault, f"pip install '{requirement}'"))
    shown = ", ".join(f"{name} {_version(name) or 'not installed'}" for name in _PACKAGES)
    return Check("packages", shown, tuple(problems))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _check_hub(offline: bool) -> tuple[Check, bool]:
    """Return the state of the hub, and whether models can be downloaded from it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Check("hub", "switched off (HF_HUB_OFFLINE): models come from folders and the cache"), False
    if offline:
        return Check("hub", "not tried (--offline)"), False
    shown = constants.ENDPOINT.rpartition("@")[2] if "@" in constants.ENDPOINT else constants.ENDPOINT  # no password
    if answers(constants.ENDPOINT):
        return Check("hub", f"{shown} answers"), True
    return Check("hub", f"{shown} does not answer: models come from folders and the cache"), False


def check_recipes(files: Sequence[Path], *, hub_reachable: bool, offline: bool) -> Iterator[Check]:
    """Yield a check of each recipe; configuration files of accelerate are skipped."""
    commands = _commands_by_output(files)
    for file in files:
        try:
            if "compute_environment" in read_yaml(file).root:
                continue
            recipe = read_recipe(file)
        except RecipeError as error:
            yield Check(str(file), "cannot be read", tuple(map(_advice_on, error.problems)))
        except KinjectError as error:
            yield Check(str(file), "cannot be read", (Advice(str(file), str(error), "Check the path."),))
        else:
            yield _check_recipe(recipe, commands, hub_reachable=hub_reachable, offline=offline)


def _advice_on(fault: Problem) -> Advice:
    return Advice(fault.location, f"{fault.key}: {fault.message}", "Correct the recipe.")


def _commands_by_output(files: Sequence[Path]) -> dict[str, str]:
    """Return run folder -> the command that fills it, for all given recipes."""
    commands = {
        "runs/sandbox/base-corpus.jsonl": "kinject sandbox corpus",
        "runs/sandbox/base": "kinject sandbox base",
    }
    for file in files:
        try:
            root = read_yaml(file).root
        except KinjectError:
            continue  # `check_recipes` reports it
        verb = next((verb for section, verb in _SECTION.items() if section in root), None)
        if verb is not None and isinstance(root.get("run_dir"), str):
            commands.setdefault(root["run_dir"], f"kinject {verb} {file}")
    return commands


def _check_recipe(recipe: Recipe, commands: Mapping[str, str], *, hub_reachable: bool, offline: bool) -> Check:
    problems, parts = list[Advice](), list[str]()
    for verb in [verb for section, verb in _SECTION.items() if section in recipe.raw]:
        try:
            checked = read_recipe(recipe.path, verb=verb)
            if isinstance(checked, TrainRecipe):
                parts.append(_describe_training(checked))
        except RecipeError as error:
            problems += [_advice_on_input(fault, commands) for fault in error.problems]
    names = [recipe.model.path] if recipe.model is not None and recipe.model.path else []
    for table in recipe.eval.local().values() if recipe.eval is not None else ():
        names += [name for name in (table.path, table.adapter) if name is not None]
    if not hub_reachable:
        problems += [problem for name in dict.fromkeys(names) for problem in _check_cached(recipe, name)]
    if recipe.eval is not None:
        parts.append(f"scores on {choose_device('auto')}")
    generators = [generator for generator in _generators(recipe) if generator.kind == "openai"]
    for generator in generators:
        parts.append(f"sends requests to {generator.model or 'a model'} at {generator.address or 'OpenAI'}")
        problems += _check_endpoint(recipe, generator, offline)
    keys = tuple(generator.api_key_env for generator in generators)
    return Check(str(recipe.path), "; ".join(parts) or "runs in this process", tuple(problems), keys)


def _advice_on_input(fault: Problem, commands: Mapping[str, str]) -> Advice:
    """Return a problem; the fix of a missing input names the command that makes it, if one of the recipes does."""
    if not fault.message.startswith("found '"):
        return _advice_on(fault)
    path = Path(fault.message.split("'")[1])
    command = next((command for output, command in commands.items() if path.is_relative_to(output)), "")
    command = command or command_for(str(path))
    yours = "This is your own input: put it there, or give another path (section.key=PATH)."
    return Advice(fault.location, f"{path} does not exist", f"Run {command} first." if command else yours)


def _describe_training(recipe: TrainRecipe) -> str:
    """Return the device, dtype and attention of a training run. Raises `RecipeError` for what this machine lacks for it."""
    from kinject.train.config import make_sft_config

    config, model = make_sft_config(recipe), recipe.model
    device = "cpu" if config.use_cpu else choose_device(model.device)
    attention = choose_attention(model.attention, device) or next(iter(fastest_attention(device)), "sdpa")
    dtype = "float32" if model.dtype == "auto" else model.dtype
    mixed = " with fp16" if config.fp16 else " with bf16" if config.bf16 else ""
    quantization = f", {model.quantization}" if model.quantization != "none" else ""
    return f"trains on {device} in {dtype}{mixed}{quantization}, {attention}"


def _check_cached(recipe: Recipe, name: str) -> Iterator[Advice]:
    """Yield a problem for a model of the hub that is not in the cache."""
    if path_exists(Path(name)) or name.startswith(("runs/", ".", "/")):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return  # not a name of the hub: reading the recipe reports it
    if not cached:
        fix = f"With a network: hf download {name}; or give a folder: model.path=FOLDER (eval.models.NAME=FOLDER)."
        yield Advice(str(recipe.path), f"{name} is not cached, and the hub was not reached", fix)


def _generators(recipe: Recipe) -> Iterator[GeneratorSection]:
    sections = [recipe.augment.generator, recipe.augment.judge] if recipe.augment is not None else []
    sections += [recipe.questions.generator] if recipe.questions is not None else []
    if recipe.eval is not None:
        sections += [recipe.eval.judge, *(table.generator(1) for table in recipe.eval.endpoints().values())]
    for section in sections:
        yield from section.parts().values() if section is not None else ()


def _check_endpoint(recipe: Recipe, generator: GeneratorSection, offline: bool) -> Iterator[Advice]:
    location, key = str(recipe.path), generator.api_key_env
    if generator.address is None and not os.environ.get(key):
        yield Advice(location, f"the environment variable {key} is not set", f"export {key}=...")
    url = generator.address or "https://api.openai.com/v1"
    if not offline and not answers(url):
        fix = "Start the endpoint, or set generator.base_url to one that runs."
        yield Advice(location, f"nothing answers at {url}", fix)


def render(checkup: Checkup) -> str:
    """Return the checks as lines for a terminal; the problems and their fixes come last."""
    rows = [(check.name, check.value) for check in checkup.machine]
    for check in checkup.recipes:
        n = len(check.problems)
        rows.append((check.name, f"{f'{n} problems' if n else 'ok'}: {check.value}"))
    lines = [aligned(rows, frozenset()), ""]
    by_fix: dict[str, list[Advice]] = {}
    for problem in checkup.problems:
        by_fix.setdefault(problem.fix, []).append(problem)
    for fix, problems in by_fix.items():
        lines.append(f"- {_first_values([problem.message for problem in problems], '; ')}")
        lines.append(f"  where: {_first_values([problem.location for problem in problems], ', ')}")
        lines.append(f"  fix:   {fix}")
    return "\n".join([*lines, f"{len(checkup.problems) or 'No'} problems found."])


def _first_values(values: Sequence[str], separator: str) -> str:
    """Return the first three different values and the number of others."""
    different = list(dict.fromkeys(values))
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return separator.join(different[:3]) + more
