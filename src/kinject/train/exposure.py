"""The order in which training reads documents: at growing gaps, and more often those that are not known yet.

A run is divided into phases of equally many updates. The rows of a phase are chosen when it begins, from the state in which
the phase before left the documents (how often each was read, when it is due) and from the answers to the probe questions.
Everything is drawn from the seed and the state, so that processes agree and a resumed run reads the same rows.

* Documents are read in turn, each as often as it has texts (stride scheduling, Waldspurger and Weihl, 1995): with equal
  weights the texts of a document are equally far apart. A document that is known has a smaller weight.
* ``order: spaced``: after its k-th reading a document is due after ``first_gap * growth ** (k - 1)`` updates (expanding
  rehearsal, Landauer and Bjork, 1978; for networks Amiri et al., D17-1255). A wrong answer makes k 0 again, as in Leitner's
  boxes. New documents begin when none is due.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kinject.corpus.packing import ConcatRows, PackedRows, PackingConfig, Segment, TrainingRow, cut, fill_rows
from kinject.corpus.tokenize import LazyRows, TokenAccount, TokenRow
from kinject.recipe import TrainRecipe
from kinject.recipe.data_sections import ExposureSection
from kinject.types import Question

REST, MOST, FIRST_GAP, GROWTH = 0.2, 3.0, 4, 2.0
"""Defaults of the section."""
_WINDOW = 8
"""Rows that are packed together at least, if a phase has so many: fewer leave room unused."""
_PHASE = 256
"""Updates of a phase if no probes decide."""


def steps_of_phase(recipe: TrainRecipe, max_steps: int) -> int:
    """Return the updates of a phase: those between two evaluations if probes decide."""
    if recipe.exposure.read_again == "all":
        return min(_PHASE, max_steps)
    every = recipe.trainer.get("eval_steps") or recipe.trainer.get("logging_steps", 10)  # Trainer's own default
    return math.ceil(max_steps * every) if every < 1 else int(every)


@dataclass(frozen=True)
class Pool:
    """Texts to read from: the corpus, replay, or a corpus mixed in, with its fraction of the tokens that are read."""

    name: str
    rows: Sequence[TokenRow]
    fraction: float
    is_replay: bool = False


@dataclass
class ReadingState:
    """The documents at the beginning of a phase; arrays have one entry a document.

    `cursor` counts the texts of a document that were chosen, `readings` and `learned` its texts and tokens in rows. `time`
    is when it is due: in turns of its group, or in updates if it is spaced. `gap` is its number of readings since the last
    wrong answer. `weight` is 1 for a document that is not known. `streak` is the number of probes in a row in which its
    questions were right (`right`: how many in the last one), `since` the step of the first of them. `carry` are segments
    that await a row.
    """

    phase: int
    n_tokens: int
    cursor: npt.NDArray[np.int64]
    readings: npt.NDArray[np.int64]
    learned: npt.NDArray[np.int64]
    time: npt.NDArray[np.float64]
    gap: npt.NDArray[np.int64]
    weight: npt.NDArray[np.float64]
    streak: npt.NDArray[np.int64]
    since: npt.NDArray[np.int64]
    right: npt.NDArray[np.int64]
    clock: npt.NDArray[np.float64]
    carry: list[tuple[int, int, int]] = field(default_factory=list)

    def copy(self) -> ReadingState:
        """Return a copy that shares nothing."""
        values = {name: value.copy() if hasattr(value, "copy") else value for name, value in vars(self).items()}
        return ReadingState(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values; reading them back gives the same state, to the bit."""
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ReadingState:
        """Return the state of `to_json`."""
        kinds = {name: np.float64 if name in ("time", "weight", "clock") else np.int64 for name in values}
        arrays = {
            name: np.array(value, dtype=kinds[name]) if isinstance(value, list) and name != "carry" else value
            for name, value in values.items()
        }
        return cls(**{**arrays, "carry": [tuple(item) for item in values["carry"]]})  # type: ignore[arg-type]


