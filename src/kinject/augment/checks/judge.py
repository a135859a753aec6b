"""A language model as a judge: it compares a rewriting with its source. Its precision and recall are measured first.

It reads the rewriting sentence by sentence (as MiniCheck, arXiv 2404.10774, which finds that splitting sentences into
claims adds little) and names the words at fault. The passage can be shown as a list of statements besides (FActScore,
arXiv 2305.14251); a list alone would lose causes and order, which relate the statements.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from random import Random

from kinject.augment.checks.checker import Rules, Verdict, normal_form
from kinject.augment.checks.planted_errors import ALL_KINDS, RELATION_KINDS, find_names, plant_error, reword
from kinject.augment.prompts import judge_messages
from kinject.corpus.passages import sentences
from kinject.disk import content_id
from kinject.language.detect import detect_language
from kinject.llm.chat import split_thinking
from kinject.llm.generator import request_seed
from kinject.llm.judges import Confusion
from kinject.llm.prompt_injection import has_injection
from kinject.llm.sender import Sender, gather_answers
from kinject.types import Message

log = logging.getLogger(__name__)

N_TRIALS = 4 * len(ALL_KINDS)
"""Planted errors shown to a judge, four of each kind where the passages have room, and at most as many correct texts."""
MIN_RECALL, MIN_PRECISION = 0.8, 0.9
"""A judge below them is warned of."""
_MAX_REQUESTS = 2
"""Requests for one verdict before it counts as missing."""
_VERDICT = re.compile(
    r"[\W_]*(?:(?:the |my |final )*(?:verdict|answer|judge?ment|conclusion|rewriting|paraphrase|text|it)(?: is)?[\W_]*)?"
    r"(un)?faithful\b[\s*:.,;—–-]*(.{0,200})",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"\W{0,6}(?:sentence )?\[?(\d{1,4})\]?\W{1,6}(?:(ok|correct|supported)|wrong|incorrect|(?:un|not )supported)\b"
    r"[\s*:.–—-]{0,6}(.{0,300})",
    re.IGNORECASE,
)
_LOST = re.compile(
    r"\W{0,6}lost\b[\s*:.–—-]{0,6}+(?!(?:none|nothing|no fact|n/a)\b)(?=[^\s.*])(.{0,300})", re.IGNORECASE
)
_QUOTE = re.compile('["“„«「]([^"“”„«»「」\n]{2,300})["”“»」]')
_FENCED = re.compile(r"\A```[\w-]*\n(.*?)\n?```\Z", re.DOTALL)


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
    def recall_of_relations(self) -> float | None:
        """The same of the errors that no rule finds."""
        return self._recall(RELATION_KINDS)

    @property
    def precision(self) -> float | None:
        """Fraction of its refusals that are correct if there are as many wrong as correct texts; None without refusals."""
        n_planted, n_caught = sum(self.planted.values()), sum(self.caught.values())
        counts = {
            ("wrong", "wrong"): n_caught, ("wrong", "good"): n_planted - n_caught,
            ("good", "wrong"): self.refused_good, ("good", "good"): self.n_good - self.refused_good,
        }  # fmt: skip
        return Confusion(counts).precision("wrong")

    def _recall(self, kinds: Iterable[str]) -> float | None:
        n_planted = sum(self.planted.get(kind, 0) for kind in kinds)
        return sum(self.caught.get(kind, 0) for kind in kinds) / n_planted if n_planted else None

    def limits_missed(self) -> list[str]:
        """Return the limits of a reliable judge that this one misses, in words."""
        missed = []
        for name, value, limit in (
            ("recall", self.recall, MIN_RECALL),
            ("precision", self.precision, MIN_PRECISION),
        ):
            if value is not None and value < limit:
                missed.append(f"{name} {value:.2f} is below {limit:.2f}")
        return missed

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "planted": dict(self.planted), "caught": dict(self.caught), "good": self.n_good,
            "refused_good": self.refused_good, "precision": self.precision, "recall": self.recall,
            "recall_of_relations": self.recall_of_relations,
            "recall_by_kind": {kind: self._recall([kind]) for kind in self.planted},
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Opinion:
    """A judge's answer about one text. `proved` is false if it quotes words that are not there."""

    faithful: bool
    fault: str = ""
    proved: bool = True


