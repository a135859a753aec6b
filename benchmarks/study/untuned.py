"""How often verdicts are wrong that no generator was tuned on: what lies around the statistics of benchmarks/study/verdicts.py.

    python benchmarks/study/untuned.py [--studies 1000] [--seed 0] [--only PART]    # some minutes of one core

- known: `kinject questions --drop-known` where formats share a preference for some choices, and a training moves it.
- proofs: the bounds of `kinject export --prove`, for copies that are rounded, and for copies that are broken a little.
- sequences: trainings one after the other, whose seeds part more with each; two methods that are equal.
- graders: a judge that accepts wrong answers of one arm's style more often than those of another.
- near_chance: an accuracy at the lower end of what "within 10 points of guessing" means.
- rare: ten arms of one seed that learn a tenth of the documents whole and lose as much everywhere.

Each part calls kinject's own functions on answers with a known truth.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from verdicts import Rates

from kinject.eval.compare import above_guessing, is_given_away
from kinject.export.prove import Proof, check_answers
from kinject.results import ALPHA
from kinject.stats.comparisons import is_taste, make_contrast
from kinject.stats.intervals import chance_p, difference_estimate, family_variances, holm
from kinject.stats.matrix import CorrectnessMatrix
from kinject.types import Answer, Question

Random = np.random.Generator
N_CHOICES = 4
IDS = tuple(f"q{i}" for i in range(600))
BY_FIVE = tuple(f"d{i // 5}" for i in range(600))


def matrix_of(rows: Any, ids: Sequence[str], documents: Sequence[str]) -> CorrectnessMatrix:
    """Return the answers of an arm to four-choice questions."""
    chances = (1 / N_CHOICES,) * len(ids)
    return CorrectnessMatrix(
        np.atleast_2d(rows).astype(float), tuple(ids), tuple(documents), chances
    )


def is_lower(after: CorrectnessMatrix, before: CorrectnessMatrix) -> bool:
    """Return whether a loss is shown."""
    contrast = make_contrast(after, before, "base")
    return contrast is not None and contrast.is_significant and contrast.delta < 0


# --- questions --drop-known -----------------------------------------------------------------------


@dataclass
class Choosing:
    """A model that knows a third of 600 questions, and prefers some choices whatever is asked.

    `shared` is the part of the preference's variance that is alike in all formats.
    """

    random: Random
    shared: float
    knows: Any
    common: Any
    own: dict[str, Any]
    letters: Any

    @classmethod
    def draw(cls, random: Random, shared: float) -> Choosing:
        """Return a model before training."""
        n = 600
        own = {form: random.normal(size=(n, N_CHOICES)) for form in ("rotations", "texts")}
        common = random.normal(size=(n, N_CHOICES))
        letters = random.normal(0, 0.7, N_CHOICES)
        return cls(random, shared, random.random(n) < 0.35, common, own, letters)

    def trained(self, kept: float, forgotten: float = 0.0) -> Choosing:
        """Return the model after a training: `kept` is how far its preferences go with those before."""
        own = {form: self._moved(values, kept) for form, values in self.own.items()}
        knows = self.knows & (self.random.random(len(self.knows)) >= forgotten)
        return replace(self, knows=knows, common=self._moved(self.common, kept), own=own)

    def _moved(self, values: Any, kept: float) -> Any:
        return kept * values + math.sqrt(1 - kept**2) * self.random.normal(size=values.shape)

    def right(self, form: str, *, with_question: bool) -> Any:
        """Return whether each answer is right, [ways of asking, questions]; the first choice is the right one."""
        scores = math.sqrt(self.shared) * self.common + math.sqrt(1 - self.shared) * self.own[form]
        scores = scores + self.random.normal(0, 0.5, scores.shape)
        if with_question:
            scores[self.knows, 0] += 3
        if form == "texts":
            return (scores.argmax(1) == 0)[None]
        turned = []
        for turn in range(N_CHOICES):
            noise = self.random.normal(0, 0.5, scores.shape)
            turned.append((scores + noise + np.roll(self.letters, turn)).argmax(1) == 0)
        return np.stack(turned)


def _answer(form: str, *, right: bool) -> Answer:
    gold = 0 if right else 1
    log_probs = (-1.0, -2.0, -3.0, -4.0)
    return Answer("q", "s", "base", form, 0, 0, (), gold, log_probs, (1,) * 4, (1,) * 4)


def _answers(form: str, n_right: int, n: int) -> list[Answer]:
    return [_answer(form, right=i < n_right) for i in range(n)]


TURNS = range(N_CHOICES + 1)
CHOSEN = np.array([above_guessing(_answers("rotations", k, N_CHOICES)) for k in TURNS])
"""By the number of rotations that are right."""
GIVEN = np.array([
    [is_given_away([*_answers("rotations-no-question", k, N_CHOICES), *_answers("texts-no-question", t, 1)]) for t in (0, 1)]
    for k in TURNS
])  # fmt: skip
"""The same, and whether the text is, without the question."""


def known(rates: Rates, random: Random) -> None:
    """Nothing is forgotten or learned, but preferences move; then a tenth is forgotten."""
    for name, shared, kept in (
        ("not shared, moved", 0.0, 0.7), ("shared, unmoved", 0.8, 1.0),
        ("shared, moved half", 0.8, 0.7), ("shared, all new", 0.8, 0.0),
    ):  # fmt: skip
        base = Choosing.draw(random, shared)
        chosen = CHOSEN[base.right("rotations", with_question=True).sum(0)]
        turned, texts = (base.right(f, with_question=False).sum(0) for f in ("rotations", "texts"))
        before = base.right("texts", with_question=True)[0]
        unknown = np.flatnonzero(~chosen)
        found = {
            "choosing alone": np.flatnonzero(chosen),
            "without the question too": np.flatnonzero(chosen & ~GIVEN[turned, texts]),
        }
        trained = base.trained(kept)
        nets = []
        for model in (trained, base):
            asked = model.right("texts", with_question=True)[0].astype(float)
            nets.append(asked - model.right("texts", with_question=False)[0])
        ids = [f"q{i}" for i in unknown]
        gain = difference_estimate(*(matrix_of(net[unknown], ids, ids) for net in nets))
        rates.add(
            f"unknown, {name}: nothing learned, a net gain",
            (gain.p or 1.0) < ALPHA and gain.value > 0,
        )
        for forgotten in (0.0, 0.1):
            after = base.trained(kept, forgotten).right("texts", with_question=True)[0]
            for rule, those in found.items():
                ids = [f"q{i}" for i in those]
                lost = is_lower(
                    matrix_of(after[those], ids, ids), matrix_of(before[those], ids, ids)
                )
                rates.add(f"known, {name}, {rule}: {forgotten:.0%} forgotten, “forgot”", lost)


# --- export --prove -------------------------------------------------------------------------------


def _pairs(
    trained: Any, copy: Any, tokens: Any, questions: Sequence[Question]
) -> list[tuple[Answer, Answer]]:
    pairs = []
    rows = zip(questions, trained.tolist(), copy.tolist(), tokens.tolist(), strict=True)
    for question, mine, other, n in rows:
        pair = (
            Answer(question.id, "s", arm, "texts", 0, 0, (), 0, tuple(log_probs), tuple(n), ())
            for arm, log_probs in (("trained", mine), ("copy", other))
        )
        pairs.append(tuple(pair))
    return pairs


CHOICES = tuple("abcd")
QUESTIONS = [Question(f"q{i}", "?", CHOICES, 0) for i in range(1000)]
BY_ID = {question.id: question for question in QUESTIONS}
SOUND = {16: 0.003, 8: 0.010, 4: 0.135}
"""Bits of a weight -> mean difference of a token's log-prob that rounding makes (docs/training.md)."""


