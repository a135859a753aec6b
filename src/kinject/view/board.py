"""The board of kinject view: starts and stops the steps of a folder, and changes their recipes.

A step is the command that a user would type, in a process of its own, so it makes the same checks.
One step runs at a time; the lock of its run folder keeps other processes out, as everywhere. A step
ends with the server: whoever closes the terminal wants nothing left that only `kill` can stop.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from kinject.augment.styles import read_styles
from kinject.disk import FoundRun, content_id, find_runs, in_order, leads_into, write_text
from kinject.errors import InputError
from kinject.recipe.check import KeyPath
from kinject.recipe.yaml_lines import parse_scalar, read_text, read_yaml, with_changes
from kinject.secrets import without_secrets
from kinject.terminal import printable, show
from kinject.view.lists import Json

POSTS = frozenset({"start", "stop", "try", "save"})
"""What a request may ask of a board."""
_VERBS = ("augment", "questions", "train", "eval")
"""Verbs with a recipe that the board starts, beside try."""
_MOST_SHOWN = 20_000  # characters of a step's output, its end
_LONGEST_VALUE = 500  # characters: longer than any path or name in a shipped recipe
_NO_DOCUMENTS = frozenset({"runs", "recipes", "data", "eval"})
"""Folders that kinject writes: nobody's documents."""
_ENDINGS: dict[int, str] = {
    0: "done",
    # Of an evaluation a requirement too, of a training a loss that ended far above its beginning.
    1: "finished, but incomplete or not as it should: the output says why",
    # Also hours after the start: a loss that is not a number, a full disk, an endpoint that fails.
    2: "ended by a fault: the output says what to change",
    3: "finished: too few questions to tell, and the output says how many would",
    70: "ended by a bug in kinject",
}
_STOPPED = "stopped: finished work is kept, and start continues it"
# kinject ends by the signal itself, as shells expect; launchers and scripts give its exit code.
_ENDINGS |= dict.fromkeys((-signal.SIGINT, -signal.SIGTERM, 130, 143), _STOPPED)
"""Exit code -> what it means, as kinject --help has it."""


class RefusedError(Exception):
    """A request that gets no answer but `status` and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Field:
    """One key of a recipe's form. The value is typed as text, or as YAML (a number)."""

    key: KeyPath
    label: str
    is_text: bool = False
    always: bool = False
    """Offered where the recipe lacks the key too."""


_FORMS: Mapping[str, tuple[Field, ...]] = {
    "augment": (
        Field(("augment", "generator", "model"), "model that writes", is_text=True),
        Field(("augment", "passage_tokens"), "tokens of a passage"),
        Field(("augment", "budget"), "most money to spend"),
    ),
    "questions": (
        Field(("questions", "generator", "model"), "model that writes", is_text=True),
        Field(("questions", "n_questions"), "questions about a passage"),
        Field(("questions", "budget"), "most money to spend"),
    ),
    "train": (
        Field(("model", "path"), "model that learns: a folder, or a name on the hub", is_text=True),
        Field(("trainer", "num_train_epochs"), "passes over the texts"),
        Field(("trainer", "max_steps"), "steps, instead of passes"),
        Field(("trainer", "learning_rate"), "learning rate"),
        Field(("trainer", "per_device_train_batch_size"), "rows at once: more need more memory"),
        Field(("trainer", "gradient_accumulation_steps"), "times that many rows in an update"),
        Field(("trainer", "max_length"), "tokens of a row"),
    ),
    "eval": (Field(("eval", "limit"), "most questions of a set", always=True),),
}
"""Verb -> the keys that its form may change; styles and models come from the recipe."""


@dataclass(frozen=True)
class _Step:
    """A step that was started here: its process, and the file with its output."""

    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started: str
    stops: list[int] = field(default_factory=list)

    def text(self) -> str:
        """Return the end of the output, safe to show."""
        descriptor = self.output.fileno()
        size = os.fstat(descriptor).st_size
        n_bytes = min(size, 4 * _MOST_SHOWN)  # a character has up to four
        # Not read(): the process writes at the position of the same open file.
        written = os.pread(descriptor, n_bytes, size - n_bytes).decode("utf-8", "replace")
        lines = [line.rsplit("\r", 1)[-1] for line in written.replace("\r\n", "\n").split("\n")]
        # Libraries print too, and they neither leave out secrets nor control characters.
        return printable(without_secrets("\n".join(lines)[-_MOST_SHOWN:]))


