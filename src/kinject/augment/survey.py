"""`kinject try`: what kinject makes of a person's documents before any model is asked, and recipes for them."""

from __future__ import annotations

import heapq
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from kinject.augment.checks.facts import checks_off
from kinject.corpus.language import detect_language, guess_language, language_name
from kinject.augment.groups import Group
from kinject.augment.preview import TOKENS_PER_WORD, Preview, preview
from kinject.augment.style_preview import render_prompts
from kinject.augment.styles import STYLES
from kinject.corpus.documents import is_hub_name, survey_documents
from kinject.corpus.passages import split_passages, token_spans, word_spans
from kinject.disk import Row, delete_file, file_name, path_exists, write_jsonl, write_text
from kinject.errors import DiskError, InputError, KinjectError
from kinject.recipe import read_recipe
from kinject.recipe.shipped import write_own_recipes
from kinject.terminal import duration
from kinject.types import Document, Tabular

_SKETCH = 128
"""Word triples that stand for a document: those with the smallest hashes. Two of so many tell likeness to about 4%."""
_ALIKE = 0.8
"""Documents that share more of their word triples (Jaccard similarity) count as copies of each other."""
_COMMON = 50
"""A triple of more documents than this is boilerplate, by which no pairs are looked for."""
_N_PROMPTS = 3
_MOST_SHOWN, _MOST_PLACES, _MOST_LINES = 12, 3, 30
_LANGUAGE_CHARACTERS = 5_000


@dataclass(frozen=True)
class Skipped:
    """What could not be read: the file, and the reason with its place."""

    file: str
    reason: str


