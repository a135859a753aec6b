"""An adapter that was saved is the model that was trained, however it began: loaded, resumed, and folded into its base."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import trl.trainer.sft_trainer
from peft import LoraConfig

from kinject.corpus.tokenize import begins_with_bos
from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.recipe.library_fields import INITS_REFUSED
from kinject.train import train
from kinject.train.merge import merge_adapter

MakeRecipe = Callable[..., Recipe]
LORA = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
TRAINER = {
    "max_steps": 4,
    "learning_rate": 1e-2,
    "packing": False,
    "eval_strategy": "steps",
    "eval_steps": 4,
    "save_strategy": "steps",
    "save_steps": 2,
}
OF_THE_BASE = ("pissa", "pissa_niter_2", "olora")
INITS = (True, False, "gaussian", "orthogonal", "mica", *OF_THE_BASE)
MIXED: dict[str, dict[str, Any]] = {
    "rslora with ranks of its own": {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"v_proj": 4},
    },
    "DoRA": {"use_dora": True},
    "embeddings, a whole norm and some tokens": {
        "target_modules": ["q_proj", "embed_tokens"],
        "modules_to_save": ["norm"],
    },
    "tokens and biases": {"trainable_token_indices": [3, 5], "bias": "all"},
}


def _mean_loss(folder: Path, texts: Path) -> float:
    """The mean loss of the tokens of a corpus in float64, by a model that is loaded anew."""
    loaded = load_model(str(folder), dtype="float32", device="cpu")
    losses = []
    for _, row in read_jsonl(texts):
        ids = loaded.tokenizer(row["text"], add_special_tokens=False)["input_ids"]
        if begins_with_bos(loaded.tokenizer):
            ids = [loaded.tokenizer.bos_token_id, *ids]
        ids = torch.tensor([*ids, loaded.tokenizer.eos_token_id])
        with torch.no_grad():
            logp = loaded.model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        losses.append(-logp.gather(1, ids[1:, None]))
    return float(torch.cat(losses).mean())


def _last_loss(run: Path) -> float:
    rows = [row for _, row in read_jsonl(run / "log.jsonl")]
    return float([row["eval_loss"] for row in rows if "eval_loss" in row][-1])


def _train(make_recipe: MakeRecipe, corpus: Path, adapter: dict[str, Any]) -> Recipe:
    recipe = make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(corpus)},
        adapter={**LORA, **adapter},
        trainer=TRAINER,
    )
    train(recipe)
    return recipe


def _assert_is_what_was_trained(recipe: Recipe, corpus: Path, tmp_path: Path) -> None:
    trained = _last_loss(recipe.run_dir)
    for folder in (recipe.run_dir / "model", recipe.run_dir / "checkpoint-4"):
        torch.manual_seed(7)  # what is drawn at a load is drawn otherwise
        assert _mean_loss(folder, corpus) == pytest.approx(trained, rel=1e-5), folder.name
    folded = tmp_path / "folded"
    folded.mkdir()
    merge_adapter(recipe.run_dir / "model", folded)
    assert _mean_loss(folded, corpus) == pytest.approx(trained, rel=1e-5)


@pytest.mark.parametrize("init", INITS)
def test_a_saved_adapter_is_the_one_that_was_trained_however_it_began(
    make_recipe: MakeRecipe, corpus: Path, tmp_path: Path, init: Any
) -> None:
    recipe = _train(make_recipe, corpus, {"init_lora_weights": init})
    _assert_is_what_was_trained(recipe, corpus, tmp_path)
    config = json.loads((recipe.run_dir / "model/adapter_config.json").read_text())
    assert config["r"] == (8 if init in OF_THE_BASE else 4)
    if init in OF_THE_BASE:
        assert config["init_lora_weights"] is True


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # on rslora, and on tied embeddings
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("init", ["pissa_niter_2", "olora"])
def test_so_is_one_that_is_a_part_of_the_base_beside_other_weights(
    make_recipe: MakeRecipe, corpus: Path, tmp_path: Path, init: str, mixed: str
) -> None:
    recipe = _train(make_recipe, corpus, {"init_lora_weights": init, **MIXED[mixed]})
    _assert_is_what_was_trained(recipe, corpus, tmp_path)


@pytest.mark.parametrize("init", ["gaussian", *OF_THE_BASE])
def test_a_resumed_run_goes_on_with_the_base_that_its_adapter_was_taken_from(
    make_recipe: MakeRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch, init: str
) -> None:
    """Even where another machine would draw another part of the base."""
    recipe = _train(make_recipe, corpus, {"init_lora_weights": init})
    whole = _last_loss(recipe.run_dir)
    real = trl.trainer.sft_trainer.set_seed
    monkeypatch.setattr(trl.trainer.sft_trainer, "set_seed", lambda seed: real(seed + 1))
    shutil.rmtree(recipe.run_dir / "model")
    shutil.rmtree(recipe.run_dir / "checkpoint-4")
    train(recipe, resume=True)
    assert _last_loss(recipe.run_dir) == pytest.approx(whole, rel=1e-5)
    assert _mean_loss(recipe.run_dir / "model", corpus) == pytest.approx(whole, rel=1e-5)


def test_the_best_checkpoint_of_such_a_run_is_loaded_whole(
    make_recipe: MakeRecipe, corpus: Path
) -> None:
    recipe = make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(corpus)},
        adapter={**LORA, "init_lora_weights": "pissa_niter_2"},
        trainer={
            **TRAINER,
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "loss",
            "greater_is_better": True,  # so that it is not the last one
        },
    )
    train(recipe)
    rows = [row for _, row in read_jsonl(recipe.run_dir / "log.jsonl")]
    losses = [row["eval_loss"] for row in rows if "eval_loss" in row]
    assert losses[0] > losses[1]
    assert _mean_loss(recipe.run_dir / "model", corpus) == pytest.approx(losses[0], rel=1e-4)


def test_every_beginning_of_peft_is_trained_here_or_refused(make_recipe: MakeRecipe) -> None:
    hint = get_type_hints(LoraConfig)["init_lora_weights"]
    words = {word for option in get_args(hint) for word in get_args(option)}
    words.discard("pissa_niter_[number of iters]")
    assert words >= {"pissa", "loftq"}
    assert words <= {*map(str, INITS), *INITS_REFUSED}
    for init, reason in INITS_REFUSED.items():
        with pytest.raises(RecipeError, match="init_lora_weights: ") as refused:
            make_recipe(adapter={**LORA, "init_lora_weights": init})
        assert f"{init} {reason}" in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"method": "distill"}, "method"),
        ({"regularization": {"kl": 0.1}, "corpus": "replay"}, "regularization.kl"),
        ({"model": {"quantization": "4bit"}}, "adapter.init_lora_weights"),
        ({"adapter": {"layer_replication": [[0, 2], [1, 2]]}}, "adapter.layer_replication"),
    ],
)
def test_what_reads_the_base_beside_such_an_adapter_is_refused(
    make_recipe: MakeRecipe,
    tiny_model: Path,
    corpus: Path,
    sections: dict[str, Any],
    key: str,
) -> None:
    adapter = {**LORA, "init_lora_weights": "pissa", **sections.get("adapter", {})}
    sections = {**sections, "adapter": adapter}
    sections["model"] = {"path": str(tiny_model), **sections.get("model", {})}
    if sections.get("corpus") == "replay":
        replay = {"path": str(corpus), "fraction": 0.5}
        sections["corpus"] = {"path": str(corpus), "replay": replay}
    with pytest.raises(RecipeError, match=f"{key}: .*(part|decomposes)"):
        train(make_recipe(**sections))
