"""Slurm's srun and scontrol for one machine: run as `srun ...` or `scontrol ...` by their names.

srun starts its command once for each of SLURM_NNODES and sends what it receives to all processes below it, as Slurm does
for a step. scontrol knows this machine's address, and appends the jobs that are requeued to KINJECT_REQUEUED.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def _below(pid: int) -> list[int]:
    """Return the processes that `pid` started, and theirs."""
    children = [int(n) for task in Path(f"/proc/{pid}/task").glob("*/children") for n in task.read_text().split()]
    return [*children, *(number for child in children for number in _below(child))]


def _srun(words: list[str]) -> int:
    command = [word for word in words if not word.startswith("--")]
    numbers = range(int(os.environ["SLURM_NNODES"]))
    tasks: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _: object) -> None:
        for pid in _below(os.getpid()):
            os.kill(pid, number)

    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, forward)
    tasks += [subprocess.Popen(command, env={**os.environ, "SLURM_NODEID": str(n)}) for n in numbers]
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def _scontrol(words: list[str]) -> int:
    if words[0] == "show":
        print("127.0.0.1")
        return 0
    with open(os.environ["KINJECT_REQUEUED"], "a") as file:
        file.write(f"{' '.join(words)}\n")
    return 0


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scontrol": _scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
