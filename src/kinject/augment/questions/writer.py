"""Writes the questions of one passage: propose them, verify them with the passage, ask them without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kinject.augment.checks.checker import check_completion
from kinject.augment.checks.prompt_injection import has_injection, split_injection
from kinject.augment.questions import prompts
from kinject.augment.questions.drafts import (
    Candidate,
    Draft,
    find_fault,
    parse_letter,
    parse_specificity,
    read_drafts,
)
from kinject.augment.requests.sender import Sender, gather_answers
from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.recipe import QuestionsSection
from kinject.types import Completion, Document, Message, Passage

_Request = tuple[list[Message], int]


@dataclass
class Outcome:
    """The questions of one passage: candidates, the most specific first, and refused drafts as (draft, reason, detail)."""

    candidates: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Draft | None, str, str]] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True)
class QuestionWriter:
    """Writes questions with the model behind `sender`. `seed` is the recipe's."""

    sender: Sender
    section: QuestionsSection
    seed: int

    async def write(self, document: Document, passage: Passage) -> Outcome:
        """Return the questions on a passage. While they are too few, the model is asked again, for other facts.

        Raises `EndpointError` for a request without an answer, and `Stopped` at the end of the run.
        """
        outcome = Outcome()
        for attempt in range(self.section.max_attempts):
            if len(outcome.candidates) >= self.section.n_questions:
                break
            drafts = await self._propose(document, passage, attempt, outcome)
            verified = await self._verify(document, passage, drafts, outcome)
            outcome.candidates += await self._ask_without_passage(verified, outcome)
            outcome.candidates.sort(key=lambda candidate: -candidate.specificity)  # stable: ties in order of proposal
        return outcome

    async def _propose(self, document: Document, passage: Passage, attempt: int, outcome: Outcome) -> list[Draft]:
        """Return the proposed drafts that `find_fault` accepts."""
        known = [candidate.draft for candidate in outcome.candidates]
        known += [draft for draft, reason, _ in outcome.refused if draft and reason == "closed-book"]
        earlier = [draft.question for draft in known]
        messages = prompts.propose(document.title, passage.text, self.section.n_proposed, earlier)
        (completion,) = await self._send([(messages, self._seed_of(messages, attempt))], outcome)
        verdict = check_completion(completion)
        drafts = read_drafts(completion.text) if verdict.accepted else []
        if not drafts:
            outcome.refused.append((None, "no answer", verdict.detail or completion.text[:80]))
        kept: list[Draft] = []
        for draft in drafts[: self.section.n_proposed]:
            reason, detail = find_fault(draft, split_injection(passage.text)[0], [*known, *kept])
            if reason:
                outcome.refused.append((draft, reason, detail))
            else:
                kept.append(draft)
        return kept

    async def _verify(
        self, document: Document, passage: Passage, drafts: Sequence[Draft], outcome: Outcome
    ) -> list[Candidate]:
        """Return the drafts for which the model, given the passage, chooses the correct answer."""
        # Prompt injection may name a letter. With the choices in two orders, it is correct in one of them at most.
        rotations = (0, 1) if has_injection(passage.text, *(draft.question for draft in drafts)) else (0,)
        replies = [await self._answers_with_passage(document, passage, drafts, by, outcome) for by in rotations]
        verified: list[Candidate] = []
        for draft, *answers in zip(drafts, *replies, strict=True):
            correct = [prompts.LETTERS[_rotate(draft.choices, by).index(draft.answer)] for by in rotations]
            if list(map(parse_letter, answers)) == correct:
                verified.append(Candidate(draft, min(map(parse_specificity, answers))))
            else:
                outcome.refused.append((draft, "not verified", f"the model answers {answers[-1][:60]!r}"))
        return verified

    async def _answers_with_passage(
        self, document: Document, passage: Passage, drafts: Sequence[Draft], rotation: int, outcome: Outcome
    ) -> list[str]:
        """Return the model's answers, given the passage and the choices rotated; "" for an incomplete answer."""
        requests: list[_Request] = []
        for draft in drafts:
            choices = _rotate(draft.choices, rotation)
            messages = prompts.verify(document.title, passage.text, draft.question, choices)
            requests.append((messages, self._seed_of(messages, 0)))
        answers = await self._send(requests, outcome)
        return [answer.text.strip() if check_completion(answer).accepted else "" for answer in answers]

    async def _ask_without_passage(self, candidates: Sequence[Candidate], outcome: Outcome) -> list[Candidate]:
        """Return the candidates that the model does not answer correctly every time without the passage.

        The choices are rotated each time, so a preference for one letter is correct one time in four at most.
        """
        n_times = self.section.closed_book
        requests: list[_Request] = []
        correct: list[str] = []
        for candidate in candidates:
            for rotation in range(n_times):
                choices = _rotate(candidate.draft.choices, rotation + 1)
                messages = prompts.closed_book(candidate.draft.question, choices)
                requests.append((messages, self._seed_of(messages, rotation)))
                correct.append(prompts.LETTERS[choices.index(candidate.draft.answer)])
        answers = await self._send(requests, outcome)
        hits = [parse_letter(answer.text) == letter for answer, letter in zip(answers, correct, strict=True)]
        kept: list[Candidate] = []
        for index, candidate in enumerate(candidates):
            times = slice(index * n_times, (index + 1) * n_times)
            # An empty answer does not show whether the model knows the fact.
            empty = next((answer for answer in answers[times] if not answer.text.strip()), None)
            if empty is not None:
                outcome.refused.append((candidate.draft, "no answer", check_completion(empty).detail))
            elif n_times and all(hits[times]):
                outcome.refused.append((candidate.draft, "closed-book", f"correct {n_times} times of {n_times}"))
            else:
                kept.append(candidate)
        return kept

    async def _send(self, requests: Sequence[_Request], outcome: Outcome) -> list[Completion]:
        """Return an answer for each request, in order. Raises an error that ends the run before one of a single request."""
        answers = await gather_answers(self.sender.send(messages, seed) for messages, seed in requests)
        completions: list[Completion] = []
        for answer in answers:
            if isinstance(answer, EndpointError):
                raise answer
            completions.append(answer)
        outcome.tokens_in += sum(completion.usage.tokens_in for completion in completions)
        outcome.tokens_out += sum(completion.usage.tokens_out for completion in completions)
        return completions

    def _seed_of(self, messages: list[Message], attempt: int) -> int:
        """Return the seed (31 bits) of a request; it depends on the words alone."""
        return int(content_id("question seed", self.seed, messages, attempt)[:8], 16) & 0x7FFFFFFF


def _rotate(choices: tuple[str, ...], by: int) -> tuple[str, ...]:
    start = by % len(choices)
    return choices[start:] + choices[:start]
