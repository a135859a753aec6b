"""Answers of the model itself, against a hand-written loop of single tokens in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.errors import InputError
from kinject.models import LoadOptions, load_model
from kinject.models.generate import ends_of, generate
from kinject.recipe import GeneratorSection, Recipe
from kinject.train import train
from kinject.train.own_answers import AnswerRequest, Writer

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
PLACES = ("Lowmere", "Stonegate", "Farrow", "Kelm")
PROMPTS = [
    "Where was person 1 born?",
    "Who?",
    "The school of Kelm, and the town of Farrow:",
    "Person",
]
N = 14
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALKS = [
    {
        "messages": [
            {"role": "user", "content": f"Where was person {i} born?"}, {"role": "assistant", "content": "In Kelm."},
            {"role": "user", "content": "And then?"}, {"role": "assistant", "content": "In Farrow."},
        ],
    }
    for i in range(24)
]  # fmt: skip


def by_hand(
    model: Any, prompt: list[int], seed: int, temperature: float, ends: list[int]
) -> list[int]:
    """One token after another, each by a pass over the whole text; `model` is in float64."""
    noise_of, written = torch.Generator().manual_seed(seed), list[int]()
    while len(written) < N and (not written or written[-1] not in ends):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + written]), use_cache=False).logits[0, -1]
        if temperature:
            uniform = torch.rand(len(logits), generator=noise_of).double().clamp(1e-10, 1 - 1e-7)
            logits = logits / temperature - (-uniform.log()).log()
        written.append(int(logits.argmax()))
    return written


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_an_answer_is_the_same_whatever_the_batch(tiny_model: Path, temperature: float) -> None:
    loaded = load_model(str(tiny_model), LoadOptions(device="cpu", dtype="float32"))
    prompts = [loaded.tokenizer(text)["input_ids"] for text in PROMPTS]
    section = GeneratorSection(kind="transformers", model="", temperature=temperature, max_tokens=N)
    ends, seeds = ends_of(loaded.model, loaded.tokenizer, "tiny"), list(range(4))
    together = generate(loaded.model, section, prompts, seeds, ends)
    single = [generate(loaded.model, section, prompts[i : i + 1], [i], ends)[0] for i in seeds]
    model = loaded.model.double()
    wanted = [by_hand(model, prompts[i], i, temperature, ends) for i in seeds]
    assert together == single == wanted
    assert len({tuple(row) for row in wanted}) > 1


@pytest.mark.soak
def test_a_base_model_answers_the_questions_of_a_corpus(
    make_recipe: MakeRecipe, write_rows: WriteRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([2.0, 3.5])
    monkeypatch.setattr(
        import_module("kinject.train.own_answers"), "work_seconds", lambda device: next(clock)
    )
    answered = [
        {"prompt": "Question: Where?\nAnswer:", "completion": " Kelm"},
        {"prompt": "Who?", "completion": " Person 3"},
    ]
    others = [{"text": "Person 9 was born in Kelm."}]
    shown = {
        "prompt": "Question: Who?\nAnswer:",
        "completion": " Me\n",
    }  # as a bare question is asked
    taught = make_recipe(  # the untrained model ends no answer
        corpus={"path": str(write_rows("taught.jsonl", [answered[0], shown] * 4))},
        run_dir=str(tmp_path / "taught"),
        trainer={"learning_rate": 1e-2, "max_steps": 60, "per_device_train_batch_size": 8},
    )  # fmt: skip
    model = train(taught).model_dir
    path = write_rows("mixed.jsonl", [*others, *answered])
    recipe = make_recipe(model={"path": model}, corpus={"path": str(path), "answers": "own"})
    result = train(recipe)
    (written,) = (tmp_path / "tokens").glob("own-answers-*/answers.jsonl")
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    loaded, n_tokens = load_model(model, LoadOptions(device="cpu")), 0
    line_break = loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    for row, prompt in zip(
        rows[1:], ["Question: Where?\nAnswer:", "Question: Who?\nAnswer:"], strict=True
    ):
        ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
        whole = loaded.model.generate(ids, max_new_tokens=N, do_sample=False)[
            0, ids.shape[1] :
        ].tolist()
        ends = [
            i
            for i, token in enumerate(whole)
            if token in (line_break, loaded.tokenizer.eos_token_id)
        ]
        n_tokens += ends[0] + 1
        assert (
            row["completion"]
            == loaded.tokenizer.decode(whole, skip_special_tokens=True).split("\n")[0]
        )
    assert rows[0] == others[0]
    (note,) = [note for note in result.notes if note.startswith("corpus.answers:")]
    assert "wrote 2 of 2 answers itself" in note
    assert "rows that keep theirs: 1 (" in note
    assert result.cost["written_tokens"] == n_tokens
    assert result.cost["written_seconds"] == 1.5
    before = written.stat().st_mtime_ns
    assert train(recipe, overwrite=True).notes == result.notes
    assert written.stat().st_mtime_ns == before


def test_a_model_that_ends_few_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    ended: list[int] = []

    def written(self: Any, requests: Sequence[Any]) -> Any:
        passes.append(len(requests))
        for i, request in enumerate(requests):
            yield request, "Kelm" if i < ended[0] else None, 2

    def answer(n: int) -> tuple[dict[int, str], int]:
        passes.clear()
        model: Any = None
        requests = [AnswerRequest(i, f"{i}", [1], "Kelm", False, False) for i in range(n)]
        return Writer(
            model, model, GeneratorSection(model="tiny", max_tokens=N), None, False, {}, ""
        ).answer(requests)

    monkeypatch.setattr(Writer, "_written", written)
    ended[:] = [2]
    assert answer(8) == ({0: "Kelm", 1: "Kelm"}, 16)
    ended[:] = [1]
    with pytest.raises(
        InputError, match=r"^tiny: corpus.answers: of 8 answers 1 end within 14 tokens"
    ):
        answer(8)
    with pytest.raises(InputError, match=r"of 50 answers 1 end"):
        answer(200)
    assert passes == [50]  # every fourth row; the others are not tried


@pytest.fixture
def chat_model(tiny_model: Path) -> Path:
    """The tiny model with a chat template."""
    tokenizer = load_model(str(tiny_model)).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny_model)
    return tiny_model


def test_a_chat_model_answers_the_last_turns_of_what_is_replayed(
    make_recipe: MakeRecipe, chat_model: Path, write_rows: WriteRows, corpus: Path, tmp_path: Path
) -> None:
    # Two updates on the answers teach the tiny model to end one; then it answers for itself.
    taught = make_recipe(
        method="sft", corpus={"path": str(write_rows("talks.jsonl", TALKS))}, run_dir=str(tmp_path / "taught"),
        trainer={"assistant_only_loss": True, "learning_rate": 1e-2, "max_steps": 40},
    )  # fmt: skip
    model = Path(train(taught).model_dir)
    replay = {"path": str(tmp_path / "talks.jsonl"), "fraction": 0.3, "answers": "own"}
    recipe = make_recipe(
        method="cpt", model={"path": str(model)}, corpus={"path": str(corpus), "replay": replay}
    )
    train(recipe)
    (written,) = (tmp_path / "tokens").glob("own-answers-*/answers.jsonl")
    rows = [json.loads(line)["messages"] for line in written.read_text().splitlines()]
    assert 0 < len(rows) <= len(TALKS)
    loaded = load_model(str(model))
    for row in rows[:6]:
        options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
        ids = loaded.tokenizer.apply_chat_template(row[:-1], **options)
        with torch.no_grad():
            out = loaded.model.generate(**ids, max_new_tokens=64, do_sample=False)
        wanted = loaded.tokenizer.decode(
            out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
        )
        assert row[-1] == {"role": "assistant", "content": wanted}
    replay["path"] = str(corpus)
    recipe = make_recipe(
        model={"path": str(model)},
        corpus={"path": str(corpus), "replay": replay},
        run_dir=str(tmp_path / "texts"),
    )
    with pytest.raises(InputError, match="no row can be answered"):
        train(recipe)
