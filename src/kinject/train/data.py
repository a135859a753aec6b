"""From the corpora of a recipe to batches: rows are read, tokenised, mixed and packed; batches are
padded when read."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kinject.corpus.chat import ChatFormat
from kinject.corpus.packing import (
    ConcatRows,
    PackedRows,
    PackingConfig,
    PickedRows,
    document_numbers,
    pack,
    rows_by_document,
)
from kinject.corpus.questions import read_questions
from kinject.corpus.rows import CorpusFile, CorpusRow, Shape
from kinject.corpus.tokenize import (
    TokenAccount,
    Tokenization,
    TokenRow,
    begins_with_bos,
    cached_tokens,
    count_tokens,
    entry_key,
    sample_tokens,
    tokenize_rows,
    wanted_tokens,
)
from kinject.disk import content_id
from kinject.disk.offsets import number_names
from kinject.errors import TrainingError, fault
from kinject.manifests import Exposures, RowExposures
from kinject.models import window_of
from kinject.recipe import CorpusSection, TrainRecipe
from kinject.recipe.method_rules import distillation_of
from kinject.terminal import format_count
from kinject.train.config import trainer_field
from kinject.train.load import set_chat_template
from kinject.train.objectives import row_weights
from kinject.train.objectives.distillation import (
    TeacherRows,
    describe_heads,
    teacher_rows,
)
from kinject.types import Question

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

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

    def warnings_on_rows(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return warnings on the rows that it learns."""


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
                found = f"found {self.method.name}, but {row.location} holds {content}."
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


