"""What the GPU program measures: each case is one function of a `Setting` that returns its figures.

The order of `CASES` is the order of importance: what does not fit into the minutes given waits for the next run.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import proofs
import real
import training
import varlen
from training import SHAPES, Setting, make_batch, make_model, peak, reset_peak

PACKAGES = (
    "torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors",
    "bitsandbytes", "torchao", "liger-kernel", "kernels", "flash-attn", "flash-attn-3", "flash-attn-4", "lm_eval",
)  # fmt: skip
ATTENTION = (
    "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention", varlen.NAME, "eager",
)  # fmt: skip
PEAK_TFLOPS = {
    "H200": 989,
    "H100": 989,
    "A100": 312,
    "B200": 2250,
    "L40S": 362,
    "L4": 121,
    "4090": 165,
    "T4": 65,
}
"""Products of bfloat16 (T4: float16) a second by the vendor's datasheet, dense, for MFU."""


@dataclass(frozen=True)
class Case:
    """A measurement: its part of the page, seconds that it takes about, and seconds after which it is ended."""

    part: str
    measure: Callable[[Setting], dict[str, Any]]
    about: float
    limit: float


def describe_machine(setting: Setting) -> dict[str, Any]:
    """Return the machine, its versions, and what it reaches in a large product and a copy."""
    import torch

    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    machine: dict[str, Any] = {
        "python": platform.python_version(), "cores": os.cpu_count(), "versions": versions, "device": setting.device,
    }  # fmt: skip
    if setting.device != "cuda":
        return machine
    properties = torch.cuda.get_device_properties(0)
    machine |= {
        "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
        "memory_gib": properties.total_memory / 2**30, "matmul_tflops": _matmul_rate(), "copy_tb_s": _copy_rate(),
    }  # fmt: skip
    from kinject.models import attention_fault, fastest_attention

    machine["attention"] = {name: attention_fault(name, "cuda") for name in ATTENTION}
    machine["auto"] = list(fastest_attention("cuda"))
    return machine


def _timed(run: Callable[[], Any], repeats: int) -> float:
    """Return the mean seconds of a run on the GPU, after three that are not timed."""
    import torch

    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def _matmul_rate() -> float:
    import torch

    size = 8192
    dtype = (
        torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    )
    left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    return float(2 * size**3 / _timed(lambda: left @ right, 20) / 1e12)


def _copy_rate() -> float:
    import torch

    source = torch.empty(2**30, device="cuda", dtype=torch.float32)
    target = torch.empty_like(source)
    return float(2 * source.nbytes / _timed(lambda: target.copy_(source), 20) / 1e12)


