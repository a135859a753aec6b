"""One passage at a time: ask for questions, check them, have them answered with the passage and without it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kinject.augment.checks.checker import check_completion
from kinject.augment.checks.prompt_injection import has_injection, split_injection
from kinject.augment.questions import prompts
from kinject.augment.questions.drafts import (
    Candidate,
    Draft,
    fault_of,
    letter_of,
    read_drafts,
    specificity_of,
)
from kinject.augment.requests import Stopped
from kinject.augment.requests.sender import Sender
from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.recipe import QuestionsSection
from kinject.types import Completion, Document, Message, Passage

_Request = tuple[list[Message], int]


@dataclass
class Outcome:
    """What came of one passage: candidates, the most specific first, and what was refused as (draft, reason, detail)."""

    candidates: list[Candidate] = field(default_factory=list)
    refused: list[tuple[Draft | None, str, str]] = field(default_factory=list)
    tokens_in: int = 0
    tokens_out: int = 0


@dataclass(frozen=True)
class Examiner:
    """Asks about passages through one sender. `seed` is the recipe's."""

    sender: Sender
    section: QuestionsSection
    seed: int

    async def examine(self, document: Document, passage: Passage) -> Outcome:
        """Return the questions on a passage; asks again, for other facts, while they are fewer than wanted.

        Raises `EndpointError` where an answer cannot be had, and `Stopped` where the run is ending.
        """
        outcome = Outcome()
        for attempt in range(self.section.max_attempts):
            if len(outcome.candidates) >= self.section.n_questions:
                break
            drafts = await self._propose(document, passage, attempt, outcome)
            verified = await self._verify(document, passage, drafts, outcome)
            outcome.candidates += await self._without_passage(verified, outcome)
            outcome.candidates.sort(key=lambda candidate: -candidate.specificity)  # stable: else as proposed
        return outcome

    async def _propose(self, document: Document, passage: Passage, attempt: int, outcome: Outcome) -> list[Draft]:
        """Return the drafts without a fault that can be seen without a model."""
        known = [candidate.draft for candidate in outcome.candidates]
        known += [draft for draft, reason, _ in outcome.refused if draft and reason == "known without"]
        earlier = [draft.question for draft in known]
        messages = prompts.propose(document.title, passage.text, self.section.n_proposed, earlier)
        (completion,) = await self._send([(messages, self._seed(messages, attempt))], outcome)
        verdict = check_completion(completion)
        drafts = read_drafts(completion.text) if verdict.accepted else []
        if not drafts:
            outcome.refused.append((None, "no answer", verdict.detail or completion.text[:80]))
        kept: list[Draft] = []
        for draft in drafts[: self.section.n_proposed]:
            reason, detail = fault_of(draft, split_injection(passage.text)[0], [*known, *kept])
            if reason:
                outcome.refused.append((draft, reason, detail))
            else:
                kept.append(draft)
        return kept

    async def _verify(
        self, document: Document, passage: Passage, drafts: Sequence[Draft], outcome: Outcome
    ) -> list[Candidate]:
        """Return the drafts that the model, with the passage before it, answers as they say."""
        # Where the passage gives orders, a letter that was ordered is right in one order of the answers at most.
        turns = (0, 1) if has_injection(passage.text, *(draft.question for draft in drafts)) else (0,)
        answers = [await self._answers_to(document, passage, drafts, turn, outcome) for turn in turns]
        verified: list[Candidate] = []
        for draft, *said in zip(drafts, *answers, strict=True):
            letters = [prompts.LETTERS[_turned(draft.choices, turn).index(draft.answer)] for turn in turns]
            if list(map(letter_of, said)) == letters:
                verified.append(Candidate(draft, min(map(specificity_of, said))))
            else:
                outcome.refused.append((draft, "not verified", f"the model says {said[-1][:60]!r}"))
        return verified

    async def _answers_to(
        self, document: Document, passage: Passage, drafts: Sequence[Draft], turn: int, outcome: Outcome
    ) -> list[str]:
        """Return what the model answers, the passage before it and the choices turned by `turn`; "" where nothing whole."""
        asked = [
            prompts.verify(document.title, passage.text, draft.question, _turned(draft.choices, turn))
            for draft in drafts
        ]
        answers = await self._send([(messages, self._seed(messages, 0)) for messages in asked], outcome)
        return [answer.text.strip() if check_completion(answer).accepted else "" for answer in answers]

    async def _without_passage(self, candidates: Sequence[Candidate], outcome: Outcome) -> list[Candidate]:
        """Return the candidates that the model does not get right every time when it has nothing to go by.

        Each time the answers stand in another order, so that a liking for a letter is right one time in four at most.
        """
        n_times = self.section.closed_book
        requests: list[_Request] = []
        right: list[str] = []
        for candidate in candidates:
            for turn in range(n_times):
                choices = _turned(candidate.draft.choices, turn + 1)
                messages = prompts.closed_book(candidate.draft.question, choices)
                requests.append((messages, self._seed(messages, turn)))
                right.append(prompts.LETTERS[choices.index(candidate.draft.answer)])
        answers = await self._send(requests, outcome)
        hits = [letter_of(answer.text) == letter for answer, letter in zip(answers, right, strict=True)]
        kept: list[Candidate] = []
        for index, candidate in enumerate(candidates):
            times = slice(index * n_times, (index + 1) * n_times)
            # No word at all says nothing of what the model knows.
            silent = next((answer for answer in answers[times] if not answer.text.strip()), None)
            if silent is not None:
                outcome.refused.append((candidate.draft, "no answer", check_completion(silent).detail))
            elif n_times and all(hits[times]):
                outcome.refused.append((candidate.draft, "known without", f"right {n_times} times of {n_times}"))
            else:
                kept.append(candidate)
        return kept

    async def _send(self, requests: Sequence[_Request], outcome: Outcome) -> list[Completion]:
        """Return an answer for each request, in order. Raises what ends the run before what ends the passage."""
        sent = (self.sender.send(messages, seed) for messages, seed in requests)
        answers = await asyncio.gather(*sent, return_exceptions=True)
        faults = [answer for answer in answers if isinstance(answer, BaseException)]
        if faults:
            raise min(faults, key=_gravity)
        completions = [answer for answer in answers if isinstance(answer, Completion)]
        outcome.tokens_in += sum(completion.usage.tokens_in for completion in completions)
        outcome.tokens_out += sum(completion.usage.tokens_out for completion in completions)
        return completions

    def _seed(self, messages: list[Message], turn: int) -> int:
        """Return the seed (31 bits) of a request; it depends on the words alone."""
        return int(content_id("question seed", self.seed, messages, turn)[:8], 16) & 0x7FFFFFFF


def _gravity(error: BaseException) -> int:
    """Return 0 for what ends the run with an error, 1 for the end of the run, 2 for what ends the passage."""
    if isinstance(error, EndpointError) and not error.fatal:
        return 2
    return 1 if isinstance(error, Stopped) else 0


def _turned(choices: tuple[str, ...], by: int) -> tuple[str, ...]:
    turn = by % len(choices)
    return choices[turn:] + choices[:turn]
