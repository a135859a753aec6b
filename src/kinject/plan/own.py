"""The training of a model on documents of one's own: all weights, LoRA or QLoRA, as the memory of a
device allows; batch, passes and replay by the tokens of the corpus.

What teaches most comes first: all weights, then LoRA on whole weights, then on weights in 4 bits.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kinject.disk import write_text
from kinject.errors import InputError
from kinject.models import load_tokenizer
from kinject.plan.estimate import Shapes, Step, estimate, read_shapes
from kinject.plan.run import step_of
from kinject.plan.ways import GIB, Devices, find_devices, parse_memory, render_size
from kinject.recipe import read_recipe
from kinject.recipe.own import own_texts, with_values
from kinject.terminal import format_count

_BASE = re.compile(r"(?:^|[-_.])(?:base|pt)(?:$|[-_.])", re.IGNORECASE)
_CHAT = re.compile(
    r"(?:^|[-_.])(?:instruct|chat|it|sft|dpo|thinking)(?:$|[-_.])|^Qwen3-[\d.]+B$", re.IGNORECASE
)
"""Words in the names of models. Qwen3's base models have a chat template, too, and of its chat
models the small ones have no word: the name comes before the tokenizer."""
_LORA = "{r: 64, lora_alpha: 128, lora_dropout: 0.0, target_modules: all-linear}"
_RATES = ((1e9, "1e-4"), (4e9, "3e-5"), (float("inf"), "1e-5"))
"""Most parameters -> a customary rate for all weights (no study here has measured one above 135M
parameters)."""
_LORA_RATES = ((1e9, "3e-4"), (float("inf"), "2e-4"))
_ROW = 1024
"""Tokens of a row of recipes/own/train.yaml."""
# 135M parameters learned a handbook in 40 to 160 updates of 512 tokens; the GPU recipes, for large
# corpora, have updates of 16,384.
_UPDATES, _MOST_ROWS = 400, 16
_MOST_ROWS_AT_ONCE = 8
_TWO_PASSES = 5_000_000
"""Largest corpus, in tokens, that is read twice: in more, each fact is in many texts already."""
_SMALL = 30_000
"""Largest corpus, in tokens, beside which the 5,000 tokens of prose that ship are replayed: a run
reads them four times then, and needs no download."""
_SHIPPED_TEXT = ("data/company/prose.jsonl", "eval/company/prose.jsonl")
_FETCHED_TEXT = ("data/general.jsonl", "data/general-held-out.jsonl")
_FETCH = "kinject recipes data get replay"
_CHAT_ROWS = "{path: data/company/chat.jsonl, fraction: 0.25, answers: own}"
_REPLAYED, _CHAT_REPLAYED = 0.25, 0.40
"""Fractions of the tokens of a training that are replayed: general text; in a chat 0.15 of it."""
_EVALUATION = 2 * GIB
"""Memory of an evaluation beside the weights (an assumption)."""


@dataclass(frozen=True)
class Learner:
    """A model and how it is trained on one device: `way` in words, with its `values` in the recipe.

    `device_option` are the options of `kinject plan` for this device, `step` is a step of one row,
    `is_chat` whether the model chats; `notes` are for the user.
    """

    model: str
    is_chat: bool
    devices: Devices
    device_option: str
    way: str
    values: Mapping[str, str]
    step: Step
    shapes: Shapes
    notes: tuple[str, ...] = ()

    def augment_text(self, text: str) -> str:
        """Return the recipe of the paraphrases; a chat model reads questions and dialogues, too."""
        if not self.is_chat:
            return text
        values = {
            "augment.styles": "{paraphrase: 8, questions: 4, dialogue: 2} "
            "# turns of a chat beside the text keep a chat (docs/chat.md)",
            "augment.one_corpus": "true",
            "augment.messages": "true",
        }
        return with_values(text, values)

    def train_text(self, name: str, text: str, n_tokens: int) -> str:
        """Return the recipe of the training on a corpus of `n_tokens`, for documents called
        `name`."""
        length = self.length(n_tokens)
        text = with_values(text, {**self.values, **_corpus(n_tokens, is_chat=self.is_chat)})
        if self.is_chat:
            # Rows of every shape: texts, and turns of a chat, of which the answers are learned.
            text = with_values(text, {"method": None, "trainer.assistant_only_loss": "true"})
        at_once = self.rows_at_once(length.rows)
        numbers = {
            "trainer.num_train_epochs": str(length.passes),
            "trainer.per_device_train_batch_size": str(at_once),
            "trainer.gradient_accumulation_steps": str(length.rows // at_once),
        }
        header = "\n".join(self._header(name, n_tokens, length, at_once))
        return _with_header(with_values(text, numbers), header)

    def eval_text(self, text: str) -> str:
        """Return the recipe of the evaluation: in 4 bits where whole weights do not fit, in a chat
        for a chat model."""
        # A name may hold a backslash (a path), which re would read as an escape.
        name = json.dumps(self.model).replace("\\", r"\\")
        text = re.sub(r"Qwen/Qwen3-0\.6B-Base\b.*", name, text)
        values: dict[str, str | None] = {}
        if 2 * self.shapes.n_parameters + _EVALUATION > self.devices.memory:
            values["eval.model_defaults"] = "{quantization: 4bit} # 16 bits do not fit"
        if self.is_chat:
            values |= {"eval.max_new_tokens": "256", "eval.chat": "true"}
            text = text.replace(
                "  questions:\n",
                "  questions:\n"
                "    instructions: {path: eval/chat/instructions.jsonl, role: retention, "
                "formats: [generate]} # its chat\n",
            )
        return with_values(text, values)

    def describe(self, n_tokens: int) -> list[str]:
        """Return lines on the training."""
        length = self.length(n_tokens)
        kind = "a base model: it learns documents as text"
        if self.is_chat:
            kind = "a chat model: it learns documents as text and as turns of a chat"
        need = render_size(self.need(self.rows_at_once(length.rows), length.rows))
        return [
            f"{self.model}, {kind}",
            f"{self.way}: about {need} of {self.place} (planned, not measured)",
            f"{length.describe(n_tokens)}, by estimate",
            *self.notes,
        ]

    def commands(self, name: str, n_tokens: int) -> list[str]:
        """Return the commands that come before the training."""
        lines = [f"kinject plan {shlex.quote(f'recipes/{name}/train.yaml')}{self.device_option}"]
        if n_tokens > _SMALL:
            lines.insert(0, f"{_FETCH}   # general text to replay: web pages, 100 MB")
        return lines

    @property
    def place(self) -> str:
        """The device in words."""
        named = self.devices.name if self.device_option.startswith(" --gpu") else "GPU"
        return f"a {named} with {render_size(self.devices.memory)}"

    def length(self, n_tokens: int) -> Length:
        """Return passes and batch for a corpus of `n_tokens`."""
        passes = 2
        if n_tokens > _TWO_PASSES:
            passes = 1
        replayed = _REPLAYED
        if self.is_chat:
            replayed = _CHAT_REPLAYED
        n_read = round(passes * n_tokens / (1 - replayed))
        rows = 1
        while rows < _MOST_ROWS and n_read > 1.5 * rows * _ROW * _UPDATES:
            rows *= 2
        return Length(passes, rows, n_read, replayed)

    def rows_at_once(self, rows: int) -> int:
        """Return how many of the `rows` of an update fit the device at once, a power of two."""
        at_once = min(rows, _MOST_ROWS_AT_ONCE)
        while at_once > 1 and self.need(at_once, rows) > self.devices.memory:
            at_once //= 2
        return at_once

    def need(self, at_once: int, rows: int) -> int:
        """Return the bytes of the device for an update of `rows`, so many of them `at_once`."""
        step = replace(self.step, batch=at_once, accumulation=rows // at_once)
        return self.devices.need(estimate(step, self.shapes).peak)

    def _header(self, name: str, n_tokens: int, length: Length, at_once: int) -> Iterator[str]:
        memory = render_size(self.need(at_once, length.rows))
        needs = f"runs/{name}/augment/corpus.jsonl (kinject augment recipes/{name}/augment.yaml)"
        way = self.way[0].upper() + self.way[1:]
        result = "a plain Hugging Face folder"
        if "adapter" in self.values:
            result = (
                "a peft adapter that kinject eval loads on its base; kinject export folds it in"
            )
        yield f"# Purpose: {self.model} learns your documents and their paraphrases. {way}."
        yield f"# Needs:   {needs},"
        if n_tokens > _SMALL:
            yield f"#          general text to replay and to watch ({_FETCH}),"
        yield f"#          and {self.place}."
        yield (
            f"# Memory:  about {memory} (planned, not measured: "
            f"kinject plan recipes/{name}/train.yaml{self.device_option})"
        )
        yield f"# Run:     kinject train recipes/{name}/train.yaml"
        yield f"# Expect:  runs/{name}/train/model, {result}."
        yield f"#          {length.describe(n_tokens)},"
        yield "#          by estimate. The rate is customary for this size; none has been measured."


@dataclass(frozen=True)
class Length:
    """How often a corpus is read and how many rows an update has; `n_read` tokens in all, of which
    `replayed` is the fraction of other texts."""

    passes: int
    rows: int
    n_read: int
    replayed: float

    def describe(self, n_tokens: int) -> str:
        """Return the length in words."""
        times = {1: "once", 2: "twice"}[self.passes]
        updates = -(-self.n_read // (self.rows * _ROW))
        return (
            f"{n_tokens:,} tokens read {times} with {self.replayed:.0%} replayed: some "
            f"{format_count(updates, 'update')} of {self.rows * _ROW:,}"
        )


def find_learner(model: str, gpu: str | None, memory: str | None) -> Learner:
    """Return how `model` is trained on a card `gpu` or a device with so much `memory` (default:
    this machine's GPU).

    Raises `InputError` if no device is known, the model's shape is not, or no way fits.
    """
    option = ""
    if gpu is not None:
        option += f" --gpu {gpu}"
    if memory is not None:
        option += f" --memory {shlex.quote(memory)}"
    size = None
    if memory is not None:
        size = parse_memory(memory)
    devices = find_devices("cuda", size, 1, gpu=gpu)
    is_chat, notes = _find_kind(model)
    smallest = 0
    for way, values in _ways(model, devices):
        text = with_values(own_texts("documents")["train.yaml"], values)
        step = _step(text, devices)
        shapes = read_shapes(step)
        values = {**values, "trainer.learning_rate": _rate(shapes, values)}
        learner = Learner(model, is_chat, devices, option, way, values, step, shapes, tuple(notes))
        # Of two rows one after the other: gradients stay between them.
        smallest = learner.need(1, 2)
        if smallest <= devices.memory:
            return learner
    raise InputError(
        f"--model {model}: even QLoRA, with weights in 4 bits, needs {render_size(smallest)}, and "
        f"{devices.name} has {render_size(devices.memory)}. Take a smaller model, or more memory."
    )


def _ways(model: str, devices: Devices) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the ways to train, from the one that teaches most on: (in words, values of the
    recipe)."""
    path = {"model.path": json.dumps(model)}
    half = "float16"
    yield "all weights, in float32", path
    if devices.has_bf16:
        half = "bfloat16"
        yield (
            "all weights, in bfloat16 with stochastic rounding",
            {**path, "model.dtype": half, "techniques": "{stochastic_rounding: true}"},
        )
    yield (f"LoRA on weights in {half}", {**path, "model.dtype": half, "adapter": _LORA})
    yield (
        "QLoRA (LoRA on weights in 4 bits)",
        {**path, "model.quantization": "4bit", "adapter": _LORA},
    )


def _rate(shapes: Shapes, values: Mapping[str, str]) -> str:
    rates = _LORA_RATES if "adapter" in values else _RATES
    return next(rate for most, rate in rates if shapes.n_parameters < most)


def _step(text: str, devices: Devices) -> Step:
    """Return a step of the recipe `text`, as `kinject plan` reads it from the file."""
    with tempfile.TemporaryDirectory(prefix="kinject-try-") as folder:
        path = Path(folder) / "train.yaml"
        write_text(path, text)
        return step_of(read_recipe(path, verb="plan"), devices)


def _find_kind(model: str) -> tuple[bool, list[str]]:
    """Return whether a model chats, by its name, else by its tokenizer; with a note where neither
    shows it."""
    name = Path(model).name
    if _BASE.search(name):
        return False, []
    if _CHAT.search(name):
        return True, []
    try:
        return bool(load_tokenizer(model).chat_template), []
    except InputError:
        return False, [
            "note: its name does not show whether it chats, and its tokenizer cannot be read from "
            "here: it is taken for a base model"
        ]


def _corpus(n_tokens: int, *, is_chat: bool) -> dict[str, str | None]:
    """Return the values of the section corpus: what is replayed, and what shows forgetting."""
    text, watched = _FETCHED_TEXT
    if n_tokens <= _SMALL:
        text, watched = _SHIPPED_TEXT
    values: dict[str, str | None] = {
        "corpus.general_text": None,
        "corpus.validation_corpus": f"{watched} # its loss shows forgetting",
        "corpus.replay": f"{{path: {text}, fraction: {_REPLAYED:g}}} # against forgetting",
    }
    if is_chat:
        # Own answers to instructions keep a chat (docs/chat.md); general text keeps the prose.
        values["corpus.replay"] = f"{_CHAT_ROWS} # 104 instructions, which the model answers itself"
        values["corpus.mix"] = f"{{general: {{path: {text}, fraction: 0.15}}}}"
    return values


def _with_header(text: str, header: str) -> str:
    """Return a recipe's text with another comment from Purpose to run_dir."""
    first, rest = text.index("# Purpose:"), text.index("run_dir:")
    return f"{text[:first]}{header}\n{text[rest:]}"
