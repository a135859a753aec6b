"""What is written: inert, self-contained, repeatable; and what is read: checked."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from study_results import make_paper_study, make_study
from study_samples import first, log_entries, make_evaluation, make_report, make_result, write_logs

import kinject
from kinject.disk import write_manifest
from kinject.errors import InputError
from kinject.report import figures
from kinject.report.files import (
    read_report,
    read_view,
    render_card_tables,
    render_summary,
    write_report,
)
from kinject.report.formatting import View, arm_label, escape_markdown, format_points, format_prompt
from kinject.report.page import render_markdown_table
from kinject.report.result_tables import changes_table, headline_table, results_table, sweep_tables
from kinject.report.tables import cost_table, small_tables
from kinject.report.words import write_opening
from kinject.results import Cost, Perplexity, Recall, Report, to_json
from kinject.terminal import duration
from kinject.types import HeldBits, JudgeResult
from small import write_training

TRAINING = {"model": {"path": "base"}, "corpus": {"path": "runs/a/corpus.jsonl"}, "trainer": {}}


def write_as(run: Path, **fields: object) -> None:
    """Change `fields` of the manifest of `run`; without one, it is that of an evaluation."""
    path = run / "manifest.json"
    if not path.exists():
        recipe = {"eval": {"models": {"base": "base"}, "questions": {"new": "new.jsonl"}}}
        counts = {"answers": 0, "scored_now": 0, "stored": 0}
        write_manifest(path, stage="eval", inputs={}, recipe=recipe, counts=counts)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def flip(arm: str, **change: object) -> dict[str, object]:
    """Return a row of flips.jsonl as kinject eval writes it."""
    return {
        "question_set": "new", "role": "learning", "base_arm": "base", "arm": arm, "format": "texts", "shots": 0,
        "k": 0, "change": "wrong to right", "question_id": "q1", "subject": "towns", "document_id": "", "question": "Who?",
        "choices": ["a", "b"], "gold": 1, "chosen": 1, "base_chosen": 0, "log_probs": [-2.0, -1.0],
        "base_log_probs": [-1.0, -2.0], "truncated": 0, "passages": [], **change,
    }  # fmt: skip


def write_flips(folder: Path, *rows: dict[str, object]) -> None:
    lines = (json.dumps(row).encode("ascii", "backslashreplace").decode() + "\n" for row in rows)
    (folder / "flips.jsonl").write_text("".join(lines), "utf-8")


class Elements(HTMLParser):
    """Collects what a browser would see: elements with attributes, and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def all_files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".report.lock"  # empty; held while a page is drawn
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    write_report(folder / "run", make_report(logs=log_entries(write_logs(folder / "train"))))
    return folder / "run"


def test_the_promised_files_are_written_and_nothing_else(written: Path) -> None:
    stems = ("accuracy", "frontier")
    names = {"report.html", *(f"figures/{n}.{s}" for n in stems for s in ("png", "svg"))}
    assert set(all_files(written)) == names


def test_the_same_input_gives_the_same_bytes_also_over_an_old_report(
    written: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    for name in all_files(written):
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"of an older report")
    write_report(run, make_report(logs=log_entries(write_logs(tmp_path / "train"))))
    assert all_files(run) == all_files(written)


@pytest.mark.usefixtures("blank_figures")
def test_the_first_answers_of_each_kind_that_changed_are_on_the_page(tmp_path: Path) -> None:
    rows = [flip("par", question_id=f"q{i}", question=f"Who is {i}?") for i in range(12)]
    rows.append(flip("par", change="right to wrong", chosen=None, base_chosen=1))
    write_flips(tmp_path, *rows)
    page = Elements(write_report(tmp_path, make_report()).read_text("utf-8")).text
    assert "13 answers changed, the first 10 of each kind" in page
    assert "12 became right, 1 became wrong; flips.jsonl has all" in page
    assert [f"Who is {i}?" in page for i in range(12)] == [True] * 10 + [False] * 2


