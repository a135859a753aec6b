"""A trainer from a recipe: corpora, tokenizer, model, callbacks, regularization and techniques put together."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from kinject import models
from kinject.corpus.packing import TrainingRow
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import IGNORED
from kinject.errors import InputError
from kinject.process import context_parallel_size, first_process_first, processes_per_row
from kinject.recipe import TrainRecipe
from kinject.train.callbacks import (
    Histograms,
    PatienceStopping,
    ProbeStopping,
    RestoreState,
    RunLog,
    Screen,
    Timing,
)
from kinject.train.config import make_lora_config, make_sft_config
from kinject.train.contexts import TeacherRows, section_of
from kinject.train.data import (
    REPLAY,
    Collator,
    Corpora,
    RowDataset,
    TokenizedCorpora,
    TrainingCorpus,
    TrainingData,
    check_positions,
    note_fill,
    open_corpora,
    tokenize_and_pack,
)
from kinject.train.guards import Guard, check_start, sample_output
from kinject.train.load import (
    check_special_tokens,
    load_training_model,
    load_training_tokenizer,
    precision_warnings,
    take_over_sharding,
    widen_adapter,
)
from kinject.train.loss import MeanLoss, TrainingLoss, add_hidden_states
from kinject.train.optimizers import SharpnessAware
from kinject.train.own_answers import write_own_answers
from kinject.train.probes import Probes
from kinject.train.regularization import FISHER_ROWS, Projection, Regularizer
from kinject.train.schedules import WarmUp
from kinject.train.teacher import make_teacher
from kinject.train.trainable import (
    check_model,
    check_trainable,
    check_trained_tokens,
    freeze,
    freeze_base_steps,
    reinitialize_last_layers,
    summarize_names,
)
from kinject.train.trainer import KnowledgeTrainer, check_isolation

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig

_CHECKED = 64
"""Tokens on which tiles are compared with the model's own logits."""


def check_training(recipe: TrainRecipe) -> None:
    """Raise `RecipeError` for the faults of the sections that training reads, before a corpus or weights are read."""
    make_sft_config(recipe)
    make_lora_config(recipe)
    check_special_tokens(recipe)
    check_model(recipe)


def make_trainer(recipe: TrainRecipe, hashes: Mapping[str, str] | None = None) -> KnowledgeTrainer:
    """Return the trainer of `recipe`, ready to train: with its rows, model, optimizer settings, callbacks and notes.

    Nothing is written except the token cache, `corpus.cache_dir`. `hashes` are those of corpora that were just hashed
    (`kinject.train.run.hash_inputs`). Raises all that a training run raises before its first step: `RecipeError`,
    `InputError` for a corpus or model, `TrainingError` if text would be lost or packed documents would see each other.
    """
    config, adapter = make_sft_config(recipe), make_lora_config(recipe)
    sharding = take_over_sharding(config, recipe)
    with models.sharded_by_transformers(sharding):
        return _make_trainer(recipe, config, adapter, sharding, hashes)


def _make_trainer(
    recipe: TrainRecipe, config: SFTConfig, adapter: Any, sharding: models.Sharding | None,
    hashes: Mapping[str, str] | None,
) -> KnowledgeTrainer:  # fmt: skip
    """Return the trainer as `make_trainer` does, of a checked config."""

    def tokenize() -> tuple[Corpora, PreTrainedTokenizerBase, TokenizedCorpora, Counter[str]]:
        corpora, notes, cost = with_own_answers(recipe, open_corpora(recipe, hashes))
        tokenizer = load_training_tokenizer(recipe, corpora.rows)
        tokenized = tokenize_and_pack(recipe, tokenizer, corpora)
        return corpora, tokenizer, dataclasses.replace(tokenized, notes=[*notes, *tokenized.notes]), cost

    corpora, tokenizer, tokenized, cost = first_process_first(tokenize)  # the others find its tokens in the cache
    model, notes = load_training_model(recipe, tokenizer, sharding)
    models.check_causal(model, recipe.model.path or recipe.location("model.new"))
    window = check_positions(recipe, model.config, tokenized.train)
    probes = Probes(recipe.probes, corpora.questions, tokenizer, window) if recipe.probes is not None else None

    def load_weights(path: str) -> PreTrainedModel:
        with models.sharded_by_transformers(sharding):
            return load_training_model(recipe, tokenizer, sharding, path)[0]

    load_base = functools.partial(load_weights, "") if sharding is not None else None
    trainer = _assemble(recipe, config, adapter, model, tokenizer, tokenized, load_base)
    trainer.load_weights = load_weights
    trainer.probes = probes
    trainer.training_data = tokenized.train
    if tokenized.teacher is not None:
        tokenized.notes.append(_add_teacher(trainer, recipe, tokenized.teacher, hashes, cost))
    trainer.preparation_cost = cost
    check_trainable(trainer.model, recipe)
    if recipe.projection is not None and tokenized.projection_rows is not None:
        projection = Projection(trainer.model, tokenized.projection_rows, recipe.projection.free)
        trainer.add_callback(projection)
        tokenized.notes.append(projection.describe(recipe.projection.path))
    _check_output(trainer, recipe)
    trainer.guard.warnings += precision_warnings(recipe, config)
    rounds_up = recipe.techniques.stochastic_rounding
    trainer.guard.warnings += check_start(
        recipe.guards, tokenizer, trainer.model, len(tokenized.train.rows), config, rounds_up=rounds_up
    )
    notes += [
        *tokenized.notes,
        _describe_run(trainer, tokenized),
        *note_fill(tokenized.train.rows, tokenized.packing),
    ]
    batch = effective_batch(config, tokenized.train)
    notes.append(
        f"effective batch: {batch['rows_per_device']} rows x {batch['accumulation']} accumulated x {batch['devices']} "
        f"device{'s' * (batch['devices'] != 1)} = {batch['rows']} rows an update, about {batch['tokens']:,} tokens"
    )
    notes += _describe_techniques(trainer, recipe)
    names = [name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad]
    if len(names) < len(list(trainer.model.parameters())):
        notes.append(f"these train: {', '.join(summarize_names(names))}")
    trainer.notes = notes
    return trainer


