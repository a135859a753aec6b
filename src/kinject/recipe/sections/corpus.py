"""The sections `documents` and `corpus`: how files become documents, and what is learned from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.recipe.sections.option import option


@dataclass(frozen=True)
class DocumentsSection:
    """Turns a heap of files (a folder, a pattern) into documents: how they are read, and what is
    left out."""

    fields: Mapping[Literal["text", "title", "id"], str] | None = option(
        None, help="Columns or keys with the text, the title and the id; default: found by name."
    )
    near_duplicates: float | None = option(
        0.85,
        help="A document that shares so large a part of its words with another, and its facts, is "
        "left out; null keeps it.",
        min=0.5,
        max=1.0,
    )
    boilerplate: float | None = option(
        0.02,
        help="A line that so large a part of the documents (and at least 10) share stays in the "
        "first only; null keeps it.",
        above=0.0,
        max=1.0,
    )
    cache_dir: str = option(
        "runs/parsed",
        help="Folder of parsed files, by content; may be deleted at any time.",
        path="output",
    )


_CORPUS_HELP = "Corpus (JSONL), or a data set: OWNER/NAME:CONFIGURATION:SPLIT:COLUMN."
_ANSWERS_HELP = (
    "own: the model answers the last turn of each row itself before it is trained "
    "(self-distillation)"
)


@dataclass(frozen=True)
class MixedCorpusSection:
    """A further corpus, mixed in by fraction of tokens: replay against forgetting, instructions
    among documents."""

    path: str = option(help=_CORPUS_HELP, path="corpus")
    fraction: float = option(help="Fraction of the mixture's tokens.", min=0.0, max=0.95)
    answers: Literal["given", "own"] = option("given", help=_ANSWERS_HELP)


@dataclass(frozen=True)
class CorpusSection:
    """The training corpus: rows with `text`, `messages`, or `prompt` and `completion`."""

    path: str = option(help=_CORPUS_HELP, path="corpus")
    answers: Literal["given", "own"] = option("given", help=_ANSWERS_HELP)
    # In the sandbox (LR 1e-3) 25.7 points of known facts are lost without, 6.3 at 25%, 2.2 at 45%.
    replay: MixedCorpusSection | None = option(None, help="Second corpus, mixed in.")
    mix: Mapping[str, MixedCorpusSection] | None = option(
        None, help="name: path and fraction of a further corpus, mixed in by fraction of tokens."
    )
    validation_corpus: str | None = option(
        None,
        help="Corpus, as path, of the validation loss; trainer.eval_strategy sets when it is "
        "computed.",
        path="corpus",
    )
    general_text: bool = option(
        True,
        help="Use replay and validation_corpus; false leaves both out, with a warning, for a run "
        "without such text.",
    )
    # Drawn by another hash than validation questions: with the same one, these questions would be
    # about documents that nobody trained on.
    validation_fraction: float = option(
        0.0,
        help="Fraction of the documents, with all their texts, held out of training for the "
        "validation loss.",
        min=0.0,
        max=0.5,
    )
    bos: bool | None = option(
        None,
        help="Begin each document with the BOS token; default: if the tokenizer begins its texts "
        "with it by itself.",
    )
    eos: bool = option(
        True,
        help="End each document and completion with the EOS token; chats end as templates do.",
    )
    allow_dropped_tokens: bool = option(
        False, help="Train although max_length truncates or drops text."
    )
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        help="Arguments of the chat template of rows with messages, for example {enable_thinking: "
        "false}.",
    )
    cache_dir: str = option(
        "runs/tokens",
        help="Folder for tokenised corpora, by content; may be deleted at any time.",
        path="output",
    )

    @property
    def has_validation(self) -> bool:
        """Whether evaluations have a validation loss."""
        return self.validation_corpus is not None or self.validation_fraction > 0

    def parts(self) -> dict[str, MixedCorpusSection]:
        """Return the corpora that are mixed in, by name; replay is called ``replay``."""
        return {**({"replay": self.replay} if self.replay is not None else {}), **(self.mix or {})}

    def own_answers(self) -> list[str]:
        """Return the key of each corpus that the model answers itself: "", replay, mix.NAME."""
        answers = {"": self.answers} | {
            name if name == "replay" else f"mix.{name}": part.answers
            for name, part in self.parts().items()
        }
        return [name for name, value in answers.items() if value == "own"]
