"""Training steps on the GPU: kinject train, a bare PyTorch loop and SFTTrainer on models with random weights.

All three train the same shape with the same rows a step, weights, optimizer and arithmetic, on texts of the same lengths.
Tokens are those in the loss; the first steps (compilation, optimizer state) are left out. Peak memory is that of training,
without loading.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import random
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM_UP, STEPS, SECONDS = 3, 12, 20.0
"""Steps before the clock starts, steps that are timed at most (2 in a dry run), seconds after which no step begins."""
TO_END = 5.0
"""Seconds that a case needs behind its last step."""
LORA = {"r": 16, "lora_alpha": 32, "target_modules": "all-linear"}
WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "el", "or")]


@dataclass(frozen=True)
class Shape:
    """A model's config, and the rows of a step for each method on a GPU of 139 GiB."""

    config: Mapping[str, Any]
    rows: Mapping[str, int]
    block: int = 2048
    full_dtype: str = "float32"


def _llama(
    width: int, inner: int, layers: int, heads: int, kv: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 8192,
        "tie_word_embeddings": tied, "vocab_size": vocabulary,
    }  # fmt: skip


SHAPES = {
    "0.5B": Shape(_llama(896, 4864, 24, 14, 2, 151_936, True), {"full": 8, "LoRA": 8, "QLoRA": 8}),
    "1B": Shape(_llama(2048, 8192, 16, 32, 8, 128_256, True), {"full": 8, "LoRA": 8, "QLoRA": 8}),
    "8B": Shape(
        _llama(4096, 14_336, 32, 32, 8, 128_256, False),
        {"full": 2, "LoRA": 4, "QLoRA": 4},
        full_dtype="bfloat16",
    ),
    "Qwen3-8B": Shape(
        {
            **_llama(4096, 12_288, 36, 32, 8, 151_936, False),
            "model_type": "qwen3",
            "head_dim": 128,
        },
        {"full": 1},
        full_dtype="bfloat16",
    ),
}
"""The shapes of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.1-8B and Qwen3-8B. At 8B all weights are trained in bfloat16."""
SMALL_GPU = 100.0
"""GiB below which 8B in full takes gradient checkpointing: weights, gradients and AdamW's states alone are 64."""
TINY = Shape(_llama(32, 64, 2, 4, 2, 600, True), {"full": 2, "LoRA": 2, "QLoRA": 2}, block=128)


@dataclass(frozen=True)
class Setting:
    """Where a case runs: the device, a scratch folder, and whether everything is tiny (a dry run on a CPU).

    `results` is the folder of results, for a case that brings files back; `ends` is the time.monotonic() at which the case
    is killed.
    """

    device: str
    scratch: Path
    tiny: bool
    results: Path = Path("runs/gpu")
    ends: float = math.inf

    def shape(self, name: str) -> Shape:
        """Return a shape, or the tiny one."""
        return TINY if self.tiny else SHAPES[name]

    @property
    def steps(self) -> int:
        """The most steps that are timed."""
        return 2 if self.tiny else STEPS

    def checkpoints(self, name: str, method: str) -> bool:
        """Return whether activations are computed again, in all programs alike."""
        if self.device != "cuda" or (name, method) != ("8B", "full"):
            return False
        import torch

        return bool(torch.cuda.get_device_properties(0).total_memory / 2**30 < SMALL_GPU)

    def rows(self, name: str, method: str) -> int:
        """Return the rows of a step, fewer on a GPU with less memory."""
        rows = self.shape(name).rows[method]
        if self.device != "cuda":
            return rows
        import torch

        return max(
            1, int(rows * min(1.0, torch.cuda.get_device_properties(0).total_memory / 2**30 / 130))
        )


