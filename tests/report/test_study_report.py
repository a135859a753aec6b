"""A study's report: every number on it comes from the result; inert, self-contained, repeatable; honest where empty."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from study_results import make_paper_study, make_small, make_study
from study_samples import markdown_faults

from kinject.cli import main
from kinject.disk import write_json
from kinject.report.files import redraw_report, write_report
from kinject.report.tables import k_tables, paper_tables, published_notes, published_scores
from kinject.report.view import View
from kinject.results import Report, Sweep, SweepPoint, to_json

HOSTILE = {
    "sandbox": "<script>alert(1)</script>",
    "new": '"><img src=x onerror=alert(1)>',
    "known": "</style></svg><script src=//evil.example/x.js></script>",
    "ft-par": "{{ 7*7 }}{% raw %} a|b `c` [d](javascript:e)",
    "ft-reg": "$\\frac{1}{0$ \x00\x1b[2J\u202egnp.exe\ud800",
    "paraphrases": "../../evil #0072b2 url(#x) id=\"y\"",
}  # fmt: skip


class Elements(HTMLParser):
    """Collects what a browser would see: elements with attributes, text, and the cells of tables row by row."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self._open.append(tag)
        elif tag == "small" and self._open:
            self.rows[-1][-1] += " | "

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open:
            self.rows[-1][-1] += data


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def renamed(value: Any, names: dict[str, str]) -> Any:
    """Return `value` with every string that is a key of `names`, or begins with one, replaced."""
    if isinstance(value, str):
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple(renamed(item, names) for item in value)
    if isinstance(value, dict):
        return {renamed(key, names): renamed(item, names) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{field.name: renamed(getattr(value, field.name), names) for field in fields(value)})
    return value


def hostile_study() -> Report:
    """Return a study in which every name and text is hostile."""
    whole = make_study(n_seeds=1)
    texts = " ".join(HOSTILE.values())
    short = replace(
        whole, title=texts, description=texts, notes=(texts,), commands=(texts,), versions={"kinject": HOSTILE["new"]},
        sweeps=tuple(replace(curve, description=texts, key=texts) for curve in whole.sweeps[:1]),
        questions=tuple(replace(item, question=texts, choices=(texts,) * 4) for item in whole.questions[:40]),
        claims=tuple(replace(claim, statement=texts, finding=texts, source=texts) for claim in whole.claims),
        failures=tuple(replace(failure, message=texts, log=texts) for failure in whole.failures),
        choices=tuple(replace(choice, key=texts) for choice in whole.choices),
        arms=tuple(replace(arm, description=texts, recipe={texts: texts}) for arm in whole.arms),
    )  # fmt: skip
    study = renamed(short, HOSTILE)
    assert isinstance(study, Report)
    return study


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a simulated study."""
    folder = tmp_path_factory.mktemp("study")
    write_report(folder / "run", make_study(folder))
    return folder / "run"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a study full of markup."""
    folder = tmp_path_factory.mktemp("hostile")
    write_report(folder, hostile_study())
    return folder


