"""kinject sandbox and kinject demo."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kinject.cli import Outcome, add_verb
from kinject.errors import InputError
from kinject.process import exit_code
from kinject.terminal import show

_ROWS = {
    "corpus": ("runs/sandbox/base-corpus.jsonl", "write the base model's training corpus"),
    "chat": ("runs/sandbox/chat.jsonl", "write the dialogues that teach the base model to chat"),
}
"""Action that writes rows -> their file, and its help."""


def add_sandbox(verbs: Any) -> None:
    """Add the verb and its actions."""
    parser = add_verb(verbs, "sandbox")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    build = actions.add_parser("build", help="write documents and questions")
    build.add_argument("--root", type=Path, default=Path(), help="folder for data/ and eval/ (default: here)")
    build.set_defaults(run=_build)
    for name, (out, summary) in _ROWS.items():
        rows = actions.add_parser(name, help=summary)
        rows.add_argument("--out", type=Path, default=Path(out), help="default: %(default)s")
        rows.set_defaults(run=_rows)
    for name in ("base", "instruct"):
        model = actions.add_parser(
            name, help=f"copy the {name} model that ships, as the run of recipes/sandbox/{name}.yaml"
        )
        model.add_argument("--out", type=Path, help=f"run folder (default: runs/sandbox/{name})")
        model.set_defaults(run=_model)
    sentences = actions.add_parser("sentences", help="write rows that teach to answer in sentences, and to abstain")
    sentences.add_argument("--out", type=Path, default=Path("runs/sandbox"), help="folder (default: %(default)s)")
    sentences.set_defaults(run=_sentences)
    serve = actions.add_parser("serve", help="answer /v1/chat/completions and /v1/models on this machine until Ctrl-C")
    serve.add_argument("--port", type=int, default=8000, help="0: any free port (default: %(default)s)")
    serve.set_defaults(run=_serve)


def _build(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_chat_questions, write_sandbox

    return _show_paths((*write_sandbox(arguments.root), *write_chat_questions(arguments.root)))


def _show_paths(paths: Iterable[Path], about: str = "") -> Outcome:
    written = list(paths)
    for path in written:
        show(f"{path}{about}")
    return {"written": written}, 0


def _rows(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_base_corpus, write_dialogues

    write = write_base_corpus if arguments.action == "corpus" else write_dialogues
    return _show_paths([arguments.out], f": {write(arguments.out):,} rows")


def _model(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import BASE, INSTRUCT

    run = INSTRUCT if arguments.action == "instruct" else BASE
    folder = arguments.out or run.run_dir
    written = run.write(folder)
    model = (
        f"the {run.name} model that ships" if run.is_in(folder) else f"a model of {run.recipe} that was trained here"
    )
    return _show_paths([folder / "model"], f": {'' if written else 'already there: '}{model}")


def _sentences(arguments: argparse.Namespace) -> Outcome:
    from kinject.sandbox import write_sentence_rows

    return _show_paths(write_sentence_rows(arguments.out))


def _serve(arguments: argparse.Namespace) -> Outcome:
    from kinject.augment.sandbox import SandboxServer

    if not 0 <= arguments.port < 65536:
        raise InputError(f"--port: found {arguments.port}, allowed: 0 to 65535.")
    try:
        with SandboxServer(arguments.port) as server:
            show(f"listening: {server.url} (Ctrl-C stops it)", flush=True)
            arguments.announce({"url": server.url})
            server.serve_forever()
    except KeyboardInterrupt as stop:
        return None, exit_code(stop)  # there is nothing to resume
    return None, 0


def add_demo(verbs: Any) -> None:
    """Add `kinject demo`."""
    parser = add_verb(verbs, "demo")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    parser.add_argument("--from-scratch", action="store_true", help="train the base model instead of copying it")
    parser.add_argument("--real", action="store_true", help="a real chat model of 135M parameters, in runs/real")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> Outcome:
    from kinject.demo import REAL_REPORT, REPORT, demo

    if arguments.real and arguments.from_scratch:
        raise InputError("--real and --from-scratch: the real model was trained by others. Leave one out.")
    report = demo(arguments.out, from_scratch=arguments.from_scratch, real=arguments.real)
    page = arguments.out / (REAL_REPORT if arguments.real else REPORT)
    show(f"report: {page}")
    show(f"figure: {page.parent / 'figures' / 'accuracy.png'}")
    show(f"what next: {shlex.join(['kinject', 'view', str(arguments.out), '--open'])}", flush=True)
    return {"page": page, "report": report}, 0
