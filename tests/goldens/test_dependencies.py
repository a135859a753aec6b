"""A dependency that gives other numbers than those with which the goldens were made is noticed, and named with its version."""

from __future__ import annotations

import json
import platform
import re
from importlib import metadata
from pathlib import Path

import pytest
from dependencies import COMPUTED, OBSERVED, Case

from kinject.disk import read_manifest_fields, write_manifest

GOLD = json.loads(Path(__file__).with_name("dependencies.json").read_text("utf-8"))
CASES = {**COMPUTED, **OBSERVED}


def installed(package: str) -> str:
    return platform.python_version() if package == "python" else metadata.version(package)


def hold(name: str, case: Case, values: list[float]) -> None:
    """Fail, naming the package, its version and that of the goldens, where `values` is not what it was."""
    wanted = {**GOLD["computed"], **GOLD["observed"]}[name]
    close = len(values) == len(wanted) and all(
        abs(a - b) <= case.tolerance * max(1.0, abs(b)) for a, b in zip(values, wanted, strict=True)
    )
    if close:
        return
    pytest.fail(
        f"{case.package} {installed(case.package)} gives other numbers ({name}) than {case.package} "
        f"{GOLD['versions'][case.package]}, with which the goldens were made: runs before and after it cannot be compared. "
        f"Found {values}, expected {wanted}. Pin the older one in constraints.txt; or, where the change is right, say so in "
        "CHANGELOG.md and run tests/goldens/make_dependencies.py.",
        pytrace=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_a_dependency_says_what_it_said_when_the_goldens_were_made(name: str) -> None:
    hold(name, CASES[name], CASES[name].compute())


@pytest.mark.parametrize("name", CASES)
def test_a_change_ten_times_the_tolerance_fails_and_names_package_and_version(name: str) -> None:
    case = CASES[name]
    changed = list({**GOLD["computed"], **GOLD["observed"]}[name])
    changed[-1] += (
        10 * max(case.tolerance, 0.1 * (case.tolerance == 0)) * max(1.0, abs(changed[-1]))
    )
    with pytest.raises(
        pytest.fail.Exception,
        match=rf"^{case.package} {re.escape(installed(case.package))} gives other",
    ):
        hold(name, case, changed)
    with pytest.raises(pytest.fail.Exception, match="gives other numbers"):
        hold(name, case, changed[:-1])


def test_manifests_hold_the_version_of_every_dependency_that_decides_a_number(
    tmp_path: Path,
) -> None:
    write_manifest(tmp_path / "manifest.json", stage="train", inputs={}, recipe={}, counts={})
    manifest = read_manifest_fields(tmp_path / "manifest.json")
    assert manifest is not None
    packages = {case.package for case in CASES.values()}
    assert {name: manifest["versions"].get(name) for name in packages} == {
        name: installed(name) for name in packages
    }
