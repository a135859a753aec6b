"""Answers that a model writes: greedy, many prompts in one packed row that share their beginnings
and refill as they end.

The row's columns are tokens; each sequence sees its own and those of the beginning that it shares
with the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer

from kinject.errors import InputError
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.encode import Encoded, Thinking
from kinject.eval.scoring.scorer import Scorer, is_out_of_memory
from kinject.models.generate import end_tokens, generate, generation_settings
from kinject.recipe import GeneratorSection

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Indices = npt.NDArray[np.int64]
_MOST_ACTIVE = 64  # sequences in the row
# Of sequences in the row, for their memory; one that is longer is alone in it.
_MOST_COLUMNS = 8192
_MOST_READ = 1024  # tokens of new prompts in one pass; a longer one is alone in it
# Of the largest logit: two tokens as close as this are decided by a pass of the sequence alone.
_CLOSE = 1e-4
_NOT_FINITE = PromptScore((float("nan"),), (False,))
"""Of a model whose logits are not finite."""
_ROWS = 16  # prompts of one length in a batch, where nothing is shared


class _Answer:
    """An answer as it is written: its tokens, the first `n_thinking` of them its thinking.

    `thinks` is None until its first tokens show it.
    """

    def __init__(self, generator: AnswerGenerator, prompt: Encoded) -> None:
        assert prompt.generation is not None
        self.generator, self.prompt, self.bounds = generator, prompt, prompt.generation
        self.stop = prompt.generation.stop or ()
        # Not in the text, from which special tokens are left out.
        self.stop_tokens = generator.special_tokens(self.stop)
        self.tokens: list[int] = []
        self.thinks: bool | None = False
        if prompt.thinking:
            self.thinks = True if prompt.thinking.is_open else None
        self.n_thinking, self.begun = 0, ""

    def add(self, token: int) -> bool:
        """Take the next token; return whether the answer has ended."""
        self.tokens.append(token)
        if token in self.generator.ends:
            return True
        n, thinking = len(self.tokens), self.prompt.thinking
        if thinking and self.thinks is not False:
            # Before the limit: thinking whose end is the last allowed token has ended.
            self._look_for_marks(thinking)
        if token in self.stop_tokens and not self.thinks:
            return True
        if n >= self.bounds.max_new_tokens:
            return True
        longest = max(map(len, self.stop), default=0)
        # A stop text within the thinking ends nothing.
        if not longest or self.thinks:
            return False
        # To decode the whole answer after each token would take quadratic time.
        return self._text(self.tokens[max(self.n_thinking, n - longest - 8) :])[1]

    def _look_for_marks(self, thinking: Thinking) -> None:
        """Find the marks around thinking; `begun` is the part of the answer in the token with the
        last of them."""
        marks, decode = thinking.marks, self.generator.tokenizer.decode
        if self.thinks is None:
            start = str(decode(self.tokens)).lstrip()
            if start.startswith(marks.opens):
                self.thinks = True
            # A beginning of the mark: further tokens decide.
            elif not marks.opens.startswith(start):
                self.thinks = False
        if self.thinks:
            end = str(decode(self.tokens[-len(marks.closes) - 8 :]))
            if marks.closes in end:
                self.thinks, self.n_thinking, self.begun = (
                    False,
                    len(self.tokens),
                    end.split(marks.closes)[-1],
                )

    def _text(self, tokens: Sequence[int]) -> tuple[str, bool]:
        """Return the text of `tokens` up to the first stop string, and whether there is one."""
        text = str(self.generator.tokenizer.decode(tokens, skip_special_tokens=True))
        starts = [index for stop in self.stop if (index := text.find(stop)) >= 0]
        return text[: min(starts, default=None)], bool(starts)

    def result(self) -> PromptScore:
        """Return the answer, without its end token and its thinking; thinking that never ends
        leaves none."""
        tokens = self.tokens
        if tokens and tokens[-1] in self.generator.ends | self.stop_tokens:
            tokens = tokens[:-1]
        if self.thinks:
            return PromptScore((), (), "", 0, len(tokens), thinking_cut=True)
        text = self._text(tokens[self.n_thinking :])[0]
        # The token that ends the thinking may hold the first characters of the answer.
        text = f"{self.begun}{text}".lstrip() if self.n_thinking else text
        return PromptScore((), (), text, len(tokens) - self.n_thinking, self.n_thinking)


@dataclass(slots=True)
class _Sequence:
    """A prompt being answered in the packed row: its index in the request, and its slot."""

    index: int
    slot: int
    answer: _Answer

    @property
    def tokens(self) -> _Indices:
        return np.concatenate([self.answer.prompt.contexts[0], self.answer.tokens]).astype(np.int64)


class AnswerGenerator:
    """Writes answers with the model of `scorer`, which knows whether it reads a token tree.
    `n_read` counts tokens."""

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the model of `scorer`; nothing is run yet."""
        self.scorer, self.forward = scorer, scorer.forward
        self.tokenizer: Any = tokenizer
        self.ends = frozenset(end_tokens(self.forward.model, tokenizer))
        settings = ", ".join(
            f"{name} {value}" for name, value in generation_settings(self.forward.model).items()
        )
        if settings:
            self._note(
                "answers are the likeliest tokens, without what its generation_config.json sets "
                f"({settings})"
            )
        # The model's own sampling and penalties would change the likeliest tokens.
        self.forward.model.generation_config = GenerationConfig()
        # Each new token is compared with every column, also with those that it does not see: in a
        # small model that takes longer than its weights do.
        self.most_columns = min(_MOST_COLUMNS, scorer.limits.width)
        self.exact = self.forward.model.dtype in (torch.float32, torch.float64)
        self.n_read = self.n_alone = 0

    def score(self, prompts: Sequence[Encoded]) -> Iterator[tuple[int, PromptScore]]:
        """Yield (index, written text) of every prompt, as they end.

        Each token is the likeliest one. In float32 it does not depend on the other prompts: where
        the two likeliest are as close as rounding, the sequence is read alone, and that decides. A
        text ends before the first stop string, at an end token, or after the most tokens. Thinking
        is taken off and counted. A model whose logits are not finite writes nothing: its log-prob
        is NaN.
        """
        plain = [index for index in range(len(prompts)) if self._is_plain(prompts[index])]
        yield from self._plain(prompts, plain)
        order = sorted(set(range(len(prompts))) - set(plain))
        if not order:
            return
        if not self.exact:
            self._note(
                "the last digits of its dtype may change a written answer with the batch; float32 "
                "does not"
            )
        yield from _Row(
            self, prompts, sorted(order, key=lambda index: prompts[index].contexts[0].tolist())
        ).run()

    def special_tokens(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the special tokens of the tokenizer that are written as one of `texts`."""
        if not texts:
            return frozenset()
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(n for n, token in added if token.special and token.content in texts)

    def _is_plain(self, prompt: Encoded) -> bool:
        """Return whether the answer to `prompt` is not written in the packed row."""
        if not self.scorer.uses_tree:
            return True
        limit = self.forward.longrope_window
        if limit is None:
            return False
        # In the row a long one would change the frequencies of all.
        assert prompt.generation is not None
        return len(prompt.contexts[0]) + prompt.generation.max_new_tokens > limit

    def _plain(
        self, prompts: Sequence[Encoded], order: Sequence[int]
    ) -> Iterator[tuple[int, PromptScore]]:
        """Yield the answers of a model that shares no prefix: prompts of one length in a batch, so
        that nothing is padded."""
        groups: dict[tuple[int, Any], list[int]] = defaultdict(list)
        for index in order:
            groups[len(prompts[index].contexts[0]), prompts[index].generation].append(index)
        if groups:
            self._note("answers are written in plain batches of prompts of one length")
        for (length, generation), indices in groups.items():
            for start in range(0, len(indices), _ROWS):
                batch = indices[start : start + _ROWS]
                answers = [_Answer(self, prompts[i]) for i in batch]
                contexts = [prompts[i].contexts[0].tolist() for i in batch]
                greedy = GeneratorSection(max_tokens=generation.max_new_tokens, temperature=0.0)
                written = generate(
                    self.forward.model,
                    greedy,
                    contexts,
                    [0] * len(batch),
                    sorted(self.ends),
                    has_ended=_Ended(answers),
                )
                self.n_read += sum(length + len(tokens) for tokens in written)
                for index, answer, tokens in zip(batch, answers, written, strict=True):
                    is_finite = bool(tokens)
                    yield index, answer.result() if is_finite else _NOT_FINITE

    def _note(self, text: str) -> None:
        if text not in self.scorer.notes:
            self.scorer.notes.append(text)


class _Ended:
    """Tells transformers which rows of a batch have ended; `answers` take their tokens."""

    def __init__(self, answers: Sequence[_Answer]) -> None:
        self.answers = answers
        self.has_ended = [False] * len(answers)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        for i, token in enumerate(input_ids[:, -1].tolist()):
            # A row that has ended gets padding, which is no part of its answer.
            self.has_ended[i] = self.has_ended[i] or self.answers[i].add(token)
        return torch.tensor(self.has_ended, device=input_ids.device)


# transformers' continuous batching takes 67 s where this row takes 8.4 s (docs/LOG.md).
class _Row:
    """The packed row: `depths` and `visible` [slots, columns] describe the columns in the cache.

    Prompts come in the order of their tokens, so that each shares the longest beginning with the
    one before it, `donor`.
    """

    def __init__(
        self, generator: AnswerGenerator, prompts: Sequence[Encoded], order: Sequence[int]
    ) -> None:
        self.generator, self.prompts = generator, prompts
        self.waiting = list(reversed(order))
        self.active: list[_Sequence] = []
        self.free = list(range(_MOST_ACTIVE))
        self.donor: _Indices = np.zeros(0, dtype=np.int64)
        self.cache = Cache(layer_class_to_replicate=_Columns)
        self.depths = np.zeros(0, dtype=np.int64)
        self.visible = np.zeros(
            (_MOST_ACTIVE + 1, 0), dtype=np.bool_
        )  # the last row: what the donor's prompt sees

    def run(self) -> Iterator[tuple[int, PromptScore]]:
        """Yield (index, answer) as sequences end, and let waiting prompts take their slots."""
        while self.waiting or self.active:
            n_columns = len(self.depths)
            slots = [sequence.slot for sequence in self.active]
            depths = [
                len(item.answer.prompt.contexts[0]) + len(item.answer.tokens) - 1
                for item in self.active
            ]
            tokens = [sequence.answer.tokens[-1] for sequence in self.active]
            # First, because columns are in the order in which their tokens are read below.
            self._add(slots, depths)
            for sequence, new_tokens, depth in self._admit():
                self.active.append(sequence)
                slots += [sequence.slot] * len(new_tokens)
                depths += range(depth, depth + len(new_tokens))
                tokens += new_tokens
            sequences = self.active
            logits = self._read(np.array(tokens), np.array(slots), len(self.depths) - n_columns)
            chosen = list(self._choose(logits))
            self.active = []
            for sequence, token in zip(sequences, chosen, strict=True):
                if token is None:
                    yield sequence.index, _NOT_FINITE
                    self._leave(sequence)
                    continue
                if sequence.answer.add(token):
                    yield sequence.index, sequence.answer.result()
                    self._leave(sequence)
                else:
                    self.active.append(sequence)
            self._compact()

    def _add(self, slots: Sequence[int], depths: Sequence[int]) -> None:
        """Add a column for each of `depths`, seen by the sequence in the slot beside it."""
        n = len(self.depths)
        self.depths = np.concatenate([self.depths, np.array(depths, dtype=np.int64)])
        self.visible = np.pad(self.visible, ((0, 0), (0, len(depths))))
        self.visible[list(slots), np.arange(n, n + len(depths))] = True

    def _admit(self) -> Iterator[tuple[_Sequence, list[int], int]]:
        """Yield waiting prompts that find room, with the tokens of each that are still to be read
        and their first depth."""
        n_read = 0
        while self.waiting and self.free:
            prompt = self.prompts[self.waiting[-1]]
            ids = prompt.contexts[0].astype(np.int64)
            n_shared = _n_shared(self.donor, ids)
            n_new = len(ids) - n_shared
            to_come = sum(
                sequence.answer.bounds.max_new_tokens - len(sequence.answer.tokens)
                for sequence in self.active
            )
            n_columns = int(self.visible.any(axis=0).sum()) + n_new + to_come
            # Where nothing is active the next prompt is admitted, however long it is.
            is_full = n_read + n_new > _MOST_READ or n_columns > self.generator.most_columns
            if self.active and is_full:
                return
            slot = self.free.pop()
            self.visible[slot] = self.visible[-1] & (self.depths < n_shared)
            self._add([slot] * n_new, range(n_shared, len(ids)))
            self.visible[-1], self.donor = self.visible[slot], ids
            n_read += n_new
            answer = _Answer(self.generator, prompt)
            yield _Sequence(self.waiting.pop(), slot, answer), ids[n_shared:].tolist(), n_shared

    def _read(self, tokens: _Indices, slots: _Indices, n: int) -> torch.Tensor:
        """Read the `n` new columns; return the logits [active, vocabulary] after the last token of
        each sequence."""
        # Tokens of a sequence are in a row, so the slot changes behind its last one.
        last = np.append(np.flatnonzero(np.diff(slots)), n - 1)
        generator = self.generator
        generator.n_read += n
        try:
            return generator.forward.append(
                self.cache, tokens, self.depths, self.visible[slots], last
            )
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            fault = f"Out of memory with {n} tokens in one pass and {len(self.depths)} in the cache"
            raise InputError(
                f"{fault}. Use shorter passages, fewer examples or a smaller dtype."
            ) from error

    def _choose(self, logits: torch.Tensor) -> Iterator[int | None]:
        """Yield the next token of each active sequence, None if its logits are not finite."""
        best, chosen = logits.topk(2).values, logits.argmax(-1)
        close = (best[:, 0] - best[:, 1]) <= _CLOSE * best[:, 0].abs().clamp(min=1)
        finite = best[:, 0].isfinite()
        rows = zip(self.active, chosen.tolist(), close.tolist(), finite.tolist(), strict=True)
        for sequence, token, is_close, is_finite in rows:
            if not is_finite:
                yield None
            elif is_close and self.generator.exact:
                self.generator.n_alone += 1
                yield self.generator.forward.likeliest_alone(sequence.tokens)
            else:
                yield token

    def _leave(self, sequence: _Sequence) -> None:
        self.visible[sequence.slot] = False
        self.free.append(sequence.slot)

    def _compact(self) -> None:
        """Take out columns that no sequence sees any more, once they are most of the row."""
        kept = np.flatnonzero(self.visible.any(axis=0))
        # Seldom, because it copies all keys and values.
        if len(self.depths) > 2 * len(kept) + _MOST_READ:
            self.depths, self.visible = self.depths[kept], self.visible[:, kept]
            for layer in self.cache.layers:
                layer.keep(kept)


def _n_shared(donor: _Indices, ids: _Indices) -> int:
    """Return how many tokens `ids` begins with that `donor` begins with too; its last one is always
    read."""
    n = min(len(donor), len(ids) - 1)
    differs = np.flatnonzero(donor[:n] != ids[:n])
    return int(differs[0]) if len(differs) else n


class _Columns(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, shape [1, heads, columns, head size], in buffers that double
    when they are full.

    Everything is kept, because the mask implements sliding windows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    buffers: Sequence[torch.Tensor] = ()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new states, [1, heads, L, head size]; return all."""
        start, new = self.get_seq_length(), (key_states, value_states)
        n = start + key_states.shape[-2]
        if not self.buffers or self.buffers[0].shape[-2] < n:
            size = max(2 * n, _MOST_READ)
            self.buffers = [
                states.new_empty((*states.shape[:2], size, states.shape[-1])) for states in new
            ]
            for buffer, old in zip(self.buffers, (self.keys, self.values), strict=True):
                if start:
                    buffer[:, :, :start] = old
        for buffer, states in zip(self.buffers, new, strict=True):
            buffer[:, :, start:n] = states
        self.keys, self.values = (buffer[:, :, :n] for buffer in self.buffers)
        self.is_initialized = True
        return self.keys, self.values

    def keep(self, columns: _Indices) -> None:
        """Keep only `columns`, in order."""
        index = torch.from_numpy(columns).to(self.keys.device)
        with torch.inference_mode():
            self.keys, self.values = self.keys[:, :, index], self.values[:, :, index]
        # The selected states are copies: the next update puts them into buffers again.
        self.buffers = ()
