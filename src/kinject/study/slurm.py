"""Stages of a study as jobs of Slurm, which submitit submits.

A job is known by its comment, the path of its stage's marker. Slurm has it from the moment in which
it has the job, so that a study that was killed at any point finds its jobs again in the queue.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError, Terminated, one_line
from kinject.executors import Outcome, executor_factory, run_logged
from kinject.process import terminable
from kinject.study.scheduler import StageStatus, StartExecutor
from kinject.study.stages import STAGE_KINDS, Stage
from kinject.terminal import format_count, log_to_screen, protect_streams, show

if TYPE_CHECKING:
    import submitit

Options = Mapping[str, str | bool]
"""Options of sbatch without their dashes; one without a value is true."""
JobOptions = Mapping[str, Options]
"""Kind of a stage -> the options of its job, in the order of the command line."""

_COMMANDS = ("sbatch", "srun", "squeue", "scancel", "scontrol")
_DEFAULTS: Mapping[str, str | bool] = {"time": "1-00:00:00", "requeue": True}
"""As in the file of --job slurm: submitit's own time of a job is five minutes."""
_OPPOSITES = {"requeue": "no-requeue", "no-requeue": "requeue"}
"""sbatch obeys the last of the two, and submitit sorts options by name."""
_OURS = frozenset(
    ("array", "chdir", "comment", "error", "job-name", "nodes", "ntasks", "ntasks-per-node")
) | {"open-mode", "output", "signal", "wrap"}
"""Options of sbatch by which a job is found, or by which it would be two processes in a folder."""
_ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
) | {"PREEMPTED", "REVOKED", "TIMEOUT"}
"""The states in which a job has ended and is not queued again."""
_AT_ONCE = 100
"""Jobs in the queue at once, unless --jobs slurm:N says how many."""
_MOST_REQUEUES = 100
"""As in the file of --job slurm: a stage that never gets further must end some day."""
_POLL_SECONDS = 1.0
_QUEUE_SECONDS = 15.0
"""The controller of a cluster serves all of its users: it is asked four times a minute."""
_GRACE_SECONDS = 15.0
"""Until the result of a job that has ended must be there: NFS shows a new file late. submitit waits
as long."""


def executor_of(jobs: int | str | None, slurm: Sequence[str] = ()) -> StartExecutor:
    """Return what starts the executor of --jobs: a number of processes of this machine, or jobs of
    Slurm (slurm, slurm:N) with the options `slurm`.

    Raises `InputError` as `options_of`, and if Slurm or submitit is missing.
    """
    options = options_of(jobs, slurm)
    if options is not None:
        _check_installed()
        at_once = int(str(jobs).partition(":")[2] or _AT_ONCE)
        return partial(JobExecutor, options, at_once)
    if jobs is None:
        return executor_factory(None)
    return executor_factory(int(jobs))


def options_of(jobs: int | str | None, slurm: Sequence[str] = ()) -> JobOptions | None:
    """Return the options of jobs of Slurm, None if --jobs asks for none. Raises `InputError` for a
    word of --jobs or --slurm that is not allowed."""
    text = str(jobs)
    if jobs is not None and not re.fullmatch(r"(slurm:)?[1-9]\d{0,2}|slurm", text):
        raise InputError(f"--jobs: found {text}, allowed: 1 to 256, slurm, slurm:N (N jobs).")
    if text.startswith("slurm"):
        return _job_options(slurm)
    if slurm:
        raise InputError("--slurm: it is about jobs of Slurm. Add --jobs slurm.")
    return None


def _check_installed() -> None:
    if importlib.util.find_spec("submitit") is None:
        raise InputError(
            "--jobs slurm: needs the package submitit. Install it: pip install 'kinject[slurm]'."
        )
    missing = [command for command in _COMMANDS if shutil.which(command) is None]
    if missing:
        raise InputError(
            f"--jobs slurm: found no {', '.join(missing)} on this machine. Start the study where "
            "jobs are submitted (a login node), or leave --jobs out to run it here."
        )


def _job_options(words: Sequence[str]) -> JobOptions:
    """Return the options of each kind of stage from the words of --slurm: OPTION=VALUE for every
    stage, KIND.OPTION=VALUE for those of a kind. Raises `InputError` for another word."""
    options = {kind: dict(_DEFAULTS) for kind in STAGE_KINDS}
    read = [_read_option(word) for word in words]
    # Those of a kind last: they count more, wherever they stand.
    for named, option, value in sorted(read, key=itemgetter(0)):
        for kind in STAGE_KINDS:
            if named in ("", kind):
                options[kind].pop(_OPPOSITES.get(option, ""), None)
                options[kind][option] = value
    return options


