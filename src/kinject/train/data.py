"""From the corpora of a recipe to batches: rows are read, tokenised, mixed and packed; batches are
padded when read."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kinject.corpus.chat import ChatFormat
from kinject.corpus.packing import ConcatRows, PackedRows, PackingConfig, PickedRows, pack
from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusFile, CorpusRow, Shape
from kinject.corpus.tokenize import (
    IGNORED,
    TokenAccount,
    Tokenization,
    TokenRow,
    begins_with_bos,
    cached_tokens,
    entry_key,
    sample_tokens,
    tokenize_rows,
    wanted_tokens,
)
from kinject.disk import content_id
from kinject.errors import TrainingError, fault
from kinject.models import window_of
from kinject.recipe import CorpusSection, TrainRecipe
from kinject.recipe.sections import Reaction
from kinject.train.config import trainer_field
from kinject.train.load import set_chat_template
from kinject.train.objectives import row_weights
from kinject.train.objectives.distillation import (
    NO_TEACHER,
    TeacherRows,
    describe_heads,
    teacher_rows,
)
from kinject.types import Question

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

REPLAY = "replay"
"""The name of the part that is replay, and the origin of its rows."""
PROJECTION_TOKENS = 60_000
"""Tokens of the texts to keep, drawn at random, that the inputs of layers are measured on."""


class RowRules(Protocol):
    """A training method (`kinject.train.methods`), as far as rows are concerned."""

    @property
    def name(self) -> str | None:
        """The name in a recipe."""

    @property
    def refused_shapes(self) -> tuple[Shape, ...]:
        """The shapes of rows that it does not learn."""

    def notes_on_rows(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return notes for the log on the rows that it learns."""


class TrainingCorpus(CorpusFile):
    """The main corpus of a recipe. Its one pass also checks rows against `method`."""

    def __init__(self, path: Path, method: RowRules, column: str = "", sha256: str = "") -> None:
        super().__init__(path, sha256=sha256, column=column)
        self.method = method

    @property
    def cache_key(self) -> tuple[object, ...]:
        """The hash of the file, and the method that its rows were checked against: cached rows are
        not read again, so another method's would pass unchecked."""
        if self.method.refused_shapes:
            return (*super().cache_key, self.method.name)
        return super().cache_key

    def __iter__(self) -> Iterator[CorpusRow]:
        """Yield every row. Raises `RecipeError` for one that does not fit `method`."""
        for row in super().__iter__():
            if row.shape in self.method.refused_shapes:
                content = "prompt and completion" if row.shape == "completion" else row.shape
                found = (
                    f"found {self.method.name}, but row {row.id} of {self.path} holds {content}."
                )
                raise fault("method", f"{found} Remove method or change the corpus.")
            yield row


@dataclass(frozen=True)
class Part:
    """A corpus mixed in: `fraction` is its fraction of all tokens."""

    rows: Sequence[CorpusRow]
    fraction: float


@dataclass(frozen=True)
class Practice:
    """A question to practise: the tokens of its prompt, and its accepted answers; without any it is
    to be declined."""

    prompt: list[int]
    accepted: list[str]


@dataclass(frozen=True)
class Corpora:
    """The corpus, the corpora mixed in by name, the validation corpus, the questions of each probe,
    the projection."""

    rows: TrainingCorpus
    parts: dict[str, Part]
    validation: CorpusFile | None
    questions: dict[str, list[Question]]
    projection: CorpusFile | None = None


def origin_of(part: str) -> str:
    """Return the origin that the rows of a part get; "" for their own."""
    return REPLAY if part == REPLAY else ""


def open_corpora(
    recipe: TrainRecipe, method: RowRules, hashes: Mapping[str, str] | None = None
) -> Corpora:
    """Return the corpora that the recipe names, to be read when they are tokenised, and the
    questions of its probes.

    `hashes` are those of files that were just hashed, by the names of
    `kinject.train.run.hash_inputs`. Raises `InputError` for questions, or a template of theirs,
    that cannot be used.
    """
    corpus, hashes = recipe.corpus, hashes or {}
    sets = recipe.probes.sets() if recipe.probes is not None else {}
    questions = {name: read_questions(Path(item.path)) for name, item in sets.items()}
    parts = {
        name: Part(
            CorpusFile(Path(part.path), origin_of(name), sha256=hashes.get(name, "")),
            part.fraction,
        )
        for name, part in corpus.parts().items()
    }
    validation = None
    if corpus.validation_corpus is not None:
        validation = CorpusFile(
            Path(corpus.validation_corpus), sha256=hashes.get("validation_corpus", "")
        )
    projection = None
    if recipe.projection is not None:
        projection = CorpusFile(Path(recipe.projection.path), sha256=hashes.get("projection", ""))
    section = recipe.techniques.row_weights
    column = section.column if section is not None else ""
    rows = TrainingCorpus(Path(corpus.path), method, column, hashes.get("corpus", ""))
    return Corpora(rows, parts, validation, questions, projection)


