"""The prompts: what they show of a passage, the templates of the styles, and the prompt of the judge.

Their text is part of every variant's id and seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, StrictUndefined, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kinject.augment.checks.language import detect_language, find_script, language_name
from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.augment.checks.prompt_injection import escape_tags, has_injection
from kinject.corpus.passages import sentence_ends, sentences
from kinject.recipe.yaml_lines import read_yaml
from kinject.types import Message

STYLE_FILES = Path(__file__).parent / "style_files"
"""The folder of the shipped styles, and of the texts that they share."""
_PASSAGE = re.compile(r"<passage>\n(.*)\n</passage>", re.DOTALL)
_QUOTED = re.compile(r"[“«„「].{2,300}?[”»“」]|\"[^\"\n]{2,300}\"", re.DOTALL)
_CODE = re.compile(r"^```|`[^`\n]+`|^(?: {4}|\t)\S", re.MULTILINE)
_ROW = re.compile(
    r"^[ \t]*(?:\|.*\||[-*•][ \t].*|\d{1,3}[.)][ \t].*|[^\s|:.]{1,40}[ \t]*[:=][ \t]*\S.{0,60})$", re.MULTILINE
)
"""A line of a table, of a list, or of keys and values."""
_HEADING = re.compile(r"^#{1,6}[ \t]+\S", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z][\w’-]+(?: (?:of |the |de |van |von )?[A-Z][\w’-]+)*")
_NUMBER = re.compile(r"\d+")
_MOST_QUESTIONS = 12


@dataclass(frozen=True, slots=True)
class Source:
    """What a prompt shows of a passage: the title of its document, the headings above it, its text."""

    title: str
    text: str
    headings: tuple[str, ...] = ()


def entities_of(passage: str) -> list[str]:
    """Return the different names in `passage` by first mention, without those that are part of a longer one."""
    names = dict.fromkeys(name for name in _NAME.findall(passage) if name.split()[0].lower() not in SENTENCE_STARTERS)
    return [name for name in names if not any(name != other and name in other for other in names)]


def language_line(text: str) -> str:
    """Return the rule that names the language of a passage."""
    return render(shared_texts()["language"], {"language": language_name(detect_language(text))})


@lru_cache(maxsize=256)
def describe_source(source: Source) -> Mapping[str, Any]:
    """Return the variables that templates may use for a passage.

    A table is a passage of which half or more are rows of tables, lists, or keys and values.
    """
    text = source.text
    names = entities_of(text)
    n_rows = sum(len(match[0]) for match in _ROW.finditer(text))
    n_sentences = len(sentences(text))
    return {
        "source": _render_source(source), "title": "" if has_injection(source.title) else source.title,
        "language": language_name(detect_language(text)),
        "quotations": bool(_QUOTED.search(text)), "code": bool(_CODE.search(text)),
        "headings_inside": bool(_HEADING.search(text)), "table": n_rows > 0, "prose": 2 * n_rows < len(text),
        "n_sentences": n_sentences, "n_questions": max(1, min(_MOST_QUESTIONS, n_sentences)),
        "n_names": len(names), "relations": len(names) + len(_NUMBER.findall(text)) > 1 or not _marks_names(text),
    }  # fmt: skip


def _marks_names(text: str) -> bool:
    """Return whether the language of `text` is known to write names, and only them, with a capital letter."""
    return find_script(text) in ("Latin", "Cyrillic", "Greek") and detect_language(text) != "de"


def _render_source(source: Source) -> str:
    """Return the passage in its tags, below the title of its document and the headings above it.

    Title and headings that speak to a model are left out, and nothing in the passage ends its tags.
    """
    above = [heading for heading in source.headings if heading != source.title]
    lines = []
    if source.title and not has_injection(source.title):
        lines.append(f"The passage is from a text called {source.title!r}.")
    if above and not has_injection(*above):
        lines.append(f"It stands under the headings {' > '.join(map(repr, above))}.")
    heading = escape_tags("\n".join(lines) + "\n\n") if lines else ""
    return f"{heading}<passage>\n{escape_tags(source.text)}\n</passage>"


@cache
def shared_texts() -> Mapping[str, str]:
    """Return the texts that templates may include, by name."""
    return dict(read_yaml(STYLE_FILES / "shared.yaml").root)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of the templates: no attribute of Python is in reach, an unknown name is an error."""
    return ImmutableSandboxedEnvironment(
        loader=DictLoader(shared_texts()), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, autoescape=False,
    )  # fmt: skip


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return `template`, filled in. Raises jinja2's errors, which the check of a style file rules out."""
    return str(_compiled(template).render(variables)).strip()


