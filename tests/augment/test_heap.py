"""A folder of files as documents of a recipe: collected once for every verb, with the licence on the rows of the corpus."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kinject import executors
from kinject.augment import augment
from kinject.disk import read_jsonl, read_manifest_fields
from kinject.eval.retrieval import read_passages
from kinject.heap import read_documents
from kinject.recipe import AugmentRecipe, DocumentsSection, RetrievalSection, read_recipe


def test_a_folder_is_parsed_once_for_every_verb_and_its_licence_goes_to_the_corpus(
    make_recipe: Callable[..., AugmentRecipe], documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    heap = tmp_path / "heap"
    heap.mkdir()
    for number, document in enumerate(list(read_documents(documents))[:3]):
        (heap / f"{number}.md").write_text(f"---\nlicence: CC0-1.0\n---\n\n{document.text}")
    (heap / "photo.jpg").write_bytes(b"\xff\xd8")
    row = {
        "text": list(read_documents(documents))[3].text,
        "source": "https://example.org/kelm",
        "licence": "CC0-1.0",
    }
    (heap / "rows.jsonl").write_text(json.dumps(row))
    for file in heap.iterdir():
        os.utime(file, (1e9, 1e9))  # a file that has just changed is opened again
    path = tmp_path / "recipe.yaml"

    def recipe() -> AugmentRecipe:
        make_recipe(documents="heap", styles={"paraphrase": 1})
        path.write_text(path.read_text() + "documents: {near_duplicates: 0.9}\n")
        return read_recipe(
            path, ["augment.documents=heap", "augment.styles={paraphrase: 1}"], "augment"
        )

    result = augment(recipe())
    assert "heap: files and documents there that cannot be read: 1, left out" in caplog.text
    rows = [row for _, row in read_jsonl(result.corpus_path)]
    names = {*(f"{n}.md" for n in range(3)), "https://example.org/kelm"}
    assert {(row["source"], row["licence"]) for row in rows} == {
        (name, "CC0-1.0") for name in names
    }
    assert {row["document_id"].partition("#")[0] for row in rows} == {
        *(f"{n}.md" for n in range(3)),
        "rows.jsonl",
    }
    manifest = read_manifest_fields(result.manifest_path)
    assert manifest is not None
    assert list(manifest["inputs"]) == ["heap"]

    monkeypatch.setattr(executors, "LocalExecutor", lambda *_: pytest.fail("everything is parsed"))
    assert augment(recipe()).n_documents == 4
    section = DocumentsSection(near_duplicates=0.9)
    retrieval = RetrievalSection(documents=("heap",))
    assert len(read_passages(retrieval, section)) == 4
    assert len(read_passages(retrieval)) == 4  # an option that does not change how files are read
