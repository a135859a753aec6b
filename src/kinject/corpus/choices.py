"""Choices that give nothing away: wrong ones taken from right ones, and the measure of what a set's
choices give away.

A model that has read the documents recognises their strings. If only the right choices stand in the
documents, it chooses right without knowing anything. So the answers of four questions of one kind
become the choices of all four: each is right once and wrong three times, and no preference among
them, for known strings, long ones or frequent ones, is right more than once in four.
"""

from __future__ import annotations

import math
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kinject.corpus.passages import UNSPACED
from kinject.disk import Row
from kinject.language.spelling import MARKS
from kinject.results import Shortcuts
from kinject.terminal import format_count
from kinject.types import Question

N_CHOICES = 4
_SEED = 0
_ASCII_WORD = re.compile(r"\w+")
_WORD = re.compile(rf"[{UNSPACED}]|(?:(?![{UNSPACED}])[\w{MARKS}])+")
"""A letter of a script without spaces is a word: a whole clause as one holds no answer."""
_NUMBER = re.compile(r"\d[\d.,:/]*")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a question, as a choice: `kind` names what may be a wrong choice for it.

    `accepted` are all texts that answer the question, none of which may be a wrong choice of it;
    `context` is text whose values would be doubtful as wrong choices, for example the question
    itself and the sentence with its answer.
    """

    text: str
    kind: Hashable
    accepted: tuple[str, ...] = ()
    context: str = ""


def shape_of(text: str) -> str:
    """Return the kind of an answer by its form: its words with numbers as ``#``, or how many
    capitalised and plain words it has.

    ``43 euros`` gives ``# euros``, ``Rufus Hestett`` gives ``Aa Aa``, ``a goose`` gives ``2
    words``.
    """
    if _NUMBER.search(text):
        return _NUMBER.sub("#", text.lower())
    words = text.split()
    if words and all(word[0].isupper() for word in words):
        return " ".join(["Aa"] * len(words))
    return format_count(len(words), "word")


def shared_choices(answers: Sequence[Answer], seed: int) -> list[tuple[str, ...] | None]:
    """Return for each of `answers` four choices, its own among them; None where too few others are
    of its kind.
    """
    return choices_of(grouped(answers, seed), answers, seed)


def grouped(answers: Sequence[Answer], seed: int) -> list[list[int]]:
    """Return groups of answers, by number, that are each other's wrong choices.

    Answers of one kind are grouped by four, numbers with the nearest ones; a rest joins the last
    group.
    """
    of_kind: dict[Hashable, list[int]] = defaultdict(list)
    for index, answer in enumerate(answers):
        of_kind[answer.kind].append(index)
    rng = random.Random(seed)
    groups: list[list[int]] = []
    # By repr, since kinds may be of types that do not compare.
    for kind in sorted(of_kind, key=repr):
        groups += _groups(of_kind[kind], answers, rng)
    return groups


def choices_of(
    groups: Sequence[Sequence[int]], answers: Sequence[Answer], seed: int
) -> list[tuple[str, ...] | None]:
    """Return the choices of each of `answers` in its group; None for one in no group.

    A group of four has the same choices; in a larger one each answer takes the next three. So each
    text is right as often as it is wrong three times. The right one stands at each position equally
    often.
    """
    choices: list[tuple[str, ...] | None] = [None] * len(answers)
    positions = _Positions(random.Random(seed))
    for group in groups:
        for place, index in enumerate(group):
            following = [group[(place + step) % len(group)] for step in range(1, N_CHOICES)]
            wrong = [answers[other].text for other in following]
            choices[index] = positions.place(answers[index].text, wrong)
    return choices


def with_shared_choices(
    rows: Sequence[Row], contexts: Sequence[str], kinds: Sequence[Hashable] = ()
) -> list[Row]:
    """Return rows of questions with answers to others as wrong choices, where enough are of a kind.

    The others keep the choices that they have. `contexts` are texts whose values may answer each
    question, too. Without `kinds` the form of an answer (`shape_of`) is its kind.
    """
    answers = []
    for index, (row, context) in enumerate(zip(rows, contexts, strict=True)):
        right = row["choices"][row["answer"]]
        accepted = (right, *row.get("answers", ()))
        kind = kinds[index] if kinds else shape_of(right)
        answers.append(Answer(right, kind, accepted, f"{row['question']} {context}"))
    shared = []
    for row, answer, choices in zip(rows, answers, shared_choices(answers, _SEED), strict=True):
        if choices is not None:
            row = {**row, "choices": list(choices), "answer": choices.index(answer.text)}
        shared.append(row)
    return shared


class _Positions:
    """Deals out the position of the right choice: each once before any comes again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._left: list[int] = []

    def place(self, right: str, wrong: Sequence[str]) -> tuple[str, ...]:
        if not self._left:
            self._left = list(range(N_CHOICES))
            self._rng.shuffle(self._left)
        shuffled = list(wrong)
        self._rng.shuffle(shuffled)
        shuffled.insert(self._left.pop(), right)
        return tuple(shuffled)


def _groups(
    indices: Sequence[int], answers: Sequence[Answer], rng: random.Random
) -> list[list[int]]:
    """Return groups of four answers that can be each other's wrong choices, the last of up to
    seven; the rest is left out."""
    waiting = list(indices)
    rng.shuffle(waiting)
    magnitudes = {index: _magnitude(answers[index].text) for index in waiting}
    waiting.sort(key=magnitudes.__getitem__)  # stable: texts without a number stay shuffled
    groups: list[list[int]] = []
    while len(waiting) >= N_CHOICES:
        group = _first_group(waiting, answers)
        if not group:
            break
        groups.append(group)
        waiting = [index for index in waiting if index not in group]
    for index in waiting:
        home = next((group for group in reversed(groups) if fits(index, group, answers)), None)
        if home is not None and len(home) < 2 * N_CHOICES - 1:
            home.append(index)
    return groups


