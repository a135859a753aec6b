"""Make a finished run ready for use elsewhere: a plain model folder with its card, a GGUF file, a data set; upload them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import (
    check_sha256sums,
    content_id,
    file_hash,
    lock_dir,
    manifest_beside,
    read_json,
    read_manifest,
    write_json,
    write_jsonl,
    write_sha256sums,
    write_text,
)
from kinject.errors import InputError
from kinject.hub import upload_fault
from kinject.terminal import show

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM's --max-lora-rank takes."""
_CONVERTER = "convert_hf_to_gguf.py"
_AGAIN = "Delete it; kinject export makes its parts again."


@dataclass
class ExportOptions:
    """Options of an export: a run, model or adapter `folder`, and the requested parts.

    `out` is the folder of the parts (None: export in `folder`), `report` an evaluation or study whose results the card
    shows, `dtype` that of the weights (None: as they are stored), `license` an id for the cards. `gguf` is llama.cpp's
    output type, and `llama_cpp` its folder. `data` asks for a data set of the corpus and these question files. `push` and
    `push_data` are repositories of the hub, made `public` or private. An option that is None has the value of the export
    before.
    """

    folder: Path
    out: Path | None = None
    report: Path | None = None
    dtype: str | None = None
    license: str | None = None
    gguf: str | None = None
    llama_cpp: Path | None = None
    data: Sequence[Path] | None = None
    push: str | None = None
    push_data: str | None = None
    public: bool = False


@dataclass(frozen=True)
class ExportResult:
    """The folders of the parts of an export, by name (model, gguf, data), and the commands that serve the model."""

    parts: Mapping[str, Path]
    commands: tuple[str, ...]


def export(options: ExportOptions) -> ExportResult:
    """Make the parts that `options` request, and upload those that they name. A part that is there is not made again.

    Raises `InputError` for options that do not fit together, a run that is not finished, and an upload that fails;
    `DiskError` if a part cannot be written.
    """
    _check(options)
    named = {"model": options.push, "data": options.push_data}
    uploads = {part: repository for part, repository in named.items() if repository is not None}
    source = _read_source(options.folder)
    converter = _find_converter(options.llama_cpp) if options.gguf is not None else None
    out = options.out or options.folder / "export"
    with lock_dir(out):
        parts = _Parts(out)
        parts.recall(options)
        title = options.push or options.folder.resolve().name
        name, dtype = title.rpartition("/")[2], options.dtype or "auto"
        card = _model_card(title, source, options)
        parts.make("model", [source.hash, dtype], lambda part: _write_model(source, part, dtype))
        parts.write_card(card)
        if converter is not None:
            file, key = f"{name}-{options.gguf}.gguf", [parts.keys["model"], options.gguf]
            parts.make("gguf", key, lambda part: _convert(converter, out / "model", part / file, str(options.gguf)))
        if options.data is not None:
            _make_data(parts, name, source, options)
        for part, repository in uploads.items():
            parts.upload(part, repository, public=options.public)
    made = {part: out / part for part in ("model", "gguf", "data") if (out / part).is_dir()}
    return ExportResult(made, tuple(_serve_lines(out / "model", name, source)))


