"""What kinject's numbers take from each dependency, asked of the dependency itself: name -> package, question, tolerance.

`COMPUTED` answers are worked out without the package by make_dependencies.py (numpy, formulas). `OBSERVED` ones are choices
that a package made and could make otherwise (a stream of random numbers, the order of rows): what it said when the goldens
were made. Every answer is a list of numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy_llama

TEXT = "Arden was born in Lowmere, Bryn in Lowmere too; both were born in 1987."
SENTENCES = ("the mill at the river", "a town by the river", "the school of the town", "a mill")
QUERY = ("the", "river", "mill")
IDS = [numpy_llama.BOS, *numpy_llama.byte_ids("Kelm: 19"), numpy_llama.EOS]
GRADIENTS = ((0.5, -2.0, 1e-3, 0.0), (-0.25, -1.0, 2e-3, 0.0), (0.125, 3.0, -4e-3, 1e-4))
START, RATE, DECAY = (1.0, -0.5, 0.25, 2.0), 0.1, 0.01
MERGES = 20
PLACED = (3.0, 1.0, 2.0, 4.0), (2.0, 1.0, 3.0, 4.0), (1.0, 3.0, 2.0, 4.0), (2.0, 3.0, 1.0, 4.0)


@dataclass(frozen=True)
class Case:
    """`compute` returns numbers of `package`; they may differ by `tolerance` of their size (of 1 where they are smaller)."""

    package: str
    compute: Callable[[], list[float]]
    tolerance: float = 0.0


def _bpe() -> list[float]:
    from kinject.models import train_tokenizer

    tokenizer = train_tokenizer([TEXT], numpy_llama.VOCABULARY + MERGES)
    return list(map(float, tokenizer(TEXT + " Kelm é")["input_ids"]))


def _llama() -> list[float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**numpy_llama.config())).double()
    weights = {name: torch.tensor(value) for name, value in numpy_llama.draw(0).items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    with torch.no_grad():
        log_probs = model(torch.tensor([IDS[:-1]]), use_cache=False).logits[0].log_softmax(-1)
    return [float(log_probs[index, token]) for index, token in enumerate(IDS[1:])]


def _schedules() -> list[float]:
    import torch
    from transformers import get_scheduler

    rates = []
    for name in ("linear", "cosine"):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
        scheduler = get_scheduler(name, optimizer, 2, 8)
        for _ in range(8):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
    return rates


def _chat() -> list[float]:
    """A template's blanks: transformers renders with trim_blocks and lstrip_blocks, and adds what is to be said."""
    from kinject.models import train_tokenizer

    tokenizer = train_tokenizer([""], numpy_llama.VOCABULARY)
    tokenizer.chat_template = (
        "{% for m in messages %}\n  {% if m.role == 'user' %}\n<u>{{ m.content }}\n  {% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    messages = [{"role": "user", "content": "Kelm?"}]
    return list(
        map(
            float,
            str(
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ).encode(),
        )
    )


def _trl_loss() -> list[float]:
    """SFTTrainer's own loss of two rows of unequal length, the first two tokens of each not learned."""
    import tempfile

    import torch
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    from kinject.models import train_tokenizer

    model = LlamaForCausalLM(LlamaConfig(**numpy_llama.config()))
    model.load_state_dict(
        {name: torch.tensor(value) for name, value in numpy_llama.draw(0).items()}, strict=False
    )
    model.tie_weights()
    rows = [IDS, [*IDS, *IDS[3:]]]
    width = max(map(len, rows))
    batch = {
        "input_ids": torch.tensor(
            [[*row, *[numpy_llama.PAD] * (width - len(row))] for row in rows]
        ),
        "labels": torch.tensor(
            [[-100, -100, *row[2:], *[-100] * (width - len(row))] for row in rows]
        ),
        "attention_mask": torch.tensor(
            [[*[1] * len(row), *[0] * (width - len(row))] for row in rows]
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False
        )
        first = Dataset.from_list([{"input_ids": IDS, "labels": IDS}])
        trainer = SFTTrainer(
            model,
            config,
            train_dataset=first,
            processing_class=train_tokenizer([""], numpy_llama.VOCABULARY),
        )
        with torch.no_grad():
            return [float(trainer.compute_loss(trainer.model, dict(batch)))]


def _adamw() -> list[float]:
    import torch

    weight = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=RATE, weight_decay=DECAY)
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return [float(value) for value in weight.detach()]


def _clipping() -> list[float]:
    import torch

    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    weight.grad = torch.tensor(GRADIENTS[0], dtype=torch.float64)
    norm = torch.nn.utils.clip_grad_norm_([weight], 0.5)
    return [float(norm), *map(float, weight.grad)]


def _cross_entropy() -> list[float]:
    import torch

    logits = torch.tensor(GRADIENTS, dtype=torch.float64)
    return [
        float(
            torch.nn.functional.cross_entropy(
                logits, torch.tensor([1, -100, 3]), label_smoothing=0.1
            )
        )
    ]


def _torch_order() -> list[float]:
    import torch

    return list(map(float, torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()))


def _eight_bit() -> list[float]:
    """The steps of an 8-bit AdamW over 4,096 weights alike: blockwise states hold them to about a hundredth."""
    import torch
    from bitsandbytes.optim import AdamW8bit

    weight = torch.nn.Parameter(torch.full((4096,), START[0]))
    optimizer = AdamW8bit([weight], lr=RATE, weight_decay=DECAY)
    steps = []
    for gradient in (0.5, -0.25, 0.125):
        weight.grad = torch.full((4096,), gradient)
        optimizer.step()
        steps.append(float(weight.detach().mean()))
    return steps


def _lora() -> list[float]:
    import torch
    from peft import LoraConfig, get_peft_model

    linear = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False, dtype=torch.float64))
    wrapped: Any = get_peft_model(linear, LoraConfig(r=2, lora_alpha=8, target_modules=["0"]))  # type: ignore[arg-type]
    layer = wrapped.base_model.model[0]
    with torch.no_grad():
        for matrix, start in (
            (layer.weight, 1.0),
            (layer.lora_A["default"].weight, 2.0),
            (layer.lora_B["default"].weight, 3.0),
        ):
            matrix.copy_(torch.arange(matrix.numel()).reshape(matrix.shape) / 8 + start)
        return [
            float(value) for value in wrapped(torch.tensor([START], dtype=torch.float64)).flatten()
        ]


