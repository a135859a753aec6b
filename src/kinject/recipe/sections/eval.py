"""The section `eval`: models, question sets and retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from kinject.disk import path_exists
from kinject.errors import Problem
from kinject.question_formats import FORMATS
from kinject.recipe.sections.augment import GeneratorSection, is_free
from kinject.recipe.sections.model import Attention, Dtype, Quantization
from kinject.recipe.sections.option import option


@dataclass(frozen=True)
class QuestionSetSection:
    """A question set; `role: retention` marks what the base model knew: a loss there is forgetting.

    A set in which no question has an answer has the role unanswerable by itself.
    """

    path: str = option(help="Questions (JSONL, or MMLU's CSV).", path="file")
    role: Literal["learning", "retention", "unanswerable"] = option(
        "learning",
        help="learning, retention, or unanswerable: no document answers these questions, to "
        "decline is correct.",
    )
    shots_from: str | None = option(
        None, help="Questions (JSONL) for the few-shot examples, taken in order.", path="file"
    )
    layout: Literal["auto", "open"] = option(
        "auto",
        help="auto: answers without choices become choices, with wrong ones from other questions. "
        "open: they stay open.",
    )
    validation: str | None = option(
        None,
        help="Questions (JSONL) on which a study makes its choices; kinject eval does not ask "
        "them.",
        path="file",
    )
    retrieval: bool | None = option(
        None,
        help="Whether the set is also asked with passages; default: unless its role is retention.",
    )
    formats: tuple[str, ...] | None = option(
        None,
        help="How this set is asked instead of eval.formats, as [generate] for instructions.",
        nonempty=True,
        words=FORMATS,
    )
    limit: int | None = option(
        None, help="First N questions of this set only; default: eval.limit.", min=1
    )

    @property
    def gets_passages(self) -> bool:
        """Whether the questions are asked with passages as well, if the recipe retrieves."""
        if self.retrieval is None:
            return self.role != "retention"
        return self.retrieval


@dataclass(frozen=True)
class RetrievalSection:
    """Retrieval of passages by words or meaning; the best K precede the question."""

    documents: tuple[str, ...] = option(
        help="Documents (JSONL) to search.", path="files", nonempty=True
    )
    k: tuple[int, ...] = option(
        (3,), help="Numbers of passages; each is a separate arm.", min=1, max=100, nonempty=True
    )
    # By bm25 on SQuAD, passages of 64 lose 1.4 points of recall at 1, and an overlap of 16 does not
    # help (-1.1).
    passage_tokens: int = option(
        256, help="Longest passage that is searched, in words and punctuation marks.", min=8
    )
    # Recall at 1 on 2,910 SQuAD questions: lexical is 5.7 points above bm25 (79.9%), without a
    # model.
    # bm25 by default: in fictional passages it finds 98 to 100% at 1, and all-MiniLM-L6-v2, which
    # has never seen the invented names, 89 to 93%.
    kind: Literal["bm25", "lexical", "dense", "both", "oracle"] = option(
        "bm25",
        help="bm25 (words), lexical (words, pairs, pieces), dense (embeddings), both (ranks of the "
        "last two), oracle (of the "
        "document that the question names, the passages that bm25 ranks first).",
    )
    min_score: float | None = option(
        None,
        help="Passages with a lower score are left out, all of them if need be. bm25 and lexical "
        "score from 0 up, without a bound; dense from -1 to 1 (cosine), both up to 0.033. Default: "
        "the best K, whatever they score.",
    )
    embedder: str = option(
        "BAAI/bge-large-en-v1.5", help="dense, both: a sentence-transformers folder or hub name."
    )


@dataclass(frozen=True, kw_only=True)
class LoadingSection:
    """How models are loaded; a key of a model's own table comes before it."""

    dtype: Dtype | None = option(
        None,
        help="Weights in memory; default: auto, bfloat16 on a GPU that multiplies it, float16 on "
        "an older one.",
    )
    quantization: Quantization | None = option(
        None,
        help="Load through bitsandbytes, for a GPU that does not hold the model otherwise; "
        "default: none.",
    )
    device_map: Literal["none", "auto", "balanced", "balanced_low_0", "sequential"] | None = option(
        None,
        help="How accelerate spreads the layers over the GPUs of this process; default: none, one "
        "device.",
    )
    attention: Attention | None = option(None, help="Attention implementation; default: auto.")

    @property
    def label(self) -> str:
        """The settings that scores depend on beside weights and dtype, "" for the defaults: it is
        part of their key."""
        map_label = f"device_map={self.device_map or 'none'}"
        labels = (self.quantization or "none", map_label, self.attention or "auto")
        return " ".join(
            label for label in labels if label not in ("none", "device_map=none", "auto")
        )


