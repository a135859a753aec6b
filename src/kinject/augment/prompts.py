"""The prompts: the passage in them, the templates of the styles, and the prompt of the judge.

Their text is part of every variant's id and seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from jinja2 import DictLoader, StrictUndefined, Template, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kinject.augment.checks.checker import Rules
from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.language import detect_language, find_script, language_name
from kinject.language.sentences import sentence_ends, sentences
from kinject.llm.prompt_injection import escape_tags, has_injection
from kinject.recipe.yaml_lines import read_yaml
from kinject.types import Document, Message, Passage

STYLE_FILES = Path(__file__).parent / "style_files"
"""The folder of the shipped styles, and of the texts that they share."""
_PASSAGE = re.compile(r"<passage>\n(.*)\n</passage>", re.DOTALL)
_QUOTED = re.compile(r"[“«„「].{2,300}?[”»“」]|\"[^\"\n]{2,300}\"", re.DOTALL)
# Marks are looked for before patterns: that, and lines in place of searches over lines, took a
# prompt from 91 to 43 µs.
_QUOTES = '“«„「"'
_CODE = re.compile(r"^```|`[^`\n]+`|^(?: {4}|\t)\S", re.MULTILINE)
_CODE_MARKS = ("`", "    ", "\t")
_ROW = re.compile(
    r"[ \t]*(?:\|.*\||[-*•][ \t].*|\d{1,3}[.)][ \t].*|[^\s|:.]{1,40}[ \t]*[:=][ \t]*\S.{0,60})\Z"
)
"""A line of a table, of a list, or of keys and values."""
_TABLE_RULE = re.compile(r"[ \t]*\|[\s|:-]*-[\s|:-]*")
_HEADING = re.compile(r"^#{1,6}[ \t]+\S", re.MULTILINE)
_NAME = re.compile(r"\b[A-Z][\w’-]+(?: (?:of |the |de |van |von )?[A-Z][\w’-]+)*")
_NUMBER = re.compile(r"\d+")
_INCLUDE = re.compile(r'^[ \t]*\{% include "(\w+)" %\}\n', re.MULTILINE)
_MOST_QUESTIONS = 12


@dataclass(frozen=True, slots=True)
class Source:
    """The passage in a prompt: the title of its document, the headings above it, its text."""

    title: str
    text: str
    headings: tuple[str, ...] = ()


def source_of(document: Document, passage: Passage) -> Source:
    """Return the passage as prompts show it."""
    # The path begins with the title, which has a line of its own in a prompt.
    path = passage.path
    return Source(document.title, passage.shown, path[path[:1] == (document.title.strip(),) :])


def entities_of(passage: str) -> list[str]:
    """Return the different names in `passage` by first mention, without those that are part of a
    longer one."""
    names = dict.fromkeys(
        name for name in _NAME.findall(passage) if name.split()[0].lower() not in SENTENCE_STARTERS
    )

    def is_part(name: str) -> bool:
        return any(name != other and name in other for other in names)

    return [name for name in names if not is_part(name)]


def language_line(text: str) -> str:
    """Return the rule that names the language of a passage."""
    return render(shared_texts()["language"], Source("", text), {})


# Each sample of each style asks for the same values of its passage.
@lru_cache(maxsize=1024)
def describe(source: Source, name: str) -> Any:
    """Return the value of a variable of `VARIABLES` for a passage."""
    return VARIABLES[name](source)


def has_quotations(text: str) -> bool:
    """Return whether `text` has words in quotation marks."""
    return any(map(text.__contains__, _QUOTES)) and bool(_QUOTED.search(text))


def has_code(text: str) -> bool:
    """Return whether `text` has code: in backticks, fenced or indented."""
    return any(map(text.__contains__, _CODE_MARKS)) and bool(_CODE.search(text))


def _n_in_rows(text: str) -> int:
    """Return the characters of `text` in rows of tables and lists and in keys with values."""
    return sum(len(line) for line in text.split("\n") if _ROW.match(line))


def _n_statements(text: str) -> int:
    """Return the sentences of `text`, without its headings, and its rows of tables and lists,
    without their heads."""
    lines = text.split("\n")
    rows = {number for number, line in enumerate(lines) if _ROW.match(line)}
    heads = {number for number in rows if _TABLE_RULE.fullmatch(lines[number])}
    heads |= {number - 1 for number in heads}
    prose = (
        line for number, line in enumerate(lines) if number not in rows and not _HEADING.match(line)
    )
    return len(sentences("\n".join(prose))) + len(rows - heads)


def _marks_names(text: str) -> bool:
    """Return whether the language of `text` is known to write names, and only them, with a capital
    letter."""
    return find_script(text) in ("Latin", "Cyrillic", "Greek") and detect_language(text) != "de"


def _relates(source: Source) -> bool:
    """Return whether a passage has two names or numbers, or is in a language whose names are not
    known by capitals."""
    n_named = len(entities_of(source.text)) + len(_NUMBER.findall(source.text))
    return n_named > 1 or not _marks_names(source.text)


def _render_source(source: Source) -> str:
    """Return the passage in its tags, below the title of its document and the headings above it.

    Title and headings that speak to a model are left out, and nothing in the passage ends its tags.
    """
    above = [heading for heading in source.headings if heading != source.title]
    lines = []
    # Title and headings come from the document, too, but stand outside of its tags.
    if source.title and not has_injection(source.title):
        lines.append(f"The passage is from a text called {source.title!r}.")
    if above and not has_injection(*above):
        lines.append(f"It stands under the headings {' > '.join(map(repr, above))}.")
    passage = f"<passage>\n{escape_tags(source.text)}\n</passage>"
    if not lines:
        return passage
    return escape_tags("\n".join(lines)) + "\n\n" + passage


def _title(source: Source) -> str:
    if has_injection(source.title):
        return ""
    return source.title


def _language(source: Source) -> str:
    return language_name(detect_language(source.text))


def _quotations(source: Source) -> bool:
    return has_quotations(source.text)


def _code(source: Source) -> bool:
    return has_code(source.text)


def _headings_inside(source: Source) -> bool:
    return "#" in source.text and bool(_HEADING.search(source.text))


def _table(source: Source) -> bool:
    return any(map(_ROW.match, source.text.split("\n")))


def _prose(source: Source) -> bool:
    return 2 * _n_in_rows(source.text) < len(source.text)


def _n_sentences(source: Source) -> int:
    return len(sentences(source.text))


def _n_questions(source: Source) -> int:
    return max(1, min(_MOST_QUESTIONS, _n_statements(source.text)))


def _n_names(source: Source) -> int:
    return len(entities_of(source.text))


VARIABLES: Mapping[str, Callable[[Source], Any]] = {
    "source": _render_source,
    "title": _title,
    "language": _language,
    "quotations": _quotations,
    "code": _code,
    "headings_inside": _headings_inside,
    "table": _table,
    "prose": _prose,
    "n_sentences": _n_sentences,
    "n_questions": _n_questions,
    "n_names": _n_names,
    "relations": _relates,
}
"""Name of a variable of the templates -> its value for a passage.