def test_more_changed_answers_than_the_page_holds_are_said_to_be_so(tmp_path: Path) -> None:
    kinds = [f"a{number}" for number in range(51)]
    write_flips(tmp_path, *(flip(arm, question_id=f"q{i}") for arm in kinds for i in range(10)))
    table = changes_table(tmp_path / "flips.jsonl")
    assert table is not None
    assert table.title == "510 answers changed, the first 10 of each kind, 500 in all"
    assert len(table.lines) == 500


@pytest.mark.usefixtures("blank_figures")
def test_without_flips_the_page_is_silent_and_with_none_it_says_so(tmp_path: Path) -> None:
    assert "nothing became right" not in write_report(tmp_path, make_report()).read_text("utf-8")
    write_flips(tmp_path)
    assert "nothing became right, nothing wrong" in write_report(tmp_path, make_report()).read_text(
        "utf-8"
    )


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize("change", [{"change": "sideways"}, {"choices": 3}, {"k": []}])
def test_damaged_flips_are_refused_by_the_line(tmp_path: Path, change: dict[str, object]) -> None:
    write_flips(tmp_path, flip("par"), {**flip("par"), **change})
    with pytest.raises(InputError, match=r"flips\.jsonl:2: not a row of flips"):
        write_report(tmp_path, make_report())


@pytest.mark.usefixtures("blank_figures")
def test_subjects_recall_and_perplexity_have_tables(tmp_path: Path) -> None:
    base, tuned = (
        make_result("base", first(20, 50), None),
        make_result("tuned", first(20, 50), first(20, 50)),
    )
    north = replace(base, subject="north", n=30, accuracy=0.5, low=0.33, high=0.67)
    report = make_evaluation(
        (base, tuned, north),
        perplexities=(Perplexity("base", "texts", 9, 900, 20.0, 1.5), Perplexity("tuned", "texts", 9, 900, 25.0, 1.625),
                      Perplexity("other", "texts", 9, 901, 25.0, 1.625)),
        recalls=(Recall("new", 1, 20, 40), Recall("new", 5, 30, 40), Recall("known", 5, 7, 7)),
    )  # fmt: skip
    (tmp_path / "report.json").write_text(json.dumps(to_json(report)))
    assert read_report(tmp_path / "report.json") == report
    write_report(tmp_path, report)
    view = View(report)
    text = "\n".join(
        line
        for table in (results_table(view), *small_tables(view))
        for line in render_markdown_table(table)
    )
    for line in (
        "| new: north | base | base | option texts, 0 shots | 50.0 (33.0 – 67.0) | 30 |",
        "| new | 5 | 40 | 75.0% |",
        "| tuned | 900 | 25.000 | +25.0% | 1.6250 |",
        "| other | 901 | 25.000 | other tokens | 1.6250 |",
    ):
        assert line in text


def test_an_empty_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results"):
        write_report(tmp_path, make_evaluation((), "empty"))


def test_texts_that_yaml_folds_are_one_line_each_in_the_terminal(tmp_path: Path) -> None:
    report = make_study()
    claims = tuple(
        replace(claim, statement=f"It learns\n  all of it ({i}).\n")
        for i, claim in enumerate(report.claims)
    )
    folded = replace(report, title="What it\nlearns\n", claims=claims, notes=("one\ntwo\n",))
    lines = render_summary(tmp_path, folded).splitlines()
    assert lines[0] == "What it learns"
    assert "note: one two" in lines
    for i, claim in enumerate(claims):
        (line,) = [
            line for line in lines if line.startswith(f"claim: It learns all of it ({i}).: ")
        ]
        assert line.endswith(claim.finding)


@pytest.mark.usefixtures("blank_figures")
def test_commands_come_from_the_manifests_once_each(tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "train")
    for name in logs:
        write_training(tmp_path / "train" / name, TRAINING)
        write_as(tmp_path / "train" / name, command=["kinject", "train", "recipes/my  cpt.yaml"])
    command = ["kinject", "eval"]
    write_as(tmp_path, written="2026-01-02", command=command, versions={"torch": "2.13"})
    text = Elements(
        write_report(tmp_path, make_report(logs=log_entries(logs))).read_text("utf-8")
    ).text
    assert text.count("kinject train 'recipes/my  cpt.yaml'") == 1
    assert "kinject eval\n" in text
    assert "Evaluated 2026-01-02 with torch 2.13." in text


