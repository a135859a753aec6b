"""A language model as a judge: it compares a rewriting with its source, and lists what the source states.

It reads the rewriting sentence by sentence (as MiniCheck, arXiv 2404.10774, which finds that splitting sentences into
claims adds little) and names the words at fault. What it catches and refuses is measured on planted errors first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

from kinject.augment.answers import lines_of
from kinject.augment.checks.checker import Rules, Verdict
from kinject.augment.checks.planted_errors import ALL_KINDS, RELATION_KINDS, plant_error, reword
from kinject.augment.prompts import judge_messages, statements_messages, told_messages
from kinject.disk import content_id
from kinject.language.detect import detect_language
from kinject.llm.chat import split_thinking
from kinject.llm.generator import request_seed
from kinject.llm.prompt_injection import has_injection
from kinject.llm.sender import Sender, gather_answers
from kinject.types import Message

N_TRIALS = 4 * len(ALL_KINDS)
"""Planted errors shown to a judge, four of each kind where the passages have room, and at most as many correct texts."""
MIN_RECALL, MIN_PRECISION = 0.8, 0.9
"""A judge below them is warned of."""
_MOST_STATEMENTS = 40
_VERDICT = re.compile(
    r"[\W_]*(?:(?:the |my |final )*(?:verdict|answer|judge?ment|rewriting|text|it)(?: is)?[\W_]*)?"
    r"(un)?faithful\b[\s*:.,;—–-]*(.{0,200})",
    re.IGNORECASE,
)
_WRONG = re.compile(r"\W{0,6}(?:sentence )?\[?\d{1,4}\]?\W{1,6}(?:wrong|incorrect)\b[\s*:.–—-]{0,6}(.{0,300})", re.I)


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """A judge's results on known texts: `caught` of `planted` errors by kind, `refused_good` of `n_good` correct texts."""

    planted: Mapping[str, int]
    caught: Mapping[str, int]
    n_good: int
    refused_good: int

    @property
    def recall(self) -> float | None:
        """Fraction of the planted errors that it refused; None without planted errors."""
        return self._recall(self.planted)

    @property
    def precision(self) -> float | None:
        """Fraction of its refusals that are correct if there are as many wrong as correct texts; None without refusals."""
        refused = self.refused_good / self.n_good if self.n_good else 0.0
        recall = self.recall or 0.0
        return recall / (recall + refused) if recall + refused else None

    def _recall(self, kinds: Iterable[str]) -> float | None:
        n_planted = sum(self.planted.get(kind, 0) for kind in kinds)
        return sum(self.caught.get(kind, 0) for kind in kinds) / n_planted if n_planted else None

    def limits_missed(self) -> list[str]:
        """Return the limits of a reliable judge that this one misses, in words."""
        limits = (("recall", self.recall, MIN_RECALL), ("precision", self.precision, MIN_PRECISION))
        return [f"{name} {n:.2f} is below {limit:.2f}" for name, n, limit in limits if n is not None and n < limit]

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "planted": dict(self.planted), "caught": dict(self.caught), "good": self.n_good,
            "refused_good": self.refused_good, "precision": self.precision, "recall": self.recall,
            "recall_of_relations": self._recall(RELATION_KINDS),
        }  # fmt: skip


