"""The program that measures a GPU runs through on a CPU, survives what a GPU does to a process, and writes its page."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What some cases of a dry run measure, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setattr(os, "environ", dict(os.environ))
        measures, training = (importlib.import_module(name) for name in ("measures", "training"))
        scratch = tmp_path_factory.mktemp("dry-run")
        setting = training.Setting("cpu", scratch, True, results=scratch)
        names = (
            "proof/packing sdpa",
            "attention/sdpa",
            "train/1B full/kinject",
            "train/1B full/bare loop",
        )
        found = {name: measures.CASES[name].measure(setting) for name in names}
    for name in MODULES:
        sys.modules.pop(name, None)
    return found


def test_a_kernel_is_compared_with_sdpa_and_programs_with_one_another(
    figures: dict[str, dict[str, Any]],
) -> None:
    sdpa = figures["attention/sdpa"]
    assert sdpa["loss_difference"] == 0
    assert sdpa["isolation"] < 1e-5
    trained = figures["train/1B full/kinject"]
    assert trained["tokens_per_second"] > 0
    assert trained["planned_gib"] > 0
    assert trained["warm_up_seconds"] > 0
    assert trained["flops_per_token"] == figures["train/1B full/bare loop"]["flops_per_token"]


@pytest.mark.soak
def test_every_case_of_a_dry_run_is_measured_or_says_why_not(tmp_path: Path, program: Any) -> None:
    measures = program("measures")
    command = [sys.executable, str(FOLDER / "run.py"), "--tiny", "--results", str(tmp_path)]
    subprocess.run([*command, "--page", str(tmp_path / "gpu.md"), "--minutes", "6000"], cwd=ROOT)
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
        list(measures.CASES),
        setting,
        results,
        time.monotonic() + 3000,
        forked=True,
        page=tmp_path / "gpu.md",
    )
    assert waiting == []
    assert "| hangs | took longer than 0 s |" in (tmp_path / "gpu.md").read_text()
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


def test_a_case_ends_with_the_run_that_started_it(tmp_path: Path, program: Any) -> None:
    run, measures, training = program("run"), program("measures"), program("training")
    note = tmp_path / "pid"

    def hang(_: Any) -> dict[str, Any]:
        note.write_text(str(os.getpid()))
        return _hang(_)

    measures.CASES["hangs"] = measures.Case("a", hang, 0, 900)
    setting = training.Setting("cpu", tmp_path, True)
    runner = os.fork()
    if not runner:
        run.run_case("hangs", setting, tmp_path / "results.jsonl", 900, forked=True)
    while not (note.exists() and note.read_text()):
        time.sleep(0.01)
    os.kill(runner, signal.SIGKILL)
    os.waitpid(runner, 0)
    status = Path("/proc", note.read_text(), "stat")
    # A process without a parent that reaps it stays as a zombie.
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)


def test_a_training_that_would_be_killed_stops_with_the_figures_of_two_steps(
    tmp_path: Path, program: Any
) -> None:
    training = program("training")
    ended = training.Setting("cuda", tmp_path, False, ends=time.monotonic() + training.TO_END)
    for setting, n_steps in ((training.Setting("cpu", tmp_path, False), 12), (ended, 2)):
        clock = training.Clock(replace(setting, device="cpu"))
        while clock.mark():
            clock.tokens += 7
        assert len(clock.marks) == training.WARM_UP + n_steps
        assert clock.result()["steps"] == n_steps


def test_saved_models_make_room_for_one_that_does_not_fit_beside_them(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = program("training")
    folders = [tmp_path / name for name in ("model-8B", "model-1B", "tokens")]
    for age, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (age, age))

    def usage(_: Path) -> Any:
        return SimpleNamespace(free=1000 - 400 * sum(folder.exists() for folder in folders[:2]))

    monkeypatch.setattr(training.shutil, "disk_usage", usage)
    training.make_room(tmp_path, 150)
    assert all(folder.exists() for folder in folders)
    training.make_room(tmp_path, 200)
    assert [folder.exists() for folder in folders] == [False, True, True]


def test_a_gpu_that_does_not_answer_and_kernels_for_another_cuda_are_named(
    tmp_path: Path,
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    run = program("run")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(run, "DEVICE_SECONDS", 0.001)
    assert run.find_device() == "cpu"
    assert capsys.readouterr().out == "no GPU: torch did not answer within 0 s\n"
    for name in ("cpu", "cuda118", "cuda126"):
        (tmp_path / f"libbitsandbytes_{name}.so").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda _: spec)
    for version, fault in (
        ("12.9", ""),
        ("13.1", "for CUDA 118, 126, and torch has 13.1"),
        (None, ""),
    ):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert fault in run.cuda_note()
        assert bool(fault) == bool(run.cuda_note())


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
            "attention": "flash", "warm_up_seconds": 31.0}  # fmt: skip
    theirs = {**ours, "tokens_per_second": 6000.0, "attention": "sdpa"}
    values = {"machine": machine, "train/8B full/kinject": ours, "train/8B full/SFTTrainer": theirs}
    results = {
        name: {"case": name, "status": "done", "values": one, "tiny": False}
        for name, one in values.items()
    }
    page = program("page").render(results)
    assert (
        "| 8B full | kinject | flash | 2 | 9,000 | 44% | 100.0 | 31.0 | 1.00 |" in page
    )  # 9,000 x 4.8e10 of 989e12
    assert "| 8B full | SFTTrainer | sdpa | 2 | 6,000 | 29% | 100.0 | 31.0 | 1.50 |" in page
    assert "| 8B full | 95.0 | 100.0 | 0.95 |" in page
    assert f"3 of {len(program('measures').CASES)} cases are measured" in page


def test_the_page_has_what_the_study_found_or_that_there_is_no_report_yet(program: Any) -> None:
    accuracies = {"base": {"reworded": 0.31, "words": 0.4}, "base+rag": {"reworded": 0.625}}
    values = {
        "stages": 20,
        "finished": False,
        "seeds": 1,
        "failures": ["LoRA: no memory"],
        "accuracies": accuracies,
    }
    for found, texts in (
        (
            values,
            (
                "20 stages are finished",
                "over 1 seed, to be compared",
                "| base+rag | 0.625 | – |",
                "- LoRA: no memory",
            ),
        ),
        ({"stages": 3, "finished": False}, ("No seed has all arms yet",)),
    ):
        entry = {"case": "real", "status": "done", "values": found, "tiny": False}
        page = program("page").render({"real": entry})
        assert all(text in page.replace("\n", " ") for text in texts), page


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


def _kernel_that_joins_documents(
    q: Any, k: Any, v: Any, offsets: Any, *rest: Any, **options: Any
) -> Any:
    """A broken one: the texts of a row see each other."""
    ends = offsets[[0, -1]]
    return _kernel_by_loops(q, k, v, ends, ends, len(q), len(q), **options)


def test_packing_is_proved_token_by_token_and_a_leak_is_found(
    tmp_path: Path,
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    figures: dict[str, dict[str, Any]],
) -> None:
    from torch.nn.attention import varlen as kernels

    proofs, training, varlen = program("proofs"), program("training"), program("varlen")
    sdpa = figures["proof/packing sdpa"]
    assert sdpa["difference"] < 1e-5
    assert sdpa["leak"] > 0.005
    # The mean, which is all that a trainer says, hardly moves: the model has random weights.
    assert abs(sdpa["packed_loss"] - sdpa["single_loss"]) < 1e-4

    def use(model: Any) -> None:  # on a CPU
        varlen.register()
        model.set_attn_implementation("varlen")

    with pytest.raises(RuntimeError, match="varlen needs an NVIDIA GPU"):
        varlen.use(SimpleNamespace(device=SimpleNamespace(type="cpu")))
    monkeypatch.setattr(varlen, "use", use)
    monkeypatch.setattr(kernels, "varlen_attn", _kernel_that_joins_documents)
    with pytest.raises(ValueError, match="packed and single rows with varlen: the losses differ"):
        proofs.compare_packing(training.Setting("cpu", tmp_path, True), "varlen")


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
    packed = wheel.with_suffix(".tar.xz")
    assert list(tmp_path.iterdir()) == [packed]
    # What is packed is not packed again, and another version goes.
    (tmp_path / "carried_thing-2.0-py3-none-any.tar.xz").touch()
    wheel.write_bytes(content)
    monkeypatch.setattr(packages, "shrink", _die)
    assert packages.pack(tmp_path, "130") == packed.stat().st_size
    assert list(tmp_path.iterdir()) == [packed]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    site = tmp_path / "site"
    assert run.unpack_wheels(tmp_path, site) == ["carried_thing 2.1"]
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(site)) for path in files) == sorted(kept)


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
    assert "lacking: transformers: 5.17.0 is installed, needed: <6,>=5.23" in printed
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


def test_a_kinject_that_cannot_be_imported_is_reported_at_once(
    tmp_path: Path,
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = program("run")
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(run, "PRELOADED", ("json", "a_library_that_is_not_there", "kinject.gone"))
    arguments = ["--tiny", "--results", str(tmp_path), "--scratch", str(tmp_path / "scratch")]
    assert run.main([*arguments, "--only", "machine"]) == 2
    printed = capsys.readouterr().out
    assert "a_library_that_is_not_there cannot be imported: ModuleNotFoundError" in printed
    assert (
        "lacking: kinject cannot be imported: ModuleNotFoundError: No module named 'kinject.gone'"
        in printed
    )
    assert "Nothing was run." in printed
    # A home may be missing or read-only.
    assert Path(os.environ["TRITON_CACHE_DIR"]).parent.parent == tmp_path / "scratch"
    assert not (tmp_path / "results.jsonl").exists()


def _copied_checkout(tmp_path: Path) -> Path:
    """Return a folder with the checkout's code, data and recipes alone, as it travels to another machine."""
    copy = tmp_path / "copy"
    name = "benchmarks/gpu"
    # Copied, since the program resolves its own path; links of the rest find what is compiled already.
    shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "src").mkdir()
    for name in ("src/kinject", "data", "recipes"):
        (copy / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


HIDES = """
import importlib.metadata as metadata, re, sys, tomllib
from pathlib import Path
sys.path.insert(0, "benchmarks/gpu")
known = metadata.distribution
def distribution(name):
    if name == "kinject":
        raise metadata.PackageNotFoundError(name)
    return known(name)
metadata.distribution = distribution
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name in NAMES:
            raise ModuleNotFoundError(f"hidden: {name}", name=name)
sys.meta_path.insert(0, Hide())
"""


@pytest.mark.soak
def test_a_copied_checkout_measures_resumes_and_writes_its_page_with_the_needed_packages_alone(
    tmp_path: Path, program: Any
) -> None:
    """Without kinject installed, and without a home: paraphrases are checked, and a model trains and is timed."""
    copy = _copied_checkout(tmp_path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    hidden = names - set(program("run").NEEDED)
    assert "openai" in hidden
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"NAMES = {hidden}\n{HIDES}")
    earlier = copy / "runs/gpu"
    earlier.mkdir(parents=True)
    entry = {"case": "machine", "status": "failed", "reason": "x", "tiny": True}
    (earlier / "results.jsonl").write_text(json.dumps(entry) + "\n")
    (earlier / "stages-1.zip").write_bytes(b"of an earlier call")
    out = tmp_path / "out"
    environment = {
        **os.environ, "OUT": str(out), "GPU_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site"),
        "HOME": "/proc/none",
    }  # fmt: skip
    lease = ["bash", "benchmarks/gpu/lease.sh"]
    cases = ["machine", "attention/flash_attention_2", "proof/paraphrases", "train/1B full/kinject"]
    options = ["--tiny", "--minutes", "600", "--only", *cases]
    done = subprocess.run(
        [*lease, "1", *options], capture_output=True, text=True, cwd=copy, env=environment
    )
    assert "2 done, 1 failed, 0 wait for the next run" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 1
    entries = [
        json.loads(line) for line in (out / "results.jsonl").read_text().splitlines() if line
    ]
    assert [entry["case"] for entry in entries] == cases
    assert entries[1]["reason"].endswith("needs an NVIDIA GPU, and the model is on cpu")
    assert entries[2]["values"] == {"paraphrases_passed": 30.0}
    assert (out / "stages-1.zip").read_bytes() == b"of an earlier call"
    page = (out / "gpu.md").read_text()
    for text in (
        "A dry run on a CPU",
        "| 1B full | kinject | sdpa |",
        "| attention/flash_attention_2 | RuntimeError",
        "| paraphrases | paraphrases passed 30 |",
    ):
        assert text in page
    assert all(len(line) <= 120 or line.startswith("|") for line in page.splitlines())
    unknown = subprocess.run(
        [*lease, "3"], capture_output=True, text=True, cwd=copy, env=environment
    )
    assert unknown.returncode == 2
    assert "usage: bash benchmarks/gpu/lease.sh 1|2" in unknown.stderr


