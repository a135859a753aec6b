"""Reads a text that a model wrote: the letter of an option, and the result of lm-evaluation-harness's filters."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

from kinject.corpus.grading import normalize_answer

_SAYS = r"""(?:
    \b(?:answer|choice|option|solution|letter|antwort|lösung|réponse|choix|respuesta|opción|risposta|opzione|resposta|opção
    |alternativa|antwoord|odpowiedź|ответ|вариант|cevap|yanıt|الإجابة|الجواب)\b [^.\n:]{0,60}?
    (?:\b(?:is|was|(?:would|must|should)\sbe|ist|lautet|wäre|est|serait|es|sería|è|sarebbe|é|seria|to|это|هي|هو)\b|[=:—–])
    | \b(?:choose|pick|select|go\swith|richtig\sist)\b
    | (?:答案|选项|选|選|正解|答え|解答|選択肢|正답|정답|답)\s*(?:应该)?(?:是|为|為|は|은|는|择|擇)?
    )\s*:?\s*"""
_BETWEEN = r"""(?:(?:the|letter|option|choice|a|la|le|el|die|der|den|lettre|letra|lettera|opción|opzione|opção|buchstabe|буква
    |clearly|likely|most|probably|therefore|thus|definitely|:)\s+){0,3}"""
_WORD = r"A-Za-zÀ-ɏЀ-ӿ0-9'’"
_AND = r"(?:,|/|&|\b(?:and|or|und|oder|et|ou|y|o|e|и|или)\b|和|或|と)"
_ALONE = rf"(?![{_WORD}])(?!\s*[)\]]?\s*{_AND}\s*[(\[]?[A-Z](?![{_WORD}]))"
"""After a letter: no more of a word, and no second letter (A and C)."""
_BEGINS = rf"[(\[\"“「]*([A-Za-z]){_ALONE}"
_STATES = re.compile(rf"{_SAYS}{_BETWEEN}{_BEGINS}", re.IGNORECASE | re.VERBOSE)
_IS_RIGHT = re.compile(
    rf"""(?<![{_WORD}])[(\[]?([A-Z]){_ALONE}[)\]]?\s+(?:is|ist|est|es|è|é)\s+(?:(?:the|die|la|le|a)\s+)?
    (?:correct|right|answer|richtig|correcte?|correcta|corretta|correta|juste)""", re.VERBOSE,
)  # fmt: skip
_LINE = re.compile(
    rf"[(\[\"“「]*([A-Za-z]){_ALONE}[\"”」]*(?:[)\]][\s.:]|[.):,;、。:](?![{_WORD}])|\s[-–—]\s|[)\]]?\s*$)"
)
_WORD_LETTERS = frozenset("AEIOaeiouy")
_GOES_ON = re.compile(r"\s+(?!(?:because|since|as|for|which|parce|car|weil|da|porque|perché|ya)\b)[^\W\d_]")
_WRONG = re.compile(r"(?:wrong|incorrect|false|falsche?|fausse|incorrecta)\s+\w*$", re.IGNORECASE)
_MARKUP = re.compile(r"\*+|__|`+|\$+|\\[()\[\]]|\\(?:boxed|text(?:bf)?|math(?:rm|bf))\b")


def read_letter(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the option that a written answer names; None if that is not plain.

    It is read from a statement ("The answer is (B)", "Antwort: B", "答案是B"), from a line that begins with the letter of an
    option ("**B**", "B. Paris"), or from the text of an option alone. Several statements must agree, or those of the last
    line; a letter beside another option's text, two letters, or a list of the options name none.
    """
    plain = unicodedata.normalize("NFKC", _MARKUP.sub("", text)).replace("{", "(").replace("}", ")").strip()
    texts = [normalize_answer(choice) for choice in choices]
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    for named in (_stated(plain, texts), _stated(lines[-1] if lines else "", texts), _at_line_starts(lines, texts)):
        if len(named) == 1:
            return next((index for index in named if index >= 0), None)
    normalized = normalize_answer(plain)
    return texts.index(normalized) if texts.count(normalized) == 1 else None


def _stated(text: str, choices: list[str]) -> set[int]:
    """Return the options that statements in `text` name, by letter or by their text; -1 for one that names none of them."""
    named = {_index(match[1], "", choices) for match in _IS_RIGHT.finditer(text)}
    for match in _STATES.finditer(text):
        letter, rest = match[1], text[match.end() :]
        is_word = letter.islower() or letter in _WORD_LETTERS
        if not _WRONG.search(text[: match.start()]) and not (is_word and _GOES_ON.match(rest)):
            named.add(_index(letter, rest, choices))
    for match in _STATES_TEXT.finditer(text):
        value = normalize_answer(match[1])
        named |= {choices.index(value)} if choices.count(value) == 1 and len(value) > 1 else set()
    return named


_STATES_TEXT = re.compile(rf"{_SAYS}([^\n.]+)", re.IGNORECASE | re.VERBOSE)


