"""Files that tests write by hand: JSON lines, Parquet, PDF."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def lines_of(rows: Iterable[Any]) -> bytes:
    """Return rows as JSON lines as Python writes them: NaN and Infinity bare, half surrogates escaped."""
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def as_parquet(rows: list[Mapping[str, Any]]) -> bytes:
    """Return rows as Parquet."""
    import pyarrow as pa
    from pyarrow import parquet

    out = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), out, compression="zstd")
    return out.getvalue()


def pdf_of(*pages: str, rotate: int = 0, letters: Sequence[str] = (), info: str = "") -> bytes:
    """Return a PDF of the given content streams, in Helvetica.

    Its pages are shown after a turn by `rotate` degrees. F2 is a font of `letters`, which `as_shown`
    writes, each 0.6 wide. `info` are the entries of its information, in the syntax of PDF; a page
    that is "" is missing.
    """
    kids = " ".join(f"{7 + 2 * number} 0 R" for number in range(len(pages)))
    codes = _codes(letters)
    named = "".join(f"<{code:02x}> <{as_utf16(text)}>\n" for text, code in codes.items())
    cmap = "begincmap 1 begincodespacerange <00> <ff> endcodespacerange\n"
    cmap += f"{len(codes)} beginbfchar\n{named}endbfchar endcmap"
    font = "<< /Type /Font /Subtype /Type1 /BaseFont"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        f"{font} /Helvetica >>",
        f"{font} /Courier /FirstChar 33 /LastChar 255 /Widths [{'600 ' * 223}] /ToUnicode 5 0 R >>",
        f"<< /Length {len(cmap)} >>\nstream\n{cmap}\nendstream", f"<< {info} >>",
    ]  # fmt: skip
    for number, content in enumerate(pages):
        page = (
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {8 + 2 * number} 0 R "
            f"/Rotate {rotate} /Resources << /Font << /F1 3 0 R /F2 4 0 R >> >> >>"
        )
        objects.append(page if content else "null")
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, starts = "%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        starts.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{start:010d} 00000 n \n" for start in starts)
    size = len(objects) + 1
    end = f"trailer\n<< /Size {size} /Root 1 0 R /Info 6 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return f"{out}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode("latin-1")


def as_utf16(text: str) -> str:
    """Return a text as PDF writes it in hexadecimal."""
    return text.encode("utf-16-be", "surrogatepass").hex()


def _codes(letters: Sequence[str]) -> dict[str, int]:
    return {text: code for code, text in enumerate(dict.fromkeys(letters), start=33)}


def as_shown(
    letters: Sequence[str], x: float, y: float, text: Sequence[str], size: float = 10
) -> str:
    """Return the content that draws `text`, whose letters are of `letters`, as it is seen, from x on
    to the right: each letter alone, 0.6 of the size apart, spaces as gaps."""
    codes, parts = _codes(letters), []
    for place, letter in enumerate(text):
        if letter != " ":
            parts.append(f"1 0 0 1 {x + 0.6 * size * place:.2f} {y} Tm <{codes[letter]:02x}> Tj")
    return f"BT /F2 {size} Tf {' '.join(parts)} ET "
