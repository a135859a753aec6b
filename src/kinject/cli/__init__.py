"""The command line: parse, call one function, print. Nothing here imports torch before a verb
runs."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import json
import logging
import os
import re
import shlex
import signal
import sys
import tomllib
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from kinject.cli.parsers import Parser, UsageError, VerbParser
from kinject.disk import (
    causes,
    find_runs,
    fix_for,
    is_file,
    listed_runs,
    next_command,
    system_failure,
)
from kinject.errors import InputError, KinjectError
from kinject.process import (
    exit_code,
    handled_by,
    is_first_process,
    is_launched,
    is_shortage,
    terminable,
)
from kinject.terminal import (
    aligned,
    format_count,
    log_to_screen,
    lost_output,
    protect_streams,
    show,
)
from kinject.version import package_version

if TYPE_CHECKING:
    from kinject.recipe.read import Verb

Outcome = tuple[Any, int]
"""A verb's result, which --json prints (None: it was announced, or another process has it), and its
exit code."""

_TABLE: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (files("kinject.cli") / "verbs.toml").read_text("utf-8")
)
"""The verbs and their actions, in the order of the help: one line about each, and its help text."""
_VERBS = {name: row["module"] for name, row in _TABLE.items() if "module" in row}
"""Verb -> the module of this package that has it."""

_Option = tuple[tuple[str, ...], dict[str, Any]]
_RUNS: dict[str, tuple[tuple[_Option, ...], dict[str, Any]]] = {}
"""Verb or action -> what it takes, and argparse's defaults: `run`, the function that does it."""


def incomplete(missing: int | Sized) -> int:
    """Return the exit code of a verb that has finished: 1 if anything is `missing`, else 0."""
    return 1 if missing else 0


def option(*names: str, **settings: Any) -> _Option:
    """Return an argument of a verb, as `add_argument` takes it.

    `group` is the title of a group of its help; of those that are `either`, one may be given.
    """
    return names, settings


def verb(
    name: str, *options: _Option, **defaults: Any
) -> Callable[[Callable[[argparse.Namespace], Outcome]], Callable[[argparse.Namespace], Outcome]]:
    """Let the function run the verb or action `name` of verbs.toml, with what it takes."""

    def register(
        run: Callable[[argparse.Namespace], Outcome],
    ) -> Callable[[argparse.Namespace], Outcome]:
        _RUNS[name] = options, {**defaults, "run": run}
        return run

    return register


SHARD_OPTIONS = (
    option(
        "--shard", metavar="I/N", help="only part I of N, in RUN_DIR/shards/I-of-N", either=True
    ),
    option(
        "--merge",
        action="store_true",
        help="make the result of all shards; asks nothing",
        either=True,
    ),
)
"""Of the verbs whose work jobs can divide."""


_DESCRIPTION = """\
Turn documents into knowledge that a language model demonstrably has.

  documents --augment--> corpus --train--> model --eval--> answers, report"""

_EPILOG = """\
exit codes: 0 done, 1 finished but incomplete (the output names what is missing), 2 unusable input,
3 too few questions to tell (eval), 70 a bug in kinject, with a traceback. Stopped by a signal:
128 + its number, and the last line is the command that resumes

examples:
  kinject                                    the runs of this folder, and the next step
  kinject try handbook/                      look at your documents, and get recipes for them
  kinject train recipes/cpt.yaml trainer.learning_rate=1e-4 run_dir=runs/cpt-slow"""


_BUG = (
    "kinject {verb}: this {error} is a bug in kinject, not in your input. Finished work is kept. "
    "Please report it to the developers\nof kinject, with the lines above, the recipe and the "
    "output of kinject doctor."
)

_SHORTAGE = (
    "this machine, or a limit on it (ulimit -a), has too little for this run: {}. Free some, or "
    "make the run smaller: kinject plan and kinject find-lr --batch estimate what fits."
)

_STOPPED = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
    signal.SIGQUIT: "quit",
    signal.SIGUSR1: "stopped by SIGUSR1",
}

