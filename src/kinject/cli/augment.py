"""kinject try, kinject documents, kinject augment and kinject questions."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

from kinject.cli import (
    SHARD_OPTIONS,
    Outcome,
    given_options,
    incomplete,
    option,
    recipe_of,
    verb,
)
from kinject.cli.job_files import JOB_OPTION, print_job
from kinject.cli.parsers import NO_PATH
from kinject.errors import InputError
from kinject.terminal import format_count, show


@verb(
    "try",
    option("documents", type=Path, metavar="FOLDER", help="folder or file with documents"),
    option(
        "--endpoint", metavar="URL", help="OpenAI-compatible endpoint that writes, for all recipes"
    ),
    option(
        "--model",
        metavar="PATH",
        help="model that learns, for all recipes: a folder, or a name on the hub",
    ),
    option(
        "--gpu",
        metavar="NAME",
        help="the card that trains it, as 4090 or H100 (default: this machine's)",
    ),
    option("--memory", metavar="SIZE", help="the memory of another card, as 24 (GiB)"),
)
def _try(arguments: argparse.Namespace) -> Outcome:
    from kinject.api import try_
    from kinject.augment.survey import own_files, render_commands, render_survey

    own = own_files(arguments.documents)
    everything = bool(own) and _is_wanted(own)
    survey = try_(
        arguments.documents,
        endpoint=arguments.endpoint,
        model=arguments.model,
        everything=everything,
        gpu=arguments.gpu,
        memory=arguments.memory,
    )
    show(render_survey(survey))
    show("\n" + render_commands(survey))
    return survey, incomplete(survey.documents.n_skipped)


def _is_wanted(names: list[str]) -> bool:
    """Ask at a terminal whether runs, recipes and wheels are documents. Without one they are
    not."""
    if not sys.stdin.isatty():
        return False
    show(f"Read {', '.join(names)}, too? They are kinject's own, or packages. [y/N] ", end="")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


@verb(
    "documents",
    option(
        "arguments",
        nargs="+",
        metavar="PATH [documents.key=value ...]",
        help="folder, pattern or file; run_dir=FOLDER sets the run folder (default: "
        "runs/NAME/documents)",
    ),
    option(
        "--recipe",
        dest="recipe_file",
        metavar="FILE",
        help="recipe whose section documents is used",
    ),
    *SHARD_OPTIONS,
)
def _documents(arguments: argparse.Namespace) -> Outcome:
    from kinject.api import documents, documents_shard
    from kinject.heap.collect import render_documents
    from kinject.recipe.read import read_section

    paths, settings, run_dir = list[Path](), list[str](), None
    for word in arguments.arguments:
        key, equals, value = word.partition("=")
        # Other words with an = are paths, which may hold one.
        if equals and key == "run_dir":
            run_dir = _named(value, "run_dir")
        elif equals and key.startswith("documents."):
            settings.append(word)
        else:
            paths.append(Path(_named(word, "PATH")))
    options = read_section(arguments.recipe_file, settings)
    if arguments.shard is not None:
        part = documents_shard(*paths, shard=arguments.shard, run_dir=run_dir, options=options)
        files = format_count(part["n_files"], "file")
        show(f"shard {arguments.shard}: {files}, {part['n_parsed']:,} parsed in this run")
        return part, 0
    result = documents(*paths, run_dir=run_dir, options=options, merge_shards=arguments.merge)
    show(render_documents(result))
    return result, incomplete(result.n_skipped)


def _named(word: str, what: str) -> str:
    if not word:
        raise InputError(f"{what}: {NO_PATH}")
    return word


@verb(
    "augment",
    option(
        "--dry-run",
        action="store_true",
        help="read the documents, print the planned requests, tokens and cost, stop",
        either=True,
    ),
    JOB_OPTION,
    *SHARD_OPTIONS,
)
def _augment(arguments: argparse.Namespace) -> Outcome:
    if arguments.job is not None:
        return print_job(arguments, "augment")
    # Requests make few cycles; the search for them took an eighth of the time.
    gc.set_threshold(20_000, 10, 10)
    recipe = recipe_of(arguments, "augment")
    if arguments.dry_run:
        from kinject.augment.preview import preview, render_preview

        planned = preview(recipe)
        show(render_preview(planned))
        return planned, 0
    from kinject.api import augment
    from kinject.augment.run import render_summary

    result = augment(recipe, shard=arguments.shard, merge_shards=arguments.merge)
    show(render_summary(result))
    return result, incomplete(result.short)


@verb(
    "questions",
    option(
        "--drop-known",
        type=Path,
        metavar="RUN",
        help="part the questions of an evaluation (kinject eval) by whether its base knows them",
    ),
    option(
        "--retention",
        action="store_true",
        help="questions on well-known neighbours of the documents that the model answers, to "
        "measure what training forgets, in the folder retention of the run's",
    ),
    option(
        "--retry", action="store_true", help="ask again about passages that have too few questions"
    ),
    option(
        "--dry-run",
        action="store_true",
        help="count passages and planned questions, then stop",
        either=True,
    ),
    JOB_OPTION,
    *SHARD_OPTIONS,
)
def _questions(arguments: argparse.Namespace) -> Outcome:
    if arguments.drop_known is not None:
        return _drop_known(arguments)
    if arguments.job is not None:
        named = {"--retention": arguments.retention, "--retry": arguments.retry}
        return print_job(arguments, "questions", *(flag for flag, given in named.items() if given))
    from kinject.api import questions
    from kinject.augment.questions import render_questions

    if arguments.retention:
        recipe = recipe_of(arguments, "questions")
        overrides = (f"run_dir={recipe.run_dir / 'retention'}", "questions.retention=true")
        # By its path, since a default recipe would be announced a second time.
        arguments.arguments = [str(recipe.path), *recipe.overrides, *overrides]
    if arguments.dry_run:
        from kinject.augment.preview import preview_questions

        text = preview_questions(recipe_of(arguments, "questions"))
        show(text)
        return {"text": text}, 0

    gc.set_threshold(20_000, 10, 10)  # as in kinject augment
    recipe = recipe_of(arguments, "questions")
    result = questions(
        recipe, retry=arguments.retry, shard=arguments.shard, merge_shards=arguments.merge
    )
    show(render_questions(result))
    return result, incomplete(result.short)


def _drop_known(arguments: argparse.Namespace) -> Outcome:
    from kinject.eval.compare import split_known

    if arguments.arguments:
        raise InputError(
            f"--drop-known: takes no recipe; found {arguments.arguments[0]!r}. Name the "
            "evaluation's folder alone."
        )
    others = ("job", "retention", "retry", "dry_run", "shard", "merge")
    unused = given_options(arguments, others)
    if unused:
        raise InputError(
            f"--drop-known: only sorts questions that are there; {', '.join(unused)} has no "
            "effect beside it. Take it out."
        )
    parts = split_known(arguments.drop_known)
    for part in parts:
        n = part.n_known + part.n_unknown + part.n_given
        chosen, measured = ", ".join(part.chosen_by), ", ".join(part.measure_with)
        show(
            f"{part.question_set}: the base knows {part.n_known} of {format_count(n, 'question')}, "
            f"as asked by {chosen}"
        )
        show(f"  {part.unknown}: {part.n_unknown} to learn\n  {part.known}: {part.n_known}")
        if part.n_given:
            show(
                f"  {part.n_given} are in neither: the base picks their right choice without the "
                "question too."
            )
        if part.kept is not None:
            show(
                f"  Ask the known ones by {measured}, which chose none of them: so the base "
                f"answers {part.kept:.1%}."
            )
    return parts, 0
