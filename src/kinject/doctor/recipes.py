"""What each recipe would do on this machine, and what keeps it from starting."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kinject.doctor.findings import Complaint
from kinject.errors import InputError, KinjectError, RecipeError
from kinject.models import choose_attention, choose_device, has_fast_bf16, varlen_unavailable_reason
from kinject.recipe import GeneratorSection, Recipe, read_recipe
from kinject.recipe.read import Verb
from kinject.recipe.yaml_lines import read_yaml

_SECTION: Mapping[str, Verb] = {
    "augment": "augment",
    "questions": "questions",
    "eval": "eval",
    "study": "study",
    "trainer": "train",
}
"""Section -> the verb that it is for."""


@dataclass(frozen=True)
class RecipeFinding:
    """One recipe: what it would do here, what is in its way, and the environment variables that it reads keys from."""

    name: str
    value: str
    complaints: tuple[Complaint, ...]
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Place:
    makers: Mapping[str, str]
    hub_reachable: bool
    offline: bool
    answers: Callable[[str], bool]


def look_at(
    files: Sequence[Path], *, hub_reachable: bool, offline: bool, answers: Callable[[str], bool]
) -> Iterator[RecipeFinding]:
    """Yield a finding for each recipe; configurations of accelerate's are passed over. `answers` says whether a URL does."""
    place = _Place(_makers(files), hub_reachable, offline, answers)
    for file in files:
        try:
            if "compute_environment" in read_yaml(file).root:
                continue
            recipe = read_recipe(file)
        except RecipeError as error:
            complaints = tuple(
                Complaint(fault.where, f"{fault.key}: {fault.what}", "Mend the recipe.") for fault in error.faults
            )
            yield RecipeFinding(str(file), "cannot be read", complaints)
            continue
        except KinjectError as error:
            yield RecipeFinding(str(file), "cannot be read", (Complaint(str(file), str(error), "Check the path."),))
            continue
        yield _finding(recipe, place)


def _makers(files: Sequence[Path]) -> dict[str, str]:
    """Return run folder -> the command that fills it, of all recipes at hand."""
    makers = {"runs/sandbox/base-corpus.jsonl": "kinject sandbox corpus"}
    for file in files:
        try:
            root = read_yaml(file).root
        except KinjectError:
            continue  # told where its turn comes
        verb = next((verb for section, verb in _SECTION.items() if section in root), None)
        if verb is not None and isinstance(root.get("run_dir"), str):
            makers.setdefault(root["run_dir"], f"kinject {verb} {file}")
    return makers


def _finding(recipe: Recipe, place: _Place) -> RecipeFinding:
    words, complaints = [], list(_missing(recipe, place))
    if recipe.model is not None and recipe.trainer:
        said, more = _training(recipe)
        words.append(said)
        complaints += more
    names = [recipe.model.path] if recipe.model is not None and recipe.model.path else []
    names += list(recipe.eval.models.values()) if recipe.eval is not None else []
    complaints += [item for name in dict.fromkeys(names) for item in _hub_model(recipe, name, place)]
    if recipe.eval is not None:
        words.append(f"scores on {choose_device('auto')}")
        complaints += _retrieval(recipe)
    generators = [item for item in _generators(recipe) if item.kind == "openai"]
    words += [f"asks {item.model or 'a model'} at {item.base_url or 'OpenAI'}" for item in generators]
    for item in generators:
        complaints += _endpoint(recipe, item, place)
    keys = tuple(item.api_key_env for item in generators)
    return RecipeFinding(str(recipe.path), "; ".join(words) or "runs in this process", tuple(complaints), keys)