def read_opinion(answer: str, passage: str, text: str) -> Opinion | None:
    """Return the opinion in a judge's answer about `text`, None if it is no clear verdict.

    The verdict is at the beginning of the first or of the last line, the worse of two: the lines between may repeat the
    rewriting or the question. It must agree with the lines about the sentences. Thinking before it does not count. An
    answer without a verdict counts if it proves a fault or calls every sentence correct.
    """
    lines = [line for line in _as_lines(split_thinking(answer)[1]).splitlines() if line.strip()]
    matches = [_VERDICT.match(line) for line in (*lines[:1], *lines[-1:])]
    verdict = max((match for match in matches if match), key=lambda match: bool(match[1]), default=None)
    about = [match for match in map(_SENTENCE.match, lines) if match]
    wrong = [(match[3].strip(), text) for match in about if not match[2]]
    wrong += [(match[1].strip(), passage) for match in map(_LOST.match, lines) if match]
    proofs = [_is_proved(fault, searched) for fault, searched in wrong]
    fault = next((fault for (fault, _), proof in zip(wrong, proofs, strict=True) if proof is not False), "")
    if verdict is None:
        if any(proofs):
            return Opinion(False, fault)
        n_right = len({match[1] for match in about if match[2]})
        return Opinion(True) if not wrong and n_right >= len(sentences(text)) > 1 else None
    if verdict[1] or "unfaithful" in verdict[2].lower():
        unproved = bool(proofs) and all(proof is False for proof in proofs)
        reason = wrong[0][0] if wrong else verdict[2].strip() or (lines[-2].strip()[:300] if len(lines) > 1 else "")
        return Opinion(False, fault or reason, not unproved)
    return None if wrong else Opinion(True)


def _is_proved(fault: str, searched: str) -> bool | None:
    """Return whether the words that a fault quotes are in the text `searched`, None if it quotes none."""
    quotes = [normal_form(part) for quote in _QUOTE.findall(fault)[:1] for part in re.split(r"\.\.\.|…", quote)]
    return all(quote in normal_form(searched) for quote in quotes) if any(quotes) else None


def _as_lines(answer: str) -> str:
    """Return an answer in JSON as lines: its strings and, at the end, its verdict. Other answers stay as they are."""
    fenced = _FENCED.match(answer.strip())
    inner = fenced[1].strip() if fenced else answer.strip()
    if not inner.startswith("{"):
        return inner
    try:
        values = {str(key).lower(): value for key, value in json.loads(inner).items()}
    except (ValueError, RecursionError):
        return inner
    verdict = next((values.pop(key) for key in ("verdict", "judgment", "judgement", "answer") if key in values), None)
    if verdict is None and isinstance(values.get("faithful"), bool):
        verdict = "FAITHFUL" if values.pop("faithful") else "UNFAITHFUL"
    others = (line for value in values.values() for line in (value if isinstance(value, list) else [value]))
    lines = (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in others)
    return "\n".join(["JSON", *lines, str(verdict or "")])


