"""This process: its environment, its rank in a launch, its cores and memory, its signals as
exceptions. Imports no torch.

SIGINT (Ctrl-C), SIGTERM, SIGHUP (the terminal is gone), SIGQUIT (Ctrl-\\) and SIGUSR1 (a batch
system's warning) end a verb the same way. None is lost if it arrives while Python ignores
exceptions. A signal that was ignored when the process started stays ignored, as under nohup or in
the background of a script; SIGTERM and SIGUSR1 never are, so that a batch script may let its
launcher ignore them.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from kinject.errors import InputError, KinjectError, Terminated

_Made = TypeVar("_Made")

_SHORTAGE = re.compile(
    r"out of memory|failed to map segment|(can't|cannot|unable to) allocate|bad_alloc|"
    r"start new thread|too many open files",
    re.IGNORECASE,
)


def is_shortage(error: BaseException) -> bool:
    """Return whether memory, threads or open files ran out, of this machine, its GPU or a limit, in
    whatever form it shows."""
    return isinstance(error, MemoryError) or _SHORTAGE.search(str(error)) is not None


def is_launched() -> bool:
    """Return whether a launcher (`accelerate launch`, torchrun) started this process, alone or
    among others."""
    return "RANK" in os.environ


def is_yes(name: str) -> bool:
    """Return whether the environment variable `name` is a yes."""
    return os.environ.get(name, "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def tensor_parallel_size() -> int:
    """Return how many processes read the same rows, each with its part of every weight: 1 without
    tensor parallelism."""
    return int(os.environ.get("PARALLELISM_CONFIG_TP_SIZE", "1"))


def context_parallel_size() -> int:
    """Return how many processes read a row together, each its part of the tokens: 1 without context
    parallelism."""
    return int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))


def processes_per_row() -> int:
    """Return how many processes share a row: those of tensor parallelism times those of context
    parallelism."""
    return tensor_parallel_size() * context_parallel_size()


def made_by_first_process(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make` in the first process of a launch, which sends it to the others.

    A `KinjectError` of the first is raised in all. Accelerate's state must have been made.
    """
    if world_size() == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    shared: list[Any] = [None, None]
    fault: KinjectError | None = None
    if is_first_process():
        try:
            shared[0] = make()
        except KinjectError as error:
            fault, shared[1] = error, str(error)
    broadcast_object_list(shared)
    if shared[1] is not None:
        raise fault or InputError(shared[1])
    return cast("_Made", shared[0])


def first_process_first(make: Callable[[], _Made]) -> _Made:
    """Return the result of `make`; the others of a launch call it once the first has written its
    files. Raises as above."""
    made: list[_Made] = []

    def make_here() -> None:
        made.append(make())

    # Nothing is sent: the results of others are their own, and may be large.
    made_by_first_process(make_here)
    return made[0] if made else make()


def is_fsdp_launch() -> bool:
    """Return whether accelerate shards weights by FSDP when training starts. Until then they stay
    off the GPU."""
    return is_yes("ACCELERATE_USE_FSDP")


def what_shards() -> str:
    """Return FSDP or DeepSpeed if the launcher shards weights, "" if each process is to hold
    all."""
    if is_fsdp_launch():
        return "FSDP"
    return "DeepSpeed" if is_yes("ACCELERATE_USE_DEEPSPEED") else ""


def rank() -> int:
    """Return the number of this process among those of its launcher, from 0; 0 without a
    launcher."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return how many processes the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Return whether this process writes what a run writes once: it has rank 0."""
    return rank() == 0


