"""Charsets: their names on the web, in mails and of Windows, and what their bytes look like."""

from __future__ import annotations

import codecs
import re
from functools import lru_cache

_CHARSET = re.compile(
    rb"""<(?:meta|\?xml)[^>]{0,200}(?:charset|encoding)\s*=\s*["']?([\w-]+)""", re.IGNORECASE
)
DETECTED = (
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257"),
    *("cp874", "gb18030", "big5", "shift_jis", "euc_jp", "euc_kr", "cp866", "iso8859_2"),
    "mac_cyrillic",
)
"""Encodings that are looked for in a text that declares none."""
_DECLARED = (
    *DETECTED,
    *("utf-8", "utf-16", "utf-16-le", "utf-16-be", "koi8-u", "cp1258", "gbk", "gb2312"),
    *("iso2022_jp", "iso2022_kr", "hz", "utf-7", "mac-roman", "mac_greek", "mac_latin2"),
    *("mac_turkish", "cp932", "cp949", "cp950", "big5hkscs", "johab", "cp437", "cp850", "cp852"),
    *("cp737", "cp775", "cp855", "cp857", "cp860", "cp861", "cp862", "cp863", "cp864", "cp865"),
    *("cp869", "cp858"),
    # There is no iso8859-12.
    *(f"iso8859-{n}" for n in range(1, 17) if n != 12),
)
# Not every codec of Python: idna and punycode raise a UnicodeError that is no UnicodeDecodeError,
# unicode_escape makes halves of surrogate pairs, at which selectolax raises.
CHARSETS = frozenset(codecs.lookup(name).name for name in _DECLARED)
"""Encodings that a page or a mail may declare: those of the web and of code pages, none of which
runs code or takes long."""
_CODE_PAGES = {
    **{932: "cp932", 936: "gb18030", 20936: "gb18030", 51936: "gb18030", 54936: "gb18030"},
    **{10000: "mac-roman", 10006: "mac_greek", 10007: "mac_cyrillic", 10029: "mac_latin2"},
    **{10081: "mac_turkish", 1361: "johab", 20866: "koi8-r", 21866: "koi8-u", 20127: "ascii"},
    **{20932: "euc_jp", 51932: "euc_jp", 50220: "iso2022_jp", 50221: "iso2022_jp"},
    **{50222: "iso2022_jp", 50225: "iso2022_kr", 51949: "cp949", 20949: "cp949", 52936: "hz"},
    **{38598: "iso8859-8", 65000: "utf-7", 65001: "utf-8", 1200: "utf-16-le", 1201: "utf-16-be"},
    **{28590 + n: f"iso8859-{n}" for n in range(1, 17) if n != 12},
}
"""Number of a code page of Windows -> its codec, where that is not called by the number."""
_SUPERSETS = {
    **{"iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874"},
    **{"gb2312": "gb18030", "gbk": "gb18030", "euc_kr": "cp949", "shift_jis": "cp932"},
}
"""Codec -> the one that browsers read in its place, which has more characters."""
_OTHER_NAMES = {"cp31j": "cp932", "mac_ukrainian": "mac_cyrillic", "koi8_ru": "koi8_u"}
_HALVES = re.compile(rb"\xed[\xa0-\xaf][\x80-\xbf]\xed[\xb0-\xbf][\x80-\xbf]")
"""A character beyond 16 bits as databases write it that know UTF-8 of up to three bytes only."""
_STRANGE = re.compile("[\udc80-\udcff]")
# Letters above ASCII in UTF-8 for each byte that is not: in other encodings hardly any is.
_FEWEST_OF_UTF8 = 3
# Of letters above ASCII only: Greek or Russian, whatever western encoding a mail declares.
_MOSTLY_HIGH = 0.5
_FEWEST_HIGH = 12
WESTERN_CODECS = frozenset({"cp1252", "iso8859-15", "ascii"})
_CENTRAL = ("cp1250", "iso8859-2", "cp852")
_WEST = ("cp1252", "iso8859-15", "cp850", "mac-roman")
_ALPHABETS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("äöüß", _WEST),
    ("àâæçéèêëîïôœùûüÿ", _WEST),
    ("áéíóúüñçàèìòùï", _WEST),
    ("ãõáâàçéêíóôúü", _WEST),
    ("åäöæøéü", _WEST),
    ("áéíóúýðþæö", _WEST),
    ("ąćęłńóśźż", _CENTRAL),
    ("áčďéěíňóřšťúůýž", _CENTRAL),
    ("áäčďéíĺľňóôŕšťúýž", _CENTRAL),
    ("áéíóöőúüű", _CENTRAL),
    ("čćđšž", _CENTRAL),
    ("ăâîşţ", _CENTRAL),
    ("çğıöşüâî", ("cp1254", "cp857")),
    ("ąčęėįšųūž", ("cp1257",)),
    ("āčēģīķļņšūž", ("cp1257",)),
    ("äöüõšž", ("cp1257",)),
)
"""The letters above ASCII of a language, or of a few, and the encodings that texts in it have."""
_OF_THE_WEST = "äöüßéèêëàâçîïôûùœæñáíóúãõåø"
"""Those of a text in several languages."""
_LIKELIEST = (
    *("cp1252", "iso8859-15", "cp1250", "cp1254", "cp1257", "iso8859-2"),
    *("cp850", "cp852", "mac-roman", "cp857"),
)
"""Encodings in the order in which one of two that are as plausible is taken."""
_MARKS = re.escape("“”‘„–—…€«»°§·\xa0²³½©®´µ•¿¡№")
_BOXES = "─│┌┐└┘├┤┬┴┼═║╔╗╚╝╠╣╦╩╬░▒▓█■"
"""The lines of tables in DOS."""
# Letters above ASCII are a part of a text of Latin letters, and most of Greek or Russian.
_FEW_HIGH = 0.3
# Nearly all signs above ASCII are letters of its language, and marks around words.
_PLAUSIBLE = 0.97
_BINARY = re.compile(b"[\0-\6]")
"""Control characters of pickles and other binary files, which may have few bytes above ASCII."""

