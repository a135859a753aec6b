"""Every program in benchmarks/ runs at its smallest size, so that the figures on the pages can be repeated.

Those that take ten seconds and more run with the long proofs (make soak).
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import queue
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import country
import pytest
import transformers

from kinject.disk import read_jsonl, write_jsonl
from kinject.eval.scoring.answers import AnswerStore
from kinject.study.stages import Stage
from kinject.types import Answer
from small import load_benchmark

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
OTHER_ENVIRONMENTS = {
    "augment/curator_side.py": "requests.py",
    "eval/harness_side.py": "figures.py",
}
"""Programs that another benchmark starts with the Python of another tool -> the benchmark that starts them."""
IN_A_CHAIN = {"demo.py", "train/forgetting.py", "sandbox/ship.py"}
"""Programs that need the demo's runs: tests/test_first_run.py runs them."""
OF_A_GPU = {
    "gpu/run.py",
    "gpu/measures.py",
    "gpu/training.py",
    "gpu/page.py",
    "gpu/packages.py",
    "gpu/proofs.py",
    "gpu/real.py",
    "gpu/varlen.py",
}
"""tests/test_gpu_program.py runs them."""


@pytest.fixture
def material(tmp_path: Path, trained_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    """A folder like the data that the benchmarks name: MMLU, SQuAD, fictional passages, a tokenizer."""
    folder = tmp_path / "material"
    trained_tokenizer.save_pretrained(folder / "models/tokenizers/gpt2")
    letters = [
        {"question": f"Which is {n}?", "choices": ["a", "b", "c", "d"], "answer": n % 4}
        for n in range(8)
    ]
    _write_rows(folder / "data/mmlu/anatomy.test.jsonl", letters[:2])
    _write_rows(folder / "data/mmlu/anatomy.dev.jsonl", letters[2:])
    towns = ("Lowmere", "Stonegate", "Farrow", "Kelm", "Harbury", "Millfield", "Oakton", "Ravensby")
    documents = [
        {
            "title": town,
            "text": f"The old mill of {town} was built by Arden Vale on {n + 3} March 1987. It lies {n + 40} km off.",
        }
        for n, town in enumerate(towns)
    ]
    _write_rows(folder / "data/squad/squad2_dev_half_paragraphs.jsonl", [
        {"id": f"{row['title']}/0", "text": row["text"]} for row in documents
    ])  # fmt: skip
    questions = [
        {
            "id": str(n),
            "paragraph": f"{row['title']}/0",
            "question": f"Who built {row['title']}?",
            "answers": [row["title"]],
        }
        for n, row in enumerate(documents)
    ]
    _write_rows(folder / "data/squad/squad2_dev_half_qa.jsonl", questions)
    probes = {
        f"{level}_{part}": []
        for level in ("mem", "gen", "hard_gen")
        for part in ("input", "target")
    }
    passages = [
        {
            "train_context": row["text"],
            "paraphrases": [row["text"]],
            **probes,
            "mem_input": ["Who"],
            "mem_target": [str(n)],
        }
        for n, row in enumerate(documents)
    ]
    fictional = folder / "data/fictional/fictional_knowledge_paraphrased.json"
    fictional.parent.mkdir(parents=True)
    fictional.write_text(json.dumps(passages), encoding="utf-8")
    return folder


def _write_rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def run_here(
    forked: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Run a program of benchmarks/ in this process, which has the libraries loaded; return what it printed."""

    def _run(name: str, *arguments: str | Path) -> str:
        monkeypatch.chdir(Path.cwd())  # back here afterwards
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        monkeypatch.setattr(
            sys, "path", [*sys.path, str((BENCHMARKS / name).parent)]
        )  # for what it imports from there
        code: object = 0
        try:
            runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        assert not code
        return capsys.readouterr().out

    return _run


def _run_apart(name: str, *arguments: str | Path) -> str:
    """Run a program of benchmarks/ in a process of its own; return what it printed."""
    command = [sys.executable, str(BENCHMARKS / name), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_program_has_a_test_here() -> None:
    programs = {str(path.relative_to(BENCHMARKS)) for path in BENCHMARKS.rglob("*.py")} - {
        "augment/planted_facts.py"
    }
    here = set(re.findall(r"\"([\w/]+\.py)\"", Path(__file__).read_text("utf-8")))
    assert programs <= here
    chain = (ROOT / "tests/test_first_run.py").read_text("utf-8")
    for name in IN_A_CHAIN:
        assert name in chain


@pytest.mark.parametrize("name", OTHER_ENVIRONMENTS)
def test_a_program_for_another_environment_compiles_and_is_started(name: str) -> None:
    compile((BENCHMARKS / name).read_text("utf-8"), name, "exec")
    starter = (BENCHMARKS / name).with_name(OTHER_ENVIRONMENTS[name])
    assert Path(name).name in starter.read_text("utf-8")


@pytest.mark.soak
def test_choices_of_a_few_questions(tmp_path: Path) -> None:
    for level in ("words", "reworded", "inferred", "combined"):
        lines = (ROOT / "eval" / "company" / f"{level}.jsonl").read_text("utf-8").splitlines()
        (tmp_path / f"{level}.jsonl").write_text("\n".join(lines[:24]) + "\n", "utf-8")
    _run_apart("company/choices.py", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text("utf-8").splitlines()]
    assert all(row["choices"][row["answer"]] == row["answers"][0] for row in rows)


@pytest.mark.soak
def test_requests() -> None:  # it waits for its own children
    printed = _run_apart("augment/requests.py", "plain", "--passages", "2")
    assert re.search(r"request phase [\d.]+ x; got 20 of 20, sent 20, exit 0", printed)
    assert re.search(r"bare loop.* got 20 of 20", printed)


def test_costs(run_here: Callable[..., str]) -> None:
    printed = run_here("augment/costs.py", "--documents", "2")
    rows = {
        row[0]: row[1:]
        for row in re.findall(r"^\| `(\w+)` \| ([\d,]+) \|.* ([\d,]+) \|$", printed, re.MULTILINE)
    }
    assert len(rows) == 20
    assert rows["paraphrase"][0] == rows["paraphrase"][1]  # one request for each text
    assert rows["implications"][0] >= rows["implications"][1]


def test_retrieval(material: Path, run_here: Callable[..., str]) -> None:
    for command in ((), ("--learn",)):
        printed = run_here("eval/retrieval.py", "--material", material, *command)
        if not command:
            rows = re.findall(r"^\| (.+?) \| ([\d.]+) \(.*\| .*\|$", printed, re.MULTILINE)
            assert [name for name, _ in rows][:2] == ["bm25", "lexical"]
        else:
            assert (
                len(
                    re.findall(
                        r"learned from .*: words [\d.-]+, pieces .* recall at 1 .* words alone",
                        printed,
                    )
                )
                == 3
            )


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_hostile_files() -> None:
    printed = _run_apart("hostile.py", "--tries", "2", "--seed", "77")
    counts = re.findall(r"^(\w[\w ]*?) +(\d+) +(\d+)", printed, re.MULTILINE)
    assert [name for name, *_ in counts][-1] == "all"
    assert len(counts) == 20
    assert all(failed == "0" for *_, failed in counts)


def test_two_checkouts_side_by_side(tmp_path: Path) -> None:  # it waits for its own children
    other = tmp_path / "other"
    other.mkdir()
    (other / "src").symlink_to(ROOT / "src")
    printed = _run_apart("side_by_side.py", other, "--rounds", "2", "--only", "help")
    (row,) = re.findall(r"^\| help \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", printed, re.MULTILINE)
    assert all(float(number) > 0 for number in row)


def test_results_that_differ_are_named(tmp_path: Path) -> None:
    program = load_benchmark("side_by_side.py")
    off = ["eval.control=false"]
    assert program.arguments_of("eval", ROOT, off) == ["eval", "recipes/eval.yaml", *off]
    assert program.arguments_of("eval", tmp_path, off) == ["eval", "recipes/eval.yaml"]
    for folder, log_prob in ((tmp_path / "this", -1.5), (tmp_path / "other", -1.25)):
        answer = {"question_set": "new", "question_id": "q", "arm": "base", "format": "texts"}
        rows: list[dict[str, object]] = [
            {**answer, "k": k, "log_probs": [log_prob - k]} for k in (0, 2)
        ]
        _write_rows(folder / "runs/eval/answers.jsonl", rows)
        _write_rows(folder / "runs/augment/corpus.jsonl", [{"text": str(log_prob)}])
    corpus, answers = program.differences(tmp_path / "this", tmp_path / "other")
    assert corpus == "runs/augment/corpus.jsonl: DIFFERENT"
    assert answers.startswith("answers: 2 and 2, 2 in common")
    assert answers.endswith("a log-probability is 0.25")


@pytest.mark.soak
def test_find_lr_beside_a_sweep(
    run_here: Callable[..., str], tmp_path: Path, tiny_model: Path
) -> None:
    _write_rows(
        tmp_path / "corpus.jsonl", [{"text": f"Person {i} was born in Kelm."} for i in range(24)]
    )
    recipe = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)}, "corpus": {"path": str(tmp_path / "corpus.jsonl")},
        "trainer": {"per_device_train_batch_size": 4, "max_length": 64, "max_steps": 4},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    options = ("--seeds", "1", "--rates", "1e-3", "1e-1", "--sweep-seeds", "1")
    printed = run_here("train/find_lr.py", tmp_path / "recipe.yaml", *options)
    losses = {
        rate: float(loss)
        for rate, loss in re.findall(r"^rate (\S+): (\S+)$", printed, re.MULTILINE)
    }
    assert f"best rate of the sweep: {min(losses, key=losses.__getitem__)}" in printed
    assert re.search(r"^[01] of 1 suggestions outside a factor of three", printed, re.MULTILINE)


def test_versions_of_documents_that_differ_in_one_fact(
    run_here: Callable[..., str], tmp_path: Path
) -> None:
    towns = ("Lowmere", "Farrow", "Kelm", "Arden")
    for number, town in enumerate(towns):
        rows = [
            f"In {1990 + line} the mill of {town} sold {17 * line + number} sacks to Bryn."
            for line in range(12)
        ]
        (tmp_path / f"{town}.txt").write_text("\n".join(rows))
    assert "4 pairs: the newest kept 4, both kept 4" in run_here("documents/versions.py", tmp_path)


@pytest.mark.soak
@pytest.mark.skipif(not shutil.which("chromium"), reason="a browser prints the PDFs")
def test_readers_of_documents(run_here: Callable[..., str]) -> None:
    printed = run_here("documents/readers.py", "2")
    matches = re.findall(r"^\| ([\w ]+\.\w+) \| 2 \| \d+ \| ([\d.]+)% \|", printed, re.MULTILINE)
    assert len(matches) == 8
    assert [float(percent) for name, percent in matches if "pdf" not in name] == [100, 100, 100]
    assert all(float(percent) >= 50 for _, percent in matches)


@pytest.mark.soak
def test_a_heap_of_kinds_of_files(run_here: Callable[..., str], tmp_path: Path) -> None:
    assert re.search(
        r"kinds of files, 0 with text lost.*; 0 unreadable ones untold",
        run_here("documents/heap.py", tmp_path / "h"),
    )


def test_web_pages(tmp_path: Path, run_here: Callable[..., str]) -> None:
    truth = "The bridge at Arvika was built in 1931 and carries the road to the north. " * 8
    page = (
        f"<html><body><nav><a href=/>Home</a></nav><article><p>{truth}</p></article></body></html>"
    )
    (tmp_path / "html").mkdir()
    (tmp_path / "html" / "a.html.gz").write_bytes(gzip.compress(page.encode()))
    (tmp_path / "ground-truth.json").write_text(
        json.dumps({"a": {"articleBody": truth, "url": "x"}})
    )
    printed = run_here("documents/web_pages.py", tmp_path)
    rows = re.findall(
        r"^\| (\w+) \| 1 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", printed, re.MULTILINE
    )
    assert rows == [("kinject_text", *["1.000"] * 3), ("trafilatura_text", *["1.000"] * 3)]
    page_dir = tmp_path / "pages" / "one"
    page_dir.mkdir(parents=True)
    (page_dir / "source.html").write_text(page)
    (page_dir / "expected.html").write_text(f"<div><p>{truth}</p><p>Home again and again</p></div>")
    printed = run_here("documents/web_pages.py", tmp_path / "pages")
    assert re.findall(r"\| kinject_text \| 1 \| 1.000 \| 0.968 \|", printed)  # 120 of 124 words


def test_ground_truth_of_docling(tmp_path: Path, run_here: Callable[..., str]) -> None:
    for name in ("sources", "groundtruth"):
        (tmp_path / "csv" / name).mkdir(parents=True)
    (tmp_path / "csv/sources/tolls.csv").write_text("Stop,Toll\nKelm,3\nArden,5\n")
    truth = "| Stop | Toll |\n|---|---|\n| Kelm | 3 |\n| Arden | 4 |\n"
    (tmp_path / "csv/groundtruth/tolls.csv.md").write_text(truth)
    cells = [{"text": text} for text in ("Stop", "Toll", "Kelm", "3", "Arden", "4", "")]
    structure = {"tables": [{"data": {"table_cells": cells}}]}
    (tmp_path / "csv/groundtruth/tolls.csv.json").write_text(json.dumps(structure))
    printed = run_here("documents/ground_truth.py", tmp_path, "--other-python", sys.executable)
    assert printed.splitlines()[0] == "| kind | files | kinject |"  # neither tool is here
    row = re.search(r"^\| csv \| 1 \| ([\d.]+); ([\d.]+) \|$", printed, re.MULTILINE)
    assert row is not None
    assert row.groups() == ("0.833", "0.833")  # five of six


def test_faithfulness(material: Path, run_here: Callable[..., str]) -> None:
    printed = run_here("augment/faithfulness.py", material / "data", "--errors", "4")
    assert "8 of 8 accepted" in printed
    caught = re.findall(
        r"^(?:number|date|unit|name) +(?:fictional|squad) +([\d.]+)% refused, of 2$",
        printed,
        re.MULTILINE,
    )
    assert len(caught) == 8
    assert (
        len(
            re.findall(
                r"^cause +(?:en|de|fr|es|zh|ja) +[\d.]+% refused, of [12]$", printed, re.MULTILINE
            )
        )
        == 6
    )
    assert max(map(float, caught)) == 100


def test_acceptance_and_the_data_of_its_study(tmp_path: Path, run_here: Callable[..., str]) -> None:
    passage = "Mara Lind built the Falk Bridge in 1931. The bridge of the valley is 120 m long, as Karin Ekberg wrote."
    answer = (
        "Certainly! Here it is:\n\nIn 1931 the Falk Bridge was built by Mara Lind. Karin Ekberg wrote that it is 120 m long "
        "and stands in the valley."
    )
    _write_rows(tmp_path / "documents.jsonl", [{"id": "d", "title": "", "text": passage}])
    _write_rows(tmp_path / "qwen7b_rewrites.jsonl", [{"document_id": "d", "text": answer}] * 2)
    _write_rows(
        tmp_path / "questions.jsonl",
        [
            {"id": f"q{n}", "document_id": "d", "question": "?", "answers": [str(n)]}
            for n in range(4)
        ],
    )
    printed = run_here("augment/acceptance.py", tmp_path)
    assert (
        "| qwen7b_rewrites as paraphrase: 2 | 50.0% | 2 | 50.0% |" in printed
    )  # the second is a copy
    assert "'preamble': 2" in printed
    printed = run_here("augment/study_data.py", tmp_path, tmp_path / "out")
    assert (
        f"{tmp_path}/out/old.jsonl: 1 rows" in printed
    )  # the passage alone: the old rule refuses a preamble
    assert f"{tmp_path}/out/new.jsonl: 2 rows" in printed
    assert f"{tmp_path}/out/asked.jsonl: 4 rows" in printed
    for writer in ("qwen7b_implications", "gpt4_1_implications", "qwen7b_trained_implications"):
        _write_rows(
            tmp_path / f"{writer}.jsonl", [{"document_id": "d", "text": f"{answer} {writer}"}]
        )
    printed = run_here("augment/seal_data.py", tmp_path, tmp_path / "seal")
    assert re.findall(r"^(\w+) +(\d+) rows", printed, re.MULTILINE) == [
        ("documents", "1"), ("passages", "1"), ("asked", "4"), ("written", "4"), ("own", "2"), ("gpt", "2"), ("trained", "2"),
    ]  # fmt: skip


@pytest.mark.soak
def test_what_is_kept_of_a_report(run_here: Callable[..., str], tmp_path: Path) -> None:
    control = {
        "accuracy": 0.25,
        "net": {"delta": 0.1234567, "low": 0.01, "high": 0.2, "p_holm": 0.04},
    }
    outcome = {"outcome": "wrong", "rate": 0.2, "low": 0.1, "high": 0.3}
    result = {
        "model": "m", "arm": "ft", "question_set": "new", "format": "texts", "shots": 0, "k": 0, "score": "sum", "n": 40,
        "accuracy": 2 / 3, "low": 0.5, "high": 0.8, "by_seed": [2 / 3], "to_base": None, "control": control,
        "outcomes": [outcome],
    }  # fmt: skip
    cost = {"arm": "ft", "stage": "train", "work_seconds": 12.5}
    report = {
        "title": "A study", "commands": ["kinject study a.yaml"], "seeds": [0], "written": "2026-01-01", "claims": [],
        "versions": {"kinject": "0.1.0", "torch": "2", "python": "3"}, "perplexities": [], "results": [result],
        "arms": [{"name": "ft"}], "costs": [cost, {**cost, "stage": "eval"}, {**cost, "arm": "base"}],
    }  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(report))
    kept = json.loads(run_here("study/keep.py", tmp_path, "--claims", "abc123"))
    assert kept["claims_commit"] == "abc123"
    assert kept["work_seconds"] == {"ft": [12.5]}
    (row,) = kept["results"]
    assert (row["accuracy"], row["without_question"], row["net"]["delta"]) == (
        0.666667,
        0.25,
        0.123457,
    )
    assert row["outcomes"] == [outcome]
    assert "to_base" not in row


def test_kept_stages_are_done_elsewhere_without_their_weights(tmp_path: Path) -> None:
    program = load_benchmark("study/stages.py")
    stages, archives, elsewhere = (tmp_path / name for name in ("stages", "archives", "elsewhere"))
    for kind, stage in (("augment", "a"), ("train", "b"), ("train", "unfinished"), ("eval", "c")):
        folder = stages / kind / stage
        (folder / "model").mkdir(parents=True)
        (folder / "model/model.safetensors").write_text("weights")
        (folder / "answers.jsonl").write_text(stage)
        (folder / "stage.log").write_text("printed")
        if stage != "unfinished":
            (folder / "done.json").write_text(json.dumps({"id": stage, "seconds": 1.5}))
            manifest = {"written": "2026-03-29T04:05:06+02:00"}
            (folder / "manifest.json").write_text(json.dumps(manifest))
    (stages / "claims").mkdir()
    (stages / "claims/d.json").write_text("declared first")
    assert [program.keep(stages, archives) for _ in range(2)] == [2, 0]
    first = {path.name: path.read_bytes() for path in archives.glob("*.xz")}
    (elsewhere / "eval/c").mkdir(parents=True)
    (elsewhere / "eval/c/done.json").write_text("its own")
    assert program.restore(archives, elsewhere) == 1
    found = {str(path.relative_to(elsewhere)) for path in elsewhere.rglob("*") if path.is_file()}
    kept = {f"train/b/{name}" for name in ("answers.jsonl", "done.json", "manifest.json")}
    kept.add("claims/d.json")
    assert found == {*kept, "eval/c/done.json"}
    restored = Stage("b", "train", elsewhere / "train/b", "", ())
    # An hour of summer is in the manifest: 02:05:06 in Greenwich.
    assert restored.ended() == 1_774_749_906
    counts = restored.read_done()
    assert counts is not None
    assert (counts["seconds"], counts["deleted"]) == (1.5, True)
    shutil.rmtree(archives)
    program.keep(stages, archives)
    assert {path.name: path.read_bytes() for path in archives.glob("*.xz")} == first


def test_answers_to_other_questions_of_the_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = load_benchmark("study/other_answers.py")
    asked = [("a1", "a", "1931"), ("a2", "a", "1987"), ("b1", "b", "2004"), ("b2", "b", "1931")]
    questions = [
        {"id": name, "document_id": document, "kind": "year", "answers": [year]}
        for name, document, year in asked
    ]
    write_jsonl(tmp_path / "years.jsonl", questions)
    texts = {
        "a1": "In 1931.",
        "a2": "In 1931.",
        "b1": "In 1987, or in 2004.",
        "b2": "I do not know.",
    }
    # The first answer to a question is replaced by the next; the last is a choice.
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        for number, (name, text) in enumerate([("a1", "1987"), *texts.items()]):
            answer = Answer(
                name, "years", "base", "generate", 0, 0, (), 0, (), (3,), (), text=text,
                accepted=("1931",),
            )  # fmt: skip
            store.add(str(number), answer)
        choice = Answer("a2", "years", "base", "texts", 0, 0, (), 0, (-1.0, -2.0), (1, 1), (4, 4))
        store.add("choice", choice)
    monkeypatch.setattr(program, "texts_of", lambda recipe: [("trained", tmp_path)])
    counts = program.count(None, program.Questions({"years": str(tmp_path / "years.jsonl")}))
    (found,) = counts.values()
    assert counts.keys() == {("trained", "years")}
    assert found.own == [True, False, True, False]
    # 1987 for a1, 1931 for a2; 1931 for b1, 2004 for b2.
    assert found.same_document == [0, 1, 0, 0]
    # 2004 for a1: b2 asks for the same year; both for a2; both of a for b1; 1987 for b2.
    assert found.other_documents == [0, 0.5, 0.5, 0]


@pytest.mark.soak
def test_verdicts(run_here: Callable[..., str]) -> None:
    printed = run_here("study/verdicts.py", "--studies", "1")
    rates = dict(re.findall(r"^\| (.*) \| ([\d.]+) \([\d.]+\) \| \d+ \|$", printed, re.MULTILINE))
    assert len(rates) > 40
    never = [name for name in rates if "disagree on 0" in name or "leader that is worse" in name]
    assert len(never) == 6
    assert {rates[name] for name in never} == {"0.0"}


@pytest.mark.soak
def test_verdicts_that_nothing_was_tuned_on(run_here: Callable[..., str]) -> None:
    printed = run_here("study/untuned.py", "--studies", "1")
    rates = dict(re.findall(r"^\| (.*) \| ([\d.]+) \([\d.]+\) \| 1 \|$", printed, re.MULTILINE))
    assert set(rates.values()) <= {"0.0", "100.0"}
    words = ("known, ", "prove, ", "sequence, ", "judge that", "near chance", "ten null arms")
    assert all(any(name.startswith(word) for name in rates) for word in words)


def test_a_probe_in_two_wordings(run_here: Callable[..., str], tmp_path: Path) -> None:
    with AnswerStore(tmp_path / "answers.jsonl") as store:
        for name, right in (("first", "abcg"), ("second", "abdh")):
            for item in "abcdefgh":
                text = "three words now" if item in right else "one"
                answer = Answer(
                    item, name, "base", "generate", 0, 0, (), 0, (), (3,), (), text=text,
                    subject=item, checks={"min_words": 3},
                )  # fmt: skip
                store.add(f"{name}{item}", answer)
    printed = run_here("eval/rewordings.py", tmp_path, "first", "second")
    assert "| base | 8 | 50.0% | 50.0% | 2 | 4 | 0.00 | +0.0 (" in printed


def test_judge(
    tmp_path: Path, run_here: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS / "augment"))  # as when the program is started
    printed = run_here("augment/judge.py", "make", tmp_path, "--texts", "8")
    assert "8 texts, 4 of them wrong" in printed
    rows = [json.loads(line) for line in (tmp_path / "key.jsonl").read_text("utf-8").splitlines()]
    answers = [
        {"id": row["id"], "answer": "UNFAITHFUL: words" if row["kind"] else "FAITHFUL"}
        for row in rows
    ]
    _write_rows(tmp_path / "answers.jsonl", answers)
    printed = run_here("augment/judge.py", "score", tmp_path, tmp_path / "answers.jsonl")
    assert re.search(
        r"^judge +caught 4 of 4 \(.*\); refused 0 of 4 correct texts$", printed, re.MULTILINE
    )
    _write_rows(tmp_path / "answers.jsonl", answers[:3])
    printed = run_here("augment/judge.py", "score", tmp_path, tmp_path / "answers.jsonl")
    assert "5 of 8 texts have no answer and are left out" in printed
    n_wrong = sum(bool(row["kind"]) for row in rows[:3])
    assert re.search(
        rf"^judge +caught {n_wrong} of {n_wrong} \(.*\); refused 0 of {3 - n_wrong} ",
        printed,
        re.MULTILINE,
    )


def test_refusals(run_here: Callable[..., str]) -> None:
    printed = run_here("augment/refusals.py", "--show")
    total = re.findall(
        r"^\| all \| (\d+) \| (\d+) .*\| (\d+) \| (\d+) \| (\d+) \|$", printed, re.MULTILINE
    )
    assert len(total) == 2
    good, refused, bad, caught, accepted = map(int, total[0])
    assert refused <= 0.08 * good
    assert caught >= 0.6 * bad
    assert caught + accepted == bad


def test_texts_without_facts(run_here: Callable[..., str]) -> None:
    printed = run_here("augment/refusals.py", "--facts")
    rows = re.findall(r"^\| (\d+) \| all \| (\d+) \| (\d+) \|", printed, re.MULTILINE)
    judged = {int(expected): (int(n), int(lost)) for expected, n, lost in rows}
    assert judged[5][0] > 30  # of the answers in one folder
    assert judged[5][1] == 0  # the rule that ships loses none
    assert judged[1][0] >= judged[5][0]


def test_fictional(material: Path, tmp_path: Path, run_here: Callable[..., str]) -> None:
    printed = run_here("fictional.py", material / "data/fictional", tmp_path / "out")
    assert "documents.jsonl: 8 rows" in printed
    assert "memorised.jsonl: 8 rows" in printed
    variants = tmp_path / "variants.jsonl"
    _write_rows(variants, [{"document_id": "fictional-003", "text": "one that passed"}])
    more = ("--paraphrased", "--passed", variants)
    printed = run_here("fictional.py", material / "data/fictional", tmp_path / "out", *more)
    assert "unchecked.jsonl: 16 rows" in printed
    drawn = [row for _, row in read_jsonl(tmp_path / "out/drawn.jsonl")]
    assert len(drawn) == 9
    assert drawn[-1]["document_id"] == "fictional-003"
    written = [row["text"] for _, row in read_jsonl(tmp_path / "out/sentences.jsonl")]
    assert written[:2] == [
        "The old mill of Lowmere was built by Arden Vale on 3 March 1987.",
        "It lies 40 km off.",
    ]
    assert len(written) == 32
    run_here("fictional.py", material / "data/fictional", tmp_path / "some", *more, "--ends", "05")
    for name, n in (("documents", 2), ("memorised", 2), ("unchecked", 4), ("sentences", 8)):
        rows = [row for _, row in read_jsonl(tmp_path / f"some/{name}.jsonl")]
        assert len(rows) == n
        assert {row.get("document_id", row["id"]) for row in rows} == {
            "fictional-000",
            "fictional-005",
        }
        assert all(
            row in [whole for _, whole in read_jsonl(tmp_path / f"out/{name}.jsonl")]
            for row in rows
        )


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_figures_of_the_scorer(material: Path) -> None:
    printed = _run_apart(
        "eval/figures.py", "--material", material, "--subjects", "1", "--questions", "2", "--rag-questions", "2",
        "--layers", "1", "--vocabulary", "2000", "--threads", "1", "--harness", "false",
    )  # fmt: skip
    assert (
        len(
            re.findall(
                r"^\w+, \d shots, 2 questions: kinject [\d.]+ a second", printed, re.MULTILINE
            )
        )
        == 3
    )
    gap = re.search(r"RAG, K = 0..5, \d questions: .* largest difference ([\d.e+-]+)", printed)
    assert gap is not None
    assert float(gap[1]) < 1e-4
    assert "head, vocabulary 2,000: peak" in printed


@pytest.mark.soak
def test_runner_of_a_study(tmp_path: Path, tiny_model: Path, run_here: Callable[..., str]) -> None:
    recipe = country.write_study(tmp_path, tiny_model, seeds=[0], arms={"ft": {"rag": False}})
    printed = run_here("study/runner.py", recipe)
    assert re.search(r"one worker \| \d+ s, of which stages \d+ s", printed)
    assert re.search(r"rerun when finished \| [\d.]+ s", printed)


@pytest.mark.soak
def test_written_answers(run_here: Callable[..., str], material: Path) -> None:
    sizes = ("--questions", "2", "--layers", "1", "--threads", "1")
    printed = run_here("eval/generation.py", *sizes, "--material", material)
    assert re.search(r"kinject: [\d.]+ s, [\d.]+ s of processor time, [\d.]+ a second", printed)


def test_judges(run_here: Callable[..., str], material: Path) -> None:
    printed = run_here("eval/judges.py", "--material", material)
    assert re.search(
        r"^perfect: 1\.00 / 1\.00, 1\.00 / 1\.00, 1\.00 / 1\.00; accepted$", printed, re.MULTILINE
    )
    assert len(re.findall("; refused$", printed, re.MULTILINE)) == 4


@pytest.mark.soak
def test_throughput(run_here: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    for option, found, least in (("--steps", "2", "3"), ("--rounds", "0", "1")):
        with pytest.raises(AssertionError):
            run_here("train/throughput.py", option, found)
        assert f"{option}: found {found}, allowed: {least} or more" in capsys.readouterr().err
    printed = run_here("train/throughput.py", "--steps", "3", "--rounds", "1")
    assert len(re.findall(r"[\d,]+ tokens/s   kinject / it = [\d.]+", printed)) == 3


def test_bytes_of_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = load_benchmark("train/bytes_per_weight.py")
    answer: queue.Queue[tuple[int, int, int, int]] = queue.Queue()
    shape = argparse.Namespace(layers=8, width=256, vocabulary=256)
    program.measure(shape, "bfloat16 rounded, adamw_8bit", answer)
    n_weights, n_bytes, *_ = answer.get()
    theory = program.ROWS["bfloat16 rounded, adamw_8bit"][-1]
    assert theory == 6
    assert theory <= n_bytes / n_weights < 1.1 * theory


@pytest.mark.soak
def test_memory_while_loading(run_here: Callable[..., str]) -> None:
    printed = run_here("train/loading_memory.py", "--shape", "tiny", "--kinds", "fsdp2")
    rows = [
        list(map(float, line.split("|")[3:5]))
        for line in printed.splitlines()
        if line.startswith("| fsdp2")
    ]
    assert len(rows) == 2
    assert all(size > 0 for row in rows for size in row)


def test_memory_of_a_merge(run_here: Callable[..., str]) -> None:
    shape = ("--width", "512", "--inner", "4096", "--vocabulary", "8000", "--shard-mb", "20")
    row = run_here("train/merge_memory.py", *shape).splitlines()[-1].split("|")
    assert int(row[2]) > 1
    assert float(row[5]) > 0  # tests/train/test_merge.py counts the tensors that are held


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # on tied embeddings
@pytest.mark.soak
def test_sound_and_broken_copies_of_a_model(run_here: Callable[..., str], tmp_path: Path) -> None:
    options = ("--questions", "100", "--steps", "15", "--ways", "dora", "head", "full")
    printed = run_here("eval/prove.py", tmp_path, *options)
    assert "3 of 3 sound copies pass\n2 of 2 broken copies are caught" in printed


@pytest.mark.soak
def test_a_plan_beside_the_formulas(run_here: Callable[..., str]) -> None:
    printed = run_here("plan/formula.py")
    ratios = re.findall(
        r"qwen3/8b-cpt\.yaml +(weights|gradients|states) +[\d.]+ +[\d.]+ +([\d.]+)", printed
    )
    assert len(ratios) == 3
    assert ("weights", "1.00") in ratios
    divided = printed.partition("zero2, 8 x H100")[2].partition("fsdp2, 8 x H100")[0]
    assert (
        re.findall(r"(?:weights|gradients|states) +[\d.]+ +[\d.]+ +([\d.]+)", divided)
        == ["1.00"] * 3
    )


def test_shortcuts_of_the_question_sets(run_here: Callable[..., str]) -> None:
    printed = run_here("eval/shortcuts.py")
    row = re.search(r"company reworded +512 +\d+ +\d+ +(\d+) +(\d+) +(\d+) +(\d+) +25", printed)
    assert row is not None
    assert all(22 <= int(share) <= 28 for share in row.groups())


@pytest.mark.soak
def test_memory_of_a_plan(run_here: Callable[..., str]) -> None:
    printed = run_here("plan/memory.py", "--only", "1M", "--steps", "2")
    row = re.search(r"\| 1M \| \d+ \| \d+ \| \d+ \| \d+ \| ([\d.]+) \|", printed)
    assert row is not None
    assert float(row[1]) > 0


def test_memory_of_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)  # for what it takes from load.py
    program = load_benchmark("corpus_memory.py")
    program.write_chain(tmp_path, 8)
    for stage in program.STAGES:
        program.STAGES[stage](tmp_path, 8)
    values, is_sampled = iter([10.0, 70.0]), threading.Event()

    def own_memory() -> float:
        value = next(values, 20.0)
        if value == 20.0:
            is_sampled.set()
        return value

    monkeypatch.setattr(program, "own_memory", own_memory)
    with program.Peak() as peak:
        is_sampled.wait()
    assert peak.value == 70
    measured = [(1_000, 0.5, 60.0), (5_000, 2.75, 64.0)]
    assert program.table("tokens", measured) == [
        "| tokens | 1,000 | 0.5 s | 500 us |  | 60 |",
        "| tokens | 5,000 | 2.8 s | 550 us | 1.10 | 64 |",
        "| tokens | 10,000,000 (extended) | 5,625 s | 562 us | | 10,059 (below 2,048: NO) |",
    ]


@pytest.mark.parametrize(
    "load",
    ["augment", "file", "corpus", "packing", "scoring", "eval", "view", "inference", "report"],
)
def test_load(load: str, blank_figures: None) -> None:
    program = load_benchmark("load.py")
    (row,) = program.rows_of([program.measure(load, 12)])
    assert re.search(rf"^\| {load} \| 12 \w+ \| [\d.]+ s \|", row)
