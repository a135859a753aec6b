"""Gold answers of questions that contradict each other, and texts as people read them."""

from __future__ import annotations

import unicodedata

from kinject.types import Question


class GoldIndex:
    """The gold answers of questions read so far, of one file or of several that belong together."""

    def __init__(self) -> None:
        self._seen: dict[str, list[tuple[str, str, str, frozenset[str]]]] = {}

    def conflict(self, question: Question, where: str) -> str:
        """Add `question`, read at `where`; return how its gold contradicts that of an earlier question, "" if it does not.

        Two golds contradict each other if the text is the same and both questions offer both; questions on different
        documents may be different questions.
        """
        if not question.choices:
            return self._open_conflict(question, where)
        gold, choices = plain_text(question.choices[question.answer]), frozenset(map(plain_text, question.choices))
        same = self._seen.setdefault(plain_text(question.question), [])
        for place, document, other, others in same:
            on_others = question.document_id and document and question.document_id != document
            if gold != other and gold in others and other in choices and not on_others:
                return f"answer: {gold!r:.80}, but {other!r:.80} at {place}, where the question is the same. Keep one."
        same.append((where, question.document_id, gold, choices))
        return ""

    def _open_conflict(self, question: Question, where: str) -> str:
        """Return how the accepted texts of an open question contradict an earlier one's: none is accepted in both."""
        accepted = frozenset(plain_text(text).lower() for text in question.answers)
        same = self._seen.setdefault(plain_text(question.question), [])
        for place, document, other, others in same:
            on_others = question.document_id and document and question.document_id != document
            if not on_others and accepted.isdisjoint(others) and (accepted or others):
                found = question.answers[0] if accepted else "no answer"
                return (
                    f"answers: {found!r:.80}, but {other!r:.80} at {place}, where the question is the same. Keep one."
                )
        same.append((where, question.document_id, question.answers[0] if accepted else "no answer", accepted))
        return ""


def plain_text(text: str) -> str:
    """Return `text` as people read it: Unicode composed, runs of white space as one space, no invisible characters."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = "".join(character for character in text if unicodedata.category(character) != "Cf")
    return " ".join(text.split())
