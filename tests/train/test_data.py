"""A run parses each line of its corpora once, and none whose tokens are cached."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kinject.corpus.packing import PackingConfig
from kinject.corpus.rows import CorpusRow
from kinject.corpus.tokenize import Tokenization, TokenRow
from kinject.disk import content_id, read_json, read_jsonl
from kinject.errors import InputError, KinjectError, RecipeError, TrainingError
from kinject.recipe import CorpusSection, TrainRecipe
from kinject.train import train
from kinject.train.batches import RoundSampler
from kinject.train.data import (
    CorpusPacker,
    Part,
    _hold_out,
    check_account,
    open_corpora,
    tokenize_and_pack,
)
from kinject.train.methods import method_of
from kinject.train.setup import make_trainer
from small import interrupt, quick

MakeRecipe = Callable[..., TrainRecipe]
WriteRows = Callable[[str, Sequence[Mapping[str, Any]]], Path]


@contextmanager
def _counting_parses(*paths: Path) -> Iterator[Counter[str]]:
    """Count how often each line of `paths` goes through the JSON parser."""
    lines = {line for path in paths for line in path.read_text("utf-8").splitlines()}
    counts: Counter[str] = Counter(dict.fromkeys(lines, 0))
    decode = json.JSONDecoder.decode

    def count(self: json.JSONDecoder, text: str, *arguments: Any) -> Any:
        if text.strip() in lines:
            counts[text.strip()] += 1
        return decode(self, text, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json.JSONDecoder, "decode", count)
        yield counts


@pytest.fixture
def files(write_rows: WriteRows) -> dict[str, Path]:
    """A corpus with weights, one to replay from, one to validate on."""
    return {
        name: write_rows(
            f"{name}.jsonl",
            [{"text": f"{name} {i} was born in Kelm.", "weight": 1 + i} for i in range(n)],
        )
        for name, n in (("corpus", 60), ("replay", 80), ("validation", 20))
    }


def _sections(files: dict[str, Path]) -> dict[str, Any]:
    return {
        "corpus": {
            "path": str(files["corpus"]), "validation_corpus": str(files["validation"]),
            "replay": {"path": str(files["replay"]), "fraction": 0.25},
        },
        "trainer": {"max_steps": 2, "eval_strategy": "steps", "eval_steps": 2},
    }  # fmt: skip


def test_lines_are_parsed_once_of_replay_twice_and_in_a_rerun_never(
    make_recipe: MakeRecipe, files: dict[str, Path]
) -> None:
    with _counting_parses(*files.values()) as counts:
        train(make_recipe(**_sections(files)))
    twice = {line for line, n in counts.items() if n == 2}
    assert set(counts.values()) == {1, 2}
    assert all("replay" in line for line in twice)
    with _counting_parses(*files.values()) as counts:
        train(make_recipe(**_sections(files)), overwrite=True)
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("name", ["corpus", "replay", "validation"])
def test_all_faulty_lines_of_a_corpus_are_reported_before_a_model_loads(
    make_recipe: MakeRecipe, files: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kinject.models.load_model", lambda *_, **__: pytest.fail("a model was loaded")
    )
    with files[name].open("a") as file:
        file.write('{"txt": 1}\n{"text": ""}\n')
    with pytest.raises(InputError) as caught:
        train(make_recipe(**_sections(files)))
    first = {"corpus": 61, "replay": 81, "validation": 21}[name]
    faults = [
        line.removeprefix(f"{files[name]}:").split(":")[0]
        for line in str(caught.value).splitlines()
    ]
    assert faults == [str(first), str(first + 1)]


def test_a_method_that_the_rows_do_not_fit_is_a_fault_also_of_cached_tokens(
    make_recipe: MakeRecipe, files: dict[str, Path]
) -> None:
    for _ in range(2):
        found = r"found sft, but .*corpus\.jsonl:1 holds text"
        with pytest.raises(RecipeError, match=rf"recipe\.yaml:\d+: method: {found}"):
            train(make_recipe(**_sections(files), method="sft"), overwrite=True)
        train(make_recipe(**_sections(files)), overwrite=True)


@pytest.fixture
def documents(write_rows: Any) -> Path:
    """Three texts each of 20 documents, apart from each other, of weights of their own."""
    rows = [
        {
            "text": f"Mill {i} of Kelm was built in {1800 + i}, says source {k}.",
            "document_id": f"d{i}",
            "w": 1 + (i + k) % 3,
        }
        for k in range(3)
        for i in range(20)
    ]
    return Path(write_rows("documents.jsonl", rows))


@pytest.mark.parametrize("weighted", quick([False, True], True))
def test_documents_held_out_are_validated_and_not_learned(
    make_recipe: MakeRecipe, documents: Path, tmp_path: Path, weighted: bool
) -> None:
    trainer = {"eval_strategy": "steps", "eval_steps": 3, "max_steps": 6, "packing": False}
    sections = {"techniques": {"row_weights": {"column": "w"}}} if weighted else {}
    corpus = {"path": str(documents), "validation_fraction": 0.2}
    result = train(
        make_recipe(run_dir=str(tmp_path / "split"), corpus=corpus, trainer=trainer, **sections)
    )
    assert any("4 of 20 documents (12 rows) are held out" in note for note in result.notes)
    names = sorted((f"d{i}" for i in range(20)), key=lambda name: content_id("validation", name))
    learned = set(names[4:])
    parts: dict[bool, list[str]] = {True: [], False: []}
    for line in documents.read_text().splitlines():
        parts[json.loads(line)["document_id"] in learned].append(line + "\n")
    files = {name: tmp_path / f"{name}.jsonl" for name in ("learned", "held-out")}
    files["learned"].write_text("".join(parts[True]))
    files["held-out"].write_text("".join(parts[False]))
    corpus = {"path": str(files["learned"]), "validation_corpus": str(files["held-out"])}
    train(
        make_recipe(run_dir=str(tmp_path / "by hand"), corpus=corpus, trainer=trainer, **sections)
    )
    logs = [
        [row for _, row in read_jsonl(tmp_path / name / "log.jsonl")]
        for name in ("split", "by hand")
    ]
    for key in ("loss", "eval_loss"):
        first, second = ([row[key] for row in log if key in row] for log in logs)
        assert first == second != []


def test_a_row_without_a_document_is_none_of_the_document_of_its_number() -> None:
    def rows(row_ids: Sequence[int], document_ids: Sequence[str]) -> list[TokenRow]:
        return [
            TokenRow(str(row), document, "", [1, 2], [False, True])
            for row, document in zip(row_ids, document_ids, strict=True)
        ]

    alone, named = rows(range(6), [""] * 6), rows(range(6, 18), [str(i // 2) for i in range(12)])
    split = _hold_out(CorpusSection("c.jsonl", validation_fraction=0.25), [*alone, *named])
    assert split is not None
    assert "3 of 12 documents" in split.note


def test_a_split_of_one_document_is_refused(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"text": "The mill of Kelm.", "document_id": "d"}) + "\n")
    with pytest.raises(RecipeError, match="holds one document"):
        train(
            make_recipe(
                corpus={"path": str(one), "validation_fraction": 0.1},
                trainer={"eval_strategy": "epoch"},
            )
        )


LOST = (
    # What is validated on, trainer, the message: nothing left, more than the model's 256 positions.
    ({"prompt": "Where is the mill? " * 20, "completion": " Kelm"}, {"max_length": 48}, "none of the"),
    ({"text": "The mill of Kelm turns. " * 50}, {"max_length": None}, "validation rows reach"),
)  # fmt: skip


@pytest.mark.parametrize(("row", "trainer", "message"), LOST)
def test_validation_rows_that_no_loss_can_have_are_refused(
    make_recipe: MakeRecipe,
    corpus: Path,
    write_rows: WriteRows,
    row: dict[str, str],
    trainer: dict[str, Any],
    message: str,
) -> None:
    validation = {"path": str(corpus), "validation_corpus": str(write_rows("v.jsonl", [row] * 2))}
    recipe = make_recipe(
        corpus=validation, trainer={"eval_strategy": "epoch", "packing": False, **trainer}
    )
    with pytest.raises(KinjectError, match=message):
        make_trainer(recipe)


def test_text_that_the_validation_loss_leaves_out_is_a_warning(
    make_recipe: MakeRecipe, corpus: Path, write_rows: WriteRows, tiny_tokenizer: Any
) -> None:
    path = write_rows("v.jsonl", [{"text": "Kelm has a mill."}, {"text": "The mill turns. " * 30}])
    recipe = make_recipe(
        corpus={"path": str(corpus), "validation_corpus": str(path)},
        trainer={"eval_strategy": "epoch", "packing": False},
    )
    method = method_of(recipe)
    data = tokenize_and_pack(recipe, method, tiny_tokenizer, open_corpora(recipe, method))
    n_lost = len(tiny_tokenizer("The mill turns. " * 30).input_ids) + 1 - 64
    assert any(f"leaves out {n_lost} of" in warning for warning in data.warnings)


def test_a_corpus_of_no_token_is_refused_with_parts_too(tiny_tokenizer: Any) -> None:
    packer = CorpusPacker(tiny_tokenizer, Tokenization(), PackingConfig(None), 0)
    other = Part([CorpusRow("1", "", "", "text", text="Kelm has a mill.")], 0.2)
    data = packer.pack_tokens([TokenRow("0", "", "", (), ())] * 3, {"general": other})
    with pytest.raises(TrainingError, match="Nothing is left to learn"):
        check_account(data.account, None, allow_dropped_tokens=True)


def test_only_the_main_corpus_is_learned_from_the_second_part_of_texts(tiny_tokenizer: Any) -> None:
    """What is replayed has no teacher that reads the first one."""
    text = "Kelm has a mill. The mill turns in the wind. Nobody lives there."
    rows = [CorpusRow(str(i), "", "original", "text", text=text) for i in range(4)]
    packer = CorpusPacker(tiny_tokenizer, Tokenization(second_part=True), PackingConfig(None), 0)
    data = packer.pack(rows, {"replay": Part([replace(rows[0], origin="replay")], 0.5)})
    ids = tiny_tokenizer(text, add_special_tokens=False).input_ids
    replayed = [row for row in data.rows if any(row.replayed)]
    others = [row for row in data.rows if not any(row.replayed)]
    assert {tuple(row.input_ids[1:-1]) for row in replayed} == {tuple(ids)}
    assert len(others) == 4
    assert all(len(row.input_ids) < len(ids) for row in others)


@pytest.fixture
def wordings(tmp_path: Path) -> Path:
    """Thirty documents of six wordings, and one of a single wording."""
    path = tmp_path / "wordings.jsonl"
    rows = [
        {"document_id": f"d{d}", "text": f"Person {d} lives at Farrow, wording {k}."}
        for d in range(30)
        for k in range(6)
    ]
    path.write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"document_id": "once", "text": "Kelm."}])
    )
    return path


def test_the_manifest_counts_the_exposures_of_each_document(
    make_recipe: MakeRecipe, wordings: Path
) -> None:
    trainer = {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16}
    result = train(make_recipe(corpus={"path": str(wordings)}, trainer=trainer))
    counts = json.loads((Path(result.run_dir) / "manifest.json").read_text())["counts"]
    assert counts["exposures"]["documents"] == 31
    assert counts["exposures"]["rows"] == {"min": 2, "median": 12, "max": 12}


def test_a_spread_epoch_takes_round_after_round_and_another_order_each_epoch() -> None:
    rounds = [0] * 5 + [1] * 4 + [2] * 6
    sampler = RoundSampler(rounds, 7)
    first = list(sampler)
    assert sorted(first) == list(range(15))
    order = [rounds[index] for index in first]
    assert sum(a != b for a, b in pairwise(order)) == 2  # each round in one stretch
    assert first == list(RoundSampler(rounds, 7))
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize("order", ["random", "group_by_length"])
def test_a_resumed_run_keeps_the_order_of_its_second_epoch(
    make_recipe: MakeRecipe, wordings: Path, order: str
) -> None:
    trainer = {
        "max_steps": 30, "save_strategy": "steps", "save_steps": 25, "train_sampling_strategy": order,
    }  # fmt: skip
    recipe = make_recipe(corpus={"path": str(wordings)}, trainer=trainer)

    def _losses(resume: bool) -> list[float]:
        train(recipe, resume=resume)
        return [row["loss"] for _, row in read_jsonl(recipe.run_dir / "log.jsonl") if "loss" in row]

    uninterrupted = _losses(resume=False)
    assert (
        read_json(recipe.run_dir / "manifest.json", "")["counts"]["epochs"] > 1
    )  # each has another order
    interrupt(recipe.run_dir, 25)
    assert _losses(resume=True) == uninterrupted