def _read_option(word: str) -> tuple[str, str, str | bool]:
    """Return (kind or "", option, value) of a word of --slurm."""
    name, equals, value = word.partition("=")
    kind, dot, option = name.rpartition(".")
    if not re.fullmatch(r"[a-z][a-z-]+", option) or (dot and kind not in STAGE_KINDS):
        raise InputError(
            f"--slurm: found {word!r}, expected an option of sbatch without its dashes, as "
            "partition=gpu, or of the stages of a kind, as train.gpus=1; the kinds: "
            f"{', '.join(STAGE_KINDS)}."
        )
    if option in _OURS:
        raise InputError(
            f"--slurm: {option} is set by kinject: a stage is one process with its own log. "
            "Leave it out."
        )
    if not equals:
        return kind, option, True
    return kind, option, value


def render_jobs(status: StageStatus, options: JobOptions) -> list[str]:
    """Return which jobs would be submitted for the stages that are not done, a line a kind."""
    counts = Counter(stage.kind for stage in status.stages.values() if stage.id not in status.done)
    lines = []
    for kind in STAGE_KINDS:
        if counts[kind]:
            flags = " ".join(_flag(*item) for item in options[kind].items())
            lines.append(f"{format_count(counts[kind], 'job')} of Slurm: {kind} (sbatch {flags})")
    return lines


def _flag(name: str, value: str | bool) -> str:
    if value is True:
        return f"--{name}"
    return f"--{name}={value}"


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue lists it."""

    state: str
    comment: str

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or will run."""
        return self.state not in _ENDED


