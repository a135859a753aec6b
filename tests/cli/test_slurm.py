"""--job: the script is run here, with an srun and an scontrol for one machine."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from slurm_commands import Slurm

from kinject.cli import main
from kinject.cli.job_files import render_job
from kinject.eval.require import CANNOT_BE_TOLD

REAL = sys.executable
PYTHON = """\
#!{python} -S
import json, os, signal, sys, time
ignored = [signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGUSR1, signal.SIGTERM)]
signal.signal(signal.SIGUSR1, lambda number, frame: sys.exit(1))
names = ("SLURM_NODEID", "PET_SIGNALS_TO_HANDLE", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
found = dict(words=sys.argv[1:], ignored=ignored, **{{name: os.environ.get(name) for name in names}})
path = os.path.join({folder!r}, "started-" + os.environ.get("SLURM_NODEID", "0"))
with open(path + ".part", "w") as file:
    json.dump(found, file)
os.replace(path + ".part", path)
until = time.monotonic() + 600
while not os.path.exists(os.path.join({folder!r}, "ends")) and time.monotonic() < until:
    time.sleep(0.02)
"""
"""Stands for the Python that trains: notes how it was started, and waits for SIGUSR1.

Python runs a handler between two lines of its own: a signal that comes just before a long sleep is handled after it.
"""


def started(folder: Path) -> list[Mapping[str, object]]:
    """Return what PYTHON noted, by node, and forget it."""
    paths = sorted(folder.glob("started-?"))
    notes = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return notes


def test_the_script_warns_requeues_and_resumes_on_one_node_and_on_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "a"}\n')
    recipe = tmp_path / "my run.yaml"
    recipe.write_text(
        "run_dir: run\nmodel: {new: {model_type: llama}, tokenizer: {vocab_size: 300}}\ncorpus: {path: corpus.jsonl}\n"
        "trainer: {max_steps: 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "python"
    python.write_text(PYTHON.format(python=REAL, folder=str(tmp_path)))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert main(["train", recipe.name, "model.dtype=float32", "--job", "slurm"]) == 0
    script = tmp_path / "job.sbatch"
    script.write_text(capsys.readouterr().out)
    assert {
        "#SBATCH --requeue",
        "#SBATCH --signal=B:USR1@300",
        "#SBATCH --job-name=train-my-run",
    } <= set(script.read_text().splitlines())
    for nodes in (1, 2):
        slurm = Slurm(tmp_path, nodes, gpus=1 if nodes == 1 else 4)

        def begun(nodes: int = nodes) -> bool:
            return len(list(tmp_path.glob("started-?"))) == nodes

        assert slurm.run(script, begun, signal.SIGUSR1) == 0
        assert slurm.requeued.read_text() == "requeue 4711\n"
        slurm.requeued.unlink()
        trains = ["-m", "kinject.cli", "train", recipe.name, "model.dtype=float32", "--resume"]
        for number, note in enumerate(started(tmp_path)):
            assert note["SLURM_NODEID"] == str(number)
            if nodes == 1:
                assert note["words"] == trains
                continue
            rank = ["--num_machines", "2", "--machine_rank", str(number), "--num_processes", "8"]
            address = ["--main_process_ip", "127.0.0.1", "--main_process_port", "24711"]
            assert note["words"][:2] == ["-m", "accelerate.commands.launch"]
            assert note["words"][-len(trains) :] == trains
            assert " ".join([*rank, *address]) in " ".join(note["words"])
            assert note["ignored"] == [True, True]
            assert (note["PET_SIGNALS_TO_HANDLE"], note["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == (
                "SIGINT",
                "300",
            )

        assert (
            slurm.run(script, begun, signal.SIGUSR1, SLURM_RESTART_COUNT="100") != 0
        )  # as often as it may
        started(tmp_path)
        assert slurm.run(script, begun, signal.SIGTERM) != 0  # Slurm decides whether it comes back
        started(tmp_path)
        (tmp_path / "ends").touch()
        assert slurm.run(script, begun, None, SLURM_RESTART_COUNT="1") == 0
        assert not slurm.requeued.exists()
        assert len(started(tmp_path)) == nodes
        (tmp_path / "ends").unlink()


RECIPES = {
    "augment": "augment: {documents: made/documents.jsonl, styles: {paraphrase: 1}, generator: {kind: sandbox}}",
    "questions": "questions: {documents: made/documents.jsonl, generator: {kind: sandbox}}",
    "train": "model: {new: {model_type: llama}, tokenizer: {vocab_size: 300}}\ncorpus: {path: made/corpus.jsonl}\n"
    "trainer: {max_steps: 2}",
    "eval": "eval: {models: {base: made/cpt/model}, questions: {new: made/test.jsonl}}",
}
"""Verb -> a recipe whose inputs other jobs make."""


@pytest.mark.parametrize("verb", RECIPES)
def test_a_job_is_written_before_its_inputs_exist_and_names_them(
    verb: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe = tmp_path / 'first "one".yaml'
    recipe.write_text(f"run_dir: run\n{RECIPES[verb]}\n")
    monkeypatch.chdir(tmp_path)
    words = [verb, recipe.name, "seed=3"]
    command = shlex.join(words + ["--resume"] * (verb == "train"))
    for kind in ("slurm", "sky", "k8s"):
        assert main([*words, "--job", kind]) == 0
        out, err = capsys.readouterr()
        assert "must exist when this job starts:" in err
        assert all(name in err for name in re.findall(r"made/[\w./]+", RECIPES[verb]))
        if kind == "slurm":
            assert f"-m kinject.cli {command}" in out
            assert "--dependency=afterok:" in err
            assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
            continue
        job = yaml.safe_load(out)
        if kind == "sky":
            assert job["name"] == f"{verb}-first-one"
            assert job["run"].rstrip().endswith(command)
            # No index has kinject: whoever took that name there would run on the user's cluster.
            assert job["setup"] == "pip install KINJECT"
            assert "KINJECT: the wheel" in out
        else:
            (container,) = job["spec"]["template"]["spec"]["containers"]
            assert container["command"][-1] == f"exec kinject {command}"
            (rule,) = job["spec"]["podFailurePolicy"]["rules"]
            # The exit codes of a verb that has ended; after a signal another pod resumes.
            assert rule["onExitCodes"]["values"] == [1, 2, CANNOT_BE_TOLD, 70]
    recipe.write_text(f"run_dir: run\n{RECIPES[verb]}\nfoo: 1\n")
    assert main([*words, "--job", "slurm"]) == 2
    assert "foo" in capsys.readouterr().err


def test_the_name_of_a_job_is_one_that_kubernetes_takes() -> None:
    stem = "ferries_of_the_northern_coast-and-their-skippers-by-harbour--v2-final"
    text = render_job("k8s", ["eval", f"recipes/{stem}.yaml"])
    name = yaml.safe_load(text)["metadata"]["name"]
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{,61}[a-z0-9])?", name)
    assert name.startswith("eval-ferries-of-the-northern-coast-")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jobs", "slrm:4"], "--jobs: found slrm:4, allowed"),
        (["--jobs", "slurm", "--slurm", "training.mem=9G"], "--slurm: found 'training.mem=9G'"),
    ],
)
def test_a_word_that_a_study_refuses_is_refused_before_its_job_is_queued(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "study.yaml", "--job", "slurm", *words]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_a_study_that_names_no_arm_of_its_own_gets_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    claim = "{statement: s, test: difference, arm: papers, baseline: base, question_set: new}"
    Path("study.yaml").write_text(
        "run_dir: run\nstudy: {title: t, train: train.yaml, eval: eval.yaml, models: {m: made/m}, "
        f"arms: {{paper: {{corpus: made/c.jsonl}}}}, claims: {{c: {claim}}}}}\n"
    )
    for name in ("train", "eval"):
        Path(f"{name}.yaml").write_text(f"run_dir: run\n{RECIPES[name]}\n")
    assert main(["study", "study.yaml", "--job", "k8s"]) == 2
    printed = capsys.readouterr()
    assert "study.claims.c.arm: found 'papers'. Did you mean paper?" in printed.err
    assert printed.out == ""
