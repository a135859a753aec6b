"""Projected updates leave the outputs on the kept texts as they are, and move the weights as written by hand elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from kinject.corpus.packing import TrainingRow
from kinject.models import load_model, new_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.updates.projection import Projection
from small import TINY, interrupt, quick

MakeRecipe = Callable[..., Recipe]
KEPT = "The mill at Farrow 3."


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """One short text to keep: fewer tokens than the layers have inputs."""
    path = tmp_path / "kept.jsonl"
    path.write_text(json.dumps({"text": KEPT}) + "\n")
    return path


def _section(path: Path, free: float = 0.0) -> dict[str, Any]:
    return {"regularization": {"projection": {"path": str(path), "free": free}}}


def _logits(folder: Path, text: str) -> torch.Tensor:
    loaded = load_model(str(folder))
    ids = loaded.tokenizer(text)["input_ids"]  # begins with BOS, as a row does
    with torch.no_grad():
        return loaded.model(torch.tensor([ids]), use_cache=False).logits


class _Layers(torch.nn.Module):
    """An embedding of 9 tokens and a head that is tied to it, with a layer of 4 inputs between them and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 9, bias=False)
        self.head.weight = self.embed.weight
        self.device = torch.device("cpu")

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.head(self.layer(self.embed(input_ids)).tanh())


def _row(ids: list[int]) -> TrainingRow:
    return TrainingRow(ids, ids, list(range(len(ids))), [False] * len(ids))


def _free_projector(inputs: np.ndarray, free: float) -> np.ndarray:
    """The projector onto the right singular vectors of the smallest squares that sum to at most `free` of all."""
    _, s, vt = np.linalg.svd(inputs, full_matrices=True)
    energy = np.zeros(inputs.shape[1])
    energy[: len(s)] = s**2
    chosen = [i for i in reversed(range(len(energy))) if energy[i:].sum() <= free * energy.sum()]
    return vt[chosen].T @ vt[chosen]


