"""On-policy distillation: in each step the student writes the answers, and learns the teacher's predictions of them.

Self-distillation fine-tuning, SDFT (arXiv 2601.19897): the teacher reads the document, the student does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kinject.corpus.tokenize import IGNORED, TokenRow
from kinject.models import window_of
from kinject.recipe import GeneratorSection
from kinject.requests.generator import request_seed
from kinject.requests.transformers import ends_of, write_tokens
from kinject.train.contexts import NO_TEACHER, TeacherRows
from kinject.train.probes import unwrapped
from kinject.train.teacher import LiveTeacher


class OnPolicy:
    """Replaces the answers in batches by those that the student writes at that moment.

    A row with a teacher is answered if it has tokens before its last learned ones (a prompt) and is whole in its batch; texts
    and rows of replay stay as they are. Answers are sampled at temperature 1, up to `most` tokens; one that does not end by
    then is learned as far as it goes. They follow from seed, step and row, so that a resumed run writes the same ones.
    """

    def __init__(self, teacher: LiveTeacher, tokenizer: Any, most: int, seed: int) -> None:
        self.teacher, self.given = teacher, teacher.read
        self.model = unwrapped(teacher.model)
        self.ends = ends_of(self.model, tokenizer, "the model")
        self.section = GeneratorSection(kind="transformers", temperature=1.0, max_tokens=most)
        self.window = window_of(self.model.config)
        self.seed = seed

    def batches(self, batches: Iterator[dict[str, Any]], step: int) -> Iterator[dict[str, Any]]:
        """Yield the batches of one update with the student's answers; the teacher then reads these."""
        rows: list[TokenRow] = []
        heads: list[TokenRow] = []
        for batch in batches:
            yield self._answered(batch, step, rows, heads)

    def _answered(
        self, batch: dict[str, Any], step: int, rows: list[TokenRow], heads: list[TokenRow]
    ) -> dict[str, Any]:
        """Return a batch whose texts are answered; `rows` and `heads` are those of the update so far."""
        texts = [text for number in range(len(batch["labels"])) for text in _texts(batch, number)]
        numbers = [self._row_of(text) for text in texts]
        prompts = [self._prompt(text, number) for text, number in zip(texts, numbers, strict=True)]
        asked = [index for index, prompt in enumerate(prompts) if prompt]
        answers = dict(
            zip(asked, self._write([prompts[i] for i in asked], [numbers[i] for i in asked], step), strict=True)
        )
        first = len(rows)
        for index, number in enumerate(numbers):
            if number == NO_TEACHER:
                continue
            row, head = self.given.rows[number], self.given.heads[number]
            if index in answers:
                prompt, answer = prompts[index], answers[index]
                n_answer = len(row.input_ids) - len(prompt)
                learned = [False] * len(prompt) + [True] * len(answer)
                row = TokenRow(row.row_id, row.document_id, row.origin, [*prompt, *answer], learned)
                head = TokenRow("", "", "", head.input_ids, head.learned, head.n_left_out - n_answer + len(answer))
            rows.append(row)
            heads.append(head)
        read = TeacherRows(rows, heads, "on policy")
        self.teacher.read = read
        place = first
        for index, number in enumerate(numbers):
            if number == NO_TEACHER:
                continue
            if index in answers:
                texts[index] = _replaced(texts[index], prompts[index], answers[index], read.numbers(place))
            else:
                moved = texts[index]["teacher"]
                shift = int(read.starts[place]) - int(self.given.starts[number])
                texts[index]["teacher"] = torch.where(moved == NO_TEACHER, moved, moved + shift)
            place += 1
        return _joined(batch, texts)

    def _row_of(self, text: dict[str, Any]) -> int:
        """Return the number of the row of a text; `NO_TEACHER` without one."""
        numbers = text["teacher"][text["teacher"] != NO_TEACHER]
        if not len(numbers):
            return NO_TEACHER
        return int(np.searchsorted(self.given.starts, int(numbers[0]), side="right")) - 1

    def _prompt(self, text: dict[str, Any], number: int) -> list[int]:
        """Return the tokens before the last learned ones of a row; [] for a row that stays as it is."""
        if number == NO_TEACHER:
            return []
        row, head = self.given.rows[number], self.given.heads[number]
        ids, learned = np.asarray(row.input_ids).tolist(), np.asarray(row.learned, dtype=np.bool_)
        end = int(np.flatnonzero(learned)[-1])
        before = np.flatnonzero(~learned[:end])
        start = int(before[-1]) + 1 if len(before) else 0
        is_whole = text["input_ids"][: len(ids)].tolist() == ids
        n_read = len(head.input_ids) + head.n_left_out - (len(ids) - start) + self.section.max_tokens
        fits = self.window is None or n_read <= self.window
        in_tail = head.n_left_out >= len(ids) - start
        return ids[:start] if start > 1 and is_whole and fits and in_tail else []

    def _write(self, prompts: Sequence[list[int]], numbers: Sequence[int], step: int) -> list[list[int]]:
        """Return the student's answers to `prompts`, of the rows with these numbers."""
        if not prompts:
            return []
        seeds = [request_seed("on policy", self.seed, step, number) for number in numbers]
        was_training = self.model.training
        self.model.eval()
        answers = write_tokens(self.model, self.section, prompts, seeds, self.ends)
        self.model.train(was_training)
        return answers


def _texts(batch: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
    """Yield the columns of each text in a row of a batch; padding is a part of the last one."""
    starts = [*(batch["position_ids"][number] == 0).nonzero()[:, 0].tolist()]
    starts = [0, *starts] if not starts or starts[0] else starts
    for start, end in zip(starts, [*starts[1:], batch["labels"].shape[1]], strict=True):
        yield {"row": number, **{key: column[number, start:end] for key, column in batch.items()}}


def _replaced(text: dict[str, Any], prompt: list[int], answer: list[int], numbers: Any) -> dict[str, Any]:
    """Return a text with another answer; `numbers` are those of its predictions."""
    device, n = text["labels"].device, len(prompt) + len(answer)
    new: dict[str, Any] = {
        "row": text["row"], "input_ids": torch.tensor([*prompt, *answer], device=device),
        "labels": torch.tensor([IGNORED] * len(prompt) + answer, device=device),
        "position_ids": torch.arange(n, device=device), "teacher": torch.as_tensor(numbers, device=device),
    }  # fmt: skip
    for key in ("replayed", "weights"):  # the same for all tokens of a row
        if key in text:
            new[key] = text[key][:1].expand(n)
    return new


def _joined(batch: dict[str, Any], texts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a batch of `texts` in their rows, padded on the right as `batch` is."""
    padding = {"labels": IGNORED, "teacher": NO_TEACHER}
    joined: dict[str, Any] = {}
    for key in batch:
        rows = [torch.cat([text[key] for text in texts if text["row"] == n]) for n in range(len(batch["labels"]))]
        width = max(map(len, rows))
        columns = []
        for row in rows:
            n_pad = width - len(row)
            more = row.new_full((n_pad,), padding.get(key, 0))
            if key == "position_ids":
                more = int(row[-1]) + 1 + torch.arange(n_pad, device=row.device)
            columns.append(torch.cat([row, more]))
        joined[key] = torch.stack(columns)
    return joined
