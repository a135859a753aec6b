"""Kills at random moments: start a command, send it a signal, start it again, until it ends; then look what was lost.

A `Case` is a command with the folders that it writes. `kill_often` runs it once undisturbed, then in chains: kill, go on,
kill, ..., to the end, each chain from empty folders. After each death `Case.look` says what must not be lost, and after
the end the folders must hold what the undisturbed run left, byte for byte but for `Case.timed`.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LONGEST_CHAIN = 12
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ENDED = {
    signal.SIGTERM: "terminated",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "hung up",
    signal.SIGQUIT: "quit",
}

Tree = dict[str, Any]
_DATE = re.compile(r"_\d{4}-\d\d-\d\dT[0-9.-]+(?=\.json)")
"""In the names of files in lm-evaluation-harness's layout."""


@dataclass
class Case:
    """A command that goes on where it was stopped: `argv` starts it, `again` every time but the first.

    `timed` maps a file's name to what takes times out of its bytes, `unordered` names files of rows in no order, and
    `ignored` files that say nothing about the result. `look(before, signal)` is called after each death with what it
    returned last; it asserts that nothing was lost and returns what must be there from now on.
    """

    argv: list[str]
    folders: list[Path]
    timed: Mapping[str, Callable[[bytes], Any]] = field(default_factory=dict)
    unordered: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset({".lock"})
    again: list[str] | None = None
    look: Callable[[Any, signal.Signals], Any] = lambda before, sent: None
    fresh: Callable[[], None] = lambda: None

    def words(self, *, first: bool) -> list[str]:
        """Return the command."""
        return self.argv if first or self.again is None else self.again

    def tree(self) -> Tree:
        """Return every file below the folders with its content, times taken out."""
        tree: Tree = {}
        for folder in self.folders:
            for path in sorted(folder.rglob("*")):
                if path.is_file() and path.name not in self.ignored:
                    name = _DATE.sub("_DATE", str(path.relative_to(folder)))
                    tree[f"{folder.name}/{name}"] = self._content(path)
        return tree

    def _content(self, path: Path) -> Any:
        content = path.read_bytes()
        if path.name in self.timed:
            return self.timed[path.name](content)
        return sorted(content.splitlines()) if path.name in self.unordered else content


def _hear_sigint() -> None:
    """Undo what a shell does to commands in the background: they, and all that they start, ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class System:
    """Starts kinject as a shell does, each process the leader of its own session. With `forks.Popen` none imports torch."""

    def __init__(
        self, scratch: Path, popen: type[subprocess.Popen[bytes]] = subprocess.Popen
    ) -> None:
        self.scratch, self._popen = scratch, popen
        _hear_sigint()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, words: list[str]) -> int:
        """Start a command; return its number."""
        with (
            (self.scratch / "stdout").open("wb") as out,
            (self.scratch / "stderr").open("wb") as err,
        ):
            process = self._popen(
                [sys.executable, "-m", "kinject.cli", *words], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
        self._processes[process.pid] = process
        return process.pid

    def ended(self, number: int) -> int | None:
        """Return the exit status, None while it runs."""
        return self._processes[number].poll()

    def wait(self, number: int) -> int:
        """Return the exit status when it has ended."""
        return self._processes[number].wait()

    def output(self) -> tuple[str, str]:
        """Return what the last process wrote to its stdout and stderr."""
        return (self.scratch / "stdout").read_text("utf-8"), (self.scratch / "stderr").read_text(
            "utf-8"
        )


@dataclass(frozen=True)
class Moment:
    """When to kill: after `seconds`, or right after the `n_writes`-th change of a file; to whom: the process or its group."""

    sent: signal.Signals
    seconds: float | None
    n_writes: int
    group: bool


@dataclass
class Undisturbed:
    """What a run without kills left, how long it took, and how often its files were seen to change."""

    tree: Tree
    code: int
    seconds: float
    n_writes: int


def _stamp(folders: list[Path]) -> int:
    """Return a number that changes with the files below `folders`."""
    stamps = []
    for folder in folders:
        for directory, _, names in os.walk(folder):
            for name in names:
                try:
                    state = os.stat(f"{directory}/{name}")
                except FileNotFoundError:
                    continue
                stamps.append((directory, name, state.st_size, state.st_mtime_ns))
    return hash(tuple(sorted(stamps)))


def _until(
    case: Case, system: System, number: int, moment: Moment | None
) -> tuple[int | None, int]:
    """Wait for the moment; return (exit status where the process ended before, changes of files seen)."""
    began, stamp, n_writes = time.monotonic(), _stamp(case.folders), 0
    while (code := system.ended(number)) is None:
        if (
            moment is not None
            and moment.seconds is not None
            and time.monotonic() - began >= moment.seconds
        ):
            break
        now = _stamp(case.folders)
        if now != stamp:
            stamp, n_writes = now, n_writes + 1
            if moment is not None and moment.seconds is None and n_writes >= moment.n_writes:
                break
        time.sleep(0.001)
    return code, n_writes


def _session_lives(number: int) -> bool:
    """Return whether any process of a session runs, zombies left out."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session, *_ = stat.read_text("utf-8").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) == number and state not in "ZX":
            return True
    return False


def _clear(case: Case) -> None:
    for folder in case.folders:
        shutil.rmtree(folder, ignore_errors=True)
    case.fresh()


