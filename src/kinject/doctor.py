"""`kinject doctor`: the parts of this machine, the actions of each recipe on it, and a fix for each problem."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinject.corpus.public_data import command_for
from kinject.disk import path_exists
from kinject.errors import InputError, KinjectError, Problem, RecipeError
from kinject.models import (
    attention_fault,
    choose_attention,
    choose_device,
    choose_precision,
    emulated_bf16,
    fastest_attention,
    has_fast_bf16,
)
from kinject.process import core_count, machine_memory
from kinject.recipe import GeneratorSection, ModelSection, Recipe, RetrievalSection, read_recipe
from kinject.recipe.read import Verb
from kinject.recipe.yaml_lines import read_yaml
from kinject.types import Tabular

_OPTIONAL = {
    "flash_attn": ("flash-attn", "faster attention on NVIDIA GPUs; torch's own does as well"),
    "bitsandbytes": ("bitsandbytes", "8-bit optimizers, 4-bit and 8-bit weights"),
    "sentence_transformers": ("sentence-transformers", "dense retrieval"),
    "pypdfium2": ("pypdfium2", "PDF documents"),
    "selectolax": ("selectolax", "HTML documents"),
    "deepspeed": ("deepspeed", "ZeRO"),
}
"""Module -> (name, purpose)."""
_SHOWN_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
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
class MachineCheck:
    """One line about the machine."""

    name: str
    value: str
    problems: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class RecipeCheck:
    """One recipe: its action on this machine, its problems, and the environment variables from which it reads keys."""

    name: str
    value: str
    problems: tuple[Advice, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkup(Tabular):
    """All checks of the machine and of the recipes."""

    machine: tuple[MachineCheck, ...]
    recipes: tuple[RecipeCheck, ...]

    @property
    def problems(self) -> list[Advice]:
        """Every problem, the machine's first."""
        checks: list[MachineCheck | RecipeCheck] = [*self.machine, *self.recipes]
        return [problem for check in checks for problem in check.problems]

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each check, with the fixes of its problems."""
        checks: list[MachineCheck | RecipeCheck] = [*self.machine, *self.recipes]
        return [
            {
                "check": check.name, "found": check.value, "problems": "; ".join(problem.message for problem in check.problems),
                "fixes": "; ".join(problem.fix for problem in check.problems),
            } for check in checks
        ]  # fmt: skip


@dataclass(frozen=True)
class _Surroundings:
    """Inputs of the checks beside the recipe: see `check_recipes` and `_commands_by_output`."""

    commands: Mapping[str, str]
    hub_reachable: bool
    offline: bool


def examine(recipes: Sequence[Path], *, offline: bool) -> Checkup:
    """Check this machine and the recipe files. With `offline`, nothing is sent over the network.

    Of keys, only their presence in the environment is reported.
    """
    hub, reachable = _check_hub(offline)
    checks = tuple(check_recipes(recipes, hub_reachable=reachable, offline=offline))
    keys = {"HF_TOKEN", "OPENAI_API_KEY", *(key for check in checks for key in check.keys)}
    machine = (
        *_check_system(),
        *_check_devices(),
        *_check_packages(),
        *_check_optional(),
        hub,
        _check_keys(sorted(keys)),
    )
    return Checkup(machine, checks)


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


def _check_system() -> Iterator[MachineCheck]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {core_count()} cores"
    yield MachineCheck("system", system)
    yield MachineCheck("memory", f"{machine_memory() / 2**30:.1f} GiB")
    free = shutil.disk_usage(".").free
    text = f"{free / 2**30:.1f} GiB free in this folder"
    problem = Advice("disk", text, "Free some: a checkpoint of a 7B model takes tens of GiB.")
    yield MachineCheck("disk", text, (problem,) if free < _MIN_FREE_DISK else ())


def _slower(device: str) -> str:
    """Return why `device` lacks flash attention or torch's variable-length attention, "" if it has both."""
    if device != "cuda":
        return " (flash attention and varlen need an NVIDIA GPU)"
    faults = {name: attention_fault(name, device) for name in ("flash_attention_2", "varlen")}
    return "".join(f"; {name} {fault}" for name, fault in faults.items() if fault)


