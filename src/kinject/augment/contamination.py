"""Finds questions of a probe set in the corpus that did not come from the source documents.

A model that read a question with its answer learned the test, not the fact.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.terminal import format_count

# Short questions as runs of words gave 50 false finds of 1,200 in the sandbox.
_WORDS = re.compile(r"[^\W_]+|\?")
"""A question mark counts as a word: a short question is found where it is asked, not in a statement
of its words."""
_BLANK = re.compile(r"_{2,}|\.{4,}|…")
_FEWEST = 5
"""Words that a whole question must have to count; shorter ones occur by chance."""
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Contamination:
    """The ids of the questions that were found, by kind of text (``corpus``, ``sft``).

    `first` holds the first of them as (id, location, words). `n_questions` were searched for.
    `in_sources` counts questions that share an n-gram with the documents themselves: that is
    allowed, and those n-grams are not searched for elsewhere.
    """

    n_questions: int
    in_sources: int
    by_place: Mapping[str, set[str]]
    first: Sequence[tuple[str, str, str]]

    @property
    def n_contaminated(self) -> int:
        """Questions that were found in any text."""
        return len(set().union(*self.by_place.values()))

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "questions": self.n_questions,
            "contaminated": self.n_contaminated,
            "in_sources": self.in_sources,
            "by_place": {kind: len(ids) for kind, ids in self.by_place.items()},
            "first": list(map(list, self.first)),
        }


class ContaminationCheck:
    """Searches texts for word n-grams of the questions in probe sets. Memory holds the probe sets
    and the questions found.

    Add the questions, then the texts of the documents, then check the texts for the model.
    """

    def __init__(self, n_words: int = 13) -> None:
        """A question is found if `n_words` of its words occur in a row, or all of it if it is
        shorter."""
        self._n_words = n_words
        self._questions: dict[str, set[str]] = {}  # n-gram -> ids
        self._by_start: dict[str, list[str]] = {}
        self._in_sources: set[str] = set()
        self._ids: dict[str, set[str]] = {}
        self._first: list[tuple[str, str, str]] = []
        self.n_questions = 0

    def read_questions(self, path: Path) -> None:
        """Add the questions of a file (JSONL in a layout that `kinject eval` detects by itself, or
        MMLU's CSV).

        Raises as `kinject.corpus.questions.read_questions`.
        """
        for question in read_questions(path):
            self.n_questions += 1
            for text in question_texts(question.question, *question.accepted[:1]):
                self._add(question.id, _words(text))

    def _add(self, question_id: str, words: list[str]) -> None:
        length = min(self._n_words, len(words))
        if length < _FEWEST:
            return
        for start in range(len(words) - length + 1):
            ngram = " ".join(words[start : start + length])
            if ngram not in self._questions:
                first_words = " ".join(words[start : start + _FEWEST])
                # By first words, since n-grams are of different lengths: whole questions, where
                # these are short.
                self._by_start.setdefault(first_words, []).append(ngram)
            self._questions.setdefault(ngram, set()).add(question_id)

    def add_source(self, text: str) -> None:
        """Allow the n-grams that occur in a source document."""
        self._in_sources.update(self._find(text))

    def check_row(self, kind: str, path: Path, row: Mapping[str, Any]) -> None:
        """Search a corpus row: its `text`, `prompt` and `completion`, or `messages`."""
        texts = [row[key] for key in ("text", "prompt", "completion") if key in row]
        for text in (*texts, *(message["content"] for message in row.get("messages", ()))):
            self.check(kind, f"{path}: {row['id']}", text)

    def check(self, kind: str, location: str, text: str) -> None:
        """Search a text, and record the questions that are in it under `kind`."""
        for ngram in self._find(text):
            ids = self._ids.setdefault(kind, set())
            if ngram in self._in_sources:
                continue
            for name in sorted(self._questions[ngram] - ids):
                ids.add(name)
                if len(self._first) < _MOST_SHOWN:
                    self._first.append((name, location, ngram))

    def _find(self, text: str) -> Iterator[str]:
        """Yield the n-grams that occur in `text`."""
        if not self._by_start:
            return
        words = _words(text)
        for start in range(len(words) - _FEWEST + 1):
            for ngram in self._by_start.get(" ".join(words[start : start + _FEWEST]), ()):
                if " ".join(words[start : start + ngram.count(" ") + 1]) == ngram:
                    yield ngram

    def result(self) -> Contamination:
        """Return the questions found so far."""
        in_sources = set().union(*(self._questions[ngram] for ngram in self._in_sources))
        return Contamination(self.n_questions, len(in_sources), self._ids, self._first)


def _words(text: str) -> list[str]:
    """Return the words of `text` in lower case, without punctuation."""
    return [word.casefold() for word in _WORDS.findall(text)]


def question_texts(question: str, gold: str = "") -> list[str]:
    """Return the texts of a question that must not be read before it is asked: the question, and
    the answering sentence.

    That sentence is the question with its blank filled, or the beginning of a sentence with the
    answer behind it.
    """
    if _BLANK.search(question):
        return [_BLANK.sub(f" {gold} ", question, count=1)]
    if question.rstrip().endswith("?"):
        return [question]
    return [question, f"{question} {gold}"]


def render_contamination(contamination: Contamination) -> str:
    """Return the number of questions that were searched for, or those that were found, as lines of
    text."""
    if not contamination.n_contaminated:
        return (
            f"no contamination: none of {format_count(contamination.n_questions, 'question')} is "
            "in the corpus"
        )
    kinds = ", ".join(f"{len(ids)} in the {kind}" for kind, ids in contamination.by_place.items())
    lines = [
        f"CONTAMINATION: {contamination.n_contaminated} of "
        f"{format_count(contamination.n_questions, 'question')} "
        f"are outside the documents: {kinds}"
    ]
    for name, location, words in contamination.first[:5]:
        lines.append(f"  {name}  {location}: {words!r}")
    return "\n".join(lines)
