"""Executors: where stages run. Worker processes on this machine, or tasks on a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from kinject.disk import fix_for, is_system_failure
from kinject.errors import InputError, KinjectError, Terminated
from kinject.signals import terminable
from kinject.study.stages import Stage, one_line, run_stage, stage_message
from kinject.terminal import show

LOG = "stage.log"
"""What a stage printed, in its folder."""


@dataclass(frozen=True)
class Outcome:
    """How a stage ended: `done` is what it counted, or `error` is what went wrong in one line."""

    stage: Stage
    done: Mapping[str, Any] | None
    error: str = ""


class Executor(Protocol):
    """Takes stages and gives outcomes back as they come."""

    def has_room(self, stage: Stage) -> bool:
        """Return whether `stage` could start at once."""
        ...

    def submit(self, stage: Stage) -> None:
        """Start `stage`."""
        ...

    def wait(self) -> list[Outcome]:
        """Return at least one outcome; blocks until there is one."""
        ...

    def __enter__(self) -> Executor: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    pipe: Connection
    devices: str
    stage: Stage | None = None


class LocalExecutor:
    """`n_workers` processes, each with an equal share of the cores, and of the GPUs where there are any.

    A worker that dies fails its stage only; another takes its place. Workers end with this process, however it ends;
    Ctrl-C reaches them through it, as SIGTERM, so that a stage stores what it is waiting for. With `preload`, the names of
    modules, workers are forked from one process that has imported them (no module may have touched a GPU, then).
    """

    def __init__(self, n_workers: int, n_gpus: int, preload: Sequence[str] = ()) -> None:
        self._context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
        if preload:
            self._context.set_forkserver_preload(list(preload))
        self._n_threads = max(1, len(_cores()) // n_workers)
        gpus = [str(index) for index in range(n_gpus)]
        shares = [",".join(gpus[index::n_workers]) for index in range(n_workers)]
        self._workers = [self._start(share) for share in shares]

    def _start(self, devices: str) -> _Worker:
        ours, theirs = self._context.Pipe()
        environment = {"OMP_NUM_THREADS": str(self._n_threads)}
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        process = self._context.Process(target=_serve, args=(theirs, environment), daemon=True)
        resource_tracker.ensure_running()  # its start would let SIGINT through again
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the worker inherits
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        theirs.close()
        return _Worker(process, ours, devices)

    def has_room(self, stage: Stage) -> bool:
        """Return whether a worker is free; each stage takes one, whatever its resources say."""
        return any(worker.stage is None for worker in self._workers)

    def submit(self, stage: Stage) -> None:
        """Give `stage` to a free worker."""
        worker = next(worker for worker in self._workers if worker.stage is None)
        worker.stage = stage
        worker.pipe.send(stage_message(stage))

    def wait(self) -> list[Outcome]:
        """Return the outcomes of the workers that have finished, after waiting for at least one."""
        busy = [worker for worker in self._workers if worker.stage is not None]
        ready = wait([worker.pipe for worker in busy])
        return [self._outcome(worker) for worker in busy if worker.pipe in ready]

    def _outcome(self, worker: _Worker) -> Outcome:
        stage, worker.stage = worker.stage, None
        assert stage is not None
        try:
            answer = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode
            worker.pipe.close()
            self._workers[self._workers.index(worker)] = self._start(worker.devices)
            why = f"killed by signal {-code} (out of memory?)" if code and code < 0 else f"ended with code {code}"
            return Outcome(stage, None, f"its worker process was {why}")
        return Outcome(stage, answer.get("done"), answer.get("error", ""))

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if worker.stage is not None:
                worker.process.terminate()
            worker.pipe.close()  # an idle worker sees the end of its jobs and goes
        try:
            for worker in self._workers:
                worker.process.join()
        except KeyboardInterrupt:  # the second one
            for worker in self._workers:
                worker.process.kill()
            raise


class RayExecutor:
    """Tasks on the Ray cluster at RAY_ADDRESS, or a local one; each asks for its stage's cores and GPUs.

    Every node must see the same folders. Raises `InputError` where ray is not installed.
    """

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise InputError("--executor ray: ray is not installed. Install it: pip install 'kinject[ray]'.") from error
        self._ray: Any = ray
        self._mine = not ray.is_initialized()
        if self._mine:
            ray.init(log_to_driver=False, include_dashboard=False)
        self._task = ray.remote(max_retries=0)(_do_elsewhere)
        self._running: dict[Any, Stage] = {}

    def has_room(self, stage: Stage) -> bool:
        """Return True: Ray queues what does not fit yet. Raises `InputError` for what no node could ever hold."""
        wanted = {"CPU": stage.resources.cpus, "GPU": stage.resources.gpus}
        there = self._ray.cluster_resources()
        for name, amount in wanted.items():
            if amount > there.get(name, 0):
                raise InputError(
                    f"study.resources: a stage needs {amount:g} {name}, the Ray cluster has {there.get(name, 0):g}. "
                    "Lower it or add a node."
                )
        return True

    def submit(self, stage: Stage) -> None:
        """Hand `stage` to the cluster."""
        task = self._task.options(num_cpus=stage.resources.cpus, num_gpus=stage.resources.gpus, name=stage.label)
        self._running[task.remote(stage_message(stage), os.getcwd())] = stage

    def wait(self) -> list[Outcome]:
        """Return the outcome of the first task to finish."""
        finished, _ = self._ray.wait(list(self._running), num_returns=1)
        outcomes = []
        for reference in finished:
            stage = self._running.pop(reference)
            try:
                answer = self._ray.get(reference)
            except self._ray.exceptions.RayError as error:
                outcomes.append(Outcome(stage, None, one_line(error)))
            else:
                outcomes.append(Outcome(stage, answer.get("done"), answer.get("error", "")))
        return outcomes

    def __enter__(self) -> RayExecutor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        if self._mine:
            self._ray.shutdown()


def executor_factory(kind: str, n_jobs: int | None) -> Callable[[], Executor]:
    """Return what makes the executor when there is work: `kind` is ``local`` (`n_jobs` workers) or ``ray``.

    Without `n_jobs`: a worker for each GPU, or without one for each core, at most 8. Raises `InputError` for a number of
    jobs out of range, or with Ray, which places stages by what they need.
    """
    if n_jobs is not None and not 1 <= n_jobs <= 256:
        raise InputError(f"--jobs: found {n_jobs}, allowed: 1 to 256.")
    if kind == "ray":
        if n_jobs is not None:
            raise InputError("--jobs is for --executor local; Ray places stages by study.resources.")
        return RayExecutor
    if kind != "local":
        raise InputError(f"executor: found {kind!r}, allowed: local, ray.")

    def make() -> Executor:
        n_gpus = _count_gpus()
        return LocalExecutor(n_jobs or n_gpus or min(len(_cores()), 8), n_gpus)

    return make


def _count_gpus() -> int:
    """Return the number of GPUs, without importing torch where the system has none."""
    if not Path("/dev/nvidia0").exists() and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0
    import torch

    return torch.cuda.device_count()


def _do_elsewhere(job: Mapping[str, Any], folder: str) -> dict[str, Any]:
    os.chdir(folder)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, int(job["resources"]["cpus"]))))
    return _answer(job)


def _serve(pipe: Connection, environment: Mapping[str, str]) -> None:
    """Do jobs from `pipe` until it closes or the parent process is gone."""
    os.environ.update(environment)
    if "torch" in sys.modules:  # imported before the environment could tell it
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, BrokenPipeError, Terminated), terminable():
        while True:
            pipe.send(_answer(pipe.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Do `job` with everything it prints going to its log; return {"done"} or {"error"}."""
    folder = Path(job["folder"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG).open("a", encoding="utf-8") as log, _printing_to(log.fileno()):
            try:
                return {"done": run_stage(job)}
            except KinjectError as error:
                show(error, file=sys.stderr, flush=True)
                return {"error": one_line(error)}
            except Exception as error:  # noqa: BLE001 - an arm that breaks must not take the study with it; its log has the traceback
                traceback.print_exc()
                if isinstance(error, OSError) and is_system_failure(error):
                    return {"error": f"{error.filename or folder}: {error.strerror}. {fix_for(error)}"}
                return {"error": f"{one_line(error)} (a bug; the traceback is in {folder / LOG})"}
    except OSError as error:
        return {"error": f"{folder}: {error.strerror}"}


@contextlib.contextmanager
def _printing_to(descriptor: int) -> Any:
    """Send standard output and error, also of libraries below Python, to an open file."""
    kept = [(stream, os.dup(stream)) for stream in (1, 2)]
    try:
        for stream, _ in kept:
            os.dup2(descriptor, stream)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, copy in kept:
            os.dup2(copy, stream)
            os.close(copy)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
