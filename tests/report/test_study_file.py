"""A study's report.json comes back as it was, or is refused in one line that names the place."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from study_results import make_paper_study, make_study

from kinject.errors import DiskError, InputError
from kinject.report.study_file import read_study, save_study


@pytest.mark.parametrize("make", [make_study, make_paper_study])
def test_a_study_survives_the_way_through_json(tmp_path: Path, make: Any) -> None:
    save_study(tmp_path / "report.json", make())
    assert read_study(tmp_path / "report.json") == make()
    assert json.loads((tmp_path / "report.json").read_bytes())["format_version"] == 1


@cache
def whole_text() -> str:
    """Return a study as its file holds it."""
    with tempfile.TemporaryDirectory() as folder:
        save_study(Path(folder) / "report.json", make_study())
        return (Path(folder) / "report.json").read_text("utf-8")


def damaged(tmp_path: Path, *keys: Any, value: Any) -> Path:
    """Write a study in which the place `keys` holds `value`."""
    path = tmp_path / "report.json"
    place = whole = json.loads(whole_text())
    del whole["crc32"]  # whoever damages it by hand writes no other
    for key in keys[:-1]:
        place = place[key]
    if value is ...:
        del place[keys[-1]]
    else:
        place[keys[-1]] = value
    path.write_text(json.dumps(whole))
    return path


@pytest.mark.parametrize(
    ("keys", "value", "says"),
    [
        (("title",), 3, r"title: found 3, a string is needed"),
        (("scores",), {}, r"scores: found dict, a list is needed"),
        (("scores", 0), [], r"scores\[0\]: found list, an object is needed"),
        (("scores", 0, "accuracy"), 2.0, r"scores\[0\]\.accuracy: found 2\.0, allowed is 0 to 1"),
        (("scores", 0, "accuracy"), True, r"scores\[0\]\.accuracy: found True, a number is needed"),
        (("scores", 0, "high"), float("nan"), r"scores\[0\]\.high: found nan, a finite number is needed"),
        (("scores", 0, "n"), 0, r"scores\[0\]: found n 0"),
        (("scores", 0, "by_seed"), [], r"scores\[0\]: found .* 0 seeds"),
        (("scores", 0, "role"), "magic", r"scores\[0\]\.role: found 'magic', allowed are learning, retention, baseline"),
        (("scores", 0, "model"), ..., r"scores\[0\]\.model: missing"),
        (("scores", 1, "to_base", "low"), -1.5, r"scores\[1\]\.to_base\.low: found -1\.5, allowed is -1 to 1"),
        (("scores", 1, "arm"), "base", r"scores\[1\]: the arm 'base' on 'new' stands there twice"),
        (("choices", 0, "candidates", 0), [1, 2], r"choices\[0\]\.candidates\[0\]: found 2 values, 3 are needed"),
        (("claims", 0, "verdict"), "proven", r"claims\[0\]\.verdict: found 'proven'"),
        (("questions", 0, "right", "base"), "x", r"questions\[0\]\.right\.'base': found 'x', a number is needed"),
    ],
)  # fmt: skip
def test_a_damaged_study_is_refused_by_the_place(tmp_path: Path, keys: Any, value: Any, says: str) -> None:
    path = damaged(tmp_path, *keys, value=value)
    with pytest.raises(InputError, match=says) as caught:
        read_study(path)
    assert str(caught.value).startswith(f"{path}: damaged study: ")
    assert "\n" not in str(caught.value)


def test_what_this_version_does_not_know_is_left_out_and_what_it_added_may_be_missing(tmp_path: Path) -> None:
    path = damaged(tmp_path, "scores", 0, "colour", value="blue")
    whole = json.loads(path.read_bytes())
    del whole["scores"][0]["to_rag"]
    path.write_text(json.dumps(whole))
    assert read_study(path) == make_study()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"title": "t"}'])
def test_what_is_no_study_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged.*: .*Run kinject study again\.$") as caught:
        read_study(path)
    assert "\n" not in str(caught.value)


def test_a_missing_study_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match="Run kinject study"):
        read_study(tmp_path / "report.json")
