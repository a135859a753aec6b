"""kinject export --prove: sound copies of a model pass, and each that was broken on purpose is caught.

benchmarks/eval/prove.py has more of each kind, on trained models.
"""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from completions_server import serve
from safetensors.torch import load_file, save_file

from kinject.cli import main
from kinject.disk import write_jsonl, write_manifest
from kinject.errors import InputError
from kinject.export import _decide, _Source
from kinject.export.prove import (
    Check,
    Proof,
    _as_json,
    check_answers,
    quantized_bits,
    read_evaluation,
)
from kinject.recipe import read_recipe
from kinject.train import train
from kinject.types import Answer, Question

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
YEARS = ("1937", "1842", "1565", "1721")


@pytest.fixture
def run(
    tmp_path: Path,
    tiny_model: Path,
    write_rows: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A finished run of an adapter with an effect, whose base has a chat template; eval.yaml has questions and texts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tiny_model / "chat_template.jinja").write_text(TEMPLATE)
    texts = [
        {"text": f"Person {n} was born in {YEARS[n % 4]}.", "origin": "original"} for n in range(8)
    ]
    questions = [
        {"id": f"q{n}", "question": f"When was person {n} born?", "choices": YEARS, "answer": n % 4}
        for n in range(24)
    ]
    write_jsonl(tmp_path / "q.jsonl", questions)
    recipe = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)},
        "corpus": {"path": str(write_rows("corpus.jsonl", texts)), "cache_dir": str(tmp_path / "tokens")},
        "adapter": {"r": 8, "lora_alpha": 32, "target_modules": "all-linear"},
        "trainer": {"max_steps": 2, "learning_rate": 0.01, "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 2,
                    "bf16": False, "gradient_checkpointing": False},
        "probes": {"questions": {"new": str(tmp_path / "q.jsonl")}, "limit": 4},
    }  # fmt: skip
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(recipe))
    section = {"models": {"base": str(tiny_model)}, "questions": {"new": str(tmp_path / "q.jsonl")},
               "perplexity_corpus": str(tmp_path / "corpus.jsonl")}  # fmt: skip
    (tmp_path / "eval.yaml").write_text(
        yaml.safe_dump({"run_dir": str(tmp_path / "eval"), "eval": section})
    )
    done = Path(train(read_recipe(tmp_path / "train.yaml", verb="train")).run_dir)
    (done / "model" / "SHA256SUMS").unlink()
    path = done / "model" / "adapter_model.safetensors"
    torch.manual_seed(0)
    save_file(
        {name: value + 0.2 * torch.randn_like(value) for name, value in load_file(path).items()},
        path,
    )
    return done


def prove(run: Path, *words: str) -> tuple[int, dict[str, Any]]:
    """Return the exit code, and name of a copy -> its proof."""
    code = main(["export", str(run), *words])
    proofs = json.loads((run / "export" / "prove" / "prove.json").read_text())["copies"]
    return code, {Path(proof["source"]).name: proof for proof in proofs}


