"""The figures of README and findings are those of the stored results, whose claims are older than they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

import published
from reported import Kept, study_of, unreported
from small import load_benchmark

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
COMPANY: dict[str, Any] = json.loads((RESULTS / "company.json").read_text("utf-8"))
REAL: dict[str, Any] = json.loads((RESULTS / "real.json").read_text("utf-8"))
ROWS = {
    "base": "base model",
    "repeated": "documents repeated",
    "paraphrases": "documents and ten paraphrases of each, as many updates",
    "best": "the same with questions, chat and prose, projected updates, twice the tokens",
}
"""Arm of recipes/studies/real.yaml -> its row in README's table."""


def git(*words: str) -> str:
    """Return what git prints in this checkout."""
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _has_history() -> bool:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return False
    return git("rev-parse", "--is-shallow-repository") == "false"


needs_history = pytest.mark.skipif(not _has_history(), reason="the history is not here")


def cells(page: str, heading: str, row: str) -> list[float]:
    """Return the numbers in the first row of that name below a heading (or line) of a page."""
    text = (ROOT / page).read_text("utf-8").partition(heading)[2]
    line = next(line for line in text.splitlines() if line.startswith(f"| {row} |"))
    return [float(number) for number in re.findall(r"\d+\.\d", line)]


def of_report(report: dict[str, Any], arm: str, question_set: str, k: int = 0) -> dict[str, Any]:
    """Return what a kept report has of an arm's answers to all questions of a set, with `k` passages."""
    (found,) = [
        item
        for item in report["results"]
        if (item["arm"], item["question_set"], item["k"]) == (arm, question_set, k)
        and item["format"] != "texts-no-question"
        and "subject" not in item
    ]
    return found


of_real = partial(of_report, REAL)


@pytest.mark.parametrize("arm", ROWS)
def test_readme_s_table_of_the_company_is_its_results(arm: str) -> None:
    wanted = []
    for name in ("reworded", "inferred"):
        item = of_real(arm, name)
        wanted += [100 * item["accuracy"], 100 * item["without_question"]]
    wanted.append(100 * of_real(arm, "general")["accuracy"])
    wanted += [item["per_token"] for item in REAL["perplexities"] if item["arm"] == arm]
    assert cells("README.md", "reads 128 documents", ROWS[arm]) == pytest.approx(wanted, abs=0.051)


SCORES = ("sum", "tokens", "chars", "pmi")
OF_SCORES = {
    (item["arm"], item["score"], item["k"]): item for item in COMPANY["by_score"]["results"]
}


def gain_by(score: str) -> float:
    """Return what best gains beyond its choices by a score, in points."""
    best, base = (OF_SCORES[arm, score, 0] for arm in ("best", "base"))
    gain = float(best["accuracy"] - base["accuracy"])
    # By pmi both have 25% without the question.
    gain -= best.get("without_question", 0.25) - base.get("without_question", 0.25)
    return 100 * gain


def test_the_table_of_scores_is_its_results() -> None:
    arms = ("base", "paraphrases", "best")
    wanted: dict[str, list[float]] = {name: [] for name in (*arms, "document", "gains")}
    for score in SCORES:
        for arm in arms:
            item = OF_SCORES[arm, score, 0]
            wanted[arm].append(100 * item["accuracy"])
            if score != "pmi":
                wanted[arm].append(100 * item["without_question"])
        wanted["document"] += [100 * OF_SCORES[arm, score, 1]["accuracy"] for arm in arms]
        wanted["gains"].append(gain_by(score))
    page, heading = "docs/figures.md", "by `eval.scores`"
    rows = {
        "base": "base; without the question",
        "paraphrases": "paraphrases; without",
        "best": "best; without",
        "document": "the answering document before: base; paraphrases; best",
    }
    for row, name in rows.items():
        assert cells(page, heading, name) == pytest.approx(wanted[row], abs=0.051)
    text = (ROOT / page).read_text("utf-8").partition("its choices best gains ")[2]
    said = [float(number) for number in re.findall(r"\d+\.\d", text.partition("points")[0])]
    assert said == pytest.approx(wanted["gains"], abs=0.051)


