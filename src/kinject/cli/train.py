"""kinject train."""

from __future__ import annotations

import argparse
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.process import is_first_process
from kinject.terminal import show

_DETAIL = """\
Train a model on a corpus, through TRL's SFTTrainer: continued pretraining on text rows, SFT on
messages or prompt and completion rows. The recipe's trainer section holds SFTConfig's own fields.
In the recipe's run_dir:
  model/           a plain Hugging Face folder
  checkpoint-N/    where --resume continues
  log.jsonl        loss, learning rate, gradient norm and probe accuracies by step
  timing.jsonl     seconds, learned tokens and peak memory at each logged step
  report.html      figures of log.jsonl, with epochs marked
  manifest.json    inputs, settings and versions, with an account of every token

examples:
  kinject train recipes/cpt.yaml
  kinject train recipes/cpt.yaml trainer.learning_rate=3e-4 run_dir=runs/cpt-slow
  kinject train recipes/cpt.yaml --resume"""


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = add_verb(verbs, "train", "train a model on a corpus (CPT or SFT)", _DETAIL, None)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint in run_dir")
    again.add_argument("--overwrite", action="store_true", help="start over, whatever is in run_dir")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "train")
    from kinject.api import train
    from kinject.train import render_summary

    result = train(recipe, resume=arguments.resume, overwrite=arguments.overwrite)
    if is_first_process():
        show(render_summary(result))
        show(f"report: {recipe.run_dir / 'report.html'}")
    return 0
