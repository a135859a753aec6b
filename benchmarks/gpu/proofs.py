"""What the GPU program proves before it measures speed: each case raises `ValueError` where GPU and CPU, packed and single
rows, or a resumed and a whole run differ by more than rounding.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import training
from training import Setting, make_batch, make_model, make_texts

ROOT = Path(__file__).parents[2]
EXACT, ROUNDED = 1e-4, 2e-2
"""Largest difference of losses in float32 (other orders of sums) and with bfloat16 arithmetic (8 bits a product)."""


def _check(difference: float, bound: float, what: str) -> None:
    if not difference <= bound:
        raise ValueError(f"{what}: the losses differ by {difference:.2e}, allowed is {bound:.0e}")


def compare_devices(setting: Setting) -> dict[str, Any]:
    """Return the losses of one model on one batch of packed rows: on the CPU, on the device, and there in bfloat16."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    folder = make_model(setting, "0.5B")
    rows = {key: value[:, :256].cpu() for key, value in make_batch(setting, "0.5B", 1).items()}
    labels = rows["input_ids"].masked_fill(rows["position_ids"] == 0, -100)
    losses = {}
    for name, device, half in (
        ("cpu", "cpu", False),
        ("device", setting.device, False),
        ("bf16", setting.device, True),
    ):
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", device_map={"": device}
        )
        inputs = {key: value.to(device) for key, value in rows.items()}
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=half):
            logits = model(**inputs, use_cache=False).logits
        losses[name] = cross_entropy(logits[0, :-1].float().cpu(), labels[0, 1:]).item()
        del model
    _check(abs(losses["device"] - losses["cpu"]), EXACT, f"{setting.device} and cpu in float32")
    _check(
        abs(losses["bf16"] - losses["cpu"]),
        ROUNDED,
        f"{setting.device} in bfloat16 and cpu in float32",
    )
    return {f"{name}_loss": loss for name, loss in losses.items()}


def compare_packing(setting: Setting, attention: str) -> dict[str, Any]:
    """Return the held-out loss of the same texts in packed rows and one a row, through kinject's own rows and collator."""
    import yaml

    from kinject.recipe import read_recipe
    from kinject.train.setup import make_trainer

    held_out = setting.scratch / "held-out.jsonl"
    # One text a row may not be cut: what is lost would be missing in one of the losses.
    texts = [" ".join(text.split()[:40]) for text in make_texts(2_000, seed=1)]
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    losses = {}
    for name, packing in (("packed", True), ("single", False)):
        changes = {
            "corpus.path": str(held_out), "corpus.validation_corpus": str(held_out), "model.attention": attention,
            "trainer.packing": packing, "trainer.max_steps": 1, "trainer.per_device_eval_batch_size": 4,
        }  # fmt: skip
        if not packing:
            changes["trainer.packing_strategy"] = None
        recipe = training.recipe_of(setting, "0.5B", "full", changes)
        recipe["trainer"] = {
            key: value for key, value in recipe["trainer"].items() if value is not None
        }
        path = setting.scratch / f"packing-{name}.yaml"
        path.write_text(yaml.safe_dump(recipe), "utf-8")
        (setting.scratch / "run").mkdir(exist_ok=True)
        trainer = make_trainer(read_recipe(path, verb="train"))
        losses[name] = float(trainer.evaluate()["eval_loss"])
        used = str(trainer.accelerator.unwrap_model(trainer.model).config._attn_implementation)
        del trainer
    bound = EXACT if setting.tiny else ROUNDED
    _check(abs(losses["packed"] - losses["single"]), bound, f"packed and single rows with {used}")
    return {"packed_loss": losses["packed"], "single_loss": losses["single"], "attention": used}


def resume_training(setting: Setting) -> dict[str, Any]:
    """Return the losses of steps 4 to 6 of a whole run, and of one that went on from its checkpoint at step 3."""
    from kinject import train

    folder = setting.scratch / "resumed"
    changes = {
        "trainer.max_steps": 6,
        "trainer.save_strategy": "steps",
        "trainer.save_steps": 3,
        "trainer.logging_steps": 1,
    }
    path = _written(training.recipe_of(setting, "0.5B", "full", changes), folder)
    train(path)
    whole = _losses(folder)
    for name in ("model", "checkpoint-6"):
        shutil.rmtree(folder / name)
    (folder / "manifest.json").unlink()
    train(path, resume=True)
    resumed = _losses(folder)
    difference = max(abs(whole[step] - resumed[step]) for step in (4, 5, 6))
    _check(difference, EXACT if setting.tiny else ROUNDED, "a resumed and a whole run")
    return {"whole": whole, "resumed": resumed, "difference": difference}


def _written(recipe: dict[str, Any], folder: Path) -> Path:
    """Write a recipe whose run folder is `folder`, and return its file."""
    import yaml

    recipe["run_dir"] = str(folder)
    path = folder.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(recipe), "utf-8")
    return path


def _losses(folder: Path) -> dict[int, float]:
    """Return the last logged loss of each step."""
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]
    return {int(row["step"]): float(row["loss"]) for row in rows if "loss" in row}


def run_sandbox(setting: Setting) -> dict[str, Any]:
    """Return what ``kinject train`` and ``kinject eval`` say of the sandbox: its base reads the documents, repeated."""
    import yaml

    from kinject import evaluate, train
    from kinject.recipe.shipped import copy_recipes, find_recipes, read_shipped
    from kinject.sandbox import BASE, BASE_CORPUS, write_base_corpus, write_sandbox

    folder = setting.scratch / "sandbox"
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    with contextlib.chdir(folder):
        copy_recipes(find_recipes(["sandbox/demo"], read_shipped()), Path(), write_sandbox)
        write_base_corpus(BASE_CORPUS)
        BASE.write()
        train("recipes/sandbox/repeat.yaml")
        section = yaml.safe_load(Path("recipes/sandbox/demo.yaml").read_text("utf-8"))
        section["eval"]["models"].pop("cpt")
        Path("eval.yaml").write_text(yaml.safe_dump(section), "utf-8")
        report = evaluate("eval.yaml")
    accuracies = {
        f"{result.arm} on {result.question_set}": result.accuracy for result in report.results
    }
    return {"seconds": time.perf_counter() - began, "accuracies": accuracies}


def train_shipped(setting: Setting) -> dict[str, Any]:
    """Return the figures of recipes/qwen3/8b-cpt.yaml as it ships, on random weights of its model's shape and made-up texts."""
    import yaml

    values: dict[str, Any] = yaml.safe_load((ROOT / "recipes/qwen3/8b-cpt.yaml").read_text("utf-8"))
    shipped = {
        "model": values["model"],
        "techniques": values["techniques"],
        "trainer": values["trainer"],
    }
    for key in (
        "eval_strategy",
        "eval_on_start",
        "save_strategy",
        "save_total_limit",
        "num_train_epochs",
        "max_length",
    ):
        shipped["trainer"].pop(key)
    shipped["model"].pop("path")
    changes = {
        f"{part}.{key}": value
        for part, section in shipped.items()
        for key, value in section.items()
    }
    if setting.tiny:
        changes.pop("trainer.optim")  # bitsandbytes' 8-bit states need a GPU
    return training.train_kinject(setting, "Qwen3-8B", "full", changes)


def measured(case: Mapping[str, Any]) -> str:
    """Return the figures of a proof in one line of the page."""
    shown = {key: value for key, value in case.items() if isinstance(value, float)}
    return ", ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in shown.items())
