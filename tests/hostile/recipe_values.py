"""Draws a value for any key of a recipe, ours or a library's, and judges what check, plan and the verb itself make of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import json
import math
import os
import re
import shutil
import traceback
import types
import typing
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import yaml
from judge import HangError, bounded_memory, bounded_time

KeyPath = tuple[str, ...]

_SANDBOX = Path(__file__).parents[2] / "data" / "sandbox" / "documents.jsonl"
TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")
ROWS = [
    {"text": f"Person {i} was born in {TOWNS[i % 4]} in {1900 + i}.", "weight": 1 + i % 2, "date": f"2024-05-{1 + i % 9:02}"}
    for i in range(8)
]  # fmt: skip
QUESTIONS = [
    {"id": f"q{i}", "question": f"Where was Person {i} born?", "choices": list(TOWNS), "answer": i, "subject": "born"}
    for i in range(2)
]
TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip

INTEGERS = (
    -(2**63), -(10**10), -100, -2, -1, 0, 1, 2, 3, 7, 8, 13, 64, 1000, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1,
    2**63, 10**30,
)  # fmt: skip
NUMBERS = (
    -1e308, -5.0, -1.0, -1e-9, -0.0, 0.0, 5e-324, 1e-38, 1e-8, 1e-3, 0.1, 0.5, 0.999, 0.999_999_999, 1.0, 1.000_001, 1.5, 2.0,
    3.7, 100.0, 1e5, 1e10, 1e30, 1e39, 1e308, math.nan, math.inf, -math.inf,
)  # fmt: skip
WORDS = (
    "", " ", "nope", "a" * 300, "a/" * 150, "../x", "~", ".", "/dev/null", "no/such/file", "\u0663", "\u202egnp",
    "\ufeff", "e\u0301",
    "1", "-1", "1e-5", "nan", "inf", "none", "None", "null", "true", "auto", "all", "steps", "epoch", "best", "*", "[",
    "(", "(?P<",
    ".*", "q_proj", "(q|v)_proj", "all-linear", "embed_tokens", "lm_head", "model.layers.0", "%s", "{}", "{{ x }}", "{", "a\nb",
    "a=b", "a=b,c", "betas=1", "http://x", "linear", "cosine", "wandb", "tensorboard", "inductor", "eager", "full_shard", "gloo",
    "NCCL", "<|eos|>", "</s>", "gaussian", "loftq", "pissa", "pissa_niter_4", "eva", "olora", "adamw_torch", "a b c",
    "cuda", "cpu",
)  # fmt: skip
LISTS: tuple[Any, ...] = (
    [], [""], ["q_proj"], ["nope"], ["q_proj", "q_proj"], [1], [0, 1], [-1], [5], [None], [[]], [{}], [True], ["("],
    [1.5], ["lm_head"],
    [[0, 2]], [[0, 1], [0, 2]], ["model.layers.0.self_attn.q_proj.weight"], ["all"], ["loss"], [10**30],
)  # fmt: skip
MAPPINGS: tuple[Any, ...] = (
    {}, {"": 1}, {"a": 1}, {"q_proj": 2}, {"q_proj": 0}, {"q_proj": -1}, {"(": 2}, {"a": {"b": [1]}}, {"use_reentrant": False},
    {"use_reentrant": "x"}, {"num_cycles": 1}, {"power": -1}, {"min_lr": 1e-5}, {"zero_optimization": {"stage": 2}},
    {"split_batches": True}, {"dispatch_batches": True}, {"even_batches": 3}, {"num_steps": 4}, {"use_seedable_sampler": False},
    {"rho": 0.1}, {"loftq_bits": 4}, {"direction": "x"}, {"rope_theta": 0, "rope_type": "default"}, {"rope_type": "nope"},
    {"rope_theta": -1.0, "rope_type": "default"}, {"rope_type": "linear", "factor": 0.0, "rope_theta": 10000.0},
)  # fmt: skip
RAW = (
    "\u0663",
    "\u0661e-\u0663",
    "1_0",
    "0x2",
    "1e400",
    "-.inf",
    "!!int '3'",
    "!!str 3",
    "&a [*a]",
    "2026-01-01",
    "yes",
    "- 1",
    "{",
    "'",
)
"""YAML as a person types it."""
OF_ANOTHER_TYPE: tuple[Any, ...] = (None, True, False, 1, 0.5, "x", [], {}, [1], {"a": 1}, "1", "true", [None], -1)

COSTLY = {
    "dataloader_num_workers",
    "dataset_num_proc",
    "max_steps",
    "num_train_epochs",
    "ddp_timeout",
    "torch_compile_backend",
}
"""Keys whose larger valid values take long: only check and plan get those."""
_SIBLINGS: Mapping[KeyPath, Mapping[str, Any]] = {
    ("corpus", "replay"): {"path": "more.jsonl", "fraction": 0.2},
    ("corpus", "mix", "extra"): {"path": "more.jsonl", "fraction": 0.2},
    ("model", "tokenizer"): {"vocab_size": 300},
    ("probes",): {"questions": {"born": "questions.jsonl"}},
    ("probes", "questions", "born"): {"path": "questions.jsonl"},
    ("techniques", "hard_example_mining"): {"fraction": 0.5},
    ("techniques", "row_weights"): {"column": "weight"},
    ("eval", "questions", "born"): {"path": "questions.jsonl"},
    ("eval", "retrieval"): {"documents": ["documents.jsonl"]},
    ("augment", "judge"): {"kind": "sandbox"},
    ("study", "models", "base"): {"path": "tiny"},
    ("study", "arms", "tuned"): {},
    ("study", "sweeps", "rates"): {"key": "trainer.learning_rate", "values": [1e-4, 1e-3], "arm": "tuned"},
    ("study", "tune", "rate"): {
        "key": "trainer.learning_rate", "values": [1e-4, 1e-3], "arm": "tuned", "question_sets": "born", "seeds": [0],
    },
    ("study", "claims", "learns"): {
        "statement": "It learns.", "test": "difference", "question_set": "born", "arm": "tuned", "baseline": "base",
    },
}  # fmt: skip
"""Section that a base recipe lacks -> what it needs beside the drawn key."""


@dataclass(frozen=True)
class Key:
    """A key of a recipe: the verb and base recipe that read it, its annotation and its field's metadata."""

    verb: str
    base: str
    path: KeyPath
    hint: Any
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The dotted key."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Draw:
    """A key with YAML for it."""

    key: Key
    text: str


