"""The figures on the page of findings, as a test compares them: numbers of rows, and differences with interval and p."""

from __future__ import annotations

import re

DIFFERENCE = r"([+-]\d+\.\d)(?: points)?(?: of [a-z ]+)?,? ?\(?(?:(-?\d+\.\d) to (-?\d+\.\d))?"
"""A signed difference, and the interval that may follow it."""
_DIFFERENCE = re.compile(DIFFERENCE + r"(?:[,;] (p [<=] \d\.\d+))?")


def plain(text: str) -> str:
    """Return a page with one spelling of minus signs and ranges, and nothing bold."""
    return text.replace("−", "-").replace("–", " to ").replace("**", "")


def sections(page: str) -> dict[str, str]:
    """Return the text below each heading."""
    parts = re.split(r"^#+ (.*)$", plain(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(text: str) -> list[str]:
    """Return the numbers with a decimal of each row of the tables that has some."""
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            numbers = re.findall(r"\d+\.\d+", line.strip("|").partition("|")[2])
            if numbers:
                found.append(" ".join(numbers))
    return found


def differences(text: str) -> list[str]:
    """Return each signed difference with the interval and the p that follow it, each p, and each percentage of the prose."""
    flat = " ".join(text.split())
    matches = _DIFFERENCE.finditer(flat)
    found = [" ".join(filter(None, match.groups())) for match in matches]
    found += re.findall(r"p [<=] \d\.\d+", flat)
    prose = (line for line in text.splitlines() if not line.startswith("|"))
    return found + re.findall(r"\d+\.\d%", " ".join(prose))


def figures(text: str) -> list[str]:
    """Return all of these once."""
    return list(dict.fromkeys([*rows(text), *differences(text)]))
