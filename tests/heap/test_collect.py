"""A heap of files: each is read or has its reason, once; copies and boilerplate go, whatever the number of processes."""

from __future__ import annotations

import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject import executors
from kinject.api import documents
from kinject.cli import main
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.executors import Outcome
from kinject.heap import copies, document_hashes, parse, read_documents
from kinject.heap.collect import DocumentsResult, collect, merge_parsed, parse_shard_of
from kinject.heap.write import day_of
from kinject.recipe import DocumentsSection
from kinject.shards import Shard

WORDS = [
    f"{a}{b}"
    for a in re.findall("...", "baldorfengimholkirlammurnespol")
    for b in re.findall("..", "aneloman")
]
collecting = importlib.import_module("kinject.heap.collect")  # the function has its name
NOTICE = "This text is confidential and must not leave the house."


def prose(seed: int, n: int = 80) -> str:
    """Return `n` words of no language."""
    rng = random.Random(seed)
    return " ".join(f"{rng.choice(WORDS)}{rng.choice(WORDS)}" for _ in range(n))


def rows_of(result: DocumentsResult, name: str) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(result.folder / name)]


@pytest.fixture
def heap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "heap"
    folder.mkdir()
    return Path("heap")


class Forks:
    """An executor that forks a process for each task, so that a test's own reader runs in it."""

    def __init__(self, *_: Any) -> None:
        self._running: list[tuple[Any, Any]] = []

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def has_room(self) -> bool:
        return not self._running

    def submit(self, task: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=task.run)
        process.start()
        self._running.append((task, process))

    def wait(self) -> list[Outcome]:
        task, process = self._running.pop()
        process.join()
        if process.exitcode == 0:
            return [Outcome(task, {})]
        return [
            Outcome(
                task,
                None,
                f"its worker process was killed by signal {-process.exitcode}",
                died=True,
            )
        ]


def test_each_file_is_read_or_has_its_line(heap: Path) -> None:
    (heap / "sub").mkdir()
    (heap / ".git").mkdir()
    (heap / "a.txt").write_text(prose(1))
    (heap / "sub" / "b.md").write_text(f"# Title\n\n{prose(2)}")
    (heap / "rows.jsonl").write_text(
        json.dumps({"id": "one", "text": prose(3)})
        + '\n{"txt": 1}\n'
        + json.dumps({"text": prose(4)})
        + "\n"
    )
    (heap / os.fsdecode(b"n\xe4me.txt")).write_text(prose(5))
    for name, data in {"empty.txt": b"", ".DS_Store": b"x", "Thumbs.db": b"x", "~$b.docx": b"x", "photo.jpg": b"\xff\xd8\xff",
                       "broken.pdf": b"%PDF-1.4 no"}.items():  # fmt: skip
        (heap / name).write_bytes(data)
    os.mkfifo(heap / "pipe.txt")
    (heap / "sub" / "loop").symlink_to("..")
    (heap / "gone.txt").symlink_to("nowhere")
    (heap / "link.txt").symlink_to("a.txt")
    (heap / "self").symlink_to("self")
    Path("secret.txt").write_text(prose(9))
    (heap / "notes.txt").symlink_to("../secret.txt")
    result = collect([heap])
    files = {
        row["file"]: (row["documents"], row["copies"], row["skipped"]) for row in result.files()
    }
    assert {name: numbers for name, numbers in files.items() if numbers != (0, 0, 1)} == {
        "a.txt": (1, 0, 0), "sub/b.md": (1, 0, 0), "rows.jsonl": (2, 0, 1), "n\\xe4me.txt": (1, 0, 0), "link.txt": (0, 1, 0),
    }  # fmt: skip
    skipped = {row["where"].partition(":")[0]: row for row in result.skipped()}
    reasons = {
        "empty.txt": "an empty file", ".DS_Store": "hidden", "Thumbs.db": "the system's", "photo.jpg": "", "pipe.txt": "a pipe",
        "broken.pdf": "", "sub/loop": "a link to a folder", "gone.txt": "No such file", "self": "Too many levels",
        "notes.txt": "a link to a file elsewhere", ".git": "hidden", "rows.jsonl": "text",
        "~$b.docx": "",
    }  # fmt: skip
    assert skipped.keys() == reasons.keys()
    assert [name for name, text in reasons.items() if text not in skipped[name]["detail"]] == []
    assert {name for name, row in skipped.items() if row["left_out"]} == {
        ".DS_Store",
        "Thumbs.db",
        ".git",
        "~$b.docx",
    }
    assert result.n_skipped == len(reasons) - 4
    documents = rows_of(result, "documents.jsonl")
    assert [row["source"] for row in documents] == [
        "a.txt",
        "n\\xe4me.txt",
        "rows.jsonl:1",
        "rows.jsonl:3",
        "sub/b.md",
    ]
    ids = [row["id"].partition("#")[0] for row in documents]
    assert ids == ["a.txt", "n\\xe4me.txt", "one", "rows.jsonl", "sub/b.md"]
    assert [(row["title"], row["text"][:7]) for row in documents][-1] == ("Title", "# Title")
    assert [row["file"] for row in result.to_rows()] == [row["file"] for row in result.files()]


