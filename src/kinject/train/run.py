"""One training run, from a checked recipe to a Hugging Face folder."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from kinject.disk import (
    check_output,
    checked_hashes,
    content_id,
    file_hash,
    lock_dir,
    read_manifest,
    read_sums,
    tree_hash,
    write_manifest,
    write_sealed,
    write_sums,
    write_text,
)
from kinject.disk.sums import SUMS
from kinject.errors import TrainingError
from kinject.process import is_first_process
from kinject.recipe import TrainRecipe
from kinject.train.checkpoints import checkpoint_to_resume, checkpoints, disk_faults
from kinject.train.data import REPLAY, TrainingData, exposures_by_document, note_fill, summarise_exposures
from kinject.train.load import load
from kinject.train.pickles import numbers_only
from kinject.train.prepare import Corpora, prepare, read_corpora
from kinject.types import TrainResult

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

    from kinject.train.trainer import KnowledgeTrainer

log = logging.getLogger(__name__)

_CORPUS_CURE = "Run kinject augment again: nothing is asked twice. If you changed it yourself, give it another name."
_FILES = ("log.jsonl", "timing.jsonl", f"model/{SUMS}")
"""What a finished run holds beside its sealed files; the manifest has the hashes."""


def run(recipe: TrainRecipe, *, resume: bool, overwrite: bool) -> TrainResult:
    """Train as `recipe` says. A finished run of the same recipe and inputs is left as it is.

    Raises `RecipeError` before any model loads, `InputError` for a bad corpus or model, `TrainingError` when text would
    be lost, when the folder holds another run, or when the loss stops being a number; `DiskError` for the disk's faults.
    """
    from kinject.train.config import build_config, peft_config

    config = build_config(recipe)
    adapter = peft_config(recipe)
    inputs = inputs_of(recipe)
    with lock_dir(recipe.run_dir) if is_first_process() else contextlib.nullcontext():
        done = _look_at_folder(recipe, inputs, resume=resume, overwrite=overwrite)
        if done is not None:
            return done
        corpora = read_corpora(recipe)
        model, tokenizer, notes = load(recipe, corpora.rows)
        data, trainer, more = _build(recipe, config, adapter, model, tokenizer, corpora)
        notes = [*recipe.notes, *notes, *more]
        if is_first_process():
            for note in notes:
                log.info(note)
            text = yaml.safe_dump(dict(recipe.raw), sort_keys=False, allow_unicode=True)
            write_text(recipe.run_dir / "recipe.yaml", text)
        _write_manifest(recipe, inputs, {"finished": False, "tokens": data.account.as_dict(), "notes": notes})
        checkpoint = _agreed(trainer, recipe.run_dir) if resume else None
        if checkpoint is not None:
            trainer.args.eval_on_start = False  # the checkpoint's log holds it
        started = time.monotonic()
        with disk_faults(recipe.run_dir), numbers_only(checkpoint):
            try:
                output = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            finally:
                _close_screen(trainer)
            seconds = time.monotonic() - started
            model_dir = _save(trainer, recipe)
        loss = output.metrics["train_loss"]
        counts = {
            "finished": True, "steps": trainer.state.global_step, "epochs": trainer.state.epoch, "loss": loss,
            "seconds": round(seconds, 1), "resumed_from": checkpoint.name if checkpoint else None,
            "tokens": data.account.as_dict(), "replay_share": round(data.shares.get(REPLAY, 0.0), 4),
            "shares": {name: round(share, 4) for name, share in data.shares.items()}, "notes": notes,
            "exposures": summarise_exposures(data.exposures, trainer.state.epoch),
            "skipped_updates": trainer.guard.skipped, "warnings": trainer.guard.warnings,
        }  # fmt: skip
        if is_first_process():
            write_sealed(recipe.run_dir / "exposures.json", exposures_by_document(data.exposures, trainer.state.epoch))
        _write_manifest(recipe, inputs, counts)
    return _result(recipe, counts, model_dir, already_done=False)


def trainer_of(recipe: TrainRecipe) -> KnowledgeTrainer:
    """Return the trainer of `recipe` as `run` would start it; beside the token cache nothing is written.

    Raises what `run` raises before the first step.
    """
    from kinject.train.config import build_config, peft_config

    config, adapter = build_config(recipe), peft_config(recipe)
    corpora = read_corpora(recipe)
    model, tokenizer, _ = load(recipe, corpora.rows)
    _, trainer, _ = _build(recipe, config, adapter, model, tokenizer, corpora)
    return trainer


def _result(recipe: TrainRecipe, counts: Mapping[str, Any], model_dir: Path, *, already_done: bool) -> TrainResult:
    return TrainResult(
        run_dir=str(recipe.run_dir), model_dir=str(model_dir), n_steps=counts["steps"], n_epochs=counts["epochs"],
        final_loss=counts["loss"], account=counts["tokens"], seconds=counts["seconds"], notes=tuple(counts["notes"]),
        already_done=already_done,
    )  # fmt: skip


def inputs_of(recipe: TrainRecipe) -> dict[str, str]:
    """Return the hashes of everything that decides the outcome; their fingerprint tells one run from another."""
    model, corpus = recipe.model, recipe.corpus
    inputs = {"corpus": check_output(Path(corpus.path), _CORPUS_CURE)}
    inputs |= {name: check_output(Path(part.path), _CORPUS_CURE) for name, part in corpus.parts().items()}
    if corpus.validation_corpus is not None:
        inputs["validation_corpus"] = check_output(Path(corpus.validation_corpus), _CORPUS_CURE)
    if recipe.probes is not None:
        inputs |= {f"probe {name}": file_hash(Path(item.path)) for name, item in recipe.probes.sets().items()}
    for name, path in (("model", model.path), ("tokenizer", model.tokenizer)):
        if isinstance(path, str):
            folder = Path(path)
            there = tree_hash(folder, known=checked_hashes(folder)) if folder.is_dir() else ""
            inputs[name] = there or f"hub:{path}@{model.revision or 'main'}"
    sections = {key: recipe.raw.get(key) for key in ("seed", "method", "model", "adapter", "corpus", "trainer")}
    sections |= {
        key: recipe.raw[key] for key in ("regularization", "guards", "techniques", "probes") if key in recipe.raw
    }
    return {**inputs, "fingerprint": content_id(inputs, sections)}


def _write_manifest(recipe: TrainRecipe, inputs: Mapping[str, str], counts: Mapping[str, Any]) -> None:
    if not is_first_process():
        return
    path = recipe.run_dir / "manifest.json"
    outputs = _FILES if counts["finished"] else ()
    write_manifest(path, stage="train", inputs=inputs, recipe=recipe.raw, counts=counts, outputs=outputs)


def _look_at_folder(
    recipe: TrainRecipe, inputs: Mapping[str, str], *, resume: bool, overwrite: bool
) -> TrainResult | None:
    """Return the result of a finished run of the same inputs; clear the folder, or refuse it, when it holds another."""
    folder = recipe.run_dir
    manifest = None if overwrite else read_manifest(folder / "manifest.json")
    if manifest is not None:
        same = manifest["inputs"].get("fingerprint") == inputs["fingerprint"]
        finished = bool(manifest["counts"].get("finished")) and (folder / "model").is_dir()
        fault = _damage(folder, manifest) if same and finished else ""
        if fault and not resume:
            raise TrainingError(
                f"{fault}. Make the model again with --resume (from the newest checkpoint) or --overwrite."
            )
        if fault:
            log.warning(f"{fault}. The model is made again.")
        elif same and finished:
            return _result(recipe, manifest["counts"], folder / "model", already_done=True)
        if not same and (finished or checkpoints(folder)):
            raise TrainingError(
                f"{folder}: holds a run of another recipe, corpus or model. Set another run_dir, or start over with --overwrite."
            )
        if checkpoints(folder) and not resume:
            raise TrainingError(
                f"{folder}: holds an unfinished run (newest checkpoint: {checkpoints(folder)[0][1].name}). Go on with "
                "--resume, or start over with --overwrite."
            )
    if manifest is None and not resume and not overwrite and (checkpoints(folder) or (folder / "model").exists()):
        raise TrainingError(
            f"{folder}: holds checkpoints or a model, but no manifest.json that says of which run. Go on with --resume if it is "
            "this one, or start over with --overwrite."
        )
    if not resume and is_first_process():
        stale = [*(path for _, path in checkpoints(folder)), folder / "model"]
        for path in stale:
            if path.exists():
                shutil.rmtree(path)
    return None


def _damage(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Return what is not as the finished run wrote it, "" where all is."""
    for name, wanted in manifest.get("outputs", {}).items():
        if not (folder / name).is_file() or file_hash(folder / name) != wanted:
            return f"{folder / name}: is not what the run wrote (manifest.json has its hash)"
    return read_sums(folder / "model")[1]


