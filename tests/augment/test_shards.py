"""Shards of kinject augment, merged: the files and counts of one process, whatever was killed."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.augment.groups import pair_groups
from kinject.augment.passage_file import PlannedDocuments
from kinject.augment.pieces import JOURNALS
from kinject.augment.plan import make_plan
from kinject.augment.questions import make_questions, merge_questions
from kinject.augment.run import AugmentResult, augment, merge_variants
from kinject.augment.sandbox import answer_as_sandbox
from kinject.augment.store import Store, write_decision
from kinject.cli import main
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.llm.limits import limits_of
from kinject.recipe import Recipe, read_recipe
from kinject.recipe.sections import GeneratorSection
from kinject.shards import Shard, parse_shard
from kinject.types import Completion, Message

Make = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("exact_copies_only", "forked")
SCRIPT = """
import sys
from pathlib import Path
from kinject.augment.checks import checker
from kinject.augment.run import augment
from kinject.recipe import read_recipe
from kinject.shards import parse_shard
checker.MAX_OVERLAP = 0.99
augment(read_recipe(Path(sys.argv[1]), sys.argv[3:], verb="augment"), parse_shard(sys.argv[2]))
"""
NO_FINDS = {"contamination": None}
"""Its entry has paths of the run."""
# Drawn by the request: a shard meets those that one process meets.
FAULTS = {"changed": 0.15, "refusal": 0.1}


def elsewhere(recipe: Recipe, name: str) -> Recipe:
    return replace(recipe, run_dir=recipe.run_dir.with_name(name))


def counts(run_dir: Path) -> dict[str, Any]:
    """The counts of a manifest that one process and merged shards have in common."""
    manifest = json.loads((run_dir / "manifest.json").read_text())
    return {
        key: manifest["counts"][key] for key in manifest["counts"].keys() - {"this_run", "shards"}
    }


def ids(path: Path) -> list[str]:
    return sorted(row["id"] for _, row in read_jsonl(path))


def kill_midway(recipe: Recipe, shard: Shard, server: Any) -> None:
    """Run a shard in a process of its own, and kill it after its first answers."""
    before, overrides = server.answered.total(), list(recipe.overrides)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(recipe.path), str(shard), *overrides]
    )
    while server.answered.total() < before + 2 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("totals", [(1, 3), pytest.param((2, 7), marks=pytest.mark.soak)])
def test_merged_shards_are_what_one_process_makes(
    make_recipe: Make, serving: Callable[..., Any], totals: tuple[int, ...]
) -> None:
    server = serving(faults=FAULTS, by_request=True, latency=0.005)
    recipe = make_recipe(
        server.url,
        styles={"paraphrase": 2, "questions": 1},
        generator__price=[1, 2],
        max_attempts=2,
    )
    whole = augment(elsewhere(recipe, "whole"))
    assert whole.refused, "the faults are met"
    assert whole.sft_path is not None
    for total in totals:
        sharded = elsewhere(recipe, f"by-{total}")
        for number in range(1, total + 1):
            shard = Shard(number, total)
            if number == (total + 1) // 2:
                kill_midway(make_recipe_at(recipe, sharded.run_dir), shard, server)
                assert not (shard.folder(sharded.run_dir) / "manifest.json").exists()
                with pytest.raises(InputError, match=rf"not finished: .*{shard}"):
                    merge_variants(sharded)
            augment(sharded, shard)
        merged = merge_variants(sharded)
        assert merged.n_sent == 0
        for name in ("corpus.jsonl", "sft.jsonl", "coverage.jsonl", "failures.jsonl"):
            assert (sharded.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes(), (
                total,
                name,
            )
        for name in ("variants.jsonl", "rejected.jsonl"):
            assert ids(sharded.run_dir / name) == ids(whole.run_dir / name), (total, name)
        assert counts(sharded.run_dir) == counts(whole.run_dir)
        again = (sharded.run_dir / "variants.jsonl").read_bytes()
        merge_variants(sharded)
        assert (sharded.run_dir / "variants.jsonl").read_bytes() == again
        assert counts(sharded.run_dir) == counts(whole.run_dir)


def test_a_merge_that_copies_rows_counts_over_all_shards(
    make_recipe: Make, documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, rows = ["Ada Holm", "Bo Lind", "Carl Ek"], []
    asked = [
        f"which of the old {thing} beside the long river did the council of the town sell first?"
        for thing in ("barns", "mills")
    ]
    for number in range(9):
        text = f"The mill {number} was built by {names[number % 3]} in 17{number + 20}."
        if number == 7:
            text += f" People asked {asked[1]}"  # a document may hold a question
        rows.append(json.dumps({"id": f"m{number}", "title": f"Mill {number}", "text": text}))
    documents.write_text("\n".join(rows) + "\n")
    probes = [
        json.dumps({"id": f"q{number}", "question": text, "choices": ["a", "b"], "answer": 1})
        for number, text in enumerate(asked)
    ]
    questions = tmp_path / "probes.jsonl"
    questions.write_text("\n".join(probes) + "\n")
    sandbox = import_module("kinject.augment.sandbox")

    def rewrite(messages: list[Message], seed: int) -> Completion:
        more = asked[seed % 2].capitalize() if seed % 3 else "Nobody knows why."
        return Completion(f"{sandbox.passage_of(messages)} {more}")

    monkeypatch.setattr(sandbox, "generate_answer", rewrite)
    styles = {"paraphrase": 2, "related": 1}
    settings = {"contamination_check": [str(questions)], "coverage": 3, "max_attempts": 1}
    recipe = make_recipe(styles=styles, **settings)
    whole = augment(elsewhere(recipe, "whole"))
    assert whole.contamination.by_place == {"corpus": {"q0"}}
    assert len(whole.coverage.short) == 5
    assert whole.styles["related"].got == 3
    for number in range(1, 5):
        augment(recipe, Shard(number, 4))
    stored = []
    monkeypatch.setattr(Store, "add_all", lambda store, others: stored.append(others))
    merged = merge_variants(recipe)
    assert not stored, "rows were copied, not read"
    check_same(merged, whole)
    monkeypatch.undo()
    # What is not as its shard left it is written again, from the shard's variants.
    changed = Shard(2, 4).folder(recipe.run_dir) / "corpus.jsonl"
    changed.write_bytes(changed.read_bytes().replace(b"built", b"BUILT"))
    for name in JOURNALS:
        (recipe.run_dir / name).unlink()
    check_same(merge_variants(recipe), whole)


def check_same(merged: AugmentResult, whole: AugmentResult) -> None:
    for name in ("corpus.jsonl", "coverage.jsonl", "failures.jsonl"):
        assert (merged.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes(), name
    assert ids(merged.variants_path) == ids(whole.variants_path)
    assert counts(merged.run_dir) | NO_FINDS == counts(whole.run_dir) | NO_FINDS
    assert merged.coverage.short == whole.coverage.short
    in_run = [(name, words) for name, _, words in merged.contamination.first]
    assert in_run == [(name, words) for name, _, words in whole.contamination.first]
    locations = [location for _, location, _ in merged.contamination.first]
    assert all(location.startswith(f"{merged.corpus_path}: ") for location in locations)


def test_what_got_no_answer_in_a_shard_has_none_in_the_merge(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    results, failures = [], []
    for name in ("whole", "by-2"):
        # A server of its own: a fault of a request does not come twice.
        server = serving(faults={"400": 0.3}, by_request=True)
        recipe = elsewhere(make_recipe(server.url, styles={"paraphrase": 1}), name)
        if name == "whole":
            results.append(augment(recipe))
        else:
            for number in (1, 2):
                augment(recipe, Shard(number, 2))
            results.append(merge_variants(recipe))
        failures.append(results[-1].failures_path.read_text().replace(server.url, "URL"))
    whole, merged = results
    assert 0 < sum(whole.failed.values()) < 12
    assert sum(merged.failed.values()) == sum(whole.failed.values())
    assert merged.short
    assert failures[0] == failures[1]


def make_recipe_at(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe of a process of its own, which writes to `run_dir`."""
    return replace(recipe, overrides=(*recipe.overrides, f"run_dir={run_dir}"))


