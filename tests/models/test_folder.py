"""A model folder whose parts do not belong together is refused with the file and the reason, before anything is made of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kinject.errors import InputError
from kinject.models import check_model


def _config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _weights(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
        save_file(weights, path, {"format": "pt"})

    return change


def _tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model": {"type": "BPE", "vocab": {}, "merges": []}}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_config(vocab_size=77), "embed_tokens.weight has the shape"),
        (_config(intermediate_size=24), "config.json asks for"),
        (_config(num_hidden_layers=3), "weights missing for model.layers.2"),
        (_config(auto_map={"AutoConfig": "code.C"}), "auto_map: it comes with Python code"),
        (_weights("model.norm.weight", torch.ones(3)), "model.norm.weight has the shape"),
        (_weights("model.norm.weight", None), "weights missing for model.norm.weight"),
        (_tokenizer, "it makes no tokens"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[Path], None], words: str, tiny_model: Path
) -> None:
    check_model(tiny_model)
    change(tiny_model)
    with pytest.raises(InputError, match=words.replace("[", r"\\[")):
        check_model(tiny_model)
