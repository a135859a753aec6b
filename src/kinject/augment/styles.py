"""The styles of rewriting: one table entry each, with its prompt, its parser and the rules of its checks."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from kinject.augment import prompts
from kinject.augment.checks.checker import Rules
from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.corpus.passages import sentences
from kinject.types import Message

_FULL_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: (?:(?:de|van|von|der|la|al|bin|of) )?[A-Z][\w’'-]+)+")
_SUBJECT = re.compile(r"\A(?:He|She)\b(?!['’])")
_POSSESSIVE = re.compile(r"\A(?:His|Her)\b(?= [a-z])")


def permute_sentences(title: str, passage: str, seed: int) -> str:
    """Return the sentences of `passage` in another order (Physics of Language Models 3.1, arXiv 2309.14316)."""
    shuffled = sentences(passage)
    Random(seed).shuffle(shuffled)
    return " ".join(shuffled)


def name_fully(title: str, passage: str, seed: int) -> str:
    """Return `passage` with the full name for He, She, His and Her at the beginning of sentences (arXiv 2309.14316).

    The name is that of the last sentence that begins with one; a later surname gets its full form. Sentences before any
    full name stay as they are.
    """
    named = Counter(match[0] for match in _FULL_NAME.finditer(passage))
    current = ""
    rewritten = []
    for sentence in sentences(passage):
        first = _FULL_NAME.match(sentence)
        if first and first[0].split()[0].lower() not in SENTENCE_STARTERS:
            current = first[0]
        if current:
            sentence = _SUBJECT.sub(current, sentence)
            sentence = _POSSESSIVE.sub(f"{current}'s", sentence)
            last = current.split()[-1]
            if named[current] and sentence.startswith(f"{last} "):
                sentence = current + sentence[len(last) :]
        rewritten.append(sentence)
    return " ".join(rewritten)


def tag_source(title: str, passage: str, seed: int) -> str:
    """Return `passage` behind a line that names its source."""
    return f"From {title}:\n{passage}" if title else passage


_FENCED = re.compile(r"\A```[\w-]*\n(.*?)\n?```\Z", re.DOTALL)
_BULLET = re.compile(r"\A\s*(?:[-*•]|\(?\d{1,2}[.)])\s+")
_MARK = re.compile(r"\**(?:(Q)(?:uestion)?|(A)(?:nswer)?)\s{0,3}\d{0,3}\s{0,3}[:.]\**")


def plain_text(answer: str) -> str:
    """Return the text of `answer` without the code fence, JSON object or pair of quotation marks around all of it."""
    text = answer.strip()
    fence = _FENCED.match(text)
    if fence:
        text = fence[1].strip()
    if text.startswith("{"):
        text = _only_string(text)
    for opening, closing in ('""', "“”", "«»"):
        inside = text[1:-1]
        if len(text) > 1 and text[0] == opening and text[-1] == closing and not {opening, closing} & set(inside):
            text = inside.strip()
    return text


def _only_string(text: str) -> str:
    """Return the string in a JSON object with one key, or `text` itself."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    strings = list(value.values()) if isinstance(value, dict) else []
    return strings[0].strip() if len(strings) == 1 and isinstance(strings[0], str) else text


def lines_of(answer: str) -> list[str]:
    """Return the lines of `answer` that are not blank, without bullets and numbers."""
    lines = (_BULLET.sub("", line).strip() for line in plain_text(answer).splitlines())
    return [line for line in lines if line]


