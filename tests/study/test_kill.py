"""A study killed for real: its rerun ends where an undisturbed run does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from country import write_study
from in_process import InProcess

from kinject.recipe import read_recipe
from kinject.study.run import run_study


def without_times(value: Any) -> Any:
    if isinstance(value, dict):  # the seal is over times, too
        dated = ("seconds", "work_seconds", "peak_bytes", "written", "crc32")
        return {key: without_times(item) for key, item in value.items() if key not in dated}
    return [without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.usefixtures("forked")
def test_a_study_killed_while_it_trains_ends_as_an_undisturbed_one(tmp_path, tiny_model):
    path = write_study(tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}})
    words = [sys.executable, "-m", "kinject.cli", "study", str(path), "--jobs", "1"]
    killed = [*words, f"study.cache_dir={tmp_path / 'two'}"]
    process = subprocess.Popen(killed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    while not any((tmp_path / "two" / "train").glob("*/stage.log")):
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    subprocess.run(killed, check=True, capture_output=True)
    run_study(read_recipe(path, [f"run_dir={tmp_path / 'b'}"], "study"), InProcess)
    texts = [(tmp_path / name / "report.json").read_text("utf-8") for name in ("study", "b")]
    reports = [without_times(json.loads(text.replace("../two/", "../stages/"))) for text in texts]
    assert reports[0] == reports[1]
