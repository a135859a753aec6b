"""How long a training is: its rows, steps and tokens, counted from the corpus, or by estimate where
files are not there yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinject.augment.preview import TOKENS_PER_WORD, Preview, preview
from kinject.corpus.fetched import with_local_corpora
from kinject.corpus.rows import CorpusFile
from kinject.disk import find_runs, is_file
from kinject.errors import KinjectError
from kinject.models import load_tokenizer, new_config
from kinject.plan.estimate import read_config
from kinject.recipe import ModelSection, TokenizerSection, TrainRecipe, read_recipe
from kinject.recipe.conflicts import find_problems
from kinject.train.config import trainer_field
from kinject.train.load import load_training_tokenizer


@dataclass(frozen=True)
class RunLength:
    """The steps and tokens of a run. `tokens` are read in all `steps` together; `learned` of them
    are in the loss."""

    n_rows: int
    steps: int
    epochs: float
    tokens: int
    learned: int


def count_length(recipe: TrainRecipe, n_devices: int, notes: list[str]) -> RunLength | None:
    """Return the length of the run; None, with a note, if its corpus or tokenizer is missing.

    Other missing files become notes: those that are only read beside the training change nothing
    about its steps, and of a corpus that is mixed in the recipe has the fraction of the tokens.
    Raises as `measure_length`.
    """
    from kinject.train.methods import method_of

    method = method_of(recipe)
    if method.no_timing:
        notes.append(f"steps and tokens are not counted: {method.no_timing}.")
        return None
    # A plan downloads nothing: a data set counts once a training has fetched it.
    recipe = with_local_corpora(recipe, fetch=False)
    if not is_file(recipe.corpus.path):
        return _estimate_length(recipe, n_devices, notes)
    there, missing = without_missing(recipe)
    fraction = sum(part.fraction for part in recipe.corpus.parts().values())
    fraction_there = sum(part.fraction for part in there.corpus.parts().values())
    try:
        tokenizer = load_training_tokenizer(recipe.model, CorpusFile(Path(recipe.corpus.path)))
    except KinjectError as error:
        notes.append(f"steps and tokens are not counted: {error}")
        return None
    length = measure_length(there, tokenizer, n_devices)
    if missing:
        notes.append(f"planned without what is not there yet: {', '.join(missing)}.")
    if fraction == fraction_there:
        return length
    notes.append("steps and tokens: by the fractions of the corpora that are not there yet.")
    factor = (1 - fraction_there) / (1 - fraction)
    n_rows = math.ceil(length.n_rows * factor)
    steps, epochs = count_steps(recipe.trainer, n_rows, n_devices)
    factor *= epochs / length.epochs
    tokens, learned = round(length.tokens * factor), round(length.learned * factor)
    return RunLength(n_rows, steps, epochs, tokens, learned)


def without_missing(recipe: TrainRecipe) -> tuple[TrainRecipe, list[str]]:
    """Return the recipe without the files that do not exist beside its corpus, and these files."""
    corpus = recipe.corpus
    missing = [path for path in _other_files(recipe) if not is_file(path)]
    # The plain values, too: a timed run is made from them.
    raw = {**recipe.raw, "corpus": dict(recipe.raw["corpus"])}
    changes: dict[str, Any] = {}
    for name in ("replay", "validation_corpus"):
        part = getattr(corpus, name)
        if part is not None and getattr(part, "path", part) in missing:
            changes[name] = None
            del raw["corpus"][name]
    corpus = replace(corpus, **changes)
    if corpus.mix is not None:
        there = {name: part for name, part in corpus.mix.items() if part.path not in missing}
        corpus = replace(corpus, mix=there)
        raw["corpus"]["mix"] = {name: raw["corpus"]["mix"][name] for name in there}
    reduced = replace(recipe, corpus=corpus, raw=raw)
    if recipe.projection is not None and recipe.projection.path in missing:
        del raw["regularization"]
        reduced = replace(reduced, regularization=None)
    if recipe.probes is not None:
        paths = {item.path for item in recipe.probes.sets().values()}
        if paths & set(missing):
            reduced = replace(reduced, probes=None)
    return reduced, missing


def _other_files(recipe: TrainRecipe) -> Iterator[str]:
    """Yield the paths of what a training reads beside its corpus."""
    for part in recipe.corpus.parts().values():
        yield part.path
    if recipe.corpus.validation_corpus is not None:
        yield recipe.corpus.validation_corpus
    if recipe.projection is not None:
        yield recipe.projection.path
    if recipe.probes is not None:
        for item in recipe.probes.sets().values():
            yield item.path


def _estimate_length(recipe: TrainRecipe, n_devices: int, notes: list[str]) -> RunLength | None:
    """Return the length of a run whose corpus a recipe of kinject augment has yet to write, by its
    estimate; None, with a note, without such a recipe."""
    path = Path(recipe.corpus.path)
    missing = f"{path} does not exist yet"
    writer = next((run.recipe for run in find_runs() if run.run_dir in path.parents), "")
    if not writer:
        notes.append(f"steps and tokens are not counted: {missing}.")
        return None
    try:
        written = preview(read_recipe(writer, verb="augment"))
    except KinjectError as error:
        notes.append(f"steps and tokens are not counted: {missing}, and {error}")
        return None
    notes.append(f"steps and tokens: by the estimate of kinject augment {writer} --dry-run.")
    n_texts = written.n_passages + written.n_asked
    return length_of_texts(recipe, n_texts, corpus_tokens(written), n_devices)


def corpus_tokens(written: Preview) -> float:
    """Return the tokens of the corpus that a run of kinject augment will write, by its estimate."""
    own = written.n_words * TOKENS_PER_WORD
    per_text = written.tokens_per_text
    # Texts of a file, and those that a rule makes, cost no tokens, but are read as often: each is
    # about as long as its passage.
    if per_text is None:
        per_text = own / max(written.n_passages, 1)
    return own + written.n_asked * per_text


def length_of_texts(
    recipe: TrainRecipe, n_texts: int, n_tokens: float, n_devices: int
) -> RunLength:
    """Return the length of a run over `n_texts` texts of `n_tokens` tokens, and over the corpora
    that the recipe mixes with them, by their fractions. Raises `RecipeError` if these leave
    nothing for the texts."""
    recipe.raise_any(find_problems("plan", recipe))
    fraction = sum(part.fraction for part in recipe.corpus.parts().values())
    n_all = n_tokens / (1 - fraction)
    n_rows = math.ceil(n_texts / (1 - fraction))
    block = trainer_field(recipe.trainer, "max_length")
    if recipe.trainer.get("packing") and block:
        n_rows = math.ceil(n_all / block)
    n_rows = max(n_rows, 1)
    steps, epochs = count_steps(recipe.trainer, n_rows, n_devices)
    n_read = round(n_all * epochs)
    return RunLength(n_rows, steps, epochs, n_read, n_read)


def measure_length(recipe: TrainRecipe, tokenizer: Any, n_devices: int) -> RunLength:
    """Read, tokenize and pack the corpus as training will (corpus.cache_dir keeps it for the run),
    and count.

    Raises as training for this corpus: `RecipeError`, `InputError` and `TrainingError`.
    """
    from kinject.train.data import check_positions, open_corpora, tokenize_and_pack
    from kinject.train.methods import method_of

    method = method_of(recipe)
    tokenized = tokenize_and_pack(recipe, method, tokenizer, open_corpora(recipe, method))
    data = tokenized.train
    check_positions(model_config(recipe.model), tokenized)
    n_rows = len(data.rows)
    steps, epochs = count_steps(recipe.trainer, n_rows, n_devices)
    # From the account: a sum over rows counts the token that is repeated at each cut, 2% in wrapped
    # rows of 48.
    n_read = round((data.account.source - data.account.lost) * epochs)
    return RunLength(n_rows, steps, epochs, n_read, round(data.account.trained * epochs))


def count_steps(trainer: Mapping[str, Any], n_rows: int, n_devices: int) -> tuple[int, float]:
    """Return (optimizer steps, epochs) of a run over `n_rows`, as transformers' Trainer counts
    them."""
    steps_per_epoch = updates_per_epoch(trainer, n_rows, n_devices)
    max_steps = trainer_field(trainer, "max_steps")
    if max_steps > 0:
        return max_steps, max_steps / steps_per_epoch
    epochs = float(trainer_field(trainer, "num_train_epochs"))
    return math.ceil(epochs * steps_per_epoch), epochs


def updates_per_epoch(trainer: Mapping[str, Any], n_rows: int, n_devices: int) -> int:
    """Return the optimizer steps of an epoch over `n_rows`, as Trainer counts them."""
    rows_per_batch = trainer_field(trainer, "per_device_train_batch_size") * n_devices
    drop_last = trainer_field(trainer, "dataloader_drop_last")
    n_batches = -(-n_rows // rows_per_batch)
    if drop_last:
        n_batches = n_rows // rows_per_batch
    return int(max(-(-n_batches // trainer_field(trainer, "gradient_accumulation_steps")), 1))


def model_config(model: ModelSection) -> Any:
    """Return transformers' config of the model to train. Raises `InputError` as `read_config`."""
    if model.new is None:
        return read_config(model.path or "", model.revision)
    if isinstance(model.tokenizer, TokenizerSection):
        return new_config(model.new, model.tokenizer.vocab_size)
    return new_config(
        model.new, len(load_tokenizer(model.tokenizer or "", revision=model.revision))
    )
