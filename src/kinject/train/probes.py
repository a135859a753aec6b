"""Questions scored during training, to measure learning and forgetting as they happen."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization, TokenRow, begins_with_bos, tokenize_rows
from kinject.errors import InputError
from kinject.question_formats import FORMATS, QuestionFormat
from kinject.recipe.sections import ProbesSection
from kinject.stats.matrix import mean_of_alike
from kinject.terminal import format_count
from kinject.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FORMAT = FORMATS["texts"]
BATCH_TOKENS = 16_384
"""Tokens in one forward pass, padding included."""


@dataclass(frozen=True)
class ProbeSet:
    """One question set in tokens: a row for every option of every question, `learned` at the
    option's tokens.

    `alone` are the rows of the same options without the question. `choice_sets` identify each
    question's options.
    """

    name: str
    rows: list[TokenRow]
    alone: list[TokenRow]
    n_options: list[int]
    answers: list[int]
    choice_sets: list[frozenset[str]]


class Probes:
    """The question sets of a recipe's `probes` section, tokenised.

    Prompts are those of `kinject eval`'s format ``texts``; the special tokens
    before the question are the tokenizer's own. The option with the highest summed log-prob wins.
    """

    def __init__(
        self,
        section: ProbesSection,
        questions: Mapping[str, Sequence[Question]],
        tokenizer: PreTrainedTokenizerBase,
        window: int | None,
    ) -> None:
        """Tokenise the `questions` of each set. Raises `InputError` for one without choices, and
        for an option over `window`.

        `window` is the most tokens that the model reads; longer prompts are cut from the left, as
        in evaluation.
        """
        # An end token would be scored with the option before it.
        tokenization = Tokenization(bos=begins_with_bos(tokenizer), eos=False)
        self.sets = []
        for name, item in section.sets().items():
            limited = questions[name][: section.limit]
            n_open = sum(not question.choices for question in limited)
            if n_open:
                raise InputError(
                    f"probes.questions.{name}: {item.path}: {n_open} of "
                    f"{format_count(len(limited), 'question')} "
                    "have no choices, which probes need. kinject eval asks open questions."
                )
            tokenized = tokenize_rows(
                [*_options(limited, _FORMAT), *_options(limited, FORMATS[_FORMAT.control])],
                tokenizer,
                tokenization,
            )
            rows = [_shorten(row, window) for row in tokenized]
            sizes, answers = [len(q.choices) for q in limited], [q.answer for q in limited]
            choice_sets = [frozenset(q.choices) for q in limited]
            n = sum(sizes)
            self.sets.append(ProbeSet(name, rows[:n], rows[n:], sizes, answers, choice_sets))

    def score(self, model: nn.Module, pad_token_id: int) -> dict[str, float]:
        """Return the accuracy of each set as ``NAME_accuracy``, and their mean as ``accuracy``.

        ``NAME_without_question`` is the accuracy on the same options without the question
        (`kinject.results.Control`). `model` (as the trainer wraps it, so that sharded weights are
        gathered) is left in evaluation mode. Each process scores every question. A question without
        a score (log-probs that are not finite, or all equal) is left out; of a set without any the
        accuracy is NaN, which is never logged.
        """
        model.eval()
        scores: dict[str, float] = {}
        controls: dict[str, float] = {}
        for probe in self.sets:
            with_question = _correct(
                probe, log_probs(model, probe.rows, pad_token_id, BATCH_TOKENS)
            )
            alone = _correct(probe, log_probs(model, probe.alone, pad_token_id, BATCH_TOKENS))
            scores[f"{probe.name}_accuracy"] = _mean(with_question)
            values, choices = [], []
            for value, choice_set in zip(alone, probe.choice_sets, strict=True):
                if value is not None:
                    values.append(value)
                    choices.append(choice_set)
            # One control for questions with the same choices: a balanced set loses no power.
            shared = mean_of_alike(values, choices)
            controls[f"{probe.name}_without_question"] = _mean(shared)
        return {**scores, **controls, "accuracy": math.fsum(scores.values()) / len(scores)}


def _correct(probe: ProbeSet, sums: Sequence[float]) -> list[float | None]:
    """Return 1 for each question whose right option has the highest of `sums`, else 0; None for one
    without a score."""
    correct: list[float | None] = []
    start = 0
    for size, answer in zip(probe.n_options, probe.answers, strict=True):
        options = list(sums[start : start + size])
        start += size
        # Of options that are all equal none is the model's choice.
        if all(map(math.isfinite, options)) and min(options) < max(options):
            correct.append(float(options.index(max(options)) == answer))
        else:
            correct.append(None)
    return correct


def _mean(values: Sequence[float | None]) -> float:
    """Return the mean of those that are not None; NaN where all are."""
    scored = [value for value in values if value is not None]
    return math.fsum(scored) / len(scored) if scored else math.nan


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside the trainer's and peft's wrappers."""
    inner: PreTrainedModel = getattr(model, "module", model)
    if hasattr(inner, "get_base_model"):
        inner = inner.get_base_model()
    return inner


