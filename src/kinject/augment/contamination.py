"""Whether questions of a probe set stand in prompts or corpus by another path than the source documents.

A model that has read a question with its answer was not taught the fact but the test.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kinject.augment.plan import Plan
from kinject.augment.styles import STYLES
from kinject.corpus.documents import read_documents
from kinject.corpus.question_layouts import read_rows
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.recipe import AugmentSection

_WORDS = re.compile(r"[^\W_]+")
_BLANK = re.compile(r"_{2,}|\.{4,}|…")
_FEWEST = 4
"""Words that a whole question must have to count; a shorter one stands everywhere by chance."""
_SURE = 8
"""Words from which a whole question is no chance; of a shorter one a statement may hold the words ("who works for X")."""
_ASKED = re.compile(r"""\A["'”’»)*\s]*(?:\?|\Z)|\A[ \t]*\n""")
"""What stands behind the words of a question that is asked: its mark, or the end of the line."""
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Leak:
    """One leaked question: `where` it stands, with the words that it shares."""

    question_id: str
    where: str
    words: str


@dataclass
class Leaks:
    """What was found: of `n_questions` asked about, ids by place (``prompts``, ``corpus``, ``sft``), and the first few.

    `in_sources` counts questions of which some words in a row stand in the documents themselves: that path is allowed,
    and those words are not looked for elsewhere.
    """

    n_questions: int
    in_sources: int
    found: dict[str, set[str]] = field(default_factory=dict)
    first: list[Leak] = field(default_factory=list)

    @property
    def n_leaked(self) -> int:
        """Questions that stand somewhere they must not."""
        return len(set().union(*self.found.values()))

    def counts(self) -> dict[str, object]:
        """Return what goes into a manifest."""
        return {
            "questions": self.n_questions,
            "leaked": self.n_leaked,
            "by_place": {place: len(ids) for place, ids in self.found.items()},
            "in_sources": self.in_sources,
            "first": [[leak.question_id, leak.where, leak.words] for leak in self.first],
        }


class Probes:
    """The questions of probe sets as runs of words to look for."""

    def __init__(self, n_words: int) -> None:
        """A question leaks where `n_words` words of it stand in a row, or all of it where it is shorter."""
        self._n_words = n_words
        self._runs: dict[str, set[str]] = {}
        self._by_start: dict[str, list[str]] = {}
        self._must_ask: set[str] = set()
        self.n_questions = 0

    def read(self, path: Path) -> None:
        """Add the questions of a file (JSONL of any layout that `kinject eval` tells by itself, or MMLU's CSV).

        Raises `DiskError`, and `InputError` (file:line) on one that is none.
        """
        for number, row in read_rows(path):
            question, choices, answer = row.get("question"), row.get("choices"), row.get("answer")
            known = isinstance(choices, list) and isinstance(answer, int) and 0 <= answer < len(choices)
            if not isinstance(question, str) or not known:
                raise InputError(f"{path}:{number}: expected question, choices and answer (its index).")
            assert isinstance(choices, list)
            assert isinstance(answer, int)
            self.n_questions += 1
            self._add(str(row.get("id", f"{path}:{number}")), question, str(choices[answer]))

    def _add(self, identity: str, question: str, gold: str) -> None:
        for text in probe_texts(question, gold):
            words = words_of(text)
            if len(words) < _FEWEST:
                continue
            length = min(self._n_words, len(words))
            for start in range(len(words) - length + 1):
                run = " ".join(words[start : start + length])
                if run not in self._runs:
                    self._by_start.setdefault(" ".join(words[start : start + _FEWEST]), []).append(run)
                self._runs.setdefault(run, set()).add(identity)
                if text == question and text.rstrip().endswith("?") and len(words) < min(_SURE, self._n_words):
                    self._must_ask.add(run)

    def runs_in(self, text: str) -> Iterator[str]:
        """Yield the runs of words that stand in `text`, those of short questions only where they are asked."""
        found = [(match[0].casefold(), match.end()) for match in _WORDS.finditer(text)]
        words = [word for word, _ in found]
        for start in range(len(words) - _FEWEST + 1):
            for run in self._by_start.get(" ".join(words[start : start + _FEWEST]), ()):
                end = start + run.count(" ") + 1
                if " ".join(words[start:end]) != run:
                    continue
                if run not in self._must_ask or _ASKED.search(text[found[end - 1][1] :][:100]):
                    yield run

    def ids_of(self, run: str) -> set[str]:
        """Return the ids of the questions that hold a run."""
        return self._runs.get(run, set())

    def allow(self, texts: Iterable[str]) -> int:
        """Look no longer for runs that stand in `texts`; return of how many questions they were."""
        allowed = {run for text in texts for run in self.runs_in(text)}
        questions = set().union(*(self._runs.pop(run) for run in allowed)) if allowed else set()
        return len(questions)


