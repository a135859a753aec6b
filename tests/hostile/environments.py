"""Draws environments: variables, streams, limits, folders and signals around a verb in a process of its own.

`draw(n, seed)` gives cases; `Bench.run` starts one and returns what is wrong with it. A verb in a hostile environment does
its whole work (exit 0, the same outputs as in a normal one), or all but its text for a stream that is full (exit 1), or
refuses in one line (exit 2). A signal ends it with 128 and its number, and the same command then finishes the work. It never
ends in a traceback.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
SECONDS = 300
HUNG = -9
TROUBLE = ("Traceback", "Exception ignored", "FATAL", "Fatal", "Logging error")
CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 0x1, 0x20, 0x1000, 0x4000, 0x40000


@dataclass(frozen=True)
class Environment:
    """One hostile environment. `codes` are the exit codes that it may end in; `prepare` runs in the child before its program."""

    name: str
    codes: tuple[int, ...] = (0,)
    variables: Mapping[str, str | None] = field(default_factory=dict)
    streams: Mapping[int, str] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None
    root: bool = False
    """Whether only root can make it."""
    but: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The exit codes of single verbs."""
    signals: tuple[tuple[float, int], ...] = ()
    """Signals with their moments, in lengths of a normal run."""
    group: bool = False
    """Whether all processes of the verb get them."""


