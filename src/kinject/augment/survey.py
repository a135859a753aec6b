"""`kinject try`: a survey of a person's documents, and recipes for them."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kinject.augment.pilot import cloze_questions, package_folder
from kinject.augment.plan import Group
from kinject.augment.preview import TOKENS_PER_WORD, Preview, preview, render_prompts
from kinject.augment.styles import STYLES
from kinject.corpus.passages import split_passages, word_spans
from kinject.disk import file_name, path_exists, read_jsonl, write_jsonl, write_text
from kinject.documents import is_hub_name, read_documents
from kinject.documents.collect import DocumentsResult, collect, listing, named_languages
from kinject.documents.rows import is_saved_dataset
from kinject.documents.write import read_rows
from kinject.errors import DiskError, EndpointError
from kinject.language.detect import language_name
from kinject.language.tables import language_of
from kinject.recipe import read_recipe
from kinject.recipe.shipped import write_own_recipes
from kinject.types import Tabular

_N_PROMPTS, _MOST_SHOWN, _MOST_LINES = 3, 12, 30
_PILOT_DOCUMENTS = 24
_LINK = r"runs/real/smollm2"
"""Where recipes/own expects the pilot's model."""


@dataclass(frozen=True)
class Survey(Tabular):
    """The result of `try_documents`.

    `files` counts the documents of each file that was read, `skipped` maps the others to the reason. `n_tokens` are
    an estimate. `languages` counts documents by ISO 639-1 code, "" where none is clear;
    `alike` are the copies that were left out, (copy, document that is kept, fraction of words in common, what differs); a
    version, which is kept too, has the fraction 0. `preview` is what augmenting with the recipe would request. `kept` are
    recipes that were there and were not written over. `documents` is the run that collected the documents. `pilot` counts
    documents and questions of the pilot; `ready`: endpoint and model are filled in.
    """

    path: Path
    files: Mapping[str, int]
    skipped: Mapping[str, str]
    n_tokens: int
    languages: Mapping[str, int]
    alike: Sequence[tuple[str, str, float, str]]
    preview: Preview
    prompts: Sequence[str]
    documents: DocumentsResult
    prompts_path: Path
    recipes: Sequence[Path]
    kept: Sequence[Path] = ()
    pilot: tuple[int, int] = (0, 0)
    ready: bool = False

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a row for each file: the documents in it, or why it was skipped."""
        read = [{"file": name, "documents": n, "skipped": ""} for name, n in self.files.items()]
        return read + [{"file": name, "documents": 0, "skipped": reason} for name, reason in self.skipped.items()]


def try_documents(
    path: Path, *, endpoint: str | None = None, model: str | None = None, root: Path = Path()
) -> Survey:  # fmt: skip
    """Collect the documents at `path` into `root`/runs/NAME/documents; write recipes/NAME/*.yaml, and the pilot in runs/NAME.

    NAME is that of the folder or file. The recipes read the collected documents; those that are there stay. An `endpoint`
    writes (asked for the name of its model, no more), and `model` learns. Raises as `collect`, and `EndpointError`.
    """
    if not path_exists(path) and not is_hub_name(path):
        raise DiskError(f"{path}: nothing is there. Check the path.")
    name = file_name(path.resolve().stem if path.is_file() else path.resolve().name)
    folder = root / "runs" / name
    given = path
    if is_hub_name(path) or is_saved_dataset(path):
        given = folder / "rows.jsonl"
        write_jsonl(given, read_documents(path))
    documents = collect([given], folder=folder / "documents")
    corpus, questions = cloze_questions(read_rows(documents.documents_path), _PILOT_DOCUMENTS)
    write_jsonl(folder / "pilot" / f"{name}.jsonl", corpus)
    write_jsonl(folder / "pilot" / "questions.jsonl", questions)
    written, kept = write_own_recipes(name, root, {_LINK: str(package_folder()), **_filled_in(endpoint, model)})
    recipe = read_recipe(root / "recipes" / name / "augment.yaml", verb="augment")
    n_words = sum(len(word_spans(document.text)) for document in read_rows(documents.documents_path))
    first = {
        document.source.partition(":")[0]: document
        for document in reversed(list(islice(read_rows(documents.documents_path), 99)))
    }
    shown = [*reversed(first.values())][:_N_PROMPTS]
    passages = [split_passages(document, recipe.augment.passage_tokens, word_spans)[0] for document in shown]
    pairs = zip(shown, passages, strict=True)
    prompts = [render_prompts(Group(document, passage, STYLES["paraphrase"], 1)) for document, passage in pairs]
    prompts_path = folder / "prompts.txt"
    write_text(prompts_path, "".join(f"################ prompt {n}\n{text}\n\n" for n, text in enumerate(prompts, 1)))
    rows = [row for _, row in read_jsonl(documents.folder / "duplicates.jsonl")]
    return Survey(
        path=path, files={row["file"]: row["documents"] for row in documents.files() if row["documents"]},
        skipped={row["file"]: f"{row['where']}: {row['detail']}" for row in documents.skipped() if not row["left_out"]},
        n_tokens=round(n_words * TOKENS_PER_WORD),
        languages=documents.counts["languages"], preview=preview(recipe), prompts=prompts, documents=documents,
        alike=list(_copies(rows)),
        prompts_path=prompts_path, recipes=tuple(written), kept=tuple(kept),
        pilot=(len(corpus), len(questions)), ready=endpoint is not None and model is not None,
    )  # fmt: skip


def _copies(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, str, float, str]]:
    """Yield (copy or version, document that is kept, fraction of words in common, what differs)."""
    for row in rows:
        words, others = (", ".join(row.get(key, [])[:6]) for key in ("words_only_here", "words_only_there"))
        if "version" in row:
            yield row["version"], row["kept"], 0.0, f"a version, both are kept: {words} where the other has {others}"
        elif "overlap" in row:  # the others are parts of documents
            yield row["dropped"], row["kept"], row["overlap"], f"only there: {words}" if words else ""


def _render_copy(copy: str, kept: str, alike: float, differs: str) -> str:
    notes = [f"{alike:.0%} of the words"] * (alike > 0) + [differs] * bool(differs)
    return f"{copy} of {kept} ({'; '.join(notes)})"


def render_survey(survey: Survey) -> str:
    """Return the survey as text."""
    costs = survey.preview
    by_suffix = Counter(Path(name).suffix.lower() or "rows" for name in survey.files)
    suffixes = ", ".join(f"{suffix} {n:,}" for suffix, n in by_suffix.most_common())
    rows = [
        ("read", f"{sum(survey.files.values()):,} documents in {len(survey.files):,} files ({suffixes})"),
        ("passages", f"{costs.n_passages:,}, the longest of {costs.longest:,} words and marks, {costs.n_words:,} in all"),
        ("tokens", f"{survey.n_tokens:,} (an estimate: {TOKENS_PER_WORD} for each word or mark)"),
        ("languages", listing(named_languages(survey.languages))),
        *(
            ("", f"not checked in {language_name(code)}: {', '.join(language_of(code).not_checked)}")
            for code in survey.languages if code and language_of(code).not_checked
        ),
        *_listed("copies", [_render_copy(*copy) for copy in survey.alike]),
        *_listed("skipped", survey.documents.render_skipped(), len(survey.skipped)),
        ("augmenting", f"{costs.n_asked:,} rewritings: {costs.n_requests:,} requests, about {costs.tokens_in:,} tokens in and"),
        ("", f"{costs.tokens_out:,} out; cost {costs.cost:,.2f} at the prices in the recipe"),
    ]  # fmt: skip
    lines = [str(survey.path), "", *(f"{name:<12}{text}" for name, text in rows), ""]
    first = survey.prompts[0].splitlines()
    lines += [f"the first of {len(survey.prompts)} sample prompts ({survey.prompts_path} has all):", ""]
    lines += [f"  {line}" for line in first[:_MOST_LINES]] + (["  ..."] if len(first) > _MOST_LINES else [])
    written = [f"{survey.documents.documents_path}, {survey.documents.folder}/documents.html, {survey.prompts_path}"]
    lines += ["", *(f"written: {name}" for name in (*written, *survey.recipes))]
    lines += [f"kept as it was: {path}" for path in survey.kept]
    return "\n".join(lines)


def _filled_in(endpoint: str | None, model: str | None) -> dict[str, str]:
    """Return what replaces the texts of the recipes that only the user knows."""
    values = {}
    if endpoint is not None:
        import openai

        try:
            client = openai.OpenAI(base_url=endpoint, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)
            writer = next(iter(client.models.list())).id
        except (openai.OpenAIError, StopIteration) as error:
            fix = "Is it an OpenAI-compatible endpoint, as http://127.0.0.1:8000/v1, and is it running?"
            raise EndpointError(
                f"--endpoint {endpoint}: it names no model ({error or 'an empty list'}). {fix}"
            ) from error
        values = {
            r"gpt-4o-mini\b.*": json.dumps(writer), r"# base_url: .*": f"base_url: {json.dumps(endpoint)}",
            r"    price: .*\n": "", r"  budget: .*\n": "",
        }  # fmt: skip
    if model is not None:
        values[r"Qwen/Qwen3-0\.6B-Base\b.*"] = json.dumps(model)
        values[r"  bos: false # Qwen.*\n"] = ""
    return values


def _listed(name: str, texts: Sequence[str], n: int | None = None) -> list[tuple[str, str]]:
    """Return lines of a list under the count `n` (None: of the texts)."""
    shown = [*texts[:_MOST_SHOWN], *([f"and {len(texts) - _MOST_SHOWN:,} more"] if len(texts) > _MOST_SHOWN else [])]
    return [(name, f"{len(texts) if n is None else n:,}" if texts else "none"), *(("", f"- {text}") for text in shown)]