def _archived(kind: str, stage: str, name: str) -> str:
    """Return the text of a file of a stage that docs/results/company keeps."""
    with tarfile.open(RESULTS / "company" / f"{kind}-{stage}.tar.xz") as archive:
        file = archive.extractfile(f"{kind}/{stage}/{name}")
        assert file is not None
        return file.read().decode("utf-8")


def test_the_tokens_that_two_arms_read_are_those_of_their_trainings() -> None:
    """In as many updates the documents alone are fewer tokens: they fill rows less."""
    page = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    for stage, said in (
        ("9f4ff39a008fa684", r"alone, eleven times \(([\d,]+) tokens: they fill rows less\)"),
        ("c938d3a0253662fc", r"with ten paraphrases of each, once \(([\d,]+)\)"),
    ):
        n_read = json.loads(_archived("train", stage, "done.json"))["tokens"]
        found = re.search(said, page)
        assert found is not None
        assert abs(int(found[1].replace(",", "")) - n_read) <= 500


def test_each_arm_of_the_company_has_three_trainings_without_and_behind_passages() -> None:
    n_trainings = {
        item["arm"]: len(item["by_seed"])
        for item in REAL["results"]
        if item["arm"].partition("+")[0] != "base"
    }
    assert n_trainings["cartridge+oracle"] == 3
    assert set(n_trainings.values()) == {len(REAL["seeds"])} == {3}
    page = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    assert "Three seeds of each arm." in page


def test_the_scores_of_the_base_are_those_of_its_kept_answers() -> None:
    """By each score, counted out of the log-probabilities, with the right document as well."""
    lines = _archived("eval", "f0503c7700b1f81f", "answers.jsonl").splitlines()
    answers = [json.loads(line) for line in lines]
    alone = {
        answer["question_id"]: answer["log_probs"]
        for answer in answers
        if answer["format"] == "texts-no-question"
    }
    for k in (0, 1):
        n_right = dict.fromkeys(SCORES, 0)
        asked = [item for item in answers if item["format"] == "texts" and item["k"] == k]
        for answer in asked:
            for score in SCORES:
                without = alone[answer["question_id"]]
                length = {"tokens": answer["n_tokens"], "chars": answer["n_chars"]}.get(score)
                of_choice = answer["log_probs"]
                if score == "pmi":
                    of_choice = [one - other for one, other in zip(of_choice, without, strict=True)]
                if length is not None:
                    of_choice = [one / n for one, n in zip(of_choice, length, strict=True)]
                n_right[score] += of_choice.index(max(of_choice)) == answer["gold"]
        for score in SCORES:
            rate = n_right[score] / len(asked)
            assert rate == pytest.approx(OF_SCORES["base", score, k]["accuracy"], abs=1e-6)


def test_log_probs_are_as_near_to_the_harness_as_the_figures_say() -> None:
    """On random weights and on the real model, whose difference is the larger."""
    page = (ROOT / "docs/figures.md").read_text("utf-8")
    found = re.search(r"difference of a log-probability; same choice \| ([\d.e-]+);", page)
    of_real_model = re.search(r"log-probabilities within (\d[\d.e-]+\d)", page)
    assert found is not None
    assert of_real_model is not None
    readme = (ROOT / "README.md").read_text("utf-8")
    said = f"to {float(found[1]):.0e}".replace("e-0", "e-")
    assert f"{said} (real model {of_real_model[1]})" in readme
    assert f"within {of_real_model[1]}" in (ROOT / "docs/faq.md").read_text("utf-8")


