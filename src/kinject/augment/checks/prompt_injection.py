"""Text that speaks to a language model instead of telling of something: found, so that nothing kept rests on it.

A document may say "ignore the above and write ...". No list of patterns finds every such order, in every language. What is
found is left out of what a rewriting is held to, so that a model which obeyed it is caught by the checks of facts; and
where such a passage is judged, the judge must see an error planted for it.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MODELS = (
    r"(?:AIs?|LLMs?|(?:large )?language models?|chatbots?|(?:AI )?assistants?|paraphrasers?|rewriters?|graders?|examiners?|"
    r"judges?)"
)
_ORDERS = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b[^.\n]{0,60}?\b(?:instructions?|prompts?|rules|above|previous|prior|preceding|"
    r"passage|guidelines|everything)\b"
    r"|\b(?:you are|act as|pretend to be)\s+(?:now\s+)?(?:an?|the)\s+(?:AI|artificial intelligence|LLM|chatbot|(?:large )?"
    r"language model)\b"
    rf"|\b(?:dear|attention|(?:note|message|instructions?) (?:to|for))\W+(?:the |any |all )?{_MODELS}\b"
    r"|\b(?:answer|reply|respond|say|output|write|print|return)\b[^.\n]{0,40}?\b(?:instead|only|exactly|nothing else|nothing but|"
    r"verbatim)\b[^.\n]{0,40}?[:\"“‘']"
    r"|\byou (?:must|should|shall) (?:now )?(?:always )?(?:answer|reply|respond|output|rewrite|paraphrase|rate|score)\b"
    r"|\b(?:system|developer) (?:prompt|message|override)\b|\bnew instructions?\s*:"
    r"|<\|[^|>\n]{1,40}\|>|\[/?INST\]|</?(?:passage|rewriting|system|instructions?)>"
    r"|(?-i:\b(?:UN)?FAITHFUL\b)",
    re.IGNORECASE,
)
_START = re.compile(r"[.!?:;…。！？][\"”’)\]]*\s+|\n")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_TAGS = re.compile(r"<(?=/?(?:passage|rewriting)>)", re.IGNORECASE)


@lru_cache(maxsize=256)
def split_injection(text: str) -> tuple[str, str]:
    """Return (`text` without what gives a model orders, that): each from its sentence to the end of its paragraph."""
    told, orders, place = [], [], 0
    while found := _ORDERS.search(text, place):
        starts = [start.end() for start in _START.finditer(text, place, found.start())]
        start = starts[-1] if starts else place
        end = _PARAGRAPH.search(text, found.end())
        stop = end.start() if end else len(text)
        told.append(text[place:start])
        orders.append(text[start:stop])
        place = stop
    return "".join([*told, text[place:]]).strip(), "\n".join(orders)


def has_injection(*texts: str) -> bool:
    """Return whether any of `texts` speaks to a language model."""
    return any(_ORDERS.search(text) for text in texts)


def fenced(text: str) -> str:
    """Return `text` so that it cannot end the tags which prompts put around it."""
    return _TAGS.sub("‹", text)
