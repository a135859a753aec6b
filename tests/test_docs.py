"""What the documentation says holds: its recipes pass the check, its commands parse, its keys exist, its site builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kinject.augment.plan import check_sections
from kinject.cli import _parser
from kinject.recipe import read_recipe
from kinject.recipe.read import Sections
from kinject.recipe.sections import StudySection
from kinject.recipe.yaml_lines import read_yaml
from kinject.report.result_tables import _COLUMNS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
WRITTEN = "recipes/handbook/"
"""Recipes that `kinject try handbook/` writes: tests/augment/test_survey.py reads them."""
SECTIONS = {field.name for field in fields(Sections)}
STUDY_KEYS = {field.name for field in fields(StudySection)} - SECTIONS
BASE: Mapping[str, Any] = {
    "run_dir": "runs/x",
    "model": {"path": "some/model"},
    "corpus": {"path": "corpus.jsonl", "replay": {"path": "general.jsonl", "fraction": 0.1}},
    "adapter": {"r": 8},
    "trainer": {"max_steps": 1},
    "augment": {
        "documents": "d.jsonl",
        "styles": {"paraphrase": 1},
        "generator": {"kind": "sandbox", "price": [1, 1]},
    },
    "questions": {"documents": "d.jsonl", "generator": {"kind": "sandbox"}},
    "eval": {"models": {"base": "m"}, "questions": {"new": "q.jsonl"}},
    "probes": {"questions": {"new": "q.jsonl"}},
    "study": {
        "title": "t",
        "train": "t.yaml",
        "eval": "e.yaml",
        "models": {"m": "m"},
        "arms": {"a": {}},
    },
}
"""What a fragment is put into; sections that it does not name are left out."""


def _blocks(language: str) -> Iterator[Any]:
    for page in PAGES:
        for match in re.finditer(
            rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
        ):
            line = page.read_text("utf-8")[: match.start()].count("\n") + 1
            yield pytest.param(match[1], id=f"{page.name}:{line}")


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, Mapping) or not isinstance(above, Mapping):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _check(values: Mapping[str, Any], folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")  # JSON is YAML
    check_sections(read_recipe(path))


@pytest.mark.parametrize("text", list(_blocks("yaml")))
def test_every_yaml_block_is_a_recipe_or_a_part_of_one(text: str, tmp_path: Path) -> None:
    block = tmp_path / "block.yaml"
    block.write_text(text, encoding="utf-8")
    values = read_yaml(block).root
    if values.keys() <= STUDY_KEYS:
        values = {"study": values}
    assert values.keys() <= SECTIONS, "neither a recipe nor sections of one, nor keys of a study"
    if "run_dir" not in values:
        below = {key: BASE[key] for key in ("run_dir", *values) if key in BASE}
        values = _merged(below, values)
    _check(values, tmp_path)


def _documented_keys() -> list[Any]:
    """Return every `section.key: value` and `section: {...}` that stands in code within a line, with its page."""
    keys: dict[str, Any] = {}
    names = "|".join(sorted(SECTIONS - {"run_dir", "seed", "method", "study"}))
    pattern = re.compile(rf"`(({names})(?:\.[\w.]+)?): ([^`]+)`")
    for page in PAGES:
        text = page.read_text("utf-8").partition("## The guides, row by row")[
            0
        ]  # tests/test_guides.py reads the rows
        for match in pattern.finditer(text):
            if "..." not in match[3]:
                keys[f"{match[1]}={match[3]}"] = pytest.param(
                    match[1], match[3], id=f"{page.name}: {match[1]}"
                )
    return list(keys.values())


@pytest.mark.parametrize(("key", "value"), _documented_keys())
def test_every_line_that_a_page_names_is_accepted(key: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    below = {name: BASE[name] for name in {"run_dir", key.partition(".")[0]} if name in BASE}
    path.write_text(json.dumps(below), encoding="utf-8")
    read_recipe(path, [f"{key}={value}"])


def _commands() -> Iterator[Any]:
    """Yield every `$ command` of the pages' console blocks, continued lines joined, comments off."""
    for block in _blocks("console"):
        text = re.sub(r"\\\n\s*", "", block.values[0])
        for line in text.splitlines():
            if line.startswith("$ "):
                yield pytest.param(line[2:], id=f"{block.id} {line[2:60]}")