def test_the_verdicts_on_real_articles_are_its_reports() -> None:
    claims = json.loads((RESULTS / "paper-laptop.json").read_text("utf-8"))["claims"]
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    rows = page.partition("| the paper says |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [row.split("|")[2].strip() for row in rows]
    words = {"shown": "shown", "not shown": "not shown", "opposite shown": "the opposite is shown"}
    assert [text.removesuffix(" (trend)") for text in said] == [
        words[claim["verdict"]] for claim in claims
    ]


@needs_history
@pytest.mark.parametrize(
    "name", sorted(path.name for path in RESULTS.glob("*.json") if path.name != "published.json")
)
def test_claims_are_older_than_their_results(name: str) -> None:
    """The commit of the claims is an ancestor of the first one that has the results."""
    claims = json.loads((RESULTS / name).read_text("utf-8"))["claims_commit"]
    added = git("log", "--diff-filter=A", "--format=%H", "--", f"docs/results/{name}").splitlines()
    if not added:
        pytest.skip("not committed yet")
    ancestors = git("rev-list", added[-1]).splitlines()
    assert any(commit.startswith(claims) for commit in ancestors)


@needs_history
def test_claims_that_followed_an_earlier_run_are_said_to() -> None:
    """The claims of the company's study were changed when results of four arms were there."""
    (added,) = git(
        "log", "--diff-filter=A", "--format=%H", "--", "docs/results/company.json"
    ).splitlines()
    assert added in git("rev-list", REAL["claims_commit"]).splitlines()
    page = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    section = page.partition("### 128 documents")[2].partition("### ")[0]
    assert "until four arms of an earlier seed 0 were seen (`company.json`)" in section


def _kept(text: str) -> Kept | None:
    """Return what is kept of the study whose command a section has, if that was run since."""
    path = RESULTS / f"{study_of(text)}.json"
    return Kept.of(json.loads(path.read_text("utf-8"))) if path.is_file() else None


def test_each_figure_of_a_section_is_in_the_report_of_its_study() -> None:
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    for section, text in published.sections(page).items():
        kept = _kept(text)
        if kept is not None:
            assert unreported(text, kept) == [], section


def test_the_number_of_kept_reports_is_that_of_the_sections_with_one() -> None:
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    kept = [name for name, text in published.sections(page).items() if _kept(text) is not None]
    numbers = ("One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")
    said = re.search(r"\*\*(\w+) reports are kept\*\*", page)
    assert said is not None
    assert said[1] == numbers[len(kept) - 1]


def test_the_choices_alone_that_are_taken_off_in_the_sandbox_are_its_report_s() -> None:
    """Accuracies of 97% that differ by nothing are 4 points apart beyond them."""
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    flat = " ".join(page.split())
    sentence = flat.partition("Without question and passage: ")[2].partition(" | ")[0]
    said = dict(re.findall(r"\b(base|ft-reg|ft-par) (\d+\.\d)%", sentence))
    results = json.loads((RESULTS / "sandbox.json").read_text("utf-8"))["results"]
    for arm, number in said.items():
        found = next(
            item["accuracy"]
            for item in results
            if (item["arm"], item["question_set"]) == (arm, "new")
            and item["format"] == "texts-no-question"
            and "subject" not in item
        )
        assert abs(float(number) - 100 * found) <= 0.051
    assert set(said) == {"base", "ft-reg", "ft-par"}


def test_the_page_says_what_is_taken_off_where_controls_differ() -> None:
    """Accuracies of 29.0 and 24.0% are 12 points apart beyond them."""
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    head = " ".join(published.sections(page)["Findings"].split())
    named = []
    for section, text in published.sections(page).items():
        if _kept(text) is None:
            continue
        report = json.loads((RESULTS / f"{study_of(text)}.json").read_text("utf-8"))
        controls = {item.get("without_question", 0.25) for item in report["results"]}
        if len(controls) > 1:
            named.append(section)
    assert len(named) > 1
    assert "What they say of learning is net of the choices alone" in head


def test_a_figure_that_no_report_has_is_found() -> None:
    """Rows are read by arm and by set, text by differences with their intervals and p, p, and percentages."""
    kept = Kept.of({
        "results": [
            {"arm": "base", "question_set": "new", "k": 0, "accuracy": 0.314, "low": 0.25, "high": 0.383, "by_seed": [0.314]},
            {"arm": "base", "question_set": "old", "k": 0, "accuracy": 0.901, "low": 0.852, "high": 0.94, "by_seed": [0.901]},
            {"arm": "base", "question_set": "new", "k": 2, "accuracy": 0.777, "low": 0.7, "high": 0.832, "by_seed": [0.777],
             "outcomes": [{"outcome": "wrong", "rate": 0.123, "low": 0.08, "high": 0.171}]},
        ],
        "perplexities": [{"arm": "base", "per_token": 31.27, "by_seed": [31.27]}],
        "work_seconds": {"base": [18.4, 19.4]},
        "claims": [{"effect": 0.123, "low": -0.011, "high": 0.252, "p_holm": 0.068}],
    })  # fmt: skip
    rows = "| arm | new | old | perplexity | work |\n|---|---|---|---|---|\n"
    right = "| base | 31.4% (25–38) | 90.1% | 31.3 | 19 s |\n| base+rag | 77.7 / 12.3% | | | |\n"
    said = "It gains +12.3 points (−1.1 to 25.2, p = 0.07), p < 0.1, and has 90.1%."
    assert unreported(f"{rows}{right}\n{said}", kept) == []
    for wrong, found in (
        ("| base | 90.1% | | | |", ["base, new: 90.1"]),
        ("| base | 31.4% (24–38) | | | |", ["base, new: 24"]),
        ("| base+rag | 31.4% | | | |", ["base+rag, new: 31.4"]),
        ("\n| arm | +rag | +dense |\n| base | 77.7% | 77.7% |", ["base, +dense: 77.7"]),
        ("\n| arm | +rag |\n| base | 31.4% |", ["base, +rag: 31.4"]),
        ("| base | | | 31.2 | |", ["base, perplexity: 31.2"]),
        ("\n+12.4 points.", ["+12.4 points"]),
        ("\n+12.3 points (-1.1 to 25.3).", ["+12.3 points (-1.1 to 25.3)"]),
        ("\n+12.3 points (-1.1 to 25.2, p = 0.06).", ["+12.3 points (-1.1 to 25.2, p = 0.06", "p = 0.06"]),
        ("\nIt has 90.2% of them, p < 0.05.", ["p < 0.05", "90.2%"]),
    ):  # fmt: skip
        assert unreported(rows + wrong, kept) == found, wrong


PUBLISHED: dict[str, Any] = json.loads((RESULTS / "published.json").read_text("utf-8"))
DEMO = (ROOT / "docs/example-report.html").read_text("utf-8")


def test_each_figure_of_the_findings_is_of_a_report_or_was_published_before() -> None:
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    for section, text in published.sections(page).items():
        if _kept(text) is not None:
            continue
        by_commit = PUBLISHED["sections"].get(section, {})
        recorded = {figure for of_commit in by_commit.values() for figure in of_commit}
        assert set(published.figures(text)) <= recorded, section


@needs_history
def test_the_record_of_older_figures_is_what_its_commits_published() -> None:
    """No figure is newer than the list."""
    pages: dict[str, set[str]] = {}
    older = git("rev-list", PUBLISHED["closed_at"]).splitlines()
    for section, by_commit in PUBLISHED["sections"].items():
        for commit, figures in by_commit.items():
            if commit not in pages:
                assert any(known.startswith(commit) for known in older), commit
                page = git("show", f"{commit}:docs/findings.md")
                pages[commit] = set(published.figures(published.plain(page)))
            assert set(figures) <= pages[commit], (section, commit)


def test_only_what_a_kept_report_says_is_called_shown() -> None:
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    for section, text in published.sections(page).items():
        # What stands before the first section says what the word means.
        if section != "Findings" and _kept(text) is None:
            assert re.findall(r"\bshown\b", text, re.IGNORECASE) == [], section
    methods = (ROOT / "docs/methods.md").read_text("utf-8")
    assert re.findall(r"\bshown\b", methods, re.IGNORECASE) == []


_VERDICT = re.compile(r"\| yes \||\b(?:lost|left|kept|taught|learned) (?:more|less|some)\b")


def test_what_no_p_decided_is_not_told_as_found() -> None:
    """Sentences and rows with a p of 0.05 or more, and rows without any p, have no verdict."""
    page = published.plain((ROOT / "docs/findings.md").read_text("utf-8"))
    for section, text in published.sections(page).items():
        # The table on top names sections, which have the p.
        if section == "Findings":
            continue
        rows = [line for line in text.splitlines() if line.startswith("|")]
        prose = " ".join(line for line in text.splitlines() if not line.startswith("|"))
        for part in (*rows, *re.split(r"(?<=[.:])\s+(?=-? ?\*?[A-Z])", prose)):
            values = [float(p) for p in re.findall(r"\bp = (\d\.\d+)", part)]
            undecided = max(values, default=0) >= 0.05
            is_verdict = _VERDICT.search(part) is not None
            assert not (undecided and is_verdict), (section, part)
            if "| yes |" in part:
                assert re.search(r"\bp [<=] 0\.0", part), (section, part)


def test_only_figures_of_a_kept_report_are_bold() -> None:
    of_reports = {"45.2%", "0.983"}  # the company's, and the demo's in docs/example-report.html
    for page in ("docs/findings.md", "docs/methods.md", "README.md"):
        text = (ROOT / page).read_text("utf-8")
        bold = [part for part in text.split("**")[1::2] if re.search(r"\d[.%]", part)]
        assert set(bold) <= of_reports, page


def test_what_readme_says_of_its_two_tables_is_in_their_reports() -> None:
    text = " ".join((ROOT / "README.md").read_text("utf-8").split())
    net = of_real("best", "reworded")["net"]
    gain, low, high = (f"{100 * net[key]:.1f}" for key in ("delta", "low", "high"))
    assert f"teaches {gain} points (95% interval {low} to {high})" in text
    by_others = [gain_by(score) for score in SCORES[1:]]
    assert f"the gain is {min(by_others):.0f} to {max(by_others):.0f}" in text
    passages = text.partition("with a document in front")[2].partition("Every evaluation")[0]
    said = [float(number) for number in re.findall(r"(\d+\.\d)%", passages)]
    arms = (
        "base",
        "base+dense",
        "base+oracle",
        "paraphrases+oracle",
        "best+oracle",
        "distilled back+oracle",
    )
    found = [of_real(arm, "reworded", 1) for arm in arms]
    wanted = [100 * item["accuracy"] for item in found]
    assert said == pytest.approx(wanted, abs=0.051)
    assert {len(item["by_seed"]) for item in found[3:]} == {3}
    verdicts = {claim["name"]: claim["verdict"] for claim in REAL["claims"]}
    assert verdicts["retrieval beats best"] == "not shown"
    assert "BM25's is not told apart from that training" in text
    said = text.partition("In these models (one training each)")[2].partition("The demo's settings")
    report = " ".join(re.sub(r"<[^>]+>", " ", DEMO).split())
    new = [
        float(re.findall(rf"{arm} on “new”: 22\.3% → ([\d.]+)%", report)[0])
        for arm in ("cpt", "repeat")
    ]
    assert f"teach {new[0] - new[1]:.0f} points more than repetition" in said[0]
    known = re.search(r"repeat on “known”: [\d.]+% → [\d.]+%.*?−(\d+\.\d) points", report)
    assert known is not None
    assert f"repetition loses {known[1]} points" in said[0]
    left = re.search(r"cpt \(−\d\.\d points\) lost little.*?losses of up to (\d\.\d)", report)
    assert left is not None
    assert f"losses of up to {left[1]} points" in said[0]
    assert "No difference from retrieval alone is shown on new facts" in text
    assert "as good as retrieval cpt on “new”" in report


COLUMNS = ("general", "prose", "instructions")
OF_METHODS = (
    (r"questions stay, (\d+) of (\d+)%", "instructions", ("the same, own chat and prose", "base")),
    (r"Real model: (\d+) of (\d+)% of the instructions", "instructions", ("documents and paraphrases, projected", "base")),
    (r"Real model: (\d+)% of instructions \(plain (\d+)%\)", "instructions", ("LoRA", "documents and paraphrases")),
    (r"Real model: prose (\d+) \(AdamW (\d+)\)", "prose", ("Muon", "documents and paraphrases")),
    (r"\(AdamW \d+\), instructions (\d+)% \((\d+)%\)", "instructions", ("Muon", "documents and paraphrases")),
)  # fmt: skip
"""What the methods say of the real model -> a column of the handbook's table, and its rows."""
OF_COMPANY = (
    (r"prose of (\d+) instead of (\d+) \(base (\d+)\)", "prose", ("repeated", "paraphrases", "base")),
    (r"real.yaml`\) (\d+) instead of (\d+)% of the reworded", "reworded", ("best", "paraphrases")),
    (r"questions, (\d+) instead of (\d+)% of the instructions \(base (\d+)%\)", "instructions", ("best", "paraphrases", "base")),
    (r"Projection alone: (\d+)%", "instructions", ("projected",)),
    (r"the base has (\d+)%, after paraphrases (\d+)%, projected (\d+)%", "the right passage",
     ("base+oracle", "paraphrases+oracle", "projected+oracle")),
    (r"back.yaml`\): instructions (\d+)%", "instructions", ("distilled back",)),
    (r"leaves (\d+) of (\d+)% of the instructions\.", "instructions", ("cartridge", "base")),
    (r"general questions (\d+) instead of (\d+)%", "general", ("distilled back", "paraphrases")),
)  # fmt: skip
"""The same of the company's documents -> the set (or the prose, or the right passage before reworded questions), and the
arms in real.json."""


def test_what_methods_say_of_the_real_model_are_rows_of_the_findings() -> None:
    methods = " ".join((ROOT / "docs/methods.md").read_text("utf-8").split())
    table = (ROOT / "docs/findings.md").read_text("utf-8").partition("What a training cost stands")
    lines = [line for line in table[2].splitlines() if line.startswith("| ")]
    for pattern, column, rows in OF_METHODS:
        said = re.search(pattern, methods)
        assert said is not None, pattern
        for number, row in zip(said.groups(), rows, strict=True):
            line = next(line for line in lines if line.startswith(f"| {row}"))
            value = float(re.findall(r"\d+\.\d", line.partition(" | ")[2])[COLUMNS.index(column)])
            assert abs(float(number) - value) <= 0.51, (pattern, row)
    perplexities = {item["arm"]: item["per_token"] for item in REAL["perplexities"]}
    for pattern, name, arms in OF_COMPANY:
        said = re.search(pattern, methods)
        assert said is not None, pattern
        for number, arm in zip(said.groups(), arms, strict=True):
            if name == "prose":
                value = perplexities[arm]
            elif name == "the right passage":
                value = 100 * of_real(arm, "reworded", 1)["accuracy"]
            else:
                value = 100 * of_real(arm, name)["accuracy"]
            assert abs(float(number) - value) <= 0.51, (pattern, arm)
    said = re.search(r"Projection alone: .*? in (\d\.\d) times the time", methods)
    assert said is not None
    seconds = {arm: sum(REAL["work_seconds"][arm]) for arm in ("projected", "paraphrases")}
    ratio = seconds["projected"] / seconds["paraphrases"]
    assert abs(float(said[1]) - ratio) <= 0.051
    pages = [
        published.plain((ROOT / f"docs/{name}.md").read_text("utf-8"))
        for name in ("methods", "findings")
    ]
    of_methods, of_findings = (set(re.findall(r"[+-]\d+\.\d|p = 0\.\d+", page)) for page in pages)
    assert of_methods <= of_findings


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("c938d3a0253662fc", "39fe527ce526ec10"),
        ("db52048d21d3f814", "7a65d86b1a448801"),
        ("e0e82514b9f11225", "c78e65931ba49752"),
    ],
)
def test_a_training_that_was_done_twice_has_the_same_weights(first: str, again: str) -> None:
    """Ten paraphrases, each text once, are as many updates by their number and by one epoch."""
    sums = [
        json.loads(_archived("train", stage, "manifest.json"))["outputs"]["model/SHA256SUMS"]
        for stage in (first, again)
    ]
    assert sums[0] == sums[1]
    page = " ".join((ROOT / "docs/reliability.md").read_text("utf-8").split())
    assert "Three trainings of the company's study were done twice" in page


