"""What holds a model to its base changes the update as a hand-written loop in float64 says it should."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

from kinject.corpus.packing import PackingConfig, TrainingRow
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.disk import read_jsonl
from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.data import CorpusPacker, Part
from kinject.train.loss import as_frozen
from small import quick

MakeRecipe = Callable[..., Recipe]
RATE, STEPS = 0.5, 3
PLAIN = {"optim": "sgd", "lr_scheduler_type": "constant", "learning_rate": RATE, "max_grad_norm": 0.0, "max_steps": STEPS,
         "train_sampling_strategy": "sequential", "per_device_train_batch_size": 8}  # fmt: skip


@pytest.fixture
def mixed(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A corpus section with replay."""
    replay = tmp_path / "replay.jsonl"
    replay.write_text(
        "".join(
            json.dumps({"text": f"The mill at Farrow {i}. Question: where?"}) + "\n"
            for i in range(9)
        )
    )
    return {"path": str(corpus), "replay": {"path": str(replay), "fraction": 0.4}}


def _rows(recipe: Recipe, tokenizer: Any) -> list[TrainingRow]:
    corpus = recipe.corpus
    assert corpus is not None
    assert corpus.replay is not None
    replay = Part(
        list(CorpusFile(Path(corpus.replay.path), origin="replay")), corpus.replay.fraction
    )
    packer = CorpusPacker(tokenizer, Tokenization(), PackingConfig(64, "bfd_split"), recipe.seed)
    return list(packer.pack(list(CorpusFile(Path(corpus.path))), {"replay": replay}).rows)


def _pieces(row: TrainingRow) -> list[tuple[list[int], list[bool]]]:
    """The documents of a packed row, each alone: (ids, which are replay)."""
    starts = [index for index, position in enumerate(row.position_ids) if position == 0]
    ends = [*starts[1:], len(row.input_ids)]
    return [(row.input_ids[a:b], row.replayed[a:b]) for a, b in zip(starts, ends, strict=True)]


def _logp(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]), use_cache=False).logits[0, :-1].log_softmax(-1)


def _by_hand(recipe: Recipe, folder: Path) -> dict[str, torch.Tensor]:
    """SGD on each document alone, in float64, with the anchors written out as terms of the loss."""
    loaded = load_model(str(folder))
    model = loaded.model.double()
    base = copy.deepcopy(model)
    rows, anchor = _rows(recipe, loaded.tokenizer), recipe.regularization
    assert anchor is not None
    names = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        loss, learned = torch.zeros((), dtype=torch.float64), 0
        per_epoch = -(-len(rows) // 8)
        for row in rows[step % per_epoch * 8 : step % per_epoch * 8 + 8]:
            for ids, again in _pieces(row):
                logp = _logp(model, ids)
                loss = loss + F.nll_loss(logp, torch.tensor(ids[1:]), reduction="sum")
                learned += len(ids) - 1
                if any(again) and anchor.kl:
                    target = _logp(base, ids).detach()
                    loss = loss + anchor.kl * (target.exp() * (target - logp)).sum()
        loss = loss / learned
        for name, weight in names.items():
            away = (weight - base.get_parameter(name).detach()) ** 2
            loss = loss + 0.5 * anchor.l2 * away.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in names.items()}


BOTH = {"l2": 0.1, "kl": 0.5}


@pytest.mark.parametrize("anchor", quick([{"l2": 0.3}, {"kl": 2.0}, BOTH], BOTH))
def test_an_anchored_run_ends_where_the_hand_written_loop_ends(
    make_recipe: MakeRecipe, tiny_model: Path, mixed: dict[str, Any], anchor: dict[str, Any]
) -> None:
    free = train(make_recipe(corpus=mixed, regularization={"l2": 0.0}, trainer=PLAIN)).model_dir
    unheld = dict(load_model(free).model.named_parameters())
    recipe = make_recipe(corpus=mixed, regularization=anchor, trainer=PLAIN)
    held = dict(load_model(train(recipe, overwrite=True).model_dir).model.named_parameters())
    wanted = _by_hand(recipe, tiny_model)
    base = dict(load_model(str(tiny_model)).model.named_parameters())
    effect = sum(((held[n] - unheld[n]) ** 2).sum().item() for n in held) ** 0.5
    error = sum(((held[n].double() - wanted[n]) ** 2).sum().item() for n in held) ** 0.5
    moved = sum(((held[n] - base[n]) ** 2).sum().item() for n in held) ** 0.5
    assert error < 1e-5 * moved
    assert effect > 100 * error  # the anchor is seen, not only the training


