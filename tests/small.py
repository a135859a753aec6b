"""What tests share: a tiny model, an interrupted run, blank figures, the benchmarks as modules, log-probs by a plain pass."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import transformers

TINY = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


def quick(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return the cases of a parametrization: those `chosen` run with every `make test`, the others with the long proofs."""
    cases = list(cases)
    assert all(case in cases for case in chosen), chosen
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marks = () if case in chosen else pytest.mark.soak
        marked.append(pytest.param(*values, marks=marks))
    return marked


def save_tiny_model(
    folder: Path, tokenizer: transformers.PreTrainedTokenizerBase, **changes: object
) -> Path:
    """Save a random two-layer Llama, its config `TINY` with `changes`, and its tokenizer in `folder`."""
    from kinject.models import new_model

    new_model({**TINY, **changes}, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_embedder(
    folder: Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
    longest: int = 128,
    projected: int = 0,
) -> Path:
    """Save a random two-layer BERT that averages at most `longest` tokens of a text, as sentence-transformers does.

    A last module brings its vectors to `projected` numbers; 0: there is none.
    """
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=longest,
    )  # fmt: skip
    bert = folder.with_name("bert")
    BertModel(config).save_pretrained(bert)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(bert)
    modules = [models.Transformer(str(bert)), models.Pooling(32, pooling_mode="mean")]
    if projected:
        modules.append(models.Dense(32, projected))
    SentenceTransformer(modules=modules, device="cpu").save(str(folder))
    return folder


def interrupt(run: Path, steps: int) -> None:
    """Leave `run` as a kill after checkpoint-`steps` leaves it."""
    for folder in run.glob("checkpoint-*"):
        if int(folder.name.rpartition("-")[2]) > steps:
            shutil.rmtree(folder)
    shutil.rmtree(run / "model")
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["counts"] = {"finished": False}
    (run / "manifest.json").write_text(json.dumps(manifest))


def write_training(run: Path, recipe: Mapping[str, Any], **counts: float) -> None:
    """Write the manifest of a finished training by `recipe`, with `counts`."""
    from kinject.disk import write_manifest
    from kinject.manifests import EffectiveBatch, Exposures, FinishedTraining

    batch = EffectiveBatch(rows_per_device=1, accumulation=1, devices=1, rows=1, tokens=1)
    training = FinishedTraining(
        finished=True, steps=1, epochs=1.0, loss=1.0, seconds=1.0, resumed_from=None, tokens={}, notes=(), best_step=None,
        effective_batch=batch, fractions={}, exposures=Exposures(documents=0), skipped_updates=0, warnings=(),
    )  # fmt: skip
    write_manifest(
        run / "manifest.json", stage="train", inputs={}, recipe=recipe,
        counts={**training.to_json(), **counts},
    )  # fmt: skip


def draw_blank_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw every figure, but save a blank one: the rest takes most of a report's time. tests/report looks at figures."""
    from matplotlib.figure import Figure

    from kinject.report import figures

    svg, png = figures.render_svg(Figure()), figures.render_png(Figure())
    monkeypatch.setattr(figures, "render_svg", lambda figure: svg)
    monkeypatch.setattr(figures, "render_png", lambda figure: png)


def load_benchmark(name: str) -> ModuleType:
    """Return the benchmark `name` (``documents/heap.py``) as a module; its worker processes find it by its file."""
    path = Path(__file__).parents[1] / "benchmarks" / name
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def have_flash_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sdpa, called flash_on_cpu, stand for flash attention, which runs on no CPU and refuses float32 outside of autocast."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, query: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        if query.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        return sdpa_attention_forward(module, query, *arguments, **options)

    def switch(model: Any, name: str) -> None:
        model.config._attn_implementation = name  # transformers' own would load a kernel

    AttentionInterface.register("flash_on_cpu", attend)
    AttentionMaskInterface.register("flash_on_cpu", sdpa_mask)
    monkeypatch.setattr(PreTrainedModel, "set_attn_implementation", switch)


def naive_log_prob(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Return the log-prob of `continuation` behind `context`, by one plain pass over the whole string."""
    import torch

    n, ids = len(tokenizer(context).input_ids), tokenizer(context + continuation).input_ids
    with torch.no_grad():
        log_probs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(log_probs[i - 1, ids[i]]) for i in range(n, len(ids)))
