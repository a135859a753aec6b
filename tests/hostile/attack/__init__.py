"""An attack on kinject by area: each try is drawn from a seed, and ends in a right result, in one clear line, or in a failure.

A failure is a traceback, a wait without end, a wrong result, or a message that helps nobody. `benchmarks/hostile.py` runs
thousands of tries; a few of each area run in every `make test`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from random import Random
from typing import Any

from kinject.errors import KinjectError, RecipeError

MOST_SECONDS, MOST_WAIT = 60, 600
"""Seconds of the processor, and on the clock, from which on a try hangs: hundreds of times what one takes."""
MOST_KEPT = 20_000
"""Characters of a failure that are kept: the last 700 of a traceback hid what it was."""
Try = Callable[[Random, Path], str]
"""One try in a folder of its own: what failed, "" where nothing did."""


_OF_A_ROW = re.compile(r"\S+:\d+: ")


class HangError(BaseException):
    """A try that does not end. No `except Exception` keeps it."""


@dataclass
class Count:
    """The tries of an area; `failed` holds seed -> what failed."""

    area: str
    tries: int = 0
    failed: dict[int, str] = field(default_factory=dict)


AREAS: dict[str, Try] = {}


def area(name: str) -> Callable[[Try], Try]:
    """Register the tries of an area."""

    def register(attempt: Try) -> Try:
        AREAS[name] = attempt
        return attempt

    return register


def attack(name: str, tries: int, seed: int = 0) -> Count:
    """Try an area with the seeds from `seed` on."""
    count = Count(name)
    before = Path.cwd()
    for number in range(seed, seed + tries):
        folder = Path(tempfile.mkdtemp(prefix="kinject-attack-"))
        os.chdir(folder)
        try:
            fault = guarded(partial(AREAS[name], Random(f"{name} {number}"), folder))
        finally:
            os.chdir(before)
            shutil.rmtree(folder, ignore_errors=True)
        count.tries += 1
        if fault:
            count.failed[number] = fault
    return count


def guarded(attempt: Callable[[], str]) -> str:
    """Return what failed in a try; a wait without end and any exception but kinject's own fail."""

    def hang(*_: object) -> None:
        raise HangError

    before = [signal.signal(number, hang) for number in (signal.SIGALRM, signal.SIGVTALRM)]
    # A busy machine gives a try little of its processor: the clock alone would call it hanging.
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, MOST_WAIT)
    try:
        return attempt()
    except KinjectError as error:
        return unclear(error)
    except HangError:
        return "no end"
    except Exception:  # noqa: BLE001  (whatever comes is the finding)
        return traceback.format_exc().strip()[-MOST_KEPT:]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGVTALRM), before, strict=True):
            signal.signal(number, handler)


def unclear(error: KinjectError) -> str:
    """Return why a message helps nobody: it is empty, or has several lines that are no list of problems."""
    text = str(error)
    if not text.strip():
        return f"an empty message of {type(error).__name__}"
    # Problems, and faults of a file's rows, are lists with a line for each.
    others = [line for line in text.split("\n")[1:] if not _OF_A_ROW.match(line)]
    if any(not line.startswith("  ") for line in others) and not isinstance(error, RecipeError):
        return f"several lines: {text[:300]!r}"
    if len(text) > 2000 and not isinstance(error, RecipeError):
        return f"a message of {len(text)} characters: {text[:200]!r}"
    return ""


@dataclass(frozen=True)
class Ended:
    """A child that has ended: its exit code (below 0: the signal), and what it printed."""

    code: int
    printed: str


def in_child(action: Callable[[], int | None], **options: Any) -> Ended:
    """Run a function in a fork of this process, with the `options` of `start`, to its end."""
    return finish(*start(action, **options))


def start(
    action: Callable[[], int | None],
    *,
    environment: Mapping[str, str | None] | None = None,
    closed: Sequence[int] = (),
    limits: Mapping[int, int] | None = None,
) -> tuple[int, int]:
    """Start a function in a fork of this process, with another environment (None: without the variable), closed streams
    and limits; return its number, and where it prints."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 70
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.close(read)
            _forget_servers()
            for stream in (1, 2):
                os.dup2(write, stream)
            sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
            sys.stderr = io.TextIOWrapper(io.FileIO(2, "w", closefd=False), write_through=True)
            for name, value in (environment or {}).items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            for stream in closed:
                os.close(stream)
            for limit, most in (limits or {}).items():
                resource.setrlimit(limit, (most, most))
            code = int(action() or 0)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001
            with contextlib.suppress(OSError, ValueError):
                traceback.print_exc()
        finally:
            os._exit(code & 0xFF)
    os.close(write)
    return child, read


def _forget_servers() -> None:
    """Let a fork start its own servers of worker processes: those of its parent take no orders from it."""
    server: Any = forkserver._forkserver
    server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None
    tracker: Any = resource_tracker._resource_tracker
    tracker._pid = tracker._fd = None


def finish(child: int, read: int) -> Ended:
    """Return how a child ended. Raises `HangError` if it does not."""
    printed, end = b"", time.monotonic() + MOST_WAIT
    while True:
        ready, _, _ = select.select([read], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            os.close(read)
            raise HangError
        part = os.read(read, 1 << 16)
        if not part:
            break
        printed += part
    os.close(read)
    return Ended(
        os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), printed.decode("utf-8", "replace")
    )


def judged(ended: Ended, allowed: Sequence[int] = (0, 1, 2)) -> str:
    """Return what is wrong with the end of a command line."""
    if "Traceback (most recent call last)" in ended.printed or ended.code == 70:
        return f"code {ended.code}: {ended.printed[-MOST_KEPT:]}"
    if ended.code not in allowed:
        return f"code {ended.code}, allowed {allowed}: {ended.printed[-300:]}"
    return ""


def contents(folder: Path, *, without: Sequence[str] = ()) -> dict[str, bytes]:
    """Return the bytes of each file below a folder by its name, without hidden ones."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        hidden = any(part.startswith(".") for part in Path(name).parts)
        if path.is_file() and not hidden and path.name not in without:
            found[name] = path.read_bytes()
    return found


@contextlib.contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Give a name another value while the block runs."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def mutated(data: bytes, random: Random) -> bytes:
    """Return bytes with parts cut out, doubled, turned round, or replaced by hostile ones."""
    pieces = (
        b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n\n", b"NaN", b"1e999", b"9" * 5000, b"[" * 20_000,
        b'{"a":' * 300, b"\\ud800", b'"', b"'", b",", b"<!--", b"<![CDATA[", b"&#xd800;", b"<svg><p>" * 900, b"endobj",
        b"/Kids [1 0 R]", b"-1", b"65536", b"\\bin99999999 ", b"\\u-70000?", b"{\\rtf1" * 900, b"PK\x03\x04", b"%PDF-1.4",
        b"Content-Transfer-Encoding: base64\n", b"--x\n" * 400, b"\x1f\x8b\x08", b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff",
    )  # fmt: skip
    for _ in range(random.randrange(1, 5)):
        start = random.randrange(len(data) + 1)
        end = min(len(data), start + random.choice((0, 1, 4, 40, len(data))))
        kind = random.randrange(5)
        if kind == 0:
            data = data[:start] + data[end:]
        elif kind == 1:
            data = data[:end] + data[start:end] * random.choice((1, 2, 50)) + data[end:]
        elif kind == 2:
            flipped = bytes(byte ^ (1 << random.randrange(8)) for byte in data[start : start + 3])
            data = data[:start] + flipped + data[start + 3 :]
        else:
            data = data[:start] + random.choice(pieces) + data[end:]
    return data[: 1 << 22]
