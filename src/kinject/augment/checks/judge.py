"""A language model as a judge: it compares a rewriting with its source, and lists what the source
states.

It reads the rewriting sentence by sentence (as MiniCheck, arXiv 2404.10774, which finds that
splitting sentences into claims adds little) and names the words at fault. What it catches and
refuses is measured on planted errors first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kinject.augment.answers import lines_of
from kinject.augment.checks.checker import Rules, Verdict
from kinject.augment.prompts import judge_messages, stated_messages, statements_messages
from kinject.corpus.passages import sentence_ends
from kinject.disk import content_id
from kinject.language import detect_language
from kinject.llm import request_seed, split_thinking
from kinject.llm.prompt_injection import has_injection
from kinject.llm.sender import Sender, gather_answers
from kinject.types import Message

RELATION_KINDS = ("roles", "cause", "order", "quantifier", "negation", "explanation")
"""Kinds that keep every number and name, so that the checks miss them.

Two names exchange who did what to whom; the cause for the effect; before for after; all for some; a
denied statement; an explanation that the text does not give.
"""
ALL_KINDS = ("number", *RELATION_KINDS)

N_TRIALS = 4 * len(ALL_KINDS)
"""Planted errors shown to a judge, four of each kind where the passages have room, and at most as
many correct texts."""
MIN_RECALL, MIN_PRECISION = 0.8, 0.9
"""A judge below them is warned of."""
_MOST_STATEMENTS = 40
_VERDICT = re.compile(
    r"[\W_]*(?:(?:the |my |final )*(?:verdict|answer|judge?ment|rewriting|text|it)(?: is)?[\W_]*)?"
    r"(un)?faithful\b[\s*:.,;—–-]*(.{0,200})",
    re.IGNORECASE,
)
_WRONG = re.compile(
    r"\W{0,6}(?:sentence )?\[?\d{1,4}\]?\W{1,6}(?:wrong|incorrect)\b[\s*:.–—-]{0,6}(.{0,300})", re.I
)


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """A judge's results on known texts: `caught` of `planted` errors by kind, `refused_good` of
    `n_good` correct texts."""

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
        """Fraction of its refusals that are correct if there are as many wrong as correct texts;
        None without refusals."""
        refused = self.refused_good / self.n_good if self.n_good else 0.0
        recall = self.recall or 0.0
        return recall / (recall + refused) if recall + refused else None

    def _recall(self, kinds: Iterable[str]) -> float | None:
        n_planted = sum(self.planted.get(kind, 0) for kind in kinds)
        return sum(self.caught.get(kind, 0) for kind in kinds) / n_planted if n_planted else None

    def limits_missed(self) -> list[str]:
        """Return the limits of a reliable judge that this one misses, in words."""
        limits = (("recall", self.recall, MIN_RECALL), ("precision", self.precision, MIN_PRECISION))
        return [
            f"{name} {n:.2f} is below {limit:.2f}"
            for name, n, limit in limits
            if n is not None and n < limit
        ]

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "planted": dict(self.planted), "caught": dict(self.caught), "good": self.n_good,
            "refused_good": self.refused_good, "precision": self.precision, "recall": self.recall,
            "recall_of_relations": self._recall(RELATION_KINDS),
        }  # fmt: skip


def read_verdict(answer: str) -> Verdict:
    """Return the verdict in a judge's answer; one that is not clear is a refusal.

    It is at the beginning of the first or of the last line, the worse of two, and must agree with
    the lines about the sentences.
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
    """Asks a model through `sender` for verdicts on rewritings. `score` is the result of
    `measure_accuracy`."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=lambda: JudgeScore({}, {}, 0, 0))

    async def verdict(
        self, title: str, passage: str, text: str, rules: Rules | None = None
    ) -> Verdict:
        """Return whether the judge finds nothing in `text` that `passage` lacks. A missing verdict
        counts as a refusal.

        Prompt injection can make a judge call everything faithful. If passage or text contains
        some, the judge must also refuse the text with an error planted in it. Raises as
        `Sender.send`.
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
                "judge",
                "prompt injection in the passage, and the judge missed an error planted in this text",
            )
        return verdict

    async def _ask(
        self, title: str, passage: str, text: str, rules: Rules | None = None
    ) -> Verdict:
        answer = await self._answer(judge_messages(title, passage, text, rules))
        return (
            read_verdict(answer)
            if answer
            else Verdict("judge", "its answer was cut at max_tokens, or empty")
        )

    async def statements(self, title: str, passage: str) -> tuple[str, ...]:
        """Return short statements of what a passage says, () for an answer without any. Raises as
        `Sender.send`."""
        lines = lines_of(await self._answer(statements_messages(title, passage)))
        return tuple(dict.fromkeys(line for line in lines if line[-1] not in ":："))[
            :_MOST_STATEMENTS
        ]

    async def stated(self, statements: Sequence[str], text: str) -> list[int]:
        """Return the numbers, from 1, of the statements that a text tells. Raises as `Sender.send`."""
        last_line = (await self._answer(stated_messages(statements, text))).rpartition("\n")[2]
        return sorted(
            {int(number) for number in re.findall(r"\d{1,3}", last_line)}
            & {*range(1, len(statements) + 1)}
        )

    async def _answer(self, messages: list[Message]) -> str:
        """Return the answer without its thinking, "" if it was cut: what counts comes last."""
        completion = await self.sender.send(messages, request_seed("judge", self.seed, messages, 0))
        return (
            ""
            if completion.finish_reason == "length"
            else split_thinking(completion.text)[1].strip()
        )

    async def measure_accuracy(self, passages: Sequence[tuple[str, str]]) -> JudgeScore:
        """Ask about (title, passage) pairs in other words of the same meaning, with and without a
        planted error.

        A trial without an answer does not count. Raises the errors that end the run, as
        `Sender.send`.
        """
        trials = make_trials(passages, self.seed)
        answers = await gather_answers(
            self._ask(title, passage, text) for _, title, passage, text in trials
        )
        verdicts = [
            (trial[0], verdict)
            for trial, verdict in zip(trials, answers, strict=True)
            if isinstance(verdict, Verdict)
        ]
        planted = Counter(kind for kind, _ in verdicts)
        caught = Counter(kind for kind, verdict in verdicts if not verdict.accepted)
        n_good, refused_good = planted.pop("", 0), caught.pop("", 0)
        self.score = JudgeScore(dict(planted), dict(caught), n_good, refused_good)
        return self.score


