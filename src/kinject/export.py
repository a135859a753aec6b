"""Make a finished run ready for use elsewhere: a plain model folder with its card, a GGUF file; upload the model."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import (
    check_sha256sums,
    content_id,
    lock_dir,
    manifest_beside,
    read_json,
    read_manifest,
    write_json,
    write_sha256sums,
    write_text,
)
from kinject.errors import InputError
from kinject.hub import upload_fault
from kinject.terminal import show

_CONVERTER = "convert_hf_to_gguf.py"
_AGAIN = "Delete it; kinject export makes its parts again."


@dataclass
class ExportOptions:
    """Options of an export: a run, model or adapter `folder`, and the requested parts.

    `out` is the folder of the parts (None: export in `folder`), `report` an evaluation or study whose results the card
    shows, `dtype` that of the weights (None: as they are stored), `license` an id for the card. `gguf` is llama.cpp's
    output type, and `llama_cpp` its folder. `push` is a repository of the hub, made `public` or private.
    """

    folder: Path
    out: Path | None = None
    report: Path | None = None
    dtype: str | None = None
    license: str | None = None
    gguf: str | None = None
    llama_cpp: Path | None = None
    push: str | None = None
    public: bool = False


@dataclass(frozen=True)
class ExportResult:
    """The folders of the parts of an export, by name (model, gguf), and the commands that serve the model."""

    parts: Mapping[str, Path]
    commands: tuple[str, ...]


def export(options: ExportOptions) -> ExportResult:
    """Make the parts that `options` request, and upload the model if they name a repository.

    A part that is there is not made again. Raises `InputError` for a run that is not finished and an upload that fails;
    `DiskError` if a part cannot be written.
    """
    if options.push is not None:
        _check_repository(options.push)
    source = _read_source(options.folder)
    converter = _find_converter(options.llama_cpp) if options.gguf is not None else None
    out = options.out or options.folder / "export"
    with lock_dir(out):
        parts = _Parts(out)
        title = options.push or options.folder.resolve().name
        name, dtype = title.rpartition("/")[2], options.dtype or "auto"
        card = _model_card(title, source, options)
        parts.make("model", [source.hash, dtype], lambda part: _write_model(source, part, dtype))
        parts.write_card(card)
        if converter is not None:
            file, key = f"{name}-{options.gguf}.gguf", [parts.keys["model"], options.gguf]
            parts.make("gguf", key, lambda part: _convert(converter, out / "model", part / file, str(options.gguf)))
        if options.push is not None:
            parts.upload(options.push, public=options.public)
    made = {part: out / part for part in ("model", "gguf") if (out / part).is_dir()}
    return ExportResult(made, tuple(_serve_lines(out / "model", name, source)))


def _check_repository(name: str) -> None:
    """Raise `InputError` unless a model can be uploaded to the repository `name`."""
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError as error:
        raise InputError(f"--push: found {name!r:.80}, expected OWNER/NAME.") from error
    if reason := upload_fault():
        raise InputError(f"--push: {reason}. Set HF_TOKEN, or leave the option out.")


@dataclass(frozen=True)
class _Source:
    """The source: the model or adapter, its hash, its base ("" if unknown), and the manifest of its run ({} without)."""

    model: Path
    hash: str
    base: str
    is_adapter: bool
    manifest: Mapping[str, Any]

    @property
    def published_base(self) -> str:
        """The base's name on the hub; "" for a folder, whose path means nothing to others."""
        return "" if not self.base or os.path.exists(self.base) else self.base


def _read_source(folder: Path) -> _Source:
    """Return the source in `folder`, of a run or a model. Raises `InputError` if that is no finished model."""
    from kinject.models import ADAPTER_CONFIG, base_of_adapter, check_model, model_hash

    run = folder if (folder / "manifest.json").is_file() else None
    manifest = (read_manifest(folder / "manifest.json") if run else None) or {}
    if manifest and manifest.get("stage") != "train":
        raise InputError(
            f"{folder}: the run of kinject {manifest.get('stage')}, which makes no model. Give one of train."
        )
    if manifest and not manifest["counts"].get("finished"):
        raise InputError(f"{folder}: this run is not finished. Finish it: kinject train RECIPE --resume")
    model = folder / "model" if run or (folder / "model").is_dir() else folder
    if not model.is_dir():
        raise InputError(f"{model}: no such folder. Give the run_dir of a finished kinject train, or a model folder.")
    check_model(model)
    adapter = model / ADAPTER_CONFIG
    section = (manifest.get("recipe") or {}).get("model") or {}
    base = base_of_adapter(adapter) if adapter.is_file() else str(section.get("path") or "")
    return _Source(model, model_hash(model), base, adapter.is_file(), manifest)