def compare_attention(setting: Setting, name: str) -> dict[str, Any]:
    """Return how far loss and gradient of an attention are from sdpa's, whether documents see each other, and its time.

    One batch of packed documents through the 0.5B shape with random weights, under autocast to bfloat16 (tiny: float32).
    The loss is also compared with sdpa in float32. Isolation is the largest change of the logits of a row's second
    document once the first is taken away, over the largest logit: what sdpa has there is rounding.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from kinject.models import attention_fault

    fault = attention_fault(name, setting.device)
    if name == varlen.NAME:
        fault = "needs an NVIDIA GPU" if setting.device == "cpu" else ""
        varlen.register()
    if fault:
        raise RuntimeError(f"{name} {fault}")
    model = AutoModelForCausalLM.from_pretrained(
        make_model(setting, "0.5B"),
        dtype=torch.float32,
        attn_implementation="sdpa",
        device_map={"": setting.device},
    )
    model.train()
    rows = setting.rows("0.5B", "full")
    batch = make_batch(setting, "0.5B", rows)
    exact, _, _ = _step(setting, model, batch, half=False, seconds=False)
    loss, gradient, _ = _step(setting, model, batch, half=True, seconds=False)
    expected = {"sdpa_float32_loss": exact, "sdpa_loss": loss}
    model.set_attn_implementation(name)
    flat = (
        {key: value.flatten()[None] for key, value in batch.items()} if "flash" in name else batch
    )
    reset_peak(setting)
    losses, mine, seconds = _step(setting, model, flat, half=True, seconds=True)
    distance = float((mine - gradient).norm() / gradient.norm())
    return {
        **expected, "loss": losses, "loss_difference": abs(losses - loss), "gradient_difference": distance,
        "isolation": _isolation(setting, model, batch), "implementation": str(model.config._attn_implementation),
        "step_ms": 1000 * seconds, "rows": rows, **peak(setting),
    }  # fmt: skip


def _step(
    setting: Setting, model: Any, batch: Mapping[str, Any], *, half: bool, seconds: bool
) -> tuple[float, Any, float]:
    """Return the loss, the gradient of the first layer's query weights, and the median seconds of three passes."""
    import torch
    from torch.nn.functional import cross_entropy

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        model.zero_grad(set_to_none=True)
        with torch.autocast(setting.device, torch.bfloat16, enabled=half and not setting.tiny):
            logits = model(**batch, use_cache=False).logits
        labels = batch["input_ids"].clone()
        labels[batch["position_ids"] == 0] = -100
        loss = cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        value = loss.item()  # waits for the GPU
        if setting.device == "cuda":
            torch.cuda.synchronize()
        return value, time.perf_counter() - began

    step()
    runs = [step() for _ in range(3 if seconds else 0)] or [step()]
    weight = model.model.layers[0].self_attn.q_proj.weight
    return runs[-1][0], weight.grad.float().clone(), sorted(run[1] for run in runs)[len(runs) // 2]


def _isolation(setting: Setting, model: Any, batch: Mapping[str, Any]) -> float:
    import torch

    model.eval()
    positions = batch["position_ids"][0].tolist()
    starts = [index for index, position in enumerate(positions) if position == 0][:3]
    end = starts[2] if len(starts) > 2 else len(positions)
    row = {key: value[:1, :end] for key, value in batch.items()}
    alone = {key: value[:, starts[1] :] for key, value in row.items()}
    with torch.no_grad(), torch.autocast(setting.device, torch.bfloat16, enabled=not setting.tiny):
        packed = model(**row, use_cache=False).logits[:, starts[1] :].float()
        single = model(**alone, use_cache=False).logits.float()
    return float((packed - single).abs().max() / single.abs().max())


def _eval_requests(n: int) -> list[Any]:
    from kinject.corpus.questions import read_questions
    from kinject.eval.prompts import PromptRequest, pick_shots

    pool = read_questions(setting_root() / "eval/sandbox/known.jsonl")
    questions = read_questions(setting_root() / "eval/sandbox/new.jsonl")[:n]
    return [
        PromptRequest(question, "letters", pick_shots(question, pool, 5)) for question in questions
    ]


def setting_root() -> Any:
    """Return the root of the repository."""
    from pathlib import Path

    return Path(__file__).parents[2]


def score_with_kinject(setting: Setting) -> dict[str, Any]:
    """Return the seconds that kinject takes for the questions of the sandbox, 5 shots, and the log-probs."""
    import torch
    from transformers import AutoModelForCausalLM

    from kinject.eval.scoring.encode import Encoder, encode_requests
    from kinject.eval.scoring.scorer import Scorer
    from kinject.models import load_tokenizer, window_of

    folder = make_model(setting, "1B")
    dtype = torch.float32 if setting.tiny else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map={"": setting.device}
    ).eval()
    requests, encoder = (
        _eval_requests(4 if setting.tiny else 400),
        Encoder(load_tokenizer(str(folder))),
    )
    scorer = Scorer(model, 16_384)
    list(scorer.score(encode_requests(encoder, requests[:4], window_of(scorer.forward.config))))
    began = time.perf_counter()
    scores = dict(
        scorer.score(encode_requests(encoder, requests, window_of(scorer.forward.config)))
    )
    seconds = time.perf_counter() - began
    log_probs = [list(scores[index].log_probs) for index in range(len(requests))]
    return {
        "questions": len(requests),
        "seconds": seconds,
        "tree": scorer.uses_tree,
        "log_probs": log_probs,
    }


