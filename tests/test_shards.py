"""Manifests of shards that were changed are refused before anything is merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kinject.disk import write_manifest
from kinject.errors import InputError
from kinject.shards import Shard, finished_shards, merged_counts, shard_counts


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("recipe", ["seed"]),
        ("versions", ["torch"]),
        ("this_run", 4),
        ("this_run", {"sent": "many"}),
        ("cost", float("inf")),
        ("cost", None),
    ],
)
def test_a_manifest_of_another_shape_is_one_line(tmp_path: Path, key: str, value: Any) -> None:
    shard = Shard(1, 1)
    folder = shard.folder(tmp_path)
    folder.mkdir(parents=True)
    path = folder / "manifest.json"
    counts = {"this_run": {"sent": 3}, "cost": 0.5, **shard_counts(shard)}
    write_manifest(path, stage="eval", inputs={}, recipe={"seed": 1}, counts=counts)
    with finished_shards(tmp_path, "", {"seed": 1}, {}) as shards:
        assert merged_counts(shards)["shards"] == {"total": 1, "sent": 3, "cost": 0.5}
    manifest = json.loads(path.read_text())
    if key in ("recipe", "versions"):
        manifest[key] = value
    else:
        manifest["counts"][key] = value
    path.write_text(json.dumps(manifest))
    with (
        pytest.raises(InputError, match=r"1-of-1: its manifest is damaged: .* Run it again"),
        finished_shards(tmp_path, "", {"seed": 1}, {}),
    ):
        pass


def test_shards_of_several_versions_are_announced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    versions = ["5.23.0", "5.23.0", "5.24.1"]
    for number, version in enumerate(versions, start=1):
        shard = Shard(number, 3)
        shard.folder(tmp_path).mkdir(parents=True)
        path = shard.folder(tmp_path) / "manifest.json"
        write_manifest(path, stage="eval", inputs={}, recipe={}, counts=shard_counts(shard))
        manifest = json.loads(path.read_text())
        manifest["versions"]["transformers"] = version
        path.write_text(json.dumps(manifest))
    with finished_shards(tmp_path, "", {}, {}):
        (message,) = caplog.messages
    assert "several versions: transformers 5.23.0 (1/3), 5.24.1 (3/3). What" in message
    manifest["versions"]["transformers"] = "5.23.0"
    path.write_text(json.dumps(manifest))
    with finished_shards(tmp_path, "", {}, {}):
        assert len(caplog.messages) == 1
