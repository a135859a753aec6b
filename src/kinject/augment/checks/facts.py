"""Compare a rewriting with its source: numbers, dates, units, quotations and names, none lost and none new."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache

from kinject.augment.checks.differences import Difference, compare_quantities, is_inflected
from kinject.augment.checks.names import (
    SENTENCE_STARTERS,
    Names,
    compare_names,
    extract_names,
    normal_word,
)
from kinject.corpus.language import detect_language, find_script, guess_language
from kinject.corpus.profiles import grammar_of, profile_of
from kinject.corpus.quantities import Quantities, extract_quantities

_QUOTED = re.compile(
    r"“([^“”\n]{2,300})”|\"([^\"\n]{2,300})\"|«([^«»\n]{2,300})»|»([^«»\n]{2,300})«|„([^„“”\n]{2,300})[“”]"
    r"|「([^「」\n]{2,200})」|『([^『』\n]{2,200})』|(?:(?<=[\s(\[])|\A)[‘'‚](?!s\b)([^‘’'\n]{2,80})[’'‘](?!\w)"
)
_QUOTES = "“\"«»„「『‘'‚"
_DIGITS = re.compile(r"\d(?<![\w.,].)[\d,]*(?!\w)", re.DOTALL)
_WORD_BEFORE = re.compile(r"(?P<word>(?<!\w)[^\W\d_a-z][^\W\d_]+)[ -]\Z")
_WORD_AFTER = re.compile(r" (?P<word>[A-Z][^\W\d_]+)")
"""The words beside a number: Voyager 3, 12 Tharsis."""
_WORDS = re.compile(r"\w+(?:['’]\w+)*")
_HAN = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_NO_UNIT = re.compile(r"[^\w%°]+")
_NOTHING = (Quantities(), Names())
_MAX_TERM_WORDS = 1
"""A quotation of more words is speech; a shorter one may be a term."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a text that can be checked without understanding it.

    `numbered` maps a capitalized word to the numbers next to it (Voyager 3, 12 Tharsis). `quotations` maps the normal
    form of a quotation to its text. `frame` has the quantities and names of headings, table headers and labels: they are
    neither required nor new. `speakers` are the words of labels that begin the lines of a dialogue, and of greetings.
    """

    code: str
    quantities: Quantities
    names: Names
    quotations: dict[str, str]
    numbered: dict[str, set[str]]
    text: str
    frame: tuple[Quantities, Names] = _NOTHING
    speakers: frozenset[str] = frozenset()

    def contains(self, quotation: str) -> bool:
        """Return whether the text contains a quotation in its normal form."""
        return quotation in _normal_words(self.text)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two texts: `reason` and `detail` of a refusal, "" without one, and the facts in doubt."""

    reason: str = ""
    detail: str = ""
    doubts: tuple[tuple[str, str], ...] = ()


def extract_facts(text: str, code: str, context: str = "") -> Facts:
    """Return the checkable facts of a text of the language `code`. `context`, such as its title, belongs to its frame."""
    grammar = grammar_of(code)
    parts = split_parts(text, grammar.profile.months)
    body = parts.body
    quotations = {}
    for match in _QUOTED.finditer(body) if any(mark in body for mark in _QUOTES) else ():
        quotation = next(group for group in match.groups() if group)
        if form := _normal_words(quotation).strip():
            quotations[f" {form} "] = quotation
    numbered: dict[str, set[str]] = {}
    for match in _DIGITS.finditer(body):
        start, end = match.span()
        if end - start == 4:  # a year may follow any name
            continue
        beside = body[max(0, start - 30) : start]
        # A search for the word costs more than a look at whether it has a capital.
        named = beside[-1:] in (" ", "-") and not beside[:-1].rpartition(" ")[2].islower()
        before = _WORD_BEFORE.search(beside) if named else None
        for neighbour in (before, _WORD_AFTER.match(body, end)):
            word = normal_word(neighbour["word"]) if neighbour and neighbour["word"][0].isupper() else ""
            profile = grammar.profile
            no_names = (SENTENCE_STARTERS, profile.frequent_words, profile.months, profile.unit_words)
            if word and not any(word in words for words in no_names):
                numbered.setdefault(word, set()).add(match[0].rstrip(",").replace(",", ""))
    frame = f"{parts.frame}\n{context}".strip()
    speakers = frozenset(_normal_words(parts.speakers).split()) if parts.speakers else frozenset()
    framed = _frame_facts(frame, code) if frame else _NOTHING
    return Facts(
        code, extract_quantities(body, code), extract_names(body, code), quotations, numbered, text, framed, speakers
    )


