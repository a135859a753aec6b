"""A language model as a judge: it compares a rewriting with its source. Its precision and recall are measured first."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

from kinject.augment.checks.checker import Verdict
from kinject.augment.checks.language import detect_language
from kinject.augment.checks.planted_errors import ALL_KINDS, find_names, plant_error
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.mechanical import permute_sentences
from kinject.augment.prompts import judge_messages
from kinject.augment.requests.sender import Sender, gather_answers
from kinject.disk import content_id
from kinject.types import Message

N_TRIALS = 42
"""Planted errors shown to a judge, of each kind in turn, and as many correct rewritings."""
_MAX_REQUESTS = 2
"""Requests for one verdict before it counts as missing."""
_VERDICT = re.compile(
    r"[\W_]*(?:(?:the |my |final )*(?:verdict|answer|judge?ment|conclusion|rewriting|paraphrase|text|it)(?: is)?[\W_]*)?"
    r"(un)?faithful\b[\s*:.,;—–-]*(.{0,200})",
    re.IGNORECASE,
)


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
        n_planted = sum(self.planted.values())
        return sum(self.caught.values()) / n_planted if n_planted else None

    @property
    def precision(self) -> float | None:
        """Fraction of its refusals that were planted errors; None without refusals."""
        n_refused = sum(self.caught.values()) + self.refused_good
        return sum(self.caught.values()) / n_refused if n_refused else None

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "planted": dict(self.planted), "caught": dict(self.caught), "good": self.n_good,
            "refused_good": self.refused_good, "precision": self.precision, "recall": self.recall,
        }  # fmt: skip


@dataclass
class Judge:
    """Asks a model through `sender` for verdicts on rewritings. `score` is the result of `measure_accuracy`."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=lambda: JudgeScore({}, {}, 0, 0))

    async def verdict(self, title: str, passage: str, text: str) -> Verdict:
        """Return whether the judge finds every fact of `passage` in `text` and no other.

        A missing verdict counts as a refusal. Prompt injection can make a judge call everything faithful. If passage or
        text contains some, the judge must also refuse the text with an error planted in it. Raises as `Sender.send`.
        """
        verdict = await self._ask(title, passage, text)
        if not verdict.accepted or not has_injection(title, passage, text):
            return verdict
        rng = Random(content_id(self.seed, passage, text))
        language = detect_language(passage) or "en"
        texts = (plant_error(kind, text, rng, ["Zembla"], language) for kind in ALL_KINDS)
        wrong = next((changed for changed in texts if changed is not None), None)
        if wrong is None or (await self._ask(title, passage, wrong)).accepted:
            return Verdict(
                "judge", "prompt injection in the passage, and the judge missed an error planted in this text"
            )
        return verdict

    async def _ask(self, title: str, passage: str, text: str) -> Verdict:
        """Return the judge's verdict. An unclear answer is a refusal."""
        messages: list[Message] = judge_messages(title, passage, text)
        for attempt in range(_MAX_REQUESTS):
            seed = int(content_id("judge", self.seed, messages, attempt)[:8], 16) & 0x7FFFFFFF
            match = _find_verdict((await self.sender.send(messages, seed)).text)
            if match:
                refused = match[1] or "unfaithful" in match[2].lower()
                return Verdict("judge", match[2].strip()) if refused else Verdict()
        return Verdict("judge", "it gave no verdict")

    async def measure_accuracy(self, passages: Sequence[tuple[str, str]]) -> JudgeScore:
        """Ask about (title, passage) pairs with their sentences permuted, with and without a planted error.

        A trial without an answer does not count. Raises the errors that end the run, as `Sender.send`.
        """
        rng = Random(self.seed)
        languages = [detect_language(passage) or "en" for _, passage in passages]
        names: dict[str, set[str]] = {}
        for (_, passage), language in zip(passages, languages, strict=True):
            names.setdefault(language, set()).update(find_names(passage, language))
        trials: list[tuple[str, str, str, str]] = []
        # More kinds than trials: some texts have no room for some kinds.
        kinds = islice(cycle(ALL_KINDS), 8 * N_TRIALS)
        for (title, passage), language, kind in zip(cycle(passages), cycle(languages), kinds, strict=False):
            if len(trials) >= 2 * N_TRIALS:
                break
            good = permute_sentences(title, passage, rng.randrange(2**31))
            others = [name for name in sorted(names[language]) if name not in passage] or ["Zembla"]
            wrong = plant_error(kind, good, rng, others, language)
            if wrong is not None:
                trials += [(kind, title, passage, wrong), ("", title, passage, good)]
        answers = await gather_answers(self._ask(title, passage, text) for _, title, passage, text in trials)
        verdicts = [(trial[0], one) for trial, one in zip(trials, answers, strict=True) if isinstance(one, Verdict)]
        planted = Counter(kind for kind, _ in verdicts)
        caught = Counter(kind for kind, verdict in verdicts if not verdict.accepted)
        n_good, refused_good = planted.pop("", 0), caught.pop("", 0)
        self.score = JudgeScore(dict(planted), dict(caught), n_good, refused_good)
        return self.score


def _find_verdict(answer: str) -> re.Match[str] | None:
    """Return the verdict at the beginning of the first or of the last line of an answer, the worse of two, None without one.

    The lines between may repeat the rewriting or the question, so they do not count.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    matches = [_VERDICT.match(line) for line in (*lines[:1], *lines[-1:])]
    return max((match for match in matches if match), key=lambda match: bool(match[1]), default=None)


def render_judge_score(score: JudgeScore) -> str:
    """Return one line about the judge's accuracy."""
    kinds = ", ".join(f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items())
    precision, recall = (
        f"{value:.2f}" if value is not None else "unknown" for value in (score.precision, score.recall)
    )
    return (
        f"judge, on planted errors: precision {precision}, recall {recall} (caught {kinds}; "
        f"refused {score.refused_good} of {score.n_good} good ones)"
    )
