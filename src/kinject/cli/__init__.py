"""The command line: parse, call one function, print. Nothing here imports torch before a verb runs."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Sequence

from kinject.cli.endings import exit_code, render_how_to_go_on
from kinject.disk import fix_for, is_system_failure
from kinject.errors import KinjectError
from kinject.process import is_first_process
from kinject.signals import terminable
from kinject.terminal import Formatter, show

_VERBS = (
    "augment",
    "questions",
    "train",
    "merge",
    "eval",
    "compare",
    "study",
    "bench",
    "plan",
    "doctor",
    "find-lr",
    "find-batch",
    "report",
    "sandbox",
    "check",
    "recipes",
    "schema",
)

_DESCRIPTION = """\
Turn documents into knowledge that a language model demonstrably has.

  documents --augment--> corpus --train--> model --eval--> answers, report"""

_EPILOG = """\
exit codes: 0 done, 1 finished but short (it says what is missing), 2 unusable input,
130 interrupted (Ctrl-C), 143 terminated (SIGTERM): it says how to go on

examples:
  kinject                                    what to do next in this folder
  kinject augment                            recipes/augment.yaml: documents to a corpus
  kinject train recipes/cpt.yaml             corpus to a model
  kinject eval                               recipes/eval.yaml: models against questions, with a report
  kinject train recipes/cpt.yaml trainer.learning_rate=1e-4 run_dir=runs/cpt-slow"""


def program() -> int:
    """Run `main` as a program. A signal after its end is the system's again, so that no traceback follows the result."""
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb = next((word for word in words if word in _VERBS), "")
    try:
        with terminable():
            return _run(words)
    except KinjectError as error:
        show(f"kinject {verb}: {error}" if "\n" not in str(error) else str(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        if is_first_process():
            show(f"\nkinject {verb}: {render_how_to_go_on(verb, words, stop)}", file=sys.stderr)
        return exit_code(stop)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not is_system_failure(error):
            raise
        place = f"{error.filename}: " if error.filename else ""
        show(f"kinject {verb}: {place}{error.strerror}. {fix_for(error)}", file=sys.stderr)
        return 2


def _run(words: Sequence[str]) -> int:
    """Parse and run; whatever ends it early is raised."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    if rest and (not hasattr(arguments, "arguments") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no more overrides once an option stood between
        arguments.arguments = [*arguments.arguments, *rest]
    _quieten_libraries()
    if arguments.verb is None:
        from kinject.cli.next_step import render_next_step

        show(render_next_step(_DESCRIPTION))
        return 0
    code = int(arguments.run(arguments))
    sys.stdout.flush()
    return code


def _quieten_libraries() -> None:
    """Say what kinject says, and of the libraries what concerns a user."""
    on_screen = logging.StreamHandler(sys.stderr)
    on_screen.setFormatter(Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[on_screen], force=True)
    for noisy in (
        "httpx",
        "httpx2",
        "httpcore",
        "openai",
        "datasets",
        "bitsandbytes",
        "bm25s",
        "matplotlib",
        "fontTools",
        "urllib3",
        "huggingface_hub",
    ):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for library in ("transformers", "peft", "trl", "accelerate", "datasets", "torch"):
        for category in (FutureWarning, DeprecationWarning):  # what the libraries say of one another
            warnings.filterwarnings("ignore", category=category, module=library)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that spin long starve each other on a busy machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kinject", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=_Version)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    for verb in _VERBS:
        importlib.import_module(f"kinject.cli.{verb.replace('-', '_')}").add_parser(verbs)
    return parser


class _Version(argparse.Action):
    """Prints the version; reads the package's metadata only when asked."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and stop")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import version

        show(f"kinject {version('kinject')}")
        parser.exit()
