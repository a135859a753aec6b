"""The commands of the pages run: the main job in order on a small part of the sandbox, then every other that needs seconds."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
from matplotlib.figure import Figure

from kinject.cli import main
from kinject.question_formats import FORMATS
from kinject.sandbox import build
from kinject.sandbox.build import generate_base_corpus
from kinject.train.objectives import OBJECTIVES

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = {
    "train": ["trainer.max_steps=2", "trainer.warmup_steps=0"],
    "augment": ["recipes/augment.yaml", "augment.styles.paraphrase=1"],
    "eval": ["recipes/eval.yaml", "eval.limit=4"],
    "plan": ["--no-calibration"],
    "find-lr": ["--steps", "20"],
    "doctor": ["recipes/cpt.yaml"],
}
"""Verb -> what makes it small, unless the command has it."""
NOT_HERE = {
    "recipes/llama-3.1-8b/": "a model of the hub",
    "recipes/qwen3/": "a model of the hub",
    "recipes/handbook/": "an endpoint with a key, a model of the hub; tests/augment/test_survey.py writes them",
    "augment.generator.base_url": "a server; tests/faulty_server.py has a local one",
    "recipes/real-data/": "data of another project",
    "recipes/studies/natural": "data of another project",
    "recipes/studies/strategies": "minutes; tests/study/test_arms.py plans its arms",
    "kinject view --open": "it serves until it is stopped; tests/view/test_view.py starts it",
    "kinject recipes data get": "a network; tests/corpus/test_public_data.py fetches from files",
    "recipes/studies/paper-": "public data; tests/study/test_paper_studies.py has some of the same layout",
    "kinject demo": "tests/cli/test_demo.py runs it small",
    "--job slurm": "tests/cli/test_slurm.py runs the job",
    "--shard ": "tests/augment/test_shards.py",
    "--merge": "tests/augment/test_shards.py",
    "kinject chat RUN": "a run of its own; tests/cli/test_chat.py asks models",
    "recipes/studies/sandbox": "minutes; tests/test_benchmarks.py runs a small study",
}
"""Part of a documented command -> why it is not run here."""
OTHERS = {
    "python3 -m venv": "tests/soak/test_install.py",
    "pip install": "tests/soak/test_install.py",
    "uv ": "needs uv, and PyTorch's index",
    "sbatch ": "tests/soak/test_engines.py runs jobs on a Slurm of this machine",
    "KINJECT_CONTACT=": "a network; tests/corpus/test_wikipedia.py has a stand-in of it",
    "make ": "the tests themselves, or what runs them; benchmarks/demo.py runs make demo",
    "accelerate launch": "tests/train/test_distributed.py, tests/eval/test_run.py",
    "python benchmarks/": "tests/test_benchmarks.py",
    "bash benchmarks/gpu/lease.sh": "tests/test_gpu_program.py",
    "python -m kinject.eval.harness": "tests/eval/test_harness.py",
}
"""Beginning of a documented command that is not kinject's -> what runs it."""


