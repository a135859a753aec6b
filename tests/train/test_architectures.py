"""Packing and the ready-made recipes, on the true architectures with tiny dimensions."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from kinject import models
from kinject.corpus.packing import PackingConfig
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.disk import read_jsonl
from kinject.errors import RecipeError
from kinject.models import new_model
from kinject.recipe import Recipe, read_recipe
from kinject.train import train
from kinject.train.batches import Collator, RowDataset
from kinject.train.data import CorpusPacker
from kinject.train.load import use_fastest_attention
from kinject.train.setup import make_trainer
from small import interrupt, quick

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "tie_word_embeddings": True},
    "llama-3.1-8b": {"model_type": "llama", **SMALL, "tie_word_embeddings": False, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}},
    "mistral-7b": {"model_type": "mistral", **SMALL, "sliding_window": 4096},
    "mistral, short window": {"model_type": "mistral", **SMALL, "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", **{k: v for k, v in SMALL.items() if k != "head_dim"}},
    "qwen3": {"model_type": "qwen3", **SMALL, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gemma": {"model_type": "gemma", **SMALL},
    "gemma2, short window": {"model_type": "gemma2", **SMALL, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3": {"model_type": "gemma3_text", **SMALL, "sliding_window": 8, "query_pre_attn_scalar": 8},
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_logits_are_those_of_each_document_alone(
    shape: str, attention: str, tiny_tokenizer: Any, corpus: Path
) -> None:
    if (shape, attention) == ("gemma2, short window", "sdpa"):  # its logits are capped
        with pytest.raises(
            ValueError,
            match="Gemma2ForCausalLM does not support an attention implementation through",
        ):
            new_model(SHAPES[shape], tiny_tokenizer, 0, attention)
        return
    model = new_model(SHAPES[shape], tiny_tokenizer, 0, attention).eval()
    data = CorpusPacker(tiny_tokenizer, Tokenization(), PackingConfig(96, "bfd_split"), 0).pack(
        list(CorpusFile(corpus))
    )
    rows = list(RowDataset(data.rows))[:4]
    batch = Collator(tiny_tokenizer.pad_token_id)(rows)
    with torch.no_grad():
        packed = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        n_documents = 0
        for index, row in enumerate(rows):
            starts = [start for start, position in enumerate(row["position_ids"]) if position == 0]
            for start, end in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
                alone = model(torch.tensor([row["input_ids"][start:end]]), use_cache=False).logits[
                    0
                ]
                assert torch.allclose(packed[index, start:end], alone, atol=1e-5, rtol=1e-5)
                n_documents += 1
    assert n_documents > len(rows)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 64.0, "short_factor": [1.0] * 8,
            "long_factor": [4.0 + i for i in range(8)]}  # fmt: skip


@pytest.mark.parametrize(
    "shape",
    [
        {**SHAPES["gpt2"], "n_positions": 30},
        {
            **{"model_type": "phi3", **SMALL, "pad_token_id": 0, "rope_parameters": LONGROPE},
            "original_max_position_embeddings": 30,
        },
    ],
    ids=["learned positions", "longrope"],
)
def test_padding_behind_rows_longer_than_the_window_changes_no_logits(
    shape: dict[str, Any], tiny_tokenizer: Any, corpus: Path
) -> None:
    model = new_model(shape, tiny_tokenizer, 0, "sdpa").eval()
    data = CorpusPacker(tiny_tokenizer, Tokenization(), PackingConfig(110, "bfd_split"), 0).pack(
        list(CorpusFile(corpus))[:7]
    )
    rows = sorted(RowDataset(data.rows), key=lambda row: -len(row["input_ids"]))
    short = rows[-1]
    n_padding = len(rows[0]["input_ids"]) - len(short["input_ids"])
    assert short["position_ids"][-1] + n_padding >= 30
    batch = Collator(0, n_positions=models.padding_positions(model.config))(rows)
    assert batch["position_ids"].max() < 30
    with torch.no_grad():
        padded = model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits[-1]
        start = short["position_ids"].index(0, 1)
        alone = model(torch.tensor([short["input_ids"][:start]]), use_cache=False).logits[0]
    assert torch.allclose(padded[:start], alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("attention", "trainer", "is_timed"),
    [
        ("auto", {"packing": True}, True),
        ("auto", {"packing": True, "packing_strategy": "bfd_split"}, True),
        ("auto", {"packing": True, "packing_strategy": "wrapped"}, False),
        ("auto", {}, False),
        ("sdpa", {"packing": True}, False),
    ],
)
def test_flex_attention_is_timed_on_the_runs_own_packed_rows(
    tiny_tokenizer: Any,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    attention: str,
    trainer: dict[str, Any],
    is_timed: bool,
) -> None:
    timed = []

    def time_it(model: Any, name: str, row: dict[str, Any]) -> str:
        timed.append(row["position_ids"].count(0))
        model.config._attn_implementation = name
        return ""

    monkeypatch.setattr(models, "fastest_attention", lambda _: ("flash_attention_2", models.FLEX))
    monkeypatch.setattr(models, "try_attention", lambda *_: "no such kernel")
    monkeypatch.setattr(models, "try_faster", time_it)
    model = new_model(SHAPES["qwen3"], tiny_tokenizer, 0, "sdpa")
    packing = PackingConfig(96, "bfd_split")
    data = CorpusPacker(tiny_tokenizer, Tokenization(), packing, 0).pack(list(CorpusFile(corpus)))
    recipe: Any = SimpleNamespace(model=SimpleNamespace(attention=attention), trainer=trainer)
    notes = use_fastest_attention(model, recipe, RowDataset(data.rows), "bf16")
    refused = "attention: flash_attention_2 is not used (no such kernel)"
    if is_timed:
        assert timed[0] > 1
        assert notes == [refused, "attention: flex_attention"]
    elif attention == "auto":
        assert timed == []
        assert notes == [refused, "attention: sdpa with separated documents"]
    else:
        assert (timed, notes) == ([], [])


@pytest.mark.parametrize(
    ("precision", "dtype", "is_tried"),
    [("no", torch.float32, False), ("bf16", torch.float32, True), ("no", torch.bfloat16, True)],
)
def test_flash_attention_is_left_out_of_a_training_in_float32(
    tiny_tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    dtype: torch.dtype,
    is_tried: bool,
) -> None:
    tried = []
    monkeypatch.setattr(models, "fastest_attention", lambda _: ("flash_attention_3",))
    monkeypatch.setattr(models, "try_attention", lambda _, name: tried.append(name) or "")
    model = new_model(SHAPES["qwen3"], tiny_tokenizer, 0, "sdpa").to(dtype)
    recipe: Any = SimpleNamespace(model=SimpleNamespace(attention="auto"), trainer={})
    dataset: Any = None
    notes = use_fastest_attention(model, recipe, dataset, precision)
    assert bool(tried) == is_tried
    assert any("this training is in float32" in note for note in notes) != is_tried


MIXTRAL = {"model_type": "mixtral", **SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}


def _routers_loss(router_logits: Sequence[torch.Tensor]) -> float:
    """Four times the sum over experts of (tokens sent to it, of each two) x (its mean probability), layers together."""
    probabilities = torch.cat([logits.double().softmax(-1) for logits in router_logits])
    chosen = torch.zeros_like(probabilities).scatter(1, probabilities.topk(2).indices, 1.0)
    return float(4 * (chosen.mean(0) * probabilities.mean(0)).sum())


@pytest.mark.parametrize("coefficient", [None, 0.0])
def test_a_mixture_of_experts_trains_with_its_routers_loss_and_validates_without(
    make_recipe: Callable[..., Recipe],
    tiny_tokenizer: Any,
    corpus: Path,
    tmp_path: Path,
    coefficient: float | None,
) -> None:
    folder, questions = tmp_path / "mixtral", tmp_path / "questions.jsonl"
    # Of unequal lengths: no padding has a part in the loss.
    texts = ("Kelm?", "Person 7 was born in Kelm in 1907, and went to the mill there.")
    model = new_model(MIXTRAL, tiny_tokenizer, 0)
    model.save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    questions.write_text(
        json.dumps({"question": "Where?", "choices": ["Kelm", "Farrow"], "answer": 0}) + "\n"
    )
    trainer = {
        "packing": False, "per_device_train_batch_size": 2, "max_steps": 2,
        "eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True, "lr_scheduler_type": "constant",
    }  # fmt: skip
    recipe = make_recipe(
        model={"path": str(folder)}, corpus={"path": str(corpus), "validation_corpus": str(corpus)},
        probes={"questions": {"town": str(questions)}},
        trainer=trainer | ({} if coefficient is None else {"router_aux_loss_coef": coefficient}),
    )  # fmt: skip
    result = train(recipe)
    log = [row for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl")]

    losses, router_logits = [], []
    for text in texts:
        ids = tiny_tokenizer(text, add_special_tokens=False).input_ids
        ids = [tiny_tokenizer.bos_token_id, *ids, tiny_tokenizer.eos_token_id]
        with torch.no_grad():
            out = model(torch.tensor([ids]), use_cache=False, output_router_logits=True)
        labels = torch.tensor(ids[1:])
        losses += torch.nn.functional.cross_entropy(
            out.logits[0, :-1].double(), labels, reduction="none"
        ).tolist()
        router_logits += out.router_logits
    nll, routers = sum(losses) / len(losses), _routers_loss(router_logits)
    weight = 0.001 if coefficient is None else coefficient  # Mixtral's own
    assert routers > 0.9
    first = next(row for row in log if "loss" in row)
    assert first["loss"] == pytest.approx(nll + weight * routers, rel=1e-5)
    assert first.get("aux_loss") == (pytest.approx(routers, rel=1e-4) if weight else None)
    assert next(row["eval_loss"] for row in log if "eval_loss" in row) == pytest.approx(
        nll, rel=1e-5
    )
    assert [row["eval_town_accuracy"] for row in log if "eval_town_accuracy" in row][-1] in (
        0.0,
        1.0,
    )
    # A model that returned its routers' logits would fail on batches of texts that it continues.
    saved = json.loads((Path(result.model_dir) / "config.json").read_text())
    assert (saved["output_router_logits"], saved["router_aux_loss_coef"]) == (False, 0.001)
    before, after = model.state_dict(), load_file(Path(result.model_dir) / "model.safetensors")
    gate = next(name for name in after if "gate.weight" in name)
    assert not torch.equal(
        after[gate],
        next(value for name, value in before.items() if name.endswith("mlp.gate.weight")),
    )


def test_padding_of_packed_rows_has_no_part_in_the_routers_loss(
    make_recipe: Callable[..., Recipe], tiny_model: Path, corpus: Path
) -> None:
    texts = ("The mill of Farrow was sold.", "Person 3 was born in Stonegate in 1903.", "Kelm?")
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    new = {"new": MIXTRAL, "tokenizer": str(tiny_model)}
    trainer: Any = make_trainer(make_recipe(model=new, trainer={"max_length": 32}))
    batch = next(iter(trainer.get_train_dataloader()))
    rows, router_logits = list(RowDataset(trainer.training_data.rows)), []
    assert len({len(row["input_ids"]) for row in rows}) == len(rows) == 2
    for row in rows:
        starts = [start for start, position in enumerate(row["position_ids"]) if position == 0]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ids = torch.tensor([row["input_ids"][start:end]])
            with torch.no_grad():
                out = trainer.model(ids, use_cache=False, output_router_logits=True)
            router_logits += out.router_logits
    trainer.model.train()
    trainer.compute_loss(trainer.model, batch)
    (loss,) = trainer._metrics["train"]["aux_loss"]
    assert loss == pytest.approx(_routers_loss(router_logits), rel=1e-5)
    # A probe reads padded rows.
    trainer.model.eval()
    alone, padded = torch.tensor([[5, 6, 7]]), torch.tensor([[9, 5, 6, 7]])
    mask, positions = torch.tensor([[0, 1, 1, 1]]), torch.tensor([[0, 0, 1, 2]])
    with torch.no_grad():
        expected = trainer.model(alone).logits
        found = trainer.model(padded, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[:, 1:], expected)


@pytest.mark.parametrize("kind", quick(["qwen2_moe", "olmoe"], "olmoe"))
def test_a_mixture_of_experts_goes_on_from_all_weights_of_its_checkpoint(
    make_recipe: Callable[..., Recipe], tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    """Its experts have other names in a file than in memory."""
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    new_model({"model_type": kind, **SMALL, **sizes}, tiny_tokenizer, 0).save_pretrained(
        tmp_path / kind
    )
    tiny_tokenizer.save_pretrained(tmp_path / kind)
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.01}
    recipe = make_recipe(model={"path": str(tmp_path / kind)}, trainer=saves)
    weights = Path(train(recipe).model_dir) / "model.safetensors"
    whole = weights.read_bytes()
    interrupt(tmp_path / "run", 2)
    train(recipe, resume=True)
    assert weights.read_bytes() == whole
    # A rate that spoils the model after the first evaluation makes that checkpoint the best one.
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    corpus = {"path": recipe.corpus.path, "validation_corpus": recipe.corpus.path}
    spoiling = saves | best | {"learning_rate": 9.0, "lr_scheduler_type": "constant"}
    train(make_recipe(model=recipe.raw["model"], corpus=corpus, trainer=spoiling), overwrite=True)
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["counts"]["best_step"] == 2
    checkpoint = tmp_path / "run" / "checkpoint-2" / "model.safetensors"
    assert weights.read_bytes() == checkpoint.read_bytes()


def test_what_leaves_the_routers_loss_out_is_refused(
    make_recipe: Callable[..., Recipe], tiny_tokenizer: Any, corpus: Path, tmp_path: Path
) -> None:
    new_model(MIXTRAL, tiny_tokenizer, 0).save_pretrained(tmp_path / "mixtral")
    tiny_tokenizer.save_pretrained(tmp_path / "mixtral")
    recipe = make_recipe(
        model={"path": str(tmp_path / "mixtral")}, regularization={"kl": 1.0},
        corpus={"path": str(corpus), "replay": {"path": str(corpus), "fraction": 0.3}},
    )  # fmt: skip
    with pytest.raises(RecipeError, match=r"regularization.kl: .*router_aux_loss_coef: 0"):
        train(recipe)


def test_every_recipe_of_a_real_model_watches_general_text() -> None:
    recipes = {path: yaml.safe_load(path.read_text("utf-8")) for path in RECIPES.rglob("*.yaml")}
    trained = [path for path, values in recipes.items() if "/" in values.get("model", {}).get("path", "")
               and not values["model"]["path"].startswith(("runs/", "../"))]  # fmt: skip
    assert len(trained) == 21
    for path in trained:
        # Studies ask questions instead; recipes/training shows one key each.
        if path.parent.name not in ("paper", "training"):
            trainer = recipes[path]["trainer"]
            assert recipes[path]["corpus"]["validation_corpus"] == "data/general-held-out.jsonl"
            assert (trainer["eval_strategy"], trainer["eval_on_start"]) == ("epoch", True)
    for path in (RECIPES / "studies").rglob("eval-*.yaml"):
        assert recipes[path]["eval"]["questions"]["general"]["role"] == "retention"
    assert "perplexity_corpus" in recipes[RECIPES / "real-data" / "eval.yaml"]["eval"]


FAMILIES = {
    "mistral-7b": "mistral-7b",
    "llama-3.1-8b": "llama-3.1-8b",
    "qwen3/0.6b": "qwen3",
    "qwen3/8b": "qwen3",
}


@pytest.mark.parametrize("kind", ["cpt", "sft", "lora"])
@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3/8b"))
def test_a_ready_made_recipe_runs_at_its_architecture(
    family: str, kind: str, tmp_path: Path, tiny_tokenizer: Any, corpus: Path
) -> None:
    path = RECIPES / f"{family}-{kind}.yaml" if "/" in family else RECIPES / family / f"{kind}.yaml"
    written = yaml.safe_load(path.read_text("utf-8"))
    model, tokenizer = (
        new_model(SHAPES[FAMILIES[family]], tiny_tokenizer, 0),
        copy.deepcopy(tiny_tokenizer),
    )
    qwen = family.startswith("qwen")
    if qwen:
        tokenizer.bos_token = None
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    if kind == "sft":
        corpus = tmp_path / "sft.jsonl"
        turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Farrow."}]
        corpus.write_text("".join(json.dumps({"messages": turns}) + "\n" for _ in range(40)))
    small = [f"run_dir={tmp_path / 'run'}", f"model.path={tmp_path / 'model'}", f"corpus.path={corpus}",
             f"corpus.cache_dir={tmp_path}", "trainer.max_length=64", "trainer.gradient_accumulation_steps=1",
             "trainer.per_device_train_batch_size=4", "trainer.max_steps=2", "trainer.logging_steps=1",
             "trainer.save_strategy=no", "trainer.tf32=null", "model.attention=auto"]  # fmt: skip
    small.append(f"corpus.validation_corpus={tmp_path / 'general.jsonl'}")
    (tmp_path / "general.jsonl").write_text(
        json.dumps({"text": "General text that nobody trains on."}) + "\n"
    )
    if "replay" in written["corpus"]:
        small.append(f"corpus.replay.path={corpus}")
    if not torch.cuda.is_available() and not written.get("techniques", {}).get(
        "stochastic_rounding"
    ):
        small.append("model.dtype=float32")
    result = train(read_recipe(path, small, "train"))
    assert result.n_steps == 2
    assert result.account["trained"] > 0
    losses = [
        row["eval_loss"]
        for _, row in read_jsonl(tmp_path / "run" / "log.jsonl")
        if "eval_loss" in row
    ]
    assert len(losses) == 2  # of general text, before training and at its end
    assert losses[0] != losses[1]
    assert written["model"]["path"].count("/") == 1  # a name on the hub
    assert "bos" not in written["corpus"]  # the tokenizer decides
