"""kinject train, kinject merge and kinject export."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from kinject.cli.recipe_arguments import add_verb, recipe_of
from kinject.errors import InputError
from kinject.process import is_first_process
from kinject.terminal import show

_TRAIN = """\
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


def add_train(verbs: Any) -> None:
    """Add `kinject train`."""
    parser = add_verb(verbs, "train", "train a model on a corpus (CPT or SFT)", _TRAIN, None)
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="resume from the newest complete checkpoint in run_dir")
    again.add_argument("--overwrite", action="store_true", help="start over, whatever is in run_dir")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    recipe = recipe_of(arguments, "train")
    from kinject.api import train
    from kinject.train import render_summary

    result = train(recipe, resume=arguments.resume, overwrite=arguments.overwrite)
    if is_first_process():
        show(render_summary(result))
        show(f"report: {recipe.run_dir / 'report.html'}")
    return 0


_MERGE = """\
Average a tuned model with its base, weight by weight: alpha 0 is the base, 1 the tuned model.
Values in between often forget far less and keep most of what was learned. TUNED may be a peft
adapter.

Chat for a model that was trained from a base: --add the instruct model that others made from
the same base, --minus that base (chat vector, arXiv 2310.04799). An adapter that was trained on
the base goes --onto the instruct model instead. Models are folders or names on the hub; tokenizer
and chat template are those of INSTRUCT.

examples:
  kinject merge runs/sandbox/base/model runs/cpt/model
  kinject merge runs/sandbox/base/model runs/cpt/model --alpha 0.5 0.75 --out runs/merged
  kinject merge runs/sandbox/base/model runs/cpt/model --probe eval/sandbox/new.jsonl
  kinject merge runs/sandbox/base/model runs/cpt/model --probe recipes/eval.yaml
  kinject merge runs/cpt/model --add Qwen/Qwen3-8B --minus Qwen/Qwen3-8B-Base
  kinject merge runs/lora/model --onto Qwen/Qwen3-8B"""


def add_merge(verbs: Any) -> None:
    """Add `kinject merge`."""
    parser = verbs.add_parser(
        "merge",
        help="average a tuned model with its base, or give it back its chat",
        description=_MERGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "base", metavar="BASE", help="folder of the base model; with --add the tuned model, with --onto its adapter"
    )
    parser.add_argument("tuned", metavar="TUNED", nargs="?", help="folder of the trained model, or of an adapter")
    parser.add_argument("--alpha", type=float, nargs="+", help="fractions of TUNED (default: 0 0.25 0.5 0.75 1)")
    parser.add_argument("--add", metavar="INSTRUCT", help="instruct model whose difference from --minus is added")
    parser.add_argument("--minus", metavar="BASE", help="the base of both models")
    parser.add_argument(
        "--scale", type=float, nargs="+", help="with --add: factors of the difference (default: 1, the whole)"
    )
    parser.add_argument("--onto", metavar="INSTRUCT", help="model that gets the adapter instead of its own base")
    parser.add_argument("--out", type=Path, help="folder for the results (default: merged beside TUNED)")
    parser.add_argument(
        "--probe",
        type=Path,
        nargs="+",
        metavar="QUESTIONS",
        help="question files (or one evaluation recipe) on which to score the base and each result",
    )
    parser.set_defaults(run=_run_merge)


def _run_merge(arguments: argparse.Namespace) -> int:
    _check_form(arguments)
    out = arguments.out or Path(arguments.tuned or arguments.base).parent / "merged"
    probe = None if arguments.probe is None else _probe_recipe(arguments.probe, out)
    models = {"base": arguments.onto or arguments.base}
    for name, folder in _merge(arguments, out).items():
        show(f"{name}: {folder}")
        models[name.replace(" ", "-")] = str(folder)
    if probe is not None:
        from kinject.eval import evaluate
        from kinject.recipe import read_recipe
        from kinject.report.files import render_summary

        overrides = [f"run_dir={out / 'eval'}", f"eval.models={json.dumps(models)}"]
        show(render_summary(evaluate(read_recipe(probe, overrides, "eval"))))
    return 0


def _check_form(arguments: argparse.Namespace) -> None:
    """Raise `InputError` unless the arguments are those of one of the three forms."""
    forms = {"TUNED": arguments.tuned, "--add": arguments.add, "--onto": arguments.onto}
    used = [name for name, value in forms.items() if value is not None]
    if len(used) != 1:
        raise InputError(
            f"kinject merge: found {' and '.join(used) or 'one model'}. Give BASE TUNED (an average), MODEL --add "
            "INSTRUCT --minus BASE (chat vector), or ADAPTER --onto INSTRUCT."
        )
    if (arguments.add is None) != (arguments.minus is None):
        raise InputError("--add and --minus belong together: an instruct model, and the base that it was made from.")
    for flag, value, form in (("--alpha", arguments.alpha, "TUNED"), ("--scale", arguments.scale, "--add")):
        if value is not None and used != [form]:
            raise InputError(f"{flag}: is for {form} only, found with {used[0]}.")


