"""Questions scored during training, to measure learning and forgetting as they happen: choices, and answers that are written."""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kinject.corpus.grading import abstains, matches
from kinject.corpus.questions import question_prompt
from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization, TokenRow, begins_with_bos, tokenize_rows
from kinject.errors import InputError
from kinject.models.generate import Greedy, end_tokens, generate
from kinject.recipe.sections import ProbesSection
from kinject.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_TOKENS = 16_384
"""Tokens in one forward pass, padding included."""
MAX_NEW_TOKENS = 32
"""Most tokens of a written answer; a line break ends it too."""


@dataclass(frozen=True)
class ProbeSet:
    """One question set in tokens: a row for every option of every question, `learned` at the option's tokens.

    A set with `accepted` texts has a row for each question instead, after which the model writes its answer.
    """

    name: str
    rows: list[TokenRow]
    n_options: list[int]
    answers: list[int]
    accepted: list[tuple[str, ...]]


class Probes:
    """The question sets of a recipe's `probes` section, tokenised.

    Prompts are those of `kinject eval`'s formats ``texts`` and ``generate`` (`question_prompt`), or what the section's
    template writes. The option with the highest summed log-prob wins, written answers are judged by the score ``match``;
    the special tokens before the question are the tokenizer's own.
    """

    def __init__(
        self,
        section: ProbesSection,
        questions: Mapping[str, Sequence[Question]],
        tokenizer: PreTrainedTokenizerBase,
        window: int | None,
    ) -> None:
        """Tokenise the `questions` of each set. Raises `InputError` for an option that does not fit into `window`.

        `window` is the most tokens that the model reads; longer prompts are cut from the left, as in evaluation. A set of
        which only some questions have choices is refused too.
        """
        self.section, self.tokenizer = section, tokenizer
        tokenization = Tokenization(bos=begins_with_bos(tokenizer), eos=False)
        self.sets = []
        for name, item in section.sets().items():
            limited = questions[name][: section.limit]
            n_open = sum(not question.choices for question in limited)
            if n_open and n_open < len(limited) and item.layout != "open":
                fault = (
                    f"{n_open} of {len(limited)} questions have no choices. Set layout: open, so that all are written"
                )
                raise InputError(f"probes.questions.{name}: {item.path}: {fault}, or use two files.")
            writes = n_open > 0 or item.layout == "open"
            cut = self._cut if writes else _shorten
            rows = [
                cut(row, window) for row in tokenize_rows(_options(limited, writes=writes), tokenizer, tokenization)
            ]
            accepted = [question.accepted for question in limited] if writes else []
            sizes, answers = [len(q.choices) for q in limited], [q.answer for q in limited]
            self.sets.append(ProbeSet(name, rows, sizes, answers, accepted))

    def _cut(self, row: TokenRow, window: int | None) -> TokenRow:
        """Return the end of a prompt after which an answer fits into the window."""
        room = len(row.input_ids) if window is None else window - MAX_NEW_TOKENS
        if room < 1:
            raise InputError(
                f"probes: a written answer may have {MAX_NEW_TOKENS} tokens, but the model reads {window}."
            )
        return replace(row, input_ids=row.input_ids[-room:], learned=row.learned[-room:])

    def score(self, model: Any, pad_token_id: int) -> dict[str, float]:
        """Return the accuracy of each set as ``NAME_accuracy``, and their mean as ``accuracy``.

        A set whose answers are written has the fractions ``NAME_wrong`` and ``NAME_abstained`` too. `model` (as the trainer
        wraps it, so that sharded weights are gathered) is left in evaluation mode. Each process scores every question. A
        question without a score (log-probs that are not finite, or all equal) is left out; of a set without any the accuracy
        is NaN, which is never logged.
        """
        model.eval()
        scores: dict[str, float] = {}
        for probe in self.sets:
            if probe.accepted:
                texts = self.written(model, probe, pad_token_id)
                right = [matches(text, accepted) for text, accepted in zip(texts, probe.accepted, strict=True)]
                n, n_right = len(texts), sum(right)
                n_abstained = sum(abstains(text) and not is_right for text, is_right in zip(texts, right, strict=True))
                scores[f"{probe.name}_accuracy"] = n_right / n
                scores[f"{probe.name}_wrong"] = (n - n_right - n_abstained) / n
                scores[f"{probe.name}_abstained"] = n_abstained / n
                continue
            sums = iter(log_probs(model, probe.rows, pad_token_id, BATCH_TOKENS))
            n_correct = n_scored = 0
            for size, answer in zip(probe.n_options, probe.answers, strict=True):
                options = [next(sums) for _ in range(size)]
                is_scored = all(map(math.isfinite, options)) and min(options) < max(options)
                n_scored += is_scored
                n_correct += is_scored and options.index(max(options)) == answer
            scores[f"{probe.name}_accuracy"] = n_correct / n_scored if n_scored else math.nan
        accuracies = [scores[f"{probe.name}_accuracy"] for probe in self.sets]
        return {**scores, "accuracy": math.fsum(accuracies) / len(accuracies)}

    def written(self, model: Any, probe: ProbeSet, pad_token_id: int) -> list[str]:
        """Return the text that `model` writes after each prompt of `probe`: its likeliest tokens, up to a line break.

        Rows of similar length go through it together, padded on the left.
        """
        inner = unwrapped(model)
        texts = [""] * len(probe.rows)
        order = sorted(range(len(texts)), key=lambda i: -len(probe.rows[i].input_ids))
        while order:
            width = len(probe.rows[order[0]].input_ids)
            n_rows = max(1, BATCH_TOKENS // (width + MAX_NEW_TOKENS))
            batch, order = order[:n_rows], order[n_rows:]
            rows = [list(probe.rows[i].input_ids) for i in batch]
            for i, tokens in zip(batch, self._write(inner, rows, pad_token_id), strict=True):
                texts[i] = str(self.tokenizer.decode(tokens, skip_special_tokens=True)).split("\n")[0]
        return texts

    @torch.no_grad()
    def _write(self, model: Any, rows: Sequence[list[int]], pad_token_id: int) -> list[list[int]]:
        """Return the tokens that `model` writes after each of `rows`, the first of which is the longest."""
        width, device = len(rows[0]), next(iter(model.parameters())).device
        ends = end_tokens(model, self.tokenizer)

        def has_broken(input_ids: torch.Tensor, _: Any, **__: Any) -> torch.Tensor:
            tails = self.tokenizer.batch_decode(input_ids[:, max(width, input_ids.shape[1] - 2) :])
            return torch.tensor(["\n" in tail for tail in tails], device=device)

        written = generate(
            model, Greedy(MAX_NEW_TOKENS), rows, [0] * len(rows), ends, has_ended=has_broken, exact=False
        )
        return [_until(tokens, ends) for tokens in written]


def _until(tokens: list[int], ends: Collection[int]) -> list[int]:
    return tokens[: next((n for n, token in enumerate(tokens) if token in ends), None)]


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside the trainer's and peft's wrappers."""
    inner = model.module if hasattr(model, "module") else model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


def _options(questions: Sequence[Question], *, writes: bool) -> list[CorpusRow]:
    prompts = [question_prompt(question.question) for question in questions]
    if writes:
        return [CorpusRow(q.id, "", "", "text", text=prompt) for q, prompt in zip(questions, prompts, strict=True)]
    return [
        CorpusRow(question.id, "", "", "completion", prompt=prompt, completion=f" {text}")
        for question, prompt in zip(questions, prompts, strict=True)
        for text in question.choices
    ]


def _shorten(row: TokenRow, window: int | None) -> TokenRow:
    if window is None or len(row.input_ids) <= window + 1:
        return row
    ids, learned = row.input_ids[-window - 1 :], row.learned[-window - 1 :]
    if learned[0]:
        raise InputError(f"probes: question {row.row_id} has an option longer than the model's {window} tokens.")
    return TokenRow(row.row_id, row.document_id, row.origin, ids, learned)


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[TokenRow], pad_token_id: int, batch_tokens: int) -> list[float]:
    """Return the summed log-prob (natural) of the learned tokens of each row, each row read alone; -inf without any.

    Rows of similar length go through the model together, padded on the right, at most `batch_tokens` at once. The head is
    applied only to the columns with scored tokens, if the model can; softmax is taken in float32.
    """
    sums = [-math.inf] * len(rows)
    order = sorted((i for i, row in enumerate(rows) if any(row.learned)), key=lambda i: -len(rows[i].input_ids))
    inner = unwrapped(model)
    narrow = "logits_to_keep" in inspect.signature(type(inner).forward).parameters
    device = next(iter(inner.parameters())).device
    while order:
        width = len(rows[order[0]].input_ids) - 1
        n_rows = max(1, batch_tokens // max(width, 1))
        batch, order = order[:n_rows], order[n_rows:]
        ids = torch.full((len(batch), width), pad_token_id)
        targets, scored = torch.zeros(ids.shape, dtype=torch.long), torch.zeros(ids.shape, dtype=torch.bool)
        for i, index in enumerate(batch):
            tokens, n = torch.tensor(rows[index].input_ids), len(rows[index].input_ids) - 1
            ids[i, :n], targets[i, :n] = tokens[:-1], tokens[1:]
            scored[i, :n] = torch.tensor(rows[index].learned[1:])
        columns = scored.any(0).nonzero()[:, 0]
        positions = torch.arange(width).expand(len(batch), width)
        options = {"logits_to_keep": columns.to(device)} if narrow else {}
        inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False, **options}
        logits = model(**inputs).logits
        logits = logits if narrow else logits[:, columns.to(device)]
        picked = logits.float().log_softmax(-1).gather(-1, targets[:, columns].to(device)[..., None])[..., 0]
        totals = picked.masked_fill(~scored[:, columns].to(device), 0.0).double().sum(-1)
        for index, value in zip(batch, totals.tolist(), strict=True):
            sums[index] = value if not math.isnan(value) else -math.inf
    return sums