def _limit(name: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(name, (value, value))


def _call(*results: int) -> None:
    """Raise the system's error if a call of the C library failed."""
    if any(results):
        raise OSError(ctypes.get_errno(), "mount")


def _own_mounts() -> ctypes.CDLL:
    """Return the C library, in a process that has mounts of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    _call(libc.unshare(CLONE_NEWNS), libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    return libc


def _hide(place: str) -> Callable[[], None]:
    """Hide a folder behind an empty one that is read-only, or a file behind /dev/null."""

    def prepare() -> None:
        libc = _own_mounts()
        if Path(place).is_dir():
            _call(libc.mount(b"tmpfs", place.encode(), b"tmpfs", MS_RDONLY, b"size=4k"))
        else:
            _call(libc.mount(b"/dev/null", place.encode(), None, MS_BIND, None))

    return prepare


def _read_only_cwd() -> None:
    libc, here = _own_mounts(), os.getcwd().encode()
    _call(
        libc.mount(here, here, None, MS_BIND, None),
        libc.mount(here, here, None, MS_BIND | MS_REMOUNT | MS_RDONLY, None),
    )
    os.chdir(here)


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
    "TOKENIZERS_PARALLELISM": ("", "maybe"), "PATH": ("", "/nowhere"), "PYTHONOPTIMIZE": ("1", "2"),
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
    cases = [
        Environment(f"{name} is {description}", (0, 2), {name: value})
        for name in (*LAUNCH, *THREADS)
        for description, value in NUMBERS.items()
    ]
    cases += [
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
                cases.append(Environment(f"{stream} {kind}", codes, streams={number: kind}))
    cases += [
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
        Environment("a user without a name", root=True, prepare=_hide("/etc/passwd"), variables={"HOME": None, "USER": None}),
        Environment("no /dev/shm", root=True, prepare=_hide("/dev/shm")),  # noqa: S108
        Environment("a read-only HOME", root=True, prepare=_hide("/mnt"), variables={"HOME": "/mnt"}),
        Environment("a read-only working directory", root=True, prepare=_read_only_cwd),
        Environment("a working directory that was deleted", (2,), prepare=_delete_cwd, but={"help": (0,), "next": (0,)}),
        Environment("umask 777", (0, 2), prepare=lambda: void(os.umask(0o777))),
        Environment("umask 0", prepare=lambda: void(os.umask(0))),
        Environment("16 open files", (0, 2), prepare=_limit(resource.RLIMIT_NOFILE, 16)),
        Environment("40 open files", (0, 2), prepare=_limit(resource.RLIMIT_NOFILE, 40)),
        Environment("64 open files", prepare=_limit(resource.RLIMIT_NOFILE, 64)),
        Environment("256 open files", prepare=_limit(resource.RLIMIT_NOFILE, 256)),
        Environment("files of 0 bytes", (1, 2), prepare=_limit(resource.RLIMIT_FSIZE, 0)),
        Environment("files of 2,000 bytes", (0, 1, 2), prepare=_limit(resource.RLIMIT_FSIZE, 2000)),
        Environment("files of 40,000 bytes", (0, 2), prepare=_limit(resource.RLIMIT_FSIZE, 40_000)),
        Environment("a stack of 256 KiB", (0, 2), prepare=_limit(resource.RLIMIT_STACK, 256 << 10)),
        Environment("no core file, no CPU priority", prepare=lambda: void(os.nice(19))),
    ]  # fmt: skip
    for mib in (60, 200, 500, 900, 2000):
        cases.append(Environment(f"{mib} MiB of addresses", (0, 2), prepare=_limit(resource.RLIMIT_AS, mib << 20)))
    ignored = {signal.SIGHUP: "under nohup", signal.SIGINT: "in the background", signal.SIGQUIT: "in the background"}
    for number, origin in ignored.items():
        moments = tuple((moment, int(number)) for moment in (0.3, 0.6))
        cases.append(Environment(f"{number.name} {origin}", prepare=_ignore(number), signals=moments))
    for stopped in (0.2, 0.5, 0.8):
        moments = ((stopped, int(signal.SIGSTOP)), (stopped + 1, int(signal.SIGCONT)))
        cases.append(Environment(f"stopped at {stopped} and continued", signals=moments, group=True))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        for moment in (0.25, 0.5, 0.75, 0.95):
            moments = ((moment, int(number)),)
            cases.append(Environment(f"{number.name} at {moment}", (0, 128 + number), signals=moments))
            cases.append(
                Environment(f"{number.name} at {moment}, twice", (0, 128 + number), signals=moments * 2, group=True)
            )
    return cases


def _ignore(number: signal.Signals) -> Callable[[], None]:
    return lambda: void(signal.signal(number, signal.SIG_IGN))


def void(_: object) -> None:
    """Take a value and return nothing."""


NORMAL = Environment("normal")
QUICK = ("check", "help", "recipes", "next", "augment")
"""Verbs that import no torch."""


@dataclass
class Bench:
    """A folder with inputs for the verbs, and what each leaves in a normal environment."""

    folder: Path
    model: Path | None = None
    normal: dict[str, Mapping[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    printed: dict[str, str] = field(default_factory=dict)

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
        here.mkdir(parents=True, exist_ok=True)
        recipe = here / "recipe.yaml"
        if verb in sections:
            recipe.write_text(yaml.safe_dump({"run_dir": str(run), **sections[verb]}), encoding="utf-8")
        return {
            "check": ["recipes", "check", str(ROOT / "recipes/augment.yaml")], "help": ["plan", "--help"],
            "schema": ["recipes", "schema"],
            "recipes": ["recipes"], "next": [], "plan": ["plan", str(recipe), "--no-calibration"],
        }.get(verb, [verb, str(recipe)])  # fmt: skip

    def run(self, verb: str, environment: Environment, here: Path) -> tuple[int, str, str]:
        """Run a verb; return its exit code, what it wrote to the streams that can be read, and what is wrong, "" for nothing."""
        if verb not in self.normal and environment.name != NORMAL.name:
            self.measure(verb, here.with_name(f"normal-{verb}"))
        words = self.words(verb, here)
        code, printed = self._run(verb, words, environment, here)
        fault = self._fault(verb, environment, here, code, printed)
        if code not in (0, 1, 2) and not fault:
            again = [*words, "--resume"] if verb == "train" else words
            code_again, printed_again = self._run(verb, again, NORMAL, here)
            fault = self._fault(verb, NORMAL, here, code_again, printed_again)
            fault = fault and f"run again: {fault}\n{printed_again}"
        return code, printed, fault

    def measure(self, verb: str, here: Path) -> None:
        """Run a verb in a normal environment; keep its outputs and its length."""
        began = time.monotonic()
        words = self.words(verb, here)
        code, self.printed[verb] = self._run(verb, words, NORMAL, here)
        assert code == 0, self.printed[verb]
        self.seconds[verb], self.normal[verb] = time.monotonic() - began, outputs(here)

    def _run(self, verb: str, words: Sequence[str], environment: Environment, here: Path) -> tuple[int, str]:
        cwd = here / "cwd"
        cwd.mkdir(parents=True, exist_ok=True)
        with _opened(environment.streams, here) as (streams, close_after):
            process = subprocess.Popen(
                [sys.executable, "-m", "kinject.cli", *words], cwd=cwd, env=_variables(environment),
                preexec_fn=_prepare(environment, streams), pass_fds=tuple(streams.values()), close_fds=True,
                start_new_session=True,
            )  # fmt: skip
            close_after()
            began, length = time.monotonic(), self.seconds.get(verb, 0.0)
            try:
                for moment, number in environment.signals:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(max(0.0, began + moment * length - time.monotonic()))
                    if process.poll() is None:
                        (os.killpg if environment.group else os.kill)(process.pid, number)
                code = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                code = HUNG
        return code, _read(here)

    def _fault(self, verb: str, environment: Environment, here: Path, code: int, printed: str) -> str:
        codes = environment.but.get(verb, environment.codes)
        outside = code in [-number for _, number in environment.signals]  # before our first line, or after our last
        if outside and ("Resume with" in printed or printed.count("\n") in (1, self.printed[verb].count("\n"))):
            return ""
        if code == -signal.SIGINT and "KeyboardInterrupt" in printed and "in program" not in printed:
            return ""  # Python's own, while it starts
        if code not in codes:
            return f"exit code {code}, not {codes}"
        faults = [word for word in TROUBLE if word in printed]
        silent = 2 in environment.streams or environment.name == "files of 0 bytes"
        if code == 2 and not silent and "kinject" not in printed:
            faults.append("exit code 2 without a line")
        left = outputs(here)
        if code in (0, 1):
            different = {name for name in {*left, *self.normal[verb]} if left.get(name) != self.normal[verb].get(name)}
            faults += [f"other outputs: {sorted(different)[:5]}"] if different else []
        return "; ".join(faults)


TIMED = {
    "manifest.json", "timing.jsonl", "log.jsonl", "report.html", "report.md", "recipe.yaml", "SHA256SUMS", "report.json",
    "cache.sqlite", "answers.jsonl",
}  # fmt: skip
"""Outputs that hold times, or the folder's own path."""


def outputs(here: Path) -> dict[str, str]:
    """Return the hash of each output below a case's folder, of those that hold times their presence."""
    hashes = {}
    for run in (here / "Läufe-\u4e2d", here / "t"):
        for path in sorted(run.rglob("*")):
            name = str(path.relative_to(here))
            if path.is_file() and path.name != ".lock" and "harness" not in name:
                timed = path.name in TIMED or path.suffix in (".png", ".svg")
                hashes[name] = "there" if timed else hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


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
            flags = os.O_RDONLY if kind == "read-only" or not number else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
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


if __name__ == "__main__":  # python environments.py FOLDER VERBS [WORD|WORD in the name]
    folder, verbs, *words = sys.argv[1:]
    bench = Bench(Path(folder) / "in", Path(folder) / "model")
    chosen = [one for one in environments() if any(word in one.name for word in (words or [""])[0].split("|"))]
    for number, (one, verb) in enumerate((one, verb) for one in chosen for verb in verbs.split(",")):
        code, printed, fault = bench.run(verb, one, Path(folder) / f"case-{os.getpid()}" / str(number))
        print(f"{'FAULT' if fault else 'ok   '} {code:3} {verb} {one.name[:60]!r} {fault}", flush=True)
        if code:
            print("      " + "\n      ".join(printed.strip().splitlines()[-3:])[:700], flush=True)