def _blocks(pages: Iterable[Path], language: str) -> Iterator[str]:
    for page in pages:
        for block in re.finditer(
            rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            yield block[1]


def _commands(pages: Iterable[Path]) -> Iterator[list[str]]:
    """Yield the words of every documented `kinject` command, continued lines joined, comments off."""
    for block in _blocks(pages, "console"):
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            # A variable of the environment may stand before the command.
            command = re.sub(r"^(\w+=\S* )+", "", line[2:])
            if command.startswith("kinject"):
                yield shlex.split(command, comments=True)
            elif line.startswith("$ "):
                assert line[2:].startswith(tuple(OTHERS)), f"{line}: run by no test"


def test_what_is_not_run_here_is_on_a_page() -> None:
    lines = [*(" ".join(words) for words in _commands(PAGES)), *_blocks(PAGES, "python")]
    assert [part for part in NOT_HERE if not any(part in line for line in lines)] == []


def _run(words: list[str]) -> None:
    small = SMALL.get("".join(words[1:2]), [])
    small = [
        word for word in small if len(words) == 2 or not word.endswith(".yaml")
    ]  # a longer one names its recipe
    if "--batch" in words:
        small = []  # it tries no rates
    assert main([*words[1:], *small]) in (0, 1), words  # 1: finished, but short of what was asked


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the checkout's recipes, data and questions, and what the pages assume to be there."""
    for name in ("data", "eval"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")  # kinject try writes there
    shutil.copy(ROOT / "recipes/cpt.yaml", tmp_path / "my-recipe.yaml")
    shutil.copy(ROOT / "docs/faq.md", tmp_path / "manual.md")
    (tmp_path / "handbook").mkdir()
    page = Figure()
    page.text(0.1, 0.5, "The bridge at Arvika was built in 1931 and carries the road to the north.")
    (tmp_path / "archive" / "1931").mkdir(parents=True)
    page.savefig(tmp_path / "archive" / "1931" / "bridge.pdf")
    shutil.copy(ROOT / "docs/faq.md", tmp_path / "handbook")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run_main_job() -> list[list[str]]:
    """Run the commands of the quickstart in order; return them."""
    main_job = [
        words
        for words in _commands([ROOT / "docs/quickstart.md"])
        if words[1] not in ("recipes", "demo")
    ][:6]
    assert [words[1] for words in main_job] == [
        "sandbox",
        "sandbox",
        "augment",
        "train",
        "train",
        "eval",
    ]
    with pytest.MonkeyPatch.context() as smaller:  # 600 texts of the corpus are enough for replay
        smaller.setattr(build, "generate_base_corpus", partial(generate_base_corpus, n_rows=600))
        for words in main_job:
            _run(words)
    return main_job


@pytest.mark.usefixtures("forked", "blank_figures")
def test_the_documented_commands_run_and_the_benchmark_of_the_demo_reads_their_results(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main_job = _run_main_job()
    assert main(["eval", "recipes/eval.yaml", "eval.limit=4"]) == 0
    assert "report: runs/eval/report.html" in capsys.readouterr().out
    assert (checkout / "runs/eval/report.html").stat().st_size > 10_000
    for copy in ("eval-before", "eval-after"):
        shutil.copytree(checkout / "runs/eval", checkout / "runs" / copy)

    done = {tuple(words) for words in main_job}
    for words in _commands(PAGES):
        line = " ".join(words)
        elsewhere = any(part in line for part in NOT_HERE) and "--dry-run" not in words
        if "--dry-run" in words and (
            "recipes/studies/" not in line or "recipes/studies/paper-" in line
        ):
            elsewhere = True
        if tuple(words) in done or elsewhere:
            continue
        done.add(tuple(words))
        if words[1:3] == ["recipes", "copy"]:
            folder = checkout / "copied" / "-".join(words[3:]).replace("/", "-")
            folder.mkdir(parents=True)
            with monkeypatch.context() as elsewhere_in:
                elsewhere_in.chdir(folder)
                _run(words)
            assert list(folder.rglob("*.yaml"))
        else:
            _run(words)
    for block in _blocks(PAGES, "python"):
        if any(part in block for part in NOT_HERE):
            continue
        (checkout / "block.py").write_text(
            re.sub(r"max_steps=\d+", "max_steps=2", block), encoding="utf-8"
        )
        # CONTRIBUTING's add a format and an objective, which no test after this one may find.
        with patch.dict(FORMATS), patch.dict(OBJECTIVES):
            runpy.run_path(str(checkout / "block.py"), run_name="__main__")
    assert {words[1] for words in done if len(words) > 1} >= {
        "recipes",
        "compare",
        "find-lr",
        "plan",
        "view",
        "study",
    }

    monkeypatch.setattr(sys, "argv", ["demo.py", "--report", str(checkout)])
    runpy.run_path(str(ROOT / "benchmarks/demo.py"), run_name="__main__")
    assert len(re.findall(r"\| (?:yes|NO) \|$", capsys.readouterr().out, re.MULTILINE)) == 5


@pytest.mark.soak
@pytest.mark.usefixtures("forked", "blank_figures")
def test_the_benchmarks_of_shipped_models_and_of_forgetting_read_the_main_job(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _run_main_job()
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["ship.py", "base", "--measure", "--limit", "8"])
    runpy.run_path(str(ROOT / "benchmarks/sandbox/ship.py"), run_name="__main__")
    assert capsys.readouterr().out.count("] |\n") == 6

    arguments = [
        "trainer.max_steps=2",
        "trainer.warmup_steps=0",
        "--arms",
        "replay 25%",
        "--limit",
        "8",
    ]
    monkeypatch.setattr(sys, "argv", ["forgetting.py", *arguments])
    runpy.run_path(str(ROOT / "benchmarks/train/forgetting.py"), run_name="__main__")
    rows = re.findall(
        r"^\| .* \| [\d.]+ \| [\d.]+ \| -?[\d.]+ \| \d+ \|$", capsys.readouterr().out, re.MULTILINE
    )
    assert len(rows) == 4  # base, the arm, two averages
