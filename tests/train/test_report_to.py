"""Trackers get what log.jsonl gets, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK
from transformers.integrations.integration_utils import get_available_reporting_integrations

from kinject.disk import read_jsonl
from kinject.errors import RecipeError, TrainingError
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.setup import check_training

MakeRecipe = Callable[..., Recipe]
NO_NETWORK = """
import socket, sys
def _refuse(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"no network in this test: {address}")
    return _connect(self, address)
_connect, socket.socket.connect = socket.socket.connect, _refuse
"""


def _train(
    make_recipe: MakeRecipe, tmp_path: Path, tracker: str, **environment: str
) -> list[float]:
    """Train with `report_to: tracker` in a process of its own that reaches no other machine; return the logged losses."""
    recipe = make_recipe(trainer={"report_to": tracker, "run_name": "named", "max_steps": 4})
    code = NO_NETWORK + "from kinject.cli import main\nsys.exit(main(['train', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(recipe.path)], cwd=tmp_path, capture_output=True, text=True, timeout=2400,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [row["loss"] for _, row in read_jsonl(tmp_path / "run" / "log.jsonl") if "loss" in row]


@pytest.mark.usefixtures("forked")
def test_tensorboard_holds_the_losses(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    losses = _train(
        make_recipe, tmp_path, "tensorboard", TENSORBOARD_LOGGING_DIR=str(tmp_path / "boards")
    )
    code = (
        "import sys, json\nfrom tensorboard.backend.event_processing.event_accumulator import EventAccumulator\n"
        "events = EventAccumulator(sys.argv[1]); events.Reload()\n"
        "print(json.dumps([event.value for event in events.Scalars('train/loss')]))"
    )
    folder = next(tmp_path.rglob("events.out.tfevents*")).parent
    printed = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(printed.splitlines()[-1]) == pytest.approx(losses, rel=1e-5)


@pytest.mark.usefixtures("forked")
def test_wandb_offline_needs_no_network(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    losses = _train(
        make_recipe,
        tmp_path,
        "wandb",
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_SILENT="true",
    )
    assert len(losses) == 4
    (kept,) = tmp_path.rglob("*.wandb")
    assert b"train/loss" in kept.read_bytes()


@pytest.mark.soak
@pytest.mark.usefixtures("forked")
def test_mlflow_holds_the_losses(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    uri = (tmp_path / "mlruns").as_uri()
    files = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # mlflow-skinny has no database
    losses = _train(make_recipe, tmp_path, "mlflow", MLFLOW_TRACKING_URI=uri, **files)
    code = (
        "import sys, json, mlflow\nclient = mlflow.MlflowClient(sys.argv[1])\n"
        "run = client.search_runs([e.experiment_id for e in client.search_experiments()])[0]\n"
        "rows = client.get_metric_history(run.info.run_id, 'loss')\n"
        "print(json.dumps([row.value for row in sorted(rows, key=lambda row: row.step)]))"
    )
    reader = [sys.executable, "-c", code, uri]
    printed = subprocess.run(
        reader, capture_output=True, text=True, check=True, env={**os.environ, **files}
    ).stdout
    assert json.loads(printed.splitlines()[-1]) == pytest.approx(losses, rel=1e-5)


def test_a_tracker_that_is_absent_is_an_error_that_names_it(make_recipe: MakeRecipe) -> None:
    """Of each tracker that this transformers has: none is a traceback, whatever its callback raises."""
    with pytest.raises(RecipeError, match=r"trainer\.report_to: found 'wanbd'"):
        check_training(make_recipe(trainer={"report_to": "wanbd"}))
    missing = set(INTEGRATION_TO_CALLBACK) - set(get_available_reporting_integrations())
    with pytest.raises(RecipeError) as caught:
        check_training(make_recipe(trainer={"report_to": sorted(missing)}))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(missing)
    for line, name in zip(lines, sorted(missing), strict=True):
        assert f"trainer.report_to: {name} cannot run here: " in line
        assert "Install its package with pip install, or set none." in line


def test_a_tracker_that_cannot_start_ends_the_run_in_one_line(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)  # mlflow-skinny has no database
    with pytest.raises(
        TrainingError,
        match=r"^trainer\.report_to: MLflowCallback cannot start \(.*none, or mend it\.$",
    ):
        train(make_recipe(trainer={"report_to": "mlflow", "max_steps": 1}))


def test_all_is_every_tracker_that_is_installed_and_starts(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    class Works(TrainerCallback):  # type: ignore[misc]
        def setup(self) -> None:
            started.append("tensorboard")

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.setup()

        def on_log(self, *_: Any, **__: Any) -> None:
            started.append("logged")

    class NoDatabase(Works):
        def setup(self) -> None:
            raise ValueError("no database")

    class NoPackage(Works):
        def __init__(self) -> None:
            raise RuntimeError("not installed")

    kinds = {"tensorboard": Works, "mlflow": NoDatabase, "wandb": NoPackage}
    for name, kind in kinds.items():
        monkeypatch.setitem(INTEGRATION_TO_CALLBACK, name, kind)
    available = "transformers.integrations.get_available_reporting_integrations"
    monkeypatch.setattr(available, lambda: [*kinds])
    recipe = make_recipe(trainer={"report_to": "all", "max_steps": 1, "logging_steps": 1})
    train(recipe)
    assert started == ["tensorboard", "logged", "logged"]  # the loss, then the whole run's row
    manifest = json.loads((recipe.run_dir / "manifest.json").read_text("utf-8"))
    warning = "trainer.report_to: all is without a tracker: NoDatabase cannot start (no database)."
    assert warning in manifest["counts"]["warnings"]


@pytest.mark.parametrize("wanted", ["by name", "all", "none"])
def test_every_tracker_of_transformers_gets_the_losses(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """By way of a stand-in for its callback: most of them need an account, which no test has."""
    logged: dict[str, list[float]] = {}

    def _stand_in(name: str) -> type:
        class Recorder(TrainerCallback):  # type: ignore[misc]
            def on_log(
                self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
            ) -> None:
                assert args.run_name == "mine"
                logged.setdefault(name, []).extend([logs["loss"]] if "loss" in logs else [])

        return type(name, (Recorder,), {})

    for name in INTEGRATION_TO_CALLBACK:
        monkeypatch.setitem(INTEGRATION_TO_CALLBACK, name, _stand_in(name))
    names = sorted(INTEGRATION_TO_CALLBACK)
    monkeypatch.setattr(
        "transformers.integrations.get_available_reporting_integrations", lambda: names
    )
    recipe = make_recipe(
        trainer={
            "report_to": names if wanted == "by name" else wanted,
            "run_name": "mine",
            "max_steps": 2,
        }
    )
    train(recipe)
    losses = [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]
    assert len(losses) == 2
    assert logged == ({} if wanted == "none" else dict.fromkeys(names, losses))
    assert {"azure_ml", "clearml", "codecarbon", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "neptune",
            "tensorboard", "wandb"} <= {*names}  # fmt: skip