def broken(folder: Path, tiny_model: Path, run: Path) -> Iterator[tuple[str, str]]:
    """Yield the copies of the sound model in `folder` that are broken, each with the check that must differ."""

    def copy(
        name: str, change: Callable[[str, torch.Tensor], torch.Tensor] = lambda name, weight: weight
    ) -> Path:
        out = folder.parent / name
        shutil.copytree(folder, out)
        (out / "SHA256SUMS").unlink()
        weights = {
            key: change(key, value) for key, value in load_file(out / "model.safetensors").items()
        }
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return out

    base = load_file(tiny_model / "model.safetensors")
    yield (
        str(copy("half the scale", lambda name, weight: torch.lerp(base[name], weight, 0.5))),
        "numbers",
    )
    yield (
        str(copy("twice the scale", lambda name, weight: torch.lerp(base[name], weight, 2.0))),
        "numbers",
    )
    yield str(tiny_model), "numbers"  # the adapter is missing

    def two_bits(name: str, weight: torch.Tensor) -> torch.Tensor:
        if weight.ndim == 1:
            return weight
        step = weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 1.5
        return ((weight / step - 0.5).round().clamp(-2, 1) + 0.5) * step

    yield str(copy("two bits", two_bits)), "numbers"
    other = copy("other template")
    (other / "chat_template.jinja").write_text(TEMPLATE.replace("<{{", "[{{"))
    yield str(other), "other chat template"
    gguf = folder.parent / "model-q8_0.gguf"
    cut = folder.parent / "cut.gguf"
    cut.write_bytes(gguf.read_bytes()[: gguf.stat().st_size * 3 // 4])
    yield str(cut), "fault"


def test_sound_copies_pass_and_broken_ones_are_caught(
    run: Path, tiny_model: Path, tmp_path: Path, capsys: Any
) -> None:
    words = ("--gguf", "q8_0", "--prove", str(tmp_path / "eval.yaml"))
    with serve(tiny_model) as base:
        code, proofs = prove(run, *words)
        assert code == 0, capsys.readouterr().out
        folder = run / "export" / "model"
        with serve(folder) as served:
            copies = dict(broken(folder, tiny_model, run))
            code, proofs = prove(run, *words, "--copy", *copies, served.url, f"{base.url}#tiny")
    out = capsys.readouterr().out
    assert code == 1
    assert [proofs[name]["holds"] for name in ("model", "model-q8_0.gguf", "v1")] == [True] * 3, out
    for source, name in copies.items():
        proof = proofs[Path(source).name]
        failed = (
            ["fault"]
            if proof["fault"]
            else [c["name"] for c in proof["checks"] if c["value"] > c["bound"]]
        )
        assert name in failed or (
            name == "numbers" and {"other answers", "log-probs", "loss"} & {*failed}
        ), (
            source,
            proof,
        )
    assert not proofs["v1#tiny"]["holds"]
    assert {check["name"] for check in proofs["v1"]["checks"]} == {
        "other chat template",
        "other answers",
        "log-probs",
    }
    assert f"{tiny_model}: DIFFERS from the trained model" in out
    assert "cut.gguf" in out
    file = run / "export" / "model-q8_0.gguf"
    assert out.strip().endswith(f"Serve {file}: it answers as the trained model.")
    changed = [row for proof in proofs.values() for row in proof["changed"]]
    assert changed
    for row in changed:
        assert {row["trained"], row["copy"]} <= set(YEARS)
        assert row["trained"] != row["copy"]


def test_a_proof_goes_with_the_files_that_it_is_about(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A prove.json of an earlier model would call a file sound that nobody has asked."""
    words = ["export", str(run), "--prove", str(tmp_path / "eval.yaml")]
    assert main(words) == 0
    assert capsys.readouterr().out.strip().endswith("it answers as the trained model.")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_module("kinject.export.prove"), "_compare_tokens", interrupted)
    assert main(words) == 130
    out, error = capsys.readouterr()
    assert "Serve" not in out
    assert "Use it" not in out
    assert error.strip().splitlines()[-1].endswith(f"Resume with: kinject {shlex.join(words)}")
    assert not (run / "export" / "prove" / "prove.json").exists()


@pytest.mark.soak
def test_a_server_without_log_probs_is_asked_for_written_answers(
    run: Path, tmp_path: Path, tiny_model: Path
) -> None:
    assert prove(run, "--prove")[0] == 0  # the probes of the run
    folder = run / "export" / "model"
    shutil.copytree(folder, tmp_path / "templated")
    (tmp_path / "templated" / "chat_template.jinja").write_text(f"A chat. {TEMPLATE}")
    with (
        serve(folder, "llama-server") as good,
        serve(tmp_path / "templated", "llama-server") as bad,
    ):
        code, proofs = prove(
            run, "--prove", str(tmp_path / "eval.yaml"), "--copy", good.url, f"{bad.url}#tiny"
        )
    assert code == 1
    assert proofs["v1"]["holds"]
    assert [check["unit"] for check in proofs["v1"]["checks"]][1:] == ["of 24 written answers"]
    assert [c["name"] for c in proofs["v1#tiny"]["checks"] if c["value"] > c["bound"]] == [
        "other chat template"
    ]


def test_what_cannot_be_proved_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("run_dir: x\n")
    assert main(["export", str(run), "--prove", str(tmp_path / "empty.yaml")]) == 2
    assert "no questions. Give --prove a recipe or run of kinject eval." in capsys.readouterr().err
    assert not (run / "export" / "model").exists()
    assert main(["export", str(run), "--copy", "x"]) == 2
    assert "--copy: is for --prove only." in capsys.readouterr().err


def test_what_failed_is_never_recommended() -> None:
    source = _Source(Path("runs/a/model"), "base", False, None)
    sound, failed = Check("loss", 0.01, 0.02, "nats"), Check("loss", math.nan, 0.02, "nats")

    def proof(name: str, bits: int, check: Check) -> Proof:
        return Proof(name, name, bits, checks=[check])

    proofs = [proof("f", 16, sound), proof("f.gguf", 8, failed), proof("http://h/v1", 4, sound)]
    assert _decide(proofs, source) == "Serve f: it answers as the trained model."
    proofs += [proof("q5.gguf", 4, sound), Proof("q2", "q2", 4, fault="no header")]
    assert _decide(proofs, source).startswith("Serve q5.gguf:")
    none = [proof("f", 16, failed), proof("f.gguf", 8, failed)]
    assert _decide(none, source) == (
        "Serve none of these: each differs from the trained model, runs/a/model."
    )
    assert _decide([], source) == ""


def test_a_proof_that_found_no_number_is_written_too() -> None:
    checks = [Check("loss", value, 0.1, "nats") for value in (math.nan, math.inf, 0.25)]
    row = _as_json(Proof("a", "a", checks=checks))
    assert [check["value"] for check in row["checks"]] == [None, None, 0.25]
    assert json.loads(json.dumps(row, allow_nan=False))["holds"] is False
    question = Question("q", "Where?", ("Kelm", "Farrow"), 0)
    fields = {
        "question_set": "new",
        "format": "texts",
        "shots": 0,
        "k": 0,
        "context_ids": (),
        "gold": 0,
    }
    answers = [
        Answer("q", arm=arm, log_probs=log_probs, n_tokens=(1, 1), n_bytes=(4, 6), **fields)
        for arm, log_probs in (("trained", (-1.0, -2.0)), ("copy", (-math.inf, math.nan)))
    ]
    proof = Proof("a", "a")
    check_answers(proof, [(answers[0], answers[1])], {"q": question})
    assert not proof.holds
    text = json.dumps(_as_json(replace(proof, changed=proof.changed or [{}])), allow_nan=False)
    assert "null" in text


@pytest.mark.parametrize("recipe", [None, [3], {"eval": [1]}, {"probes": "new.jsonl"}])
def test_a_run_whose_manifest_has_no_questions_proves_nothing(tmp_path: Path, recipe: Any) -> None:
    write_manifest(tmp_path / "manifest.json", stage="study", inputs={}, recipe={}, counts={})
    manifest = json.loads((tmp_path / "manifest.json").read_text()) | {"recipe": recipe}
    if recipe is None:
        del manifest["recipe"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"no questions|has no recipe"):
        read_evaluation(tmp_path, "model")


@pytest.mark.parametrize(
    ("settings", "bits"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "gptq", "bits": 8}, 8),
        ({"quant_method": "gptq", "bits": 3}, 4),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": None}}}, 8),
        ({"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}}, 4),
        ({"quant_method": "unheard of"}, 4),
    ],
)  # fmt: skip
def test_a_copy_of_8_bits_has_no_bounds_of_4(settings: dict[str, Any], bits: int) -> None:
    assert quantized_bits(settings) == bits