class _Parts:
    """The parts of an export, each a folder made whole or not at all, with what it was made of in export.json."""

    def __init__(self, out: Path) -> None:

        self.out, self.path = out, out / "export.json"
        self.keys: dict[str, str] = read_json(self.path, _AGAIN) if self.path.exists() else {}

    def write_card(self, card: str) -> None:
        """Write the model's card, if it is another than the one that is there."""

        path, self.keys["card"] = self.out / "model" / "README.md", content_id(card)
        if not path.is_file() or path.read_text("utf-8") != card:
            write_text(path, card)
            write_sha256sums(path.parent)
            write_json(self.path, self.keys)

    def make(self, name: str, made_of: object, write: Callable[[Path], None]) -> None:
        """Let `write` fill the folder `name`, unless it was made of the same and has not changed since."""

        folder, part, key = self.out / name, self.out / f".{name}.part", content_id(made_of)
        if self.keys.get(name) == key and folder.is_dir() and not check_sha256sums(folder)[1]:
            show(f"{folder}: is there already")
            return
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        write(part)
        write_sha256sums(part)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(part, folder)
        self.keys[name] = key
        write_json(self.path, self.keys)
        show(f"{folder}: written")

    def upload(self, repository: str, *, public: bool) -> None:
        """Upload the model and nothing else, unless this repository has had the same from here."""
        from huggingface_hub import HfApi

        folder, upload_key, content = (
            self.out / "model",
            f"uploaded to {repository}",
            self.keys["model"] + self.keys["card"],
        )
        if self.keys.get(upload_key) == content:
            show(f"{repository}: has {folder} already")
            return
        api = HfApi()
        try:
            api.create_repo(repository, private=not public, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message="Upload model with kinject"
            )
        except Exception as error:  # the hub's client raises its own errors and those of its network library
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"{folder} is written, but was not uploaded to {repository}: {reason}. Run the same command again, or: "
                f"hf upload {repository} {shlex.quote(str(folder))}"
            ) from error
        self.keys[upload_key] = content
        write_json(self.path, self.keys)
        show(f"uploaded to {commit.repo_url}")


def _write_model(source: _Source, part: Path, dtype: str) -> None:
    """Write the model, an adapter folded in. Raises `InputError` if a weight is not finite in `dtype`."""
    from kinject.models import model_files, not_finite_in
    from kinject.train.merge import merge_adapter, save_as

    if source.is_adapter:
        merge_adapter(source.model, part, dtype)
    else:
        for path in model_files(source.model):
            shutil.copyfile(path, part / path.name)
        if dtype != "auto":
            save_as(part, dtype, None)
    fault = not_finite_in(part).rpartition(": ")[2]
    if fault:
        shutil.rmtree(part)
        raise InputError(f"--dtype: {fault} of {source.model} is out of the range of {dtype}. Leave --dtype out.")


def _front_matter(values: Mapping[str, Any]) -> str:
    import yaml

    return f"---\n{yaml.safe_dump({k: v for k, v in values.items() if v}, sort_keys=False, allow_unicode=True)}---\n"


def _license(source: _Source, license_name: str | None) -> str:
    """Return the licence for a card: the one `license_name`, else that of the card in the base's folder, else "".

    Raises `InputError` if that card cannot be read.
    """
    from huggingface_hub import ModelCard

    from kinject.models import first_line

    card = Path(source.base or ".") / "README.md"
    if license_name is not None or not source.base or not card.is_file():
        return license_name or ""
    try:
        return str(ModelCard.load(card).data.to_dict().get("license") or "")
    except Exception as error:  # YAML's own errors, and any other for values that are none
        raise InputError(f"{card}: its front matter cannot be read ({first_line(error)}). Give --license.") from error


