"""Starts kinject over and over without importing torch each time: imports once, then forks a process for each command.

A study's workers are forked from it, too, instead of spawned.

Reads one JSON request a line: {"start": [words], "out": path, "err": path} is answered with the new process's number,
{"ended": number} with its exit status (null while it runs; -n: ended by signal n), {"wait": number} the same, waiting.
A process so started is the leader of its own session, as one that a shell or a batch system starts.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def serve() -> None:
    """Answer requests until the input ends."""
    children: dict[int, int | None] = {}
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "start" in request:
            number = os.fork()
            if not number:
                become(request)
            children[number] = answer = number
        else:
            number = request.get("wait", request.get("ended"))
            answer = children[number]
            if answer is None or answer == number:
                found, status = os.waitpid(number, 0 if "wait" in request else os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if found else None
                children[number] = answer
        print(json.dumps(answer), flush=True)


def become(request: dict[str, Any]) -> None:
    """Be `kinject WORDS` in this process, to the interpreter's end."""
    import kinject.study.executors
    from kinject.cli import program

    os.setsid()
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context("fork")
    kinject.study.executors._serve = partial(serve_without_others, kinject.study.executors._serve)
    targets = [os.open(os.devnull, os.O_RDONLY)]
    targets += [os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    for stream, target in enumerate(targets):
        os.dup2(target, stream)
    sys.argv = ["kinject", *request["start"]]
    sys.exit(program())


def serve_without_others(serve: Callable[..., None], pipe: Any, environment: Any) -> None:
    """Serve as a study's worker that holds no other end of a pipe than its own, as a spawned one does not."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if int(name) != pipe.fileno() and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
    serve(pipe, environment)


if __name__ == "__main__":
    import bitsandbytes  # noqa: F401
    import matplotlib.figure  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401
    import trl.trainer.sft_trainer  # noqa: F401

    torch.set_num_threads(1)
    serve()
