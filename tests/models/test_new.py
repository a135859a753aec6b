"""Models with random weights."""

from __future__ import annotations

from typing import Any

import pytest

from kinject.errors import InputError
from kinject.models import new_model
from kinject.models.new import check_config


def test_a_vocabulary_may_be_larger_than_the_tokenizer_and_no_smaller(
    tiny_config: dict[str, object], tiny_tokenizer: Any
) -> None:
    n_pieces = len(tiny_tokenizer)
    assert check_config({**tiny_config, "vocab_size": 512}) == []
    assert (
        new_model({**tiny_config, "vocab_size": 512}, tiny_tokenizer, 0).get_input_embeddings().weight.shape[0] == 512
    )
    assert new_model(tiny_config, tiny_tokenizer, 0).get_input_embeddings().weight.shape[0] == n_pieces
    with pytest.raises(InputError, match=f"found 100, but the tokenizer has {n_pieces} pieces"):
        new_model({**tiny_config, "vocab_size": 100}, tiny_tokenizer, 0)
