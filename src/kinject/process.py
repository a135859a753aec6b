"""This process: its rank among those that a launcher started, its cores and its memory. Imports no torch."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def is_launched() -> bool:
    """Return whether a launcher (`accelerate launch`, torchrun) started this process, alone or among others."""
    return "RANK" in os.environ


def rank() -> int:
    """Return the number of this process among those of its launcher, from 0; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether this process writes what a run writes once: it has rank 0."""
    return rank() == 0


def core_count() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    paths = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    limits = [path.read_text("utf-8").strip() for path in paths if path.is_file()]
    return int(min([physical, *(int(limit) for limit in limits if limit.isdigit())]))


def available_memory() -> int:
    """Return the bytes that a new process may use: what Linux reports as free, and at most `machine_memory`."""
    free = _read_kilobytes(Path("/proc/meminfo"), "MemAvailable")
    return min(free, machine_memory()) if free is not None else machine_memory()


def resident_memory(pid: int | None = None) -> int | None:
    """Return the resident bytes of process `pid` (None: this one); None if the system does not report them.

    The resident set holds the whole process: Python, its libraries and mapped files that were read count as well.
    """
    return _read_kilobytes(Path(f"/proc/{pid or 'self'}/status"), "VmRSS")


def peak_memory(device: str = "cpu") -> int:
    """Return the most bytes held so far: on ``cuda`` by torch's allocator, else by this process's resident set."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = _read_kilobytes(Path("/proc/self/status"), "VmHWM")
    if peak is not None:  # Linux; getrusage would count the parent's peak too, from before this program was loaded
        return peak
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> None:
    """Let `peak_memory` count from now on, on Linux. Without the permission it counts from the process's start."""
    if sys.platform == "linux":
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except PermissionError:
            return  # the peak is then too high, never too low


def _read_kilobytes(path: Path, name: str) -> int | None:
    """Return the value of `name` in a file of /proc in bytes; None if there is no such file or name."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