def _check_output(trainer: KnowledgeTrainer, recipe: TrainRecipe) -> None:
    """Keep the model's output on the first row for the guard. Raises `InputError` if it is not finite."""
    trainer.guard.output = sample_output(trainer.model, trainer.train_dataset[0])
    if not trainer.guard.output.isfinite().all():
        name = recipe.model.path or f"{recipe.location('model.new')}: model.new"
        raise InputError(
            f"{name}: the model's output on the first row of the corpus is not finite, so it cannot be trained. Check the "
            "numbers of its configuration (rms_norm_eps, rope_theta, initializer_range, scaling factors)."
        )


def with_own_answers(recipe: TrainRecipe, corpora: Corpora) -> tuple[Corpora, list[str], Counter[str]]:
    """Return the corpora with the answers that the model is to write itself, a note on each, and the cost of all."""
    notes, costs = [], Counter[str]()
    for part, section in recipe.corpus.own_answers().items():
        path, note, cost = write_own_answers(recipe, part, section)
        notes.append(note)
        costs.update(cost)
        if part:
            name = part.removeprefix("mix.")
            rows = CorpusFile(path, REPLAY * (name == REPLAY))
            corpora.parts[name] = dataclasses.replace(corpora.parts[name], rows=rows)
        else:
            with_answers = dataclasses.replace(recipe, corpus=dataclasses.replace(recipe.corpus, path=str(path)))
            corpora = dataclasses.replace(corpora, rows=TrainingCorpus(with_answers))
    return corpora, notes, costs


def _add_teacher(
    trainer: KnowledgeTrainer,
    recipe: TrainRecipe,
    read: TeacherRows,
    hashes: Mapping[str, str] | None,
    cost: Counter[str],
) -> str:
    """Give `trainer` its teacher and return a note on it; add the cost of its predictions to `cost`.

    The first process makes those that the cache lacks.
    """
    weights = (hashes or {}).get("model", "")
    known = "" if weights.startswith("hub:") else weights
    make = functools.partial(make_teacher, recipe, read, trainer.model, known, bf16=trainer.args.bf16)
    trainer.teacher, note, spent = first_process_first(make)
    cost.update(spent)
    return note