def die_with_parent() -> None:
    """End this process when its parent ends, however that ends: what is left alone would keep the GPU's memory."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG of Linux


def make_texts(n_words: int, seed: int = 0) -> list[str]:
    """Return texts of 20 to 260 made-up words, `n_words` or a few more in all."""
    rng, texts, made = random.Random(seed), [], 0
    while made < n_words:
        length = rng.randint(20, 260)
        texts.append(" ".join(rng.choices(WORDS, k=length)).capitalize() + ".")
        made += length
    return texts


def make_model(setting: Setting, name: str) -> Path:
    """Save a model of a shape with random weights in bfloat16, made on the device, and its tokenizer; return the folder."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from kinject.models import train_tokenizer

    shape = setting.shape(name)
    folder = setting.scratch / f"model-{'tiny' if setting.tiny else name}"
    if (folder / "done").exists():
        return folder
    tokenizer = train_tokenizer(make_texts(2_000 if setting.tiny else 20_000), 600)
    fields = {key: value for key, value in shape.config.items() if key != "model_type"}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = CONFIG_MAPPING[shape.config["model_type"]](
        **fields, **special, pad_token_id=tokenizer.pad_token_id
    )
    torch.manual_seed(0)
    with torch.device(setting.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    make_room(setting.scratch, sum(weight.nbytes for weight in model.parameters()))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "done").touch()
    return folder


def make_room(scratch: Path, n_bytes: int) -> None:
    """Remove saved models, the oldest first, until `n_bytes` and a tenth fit; a case that needs one makes it again.

    Two models of 8B have 32 GB, and a lent machine may have that much free beside its image.
    """
    models = sorted(scratch.glob("model-*"), key=_changed)
    while models and shutil.disk_usage(scratch).free < 1.1 * n_bytes:
        shutil.rmtree(models.pop(0))


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def make_corpus(setting: Setting, n_tokens: int) -> Path:
    """Write texts of about `n_tokens` tokens or more; return the file."""
    path = setting.scratch / f"corpus-{n_tokens}.jsonl"
    if not path.exists():
        texts = make_texts(n_tokens)  # a word is a token or more
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    return path


class Clock:
    """Seconds and tokens after each step; `result` are tokens a second and milliseconds a step after the warm-up."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.marks: list[tuple[float, int]] = []
        self.tokens = 0
        reset_peak(setting)
        self.began = time.perf_counter()

    def mark(self) -> bool:
        """Note a step; return whether another one may begin."""
        if self.setting.device == "cuda":
            import torch

            torch.cuda.synchronize()
        self.marks.append((time.perf_counter(), self.tokens))
        n_timed = len(self.marks) - WARM_UP
        if n_timed < 2:
            return True
        if n_timed >= self.setting.steps:
            return False
        now, last = self.marks[-1][0], self.marks[-1][0] - self.marks[-2][0]
        if time.monotonic() + 1.5 * last + TO_END > self.setting.ends:
            return False  # figures of a few steps are worth more than a case that is killed
        return now - self.marks[WARM_UP - 1][0] < SECONDS

    def result(self) -> dict[str, Any]:
        """Return the figures. Raises `RuntimeError` if too few steps were made."""
        if len(self.marks) < WARM_UP + 2:
            raise RuntimeError(f"only {len(self.marks)} steps were made")
        timed = self.marks[WARM_UP - 1 :]
        steps = [after[0] - before[0] for before, after in itertools.pairwise(timed)]
        tokens = (timed[-1][1] - timed[0][1]) / len(steps)
        seconds = statistics.median(steps)
        return {
            "tokens_per_second": tokens / seconds,
            "step_ms": 1000 * seconds,
            "steps": len(steps),
            "warm_up_seconds": timed[0][0] - self.began,
            **peak(self.setting),
        }


def reset_peak(setting: Setting) -> None:
    """Forget the GPU memory that was used so far."""
    if setting.device == "cuda":
        import gc

        import torch

        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(setting: Setting) -> dict[str, float]:
    """Return the peaks of tensors and of memory that torch held, in GiB; empty without a GPU."""
    if setting.device != "cuda":
        return {}
    import torch

    return {
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "held_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


def flops_per_token(model: Any, method: str, n_trained: int) -> float:
    """Return the operations that training on a token needs: products with weights, without attention and recomputation.

    Forward 2 a weight, gradients of activations 2, gradients of weights 2 for each trained one. The look-up of the
    embedding is no product; tied to the head it is one.
    """
    config = model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv = config.num_key_value_heads / config.num_attention_heads
    n = layers * (width * width * (2 + 2 * kv) + 3 * width * inner) + config.vocab_size * width
    return 4.0 * n + 2.0 * (n if method == "full" else n_trained)


def recipe_of(
    setting: Setting, name: str, method: str, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the recipe of a kinject run; `overrides` are section.key -> value."""
    shape, rows, full = setting.shape(name), setting.rows(name, method), method == "full"
    recipe: dict[str, Any] = {
        "run_dir": str(setting.scratch / "run"), "method": "cpt",
        "model": {
            "path": str(make_model(setting, name)), "quantization": "4bit" if method == "QLoRA" else "none",
            "dtype": "float32" if setting.tiny else shape.full_dtype if full else "bfloat16",
        },
        "corpus": {
            "path": str(make_corpus(setting, (WARM_UP + setting.steps + 1) * rows * shape.block)),
            "cache_dir": str(setting.scratch / "tokens"),
        },
        "trainer": {
            "packing": True, "packing_strategy": "bfd_split", "max_length": shape.block, "save_strategy": "no",
            "per_device_train_batch_size": rows, "logging_steps": 4,
            "gradient_checkpointing": setting.checkpoints(name, method),
            "learning_rate": 1e-4, "max_steps": WARM_UP + setting.steps, "optim": "adamw_torch_fused",
            "use_cpu": setting.device == "cpu",
        },
        "guards": {"instability": "ignore"},
    }  # fmt: skip
    if not full:
        recipe["adapter"] = dict(LORA)
    for key, value in overrides.items():
        section, _, field = key.partition(".")
        recipe.setdefault(section, {})[field] = value
    return recipe


