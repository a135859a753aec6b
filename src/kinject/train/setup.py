"""A trainer from a recipe: corpora, tokenizer, model, callbacks, regularization and techniques put
together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject import models
from kinject.corpus.chat import note_on_end
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import TokenAccount
from kinject.errors import Problem, RecipeError, fault
from kinject.models.generate import end_tokens
from kinject.process import (
    context_parallel_size,
    first_process_first,
    is_fsdp_launch,
    is_shortage,
    made_by_first_process,
    processes_per_row,
)
from kinject.recipe import TrainRecipe
from kinject.recipe.check import Checker, suggestion
from kinject.recipe.library_fields import starts_in_the_base
from kinject.train.callbacks import (
    EarlyStopping,
    Histograms,
    Screen,
    forgetting,
    guard_trackers,
    patience,
)
from kinject.train.config import make_configs
from kinject.train.data import (
    REPLAY,
    Collator,
    Corpora,
    Practice,
    RowDataset,
    TokenizedCorpora,
    TrainingCorpus,
    TrainingData,
    check_positions,
    open_corpora,
    tokenize_and_pack,
)
from kinject.train.decomposed import initial_state
from kinject.train.guards import Guard, check_start, react
from kinject.train.load import (
    begin_cartridge,
    check_model,
    check_runs,
    check_trainable,
    freeze,
    load_training_model,
    load_training_tokenizer,
    precision_warnings,
    quantized_fault,
    reinitialize_last_layers,
    take_over_sharding,
    widen_adapter,
)
from kinject.train.names import summarize_names
from kinject.train.objectives import OBJECTIVES, make_loss
from kinject.train.objectives.distillation import Teacher, make_teacher
from kinject.train.own_answers import write_own_answers
from kinject.train.probes import Probes
from kinject.train.recall import RecallTrainer, choose_practice
from kinject.train.trainer import KnowledgeTrainer, TrainingParts, check_isolation
from kinject.train.updates import UPDATE_RULES, UpdateInputs, UpdateRule, make_rules

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from trl import SFTConfig


_NAMED = 8
"""Names of parameters, their layers joined, in the note on what trains."""
_REGISTER = " None is registered: import a module that adds it to OBJECTIVES or UPDATE_RULES first."


def check_training(recipe: TrainRecipe) -> tuple[SFTConfig, Any]:
    """Return SFTConfig and peft's config (or None) of a recipe.

    Raises `RecipeError` for the problems of all sections that training reads, before a corpus or
    weights are read.
    """
    kinds: dict[str, Any] = {**OBJECTIVES, **UPDATE_RULES}
    with recipe.locating():
        _check_custom(
            recipe.techniques.custom,
            {n: kind for n, kind in kinds.items() if dataclasses.is_dataclass(kind)},
        )
        rows = [
            row
            for name, kind in kinds.items()
            if kind.is_on(name, recipe)
            for row in kind.conflicts
        ]
        configs = make_configs(recipe, rows)
        check_model(recipe)
    return configs


def _check_custom(custom: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Raise `RecipeError` for unknown names and settings under techniques.custom."""
    problems: list[Problem] = []
    checker = Checker(lambda key, message: problems.append(Problem(key, message)))
    for name, settings in custom.items():
        if name in known:
            checker.section(known[name], settings, ("techniques", "custom", name))
        else:
            problems.append(
                Problem(
                    f"techniques.custom.{name}",
                    f"unknown name.{suggestion(name, known) or _REGISTER}",
                )
            )
    if problems:
        raise RecipeError(problems)


def make_trainer(
    recipe: TrainRecipe,
    hashes: Mapping[str, str] | None = None,
    configs: tuple[SFTConfig, Any] | None = None,
) -> KnowledgeTrainer | RecallTrainer:
    """Return the trainer of `recipe`, ready to train: with its rows, model, optimizer settings,
    callbacks and notes.

    Nothing is written except the token cache, `corpus.cache_dir`. `hashes` are those of corpora
    that were just hashed (`kinject.train.run.hash_inputs`), `configs` those of `check_training`,
    which runs if there are none. Raises all that a training run raises before its first step:
    `RecipeError`, `InputError` for a corpus or model, `TrainingError` if text would be lost or
    packed documents would see each other.
    """
    config, adapter = configs or check_training(recipe)
    with recipe.locating():
        sharding = take_over_sharding(config, recipe.model.quantization)
        with models.sharded_by_transformers(sharding):
            return _make_trainer(recipe, config, adapter, sharding, hashes)


