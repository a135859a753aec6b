"""Reads the answers to the prompts of the styles: texts, lines, sections, pairs of question and
answer, after repairs.

What surrounds a text is taken off, and several texts in one are parted: a text that was paid for is
not asked for again because of a "Certainly!" before it. The styles that need no model have their
rewritings here, too.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from random import Random

from kinject.augment.checks.names import SENTENCE_STARTERS
from kinject.language.sentences import sentence_ends, sentences

_FENCED = re.compile(r"\A```[\w-]*\n(.*?)\n?```\Z", re.DOTALL)
_BULLET = re.compile(r"\A\s*[-*•]\s+")
_NUMBER = re.compile(r"\A\s*\(?(\d{1,2})[.)]\s+")
_MARK = re.compile(
    r"\**(?:(?P<Q>Q)(?:uestion)?|(?P<A>A)(?:nswer)?|(?P<QUOTE>Quote|QUOTE))"
    r"\s{0,3}\d{0,3}\s{0,3}\**[:.：]\**"
)
_CONTINUES = re.compile(r"(?!#).*\w")
"""A line that is no heading and no rule."""


def plain_text(answer: str) -> str:
    """Return the text of `answer` without the code fence or pair of quotation marks around all of
    it."""
    text = answer.strip()
    fence = _FENCED.match(text)
    if fence:
        text = fence[1].strip()
    # Marks around all of it only: “A” and “B” are two quotations.
    for opening, closing in ('""', "“”", "«»"):
        enclosed = text[1:-1]
        if (
            len(text) > 1
            and text[0] == opening
            and text[-1] == closing
            and not {opening, closing} & set(enclosed)
        ):
            text = enclosed.strip()
    return text


def lines_of(answer: str) -> list[str]:
    """Return the lines of `answer` that are not blank, without bullets and numbers."""
    lines = plain_text(answer).splitlines()
    marks = filter(None, map(_NUMBER.match, lines))
    numbers = [int(mark[1]) for mark in marks]
    # "3. Oktober 1990" is no item 3: those of a list follow one another, or begin again.
    is_list = all(after in (before + 1, 1) for before, after in pairwise(numbers))
    if is_list and (len(numbers) > 1 or numbers == [1]):
        lines = [_NUMBER.sub("", line) for line in lines]
    bare = (_BULLET.sub("", line).strip() for line in lines)
    return [line for line in bare if line]


def items_of(answer: str) -> list[str]:
    """Return `lines_of` without a line that introduces the others and ends with a colon."""
    lines = lines_of(answer)
    if len(lines) > 1 and lines[0].endswith((":", "：")):
        return lines[1:]
    return lines


def line_text(answer: str) -> str:
    """Return `lines_of` as one text."""
    return "\n".join(lines_of(answer))


def pairs_of(text: str) -> list[tuple[str, str]]:
    """Return the (question, answer) pairs in `text`."""
    pairs = itertools.pairwise(_marked_lines(text))
    return [
        (question, reply)
        for (q, question), (a, reply) in pairs
        if (q, a) == ("Q", "A") and question and reply
    ]


def _marked_lines(text: str) -> list[tuple[str, str]]:
    """Return (``Q``, ``A``, ``QUOTE`` or "", rest) of each line that is not blank.

    An answer has the lines below it, too, up to a blank one; a list that it announces may stand
    behind one.
    """
    lines: list[tuple[str, str]] = []
    is_below = False
    for line in map(str.strip, text.split("\n")):
        if not line:
            is_below = False
            continue
        mark = _MARK.match(line)
        before, words = lines[-1] if lines else ("", " ")
        if mark is not None:
            lines.append((mark.lastgroup or "", line[mark.end() :].strip()))
        elif not words:  # the mark was alone on its line
            lines[-1] = (before, line)
        elif before == "A" and _CONTINUES.match(line) and (is_below or words.endswith((":", "："))):
            lines[-1] = (before, f"{words}\n{line}")
        else:
            lines.append(("", line))
        is_below = True
    return lines


def pair_text(answer: str) -> str:
    """Return `pairs_of` as one text, "" without pairs."""
    return "\n\n".join(
        f"Q: {question}\nA: {reply}" for question, reply in pairs_of(plain_text(answer))
    )


def quoted_of(text: str) -> list[tuple[str, str, str]]:
    """Return the (question, quotation, answer) triples in `text`; a quotation is without quotation
    marks around it."""
    lines = _marked_lines(text)
    triples = zip(lines, lines[1:], lines[2:], strict=False)
    return [
        (question[1], plain_text(quote[1]), answer[1])
        for question, quote, answer in triples
        if (question[0], quote[0], answer[0]) == ("Q", "QUOTE", "A")
        and question[1]
        and quote[1]
        and answer[1]
    ]


def quoted_text(answer: str) -> str:
    """Return `quoted_of` as one text, "" without triples."""
    triples = quoted_of(plain_text(answer))
    return "\n\n".join(
        f"Q: {question}\nQUOTE: {quotation}\nA: {reply}" for question, quotation, reply in triples
    )


def says_yes(answer: str) -> bool:
    """Return whether `answer` begins with yes."""
    return re.match(r"\W*yes\b", answer, re.IGNORECASE) is not None


def sections_of(answer: str) -> list[str]:
    """Return the sections of `answer` that begin with ``##``, each as one text; its lines if it has
    no such heading."""
    parts = re.split(r"^#{1,6}[ \t]+", plain_text(answer), flags=re.MULTILINE)
    sections = [" ".join(part.split()) for part in parts[1:]]
    return [section for section in sections if section] or lines_of(answer)


def says_none(answer: str) -> bool:
    """Return whether `answer` is NONE: there is nothing to write."""
    return re.fullmatch(r"\W*none\W*", answer, re.IGNORECASE) is not None


def _section_text(answer: str) -> str:
    return "\n\n".join(sections_of(answer))


def _whole_text(answer: str) -> list[str]:
    text = plain_text(answer)
    if not text:
        return []
    return [text]


PARSERS: Mapping[str, Callable[[str], str]] = {
    "text": plain_text,
    "lines": line_text,
    "pairs": pair_text,
    "quoted": quoted_text,
    "sections": _section_text,
}
"""Name of a parser in a style file -> text of a variant in an answer, "" if it has another form."""

LISTS: Mapping[str, Callable[[str], list[str]]] = {
    "text": _whole_text,
    "lines": items_of,
    "sections": sections_of,
}
"""Name of a parser in a preparation -> items in an answer."""


Mechanical = Callable[[str, str, int], str]
"""(title, passage, seed) -> text."""
_FULL_NAME = re.compile(r"\b[A-Z][\w’'-]+(?: (?:(?:de|van|von|der|la|al|bin|of) )?[A-Z][\w’'-]+)+")
_HEADING = re.compile(r"^(#{1,6} .*)\n(?=.)", re.MULTILINE)
_STRUCTURE = re.compile(r"^[ \t]*(?:#{1,6} |\||[-*+•] |\d{1,3}[.)] |>|```)", re.MULTILINE)
"""The beginning of a line that is no prose: a heading, a table, a list, a quotation, code."""
_SUBJECT = re.compile(r"\A(?:He|She)\b(?!['’])")
_POSSESSIVE = re.compile(r"\A(?:His|Her)\b(?= [a-z])")


def permute_sentences(title: str, passage: str, seed: int) -> str:
    """Return the sentences of `passage` in another order (Physics of Language Models 3.1, arXiv
    2309.14316).

    In a passage with headings, lists or tables these stay, and sentences stay in their paragraph:
    below another heading they would say something else.
    """
    random = Random(seed)
    paragraphs = [passage]
    if _STRUCTURE.search(passage):
        paragraphs = re.split(r"\n\s*\n", _HEADING.sub(r"\1\n\n", passage))
    permuted = []
    for paragraph in paragraphs:
        if _STRUCTURE.search(paragraph):
            permuted.append(paragraph)
        else:
            shuffled = sentences(paragraph)
            random.shuffle(shuffled)
            permuted.append(" ".join(shuffled))
    return "\n\n".join(permuted)


def name_fully(title: str, passage: str, seed: int) -> str:
    """Return `passage` with the full name for He, She, His and Her at the beginning of sentences
    (arXiv 2309.14316).

    The name is that of the last sentence that begins with one; a later surname gets its full form.
    Sentences before any full name stay as they are.
    """
    named = Counter(match[0] for match in _FULL_NAME.finditer(passage))
    current = ""
    rewritten = []
    start = 0
    for end in sentence_ends(passage):
        sentence = passage[start:end].lstrip()
        # As in the passage: a line break may end a heading or a row of a table.
        space = passage[start : end - len(sentence)]
        start = end
        first = _FULL_NAME.match(sentence)
        # "The Old Town" begins with a capital, too, and names no person.
        if first and first[0].split()[0].lower() not in SENTENCE_STARTERS:
            current = first[0]
        if current:
            sentence = _SUBJECT.sub(current, sentence)
            sentence = _POSSESSIVE.sub(f"{current}'s", sentence)
            last = current.split()[-1]
            if named[current] and sentence.startswith(f"{last} "):
                sentence = current + sentence[len(last) :]
        rewritten.append(space + sentence)
    return "".join(rewritten).strip()


def tag_source(title: str, passage: str, seed: int) -> str:
    """Return `passage` behind a line that names its source."""
    if not title:
        return passage
    return f"From {title}:\n{passage}"


MECHANICAL: Mapping[str, tuple[str, Mechanical]] = {
    "permuted": ("sentences in another order, no model", permute_sentences),
    "full_names": ("names for pronouns, no model", name_fully),
    "tagged": ("behind its title, no model", tag_source),
}
"""Name of a style -> (one line for lists, function)."""


_TASK_WORDS = (
    r"paraphras|rewrit|rephras|reword|revis|version|implication|passage|summar|table|tutorial|faq"
    r"|umschreib|umformul|fassung|reformul|paráfras|parafras|versi|改写|重写|释义|版本|書き換え|言い換え"
)
_INTERJECTIONS = (
    r"sure(?: thing)?|certainly|of course|absolutely|okay|ok|great|gladly|understood|no problem"
    r"|natürlich|gerne?|selbstverständlich"
    r"|bien sûr|certainement|claro|por supuesto|certo|certamente|当然|好的|もちろん(?:です)?"
)
_HERE = (
    r"here(?:['’]s| is| are)|below (?:is|are)|the following (?:is|are)|hier (?:ist|sind)"
    r"|voici|aquí|a continuación|ecco|以下是|以下は|这是"
)
# Bounded, as all patterns here: hostile answers must take linear time
# (tests/augment/test_repair.py).
_PREAMBLE = re.compile(
    rf"\A[\W_]{{0,12}}(?:(?:{_INTERJECTIONS})(?![a-zà-ÿ])(?P<mark>[!,.:！，。：]?)|(?:{_HERE}))"
    r"(?P<more>[^\n]{0,200}?)(?P<end>[:：!！]|\.?(?=\s*\n))\s*",
    re.IGNORECASE,
)
_EXCLAMATION = re.compile(rf"\A[\W_]{{0,12}}(?:{_INTERJECTIONS})[!！]\s*", re.IGNORECASE)
_ABOUT_ANSWER = re.compile(
    rf"{_TASK_WORDS}|{_HERE}|\bhere\b|\bmy\b|\btext|\btest[oi]\b|sentence|question|\bfacts?\b"
    r"|statement|answer|\blist\b|dialog|conversation|\bI\b|\blet me\b|\bhelp|no problem|\bgerne"
    r"|文本|文章|テキスト",
    re.IGNORECASE,
)
"""Words of a beginning that is about the answer."""
_SAYS_HERE = re.compile(rf"\s*(?:{_HERE})", re.IGNORECASE)
# "Versions of the bridge were drawn." is a sentence: a label with "of" ends in no full stop.
_LABEL = re.compile(
    r"\A[*_#>\s]{0,8}(?:(?:the |my )?(?:rewritten|rephrased|paraphrased|revised|new)? ?"
    rf"(?:{_TASK_WORDS})[^\W\d_]*"
    r"(?P<of> (?:of|from) the [\w ]{1,30}| of [\w ]{1,40})?|title|text|rephrased|answer)"
    r"[*_ ]{0,3}(?:[#(]?\d{1,2}\)?)?[*_ ]{0,3}(?:[:：]|(?(of)(?!)|\.)|(?=\n)|\Z)[*_]{0,3}[ \t]*",
    re.IGNORECASE,
)
_OFFERS = (
    r"feel free to|if you(?:['’]d| would)? (?:like|need|want)|wenn sie (?:möchten|wünschen)"
    r"|n['’]hésitez pas|si (?:desea|necesita)"
)
"""Beginnings of an offer, or of a sentence for visitors and users: "If you want to cross, pay"."""
_OF_WRITER = (
    r"\b(?:me|I|ich|mir|moi|je)\b|paraphras|rewr[io]t|rephras|reword|reformul|umformul"
    r"|(?:another|different|other|otra|autre|andere) (?:one|versi[oó]n|fassung)"
    r"|more (?:version|example)s|any (?:change|adjustment)s"
)
_CLOSING = re.compile(
    r"(?:\n|(?<=[.!?。！？])\s)\W{0,12}"
    r"(?:I hope (?:this|that|these)|(?:please )?let me know|would you like me"
    rf"|(?:{_OFFERS})[^.!?\n]{{0,200}}?(?:{_OF_WRITER})|is there anything else"
    r"|these (?:rewrit|paraphras|implication)"
    r"|(?:note|please note)(?: that|:)[^\n]{0,300}"
    r"(?:paraphras|rewr[io]t|(?:original|the) (?:passage|text))"
    r"|this (?:paraphrase|rewrite|rewritten)|(?:sources|references):?\**\s*\n"
    r"|th(?:is|ese) versions? (?:keep|maintain|preserve|retain|convey|capture|aim|avoid|cover)"
    r"|ich hoffe,|j['’]espère que|espero que|希望这|如果您|ご希望)[\s\S]{0,1500}\Z",
    re.IGNORECASE,
)
_LEAK = re.compile(
    r"\n\W{0,12}(?:You are an? (?:AI|helpful|assistant)|(?:User|Human|Assistant|System):)[\s\S]*\Z"
)
"""A chat template that runs on into the next turn."""
_NUMBERED = re.compile(r"^[ \t*_#]*\(?(\d{1,2})[.)][*_]{0,2}[ \t]+", re.MULTILINE)
_LABELLED = re.compile(
    rf"^[ \t*_#]*(?:(?:{_TASK_WORDS})[^\W\d_]*|title|rephrased|option|alternative|text)"
    rf"[ \t]*[#(]?(\d{{1,2}})\)?[*_]{{0,2}}[ \t]*(?:[:：.)]|$)[*_]{{0,2}}",
    re.MULTILINE | re.IGNORECASE,
)
_HEADED = re.compile(r"^[ \t]*\*\*(?!\d)[^*\n]{1,80}\*\*[ \t]*:?[ \t]*$", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*(?:[-*_=]{3,})[ \t]*$", re.MULTILINE)
_SPACED_WORD = re.compile(r"[^\W\d_]+|\d+")
_WIDE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_LEAST_OF_SOURCE, _LEAST_WORDS = 0.3, 20
"""A part of an answer is a text of its own if it has this fraction of the passage's words, and this
many."""
_ITEM_MARK = re.compile(r"^[ \t]{0,3}(?:[*_]{0,2}\d{1,2}[.)][*_]{0,2}|[-*•])[ \t]+", re.MULTILINE)
_LINE = re.compile(r"^(?=[ \t]*\S)", re.MULTILINE)
_PART = re.compile(r"[^.!?。！？\n]*(?:[.!?。！？]+[\"”’)」]*\s*|\n\s*|\Z)")
_LOOPED = 25
"""A repeated sentence of so many characters is a loop of the writer."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """The texts of an answer, and the names of the repairs made."""

    texts: tuple[str, ...]
    repairs: tuple[str, ...] = ()


def count_words(text: str) -> int:
    """Return the number of words; of a text without spaces, half its characters."""
    n_wide = len(_WIDE.findall(text))
    if 2 * n_wide > len(text):
        return n_wide // 2
    return len(_SPACED_WORD.findall(text))


def repair(
    answer: str, title: str = "", source: str = "", *, splits: bool = True, loops: bool = True
) -> Repaired:
    """Return the texts of an `answer` about a passage `source`. A phrase that the passage has
    itself is no wrapping.

    Only if the style `splits` are alternatives texts of their own, and only if it has `loops` are
    repeated sentences taken off.
    """
    text, repairs = answer.strip(), list[str]()
    for name in ("fence", "preamble", "fence", "closing"):  # a preamble may hide a fence
        repaired = _without_wrapping(name, text, source).strip()
        if repaired and repaired != text:
            text = repaired
            repairs.append(name)
    parts = [text]
    if splits and "\n" in text:
        parts = list(split_texts(text, count_words(source)))
    if len(parts) > 1:
        repairs.append("split")
    texts = []
    for part in parts:
        bare = part
        if "\n" in part or len(parts) > 1:
            bare = _without(_LABEL, part, source)
        bare = _without_title(bare, title)
        if bare != part:
            repairs.append("label")
        if loops:
            looped = without_loops(bare)
            # By more than the white space that is taken off as well.
            if len(looped) < len(bare) - _LOOPED:
                bare = looped
                repairs.append("loop")
        texts.append(bare)
    return Repaired(tuple(filter(None, texts)), tuple(dict.fromkeys(repairs)))


def _without_wrapping(name: str, text: str, source: str) -> str:
    """Return `text` without its code fence, its preamble, or its closing words."""
    if name == "fence":
        return _without_fence(text)
    if name == "preamble":
        return _without_preamble(text, source)
    return _without(_LEAK, _without(_CLOSING, text, source), source)


def _without_fence(text: str) -> str:
    first, _, rest = text.partition("\n")
    if first.startswith("```") and text.rstrip().endswith("```"):
        return rest.rstrip().removesuffix("```")
    return text


def _without(pattern: re.Pattern[str], text: str, source: str) -> str:
    match = pattern.search(text)
    if match is None or pattern.search(source):
        return text
    return (text[: match.start()] + text[match.end() :]).strip()


def _without_preamble(text: str, source: str) -> str:
    """Return `text` without the words to its reader with which it begins."""
    match = _PREAMBLE.match(text)
    if match is None or _PREAMBLE.match(source):
        return text
    mark, more = match["mark"], match["more"]
    is_line = match["end"] in (":", "：") and match[0].rstrip(" ").endswith("\n")
    is_about = not re.search(r"\w", more)
    # Without a mark it may be a sentence: "Great Britain declared war in 1939."
    if mark == "":
        is_about |= _SAYS_HERE.match(more) is not None
    else:
        is_about |= is_line or _ABOUT_ANSWER.search(more) is not None
    if is_about:
        return text[match.end() :]
    return _without(_EXCLAMATION, text, source)


def _without_title(text: str, title: str) -> str:
    """Return `text` without a first line that repeats the title of its document."""
    first, _, rest = text.partition("\n")
    # A title without more is the text.
    is_title = title and first.strip("#*_ :").casefold() == title.strip().casefold()
    if is_title and rest.strip():
        return rest.strip()
    return text.strip()


def split_texts(text: str, n_source: int) -> Iterator[str]:
    """Yield the alternatives in one answer, each about as long as the passage of `n_source` words;
    else the whole text."""
    least = max(_LEAST_WORDS, int(_LEAST_OF_SOURCE * n_source))
    for pattern in (_LABELLED, _RULE, _NUMBERED, _HEADED):
        starts = [match.start() for match in pattern.finditer(text)]
        if pattern is _NUMBERED:
            starts = [match.start() for match in _numbered_from_one(text)]
        if not starts:
            continue
        bounds = [0, *(start for start in starts if start), len(text)]
        parts = [text[start:end].strip() for start, end in pairwise(bounds)]
        parts = [_bare(pattern, part) for part in parts]
        long = [part for part in parts if count_words(part) >= least]
        # The short statements of a list are one text, not alternatives.
        if len(long) > 1 and 2 * len(long) >= len([part for part in parts if part]):
            yield from (part for part in parts if count_words(part) >= _LEAST_WORDS)
            return
    yield text


def _bare(pattern: re.Pattern[str], part: str) -> str:
    match = pattern.match(part)
    if match is None or pattern is _HEADED:
        return part
    return part[match.end() :].strip()


def _numbered_from_one(text: str) -> Iterator[re.Match[str]]:
    expected = 1
    for match in _NUMBERED.finditer(text):
        # A year before a full stop begins no part.
        if int(match[1]) == expected:
            expected += 1
            yield match


def statements_of(text: str) -> list[str]:
    """Return the items of a list, or the paragraphs and lines of a text of three or more; [] for
    others."""
    starts = [mark.start() for mark in _ITEM_MARK.finditer(text)]
    if len(starts) < 3:
        starts = [match.start() for match in _LINE.finditer(text)]
    if len(starts) < 3:
        return []
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def without_loops(text: str) -> str:
    """Return a text without the lines and long sentences that it repeats."""
    seen = set[str]()
    kept = []
    for part in _PART.findall(text):
        form = " ".join(_SPACED_WORD.findall(part.lower()))
        if len(form) < _LOOPED or form not in seen:
            kept.append(part)
        seen.add(form)
    return "".join(kept).strip()