@dataclass(frozen=True, kw_only=True)
class ChatSection:
    """How prompts go into the tokenizer's chat template."""

    system: str = option("", help="Text of the system's turn.")
    chat_template_kwargs: Mapping[str, Any] | None = option(
        None, help="Arguments of the chat template, for example {enable_thinking: false}."
    )


@dataclass(frozen=True, kw_only=True)
class PromptedSection:
    """A model with the settings of its prompts."""

    chat: bool | ChatSection | None = option(
        None, help="Whether, or how, prompts go into the chat template; default: eval.chat."
    )

    @property
    def chat_settings(self) -> ChatSection:
        """The settings of its chat."""
        return self.chat if isinstance(self.chat, ChatSection) else ChatSection()


@dataclass(frozen=True, kw_only=True)
class LocalModelSection(LoadingSection, PromptedSection):
    """A model that is loaded here, and the settings of its prompts."""

    path: str = option(help="Model folder or hub name.", path="model")
    revision: str | None = option(None, help="Branch, tag or commit on the hub.")
    adapter: str | None = option(
        None, help="PEFT adapter (folder or hub name) that goes on top of path.", path="model"
    )

    def __str__(self) -> str:
        """Return the model in words, as reports show it."""
        parts = [f"{self.path}@{self.revision}" if self.revision else self.path]
        if self.adapter:
            parts.append(f"with {self.adapter}")
        values = (self.dtype, self.quantization, self.attention)
        parts += [value for value in values if value not in (None, "auto", "none")]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class EndpointModelSection(PromptedSection):
    """A model behind an OpenAI-compatible endpoint. Its weights cannot be hashed: answers are
    stored by its name."""

    endpoint: GeneratorSection = option(
        help="The endpoint: base_url, model, and the other keys of a generator."
    )
    api: Literal["completions", "chat"] = option(
        help="completions (log-probs of choices, where the endpoint returns those of the prompt, "
        "and written answers) or chat (written answers)."
    )
    revision: str | None = option(
        None,
        help="Any text that identifies the model's weights, as a date; change it when the server's "
        "model changes.",
    )
    tokenizer: str | None = option(
        None,
        help="completions: send prompts as token ids of this tokenizer (folder or hub name), for "
        "log-probs; default: text.",
        path="model",
    )

    def __str__(self) -> str:
        """Return the model in words, as reports show it."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.endpoint.model}{revision} ({self.api}) at {self.address}"

    @property
    def address(self) -> str:
        """The address of its endpoint."""
        if self.endpoint.address:
            return self.endpoint.address
        return "vLLM" if self.endpoint.kind == "vllm" else "OpenAI"

    def generator(self, max_tokens: int, stop: tuple[str, ...] = ()) -> GeneratorSection:
        """Return the generator that asks it for answers of at most `max_tokens` tokens."""
        kwargs = self.chat_settings.chat_template_kwargs or self.endpoint.chat_template_kwargs
        return replace(
            self.endpoint,
            max_tokens=max_tokens,
            stop=stop,
            temperature=self.endpoint.temperature or 0.0,
            # for completions the tokenizer's template is rendered here
            chat_template_kwargs=None if self.api == "completions" else kwargs,
        )


@dataclass(frozen=True)
class EvalSection:
    """Several models against several question sets; the first model is the base of every
    comparison."""

    models: Mapping[str, str | LocalModelSection | EndpointModelSection] = option(
        help="name: folder or hub name, or a table with path and how it is loaded, or with "
        "endpoint, model and api. The first is the base.",
        nonempty=True,
        path="model",
    )
    questions: Mapping[str, str | QuestionSetSection] = option(
        help="name: path, or path with role and shots_from.", nonempty=True, path="file"
    )
    model_defaults: LoadingSection = option(
        LoadingSection(), help="Defaults of the tables of `models`."
    )
    formats: tuple[str, ...] = option(
        ("texts",),
        help="letters, texts, hybrid, rotations, continuation, a baseline without the question; "
        "letters-written or generate: the model writes the letter or the answer.",
        nonempty=True,
        words=FORMATS,
    )
    # On natural English sums find most of what is reworded, lengths and pmi most of what is
    # inferred; the form of the score moves a level by up to ten points.
    scores: tuple[
        Literal["sum", "chars", "bytes", "tokens", "pmi", "match", "exact", "contains", "judge"],
        ...,
    ] = option(
        ("sum",),
        help="How choices are compared: log-prob, or log-prob per length; the test of a written "
        "answer: match (the default: it equals or contains an accepted one), exact, contains, "
        "judge (a model's grade).",
        nonempty=True,
    )
    max_new_tokens: int = option(
        32,
        help="Most tokens of a written answer, a chat model's thinking included.",
        min=1,
        max=131_072,
    )
    stop: tuple[str, ...] | None = option(
        None, help="Texts that end a written answer. Default: a line break, with `chat` none."
    )
    # Without one `match` decides, which finds 74% of the wrong answers and 50% of the abstentions.
    judge: GeneratorSection | None = option(
        None,
        help="generate: a model that grades written answers as correct, wrong or abstained, for "
        "scores: [judge].",
    )
    budget: float | None = option(
        None,
        help="Most that endpoints and the judge may cost in this run folder, in the currency of "
        "their prices.",
        min=0.0,
    )
    chat: bool | ChatSection = option(
        False, help="Put the prompt into the tokenizer's chat template, as the user's turn; or how."
    )
    perplexity_corpus: str | None = option(
        None, help="Texts (JSONL) whose perplexity is reported too.", path="file"
    )
    shots: tuple[int, ...] = option(
        (0,), help="Numbers of few-shot examples.", min=0, max=64, nonempty=True
    )
    # On by default: trained models picked half of a set's right choices without reading the
    # question.
    control: bool = option(
        True,
        help="Score the same choices without the question, too: what they give away by themselves "
        "is not called learned.",
    )
    retrieval: RetrievalSection | None = option(None, help="Retrieved context; absent: none.")
    batch_tokens: int = option(16_384, help="Tokens in one forward pass, padding included.", min=64)
    limit: int | None = option(None, help="First N questions of each set only.", min=1)
    require: tuple[str, ...] = option(
        (),
        help="SET>=0.8 or ARM:SET>=-0.02 (a change from the base; +0.1 net: beyond the change "
        "without the question): what an "
        "interval must hold; exit code 1 if not, 3 if so few questions cannot tell.",
    )

    def sets(self) -> dict[str, QuestionSetSection]:
        """Return the table of each question set by name."""
        return {
            name: QuestionSetSection(path=value) if isinstance(value, str) else value
            for name, value in self.questions.items()
        }

    def limit_of(self, item: QuestionSetSection) -> int | None:
        """Return how many questions of a set are asked, None for all: its own limit before that of
        all sets."""
        return item.limit or self.limit

    def formats_of(self, item: QuestionSetSection) -> tuple[str, ...]:
        """Return the formats in which a question set is asked: its own, or this section's."""
        return item.formats or self.formats

    def formats_with_controls(self, item: QuestionSetSection) -> tuple[str, ...]:
        """Return the formats of a question set, and behind them those of their controls, which
        leave out the question."""
        formats = dict.fromkeys(self.formats_of(item))
        if not self.control:
            return tuple(formats)
        controls = [FORMATS[name].control for name in formats if FORMATS[name].control]
        return tuple(dict.fromkeys([*formats, *controls]))

    def tables(self) -> dict[str, LocalModelSection | EndpointModelSection]:
        """Return the table of each model by name, completed from `model_defaults` and from this
        section."""
        return {name: self._complete(value) for name, value in self.models.items()}

    def local(self) -> dict[str, LocalModelSection]:
        """Return the tables of the models that are loaded here."""
        return {
            name: table
            for name, table in self.tables().items()
            if isinstance(table, LocalModelSection)
        }

    def endpoints(self) -> dict[str, EndpointModelSection]:
        """Return the tables of the models behind endpoints."""
        return {
            name: table
            for name, table in self.tables().items()
            if isinstance(table, EndpointModelSection)
        }

    def _complete(
        self, value: str | LocalModelSection | EndpointModelSection
    ) -> LocalModelSection | EndpointModelSection:
        table = LocalModelSection(path=value) if isinstance(value, str) else value
        defaults: dict[str, Any] = {"chat": self.chat if table.chat is None else table.chat}
        if isinstance(table, LocalModelSection):
            for item in fields(LoadingSection):
                if getattr(table, item.name) is None:
                    defaults[item.name] = getattr(self.model_defaults, item.name)
        elif table.api == "chat":
            # Such an endpoint renders the template itself, whatever eval.chat is.
            defaults["chat"] = defaults["chat"] or True
        return replace(table, **defaults)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What the formats of an evaluation need, and whether several processes share the machine."""

    writes: bool = False
    """Some answers are written in words."""
    scores: bool = True
    """Some answers are chosen by log-probs."""
    is_shared: bool = False


def eval_problems(section: EvalSection, asking: Asking) -> Iterator[Problem]:
    """Yield the problems of the section."""
    yield from _local_problems(section, asking)
    yield from _endpoint_problems(section, asking)
    yield from _question_problems(section)
    yield from _judge_problems(section, asking)


def _local_problems(section: EvalSection, asking: Asking) -> Iterator[Problem]:
    for name, table in section.local().items():
        key = f"eval.models.{name}"
        if asking.is_shared and table.device_map not in (None, "none"):
            message = "is for one process: each of several would take every GPU. Start one."
            yield Problem(f"{key}.device_map", message)
        if table.revision and path_exists(Path(table.path)):
            message = "is for a name on the hub, but path is a folder. Take it out."
            yield Problem(f"{key}.revision", message)


def _endpoint_problems(section: EvalSection, asking: Asking) -> Iterator[Problem]:
    for name, table in section.endpoints().items():
        key, kind = f"eval.models.{name}", table.endpoint.kind
        if kind not in ("openai", "vllm"):
            yield Problem(f"{key}.endpoint", "must be of kind: openai or vllm.")
        if kind == "vllm" and asking.scores:
            message = "kind: vllm writes answers only."
            fix = "Set eval.formats: [generate], or give the model as a path."
            yield Problem(f"{key}.endpoint", f"{message} {fix}")
        if table.api == "chat":
            yield from _chat_problems(table, key, asking)
        elif table.tokenizer is None and (table.chat or asking.scores):
            message = "missing. chat and log-probs of choices need it: tokenizer: FOLDER."
            yield Problem(f"{key}.tokenizer", message)
    for name, other in _same_answers(section):
        message = f"missing. {other} has the same model and parameters at another address;"
        reason = "answers would be taken for one another's. Give each a revision (any text)."
        yield Problem(f"eval.models.{name}.revision", f"{message} {reason}")


def _chat_problems(table: EndpointModelSection, key: str, asking: Asking) -> Iterator[Problem]:
    if asking.scores:
        message = "a chat returns no log-probs of given choices."
        fix = "Set eval.formats: [generate], or ask its completions (api: completions)."
        yield Problem(f"{key}.api", f"{message} {fix}")
    if table.tokenizer:
        yield Problem(f"{key}.tokenizer", "is for api: completions. Remove it.")


def _same_answers(section: EvalSection) -> Iterator[tuple[str, str]]:
    """Yield (name, earlier name) of endpoints that no stored answer tells apart."""
    first: dict[str, str] = {}
    tables = section.endpoints()
    for name, table in tables.items():
        # Answers are stored by the model's name, which stays the same when it moves.
        identity = repr((replace(table.endpoint, base_url=None), table.api, table.revision))
        other = first.setdefault(identity, name)
        if tables[other].address != table.address:
            yield name, other


def _question_problems(section: EvalSection) -> Iterator[Problem]:
    most_shots = max(section.shots)
    for name, item in section.sets().items():
        if most_shots and item.shots_from is None:
            message = f"eval.shots asks for {most_shots} examples, but shots_from is missing."
            yield Problem(f"eval.questions.{name}", f"{message} Name the file that holds them.")
    if "pmi" in section.scores and not section.control:
        message = "pmi compares with the choices without the question. Set eval.control: true."
        yield Problem("eval.scores", message)


def _judge_problems(section: EvalSection, asking: Asking) -> Iterator[Problem]:
    """Yield the problems of the judge, of retrieval, and of the budget of both."""
    judge, retrieval = section.judge, section.retrieval
    if ("judge" in section.scores) != (judge is not None):
        message = "eval.judge, the model, and judge in eval.scores, which reads its grades,"
        yield Problem("eval.judge", f"{message} need each other. Add or remove one.")
    if judge is not None and not asking.writes:
        message = "grades written answers, but no format writes any. Add generate to eval.formats."
        yield Problem("eval.judge", message)
    if retrieval is not None and retrieval.kind == "oracle" and retrieval.min_score is not None:
        message = "kind: oracle takes the document that a question names, whatever it scores."
        yield Problem("eval.retrieval.min_score", f"{message} Remove it.")
    if judge is not None and judge.kind in ("sandbox", "file"):
        message = f"found {judge.kind}, which grades nothing."
        fix = "Allowed: openai (an endpoint), transformers or vllm."
        yield Problem("eval.judge.kind", f"{message} {fix}")
    endpoints = [table.endpoint for table in section.endpoints().values()]
    if section.budget is not None and is_free(judge, *endpoints):
        message = "needs the price of an endpoint or of the judge: without prices all is free."
        yield Problem("eval.budget", message)
