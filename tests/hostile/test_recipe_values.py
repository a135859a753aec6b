"""Values of a recipe that a library takes, or refuses with a traceback, are refused by check and verb with their key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from kinject.cli import main
from small import save_tiny_model

TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128, "tie_word_embeddings": True,
}  # fmt: skip
TRAINER = {
    "max_steps": 2,
    "learning_rate": 1e-3,
    "max_length": 64,
    "save_strategy": "no",
    "bf16": False,
}
TRAIN = {
    "model": {"path": "tiny"},
    "corpus": {"path": "corpus.jsonl", "cache_dir": "tokens"},
    "trainer": TRAINER,
}
ADAPTER = {**TRAIN, "adapter": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}
NEW = {**TRAIN, "model": {"new": TINY, "tokenizer": "tiny"}}
EVAL = {"eval": {"models": {"base": "tiny"}, "questions": {"born": "questions.jsonl"}}}
STUDY = {
    "study": {"title": "T", "train": "train.yaml", "eval": "eval.yaml", "models": {"base": {"path": "tiny"}},
              "arms": {"tuned": {"corpus": "corpus.jsonl"}}, "seeds": [0], "cache_dir": "stages"},
}  # fmt: skip
QUESTIONS = {"questions": {"documents": "corpus.jsonl", "generator": {"kind": "sandbox"}}}


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, trained_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with what the recipes name."""
    monkeypatch.chdir(tmp_path)
    save_tiny_model(tmp_path / "tiny", trained_tokenizer)
    Path("corpus.jsonl").write_text(
        "".join(json.dumps({"text": f"Person {i} was born in Kelm."}) + "\n" for i in range(8))
    )
    question = {
        "id": "q",
        "question": "Where was Person 1 born?",
        "choices": ["Kelm", "Farrow"],
        "answer": 0,
    }
    Path("questions.jsonl").write_text(json.dumps(question) + "\n")
    for name, recipe in (("train", TRAIN), ("eval", EVAL)):
        Path(f"{name}.yaml").write_text(yaml.safe_dump({"run_dir": f"shared-{name}", **recipe}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("verb", "recipe", "key", "text"),
    [
        ("study", STUDY, "study.arms.tuned.corpus", "a" * 300),
        ("train", TRAIN, "corpus.mix", "{extra: {path: /dev/null, fraction: 0.2}}"),
        ("train", TRAIN, "model.path", "a" * 300),
        ("train", TRAIN, "run_dir", "a" * 300),
        ("questions", QUESTIONS, "questions.closed_book", str(2**31)),
        ("train", TRAIN, "regularization.kl", "1.0e+39"),
        ("train", NEW, "model.new.num_hidden_layers", "-9223372036854775808"),
        ("train", NEW, "model.new.rope_parameters", "{rope_theta: 0, rope_type: default}"),
        ("eval", EVAL, "eval.retrieval", "{documents: [corpus.jsonl], kind: dense}"),
        ("study", STUDY, "study.models.base.recipe", "tiny"),
        ("train", ADAPTER, "adapter.trainable_token_indices", "[]"),
        ("train", ADAPTER, "adapter.trainable_token_indices", "[100000]"),
        ("train", NEW, "model.new.hidden_size", "1000000"),
        ("train", ADAPTER, "adapter.velora_config", "{nope: 1}"),
        ("train", ADAPTER, "adapter.use_bdlora", "true"),
    ],
)
def test_values_that_went_wrong_once_are_refused_by_name(
    verb: str, recipe: dict[str, Any], key: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("recipe.yaml").write_text(yaml.safe_dump({"run_dir": "run", **recipe}))
    options = ["--dry-run"] if verb == "study" else []
    assert main([verb, "recipe.yaml", f"{key}={text}", *options]) == 2
    message = capsys.readouterr().err
    assert key.rpartition(".")[2] in message
    assert len(message) < 6000
    assert not Path("run/model").exists()
