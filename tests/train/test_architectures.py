"""Packing and the ready-made recipes, on the true architectures with tiny dimensions."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from kinject.corpus.packing import PackingConfig
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.models import new_model
from kinject.recipe import read_recipe
from kinject.train import train
from kinject.train.data import Collator, CorpusPacker, RowDataset

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "llama-3.1-8b": {"model_type": "llama", **SMALL, "tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}},
    "mistral-7b": {"model_type": "mistral", **SMALL, "sliding_window": 4096},
    "mistral, short window": {"model_type": "mistral", **SMALL, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **{k: v for k, v in SMALL.items() if k != "head_dim"}},
    "qwen3": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gemma": {"model_type": "gemma", **SMALL},
    "gemma2, short window": {"model_type": "gemma2", **SMALL, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "sliding_window": 8, "query_pre_attn_scalar": 8},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_logits_are_those_of_each_document_alone(
    shape: str, attention: str, tiny_tokenizer: Any, corpus: Path
) -> None:
    if (shape, attention) == ("gemma2, short window", "sdpa"):
        pytest.skip("transformers gives Gemma 2 no sdpa: its logits are capped")
    model = new_model(SHAPES[shape], tiny_tokenizer, 0, attention).eval()
    data = CorpusPacker(tiny_tokenizer, Tokenization(), PackingConfig(96, "bfd_split"), 0).pack(
        list(CorpusFile(corpus))
    )
    rows = list(RowDataset(data.rows))[:4]
    batch = Collator(tiny_tokenizer.pad_token_id)(rows)
    with torch.no_grad():
        packed = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        n_documents = 0
        for index, row in enumerate(rows):
            starts = [at for at, position in enumerate(row["position_ids"]) if position == 0]
            for start, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
                alone = model(torch.tensor([row["input_ids"][start:end]]), use_cache=False).logits[0]
                assert torch.allclose(packed[index, start:end], alone, atol=1e-5, rtol=1e-5)
                n_documents += 1
    assert n_documents > len(rows)


FAMILIES = {"mistral-7b": "mistral-7b", "llama-3.1-8b": "llama-3.1-8b", "qwen3/0.6b": "qwen3", "qwen3/8b": "qwen3"}


@pytest.mark.parametrize("kind", ["cpt", "sft", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_ready_made_recipe_runs_at_its_architecture(
    family: str, kind: str, tmp_path: Path, tiny_tokenizer: Any, corpus: Path
) -> None:
    path = RECIPES / f"{family}-{kind}.yaml" if "/" in family else RECIPES / family / f"{kind}.yaml"
    written = yaml.safe_load(path.read_text("utf-8"))
    model, tokenizer = new_model(SHAPES[FAMILIES[family]], tiny_tokenizer, 0), copy.deepcopy(tiny_tokenizer)
    qwen = family.startswith("qwen")
    if qwen:
        tokenizer.bos_token = None
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    if kind == "sft":
        corpus = tmp_path / "sft.jsonl"
        turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Farrow."}]
        corpus.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    small = [f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", f"corpus.path={corpus}",
             f"corpus.cache_dir={tmp_path}", "trainer.max_length=64", "trainer.gradient_accumulation_steps=1",
             "trainer.per_device_train_batch_size=4", "trainer.max_steps=2", "trainer.logging_steps=1",
             "trainer.save_strategy=no", "trainer.tf32=null"]  # fmt: skip
    if "replay" in written["corpus"]:
        small.append(f"corpus.replay.path={corpus}")
    if not torch.cuda.is_available():
        small.append("model.dtype=float32")
    result = train(read_recipe(path, small, "train"))
    assert result.n_steps == 2
    assert result.account["trained"] > 0
    assert written["model"]["path"].count("/") == 1  # a name on the hub
    assert written["corpus"].get("bos", True) is not qwen or kind == "sft"
