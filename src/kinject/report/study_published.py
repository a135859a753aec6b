"""The paper's printed numbers (published.json), found for the models and tasks of a study by their names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any


@cache
def load_published() -> Mapping[str, Any]:
    """Return published.json: `source`, `about`, `columns` and rows of the three tables, other names of the models."""
    text = resources.files("kinject.report").joinpath("published.json").read_text("utf-8")
    return dict(json.loads(text))


def published_scores(model: str, task: str, shots: int) -> dict[str, float]:
    """Return column (``base``, ``ft-par+rag``, ...) -> accuracy as printed in Tables 1 and 2; {} where there is none."""
    found: dict[str, float] = {}
    for table in ("table1", "table2"):
        for name, of_shots, of_model, *values in load_published()[table]:
            if _is_task(name, task) and of_shots in (None, shots) and _is_model(of_model, model):
                found |= dict(zip(load_published()["columns"][table], values, strict=True))
    return found


def published_by_k(model: str, task: str, shots: int) -> dict[int, float]:
    """Return K -> accuracy of the base with K passages as printed in Table 3; {} where there is none."""
    for name, of_shots, of_model, *values in load_published()["table3"]:
        if _is_task(name, task) and of_shots == shots and _is_model(of_model, model):
            return dict(zip(load_published()["columns"]["table3"], values, strict=True))
    return {}


def published_column(arm: str) -> str:
    """Return the column of the paper that an arm is by its name: ``FT_par`` is ``ft-par``; "" where it is none."""
    flat = re.sub(r"[^a-z0-9]+", "-", arm.lower()).strip("-")
    return flat if flat in ("base", "ft", "ft-reg", "ft-par") else ""


def _flat(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower().rsplit("/", 1)[-1])


def _is_task(published: str, task: str) -> bool:
    flat = _flat(task).removeprefix("mmlu")
    return flat in (_flat(published), *load_published()["tasks"].get(published, ()))


def _is_model(published: str, model: str) -> bool:
    return _flat(model) in (_flat(published), *load_published()["models"][published])