def proofs(rates: Rates, random: Random) -> None:
    """Log-probs of choices of one to six tokens, half of them of a model that is all but unsure; rounded copies, and faults.

    A fault moves the choices of a fifth of the questions by three nats (a lost turn of a chat), or exchanges those of a
    twentieth.
    """
    for n in (100, 1000):
        tokens = random.integers(1, 7, (n, N_CHOICES))
        spread = np.where(random.random((n, 1)) < 0.5, 0.7, 3.0)
        trained = -2.0 * tokens - random.exponential(spread, (n, N_CHOICES))
        for bits, mean in SOUND.items():
            for name, scale in (("rounded as measured", 1.0), ("rounded twice as much", 2.0)):
                rates.add(f"prove, {n} questions, {bits} bits: {name}: differs",
                          _differs(trained, _rounded(trained, tokens, scale * mean, random), tokens, bits))  # fmt: skip
            broken = _rounded(trained, tokens, mean, random)
            moved = random.random((n, 1)) < 0.2
            turned = np.where(moved, broken + random.normal(0, 3, broken.shape), broken)
            rates.add(f"prove, {n} questions, {bits} bits: a fifth of answers moved: differs",
                      _differs(trained, turned, tokens, bits))  # fmt: skip
            few = np.where(random.random((n, 1)) < 0.06, turned[:, ::-1], broken)
            rates.add(f"prove, {n} questions, {bits} bits: a twentieth of answers others: differs",
                      _differs(trained, few, tokens, bits))  # fmt: skip