def test_a_divergence_without_replayed_texts_is_named(
    make_recipe: MakeRecipe, mixed: dict[str, Any]
) -> None:
    """A sweep of the fraction may begin at 0, so it is a note and no fault."""
    corpus = {**mixed, "replay": {**mixed["replay"], "fraction": 0}}
    trainer = {"learning_rate": 1e-3, "max_steps": 1}
    recipe = make_recipe(corpus=corpus, regularization={"kl": 0.25, "l2": 0.1}, trainer=trainer)
    words = "regularization.kl: no effect, since corpus.replay.fraction is 0"
    assert [words in note for note in train(recipe).notes].count(True) == 1


def test_an_adapter_is_held_by_the_divergence_from_its_own_base(
    make_recipe: MakeRecipe, mixed: dict[str, Any]
) -> None:
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}

    def _distance(kl: float) -> float:
        trainer = {"learning_rate": 3e-3, "max_steps": 24}
        result = train(
            make_recipe(corpus=mixed, adapter=adapter, regularization={"kl": kl}, trainer=trainer),
            overwrite=True,
        )
        loaded = load_model(result.model_dir)
        ids = loaded.tokenizer(
            "The mill at Farrow 3. Question: where?", return_tensors="pt"
        ).input_ids
        with torch.no_grad():
            tuned = loaded.model(ids).logits.log_softmax(-1)
            with loaded.model.disable_adapter():
                base = loaded.model(ids).logits.log_softmax(-1)
        return float(F.kl_div(tuned, base, log_target=True, reduction="sum"))

    assert _distance(10.0) < _distance(0.0) / 2


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # on tied embeddings
def test_a_look_at_the_base_lets_nothing_train_that_was_frozen(tiny_model: Path) -> None:
    """As a projection freezes what it cannot project."""
    config = LoraConfig(r=2, target_modules=["v_proj", "embed_tokens"], modules_to_save=["norm"])
    tuned = get_peft_model(load_model(str(tiny_model)).model, config).train()
    for name, parameter in tuned.named_parameters():
        if "embedding" in name or "norm" in name:
            parameter.requires_grad_(False)
    trained = [name for name, parameter in tuned.named_parameters() if parameter.requires_grad]
    with as_frozen(tuned) as base:
        assert not base.training
    assert tuned.training
    assert trained == [name for name, value in tuned.named_parameters() if value.requires_grad]


def test_layer_decay_moves_each_layer_by_its_share(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    one = {**PLAIN, "max_steps": 1}
    base, even, decayed = (
        dict(load_model(str(at)).model.named_parameters())
        for at in (
            tiny_model,
            train(make_recipe(trainer=one)).model_dir,
            train(
                make_recipe(
                    trainer=one,
                    run_dir=str(tiny_model.parent / "b"),
                    techniques={"layerwise_lr_decay": 0.5},
                )
            ).model_dir,
        )
    )
    log = [row for _, row in read_jsonl(tiny_model.parent / "b" / "log.jsonl")]
    assert log[0]["learning_rate"] == PLAIN["learning_rate"]  # that of the recipe
    for name in base:
        share = 0.5**2 if "embed" in name else 0.5 if ".layers.0." in name else 1.0
        assert torch.allclose(
            decayed[name] - base[name], share * (even[name] - base[name]), atol=2e-7
        ), name
