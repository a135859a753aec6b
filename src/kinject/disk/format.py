"""The version of the formats that kinject writes, in manifests, report.json and SQLite files (as their user_version).

A change that this code's readers would misread raises it. New keys need no new version: readers ignore keys that they do
not know.
"""

from __future__ import annotations

from kinject.errors import InputError

FORMAT_VERSION = 1


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
