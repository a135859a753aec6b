"""kinject export --average-with writes the average of two models, exactly, and refuses two that do not belong together."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kinject.cli import main
from kinject.disk import lock_dir
from kinject.errors import DiskError, InputError
from kinject.models import load_model
from kinject.recipe import Recipe
from kinject.train import train
from kinject.train.merge import merge, merge_adapter, rewrite

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]


def test_a_merged_weight_is_the_average_and_the_ends_are_the_models_themselves(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    tuned = train(make_recipe()).model_dir
    done = merge(str(tiny_model), tuned, [0.0, 0.25, 1.0], tmp_path / "merged")
    ours, theirs = load_file(tiny_model / "model.safetensors"), load_file(Path(tuned) / "model.safetensors")
    got = {alpha: load_file(folder / "model.safetensors") for alpha, folder in done.items()}
    for name in ours:
        assert torch.equal(got[0.0][name], ours[name])
        assert torch.equal(got[1.0][name], theirs[name])
        wanted = 0.75 * ours[name].double() + 0.25 * theirs[name].double()
        assert torch.allclose(got[0.25][name].double(), wanted, atol=1e-8)
    loaded = load_model(str(done[0.25]))
    assert loaded.tokenizer.bos_token_id is not None


def test_an_adapter_is_folded_in_before_it_is_averaged(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    adapter = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    tuned = train(make_recipe(adapter=adapter, trainer={"learning_rate": 1e-2})).model_dir
    whole = merge(str(tiny_model), tuned, [1.0], tmp_path / "merged")[1.0]
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.allclose(load_model(str(whole)).model(ids).logits, load_model(tuned).model(ids).logits, atol=1e-5)


ADAPTERS: Mapping[str, tuple[Mapping[str, Any], bool]] = {
    "all layers, with DoRA": ({"target_modules": "all-linear", "use_dora": True}, False),
    "a whole head beside it, untied": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, True),
    "embeddings that were the head": ({"target_modules": ["embed_tokens"], "rank_pattern": {"embed_tokens": 2}}, True),
    "a bias and some tokens": ({"target_modules": ["v_proj"], "trainable_token_indices": [1, 5], "bias": "all"}, False),
}


@pytest.mark.filterwarnings("ignore::UserWarning:peft.*")  # on tied embeddings
@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_folded_in_by_shards_gives_the_logits_of_peft(
    case: str, tiny_model: Path, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    options, tied = ADAPTERS[case]
    base, adapter, out = tmp_path / "base", tmp_path / "adapter", tmp_path / "out"
    config = load_model(str(tiny_model)).model.config
    config.tie_word_embeddings, config.attention_bias = tied, True
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(base, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    tiny_tokenizer.save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, **options)).eval()
    with torch.no_grad():
        for value in tuned.parameters():
            if value.requires_grad:
                value += 0.2 * torch.randn_like(value)
    tuned.save_pretrained(adapter)
    for folder, kept in (out, "auto"), (tmp_path / "whole", "float32"):
        folder.mkdir()
        merge_adapter(adapter, folder, kept)
    whole = load_model(str(tmp_path / "whole")).model
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():  # peft's own merge changes the head with the embedding where they are tied
        assert torch.allclose(whole(ids).logits, tuned(ids).logits, atol=1e-5)
    folded = AutoModelForCausalLM.from_pretrained(out)
    assert folded.dtype == torch.bfloat16
    ours, theirs = folded.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value.to(torch.bfloat16)) for name, value in theirs.items())  # rounded once


def test_a_model_from_a_base_in_bfloat16_is_saved_so_and_from_others_as_it_was_trained(
    make_recipe: MakeRecipe, tiny_model: Path, tmp_path: Path
) -> None:
    for name, model in ("base", {}), ("plain", {"save_dtype": "float32"}):
        load_model(str(tiny_model)).model.to(torch.bfloat16).save_pretrained(tiny_model)
        section = {"path": str(tiny_model), **model}
        train(make_recipe(run_dir=str(tmp_path / name), model=section, trainer={"max_steps": 2}))
    rounded, whole = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("base", "plain"))
    assert all(torch.equal(rounded[name], value.to(torch.bfloat16)) for name, value in whole.items())
    assert {value.dtype for value in whole.values()} == {torch.float32}
    configs = [
        json.loads((tmp_path / name / "model" / "config.json").read_text())["dtype"] for name in ("base", "plain")
    ]
    assert configs == ["bfloat16", "float32"]


def test_strangers_are_not_averaged(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    config = AutoConfig.from_pretrained(tiny_model)
    config.intermediate_size += 8
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, other)
    with pytest.raises(InputError, match=r"mlp\.\w+\.weight differs .* in name or shape"):
        merge(str(tiny_model), str(other), [0.5], tmp_path / "merged")
    with pytest.raises(InputError, match=r"no config\.json in this folder"):
        merge(str(tiny_model), str(tmp_path), [0.5], tmp_path / "merged")
    with pytest.raises(InputError, match=r"--alpha: found 1\.5"):
        merge(str(tiny_model), str(other), [1.5], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_command_says_where_each_average_lies(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logging.basicConfig", lambda **_: None)  # it would outlive this test
    out = tmp_path / "merged"
    assert (
        main(["export", str(tiny_model), "--average-with", str(tiny_model), "--alpha", "0.5", "--out", str(out)]) == 0
    )
    assert capsys.readouterr().out == f"alpha 0.5: {out / 'alpha-0.5'}\n"
    assert main(["export", str(tmp_path / "absent"), "--average-with", str(tiny_model)]) == 2
    assert "no *.safetensors" in capsys.readouterr().err


def test_two_merges_into_one_folder_do_not_mix(tiny_model: Path, tmp_path: Path) -> None:
    with lock_dir(tmp_path / "merged"), pytest.raises(DiskError, match="in use by process"):
        merge(str(tiny_model), str(tiny_model), [0.5], tmp_path / "merged")
    assert not (tmp_path / "merged" / "alpha-0.5").exists()


def test_weights_that_are_not_finite_are_not_averaged(tiny_model: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(tiny_model, tuned)
    weights = load_file(tuned / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name][3, 3] = float("inf")
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    for pair in ((tiny_model, tuned), (tuned, tiny_model)):
        with pytest.raises(InputError, match=rf"tuned/model\.safetensors: {re.escape(name)} holds a value that is not"):
            merge(str(pair[0]), str(pair[1]), [0.5], tmp_path / "merged")
    large = load_file(tiny_model / "model.safetensors")
    large[name][3, 3] = 1e38
    save_file(large, tiny_model / "model.safetensors", {"format": "pt"})
    weights[name][3, 3] = 0.0
    save_file({key: value.half() for key, value in weights.items()}, tuned / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"averaged with .* at alpha 0\.5 is out of its dtype's range"):
        merge(str(tiny_model), str(tuned), [0.5], tmp_path / "merged")
    assert not any((tmp_path / "merged").glob("[!.]*"))


def test_tensors_written_one_by_one_are_read_as_those_that_the_library_wrote(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "weight": torch.randn(6, 4), "odd": torch.randn(3), "bit": torch.tensor(True), "half": torch.randn(5).to(torch.bfloat16),
        "eighth": torch.randn(7).to(torch.float8_e4m3fn), "count": torch.arange(3), "byte": torch.arange(9, dtype=torch.uint8),
        "turned": torch.randn(4, 6).T, "scalar": torch.tensor(2.5, dtype=torch.float64), "none": torch.zeros(0, 4),
    }  # fmt: skip
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = load_file(tmp_path / "model.safetensors")
    (tmp_path / "out").mkdir()

    def stretch(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        copies = {f"{name}.{'long' * 40}.{index}": tensor for index in range(2)} if name == "odd" else {}
        return {name: tensor, **copies}

    rewrite(tmp_path, tmp_path / "out", stretch)
    actual = load_file(tmp_path / "out/model.safetensors")
    assert actual.keys() - expected.keys() == {f"odd.{'long' * 40}.{index}" for index in range(2)}
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert actual[name].shape == tensor.shape
        assert torch.equal(actual[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8))
