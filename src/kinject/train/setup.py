"""A trainer from a recipe: corpora, tokenizer, model, callbacks, regularization and techniques put
together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kinject import models
from kinject.corpus.chat import note_on_end
from kinject.corpus.fetched import with_local_corpora
from kinject.corpus.rows import CorpusFile
from kinject.errors import Problem, RecipeError, fault
from kinject.manifests import EffectiveBatch
from kinject.models.generate import end_tokens
from kinject.process import (
    context_parallel_size,
    first_process_first,
    is_fsdp_launch,
    is_shortage,
    processes_per_row,
)
from kinject.recipe import TrainRecipe
from kinject.recipe.check import Checker, suggestion
from kinject.recipe.library_fields import starts_in_the_base
from kinject.recipe.method_rules import rules_of
from kinject.terminal import format_count
from kinject.train.batches import Collator, RowDataset, flattens
from kinject.train.callbacks import (
    EarlyStopping,
    Histograms,
    Screen,
    forgetting,
    guard_trackers,
    patience,
)
from kinject.train.config import make_configs, wants_all_trackers
from kinject.train.data import (
    Corpora,
    TokenizedCorpora,
    TrainingCorpus,
    TrainingData,
    check_positions,
    open_corpora,
    origin_of,
    tokenize_and_pack,
)
from kinject.train.decomposed import initial_state
from kinject.train.guards import (
    Guard,
    check_head_of_answers,
    check_start,
    fused_head_misfit,
    react,
)
from kinject.train.load import (
    NOT_RUNNING,
    begin_cartridge,
    check_model,
    check_runs,
    check_trainable,
    complete_head,
    freeze,
    has_idle_parts,
    load_training_model,
    load_training_tokenizer,
    precision_warnings,
    quantized_fault,
    reinitialize_last_layers,
    take_over_sharding,
    use_fastest_attention,
    widen_adapter,
)
from kinject.train.loss import Technique
from kinject.train.methods import (
    Method,
    MethodInputs,
    MethodParts,
    TrainerOptions,
    method_of,
)
from kinject.train.names import summarize_names
from kinject.train.objectives import OBJECTIVES, make_loss
from kinject.train.own_answers import write_own_answers
from kinject.train.parts import TrainingParts
from kinject.train.probes import Probes
from kinject.train.trainer import KnowledgeTrainer, RunTrainer
from kinject.train.updates import UPDATE_RULES, UpdateInputs, UpdateRule, make_rules

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback
    from trl import SFTConfig


_ROUTER_SETTINGS = ("output_router_logits", "router_aux_loss_coef")
_NAMED = 8
"""Names of parameters, their layers joined, in the note on what trains."""
_REGISTER = " None is registered: import a module that adds it to OBJECTIVES or UPDATE_RULES first."


def check_training(recipe: TrainRecipe) -> tuple[SFTConfig, PeftConfig | None]:
    """Return TRL's config and peft's (or None) of a recipe.

    Raises `RecipeError` for the problems of all sections that training reads, before a corpus or
    weights are read.
    """
    kinds: dict[str, type[Technique]] = {**OBJECTIVES, **UPDATE_RULES}
    with recipe.locating():
        # Only a dataclass has settings of its own; the others are keys of a recipe.
        custom = {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}
        _check_custom(recipe.techniques.custom, custom)
        checks = [kind.problems for name, kind in kinds.items() if kind.is_on(name, recipe)]
        configs = make_configs(recipe, checks, method_of(recipe).make_config)
        check_model(recipe)
    return configs


def _check_custom(custom: Mapping[str, Mapping[str, Any]], known: Mapping[str, type]) -> None:
    """Raise `RecipeError` for unknown names and settings under techniques.custom."""
    problems: list[Problem] = []

    def report(key: str | tuple[str | int, ...], message: str) -> None:
        problems.append(Problem(key, message))

    checker = Checker(report)
    for name, settings in custom.items():
        if name in known:
            checker.section(known[name], settings, ("techniques", "custom", name))
        else:
            fix = suggestion(name, known) or _REGISTER
            report(f"techniques.custom.{name}", f"unknown name.{fix}")
    if problems:
        raise RecipeError(problems)


def make_trainer(
    recipe: TrainRecipe,
    hashes: Mapping[str, str] | None = None,
    configs: tuple[SFTConfig, PeftConfig | None] | None = None,
) -> RunTrainer:
    """Return the trainer of `recipe`, ready to train: with its rows, model, optimizer settings,
    callbacks and notes.

    Nothing is written except the token cache, `corpus.cache_dir`. `hashes` are those of corpora
    that were just hashed (`kinject.train.run.hash_inputs`), `configs` those of `check_training`,
    which runs if there are none. Raises all that a training run raises before its first step:
    `RecipeError`, `InputError` for a corpus or model, `TrainingError` if text would be lost or
    packed documents would see each other.
    """
    config, adapter = configs or check_training(recipe)
    recipe = with_local_corpora(recipe)
    with recipe.locating():
        sharding = take_over_sharding(config, recipe.model.quantization)
        with models.sharded_by_transformers(sharding):
            return _Setup(recipe, config, adapter, sharding, hashes or {}).make_trainer()


@dataclass(frozen=True)
class _Rows:
    """The rows of a run and its tokenizer; `cost` is that of answers that the model wrote
    itself."""

    corpora: Corpora
    tokenizer: PreTrainedTokenizerBase
    tokenized: TokenizedCorpora
    cost: Counter[str]


@dataclass(frozen=True)
class _Setup:
    """The steps from a checked recipe to its trainer, in the order in which `make_trainer` takes
    them."""

    recipe: TrainRecipe
    config: SFTConfig
    adapter: PeftConfig | None
    sharding: models.Sharding | None
    hashes: Mapping[str, str]

    def make_trainer(self) -> RunTrainer:
        """Return the trainer."""
        recipe, config = self.recipe, self.config
        method = method_of(recipe)
        # Before the model: a fault of a corpus shows before any weights are read.
        rows = first_process_first(self._read_rows)  # the others find its tokens in the cache
        tokenizer, cost = rows.tokenizer, rows.cost
        model, notes = self._load(tokenizer)
        name = recipe.model.path or recipe.location("model.new")
        models.check_causal(model, name)
        models.check_first_position(model, name)
        window = check_positions(model.config, rows.tokenized)
        dataset = RowDataset(rows.tokenized.train.rows)
        notes += use_fastest_attention(model, recipe, dataset, config.mixed_precision)
        probes = None
        if recipe.probes is not None:
            probes = Probes(recipe.probes, rows.corpora.questions, tokenizer, window)
        # Before the rules, which keep copies of the weights that train.
        freeze(model, recipe.model.freeze)
        model, adapter = begin_cartridge(model, self.adapter, tokenizer, rows.corpora.rows)
        updates = self._update_inputs(model, rows)
        # Before a trainer has the model: a copy made afterwards was no frozen base (KL off by 5%).
        rules = make_rules(updates)
        own = method.prepare(
            MethodInputs(
                recipe=recipe,
                config=config,
                corpora=rows.corpora,
                tokenized=rows.tokenized,
                model=model,
                tokenizer=tokenizer,
                hashes=self.hashes,
                cost=cost,
            )
        )
        parts = TrainingParts(
            data=own.tokenized.train,
            train=RowDataset(
                rows.tokenized.train.rows, rows.tokenized.weights, rows.tokenized.teacher
            ),
            validation=_validation_rows(rows.tokenized),
            loss=make_loss(recipe, float(config.label_smoothing_factor)),
            rules=rules,
            guard=Guard(own.guards),
            probes=probes,
            load_weights=functools.partial(self._load_weights, tokenizer),
            make_teacher=own.make_teacher,
            cost=cost,
            practice=own.practice,
        )
        trainer = self._assemble(method, parts, model, adapter, tokenizer)
        # Of the trainer's model, since it is TRL that adds the adapter.
        check_trainable(trainer.model, recipe.model.freeze, recipe.adapter)
        # After that check: projection switches off weights that it cannot project.
        for rule in rules:
            rule.start(trainer)
        self._warn(trainer, own)
        trainer.notes += [
            *notes,
            *own.notes,
            *_notes(trainer, config, own.tokenized),
            *_describe_techniques(updates, rules),
        ]
        return trainer

    def _read_rows(self) -> _Rows:
        """Return the tokenizer, and the rows that it makes of the corpora."""
        recipe = self.recipe
        method = method_of(recipe)
        # Located here as well: the other processes get the first one's faults as finished text.
        with recipe.locating():
            opened = open_corpora(recipe, method, self.hashes)
            corpora, notes, cost = with_own_answers(recipe, opened)
            tokenizer = load_training_tokenizer(recipe.model, corpora.rows)
            tokenized = tokenize_and_pack(recipe, method, tokenizer, corpora)
        tokenized = dataclasses.replace(tokenized, notes=[*notes, *tokenized.notes])
        return _Rows(corpora, tokenizer, tokenized, cost)

    def _load(
        self, tokenizer: PreTrainedTokenizerBase, path: str = ""
    ) -> tuple[PreTrainedModel, list[str]]:
        """Return the model, and notes; with `path` its weights are those of that checkpoint."""
        recipe = self.recipe
        return load_training_model(
            recipe.model, tokenizer, recipe.seed, recipe.device, self.sharding, path
        )

    def _load_weights(self, tokenizer: PreTrainedTokenizerBase, path: str) -> PreTrainedModel:
        with models.sharded_by_transformers(self.sharding):
            return self._load(tokenizer, path)[0]

    def _update_inputs(self, model: PreTrainedModel, rows: _Rows) -> UpdateInputs:
        """Return what update rules are made from; new weights are drawn in the last layers here."""
        load_base = None
        if self.sharding is not None:  # a sharded model cannot be copied
            load_base = functools.partial(self._load_weights, rows.tokenizer, "")
        n_last = self.recipe.techniques.reinitialize_last_layers
        return UpdateInputs(
            self.recipe,
            model,
            load_base,
            reinitialized=reinitialize_last_layers(model, n_last, self.recipe.seed),
            kept=rows.tokenized.projection_rows or (),
        )

    def _assemble(
        self,
        method: Method,
        parts: TrainingParts,
        model: PreTrainedModel,
        adapter: PeftConfig | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> RunTrainer:
        """Return the trainer of `parts`. Raises `RecipeError` for faults that only the model
        shows."""
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        recipe, config = self.recipe, self.config
        flatten = flattens(recipe, model, parts.train)
        masks_padding = _has_router_loss(model)
        if masks_padding:
            _hide_mask(model)
        collator = Collator(
            _padding_token(tokenizer),
            flatten,
            _row_multiple(config),
            recipe.guards.nothing_learned,
            models.padding_positions(model.config),
            masks_padding,
        )
        options = TrainerOptions(
            model=model,
            config=config,
            tokenizer=tokenizer,
            adapter=adapter,
            run_dir=recipe.run_dir,
            callbacks=_callbacks(recipe, config, parts),
            collator=collator,
        )
        # Beside gradient checkpointing transformers 5.23 lets DDP wait for every gradient: a run
        # in which a weight has none ended in its second step.
        if config.ddp_find_unused_parameters is None and has_idle_parts(model):
            config.ddp_find_unused_parameters = True
        try:
            with _kept_router_settings(model):
                trainer = method.make_trainer(parts, options)
            complete_head(trainer.model)
            _check_head(trainer, recipe, parts.train[0])
        except (ValueError, ImportError) as error:  # of fields that only a whole trainer checks
            reason = " ".join(str(error).split())[:300]
            raise fault("trainer", f"TRL refuses it: {reason}") from error
        except NOT_RUNNING as error:
            # On packed weights it is the adapter: peft does not check which kinds run on them.
            if recipe.model.quantization == "none" or is_shortage(error):
                raise
            raise quantized_fault(error) from error
        left_out = None
        if wants_all_trackers(recipe):
            left_out = trainer.guard.warnings
        guard_trackers(trainer.callback_handler.callbacks, left_out)
        every = recipe.techniques.histogram_steps
        if every is not None:
            trainer.add_callback(Histograms(every, lambda: trainer.callback_handler.callbacks))
        if recipe.adapter is not None:
            _prepare_adapter(trainer, recipe, config)
        return trainer

    def _warn(self, trainer: RunTrainer, own: MethodParts) -> None:
        """Add the warnings that can be given before the first step. Raises `TrainingError` for one
        whose reaction is stop."""
        warnings = trainer.guard.warnings
        for warning in own.tokenized.warnings:
            warnings += react("warn", warning)
        warnings += precision_warnings(self.recipe.model, self.config)
        warnings += check_start(
            own.guards,
            trainer.model,
            own.n_rows,
            self.config,
            rounds_up=self.recipe.techniques.stochastic_rounding,
        )


def _validation_rows(tokenized: TokenizedCorpora) -> RowDataset | None:
    if tokenized.validation is None:
        return None
    return RowDataset(tokenized.validation.rows)


def _padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills up rows; no text attends to it, so any will do."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    return int(tokenizer.eos_token_id or 0)


def _notes(trainer: RunTrainer, config: SFTConfig, tokenized: TokenizedCorpora) -> list[str]:
    """Return lines for the log on the rows, the batch, what trains if that is not all, and a chat
    template that does not teach to stop."""
    notes = [
        *tokenized.notes,
        _describe_run(trainer, tokenized),
        _describe_batch(config, tokenized),
    ]
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
        if note:
            notes.append(note)
    return notes


def _describe_batch(config: SFTConfig, tokenized: TokenizedCorpora) -> str:
    batch = effective_batch(config, tokenized.train)
    devices = "1 device" if batch.devices == 1 else f"{batch.devices} devices"
    return (
        f"effective batch: {format_count(batch.rows_per_device, 'row')} x "
        f"{batch.accumulation} accumulated x "
        f"{devices} = {format_count(batch.rows, 'row')} an update, about {batch.tokens:,} tokens"
    )


def with_own_answers(
    recipe: TrainRecipe, corpora: Corpora
) -> tuple[Corpora, list[str], Counter[str]]:
    """Return the corpora with the answers that the model is to write itself, a note on each, and
    the cost of all."""
    notes: list[str] = []
    costs: Counter[str] = Counter()
    for part in recipe.corpus.own_answers():
        path, note, cost = write_own_answers(recipe, part)
        notes.append(note)
        costs.update(cost)
        if part:
            name = part.removeprefix("mix.")
            answered = CorpusFile(path, origin_of(name))
            corpora.parts[name] = dataclasses.replace(corpora.parts[name], rows=answered)
        else:
            rows = TrainingCorpus(path, corpora.rows.method, corpora.rows.column)
            corpora = dataclasses.replace(corpora, rows=rows)
    return corpora, notes, costs


def _callbacks(
    recipe: TrainRecipe, config: SFTConfig, parts: TrainingParts
) -> list[TrainerCallback]:
    """Return the callbacks that the recipe asks for, and the screen."""
    guard, techniques = parts.guard, recipe.techniques
    callbacks: list[TrainerCallback] = [Screen(effective_batch(config, parts.data).tokens)]
    if recipe.probes is not None:
        callbacks.append(EarlyStopping(forgetting(recipe.probes), guard.warnings))
    if techniques.patience is not None:
        callbacks.append(EarlyStopping(patience(techniques.patience), guard.warnings))
    return callbacks


def _prepare_adapter(trainer: RunTrainer, recipe: TrainRecipe, config: SFTConfig) -> None:
    """Make the adapter of a new trainer ready. Raises `RecipeError` if it does not run."""
    if recipe.model.quantization != "none":
        if config.mixed_precision == "fp16":
            widen_adapter(trainer.model)
        if not is_fsdp_launch() and models.is_runnable(trainer.model):
            check_runs(trainer)
    # Loaded as it is, pissa draws another part of the base: losses of 3.28 to 3.51 instead of 2.66.
    if starts_in_the_base(recipe.adapter):
        trainer.initial_adapter = initial_state(trainer.model)


def _has_router_loss(model: PreTrainedModel) -> bool:
    """Return whether a mixture of experts may add its routers' loss, on whole rows."""
    config = model.config.get_text_config()
    return hasattr(config, "router_aux_loss_coef") and context_parallel_size() == 1