@dataclass(frozen=True)
class Outcome:
    """What came of a draw: a class for the table, and what is wrong ("" for nothing)."""

    what: str
    fault: str = ""


def bases() -> dict[str, dict[str, Any]]:
    """Return the recipes into which values are put, by name; paths are relative to the folder of `write_inputs`."""
    trainer = {
        "max_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 64,
        "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False, "save_strategy": "no", "bf16": False,
    }  # fmt: skip
    load = {
        "run_dir": "run", "model": {"path": "tiny"}, "corpus": {"path": "corpus.jsonl", "cache_dir": "tokens"},
        "guards": {"unread_corpus": "ignore"}, "trainer": trainer,
    }  # fmt: skip
    evaluated = {
        **load, "corpus": {**load["corpus"], "validation_corpus": "more.jsonl"},
        "probes": {"questions": {"born": "questions.jsonl"}},
        "trainer": {**trainer, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1},
    }  # fmt: skip
    evaluation = {"models": {"base": "tiny"}, "questions": {"born": "questions.jsonl"}}
    study = {
        "title": "T", "train": "train.yaml", "eval": "eval.yaml", "models": {"base": "tiny"},
        "arms": {"tuned": {"corpus": "corpus.jsonl"}}, "seeds": [0], "cache_dir": "stages",
    }  # fmt: skip
    return {
        "load": load, "adapter": {**load, "adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"]}},
        "new": {**load, "model": {"new": {**TINY}, "tokenizer": "tiny"}}, "evaluated": evaluated,
        "replay": {**load, "corpus": {**load["corpus"], "replay": {"path": "more.jsonl", "fraction": 0.2}}},
        "augment": {"run_dir": "run", "augment": {
            "documents": "documents.jsonl", "styles": {"permuted": 1}, "generator": {"kind": "sandbox"}, "passage_tokens": 16}},
        "questions": {"run_dir": "run", "questions": {"documents": "documents.jsonl", "generator": {"kind": "sandbox"}}},
        "eval": {"run_dir": "run", "eval": evaluation},
        "study": {"run_dir": "run", "study": study},
    }  # fmt: skip


