"""Answers that a model writes: greedy, many prompts in one packed row that share their beginnings and refill as they end.

The row's columns are tokens; each sequence sees its own and those of the beginning that it shares with the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from kinject.errors import InputError
from kinject.eval.scores import PromptScore
from kinject.eval.scoring.encode import Encoded
from kinject.eval.scoring.scorer import Scorer, is_out_of_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Indices = npt.NDArray[np.int64]
_MOST_ACTIVE = 64  # sequences in the row
_MOST_COLUMNS = 8192  # of sequences in the row; one that is longer is alone in it
_MOST_READ = 1024  # tokens of new prompts in one pass; a longer one is alone in it
_CLOSE = 1e-4  # of the largest logit: two tokens as close as this are decided by a pass of the sequence alone
_ROWS = 16  # prompts of one length in a batch, where nothing is shared


@dataclass(slots=True)
class _Sequence:
    """A prompt being answered: its place in the request, its tokens, and those written so far."""

    index: int
    prompt: Encoded
    slot: int
    written: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> _Indices:
        return np.concatenate([self.prompt.contexts[0], self.written]).astype(np.int64)


class Generator:
    """Writes answers with one model; `scorer` holds it, and knows whether it reads a token tree. `n_read` counts tokens."""

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase) -> None:
        """Take the model of `scorer`; nothing is run yet."""
        self.scorer, self.forward = scorer, scorer.forward
        self.tokenizer: Any = tokenizer
        ends = self.forward.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.ends = frozenset(end for end in (*ends, self.tokenizer.eos_token_id) if end is not None)
        self.forward.model.generation_config = GenerationConfig()  # penalties of its own are no part of the question
        self.exact = self.forward.model.dtype in (torch.float32, torch.float64)
        self.n_read = self.n_alone = 0

    def score(
        self, prompts: Sequence[Encoded], done: Collection[int] = frozenset()
    ) -> Iterator[tuple[int, PromptScore]]:
        """Yield (index, written text) of every prompt that is not in `done`, as they end.

        Each token is the likeliest one. In float32 it does not depend on the other prompts: where the two likeliest are as
        close as rounding, the sequence is read alone, and that decides. A text ends before the first stop string, at an end
        token, or after the most tokens. A model whose logits are not finite writes nothing: its log-prob is NaN.
        """
        order = [index for index in range(len(prompts)) if index not in done]
        if not order:
            return
        if not self.scorer.uses_tree:
            yield from self._plain(prompts, order)
            return
        if not self.exact:
            self._note("the last digits of its dtype may change a written answer with the batch; float32 does not")
        yield from _Row(self, prompts, sorted(order, key=lambda index: prompts[index].contexts[0].tolist())).run()

    def text(self, prompt: Encoded, written: Sequence[int]) -> tuple[str, bool]:
        """Return the text of the tokens `written`, up to the first stop string, and whether there is one."""
        text = str(self.tokenizer.decode(written, skip_special_tokens=True))
        assert prompt.generation is not None
        starts = [at for stop in prompt.generation.stop if (at := text.find(stop)) >= 0]
        return text[: min(starts, default=None)], bool(starts)

    def is_done(self, prompt: Encoded, written: Sequence[int]) -> bool:
        """Return whether an answer of the tokens `written` has ended."""
        assert prompt.generation is not None
        if written[-1] in self.ends or len(written) >= prompt.generation.max_new_tokens:
            return True
        longest = max(map(len, prompt.generation.stop), default=0)
        return longest > 0 and self.text(prompt, written[-longest - 8 :])[1]

    def result(self, prompt: Encoded, written: Sequence[int]) -> PromptScore:
        """Return the answer whose tokens are `written`, its end token among them."""
        own = written[:-1] if written and written[-1] in self.ends else written
        return PromptScore((), (), self.text(prompt, own)[0], len(own))

    def _plain(self, prompts: Sequence[Encoded], order: Sequence[int]) -> Iterator[tuple[int, PromptScore]]:
        """Yield the answers of a model that shares no prefix: prompts of one length in a batch, so that nothing is padded."""
        groups: dict[tuple[int, Any], list[int]] = defaultdict(list)
        for index in order:
            groups[len(prompts[index].contexts[0]), prompts[index].generation].append(index)
        self._note("answers are written in plain batches of prompts of one length")
        pad = min(self.ends, default=0)
        for (length, generation), indices in groups.items():
            for start in range(0, len(indices), _ROWS):
                batch = indices[start : start + _ROWS]
                ids = torch.from_numpy(np.stack([prompts[i].contexts[0] for i in batch]).astype(np.int64))
                config = GenerationConfig(
                    max_new_tokens=generation.max_new_tokens, do_sample=False, eos_token_id=sorted(self.ends) or None,
                    pad_token_id=pad,
                )  # fmt: skip
                ended = _Ended(self, [prompts[i] for i in batch], length)
                with torch.inference_mode():
                    whole = self.forward.model.generate(
                        ids.to(self.forward.device), attention_mask=torch.ones_like(ids).to(self.forward.device),
                        generation_config=config, stopping_criteria=StoppingCriteriaList([ended]),
                    )  # fmt: skip
                self.n_read += whole.numel()
                for i, row in zip(batch, whole[:, length:].tolist(), strict=True):
                    n = next((n for n in range(1, len(row)) if self.is_done(prompts[i], row[:n])), len(row))
                    yield i, self.result(prompts[i], row[:n])

    def _note(self, text: str) -> None:
        if text not in self.scorer.notes:
            self.scorer.notes.append(text)


class _Ended(StoppingCriteria):  # type: ignore[misc]
    """Tells transformers which rows of a batch have ended."""

    def __init__(self, generator: Generator, prompts: Sequence[Encoded], length: int) -> None:
        self.generator, self.prompts, self.length = generator, prompts, length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        pairs = zip(self.prompts, input_ids[:, self.length :].tolist(), strict=True)
        ended = [self.generator.is_done(prompt, written) for prompt, written in pairs]
        return torch.tensor(ended, device=input_ids.device)


class _Row:
    """The packed row: `depths` and `visible` [slots, columns] describe the columns in the cache.

    Prompts come in the order of their tokens, so that each shares the longest beginning with the one before it, `donor`.
    """

    def __init__(self, generator: Generator, prompts: Sequence[Encoded], order: Sequence[int]) -> None:
        self.generator, self.prompts = generator, prompts
        self.waiting = list(reversed(order))
        self.active: list[_Sequence] = []
        self.free = list(range(_MOST_ACTIVE))
        self.donor: _Indices = np.zeros(0, dtype=np.int64)
        self.cache = Cache(layer_class_to_replicate=_Columns)
        self.depths = np.zeros(0, dtype=np.int64)
        self.visible = np.zeros((_MOST_ACTIVE + 1, 0), dtype=np.bool_)  # the last row: what the donor's prompt sees

    def run(self) -> Iterator[tuple[int, PromptScore]]:
        """Yield (index, answer) as sequences end, and let waiting prompts take their slots."""
        while self.waiting or self.active:
            n_columns = len(self.depths)
            slots = [sequence.slot for sequence in self.active]
            depths = [len(sequence.prompt.contexts[0]) + len(sequence.written) - 1 for sequence in self.active]
            tokens = [sequence.written[-1] for sequence in self.active]
            self._add(slots, depths)
            for sequence, own, depth in self._admit():
                self.active.append(sequence)
                slots += [sequence.slot] * len(own)
                depths += range(depth, depth + len(own))
                tokens += own
            sequences = self.active
            logits = self._read(np.array(tokens), np.array(slots), len(self.depths) - n_columns)
            chosen = list(self._choose(logits))
            self.active = []
            for sequence, token in zip(sequences, chosen, strict=True):
                if token is None:
                    yield sequence.index, PromptScore((float("nan"),), (False,))
                    self._leave(sequence)
                    continue
                sequence.written.append(token)
                if self.generator.is_done(sequence.prompt, sequence.written):
                    yield sequence.index, self.generator.result(sequence.prompt, sequence.written)
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
        """Yield waiting prompts that find room, with the tokens of each that are still to be read and their first depth."""
        n_read = 0
        while self.waiting and self.free:
            prompt = self.prompts[self.waiting[-1]]
            ids = prompt.contexts[0].astype(np.int64)
            n_shared = _n_shared(self.donor, ids)
            n_new = len(ids) - n_shared
            n_columns = int(self.visible.any(axis=0).sum()) + n_new
            if self.active and (n_read + n_new > _MOST_READ or n_columns > _MOST_COLUMNS):
                return
            slot = self.free.pop()
            self.visible[slot] = self.visible[-1] & (self.depths < n_shared)
            self._add([slot] * n_new, range(n_shared, len(ids)))
            self.visible[-1], self.donor = self.visible[slot], ids
            n_read += n_new
            yield _Sequence(self.waiting.pop(), prompt, slot), ids[n_shared:].tolist(), n_shared

    def _read(self, tokens: _Indices, slots: _Indices, n: int) -> torch.Tensor:
        """Read the `n` new columns; return the logits [active, vocabulary] after the last token of each sequence."""
        last = np.append(np.flatnonzero(np.diff(slots)), n - 1)
        generator = self.generator
        generator.n_read += n
        try:
            return generator.forward.append(self.cache, tokens, self.depths, self.visible[slots], last)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            fault = f"Out of memory with {n} tokens in one pass and {len(self.depths)} in the cache"
            raise InputError(f"{fault}. Use shorter passages, fewer examples or a smaller dtype.") from error

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
        """Take out columns that nobody sees any more, once they are most of the row."""
        kept = np.flatnonzero(self.visible.any(axis=0))
        if len(self.depths) > 2 * len(kept) + _MOST_READ:
            self.depths, self.visible = self.depths[kept], self.visible[:, kept]
            for layer in self.cache.layers:
                layer.keep(kept)


def _n_shared(donor: _Indices, ids: _Indices) -> int:
    """Return how many tokens `ids` begins with that `donor` begins with too; its last one is always read."""
    n = min(len(donor), len(ids) - 1)
    differs = np.flatnonzero(donor[:n] != ids[:n])
    return int(differs[0]) if len(differs) else n


class _Columns(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, shape [1, heads, columns, head size], in a buffer that doubles when it is full.

    Everything is kept, because the mask implements sliding windows.
    """

    is_sliding = False

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None
        self.n = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: `update` allocates."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new states, [1, heads, L, head size]; return all."""
        n = self.n + key_states.shape[-2]
        keys, values = self._room(self.keys, key_states, n), self._room(self.values, value_states, n)
        keys[:, :, self.n : n], values[:, :, self.n : n] = key_states, value_states
        self.keys, self.values, self.n = keys, values, n
        return keys[:, :, :n], values[:, :, :n]

    def _room(self, buffer: torch.Tensor | None, states: torch.Tensor, n: int) -> torch.Tensor:
        if buffer is not None and buffer.shape[-2] >= n:
            return buffer
        larger = states.new_empty((*states.shape[:2], max(2 * n, _MOST_READ), states.shape[-1]))
        if buffer is not None:
            larger[:, :, : self.n] = buffer[:, :, : self.n]
        return larger

    def keep(self, columns: _Indices) -> None:
        """Keep only `columns`, in order."""
        assert self.keys is not None
        assert self.values is not None
        index = torch.from_numpy(columns).to(self.keys.device)
        with torch.inference_mode():
            self.keys, self.values = self.keys[:, :, index], self.values[:, :, index]
        self.n = len(columns)

    def get_seq_length(self) -> int:
        """Return the number of columns."""
        return self.n

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns attended to, offset 0)."""
        return self.n + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: no bound."""
        return -1
