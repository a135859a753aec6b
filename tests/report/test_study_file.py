"""A study's report.json comes back as it was, or is refused in one line that names the place."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from study_results import make_paper_study, make_study

from kinject.disk import write_json
from kinject.errors import DiskError, InputError
from kinject.report.files import read_report
from kinject.results import to_json


def save(path: Path, report: Any) -> None:
    """Write a report as the study does."""
    write_json(path, {"format_version": 1, **to_json(report)})


@pytest.mark.parametrize("make", [make_study, make_paper_study])
def test_a_study_survives_the_way_through_json(tmp_path: Path, make: Any) -> None:
    save(tmp_path / "report.json", make())
    assert read_report(tmp_path / "report.json") == make()
    assert json.loads((tmp_path / "report.json").read_bytes())["format_version"] == 1


@cache
def whole_text() -> str:
    """Return a study as its file holds it."""
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "report.json", make_study())
        return (Path(folder) / "report.json").read_text("utf-8")


def damaged(tmp_path: Path, *keys: Any, value: Any) -> Path:
    """Write a study in which the place `keys` holds `value`."""
    path = tmp_path / "report.json"
    parent = whole = json.loads(whole_text())
    for key in keys[:-1]:
        parent = parent[key]
    if value is ...:
        del parent[keys[-1]]
    else:
        parent[keys[-1]] = value
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("title",), 3, r"title: found 3, a string is needed"),
        (("results",), {}, r"results: found dict, a list is needed"),
        (("results", 0), [], r"results\[0\]: found list, an object is needed"),
        (("results", 0, "accuracy"), 2.0, r"results\[0\]\.accuracy: found 2\.0, allowed is 0 to 1"),
        (("results", 0, "accuracy"), True, r"results\[0\]\.accuracy: found True, a number is needed"),
        (("results", 0, "high"), float("nan"), r"results\[0\]\.high: found nan, a finite number is needed"),
        (("results", 0, "n"), 0, r"results\[0\]\.n: found 0 questions"),
        (("results", 0, "by_seed"), [], r"results\[0\]\.n: found .* 0 seeds"),
        (("results", 0, "role"), "magic", r"results\[0\]\.role: found 'magic', allowed are 'learning', .*, 'unanswerable' or"),
        (("results", 0, "model"), ..., r"results\[0\]\.model: missing"),
        (("results", 1, "to_base", "low"), -1.5, r"results\[1\]\.to_base\.low: found -1\.5, allowed is -1 to 1"),
        (("results", 1, "arm"), "base", r"results\[1\]: the arm 'base' on 'new' is there twice"),
        (("choices", 0, "candidates", 0), [1, 2], r"choices\[0\]\.candidates\[0\]\[2\]: missing"),
        (("claims", 0, "verdict"), "proven", r"claims\[0\]\.verdict: found 'proven'"),
        (("questions", 0, "fraction_correct", "base"), "x", r"questions\[0\]\.fraction_correct\.base: found 'x', a number is"),
    ],
)  # fmt: skip
def test_a_damaged_study_is_refused_by_the_place(tmp_path: Path, keys: Any, value: Any, message: str) -> None:
    path = damaged(tmp_path, *keys, value=value)
    with pytest.raises(InputError, match=message) as caught:
        read_report(path)
    assert str(caught.value).startswith(f"{path}: damaged report: ")
    assert "\n" not in str(caught.value)


def test_what_this_version_does_not_know_is_left_out_and_what_it_added_may_be_missing(tmp_path: Path) -> None:
    path = damaged(tmp_path, "results", 0, "colour", value="blue")
    whole = json.loads(path.read_bytes())
    del whole["results"][0]["to_rag"]
    path.write_text(json.dumps(whole))
    assert read_report(path) == make_study()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"title": "t"}'])
def test_what_is_no_study_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged.*: .*Run kinject eval or kinject study again\.$") as caught:
        read_report(path)
    assert "\n" not in str(caught.value)


def test_a_missing_study_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="Run kinject eval or kinject study again"):
        read_report(tmp_path / "report.json")
