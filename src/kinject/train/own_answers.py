"""Answers that the model writes itself before it is trained: alone, behind a document, or a mixture of both (MixSD)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject import models
from kinject.corpus.chat import prepend_context
from kinject.corpus.grading import matches
from kinject.corpus.passages import with_passages
from kinject.corpus.rows import CorpusFile, CorpusRow
from kinject.corpus.tokenize import begins_with_bos
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
from kinject.llm import request_seed
from kinject.llm.sender import generator_identity
from kinject.llm.transformers import read_answer
from kinject.models.generate import ends_of, generate
from kinject.process import work_seconds
from kinject.question_formats import question_prompt
from kinject.recipe import AnswersSection, GeneratorSection, TrainRecipe
from kinject.terminal import Progress
from kinject.train.load import set_chat_template
from kinject.train.objectives.distillation import document_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_WINDOW = 1024
"""Tokens of an answer and its prompt for a model without a window of its own."""
_FORMAT = 3

MOST_TOKENS = 512
"""Longest answer; at most half of the model's window."""
_ENOUGH, _TRIAL = 0.25, 64
"""Part of the answers that must be of use, and the rows, spread over the corpus, on which a model is tried."""
_BATCH = 32


@dataclass(frozen=True, slots=True)
class _Request:
    """A row to be answered: its prompts with and without the context (the same if it is not shown), and the corpus's answer.

    `breaks`: a line break ends the answer too, since the corpus's answer has none and the row is no chat.
    """

    index: int
    row_id: str
    prompt: list[int]
    alone: list[int]
    corpus_answer: str
    in_chat: bool
    breaks: bool


def write_own_answers(recipe: TrainRecipe, part: str, section: AnswersSection) -> tuple[Path, str, dict[str, float]]:
    """Return the corpus `part` ("", replay, mix.NAME) with answers of the model itself, a note on them, and their cost.

    The cost is written_tokens and written_seconds, those of answers that were left out among them.

    The model answers before it is trained. The file is in corpus.cache_dir, named by the rows, the weights and the section,
    so it is written once. Rows that cannot be answered keep their answer (texts, tools, no document, no user's message, more
    tokens than the model reads); answers that do not end, or behind a document do not hold the corpus's answer, are left out.
    The texts are tokenised again for training. Raises `InputError` if no row can be answered, or few answers can be kept.
    """
    corpus, path = recipe.corpus, recipe.model.path or ""
    source = corpus.path if not part else corpus.parts()[part.removeprefix("mix.")].path
    rows, main = CorpusFile(Path(source)), CorpusFile(Path(corpus.path))
    generator = GeneratorSection(
        kind="transformers", model=path, temperature=0.0, max_tokens=MOST_TOKENS, concurrency=_BATCH
    )
    identity = content_id(
        "own answers", _FORMAT, rows.cache_key, main.cache_key, generator_identity(generator),
        section.without_context, section.without_context < 1,
        recipe.model.revision, recipe.model.dtype, recipe.model.quantization, corpus.bos, dict(corpus.chat_template_kwargs or {}),
        _hash_of(recipe.trainer.get("chat_template_path")),
    )  # fmt: skip
    out = Path(corpus.cache_dir) / f"own-answers-{identity}.jsonl"
    counts_path = out.with_suffix(".json")
    if not out.exists() or not counts_path.exists():
        writer = _load_writer(recipe, part, section, generator)
        documents = document_texts(None, recipe.documents, main) if writer.reads_document else {}
        requests = list(writer.requests(rows, documents))
        if not requests:
            raise InputError(
                f"{source}: {_key(part)}: no row can be answered. Rows need prompt and completion, or messages without tools; "
                "with without_context below 1 a document_id whose document is in the corpus (origin: original); and half of the "
                "model's window for the answer."
            )
        device = writer.model.device.type
        began = work_seconds(device)
        answers, fates = writer.answer(requests)
        seconds = round(work_seconds(device) - began, 2)
        requested = {request.index for request in requests}
        n_rows = write_jsonl(out, _merged(Path(source), requested, answers))
        write_json(
            counts_path, {**fates, "given": n_rows - len(answers), "kept": len(answers), "written_seconds": seconds}
        )
    counts = read_json(counts_path, "Delete it; the answers are written again.")
    return out, _note(path, part, counts, out), {key: counts[key] for key in ("written_tokens", "written_seconds")}