def write_inputs(folder: Path, tokenizer: Any) -> None:
    """Write what the bases name into `folder`: a tiny model, corpora, questions, documents, shared recipes."""
    from kinject.models import new_model

    new_model(TINY, tokenizer, seed=0).save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    rows = {
        "corpus.jsonl": ROWS, "more.jsonl": [{"text": row["text"].replace("Person", "Other")} for row in ROWS],
        "questions.jsonl": QUESTIONS, "documents.jsonl": [json.loads(line) for line in _SANDBOX.read_text().splitlines()[:4]],
    }  # fmt: skip
    for name, values in rows.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in values))
    recipes = bases()
    (folder / "train.yaml").write_text(yaml.safe_dump({**recipes["load"], "run_dir": "shared-train"}))
    (folder / "eval.yaml").write_text(yaml.safe_dump({**recipes["eval"], "run_dir": "shared-eval"}))


def all_keys() -> list[Key]:
    """Return every key that a recipe of any verb may have, the libraries' ones included."""
    from peft import LoraConfig
    from transformers import CONFIG_MAPPING
    from trl import SFTConfig

    from kinject.recipe import read

    keys = []
    hints = typing.get_type_hints(read.Sections)
    for field in dataclasses.fields(read.Sections):
        if field.name in ("adapter", "trainer"):
            continue
        verb = field.name if field.name in ("augment", "questions", "eval", "study") else "train"
        base = {"train": "load"}.get(verb, verb)
        base = {"probes": "evaluated", "regularization": "replay"}.get(field.name, base)
        keys += _keys_below(verb, base, (field.name,), hints[field.name], field.metadata)
    trainer = typing.get_type_hints(SFTConfig)
    for field in dataclasses.fields(SFTConfig):
        for base in ("load", "adapter", "evaluated"):
            keys.append(Key("train", base, ("trainer", field.name), trainer[field.name], {}))
    adapter = typing.get_type_hints(LoraConfig)
    for name in [*(field.name for field in dataclasses.fields(LoraConfig)), "merge"]:
        keys.append(Key("train", "adapter", ("adapter", name), adapter.get(name, bool), {}))
    for name, value in CONFIG_MAPPING["llama"]().to_dict().items():
        hint = Any if value is None else type(value)
        keys.append(Key("train", "new", ("model", "new", name), hint, {}))
    return keys


def _keys_below(verb: str, base: str, path: KeyPath, hint: Any, metadata: Mapping[str, Any]) -> Iterator[Key]:
    """Yield the key at `path` and, if its annotation holds sections, theirs."""
    yield Key(verb, base, path, hint, metadata)
    for option in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        inner, below = option, path
        if get_origin(option) in (dict, Mapping, typing.get_origin(typing.Mapping[str, int])):
            inner = get_args(option)[1]
            name = {"mix": "extra", "questions": "born", "models": "base", "arms": "tuned", "sweeps": "rates", "tune": "rate",
                    "claims": "learns"}.get(path[-1])  # fmt: skip
            if name is None:
                continue
            below = (*path, name)
        for section in get_args(inner) if get_origin(inner) in (Union, types.UnionType) else (inner,):
            if dataclasses.is_dataclass(section) and isinstance(section, type):
                hints = typing.get_type_hints(section)
                for field in dataclasses.fields(section):
                    yield from _keys_below(verb, base, (*below, field.name), hints[field.name], field.metadata)