def part_input(name: str) -> str:
    """Return the name of a part among the inputs of a run: that of a mix may be "corpus"."""
    return name if name == REPLAY else f"mix.{name}"


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
    questions = {}
    if recipe.probes is not None:
        for name, item in recipe.probes.sets().items():
            questions[name] = read_questions(Path(item.path))
    parts = {}
    for name, part in corpus.parts().items():
        digest = hashes.get(part_input(name), "")
        file = CorpusFile(Path(part.path), origin_of(name), sha256=digest)
        parts[name] = Part(file, part.fraction)
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

    `exposures` maps a number of corpus rows in one epoch to the documents, replay apart, that have
    so many. `only_end` are the numbers of the rows of which only the end token is learned, by the
    name of the part ("" for the main corpus); `has_chat`: there are conversations.
    """

    rows: PackedRows
    account: TokenAccount
    fractions: dict[str, float]
    exposures: Counter[int]
    only_end: dict[str, list[int]]
    has_chat: bool


def count_exposures(rows: Sequence[TokenRow]) -> Counter[int]:
    """Return a number of texts -> the documents of `rows` that have so many; a row without a
    document is one of its own."""
    n_alone, n_rows = rows_by_document(document_numbers(rows))
    exposures = Counter[int]()
    for size, n_documents in enumerate(np.bincount(n_rows).tolist()):
        if n_documents:
            exposures[size] = n_documents
    if n_alone:
        exposures[1] += n_alone
    return exposures


def summarize_exposures(exposures: Counter[int], epochs: float) -> Exposures:
    """Return how often a run of `epochs` reads each document: the least, the median and the most
    rows."""
    if not exposures:
        return Exposures(documents=0)
    rows = RowExposures(
        min=round(min(exposures) * epochs, 2),
        median=round(_median(exposures) * epochs, 2),
        max=round(max(exposures) * epochs, 2),
    )
    return Exposures(documents=exposures.total(), rows=rows)


def _median(exposures: Counter[int]) -> float:
    """Return the median number of rows of a document."""
    n_documents = exposures.total()
    reached, middle = 0, list[int]()
    for n_rows in sorted(exposures):
        reached += exposures[n_rows]
        # The two in the middle; of an odd number they are the same one.
        for index in ((n_documents - 1) // 2, n_documents // 2):
            if reached - exposures[n_rows] <= index < reached:
                middle.append(n_rows)
    return sum(middle) / 2


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

    @property
    def of_whole_texts(self) -> CorpusPacker:
        """What packs the corpora beside the main one: no teacher reads the first part of their
        texts, which would be learned by nobody (`Tokenization.second_part`)."""
        return replace(self, tokenization=replace(self.tokenization, second_part=False))

    def tokenize(self, rows: Sequence[CorpusRow]) -> Sequence[TokenRow]:
        """Return the tokens of each row of a corpus."""
        return self._tokens(
            rows, "", lambda: tokenize_rows(rows, self.tokenizer, self.tokenization)
        )

    def pack_tokens(
        self, main: Sequence[TokenRow], parts: Mapping[str, Part] | None = None
    ) -> TrainingData:
        """Return the training rows as `pack` does, of rows that are tokenized already."""
        parts = parts or {}
        cut_at = self.packing.cut_at
        n_main = count_tokens(main, cut_at)
        fractions = [part.fraction for part in parts.values()]
        sampled: dict[str, Sequence[TokenRow]] = {}
        for number, (name, part) in enumerate(parts.items()):
            # Each part has a seed of its own: two of the same file draw different rows.
            n_target = wanted_tokens(n_main, part.fraction, fractions)
            draw = self.of_whole_texts._sample
            sampled[name] = draw(part.rows, origin_of(name), n_target, self.seed + number)
        packed, account = pack(ConcatRows([main, *sampled.values()]), self.packing, self.seed)
        learned = [main, *(rows for name, rows in sampled.items() if name != REPLAY)]
        named = {"": main, **sampled}
        n_read = {name: count_tokens(rows, cut_at) for name, rows in sampled.items()}
        # A corpus of no token at all is refused behind this (`check_account`).
        total = max(n_main + sum(n_read.values()), 1)
        return TrainingData(
            packed,
            account,
            fractions={name: n / total for name, n in n_read.items()},
            exposures=count_exposures(ConcatRows(learned)),
            only_end={name: _lines_of_only_end(rows) for name, rows in named.items()},
            has_chat=any(row.is_chat for row in ConcatRows([*named.values()])),
        )

    def pack_sample(self, rows: Sequence[CorpusRow], n_tokens: int) -> PackedRows:
        """Return the training rows of a random part of a corpus with about `n_tokens` tokens, or of
        all of it."""
        # At most each row once: of a small corpus rows would be drawn again to fill up the tokens.
        sample = self.of_whole_texts._sample(rows, "", n_tokens, self.seed, len(rows))
        packed, _ = pack(sample, self.packing, self.seed)
        return packed

    def _sample(
        self,
        rows: Sequence[CorpusRow],
        origin: str,
        n_target: float,
        seed: int,
        most: int | None = None,
    ) -> Sequence[TokenRow]:
        cut_at = self.packing.cut_at

        def tokenize(sampled: Sequence[CorpusRow]) -> Iterable[TokenRow]:
            return tokenize_rows(sampled, self.tokenizer, self.tokenization)

        def make() -> Iterator[TokenRow]:
            for _ in rows:  # every faulty line is reported, drawn or not
                pass
            drawn = sample_tokens(rows, tokenize, n_target, seed, cut_at)
            yield from islice(drawn, most)

        drawn_by = [round(n_target, 6), seed]
        if cut_at is not None:
            drawn_by.append(cut_at)
        return self._tokens(rows, origin, make, *drawn_by)

    def _tokens(
        self,
        rows: Sequence[CorpusRow],
        origin: str,
        make: Callable[[], Iterable[TokenRow]],
        *more: object,
    ) -> Sequence[TokenRow]:
        # Rows in memory have no hash by which an entry could be found again.
        if self.cache is None or not isinstance(rows, CorpusFile):
            return list(make())
        key = entry_key(rows.cache_key, self.tokenizer, self.tokenization, *more)
        return cached_tokens(self.cache, key, make, origin)


def _lines_of_only_end(rows: Sequence[TokenRow]) -> list[int]:
    """Return the lines of the rows of which only the end token is learned, each once: a part that
    is too small for its fraction is drawn again."""
    return sorted({row.line for row in rows if row.only_end})


@dataclass(frozen=True)
class TokenizedCorpora:
    """Rows to train on, their weights, rows to validate on, how they were packed, and notes for the
    log.

    `teacher` has the teacher's texts for `method: distill`, `projection_rows` rows of the texts of
    `regularization.projection`, `chat` is how conversations became tokens, None without any, and
    `warnings` are on rows that teach nothing, or what nobody wants.
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
    corpus = recipe.corpus
    # Before tokens are looked up: the names of cache entries hold the tokenizer's template.
    chat, notes_on_chat = set_chat_template(corpus, recipe.trainer, tokenizer)
    packer = _packer_of(recipe, tokenizer, chat)
    tokens = packer.tokenize(corpora.rows)
    split = _hold_out(corpus, tokens)
    teacher = None
    distillation = distillation_of(recipe)
    if distillation is not None:
        # Of all rows, those held out too: the cached heads then serve every validation_fraction.
        teacher = teacher_rows(
            recipe, distillation, corpora.rows, tokens, tokenizer, packer.tokenization
        )
    learned, validation = tokens, None
    if split is not None:
        learned = PickedRows(tokens, split.learned)
    data = packer.pack_tokens(learned, corpora.parts)
    if split is not None:
        validation = packer.pack_tokens(PickedRows(tokens, split.held_out))
    if corpora.validation is not None:
        validation = packer.of_whole_texts.pack(corpora.validation)
    notes = [check_account(data.account, packer.packing.block, corpus.allow_dropped_tokens)]
    warnings = [*_warn_of_only_end(data, corpora), *_warn_of_fractions(data, corpus)]
    if validation is not None:
        warnings += _check_validation(validation.account, packer.packing.block)
    weights = None
    if recipe.techniques.row_weights is not None:
        weights = row_weights(recipe.techniques.row_weights, corpora.rows.path)
    if split is not None:
        notes.append(split.note)
        weights = None if weights is None else weights[split.learned]
        teacher = None if teacher is None else teacher.pick(split.learned)
    notes += notes_on_chat
    for name, fraction in data.fractions.items():
        notes.append(f"{name}: {fraction:.2%} of the tokens from {corpus.parts()[name].path}")
    if teacher is not None:
        notes.append(describe_heads(teacher))
    projection_rows = None
    if corpora.projection is not None:
        projection_rows = packer.pack_sample(corpora.projection, PROJECTION_TOKENS)
    return TokenizedCorpora(
        data,
        weights,
        validation,
        packer.packing,
        notes,
        teacher,
        projection_rows,
        chat=chat if data.has_chat else None,
        warnings=[*warnings, *method.warnings_on_rows(tokenizer)],
    )