_KEEP_NOTHING = ("chat", "compare", "doctor", "find-lr", "plan", "recipes")
"""Verbs that begin anew each time."""
_OPTIONS = {"copies": "copy"}
"""Name of a value -> its option, where that is not the same word."""
_PATH_FAULTS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)
_UNUSABLE_NAMES = (errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a name that no file has: in a recipe, or in a file of a run."""
_MOST_RUNS = 20


def program() -> int:
    """Run `main` as a program and return its exit code: its streams cannot fail, and a bug of ours
    has a code of its own.

    Before and after `main`, signals have the system's effect, so that no traceback follows the
    result.
    """
    # Python's own handler raises an exception anywhere; one that ignores the signal stays (nohup).
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    protect_streams()
    try:
        code = main()
    except KeyboardInterrupt as stop:  # a second signal, while the first was reported
        code = exit_code(stop)
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else 0
    except BaseException as error:  # noqa: BLE001
        # A bug, or a library's panic: its exit code must not be that of "finished but incomplete".
        traceback.print_exc()
        show(_BUG.format(verb=_verb(sys.argv[1:]), error=type(error).__name__), file=sys.stderr)
        code = 70
    # Not by BrokenPipeError, which a worker's pipe raises, too: such a fault ended with code 0.
    lost = lost_output()
    # A full disk behind > FILE: without its text the command has not done what it says.
    if lost is not None and code == 0:
        show(
            f"kinject {_verb(sys.argv[1:])}: standard output: {lost.strerror}. Its text is lost.",
            file=sys.stderr,
        )
        code = 1
    return code


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. An exception is a bug, or a second signal."""
    words = list(sys.argv[1:] if argv is None else argv)
    with terminable():
        try:
            return _report_errors(words)
        except KeyboardInterrupt as stop:
            # A launcher repeats the signal: a second one would cut the hint off.
            with handled_by(signal.SIG_IGN):
                if is_first_process():
                    hint = render_resume_hint(_verb(words), words, stop)
                    show(f"\nkinject {_verb(words)}: {hint}", file=sys.stderr)
                    answer(words, {"error": hint, "exit": exit_code(stop)})
            return exit_code(stop)
        except UsageError as error:
            answer(words, {"error": error.message, "exit": 2})
            raise
        except Exception as bug:
            answer(words, {"error": f"{type(bug).__name__}: {bug}", "exit": 70})
            raise


def answer(words: Sequence[str], value: Mapping[str, Any], file: TextIO | None = None) -> None:
    """Print the one JSON object of a command with --json: its result and exit code, or its
    error."""
    # One object in all, of however many processes.
    if "--json" in words and is_first_process():
        from pydantic_core import to_jsonable_python

        # JSON has neither NaN nor infinities.
        plain = to_jsonable_python(
            value, inf_nan_mode="null", fallback=_as_json, serialize_unknown=False
        )
        show(json.dumps(plain), file=file, flush=True)


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):  # a read-only one, which pydantic does not know
        return dict(value)
    return str(value)


def _verb(words: Sequence[str]) -> str:
    return next((word for word in words if word in _VERBS), "")


def _report_errors(words: Sequence[str]) -> int:
    """Run a command; print an error that a user can fix. Return the exit code."""
    verb = _verb(words)
    try:
        return _run(words)
    except KinjectError as error:
        message = str(error)
        # Several lines are a list of problems, each with its place.
        show(message if "\n" in message else f"kinject {verb}: {message}", file=sys.stderr)
        for command in _fetching(message):
            show(f"This public data is fetched by: {command}", file=sys.stderr)
    except Exception as error:
        message = _about_system(error)
        if not message:
            raise
        show(f"kinject {verb}: {message}", file=sys.stderr)
    answer(words, {"error": message, "exit": 2})
    return 2


