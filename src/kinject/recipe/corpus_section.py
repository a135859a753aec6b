"""The section `corpus` of a recipe: the corpus, what is mixed in, and answers that the model writes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kinject.recipe.sections import option


@dataclass(frozen=True)
class AnswersSection:
    """The model writes the answers of rows itself before it is trained; they replace those given (MixSD, arXiv 2605.16865).

    Each token is drawn from what the model predicts with the context, or, by the fraction `without_context`, without it.
    """

    context: Literal["document", "answer"] = option(
        "document",
        help="The text before the prompt: the document of the row (origin: original), or prompt and given answer.",
    )
    documents: str | None = option(
        None,
        help="Documents, as for augment; default: the rows of the main corpus with origin original. Rows name theirs by "
        "document_id.",
        path="documents",
    )
    without_context: float = option(
        0.3, help="Fraction of tokens that are drawn without the context; 1: it is not shown at all.", min=0.0, max=1.0
    )
    correct_only: bool = option(
        True, help="Keep only answers that hold the given one, as written answers to questions are graded."
    )
    attempts: int = option(10, help="Most times that an answer is written until it can be kept.", min=1, max=100)
    temperature: float = option(
        0.0, help="Sampling temperature; 0: the likeliest token of the prediction drawn.", min=0.0, max=2.0
    )
    max_tokens: int = option(512, help="Longest answer, in tokens; at most half of the model's window.", min=1)
    batch: int = option(32, help="Answers written at once.", min=1, max=1024)
    seed: int = option(
        0, help="Seed of the draws. The recipe's own is not used, so that its seeds share the answers.", min=0
    )


OWN_ANSWERS = AnswersSection(without_context=1.0, correct_only=False, attempts=1)
"""What `answers: own` means: greedily, to the prompt alone."""
_ANSWERS_HELP = "own: the model answers the last turn of each row itself before it is trained (self-distillation)"


@dataclass(frozen=True)
class ReplaySection:
    """Rows of a second corpus, mixed in against forgetting."""

    path: str = option(help="Corpus (JSONL) to replay from.", path="file")
    fraction: float = option(help="Fraction of the mixture's tokens that are replay.", min=0.0, max=0.95)
    answers: Literal["given", "own"] | AnswersSection = option("given", help=f"{_ANSWERS_HELP}; or how it does.")


@dataclass(frozen=True)
class MixedCorpusSection:
    """Rows of a further corpus mixed in: instruction rows among documents, or documents among instruction rows."""

    path: str = option(help="Corpus (JSONL).", path="file")
    fraction: float = option(help="Fraction of the mixture's tokens.", min=0.0, max=0.95)
    answers: Literal["given", "own"] | AnswersSection = option("given", help=f"{_ANSWERS_HELP}; or how it does.")


@dataclass(frozen=True)
class CorpusSection:
    """The training corpus: rows with `text`, `messages`, or `prompt` and `completion`."""

    path: str = option(help="Corpus (JSONL).", path="file")
    answers: Literal["given", "own"] | AnswersSection = option("given", help=f"{_ANSWERS_HELP}; or how it does.")
    replay: ReplaySection | None = option(None, help="Second corpus, mixed in.")
    mix: Mapping[str, MixedCorpusSection] | None = option(
        None, help="name: path and fraction of a further corpus, mixed in by fraction of tokens."
    )
    validation_corpus: str | None = option(
        None, help="Corpus (JSONL) of the validation loss; trainer.eval_strategy sets when it is computed.", path="file"
    )
    general_text: bool = option(
        True,
        help="Use replay and validation_corpus; false leaves both out, with a warning, for a run without such text.",
    )
    validation_fraction: float = option(
        0.0, help="Fraction of the documents, with all their texts, held out of training for the validation loss.",
        min=0.0, max=0.5,
    )  # fmt: skip
    bos: bool = option(True, help="Begin each document with the BOS token.")
    eos: bool = option(True, help="End each document with the EOS token.")
    allow_dropped_tokens: bool = option(False, help="Train although max_length truncates or drops text.")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None, help="Arguments of the chat template of rows with messages, for example {enable_thinking: false}."
    )
    thinking: Literal["learn", "mask"] = option(
        "learn", help="Thinking in the assistant's turns (reasoning_content, <think>): learned, or read only."
    )
    cache_dir: str = option(
        "runs/tokens", help="Folder for tokenised corpora, by content; may be deleted at any time.", path="output"
    )

    @property
    def has_validation(self) -> bool:
        """Whether evaluations have a validation loss."""
        return self.validation_corpus is not None or self.validation_fraction > 0

    def parts(self) -> dict[str, ReplaySection | MixedCorpusSection]:
        """Return the corpora that are mixed in, by name; replay is called ``replay``."""
        return {**({"replay": self.replay} if self.replay is not None else {}), **(self.mix or {})}

    def faults(self) -> list[tuple[str, str]]:
        """Return (key, fault) of the corpora that are mixed in."""
        faults = []
        if "replay" in (self.mix or {}):
            faults.append(("corpus.mix.replay", "replay is no part of mix. Move it up to corpus.replay, or rename it."))
        total = sum(part.fraction for part in self.parts().values())
        if total > 0.95:
            fault = f"the fractions of replay and mix sum to {total:g}, allowed: up to 0.95. The corpus has the rest."
            faults.append(("corpus", fault))
        return faults

    def own_answers(self) -> dict[str, AnswersSection]:
        """Return how the model answers rows itself, by the key of each corpus where it does: "", replay, mix.NAME."""
        given = {"": self.answers} | {
            name if name == "replay" else f"mix.{name}": part.answers for name, part in self.parts().items()
        }
        own = {name: OWN_ANSWERS if answers == "own" else answers for name, answers in given.items()}
        return {name: answers for name, answers in own.items() if isinstance(answers, AnswersSection)}