def _row_order() -> list[float]:
    """The order in which a data loader that accelerate prepared deals the rows of two epochs."""
    import torch
    from accelerate import Accelerator
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    Accelerator(cpu=True)
    torch.manual_seed(3)
    rows: Any = [float(index) for index in range(10)]
    loader = prepare_data_loader(
        DataLoader(rows, batch_size=3, shuffle=True), use_seedable_sampler=True, data_seed=5
    )
    order = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        order += [float(value) for batch in loader for value in batch]
    return order


def _numpy_stream() -> list[float]:
    """What the bootstraps and sign flips draw from."""
    drawn = np.random.default_rng(0).integers(0, 1000, 6)
    counted = np.random.default_rng([1, 5]).multinomial(5, [0.2] * 5, 3).ravel()
    signs = np.random.default_rng([0, 2]).integers(0, 2, (2, 8), dtype=np.int8).ravel()
    return list(map(float, (*drawn, *counted, *signs)))


def _python_stream() -> list[float]:
    """What decides the order of rows before packing."""
    rows = list(range(12))
    rng = random.Random(42)
    rng.shuffle(rows)
    return [*map(float, rows), rng.random()]


def _scipy() -> list[float]:
    from scipy.stats import binomtest, norm, page_trend_test, t

    interval = binomtest(7, 9).proportion_ci(confidence_level=0.95, method="wilson")
    page = page_trend_test(PLACED, method="exact").pvalue
    return [
        *map(
            float,
            (
                binomtest(9, 12).pvalue,
                interval.low,
                interval.high,
                page,
                norm.ppf(0.975),
                t.ppf(0.975, 2),
            ),
        )
    ]


def _bm25() -> list[float]:
    import bm25s

    index = bm25s.BM25()
    index.index([sentence.split() for sentence in SENTENCES], show_progress=False)
    return [float(score) for score in index.get_scores(list(QUERY))]


COMPUTED: dict[str, Case] = {
    "byte-level BPE": Case("tokenizers", _bpe),
    "log-probs of a Llama": Case("transformers", _llama, 1e-6),
    "schedules": Case("transformers", _schedules, 1e-12),
    "blanks of a chat template": Case("transformers", _chat),
    "the loss of a batch": Case("trl", _trl_loss, 2e-5),
    "AdamW": Case("torch", _adamw, 1e-9),
    "clipping": Case("torch", _clipping, 1e-9),
    "cross-entropy": Case("torch", _cross_entropy, 1e-12),
    "8-bit AdamW": Case("bitsandbytes", _eight_bit, 2e-3),
    "LoRA": Case("peft", _lora, 1e-12),
    "tests and intervals": Case("scipy", _scipy, 1e-9),
    "BM25": Case("bm25s", _bm25, 1e-5),
}
OBSERVED: dict[str, Case] = {
    "its stream of random numbers": Case("numpy", _numpy_stream),
    "random.Random's shuffle": Case("python", _python_stream),
    "the order of rows under a seed": Case("torch", _torch_order),
    "the order of rows of an epoch": Case("accelerate", _row_order),
}
