"""A conversation with one or several models: the same turns, each with its own answers, with and
without passages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kinject.corpus.passages import with_passages
from kinject.errors import InputError
from kinject.eval.retrieval import Retriever, make_retriever, read_passages
from kinject.eval.scoring.encode import render_turns
from kinject.gguf_files import gguf_file
from kinject.manifests import read_train_manifest
from kinject.models import (
    LoadedModel,
    LoadOptions,
    check_trained_base,
    load_model,
    window_of,
)
from kinject.models.generate import COLDEST, end_tokens, prompt_ids
from kinject.question_formats import question_prompt
from kinject.recipe.sections import RetrievalSection
from kinject.types import Message

Write = Callable[[str], None]
"""Gets each part of a text as it comes. A model wrote it: characters that control a terminal are
still in it."""


@dataclass(frozen=True, slots=True)
class ChatSetup:
    """The set-up of a chat: models by label, the documents that are searched, and the bounds of an
    answer. `base_revision` is that of the base on the hub."""

    models: Mapping[str, str]
    documents: tuple[str, ...] = ()
    k: int = 3
    system: str = ""
    max_new_tokens: int = 256
    temperature: float = 0.0
    base_revision: str | None = None


def find_models(run: str, base: str | None) -> dict[str, str]:
    """Return the models of a training run by label: its base, unless `base` is another model or
    "none", and the tuned one.

    `run` may be a model (a folder or a name on the hub); then it is asked alone unless `base` names
    one. Raises `InputError` for a run without a finished model.
    """
    folder = Path(run)
    if _is_model(folder):
        return _with_base(base, {"model": run})
    training = read_train_manifest(folder)
    if training is None or not (folder / "model").is_dir():
        raise InputError(
            f"{run}: no model and no finished training run. "
            "Give a folder with manifest.json and model/."
        )
    if base is None:
        base = training.recipe.model.path
    return _with_base(base, {"tuned": str(folder / "model")})


def base_revision(run: str, base: str | None) -> str | None:
    """Return the revision on the hub from which a training run began; None of another `base`."""
    if base is not None or _is_model(Path(run)):
        return None
    training = read_train_manifest(Path(run))
    if training is None:
        return None
    return training.recipe.model.revision


def _is_model(folder: Path) -> bool:
    """Return whether a folder is a model, or none: then it is a name on the hub."""
    is_model = any((folder / name).exists() for name in ("config.json", "adapter_config.json"))
    return is_model or gguf_file(folder) is not None or not folder.is_dir()


def _with_base(base: str | None, models: Mapping[str, str]) -> dict[str, str]:
    """Return `models` with the base first, if there is one."""
    if base is None or base == "none":
        return dict(models)
    return {"base": base, **models}


@dataclass
class Chat:
    """Open models and their histories. `with_passages` puts the best passages before the next
    questions."""

    setup: ChatSetup
    loaded: Mapping[str, LoadedModel]
    retriever: Retriever | None
    with_passages: bool = False
    histories: dict[str, list[Message]] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget all turns."""
        self.histories.clear()

    def passages(self, question: str) -> list[str]:
        """Return the passages for `question`, the best first; [] if they are off."""
        if self.retriever is None or not self.with_passages:
            return []
        (ranking,) = self.retriever.rank(
            [question], min(self.setup.k, len(self.retriever.passages))
        )
        return [self.retriever.passages[index].shown for index in ranking]

    def answer(self, question: str, write: Write) -> dict[str, str]:
        """Write the answer of each model to `question`, each below its label, as the tokens come;
        return them by label.

        The history keeps the question without its passages. Raises `InputError` if a question does
        not fit the window.
        """
        passages, answers = self.passages(question), {}
        for number, passage in enumerate(passages, start=1):
            write(f"[{number}] {passage}\n")
        for label, loaded in self.loaded.items():
            if len(self.loaded) > 1:
                write(f"{label}: ")
            answers[label] = self.reply(label, loaded, question, passages, write)
            write("\n")
        return answers

    def reply(
        self, label: str, loaded: LoadedModel, question: str, passages: Sequence[str], write: Write
    ) -> str:
        """Write and return the answer of one model with the history of `label`. Raises as
        `answer`."""
        history = self.histories.setdefault(label, [])
        answer = self._answer(loaded, history, question, passages, write)
        history += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return answer

    def _answer(
        self,
        loaded: LoadedModel,
        history: list[Message],
        question: str,
        passages: Sequence[str],
        write: Write,
    ) -> str:
        import torch
        from transformers import GenerationConfig

        ids = self._encode(loaded, history, question, passages)
        ends, pad = end_tokens(loaded.model, loaded.tokenizer), loaded.tokenizer.pad_token_id
        # transformers warns at each answer, and takes EOS itself, where there is no padding token.
        if pad is None and ends:
            pad = ends[0]
        sampling: dict[str, float] = {"do_sample": False}
        if self.setup.temperature >= COLDEST:
            sampling = {"do_sample": True, "temperature": self.setup.temperature}
        config = GenerationConfig(
            max_new_tokens=self.setup.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=pad,
            **sampling,
        )
        if not loaded.tokenizer.chat_template:
            config.stop_strings = ["\n"]  # a base model would ask itself on
        batch = torch.tensor([ids], device=loaded.device)
        with torch.inference_mode():
            out = loaded.model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                generation_config=config,
                streamer=_streamer(loaded.tokenizer, write),
                tokenizer=loaded.tokenizer,
            )
        return str(loaded.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)).strip()

    def _encode(
        self, loaded: LoadedModel, history: list[Message], question: str, passages: Sequence[str]
    ) -> list[int]:
        """Return the tokens of the turns; the oldest are left out of the history until the rest
        fits the window."""
        window = window_of(loaded.model.config) or 1 << 30
        while True:
            ids = _tokens(loaded.tokenizer, self.setup.system, history, question, passages)
            if len(ids) + self.setup.max_new_tokens <= window:
                return ids
            if not history:
                raise InputError(
                    f"this question has {len(ids)} tokens and an answer may have "
                    f"{self.setup.max_new_tokens}, but the model reads {window}. "
                    "Ask a shorter one, or lower --k or --max-new-tokens."
                )
            # A question with its answer: templates need turns that alternate, the user's first.
            del history[:2]


