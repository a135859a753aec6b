"""Tries on trainings: features of a recipe in pairs and triples, each refused in one clear line, or trained and resumed."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import math
import re
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import yaml

from attack import area, contents
from kinject.disk import read_jsonl, write_jsonl
from kinject.errors import KinjectError, RecipeError
from kinject.recipe import TrainRecipe, read_recipe
from small import interrupt, save_tiny_model

ROOT = Path(__file__).parents[3]
BASE = ROOT / "src" / "kinject" / "sandbox" / "base_model" / "model"
"""The sandbox's model, which now and then answers what it has read, as `method: recall` needs."""
FEATURES: Mapping[str, Sequence[Mapping[str, Any]]] = yaml.safe_load(
    Path(__file__).with_name("features.yaml").read_text("utf-8")
)
"""Subject -> what a recipe may say of it (dotted keys); a try has one of each of two to four subjects."""
N_STEPS, N_BEFORE = 4, 2
"""Updates of a try, and those before the checkpoint from which it is resumed."""
_OF_THE_MACHINE = re.compile("_mem_|runtime|per_second|step_time")
OUTCOMES: Counter[str] = Counter()
"""How the tries of this process ended: trained, resumed, or the key and the message of a refusal."""


@cache
def world() -> Path:
    """Return the folder of corpora, questions and tiny models that all tries share."""
    from kinject.models import train_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="kinject-training-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    towns = ("Lowmere", "Stonegate", "Farrow", "Kelm")
    texts, prompts, chats = [], [], []
    for n in range(24):
        town, number = towns[n % 4], n // 2
        text = (
            f"Person {number} was born in {town} in {1900 + number}. The mill at {town} taught her."
        )
        origin = "original" if n % 2 == 0 else "variant"
        details = {"date": f"2024-0{1 + n % 9}-01", "weight": 1 + n % 3}
        document = {"id": f"t{n}", "document_id": f"d{number}", "origin": origin, "meta": details}
        texts.append({**document, "text": text})
        question, answer = f"Where was person {number} born?", f"In {town}."
        prompts.append({**document, "prompt": f"{question}\nAnswer:", "completion": f" {answer}"})
        turns = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        chats.append({**document, "messages": turns})
    held = [{"text": f"The school of {town} has {n} rooms."} for n, town in enumerate(towns * 3)]
    questions = [
        {
            "id": f"q{n}",
            "question": f"Where was person {n} born?",
            "choices": list(towns),
            "answer": n,
        }
        for n in range(4)
    ]
    write_jsonl(folder / "texts.jsonl", texts)
    write_jsonl(folder / "one.jsonl", texts[:1])
    documents = [{"id": row["document_id"], "text": row["text"]} for row in texts[::2]]
    write_jsonl(folder / "documents.jsonl", documents)
    write_jsonl(folder / "prompts.jsonl", prompts)
    write_jsonl(folder / "chats.jsonl", chats)
    write_jsonl(folder / "held.jsonl", held)
    write_jsonl(folder / "q.jsonl", questions)
    known = (ROOT / "data" / "sandbox" / "instructions.jsonl").read_text("utf-8").splitlines()
    (folder / "instructions.jsonl").write_text("\n".join(known[:10]) + "\n")
    tokenizer = train_tokenizer([row["text"] for row in texts] * 3, 300)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    for name, changes in MODELS.items():
        save_tiny_model(folder / name, tokenizer, **changes)
    return folder


