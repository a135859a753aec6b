"""The training that `kinject try` writes for a model and a memory is one that `kinject plan` says fits."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kinject.errors import InputError
from kinject.plan import estimate as plan_model
from kinject.plan import own
from kinject.plan.own import Learner, find_learner
from kinject.plan.run import plan
from kinject.plan.ways import parse_memory
from kinject.recipe import read_recipe
from kinject.recipe.own import own_texts, with_values


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every model of the hub its public shape, and no tokenizer."""

    def refuse(path: str, revision: str | None = None) -> None:
        raise InputError("no hub")

    monkeypatch.setattr(plan_model, "load_config", refuse)
    monkeypatch.setattr(own, "load_tokenizer", refuse)


CASES = {
    ("Qwen/Qwen3-0.6B-Base", "H100", None): ("all weights, in float32", False),
    ("mistralai/Mistral-7B-Instruct-v0.3", None, "80"): ("all weights, in bfloat16", True),
    ("meta-llama/Llama-3.1-8B", "L40S", None): ("LoRA on weights in bfloat16", False),
    ("Qwen/Qwen3-8B", "T4", None): ("QLoRA", True),
    ("Qwen/Qwen3-14B-Base", None, "24 GB"): ("QLoRA", False),
}
"""(model, card, memory) -> the beginning of the way, and whether it chats."""
QUICK = [
    pytest.param(case, marks=pytest.mark.soak if "14B" in case[0] else ()) for case in CASES
]  # a case is a tuple, which `quick` would take apart


@pytest.mark.parametrize("case", QUICK)
def test_the_recipe_is_the_first_way_that_fits_and_plan_changes_nothing(
    case: tuple[str, str | None, str | None], no_hub: None, tmp_path: Path
) -> None:
    model, gpu, memory = case
    learner = find_learner(model, gpu, memory)
    way, is_chat = CASES[case]
    assert learner.way.startswith(way)
    assert learner.is_chat == is_chat
    words = shlex.split(learner.commands("manual", 20_000)[-1])
    assert words[-1] in (memory, gpu)
    for n_tokens in (20_000, 3_000_000):
        path = tmp_path / f"{n_tokens}.yaml"
        path.write_text(learner.train_text("manual", own_texts("manual")["train.yaml"], n_tokens))
        recipe = read_recipe(path, verb="plan")
        size = None if memory is None else parse_memory(memory)
        planned = plan(recipe, memory=size, n_devices=1, gpu=gpu, calibration=False)
        assert planned.fits
        assert planned.changes == ()
        claimed = re.search(r"# Memory:  about ([\d.]+) GiB", path.read_text())
        assert claimed is not None
        assert float(claimed[1]) == pytest.approx(planned.need / 2**30, abs=0.051)
        assert recipe.model.path == model
        assert recipe.corpus.path == "runs/manual/augment/corpus.jsonl"
        assert recipe.corpus.replay is not None
        assert (recipe.method is None) == is_chat


def _learner(model: str) -> Learner:
    return find_learner(model, "H200", None)


def test_batch_passes_and_replay_follow_the_tokens(no_hub: None) -> None:
    learner = _learner("Qwen/Qwen3-0.6B-Base")
    sizes = [learner.length(n) for n in (8_000, 700_000, 40_000_000)]
    assert [size.rows for size in sizes] == [1, 4, 16]
    assert [size.passes for size in sizes] == [2, 2, 1]
    small, large = (
        learner.train_text("a", own_texts("a")["train.yaml"], n) for n in (8_000, 700_000)
    )
    assert "replay: {path: data/company/prose.jsonl," in small
    assert "replay: {path: data/general.jsonl," in large
    assert "kinject recipes data get replay" in "\n".join(learner.commands("a", 700_000))
    assert "kinject recipes data" not in "\n".join(learner.commands("a", 8_000))


def test_a_chat_model_reads_turns_and_replays_its_own_answers(no_hub: None, tmp_path: Path) -> None:
    learner = _learner("meta-llama/Llama-3.1-8B-Instruct")
    texts = own_texts("manual")
    written = {
        "augment": learner.augment_text(texts["augment.yaml"]),
        "train": learner.train_text("manual", texts["train.yaml"], 90_000),
        "eval": learner.eval_text(texts["eval.yaml"]),
    }
    for verb, text in written.items():
        (tmp_path / f"{verb}.yaml").write_text(text)
    augment = read_recipe(tmp_path / "augment.yaml").augment
    assert augment.messages
    assert augment.one_corpus
    assert set(augment.styles) == {"paraphrase", "questions", "dialogue"}
    train = read_recipe(tmp_path / "train.yaml", verb="plan")
    assert train.corpus.replay.answers == "own"
    assert train.trainer["assistant_only_loss"] is True
    asked = read_recipe(tmp_path / "eval.yaml").eval
    assert asked.chat is True
    assert asked.questions["instructions"].role == "retention"


def test_a_model_that_fits_in_no_way_is_refused_with_what_it_needs(no_hub: None) -> None:
    with pytest.raises(InputError, match=r"even QLoRA, .* needs \d+.\d GiB, and .* has 10.0 GiB"):
        find_learner("Qwen/Qwen3-32B", None, "10")


def test_a_name_that_shows_no_kind_is_said(no_hub: None) -> None:
    assert "taken for a base model" in _learner("mistralai/Mistral-7B-v0.1").notes[0]


def test_values_are_set_in_their_section_and_taken_out_with_their_comments() -> None:
    text = "method: cpt\nmodel:\n  path: a # FILL IN\ncorpus:\n  # why\n  # and how\n  eos: true\n  path: b\n"
    values = {"model.path": "c", "method": None, "corpus.eos": None, "model.dtype": "float16"}
    assert with_values(text, values) == (
        "model:\n  dtype: float16\n  path: c\ncorpus:\n  path: b\n"
    )
    assert with_values(text, {"adapter": "{r: 8}"}).index("adapter: {r: 8}\ncorpus:") > 0
