"""docs/licences.md lists what pyproject.toml names, with the licence of each. Run as a script, this file writes it."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
HEAD = """\
# Licences of the dependencies

kinject is under Apache-2.0. It ships none of these packages; pip installs them. The licence is the one in the package's
own metadata at the pinned version (constraints.txt). `python tests/test_dependencies.py` writes this page. A test reads
the licences of the packages that these require in turn: none asks for the source of what uses it. Builds of torch for
NVIDIA's GPUs bring NVIDIA's libraries, under NVIDIA's terms. The GPL that docutils names is that of an Emacs mode in
its source, which its wheel leaves out. The word lists of wordfreq, which kinject reads where pip has put them, are CC
BY-SA 4.0.

| package | version | licence | required by |
|---|---|---|---|
"""
UNKNOWN = "not looked up"
NAMES = {
    "Apache Software License": "Apache-2.0", "MIT License": "MIT", "BSD License": "BSD", "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}  # fmt: skip


def plain(name: str) -> str:
    """Return a package's name in the one form that counts."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, tuple[str, str]]:
    """Return plain name -> (name, version) of every line of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if "==" in line and not line.startswith("#")]
    return {plain(name): (name.strip(), version.strip()) for name, version in pairs}


def direct() -> dict[str, str]:
    """Return plain name -> what of pyproject.toml names it: kinject, or extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {_named(line): "kinject" for line in project["dependencies"]}
    for extra, lines in project["optional-dependencies"].items():
        for name in map(_named, lines):
            names[name] = (
                f"{names[name]}, {extra}"
                if names.get(name, "kinject") != "kinject"
                else names.get(name, extra)
            )
    return names


def _named(requirement: str) -> str:
    return plain(re.split(r"[\[<>=!~; ]", requirement)[0])


def licence(name: str) -> str:
    """Return the licence that the metadata of an installed package names."""
    fields = metadata.metadata(name)
    expression = fields.get("License-Expression")
    if expression:
        return expression
    classified = [
        line.split(" :: ")[-1]
        for line in fields.get_all("Classifier") or ()
        if line.startswith("License ::")
    ]
    classified = [NAMES.get(item, item) for item in classified if item != "OSI Approved"]
    first = (fields.get("License") or "").strip().splitlines()[:1]
    return ", ".join(dict.fromkeys(classified)) or (first[0][:60] if first else "not named")


def rows() -> list[tuple[str, str, str, str]]:
    """Return (package, version, licence, required by) of what pyproject.toml names."""
    required, table = direct(), []
    for name in sorted(required):
        shown, version = pinned().get(name, (name, "not pinned"))
        try:
            named = licence(name)
        except metadata.PackageNotFoundError:
            named = UNKNOWN
        table.append((shown, version, named.replace("|", "\\|"), required[name]))
    return table


def written() -> list[tuple[str, ...]]:
    """Return the rows of the page."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")][1:]
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines]


def test_readme_names_every_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    text = (
        (ROOT / "README.md").read_text("utf-8").partition("Extras: ")[2].partition("`make docs`")[0]
    )
    assert sorted(re.findall(r"`([\w-]+)`", text)) == sorted(extras)


def test_each_hard_dependency_has_a_row_that_says_what_stops_without_it() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    table = text.partition("\n## A dependency\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\w-]+) \| [\d.]+ \| [\d.]+ \| (?:[\d.]+|–) \| \S.* \|$", table, re.M)
    assert sorted(rows) == sorted(name for name, by in direct().items() if by == "kinject")


def test_the_page_lists_exactly_what_pyproject_names() -> None:
    stale = "stale: run python tests/test_dependencies.py"
    assert {plain(row[0]): row[3] for row in written()} == direct(), stale
    versions = {name: version for name, (_, version) in pinned().items()}
    assert {plain(row[0]): row[1] for row in written()} == {
        name: versions.get(name, "not pinned") for name in direct()
    }


def test_the_licences_are_those_that_the_installed_packages_name() -> None:
    n_compared = 0
    for name, version, named, _ in written():
        try:
            installed = metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
        if installed == version:
            assert named.replace("\\|", "|") == licence(name), name
            n_compared += 1
    if not n_compared:
        pytest.skip("no package is installed at its pinned version")
    assert {row[0] for row in written() if row[2] == UNKNOWN} <= {
        "flash-attn"
    }  # needs a GPU to be built


def test_no_dependency_asks_for_the_source_of_what_uses_it() -> None:
    installed = {
        plain(name) for name in (item.metadata["Name"] for item in metadata.distributions()) if name
    }
    strict = {
        name
        for name in pinned()
        if name in installed and re.search(r"(?<!L)\bA?GPL", licence(name))
    }
    assert strict <= {
        "docutils",
        "tld",
    }  # an Emacs mode, which docutils' wheel leaves out; tld is MPL as well


def test_check_looks_the_pinned_versions_up_among_known_vulnerabilities() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    static, test, style = (
        makefile[makefile.index(f"\n{target}:") :].split("\n\n")[0]
        for target in ("static", "test", "style")
    )
    assert " style" in static
    assert " style" in test
    # What it finds fails nothing.
    assert "-$(BIN)/python -m pip_audit -r constraints.txt" in style
    assert "pip-audit" in direct()


if __name__ == "__main__":
    kept = {row[0]: row[2] for row in written()} if PAGE.exists() else {}
    lines = [
        f"| {name} | {version} | {kept.get(name, license_name) if license_name == UNKNOWN else license_name} | {by} |"
        for name, version, license_name, by in rows()
    ]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", "utf-8")