def read_queue() -> Mapping[str, QueuedJob]:
    """Return this user's jobs by id, those that ended a few minutes ago too. Raises `InputError` if
    Slurm does not answer."""
    # sacct, which submitit asks, needs a database of accounts that small clusters do not have.
    command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%k"]
    # Comments of other jobs may be of any bytes, over any number of lines.
    done = subprocess.run(
        command, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        fix = "Run the same command again when Slurm answers: it finds its jobs."
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise InputError(f"squeue: {reason.rstrip('.')}. {fix}")
    rows = [line.split("|", 2) for line in done.stdout.split("\n")]
    return {row[0]: QueuedJob(row[1], row[2]) for row in rows if len(row) == 3}


def _comment(stage: Stage) -> str:
    """Return the comment of a stage's job: no other stage, in whatever folder, has its marker."""
    return str(stage.marker.absolute())


@dataclass
class _Job:
    """A stage, and its job."""

    stage: Stage
    job: submitit.Job[Any]
    since: float
    """When it was submitted or found; a queue that was read earlier need not have it."""
    ended: float | None = None
    """When it was first seen to have ended without a result."""


@dataclass
class JobExecutor:
    """Runs stages as jobs of Slurm with the options of their kinds, `at_once` at most.

    A stage whose job is in the queue, of this study before it was killed or of another one, is
    waited for and not submitted again. Jobs outlive this process.
    """

    options: JobOptions
    at_once: int
    _running: list[_Job] = field(default_factory=list)
    _queue: Mapping[str, QueuedJob] = field(default_factory=dict)
    _asked: float = float("-inf")

    def has_room(self) -> bool:
        """Return whether another job may be submitted."""
        return len(self._running) < self.at_once

    def submit(self, task: Stage) -> None:
        """Submit a job for `task`, or find the one that is in the queue. Raises `InputError` if
        sbatch refuses it."""
        if monotonic() - self._asked >= _QUEUE_SECONDS:
            self._read_queue()
        job = self._find(task)
        if job is None:
            job = self._submit(task)
        self._running.append(_Job(task, job, monotonic()))

    def wait(self) -> list[Outcome]:
        """Wait until a job has ended; return the outcomes of all that have."""
        while True:
            ended = []
            for running in self._running:
                outcome = self._outcome(running)
                if outcome is not None:
                    ended.append((running, outcome))
            if ended:
                for running, _ in ended:
                    self._running.remove(running)
                return [outcome for _, outcome in ended]
            sleep(_POLL_SECONDS)
            if monotonic() - self._asked >= _QUEUE_SECONDS:
                self._read_queue_if_possible()

    def __enter__(self) -> JobExecutor:
        return self

    def __exit__(self, *error: object) -> None:
        if self._running:
            ids = " ".join(running.job.job_id for running in self._running)
            left = format_count(len(self._running), "job")
            line = f"{left} left in the queue: the same command waits for them; scancel {ids} ends"
            show(f"{line} them", file=sys.stderr)

    def _read_queue(self) -> None:
        self._queue = read_queue()
        self._asked = monotonic()

    def _read_queue_if_possible(self) -> None:
        try:
            self._read_queue()
        except InputError as error:
            # A controller that restarts ends no job, and results can be read meanwhile.
            show(f"warning: {error}", file=sys.stderr)
            self._asked = monotonic()

    def _find(self, stage: Stage) -> submitit.Job[Any] | None:
        """Return the job of `stage` that is in the queue, None without one."""
        from submitit import SlurmJob

        for number, queued in self._queue.items():
            if queued.comment == _comment(stage) and queued.is_alive:
                job: submitit.Job[Any] = SlurmJob(_folder(stage), number)
                if job.paths.submitted_pickle.exists():
                    return job
                # Its study was killed before it could write what the job is to run.
                # It may end meanwhile, and has nothing to run in any case.
                subprocess.run(["scancel", number], capture_output=True, check=False)
        return None

    def _submit(self, stage: Stage) -> submitit.Job[Any]:
        from submitit.core.utils import UncompletedJobError

        # submitit prints what sbatch says, which is in its error as well.
        with contextlib.redirect_stderr(io.StringIO()):
            try:
                return self._make_executor(stage).submit(work, stage)
            except UncompletedJobError as error:
                raise InputError(
                    f"sbatch refused the job of {stage.label}: {one_line(error)}. Change --slurm, "
                    "then run the same command again."
                ) from error

    def _make_executor(self, stage: Stage) -> submitit.Executor:
        from submitit import AutoExecutor

        options = {**self.options[stage.kind], "comment": _comment(stage)}
        executor = AutoExecutor(_folder(stage), cluster="slurm")
        executor.update_parameters(
            name=f"{stage.kind}-{stage.id}",
            stderr_to_stdout=True,
            slurm_additional_parameters=options,
        )
        if "cpus-per-task" in options:
            # Since Slurm 22.05 srun no longer takes it from sbatch.
            flag = f"--cpus-per-task={options['cpus-per-task']}"
            executor.update_parameters(slurm_srun_args=[flag])
        return executor

    def _outcome(self, running: _Job) -> Outcome | None:
        """Return the outcome of a job; None while it has none."""
        stage, job = running.stage, running.job
        os.listdir(job.paths.folder)  # NFS then looks for new files
        if job.paths.result_pickle.exists():
            return _read_result(stage, job)
        queued = self._queue.get(job.job_id)
        if self._asked < running.since or (queued is not None and queued.is_alive):
            running.ended = None
            return None
        if running.ended is None:
            running.ended = monotonic()
        if monotonic() - running.ended < _GRACE_SECONDS:
            return None
        counts = stage.read_done()
        if counts is not None and "deleted" not in counts:  # it was killed in its last moment
            return Outcome(stage, counts)
        state = "no longer in the queue"
        if queued is not None:
            state = queued.state
        reason = f"its job {job.job_id} ended ({state}); its log: {job.paths.stdout}"
        if not job.paths.stdout.exists():
            reason = f"its job {job.job_id} ended before it began ({state})"
        return Outcome(stage, None, reason, died=True)


def _folder(stage: Stage) -> Path:
    """Return the folder of what submitit writes for a stage. Hidden: a stage that is made again
    deletes what is not."""
    return stage.folder.absolute() / ".jobs"


def _read_result(stage: Stage, job: submitit.Job[Any]) -> Outcome:
    from submitit.core.utils import UncompletedJobError

    try:
        return Outcome(stage, *job.result())
    except UncompletedJobError:
        # A fault of the stage is a result: this one is of Python or of its packages on that node.
        reason = f"its job {job.job_id} failed before the stage began; its log: {job.paths.stdout}"
        return Outcome(stage, None, reason, died=True)


def work(stage: Stage) -> tuple[Mapping[str, Any] | None, str]:
    """Run `stage` in its job; return (counts, "") or (None, error). A job whose time is over goes
    back into the queue, to resume there."""
    cores = os.environ.get("SLURM_CPUS_ON_NODE")
    if cores:
        os.environ.setdefault("OMP_NUM_THREADS", cores)
    protect_streams()
    log_to_screen()
    # In place of submitit's handler, which would end a training without a checkpoint.
    signal.signal(signal.SIGUSR2, _as_usr1)
    try:
        with terminable():
            return run_logged(stage)
    except Terminated as stop:
        if stop.number != signal.SIGUSR1:
            raise  # scancel or preemption: Slurm itself decides whether the job comes back
        number = os.environ["SLURM_JOB_ID"]
        if int(os.environ.get("SLURM_RESTART_COUNT", "0")) >= _MOST_REQUEUES:
            return None, f"its job {number} came back {_MOST_REQUEUES} times and is not done"
        asked = subprocess.run(
            ["scontrol", "requeue", number], capture_output=True, text=True, check=False
        )
        if asked.returncode:
            reason = " ".join(asked.stderr.split())
            return None, (
                f"the time of its job {number} is over, and Slurm did not queue it again "
                f"({reason}); the same command continues it"
            )
        raise SystemExit(f"The time is over: job {number} goes back into the queue.") from stop


def _as_usr1(number: int, frame: FrameType | None) -> None:
    """Pass submitit's warning of the end of the time on as the one that kinject's stages know."""
    os.kill(os.getpid(), signal.SIGUSR1)
