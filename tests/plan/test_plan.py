"""kinject plan: its steps and tokens against what training takes, its page, its files and what it refuses."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml

import kinject
from kinject.cli import main
from kinject.errors import KinjectError, RecipeError
from kinject.plan import ways
from kinject.plan.estimate import count_flops
from kinject.plan.length import length_of_texts
from kinject.plan.run import plan, render_plan, step_of
from kinject.recipe import Recipe, read_recipe
from kinject.train.setup import check_training

L4 = ways.find_devices("cuda", None, None, gpu="L4")
CONFIG = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 500, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def make_recipe(tmp_path: Path, tiny_model: Path) -> Callable[..., Recipe]:
    """Return a recipe on the tiny model and forty short documents; ``trainer`` adds to the defaults."""
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"text": f"Person {i} was born in Kelm in {1900 + i}."}) + "\n"
            for i in range(40)
        )
    )

    def _make(**trainer: Any) -> Recipe:
        values = {
            "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
            "corpus": {"path": str(corpus), "cache_dir": str(tmp_path / "tokens")},
            "trainer": {
                "max_steps": 6, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 1, "max_length": 64,
                "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False, "save_strategy": "no",
                "bf16": False, **trainer,
            },
        }  # fmt: skip
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return read_recipe(path, verb="train")

    return _make


def test_answers_that_are_drawn_have_no_steps_before_and_grpos_own_rate(
    tmp_path: Path, tiny_model: Path
) -> None:
    rows = [{"prompt": f"Where is {i}?", "completion": " Kelm"} for i in range(24)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "run_dir": str(tmp_path / "run"), "method": "recall", "model": {"path": str(tiny_model), "device": "cpu"},
        "corpus": {"path": str(tmp_path / "q.jsonl"), "cache_dir": str(tmp_path / "tokens")},
        "trainer": {"num_generations": 4, "per_device_train_batch_size": 8, "bf16": False},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    planned = plan(read_recipe(path, verb="plan"), calibration=False)
    assert planned.length is None
    assert planned.rate == 1e-6
    assert any("steps and tokens are not counted: which questions" in n for n in planned.notes)


@pytest.mark.parametrize("strategy", ["bfd_split", "wrapped"])
def test_steps_tokens_and_rates_are_those_of_the_run(
    make_recipe: Callable[..., Recipe], strategy: str
) -> None:
    from kinject.disk import read_manifest_fields
    from kinject.train import train

    length = {"max_steps": -1, "num_train_epochs": 3, "max_length": 48}
    recipe = make_recipe(
        **length,
        packing_strategy=strategy,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )
    found = plan(recipe, calibration=False)
    result = train(recipe)
    manifest = read_manifest_fields(Path(result.run_dir) / "manifest.json")
    assert manifest is not None
    counts = manifest["counts"]
    assert found.length is not None
    assert found.length.steps == counts["steps"]
    assert found.length.tokens == 3 * counts["tokens"]["source"]
    assert found.length.learned == 3 * counts["tokens"]["trained"]
    log = [
        json.loads(line) for line in (Path(result.run_dir) / "log.jsonl").read_text().splitlines()
    ]
    taken = [row["learning_rate"] for row in log if "learning_rate" in row]
    assert found.rates is not None
    assert list(found.rates) == pytest.approx(taken)
    assert found.shapes.n_parameters == sum(p.numel() for p in transformers.AutoModel.from_pretrained(
        recipe.model.path).parameters())  # fmt: skip


def test_rows_that_are_not_packed_take_the_time_of_their_tokens(
    make_recipe: Callable[..., Recipe],
) -> None:
    epochs = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 5}
    rows = {"packing": False, "packing_strategy": "bfd", **epochs}
    long, short = (plan(make_recipe(**rows, max_length=n), gpu="L4") for n in (200, 50))
    assert long.memory.peak > short.memory.peak
    assert long.seconds == short.seconds
    n_tokens = long.length.tokens / (long.length.steps * 5)
    assert 5 < n_tokens < 40
    of_tokens = count_flops(replace(long.step, block=math.ceil(n_tokens)), long.shapes)
    assert long.step_flops == of_tokens


def test_each_term_against_forgetting_keeps_a_copy_of_the_base(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    make_recipe()
    replay = "corpus.replay={path: r.jsonl, fraction: 0.2}"

    def copies(*terms: str) -> int:
        return step_of(read_recipe(tmp_path / "recipe.yaml", [replay, *terms], "plan"), L4).copies

    assert copies("regularization.l2=0.01") == copies("regularization.kl=0.3") == 1
    assert copies("regularization.l2=0.01", "regularization.kl=0.3") == 2
    assert copies("regularization.l2=0.01", "regularization.kl=0.3", "adapter={r: 4}") == 1


@pytest.mark.parametrize(
    ("model_type", "is_fused"),
    [
        ("llama", True),
        ("gemma3_text", True),
        ("recurrent_gemma", False),
        ("modernbert-decoder", False),
    ],
)
def test_all_logits_are_planned_where_training_takes_them(
    make_recipe: Callable[..., Recipe], tmp_path: Path, model_type: str, is_fused: bool
) -> None:
    """By kinject.train.guards.fused_head_misfit, which test_loss.py compares with logits."""
    make_recipe()
    transformers.AutoConfig.for_model(model_type, vocab_size=500).save_pretrained(
        tmp_path / "shape"
    )
    changes = [f"model.path={tmp_path / 'shape'}"]
    assert step_of(read_recipe(tmp_path / "recipe.yaml", changes, "plan"), L4).fused is is_fused


def test_the_command_prints_and_draws(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe()
    figure = tmp_path / "rates.png"
    words = [str(recipe.path), "trainer.lr_scheduler_kwargs={}", "--no-calibration"]
    assert main(["plan", *words, "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert f"  kinject train {recipe.path} 'trainer.lr_scheduler_kwargs={{}}'\n" in out
    assert "fits one device" in out
    assert "s a step, planned at" in out  # no step was timed
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_figure_of_another_format_is_refused_before_the_plan_is_made(
    make_recipe: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(make_recipe().path), "--no-calibration", "--figure", str(tmp_path / "rates.gif")]
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert "allowed: a name that ends with .png, .svg or .pdf" in captured.err
    assert captured.out == ""


def test_hours_are_planned_before_every_file_is_there(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_recipe(max_steps=-1, num_train_epochs=2, per_device_train_batch_size=1)
    path = tmp_path / "recipe.yaml"

    def planned(*overrides: str) -> Any:
        return plan(read_recipe(path, list(overrides), "plan"), gpu="L4")

    whole = planned()
    missing = "corpus.validation_corpus=held-out.jsonl"
    assert planned(missing).length == whole.length
    text = "\n".join(planned(missing, "corpus.replay={path: r.jsonl, fraction: 0.6}").notes)
    assert "planned without what is not there yet: r.jsonl, held-out.jsonl." in text
    mixed = planned("corpus.replay={path: r.jsonl, fraction: 0.6}").length
    assert mixed.tokens == pytest.approx(whole.length.tokens / 0.4, rel=0.02)
    assert mixed.steps == pytest.approx(whole.length.steps / 0.4, abs=2)

    documents = [{"id": f"{n}", "title": "T", "text": "The mill stands. " * 60} for n in range(5)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    (tmp_path / "write.yaml").write_text(
        "run_dir: runs/w\naugment:\n  documents: d.jsonl\n  styles: {paraphrase: 3}\n"
        "  generator: {kind: openai, model: m}\n"
    )
    early = planned("corpus.path=runs/w/corpus.jsonl")
    n_written = 5 * 60 * 4  # words and marks
    assert early.length.tokens == pytest.approx(2 * 4 * n_written * 1.35, rel=0.02)
    assert early.length.steps == pytest.approx(early.length.tokens / 64, abs=3)
    assert "by the estimate of kinject augment write.yaml --dry-run" in "\n".join(early.notes)
    lines = render_plan(early)
    assert " s a step, planned at " in lines
    assert "time is not estimated" not in lines
    assert planned("corpus.path=runs/none/corpus.jsonl").length is None
    # On this CPU, too, where no step can be timed yet.
    here = plan(read_recipe(path, ["corpus.path=runs/w/corpus.jsonl"], "plan"))
    pace = here.devices.flops
    assert here.seconds == pytest.approx(here.length.steps * here.step_flops / pace)
    lines = render_plan(here)
    assert " s a step, planned at " in lines
    assert "time is not measured: the corpus is not there yet." in lines


def test_train_dry_run_is_the_plan(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_recipe()
    # The first of the two may leave something in memory.
    monkeypatch.setattr(ways, "resident_memory", lambda: 700 * 2**20)
    words = [str(tmp_path / "recipe.yaml"), f"corpus.path={tmp_path / 'later.jsonl'}"]
    code = main(["plan", *words])
    text = capsys.readouterr().out
    assert main(["train", "--dry-run", *words]) == code == 0
    assert capsys.readouterr().out == text
    assert not (tmp_path / "run").exists()


def test_a_config_alone_is_enough_and_a_missing_corpus_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers.LlamaConfig(**CONFIG).save_pretrained(tmp_path / "config-only")
    values = {"run_dir": "runs/x", "model": {"path": "config-only"}, "corpus": {"path": "none.jsonl"},
              "trainer": {"max_length": 64, "optim": "adamw_8bit"}}  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    assert main(["plan", "recipe.yaml", "--memory", "1GiB", "--devices", "2"]) == 0
    out = capsys.readouterr().out
    assert "none.jsonl does not exist yet" in out
    assert "parallelism  DDP" in out
    assert main(["plan", "recipe.yaml", "model.path=not/here/x"]) == 2
    assert "there is no model yet" in capsys.readouterr().err
    assert main(["plan", "recipe.yaml", "adapter={rank: 4}"]) == 2
    assert "adapter.rank" in capsys.readouterr().err
    assert main(["plan", "recipe.yaml", "--memory", "much"]) == 2
    assert "--memory: found 'much'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "trainer", "words"),
    [
        ({"text": "long " * 400}, {"max_length": 16, "packing_strategy": "bfd"}, "would be lost at trainer.max_length: 16"),
        ({"text": "long " * 400}, {"max_length": 4096, "packing": False}, "trainer.max_length: rows reach"),
        ({"txt": "no text"}, {}, "corpus.jsonl:2"),
        ({"text": "short"}, {"optim": "no_such_optimizer"}, "trainer.optim"),
    ],
)  # fmt: skip
def test_plan_refuses_what_train_refuses_with_the_same_message(
    tmp_path: Path, tiny_model: Path, row: dict[str, str], trainer: dict[str, Any], words: str
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text(json.dumps({"text": "Ore is mined in Kelm."}) + "\n" + json.dumps(row) + "\n")
    values = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model), "device": "cpu"},
        "corpus": {"path": str(corpus), "cache_dir": str(tmp_path / "tokens")},
        "trainer": {"max_steps": 1, "max_length": 32, "packing": True, "bf16": False, **trainer},
    }  # fmt: skip
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    messages = []
    for verb in ("train", "plan"):
        with pytest.raises(KinjectError, match=re.escape(words)) as refused:
            kinject.train(path) if verb == "train" else kinject.plan(path, calibration=False)
        messages.append(str(refused.value))
    assert messages[0] == messages[1]


def test_fractions_that_leave_nothing_for_the_corpus_are_refused_on_any_devices(
    tmp_path: Path, tiny_model: Path
) -> None:
    part = {"path": str(tmp_path / "other.jsonl"), "fraction": 0.4}
    values = {
        "run_dir": str(tmp_path / "run"), "model": {"path": str(tiny_model)}, "trainer": {"max_length": 32},
        "corpus": {"path": "none.jsonl", "replay": {**part, "fraction": 0.2}, "mix": {"a": part, "b": part}},
    }  # fmt: skip
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    recipe = read_recipe(tmp_path / "recipe.yaml", verb="plan")
    with pytest.raises(RecipeError, match="fractions of replay and mix sum to 1,"):
        plan(recipe, gpu="A100", calibration=False)
    with pytest.raises(RecipeError, match="fractions of replay and mix sum to 1,"):
        length_of_texts(recipe, 10, 90.0, 1)  # as the dry run of a study counts


def test_the_page_of_a_plan_has_machines_and_a_command_that_train_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {
        "head_dim": 64,
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
    }
    transformers.LlamaConfig(**{**CONFIG, **sizes}).save_pretrained(tmp_path / "config-only")
    values = {
        "run_dir": "runs/x", "model": {"path": "config-only"}, "corpus": {"path": "none.jsonl"},
        "trainer": {"max_length": 64, "optim": "adamw_8bit", "gradient_accumulation_steps": 8, "per_device_train_batch_size": 1},
    }  # fmt: skip
    Path("recipe.yaml").write_text(yaml.safe_dump(values))
    words = [
        "plan",
        "recipe.yaml",
        "--memory",
        "658MiB",
        "--devices",
        "8",
        "--nodes",
        "2",
        "--link",
        "3",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "2 machines with 8 x GPU as given" in out
    assert "the largest layer has 2.9 MiB" in out
    assert "parallelism  FSDP" in out
    command = next(line for line in out.splitlines() if "accelerate launch" in line)
    assert "on each machine, with its own --machine_rank" in out
    overrides = shlex.split(command)[shlex.split(command).index("recipe.yaml") + 1 :]
    assert overrides[:1] == ["trainer.optim=adamw_torch_fused"]
    Path("none.jsonl").write_text('{"text": "x"}\n')
    check_training(read_recipe(Path("recipe.yaml"), overrides, "train"))
    for option in ("--nodes", "--link"):
        assert main([*words[:2], option, "0"]) == 2
        assert f"{option}: found 0, allowed: more than 0." in capsys.readouterr().err
    for link in ("nan", "inf"):
        assert main([*words[:2], "--link", link]) == 2
        assert f"--link: found {link}, allowed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": -3}, "--nodes: found -3, allowed: more than 0"),
        ({"n_devices": 0}, "--devices: found 0, allowed: more than 0"),
        ({"link": float("nan")}, "--link: found nan"),
        ({"link": -4e9}, "--link: found -4, allowed: more than 0"),
        ({"memory": "6 gibs"}, "--memory: found '6 gibs', expected a size"),
        ({"memory": -4096}, "--memory: found -4096, expected a size"),
    ],
)
def test_a_plan_from_python_refuses_what_the_command_refuses(
    make_recipe: Callable[..., Recipe], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(KinjectError, match=message):
        kinject.plan(make_recipe(), **options, calibration=False)


def test_real_steps_are_announced_only_where_some_are_timed(
    make_recipe: Callable[..., Recipe], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    kinject.plan(make_recipe(), gpu="L4")
    assert caplog.text.endswith("its shape, the corpus\n")


def test_a_plan_from_python_reads_its_memory_as_the_command_does(
    make_recipe: Callable[..., Recipe],
) -> None:
    found = kinject.plan(make_recipe(), memory="6GiB", calibration=False)
    assert found.devices.memory == 6 * 2**30
