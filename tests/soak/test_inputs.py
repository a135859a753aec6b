"""Sixteen thousand damaged inputs, and those too large for the quick tests: each is read or refused, in bounded memory."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hostile"))

from judge import bounded_memory, break_all, table_of  # noqa: E402
from kinds import kinds  # noqa: E402

N_INPUTS = 16_500
SEED = int(os.environ.get("KINJECT_SOAK_SEED", "2026"))
MOST_MIB = 1024
"""Resident memory that a reader may come to, whatever the file."""

pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Recipes name their inputs from the repository's root; libraries log what they repair."""
    monkeypatch.chdir(ROOT)
    for name in ("transformers", "kinject"):
        caplog.set_level(logging.CRITICAL, logger=name)


@pytest.mark.filterwarnings("ignore")
def test_every_damaged_input_is_read_or_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with bounded_memory():
        counts, faults = break_all(kinds(), N_INPUTS, SEED, tmp_path / "inputs")
    by_outcome: Counter[str] = Counter()
    for (_, outcome), n in counts.items():
        by_outcome[outcome] += n
    with capsys.disabled():
        print(f"\n{table_of(counts)}\n{sum(counts.values())} inputs: {dict(by_outcome)}, {len(faults)} faults")
    assert not faults, "\n\n".join(faults[:20])
    assert sum(counts.values()) == N_INPUTS


MEASURED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_named import FILES
from kinject.errors import KinjectError
import pypdfium2, selectolax.lexbor, pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
said = "read"
try:
    FILES[sys.argv[2]][1](Path(sys.argv[3]))
except KinjectError as error:
    said = str(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
print(said[:3000])
"""


def measured(kind: str, path: Path) -> tuple[int, str]:
    """Return (MiB that reading took at its peak, what was said), in a process of its own."""
    command = [sys.executable, "-c", MEASURED, str(ROOT / "tests" / "hostile"), kind, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    peak, _, message = done.stdout.partition("\n")
    return int(peak), message


@pytest.mark.parametrize(
    ("kind", "name", "head"),
    [
        ("documents", "x.jsonl", b'{"text": "'),
        ("corpus", "x.jsonl", b'{"text": "'),
        ("questions", "x.jsonl", b'{"question": "'),
        ("samples", "x.jsonl", b'{"doc": "'),
        ("run", "answers.jsonl", b'{"key": "'),
        ("documents csv", "x.csv", b'text\n"'),
        ("questions csv", "x.csv", b'"'),
        ("documents txt", "x.txt", b"a"),
        ("documents html", "x.html", b"<p>"),
        ("documents pdf", "x.pdf", b"%PDF-1.4\n"),
        ("recipe", "x.yaml", b"run_dir: "),
        ("study", "report.json", b'{"a": "'),
        ("report", "report.json", b'{"a": "'),
    ],
)
def test_a_line_of_two_gibibytes_is_refused_in_bounded_memory(
    tmp_path: Path, kind: str, name: str, head: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    with path.open("wb") as file:  # zeros that take no room on the disk; to a reader they are bytes like others
        file.write(head)
        file.truncate(2**31)
    peak, message = measured(kind, path)
    with capsys.disabled():
        print(f"\n2 GiB as {kind}: {peak} MiB: {message.strip()[-120:]}")
    assert "longer than" in message or "the most that is read whole" in message
    assert peak < MOST_MIB


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("documents", {"text": ""}),
        ("corpus", {"text": ""}),
        ("questions", {"question": ""}),
    ],
)
def test_a_million_empty_rows_are_refused_in_bounded_memory(
    tmp_path: Path, kind: str, row: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes((json.dumps(row).encode() + b"\n") * 1_000_000)
    peak, message = measured(kind, path)
    with capsys.disabled():
        print(f"\na million empty rows as {kind}: {peak} MiB: {message.strip()[-80:]}")
    assert f"{path}:1: " in message
    assert peak < 256


def test_a_folder_of_two_hundred_thousand_empty_documents_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "documents"
    for part in range(200):
        below = folder / str(part)
        below.mkdir(parents=True)
        for number in range(1000):
            (below / f"{number}.txt").touch()
    peak, message = measured("documents", folder)
    with capsys.disabled():
        print(f"\n200,000 empty files: {peak} MiB: {message.strip()[-80:]}")
    assert "empty document" in message
    assert peak < 512


def test_a_document_of_the_most_bytes_is_read_in_bounded_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kinject.disk.files import LONGEST_LINE

    text = "The mill stood at Kelm. " * (LONGEST_LINE // 24 - 10)
    for kind, name, data in (
        ("documents", "x.jsonl", json.dumps({"text": text})),
        ("documents txt", "x.txt", text),
        ("documents csv", "x.csv", f'text\n"{text}"\n'),
    ):
        (tmp_path / name).write_text(data)
        peak, message = measured(kind, tmp_path / name)
        with capsys.disabled():
            print(f"\n64 MiB as {kind}: {peak} MiB: {message.strip()}")
        assert message.strip() == "read"
        assert peak < 2 * MOST_MIB