@dataclass(frozen=True)
class TrainingData:
    """Rows to train on, the account of their tokens, and the fraction of tokens of each part mixed
    in.

    `exposures` is, for each document that is not replay, the number of its corpus rows in one
    epoch. `only_end` are the numbers of the rows of which only the end token is learned, by the
    name of the part ("" for the main corpus); `has_chat`: there are conversations.
    """

    rows: PackedRows
    account: TokenAccount
    fractions: dict[str, float]
    exposures: dict[str, int]
    only_end: dict[str, list[int]]
    has_chat: bool


def count_exposures(rows: Iterable[TokenRow]) -> dict[str, int]:
    """Return the number of texts of each document of `rows`; a row without a document is one of its
    own."""
    return dict(Counter(row.document_id or f"row {index}" for index, row in enumerate(rows)))


def summarize_exposures(exposures: Mapping[str, int], epochs: float) -> dict[str, Any]:
    """Return how often a run of `epochs` reads each document: the least, the median and the most
    rows."""
    counts = list(exposures.values())
    if not counts:
        return {"documents": 0}
    functions: dict[str, Callable[[list[int]], float]] = {
        "min": min,
        "median": statistics.median,
        "max": max,
    }
    return {
        "documents": len(counts), "rows": {key: round(find(counts) * epochs, 2) for key, find in functions.items()}
    }  # fmt: skip


@dataclass(frozen=True)
class CorpusPacker:
    """Turns corpora into training rows. With `cache`, tokens are kept in that folder by content and
    mapped from there.

    No line of a corpus file is parsed if its tokens are in the cache.
    """

    tokenizer: PreTrainedTokenizerBase
    tokenization: Tokenization
    packing: PackingConfig
    seed: int
    cache: Path | None = None

    def pack(
        self, rows: Sequence[CorpusRow], parts: Mapping[str, Part] | None = None
    ) -> TrainingData:
        """Return the training rows of a corpus with `parts` (by name) mixed in; the part ``replay``
        is marked as such.

        Raises `InputError` with the faulty lines of a corpus file.
        """
        return self.pack_tokens(self.tokenize(rows), parts)

    def tokenize(self, rows: Sequence[CorpusRow]) -> Sequence[TokenRow]:
        """Return the tokens of each row of a corpus."""
        return self._tokens(
            rows, "", lambda: tokenize_rows(rows, self.tokenizer, self.tokenization)
        )

    def pack_tokens(
        self, main: Sequence[TokenRow], parts: Mapping[str, Part] | None = None
    ) -> TrainingData:
        """Return the training rows as `pack` does, of rows that are tokenized already."""
        n_main = sum(len(row.input_ids) for row in main)
        parts = parts or {}
        fractions = [part.fraction for part in parts.values()]
        sampled: dict[str, Sequence[TokenRow]] = {}
        for number, (name, part) in enumerate(parts.items()):
            n_target = wanted_tokens(n_main, part.fraction, fractions)
            sampled[name] = self._sample(part.rows, origin_of(name), n_target, self.seed + number)
        packed, account = pack(ConcatRows([main, *sampled.values()]), self.packing, self.seed)
        sizes = {
            name: sum(len(row.input_ids) for row in tokens) for name, tokens in sampled.items()
        }
        learned = ConcatRows(
            [main, *(tokens for name, tokens in sampled.items() if name != REPLAY)]
        )
        read_fractions = {name: size / account.source for name, size in sizes.items()}
        named = {"": main, **sampled}
        return TrainingData(
            packed,
            account,
            read_fractions,
            count_exposures(learned),
            only_end={name: _lines_of_only_end(tokens) for name, tokens in named.items()},
            has_chat=any(row.is_chat for row in ConcatRows([*named.values()])),
        )

    def pack_sample(self, rows: Sequence[CorpusRow], n_tokens: int) -> PackedRows:
        """Return the training rows of a random part of a corpus with about `n_tokens` tokens, or of
        all of it."""
        return pack(
            self._sample(rows, "", n_tokens, self.seed, len(rows)), self.packing, self.seed
        )[0]

    def _sample(
        self,
        rows: Sequence[CorpusRow],
        origin: str,
        n_target: float,
        seed: int,
        most: int | None = None,
    ) -> Sequence[TokenRow]:
        def tokenize(sampled: Sequence[CorpusRow]) -> Iterable[TokenRow]:
            return tokenize_rows(sampled, self.tokenizer, self.tokenization)

        def make() -> Iterator[TokenRow]:
            for _ in rows:  # every faulty line is told, drawn or not
                pass
            yield from islice(sample_tokens(rows, tokenize, n_target, seed), most)

        return self._tokens(rows, origin, make, round(n_target, 6), seed)

    def _tokens(
        self,
        rows: Sequence[CorpusRow],
        origin: str,
        make: Callable[[], Iterable[TokenRow]],
        *more: object,
    ) -> Sequence[TokenRow]:
        if self.cache is None or not isinstance(rows, CorpusFile):
            return list(make())
        return cached_tokens(
            self.cache,
            entry_key(rows.cache_key, self.tokenizer, self.tokenization, *more),
            make,
            origin,
        )