def _assemble(
    recipe: TrainRecipe,
    config: SFTConfig,
    adapter: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokenized: TokenizedCorpora,
    load_base: Callable[[], PreTrainedModel] | None,
) -> KnowledgeTrainer:
    """Return the trainer with its data, callbacks, regularization and techniques."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    section, data, validation = recipe.regularization, tokenized.train, tokenized.validation
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id or 0
    flatten = "flash" in str(model.config._attn_implementation) and bool(recipe.trainer.get("packing"))
    has_kl = section is not None and section.kl > 0
    dataset = RowDataset(data.rows, has_kl, tokenized.weights, tokenized.teacher)
    freeze(model, recipe)
    check_trained_tokens(recipe, model)
    reinitialized = reinitialize_last_layers(model, recipe)
    guard = Guard(recipe.guards)
    eval_strategy, config.eval_strategy = config.eval_strategy, "no" if validation is None else config.eval_strategy
    save_strategy = config.save_strategy
    if model.is_distributed_loading_by_transformers:
        config.save_strategy = "no"  # Trainer refuses to save what KnowledgeTrainer saves
    regularizer = None if section is None else Regularizer(section, model, adapter=bool(adapter), load_base=load_base)
    if recipe.trainer.get("packing") and recipe.trainer.get("packing_strategy") != "wrapped" and not flatten:
        _check_packing(model, dataset)
    screen = Screen(effective_batch(config, data)["tokens"])
    first_row = Dataset.from_list([dataset[0]])  # SFTTrainer needs a Dataset, which would copy every row
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            trainer = KnowledgeTrainer(
                model=model, args=config, processing_class=tokenizer, peft_config=adapter, train_dataset=first_row,
                eval_dataset=first_row if validation is not None else None,
                data_collator=Collator(pad, flatten, _row_multiple(config), recipe.guards.nothing_learned),
                callbacks=[RunLog(recipe.run_dir / "log.jsonl"), guard, WarmUp(lambda: guard.skipped), screen,
                           *([ProbeStopping(recipe.probes, guard.warnings)] if recipe.probes is not None else [])],
            )  # fmt: skip
        except (ValueError, ImportError) as error:  # of fields that only a whole trainer checks together
            raise recipe.error("trainer", f"SFTTrainer refuses it: {' '.join(str(error).split())[:300]}") from error
    trainer.train_dataset = dataset
    trainer.eval_dataset = RowDataset(validation.rows) if validation is not None else None
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Timing(recipe.run_dir / "timing.jsonl", lambda: int(trainer.learned_tokens)))
    trainer.add_callback(RestoreState(trainer))
    trainer.guard, trainer.losses = guard, MeanLoss()
    configure_trainer(trainer, recipe, reinitialized)
    config.save_strategy = save_strategy
    config.eval_strategy = eval_strategy  # Trainer refuses to evaluate without a dataset; probes need none
    trainer.rounds = data.rows.rounds if data.rows.rounds[-1] > 0 else ()
    if regularizer is not None:
        _prepare_regularizer(regularizer, trainer, recipe.techniques.loss_tile is not None)
    trainer.regularizer = regularizer
    return trainer


def _row_multiple(config: SFTConfig) -> int:
    """Return the number by which the length of a padded row is divisible.

    Context parallelism over n processes gives each of them two of 2n equal parts, so that all have as much to attend to.
    """
    n = context_parallel_size()
    return math.lcm(config.pad_to_multiple_of or 1, 2 * n if n > 1 else 1)


def _prepare_regularizer(regularizer: Regularizer, trainer: KnowledgeTrainer, is_tiled: bool) -> None:
    if regularizer.strengths.ewc:
        rows = trainer.train_dataset.rows
        replayed = (_replay_only(row) for row in rows if any(row.replayed))
        regularizer.measure_fisher(trainer.model, list(islice(replayed, FISHER_ROWS)))
    if is_tiled:
        regularizer.read_hidden_states()


def configure_trainer(trainer: KnowledgeTrainer, recipe: TrainRecipe, reinitialized: Sequence[str]) -> None:
    """Give `trainer` the recipe's techniques; `reinitialized` are the names of parameters with new weights.

    Raises `RecipeError` for faults that only the model shows.
    """
    techniques = recipe.techniques
    trainer.training_loss = TrainingLoss(
        float(trainer.args.label_smoothing_factor),
        techniques.hard_example_mining,
        techniques.row_weights is not None,
        section_of(recipe) if recipe.method == "distill" else None,
    )
    trainer.label_smoother = None  # TrainingLoss smooths; validation losses stay plain
    has_kl = recipe.regularization is not None and recipe.regularization.kl > 0
    is_distilled = recipe.method == "distill"
    if trainer.aux_loss_enabled and (has_kl or is_distilled or not trainer.training_loss.plain or techniques.loss_tile):
        fault = (
            "this model adds its routers' loss, which smoothed labels, hard_example_mining, row_weights, loss_tile, distill and "
            "regularization.kl leave out. Remove them, or set trainer.router_aux_loss_coef: 0."
        )
        key = "techniques" if "techniques" in recipe.raw else "trainer.label_smoothing_factor"
        key = "method" if is_distilled else key
        raise recipe.error("regularization.kl" if has_kl else key, fault)
    if trainer.args.mixed_precision == "fp16" and recipe.model.quantization != "none":
        widen_adapter(trainer.model)
    trainer.layerwise_lr_decay = techniques.layerwise_lr_decay
    trainer.reinitialized = reinitialized
    trainer.freeze_warmup = freeze_base_steps(trainer.model, recipe, reinitialized)
    trainer.sam = SharpnessAware(techniques.sam) if techniques.sam else None
    for name in ("loss_tile", "stochastic_rounding", "muon"):
        setattr(trainer, name, getattr(techniques, name))
    if techniques.loss_tile is not None:
        base_model = trainer.model.get_base_model() if recipe.adapter is not None else trainer.model
        add_hidden_states(base_model)
        check_tiles(base_model, trainer.train_dataset[0], recipe)
    if techniques.patience is not None:
        trainer.add_callback(PatienceStopping(techniques.patience, trainer.guard.warnings))
    if techniques.histogram_steps is not None:
        trainer.add_callback(Histograms(techniques.histogram_steps, lambda: trainer.callback_handler.callbacks))


@torch.no_grad()
def check_tiles(model: Any, row: Mapping[str, Any], recipe: TrainRecipe) -> None:
    """Raise `RecipeError` if the logits of `model` from its hidden states are not its own, on the first tokens of `row`."""
    was_training = model.training
    model.eval()
    ids, positions = (torch.tensor([row[key][:_CHECKED]], device=model.device) for key in ("input_ids", "position_ids"))
    read: dict[str, Any] = {"input_ids": ids, "position_ids": positions, "use_cache": False}
    expected = model(**read).logits.float()
    tiled = model(**read, score=lambda hidden, project: project(hidden))
    model.train(was_training)
    if not torch.allclose(tiled, expected, atol=1e-2, rtol=1e-2):
        difference = float((tiled - expected).abs().max())
        fault = f"this model's head has a step that kinject does not know (logits differ by {difference:.2g}). Remove the line."
        raise recipe.error("techniques.loss_tile", fault)


def _describe_run(trainer: KnowledgeTrainer, tokenized: TokenizedCorpora) -> str:
    parameters, packing = list(trainer.model.parameters()), tokenized.packing
    n_trained = sum(models.size_of(parameter) for parameter in parameters if parameter.requires_grad)
    precision = {"no": "float32"}.get(trainer.accelerator.mixed_precision, trainer.accelerator.mixed_precision)
    return (
        f"trains {n_trained:,} of {sum(map(models.size_of, parameters)):,} parameters in {precision}, "
        f"{len(tokenized.train.rows):,} rows, {packing.strategy or 'unpacked'}"
        f"{', paraphrases separated' if packing.apart else ''}"
    )


def effective_batch(config: SFTConfig, data: TrainingData) -> dict[str, int]:
    """Return the rows and mean tokens of an update over all devices, and the factors of the rows."""
    batch, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    devices = config.world_size // processes_per_row() * max(1, config.n_gpu)  # GPUs of one process share its batches
    rows = batch * accumulation * devices
    return {
        "rows_per_device": batch, "accumulation": accumulation, "devices": devices, "rows": rows,
        "tokens": round(rows * float(data.rows.lengths().mean())),
    }  # fmt: skip


def _describe_techniques(trainer: KnowledgeTrainer, recipe: TrainRecipe) -> list[str]:
    notes = []
    if trainer.reinitialized:
        names = ", ".join(summarize_names(trainer.reinitialized))
        notes.append(f"techniques.reinitialize_last_layers: new weights for {names}")
    if trainer.freeze_warmup is not None:
        first = [name for name, _ in trainer.model.named_parameters() if name in trainer.freeze_warmup.first]
        notes.append(
            f"techniques.freeze_base_steps: for {trainer.freeze_warmup.steps} updates only these train: "
            f"{', '.join(summarize_names(first))}"
        )
    if trainer.sam is not None:
        notes.append(f"techniques.sam: gradients are taken {trainer.sam.rho:g} uphill, in two passes an update")
    if trainer.muon is not None:
        notes.append(
            f"techniques.muon: the layers' matrices by Muon at {trainer.muon:g} of the rate, the rest by AdamW"
        )
    if trainer.stochastic_rounding:
        notes.append("techniques.stochastic_rounding: bfloat16 weights, each update rounded up or down at random")
    mining = recipe.techniques.hard_example_mining
    if mining is not None:
        notes.append(
            f"techniques.hard_example_mining: learns from the {mining.fraction:.0%} of {mining.unit} with the highest loss"
        )
    return notes


def _check_packing(model: PreTrainedModel, dataset: RowDataset) -> None:
    packed = next((row for row in dataset if row["position_ids"].count(0) > 1), None)
    if packed is not None and models.is_runnable(model):
        check_isolation(model, packed)


def _replay_only(row: TrainingRow) -> TrainingRow:
    """Return `row` with the labels of its replayed tokens only."""
    labels = [label if replayed else IGNORED for label, replayed in zip(row.labels, row.replayed, strict=True)]
    return dataclasses.replace(row, labels=labels)
