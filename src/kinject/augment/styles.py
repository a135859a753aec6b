"""The styles of rewriting. Those that a model writes are YAML files; a recipe may name more of
them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from itertools import combinations
from math import comb
from pathlib import Path
from random import Random
from typing import Any, Literal

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes

from kinject.augment.answers import (
    MECHANICAL,
    PARSERS,
    Mechanical,
    Repaired,
    pairs_of,
    plain_text,
    quoted_of,
    repair,
)
from kinject.augment.checks.checker import Rules
from kinject.augment.prompts import (
    STYLE_FILES,
    VARIABLES,
    Source,
    describe,
    environment,
    render,
    shared_texts,
)
from kinject.disk import content_id
from kinject.errors import InputError, Problem, RecipeError, one_line
from kinject.recipe import AugmentSection
from kinject.recipe.check import Checker as FieldChecker
from kinject.recipe.check import suggestion
from kinject.recipe.sections import option
from kinject.recipe.yaml_lines import YamlFile, read_yaml
from kinject.terminal import format_count
from kinject.types import Message

Item = Mapping[str, Any]
"""The items in a prompt beside the passage: name of a preparation -> one of its items, or several
of them."""
_ALL_IN_MEMORY = 20_000
"""Combinations that are listed and shuffled; of more, this many are drawn."""
SKIPPED = {
    "prose": "mostly a table, a list or keys and values",
    "relations": "no two names or numbers to relate",
    "items": "the model named nothing in it to write about",
}
"""Need of a style -> the reason for which a passage without it is skipped. `items` are those of its
preparations."""
# A template is a program: its expressions raise Python's errors, too.
_RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_EXAMPLE = Source(
    "Title", "Mara Lind was born in Arvika in 1931. She built a bridge.", ("Heading",)
)


@dataclass(frozen=True)
class Preparation:
    """A request before those for the variants. Each line (or section) of its answer is an item of
    its name."""

    name: str = option(help="The name of one item, which later templates use.")
    prompt: str = option(help="Template of the user message.")
    for_each: str | None = option(None, help="Send it for each item of this earlier preparation.")
    parser: Literal["lines", "sections", "text"] = option("lines", help="How the answer is read.")
    in_passage: bool = option(False, help="Keep only items that are in the passage word for word.")
    expected: int = option(
        1, help="Items that an answer is expected to have, for --dry-run.", min=1
    )
    per: Literal["answer", "sentence", "name"] = option(
        "answer", help="The unit for which `expected` counts."
    )


@dataclass(frozen=True)
class Variation:
    """A line by which the samples of a passage differ, for passages that have what it `needs`."""

    text: str = option(help="The line.")
    needs: tuple[Literal["prose", "relations"], ...] = option((), help="Needs of the passage.")


@dataclass(frozen=True)
class Style:
    """A style file: the prompts for variants, the parser and checks of the answers, and their
    corpus rows."""

    name: str = option(help="Its name in augment.styles.", nonempty=True)
    about: str = option(help="One line for lists.", nonempty=True)
    source: str = option("", help="The publication that it follows.")
    system: str = option('{% include "system" %}', help="Template of the system message.")
    user: str = option(
        "", help="Template of the user message. It must use {{ source }}, the passage in its tags."
    )
    variations: tuple[Variation | str, ...] = option(
        (), help="Lines for {{ variation }}, one after the other."
    )
    scope: Literal["passage", "document", "pair"] = option(
        "passage",
        help="The text in one prompt; "
        "a pair are passages of two documents that share a name, {{ entity }}.",
    )
    needs: tuple[Literal["prose", "relations"], ...] = option(
        (), help="Other passages are skipped."
    )
    prepare: tuple[Preparation, ...] = option((), help="Requests before those for the variants.")
    combine: tuple[int, ...] = option(
        (), help="Prompts are about all subsets of these sizes of the items.", min=1
    )
    keeps: str | None = option(None, help="A preparation: each text keeps all facts of its item.")
    none: bool = option(False, help="The answer NONE is accepted: there is nothing to write.")
    parser: Literal["text", "lines", "pairs", "quoted", "sections"] = option(
        "text", help="How the answer is read."
    )
    rules: Rules = option(Rules(), help="Rules of the checks.")
    verify: str = option(
        "", help="Template of a question about {{ text }}; without a yes the text is refused."
    )
    rows: Literal["text", "paragraphs", "pairs", "quoted"] | tuple[str, ...] = option(
        "text",
        help="Corpus rows of a text; "
        "or a list of templates of instructions that it answers, for SFT rows.",
    )
    chat: Literal["none", "turns"] | tuple[str, ...] = option(
        "none",
        help="With augment.messages: its questions and answers are turns; "
        "or templates of the user's question.",
    )

    @property
    def mechanical(self) -> Mechanical | None:
        """The function of a style that needs no model."""
        _, function = MECHANICAL.get(self.name, ("", None))
        return function

    def missing_need(self, source: Source) -> str:
        """Return the need of this style that a passage lacks, "" if it has all."""
        return _missing(self.needs, source)

    def read(self, answer: str, title: str, passage: str) -> Repaired:
        """Return the texts of variants in `answer`, without what surrounds them.

        Alternatives are texts of their own where a text is one row.
        """
        if self.mechanical:
            return Repaired((answer,))
        # Parts of a list, of pairs or of turns are no alternatives to each other.
        splits = self.parser == "text" and self.rows == "text" and self.chat != "turns"
        repaired = repair(
            plain_text(answer), title, passage, splits=splits, loops=self.parser == "text"
        )
        texts = (PARSERS[self.parser](text) for text in repaired.texts)
        return Repaired(tuple(filter(None, texts)), repaired.repairs)

    def messages(self, source: Source, sample: int, item: Item) -> list[Message]:
        """Return the prompt for a sample, about an item of the preparations."""
        return self._render(self.user, source, sample, item)

    def preparation(self, step: Preparation, source: Source, item: Item) -> list[Message]:
        """Return the prompt of a preparation."""
        return self._render(step.prompt, source, 0, item)

    def verification(self, source: Source, item: Item, text: str) -> list[Message]:
        """Return the question whether the passage supports an accepted text."""
        return self._render(self.verify, source, 0, {**item, "text": text})

    def _render(self, template: str, source: Source, sample: int, item: Item) -> list[Message]:
        variations = _fitting(self.variations, source)
        others = {**item, "sample": sample, "variation": variations[sample % len(variations)]}
        try:
            system, user = render(self.system, source, others), render(template, source, others)
        except _RENDER_ERRORS as error:
            raise InputError(
                f"style {self.name}: its template cannot be filled in for a passage: "
                f"{one_line(error)}."
            ) from error
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]

    def corpus_rows(
        self, text: str, item: Item, sample: int, chat: Source | None = None
    ) -> list[dict[str, Any]]:
        """Return the fields of the corpus rows of an accepted text: ``text``, or ``prompt`` and
        ``completion``.

        With `chat`, the text shown in the prompt, they are ``messages`` for a style that
        `writes_chat`. A template about the title keeps the text of a passage without one as it is.
        Rows of ``quoted`` have ``question``, ``quotation`` and ``answer``, for a prompt with
        passages.
        """
        if self.rows == "quoted":
            names = ("question", "quotation", "answer")
            return [dict(zip(names, triple, strict=True)) for triple in quoted_of(text)]
        if self.rows == "pairs":
            pairs = pairs_of(text)
            if chat is not None:
                return [{"messages": _turns([pair])} for pair in pairs]
            # The space belongs to the completion: the last token of a prompt that ends in one is
            # not that of the whole text.
            return [{"prompt": question, "completion": f" {answer}"} for question, answer in pairs]
        if chat is not None and self.chat == "turns":
            pairs = pairs_of(text)
            return [{"messages": _turns(pairs)} if pairs else {"text": text}]
        if isinstance(self.rows, tuple) and self.rows:
            return [_prompted_row(self.rows, text, item, sample, chat)]
        if chat is not None and isinstance(self.chat, tuple) and self.chat:
            return [_prompted_row(self.chat, text, item, sample, chat)]
        if self.rows == "paragraphs":
            # In one row, a name at the end of the first fact could be copied to the others.
            paragraphs = re.split(r"\n\s*\n", text)
            return [{"text": paragraph} for paragraph in paragraphs if paragraph.strip()]
        return [{"text": text}]

    @property
    def makes_instructions(self) -> bool:
        """Whether its rows have a prompt and a completion."""
        return self.rows not in ("text", "paragraphs")

    @property
    def writes_chat(self) -> bool:
        """Whether its rows can be conversations."""
        return self.makes_instructions or self.chat != "none"

    def makes_rows_apart(self, *, messages: bool) -> bool:
        """Whether its rows are no texts, but prompts or, with `messages`, conversations."""
        return self.makes_instructions or (messages and self.writes_chat)

    def schedule(self, items: Sequence[Item], seed: str) -> Iterator[Item]:
        """Yield the items of each prompt, in order: all subsets of the sizes in `combine`.

        All subsets of a size come before those of the next, in an order drawn by `seed`; of very
        many, a sample.
        """
        name = self.prepare[-1].name
        for size in self.combine:
            for subset in _subsets([item[name] for item in items], size, Random(f"{seed} {size}")):
                yield {name: subset}

    @property
    def can_name_facts(self) -> bool:
        """Whether its prompt can ask for facts by name: a model writes a text from a passage
        alone."""
        is_text = self.scope == "passage" and self.rows == "text"
        return is_text and not self.mechanical and not self.prepare

    @property
    def literals(self) -> tuple[str, ...]:
        """All text of its prompts that is not filled in: no answer may repeat it."""
        prepare = (step.prompt for step in self.prepare)
        templates = (self.system, self.user, self.verify, *prepare)
        return _literals(templates, _texts_of(self.variations))

    @property
    def identity(self) -> str:
        """A hash of its file without the descriptions: a part of its variants' ids."""
        return _identity(self)


