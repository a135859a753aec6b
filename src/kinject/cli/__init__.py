"""The command line: parse, call one function, print. Nothing here imports torch before a verb runs."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shlex
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from kinject.disk import fix_for, is_system_failure
from kinject.errors import KinjectError, Terminated
from kinject.process import is_first_process, is_launched
from kinject.signals import exit_code, terminable
from kinject.terminal import Formatter, show

_VERBS = (
    "augment", "questions", "train", "merge", "eval", "compare", "study", "bench", "plan", "doctor", "find-lr", "find-batch",
    "report", "sandbox", "check", "recipes", "schema",
)  # fmt: skip

_DESCRIPTION = """\
Turn documents into knowledge that a language model demonstrably has.

  documents --augment--> corpus --train--> model --eval--> answers, report"""

_EPILOG = """\
exit codes: 0 done, 1 finished but incomplete (the output names what is missing), 2 unusable input,
130 interrupted (Ctrl-C), 143 terminated (SIGTERM): the last line is the command that resumes

examples:
  kinject                                    the next step in this folder
  kinject augment                            recipes/augment.yaml: documents to a corpus
  kinject train recipes/cpt.yaml             corpus to a model
  kinject eval                               recipes/eval.yaml: models against questions, with a report
  kinject train recipes/cpt.yaml trainer.learning_rate=1e-4 run_dir=runs/cpt-slow"""


_STEPS = (
    ("runs/sandbox/base-corpus.jsonl", "kinject sandbox corpus", "write the base model's training corpus"),
    ("runs/sandbox/base/model", "kinject train recipes/sandbox/base.yaml", "train the base model (minutes)"),
    ("runs/augment/corpus.jsonl", "kinject augment", "paraphrase the documents"),
    ("runs/cpt/model", "kinject train recipes/cpt.yaml", "train on the paraphrases"),
    ("runs/sandbox/repeat/model", "kinject train recipes/sandbox/repeat.yaml", "the control: the originals, repeated"),
    ("runs/eval/report.html", "kinject eval", "measure what was learned and what forgotten"),
)
"""The main job: (output, command, purpose)."""


def program() -> int:
    """Run `main` as a program. A signal after its end has its default effect, so that no traceback follows the result."""
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
            show(f"\nkinject {verb}: {render_resume_hint(verb, words, stop)}", file=sys.stderr)
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
    """Parse and run a command; return its exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(words)
    if rest and (not hasattr(arguments, "arguments") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no overrides after an option
        arguments.arguments = [*arguments.arguments, *rest]
    _quieten_libraries()
    if arguments.verb is None:
        show(render_next_step())
        return 0
    code = int(arguments.run(arguments))
    sys.stdout.flush()
    return code


def _quieten_libraries() -> None:
    """Log kinject's messages to stderr, and only errors and useful warnings of the libraries."""
    on_screen = logging.StreamHandler(sys.stderr)
    on_screen.setFormatter(Formatter())
    logging.basicConfig(level=logging.INFO, handlers=[on_screen], force=True)
    for noisy in (
        "httpx", "httpx2", "httpcore", "openai", "datasets", "bitsandbytes", "bm25s", "matplotlib", "fontTools", "urllib3",
        "huggingface_hub",
    ):  # fmt: skip
        logging.getLogger(noisy).setLevel(logging.ERROR)
    for library in ("transformers", "peft", "trl", "accelerate", "datasets", "torch"):
        for category in (FutureWarning, DeprecationWarning):  # they concern other libraries
            warnings.filterwarnings("ignore", category=category, module=library)
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # threads that spin long slow each other down on a busy machine
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def render_resume_hint(verb: str, words: Sequence[str], stop: KeyboardInterrupt) -> str:
    """Return the message for a user whose command, `words` after ``kinject``, was stopped."""
    how = "terminated" if isinstance(stop, Terminated) else "interrupted"
    again = list(words)
    if verb == "train":
        again = [*(word for word in again if word not in ("--overwrite", "--resume")), "--resume"]
    launcher = " (under the same launcher)" if is_launched() else ""
    return f"{how}. Finished work is kept. Resume with{launcher}: {shlex.join(['kinject', *again])}"


def render_next_step() -> str:
    """Return the steps of the main job, with those that are done in this folder marked."""
    lines = [
        _DESCRIPTION, "",
        "verbs: kinject --help    one verb: kinject VERB --help    shipped recipes: kinject recipes", "",
    ]  # fmt: skip
    if not Path("recipes/augment.yaml").exists():
        lines.append(
            "Next: kinject recipes copy eval    puts recipes, documents and questions of the main job into this folder"
        )
        return "\n".join(lines)
    n_done = next((index for index, (output, _, _) in enumerate(_STEPS) if not Path(output).exists()), len(_STEPS))
    lines.append("The main job, on the embedded sandbox (in a checkout, make demo runs all of it):")
    width = max(len(command) for _, command, _ in _STEPS)
    for index, (_, command, purpose) in enumerate(_STEPS):
        mark = "done" if index < n_done else "next" if index == n_done else ""
        lines.append(f"  {mark:4}  {command:{width}}  {purpose}")
    if n_done == len(_STEPS):
        lines.append("\nAll done: open runs/eval/report.html. Then your own documents: see docs/real-data.md.")
    return "\n".join(lines)


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
    """Prints the version; reads the package's metadata only then."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and stop")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print and exit."""
        from importlib.metadata import version

        show(f"kinject {version('kinject')}")
        parser.exit()
