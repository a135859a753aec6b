"""Whole training runs on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.corpus.packing import PackingConfig
from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization
from kinject.disk import read_jsonl
from kinject.errors import InputError, TrainingError
from kinject.models import load_model, new_model
from kinject.recipe import Recipe
from kinject.recipe.read import NOT_TRAINING, Sections
from kinject.train import setup, train
from kinject.train.batches import Collator, RowDataset
from kinject.train.checkpoints import is_complete, mark_complete, newest_complete
from kinject.train.data import CorpusPacker
from kinject.train.merge import merge_adapter
from kinject.train.run import hash_inputs
from kinject.train.setup import make_trainer
from small import TINY, have_flash_on_cpu, interrupt

MakeRecipe = Callable[..., Recipe]


def _losses(run_dir: str | Path) -> list[float]:
    return [row["loss"] for _, row in read_jsonl(Path(run_dir) / "log.jsonl") if "loss" in row]


def test_a_run_leaves_a_folder_that_transformers_reads_and_every_weight_moved(
    make_recipe: MakeRecipe, tiny_model: Path
) -> None:
    result = train(make_recipe())
    before, after = (
        load_file(Path(folder) / "model.safetensors") for folder in (tiny_model, result.model_dir)
    )
    assert before.keys() == after.keys()
    for name in before:
        assert not torch.equal(before[name], after[name]), f"{name} did not move"
    loaded = load_model(result.model_dir)
    assert loaded.tokenizer.bos_token_id is not None
    assert not list(Path(result.run_dir).rglob("*.bin"))
    manifest = json.loads((Path(result.run_dir) / "manifest.json").read_text())
    assert manifest["counts"]["tokens"] == dict(result.account)
    assert manifest["counts"]["steps"] == 6


@pytest.mark.parametrize("kind", ["whole", "adapter", "merged"])
def test_a_model_keeps_the_settings_of_its_base(
    make_recipe: MakeRecipe, tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    """Scaled positions, rows beyond the tokenizer, all ends of a text, sampling that is not used, no token to pad, a cache."""
    scaled = {
        "rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
    }  # fmt: skip
    new_model(
        {**TINY, "vocab_size": len(tiny_tokenizer) + 40, "rope_parameters": scaled},
        tiny_tokenizer,
        0,
    ).save_pretrained(tiny_model)
    tiny_tokenizer.pad_token = None
    tiny_tokenizer.save_pretrained(tiny_model)
    path = tiny_model / "generation_config.json"
    ends = [tiny_tokenizer.eos_token_id, 9, 7]
    settings = {"eos_token_id": ends, "do_sample": False, "temperature": 0.9, "max_length": 77}
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    adapter = {
        "r": 4,
        "target_modules": "all-linear",
        **({"merge": True} if kind == "merged" else {}),
    }
    sections = {} if kind == "whole" else {"adapter": adapter}
    folder = Path(train(make_recipe(trainer={"max_steps": 2}, **sections)).model_dir)
    if kind == "adapter":
        merge_adapter(folder, tmp_path)
        folder = tmp_path
    for name in ("config.json", "generation_config.json"):
        before, after = (json.loads((of / name).read_text()) for of in (tiny_model, folder))
        assert after == before, name
    assert (folder / "tokenizer.json").read_text() == (tiny_model / "tokenizer.json").read_text()
    rows = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert len(rows) == len(tiny_tokenizer) + 40


def test_a_new_qwen2_with_a_tokenizer_of_the_corpus_loads_again(make_recipe: MakeRecipe) -> None:
    """transformers reads that folder's tokenizer with a further token, for what is unknown."""
    new = {key: value for key, value in TINY.items() if key != "model_type"}
    model = {"new": {"model_type": "qwen2", **new}, "tokenizer": {"vocab_size": 300}}
    loaded = load_model(train(make_recipe(model=model)).model_dir)
    ids = loaded.tokenizer("Person 5 was born in Kelm.", return_tensors="pt").input_ids
    assert loaded.model(ids).logits.isfinite().all()