def test_shards_that_do_not_belong_together_are_one_clear_line(make_recipe: Make) -> None:
    recipe = make_recipe(styles={"paraphrase": 1})
    with pytest.raises(InputError, match="no shards there"):
        merge_variants(recipe)
    augment(recipe, Shard(2, 3))
    with pytest.raises(InputError, match=r"2 of 3 shards \(1/3, 3/3\). Run: .* --shard 1/3"):
        merge_variants(recipe)
    with pytest.raises(InputError, match="holds shards that are not merged"):
        augment(recipe)
    other = make_recipe(styles={"paraphrase": 1}, include_originals=False)
    augment(other, Shard(1, 3))
    augment(recipe, Shard(3, 3))
    with pytest.raises(InputError, match=r"1-of-3: .* augment.include_originals is False there"):
        merge_variants(recipe)
    documents = Path(recipe.augment.documents)
    lines = documents.read_text().splitlines(keepends=True)
    documents.write_text("".join(lines[:-1]))
    augment(recipe, Shard(1, 3))
    with pytest.raises(InputError, match=r"2-of-3: was made from another .*documents.jsonl"):
        merge_variants(recipe)
    augment(recipe, Shard(1, 4))
    with pytest.raises(InputError, match=r"several divisions \(N-of-3, N-of-4\)"):
        merge_variants(recipe)
    for words in (["--merge"], ["--shard", "9/3"]):
        assert main(["augment", str(recipe.path), *words]) == 2


