"""kinject eval, kinject study, kinject compare, kinject view and kinject chat."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kinject.cli import SHARD_OPTIONS, Outcome, given_options, option, recipe_of, verb
from kinject.cli.job_files import JOB_OPTION, print_job
from kinject.cli.servers import serve
from kinject.errors import InputError, KinjectError
from kinject.process import is_first_process
from kinject.terminal import format_count, show

if TYPE_CHECKING:
    from kinject.eval.chat import Chat
    from kinject.recipe import EvalRecipe
    from kinject.results import Report


@verb(
    "eval",
    option(
        "--show",
        type=int,
        metavar="N",
        help="print the first N prompts of each set and arm as tokenised, store nothing; an "
        "endpoint is not asked",
        either=True,
    ),
    option(
        "--dry-run",
        action="store_true",
        help="count the prompts of each model, and what endpoints may cost; ask nothing",
        either=True,
    ),
    JOB_OPTION,
    *SHARD_OPTIONS,
    option(
        "--require",
        action="append",
        metavar="[ARM:]SET>=NUMBER",
        help="an accuracy (0.8) or a change from the base (-0.02) that the 95%% interval must "
        "hold (exit code 1: not met, 3: cannot be told from so few questions); "
        "requirements.json and .xml (JUnit) have the checks",
    ),
    option(
        "--require-evidence",
        action="store_true",
        help="exit code 1 also for a requirement that cannot be told",
    ),
)
def _eval(arguments: argparse.Namespace) -> Outcome:
    if arguments.require:
        # JSON is YAML, as which overrides are read.
        arguments.arguments.append(f"eval.require={json.dumps(arguments.require)}")
    if arguments.job is not None:
        if arguments.require_evidence:
            return print_job(arguments, "eval", "--require-evidence")
        return print_job(arguments, "eval")
    recipe = recipe_of(arguments, "eval")
    _check_gate(arguments, recipe)
    if arguments.show is not None:
        from kinject.eval.run import show_prompts

        if arguments.show < 1:
            raise InputError(f"--show: found {arguments.show}, expected 1 or more.")
        texts = list(show_prompts(recipe, arguments.show))
        for text in texts:
            show(text, end="\n\n")
        return {"prompts": texts}, 0
    if arguments.dry_run:
        from kinject.eval.run import preview

        lines = list(preview(recipe))
        for line in lines:
            show(line)
        return {"text": "\n".join(lines)}, 0
    if arguments.shard is not None:
        from kinject.api import evaluate_shard

        n_answers = evaluate_shard(recipe, arguments.shard)
        show(f"shard {arguments.shard}: {format_count(n_answers, 'answer')} stored")
        return {"answers": n_answers}, 0
    from kinject.api import evaluate
    from kinject.eval.require import check_requirements, exit_code, read_requirements
    from kinject.report.files import render_summary

    report, page = evaluate(recipe, merge_shards=arguments.merge), recipe.run_dir / "report.html"
    if not is_first_process():  # of several processes the first one prints
        return None, 0
    show(render_summary(recipe.run_dir, report))
    show(f"report: {page}")
    checks = check_requirements(
        read_requirements(recipe.eval.require, list(recipe.eval.questions)), report
    )
    for check in checks:
        show(str(check))
    code = exit_code(checks, needs_evidence=arguments.require_evidence)
    if not _is_complete(report):
        code = 1
    return {"page": page, "requirements": checks, "report": report}, code


def _check_gate(arguments: argparse.Namespace, recipe: EvalRecipe) -> None:
    """Raise `InputError` for requirements of the command line that nothing would check: a gate that
    passes because of that is worse than none."""
    if arguments.shard is not None and (arguments.require or arguments.require_evidence):
        raise InputError(
            "--require: a shard has a part of the answers, so nothing is checked of it. Give it "
            "with --merge."
        )
    if arguments.require_evidence and not recipe.eval.require:
        raise InputError("--require-evidence: there is no requirement. Add --require.")


def _is_complete(report: Report) -> bool:
    """Return whether every question has a score."""
    return not report.unscored and not any(result.n_unscored for result in report.results)


@verb(
    "study",
    option(
        "--dry-run",
        action="store_true",
        help="print which stages would run, with their hours, disk and money, then stop",
        either=True,
    ),
    JOB_OPTION,
    option(
        "--gpu",
        metavar="NAME",
        help="with --dry-run: hours on this card of kinject plan",
    ),
    option(
        "--jobs",
        metavar="N",
        help="stages at once (default: one for each GPU; without one, a core each, at most 8), or "
        "slurm: each a job, at most 100 at once (20: slurm:20)",
    ),
    option(
        "--slurm",
        action="append",
        default=[],
        metavar="[KIND.]OPTION=VALUE",
        help="option of sbatch, for all jobs or the stages of a kind (default: time=1-00:00:00)",
    ),
)
def _study(arguments: argparse.Namespace) -> Outcome:
    if arguments.gpu is not None and not arguments.dry_run:
        raise InputError("--gpu: it plans the hours for a card. Add --dry-run, or leave it out.")
    from kinject.study.slurm import executor_of, options_of

    # Before the recipe, and for a job before it is in the queue: a word that is not allowed ends
    # this command.
    options = options_of(arguments.jobs, arguments.slurm)
    if arguments.job is not None:
        flags = []
        if arguments.jobs is not None:
            flags += ["--jobs", arguments.jobs]
        for words in arguments.slurm:
            flags += ["--slurm", words]
        return print_job(arguments, "study", *flags)
    if arguments.dry_run:
        from kinject.study.run import render_plan

        text = render_plan(recipe_of(arguments, "study"), arguments.gpu, options)
        show(text)
        return {"text": text}, 0
    # Before the recipe: what these words lack is found at once.
    start_executor = executor_of(arguments.jobs, arguments.slurm)
    recipe = recipe_of(arguments, "study")
    from kinject.report.files import render_summary
    from kinject.study.run import run_study

    result, page = run_study(recipe, start_executor)
    show(render_summary(recipe.run_dir, result))
    show(f"report: {page}")
    code = 0 if not result.failures and _is_complete(result) else 1
    return {"page": page, "report": result}, code


@verb(
    "compare",
    option("runs", nargs="+", metavar="RUN", type=Path, help="run folder; the first is the base"),
    option(
        "--score",
        choices=("sum", "chars", "bytes", "tokens", "pmi", "match", "exact", "contains", "judge"),
        default="sum",
        help="the score to compare (default: sum; of written answers match)",
    ),
)
def _compare(arguments: argparse.Namespace) -> Outcome:
    from kinject.eval.compare import compare_runs, read_run, render_comparison

    pairs = compare_runs([read_run(path, arguments.score) for path in arguments.runs])
    show(render_comparison(pairs))
    return {"pairs": pairs}, 0


@verb(
    "view",
    option(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="FOLDER",
        help="run, or folder of runs",
    ),
    option("--open", action="store_true", help="open it in the browser"),
    option("--port", type=int, default=0, help="0: any free port (default: %(default)s)"),
    option(
        "--draw",
        action="store_true",
        help="draw the report of an evaluation or study again, and stop",
    ),
)
def _view(arguments: argparse.Namespace) -> Outcome:
    if arguments.draw and (arguments.open or arguments.port):
        raise InputError(
            "--draw: it stops then; --open and --port are for the page that is served."
        )
    if arguments.draw:
        from kinject.api import report

        page = report(arguments.folder)
        show(f"report: {page}")
        return {"page": page}, 0
    from kinject.view import Server
    from kinject.view.board import Board

    if not arguments.folder.is_dir():
        raise InputError(f"{arguments.folder}: no such folder. Give a run, or a folder of runs.")
    # The paths in its recipes begin there.
    if any((arguments.folder / name).is_dir() for name in ("runs", "recipes")):
        os.chdir(arguments.folder)
        arguments.folder = Path()
    board = None
    # Of a run, or of runs/, there are no recipes to start.
    if arguments.folder == Path():
        board = Board(arguments.folder, find_faults)
    return serve(partial(Server, arguments.folder, arguments.port, board), arguments, "view")


def find_faults(path: Path) -> str:
    """Return the faults of a recipe, a line each, as `kinject recipes check` finds them; "" without
    any."""
    from kinject.api import check
    from kinject.recipe.yaml_lines import read_yaml

    try:
        is_training = "trainer" in read_yaml(path).root
    except KinjectError as error:
        return str(error)
    if is_training:
        # In a process of its own: what checks a training imports torch, 300 MB that a server of a
        # page would hold to its end. -P: as the steps of the board.
        command = [sys.executable, "-P", "-m", "kinject.cli", "recipes", "check", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip() or f"kinject recipes check: exit code {done.returncode}"
        return ""
    return "\n".join(str(faults) for faults in check(path).values() if faults is not None)


_PASSAGES = 3
"""Passages before a question of a chat."""


@verb(
    "chat",
    option("model", metavar="MODEL", help="run folder of kinject train, or a model"),
    option("--base", help="model to ask beside it, or none (default: the base that the run names)"),
    option(
        "--documents",
        nargs="+",
        default=[],
        metavar="FILE",
        help="documents (JSONL) whose passages are found",
    ),
    option("--k", type=int, help=f"passages before a question (default: {_PASSAGES})"),
    option("--system", default="", help="text of the system's turn"),
    option(
        "--max-new-tokens",
        type=int,
        default=256,
        help="most tokens of an answer (default: %(default)s)",
    ),
    option(
        "--temperature",
        type=float,
        default=0.0,
        help="of sampling; 0: the likeliest (default: %(default)s)",
    ),
)
def _chat(arguments: argparse.Namespace) -> Outcome:
    from kinject.eval.chat import ChatSetup, base_revision, find_models, open_chat

    for flag, value in (("--k", arguments.k), ("--max-new-tokens", arguments.max_new_tokens)):
        if value is not None and value < 1:
            raise InputError(f"{flag}: found {value}, allowed: 1 or more.")
    unused = given_options(arguments, ("k",))
    if unused and not arguments.documents:
        raise InputError(f"{unused[0]}: has no effect without --documents. Name some.")
    if not 0 <= arguments.temperature <= 10:
        raise InputError(f"--temperature: found {arguments.temperature:g}, allowed: 0 to 10.")
    models = find_models(arguments.model, arguments.base)
    setup = ChatSetup(
        models,
        tuple(arguments.documents),
        arguments.k or _PASSAGES,
        arguments.system,
        arguments.max_new_tokens,
        arguments.temperature,
        base_revision(arguments.model, arguments.base),
    )
    chat, turns = open_chat(setup), list[dict[str, Any]]()
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        show(f"{' and '.join(models.values())}. /reset, /passages, /quit")
    while True:
        if is_terminal:
            show("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line or line.strip() == "/quit":
            return {"turns": turns}, 0
        if line.strip():
            # A terminal shows what is typed, a pipe does not.
            if not is_terminal:
                show(f"> {line.strip()}")
            _answer(chat, line.strip(), turns)


def _answer(chat: Chat, line: str, turns: list[dict[str, Any]]) -> None:
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
            answers = chat.answer(line, partial(show, end="", flush=True))
            turns.append({"question": line, "answers": answers})
        except InputError as error:
            show(f"\n{error}")
