"""Tries on whole verbs: kills, two processes in one folder, odd surroundings, clocks that go back, little memory, damaged models.

Each try has a copy of one small world: documents, recipes of every verb, a tiny model. What a verb makes in it without
harm is known, and compared to the bit.
"""

from __future__ import annotations

import atexit
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import yaml
from faulty import FaultyDisk

from attack import Ended, area, contents, finish, in_child, judged, mutated, start
from kinject.augment.store import read_decisions, write_decision
from kinject.cli import program
from kinject.disk import read_jsonl, write_jsonl

ROOT = Path(__file__).parents[3]
PEOPLE = (
    ("Arden Holt", "Lowmere", 1930),
    ("Mara Falk", "Kelm", 1912),
    ("Jonas Reed", "Farrow", 1955),
)
VERBS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "documents": (["documents", "docs", "run_dir=runs/heap"], ("heap/documents.jsonl", "heap/skipped.jsonl")),
    "augment": (["augment", "augment.yaml"], ("augment/corpus.jsonl", "augment/variants.jsonl", "augment/rejected.jsonl")),
    "questions": (["questions", "questions.yaml"], ("questions/questions.jsonl", "questions/rejected.jsonl")),
    "train": (["train", "train.yaml"], ("train/model/model.safetensors",)),
    "eval": (["eval", "eval.yaml"], ("eval/flips.jsonl",)),
    "export": (["export", "model", "--out", "runs/export"], ("export/model/model.safetensors",)),
}  # fmt: skip
"""Verb -> its words, and the files below runs/ that it makes the same each time, to the bit."""
LIGHT = ("documents", "augment", "questions")
"""The verbs that need no torch: most tries are theirs."""


@cache
def world() -> Path:
    """Return the folder that every try has a copy of."""
    folder = Path(tempfile.mkdtemp(prefix="kinject-world-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts = [
        f"{name} was born in {town} in {year}. The bridge at {town} is the work of {name}."
        for name, town, year in PEOPLE
    ]
    documents = [{"id": f"d{n}", "text": text} for n, text in enumerate(texts)]
    write_jsonl(folder / "documents.jsonl", documents)
    written = []
    for n, (name, town, year) in enumerate(PEOPLE):
        written.append(
            {
                "document_id": f"d{n}",
                "text": f"In {town}, in {year}, {name} was born, who built the bridge at {town}.",
            }
        )
        written.append(
            {
                "document_id": f"d{n}",
                "text": f"{name} of {town}, born in {year + 1}, built the bridge at {town}.",
            }
        )
    write_jsonl(folder / "texts.jsonl", written)
    (folder / "docs").mkdir()
    for n, text in enumerate(texts):
        (folder / "docs" / f"{n}.txt").write_text(text)
    people = [row for _, row in read_jsonl(ROOT / "data" / "sandbox" / "documents.jsonl")]
    write_jsonl(folder / "people.jsonl", people[:3])
    choices = [name for name, *_ in PEOPLE]
    questions = [{"id": f"q{n}", "question": f"Who built the bridge at {town}?", "choices": choices, "answer": n}
                 for n, (_, town, _) in enumerate(PEOPLE)]  # fmt: skip
    write_jsonl(folder / "q.jsonl", questions)
    _write_model(folder / "model", texts)
    recipes = {
        "augment": {"augment": {"documents": "documents.jsonl", "styles": {"paraphrase": 2},
                                "generator": {"kind": "file", "path": "texts.jsonl"}}},
        "questions": {"questions": {"documents": "people.jsonl", "n_questions": 2, "generator": {"kind": "sandbox"}}},
        "train": {"model": {"path": "model"}, "corpus": {"path": "documents.jsonl"},
                  "trainer": {"max_steps": 3, "save_steps": 1, "learning_rate": 0.01, "bf16": False,
                              "gradient_checkpointing": False}},
        "eval": {"eval": {"models": {"base": "model"}, "questions": {"new": "q.jsonl"}}},
    }  # fmt: skip
    for name, recipe in recipes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"run_dir": f"runs/{name}", **recipe}))
    return folder


def _write_model(folder: Path, texts: list[str]) -> None:
    from kinject.models import train_tokenizer
    from small import save_tiny_model

    folder.mkdir()
    save_tiny_model(folder, train_tokenizer(texts * 3, 300))


def copied(folder: Path) -> Path:
    """Return a copy of the world in a folder."""
    shutil.copytree(world(), folder / "w")
    return folder / "w"


class _Counting(FaultyDisk):
    """Kills this process at one call of a file below the folder; counts them without a number."""

    def call(self, name: str, path: object = None) -> None:
        if len(self.calls) == self.index:
            os.kill(os.getpid(), signal.SIGKILL)
        self.calls.append(name)


def run(verb: str, folder: Path, *more: str) -> int:
    """Run a verb in a folder, in this process."""
    os.chdir(folder)
    sys.argv = ["kinject", *VERBS[verb][0], *more]
    code = program()
    sys.stdout.flush()
    return code


