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
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from kinject.cli import main
from kinject.corpus.tokenize import begins_with_bos
from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.models import LoadOptions, load_model
from kinject.recipe import Recipe
from kinject.recipe.adapter_fields import adapter_types
from kinject.recipe.library_fields import INITS_REFUSED
from kinject.train import train
from kinject.train.config import adapter_config
from kinject.train.merge import merge_adapter
from kinject.train.setup import check_training, make_trainer
from small import quick

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


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Eight short documents, in place of forty: a test reads them one by one, up to five times."""
    rows = [{"text": f"The mill of Kelm ground {17 * n} sacks in {1900 + n}."} for n in range(8)]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _mean_loss(folder: Path, texts: Path) -> float:
    """The mean loss of the tokens of a corpus in float64, by a model that is loaded anew."""
    loaded = load_model(str(folder), LoadOptions(dtype="float32", device="cpu"))
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


@pytest.mark.parametrize("init", quick(INITS, True, "mica"))
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
@pytest.mark.parametrize(
    ("init", "mixed"),
    [
        ("pissa_niter_2", "rslora with ranks of its own"),
        ("olora", "DoRA"),
        *(pytest.param("pissa_niter_2", mixed, marks=pytest.mark.soak) for mixed in [*MIXED][1:]),
    ],
)
def test_a_saved_adapter_that_takes_part_of_the_base_is_the_trained_one(
    make_recipe: MakeRecipe, corpus: Path, tmp_path: Path, init: str, mixed: str
) -> None:
    recipe = _train(make_recipe, corpus, {"init_lora_weights": init, **MIXED[mixed]})
    _assert_is_what_was_trained(recipe, corpus, tmp_path)


@pytest.mark.parametrize("init", quick(["gaussian", *OF_THE_BASE], "pissa_niter_2"))
def test_a_resumed_run_continues_with_the_base_that_its_adapter_was_taken_from(
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


def test_only_the_first_of_several_processes_writes_such_an_adapter(
    make_recipe: MakeRecipe, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one looked for the file that the first had not written yet, after the last step."""
    adapter = {**LORA, "init_lora_weights": "olora"}
    trainer = make_trainer(make_recipe(corpus={"path": str(corpus)}, adapter=adapter))
    assert trainer.initial_adapter
    monkeypatch.setattr(type(trainer.args), "should_save", False)
    trainer.save_model(str(tmp_path / "second"), _internal_call=True)
    assert not (tmp_path / "second").exists()


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


SIZES: dict[str, dict[str, Any]] = {
    "c3a": {"block_size": 4},
    "fourierft": {"n_frequency": 16},
    "ia3": {"target_modules": ["k_proj", "v_proj", "down_proj"]},
    "ln_tuning": {"target_modules": None},
    "miss": {"r": 8},
    "psoft": {"r": 4},
    "road": {"group_size": 4},
    "shira": {"r": 4},
    "trainable_tokens": {"target_modules": None, "token_indices": [6, 8]},
    "vblora": {"vector_length": 4},
    "waveft": {"n_frequency": 16},
}
TYPES = sorted(adapter_types().keys() - {"cartridge", "frod"})  # frod takes seconds to begin
QUICK_TYPES = ("boft", "ia3", "ln_tuning", "lora", "oft", "osf", "trainable_tokens", "vera")
"""One of each way in which weights are held: sums, products, rotations, rows, norms, shared matrices."""


@pytest.fixture
def biased_model(tiny_model: Path) -> Path:
    """The tiny model with biases in its attention."""
    loaded = load_model(str(tiny_model))
    loaded.model.config.attention_bias = True
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(loaded.model.config)
    for name, parameter in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter.data, std=0.1)
    made.save_pretrained(tiny_model)
    return tiny_model