def train_kinject(
    setting: Setting, name: str, method: str, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Train with kinject's own trainer; return the figures, with the memory that `kinject plan` expects."""
    import yaml

    from kinject.recipe import read_recipe
    from kinject.train.setup import make_trainer

    path = setting.scratch / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_of(setting, name, method, overrides or {})), "utf-8")
    (setting.scratch / "run").mkdir(exist_ok=True)
    recipe = read_recipe(path, verb="train")
    planned = plan(setting, recipe)
    trainer = make_trainer(recipe)
    model = trainer.accelerator.unwrap_model(trainer.model)
    n_trained = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    clock = Clock(setting)
    _time_trainer(trainer, clock)
    return {
        **clock.result(), **planned, "attention": str(model.config._attn_implementation),
        "rows": setting.rows(name, method), "block": setting.shape(name).block,
        "flops_per_token": flops_per_token(model, method, n_trained), "notes": [str(note) for note in trainer.notes],
    }  # fmt: skip


def plan(setting: Setting, recipe: Any) -> dict[str, Any]:
    """Return the memory of tensors that `kinject plan` expects for a step, in GiB, or why it has none."""
    from kinject.plan.estimate import estimate, read_shapes
    from kinject.plan.run import step_of
    from kinject.plan.ways import find_devices

    try:
        step = step_of(recipe, find_devices(setting.device, None, None))
        memory = estimate(step, read_shapes(step))
    except Exception as error:  # noqa: BLE001 (the plan's failure is a result; the run goes on)
        return {"plan_fault": f"{type(error).__name__}: {error}"[:200]}
    return {"planned_gib": memory.peak / 2**30}


def _time_trainer(trainer: Any, clock: Clock) -> None:
    """Train until the clock has enough steps."""
    from transformers import TrainerCallback

    class _Marks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= not clock.mark()

    training_step = trainer.training_step

    def counted(model: Any, inputs: Any, *rest: Any) -> Any:
        clock.tokens += int((inputs["labels"] != -100).sum())
        return training_step(model, inputs, *rest)

    trainer.training_step = counted
    trainer.add_callback(_Marks())
    trainer.train()


def load(
    setting: Setting, name: str, method: str, attention: str, *, with_adapter: bool = True
) -> Any:
    """Return the model as a plain transformers script loads it, with a peft adapter for LoRA and QLoRA."""
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = setting.shape(name).full_dtype if method == "full" else "bfloat16"
    options: dict[str, Any] = {"dtype": torch.float32 if setting.tiny else getattr(torch, dtype)}
    if method == "QLoRA":
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(
        make_model(setting, name),
        attn_implementation=attention,
        device_map={"": setting.device},
        **options,
    )
    if method == "full" or not with_adapter:
        return model
    if method == "QLoRA":
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))


