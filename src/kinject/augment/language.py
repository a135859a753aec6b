"""Which script and language a text is in, by its letters and its commonest words: enough to tell when it changed."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

_SCRIPTS = (
    ("Latin", "a-zA-Z\u00c0-\u024f\u1e00-\u1eff"),
    ("Cyrillic", "\u0400-\u052f"),
    ("Greek", "\u0370-\u03ff\u1f00-\u1fff"),
    ("Arabic", "\u0600-\u06ff"),
    ("Hebrew", "\u0590-\u05ff"),
    ("Devanagari", "\u0900-\u097f"),
    ("Thai", "\u0e00-\u0e7f"),
    ("Japanese", "\u3040-\u30ff"),
    ("Chinese", "\u4e00-\u9fff"),
    ("Korean", "\uac00-\ud7af"),
)
_LETTERS = tuple((name, re.compile(f"[{letters}]")) for name, letters in _SCRIPTS)
_COMMON_WORDS = {
    "English": "the of and to in is was for with that on as by from at are were his her which this it",
    "German": "der die das und ist nicht von den mit ein eine zu im des dem auf für war als auch sich",
    "French": "le la les et des est une dans du pour que qui sur par avec était au il elle ce cette ses",
    "Spanish": "el la los las y que en del por con una para es fue su se como más pero sus al lo",
    "Italian": "il lo gli di che è per una con del della nel sono era dei alla più come si anche suo",
    "Portuguese": "o os as e que do da em para com uma dos das foi não por mais como no na seu sua ao",
    "Dutch": "de het een en van is in op te dat die voor met zijn was niet aan er ook door naar",
    "Swedish": "och att det som en är på för av med den till var ett har inte han hon om från",
    "Polish": "i w na z do się nie jest to że o jako przez był była od oraz po dla",
    "Turkish": "ve bir bu da de için ile olarak olan çok daha gibi kadar sonra en o",
}
_WORDS = {word: [] for words in _COMMON_WORDS.values() for word in words.split()}  # type: dict[str, list[str]]
for _language, _text in _COMMON_WORDS.items():
    for _word in _text.split():
        _WORDS[_word].append(_language)
_ASCII_LETTER = re.compile("[a-zA-Z]")
_TOKEN = re.compile(r"[^\W\d_]+")


def script_of(text: str) -> str:
    """Return the script of most letters, "" where there are none. Any kana among Chinese characters is Japanese."""
    if text.isascii():
        return "Latin" if _ASCII_LETTER.search(text) else ""
    counts = {name: len(pattern.findall(text)) for name, pattern in _LETTERS}
    if counts["Japanese"] * 10 > counts["Chinese"]:
        counts["Japanese"] += counts["Chinese"]
    best = max(counts, key=lambda name: counts[name])
    return best if counts[best] else ""


def language_of(text: str) -> str:
    """Return the language whose common words make up more of `text` than any other's, "" where that is not clear."""
    common = [word for word in _TOKEN.findall(text.lower()) if word in _WORDS]
    counts = Counter([language for word in common for language in _WORDS[word]])
    ranked = [*counts.most_common(2), ("", 0), ("", 0)]
    (best, hits), (_, others) = ranked[0], ranked[1]
    return best if hits >= 5 and hits > 1.5 * others else ""


@lru_cache(maxsize=256)
def _of_source(text: str) -> tuple[str, str]:
    """Return script and language, remembered while the rewritings of a source are checked."""
    return script_of(text), language_of(text)


def compare_languages(source: str, variant: str) -> str:
    """Return what changed ("French for English"), "" where nothing did or it cannot be told."""
    for old, new in zip(_of_source(source), (script_of(variant), language_of(variant)), strict=True):
        if old and new and old != new:
            return f"{new} for {old}"
    return ""
