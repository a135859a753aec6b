"""Run folders: one process at a time, names of files, no links that lead out; the manifest beside
every output; and the

runs of a folder, with the command that continues each.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import re
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Literal

from kinject.disk.files import (
    LOCK,
    content_id,
    delete_parts,
    file_hash,
    file_hashes,
    is_file,
    kind_of,
    leads_into,
    open_regular,
    path_exists,
    read_bytes,
    unwritable,
    write_json,
)
from kinject.disk.jsonl import FORMAT_VERSION, check_version, read_json
from kinject.errors import DiskError, InputError, KinjectError
from kinject.secrets import without_secrets
from kinject.version import package_version

log = logging.getLogger(__name__)

_MOST_LOCK_BYTES = 200
_LEASE = 70.0
"""Seconds without a renewal after which another machine's lock counts for nothing; it is renewed
three times in them. Network file systems keep what they know of a file for up to 60 s."""
_MACHINE = re.compile(r"process \d+ on (.+) since .")
_PLAIN_NAME = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?\Z")
_MOST_NAME_BYTES = 100
State = Literal["done", "short", "unfinished", "running", "not started"]
MANIFEST_FIX = "Delete it and run the same command again (kinject train: with --resume)."
_LAST_FILES: Mapping[str, str] = {
    "study": "report.html",
    "train": "model",
    "eval": "report.html",
    "documents": "documents.jsonl",
    "augment": "corpus.jsonl",
    "questions": "questions.jsonl",
}
"""Verb -> its last file."""
_SECTIONS = {
    "study": "study",
    "trainer": "train",
    "eval": "eval",
    "augment": "augment",
    "questions": "questions",
}
"""Section of a recipe -> verb; the first that a recipe has decides."""
_KEY = re.compile(r"^([a-z_]+):", re.MULTILINE)
_RUN_DIR = re.compile(r"""^run_dir:[ \t]*["']?([^"'\n#]+?)["']?[ \t]*(?:#.*)?$""", re.MULTILINE)
_DEEPEST = 4
_OTHERS = frozenset({"stages", "tokens", "parsed", "model", "figures"})
"""Folders below runs/ in which nobody's own runs are."""


@contextlib.contextmanager
def lock_dir(folder: Path, *, wait: bool = False, stage: str = "") -> Iterator[None]:
    """Hold `folder` for this process while the block runs, and delete temporary files of killed
    processes.

    With `wait` until another process is done with it; with a `stage`, the verb that writes a
    manifest there, unless `refuse_other_stage` raises.

    The lock is the kernel's (flock), so it ends with the process, however that ends. Not every
    network file system shares it between machines, so the holder also renews its name in the lock
    file: another machine that finds it watches it for `_LEASE`, and goes on if nothing renews it.
    (filelock asks the kernel as well; its import takes 0.11 s, two thirds of a verb's start.)

    Raises `DiskError` with the holder (process, machine, since when), or if nothing can be locked.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_outside_links(folder)
        # After the check of links: the lock may be one, which this would follow.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError) as error:
        raise DiskError(
            f"{folder}: cannot be a run folder: it is a file. Choose another run_dir."
        ) from error
    except OSError as error:
        raise unwritable(folder, error) from error
    except ValueError as error:  # a NUL, which a recipe may hold
        raise DiskError(f"{folder}: cannot be a run folder: {error}. Change run_dir.") from error
    try:
        holder = _lock(folder, descriptor, wait=wait)
        with _renewed(path, descriptor, holder):
            if stage:
                refuse_other_stage(folder, stage)
            delete_parts(folder)
            yield
    finally:
        # The file stays: it marks a run folder, and a name that is made again would let two
        # processes hold two locks.
        os.close(descriptor)


def refuse_other_stage(folder: Path, stage: str) -> None:
    """Raise `InputError` if `folder` holds the run of another verb than `stage`, whose manifest and
    files this one would replace."""
    manifest = _listed_manifest(folder)
    if manifest is not None and manifest.stage != stage:
        raise InputError(
            f"{folder}: holds a run of kinject {manifest.stage}, and kinject {stage} would write "
            "over its files. Choose another folder, or delete this one."
        )


def _lock(folder: Path, descriptor: int, *, wait: bool) -> str:
    """Lock a folder and write this process's name into its lock file; return that name."""
    try:
        if wait:
            _wait_for_process(folder, descriptor)
        this_process = _this_process()
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _wait_for_other_machine(folder)
        _write_holder(descriptor, this_process)
    except BlockingIOError as error:
        raise _in_use(folder, _holder(folder / LOCK)) from error
    except OSError as error:
        raise unwritable(folder / LOCK, error, "locked") from error
    return this_process


def _wait_for_process(folder: Path, descriptor: int) -> None:
    """Lock a folder once the process of this machine that holds it is done, and log the wait."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(folder / LOCK) or "another process"
        log.info(f"{folder}: in use by {holder}. Waiting for it.")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _wait_for_other_machine(folder: Path) -> None:
    """Return once no other machine holds `folder`. Raises `DiskError` if one renews its name.

    Clocks are not compared: machines may disagree about the time by more than a lease.
    """
    found = _holder(folder / LOCK)
    machine = _MACHINE.match(found)
    # A part of a name is of a process whose disk was full: no holder leaves one.
    if machine is None or machine[1] == socket.gethostname():
        return  # flock has answered for this machine
    log.warning(
        f"{folder}: {found} did not release it. Watched for {_LEASE:g} s: if nothing renews its "
        "name, that machine is gone and this run goes on."
    )
    end = monotonic() + _LEASE
    while monotonic() < end:
        sleep(_LEASE / 70)
        # Opened each time: only so does a network file system ask the server.
        now = _holder(folder / LOCK)
        if not now:
            return
        if now != found:
            raise _in_use(folder, now)


@contextlib.contextmanager
def _renewed(path: Path, descriptor: int, holder: str) -> Iterator[None]:
    """Renew the name in a lock file until the block ends, and take it out then.

    Where another machine has written its own meanwhile, this process ends as after SIGTERM.
    """
    ended = threading.Event()

    def renew() -> None:
        n = 0
        while not ended.wait(_LEASE / 3.5):
            n += 1
            try:
                found = _holder(path)
                if found and not found.startswith(holder):
                    log.error(f"{path.parent}: taken by {found}. This process ends.")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                _write_holder(descriptor, f"{holder}, renewed {n} times")
            except OSError as error:  # the file server may be back at the next time
                log.warning(f"{path}: its lock was not renewed: {error.strerror}.")

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        # A disk that refuses it was reported by the run: the name then waits as a killed process's.
        with contextlib.suppress(OSError):
            if _holder(path).startswith(holder):
                os.ftruncate(descriptor, 0)


def _holder(path: Path) -> str:
    """Return the name in a lock file, "" without one."""
    try:
        return path.read_bytes()[:_MOST_LOCK_BYTES].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""


def _write_holder(descriptor: int, name: str) -> None:
    # In one write, longer than any name before it: a reader sees the old name or the new one.
    os.pwrite(descriptor, name.ljust(_MOST_LOCK_BYTES).encode()[:_MOST_LOCK_BYTES], 0)
    os.fsync(descriptor)


def _in_use(folder: Path, holder: str) -> DiskError:
    holder = holder or "another process"
    return DiskError(f"{folder}: in use by {holder}. Wait for it or choose another run folder.")


def _this_process() -> str:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"


def file_name(name: str) -> str:
    """Return a file name for any `name`: the name itself if it is a plain word, else a similar one
    with a hash.

    The result has no separator, begins with a letter or digit, is short, and differs for different
    names.
    """
    if _PLAIN_NAME.match(name) and len(name.encode()) <= _MOST_NAME_BYTES:
        return name
    similar = re.sub(r"[^\w+=@-]+", "_", name).strip("_-+=@")
    # File systems limit bytes, not letters; half a letter at the end is left out.
    similar = similar.encode()[:_MOST_NAME_BYTES].decode("utf-8", "ignore")
    return f"{similar or 'name'}-{content_id(name)[:8]}"


def refuse_outside_links(folder: Path) -> None:
    """Raise `DiskError` if a link below `folder` leads out of it, or an entry is no file (a pipe, a
    socket, a device).

    Files written through the link would land elsewhere; opening a pipe, here or in a library, may
    never end. The root of the file system is no run folder: looking through it takes minutes.
    """
    # Not Path.resolve, which raises for a link that leads to itself.
    root = Path(os.path.realpath(folder))
    if root == root.parent:
        raise DiskError(
            f"{folder}: the root of the file system. Choose a folder for this run alone as run_dir."
        )
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(parent, name)
            if os.path.islink(path) and not leads_into(path, root):
                raise DiskError(
                    f"{path}: a link that leads out of the run folder. Remove it, or give its "
                    "target as run_dir."
                )
        for name in files:
            # Gone meanwhile, or a link to nothing: nothing can be opened.
            with contextlib.suppress(OSError):
                kind = kind_of(os.stat(os.path.join(parent, name)).st_mode)
                if kind:
                    raise DiskError(
                        f"{os.path.join(parent, name)}: found {kind} in the run folder. Remove it."
                    )


_PACKAGES = (
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "tokenizers",
    "bitsandbytes",
    "numpy",
    "scipy",
    "bm25s",
    "openai",
)
"""Packages that decide a number, and the client of endpoints."""


@cache
def _versions() -> Mapping[str, str]:
    """Return package -> version; reading them from the packages' metadata takes a tenth of a
    second."""
    versions = {"python": platform.python_version(), "kinject": package_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def changed_versions(versions: Mapping[str, str]) -> str:
    """Return the packages of a manifest's `versions` that have another version now, as ``trl 1.16
    then, 1.17 now``."""
    changed = []
    for package, now in _versions().items():
        then = versions.get(package, now)
        if then != now:
            changed.append(f"{package} {then} then, {now} now")
    return "; ".join(changed)


def write_versions(path: Path) -> None:
    """Write the versions of the packages as they are now, for `changed_versions`."""
    write_json(path, dict(_versions()))


def write_manifest(
    path: Path,
    *,
    stage: str,
    inputs: Mapping[str, str],
    recipe: Mapping[str, Any],
    counts: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> None:
    """Write the manifest of `stage`: inputs (name -> hash), recipe, versions, counts, and the
    hashes of `outputs`.

    `outputs` are finished files beside `path`; `check_output` finds out whether one has changed
    since.
    """
    write_json(
        path,
        {
            "format_version": FORMAT_VERSION,
            "stage": stage,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": [
                "kinject",
                *(without_secrets(word) for word in sys.argv[1:] if word != "--json"),
            ],
            "inputs": dict(inputs),
            "recipe": dict(recipe),
            "versions": _versions(),
            "machine": {"system": platform.system(), "processor": platform.machine()},
            "counts": dict(counts),
            "outputs": dict(
                zip(outputs, file_hashes([path.parent / name for name in outputs]), strict=True)
            ),
        },
    )


def read_manifest_fields(path: Path) -> dict[str, Any] | None:
    """Return the manifest at `path` as JSON, or None if there is none; `kinject.manifests` has what
    its stage wrote, typed.

    Raises `InputError` if it is damaged or was written by a newer kinject.
    """
    if not path_exists(path):
        return None
    value = read_json(path, MANIFEST_FIX)
    if "format_version" not in value or not all(
        isinstance(value.get(key), dict) for key in ("inputs", "counts")
    ):
        raise InputError(
            f"{path}: damaged: format_version, inputs or counts are missing or of another shape. "
            f"{MANIFEST_FIX}"
        )
    check_version(value["format_version"], str(path))
    return value


def check_output(path: Path, fix: str) -> str:
    """Return the SHA-256 of a file that a stage may have written.

    Raises `InputError` with `fix` if the manifest beside it names the file with another hash,
    `DiskError` as `file_hash`.
    """
    sha256 = file_hash(path)
    manifest = read_manifest_beside(path)
    outputs = None if manifest is None else manifest.get("outputs")
    # A manifest that does not name the file says nothing of it.
    if isinstance(outputs, dict) and outputs.get(path.name, sha256) != sha256:
        raise InputError(
            f"{path}: its bytes are not those that were written (manifest.json beside it has their "
            f"hash). {fix}"
        )
    return sha256


def read_manifest_beside(path: Path) -> dict[str, Any] | None:
    """Return the manifest in the folder of `path` as JSON; None if kinject wrote none there.

    Raises as `read_manifest_fields`.
    """
    manifest = path.parent / "manifest.json"
    if not is_file(manifest) or _is_foreign(manifest):
        return None
    return read_manifest_fields(manifest)


def _is_foreign(path: Path) -> bool:
    """Return whether a manifest.json is another program's."""
    try:
        value = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        return False
    return not isinstance(value, dict) or not {"stage", "format_version"} & value.keys()


@dataclass(frozen=True)
class FoundRun:
    """One run: its folder, its verb, its state, the command that starts or continues it, and its
    recipe ("" if unknown).

    `short` means finished with less than requested; the command requests again what failed, and
    prints what brings the rest.
    """

    run_dir: Path
    verb: str
    state: State
    command: str
    recipe: str = ""


def find_runs(folder: Path = Path(), below: str = "runs") -> list[FoundRun]:
    """Return the runs of the recipes in `folder` and those in its folder `below`: by recipe, then
    by name."""
    recipes: dict[Path, tuple[str, str]] = {}
    for run_dir, found in _recipes(folder):
        recipes.setdefault(run_dir, found)
    runs = [_run(folder, run_dir, verb, recipe) for run_dir, (verb, recipe) in recipes.items()]
    # A recipe may name its folder from the root, or through a link.
    known = {os.path.realpath(folder / run_dir) for run_dir in recipes}
    for path in sorted(_run_folders(folder / below, 0)):
        if os.path.realpath(path) in known:
            continue
        run_dir = path.relative_to(folder)
        manifest = _listed_manifest(path)
        if manifest is not None and manifest.stage in _LAST_FILES:
            runs.append(_run(folder, run_dir, manifest.stage, ""))
    return runs


def listed_runs(folder: Path = Path()) -> list[FoundRun]:
    """Return the runs in `folder` that have begun, and those of recipes that `kinject try` wrote
    for documents of this folder, in order."""
    runs = find_runs(folder)
    return in_order(run for run in runs if run.state != "not started" or _is_own(folder, run))


def _is_own(folder: Path, run: FoundRun) -> bool:
    if not run.recipe:
        return False
    documents = Path("runs") / Path(run.recipe).parent.name / "documents" / "documents.jsonl"
    return (folder / documents).exists()


def in_order(runs: Iterable[FoundRun]) -> list[FoundRun]:
    """Return runs with a pilot first, then by folder, each in the order of the job."""
    return sorted(runs, key=_order)


def _order(run: FoundRun) -> tuple[bool, Path, int]:
    verbs = ("augment", "questions", "train", "eval")
    position = verbs.index(run.verb) if run.verb in verbs else len(verbs)
    return run.run_dir.parent.name != "pilot", run.run_dir.parent, position


def next_command(runs: Sequence[FoundRun]) -> str:
    """Return the command of the first unfinished run, else of the first that has not begun, else
    ""."""
    for run in runs:
        if run.state == "unfinished" and run.command:
            return run.command
    for run in runs:
        if run.state == "not started":
            return run.command
    return ""


def _recipes(folder: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield (run_dir, (verb, path)) of each recipe in the folder and below its recipes/; of two
    with a run_dir, the first."""
    for path in (*sorted(folder.glob("*.yaml")), *sorted((folder / "recipes").rglob("*.yaml"))):
        # kinject recipes check reports its faults.
        with contextlib.suppress(KinjectError, UnicodeDecodeError):
            text = read_bytes(path).decode("utf-8").replace("\r\n", "\n")
            run_dir, keys = _RUN_DIR.search(text), set(_KEY.findall(text))
            verb = next((verb for section, verb in _SECTIONS.items() if section in keys), "")
            if run_dir and verb:
                yield Path(run_dir[1]), (verb, str(path.relative_to(folder)))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders, of `folder` and those below it, that a run has held."""
    if (folder / LOCK).exists():
        yield folder
        return
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            is_other = entry.name.startswith((".", "checkpoint-")) or entry.name in _OTHERS
            if not is_other and entry.is_dir() and depth <= _DEEPEST:
                yield from _run_folders(Path(entry.path), depth + 1)


def _run(folder: Path, run_dir: Path, verb: str, recipe: str) -> FoundRun:
    path, last = folder / run_dir, _LAST_FILES[verb]
    manifest = _listed_manifest(path)
    state: State = "unfinished"
    if _is_held(path / LOCK):
        state = "running"
    # A recipe may name a folder that no file system can have.
    elif not any(path_exists(path / name) for name in (LOCK, "manifest.json", last)):
        state = "not started"
    elif path_exists(path / last) and manifest is not None and manifest.finished:
        state = "short" if manifest.n_missing > 0 else "done"
    words = [] if manifest is None else list(manifest.command)
    if words[1:2] != [verb]:
        words = ["kinject", verb, recipe] if recipe else []
    # The command continues a run, and must not begin it anew.
    words = [word for word in words if word not in ("--overwrite", "--resume")]
    if words and verb == "train" and state == "unfinished":
        words.append("--resume")
    return FoundRun(run_dir, verb, state, shlex.join(words), recipe)


@dataclass(frozen=True)
class _ListedManifest:
    """What the list of runs needs of a manifest. `n_missing` counts texts that were asked for and
    have no answer."""

    stage: str
    command: tuple[str, ...]
    finished: bool
    n_missing: int


def _listed_manifest(path: Path) -> _ListedManifest | None:
    """Return the manifest of a run folder, None if it has none that can be read.

    The bare command lists runs, so neither a damaged manifest ends it, nor is pydantic imported
    (`kinject.manifests`), which takes longer than the list.
    """
    try:
        manifest = json.loads(read_bytes(path / "manifest.json"))
        counts = manifest["counts"]
        n_missing = counts.get("asked", 0) - counts.get("got", 0)
        for style in counts.get("styles", {}).values():
            n_missing -= style.get("nothing", 0)  # answered: there is nothing to write
        return _ListedManifest(
            stage=str(manifest["stage"]),
            command=tuple(map(str, manifest["command"])),
            finished=bool(counts.get("finished", True)),
            n_missing=n_missing,
        )
    except (KinjectError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a run folder."""
    # Opened as what others may have put there: a pipe would be waited for.
    with (
        contextlib.suppress(OSError, ValueError, KinjectError),
        open(lock, "rb", opener=open_regular) as file,
    ):
        try:
            # Shared, so that two lists at once do not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