def draw(keys: list[Key], random: Random) -> Draw:
    """Return a key with a value from inside, the edge of, or outside its range, of another type, or typed by hand."""
    key = random.choice(keys)
    luck = random.random()
    if luck < 0.05:
        return Draw(key, random.choice(RAW))
    value = random.choice(OF_ANOTHER_TYPE) if luck < 0.15 else _value(key.hint, key, random)
    return Draw(key, yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n...\n").strip())


def _value(hint: Any, key: Key, random: Random) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _value(random.choice(arguments), key, random)
    if origin is Literal:
        return random.choice([*arguments, *arguments, *WORDS[:4], "nope"])
    if hint is type(None):
        return None
    if hint is bool:
        return random.random() < 0.5
    if hint in (int, float):
        pool: list[Any] = list(INTEGERS if hint is int else NUMBERS)
        step = 1 if hint is int else 1e-6
        for bound in (key.metadata.get("min"), key.metadata.get("max")):
            pool += [] if bound is None else [bound, bound - step, bound + step] * 3
        return random.choice(pool)
    if origin is tuple or hint in (list, tuple) or origin is list:
        inner = [_value(arguments[0], key, random) for _ in range(random.randrange(3))] if arguments else []
        return random.choice([*LISTS, inner, inner, inner, inner, inner, inner, inner, inner])
    if isinstance(hint, type) and issubclass(hint, __import__("enum").Enum):
        return random.choice([*(member.value for member in hint), *WORDS[:3]])
    if hint in (str, Path):
        return random.choice(WORDS)
    if hint is dict or origin in (dict,) or dataclasses.is_dataclass(hint) or origin is not None:
        return random.choice(MAPPINGS)
    return random.choice((*INTEGERS, *NUMBERS, *WORDS, *LISTS, *MAPPINGS))


def recipe_text(drawn: Draw) -> str:
    """Return the base recipe of a draw as YAML, with the drawn value in its place."""
    recipe: Any = copy.deepcopy(bases()[drawn.key.base])
    node = recipe
    for depth, part in enumerate(drawn.key.path[:-1], start=1):
        inner = node.get(part)
        if not isinstance(inner, dict):
            inner = copy.deepcopy(dict(_SIBLINGS.get(drawn.key.path[:depth], {})))
        node[part] = inner
        node = inner
    node[drawn.key.path[-1]] = "DRAWN"
    return yaml.safe_dump(recipe, sort_keys=False, width=10**9).replace("DRAWN", drawn.text, 1)


def judge(drawn: Draw, folder: Path) -> Outcome:
    """Put a draw to check, plan and its verb in `folder`, which `write_inputs` filled and which is the working directory."""
    path = folder / "recipe.yaml"
    path.write_text(recipe_text(drawn), "utf-8")
    shutil.rmtree(folder / "run", ignore_errors=True)
    code, text = _run("recipes", "check", str(path))
    if code not in (0, 2):
        return Outcome("check: traceback", text)
    refused = code == 2
    verbs = ["train", "plan"] if drawn.key.verb == "train" else [drawn.key.verb]
    if not refused and _is_costly(drawn):
        verbs.remove("train")
    elif not refused and zlib.crc32(drawn.text.encode()) % 4 and len(verbs) > 1:
        verbs.remove("plan")  # it shares the check, and takes as long as training
    result = Outcome("refused" if refused else "done")
    for verb in verbs:
        options = {"plan": ["--no-calibration"], "study": ["--dry-run"]}.get(verb, [])
        verb_code, verb_text = _run(verb, str(path), *options)
        outcome = _compare(drawn, verb, (code, text), (verb_code, verb_text), path)
        if outcome.fault:
            return outcome
        if verb != "plan":
            result = outcome
        if verb == "train" and verb_code == 0 and (fault := model_fault(folder, drawn)):
            return Outcome("train: wrong result", fault)
    return result


def _is_costly(drawn: Draw) -> bool:
    return drawn.key.verb == "train" and drawn.key.path[-1] in COSTLY and drawn.text not in ("0", "1", "2", "null")


def _compare(drawn: Draw, verb: str, checked: tuple[int, str], ran: tuple[int, str], path: Path) -> Outcome:
    """Return what is wrong with a verb's exit code and message, given those of check."""
    code, text = ran
    if code not in ((0, 1, 2) if verb in ("plan", "augment", "questions") else (0, 2)):
        return Outcome(f"{verb}: traceback", text)
    if code == 2:
        # A study's recipes have keys of their own; the values of a sweep are those of the key that it varies.
        names = (*drawn.key.path[-3:], "trainer.learning_rate") if verb == "study" else drawn.key.path[-1:]
        of_input = re.search(
            rf"^(?:kinject {verb}: )?[\w.]+\.jsonl:\d+: ", text, re.MULTILINE
        )  # a file that the key reads
        section = re.escape(
            drawn.key.path[0]
        )  # the value may not go with another key of its section, which is then named
        of_sandbox = "the sandbox generator cannot read" in text  # it reads whole entries, no pieces of them
        of_parent = re.search(rf"\.yaml:\d+: {section}\b", text) or re.search(
            r"no (?:model|tokenizer) of this name", text
        )
        if (
            not any(name in text for name in names)
            and not _is_yaml_fault(text)
            and not (of_input or of_parent or of_sandbox)
        ):
            return Outcome(f"{verb}: no key", text)
        if len(text) > 6000:
            return Outcome(f"{verb}: long message", text[:6000])
    if checked[0] == 2 and code != 2:
        return Outcome(f"{verb}: takes what check refuses", f"{checked[1]}\n--- {verb}: {code}\n{text[-500:]}")
    if checked[0] == 2:
        lines = [line for line in checked[1].splitlines() if line.startswith(str(path)) and line not in text]
        # Only the verb looks for inputs: a value that names none is refused for that first.
        other = bool(lines) and "nothing is there" not in text
        return Outcome(f"{verb}: other words", f"{lines[0]}\n--- {verb}\n{text}") if other else Outcome("refused")
    if code == 2 and any(line.removeprefix(f"kinject {verb}: ").startswith(f"{path}:") for line in text.splitlines()):
        if "nothing is there" in text or "expected a file" in text:
            return Outcome("input missing")
        if any(
            words in text
            for words in ("rows reach", "simulates none", "but row ", "which the chat template does not read")
        ):  # only the corpus or the tokenizer shows that, or only plan is at fault
            return Outcome("refused late")
        return Outcome(f"{verb}: refuses what check takes", text)
    return Outcome("done" if code != 2 else "refused late")


def _is_yaml_fault(text: str) -> bool:
    return "bad YAML" in text or "is not read" in text


def _run(*words: str) -> tuple[int, str]:
    """Return the exit code and the messages of a command that runs in this process; -1 for an exception."""
    from kinject.cli import main

    output = io.StringIO()
    environment = dict(os.environ)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(output),
            bounded_memory(),
            bounded_time(),
        ):
            warnings.simplefilter("ignore")
            return main(words), output.getvalue()
    except HangError:
        return -2, "hang: " + "".join(traceback.format_exc(limit=-8))
    except (Exception, SystemExit):  # noqa: BLE001 (whatever it is, it is what this looks for)
        return -1, "".join(traceback.format_exc(limit=-8))[-2500:]
    finally:
        os.environ.clear()
        os.environ.update(environment)
        _reset_libraries()


