"""What the GPU program proves before it measures speed: each case raises `ValueError` where GPU and CPU, packed and single
rows, or a resumed and a whole run differ by more than rounding.

Losses are compared token by token: the models have random weights, so that the mean of all losses is nearly ln(vocabulary)
whatever a token reads.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import training
import varlen
from training import Setting, make_batch, make_model, make_texts

ROOT = Path(__file__).parents[2]
EXACT, ROUNDED = 1e-4, 0.1
"""Largest difference of a token's loss (root of the mean square) in float32 (other orders of sums), and with bfloat16
arithmetic (8 bits a product). The 0.5B shape on a CPU, three documents of 240 tokens: 0.006 in bfloat16, 0.76 where the
documents see each other, by which their mean loss moves by 0.03 alone."""
SANDBOX_ON_CPU = "base on new 0.223, repeat on new 0.873, repeat on known 0.925"
"""What `run_sandbox` returns where no GPU is: torch 2.11 on two x86-64 cores."""
LEARNED = 0.55
"""The least share of new questions that must be right after training: half-way from the base's to that on a CPU."""
IGNORED = -100
"""The label of a token that is in no loss."""
RESUMED = 2e-3
"""Largest difference of a step's mean loss between a whole and a resumed run in bfloat16: that of other rows is about 0.006."""


def _check(difference: float, bound: float, what: str) -> None:
    if not difference <= bound:
        raise ValueError(f"{what}: the losses differ by {difference:.2e}, allowed is {bound:.0e}")


def _distance(losses: Any, others: Any) -> float:
    """Return the root of the mean square of the differences of two tensors of losses."""
    return float((losses - others).square().mean().sqrt())


