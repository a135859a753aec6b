"""The format version of run folders, in one place: a folder of a newer kinject is refused.

`lock_dir` writes it into .format.json before the first row; manifests and report.json repeat it, and SQLite files hold
it as their user_version.

A change that this code's readers would misread raises `FORMAT_VERSION`, and the code that opens a folder then converts
an older one. New keys in a row or a manifest need no new version: readers ignore keys that they do not know.
"""

from __future__ import annotations

import json
from pathlib import Path

from kinject.disk.files import read_bytes, write_json
from kinject.errors import InputError

FORMAT_VERSION = 1
MARKER = ".format.json"


def check_version(version: object, location: str) -> None:
    """Raise `InputError` at `location` unless `version` is a format version that this kinject reads."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InputError(
            f"{location}: damaged: format_version is {version!r:.40}, a whole number from 1 is needed. Restore it from a copy, "
            "or choose another run folder."
        )
    if version > FORMAT_VERSION:
        raise InputError(
            f"{location}: written by a newer kinject (format {version}; this one reads up to {FORMAT_VERSION}). Update kinject, "
            "or choose another run folder."
        )


def check_folder(folder: Path) -> bool:
    """Return whether a run folder has a version. Raises `InputError` if that is newer, or the marker is damaged."""
    path = folder / MARKER
    if not path.is_file():
        return False
    try:
        version = json.loads(read_bytes(path))["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: damaged ({error}). Delete this file if no newer kinject wrote into the folder."
        ) from error
    check_version(version, str(path))
    return True


def mark_folder(folder: Path) -> None:
    """Check the version of a run folder as `check_folder` does; write this kinject's version if it has none."""
    if not check_folder(folder):
        write_json(folder / MARKER, {"format_version": FORMAT_VERSION})
