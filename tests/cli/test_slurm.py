"""kinject slurm: the script is run here, with an srun and an scontrol for one machine."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from slurm_commands import Slurm

from kinject.cli import main

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
if not os.path.exists(os.path.join({folder!r}, "ends")):
    time.sleep(60)
"""
"""Stands for the Python that trains: notes how it was started, and waits for SIGUSR1."""


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
    for nodes, more in (1, ["--gpus", "1"]), (2, ["--gpus", "4", "--launch=--debug", "--warning", "90"]):
        words = ["slurm", recipe.name, "model.dtype=float32", "--nodes", str(nodes), *more, "--out", f"{nodes}.sbatch"]
        assert main([*words, "--account", "lab", "--sbatch", "qos=long", "--setup", "export A=1"]) == 0
        script = tmp_path / f"{nodes}.sbatch"
        assert f"sbatch {script.name}" in capsys.readouterr().out
        lines = script.read_text().splitlines()
        assert any(
            line.startswith(f"srun --export=ALL --kill-on-bad-exit=1 --cpus-per-task={4 * int(more[1])} ")
            for line in lines
        )
        warning = "90" if nodes == 2 else "300"
        expected = (
            "requeue",
            f"nodes={nodes}",
            f"signal=B:USR1@{warning}",
            "account=lab",
            "qos=long",
            "open-mode=append",
        )
        assert {f"#SBATCH --{option}" for option in expected} <= set(lines)
        slurm = Slurm(tmp_path, nodes)

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
            assert (note["PET_SIGNALS_TO_HANDLE"], note["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == ("SIGINT", "90")

        assert slurm.run(script, begun, signal.SIGUSR1, SLURM_RESTART_COUNT="100") != 0  # as often as it may
        started(tmp_path)
        assert slurm.run(script, begun, signal.SIGTERM) != 0  # Slurm decides whether it comes back
        started(tmp_path)
        (tmp_path / "ends").touch()
        assert slurm.run(script, begun, None, SLURM_RESTART_COUNT="1") == 0
        assert not slurm.requeued.exists()
        assert len(started(tmp_path)) == nodes
        (tmp_path / "ends").unlink()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nodes", "0"], "--nodes: found 0, allowed: 1 or more."),
        (["--time", "tomorrow"], "--time: found 'tomorrow', allowed: minutes, H:M:S or D-H:M:S, as 24:00:00."),
        (["--partition", "a b"], "--partition: found 'a b', allowed: letters"),
        (["--sbatch", "signal=TERM@9"], "--sbatch signal=TERM@9: the script sets signal itself. Leave it out."),
        (["--config", "no.yaml"], "--config: no.yaml: no such file. kinject recipes copy distributed writes some."),
        (["--gpus", "0", "--processes", "2"], "--config: missing. Several processes without GPUs need recipes"),
    ],
)
def test_an_option_that_no_job_can_have_is_refused_in_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slurm", "recipe.yaml", *words]) == 2
    assert capsys.readouterr().err.startswith(f"kinject slurm: {message}")
