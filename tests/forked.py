"""Processes without the seconds of imports: each is forked from a server that has imported kinject and its libraries, no more.

`Popen` is subprocess.Popen: the process has its own number, streams, folder, environment, session and exit status, takes
signals and can be killed. It forks for `python -m MODULE`, `python -c CODE` and `python SCRIPT`; everything else is
started as it is: other programs, other options of the interpreter, `preexec_fn`, terminals and closed streams, and an
environment that differs in a variable that a library may read while it is imported. A study's workers are forked, too.
Linux only.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import re
import runpy
import selectors
import signal
import socket
import stat
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LATE = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_\w+|TORCHELASTIC_\w+|ACCELERATE_\w+|PYTEST_\w+|PYTHONPATH|"
    r"TORCH_NCCL_ASYNC_ERROR_HANDLING|TMPDIR|COLUMNS|\w*KEY|OPENAI_\w+|KINJECT_\w+|WANDB_\w+|TENSORBOARD_\w+|MLFLOW_\w+|"
    r"RAY_\w+|PYTHONBREAKPOINT|"
    r"GOMP_SPINCOUNT|TOKENIZERS_PARALLELISM|HF_HUB_DISABLE_TELEMETRY|MPLBACKEND"  # kinject sets these
)
"""Variables that are read after the imports, if at all: they may differ from the server's."""
_LENGTH = 8
_server: Path | None = None
"""The socket of the server; `use` sets it."""
_started_with: dict[str, str] = {}
"""The environment with which a process is forked: the server's, and what libraries have added in this process."""


class Popen(subprocess.Popen):
    """A subprocess.Popen that forks where it can."""

    _connection: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, *rest: Any) -> None:  # fmt: skip
        (
            p2cread,
            p2cwrite,
            c2pread,
            c2pwrite,
            errread,
            errwrite,
            _,
            gid,
            gids,
            uid,
            umask,
            session,
            group,
        ) = rest
        streams = [
            descriptor if descriptor != -1 else n
            for n, descriptor in enumerate((p2cread, c2pwrite, errwrite))
        ]
        environment = dict(os.environ if env is None else env)
        special = (
            (executable, preexec_fn, gid, gids, uid) != (None,) * 5
            or pass_fds
            or shell
            or not close_fds
        )
        if not special and umask == -1 and _can_fork(args, environment, streams):
            request = {"words": [os.fspath(word) for word in args][1:], "cwd": os.fspath(cwd or os.getcwd()),
                       "environment": environment, "session": session, "group": group}  # fmt: skip
            with contextlib.suppress(
                ConnectionRefusedError
            ):  # the server has ended: its log says why
                self._connection = _connect()
        if self._connection is None:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                                   creationflags, shell, *rest)  # fmt: skip
            return
        _send(self._connection, request, streams)
        self.pid = int(_receive(self._connection))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._connection is None:
            return super()._try_wait(wait_flags)
        with selectors.DefaultSelector() as selector:
            selector.register(self._connection, selectors.EVENT_READ)
            if not selector.select(0 if wait_flags else None):
                return 0, 0
        status = int(_receive(self._connection))
        self._connection.close()
        return self.pid, status

    def _internal_poll(self, *rest: Any, **others: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(*rest, **others)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                number, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if number:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _can_fork(args: Any, environment: dict[str, str], streams: Sequence[int]) -> bool:
    if (
        _server is None
        or isinstance(args, (str, bytes))
        or os.fspath(args[0]) != sys.executable
        or len(args) < 2
    ):
        return False
    option = next((str(word) for word in args[1:] if word != "-u"), "-")
    if option.startswith("-") and option not in ("-m", "-c"):
        return False
    changed = _early(environment).items() ^ _early(_started_with).items()
    if changed:
        with open(f"{_server}.log", "a") as log:
            print("not forked:", args[1:4], *sorted({name for name, _ in changed}), file=log)
        return False
    try:
        return not any(os.isatty(stream) or not os.fstat(stream) for stream in streams)
    except OSError:  # closed
        return False


def inherit(environment: Mapping[str, str]) -> None:
    """Fork in spite of what a library has put into `environment` since: sklearn, ray and others do when they are imported."""
    _started_with.clear()
    _started_with.update(environment)


def _early(environment: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not LATE.fullmatch(name)}


def use(path: Path, environment: Mapping[str, str]) -> None:
    """Fork from the server at the socket `path`, which the first process that uses it starts, with `environment`.

    It ends with the last of these processes.
    """
    global _server
    if not sys.platform.startswith("linux") or _server == path:
        return
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(path))
            listener.listen(64)  # who connects before the imports are done waits
            with open(f"{path}.log", "ab") as log:
                server = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno()), str(path)], pass_fds=[listener.fileno()],
                    env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                )  # fmt: skip
            server.returncode = 0  # nobody waits for it: it ends after this process
            listener.close()
        _server = path
        with contextlib.suppress(ConnectionRefusedError):
            lease = _connect()
            _send(lease, {}, [])
            atexit.register(lease.close)


def _connect() -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(str(_server)):
        connection.close()
        raise ConnectionRefusedError(_server)
    return connection


def _send(connection: socket.socket, request: Any, streams: Sequence[int]) -> None:
    text = json.dumps(request).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))] if streams else []
    connection.sendmsg([str(len(text)).encode().rjust(_LENGTH)], rights)
    connection.sendall(text)