STUDY = """
import json, sys, time
from pathlib import Path
cache, report, seeds, n = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[4].partition("=")[2]), int(sys.argv[3])
claim = cache / "claims/0c.json"
claim.parent.mkdir(parents=True, exist_ok=True)
def write_at_once(path, content):
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)
if not claim.exists():
    write_at_once(claim, {"declared": n})
for seed in seeds:
    for kind in ("train", "eval"):
        folder = cache / kind / f"{seed}{kind}"
        marker = folder / "done.json"
        if marker.exists():
            continue
        if len(list(cache.glob("*/*/done.json"))) == n:
            time.sleep(3600)
        (folder / "model").mkdir(parents=True)
        (folder / "model/model.safetensors").write_text("weights")
        (folder / "log.jsonl").write_text(f"{kind} {seed}")
        write_at_once(marker, {"id": folder.name})
report.mkdir(exist_ok=True)
(report / "report.html").write_text(str(seeds))
rows = [{"arm": "base", "question_set": "reworded", "k": k, "subject": subject, "accuracy": 0.25 + k / 4 + len(subject)}
        for subject, k in (("", 0), ("history", 0), ("", 1))]
(report / "report.json").write_text(json.dumps({"seeds": seeds, "results": rows, "failures": []}))
"""
"""A study that finishes `n` stages and then hangs, or finishes.

Like a real one it writes each file at once: what runs it packs stages as soon as they are marked.
"""


