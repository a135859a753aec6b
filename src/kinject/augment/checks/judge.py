"""A language model as a second reader: it sees source and rewriting, and is itself tried on planted errors first."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from random import Random

from kinject.augment.checks.checker import Verdict
from kinject.augment.checks.planted_errors import ALL_PLANTS, Plant
from kinject.augment.checks.prompt_injection import has_injection
from kinject.augment.generators.faults import Stopped
from kinject.augment.mechanical import permute_sentences
from kinject.augment.prompts import judge_messages
from kinject.augment.sender import Sender
from kinject.disk import content_id
from kinject.errors import EndpointError
from kinject.types import Message

N_TRIALS = 42
"""Planted errors that a judge is tried on, in turn of each kind, and as many good rewritings."""
_N_ASKED = 2
"""Times that a judge is asked for a verdict before it has none."""
_VERDICT = re.compile(
    r"[\W_]*(?:(?:the |my |final )*(?:verdict|answer|judge?ment|conclusion|rewriting|paraphrase|text|it)(?: is)?[\W_]*)?"
    r"(un)?faithful\b[\s*:.,;—–-]*(.{0,200})",
    re.IGNORECASE,
)
_NAME = re.compile(r"(?<=[a-z] )[A-Z][a-z]{3,}")


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """What a judge made of texts whose truth is known: `caught` of `planted` errors by kind, `refused_good` of `n_good`."""

    planted: Mapping[str, int]
    caught: Mapping[str, int]
    n_good: int
    refused_good: int

    @property
    def recall(self) -> float | None:
        """The share of planted errors that it refused; None where none could be planted."""
        n_planted = sum(self.planted.values())
        return sum(self.caught.values()) / n_planted if n_planted else None

    @property
    def precision(self) -> float | None:
        """The share of its refusals that were planted errors; None where it refused nothing."""
        n_refused = sum(self.caught.values()) + self.refused_good
        return sum(self.caught.values()) / n_refused if n_refused else None

    def counts(self) -> dict[str, object]:
        """Return what the manifest holds."""
        return {
            "planted": dict(self.planted), "caught": dict(self.caught), "good": self.n_good,
            "refused_good": self.refused_good, "precision": self.precision, "recall": self.recall,
        }  # fmt: skip


@dataclass
class Judge:
    """Asks `sender` about rewritings. `score` is what `try_out` found."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=lambda: JudgeScore({}, {}, 0, 0))

    async def verdict(self, title: str, passage: str, text: str) -> Verdict:
        """Return whether the judge finds every fact of `passage` in `text` and no other.

        No verdict counts as a refusal. Where passage or text gives orders, a judge that takes them finds everything
        faithful: it must refuse the text with an error planted in it as well. Raises as `Sender.send`.
        """
        found = await self._ask(title, passage, text)
        if not found.accepted or not has_injection(title, passage, text):
            return found
        rng = Random(content_id(self.seed, passage, text))
        plants = (plant(text, rng, ["Zembla"]) for plant in ALL_PLANTS.values())
        wrong = next((planted for planted in plants if planted not in (None, text)), None)
        if wrong is None or (await self._ask(title, passage, wrong)).accepted:
            return Verdict("judge", "the passage gives orders, and the judge did not see an error planted in this text")
        return found

    async def _ask(self, title: str, passage: str, text: str) -> Verdict:
        """Ask, and read the answer: a quoted word is no verdict, and any doubt is a refusal."""
        messages: list[Message] = judge_messages(title, passage, text)
        for attempt in range(_N_ASKED):
            seed = int(content_id("judge", self.seed, messages, attempt)[:8], 16) & 0x7FFFFFFF
            found = _verdict((await self.sender.send(messages, seed)).text)
            if found:
                against = found[1] or "unfaithful" in found[2].lower()
                return Verdict("judge", found[2].strip()) if against else Verdict()
        return Verdict("judge", "it gave no verdict")

    async def try_out(self, passages: Sequence[tuple[str, str]]) -> JudgeScore:
        """Try the judge on (title, passage) pairs in another order of sentences, with and without a planted error.

        A trial without an answer does not count. Raises what ends the run, as `Sender.send`.
        """
        rng = Random(self.seed)
        names = sorted({name for _, passage in passages for name in _NAME.findall(passage)})
        trials: list[tuple[str, str, str, str]] = []
        for (title, passage), (kind, plant) in zip(cycle(passages), _in_turn(), strict=False):
            if len(trials) >= 2 * N_TRIALS:
                break
            good = permute_sentences(title, passage, rng.randrange(2**31))
            wrong = plant(good, rng, [name for name in names if name not in passage] or ["Zembla"])
            if wrong is not None and wrong != good:
                trials += [(kind, title, passage, wrong), ("", title, passage, good)]
        asked = (self._ask(title, passage, text) for _, title, passage, text in trials)
        found = await asyncio.gather(*asked, return_exceptions=True)
        ends = [error for error in found if isinstance(error, BaseException) and not _is_passing(error)]
        if ends:
            raise next((error for error in ends if not isinstance(error, Stopped)), ends[0])
        told = [(trial[0], one) for trial, one in zip(trials, found, strict=True) if isinstance(one, Verdict)]
        planted = Counter(kind for kind, _ in told)
        caught = Counter(kind for kind, verdict in told if not verdict.accepted)
        n_good, refused_good = planted.pop("", 0), caught.pop("", 0)
        self.score = JudgeScore(dict(planted), dict(caught), n_good, refused_good)
        return self.score


def _verdict(answer: str) -> re.Match[str] | None:
    """Return the verdict that the first or the last line of an answer begins with, the worse one; None where none does.

    What stands in between may be the rewriting over again, or the question: neither is the judge's word.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    found = [_VERDICT.match(line) for line in (*lines[:1], *lines[-1:])]
    return max((match for match in found if match), key=lambda match: bool(match[1]), default=None)


def _is_passing(error: BaseException) -> bool:
    """Return whether only one request failed, not the run."""
    return isinstance(error, EndpointError) and not error.fatal


def _in_turn() -> list[tuple[str, Plant]]:
    """Return kinds of errors in turn, some more than are wanted, for not every text has room for each."""
    kinds = list(ALL_PLANTS.items())
    return [kinds[index % len(kinds)] for index in range(6 * N_TRIALS)]


def render_score(score: JudgeScore) -> str:
    """Return one line about the judge."""
    kinds = ", ".join(f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items())
    shown = [f"{value:.2f}" if value is not None else "unknown" for value in (score.precision, score.recall)]
    return (
        f"judge, on planted errors: precision {shown[0]}, recall {shown[1]} (caught {kinds}; "
        f"refused {score.refused_good} of {score.n_good} good ones)"
    )
