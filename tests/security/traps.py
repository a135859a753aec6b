"""Pickles that tell when they are loaded: their payload makes a file."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from pathlib import Path


class Trap:
    """Unpickled, it makes the file `sprung`."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return os.mkdir, (str(self.sprung),)


def trap(sprung: Path) -> bytes:
    """Return a plain pickle (pickle.load, torch.load of old files, numpy)."""
    return pickle.dumps({"state": Trap(sprung), "weight": [1.0]}, protocol=2)


def torch_trap(sprung: Path) -> bytes:
    """Return a pickle in the zip archive that torch.save writes today."""
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", trap(sprung))
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return held.getvalue()