def _at_line_starts(lines: Sequence[str], choices: list[str]) -> set[int]:
    """Return the options whose letters begin lines."""
    matches = ((line, _LINE.match(line)) for line in lines)
    return {_index(match[1], line[match.end() :], choices) for line, match in matches if match}


def _index(letter: str, rest: str, choices: list[str]) -> int:
    """Return the index of the option with `letter`; -1 if there is none, or the text after it is another option's."""
    index = string.ascii_uppercase.index(letter.upper())
    beside = normalize_answer(rest.split("\n")[0].lstrip(" .:)]-–—"))
    if index >= len(choices) or (beside in choices and choices[index] != beside):
        return -1
    return index


def _first_match(text: str, *, regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0,
                 fallback: str = "[invalid]") -> str:  # fmt: skip
    """Return match number `group_select` of a pattern, of several groups the first that is not empty; else `fallback`."""
    match = _chosen_match(re.findall(regex_pattern, text), group_select)
    return fallback if match is None else match.strip()


def _chosen_match(matches: Sequence[Any], group_select: int) -> str | None:
    """Return one of the matches of a pattern without white space around it, None if it is not there."""
    if not -len(matches) <= group_select < len(matches):
        return None
    match = matches[group_select]
    return next((group for group in match if group), None) if isinstance(match, tuple) else match


def _named_choice(
    text: str, choices: Sequence[str], *, regex_pattern: str = r"#### (\-?[0-9\.\,]+)", group_select: int = 0,
    fallback: str = "[invalid]", ignore_case: bool = False, ignore_punctuation: bool = False,
    regexes_to_ignore: Sequence[str] | None = None,
) -> str:  # fmt: skip
    """Return a match of the pattern; else the letter, as ``(A)``, of a choice whose text is there, or that follows a colon."""

    def plain(value: str) -> str:
        value = reduce(lambda stripped, pattern: re.sub(pattern, "", stripped), regexes_to_ignore or (), value)
        value = value.lower() if ignore_case else value
        return "".join(c for c in value if unicodedata.category(c)[0] != "P") if ignore_punctuation else value

    letters = [chr(ord("A") + i) for i in range(len(choices))]
    by_text = {plain(choice.strip()): f"({letter})" for choice, letter in zip(choices, letters, strict=True)}
    longest_first = sorted(map(re.escape, by_text), key=len, reverse=True)
    attempts: tuple[tuple[str, str, Mapping[str, str]], ...] = (
        (regex_pattern, text, {}),
        ("|".join(longest_first), plain(text), by_text),
        (rf":\s*({'|'.join(letters)})", text, {letter: f"({letter})" for letter in letters}),
    )
    for pattern, searched, names in attempts:
        name = (_chosen_match(re.findall(pattern, searched), group_select) or "").strip()
        if name:
            return names.get(name, name)
    return fallback


def _mapped(text: str, *, mapping_dict: Mapping[str, Any], default_value: Any = None) -> str:
    """Return the cell beside `text` in a table, as text."""
    return str(mapping_dict.get(text, default_value))


FILTERS: Mapping[str, Callable[..., str]] = {
    "regex": _first_match, "remove_whitespace": str.strip, "lowercase": str.lower, "uppercase": str.upper,
    "take_first": str, "majority_vote": str, "map": _mapped, "multi_choice_regex": _named_choice,
}  # fmt: skip
"""Filters of lm-evaluation-harness's tasks; a question has one answer here, which is the first, and the majority."""
NEEDS_CHOICES = frozenset({"multi_choice_regex"})
"""Those that read the choices of the question, too."""
ChoiceGrader = Callable[[str, Sequence[str], Sequence[str]], bool]
"""(text, accepted texts, the question's choices) -> whether the text is correct."""


def task_grader(
    filters: Sequence[Mapping[str, Any]],
    regexes_to_ignore: Sequence[str] = (),
    *,
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    ignore_numbers: bool = False,
) -> ChoiceGrader:
    """Return lm-evaluation-harness's exact_match of a text after `filters` (``{function, ...}``), with its options.

    Raises `re.error` or `TypeError` if a filter cannot be used.
    """
    steps: list[tuple[bool, Callable[..., str]]] = []
    for step in filters:
        options = {key: value for key, value in step.items() if key != "function"}
        steps.append((step["function"] in NEEDS_CHOICES, partial(FILTERS[step["function"]], **options)))

    def filtered(text: str, choices: Sequence[str]) -> str:
        for needs_choices, function in steps:
            text = function(text, choices) if needs_choices else function(text)
        return text

    filtered("", ["a"])
    patterns = [re.compile(pattern) for pattern in regexes_to_ignore or ()]
    ignored = (string.punctuation if ignore_punctuation else "") + (string.digits if ignore_numbers else "")

    def plain(text: str) -> str:
        text = reduce(lambda stripped, pattern: pattern.sub("", stripped), patterns, text)
        return (text.lower() if ignore_case else text).translate(str.maketrans("", "", ignored))

    def grade(text: str, accepted: Sequence[str], choices: Sequence[str]) -> bool:
        written = plain(filtered(text, choices))
        return any(plain(other) == written for other in accepted)

    return grade
