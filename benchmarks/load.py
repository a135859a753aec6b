"""Memory and time by size, at 1x, 10x and 100x: does either grow faster than what is read?

    python benchmarks/load.py                              # every load at its three sizes; an hour on two cores
    python benchmarks/load.py packing report               # some of them
    python benchmarks/load.py augment --sizes 5000 20000 --style paraphrase

Loads: augment (passages through a run with the sandbox's generator), file (short documents with rewritings of a file), corpus
(rows of 10 kB from the file to an epoch of training rows), packing (corpus rows from the token store to an epoch of training
rows), scoring (questions put to a tiny model), eval (questions through the reader, their stored answers read back, cells and
paired tests), view (texts that a page lists, searches and reads again as the file grows), inference (questions through a
study's intervals and sign flips), report (training runs through a study's statistics, pages and figures). Each size
runs in a process of its own; its peak is what that process held at most, by getrusage. Inputs are written, or made, by
another process or before the clock starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measure:
    """`n` things took `seconds` of CPU time; the process held `before` MiB when it began with them and `peak` at most.

    `mapped` MiB of what it held at the end are pages of files, which the kernel drops when it needs the room (Linux; else 0).
    """

    load: str
    n: int
    seconds: float
    before: float
    peak: float
    mapped: float


def resident() -> float:
    """Return the most that this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform != "darwin" else 1 << 20
    )