`table`: it has rows of a table or a list, or keys with values. `prose`: these are less than half of
it.
"""


@cache
def shared_texts() -> Mapping[str, str]:
    """Return the texts that templates may include, by name."""
    return dict(read_yaml(STYLE_FILES / "shared.yaml").root)


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of the templates: no attribute of Python is in reach, an unknown name
    is an error."""
    made = ImmutableSandboxedEnvironment(
        loader=DictLoader(shared_texts()),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # A prompt is no HTML; `escape_tags` makes harmless what could end its tags.
        autoescape=False,
    )
    made.globals.clear()  # nothing here needs them, and each template would get a copy
    return made


def render(template: str, source: Source, others: Mapping[str, Any]) -> str:
    """Return `template`, filled in for a passage, with `others` besides `VARIABLES`.

    Raises jinja2's errors, which the check of a style file rules out.
    """
    compiled, names, constant = _compiled(template)
    if constant is not None:
        return constant
    # Only those that are used: Jinja as it comes took 364 µs a prompt; with this, no globals, and
    # shared texts put in beforehand it takes 82.
    variables = {name: describe(source, name) for name in names & VARIABLES.keys()}
    return str(compiled.render(variables | dict(others))).strip()


@lru_cache(maxsize=1024)
def _compiled(template: str) -> tuple[Template, frozenset[str], str | None]:
    """Return the compiled template, the variables that it uses, and its text if it uses none."""
    # An include on a line of its own is put in here: jinja2 takes longer for one than for all the
    # rest of a prompt.
    text = _INCLUDE.sub(_shared_text, template)
    compiled = environment().from_string(text)
    names = frozenset(meta.find_undeclared_variables(environment().parse(text)))
    constant = None
    if not names:
        constant = compiled.render().strip()
    return compiled, names, constant