def compare_devices(setting: Setting) -> dict[str, Any]:
    """Return the losses of one model on one batch of packed rows: on the CPU, on the device, and there in bfloat16."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    folder = make_model(setting, "0.5B")
    rows = {key: value[:, :256].cpu() for key, value in make_batch(setting, "0.5B", 1).items()}
    targets = rows["input_ids"][0, 1:]
    is_learned = rows["position_ids"][0, 1:] != 0
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
        by_token = cross_entropy(logits[0, :-1].float().cpu(), targets, reduction="none")
        losses[name] = by_token[is_learned]
        del model
    exact, rounded = (_distance(losses[name], losses["cpu"]) for name in ("device", "bf16"))
    _check(exact, EXACT, f"{setting.device} and cpu in float32")
    _check(rounded, ROUNDED, f"{setting.device} in bfloat16 and cpu in float32")
    means = {f"{name}_loss": float(values.mean()) for name, values in losses.items()}
    return {**means, "float32_difference": exact, "bf16_difference": rounded}


def compare_packing(setting: Setting, attention: str) -> dict[str, Any]:
    """Return how far each token's loss in packed rows is from that of one text a row, through kinject's own rows and collator.

    `leak` is the same with the documents of a row in sight of each other: what the check must be able to notice.
    """
    held_out = setting.scratch / "held-out.jsonl"
    # One text a row may not be cut: what is lost would be missing in one of the losses.
    texts = [" ".join(text.split()[:40]) for text in make_texts(2_000, seed=1)]
    held_out.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    single = _held_out_losses(setting, held_out, attention, packing=False)
    packed = _held_out_losses(setting, held_out, attention, packing=True)
    difference, leak = (
        _distance(packed["losses"], single["losses"]),
        _distance(packed["seen"], single["losses"]),
    )
    bound = EXACT if setting.tiny else min(ROUNDED, leak / 4)
    _check(difference, bound, f"packed and single rows with {packed['attention']}")
    return {
        "packed_loss": packed["mean"], "single_loss": single["mean"], "difference": difference, "leak": leak,
        "attention": packed["attention"],
    }  # fmt: skip


def _held_out_losses(
    setting: Setting, held_out: Path, attention: str, *, packing: bool
) -> dict[str, Any]:
    """Return the mean loss that kinject's trainer has for held-out texts, and the loss of each token, text by text.

    The texts are in the order of their tokens, which is that of both kinds of rows. `seen`: with packed texts in sight of
    each other.
    """
    import torch
    import yaml

    from kinject.recipe import read_recipe
    from kinject.train.setup import make_trainer

    changes = {
        "corpus.path": str(held_out), "corpus.validation_corpus": str(held_out), "trainer.packing": packing,
        # It is no value of a recipe: the trainer is made with sdpa, whose rows it reads.
        "model.attention": "sdpa" if attention == varlen.NAME else attention,
        "trainer.max_steps": 1, "trainer.per_device_eval_batch_size": 4,
    }  # fmt: skip
    recipe = training.recipe_of(setting, "0.5B", "full", changes)
    if not packing:
        recipe["trainer"].pop("packing_strategy")
    path = setting.scratch / f"packing-{packing}.yaml"
    path.write_text(yaml.safe_dump(recipe), "utf-8")
    (setting.scratch / "run").mkdir(exist_ok=True)
    trainer = make_trainer(read_recipe(path, verb="train"))
    model = trainer.accelerator.unwrap_model(trainer.model)
    if attention == varlen.NAME:
        varlen.use(model)
    found: dict[str, dict[tuple[int, ...], Any]] = {"losses": {}, "seen": {}}
    mean = float(trainer.evaluate()["eval_loss"])
    for batch in trainer.get_eval_dataloader():
        for name, losses in found.items():
            losses |= _text_losses(setting, model, batch, apart=name == "losses")
    used = str(model.config._attn_implementation)
    joined = {
        name: torch.cat([losses[text] for text in sorted(losses)]) for name, losses in found.items()
    }
    return {"mean": mean, "attention": used, **joined}


def _text_losses(
    setting: Setting, model: Any, batch: Mapping[str, Any], *, apart: bool
) -> dict[tuple[int, ...], Any]:
    """Return the losses of each text of a batch, by its tokens; the texts of a row see each other if not `apart`."""
    import torch
    from torch.nn.functional import cross_entropy

    ids, positions = batch["input_ids"], batch["position_ids"]
    read = positions if apart else torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    model.eval()
    with torch.no_grad(), torch.autocast(setting.device, torch.bfloat16, enabled=not setting.tiny):
        logits = model(input_ids=ids, position_ids=read, use_cache=False).logits[:, :-1].float()
    losses = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    found = {}
    for row, starts, learned, values in zip(
        ids.tolist(),
        positions.tolist(),
        batch["labels"].tolist(),
        losses.view(len(ids), -1).cpu(),
        strict=True,
    ):
        # Behind the last label of a row is padding.
        end = max(n for n, label in enumerate(learned) if label != IGNORED) + 1
        bounds = [*(n for n, position in enumerate(starts[:end]) if position == 0), end]
        for begin, after in itertools.pairwise(bounds):
            found[tuple(row[begin:after])] = values[begin : after - 1]
    return found


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
    _check(difference, EXACT if setting.tiny else RESUMED, "a resumed and a whole run")
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
    accuracies: dict[str, float] = {}
    for result in report.results:
        # The first format, without passages: with the document at hand a model needs no training.
        if result.k == 0 and not result.subject:
            accuracies.setdefault(f"{result.arm} on {result.question_set}", result.accuracy)
    learned = accuracies["repeat on new"]
    if learned < LEARNED:
        raise ValueError(
            f"{learned:.0%} of the new questions are right after training, on a CPU 87%"
        )
    return {"seconds": time.perf_counter() - began, **accuracies}


def check_paraphrases(setting: Setting) -> dict[str, Any]:
    """Return how many paraphrases of the company's first documents pass the checks; raise `ValueError` if one does not.

    All of them pass elsewhere. The study of call 2 begins with it: what lacks for the checks would cost that whole call.
    """
    import yaml

    from kinject import augment
    from kinject.corpus.grading import matches

    folder = setting.scratch / "company"
    folder.mkdir(exist_ok=True)
    data, recipe_path = ROOT / "data/company", ROOT / "recipes/company/augment.yaml"
    documents = (data / "documents.jsonl").read_text("utf-8").splitlines()[:3]
    ids = {json.loads(line)["id"] for line in documents}
    written = (data / "paraphrases.jsonl").read_text("utf-8").splitlines()
    paraphrases = [line for line in written if json.loads(line)["document_id"] in ids]
    for name, lines in (("documents", documents), ("paraphrases", paraphrases)):
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    recipe = yaml.safe_load(recipe_path.read_text("utf-8"))
    recipe["augment"]["documents"] = str(folder / "documents.jsonl")
    recipe["augment"]["generator"]["path"] = str(folder / "paraphrases.jsonl")
    result = augment(_written(recipe, folder / "run"))
    if result.got < result.asked:
        raise ValueError(
            f"{result.got} of {result.asked} paraphrases passed the checks: {folder}/run/rejected.jsonl"
        )
    if not matches("It opened on 3 May 1987.", ["3 May 1987"]):
        raise ValueError("the grading of a written answer does not find a date in it")
    return {"paraphrases_passed": float(result.got)}


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
