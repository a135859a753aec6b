"""Make a finished run ready for use elsewhere: one plain model folder with its card, and the
commands that serve it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from kinject.disk import (
    delete_file,
    file_hash,
    lock_dir,
    read_json,
    replace_folder,
    verified_hashes,
    write_sha256sums,
    write_text,
)
from kinject.errors import InputError
from kinject.export.prove import PROOF, Proof, prove, read_evaluation
from kinject.gguf import KINDS, write_gguf
from kinject.gguf_files import PACKAGE, model_folder
from kinject.hub import is_hub_name
from kinject.manifests import EvalManifest, TrainManifest, manifest_beside, read_manifest

log = logging.getLogger(__name__)

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_SETTINGS_ON_CARD = (
    "learning_rate",
    "lr_scheduler_type",
    "optim",
    "max_length",
    "weight_decay",
)
"""Keys of a recipe's trainer that the model card lists."""


@dataclass
class ExportOptions:
    """Options of an export of `folder`: a run, a model or an adapter.

    The model goes into `out`/model (None: `folder`/export/model). `report` is an evaluation or
    study whose results the card shows, `dtype` that of the weights (None: as they are stored),
    `license` an id for the card. `gguf` (f16, bf16, q8_0) is the kind of a GGUF file that is
    written, too. `prove` is an evaluation, by which the model, that file and every one of `copies`
    (folders, GGUF files, addresses of servers) are compared with the trained model (`prove`).
    """

    folder: Path
    out: Path | None = None
    report: Path | None = None
    dtype: str | None = None
    license: str | None = None
    gguf: str | None = None
    prove: Path | None = None
    copies: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExportResult:
    """The model folder that was written, the commands that serve or publish it, the proof of each
    copy, the GGUF file, and a line on what to serve.

    No command is for a copy that its proof refuses.
    """

    folder: Path
    commands: tuple[str, ...]
    proofs: tuple[Proof, ...] = ()
    gguf: Path | None = None
    serve: str = ""


def export(options: ExportOptions) -> ExportResult:
    """Write the model folder that `options` describe, whole or not at all; one that is there is
    replaced.

    Raises `InputError` for a run that is not finished and for weights out of the dtype's range,
    `DiskError` if the folder cannot be written.
    """
    _check_options(options)
    source = _read_source(options.folder)
    out = options.out or options.folder / "export"
    # An adapter would be replaced by the model that it was folded into.
    if os.path.realpath(out / "model") == os.path.realpath(source.model):
        raise InputError(f"--out: {source.model} would be replaced by its export. Choose another.")
    name = _name_of(options.folder)
    # Before the model is copied: the report may be one that cannot be read, or have no questions.
    card = _model_card(name, source, options)
    if options.prove:
        read_evaluation(options.prove, str(source.model))
    folder, proofs = out / "model", list[Proof]()
    # To the end: another export there would prove half of this one, or delete its proof.
    with lock_dir(out, stage="export"):
        file = _write_files(source, out, card, options)
        if options.prove:
            copies = [str(folder), *map(str, filter(None, [file])), *options.copies]
            proofs = prove(str(source.model), copies, options.prove, out / PROOF)
    failed = {proof.source for proof in proofs if not proof.holds}
    commands = list[str]()
    if str(folder) not in failed:
        commands += _folder_commands(folder, name)
    # The adapter itself is the trained model, with which the others are compared.
    if source.is_adapter:
        commands.append(_adapter_command(name, source))
    if file and str(file) not in failed:
        commands.append(f"llama-server -m {shlex.quote(str(file))}")
    return ExportResult(folder, tuple(commands), tuple(proofs), file, _decide(proofs, source))


def _check_options(options: ExportOptions) -> None:
    for flag, value, allowed in (
        ("--dtype", options.dtype, _DTYPES),
        ("--gguf", options.gguf, KINDS),
    ):
        if value is not None and value not in allowed:
            raise InputError(f"{flag}: found {value!r}, allowed: {', '.join(allowed)}.")
    if options.copies and options.prove is None:
        raise InputError("--copy: is for --prove only.")


