"""The engines of docs/shards run the shards of kinject augment: the corpus is that of one process. The stages of a study
run as jobs of a real Slurm: the report is that of one machine, though study and jobs are killed.

Ray and datatrove are in .venv-engines (make soak). Slurm needs slurmctld, slurmd and munged of the system's packages
(slurm-wlm) and the rights to start them; without, its test is skipped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from country import write_study
from kills import json_without

from kinject.augment import augment
from kinject.recipe import read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from small import save_tiny_model

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "shards"
PYTHON = ROOT / ".venv-engines" / "bin" / "python"
pytestmark = pytest.mark.soak
RECIPE = (
    "run_dir: {run_dir}\naugment:\n  documents: documents.jsonl\n  styles: {{paraphrase: 2, questions: 1}}\n"
    "  generator: {{kind: sandbox}}\n"
)
SLURM = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmctldPort=26917
SlurmdPort=26918
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
AccountingStorageType=accounting_storage/none
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The corpus of one process, in a folder where `kinject` is this checkout's."""
    monkeypatch.chdir(tmp_path)
    with (tmp_path / "documents.jsonl").open("w") as file:
        for person in create_country(n_known=1, n_new=12).new:
            row = {"id": person.name, "title": person.name, "text": render_entry(person, 0)}
            file.write(json.dumps(row) + "\n")
    (tmp_path / "whole.yaml").write_text(RECIPE.format(run_dir="whole"))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(run_dir="run"))
    command = tmp_path / "bin" / "kinject"
    command.parent.mkdir()
    command.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT / "src"} exec {sys.executable} -m kinject.cli "$@"\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{command.parent}:{os.environ['PATH']}")
    return augment(read_recipe("whole.yaml", verb="augment")).corpus_path.read_bytes()


def test_make(expected: bytes) -> None:
    program = str(EXAMPLES / "shards.mk")
    words = ["make", "-s", "-j", "2", "-f", program, "N=3", "RECIPE=recipe.yaml"]
    subprocess.run(words, check=True)
    assert Path("run/corpus.jsonl").read_bytes() == expected


@pytest.mark.parametrize("engine", ["ray", "datatrove"])
def test_an_engine_in_python(engine: str, expected: bytes) -> None:
    if not PYTHON.exists():
        pytest.skip("make soak installs Ray and datatrove in .venv-engines")
    program = EXAMPLES / f"with_{engine}.py"
    subprocess.run([str(PYTHON), str(program), "recipe.yaml", "3"], check=True)
    assert Path("run/corpus.jsonl").read_bytes() == expected


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of this machine alone."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    if os.geteuid() or not all(map(shutil.which, programs)):
        pytest.skip("needs root, and slurm-wlm of the system's packages")
    folder = tmp_path / "slurm"
    folder.mkdir()
    settings = SLURM.format(
        host=socket.gethostname().split(".")[0], folder=folder, cpus=os.cpu_count()
    )
    (folder / "slurm.conf").write_text(settings)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    if subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        subprocess.run(["runuser", "-u", "munge", "--", "munged", "--force"], check=True)
    for daemon in ("slurmctld", "slurmd"):
        subprocess.run([daemon], check=True)
    yield
    for daemon in ("slurmd", "slurmctld"):
        os.kill(int((folder / f"{daemon}.pid").read_text()), signal.SIGTERM)


def test_an_array_of_slurm_jobs_and_their_merge_behind_them(expected: bytes, slurm: None) -> None:
    script = str(EXAMPLES / "shards.sbatch")
    words = ["sbatch", "--parsable", "--array=1-3", script, "recipe.yaml"]
    first = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()
    behind, merge = f"--dependency=afterok:{first}", "kinject augment recipe.yaml --merge"
    subprocess.run(["sbatch", behind, "--wrap", merge], check=True)
    while subprocess.run(["squeue", "-h"], check=True, capture_output=True).stdout:
        time.sleep(1)
    assert Path("run/corpus.jsonl").read_bytes() == expected


def until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.5)


def running(stages: Path, kind: str) -> str:
    """Return the id of a job of `kind` whose stage has begun, "" without one."""
    words = ["squeue", "-h", "--states=RUNNING", "--format=%i %j"]
    for line in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    ):
        number, _, name = line.partition(f" {kind}-")
        if name and (stages / kind / name / "stage.log").exists():
            return number
    return ""


def test_stages_as_jobs_of_slurm(tmp_path: Path, slurm: None, trained_tokenizer: Any) -> None:
    """The study is killed, the time of a training is over, a job is killed: the end is that of one machine."""
    model = save_tiny_model(tmp_path / "model", trained_tokenizer)
    path = write_study(tmp_path, model, seeds=[5], arms={"ft": {}}, keep_models=True)
    stages, page = tmp_path / "stages", tmp_path / "study" / "report.json"
    command = [sys.executable, "-m", "kinject.cli", "study", str(path), "--jobs"]
    read = json_without("seconds", "peak_bytes", "work_seconds", "written", "command")
    subprocess.run([*command, "1"], check=True, stdout=subprocess.DEVNULL)
    expected = read(page.read_bytes())
    for folder in (stages, page.parent):
        shutil.rmtree(folder)
    command += ["slurm", "--slurm", "time=30"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with start() as study:
        until(lambda: bool(running(stages, "train")), study)
        study.kill()
    # As Slurm does before the end of a job's time: the job comes back, and the study finds it.
    number = running(stages, "train")
    subprocess.run(["scancel", "--signal=USR2", number], check=True)
    with start() as study:
        until(lambda: bool(running(stages, "eval")), study)
        killed = running(stages, "eval")
        subprocess.run(["scancel", "--signal=KILL", killed], check=True)
        _, err = study.communicate()
        assert study.returncode == 1, err
    assert f"its job {killed} ended (CANCELLED); its log: {stages}" in json.dumps(
        json.loads(page.read_bytes())["failures"]
    )
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert read(page.read_bytes()) == expected
    submitted = [log.name.partition("_")[0] for log in stages.rglob("*_submitted.pkl")]
    assert len(submitted) == len(set(submitted)) == 5  # of four stages, one of which was killed
    (log,) = stages.glob(f"train/*/.jobs/{number}_0_log.out")
    assert f"job {number} goes back into the queue" in log.read_text()