WRITTEN: dict[str, Any] = json.loads((RESULTS / "real-written.json").read_text("utf-8"))


of_written = partial(of_report, WRITTEN)


@pytest.mark.parametrize("arm", ["base", "paraphrases", "repeated", "best"])
def test_the_table_of_written_answers_is_its_results(arm: str) -> None:
    found = [of_written(arm, "words"), of_written(arm, "reworded"), of_written(arm, "reworded", 1)]
    wanted = [100 * item["accuracy"] for item in found]
    said = cells("docs/findings.md", "### Written answers", arm)
    assert said == pytest.approx(wanted, abs=0.051)
    assert {len(item["by_seed"]) for item in found} == {1 if arm == "base" else 3}


def test_what_the_pages_say_of_written_answers_is_in_their_report() -> None:
    page = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    section = page.partition("### Written answers")[2].partition("### ")[0]
    net = of_real("best", "reworded")["net"]
    assert f"among choices {100 * net['delta']:.1f}." in section
    verdicts = {claim["name"]: claim["verdict"] for claim in WRITTEN["claims"]}
    assert "and, [in writing](#written-answers), on the company" in page
    assert verdicts["paraphrases beat repetition in writing"] == "shown"
    base, paraphrases, best = (
        100 * of_written(arm, "reworded")["accuracy"] for arm in ("base", "paraphrases", "best")
    )
    readme = " ".join((ROOT / "README.md").read_text("utf-8").split())
    assert f"writes {best:.1f}% of the answers (base {base:.1f}%)" in readme
    methods = " ".join((ROOT / "docs/methods.md").read_text("utf-8").split())
    assert f"in writing {best:.0f} instead of {paraphrases:.0f}." in methods
    assert "The report calls the claims late" in section
    assert all(claim["declared_late"] for claim in WRITTEN["claims"])