@lru_cache(maxsize=1024)
def _compiled(template: str) -> Any:
    return environment().from_string(template)


def first_words(template: str) -> str:
    """Return the first line of a template up to what is filled in: it tells the prompts of the styles apart."""
    texts = (node.data.strip() for node in environment().parse(template).find_all(nodes.TemplateData))
    return next(text.splitlines()[0] for text in texts if text)


SYSTEM = shared_texts()["system"].strip()


JUDGE = shared_texts()["judge"]
_REWRITING = re.compile(r"<rewriting>\n(.*)\n</rewriting>", re.DOTALL)
_SENTENCE_NUMBER = re.compile(r"\[(\d+)\] ")


def judge_messages(
    title: str, passage: str, text: str, *, complete: bool = True, statements: str = ""
) -> list[Message]:
    """Return the messages that ask whether `text` keeps the facts of `passage`, all of them if `complete`.

    `statements` is a list of what the passage states, "" without one. It comes before the text, so that servers can reuse it.
    """
    variables = {
        "text": number_sentences(escape_tags(text)), "complete": complete, "statements": escape_tags(statements),
        "language": language_name(detect_language(passage)),
    }  # fmt: skip
    _, asked = ask(title, passage, render(JUDGE, variables))
    return [{"role": "system", "content": shared_texts()["judge_system"].strip()}, asked]


def statement_messages(title: str, passage: str) -> list[Message]:
    """Return the messages that ask a judge for the statements of a passage."""
    _, asked = ask(title, passage, shared_texts()["statements"].strip())
    return [{"role": "system", "content": shared_texts()["judge_system"].strip()}, asked]


def number_sentences(text: str) -> str:
    """Return `text` with the number of each sentence before it, as in ``[1] It rained. [2] He left.``"""
    ends = sentence_ends(text)
    parts = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    numbered = (f"{part[: len(part) - len(part.lstrip())]}[{n}] {part.lstrip()}" for n, part in enumerate(parts, 1))
    return "".join(numbered) + text[ends[-1] if ends else 0 :]


def rewriting_of(messages: Sequence[Message]) -> str | None:
    """Return the rewriting that `messages` ask a judge about, None if they ask for something else."""
    found = _REWRITING.search(messages[-1]["content"]) if messages else None
    if found is None:
        return None
    parts, position, number = [], 0, 1
    for match in _SENTENCE_NUMBER.finditer(found[1]):
        if int(match[1]) == number:
            parts.append(found[1][position : match.start()])
            position, number = match.end(), number + 1
    return "".join([*parts, found[1][position:]])


def ask(title: str, passage: str, task: str, headings: tuple[str, ...] = ()) -> list[Message]:
    """Return the messages that set `task` on a passage.

    The passage comes before the task, which changes from sample to sample, so that servers can reuse the prefix.
    """
    content = f"{_render_source(Source(title, passage, headings))}\n\n{task}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": content}]


def passage_of(messages: Sequence[Message]) -> str:
    """Return the passage that `messages` are about. Raises `ValueError` if they hold none."""
    found = _PASSAGE.search(messages[-1]["content"]) if messages else None
    if found is None:
        raise ValueError("the last message holds no <passage>")
    return found[1]