def make_trials(passages: Sequence[tuple[str, str]], seed: int) -> list[tuple[str, str, str, str]]:
    """Return (kind of planted error, "" for a correct text; title, passage, text) for (title,
    passage) pairs."""
    rng, trials = Random(seed), dict[tuple[str, str, str, str], None]()
    languages = [detect_language(passage) or "en" for _, passage in passages]
    known = [
        (*pair, code, reword(pair[1], code)) for pair, code in zip(passages, languages, strict=True)
    ]
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
    kinds = ", ".join(
        f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items()
    )
    precision, recall = (
        f"{n:.2f}" if n is not None else "unknown" for n in (score.precision, score.recall)
    )
    line = (
        f"judge, on planted errors: precision {precision}, recall {recall} (caught {kinds}; "
        f"refused {score.refused_good} of {score.n_good} correct ones)"
    )
    faults = score.limits_missed()
    return (
        f"{line}\nThe judge is not reliable: {', '.join(faults)}. Take a stronger model."
        if faults
        else line
    )


EDGE = r"(?:(?<!\w)|(?!\w))"  # not inside a word
NUMBER = r"(?<![A-Za-z\d.,])\d+(?:[.,\u00a0\u202f]\d+)*(?![.,]?\d)(?![A-Za-z]*\d)"
POSSESSIVE = re.compile(r"['’]s\Z")


