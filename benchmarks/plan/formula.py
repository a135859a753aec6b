"""`kinject plan` beside pencil and paper: weights, gradients and states of a step by the formulas of readable sources.

    python benchmarks/plan/formula.py

prints one table, GiB on each device. By the formula are: weights, gradients and AdamW's two states, bytes of a number times
numbers (arXiv 1910.02054, section 3.1), over the devices that divide them; and activations, 34 s b h bytes of a layer that is
kept whole in 16 bits (arXiv 2205.05198, equation 1, without the square of attention, which fused attention does not keep), or
with checkpointing 2 s b h a layer and one layer whole. The source's MLP has two matrices and four times the width; gated
MLPs keep more, and kinject adds 16-bit copies of float32 weights and the logits, so it plans above it. A plan is made for
the moment that needs most: where that is before the first gradient is there, gradients are 0 in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kinject import plan

GIB = 2**30
EMBEDDING_STATE = 8
"""Bytes of states a number of an embedding: the 8-bit AdamW of bitsandbytes leaves embeddings in 32 bits."""


@dataclass(frozen=True)
class Run:
    """A recipe on `devices` cards, of which `divided` share what is divided; bytes a number as the recipe says.

    `buckets` is 2 under DDP, which sends gradients from copies of its own.
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


RUNS = (
    Run("recipes/qwen3/0.6b-cpt.yaml", "L4", weight=4, gradient=4, state=2),
    Run("recipes/qwen3/8b-cpt.yaml", "H100", state=2),
    Run("recipes/llama-3.1-8b/cpt.yaml", "H100", devices=8, state=2, buckets=2),
    Run("recipes/llama-3.1-8b/cpt.yaml", "A100-40GB", devices=8, state=2, divided=8),
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


def by_formula(run: Run, step: dict[str, object], config: dict[str, float]) -> dict[str, float]:
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
    tokens = float(step["batch"]) * float(step["block"])  # type: ignore[arg-type]
    one = tokens * config["hidden_size"]
    layers = config["num_hidden_layers"]
    kept = (2 * layers + 34) * one if step["checkpointing"] else 34 * layers * one
    parts = {
        "weights": weights / run.divided,
        "gradients": run.buckets * run.gradient * trained / run.divided,
        "states": state / run.divided,
        "activations": kept,
    }
    return {name: value / GIB for name, value in parts.items()}


def main() -> None:
    """Print the table."""
    print(f"{'recipe':34} {'part':12} {'formula':>8} {'planned':>8} {'ratio':>6}")
    for run in RUNS:
        result = plan(run.recipe, gpu=run.gpu, n_devices=run.devices, calibration=False)
        memory = result.way.memory
        config = result.step.model.to_dict()
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        step = {
            "batch": result.step.batch,
            "block": result.step.block,
            "checkpointing": result.step.checkpointing,
        }
        planned = {
            "weights": memory.weights, "gradients": memory.gradients, "states": memory.optimizer,
            "activations": memory.activations + memory.logits,
        }  # fmt: skip
        for part, formula in by_formula(run, step, config).items():
            got = planned[part] / GIB
            print(
                f"{run.recipe:34} {part:12} {formula:8.2f} {got:8.2f} {got / formula if formula else 1:6.2f}"
            )
        print(f"{'':34} {result.way.name}")


if __name__ == "__main__":
    main()