def test_the_losses_are_those_of_a_bare_pytorch_loop(
    make_recipe: MakeRecipe, tiny_model: Path, corpus: Path
) -> None:
    trainer = {"lr_scheduler_type": "constant", "max_grad_norm": 0.0, "weight_decay": 0.0, "optim": "adamw_torch",
               "train_sampling_strategy": "sequential", "gradient_accumulation_steps": 1}  # fmt: skip
    recipe = make_recipe(trainer=trainer)
    result = train(recipe)
    loaded = load_model(str(tiny_model))
    rows = [
        CorpusRow(str(i), "", "original", "text", text=row["text"])
        for i, (_, row) in enumerate(read_jsonl(corpus))
    ]
    data = CorpusPacker(
        loaded.tokenizer, Tokenization(), PackingConfig(64, "bfd_split"), recipe.seed
    ).pack(rows)
    dataset, collate = RowDataset(data.rows), Collator(loaded.tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-3, weight_decay=0.0)
    losses = []
    for step in range(6):
        start = step * 4 % (-(-len(dataset) // 4) * 4)
        batch = collate([dataset[i] for i in range(start, min(start + 4, len(dataset)))])
        logits = loaded.model(
            input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
        ).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(dataset) > 4
    assert _losses(result.run_dir) == pytest.approx(losses, rel=1e-5)


def test_sixteen_rows_at_once_give_the_losses_of_eight_times_two(
    make_recipe: MakeRecipe, tmp_path: Path
) -> None:
    whole, parts = (
        train(make_recipe(run_dir=str(tmp_path / name), trainer={
            "per_device_train_batch_size": rows, "gradient_accumulation_steps": times, "max_steps": 4, "packing": False,
        }))
        for name, rows, times in (("a", 16, 1), ("b", 2, 8))
    )  # fmt: skip
    assert _losses(parts.run_dir) == pytest.approx(_losses(whole.run_dir), rel=1e-5)


def test_a_folder_with_another_run_is_refused_unless_overwritten(make_recipe: MakeRecipe) -> None:
    """And the same run is not made twice."""
    first = train(make_recipe())
    weights = Path(first.model_dir, "model.safetensors")
    stamp = weights.stat().st_mtime_ns
    again = train(make_recipe())
    assert again.already_done
    assert (again.account, again.n_steps) == (first.account, first.n_steps)
    assert weights.stat().st_mtime_ns == stamp
    other = make_recipe(trainer={"learning_rate": 2e-3})
    with pytest.raises(TrainingError, match="holds a run of another recipe") as found:
        train(other)
    assert re.search(r"model: trainer.learning_rate \S+ there, 0.002 here. Set", str(found.value))
    more = {"weight_decay": 0.5, "max_grad_norm": 3}
    with pytest.raises(TrainingError, match=r"trainer.weight_decay not set there, 0.5 here\."):
        train(make_recipe(trainer=more))
    corpus = Path(make_recipe().corpus.path)
    text = corpus.read_text()
    corpus.write_text(text + text.splitlines()[0] + "\n")
    with pytest.raises(TrainingError, match=r"corpus or model: the content of corpus\. Set"):
        train(make_recipe())
    corpus.write_text(text)
    assert not train(other, overwrite=True).already_done
    manifest = Path(first.run_dir, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"train"', '"questions"', 1))
    with pytest.raises(InputError, match="holds a run of kinject questions, and kinject train"):
        train(other)


def test_resume_continues_bitwise_from_the_newest_whole_checkpoint(
    make_recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = {"save_strategy": "steps", "save_steps": 2, "max_steps": 8}
    uninterrupted = train(make_recipe(run_dir=str(tmp_path / "straight"), trainer=save))
    broken = tmp_path / "broken"
    train(make_recipe(run_dir=str(broken), trainer=save))
    interrupt(broken, 6)
    optimizer = (
        broken / "checkpoint-6" / "optimizer.pt"
    )  # as a kill in the middle of writing it leaves it
    optimizer.write_bytes(optimizer.read_bytes()[:100])
    assert not is_complete(broken / "checkpoint-6")
    assert newest_complete(broken) == broken / "checkpoint-4"
    recipe = make_recipe(run_dir=str(broken), trainer=save)
    with pytest.raises(TrainingError, match="holds an unfinished run"):
        train(recipe)
    (broken / "manifest.json").unlink()
    other = make_recipe(run_dir=str(broken), trainer={**save, "learning_rate": 3e-3})
    with pytest.raises(TrainingError, match=r"checkpoint-6: is of a run of another recipe, corp"):
        train(other, resume=True)
    state = json.loads((broken / "checkpoint-4" / "trainer_state.json").read_text())
    state["stateful_callbacks"]["kinject"]["spent"] = [1000.0, 900.0]
    (broken / "checkpoint-4" / "trainer_state.json").write_text(json.dumps(state))
    mark_complete(broken / "checkpoint-4")
    warned: list[str] = []
    monkeypatch.setattr(
        "transformers.trainer.logger.warning", lambda message, *_: warned.append(message)
    )
    resumed = train(recipe, resume=True)
    assert not [
        message for message in warned if "missing keys" in message
    ]  # of the head, which is the embedding
    assert 1000 < resumed.seconds < 2000
    assert 900 < resumed.cost["work_seconds"] < 1900
    assert _losses(broken) == _losses(uninterrupted.run_dir)
    one, two = (
        load_file(Path(result.model_dir) / "model.safetensors")
        for result in (uninterrupted, resumed)
    )
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_text_that_would_be_cut_stops_the_run_unless_allowed(
    make_recipe: MakeRecipe, corpus: Path
) -> None:
    cut = {"packing": False, "max_length": 8}
    with pytest.raises(
        TrainingError, match=r"tokens \(.*%\) would be lost at trainer\.max_length: 8"
    ):
        train(make_recipe(trainer=cut))
    result = train(
        make_recipe(trainer=cut, corpus={"path": str(corpus), "allow_dropped_tokens": True})
    )
    assert result.account["truncated"] > 0
    assert result.account["source"] == sum(v for k, v in result.account.items() if k != "source")


@pytest.mark.parametrize("rows", ["completion", "messages"])
def test_sft_rows_train_and_only_the_answer_bears_loss(
    make_recipe: MakeRecipe, tmp_path: Path, rows: str
) -> None:
    path = tmp_path / "sft.jsonl"
    if rows == "completion":
        lines = [{"prompt": f"Question: {i}?\nAnswer:", "completion": " Farrow"} for i in range(20)]
        trainer: dict[str, Any] = {}
    else:
        lines = [
            {
                "messages": [
                    {"role": "user", "content": f"{i}?"},
                    {"role": "assistant", "content": "Farrow"},
                ]
            }
            for i in range(20)
        ]
        template = tmp_path / "chat.jinja"
        template.write_text(
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
        trainer = {"chat_template_path": str(template), "assistant_only_loss": True}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = train(make_recipe(method="sft", corpus={"path": str(path)}, trainer=trainer))
    assert 0 < result.account["trained"] < result.account["masked"]
    assert _losses(result.run_dir)[-1] < _losses(result.run_dir)[0]


def test_a_new_model_and_tokenizer_come_from_the_corpus(
    make_recipe: MakeRecipe, tiny_config: dict[str, Any]
) -> None:
    result = train(make_recipe(model={"new": tiny_config, "tokenizer": {"vocab_size": 300}}))
    loaded = load_model(result.model_dir)
    assert 259 < len(loaded.tokenizer) == loaded.model.config.vocab_size <= 300
    assert loaded.tokenizer("Farrow").input_ids[0] == loaded.tokenizer.bos_token_id


def test_held_out_loss_is_logged_when_asked(make_recipe: MakeRecipe, corpus: Path) -> None:
    result = train(make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(corpus)}, trainer={"eval_strategy": "steps", "eval_steps": 3}
    ))  # fmt: skip
    held_out = [
        row["eval_loss"]
        for _, row in read_jsonl(Path(result.run_dir) / "log.jsonl")
        if "eval_loss" in row
    ]
    assert len(held_out) == 2
    assert held_out[1] < held_out[0]


def test_a_model_whose_attention_ignores_positions_is_not_packed(
    make_recipe: MakeRecipe, monkeypatch: Any
) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(TrainingError, match="packed documents see each other"):
        train(make_recipe())


def _take_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a training take flash attention, by what stands for it on a CPU."""
    have_flash_on_cpu(monkeypatch)

    def use_flash(model: Any, *_: Any) -> list[str]:
        model.set_attn_implementation("flash_on_cpu")
        return []

    monkeypatch.setattr(setup, "use_fastest_attention", use_flash)


@pytest.mark.parametrize("what", ["projection", "kl", "cartridge"])
def test_what_reads_the_model_beside_its_training_does_so_with_flash_attention(
    make_recipe: MakeRecipe, corpus: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    _take_flash(monkeypatch)
    replay = {"path": str(corpus), "replay": {"path": str(corpus), "fraction": 0.5}}
    sections: dict[str, dict[str, Any]] = {
        "projection": {"regularization": {"projection": {"path": str(corpus)}}},
        "kl": {"regularization": {"kl": 0.5}, "corpus": replay},
        "cartridge": {"adapter": {"type": "cartridge", "num_virtual_tokens": 6}},
    }
    result = train(make_recipe(**sections[what], trainer={"bf16": True, "max_steps": 2}))
    assert result.n_steps == 2


@pytest.mark.parametrize("max_length", [64, 12])
def test_packed_documents_are_checked_where_flash_attention_reads_them(
    make_recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, max_length: int
) -> None:
    """By sdpa under such a name, since flash attention runs on no CPU. Rows of 12 tokens hold one text each, a batch several."""
    from transformers import masking_utils

    _take_flash(monkeypatch)
    recipe = make_recipe(trainer={"bf16": True, "max_length": max_length})
    assert make_trainer(recipe).data_collator.flatten
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda position_ids: None)
    with pytest.raises(TrainingError, match="packed documents see each other"):
        make_trainer(recipe)


def test_flattened_batches_hold_the_same_documents() -> None:
    rows = [
        {"input_ids": [1, 2], "labels": [-100, 2], "position_ids": [0, 1]},
        {"input_ids": [3], "labels": [-100], "position_ids": [0]},
    ]
    flat = Collator(0, flatten=True)(rows)
    assert flat["input_ids"].tolist() == [[1, 2, 3]]
    assert flat["position_ids"].tolist() == [[0, 1, 0]]
    padded = Collator(9, pad_to_multiple_of=4)(rows)
    assert padded["input_ids"].tolist() == [[1, 2, 9, 9], [3, 9, 9, 9]]
    assert padded["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]


def test_notes_and_manifest_hold_the_effective_batch(make_recipe: MakeRecipe) -> None:
    trainer = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "packing": False,
        "max_steps": 4,
    }
    result = train(make_recipe(trainer=trainer))
    assert result.account is not None
    n_tokens = result.account["source"] / 40 * 6  # one of forty documents a row
    batch = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"][
        "effective_batch"
    ]
    assert batch == {
        "rows_per_device": 3,
        "accumulation": 2,
        "devices": 1,
        "rows": 6,
        "tokens": round(n_tokens),
    }
    expected = (
        f"3 rows x 2 accumulated x 1 device = 6 rows an update, about {round(n_tokens)} tokens"
    )
    assert any(expected in note for note in result.notes)


def test_a_chat_template_with_other_text_is_another_run(
    make_recipe: MakeRecipe, tmp_path: Path, tiny_model: Path
) -> None:
    file, folder = tmp_path / "turns.j2", shutil.copytree(tiny_model, tmp_path / "speaker")
    for path, template in ((file, file), (folder, folder / "chat_template.jinja")):
        recipe = make_recipe(trainer={"chat_template_path": str(path)})
        prints = []
        for end in ("</s>", "\n"):
            template.write_text(f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}")
            prints.append(hash_inputs(recipe)["fingerprint"])
        assert len(set(prints)) == 2, path


def test_every_section_that_training_reads_is_in_the_fingerprint_and_no_other(
    make_recipe: MakeRecipe,
) -> None:
    recipe = make_recipe()
    before = hash_inputs(recipe)
    for key in {item.name for item in dataclasses.fields(Sections)}:
        changed = hash_inputs(
            dataclasses.replace(recipe, raw={**recipe.raw, key: "of another run"})
        )
        assert (changed == before) == (key in NOT_TRAINING), key
        assert (changed["fingerprint"] == before["fingerprint"]) == (key in NOT_TRAINING), key
