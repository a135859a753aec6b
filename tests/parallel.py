"""Run the tests in several processes: pytest --workers N.

Each worker is forked from the process that has imported the libraries and collected the tests. A worker that is started
as a program, as pytest-xdist's are, does both anew: 18 s of a core, and then again for what tests import as they run.

A worker takes whole files, one after the other, so that a file's fixtures are made once. It sends the reports of its
tests to the first process, which prints them. If it dies, the test that it was running has failed, and another worker
goes on behind it. Linux only, where the libraries survive a fork: elsewhere one process runs everything.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, groupby
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import pytest

import forked

NUMBER = 4
"""Bytes of a file's number in the queue: a read of so few returns all of them or none."""
START, REPORT, END, FAULT = "start", "report", "end", "fault"
"""What a worker sends: of each test it begins, its reports and its end; why it cannot go on."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=1, help="processes that run the tests (Linux)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in workers; None: pytest runs them in this process."""
    option = session.config.option
    alone = option.workers < 2 or option.collectonly or not sys.platform.startswith("linux")
    if alone or session.testsfailed:
        return None
    forked.import_libraries()
    session.config._tmp_path_factory.getbasetemp()  # one folder for the files of all workers
    files = [list(items) for _, items in groupby(session.items, lambda item: item.path)]
    pool = Pool(session, files)
    try:
        for _ in range(min(option.workers, len(files))):
            pool.start([])
        pool.report()
    finally:
        pool.stop()
    return True


@dataclass
class Worker:
    """A process that runs tests."""

    number: int
    messages: Connection
    running: str = ""
    """The test that it has begun and not ended."""


def _receive(worker: Worker) -> tuple[str, Any] | None:
    """Return a worker's next message; None: it has ended."""
    try:
        return worker.messages.recv()
    except EOFError:
        return None


class Pool:
    """The workers, and the files that none has taken yet."""

    def __init__(self, session: pytest.Session, files: list[list[pytest.Item]]) -> None:
        self.session = session
        self.config = session.config
        self.files = files
        self.workers: dict[Connection, Worker] = {}
        # All workers read from one pipe, which holds the numbers of the files from the start.
        self.queue, end = os.pipe()
        os.write(end, b"".join(n.to_bytes(NUMBER, "big") for n in range(len(files))))
        os.close(end)

    def start(self, first: list[pytest.Item]) -> None:
        """Fork a worker that runs `first`, then files of the queue."""
        messages, sender = Pipe(duplex=False)
        sys.stdout.flush()
        sys.stderr.flush()
        number = os.fork()
        if not number:
            try:
                self._work(first, sender)
            except Exception:  # noqa: BLE001 (the first process raises it)
                sender.send((FAULT, traceback.format_exc()))
            finally:
                os._exit(0)  # what is done at the end of pytest belongs to the first process
        sender.close()
        self.workers[messages] = Worker(number, messages)

    def _work(self, first: list[pytest.Item], sender: Connection) -> None:
        manager = self.config.pluginmanager
        manager.unregister(name="terminalreporter")  # the first process prints
        # All processes have the same open files for captured output: each needs its own.
        capture = manager.getplugin("capturemanager")
        capture.stop_global_capturing()
        capture.start_global_capturing()
        manager.register(Sender(self.config, sender))
        for items in chain([first], self._queued()):
            for item, following in zip(items, [*items[1:], None], strict=False):
                item.ihook.pytest_runtest_protocol(item=item, nextitem=following)

    def _queued(self) -> Iterator[list[pytest.Item]]:
        while number := os.read(self.queue, NUMBER):
            yield self.files[int.from_bytes(number, "big")]

    def report(self) -> None:
        """Report what the workers send until all have ended."""
        while self.workers:
            for messages in wait(list(self.workers)):
                worker = self.workers[messages]
                message = _receive(worker)
                if message is None:
                    self._end(worker)
                else:
                    self._read(worker, *message)
                if self.session.shouldfail:
                    raise self.session.Failed(self.session.shouldfail)

    def _read(self, worker: Worker, kind: str, content: Any) -> None:
        if kind == FAULT:
            raise RuntimeError(f"a worker cannot go on:\n{content}")
        if kind == REPORT:
            self._log(content)
        elif kind == START:
            worker.running = content
        else:
            worker.running = ""

    def _log(self, content: dict[str, object]) -> None:
        hook = self.config.hook
        report = hook.pytest_report_from_serializable(config=self.config, data=content)
        hook.pytest_runtest_logreport(report=report)

    def _end(self, worker: Worker) -> None:
        """Forget a worker that has ended. If it died in a test, that test has failed; run the rest of its file."""
        del self.workers[worker.messages]
        _, status = os.waitpid(worker.number, 0)
        code = os.waitstatus_to_exitcode(status)
        if not worker.running:
            assert code == 0, f"a worker ended between two tests, with {code}"
            return
        for items in self.files:
            names = [item.nodeid for item in items]
            if worker.running in names:
                place = names.index(worker.running)
                self._fail(items[place], f"its process ended in this test, with {code}")
                self.start(items[place + 1 :])

    def _fail(self, item: pytest.Item, reason: str) -> None:
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")
        self.config.hook.pytest_runtest_logreport(report=report)

    def stop(self) -> None:
        """End the workers that are left, as Ctrl+C would."""
        for worker in self.workers.values():
            os.kill(worker.number, signal.SIGINT)
        for worker in self.workers.values():
            os.waitpid(worker.number, 0)
        os.close(self.queue)


class Sender:
    """Sends what happens in a worker to the first process."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self.config = config
        self.sender = sender

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.sender.send((START, nodeid))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        content = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.sender.send((REPORT, content))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.sender.send((END, nodeid))