def _shared_text(include: re.Match[str]) -> str:
    return shared_texts().get(include[1], include[0])


@cache
def first_words(template: str) -> str:
    """Return the first line of a template up to its first variable: it differs between the prompts
    of the styles."""
    texts = (
        node.data.strip() for node in environment().parse(template).find_all(nodes.TemplateData)
    )
    return next(text.splitlines()[0] for text in texts if text)


_REWRITING = re.compile(r"<rewriting>\n(.*)\n</rewriting>", re.DOTALL)
_SENTENCE_NUMBER = re.compile(r"\[\d+\] ")


def judge_messages(
    title: str, passage: str, text: str, rules: Rules | None = None
) -> list[Message]:
    """Return the messages that ask whether `text` adds or changes a fact of `passage`, as a style's
    `rules` allow."""
    explains = rules is not None and rules.explains
    shown = {"text": number_sentences(escape_tags(text)), "explains": explains}
    _, user_message = task_messages(
        title, passage, render(shared_texts()["judge"], Source(title, passage), shown)
    )
    return [_judge_system(), user_message]


def statements_messages(title: str, passage: str) -> list[Message]:
    """Return the messages that ask a judge for short statements of what `passage` says."""
    _, user_message = task_messages(
        title, passage, render(shared_texts()["statements"], Source(title, passage), {})
    )
    return [_judge_system(), user_message]


def stated_messages(statements: Sequence[str], text: str) -> list[Message]:
    """Return the messages that ask a judge which of the `statements` a text tells."""
    listed = "\n".join(
        f"{number}. {escape_tags(line)}" for number, line in enumerate(statements, 1)
    )
    shown = {"text": escape_tags(text), "statements": listed}
    return [
        _judge_system(),
        {"role": "user", "content": render(shared_texts()["told"], Source("", text), shown)},
    ]


def _judge_system() -> Message:
    return {"role": "system", "content": shared_texts()["judge_system"].strip()}


def number_sentences(text: str) -> str:
    """Return `text` with the number of each sentence before it, as in ``[1] It rained. [2] He
    left.``"""
    numbered, start = "", 0
    for n, end in enumerate(sentence_ends(text), 1):
        sentence = text[start:end].lstrip()
        space = text[start : end - len(sentence)]
        numbered += f"{space}[{n}] {sentence}"
        start = end
    return numbered + text[start:]


def rewriting_of(messages: Sequence[Message]) -> str | None:
    """Return the rewriting that `messages` ask a judge about, None if they ask for something
    else."""
    rewriting = _REWRITING.search(_last_content(messages))
    if rewriting is None:
        return None
    return _SENTENCE_NUMBER.sub("", rewriting[1])


def _last_content(messages: Sequence[Message]) -> str:
    if not messages:
        return ""
    return messages[-1]["content"]


def task_messages(
    title: str, passage: str, task: str, headings: tuple[str, ...] = ()
) -> list[Message]:
    """Return the messages of a `task` on a passage.

    The passage comes before the task, which changes from sample to sample, so that servers can
    reuse the prefix.
    """
    content = f"{_render_source(Source(title, passage, headings))}\n\n{task}"
    return [
        {"role": "system", "content": shared_texts()["system"].strip()},
        {"role": "user", "content": content},
    ]


def passage_of(messages: Sequence[Message]) -> str:
    """Return the passage that `messages` are about. Raises `ValueError` if they hold none."""
    match = _PASSAGE.search(_last_content(messages))
    if match is None:
        raise ValueError("the last message holds no <passage>")
    return match[1]
