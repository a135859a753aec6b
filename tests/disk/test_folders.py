"""Locks of single files, live temporary files, and folders that are whole whenever a process is killed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest

from kinject.augment.store import read_decisions, write_decision
from kinject.disk import (
    atomic_file,
    cached_folder,
    file_lock,
    folders,
    lock_dir,
    replace_folder,
    run_folder,
    write_manifest,
)
from kinject.errors import DiskError, InputError


class KilledError(BaseException):
    """Ends a function where a kill would."""


def in_children(*work: Callable[[], None]) -> list[int]:
    """Run each function in a process of its own; return their exit codes."""
    children = []
    for function in work:
        child = os.fork()
        if not child:
            code = 1
            try:
                function()
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_processes_that_decide_at_once_and_a_run_that_starts_lose_no_decision(
    tmp_path: Path,
) -> None:
    def decide(who: str) -> None:
        for number in range(40):
            write_decision(tmp_path, {"id": f"{who}{number}", "decision": "drop"})

    def start_runs() -> None:
        for _ in range(40):
            with lock_dir(tmp_path):
                pass

    assert in_children(lambda: decide("a"), lambda: decide("b"), start_runs) == [0, 0, 0]
    assert len(read_decisions(tmp_path)) == 80


def test_a_temporary_file_stays_while_it_is_written_and_goes_once_its_process_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / ".left.csv.0a1b2c3d.part").write_text("x")
    with atomic_file(tmp_path / "table.csv") as file:
        file.write("a,b\n")
        with lock_dir(tmp_path):
            pass
        file.write("1,2\n")
    assert (tmp_path / "table.csv").read_text() == "a,b\n1,2\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "table.csv"]


def test_a_lock_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "x.lock", tmp_path / "folder"):
        with pytest.raises(DiskError, match=r"^[^\n]+$"), file_lock(path):
            raise AssertionError


def make(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "weights").write_text(text)
    return folder


def test_a_process_that_waits_for_a_folder_names_who_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged = SimpleQueue[str]()
    monkeypatch.setattr(run_folder.log, "info", logged.put)

    def enter() -> None:
        with lock_dir(tmp_path, wait=True):
            pass

    with ThreadPoolExecutor(1) as pool:
        with lock_dir(tmp_path):
            waiting = pool.submit(enter)
            message = logged.get(timeout=10)
        waiting.result()
    assert message.startswith(f"{tmp_path}: in use by process {os.getpid()} on ")
    assert message.endswith(". Waiting for it.")
    enter()
    assert logged.empty(), "nobody held it"


def test_a_process_that_waits_for_an_entry_of_a_cache_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a training does while that of another study makes the predictions of the same teacher."""
    logged, n_written = SimpleQueue[str](), []
    monkeypatch.setattr(folders.log, "info", logged.put)

    def write(part: Path) -> None:
        n_written.append(1)
        if len(n_written) == 1:
            waiting.append(pool.submit(cached_folder, tmp_path, "entry", write))
            messages.append(logged.get(timeout=10))
        (part / "file").write_text("x")

    waiting: list[Future[Path]] = []
    messages: list[str] = []
    with ThreadPoolExecutor(1) as pool:
        entry = cached_folder(tmp_path, "entry", write)
        assert waiting[0].result() == entry
    assert messages == [f"{entry}: another process makes it. Waiting for it."]
    assert len(n_written) == 1
    assert cached_folder(tmp_path, "entry", write) == entry
    assert logged.empty(), "nobody held it"


@pytest.mark.parametrize("there", ["documents", "augment", "questions", "train", "eval", "study"])
def test_a_verb_leaves_the_folder_of_another_verb_alone(tmp_path: Path, there: str) -> None:
    """The manifest is all that names what a run is: written over, paid texts are nobody's."""
    for verb in ("documents", "augment", "questions", "train", "eval", "study", "export"):
        folder = tmp_path / verb
        folder.mkdir()
        write_manifest(folder / "manifest.json", stage=there, inputs={}, recipe={}, counts={})
        if verb == there:
            with lock_dir(folder, stage=verb):
                continue
        with pytest.raises(InputError, match=rf"{verb}: holds a run of kinject {there}, and"):
            lock_dir(folder, stage=verb).__enter__()
        with lock_dir(folder):  # it was let go
            pass


@pytest.mark.parametrize("exchanges", [True, False])
@pytest.mark.parametrize("step", range(5))
def test_a_folder_is_replaced_whole_wherever_its_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool, step: int
) -> None:
    final, n_calls = make(tmp_path / "model", "old"), 0
    with monkeypatch.context() as patch:
        if not exchanges:
            patch.setattr(folders, "_exchange", lambda first, second: False)
        for module, name in ((os, "rename"), (shutil, "rmtree"), (folders, "_exchange")):

            def dying(*arguments: object, function: Callable[..., object]) -> object:
                nonlocal n_calls
                n_calls += 1
                if n_calls > step:
                    raise KilledError
                return function(*arguments)

            function = getattr(module, name)
            patch.setattr(module, name, lambda *a, f=function: dying(*a, function=f))
        try:
            replace_folder(make(tmp_path / ".model.part", "new"), final)
        except KilledError:
            pass
        else:
            assert (final / "weights").read_text() == "new"
    kept = [path for path in tmp_path.rglob("weights") if path.read_text() in ("old", "new")]
    assert kept
    if exchanges:
        assert (final / "weights").read_text() in ("old", "new")
    replace_folder(make(tmp_path / ".second.part", "newer"), final)
    assert (final / "weights").read_text() == "newer"
    assert not (tmp_path / ".model.old").exists()


def test_a_link_in_the_place_of_a_folder_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    target = make(tmp_path / "elsewhere", "theirs")
    (tmp_path / "model").symlink_to(target)
    replace_folder(make(tmp_path / "part", "new"), tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert (target / "weights").read_text() == "theirs"


def test_a_cached_folder_is_made_once_and_again_where_a_bit_has_flipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    texts = iter(("one", "two"))

    def write(part: Path) -> None:
        (part / "data").write_text(next(texts))

    for _ in range(2):
        assert (cached_folder(tmp_path, "[k]", write) / "data").read_text() == "one"
    (tmp_path / "[k]" / "data").write_text("onf")
    assert (cached_folder(tmp_path, "[k]", write) / "data").read_text() == "two"
    assert "It is made again." in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == [".[k].lock", "[k]"]
