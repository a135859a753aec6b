"""kinject augment and kinject sandbox serve as a user meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kinject.cli import main
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country

pytestmark = pytest.mark.usefixtures("canary_key")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe over three sandbox entries."""
    monkeypatch.chdir(tmp_path)
    people = create_country(n_known=1, n_new=3).new
    rows = [
        {"id": person.name, "title": person.name, "text": render_entry(person, 0)}
        for person in people
    ]
    (tmp_path / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        "run_dir: run\naugment:\n  documents: documents.jsonl\n  styles: {paraphrase: 2}\n  generator: {kind: sandbox}\n"
    )
    return tmp_path


def test_a_dry_run_prints_what_would_be_asked_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["augment", "recipe.yaml", "--dry-run"]) == 0
    assert "rewritings             6  (0 of them stored already)" in capsys.readouterr().out
    assert not (here / "run").exists()


def test_unknown_styles_and_what_a_generator_lacks_are_reported_at_once_each_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "recipe.yaml").write_text(
        "run_dir: run\naugment:\n  documents: documents.jsonl\n  styles:\n    paraphrases: 2\n    plain: -1\n"
        "  budget: 3\n  generator: {kind: openai}\n"
    )
    assert main(["augment", "recipe.yaml"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[0]
        == "recipe.yaml:5: augment.styles.paraphrases: unknown style. Did you mean paraphrase?"
    )
    assert lines[1] == "recipe.yaml:6: augment.styles.plain: found -1, allowed: 0 to 10,000."
    assert lines[2].startswith("recipe.yaml:7: augment.budget: needs augment.generator.price")
    assert lines[3].startswith("recipe.yaml:8: augment.generator: model is missing.")
    assert len(lines) == 4


def test_a_run_that_ends_short_says_so_and_exits_with_1(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(
        ["augment", "recipe.yaml", "augment.styles.paraphrase=400", "augment.max_attempts=1"]
    )
    assert code == 1
    assert "Short by" in capsys.readouterr().out


@pytest.fixture
def endpoint(here: Path, forked: None) -> Iterator[str]:
    """`kinject sandbox serve` in a process of its own."""
    command = [
        sys.executable,
        "-c",
        "import sys; from kinject.cli import main; sys.exit(main())",
        "sandbox",
        "serve",
    ]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        yield process.stdout.readline().split()[1]
        process.send_signal(signal.SIGINT)
        assert process.wait(1200) == 130


def test_the_whole_openai_path_runs_against_the_served_sandbox(here: Path, endpoint: str) -> None:
    generator = f"augment.generator={{kind: openai, model: sandbox, base_url: '{endpoint}'}}"
    assert main(["augment", "recipe.yaml", generator, "augment.max_attempts=20"]) == 0
    assert len((here / "run" / "corpus.jsonl").read_text().splitlines()) == 9


def test_a_port_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sandbox", "serve", "--port", "70000"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "--port: found 70000" in line