def _trained_by_chance(base: Path, adapter: dict[str, Any], folder: Path, tokenizer: Any) -> Any:
    """Return a model whose adapter has other weights than at its start, saved in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, adapter_config(adapter)).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value += 0.05 * torch.randn_like(value)
    tuned.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tuned


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.parametrize("kind", quick(TYPES, *QUICK_TYPES))
def test_every_type_is_loaded_and_folded_as_it_was(
    biased_model: Path, tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    targets = ["q_proj", "v_proj"] if kind == "beft" else "all-linear"
    fields = {"target_modules": targets, **SIZES.get(kind, {})}
    adapter = {"type": kind, **{key: value for key, value in fields.items() if value}}
    tuned = _trained_by_chance(biased_model, adapter, tmp_path / "adapter", tiny_tokenizer)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    torch.manual_seed(8)
    loaded = load_model(str(tmp_path / "adapter"), LoadOptions(dtype="float32")).model
    (tmp_path / "folded").mkdir()
    merge_adapter(tmp_path / "adapter", tmp_path / "folded", "float32")
    folded = load_model(str(tmp_path / "folded"), LoadOptions(dtype="float32")).model
    with torch.no_grad():
        wanted = tuned(ids).logits
        assert torch.allclose(loaded(ids).logits, wanted, atol=1e-5)
        assert torch.allclose(folded(ids).logits, wanted, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_replicated_layers_have_weights_of_their_own_once_folded(
    biased_model: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    adapter = {**LORA, "layer_replication": [[0, 2], [1, 2], [0, 1]]}
    tuned = _trained_by_chance(biased_model, adapter, tmp_path / "adapter", tiny_tokenizer)
    (tmp_path / "folded").mkdir()
    merge_adapter(tmp_path / "adapter", tmp_path / "folded", "float32")
    folded = load_model(str(tmp_path / "folded"), LoadOptions(dtype="float32")).model
    assert folded.config.num_hidden_layers == 4
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(folded(ids).logits, tuned(ids).logits, atol=1e-4)


def test_an_adapter_keeps_the_revision_of_its_base(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    for revision in ("step143000", None):
        model = {"path": str(tiny_model), "revision": revision}
        _, adapter = check_training(make_recipe(model=model, adapter=LORA))
        assert adapter is not None
        assert adapter.revision == revision


def test_layers_of_several_kinds_are_not_replicated(make_recipe: MakeRecipe) -> None:
    new = {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    }  # fmt: skip
    adapter = {**LORA, "layer_replication": [[0, 2], [1, 2]], "merge": True}
    model = {"new": new, "tokenizer": {"vocab_size": 300}}
    with pytest.raises(RecipeError, match=r"layer_replication: .* layers of qwen3 have kinds"):
        train(make_recipe(model=model, adapter=adapter))


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({**LORA, "lora_bias": True}, r"adapter\.lora_bias: .* has no bias that could train"),
        ({"type": "beft", "target_modules": "all-linear"}, "has no bias that could train"),
        ({**LORA, "init_lora_weights": "pissa_niter_4", "r": 40}, r"r: .* has a rank of \d+\. L"),
        (
            {**LORA, "init_lora_weights": "olora", "rank_pattern": {"v_proj": 33}},
            r"adapter\.rank_pattern: .* rank 33 out of each layer, and .*v_proj has a rank of",
        ),
        ({"type": "ia3", "target_modules": ["q_proj"]}, "should be a subset of `target_modules`"),
        ({"type": "trainable_tokens"}, r"adapter\.token_indices: missing"),
        (
            {"type": "vblora", "target_modules": ["k_proj"], "save_only_topk_weights": True},
            r"adapter\.save_only_topk_weights: saves too little of vblora",
        ),
        (
            {"type": "pvera", "target_modules": ["k_proj"], "sample_at_inference": True},
            r"adapter\.sample_at_inference: draws another model at each pass",
        ),
        (
            {"type": "tinylora", "target_modules": ["k_proj"], "init_weights": False},
            r"adapter\.init_weights: False leaves the weights as memory happens to hold them",
        ),
        ({"type": "lily", "target_modules": ["q_proj"]}, "a token would read later ones"),
    ],
)
def test_what_could_not_be_loaded_or_folded_is_refused_before_training(
    make_recipe: MakeRecipe, adapter: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message) as refused:
        train(make_recipe(adapter=adapter))
    assert "Traceback" not in str(refused.value)


def test_a_beginning_that_peft_does_not_have_for_transposed_weights_is_refused(
    make_recipe: MakeRecipe, tiny_tokenizer: Any
) -> None:
    new = {
        "model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64,
    }  # fmt: skip
    model = {"new": new, "tokenizer": {"vocab_size": 300}}
    with pytest.raises(RecipeError, match=r"olora does not read .*c_attn, .*Take pissa"):
        train(
            make_recipe(model=model, adapter={**LORA, "init_lora_weights": "olora", "merge": True})
        )


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_experts_in_one_tensor_are_no_part_that_an_adapter_begins_as(
    make_recipe: MakeRecipe,
) -> None:
    new = {
        "model_type": "olmoe", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4,
    }  # fmt: skip
    adapter = {**LORA, "init_lora_weights": "pissa_niter_3", "merge": True}
    model = {"new": new, "tokenizer": {"vocab_size": 300}}
    with pytest.raises(RecipeError, match=r"pissa_niter_3 does not read .*experts.* Set true"):
        train(make_recipe(model=model, adapter=adapter))


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_biases_train_where_the_base_has_some(
    make_recipe: MakeRecipe, biased_model: Path, corpus: Path, tmp_path: Path
) -> None:
    recipe = _train(
        make_recipe, corpus, {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}
    )
    _assert_is_what_was_trained(recipe, corpus, tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
def test_an_adapter_of_elsewhere_that_cannot_be_folded_is_reported_in_a_line(
    tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {**LORA, "lora_bias": True}
    _trained_by_chance(tiny_model, adapter, tmp_path / "adapter", tiny_tokenizer)
    assert main(["export", str(tmp_path / "adapter")]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "cannot be folded" in line]
    assert "base layer has no bias" in line
    assert "Serve it with peft." in line


def test_an_adapter_that_does_not_run_on_quantized_weights_is_refused_before_training(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    for bits, adapter in (
        ("4bit", {**LORA, "init_lora_weights": "orthogonal"}),  # fails when it is made
        ("4bit", {"type": "loha", "target_modules": "all-linear"}),  # and when it reads
        ("8bit", {"r": 2, "use_dora": True, "target_modules": ["down_proj"]}),
    ):
        model = {"path": str(tiny_model), "quantization": bits}
        with pytest.raises(RecipeError, match=r"adapter: it does not run on model\.quantization"):
            train(make_recipe(model=model, adapter=adapter))
