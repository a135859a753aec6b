"""Shards: the part of a run's documents (of its questions) that one job does, and how they are
merged.

A shard is a run folder of its own, RUN_DIR/shards/I-of-N, with the journals and the manifest that
a whole run has. A document belongs to a shard by the hash of its id, so that no job needs to know
the others; the merge goes through the code with which a whole run ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kinject.disk import (
    check_output,
    content_id,
    dotted,
    is_amount,
    is_file,
    lock_dir,
    read_manifest_fields,
)
from kinject.errors import InputError

log = logging.getLogger(__name__)

_FOLDER = "shards"
_MOST_SHOWN = 8
_OF_A_MACHINE = frozenset({"run_dir", "cache_dir", "device", "batch_tokens"})
_OF_REQUESTS = frozenset({"base_url", "api_key_env", "timeout", "concurrency", "budget", "require"})
_OF_A_JOB = _OF_A_MACHINE | _OF_REQUESTS
"""Keys of a recipe that change no answer, and may differ between shards and merge."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `number` (from 1) of `total`; of 0 if the run has no shards."""

    number: int = 1
    total: int = 0

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    @property
    def is_first(self) -> bool:
        """Whether it does what a whole run does once (and so does a whole run)."""
        return self.number == 1

    def has(self, name: str) -> bool:
        """Return whether the document (question, file) with this id is of this shard."""
        if self.total <= 1:
            return True
        return int(content_id("shard", name), 16) % self.total == self.number - 1

    def share_of(self, n: int) -> int:
        """Return its part of `n` requests in flight; all parts are `n`, or 1 each if that is
        more."""
        if self.total <= 1:
            return n
        share = n // self.total
        if self.number <= n % self.total:
            share += 1
        return max(1, share)

    def folder(self, run_dir: Path) -> Path:
        """Return its run folder."""
        return run_dir / _FOLDER / f"{self.number}-of-{self.total}"


WHOLE = Shard()
"""A run without shards."""


def parse_shard(text: str | None) -> Shard:
    """Return the shard I/N, the whole for None. Raises `InputError` for another text."""
    if text is None:
        return WHOLE
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InputError(
            f"--shard: found {text!r:.40}, expected I/N with I from 1 to N, as in --shard 2/8."
        )
    return Shard(int(match[1]), int(match[2]))


@dataclass(frozen=True)
class FinishedShard:
    """A shard that was run to its end: its folder, and the counts of its manifest."""

    shard: Shard
    folder: Path
    counts: Mapping[str, Any]


def refuse_unmerged(run_dir: Path, journal: str) -> None:
    """Raise `InputError` if `run_dir` has shards, and no `journal` into which they were merged: a
    whole run would pay for their answers again."""
    if (run_dir / _FOLDER).is_dir() and not (run_dir / journal).exists():
        raise InputError(
            f"{run_dir / _FOLDER}: holds shards that are not merged. Give --merge, or --shard I/N; "
            "to run without them, move that folder away."
        )


def shard_counts(shard: Shard) -> dict[str, Any]:
    """Return the manifest's entry of a shard, none for a whole run."""
    if not shard.total:
        return {}
    return {"shard": {"number": shard.number, "total": shard.total}}


def merged_counts(shards: Sequence[FinishedShard]) -> dict[str, Any]:
    """Return the manifest's entry of merged shards: what they sent and cost together."""
    sent = sum(one.counts.get("this_run", {}).get("sent", 0) for one in shards)
    cost = sum(one.counts.get("cost", 0.0) for one in shards)
    return {"shards": {"total": len(shards), "sent": sent, "cost": cost}}


@contextlib.contextmanager
def finished_shards(
    run_dir: Path, command: str, recipe: Mapping[str, Any], inputs: Mapping[str, str]
) -> Iterator[list[FinishedShard]]:
    """Yield the shards below `run_dir`, all finished, and hold their folders meanwhile.

    Raises `InputError` for shards of several divisions, for missing ones (with the `command` that
    makes them) and for one of another `recipe` or of other `inputs`; `DiskError` for one that runs.
    Logs packages of which the shards had several versions.
    """
    shards = _all_of(run_dir)
    found, versions = [], _PackageVersions()
    with contextlib.ExitStack() as locks:
        missing = []
        for shard in shards:
            folder = shard.folder(run_dir)
            fields = read_manifest_fields(folder / "manifest.json")
            if fields is None:
                missing.append(shard)
                continue
            locks.enter_context(lock_dir(folder))
            _check_same(folder, shard, fields, recipe, inputs)
            versions.add(shard, fields)
            found.append(FinishedShard(shard, folder, fields["counts"]))
        if missing:
            names = ", ".join(map(str, missing[:_MOST_SHOWN]))
            raise InputError(
                f"{run_dir / _FOLDER}: not finished: {len(missing)} of {len(shards)} shards "
                f"({names}). Run: {command} --shard {missing[0]}"
            )
        differing = versions.differing()
        if differing:
            log.warning(
                f"{run_dir / _FOLDER}: made with several versions: {differing}. What they made "
                "may differ as well: move the folders of all but one version away and run these "
                "shards again."
            )
        yield found