@contextlib.contextmanager
def _kept_router_settings(model: PreTrainedModel) -> Iterator[None]:
    """Keep the settings of a model's routers, which TRL changes as it makes a trainer.

    Its loss needs none of them. A saved model that returns the routers' logits would compute their
    loss wherever it is used, and fail on batches of texts that it continues.
    """
    config = model.config.get_text_config()
    before = {name: getattr(config, name) for name in _ROUTER_SETTINGS if hasattr(config, name)}
    yield
    for name, value in before.items():
        setattr(config, name, value)


def _hide_mask(model: PreTrainedModel) -> None:
    """Keep the mask of padding from the layers of `model` in training; its routers' loss reads it.

    Of packed rows transformers separates the documents only where its layers get no mask. Probes
    read padded rows, with the model in evaluation mode.
    """

    def without_mask(
        layers: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if layers.training:
            options = options | {"attention_mask": None}
        return arguments, options

    model.base_model.register_forward_pre_hook(without_mask, with_kwargs=True)


def _check_router_loss(trainer: KnowledgeTrainer, recipe: TrainRecipe) -> None:
    """Raise `RecipeError` if a mixture of experts adds its routers' loss, which only TRL's own loss
    has."""
    has_kl = recipe.regularization is not None and recipe.regularization.kl > 0
    if not trainer.aux_loss_enabled or not (has_kl or trainer.training_loss.is_changed):
        return
    if has_kl:
        key = "regularization.kl"
    elif rules_of(recipe).has_teacher:
        key = "method"
    elif "techniques" in recipe.raw:
        key = "techniques"
    else:
        key = "trainer.label_smoothing_factor"
    message = (
        "this model adds its routers' loss, which smoothed labels, hard_example_mining, "
        "row_weights, distill and regularization.kl leave out. Remove them, or set "
        "trainer.router_aux_loss_coef: 0."
    )
    raise fault(key, message)


def _check_head(trainer: RunTrainer, recipe: TrainRecipe, row: dict[str, list[int]]) -> None:
    """Raise `RecipeError` if the loss of a trainer cannot be computed for its model."""
    if isinstance(trainer, KnowledgeTrainer):
        _check_router_loss(trainer, recipe)
        _check_fused_head(trainer)
    elif models.is_runnable(trainer.model):
        with trainer.accelerator.autocast():
            check_head_of_answers(trainer.model, row)


def _check_fused_head(trainer: KnowledgeTrainer) -> None:
    """Let `trainer` compute the loss itself for a model whose logits TRL's head does not give.
    Raises `RecipeError` for a loss that only TRL computes.

    TRL 1.16 multiplies the states of the last layer by the head's weight. Between the two
    ModernBERT's decoder has one layer more, and RecurrentGemma caps its logits under a name of its
    own: they were trained on another loss (5.64 for 5.88).
    """
    if trainer.computes_training_loss() or not models.is_runnable(trainer.model):
        return
    with trainer.accelerator.autocast():
        reason = fused_head_misfit(trainer.model, trainer.train_dataset[0])
    if not reason:
        return
    trainer.fused_head_fits = False
    if not trainer.computes_training_loss():
        key = "loss_type"
        if trainer.aux_loss_enabled:
            key = "router_aux_loss_coef"
        message = (
            f"is a part of TRL's loss, whose head does not give this model's logits ({reason}). "
            "Set router_aux_loss_coef: 0 and loss_type: nll."
        )
        raise fault(f"trainer.{key}", message)
    trainer.notes.append(
        "the loss is computed from all logits, since TRL's head does not give those of this model "
        f"({reason})"
    )


def _row_multiple(config: SFTConfig) -> int:
    """Return the number by which the length of a padded row is divisible.

    Context parallelism over n processes gives each of them two of 2n equal parts, so that all have
    as much to attend to.
    """
    multiple = config.pad_to_multiple_of or 1
    n = context_parallel_size()
    if n > 1:
        return math.lcm(multiple, 2 * n)
    return int(multiple)


def _describe_run(trainer: RunTrainer, tokenized: TokenizedCorpora) -> str:
    parameters = list(trainer.model.parameters())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    n_trained, n_all = sum(map(models.size_of, trained)), sum(map(models.size_of, parameters))
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in trained}
    weights = " and ".join(sorted(dtypes))
    autocast = {"bf16": "bfloat16", "fp16": "float16"}
    arithmetic = autocast.get(trainer.accelerator.mixed_precision, weights)
    rows = tokenized.packing.strategy or "unpacked"
    if rows != "wrapped":
        rows += ", paraphrases separated"
    return (
        f"trains {n_trained:,} of {format_count(n_all, 'parameter')} ({weights} weights, "
        f"{arithmetic} arithmetic), {format_count(len(tokenized.train.rows), 'row')}, {rows}"
    )


def effective_batch(config: SFTConfig, data: TrainingData) -> EffectiveBatch:
    """Return the rows and mean tokens of an update over all devices, and the factors of the
    rows."""
    batch, accumulation = config.per_device_train_batch_size, config.gradient_accumulation_steps
    # Processes of tensor or context parallelism share their rows, which count once.
    devices = config.world_size // processes_per_row()
    rows = batch * accumulation * devices
    return EffectiveBatch(
        rows_per_device=batch,
        accumulation=accumulation,
        devices=devices,
        rows=rows,
        tokens=round(rows * float(data.rows.lengths().mean())),
    )


def _describe_techniques(inputs: UpdateInputs, rules: Sequence[UpdateRule]) -> list[str]:
    notes = [rule.note() for rule in rules]
    if inputs.reinitialized:
        names = ", ".join(summarize_names(inputs.reinitialized))
        notes.insert(0, f"techniques.reinitialize_last_layers: new weights for {names}")
    return [note for note in notes if note]