def mapped() -> float:
    """Return how much of what this process holds is pages of files, in MiB."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssFile:")) / 1024


MODEL = Path(__file__).parents[1] / "src" / "kinject" / "sandbox" / "base_model" / "model"
"""A model of a few million weights, with its tokenizer."""
Work = Callable[[], object]
"""Does one load and returns what must be kept until its memory is read."""


def augment(n: int, folder: Path, style: str) -> Work:
    """`n` one-passage documents, all with ids and texts of their own, each rewritten once."""
    from kinject.augment import augment as run
    from kinject.recipe import read_recipe
    from kinject.sandbox.grammar import render_entry
    from kinject.sandbox.people import create_country

    people = create_country(n_known=1, n_new=2000).new
    with (folder / "documents.jsonl").open("w") as file:
        for number in range(n):
            person = people[number % len(people)]
            row = {"id": f"d{number}", "title": person.name, "text": render_entry(person, number)}
            file.write(json.dumps(row) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {folder}/run\naugment:\n  documents: {folder}/documents.jsonl\n  styles: {{{style}: 1}}\n"
        "  max_attempts: 1\n  generator: {kind: sandbox, concurrency: 64}\n"
    )
    return lambda: run(read_recipe(recipe, verb="augment"))


def write_rewritten(folder: Path, n: int) -> Path:
    """Write `n` documents of one sentence and a rewriting of each; return the recipe that augments them from the file."""
    with (
        (folder / "documents.jsonl").open("w") as documents,
        (folder / "rewritings.jsonl").open("w") as rewritings,
    ):
        for number in range(n):
            name, year, length = f"d{number}", 1500 + number % 500, number % 97 + 3
            text = f"Bridge {number} was opened in {year} and is {length} m long."
            documents.write(json.dumps({"id": name, "text": text}) + "\n")
            text = f"It was in {year} that bridge {number}, {length} m long, was opened."
            rewritings.write(json.dumps({"document_id": name, "text": text}) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {folder}/run\naugment:\n  documents: {folder}/documents.jsonl\n  styles: {{paraphrase: 1}}\n"
        f"  generator: {{kind: file, path: {folder}/rewritings.jsonl}}\n"
    )
    return recipe


def precomputed(n: int, folder: Path, style: str) -> Work:
    """`n` short documents, each with a rewriting from a file (kind: file): no model, no request."""
    from kinject.augment import augment as run
    from kinject.recipe import read_recipe

    recipe = write_rewritten(folder, n)

    def work() -> int:
        result = run(read_recipe(recipe, verb="augment"))
        assert result.n_rows == 2 * n
        return n

    return work


def corpus(n: int, folder: Path, style: str) -> Work:
    """`n` rows of some 10 kB, 1 GB for 100,000: read, tokenised, stored, packed; each training row is read once."""
    from kinject.recipe import read_recipe
    from kinject.sandbox.grammar import render_entry
    from kinject.sandbox.people import create_country
    from kinject.train.data import open_corpora, tokenize_and_pack
    from kinject.train.load import load_training_tokenizer
    from kinject.train.methods import method_of

    draw = random.Random(0)
    entries = [render_entry(person, 0) for person in create_country(n_known=1, n_new=500).new]
    with (folder / "corpus.jsonl").open("w") as file:
        for number in range(n):
            text = f"Volume {number}. " + " ".join(draw.choices(entries, k=41))
            file.write(json.dumps({"id": f"d{number}", "text": text}) + "\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {folder}/run\nmodel: {{path: {MODEL}}}\ncorpus: {{path: {folder}/corpus.jsonl, cache_dir: {folder}/tokens}}\n"
        "trainer: {max_steps: 1, max_length: 512, packing: true, packing_strategy: bfd_split}\n"
    )
    read = read_recipe(recipe, verb="train")
    tokenizer = load_training_tokenizer(read.model, [])

    def work() -> object:
        method = method_of(read)
        packed = tokenize_and_pack(read, method, tokenizer, open_corpora(read, method)).train
        assert sum(len(row.input_ids) for row in packed.rows) >= packed.account.trained
        return packed

    return work


def packing(n: int, folder: Path, style: str) -> Work:
    """`n` corpus rows of 8 to 56 tokens, ten of a document, stored and packed for an epoch; each row is read once."""
    from kinject.corpus.packing import PackingConfig, pack
    from kinject.corpus.tokenize import TokenRow, cached_tokens

    draw = random.Random(0)
    shapes = [(list(range(length)), [False, *[True] * (length - 1)]) for length in range(8, 57)]

    def rows() -> Iterator[TokenRow]:
        for index in range(n):
            ids, learned = draw.choice(shapes)
            yield TokenRow(str(index), f"document-{index // 10}", "original", ids, learned)

    def work() -> object:
        packed, account = pack(
            cached_tokens(folder, "entry", rows, "original"),
            PackingConfig(256, "bfd_split"),
            0,
        )
        assert sum(len(row.input_ids) for row in packed) == account.source
        return packed

    return work


def _questions(path: Path, n: int) -> None:
    with path.open("w") as file:
        for index in range(n):
            choices = [f"town {index}", f"town {index + 1}", f"mill {index}", f"mill {index + 1}"]
            row = {
                "id": f"q{index}",
                "question": f"Where was person {index} born?",
                "choices": choices,
                "answer": index % 4,
            }
            file.write(
                json.dumps({**row, "subject": f"s{index % 57}", "document_id": f"d{index // 2}"})
                + "\n"
            )


def _answers(path: Path, n: int, fraction: float, *, arm: str = "base", seed: int = 0) -> None:
    """Stored answers to `_questions`, right with probability `fraction`."""
    from kinject.disk import Journal
    from kinject.types import Answer

    draw = random.Random(seed)
    with contextlib.closing(Journal(path, sync=False)) as journal:
        for index in range(n):
            log_probs = [draw.uniform(-9, -2) for _ in range(4)]
            if draw.random() < fraction:
                log_probs[index % 4] = -1.0
            answer = Answer(
                question_id=f"q{index}", question_set="new", arm=arm, format="texts", shots=0, k=0, context_ids=(),
                gold=index % 4, log_probs=tuple(log_probs), n_tokens=(3,) * 4, n_bytes=(6,) * 4, n_chars=(6,) * 4,
                subject=f"s{index % 57}", document_id=f"d{index // 2}", greedy=(False,) * 4,
            )  # fmt: skip
            journal.append({"key": f"{arm}-{index}", **asdict(answer)})


def evaluation(n: int, folder: Path, style: str) -> Work:
    """`n` questions and two arms' stored answers to them: read, counted, compared (bootstrap, McNemar), by subject."""
    from kinject.corpus.questions import read_questions
    from kinject.eval.compare import compare_runs, read_run
    from kinject.eval.scoring.answers import AnswerStore

    _questions(folder / "questions.jsonl", n)
    for arm, fraction in (("base", 0.4), ("tuned", 0.5)):
        _answers(folder / "answers.jsonl", n, fraction, arm=arm, seed=len(arm))

    def work() -> int:
        questions = read_questions(folder / "questions.jsonl")
        with AnswerStore(folder / "answers.jsonl") as book:
            assert book.find("base-0") is not None
        run = read_run(folder / "answers.jsonl")
        assert {pair.result.n for pair in compare_runs([run, run])} == {len(questions)} == {n}
        return n

    return work