def _first_group(waiting: Sequence[int], answers: Sequence[Answer]) -> list[int]:
    """Return four answers that fit one another, beginning with one of the most frequent texts; []
    if no four do.

    Frequent texts come first: left for last, only equal ones would remain.
    """
    frequency = Counter(word_form(answers[index].text) for index in waiting)
    most = max(frequency.values())
    starts = [
        place
        for place, index in enumerate(waiting)
        if frequency[word_form(answers[index].text)] == most
    ]
    for start in starts:
        group = [waiting[start]]
        # The nearest in magnitude are the nearest in the list.
        for place in _by_distance(start, len(waiting)):
            if len(group) < N_CHOICES and fits(waiting[place], group, answers):
                group.append(waiting[place])
        if len(group) == N_CHOICES:
            return group
    return []


def _by_distance(start: int, n: int) -> list[int]:
    """Return the places from 0 to `n` - 1, those nearest to `start` first."""
    distances = {place: abs(place - start) for place in range(n)}
    return sorted(distances, key=distances.__getitem__)


def fits(index: int, group: Iterable[int], answers: Sequence[Answer]) -> bool:
    """Return whether an answer can be a wrong choice of each of the group, and each of these one of
    its own."""
    return all(
        _is_wrong(answers[index], answers[of]) and _is_wrong(answers[of], answers[index])
        for of in group
    )


def _is_wrong(other: Answer, answer: Answer) -> bool:
    """Return whether the text of `other` is surely no answer to the question of `answer`."""
    text = word_form(other.text)
    accepted = {word_form(accepted) for accepted in (answer.text, *answer.accepted)}
    # As whole words: a 3 is not in 35.
    return text not in accepted and f" {text} " not in f" {word_form(answer.context)} "


def _magnitude(text: str) -> float:
    """Return the logarithm of the first number in a text; 0 without one."""
    match = _NUMBER.search(text)
    if match is None:
        return 0.0
    digits = re.sub(r"[^\d.]", "", match[0].replace(":", "."))
    try:
        return math.log1p(float(digits))
    except ValueError:
        return 0.0


def word_form(text: str) -> str:
    """Return the words of a text in lower case, as one string; where a script has no spaces its
    letters."""
    return " ".join(_words(text))


def _words(text: str) -> list[str]:
    text = text.lower()
    if text.isascii():
        return _ASCII_WORD.findall(text)
    return _WORD.findall(unicodedata.normalize("NFC", text))


def measure_shortcuts(
    sets: Mapping[str, Sequence[Question]], texts: Iterable[str]
) -> list[Shortcuts]:
    """Return what the choices of each set of questions give away, with `texts` as the documents,
    which are read once; nothing of a set without choices."""
    asked_of: dict[str, list[Question]] = {}
    lengths: dict[str, int] = {}
    for name, questions in sets.items():
        asked_of[name] = [question for question in questions if question.choices]
        for question in asked_of[name]:
            lengths |= {choice: len(choice) for choice in question.choices}
    # Without choices the documents need not be read.
    if not lengths:
        return []
    mentions = count_mentions(lengths, texts)
    return [_shortcuts(name, asked, mentions, lengths) for name, asked in asked_of.items() if asked]


def _shortcuts(
    question_set: str,
    asked: Sequence[Question],
    mentions: Mapping[str, int],
    lengths: Mapping[str, int],
) -> Shortcuts:
    """Return what the choices give away; `mentions` and `lengths` are those of each choice."""
    right = [mentions[question.choices[question.answer]] > 0 for question in asked]
    wrong: list[bool] = []
    for question in asked:
        others = [choice for i, choice in enumerate(question.choices) if i != question.answer]
        wrong += [mentions[choice] > 0 for choice in others]
    return Shortcuts(
        question_set=question_set,
        n=len(asked),
        right_known=sum(right) / len(right),
        wrong_known=sum(wrong) / len(wrong),
        picker=_accuracy(asked, {choice: float(n > 0) for choice, n in mentions.items()}),
        most_frequent=_accuracy(asked, mentions),
        longest=_accuracy(asked, lengths),
        shortest=_accuracy(asked, {choice: -n for choice, n in lengths.items()}),
        guessing=sum(1 / len(question.choices) for question in asked) / len(asked),
    )


def _accuracy(questions: Sequence[Question], values_of: Mapping[str, float]) -> float:
    """Return the expected accuracy of picking the choice of the highest value, any of equal
    ones."""
    total = 0.0
    for question in questions:
        values = [values_of.get(choice, 0.0) for choice in question.choices]
        best = max(values)
        if values[question.answer] == best:
            total += 1 / values.count(best)
    return total / len(questions)


def count_mentions(phrases: Iterable[str], texts: Iterable[str]) -> Mapping[str, int]:
    """Return how often each of `phrases` stands in `texts`, as whole words, whatever their case.

    One pass over the texts: of each position the runs of words as long as some phrase are looked
    up.
    """
    by_words: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for phrase in phrases:
        phrase_words = tuple(_words(phrase))
        if phrase_words:
            by_words[phrase_words].append(phrase)
    lengths = sorted({len(words) for words in by_words})
    counts: Counter[str] = Counter()
    for text in texts:
        words = _words(text)
        for length in lengths:
            for start in range(len(words) - length + 1):
                run = tuple(words[start : start + length])
                counts.update(by_words.get(run, ()))
    return counts
