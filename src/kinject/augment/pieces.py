"""The pieces of a corpus: the rows of one document in each file, which a merge of shards copies.

A shard writes how many bytes each of its documents has in each file (pieces.jsonl), and its counts
with the hashes of the files (pieces.json). Its rows are those that one process writes, so that the
merge puts their bytes in the order of the documents, adds the counts, and parses no row.
"""

from __future__ import annotations

import contextlib
import heapq
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from kinject.augment.contamination import ContaminationCheck, Find, Position
from kinject.augment.corpus_counts import CorpusCounts
from kinject.augment.store import JOURNALS
from kinject.disk import (
    atomic_file,
    open_to_read,
    parse_fields,
    read_json,
    read_jsonl,
    write_text,
)
from kinject.disk.files import file_hashes
from kinject.disk.jsonl import encode_row
from kinject.process import allow_open_files

CORPUS, SFT, COVERAGE, FAILURES = "corpus.jsonl", "sft.jsonl", "coverage.jsonl", "failures.jsonl"
PIECES = "pieces.jsonl"
AFTER_DOCUMENTS = 1 << 62
"""The number in the position of a pair."""
_SUMMARY = "pieces.json"


@dataclass(frozen=True)
class Pieces:
    """pieces.json: the hash of each file of a shard whose rows a merge copies, those of them that
    are merged by document, and what the shard counted. The manifest has those of the journals."""

    sha256: Mapping[str, str]
    files: Sequence[str]
    counts: CorpusCounts
    in_sources: Sequence[str]
    finds: Sequence[Find]


def write_pieces(
    run_dir: Path, files: Sequence[str], counts: CorpusCounts, contamination: ContaminationCheck
) -> None:
    """Write pieces.json of a shard whose `files` are written. Raises `DiskError`."""
    names = [*files, PIECES]
    hashes = file_hashes([run_dir / name for name in names])
    pieces = Pieces(
        sha256=dict(zip(names, hashes, strict=True)),
        files=files,
        counts=counts,
        in_sources=sorted(contamination.in_sources),
        finds=contamination.finds,
    )
    write_text(run_dir / _SUMMARY, encode_row(pieces) + "\n")


def read_pieces(folder: Path) -> Pieces | None:
    """Return pieces.json of a shard; None where it has none, or where a file is not the one of
    which it tells: the merge then writes the rows again from the journals."""
    path, fix = folder / _SUMMARY, "Delete it and run the merge again."
    if not path.exists():
        return None
    pieces = parse_fields(Pieces, read_json(path, fix), str(path), fix)
    paths = [folder / name for name in pieces.sha256]
    if not all(map(Path.exists, paths)) or file_hashes(paths) != list(pieces.sha256.values()):
        return None
    return pieces


def join_pieces(run_dir: Path, folders: Sequence[Path], files: Sequence[str]) -> None:
    """Write the `files` and the journals of the shards in `folders` as one into `run_dir`.

    Raises `DiskError`.
    """
    # A shard's rows of a file, and their sizes, are read while those of all others are.
    allow_open_files(4 * len(folders))
    for name in JOURNALS:
        with atomic_file(run_dir / name, "wb") as joined:
            for folder in folders:
                with open_to_read(folder / name) as journal:
                    shutil.copyfileobj(journal, joined)
    for name in files:
        with contextlib.ExitStack() as stack:
            joined = stack.enter_context(atomic_file(run_dir / name, "wb"))
            shards = [_read_rows(folder, name) for folder in folders]
            for _, rows in heapq.merge(*shards, key=itemgetter(0)):
                joined.write(rows)


def _read_rows(folder: Path, name: str) -> Iterator[tuple[Position, bytes]]:
    """Yield the rows of each document in one file of a shard, with the document's position."""
    with open_to_read(folder / name) as file:
        for _, piece in read_jsonl(folder / PIECES):
            n_bytes = piece["bytes"].get(name, 0)
            if n_bytes:
                number, pair = piece["position"]
                yield (number, pair), file.read(n_bytes)
