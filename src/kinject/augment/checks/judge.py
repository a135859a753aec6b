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
from functools import lru_cache, partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import yaml

from kinject.augment.answers import lines_of
from kinject.augment.checks.checker import Rules, Verdict
from kinject.augment.prompts import judge_messages, stated_messages, statements_messages
from kinject.disk import content_id
from kinject.language import detect_language
from kinject.language.sentences import sentence_ends
from kinject.llm import request_seed
from kinject.llm.prompt_injection import has_injection
from kinject.llm.sender import Sender, gather_answers
from kinject.llm.thinking import split_thinking
from kinject.terminal import format_count
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
_MISSED = "prompt injection in the passage, and the judge missed an error planted in this text"
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
        refused = self.refused_good / max(1, self.n_good)
        recall = self.recall or 0.0
        if not recall + refused:
            return None
        return recall / (recall + refused)

    def _recall(self, kinds: Iterable[str]) -> float | None:
        kinds = list(kinds)
        n_planted = sum(self.planted.get(kind, 0) for kind in kinds)
        if not n_planted:
            return None
        return sum(self.caught.get(kind, 0) for kind in kinds) / n_planted

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
            "planted": dict(self.planted),
            "caught": dict(self.caught),
            "good": self.n_good,
            "refused_good": self.refused_good,
            "precision": self.precision,
            "recall": self.recall,
            "recall_of_relations": self._recall(RELATION_KINDS),
        }


def read_verdict(answer: str) -> Verdict:
    """Return the verdict in a judge's answer; one that is not clear is a refusal.

    It is at the beginning of the first or of the last line, the worse of two, and must agree with
    the lines about the sentences.
    """
    lines = [line for line in answer.splitlines() if line.strip()]
    # At the beginning of these lines alone: "it is not faithful" anywhere counted as a yes once.
    verdicts = list(filter(None, map(_VERDICT.match, [*lines[:1], *lines[-1:]])))
    faults = [match[1].strip() for match in map(_WRONG.match, lines) if match]
    unfaithful = any(match[1] or "unfaithful" in match[2].lower() for match in verdicts)
    if not verdicts or (faults and not unfaithful):
        return Verdict("judge", "it gave no verdict")
    if not unfaithful:
        return Verdict()
    detail = verdicts[-1][2].strip()
    if faults:
        detail = faults[0]
    elif not detail and len(lines) > 1:
        detail = lines[-2].strip()[:300]
    return Verdict("judge", detail)


def _no_score() -> JudgeScore:
    return JudgeScore({}, {}, 0, 0)


@dataclass
class Judge:
    """Asks a model through `sender` for verdicts on rewritings. `score` is the result of
    `measure_accuracy`."""

    sender: Sender
    seed: int
    score: JudgeScore = field(default_factory=_no_score)

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
        # By content: a rerun plants the same error, and has its verdict in the cache.
        rng = Random(content_id(self.seed, passage, text))
        language = detect_language(passage) or "en"
        texts = (plant_error(kind, text, rng, language) for kind in ALL_KINDS)
        wrong = next((changed for changed in texts if changed is not None), None)
        # Without room for a planted error nothing shows that the judge does not obey: that is a
        # refusal, too.
        if wrong is None or (await self._ask(title, passage, wrong, rules)).accepted:
            return Verdict("judge", _MISSED)
        return verdict

    async def _ask(
        self, title: str, passage: str, text: str, rules: Rules | None = None
    ) -> Verdict:
        # With the passage: a list of its statements lacks causes and the order of sentences.
        answer = await self._answer(judge_messages(title, passage, text, rules))
        if not answer:
            return Verdict("judge", "its answer was cut at max_tokens, or empty")
        return read_verdict(answer)

    async def statements(self, title: str, passage: str) -> tuple[str, ...]:
        """Return short statements of what a passage says, () for an answer without any. Raises as
        `Sender.send`."""
        lines = lines_of(await self._answer(statements_messages(title, passage)))
        # A line that ends with a colon introduces the list.
        statements = dict.fromkeys(line for line in lines if line[-1] not in ":：")
        return tuple(statements)[:_MOST_STATEMENTS]

    async def stated(self, statements: Sequence[str], text: str) -> list[int]:
        """Return the numbers, from 1, of the statements that a text tells. Raises as
        `Sender.send`."""
        answer = await self._answer(stated_messages(statements, text))
        last_line = answer.rpartition("\n")[2]
        numbers = set(map(int, re.findall(r"\d{1,3}", last_line)))
        # A judge may name numbers that no statement has.
        return sorted(numbers & {*range(1, len(statements) + 1)})

    async def _answer(self, messages: list[Message]) -> str:
        """Return the answer without its thinking, "" if it was cut: what counts comes last."""
        completion = await self.sender.send(messages, request_seed("judge", self.seed, messages, 0))
        if completion.finish_reason == "length":
            return ""
        return split_thinking(completion.text)[1].strip()

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
        planted, caught = Counter[str](), Counter[str]()
        for (kind, *_), verdict in zip(trials, answers, strict=True):
            if isinstance(verdict, Verdict):
                planted[kind] += 1
                if not verdict.accepted:
                    caught[kind] += 1
        n_good, refused_good = planted.pop("", 0), caught.pop("", 0)
        self.score = JudgeScore(dict(planted), dict(caught), n_good, refused_good)
        return self.score