def _check(options: ExportOptions) -> None:
    """Raise `InputError` for options that do not fit together, before anything is made."""
    from huggingface_hub.utils._validators import validate_repo_id

    if options.push_data is not None and options.data is None:
        raise InputError(
            "--push-data: without --data there is no data set. Add --data, with question files if you like."
        )
    for option, repository in ("--push", options.push), ("--push-data", options.push_data):
        if repository is None:
            continue
        try:
            validate_repo_id(repository)
        except ValueError as error:
            raise InputError(f"{option}: found {repository!r:.80}, expected OWNER/NAME.") from error
        if reason := upload_fault():
            raise InputError(f"{option}: {reason}. Set HF_TOKEN, or leave the option out.")


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

    def recall(self, options: ExportOptions) -> None:
        """Give the options that this call leaves out the values of the call before, so that a card keeps its results."""
        for option in ("report", "license", "dtype", "push"):
            value = getattr(options, option)
            if value is None and f"--{option}" in self.keys:
                setattr(options, option, self.keys[f"--{option}"])
            elif value is not None:
                self.keys[f"--{option}"] = str(value.resolve() if isinstance(value, Path) else value)

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

    def upload(self, name: str, repository: str, *, public: bool) -> None:
        """Upload the part `name` and nothing else, unless this repository has had the same from here."""
        from huggingface_hub import HfApi

        folder, upload_key = self.out / name, f"{name} uploaded to {repository}"
        content = self.keys[name] + (self.keys["card"] if name == "model" else "")
        if self.keys.get(upload_key) == content:
            show(f"{repository}: has {folder} already")
            return
        kind, api = ("dataset" if name == "data" else "model"), HfApi()
        try:
            api.create_repo(repository, repo_type=kind, private=not public, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, repo_type=kind, folder_path=folder, commit_message=f"Upload {name} with kinject"
            )
        except Exception as error:  # the hub's client raises its own errors and those of its network library
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
            raise InputError(
                f"{folder} is written, but was not uploaded to {repository}: {reason}. Run the same command again, or: "
                f"hf upload {repository} {shlex.quote(str(folder))} --repo-type {kind}"
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
        "datasets": [options.push_data] if options.push_data and options.public else [],
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


def _make_data(parts: _Parts, name: str, source: _Source, options: ExportOptions) -> None:
    """Make the data set: the corpus of the run and the question files, with a card."""
    from kinject.corpus.questions import read_questions

    if not source.manifest:
        raise InputError(
            f"--data: {options.folder}: a model, which does not name its corpus. Give the run_dir of kinject train."
        )
    corpus = Path(source.manifest["recipe"]["corpus"]["path"])
    if not corpus.is_file():
        raise InputError(f"--data: {corpus}: no such file. Run it in the folder in which {options.folder} was trained.")
    sha256 = file_hash(corpus)
    if sha256 != source.manifest["inputs"].get("corpus"):
        raise InputError(f"--data: {corpus}: not the corpus of {options.folder} any more (its hash is another).")
    files_of_questions = options.data or ()
    questions = {path.stem: read_questions(path) for path in files_of_questions}
    if len(questions) < len(files_of_questions):
        raise InputError("--data: two question files have the same name. Rename one.")
    with corpus.open("rb") as file:
        n_rows = {"corpus": sum(1 for line in file if line.strip())} | {
            key: len(value) for key, value in questions.items()
        }
    files = {"corpus": "corpus.jsonl"} | {stem: f"questions/{stem}.jsonl" for stem in questions}
    configs = [{"config_name": key, "data_files": value} for key, value in files.items()]
    front = _front_matter({"license": options.license, "tags": ["kinject"], "configs": configs})
    table = [f"| {key} | {files[key]} | {n:,} |" for key, n in n_rows.items()]
    card = "\n".join([
        front, f"# {name}: corpus and questions", "", "| configuration | file | rows |", "|---|---|---|", *table, "",
        "A row of the corpus has `text`, `messages`, or `prompt` and `completion`; `origin` marks documents and "
        "paraphrases. A question has `choices` and the index of the correct one, `answer`. Paraphrases are written "
        "by a model: "
        "they may hold errors. The documents keep the rights of their authors.", "",
    ])  # fmt: skip

    def write(part: Path) -> None:
        shutil.copyfile(corpus, part / "corpus.jsonl")
        for stem, rows in questions.items():
            (part / "questions").mkdir(exist_ok=True)
            write_jsonl(part / "questions" / f"{stem}.jsonl", rows)
        write_text(part / "README.md", card)

    parts.make("data", [sha256, card, [file_hash(path) for path in files_of_questions]], write)


def _serve_lines(model: Path, name: str, source: _Source) -> list[str]:
    """Return the commands that serve the exported model, and the adapter without folding it in."""
    from kinject.models import ADAPTER_CONFIG, read_object

    lines = [
        f"vllm serve {shlex.quote(str(model))} --served-model-name {shlex.quote(name)}",
        f"transformers serve {shlex.quote(str(model))}",
    ]
    if not any((model / file).is_file() for file in ("chat_template.jinja", "chat_template.json")):
        lines.append("# its tokenizer has no chat template: ask /v1/completions of vLLM; transformers serve needs one")
    if not source.is_adapter:
        return lines
    settings = read_object(source.model / ADAPTER_CONFIG)
    rank = max([int(settings.get("r") or 0), *(settings.get("rank_pattern") or {}).values()])
    reasons = [
        key for key in ("use_dora", "modules_to_save", "trainable_token_indices", "lora_bias") if settings.get(key)
    ]
    if rank > _RANKS[-1]:
        reasons.append(f"rank {rank}")
    if reasons:
        return [
            *lines,
            f"# vLLM cannot serve the adapter by itself ({', '.join(reasons)}); the folded model is the way",
        ]
    most = next(allowed for allowed in _RANKS if allowed >= rank)
    adapter = shlex.quote(f"{name}={source.model}")
    lines.append(f"vllm serve {shlex.quote(source.base)} --enable-lora --max-lora-rank {most} --lora-modules {adapter}")
    return lines