def test_the_promised_files_are_written_and_nothing_else(written: Path) -> None:
    stems = [
        "accuracy",
        "gains",
        "k",
        "frontier",
        "flips",
        "questions",
        "directions",
        "exposures",
        "choices",
        "costs",
        "loss",
    ]
    stems += [f"sweep-{name}" for name in ("paraphrases", "learning-rate", "replay", "alpha", "lora", "style")]
    figures = {f"figures/{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}
    assert set(all_files(written)) == {"report.md", "report.html"} | figures


def test_what_is_written_is_read_back_and_redrawn_to_the_same_bytes(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", to_json(make_small()))
    write_report(tmp_path, make_small())
    before = all_files(tmp_path)
    (tmp_path / "report.html").unlink()
    redraw_report(tmp_path)
    assert all_files(tmp_path) == before


def test_the_papers_table_holds_the_scores_with_intervals_and_marks(written: Path) -> None:
    rows = Elements((written / "report.html").read_text("utf-8")).rows
    head = next(row for row in rows if row[0] == "task")
    assert head == ["task", "base", "base+rag", "ft-reg", "ft-par", "ft-reg+rag", "ft-par+rag"]
    line = next(row for row in rows if row[0] == "new" and len(row) == len(head))
    for column, cell in zip(head[1:], line[1:], strict=True):
        (score,) = [
            score for score in make_study().results
            if (score.arm, score.question_set, score.role) == (column.removesuffix("+rag"), "new", "learning")
            and score.k == (1 if column.endswith("+rag") else 0)
        ]  # fmt: skip
        shown = score.to_base is not None and score.to_base.p_holm < 0.05
        mark = "" if score.to_base is None or not shown else " ▲" if score.to_base.delta > 0 else " ▼"
        assert cell == f"{100 * score.accuracy:.1f}{mark} | {100 * score.low:.1f} – {100 * score.high:.1f}"
    assert any("▼" in cell for row in rows for cell in row)


def test_every_score_stands_in_the_markdown(written: Path) -> None:
    text = (written / "report.md").read_text("utf-8")
    for score in make_study().results:
        bounds = f"({100 * score.low:.1f} – {100 * score.high:.1f})"
        if score.role == "baseline":
            bounds = bounds[1:-1]
        assert f"{100 * score.accuracy:.1f}" in text, score
        assert bounds in text, score


def test_the_verdict_says_what_the_contrasts_say(written: Path) -> None:
    text = Elements((written / "report.html").read_text("utf-8")).text
    for score in make_study().results:
        if score.arm in ("ft-reg", "ft-par", "repeated", "random-text") and score.k == 0 and score.to_base is not None:
            contrast, shown = score.to_base, score.to_base.p_holm < 0.05
            sign = "+" if contrast.delta > 0 else "−"
            delta = f"{sign}{abs(100 * contrast.delta):.1f} points"
            assert f"{100 * score.low:.1f}% to {100 * score.high:.1f}%" in text
            assert delta in text
            if score.question_set == "known":
                assert re.search(rf"{'forgot' if shown else 'no loss shown'}\s+{score.arm} on known: ", text)
    assert "Would retrieval have done better, or do both help?" in text


def test_claims_stand_with_verdict_finding_interval_and_p(written: Path) -> None:
    rows = Elements((written / "report.html").read_text("utf-8")).rows
    for claim in make_study().claims:
        (row,) = [row for row in rows if row[0] == claim.statement]
        assert (
            row[1].endswith(claim.verdict.replace(" ", "\u00a0")) or row[1][2:].replace("\u00a0", " ") == claim.verdict
        )
        assert row[2] == claim.finding
        if claim.effect is not None and claim.low is not None and claim.high is not None:
            numbers = [f"{100 * value:+.1f}".replace("-", "−") for value in (claim.effect, claim.low, claim.high)]
            assert row[3] == "{} | {} to {}".format(*numbers)


def test_limits_name_seeds_coverage_failures_and_edges(written: Path) -> None:
    text = Elements((written / "report.html").read_text("utf-8")).text
    assert "3 seeds: " in text
    assert "Smallest difference from base" in text
    assert "Coverage: 3 of 90 results (arm by question set) are missing." in text
    assert "never read a whole text of the documents behind 12 of 300 answers on new." in text
    assert "Failed: ft-syn at augment." in text
    assert "Chosen at an end of its grid, so a better value may lie beyond: k 1 for base." in text
    assert "endpoint refused: HTTP 401 (wrong key)" in text


def test_published_numbers_stand_beside_those_of_the_same_model_task_and_shots() -> None:
    view = View(make_paper_study())
    (table,) = paper_tables(view)
    texts = [[cell.text for cell in line.cells] for line in table.lines]
    index = next(i for i, line in enumerate(texts) if line[:3] == ["anatomy", "letters, 5 shots", "Llama-2-7B"])
    head = ["task", "asked", "model", "base", "base+rag", "ft-reg", "ft-par", "ft-reg+rag", "ft-par+rag"]
    assert list(table.columns) == head
    assert texts[index + 1] == ["published", "5 shots", "Llama-2-7B", "46.7", "56.3", "49.6", "", "54.8", ""]
    events = next(i for i, line in enumerate(texts) if line[0] == "current-events" and line[2] == "Orca-2-7B")
    assert texts[events + 1][3:] == ["45.6", "87.6", "51.1", "56.6", "82.0", "82.6"]
    source, agreement = published_notes(view, [table])
    assert source.startswith("Published: Ovadia")
    bases = [
        (view.result(model, "base", name, 0, form), published_scores(view.source(model), name, form.shots).get("base"))
        for model in view.report.models for name in view.sets() for form in view.formats(name)
    ]  # fmt: skip
    known = [(result, printed) for result, printed in bases if result is not None and printed is not None]
    agreeing = [result for result, printed in known if result.low <= printed <= result.high]
    assert 0 < len(agreeing) < len(known)
    assert agreement.startswith(f"Base models: {len(agreeing)} of {len(known)} published accuracies lie within")
    assert agreement.count("published") == 1 + len(known) - len(agreeing)
    (by_k,) = k_tables(view)
    lines = [[cell.text for cell in line.cells] for line in by_k.lines]
    index = next(
        i for i, line in enumerate(lines) if line[:4] == ["prehistory", "letters, 0 shots", "Mistral-7B", "base"]
    )
    assert lines[index + 1][4:] == ["", "72.8", "72.5", "75.0", "73.5", "72.8"]


@pytest.mark.parametrize("fixture", ["written", "hostile"])
def test_the_page_fetches_nothing_and_runs_nothing(fixture: str, request: pytest.FixtureRequest) -> None:
    html = (request.getfixturevalue(fixture) / "report.html").read_text("utf-8")
    page = Elements(html)
    tags = {tag for tag, _ in page.elements}
    assert not tags & {
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "image",
        "foreignobject",
        "a",
        "base",
        "form",
    }
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            if name in ("href", "xlink:href", "src"):
                assert (value or "").startswith("#"), (tag, value)
    markup = re.sub(r">[^<]*<", "><", html)
    assert "://" not in markup
    assert not re.search(r"url\((?!#)", markup)
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_hostile_names_are_shown_as_text_and_stay_in_their_folder(hostile: Path) -> None:
    page = Elements((hostile / "report.html").read_text("utf-8"))
    for name in ("sandbox", "new", "known", "ft-par"):
        assert HOSTILE[name] in page.text
    assert not {"\u202e", "\x1b", "\x00"} & set(page.text)
    assert {path.parent.name for path in hostile.rglob("*.svg")} == {"figures"}
    for path in hostile.rglob("*.svg"):
        tree = ElementTree.parse(path)  # noqa: S314 - written by this test
        assert not [element for element in tree.iter() if element.tag.endswith("}script")]


def test_markdown_holds_no_tags_links_or_broken_tables(hostile: Path) -> None:
    text = (hostile / "report.md").read_text("utf-8")
    assert markdown_faults(text) == []


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_makes_no_element_of_hostile_names(hostile: Path, tmp_path: Path) -> None:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]
    done = subprocess.run([*command, (hostile / "report.html").as_uri()], capture_output=True, timeout=400, check=True)
    page = Elements(done.stdout.decode("utf-8"))
    assert not {tag for tag, _ in page.elements} & {"img", "iframe"}
    assert sum(tag == "svg" for tag, _ in page.elements) == 2 * len(list((hostile / "figures").glob("*.svg")))
    assert HOSTILE["known"] in page.text


def test_figures_take_the_colours_of_the_page(written: Path) -> None:
    html = (written / "report.html").read_text("utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, flags=re.DOTALL))
    assert set(re.findall(r"#[0-9a-f]{6}\b", drawings)) <= {"#000000"}
    for name in set(re.findall(r"var\((--\w+)\)", drawings)):
        assert html.count(f"{name}: #") == 2, name  # light and dark


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"results": ()}, "No arm has a result."),
        ({"seeds": ()}, "0 seeds"),
        ({"models": ()}, "0 base models"),
        ({}, "One seed: each arm was trained once."),
        ({}, "This study varies nothing along a sweep."),
        ({}, "This study has no set of reverse questions beside forward ones"),
        ({}, "No training run counted how often it read each document."),
        ({}, "No training log was given, or none holds a loss."),
        ({}, "The study chose nothing itself: every value is in its recipe."),
        ({}, "No stage of this study recorded its cost."),
        ({}, "declares no claims, so none was tested."),
        ({}, "No arm was asked with several numbers of retrieved passages."),
        ({"logs": (("sandbox", "ft-par", 0, "gone/log.jsonl"),)}, "The logs of ft-par are missing: their files were"),
    ],
)  # fmt: skip
def test_what_a_study_lacks_is_said(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    key = repr(sorted(changes))
    text = _PAGES.get(key)
    if text is None:
        path = write_report(tmp_path, make_small(**changes))
        text = _PAGES[key] = Elements(path.read_text("utf-8")).text
    assert sentence in text


_PAGES: dict[str, str] = {}


@pytest.mark.usefixtures("blank_figures")
@pytest.mark.parametrize(
    ("kept", "sentence"),
    [
        (lambda s: s.role != "retention", "it has no trained arm with a question set of the role “retention”"),
        (lambda s: s.role != "learning", "it has no trained arm with a question set of the role “learning”"),
        (lambda s: s.k == 0, "no trained arm beside the base with retrieved context"),
        (lambda s: s.arm == "base" and not s.k, "No arm can be compared with base"),
        (lambda s: s.arm != "base" or s.k, "On new, ft-par"),
    ],
)
def test_a_study_without_retention_learning_retrieval_or_arms_has_a_page(
    tmp_path: Path, kept: Any, sentence: str
) -> None:
    whole = make_small()
    path = write_report(tmp_path, replace(whole, results=tuple(s for s in whole.results if kept(s))))
    text = Elements(path.read_text("utf-8")).text
    assert sentence in text


@pytest.mark.usefixtures("blank_figures")
def test_points_without_a_result_are_named(tmp_path: Path) -> None:
    points = (SweepPoint(1e-4, "0.0001", 1e-4, "ft-par"), SweepPoint(1e-2, "0.01", 1e-2, "failed"))
    curve = Sweep("lr", "trainer.learning_rate", "sandbox", "", True, True, points)
    path = write_report(tmp_path, make_small(sweeps=(curve, replace(curve, name="LR"))))
    assert ["0.01 | no result", "failed", "", ""] in Elements(path.read_text("utf-8")).rows
    assert (tmp_path / "figures" / "sweep-lr-2.svg").is_file()


@pytest.mark.usefixtures("blank_figures")
def test_figures_of_an_earlier_report_are_removed(tmp_path: Path) -> None:
    curve = Sweep("lr", "k", "sandbox", "", True, False, (SweepPoint(1, "1", 1.0, "ft-par"),))
    write_report(tmp_path, make_small(sweeps=(curve,)))
    (tmp_path / "figures" / "mine.svg").write_text("kept")
    write_report(tmp_path, make_small())
    names = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert names == {"accuracy", "gains", "flips", "mine"}


@pytest.mark.usefixtures("blank_figures")
def test_kinject_report_draws_a_study_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(tmp_path / "report.json", to_json(make_small()))
    write_report(tmp_path, make_small())
    before = all_files(tmp_path)
    (tmp_path / "report.html").unlink()
    (tmp_path / "manifest.json").write_text('{"format_version": 1, "stage": "study", "inputs": {}, "counts": {}}')
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'report.html'}\n"
    (tmp_path / "manifest.json").unlink()
    assert all_files(tmp_path) == before


def test_published_numbers_need_the_papers_model_not_its_name() -> None:
    whole = make_paper_study()
    hub = {
        "Mistral-7B": "mistralai/Mistral-7B-v0.1",
        "Llama-2-7B": "runs/tiny-llama",
        "Orca-2-7B": "microsoft/Orca-2-7b",
    }
    (table,) = paper_tables(View(replace(whole, model_sources=hub)))
    assert {line.cells[2].text for line in table.lines if line.kind == "published"} == {"Mistral-7B", "Orca-2-7B"}