class _PackageVersions:
    """The versions in the manifests of shards; the merge's own manifest has those of the merge."""

    def __init__(self) -> None:
        # Package -> version -> the first shard that was made with it.
        self._first = defaultdict[str, dict[str, Shard]](dict)

    def add(self, shard: Shard, fields: Mapping[str, Any]) -> None:
        """Add those of the manifest of a shard."""
        for package, version in fields.get("versions", {}).items():
            self._first[package].setdefault(str(version), shard)

    def differing(self) -> str:
        """Return each package with several versions, as ``trl 1.16 (1/2), 1.17 (2/2)``."""
        found = []
        for package, first in self._first.items():
            if len(first) > 1:
                shown = ", ".join(f"{version} ({shard})" for version, shard in first.items())
                found.append(f"{package} {shown}")
        return "; ".join(found)


def refuse_changed(shards: Sequence[FinishedShard], names: Sequence[str]) -> None:
    """Raise `InputError` for a shard of which a file of `names` is missing, or is no longer as its
    manifest has it: a merge reads them, and would be of other rows than the shard counted."""
    for one in shards:
        again = f"Run it again (--shard {one.shard}); if you changed it, move it away first."
        for name in names:
            path = one.folder / name
            if not is_file(path):
                raise InputError(f"{path}: is missing. {again}")
            check_output(path, again)


def _all_of(run_dir: Path) -> list[Shard]:
    """Return every shard of the division whose folders are below `run_dir`."""
    totals = set[int]()
    for path in sorted((run_dir / _FOLDER).glob("*-of-*")):
        match = re.fullmatch(r"(\d+)-of-(\d+)", path.name)
        if match is not None:
            totals.add(int(match[2]))
    if not totals:
        raise InputError(f"{run_dir / _FOLDER}: no shards there. Run --shard 1/N to --shard N/N.")
    if len(totals) > 1:
        raise InputError(
            f"{run_dir / _FOLDER}: holds shards of several divisions "
            f"({', '.join(f'N-of-{total}' for total in sorted(totals))}). Move all but one away."
        )
    total = totals.pop()
    return [Shard(number, total) for number in range(1, total + 1)]


def _check_same(
    folder: Path,
    shard: Shard,
    fields: Mapping[str, Any],
    recipe: Mapping[str, Any],
    inputs: Mapping[str, str],
) -> None:
    """Raise `InputError` unless a shard's manifest is of this division, recipe and these inputs."""
    again = f"Run it again (--shard {shard}), or move the folder away."
    if fields["counts"].get("shard") != shard_counts(shard)["shard"]:
        raise InputError(f"{folder}: its manifest is not that of shard {shard}. {again}")
    recipe_there, run = fields.get("recipe", {}), fields["counts"].get("this_run", {})
    fits = isinstance(recipe_there, Mapping) and isinstance(run, Mapping)
    fits = fits and isinstance(fields.get("versions", {}), Mapping)
    fits = fits and is_amount(run.get("sent", 0)) and is_amount(fields["counts"].get("cost", 0))
    if not fits:
        raise InputError(
            f"{folder}: its manifest is damaged: recipe, versions, this_run or cost. {again}"
        )
    # As a manifest holds it: JSON has no tuples.
    theirs = dotted(recipe_there, _OF_A_JOB)
    ours = dotted(json.loads(json.dumps(dict(recipe))), _OF_A_JOB)
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            raise InputError(
                f"{folder}: was made by another recipe: {key} is {theirs.get(key)!r:.60} there, "
                f"{ours.get(key)!r:.60} here. {again}"
            )
    for name in sorted(inputs.keys() | fields["inputs"].keys()):
        if inputs.get(name) != fields["inputs"].get(name):
            raise InputError(f"{folder}: was made from another {name} than is there now. {again}")
