r"""LaTeX of written answers as plain text: \frac{3}{4} is 3/4, 10^{6} 10^6, 5\,\text{km} 5 km.

Models that write for readers of Markdown write numbers and units so. A form that is unknown here
stays as it is.
"""

from __future__ import annotations

import re

_HAS_LATEX = re.compile(r"\\[A-Za-z(\[,;!%$ ]|[$^_{]")

# Bounded: thousands of marks that none closes would be searched to the end of the text each.
_ANY = ".{1,1000}?"
_INLINE = re.compile(rf"\\\(({_ANY})\\\)|\\\[({_ANY})\\\]|\$\$({_ANY})\$\$", re.DOTALL)
# As Pandoc tells a formula from "$5 and $6": no space inside, no digit behind.
_DOLLARS = re.compile(r"(?<![\\$\w])\$(?![\s$])([^$\n]{0,300}?[^$\n\s\\])\$(?![\d$])")
_NUMBER = re.compile(r"-?\d[\d.,]*")
_MEASURE = re.compile(r"\s?[A-Za-z%°\\]")

_SIGNS = {
    **{"times": "×", "cdot": "·", "div": "÷", "pm": "±", "mp": "∓", "infty": "∞"},
    **{"leq": "≤", "le": "≤", "leqslant": "≤", "geq": "≥", "ge": "≥", "geqslant": "≥"},
    **{"neq": "≠", "ne": "≠", "lt": "<", "gt": ">", "approx": "≈", "sim": "~", "degree": "°"},
    **{"rightarrow": "→", "to": "→", "ldots": "...", "dots": "...", "cdots": "...", "mid": "|"},
}
"""Name of a command -> its sign."""
_LETTERS = {
    **{"alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "varepsilon": "ε"},
    **{"zeta": "ζ", "eta": "η", "theta": "θ", "iota": "ι", "kappa": "κ", "lambda": "λ", "mu": "μ"},
    **{"nu": "ν", "xi": "ξ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ"},
    **{"varphi": "φ", "chi": "χ", "psi": "ψ", "omega": "ω", "Gamma": "Γ", "Delta": "Δ"},
    **{"Theta": "Θ", "Lambda": "Λ", "Pi": "Π", "Sigma": "Σ", "Phi": "Φ", "Psi": "Ψ", "Omega": "Ω"},
}
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|arcsin|arccos|arctan|sinh|cosh|tanh|log|ln|lg|exp|min|max"
_ENDS = "(?![A-Za-z])"
_SIGN = re.compile(rf"\\({'|'.join(_SIGNS)}){_ENDS}")
# A command takes the spaces behind it.
_LETTER = re.compile(rf"\\({'|'.join(_LETTERS)}){_ENDS} ?")
_FUNCTION = re.compile(rf"\\({_FUNCTIONS}){_ENDS}")
_SIZE = re.compile(rf"\\(?:left|right|bigl?|bigr|Bigl?|Bigr|displaystyle){_ENDS}\.?")
_DEGREE = re.compile(rf"\s?\^(?:\\circ{_ENDS}|\{{\s?\\circ\s?\}})")
_DIGIT_GROUP = re.compile(r"(?<=\d)\{,\}(?=\d)")
_THIN_SPACE = re.compile(r"\\[,;: ]|(?<=[\w}$])~(?=[A-Za-z\\])")
_ESCAPED = re.compile(r"\\([%$&#_])")

_GROUP = r"\{([^{}]*)\}"
_FONT = re.compile(
    r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mathbb|mathcal|operatorname"
    rf"|boxed|fbox|mbox|emph|underline|bm|boldsymbol|ce){_ENDS}\*?\s?{_GROUP}"
)
_FRACTION = re.compile(rf"\\[dtc]?frac\s?(?:{_GROUP}\s?{_GROUP}|(\d)\s?(\d))")
_ROOT = re.compile(rf"\\sqrt\s?(?:{_GROUP}|(\d))")
_RAISED = re.compile(rf"([\^_]){_GROUP}")
_SUBSCRIPT = re.compile(r"(?<=[A-Za-z)])_(?=\d)")
"""Of SO_4, which is SO4."""
_CHARGE = re.compile(r"(?<=[\w)])\^(?=[+-](?!\w))")
_SIMPLE = re.compile(r"-?(?:[\w.,]+|[^\W\d_]+(?: [^\W\d_]+)*)")
"""What needs no brackets in a fraction or below a root: a number, a name, a few words."""
_DEEPEST = 8


def plain_latex(text: str) -> str:
    """Return `text` with its formulas as they are written without LaTeX."""
    if not _HAS_LATEX.search(text):
        return text
    plain = _DOLLARS.sub(_without_dollars, _INLINE.sub(_inside, text))
    if "\\" in plain or "{" in plain:
        plain = _without_commands(plain)
    # A text that is nothing but marks, such as code, is left alone.
    return plain if plain.strip() else text


def _inside(formula: re.Match[str]) -> str:
    return _without_commands(next(filter(None, formula.groups())))


def _without_dollars(formula: re.Match[str]) -> str:
    """Return the formula between two dollar signs; a number alone may be a price."""
    is_price = _NUMBER.fullmatch(formula[1]) is not None
    if is_price and not _MEASURE.match(formula.string, formula.end()):
        return formula[0]
    # Here, since no letter behind the sign continues a command: $\\mu$m.
    return _without_commands(formula[1])


def _without_commands(text: str) -> str:
    text = _DIGIT_GROUP.sub(",", _SIZE.sub("", text))
    text = _THIN_SPACE.sub(" ", text.replace("\\!", "").replace("\\quad", " "))
    text = _DEGREE.sub("°", text)
    text = _LETTER.sub(_letter_of, _SIGN.sub(_sign_of, text))
    # The innermost groups first.
    for _ in range(_DEEPEST):
        plain = _RAISED.sub(_raised, _FONT.sub(r"\1", text))
        plain = _FRACTION.sub(_quotient, _ROOT.sub(_root, plain))
        if plain == text:
            break
        text = plain
    text = _CHARGE.sub("", _SUBSCRIPT.sub("", text))
    return _ESCAPED.sub(r"\1", _FUNCTION.sub(r"\1", text))


def _sign_of(command: re.Match[str]) -> str:
    return _SIGNS[command[1]]


def _letter_of(command: re.Match[str]) -> str:
    return _LETTERS[command[1]]


def _raised(power: re.Match[str]) -> str:
    return power[1] + _in_brackets(power[2], r"[+-]?\w*|\d*[+-]")


def _quotient(fraction: re.Match[str]) -> str:
    above, below = [part for part in fraction.groups() if part is not None]
    quotient = f"{_in_brackets(above)}/{_in_brackets(below)}"
    # 2\frac{1}{2} is two and a half.
    if fraction.string[: fraction.start()][-1:].isdigit():
        return f" {quotient}"
    return quotient


def _root(root: re.Match[str]) -> str:
    return "√" + _in_brackets(root[1] or root[2])


def _in_brackets(part: str, simple: str | re.Pattern[str] = _SIMPLE) -> str:
    """Return a part of a formula, in brackets unless it is `simple`."""
    part = part.strip()
    if re.fullmatch(simple, part):
        return part
    return f"({part})"