def run_undisturbed(case: Case, system: System) -> Undisturbed:
    """Run the command from empty folders to its end."""
    _clear(case)
    began = time.monotonic()
    number = system.start(case.words(first=True))
    code, n_writes = _until(case, system, number, None)
    assert code in (0, 1), system.output()
    return Undisturbed(case.tree(), code, time.monotonic() - began, n_writes)


def check_death(
    case: Case, system: System, words: list[str], sent: signal.Signals, code: int
) -> str:
    """Assert that a signalled process ended honestly; return how: killed, told, finished, or outside (of our program).

    Outside is before its first line or after its last, where the system's own rules hold.
    """
    _, err = system.output()
    assert "Traceback" not in err, err
    assert "Exception ignored" not in err, err
    if code == -signal.SIGKILL and sent == signal.SIGKILL:
        return "killed"
    if code in (0, 1):
        return "finished"
    if code == -sent:
        return "outside"
    assert code == 128 + sent, (code, err)
    again = [word for word in words if word != "--resume"] + ["--resume"] * (words[0] == "train")
    assert err.endswith(
        f"kinject {words[0]}: {ENDED[sent]}. Finished work is kept. Resume with: {shlex.join(['kinject', *again])}\n"
    ), err
    return "told"


def kill_often(
    case: Case,
    system: System,
    whole: Undisturbed,
    n_kills: int,
    draw: Callable[[Undisturbed], Moment],
) -> Counter[str]:
    """Kill `case` `n_kills` times, in chains of at most LONGEST_CHAIN from empty folders; return how the deaths went.

    A signal that came too late for a run that had done its work does not count.
    """
    tally: Counter[str] = Counter()
    while tally.total() < n_kills:
        _clear(case)
        known, n_here, ended = None, 0, False
        while not ended and n_here < LONGEST_CHAIN and tally.total() < n_kills:
            words, moment = case.words(first=n_here == 0), draw(whole)
            code, in_time = _run(case, system, words, moment)
            outcome = check_death(case, system, words, moment.sent, code) if in_time else "finished"
            if outcome == "finished":
                assert code == whole.code, system.output()
                ended = True
            else:
                tally[f"{moment.sent.name} {outcome}"] += 1
                n_here += 1
                known = case.look(known, moment.sent)
        if not ended:
            code, _ = _run(case, system, case.words(first=n_here == 0), None)
            assert code == whole.code, system.output()
        case.look(known, signal.SIGKILL)
        assert_same(case.tree(), whole.tree)
    return tally


def _run(case: Case, system: System, words: list[str], moment: Moment | None) -> tuple[int, bool]:
    """Start a command and signal it at the moment; return its exit status, and whether it still ran then."""
    number = system.start(words)
    code, _ = _until(case, system, number, moment)
    in_time = code is None
    if code is None and moment is not None:
        (os.killpg if moment.group else os.kill)(number, moment.sent)
        code = system.wait(number)
    while _session_lives(number):  # a study's workers follow it
        time.sleep(0.005)
    assert code is not None
    return code, in_time


def assert_same(actual: Tree, wanted: Tree) -> None:
    """Assert that two trees hold the same files with the same content."""
    assert sorted(actual) == sorted(wanted), (
        f"in one of the two alone: {sorted(actual.keys() ^ wanted.keys())}"
    )
    for name, content in wanted.items():
        if actual[name] != content:
            one, two = (
                value if isinstance(value, bytes) else repr(value).encode()
                for value in (actual[name], content)
            )
            start = next(
                (
                    index
                    for index, pair in enumerate(zip(one, two, strict=False))
                    if pair[0] != pair[1]
                ),
                0,
            )
            raise AssertionError(
                f"{name}: {one[max(0, start - 100) : start + 300]!r} instead of {two[max(0, start - 100) : start + 300]!r}"
            )


def moments(seed: int) -> Callable[[Undisturbed], Moment]:
    """Return what draws moments: half by the clock, up to the undisturbed run's length, half by writes."""
    draw = random.Random(seed)

    def moment(whole: Undisturbed) -> Moment:
        by_clock = draw.random() < 0.5
        seconds = draw.uniform(0.0, whole.seconds) if by_clock else None
        n_writes = draw.randint(1, max(1, whole.n_writes // 2))
        return Moment(draw.choice(SIGNALS), seconds, n_writes, draw.random() < 0.5)

    return moment


def without(value: Any, *names: str) -> Any:
    """Return a JSON value without the keys `names`, wherever they stand; sums of other batches differ in the last digits."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: without(item, *names) for key, item in value.items() if key not in names}
    return [without(item, *names) for item in value] if isinstance(value, list) else value


def json_without(*names: str) -> Callable[[bytes], Any]:
    """Return what reads JSON, or JSON lines, and leaves out the keys `names`."""

    def read(content: bytes) -> Any:
        try:
            return without(json.loads(content), *names)
        except json.JSONDecodeError:
            return [without(json.loads(line), *names) for line in content.splitlines()]

    return read


def whole_rows(path: Path) -> list[bytes]:
    """Return the rows of a file that are there to the newline."""
    if not path.exists():
        return []
    return [row for row in path.read_bytes().splitlines(keepends=True) if row.endswith(b"\n")]


def kept_rows(before: list[bytes] | None, path: Path) -> list[bytes]:
    """Return the whole rows of an append-only file; assert that those of `before` are its first ones still."""
    now = whole_rows(path)
    assert now[: len(before or [])] == (before or []), f"{path}: rows were lost"
    return now
