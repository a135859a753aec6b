"""The runs of a folder, finished and unfinished, and the command that continues each. Quick: it checks no content."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kinject.disk.files import LOCK

State = Literal["done", "short", "unfinished", "running", "not started"]

_LAST_FILES: Mapping[str, str] = {
    "study": "report.html", "train": "model", "eval": "report.html", "documents": "documents.jsonl",
    "augment": "corpus.jsonl", "questions": "questions.jsonl",
}  # fmt: skip
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


@dataclass(frozen=True)
class FoundRun:
    """One run: its folder, its verb, its state, the command that starts or continues it, and its recipe ("" if unknown).

    `short` means finished with less than requested; the command requests the rest.
    """

    run_dir: Path
    verb: str
    state: State
    command: str
    recipe: str = ""


def find_runs(folder: Path = Path()) -> list[FoundRun]:
    """Return the runs of the recipes in `folder` and those in its folder runs/: by recipe, then by name."""
    recipes = dict(_recipes(folder))
    runs = [_run(folder, run_dir, verb, recipe) for run_dir, (verb, recipe) in recipes.items()]
    others = sorted(set(_run_folders(folder / "runs", 0)) - {folder / run_dir for run_dir in recipes})
    for path in others:
        run_dir = path.relative_to(folder)
        verb = str(_manifest(path).get("stage"))
        if verb in _LAST_FILES:
            runs.append(_run(folder, run_dir, verb, ""))
    return runs


def _recipes(folder: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield (run_dir, (verb, path)) of each recipe in the folder and below its recipes/; of two with a run_dir, the first."""
    for path in (*sorted(folder.glob("*.yaml")), *sorted((folder / "recipes").rglob("*.yaml"))):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # kinject recipes check reports its faults
            text = path.read_text("utf-8")
            run_dir, keys = _RUN_DIR.search(text), set(_KEY.findall(text))
            verb = next((verb for section, verb in _SECTIONS.items() if section in keys), "")
            if run_dir and verb:
                yield Path(run_dir[1]), (verb, str(path.relative_to(folder)))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders below `folder` that a run has held."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            if entry.name.startswith((".", "checkpoint-")) or entry.name in _OTHERS or not entry.is_dir():
                continue
            if (Path(entry.path) / LOCK).exists():
                yield Path(entry.path)
            elif depth < _DEEPEST:
                yield from _run_folders(Path(entry.path), depth + 1)


def _run(folder: Path, run_dir: Path, verb: str, recipe: str) -> FoundRun:
    path, last = folder / run_dir, _LAST_FILES[verb]
    manifest = _manifest(path)
    counts = manifest.get("counts", {})
    state: State = "unfinished"
    if _is_held(path / LOCK):
        state = "running"
    elif not any((path / name).exists() for name in (LOCK, "manifest.json", last)):
        state = "not started"
    elif (path / last).exists() and manifest and counts.get("finished", True):
        n_nothing = sum(
            style.get("nothing", 0) for style in counts.get("styles", {}).values()
        )  # answered: nothing to write
        state = "short" if counts.get("got", 0) + n_nothing < counts.get("asked", 0) else "done"
    words = list(map(str, manifest.get("command", ())))
    if words[1:2] != [verb]:
        words = ["kinject", verb, recipe] if recipe else []
    words = [word for word in words if word not in ("--overwrite", "--resume")]
    if words and verb == "train" and state == "unfinished":
        words.append("--resume")
    return FoundRun(run_dir, verb, state, shlex.join(words), recipe)


def _manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a run folder, {} if it has none that can be read."""
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) and isinstance(manifest.get("counts"), dict) else {}


def _is_held(lock: Path) -> bool:
    """Return whether a process holds a run folder."""
    with contextlib.suppress(OSError), lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
