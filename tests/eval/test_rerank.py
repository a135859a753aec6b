"""Ranking beyond BM25: n-grams and pairs of words, and rerankers."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kinject.corpus.passages import sentences
from kinject.disk import read_jsonl
from kinject.errors import InputError
from kinject.eval.plan import read_plan
from kinject.eval.retrieval import make_retriever, read_passages
from kinject.eval.retrievers import LEXICAL_WEIGHTS, LexicalRetriever
from kinject.recipe import read_recipe
from kinject.recipe.eval_section import RerankerSection, RetrievalSection
from kinject.types import Passage

quiet = pytest.mark.filterwarnings("ignore")  # sentence-transformers warns while it is imported
TEXTS = [
    "Arden was born in Lowmere. The old mill stands there.", "Bryn works for the mill. Kelm is near.",
    "The school of Kelm taught her. It is old.", "Farrow, 1987.", "Millers of Kelm worked in the mills.",
]  # fmt: skip
PASSAGES = [Passage(f"p{n}", f"d{n}", 0, len(text), text, path=("Town", f"Part {n}")) for n, text in enumerate(TEXTS)]
QUERIES = ["Where was Arden born?", "Who worked at the mill of Kelm?", "1987", "mills"]


def bm25(texts: Sequence[Sequence[str]], query: Sequence[str]) -> np.ndarray:
    """BM25 with Lucene's idf, k1 = 1.5, b = 0.75, term by term."""
    mean = sum(map(len, texts)) / len(texts)
    scores = np.zeros(len(texts))
    for term in query:
        df = sum(term in text for text in texts)
        for index, text in enumerate(texts):
            tf = Counter(text)[term]
            idf = math.log(1 + (len(texts) - df + 0.5) / (df + 0.5))
            scores[index] += idf * tf / (tf + 1.5 * (0.25 + 0.75 * len(text) / mean)) if tf else 0.0
    return scores


def ngrams(text: str) -> list[str]:
    grams = []
    for word in re.findall(r"\w+", text.lower()):
        marked = f" {word} "
        grams += [marked[start : start + 4] for start in range(len(marked) - 3)] or [marked]
    return grams


def pairs(text: str) -> list[str]:
    words = re.findall(r"\w+", text.lower())
    return [f"{a} {b}" for a, b in pairwise(words)]


@pytest.mark.parametrize("query", QUERIES)
def test_the_lexical_order_is_that_of_the_sum_of_four_formulas(query: str) -> None:
    words = [re.findall(r"\w+", text.lower()) for text in TEXTS]
    owners = [n for n, text in enumerate(TEXTS) for _ in sentences(text)]
    by_sentence = bm25([ngrams(sentence) for text in TEXTS for sentence in sentences(text)], ngrams(query))
    best = [
        max(score for score, owner in zip(by_sentence, owners, strict=True) if owner == n) for n in range(len(TEXTS))
    ]
    expected = (
        LEXICAL_WEIGHTS["words"] * bm25(words, re.findall(r"\w+", query.lower()))
        + LEXICAL_WEIGHTS["pieces"] * bm25([ngrams(text) for text in TEXTS], ngrams(query))
        + LEXICAL_WEIGHTS["pairs"] * bm25([pairs(text) for text in TEXTS], pairs(query))
        + LEXICAL_WEIGHTS["sentence"] * np.array(best)
    )
    retriever = LexicalRetriever(PASSAGES)
    assert retriever.rank([query], 5)[0] == np.argsort(-expected, kind="stable").tolist()


def test_other_forms_of_a_word_are_found_by_their_ngrams() -> None:
    assert LexicalRetriever(PASSAGES).rank(["miller"], 1) == [[4]]
    assert LexicalRetriever([Passage("p", "d", 0, 1, "?")]).rank(["miller"], 1) == [[0]]  # no word at all


def test_the_heading_path_is_searched_and_shown_where_it_is_wanted(tmp_path: Path, write_rows: Any) -> None:
    text = "# Mills\n\n## Old mills\n\nBuilt in 1801 by Arden.\n\n## New mills\n\nBuilt in 1987 by Bryn."
    documents = write_rows("d.jsonl", [{"id": "d", "title": "Handbook", "text": text}])
    plain = RetrievalSection(documents=(str(documents),), passage_tokens=11)
    for wanted in (False, True):
        section = RetrievalSection(documents=(str(documents),), passage_tokens=11, heading_path=wanted)
        retriever = make_retriever(section, read_passages(section))
        (best,) = retriever.rank(["handbook of new mills"], 1)
        passage = retriever.passages[best[0]]
        assert passage.path[0] == "Handbook"
        assert passage.below_path() == f"{' > '.join(passage.path)}\n{passage.text}"
        if wanted:
            assert passage.text == "## New mills\n\nBuilt in 1987 by Bryn."
    assert [p.id for p in read_passages(plain)] == [p.id for p in read_passages(section)]


