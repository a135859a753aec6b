"""One of the processes of a launch: trains each of several runs, of which some are interrupted after two steps and resumed.

    python tests/train/two_processes.py RUNS.json

RUNS.json holds a list of runs: recipe, overrides, environment (as accelerate's launcher sets it), interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

sys.path.insert(0, str(Path(__file__).parents[1]))
from kinject.corpus import rows
from kinject.process import context_parallel_size, processes_per_row
from kinject.recipe import read_recipe
from kinject.train import setup, train
from spare import spare_libraries

spare_libraries()

CHECK, PLAIN_ATTENTION = ParallelismConfig._validate_accelerator, F.scaled_dot_product_attention
CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
SEQUENCE = 2
"""The axis of the tokens in [batch, heads, length, dimension]."""


class RingAttention(torch.autograd.Function):
    """Torch's ring attention over all processes with the CPU's kernel; torch itself has those of GPUs only."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
    ) -> Any:
        out, sums = ring._templated_ring_attention(
            torch.distributed.group.WORLD,
            SEQUENCE,
            CPU_ATTENTION,
            query,
            key,
            value,
            is_causal=True,
            scale=scale,
        )
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, key, value, out, sums = ctx.saved_tensors
        gradients = ring._templated_ring_attention_backward(
            torch.distributed.group.WORLD, SEQUENCE, kernel, grads[0], "grad_out", query, key, value, out, sums,
            is_causal=True, scale=ctx.scale, dropout_p=0.0,
        )  # fmt: skip
        return *gradients[:3], None


def attend_in_a_ring(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: Any = None, is_causal: bool = False,
    scale: float | None = None, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """Take the place of scaled_dot_product_attention within context parallelism, which has no mask."""
    assert attn_mask is None
    assert is_causal
    key, value = (
        tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value)
    )
    out: torch.Tensor = RingAttention.apply(query, key, value, scale)
    return out


def share_rows_on_cpus(*, in_context: bool) -> None:
    """Let accelerate run tensor parallelism, or FSDP2 `in_context` parallelism, on CPUs, where it refuses both.

    In context parallelism torch attends in a ring then, for which it has no kernel on CPUs either.
    """

    def accept(self: ParallelismConfig, accelerator: Any) -> None:
        kind = DistributedType.FSDP if in_context else DistributedType.MULTI_GPU
        accelerator.state.distributed_type = PartialState().distributed_type = kind
        if in_context:
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin()
        CHECK(self, accelerator)

    def enable(seq_dim: int, mesh: Any) -> None:
        F.scaled_dot_product_attention = attend_in_a_ring

    def disable() -> None:
        F.scaled_dot_product_attention = PLAIN_ATTENTION

    ParallelismConfig._validate_accelerator = accept
    if in_context:
        ring._enable_context_parallel_dispatcher_impl = enable
        ring._disable_context_parallel_dispatcher_impl = disable
        setup.take_over_sharding = lambda config, quantization: None


def read_no_corpus() -> None:
    """Let a corpus be neither read nor hashed in this process: it is to map the tokens that the first one has written."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("this is for the first process only")

    rows.CorpusFile._lines, rows.file_hash = refuse, refuse


def main() -> None:
    """Train all runs, in order. Only the first process may read the corpus."""
    if os.environ["RANK"] != "0":
        read_no_corpus()
    for run in json.loads(Path(sys.argv[1]).read_text()):
        os.environ.update(run["environment"])
        if "ACCELERATE_USE_DEEPSPEED" in run["environment"]:
            import deepspeed.ops

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
        if processes_per_row() > 1:
            share_rows_on_cpus(in_context=context_parallel_size() > 1)
        recipe = read_recipe(run["recipe"], run["overrides"], verb="train")
        train(recipe)
        if run["interrupted"]:
            torch.distributed.barrier()
            if os.environ["RANK"] == "0":
                shutil.rmtree(recipe.run_dir / "model")
                shutil.rmtree(recipe.run_dir / "checkpoint-4")
            torch.distributed.barrier()
            train(recipe, resume=True)
        for name in run["environment"]:
            del os.environ[name]


main()
