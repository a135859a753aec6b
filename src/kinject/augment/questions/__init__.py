"""Documents to four-choice questions: proposed, checked, answered with the passage and without it, split in two sets."""

from kinject.augment.questions.run import QuestionsResult, make_questions, render_questions

__all__ = ["QuestionsResult", "make_questions", "render_questions"]
