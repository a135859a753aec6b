"""The version of kinject, installed or not."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""Of a checkout: the source is in its folder src."""


@cache
def package_version() -> str:
    """Return kinject's version: of its installation, else of the checkout that this file is in.

    A checkout runs without being installed where it is copied to a machine that has the libraries.
    """
    try:
        return metadata.version("kinject")
    except metadata.PackageNotFoundError:
        return _version_of_checkout()


def _version_of_checkout() -> str:
    if not _PROJECT.is_file():
        return "unknown"
    project = tomllib.loads(_PROJECT.read_text("utf-8"))["project"]
    return str(project["version"])