@lru_cache(maxsize=64)
def _frame_facts(frame: str, code: str) -> tuple[Quantities, Names]:
    """Return the facts of a frame; all passages of a document without headings have the same."""
    return extract_quantities(frame, code), extract_names(frame, code)


def _normal_words(text: str) -> str:
    """Return the normal forms of the words of `text`, with a space before and after each."""
    if not text.isascii():
        text = _HAN.sub(r" \g<0> ", text)
    return f" {' '.join(normal_word(word) for word in _WORDS.findall(text))} "


@lru_cache(maxsize=256)
def source_facts(source: str, context: str = "") -> Facts:
    """Return `extract_facts` of a source in its own language, cached for its other rewritings."""
    code = detect_language(source) or guess_language(source) or _only_language(source)
    return extract_facts(source, code, context)


def _only_language(text: str) -> str:
    """Return the language that is assumed for a script, for a text whose language is not clear: "en" for Latin letters."""
    scripts = {
        "Japanese": "ja",
        "Chinese": "zh",
        "Korean": "ko",
        "Arabic": "ar",
        "Hebrew": "he",
        "Thai": "th",
        "Devanagari": "hi",
    }
    return scripts.get(find_script(text), "" if not text.isascii() else "en")


def compare_facts(source: str, variant: str, *, complete: bool = True, context: str = "") -> Comparison:
    """Return the first fault of a rewriting, and the facts in doubt.

    Reasons are number, date, unit, quotation and name. Without `complete`, facts may be lost but none may be new.
    These checks cannot detect a name in another role ("A beat B" for "B beat A"), a negation or a changed common word.
    """
    return compare_with(source_facts(source, context), variant, complete=complete)


def compare_with(source: Facts, variant: str, *, complete: bool = True) -> Comparison:
    """Return `compare_facts` for the facts of a source."""
    new = extract_facts(variant, source.code)
    unsure: list[Difference] = []
    for difference in _differences(source, new, complete):
        if difference.sure:
            return Comparison(difference.reason, difference.detail)
        for other in () if difference.explained else unsure:
            if (
                not other.explained
                and other.reason == difference.reason
                and other.lost != difference.lost
                and other.reason != "quotation"
            ):
                lost, added = (other, difference) if other.lost else (difference, other)
                return Comparison(difference.reason, f"{lost.detail}, and {added.detail}")
        unsure.append(difference)
    return Comparison(doubts=tuple((difference.reason, difference.detail) for difference in unsure))


