"""The sections that write: `augment` (paraphrases), `questions`, and the generator of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kinject.recipe.sections.option import option

MAX_SAMPLES = 10_000
"""Most samples of one style and passage; `kinject.augment.validation` checks it with the names of
the styles."""


@dataclass(frozen=True)
class GeneratorSection:
    """The model or file that writes, how fast and at what price: of paraphrases and questions, as
    judge, or asked by eval."""

    kind: Literal["sandbox", "openai", "transformers", "vllm", "file"] = option(
        "openai",
        help="sandbox (in process), openai (any compatible endpoint), transformers or vllm (a local model), file (finished "
        "paraphrases).",
    )
    model: str | None = option(
        None, help="openai: model name at the endpoint; transformers, vllm: folder or hub name."
    )
    path: str | None = option(
        None, help="file: paraphrases (JSONL with document_id and text).", path="file"
    )
    base_url: str | tuple[str, ...] | None = option(
        None,
        help="Endpoint, for example http://127.0.0.1:8000/v1, or a list of equal ones. Default: OpenAI's.",
        holds="url",
    )
    api_key_env: str = option(
        "OPENAI_API_KEY", help="Environment variable that holds the key.", holds="variable"
    )
    timeout: float = option(60.0, help="Seconds until a request counts as failed.", min=0.1)
    price: tuple[float, ...] = option(
        (),
        help="Prices of a million prompt tokens and of a million answer tokens, in any currency.",
        min=0.0,
    )
    temperature: float | None = option(
        None,
        help="Sampling temperature. Default: 1, and 0 for answers to questions of kinject eval.",
        min=0.0,
        max=2.0,
    )
    max_tokens: int = option(
        1024, help="Longest answer, in tokens; a reasoning model's thinking counts.", min=1
    )
    stop: tuple[str, ...] = option((), help="openai, vllm: texts at which an answer ends.")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None, help="Arguments of the model's chat template, for example {enable_thinking: false}."
    )
    extra_body: Mapping[str, Any] | None = option(
        None,
        help="Further parameters, as the endpoint names them: top_p, reasoning_effort, seed: null. transformers: top_p, "
        "top_k, min_p. vllm: those of SamplingParams.",
    )
    concurrency: int = option(
        8, help="Requests in flight; transformers, vllm: rows of one batch.", min=1, max=1024
    )

    def parts(self) -> dict[str, GeneratorSection]:
        """Return the section of each endpoint by its address without the scheme; itself under "" if
        it is the only one."""
        if isinstance(self.base_url, tuple):
            return {
                url.partition("://")[2].rstrip("/"): replace(self, base_url=url)
                for url in self.base_url
            }
        return {"": self}

    @property
    def sampling_temperature(self) -> float:
        """The temperature, 1 if the recipe names none."""
        return 1.0 if self.temperature is None else self.temperature

    @property
    def has_prices(self) -> bool:
        """Whether an answer costs anything."""
        return any(self.price)

    @property
    def address(self) -> str | None:
        """The address of one of the `parts`, None for OpenAI's."""
        if isinstance(self.base_url, tuple):
            raise TypeError("several endpoints have no single address")
        return self.base_url


SAMPLING = ("top_k", "top_p", "min_p")
"""Parameters in extra_body that kind: transformers reads."""
RESERVED_BODY = (
    "model", "messages", "stream", "n", "response_format", "stop", "chat_template_kwargs",
)  # fmt: skip
"""Parameters that extra_body may not hold: kinject sets them, or its generator has a key of the
same name."""
GENERATOR_REQUIRES: Mapping[str, tuple[str, str]] = {
    "openai": ("model", "the name of a model at the endpoint"),
    "transformers": ("model", "a model folder or a name on the hub"),
    "vllm": ("model", "a model folder or a name on the hub"),
    "file": ("path", "a file of paraphrases (JSONL with document_id and text)"),
}
"""Kind of generator -> (the field that it requires, its content)."""


