"""Runs tasks (stages of a study, files to parse) in worker processes of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from kinject.disk import fix_for, system_failure
from kinject.errors import InputError, KinjectError, Terminated
from kinject.process import FROM_TERMINAL, core_count, is_shortage, terminable
from kinject.terminal import log_to_screen, protect_streams, show

LOG = "stage.log"
"""File in a task's folder with everything that the task printed."""
CPU_PRELOAD = (
    "kinject.train.run",
    "kinject.train.trainer",
    "kinject.train.short_run",
    "kinject.eval.run",
    "trl.trainer.sft_config",
)
"""Modules that stages import, for seconds each time: without a GPU, workers are forked from a
process that has them."""


class Task(Protocol):
    """Work for another process: it can be pickled, and `folder` is for its files. `label` names it
    for people."""

    @property
    def folder(self) -> Path: ...

    @property
    def label(self) -> str: ...

    def run(self) -> Mapping[str, Any]:
        """Do the work; return its counts."""
        ...


@dataclass(frozen=True)
class Outcome:
    """The outcome of a task: `result` as its `run` returns it, or None and the `error` in one line.

    `died` is True if the process ended in the middle of the task.
    """

    task: Any
    result: Mapping[str, Any] | None
    error: str = ""
    died: bool = False


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    devices: str
    task: Task | None = None


def start_fork_server() -> None:
    """Without a GPU, let a process import `CPU_PRELOAD` in the background; `LocalExecutor` forks
    its workers from it."""
    if _count_gpus():
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(CPU_PRELOAD))
    # Before the signals are blocked: when it starts, multiprocessing's tracker lets SIGINT through.
    resource_tracker.ensure_running()
    # Inherited by the server and its workers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class LocalExecutor:
    """Runs tasks in `n_workers` processes, among which the cores and the GPUs are divided evenly.

    If a worker dies, only its task fails (a ProcessPoolExecutor loses all), and a new worker
    replaces it. Workers end with this process, however it ends. They receive no signal of the
    terminal: this process sends them SIGTERM, so that a task can store its requests in flight. With
    `preload` (names of modules), workers are forked from one process that has imported them; none
    of these may initialise a GPU. With `fresh` a worker runs one task: none has the memory of
    another.

    Each worker's number of threads is its fraction of the cores, unless the user has set
    OMP_NUM_THREADS. Raises `InputError` if that is no number.
    """

    def __init__(
        self, n_workers: int, n_gpus: int, preload: Sequence[str] = (), *, fresh: bool = False
    ) -> None:
        self._fresh = fresh
        # Not a fork of this process: with two threads of torch its child waited for ever.
        self._context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._n_threads = os.environ.get("OMP_NUM_THREADS") or str(
            max(1, core_count() // n_workers)
        )
        _threads_of(self._n_threads)  # a worker could tell nobody that it is no number
        gpus = [str(index) for index in range(n_gpus)]
        self._workers = [
            self._start(",".join(gpus[index::n_workers])) for index in range(n_workers)
        ]

    def _start(self, devices: str) -> _Worker:
        ours, theirs = self._context.Pipe()
        # A worker that is forked has the environment in which the fork server started.
        environment = {**os.environ, "OMP_NUM_THREADS": self._n_threads}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        process = self._context.Process(target=_serve, args=(theirs, environment))
        resource_tracker.ensure_running()  # starting it later would unblock the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, FROM_TERMINAL)  # inherited by the worker
        try:
            with _main_hidden():
                process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Else this end would keep the pipe open, and the death of a worker would not end `recv`.
        theirs.close()
        return _Worker(process, ours, devices)

    def has_room(self) -> bool:
        """Return whether a worker is free."""
        return any(worker.task is None for worker in self._workers)

    def submit(self, task: Task) -> None:
        """Give `task` to a free worker."""
        worker = next(worker for worker in self._workers if worker.task is None)
        worker.task = task
        try:
            worker.pipe.send(task)
        except OSError:  # it was killed while it had nothing to do
            worker = self._replaced(worker)
            worker.task = task
            worker.pipe.send(task)

    def wait(self) -> list[Outcome]:
        """Wait until a worker has finished; return the outcomes of all that have."""
        busy = [(worker, worker.task) for worker in self._workers if worker.task is not None]
        ready = wait([worker.pipe for worker, _ in busy])
        return [self._receive(worker, task) for worker, task in busy if worker.pipe in ready]

    def _receive(self, worker: _Worker, task: Task) -> Outcome:
        worker.task = None
        try:
            outcome = Outcome(task, *worker.pipe.recv())
            if self._fresh:
                self._replaced(worker)
            return outcome
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode
            self._replaced(worker)
            reason = f"ended with code {code}"
            if code and code < 0:
                # Linux ends a process of a machine that runs out of memory by SIGKILL.
                reason = f"killed by signal {-code} (out of memory?)"
            return Outcome(task, None, f"its worker process was {reason}", died=True)

    def _replaced(self, worker: _Worker) -> _Worker:
        """Return a new worker in the place of one that has ended, or ends when its pipe closes."""
        worker.pipe.close()
        worker.process.join()
        new = self._start(worker.devices)
        self._workers[self._workers.index(worker)] = new
        return new

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            if worker.task is not None:
                worker.process.terminate()
            worker.pipe.close()  # an idle worker exits when its pipe closes
        try:
            for worker in self._workers:
                worker.process.join()
        except KeyboardInterrupt:  # a second Ctrl-C
            for worker in self._workers:
                worker.process.kill()
            raise


def executor_factory(n_jobs: int | None) -> Callable[[], LocalExecutor]:
    """Return a function that starts `n_jobs` workers; without a number one for each GPU, else for
    each core, at most 8.

    Raises `InputError` for a number of jobs out of range.
    """
    if n_jobs is not None and not 1 <= n_jobs <= 256:
        raise InputError(f"--jobs: found {n_jobs}, allowed: 1 to 256.")

    def start() -> LocalExecutor:
        n_gpus = _count_gpus()
        n_workers = n_jobs or n_gpus or min(core_count(), 8)
        return LocalExecutor(n_workers, n_gpus, () if n_gpus else CPU_PRELOAD, fresh=not n_gpus)

    return start


def _count_gpus() -> int:
    """Return the number of GPUs; imports torch only if the system has one."""
    if not Path("/dev/nvidia0").exists() and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    import torch

    return torch.cuda.device_count()


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """Run tasks from `pipe` until it closes or the parent process ends."""
    protect_streams()
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules:  # imported before OMP_NUM_THREADS was set
        sys.modules["torch"].set_num_threads(_threads_of(environment["OMP_NUM_THREADS"]))
    log_to_screen()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, Terminated), terminable():
        while True:
            pipe.send(run_logged(pipe.recv()))