def _model_card(title: str, source: _Source, options: ExportOptions) -> str:
    """Return the model's README.md: the hub's front matter, results, training, use. No path of this machine is in it."""
    from kinject import __version__
    from kinject.report.files import read_report, render_card_tables

    base = source.published_base
    front = _front_matter({
        "license": _license(source, options.license), "base_model": base, "base_model_relation": "finetune" if base else "",
        "library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["kinject", "knowledge-injection"],
    })  # fmt: skip
    start = base or ("a model in a local folder" if source.base else "random weights")
    trained_weights = "a LoRA adapter, folded in" if source.is_adapter else "all weights"
    lines = [
        front,
        f"# {title.rpartition('/')[2]}",
        "",
        f"Trained from {start} with kinject {__version__} ({trained_weights}).",
        "",
        "## Results",
        "",
    ]
    if options.report is None:
        lines += ["This model has not been evaluated, or its evaluation was not given (`kinject export --report`).", ""]
    else:
        path = Path(options.report)
        path = path if path.is_file() else path / "report.json"
        arm = _own_arm(path, source.model)
        lines += [f"This model is the arm **{arm}**.", ""] if arm else []
        lines += [render_card_tables(read_report(path)), ""]
    facts = _training_facts(source.manifest)
    if facts:
        lines += [
            "## Training",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {value} |" for key, value in facts.items()),
            "",
        ]
    lines += [
        "## Use", "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        f'model = AutoModelForCausalLM.from_pretrained("{title}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{title}")', "```", "",
        "It learned the statements of its corpus; it may state wrong facts fluently. Accuracies hold for the question sets "
        "above, asked as written there.", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _own_arm(report: Path, model: Path) -> str:
    """Return the name that the evaluation of `report` gave to `model`; "" if its manifest does not name it."""

    section = (manifest_beside(report).get("recipe") or {}).get("eval") or {}
    for name, value in (section.get("models") or {}).items():
        path = (value.get("adapter") or value.get("path")) if isinstance(value, dict) else value
        if isinstance(path, str) and Path(path).resolve() == model.resolve():
            return str(name)
    return ""


def _training_facts(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return label -> value of a run: how long, how much, and the settings of its trainer that the recipe names."""
    if not manifest:
        return {}
    counts, trainer = manifest["counts"], manifest["recipe"].get("trainer") or {}
    facts = {
        "steps": f"{counts['steps']:,}", "epochs": f"{counts['epochs']:.2f}",
        "tokens learned": f"{counts['learned_tokens']:,}", "mean training loss": f"{counts['loss']:.3f}",
        "rows of an update": f"{counts['effective_batch']['rows']:,}",
    }  # fmt: skip
    named = ("learning_rate", "lr_scheduler_type", "optim", "max_length", "weight_decay")
    return facts | {key: str(trainer[key]) for key in named if key in trainer}


def _find_converter(folder: Path | None) -> Path:
    """Return llama.cpp's converter. Raises `InputError` if it is not here."""
    directory = folder or Path(os.environ.get("LLAMA_CPP") or ".")
    converter = directory / _CONVERTER if folder or os.environ.get("LLAMA_CPP") else shutil.which(_CONVERTER)
    if converter is None or not Path(converter).is_file():
        fault = f"{converter}: no such file" if converter else f"{_CONVERTER} is not on the PATH"
        raise InputError(
            f"--gguf: {fault}. It comes with llama.cpp (github.com/ggml-org/llama.cpp): give its folder with --llama-cpp, or in "
            "the environment variable LLAMA_CPP."
        )
    return Path(converter)


def _convert(converter: Path, model: Path, file: Path, kind: str) -> None:
    """Write a GGUF file of `model` with llama.cpp's converter. Raises `InputError` with its last line if it fails."""
    command = [sys.executable, str(converter), str(model), "--outfile", str(file), "--outtype", kind]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode or not file.is_file():
        last = (completed.stderr.strip().splitlines() or ["no message"])[-1][:300]
        raise InputError(f"--gguf: {_CONVERTER} failed ({last}). The command: {shlex.join(command)}")


def _serve_lines(model: Path, name: str, source: _Source) -> list[str]:
    """Return the commands that serve the exported model, and the adapter without folding it in."""
    lines = [
        f"vllm serve {shlex.quote(str(model))} --served-model-name {shlex.quote(name)}",
        f"transformers serve {shlex.quote(str(model))}",
    ]
    if not any((model / file).is_file() for file in ("chat_template.jinja", "chat_template.json")):
        lines.append("# its tokenizer has no chat template: ask /v1/completions of vLLM; transformers serve needs one")
    if source.is_adapter:
        adapter = shlex.quote(f"{name}={source.model}")
        lines.append(
            f"vllm serve {shlex.quote(source.base)} --enable-lora --lora-modules {adapter}  # rank up to 16, no DoRA"
        )
    return lines