def _rounded(trained: Any, tokens: Any, mean: float, random: Random) -> Any:
    """Return log-probs whose mean absolute difference a token is `mean`."""
    noise = random.normal(size=trained.shape) * tokens * mean / math.sqrt(2 / math.pi)
    return trained + noise


def _differs(trained: Any, copy: Any, tokens: Any, bits: int) -> bool:
    proof = Proof("copy", "copy", bits)
    check_answers(proof, _pairs(trained, copy, tokens, QUESTIONS[: len(trained)]), BY_ID)
    return not proof.holds


# --- sequences ------------------------------------------------------------------------------------


def sequences(rates: Rates, random: Random) -> None:
    """Four equal methods learn three sets one after the other; answers on the first, 40 documents of five, three seeds."""
    for name, steps in (("seeds part alike", (0.1, 0.1, 0.1)), ("more with each", (0.1, 0.25, 0.4)),
                        ("much more", (0.1, 0.4, 0.8))):  # fmt: skip
        documents = [f"d{i // 5}" for i in range(200)]
        ids = [f"q{i}" for i in range(200)]
        level = np.repeat(random.normal(0, 1, 40), 5) + random.normal(0, 0.7, 200)
        by_step: list[list[CorrectnessMatrix]] = [[], [], []]
        for _ in range(4):
            walk = np.zeros((3, 1))
            for step, (sd, mean) in enumerate(zip(steps, (3.0, 1.0, 0.3), strict=True)):
                walk = walk + random.normal(0, sd, (3, 1))
                own = np.repeat(random.normal(0, 0.4, 40), 5)
                rate = 1 / (1 + np.exp(-level - mean - own - walk))
                by_step[step].append(matrix_of(random.random((3, 200)) < rate, ids, documents))
        for rule, families in (
            ("one variance", [[*by_step[0], *by_step[1], *by_step[2]]]),
            ("one a step", by_step),
        ):
            pooled = {}
            for family in families:
                variances = family_variances([matrix.seed_variance for matrix in family])
                for matrix, variance in zip(family, variances, strict=True):
                    pooled[id(matrix)] = replace(matrix, pooled=variance)
            first, *others = (pooled[id(matrix)] for matrix in by_step[2])
            found = [difference_estimate(other, first).p or 1.0 for other in others]
            rates.add(
                f"sequence, {name}, {rule}: one of three equal methods differs",
                min(holm(found)) < ALPHA,
            )
            lost = difference_estimate(first, pooled[id(by_step[0][0])])
            rates.add(f"sequence, {name}, {rule}: the loss is shown", (lost.p or 1.0) < ALPHA)


# --- graders, chance, rare changes ----------------------------------------------------------------


