"""A model folder whose parts do not belong together is refused with the file and the reason, before anything is made of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kinject.disk import write_sha256sums
from kinject.errors import InputError, KinjectError
from kinject.llm.transformers import weights_identity
from kinject.models import (
    base_of_adapter,
    check_model,
    hash_with_base,
    load_config,
    load_tokenizer,
    model_hash,
)


def _config(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _weights(name: str, tensor: torch.Tensor | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
        save_file(weights, path, {"format": "pt"})

    return change


def _tokenizer(**values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _file(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: folder.joinpath(name).write_bytes(data) and None


def _pipe(folder: Path) -> None:
    folder.joinpath("config.json").unlink()
    os.mkfifo(folder / "config.json")


def _header(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(size.to_bytes(8, "little") + path.read_bytes()[8:])

    return change


def _index(**files: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        owners = {**dict.fromkeys(weights, "a.safetensors"), **files}
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": owners})
        )

    return change


def _flip(folder: Path) -> None:
    write_sha256sums(folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_config(vocab_size=77), "embed_tokens.weight has the shape"),
        (_config(intermediate_size=24), "config.json asks for"),
        (_config(num_hidden_layers=3), "weights missing for model.layers.2"),
        (_config(auto_map={"AutoConfig": "code.C"}), "auto_map: it comes with Python code"),
        (_weights("model.norm.weight", torch.ones(3)), "model.norm.weight has the shape"),
        (_weights("model.norm.weight", None), "weights missing for model.norm.weight"),
        (
            _weights("model.layers.1.self_attn.new.weight", torch.ones(3)),
            "which config.json leaves out of the model",
        ),
        (_tokenizer(model={"type": "BPE", "vocab": {}, "merges": []}), "it makes no tokens"),
        (_tokenizer(model={"type": "nope"}), "no usable tokenizer"),
        (_config(model_type="t5"), "Unrecognized configuration class"),
        (_config(model_type="nope"), "no usable model"),
        (_config(hidden_size=0), "tiny-model"),
        (_config(dtype="nope"), "no usable model"),
        (_config(num_hidden_layers=10**6), "layers, the files hold"),
        (
            _config(quantization_config={"quant_method": "gptq", "bits": 4}),
            "declares quantised weights",
        ),
        (_file("tokenizer.json", b"\xff"), "no usable tokenizer"),
        (_file("config.json", b"[" * 100_000), "config.json: damaged: not JSON"),
        (_file("tokenizer_config.json", b"[]"), "an object is needed"),
        (_file("generation_config.json", b'{"temperature": "x"}'), "a number is needed"),
        (_file("chat_template.jinja", b"{% for x in"), "not a Jinja template"),
        (_file("model.safetensors", b""), "damaged, or no safetensors file"),
        (_pipe, "found a pipe, expected a file"),
        (_header(2**63), "damaged, or no safetensors file"),
        (
            _index(**{"model.norm.weight": "../a.safetensors"}),
            "which is no safetensors file in this folder",
        ),
        (
            _index(**{"model.norm.weight": "gone.safetensors"}),
            "names gone.safetensors, which is missing",
        ),
        (
            _index(**{"model.norm.weight": f"{'w' * 260}.safetensors"}),
            "which is missing",
        ),
        (_index(**{"model.norm.weight": "a.bin"}), "some of its weights are pickles"),
        (_index(lacking="a.safetensors"), "names lacking, which its file lacks"),
        (_flip, "its bytes are not those that were written"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    change: Callable[[Path], None], words: str, tiny_model: Path
) -> None:
    check_model(tiny_model)
    change(tiny_model)
    with pytest.raises(KinjectError, match=words.replace("[", r"\\[")):
        check_model(tiny_model)


def test_a_sound_folder_is_checked_again_once_a_file_of_it_changes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(import_module("kinject.models.load"), "_check_base", checked.append)
    tokenizer = tiny_model / "tokenizer.json"
    old = tokenizer.stat()

    def _rewrite() -> None:
        tokenizer.write_bytes(tokenizer.read_bytes().replace(b"a", b"b"))
        os.utime(tokenizer, ns=(old.st_atime_ns, old.st_mtime_ns))

    changes: list[Callable[[], object]] = [
        _rewrite,
        lambda: tokenizer.chmod(0o400),
        lambda: (tiny_model / "more").touch(),
        lambda: (tiny_model / "to-itself").symlink_to("to-itself"),
        (tiny_model / "more").unlink,
    ]
    for change in changes:
        for _ in range(3):
            check_model(tiny_model)
        change()
        # As in a run: hours, or another command, lie between.
        time.sleep(0.02)
    check_model(tiny_model)
    assert checked == [tiny_model] * (len(changes) + 1)


def test_adapters_on_one_another_are_no_chain_without_end(tmp_path: Path) -> None:
    bases = {"a": "b", "b": "c", "c": "a", "end": "nothing-here"}
    for name, base in bases.items():
        (tmp_path / name).mkdir()
        text = json.dumps({"base_model_name_or_path": str(tmp_path / base)})
        (tmp_path / name / "adapter_config.json").write_text(text)
    for name in "abc":
        with pytest.raises(InputError, match="as its base model"):
            base_of_adapter(tmp_path / name / "adapter_config.json")
    found = base_of_adapter(tmp_path / "end" / "adapter_config.json")
    assert found == str(tmp_path / "nothing-here")


def test_of_the_folder_of_a_run_the_message_names_its_model(
    tiny_model: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(InputError, match=f"^{run}: no config.json.*save_pretrained wrote; make"):
        check_model(run)
    (run / "model").symlink_to(tiny_model)
    for read in (check_model, load_config, load_tokenizer):
        with pytest.raises(InputError, match=f"folder of a run, whose model is {run}/model: give"):
            read(str(run))


def test_the_hash_of_an_adapter_with_its_base_changes_with_either(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "model.safetensors").write_bytes(b"1")
    config = {"base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "adapter_model.safetensors").write_bytes(b"a")
    # Answers and predictions of plain models keep the names that they have.
    assert hash_with_base(base) == model_hash(base)
    first = hash_with_base(adapter)
    assert weights_identity(str(adapter)) == first
    (base / "model.safetensors").write_bytes(b"2")
    second = hash_with_base(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"b")
    assert len({first, second, hash_with_base(adapter)}) == 3
    config["base_model_name_or_path"] = "org/name"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert hash_with_base(adapter) == model_hash(adapter)
