"""Slurm's srun and scontrol for one machine: run as `srun ...` or `scontrol ...` by their names. `Slurm` runs a job with them.

srun starts its command once for each of SLURM_NNODES and sends what it receives to all processes below it, as Slurm does
for a step, KINJECT_SRUN_PAUSE seconds apart. scontrol knows this machine's address, and appends the jobs that are requeued
to KINJECT_REQUEUED.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PYTHON = sys.executable


def _below(pid: int) -> list[int]:
    """Return the processes that `pid` started, and theirs."""
    children = [
        int(n)
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for n in task.read_text().split()
    ]
    return [*children, *(number for child in children for number in _below(child))]


def _srun(words: list[str]) -> int:
    command = [word for word in words if not word.startswith("--")]
    numbers = range(int(os.environ["SLURM_NNODES"]))
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(float(os.environ.get("KINJECT_SRUN_PAUSE", "0")))

    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, forward)
    tasks += [
        subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}) for n in numbers
    ]
    # Not task.wait(): Python would handle a signal that comes just before it only after it.
    while any(task.poll() is None for task in tasks):
        time.sleep(0.02)
    codes = [task.returncode for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def _scontrol(words: list[str]) -> int:
    if words[0] == "show":
        print("127.0.0.1")
        return 0
    with open(os.environ["KINJECT_REQUEUED"], "a") as file:
        file.write(f"{' '.join(words)}\n")
    return 0


class Slurm:
    """Runs a job's script with the commands of this file."""

    def __init__(self, folder: Path, nodes: int, gpus: int) -> None:
        self.folder, self.requeued = folder, folder / "requeued"
        for name in ("srun", "scontrol"):
            shutil.copy(__file__, folder / name)
            text = (folder / name).read_text()
            (folder / name).write_text(f"#!{PYTHON} -S\n{text}")
            (folder / name).chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "KINJECT_REQUEUED": str(self.requeued),
            "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": str(nodes), "SLURM_GPUS_ON_NODE": str(gpus),
        }  # fmt: skip

    def run(
        self, script: Path, begun: Callable[[], bool], sent: int | None, **environment: str
    ) -> int:
        """Run `script`, send it the signal `sent` once it has `begun`, and return its exit code."""
        environment = {**self.environment, **environment}
        with subprocess.Popen(["bash", str(script)], env=environment, cwd=self.folder) as job:
            while sent is not None and not begun():
                assert job.poll() is None
                time.sleep(0.02)
            if sent is not None:
                os.kill(job.pid, sent)
            return job.wait(600)


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scontrol": _scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
