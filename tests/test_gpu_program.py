"""The program that measures a GPU runs through on a CPU, survives what a GPU does to a process, and writes its page."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/gpu"
MODULES = ("run", "measures", "proofs", "real", "training", "varlen", "page", "packages")
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program's modules, which import one another by their plain names."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: importlib.import_module(name)
    for name in MODULES:
        sys.modules.pop(name, None)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file, which kinject's own reader would read with kinject imported."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _dry_run(results: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(FOLDER / "run.py"),
        "--tiny",
        "--results",
        str(results),
        *arguments,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_dry_run_measures_writes_its_page_and_resumes(tmp_path: Path, forked: None) -> None:
    cases = [
        "attention/sdpa",
        "attention/flash_attention_2",
        "train/1B full/kinject",
        "train/1B full/bare",
    ]
    done = _dry_run(
        tmp_path, "--only", *cases, "--page", str(tmp_path / "gpu.md"), "--minutes", "600"
    )
    assert "3 done, 1 failed, 0 wait for the next run" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    entries = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(entries) == 4
    results = {entry["case"]: entry for entry in entries}
    assert results["attention/flash_attention_2"]["reason"].endswith(
        "needs an NVIDIA GPU, and the model is on cpu"
    )
    assert results["attention/sdpa"]["values"]["loss_difference"] == 0
    assert results["attention/sdpa"]["values"]["isolation"] < 1e-5
    trained = results["train/1B full/kinject"]["values"]
    assert trained["tokens_per_second"] > 0
    assert trained["planned_gib"] > 0
    assert (
        trained["flops_per_token"]
        == results["train/1B full/bare loop"]["values"]["flops_per_token"]
    )
    page = (tmp_path / "gpu.md").read_text()
    for text in (
        "A dry run on a CPU",
        "| 1B full | kinject | sdpa |",
        "| attention/flash_attention_2 | RuntimeError",
    ):
        assert text in page
    assert all(len(line) <= 120 or line.startswith("|") for line in page.splitlines())
    again = _dry_run(tmp_path, "--only", *cases)
    assert "0 done, 0 failed, 0 wait" in again.stdout
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4


@pytest.mark.soak
def test_every_case_of_a_dry_run_is_measured_or_says_why_not(tmp_path: Path, program: Any) -> None:
    measures = program("measures")
    _dry_run(tmp_path, "--page", str(tmp_path / "gpu.md"), "--minutes", "6000")
    results = program("run").read_results(tmp_path / "results.jsonl")
    assert list(results) == list(measures.CASES)
    failed = {
        name: entry["reason"] for name, entry in results.items() if entry["status"] == "failed"
    }
    known = (
        "needs an NVIDIA GPU",
        "needs a GPU",
        "on the CPU",
        "backward on CPU",
        "a newer GPU",
        "lm_eval",
        "liger",
    )
    assert {
        name: reason for name, reason in failed.items() if not any(text in reason for text in known)
    } == {}


def _hang(_: Any) -> dict[str, Any]:
    time.sleep(3600)
    return {}


def _die(*_: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def _run_out_of_memory(_: Any) -> dict[str, Any]:
    import torch

    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")


def _fake_cases(measures: ModuleType) -> dict[str, Any]:
    case = measures.Case
    return {
        "good": case("a", lambda setting: {"figure": 1}, 0, 900), "hangs": case("a", _hang, 0, 0.005),
        "dies": case("b", _die, 0, 900), "memory": case("b", _run_out_of_memory, 0, 900),
        "last": case("b", lambda setting: {"figure": 2}, 0, 900),
    }  # fmt: skip


def test_a_case_that_hangs_dies_or_needs_too_much_is_written_down_and_stops_nothing(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, measures, training = program("run"), program("measures"), program("training")
    monkeypatch.setattr(measures, "CASES", _fake_cases(measures))
    monkeypatch.setattr(run, "LEAST", 0.0)
    results, setting = tmp_path / "results.jsonl", training.Setting("cpu", tmp_path, True)
    waiting = run.run_cases(
        list(measures.CASES), setting, results, time.monotonic() + 3000, forked=True
    )
    assert waiting == []
    entries = run.read_results(results)
    assert {name: entry["status"] for name, entry in entries.items()} == {
        "good": "done", "hangs": "failed", "dies": "failed", "memory": "failed", "last": "done"
    }  # fmt: skip
    assert entries["hangs"]["reason"] == "took longer than 0 s"
    assert entries["dies"]["reason"] == "ended by signal 9"
    assert entries["memory"]["reason"] == "OutOfMemoryError: out of memory"
    assert run.choose([], entries, retry=False) == []
    assert run.choose(["b"], entries, retry=True) == ["dies", "memory"]
    results.write_text(results.read_text()[:-5])  # a kill in the middle of the last line
    assert run.choose([], run.read_results(results), retry=False) == ["last"]
    assert run.run_cases(["last"], setting, results, time.monotonic() + 3000, forked=True) == []
    assert run.read_results(results)["last"]["values"] == {"figure": 2}


def test_a_case_that_the_minutes_cut_short_waits_for_the_next_run(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, measures, training = program("run"), program("measures"), program("training")
    case = measures.Case
    monkeypatch.setattr(
        measures, "CASES", {"long": case("a", _hang, 0, 100), "far": case("a", _hang, 50, 100)}
    )
    monkeypatch.setattr(run, "LEAST", 0.0)
    results, setting = tmp_path / "results.jsonl", training.Setting("cpu", tmp_path, True)
    waiting = run.run_cases(["long", "far"], setting, results, time.monotonic() + 0.5, forked=True)
    assert waiting == ["long", "far"]
    assert run.read_results(results) == {}


def test_the_page_awaits_a_run_until_there_is_one(program: Any) -> None:
    text = (ROOT / "docs/gpu.md").read_text("utf-8")
    if "await their first run" in text:
        assert text == program("page").render({})
    else:
        assert "A dry run" not in text


def test_a_table_of_results_is_computed_from_the_figures(program: Any) -> None:
    versions = {"torch": "2.11.0", "trl": None}
    machine = {"versions": versions, "python": "3.12", "cores": 16, "device": "cuda", "gpu": "NVIDIA H200", "capability": "9.0",
               "cuda": "13.0", "memory_gib": 139.7, "matmul_tflops": 780.0, "copy_tb_s": 4.3, "auto": ["flash"]}  # fmt: skip
    ours = {"tokens_per_second": 9000.0, "flops_per_token": 4.8e10, "peak_gib": 100.0, "planned_gib": 95.0, "rows": 2,
            "attention": "flash"}  # fmt: skip
    theirs = {**ours, "tokens_per_second": 6000.0, "attention": "sdpa"}
    values = {"machine": machine, "train/8B full/kinject": ours, "train/8B full/SFTTrainer": theirs}
    results = {
        name: {"case": name, "status": "done", "values": one, "tiny": False}
        for name, one in values.items()
    }
    page = program("page").render(results)
    assert (
        "| 8B full | kinject | flash | 2 | 9,000 | 44% | 100.0 | 1.00 |" in page
    )  # 9,000 x 4.8e10 of 989e12
    assert "| 8B full | SFTTrainer | sdpa | 2 | 6,000 | 29% | 100.0 | 1.50 |" in page
    assert "| 8B full | 95.0 | 100.0 | 0.95 |" in page
    assert "3 of 56 cases are measured" in page


def test_the_operations_of_a_token_are_those_of_its_products(
    program: Any, tiny_tokenizer: Any
) -> None:
    from torch import nn

    from kinject.models import new_model

    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "model_type": "llama"}  # fmt: skip
    model = new_model(fields, tiny_tokenizer, 0)
    products = sum(
        module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear)
    )
    assert program("training").flops_per_token(model, "full", 0) == 6 * products
    assert program("training").flops_per_token(model, "LoRA", 100) == 4 * products + 200


def _kernel_by_loops(
    q: Any, k: Any, v: Any, offsets: Any, _: Any, longest: int, __: int, **options: Any
) -> Any:
    """Torch's variable-length attention, one document after the other."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    assert options["window_size"] == (-1, 0)
    parts = []
    for start, end in itertools.pairwise(offsets.tolist()):
        assert end - start <= longest
        one = (part[start:end].transpose(0, 1)[None] for part in (q, k, v))
        out = scaled_dot_product_attention(*one, is_causal=True, scale=options["scale"])
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def test_torchs_varlen_attention_reads_packed_rows_as_sdpa_does(
    program: Any, tiny_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.nn.attention import varlen as kernels

    from kinject.models import new_model

    fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "model_type": "qwen3", "head_dim": 8}  # fmt: skip
    monkeypatch.setattr(kernels, "varlen_attn", _kernel_by_loops)
    model = new_model(fields, tiny_tokenizer, 0, "sdpa").eval()
    ids = torch.arange(5, 27).reshape(2, 11)
    positions = torch.tensor([[*range(4), *range(7)], [*range(9), *range(2)]])

    def read() -> Any:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()

    expected = read()
    program("varlen").register()
    model.set_attn_implementation("varlen")
    assert float((read() - expected).norm() / expected.norm()) < 0.01