def graders(rates: Rates, random: Random) -> None:
    """Two arms that are right equally often, or 15 points apart; a judge accepts more wrong answers of one, within what
    planted answers allow. The rule accepts 26% of the wrong ones of both (benchmarks/eval/judges.py), and misses 5%."""
    for gain, accepted in ((0.0, (0.05, 0.05)), (0.0, (0.1, 0.05)), (0.0, (0.15, 0.0)), (0.0, (0.3, 0.0)),
                           (0.15, (0.05, 0.05))):  # fmt: skip
        level = np.repeat(random.beta(2, 2, 120), 5)
        graded, by_rule = [], []
        for more, rate in zip((gain, 0.0), accepted, strict=True):
            right = (random.random(600) < level) | (random.random(600) < 2 * more)
            graded.append(matrix_of(right | (random.random(600) < rate), IDS, BY_FIVE))
            seen = np.where(right, random.random(600) > 0.05, random.random(600) < 0.26)
            by_rule.append(float(seen.mean()))
        found = difference_estimate(*graded)
        differs = (found.p or 1.0) < ALPHA
        doubted = differs and is_taste(found.value, by_rule[0] - by_rule[1])
        name = f"judge that accepts {accepted[0]:.0%} and {accepted[1]:.0%} of wrong answers, {100 * gain:.0f} points apart"
        rates.add(f"{name}: differ", differs)
        rates.add(f"{name}: differ, without a doubt", differs and not doubted)


def near_chance(rates: Rates, random: Random) -> None:
    """An accuracy of 15%, 10 points below guessing; documents of alike or single questions, one or three seeds."""
    for sizes, together in (((5,) * 12, 0.2), ((4,) * 60, 0.2), ((4,) * 60, 0.6), ((1,) * 60, 0.0),
                            (tuple(range(1, 31)), 0.2)):  # fmt: skip
        documents = np.repeat(np.arange(len(sizes)), sizes)
        ids = [f"q{i}" for i in range(len(documents))]
        names = [f"d{i}" for i in documents]
        for n_seeds in (1, 3):
            level = np.full(len(sizes), 0.15)
            if together:
                size = 1 / together - 1
                level = random.beta(0.15 * size, 0.85 * size, len(sizes))
            rows = random.random((n_seeds, len(documents))) < level[documents]
            p = chance_p(matrix_of(rows, ids, names), 0.1)
            name = f"{len(sizes)} documents of {min(sizes)} to {max(sizes)}, alike {together}, {n_seeds} seeds"
            rates.add(f"near chance at the lower end, {name}", p is not None and p < ALPHA)


def rare(rates: Rates, random: Random) -> None:
    """Ten arms, one seed: a tenth of documents is learned whole, and as much is lost on the others."""
    for n_documents, n_each in ((20, 10), (40, 5), (100, 5)):
        n = n_documents * n_each
        ids = [f"q{i}" for i in range(n)]
        names = [f"d{i // n_each}" for i in range(n)]
        base_right = random.random(n) < 0.5
        base = matrix_of(base_right, ids, names)
        p = []
        for _ in range(10):
            whole = np.repeat(random.random(n_documents) < 0.1, n_each)
            # A tenth gains half of its questions: the others lose as many, 1/9 of those right.
            lost = random.random(n) < 1 / 9
            p.append(
                difference_estimate(matrix_of(whole | (base_right & ~lost), ids, names), base).p
                or 1.0
            )
        rates.add(
            f"ten null arms that learn a tenth of {n_documents} documents of {n_each} whole",
            min(holm(p)) < ALPHA,
        )


PARTS: dict[str, Callable[[Rates, Random], None]] = {
    "known": known, "proofs": proofs, "sequences": sequences, "graders": graders,
    "near_chance": near_chance, "rare": rare,
}  # fmt: skip


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--studies", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    arguments = parser.parse_args()
    print("| of simulated studies | % (Monte-Carlo error) | studies |\n|---|---|---|")
    for name in arguments.only:
        random, rates = np.random.default_rng(arguments.seed), Rates()
        for _ in range(arguments.studies):
            PARTS[name](rates, random)
        rates.show()


if __name__ == "__main__":
    main()