@dataclass(frozen=True)
class Survey(Tabular):
    """What `try_documents` found.

    `files` counts the documents of each file that was read. `n_tokens` are the model's if `tokenizer` is given, else an
    estimate. `languages` counts documents by ISO 639-1 code, "" where none is clear; `alike` are (document, document,
    fraction of word triples that they share). `preview` is what augmenting with the recipe would request. `kept` are recipes
    that were there and were not written over.
    """

    path: Path
    files: Mapping[str, int]
    skipped: Sequence[Skipped]
    n_tokens: int
    tokenizer: str | None
    languages: Mapping[str, int]
    alike: Sequence[tuple[str, str, float]]
    preview: Preview
    prompts: Sequence[str]
    documents_path: Path
    prompts_path: Path
    skipped_path: Path | None
    recipes: Sequence[Path]
    kept: Sequence[Path] = ()

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: the documents in it, or why it was skipped."""
        read = [{"file": name, "documents": n, "skipped": ""} for name, n in self.files.items()]
        return read + [{"file": one.file, "documents": 0, "skipped": one.reason} for one in self.skipped]


@dataclass
class _Likeness:
    """Finds documents that are nearly the same, by the word triples with the smallest hashes."""

    names: list[str] = field(default_factory=list)
    _sketches: list[list[int]] = field(default_factory=list)
    _having: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, text: str) -> None:
        """Add a document."""
        words = [text[start:end].lower() for start, end in word_spans(text)]
        triples = {" ".join(words[at : at + 3]) for at in range(max(1, len(words) - 2))}
        sketch = heapq.nsmallest(_SKETCH, {zlib.crc32(triple.encode("utf-8", "surrogatepass")) for triple in triples})
        for value in sketch:
            self._having[value].append(len(self.names))
        self.names.append(name)
        self._sketches.append(sketch)

    def pairs(self) -> list[tuple[str, str, float]]:
        """Return the pairs that are alike, the most alike first."""
        candidates = {
            pair for having in self._having.values() if len(having) <= _COMMON for pair in combinations(having, 2)
        }
        found = []
        for one, other in sorted(candidates):
            first, second = set(self._sketches[one]), set(self._sketches[other])
            union = heapq.nsmallest(_SKETCH, first | second)
            likeness = len(first & second & set(union)) / len(union)
            if likeness >= _ALIKE:
                found.append((self.names[one], self.names[other], likeness))
        return sorted(found, key=lambda pair: -pair[2])


@dataclass
class _Reading:
    """The documents of a folder as they are read, and what is counted of them."""

    tokenizer: str | None
    files: Counter[str] = field(default_factory=Counter)
    skipped: list[Skipped] = field(default_factory=list)
    languages: Counter[str] = field(default_factory=Counter)
    likeness: _Likeness = field(default_factory=_Likeness)
    n_tokens: int = 0
    _first: dict[Path, Document] = field(default_factory=dict)
    _second: list[Document] = field(default_factory=list)

    def read(self, path: Path) -> Iterator[Document]:
        """Yield the documents that can be read."""
        spans = token_spans(self.tokenizer)
        for file, found in survey_documents(path):
            if isinstance(found, KinjectError):
                self.skipped.append(Skipped(str(file), str(found)))
                continue
            self.files[str(file)] += 1
            start = found.text[:_LANGUAGE_CHARACTERS]
            self.languages[detect_language(start) or guess_language(start)] += 1
            self.likeness.add(found.title or found.id, found.text)
            self.n_tokens += len(spans(found.text))
            if len(self._first) < _N_PROMPTS:
                self._first.setdefault(file, found)
            if len(self._second) < _N_PROMPTS:
                self._second.append(found)
            yield found

    def shown(self) -> list[Document]:
        """Return the documents of the sample prompts: the first of each file, then others."""
        first = list(self._first.values())
        return [*first, *(document for document in self._second if document not in first)][:_N_PROMPTS]


def try_documents(path: Path, *, tokenizer: str | None = None, root: Path = Path()) -> Survey:
    """Read the documents at `path`, count, and write into `root`: recipes/NAME/*.yaml, runs/NAME/documents.jsonl, prompts.txt.

    NAME is that of the folder or file. documents.jsonl holds what could be read, and the recipes read that. Recipes that
    are there already stay as they are. No model is asked and nothing is sent. Raises `DiskError` when nothing is at `path`,
    `InputError` when nothing there can be read.
    """
    if not path_exists(path) and not is_hub_name(path):
        raise DiskError(f"{path}: nothing is there. Check the path.")
    name = file_name(path.resolve().stem if path.is_file() else path.resolve().name)
    folder = root / "runs" / name
    reading = _Reading(tokenizer)
    documents_path = folder / "documents.jsonl"
    write_jsonl(documents_path, _rows(path, reading))
    written, kept = write_own_recipes(name, root)
    recipe = read_recipe(root / "recipes" / name / "augment.yaml", verb="augment")
    prompts = [_prompt(document, recipe.augment.passage_tokens, tokenizer) for document in reading.shown()]
    prompts_path, skipped_path = folder / "prompts.txt", folder / "skipped.txt"
    write_text(
        prompts_path, "\n\n".join(f"################ prompt {n}\n{text}" for n, text in enumerate(prompts, 1)) + "\n"
    )
    if reading.skipped:
        write_text(skipped_path, "".join(f"{one.reason}\n" for one in reading.skipped))
    else:
        delete_file(skipped_path)
    return Survey(
        path=path, files=reading.files, skipped=tuple(reading.skipped), tokenizer=tokenizer,
        n_tokens=reading.n_tokens if tokenizer else round(reading.n_tokens * TOKENS_PER_WORD),
        languages=dict(reading.languages.most_common()), alike=tuple(reading.likeness.pairs()), preview=preview(recipe),
        prompts=tuple(prompts), documents_path=documents_path, prompts_path=prompts_path,
        skipped_path=skipped_path if reading.skipped else None, recipes=tuple(written), kept=tuple(kept),
    )  # fmt: skip


def _rows(path: Path, reading: _Reading) -> Iterator[Row]:
    """Yield the rows of documents.jsonl. Raises `InputError` if there is none."""
    for one in reading.read(path):
        yield {"id": one.id, "title": one.title, "text": one.text, "source": one.source}
    if not reading.files:
        reasons = "\n".join(f"  {one.reason}" for one in reading.skipped[:_MOST_SHOWN])
        raise InputError(f"{path}: no document there can be read.\n{reasons}".rstrip())


def _prompt(document: Document, passage_tokens: int, tokenizer: str | None) -> str:
    passage = split_passages(document, passage_tokens, token_spans(tokenizer))[0]
    return render_prompts(Group(document, passage, STYLES["paraphrase"], 1))


def render_survey(survey: Survey) -> str:
    """Return the survey as text."""
    found = survey.preview
    by_suffix = Counter(Path(name).suffix.lower() or "rows" for name in survey.files)
    suffixes = ", ".join(f"{suffix} {n:,}" for suffix, n in by_suffix.most_common())
    rows = [
        ("read", f"{sum(survey.files.values()):,} documents in {len(survey.files):,} files ({suffixes})"),
        ("passages", f"{found.n_passages:,}, the longest of {found.longest:,} words and marks, {found.n_words:,} in all"),
        ("tokens", f"{survey.n_tokens:,} ({_count_note(survey.tokenizer)})"),
        ("languages", ", ".join(f"{_language(code)} {n:,}" for code, n in survey.languages.items())),
        *(
            ("", f"not checked in {language_name(code)}: {', '.join(checks_off(code))}")
            for code in survey.languages if code and checks_off(code)
        ),
        *_listed("near-copies", [f"{a} and {b} ({likeness:.0%})" for a, b, likeness in survey.alike]),
        *_listed("skipped", _by_reason(survey), len(survey.skipped)),
        ("augmenting", f"{found.n_asked:,} rewritings: {found.n_requests:,} requests, about {found.tokens_in:,} tokens in and"),
        ("", f"{found.tokens_out:,} out; cost {found.cost:,.2f} at the prices in the recipe, time {duration(found.seconds)}"),
    ]  # fmt: skip
    lines = [str(survey.path), "", *(f"{name:<12}{text}" for name, text in rows), ""]
    first = survey.prompts[0].splitlines()
    lines += [f"the first of {len(survey.prompts)} sample prompts ({survey.prompts_path} has all):", ""]
    lines += [f"  {line}" for line in first[:_MOST_LINES]] + (["  ..."] if len(first) > _MOST_LINES else [])
    lines += [
        "",
        f"written: {survey.documents_path}, {survey.prompts_path}",
        *(f"         {path}" for path in survey.recipes),
    ]
    lines += [f"kept as it was: {path}" for path in survey.kept]
    recipe = next(path for path in (*survey.recipes, *survey.kept) if path.name == "augment.yaml")
    return "\n".join([*lines, "", f"next: fill in what {recipe} marks with FILL IN, then kinject augment {recipe}"])


def _count_note(tokenizer: str | None) -> str:
    if tokenizer is not None:
        return f"counted by {tokenizer}"
    return f"an estimate: {TOKENS_PER_WORD} for each word or mark; --tokenizer NAME counts"


def _language(code: str) -> str:
    return language_name(code) or "not clear"


def _by_reason(survey: Survey) -> list[str]:
    """Return the reasons, each once, with the places where it holds."""
    places = defaultdict[str, list[str]](list)
    for one in survey.skipped:
        match = re.match(re.escape(one.file) + r"(:\d+)?: ", one.reason)
        reason = one.reason[match.end() :] if match else one.reason
        read = survey.files.get(one.file, 0)
        before = f" ({read} before it {'is' if read == 1 else 'are'} read)" if read else ""
        places[reason].append(f"{one.file}{(match and match[1]) or ''}{before}")
    return [
        f"{', '.join(where[:_MOST_PLACES])}{f' and {len(where) - _MOST_PLACES:,} more' * (len(where) > _MOST_PLACES)}: {reason}"
        for reason, where in places.items()
    ]


def _listed(name: str, texts: Sequence[str], n: int | None = None) -> list[tuple[str, str]]:
    """Return lines of a list under the count `n` (None: of the texts)."""
    if not texts:
        return [(name, "none")]
    rows = [(name, f"{len(texts) if n is None else n:,}"), *(("", f"- {text}") for text in texts[:_MOST_SHOWN])]
    return rows if len(texts) <= _MOST_SHOWN else [*rows, ("", f"- and {len(texts) - _MOST_SHOWN:,} more")]
