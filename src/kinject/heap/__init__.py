"""Documents from files, folders and data sets; every fault is reported as file:line (a PDF's with
the page)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

from kinject.disk import content_id, file_hash, folder_hash, open_to_read, path_exists
from kinject.disk.offsets import OffsetIndex
from kinject.documents.readers import (
    LocatedDocument,
    ReadOptions,
    UnreadPart,
    fault_of,
    read_file,
)
from kinject.documents.rows import ROWS_AT_ONCE, table_row, with_plain_names
from kinject.errors import DiskError, InputError
from kinject.heap.collect import collect, collected_fingerprint, read_options
from kinject.heap.parse import is_heap
from kinject.heap.write import read_rows
from kinject.hub_data import HubDataSet, find_data_set, is_saved
from kinject.manifests import DocumentsManifest, manifest_beside
from kinject.recipe import DocumentsSection
from kinject.shards import WHOLE, Shard
from kinject.types import Document

log = logging.getLogger(__name__)


def read_documents(path: Path, section: DocumentsSection | None = None) -> Iterator[Document]:
    """Yield the documents in the file or heap `path`, in order (a heap: by the names of its files).

    A heap (a folder, a pattern) is collected first, as `collect` does, and its files are parsed
    only if their content is new; unreadable files are left out, with a warning. A file of rows
    (JSONL, CSV, Parquet, a folder saved by `datasets`, a data set on the hub by its name) holds
    ``{text, id?, title?, source?, meta?}``; other keys go to `meta`. There, a document without an
    id gets the hash of its title and text.

    A page of a PDF that cannot be read is left out, with a warning.

    Raises as `collect`; of a single file, `DiskError` when it cannot be read and `InputError`
    (file:line) on a document that is empty, is not text, or has the id of an earlier one, and when
    a library is not installed.
    """
    return (document for _, document in read_numbered(path, section))


def read_numbered(
    path: Path, section: DocumentsSection | None = None, shard: Shard = WHOLE
) -> Iterator[tuple[int, Document]]:
    """Yield the documents of a shard as `read_documents`, each with its number: that by which all
    documents are in order.

    Raises as `read_documents`; of two documents with one id both are of one shard.
    """
    if _is_collected(path):
        result = collect([path], section)
        if result.n_skipped:
            log.warning(
                f"{path}: files and documents there that cannot be read: {result.n_skipped:,}, "
                f"left out; {result.skipped_path} has each with its reason."
            )
        for number, collected in enumerate(read_rows(result.documents_path)):
            if shard.has(collected.id):
                yield number, collected
        return
    options = _options_of(path, section)
    n_documents = 0
    # On disk: there may be millions of ids.
    with closing(OffsetIndex()) as seen:
        for number, (location, document) in enumerate(_read_located(path, options)):
            if isinstance(document, UnreadPart):
                log.warning(str(document))
                continue
            if isinstance(document, InputError):
                raise document
            n_documents += 1
            # Before the index: of ten shards, nine need not know a document's id.
            if not shard.has(document.id):
                continue
            for earlier in seen.get(document.id):
                first, _ = next(islice(_read_located(path, options), earlier, None))
                raise InputError(
                    f"{location}: id {document.id!r} is already the id of {first}. "
                    "Each document needs an id (or, without ids, a text) of its own."
                )
            seen.add(document.id, number)
            yield number, document
    if not n_documents:
        raise InputError(f"{path}: holds no documents. Expected at least one.")


def _read_located(path: Path, options: ReadOptions) -> Iterator[LocatedDocument]:
    data = find_data_set(str(path))
    if data is not None or is_saved(path):
        if data is None:
            read = _read_saved_dataset(path, options)
        else:
            read = _read_data_set(str(path), data, options)
        for location, document in read:
            fault = fault_of(document, location) if isinstance(document, Document) else None
            yield location, fault or document
        return
    if not path_exists(path):
        raise DiskError(f"{path}: nothing is there. Check the path.")
    with open_to_read(path) as stream:
        yield from read_file(path, stream, options)


def document_hashes(path: Path, section: DocumentsSection | None = None) -> dict[str, str]:
    """Return name -> hash (on the hub: its commit) of all that `read_documents` has read for
    `path`, for a manifest.

    Raises as `read_documents`, and `InputError` when the hub cannot be reached.
    """
    if _is_collected(path):
        return {str(path): collected_fingerprint([path], section)}
    data = find_data_set(str(path))
    if data is not None and not data.is_folder:
        digest = data.commit()
    elif data is not None:
        digest = folder_hash(Path(data.name))
    elif is_saved(path):
        digest = folder_hash(path)
    else:
        digest = file_hash(path)
    options = _options_of(path, section)
    if options != ReadOptions():
        # Of the same file other columns are other documents.
        digest = content_id(digest, options.text_field, options.title_field, options.id_field)
    return {str(path): digest}


def _options_of(path: Path, section: DocumentsSection | None) -> ReadOptions:
    """Return the options by which one file or data set is read."""
    # The columns of a recipe are those of what was collected, which then has names of its own.
    if section is None or isinstance(manifest_beside(path), DocumentsManifest):
        return ReadOptions()
    return read_options(section)


def _is_collected(path: Path) -> bool:
    """Return whether `path` is a heap, rather than one file or data set."""
    return not is_saved(path) and find_data_set(str(path)) is None and is_heap(path)


def _read_saved_dataset(path: Path, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a folder that `datasets` saved; of all its splits, one after the
    other."""
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path), keep_in_memory=False)
    except Exception as error:  # the library raises whatever its JSON and Arrow readers raise
        raise InputError(
            f"{path}: not a folder that datasets can load ({_first_line(error)}). Save it again."
        ) from error
    splits = loaded if isinstance(loaded, Mapping) else {"": loaded}
    for name, split in splits.items():
        number = 0
        for columns in split.iter(ROWS_AT_ONCE):
            for values in zip(*columns.values(), strict=True):
                number += 1
                row = dict(zip(columns, values, strict=True))
                yield table_row(row, f"{path / name if name else path}:{number}", options)


def _read_data_set(name: str, data: HubDataSet, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents of a data set, which a recipe calls `name`, streamed.

    Rows without text are left out, and of equal rows without an id the later ones: public data sets
    have many of both. Raises `InputError` if it cannot be read.
    """
    # A column in the name of the data set is that of this data set alone.
    options = replace(options, text_field=data.column or options.text_field)
    without_id = set[str]()
    for number, row in enumerate(data.rows(), start=1):
        plain = with_plain_names(row, options)
        text = plain.get("text", "?")
        if isinstance(text, str) and not text.strip():
            continue
        location, document = table_row(row, f"{name}:{number}", options)
        if isinstance(document, Document) and plain.get("id") is None:
            if document.id in without_id:
                continue
            without_id.add(document.id)
        yield location, document


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
