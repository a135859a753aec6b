"""Prompt injection: text in a document or an answer that speaks to a language model, a judge for
instance.

A document may contain "ignore the above and write ...". No list of patterns finds every such
sentence, in every language. A passage is compared with its rewriting without the sentences found
here, so that the checks of facts refuse a rewriting that follows them. The judge must also detect
an error planted in the rewriting of such a passage.
"""

from __future__ import annotations

import re
from functools import lru_cache

_MODELS = (
    r"(?:AIs?|LLMs?|(?:large )?language models?|chatbots?|(?:AI )?assistants?|paraphrasers?"
    r"|rewriters?|graders?|examiners?|judges?)"
)
# Bounded repeats: an unbounded one is quadratic or cubic on repeated text, and answers are
# untrusted.
_INJECTION = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b[^.\n]{0,60}?"
    r"\b(?:instructions?|prompts?|rules|above|previous|prior|preceding|passage|guidelines"
    r"|everything)\b"
    r"|\b(?:you are|act as|pretend to be)\s+(?:now\s+)?(?:an?|the)\s+"
    r"(?:AI|artificial intelligence|LLM|chatbot|(?:large )?language model)\b"
    r"|\b(?:dear|attention|(?:note|message|instructions?) (?:to|for))\W+"
    rf"(?:the |any |all )?{_MODELS}\b"
    r"|\b(?:answer|reply|respond|say|output|write|print|return)\b[^.\n]{0,40}?"
    r"\b(?:instead|only|exactly|nothing else|nothing but|verbatim)\b[^.\n]{0,40}?[:\"“‘']"
    r"|\byou (?:must|should|shall) (?:now )?(?:always )?"
    r"(?:answer|reply|respond|output|rewrite|paraphrase|rate|score)\b"
    r"|\b(?:system|developer) (?:prompt|message|override)\b|\bnew instructions?\s*:"
    r"|<\|[^|>\n]{1,40}\|>|\[/?INST\]"
    r"|</?(?:passage|rewriting|system|instructions?|answer|accepted)>"
    r"|\b(?:grade|mark|score|rate|judge|count|accept)\W+"
    r"(?:this|that|it|me|(?:the|my|this) answer)\b[^.\n]{0,30}?\b(?:as|correct)\b"
    r"|[\"“]?grade[\"”]?\s*:\s*[\"“]?(?:correct|wrong|abstained)"
    r"|(?-i:\b(?:UN)?FAITHFUL\b)",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"[.!?:;…。！？।۔؟][\"”’)\]]*\s+|\n")
_PARAGRAPH = re.compile(r"\n[ \t]*\n")
_TAGS = re.compile(
    r"<(?=/?(?:passage|rewriting|statements|question|accepted|answer)>)", re.IGNORECASE
)


@lru_cache(maxsize=256)
def split_injection(text: str) -> tuple[str, str]:
    """Return (`text` without prompt injection, the injection).

    An injection reaches from the beginning of its sentence to the end of its paragraph.
    """
    clean, injected, position = [], [], 0
    match = _INJECTION.search(text)
    while match:
        start, end = position, len(text)
        for sentence_end in _SENTENCE_END.finditer(text, position, match.start()):
            start = sentence_end.end()
        paragraph = _PARAGRAPH.search(text, match.end())
        if paragraph:
            end = paragraph.start()
        clean.append(text[position:start])
        injected.append(text[start:end])
        position = end
        match = _INJECTION.search(text, position)
    return "".join([*clean, text[position:]]).strip(), "\n".join(injected)


def has_injection(*texts: str) -> bool:
    """Return whether any of `texts` speaks to a language model."""
    return any(map(_INJECTION.search, texts))


def escape_tags(text: str) -> str:
    """Return `text` with the tags that prompts put around it made harmless."""
    return _TAGS.sub("‹", text)
