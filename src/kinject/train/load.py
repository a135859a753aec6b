"""The model and tokenizer of a training run: loaded or new, and what was chosen said in words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from kinject.corpus import CorpusRow
from kinject.recipe import TokenizerSection, TrainRecipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load(recipe: TrainRecipe, rows: Iterable[CorpusRow]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[str]]:
    """Return the model in float32 (or as asked), its tokenizer, and what was chosen."""
    from kinject.models import choose_attention, choose_device, load_model, load_tokenizer, new_model

    section = recipe.model
    if section.new is None:
        assert section.path is not None
        dtype = "float32" if section.dtype == "auto" else section.dtype
        loaded = load_model(
            section.path, dtype=dtype, attention=section.attention, device=section.device,
            revision=section.revision, quantization=section.quantization,
        )  # fmt: skip
        said = _look_further(loaded.model, section.attention, loaded.device)
        if section.quantization == "4bit":
            _keep_gradients(loaded.model)
        return loaded.model, loaded.tokenizer, [*loaded.notes, *said, *_precision_notes(recipe)]
    if isinstance(section.tokenizer, TokenizerSection):
        tokenizer = tokenizer_of(section.tokenizer, rows)
    else:
        assert section.tokenizer is not None
        tokenizer = load_tokenizer(section.tokenizer, revision=section.revision)
    attention = choose_attention(section.attention, choose_device(section.device))
    model = new_model(section.new, tokenizer, recipe.seed, attention)
    n = sum(parameter.numel() for parameter in model.parameters())
    return (
        model,
        tokenizer,
        [
            f"new {section.new['model_type']} with random weights: {n:,} parameters, "
            f"{len(tokenizer):,} tokens, {model.config._attn_implementation} attention"
        ],
    )


def tokenizer_of(section: TokenizerSection, rows: Iterable[CorpusRow]) -> PreTrainedTokenizerBase:
    """Return the tokenizer that `section` asks for, trained on the texts of `rows`."""
    from kinject.models import train_tokenizer

    return train_tokenizer((text for row in rows for text in _texts(row)), section.vocab_size)


def _look_further(model: PreTrainedModel, asked: str, device: str) -> list[str]:
    """Give `model` torch's variable-length attention where ``auto`` found no flash-attn but this is there; say so.

    It is tried on a short row of the model first. Where it fails, or reads the row otherwise than sdpa does, sdpa stays.
    """
    from kinject.models import try_varlen, varlen_unavailable_reason

    if asked != "auto" or model.config._attn_implementation != "sdpa" or varlen_unavailable_reason(device):
        return []
    reason = try_varlen(model)
    if reason:
        return [f"attention: sdpa with documents kept apart; torch's variable-length attention is not used ({reason})"]
    return ["attention: torch's variable-length attention (flash-attn is not installed)"]


def _texts(row: CorpusRow) -> list[str]:
    if row.shape == "messages":
        return [message["content"] for message in row.messages]
    return [row.text] if row.shape == "text" else [row.prompt + row.completion]


def _keep_gradients(model: PreTrainedModel) -> None:
    """Keep bitsandbytes from repacking 4-bit weights for inference on CPUs with AVX512-BF16.

    One forward pass in evaluation mode (a held-out loss, the packing check) would do it, and the repacked product has no
    gradient: adapters below it would stop learning in silence (bitsandbytes 0.50).
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def _precision_notes(recipe: TrainRecipe) -> list[str]:
    """Return a warning where fp16 is asked for and the weights were saved in bfloat16, whose range fp16 lacks."""
    if not recipe.trainer.get("fp16"):
        return []
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(recipe.model.path, revision=recipe.model.revision, trust_remote_code=False)
    if str(config.dtype) != "torch.bfloat16":
        return []
    return [
        "trainer.fp16: this model was pretrained in bfloat16; activations beyond 65,504 overflow. Use bf16: true where the "
        "hardware has it."
    ]


def chat_template(recipe: TrainRecipe, path: str) -> str:
    """Return a chat template from a Jinja file, or from the tokenizer in a folder or on the hub."""
    from kinject.models import load_tokenizer

    if path.endswith((".jinja", ".j2")):
        try:
            return Path(path).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise recipe.error("trainer.chat_template_path", f"{path}: cannot be read: {error}.") from error
    template = load_tokenizer(path).chat_template
    if not isinstance(template, str):
        raise recipe.error("trainer.chat_template_path", f"the tokenizer in {path} has no chat template.")
    return template