class Board:
    """The steps of a folder. `find_faults` returns those of a recipe, a line each."""

    def __init__(self, folder: Path, find_faults: Callable[[Path], str]) -> None:
        self.folder = folder
        self._find_faults = find_faults
        # Each request has a thread of its own.
        self._lock = threading.Lock()
        self._step: _Step | None = None

    def state(self) -> dict[str, Json]:
        """Return the steps of the folder, the one that runs or ran last, and the folders that may
        hold documents."""
        with self._lock:
            return {
                "steps": [self._about(run) for run in self._steps()],
                "step": self._about_step(),
                "folders": self._document_folders(),
            }

    def form(self, recipe: str) -> dict[str, Json]:
        """Return the keys of a recipe that the page may change, with their values and the id of the
        text that they were read from."""
        run = self._find(recipe)
        text = read_text(self.folder / run.recipe)
        fields = []
        for item, value in self._fields(run):
            shown = ""
            if isinstance(value, str):
                shown = value
            elif value is not None:
                shown = json.dumps(value)
            fields.append({"key": list(item.key), "label": item.label, "value": shown})
        return {"fields": fields, "id": content_id(text)}

    def save(self, recipe: str, text_id: str, values: Sequence[tuple[KeyPath, str]]) -> None:
        """Change values of a recipe, after its own check. Raises `InputError` with every fault at
        its line, and leaves the recipe as it is."""
        run = self._find(recipe)
        path = self.folder / run.recipe
        with self._lock:
            text = read_text(path)
            if content_id(text) != text_id:
                raise RefusedError(
                    409, f"{run.recipe} has changed since this form was opened: open it again"
                )
            known = {item.key: (item, value) for item, value in self._fields(run)}
            changes: dict[KeyPath, Json] = {}
            for key, typed in values:
                if key not in known:
                    raise RefusedError(400, f"{'.'.join(map(str, key))}: no key of this form")
                item, before = known[key]
                value = _value_of(item, typed)
                if value != before:
                    changes[key] = value
            changed = with_changes(text, changes, path)
            self._check_text(run.recipe, changed)
            write_text(path, changed)

    def post(self, route: str, row: Mapping[str, Any]) -> None:
        """Do what a request of the page asks for."""
        if route == "start":
            self.start(row["recipe"])
        elif route == "try":
            self.try_documents(row)
        elif route == "stop":
            self.stop()
        else:
            values = [(tuple(item["key"]), item["value"]) for item in row["values"]]
            self.save(row["recipe"], row["id"], values)

    def start(self, recipe: str) -> None:
        """Start the step of a recipe. Raises `RefusedError` while another one runs."""
        run = self._find(recipe)
        # A step of this page holds its folder too; what stops it is said by _start.
        if run.state == "running" and self._running() is None:
            raise RefusedError(409, f"{run.run_dir}: in use by another process")
        self._start(_words_of(run))

    def try_documents(self, values: Mapping[str, Json]) -> None:
        """Start kinject try for a folder in this one."""
        documents = str(values.get("documents", ""))
        if documents not in self._document_folders():
            raise RefusedError(400, f"{documents!r}: choose a folder in the folder of this page")
        # A name may begin with a dash, which argparse would take for an option.
        if documents.startswith("-"):
            documents = f"./{documents}"
        words = ["try", documents]
        for name in ("model", "memory", "endpoint"):
            value = values.get(name, "")
            if not isinstance(value, str) or len(value) > _LONGEST_VALUE:
                raise RefusedError(400, f"{name}: a text of at most {_LONGEST_VALUE} characters")
            if value.strip():
                words.append(f"--{name}={value.strip()}")
        self._start(words)

    def stop(self) -> None:
        """Send the running step the signal of Ctrl-C; a second one ends it at once, as there."""
        with self._lock:
            step = self._running()
            if step is None:
                raise RefusedError(409, "no step runs")
            number = signal.SIGINT
            # What ignores Ctrl-C, as all in the background of a script, still ends by SIGTERM.
            if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
                number = signal.SIGTERM
            step.stops.append(number)
            # To the group, as a terminal does: a step may have workers.
            os.killpg(step.process.pid, number)

    def close(self) -> None:
        """Stop the step, if one runs, and wait until it has saved what it must."""
        while (step := self._running()) is not None:
            words = shlex.join(step.words)
            show(f"stopping: {words} (Ctrl-C again ends it at once)", flush=True)
            try:
                # It may have ended meanwhile.
                with contextlib.suppress(RefusedError):
                    self.stop()
                step.process.wait()
            except KeyboardInterrupt:
                continue  # the next signal is the second one
        if self._step is not None:
            self._step.output.close()
            self._step = None

    def _running(self) -> _Step | None:
        """Return the step that runs, None if there is none."""
        if self._step is None or self._step.process.poll() is not None:
            return None
        return self._step

    def _start(self, words: Sequence[str]) -> None:
        with self._lock:
            running = self._running()
            if running is not None:
                raise RefusedError(
                    409, f"{shlex.join(running.words)} runs. Stop it, or wait until it is done."
                )
            if self._step is not None:
                self._step.output.close()
            # Without a name: it holds what is on the screen, and ends with this process.
            output = tempfile.TemporaryFile()  # noqa: SIM115 (open while the step is shown)
            process = subprocess.Popen(
                # -P: with the folder on its path, Python would run a torch.py that lies there.
                [sys.executable, "-P", "-m", "kinject.cli", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal reaches the server alone, which then stops the step.
                start_new_session=True,
            )
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._step = _Step(("kinject", *words), process, output, now)

    def _steps(self) -> list[FoundRun]:
        """Return the steps of the recipes in this folder, in the order of the job.

        A recipe may lie elsewhere by a link, or write elsewhere: such are for the command line.
        """
        found = []
        for run in find_runs(self.folder):
            paths = (self.folder / run.recipe, self.folder / run.run_dir)
            inside = all(leads_into(path, self.folder) for path in paths)
            if run.recipe and run.verb in _VERBS and inside:
                found.append(run)
        return in_order(found)

    def _find(self, recipe: str) -> FoundRun:
        for run in self._steps():
            if run.recipe == recipe:
                return run
        raise RefusedError(404, f"no such recipe: {recipe}")

    def _about(self, run: FoundRun) -> dict[str, Json]:
        return {
            "recipe": run.recipe,
            "run": run.run_dir.as_posix(),
            "verb": run.verb,
            "state": run.state,
            "command": shlex.join(("kinject", *_words_of(run))),
        }

    def _about_step(self) -> dict[str, Json]:
        """Return what is shown of the step that runs, or ran last; {} before the first."""
        step = self._step
        if step is None:
            return {}
        code = step.process.poll()
        state = "running"
        if step.stops:
            state = "stopping"
        if code is not None:
            # Below zero: the number of the signal that ended it.
            state = _ENDINGS.get(code, f"ended with exit code {code}")
        return {
            "command": shlex.join(step.words),
            "started": step.started,
            "running": code is None,
            "state": state,
            "output": step.text(),
        }

    def _document_folders(self) -> list[str]:
        """Return the folders here that may hold documents."""
        names = []
        for path in sorted(self.folder.iterdir()):
            is_own = path.name in _NO_DOCUMENTS or path.name.startswith(".")
            if not is_own and path.is_dir() and leads_into(path, self.folder):
                names.append(path.name)
        return [*names, "."]

    def _fields(self, run: FoundRun) -> Iterator[tuple[Field, Json]]:
        """Yield the keys of a form, each with its value in the recipe, None where it has none."""
        recipe = read_yaml(self.folder / run.recipe)
        values = recipe.root
        for item in _FORMS[run.verb]:
            # A key without a value, as one that was emptied here, can be filled again.
            if item.key in recipe.lines or item.always:
                yield item, _at(values, item.key)
        if run.verb == "augment":
            yield from _style_fields(values)
        if run.verb == "eval":
            for name, model in (_at(values, ("eval", "models")) or {}).items():
                if isinstance(model, str):
                    yield Field(("eval", "models", name), f"model {name}", is_text=True), model

    def _check_text(self, recipe: str, text: str) -> None:
        """Raise `InputError` with the faults of a recipe that is not written yet."""
        with tempfile.TemporaryDirectory() as folder:
            draft = Path(folder) / Path(recipe).name
            draft.write_text(text, "utf-8")
            faults = self._find_faults(draft)
            if faults:
                raise InputError(faults.replace(str(draft), recipe))


def _style_fields(values: Mapping[str, Any]) -> Iterator[tuple[Field, Json]]:
    """Yield a number of texts for each style; a style with other settings is left to the file."""
    section = values.get("augment") or {}
    chosen = section.get("styles") or {}
    styles = read_styles(section.get("style_files") or ())
    # Those that the recipe has come first.
    for name in dict.fromkeys((*chosen, *styles)):
        value = chosen.get(name, 0)
        if isinstance(value, int) and name in styles:
            yield Field(("augment", "styles", name), f"{name}: {styles[name].about}"), value


def _at(values: Json, key: KeyPath) -> Any:
    """Return the value at a key, None if there is none."""
    for part in key:
        if not isinstance(values, dict):
            return None
        values = values.get(str(part))
    return values


def _value_of(item: Field, typed: str) -> Json:
    """Return what was typed into a field; None for nothing."""
    if len(typed) > _LONGEST_VALUE or "\n" in typed:
        raise RefusedError(400, f"{item.label}: one line of at most {_LONGEST_VALUE} characters")
    if not typed.strip():
        return None
    if item.is_text:
        return typed.strip()
    value: Json = parse_scalar(typed)
    return value


def _words_of(run: FoundRun) -> tuple[str, ...]:
    """Return the words after `kinject` that start or continue a run.

    A manifest may have come with a copied folder: of the command in it only this recipe's own
    form is taken, a verb, the recipe and its overrides.
    """
    plain = (run.verb, run.recipe)
    if run.state not in ("unfinished", "short"):
        return plain
    words = tuple(shlex.split(run.command))[1:]
    allowed = all(re.match(r"[a-z_]+[\w.]*=|--resume\Z", word) for word in words[2:])
    if words[:2] == plain and allowed:
        return words
    if run.verb == "train":
        return (*plain, "--resume")
    return plain
