"""The sections that write: `augment` (paraphrases), `questions`, and the generator of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from kinject.errors import Problem
from kinject.recipe.check import suggestion
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
        help="sandbox (in process), openai (any compatible endpoint), transformers or vllm (a "
        "local model), file (finished paraphrases).",
    )
    model: str | None = option(
        None, help="openai: model name at the endpoint; transformers, vllm: folder or hub name."
    )
    path: str | None = option(
        None, help="file: paraphrases (JSONL with document_id and text).", path="file"
    )
    base_url: str | tuple[str, ...] | None = option(
        None,
        help="Endpoint, for example http://127.0.0.1:8000/v1, or a list of equal ones. Default: "
        "OpenAI's.",
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
        help="Further parameters, as the endpoint names them: top_p, reasoning_effort, seed: null. "
        "transformers: top_p, top_k, min_p. vllm: those of SamplingParams.",
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


LIMIT_NAMES = ("max_tokens", "max_completion_tokens")
"""Names of the limit of an answer: most servers know the first, OpenAI's reasoning models only the
second."""
SAMPLING = ("top_k", "top_p", "min_p")
"""Parameters in extra_body that kind: transformers reads."""
RESERVED_BODY = (
    "model",
    "messages",
    "stream",
    "n",
    "response_format",
    "stop",
    "chat_template_kwargs",
)
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
    """Variants of a style until they have so many tokens together, for each passage (or
    document)."""

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
        help="Style: samples of each passage, as in {paraphrase: 16}, or a target, as in "
        "{entigraph: {tokens: 20000}}."
    )
    generator: GeneratorSection = option(help="The writer of the paraphrases.")
    include_originals: bool = option(True, help="Keep the originals in the corpus.")
    messages: bool = option(
        False,
        help="Write questions, dialogues, facts and instructions as conversations (rows with "
        "messages).",
    )
    one_corpus: bool = option(
        False,
        help="Write prompts with completions, and conversations, into corpus.jsonl instead of "
        "sft.jsonl.",
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
        help="Texts in which each fact of a passage is to stand: facts in fewer are asked for by "
        "name.",
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
    # With a bound: without one 2147483647 passed the check, as a draw of random values found.
    closed_book: int = option(
        2,
        help="Times that each is asked without the passage; if always correct, it is refused.",
        min=0,
        max=100,
    )
    retention: bool = option(
        False,
        help="Questions on well-known neighbours of what the passages tell of, to measure what "
        "training forgets; those that the model answers each time are kept.",
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


class StyleTraits(Protocol):
    """What these checks read of a style; `kinject.augment.styles` has the styles."""

    @property
    def name(self) -> str: ...
    @property
    def scope(self) -> str: ...
    @property
    def rows(self) -> str | tuple[str, ...]: ...
    @property
    def verify(self) -> str: ...
    @property
    def mechanical(self) -> object: ...
    @property
    def prepare(self) -> tuple[object, ...]: ...
    @property
    def writes_chat(self) -> bool: ...
    @property
    def makes_instructions(self) -> bool: ...
    @property
    def can_name_facts(self) -> bool: ...


def generator_problems(generator: GeneratorSection, key: str = "") -> Iterator[Problem]:
    """Yield the problems of the generator at `key`."""
    if generator.kind in GENERATOR_REQUIRES:
        name, content = GENERATOR_REQUIRES[generator.kind]
        if not getattr(generator, name):
            yield Problem(key, f"{name} is missing. Give {content}.")
    parts = generator.parts()
    if isinstance(generator.base_url, tuple) and len(parts) < max(1, len(generator.base_url)):
        message = "is empty, or names an endpoint twice. Give each once."
        yield Problem(f"{key}.base_url", message)
    for part in parts.values():
        if part.address and not _is_url(part.address):
            message = f"found {part.address!r}, expected a URL such as http://127.0.0.1:8000/v1."
            yield Problem(f"{key}.base_url", message)
    if len(generator.price) not in (0, 2):
        message = (
            "expected two numbers: of a million prompt tokens, and of a million answer tokens."
        )
        yield Problem(f"{key}.price", message)
    for name in _UNSENT.get(generator.kind, ("stop", "extra_body", "chat_template_kwargs")):
        if getattr(generator, name):
            yield Problem(f"{key}.{name}", f"is not for kind: {generator.kind}. Remove it.")
    yield from _extra_body_problems(generator, f"{key}.extra_body")


_UNSENT: Mapping[str, tuple[str, ...]] = {"openai": (), "vllm": (), "transformers": ("stop",)}
"""Kind of generator -> its keys of a request that it does not read; the other kinds send none."""


def _extra_body_problems(generator: GeneratorSection, key: str) -> Iterator[Problem]:
    body = generator.extra_body or {}
    if generator.kind == "transformers":
        for name, value in body.items():
            if name not in SAMPLING or not isinstance(value, int | float):
                message = f"kind: transformers reads numbers: {', '.join(SAMPLING)}. Remove it."
                yield Problem(f"{key}.{name}", message)
    own = {item.name for item in fields(GeneratorSection)}
    for name in body:
        if name in RESERVED_BODY:
            fix = f"Use the generator's own key {name}" if name in own else "kinject sets it"
            yield Problem(f"{key}.{name}", f"is not read here. {fix}.")


def unlimited_problems(generator: GeneratorSection, key: str) -> Iterator[Problem]:
    """Yield the problem of a generator that no budget can hold: with a price, and with answers of
    any length."""
    body = generator.extra_body or {}
    limits = [body[name] for name in LIMIT_NAMES if name in body]
    if generator.has_prices and limits and not any(limits):
        message = (
            "sends no limit of an answer, so what a request may cost is unknown and no budget "
            "holds. Name one (max_tokens: 8192), or remove the budget."
        )
        yield Problem(f"{key}.extra_body", message)


def _is_url(text: str) -> bool:
    """Return whether `text` is a web URL with a possible host name and port."""
    try:
        parts = urlsplit(text)
        host = (parts.hostname or "").encode("idna").decode()
        _ = parts.port  # raises ValueError if it is no number, or too large
    # Also the codec's UnicodeError for a host name that cannot be one.
    except ValueError:
        return False
    is_web = parts.scheme in ("http", "https") and bool(host)
    return is_web and text.isprintable() and " " not in text


def is_free(*generators: GeneratorSection | None) -> bool:
    """Return whether no generator has a price, so that a budget would never end anything."""
    return not any(generator.has_prices for generator in generators if generator is not None)


def augment_problems(
    section: AugmentSection, styles: Mapping[str, StyleTraits]
) -> Iterator[Problem]:
    """Yield the problems of the section among all `styles`, by name."""
    for name, samples in section.styles.items():
        if name not in styles:
            yield Problem(f"augment.styles.{name}", f"unknown style.{suggestion(name, styles)}")
        if isinstance(samples, int) and not 0 <= samples <= MAX_SAMPLES:
            message = f"found {samples}, allowed: 0 to {MAX_SAMPLES:,}."
            yield Problem(f"augment.styles.{name}", message)
    chosen = [styles[name] for name in section.styles if name in styles]
    yield from _style_problems(section, chosen)
    if section.messages and not any(style.writes_chat for style in chosen):
        message = "none of the styles writes conversations."
        names = [name for name, style in styles.items() if style.writes_chat]
        yield Problem("augment.messages", f"{message} Those that do: {', '.join(names)}.")
    yield from _coverage_problems(section, chosen, styles)
    if section.generator.kind == "file":
        yield from _file_problems(chosen)
    if section.judge is not None and section.judge.kind == "file":
        yield Problem("augment.judge.kind", "must answer: kind: file does not.")
    if section.budget is not None and is_free(section.generator, section.judge):
        message = "needs augment.generator.price, or the judge's: without prices all is free."
        yield Problem("augment.budget", message)


def _style_problems(section: AugmentSection, chosen: list[StyleTraits]) -> Iterator[Problem]:
    """Yield the problems of targets, and of keys for which no style writes the rows."""
    for style in chosen:
        has_target = not isinstance(section.styles[style.name], int)
        if has_target and (style.mechanical or section.generator.kind == "file"):
            message = "needs a number: a target of tokens is for styles that a model writes."
            yield Problem(f"augment.styles.{style.name}", message)
    writes_chat = section.messages and any(style.writes_chat for style in chosen)
    makes_instructions = any(style.makes_instructions for style in chosen)
    if section.one_corpus and not (makes_instructions or writes_chat):
        message = "none of the styles writes other rows than text. Remove the line."
        yield Problem("augment.one_corpus", message)
    if section.raft is not None and all(style.rows != "quoted" for style in chosen):
        message = (
            "is for the style raft, which augment.styles lacks. Add it, or remove the section."
        )
        yield Problem("augment.raft", message)


def _coverage_problems(
    section: AugmentSection, chosen: list[StyleTraits], styles: Mapping[str, StyleTraits]
) -> Iterator[Problem]:
    """Yield why no text can be asked for by naming facts, if the recipe wants that."""
    if section.coverage is None or not chosen:
        return
    if section.generator.kind == "file":
        message = "asks for texts by naming facts; kind: file has no model to ask. Remove the line."
        yield Problem("augment.coverage", message)
    elif not any(style.can_name_facts for style in chosen):
        message = "asks for texts by naming facts, and the prompts of these styles name none."
        names = [name for name, style in styles.items() if style.can_name_facts]
        yield Problem("augment.coverage", f"{message} Those that can: {', '.join(names)}.")


def _file_problems(chosen: list[StyleTraits]) -> Iterator[Problem]:
    """Yield the problems of styles whose texts come from a file."""
    written = [style for style in chosen if not style.mechanical]
    if len(written) > 1:
        message = "the texts of kind: file are all of one style. Name one."
        yield Problem("augment.styles", message)
    for style in chosen:
        if style.prepare or style.verify or style.scope != "passage":
            message = "needs a model to ask; kind: file has none."
            yield Problem(f"augment.styles.{style.name}", message)


def questions_problems(section: QuestionsSection) -> Iterator[Problem]:
    """Yield the problems of the section."""
    if section.generator.kind == "file":
        message = "questions need a model to ask; kind: file has none."
        yield Problem("questions.generator.kind", message)
    if section.retention and not section.closed_book:
        message = (
            "questions on neighbours are kept where the model answers them without the passage; "
            "closed_book: 0 asks none."
        )
        yield Problem("questions.retention", message)
    if section.retention and section.generator.kind == "sandbox":
        message = (
            "the sandbox's writer knows no neighbours: it has no knowledge beside the passage."
        )
        yield Problem("questions.retention", message)
    if section.budget is not None and is_free(section.generator):
        message = "needs questions.generator.price: without prices all is free."
        yield Problem("questions.budget", message)
