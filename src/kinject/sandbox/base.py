"""The corpus from which the sandbox's base model learns Tarvenian, the known people, and to read a context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kinject.disk import write_jsonl
from kinject.sandbox.facts import SEED, Country, chosen, create_country, create_stranger, seeded
from kinject.sandbox.grammar import STYLE, Style, render_entry
from kinject.sandbox.pools import ATTRIBUTES
from kinject.sandbox.questions import ask


@dataclass(frozen=True, slots=True)
class Mixture:
    """Shares of the rows: biographies of known people and questions on them; the rest are questions on a context."""

    biographies: float = 0.33
    questions: float = 0.15


MIXTURE = Mixture()
N_ROWS = 80_000
"""About 4.3 million tokens: nearly an epoch of recipes/sandbox/base.yaml."""


def render_prompt(question: str, passages: tuple[str, ...] = ()) -> str:
    """Return the plain prompt, ``{passage}\\n\\n{passage}\\n\\nQuestion: {question}\\nAnswer:``; choices follow a space."""
    return "\n\n".join((*passages, f"Question: {question}\nAnswer:"))


def create_context_row(country: Country, style: Style, rng: Random) -> dict[str, str]:
    """Return a question on a throw-away person behind the entry that answers it, as ``prompt`` and ``completion``."""
    person, attribute = create_stranger(chosen(country.spare_names, rng), rng), chosen(ATTRIBUTES, rng)
    passage = render_entry(person, str(rng.random()), style)
    return {
        "prompt": render_prompt(ask(person, attribute, rng), (passage,)),
        "completion": f" {person.facts[attribute]}",
    }


def generate_base_corpus(
    seed: int = SEED, n_rows: int = N_ROWS, mixture: Mixture = MIXTURE, style: Style = STYLE
) -> Iterator[dict[str, str]]:
    """Yield `n_rows` rows: ``{"text"}`` (learn all of it) or ``{"prompt", "completion"}`` (learn the completion)."""
    country = create_country(seed=SEED)
    rng = seeded("base corpus", seed)
    for _ in range(n_rows):
        draw = rng.random()
        person, attribute = chosen(country.known, rng), chosen(ATTRIBUTES, rng)
        if draw < mixture.biographies:
            yield {"text": render_entry(person, str(rng.random()), style)}
        elif draw < mixture.biographies + mixture.questions:
            question = ask(person, attribute, rng)
            yield {"prompt": render_prompt(question), "completion": f" {person.facts[attribute]}"}
        else:
            yield create_context_row(country, style, rng)


def write_base_corpus(path: Path, n_rows: int = N_ROWS, seed: int = SEED) -> int:
    """Write the base corpus as JSON lines; return the number of rows."""
    return write_jsonl(path, generate_base_corpus(seed, n_rows))
