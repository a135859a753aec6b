"""What may stand in a recipe: one frozen dataclass a section. Field metadata: `help`, `min`, `max`, `nonempty`, `path`, `holds`.

`path` marks inputs: "file", "model" or "documents" (these two may be names on the hub). They must exist when a verb runs.
`holds` marks texts that a secret is easily put into: "url" and "variable" (the name of one); it is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


def option(default: Any = ..., **metadata: Any) -> Any:
    """Return a dataclass field with what `kinject.recipe.check` reads of it."""
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


@dataclass(frozen=True)
class TokenizerSection:
    """Train a byte-level BPE tokenizer on the corpus."""

    vocab_size: int = option(help="Pieces in the vocabulary, special tokens included.", min=260)


@dataclass(frozen=True)
class ModelSection:
    """Which model: `path` to load one, or `new` (config fields) with `tokenizer` to start from random weights."""

    path: str | None = option(None, help="Model folder or hub name.", path="model")
    revision: str | None = option(None, help="Branch, tag or commit on the hub.")
    new: Mapping[str, Any] | None = option(None, help="model_type and config fields of a model with random weights.")
    tokenizer: str | TokenizerSection | None = option(
        None, help="Tokenizer folder or hub name; or vocab_size of one to train.", path="model"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="Weights in memory.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "varlen"] = option(
        "auto", help="Attention implementation; varlen (training only) is torch's own variable-length attention."
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", help="Where the model lives.")
    quantization: Literal["none", "8bit", "4bit"] = option("none", help="Load through bitsandbytes (with an adapter).")
    freeze: tuple[str, ...] = option(
        (), help="Patterns (* and ?) of parameter names that do not train, as in [model.embed_tokens.*]."
    )


@dataclass(frozen=True)
class ReplaySection:
    """Rows of a second corpus mixed in, so that what was known stays known."""

    path: str = option(help="Corpus (JSONL) to replay from.", path="file")
    fraction: float = option(help="Share of the mixture's tokens that are replay.", min=0.0, max=0.95)


@dataclass(frozen=True)
class PartSection:
    """Rows of a further corpus mixed in: instruction rows among documents, or documents among instruction rows."""

    path: str = option(help="Corpus (JSONL).", path="file")
    fraction: float = option(help="Share of the mixture's tokens.", min=0.0, max=0.95)


@dataclass(frozen=True)
class CorpusSection:
    """What is trained on: rows with `text`, `messages`, or `prompt` and `completion`."""

    path: str = option(help="Corpus (JSONL).", path="file")
    replay: ReplaySection | None = option(None, help="Second corpus, mixed in.")
    mix: Mapping[str, PartSection] | None = option(
        None, help="name: path and fraction of a further corpus, mixed in by share of tokens."
    )
    validation_corpus: str | None = option(
        None, help="Corpus (JSONL) for the loss that trainer.eval_strategy asks for.", path="file"
    )
    bos: bool = option(True, help="Begin each document with the BOS token.")
    eos: bool = option(True, help="End each document with the EOS token.")
    allow_dropped_tokens: bool = option(False, help="Go on although max_length truncates or drops text.")
    separate_paraphrases: bool = option(
        True, help="Spread the rows of a document over the epoch; no packed row holds two of them."
    )
    cache_dir: str = option("runs/tokens", help="Folder for tokenised corpora, by content; may be deleted at any time.")

    def parts(self) -> dict[str, ReplaySection | PartSection]:
        """Return what is mixed in, by name; replay is called ``replay``."""
        return {**({"replay": self.replay} if self.replay is not None else {}), **(self.mix or {})}


Reaction = Literal["stop", "warn", "ignore"]


@dataclass(frozen=True)
class RegularizationSection:
    """What holds the model to its base while it learns; 0 leaves a term out.

    Strengths are in units of the loss a token: the update follows loss + l2/2 |w - w0|^2 + ewc/2 sum F (w - w0)^2 +
    kl * KL(base || model), the last on replayed tokens.
    """

    l2: float = option(0.0, help="Strength of the pull to the base weights.", min=0.0)
    ewc: float = option(0.0, help="Strength of the same pull, weighed by the Fisher information of replay.", min=0.0)
    ewc_rows: int = option(64, help="Replay rows from which the Fisher information is measured.", min=1)
    kl: float = option(0.0, help="Weight of the divergence from the base's predictions on replay.", min=0.0)


@dataclass(frozen=True)
class GuardsSection:
    """What a run does when training goes wrong: stop, warn, or ignore."""

    skipped_updates: int = option(
        3, help="Updates whose gradient is not finite that are skipped; one more stops the run.", min=0
    )
    masked_batch: Reaction = option("stop", help="A batch has no token to learn.")
    zero_loss: Reaction = option("stop", help="The loss is exactly 0.")
    norm_spike: Reaction = option("warn", help="A gradient norm exceeds 10 times its running median.")
    vanishing_rate: Reaction = option("warn", help="The learning rate is too small to move the weights.")
    pad_is_eos: Reaction = option("warn", help="The tokenizer pads with its end-of-text token.")
    unread_corpus: Reaction = option("warn", help="The recipe's steps end before the corpus was read once.")


@dataclass(frozen=True)
class ProbeSection:
    """One question set that is asked while the model trains."""

    path: str = option(help="Questions (JSONL, or MMLU's CSV).", path="file")
    role: Literal["learning", "retention"] = option("learning", help="learning or retention.")
    layout: Literal["auto", "native", "mmlu", "arc", "squad"] = option(
        "auto", help="How the file is laid out; auto tells by its ending and keys."
    )


@dataclass(frozen=True)
class ProbesSection:
    """Questions asked during training, whenever trainer.eval_strategy evaluates, and once before the first step.

    Each set is logged as eval_NAME_accuracy and their mean as eval_accuracy; trainer.metric_for_best_model takes
    NAME_accuracy, accuracy, or (with corpus.validation_corpus) loss.
    """

    questions: Mapping[str, str | ProbeSection] = option(
        help="name: path, or path with role.", nonempty=True, path="file"
    )
    limit: int | None = option(None, help="First N questions of each set only.", min=1)
    batch_tokens: int = option(16_384, help="Tokens in one forward pass, padding included.", min=64)
    patience: int | None = option(
        None, help="Stop after so many evaluations without a better trainer.metric_for_best_model.", min=1
    )
    max_forgetting: float | None = option(
        None, help="Stop when a retention set is answered worse than before training by more than this share.",
        min=0.0, max=1.0,
    )  # fmt: skip

    def sets(self) -> dict[str, ProbeSection]:
        """Return the question sets by name."""
        return {name: ProbeSection(item) if isinstance(item, str) else item for name, item in self.questions.items()}


@dataclass(frozen=True)
class GeneratorSection:
    """Who writes the rewritings, how fast and at what price."""

    kind: Literal["sandbox", "openai", "transformers", "file"] = option(
        help="sandbox (in process), openai (any compatible endpoint), transformers (a local model), file (finished rewritings)."
    )
    model: str | None = option(None, help="openai: model name at the endpoint; transformers: folder or hub name.")
    path: str | None = option(None, help="file: rewritings (JSONL with document_id and text).", path="file")
    base_url: str | None = option(
        None, help="Endpoint, for example http://127.0.0.1:8000/v1. Default: OpenAI's.", holds="url"
    )
    api_key_env: str = option("OPENAI_API_KEY", help="Environment variable that holds the key.", holds="variable")
    temperature: float = option(1.0, help="Sampling temperature.", min=0.0, max=2.0)
    max_tokens: int = option(1024, help="Longest answer, in tokens.", min=1)
    timeout: float = option(60.0, help="Seconds until a request counts as failed.", min=0.1)
    concurrency: int = option(8, help="Requests in flight; transformers: rows of one batch.", min=1, max=1024)
    batch: bool = option(False, help="openai: send through the provider's batch API (hours, at about half the price).")
    requests_per_minute: int | None = option(None, help="Most requests in any minute, retries included.", min=1)
    tokens_per_minute: int | None = option(None, help="Most tokens in any minute, both ways together.", min=1)
    price_in: float = option(0.0, help="Price of a million tokens read, in any currency.", min=0.0)
    price_out: float = option(0.0, help="Price of a million tokens written, in the same currency.", min=0.0)


@dataclass(frozen=True)
class AugmentSection:
    """Documents to passages to paraphrases to a corpus."""

    documents: str = option(
        help="File (txt, md, html, pdf, jsonl, csv, parquet), folder, or data set on the hub.", path="documents"
    )
    styles: Mapping[str, int] = option(help="Style of rewriting: samples of each passage, as in {paraphrase: 16}.")
    generator: GeneratorSection = option(help="Who writes the rewritings.")
    include_originals: bool = option(True, help="Keep the originals in the corpus.")
    passage_tokens: int = option(256, help="Longest passage, in tokens of `tokenizer`.", min=8)
    tokenizer: str | None = option(
        None, help="Tokenizer folder or hub name; default: words and punctuation.", path="model"
    )
    max_attempts: int = option(4, help="Samples asked for one rewriting before it is given up.", min=1, max=100)
    budget: float | None = option(
        None, help="Most that the run folder may cost, in the currency of the prices.", min=0.0
    )
    judge: GeneratorSection | None = option(None, help="A model that reads each rewriting beside its source.")
    contamination_check: tuple[str, ...] = option(
        (), help="Questions (JSONL, or MMLU's CSV) that must not stand in the corpus.", path="file"
    )
    contamination_ngram: int = option(
        13, help="Words in a row that count as a leak; a shorter question counts whole.", min=4
    )


@dataclass(frozen=True)
class QuestionsSection:
    """Documents to passages to four-choice questions, in a validation and a test set."""

    documents: str = option(help="Documents, as for augment.", path="documents")
    generator: GeneratorSection = option(help="Who writes the questions and is asked to check them.")
    n_questions: int = option(2, help="Questions kept of each passage, the most specific ones.", min=1, max=100)
    n_proposed: int = option(4, help="Questions asked for at once; those not kept are put aside.", min=1, max=100)
    closed_book: int = option(2, help="Times that each is asked without the passage; always right: refused.", min=0)
    validation: float = option(0.2, help="Share of the documents whose questions are validation.", min=0.0, max=1.0)
    passage_tokens: int = option(256, help="Longest passage, in tokens of `tokenizer`.", min=8)
    tokenizer: str | None = option(
        None, help="Tokenizer folder or hub name; default: words and punctuation.", path="model"
    )
    max_attempts: int = option(3, help="Times that a passage is asked about before it is left short.", min=1, max=100)
    budget: float | None = option(
        None, help="Most that the run folder may cost, in the currency of the prices.", min=0.0
    )


@dataclass(frozen=True)
class QuestionSetSection:
    """A question set; `role: retention` marks what the base model knew, so that a loss is forgetting."""

    path: str = option(help="Questions (JSONL, MMLU's CSV, or a lm-evaluation-harness task YAML).", path="file")
    role: Literal["learning", "retention"] = option("learning", help="learning or retention.")
    shots_from: str | None = option(
        None, help="Questions (JSONL) from which few-shot examples are taken, in order.", path="file"
    )
    layout: Literal["auto", "native", "mmlu", "arc", "squad"] = option(
        "auto", help="How the file is laid out; auto tells by its ending and keys."
    )
    n_choices: int = option(4, help="squad: options of a question, the wrong ones drawn from other answers.", min=2)
    validation: str | None = option(None, help="Questions (JSONL) on which K is chosen, asked as well.", path="file")
    contexts: str | None = option(
        None, help="Prepared contexts (JSONL with question_id and passages) instead of retrieval.", path="file"
    )


@dataclass(frozen=True)
class RetrievalSection:
    """Passages of documents, found by words or meaning or both; the K best stand before the question."""

    documents: tuple[str, ...] = option((), help="Documents (JSONL) to search.", path="file")
    k: tuple[int, ...] = option(
        (3,), help="Numbers of passages; each is an arm of its own.", min=1, max=100, nonempty=True
    )
    passage_tokens: int = option(256, help="Longest passage, in words and punctuation marks.", min=8)
    kind: Literal["bm25", "dense", "both"] = option(
        "bm25", help="bm25 (words), dense (embeddings), both (their ranks fused)."
    )
    embedder: str = option("BAAI/bge-large-en-v1.5", help="dense: sentence-transformers model, folder or hub name.")
    query_prefix: str | None = option(
        None, help="dense: text before each question; default: BGE's own for BGE models, else none."
    )
    cache_dir: str = option("runs/indices", help="dense: folder for embedded passages, by content.")


@dataclass(frozen=True)
class EvalSection:
    """Several models against several question sets; the first model is the base of every comparison."""

    models: Mapping[str, str] = option(
        help="name: folder or hub name. The first is the base.", nonempty=True, path="model"
    )
    questions: Mapping[str, str | QuestionSetSection] = option(
        help="name: path, or path with role and shots_from.", nonempty=True, path="file"
    )
    formats: tuple[
        Literal["letters", "texts", "hybrid", "rotations", "letters-no-question", "texts-no-question"], ...
    ] = option(("texts",), help="letters, texts, hybrid, rotations, or a baseline without the question.", nonempty=True)
    scores: tuple[Literal["sum", "chars", "bytes", "tokens", "pmi"], ...] = option(
        ("sum",), help="How option texts are compared: log-prob, per length, or pmi.", nonempty=True
    )
    template: str | None = option(None, help="Jinja file that writes the prompt instead.", path="file")
    chat: bool = option(False, help="Put the prompt into the tokenizer's chat template, as the user's turn.")
    perplexity_corpus: str | None = option(None, help="Texts (JSONL) whose perplexity is told beside.", path="file")
    shots: tuple[int, ...] = option((0,), help="Numbers of few-shot examples.", min=0, max=64, nonempty=True)
    retrieval: RetrievalSection | None = option(None, help="Retrieved context; absent: none.")
    retrieval_models: tuple[str, ...] | None = option(
        None, help="Models that are also asked with context; default: all."
    )
    batch_tokens: int = option(16_384, help="Tokens in one forward pass, padding included.", min=64)
    limit: int | None = option(None, help="First N questions of each set only.", min=1)