def _receive(connection: socket.socket) -> bytes:
    received = connection.recv(_LENGTH, socket.MSG_WAITALL)
    if not received:
        raise ConnectionError(f"the server of forked processes has ended: see {_server}.log")
    return received


def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request until no process that uses the server is left; return the request in the fork."""
    children: dict[int, tuple[int, list[str], socket.socket]] = {}
    leases: set[socket.socket] = set()
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd in children:
                number, words, connection = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status, used = os.wait4(number, 0)
                print(f"{used.ru_utime + used.ru_stime:.2f} s", words, file=sys.stderr, flush=True)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(str(status).encode().rjust(_LENGTH))
                connection.close()
            elif key.fileobj is not listener:  # a process that used the server has ended
                selector.unregister(key.fileobj)
                key.fileobj.close()
                leases.remove(key.fileobj)
                if not leases:
                    sys.exit()
            else:
                connection, _ = listener.accept()
                streams: list[int] = []
                try:
                    head, streams, *_ = socket.recv_fds(connection, _LENGTH, 3)
                    request = json.loads(connection.recv(int(head), socket.MSG_WAITALL))
                except (
                    ValueError,
                    ConnectionError,
                ) as error:  # its process was killed while it asked
                    print(f"not forked: {error!r}", file=sys.stderr, flush=True)
                    connection.close()
                    for stream in streams:
                        os.close(stream)
                    continue
                if "words" not in request:
                    leases.add(connection)
                    selector.register(connection, selectors.EVENT_READ)
                    continue
                number = os.fork()
                if not number:
                    selector.close()
                    for other in (
                        listener,
                        connection,
                        *leases,
                        *(one for *_, one in children.values()),
                    ):
                        other.close()
                    for descriptor in children:
                        os.close(descriptor)
                    return request, streams
                for stream in streams:
                    os.close(stream)
                descriptor = os.pidfd_open(number)
                children[descriptor] = number, request["words"], connection
                selector.register(descriptor, selectors.EVENT_READ)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(str(number).encode().rjust(_LENGTH))


def become(request: dict[str, Any], streams: Sequence[int]) -> None:
    """Be `python WORDS` in this process."""
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    for stream in streams:
        os.close(stream)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    inherit(os.environ)
    os.chdir(request["cwd"])
    import numpy

    numpy.random.seed(int.from_bytes(os.urandom(4)))
    plain = subprocess.Popen
    for module in list(sys.modules.values()):  # some say `from subprocess import Popen`
        if vars(module).get("Popen") is plain:
            module.Popen = Popen
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: (
        _Context() if method == "forkserver" else context(method)
    )
    paths = [
        path for path in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if path
    ]
    sys.path[:0] = [path for path in paths if path not in sys.path]
    _forget_another_kinject(paths)
    _run(request["words"])


def _forget_another_kinject(paths: Sequence[str]) -> None:
    """Let a process whose first `paths` have a kinject of their own import that one."""
    import kinject

    imported = Path(kinject.__file__).parent
    own = next((folder for path in paths if (folder := Path(path, "kinject")).is_dir()), imported)
    if own.samefile(imported):
        return
    for name in [name for name in sys.modules if name.partition(".")[0] == "kinject"]:
        del sys.modules[name]


def _run(words: list[str]) -> None:
    while words[0] == "-u":
        sys.stdout.reconfigure(write_through=True)
        words = words[1:]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        if not hasattr(sys.modules.get(words[1]), "__path__"):  # of a package its __main__ runs
            sys.modules.pop(words[1], None)  # runpy warns of a module that is there
        runpy._run_module_as_main(words[1])
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)  # noqa: S102
    else:
        sys.argv = words
        path = Path(words[0])
        sys.path.insert(0, str(path.resolve().parent))
        main.__file__ = words[0]
        exec(compile(path.read_bytes(), words[0], "exec"), main.__dict__)  # noqa: S102


class _Worker(multiprocessing.context.ForkProcess):
    """A worker that holds no other end of a pipe than its own, as one that was not forked from its parent."""

    def run(self) -> None:
        descriptors = {argument.fileno() for argument in self._args if hasattr(argument, "fileno")}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if int(name) not in descriptors and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.close(int(name))
        super().run()


class _Context(multiprocessing.context.ForkContext):
    """Forks a study's workers from the study's process instead of from one that must import everything first."""

    Process = _Worker


def import_libraries() -> None:
    """Import what most processes of kinject do, so that those forked hereafter have it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import kinject  # noqa: I001 (first: it leaves out what bitsandbytes logs while it is imported)
        import accelerate.commands.launch  # noqa: F401
        import bitsandbytes  # noqa: F401
        import datasets  # noqa: F401
        import matplotlib.figure  # noqa: F401
        import scipy.stats  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401
        import trl.trainer.sft_trainer  # noqa: F401

        # Half a second in each of some fifty processes.
        import kinject.augment.run
        import kinject.cli
        import kinject.eval.run
        import kinject.study.run
        import kinject.train.setup  # noqa: F401
    threads = {path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")}
    assert threads <= {Path("/proc/self/comm").read_text().strip(), "jemalloc_bg_thd"}, (
        f"no fork has {threads}"
    )
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    sys.path.pop(0)
    _server = Path(sys.argv[2])
    _started_with.update(os.environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ |= {
        "MPLBACKEND": "agg",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    import_libraries()
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
