"""kinject export."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kinject.terminal import show

_DETAIL = """\
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


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "export", help="a model folder with a card, to serve or publish", description=_DETAIL,
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
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from kinject.export import ExportOptions, export

    values = {key: value for key, value in vars(arguments).items() if key in ExportOptions.__dataclass_fields__}
    result = export(ExportOptions(**values))
    show("\nServe it:\n  " + "\n  ".join(result.commands))
    return 0
