"""kinject chat."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from kinject.errors import InputError
from kinject.terminal import show

if TYPE_CHECKING:
    from kinject.eval.chat import Chat

_DETAIL = """\
Ask models in the terminal, a line a question. MODEL is a run folder of kinject train (its base and
the tuned model answer side by side), or a model: a folder or a name on the hub. With --documents the
best passages precede each question. A model with a chat template sees the turns so far; one
without sees "Question: ... Answer:". Questions may come from a pipe.

lines with a meaning of their own:
  /reset      forget the turns so far
  /passages   passages on or off (with --documents)
  /quit       end, as does the end of the input

examples:
  kinject chat runs/cpt
  kinject chat runs/cpt --documents data/sandbox/documents.jsonl --k 1
  kinject chat runs/sandbox/instruct/model --base none --system "Answer in upper case."
  echo "Where was Aldrik Arndale born?" | kinject chat runs/cpt"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "chat",
        help="ask models in the terminal, tuned and base side by side",
        description=_DETAIL,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="run folder of kinject train, or a model")
    parser.add_argument("--base", help="model to ask beside it, or none (default: the base that the run names)")
    parser.add_argument(
        "--documents", nargs="+", default=[], metavar="FILE", help="documents (JSONL) whose passages are found"
    )
    parser.add_argument("--k", type=int, default=3, help="passages before a question (default: %(default)s)")
    parser.add_argument("--system", default="", help="text of the system's turn")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, help="most tokens of an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="of sampling; 0: the likeliest (default: %(default)s)"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.eval.chat import ChatSetup, find_models, open_chat

    for flag, value, least in (("--k", arguments.k, 1), ("--max-new-tokens", arguments.max_new_tokens, 1)):
        if value < least:
            raise InputError(f"{flag}: found {value}, allowed: {least} or more.")
    if not 0 <= arguments.temperature <= 10:
        raise InputError(f"--temperature: found {arguments.temperature:g}, allowed: 0 to 10.")
    models = find_models(arguments.model, arguments.base)
    setup = ChatSetup(
        models, tuple(arguments.documents), arguments.k, arguments.system, arguments.max_new_tokens,
        arguments.temperature,
    )  # fmt: skip
    chat = open_chat(setup)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        show(f"{' and '.join(models.values())}. /reset, /passages, /quit")
    while True:
        if is_terminal:
            show("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return 0
        if line.strip():
            if not is_terminal:
                show(f"> {line.strip()}")
            _answer(chat, line.strip())


def _answer(chat: Chat, line: str) -> None:
    if line == "/reset":
        chat.reset()
        show("the turns so far are forgotten")
    elif line == "/passages":
        if chat.retriever is None:
            show("no passages: start with --documents")
            return
        chat.with_passages = not chat.with_passages
        show(f"passages are {'on' if chat.with_passages else 'off'}")
    elif line.startswith("/"):
        show(f"{line}: unknown; there are /reset, /passages and /quit")
    else:
        try:
            chat.ask(line, lambda text: show(text, end="", flush=True))
        except InputError as error:
            show(f"\n{error}")