@dataclass(frozen=True)
class TokenTarget:
    """Variants of a style until they have so many tokens together, for each passage (or document)."""

    tokens: int = option(help="Tokens, counted as for passage_tokens.", min=1)


@dataclass(frozen=True)
class RaftSection:
    """Passages in front of the questions of the style raft: the one that answers it among others,
    its distractors."""

    distractors: int = option(3, help="Distractors of each question.", min=0, max=100)
    without_gold: float = option(
        0.2,
        help="Fraction of the questions whose own passage is replaced by one more distractor.",
        min=0.0,
        max=1.0,
    )
    quote: bool = option(True, help="Whether answers quote their passage first.")


@dataclass(frozen=True)
class AugmentSection:
    """Documents to passages to paraphrases to a corpus."""

    documents: str = option(
        help="File (txt, md, html, pdf, jsonl, csv, parquet), folder, or data set on the hub.",
        path="documents",
    )
    styles: Mapping[str, int | TokenTarget] = option(
        help="Style: samples of each passage, as in {paraphrase: 16}, or a target, as in {entigraph: {tokens: 20000}}."
    )
    generator: GeneratorSection = option(help="The writer of the paraphrases.")
    include_originals: bool = option(True, help="Keep the originals in the corpus.")
    messages: bool = option(
        False,
        help="Write questions, dialogues, facts and instructions as conversations (rows with messages).",
    )
    one_corpus: bool = option(
        False,
        help="Write prompts with completions, and conversations, into corpus.jsonl instead of sft.jsonl.",
    )
    raft: RaftSection | None = option(
        None, help="The passages in front of the questions of the style raft."
    )
    passage_tokens: int = option(
        256, help="Longest passage, in words and punctuation marks.", min=8
    )
    style_files: tuple[str, ...] = option((), help="YAML files of your own styles.", path="file")
    max_attempts: int = option(
        4, help="Attempts at one paraphrase before it is given up.", min=1, max=100
    )
    budget: float | None = option(
        None, help="Most that the run folder may cost, in the currency of the prices.", min=0.0
    )
    coverage: int | None = option(
        None,
        help="Texts in which each fact of a passage is to stand: facts in fewer are asked for by name.",
        min=1,
        max=1000,
    )
    judge: GeneratorSection | None = option(
        None, help="A model that compares each paraphrase with its source."
    )
    contamination_check: tuple[str, ...] = option(
        (), help="Questions (JSONL, or MMLU's CSV) that must not be in the corpus.", path="file"
    )


@dataclass(frozen=True)
class QuestionsSection:
    """Documents to passages to questions, in a validation and a test set."""

    documents: str = option(help="Documents, as for augment.", path="documents")
    generator: GeneratorSection = option(
        help="The writer of the questions, which also checks them."
    )
    kinds: tuple[Literal["choices", "open"], ...] = option(
        ("choices",),
        help="choices: four of them; open: a short answer (with choices: of the same questions).",
        nonempty=True,
    )
    n_questions: int = option(
        2, help="Questions kept of each passage, the most specific ones.", min=1, max=100
    )
    n_proposed: int = option(
        4, help="Questions written at once; those not kept are stored apart.", min=1, max=100
    )
    closed_book: int = option(
        2,
        help="Times that each is asked without the passage; if always correct, it is refused.",
        min=0,
        max=100,
    )
    retention: bool = option(
        False,
        help="Questions on well-known neighbours of what the passages tell of, to measure what training forgets; those "
        "that the model answers each time are kept.",
    )
    validation: float = option(
        0.2, help="Fraction of the documents whose questions are for validation.", min=0.0, max=1.0
    )
    passage_tokens: int = option(
        256, help="Longest passage, in words and punctuation marks.", min=8
    )
    max_attempts: int = option(
        3, help="Requests for one passage before it is left with fewer questions.", min=1, max=100
    )
    budget: float | None = option(
        None, help="Most that the run folder may cost, in the currency of the prices.", min=0.0
    )
