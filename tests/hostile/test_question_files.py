"""Question files with one fault each are refused with file and line, or read as if the fault were not there."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from kinds import as_parquet
from question_files import (
    FORMATS,
    Drawn,
    as_csv,
    as_lines,
    draw,
    draw_questions,
    mmlu_cells,
    of_squad,
    read_plain,
)

from kinject.errors import KinjectError

DRAWS = int(os.environ.get("KINJECT_DRAWS", "60"))


def _fault(drawn: Drawn, path: Path) -> tuple[str, str]:
    """Return (what came of it, what is wrong with that: "" for nothing)."""
    path.write_bytes(drawn.data)
    try:
        questions = drawn.read(path)
    except KinjectError as error:
        lines = str(error).splitlines()
        unplaced = [line for line in lines if not re.match(rf"{re.escape(str(path))}:(\d+: |.*(UTF-8|Parquet))", line)]
        if drawn.harmless or unplaced:
            return "refused", f"refused: {error}"
        return "refused", ""
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what this looks for)
        return "raised", f"{type(error).__name__}: {error}"
    return ("read", "") if questions == drawn.known else ("misread", f"{drawn.known}\nread as\n{questions}")


def test_files_without_a_fault_are_read_as_they_were_written(tmp_path: Path) -> None:
    random = Random(5)
    for _ in range(20):
        known = draw_questions(random)
        for name, (make, file, read) in FORMATS.items():
            path = tmp_path / file
            path.write_bytes(as_parquet(make(known)) if file.endswith("parquet") else as_lines(make(known)).encode())
            assert read(path) == (of_squad(known) if name == "squad" else known)
        path = tmp_path / "q.csv"
        path.write_bytes(as_csv(mmlu_cells(known), random).encode())
        assert read_plain("auto")(path) == known


@pytest.mark.filterwarnings("ignore")
def test_a_file_with_one_fault_never_gives_other_questions(tmp_path: Path) -> None:
    random = Random(14)
    counts: Counter[str] = Counter()
    faults = []
    for number in range(DRAWS):
        drawn = draw(random)
        outcome, fault = _fault(drawn, tmp_path / drawn.file)
        counts[outcome] += 1
        if fault:
            faults.append(f"{number}: {drawn.format}, {drawn.fault}: {fault}\n{drawn.data[:1500]!r}")
    print(dict(counts), f"{len(faults)} faults")
    assert not faults, f"{len(faults)} of {DRAWS}\n" + "\n\n".join(faults[:4])
    assert counts["refused"] > counts["read"] > 0