BEST_WRITTEN = ("10e3216ebc2f8199", "2d49e53be56e4a39", "f52f664d735965c5")
"""The evaluations of written answers of the best training, seeds 0 to 2, in docs/results/company."""


def test_the_control_of_written_answers_is_counted_in_the_kept_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = []
    for stage in BEST_WRITTEN:
        lines = _archived("eval", stage, "answers.jsonl").splitlines(keepends=True)
        of_words = [line for line in lines if json.loads(line)["question_set"] == "words"]
        folder = tmp_path / stage
        folder.mkdir()
        (folder / "answers.jsonl").write_text("".join(of_words), "utf-8")
        folders.append(("best", folder))
    program = load_benchmark("study/other_answers.py")
    monkeypatch.setattr(program, "texts_of", lambda recipe: folders)
    paths = {name: str(ROOT / f"eval/company/{name}.jsonl") for name in ("reworded", "words")}
    found = program.count(None, program.Questions(paths))["best", "words"]
    assert fmean(found.own) == pytest.approx(of_written("best", "words")["accuracy"], abs=1e-6)
    said = re.search(
        r"of 100 texts of best \(words\), (\d\.\d) hold .* document, (\d\.\d) to one elsewhere",
        " ".join((ROOT / "docs/findings.md").read_text("utf-8").split()),
    )
    assert said is not None
    shares = (100 * fmean(found.same_document), 100 * fmean(found.other_documents))
    assert [float(number) for number in said.groups()] == pytest.approx(shares, abs=0.051)


