"""From a heap of files to documents.jsonl: each content parsed once, in parallel; copies and
boilerplate left out.

Worker processes parse what is new (`parse`). Then this process reads what is stored, in the order
of the files' names, and writes the documents: the result depends on the files and the recipe only.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kinject.disk import (
    check_output,
    content_id,
    file_hash,
    file_name,
    lock_dir,
    parse_fields,
    read_jsonl,
    write_manifest,
)
from kinject.documents.readers import ReadOptions
from kinject.errors import DiskError, InputError
from kinject.heap.parse import (
    FoundFile,
    Parsed,
    Parsing,
    check_sources,
    find_files,
    has_record,
    heap_name,
    is_there,
    readers_version,
    record_path,
    write_record,
)
from kinject.heap.write import HeapFile, HeapWriter, day_of
from kinject.language import language_name
from kinject.manifests import HeapCounts, read_documents_manifest
from kinject.process import core_count
from kinject.recipe import DocumentsSection
from kinject.shards import Shard, finished_shards, shard_counts
from kinject.terminal import Progress, format_count
from kinject.types import Tabular

log = logging.getLogger(__name__)

OUTPUTS = ("documents.jsonl", "files.jsonl", "skipped.jsonl", "duplicates.jsonl")
_MOST_SHOWN, _MOST_LOCATIONS = 10, 3


@dataclass(frozen=True)
class DocumentsResult(Tabular):
    """The result of collecting a heap of files. `counts` are those of the manifest; `folder` holds
    the files.

    `fingerprint` is the hash of the documents. `n_parsed` files were parsed in this run, the
    others' content was known.
    """

    folder: Path
    fingerprint: str
    counts: Mapping[str, Any]
    n_parsed: int = 0
    already_done: bool = False

    @property
    def documents_path(self) -> Path:
        """The documents."""
        return self.folder / "documents.jsonl"

    @property
    def skipped_path(self) -> Path:
        """Every file, or document in one, that was not read, with the reason."""
        return self.folder / "skipped.jsonl"

    @property
    def n_skipped(self) -> int:
        """Files and documents that somebody may miss: those of the system, and hidden ones, do not
        count."""
        return int(self.counts["skipped"])

    def files(self) -> list[dict[str, Any]]:
        """Return the rows of files.jsonl: each file with its bytes, hash, and numbers of documents,
        copies and skipped parts."""
        return [row for _, row in read_jsonl(self.folder / "files.jsonl")]

    def skipped(self) -> list[dict[str, Any]]:
        """Return the rows of skipped.jsonl."""
        return [row for _, row in read_jsonl(self.skipped_path)]

    def render_skipped(self) -> list[str]:
        """Return a line for each reason, the most frequent first, with the first files that it is
        true of, word for word."""
        reasons: defaultdict[str, list[str]] = defaultdict(list)
        for row in self.skipped():
            if not row["left_out"]:
                reasons[row["detail"]].append(row["where"])
        counts = Counter({detail: len(files) for detail, files in reasons.items()})
        ordered = [detail for detail, _ in counts.most_common()]
        lines = []
        for detail in ordered[:_MOST_SHOWN]:
            files = ", ".join(reasons[detail][:_MOST_LOCATIONS])
            if counts[detail] > _MOST_LOCATIONS:
                files += f" and {counts[detail] - _MOST_LOCATIONS:,} more"
            lines.append(f"{files}: {detail}")
        others = ordered[_MOST_SHOWN:]
        if others:
            n = sum(counts[detail] for detail in others)
            lines.append(
                f"{n:,} more for {len(others):,} other reasons: {self.skipped_path} has each"
            )
        return lines

    def render_copies(self) -> list[str]:
        """Return a line for the first near copies, which are left out, and versions, which are
        kept: what differs."""
        lines = []
        for _, row in read_jsonl(self.folder / "duplicates.jsonl"):
            words = ", ".join(row.get("words_only_here", [])[:6])
            others = ", ".join(row.get("words_only_there", [])[:6])
            if "version" in row:
                what = f"a version, both are kept: {words} where the other has {others}"
                lines.append(f"{row['version']} of {row['kept']} ({what})")
            elif "overlap" in row:  # the others are parts of documents
                only = f"; only there: {words}" if words else ""
                lines.append(
                    f"{row['dropped']} of {row['kept']} ({row['overlap']:.0%} of the words{only})"
                )
        n_more = len(lines) - _MOST_SHOWN
        if n_more > 0:
            more = f"{n_more:,} more: {self.folder / 'duplicates.jsonl'} has each"
            return [*lines[:_MOST_SHOWN], more]
        return lines

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: its documents, and the reason if it, or a part of it, was
        skipped."""
        reasons: dict[str, str] = {}
        for row in self.skipped():
            reasons.setdefault(row["file"], row["detail"])
        rows = []
        for file in self.files():
            row = {key: file[key] for key in ("file", "documents", "copies")}
            rows.append({**row, "skipped": reasons.get(file["file"], "")})
        return rows


