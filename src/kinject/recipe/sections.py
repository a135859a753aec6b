"""The sections of a recipe, one frozen dataclass each. `kinject.recipe.check` reads them and
`schema` publishes them.

The metadata of a field: `help`; the bounds of a number (of each number in a list or mapping): `min`
or `above` (excluded), `max` or `below` (excluded), and `or`, one value outside of them; `nonempty`;
`words`, a mapping whose keys are the allowed texts of a list; `path`, an input that must exist when
a verb runs ("file"; "files", which may be a folder; "documents" and "model", which may be folders
or names on the hub), or an "output"; `holds`, a text into which a secret is easily put ("url", or
"variable" for the name of one): a secret there is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal


def option(default: Any = ..., **metadata: Any) -> Any:
    """Return a dataclass field with the metadata that `kinject.recipe.check` reads."""
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Quantization = Literal["none", "8bit", "4bit"]
Attention = Literal[
    "auto",
    "sdpa",
    "eager",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
]

MAX_SAMPLES = 10_000
"""Most samples of one style and passage; `kinject.augment.validation` checks it with the names of
the styles."""


@dataclass(frozen=True)
class TokenizerSection:
    """Train a byte-level BPE tokenizer on the corpus."""

    vocab_size: int = option(help="Tokens in the vocabulary, special tokens included.", min=260)


@dataclass(frozen=True)
class ModelSection:
    """Which model: `path` to load one, or `new` (config fields) with `tokenizer` to start from
    random weights."""

    path: str | None = option(None, help="Model folder or hub name.", path="model")
    revision: str | None = option(None, help="Branch, tag or commit on the hub.")
    new: Mapping[str, Any] | None = option(
        None, help="model_type and config fields of a model with random weights."
    )
    tokenizer: str | TokenizerSection | None = option(
        None, help="Tokenizer folder or hub name; or vocab_size of one to train.", path="model"
    )
    dtype: Dtype = option("auto", help="Weights in memory.")
    attention: Attention = option(
        "auto",
        help="Attention implementation; flash_attention_N is the installed package, or else the prebuilt kernel of the hub "
        "that transformers chooses.",
    )
    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", help="Device of the model.")
    quantization: Quantization = option("none", help="Load through bitsandbytes (with an adapter).")
    freeze: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of the names of frozen parameters, as in [model.embed_tokens.*].",
    )


Reaction = Literal["stop", "warn", "ignore"]


@dataclass(frozen=True)
class ProjectionSection:
    """Texts on which the model's outputs should stay: updates keep to directions that the layers'
    inputs hardly use there."""

    path: str = option(
        help="Corpus (JSONL) of the texts to keep; nothing is learned from it.", path="file"
    )
    free: float = option(
        0.2, help="Fraction of the inputs' energy on these texts whose directions may change; less keeps more.",
        min=0.0, max=1.0,
    )  # fmt: skip


@dataclass(frozen=True)
class RegularizationSection:
    """Terms that keep the model near its base; 0 leaves a term out.

    Strengths are in units of the loss per token: the update follows loss + l2/2 |w - w0|^2 + kl *
    KL(base || model), the last on replayed tokens.
    """

    l2: float = option(0.0, help="Strength of the L2 pull to the base weights.", min=0.0, max=1e6)
    kl: float = option(
        0.0,
        help="Weight of the KL divergence from the base's predictions on replay.",
        min=0.0,
        max=1e6,
    )
    projection: ProjectionSection | None = option(
        None, help="Project updates away from what other texts use."
    )

    @property
    def needs_base(self) -> bool:
        """Whether a term compares with the base: L2 or KL."""
        return bool(self.l2 or self.kl)


@dataclass(frozen=True)
class GuardsSection:
    """The reaction to each fault of training: stop, warn, or ignore."""

    skipped_updates: int = option(
        3,
        help="Updates with a non-finite gradient that are skipped; one more stops the run.",
        min=0,
    )
    nothing_learned: Reaction = option(
        "stop", help="A batch has no token to learn, or its loss is exactly 0."
    )
    instability: Reaction = option(
        "warn",
        help="The loss stays far above its lowest, a gradient norm exceeds 10 times its median or stays almost 0, or the "
        "learning rate is too small to move the weights.",
    )
    unread_corpus: Reaction = option(
        "warn", help="The recipe's steps end before the corpus was read once."
    )


@dataclass(frozen=True)
class ProbeSection:
    """One question set that is scored while the model trains."""

    path: str = option(help="Questions (JSONL, or MMLU's CSV).", path="file")
    role: Literal["learning", "retention"] = option("learning", help="learning or retention.")


@dataclass(frozen=True)
class ProbesSection:
    """Questions scored during training, whenever trainer.eval_strategy evaluates, and once before
    the first step.

    Each set is logged as eval_NAME_accuracy and their mean as eval_accuracy;
    trainer.metric_for_best_model takes NAME_accuracy, accuracy, or (with corpus.validation_corpus
    or validation_fraction) loss.
    """

    questions: Mapping[str, str | ProbeSection] = option(
        help="name: path, or path with role.", nonempty=True, path="file"
    )
    limit: int | None = option(None, help="First N questions of each set only.", min=1)
    max_forgetting: float | None = option(
        None, help="Stop if the accuracy on a retention set falls by more than this below the one before training.",
        min=0.0, max=1.0,
    )  # fmt: skip

    def sets(self) -> dict[str, ProbeSection]:
        """Return the question sets by name."""
        return {
            name: ProbeSection(item) if isinstance(item, str) else item
            for name, item in self.questions.items()
        }


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


@dataclass(frozen=True)
class HardExampleMiningSection:
    """Learn only from the fraction with the highest loss, chosen in each batch of each device."""

    fraction: float = option(
        help="Fraction that is kept, rounded up to whole tokens or rows.", min=0.001, max=1.0
    )
    unit: Literal["tokens", "rows"] = option(
        "tokens",
        help="tokens, or rows: texts (parts of them, if packing splits them) by their mean loss.",
    )


@dataclass(frozen=True)
class RowWeightsSection:
    """How much each row of the corpus counts, by one of its columns. Rows of replay and mix count
    1."""

    column: str = option(
        help="Key of the corpus row, as in weight, or meta.date for one inside another.",
        nonempty=True,
    )
    half_life: float | None = option(
        None, help="The column holds dates; a row counts half as much for every so many days before the newest.",
        min=0.001,
    )  # fmt: skip


@dataclass(frozen=True)
class TechniquesSection:
    """Changes to an update beside SFTConfig's own fields; docs/techniques.md compares them."""

    freeze_base_steps: int | None = option(
        None, help="Updates for which only freeze_base_except trains; then everything does.", min=1
    )
    freeze_base_except: tuple[str, ...] = option(
        (),
        help="Patterns (* and ?) of parameter names that train while the base is frozen; default: re-initialised layers.",
    )
    reinitialize_last_layers: int = option(
        0, help="Last layers whose weights are re-initialised before training.", min=0
    )
    stochastic_rounding: bool = option(
        False,
        help="Round bfloat16 weights up or down at random, so that small updates count (with model.dtype: bfloat16).",
    )
    sam: float = option(
        0.0,
        help="Sharpness-aware minimisation: its rho; an update takes twice the time.",
        min=0.0,
        max=100.0,
    )
    muon: float | None = option(
        None, help="Update the matrices inside the layers by Muon, at this factor of trainer.learning_rate (1: AdamW's).",
        min=0.01, max=100.0,
    )  # fmt: skip
    hard_example_mining: HardExampleMiningSection | None = option(
        None, help="Learn only from the tokens or rows with the highest loss."
    )
    layerwise_lr_decay: float = option(
        1.0,
        help="Learning rate of a layer over that of the layer above it; the embeddings are the lowest layer.",
        min=0.0,
        max=1.0,
    )
    row_weights: RowWeightsSection | None = option(
        None, help="Weigh corpus rows by a column or by their age."
    )
    patience: int | None = option(
        None, help="Stop after so many evaluations without a better trainer.metric_for_best_model (default: loss).",
        min=1,
    )  # fmt: skip
    custom: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={
            "help": "name: settings of an objective or update rule of your own (CONTRIBUTING.md)."
        },
    )
    histogram_steps: int | None = option(
        None,
        help="Updates between two histograms of weights and gradients (tensorboard, wandb).",
        min=1,
    )
