"""What every input must come to: read, or refused with its place and the cure; in bounded time and memory."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

from kinds import Kind

from kinject.errors import KinjectError

SECONDS = 60
"""Processor time (not wall time: the machine may be loaded) after which an input counts as a hang."""
MORE_MEMORY = 4 << 30
"""Address space beyond what the process has when a run begins."""
LONGEST_MESSAGE = 20_000

_CURE = re.compile(
    r"expected|allowed|must|need|give |save |remove |check |mean|run |keep|take |repair|write |choose|convert|each |quote|print|"
    r"one |update|no key|missing|not among|reads|train|unknown|is no|set |there are|ask|with|correct|found .*, a recipe is|"
    r"bad YAML|no passages for|name a|add ",
    re.IGNORECASE,
)


class HangError(BaseException):
    """An input was not done with in time. Not an `Exception`: nothing that catches those may swallow it."""


def _hang(_signal: int, _frame: object) -> None:
    raise HangError


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process have `MORE_MEMORY` than now, no more: what asks for it gets a `MemoryError`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    wanted = pages * resource.getpagesize() + MORE_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def bounded_time() -> Iterator[None]:
    """Raise `HangError` in the block after `SECONDS` of processor time."""
    before = signal.signal(signal.SIGPROF, _hang)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def fault_of(kind: Kind, path: Path) -> tuple[str, str]:
    """Return (what came of the input, what is wrong with that: "" for nothing)."""
    try:
        with bounded_time():
            kind.read(path)
    except KinjectError as error:
        return "refused", _unclear(str(error), path)
    except HangError:
        return "hang", "".join(traceback.format_exc(limit=-6))
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is what this looks for)
        return type(error).__name__, "".join(traceback.format_exc(limit=-6))[-2500:]
    return "read", ""


def _unclear(message: str, path: Path) -> str:
    """Return what a message lacks."""
    if len(message) > LONGEST_MESSAGE:
        return f"a message of {len(message)} characters: {message[:300]}"
    placed = str(path) in message or "command line" in message or message.startswith(("/", "corpus"))
    if not placed and path.name != "override.txt":
        return f"no place: {message[:600]}"
    return "" if _CURE.search(message) else f"no cure: {message[:600]}"


def break_all(
    chosen: list[tuple[Kind, float]], n: int, seed: int, folder: Path
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Give `n` damaged inputs to the kinds; return counts of (kind, outcome) and the faults, each with its saved input."""
    counts: Counter[tuple[str, str]] = Counter()
    faults: list[str] = []
    total = sum(weight for _, weight in chosen)
    for number, (kind, weight) in enumerate(chosen):
        random = Random(f"{seed} {kind.name}")
        work = folder / kind.name.replace(" ", "-")
        work.mkdir(parents=True, exist_ok=True)
        path = work / kind.file
        n_own = round(n * weight / total) if number + 1 < len(chosen) else n - sum(counts.values())
        for index in range(n_own):
            data = kind.make(random)
            path.write_bytes(data)
            outcome, fault = fault_of(kind, path)
            counts[kind.name, outcome] += 1
            if fault:
                saved = work / f"fault-{index}-{kind.file}"
                saved.write_bytes(data)
                faults.append(f"{kind.name}: {outcome}: input saved as {saved}\n{fault}")
    return counts, faults


def table_of(counts: Counter[tuple[str, str]]) -> str:
    """Return the counts as lines."""
    return "\n".join(f"{kind:22} {outcome:12} {n:6}" for (kind, outcome), n in sorted(counts.items()))