def collect(
    sources: Sequence[Path], section: DocumentsSection | None = None, folder: Path | None = None
) -> DocumentsResult:
    """Read the files at `sources` (folders, patterns, files) into documents.jsonl in `folder`;
    parse nothing twice.

    Without a `folder`, one in the section's cache. Unreadable files are in skipped.jsonl, omitted
    copies and lines in duplicates.jsonl.

    Raises `DiskError` if nothing is at a source or something cannot be written, `InputError` if
    nothing can be read there, `KeyboardInterrupt` after Ctrl-C: the files parsed so far are stored.
    """
    section = section or DocumentsSection()
    folder = folder or _folder_of(sources, section)
    # Before the folder is made: of a path that was mistyped nothing stays.
    check_sources(sources)
    with lock_dir(folder, wait=True, stage="documents"):
        files = find_files(sources)
        heap = _hashed(files, section)
        n_parsed = _parse_new(heap, section, folder)
        return _write([str(source) for source in sources], heap, section, folder, n_parsed)


def refuse_other_sources(folder: Path, sources: Sequence[Path]) -> None:
    """Raise `InputError` if `folder`, which has its name from `sources`, holds the documents of
    others of that name: a/docs and b/docs, or docs/*.md and docs/*.txt."""
    manifest = read_documents_manifest(folder)
    if manifest is None or not manifest.inputs:
        return
    now = [os.path.realpath(source) for source in sources]
    for source in manifest.inputs:
        path = Path(source)
        # One that is gone was moved or renamed; the rows of a data set by name are our own file.
        if not is_there(path) or path.is_relative_to(folder.parent):
            return
        # kinject try may have read the entries of a folder one by one.
        before = os.path.realpath(path)
        if any(before == one or before.startswith(f"{one}/") for one in now):
            return
    raise InputError(
        f"{sources[0]}: {folder} holds the documents of {next(iter(manifest.inputs))}, and has its "
        "name from either. Give both in one call, rename one of the two, or move "
        f"{folder.parent} away; kinject documents takes another run_dir."
    )


def parse_shard_of(
    sources: Sequence[Path], section: DocumentsSection, folder: Path, shard: Shard
) -> dict[str, int]:
    """Parse the files of a shard, by the hash of their names, for `merge_parsed`; return how many
    these are, and how many were new. `folder` is that of the whole. Raises as `collect`."""
    check_sources(sources)
    run_dir = shard.folder(folder)
    with lock_dir(run_dir, stage="documents"):
        files = find_files(sources)
        heap = _hashed([file for file in files if shard.has(file.name)], section)
        counts = {"n_files": len(heap), "n_parsed": _parse_new(heap, section, run_dir)}
        write_manifest(
            run_dir / "manifest.json",
            stage="documents",
            inputs=_listing(sources, files),
            recipe=_recipe_of(section),
            # `heap` and `fingerprint` are those of the whole, which the merge writes.
            counts={"heap": "", "fingerprint": "", **counts, **shard_counts(shard)},
        )
    return counts


def merge_parsed(
    sources: Sequence[Path], section: DocumentsSection, folder: Path
) -> DocumentsResult:
    """Make of the finished shards what `collect` makes, whose files they have parsed.

    Raises as `collect`, and `InputError` as `finished_shards`.
    """
    command = shlex.join(["kinject", "documents", *map(str, sources), f"run_dir={folder}"])
    inputs = _listing(sources, find_files(sources))
    with finished_shards(folder, command, _recipe_of(section), inputs):
        return collect(sources, section, folder)