def make_trials(passages: Sequence[tuple[str, str]], seed: int) -> list[tuple[str, str, str, str]]:
    """Return (kind of planted error, "" for a correct text; title, passage, text) for (title,
    passage) pairs."""
    # A dict, as a set in order: a trial that is drawn twice counts once.
    rng, trials = Random(seed), dict[tuple[str, str, str, str], None]()
    languages = [detect_language(passage) or "en" for _, passage in passages]
    known = [
        (*pair, code, reword(pair[1], code)) for pair, code in zip(passages, languages, strict=True)
    ]
    per_kind = N_TRIALS // len(ALL_KINDS)
    for kind in ALL_KINDS:
        # Anew for each kind, so that not the same passages get all errors.
        rng.shuffle(known)
        n_before = len(trials)
        # Not every text has room for each kind: of few passages each is tried again, with another
        # place drawn.
        for title, passage, language, good in islice(cycle(known), max(len(known), 3 * per_kind)):
            wrong = plant_error(kind, good, rng, language)
            if wrong is not None and len(trials) - n_before < per_kind:
                trials[kind, title, passage, wrong] = None
    # Other words, not another order of sentences: that moves pronouns and what came first, which a
    # judge of order is right to refuse.
    correct = [("", title, passage, good) for title, passage, _, good in known]
    return [*trials, *dict.fromkeys(correct[:N_TRIALS])]


def render_judge_score(score: JudgeScore) -> str:
    """Return lines about the judge's accuracy."""
    kinds = ", ".join(
        f"{kind} {score.caught.get(kind, 0)}/{n}" for kind, n in score.planted.items()
    )
    line = (
        f"judge, on planted errors: precision {_format_fraction(score.precision)}, "
        f"recall {_format_fraction(score.recall)} (caught {kinds}; "
        f"refused {score.refused_good} of {format_count(score.n_good, 'correct one')})"
    )
    faults = score.limits_missed()
    if not faults:
        return line
    return f"{line}\nThe judge is not reliable: {', '.join(faults)}. Take a stronger model."


def _format_fraction(fraction: float | None) -> str:
    if fraction is None:
        return "unknown"
    return f"{fraction:.2f}"


EDGE = r"(?:(?<!\w)|(?!\w))"  # not inside a word
NUMBER = r"(?<![A-Za-z\d.,])\d+(?:[.,\u00a0\u202f]\d+)*(?![.,]?\d)(?![A-Za-z]*\d)"
POSSESSIVE = re.compile(r"['’]s\Z")
_RULES = ("cause", "order", "quantifier", "negation", "same")
"""Kinds of changes that a table of patterns makes."""
_Change = tuple[tuple[int, int], str]
"""(start, end) of the text that is replaced, and what replaces it."""