def _about_system(error: Exception) -> str:
    """Return the message for a fault of the system or its files, "" for a bug."""
    failure = system_failure(error)
    if failure is not None:
        place = f"{failure.filename}: " if failure.filename else ""
        return f"{place}{failure.strerror}. {fix_for(failure)}"
    for cause in causes(error):
        if isinstance(cause, _PATH_FAULTS) and cause.filename:
            return (
                f"{cause.filename}: {cause.strerror}. Something moved, deleted or replaced it "
                "meanwhile. Check it."
            )
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno in _UNUSABLE_NAMES:
            return f"{cause.filename}: {cause.strerror}. Check the path."
    if is_shortage(error):
        return _SHORTAGE.format(str(error).strip().partition("\n")[0][:500] or "out of memory")
    return ""


def _fetching(message: str) -> list[str]:
    """Return the commands that fetch the public data that `message` names, is missing, and for
    which the message names none."""
    from kinject.recipe.makers import command_for

    paths = [path for path in re.findall(r"\bdata/[\w./-]+", message) if not Path(path).exists()]
    commands = dict.fromkeys(map(command_for, paths))
    fetching = [command for command in commands if command.startswith("kinject recipes data get")]
    return [command for command in fetching if command not in message]


def _run(words: Sequence[str]) -> int:
    """Parse and run a command; return its exit code. With --json, what it prints goes to stderr,
    and its result to stdout."""
    parser, as_json, out = _parser(), "--json" in words, sys.stdout
    # --json is taken out by hand, since it may stand before or behind the verb.
    arguments, overrides = parser.parse_known_args([word for word in words if word != "--json"])
    if overrides and (
        not hasattr(arguments, "arguments") or any(word.startswith("-") for word in overrides)
    ):
        # With the usage of the verb, which is not that of kinject alone.
        used = getattr(arguments, "parser", parser)
        hint = _key_hint(words, overrides) or used.nearest_option(overrides)
        used.error(f"unrecognized arguments: {' '.join(overrides)}.{hint}")
    if overrides:  # argparse takes no overrides after an option
        arguments.arguments = [*arguments.arguments, *overrides]
    _quieten_libraries()

    def announce(value: object) -> None:
        answer(words, {"result": value, "exit": 0}, out)

    arguments.announce = announce  # for what serves until it is stopped
    # With --json stdout holds one JSON object and nothing else.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        if arguments.verb is None:
            show(render_next_step())
            value, code = {"runs": find_runs()}, 0
        else:
            value, code = arguments.run(arguments)
    if value is not None:
        answer(words, {"result": value, "exit": code})
    sys.stdout.flush()
    return int(code)


def _key_hint(words: Sequence[str], unknown: Sequence[str]) -> str:
    """Return a sentence on the recipe's key that unknown options mean, "" if there is none."""
    from kinject.recipe.schema import as_override

    override = as_override(words, unknown, words[0])
    if not override:
        return ""
    return f" Keys of a recipe are given without dashes, with their section: {override}"


def _quieten_libraries() -> None:
    """Log kinject's messages to stderr, and only errors and useful warnings of the libraries."""
    log_to_screen()
    logging.getLogger("torch").setLevel(logging.WARNING)  # its import logs at its end
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
        for category in (FutureWarning, DeprecationWarning):  # they concern other libraries
            warnings.filterwarnings("ignore", category=category, module=library)
    # Threads that spin starve each other: beside a second process the sandbox's model trains 5,500
    # tokens a second instead of 800, alone as many as before.
    # OMP_WAIT_POLICY=PASSIVE, 12,000 beside a second one, would cost a fifth alone.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # Its threads do not survive a fork: tokenizers warns in each worker and turns them off.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["MPLBACKEND"] = "agg"  # figures go to files


def render_resume_hint(verb: str, words: Sequence[str], stop: KeyboardInterrupt) -> str:
    """Return the message for a user whose command, `words` after ``kinject``, was stopped."""
    status = _STOPPED[signal.Signals(exit_code(stop) - 128)]
    again = list(words)
    if verb in _KEEP_NOTHING or "--dry-run" in words:
        return f"{status}. Start again with: {shlex.join(['kinject', *again])}"
    # The other verbs resume by themselves; a training that was begun with --overwrite must not.
    if verb == "train":
        again = [*(word for word in again if word not in ("--overwrite", "--resume")), "--resume"]
    launcher = " (under the same launcher)" if is_launched() else ""
    return (
        f"{status}. Finished work is kept. Resume with{launcher}: {shlex.join(['kinject', *again])}"
    )


