"""Coverage-guided fuzzing of the readers by atheris: python tests/soak/fuzz_readers.py FOLDER [libFuzzer's options]."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "hostile"))

with atheris.instrument_imports(include=["kinject", "yaml"]):
    from kinds import kinds
    from mutations import PIECES

    import kinject.corpus.questions
    import kinject.corpus.rows
    import kinject.documents
    import kinject.eval.compare
    import kinject.recipe.yaml_lines  # noqa: F401
    from kinject.errors import KinjectError

KINDS = [kind for kind, _ in kinds() if "parquet" not in kind.name and "pdf" not in kind.name]


def read_one(data: bytes) -> None:
    """Read `data`, whose first byte says as what; what is raised but a `KinjectError` ends the fuzzing."""
    if not data:
        return
    kind = KINDS[data[0] % len(KINDS)]
    path = FOLDER / kind.file
    path.write_bytes(data[1:])
    try:
        kind.read(path)
    except KinjectError:
        return


if __name__ == "__main__":
    FOLDER = Path(sys.argv.pop(1))
    os.chdir(ROOT)
    logging.disable(logging.CRITICAL)
    seeds = FOLDER / "seeds"
    seeds.mkdir(parents=True, exist_ok=True)
    from random import Random

    for index, kind in enumerate(KINDS):
        for number in range(6):
            (seeds / f"{index}-{number}").write_bytes(bytes([index]) + kind.make(Random(number)))
    quoted = (
        "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in token)
        for token in PIECES
        if len(token) <= 60
    )
    (FOLDER / "words").write_text("".join(f'"{token}"\n' for token in quoted), "ascii")
    atheris.Setup([sys.argv[0], f"-dict={FOLDER / 'words'}", "-max_len=4096", *sys.argv[1:], str(seeds)], read_one)
    atheris.Fuzz()