class PhaseRows(LazyRows[TrainingRow]):
    """The rows of the current phase: always as many, other ones in each phase."""

    def __init__(self, n_rows: int) -> None:
        self.n_rows = n_rows
        self.current: PackedRows

    def __len__(self) -> int:
        return self.n_rows

    def read_row(self, index: int) -> TrainingRow:
        """Return the row with this number."""
        return self.current.read_row(index)

    @property
    def source(self) -> Sequence[TokenRow]:
        """The texts that the rows are made of, those of the corpus first."""
        return self.current.source

    def segments(self, index: int) -> list[tuple[int, int, int]]:
        """Return (row of the source, start, end) of each segment of one row."""
        return self.current.segments(index)

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the tokens of each row."""
        return self.current.lengths()


@dataclass(frozen=True)
class Documents:
    """The documents of all pools: names (of replay too), and the texts of each by their numbers in the source.

    ``texts[starts[d]:starts[d + 1]]`` are those of document d in the order in which they are read; `of_row` is the document
    of each row of the source, -1 for none. `group` is 2p for documents of pool p without probe questions, 2p + 1 for those
    with.
    """

    names: list[str]
    texts: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    n_texts: npt.NDArray[np.int64]
    of_row: npt.NDArray[np.int64]
    group_tokens: npt.NDArray[np.int64]


def _gather(pools: Sequence[Pool], packing: PackingConfig, probed: set[str], seed: int) -> Documents:
    """Return the documents of `pools`; a row without a document is one of its own.

    Texts without a token to learn are left out.
    """
    numbers: dict[tuple[int, str], int] = {}
    names: list[str] = []
    groups: list[int] = []
    document_of, indices = [], []
    tokens = np.zeros(2 * len(pools), dtype=np.int64)
    index = 0
    for p, pool in enumerate(pools):
        for number, row in enumerate(pool.rows):
            if cut(row, index, packing, TokenAccount()):
                name = row.document_id or f"row {number}"
                d = numbers.setdefault((p, name), len(names))
                if d == len(names):
                    names.append(name)
                    groups.append(2 * p + (row.document_id in probed))
                document_of.append(d)
                indices.append(index)
                tokens[groups[d]] += len(row.input_ids)
            index += 1
    shuffled = np.random.default_rng([seed, len(indices)]).permutation(len(indices))
    by_document = shuffled[np.argsort(np.array(document_of, dtype=np.int64)[shuffled], kind="stable")]
    n_texts, of_row = np.bincount(document_of, minlength=len(names)), np.full(index, -1)
    of_row[indices] = document_of
    return Documents(
        names, np.array(indices, dtype=np.int64)[by_document], np.concatenate([[0], np.cumsum(n_texts)]),
        np.array(groups, dtype=np.int64), n_texts, of_row, tokens,
    )  # fmt: skip


class ReadingPlan:
    """Chooses the rows of each phase of a run and counts the rows read.

    `n_steps` are the updates of a phase, `rows_per_step` the rows of one, over all devices. `questions` are those of the
    deciding probe sets. `rows` holds the rows of the current phase.
    """

    def __init__(
        self,
        section: ExposureSection,
        pools: Sequence[Pool],
        packing: PackingConfig,
        seed: int,
        n_steps: int,
        rows_per_step: int,
        questions: Mapping[str, Sequence[Question]],
    ) -> None:
        self.section, self.pools, self.seed = section, pools, seed
        self.packing = dataclasses.replace(packing, order="interleaved")
        self.n_steps, self.rows_per_step = n_steps, rows_per_step
        self.source = ConcatRows([pool.rows for pool in pools])
        probed = {question.document_id for items in questions.values() for question in items} - {""}
        self.documents = _gather(pools, packing, probed, seed)
        self.probed_documents = self._link(questions)
        self.rows = PhaseRows(n_steps * rows_per_step)
        rng = np.random.default_rng([seed, len(self.documents.names)])
        n = len(self.documents.names)
        stride = 1.0 / np.maximum(self.documents.n_texts, 1)
        zeros = [np.zeros(n, dtype=np.int64) for _ in range(6)]
        self.offsets = rng.random(n)
        self.state = ReadingState(
            phase=0, n_tokens=0, cursor=zeros[0], readings=zeros[1], learned=zeros[2], time=self.offsets * stride,
            gap=zeros[3], weight=np.ones(n), streak=zeros[4], since=np.full(n, -1), right=zeros[5],
            clock=np.zeros(2 * len(pools)),
        )  # fmt: skip
        self._after: ReadingState | None = None
        self.begin(0)

    def _link(self, questions: Mapping[str, Sequence[Question]]) -> dict[str, list[list[int]]]:
        """Return for each set the documents of each of its questions; a document in two pools is two."""
        numbers: dict[str, list[int]] = {}
        for d in np.flatnonzero(self.documents.group % 2).tolist():
            numbers.setdefault(self.documents.names[d], []).append(d)
        return {
            name: [numbers.get(question.document_id, []) for question in items] for name, items in questions.items()
        }

    def begin(self, phase: int) -> None:
        """Choose the rows of a phase, unless they are those already."""
        while self._after is None or self.state.phase < phase:
            if self._after is not None:
                self.state = self._after
            self._after = self._choose(self.state)

    def decide(self, margins: Mapping[str, Sequence[float]], step: int) -> dict[str, float]:
        """Take the answers of the probes at the end of a phase (or before the first); return what to log.

        `margins` are, for each question of each set, the nats by which its answer leads the other choices; a question
        counts as known above ``section.margin``, one without a score (NaN) as unknown.
        """
        if step % self.n_steps == 0 and self.section.read_again == "unknown":
            if self._after is not None and step == self.n_steps * self._after.phase:
                self.state = self._after
            self._after = None
            self._take_answers(self.state, margins, step)
        return self._counts()

    def _take_answers(self, state: ReadingState, margins: Mapping[str, Sequence[float]], step: int) -> None:
        n = len(self.documents.names)
        n_questions, state.right = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        for name, documents_of in self.probed_documents.items():
            for documents, margin in zip(documents_of, margins[name], strict=True):
                for d in documents:
                    n_questions[d] += 1
                    state.right[d] += margin > (self.section.margin or 0.0)
        patience = self.section.patience
        for d in np.flatnonzero(self.documents.group % 2).tolist():
            if state.right[d] < n_questions[d]:
                state.streak[d], state.since[d] = 0, -1
                self._reweigh(state, d, 1.0)
                if self.section.order == "spaced":
                    state.gap[d], state.time[d] = 0, min(state.time[d], float(step))
                continue
            state.streak[d] += 1
            state.since[d] = step if state.since[d] < 0 else state.since[d]
            is_done = patience is not None and state.streak[d] >= patience
            self._reweigh(state, d, 0.0 if is_done else REST if self.section.rest is None else self.section.rest)

    def _reweigh(self, state: ReadingState, d: int, weight: float) -> None:
        """Give a document another weight; the rest of its turn becomes as much longer or shorter."""
        old, state.weight[d] = float(state.weight[d]), weight
        if weight in (0.0, old) or (self.section.order == "spaced" and not self._is_replay(d)):
            return
        clock = state.clock[self.documents.group[d]]
        if old:
            state.time[d] = clock + (state.time[d] - clock) * old / weight
        else:
            state.time[d] = clock + self.offsets[d] / (self.documents.n_texts[d] * weight)

    def _is_replay(self, d: int) -> bool:
        return self.pools[int(self.documents.group[d]) // 2].is_replay

    def _fractions(self, state: ReadingState) -> dict[int, float]:
        """Return the fraction of the tokens that each group gets, only groups of which something is read."""
        documents = self.documents
        natural, alive, unused = {}, {}, 0.0
        for g in np.unique(documents.group).tolist():
            pool, members = self.pools[g // 2], documents.group == g
            of_pool = documents.group_tokens[2 * (g // 2) : 2 * (g // 2) + 2].sum()
            natural[g] = float(pool.fraction * documents.group_tokens[g] / of_pool)
            n_texts = documents.n_texts[members]
            mean_weight = float((n_texts * state.weight[members]).sum() / n_texts.sum())
            if not mean_weight:
                unused += natural[g]
            elif pool.is_replay or self.section.read_again == "all":
                alive[g] = natural[g]
            else:
                alive[g] = natural[g] * min(
                    1.0, mean_weight * (MOST if self.section.most is None else self.section.most)
                )
                unused += natural[g] - alive[g]
        replay = {g: fraction for g, fraction in alive.items() if self.pools[g // 2].is_replay}
        for g, fraction in (replay or alive).items():
            alive[g] += unused * fraction / sum((replay or alive).values())
        return alive or natural

    def _choose(self, state: ReadingState) -> ReadingState:
        """Choose the rows of the phase that begins with `state`; return the state after it."""
        after, rng = state.copy(), random.Random(f"{self.seed} {state.phase}")
        after.phase += 1
        fractions = self._fractions(state)
        queues = {g: self._queue(after, g) for g in fractions}
        used = dict.fromkeys(fractions, 0.0)
        rows = PackedRows(self.source, joined=False)
        waiting = [self._segment(*item) for item in state.carry]
        block = self.packing.block if self.packing.strategy is not None else None
        window = self.rows_per_step * (-(-_WINDOW // self.rows_per_step) if block else 1)
        first = state.phase * self.n_steps
        while len(rows) < len(self.rows):
            n_rows = min(window, len(self.rows) - len(rows))
            step = first + len(rows) // self.rows_per_step
            while (sum(s.size for s in waiting) < n_rows * block) if block else len(waiting) < n_rows:
                g = min(used, key=lambda g: used[g] / fractions[g])
                segments = self._next_text(after, queues[g](step))
                used[g] += sum(segment.size for segment in segments)
                waiting += segments
            filled, waiting = fill_rows(waiting, self.packing, n_rows)
            rng.shuffle(filled)
            for row in filled:
                rows.append([(s.row, s.start, s.end) for s in row], 0)
        after.carry = [(s.row, s.start, s.end) for s in waiting]
        self._count(after, rows, len(rows))
        self.rows.current = rows
        return after

    def _segment(self, row: int, start: int, end: int) -> Segment:
        return Segment(row, start, end, self.source[row].document_id)

    def _next_text(self, state: ReadingState, d: int) -> list[Segment]:
        start, n = int(self.documents.starts[d]), int(self.documents.n_texts[d])
        index = int(self.documents.texts[start + state.cursor[d] % n])
        state.cursor[d] += 1
        return cut(self.source[index], index, self.packing, TokenAccount())

    def _queue(self, state: ReadingState, group: int) -> Callable[[int], int]:
        """Return a function of the step that returns the next document of a group and notes that it is read."""
        members = [d for d in np.flatnonzero(self.documents.group == group).tolist() if state.weight[d]]
        members = members or np.flatnonzero(self.documents.group == group).tolist()
        if self.section.order == "spaced" and not self.pools[group // 2].is_replay:
            return self._spaced(state, members)
        heap = [(float(state.time[d]), d) for d in members]
        heapq.heapify(heap)

        def take(_: int) -> int:
            time, d = heap[0]
            state.clock[group] = time
            state.time[d] = time + 1.0 / (self.documents.n_texts[d] * (state.weight[d] or 1.0))
            heapq.heapreplace(heap, (float(state.time[d]), d))
            return d

        return take

    def _spaced(self, state: ReadingState, members: Sequence[int]) -> Callable[[int], int]:
        first_gap, growth = self.section.first_gap or FIRST_GAP, self.section.growth or GROWTH
        heap = [(float(state.time[d]), d) for d in members if state.cursor[d]]
        heapq.heapify(heap)
        new = sorted((d for d in members if not state.cursor[d]), key=lambda d: -self.offsets[d])

        def take(step: int) -> int:
            d = new.pop() if new and not (heap and heap[0][0] <= step) else heapq.heappop(heap)[1]
            state.time[d] = step + min(first_gap * growth ** float(state.gap[d]), 1e15)
            state.gap[d] += 1
            heapq.heappush(heap, (float(state.time[d]), d))
            return d

        return take

    def _count(self, state: ReadingState, rows: PackedRows, n_rows: int) -> None:
        """Add the first `n_rows` rows to `state`: tokens, and readings and learned tokens of each document."""
        for index in range(n_rows):
            for number, start, end in rows.segments(index):
                d = self.documents.of_row[number]
                state.n_tokens += end - start
                state.readings[d] += start == 0
                state.learned[d] += int(np.count_nonzero(np.asarray(self.source[number].learned[start + 1 : end])))

    def describe(self) -> str:
        """Return a line for the log: the phases, and how many documents the probes decide about."""
        n_probed, n = int((self.documents.group % 2).sum()), len(self.documents.names)
        decided = (
            f"; probes decide about {n_probed:,} of {n:,} documents" if self.section.read_again == "unknown" else ""
        )
        unlinked = sum(not documents for items in self.probed_documents.values() for documents in items)
        more = f" ({unlinked:,} questions name no document that can be read)" if unlinked else ""
        return f"exposure: {self.section.order}, rows are chosen every {self.n_steps:,} updates{decided}{more}"

    def read_until(self, step: int) -> ReadingState:
        """Return the state with the rows read after `step` updates, which must not lie before the current phase."""
        state = self.state.copy()
        n = min(step - state.phase * self.n_steps, self.n_steps)
        if n > 0:
            self._count(state, self.rows.current, n * self.rows_per_step)
        return state

    def tokens_until(self, step: int) -> int:
        """Return the tokens that were read after `step` updates of this phase or at its beginning."""
        n = min(step - self.state.phase * self.n_steps, self.n_steps)
        return self.state.n_tokens + int(self.rows.current.lengths()[: n * self.rows_per_step].sum())

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue from a state that a checkpoint holds."""
        self.state, self._after = ReadingState.from_json(values), None
        self.begin(self.state.phase)

    def _counts(self) -> dict[str, float]:
        """Return how many documents are known; with patience also how many are not finished."""
        is_probed, streak = self.documents.group % 2 == 1, self.state.streak
        replayed = np.array([pool.is_replay for pool in self.pools])[self.documents.group // 2]
        counts = {}
        for name, members in (
            ("known_documents", is_probed & ~replayed),
            ("known_replayed_documents", is_probed & replayed),
        ):
            if members.any():
                counts[name] = float((streak[members] > 0).sum())
        if self.section.patience is not None:
            unfinished = np.where(is_probed, self.state.weight > 0, ~replayed)
            counts["unfinished_documents"] = float(unfinished.sum())
        return counts

    def exposures(self, step: int) -> dict[str, tuple[int, int]]:
        """Return (texts, learned tokens) that were read of each document that is not replay."""
        state = self.read_until(step)
        counts: dict[str, tuple[int, int]] = {}
        for d, name in enumerate(self.documents.names):
            if not self._is_replay(d):
                texts, tokens = counts.get(name, (0, 0))
                counts[name] = (texts + int(state.readings[d]), tokens + int(state.learned[d]))
        return counts

    def rows_by_document(self, step: int) -> Iterable[dict[str, Any]]:
        """Yield a row for each document: how often it was read, and since which step its questions have been right."""
        state = self.read_until(step)
        for d, name in enumerate(self.documents.names):
            row = {"document_id": name, "replay": self._is_replay(d), "exposures": int(state.readings[d])}
            if self.documents.group[d] % 2:
                since = int(state.since[d])
                row |= {"right": int(state.right[d]), "known_since": since if since >= 0 else None}
            yield row


def count_exposures(rows: Iterable[TokenRow]) -> dict[str, tuple[int, int]]:
    """Return (texts, learned tokens) of each document of `rows`; a row without a document is one of its own."""
    n_rows: Counter[str] = Counter()
    n_tokens: Counter[str] = Counter()
    for index, row in enumerate(rows):
        name = row.document_id or f"row {index}"
        n_rows[name] += 1
        n_tokens[name] += int(np.count_nonzero(np.asarray(row.learned)))
    return {name: (n_rows[name], n_tokens[name]) for name in n_rows}


def summarize_exposures(exposures: Mapping[str, tuple[int, int]], epochs: float) -> dict[str, Any]:
    """Return how often a run of `epochs` shows each document: least, median and most rows and tokens."""
    if not exposures:
        return {"documents": 0}
    counts = {"rows": [n for n, _ in exposures.values()], "tokens": [n for _, n in exposures.values()]}
    functions: dict[str, Callable[[list[int]], float]] = {"min": min, "median": statistics.median, "max": max}
    return {"documents": len(exposures)} | {
        name: {key: round(function(values) * epochs, 2) for key, function in functions.items()}
        for name, values in counts.items()
    }


def exposures_by_document(exposures: Mapping[str, tuple[int, int]], epochs: float) -> dict[str, float]:
    """Return how many rows (paraphrases) of each document a run of `epochs` reads, repeats counted."""
    return {name: round(n_rows * epochs, 3) for name, (n_rows, _) in exposures.items()}
