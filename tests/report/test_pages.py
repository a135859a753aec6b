"""Every HTML page that kinject writes is inert, whatever stands in it: read by a parser, and opened in a real browser."""

from __future__ import annotations

import base64
import functools
import hashlib
import html as entities
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest
from study_results import make_study
from study_samples import first, log_entries, make_evaluation, make_result, write_log

from kinject.disk import write_jsonl
from kinject.report.files import write_report
from kinject.results import Perplexity, Recall

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
TAGS = frozenset(
    "html head meta title style body header main footer section h1 h2 h3 p ul ol li b span small details summary blockquote "  # noqa: SIM905
    "table thead tbody tr th td div figure figcaption pre code img picture source dl dt dd ol script".split()
)
"""Elements of kinject's own templates."""
ODD_NAME = "$\\frac{1}{0$ 漢字 🦀 עברית \x00\x1b[2J\u202e\ud800"
FIGURE = "data:image/svg+xml;base64,"


def evil(url: str) -> tuple[str, ...]:
    """Return texts that would run, fetch or go to `url` wherever they are taken for markup."""
    return (
        f"<script>top.pwned = 1; fetch('{url}/script')</script>",
        f'"><img src={url}/img onerror="top.pwned = 1">',
        f"</title></style></svg></pre></code><script src={url}/src.js></script>",
        f"'><svg onload=top.pwned=1><image href={url}/svg /></svg>",
        f"<style>@import url({url}/css);</style><link rel=stylesheet href={url}/link><base href={url}/>",
        f"<iframe src={url}/frame srcdoc='<script>top.pwned=1</script>'></iframe>"
        f"<meta http-equiv=refresh content='0;url={url}/go'>",
        f"javascript:top.pwned=1 [x](javascript:top.pwned=1) ![y]({url}/md) {{{{ 7*7 }}}} {{% raw %}}",
        f"url({url}/url) </text><foreignObject><body onload=top.pwned=1></foreignObject> --><!-- ]]>",
        "$\\frac{1}{0$ \x1b[2J\u202egnp.exe a|b\n# heading\n| c | d |\n=cmd|' /C calc'!A0",
        "&lt;script&gt;top.pwned=1&lt;/script&gt; &#60;img src=x onerror=top.pwned=1&#62;",
    )


def poisoned(value: Any, texts: tuple[str, ...]) -> Any:
    """Return `value` with a hostile text in place of every free one; what are keys of the page's logic stays."""
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in fields(value)}
        kept = {"kind", "interval", "role", "format", "score", "verdict", "stage", "test"}
        kept |= {"first", "reason"}  # of an advice
        return replace(
            value,
            **{
                name: item if name in kept else poisoned(item, texts)
                for name, item in values.items()
            },
        )
    if isinstance(value, tuple):
        return tuple(poisoned(item, texts) for item in value)
    if isinstance(value, dict):
        return {poisoned(key, texts): poisoned(item, texts) for key, item in value.items()}
    if isinstance(value, str) and value:
        return f"{value}{texts[sum(value.encode()) % len(texts)]}"
    return value


def write_pages(folder: Path, url: str) -> dict[str, Path]:
    """Write the page of each kind of run, with hostile texts everywhere; return them by name."""
    texts = evil(url)
    log = write_log(folder / "log.jsonl", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}])
    base, results = first(50, 200), []
    for role, name in (("learning", texts[0]), ("retention", texts[2])):
        results.append(make_result("base", base, None, question_set=name, role=role))
        results += [
            make_result(arm, first(99, 200), base, question_set=name, role=role)
            for arm in (*texts[:4], ODD_NAME)
        ]
        results += [
            replace(result, subject=text) for result in results[-4:] for text in texts[1:4:2]
        ]
    (folder / "eval").mkdir()
    flips = [
        {"question_set": texts[0], "role": "learning", "base_arm": "base", "arm": arm, "format": "texts", "shots": 0, "k": 0,
         "change": "wrong to right", "question_id": arm, "subject": arm, "document_id": arm, "question": arm,
         "choices": list(texts), "gold": 1, "chosen": 1, "base_chosen": 0, "log_probs": [-1.0] * len(texts),
         "base_log_probs": [-1.0] * len(texts), "truncated": 0, "passages": [{"id": arm, "document_id": arm, "text": arm}]}
        for arm in texts
    ]  # fmt: skip
    write_jsonl(folder / "eval" / "flips.jsonl", flips)
    recalls = tuple(Recall(name, 3, 50, 100) for name in texts[:2])
    perplexities = tuple(Perplexity(model, texts[5], 10, 100, 4.0, 2.0) for model in texts[:3])
    logs = log_entries(dict.fromkeys(texts[:3], log))
    report = make_evaluation(
        results, " ".join(texts), notes=texts, perplexities=perplexities, recalls=recalls, logs=logs
    )
    pages = {"eval": write_report(folder / "eval", report)}
    whole = make_study(n_seeds=1)
    few = ("base", "ft-par")
    result = replace(
        whole, arms=tuple(arm for arm in whole.arms if arm.name in few),
        results=tuple(score for score in whole.results if score.arm in few and score.k < 2 and score.role != "baseline"),
        sweeps=whole.sweeps[:1], costs=(),
    )  # fmt: skip
    free: dict[str, Any] = {
        "title": " ".join(texts),
        "description": texts[0],
        "notes": texts,
        "commands": texts,
    }
    names = (
        "<script>top.pwned=1</script>",
        f"<img src={url}/n onerror=top.pwned=1>",
        "</style></svg><svg onload=top.pwned=1>",
    )
    shown = poisoned(result, names)
    free["about_sets"] = {shown.results[0].question_set: texts[0]}
    (folder / "study").mkdir()
    changed = [{**row, "model": shown.models[0], "arm": shown.arms[1].name, "question_set": shown.results[0].question_set,
                "format": shown.results[0].format} for row in flips]  # fmt: skip
    write_jsonl(folder / "study" / "flips.jsonl", changed)
    pages["study"] = write_report(folder / "study", replace(shown, **free))
    return pages


