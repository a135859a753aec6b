"""`kinject plan` beside pencil and paper: weights, gradients and states of a step by the formulas of readable sources.

    python benchmarks/plan/formula.py

prints one table, GiB on each device. By the formula are: weights, gradients and AdamW's two states, bytes of a number times
numbers (arXiv 1910.02054, section 3.1), over the devices that divide them; and activations, 34 s b h bytes of a layer that is
kept whole in 16 bits (arXiv 2205.05198, equation 1, without the square of attention, which fused attention does not keep), or
with checkpointing 2 s b h a layer and one layer whole. The source's MLP has two matrices and four times the width; gated
MLPs keep more, and kinject adds 16-bit copies of float32 weights and the logits, so it plans above it. A plan is made for
the moment that needs most: where that is before the first gradient is there, gradients are 0 in it.

A recipe of recipes/distributed runs with the overrides that its own header names. By the source ZeRO-2 and ZeRO-3 keep weights
and gradients in 16 bits, and divide float32 weights with the states. FSDP2 divides what there is. Offload leaves a card only the
layers at work: its parts are those in the machine's memory, of one card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kinject import plan
from kinject.plan.estimate import Memory, Step, estimate, read_shapes
from kinject.plan.run import step_of
from kinject.plan.ways import find_devices
from kinject.recipe import read_recipe

GIB = 2**30
EMBEDDING_STATE = 8
"""Bytes of states a number of an embedding: the 8-bit AdamW of bitsandbytes leaves embeddings in 32 bits."""


@dataclass(frozen=True)
class Run:
    """A recipe on `devices` cards, of which `divided` share what is divided; bytes a number as the recipe says.

    `buckets` is 2 under DDP, which sends gradients from copies of its own. `config` is a file of recipes/distributed, `way` its
    name in `kinject plan`; without them the plan chooses. `masters` are the bytes a number of float32 weights that are divided
    beside whole ones.
    """

    recipe: str
    gpu: str
    devices: int = 1
    weight: float = 2.0
    gradient: float = 2.0
    state: float = 8.0
    divided: int = 1
    buckets: int = 1
    rank: int = 0
    config: str = ""
    way: str = ""
    masters: float = 0.0


DISTRIBUTED = Path(__file__).parents[2] / "recipes/distributed"
EIGHT = "recipes/llama-3.1-8b/cpt.yaml"
RUNS = (
    Run("recipes/qwen3/0.6b-cpt.yaml", "L4", weight=4, gradient=4, state=2),
    Run("recipes/qwen3/8b-cpt.yaml", "H100", state=2),
    Run("recipes/llama-3.1-8b/cpt.yaml", "H100", devices=8, state=2, buckets=2),
    Run("recipes/qwen3/8b-lora.yaml", "4090", weight=0.5, state=2, rank=64),
    Run(
        "recipes/llama-3.1-70b/lora.yaml",
        "H100",
        devices=4,
        weight=0.5,
        state=2,
        buckets=2,
        rank=64,
    ),
    Run(EIGHT, "H100", 8, 2, 2, 2, divided=8, config="zero2", way="ZeRO-2", masters=4),
    Run(EIGHT, "H100", 8, 4, 4, 8, divided=8, config="fsdp2", way="FSDP"),
    Run(EIGHT, "H100", 1, 4, 4, 8, config="fsdp2-offload", way="offload"),
)


def numbers(config: dict[str, float]) -> tuple[float, float, float]:
    """Return the numbers of the matrices of all layers, of one look-up of the vocabulary, and the inputs and outputs of the
    matrices of a layer, summed (a LoRA of rank r has r times these)."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layers = config["num_hidden_layers"]
    a_layer = 2 * width * heads + 2 * width * keys + 3 * width * inner
    ends = 2 * (width + heads) + 2 * (width + keys) + 3 * (width + inner)
    return layers * a_layer, config["vocab_size"] * width, layers * ends


def by_formula(run: Run, step: Step, config: dict[str, float]) -> dict[str, float]:
    """Return GiB of each part on one device."""
    matrices, vocabulary, ends = numbers(config)
    tables = 1 if config["tie_word_embeddings"] else 2
    whole = matrices + tables * vocabulary
    trained = run.rank * ends if run.rank else whole
    weights = run.weight * whole
    state = run.state * trained
    if run.rank:
        weights = (
            run.weight * matrices + 2 * tables * vocabulary + 2 * trained
        )  # 4 bits are for matrices of layers alone
    elif run.state < EMBEDDING_STATE:
        state += (EMBEDDING_STATE - run.state) * vocabulary
    tokens = step.batch * step.block
    one = tokens * config["hidden_size"]
    layers = config["num_hidden_layers"]
    kept = (2 * layers + 34) * one if step.checkpointing else 34 * layers * one
    weights /= 1 if run.masters else run.divided
    weights += run.masters * whole / run.divided
    parts = {
        "weights": weights,
        "gradients": run.buckets * run.gradient * trained / run.divided,
        "states": state / run.divided,
        "activations": kept,
    }
    return {name: value / GIB for name, value in parts.items()}


def overrides_of(config: str) -> list[str]:
    """Return the overrides that the header of a file of recipes/distributed names."""
    comments = (DISTRIBUTED / f"{config}.yaml").read_text("utf-8").splitlines()
    header = " ".join(line[1:] for line in comments if line.startswith("#"))
    command = header.partition("kinject.cli train ")[2]
    words = command.replace("\\", " ").split()[1:]
    # An override of several words stands in quotes, and none of them decides memory.
    return [word for word in words if "=" in word and word[0] != "'" and word[-1] != "}"]


def planned(run: Run) -> tuple[Step, Memory, str]:
    """Return the step, a device's memory and the way that `kinject plan` has for a run."""
    if not run.way:
        result = plan(run.recipe, gpu=run.gpu, n_devices=run.devices, calibration=False)
        return result.step, result.way.memory, result.way.name
    recipe = read_recipe(run.recipe, overrides_of(run.config), verb="train", check_inputs=False)
    devices = find_devices("cuda", None, run.devices, gpu=run.gpu)
    # accelerate checkpoints activations in place of the trainer.
    step = replace(step_of(recipe, devices), checkpointing=True)
    memory = estimate(step, read_shapes(step), run.way, run.devices)
    if run.way == "offload":
        # What is in the machine's memory, in the parts of one device that keeps all.
        whole = estimate(step, read_shapes(step))
        memory = replace(
            memory, weights=whole.weights, gradients=whole.gradients, optimizer=whole.optimizer
        )
    return step, memory, run.config


def main() -> None:
    """Print the table."""
    print(f"{'recipe':34} {'part':12} {'formula':>8} {'planned':>8} {'ratio':>6}")
    for run in RUNS:
        step, memory, way = planned(run)
        config: dict[str, Any] = step.model.to_dict()
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        by_plan = {
            "weights": memory.weights, "gradients": memory.gradients, "states": memory.optimizer,
            "activations": memory.activations + memory.logits,
        }  # fmt: skip
        for part, formula in by_formula(run, step, config).items():
            got = by_plan[part] / GIB
            print(
                f"{run.recipe:34} {part:12} {formula:8.2f} {got:8.2f} {got / formula if formula else 1:6.2f}"
            )
        print(f"{'':34} {way}, {run.devices} x {run.gpu}")


if __name__ == "__main__":
    main()
