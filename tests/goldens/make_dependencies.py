"""Write dependencies.json beside this file: what each case of dependencies.py must say, and with which versions it was made.

    python tests/goldens/make_dependencies.py

Numbers under `computed` come from formulas below, written out without the package in question; where one of them does not
agree with the installed package nothing is written. Those under `observed` are what the installed package says.
"""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from fractions import Fraction
from importlib import metadata
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import numpy_llama
from dependencies import (
    COMPUTED,
    DECAY,
    GRADIENTS,
    IDS,
    MERGES,
    OBSERVED,
    PLACED,
    QUERY,
    RATE,
    SENTENCES,
    START,
    TEXT,
)


def _words(text: str) -> list[str]:
    """GPT-2's split for such a text: a space begins the word after it; digits, letters and signs stand apart."""
    kinds = ["d" if c.isdigit() else "l" if c.isalpha() else "s" if c == " " else "p" for c in text]
    words: list[str] = []
    for index, (sign, kind) in enumerate(zip(text, kinds, strict=True)):
        after_space = index > 0 and kinds[index - 1] == "s" and kind != "d"
        goes_on = index > 0 and kinds[index - 1] == kind and kind != "d"
        if words and (after_space or goes_on):
            words[-1] += sign
        else:
            words.append(sign)
    return words


def bpe() -> list[float]:
    """Byte-pair encoding (1508.07909): the most frequent pair is joined; of equal ones that with the lowest ids."""
    words = Counter(tuple(numpy_llama.byte_ids(word)) for word in _words(TEXT))
    merges: list[tuple[tuple[int, int], int]] = []
    for number in range(MERGES):
        pairs: Counter[tuple[int, int]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append((best, numpy_llama.VOCABULARY + number))
        words = Counter({_joined(word, *merges[-1]): count for word, count in words.items()})
    token_ids = [numpy_llama.BOS]
    for word in _words(TEXT + " Kelm é"):
        ids = tuple(numpy_llama.byte_ids(word))
        for pair, whole in merges:
            ids = _joined(ids, pair, whole)
        token_ids.extend(ids)
    return list(map(float, token_ids))


def _joined(word: tuple[int, ...], pair: tuple[int, int], whole: int) -> tuple[int, ...]:
    joined: list[int] = []
    index = 0
    while index < len(word):
        if word[index : index + 2] == pair:
            joined.append(whole)
            index += 2
        else:
            joined.append(word[index])
            index += 1
    return tuple(joined)


def llama() -> list[float]:
    each = numpy_llama.log_probs(numpy_llama.draw(0), IDS[:-1])
    return [float(each[index, token]) for index, token in enumerate(IDS[1:])]


def trl_loss() -> list[float]:
    total, count = 0.0, 0
    for row in (IDS, [*IDS, *IDS[3:]]):
        each = numpy_llama.log_probs(numpy_llama.draw(0), row[:-1])
        total -= sum(float(each[index - 1, row[index]]) for index in range(2, len(row)))
        count += len(row) - 2
    return [total / count]


def schedules() -> list[float]:
    climb = [0.0, 0.5]
    return [
        *climb,
        *((8 - i) / 6 for i in range(2, 8)),
        *climb,
        *((1 + math.cos(math.pi * i / 6)) / 2 for i in range(6)),
    ]


def chat() -> list[float]:
    return list(map(float, b"<u>Kelm?\n<a>"))


def adamw() -> list[float]:
    """1711.05101, algorithm 2, as torch orders it: decay first, by the rate."""
    weight, first, second = np.array(START), np.zeros(4), np.zeros(4)
    for step, gradient in enumerate(map(np.array, GRADIENTS), start=1):
        weight = weight * (1 - RATE * DECAY)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weight = weight - RATE * (first / (1 - 0.9**step)) / (
            np.sqrt(second / (1 - 0.999**step)) + 1e-8
        )
    return list(map(float, weight))


def eight_bit() -> list[float]:
    weight, first, second, values = START[0], 0.0, 0.0, []
    for step, gradient in enumerate((0.5, -0.25, 0.125), start=1):
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        weight -= (
            RATE * (first / (1 - 0.9**step)) / (math.sqrt(second / (1 - 0.999**step)) + 1e-8)
            + RATE * DECAY * weight
        )
        values.append(weight)
    return values


def clipping() -> list[float]:
    norm = math.sqrt(sum(value**2 for value in GRADIENTS[0]))
    return [norm, *(value * 0.5 / (norm + 1e-6) for value in GRADIENTS[0])]


def cross_entropy() -> list[float]:
    """Label 1 in the first row and 3 in the third; a tenth of the weight is spread over all four classes."""
    losses = []
    for row, label in ((GRADIENTS[0], 1), (GRADIENTS[2], 3)):
        whole = math.log(sum(map(math.exp, row)))
        losses.append(
            sum(
                (0.9 * (index == label) + 0.1 / 4) * (whole - value)
                for index, value in enumerate(row)
            )
        )
    return [sum(losses) / 2]


def lora() -> list[float]:
    base, down, up = (
        (np.arange(r * c).reshape(r, c) / 8 + start)
        for r, c, start in ((3, 4, 1), (2, 4, 2), (3, 2, 3))
    )
    return list(map(float, base @ START + 8 / 2 * up @ (down @ START)))


def tests_and_intervals() -> list[float]:
    """Binomial tails in whole numbers; Wilson (1927); Page's L (1963) over every order; z, and t by its closed form for 2."""
    tail = Fraction(2 * sum(math.comb(12, k) for k in range(9, 13)), 2**12)
    z = 1.959963984540054
    fraction, spread = 7 / 9, 1 + z * z / 9
    half = z * math.sqrt(fraction * (1 - fraction) / 9 + z * z / (4 * 81)) / spread
    middle = (fraction + z * z / 18) / spread
    counts = Counter({0: 1})
    for _ in PLACED:
        of_order = Counter(
            sum(rank_index * rank for rank_index, rank in enumerate(order, 1))
            for order in permutations(range(1, 5))
        )
        counts = _convolved(counts, of_order)
    seen = sum(rank_index * rank for row in PLACED for rank_index, rank in enumerate(row, 1))
    page = Fraction(sum(n for total, n in counts.items() if total >= seen), sum(counts.values()))
    fraction = 0.95  # t with 2 degrees: p / sqrt((1 - p^2) / 2), p the share inside
    return [
        float(tail),
        middle - half,
        middle + half,
        float(page),
        z,
        fraction / math.sqrt((1 - fraction**2) / 2),
    ]


def _convolved(first: Counter[int], other: Counter[int]) -> Counter[int]:
    sums: Counter[int] = Counter()
    for a, n in first.items():
        for b, m in other.items():
            sums[a + b] += n * m
    return sums


def bm25() -> list[float]:
    """Lucene's variant (Kamphuis et al. 2020, "Which BM25 do you mean?"), k1 = 1.5, b = 0.75."""
    documents = [sentence.split() for sentence in SENTENCES]
    mean = sum(map(len, documents)) / len(documents)
    scores = []
    for document in documents:
        score = 0.0
        for word in QUERY:
            holding, n = sum(word in other for other in documents), document.count(word)
            rarity = math.log(1 + (len(documents) - holding + 0.5) / (holding + 0.5))
            score += rarity * n / (n + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean))
        scores.append(score)
    return scores