def _make_trainer(
    recipe: TrainRecipe, config: SFTConfig, adapter: Any, sharding: models.Sharding | None,
    hashes: Mapping[str, str] | None,
) -> KnowledgeTrainer | RecallTrainer:  # fmt: skip
    """Return the trainer as `make_trainer` does, of a checked config."""

    def tokenize() -> tuple[Corpora, PreTrainedTokenizerBase, TokenizedCorpora, Counter[str]]:
        with recipe.locating():  # the other processes get its faults as finished text
            corpora, notes, cost = with_own_answers(recipe, open_corpora(recipe, hashes))
            tokenizer = load_training_tokenizer(recipe.model, corpora.rows)
            tokenized = tokenize_and_pack(recipe, tokenizer, corpora)
        return (
            corpora,
            tokenizer,
            dataclasses.replace(tokenized, notes=[*notes, *tokenized.notes]),
            cost,
        )

    corpora, tokenizer, tokenized, cost = first_process_first(
        tokenize
    )  # the others find its tokens in the cache
    load = functools.partial(
        load_training_model, recipe.model, tokenizer, recipe.seed, recipe.device, sharding
    )
    model, notes = load()
    models.check_causal(model, recipe.model.path or recipe.location("model.new"))
    window = check_positions(model.config, tokenized.train)
    probes = (
        Probes(recipe.probes, corpora.questions, tokenizer, window)
        if recipe.probes is not None
        else None
    )

    def load_weights(path: str) -> PreTrainedModel:
        with models.sharded_by_transformers(sharding):
            return load(path)[0]

    freeze(model, recipe.model.freeze)
    model, adapter = begin_cartridge(model, adapter, tokenizer, corpora.rows)
    inputs = UpdateInputs(
        recipe, model, functools.partial(load_weights, "") if sharding is not None else None,
        reinitialize_last_layers(model, recipe.techniques.reinitialize_last_layers, recipe.seed),
        tokenized.projection_rows or (),
    )  # fmt: skip
    loss, rules = make_loss(recipe, float(config.label_smoothing_factor)), make_rules(inputs)
    train = RowDataset(tokenized.train.rows, tokenized.weights, tokenized.teacher)
    validation = RowDataset(tokenized.validation.rows) if tokenized.validation is not None else None
    make = None
    if tokenized.teacher is not None:
        make = functools.partial(_teacher, recipe, tokenized, hashes, cost, bf16=config.bf16)
    guards, practice, n_rows = recipe.guards, list[Practice](), len(tokenized.train.rows)
    if recipe.method == "recall":
        practice, note = made_by_first_process(
            lambda: choose_practice(recipe, corpora.rows, model, tokenizer, config)
        )
        notes, n_rows = [*notes, note], len(practice) * config.num_generations
        guards = dataclasses.replace(
            guards, nothing_learned="ignore"
        )  # a batch of equal answers has no loss
        account = tokenized.train.account  # none of its tokens is learned
        data = dataclasses.replace(
            tokenized.train, account=TokenAccount(account.source, 0, account.source)
        )
        tokenized = dataclasses.replace(tokenized, train=data, notes=[], warnings=[], chat=None)
    parts = TrainingParts(
        tokenized.train, train, validation, loss, rules, Guard(guards), probes, load_weights, make, cost, practice,
    )  # fmt: skip
    trainer = _assemble(recipe, config, adapter, model, tokenizer, parts)
    check_trainable(trainer.model, recipe.model.freeze, recipe.adapter)
    for rule in rules:
        rule.start(trainer)
    for warning in tokenized.warnings:
        trainer.guard.warnings += react("warn", warning)
    trainer.guard.warnings += precision_warnings(recipe.model, config)
    rounds_up = recipe.techniques.stochastic_rounding
    trainer.guard.warnings += check_start(
        guards, trainer.model, n_rows, config, rounds_up=rounds_up
    )
    trainer.notes += [
        *notes,
        *_notes(trainer, config, tokenized),
        *_describe_techniques(inputs, rules),
    ]
    return trainer


