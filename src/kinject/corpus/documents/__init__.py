"""Documents from files, folders and data sets; every fault is reported as file:line (a PDF's with the page)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kinject.corpus.documents.readers import SUFFIXES, Found, fault_of, kind_of, read_file
from kinject.corpus.documents.rows import HUB_NAME, hub_revision, is_saved_dataset, read_hub, read_saved_dataset
from kinject.disk import (
    check_regular,
    content_id,
    file_hash,
    folder_hash,
    open_to_read,
    path_exists,
    unreadable,
    write_jsonl,
)
from kinject.errors import DiskError, InputError, KinjectError
from kinject.types import Document


def read_documents(path: Path) -> Iterator[Document]:
    """Yield the documents in the file or folder `path`, in order (a folder: by the names of its files).

    Rows (JSONL, CSV, Parquet, a folder saved by `datasets`, a data set on the hub by its name) are
    ``{text, id?, title?, source?, meta?}``; other keys go to `meta`. Files of other kinds are one document each. A
    document without an id gets the hash of its title and text. Only a hash of each id stays in memory.

    Raises `DiskError` when a file cannot be read and `InputError` (file:line) on a document that is empty, is not
    text, or has the id of an earlier one, and when a library is not installed.
    """
    seen: set[int] = set()
    n_documents = 0
    for where, document in _read_located(path):
        if isinstance(document, InputError):
            raise document
        digest = int(content_id(document.id), 16)
        if digest in seen:
            _raise_repeated(path, document.id, where)
        seen.add(digest)
        n_documents += 1
        yield document
    if not n_documents:
        raise InputError(f"{path}: holds no documents. Expected at least one.")


def survey_documents(path: Path) -> Iterator[tuple[Path, Document | KinjectError]]:
    """Yield (file, document) for every document that can be read at `path`, and (file, error) for every one that cannot.

    Of a file of rows, the rows before the first bad one are read. A document whose id an earlier one has is an error, too.
    """
    seen: dict[int, str] = {}
    is_plain = path.is_dir() and not is_saved_dataset(path)
    for file, fault in _files_below(path, ()) if is_plain else [(path, None)]:
        if fault is not None:
            yield file, fault
            continue
        try:
            for where, document in _read_located(file):
                if isinstance(document, InputError):
                    yield file, document
                    break
                digest = int(content_id(document.id), 16)
                if digest in seen:
                    yield file, InputError(f"{where}: has the text (or the id) of {seen[digest]}.")
                else:
                    seen[digest] = where
                    yield file, document
        except (InputError, DiskError) as error:
            yield file, error


def write_general_text(source: str, folder: Path, n_documents: int, n_held_out: int) -> tuple[Path, Path]:
    """Write the first documents of `source` (as `read_documents`) as general.jsonl and general-held-out.jsonl into `folder`.

    No document is in both. Raises `InputError` if one of the files is there already, or the source has too few documents.
    """
    paths = folder / "general.jsonl", folder / "general-held-out.jsonl"
    for path in paths:
        if path.exists():
            raise InputError(
                f"{path}: is there already, and nothing is written over. Move it away, or give another --into."
            )
    documents = read_documents(Path(source))
    for path, n in zip(reversed(paths), (n_held_out, n_documents), strict=True):
        rows = [{"id": one.id, "text": one.text, "source": one.source} for one in islice(documents, n)]
        if len(rows) < n:
            raise InputError(f"{source}: holds fewer than {n_held_out + n_documents:,} documents. Lower --documents.")
        write_jsonl(path, rows)
    return paths


def _read_located(path: Path) -> Iterator[Found]:
    if is_hub_name(path) or is_saved_dataset(path):
        for where, found in read_hub(str(path)) if is_hub_name(path) else read_saved_dataset(path):
            yield where, found if isinstance(found, InputError) else fault_of(found, where) or found
        return
    for file in document_files(path):
        with open_to_read(file) as stream:
            yield from read_file(file, stream)


def _raise_repeated(path: Path, identity: str, where: str) -> None:
    """Raise `InputError` if a document before `where` has the id `identity`; it is found by reading again."""
    for earlier, document in _read_located(path):
        if earlier == where:
            return
        if isinstance(document, Document) and document.id == identity:
            raise InputError(
                f"{where}: id {identity!r} is already the id of {earlier}. "
                "Each document needs an id (or, without ids, a text) of its own."
            )


def document_files(path: Path) -> list[Path]:
    """Return the files that `read_documents` reads for `path`: itself, or all files below a folder but hidden ones.

    Raises `InputError` on a file whose suffix has no reader, `DiskError` when nothing is there.
    """
    if not path_exists(path):
        raise DiskError(f"{path}: nothing is there. Check the path.")
    if not path.is_dir():
        _check_readable(path)
        return [path]
    files = []
    for file, fault in _files_below(path, ()):
        if fault is not None:
            raise fault
        files.append(file)
    if not files:
        raise InputError(f"{path}: an empty folder. Expected files ending in {', '.join(sorted(SUFFIXES))}.")
    return files


def _check_readable(file: Path) -> None:
    check_regular(file)
    if file.suffix.lower() not in SUFFIXES:
        kind_of(file, b"")


def _files_below(folder: Path, above: tuple[str, ...]) -> Iterator[tuple[Path, KinjectError | None]]:
    """Yield the files below `folder` that are not hidden, sorted, each with why it cannot be read (None: it can).

    Links to folders are followed, but not to a folder `above` them.
    """
    real = os.path.realpath(folder)
    if real in above:
        yield folder, InputError(f"{folder}: a link to a folder that it lies in, without end. Take it out.")
        return
    try:
        names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    except OSError as error:
        yield folder, unreadable(folder, error)
        return
    for name in names:
        path = folder / name
        if path.is_dir():
            yield from _files_below(path, (*above, real))
            continue
        try:
            _check_readable(path)
        except (InputError, DiskError) as error:
            yield path, error
        else:
            yield path, None


def document_hashes(path: Path) -> dict[str, str]:
    """Return name -> hash (on the hub: its commit) of all that `read_documents` reads for `path`, for a manifest.

    Raises as `document_files`, and `InputError` when the hub cannot be reached.
    """
    if is_hub_name(path):
        return {str(path): hub_revision(str(path))}
    if is_saved_dataset(path):
        return {str(path): folder_hash(path)}
    return {str(file): file_hash(file) for file in document_files(path)}


def is_hub_name(path: Path) -> bool:
    """Return whether `path` can only be the name of a data set on the hub."""
    if path_exists(path) or path.suffix.lower() in SUFFIXES or (path.parent != Path() and path.parent.is_dir()):
        return False
    return HUB_NAME.fullmatch(str(path)) is not None
