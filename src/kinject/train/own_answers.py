"""Answers that the model writes itself before it is trained: the likeliest ones to the prompts
alone."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject import models
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.corpus.tokenize import begins_with_bos, cached_entry
from kinject.disk import (
    Row,
    content_id,
    file_hash,
    is_file,
    read_json,
    read_jsonl,
    write_json,
    write_jsonl,
)
from kinject.errors import InputError
from kinject.llm.sender import generator_identity
from kinject.llm.transformers import read_answer
from kinject.models.generate import ends_of, generate
from kinject.process import work_seconds
from kinject.question_formats import question_prompt
from kinject.recipe import GeneratorSection, TrainRecipe
from kinject.terminal import Progress, format_count
from kinject.train.load import set_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_WINDOW = 1024
"""Tokens of an answer and its prompt for a model without a window of its own."""
_FORMAT = 4

MOST_TOKENS = 512
"""Longest answer; at most half of the model's window."""
_ENOUGH, _TRIAL = 0.25, 64
"""Part of the answers that must end, and the rows, spread over the corpus, on which a model is
tried."""
_BATCH = 32


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A row to be answered: its prompt, and the corpus's answer.

    `breaks`: a line break ends the answer too, since the corpus's answer has none and the row is no
    chat.
    """

    index: int
    row_id: str
    prompt: list[int]
    corpus_answer: str
    in_chat: bool
    breaks: bool


_ANSWERS, _COUNTS = "answers.jsonl", "counts.json"


def write_own_answers(recipe: TrainRecipe, part: str) -> tuple[Path, str, dict[str, float]]:
    """Return the corpus `part` ("", replay, mix.NAME) with answers of the model itself, a note on
    them, and their cost.

    The cost is written_tokens and written_seconds, those of answers that were left out among them.

    The model answers before it is trained. The file is in corpus.cache_dir, named by the rows and
    the weights, so it is written once. Rows that cannot be answered keep their answer (texts,
    tools, no user's message, more tokens than the model reads); answers that do not end are left
    out. The texts are tokenised again for training. Raises `InputError` if no row can be answered,
    or few answers end.
    """
    corpus, path = recipe.corpus, recipe.model.path or ""
    source = corpus.path if not part else corpus.parts()[part.removeprefix("mix.")].path
    rows = CorpusFile(Path(source))
    # Temperature 0: learning what the model finds unlikely makes it forget (docs/training.md).
    generator = GeneratorSection(
        kind="transformers", model=path, temperature=0.0, max_tokens=MOST_TOKENS, concurrency=_BATCH
    )
    identity = content_id(
        "own answers",
        _FORMAT,
        rows.cache_key,
        generator_identity(generator),
        recipe.model.revision,
        recipe.model.dtype,
        recipe.model.quantization,
        corpus.bos,
        dict(corpus.chat_template_kwargs or {}),
        _hash_of(recipe.trainer.get("chat_template_path")),
    )

    def write(folder: Path) -> None:
        writer = _load_writer(recipe, part, generator)
        requests = list(writer.requests(rows))
        if not requests:
            raise InputError(
                f"{source}: {_key(part)}: no row can be answered. Rows need prompt and completion, "
                "or messages without tools, and half of the model's window for the answer."
            )
        device = writer.model.device.type
        began = work_seconds(device)
        answers, n_tokens = writer.answer(requests)
        seconds = round(work_seconds(device) - began, 2)
        requested = {request.index for request in requests}
        n_rows = write_jsonl(folder / _ANSWERS, _merged(Path(source), requested, answers))
        counts = {
            "given": n_rows - len(answers),
            "kept": len(answers),
            "endless": len(requests) - len(answers),
            "written_tokens": n_tokens,
            "written_seconds": seconds,
        }
        write_json(folder / _COUNTS, counts)

    # With checksums: a changed answer would be learned.
    entry = cached_entry(Path(corpus.cache_dir), f"own-answers-{identity}", write)
    out = entry / _ANSWERS
    counts = read_json(entry / _COUNTS, "Delete it; the answers are written again.")
    note = (
        f"{_key(part)}: {path} wrote {counts['kept']:,} of {counts['kept'] + counts['endless']:,} "
        f"answers itself; {counts['endless']:,} that do not end are left out; rows that keep "
        f"theirs: {counts['given']:,} ({out})"
    )
    return out, note, {key: counts[key] for key in ("written_tokens", "written_seconds")}


def _key(part: str) -> str:
    return f"corpus.{part}.answers" if part else "corpus.answers"


def _hash_of(path: str | None) -> str | None:
    return file_hash(Path(path)) if path is not None and is_file(Path(path)) else path


def _merged(source: Path, requested: set[int], answers: Mapping[int, str]) -> Iterator[Row]:
    """Yield the rows of `source` with the new answers, by index; without those that were requested
    and are not answered."""
    for index, (_, row) in enumerate(read_jsonl(source)):
        if index not in requested:
            yield row
        elif index in answers and "messages" in row:
            turns = row["messages"][: _last_answer(row["messages"])]
            yield {**row, "messages": [*turns, {"role": "assistant", "content": answers[index]}]}
        elif index in answers:
            yield {**row, "completion": answers[index]}


def _last_answer(turns: Sequence[Row]) -> int:
    """Return the index of the assistant's last turn; 0 without one, or without a turn before it."""
    return max(
        (index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=0
    )


def _load_writer(recipe: TrainRecipe, part: str, generator: GeneratorSection) -> Writer:
    model = recipe.model
    options = models.LoadOptions(
        dtype=model.dtype,
        device=recipe.device,
        quantization=model.quantization,
        revision=model.revision,
    )
    loaded = models.load_model(str(model.path), options)
    # The prompts must be those of the training that follows.
    set_chat_template(recipe.corpus, recipe.trainer, loaded.tokenizer)
    window = models.window_of(loaded.model.config)
    most = min(MOST_TOKENS, (window or 2 * _WINDOW) // 2)
    return Writer(
        loaded.model,
        loaded.tokenizer,
        dataclasses.replace(generator, max_tokens=most),
        window,
        begins_with_bos(loaded.tokenizer, recipe.corpus.bos),
        dict(recipe.corpus.chat_template_kwargs or {}),
        part,
    )


@dataclass(frozen=True)
class Writer:
    """A loaded model that answers rows."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generator: GeneratorSection
    window: int | None
    bos: bool
    kwargs: Mapping[str, Any]
    part: str

    def requests(self, rows: Iterable[CorpusRow]) -> Iterator[AnswerRequest]:
        """Yield the rows that can be answered, in their order."""
        for index, row in enumerate(rows):
            if row.shape == "text" or row.tools:
                continue
            in_chat = row.shape == "messages"
            last = _last_answer(row.messages)
            if in_chat and (
                not last or not all(isinstance(turn.get("content"), str) for turn in row.messages)
            ):
                continue
            corpus_answer = row.messages[last]["content"] if in_chat else row.completion
            prompt = self._encode(row, row.messages[:last])
            if self.window is not None and len(prompt) + self.generator.max_tokens > self.window:
                continue
            breaks = not in_chat and "\n" not in corpus_answer.strip()
            yield AnswerRequest(index, row.id, prompt, corpus_answer.strip(), in_chat, breaks)

    def _encode(self, row: CorpusRow, turns: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the tokens of a row's prompt; in a chat those of `turns`.

        A bare question gets the plain form ``Question: ...\\nAnswer:``, unless it ends with a
        colon.
        """
        if row.shape == "completion":
            question = row.prompt
            if not question.rstrip().endswith(":"):
                question = question_prompt(question)
            ids: list[int] = self.tokenizer(question, add_special_tokens=False, verbose=False)[
                "input_ids"
            ]
            return [self.tokenizer.bos_token_id, *ids] if self.bos else ids
        text = self.tokenizer.apply_chat_template(
            [*turns],
            add_generation_prompt=True,
            tokenize=False,
            **{**self.kwargs, **row.template_kwargs},
        )
        encoded: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return encoded

    def answer(self, requests: Sequence[AnswerRequest]) -> tuple[dict[int, str], int]:
        """Return the answers that end, by row, and the tokens of all.

        Raises `InputError` if fewer than `_ENOUGH` of the rows that are tried first have one.
        """
        answers, n_tokens = dict[int, str](), 0
        step = -(-len(requests) // _TRIAL)
        # A model that ends few answers is refused after 64 of them, not after the whole corpus.
        trial, others = requests[::step], [item for i, item in enumerate(requests) if i % step]
        with Progress(f"{self.part} answers".strip(), len(requests), "rows") as progress:
            for some in (trial, others):
                for request, text, n_written in self._written(some):
                    n_tokens += n_written
                    progress.advance()
                    if text is not None:
                        answers[request.index] = text
                if len(answers) < _ENOUGH * len(trial):
                    raise InputError(
                        f"{self.generator.model}: {_key(self.part)}: of "
                        f"{format_count(len(trial), 'answer')} "
                        f"{len(answers)} end within {self.generator.max_tokens} tokens, too few to "
                        "learn from. Set answers: given, or take a stronger model."
                    )
        return answers, n_tokens

    def _written(
        self, requests: Sequence[AnswerRequest]
    ) -> Iterator[tuple[AnswerRequest, str | None, int]]:
        """Yield (request, its answer; None if it does not end, its tokens), in batches of prompts
        of similar length."""
        ends = ends_of(self.model, self.tokenizer, str(self.generator.model))
        order = sorted(requests, key=lambda request: (request.breaks, -len(request.prompt)))
        for breaks, group in groupby(order, key=lambda request: request.breaks):
            stops = list(ends)
            if breaks:
                stops += [token for token in self._line_breaks if token not in ends]
            some = list(group)
            for start in range(0, len(some), _BATCH):
                batch = some[start : start + _BATCH]
                prompts = [request.prompt for request in batch]
                seeds = [0] * len(batch)  # nothing is drawn
                tokens = generate(self.model, self.generator, prompts, seeds, stops)
                for request, ids in zip(batch, tokens, strict=True):
                    yield request, self._text(request, ids, stops), len(ids)

    @cached_property
    def _line_breaks(self) -> list[int]:
        """Return the tokens with a line break in them."""
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        # Not the line break alone: vocabularies have tokens such as ".\n" and "\n\n".
        return [token for token, text in enumerate(texts) if "\n" in text]

    def _text(self, request: AnswerRequest, tokens: list[int], stops: Sequence[int]) -> str | None:
        """Return the answer in `tokens`; None if it does not end, or is empty."""
        if not tokens or tokens[-1] not in stops:
            return None
        if request.in_chat:
            text = read_answer(self.tokenizer, tokens)[1]
        else:  # what follows the prompt: a decoder may drop the space before the first word
            before = str(self.tokenizer.decode(request.prompt, skip_special_tokens=True))
            full_text = str(
                self.tokenizer.decode([*request.prompt, *tokens], skip_special_tokens=True)
            )
            text = full_text[len(before) :]
            if request.breaks:
                text = text.split("\n")[0]
        return text if text.strip() else None