def _packer_of(
    recipe: TrainRecipe, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat
) -> CorpusPacker:
    """Return what makes training rows by the settings of a recipe."""
    corpus, trainer = recipe.corpus, recipe.trainer
    strategy = trainer_field(trainer, "packing_strategy") if trainer.get("packing") else None
    distillation = distillation_of(recipe)
    tokenization = Tokenization(
        bos=begins_with_bos(tokenizer, corpus.bos),
        eos=corpus.eos,
        completion_only=trainer.get("completion_only_loss"),
        chat=chat,
        second_part=distillation is not None and distillation.context == "beginning",
    )
    return CorpusPacker(
        tokenizer,
        tokenization,
        PackingConfig(trainer_field(trainer, "max_length"), strategy),
        recipe.seed,
        Path(corpus.cache_dir),
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


_FAR = 0.25
"""A fraction of tokens is warned of where it is off by more than this part of itself."""


def _warn_of_fractions(data: TrainingData, corpus: CorpusSection) -> list[str]:
    """Return a warning for each part whose fraction of the tokens is far from the recipe's."""
    warnings = []
    for name, found in data.fractions.items():
        part = corpus.parts()[name]
        if abs(found - part.fraction) > _FAR * part.fraction:
            key = name if name == REPLAY else f"mix.{name}"
            warnings.append(
                f"corpus.{key}.fraction: {part.fraction:.2%} of the tokens are asked for, and "
                f"{found:.2%} are drawn: a row of {part.path} has too many tokens beside those "
                "of the corpus. Give shorter rows there."
            )
    return warnings


@dataclass(frozen=True)
class _Split:
    """The numbers of the rows to learn and of those held out, and a note."""

    learned: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.int64]
    note: str


