"""From a heap of files to documents.jsonl: each file parsed once, in parallel; copies, boilerplate and personal data found.

A run has two halves. Worker processes parse the files that changed (`parse`). Then this process reads what is stored, in the
order of the files' names, and writes the documents: the result depends on the files and the recipe only.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.corpus.documents.files import FoundFile, find_files, heap_name
from kinject.corpus.documents.parse import (
    Batch,
    Parsed,
    ParseOptions,
    has_record,
    memory_fault,
    read_record,
    readers_version,
    time_fault,
    write_record,
)
from kinject.corpus.documents.personal_data import check_region
from kinject.corpus.documents.write import HeapFile, HeapWriter
from kinject.disk import (
    check_output,
    content_id,
    file_name,
    lock_dir,
    open_database,
    read_jsonl,
    read_manifest,
    write_manifest,
    write_rows,
)
from kinject.errors import DiskError, InputError
from kinject.language.detect import language_name
from kinject.process import core_count
from kinject.recipe import DocumentsSection
from kinject.terminal import Progress
from kinject.types import Tabular

if TYPE_CHECKING:
    from kinject.executors import LocalExecutor, Outcome

log = logging.getLogger(__name__)

OUTPUTS = ("documents.jsonl", "files.jsonl", "skipped.jsonl", "duplicates.jsonl", "boilerplate.jsonl")
_MOST_IN_BATCH, _BATCH_BYTES = 32, 2**24
_SCHEMA = (
    "PRAGMA journal_mode = WAL", "PRAGMA synchronous = NORMAL", "PRAGMA busy_timeout = 60000",
    "CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, size INTEGER, mtime_ns INTEGER, sha256 TEXT) WITHOUT ROWID",
)  # fmt: skip
_SIGNAL = re.compile(r"signal (\d+)")
_TIMERS = (14, 27)
_MEMORY_SIGNALS = (9,)
_CRASHES = (4, 5, 6, 7, 8, 11, 31)
"""Signals of a process that fails by itself; any other comes from outside."""
_MOST_SHOWN, _MOST_LOCATIONS = 12, 3
_POLL = 0.5


@dataclass(frozen=True)
class DocumentsResult(Tabular):
    """The result of collecting a heap of files. `counts` are those of the manifest; `folder` holds the files.

    `fingerprint` depends on the content of every file and on the options. `n_parsed` files were opened in this run, and parsed
    unless their content was known.
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
        """Files and documents that somebody may miss: those of the system, and hidden ones, do not count."""
        return int(sum(self.counts["skipped"].values()))

    def files(self) -> list[dict[str, Any]]:
        """Return the rows of files.jsonl: each file with its bytes, hash, and numbers of documents, copies and skipped parts."""
        return [row for _, row in read_jsonl(self.folder / "files.jsonl")]

    def skipped(self) -> list[dict[str, Any]]:
        """Return the rows of skipped.jsonl."""
        return [row for _, row in read_jsonl(self.skipped_path)]

    def skipped_by_reason(self) -> dict[str, tuple[list[str], str]]:
        """Return reason -> (locations, the first detail) of files that somebody may miss, the most frequent reason first."""
        reasons: dict[str, tuple[list[str], str]] = {}
        for row in self.skipped():
            if not row["left_out"]:
                reasons.setdefault(row["reason"], ([], row["detail"]))[0].append(row["where"])
        return dict(sorted(reasons.items(), key=lambda entry: -len(entry[1][0])))

    def render_skipped(self) -> list[str]:
        """Return a line for each of the most frequent reasons, with the first locations and their detail."""
        reasons = self.skipped_by_reason()
        lines = []
        for locations, detail in islice(reasons.values(), _MOST_SHOWN):
            more = f" and {len(locations) - _MOST_LOCATIONS:,} more" if len(locations) > _MOST_LOCATIONS else ""
            lines.append(f"{', '.join(locations[:_MOST_LOCATIONS])}{more}: {detail}")
        if len(reasons) > _MOST_SHOWN:
            lines.append(f"{len(reasons) - _MOST_SHOWN} more reasons: {self.skipped_path} has all")
        return lines

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: its documents, and the reason if it, or a part of it, was skipped."""
        reasons: dict[str, str] = {}
        for row in self.skipped():
            reasons.setdefault(row["file"], row["detail"])
        return [
            {"file": row["file"], "documents": row["documents"], "copies": row["copies"], "skipped": reasons.get(row["file"], "")}
            for row in self.files()
        ]  # fmt: skip


def collect(
    sources: Sequence[Path], section: DocumentsSection | None = None, folder: Path | None = None
) -> DocumentsResult:
    """Read the files at `sources` (folders, patterns, lists, files) into documents.jsonl in `folder`; do nothing twice.

    Without a `folder`, one in the section's cache. Unreadable files are in skipped.jsonl, omitted copies in
    duplicates.jsonl, omitted lines in boilerplate.jsonl.

    Raises `DiskError` if nothing is at a source or something cannot be written, `InputError` if nothing can be read there,
    and with `strict` at the first file that cannot. `KeyboardInterrupt` after Ctrl-C: the files parsed so far are stored.
    """
    section = section or DocumentsSection()
    check_region(section.phone_region)
    cache = Path(section.cache_dir)
    if folder is None:
        folder = _folder_of(sources, section)
    with _lock_when_free(folder):
        files = find_files(sources)
        if not files:
            raise InputError(f"{sources[0]}: no document there can be read: it is an empty folder. Check the path.")
        collecting = _Collecting(files, section, cache, folder)
        collecting.find_unchanged()
        collecting.parse_changed()
        return collecting.write([str(source) for source in sources])


def collected_fingerprint(sources: Sequence[Path], section: DocumentsSection | None = None) -> str:
    """Return the fingerprint of the last `collect` of `sources`, without looking at the files again.

    They are collected if they never were. Raises as `collect`.
    """
    manifest = read_manifest(_folder_of(sources, section or DocumentsSection()) / "manifest.json")
    return str(manifest["counts"]["fingerprint"]) if manifest else collect(sources, section).fingerprint


def _folder_of(sources: Sequence[Path], section: DocumentsSection) -> Path:
    """Return the folder in the section's cache for the documents of `sources`."""
    identity = content_id([os.path.abspath(source) for source in sources], _output_options(section))
    return Path(section.cache_dir) / "heaps" / f"{file_name(heap_name(sources))}-{identity[:8]}"


