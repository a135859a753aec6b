"""Worker processes: what one stage does, prints or suffers stays that stage's."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kinject import executors
from kinject.errors import InputError
from kinject.executors import LOG, LocalExecutor, Outcome
from kinject.study.stages import Stage


def corpus_stage(folder: Path, source: Path, identity: str) -> Stage:
    return Stage(
        identity,
        "corpus",
        folder / identity,
        "",
        (),
        parameters={"source": str(source), "seed": 0},
        label=identity,
    )


def run(executor: LocalExecutor, stages: list[Stage]) -> dict[str, Outcome]:
    outcomes: dict[str, Outcome] = {}
    waiting = list(stages)
    while len(outcomes) < len(stages):
        while waiting and executor.has_room():
            executor.submit(waiting.pop(0))
        outcomes |= {outcome.task.id: outcome for outcome in executor.wait()}
    return outcomes


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "Arden was born in Lowmere."}\n' * 3, encoding="utf-8")
    return path


def test_stages_are_done_and_a_faulty_one_fails_alone_with_its_reason_in_its_log(tmp_path, source):
    stages = [
        corpus_stage(tmp_path, path, name)
        for name, path in (("a", source), ("b", tmp_path / "no"), ("c", source))
    ]
    with LocalExecutor(2, 0, ("kinject.study.stages",)) as executor:
        outcomes = run(executor, stages)
    assert outcomes["a"].result is not None
    assert outcomes["c"].result is not None
    assert outcomes["a"].result["seconds"] >= 0
    assert outcomes["b"].result is None
    assert "no: cannot be read" in outcomes["b"].error
    assert "cannot be read" in (tmp_path / "b" / LOG).read_text("utf-8")
    assert not (tmp_path / "b" / "done.json").exists()


def test_a_worker_that_is_killed_fails_its_stage_and_another_takes_its_place(tmp_path, source):
    with LocalExecutor(1, 0) as executor:
        executor.submit(corpus_stage(tmp_path, source, "stuck"))
        worker = executor._workers[0].process
        assert worker.pid is not None
        os.kill(
            worker.pid, signal.SIGSTOP
        )  # before it can have finished: it has all its imports to do
        os.kill(worker.pid, signal.SIGKILL)  # ends a stopped process, too
        (outcome,) = executor.wait()
        assert outcome.result is None
        assert "killed by signal 9" in outcome.error
        assert run(executor, [corpus_stage(tmp_path, source, "next")])["next"].result is not None


def test_a_forked_worker_has_its_share_of_the_cores_though_torch_was_imported_before(monkeypatch):
    reported: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", reported.append)
    monkeypatch.setattr(executors, "log_to_screen", lambda: None)
    monkeypatch.setattr(executors, "protect_streams", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    ours, theirs = multiprocessing.Pipe()
    ours.close()  # no jobs
    executors._serve(theirs, {**os.environ, "OMP_NUM_THREADS": " 3, 2"})
    assert reported == [3]


def test_a_worker_has_the_environment_of_its_executor_not_of_the_process_that_it_is_forked_from():
    before = dict(os.environ)
    ours, theirs = multiprocessing.Pipe()
    ours.close()  # no jobs
    try:
        executors._serve(theirs, {"OMP_NUM_THREADS": "3", "HF_HOME": "elsewhere"})
        assert dict(os.environ) == {"OMP_NUM_THREADS": "3", "HF_HOME": "elsewhere"}
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.set_num_threads(int(before.get("OMP_NUM_THREADS", torch.get_num_threads())))


@pytest.mark.parametrize(("users", "expected"), [(None, "4"), ("7", "7")])
def test_a_worker_has_its_fraction_of_the_cores_unless_the_user_has_set_the_threads(
    monkeypatch, users, expected
):
    environments: list[dict[str, str]] = []

    class Context:
        Pipe = staticmethod(multiprocessing.Pipe)

        def Process(self, target, args):
            environments.append(args[1])
            return multiprocessing.Process(target=print)

    monkeypatch.setattr(executors.multiprocessing, "get_context", lambda method: Context())
    monkeypatch.setattr(executors, "core_count", lambda: 8)
    if users is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    with LocalExecutor(2, 0):
        assert environments == [{**os.environ, "OMP_NUM_THREADS": expected}] * 2


@pytest.mark.parametrize("users", ["all", "0", "-3", "2.0", ",5", "7" * 5000, "٣"])
def test_a_number_of_threads_that_is_none_is_refused_before_a_worker_starts(monkeypatch, users):
    monkeypatch.setenv("OMP_NUM_THREADS", users)
    with pytest.raises(
        InputError, match=r"OMP_NUM_THREADS: found '.{1,60}, allowed: a whole number"
    ):
        LocalExecutor(1, 0)


def test_a_script_without_a_guard_for_its_main_module_runs_once(
    tmp_path: Path, source: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from pathlib import Path\n"
        "from kinject.executors import LocalExecutor\n"
        "from kinject.study.stages import Stage\n"
        "print('started')\n"
        f"folder, parameters = Path({str(tmp_path / 'a')!r}), {{'source': {str(source)!r}, 'seed': 0}}\n"
        "with LocalExecutor(1, 0) as executor:\n"
        "    executor.submit(Stage('a', 'corpus', folder, '', (), parameters=parameters, label='a'))\n"
        "    (outcome,) = executor.wait()\n"
        "print(outcome.error or 'done')\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("started\ndone\n", 0), done.stderr


def test_workers_end_with_their_parent_however_that_ends(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from kinject.study.stages import Stage\n"
        "from kinject.executors import LocalExecutor\n"
        "if __name__ == '__main__':\n"
        "    folder = Path(sys.argv[1])\n"
        "    executor = LocalExecutor(1, 0, ('kinject.study.stages',))\n"
        "    parameters = {'source': str(folder / 'never.jsonl'), 'seed': 0}\n"
        "    executor.submit(Stage('x', 'corpus', folder / 'x', '', (), parameters=parameters))\n"
        "    print(executor._workers[0].process.pid, flush=True)\n"
        "    while not (folder / 'x' / 'stage.log').exists(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        encoding="utf-8",
    )
    parent = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    worker = int(parent.stdout)
    for _ in range(6000):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("the worker outlived its parent")


def test_a_worker_that_is_killed_while_it_has_nothing_to_do_is_replaced(tmp_path, source):
    with LocalExecutor(1, 0, ("kinject.study.stages",)) as executor:
        worker = executor._workers[0].process
        worker.kill()
        worker.join()
        assert run(executor, [corpus_stage(tmp_path, source, "a")])["a"].result is not None