def render_next_step() -> str:
    """Return the runs of this folder with the command that continues each, and the next step."""
    lines = [
        _DESCRIPTION,
        "",
        "verbs: kinject --help    one verb: kinject VERB --help    "
        "shipped recipes: kinject recipes",
        "",
    ]
    runs = listed_runs()
    if not runs:
        lines += [
            "Next: kinject demo          the whole job on embedded documents: 2 minutes",
            "  or: kinject try FOLDER    looks at your documents, writes recipes",
            "  or: kinject recipes copy sandbox/demo    the demo's recipes and data, to change",
        ]
        return "\n".join(lines)
    rows = [(run.state, str(run.run_dir), run.command) for run in runs[:_MOST_RUNS]]
    lines += ["Your runs in this folder:", aligned(rows, frozenset())]
    if len(runs) > _MOST_RUNS:
        lines.append(f"  and {len(runs) - _MOST_RUNS} more")
    if any(run.state == "short" for run in runs):
        lines.append(
            "short: some texts or questions are missing; the command requests again what failed, "
            "and prints what brings those that were refused."
        )
    command = next_command(runs) or "kinject try FOLDER, for your documents"
    return "\n".join([*lines, "", f"Next: {command}"])


def recipe_of(arguments: argparse.Namespace, verb: Verb) -> Any:
    """Return the checked recipe of `verb` that the command line names. Raises `InputError` if it
    names none or several."""
    from kinject.recipe import read_recipe

    path, overrides = named_recipe(arguments, verb)
    # Before the recipe is read, which refuses inputs that are missing.
    if verb in ("train", "eval"):
        from kinject.sandbox import write_missing_inputs

        for written in write_missing_inputs(path):
            show(f"{written}: written, the sandbox's own")
    return read_recipe(path, overrides, verb)


def named_recipe(arguments: argparse.Namespace, verb: Verb) -> tuple[Path, list[str]]:
    """Return the path of the recipe that the command line names, and the overrides. Raises as
    `recipe_of`."""
    files, overrides = list[str](), list[str]()
    for word in arguments.arguments:
        # The name of a file may have one, as lr=1e-4.yaml.
        if "=" in word and not is_file(Path(word)):
            overrides.append(word)
        else:
            files.append(word)
    if len(files) > 1:
        raise InputError(
            f"found {format_count(len(files), 'recipe')} ({', '.join(files)}); give one, then "
            "section.key=value overrides."
        )
    if files:
        return Path(files[0]), overrides
    if arguments.default_recipe is None:
        raise InputError(_about_no_recipe(arguments.verb))
    path = Path(arguments.default_recipe)
    _check_default(verb, path)
    return path, overrides


def _about_no_recipe(verb: str) -> str:
    """Return what to type instead of a verb alone that has no default: the recipe of the documents
    here, else one that is there or can be."""
    from kinject.recipe.own import own_names

    names, example = own_names(), "cpt"
    if verb == "study":
        names, example = [], "studies/sandbox-quick"
    if names:
        return _about_own(verb, "train", names)
    path = Path("recipes") / f"{example}.yaml"
    if path.is_file():
        return f"no recipe given. For example: kinject {verb} {path}"
    return (
        f"no recipe given. For your documents: kinject try FOLDER. For the sandbox: kinject "
        f"recipes copy {example}, then kinject {verb} {path}"
    )


def _about_own(verb: str, file: str, names: Sequence[str]) -> str:
    recipes = [str(Path("recipes") / name / f"{file}.yaml") for name in names]
    commands = " or ".join(shlex.join(["kinject", verb, recipe]) for recipe in recipes)
    return f"this folder has documents of its own ({', '.join(names)}). Name the recipe: {commands}"