class Page(HTMLParser):
    """Collects elements with their attributes, the text, and the scripts: their attributes and content."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "script":
            self.scripts.append((self.elements[-1][1], ""))

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.lasttag == "script" and self.cdata_elem == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)


SCRIPT = (files("kinject.report") / "templates" / "report.js").read_text("utf-8")


@pytest.mark.skipif(shutil.which("node") is None, reason="no JavaScript here")
def test_a_column_is_sorted_by_what_its_cells_mean() -> None:
    columns = [
        ["−2.5 ▼", "< 0.001", "0.004", "+1.25", "1,800 of 2,000", "10,000"],
        ["3e-06", "1.5e-05", "0.0001", "0.02"],
        ["40 s", "3 min", "175 min", "3 h 1 min", "12 h 0 min"],
    ]
    (function,) = re.findall(r"  const SECONDS.*?\n  }\n", SCRIPT, re.DOTALL)
    call = f"{json.dumps(columns)}.map((column) => column.map((text) => valueOf({{firstChild: {{textContent: text}}}})))"
    run = subprocess.run(
        ["node", "-e", f"{function}; console.log(JSON.stringify({call}))"],
        capture_output=True, check=True,
    )  # fmt: skip
    for values in json.loads(run.stdout):
        assert values == sorted(values)
        assert all(isinstance(value, int | float) for value in values)


def hash_of(text: str) -> str:
    """Return the source of a content security policy that allows this inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def script_faults(page: Page) -> list[str]:
    """Return what is wrong with the scripts of a page: it has kinject's own alone."""
    scripts = [(attributes, text.strip()) for attributes, text in page.scripts]
    return [] if scripts == [({}, SCRIPT.strip())] else [f"scripts: {str(scripts)[:60]}"]


def faults(html: str) -> list[str]:
    """Return what in a page could run, fetch, send or go anywhere; [] of an inert one."""
    page = Page(html)
    problems = [f"<{tag}>" for tag, _ in page.elements if tag not in TAGS]
    for tag, attributes in page.elements:
        for name, value in attributes.items():
            plain = entities.unescape(value).strip().lower()
            if (tag, name) in (("img", "src"), ("source", "srcset")) and re.fullmatch(
                rf"{re.escape(FIGURE)}[\w+/=]+", value
            ):
                continue  # scripts and links of an image never run
            if name.startswith("on") or name in [
                "src",
                "srcset",
                "srcdoc",
                "action",
                "formaction",
                "data",
                "ping",
                "background",
            ]:
                problems.append(f"{tag} {name}")
            elif name in ("href", "xlink:href") and not plain.startswith("#"):
                problems.append(f"{tag} {name}={value}")
            elif name == "style" and re.search(
                r"url\((?!['\"]?#)|@import|expression\(|image-set", plain
            ):
                problems.append(f"{tag} style={value}")
            elif name == "http-equiv" and value != "Content-Security-Policy":
                problems.append(f"meta {value}")
    (policy,) = [
        of["content"]
        for _, of in page.elements
        if of.get("http-equiv") == "Content-Security-Policy"
    ]
    (sheet,) = re.findall(r"<style[^>]*>(.*?)</style>", html, re.DOTALL)
    wanted = policy_of(sheet, page.scripts[-1][1] if page.scripts else "")
    problems += script_faults(page)
    head = html[: html.index("<title>")]
    problems += (
        [] if policy == wanted and policy in entities.unescape(head) else [f"policy: {policy}"]
    )
    return problems + (["the sheet fetches"] if re.search(r"url\(|@import", sheet) else [])


