"""Finds questions of a probe set in the corpus that did not come from the source documents.

A model that read a question with its answer learned the test, not the fact.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from kinject.corpus.questions import read_questions
from kinject.terminal import format_count

# Short questions as runs of words gave 50 false finds of 1,200 in the sandbox.
_BLANK = re.compile(r"_{2,}|\.{4,}|…")
_NO_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_MARKS = "\u0300-\u036f\u0591-\u05bd\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
"""Marks within words: vowels of Indian scripts are no letters to `re`, which would part a word at
each."""
_SYLLABLES = "\u0e01-\u0e4e\u0e81-\u0ece\u1000-\u103f\u1780-\u17d3"
"""Thai, Lao, Burmese and Khmer have no spaces between words either."""
_OVER_SYLLABLES = (
    "\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u17b4-\u17d3"
)
"""Their vowels and tones that stand at a letter and are none to `re`."""
_WORDS = re.compile(
    rf"[{_NO_SPACES}]|[{_SYLLABLES}][{_OVER_SYLLABLES}]*"
    rf"|(?:[^\W_{_NO_SPACES}{_SYLLABLES}]|[{_MARKS}])+|\?|{_BLANK.pattern}"
)
"""A kana or Chinese character counts as a word, since no spaces part their words, and so does a
letter of Thai with what stands at it, a question mark or a blank: a short question is found where
it is asked, not in a statement of its words."""
_PER_WORD = ((re.compile(f"[{_NO_SPACES}]"), 1.5), (re.compile(f"[{_SYLLABLES}]"), 3))
"""Letters that count as words, and how many of them a word of other languages is."""
_FEWEST = 5
"""Words that a whole question must have to count; shorter ones occur by chance."""
_MOST_SHOWN = 20
Position = tuple[int, str]
"""Where a document (number, "") or a pair (after all documents, name) is in a whole corpus."""


@dataclass(frozen=True, slots=True)
class Find:
    """The first row of a kind of text in which an n-gram of a question is, with its position."""

    position: Position
    kind: str
    row_id: str
    ngram: str


@dataclass(frozen=True)
class Contamination:
    """The ids of the questions that were found, by kind of text (``corpus``, ``sft``).

    `first` holds the first of them as (id, location, words). `n_questions` were searched for;
    `n_short` others were not: so few words occur by chance. `in_sources` counts questions that
    share an n-gram with the documents themselves: that is allowed, and those n-grams are not
    searched for elsewhere.
    """

    n_questions: int
    in_sources: int
    by_place: Mapping[str, set[str]]
    first: Sequence[tuple[str, str, str]]
    n_short: int = 0

    @property
    def n_contaminated(self) -> int:
        """Questions that were found in any text."""
        return len(set().union(*self.by_place.values()))

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "questions": self.n_questions,
            "too_short": self.n_short,
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
        """A question is found if `n_words` of its words (half as many more kana or Chinese
        characters, three times as many letters of Thai) occur in a row, or all of it if it is
        shorter."""
        self._n_words = n_words
        self._questions: dict[str, set[str]] = {}  # n-gram -> ids
        self._by_start: dict[str, list[str]] = {}
        self.in_sources: set[str] = set()
        self._finds: dict[tuple[str, str], Find] = {}  # by kind and n-gram
        self._paths: dict[str, Path] = {}
        self._texts: dict[str, str] = {}  # id -> question
        self.n_questions = self.n_short = 0

    def read_questions(self, path: Path) -> None:
        """Add the questions of a file (JSONL in a layout that `kinject eval` detects by itself, or
        MMLU's CSV).

        Raises as `kinject.corpus.questions.read_questions`.
        """
        for question in read_questions(path):
            name = question.id
            # Files that number their questions have the same ids for others.
            if self._texts.setdefault(name, question.question) != question.question:
                name = f"{path.name}: {name}"
            texts = question_texts(question.question, question.accepted)
            is_searched = [self._add(name, _words(text)) for text in texts]
            if any(is_searched):
                self.n_questions += 1
            else:
                self.n_short += 1

    def _add(self, question_id: str, words: list[str]) -> bool:
        """Add the n-grams of one text of a question; False if it has too few words."""
        most, fewest = self._n_words, _FEWEST
        for letter, per_word in _PER_WORD:
            if 2 * sum(1 for word in words if letter.match(word)) > len(words):
                most, fewest = int(per_word * most), int(per_word * fewest)
        length = min(most, len(words))
        if length < fewest:
            return False
        for start in range(len(words) - length + 1):
            ngram = " ".join(words[start : start + length])
            if ngram not in self._questions:
                first_words = " ".join(words[start : start + _FEWEST])
                # By first words, since n-grams are of different lengths: whole questions, where
                # these are short.
                self._by_start.setdefault(first_words, []).append(ngram)
            self._questions.setdefault(ngram, set()).add(question_id)
        return True

    def add_source(self, text: str) -> None:
        """Allow the n-grams that occur in a source document."""
        self.in_sources.update(self._find(text))

    def check_row(
        self, kind: str, path: Path, row: Mapping[str, Any], position: Position = (0, "")
    ) -> None:
        """Search a corpus row: its `text`, `prompt` and `completion`, or `messages`."""
        self._paths[kind] = path
        texts = [row[key] for key in ("text", "prompt", "completion") if key in row]
        texts += [message["content"] or "" for message in row.get("messages", ())]
        # As one text: a sentence may begin in the prompt and end in the completion.
        for ngram in self._find(" ".join(texts)):
            self.add_find(Find(position, kind, row["id"], ngram))

    def add_find(self, find: Find) -> None:
        """Record an n-gram in a row; of those in several rows of a kind the first counts."""
        self._finds.setdefault((find.kind, find.ngram), find)

    @property
    def finds(self) -> list[Find]:
        """The first row of each n-gram in each kind of text, in the order in which they came."""
        return list(self._finds.values())

    def add_shards(
        self, paths: Mapping[str, Path], in_sources: Iterable[str], finds: Iterable[Find]
    ) -> None:
        """Add what the checks of all shards have: n-grams of their documents, finds in their rows.

        `paths` are the files of the whole corpus by kind of text.
        """
        self._paths.update(paths)
        self.in_sources.update(in_sources)
        # In the order of one process: of a question in many rows, the first is named.
        for find in sorted(finds, key=attrgetter("position")):
            self.add_find(find)

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
        in_sources = set().union(*(self._questions[ngram] for ngram in self.in_sources))
        by_place, first = dict[str, set[str]](), list[tuple[str, str, str]]()
        for find in self._finds.values():
            ids = by_place.setdefault(find.kind, set())
            if find.ngram in self.in_sources:
                continue
            for name in sorted(self._questions[find.ngram] - ids):
                ids.add(name)
                if len(first) < _MOST_SHOWN:
                    first.append((name, f"{self._paths[find.kind]}: {find.row_id}", find.ngram))
        return Contamination(self.n_questions, len(in_sources), by_place, first, self.n_short)


def _words(text: str) -> list[str]:
    """Return the words of `text` in lower case, without punctuation."""
    # One form of a letter with its accent, and of the question mark.
    text = unicodedata.normalize("NFC", text).replace("？", "?").replace("؟", "?")
    # A blank is one word, however long it is.
    return [_BLANK.sub("_", word).casefold() for word in _WORDS.findall(text)]


def question_texts(question: str, golds: Iterable[str] = ()) -> list[str]:
    """Return the texts of a question that must not be read before it is asked: the question, and
    the answering sentences.

    Such a sentence is the question with its blank filled by one of `golds`, or the beginning of a
    sentence with the answer behind it.
    """
    texts = [question]
    if _BLANK.search(question):
        for gold in golds:
            filled = f" {gold} ".join(_BLANK.split(question, maxsplit=1))
            texts.append(filled)
    elif not question.rstrip().endswith("?"):
        texts += [f"{question} {gold}" for gold in golds]
    return texts


def render_contamination(contamination: Contamination) -> str:
    """Return the number of questions that were searched for, or those that were found, as lines of
    text."""
    too_short = ""
    if contamination.n_short:
        too_short = f"; too short to be searched for: {contamination.n_short:,} more"
    if not contamination.n_contaminated:
        return (
            f"no contamination: none of {format_count(contamination.n_questions, 'question')} is "
            f"in the corpus{too_short}"
        )
    kinds = ", ".join(f"{len(ids)} in the {kind}" for kind, ids in contamination.by_place.items())
    lines = [
        f"CONTAMINATION: {contamination.n_contaminated} of "
        f"{format_count(contamination.n_questions, 'question')} are outside the documents: "
        f"{kinds}{too_short}"
    ]
    for name, location, words in contamination.first[:5]:
        lines.append(f"  {name}  {location}: {words!r}")
    return "\n".join(lines)