def test_the_packages_that_travel_are_those_that_the_calls_need(program: Any) -> None:
    run, packages = program("run"), program("packages")
    in_the_image = {"torch", "numpy", "tokenizers"}  # what torch and transformers bring with them
    assert set(run.NEEDED) - in_the_image <= set(packages.ROOTS)
    # What has no wheel must not be asked for: pip would end before it has downloaded anything.
    needs = ["sqlitedict", "word2number>=1", "bm25s>=0.3", "torch>=2.8"]
    assert packages.to_fetch(needs, {}, "3.12") == {"bm25s": "bm25s>=0.3"}


def test_a_packed_wheel_unpacks_to_what_is_needed_and_half_a_one_is_not_taken(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, packages = program("run"), program("packages")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    wheel = tmp_path / "carried_thing-2.1-py3-none-any.whl"
    kept = ("carried_thing/__init__.py", "carried_thing/data/small_en.txt")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (*kept, "carried_thing/tests/test_it.py", "carried_thing/core.pyx"):
            archive.writestr(name, "x = 1\n" * 50)
    content = wheel.read_bytes()
    monkeypatch.setattr(packages.tarfile.TarFile, "addfile", _die)
    killed = os.fork()
    if not killed:
        packages.shrink(wheel, "130")
    os.waitpid(killed, 0)
    monkeypatch.undo()
    assert wheel.read_bytes() == content
    assert not list(tmp_path.glob("*.tar.xz"))
    packages.shrink(wheel, "130")
    assert [path.suffixes[-2:] for path in tmp_path.iterdir()] == [[".tar", ".xz"]]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    site = tmp_path / "site"
    assert run.unpack_wheels(tmp_path, site) == ["carried_thing 2.1"]
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(site)) for path in files) == sorted(kept)


