"""No pickle that kinject finds on its way is ever run: every place that one could be read from holds a trap here."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from kinject.disk import write_sha256sums
from kinject.errors import InputError, KinjectError, TrainingError
from kinject.eval.retrieval import DenseRetriever
from kinject.models import LoadOptions, load_model, load_tokenizer
from kinject.recipe import read_recipe, yaml_lines
from kinject.recipe.sections import RetrievalSection
from kinject.train import train
from kinject.train.checkpoints import checkpoints, mark_complete
from kinject.types import Passage
from small import interrupt, save_tiny_embedder

from .traps import Trap, torch_trap, trap

quiet = pytest.mark.filterwarnings("ignore")  # the library warns while it is imported


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """What every trap of a test makes."""
    return tmp_path / "sprung"


def test_the_traps_work(sprung: Path, tmp_path: Path) -> None:
    pickle.loads(trap(sprung))  # noqa: S301
    assert sprung.is_dir()
    sprung.rmdir()
    (tmp_path / "file.pt").write_bytes(torch_trap(sprung))
    torch.load(tmp_path / "file.pt", weights_only=False)
    assert sprung.is_dir()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_model_whose_weights_are_a_pickle_is_refused_by_name(
    tiny_model: Path, sprung: Path, name: str
) -> None:
    (tiny_model / "model.safetensors").unlink()
    (tiny_model / name).write_bytes(torch_trap(sprung))
    with pytest.raises(InputError, match=rf"no \*\.safetensors.*{name}, a pickle"):
        load_model(str(tiny_model), LoadOptions(device="cpu"))
    assert not sprung.exists()


def test_pickles_beside_safetensors_are_not_looked_at(tiny_model: Path, sprung: Path) -> None:
    names = (
        "pytorch_model.bin",
        "training_args.bin",
        "optimizer.pt",
        "rng_state.pth",
        "tokenizer.pkl",
        "vocab.bin",
    )
    for name in names:
        (tiny_model / name).write_bytes(torch_trap(sprung))
    load_model(str(tiny_model), LoadOptions(device="cpu"))
    load_tokenizer(str(tiny_model))
    assert not sprung.exists()


def test_an_index_that_names_pickles_is_refused(tiny_model: Path, sprung: Path) -> None:
    weights = load_file(tiny_model / "model.safetensors")
    (tiny_model / "model.safetensors").rename(tiny_model / "model-00001-of-00002.safetensors")
    (tiny_model / "model-00002-of-00002.bin").write_bytes(torch_trap(sprung))
    named = dict.fromkeys(weights, "model-00002-of-00002.bin")
    (tiny_model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": named})
    )
    with pytest.raises(InputError, match="some of its weights are pickles"):
        load_model(str(tiny_model), LoadOptions(device="cpu"))
    assert not sprung.exists()


def test_an_adapter_that_is_a_pickle_is_refused(
    tiny_model: Path, tmp_path: Path, sprung: Path
) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = tmp_path / "adapter"
    base = load_model(str(tiny_model), LoadOptions(device="cpu")).model
    get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"])
    ).save_pretrained(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    (adapter / "adapter_model.bin").write_bytes(torch_trap(sprung))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": str(tiny_model)})
    )
    with pytest.raises(
        InputError, match=r"no adapter_model\.safetensors.*adapter_model\.bin, a pickle"
    ):
        load_model(str(adapter), LoadOptions(device="cpu"))
    assert not sprung.exists()


def test_no_pickle_of_an_interrupted_run_is_loaded(
    tiny_model: Path,
    write_rows: Callable[..., Path],
    write: Callable[..., Path],
    tmp_path: Path,
    sprung: Path,
) -> None:
    corpus = write_rows(
        "corpus.jsonl", [{"text": f"Arden was born in Lowmere in {1900 + n}."} for n in range(8)]
    )
    recipe = write(
        "recipe.yaml",
        f"""run_dir: {tmp_path}/run
