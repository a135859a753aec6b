from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from kinject.errors import InputError
from kinject.eval.retrieval import read_contexts
from kinject.eval.retrieval.retrievers import BGE_PREFIX, DenseRetriever, fuse, make_retriever
from kinject.recipe.sections import RetrievalSection
from kinject.types import Passage, Question

INSTALLED = all(importlib.util.find_spec(name) for name in ("faiss", "sentence_transformers"))
needs_rag = pytest.mark.skipif(not INSTALLED, reason="the extra rag is not installed")
quiet = pytest.mark.filterwarnings("ignore")  # faiss's own bindings warn while they are imported
TEXTS = ["Arden was born in Lowmere.", "Bryn works for the mill.", "The school of Kelm taught her.", "Farrow, 1987."]
PASSAGES = [Passage(f"p{i}", f"d{i}", 0, len(text), text) for i, text in enumerate(TEXTS)]


@pytest.fixture
def embedder(tmp_path, tiny_tokenizer):
    """A folder with a random two-layer BERT that averages its tokens."""
    import torch
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tiny_tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=128,
    )  # fmt: skip
    BertModel(config).save_pretrained(tmp_path / "bert")
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token
    tiny_tokenizer.save_pretrained(tmp_path / "bert")
    words = models.Transformer(str(tmp_path / "bert"))
    pooling = models.Pooling(32, pooling_mode="mean")
    folder = tmp_path / "embedder"
    SentenceTransformer(modules=[words, pooling], device="cpu").save(str(folder))
    return folder


@needs_rag
@quiet
def test_dense_ranks_are_those_of_the_dot_products(embedder, tmp_path):
    from sentence_transformers import SentenceTransformer

    retriever = DenseRetriever(PASSAGES, str(embedder), None, tmp_path / "cache")
    model = SentenceTransformer(str(embedder), device="cpu")
    query = "Where was Arden born?"
    vectors = model.encode([query, *TEXTS], normalize_embeddings=True)
    expected = np.argsort(-(vectors[1:] @ vectors[0]), kind="stable").tolist()
    assert retriever.rank([query], 4)[0] == expected
    assert retriever.rank([TEXTS[2]], 1)[0] == [2]


@needs_rag
@quiet
def test_queries_together_are_ranked_as_each_alone(embedder, tmp_path):
    for kind in ("dense", "both"):
        section = RetrievalSection(kind=kind, embedder=str(embedder), cache_dir=str(tmp_path / "cache"))
        retriever = make_retriever(section, PASSAGES)
        queries = ["Where was Arden born?", *TEXTS, "school"]
        assert retriever.rank(queries, 3) == [retriever.rank([query], 3)[0] for query in queries]
        assert retriever.rank([], 3) == []


@needs_rag
@quiet
def test_passages_longer_than_the_embedder_reads_are_counted_aloud(embedder, tmp_path):
    long = [*PASSAGES, Passage("p9", "d9", 0, 900, "Arden was born in Lowmere. " * 30)]
    assert DenseRetriever(PASSAGES, str(embedder), None, tmp_path / "cache").notes == ()
    (note,) = DenseRetriever(long, str(embedder), None, tmp_path / "cache").notes
    assert note.startswith("1 of 5 passages are longer than the 128 tokens that the embedder reads")


@needs_rag
@quiet
def test_an_index_is_kept_by_content(embedder, tmp_path):
    first = DenseRetriever(PASSAGES, str(embedder), None, tmp_path / "cache")
    np.save(first.path, np.roll(np.load(first.path), 1, axis=0))
    again = DenseRetriever(PASSAGES, str(embedder), None, tmp_path / "cache")
    assert again.rank([TEXTS[2]], 1)[0] == [3]  # read from disk
    other = DenseRetriever(PASSAGES[:3], str(embedder), None, tmp_path / "cache")
    assert other.path != first.path
    assert other.rank([TEXTS[2]], 1)[0] == [2]


@needs_rag
@quiet
def test_bge_models_get_their_prefix_unless_another_is_given(embedder, tmp_path):
    bge = embedder.rename(tmp_path / "bge-tiny")
    plain = DenseRetriever(PASSAGES, str(bge), "", tmp_path / "cache")
    prefixed = DenseRetriever(PASSAGES, str(bge), None, tmp_path / "cache")
    query = "mill"
    np.testing.assert_array_equal(prefixed._embed([BGE_PREFIX + query]), plain._embed([BGE_PREFIX + query]))
    assert (prefixed._prefix, plain._prefix) == (BGE_PREFIX, "")


@pytest.mark.skipif(INSTALLED, reason="the extra rag is installed")
def test_without_the_extra_the_error_says_what_to_install(tmp_path):
    with pytest.raises(InputError, match=r"pip install 'kinject\[rag\]'"):
        DenseRetriever(PASSAGES, "no/model", None, tmp_path)


def test_fusion_sums_reciprocal_ranks():
    # item 1: 1/62 + 1/61; item 0: 1/61 + 1/63; item 2: 1/63 + 1/62
    assert fuse([[0, 1, 2], [1, 2, 0]]) == [1, 0, 2]
    assert fuse([[3], [1]]) == [1, 3]


@needs_rag
@quiet
def test_both_ways_are_fused(embedder, tmp_path):
    section = RetrievalSection(kind="both", embedder=str(embedder), cache_dir=str(tmp_path / "cache"))
    both = make_retriever(section, PASSAGES)
    assert both.rank([TEXTS[1]], 1)[0] == [1]
    assert sorted(both.rank(["school"], 4)[0]) == [0, 1, 2, 3]


def test_prepared_contexts_follow_the_questions(write_rows):
    rows = [
        {"question_id": "b", "passages": ["one", {"id": "x", "document_id": "d", "text": "two"}]},
        {"question_id": "a", "passages": []},
    ]
    questions = [Question(name, "?", ("x", "y"), 0) for name in "ab"]
    first, second = read_contexts(write_rows("c.jsonl", rows), questions)
    assert first == ()
    assert [(p.text, p.document_id) for p in second] == [("one", ""), ("two", "d")]
    with pytest.raises(InputError, match="no passages for 1 of 1 questions, such as 'z'"):
        read_contexts(write_rows("c.jsonl", rows), [Question("z", "?", ("x", "y"), 0)])