def scoring(n: int, folder: Path, style: str) -> Work:
    """`n` questions of four choices put to the sandbox's model, with report and page."""
    from kinject.eval.run import evaluate
    from kinject.recipe import read_recipe

    _questions(folder / "questions.jsonl", n)
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"run_dir: {folder}/run\neval: {{models: {{base: {MODEL}}}, questions: {{new: {folder}/questions.jsonl}}}}\n"
    )
    read = read_recipe(recipe, verb="eval")

    def work() -> int:
        report = evaluate(read)
        assert max(result.n for result in report.results) == n  # others are of a subject each
        return n

    return work


def view(n: int, folder: Path, style: str) -> Work:
    """`n` texts of a run that goes on: listed, searched, and listed again after each of three more."""
    from kinject.disk import write_jsonl, write_manifest
    from kinject.view import Query, View

    run, recipe = folder / "runs" / "augment", {"augment": {"documents": "d"}}
    text = "Bridge {0} was opened in the year {1} and is still the longest of its river."

    def row(number: int) -> dict[str, str]:
        names = {"id": f"v{number}", "passage_id": f"p{number}", "document_id": f"d{number}"}
        return {**names, "style": "paraphrase", "text": text.format(number, 1500 + number % 500)}

    write_jsonl(run / "variants.jsonl", map(row, range(n)))
    passages = (
        {"id": f"p{i}", "document_id": f"d{i}", "origin": "original", "text": text.format(i, 1)}
        for i in range(n)
    )
    write_jsonl(run / "corpus.jsonl", passages)
    write_manifest(
        run / "manifest.json",
        stage="augment",
        inputs={},
        recipe=recipe,
        counts={"asked": n, "got": n},
    )

    (run / ".lock").touch()

    def work() -> object:
        page = View(folder)
        for number in range(n, n + 3):
            assert page.rows("runs/augment", "accepted", Query())["total"] == number
            assert page.rows("runs/augment", "accepted", Query(("year", "1507")))["matched"] > 0
            assert len(page.runs()) == 1
            with (run / "variants.jsonl").open("a") as file:
                file.write(json.dumps(row(number)) + "\n")
        return page

    return work


def inference(n: int, folder: Path, style: str) -> Work:
    """`n` questions, two of a document, three seeds: a study's intervals and tests."""
    import numpy as np

    from kinject.stats.comparisons import make_contrast
    from kinject.stats.intervals import bounded_accuracy, chance_p
    from kinject.stats.matrix import CorrectnessMatrix

    random = np.random.default_rng(0)
    ids, documents, chances = (
        tuple(map(str, range(n))),
        tuple(f"d{index // 2}" for index in range(n)),
        (0.25,) * n,
    )

    def work() -> int:
        arm, other = (
            CorrectnessMatrix(
                (random.random((3, n)) < fraction).astype(float), ids, documents, chances
            )
            for fraction in (0.5, 0.45)
        )
        bounded_accuracy(arm)
        make_contrast(arm, other, "other")
        chance_p(arm, 0.3)
        return n

    return work


