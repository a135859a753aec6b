"""Multiple-choice questions put to the model while it trains: what it has learned so far, and what it has forgotten."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from kinject.corpus import CorpusRow, Tokenization, TokenRow, tokenize_rows
from kinject.corpus.questions import read_questions
from kinject.errors import InputError
from kinject.recipe.sections import ProbesSection
from kinject.types import Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ProbeSet:
    """One question set in tokens: a row for every option of every question, `learned` where the option stands."""

    name: str
    role: str
    rows: list[TokenRow]
    n_options: list[int]
    answers: list[int]


class Probes:
    """The question sets of a recipe's `probes` section, ready to be asked.

    Asked as `kinject eval` asks the format ``texts``: "Question: ...\\nAnswer:", the option with the highest summed
    log-prob wins, the special tokens before the question are the tokenizer's own.
    """

    def __init__(self, section: ProbesSection, tokenizer: PreTrainedTokenizerBase, window: int | None) -> None:
        """Read and tokenise every set. Raises `InputError` for a file that cannot be asked.

        `window` is the most tokens that the model reads; what exceeds it is cut from the left, as in evaluation.
        """
        self.batch_tokens = section.batch_tokens
        start = tokenizer("a").input_ids[:1]
        how = Tokenization(bos=start == [tokenizer.bos_token_id], eos=False)
        self.sets = []
        for name, item in section.sets().items():
            questions = read_questions(Path(item.path), item.layout)[: section.limit]
            rows = [_shortened(row, window) for row in tokenize_rows(_options(questions), tokenizer, how)]
            sizes, answers = [len(q.choices) for q in questions], [q.answer for q in questions]
            self.sets.append(ProbeSet(name, item.role, rows, sizes, answers))

    def ask(self, model: Any, pad_token_id: int) -> dict[str, float]:
        """Return the accuracy of each set as ``NAME_accuracy``, and their mean as ``accuracy``.

        `model` (as the trainer wraps it, so that sharded weights are gathered) is left in evaluation mode. Each process
        asks every question. A question with an option that cannot be scored counts as wrong.
        """
        model.eval()
        found: dict[str, float] = {}
        for probe in self.sets:
            sums = iter(log_probs(model, probe.rows, pad_token_id, self.batch_tokens))
            n_right = 0
            for size, answer in zip(probe.n_options, probe.answers, strict=True):
                options = [next(sums) for _ in range(size)]
                n_right += all(map(math.isfinite, options)) and options.index(max(options)) == answer
            found[f"{probe.name}_accuracy"] = n_right / len(probe.answers)
        return {**found, "accuracy": math.fsum(found.values()) / len(found)}


def _options(questions: Sequence[Question]) -> list[CorpusRow]:
    return [
        CorpusRow(question.id, "", "", "completion", prompt=f"Question: {question.question}\nAnswer:", completion=f" {text}")
        for question in questions
        for text in question.choices
    ]  # fmt: skip


def _shortened(row: TokenRow, window: int | None) -> TokenRow:
    if window is None or len(row.input_ids) <= window + 1:
        return row
    ids, learned = row.input_ids[-window - 1 :], row.learned[-window - 1 :]
    if learned[0]:
        raise InputError(f"probes: question {row.row_id} has an option longer than the model's {window} tokens.")
    return TokenRow(row.row_id, row.document_id, row.origin, ids, learned)


@torch.no_grad()
def log_probs(model: Any, rows: Sequence[TokenRow], pad_token_id: int, batch_tokens: int) -> list[float]:
    """Return the summed log-prob (natural) of the learned tokens of each row, each row read alone; -inf without any.

    Rows of like length go through the model together, padded on the right, at most `batch_tokens` at once. The head is
    applied only to the columns in which something is scored, where the model can; softmax is taken in float32.
    """
    found = [-math.inf] * len(rows)
    order = sorted((i for i, row in enumerate(rows) if any(row.learned)), key=lambda i: -len(rows[i].input_ids))
    bare = model.module if hasattr(model, "module") else model
    bare = bare.get_base_model() if hasattr(bare, "get_base_model") else bare
    narrow = "logits_to_keep" in inspect.signature(type(bare).forward).parameters
    device = next(iter(bare.parameters())).device
    while order:
        width = len(rows[order[0]].input_ids) - 1
        n_rows = max(1, batch_tokens // max(width, 1))
        part, order = order[:n_rows], order[n_rows:]
        ids = torch.full((len(part), width), pad_token_id)
        targets, scored = torch.zeros(ids.shape, dtype=torch.long), torch.zeros(ids.shape, dtype=torch.bool)
        for at, index in enumerate(part):
            whole, n = torch.tensor(rows[index].input_ids), len(rows[index].input_ids) - 1
            ids[at, :n], targets[at, :n] = whole[:-1], whole[1:]
            scored[at, :n] = torch.tensor(rows[index].learned[1:])
        columns = scored.any(0).nonzero()[:, 0]
        positions = torch.arange(width).expand(len(part), width)
        options = {"logits_to_keep": columns.to(device)} if narrow else {}
        inputs = {"input_ids": ids.to(device), "position_ids": positions.to(device), "use_cache": False, **options}
        logits = model(**inputs).logits
        logits = logits if narrow else logits[:, columns.to(device)]
        picked = logits.float().log_softmax(-1).gather(-1, targets[:, columns].to(device)[..., None])[..., 0]
        sums = picked.masked_fill(~scored[:, columns].to(device), 0.0).double().sum(-1)
        for index, value in zip(part, sums.tolist(), strict=True):
            found[index] = value if not math.isnan(value) else -math.inf
    return found


class Stops(TrainerCallback, ABC):  # type: ignore[misc]
    """Stops a run where `reason` finds one; what was said is added to `said`.

    Decides from the trainer's own log, which checkpoints carry, so a resumed run decides as an undisturbed one; one that had
    stopped before it was interrupted takes no further step.
    """

    def __init__(self, said: list[str]) -> None:
        self.said = said

    @abstractmethod
    def reason(self, args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        """Return why the run stops here; "" where it goes on."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop where there is a reason to."""
        reason = self.reason(args, state.log_history)
        if reason and not control.should_training_stop:
            control.should_training_stop = True
            self.said.append(f"step {state.global_step}: {reason}")

    on_train_begin = on_evaluate


