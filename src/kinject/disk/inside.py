"""What stays inside a folder: file names made from names of any kind, and no links that lead out of it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kinject.disk.ids import content_id
from kinject.errors import DiskError

_PLAIN = re.compile(r"[^\W_](?:[\w .+=@-]*[\w+=@-])?\Z")
_RESERVED = re.compile(r"(?:con|prn|aux|nul|com\d|lpt\d)(?:\.|\Z)", re.IGNORECASE)
_MOST_BYTES = 100


def file_name(name: str) -> str:
    """Return a file name for `name`, which may be anything: itself where it is a plain word, else its like with a hash.

    The result holds no separator, begins with a letter or digit, is short, and differs where the names differ.
    """
    if _PLAIN.match(name) and len(name.encode()) <= _MOST_BYTES and not _RESERVED.match(name):
        return name
    like = re.sub(r"[^\w+=@-]+", "_", name).strip("_-+=@")
    like = like.encode()[:_MOST_BYTES].decode("utf-8", "ignore")
    return f"{like or 'name'}-{content_id(name)[:8]}"


def refuse_links_out(folder: Path) -> None:
    """Raise `DiskError` where a link below `folder` leads out of it: what is written would land elsewhere."""
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise DiskError(
                    f"{path}: a link that leads out of the run folder. Remove it, or name the place itself as run_dir."
                )
