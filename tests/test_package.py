"""The package's own face: the verbs as functions, and what an sdist and a wheel hold."""

from __future__ import annotations

import glob
import inspect
import os
import pydoc
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kinject
import kinject.augment.run
import kinject.plan.estimate
import kinject.report.files
import kinject.train.checkpoints
import kinject.train.run
from kinject.train.run import run

ROOT = Path(__file__).parents[1]


def test_kinject_and_its_survey_import_nothing_heavy() -> None:
    code = (
        "import pydoc, sys, kinject\n"
        "assert not {'torch', 'yaml', 'numpy', 'pandas', 'asyncio'} & sys.modules.keys(), 'heavy'\n"
        "pydoc.render_doc(kinject, renderer=pydoc.plaintext)\n"
        "import kinject.augment.survey\n"
        "assert not {'torch', 'transformers', 'pandas'} & sys.modules.keys(), 'kinject try is heavy'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_verbs_are_functions_whatever_was_imported_before() -> None:
    page = pydoc.render_doc(kinject, renderer=pydoc.plaintext)
    assert set(dir(kinject)) == {*kinject.__all__, "__version__"}
    for name in set(kinject.__all__) - {"KinjectError", "Recipe"}:
        verb = getattr(kinject, name)
        assert inspect.isfunction(verb), name
        assert "kinject." in verb.__doc__.split("\n\n")[-1], name
        assert inspect.signature(verb).return_annotation is not inspect.Signature.empty, name
        assert f" {name}(" in page, name
        assert pydoc.render_doc(verb, renderer=pydoc.plaintext)
    with pytest.raises(TypeError, match="recipe"):
        kinject.train()  # type: ignore[call-arg]
    assert kinject.train.__module__ == "kinject.api"
    assert run.__module__ == "kinject.train.run"
    assert vars(kinject.train) == {}
    assert kinject.Recipe.__name__ == "Recipe"


def test_a_training_from_python_reports_nothing_to_the_hub_unless_asked_to() -> None:
    code = "import kinject; from huggingface_hub import constants; print(constants.HF_HUB_DISABLE_TELEMETRY)"
    environment = {
        key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_TELEMETRY"
    }
    for variables, expected in (({}, "True"), ({"HF_HUB_DISABLE_TELEMETRY": "0"}, "False")):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment | variables,
            check=True,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == expected


def test_an_sdist_has_everything_and_the_wheel_built_from_it_works_without_a_checkout(
    tmp_path: Path,
) -> None:
    names = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    tracked = {name for name in names if (ROOT / name).is_file()}
    checkout, empty = tmp_path / "checkout", tmp_path / "empty"
    for name in tracked:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    _python("from setuptools import build_meta; build_meta.build_sdist('..')", checkout)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    packed = {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
    }
    assert tracked - packed == set()

    _python("from setuptools import build_meta; build_meta.build_wheel('..')", unpacked)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = {
            name.partition("/data/share/kinject/")[2] or name for name in archive.namelist()
        }
    modules = {name.removeprefix("src/") for name in tracked if name.startswith("src/")}
    # tests/recipe/test_shipped.py holds that pyproject.toml names the recipes that ship, and no others.
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"][
        "data-files"
    ].values()
    data = {
        name
        for files in patterns
        for pattern in files
        for name in glob.glob(pattern, root_dir=checkout)
    }
    assert {"constraints.txt", "recipes/cpt.yaml"} < data
    assert modules | data <= wheel_names
    assert not any("test_" in name or "conftest" in name for name in wheel_names)

    install = [
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--no-compile",
        "--ignore-installed",
        "--prefix",
        str(tmp_path / "there"),
    ]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    (site,) = tmp_path.glob("there/lib/python*/site-packages")
    empty.mkdir()
    code = (
        "import importlib, sys; from kinject.cli import main; demo = importlib.import_module('kinject.demo')\n"
        "from kinject.sandbox import BASE, INSTRUCT\n"
        f"assert demo.__file__.startswith({str(site)!r}), demo.__file__\n"
        "demo._write_inputs()\n"
        "assert main(['sandbox', 'base']) == main(['sandbox', 'instruct']) == main(['augment', '--dry-run']) == 0\n"
        "assert BASE.is_in() and INSTRUCT.is_in() and 'torch' not in sys.modules\n"
    )
    _python(code, empty, site)
    assert (empty / "recipes/cpt.yaml").read_bytes() == (ROOT / "recipes/cpt.yaml").read_bytes()
    assert (empty / "eval/sandbox/new.jsonl").read_bytes() == (
        ROOT / "eval/sandbox/new.jsonl"
    ).read_bytes()


def _python(code: str, folder: Path, path: Path | None = None) -> None:
    environment = {**os.environ, "PYTHONPATH": str(path or "")}
    subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, check=True, capture_output=True
    )