def _listing(sources: Sequence[Path], files: Sequence[FoundFile]) -> dict[str, str]:
    """Return source -> an id of the names and bytes of all files, for the manifest of a shard."""
    listed = [[file.name, file.size] for file in files]
    return dict.fromkeys(map(str, sources), content_id("listing", listed))


def _recipe_of(section: DocumentsSection) -> dict[str, Any]:
    return {"documents": asdict(section)}


def collected_fingerprint(sources: Sequence[Path], section: DocumentsSection | None = None) -> str:
    """Return the fingerprint of the last `collect` of `sources`, without looking at the files
    again.

    They are collected if they never were. Raises as `collect`.
    """
    manifest = read_documents_manifest(_folder_of(sources, section or DocumentsSection()))
    if manifest is None:
        return collect(sources, section).fingerprint
    return manifest.counts.fingerprint


def _folder_of(sources: Sequence[Path], section: DocumentsSection) -> Path:
    """Return the folder in the section's cache for the documents of `sources`."""
    identity = content_id([os.path.abspath(source) for source in sources], _output_options(section))
    return Path(section.cache_dir) / "heaps" / f"{file_name(heap_name(sources))}-{identity[:8]}"


def _output_options(section: DocumentsSection) -> dict[str, Any]:
    """Return the options that decide the output."""
    return {key: value for key, value in asdict(section).items() if key != "cache_dir"}


def _hashed(files: Sequence[FoundFile], section: DocumentsSection) -> list[HeapFile]:
    """Return the files with the hashes of their contents."""
    options, cache = read_options(section), Path(section.cache_dir)

    def hashed(file: FoundFile) -> HeapFile:
        sha256, fault = "", file.fault
        if not fault:
            try:
                sha256 = file_hash(Path(file.path))
            except DiskError as error:
                fault = str(error).removeprefix(f"{Path(file.path)}: ")
        return HeapFile(file, sha256, record_path(cache, sha256, file.path, options), fault)

    with ThreadPoolExecutor(core_count()) as pool:
        return list(pool.map(hashed, files))


def read_options(section: DocumentsSection) -> ReadOptions:
    """Return the options of reading a file that a recipe sets."""
    names = section.fields or {}
    return ReadOptions(names.get("text"), names.get("title"), names.get("id"))


def _parse_new(heap: Sequence[HeapFile], section: DocumentsSection, folder: Path) -> int:
    """Parse every content that is not stored, in worker processes; return how many."""
    first: dict[Path, int] = {}
    for number, file in enumerate(heap):
        if not file.fault and file.record not in first and not has_record(file.record):
            first[file.record] = number
    if not first:
        return 0
    # Neither are report/ and augment/: with them an unchanged heap of 1,000 files took some 2 s of
    # processor time, without 0.8.
    from kinject import executors  # not before something is to be parsed: it takes a while

    work = (folder / "parsing").resolve()
    options = read_options(section)
    tasks = []
    for record, number in first.items():
        path, sha256 = os.path.abspath(heap[number].found.path), heap[number].sha256
        # The record's path goes with the task: a worker that computed it would hash the readers'
        # code again, which may have changed during the run.
        tasks.append(Parsing(number, path, sha256, record.resolve(), work, options))
    n_processes = min(core_count(), len(tasks))
    waiting, n_running = deque(tasks), 0
    with (
        executors.LocalExecutor(n_processes, 0, ("kinject.heap.parse",)) as executor,
        Progress("documents", len(tasks), "files") as progress,
    ):
        while waiting or n_running:
            while waiting and executor.has_room():
                executor.submit(waiting.popleft())
                n_running += 1
            for outcome in executor.wait():
                n_running -= 1
                if outcome.died:
                    _note_death(heap, outcome.task, outcome.error)
                elif outcome.result is None:
                    raise DiskError(f"{outcome.task.label}: {outcome.error}")
                elif "fault" in outcome.result:
                    _note_fault(heap, outcome.task, outcome.result["fault"])
                progress.advance()
    shutil.rmtree(work, ignore_errors=True)
    return len(tasks)


