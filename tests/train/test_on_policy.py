"""On-policy distillation against a hand-written update in float64: the student's samples, and the divergence on them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kinject.corpus.tokenize import IGNORED
from kinject.errors import RecipeError
from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.requests.generator import request_seed
from kinject.train import train
from kinject.train.setup import make_trainer

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")
MOST = 7


def corpus_rows(n: int = 4) -> list[dict[str, Any]]:
    documents = [
        {"text": f"Person {i} was born in {TOWNS[i % 4]}.", "document_id": f"d{i}", "origin": "original"}
        for i in range(n)
    ]
    questions = [
        {
            "prompt": f"Question: Where was person {i} born?\nAnswer:",
            "completion": f" {TOWNS[i % 4]}",
            "document_id": f"d{i}",
        }
        for i in range(n)
    ]
    return [*documents, *questions]


@pytest.fixture
def recipe_of(make_recipe: MakeRecipe, write_rows: WriteRows) -> MakeRecipe:
    """Return a recipe of on-policy distillation; keyword arguments as those of `make_recipe`."""

    def _make(**sections: Any) -> Recipe:
        distillation = {"answers": "student", "max_tokens": MOST, **sections.pop("distillation", {})}
        path = write_rows("corpus-of-answers.jsonl", corpus_rows())
        return make_recipe(method="distill", corpus={"path": str(path)}, distillation=distillation, **sections)

    return _make


def sample(model: Any, prompt: list[int], seed: int, end: int) -> list[int]:
    """Sample one token after another from the whole text; `model` is in float64."""
    noise, written = torch.Generator().manual_seed(seed), list[int]()
    while len(written) < MOST and (not written or written[-1] != end):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + written]), use_cache=False).logits[0, -1]
        uniform = torch.rand(len(logits), generator=noise).double().clamp(1e-10, 1 - 1e-7)
        written.append(int((logits - (-uniform.log()).log()).argmax()))
    return written


def hand_written_loss(
    student: Any, teacher: Any, recipe: Recipe, tokenizer: Any, texts: Sequence[list[int]], kind: str
) -> tuple[torch.Tensor, int, list[list[int]]]:
    """The sum of the losses of an update on all rows, the learned tokens, and the texts as they are learned."""
    total, n, learned = torch.zeros((), dtype=torch.float64), 0, []
    for i, row in enumerate(corpus_rows()):
        if "text" in row:  # without another text of its document: plain cross-entropy
            logits = student(torch.tensor([texts[i]]), use_cache=False).logits[0, :-1]
            total = total + torch.nn.functional.cross_entropy(logits, torch.tensor(texts[i][1:]), reduction="sum")
            n, learned = n + len(texts[i]) - 1, [*learned, texts[i]]
            continue
        prompt = [tokenizer.bos_token_id, *tokenizer(row["prompt"], add_special_tokens=False).input_ids]
        document = next(one["text"] for one in corpus_rows() if one["document_id"] == row["document_id"])
        head = [tokenizer.bos_token_id, *tokenizer(f"{document}\n\n", add_special_tokens=False).input_ids]
        answer = sample(student, prompt, request_seed("on policy", recipe.seed, 0, i), tokenizer.eos_token_id)
        with_head = [*head, *prompt[1:], *answer]
        predicted = (
            student(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        )
        with torch.no_grad():
            start = len(with_head) - len(answer)
            wanted = teacher(torch.tensor([with_head]), use_cache=False).logits[0, start - 1 : -1].log_softmax(-1)
        p, q = (wanted, predicted) if kind == "forward" else (predicted, wanted)
        total = total + (p.exp() * (p - q)).sum()
        n, learned = n + len(answer), [*learned, [*prompt, *answer]]
    return total, n, learned


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_an_update_is_that_of_the_hand_written_loop(
    recipe_of: MakeRecipe, tiny_model: Path, kind: str, packing: bool
) -> None:
    recipe = recipe_of(
        distillation={"divergence": kind, "top_k": None},
        trainer={"packing": packing, "per_device_train_batch_size": 8, "max_steps": 1, "train_sampling_strategy": "sequential"},
    )  # fmt: skip
    trainer = make_trainer(recipe)
    # Training moves the student; the teacher is what it was.
    loaded = load_model(str(tiny_model), device="cpu", dtype="float32")
    with torch.no_grad():
        for moved in (trainer.model, loaded.model):
            for parameter in moved.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
                parameter.add_(0.02 * noise)
    student, teacher = loaded.model.double(), load_model(str(tiny_model), device="cpu").model.double()
    tokenizer = loaded.tokenizer
    texts = [
        [
            tokenizer.bos_token_id,
            *tokenizer(row.get("text", ""), add_special_tokens=False).input_ids,
            tokenizer.eos_token_id,
        ]
        for row in corpus_rows()
    ]
    total, n, learned = hand_written_loss(student, teacher, recipe, tokenizer, texts, kind)
    (total / n).backward()
    trainer.model.train()
    trainer._tr_loss = torch.tensor(0.0)  # training begins with it
    n_batches = -(-len(trainer.train_dataset) // 8)
    batches, divisor = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), n_batches, torch.device("cpu"))
    batch_texts = []
    for batch in batches:
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
            starts = [*(positions == 0).nonzero()[:, 0].tolist(), int((labels != IGNORED).nonzero().max()) + 1]
            batch_texts += [ids[a:b].tolist() for a, b in itertools.pairwise(starts)]
    assert sorted(batch_texts) == sorted(learned)
    assert int(divisor) == n
    loss = sum(trainer.compute_loss(trainer.model, batch, num_items_in_batch=divisor) for batch in batches)
    loss.backward()
    assert loss.item() == pytest.approx((total / n).item(), rel=1e-5)
    for (name, actual), wanted in zip(trainer.model.named_parameters(), student.parameters(), strict=True):
        assert torch.allclose(actual.grad.double(), wanted.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize("sections", [{}, {"adapter": {"r": 4}}, {"distillation": {"teacher": "ema"}}])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    recipe_of: MakeRecipe, tmp_path: Path, sections: dict[str, Any]
) -> None:
    trainer = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 2}
    whole = train(recipe_of(trainer=trainer, run_dir=str(tmp_path / "whole"), **copy.deepcopy(sections)))
    part = recipe_of(trainer=trainer, run_dir=str(tmp_path / "part"), **copy.deepcopy(sections))
    train(part)
    for name in ("checkpoint-4", "model", "manifest.json"):
        path = tmp_path / "part" / name
        path.rename(tmp_path / f"gone-{name}")
    again = train(part, resume=True)
    assert again.final_loss == pytest.approx(whole.final_loss, rel=1e-6)
    weights = [next(Path(result.model_dir).glob("*.safetensors")).read_bytes() for result in (whole, again)]
    assert weights[0] == weights[1]


def test_what_has_no_prompt_is_a_fault(recipe_of: MakeRecipe) -> None:
    with pytest.raises(RecipeError, match=r"distillation\.answers: student: the beginning of a text is no prompt"):
        train(recipe_of(distillation={"context": "beginning"}))
