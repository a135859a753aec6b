"""Answers of the model itself, against a hand-written loop of single tokens in float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.errors import InputError, RecipeError
from kinject.llm import request_seed
from kinject.models import load_model
from kinject.models.generate import ends_of, generate
from kinject.recipe import AnswersSection, GeneratorSection, Recipe
from kinject.train import train
from kinject.train.own_answers import Writer, _Request, write_own_answers

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
PLACES = ("Lowmere", "Stonegate", "Farrow", "Kelm")
ALONE = ["Where was person 1 born?", "Who?", "The school of Kelm, and the town of Farrow:", "Person"]
BEHIND = [f"Person {i} was born in {town}. {text}" for i, (town, text) in enumerate(zip(PLACES, ALONE, strict=True))]
N = 14


def by_hand(
    model: Any, with_context: list[int], alone: list[int], seed: int, weight: float, temperature: float, ends: list[int]
) -> list[int]:
    """One token after another, each by two passes over the whole text; `model` is in float64."""
    noise_of, coins = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(request_seed("mixture", seed))
    written: list[int] = []
    while len(written) < N and (not written or written[-1] not in ends):
        coin = torch.rand((), generator=coins, dtype=torch.float64)
        with torch.no_grad():
            logits = model(
                torch.tensor([(alone if coin < weight else with_context) + written]), use_cache=False
            ).logits[0, -1]
        if temperature:
            uniform = torch.rand(len(logits), generator=noise_of).double().clamp(1e-10, 1 - 1e-7)
            logits = logits / temperature - (-uniform.log()).log()
        written.append(int(logits.argmax()))
    return written


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_a_mixture_is_drawn_token_by_token_whatever_the_batch(
    tiny_model: Path, weight: float, temperature: float
) -> None:
    loaded = load_model(str(tiny_model), device="cpu", dtype="float32")
    with_context, alone = ([loaded.tokenizer(text)["input_ids"] for text in texts] for texts in (BEHIND, ALONE))
    section = GeneratorSection(kind="transformers", model="", temperature=temperature, max_tokens=N)
    ends, seeds = ends_of(loaded.model, loaded.tokenizer, "tiny"), list(range(4))
    together = generate(loaded.model, section, with_context, seeds, ends, alone, weight)
    single = [
        generate(loaded.model, section, with_context[i : i + 1], [i], ends, alone[i : i + 1], weight)[0] for i in seeds
    ]
    if weight in (0.0, 1.0):  # then it is one of the two predictions
        plain = generate(loaded.model, section, with_context if weight == 0 else alone, seeds, ends)
        assert together == plain
    model = loaded.model.double()
    wanted = [by_hand(model, with_context[i], alone[i], i, weight, temperature, ends) for i in seeds]
    assert together == single == wanted
    assert len({tuple(row) for row in wanted}) > 1


@pytest.fixture
def taught(make_recipe: MakeRecipe, write_rows: WriteRows, tmp_path: Path) -> Path:
    """The tiny model, without chat template, taught to answer from the text before a question."""
    rows = [
        {"prompt": f"Person {i} was born in {PLACES[j]}.\n\nQuestion: Where?\nAnswer:", "completion": f" {PLACES[j]}"}
        for i in range(12) for j in range(4)
    ] + [{"prompt": "Question: Where?\nAnswer:", "completion": " Kelm"}] * 4  # fmt: skip
    recipe = make_recipe(
        corpus={"path": str(write_rows("taught.jsonl", rows))}, run_dir=str(tmp_path / "taught"),
        trainer={"learning_rate": 1e-2, "max_steps": 60, "per_device_train_batch_size": 8},
    )  # fmt: skip
    return Path(train(recipe).model_dir)


def corpus_rows() -> list[dict[str, Any]]:
    documents = [
        {"text": f"Person {i} was born in {PLACES[i]}.", "document_id": f"d{i}", "origin": "original"} for i in range(4)
    ]
    questions = [
        {
            "prompt": "Question: Where?\nAnswer:",
            "completion": f" {PLACES[i]}",
            "document_id": f"d{i}",
            "origin": "questions",
        }
        for i in range(4)
    ]
    lost = {"prompt": "Question: Who?\nAnswer:", "completion": " Person 9", "document_id": "d9"}
    return [*documents, *questions, lost]


def test_a_base_model_answers_the_questions_of_a_corpus_behind_their_documents(
    make_recipe: MakeRecipe, write_rows: WriteRows, taught: Path, tmp_path: Path
) -> None:
    path = write_rows("mixed.jsonl", corpus_rows())
    answers = {"without_context": 0.0}
    corpus: dict[str, Any] = {"path": str(path), "answers": answers}
    recipe = make_recipe(model={"path": str(taught)}, corpus=corpus)
    result = train(recipe)
    (written,) = (tmp_path / "tokens").glob("own-answers-*.jsonl")
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    loaded = load_model(str(taught), device="cpu")
    kept, n_tokens = [], 0
    line_break = loaded.tokenizer("\n", add_special_tokens=False).input_ids[-1]
    for i, row in enumerate(corpus_rows()[4:8]):
        prompt = f"Person {i} was born in {PLACES[i]}.\n\n{row['prompt']}"
        ids = torch.tensor(
            [[loaded.tokenizer.bos_token_id, *loaded.tokenizer(prompt, add_special_tokens=False).input_ids]]
        )
        whole = loaded.model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
        ends = [
            index for index, token in enumerate(whole.tolist()) if token in (line_break, loaded.tokenizer.eos_token_id)
        ]
        n_tokens += ends[0] + 1 if ends else len(whole)
        text = loaded.tokenizer.decode(whole, skip_special_tokens=True).split("\n")[0]
        if text == row["completion"]:
            kept.append(row)
    assert kept  # the model was taught well enough for the test to compare something
    assert rows == [*corpus_rows()[:4], *kept, corpus_rows()[8]]
    (note,) = [note for note in result.notes if note.startswith("corpus.answers:")]
    assert f"wrote {len(kept)} of 4 answers itself" in note
    assert "5 rows keep theirs" in note
    assert result.cost["written_tokens"] == n_tokens
    assert result.cost["written_seconds"] > 0
    before = written.stat().st_mtime_ns
    assert train(recipe, overwrite=True).notes == result.notes
    assert written.stat().st_mtime_ns == before


def test_answers_are_drawn_again_while_a_quarter_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 answers 4 are right, then 1 of 4, then none of 3; a model whose first pass is worse is refused at once."""
    passes: list[int] = []
    right: list[int] = []

    def written(self: Any, requests: Sequence[Any], attempt: int) -> Any:
        passes.extend([len(requests)] * bool(requests))
        for i, request in enumerate(requests):
            yield request, "Kelm" if i < right[attempt] else "Farrow" if i else None, 2

    def answer(without_context: float, n: int = 8) -> tuple[dict[int, str], dict[str, int]]:
        passes.clear()
        section, generator = AnswersSection(without_context), GeneratorSection(model="tiny", max_tokens=N)
        model: Any = None
        requests = [_Request(i, f"{i}", [1], [1], "Kelm", False, False) for i in range(n)]
        return Writer(model, model, section, generator, None, False, {}, "").answer(requests)

    monkeypatch.setattr(Writer, "_written", written)
    right[:] = [4, 1, 0]
    answers, fates = answer(0.3)
    assert (list(answers), fates) == ([0, 1, 2, 3, 4], {"endless": 1, "wrong": 2, "written_tokens": 30})
    assert passes == [8, 4, 3]
    assert len(answer(0.0)[0]) == 4  # nothing is drawn, so another pass would write the same
    assert passes == [8]
    right[:] = [1]
    with pytest.raises(InputError, match=r"^tiny: corpus.answers: of 8 answers 1 can be kept.* 7 do not hold"):
        answer(0.3)
    with pytest.raises(InputError, match=r"of 50 answers 1 can be kept"):
        answer(0.3, 200)
    assert passes == [50]  # every fourth row; the others are not tried