@pytest.fixture
def cross_encoder(tmp_path: Path, tiny_tokenizer: Any) -> Path:
    """A folder with a random two-layer BERT that scores a pair of texts."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
        intermediate_size=64, max_position_embeddings=128, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path / "cross-encoder"
    BertForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    tiny_tokenizer.model_max_length = 128
    tiny_tokenizer.save_pretrained(folder)
    return folder


def reranking(tmp_path: Path, reranker: RerankerSection, **settings: Any) -> Any:
    section = RetrievalSection(reranker=reranker, cache_dir=str(tmp_path / "cache"), **settings)
    return make_retriever(section, PASSAGES)


@quiet
def test_a_cross_encoder_orders_as_its_logits_for_each_pair_alone(cross_encoder: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    retriever = reranking(tmp_path, RerankerSection(str(cross_encoder), candidates=3), k=(1, 2))
    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder)
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder)
    first = make_retriever(RetrievalSection(), PASSAGES)
    changed = 0
    for query in QUERIES:
        candidates, rest = first.rank([query], 5)[0][:3], first.rank([query], 5)[0][3:]
        with torch.no_grad():
            logits = [
                float(model(**tokenizer(query, TEXTS[index], return_tensors="pt")).logits) for index in candidates
            ]
        expected = [candidates[index] for index in np.argsort(-np.array(logits), kind="stable")]
        assert retriever.rank([query], 5)[0] == expected + rest
        assert retriever.rank([query], 2)[0] == expected[:2]
        changed += expected != candidates
    assert changed
    assert retriever.rank(QUERIES, 3) == [retriever.rank([query], 3)[0] for query in QUERIES]
    assert retriever.models.keys() == {str(cross_encoder)}
    assert retriever.notes[0] == f"the best 3 passages of each question were reranked by {cross_encoder}"


@quiet
def test_scores_are_kept_by_content(cross_encoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = RerankerSection(str(cross_encoder), candidates=4)
    expected = reranking(tmp_path, section).rank(QUERIES, 5)
    again = reranking(tmp_path, section)
    requests: list[Any] = []
    monkeypatch.setattr(
        again._reranker, "scores", lambda items: iter(requests.append(items) or [[0.0] * 4] * len(items))
    )
    assert again.rank(QUERIES, 5) == expected
    assert requests == [[]]  # nothing was scored again
    again.rank([*QUERIES, "another"], 5)
    assert [query for query, _ in requests[1]] == ["another"]


@quiet
def test_what_is_no_reranker_is_refused_in_one_line(cross_encoder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    tiny = {
        "vocab_size": 300,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
    }
    with pytest.raises(InputError, match=r"reranker\.model: no/such: no reranker of this name"):
        reranking(tmp_path, RerankerSection("no/such"))
    BertForSequenceClassification(BertConfig(**tiny, num_labels=3)).save_pretrained(cross_encoder)
    with pytest.raises(InputError, match=r"is no reranker: .*3 labels"):
        reranking(tmp_path, RerankerSection(str(cross_encoder)))
    BertModel(BertConfig(**tiny, num_labels=1)).save_pretrained(cross_encoder)
    with pytest.raises(InputError, match=r"is no reranker: .*BertModel"):
        reranking(tmp_path, RerankerSection(str(cross_encoder)))


RECIPE = """\
run_dir: {folder}/run
eval:
  models: {{m: {model}}}
  questions: {{set: {questions}}}
  retrieval: {retrieval}
"""


@quiet
def test_an_evaluation_shows_the_path_and_its_manifest_names_the_reranker(
    cross_encoder: Path, tmp_path: Path, tiny_model: Path, write_rows: Any, blank_figures: None
) -> None:
    from kinject.eval.run import evaluate

    rows = [{"id": f"d{n}", "title": "Town", "text": text} for n, text in enumerate(TEXTS)]
    documents = write_rows("d.jsonl", rows)
    questions = write_rows(
        "q.jsonl", [{"question": "Who works?", "choices": ["a", "b"], "answer": 0, "document_id": "d1"}]
    )
    reranker = f"{{model: {cross_encoder}, candidates: 3}}"
    retrieval = (
        f"{{documents: [{documents}], k: [1], heading_path: true, reranker: {reranker}, cache_dir: {tmp_path}/c}}"
    )
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, model=tiny_model, questions=questions, retrieval=retrieval))
    recipe = read_recipe(path, verb="eval")
    (question_set,) = read_plan(recipe).sets
    (_, (request, ids)) = [next(iter(question_set.requests(arm))) for arm in question_set.arms]
    assert request.passages == (f"Town\n{question_set.contexts[0][0].text}",)
    report = evaluate(recipe)
    assert any(f"reranked by {cross_encoder}" in note for note in report.notes)
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert str(cross_encoder) in manifest["inputs"]
    assert {tuple(row["context_ids"]) for _, row in read_jsonl(tmp_path / "run/answers.jsonl")} == {(), ids}