def core_count() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # macOS has none
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's
    if that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # The limit of control groups in version 2 ("max" without one), and in version 1.
    paths = [Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")]
    limits = [path.read_text("utf-8").strip() for path in paths if path.is_file()]
    return min([physical, *(int(limit) for limit in limits if limit.isdigit())])


def work_seconds(device: str) -> float:
    """Return a clock of the work on `device`, in seconds: on ``cpu`` the processor time of this
    process and its ended children, all cores together, to which other programs add little; else the
    time without pauses.
    """
    return sum(os.times()[:4]) if device == "cpu" else monotonic()


def available_memory() -> int:
    """Return the bytes that a new process may use: what Linux reports as free, and at most
    `machine_memory`."""
    free = _read_kilobytes(Path("/proc/meminfo"), "MemAvailable")
    return machine_memory() if free is None else min(free, machine_memory())


def resident_memory(pid: int | None = None) -> int | None:
    """Return the resident bytes of process `pid` (None: this one); None if the system does not
    report them.

    The resident set holds the whole process: Python, its libraries and mapped files that were read
    count as well.
    """
    return _read_kilobytes(Path(f"/proc/{pid or 'self'}/status"), "VmRSS")


def peak_memory(device: str = "cpu") -> int:
    """Return the most bytes held so far: on ``cuda`` by torch's allocator, else by this process's
    resident set."""
    if device == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    peak = _read_kilobytes(Path("/proc/self/status"), "VmHWM")
    # On Linux getrusage would count the parent's peak too, from before this program was loaded.
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _read_kilobytes(path: Path, name: str) -> int | None:
    """Return the value of `name` in a file of /proc in bytes; None if there is no such file or
    name."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    for line in lines:
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""The signals that end a verb."""
_FROM_BATCH_SYSTEM = frozenset((signal.SIGTERM, signal.SIGUSR1))
"""Those that a batch system sends: Slurm's --signal, and what it sends before it kills."""
FROM_TERMINAL = frozenset((signal.SIGINT, signal.SIGHUP, signal.SIGQUIT))
"""Those that a terminal sends to all processes of a command."""
_REPEATED = 1.0
"""Seconds in which further signals are the first one again."""
_PAUSE = 0.05
"""Seconds until a signal whose exception was ignored is sent again."""


@contextlib.contextmanager
def handled_by(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers,
) -> Iterator[None]:
    """Let `handler` receive the signals that end a verb in the block; afterwards restore the
    previous handlers."""
    received = [
        number for number in SIGNALS if number in _FROM_BATCH_SYSTEM or not _is_ignored(number)
    ]
    before = [(number, signal.signal(number, handler)) for number in received]
    try:
        yield
    finally:
        for number, previous in before:
            # None: the handler was set outside of Python, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


def _is_ignored(number: signal.Signals) -> bool:
    return signal.getsignal(number) is signal.SIG_IGN


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Raise `KeyboardInterrupt` in the block on SIGINT, and `Terminated` on the other signals that
    end a verb.

    A signal may arrive while Python finalises an object and ignores exceptions. Such a signal is
    sent again.
    """
    previous_hook = sys.unraisablehook

    def send_again(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, KeyboardInterrupt):
            previous_hook(ignored)
        else:
            _send_later(_number(ignored.exc_value))

    def receive(signum: int, frame: FrameType | None) -> None:
        # On a loaded machine the signal comes before the hook ends, and Python ignores what is
        # raised in the hook, too: a training ran to its end.
        if _is_below(frame, send_again.__code__):
            _send_later(signum)
        else:
            raise interruption(signum)

    # Python discarded a SIGTERM in a callback of a weak reference, and a study ran to its end.
    sys.unraisablehook = send_again
    try:
        with handled_by(receive):
            yield
    finally:
        sys.unraisablehook = previous_hook


@contextlib.contextmanager
def deferred(announce: Callable[[], None]) -> Iterator[list[int]]:
    """Keep the first signal that ends a verb in the list until the block ends, then raise it;
    `announce` it at once.

    A further signal a second later, or more, raises immediately (a launcher repeats a signal of the
    terminal). After SIGUSR1 only a signal of the terminal does: a batch system sends SIGTERM next.
    In a thread other than the main one, nothing is received.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    first = 0.0

    def receive(signum: int, frame: FrameType | None) -> None:
        nonlocal first
        if signal.SIGUSR1 in received and signum in _FROM_BATCH_SYSTEM:
            return
        if received and monotonic() - first >= _REPEATED:
            raise interruption(signum)
        if not received:
            first = monotonic()
            received.append(signum)
            # In a thread, since the signal may have come in the middle of a print.
            threading.Thread(target=announce, daemon=True).start()

    with handled_by(receive):
        yield received
    if received:
        raise interruption(received[0])


def _send_later(signum: int) -> None:
    """Send this process a signal again when `_PAUSE` is over."""
    timer = threading.Timer(_PAUSE, os.kill, (os.getpid(), signum))
    timer.daemon = True
    timer.start()


def _is_below(frame: FrameType | None, code: CodeType) -> bool:
    """Return whether `frame` was called, through others or not, by a function with `code`."""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def interruption(signum: int) -> KeyboardInterrupt:
    """Return the exception to raise for a signal."""
    return KeyboardInterrupt() if signum == signal.SIGINT else Terminated(signum)


def _number(stop: KeyboardInterrupt) -> signal.Signals:
    return signal.Signals(stop.number) if isinstance(stop, Terminated) else signal.SIGINT


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the exit code of a shell for the signal behind `stop`: 128 and its number."""
    return 128 + _number(stop)


def allow_open_files(n: int) -> None:
    """Let this process open `n` files more than it usually may, if the system allows so many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = soft + n
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    # macOS has limits below the one that it tells: opening then reports what is wrong.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