def _notes(trainer: KnowledgeTrainer, config: SFTConfig, tokenized: TokenizedCorpora) -> list[str]:
    """Return lines for the log on the rows, the batch, and what trains if that is not all."""
    batch = effective_batch(config, tokenized.train)
    notes = [
        *tokenized.notes, _describe_run(trainer, tokenized),
        f"effective batch: {batch['rows_per_device']} rows x {batch['accumulation']} accumulated x {batch['devices']} "
        f"device{'s' * (batch['devices'] != 1)} = {batch['rows']} rows an update, about {batch['tokens']:,} tokens",
    ]  # fmt: skip
    names = [
        name for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    ]
    if len(names) < len(list(trainer.model.parameters())):
        groups = summarize_names(names)
        more = f" and {len(groups) - _NAMED} more" if len(groups) > _NAMED else ""
        notes.append(f"these train: {', '.join(groups[:_NAMED])}{more}")
    if tokenized.chat is not None:
        tokenizer = trainer.processing_class
        note = note_on_end(tokenizer, tokenized.chat, end_tokens(trainer.model, tokenizer))
        notes += [note] if note else []
    return notes


def with_own_answers(
    recipe: TrainRecipe, corpora: Corpora
) -> tuple[Corpora, list[str], Counter[str]]:
    """Return the corpora with the answers that the model is to write itself, a note on each, and
    the cost of all."""
    notes, costs = [], Counter[str]()
    for part in recipe.corpus.own_answers():
        path, note, cost = write_own_answers(recipe, part)
        notes.append(note)
        costs.update(cost)
        if part:
            name = part.removeprefix("mix.")
            answered = CorpusFile(path, REPLAY * (name == REPLAY))
            corpora.parts[name] = dataclasses.replace(corpora.parts[name], rows=answered)
        else:
            rows = TrainingCorpus(path, recipe.method, corpora.rows.column)
            corpora = dataclasses.replace(corpora, rows=rows)
    return corpora, notes, costs


def _teacher(
    recipe: TrainRecipe, tokenized: TokenizedCorpora, hashes: Mapping[str, str] | None, cost: Counter[str], model: Any, *,
    bf16: bool,
) -> Teacher:  # fmt: skip
    """Return the teacher of a run; add a note on it to `tokenized`, and the cost of its predictions
    to `cost`.

    The first process makes those that the cache lacks.
    """
    section = recipe.distills
    assert tokenized.teacher is not None
    assert section is not None
    weights = (hashes or {}).get("teacher" if section.teacher else "model", "")
    known = "" if weights.startswith("hub:") else weights
    cache_dir = Path(recipe.corpus.cache_dir)
    make = functools.partial(
        make_teacher, section, recipe.model, cache_dir, tokenized.teacher, model, known, bf16=bf16
    )
    teacher, note, spent = first_process_first(make)
    tokenized.notes.append(note)
    cost.update(spent)
    return teacher