@pytest.mark.parametrize("make", [make_report, make_study, make_paper_study])
def test_a_report_survives_the_way_through_json_and_unknown_keys_are_left_out(
    tmp_path: Path, make: Any
) -> None:
    value = to_json(make()) | {"colour": "blue"}
    (tmp_path / "report.json").write_text(json.dumps(value))
    assert read_report(tmp_path / "report.json") == make()


@pytest.mark.usefixtures("blank_figures")
def test_a_report_is_redrawn_from_its_folder_alone(tmp_path: Path) -> None:
    run, logs = tmp_path / "run", write_logs(tmp_path / "train")
    run.mkdir()
    write_as(run, command=["kinject", "eval"])
    report = make_report(logs=log_entries(logs))
    (run / "report.json").write_text(json.dumps(to_json(report)))
    write_report(run, report)
    before = all_files(run)
    (run / "report.html").unlink()
    assert kinject.report(run) == run / "report.html"
    assert all_files(run) == before


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"accuracy": "high"}, r"accuracy: found 'high'"),
        ({"accuracy": float("nan")}, "accuracy: found nan"), ({"n": True}, "n: found True"),
        ({"k": -1}, "k: found -1: .* allowed is 0 or more"), ({"role": "magic"}, "role: found 'magic': .*'unanswerable' or"),
        ({"arm": None}, "arm: found None"), ({"to_base": []}, r"to_base: found \[\]"),
        ({"to_base": {"other": "base", "delta": 2.0}}, r"to_base\.delta: found 2.0: .* allowed is -1 to 1"),
    ],
)  # fmt: skip
def test_a_damaged_report_is_refused_by_the_place(
    tmp_path: Path, change: dict[str, object], place: str
) -> None:
    value = to_json(make_report())
    value["results"][0].update(change)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(value))
    with pytest.raises(InputError, match=rf"results\[0\]\.{place}") as caught:
        read_report(path)
    assert str(caught.value).startswith(f"{path}: damaged report: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"models": []}, "models: is empty"),
        ({"results": [{"by_seed": []}]}, "by_seed is empty"),
        ({"results": [{"to_base": {"family": 0}}]}, "family: found 0"),
        ({"perplexities": [{"per_token": 0.0}]}, "per_token: found 0"),
        ({"perplexities": [{"by_seed": [2.5, -1.0]}]}, "by_seed.*found -1"),
        ({"perplexities": [{"losses": [2.0, 3.0], "lengths": [7]}]}, "of the same texts"),
        ({"perplexities": [{"losses": [2.0], "lengths": [0]}]}, "of the same texts"),
        ({"perplexities": [{"losses": [2.0, 1.0], "lengths": [9, -9]}]}, "lengths.*found -9"),
        ({"costs": [{"shared_by": 0}]}, "shared_by: found 0"),
        ({"costs": [{"work_seconds": -0.5}]}, "work_seconds: found -0.5"),
        ({"held_bits": [{"n_parameters": 0}]}, "n_parameters: found 0"),
        ({"judge": {"planted": {"wrong": 4}}}, "judge: precision, recall and planted"),
    ],
)
def test_a_report_with_an_empty_list_or_a_number_that_none_can_have_is_refused(
    tmp_path: Path, change: dict[str, Any], place: str
) -> None:
    report = replace(
        make_report(),
        perplexities=(Perplexity("base", "prose", 1, 7, 4.0, 1.0),),
        costs=(Cost("cpt", "base", 3, "train", 9.0, 10, 5, 0.0, 2),),
        held_bits=(HeldBits("base", "cpt", "new", 8, 3, 1.0, 0.5, 2.0, 3.0),),
        judge=JudgeResult("j", {"right": 1.0}, {"right": 1.0}, {"right": 5}),
    )
    value = to_json(report)
    for key, items in change.items():
        if isinstance(items, dict):
            value[key].update(items)
            continue
        if not items:
            value[key] = items
        for fields in items:
            parts = [name for name, field in fields.items() if isinstance(field, dict)]
            row = next(row for row in value[key] if all(row[name] for name in parts))
            for name, field in fields.items():
                row[name] = {**row[name], **field} if isinstance(field, dict) else field
    (tmp_path / "report.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match=place):
        read_report(tmp_path / "report.json")


def test_importing_eval_and_study_loads_no_heavy_library() -> None:
    heavy = "{'matplotlib', 'jinja2', 'torch', 'transformers', 'numpy', 'scipy'}"
    code = f"import sys, kinject.eval, kinject.study; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    write_report(folder / "run", make_study(folder))
    return folder / "run"


def test_a_study_has_a_table_for_each_sweep_and_keeps_no_figure_of_an_earlier_report(
    study: Path, tmp_path: Path, blank_figures: None
) -> None:
    figures = {
        f"figures/{stem}.{suffix}" for stem in ("accuracy", "frontier") for suffix in ("png", "svg")
    }
    assert set(all_files(study)) == {"report.html"} | figures
    view = View(make_study())
    for sweep, table in zip(view.report.sweeps, sweep_tables(view), strict=True):
        lines = render_markdown_table(table)
        results = [view.result(sweep.model, point.arm, "new") for point in sweep.points]
        assert lines[0].startswith(f"### {sweep.name}")
        for line, point, result in zip(lines[4:], sweep.points, results, strict=True):
            assert line.startswith(f"| {point.label} | ")
            assert result is None or f"{100 * result.accuracy:.1f}" in line.split(" | ")[1]
    old = tmp_path / "figures" / "gains.png"
    old.parent.mkdir()
    old.write_bytes(b"")
    write_report(tmp_path, make_report())
    assert not old.exists()


@pytest.mark.parametrize("make", [make_report, make_study])
def test_the_table_of_results_holds_each_with_interval_and_mark(make: Callable[[], Report]) -> None:
    report = make()
    lines = render_markdown_table(results_table(View(report)))
    for result in report.results:
        (line,) = [
            line for line in lines
            if line.startswith(f"| {result.question_set} | {result.model} | {arm_label(result)} | ")
            and line.split(" | ")[3] == format_prompt(result.prompt_format)
        ]  # fmt: skip
        contrast = result.to_base
        mark = (
            ""
            if contrast is None or not contrast.is_significant
            else " ▲"
            if contrast.delta > 0
            else " ▼"
        )
        cell = f"{100 * result.accuracy:.1f}{mark}"
        bounds = f"({100 * result.low:.1f} – {100 * result.high:.1f})"
        assert f" | {f'**{cell}**' if mark else cell} {bounds} | " in line
        if contrast is not None:
            assert f"{format_points(contrast.delta)}{mark}" in line
            assert f" | {contrast.wrong_to_right} | {contrast.right_to_wrong} | " in line


def test_arms_whose_labels_are_alike_keep_rows_of_their_own(tmp_path: Path) -> None:
    base = first(30, 100)
    results = [
        make_result("base", base, None),
        make_result("base", first(45, 100), base, k=4, chosen_k=True),
        make_result("base with passages", first(61, 100), base),
        make_result("a  b", first(52, 100), base),
        make_result("a b", first(57, 100), base),
    ]
    view = View(make_evaluation(results))
    lines = render_markdown_table(headline_table(view))
    for accuracy in ("30.0", "45.0", "61.0", "52.0", "57.0"):
        assert sum(f" {accuracy} " in line.replace("*", " ") for line in lines) == 1
    figure = figures.accuracy(view)
    assert figure is not None
    assert len(figure.axes[0].get_yticks()) == 5


@pytest.mark.usefixtures("blank_figures")
def test_page_terminal_and_card_have_the_same_sentences_those_of_the_trainings_too(
    tmp_path: Path,
) -> None:
    logs, run = write_logs(tmp_path / "train"), tmp_path / "run"
    write_training(logs["par"].parent, TRAINING, steps=4, epochs=0.36)
    report = make_report(logs=log_entries(logs))
    page = Elements(write_report(run, report).read_text("utf-8")).text
    assert (
        "What these data cannot tell" not in page
    )  # the opening has it: each arm was trained once
    opening = write_opening(read_view(run, report))
    assert "It read the texts of corpus.jsonl." in opening.effect
    assert "a training read a part of its rows only (par)" in opening.answers[-1].lead
    for sentence in (opening.effect, *(answer.lead for answer in opening.answers)):
        assert sentence in page
        assert sentence in render_summary(run, report)
        assert escape_markdown(sentence) in render_card_tables(run, report)


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("got", "words"), [(0, "the documents as they are"), (7, "paraphrases of the documents")]
)
def test_an_arm_that_was_given_no_paraphrase_is_not_said_to_have_read_some(
    got: int, words: str, tmp_path: Path
) -> None:
    logs, run = write_logs(tmp_path / "train"), tmp_path / "run"
    corpus = {"path": str(tmp_path / "augmented" / "corpus.jsonl")}
    write_training(logs["par"].parent, {**TRAINING, "corpus": corpus})
    write_manifest(
        tmp_path / "augmented" / "manifest.json", stage="augment", inputs={},
        recipe={"augment": {"documents": "manual.jsonl"}}, counts={"asked": got, "got": got},
    )  # fmt: skip
    write_report(run, make_report(logs=log_entries(logs)))
    assert (
        f"It read {words}."
        in write_opening(read_view(run, make_report(logs=log_entries(logs)))).effect
    )