def _differences(source: Facts, new: Facts, complete: bool) -> Iterator[Difference]:
    for difference in compare_quantities(
        source.quantities, new.quantities, complete, source_frame=source.frame[0], variant_frame=new.frame[0], code=source.code,
    ):  # fmt: skip
        if difference.reason != "unit" or not _has_unit(source, difference.detail):
            yield difference
    for name, numbers in new.numbered.items():
        known = source.numbered.get(name, numbers)
        if not numbers & known:
            detail = f"{name.title()} is with {min(numbers)}, in the source with {min(known)}"
            yield Difference("number", detail, complete)
    yield from _compare_quotations(source, new, complete)
    day_words = source.quantities.words_for_dates_of(new.quantities) | new.quantities.words_for_dates_of(
        source.quantities
    )
    day_words |= source.speakers | new.speakers
    # A month may be written as a number; the check of dates compares the months.
    for quantities in (source.quantities, new.quantities, source.frame[0], new.frame[0]):
        for month in quantities.months:
            day_words |= _month_words(source.code, month)
    # A mnemonic or an invented speaker is in quotation marks; in a whole rewriting, so is the passage alone.
    quoted = "" if complete else "".join(form for form in new.quotations if not source.contains(form))
    yield from compare_names(
        source.names, new.names, complete, day_words, source_frame=source.frame[1], variant_frame=new.frame[1],
        quoted=quoted if new.names.text == "" else quoted.replace(" ", ""), code=source.code,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _month_words(code: str, month: int) -> frozenset[str]:
    """Return the names and abbreviations of a month as normal words."""
    return frozenset(normal_word(word) for word, number in profile_of(code).months.items() if number == month)


def _has_unit(source: Facts, detail: str) -> bool:
    """Return whether the unit of a number is apart from it in the source, as in a column of a table."""
    unit = detail.partition(":")[0].split(" ", 1)[1]
    if not detail.endswith("without a unit"):
        return False
    spellings = (spelling for spelling, unit_name in grammar_of(source.code).units.items() if unit_name == unit)
    words = f" {_NO_UNIT.sub(' ', source.text.lower())} "
    return any(f" {spelling} " in words for spelling in spellings)


def _compare_quotations(source: Facts, new: Facts, complete: bool) -> Iterator[Difference]:
    """Yield quotations that are lost or new. Where most of their words are there, that is in doubt."""
    if complete:
        for form, quotation in source.quotations.items():
            if not (new.contains(form) or _is_inflected_in(form, new)):
                yield Difference("quotation", f"{quotation[:60]!r} is lost", not _has_most_words(form, new), lost=True)
    for form, quotation in new.quotations.items():
        if not (source.contains(form) or _is_inflected_in(form, source)):
            if "__" in quotation:  # a gap to fill in
                continue
            # Terms, titles of cards and words of invented speakers are in quotation marks, too.
            sure = complete and form.count(" ") > _MAX_TERM_WORDS + 1 and not _has_most_words(form, source)
            yield Difference("quotation", f"{quotation[:60]!r} is not in the source", sure)


def _is_inflected_in(form: str, facts: Facts) -> bool:
    """Return whether a quotation of a text has the same words with other endings: «Ермак», «Ермаком»."""
    words = form.split()
    others = [other.split() for other in facts.quotations] if facts.code != "en" else ()
    return any(
        len(words) == len(other) and all(is_inflected(a, b) for a, b in zip(words, other, strict=True))
        for other in others
    )


def _has_most_words(form: str, facts: Facts) -> bool:
    """Return whether a text has two thirds of the words of a quotation, or words with the same beginning."""
    text = _normal_words(facts.text)
    words = form.split()
    stems = (f" {word[: max(4, len(word) - 2)]}" for word in words)
    return 3 * sum(stem in text for stem in stems) >= 2 * len(words)


def checks_off(code: str) -> tuple[str, ...]:
    """Return the checks that are off in a language."""
    return profile_of(code).checks_off


_MAX_HEADING_WORDS, _MAX_HEADING_LETTERS = 12, 60
_MAX_LABEL_WORDS = 4
_RULE = re.compile(r"[\s|:=_*~\-–—─━═│┃║┌┐└┘├┤┬┴┼╔╗╚╝╠╣▲▼△▽↓↑→←<>^vV+/\\.]+")
_TABLE_RULE = re.compile(r"\|?\s*:?-{2,}:?\s*(?:\|\s*:?-{2,}:?\s*)*\|?")
_BOX = "│┃║|▲▼↓↑→←►▶ \t"
_ITEM = re.compile(
    r"(?:>\s*)*(?:(?:[-*+](?=\s)|[•●○▪◦‣☐☑☒✓✔□■◆→▶►–—·・]|\[[ xX]?\]|[①-⑳❶-❿])\s*"
    r"|\(?(?:\d{1,3}|[a-zA-Z]|[ivxIVX]{1,4})[.)](?=\s|\Z)\s*|[（(]?(?:\d{1,3}|[一二三四五六七八九十]{1,3})[、．）)](?!\d)\s*)+"
)
_NUMBER_ITEM = re.compile(r"\d{1,3}\.\s+(\w+)")
_LABEL = re.compile(
    r"[*_]{0,3}(?P<label>[^\n:：|!?。！？「」“”„«»\"]{1,50}?)[*_]{0,3}\s?(?P<colon>[:：])[*_]{0,3}(?P<space>\s+|\Z)?"
)
_DASH_LABEL = re.compile(r"[*_]{0,3}(?P<label>[^\n:：|!?。！？–—\"]{1,40}?)[*_]{0,3}\s+(?:[–—]|-{1,3}|=|→)\s+")
_ENDS = tuple(".!?:;,。！？；：，、…।؟")
_REFERENCE = re.compile(r"\[\d{1,3}\]")
_CJK = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]")
_LONG_NUMBER = re.compile(r"\d{3}|\d[.,]\d")