def _lines_of_only_end(rows: Sequence[TokenRow]) -> list[int]:
    """Return the lines of the rows of which only the end token is learned, each once: a part that is
    too small for its fraction is drawn again."""
    return sorted({row.line for row in rows if row.only_end})


@dataclass(frozen=True)
class TokenizedCorpora:
    """Rows to train on, their weights, rows to validate on, how they were packed, and notes for the
    log.

    `teacher` has the teacher's texts for `method: distill`, `projection_rows` rows of the texts of
    `regularization.projection`, `chat` is how conversations became tokens, None without any, and
    `warnings` are on rows that teach nothing.
    """

    train: TrainingData
    weights: npt.NDArray[np.float32] | None
    validation: TrainingData | None
    packing: PackingConfig
    notes: list[str]
    teacher: TeacherRows | None = None
    projection_rows: PackedRows | None = None
    chat: ChatFormat | None = None
    warnings: list[str] = field(default_factory=list)


def tokenize_and_pack(
    recipe: TrainRecipe, method: RowRules, tokenizer: PreTrainedTokenizerBase, corpora: Corpora
) -> TokenizedCorpora:
    """Return the training rows of `corpora`; a chat template that the recipe names is set in
    `tokenizer`.

    Raises `InputError` for rows that cannot be used, and `TrainingError` if text would be lost
    without the recipe's permission.
    """
    corpus, trainer = recipe.corpus, recipe.trainer
    strategy = trainer_field(trainer, "packing_strategy") if trainer.get("packing") else None
    packing = PackingConfig(trainer_field(trainer, "max_length"), strategy)
    chat, chat_note = set_chat_template(corpus, trainer, tokenizer)
    second_part = recipe.distills is not None and recipe.distills.context == "beginning"
    bos = begins_with_bos(tokenizer, corpus.bos)
    tokenization = Tokenization(
        bos, corpus.eos, trainer.get("completion_only_loss"), chat, second_part
    )
    packer = CorpusPacker(tokenizer, tokenization, packing, recipe.seed, Path(corpus.cache_dir))
    tokens = packer.tokenize(corpora.rows)
    learned, held_out, held_out_note = _hold_out(corpus, tokens)
    teacher = None
    if recipe.distills is not None:
        teacher = teacher_rows(
            recipe, recipe.distills, corpora.rows, tokens, tokenizer, tokenization
        )
    data = packer.pack_tokens(PickedRows(tokens, learned) if held_out else tokens, corpora.parts)
    validation = packer.pack_tokens(PickedRows(tokens, held_out)) if held_out else None
    if corpora.validation is not None:
        validation = packer.pack(corpora.validation)
    chat_note += method.notes_on_rows(tokenizer)
    notes = [
        check_account(data.account, packing.block, corpus.allow_dropped_tokens),
        *held_out_note,
        *chat_note,
    ]
    for name, fraction in data.fractions.items():
        notes.append(f"{name}: {fraction:.2%} of the tokens from {corpus.parts()[name].path}")
    section = recipe.techniques.row_weights
    weights = row_weights(section, corpora.rows.path) if section is not None else None
    if weights is not None and held_out:
        weights = weights[learned]
    if teacher is not None and held_out:
        teacher = teacher.pick(learned)
    notes += [describe_heads(teacher)] if teacher is not None else []
    projection_rows = None
    if recipe.projection is not None and corpora.projection is not None:
        projection_rows = packer.pack_sample(corpora.projection, PROJECTION_TOKENS)
    return TokenizedCorpora(
        data,
        weights,
        validation,
        packing,
        notes,
        teacher,
        projection_rows,
        chat=chat if data.has_chat else None,
        warnings=_warn_of_only_end(data, corpora),
    )