def policy_of(sheet: str, script: str) -> str:
    """Return the policy of a page with this style sheet and this script."""
    return (
        f"default-src 'none'; script-src {hash_of(script)}; style-src {hash_of(sheet)}; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


Site = tuple[str, Path, list[str]]
"""A web server: its address, its folder, the paths that it was asked for."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    requested: list[str] = []
    folder = tmp_path_factory.mktemp("site")

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            requested.append(self.path)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(folder))
    )
    Thread(target=server.serve_forever, args=(0.01,)).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", folder, requested
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def pages(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The pages, their texts leading to the site."""
    return write_pages(tmp_path_factory.mktemp("pages"), f"{site[0]}/beacon")


def test_the_parser_knows_what_is_not_inert() -> None:
    page = (
        f'<html><meta http-equiv="Content-Security-Policy" content="{policy_of("x", SCRIPT)}"><title></title><style>x</style>'
        f"%s<script>{SCRIPT.replace('%', '%%')}</script></html>"
    )
    assert faults(page % "<p>fine</p>") == []
    assert faults(page % "" + "<script>1</script>") != []
    assert faults(page.replace("'none';", "*;", 1) % "") != []
    for text in evil("http://127.0.0.1:9")[:6]:
        assert faults(page.replace("%s", f"<p>{text.replace('<style>', '<b>')}</p>")) != [], text
    for text in (
        "<p style='background:url(//x)'>",
        "<a href='java&#115;cript:1'>",
        "<use href='//x'>",
        "<form action=x>",
    ):
        assert faults(page % text) != [], text


@pytest.mark.parametrize("name", ["eval", "study"])
def test_a_page_full_of_hostile_texts_is_inert(pages: dict[str, Path], name: str) -> None:
    html = pages[name].read_text("utf-8")
    assert faults(html) == []
    text = Page(html).text
    assert "<script>top.pwned = 1" in text  # shown, as text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)


def test_svg_files_are_well_formed_even_with_hostile_names(pages: dict[str, Path]) -> None:
    for path in (path for page in pages.values() for path in page.parent.glob("figures/*.svg")):
        tree = ElementTree.parse(path)  # noqa: S314 - written by this test
        assert not [element for element in tree.iter() if element.tag.endswith("}script")]


CONTROL = """<!doctype html><html><body><p id=seen></p>{frames}<iframe name=control src=control.html></iframe><script>
addEventListener("load", async () => {{
  const found = {{pwned: window.pwned || 0, frames: {{}}}};
  const wait = () => new Promise((done) => setTimeout(done, 400));
  for (const frame of document.querySelectorAll("iframe")) {{
    const page = frame.contentDocument;
    for (const details of page.querySelectorAll("details")) details.open = true;
    for (const button of page.querySelectorAll("thead button")) button.click();
    await wait();
    const all = [...page.querySelectorAll("*")];
    found.frames[frame.name] = {{
      here: page.title.length > 0, address: page.location.pathname,
      on: all.filter(e => [...e.attributes].some(a => a.name.startsWith("on"))).length,
      active: all.filter(e => "iframe link base object embed form a".split(" ").includes(e.localName)).length,
      scripts: all.filter(e => e.localName === "script").length,
      sorted: page.querySelectorAll("thead [aria-sort]").length,
      styled: page.defaultView.getComputedStyle(page.body).maxWidth,
    }};
  }}
  found.pwned = window.pwned || 0;
  found.control = window.control || 0;
  document.getElementById("seen").textContent = JSON.stringify(found);
}});
</script></body></html>"""


@pytest.mark.skipif(
    BROWSER is None, reason="no browser here (chromium): what a parser sees was checked alone"
)
def test_in_a_browser_nothing_of_a_hostile_page_runs_or_is_fetched(
    site: Site, pages: dict[str, Path], tmp_path: Path
) -> None:
    url, folder, requested = site
    for name, path in pages.items():
        (folder / f"{name}.html").write_bytes(path.read_bytes())
    body = "".join(evil(f"{url}/beacon-of-control")).replace("pwned", "control")
    (folder / "control.html").write_text(f"<html><title>control</title><body>{body}</body></html>")
    frames = "".join(f"<iframe name={name} src={name}.html></iframe>" for name in pages)
    (folder / "index.html").write_text(CONTROL.format(frames=frames))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               f"--user-data-dir={tmp_path}", "--virtual-time-budget=10000", "--dump-dom", f"{url}/index.html"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, timeout=4000, check=True)
    match = re.search(r'<p id="seen">(.+?)</p>', done.stdout.decode("utf-8"))
    assert match is not None
    state = json.loads(entities.unescape(match[1]))
    for name in pages:
        frame = state["frames"][name]
        assert frame["here"], name
        assert frame["address"] == f"/{name}.html"
        assert (frame["on"], frame["active"]) == (0, 0), name
        assert frame["scripts"] == len(Page(pages[name].read_text("utf-8")).scripts), name
        assert frame["styled"] != "none", name  # its own style sheet counts
    for name in ("eval", "study"):  # its own script ran
        assert state["frames"][name]["sorted"] > 1
    assert not [path for path in requested if path.startswith("/beacon/")]
    assert [
        path for path in requested if path.startswith("/beacon-of-control/")
    ]  # else nothing could have been seen
    assert (state["pwned"], state["control"]) == (0, 1)
