"""Documents to four-choice questions: proposed, checked, answered with the passage and without it, split in two sets."""

from kinject.augment.questions.run import make_questions
from kinject.augment.questions.tally import QuestionsResult, render_questions

__all__ = ["QuestionsResult", "make_questions", "render_questions"]