def read_verdict(answer: str) -> Verdict:
    """Return the verdict in a judge's answer; one that is not clear is a refusal.

    It is at the beginning of the first or of the last line, the worse of two, and must agree with the lines about the sentences.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    verdicts = [match for line in (*lines[:1], *lines[-1:]) if (match := _VERDICT.match(line))]
    faults = [match[1].strip() for line in lines if (match := _WRONG.match(line))]
    unfaithful = any(match[1] or "unfaithful" in match[2].lower() for match in verdicts)
    if not verdicts or (faults and not unfaithful):
        return Verdict("judge", "it gave no verdict")
    spoken = verdicts[-1][2].strip() or (lines[-2].strip()[:300] if len(lines) > 1 else "")
    return Verdict("judge", (*faults, spoken)[0]) if unfaithful else Verdict()


@dataclass
class Judge:
    """Asks a model through `sender` for verdicts on rewritings. `score` is the result of `measure_accuracy`."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=lambda: JudgeScore({}, {}, 0, 0))

    async def verdict(self, title: str, passage: str, text: str, rules: Rules | None = None) -> Verdict:
        """Return whether the judge finds nothing in `text` that `passage` lacks. A missing verdict counts as a refusal.

        Prompt injection can make a judge call everything faithful. If passage or text contains some, the judge must also
        refuse the text with an error planted in it. Raises as `Sender.send`.
        """
        verdict = await self._ask(title, passage, text, rules)
        if not verdict.accepted or not has_injection(title, passage, text):
            return verdict
        rng = Random(content_id(self.seed, passage, text))
        language = detect_language(passage) or "en"
        texts = (plant_error(kind, text, rng, language) for kind in ALL_KINDS)
        wrong = next((changed for changed in texts if changed is not None), None)
        if wrong is None or (await self._ask(title, passage, wrong, rules)).accepted:
            return Verdict(
                "judge", "prompt injection in the passage, and the judge missed an error planted in this text"
            )
        return verdict

    async def _ask(self, title: str, passage: str, text: str, rules: Rules | None = None) -> Verdict:
        answer = await self._answer(judge_messages(title, passage, text, rules))
        return read_verdict(answer) if answer else Verdict("judge", "its answer was cut at max_tokens, or empty")

    async def statements(self, title: str, passage: str) -> tuple[str, ...]:
        """Return short statements of what a passage says, () for an answer without any. Raises as `Sender.send`."""
        lines = lines_of(await self._answer(statements_messages(title, passage)))
        return tuple(dict.fromkeys(line for line in lines if line[-1] not in ":："))[:_MOST_STATEMENTS]

    async def told(self, statements: Sequence[str], text: str) -> list[int]:
        """Return the numbers, from 1, of the statements that a text tells. Raises as `Sender.send`."""
        last_line = (await self._answer(told_messages(statements, text))).rpartition("\n")[2]
        return sorted(
            {int(number) for number in re.findall(r"\d{1,3}", last_line)} & set(range(1, len(statements) + 1))
        )

    async def _answer(self, messages: list[Message]) -> str:
        """Return the answer without its thinking, "" if it was cut: what counts comes last."""
        completion = await self.sender.send(messages, request_seed("judge", self.seed, messages, 0))
        return "" if completion.finish_reason == "length" else split_thinking(completion.text)[1].strip()

    async def measure_accuracy(self, passages: Sequence[tuple[str, str]]) -> JudgeScore:
        """Ask about (title, passage) pairs in other words of the same meaning, with and without a planted error.

        A trial without an answer does not count. Raises the errors that end the run, as `Sender.send`.
        """
        trials = make_trials(passages, self.seed)
        answers = await gather_answers(self._ask(title, passage, text) for _, title, passage, text in trials)
        verdicts = [
            (trial[0], verdict) for trial, verdict in zip(trials, answers, strict=True) if isinstance(verdict, Verdict)
        ]
        planted = Counter(kind for kind, _ in verdicts)
        caught = Counter(kind for kind, verdict in verdicts if not verdict.accepted)
        n_good, refused_good = planted.pop("", 0), caught.pop("", 0)
        self.score = JudgeScore(dict(planted), dict(caught), n_good, refused_good)
        return self.score


def make_trials(passages: Sequence[tuple[str, str]], seed: int) -> list[tuple[str, str, str, str]]:
    """Return (kind of planted error, "" for a correct text; title, passage, text) for (title, passage) pairs."""
    rng, trials = Random(seed), dict[tuple[str, str, str, str], None]()
    languages = [detect_language(passage) or "en" for _, passage in passages]
    known = [(*pair, code, reword(pair[1], code)) for pair, code in zip(passages, languages, strict=True)]
    per_kind = N_TRIALS // len(ALL_KINDS)
    for kind in ALL_KINDS:
        rng.shuffle(known)
        n_before = len(trials)
        for title, passage, language, good in islice(cycle(known), max(len(known), 3 * per_kind)):
            wrong = plant_error(kind, good, rng, language)
            if wrong is not None and len(trials) - n_before < per_kind:
                trials[kind, title, passage, wrong] = None
    correct = [("", title, passage, good) for title, passage, _, good in known]
    return [*trials, *dict.fromkeys(correct[:N_TRIALS])]


def render_judge_score(score: JudgeScore) -> str:
    """Return lines about the judge's accuracy."""
    kinds = ", ".join(f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items())
    precision, recall = (f"{n:.2f}" if n is not None else "unknown" for n in (score.precision, score.recall))
    line = (
        f"judge, on planted errors: precision {precision}, recall {recall} (caught {kinds}; "
        f"refused {score.refused_good} of {score.n_good} correct ones)"
    )
    faults = score.limits_missed()
    return f"{line}\nThe judge is not reliable: {', '.join(faults)}. Take a stronger model." if faults else line