def test_a_shard_whose_texts_were_cut_or_edited_is_named(make_recipe: Make) -> None:
    recipe = make_recipe(styles={"paraphrase": 1})
    for number in (1, 2):
        augment(recipe, Shard(number, 2))
    path = Shard(1, 2).folder(recipe.run_dir) / "variants.jsonl"
    written = path.read_bytes()
    for changed in (written[: written.index(b"\n") + 1], written.replace(b" was ", b" is ")):
        assert changed != written
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"1-of-2/variants.jsonl: .* \(--shard 1/2\); if you"):
            merge_variants(recipe)
    path.unlink()
    with pytest.raises(InputError, match=r"1-of-2/variants.jsonl: is missing. .*--shard 1/2"):
        merge_variants(recipe)
    assert not (recipe.run_dir / "variants.jsonl").exists(), "nothing was merged"
    augment(recipe, Shard(1, 2))
    assert merge_variants(recipe).got == 12


def test_what_a_person_decided_in_a_shard_holds_in_the_merge(make_recipe: Make) -> None:
    recipe = make_recipe(styles={"paraphrase": 1})
    for number in (1, 2):
        augment(recipe, Shard(number, 2))
    folder = Shard(2, 2).folder(recipe.run_dir)
    dropped, edited = ids(folder / "variants.jsonl")[:2]
    write_decision(folder, {"id": dropped, "decision": "drop"})
    write_decision(folder, {"id": edited, "decision": "edit", "text": "The mill is in Kelm."})
    merged = merge_variants(recipe)
    assert {name: n for name, n in merged.decisions.items() if n} == {"drop": 1, "edit": 1}
    texts = {row["id"]: row["text"] for _, row in read_jsonl(merged.corpus_path)}
    assert dropped not in texts
    assert texts[edited] == "The mill is in Kelm."
    # A later decision in the merged run is kept by the next merge.
    write_decision(recipe.run_dir, {"id": dropped, "decision": "keep"})
    assert dropped in {row["id"] for _, row in read_jsonl(merge_variants(recipe).corpus_path)}


def test_questions_of_merged_shards_are_those_of_one_process(
    tmp_path: Path, documents: Path, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        import_module("kinject.augment.sandbox"), "generate_answer", answer_as_sandbox
    )
    server = serving()
    text = f"questions:\n  documents: {documents}\n  generator: {{kind: openai, model: sandbox, "
    path = tmp_path / "questions.yaml"
    path.write_text(f"run_dir: {tmp_path}/run\n{text}base_url: '{server.url}'}}\n")
    recipe = read_recipe(path, ["questions.generator.price=[3, 4]"], verb="questions")
    whole = elsewhere(recipe, "whole")
    make_questions(whole)
    for number in (1, 2, 3, 4):
        make_questions(recipe, shard=Shard(number, 4))
    n_asked = server.n_requests
    merged = merge_questions(recipe)
    assert server.n_requests == n_asked
    assert (merged.got, merged.n_sent) == (24, 0)
    for name in ("questions", "validation", "test", "rejected"):
        name = f"{name}.jsonl"
        assert (recipe.run_dir / name).read_bytes() == (whole.run_dir / name).read_bytes()
    assert counts(recipe.run_dir) == counts(whole.run_dir)
    path = Shard(3, 4).folder(recipe.run_dir) / "outcomes.jsonl"
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(InputError, match=r"3-of-4/outcomes.jsonl: .* \(--shard 3/4\)"):
        merge_questions(recipe)


def test_a_pair_of_documents_of_two_shards_belongs_to_one(
    make_recipe: Make, documents: Path
) -> None:
    names = ["Ada Holm", "Bo Lind", "Carl Ek", "Dag Berg", "Eva Dahl"]
    rows = []
    for number in range(10):
        text = f"The bridge {number} was built by {names[number % 5]} in 19{number + 10}."
        rows.append(json.dumps({"id": f"d{number}", "title": f"Bridge {number}", "text": text}))
    documents.write_text("\n".join(rows) + "\n")
    plan = make_plan(make_recipe(styles={"related": 1}))
    whole = [group.passage.id for group in pair_groups(plan, PlannedDocuments(plan))]
    assert len(whole) == 5
    found = []
    for number in (1, 2, 3):
        part = replace(plan, shard=Shard(number, 3))
        found += [group.passage.id for group in pair_groups(part, PlannedDocuments(part))]
    assert sorted(found) == sorted(whole)


def test_a_shard_has_its_part_of_budget_and_requests() -> None:
    generator = GeneratorSection(kind="openai", model="m", concurrency=10)
    parts = [limits_of(generator, 6.0, Shard(number, 4)) for number in (1, 2, 3, 4)]
    assert [part.concurrency for part in parts] == [3, 3, 2, 2]
    assert [part.budget for part in parts] == [1.5] * 4
    assert limits_of(generator, None, Shard(11, 12)).concurrency == 1
    local = GeneratorSection(kind="transformers", model="m", concurrency=10)
    assert limits_of(local, None, Shard(2, 4)).concurrency == 10


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "1/0", "a/b", "1/3/5", "-1/3"])
def test_a_shard_is_written_as_number_and_total(text: str) -> None:
    with pytest.raises(InputError, match="expected I/N"):
        parse_shard(text)