class Words:
    """The words of one language: `names`, patterns of names, and `rules` (pattern, replacement) by
    kind; else none."""

    def __init__(self, language: str) -> None:
        self.table: dict[str, Any] = _tables().get(language, {})
        self.spaces = language not in ("zh", "ja")
        self.edge = ""
        if self.spaces:
            self.edge = EDGE
        letters = self.table.get("letters", "")
        names = [name.replace("{letters}", letters) for name in self.table.get("names", ())]
        places = "|".join(self.table.get("places", ()))
        if places and self.spaces:
            names.append(self._whole_words(places))
        elif places:
            # Before 海 or 語, a place is a part of another word: a sea, a language.
            names.append(f"(?<![ァ-ヶー・])(?:{places})(?![ァ-ヶー・海語语史])")
        self.names = [re.compile(name) for name in names]
        self.rules = {kind: self._rules(kind) for kind in _RULES}

    def _whole_words(self, pattern: str) -> str:
        return f"{self.edge}(?:{pattern}){self.edge}"

    def _rules(self, kind: str) -> list[tuple[re.Pattern[str], str]]:
        return [
            (re.compile(self._whole_words(find), re.IGNORECASE), put)
            for find, put in self.table.get(kind, ())
        ]

    def find_names(self, text: str) -> Iterator[re.Match[str]]:
        """Yield the names in `text`, none inside another."""
        no_names = {*self.table.get("months", ()), *self.table.get("not_names", ())}
        matches: list[re.Match[str]] = []
        for pattern in self.names:
            matches += pattern.finditer(text)
        end = 0
        for match in sorted(matches, key=_longest_first):
            if match.start() >= end and no_names.isdisjoint(match[0].split(" ")):
                end = match.end()
                yield match


def _longest_first(match: re.Match[str]) -> tuple[int, int]:
    """Order by the start; of two with one start the longer comes first."""
    return match.start(), -match.end()


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
        changes = [(match.span(), _exchanged(match)) for match in _roles(text, words)]
    elif kind == "explanation":
        changes = list(_explained(text, words, rng))
    else:
        changes = []
        for pattern, put in words.rules[kind]:
            changes += [(match.span(), _expand(match, put)) for match in pattern.finditer(text)]
    if not changes:
        return None
    (start, end), new = rng.choice(changes)
    return text[:start] + new + text[end:]


def _exchanged(match: re.Match[str]) -> str:
    """Return the text of a match with its groups ``a`` and ``b`` exchanged, which stand in this
    order."""
    text = match.string
    before = text[match.start() : match.start("a")]
    between = text[match.end("a") : match.start("b")]
    after = text[match.end("b") : match.end()]
    return f"{before}{match['b']}{between}{match['a']}{after}"


def reword(text: str, language: str = "en") -> str:
    """Return `text` with some words replaced by others of the same meaning."""
    for pattern, put in words_of(language).rules["same"]:
        text = pattern.sub(partial(_expand, put=put), text)
    return text


def _expand(match: re.Match[str], put: str) -> str:
    """Return the replacement of a match, with a capital where the match has one."""
    new = match.expand(put)
    if match[0][:1].isupper():
        return new[:1].upper() + new[1:]
    return new


def _other_number(match: re.Match[str], rng: Random) -> str:
    def other_digit(digit: re.Match[str]) -> str:
        return str((int(digit[0]) - 1 + rng.randint(1, 8)) % 9 + 1)  # never 0, never the same

    return re.sub(r"\d", other_digit, match[0])


def _roles(text: str, words: Words) -> Iterator[re.Match[str]]:
    """Yield the places where a verb or a preposition gives two different names their roles."""
    names = {POSSESSIVE.sub("", match[0]) for match in words.find_names(text)}
    # Longest first: an alternation takes the first that fits, and a first name would hide the full
    # one. Without names the pattern must fit nowhere, and an empty one fits everywhere.
    listed = "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or r"\Z."
    for pattern in words.table.get("roles", ()):
        for group in ("a", "b"):
            name = f"{words.edge}(?P<{group}>{listed}){words.edge}"
            pattern = pattern.replace(f"{{{group}}}", name)
        for match in re.finditer(pattern, text):
            if match["a"][:4] != match["b"][:4]:  # else two forms of one name
                yield match


def _explained(text: str, words: Words, rng: Random) -> Iterator[_Change]:
    """Yield the ends of the sentences, each with an explanation that the text does not give: before
    its mark, or after it."""
    if "explanations" not in words.table:
        return
    for end in sentence_ends(text):
        explanation = rng.choice(words.table["explanations"])
        if text[end - 1] not in ".。":
            continue
        if explanation[0] in ",，":
            yield (end - 1, end - 1), explanation
        elif words.spaces:
            yield (end, end), f" {explanation}"
        else:
            yield (end, end), explanation
