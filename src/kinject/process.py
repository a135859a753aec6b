"""This process: its environment, its rank among those that a launcher started, its cores and memory. Imports no torch."""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

from kinject.errors import InputError, KinjectError
from kinject.signals import running_time

_Made = TypeVar("_Made")

_NUMBERS = (
    (re.compile(r"(LOCAL_|GROUP_|NODE_)?RANK"), 0, 1_000_000),
    (re.compile(r"(LOCAL_|OMPI_COMM_|MV2_COMM_)?WORLD_SIZE|PMI_SIZE|PARALLELISM_CONFIG_\w+_SIZE"), 1, 1_000_000),
    (re.compile(r"MASTER_PORT"), 1, 65_535),
    (re.compile(r"(OMP|MKL|OPENBLAS|NUMEXPR|RAYON)_NUM_THREADS|NUMEXPR_MAX_THREADS"), 1, 4096),
    (re.compile(r"HF_HUB_(ETAG|DOWNLOAD)_TIMEOUT|ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), 1, 1_000_000),
    (re.compile(r"SOURCE_DATE_EPOCH|HF_DATASETS_IN_MEMORY_MAX_SIZE"), 0, 2**36),
)
"""Environment variables that kinject or its libraries read as whole numbers: name, smallest, largest."""
_AUTO = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
"""For DeepSpeed accelerate's launcher sets it to auto: the trainer's."""
_YES_OR_NO = ("1", "0", "true", "false", "yes", "no", "on", "off", "y", "n", "t", "f")
_WORDS = (
    (
        re.compile(r"ACCELERATE_(USE_(CPU|FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG)|DEBUG_MODE|CPU_AFFINITY)"),
        _YES_OR_NO,
    ),
    (re.compile(r"FORK_LAUNCHED"), _YES_OR_NO),
    (re.compile(r"ACCELERATE_MIXED_PRECISION"), ("no", "fp16", "bf16", "fp8")),
)
"""Environment variables that the libraries read as one of some words."""
_EMPTY_IS_UNSET = ("HOME", "TMPDIR", "HF_HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR")
_SHORTAGE = re.compile(
    r"out of memory|failed to map segment|(can't|cannot|unable to) allocate|bad_alloc|start new thread|too many open files",
    re.IGNORECASE,
)
_FEWEST_FILES, _MANY_FILES = 64, 1024


def check_environment() -> None:
    """Check what every verb needs of its environment, before a library reads it. Raises `InputError`.

    An empty variable of those checked counts as not set, and is removed. The limit of open files is raised where it is low.
    """
    for name, value in list(os.environ.items()):
        expected = _expected(name, value.strip())
        if not value.strip() and (expected or name in _EMPTY_IS_UNSET):
            del os.environ[name]
        elif expected:
            raise InputError(
                f"the environment variable {name}: found {value[:100]!r}, expected {expected}. Correct it, or unset it."
            )
    present = {name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ}
    if present and (missing := {"RANK", "WORLD_SIZE"} - present):
        raise InputError(
            f"the environment has {' and '.join(sorted(present))}, but not {' and '.join(sorted(missing))}. A launcher "
            "(accelerate launch, torchrun) sets both: start kinject under one, or unset what is there."
        )
    if rank() >= world_size():
        raise InputError(f"the environment variable RANK is {rank()}; it must be below WORLD_SIZE, {world_size()}.")
    if sys.getfilesystemencoding().lower() != "utf-8":
        raise InputError(
            f"names of files are written in {sys.getfilesystemencoding()} here. Set LC_ALL=C.UTF-8 or PYTHONUTF8=1."
        )
    if sys.flags.optimize > 1:
        raise InputError("PYTHONOPTIMIZE=2 (python -OO) removes documentation that the libraries read. Unset it.")
    _check_folders()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if most < _FEWEST_FILES:
        raise InputError(
            f"only {most} files may be open at once; {_FEWEST_FILES} are needed. Raise the limit (ulimit -n)."
        )
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _check_folders() -> None:
    """Check that the working directory exists and that temporary files have a place."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise InputError(
            "the working directory was deleted. Change to another (cd), and run the command again."
        ) from None
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise InputError(f"{error.strerror}. Make one of them writable, or set TMPDIR to a folder that is.") from None


def _expected(name: str, value: str) -> str:
    """Return the allowed values of the environment variable `name`; "" if `value` is one, or if it is not checked."""
    for pattern, words in _WORDS:
        if pattern.fullmatch(name):
            return "" if value.lower() in words else f"one of {', '.join(words)}"
    for pattern, least, most in _NUMBERS:
        if pattern.fullmatch(name):
            if value == "auto" and name == _AUTO:
                return ""
            parts = value.split(",") if name == "OMP_NUM_THREADS" else [value]  # one number for each level of nesting
            fine = all(re.fullmatch("[0-9]{1,12}", part.strip()) and least <= int(part) <= most for part in parts)
            return "" if fine else f"a whole number from {least:,} to {most:,}"
    return ""


def is_shortage(error: BaseException) -> bool:
    """Return whether memory, threads or open files ran out, of this machine, its GPU or a limit, in whatever form it shows."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None


def is_launched() -> bool:
    """Return whether a launcher (`accelerate launch`, torchrun) started this process, alone or among others."""
    return "RANK" in os.environ


def is_yes(name: str) -> bool:
    """Return whether the environment variable `name` is a yes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def tensor_parallel_size() -> int:
    """Return how many processes read the same rows, each with its part of every weight: 1 without tensor parallelism."""
    return int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))


def context_parallel_size() -> int:
    """Return how many processes read a row together, each its part of the tokens: 1 without context parallelism."""
    return int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))


def processes_per_row() -> int:
    """Return how many processes share a row: those of tensor parallelism times those of context parallelism."""
    return tensor_parallel_size() * context_parallel_size()


def first_process_first(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make`; the others of a launch call it once the first process has written its files.

    A `KinjectError` of the first is raised in all. Accelerate's state must have been made.
    """
    if world_size() == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    made, error = None, None
    if is_first_process():
        try:
            made = make()
        except KinjectError as raised:
            error = raised
        broadcast_object_list([None if error is None else str(error)])
        if error is not None:
            raise error
        return cast("_Made", made)
    fault: list[str | None] = [None]
    broadcast_object_list(fault)
    if fault[0] is not None:
        raise InputError(fault[0])
    return make()


def made_by_first_process(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make` in the first process of a launch, which sends it to the others."""
    made: list[_Made | None] = [None]

    def make_once() -> None:
        made[0] = make() if is_first_process() else None

    first_process_first(make_once)
    if world_size() > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(made)
    return cast("_Made", made[0])


def is_fsdp_launch() -> bool:
    """Return whether accelerate shards weights by FSDP when training starts. Until then they stay off the GPU."""
    return is_yes("ACCELERATE_USE_FSDP")


def what_shards() -> str:
    """Return FSDP or DeepSpeed if the launcher shards weights, "" if each process is to hold all."""
    return "FSDP" if is_fsdp_launch() else "DeepSpeed" if is_yes("ACCELERATE_USE_DEEPSPEED") else ""


def single_process_notes() -> list[str]:
    """Return a note if `accelerate launch` was to start several processes but started only this one.

    It does so for a configuration of type MULTI_CPU, and without GPUs unless it gets ``--multi_gpu`` (then gloo joins the
    processes) or MPI. The port that it sets for several processes shows it.
    """
    if is_launched() or not ("ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ):
        return []
    return [
        "accelerate launch started one process only; without GPUs it starts several with --multi_gpu, or "
        "--config_file recipes/distributed/ddp-cpu.yaml"
    ]


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


def work_seconds(device: str) -> float:
    """Return a clock of the work on `device`, in seconds: on ``cpu`` the processor time of this process and its ended children,
    all cores together, to which other programs add little; else the time without pauses.
    """
    return sum(os.times()[:4]) if device == "cpu" else running_time()


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