def line_text(answer: str) -> str:
    """Return `lines_of` as one text."""
    return "\n".join(lines_of(answer))


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs in `text`."""
    lines: list[tuple[str, str]] = []
    for line in filter(None, (line.strip() for line in text.split("\n"))):
        mark = _MARK.match(line)
        if mark is None and lines and not lines[-1][1]:  # the mark was alone on its line
            lines[-1] = (lines[-1][0], line)
        else:
            lines.append((mark[1] or mark[2], line[mark.end() :].strip()) if mark else ("", line))
    pairs = itertools.pairwise(lines)
    return [(question, reply) for (q, question), (a, reply) in pairs if (q, a) == ("Q", "A") and question and reply]


def pair_text(answer: str) -> str:
    """Return `pairs_of` as one text, "" without pairs."""
    return "\n\n".join(f"Q: {question}\nA: {reply}" for question, reply in pairs_of(plain_text(answer)))


def says_yes(answer: str) -> bool:
    """Return whether `answer` begins with yes."""
    return re.match(r"\W*yes\b", answer, re.IGNORECASE) is not None


Task = Callable[[str, int, tuple[str, ...]], str]
"""(passage, sample, notes of the preparation) -> the task of a prompt."""

_NAME = re.compile(r"\b[A-Z][\w’-]+(?: (?:of |the |de |van |von )?[A-Z][\w’-]+)*")


@dataclass(frozen=True, slots=True)
class Style:
    """A way of rewriting.

    `task` is the task of the prompt, `parse` reads the answer, `rules` are for its checks. `prepare` is sent first, once for
    each passage; the lines of its answer are the notes of the tasks (strategies, facts). With `per_note` each note gets as
    many samples as a passage in other styles. `mechanical` styles, (title, passage, seed) -> text, need no model. `verify`,
    with the text filled in, is sent after the checks; texts without a yes are refused. `rows` turns an accepted text into
    the fields of corpus rows: `text`, or `prompt` and `completion`.
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
        """Return the prompt for a sample."""
        return prompts.ask(title, passage, self.task(passage, sample, notes) if self.task else self.name)


def _paraphrase(passage: str, sample: int, notes: tuple[str, ...]) -> str:
    approach = prompts.APPROACHES[sample % len(prompts.APPROACHES)]
    return f"{prompts.PARAPHRASE}- {approach}\n{prompts.ALONE}"


def _register(name: str) -> Task:
    def task(passage: str, sample: int, notes: tuple[str, ...]) -> str:
        return f"{prompts.REGISTERS[name]}\n{prompts.FAITHFUL}{prompts.ALONE}"

    return task


def entities_of(passage: str) -> list[str]:
    """Return the different names in `passage` by first mention, without those that are part of a longer one."""
    names = dict.fromkeys(name for name in _NAME.findall(passage) if name.split()[0].lower() not in SENTENCE_STARTERS)
    return [name for name in names if not any(name != other and name in other for other in names)]


def _entity_graph(passage: str, sample: int, notes: tuple[str, ...]) -> str:
    names = entities_of(passage)
    # Pairs first, then triples; a passage with fewer than two names has one task about all of it.
    groups = [
        *itertools.islice(itertools.combinations(names, 2), 500),
        *itertools.islice(itertools.combinations(names, 3), 500),
    ]
    chosen = groups[sample % len(groups)] if groups else ("the things in it",)
    listed = ", ".join(chosen[:-1]) + (" and " if len(chosen) > 1 else "") + chosen[-1]
    return prompts.ENTITIES.format(entities=listed) + prompts.ALONE


def _one_of(template: str) -> Task:
    """Return a task that fills `template` with one note after the other."""

    def task(passage: str, sample: int, notes: tuple[str, ...]) -> str:
        note = notes[sample % len(notes)] if notes else ""
        return template.replace("{strategy}", note).replace("{fact}", note) + prompts.ALONE

    return task


def _always(task: str) -> Task:
    return lambda passage, sample, notes: task


def _question_rows(text: str) -> list[dict[str, Any]]:
    return [{"prompt": question, "completion": f" {answer}"} for question, answer in pairs_of(text)]


def _paragraph_rows(text: str) -> list[dict[str, Any]]:
    """Return one row for each paragraph: within a row, the name at the end of the first fact could be copied to the others."""
    return [{"text": paragraph} for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]


def notes_of(answer: str) -> tuple[str, ...]:
    """Return the notes in the answer to a preparation."""
    return tuple(lines_of(answer))


_FREE = Rules(complete=False, shortest=0.0, longest=6.0)
_SAME = Rules(refuse_echo=False, refuse_near=False)

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
"""Name -> style. A new style is one more entry in `_TABLE`."""