@pytest.mark.parametrize("line", list(_commands()))
def test_every_command_of_a_page_parses(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    if any(word.startswith(WRITTEN) for word in words):
        return
    for word in words:
        if word.startswith("recipes/") and word.endswith(".yaml"):
            assert (ROOT / word).exists(), word
        if word.startswith("benchmarks/"):
            assert (ROOT / word).exists(), word
    if "kinject.cli" in words:  # behind accelerate launch
        words = ["kinject", *words[words.index("kinject.cli") + 1 :]]
    while words and re.match(r"^\w+=", words[0]):
        words = words[1:]
    if words[:1] == ["make"]:
        assert all(
            re.search(rf"^{target}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
            for target in words[1:]
        )
    if words[:1] != ["kinject"] or len(words) == 1:
        return
    arguments, rest = _parser().parse_known_args(words[1:])
    assert not any(word.startswith("-") for word in rest), rest
    recipes = [*getattr(arguments, "arguments", []), *rest]
    overrides = [word for word in recipes if "=" in word]
    recipe = next(
        (word for word in recipes if "=" not in word), getattr(arguments, "default_recipe", None)
    )
    if recipe is not None and recipe.startswith("recipes/"):
        check_sections(read_recipe(ROOT / recipe, overrides))


def _schemas_at(
    schema: Mapping[str, Any], key: str, root: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """Return the schemas of `key` below `schema`, in each of its alternatives; ``*`` is any name."""
    if "$ref" in schema:
        return _schemas_at(root["definitions"][schema["$ref"].rsplit("/", 1)[1]], key, root)
    conditional = [schema[name] for name in ("then", "else") if name in schema]
    parts = (*schema.get("anyOf", ()), *schema.get("allOf", ()), *conditional)
    schemas = [one for part in parts for one in _schemas_at(part, key, root)]
    below = (
        schema.get("additionalProperties") if key == "*" else schema.get("properties", {}).get(key)
    )
    return [*schemas, below] if isinstance(below, Mapping) else schemas


def _keys(text: str) -> set[str]:
    """Return the dotted keys of recipes that `text` names in code; files such as `corpus.jsonl` are none."""
    sections = "|".join(SECTIONS)
    return set(
        re.findall(
            rf"`((?:{sections})(?:\.(?!(?:jsonl|json|yaml|py|html)\b)(?:[a-z]\w*|\*(?=\.)))+)\b",
            text,
        )
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_that_a_page_names_is_in_the_schema(page: Path) -> None:
    root = json.loads((ROOT / "recipes" / "recipe.schema.json").read_text("utf-8"))
    keys = _keys(page.read_text("utf-8"))
    assert page.name != "glossary.md" or len(keys) > 20
    for key in keys:
        schemas = [root]
        for part in key.split("."):
            schemas = [one for schema in schemas for one in _schemas_at(schema, part, root)]
        assert schemas, key


def _links_without_a_target(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    targets = re.findall(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)", text)
    return [
        f"{path}#{anchor}"
        for path, anchor in targets
        if not _is_there(page.parent / path if path else page, anchor)
    ]


def _is_there(path: Path, anchor: str) -> bool:
    """Return whether a file exists and, of a page, a heading with `anchor`, as the repository's pages name it."""
    if not anchor or not path.exists():
        return path.exists()
    titles = re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)
    return anchor in {
        re.sub(r"\s", "-", re.sub(r"[^\w\- ]", "", title.lower())) for title in titles
    }


def test_every_link_of_a_page_works_in_the_repository() -> None:
    broken = {page.name: _links_without_a_target(page) for page in [*PAGES, *ROOT.glob("*.md")]}
    assert {name: targets for name, targets in broken.items() if targets} == {}


_ROOMS = "|".join(
    sorted(path.name for path in (ROOT / "src" / "kinject").iterdir() if path.is_dir())
)
_FILES = re.compile(
    r"(?<![\w/.-])(?P<path>(?:tests|src|benchmarks)/[\w./-]*[\w/]"
    rf"|(?:{_ROOMS})/[\w/]+\.py|(?:[a-z_]+/)*test_\w+\.py)(?:::?(?P<name>[\w.]+))?"
)
_MODULES = re.compile(r"(?<![\w/.])kinject((?:\.[a-z_]\w*)+)")


def _absent_files(text: str) -> list[str]:
    """Return the tests, benchmarks and source files, or names in them, that `text` mentions and that do not exist."""
    absent = []
    for match in _FILES.finditer(text):
        path, names = match["path"], re.findall(r"\w+", match["name"] or "")
        candidates = [ROOT / path, ROOT / "src" / "kinject" / path, *ROOT.glob(f"tests/**/{path}")]
        sources = [
            file.read_text("utf-8") if file.is_file() else ""
            for file in candidates
            if file.exists()
        ]
        if not any(all(re.search(rf"\b{name}\b", source) for name in names) for source in sources):
            absent.append(match[0])
    return absent


def _absent_modules(text: str) -> list[str]:
    """Return the dotted names below ``kinject`` in `text` that are neither a module nor a name in one."""
    absent = []
    for match in _MODULES.finditer(text):
        folder, *rest = ROOT / "src" / "kinject", *match[1][1:].split(".")
        while rest and (folder / rest[0]).is_dir():
            folder /= rest.pop(0)
        module = folder / "__init__.py"
        if rest and (folder / f"{rest[0]}.py").exists():
            module = folder / f"{rest.pop(0)}.py"
        if rest and not re.search(rf"\b{rest[0]}\b", module.read_text("utf-8")):
            absent.append(match[0])
    return absent


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_module_and_test_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    assert _absent_files(text) + _absent_modules(text) == []


def test_the_guide_to_the_report_names_its_sections_and_columns() -> None:
    page = (ROOT / "docs" / "reports.md").read_text("utf-8")
    source = (ROOT / "src" / "kinject" / "report" / "files.py").read_text("utf-8")
    titles = set(re.findall(r'yield \(?\s*f?"([A-Z][^"{:]+)', source))
    assert len(titles) > 10
    assert [title for title in titles if title not in page] == []
    assert [
        column for column in _COLUMNS if not re.search(rf"^\| .*{column}.* \|", page, re.MULTILINE)
    ] == []


def test_lines_of_markdown_end_at_120_characters() -> None:
    """Tables and lines with a link may be longer."""
    names = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    too_long = [
        f"{name}:{number}"
        for name in names.split()
        for number, line in enumerate((ROOT / name).read_text("utf-8").splitlines(), 1)
        if len(line) > 120
        and not line.lstrip().startswith("|")
        and "](" not in line
        and "://" not in line
    ]
    assert too_long == []


def test_the_readmes_table_is_that_of_the_example_report() -> None:
    text = (ROOT / "README.md").read_text("utf-8").partition("## The demo")[2]
    rows = re.findall(
        r"^\| [^|]*(?:base|repeated|paraphrases)[^|]* \| (.*) \|$", text, re.MULTILINE
    )
    numbers = [float(number) for row in rows[:4] for number in re.findall(r"[01]\.\d{3}", row)]
    assert len(numbers) == 20
    report = (ROOT / "docs/example-report.html").read_text("utf-8")
    assert [
        number
        for number in numbers
        if not {f"{100 * number:.1f}", f"{number:.3f}"} & set(_figures(report))
    ] == []
    assert report.count("<img") + report.count("<svg") > 0
    assert len(report) < 3e6


def _figures(html: str) -> list[str]:
    return re.findall(r"\d+\.\d+", html)


def test_the_times_of_the_first_hour_agree() -> None:
    times = re.findall(
        r"^\| (?:`| *60).* \| (two|five) minutes \|$",
        (ROOT / "docs/figures.md").read_text("utf-8"),
        re.MULTILINE,
    )
    assert times == ["two", "two", "five"]
    for name, text in {
        "README.md": "two minutes; or", "docs/quickstart.md": "two minutes, then the whole job, two more",
        "docs/index.md": "in four minutes", "src/kinject/demo.py": "two minutes on", "src/kinject/cli/__init__.py": "2 minutes",
        "src/kinject/cli/verbs.toml": "two minutes on 2 CPU cores", "src/kinject/augment/survey.py": "about five minutes",
    }.items():  # fmt: skip
        assert text in (ROOT / name).read_text("utf-8"), name


def test_the_readme_stays_short() -> None:
    assert (ROOT / "README.md").read_text("utf-8").count("\n") <= 140


def test_the_site_has_every_page_and_those_that_are_written_from_the_program() -> None:
    """The links and anchors of pages are checked above; `make docs` and the long proofs build the site."""
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs/site/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    nav = re.search(
        r"^nav:\n(.*?)^\S", (ROOT / "docs/site/mkdocs.yml").read_text("utf-8"), re.M | re.S
    )
    assert nav is not None
    named = set(re.findall(r"[\w-]+\.md", nav[1])) - {"recipes.md", "keys.md"}
    assert [name for name in named if not (ROOT / "docs" / name).is_file()] == []
    pages = {name: "\n".join(getattr(hooks, f"_{name}")()) for name in ("recipes", "keys")}
    assert "\n## qwen3/0.6b-lora\n" in pages["recipes"]
    assert "lr_scheduler_type" in pages["keys"]
    link = hooks.on_page_markdown("[a](../recipes/qwen3/0.6b-lora.yaml) [b](../recipes)")
    assert link == "[a](recipes.md#qwen306b-lora) [b](recipes.md)"


@pytest.mark.soak
def test_the_site_builds_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        "docs/site/mkdocs.yml",
        "-d",
        str(tmp_path),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.stem: page.read_text("utf-8") for page in tmp_path.glob("*.html")}
    assert pages.pop("example-report") == (ROOT / "docs/example-report.html").read_text("utf-8")
    written = {page.stem for page in ROOT.glob("docs/*.md")} | {"recipes", "keys", "404"}
    assert pages.keys() == written
    for name, html in pages.items():
        fetched = re.findall(
            r"<(?:script|img|iframe|link(?! rel=\"canonical\"))[^>]*(?:src|href)=\"(https?:[^\"]*)",
            html,
        )
        assert fetched == [], name
    assert "url(http" not in "".join(css.read_text("utf-8") for css in tmp_path.rglob("*.css"))
    assert "lr_scheduler_type" in pages["keys"]
    assert (
        'href="recipes.html#qwen306b-lora"' in pages["models"]
    )  # a link to the recipe's file in the repository
    assert 'id="qwen306b-lora"' in pages["recipes"]
    assert 'href="keys.html"' in pages["glossary"]
    assert "kinject recipes" in pages["commands"]


def _accuracies(cell: str) -> str:
    return (re.match(r"[\d.]+(?=%)", cell.strip()) or [""])[0]


def test_the_pairs_of_new_and_known_facts_in_methods_and_models_are_those_of_the_findings() -> None:
    """But for one seed on other people, which no study has."""
    findings = (ROOT / "docs" / "findings.md").read_text("utf-8")
    rows = [line.split("|") for line in findings.splitlines() if line.startswith("| ")]
    measured = {(_accuracies(row[2]), _accuracies(row[3])) for row in rows if len(row) > 3}
    measured |= {(_accuracies(row[2]), _accuracies(row[4])) for row in rows if len(row) > 5}
    measured |= {
        (new, known) for new, known in re.findall(r"new ([\d.]+)%, known ([\d.]+)%", findings)
    }
    measured |= {(new, known) for new, known in re.findall(r"full: ([\d.]+)%, ([\d.]+)%", findings)}
    for page in ("methods.md", "models.md"):
        text = (ROOT / "docs" / page).read_text("utf-8")
        named = {pair for line in text.splitlines() if "other people" not in line
                 for pair in re.findall(r"(\d+\.\d) / (\d+\.\d)", line)}  # fmt: skip
        assert named <= measured, page


def test_the_words_on_the_recommended_recipe_are_those_of_the_findings() -> None:
    """Its numbers are rows of the table, and its gain is the one of the findings in methods and the recipe as well."""
    findings = " ".join((ROOT / "docs/findings.md").read_text("utf-8").split())
    best = re.sub(r"\s*\n#\s+", " ", (ROOT / "recipes/sandbox/best.yaml").read_text("utf-8"))
    numbers = re.search(
        r"Against recipes/cpt.yaml recipes/sandbox/best.yaml has (\S+) points of new facts \((.*?), (.*?)\)",
        findings,
    )
    assert numbers is not None
    assert f"has {numbers[1]} points of new facts ({numbers[2]}, {numbers[3]} after Holm)" in best
    methods = " ".join((ROOT / "docs/methods.md").read_text("utf-8").split())
    assert f"against `recipes/cpt.yaml` {numbers[1]} points of new facts, {numbers[3]}" in methods
    pairs = re.findall(r"([\d.]+)% (?:of the new facts, |and )([\d.]+)%", best)
    assert len(pairs) >= 3
    assert [
        pair for pair in pairs if re.search(rf"\| {pair[0]}% [^|]*\| {pair[1]}% ", findings) is None
    ] == []