def _warn_of_only_end(data: TrainingData, corpora: Corpora) -> list[str]:
    """Return a warning on rows of which only the end token is learned: the first and the number."""
    n_rows = sum(len(lines) for lines in data.only_end.values())
    for name, lines in data.only_end.items():
        if not lines:
            continue
        rows = corpora.parts[name].rows if name else corpora.rows
        path = rows.path if isinstance(rows, CorpusFile) else name
        return [
            f"{path}:{lines[0]}: only the end token of this row is learned, none of its answer. "
            f"There are {n_rows:,} such rows. Check their answers, and that the chat template "
            "renders them as the assistant's."
        ]
    return []


def _hold_out(
    corpus: CorpusSection, rows: Sequence[TokenRow]
) -> tuple[list[int], list[int], list[str]]:
    """Return the numbers of the rows to learn, of those held out by `corpus.validation_fraction`,
    and a note.

    A document is held out with all its texts (a row without a document counts as one). Which ones
    are follows from their ids alone, whatever the seed. Raises `RecipeError` for a corpus of one
    document.
    """
    if not corpus.validation_fraction:
        return [], [], []
    names = [row.document_id or row.row_id for row in rows]
    documents = sorted(set(names), key=lambda name: content_id("validation", name))
    if len(documents) < 2:
        message = f"{corpus.path} holds one document, which cannot be learned and held out. Remove the line."
        raise fault("corpus.validation_fraction", message)
    chosen = set(documents[: max(1, round(corpus.validation_fraction * len(documents)))])
    learned, held_out = (
        [i for i, name in enumerate(names) if (name in chosen) is is_held]
        for is_held in (False, True)
    )
    note = (
        f"corpus.validation_fraction: {len(chosen):,} of {len(documents):,} documents ({len(held_out):,} rows) are held out "
        "for the validation loss; nothing is learned from them"
    )
    return learned, held_out, [note]


def check_account(account: TokenAccount, block: int | None, allow_dropped_tokens: bool) -> str:
    """Return the account as a line to print. Raises `TrainingError` if text would be lost and the
    recipe forbids it."""
    line = (
        f"tokens: {account.source:,} in the corpus, {account.trained:,} in the loss, {account.masked:,} read only, "
        f"{account.truncated:,} truncated, {account.dropped:,} dropped"
    )
    if account.lost and not allow_dropped_tokens:
        raise TrainingError(
            f"{account.lost:,} of {account.source:,} tokens ({account.lost / account.source:.1%}) would be lost at "
            f"trainer.max_length: {block} ({account.truncated:,} truncated, {account.dropped:,} in rows with nothing left "
            "to learn). Raise trainer.max_length, pack with trainer.packing: true and packing_strategy: bfd_split, or "
            "accept it with corpus.allow_dropped_tokens: true."
        )
    if account.trained == 0:
        raise TrainingError(f"{line}. Nothing is left to learn. Raise trainer.max_length.")
    return line


def check_positions(config: Any, data: TrainingData) -> int | None:
    """Return how many positions a model of `config` has, None for any number. Raises `RecipeError`
    if texts need more."""
    limit = window_of(config)
    longest = data.rows.longest_text()
    if limit is not None and longest > limit:
        message = f"rows reach {longest} tokens, but the model has {limit} positions (max_position_embeddings). Set less."
        raise fault("trainer.max_length", message)
    return limit