def _assemble(
    recipe: TrainRecipe, config: SFTConfig, adapter: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase,
    parts: TrainingParts,
) -> KnowledgeTrainer | RecallTrainer:  # fmt: skip
    """Return the trainer of `parts`. Raises `RecipeError` for faults that only the model shows."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    techniques = recipe.techniques
    pad = (
        tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id or 0
    )
    packs = bool(recipe.trainer.get("packing"))
    flatten = "flash" in str(model.config._attn_implementation) and packs
    if packs and recipe.trainer.get("packing_strategy") != "wrapped" and not flatten:
        _check_packing(model, parts.train)
    callbacks = _callbacks(recipe, config, parts)
    given: dict[str, Any] = {
        "model": model, "args": config, "processing_class": tokenizer, "peft_config": adapter, "run_dir": recipe.run_dir,
        "callbacks": callbacks,
    }  # fmt: skip
    try:
        if parts.practice:
            trainer: KnowledgeTrainer | RecallTrainer = RecallTrainer(parts, **given)
        else:
            collator = Collator(pad, flatten, _row_multiple(config), recipe.guards.nothing_learned)
            trainer = KnowledgeTrainer(parts, data_collator=collator, **given)
            _check_router_loss(trainer, recipe)
    except (
        ValueError,
        ImportError,
    ) as error:  # of fields that only a whole trainer checks together
        raise fault("trainer", f"TRL refuses it: {' '.join(str(error).split())[:300]}") from error
    except (RuntimeError, TypeError) as error:
        if recipe.model.quantization == "none" or is_shortage(error):
            raise
        raise quantized_fault(error) from error
    guard_trackers(trainer.callback_handler.callbacks)
    if techniques.histogram_steps is not None:
        trainer.add_callback(
            Histograms(techniques.histogram_steps, lambda: trainer.callback_handler.callbacks)
        )
    if recipe.adapter is not None:
        _prepare_adapter(trainer, recipe, config)
    return trainer


def _callbacks(recipe: TrainRecipe, config: SFTConfig, parts: TrainingParts) -> list[Any]:
    """Return the callbacks that the recipe asks for, and the screen."""
    guard, techniques = parts.guard, recipe.techniques
    callbacks: list[Any] = [Screen(effective_batch(config, parts.data)["tokens"])]
    if recipe.probes is not None:
        callbacks.append(EarlyStopping(forgetting(recipe.probes), guard.warnings))
    if techniques.patience is not None:
        callbacks.append(EarlyStopping(patience(techniques.patience), guard.warnings))
    return callbacks


def _prepare_adapter(
    trainer: KnowledgeTrainer | RecallTrainer, recipe: TrainRecipe, config: SFTConfig
) -> None:
    """Make the adapter of a new trainer ready. Raises `RecipeError` if it does not run."""
    if recipe.model.quantization != "none":
        if config.mixed_precision == "fp16":
            widen_adapter(trainer.model)
        if not is_fsdp_launch() and models.is_runnable(trainer.model):
            check_runs(trainer)
    if starts_in_the_base(recipe.adapter):
        trainer.initial_adapter = initial_state(trainer.model)


def _check_router_loss(trainer: KnowledgeTrainer, recipe: TrainRecipe) -> None:
    """Raise `RecipeError` if a mixture of experts adds its routers' loss, which only TRL's own loss
    has."""
    has_kl = recipe.regularization is not None and recipe.regularization.kl > 0
    if not trainer.aux_loss_enabled or not (has_kl or trainer.training_loss.is_changed):
        return
    key = "techniques" if "techniques" in recipe.raw else "trainer.label_smoothing_factor"
    key = "regularization.kl" if has_kl else "method" if recipe.method == "distill" else key
    message = (
        "this model adds its routers' loss, which smoothed labels, hard_example_mining, row_weights, distill and "
        "regularization.kl leave out. Remove them, or set trainer.router_aux_loss_coef: 0."
    )
    raise fault(key, message)


def _row_multiple(config: SFTConfig) -> int:
    """Return the number by which the length of a padded row is divisible.

    Context parallelism over n processes gives each of them two of 2n equal parts, so that all have
    as much to attend to.
    """
    n = context_parallel_size()
    return math.lcm(config.pad_to_multiple_of or 1, 2 * n if n > 1 else 1)


def _describe_run(trainer: KnowledgeTrainer, tokenized: TokenizedCorpora) -> str:
    parameters, packing = list(trainer.model.parameters()), tokenized.packing
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    weights = " and ".join(
        sorted({str(parameter.dtype).removeprefix("torch.") for parameter in trained})
    )
    arithmetic = {"bf16": "bfloat16", "fp16": "float16"}.get(
        trainer.accelerator.mixed_precision, weights
    )
    return (
        f"trains {sum(map(models.size_of, trained)):,} of {sum(map(models.size_of, parameters)):,} parameters "
        f"({weights} weights, {arithmetic} arithmetic), {len(tokenized.train.rows):,} rows, {packing.strategy or 'unpacked'}"
        f"{'' if packing.strategy == 'wrapped' else ', paraphrases separated'}"
    )


def effective_batch(config: SFTConfig, data: TrainingData) -> dict[str, int]:
    """Return the rows and mean tokens of an update over all devices, and the factors of the rows."""
    batch, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    devices = (
        config.world_size // processes_per_row() * max(1, config.n_gpu)
    )  # GPUs of one process share its batches
    rows = batch * accumulation * devices
    return {
        "rows_per_device": batch, "accumulation": accumulation, "devices": devices, "rows": rows,
        "tokens": round(rows * float(data.rows.lengths().mean())),
    }  # fmt: skip


def _describe_techniques(inputs: UpdateInputs, rules: Sequence[UpdateRule]) -> list[str]:
    notes = [rule.note() for rule in rules]
    if inputs.reinitialized:
        names = ", ".join(summarize_names(inputs.reinitialized))
        notes.insert(0, f"techniques.reinitialize_last_layers: new weights for {names}")
    return [note for note in notes if note]


def _check_packing(model: PreTrainedModel, dataset: RowDataset) -> None:
    packed = next((row for row in dataset if row["position_ids"].count(0) > 1), None)
    if packed is not None and models.is_runnable(model):
        check_isolation(model, packed)
