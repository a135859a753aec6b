"""Keeps what the finished trainings and evaluations of a study left, without weights: its report can be made again, and
a study of days goes on where another machine stopped.

python benchmarks/study/stages.py keep runs/stages docs/results/company       an archive for each finished stage
python benchmarks/study/stages.py restore docs/results/company runs/stages    back to where they were; what is there stays

A kept training counts as done, its weights as deleted: where an arm trains it further, the study trains it again.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import sys
import tarfile
from datetime import datetime
from pathlib import Path

KINDS = ("train", "eval")
"""Of a study: what takes long. The others are made again within seconds."""
LEFT_OUT = {"stage.log", "timing.jsonl", "flips.jsonl"}
"""What was printed, and what follows from the answers."""


def kept_files(stage: Path) -> list[Path]:
    """Return the files of a finished stage that are kept: none of its folders, which hold weights and checkpoints."""
    return sorted(
        path
        for path in stage.iterdir()
        if path.is_file() and not path.name.startswith(".") and path.name not in LEFT_OUT
    )


def content_of(path: Path, kind: str) -> bytes:
    """Return what is kept of a file: the marker of a training says that its weights are gone."""
    if kind != "train" or path.name != "done.json":
        return path.read_bytes()
    return json.dumps({**json.loads(path.read_bytes()), "deleted": True}, indent=2).encode()


def copy_claims(source: Path, target: Path) -> None:
    """Copy when each claim was declared, where `target` does not say."""
    for path in sorted(source.glob("claims/*.json")):
        copy = target / "claims" / path.name
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())


def keep(stages: Path, archives: Path) -> int:
    """Write an archive for each finished stage that has none, and return how many."""
    archives.mkdir(parents=True, exist_ok=True)
    copy_claims(stages, archives)
    n_written = 0
    for marker in sorted(stages.glob("*/*/done.json")):
        stage = marker.parent
        kind = stage.parent.name
        archive = archives / f"{kind}-{stage.name}.tar.xz"
        if kind not in KINDS or archive.exists():
            continue
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as file:
            for path in kept_files(stage):
                # No times and owners: the same stage is the same archive.
                entry = tarfile.TarInfo(f"{kind}/{stage.name}/{path.name}")
                content = content_of(path, kind)
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
        part = archive.with_suffix(".part")
        part.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))
        os.replace(part, archive)
        n_written += 1
    return n_written


def restore(archives: Path, stages: Path) -> int:
    """Unpack each archive whose stage is not finished, and return how many."""
    copy_claims(archives, stages)
    n_restored = 0
    for archive in sorted(archives.glob("*.tar.xz")):
        kind, stage = archive.name.removesuffix(".tar.xz").split("-", 1)
        if (stages / kind / stage / "done.json").exists():
            continue
        with tarfile.open(archive) as file:
            file.extractall(stages, filter="data")
        date_marker(stages / kind / stage)
        n_restored += 1
    return n_restored


def date_marker(stage: Path) -> None:
    """Set the time of a marker to that of the stage's manifest: by one of an earlier version, which has no end in it, a
    study tells which claims were declared late."""
    manifest = json.loads((stage / "manifest.json").read_bytes())
    written = datetime.fromisoformat(manifest["written"]).timestamp()
    os.utime(stage / "done.json", (written, written))


def main() -> int:
    """Keep or restore, and say how many stages."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("keep", "restore"))
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if not arguments.source.is_dir():
        print(f"{arguments.source}: no such folder", file=sys.stderr)
        return 2
    function = {"keep": keep, "restore": restore}[arguments.what]
    print(f"{function(arguments.source, arguments.target)} stages in {arguments.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
