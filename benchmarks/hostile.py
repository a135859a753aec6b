"""Hostile files: templates without bounds, links in documents, full disks, raw escape codes.

    python benchmarks/hostile.py [--templates 120] [--links 80] [--disks 60] [--escapes 240]

Draws that many of each with other sizes, loops, names and codes, and prints how many held: a template is
refused, a walk ends inside its folder, a fault of the disk is one line, and no code of a terminal is printed.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

from kinject.disk import write_text
from kinject.documents import read_documents
from kinject.errors import DiskError, InputError, KinjectError
from kinject.models.folder import check_cost
from kinject.terminal import _Text, printable

Try = Callable[[Random], bool]
"""One try: whether it held."""


def template(random: Random) -> bool:
    """Refuse a template that takes too much memory, output or time."""
    size, deep = random.randrange(2 * 10**9, 9 * 10**9), random.randrange(4, 8)
    loops = (
        "".join(f"{{% for v{i} in range(99999) %}}" for i in range(deep)) + "{% endfor %}" * deep
    )
    doubled = f"{{% set n = namespace(a='{'x' * random.randrange(4, 20)}') %}}"
    doubled += f"{{% for i in range({random.randrange(40, 90)}) %}}{{% set n.a = n.a ~ n.a %}}{{% endfor %}}"
    filters = (f"'x'|center({size})", f"'%{size}d'|format(1)", f"'x'.ljust({size})", f"'ab' * {size}", f"[1] * {size}",
               f"'x'.zfill({size})", f"range(99999)|list * {size // 10**5}")  # fmt: skip
    source = random.choice(
        (
            "{{ " + random.choice(filters) + " }}",
            "{{ " + random.choice(filters) + " }}",
            loops,
            doubled,
        )
    )
    try:
        check_cost(source)
    except InputError:
        return True
    return False


def link(random: Random) -> bool:
    """End a walk over folders with links among themselves and to elsewhere, with the documents inside alone."""
    with tempfile.TemporaryDirectory() as name:
        root, outside = Path(name, "docs"), Path(name, "outside")
        outside.mkdir()
        (outside / "secret.txt").write_text("The secret of Kelm.")
        folders = [root / f"f{i}" for i in range(random.randrange(1, 8))]
        for i, folder in enumerate(folders):
            folder.mkdir(parents=True)
            (folder / "a.txt").write_text(f"Text {i} of Arden.")
        for i in range(random.randrange(1, 12)):
            target = random.choice(
                (
                    root,
                    outside,
                    Path("/proc"),
                    Path("/sys"),
                    Path("gone"),
                    *folders,
                    outside / "secret.txt",
                )
            )
            (random.choice(folders) / f"link{i}").symlink_to(target)
        try:
            texts = [document.text for document in read_documents(root, None)]
        except KinjectError:
            return True
        return not any("secret" in text for text in texts) and len(texts) >= len(folders)


def disk(random: Random) -> bool:
    """Report a write that fails as one line."""
    number = random.choice(
        (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.ENAMETOOLONG)
    )
    place = random.choice(("/dev/full/x", "/proc/x/y", "/dev/null/x", "/dev/zero/y", "/sys/x"))
    replaced, os.replace = (
        os.replace,
        lambda *_: (_ for _ in ()).throw(OSError(number, os.strerror(number))),
    )
    try:
        with tempfile.TemporaryDirectory() as name:
            write_text(random.choice((Path(place), Path(name, "x.json"))), "{}")
    except DiskError as error:
        return "\n" not in str(error)
    except OSError:
        return False
    finally:
        os.replace = replaced
    return False


def escape(random: Random) -> bool:
    """Print no control character, however a text is cut into writes."""
    codes = (
        "\x1b[2J",
        "\x1b]0;owned\x07",
        "\x9b31m",
        "\x1b]52;c;eA==\x07",
        "\u202e",
        "\x08",
        "\x7f",
        "\ud800",
        "\x1bc",
        "\x0e",
    )
    text = "".join(
        random.choice((*codes, "a", "é", "\n", "\t")) for _ in range(random.randrange(1, 60))
    )
    raw = io.BytesIO()
    stream = _Text(raw, encoding="utf-8", errors="backslashreplace")
    while text:
        n = random.randrange(1, 9)
        stream.write(text[:n])
        text = text[n:]
    stream.flush()
    shown = raw.getvalue().decode()
    return printable(shown) == shown


def main() -> None:
    """Try each kind and print the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds: dict[str, tuple[Try, int]] = {
        "templates": (template, 120), "links": (link, 80), "disks": (disk, 60),
        "escapes": (escape, 240),
    }  # fmt: skip
    for name, (_, n) in kinds.items():
        parser.add_argument(f"--{name}", type=int, default=n)
    options = parser.parse_args()
    os.chdir(tempfile.mkdtemp())  # what was read of documents is kept in runs/
    logging.disable(logging.CRITICAL)
    for name, (attempt, _) in kinds.items():
        n = getattr(options, name)
        failed = [seed for seed in range(n) if not attempt(Random(seed))]
        print(f"{name}: {n - len(failed)} of {n} held; not: {failed[:10]}", flush=True)


if __name__ == "__main__":
    main()