def _agreed(trainer: KnowledgeTrainer, run_dir: Path) -> Path | None:
    """Return the checkpoint to go on from: the first process reads it through, the others are told."""
    held = [checkpoint_to_resume(run_dir) if is_first_process() else None]
    if trainer.accelerator.num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(held)
    return held[0]


def _build(
    recipe: TrainRecipe,
    config: SFTConfig,
    adapter: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    corpora: Corpora,
) -> tuple[TrainingData, KnowledgeTrainer, list[str]]:
    from kinject.train.build import build_trainer
    from kinject.train.guards import check_start
    from kinject.train.trainable import check_trained, summarise

    prepared = prepare(recipe, tokenizer, corpora)
    data, layout, notes = prepared.data, prepared.layout, prepared.notes
    trainer = build_trainer(recipe, config, adapter, (model, tokenizer), data, prepared.held_out)
    names = check_trained(trainer.model, recipe)
    notes += check_start(recipe.guards, tokenizer, trainer.model, len(data.rows), config)
    n_all = sum(parameter.numel() for parameter in trainer.model.parameters())
    n_trained = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    precision = "bf16" if config.bf16 else "fp16" if config.fp16 else "float32"
    notes.append(
        f"trains {n_trained:,} of {n_all:,} parameters in {precision}, {len(data.rows):,} rows, "
        f"layout {layout.strategy or 'unpacked'}{', spread' if layout.spread else ''}"
    )
    notes += [*note_fill(data.rows, layout), *trainer.notes]
    if n_trained < n_all:
        notes.append(f"these train: {', '.join(summarise(names))}")
    return data, trainer, notes


def _close_screen(trainer: KnowledgeTrainer) -> None:
    from kinject.train.callbacks import Screen

    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Screen):
            callback.close()


def _save(trainer: KnowledgeTrainer, recipe: TrainRecipe) -> Path:
    """Write the folder of model and tokenizer whole or not at all; with `adapter.merge`, the adapter folded in."""
    part, final = recipe.run_dir / ".model.part", recipe.run_dir / "model"
    if is_first_process():
        shutil.rmtree(part, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    if recipe.adapter is not None and recipe.adapter.get("merge"):
        if is_first_process():
            trainer.accelerator.unwrap_model(trainer.model).merge_and_unload().save_pretrained(str(part))
            trainer.processing_class.save_pretrained(str(part))
    else:
        trainer.save_model(str(part))
    trainer.accelerator.wait_for_everyone()
    if is_first_process():
        write_sums(part)
        if final.exists():
            shutil.rmtree(final)
        os.replace(part, final)
    trainer.accelerator.wait_for_everyone()
    return final