def _prompted_row(
    templates: Sequence[str], text: str, item: Item, sample: int, chat: Source | None
) -> dict[str, Any]:
    """Return the row of a text that answers the prompt of one of the `templates`."""
    prompt = render(templates[sample % len(templates)], chat or _EXAMPLE, item)
    if chat is None:
        return {"prompt": prompt, "completion": f" {text}"}
    if not prompt:
        return {"text": text}
    return {"messages": _turns([(prompt, text)])}


def _turns(pairs: Sequence[tuple[str, str]]) -> list[Message]:
    turns: list[Message] = []
    for question, answer in pairs:
        turns.append({"role": "user", "content": question})
        turns.append({"role": "assistant", "content": answer})
    return turns


def _missing(needs: Iterable[str], source: Source) -> str:
    return next((need for need in needs if not describe(source, need)), "")


def _subsets(names: Sequence[str], size: int, rng: Random) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of `names` in an order drawn by `rng`; of very many, a sample. Each keeps
    the order of `names`."""
    if comb(len(names), size) <= _ALL_IN_MEMORY:
        subsets = list(combinations(names, size))
        rng.shuffle(subsets)
        yield from subsets
        return
    drawn: set[tuple[int, ...]] = set()
    while len(drawn) < _ALL_IN_MEMORY:
        subset = tuple(sorted(rng.sample(range(len(names)), size)))
        if subset not in drawn:
            drawn.add(subset)
            yield tuple(names[index] for index in subset)


_DEFAULT_RULES = {
    "complete": True,
    "refuse_echo": True,
    "refuse_near": True,
    "shortest": 0.35,
    "longest": 2.5,
    "explains": False,
}
"""The rules in ids as they were when the first ids were made: what a run folder holds is found
again."""


@lru_cache(maxsize=64)
def _identity(style: Style) -> str:
    named = asdict(style)
    default = asdict(Rules())
    # Only rules that are on: a new one, off in all styles, once changed every id, and with them the
    # draws of the studies (98.7% of new facts in the demo instead of 98.2%).
    changed = {name: value for name, value in named["rules"].items() if value != default[name]}
    # It changes no request either.
    changed.pop("factless", None)
    if changed.pop("complete", False):
        changed["all_facts"] = True
    named["rules"] = _DEFAULT_RULES | changed
    return content_id(
        # Not `chat`: it shapes rows, so that switching to conversations costs no request.
        {key: value for key, value in named.items() if key not in ("about", "source", "chat")}
    )


@lru_cache(maxsize=64)
def _fitting(variations: tuple[Variation | str, ...], source: Source) -> tuple[str, ...]:
    """Return the lines whose need the passage has, an empty one if there is none."""
    lines = (
        line for line in variations if isinstance(line, str) or not _missing(line.needs, source)
    )
    return _texts_of(lines) or ("",)


def _texts_of(lines: Iterable[Variation | str]) -> tuple[str, ...]:
    return tuple(line.text if isinstance(line, Variation) else line for line in lines)


@lru_cache(maxsize=64)
def _literals(templates: tuple[str, ...], lines: tuple[str, ...]) -> tuple[str, ...]:
    texts = list(lines)
    for template in (*templates, *shared_texts().values()):
        parsed = environment().parse(template).find_all(nodes.TemplateData)
        texts += (node.data for node in parsed if node.data.strip())
    return tuple(texts)


def read_style(path: Path, *, templates: bool = True) -> Style:
    """Return the style in a YAML file. Raises `RecipeError` with every fault in it, each with its
    line.

    Without `templates` they are not tried: of the shipped styles a test does so.
    """
    file = read_yaml(path)
    problems: list[Problem] = []

    def report(key: tuple[str | int, ...], message: str) -> None:
        problems.append(Problem(key, message, file.location(key)))

    style = FieldChecker(report).section(Style, file.root, ())
    if style is not None:
        for key, message in _structure_faults(style):
            report(key, message)
        if templates:
            problems += _template_faults(style, file)
    if problems or style is None:
        raise RecipeError(problems)
    return style


_Fault = tuple[tuple[str | int, ...], str]
"""The key of a style file, and what is wrong with its value."""


def _structure_faults(style: Style) -> Iterator[_Fault]:
    """Yield the faults of keys that do not fit together."""
    if not _NAME.fullmatch(style.name):
        allowed = "allowed: small letters, digits and _, beginning with a letter."
        yield ("name",), f"found {style.name!r}, {allowed}"
    names = [step.name for step in style.prepare]
    yield from _preparation_faults(style)
    if style.keeps is not None and style.keeps not in names:
        yield ("keeps",), f"names no preparation.{suggestion(style.keeps, names)}"
    if style.combine and len(names) != 1:
        found = f"found {format_count(len(names), 'preparation')}"
        yield ("combine",), f"{found}; subsets are made of the items of one."
    if style.rows in ("pairs", "quoted") and style.parser != style.rows:
        yield ("rows",), f"{style.rows} needs parser: {style.rows}."
    if style.chat != "none" and style.makes_instructions:
        yield (
            ("chat",),
            "its rows are prompts with answers already, and become conversations by themselves.",
        )
    if style.rules.quotes and style.parser != "quoted":
        yield ("rules", "quotes"), "needs parser: quoted."


def _preparation_faults(style: Style) -> Iterator[_Fault]:
    taken = set(_VARIABLES)
    before: str | None = None
    for index, step in enumerate(style.prepare):
        if not _NAME.fullmatch(step.name) or step.name in taken:
            expected = "expected a name of small letters that is not in use."
            yield ("prepare", index, "name"), f"found {step.name!r}, {expected}"
        if step.for_each != before:
            expected = "nothing: it is the first"
            if before is not None:
                expected = f"{before}, the preparation before it"
            yield ("prepare", index, "for_each"), f"found {step.for_each!r}, expected {expected}."
        taken.add(step.name)
        before = step.name


def _template_faults(style: Style, file: YamlFile) -> Iterator[Problem]:
    """Yield the faults of templates, each with the line in the file."""
    for key, template, extra, required in _templates_of(style):
        known = extra
        if key[0] != "rows":
            known = {**_EXAMPLE_VARIABLES, **extra}
        fault = _fault_of(template, known, required)
        if fault is not None:
            line, message = fault
            # A block of text begins on the line after its key.
            line += file.lines.get(key, 1) + ("\n" in template) - 1
            yield Problem(key, message, f"{file.path}:{line}")


def _templates_of(
    style: Style,
) -> Iterator[tuple[tuple[str | int, ...], str, dict[str, Any], str]]:
    """Yield (key, template, its variables beside those of the passage, the variable that it must
    use)."""
    items: dict[str, Any] = {}
    if style.scope == "pair":
        items["entity"] = "Mara Lind"
    for index, step in enumerate(style.prepare):
        yield ("prepare", index, "prompt"), step.prompt, dict(items), "source"
        items[step.name] = ("Mara Lind", "Arvika") if style.combine else "Mara Lind"
    yield ("system",), style.system, {}, ""
    yield ("user",), style.user, items, "source"
    if style.verify:
        yield ("verify",), style.verify, {**items, "text": "Text."}, "text"
    for name, templates in (("rows", style.rows), ("chat", style.chat)):
        if isinstance(templates, tuple):
            for index, template in enumerate(templates):
                yield (name, index), template, items, ""


def _fault_of(template: str, known: Mapping[str, Any], required: str) -> tuple[int, str] | None:
    """Return (line of the template, fault) of its first fault."""
    try:
        names = meta.find_undeclared_variables(environment().parse(template))
        unknown = sorted(names - known.keys())
        if unknown:
            return 1, f"unknown variable {unknown[0]!r}.{suggestion(unknown[0], known)}"
        environment().from_string(template).render(known)
    except TemplateSyntaxError as error:
        return error.lineno, f"bad template: {error.message or 'unknown fault'}"
    except _RENDER_ERRORS as error:
        return 1, f"cannot be filled in: {one_line(error)}"
    if required and required not in names:
        return 1, f"does not use {{{{ {required} }}}}: the model would not see it."
    return None


_EXAMPLE_VARIABLES: dict[str, Any] = {name: describe(_EXAMPLE, name) for name in VARIABLES}
_EXAMPLE_VARIABLES |= {"sample": 0, "variation": ""}
_VARIABLES = {*_EXAMPLE_VARIABLES, "text"}

_SHIPPED = (
    *(path.stem for path in sorted(STYLE_FILES.glob("*.yaml")) if path.stem != "shared"),
    *MECHANICAL,
)


class _Styles(Mapping[str, Style]):
    """The shipped styles and `custom` ones by name. A shipped file is read at its first use."""

    def __init__(self, custom: Mapping[str, Style]) -> None:
        self._custom = custom

    def __getitem__(self, name: str) -> Style:
        if name in _SHIPPED:
            return _shipped_style(name)
        return self._custom[name]

    # Mapping's own would read the style's file.
    def __contains__(self, name: object) -> bool:
        return name in _SHIPPED or name in self._custom

    def __iter__(self) -> Iterator[str]:
        return iter((*_SHIPPED, *self._custom))

    def __len__(self) -> int:
        return len(_SHIPPED) + len(self._custom)


@cache
def _shipped_style(name: str) -> Style:
    if name in MECHANICAL:
        # Near copies by intent: of 16 orders of each sandbox entry 1,612 of 1,920 were refused.
        return Style(name, MECHANICAL[name][0], rules=Rules(refuse_echo=False, refuse_near=False))
    # A test tries their templates: to read all files and fill in each template took a run 0.08 s.
    return read_style(STYLE_FILES / f"{name}.yaml", templates=False)


STYLES: Mapping[str, Style] = _Styles({})
"""Name -> shipped style: a file in `STYLE_FILES` of that name, or a function in `MECHANICAL`."""


def read_styles(paths: Sequence[str]) -> Mapping[str, Style]:
    """Return the shipped styles and those in the files `paths`, by name. Raises `RecipeError` with
    every fault in them."""
    custom, problems = dict[str, Style](), list[Problem]()
    for path in map(Path, paths):
        try:
            style = read_style(path)
        except RecipeError as error:
            problems += error.problems
            continue
        if style.name in _SHIPPED or style.name in custom:
            message = f"{style.name!r} is the name of another style. Choose another."
            problems.append(Problem("name", message, f"{path}:1"))
        custom[style.name] = style
    if problems:
        raise RecipeError(problems)
    return _Styles(custom)


def styles_apart(section: AugmentSection) -> list[str]:
    """Return the names of the chosen styles whose rows are not in corpus.jsonl but in sft.jsonl."""
    if section.one_corpus:
        return []
    known = read_styles(section.style_files)
    # Another check reports a name that is not known.
    chosen = [known[name] for name, wanted in section.styles.items() if wanted and name in known]
    return [style.name for style in chosen if style.makes_rows_apart(messages=section.messages)]
