"""Draws environments: variables, streams, limits, users and folders around a verb in a process of its own.

`draw(n, seed)` gives cases; `Bench.run` starts one and returns what is wrong with it. A verb in a hostile environment does
its whole work (exit 0, the same outputs as in a normal one), or all but its text for a stream that is full (exit 1), or
refuses in one line (exit 2). It never ends in a traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NOBODY = 65_534
SECONDS = 120
CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE, MS_RDONLY = 0x4000 | 0x40000, 1


@dataclass(frozen=True)
class Environment:
    """One hostile environment. `codes` are the exit codes that it may end in; `prepare` runs in the child before its program."""

    name: str
    codes: tuple[int, ...] = (0,)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    streams: Mapping[int, str] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    own_folder: bool = False
    """Whether it spoils the working directory."""
    root: bool = False
    """Whether only root can make it."""
    but: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The exit codes of single verbs."""


def _limit(name: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(name, (value, value))


def _be_nobody() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def _mount(*places: str) -> Callable[[], None]:
    """Hide each folder behind an empty one that is read-only, in a mount namespace of the child."""

    def prepare() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        for done in (
            libc.unshare(CLONE_NEWNS), libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None),
            *(libc.mount(b"tmpfs", f"/{place}".encode(), b"tmpfs", MS_RDONLY, b"size=4k") for place in places),
        ):  # fmt: skip
            if done:
                raise OSError(ctypes.get_errno(), "mount")

    return prepare


def _delete_cwd() -> None:
    shutil.rmtree(os.getcwd())


NUMBERS = {
    "empty": "",
    "a word": "two",
    "negative": "-1",
    "huge": "9" * 30,
    "a fraction": "0.5",
    "Arabic digits": "\u0663",
}
LAUNCH = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE")
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "NUMEXPR_MAX_THREADS")
TEXTS = {
    "COLUMNS": ("", "x", "-3", "0", "1", "9" * 30), "LINES": ("x", "0"), "TERM": ("", "dumb", "nonsense"),
    "NO_COLOR": ("1", ""), "FORCE_COLOR": ("1", "x"), "PYTHONUNBUFFERED": ("1", "x"),
    "SOURCE_DATE_EPOCH": ("", "x", "-1", "9" * 30), "TZ": ("", "nonsense", "Mars/Phobos", ":/etc/passwd"),
    "LANG": ("", "C", "xx_YY.nothing"), "LC_ALL": ("C", "POSIX", "xx_YY.nothing"),
    "CUDA_VISIBLE_DEVICES": ("", "x", "-1", "9" * 30), "PYTHONIOENCODING": ("ascii", "latin-1:strict", "utf-16"),
    "TOKENIZERS_PARALLELISM": ("", "maybe"), "PATH": ("", "/nowhere"), "PYTHONOPTIMIZE": ("2",),
    "PYTHONDONTWRITEBYTECODE": ("1",), "MPLBACKEND": ("nonsense", ""), "MPLCONFIGDIR": ("/proc/1/x", ""),
    "HF_HOME": ("", "/dev/null", "/proc/1/x", "word"), "HF_HUB_OFFLINE": ("", "1", "maybe"),
    "HF_HUB_DOWNLOAD_TIMEOUT": ("", "x"), "TRANSFORMERS_VERBOSITY": ("", "x"), "DATASETS_VERBOSITY": ("x",),
    "TRANSFORMERS_CACHE": ("/proc/1/x",), "XDG_CACHE_HOME": ("/proc/1/x", ""), "TORCH_HOME": ("/proc/1/x",),
    "ACCELERATE_USE_CPU": ("maybe", ""), "ACCELERATE_MIXED_PRECISION": ("nonsense", ""), "ACCELERATE_USE_FSDP": ("maybe",),
    "ACCELERATE_USE_DEEPSPEED": ("maybe",), "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("x", "-1", "3"),
    "MASTER_ADDR": ("", "nowhere.invalid"), "TORCH_LOGS": ("nonsense",), "TORCH_SHOW_CPP_STACKTRACES": ("x",),
    "PYTORCH_CUDA_ALLOC_CONF": ("nonsense",), "KMP_AFFINITY": ("x",), "WANDB_MODE": ("nonsense",),
    "WANDB_DISABLED": ("maybe",), "USER": (None,), "LOGNAME": (None,), "SHELL": (None,), "BASH_ENV": ("/nowhere",),
    "HTTP_PROXY": ("nonsense", "http://127.0.0.1:9"), "SSL_CERT_FILE": ("/nowhere",), "HF_ENDPOINT": ("nonsense",),
    "HF_TOKEN": ("",), "SLURM_PROCID": ("x", "3"), "OMPI_COMM_WORLD_SIZE": ("x", "2"), "PMI_SIZE": ("x", "2"),
    "PYTHONUTF8": ("0", "1"), "PYTHONPYCACHEPREFIX": ("/proc/1/x",), "PYTHONWARNINGS": ("nonsense", "default"),
    "DATASETS_CACHE": ("/proc/1/x",),
}  # fmt: skip