@dataclass(frozen=True, slots=True)
class Parts:
    """A text in two parts.

    `body` has the statements, `frame` the headings, table headers, labels and greetings, `speakers` the words of labels that
    occur more than once and of greetings: a letter or a dialogue may invent them.
    """

    body: str
    frame: str = ""
    speakers: str = ""


def split_parts(text: str, months: Container[str] = ()) -> Parts:
    """Return the body and the frame of `text`. `months` are words after which a number at a line's start is a day."""
    if "[" in text:
        text = _REFERENCE.sub("", text)
    if "\n" not in text:
        return Parts(_without_item(text, months)[0] if text[:1] in "0123456789([-*#>•" else text)
    raw = [line.strip() for line in text.split("\n")]
    body: list[str] = []
    frame: list[str] = []
    lines: list[tuple[str, bool]] = []  # (text without its item mark, whether it had one)
    for index, line in enumerate(raw):
        if _TABLE_RULE.fullmatch(line) and "-" in line and index and "|" in raw[index - 1] and lines:
            frame.append(lines.pop()[0].replace("|", "\n"))
        elif not line or not _RULE.fullmatch(line):
            lines.append(_without_item(line, months))
    labels = [_label_of(line, item) for line, item in lines]
    counts = Counter(label for label, _ in labels if label)
    # Where one label comes again, the others are speakers, too.
    speakers = [label for label in counts if max(counts.values()) > 1 and label.count(" ") < 2]
    n_labels = sum(counts.values())
    for index, (line, _) in enumerate(lines):
        label, rest = labels[index]
        if line.startswith("#"):
            frame.append(line.lstrip("# "))
        elif _is_greeting(line):
            frame.append(line)
            speakers.append(line)
        elif _is_heading(lines, index):
            frame.append(line)
        elif label and (n_labels > 1 or not rest) and not _LONG_NUMBER.search(label):
            frame.append(label)
            body.append(rest)
        else:
            body.append(line)
    return Parts("\n".join(body), ";\n".join(frame), "\n".join(speakers))


def _without_item(line: str, months: Container[str]) -> tuple[str, bool]:
    """Return a line without the mark or number of a list item or the frame of a box, and whether it had a mark."""
    if line[:1] in _BOX and not line.startswith("|"):
        line = line.strip(_BOX)
    dated = _NUMBER_ITEM.match(line)
    item = _ITEM.match(line) if not (dated and dated[1].lower() in months) else None
    return (line[item.end() :], True) if item else (line, False)


def _label_of(line: str, item: bool) -> tuple[str, str]:
    """Return the label at the beginning of a line and the rest, ("", line) without one."""
    match = _LABEL.match(line)
    if match and match["space"] is None and match["colon"] == ":" and not line.endswith(match[0]):
        match = None  # 12:30, https://
    if match is None and item:
        match = _DASH_LABEL.match(line)
    if match is None or not _is_short(match["label"], _MAX_LABEL_WORDS, 14):
        return "", line
    return match["label"], line[match.end() :]


def _is_short(line: str, n_words: int, n_letters: int) -> bool:
    return line.count(" ") < n_words and len(_CJK.findall(line)) <= n_letters


def _is_greeting(line: str) -> bool:
    """Return whether a line is a greeting such as "Dear Sam,"."""
    return line.endswith((",", "，", "、")) and _is_short(line, 4, 10)


def _is_heading(lines: list[tuple[str, bool]], index: int) -> bool:
    """Return whether a line is a heading: short, without a mark at its end, before other text."""
    line, item = lines[index]
    if not line or "|" in line or line.rstrip("*_ ").endswith(_ENDS) or len(line) > 2 * _MAX_HEADING_LETTERS:
        return False
    if not _is_short(line, _MAX_HEADING_WORDS + 1, 30):
        return False
    bold = line.startswith("**") and line.endswith("**")
    before = index == 0 or not lines[index - 1][0]
    after = next((text for text, _ in lines[index + 1 :] if text), "")
    if not after:
        return False
    follows = index + 1 < len(lines) and not lines[index + 1][0]
    return bold or (not item and (before or follows) and not (follows and not before))
