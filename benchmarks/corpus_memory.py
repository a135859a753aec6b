"""Does memory, or time for a document, grow with the corpus? A chain over short generated documents, by size.

    python benchmarks/corpus_memory.py                          # 10,000, 100,000 and a million documents
    python benchmarks/corpus_memory.py --sizes 10000 40000 --stages augment tokens

augment: `kinject augment` with a rewriting of each document from a file (no model), to corpus.jsonl, two rows a document.
tokens: these rows as the training reads them: tokenized by the sandbox's tokenizer into the token store, packed, each
training row read once. eval: as many questions with the stored answers of two arms, read and compared (load.py). Each is a
process of its own: its processor time, its peak without the pages of mapped files, which the kernel drops when it needs
the room (sampled, since it may have dropped some before the end). The last row of a stage extends the last two sizes to
ten million in a straight line. Below a million documents that is too much for augment: its indexes on disk keep 16 MiB
of pages each in memory, and fill them first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from load import MODEL, resident, write_rewritten

HERE = Path(__file__).resolve()
FARTHEST = 10_000_000
LIMIT = 2048
"""MiB that a stage may take, however large the corpus is."""


def write_chain(folder: Path, n: int) -> None:
    """Write `n` documents of one sentence, a rewriting of each, and the recipes of the chain."""
    write_rewritten(folder, n)
    recipe = {
        "run_dir": str(folder / "train"),
        "method": "cpt",
        "model": {"path": str(MODEL)},
        "corpus": {
            "path": str(folder / "run" / "corpus.jsonl"),
            "cache_dir": str(folder / "tokens"),
        },
        "trainer": {"max_length": 256, "packing": True, "packing_strategy": "bfd_split"},
    }
    (folder / "train.yaml").write_text(json.dumps(recipe))  # JSON is YAML


def augment(folder: Path, n: int) -> None:
    """Paraphrases and corpus."""
    from kinject.augment import augment as run
    from kinject.recipe import read_recipe

    assert run(read_recipe(folder / "recipe.yaml", verb="augment")).n_rows == 2 * n


def tokens(folder: Path, n: int) -> None:
    """Tokens and training rows."""
    from kinject.recipe import read_recipe
    from kinject.train.data import open_corpora, tokenize_and_pack
    from kinject.train.load import load_training_tokenizer
    from kinject.train.methods import method_of

    recipe = read_recipe(folder / "train.yaml", verb="train")
    method = method_of(recipe)
    corpora = open_corpora(recipe, method)
    tokenizer = load_training_tokenizer(recipe.model, corpora.rows)
    data = tokenize_and_pack(recipe, method, tokenizer, corpora).train
    assert sum(len(row.input_ids) for row in data.rows) == data.account.source > 20 * n


STAGES: dict[str, Callable[[Path, int], None]] = {"augment": augment, "tokens": tokens}


def measure(stage: str, folder: Path, n: int) -> tuple[float, float]:
    """Return the processor seconds, and the peak in MiB, of a stage in a process of its own."""
    if stage == "eval":
        words = [str(HERE.with_name("load.py")), "eval", "--sizes", str(n), "--here"]
    else:
        words = [str(HERE), "--here", stage, str(folder), str(n)]
    done = subprocess.run([sys.executable, *words], check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    return result["seconds"], result["peak"]


def own_memory() -> float:
    """Return the MiB that this process holds now without pages of files; all of them where the kernel does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    own = [int(line.split()[1]) for line in lines if line.startswith("RssAnon:")]
    return own[0] / 1024 if own else resident()


class Peak:
    """The most that `own_memory` returned while the block ran, sampled every 20 ms."""

    def __enter__(self) -> Peak:
        self.value = own_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._ended.wait(0.02):
            self.value = max(self.value, own_memory())

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.value = max(self.value, own_memory())


def measure_here(stage: str, folder: Path, n: int) -> dict[str, float]:
    """Return the same of this process."""
    with tempfile.TemporaryDirectory() as name:  # imports, two seconds, would count in a small size
        write_chain(Path(name), 10)
        for earlier in STAGES:
            STAGES[earlier](Path(name), 10)
            if earlier == stage:
                break
    began = time.process_time()
    with Peak() as peak:
        STAGES[stage](folder, n)
    seconds = time.process_time() - began
    return {"seconds": seconds, "peak": peak.value}


def table(stage: str, measured: list[tuple[int, float, float]]) -> list[str]:
    """Return the rows of a stage: documents, seconds, microseconds a document, their ratio to the size before, peak."""
    lines = []
    for index, (n, seconds, peak) in enumerate(measured):
        ratio = ""
        if index:
            before = measured[index - 1]
            ratio = f"{seconds / n / (before[1] / before[0]):.2f}"
        each = f"{seconds / n * 1e6:,.0f} us"
        lines.append(f"| {stage} | {n:,} | {seconds:,.1f} s | {each} | {ratio} | {peak:,.0f} |")
    if len(measured) > 1:
        (n, seconds, peak), (last, last_seconds, last_peak) = measured[-2:]
        further = (FARTHEST - last) / (last - n)
        seconds = last_seconds + further * (last_seconds - seconds)
        peak = last_peak + further * (last_peak - peak)
        each = f"{seconds / FARTHEST * 1e6:,.0f} us"
        within = "yes" if peak <= LIMIT else "NO"
        lines.append(
            f"| {stage} | {FARTHEST:,} (extended) | {seconds:,.0f} s | {each} | | {peak:,.0f} (below {LIMIT:,}: {within}) |"
        )
    return lines


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument(
        "--stages",
        nargs="*",
        choices=[*STAGES, "eval"],
        default=[*STAGES, "eval"],
        help="tokens reads what augment wrote",
    )
    parser.add_argument("--here", nargs=3, metavar=("STAGE", "FOLDER", "N"))
    arguments = parser.parse_args()
    if arguments.here:
        stage, folder, n = arguments.here
        print(json.dumps(measure_here(stage, Path(folder), int(n))))
        return
    measured: dict[str, list[tuple[int, float, float]]] = {stage: [] for stage in arguments.stages}
    for n in arguments.sizes:
        with tempfile.TemporaryDirectory() as name:
            write_chain(Path(name), n)
            for stage in arguments.stages:
                measured[stage].append((n, *measure(stage, Path(name), n)))
                print(table(stage, measured[stage][-1:])[0], file=sys.stderr, flush=True)
    print("| stage | documents | processor time | each | to the size before | peak, MiB |")
    print("|---|---|---|---|---|---|")
    for stage, rows in measured.items():
        print("\n".join(table(stage, rows)))


if __name__ == "__main__":
    main()
