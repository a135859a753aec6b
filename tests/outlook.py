"""A file as Outlook saves a mail: properties in the streams of an OLE file, none above 4 KiB."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_END, _FREE, _FAT, _NONE = 0xFFFFFFFE, 0xFFFFFFFF, 0xFFFFFFFD, 0xFFFFFFFF


def ole_file(streams: Mapping[str, bytes]) -> bytes:
    """Return an OLE file with these streams; their names have their folders, as a/b."""
    names: dict[str, bytes | None] = {}
    for path, content in streams.items():
        folders = path.split("/")[:-1]
        for depth in range(1, len(folders) + 1):
            names.setdefault("/".join(folders[:depth]), None)
        names[path] = content
    order = ["", *names]
    small, mini_fat, starts = bytearray(), [], {}
    for path, content in names.items():
        n = -(-len(content or b"") // 64)
        starts[path] = len(mini_fat) if n else _END
        mini_fat += [*range(len(mini_fat) + 1, len(mini_fat) + n), _END][:n] if n else []
        small += (content or b"").ljust(n * 64, b"\0")
    entries = b"".join(_entry(path, order, names, starts, len(small)) for path in order)
    parts = [entries, bytes(small), struct.pack(f"<{len(mini_fat)}I", *mini_fat)]
    fat, firsts, body = [], [], b""
    for part in parts:
        n = -(-len(part) // 512)
        firsts.append(len(fat) if n else _END)
        fat += [*range(len(fat) + 1, len(fat) + n), _END] if n else []
        body += part.ljust(n * 512, b"\xff" if part is parts[2] else b"\0")
    fat_sector = len(fat)
    fat = [*fat, _FAT] + [_FREE] * (128 - len(fat) - 1)
    assert len(fat) == 128
    entries = body[: len(entries)].replace(b"ROOT", struct.pack("<I", firsts[1]), 1)
    body = entries + body[len(entries) :]
    head = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(16)
    head += struct.pack("<5H", 0x3E, 3, 0xFFFE, 9, 6) + bytes(6)
    head += struct.pack(
        "<10I", 0, 1, firsts[0], 0, 4096, firsts[2], bool(mini_fat), _END, 0, fat_sector
    )
    return head + b"\xff" * (512 - len(head)) + body + struct.pack("<128I", *fat)


def _entry(
    path: str,
    order: list[str],
    names: Mapping[str, bytes | None],
    starts: Mapping[str, int],
    size: int,
) -> bytes:
    """Return the entry of a folder or a stream; those of a folder hang on one another's right."""
    name = (path.rpartition("/")[2] or "Root Entry").encode("utf-16-le") + b"\0\0"
    parent = path.rpartition("/")[0]
    later = [
        one for one in order[order.index(path) + 1 :] if one.rpartition("/")[0] == parent and path
    ]
    children = [one for one in order[1:] if one.rpartition("/")[0] == path]
    content = names.get(path) if path else None
    kind = 5 if not path else (1 if content is None else 2)
    right = order.index(later[0]) if later else _NONE
    child = order.index(children[0]) if children else _NONE
    row = name.ljust(64, b"\0") + struct.pack("<HBBIII", len(name), kind, 1, _NONE, right, child)
    start = b"ROOT" if not path else struct.pack("<I", starts[path])
    return row + bytes(36) + start + struct.pack("<Q", len(content or b"") if path else size)


def mail_streams(
    texts: Mapping[str, bytes], code_pages: Mapping[int, int], folder: str = ""
) -> dict[str, bytes]:
    """Return the streams of a mail: the bytes of its properties, and the numbers of code pages."""
    rows = b"".join(struct.pack("<HHIQ", 3, key, 6, page) for key, page in code_pages.items())
    head = bytes(24 if folder else 32)
    named = {f"{folder}__substg1.0_{name}": text for name, text in texts.items()}
    return {**named, f"{folder}__properties_version1.0": head + rows}
