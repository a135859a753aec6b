"""What each style costs: requests and tokens for 1,000 tokens of passages, on the sandbox's endpoint or on a recipe's.

    python benchmarks/augment/costs.py [--documents 20] [--recipe RECIPE]

Each style runs with the number 1 (entigraph with 10 relations a document), in a run folder of its own. Tokens are those
that the endpoint reports; the sandbox counts four characters as one. Half of the tokens in, or more, are the beginning
that all requests about one passage share: the third column has the rest, which a server that caches beginnings must read.
A RECIPE names another endpoint and other documents; the sandbox's entries have 50 words, so that the task weighs more.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from kinject.augment import augment
from kinject.augment.styles import STYLES
from kinject.disk import read_jsonl
from kinject.llm.sender import Sender
from kinject.recipe import read_recipe
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from kinject.types import Completion, Message

NUMBERS = {"entigraph": 10}
HEAD = "| style | requests | tokens in | of them not shared | tokens out | texts |\n|---|---|---|---|---|---|"


class Counting:
    """Counts characters of the prompts, and those of a beginning that an earlier request had."""

    def __init__(self) -> None:
        self.n_in = self.n_shared = self.n_out = self.n_requests = 0
        self._seen: set[str] = set()
        self._send = Sender.send

    def __enter__(self) -> Counting:
        counting = self

        async def send(
            sender: Sender, messages: list[Message], seed: int, *rest: Any
        ) -> Completion:
            beginning = messages[0]["content"] + messages[1]["content"].rpartition("</passage>")[0]
            counting.n_requests += 1
            counting.n_in += sum(len(message["content"]) for message in messages)
            counting.n_shared += len(beginning) if beginning in counting._seen else 0
            counting._seen.add(beginning)
            completion = await counting._send(sender, messages, seed, *rest)
            counting.n_out += len(completion.text)
            return completion

        Sender.send = send  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Sender.send = self._send  # type: ignore[method-assign]


def write_documents(path: Path, n: int) -> Path:
    """Write `n` entries of the sandbox's country."""
    people = create_country(n_known=1, n_new=n).new
    rows = [
        {"id": str(i), "title": person.name, "text": render_entry(person, 0)}
        for i, person in enumerate(people)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def measure(folder: Path, recipe: str | None, documents: Path, style: str) -> str:
    """Run one style and return its row."""
    number = NUMBERS.get(style, 1)
    overrides = [f"run_dir={folder / style}", f"augment.styles={{{style}: {number}}}"]
    if recipe is None:
        path = folder / "recipe.yaml"
        path.write_text(
            f"run_dir: x\naugment: {{documents: {documents}, styles: {{}}, generator: {{kind: sandbox}}}}\n"
        )
    checked = read_recipe(Path(recipe) if recipe else path, overrides, verb="augment")
    with Counting() as counting:
        result = augment(checked)
    originals = (row for _, row in read_jsonl(result.corpus_path) if row["origin"] == "original")
    scale = 1000 / (sum(len(row["text"]) for row in originals) / 4)
    figures = (
        counting.n_requests * scale, counting.n_in / 4 * scale, (counting.n_in - counting.n_shared) / 4 * scale,
        counting.n_out / 4 * scale, result.got * scale,
    )  # fmt: skip
    return f"| `{style}` | {figures[0]:,.0f} | {figures[1]:,.0f} | {figures[2]:,.0f} | {figures[3]:,.0f} | {figures[4]:,.0f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, default=20, help="entries of the sandbox (default: %(default)s)"
    )
    parser.add_argument(
        "--recipe", help="a recipe of kinject augment: its endpoint and documents instead"
    )
    arguments = parser.parse_args()
    print(HEAD)
    with tempfile.TemporaryDirectory() as name:
        documents = write_documents(Path(name) / "documents.jsonl", arguments.documents)
        for style in (name for name, style in STYLES.items() if style.user):
            print(measure(Path(name), arguments.recipe, documents, style), flush=True)


if __name__ == "__main__":
    main()