ANSWERS = {
    "byte-level BPE": bpe, "log-probs of a Llama": llama, "schedules": schedules, "blanks of a chat template": chat,
    "the loss of a batch": trl_loss, "AdamW": adamw, "clipping": clipping, "cross-entropy": cross_entropy,
    "8-bit AdamW": eight_bit, "LoRA": lora, "tests and intervals": tests_and_intervals, "BM25": bm25,
}  # fmt: skip


def main() -> None:
    """Compute, compare with what is installed, and write."""
    computed = {name: ANSWERS[name]() for name in COMPUTED}
    for name, case in COMPUTED.items():
        values = case.compute()
        off = max(
            (abs(a - b) / max(1.0, abs(b)) for a, b in zip(values, computed[name], strict=True)),
            default=0.0,
        )
        print(f"{case.package}, {name}: off by {off:.1e}, allowed {case.tolerance:.1e}")
        if off > case.tolerance:
            raise SystemExit(f"{name}: found {values}, computed {computed[name]}")
    cases = (*COMPUTED.values(), *OBSERVED.values())
    versions = {
        name: platform.python_version() if name == "python" else metadata.version(name)
        for name in sorted({case.package for case in cases})
    }
    gold = {
        "versions": versions,
        "computed": computed,
        "observed": {name: case.compute() for name, case in OBSERVED.items()},
    }
    Path(__file__).with_name("dependencies.json").write_text(
        json.dumps(gold, indent=1) + "\n", "utf-8"
    )


if __name__ == "__main__":
    main()
