"""Documents and instruction rows in one run, in stated shares, and one after the other."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kinject.corpus.packing import PackingConfig
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.disk import file_hash
from kinject.models import model_hash
from kinject.recipe import Recipe, read_recipe
from kinject.train import train
from kinject.train.data import CorpusPacker, Part, open_corpora, tokenize_and_pack
from kinject.train.methods import method_of
from kinject.train.run import hash_inputs

MakeRecipe = Callable[..., Recipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]
RECIPES = Path(__file__).parents[2] / "recipes" / "two-phase"


@pytest.fixture
def files(write_rows: WriteRows) -> dict[str, Path]:
    """A corpus of 400 documents, 300 questions with answers, 500 rows to replay, of many lengths."""
    rng = random.Random(0)

    def text(mark: str) -> str:
        return f"{mark} " + " ".join(
            rng.choices(["Farrow", "Kelm", "mill", "school", "1987"], k=rng.randint(2, 40))
        )

    towns = ("Farrow", "Kelm", "Lowmere")
    questions = [
        {"prompt": f"Question: Q{i} where?\nAnswer:", "completion": f" {rng.choice(towns)}"}
        for i in range(300)
    ]
    return {
        "corpus": write_rows("documents.jsonl", [{"text": text("D")} for _ in range(400)]),
        "qa": write_rows("qa.jsonl", questions),
        "replay": write_rows("replay.jsonl", [{"text": text("R")} for _ in range(500)]),
    }


def _n_tokens(rows: Any, tokenizer: Any) -> dict[str, int]:
    """Count the tokens of each corpus in the training rows, text by text, by the mark that each text begins with."""
    counts: dict[str, int] = {}
    for row in rows:
        starts = [index for index, position in enumerate(row.position_ids) if position == 0]
        for start, end in zip(starts, [*starts[1:], len(row.input_ids)], strict=True):
            text = tokenizer.decode(row.input_ids[start:end], skip_special_tokens=True)
            mark = text.removeprefix("Question: ")[0]
            counts[mark] = counts.get(mark, 0) + end - start
    return counts


@pytest.mark.parametrize("fractions", [{"replay": 0.25}, {"qa": 0.2}, {"replay": 0.25, "qa": 0.1}])
def test_the_rows_of_an_epoch_hold_the_stated_shares_of_tokens(
    files: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path, fractions: dict[str, float]
) -> None:
    packer = CorpusPacker(
        tiny_tokenizer, Tokenization(), PackingConfig(256, "bfd_split"), 0, tmp_path / "tokens"
    )
    parts = {
        name: Part(CorpusFile(files[name], "replay" * (name == "replay")), f)
        for name, f in fractions.items()
    }
    data = packer.pack(CorpusFile(files["corpus"]), parts)
    counted = _n_tokens(data.rows, tiny_tokenizer)
    total = sum(counted.values())
    assert total == pytest.approx(data.account.source, abs=20)  # what is split repeats a token
    for name, fraction in fractions.items():
        assert counted[{"replay": "R", "qa": "Q"}[name]] / total == pytest.approx(
            fraction, abs=0.002
        )
        assert data.fractions[name] == pytest.approx(fraction, abs=0.002)
    replayed = sum(sum(row.replayed) for row in data.rows)
    assert (replayed > 0) is ("replay" in fractions)


def test_instruction_rows_among_documents_are_learned_where_they_answer(
    make_recipe: MakeRecipe, files: dict[str, Path]
) -> None:
    corpus = {
        "path": str(files["corpus"]),
        "mix": {"qa": {"path": str(files["qa"]), "fraction": 0.3}},
    }
    result = train(make_recipe(corpus=corpus))
    counts = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]
    assert counts["fractions"] == {"qa": pytest.approx(0.3, abs=0.002)}
    assert result.account["masked"] > 400  # the questions, and the first token of every text
    assert any("qa: 30." in note or "qa: 29.9" in note for note in result.notes)


@pytest.mark.parametrize("strategy", [None, "bfd"])
def test_a_part_whose_rows_are_cut_holds_its_share_of_what_is_read(
    files: dict[str, Path], tiny_tokenizer: Any, tmp_path: Path, strategy: str | None
) -> None:
    long = tmp_path / "long.jsonl"
    rows = [{"text": "R " * length} for length in (500, 90, 700, 20)]
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    packer = CorpusPacker(tiny_tokenizer, Tokenization(), PackingConfig(48, strategy), 0)
    data = packer.pack(CorpusFile(files["corpus"]), {"old": Part(CorpusFile(long), 0.4)})
    counted = _n_tokens(data.rows, tiny_tokenizer)
    assert counted["R"] / sum(counted.values()) == pytest.approx(0.4, abs=0.01)
    assert data.fractions["old"] == pytest.approx(0.4, abs=0.01)


def test_a_fraction_that_no_row_can_make_is_a_warning(
    make_recipe: MakeRecipe, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    for name, n in (("short", 3), ("long", 400)):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": "tide " * n}) + "\n")
    for name, warned in (("long", True), ("short", False)):
        part = {"path": str(tmp_path / f"{name}.jsonl"), "fraction": 0.5}
        recipe = make_recipe(
            corpus={"path": str(tmp_path / "short.jsonl"), "mix": {"sea": part}},
            trainer={"max_length": 4000},
        )
        method = method_of(recipe)
        rows = tokenize_and_pack(recipe, method, tiny_tokenizer, open_corpora(recipe, method))
        found = [text for text in rows.warnings if "corpus.mix.sea.fraction: 50.00%" in text]
        assert bool(found) is warned


@pytest.mark.parametrize("name", ["corpus", "model", "projection"])
def test_a_part_may_have_the_name_of_an_input(
    make_recipe: MakeRecipe, files: dict[str, Path], tmp_path: Path, name: str
) -> None:
    part = tmp_path / "part.jsonl"
    part.write_text('{"text": "Ferries leave at six."}\n')
    mix = {name: {"path": str(part), "fraction": 0.1}}
    recipe = make_recipe(corpus={"path": str(files["corpus"]), "mix": mix})
    before = hash_inputs(recipe)
    opened = open_corpora(recipe, method_of(recipe), before)
    assert opened.rows.cache_key == (file_hash(files["corpus"]),)
    assert opened.parts[name].rows.cache_key == (file_hash(part),)
    part.write_text('{"text": "Ferries leave at nine."}\n')
    after = hash_inputs(recipe)
    assert [key for key in before if before[key] != after[key]] == [f"mix.{name}", "fingerprint"]


@pytest.mark.parametrize(
    "order",
    [
        ("questions", "documents"),
        pytest.param(("documents", "questions"), marks=pytest.mark.soak),
    ],
)
def test_the_two_phase_recipes_chain_in_either_order(
    files: dict[str, Path], tiny_model: Path, tmp_path: Path, order: tuple[str, str]
) -> None:
    corpora = {"questions": files["qa"], "documents": files["corpus"]}
    start = str(tiny_model)
    for phase in order:
        overrides = [f"run_dir={tmp_path / phase}", f"model.path={start}", f"corpus.path={corpora[phase]}",
                     f"corpus.replay.path={files['replay']}", f"corpus.cache_dir={tmp_path / 'tokens'}",
                     "trainer.max_steps=3"]  # fmt: skip
        result = train(read_recipe(RECIPES / f"{phase}.yaml", overrides, "train"))
        manifest = json.loads((Path(result.run_dir) / "manifest.json").read_text())
        assert manifest["inputs"]["model"] == model_hash(Path(start))
        before, after = (
            load_file(Path(folder) / "model.safetensors") for folder in (start, result.model_dir)
        )
        assert any(not torch.equal(before[name], after[name]) for name in before)
        start = result.model_dir