_CYRILLIC = ("cp1251", "koi8-r", "koi8-u", "iso8859-5", "cp866", "mac_cyrillic", "cp855")
_CYRILLIC_ALPHABETS = (
    "абвгдежзийклмнопрстуфхцчшщъыьэюяё",
    "абвгдежзийклмнопрстуфхцчшщьюяґєії",
    "абвгдежзйклмнопрстуфхцчшыьэюяёіў",
    "абвгдежзиклмнопрстуфхцчшђјљњћџѓќѕ",
)
"""Of Russian and Bulgarian, Ukrainian, Belarusian, Serbian and Macedonian."""
_CYRILLIC_WORD = re.compile("[Ѐ-ӿ]{3,}")
_MOSTLY_IN_WORDS = 0.5
"""The smallest fraction of the Cyrillic letters of a text that must stand in words. Accented
letters of Italian or Norwegian that are read as Cyrillic stand alone among letters of ASCII."""
_COMMON_CYRILLIC = re.compile("[аеионтрсвліы]")
# Capitals do not count: Hebrew, whose letters are all of one kind, is capitals in KOI8.
_MOSTLY_COMMON = 0.5
"""The fraction of the letters that are small common ones; of Hebrew in Windows-1255 it is 0.4."""


def declared_charset(data: bytes) -> str:
    """Return the charset that a page declares, "" without one."""
    charset = _CHARSET.search(data[:4096])
    return charset[1].decode("ascii") if charset else ""


def mostly_utf8(data: bytes) -> str:
    """Return a text in UTF-8 into which some bytes of another encoding were pasted, "" if it is
    none: read as anything else all its other letters would be wrong."""
    text = _HALVES.sub(_whole_character, data).decode("utf-8", "surrogateescape")
    n_strange = len(_STRANGE.findall(text))
    n_high = sum(letter > "\x7f" for letter in text) - n_strange
    if n_high < _FEWEST_OF_UTF8 * n_strange:
        return ""
    return _STRANGE.sub(_western_letter, text).removeprefix("\ufeff")


def _whole_character(halves: re.Match[bytes]) -> bytes:
    text = halves[0].decode("utf-8", "surrogatepass")
    return text.encode("utf-16", "surrogatepass").decode("utf-16").encode("utf-8")


def _western_letter(byte: re.Match[str]) -> str:
    return byte[0].encode("utf-8", "surrogateescape").decode("cp1252", "replace")


