"""What makes tests quick: a tiny model, and reports whose figures are not saved."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import transformers

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


def save_tiny_model(folder: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> Path:
    """Save a random two-layer Llama and its tokenizer in `folder`."""
    from kinject.models import new_model

    new_model(TINY, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def draw_blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw every figure but save a blank one: saving takes most of a report's time, and tests/report looks at figures."""
    from matplotlib.figure import Figure

    from kinject.report.plots import style

    svg, png = style.render_svg(Figure()), style.render_png(Figure())
    monkeypatch.setattr(style, "render_svg", lambda figure: svg)
    monkeypatch.setattr(style, "render_png", lambda figure: png)
