"""One training run, from a checked recipe to a Hugging Face folder."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kinject.corpus.fetched import with_local_corpora
from kinject.disk import (
    SHA256SUMS,
    changed_versions,
    check_output,
    check_sha256sums,
    content_id,
    dotted,
    file_hash,
    is_file,
    lock_dir,
    refuse_other_stage,
    replace_folder,
    write_manifest,
    write_sha256sums,
    write_text,
)
from kinject.errors import TrainingError
from kinject.gguf_files import model_folder
from kinject.hub import find_source
from kinject.manifests import (
    FinishedTraining,
    Manifest,
    TrainManifest,
    read_manifest,
    read_train_manifest,
)
from kinject.models import check_files, model_hash
from kinject.process import is_first_process, made_by_first_process
from kinject.recipe import ModelSection, TrainRecipe
from kinject.recipe.method_rules import distillation_of
from kinject.recipe.read import NOT_TRAINING
from kinject.terminal import format_count, rate_text
from kinject.train.checkpoints import (
    checkpoint_to_resume,
    checkpoints,
    disk_faults,
    fingerprint_of,
    numbers_only,
)
from kinject.train.data import part_input, summarize_exposures
from kinject.train.objectives.distillation import document_inputs
from kinject.types import TrainResult

if TYPE_CHECKING:
    from kinject.train.trainer import RunTrainer

log = logging.getLogger(__name__)

_CORPUS_FIX = (
    "Run kinject augment again: nothing is requested twice. If you changed it yourself, give it "
    "another name."
)
_NOT_SET = "not set"
_MOST_DIFFERENCES = 5
"""Keys that a message about another run in a folder lists."""
_FILES = ("log.jsonl", "timing.jsonl", f"model/{SHA256SUMS}")
"""Files of a finished run whose hashes the manifest holds."""


def run(recipe: TrainRecipe, *, resume: bool, overwrite: bool) -> TrainResult:
    """Train by `recipe`. A finished run of the same recipe and inputs is not repeated.

    Raises `RecipeError` before any model loads, `InputError` for a bad corpus or model,
    `TrainingError` if text would be lost, if the folder holds another run, or if the loss is no
    longer finite; `DiskError` for the disk's faults.
    """
    from kinject.train.callbacks import checkpoint_on_signal
    from kinject.train.setup import check_training, make_trainer

    configs = check_training(recipe)  # its problems, before the folder changes
    recipe = with_local_corpora(recipe)
    inputs = made_by_first_process(lambda: hash_inputs(recipe))
    # The first process of a launch holds the lock for all.
    with lock_dir(recipe.run_dir) if is_first_process() else contextlib.nullcontext():
        finished = _check_folder(recipe, inputs, resume=resume, overwrite=overwrite)
        if finished is not None:
            return finished
        trainer = make_trainer(recipe, inputs, configs)
        with checkpoint_on_signal(trainer):
            return _train(trainer, recipe, inputs, resume=resume)


def _train(
    trainer: RunTrainer, recipe: TrainRecipe, inputs: Mapping[str, str], *, resume: bool
) -> TrainResult:
    """Train, and write the model and the manifest."""
    from kinject.train.callbacks import Screen
    from kinject.train.guards import check_trained
    from kinject.train.setup import effective_batch

    notes = [*recipe.notes, *trainer.notes]
    if resume:
        notes += made_by_first_process(partial(_version_notes, recipe.run_dir))
    if is_first_process():
        for note in notes:
            log.info(note)
        text = yaml.safe_dump(dict(recipe.raw), sort_keys=False, allow_unicode=True)
        write_text(recipe.run_dir / "recipe.yaml", text)
    tokens = asdict(trainer.training_data.account)
    # Before training: by its fingerprint a killed run is known when it resumes.
    _write_manifest(recipe, inputs, {"finished": False, "tokens": tokens, "notes": notes})
    trainer.fingerprint = inputs["fingerprint"]
    checkpoint = None
    if resume:
        checkpoint = made_by_first_process(lambda: checkpoint_to_resume(recipe.run_dir))
    resumed_from = None
    if checkpoint is not None:
        resumed_from = checkpoint.name
        trainer.args.eval_on_start = False  # the checkpoint's log holds that evaluation
    with disk_faults(recipe.run_dir), numbers_only(checkpoint):
        try:
            output = trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        finally:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, Screen):
                    callback.close()
        seconds, work = trainer.spent()
        # Before the model is written: a run that did not train leaves no model/.
        check_trained(trainer)
        ended_above = trainer.guard.ended_above()
        merges = recipe.adapter is not None and bool(recipe.adapter.get("merge"))
        model_dir = _save_model(trainer, recipe.run_dir, recipe.model, merges=merges)
    # Outside of disk_faults: what a network raises is an OSError too.
    _publish_model(trainer, model_dir)
    best_step = None
    if trainer.args.load_best_model_at_end:
        best_step = trainer.state.best_global_step
    data = trainer.training_data
    counts = FinishedTraining(
        finished=True,
        steps=trainer.state.global_step,
        epochs=trainer.state.epoch,
        loss=output.metrics["train_loss"],
        seconds=round(seconds, 1),
        # With two decimals a training of milliseconds had none, as one that never ran.
        cost={"work_seconds": round(work, 6), **trainer.preparation_cost},
        resumed_from=resumed_from,
        tokens=tokens,
        notes=tuple(notes),
        best_step=best_step,
        learned_tokens=trainer.learned_before + int(trainer.learned_tokens),
        effective_batch=effective_batch(trainer.args, data),
        fractions={name: round(fraction, 4) for name, fraction in data.fractions.items()},
        exposures=summarize_exposures(data.exposures, trainer.state.epoch),
        skipped_updates=trainer.guard.skipped,
        warnings=tuple(trainer.guard.warnings),
        ended_above_start=ended_above,
    )
    if is_first_process() and trainer.args.save_strategy == "no":
        for _, path in checkpoints(recipe.run_dir):  # of a signal
            shutil.rmtree(path)
    # Last: finished in the manifest means that all other files are written.
    _write_manifest(recipe, inputs, counts.to_json(), outputs=_FILES)
    return _result(recipe.run_dir, counts, already_done=False)


def render_summary(result: TrainResult) -> str:
    """Return the result of a run as text: the steps, the tokens, the folder of the model."""
    if result.already_done:
        return f"{result.run_dir}: this run is finished; nothing to do. Model: {result.model_dir}"
    account = result.account
    loss = learned = ""
    if result.final_loss is not None:
        loss = f", loss {result.final_loss:.3f}"
    if result.n_learned is not None:
        learned = f"tokens learned, over all steps: {result.n_learned:,}\n"
    rate = result.n_steps / result.seconds if result.seconds else 0.0
    return (
        f"{format_count(result.n_steps, 'step')} ({result.n_epochs:.2f} epochs) in "
        f"{result.seconds:.0f} s, {rate_text(rate, 'steps')}{loss}\n"
        f"{learned}tokens in an epoch: {account['source']:,} source = "
        f"{account['trained']:,} trained + {account['masked']:,} read only + "
        f"{account['truncated']:,} truncated + {account['dropped']:,} dropped\n"
        f"model: {result.model_dir}   log: {result.run_dir}/log.jsonl   "
        f"manifest: {result.run_dir}/manifest.json"
    )


def _version_notes(run_dir: Path) -> list[str]:
    """Return a warning if the run that resumes here began with other versions of the packages: its
    new manifest has those of now alone."""
    manifest = read_train_manifest(run_dir)
    if manifest is None or not checkpoints(run_dir):
        return []
    changed = changed_versions(manifest.versions)
    if not changed:
        return []
    return [
        f"warning: this run began with other versions ({changed}). It may end otherwise than a run "
        "with one."
    ]


def _result(folder: Path, counts: FinishedTraining, *, already_done: bool) -> TrainResult:
    return TrainResult(
        run_dir=str(folder),
        model_dir=str(folder / "model"),
        n_steps=counts.steps,
        n_epochs=counts.epochs,
        final_loss=counts.loss,
        account=counts.tokens,
        seconds=counts.seconds,
        n_learned=counts.learned_tokens,
        cost=counts.cost,
        notes=(*counts.notes, *counts.warnings),
        already_done=already_done,
        ended_above_start=counts.ended_above_start,
    )


def hash_inputs(recipe: TrainRecipe) -> dict[str, str]:
    """Return the hashes of the inputs that decide the outcome of a run, and a fingerprint of them
    and the recipe."""
    model, corpus = recipe.model, recipe.corpus
    inputs = {"corpus": check_output(Path(corpus.path), _CORPUS_FIX)}
    for name, part in corpus.parts().items():
        inputs[part_input(name)] = check_output(Path(part.path), _CORPUS_FIX)
    if corpus.validation_corpus is not None:
        inputs["validation_corpus"] = check_output(Path(corpus.validation_corpus), _CORPUS_FIX)
    if recipe.projection is not None:
        inputs["projection"] = check_output(Path(recipe.projection.path), _CORPUS_FIX)
    if recipe.probes is not None:
        inputs |= {
            f"probe {name}": file_hash(Path(item.path))
            for name, item in recipe.probes.sets().items()
        }
    teacher = None
    distillation = distillation_of(recipe)
    if distillation is not None:
        teacher = distillation.teacher
        documents = document_inputs(distillation, recipe.documents)
        inputs |= {f"document {name}": digest for name, digest in documents.items()}
    models = {"model": model.path, "tokenizer": model.tokenizer, "teacher": teacher}
    template = recipe.trainer.get("chat_template_path")
    if template is not None and is_file(Path(template)):
        inputs["chat_template"] = file_hash(Path(template))
    else:
        models["chat_template"] = template
    for name, path in models.items():
        # A tokenizer may be a section: it is made of the corpus, whose hash is here already.
        if isinstance(path, str):
            folder = model_folder(path)
            if folder.exists():
                check_files(Path(find_source(path, name)))
            digest = model_hash(folder) if folder.exists() else ""
            inputs[name] = digest or f"hub:{path}@{model.revision or 'main'}"
    return {**inputs, "fingerprint": content_id(inputs, recipe.training_values())}


def _write_manifest(
    recipe: TrainRecipe,
    inputs: Mapping[str, str],
    counts: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> None:
    if not is_first_process():
        return
    path = recipe.run_dir / "manifest.json"
    write_manifest(
        path, stage="train", inputs=inputs, recipe=recipe.raw, counts=counts, outputs=outputs
    )


def _check_folder(
    recipe: TrainRecipe, inputs: Mapping[str, str], *, resume: bool, overwrite: bool
) -> TrainResult | None:
    """Return the result of a finished run of the same inputs, if any; else clear the folder.

    Raises `TrainingError` if the folder holds another run, or needs --resume or --overwrite.
    """
    folder = recipe.run_dir
    if not overwrite:
        refuse_other_stage(folder, "train")
        manifest = read_manifest(folder)
        if manifest is None and not resume:
            _refuse_unknown(folder)
        if manifest is not None:
            finished = _finished_run(recipe, manifest, inputs, resume=resume)
            if finished is not None:
                return finished
            _refuse_unfinished(folder, resume=resume)
        _refuse_other_checkpoints(folder, inputs)
    if not resume and is_first_process():
        for path in (*(path for _, path in checkpoints(folder)), folder / "model"):
            if path.exists():
                shutil.rmtree(path)
    return None


def _refuse_unknown(folder: Path) -> None:
    """Raise `TrainingError` for results without a manifest that names their recipe."""
    if checkpoints(folder) or (folder / "model").exists():
        raise TrainingError(
            f"{folder}: holds checkpoints or a model, but no manifest.json. Continue with "
            "--resume, or start over with --overwrite."
        )


def _refuse_other_checkpoints(folder: Path, inputs: Mapping[str, str]) -> None:
    """Raise `TrainingError` for a checkpoint of other inputs: without a manifest, which a user may
    delete, the run would continue from it at the learning rate of another recipe."""
    for _, path in checkpoints(folder):
        fingerprint = fingerprint_of(path)
        if fingerprint and fingerprint != inputs["fingerprint"]:
            raise TrainingError(
                f"{path}: is of a run of another recipe, corpus or model. Set another run_dir, or "
                "start over with --overwrite."
            )


def _refuse_unfinished(folder: Path, *, resume: bool) -> None:
    """Raise `TrainingError` for a run that was interrupted, unless it is to resume."""
    found = checkpoints(folder)
    if found and not resume:
        raise TrainingError(
            f"{folder}: holds an unfinished run (newest checkpoint: {found[0][1].name}). Continue "
            "with --resume, or start over with --overwrite."
        )


def _finished_run(
    recipe: TrainRecipe, manifest: Manifest, inputs: Mapping[str, str], *, resume: bool
) -> TrainResult | None:
    """Return the result of a finished run of the same inputs; None if its model is to be made, or
    made again since a file is damaged.

    Raises `TrainingError` for a run of other inputs, and for damage without `resume`.
    """
    folder, counts = recipe.run_dir, None
    same = False  # another stage's folder holds another run
    if isinstance(manifest, TrainManifest):
        same = manifest.fingerprint == inputs["fingerprint"]
        if (folder / "model").is_dir():
            counts = manifest.finished()
    if not same:
        if counts is not None or checkpoints(folder):
            differences = _differences(manifest, recipe, inputs)
            raise TrainingError(
                f"{folder}: holds a run of another recipe, corpus or model{differences}. Set "
                "another run_dir, or start over with --overwrite."
            )
        return None
    if counts is None:
        return None
    fault = _damage(folder, manifest)
    if not fault:
        return _result(folder, counts, already_done=True)
    if not resume:
        raise TrainingError(
            f"{fault}. Make the model again with --resume (from the newest checkpoint) or "
            "--overwrite."
        )
    log.warning(f"{fault}. The model is made again.")
    return None


def _differences(manifest: Manifest, recipe: TrainRecipe, inputs: Mapping[str, str]) -> str:
    """Return what keeps a run from being that of `recipe`, as ``: trainer.seed 1 there, 2 here``;
    "" for a run of another stage."""
    if not isinstance(manifest, TrainManifest):
        return ""
    written = manifest.as_written["recipe"]
    there = dotted({key: item for key, item in written.items() if key not in NOT_TRAINING})
    here = dotted(recipe.training_values())
    found = []
    for key in sorted(there.keys() | here.keys()):
        old, new = there.get(key, _NOT_SET), here.get(key, _NOT_SET)
        if old != new:
            found.append(f"{key} {old!s:.60} there, {new!s:.60} here")
    # A file that the recipe names by the same path may have been written again.
    names = sorted((manifest.inputs.keys() & inputs.keys()) - {"fingerprint"})
    found += [f"the content of {name}" for name in names if manifest.inputs[name] != inputs[name]]
    if not found:
        return ""
    n_more = len(found) - _MOST_DIFFERENCES
    if n_more > 0:
        found[_MOST_DIFFERENCES:] = [f"and {n_more} more"]
    return f": {'; '.join(found)}"


def _damage(folder: Path, manifest: Manifest) -> str:
    """Return the first file that differs from that of the finished run; "" without any."""
    for name, sha256 in manifest.outputs.items():
        if not (folder / name).is_file() or file_hash(folder / name) != sha256:
            return (
                f"{folder / name}: missing, or changed since the run wrote it (manifest.json has "
                "its hash)"
            )
    return check_sha256sums(folder / "model")[1]


def _save_model(trainer: RunTrainer, run_dir: Path, base: ModelSection, *, merges: bool) -> Path:
    """Write model and tokenizer to model/, whole or not at all; with `merges`, the adapter folded
    in.

    Raises `TrainingError` in all processes, and leaves no folder, if a weight that was written is
    not finite.
    """
    from kinject.models import ADAPTER_CONFIG, load_config, not_finite_in
    from kinject.train.guards import UNSTABLE, agree_on_fault
    from kinject.train.merge import fold, save_as, set_config, untie_own_head

    part, final = run_dir / ".model.part", run_dir / "model"
    if is_first_process():
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    if merges:
        if is_first_process():
            fold(trainer.accelerator.unwrap_model(trainer.model)).save_pretrained(str(part))
            trainer.processing_class.save_pretrained(str(part))
    else:
        trainer.save_model(str(part), _internal_call=True)  # without an upload
    trainer.accelerator.wait_for_everyone()
    if is_first_process() and not (part / ADAPTER_CONFIG).exists():
        save_as(part, "auto", base.path, base.revision)
        # transformers 5.23 switches it off for training; servers that read it would be slow
        config = load_config(base.path or str(part), base.revision)
        set_config(part, use_cache=base.path is None or getattr(config, "use_cache", True))
        untie_own_head(part)
    fault = not_finite_in(part) if is_first_process() else ""
    if fault:
        shutil.rmtree(part)
    name = fault.rpartition(": ")[2]
    agree_on_fault(fault and f"{run_dir}: {name} is not finite after training. {UNSTABLE}")
    if is_first_process():
        trainer.create_model_card(model_name=run_dir.name)
        # TRL writes the card into the run folder, of which nothing but model/ is uploaded.
        if trainer.args.push_to_hub:
            os.replace(run_dir / "README.md", part / "README.md")
        write_sha256sums(part)
        replace_folder(part, final)
    trainer.accelerator.wait_for_everyone()
    return final


def _publish_model(trainer: RunTrainer, model_dir: Path) -> None:
    """Upload model/ if push_to_hub is set. Trainer would upload the run folder: recipe, paths, logs
    and unfinished files.

    Raises `TrainingError` if the hub refuses it; the model stays.
    """
    if not trainer.args.push_to_hub or not is_first_process():
        return
    from huggingface_hub import HfApi

    name = trainer.hub_model_id
    try:
        commit = HfApi().upload_folder(
            repo_id=name,
            folder_path=model_dir,
            commit_message="Model save",
            revision=trainer.args.hub_revision,
        )
    except (
        Exception
    ) as error:  # the hub's client raises its own errors and those of its network library
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TrainingError(
            f"{model_dir} is written, but was not uploaded to {name}: {reason} Upload it: hf "
            f"upload {name} {model_dir}"
        ) from error
    log.info("uploaded to %s", commit.repo_url)