def counted(verb: str, folder: Path, index: int | None, *more: str) -> int:
    """Run a verb that is killed at a call; without `index` write how many there are."""
    with _Counting(folder, index=index) as disk:
        code = run(verb, folder, *more)
    if index is None:
        (folder / "calls").write_text(str(len(disk.calls)))
    return code


@cache
def unharmed(verb: str) -> tuple[Ended, dict[str, bytes], int]:
    """Return how a verb ends without harm, what it makes, and its number of calls."""
    folder = Path(tempfile.mkdtemp(prefix="kinject-whole-"))
    try:
        there = copied(folder)
        ended = in_child(partial(counted, verb, there, None))
        assert not judged(ended, (0, 1)), ended
        return ended, made(verb, there), int((there / "calls").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def made(verb: str, folder: Path) -> dict[str, bytes]:
    """Return the files of a verb that are the same each time; without one that is not there."""
    files = {name: folder / "runs" / name for name in VERBS[verb][1]}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


def again(verb: str, folder: Path) -> str:
    """Run a verb to its end; return what differs from what it makes without harm."""
    more = (
        ["--resume"]
        if verb == "train" and (folder / "runs" / "train" / "manifest.json").exists()
        else []
    )
    ended = in_child(partial(run, verb, folder, *more))
    whole, files, _ = unharmed(verb)
    if ended.code != whole.code:
        return f"{verb}: ends with {ended.code}, without harm with {whole.code}: {ended.printed[-400:]}"
    fault = judged(ended)
    found = made(verb, folder)
    different = [name for name in files if found.get(name) != files[name]]
    if different and not fault:
        fault = f"{verb}: {different[0]} differs from that of an uninterrupted run"
    return fault


def drawn(random: Random) -> str:
    """Return a verb: mostly a light one."""
    return random.choice((*LIGHT * 4, "train", "eval", "export"))


@area("kills")
def kills(random: Random, folder: Path) -> str:
    """A verb killed at up to three of its writes, then run to its end: the same to the bit."""
    verb, there = drawn(random), copied(folder)
    n_calls = unharmed(verb)[2]
    for number in range(random.randrange(1, 4)):
        more = (
            ["--resume"]
            if number and verb == "train" and (there / "runs/train/manifest.json").exists()
            else []
        )
        ended = in_child(partial(counted, verb, there, random.randrange(n_calls), *more))
        fault = judged(ended, (-signal.SIGKILL, 0, 1))
        if fault:
            return f"{verb} after a kill: {fault}"
    return again(verb, there)


@area("sequences")
def sequences(random: Random, folder: Path) -> str:
    """Verbs in any order in one folder, each killed or not, then each once more: the same to the bit."""
    there = copied(folder)
    chosen = [random.choice(LIGHT) for _ in range(4)]
    for verb in chosen:
        index = random.randrange(unharmed(verb)[2]) if random.random() < 0.6 else 10**9
        fault = judged(in_child(partial(counted, verb, there, index)), (-signal.SIGKILL, 0, 1))
        if fault:
            return f"{chosen}: {verb}: {fault}"
    return next(filter(None, (again(verb, there) for verb in dict.fromkeys(chosen))), "")


def _decide(folder: Path) -> int:
    for number in range(5):
        write_decision(
            folder / "runs" / "augment", {"id": f"{os.getpid()}-{number}", "decision": "drop"}
        )
    return 0


@area("pairs of processes")
def pairs(random: Random, folder: Path) -> str:
    """Two processes on every pair of verbs of one folder: each works or is refused in one line, and both are right after."""
    there = copied(folder)
    pair = [random.choice((*LIGHT * 3, "export", "decide", "decide")) for _ in range(2)]
    actions = [
        partial(_decide, there) if verb == "decide" else partial(run, verb, there) for verb in pair
    ]
    ended = [finish(*child) for child in [start(action) for action in actions]]
    for verb, one in zip(pair, ended, strict=True):
        fault = judged(one)
        if fault:
            return f"{pair}: {verb}: {fault}"
        if one.code == 2 and "in use by" not in one.printed:
            return f"{pair}: {verb} was refused: {one.printed[-300:]}"
    decided = len(read_decisions(there / "runs" / "augment"))
    if decided != 5 * pair.count("decide"):
        return f"{pair}: {decided} decisions of {5 * pair.count('decide')}"
    others = [verb for verb in dict.fromkeys(pair) if verb != "decide"]
    return next(filter(None, (again(verb, there) for verb in others)), "")


def _alone(words: list[str], folder: Path) -> int:
    os.chdir(folder)
    sys.argv = ["kinject", *words]
    return program()


@area("surroundings")
def surroundings(random: Random, folder: Path) -> str:
    """No HOME, LANG=C, a width of 20, closed streams, a full output: the verb works, and what it prints is no traceback."""
    there = copied(folder)
    verb = random.choice(LIGHT)
    others = (
        ["--help"],
        ["recipes"],
        ["augment", "none.yaml"],
        ["documents", "none"],
        [],
        ["report", "runs"],
        ["--json", "styles"],
    )
    words = random.choice((VERBS[verb][0], VERBS[verb][0], *others))
    environment = {
        "HOME": random.choice((None, "/none", "/dev/null", str(folder))), "LANG": "C", "LC_ALL": random.choice(("C", None, "xx")),
        "COLUMNS": random.choice(("20", "1", "-3", "x", "")), "TERM": random.choice(("dumb", None, "xterm")),
        "PYTHONIOENCODING": None, "PYTHONUTF8": None, "TMPDIR": random.choice((None, "/none")),
    }  # fmt: skip
    closed = random.choice(((), (), (0,), (1,), (2,), (0, 1, 2)))
    ended = in_child(partial(_alone, words, there), environment=environment, closed=closed)
    fault = judged(ended)
    if fault:
        return f"{words} {environment} without {closed}: {fault}"
    if words == VERBS[verb][0] and made(verb, there) != unharmed(verb)[1]:
        return f"{words} {environment} without {closed}: another result: {ended.printed[-300:]}"
    return ""


def _with_clock(verb: str, folder: Path, seed: int) -> int:
    random, real = Random(seed), time.time

    def wall() -> float:
        return real() + random.choice((0, -3600, 86_400, -(10**9)))

    time.time = wall
    return run(verb, folder)


@area("clocks")
def clocks(random: Random, folder: Path) -> str:
    """A clock that goes back and forth at each look: the same result."""
    there, verb = copied(folder), random.choice(LIGHT)
    fault = judged(in_child(partial(_with_clock, verb, there, random.randrange(10**6))), (0, 1))
    if fault:
        return f"{verb}: {fault}"
    return "" if made(verb, there) == unharmed(verb)[1] else f"{verb}: another result"


@area("limits")
def limits_of_system(random: Random, folder: Path) -> str:
    """Few open files, small files: one line or the right result, and the right one without the limit."""
    there, verb = copied(folder), random.choice(LIGHT)
    limits = {resource.RLIMIT_NOFILE: random.randrange(3, 40)}
    if random.random() < 0.5:
        limits = {resource.RLIMIT_FSIZE: random.choice((0, 1, 100, 3000))}
    ended = in_child(partial(run, verb, there), limits=limits)
    if ended.code not in (0, 1, 2) and ended.code != 70:
        return again(verb, there)  # the system ended it, as it may
    fault = judged(ended)
    # Without files Python cannot import; such a trace names the shortage.
    if fault and "Too many open files" not in ended.printed:
        return f"{verb} {limits}: {fault}"
    return again(verb, there)


def _start_or_fail(self: threading.Thread) -> None:
    """Start a thread as CPython does, which waits without end for one that had no memory to begin."""
    started: Any = self._started  # type: ignore[attr-defined]
    wait = started.wait

    def bounded() -> None:
        if not wait(_LONGEST_START):
            raise RuntimeError("can't start new thread")

    started.wait = bounded
    _START(self)


_START, _LONGEST_START = threading.Thread.start, 30


def _with_memory(verb: str, folder: Path, more: int) -> int:
    """Run a verb that may reserve so many bytes more than this process has."""
    threading.Thread.start = _start_or_fail  # type: ignore[method-assign]
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return run(verb, folder)


_OF_MEMORY = re.compile("memory|too little for this run", re.IGNORECASE)


@area("memory")
def memory(random: Random, folder: Path) -> str:
    """Little memory: a verb works, or ends in one line; what it left is whole, and with memory the result is the right one."""
    there, verb = copied(folder), drawn(random)
    more = random.choice((0, 1, 4, 16, 64, 256)) * random.randrange(1 << 19, 1 << 20)
    ended = in_child(partial(_with_memory, verb, there, more))
    if ended.code not in (0, 1, 2):
        # The system, or a library in C, may end it without a word; not Python with a trace.
        fault = judged(ended, (ended.code,) if ended.code < 0 else ())
        if fault:
            return f"{verb} with {more:,} bytes more: {fault}"
    lines = [line for line in ended.printed.splitlines() if line.strip()]
    if ended.code == 2 and not any(_OF_MEMORY.search(line) for line in lines[-3:]):
        return f"{verb} with {more:,} bytes more: no line about memory: {ended.printed[-500:]}"
    fault = again(verb, there)
    return f"{verb} after {more:,} bytes more: {fault}" if fault else ""


@area("export")
def export(random: Random, folder: Path) -> str:
    """A damaged model: exported with the weights that it has, or refused in one line."""
    there = copied(folder)
    path = random.choice(sorted((there / "model").glob("*")))
    path.write_bytes(mutated(path.read_bytes(), random))
    ended = in_child(partial(run, "export", there), environment={"CUDA_VISIBLE_DEVICES": ""})
    fault = judged(ended, (0, 2))
    if fault:
        return f"{path.name}: {fault}"
    left = contents(there / "runs" / "export") if (there / "runs" / "export").is_dir() else {}
    if ended.code and left:
        return f"{path.name}: refused, and left {sorted(left)}"
    return ""
