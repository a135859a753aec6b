"""Files that tests write by hand: JSON lines, Parquet, PDF."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
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


def pdf_of(*pages: str) -> bytes:
    """Return a PDF of the given content streams, in Helvetica."""
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(len(pages)))
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]  # fmt: skip
    for number, content in enumerate(pages):
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * number} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(content)} >>\nstream\n{content}\nendstream")
    out, starts = "%PDF-1.4\n", []
    for number, body in enumerate(objects, start=1):
        starts.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n"
    table = "".join(f"{start:010d} 00000 n \n" for start in starts)
    size = len(objects) + 1
    end = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return f"{out}xref\n0 {size}\n0000000000 65535 f \n{table}{end}".encode("latin-1")