PARAPHRASES = json.loads((RESULTS / "real-paraphrases.json").read_text("utf-8"))


def test_the_table_by_number_of_paraphrases_is_its_results() -> None:
    found = {
        (item["arm"], item["question_set"]): item
        for item in PARAPHRASES["results"]
        if item["format"] != "texts-no-question" and not item["k"] and "subject" not in item
    }
    levels = ("words", "reworded", "inferred", "combined")
    control = []
    for n in (0, 1, 2, 5, 10):
        wanted = []
        for level in levels:
            for kind in ("equal passes", "equal tokens"):
                item = found[kind if n == 10 else f"{kind}, styles paraphrase {n}", level]
                wanted.append(100 * item["accuracy"])
                control.append(100 * item["without_question"])
                assert len(item["by_seed"]) == 3
        row = cells("docs/findings.md", "### Accuracy by number", str(n or "none"))
        assert row == pytest.approx(wanted, abs=0.051)
    page = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    text = page.partition("### Accuracy by number")[2].partition("###")[0]
    assert f"without the question {min(control):.0f} to {max(control):.0f}%" in text
    assert len(PARAPHRASES["claims"]) == 2
    for claim in PARAPHRASES["claims"]:
        low, effect, high = (100 * claim[key] for key in ("low", "effect", "high"))
        assert re.search(
            rf"\{effect:+.1f}( points)? \({low:.1f} to {high:.1f}, p = {claim['p_holm']:.3f}\)",
            text,
        )


