"""Damage to what a model folder holds: tokenizer, configuration, weights, adapter, chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from kinds import Kind
from mutations import damaged_bytes, damaged_tree

ROWS = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}]


def damaged_folder_kinds(model: Path) -> list[tuple[Kind, float]]:
    """Return kinds that damage one file of a copy of the folder `model` and load it; the file is put back afterwards."""
    weights = {"tokenizer.json": 6, "tokenizer_config.json": 3, "config.json": 1, "model.safetensors": 1}
    return [
        (Kind(f"model folder {name}", name, _maker(model / name), _reader(model, name)), weight)
        for name, weight in weights.items()
    ]


def _maker(file: Path) -> Callable[[Random], bytes]:
    data = file.read_bytes()
    tree = json.loads(data) if file.suffix == ".json" else None

    def make(random: Random) -> bytes:
        if tree is None or random.random() < 0.3:
            return damaged_bytes(data, [data], random)
        try:
            return json.dumps(_thinned(damaged_tree(_thinned(tree), random), tree)).encode()
        except (TypeError, ValueError, RecursionError):
            return damaged_bytes(data, [data], random)

    return make


def _thinned(tree: Any, whole: Any = None) -> Any:
    """Return a tokenizer with its vocabulary and merges put aside (mostly they would be hit), or, given `whole`, put back."""
    if not isinstance(tree, dict) or not isinstance(tree.get("model"), dict):
        return tree
    model = dict(tree["model"])
    for key in ("vocab", "merges"):
        if whole is None and len(model.get(key, ())) > 6:
            part = model[key]
            model[key] = dict(list(part.items())[:5]) if isinstance(part, dict) else part[:5]
        elif whole is not None and isinstance(model.get(key), dict) and len(model[key]) == 5:
            model[key] = {**whole["model"][key], **model[key]}
        elif whole is not None and isinstance(model.get(key), list) and len(model[key]) == 5:
            model[key] = [*model[key], *whole["model"][key][5:]]
    return {**tree, "model": model}


def _reader(model: Path, name: str) -> Callable[[Path], object]:
    whole = (model / name).read_bytes()

    def read(path: Path) -> None:
        from kinject.corpus.rows import parse_corpus_row
        from kinject.corpus.tokenize import Tokenization, tokenize_rows
        from kinject.models import load_model, load_tokenizer

        (model / name).write_bytes(path.read_bytes())
        try:
            if name.startswith("tokenizer"):
                tokenizer = load_tokenizer(str(model))
                rows = [parse_corpus_row(row, "") for row in [*ROWS, {"text": "One. Ünï 中"}]]
                for row in rows:
                    list(tokenize_rows([row], tokenizer, Tokenization()))
            else:
                load_model(str(model), device="cpu")
        finally:
            (model / name).write_bytes(whole)

    return read