HIDES_THE_OTHERS = """
import re, sys, tomllib
from pathlib import Path
sys.path.insert(0, "benchmarks/gpu")
from run import NEEDED
lines = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
hidden = {re.split(r"[^\\w-]", line)[0].lower() for line in lines} - set(NEEDED)
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in hidden:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
sys.meta_path.insert(0, Hide())
from kinject import augment
from kinject.corpus.grading import matches
print(sorted(hidden), augment(sys.argv[1]).n_rows, matches("It opened on 3 May 1987.", ["3 May 1987"]))
"""


def test_the_study_of_call_2_needs_no_other_package(tmp_path: Path) -> None:
    """Paraphrases are checked and written answers graded before a first training: what lacks there costs the whole call."""
    documents = read_jsonl(ROOT / "data/company/documents.jsonl")[:3]
    ids = {row["id"] for row in documents}
    rows = read_jsonl(ROOT / "data/company/paraphrases.jsonl")
    recipe = (ROOT / "recipes/company/augment.yaml").read_text("utf-8")
    recipe = recipe.replace("runs/company/augment", str(tmp_path / "run"))
    for name, few in (
        ("documents", documents),
        ("paraphrases", [row for row in rows if row["document_id"] in ids]),
    ):
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in few), "utf-8")
        recipe = recipe.replace(f"data/company/{name}.jsonl", str(file))
    (tmp_path / "augment.yaml").write_text(recipe, "utf-8")
    done = subprocess.run(
        [sys.executable, "-c", HIDES_THE_OTHERS, str(tmp_path / "augment.yaml")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert "'openai'" in done.stdout
    assert done.stdout.rstrip().endswith("True")


def test_a_machine_without_the_packages_is_reported_at_once(
    tmp_path: Path,
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = program("run")
    real = run.metadata.version
    versions = {"transformers": "5.17.0", "torch": "2.11.0+cu130"}

    def version(name: str) -> str:
        if name == "trl":
            raise run.metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(run.metadata, "version", version)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = tmp_path / "gpu.md"
    page.write_text("measured before")
    assert run.main(["--results", str(tmp_path), "--page", str(page)]) == 2
    assert page.read_text() == "measured before"
    printed = capsys.readouterr().out
    assert "lacking: transformers: 5.17.0 is installed, needed: <6,>=5.21" in printed
    assert "lacking: trl: not installed" in printed
    assert "torch" not in printed.replace("transformers", "")
    assert not (tmp_path / "results.jsonl").exists()


def test_cases_run_in_the_order_in_which_they_are_asked_for(program: Any) -> None:
    run = program("run")
    chosen = run.choose(["eval", "train/8B full", "machine", "eval/kinject"], {}, retry=False)
    assert chosen == [
        "eval/kinject", "eval/lm-evaluation-harness",
        "train/8B full/kinject", "train/8B full/bare loop", "train/8B full/SFTTrainer", "machine",
    ]  # fmt: skip
    for finished, left in ((False, ["real"]), (True, [])):
        real = {"case": "real", "status": "done", "values": {"stages": 4, "finished": finished}}
        assert run.choose(["real"], {"real": real}, retry=False) == left
    with pytest.raises(SystemExit, match="--only trian: no case"):
        run.choose(["trian"], {}, retry=False)


def _copied_checkout(tmp_path: Path) -> Path:
    """Return a copy of the checkout's code alone, as it travels to another machine."""
    copy = tmp_path / "copy"
    for name in ("src/kinject", "benchmarks/gpu"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


HIDES_KINJECT = """
import importlib.metadata as metadata
known = metadata.distribution
def distribution(name):
    if name == "kinject":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.distribution = distribution
"""


def test_a_call_resumes_with_what_was_carried_along_where_kinject_is_not_installed(
    tmp_path: Path,
) -> None:
    copy = _copied_checkout(tmp_path)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HIDES_KINJECT)
    earlier = copy / "runs/gpu/results.jsonl"
    earlier.parent.mkdir(parents=True)
    earlier.write_text(
        json.dumps({"case": "machine", "status": "failed", "reason": "x", "tiny": True}) + "\n"
    )
    out = tmp_path / "out"
    environment = {
        **os.environ, "OUT": str(out), "GPU_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site"),
    }  # fmt: skip
    lease = ["bash", "benchmarks/gpu/lease.sh"]
    options = ["--tiny", "--minutes", "600", "--only", "machine", "train/1B full/kinject"]
    done = subprocess.run(
        [*lease, "1", *options], capture_output=True, text=True, cwd=copy, env=environment
    )
    assert "1 done, 0 failed, 0 wait" in done.stdout, done.stdout + done.stderr
    lines = (out / "results.jsonl").read_text().splitlines()
    cases = [json.loads(line)["case"] for line in lines if line]
    assert cases == ["machine", "train/1B full/kinject"]
    assert (out / "gpu.md").is_file()
    unknown = subprocess.run(
        [*lease, "3"], capture_output=True, text=True, cwd=copy, env=environment
    )
    assert unknown.returncode == 2
    assert "usage: bash benchmarks/gpu/lease.sh 1|2" in unknown.stderr


def test_a_copied_checkout_that_cannot_be_imported_is_reported_at_once(tmp_path: Path) -> None:
    copy = _copied_checkout(tmp_path)
    command = [sys.executable, "benchmarks/gpu/run.py", "--tiny", "--only", "train/1B full/kinject"]
    (copy / "src/kinject/errors.py").write_text("import a_package_that_is_not_there\n")
    broken = subprocess.run(command, capture_output=True, text=True, cwd=copy)
    assert broken.returncode == 2
    assert "lacking: kinject cannot be imported: ModuleNotFoundError" in broken.stdout
    assert "Traceback" not in broken.stdout + broken.stderr
