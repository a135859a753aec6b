"""Seeded damage: to bytes, to trees of plain values, to YAML and JSON lines; and inputs without any structure."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

import yaml

NESTED: Any = 1
for _ in range(60):
    NESTED = [NESTED]

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 0.5, 2**31, 2**63, 10**30, 10**400, -(10**400), float("nan"), float("inf"), float("-inf"),
    1e308, 5e-324, -0.0, "", " ", "\0", "\ud800", "\u202egnp.exe", "\u200f\u0627\u0644", "e\u0301" * 9, "\ufeff", "\x85\u2028",
    "a" * 5000, "²", "\u0663", "9" * 5000, "../../x", "a/b", "/dev/null", "no/such/file", ".", "~", "nan", "1e5", "yes", "null",
    "{{ 1/0 }}", "{{ x", "{{ 10 ** 10 ** 10 }}", "{{ 'a' * 10 ** 12 }}", "[1", "['a', 'b']", "%s{}", [], {}, [[]], {"": None},
    [None], [1, "a"], {"a": 1}, {"a": {"b": [1]}}, ["a", "a"], NESTED, "auto", "texts", 1.5, "-1", "0",
)  # fmt: skip
"""What is put where something else is expected."""

PIECES: tuple[bytes, ...] = (
    b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n", b"\n\n", b"\t", b" ", b"\xed\xa0\x80", b"\xc3", b"\x85",
    "\u202e\u05d0".encode(), "\U0001f600".encode(), b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"0x" + b"f" * 500, b"[" * 300,
    b'{"a":' * 300, b"[" * 20_000, b"\\ud800", b"\\u0000", b'"', b"'", b",", b":", b": ", b"- ", b"{", b"}", b"]", b"#", b"|\n",
    b"&a [*a]", b"*a", b"&a ", b"<<: *a\n", b"? ", b"!!python/object/apply:os.getcwd []", b"!!bool x", b"!!int x", b"!!int ''",
    b"!!timestamp x", b"!!binary =", b"!!set {a}", b"!!omap [a: 1]", b"2026-13-45", b"2026-01-01", b"1:30:00", b"010", b".nan",
    b"---\n", b"...\n", b"%YAML 9.9\n", b"<b>", b"</p>", b"<!--", b"<![CDATA[", b'<meta charset="punycode">', b"&#xd800;",
    b"&#0;", b"<script>", b"<title>", b"<svg><p>", b"endobj", b"stream\n", b"/Kids [1 0 R]", b"/Length 99999999", b"-1", b"65536",
)  # fmt: skip

ALPHABET = "ab01 .,:;-_'\"[]{}&*!|>%@`#?\n\r\t\\/<=~^$()+\0é中\u202e\U0001f600"


def damaged_bytes(data: bytes, others: list[bytes], random: Random) -> bytes:
    """Return `data` after one to four cuts, flips, insertions, doublings or grafts; or as another encoding has it."""
    for _ in range(random.choice((1, 1, 2, 4))):
        start, to = sorted((random.randint(0, len(data)), random.randint(0, len(data))))
        match random.randrange(9):
            case 0:
                data = data[:start] + random.choice(PIECES) + data[start:]
            case 1:
                data = data[:start] + random.choice(PIECES) + data[min(to, start + 20) :]
            case 2 if data:
                position = random.randrange(len(data))
                data = data[:position] + bytes([random.randrange(256)]) + data[position + 1 :]
            case 3:
                data = data[:start] + data[min(to, start + 200) :]
            case 4:
                data = data[:to] + data[max(start, to - 500) :]
            case 5:
                data = data[:start] + random.choice(others)[random.randrange(50) :][: random.randrange(1, 2000)]
            case 6:
                lines = data.split(b"\n")
                random.shuffle(lines)
                data = b"\n".join(lines)
            case 7:
                data = _reencoded(data, random)
            case _:
                data = data[:to]
        data = data[:200_000]
    return data


def _reencoded(data: bytes, random: Random) -> bytes:
    match random.randrange(6):
        case 0:
            return data.replace(b"\n", b"\r\n")
        case 1:
            return data.replace(b"\n", b"\r")
        case 2:
            return b"\xef\xbb\xbf" + data
        case _:
            text = data.decode("utf-8", "replace")
            return text.encode(random.choice(("utf-16", "utf-16-le", "utf-32", "latin-1", "utf-7")), "replace")


def damaged_tree(tree: Any, random: Random) -> Any:
    """Return a copy of `tree` (mappings, lists, scalars) with one to three places replaced, renamed, taken out or moved."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return random.choice(VALUES)
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0 if isinstance(holder, dict):
                holder[random.choice(("", "x", "id", "\u202e", "a.b", "a" * 300, "nul\0l", " "))] = holder.pop(key)
            case 1:
                del holder[key]
            case 2:
                other, place = random.choice(places)
                holder[key] = copy.deepcopy(other[place]) if place in _keys(other) else None
            case 3:
                holder[key] = random.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 3))
            case _:
                holder[key] = copy.deepcopy(random.choice(VALUES))
    return tree


def _keys(holder: Any) -> Any:
    return holder if isinstance(holder, dict) else range(len(holder))


def _places(tree: Any) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield tree, key
            yield from _places(value)
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield tree, index
            yield from _places(value)


def as_yaml(tree: Any) -> bytes:
    """Return `tree` as YAML (aliases where a value stands twice)."""
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=False).encode()


def as_json_line(row: Any) -> bytes:
    """Return `row` as Python writes it: NaN and Infinity bare, half surrogates escaped."""
    return json.dumps(row).encode() + b"\n"


def without_structure(random: Random) -> bytes:
    """Return random bytes, or random text of characters that mean something to YAML, JSON, CSV and HTML."""
    n = random.randrange(400)
    if random.random() < 0.2:
        return random.randbytes(n)
    if random.random() < 0.5:
        return b"".join(random.choice(PIECES)[:50] for _ in range(random.randrange(12)))
    return "".join(random.choice(ALPHABET) for _ in range(n)).encode()