def environments() -> list[Environment]:
    """Return every kind of environment, those with values one for each value."""
    found = [
        Environment(f"{name} is {what}", (0, 2), {name: value})
        for name in (*LAUNCH, *THREADS)
        for what, value in NUMBERS.items()
    ]
    found += [
        Environment(f"{name}={value}", (0, 2), {name: value}) for name, values in TEXTS.items() for value in values
    ]
    for number, stream in enumerate(("stdin", "stdout", "stderr")):
        kinds = (
            "closed",
            "read-only",
            "full",
            "broken",
            "closing",
            "socket",
            "gone socket",
            "nonblocking",
            "directory",
        )
        for kind in kinds if number else ("closed", "full", "socket", "directory"):
            codes = {"full": (1,), "read-only": (1,)}.get(kind, (0,)) if number == 1 else (0,)
            if kind != "directory":  # Python itself ends there
                found.append(Environment(f"{stream} {kind}", codes, streams={number: kind}))
    found += [
        Environment("all streams closed", streams=dict.fromkeys(range(3), "closed")),
        Environment("stdout and stderr full", (1,), streams={1: "full", 2: "full"}),
        Environment("stdout and stderr broken", streams={1: "broken", 2: "broken"}),
        Environment("ascii streams, closed stdin", variables={"PYTHONIOENCODING": "ascii"}, streams={0: "closed"}),
        Environment("ascii file names", (0, 2), {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
        Environment("an empty environment", variables=dict.fromkeys(set(os.environ) - {"PYTHONPATH"})),
        Environment("no HOME", variables={"HOME": None}),
        Environment("HOME is empty", variables={"HOME": ""}),
        Environment("HOME that nobody can write", variables={"HOME": "/proc/1/x"}),
        Environment("HOME is a file", variables={"HOME": "/dev/null"}),
        Environment("TMPDIR that nobody can write", variables={"TMPDIR": "/proc/1/x"}),
        Environment("TMPDIR is empty", variables={"TMPDIR": ""}),
        Environment("a user without a name", root=True, prepare=_be_nobody, variables={"HOME": None, "USER": None}, codes=(0, 2)),
        Environment("no place for temporary files", root=True, prepare=_mount("tmp", "var/tmp"), codes=(0, 2)),
        Environment("no /dev/shm", root=True, prepare=_mount("dev/shm")),
        Environment("a read-only HOME", root=True, prepare=_mount("root"), variables={"HOME": "/root"}),
        Environment("a working directory that was deleted", (2,), prepare=_delete_cwd, own_folder=True),
        Environment("umask 777", (0, 2), prepare=lambda: void(os.umask(0o777))),
        Environment("umask 0", prepare=lambda: void(os.umask(0))),
        Environment("16 open files", (0, 2), prepare=_limit(resource.RLIMIT_NOFILE, 16)),
        Environment("40 open files", (0, 2), prepare=_limit(resource.RLIMIT_NOFILE, 40)),
        Environment("256 open files", prepare=_limit(resource.RLIMIT_NOFILE, 256)),
        Environment("files of 0 bytes", (1, 2), prepare=_limit(resource.RLIMIT_FSIZE, 0)),
        Environment("files of 2,000 bytes", (1, 2), prepare=_limit(resource.RLIMIT_FSIZE, 2000), but={"check": (0,)}),
        Environment("files of 40,000 bytes", (0, 2), prepare=_limit(resource.RLIMIT_FSIZE, 40_000)),
        Environment("a stack of 256 KiB", (0, 2), prepare=_limit(resource.RLIMIT_STACK, 256 << 10)),
        Environment("no core file, no CPU priority", prepare=lambda: void(os.nice(19))),
    ]  # fmt: skip
    for mib in (60, 200, 500, 900, 2000):
        found.append(Environment(f"{mib} MiB of addresses", (0, 2), prepare=_limit(resource.RLIMIT_AS, mib << 20)))
    return found


def void(_: object) -> None:
    """Take a value and return nothing."""


@dataclass
class Bench:
    """A folder with inputs for the verbs, and what each leaves in a normal environment."""

    folder: Path
    model: Path | None = None
    normal: dict[str, Mapping[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        documents = [
            json.loads(line) for line in (ROOT / "data/sandbox/documents.jsonl").read_text("utf-8").splitlines()[:3]
        ]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._rows("documents.jsonl", documents)
        self._rows("corpus.jsonl", [{"text": f"Person {i} was born in Lowmere."} for i in range(8)])
        question = {"question": "Where was Arden born?", "choices": ["Lowmere", "Kelm"], "answer": 0}
        self._rows("questions.jsonl", [{**question, "id": f"q{i}"} for i in range(2)])

    def _rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def words(self, verb: str, here: Path) -> list[str]:
        """Return the command of a verb that writes below `here`, in a run folder of non-ASCII letters."""
        run = here / "Läufe-\u4e2d"
        trainer = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 32,
                   "gradient_checkpointing": False, "bf16": False, "save_strategy": "no"}  # fmt: skip
        corpus = {"path": str(self.folder / "corpus.jsonl"), "cache_dir": str(here / "t")}
        train = {"model": {"path": str(self.model)}, "corpus": corpus, "trainer": trainer}
        sections: dict[str, Any] = {
            "augment": {"augment": {"documents": str(self.folder / "documents.jsonl"), "styles": {"paraphrase": 2},
                                    "generator": {"kind": "sandbox"}}},
            "train": train, "plan": train,
            "eval": {"eval": {"models": {"base": str(self.model)}, "questions": {"new": str(self.folder / "questions.jsonl")},
                              "formats": ["letters"], "shots": [0]}},
        }  # fmt: skip
        recipe = here / "recipe.yaml"
        if verb in sections:
            recipe.write_text(yaml.safe_dump({"run_dir": str(run), **sections[verb]}), encoding="utf-8")
        return {
            "check": ["check", str(ROOT / "recipes/augment.yaml")], "help": ["plan", "--help"], "schema": ["schema"],
            "plan": ["plan", str(recipe), "--no-calibration"],
        }.get(verb, [verb, str(recipe)])  # fmt: skip

    def run(self, verb: str, environment: Environment, here: Path) -> tuple[int, str, str]:
        """Run a verb; return its exit code, what it wrote to the streams that can be read, and what is wrong, "" for nothing."""
        here.mkdir(parents=True)
        here.chmod(0o777)
        words = self.words(verb, here)
        cwd = here / "cwd"
        cwd.mkdir()
        with _opened(environment.streams, here) as (streams, close_after):
            process = subprocess.Popen(
                [sys.executable, "-m", "kinject.cli", *words], cwd=cwd, env=_variables(environment),
                preexec_fn=_prepare(environment, streams), pass_fds=tuple(streams.values()), close_fds=True,
                start_new_session=True,
            )  # fmt: skip
            close_after()
            try:
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                return -9, _read(here), f"still running after {SECONDS} s"
        printed = _read(here)
        return code, printed, self._fault(verb, environment, here, code, printed)

    def _fault(self, verb: str, environment: Environment, here: Path, code: int, printed: str) -> str:
        faults = [
            word
            for word in ("Traceback", "Exception ignored", "FATAL", "Fatal", "--- Logging error")
            if word in printed
        ]
        codes = environment.but.get(verb, environment.codes)
        if code not in codes:
            faults.append(f"exit code {code}, not {codes}")
        if code == 2 and 2 not in environment.streams and "kinject" not in printed:
            faults.append("exit code 2 without a line")
        left = outputs(here)
        if code in (0, 1) and not faults:
            if verb not in self.normal and (environment.variables or environment.streams or environment.prepare):
                normal = here.with_name(f"normal-{verb}")
                self.run(verb, Environment("normal"), normal)
                self.normal[verb] = outputs(normal)
            self.normal.setdefault(verb, left)
            different = {name for name in {*left, *self.normal[verb]} if left.get(name) != self.normal[verb].get(name)}
            faults += [f"other outputs: {sorted(different)[:5]}"] if different else []
        return "; ".join(faults)


TIMED = (
    "manifest.json",
    "timing.jsonl",
    "log.jsonl",
    "report.html",
    "report.md",
    "recipe.yaml",
    "SHA256SUMS",
    "report.json",
    "cache.sqlite",
)
"""Outputs that hold times, or the folder's own path."""


def outputs(here: Path) -> dict[str, str]:
    """Return the hash of each output below a case's folder, of those that hold times their presence."""
    found = {}
    for run in (here / "Läufe-\u4e2d", here / "t"):
        for path in sorted(run.rglob("*")):
            name = str(path.relative_to(here))
            if path.is_file() and path.name != ".lock" and "harness" not in name:
                timed = path.name in TIMED or path.suffix in (".png", ".svg")
                found[name] = "there" if timed else hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _variables(environment: Environment) -> dict[str, str]:
    kept = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    kept.pop("PYTEST_CURRENT_TEST", None)
    for name, value in environment.variables.items():
        if value is None:
            kept.pop(name, None)
        else:
            kept[name] = value
    return kept


def _prepare(environment: Environment, streams: Mapping[int, int]) -> Callable[[], None]:
    closed = [number for number, kind in environment.streams.items() if kind == "closed"]

    def prepare() -> None:
        for number, descriptor in streams.items():
            os.dup2(descriptor, number)
        for number in closed:
            os.close(number)
        if environment.prepare is not None:
            environment.prepare()

    return prepare


@contextlib.contextmanager
def _opened(kinds: Mapping[int, str], here: Path) -> Iterator[tuple[dict[int, int], Callable[[], None]]]:
    """Yield an open descriptor for each stream that is not closed, and what to call once the process has started."""
    descriptors: dict[int, int] = {}
    late: list[int] = []
    readers: list[threading.Thread] = []
    for number in range(3):
        kind = kinds.get(number, "file" if number else "null")
        if kind in ("broken", "closing", "nonblocking", "socket", "gone socket"):
            ours, theirs = (one.detach() for one in socket.socketpair()) if "socket" in kind else os.pipe()
            if kind in ("broken", "gone socket"):
                os.close(ours)
            elif kind == "closing":
                late.append(ours)
            else:
                readers.append(threading.Thread(target=_drain, args=(ours,)))
            os.set_blocking(theirs, kind != "nonblocking")
            descriptors[number] = theirs
        elif kind != "closed":
            names = {"full": "/dev/full", "null": "/dev/null", "read-only": "/dev/zero"}
            flags = os.O_RDONLY if kind == "read-only" or not number else os.O_WRONLY | os.O_CREAT
            descriptors[number] = os.open(names.get(kind, here / f"stream-{number}"), flags, 0o666)

    def started() -> None:
        for one in (*descriptors.values(), *late):
            os.close(one)
        for reader in readers:
            reader.start()

    yield dict(descriptors), started
    for reader in readers:
        reader.join()


def _drain(descriptor: int) -> None:
    with open(descriptor, "rb") as pipe:
        while pipe.read(100):
            pass


def _read(here: Path) -> str:
    paths = [here / f"stream-{number}" for number in (1, 2)]
    return "\n".join(path.read_text("utf-8", "replace") for path in paths if path.is_file())


def draw(n: int, seed: int, verbs: Sequence[str]) -> list[tuple[str, Environment]]:
    """Return `n` pairs of a verb and an environment: each environment once before any comes again."""
    random = Random(seed)
    known = [one for one in environments() if not one.root or os.geteuid() == 0]
    chosen: list[tuple[str, Environment]] = []
    while len(chosen) < n:
        random.shuffle(known)
        chosen += [(random.choice(verbs), one) for one in known]
    return chosen[:n]


if __name__ == "__main__":  # python environments.py FOLDER VERBS [WORD IN THE NAME]
    bench = Bench(Path(sys.argv[1]) / "in", Path(sys.argv[1]) / "model")
    wanted = sys.argv[3] if len(sys.argv) > 3 else ""
    number = 0
    for one in environments():
        if wanted in one.name:
            for verb in sys.argv[2].split(","):
                number += 1
                out = Path(sys.argv[1]) / f"case-{os.getpid()}-{number}"
                code, printed, fault = bench.run(verb, one, out)
                print(f"{'FAULT' if fault else 'ok   '} {code:3} {verb} {one.name[:60]!r} {fault}", flush=True)
                if fault or code:
                    print("      " + "\n      ".join(printed.strip().splitlines()[-3:])[:700], flush=True)