model: {{path: {tiny_model}, device: cpu}}
corpus: {{path: {corpus}, cache_dir: {tmp_path}/tokens}}
trainer: {{max_steps: 4, save_steps: 2, per_device_train_batch_size: 2, learning_rate: 1e-3, save_strategy: steps}}
""",
    )
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoint-2"
    train(read_recipe(recipe, verb="train"))
    interrupt(run, 2)
    held = [path for path in sorted(checkpoint.iterdir()) if path.suffix in (".pt", ".pth", ".bin")]
    assert {path.name for path in held} == {
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
    }  # no training_args.bin
    for path in held:
        kept = path.read_bytes()
        path.write_bytes((trap if path.name == "scheduler.pt" else torch_trap)(sprung))
        mark_complete(checkpoint)
        with pytest.raises(
            TrainingError, match=r"checkpoint-2.*could run code.*--resume.*--overwrite"
        ):
            train(read_recipe(recipe, verb="train"), resume=True)
        assert not sprung.exists(), path.name
        path.write_bytes(kept)
    weights = checkpoint / "model.safetensors"
    weights.rename(tmp_path / "kept")
    (checkpoint / "pytorch_model.bin").write_bytes(torch_trap(sprung))
    mark_complete(checkpoint)
    with pytest.raises(KinjectError, match="checkpoint-2"):
        train(read_recipe(recipe, verb="train"), resume=True)
    assert [step for step, _ in checkpoints(run)] == [2]
    (tmp_path / "kept").rename(weights)
    (checkpoint / "training_args.bin").write_bytes(torch_trap(sprung))
    mark_complete(checkpoint)
    tokens = [path for path in (tmp_path / "tokens").rglob("*") if path.is_file()]
    assert tokens
    for path in tokens:
        path.write_bytes(trap(sprung))
    assert (
        train(read_recipe(recipe, verb="train"), resume=True).n_steps == 4
    )  # what is damaged there is made anew
    assert not sprung.exists()


@quiet
class TestEmbedder:
    """Dense retrieval reads a folder of its own kind, and a cache."""

    PASSAGES = (Passage("p0", "d0", 0, 5, "Arden"), Passage("p1", "d1", 0, 4, "Bryn"))

    @pytest.fixture
    def embedder(self, tmp_path: Path, tiny_tokenizer: Any) -> Path:
        return save_tiny_embedder(tmp_path / "embedder", tiny_tokenizer, longest=64, projected=8)

    def retriever(self, embedder: Path, folder: Path) -> DenseRetriever:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("kinject.eval.retrieval.INDICES", folder / "cache")
            return DenseRetriever(
                self.PASSAGES, RetrievalSection(documents=(), kind="dense", embedder=str(embedder))
            )

    def test_weights_that_are_pickles_are_refused(
        self, embedder: Path, sprung: Path, tmp_path: Path
    ) -> None:
        self.retriever(embedder, tmp_path)
        weights = sorted(embedder.rglob("model.safetensors"))
        assert len(weights) == 2
        for path in weights:
            path.rename(path.with_name("kept"))
            path.with_name("pytorch_model.bin").write_bytes(torch_trap(sprung))
            with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle"):
                self.retriever(embedder, tmp_path)
            path.with_name("kept").rename(path)
        assert not sprung.exists()

    def test_a_module_of_its_own_is_refused(
        self, embedder: Path, sprung: Path, tmp_path: Path
    ) -> None:
        (embedder / "evil.py").write_text(
            f"import os\nos.mkdir({str(sprung)!r})\nclass Evil: pass\n"
        )
        listed = json.loads((embedder / "modules.json").read_text())
        listed[1]["type"] = "evil.Evil"
        (embedder / "modules.json").write_text(json.dumps(listed))
        with pytest.raises(InputError, match=r"evil\.Evil.*not part of Sentence Transformers"):
            self.retriever(embedder, tmp_path)
        assert not sprung.exists()

    def test_a_pickle_in_the_cache_of_vectors_is_refused(
        self, embedder: Path, sprung: Path, tmp_path: Path
    ) -> None:
        retriever = self.retriever(embedder, tmp_path)
        np.save(retriever.path, np.array([Trap(sprung)], dtype=object), allow_pickle=True)
        write_sha256sums(retriever.path.parent)
        with pytest.raises(KinjectError, match="damaged index"):
            self.retriever(embedder, tmp_path)
        retriever.path.write_bytes(trap(sprung))
        write_sha256sums(retriever.path.parent)
        with pytest.raises(KinjectError, match="damaged index"):
            self.retriever(embedder, tmp_path)
        assert not sprung.exists()


def test_data_sets_that_are_pickles_are_refused(tmp_path: Path, sprung: Path) -> None:
    from kinject.heap import read_documents

    for name in (
        "data.pkl",
        "data.pickle",
        "data.pt",
        "data.npy",
        "data.parquet",
        "data.jsonl",
        "data.csv",
    ):
        (tmp_path / name).write_bytes(trap(sprung))
        with pytest.raises(KinjectError):
            list(read_documents(tmp_path / name))
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "x"})
    )
    (saved / "dataset_info.json").write_text("{}")
    (saved / "data.arrow").write_bytes(trap(sprung))
    with pytest.raises(KinjectError):
        list(read_documents(saved))
    assert not sprung.exists()


def test_the_source_names_no_way_to_load_a_pickle() -> None:
    import ast

    source = Path(__file__).parents[2] / "src" / "kinject"
    loaders = {"pickle", "cPickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
    importers = set()
    for path in source.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            names = (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import | ast.ImportFrom)
                else []
            )
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if loaders & {name.partition(".")[0] for name in names}:
                importers.add(path.relative_to(source).as_posix())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                called = ast.unparse(node.func)
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert called not in ("pd.read_pickle", "pandas.read_pickle"), (
                    f"{path}:{node.lineno}"
                )
                assert called != "torch.load" or given.get("weights_only") == "True", (
                    f"{path}:{node.lineno}"
                )
                assert called != "np.load" or given.get("allow_pickle") == "False", (
                    f"{path}:{node.lineno}"
                )
                assert called != "yaml.load" or given.get("Loader") in ("_Loader", "_SafeLoader"), (
                    f"{path}:{node.lineno}"
                )
                assert given.get("trust_remote_code", "False") == "False", f"{path}:{node.lineno}"
                if called.endswith(
                    ("AutoConfig.from_pretrained", "AutoTokenizer.from_pretrained")
                ) or ("AutoModel" in called and called.endswith("from_pretrained")):
                    assert given.get("trust_remote_code") == "False", f"{path}:{node.lineno}"
    assert issubclass(yaml_lines._Loader, yaml.SafeLoader)
    assert importers == {"train/checkpoints.py", "models/load.py"}  # the name of an error
