"""Finds questions of the same text whose gold answers contradict each other."""

from __future__ import annotations

from collections.abc import Iterable

from kinject.corpus.grading import plain_text
from kinject.errors import InputError
from kinject.types import Question

_Gold = tuple[str, str, frozenset[str]]
"""The place of a question, its gold answer, and all that it offers."""


class GoldIndex:
    """The gold answers of questions read so far, of one file or of several that belong together."""

    def __init__(self) -> None:
        self._by_text: dict[str, dict[str, list[_Gold]]] = {}

    def add(self, question: Question, location: str) -> None:
        """Add `question`, read at `location`. Raises `InputError` if its gold contradicts that of
        an earlier question.

        Two golds contradict each other if the text is the same and both questions offer both (of
        open questions: if none is accepted in both); questions on different documents may be
        different questions.
        """
        is_open = not question.choices
        if is_open:
            key, gold = "answers", (*question.answers, "no answer")[0]
            offered = frozenset(plain_text(text.lower()) for text in question.answers)
        else:
            key, gold = "answer", plain_text(question.choices[question.answer])
            offered = frozenset(map(plain_text, question.choices))
        # By document: a form with one question on each of 100,000 documents is no square of them.
        same = self._by_text.setdefault(plain_text(question.question), {})
        documents: Iterable[str] = same
        if question.document_id:
            documents = ("", question.document_id)
        alike: list[_Gold] = []
        for document in documents:
            alike += same.get(document, ())
        for earlier, other, others in alike:
            differs = gold != other and gold in others and other in offered
            if is_open:
                differs = offered.isdisjoint(others) and bool(offered or others)
            if differs:
                raise InputError(
                    f"{key}: {gold!r:.80}, but {other!r:.80} at {earlier}, "
                    "where the question is the same. Keep one."
                )
        same.setdefault(question.document_id, []).append((location, gold, offered))