def test_a_study_that_is_cut_short_goes_on_elsewhere_from_what_it_packed(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, training = program("real"), program("training")
    script = tmp_path / "study.py"
    script.write_text(STUDY)
    monkeypatch.setattr(real, "_study_folder", lambda _: tmp_path)
    monkeypatch.setattr(real, "LEFT_FOR_PACKING", 0.0)
    results = tmp_path / "results"
    results.mkdir()

    def call(n: int, seconds: float) -> dict[str, Any]:
        scratch = tmp_path / f"machine-{n}"
        monkeypatch.setattr(
            real,
            "study_command",
            lambda _, cache, report: [sys.executable, "-S", str(script), cache, report, str(n)],
        )
        scratch.mkdir()
        ends = time.monotonic() + seconds
        return dict(real.run_study(training.Setting("cpu", scratch, True, results, ends)))

    # By then three stages are packed: the archives are what says so, not a clock.
    waited = real.time.sleep
    monkeypatch.setattr(real.time, "sleep", lambda _: waited(0.01))
    monkeypatch.setattr(
        real.time, "monotonic", lambda: 1e9 if len(real._names(results)) >= 4 else 0.0
    )
    accuracies = {"base": {"reworded": 0.25}, "base+rag": {"reworded": 0.5}}
    first = {"stages": 3, "finished": False, "seeds": 1, "failures": [], "accuracies": accuracies}
    assert call(3, 1e6) == first
    assert (results / "report.html").read_text() == "[0]"
    monkeypatch.setattr(real.time, "monotonic", lambda: 0.0)
    (results / "stages.part").write_bytes(b"cut short by a kill")
    found = call(9, 1e6)
    assert (found["stages"], found["finished"], found["seeds"]) == (4, True, 2)
    elsewhere = tmp_path / "elsewhere"
    real.unpack(results, elsewhere)
    # A model that did not travel counts as deleted, and the first call declared the claim.
    assert json.loads((elsewhere / "train/0train/done.json").read_text())["deleted"] is True
    assert json.loads((elsewhere / "eval/1eval/done.json").read_text()) == {"id": "1eval"}
    assert json.loads((elsewhere / "claims/0c.json").read_text()) == {"declared": 3}
    assert (elsewhere / "eval/1eval/log.jsonl").read_text() == "eval 1"
    assert not list(elsewhere.rglob("*.safetensors"))
    assert sorted(path.name for path in results.iterdir()) == [
        "report.html",
        "stages-1.zip",
        "study.log",
    ]


def test_stages_go_into_another_archive_before_one_is_too_large_and_what_is_there_stays(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = program("real")
    monkeypatch.setattr(real, "LARGEST", 1)
    cache, other = tmp_path / "cache", tmp_path / "other"
    for folder in (cache / "eval/a", cache / "eval/b", other / "eval/a"):
        folder.mkdir(parents=True)
        (folder / "done.json").write_text("{}")
        (folder / "answers.jsonl").write_text(folder.parts[-3])
    real.pack(cache, tmp_path)
    real.pack(cache, tmp_path)
    assert [path.name for path in real.archives(tmp_path)] == ["stages-1.zip", "stages-2.zip"]
    real.unpack(tmp_path, other)
    assert (other / "eval/a/answers.jsonl").read_text() == "other"
    assert (other / "eval/b/answers.jsonl").read_text() == "cache"


def test_a_model_travels_in_parts_and_a_missing_one_is_named(
    tmp_path: Path, program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = program("real")
    package, parts = tmp_path / "package", tmp_path / "parts"
    package.mkdir()
    (package / real.GGUF).write_bytes(bytes(range(100)))
    monkeypatch.setattr(real, "_package", lambda: package)
    monkeypatch.setattr(real, "PART", 41)
    monkeypatch.setattr(real, "PARTS", parts)
    assert real.join(tmp_path / "joined") == package
    real.split(parts)
    assert [path.stat().st_size for path in sorted(parts.iterdir())] == [41, 41, 18]
    joined = real.join(tmp_path / "joined")
    assert (joined / real.GGUF).read_bytes() == bytes(range(100))
    (parts / "part-2-of-3").unlink()
    monkeypatch.setattr(real, "_package", lambda: None)
    with pytest.raises(RuntimeError, match="found part-1-of-3, part-3-of-3 of the model: python"):
        real.join(tmp_path / "again")