class Words:
    """The words of one language: `names`, patterns of names, and `rules` (pattern, replacement) by
    kind; else none."""

    def __init__(self, language: str) -> None:
        self.table: dict[str, Any] = _tables().get(language, {})
        self.spaces = language not in ("zh", "ja")
        self.edge = edge = EDGE if self.spaces else ""
        names = [
            name.replace("{letters}", self.table.get("letters", ""))
            for name in self.table.get("names", ())
        ]
        if places := "|".join(self.table.get("places", ())):
            outside = (
                f"{edge}(?:{places}){edge}",
                f"(?<![ァ-ヶー・])(?:{places})(?![ァ-ヶー・海語语史])",
            )
            names.append(outside[not self.spaces])
        self.names = [re.compile(name) for name in names]
        self.rules = {
            kind: [
                (re.compile(f"{edge}(?:{find}){edge}", re.IGNORECASE), put)
                for find, put in self.table.get(kind, ())
            ]
            for kind in ("cause", "order", "quantifier", "negation", "same")
        }

    def find_names(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the names in `text`, none inside another."""
        end, no_names = 0, {*self.table.get("months", ()), *self.table.get("not_names", ())}
        matches = (match for pattern in self.names for match in pattern.finditer(text))
        for match in sorted(matches, key=lambda match: (match.start(), -match.end())):
            if match.start() >= end and no_names.isdisjoint(match[0].split(" ")):
                end = match.end()
                yield match


words_of = lru_cache(maxsize=16)(Words)
"""The `Words` of a language by its ISO 639-1 code."""


@lru_cache(maxsize=1)
def _tables() -> dict[str, dict[str, Any]]:
    tables: dict[str, dict[str, Any]] = yaml.safe_load(
        Path(__file__).with_name("planted_errors.yaml").read_text("utf-8")
    )
    return tables


def plant_error(kind: str, text: str, rng: Random, language: str = "en") -> str | None:
    """Return `text` in the language `language` with one error of `kind`, None where it has no room
    for one."""
    words = words_of(language)
    if kind == "number":
        changes = [(match.span(), _other_number(match, rng)) for match in re.finditer(NUMBER, text)]
    elif kind == "roles":
        spans = (
            (match.span(), match.span("a"), match.span("b"), match) for match in _roles(text, words)
        )
        changes = [
            (
                span,
                f"{text[span[0] : a[0]]}{m['b']}{text[a[1] : b[0]]}{m['a']}{text[b[1] : span[1]]}",
            )
            for span, a, b, m in spans
        ]
    elif kind == "explanation":
        changes = list(_explained(text, words, rng))
    else:
        changes = [
            (match.span(), _expand(match, put))
            for pattern, put in words.rules[kind]
            for match in pattern.finditer(text)
        ]
    if not changes:
        return None
    (start, end), new = rng.choice(changes)
    return text[:start] + new + text[end:]


def reword(text: str, language: str = "en") -> str:
    """Return `text` with some words replaced by others of the same meaning."""
    for pattern, put in words_of(language).rules["same"]:
        text = pattern.sub(lambda match, put=put: _expand(match, put), text)  # type: ignore[misc]
    return text


def _expand(match: re.Match[str], put: str) -> str:
    """Return the replacement of a match, with a capital where the match has one."""
    new = match.expand(put)
    return new[:1].upper() + new[1:] if match[0][:1].isupper() else new


def _other_number(match: re.Match[str], rng: Random) -> str:
    return re.sub(
        r"\d", lambda digit: str((int(digit[0]) - 1 + rng.randint(1, 8)) % 9 + 1), match[0]
    )


def _roles(text: str, words: Words) -> Iterator[re.Match[str]]:
    """Yield the places where a verb or a preposition gives two different names their roles."""
    names: Sequence[str] = sorted(
        {POSSESSIVE.sub("", match[0]) for match in words.find_names(text)}, key=len, reverse=True
    )
    listed = "|".join(map(re.escape, names)) or r"\Z."
    for pattern in words.table.get("roles", ()):
        for group in ("a", "b"):
            pattern = pattern.replace(
                f"{{{group}}}", f"{words.edge}(?P<{group}>{listed}){words.edge}"
            )
        yield from (
            match for match in re.finditer(pattern, text) if match["a"][:4] != match["b"][:4]
        )


def _explained(text: str, words: Words, rng: Random) -> Iterator[tuple[tuple[int, int], str]]:
    """Yield the ends of the sentences, each with an explanation that the text does not give: before
    its mark, or after it."""
    for end in sentence_ends(text) if "explanations" in words.table else ():
        explanation = rng.choice(words.table["explanations"])
        before = explanation[0] in ",，"
        if text[end - 1] in ".。":
            yield (
                (end - before, end - before),
                explanation if before or not words.spaces else f" {explanation}",
            )
