"""Corpora that a recipe names as data sets: written once as JSON lines, which are then read as
every other corpus."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from kinject.corpus.other_layouts import as_messages
from kinject.corpus.rows import JsonValue, parse_corpus_row
from kinject.corpus.tokenize import cached_entry
from kinject.disk import Row, content_id, folder_hash, write_json, write_jsonl
from kinject.disk.jsonl import encode_row
from kinject.errors import InputError, one_line
from kinject.hub_data import FORM, HubDataSet, find_data_set, is_saved
from kinject.recipe import TrainRecipe
from kinject.recipe.sections import MixedCorpusSection
from kinject.terminal import format_count

log = logging.getLogger(__name__)

_FILE, _SOURCE = "corpus.jsonl", "source.json"
_BESIDE_TEXT = ("id", "document_id", "origin", "title", "source")
_KEPT = (
    "text",
    "messages",
    "prompt",
    "completion",
    "tools",
    "chat_template_kwargs",
    *_BESIDE_TEXT,
)
"""Columns of a data set that a row of a corpus takes over, where they have a value."""


def with_local_corpora(recipe: TrainRecipe, *, fetch: bool = True) -> TrainRecipe:
    """Return `recipe` with a file in corpus.cache_dir for each corpus that is a data set.

    A data set is fetched once; the file stays as it is until it is deleted. Without `fetch` the
    name stays where there is no file yet. Raises `InputError` for a data set that cannot be read or
    has a row that is no row of a corpus.
    """
    corpus, folder = recipe.corpus, Path(recipe.corpus.cache_dir)

    def local(part: MixedCorpusSection) -> MixedCorpusSection:
        return replace(part, path=local_corpus(part.path, folder, fetch=fetch))

    corpus = replace(corpus, path=local_corpus(corpus.path, folder, fetch=fetch))
    if corpus.replay is not None:
        corpus = replace(corpus, replay=local(corpus.replay))
    if corpus.mix is not None:
        corpus = replace(corpus, mix={name: local(part) for name, part in corpus.mix.items()})
    if corpus.validation_corpus is not None:
        validation = local_corpus(corpus.validation_corpus, folder, fetch=fetch)
        corpus = replace(corpus, validation_corpus=validation)
    return replace(recipe, corpus=corpus)


def local_corpus(path: str, folder: Path, *, fetch: bool = True) -> str:
    """Return `path` if it is that of a file, else that of the file into which the data set `path`
    is written, below `folder`.

    Without `fetch` it is `path` unless it is written already. Raises `InputError` as above.
    """
    data = data_set_of(path)
    if data is None:
        return path
    # A folder may change, so its content is in the name; the hub is not asked again.
    identity = folder_hash(Path(data.name)) if data.is_folder else ""
    entry = folder / f"data-{content_id(path, identity)[:16]}"

    if not fetch and not entry.exists():
        return path

    def write(part: Path) -> None:
        log.info(f"{path}: reading the data set")
        # A branch may move while it is read, and the commit is recorded.
        pinned = data.pinned()
        n_rows = write_jsonl(part / _FILE, _corpus_rows(pinned, path))
        source = {"data_set": path, "commit": pinned.revision, "rows": n_rows}
        write_json(part / _SOURCE, source)
        log.info(f"{path}: {format_count(n_rows, 'row')} in {entry / _FILE}")

    return str(cached_entry(folder, entry.name, write) / _FILE)


def data_set_of(path: str) -> HubDataSet | None:
    """Return the data set that the path of a corpus names, None for a file's."""
    if is_saved(Path(path)):
        return HubDataSet(path, text=path)
    return find_data_set(path)


def _corpus_rows(data: HubDataSet, name: str) -> Iterator[Row]:
    """Yield the rows of a data set as those of a corpus; rows without text are left out."""
    n_rows = 0
    for number, row in enumerate(data.rows(), start=1):
        location = f"{name}:{number}"
        made = _corpus_row(row, data.column, location)
        if made is None:
            continue
        try:
            parse_corpus_row(made, "", location)
            encode_row(made)
        except (TypeError, ValueError) as error:  # a date, bytes, NaN: what JSON does not have
            raise InputError(
                f"{location}: found a value that a line of JSON cannot hold ({one_line(error)}). "
                f"Write that column as text, or name the one with the text: {FORM}."
            ) from error
        except InputError as error:
            raise InputError(
                f"{location}: {error} Its columns: {', '.join(row)}. Name the one with the text: "
                f"{FORM}."
            ) from error
        yield made
        n_rows += 1
    if not n_rows:
        raise InputError(f"{name}: the data set has no rows with text.")


def _corpus_row(row: Row, column: str, location: str) -> Row | None:
    """Return a row of a corpus, None if its text is blank; `column`, if not empty, holds a text or
    messages."""
    columns, row = list(row), _without_nulls(row)
    if not column:
        row = as_messages(row)
    kept = {key: row[key] for key in _KEPT if key in row}
    # A teacher and a cartridge read the originals of an uploaded corpus. In other data sets it may
    # be anything.
    if not isinstance(kept.get("origin"), str):
        kept.pop("origin", None)
    if column:
        if column not in columns:
            raise InputError(f"{location}: no column {column!r}. Found: {', '.join(columns)}.")
        value = row.get(column)
        kept = {key: kept[key] for key in _BESIDE_TEXT if key in kept}
        if isinstance(value, list):
            kept |= as_messages({"conversations": value})
        else:
            kept["text"] = value
    # A row without text is no blank row: parse_corpus_row names what is missing.
    text = kept.get("text", "?")
    is_blank = text is None or (isinstance(text, str) and not text.strip())
    return None if is_blank else kept


def _without_nulls(value: JsonValue) -> Any:
    """Return JSON without the keys of nulls, in lists and objects as well.

    A column of objects has the keys of all rows in each of them, null where the row has none: a
    call of one tool would be learned with the arguments of every other.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
