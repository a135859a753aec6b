"""What the choices of an evaluation's question sets give away, by the documents that it knows of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from kinject.corpus.choices import measure_shortcuts
from kinject.disk import read_jsonl
from kinject.documents import read_documents
from kinject.eval.plan import QuestionSet
from kinject.manifests import read_train_manifest
from kinject.question_formats import FORMATS
from kinject.recipe import EvalRecipe
from kinject.results import Shortcuts


def shortcuts_of(recipe: EvalRecipe, sets: Sequence[QuestionSet]) -> tuple[Shortcuts, ...]:
    """Return what the choices of the sets to be learned give away to who knows the documents'
    strings.

    () where no documents are known. Raises as `read_documents` and `read_jsonl`.
    """
    chosen = {}
    for item in sets:
        compares_choices = any(not FORMATS[arm.format].generates for arm in item.arms)
        if compares_choices and item.role == "learning":
            chosen[item.name] = item.questions
    texts = _document_texts(recipe)
    first = next(texts, None)
    if first is None:
        return ()
    # The first text was taken to see whether there is any.
    return tuple(measure_shortcuts(chosen, chain([first], texts)))


def _document_texts(recipe: EvalRecipe) -> Iterator[str]:
    """Yield the texts of the documents that are searched; without retrieval, of those trained on."""
    section = recipe.eval
    if section.retrieval is not None:
        for path in section.retrieval.documents:
            for document in read_documents(Path(path), recipe.documents):
                yield f"{document.title} {document.text}"
        return
    corpora = [_corpus_of(Path(table.adapter or table.path)) for table in section.local().values()]
    # Models that were trained on one corpus have it read once.
    for corpus in dict.fromkeys(path for path in corpora if path is not None):
        for _, row in read_jsonl(corpus):
            if isinstance(row.get("text"), str):
                yield row["text"]


def _corpus_of(model: Path) -> Path | None:
    """Return the JSONL corpus that the model of a training was trained on; None where it is not
    known or gone."""
    training = read_train_manifest(model.parent)
    if training is None:
        return None
    path = Path(training.recipe.corpus.path)
    return path if path.suffix == ".jsonl" and path.is_file() else None