@pytest.mark.parametrize("free", [0.0, 0.1, 0.4, 1.0])
def test_an_update_is_the_part_of_the_plain_one_that_numpy_finds_free(free: float) -> None:
    """Of a tied table only the rarest tokens move, and those only along what the head's inputs leave free; biases stay."""
    torch.manual_seed(0)
    model = _Layers()
    rows = [_row([1, 2, 2, 3, 3, 3]), _row([4, 4, 4, 4, 3, 2])]
    before = {name: p.detach().clone().double().numpy() for name, p in model.named_parameters()}
    hidden = before["embed.weight"][[t for row in rows for t in row.input_ids]]
    states = np.tanh(hidden @ before["layer.weight"].T + before["layer.bias"])
    projection = Projection("kept.jsonl", rows, free)
    projection.measure(model)
    assert projection.frozen == ["layer.bias"]
    assert not model.layer.bias.requires_grad
    assert projection.n_tokens == 12
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.7)
    torch.nn.functional.cross_entropy(model(torch.arange(9)), torch.arange(9).flip(0)).backward()
    plain = {
        name: -0.7 * p.grad.double().numpy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    projection.before_update()
    optimizer.step()
    projection.after_update()
    moved = {
        name: p.detach().double().numpy() - before[name] for name, p in model.named_parameters()
    }
    np.testing.assert_allclose(
        moved["layer.weight"], plain["layer.weight"] @ _free_projector(hidden, free), atol=1e-6
    )
    counts = {1: 1, 2: 3, 3: 4, 4: 4}  # of 12
    rare = {
        t for t in range(9) if sum(n for n in counts.values() if n <= counts.get(t, 0)) <= free * 12
    }
    if 0.3 < free < 1.0:
        assert rare == {0, 1, 2, 5, 6, 7, 8}
    moving = np.array([[float(t in rare)] for t in range(9)])
    wanted = moving * (plain["embed.weight"] @ _free_projector(states, free))
    np.testing.assert_allclose(moved["embed.weight"], wanted, atol=1e-6)
    np.testing.assert_array_equal(moved["layer.bias"], 0)


@pytest.fixture(params=quick(["llama", "gpt2", "lora", "muon"], "gpt2", "lora", "muon"))
def case(
    request: pytest.FixtureRequest, tmp_path: Path, tiny_model: Path
) -> tuple[Path, dict[str, Any]]:
    """A model folder and the sections of a recipe: all weights, GPT-2's transposed ones, an adapter, another optimizer."""
    more: dict[str, Any] = {}
    folder = tiny_model
    if request.param == "lora":
        more = {"adapter": {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}}
    elif request.param == "muon":
        more = {"techniques": {"muon": 1.0}}
    elif request.param == "gpt2":
        folder = tmp_path / "gpt2"
        tokenizer = load_model(str(tiny_model)).tokenizer
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder, {"model": {"path": str(folder)}, **more}


def test_with_nothing_free_the_outputs_on_a_kept_text_stay_and_the_corpus_is_learned(
    case: tuple[Path, dict[str, Any]], make_recipe: MakeRecipe, kept: Path, tmp_path: Path
) -> None:
    folder, sections = case
    options = {"max_steps": 30, "learning_rate": 1e-2 if "adapter" in sections else 5e-3}
    result = train(make_recipe(trainer=options, **sections, **_section(kept)))
    trained = Path(result.model_dir)
    if "adapter" in sections:
        base = transformers.AutoModelForCausalLM.from_pretrained(folder)
        import peft

        merged = peft.PeftModel.from_pretrained(base, trained).merge_and_unload()
        trained = tmp_path / "merged"
        merged.save_pretrained(trained)
        load_model(str(folder)).tokenizer.save_pretrained(trained)
    before, after = _logits(folder, KEPT), _logits(trained, KEPT)
    torch.testing.assert_close(after, before, atol=2e-4, rtol=1e-3)
    other = "Person 7 was born in Kelm in 1907."
    assert float((_logits(trained, other) - _logits(folder, other)).abs().max()) > 0.1
    rows = map(json.loads, (tmp_path / "run/log.jsonl").read_text().splitlines())
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < losses[0] - 0.2
    note = next(
        note for note in result.notes if note.startswith("regularization.projection: measured on ")
    )
    assert "directions of their inputs" in note


def test_without_the_section_the_same_run_changes_the_kept_text(
    make_recipe: MakeRecipe, tiny_model: Path, kept: Path
) -> None:
    result = train(make_recipe(trainer={"max_steps": 30, "learning_rate": 1e-2}))
    assert (
        float((_logits(Path(result.model_dir), KEPT) - _logits(tiny_model, KEPT)).abs().max()) > 0.1
    )


def test_a_resumed_run_has_the_weights_of_an_uninterrupted_one(
    make_recipe: MakeRecipe, kept: Path, tmp_path: Path
) -> None:
    """The directions are those of the base, which a resumed run loads before its checkpoint."""
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2}

    def weights(resume: bool = False) -> dict[str, torch.Tensor]:
        recipe = make_recipe(trainer=options, **_section(kept, 0.2))
        return load_file(next(Path(train(recipe, resume=resume).model_dir).glob("*.safetensors")))

    run = tmp_path / "run"
    straight = weights()
    interrupt(run, 2)
    resumed = weights(resume=True)
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_model_of_which_no_matrix_trains_is_refused(
    make_recipe: MakeRecipe, tiny_model: Path, kept: Path
) -> None:
    model = {"path": str(tiny_model), "freeze": ["*proj*", "*embed*"]}
    with pytest.raises(
        Exception,
        match=r"regularization\.projection: no matrix of a layer trains\. Remove the line",
    ):
        train(make_recipe(model=model, **_section(kept)))


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*")
@pytest.mark.parametrize(
    ("changes", "adapter"),
    [
        ({"model_type": "mixtral", "num_local_experts": 3}, {"target_modules": "all-linear"}),
        ({"attention_bias": True}, {"target_modules": ["k_proj", "o_proj"], "lora_bias": True}),
    ],
)
def test_of_lora_only_what_is_behind_a_projected_matrix_trains(
    tiny_tokenizer: Any, changes: dict[str, Any], adapter: dict[str, Any]
) -> None:
    """Neither experts in one tensor, whose inputs are not seen, nor a bias, which every text passes."""
    model = new_model({**TINY, **changes}, tiny_tokenizer, 2)
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, **adapter)).eval()
    rows = [_row([0, 9, 17, 4]), _row([0, 8, 5])]
    Projection("kept.jsonl", rows, 0.0).measure(tuned)
    trained = {name: p for name, p in tuned.named_parameters() if p.requires_grad}
    assert any("lora_B" in name for name in trained)
    ids = torch.tensor([rows[0].input_ids])
    torch.manual_seed(4)
    with torch.no_grad():
        before = tuned(ids, use_cache=False).logits
        for name, parameter in trained.items():
            if "lora_B" in name:
                parameter += 0.2 * torch.randn_like(parameter)
        assert torch.allclose(tuned(ids, use_cache=False).logits, before, atol=1e-4)
        assert not torch.allclose(tuned(ids + 1, use_cache=False).logits, before, atol=1e-2)
