"""Adapters that begin as a part of the base (init_lora_weights: pissa, pissa_niter_N, olora), saved
as ordinary LoRA.

peft takes that part out of the base: W = W' + s B0 A0, where A0 and B0 are drawn, and the model is
W' + s B A. Loading such an adapter would draw again, which for pissa_niter gives another W', and
other programs add the adapter to W. Saved is what W lacks instead, of twice the rank:
s [B, -B0] [A; A0].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kinject.disk import write_json
from kinject.models import ADAPTER_CONFIG

if TYPE_CHECKING:
    from peft import PeftModel

_WEIGHTS = "adapter_model.safetensors"


def check_parts(model: PeftModel, init: str) -> None:
    """Raise `ValueError` if `init` cannot take as large a part out of a layer of `model`.

    peft draws a smaller one in silence, and the adapter that is saved does not load.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        # Of an embedding peft takes no part.
        if not isinstance(layer, LoraLayer) or not layer.lora_A:
            continue
        short = name.removeprefix("base_model.model.")
        if hasattr(layer, "parameter_name"):
            raise ValueError(
                f"init_lora_weights: {init} does not read {short}, whose experts are in one "
                "tensor. Set true, or take other target_modules"
            )
        if init == "olora" and layer.fan_in_fan_out:
            raise ValueError(
                f"init_lora_weights: olora does not read {short}, whose weight is transposed "
                "(Conv1D). Take pissa"
            )
        rank, most = layer.r[model.active_adapter], min(layer.get_base_layer().weight.shape)
        if rank > most:
            raise ValueError(
                f"init_lora_weights: {init} takes a part of rank {rank} out of each layer, and "
                f"{short} has a rank of {most}. Lower r, or set its rank in rank_pattern"
            )


def initial_state(model: PeftModel) -> dict[str, torch.Tensor]:
    """Return A0 and B0 of each layer of a new adapter, by the names under which they are saved."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {
        name: _drawn(name, tensor) for name, tensor in state.items() if _rank_axis(name) is not None
    }


def _drawn(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a new adapter as a part of the base: of an embedding, which peft does not
    decompose, no part."""
    if "lora_embedding_" in name:
        return torch.zeros_like(tensor)
    return tensor.detach().clone()


def _rank_axis(name: str) -> int | None:
    """Return the axis of the rank in a tensor of a LoRA, None for a tensor without one."""
    if "lora_A" in name or "lora_embedding_A" in name:
        return 0
    if "lora_B" in name or "lora_embedding_B" in name:
        return 1
    return None


def save_as_plain(folder: Path, initial: Mapping[str, torch.Tensor]) -> None:
    """Make the adapter that was saved in `folder` an ordinary LoRA on the whole base."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / _WEIGHTS)
    for name, drawn in initial.items():
        axis = _rank_axis(name)
        assert axis is not None
        part = drawn.to(tensors[name])
        if axis == 1:
            part = -part
        tensors[name] = torch.cat([tensors[name], part], axis).contiguous()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text("utf-8"))
    # Under its own name peft would take a part out of the base again when it loads this.
    config["init_lora_weights"] = True
    # the scale stays: lora_alpha / r, or lora_alpha / sqrt(r)
    growth = 2.0
    if config["use_rslora"]:
        growth = 2**0.5
    config["r"] = 2 * config["r"]
    config["lora_alpha"] = growth * config["lora_alpha"]
    ranks, alphas = config["rank_pattern"] or {}, config["alpha_pattern"] or {}
    config["rank_pattern"] = {name: 2 * rank for name, rank in ranks.items()}
    config["alpha_pattern"] = {name: growth * alpha for name, alpha in alphas.items()}
    write_json(folder / ADAPTER_CONFIG, config)


def load_from_plain(
    folder: Path, model: PeftModel, initial: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Load what `save_as_plain` wrote into the model of a run that goes on; return its A0 and B0.

    `initial` are those that the model was made with. Where a run goes on elsewhere they may be
    others, and the base gets the part that was taken out of it back.
    """
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    tensors, saved = load_file(folder / _WEIGHTS), {}
    for name, drawn in initial.items():
        axis = _rank_axis(name)
        assert axis is not None
        tensors[name], part = (half.contiguous() for half in tensors[name].chunk(2, axis))
        if axis == 1:
            part = -part
        saved[name] = part.to(drawn)
    set_peft_model_state_dict(model, tensors)
    for name in initial:
        if name.endswith("lora_A.weight"):
            _take_out(model, name.removesuffix("lora_A.weight"), initial, saved)
    return saved


@torch.no_grad()
def _take_out(
    model: PeftModel,
    prefix: str,
    made_with: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
) -> None:
    """Change the base of one layer from the rest that `made_with` left to that of `saved`."""
    names = f"{prefix}lora_A.weight", f"{prefix}lora_B.weight"
    if all(torch.equal(made_with[name], saved[name]) for name in names):
        return
    layer: Any = model.get_submodule(prefix.rstrip("."))
    weight = layer.get_base_layer().weight
    a_before, b_before = (made_with[name].float() for name in names)
    a, b = (saved[name].float() for name in names)
    difference = layer.scaling[model.active_adapter] * (b_before @ a_before - b @ a)
    # GPT-2's Conv1D keeps its weight as [inputs, outputs].
    if layer.fan_in_fan_out:
        difference = difference.T
    weight.copy_(weight.float() + difference.to(weight.device))