def make_batch(setting: Setting, name: str, rows: int, seed: int = 0) -> dict[str, Any]:
    """Return input_ids and position_ids [rows, block] of packed documents of random tokens, at most a fifth of a row."""
    import torch

    block, rng = setting.shape(name).block, random.Random(seed)
    ids = torch.randint(3, 500, (rows, block), generator=torch.Generator().manual_seed(seed))
    positions = []
    for _ in range(rows):
        row: list[int] = []
        while len(row) < block:
            row += range(min(rng.randint(block // 100 + 1, block // 5), block - len(row)))
        positions.append(row)
    return {
        "input_ids": ids.to(setting.device),
        "position_ids": torch.tensor(positions, device=setting.device),
    }


def train_bare(setting: Setting, name: str, method: str) -> dict[str, Any]:
    """Train in a loop of a few lines, with the attention that kinject would choose."""
    import torch
    from torch.nn.functional import cross_entropy

    from kinject import models

    kernels = models.fastest_attention(setting.device)
    attention = next((kernel for kernel in kernels if kernel != models.FLEX), "sdpa")
    model = load(setting, name, method, attention)
    if attention == "sdpa" and models.FLEX in kernels:
        row = {key: value[0].tolist() for key, value in make_batch(setting, name, 1).items()}
        if not models.try_faster(model, models.FLEX, row):
            attention = models.FLEX
    model.train()
    if setting.checkpoints(name, method):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    rows, clock = setting.rows(name, method), Clock(setting)
    is_flat, step, go_on = "flash" in attention, 0, True
    while go_on:
        batch = make_batch(setting, name, rows, step)
        labels = batch["input_ids"].clone()
        labels[batch["position_ids"] == 0] = -100
        if is_flat:
            batch, labels = (
                {key: value.flatten()[None] for key, value in batch.items()},
                labels.flatten()[None],
            )
        with torch.autocast(setting.device, torch.bfloat16, enabled=not setting.tiny):
            logits = model(**batch, use_cache=False).logits
        loss = cross_entropy(
            logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tokens += int((labels != -100).sum())
        step += 1
        go_on = clock.mark()
    n_trained = sum(parameter.numel() for parameter in weights)
    base = model.get_base_model() if method != "full" else model
    flops = flops_per_token(base, method, n_trained)
    return {**clock.result(), "attention": attention, "rows": rows, "flops_per_token": flops}


def train_sft(setting: Setting, name: str, method: str) -> dict[str, Any]:
    """Train with SFTTrainer, its own packing (bfd_split), and flash attention where it is installed, else sdpa."""
    from datasets import load_dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from kinject import models

    attention = next(
        (item for item in models.fastest_attention(setting.device) if "flash" in item), "sdpa"
    )
    shape, rows = setting.shape(name), setting.rows(name, method)
    corpus = make_corpus(setting, (WARM_UP + setting.steps + 1) * rows * shape.block)
    config = SFTConfig(
        output_dir=str(setting.scratch / "sft"), packing=True, packing_strategy="bfd_split", max_length=shape.block,
        per_device_train_batch_size=rows, gradient_checkpointing=setting.checkpoints(name, method), report_to="none",
        disable_tqdm=True,
        save_strategy="no", use_cpu=setting.device == "cpu", logging_steps=4, learning_rate=1e-4,
        max_steps=WARM_UP + setting.steps, optim="adamw_torch_fused", bf16=not setting.tiny,
    )  # fmt: skip
    model = load(
        setting, name, method, attention, with_adapter=method == "QLoRA"
    )  # it adds that of LoRA itself
    trainer = SFTTrainer(
        model=model, args=config, processing_class=AutoTokenizer.from_pretrained(make_model(setting, name)),
        train_dataset=load_dataset("json", data_files=str(corpus), split="train", cache_dir=str(setting.scratch / "hf")),
        peft_config=LoraConfig(task_type="CAUSAL_LM", **LORA) if method == "LoRA" else None,
    )  # fmt: skip
    clock = Clock(setting)
    _time_trainer(trainer, clock)
    return {**clock.result(), "attention": attention, "rows": rows}


PROGRAMS: dict[str, Callable[[Setting, str, str], dict[str, Any]]] = {
    "kinject": train_kinject, "bare loop": train_bare, "SFTTrainer": train_sft,
}  # fmt: skip