class ProbeStops(Stops):
    """Stops a run after `patience` evaluations without a better metric, or when too much is forgotten."""

    def __init__(self, section: ProbesSection, said: list[str]) -> None:
        super().__init__(said)
        self.section = section
        self.kept = [name for name, item in section.sets().items() if item.role == "retention"]

    def reason(self, args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        """Return what of the two has happened."""
        return self._forgotten(history) or self._impatient(args, history)

    def _forgotten(self, history: Sequence[Mapping[str, Any]]) -> str:
        for name in self.kept if self.section.max_forgetting is not None else ():
            values = list(_by_step(history, f"eval_{name}_accuracy").values())
            if values and values[0] - values[-1] > (self.section.max_forgetting or 0.0):
                return (
                    f"{name} is down from {values[0]:.3f} to {values[-1]:.3f}, more than probes.max_forgetting: "
                    f"{self.section.max_forgetting:g}; the run stops."
                )
        return ""

    def _impatient(self, args: Any, history: Sequence[Mapping[str, Any]]) -> str:
        if self.section.patience is None:
            return ""
        metric = args.metric_for_best_model, args.greater_is_better
        return impatient(history, metric, self.section.patience, "probes.patience")


def impatient(history: Sequence[Mapping[str, Any]], metric: tuple[str, bool], patience: int, key: str) -> str:
    """Return why a run stops where the last `patience` evaluations were no better than the best; "" where it goes on.

    `metric` is (its name, whether greater is better); an evaluation before the first step does not count. `key` is the
    recipe's.
    """
    name = f"eval_{metric[0].removeprefix('eval_')}"
    values = [value for step, value in _by_step(history, name).items() if step > 0]
    if not values:
        return ""
    best = max(values) if metric[1] else min(values)
    since = len(values) - 1 - values.index(best)
    if since < patience:
        return ""
    return f"{name} has not been better than {best:.3f} for {since} evaluations ({key}); the run stops."


def _by_step(history: Sequence[Mapping[str, Any]], key: str) -> dict[int, float]:
    """Return step -> the last value logged for it."""
    return {row["step"]: row[key] for row in history if key in row}
