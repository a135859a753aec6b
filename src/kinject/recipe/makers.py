"""The commands that make what recipes read, for messages about an input that is missing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from kinject.disk import FoundRun, find_runs
from kinject.errors import InputError
from kinject.gguf_files import PACKAGE, package_command
from kinject.recipe.shipped import read_shipped

PUBLIC_FILES: Mapping[str, tuple[str, ...]] = {
    "mmlu": ("mmlu",),
    "instructions": ("instructions.jsonl",),
    "replay": ("general-held-out.jsonl", "general.jsonl"),
    "wikipedia-subjects": ("mmlu-wikipedia",),
    "current-events": ("current-events",),
}
"""Data set of `kinject recipes data` -> its files and folders below data/."""

# The sandbox's models have recipes, too, but are copied: from nothing the demo took 9 min 50 s
# before its base was shipped.
_COMMANDS = {
    "runs/sandbox/base-corpus.jsonl": "kinject sandbox corpus",
    "runs/sandbox/chat.jsonl": "kinject sandbox chat",
    "runs/sandbox/sentences.jsonl": "kinject sandbox sentences",
    "runs/sandbox/base": "kinject sandbox base",
    "runs/sandbox/instruct": "kinject sandbox instruct",
    "runs/NAME": "kinject try FOLDER",
    "runs/real/smollm2": "kinject demo --real",
    "runs/real/minilm": "kinject demo --real",
    "data/sandbox": "kinject sandbox build",
    "eval/sandbox": "kinject sandbox build",
}
"""What no recipe makes, or a copy that ships saves the time of -> the command that writes it."""
_OF_TRY = ("documents", "pilot")
"""Folders of runs/NAME that `kinject try` writes; their files come from no recipe."""


def command_for(path: str) -> str:
    """Return the command that makes the file or folder at `path`, "" if none is known.

    It may fetch public data, write the sandbox's, copy what ships, look at documents, or run a
    recipe of this folder or a shipped one into whose run folder `path` leads.
    """
    if path.startswith(PACKAGE):
        return package_command(path)
    for command in _commands(Path(path)):
        return command
    return ""


def _depth(run: FoundRun) -> int:
    return len(run.run_dir.parts)


def _commands(path: Path) -> Iterator[str]:
    """Yield the commands that make `path`, the best one first."""
    for name, files in PUBLIC_FILES.items():
        if any(path.is_relative_to(f"data/{file}") for file in files):
            yield f"kinject recipes data get {name}"
    for made, command in _COMMANDS.items():
        if path.is_relative_to(made):
            yield command
    runs = [run for run in find_runs() if run.run_dir in path.parents]
    if runs:
        # A run folder may be inside another (a pilot's): the innermost run makes the file.
        run = max(runs, key=_depth)
        # A run that is done has made all that it makes, so its command would not make this file.
        if run.state != "done":
            yield run.command
        return
    yield from _try_commands(path)
    try:
        shipped = read_shipped().values()
    except InputError:  # installed without recipes
        return
    for recipe in shipped:
        run_dir = recipe.values.get("run_dir")
        if recipe.verb and isinstance(run_dir, str) and Path(run_dir) in path.parents:
            yield f"kinject {recipe.verb} {recipe.path}"
    for recipe in shipped:
        if recipe.copies(path) or recipe.path == path:
            yield f"kinject recipes copy {recipe.name}"


def _try_commands(path: Path) -> Iterator[str]:
    """Yield the command that writes a path in runs/NAME/documents or runs/NAME/pilot."""
    if len(path.parts) < 3 or path.parts[0] != "runs" or path.parts[2] not in _OF_TRY:
        return
    name = path.parts[1]
    # The run is named after the documents; elsewhere than here, only the user knows where they are.
    folder = "FOLDER"
    if Path(name).exists():
        folder = name
    # FOLDER is for the reader to replace, and needs no quotes.
    yield f"kinject try {shlex.quote(folder)}"
