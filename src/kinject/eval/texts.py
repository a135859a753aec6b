"""Reads the letter of an option in a text that a model wrote."""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Sequence

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
