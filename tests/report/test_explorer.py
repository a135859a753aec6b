"""The script of the page, in a real browser: it sorts, filters and searches every changed answer, and is quick with 20,000."""

from __future__ import annotations

import html as entities
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from study_samples import make_report
from test_report import flip, write_flips

from kinject.report.files import write_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.usefixtures("blank_figures"),
    pytest.mark.skipif(BROWSER is None, reason="no browser here (chromium)"),
]
HARNESS = """<!doctype html><p id=seen></p><iframe src=report.html></iframe><script>
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument, root = page.getElementById("explorer"), seen = {};
  const [query, ...selects] = root.querySelectorAll("input, select");
  const heads = [...root.querySelectorAll("thead button")], turns = root.querySelectorAll(".pager button");
  const status = () => root.querySelector(".status").textContent;
  const rows = () => [...root.querySelectorAll("tbody tr")].map((row) => row.cells[4].textContent);
  const filter = (words, arm = "") => {
    query.value = words;
    selects.find((select) => select.parentElement.textContent.startsWith("arm")).value = arm;
    selects[0].dispatchEvent(new Event("change"));
  };
  const timed = (work) => { const before = performance.now(); work(); return performance.now() - before; };
  %s
  document.getElementById("seen").textContent = JSON.stringify(seen);
});
</script>"""


def drive(folder: Path, script: str) -> Any:
    """Return what `script` puts into ``seen`` about the report in `folder`, in a headless browser."""
    (folder / "index.html").write_text(HARNESS % script)
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--allow-file-access-from-files", f"--user-data-dir={folder / 'browser'}", "--dump-dom",
               (folder / "index.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=400, check=True)
    match = re.search(r'<p id="seen">(.+?)</p>', done.stdout.decode("utf-8"))
    assert match is not None
    return json.loads(entities.unescape(match[1]))


def write_changes(folder: Path, n: int, n_questions: int) -> None:
    """Write a report with `n` changed answers, about as many of each arm; passages come again and again."""
    passages = [" ".join(f"word{(7 * i + j) % 997}" for j in range(150)) for i in range(n_questions // 4 + 1)]
    rows = [
        flip(
            ("reg", "par")[i // n_questions % 2], question_set="new", question_id=f"q{i % n_questions}",
            question=f"Who is number {i % n_questions}?", document_id=f"d{i % n_questions // 3}",
            log_probs=[-2.0, -1.0 - i / n], passages=[passages[i % n_questions // 4]],
        ) for i in range(n)
    ]  # fmt: skip
    write_flips(folder, *rows)
    write_report(folder, make_report())


def test_answers_are_sorted_filtered_searched_and_turned_page_by_page(tmp_path: Path) -> None:
    write_changes(tmp_path, 250, 125)
    seen = drive(tmp_path, """
      seen.first = [rows().length, status(), rows()[0]];
      turns[1].click(); turns[1].click();
      seen.last = [rows().length, status(), turns[1].ariaDisabled];
      const event = (name) => page.defaultView.dispatchEvent(new Event(name));
      event("beforeprint"); seen.paper = status(); event("afterprint"); seen.screen = status();
      filter("", "par"); seen.arm = status();
      filter("NUMBER 7?"); seen.words = rows();
      filter("word7 number"); seen.passages = rows().length;
      filter("d41 nowhere"); seen.none = [rows().length, status()];
      filter("");
      heads[4].click(); seen.up = rows().slice(0, 3);
      heads[4].click(); seen.down = rows()[0];
      heads[7].click(); seen.margin = [rows()[0], heads[7].parentElement.getAttribute("aria-sort")];
      heads[7].click(); heads[7].click(); seen.asWritten = [rows()[0], heads[7].parentElement.getAttribute("aria-sort")];
    """)  # fmt: skip
    assert seen["first"] == [100, "1 to 100 of 250", "Who is number 0?"]
    assert seen["last"] == [50, "201 to 250 of 250", "true"]
    assert (seen["paper"], seen["screen"]) == ("201 to 220 of 250", "201 to 250 of 250")
    assert seen["arm"] == "1 to 100 of 125 found of 250"
    assert seen["words"] == [f"Who is number {i}?" for i in range(7, 125, 10)] * 2
    assert seen["passages"] > 2
    assert seen["none"] == [0, "0 found of 250"]
    assert seen["up"] == ["Who is number 0?", "Who is number 0?", "Who is number 1?"]
    assert seen["down"] == "Who is number 124?"
    assert seen["margin"] == ["Who is number 124?", "ascending"]  # it moved least
    assert seen["asWritten"] == ["Who is number 0?", None]


def test_every_other_table_is_sorted_by_its_headings_with_the_keyboard_too(tmp_path: Path) -> None:
    """Numbers count as numbers, with their signs and bounds, and empty cells come last."""
    write_changes(tmp_path, 2, 2)
    seen = drive(tmp_path, """
      const tables = [...page.querySelectorAll(".scroll table")];
      const long = tables.filter((table) => table.tHead && table.tBodies[0].rows.length > 2);
      seen.all = long.length > 1 && long.every((table) => table.querySelectorAll("thead th > button").length > 1);
      const table = long.find((one) => one.tBodies[0].rows.length > 5), lines = [...table.tBodies[0].rows];
      const button = table.tHead.rows[0].cells[1].firstChild;
      const column = () => [...table.tBodies[0].rows].slice(0, 6).map((line) => line.cells[1].firstChild?.textContent ?? "");
      const press = () => { button.focus(); page.activeElement.click(); return column(); };
      const sorted = (texts) => {
        lines.forEach((line, index) => line.cells[1].replaceChildren(texts[index] ?? ""));
        return [press(), press(), press()];
      };
      seen.numbers = sorted(["1,800", "base", "−0.3", "< 0.001", "+1.5 (0.1 to 2.0)", "0.001"]);
      seen.texts = sorted(["b", "A10", "", "a9", "C", "3"]);
    """)  # fmt: skip
    assert seen["all"]
    ordered = ["−0.3", "< 0.001", "0.001", "+1.5 (0.1 to 2.0)", "1,800", "base"]
    assert seen["numbers"][0] == ordered
    assert seen["numbers"][1] == [*ordered[-2::-1], "base"]
    assert seen["numbers"][2] == ["1,800", "base", "−0.3", "< 0.001", "+1.5 (0.1 to 2.0)", "0.001"]
    assert seen["texts"][0] == ["3", "a9", "A10", "b", "C", ""]