def _note_death(heap: Sequence[HeapFile], task: Parsing, error: str) -> None:
    """Note the fault of a file whose process died: in its record, if the file is the reason, so
    that it is not tried again; else for this run only."""
    fault, is_its_own = task.fault_of_death(error)
    if is_its_own:
        write_record(task.record, [Parsed("", None, {}, fault)])
    else:
        _note_fault(heap, task, fault)


def _note_fault(heap: Sequence[HeapFile], task: Parsing, fault: str) -> None:
    """Note the fault of a file, and of its copies, for this run."""
    for file in heap:
        if file.record == heap[task.number].record:
            file.fault = file.fault or fault


def _write(
    sources: Sequence[str],
    heap: Sequence[HeapFile],
    section: DocumentsSection,
    folder: Path,
    n_parsed: int,
) -> DocumentsResult:
    """Write the documents unless they are there already."""
    manifest_path = folder / "manifest.json"
    parts = [[file.found.name, file.sha256, file.fault, day_of(file.found.mtime)] for file in heap]
    heap_id = content_id("documents", readers_version(), _output_options(section), parts)
    manifest = read_documents_manifest(folder)
    if manifest is not None and manifest.counts.heap == heap_id:
        try:
            parse_fields(HeapCounts, manifest.as_written["counts"], str(manifest_path), "")
            for name in OUTPUTS:
                check_output(folder / name, "")
        except (InputError, DiskError):
            log.warning(f"{folder}: a file there was changed or deleted; all are written again.")
        else:
            counts = manifest.as_written["counts"]
            return DocumentsResult(
                folder, manifest.counts.fingerprint, counts, n_parsed, already_done=True
            )
    counts = {**HeapWriter(heap, section, folder).write(), "heap": heap_id}
    if not counts["n_documents"]:
        first = islice(read_jsonl(folder / "skipped.jsonl"), _MOST_SHOWN)
        reasons = "\n".join(f"  {row['where']}: {row['detail']}" for _, row in first)
        fault = f"{', '.join(sources)}: no document there can be read.\n{reasons}"
        raise InputError(fault.rstrip())
    counts["fingerprint"] = content_id(file_hash(folder / "documents.jsonl"))
    write_manifest(
        manifest_path,
        stage="documents",
        inputs=dict.fromkeys(sources, counts["fingerprint"]),
        recipe=_recipe_of(section),
        counts=counts,
        outputs=OUTPUTS,
    )
    return DocumentsResult(folder, counts["fingerprint"], counts, n_parsed)


def render_documents(result: DocumentsResult) -> str:
    """Return the table of a run: files read, and skipped with the reason and paths; what was left
    out."""
    counts = result.counts
    copies, repeats, lines = counts["duplicates"], counts["repeats"], counts["boilerplate"]
    read = (
        f"{format_count(counts['n_documents'], 'document')} from {counts['n_read']:,} of "
        f"{format_count(counts['n_files'], 'file')} ({listing(counts['kinds'])}); "
        f"{format_count(result.n_parsed, 'file')} parsed in this run"
    )
    languages = {language_name(code) or "not clear": n for code, n in counts["languages"].items()}
    skipped = f"{result.n_skipped:,}"
    if counts["left_out"]:
        skipped += f", and {counts['left_out']:,} hidden, temporary or of the system"
    rows = [
        ("read", read),
        ("words", f"{counts['n_words']:,}"),
        ("languages", listing(languages)),
        ("copies", f"left out: {copies['exact']:,} exact, {copies['near']:,} near"),
        *(("", f"- {text}") for text in result.render_copies()),
        (
            "repeats",
            f"left out: {format_count(repeats['passages'], 'passage')}, and lines of logs, "
            f"in {format_count(repeats['documents'], 'document')}",
        ),
        (
            "boilerplate",
            f"{format_count(lines['lines'], 'line')} that many documents share, "
            f"left out {format_count(lines['removed'], 'time')} and kept once",
        ),
        ("skipped", skipped),
        *(("", f"- {text}") for text in result.render_skipped()),
    ]
    table = [f"{name:<12}{text}" for name, text in rows]
    return "\n".join([*table, "", f"written: {result.documents_path}"])


def listing(numbers: Mapping[str, int]) -> str:
    """Return names with their numbers: ``.pdf 12, .txt 3``."""
    return ", ".join(f"{name} {n:,}" for name, n in numbers.items())