def score_with_harness(setting: Setting) -> dict[str, Any]:
    """Return what `score_with_kinject` does, by lm-evaluation-harness: only its `loglikelihood` is timed."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from kinject.eval.prompts import render_prompt

    requests = _eval_requests(4 if setting.tiny else 400)
    prompts = [render_prompt(request) for request in requests]
    pairs = [(prompt.context, text) for prompt in prompts for text in prompt.continuations]
    model = HFLM(
        pretrained=str(make_model(setting, "1B")), dtype="float32" if setting.tiny else "bfloat16",
        device=setting.device, batch_size=32,
    )  # fmt: skip
    instances = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    model.loglikelihood(instances[:16], disable_tqdm=True)
    began = time.perf_counter()
    harness_log_probs = [
        float(value) for value, _ in model.loglikelihood(instances, disable_tqdm=True)
    ]
    seconds = time.perf_counter() - began
    n = len(prompts[0].continuations)
    log_probs = [
        harness_log_probs[start : start + n] for start in range(0, len(harness_log_probs), n)
    ]
    return {"questions": len(requests), "seconds": seconds, "log_probs": log_probs}


OPTIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bf16, as it comes": ("1B", "full", {}),
    "fp16": ("1B", "full", {"trainer.fp16": True, "trainer.bf16": False}),
    "float32 with tf32": ("1B", "full", {"trainer.bf16": False, "trainer.tf32": True}),
    "gradient checkpointing": ("1B", "full", {"trainer.gradient_checkpointing": True}),
    "activation offloading": ("1B", "full", {"trainer.activation_offloading": True}),
    "8-bit AdamW": ("1B", "full", {"trainer.optim": "adamw_8bit"}),
    "bfloat16 weights, stochastic rounding": (
        "1B", "full", {"model.dtype": "bfloat16", "techniques.stochastic_rounding": True},
    ),
    "torch.compile": ("1B", "full", {"trainer.torch_compile": True}),
    "Liger kernels": ("1B", "full", {"trainer.use_liger_kernel": True}),
    "sdpa": ("1B", "full", {"model.attention": "sdpa"}),
    "8B: bfloat16 weights, stochastic rounding, 8-bit AdamW, checkpointing": (
        "8B", "full",
        {
            "model.dtype": "bfloat16", "techniques.stochastic_rounding": True, "trainer.optim": "adamw_8bit",
            "trainer.gradient_checkpointing": True, "trainer.per_device_train_batch_size": 8,
        },
    ),
}  # fmt: skip
"""Name -> (shape, method, overrides of kinject's recipe)."""


def _option(setting: Setting, name: str) -> dict[str, Any]:
    shape, method, overrides = OPTIONS[name]
    overrides = (
        {**overrides, "trainer.per_device_train_batch_size": 2} if setting.tiny else overrides
    )
    return training.train_kinject(setting, shape, method, overrides)


def _train(setting: Setting, shape: str, method: str, program: str) -> dict[str, Any]:
    return training.PROGRAMS[program](setting, shape, method)


def _training_cases(shape: str, methods: tuple[str, ...], about: float) -> dict[str, Case]:
    return {
        f"train/{shape} {method}/{program}": Case(
            "training",
            partial(_train, shape=shape, method=method, program=program),
            about,
            5 * about,
        )
        for method in methods
        for program in training.PROGRAMS
    }


CASES: dict[str, Case] = {
    "machine": Case("machine", describe_machine, 10, 120),
    "proof/devices": Case("proofs", proofs.compare_devices, 15, 90),
    **{
        f"proof/packing {name}": Case(
            "proofs", partial(proofs.compare_packing, attention=name), 15, 90
        )
        for name in ("sdpa", "flex_attention", varlen.NAME, "auto")
    },
    "proof/resume": Case("proofs", proofs.resume_training, 20, 120),
    "proof/paraphrases": Case("proofs", proofs.check_paraphrases, 5, 60),
    "proof/sandbox": Case("proofs", proofs.run_sandbox, 30, 120),
    "shipped/8B": Case("training", proofs.train_shipped, 50, 240),
    **{
        f"attention/{name}": Case("attention", partial(compare_attention, name=name), 12, 150)
        for name in ATTENTION
    },
    **_training_cases("1B", ("full", "LoRA"), 25),
    **_training_cases("8B", ("full", "LoRA", "QLoRA"), 50),
    "eval/kinject": Case("eval", score_with_kinject, 20, 180),
    "eval/lm-evaluation-harness": Case("eval", score_with_harness, 60, 300),
    **{f"option/{name}": Case("options", partial(_option, name=name), 25, 200) for name in OPTIONS},
    **_training_cases("0.5B", ("full", "LoRA", "QLoRA"), 20),
    **_training_cases("1B", ("QLoRA",), 25),
    "real": Case("real", real.run_study, 120, 3000),
}
assert set(SHAPES) == {"0.5B", "1B", "8B", "Qwen3-8B"}