def test_what_did_not_change_is_not_parsed_again(
    heap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (heap / f"{number}.txt").write_text(prose(number))
    first = collect([heap])
    assert (first.n_parsed, first.already_done) == (5, False)
    stored = {path: path.stat().st_mtime_ns for path in Path("runs/parsed").rglob("??/*.jsonl")}
    assert len(stored) == 5
    with monkeypatch.context() as patched:
        patched.setattr(
            executors, "LocalExecutor", lambda *_: pytest.fail("nothing is to be parsed")
        )
        assert collect([heap]).already_done
        assert document_hashes(heap) == {"heap": first.fingerprint}
        assert len(list(read_documents(heap))) == 5
        other = collect([heap], folder=Path("other"))
        assert (other.folder / "documents.jsonl").read_bytes() == first.documents_path.read_bytes()
        os.utime(heap / "0.txt", (1e9, 1e9))  # touched
        shutil.move(heap / "1.txt", heap / "moved.txt")
        shutil.copy(heap / "2.txt", heap / "copied.txt")
        moved = collect([heap])
    names = ["0.txt", "2.txt", "3.txt", "4.txt", "moved.txt"]
    assert [row["source"] for row in rows_of(moved, "documents.jsonl")] == names
    assert rows_of(moved, "documents.jsonl")[-1]["title"] == "moved"
    (heap / "3.txt").write_text(prose(99))
    assert collect([heap]).n_parsed == 1
    assert {path: path.stat().st_mtime_ns for path in stored} == stored
    assert document_hashes(heap) != {"heap": first.fingerprint}
    first.documents_path.write_text("changed by hand")
    assert len(rows_of(collect([heap]), "documents.jsonl")) == 5


def _odd_reader(path: Path, stream: Any, options: Any) -> Iterator[Any]:
    if "crash" in path.name:
        os.kill(os.getpid(), signal.SIGSYS)
    while "hang" in path.name:
        zlib.crc32(b"x" * 100_000)
    if "eat" in path.name:
        bytearray(2**32)
    if "bug" in path.name:
        raise KeyError("not foreseen")
    yield from parse.read_file.__wrapped__(path, stream, options)  # type: ignore[attr-defined]


def test_a_file_that_crashes_hangs_or_eats_memory_costs_itself_only(
    heap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _odd_reader.__dict__["__wrapped__"] = parse.read_file
    monkeypatch.setattr(parse, "read_file", _odd_reader)
    monkeypatch.setattr(executors, "LocalExecutor", Forks)
    status = Path(
        "/proc/self/status"
    ).read_text()  # the worker is forked from this process, which has the libraries
    data = int(re.search(r"VmData:\s+(\d+) kB", status)[1]) / 2**20  # type: ignore[index]
    monkeypatch.setattr(import_module("kinject.heap.parse"), "MEMORY", 3 + round(data))
    names = ["a", "b-crash", "c", "d-hang", "e-eat", "f-bug", "g"]
    for number, name in enumerate(names):
        (heap / f"{name}.txt").write_text(prose(number))
    monkeypatch.setattr(parse, "SECONDS", 0.3)
    monkeypatch.setattr(collecting, "core_count", lambda: 1)
    section = DocumentsSection()
    result = collect([heap], section)
    assert [row["source"] for row in rows_of(result, "documents.jsonl")] == [
        "a.txt",
        "c.txt",
        "g.txt",
    ]
    details = {row["file"]: row["detail"] for row in result.skipped()}
    assert f"signal {signal.SIGSYS:d}" in details["b-crash.txt"]
    assert "takes more than 0.3 s" in details["d-hang.txt"]
    assert re.match(r"takes more than \d+ GiB", details["e-eat.txt"])
    assert "KeyError" in details["f-bug.txt"]
    monkeypatch.setattr(executors, "LocalExecutor", None)  # what kills a process is known by now
    assert collect([heap], section).already_done


def _mixed(heap: Path) -> None:
    for number in range(40):
        folder = heap / f"{number % 3}"
        folder.mkdir(exist_ok=True)
        text = prose(number % 36)
        (folder / f"{number}.txt").write_text(f"{text}\n\n{NOTICE}\n" if number % 2 else text)
    (heap / "bad.jsonl").write_text("[]\n")


def test_the_output_does_not_depend_on_processes_or_on_a_kill(
    heap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _mixed(heap)
    results = []
    for n in (3, 1):
        monkeypatch.setattr(collecting, "core_count", lambda n=n: n)
        results.append(collect([heap], DocumentsSection(cache_dir=f"cache{n}"), Path(f"run{n}")))
    advance = collecting.Progress.advance
    with monkeypatch.context() as patched:

        def stop(self: Any, n: int = 1) -> None:
            advance(self, n)
            if self.label == "documents" and self.done > 5:
                raise KeyboardInterrupt

        patched.setattr(collecting.Progress, "advance", stop)
        killed = DocumentsSection(cache_dir="cache4")
        with pytest.raises(KeyboardInterrupt):
            collect([heap], killed, Path("run4"))
    resumed = collect([heap], killed, Path("run4"))
    assert resumed.n_parsed < results[0].n_parsed
    for name in collecting.OUTPUTS:
        assert len({(result.folder / name).read_bytes() for result in (*results, resumed)}) == 1


def test_copies_boilerplate_and_repeats_are_left_out_and_listed(heap: Path) -> None:
    text = prose(1, 200)
    words = text.split()
    near = " ".join(
        f"other{WORDS[i % 40]}" if i % 10 == 3 else word for i, word in enumerate(words)
    )
    far = " ".join(f"other{WORDS[i % 40]}" if i % 4 == 3 else word for i, word in enumerate(words))
    for name, content in {
        "a": text,
        "exact": text.upper().replace(" ", "\n"),
        "far": far,
        "near": near,
    }.items():
        (heap / f"{name}.txt").write_text(content)
    passage = prose(2, 50)
    (heap / "within.md").write_text(
        f"# One\n\n{passage}\n\n# Two\n\n{prose(3)}\n\n{passage}\n\nThe end of it.\n"
    )
    log = "".join(
        f"2026-11-22 10:{i % 60:02d}:{i % 7:02d} INFO request {i} served in {i % 40} ms\n"
        for i in range(2000)
    )
    (heap / "server.txt").write_text(
        f"Start of the server of Arvika.\n{log}The disk of Arvika was full.\n"
    )
    for number in range(12):
        (heap / f"z{number:02d}.md").write_text(
            f"# Summary\n\n{prose(100 + number)}\n\n{NOTICE}\n\n- {number}\n"
        )
    result = collect([heap])
    texts = {row["source"]: row["text"] for row in rows_of(result, "documents.jsonl")}
    duplicates = rows_of(result, "duplicates.jsonl")
    assert {(row["dropped"], row["kept"], row["how"]) for row in duplicates} == {
        ("exact.txt", "a.txt", "exact"), ("near.txt", "a.txt", "near"), ("within.md", "within.md", "passage"),
        ("server.txt", "server.txt", "line of a log"), ("11 documents", "z00.md", "line"),
    }  # fmt: skip
    near_row = next(row for row in duplicates if row["how"] == "near")
    assert near_row["overlap"] == 0.9
    assert near_row["words_only_here"][:2] == [f"other{WORDS[3]}", f"other{WORDS[13]}"]
    assert texts["within.md"] == f"# One\n\n{passage}\n\n# Two\n\n{prose(3)}\n\nThe end of it.\n"
    assert texts["server.txt"].count("\n") == 3
    assert duplicates[-1]["line"] == NOTICE.lower()
    assert texts["z00.md"].endswith(f"{NOTICE}\n\n- 0\n")
    assert texts["z01.md"] == f"# Summary\n\n{prose(101)}\n\n- 1\n"
    everything = collect([heap], DocumentsSection(near_duplicates=None, boilerplate=None))
    texts = {row["source"]: row["text"] for row in rows_of(everything, "documents.jsonl")}
    assert "near.txt" in texts
    assert NOTICE in texts["z01.md"]


def test_the_counts_are_those_of_the_documents_that_were_written(tmp_path: Path) -> None:
    """Of eleven pages a banner is cut, and of a twelfth nothing is left."""
    heap = tmp_path / "pages"
    heap.mkdir()
    for number in range(11):
        (heap / f"{number:02}.txt").write_text(f"{NOTICE}\n\nPage {number} has its own words.")
    (heap / "z.txt").write_text(NOTICE)
    result = collect([heap], folder=tmp_path / "out")
    rows = rows_of(result, "documents.jsonl")
    assert result.counts["n_documents"] == len(rows) == 11
    assert result.counts["n_words"] == sum(len(row["text"].split()) for row in rows)
    assert sum(result.counts["languages"].values()) == 11
    assert result.files()[-1]["documents"] == 0
    assert result.files()[-1]["skipped"] == 1


def test_the_overlap_is_that_of_plain_counting() -> None:
    rng = random.Random(0)
    for _ in range(30):
        words = [rng.choice(WORDS) for _ in range(60)]
        other_words = [rng.choice(WORDS) if rng.random() < 0.1 else word for word in words] + words[
            :3
        ]
        pairs = [set(itertools.pairwise(text_words)) for text_words in (words, other_words)]
        common = sum(min(words.count(word), other_words.count(word)) for word in set(words)) / max(
            len(words), len(other_words)
        )
        enough = len(pairs[0] & pairs[1]) >= 0.5 * len(pairs[0] | pairs[1])
        measured = copies.overlap(
            copies.word_hashes(" ".join(words)), copies.word_hashes(" ".join(other_words))
        )
        assert measured == pytest.approx(common if enough else 0.0)


def test_offsets_of_pages_move_with_the_text() -> None:
    text = "First page.\nNotice\nMore.\nSecond page.\nNotice\nThird."
    pages = [
        [0, 1],
        [text.index("Second"), 2],
        [text.rindex("Notice"), 3],
        [text.index("Third"), 4],
    ]
    marks = {"pages": pages, "chapters": pages, "x": 1}
    edits = [(start, start + 7, "") for start in (text.index("Notice"), text.rindex("Notice"))]
    edits.insert(0, (0, 5, "1st"))
    changed, meta = copies.edited(text, edits, marks)
    assert changed == "1st page.\nMore.\nSecond page.\nThird."
    assert [changed[start:][:6] for start, _ in meta["pages"]] == [
        "1st pa",
        "Second",
        "Third.",
        "Third.",
    ]
    assert (meta["x"], meta["chapters"]) == (1, meta["pages"])


@pytest.mark.parametrize(
    ("text", "word", "other", "facts"),
    [
        ("A boat costs {} crowns a day.", "thirty", "ninety", ("thirty", "ninety")),
        ("Wer das Boot am Abend nimmt, zahlt dafür nur {} Kronen.", "zwölf", "elf", ("zwölf kronen", "elf kronen")),
        ("渡船的票价是{}元。", "八", "九", ("八", "九")),
        ("A {} costs thirty crowns a day.", "boat", "ship", None),
    ],
)  # fmt: skip
def test_numbers_in_words_make_two_versions(
    text: str, word: str, other: str, facts: tuple[str, str] | None
) -> None:
    assert copies.differing_facts(text.format(word), text.format(other)) == facts


def test_two_versions_of_a_rule_are_both_kept_and_of_true_copies_the_newest(heap: Path) -> None:
    kept = set()
    facts = (
        ("30", "28"),
        ("Linz", "Graz"),
        ("1 May 2025", "1 July 2025"),
        ("MR-12", "MR-14"),
        ("4.5", "4.6"),
    )
    for number in range(20):
        old, new = facts[number % len(facts)]
        words = prose(number, 120)
        for year, fact in ((2025, old), (2026, new)):
            (heap / f"rule{number:02d}-{year}.txt").write_text(
                f"{words} at most {fact} each. {old} and {new} are elsewhere."
            )
            kept.add(f"rule{number:02d}-{year}.txt")
        text = f"{words[::-1]} of 40 guests"
        (heap / f"copy{number:02d}-2025.txt").write_text(f"{text} and more")
        (heap / f"copy{number:02d}-2026.md").write_text(
            text if number % 2 else f"{text}, says Kelm. {prose(number, 5)}"
        )
        kept.add(f"copy{number:02d}-2026.md")
        old_path, new_path = heap / f"dated{number:02d}-a.txt", heap / f"dated{number:02d}-b.txt"
        old_path.write_text(f"{prose(500 + number)} once")
        new_path.write_text(prose(500 + number))
        os.utime(heap / (new_path if number % 2 else old_path).name, (1e9, 1e9))
        kept.add((old_path if number % 2 else new_path).name)
    result = collect([heap])
    assert {row["source"] for row in rows_of(result, "documents.jsonl")} == kept
    assert result.counts["duplicates"] == {"exact": 0, "near": 40}
    versions = [row for row in rows_of(result, "duplicates.jsonl") if "version" in row]
    assert len(versions) == 20
    first = next(row for row in versions if row["version"] == "rule00-2025.txt")
    assert (first["kept"], first["words_only_here"], first["words_only_there"]) == (
        "rule00-2026.txt",
        ["30"],
        ["28"],
    )


def test_patterns_and_several_paths_are_heaps_and_a_text_never_names_paths(
    heap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (heap / "sub").mkdir()
    for number, name in enumerate(("a.txt", "sub/b.txt", "sub/c.md")):
        (heap / name).write_text(prose(number))

    def names(*sources: str) -> list[str]:
        return [
            row["source"]
            for row in rows_of(collect([Path(source) for source in sources]), "documents.jsonl")
        ]

    assert names("heap/**/*.txt") == ["a.txt", "sub/b.txt"]
    assert names("heap/sub", "heap/a.txt") == ["heap/a.txt", "heap/sub/b.txt", "heap/sub/c.md"]
    assert names("heap/a.txt") == ["a.txt"]
    Path("list.txt").write_text("/etc/passwd\nheap/a.txt\n")
    assert [document.text for document in read_documents(Path("list.txt"))] == [
        "/etc/passwd\nheap/a.txt\n"
    ]
    for words, message in (
        (["nowhere"], "nowhere: nothing is there"), (["heap/*.pdf"], "no file fits this pattern"), (["/"], "the root"),
        (["/proc/self"], "devices of the system"), (["/sys"], "devices of the system"),
        (["heap/**.md"], "heap/**.md: not a pattern"), (["heap/sub**/*"], "** is a whole part of a path"),
        (["heap", "documents.boilerplat=1"], "unknown key. Did you mean boilerplate?"),
    ):  # fmt: skip
        assert main(["documents", *words]) == 2
        assert message in capsys.readouterr().err


def test_a_path_that_was_mistyped_leaves_no_folder(heap: Path) -> None:
    for words in ("documents haep", "documents haep/*.md --shard 2/3", "documents heap"):
        assert main(words.split()) == 2
        assert [path.name for path in Path().iterdir()] == ["heap"], words


@pytest.mark.parametrize("source", ["heap", "heap/**/*.txt"])
def test_folders_that_link_to_one_another_end(heap: Path, source: str) -> None:
    for number in range(10):
        (heap / f"{number}").mkdir()
        (heap / f"{number}" / "a.txt").write_text(prose(number))
        for other in range(10):
            (heap / f"{number}" / f"to{other}").symlink_to(f"../{other}")
    assert collect([Path(source)]).counts["n_documents"] == 10


def test_the_command_the_function_and_a_recipe_do_the_same(
    heap: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (heap / "a.md").write_text(f"---\nlicence: CC0-1.0\n---\n\n{prose(1)}")
    assert main(["documents", "heap", "documents.near_duplicates=0.9"]) == 0
    out = capsys.readouterr().out
    assert "read        1 document from 1 of 1 file (.md 1)" in out
    text = Path("runs/heap/documents/documents.jsonl").read_text()
    assert "CC0-1.0" in text
    assert documents("heap", options=DocumentsSection(near_duplicates=0.9)).already_done
    Path("recipe.yaml").write_text(
        "run_dir: r\ndocuments: {near_duplicates: 0.9}\naugment: {documents: heap}\n"
    )
    assert main(["documents", "heap", "--recipe", "recipe.yaml", "run_dir=mine"]) == 0
    assert Path("mine/documents.jsonl").read_text() == text
    capsys.readouterr()
    assert main(["documents", "heap", "documents.near_duplicates=2"]) == 2
    assert "documents.near_duplicates: found 2, allowed: 0.5 to 1.0" in capsys.readouterr().err


def test_merged_shards_are_the_documents_of_one_process_and_parse_nothing_twice(heap: Path) -> None:
    for number in range(9):
        (heap / f"{number}.txt").write_text(prose(number))
    # A near copy, whose original may be another shard's.
    (heap / "copy.txt").write_text(f"{prose(3)} {WORDS[0]}")
    whole = collect([heap], DocumentsSection(cache_dir="other"), Path("whole"))
    section, run = DocumentsSection(cache_dir="cache"), Path("run")
    parts = [parse_shard_of([heap], section, run, Shard(number, 3)) for number in (1, 2, 3)]
    assert [sum(part[name] for part in parts) for name in ("n_files", "n_parsed")] == [10, 10]
    merged = merge_parsed([heap], section, Path("run"))
    assert merged.n_parsed == 0
    assert merged.fingerprint == whole.fingerprint
    assert merged.counts == whole.counts
    assert merged.counts["duplicates"]["near"] == 1
    (heap / "new.txt").write_text(prose(20))
    with pytest.raises(InputError, match="1-of-3: was made from another heap"):
        merge_parsed([heap], section, Path("run"))


def test_a_time_outside_of_the_calendar_is_its_first_or_last_day() -> None:
    assert [day_of(seconds) for seconds in (-9e13, 0.0, 5e11, 1e19)] == [
        "0001-01-01",
        "1970-01-01",
        "9999-12-31",
        "9999-12-31",
    ]


@pytest.mark.parametrize(
    "damage", [{"skipped": None}, {"duplicates": {"near": 2}}, {"n_words": "many"}]
)
def test_counts_that_were_changed_are_written_again(heap: Path, damage: dict[str, Any]) -> None:
    (heap / "a.txt").write_text(prose(4))
    result = collect([heap])
    path = result.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "counts": {**manifest["counts"], **damage}}))
    again = collect([heap])
    assert not again.already_done
    assert again.counts == result.counts