def _tokens(
    tokenizer: Any, system: str, history: Sequence[Message], question: str, passages: Sequence[str]
) -> list[int]:
    if tokenizer.chat_template:
        texts = [*(turn["content"] for turn in history), with_passages(passages, question)]
        text, _ = render_turns(tokenizer, system, texts, {})
        # The template has written the special tokens.
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids
    prompt = with_passages(passages, question_prompt(question))
    if system:
        prompt = f"{system}\n\n{prompt}"
    return prompt_ids(tokenizer, prompt)


def _streamer(tokenizer: Any, write: Write) -> Any:
    from transformers import TextStreamer

    words: list[str] = []

    class _Words(TextStreamer):  # type: ignore[misc]
        """Gives each finished word to `write`."""

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            word = text
            if not words:  # an answer begins with the space after the prompt
                word = text.lstrip()
            if word:
                words.append(word)
            # Of a base model the last word ends with its stop text, the line break.
            write(word.rstrip("\n") if stream_end else word)

    return _Words(tokenizer, skip_prompt=True, skip_special_tokens=True)


def open_chat(setup: ChatSetup) -> Chat:
    """Load the models, and index the documents. Raises `InputError` for unusable inputs."""
    retriever = None
    if setup.documents:
        section = RetrievalSection(documents=setup.documents, k=(setup.k,))
        retriever = make_retriever(section, read_passages(section))
    loaded = {}
    for label, path in setup.models.items():
        options = LoadOptions()
        if label == "base":
            options = LoadOptions(revision=setup.base_revision)
        check_trained_base(Path(path))
        loaded[label] = load_model(path, options)
    return Chat(setup, loaded, retriever, with_passages=retriever is not None)
