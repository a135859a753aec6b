"""Trackers get what log.jsonl gets, without a network. Each test runs where its tracker is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kinject.disk import read_jsonl
from kinject.recipe import Recipe

MakeRecipe = Callable[..., Recipe]
NO_NETWORK = """
import socket, sys
def _refuse(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network in this test: {address}")
    return _connect(self, address)
_connect, socket.socket.connect = socket.socket.connect, _refuse
"""


def _train(make_recipe: MakeRecipe, tmp_path: Path, tracker: str, **environment: str) -> list[float]:
    """Train with `report_to: tracker` in a process of its own that reaches no other machine; return the logged losses."""
    recipe = make_recipe(trainer={"report_to": tracker, "run_name": "named", "max_steps": 4})
    code = NO_NETWORK + "from kinject.cli import main\nsys.exit(main(['train', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe.path)], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [row["loss"] for _, row in read_jsonl(tmp_path / "run" / "log.jsonl") if "loss" in row]


@pytest.mark.usefixtures("forked")
def test_tensorboard_holds_the_losses(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    losses = _train(make_recipe, tmp_path, "tensorboard", TENSORBOARD_LOGGING_DIR=str(tmp_path / "boards"))
    code = (
        "import sys, json\nfrom tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
        "print(json.dumps([event.value for event in events.Scalars('train/loss')]))"
    )
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    said = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    assert json.loads(said.splitlines()[-1]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.usefixtures("forked")
def test_wandb_offline_needs_no_network(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    losses = _train(make_recipe, tmp_path, "wandb", WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    assert len(losses) == 4
    (kept,) = tmp_path.rglob("*.wandb")
    assert b"train/loss" in kept.read_bytes()


def test_mlflow_holds_the_losses(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    place = (tmp_path / "mlruns").as_uri()
    files = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # mlflow-skinny has no database
    losses = _train(make_recipe, tmp_path, "mlflow", MLFLOW_TRACKING_URI=place, **files)
    code = (
        "import sys, json, mlflow\nclient = mlflow.MlflowClient(sys.argv[1])\n"
        "run = client.search_runs([e.experiment_id for e in client.search_experiments()])[0]\n"
        "rows = client.get_metric_history(run.info.run_id, 'loss')\n"
        "print(json.dumps([row.value for row in sorted(rows, key=lambda row: row.step)]))"
    )
    reader = [sys.executable, "-c", code, place]
    said = subprocess.run(reader, capture_output=True, text=True, check=True, env={**os.environ, **files}).stdout
    assert json.loads(said.splitlines()[-1]) == pytest.approx(losses, rel=1e-5)


def test_trackio_holds_the_losses(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    losses = _train(make_recipe, tmp_path, "trackio", TRACKIO_DIR=str(tmp_path / "trackio"))
    assert len(losses) == 4
    assert any(path.suffix == ".db" for path in (tmp_path / "trackio").rglob("*"))


def test_a_tracker_that_is_absent_is_an_error_that_names_it(make_recipe: MakeRecipe) -> None:
    from kinject.errors import RecipeError
    from kinject.train import train

    with pytest.raises(RecipeError, match=r"trainer\.report_to: found 'wanbd'"):
        train(make_recipe(trainer={"report_to": "wanbd"}))
    missing = next((name for name in ("comet_ml", "clearml", "neptune", "swanlab") if not _installed(name)), None)
    if missing is None:
        pytest.skip("every tracker is installed here")
    with pytest.raises(RecipeError, match=rf"trainer\.report_to: {missing} is not installed.*pip install"):
        train(make_recipe(trainer={"report_to": missing}))


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