def _write_files(source: _Source, out: Path, card: str, options: ExportOptions) -> Path | None:
    """Write the model folder and, if it is asked for, the GGUF file of it, which is returned. The
    caller holds `out`."""
    folder, part = out / "model", out / ".model.part"
    file = out / f"model-{options.gguf}.gguf" if options.gguf else None
    # Left by an export that was killed.
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    _write_model(source, part, options.dtype or "auto")
    write_text(part / "README.md", card)
    write_sha256sums(part)
    # Before the folder changes: a kill leaves no file, and no proof, that is another model's.
    if file:
        delete_file(file)
    shutil.rmtree(out / PROOF, ignore_errors=True)
    replace_folder(part, folder)
    if options.gguf and file:
        write_gguf(folder, file, options.gguf)
    return file


def _name_of(folder: Path) -> str:
    """Return the name of a model: its folder's, and of a run in a folder runs the names below that:
    kinject try has the training of every NAME in runs/NAME/train."""
    parts = list(folder.resolve().parts)
    own = parts[-1]
    if "runs" not in parts:
        return own
    below = parts[len(parts) - parts[::-1].index("runs") :]
    return "-".join(part for part in below if part not in ("train", "model")) or own


def _decide(proofs: Sequence[Proof], source: _Source) -> str:
    """Return a line on which file to serve: of those here that answer as the trained model, the
    one with the fewest bits of a weight; "" without a proof."""
    here = [proof for proof in proofs if not proof.source.startswith(("http://", "https://"))]
    sound = [proof for proof in here if proof.holds]
    if sound:
        # Of several with as many bits the last: a file behind the folder that it was made of.
        best = min(reversed(sound), key=attrgetter("bits"))
        return f"Serve {best.source}: it answers as the trained model."
    if here:
        return f"Serve none of these: each differs from the trained model, {source.model}."
    return ""


@dataclass(frozen=True)
class _Source:
    """The source: the folder of its weights, its base ("" if unknown), and the manifest of its run,
    if there is one."""

    model: Path
    base: str
    is_adapter: bool
    manifest: TrainManifest | None


def _read_source(folder: Path) -> _Source:
    """Return the source in `folder`, of a run or a model. Raises `InputError` if that is no
    finished model."""
    from kinject.models import ADAPTER_CONFIG, base_of_adapter, check_model

    manifest = _read_finished(folder)
    model = folder
    if manifest is not None or (folder / "model").is_dir():
        model = folder / "model"
    if not model.is_dir():
        raise InputError(
            f"{model}: no such folder. Give the run_dir of a finished kinject train, or a model "
            "folder."
        )
    check_model(model)
    adapter = model / ADAPTER_CONFIG
    if adapter.is_file():
        return _Source(model, base_of_adapter(adapter), True, manifest)
    if manifest is None:
        return _Source(model, "", False, None)
    return _Source(model, manifest.recipe.model.path or "", False, manifest)