def _hold_out(corpus: CorpusSection, rows: Sequence[TokenRow]) -> _Split | None:
    """Return which rows `corpus.validation_fraction` holds out; None without it.

    A document is held out with all its texts (a row without a document counts as one). Which ones
    are follows from their ids alone, whatever the seed. Raises `RecipeError` for a corpus of one
    document.
    """
    if not corpus.validation_fraction:
        return None
    # A paraphrase that is learned would lower the loss of the document that is held out.
    # No document has such an id: row 7 without one is no text of the document 7.
    numbers = number_names(row.document_id or f"\0{row.row_id}" for row in rows)
    hashes = array("Q")
    for number, row in zip(numbers, rows, strict=True):
        if number == len(hashes):  # the first row of its document
            hashes.append(int(content_id("validation", row.document_id or row.row_id), 16))
    if len(hashes) < 2:
        message = (
            f"{corpus.path} holds one document, which cannot be learned and held out. "
            "Remove the line."
        )
        raise fault("corpus.validation_fraction", message)
    n_chosen = max(1, round(corpus.validation_fraction * len(hashes)))
    is_chosen = np.zeros(len(hashes), np.bool_)
    is_chosen[np.argsort(hashes, kind="stable")[:n_chosen]] = True
    is_held_out = is_chosen[np.frombuffer(numbers, np.intc)]
    learned, held_out = np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)
    note = (
        f"corpus.validation_fraction: {n_chosen:,} of {format_count(len(hashes), 'document')} "
        f"({format_count(len(held_out), 'row')}) are held out for the validation loss; nothing is "
        "learned from them"
    )
    return _Split(learned, held_out, note)


def check_account(account: TokenAccount, block: int | None, allow_dropped_tokens: bool) -> str:
    """Return the account as a line to print. Raises `TrainingError` if text would be lost and the
    recipe forbids it."""
    line = (
        f"tokens: {account.source:,} in the corpus, {account.trained:,} in the loss, "
        f"{account.masked:,} read only, "
        f"{account.truncated:,} truncated, {account.dropped:,} dropped"
    )
    # SFTConfig's own defaults cut texts without a word (docs/design.md).
    if account.lost and not allow_dropped_tokens:
        raise TrainingError(
            f"{account.lost:,} of {format_count(account.source, 'token')} "
            f"({account.lost / account.source:.1%}) would be lost at trainer.max_length: {block} "
            f"({account.truncated:,} truncated, {account.dropped:,} in rows with nothing left to "
            "learn). Raise trainer.max_length, pack with trainer.packing: true and "
            "packing_strategy: bfd_split, or accept it with corpus.allow_dropped_tokens: true."
        )
    if account.trained == 0:
        raise TrainingError(f"{line}. Nothing is left to learn. Raise trainer.max_length.")
    return line


def _check_validation(account: TokenAccount, block: int | None) -> list[str]:
    """Return a warning if text of the validation rows is lost: their loss is then that of the rest.
    Raises `TrainingError` if nothing is left."""
    if account.trained == 0:
        raise TrainingError(
            f"none of the {format_count(account.source, 'token')} of the validation rows is in "
            f"their loss at trainer.max_length: {block}. Raise trainer.max_length."
        )
    if not account.lost:
        return []
    return [
        f"trainer.max_length: {block} leaves out {account.lost:,} of "
        f"{format_count(account.source, 'token')} of the validation rows "
        f"({account.truncated:,} truncated, {account.dropped:,} in rows with nothing left to "
        "learn): eval_loss is that of the others."
    ]


def check_positions(config: PretrainedConfig, tokenized: TokenizedCorpora) -> int | None:
    """Return how many positions a model of `config` has, None for any number. Raises `RecipeError`
    if texts need more."""
    limit = window_of(config)
    for name, data in (("rows", tokenized.train), ("validation rows", tokenized.validation)):
        if data is None or limit is None:
            continue
        # Positions restart at each document, so a packed row may be longer than the window.
        longest = data.rows.longest_text()
        if longest > limit:
            message = (
                f"{name} reach {longest} tokens, but the model has {limit} positions "
                "(max_position_embeddings). Set less."
            )
            raise fault("trainer.max_length", message)
    return limit