@dataclass
class Judge:
    """Asks a model through `sender` for verdicts on rewritings. `score` is the result of `measure_accuracy`."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=lambda: JudgeScore({}, {}, 0, 0))

    async def verdict(self, title: str, passage: str, text: str, rules: Rules | None = None) -> Verdict:
        """Return whether the judge finds the facts of `passage` in `text`, as a style's `rules` require, and no others.

        A missing verdict counts as a refusal. Prompt injection can make a judge call everything faithful. If passage or
        text contains some, the judge must also refuse the text with an error planted in it. Raises as `Sender.send`.
        """
        verdict = await self._request_verdict(title, passage, text, rules)
        if not verdict.accepted or not has_injection(title, passage, text):
            return verdict
        rng = Random(content_id(self.seed, passage, text))
        language = detect_language(passage) or "en"
        texts = (plant_error(kind, text, rng, ["Zembla"], language) for kind in ALL_KINDS)
        wrong = next((changed for changed in texts if changed is not None), None)
        if wrong is None or (await self._request_verdict(title, passage, wrong, rules)).accepted:
            return Verdict(
                "judge", "prompt injection in the passage, and the judge missed an error planted in this text"
            )
        return verdict

    async def _request_verdict(self, title: str, passage: str, text: str, rules: Rules | None = None) -> Verdict:
        """Return the judge's verdict. An unclear answer is a refusal; one that quotes other words is requested again."""
        messages = judge_messages(title, passage, text, rules)
        opinion, missing = None, "it gave no verdict"
        for attempt in range(_MAX_REQUESTS):
            completion = await self.sender.send(messages, self._seed_of(messages, attempt))
            if completion.finish_reason == "length":  # the verdict comes last
                missing = "its answer was cut at max_tokens"
                continue
            opinion = read_opinion(completion.text, passage, text) or opinion
            if opinion is not None and (opinion.faithful or opinion.proved):
                return Verdict() if opinion.faithful else Verdict("judge", opinion.fault)
        if opinion is None:
            return Verdict("judge", missing)
        return Verdict("judge", f"{opinion.fault} (these words are not in the text)")

    def _seed_of(self, messages: list[Message], attempt: int) -> int:
        return request_seed("judge", self.seed, messages, attempt)

    async def measure_accuracy(self, passages: Sequence[tuple[str, str]]) -> JudgeScore:
        """Ask about (title, passage) pairs in other words of the same meaning, with and without a planted error.

        A trial without an answer does not count. Raises the errors that end the run, as `Sender.send`.
        """
        trials = make_trials(passages, self.seed)
        answers = await gather_answers(
            self._request_verdict(title, passage, text) for _, title, passage, text in trials
        )
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
    rng = Random(seed)
    languages = [detect_language(passage) or "en" for _, passage in passages]
    names: dict[str, set[str]] = {}
    for (_, passage), language in zip(passages, languages, strict=True):
        names.setdefault(language, set()).update(find_names(passage, language))
    known = [
        (title, passage, language, reword(passage, language))
        for (title, passage), language in zip(passages, languages, strict=True)
    ]
    trials = dict[tuple[str, str, str, str], None]()
    per_kind = N_TRIALS // len(ALL_KINDS)
    for kind in ALL_KINDS:
        rng.shuffle(known)
        n_before = len(trials)
        for title, passage, language, good in islice(cycle(known), max(len(known), 3 * per_kind)):
            others = [name for name in sorted(names[language]) if name not in passage] or ["Zembla"]
            wrong = plant_error(kind, good, rng, others, language)
            if wrong is not None:
                trials[kind, title, passage, wrong] = None
            if len(trials) - n_before == per_kind:
                break
    correct = [("", title, passage, good) for title, passage, _, good in known]
    return [*trials, *dict.fromkeys(correct[:N_TRIALS])]


def render_judge_score(score: JudgeScore) -> str:
    """Return lines about the judge's accuracy."""
    kinds = ", ".join(f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items())
    precision, recall, relations = (
        f"{value:.2f}" if value is not None else "unknown"
        for value in (score.precision, score.recall, score.recall_of_relations)
    )
    line = (
        f"judge, on planted errors: precision {precision}, recall {recall}, of relations {relations} (caught {kinds}; "
        f"refused {score.refused_good} of {score.n_good} correct ones)"
    )
    faults = score.limits_missed()
    return f"{line}\nThe judge is not reliable: {', '.join(faults)}. Take a stronger model." if faults else line
