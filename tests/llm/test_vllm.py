"""kind: vllm against a stand-in for vLLM's offline engine: what it is given, and that its answers come back.

The stand-in has the signatures of vllm/entrypoints/llm.py and the fields of vllm/sampling_params.py, and writes with
transformers; vLLM itself needs a GPU and was not run.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers import GenerationConfig

from kinject.cli import main
from kinject.disk import write_jsonl
from kinject.errors import InputError
from kinject.eval import evaluate
from kinject.eval.scoring.answers import read_answers
from kinject.llm.transformers import LocalModel, VllmModel
from kinject.models import load_model
from kinject.recipe import GeneratorSection, read_recipe

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"


@dataclass
class SamplingParams:
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = 16


class LLM:
    def __init__(self, model: str, *, dtype: str = "auto", seed: int | None = None) -> None:
        self._loaded = load_model(model)
        self.llm_engine = SimpleNamespace(model_config=SimpleNamespace(max_model_len=256))

    def generate(
        self, prompts: Any, sampling_params: Any = None, *, use_tqdm: bool = True
    ) -> list[Any]:
        return list(
            map(self._one, (prompt["prompt_token_ids"] for prompt in prompts), sampling_params)
        )

    def _one(self, ids: list[int], each: SamplingParams) -> Any:
        assert each.temperature == 0
        text, tokens = "", list[int]()
        while len(tokens) < (each.max_tokens or 0) and not any(
            stop in text for stop in each.stop or ()
        ):
            with torch.no_grad():
                logits = self._loaded.model(torch.tensor([[*ids, *tokens]])).logits[0, -1]
            tokens.append(int(logits.argmax()))
            text = str(self._loaded.tokenizer.decode(tokens))
            if tokens[-1] == self._loaded.tokenizer.eos_token_id:
                break
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=tuple(tokens), finish_reason="length")]
        )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams)
    )


@pytest.mark.usefixtures("vllm")
def test_the_engine_writes_what_transformers_writes(tiny_model: Path) -> None:
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    asked = [
        [{"role": "user", "content": text}] for text in ("Where?", "Arden was born in Lowmere.")
    ]

    async def run(kind: type[LocalModel], name: Any) -> list[Any]:
        async with kind(
            GeneratorSection(kind=name, model=str(tiny_model), max_tokens=12, temperature=0.0)
        ) as model:
            return await asyncio.gather(*(model.complete(messages, 1) for messages in asked))  # type: ignore[arg-type]

    assert asyncio.run(run(VllmModel, "vllm")) == asyncio.run(run(LocalModel, "transformers"))


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("ends", [[9, 11], 11, None])
def test_an_answer_ends_at_the_tokens_of_generation_config(tiny_model: Path, ends: Any) -> None:
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    (tiny_model / "generation_config.json").unlink(missing_ok=True)
    if ends is not None:
        GenerationConfig(eos_token_id=ends).save_pretrained(tiny_model)
    model = VllmModel(GeneratorSection(kind="vllm", model=str(tiny_model)))
    model._load(str(tiny_model))
    eos = model._tokenizer.eos_token_id
    finishes = [model._completion(2, [40, end]).finish_reason for end in (11, eos, 40)]
    assert finishes == ["stop" if ends else "length", "stop", "length"]


@pytest.mark.usefixtures("vllm")
def test_an_answer_ends_before_a_text_of_stop(tiny_model: Path) -> None:
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    section = GeneratorSection(kind="vllm", model=str(tiny_model), stop=("Q:", ";"))
    model = VllmModel(section)
    model._load(str(tiny_model))
    for text, expected, finish in (
        ("In Kelm; or Q: so", "In Kelm", "stop"),
        ("at six\nQ:", "at six\n", "stop"),
        ("near the mill", "near the mill", "length"),
    ):
        tokens = model._tokenizer(text, add_special_tokens=False).input_ids
        completion = model._completion(4, tokens)
        assert (completion.text, completion.finish_reason) == (expected, finish)


@pytest.mark.usefixtures("vllm")
@pytest.mark.parametrize("chat", [False, True])
def test_an_evaluation_reads_its_answers_as_a_local_model_s(
    tmp_path: Path, tiny_model: Path, chat: bool
) -> None:
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    questions = [
        {"id": f"q{n}", "question": f"Where was Arden {n} born?", "answers": ["Lowmere"]}
        for n in range(3)
    ]
    write_jsonl(tmp_path / "q.jsonl", questions)
    endpoint = {"kind": "vllm", "model": str(tiny_model), "concurrency": 64}
    served = {"endpoint": endpoint, "api": "chat" if chat else "completions"}
    section = {"models": {"local": str(tiny_model), "vllm": served}, "questions": {"new": str(tmp_path / "q.jsonl")},
               "formats": ["generate"], "chat": chat, "max_new_tokens": 8}  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": section}))
    evaluate(read_recipe(path, (), "eval"))
    answers = [
        (answer.arm, answer.text) for answer in read_answers(tmp_path / "run" / "answers.jsonl")
    ]
    texts = [text for arm, text in answers if arm == "vllm"]
    assert texts == [text for arm, text in answers if arm == "local"]
    assert len(texts) == 3
    assert any(texts)


def test_without_vllm_and_for_log_probs_a_line_names_what_to_do(
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InputError, match=r"kind: vllm needs the package vllm.*pip install vllm"):
        VllmModel(GeneratorSection(kind="vllm", model=str(tiny_model)))._load(str(tiny_model))
    write_jsonl(
        tmp_path / "q.jsonl",
        [{"id": "q", "question": "Where?", "choices": ["a", "b"], "answer": 0}],
    )
    served = {
        "endpoint": {"kind": "vllm", "model": str(tiny_model)},
        "api": "completions",
        "tokenizer": str(tiny_model),
    }
    section = {"models": {"vllm": served}, "questions": {"new": str(tmp_path / "q.jsonl")}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": section}))
    assert main(["eval", str(path)]) == 2
    assert "kind: vllm writes answers only. Set eval.formats: [generate]" in capsys.readouterr().err
