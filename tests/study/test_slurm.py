"""Stages as jobs: submitit's own submissions, to a Slurm of four stand-in commands that runs its jobs in this process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kinject.errors import InputError, Terminated
from kinject.study import slurm
from kinject.study.scheduler import StageStatus, run_stages
from kinject.study.slurm import JobExecutor, executor_of, options_of, render_jobs, work
from kinject.study.stages import Stage

COMMANDS = {
    "sbatch": 'echo "$1" >> submitted; n=$(wc -l < submitted)\n'
    'echo "$n|PENDING|$(sed -n "s/^#SBATCH --comment=//p" "$1")" >> queue\n'
    'echo "Submitted batch job $n"',
    "squeue": "cat queue",
    "scancel": 'echo "$1" >> cancelled; sed -i "/^$1|/d" queue',
    "scontrol": 'echo "$*" >> requeued',
    "srun": "exit 1",
}


@dataclass
class Cluster:
    """The files of the stand-in commands."""

    folder: Path

    def rows(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def run_all(self, seconds: float = 0.0) -> None:
        """Run each job that is pending, as submitit runs it."""
        from submitit.core.submission import process_job

        for row in self.rows("queue"):
            number, state, marker = row.split("|")
            if state == "PENDING":
                os.environ["SLURM_JOB_ID"] = number
                process_job(Path(marker).parent / ".jobs")
                self.end(number, "COMPLETED")

    def end(self, number: str, state: str) -> None:
        rows = [row.split("|") for row in self.rows("queue")]
        lines = ["|".join([row[0], state if row[0] == number else row[1], row[2]]) for row in rows]
        (self.folder / "queue").write_text("".join(f"{line}\n" for line in lines))

    def script(self, number: str) -> str:
        return Path(self.rows("submitted")[int(number) - 1]).read_text()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    pytest.importorskip("submitit")
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in COMMANDS.items():
        (folder / name).write_text(f"#!/bin/sh\ncd {folder}\n{text}\n")
        (folder / name).chmod(0o755)
    (folder / "queue").touch()
    cluster = Cluster(folder)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    for name in ("SLURM_JOB_ID", "SUBMITIT_FOLDER", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    # While a study waits, the cluster works.
    monkeypatch.setattr(slurm, "sleep", cluster.run_all)
    monkeypatch.setattr(slurm, "_QUEUE_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "_GRACE_SECONDS", 0.0)
    monkeypatch.setattr(slurm, "log_to_screen", lambda: None)
    numbers = (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield cluster
    for number, handler in before:
        signal.signal(number, handler)


def stage(folder: Path, name: str, *needs: str, source: str = "corpus.jsonl") -> Stage:
    (folder / "corpus.jsonl").write_text('{"text": "Kelm has a mill."}\n')
    parameters = {"source": str(folder / source), "seed": 3}
    return Stage(name, "corpus", folder / name, "", (), needs, parameters, f"corpus {name}")


def executor(*words: str) -> JobExecutor:
    started = executor_of("slurm", words)()
    assert isinstance(started, JobExecutor)
    return started


def test_each_stage_is_a_job_behind_those_that_it_needs_and_a_fault_of_one_is_its_own(
    tmp_path: Path, cluster: Cluster
) -> None:
    names = {"last": ("middle",), "first": (), "middle": ("first",), "never": ("faulty",)}
    stages = [stage(tmp_path, name, *needs) for name, needs in names.items()]
    stages.append(stage(tmp_path, "faulty", source="none.jsonl"))
    status = StageStatus()
    with executor("partition=short", "corpus.mem=3G", "eval.mem=9G", "cpus-per-task=2") as jobs:
        run_stages(status.add(stages), status, jobs, "stages")
    submitted = [Path(path).parts[-3] for path in cluster.rows("submitted")]
    assert sorted(submitted) == ["faulty", "first", "last", "middle"]
    assert [name for name in submitted if name != "faulty"] == ["first", "middle", "last"]
    assert status.done.keys() == {"first", "middle", "last"}
    assert status.failed.keys() == {"faulty"}
    assert "none.jsonl: cannot be read" in status.failed["faulty"]
    script = cluster.script("1")
    for flag in ("--partition=short", "--mem=3G", "--time=1-00:00:00", "--requeue"):
        assert f"#SBATCH {flag}\n" in script
    assert "--cpus-per-task=2" in next(line for line in script.splitlines() if "srun" in line)
    assert StageStatus().add(stages[:3]) == []


def test_a_study_that_was_killed_finds_its_jobs_and_submits_none_again(
    tmp_path: Path, cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other, late = (stage(tmp_path, name) for name in ("one", "other", "late"))
    with executor() as jobs:
        for item in (one, other):
            jobs.submit(item)
    assert "2 jobs left in the queue" in capsys.readouterr().err
    cluster.end("1", "RUNNING")
    # Killed between sbatch and what the job is to run: such a job waits for nothing.
    (tmp_path / "other" / ".jobs" / "2_submitted.pkl").unlink()
    with executor() as jobs:
        for item in (one, other, late):
            jobs.submit(item)
        assert cluster.rows("cancelled") == ["2"]
        assert [Path(path).parts[-3] for path in cluster.rows("submitted")] == [
            "one",
            "other",
            "other",
            "late",
        ]
        cluster.end("1", "PENDING")
        outcomes = jobs.wait()
    assert {outcome.task.id for outcome in outcomes} == {"one", "other", "late"}
    assert all(outcome.result for outcome in outcomes)


@pytest.mark.parametrize("state", ["OUT_OF_MEMORY", "CANCELLED", ""])
def test_a_job_that_was_killed_names_its_state_and_its_log(
    tmp_path: Path, cluster: Cluster, state: str
) -> None:
    with executor() as jobs:
        jobs.submit(stage(tmp_path, "killed"))
        cluster.end("1", state or "PENDING")
        if not state:
            (cluster.folder / "queue").write_text("")
        (log := tmp_path / "killed" / ".jobs" / "1_0_log.out").touch()
        (outcome,) = jobs.wait()
        assert outcome.died
        shown = state or "no longer in the queue"
        assert outcome.error == f"its job 1 ended ({shown}); its log: {log}"


def test_a_job_that_was_killed_once_its_stage_was_done_has_done_it(
    tmp_path: Path, cluster: Cluster
) -> None:
    with executor() as jobs:
        jobs.submit(item := stage(tmp_path, "done"))
        item.run()
        cluster.end("1", "TIMEOUT")
        (outcome,) = jobs.wait()
    assert outcome.result == item.read_done()


def test_what_sbatch_or_squeue_refuse_is_one_line(tmp_path: Path, cluster: Cluster) -> None:
    refused = "#!/bin/sh\necho 'error: invalid partition: shrot' >&2; exit 1\n"
    (cluster.folder / "sbatch").write_text(refused)
    with pytest.raises(InputError, match=r"job of corpus a: .*invalid partition: shrot\. Change"):
        executor("partition=shrot").submit(stage(tmp_path, "a"))
    strange = r"printf '7|RUNNING|caf\351\nsecond line\n\n8|PENDING|a|b\n'"
    (cluster.folder / "squeue").write_text(f"#!/bin/sh\n{strange}\n")
    queue = slurm.read_queue()
    assert [(name, job.comment) for name, job in queue.items()] == [
        ("7", "caf\ufffd"),
        ("8", "a|b"),
    ]
    (cluster.folder / "squeue").write_text("#!/bin/sh\necho no contact >&2; exit 1\n")
    with pytest.raises(InputError, match=r"^squeue: no contact\. Run the same command again"):
        executor().submit(stage(tmp_path, "a"))


@dataclass(frozen=True)
class Signalled:
    """A task that gets a signal at work."""

    folder: Path
    number: signal.Signals
    label: str = "signalled"

    def run(self) -> dict[str, int]:
        os.kill(os.getpid(), self.number)
        return {}


def test_a_job_goes_back_into_the_queue_when_its_time_is_over_and_only_then(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "58")
    with pytest.raises(SystemExit, match="job 58 goes back into the queue"):
        work(Signalled(tmp_path, signal.SIGUSR2))  # type: ignore[arg-type]
    with pytest.raises(Terminated):
        work(Signalled(tmp_path, signal.SIGTERM))  # type: ignore[arg-type]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "100")
    counts, error = work(Signalled(tmp_path, signal.SIGUSR2))  # type: ignore[arg-type]
    assert counts is None
    assert "came back 100 times" in error
    assert cluster.rows("requeued") == ["requeue 58"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    refused = "#!/bin/sh\necho 'Requested operation is disabled\nfor job 58' >&2; exit 1\n"
    (cluster.folder / "scontrol").write_text(refused)
    counts, error = work(Signalled(tmp_path, signal.SIGUSR2))  # type: ignore[arg-type]
    assert counts is None
    assert "did not queue it again (Requested operation is disabled for job 58)" in error


@pytest.mark.parametrize(
    ("jobs", "words", "message"),
    [
        ("0", [], "--jobs: found 0, allowed: 1 to 256, slurm"),
        ("slrum:4", [], "--jobs: found slrum:4, allowed"),
        ("slurm:", [], "--jobs: found slurm:, allowed"),
        ("7", ["mem=4G"], "--slurm: it is about jobs of Slurm"),
        ("slurm", ["comment=mine"], "--slurm: comment is set by kinject"),
        ("slurm", ["train.job-name=mine"], "--slurm: job-name is set by kinject"),
        ("slurm", ["evaluation.mem=4G"], "found 'evaluation.mem=4G', expected an option of sbatch"),
        ("slurm", ["--mem=4G"], "found '--mem=4G', expected an option of sbatch without"),
    ],
)
def test_words_that_are_not_allowed(jobs: str, words: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        options_of(jobs, words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_number_of_jobs_is_of_this_machine_and_slurm_needs_its_commands_and_its_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slurm, "executor_factory", str)
    assert [executor_of(jobs) for jobs in ("12", 3, None)] == ["12", "3", "None"]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(InputError, match=r"found no sbatch, srun, squeue.* on this machine"):
        executor_of("slurm:5")
    monkeypatch.setattr(slurm.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'kinject\[slurm\]'"):
        executor_of("slurm")


def test_the_plan_has_the_jobs_of_the_stages_that_are_not_done(tmp_path: Path) -> None:
    status = StageStatus()
    done = stage(tmp_path, "done")
    done.run()
    status.add([done, stage(tmp_path, "a"), stage(tmp_path, "b")])
    options = options_of("slurm", ["corpus.time=5", "time=9", "exclusive", "train.gpus=2"])
    assert options is not None
    expected = "2 jobs of Slurm: corpus (sbatch --time=5 --requeue --exclusive)"
    assert render_jobs(status, options) == [expected]
    options = options_of("slurm", ["no-requeue", "eval.requeue"])
    assert options is not None
    expected = "2 jobs of Slurm: corpus (sbatch --time=1-00:00:00 --no-requeue)"
    assert render_jobs(status, options) == [expected]
    assert options["eval"].keys() == {"time", "requeue"}
