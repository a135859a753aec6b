"""Equations of Office files (m:oMath) and of web pages (MathML) as LaTeX: x^{2}, \\frac{a}{b}.

Their letters alone would be a wrong fact: b2 for b squared, 12 for a half.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from kinject.documents.office import attribute_at
from kinject.documents.text import XmlElement, one_line, parse_xml

MATH = "{http://schemas.openxmlformats.org/officeDocument/2006/math}"
_NAMES = """
    arccos arcsin arctan arg cos cosh cot coth csc deg det dim exp gcd inf ker lg lim liminf limsup
    ln log max min Pr sec sin sinh sup tan tanh
"""
_FUNCTIONS = frozenset(_NAMES.split())
_BIG_SIGNS = """
    ∑ sum  ∏ prod  ∐ coprod  ∫ int  ∬ iint  ∭ iiint  ∮ oint  ⋃ bigcup  ⋂ bigcap  ⋁ bigvee
    ⋀ bigwedge
"""
_OPERATORS = dict(re.findall(r"(\S) (\w+)", _BIG_SIGNS))
_SIGNS_ABOVE = """
    \u0300 grave  \u0301 acute  \u0302 hat  \u0303 tilde  \u0304 bar  \u0305 overline  \u0306 breve
    \u0307 dot  \u0308 ddot  \u030c check  \u20d7 vec  ^ hat  ~ tilde  ¯ bar  ‾ overline  ˙ dot
    ¨ ddot  → vec  ˇ check  ˘ breve  ⏞ overbrace  ⏟ underbrace  _ underline
"""
_ACCENTS = dict(re.findall(r"(\S) (\w+)", _SIGNS_ABOVE))
_BRACE = re.compile(r"[{}]")
_UNSEEN = re.compile("[\u2061-\u2064]")
"""Function application, invisible times, separator and plus."""
_ALIGNMENT = re.compile(r"(?<! )&|&(?! )")
_DRAWN = frozenset({"drawing", "object", "pict"})
"""Pictures and embedded objects of Word."""
_WORD = re.compile(r"\w+")


class UnwritableMath(Exception):
    """An equation that cannot be written as text."""


def equation_text(equation: XmlElement) -> str:
    """Return an equation: as it is if it is one line of signs, else as LaTeX in \\( \\).

    Raises `UnwritableMath` for what has no form in LaTeX.
    """
    # A page may hold its author's LaTeX beside the MathML.
    for note in equation.iter("{*}annotation"):
        if note.get("encoding", "") == "application/x-tex":
            return f"\\({one_line(note.text or '')}\\)"
    text = one_line(_content(equation))
    # Not between dollar signs, which make a price of the number behind them.
    if re.search(r"[\\^_]", text):
        return f"\\({text}\\)"
    return text


def mathml_text(source: str) -> str:
    """Return an equation of a web page; one that cannot be written leaves its mark."""
    try:
        return equation_text(parse_xml(Path("page"), source.encode()))
    except (UnwritableMath, RecursionError):
        return "[an equation]"


def _content(element: XmlElement | None) -> str:
    """Return what the children of an element hold."""
    if element is None:
        return ""
    return "".join(_written(child) for child in element if isinstance(child.tag, str))


def _written(element: XmlElement) -> str:
    """Return an element of an equation as LaTeX."""
    name = element.tag.rpartition("}")[2]
    if name in ("t", "mi", "mn", "mo"):
        return _signs(element.text or "")
    # Properties, and what was deleted.
    if name.endswith("Pr") or name in ("del", "moveFrom", "annotation", "annotation-xml"):
        return ""
    write = _FORMS.get(name)
    if write is not None:
        return write(element)
    is_of_word = "wordprocessingml" in element.tag and name not in _DRAWN
    if is_of_word or name in _PLAIN:
        return _content(element)
    raise UnwritableMath(name)


def _signs(text: str) -> str:
    # Of LaTeX's special signs only braces would change the meaning here: a bare % stays readable.
    return _BRACE.sub(r"\\\g<0>", _UNSEEN.sub("", text))


_HOLDERS = """
    oMath oMathPara r box e num den sup sub deg lim fName
    math mrow mstyle mpadded semantics mspace merror
