"""The quickstart's two commands, from nothing: an environment of its own, a wheel, the demo in an empty folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.soak
def test_pip_install_and_kinject_demo_in_an_empty_folder(tmp_path: Path) -> None:
    """Without PyTorch's own index, as the page says for machines behind a mirror."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    checkout, folder = tmp_path / "checkout", tmp_path / "empty"
    for name in filter(None, names.split("\0")):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_bytes((ROOT / name).read_bytes())
    folder.mkdir()
    page = (ROOT / "docs/quickstart.md").read_text("utf-8")
    install = re.search(r"^\$ pip (install .*) --extra-index-url \S+ '(\S+)'$", page, re.MULTILINE)
    assert install is not None
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHONPATH", "OMP_NUM_THREADS")
    }
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    pip = [str(tmp_path / "venv/bin/pip"), *install[1].split(), install[2]]
    subprocess.run(pip, cwd=checkout, env=environment, check=True)
    installed = time.monotonic()
    done = subprocess.run(
        [str(tmp_path / "venv/bin/kinject"), "demo"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    print(
        f"installed in {installed - began:.0f} s, demo in {time.monotonic() - installed:.0f} s\n{done.stdout}"
    )
    assert "bitsandbytes" not in done.stderr
    assert "gemm_4bit" not in done.stderr
    report = json.loads((folder / "runs/eval/report.json").read_text("utf-8"))
    accuracy = {
        (item["question_set"], item["arm"], item["k"]): item["accuracy"]
        for item in report["results"]
    }
    assert accuracy["new", "cpt", 0] > accuracy["new", "repeat", 0] + 0.08
    assert accuracy["known", "base", 0] - accuracy["known", "cpt", 0] < 0.05
    subprocess.run([str(tmp_path / "venv/bin/kinject")], cwd=folder, env=environment, check=True)