def words_of(text: str) -> list[str]:
    """Return the words of `text` in lower case, without punctuation."""
    return [word.casefold() for word in _WORDS.findall(text)]


def probe_texts(question: str, gold: str) -> list[str]:
    """Return what of a question must not be read before it is asked: the question, and the sentence that answers it.

    That is the question with its blank filled; or, where it is no question but the beginning of a sentence, with the
    answer behind it; or an answer that is a sentence itself.
    """
    texts = [question]
    if _BLANK.search(question):
        texts = [_BLANK.sub(f" {gold} ", question, count=1)]
    elif not question.rstrip().endswith("?"):
        texts.append(f"{question} {gold}")
    if len(words_of(gold)) >= 2 * _FEWEST:
        texts.append(gold)
    return texts


def find_leaks(probes: Probes, sources: Iterable[str], places: Mapping[str, Iterable[tuple[str, str]]]) -> Leaks:
    """Return which questions stand in `places`: name -> (where exactly, text); `sources` are the documents' texts.

    Memory holds the probe set, whatever the size of the corpus.
    """
    leaks = Leaks(probes.n_questions, probes.allow(sources))
    for place, texts in places.items():
        for where, text in texts:
            for run in probes.runs_in(text):
                for identity in sorted(probes.ids_of(run) - leaks.found.get(place, set())):
                    leaks.found.setdefault(place, set()).add(identity)
                    if len(leaks.first) < _MOST_SHOWN:
                        leaks.first.append(Leak(identity, where, run))
    return leaks


def texts_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file: id, text) for each row of a corpus (`text`, `messages`, or `prompt` and `completion`)."""
    for _, row in read_jsonl(path):
        where = f"{path}: {row.get('id', '')}"
        messages: Sequence[Mapping[str, str]] = row.get("messages") or ()
        for message in messages:
            yield where, message["content"]
        for key in ("text", "prompt", "completion"):
            if isinstance(row.get(key), str):
                yield where, row[key]


def check_run(section: AugmentSection, plan: Plan, files: Mapping[str, Path]) -> Leaks | None:
    """Return what leaked into a run's prompts and `files` (place -> corpus), None where the recipe names no probe set.

    Raises as `Probes.read` and `read_documents`.
    """
    if not section.contamination_check:
        return None
    probes = Probes(section.contamination_ngram)
    for path in section.contamination_check:
        probes.read(Path(path))
    sources = (document.text for document in read_documents(plan.documents_path))
    places: dict[str, Iterable[tuple[str, str]]] = {"prompts": _prompts(plan)}
    return find_leaks(probes, sources, places | {place: texts_in(path) for place, path in files.items()})


def _prompts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (style, text) of everything that is asked but for titles and passages, which are the documents' own."""
    for name, n_samples in plan.styles.items():
        style = STYLES[name]
        for sample in range(n_samples):
            for message in style.messages("", "", sample):
                yield name, message["content"]
        yield from ((name, text) for text in (style.prepare, style.verify) if text)


def render_leaks(leaks: Leaks) -> str:
    """Return what to tell a person: the number of questions that were looked for, or what leaked."""
    if not leaks.n_leaked:
        sources = f", but {leaks.in_sources:,} share words with the documents themselves" if leaks.in_sources else ""
        return f"no leak: none of {leaks.n_questions:,} questions stands in prompts or corpus{sources}"
    places = ", ".join(f"{len(ids)} in the {place}" for place, ids in leaks.found.items())
    lines = [f"LEAK: {leaks.n_leaked} of {leaks.n_questions} questions stand outside the documents: {places}"]
    lines += [f"  {leak.question_id}  {leak.where}: {leak.words!r}" for leak in leaks.first[:5]]
    return "\n".join(lines)