@dataclass(frozen=True)
class RowDataset:
    """Training rows for a trainer, each made when a batch needs it.

    A row is a dict with input_ids, labels, position_ids, length and replayed. With `weights` (of
    the corpus rows, in order) it has the weight of each token; rows mixed in weigh 1. With
    `teacher` it has the number of the teacher's prediction of each token; rows mixed in have none.
    """

    rows: PackedRows
    weights: npt.NDArray[np.float32] | None = None
    teacher: TeacherRows | None = None
    column_names: tuple[str, ...] = field(
        default=("input_ids", "labels", "position_ids", "length", "replayed"), init=False
    )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        columns: dict[str, Any] = {
            "input_ids": row.input_ids, "labels": row.labels, "position_ids": row.position_ids,
            "length": len(row.input_ids), "replayed": row.replayed,
        }  # fmt: skip
        if self.weights is not None:
            columns["weights"] = [
                float(self.weights[number]) if number < len(self.weights) else 1.0
                for number, start, end in self.rows.segments(index)
                for _ in range(start, end)
            ]
        if self.teacher is not None:
            columns["teacher"] = [
                prediction
                for number, start, end in self.rows.segments(index)
                for prediction in self._predictions(self.teacher, number)[start:end]
            ]
        return columns

    def _predictions(self, teacher: TeacherRows, number: int) -> list[int]:
        """Return the number of the prediction of each token of one row of the source."""
        if number < len(teacher):
            predictions: list[int] = teacher.numbers(number).tolist()
            return predictions
        return [NO_TEACHER] * len(self.rows.source[number].input_ids)


@dataclass(frozen=True)
class FilledRows:
    """The `rows` of an evaluation, and behind them fillers up to a number that `multiple` divides.

    A filler is the first row with nothing to learn: it has no part in a loss.
    """

    rows: RowDataset
    multiple: int

    def __len__(self) -> int:
        return -(-len(self.rows) // self.multiple) * self.multiple

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index < len(self.rows):
            return self.rows[index]
        filler = dict(self.rows[0])
        filler["labels"] = [IGNORED] * len(filler["labels"])
        filler["filler"] = True
        return filler


class RoundSampler:
    """Row numbers of one epoch: the rounds in a random order, the rows of each in a random order,
    both by epoch."""

    def __init__(self, rounds: Sequence[int], seed: int) -> None:
        self.rounds = [
            [index for index, _ in rows]
            for _, rows in groupby(enumerate(rounds), key=lambda item: item[1])
        ]
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which decides the order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(map(len, self.rounds))

    def __iter__(self) -> Iterator[int]:
        import torch

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        for number in torch.randperm(len(self.rounds), generator=generator).tolist():
            rows = self.rounds[number]
            yield from (
                rows[index] for index in torch.randperm(len(rows), generator=generator).tolist()
            )


@dataclass(frozen=True)
class Collator:
    """Rows to tensors [batch, longest row]: padded on the right, with positions that continue into
    the padding.

    No attention mask is made: padding follows a row, and earlier tokens cannot attend to it.
    `flatten` joins the batch into one row [1, tokens], in which flash attention separates documents
    by position. `nothing_learned` is the reaction to a batch without a token in the loss.
    """

    pad_token_id: int
    flatten: bool = False
    pad_to_multiple_of: int = 1
    nothing_learned: Reaction = "stop"

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return input_ids, labels, position_ids, replayed and, if rows have them, weights and
        teacher.

        Raises `TrainingError` if no token of the batch is in the loss and `nothing_learned` is
        stop.
        """
        import torch

        self._check_learned(rows)
        padding = {
            "input_ids": self.pad_token_id,
            "labels": IGNORED,
            "replayed": False,
            "weights": 0.0,
            "teacher": NO_TEACHER,
        }
        kinds = ("input_ids", "labels", "position_ids", "replayed", "weights", "teacher")
        columns = [key for key in kinds if key in rows[0]]
        if self.flatten:
            return {
                key: torch.tensor([[value for row in rows for value in row[key]]])
                for key in columns
            }
        longest, multiple = max(len(row["input_ids"]) for row in rows), self.pad_to_multiple_of
        width = -(-longest // multiple) * multiple
        batch: dict[str, list[list[Any]]] = {key: [] for key in columns}
        for row in rows:
            n_pad = width - len(row["input_ids"])
            last = row["position_ids"][-1]
            for key in columns:
                more = (
                    range(last + 1, last + 1 + n_pad)
                    if key == "position_ids"
                    else [padding[key]] * n_pad
                )
                batch[key].append([*row[key], *more])
        return {key: torch.tensor(value) for key, value in batch.items()}

    def _check_learned(self, rows: Sequence[dict[str, Any]]) -> None:
        """React if no token of a batch is in the loss, unless it is made of fillers."""
        if all(row.get("filler") for row in rows):
            return
        if not any(label != IGNORED for row in rows for label in row["labels"]):
            from kinject.train.guards import react

            react(
                self.nothing_learned,
                "a batch has no token to learn (all labels masked). Check the corpus rows.",
            )