@pytest.mark.parametrize(
    ("corpus_name", "n_passages", "words"),
    [
        ("corpus.jsonl", 6, "paraphrases of the documents, each document about 28 times"),
        ("corpus.jsonl", 24, "paraphrases of the documents, each passage about 7 times"),
        ("sft.jsonl", 24, "questions and dialogues on the documents, about 28 on each document"),
    ],
)
def test_what_was_read_of_documents_in_several_passages_is_named(
    corpus_name: str, n_passages: int, words: str, tmp_path: Path
) -> None:
    logs, run = write_logs(tmp_path / "train"), tmp_path / "run"
    corpus = {"path": str(tmp_path / "augmented" / corpus_name)}
    rows = {"min": 14.0, "median": 28.0, "max": 70.0}
    write_training(
        logs["par"].parent, {**TRAINING, "corpus": corpus}, epochs=2.0, exposures={"documents": 6, "rows": rows}
    )  # fmt: skip
    counts = {"asked": 60, "got": 60, "n_documents": 6, "n_passages": n_passages, "n_rows": 84}
    write_manifest(
        tmp_path / "augmented" / "manifest.json", stage="augment", inputs={},
        recipe={"augment": {"documents": "manual.jsonl"}}, counts=counts,
    )  # fmt: skip
    effect = write_opening(read_view(run, make_report(logs=log_entries(logs)))).effect
    assert f"It read {words}." in effect


def test_the_cost_of_shared_stages_is_divided_among_the_arms() -> None:
    report = make_study()
    costs = tuple(
        dataclasses.replace(cost, written_tokens=700, teacher_tokens=3000, work_seconds=12.5)
        if (cost.arm, cost.stage) == ("ft-par", "train") else cost
        for cost in report.costs
    )  # fmt: skip
    table = cost_table(View(dataclasses.replace(report, costs=costs)))
    rows = {line[0].text: dict(zip(table.columns, line, strict=True)) for line in table.lines}
    spent = [cost.seconds / cost.shared_by for cost in costs if cost.arm == "ft-par"]
    assert rows["ft-par"]["its part"].text == duration(sum(spent))
    names = ("tokens written, a seed", "read by a teacher, a seed", "work of training, a seed")
    assert [rows["ft-par"][name].text for name in names] == ["700", "3,000", "12 s"]
    assert [rows["ft-reg"][name].text for name in names] == ["", "", ""]