@contextmanager
def _lock_when_free(folder: Path) -> Iterator[None]:
    """Hold the folder as `lock_dir`; another process that collects the same files is waited for."""
    warned = False
    while True:
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_dir(folder))
            except DiskError as error:
                if "in use by" not in str(error):
                    raise
                if not warned:
                    log.info(f"waiting: {error}")
                warned = True
                time.sleep(_POLL)
                continue
            yield
            return


def _output_options(section: DocumentsSection) -> dict[str, Any]:
    """Return the options that decide the output."""
    values = asdict(section)
    for name in ("processes", "cache_dir", "strict"):
        del values[name]
    return values


@dataclass
class _Collecting:
    files: Sequence[FoundFile]
    section: DocumentsSection
    cache: Path
    folder: Path
    options: ParseOptions = field(init=False)
    hashes: dict[int, str] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    links: dict[int, int] = field(default_factory=dict)
    n_parsed: int = 0

    def __post_init__(self) -> None:
        self.options = ParseOptions.of(self.section)
        self._work = self.folder / "parsing"
        self._batch_numbers = count()

    @staticmethod
    def _absolute(file: FoundFile) -> str:
        return os.path.abspath(file.path)

    def find_unchanged(self) -> None:
        """Find the files whose size and time are those of a file that was read before, and whose content is stored."""
        inodes: dict[tuple[int, int], int] = {}
        with closing(open_database(self.cache / "files.sqlite", *_SCHEMA)) as database:
            for journal in sorted(self._work.glob("batch-*.jsonl")):  # of a run that was killed
                self._store_hashes(database, _journal_rows(journal))
            shutil.rmtree(self._work, ignore_errors=True)
            for number, file in enumerate(self.files):
                if file.fault:
                    self.faults[number] = file.fault
                elif (first := inodes.setdefault(file.inode, number)) != number:
                    self.links[number] = first
                else:
                    row = database.execute(
                        "SELECT sha256 FROM files WHERE path = ? AND size = ? AND mtime_ns = ?",
                        (_as_text(self._absolute(file)), file.size, file.mtime_ns),
                    ).fetchone()
                    if row and has_record(self.cache, self.options.key(row[0], file.path)):
                        self.hashes[number] = row[0]
        self._check_strict(sorted(self.faults.keys() | self.hashes.keys()))

    def _store_hashes(self, database: Any, rows: Sequence[Mapping[str, Any]]) -> None:
        values = [
            (_as_text(row["path"]), row["size"], row["mtime_ns"], row["sha256"]) for row in rows if "mtime_ns" in row
        ]
        write_rows(database, self.cache / "files.sqlite", "INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?)", values)

    def parse_changed(self) -> None:
        """Parse every other file in worker processes."""
        known = self.hashes.keys() | self.faults.keys() | self.links.keys()
        numbers = [number for number in range(len(self.files)) if number not in known]
        if not numbers:
            return
        n_processes = self.section.processes or core_count()
        waiting = deque(self._batches(numbers, n_processes))
        n_running, self.n_parsed = 0, len(numbers)
        self._work.mkdir(parents=True, exist_ok=True)
        with (
            closing(open_database(self.cache / "files.sqlite", *_SCHEMA)) as database,
            self._executor(min(n_processes, len(waiting))) as executor,
            Progress("documents", len(self.files), "files", done=len(known)) as progress,
        ):
            while waiting or n_running:
                while waiting and executor.has_room():
                    executor.submit(waiting.popleft())
                    n_running += 1
                for outcome in executor.wait():
                    n_running -= 1
                    before = len(self.hashes) + len(self.faults)
                    waiting.extendleft(self._take(outcome, database))
                    progress.advance(len(self.hashes) + len(self.faults) - before)
        shutil.rmtree(self._work, ignore_errors=True)

    def _executor(self, n_processes: int) -> LocalExecutor:
        from kinject import executors  # not before something is to be parsed: it takes a while

        return executors.LocalExecutor(n_processes, 0, ("kinject.corpus.documents.parse",))

    def _batches(self, numbers: Sequence[int], n_processes: int) -> Iterator[Batch]:
        """Yield the files in batches of neighbours, neither many nor large."""
        most = max(1, min(_MOST_IN_BATCH, len(numbers) // (4 * n_processes)))
        batch: list[int] = []
        n_bytes = 0
        for number in numbers:
            if batch and (len(batch) >= most or n_bytes + self.files[number].size > _BATCH_BYTES):
                yield self._batch(batch)
                batch, n_bytes = [], 0
            batch.append(number)
            n_bytes += self.files[number].size
        yield self._batch(batch)

    def _batch(self, numbers: Sequence[int]) -> Batch:
        files = tuple((number, self._absolute(self.files[number])) for number in numbers)
        return Batch(next(self._batch_numbers), self._work.resolve(), self.cache.resolve(), files, self.options)

    def _take(self, outcome: Outcome, database: Any) -> list[Batch]:
        """Take the results of a batch; return the batch of its remaining files, if its process died."""
        batch: Batch = outcome.task
        rows = _journal_rows(batch.journal_path)
        finished = {row["number"]: row for row in rows if "begun" not in row}
        self._store_hashes(database, list(finished.values()))
        for number, row in finished.items():
            if "fault" in row:
                self.faults[number] = row["fault"]
            else:
                self.hashes[number] = row["sha256"]
        remaining = [number for number, _ in batch.files if number not in finished]
        if outcome.result is None and not outcome.died:
            raise DiskError(f"{batch.label}: {outcome.error}")
        if remaining:
            begun = next((row for row in rows if row["number"] == remaining[0]), None)
            self._give_up(remaining.pop(0), begun, outcome.error)
        self._check_strict([number for number, _ in batch.files if number not in remaining])
        return [self._batch(remaining)] if remaining else []

    def _give_up(self, number: int, begun: Mapping[str, Any] | None, error: str) -> None:
        """Note the fault of the file at which a process died. It is stored if the file is the reason, not the machine."""
        match = _SIGNAL.search(error)
        signum = int(match[1]) if match else 0
        if signum in _TIMERS:
            fault = time_fault(self.options.seconds)
        elif signum in _MEMORY_SIGNALS:
            fault = memory_fault(self.options.memory)
        else:
            fault = f"ends the process that reads it ({error}). Save it again in another format, or take it out."
        if begun is None or signum not in (*_TIMERS, *_CRASHES):
            self.faults[number] = fault
            return
        key = self.options.key(begun["sha256"], self.files[number].path)
        write_record(self.cache, key, [Parsed("", None, {}, fault)])
        self.hashes[number] = begun["sha256"]

    def _check_strict(self, numbers: Sequence[int]) -> None:
        """Raise `InputError` for the first of the files that is not read, or not whole, if the recipe is strict."""
        if not self.section.strict:
            return
        for number in numbers:
            file = self.files[number]
            if number in self.faults and not file.left_out:
                raise InputError(f"{file.path}: {self.faults[number]}")
            for parsed in read_record(self.cache, self._key(number)) if number in self.hashes else ():
                if parsed.fault:
                    raise InputError(f"{file.path}{parsed.location}: {parsed.fault}")

    def _key(self, number: int) -> str:
        return self.options.key(self.hashes[number], self.files[number].path)

    def write(self, sources: Sequence[str]) -> DocumentsResult:
        """Write the documents unless they are there already."""
        manifest_path = self.folder / "manifest.json"
        parts = [
            [file.name, self.hashes.get(number), self.faults.get(number), self.links.get(number)]
            for number, file in enumerate(self.files)
        ]
        fingerprint = content_id("documents", readers_version(), _output_options(self.section), parts)
        manifest = read_manifest(manifest_path)
        if manifest is not None and manifest["counts"].get("fingerprint") == fingerprint:
            try:
                for name in OUTPUTS:
                    check_output(self.folder / name, "")
            except (InputError, DiskError):
                log.warning(f"{self.folder}: a file there was changed or deleted; all are written again.")
            else:
                return DocumentsResult(self.folder, fingerprint, manifest["counts"], self.n_parsed, already_done=True)
        heap_files = [
            HeapFile(
                file, self._key(number) if number in self.hashes else "", self.hashes.get(number, ""),
                self.faults.get(number, ""), self.files[self.links[number]].name if number in self.links else "",
            ) for number, file in enumerate(self.files)
        ]  # fmt: skip
        counts = HeapWriter(heap_files, self.section, self.cache, self.folder).write()
        counts["fingerprint"] = fingerprint
        if not counts["n_documents"]:
            first = islice(read_jsonl(self.folder / "skipped.jsonl"), _MOST_SHOWN)
            reasons = "\n".join(f"  {row['where']}: {row['detail']}" for _, row in first)
            raise InputError(f"{', '.join(sources)}: no document there can be read.\n{reasons}".rstrip())
        recipe = {"documents": asdict(self.section)}
        write_manifest(
            manifest_path, stage="documents", inputs=dict.fromkeys(sources, fingerprint), recipe=recipe, counts=counts,
            outputs=OUTPUTS,
        )  # fmt: skip
        return DocumentsResult(self.folder, fingerprint, counts, self.n_parsed)


def _as_text(path: str) -> str:
    """Return a path as SQLite stores it: text in UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _journal_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a batch's journal; a last line that a kill has torn is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


def render_documents(result: DocumentsResult) -> str:
    """Return the table of a run: files read, and skipped with the reason and paths; omitted copies; flags."""
    counts = result.counts
    rows = [
        ("read", f"{counts['n_documents']:,} documents from {counts['n_read']:,} of {counts['n_files']:,} files "
                 f"({listing(counts['kinds'])}); {result.n_parsed:,} files opened in this run"),
        ("words", f"{counts['n_words']:,}"),
        ("languages", listing(named_languages(counts["languages"]))),
        *_left_out(counts),
        ("personal", _personal(counts)),
        ("skipped", _skipped(result)),
        *(("", f"- {text}") for text in result.render_skipped()),
    ]  # fmt: skip
    lines = [f"{name:<12}{text}" for name, text in rows]
    return "\n".join([*lines, "", f"written: {result.documents_path}, {result.folder}/documents.html"])


def listing(numbers: Mapping[str, int]) -> str:
    """Return names with their numbers: ``.pdf 12, .txt 3``."""
    return ", ".join(f"{name} {n:,}" for name, n in numbers.items())


def named_languages(numbers: Mapping[str, int]) -> dict[str, int]:
    """Return numbers of documents by the names of their languages instead of their codes."""
    return {language_name(code) or "not clear": n for code, n in numbers.items()}


def _left_out(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    copies, repeats, lines = counts["duplicates"], counts["repeats"], counts["boilerplate"]
    return [
        ("copies", f"left out: {copies['exact']:,} exact, {copies['near']:,} near, {copies['link']:,} links"),
        ("repeats", f"left out: {repeats['passages']:,} passages or lines that are there before, in "
                    f"{repeats['documents']:,} documents"),
        ("boilerplate", f"{lines['lines']:,} lines that many documents share, left out "
                        f"{lines['removed']:,} times and kept once"),
    ]  # fmt: skip


def _skipped(result: DocumentsResult) -> str:
    left_out = result.counts["left_out"]
    return f"{result.n_skipped:,}" + (f", and {left_out:,} hidden, temporary or of the system" if left_out else "")


def _personal(counts: Mapping[str, Any]) -> str:
    kinds = [f"{kind} {n:,} in {documents:,}" for kind, (documents, n) in counts["personal_data"].items()]
    return (f"{', '.join(kinds)} documents" if kinds else "none found") + (
        " (masked)" if counts["masked"] and kinds else ""
    )
