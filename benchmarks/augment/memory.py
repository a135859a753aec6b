"""Peak memory of a whole run (reading, splitting, engine, store, corpus, summary) by the number of passages.

    python benchmarks/augment/memory.py [N_PASSAGES ...] [--style paraphrase]

Each size runs in a process of its own; what each further passage adds is the slope between sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from kinject.augment import augment
from kinject.recipe import read_recipe
from kinject.sandbox.facts import create_country
from kinject.sandbox.grammar import render_entry


def write_documents(path: Path, n: int) -> None:
    """Write `n` one-passage documents of the sandbox, all with ids and texts of their own."""
    people = create_country(n_known=1, n_new=2000).new
    with path.open("w") as file:
        for number in range(n):
            person = people[number % len(people)]
            row = {"id": f"d{number}", "title": person.name, "text": render_entry(person, number)}
            file.write(json.dumps(row) + "\n")


def _run(folder: Path, style: str, pipe: Connection) -> None:
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {folder}/run\naugment:\n  documents: {folder}/documents.jsonl\n  styles: {{{style}: 1}}\n"
        "  max_attempts: 1\n  generator: {kind: sandbox, concurrency: 64}\n"
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    result = augment(read_recipe(recipe, verb="augment"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    pipe.send((before, peak, result.n_passages, result.got, time.perf_counter() - began))


def main() -> None:
    """Measure each size and print peak resident memory and its growth."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", type=int, default=[10_000, 100_000])
    parser.add_argument("--style", default="tagged")
    arguments = parser.parse_args()
    earlier: tuple[int, float] | None = None
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            write_documents(Path(name) / "documents.jsonl", size)
            here, there = multiprocessing.Pipe()
            process = multiprocessing.get_context("spawn").Process(
                target=_run, args=(Path(name), arguments.style, there)
            )
            process.start()
            before, peak, n_passages, got, seconds = here.recv()
            process.join()
        line = (
            f"{n_passages:>9,} passages, {got:,} rewritings: peak {peak:.0f} MiB ({before:.0f} before), {seconds:.0f} s"
        )
        if earlier:
            slope = (peak - earlier[1]) / (size - earlier[0])
            line += (
                f"; {slope * 1024 * 1024:.0f} bytes a passage more, so 1,000,000: {peak + slope * (1e6 - size):.0f} MiB"
            )
        print(line, flush=True)
        earlier = (size, peak)


if __name__ == "__main__":
    main()