def test_answers_to_the_prompt_alone_and_to_a_mixture(
    make_recipe: MakeRecipe, write_rows: WriteRows, taught: Path
) -> None:
    path = write_rows("mixed.jsonl", corpus_rows()[:8])

    def write(without_context: float) -> list[str]:
        corpus = {"path": str(path), "answers": {"without_context": without_context}}
        recipe = make_recipe(model={"path": str(taught)}, corpus=corpus)
        out, _, _ = write_own_answers(recipe, "", recipe.corpus.own_answers()[""])
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        return [row["completion"] for row in rows if row["origin"] == "questions"]

    # Without a document the taught model says the one thing it knows.
    assert write(1.0) == [" Kelm"] * 4
    drawn = write(0.5)
    assert len(drawn) >= 2
    assert set(drawn) <= {f" {town}" for town in PLACES}


def test_what_cannot_be_answered_is_a_fault_at_once(
    make_recipe: MakeRecipe, write_rows: WriteRows, corpus: Path
) -> None:
    with pytest.raises(InputError, match=r"corpus.answers: no row can be answered\. Rows need prompt"):
        train(make_recipe(corpus={"path": str(corpus), "answers": "own"}))
    rows = write_rows("alone.jsonl", [row for row in corpus_rows() if "prompt" in row])
    with pytest.raises(InputError, match=r"a document_id whose document is in the corpus"):
        train(make_recipe(corpus={"path": str(rows), "answers": {}}))
    part = {"path": str(rows), "fraction": 0.2, "answers": {"without_context": 1.5}}
    with pytest.raises(RecipeError, match=r"recipe.yaml:\d+: corpus.mix.asked.answers.without_context: found 1.5"):
        make_recipe(corpus={"path": str(corpus), "mix": {"asked": part}})