def _merge(arguments: argparse.Namespace, out: Path) -> dict[str, Path]:
    """Merge models as the arguments request; return name -> folder of each result."""
    from kinject.train.difference import add_difference
    from kinject.train.merge import apply_adapter, merge

    if arguments.onto is not None:
        return {"onto": apply_adapter(arguments.base, arguments.onto, out)}
    if arguments.add is not None:
        scales = sorted(set(arguments.scale or (1.0,)))
        folders = add_difference(arguments.base, arguments.add, arguments.minus, scales, out)
        return {f"scale {scale:g}": folder for scale, folder in folders.items()}
    alphas = sorted(set(arguments.alpha or (0.0, 0.25, 0.5, 0.75, 1.0)))
    return {f"alpha {alpha:g}": folder for alpha, folder in merge(arguments.base, arguments.tuned, alphas, out).items()}


def _probe_recipe(files: list[Path], out: Path) -> Path:
    """Return the evaluation recipe among `files`, or write one into `out` that asks them all as question files."""
    from kinject.disk import write_json

    recipes = [path for path in files if path.suffix in (".yaml", ".yml")]
    if recipes and len(files) > 1:
        raise InputError(
            f"--probe: found {len(files)} files, {recipes[0]} among them. Give one recipe, or question files."
        )
    if recipes:
        return recipes[0]
    absent = [path for path in files if not path.is_file()]
    if absent:
        raise InputError(f"--probe: {absent[0]}: no such file. Give question files or an evaluation recipe.")
    if len({path.stem for path in files}) < len(files):
        raise InputError("--probe: two files have the same name. The tables are named by them; rename one.")
    recipe = out / "probe.yaml"  # JSON is YAML
    write_json(
        recipe, {"run_dir": str(out / "eval"), "eval": {"models": {}, "questions": {p.stem: str(p) for p in files}}}
    )
    return recipe


_EXPORT = """\
Make a finished run ready for use elsewhere: its model as one plain folder with a model card. An
adapter is folded into its base shard by shard, so that a large model needs little memory. The
commands that serve it are printed. Where asked for, further parts are made: a GGUF file (llama.cpp),
and a data set of the corpus and of question files. --push uploads a part to the Hugging Face hub,
and nothing else. A part that is there already is not made, or uploaded, again.

examples:
  kinject export runs/cpt
  kinject export runs/cpt --report runs/eval --license apache-2.0
  kinject export runs/cpt --gguf q8_0 --llama-cpp ../llama.cpp
  kinject export runs/cpt --push me/handbook-8b
  kinject export runs/cpt --data eval/test.jsonl --push-data me/handbook-corpus"""


def add_export(verbs: Any) -> None:
    """Add `kinject export`."""
    parser = verbs.add_parser(
        "export", help="a model folder with a card, to serve or publish", description=_EXPORT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "folder", type=Path, metavar="RUN", help="run folder of kinject train, or a model or adapter folder"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the parts (default: export in RUN)")
    parser.add_argument("--report", type=Path, metavar="RUN", help="evaluation or study whose results the card shows")
    parser.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16", "float16"),
        help="dtype of the weights (auto: as they are stored; of an adapter's base, as it is stored)",
    )  # fmt: skip
    parser.add_argument(
        "--license", metavar="ID", help="licence in the cards, as apache-2.0 (default: the base's card)"
    )
    parser.add_argument("--gguf", metavar="TYPE", help="also make a GGUF file: f32, f16, bf16, q8_0 or auto")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR", help="llama.cpp's folder (default: LLAMA_CPP)")
    parser.add_argument(
        "--data", type=Path, nargs="*", metavar="QUESTIONS", help="also make a data set: the corpus, and question files"
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="upload the model to the hub (HF_TOKEN)")
    parser.add_argument("--push-data", metavar="OWNER/NAME", help="upload the data set to the hub (HF_TOKEN)")
    parser.add_argument(
        "--public", action="store_true", help="create these repositories as public ones (default: private)"
    )
    parser.set_defaults(run=_export)


def _export(arguments: argparse.Namespace) -> int:
    from kinject.export import ExportOptions, export

    values = {key: value for key, value in vars(arguments).items() if key in ExportOptions.__dataclass_fields__}
    result = export(ExportOptions(**values))
    show("\nServe it:\n  " + "\n  ".join(result.commands))
    return 0
