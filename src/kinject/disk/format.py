"""The version of what kinject writes into run folders, in one place: a newer one is refused, an older one is read.

Every folder that `lock_dir` opens holds it in .format.json, from before the first row; manifests and report.json repeat
it, and SQLite files hold it as their user_version. A folder without one is of version 1: kinject wrote none at first.

A change that this code's readers would misread raises `FORMAT_VERSION`, and the code that opens a folder then brings an
older one up to it. New keys in a row or a manifest change nothing: readers leave out what they do not know.
"""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from kinject.disk.atomic import write_json
from kinject.disk.reading import read_bytes
from kinject.errors import InputError

FORMAT_VERSION = 1
MARKER = ".format.json"


def check_version(found: object, where: str) -> None:
    """Raise `InputError` at `where` unless `found` is a format version that this kinject reads."""
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(
            f"{where}: damaged: format_version is {found!r:.40}, a whole number from 1 is needed. Restore it from a copy, or "
            "choose another run folder."
        )
    if found > FORMAT_VERSION:
        raise InputError(
            f"{where}: written by a newer kinject (format {found}; this one reads up to {FORMAT_VERSION}). Update kinject, or "
            "choose another run folder."
        )


def check_folder(folder: Path) -> bool:
    """Return whether a run folder says its version. Raises `InputError` where that is newer, or the marker damaged."""
    path = folder / MARKER
    if not path.is_file():
        return False
    try:
        found = json.loads(read_bytes(path))["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path}: damaged ({error}). Delete this file if no newer kinject wrote into the folder."
        ) from error
    check_version(found, str(path))
    return True


def mark_folder(folder: Path) -> None:
    """Check a run folder as `check_folder`, and note this kinject's version in one that says none."""
    if not check_folder(folder):
        write_json(folder / MARKER, {"format_version": FORMAT_VERSION})


def settle_database(database: sqlite3.Connection, path: Path) -> None:
    """Check the version of an SQLite file of kinject's, and note it where there is none.

    Raises `InputError` as `check_version`; the file is closed then.
    """
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if not found:
        database.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        return
    try:
        check_version(found, str(path))
    except InputError:
        database.close()
        raise
