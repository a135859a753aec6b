"""The trainer put together: rows, collator, callbacks."""

from __future__ import annotations

import dataclasses
import warnings
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.corpus import IGNORED, TrainingRow
from kinject.recipe import TrainRecipe
from kinject.train.anchor import Anchor
from kinject.train.callbacks import RunLog, Screen, Timing
from kinject.train.carried import TakeUp
from kinject.train.data import Collator, RowDataset, TrainingData
from kinject.train.fresh_layers import redraw_last_layers
from kinject.train.guards import Guard
from kinject.train.probes import Probes, ProbeStops
from kinject.train.row_weights import row_weights
from kinject.train.schedules import WarmUp
from kinject.train.techniques import equip
from kinject.train.trainable import freeze
from kinject.train.trainer import KnowledgeTrainer, check_isolation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig


def build_trainer(
    recipe: TrainRecipe,
    config: SFTConfig,
    adapter: Any,
    model_and_tokenizer: tuple[PreTrainedModel, PreTrainedTokenizerBase],
    data: TrainingData,
    held_out: TrainingData | None,
) -> KnowledgeTrainer:
    """Return the trainer, ready to run. Raises `TrainingError` when packed documents would see each other."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    model, tokenizer = model_and_tokenizer
    limit = _most_positions(recipe, model, data)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    flatten = model.config._attn_implementation == "flash_attention_2" and bool(recipe.trainer.get("packing"))
    rows_per_step = config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    tokens_per_step = rows_per_step * float(data.rows.lengths().mean())
    anchored = recipe.regularization is not None and recipe.regularization.kl > 0
    weighing = recipe.techniques.row_weights
    weights = row_weights(weighing, Path(recipe.corpus.path)) if weighing is not None and recipe.corpus else None
    dataset = RowDataset(data.rows, with_replay=anchored, weights=weights)
    freeze(model, recipe)
    redrawn = redraw_last_layers(model, recipe)
    guard = Guard(recipe.guards)
    stops = [ProbeStops(recipe.probes, guard.warnings)] if recipe.probes is not None else []
    when, config.eval_strategy = config.eval_strategy, "no" if held_out is None else config.eval_strategy
    anchor = (
        Anchor(recipe.regularization, model, adapter=adapter is not None) if recipe.regularization is not None else None
    )
    if recipe.trainer.get("packing") and recipe.trainer.get("packing_strategy") != "wrapped" and not flatten:
        _check_packing(model, dataset)
    first_row = Dataset.from_list([dataset[0]])  # SFTTrainer asks for a Dataset, which would copy every row
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        trainer = KnowledgeTrainer(
            model=model, args=config, processing_class=tokenizer, peft_config=adapter, train_dataset=first_row,
            eval_dataset=first_row if held_out is not None else None,
            data_collator=Collator(pad, flatten, config.pad_to_multiple_of, recipe.guards.masked_batch),
            callbacks=[RunLog(recipe.run_dir / "log.jsonl"), guard, WarmUp(), Screen(tokens_per_step), *stops],
        )  # fmt: skip
    trainer.train_dataset = dataset
    trainer.eval_dataset = RowDataset(held_out.rows) if held_out is not None else None
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Timing(recipe.run_dir / "timing.jsonl", lambda: int(trainer.learned_tokens)))
    trainer.add_callback(TakeUp(trainer))
    trainer.guard = guard
    equip(trainer, recipe, redrawn)
    trainer.args.eval_strategy = when  # Trainer refuses to evaluate without a dataset; probes need none
    trainer.probes = Probes(recipe.probes, tokenizer, limit) if recipe.probes is not None else None
    if recipe.corpus.separate_paraphrases and data.rows.rounds[-1] > 0:
        trainer.rounds = data.rows.rounds
    if anchor is not None:
        replayed = (_replay_only(row) for row in data.rows if any(row.replayed))
        anchor.measure(trainer.model, list(islice(replayed, anchor.strengths.ewc_rows if anchor.strengths.ewc else 0)))
    trainer.anchor = anchor
    return trainer


def _most_positions(recipe: TrainRecipe, model: PreTrainedModel, data: TrainingData) -> int | None:
    """Return how many positions the model has, None for any number; a fault of the recipe where texts need more."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    longest = data.rows.longest_text()
    if limit is not None and longest > limit:
        what = f"rows reach {longest} tokens, but the model has {limit} positions. Set at most {limit}."
        raise recipe.error("trainer.max_length", what)
    return limit


def _check_packing(model: PreTrainedModel, dataset: RowDataset) -> None:
    packed = next((row for row in dataset if row["position_ids"].count(0) > 1), None)
    if packed is not None:
        check_isolation(model, packed)


def _replay_only(row: TrainingRow) -> TrainingRow:
    """Return `row` with the labels of its replayed tokens only."""
    labels = [label if again else IGNORED for label, again in zip(row.labels, row.replayed, strict=True)]
    return dataclasses.replace(row, labels=labels)
