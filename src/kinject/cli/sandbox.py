"""kinject sandbox and kinject demo."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kinject.cli import Outcome, option, verb
from kinject.cli.servers import serve
from kinject.terminal import format_count, show


@verb(
    "sandbox build",
    option("--root", type=Path, default=Path(), help="folder for data/ and eval/ (default: here)"),
)
def _build(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_chat_questions, write_sandbox

    return _show_paths((*write_sandbox(arguments.root), *write_chat_questions(arguments.root)))


def _show_paths(paths: Iterable[Path], about: str = "") -> Outcome:
    written = list(paths)
    for path in written:
        show(f"{path}{about}")
    return {"written": written}, 0


@verb(
    "sandbox corpus",
    option(
        "--out",
        type=Path,
        default=Path("runs/sandbox/base-corpus.jsonl"),
        help="default: %(default)s",
    ),
)
@verb(
    "sandbox chat",
    option(
        "--out", type=Path, default=Path("runs/sandbox/chat.jsonl"), help="default: %(default)s"
    ),
)
def _rows(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_base_corpus, write_dialogues

    write = write_base_corpus if arguments.action == "corpus" else write_dialogues
    return _show_paths([arguments.out], f": {format_count(write(arguments.out), 'row')}")


@verb("sandbox base", option("--out", type=Path, help="run folder (default: runs/sandbox/base)"))
@verb(
    "sandbox instruct",
    option("--out", type=Path, help="run folder (default: runs/sandbox/instruct)"),
)
def _model(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import BASE, INSTRUCT

    run = INSTRUCT if arguments.action == "instruct" else BASE
    folder = arguments.out or run.run_dir
    text = ": " if run.write(folder) else ": already there: "
    if run.is_in(folder):
        text += f"the {run.name} model that ships"
    else:
        text += f"a model of {run.recipe} that was trained here"
    return _show_paths([folder / "model"], text)


@verb(
    "sandbox sentences",
    option("--out", type=Path, default=Path("runs/sandbox"), help="folder (default: %(default)s)"),
)
def _sentences(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_sentence_rows

    return _show_paths(write_sentence_rows(arguments.out))


@verb(
    "sandbox serve",
    option("--port", type=int, default=8000, help="0: any free port (default: %(default)s)"),
)
def _serve(arguments: argparse.Namespace) -> Outcome:
    from kinject.augment.sandbox import SandboxServer

    return serve(partial(SandboxServer, arguments.port), arguments, "listening")


@verb(
    "demo",
    option("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here"),
    option(
        "--real", action="store_true", help="a real chat model of 135M parameters, in runs/real"
    ),
)
def _demo(arguments: argparse.Namespace) -> Outcome:
    from kinject.demo import REAL_REPORT, REPORT, demo

    report = demo(arguments.out, real=arguments.real)
    page = arguments.out / (REAL_REPORT if arguments.real else REPORT)
    show(f"report: {page}")
    show(f"figure: {page.parent / 'figures' / 'accuracy.png'}")
    show(f"what next: {shlex.join(['kinject', 'view', str(arguments.out), '--open'])}", flush=True)
    return {"page": page, "report": report}, 0
