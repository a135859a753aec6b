"""What a recipe names as corpora, read and made training rows: needs a tokenizer, but no model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kinject.corpus import CorpusFile, Layout, Tokenization
from kinject.corpus.questions import read_questions
from kinject.recipe import TrainRecipe
from kinject.train.config import trainer_field
from kinject.train.data import REPLAY, Part, Preparation, TrainingData, check_account
from kinject.train.load import chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Corpora:
    """The corpus, what is mixed in by name, and what the held-out loss is measured on."""

    rows: CorpusFile
    parts: dict[str, Part]
    held_out: CorpusFile | None


@dataclass(frozen=True)
class Prepared:
    """Rows to train on and to evaluate on, how they are laid out, and what to say of it."""

    data: TrainingData
    held_out: TrainingData | None
    layout: Layout
    notes: list[str]


def read_corpora(recipe: TrainRecipe) -> Corpora:
    """Return what the recipe names, read once through. Raises `InputError` for rows or questions that cannot be used."""
    corpus = recipe.corpus
    rows = CorpusFile(Path(corpus.path))
    wrong = {"cpt": ("messages", "completion"), "sft": ("text",)}.get(recipe.method or "", ())
    for shape, row_id in rows.shapes.items():
        if shape in wrong:
            held = {"text": "text", "messages": "messages", "completion": "prompt and completion"}[shape]
            raise recipe.error(
                "method",
                f"found {recipe.method}, but row {row_id} of {corpus.path} holds {held}. Remove method or change the corpus.",
            )
    for item in recipe.probes.sets().values() if recipe.probes is not None else ():
        read_questions(Path(item.path), item.layout)  # its faults before a model loads
    parts = {
        name: Part(CorpusFile(Path(part.path), REPLAY if name == REPLAY else ""), part.fraction)
        for name, part in corpus.parts().items()
    }
    return Corpora(rows, parts, CorpusFile(Path(corpus.validation_corpus)) if corpus.validation_corpus else None)


def prepare(recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, corpora: Corpora) -> Prepared:
    """Return the training rows of `corpora`; a chat template that the recipe names is put into `tokenizer`.

    Raises `TrainingError` when text would be lost and the recipe does not allow it.
    """
    corpus = recipe.corpus
    asked = recipe.trainer
    how = Tokenization(
        corpus.bos, corpus.eos, asked.get("completion_only_loss"), asked.get("assistant_only_loss", False)
    )
    strategy = trainer_field(recipe, "packing_strategy") if asked.get("packing") else None
    layout = Layout(trainer_field(recipe, "max_length"), strategy, corpus.separate_paraphrases)
    if asked.get("chat_template_path"):
        tokenizer.chat_template = chat_template(recipe, asked["chat_template_path"])
    preparation = Preparation(tokenizer, how, layout, recipe.seed, Path(corpus.cache_dir))
    data = preparation.apply(corpora.rows, corpora.parts)
    held_out = preparation.apply(corpora.held_out) if corpora.held_out is not None else None
    notes = [check_account(data.account, layout.block, corpus.allow_dropped_tokens)]
    for name, share in data.shares.items():
        notes.append(f"{name}: {share:.2%} of the tokens from {corpus.parts()[name].path}")
    return Prepared(data, held_out, layout, notes)