def _threads_of(setting: str) -> int:
    """Return the threads of OMP_NUM_THREADS, which may have a number for each level of nesting.
    Raises `InputError`."""
    first = setting.partition(",")[0].strip()
    if not re.fullmatch("[0-9]{1,4}", first) or int(first) == 0:
        raise InputError(
            f"OMP_NUM_THREADS: found {setting!r:.60}, allowed: a whole number of threads from 1 "
            "to 9,999. Correct the variable, or unset it."
        )
    return int(first)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Let a process start without running the user's script again: without a guard that would start
    everything again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent() -> None:
    """End this worker when its parent ends, however that ends: no task may go on alone."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        # sys.exit would end this thread alone.
        os._exit(1)


def run_logged(task: Task) -> tuple[Mapping[str, Any] | None, str]:
    """Run `task` with its output redirected to its log; return (counts, "") or (None, error)."""
    log_path = task.folder / LOG
    try:
        task.folder.mkdir(parents=True, exist_ok=True)
        with log_path.open("a", encoding="utf-8") as log, _redirected_to(log.fileno()):
            try:
                return task.run(), ""
            except KinjectError as error:
                show(error, file=sys.stderr, flush=True)
                return None, error_line(error)
            except Exception as error:  # noqa: BLE001
                # A bug in one arm must not end the study; its log has the traceback.
                show(traceback.format_exc(), file=sys.stderr, flush=True)
                if is_shortage(error):
                    return None, f"{error_line(error)} (too little memory, threads or open files)"
                if failure := system_failure(error):
                    path = failure.filename or task.folder
                    return None, f"{path}: {failure.strerror}. {fix_for(failure)}"
                return None, f"{error_line(error)} (a bug; the traceback is in {log_path})"
    except OSError as error:
        return None, f"{task.folder}: {error.strerror}"


@contextlib.contextmanager
def _redirected_to(descriptor: int) -> Any:
    """Redirect standard output and error to an open file, for libraries below Python too."""
    originals = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        for stream, _ in originals:
            os.dup2(descriptor, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, original in originals:
            os.dup2(original, stream)
            os.close(original)


def error_line(error: BaseException) -> str:
    """Return an error in one line, for a table."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0][:300]
    return first if isinstance(error, KinjectError) else f"{type(error).__name__}: {first}"
