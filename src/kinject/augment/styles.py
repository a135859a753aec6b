"""The styles of rewriting: one entry each in one table, with its own prompt, parser and checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kinject.augment import prompts
from kinject.augment.answers import line_text, lines_of, pair_text, pairs_of, plain_text
from kinject.augment.checks.checker import Rules
from kinject.augment.checks.names import STARTERS
from kinject.augment.mechanical import name_fully, permute_sentences, tag_source
from kinject.types import Message

Task = Callable[[str, int, tuple[str, ...]], str]
"""(passage, sample, notes of the preparation) -> what to ask for."""

_NAME = re.compile(r"\b[A-Z][\w’-]+(?: (?:of |the |de |van |von )?[A-Z][\w’-]+)*")


@dataclass(frozen=True, slots=True)
class Style:
    """A way of rewriting.

    `task` is what to ask a model; where `prepare` is given it is asked first, once a passage, and the lines of its answer
    are the notes of every task (strategies, facts); with `per_note` each note gets as many samples as others get a passage.
    `mechanical` styles, (title, passage, seed) to text, ask nobody.
    `verify`, filled in with the text, is asked after the checks, and what is not answered with yes is refused.
    `rows` turns an accepted text into the fields of corpus rows: `text`, or `prompt` and `completion`.
    """

    name: str
    about: str
    task: Task | None = None
    parse: Callable[[str], str] = plain_text
    rules: Rules = Rules()
    prepare: str = ""
    per_note: bool = False
    verify: str = ""
    mechanical: Callable[[str, str, int], str] | None = None
    rows: Callable[[str], list[dict[str, Any]]] = lambda text: [{"text": text}]

    def messages(self, title: str, passage: str, sample: int, notes: tuple[str, ...] = ()) -> list[Message]:
        """Return what to ask for the given sample."""
        return prompts.ask(title, passage, self.task(passage, sample, notes) if self.task else self.name)


def _paraphrase(passage: str, sample: int, notes: tuple[str, ...]) -> str:
    approach = prompts.APPROACHES[sample % len(prompts.APPROACHES)]
    return f"{prompts.PARAPHRASE}- {approach}\n{prompts.ALONE}"


def _register(name: str) -> Task:
    def task(passage: str, sample: int, notes: tuple[str, ...]) -> str:
        return f"{prompts.REGISTERS[name]}\n{prompts.FAITHFUL}{prompts.ALONE}"

    return task


def entities_of(passage: str) -> list[str]:
    """Return the names in `passage` in the order of their first mention, each once, parts of longer ones left out."""
    found = dict.fromkeys(name for name in _NAME.findall(passage) if name.split()[0].lower() not in STARTERS)
    return [name for name in found if not any(name != other and name in other for other in found)]


def _entity_graph(passage: str, sample: int, notes: tuple[str, ...]) -> str:
    names = entities_of(passage)
    # Pairs first, then triples; a passage with fewer than two names is asked about as a whole.
    groups = [
        *itertools.islice(itertools.combinations(names, 2), 500),
        *itertools.islice(itertools.combinations(names, 3), 500),
    ]
    chosen = groups[sample % len(groups)] if groups else ("the things in it",)
    listed = ", ".join(chosen[:-1]) + (" and " if len(chosen) > 1 else "") + chosen[-1]
    return prompts.ENTITIES.format(entities=listed) + prompts.ALONE


def _one_of(template: str) -> Task:
    """Return a task that puts the notes into `template` in turn."""

    def task(passage: str, sample: int, notes: tuple[str, ...]) -> str:
        note = notes[sample % len(notes)] if notes else ""
        return template.replace("{strategy}", note).replace("{fact}", note) + prompts.ALONE

    return task


def _always(task: str) -> Task:
    return lambda passage, sample, notes: task


def _question_rows(text: str) -> list[dict[str, Any]]:
    return [{"prompt": question, "completion": f" {answer}"} for question, answer in pairs_of(text)]


def _paragraph_rows(text: str) -> list[dict[str, Any]]:
    """Return a row a paragraph: in one row, the name that ends the first fact could be copied to end the others."""
    return [{"text": paragraph} for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def notes_of(answer: str) -> tuple[str, ...]:
    """Return the lines of a preparation's answer."""
    return tuple(lines_of(answer))


_FREE = Rules(complete=False, shortest=0.0, longest=6.0)
_SAME = Rules(echo=False, near=False)

_TABLE = (
    Style("paraphrase", "same facts, same length, other words (arXiv 2312.05934)", _paraphrase),
    Style("plain", "in plain words", _register("plain")),
    Style("scholarly", "as in a journal", _register("scholarly")),
    Style("encyclopedic", "as in an encyclopedia", _register("encyclopedic")),
    Style("dialogue", "as questions and answers", _register("dialogue"), rules=Rules(longest=4.0)),
    Style("entity_graph", "relations of pairs and triples of names (arXiv 2409.07431)", _entity_graph, rules=_FREE),
    Style("active_reading", "study strategies, proposed and applied (arXiv 2508.09494)", _one_of(prompts.STUDY),
          rules=_FREE, prepare=prompts.STRATEGIES),
    Style("questions", "question-answer pairs as SFT rows (arXiv 2309.14316)", _always(prompts.QUESTIONS), pair_text, _FREE,
          rows=_question_rows),
    Style("atomic_facts", "each single fact reworded, the samples counting for each (arXiv 2404.00213)",
          _one_of(prompts.REWORD), rules=_FREE, prepare=prompts.FACTS, per_note=True),
    Style("implications", "what follows, kept when consistent (arXiv 2401.08574)", _always(prompts.IMPLICATIONS), line_text,
          _FREE, verify=prompts.CONSISTENT),
    Style("reversed", "facts the other way round (arXiv 2309.12288)", _always(prompts.REVERSED + prompts.ALONE),
          rows=_paragraph_rows),
    Style("permuted", "sentences in another order, no model", mechanical=permute_sentences, rules=_SAME),
    Style("full_names", "names for pronouns, no model", mechanical=name_fully, rules=_SAME),
    Style("tagged", "behind its title, no model", mechanical=tag_source, rules=_SAME),
)  # fmt: skip

STYLES: Mapping[str, Style] = {style.name: style for style in _TABLE}
"""Name -> style."""