def _options(questions: Sequence[Question], form: QuestionFormat) -> list[CorpusRow]:
    """Return a row for each option of each question, behind the prompt of the format."""
    rows = []
    for question in questions:
        prompt = form.prompt(question)
        for text in question.choices:
            # The tokens of kinject eval: tests/train/test_probes.py holds log-probs equal.
            row = CorpusRow(question.id, "", "", "completion", prompt=prompt, completion=f" {text}")
            rows.append(row)
    return rows


def _shorten(row: TokenRow, window: int | None) -> TokenRow:
    # The last token is predicted, not read.
    if window is None or len(row.input_ids) <= window + 1:
        return row
    ids, learned = row.input_ids[-window - 1 :], row.learned[-window - 1 :]
    if learned[0]:
        raise InputError(
            f"probes: question {row.row_id} has an option longer than the model's {window} tokens."
        )
    return TokenRow(row.row_id, row.document_id, row.origin, ids, learned)


@torch.no_grad()
def log_probs(
    model: nn.Module, rows: Sequence[TokenRow], pad_token_id: int, batch_tokens: int
) -> list[float]:
    """Return the summed log-prob (natural) of the learned tokens of each row, each row read alone;
    -inf without any.

    Rows of similar length go through the model together, padded on the right, at most
    `batch_tokens` at once. The head is applied only to the columns with scored tokens, if the model
    can; softmax is taken in float32.
    """
    sums = [-math.inf] * len(rows)
    order = [index for index, row in enumerate(rows) if any(row.learned)]
    order.sort(key=lambda index: -len(rows[index].input_ids))
    inner = unwrapped(model)
    narrow = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
    device = next(iter(inner.parameters())).device
    while order:
        width = len(rows[order[0]].input_ids) - 1
        n_rows = max(1, batch_tokens // max(width, 1))
        batch, order = order[:n_rows], order[n_rows:]
        ids = torch.full((len(batch), width), pad_token_id)
        targets = torch.zeros(ids.shape, dtype=torch.long)
        scored = torch.zeros(ids.shape, dtype=torch.bool)
        for i, index in enumerate(batch):
            tokens, n = torch.tensor(rows[index].input_ids), len(rows[index].input_ids) - 1
            ids[i, :n], targets[i, :n] = tokens[:-1], tokens[1:]
            scored[i, :n] = torch.tensor(rows[index].learned[1:])
        columns = scored.any(0).nonzero()[:, 0]
        positions = torch.arange(width).expand(len(batch), width)
        inputs = {
            "input_ids": ids.to(device),
            "position_ids": positions.to(device),
            "use_cache": False,
        }
        if narrow:
            logits = model(**inputs, logits_to_keep=columns.to(device)).logits
        else:
            logits = model(**inputs).logits[:, columns.to(device)]
        selected = targets[:, columns].to(device)[..., None]
        picked = logits.float().log_softmax(-1).gather(-1, selected)[..., 0]
        totals = picked.masked_fill(~scored[:, columns].to(device), 0.0).double().sum(-1)
        for index, value in zip(batch, totals.tolist(), strict=True):
            if not math.isnan(value):  # -inf, as without any: no option to choose
                sums[index] = value
    return sums