def report(n: int, folder: Path, style: str) -> Work:
    """`n` training runs, three seeds an arm, with 200 answers each: a study's scores, questions, pages and figures."""
    from kinject.report.files import write_report
    from kinject.results import Cost, Report
    from kinject.study.analysis import summarize_arms
    from kinject.study.arms import BASE, Arm, arm_infos
    from kinject.study.records import Records

    seeds = (0, 1, 2)
    names = [BASE, *(f"arm-{index}" for index in range(-(-n // len(seeds))))]
    _questions(folder / "questions.jsonl", 200)
    runs = [(name, seed) for name in names for seed in ((0,) if name == BASE else seeds)]
    for index, (name, seed) in enumerate(runs):
        folder_of_run = folder / "runs" / name / str(seed)
        folder_of_run.mkdir(parents=True)
        _answers(folder_of_run / "answers.jsonl", 200, 0.3 + 0.5 * index / len(runs), seed=index)
        log = [
            {"step": step, "loss": 3 / step, "epoch": step / 20, "learning_rate": 1e-3}
            for step in range(1, 101)
        ]
        (folder_of_run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))

    def work() -> int:
        arms = [
            Arm(name, "model", "", "augmented", {}, "", "", None, False, seeds) for name in names
        ]
        records = Records(("sum",))
        for name, seed in runs:
            records.read("model", name, seed, folder / "runs" / name / str(seed))
        results = summarize_arms(records, arms, {"new": "learning"}, {})
        costs = [
            Cost(name, "model", seed, "train", 60.0, 10_000, 1 << 30, 0.0, 1) for name, seed in runs
        ]
        logs = [
            ("model", name, seed, f"runs/{name}/{seed}/log.jsonl")
            for name, seed in runs
            if name != BASE
        ]
        result = Report(
            kind="study", title="Load", seeds=seeds, models=("model",), arms=arm_infos(arms), results=tuple(results), sweeps=(),
            choices=(), claims=(), costs=tuple(costs),
            failures=(), logs=tuple(logs), notes=(), commands=(), versions={},
        )  # fmt: skip
        write_report(folder, result)
        return len(runs)

    return work


LOADS: dict[str, tuple[Callable[[int, Path, str], Work], tuple[int, ...], str]] = {
    "augment": (augment, (10_000, 100_000, 1_000_000), "passage"),
    "file": (precomputed, (10_000, 100_000, 1_000_000), "document"),
    "corpus": (corpus, (10_000, 30_000, 100_000), "row"),
    "packing": (packing, (100_000, 1_000_000, 10_000_000), "row"),
    "scoring": (scoring, (5_000, 15_000, 50_000), "question"),
    "eval": (evaluation, (1_000, 10_000, 100_000), "question"),
    "view": (view, (20_000, 60_000, 200_000), "text"),
    "inference": (inference, (1_000, 10_000, 100_000), "question"),
    "report": (report, (5, 50, 500), "run"),
}
"""Name -> what makes its input and returns its work, sizes, and what is counted."""


def measure(load: str, n: int, style: str = "tagged") -> Measure:
    """Return the time and peak of one load at one size, in this process."""
    with tempfile.TemporaryDirectory() as name:
        work = LOADS[load][0](n, Path(name), style)
        before, began = resident(), time.process_time()
        kept = work()
        result = Measure(load, n, time.process_time() - began, before, resident(), mapped())
        del kept
        return result


def measure_apart(load: str, n: int, style: str = "tagged") -> Measure:
    """Return `measure` of a process of its own."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        load,
        "--sizes",
        str(n),
        "--style",
        style,
        "--here",
    ]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Measure(**json.loads(output.splitlines()[-1]))


def rows_of(measures: Sequence[Measure]) -> list[str]:
    """Return a table's lines; what a thing more costs is the slope from the size before."""
    unit = LOADS[measures[0].load][2]
    lines = []
    for index, result in enumerate(measures):
        slope = ""
        if index:
            last = measures[index - 1]
            slope = f"{(result.peak - last.peak) * (1 << 20) / (result.n - last.n):,.0f} bytes"
        each = result.seconds / result.n
        pace = f"{each * 1e6:,.0f} us" if each < 0.01 else f"{each * 1e3:,.0f} ms"
        cells = (
            result.load,
            f"{result.n:,} {unit}s",
            f"{result.seconds:,.1f} s",
            pace,
            f"{result.before:,.0f}",
            f"{result.peak:,.0f}",
            f"{result.mapped:,.0f}",
            slope,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "loads", nargs="*", default=[], help=f"some of {', '.join(LOADS)}; default: all"
    )
    parser.add_argument("--sizes", nargs="*", type=int, help="instead of the load's own three")
    parser.add_argument("--style", default="tagged", help="augment: which style")
    parser.add_argument(
        "--here", action="store_true", help="one load, one size, in this process; prints JSON"
    )
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(asdict(measure(arguments.loads[0], arguments.sizes[0], arguments.style))))
        return
    print(
        "| load | size | CPU time | each | MiB before | MiB at the peak | mapped files | each further |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for load in arguments.loads or LOADS:
        measures: list[Measure] = []
        for n in arguments.sizes or LOADS[load][1]:
            measures.append(measure_apart(load, n, arguments.style))
            print(rows_of(measures)[-1], flush=True)


if __name__ == "__main__":
    main()