def _check_default(verb: str, path: Path) -> None:
    """Print that the default recipe is the sandbox's. Raise `InputError` if it is, or is missing,
    in a folder with documents of one's own: nobody wants invented people for these."""
    from kinject.recipe.own import own_names
    from kinject.recipe.read import read_values
    from kinject.recipe.shipped import is_sandbox

    is_sandbox_recipe = path.is_file() and is_sandbox(read_values(path))
    if path.is_file() and not is_sandbox_recipe:
        return
    names = own_names()
    if names:
        message = _about_own(verb, verb, names)
        if is_sandbox_recipe:
            message += f"; for the sandbox's invented people: kinject {verb} {path}"
        raise InputError(message)
    if is_sandbox_recipe:
        show(f"{path}: the sandbox, people of a country that does not exist")
        return
    raise InputError(
        f"no recipe given, and {path} (the sandbox's) is not in this folder. For your documents: "
        f"kinject try FOLDER. For the sandbox: kinject recipes copy {path.stem}"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="kinject",
        usage="kinject [-h] [--version] [--json] VERB ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.verbs = _VERBS
    parser.add_argument("--version", action="version", version=f"kinject {package_version()}")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as one JSON object, all else on stderr",
    )
    verbs = parser.add_subparsers(
        dest="verb",
        metavar="VERB",
        prog="kinject",
        help=argparse.SUPPRESS,
        parser_class=VerbParser,
    )
    # Their import registers the verbs (`verb`); here, since they import from this module.
    for module in dict.fromkeys(_VERBS.values()):
        importlib.import_module(f"kinject.cli.{module}")
    below, parsers = dict[str, Any]({"": verbs}), dict[str, argparse.ArgumentParser]()
    for name, row in _TABLE.items():
        above, _, last = name.rpartition(" ")
        if above not in below:
            # A verb that does something by itself (kinject recipes) needs no action.
            is_required = above not in _RUNS
            below[above] = parsers[above].add_subparsers(
                dest="action", metavar="ACTION", required=is_required
            )
        parsers[name] = below[above].add_parser(
            last, help=row["summary"], description=row.get("text")
        )
        _add_options(parsers[name], name, row.get("recipe"))
    for group in dict.fromkeys(_TABLE[verb]["group"] for verb in _VERBS):
        rows = ((verb, _TABLE[verb]) for verb in _VERBS)
        lines = "\n".join(
            f"  {verb:<11} {row['summary']}" for verb, row in rows if row["group"] == group
        )
        parser.description = f"{parser.description}\n\n{group}:\n{lines}"
    return parser


def _add_options(parser: argparse.ArgumentParser, name: str, recipe: str | None) -> None:
    """Add what the verb `name` takes; with a `recipe` (its default, "" for none) ``[RECIPE]
    [section.key=value ...]``."""
    if recipe is not None:
        parser.add_argument(
            "arguments",
            nargs="*",
            metavar="[RECIPE] [section.key=value ...]",
            help=f"recipe file{recipe and f' (default: {recipe})'}; then overrides, values in YAML",
        )
        parser.set_defaults(default_recipe=recipe or None)
    options, run = _RUNS.get(name, ((), {}))
    groups: dict[str, Any] = {}
    for names, settings in options:
        plain = {key: value for key, value in settings.items() if key not in ("group", "either")}
        title = settings.get("group", "")
        if title and title not in groups:
            groups[title] = parser.add_argument_group(title)
        if settings.get("either") and "either" not in groups:
            groups["either"] = parser.add_mutually_exclusive_group()
        if settings.get("either"):
            title = "either"
        groups.get(title, parser).add_argument(*names, **plain)
    parser.set_defaults(parser=parser, **run)


def given_options(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the options, of those whose values have these names, that the command line has."""
    given = [name for name in names if getattr(arguments, name)]
    return [f"--{_OPTIONS.get(name, name.replace('_', '-'))}" for name in given]