def _reset_libraries() -> None:
    import torch
    import transformers
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    transformers.logging.set_verbosity_warning()
    torch.use_deterministic_algorithms(False)


def model_fault(folder: Path, drawn: Draw) -> str:
    """Return what is wrong with the model of a run that ended as done: not there, not finite, or the base itself."""
    from safetensors.torch import load_file

    model = folder / "run" / "model"
    if drawn.key.path == ("run_dir",):
        return ""
    file = next(
        (model / name for name in ("adapter_model.safetensors", "model.safetensors") if (model / name).is_file()), None
    )
    if file is None:
        return "no weights"
    weights = {name: value.float().numpy() for name, value in load_file(file).items()}
    if any(not np.isfinite(value).all() for value in weights.values()):
        return "weights that are not finite"
    if file.name.startswith("adapter"):
        moved = any(np.any(value) for name, value in weights.items() if "lora_B" in name or "lora_" not in name)
        return "" if moved else "an adapter that did not move"
    if drawn.key.base == "new" or drawn.key.path[:2] == ("model", "new"):
        return ""
    base = load_file(folder / "tiny" / "model.safetensors")
    if any(
        name not in weights or not np.array_equal(weights[name], value.float().numpy()) for name, value in base.items()
    ):
        return ""
    return "the base's own weights"


def judge_all(draws: Iterable[Draw], folder: Path) -> tuple[Counter[str], list[str]]:
    """Return the count of each outcome, and a text for each fault."""
    counts: Counter[str] = Counter()
    faults = []
    for drawn in draws:
        outcome = judge(drawn, folder)
        counts[outcome.what] += 1
        if outcome.fault:
            faults.append(f"{outcome.what}: {drawn.key.name} ({drawn.key.base}) = {drawn.text:.200}\n{outcome.fault}")
            print(f"after {counts.total()}: {faults[-1]}", flush=True)
    return counts, faults