def _read_finished(folder: Path) -> TrainManifest | None:
    """Return the manifest of the run in `folder`, None without a run. Raises `InputError` for
    one that is no finished training."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    if not isinstance(manifest, TrainManifest):
        raise InputError(
            f"{folder}: the run of kinject {manifest.stage}, which makes no model. Give one "
            "of train."
        )
    if manifest.finished() is None:
        raise InputError(
            f"{folder}: this run is not finished. Finish it: kinject train RECIPE --resume"
        )
    return manifest


def _write_model(source: _Source, part: Path, dtype: str) -> None:
    """Write the model, an adapter folded in. Raises `InputError` if a weight is not finite in
    `dtype`."""
    from kinject.models import check_finite_in, copy_model_file, model_files, not_finite_in
    from kinject.train.merge import merge_adapter, save_as, untie_own_head

    if source.is_adapter:
        merge_adapter(source.model, part, dtype)
    else:
        # The copy gets new checksums, which would hide a file that is damaged here.
        hashes = verified_hashes(source.model)
        for path in model_files(source.model):
            copy, name = copy_model_file(path, source.model, part), path.relative_to(source.model)
            # A training may have replaced it since.
            if str(name) in hashes and file_hash(copy) != hashes[str(name)]:
                raise InputError(
                    f"{path}: changed while it was copied. Run the same command again."
                )
        if dtype != "auto":
            save_as(part, dtype, None)
    fault = not_finite_in(part).rpartition(": ")[2]
    if not fault:
        untie_own_head(part)
        return
    shutil.rmtree(part)
    # What is not finite there is no matter of the dtype.
    check_finite_in(source.model)
    if dtype == "auto":
        raise InputError(
            f"{source.model}: {fault} is not finite once the adapter is folded into its base. "
            "Check the base model, or train the adapter again."
        )
    raise InputError(
        f"--dtype: {fault} of {source.model} is out of the range of {dtype}. Leave --dtype out."
    )


def _model_card(name: str, source: _Source, options: ExportOptions) -> str:
    """Return the model's README.md: the hub's front matter, results, training, use. No path of this
    machine is in it."""
    from kinject import __version__

    start = "random weights"
    if source.base:
        start = _public_base(source) or "a model in a local folder"
        revision = _revision_of(source)
        if revision:
            start += f" (revision {revision})"
    if source.base.startswith(PACKAGE):
        start = f"the model of the Python package {source.base.removeprefix(PACKAGE)}"
    origin = f"Trained from {start} with kinject {__version__}"
    if not source.base and source.manifest is None:
        origin = (
            f"Exported with kinject {__version__} from a folder without the run of its training"
        )
    trained = _trained_part(source)
    if trained:
        origin += f" ({trained})"
    lines = [
        *_front_matter(source, options),
        f"# {name}",
        "",
        f"{origin}.",
        "",
        *_card_results(source, options),
    ]
    facts = _training_facts(source.manifest)
    if facts:
        lines += ["## Training", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in facts.items()]
        lines.append("")
    lines += [
        "## Use",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        "```",
        "",
        "It learned the statements of its corpus; it may state wrong facts fluently. Accuracies "
        "hold for the question sets above, asked as written there.",
        "",
    ]
    return "\n".join(lines)


def _trained_part(source: _Source) -> str:
    """Return what of the model was trained; "" where no run and no adapter tells."""
    from kinject.models import ADAPTER_CONFIG

    if source.is_adapter:
        kind = str(read_json(source.model / ADAPTER_CONFIG, "").get("peft_type"))
    elif source.manifest is None:
        return ""
    elif source.manifest.recipe.adapter is not None:
        # The training has folded it in by itself (adapter.merge).
        kind = str(source.manifest.recipe.adapter.get("type", "lora"))
    elif source.manifest.recipe.model.freeze:
        return "a part of the weights"
    else:
        return "all weights"
    if kind.lower() == "lora":
        return "a LoRA adapter, folded in"
    return f"an adapter of peft's type {kind.upper()}, folded in"


def _public_base(source: _Source) -> str:
    """Return the base's name on the hub; "" for a folder, which means nothing to others, and for a
    package, which the hub refuses on a card."""
    # A folder may be on the machine that trained alone.
    if os.path.exists(source.base) or not is_hub_name(source.base):
        return ""
    return source.base


def _revision_of(source: _Source) -> str | None:
    """Return the revision of the base on the hub, None for the newest or an unknown one."""
    from kinject.models import ADAPTER_CONFIG, revision_of_base

    if source.manifest is not None:
        return source.manifest.recipe.model.revision
    if source.is_adapter:
        return revision_of_base(source.model / ADAPTER_CONFIG)
    return None


def _front_matter(source: _Source, options: ExportOptions) -> list[str]:
    import yaml

    front = {
        "license": options.license,
        "base_model": _public_base(source),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["kinject", "knowledge-injection"],
    }
    filled = {key: value for key, value in front.items() if value}
    return [f"---\n{yaml.safe_dump(filled, sort_keys=False)}---\n"]


def _card_results(source: _Source, options: ExportOptions) -> list[str]:
    """Return the lines of the card on the results of an evaluation, or that there is none."""
    from kinject.report.files import read_report, render_card_tables

    if options.report is None:
        missing = (
            "This model has not been evaluated, or its evaluation was not given (`kinject export "
            "--report`)."
        )
        return ["## Results", "", missing, ""]
    path = options.report
    if not path.is_file():
        path = options.report / "report.json"
    lines = ["## Results", ""]
    arm = _own_arm(path, source.model)
    if arm:
        _check_evaluated(path, arm, source)
        lines += [f"This model is the arm **{arm}**.", ""]
    elif isinstance(manifest_beside(path), EvalManifest):
        # It may be one of them under another path, or behind an endpoint.
        log.warning(
            f"--report: {path.parent} names other models than {source.model}. Unless one of them "
            "is the same, the card shows the results of others: evaluate this one first."
        )
        lines += ["The evaluation does not tell which of its models this is, if any.", ""]
    return [*lines, render_card_tables(path.parent, read_report(path)), ""]


def _own_arm(report: Path, model: Path) -> str:
    """Return the name that the evaluation of `report` gave to `model`; "" if its manifest does not
    name it."""
    manifest = manifest_beside(report)
    if not isinstance(manifest, EvalManifest):
        return ""
    for name, path in manifest.recipe.eval.model_paths().items():
        # A manifest may name a link that leads to itself, or hold what no path does.
        if "\0" not in path and os.path.realpath(path) == os.path.realpath(model):
            return name
    return ""


def _check_evaluated(report: Path, arm: str, source: _Source) -> None:
    """Raise `InputError` if the model that the evaluation of `report` calls `arm` has other weights
    since."""
    from kinject.eval.scoring.answers import hash_model
    from kinject.models import model_hash

    manifest = manifest_beside(report)
    assert isinstance(manifest, EvalManifest)
    evaluated = manifest.inputs.get(manifest.recipe.eval.model_paths()[arm])
    # The hash of a base on the hub depends on the revision that was loaded.
    if evaluated is None or (source.is_adapter and not model_folder(source.base).exists()):
        return
    # An adapter that was named beside its base is hashed alone.
    if evaluated not in (hash_model(str(source.model), None), model_hash(source.model)):
        raise InputError(
            f"--report: {report.parent} evaluated {source.model} while it had other weights. "
            "Run that evaluation again."
        )


def _training_facts(manifest: TrainManifest | None) -> dict[str, str]:
    """Return label -> value of a run: how long, how much, and the settings of its trainer that the
    recipe names; {} for a model without a run."""
    counts = None if manifest is None else manifest.finished()
    if manifest is None or counts is None:
        return {}
    facts = {"steps": f"{counts.steps:,}", "epochs": f"{counts.epochs:.2f}"}
    if counts.learned_tokens is not None:
        # The manifests of the models that ship have no such count.
        facts["tokens learned"] = f"{counts.learned_tokens:,}"
    facts["mean training loss"] = f"{counts.loss:.3f}"
    facts["rows of an update"] = f"{counts.effective_batch.rows:,}"
    trainer = manifest.recipe.trainer
    return facts | {key: str(trainer[key]) for key in _SETTINGS_ON_CARD if key in trainer}


def _folder_commands(model: Path, name: str) -> Iterator[str]:
    """Yield the commands that serve and publish the exported model folder."""
    folder = shlex.quote(str(model))
    yield f"vllm serve {folder} --served-model-name {shlex.quote(name)}"
    yield f"transformers serve {folder}"
    templates = ("chat_template.jinja", "chat_template.json")
    if not any((model / template).is_file() for template in templates):
        yield (
            "# its tokenizer has no chat template: ask /v1/completions of vLLM; transformers serve "
            "needs one"
        )
    yield f"hf upload OWNER/NAME {folder}"


def _adapter_command(name: str, source: _Source) -> str:
    """Return the command that serves an adapter without folding it in."""
    from kinject.models import ADAPTER_CONFIG, revision_of_base

    adapter = shlex.quote(f"{name}={source.model}")
    base = shlex.quote(str(model_folder(source.base)))
    revision = revision_of_base(source.model / ADAPTER_CONFIG)
    if revision:
        base += f" --revision {shlex.quote(revision)}"
    return f"vllm serve {base} --enable-lora --lora-modules {adapter}  # rank up to 16, no DoRA"