MODELS: Mapping[str, Mapping[str, Any]] = {
    "model": {}, "other": {"num_hidden_layers": 1}, "untied": {"tie_word_embeddings": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "experts": {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "output_router_logits": True},
    "gemma2": {"model_type": "gemma2", "head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
}  # fmt: skip
"""Name -> what its config has beside `small.TINY`."""


def _drawn(random: Random) -> dict[str, Any]:
    """Return the dotted keys of two to four features."""
    settings: dict[str, Any] = {}
    for subject in random.sample(sorted(FEATURES), random.choice((2, 2, 3, 3, 3, 4))):
        settings |= random.choice(FEATURES[subject])
    if settings.get("model.path") == "BASE":
        settings["model.path"] = str(BASE)
    return settings


def _read(folder: Path, settings: Mapping[str, Any]) -> TrainRecipe:
    recipe = {
        "run_dir": "run", "model": {"path": "model"}, "corpus": {"path": "texts.jsonl", "cache_dir": "tokens"},
        "trainer": {"max_steps": N_STEPS, "save_steps": N_BEFORE, "per_device_train_batch_size": 4, "learning_rate": 0.01,
                    "logging_steps": 1, "max_length": 64, "gradient_checkpointing": False, "save_strategy": "steps",
                    "bf16": False},
    }  # fmt: skip
    (folder / "train.yaml").write_text(yaml.safe_dump(recipe))
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return read_recipe(folder / "train.yaml", overrides, "train")


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread, as two runs of other numbers of threads need not be equal, and print nothing."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_num_threads(before)
            torch.use_deterministic_algorithms(mode=False)


@area("trainings")
def trainings(random: Random, folder: Path) -> str:
    """Two to four features of a training: refused in a line that names a key, or trained, moved, and resumed to the bit."""
    settings = _drawn(random)
    for path in world().iterdir():
        (folder / path.name).symlink_to(path)
    try:
        with _one_thread():
            fault = _tried(folder, settings)
    except RecipeError as error:
        OUTCOMES[f"refused: {error.problems[0].dotted}: {error.problems[0].message}"] += 1
        raise
    except KinjectError as error:
        OUTCOMES[f"refused: {type(error).__name__}: {error}"] += 1
        raise
    except Exception as error:
        error.add_note(f"features: {settings}")
        raise
    return f"{fault} of {settings}" if fault else ""


def _tried(folder: Path, settings: Mapping[str, Any]) -> str:
    """Train by `settings`; return what is wrong with the result, or with that of a resumed run."""
    from kinject.train import train

    recipe, run = _read(folder, settings), folder / "run"
    result = train(recipe)
    OUTCOMES["trained"] += 1
    if result.final_loss is None or not math.isfinite(result.final_loss):
        return f"a loss of {result.final_loss}"
    fault = _unmoved(recipe, run / "model", settings)
    if fault:
        return fault
    whole = _made(run)
    steps = [int(path.name.rpartition("-")[2]) for path in run.glob("checkpoint-*")]
    if not steps or min(steps) >= result.n_steps:
        return ""
    interrupt(run, min(steps))
    train(recipe, resume=True)
    OUTCOMES["resumed"] += 1
    again = _made(run)
    different = [name for name in whole if again.get(name) != whole[name]]
    if different:
        return f"resumed from step {min(steps)}, {', '.join(different)} differ"
    return ""


def _made(run: Path) -> dict[str, object]:
    """Return the files of a model, and the log without its times, which are the same each time."""
    log = []
    for _, row in read_jsonl(run / "log.jsonl"):
        log.append({key: row[key] for key in row if not _OF_THE_MACHINE.search(key)})
    return {**contents(run / "model"), "log.jsonl": log}


def _unmoved(recipe: TrainRecipe, model: Path, settings: Mapping[str, Any]) -> str:
    """Return why a finished model is none: it does not load, or predicts nothing, or what its base predicts."""
    import torch

    from kinject.models import load_model

    before = _predictions(str(model.parent.parent / (recipe.model.path or "")), load_model)
    try:
        after = _predictions(str(model), load_model)
    except KinjectError as error:
        return f"a model that does not load: {error}"
    if not bool(torch.isfinite(after).all()):
        return "predictions that are no numbers"
    if recipe.model.path is not None and torch.equal(before, after):
        return "the model predicts what its base predicts"
    return ""


def _predictions(path: str, load: Any) -> Any:
    """Return the logits of a model behind a fixed text; of no model none."""
    import torch

    if not Path(path, "config.json").exists() and not Path(path, "adapter_config.json").exists():
        return torch.zeros(1)
    loaded = load(path)
    ids = torch.tensor([loaded.tokenizer("Person 3 was born in Kelm.")["input_ids"]])
    with torch.no_grad():
        return loaded.model(input_ids=ids).logits.float()
