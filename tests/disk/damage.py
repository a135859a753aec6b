"""What can become of a file while nobody looks, and a ground to try it on: run, damage, run again, compare."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from faulty import unreadable

from kinject.errors import KinjectError


@dataclass(frozen=True)
class Damage:
    """One change to a file; `during` holds while the verb runs again."""

    name: str
    do: Callable[[Path], None]
    during: Callable[[Path], AbstractContextManager[None]] = lambda _: nullcontext()


def _flipped(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def _to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def flip(bit: int) -> Damage:
    """Flip one bit, counted from the start of the file."""
    return Damage(f"flip bit {bit % 8} of byte {bit // 8}", lambda path: _flipped(path, bit))


def cut(size: int) -> Damage:
    """Keep the first `size` bytes."""
    return Damage(f"cut to {size} bytes", lambda path: path.write_bytes(path.read_bytes()[:size]) and None)


WHOLE = (
    Damage("delete", Path.unlink),
    Damage("empty", lambda path: path.write_bytes(b"") and None),
    Damage("a folder in its place", _to_folder),
    Damage("unreadable", lambda _: None, unreadable),
)


def sample(path: Path, seed: int, n_flips: int, n_cuts: int) -> list[Damage]:
    """Return seeded flips and cuts of a file, spread over it, and the damages that take all of it."""
    size = path.stat().st_size
    rng = random.Random(f"{seed} {path.name}")
    if not size:
        return [WHOLE[0], *WHOLE[2:]]
    edges = [size * 8 * part // n_flips for part in range(n_flips + 1)]
    flips = [flip(rng.randrange(low, max(low + 1, high))) for low, high in pairwise(edges)]
    return [*flips, *(cut(rng.randrange(size)) for _ in range(n_cuts)), *WHOLE]


@dataclass
class Ground:
    """A folder that `run` has filled; `run` returns what is to be the same whatever happens to the files."""

    folder: Path
    run: Callable[[], Any]

    def __post_init__(self) -> None:
        self.wanted = self.run()
        self.kept = self.folder.with_name(f"{self.folder.name}.kept")
        self.keep()

    def keep(self) -> None:
        """Take the folder as it is now for what is damaged."""
        shutil.rmtree(self.kept, ignore_errors=True)
        shutil.copytree(self.folder, self.kept)

    def restore(self) -> None:
        """Put the folder back."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)

    def files(self) -> list[Path]:
        """Return every file in the folder, locks left out: their content is for people."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))

    def faults(self, path: Path, damages: Sequence[Damage]) -> tuple[list[str], int, int]:
        """Try each of `damages` on a file: (what was neither mended nor refused by name, n mended, n refused)."""
        bad: list[str] = []
        n_mended = n_refused = 0
        for damage in damages:
            self.restore()
            damage.do(path)
            location = f"{path.relative_to(self.folder)}: {damage.name}"
            try:
                with damage.during(path):
                    outcome = self.run()
            except KinjectError as error:
                n_refused += 1
                if path.name not in str(error) and str(path.parent) not in str(error):
                    bad.append(f"{location}: refused without its name: {error}")
            except Exception as error:  # noqa: BLE001 - any other is what is looked for
                bad.append(f"{location}: {type(error).__name__}: {error}")
            else:
                n_mended += 1
                if outcome != self.wanted:
                    bad.append(f"{location}: another result")
        self.restore()
        return bad, n_mended, n_refused


def message_of(call: Callable[[], Any]) -> str:
    """What a call that fails says."""
    with pytest.raises(KinjectError) as caught:
        call()
    return str(caught.value)
