"""Broken model folders, given to each verb that reads one: refused in one line with the folder. More faults: models/."""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

from kinject.api import export, merge
from kinject.errors import KinjectError
from kinject.eval.chat import ChatSetup, open_chat
from kinject.eval.run import evaluate
from kinject.plan.run import plan
from kinject.recipe import Recipe, read_recipe
from kinject.train.run import run as train

SECONDS = 60


class HangError(BaseException):
    """Too slow. Not an `Exception`: nothing that catches those may swallow it."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Raise `HangError` in the block after `SECONDS`."""

    def stop(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def log_probs(model: Path, work: Path) -> Any:
    """Return what the model in a folder answers."""
    section = {
        "models": {"base": str(model)},
        "questions": {"q": str(work / "q.jsonl")},
        "formats": ["texts"],
    }
    (work / "eval.yaml").write_text(
        yaml.safe_dump({"run_dir": str(work / "eval"), "eval": section})
    )
    evaluate(read_recipe(work / "eval.yaml", verb="eval"))
    return [
        json.loads(line)["log_probs"]
        for line in (work / "eval" / "answers.jsonl").read_text().splitlines()
    ]


def training_recipe(model: Path, work: Path) -> Recipe:
    """Return the recipe of two steps from the model in a folder."""
    trainer = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-3, "max_length": 32, "save_strategy": "no",
               "logging_steps": 1, "lr_scheduler_type": "constant"}  # fmt: skip
    recipe = {"run_dir": str(work / "train"), "model": {"path": str(model), "device": "cpu"}, "trainer": trainer,
              "corpus": {"path": str(work / "c.jsonl"), "cache_dir": str(work / "tokens")}}  # fmt: skip
    (work / "train.yaml").write_text(yaml.safe_dump(recipe))
    return read_recipe(work / "train.yaml", verb="train")


def trained_weights(model: Path, work: Path) -> Any:
    """Return the bytes of the weights after two steps."""
    train(training_recipe(model, work), resume=False, overwrite=False)
    return (work / "train" / "model" / "model.safetensors").read_bytes()


def planned(model: Path, work: Path) -> Any:
    """Return the estimate of the peak memory."""
    return plan(training_recipe(model, work), calibration=False).memory.peak


def _weights(folder: Path) -> Any:
    """Return the bytes of each tensor in a folder, of one file or several."""
    tensors = {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }
    return {name: value.tobytes() for name, value in tensors.items()}


def merged(model: Path, work: Path) -> Any:
    """Return the weights averaged with those of the whole model."""
    return _weights(merge(work / "tiny-model", model, [0.5], work / "merge")[0.5])


def exported(model: Path, work: Path) -> Any:
    """Return the exported weights."""
    return _weights(export(model, out=work / "export").folder)


def answer(model: Path, work: Path) -> Any:
    """Return what the model says in a chat."""
    parts: list[str] = []
    open_chat(ChatSetup({"model": str(model)}, max_new_tokens=4)).answer(
        "Where is Kelm?", parts.append
    )
    return "".join(parts)


VERBS = {
    "eval": log_probs, "train": trained_weights, "plan": planned, "merge": merged, "export": exported, "chat": answer,
}  # fmt: skip


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _other_layers(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 1}))


def _other_tokenizer(folder: Path) -> None:
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["model"]["vocab"]["Arden"] = 5000
    path.write_text(json.dumps(tokenizer))


FAULTS: dict[str, Callable[[Path], None]] = {
    "weights cut": _cut,
    "a layer that config.json leaves out": _other_layers,
    "a token beyond the embedding": _other_tokenizer,
    "no template": lambda folder: (
        folder.joinpath("chat_template.jinja").write_text("{% for x in") and None
    ),
}


def refusal_of(verb: str, model: Path, work: Path, expected: Any) -> str:
    """Return what is wrong with the outcome of a verb, "" for a clear refusal."""
    shutil.rmtree(work / verb, ignore_errors=True)
    try:
        with watched():
            outcome = VERBS[verb](model, work)
    except KinjectError as error:
        message = str(error)
        return (
            ""
            if "\n" not in message and str(model) in message
            else f"no clear line: {message[:500]}"
        )
    except BaseException:  # noqa: BLE001 - whatever it is, it is what this looks for
        return traceback.format_exc(limit=-5)[-1500:]
    return "equal results" if outcome == expected else "other results, and it says that it is done"


@pytest.mark.filterwarnings("ignore")  # what libraries print about broken files is not the claim
def test_a_broken_model_folder_is_refused_in_every_verb(tmp_path: Path, tiny_model: Path) -> None:
    logging.disable(logging.CRITICAL)
    rows = [
        {"question": "Where?", "choices": ["Farrow", "Kelm"], "answer": 0},
        {"question": "Who?", "choices": ["A", "B"], "answer": 1},
    ]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "c.jsonl").write_text(
        '{"text": "Arden was born in Lowmere."}\n{"text": "The school of Kelm."}\n' * 2
    )
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    expected = {verb: make(model, tmp_path) for verb, make in VERBS.items()}
    wrong = []
    try:
        for name, damage in FAULTS.items():
            shutil.rmtree(model)
            shutil.copytree(tiny_model, model)
            damage(model)
            wrong += [
                f"{verb}: {name}: {fault}"
                for verb, result in expected.items()
                if (fault := refusal_of(verb, model, tmp_path, result))
            ]
    finally:
        logging.disable(logging.NOTSET)
    assert not wrong, "\n\n".join(wrong)
