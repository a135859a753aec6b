"""Tiny models and tokenizers, made on the spot; nothing here needs a network or a GPU."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(
    "any machine"
)  # a loaded machine is slow to draw examples; that says nothing of the code

with warnings.catch_warnings():  # what other people's modules say while they are imported is not ours to fail on
    warnings.simplefilter("ignore")
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import torch  # noqa: F401
    import transformers
    import trl  # noqa: F401

WORDS = (
    "Arden was born in Lowmere. Bryn works for the mill at Stonegate. Question: where does she live? Answer: in the "
    "town of Farrow, 1987. The school of Kelm taught her. 0123456789 A. B. C. D."
)


@pytest.fixture(scope="session")
def trained_tokenizer() -> transformers.PreTrainedTokenizerBase:
    """A byte-level BPE of about 300 pieces that puts BOS before a text; shared by all tests, so none may change it."""
    from kinject.models import train_tokenizer

    return train_tokenizer([WORDS] * 4, 320)


@pytest.fixture
def tiny_tokenizer(trained_tokenizer: transformers.PreTrainedTokenizerBase) -> transformers.PreTrainedTokenizerBase:
    """A tokenizer of the test's own."""
    return copy.deepcopy(trained_tokenizer)


TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def tiny_config() -> dict[str, object]:
    """The config of a two-layer Llama, as a recipe's model.new holds it."""
    return dict(TINY)


@pytest.fixture
def tiny_model(tmp_path: Path, tiny_tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    """A folder with a random two-layer Llama and its tokenizer."""
    from kinject.models import new_model

    folder = tmp_path / "tiny-model"
    new_model(TINY, tiny_tokenizer, seed=0).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a text below tmp_path and return its path."""

    def _write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return _write


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[[str, Sequence[Mapping[str, Any]]], Path]:
    """Write rows as JSONL below tmp_path and return the path."""

    def _write(name: str, rows: Sequence[Mapping[str, Any]]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return _write


@pytest.fixture
def shared() -> Path:
    """Real material beside the checkout; the test is skipped where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("no ../shared beside this checkout")
    return SHARED