def _key(part: str) -> str:
    return f"corpus.{part}.answers" if part else "corpus.answers"


def _hash_of(path: str | None) -> str | None:
    return file_hash(Path(path)) if path is not None and is_file(Path(path)) else path


def _note(path: str, part: str, counts: Mapping[str, Any], out: Path) -> str:
    n_requested = counts["kept"] + counts["endless"] + counts["wrong"]
    return (
        f"{_key(part)}: {path} wrote {counts['kept']:,} of {n_requested:,} answers itself; left out: "
        f"{counts['endless']:,} that do not end, {counts['wrong']:,} without the given answer; "
        f"{counts['given']:,} rows keep theirs ({out})"
    )


def _merged(source: Path, requested: set[int], answers: Mapping[int, str]) -> Iterator[Row]:
    """Yield the rows of `source` with the new answers, by index; without those that were requested and are not answered."""
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
    return max((index for index, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)


def _load_writer(recipe: TrainRecipe, part: str, section: AnswersSection, generator: GeneratorSection) -> Writer:
    model = recipe.model
    loaded = models.load_model(
        str(model.path), dtype=model.dtype, device=recipe.device, revision=model.revision,
        quantization=model.quantization,
    )  # fmt: skip
    set_chat_template(recipe.corpus, recipe.trainer, loaded.tokenizer)
    window = models.window_of(loaded.model.config)
    most = min(MOST_TOKENS, (window or 2 * _WINDOW) // 2)
    return Writer(
        loaded.model, loaded.tokenizer, section, dataclasses.replace(generator, max_tokens=most), window,
        begins_with_bos(loaded.tokenizer, recipe.corpus.bos), dict(recipe.corpus.chat_template_kwargs or {}), part,
    )  # fmt: skip


@dataclass(frozen=True)
class Writer:
    """A loaded model that answers rows."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    section: AnswersSection
    generator: GeneratorSection
    window: int | None
    bos: bool
    kwargs: Mapping[str, Any]
    part: str

    @property
    def reads_document(self) -> bool:
        """Whether a document is shown before the prompt; answers without the given one are then left out."""
        return self.section.without_context < 1

    def requests(self, rows: Iterable[CorpusRow], documents: Mapping[str, str]) -> Iterator[_Request]:
        """Yield the rows that can be answered, in their order."""
        for index, row in enumerate(rows):
            if row.shape == "text" or row.tools:
                continue
            in_chat = row.shape == "messages"
            last = _last_answer(row.messages)
            if in_chat and (not last or not all(isinstance(turn.get("content"), str) for turn in row.messages)):
                continue
            corpus_answer = row.messages[last]["content"] if in_chat else row.completion
            context = self._context(row, documents)
            if context is None:
                continue
            alone = self._encode(row, row.messages[:last], "")
            turns = prepend_context(row.messages[:last], context) if in_chat and context else row.messages[:last]
            if turns is None:
                continue
            prompt = self._encode(row, turns, context) if context else alone
            if self.window is not None and max(len(prompt), len(alone)) + self.generator.max_tokens > self.window:
                continue
            breaks = not in_chat and "\n" not in corpus_answer.strip()
            yield _Request(index, row.id, prompt, alone, corpus_answer.strip(), in_chat, breaks)

    def _context(self, row: CorpusRow, documents: Mapping[str, str]) -> str | None:
        """Return the text before the prompt, "" for none; None if the row needs one that is not there."""
        if not self.reads_document:
            return ""
        text = documents.get(row.document_id)
        return with_passages([text.strip()], "") if text else None

    def _encode(self, row: CorpusRow, turns: Sequence[Mapping[str, Any]], context: str) -> list[int]:
        """Return the tokens of a row's prompt behind `context`; in a chat those of `turns`, which hold it.

        A bare question gets the plain form ``Question: ...\\nAnswer:``, unless it ends with a colon.
        """
        if row.shape == "completion":
            question = row.prompt if row.prompt.rstrip().endswith(":") else question_prompt(row.prompt)
            ids = self.tokenizer(context + question, add_special_tokens=False, verbose=False)["input_ids"]
            return [*([self.tokenizer.bos_token_id] if self.bos else []), *ids]
        text = self.tokenizer.apply_chat_template(
            [*turns], add_generation_prompt=True, tokenize=False, **{**self.kwargs, **row.template_kwargs}
        )
        encoded: list[int] = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return encoded

    def answer(self, requests: Sequence[_Request]) -> tuple[dict[int, str], dict[str, int]]:
        """Return the answers that are kept, by row, how many are not (endless, wrong), and the tokens of all.

        Rows without one are asked again, if tokens are drawn, while `_ENOUGH` of the answers can be kept. Raises `InputError`
        if less can of the rows that are tried first.
        """
        answers, waiting, n_tokens = dict[int, str](), list(requests), 0
        with Progress(f"{self.part} answers".strip(), len(requests), "rows") as progress:
            for attempt in count():
                failed: list[_Request] = []
                n_endless = n_wrong = 0
                step = -(-len(waiting) // _TRIAL)
                trial, others = waiting[::step], [item for i, item in enumerate(waiting) if i % step]
                written = chain(self._written(trial, attempt), self._written(others, attempt))
                for n_drawn, (request, text, n_written) in enumerate(written, start=1):
                    n_tokens += n_written
                    is_wrong = text is not None and self.reads_document and not matches(text, [request.corpus_answer])
                    if text is None or is_wrong:
                        failed.append(request)
                        n_endless, n_wrong = n_endless + (text is None), n_wrong + is_wrong
                    else:
                        answers[request.index] = text
                        progress.advance()
                    if attempt == 0 and n_drawn == len(trial) and len(answers) < _ENOUGH * n_drawn:
                        raise InputError(
                            f"{self.generator.model}: {_key(self.part)}: of {n_drawn} answers {len(answers)} can be kept, too "
                            f"few to learn from: {n_endless} do not end within {self.generator.max_tokens} tokens, "
                            f"{n_wrong} do not hold the given answer. Set answers: given, or take a stronger model."
                        )
                is_last = self.section.without_context in (0, 1) or len(failed) > (1 - _ENOUGH) * len(waiting)
                waiting = failed
                if not waiting or is_last:
                    break
        return answers, {"endless": n_endless, "wrong": n_wrong, "written_tokens": n_tokens}

    def _written(self, requests: Sequence[_Request], attempt: int) -> Iterator[tuple[_Request, str | None, int]]:
        """Yield (request, its answer; None if it does not end, its tokens), in batches of prompts of similar length."""
        ends = ends_of(self.model, self.tokenizer, str(self.generator.model))
        order = sorted(requests, key=lambda request: (request.breaks, -len(request.prompt)))
        for breaks, group in groupby(order, key=lambda request: request.breaks):
            stops = [*ends, *(token for token in self._line_breaks if token not in ends)] if breaks else ends
            some = list(group)
            for start in range(0, len(some), _BATCH):
                batch = some[start : start + _BATCH]
                seeds = [request_seed("own answers", 0, request.row_id, attempt) for request in batch]
                tokens = generate(
                    self.model, self.generator, [request.prompt for request in batch], seeds, stops,
                    [request.alone for request in batch], self.section.without_context,
                )  # fmt: skip
                yield from (
                    (request, self._text(request, ids, stops), len(ids))
                    for request, ids in zip(batch, tokens, strict=True)
                )

    @cached_property
    def _line_breaks(self) -> list[int]:
        """Return the tokens with a line break in them."""
        texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
        return [token for token, text in enumerate(texts) if "\n" in text]

    def _text(self, request: _Request, tokens: list[int], stops: Sequence[int]) -> str | None:
        """Return the answer in `tokens`; None if it does not end, or is empty."""
        if not tokens or tokens[-1] not in stops:
            return None
        if request.in_chat:
            text = read_answer(self.tokenizer, tokens)[1]
        else:  # what follows the prompt: a decoder may drop the space before the first word
            before = str(self.tokenizer.decode(request.alone, skip_special_tokens=True))
            full_text = str(self.tokenizer.decode([*request.alone, *tokens], skip_special_tokens=True))
            text = full_text[len(before) :]
            text = text.split("\n")[0] if request.breaks else text
        return text if text.strip() else None