def _missing(recipe: Recipe, place: _Place) -> Iterator[Complaint]:
    """Yield a complaint for each input that is not there, with the recipe that makes it where one does."""
    verbs = [verb for section, verb in _SECTION.items() if section in recipe.raw]
    for verb in verbs:
        try:
            read_recipe(recipe.path, verb=verb)
        except RecipeError as error:
            for fault in error.faults:
                if not fault.what.startswith("found '"):
                    yield Complaint(fault.where, f"{fault.key}: {fault.what}", "Mend the recipe.")
                    continue
                path = fault.what.split("'")[1]
                maker = next((command for folder, command in place.makers.items() if _within(path, folder)), None)
                cure = (
                    f"Run {maker} first."
                    if maker
                    else "These are your own: put them there, or name others (section.key=PATH)."
                )
                yield Complaint(fault.where, f"{path} is not there", cure)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _training(recipe: Recipe) -> tuple[str, list[Complaint]]:
    """Return what training would run on, and what of it this machine cannot do."""
    model, trainer = recipe.model, recipe.trainer
    assert model is not None
    where = str(recipe.path)
    complaints = []
    try:
        device = "cpu" if trainer.get("use_cpu") else choose_device(model.device)
        attention = choose_attention(model.attention, device)
    except InputError as error:
        what, _, cure = str(error).rpartition(" Set ")
        found, _, other = str(error).rpartition(" Or set ")
        told = (found, f"Set {other}") if found else (what, f"Set {cure}")
        return "cannot train here", [Complaint(where, *told)]
    if attention is None:
        attention = "sdpa" if varlen_unavailable_reason(device) else "torch's variable-length attention"
    dtype = "float32" if model.dtype == "auto" else model.dtype
    mixed = "bf16" if trainer.get("bf16", has_fast_bf16(device)) and not trainer.get("fp16") else ""
    mixed = "fp16" if trainer.get("fp16") else mixed
    small = "8bit" in str(trainer.get("optim", "")) or model.quantization != "none"
    if small and importlib.util.find_spec("bitsandbytes") is None:
        complaints.append(Complaint(where, "needs bitsandbytes, which is not installed", "pip install bitsandbytes"))
    if trainer.get("fp16") and device == "cpu":
        complaints.append(
            Complaint(where, "trainer.fp16: half precision with a scaler needs a GPU", "Set trainer.fp16: false.")
        )
    if trainer.get("bf16") and not has_fast_bf16(device):
        complaints.append(
            Complaint(
                where,
                f"trainer.bf16: this {device} only emulates bfloat16 (slow)",
                "Remove the line: it is chosen by itself.",
            )
        )
    kind = f", {model.quantization}" if model.quantization != "none" else ""
    return f"trains on {device} in {dtype}{f' with {mixed}' if mixed else ''}{kind}, {attention}", complaints


def _hub_model(recipe: Recipe, name: str, place: _Place) -> Iterator[Complaint]:
    """Yield a complaint for a model of the hub that is neither cached here nor to be had."""
    if Path(name).exists() or name.startswith(("runs/", ".", "/")) or place.hub_reachable:
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return  # no name of the hub: told as a missing input
    if not cached:
        cure = f"With a network: hf download {name}; or give a folder: model.path=FOLDER (eval.models.NAME=FOLDER)."
        yield Complaint(str(recipe.path), f"{name} is not cached, and the hub was not reached", cure)


def _retrieval(recipe: Recipe) -> Iterator[Complaint]:
    assert recipe.eval is not None
    retrieval = recipe.eval.retrieval
    if retrieval is None or retrieval.kind == "bm25":
        return
    missing = [name for name in ("sentence_transformers", "faiss") if importlib.util.find_spec(name) is None]
    if missing:
        what = f"eval.retrieval.kind: {retrieval.kind} needs {' and '.join(missing)}"
        yield Complaint(str(recipe.path), what, "pip install 'kinject[rag]', or set kind: bm25.")


def _generators(recipe: Recipe) -> Iterator[GeneratorSection]:
    if recipe.augment is not None:
        yield recipe.augment.generator
        if recipe.augment.judge is not None:
            yield recipe.augment.judge
    if recipe.questions is not None:
        yield recipe.questions.generator


def _endpoint(recipe: Recipe, generator: GeneratorSection, place: _Place) -> Iterator[Complaint]:
    where = str(recipe.path)
    url = generator.base_url or "https://api.openai.com/v1"
    if generator.base_url is None and not os.environ.get(generator.api_key_env):
        yield Complaint(
            where, f"the environment variable {generator.api_key_env} is not set", f"export {generator.api_key_env}=..."
        )
    if not place.offline and not place.answers(url):
        yield Complaint(
            where, f"nothing answers at {url}", "Start the endpoint, or set generator.base_url to one that runs."
        )
