"""The page of a training, an augmentation or a collection: its numbers, its curves, and each refusal with its reason."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from test_pages import write_augment_run
from test_report import Elements

from kinject.cli import main
from kinject.disk import write_jsonl
from kinject.errors import InputError
from kinject.report.figures import training
from kinject.report.files import read_training_log, write_run_report

QUESTIONS = {"new": {"path": "n", "role": "learning"}, "known": {"path": "k", "role": "retention"}}
ROLES = {"new": "learning", "known": "retention"}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 20 steps and two epochs with two probes."""
    folder = tmp_path / "a <b> run"
    folder.mkdir()
    rows = [{"step": 0, "epoch": 0, "eval_new_accuracy": 0.25, "eval_known_accuracy": 1.0}]
    rows += [
        {"step": step, "epoch": step / 10, "loss": 4 / step, "learning_rate": 1e-3, "grad_norm": 1.0 / step}
        for step in range(1, 21)
    ]
    rows += [{"step": 10, "epoch": 1.0, "eval_loss": 2.5},
             {"step": 10, "epoch": 1.0, "eval_new_accuracy": 0.75, "eval_known_accuracy": 0.9}]  # fmt: skip
    write_jsonl(folder / "log.jsonl", rows)
    counts = {"finished": True, "steps": 20, "epochs": 2.0, "loss": 0.7, "seconds": 3.0, "notes": ["<script>"],
              "tokens": {"source": 1000, "trained": 990}}  # fmt: skip
    write_manifest(folder, "train", counts, recipe={"probes": {"questions": QUESTIONS}})
    return folder


def write_manifest(folder: Path, stage: str, counts: dict[str, object], **others: object) -> None:
    manifest = {"format_version": 1, "stage": stage, "counts": counts, "command": ["kinject", stage], "inputs": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest | others))


def test_the_panels_draw_what_was_logged_with_epochs_marked(run_dir: Path) -> None:
    figure = training(read_training_log(run_dir / "log.jsonl"), ROLES)
    assert figure is not None
    titles = [panel.get_title() for panel in figure.axes] + [panel.get_title(loc="left") for panel in figure.axes]
    assert [title for title in titles if title] == ["loss", "learning rate", "gradient norm", "probe accuracy"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[3].lines}
    assert (lines["new: to be learned"], lines["known: to be kept"]) == ([0.25, 0.75], [1.0, 0.9])
    for panel in figure.axes:
        assert [line.get_xdata()[0] for line in panel.lines if line.get_label() == "epoch"] == pytest.approx([10.0])
    losses = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert losses["training text"] == [4 / step for step in range(1, 21)]
    assert losses["held-out text"] == [2.5]


def test_a_trainings_page_holds_the_numbers_and_escapes_the_rest(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = write_run_report(run_dir).read_text("utf-8")
    for text in (
        "20 steps in 3 seconds; the training loss went from 4.00 to 0.20; “new” from 25.0% to 75.0%; “known” from 100.0% to "
        "90.0%.", "tokens: trained", "990", "&lt;script&gt;", "a &lt;b&gt; run",
    ):  # fmt: skip
        assert text in page
    assert page.count("<script") == 1  # kinject's own
    assert (run_dir / "figures" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert main(["report", str(run_dir)]) == 0
    assert str(run_dir / "report.html") in capsys.readouterr().out
    assert (run_dir / "report.html").read_text("utf-8") == page


def test_a_loss_that_is_not_finite_is_a_gap(run_dir: Path) -> None:
    """log.jsonl holds null for it; 0 or a line across the gap would be another run."""
    rows = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    rows = [{**row, "loss": None} if row["step"] in (7, 8) else row for row in rows]
    write_jsonl(run_dir / "log.jsonl", rows)
    log = read_training_log(run_dir / "log.jsonl")
    assert [step for step, loss in zip(*log["loss"], strict=True) if math.isnan(loss)] == [7, 8]


def test_an_augmentations_page_shows_the_yield_and_each_refusal_with_its_reason(tmp_path: Path) -> None:
    write_augment_run(tmp_path / "run", ("plain",) * 6)
    refused = [{"document_id": "d1", "style": "plain", "text": f"Bryn was born in 193{i}.", "reason": "fact",
                "detail": f"1930 became 193{i}", "passage_id": "p"} for i in range(1, 6)]  # fmt: skip
    write_jsonl(tmp_path / "run" / "rejected.jsonl", refused)
    page = Elements(write_run_report(tmp_path / "run").read_text("utf-8")).text
    assert "2 of 3 requested rewritings are in the corpus" in page
    assert all(f"1930 became 193{i}" in page for i in range(1, 6))
    assert "Refused answers: 5" in page


def test_the_page_of_a_collection_names_every_skipped_file_with_its_own_reason(tmp_path: Path) -> None:
    counts = {"skipped": 2, "duplicates": {"same": 1}, "n_documents": 3, "n_read": 4, "n_files": 6}
    write_manifest(tmp_path, "documents", counts)
    skipped = [{"where": f"f{i}.pdf", "detail": f"reason {i}", "left_out": False} for i in range(30)]
    write_jsonl(tmp_path / "skipped.jsonl", skipped)
    copies = [{"dropped": "a-2025.docx", "kept": "a-2026.docx", "how": "near", "words_only_here": ["28"]}]
    write_jsonl(tmp_path / "duplicates.jsonl", copies)
    path = write_run_report(tmp_path)
    page = Elements(path.read_text("utf-8")).text
    assert path.name == "documents.html"
    assert "3 documents from 4 of 6 files." in page
    assert all(f"f{i}.pdf" in page and f"reason {i}" in page for i in range(30))
    assert "a-2026.docx" in page


def test_a_folder_without_a_run_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no finished run"):
        write_run_report(tmp_path)
    write_manifest(tmp_path, "augment", {"got": "x"})
    with pytest.raises(InputError, match="a file of another shape"):
        write_run_report(tmp_path)