"""
_PLAIN = frozenset(_HOLDERS.split())
"""Elements that only hold others."""


def _part(element: XmlElement, name: str) -> str:
    return _content(element.find(f"{MATH}{name}"))


def _setting(element: XmlElement, name: str, default: str) -> str:
    """Return the value of a property of an element: ``chr`` of m:nary is in m:naryPr."""
    return attribute_at(element, f"{element.tag}Pr/{MATH}{name}", f"{MATH}val", default)


def _is_on(element: XmlElement, name: str) -> bool:
    """Return whether a switch is set; without a value it is."""
    if element.find(f"{element.tag}Pr/{MATH}{name}") is None:
        return False
    return _setting(element, name, "1") in ("1", "on", "true")


def _group(text: str) -> str:
    """Return a base in braces, unless it is one sign: {ab}^{2}."""
    if len(text) == 1:
        return text
    return f"{{{text}}}"


def _word_or_group(base: str) -> str:
    """Return what has limits or powers: a function by its name in LaTeX, else a group."""
    if base in _FUNCTIONS:
        return f"\\{base}"
    return _group(base)


def _unless_hidden(element: XmlElement, name: str) -> str:
    """Return a part of an element that a switch may hide: ``sub`` unless ``subHide`` is set."""
    if _is_on(element, f"{name}Hide"):
        return ""
    return _part(element, name)


def _scripts(base: str, sub: str, sup: str) -> str:
    text = base
    if sub:
        text += f"_{{{sub}}}"
    if sup:
        text += f"^{{{sup}}}"
    return text


def _scripted(element: XmlElement) -> str:
    base = _group(_part(element, "e"))
    return _scripts(base, _part(element, "sub"), _part(element, "sup"))


def _prescripted(element: XmlElement) -> str:
    return _scripts("{}", _part(element, "sub"), _part(element, "sup")) + _part(element, "e")


def _fraction(element: XmlElement) -> str:
    above, below = _part(element, "num"), _part(element, "den")
    if _setting(element, "type", "bar") == "noBar":
        return f"\\genfrac{{}}{{}}{{0pt}}{{}}{{{above}}}{{{below}}}"
    return f"\\frac{{{above}}}{{{below}}}"


def _root(element: XmlElement) -> str:
    return _root_of(_part(element, "e"), _unless_hidden(element, "deg"))


def _root_of(content: str, degree: str) -> str:
    index = ""
    if degree:
        index = f"[{degree}]"
    return f"\\sqrt{index}{{{content}}}"


def _operator(element: XmlElement) -> str:
    """Return a sum, a product, an integral with its limits."""
    sign = _setting(element, "chr", "∫")
    sub, sup = _unless_hidden(element, "sub"), _unless_hidden(element, "sup")
    return f"{_scripts(_big_sign(sign), sub, sup)}{{{_part(element, 'e')}}}"


def _big_sign(sign: str) -> str:
    if sign in _OPERATORS:
        return f"\\{_OPERATORS[sign]}"
    return sign


def _delimited(element: XmlElement) -> str:
    separator = _setting(element, "sepChr", "|")
    parts = [_content(child) for child in element.iterchildren(f"{MATH}e")]
    begin, end = _setting(element, "begChr", "("), _setting(element, "endChr", ")")
    return _signs(begin) + _signs(separator).join(parts) + _signs(end)


def _function(element: XmlElement) -> str:
    name = _WORD.sub(_function_name, _part(element, "fName"), count=1)
    argument = _part(element, "e")
    if not argument.startswith("("):
        argument = f"{{{argument}}}"
    return name + argument


def _function_name(word: re.Match[str]) -> str:
    name = word[0]
    # Already one, \lim of a limit below it; or the f of f(x).
    if word.string[: word.start()].endswith("\\") or len(name) == 1:
        return name
    if name in _FUNCTIONS:
        return f"\\{name}"
    return f"\\operatorname{{{name}}}"


def _lower_limit(element: XmlElement) -> str:
    return _scripts(_word_or_group(_part(element, "e").strip()), _part(element, "lim"), "")


def _upper_limit(element: XmlElement) -> str:
    return _scripts(_word_or_group(_part(element, "e").strip()), "", _part(element, "lim"))


def _accent(element: XmlElement) -> str:
    sign = _setting(element, "chr", "\u0302")
    return _accented(sign, _part(element, "e"))


def _accented(sign: str, base: str) -> str:
    if sign not in _ACCENTS:
        raise UnwritableMath(f"accent {sign!r}")
    return f"\\{_ACCENTS[sign]}{{{base}}}"


def _bar(element: XmlElement) -> str:
    line = {"top": "overline"}.get(_setting(element, "pos", "bot"), "underline")
    return f"\\{line}{{{_part(element, 'e')}}}"


def _group_sign(element: XmlElement) -> str:
    """Return a brace or an arrow above or below its content."""
    sign, base = _setting(element, "chr", "⏟"), _part(element, "e")
    if sign in "⏞⏟":
        return f"\\{_ACCENTS[sign]}{{{base}}}"
    place = {"top": "overset"}.get(_setting(element, "pos", "bot"), "underset")
    return f"\\{place}{{{sign}}}{{{base}}}"


def _boxed(element: XmlElement) -> str:
    return f"\\boxed{{{_part(element, 'e')}}}"


def _phantom(element: XmlElement) -> str:
    """Return what is shown of a phantom, which may be its space only."""
    if _setting(element, "show", "1") in ("1", "on", "true"):
        return _part(element, "e")
    return ""


def _matrix(element: XmlElement) -> str:
    rows = []
    for row in element.iterchildren(f"{MATH}mr"):
        cells = row.iterchildren(f"{MATH}e")
        rows.append(list(map(_content, cells)))
    return _array("matrix", rows)


def _array(name: str, rows: list[list[str]]) -> str:
    lines = " \\\\ ".join(" & ".join(row) for row in rows)
    return f"\\begin{{{name}}} {lines} \\end{{{name}}}"


def _equation_array(element: XmlElement) -> str:
    rows = []
    for line in element.iterchildren(f"{MATH}e"):
        # There "&" only aligns the lines and is not shown; that of a matrix has spaces around it.
        text = _ALIGNMENT.sub("", _content(line))
        rows.append([text])
    if len(rows) == 1:
        return rows[0][0]
    return _array("aligned", rows)


def _nth(element: XmlElement, index: int) -> str:
    """Return the content of a child of MathML, where arguments are known by their order."""
    children = [child for child in element if isinstance(child.tag, str)]
    return "".join(map(_written, children[index : index + 1]))


def _web_scripted(element: XmlElement) -> str:
    name = element.tag.rpartition("}")[2]
    base = _nth(element, 0).strip()
    if base in _OPERATORS:
        base = _big_sign(base)
    else:
        base = _word_or_group(base)
    if name in ("msup", "mover"):
        return _scripts(base, "", _nth(element, 1))
    return _scripts(base, _nth(element, 1), _nth(element, 2))


def _web_over(element: XmlElement) -> str:
    """Return an accent, or a limit above its base."""
    sign = _nth(element, 1).strip().removeprefix("\\")
    if sign in _ACCENTS:
        return _accented(sign, _nth(element, 0))
    return _web_scripted(element)


def _web_fraction(element: XmlElement) -> str:
    return f"\\frac{{{_nth(element, 0)}}}{{{_nth(element, 1)}}}"


def _web_root(element: XmlElement) -> str:
    return _root_of(_nth(element, 0), _nth(element, 1))


def _web_square_root(element: XmlElement) -> str:
    return _root_of(_content(element), "")


def _web_fenced(element: XmlElement) -> str:
    parts = [_written(child) for child in element]
    separator: str = element.get("separators", ",")[:1]
    begin, end = element.get("open", "("), element.get("close", ")")
    return _signs(begin) + separator.join(parts) + _signs(end)


def _web_table(element: XmlElement) -> str:
    return _array("matrix", [list(map(_content, row)) for row in element])


def _web_text(element: XmlElement) -> str:
    text = one_line(element.text or "")
    if not text:
        return ""
    return f"\\text{{{text}}}"


def _nothing(_: XmlElement) -> str:
    return ""


_FORMS: Mapping[str, Callable[[XmlElement], str]] = {
    **dict.fromkeys(("sSup", "sSub", "sSubSup"), _scripted),
    **dict.fromkeys(("msup", "msub", "msubsup", "munder", "munderover"), _web_scripted),
    "sPre": _prescripted,
    "f": _fraction,
    "rad": _root,
    "nary": _operator,
    "d": _delimited,
    "func": _function,
    "limLow": _lower_limit,
    "limUpp": _upper_limit,
    "acc": _accent,
    "bar": _bar,
    "groupChr": _group_sign,
    "borderBox": _boxed,
    "phant": _phantom,
    "m": _matrix,
    "eqArr": _equation_array,
    "mover": _web_over,
    "mfrac": _web_fraction,
    "mroot": _web_root,
    "msqrt": _web_square_root,
    "mfenced": _web_fenced,
    "mtable": _web_table,
    "mtext": _web_text,
    "mphantom": _nothing,
}
