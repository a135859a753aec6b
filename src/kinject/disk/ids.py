"""Ids by content."""

from __future__ import annotations

import hashlib
import json

_ENCODER = json.JSONEncoder(ensure_ascii=False, sort_keys=True, allow_nan=False)


def content_id(*parts: object) -> str:
    """Return 16 hex digits that depend on `parts` (JSON values) and nothing else."""
    return hashlib.blake2b(_ENCODER.encode(parts).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
