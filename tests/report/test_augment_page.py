"""The page of an augmentation shows the manifest's counts and texts of the run's files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_pages import write_augment_run
from test_study_report import Elements

from kinject.cli import main
from kinject.disk import write_jsonl
from kinject.errors import InputError
from kinject.report.augment import write_augment_report


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run over documents d1 and d2 with one style, one refused and one doubted answer, a judge, and a price."""
    folder = tmp_path / "handbook"
    write_augment_run(folder, ("plain",) * 6)
    row = {"passage_id": "p1", "document_id": "d1", "style": "plain", "text": "Bryn was born in 1931."}
    corpus = [("p1", "d1", "original", "Bryn was born in 1930."), ("p2", "d2", "original", "Cary lives in Arvo."),
              ("v1", "d1", "variant", "In 1930, Bryn was born."), ("v2", "d1", "variant", "Bryn, born in 1930.")]  # fmt: skip
    rows = [dict(zip(("id", "document_id", "origin", "text"), item, strict=True)) for item in corpus]
    write_jsonl(folder / "corpus.jsonl", rows)
    refused = {
        **row,
        "id": "r1",
        "reason": "fact",
        "detail": "1930 became 1931",
        "in_doubt": [["fact", "1931 is unclear"]],
    }
    write_jsonl(folder / "rejected.jsonl", [refused, {**refused, "id": "r2", "style": "of an earlier recipe"}])
    unused = {**row, "id": "v9", "checks": {"in_doubt": [["name", "of an earlier recipe"]]}}
    write_jsonl(folder / "variants.jsonl", [{**row, "id": "v1", "checks": {"in_doubt": [["name", "Bryn?"]]}}, unused])
    write_jsonl(folder / "failures.jsonl", [{"document_id": "d2", "error": "timeout"}])
    manifest = json.loads((folder / "manifest.json").read_text())
    style = {"asked": 4, "got": 2, "refused": {"fact": 1}, "failed": 1, "nothing": 1, "skipped": {"prose": 2, "items": 1},
             "in_doubt": {"name": 1}, "refused_in_doubt": {"fact": 1}}  # fmt: skip
    manifest["counts"] |= {
        "asked": 4,
        "got": 2,
        "refused": {"fact": 1},
        "failed": {"timeout": 1},
        "styles": {"plain": style},
    }
    closed = {"sent": 5, "answered": 1, "share": 0.25, "latency_seconds": 2.0, "cost": 0.5, "faults": {"connection": 4}}
    other = {
        "sent": 3,
        "answered": 3,
        "share": 0.75,
        "latency_seconds": 0.5,
        "cost": 0.75,
        "faults": {},
        "closed": "<401>",
    }
    unused = {**other, "sent": 0}
    manifest["counts"]["this_run"]["endpoints"] = {"gpu1": closed, "rented": other, "spare": unused}
    manifest["counts"] |= {"cost_of_thinking": 0.25}
    manifest["recipe"]["augment"]["generator"] = {"kind": "openai", "model": "small", "base_url": ["http://gpu1/v1"]}
    manifest |= {"written": "2026-11-22T10:00:00+00:00", "command": ["kinject", "augment"]}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_it_shows_yield_refusals_with_examples_doubts_the_judge_and_the_cost(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_dir)]) == 0
    assert capsys.readouterr().out == f"report: {run_dir / 'report.html'}\n"
    page = Elements((run_dir / "report.html").read_text("utf-8"))
    assert "22 November 2026" in page.text
    assert (
        "2 of 4 requested rewritings are in the corpus (50.0%), 1 had nothing to write; 1 answer was refused on the way "
        "(fact 1); 1 got no answer; it cost 1.25. The budget ended the run."
    ) in page.text
    assert ["plain", "4", "2", "50.0%", "1", "1", "1", "3", "fact 1"] in page.rows
    assert "plain: 2 passages skipped: mostly a table, a list or keys and values" in page.text
    assert "plain: 1 passage skipped: the model named nothing in it to write about" in page.text
    assert ["fact | plain, d1", "1930 became 1931", "Bryn was born in 1931.", "Bryn was born in 1930."] in page.rows
    assert [row for row in page.rows if row[0].startswith("name |")] == [
        ["name | plain, d1", "Bryn?", "Bryn was born in 1931.", "Bryn was born in 1930."]
    ]
    assert ["d2", "0", "0", "1"] in page.rows
    assert ["d1", "2", "1", ""] in page.rows
    assert "of an earlier recipe" not in page.text
    assert ["correct texts refused", "1 of 4", "75.0% | precision"] in page.rows
    assert ["cost, all runs into this folder", "1.2500"] in page.rows
    assert "small" in page.text
    assert ["of it for thinking", "0.2500"] in page.rows
    assert ["gpu1", "1", "25.0%", "2.00 s", "0.5000", "connection 4", ""] in page.rows
    assert ["rented", "3", "75.0%", "0.50 s", "0.7500", "", "<401>"] in page.rows
    assert not any(row[0] == "spare" for row in page.rows if row)


def test_a_folder_without_a_run_or_with_a_damaged_one_is_refused(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(InputError, match="holds no finished run of kinject augment"):
        write_augment_report(tmp_path)
    (run_dir / "rejected.jsonl").write_text('{"style": "plain"}\n')
    with pytest.raises(
        InputError, match=r"a file of another shape \(KeyError\('document_id'\)\)\. Run kinject augment again"
    ):
        write_augment_report(run_dir)