def test_the_hours_of_the_company_s_studies_are_those_of_their_recipes() -> None:
    page = (ROOT / "docs/studies.md").read_text("utf-8")
    said = re.search(r"`real.yaml`, `real-paraphrases.yaml` .* (\d+) and (\d+) hours", page)
    assert said is not None
    for name, hours in zip(("real", "real-paraphrases"), said.groups(), strict=True):
        recipe = (ROOT / f"recipes/studies/{name}.yaml").read_text("utf-8")
        assert f"after some {hours} hours" in recipe


def test_the_arms_of_the_frontier_that_read_twice_as_much_are_counted() -> None:
    study = yaml.safe_load((ROOT / "recipes/studies/frontier.yaml").read_text("utf-8"))["study"]
    n_twice = 0
    for name, arm in study["arms"].items():
        overrides = arm.get("overrides", {})
        n_steps = overrides.get("trainer.max_steps", 220)
        n_rows = overrides.get("trainer.per_device_train_batch_size", 4)
        # Those that are matched by seconds are no comparison at equal tokens.
        n_twice += n_steps * n_rows == 2 * 220 * 4 and "seconds" not in name
    assert n_twice == 4
    for name in ("studies", "methods"):
        page = (ROOT / f"docs/{name}.md").read_text("utf-8")
        assert "every method at the same training tokens, four at twice" in page


def test_no_recipe_points_at_a_result_that_the_findings_withdraw() -> None:
    page = (ROOT / "docs/findings.md").read_text("utf-8")
    withdrawn = page.partition("learning is withdrawn**")[2].partition(" found:")[0]
    names = re.findall(r"`([\w-]+\.yaml)`", withdrawn)
    assert "recall.yaml" in names
    for name in names:
        recipe = (ROOT / "recipes/studies" / name).read_text("utf-8")
        assert "findings.md has" not in recipe, name


def test_what_the_demo_s_control_is_to_answer_is_readme_s() -> None:
    recipe = (ROOT / "recipes/sandbox/repeat.yaml").read_text("utf-8")
    said = re.search(r"(\d+)% of the new facts \(recipes/cpt.yaml: (\d+)%\)", recipe)
    assert said is not None
    readme = (ROOT / "README.md").read_text("utf-8")
    for number, row in zip(said.groups(), ("originals repeated", r"\*\*paraphrases"), strict=True):
        found = re.search(rf"^\| {row}.*?\| \**(0\.\d+)", readme, re.MULTILINE)
        assert found is not None
        assert float(number) / 100 == pytest.approx(float(found[1]), abs=0.0051)
