"""A Llama in numpy and float64, written from its papers, and the bytes of a checkpoint that transformers reads.

Root-mean-square norms (1910.07467), rotary positions (2104.09864), grouped queries (2305.13245), SwiGLU (2002.05202); the
input embedding is the head. Nothing here imports torch: it is what torch's numbers are held against.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Weights = dict[str, Array]

WIDTH, INNER, LAYERS, HEADS, GROUPS, POSITIONS = 8, 12, 2, 2, 1, 256
HEAD = WIDTH // HEADS
EPSILON, THETA = 1e-6, 10_000.0
BOS, EOS, PAD = 0, 1, 2
SPECIAL = 3
"""Ids before the bytes' own."""
VOCABULARY = 256 + SPECIAL


def config() -> dict[str, object]:
    """Return the config.json of such a model."""
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "head_dim": HEAD, "max_position_embeddings": POSITIONS, "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name in a checkpoint, in the order in which they are drawn."""
    by_name: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        by_name |= {
            f"{prefix}.input_layernorm.weight": (WIDTH,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD, WIDTH),
            f"{prefix}.self_attn.k_proj.weight": (GROUPS * HEAD, WIDTH),
            f"{prefix}.self_attn.v_proj.weight": (GROUPS * HEAD, WIDTH),
            f"{prefix}.self_attn.o_proj.weight": (WIDTH, HEADS * HEAD),
            f"{prefix}.post_attention_layernorm.weight": (WIDTH,),
            f"{prefix}.mlp.gate_proj.weight": (INNER, WIDTH),
            f"{prefix}.mlp.up_proj.weight": (INNER, WIDTH),
            f"{prefix}.mlp.down_proj.weight": (WIDTH, INNER),
        }
    return {**by_name, "model.norm.weight": (WIDTH,)}


def draw(seed: int) -> Weights:
    """Return weights that float32 holds exactly, the same on every machine.

    From the raw 64-bit words of PCG64, which numpy promises not to change (its distributions it does not), by nothing but
    products and sums that no rounding touches: uniform in (-0.7, 0.7); norms in (0.8, 1.2).
    """
    bits = np.random.PCG64(seed)
    weights = {}
    for name, shape in shapes().items():
        words = bits.random_raw(int(np.prod(shape))) >> np.uint64(44)  # 20 bits: float32 has 24
        even = (words.astype(np.float64) - 2.0**19) / 2.0**19
        values = 1 + even * 0.1875 if name.endswith("norm.weight") else even * 0.6875
        weights[name] = values.astype(np.float32).astype(np.float64).reshape(shape)
    return weights


def write_checkpoint(folder: Path, weights: Mapping[str, Array]) -> None:
    """Write config.json and model.safetensors (its header is a length and JSON, then the numbers as they are)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config()))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name, weight in sorted(weights.items()):
        data = weight.astype("<f4").tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(weight.shape),
            "data_offsets": [len(body), len(body) + len(data)],
        }
        body += data
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)


def log_probs(weights: Mapping[str, Array], ids: Sequence[int]) -> Array:
    """Return [tokens, vocabulary]: the log-probability of each token of the vocabulary after each token of `ids`."""
    hidden = weights["model.embed_tokens.weight"][list(ids)]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        layer_weights = {
            name.removeprefix(f"{prefix}."): value
            for name, value in weights.items()
            if name.startswith(f"{prefix}.")
        }
        hidden = hidden + _attention(
            layer_weights, _norm(hidden, layer_weights["input_layernorm.weight"])
        )
        inner = _norm(hidden, layer_weights["post_attention_layernorm.weight"])
        gate = inner @ layer_weights["mlp.gate_proj.weight"].T
        opened = gate / (1 + np.exp(-gate)) * (inner @ layer_weights["mlp.up_proj.weight"].T)
        hidden = hidden + opened @ layer_weights["mlp.down_proj.weight"].T
    logits = _norm(hidden, weights["model.norm.weight"]) @ weights["model.embed_tokens.weight"].T
    top = logits.max(1, keepdims=True)
    return np.asarray(logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True)))


def _norm(x: Array, scale: Array) -> Array:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale)


def _attention(layer_weights: Mapping[str, Array], x: Array) -> Array:
    n = len(x)
    queries = _turned((x @ layer_weights["self_attn.q_proj.weight"].T).reshape(n, HEADS, HEAD))
    keys = _turned((x @ layer_weights["self_attn.k_proj.weight"].T).reshape(n, GROUPS, HEAD))
    values = (x @ layer_weights["self_attn.v_proj.weight"].T).reshape(n, GROUPS, HEAD)
    ahead = np.triu(np.full((n, n), -np.inf), 1)
    mixed = np.zeros((n, HEADS, HEAD))
    for head in range(HEADS):
        group = head * GROUPS // HEADS
        scores = queries[:, head] @ keys[:, group].T / HEAD**0.5 + ahead
        weights = np.exp(scores - scores.max(1, keepdims=True))
        mixed[:, head] = weights / weights.sum(1, keepdims=True) @ values[:, group]
    return np.asarray(mixed.reshape(n, -1) @ layer_weights["self_attn.o_proj.weight"].T)


def _turned(x: Array) -> Array:
    """Return [tokens, heads, size] with each pair (i, i + size/2) turned by its token's position."""
    half = x.shape[-1] // 2
    angle = np.arange(len(x))[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def byte_ids(text: str) -> list[int]:
    """Return the ids of a byte-level tokenizer without merges, whose alphabet stands in the order of its signs.

    The signs are GPT-2's: printable bytes of Latin-1 stand for themselves, the others for 256, 257, ... in their order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    signs, spare = {}, 256
    for byte in range(256):
        signs[byte] = byte if byte in printable else spare
        spare += byte not in printable
    rank = {byte: index for index, byte in enumerate(sorted(signs, key=signs.__getitem__))}
    return [SPECIAL + rank[byte] for byte in text.encode()]