def _codec_of_other_name(name: str) -> codecs.CodecInfo | None:
    """Return the codec of a name that browsers and mail programs know, and Python does not:
    windows-874, x-cp1251, iso-8859-8-i. Python asks with underscores in place of hyphens."""
    plain = name.removeprefix("x_")
    plain = re.sub("^(?:windows|dos)_", "cp", plain)
    # How lines from right to left are stored: of mails as they are read, of old pages as seen.
    plain = re.sub("^(iso_8859_[68])_[ie]$", r"\1", plain)
    plain = _OTHER_NAMES.get(plain, plain)
    if plain == name:
        return None
    return codecs.lookup(plain)


# For all of Python, as the library of mails looks up the charsets of headers itself.
codecs.register(_codec_of_other_name)


def declared_codec(declared: str) -> str:
    """Return the codec for the name of a charset, "" if there is none."""
    try:
        name = codecs.lookup(declared).name
    except (LookupError, ValueError):  # ValueError: a NUL in the name
        return ""
    return _SUPERSETS.get(name, name)


def code_page_codec(number: int) -> str:
    """Return the codec of a code page of Windows, "" if Python has none."""
    name = declared_codec(_CODE_PAGES.get(number, f"cp{number}"))
    if name not in CHARSETS and name != "ascii":
        return ""
    return name


def is_mostly_high(data: bytes) -> bool:
    """Return whether most bytes of the words of `data` are above ASCII, as in no western text."""
    start = b"".join(data[: 2**16].split())
    n_high = sum(byte > 127 for byte in start)
    return n_high >= _FEWEST_HIGH and n_high > _MOSTLY_HIGH * len(start)


def high_part(data: bytes) -> bytes:
    """Return up to 64 KiB of the lines of `data` that hold other bytes than ASCII, and of those
    around them."""
    first = next((match.start() for match in re.finditer(rb"[\x80-\xff]", data)), 0)
    start = max(0, data.rfind(b"\n", 0, first) - 1000)
    return data[start : start + 2**16]


def codec_of_letters(data: bytes) -> str:
    """Return the codec of a text, in which its letters are those of a language and are where
    letters may be; "" if there is none."""
    return _codec_of_cyrillic(data) or _codec_of_latin(data)


def _codec_of_latin(data: bytes) -> str:
    """Return the codec of a text in Latin letters, in which its letters are those of a language and
    are where letters may be; "" if there is none."""
    start = high_part(data)
    n_high = sum(byte > 127 for byte in start)
    if n_high > _FEW_HIGH * len(start) or _BINARY.search(start):
        return ""
    best, most = "", _PLAUSIBLE * n_high
    for codec in _LIKELIEST:
        text = start.decode(codec, "replace")
        for letters, encodings in _ALPHABETS:
            if codec not in encodings:
                continue
            n_plausible = _n_plausible(text, letters)
            if n_plausible > most:
                best, most = codec, n_plausible
    if not best and _n_plausible(start.decode("cp1252", "replace"), _OF_THE_WEST) > most:
        return "cp1252"
    return best


def _codec_of_cyrillic(data: bytes) -> str:
    """Return the codec of a text in Cyrillic letters, in which they are those of a language and
    where letters may be, and most of them its common ones; "" if there is none."""
    start = high_part(data)
    n_high = sum(byte > 127 for byte in start)
    if n_high < _FEWEST_HIGH or _BINARY.search(start):
        return ""
    best, most = "", _MOSTLY_COMMON * n_high
    for codec in _CYRILLIC:
        text = start.decode(codec, "replace")
        n_plausible = max(_n_plausible(text, letters) for letters in _CYRILLIC_ALPHABETS)
        n_common = len(_COMMON_CYRILLIC.findall(text))
        n_in_words = sum(map(len, _CYRILLIC_WORD.findall(text)))
        if n_in_words < _MOSTLY_IN_WORDS * n_high:
            continue
        if n_plausible > _PLAUSIBLE * n_high and n_common > most:
            best, most = codec, n_common
    return best


def _n_plausible(text: str, letters: str) -> int:
    return len(_plausible_signs(letters).findall(text))


@lru_cache(maxsize=32)
def _plausible_signs(letters: str) -> re.Pattern[str]:
    """Return the pattern of a sign above ASCII in its place: no capital is behind a small letter,
    and no mark within a word."""
    capitals = "".join(map(str.upper, letters.replace("ß", "").replace("ı", "İ")))
    return re.compile(
        rf"[{letters}’]|[£±×](?=\s?\d)|(?<![a-z{letters}])[{capitals}]"
        rf"|(?<![a-z{letters}])[{_MARKS}{_BOXES}]|[{_MARKS}{_BOXES}](?![a-z{letters}])"
    )