def _check_devices() -> Iterator[MachineCheck]:
    import torch

    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield MachineCheck(f"GPU {index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    device = choose_device("auto")
    name = {"cuda": "NVIDIA GPU", "mps": "Apple GPU", "cpu": "CPU (no GPU found)"}[device]
    bf16 = "yes" if has_fast_bf16(device) else "no"
    yield MachineCheck("device", f"{name}; bfloat16 multiplied in hardware: {bf16}")
    yield MachineCheck("attention", f"auto tries {', '.join((*fastest_attention(device), 'sdpa'))}{_slower(device)}")
    if device == "cpu" and shutil.which("nvidia-smi"):
        fault = f"this machine has an NVIDIA driver, but torch {torch.__version__} sees no GPU"
        fix = "Install a torch that is built for CUDA (pip install torch, without the CPU index)."
        yield MachineCheck("torch", "sees no GPU", (Advice("torch", fault, fix),))


def _check_packages() -> Iterator[MachineCheck]:
    """Yield the versions of the required packages, with a problem for each that is missing or outside its range."""
    from packaging.requirements import Requirement

    problems, shown = [], []
    for line in requires("kinject") or ():
        requirement = Requirement(line)
        name = requirement.name
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        fix = f"pip install '{requirement}'"
        try:
            installed = version(name)
        except PackageNotFoundError:
            problems.append(Advice(name, "is not installed", fix))
            continue
        if not requirement.specifier.contains(installed, prereleases=True):
            problems.append(Advice(name, f"{installed} is installed, kinject needs {requirement.specifier}", fix))
        if name in _SHOWN_PACKAGES:
            shown.append(f"{name} {installed}")
    yield MachineCheck("packages", ", ".join(shown), tuple(problems))
    constraints = Path("constraints.txt")
    if constraints.is_file():
        others = list(_versions_unlike(constraints.read_text("utf-8").splitlines()))
        text = f"{len(others)} differ: {', '.join(others[:4])}" if others else "all as pinned"
        yield MachineCheck("constraints", f"{text} (constraints.txt pins the versions that the tests ran with)")


def _versions_unlike(constraints: Iterable[str]) -> Iterator[str]:
    """Yield each installed package whose version is not the pinned one."""
    for line in constraints:
        name, _, pinned = line.strip().partition("==")
        if not pinned or name.startswith("#"):
            continue
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if installed.partition("+")[0] != pinned:
            yield f"{name} {installed} (pinned {pinned})"


def _check_optional() -> Iterator[MachineCheck]:
    for module, (name, purpose) in _OPTIONAL.items():
        installed = importlib.util.find_spec(module) is not None
        yield MachineCheck(name, f"{'installed' if installed else 'not installed'} ({purpose})")


def _check_hub(offline: bool) -> tuple[MachineCheck, bool]:
    """Return the state of the hub, and whether models can be downloaded from it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return MachineCheck("hub", "switched off (HF_HUB_OFFLINE): models come from folders and the cache"), False
    if offline:
        return MachineCheck("hub", "not tried (--offline)"), False
    shown = constants.ENDPOINT.rpartition("@")[2] if "@" in constants.ENDPOINT else constants.ENDPOINT  # no password
    if answers(constants.ENDPOINT):
        return MachineCheck("hub", f"{shown} answers"), True
    return MachineCheck("hub", f"{shown} does not answer: models come from folders and the cache"), False


def _check_keys(names: Sequence[str]) -> MachineCheck:
    return MachineCheck("keys", ", ".join(f"{name} {'set' if os.environ.get(name) else 'not set'}" for name in names))


def check_recipes(files: Sequence[Path], *, hub_reachable: bool, offline: bool) -> Iterator[RecipeCheck]:
    """Yield a check of each recipe; configuration files of accelerate are skipped."""
    surroundings = _Surroundings(_commands_by_output(files), hub_reachable, offline)
    for file in files:
        try:
            if "compute_environment" in read_yaml(file).root:
                continue
            recipe = read_recipe(file)
        except RecipeError as error:
            yield RecipeCheck(str(file), "cannot be read", tuple(map(_advice_on, error.problems)))
        except KinjectError as error:
            yield RecipeCheck(str(file), "cannot be read", (Advice(str(file), str(error), "Check the path."),))
        else:
            yield _check_recipe(recipe, surroundings)


def _advice_on(fault: Problem) -> Advice:
    return Advice(fault.location, f"{fault.key}: {fault.message}", "Correct the recipe.")


def _commands_by_output(files: Sequence[Path]) -> dict[str, str]:
    """Return run folder -> the command that fills it, for all given recipes."""
    corpora = dict.fromkeys(("runs/sandbox/base-corpus.jsonl", "runs/sandbox/replay.jsonl"), "kinject sandbox corpus")
    commands = {**corpora, "runs/sandbox/base": "kinject sandbox base"}
    for file in files:
        try:
            root = read_yaml(file).root
        except KinjectError:
            continue  # `check_recipes` reports it
        verb = next((verb for section, verb in _SECTION.items() if section in root), None)
        if verb is not None and isinstance(root.get("run_dir"), str):
            commands.setdefault(root["run_dir"], f"kinject {verb} {file}")
    return commands


def _check_recipe(recipe: Recipe, surroundings: _Surroundings) -> RecipeCheck:
    parts, problems = [], list(_check_inputs(recipe, surroundings.commands))
    if recipe.model is not None and recipe.trainer:
        text, more = _check_training(recipe, recipe.model)
        parts.append(text)
        problems += more
    names = [recipe.model.path] if recipe.model is not None and recipe.model.path else []
    for table in recipe.eval.local().values() if recipe.eval is not None else ():
        names += [name for name in (table.path, table.adapter) if name is not None]
    if not surroundings.hub_reachable:
        problems += [problem for name in dict.fromkeys(names) for problem in _check_cached(recipe, name)]
    if recipe.eval is not None:
        parts.append(f"scores on {choose_device('auto')}")
        problems += _check_retrieval(recipe, recipe.eval.retrieval)
    generators = [generator for generator in _generators(recipe) if generator.kind == "openai"]
    for generator in generators:
        parts.append(f"sends requests to {generator.model or 'a model'} at {generator.address or 'OpenAI'}")
        problems += _check_endpoint(recipe, generator, surroundings.offline)
    keys = tuple(generator.api_key_env for generator in generators)
    return RecipeCheck(str(recipe.path), "; ".join(parts) or "runs in this process", tuple(problems), keys)


def _check_inputs(recipe: Recipe, commands: Mapping[str, str]) -> Iterator[Advice]:
    """Yield a problem for each missing input; the fix names the command that makes it, if one of the recipes does."""
    for verb in [verb for section, verb in _SECTION.items() if section in recipe.raw]:
        try:
            read_recipe(recipe.path, verb=verb)
        except RecipeError as error:
            for fault in error.problems:
                if not fault.message.startswith("found '"):
                    yield _advice_on(fault)
                    continue
                path = fault.message.split("'")[1]
                command = next((command for output, command in commands.items() if _is_within(path, output)), "")
                command = command or command_for(path)
                yours = "This is your own input: put it there, or give another path (section.key=PATH)."
                yield Advice(fault.location, f"{path} does not exist", f"Run {command} first." if command else yours)


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _check_training(recipe: Recipe, model: ModelSection) -> tuple[str, list[Advice]]:
    """Return the device, dtype and attention of a training run, and its problems on this machine."""
    trainer = recipe.trainer
    location = str(recipe.path)
    try:
        device = "cpu" if trainer.get("use_cpu") else choose_device(model.device)
        attention = choose_attention(model.attention, device)
    except InputError as error:
        fault, separator, fix = str(error).rpartition(" Or set ")
        if not separator:
            fault, _, fix = str(error).rpartition(" Set ")
        return "cannot train here", [Advice(location, fault, f"Set {fix}")]
    if attention is None:
        attention = next(iter(fastest_attention(device)), "sdpa")
    dtype = "float32" if model.dtype == "auto" else model.dtype
    fast_bf16 = has_fast_bf16(device)
    by_device = choose_precision(device).replace("no", "")
    mixed = "fp16" if trainer.get("fp16") else by_device if trainer.get("bf16") is None else "bf16" * trainer["bf16"]
    problems = []
    needs_bitsandbytes = "8bit" in str(trainer.get("optim", "")) or model.quantization != "none"
    if needs_bitsandbytes and importlib.util.find_spec("bitsandbytes") is None:
        problems.append(Advice(location, "needs bitsandbytes, which is not installed", "pip install bitsandbytes"))
    if trainer.get("fp16") and device == "cpu":
        fault = "trainer.fp16: half precision with a scaler needs a GPU"
        problems.append(Advice(location, fault, "Set trainer.fp16: false."))
    if trainer.get("bf16") and not fast_bf16:
        fault = f"trainer.bf16: {emulated_bf16(device) or f'this {device} only emulates bfloat16 (slow)'}"
        problems.append(Advice(location, fault, "Remove the line: kinject then chooses by the device."))
    quantization = f", {model.quantization}" if model.quantization != "none" else ""
    return f"trains on {device} in {dtype}{f' with {mixed}' if mixed else ''}{quantization}, {attention}", problems


def _check_cached(recipe: Recipe, name: str) -> Iterator[Advice]:
    """Yield a problem for a model of the hub that is not in the cache."""
    if path_exists(Path(name)) or name.startswith(("runs/", ".", "/")):
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return  # not a name of the hub: `_check_inputs` reports it
    if not cached:
        fix = f"With a network: hf download {name}; or give a folder: model.path=FOLDER (eval.models.NAME=FOLDER)."
        yield Advice(str(recipe.path), f"{name} is not cached, and the hub was not reached", fix)


def _check_retrieval(recipe: Recipe, retrieval: RetrievalSection | None) -> Iterator[Advice]:
    if retrieval is None or importlib.util.find_spec("sentence_transformers") is not None:
        return
    if retrieval.kind == "dense":
        fault = "eval.retrieval.kind: dense needs sentence_transformers"
        yield Advice(str(recipe.path), fault, "pip install 'kinject[rag]', or set kind: bm25 or lexical.")


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
    width = max(len(check.name) for check in checkup.machine) + 2
    lines = [f"{check.name:<{width}}{check.value}" for check in checkup.machine]
    if checkup.recipes:
        width = max(len(check.name) for check in checkup.recipes) + 2
        lines.append("")
        for check in checkup.recipes:
            n = len(check.problems)
            state = "ok" if not n else f"{n} problem{'s' if n > 1 else ''}"
            lines.append(f"{check.name:<{width}}{state:<13}{check.value}")
    if not checkup.problems:
        return "\n".join([*lines, "", "No problems found."])
    lines += ["", f"{len(checkup.problems)} problems:"]
    by_fix: dict[str, list[Advice]] = {}
    for problem in checkup.problems:
        by_fix.setdefault(problem.fix, []).append(problem)
    for fix, problems in by_fix.items():
        lines.append(f"- {_first_values([problem.message for problem in problems], '; ')}")
        lines.append(f"  where: {_first_values([problem.location for problem in problems], ', ')}")
        lines.append(f"  fix:   {fix}")
    return "\n".join(lines)


def _first_values(values: Sequence[str], separator: str) -> str:
    """Return the first three different values and the number of others."""
    different = list(dict.fromkeys(values))
    more = f" and {len(different) - 3} more" if len(different) > 3 else ""
    return separator.join(different[:3]) + more
