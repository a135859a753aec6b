from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from kinject.disk import write_sha256sums
from kinject.errors import InputError
from kinject.eval.plan import expand_arms
from kinject.eval.retrieval import (
    LEXICAL_WEIGHTS,
    Bm25Retriever,
    DenseRetriever,
    LexicalRetriever,
    make_retriever,
    measure_recall,
    prefixes_of,
    read_passages,
)
from kinject.language.sentences import sentences
from kinject.recipe.sections import EvalSection, QuestionSetSection, RetrievalSection
from kinject.types import Passage, Question
from small import save_tiny_embedder

quiet = pytest.mark.filterwarnings("ignore")  # the library warns while it is imported
TEXTS = [
    "Arden was born in Lowmere.",
    "Bryn works for the mill.",
    "The school of Kelm taught her.",
    "Farrow, 1987.",
]
PASSAGES = [Passage(f"p{i}", f"d{i}", 0, len(text), text) for i, text in enumerate(TEXTS)]


def ask(question: str, document: str) -> Question:
    return Question("q", question, ("a", "b"), 0, document_id=document)


def dense(passages, embedder, folder, **settings):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kinject.eval.retrieval.INDICES", folder / "cache")
        return DenseRetriever(
            passages,
            RetrievalSection(documents=(), kind="dense", embedder=str(embedder), **settings),
        )


@pytest.fixture
def embedder(tmp_path, tiny_tokenizer):
    """A folder with a random two-layer BERT that averages its tokens."""
    return save_tiny_embedder(tmp_path / "embedder", tiny_tokenizer)


@quiet
def test_dense_ranks_are_those_of_the_dot_products(embedder, tmp_path):
    from sentence_transformers import SentenceTransformer

    retriever = dense(PASSAGES, embedder, tmp_path)
    model = SentenceTransformer(str(embedder), device="cpu")
    query = "Where was Arden born?"
    vectors = model.encode([query, *TEXTS], normalize_embeddings=True)
    expected = np.argsort(-(vectors[1:] @ vectors[0]), kind="stable").tolist()
    assert retriever.rank([query], 4)[0] == expected
    assert retriever.rank([TEXTS[2]], 1)[0] == [2]
    assert dense(PASSAGES * 2, embedder, tmp_path).rank([TEXTS[2]], 2)[0] == [2, 6]
    assert dense(PASSAGES, embedder, tmp_path, min_score=0.999).rank(TEXTS, 3) == [
        [0],
        [1],
        [2],
        [3],
    ]


@quiet
def test_an_index_is_kept_by_content(embedder, tmp_path):
    first = dense(PASSAGES, embedder, tmp_path)
    np.save(first.path, np.roll(np.load(first.path), 1, axis=0))
    write_sha256sums(first.path.parent)  # what has other bytes than were written is made again
    again = dense(PASSAGES, embedder, tmp_path)
    assert again.rank([TEXTS[2]], 1)[0] == [3]  # read from disk
    other = dense(PASSAGES[:3], embedder, tmp_path)
    assert other.path != first.path
    assert other.rank([TEXTS[2]], 1)[0] == [2]


@quiet
@pytest.mark.parametrize("name", ["bge-tiny", "bge-m3-tiny", "multilingual-e5-tiny"])
def test_known_embedders_get_the_prefixes_of_their_cards(embedder, tmp_path, name):
    queries, passages = prefixes_of(name, {})
    plain = dense([Passage("p", "d", 0, 1, passages + TEXTS[0])], embedder, tmp_path)
    prefixed = dense(
        [Passage("p", "d", 0, 1, TEXTS[0])], shutil.copytree(embedder, tmp_path / name), tmp_path
    )
    np.testing.assert_array_equal(prefixed._vectors, plain._vectors)
    assert prefixed._prefix == queries


@pytest.mark.parametrize(
    ("name", "queries"),
    [
        ("org/multilingual-e5-small", "query: "),
        ("org/multilingual-e5-base-instruct", "Instruct: Given a web search query"),
        ("models/BGE-small-zh-v1.5", "为这个句子"),
        ("runs/stage5/model", ""),
        ("runs/fine5", ""),
    ],
)
def test_a_prefix_is_that_of_whole_words_of_the_name(name, queries):
    assert prefixes_of(name, {})[0][: len(queries) or None] == queries


@quiet
def test_other_embedders_get_the_prompts_of_their_own_config(embedder, tmp_path):
    own = shutil.copytree(embedder, tmp_path / "own")
    path = own / "config_sentence_transformers.json"
    prompts = {"prompts": {"query": "find: ", "passage": "text: "}, "default_prompt_name": "query"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **prompts}))
    write_sha256sums(own)
    plain = dense([Passage("p", "d", 0, 1, "text: " + TEXTS[1])], embedder, tmp_path)
    prompted = dense([Passage("p", "d", 0, 1, TEXTS[1])], own, tmp_path)
    np.testing.assert_array_equal(prompted._vectors, plain._vectors)
    assert prompted._prefix == "find: "
    assert prefixes_of("org/bge-small-en", prompts["prompts"])[1] == ""


def test_without_the_extra_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # as if it were not installed
    with pytest.raises(InputError, match=r"pip install 'kinject\[rag\]'"):
        dense(PASSAGES, "no/model", tmp_path)


@quiet
def test_passages_beyond_what_the_embedder_reads_are_counted(embedder, tmp_path):
    long = [Passage(f"l{n}", "d", 0, 1, "mill " * 300) for n in range(2)]
    (note,) = dense([*PASSAGES, *long], embedder, tmp_path).notes
    assert note.startswith("2 of 6 passages exceed the 128 tokens that ")
    assert dense(PASSAGES, embedder, tmp_path).notes == ()


@quiet
def test_weights_that_are_cut_or_of_another_shape_are_named(embedder, tmp_path):
    (weights,) = embedder.rglob("model.safetensors")
    whole, config = weights.read_bytes(), weights.with_name("config.json")
    wider = {**json.loads(config.read_text()), "intermediate_size": 37}
    for change in (
        lambda: weights.write_bytes(whole[:-7]),
        lambda: (weights.write_bytes(whole), config.write_text(json.dumps(wider))),
    ):
        change()
        write_sha256sums(embedder)
        with pytest.raises(InputError, match=r"embedder' cannot be loaded: .*Is the folder whole"):
            dense(PASSAGES, embedder, tmp_path)


BM25_TEXTS = [
    "Bryn Arden was born in Farrow.",
    "Kelm is a town with a mill. The mill at Kelm is old.",
    "Farrow lies near Kelm.",
    "Farrow lies near Kelm.",
    "Year 7 was dry.",
]
BM25_PASSAGES = [Passage(f"p{i}", f"d{i}", 0, len(text), text) for i, text in enumerate(BM25_TEXTS)]


def words_in(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def ngrams_in(text: str) -> list[str]:
    marked = [f" {word} " for word in words_in(text)]
    return [
        gram
        for word in marked
        for gram in [word[n : n + 4] for n in range(len(word) - 3)] or [word]
    ]


def pairs_in(text: str) -> list[str]:
    return [f"{a} {b}" for a, b in pairwise(words_in(text))]


def by_the_formula(texts: list[str], query: str, terms_in=words_in) -> np.ndarray:
    """BM25 with Lucene's idf, k1 = 1.5, b = 0.75 (Kamphuis et al. 2020, table 1)."""
    documents = [terms_in(text) for text in texts]
    mean = sum(map(len, documents)) / len(documents)
    scores = np.zeros(len(texts))
    for term in terms_in(query):
        df = sum(term in document for document in documents)
        idf = math.log(1 + (len(documents) - df + 0.5) / (df + 0.5))
        for index, document in enumerate(documents):
            tf = Counter(document)[term]
            scores[index] += (
                idf * tf / (tf + 1.5 * (1 - 0.75 + 0.75 * len(document) / mean)) if tf else 0.0
            )
    return scores


@pytest.mark.parametrize(
    "query", ["Where was Bryn Arden born?", "Which mill is old, at Kelm?", "7", "Farrow? FARROW!"]
)
def test_order_is_that_of_the_formula(query):
    expected = np.argsort(-by_the_formula(BM25_TEXTS, query), kind="stable").tolist()
    assert Bm25Retriever(BM25_PASSAGES).rank([query], 5) == [expected]


def test_equal_scores_keep_the_order_of_the_passages():
    assert Bm25Retriever(BM25_PASSAGES).rank(["lies near", "nothing known here"], 3) == [
        [2, 3, 0],
        [0, 1, 2],
    ]


@pytest.mark.parametrize("least", [0.0, 0.5, 1.0, 9.0])
def test_a_passage_below_the_least_score_is_left_out_and_the_report_counts_questions_without_any(
    least,
):
    query = "Which mill is old, at Kelm?"
    scores = by_the_formula(BM25_TEXTS, query)
    expected = [i for i in np.argsort(-scores, kind="stable").tolist() if scores[i] >= least][:3]
    retriever = make_retriever(RetrievalSection(documents=("d",), min_score=least), BM25_PASSAGES)
    assert retriever.rank([query], 3) == [expected]
    contexts = retriever.find([ask(query, "d1"), ask("Nothing known here?", "")], 3)
    assert [len(context) for context in contexts] == [len(expected), 0 if least else 3]
    found = measure_recall("set", [ask(query, "d1"), ask("Nothing known here?", "")], contexts, 3)
    assert (found.n_found, found.n, found.n_empty) == (
        bool(expected),
        1,
        (not expected) + bool(least),
    )


def test_the_oracle_shows_the_best_passages_of_the_document_that_the_question_names():
    texts = [
        "Arden was born in Lowmere.",
        "He died in Kelm.",
        "Bryn was born in Farrow.",
        "He was born in May, it is said.",
    ]
    passages = [Passage(f"p{i}", f"d{i // 2}", 0, len(text), text) for i, text in enumerate(texts)]
    oracle = make_retriever(RetrievalSection(documents=("d",), kind="oracle"), passages)
    questions = [ask("Where did he die?", "d0"), ask("When was he born?", "d1")]
    own = [
        [i for i, passage in enumerate(passages) if passage.document_id == question.document_id]
        for question in questions
    ]
    scores = [
        by_the_formula([texts[i] for i in of], question.question)
        for of, question in zip(own, questions, strict=True)
    ]
    ranked = [
        [of[i] for i in np.argsort(-score, kind="stable")]
        for of, score in zip(own, scores, strict=True)
    ]
    for k in (1, 2, 3):
        assert oracle.find(questions, k) == [
            tuple(passages[i] for i in ranking[:k]) for ranking in ranked
        ]
    for named in ("", "d7"):
        with pytest.raises(InputError, match=r"question 'q' names no document .*kind: oracle"):
            oracle.find([ask("?", named)], 1)


def test_both_orders_by_the_reciprocal_ranks_of_its_parts(embedder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the index
    section = RetrievalSection(documents=(), kind="both", embedder=str(embedder))
    both, query = make_retriever(section, PASSAGES), TEXTS[2]
    parts = LexicalRetriever(PASSAGES), dense(PASSAGES, embedder, tmp_path)
    orders = [part.rank([query], len(PASSAGES))[0] for part in parts]
    # In the lexical order those that share no piece with the query share the mean of their ranks.
    found, n_others = orders[0][:2], len(PASSAGES) - 2
    assert np.count_nonzero(parts[0].scores(query)) == 2
    lexical = [found.index(i) + 1 if i in found else 3 + (n_others - 1) / 2 for i in range(4)]
    points = [1 / (60 + lexical[i]) + 1 / (61 + orders[1].index(i)) for i in range(4)]
    assert orders[0] != orders[1]
    assert both.rank([query], 3)[0] == sorted(range(len(PASSAGES)), key=lambda i: -points[i])[:3]
    assert both.models == parts[1].models


@quiet
def test_both_follows_the_dense_order_where_no_passage_has_a_word_of_the_query(
    embedder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # for the index
    section = RetrievalSection(documents=(), kind="both", embedder=str(embedder))
    for query in ("水车在哪里？", "Ωμέγα"):
        (order,) = dense(PASSAGES, embedder, tmp_path).rank([query], 4)
        assert order != [0, 1, 2, 3]
        assert make_retriever(section, PASSAGES).rank([query], 4) == [order]


LEXICAL_TEXTS = [
    "Arden was born in Lowmere. The old mill stands there.", "Bryn works for the mill. Kelm is near.",
    "The school of Kelm taught her. It is old.", "Farrow, 1987.", "Millers of Kelm worked in the mills.",
]  # fmt: skip
LEXICAL_PASSAGES = [
    Passage(f"p{n}", f"d{n}", 0, len(text), text) for n, text in enumerate(LEXICAL_TEXTS)
]


@pytest.mark.parametrize(
    "query", ["Where was Arden born?", "Who worked at the mill of Kelm?", "1987", "mills"]
)
def test_the_lexical_order_is_that_of_the_sum_of_four_formulas(query):
    texts = LEXICAL_TEXTS
    owners = [n for n, text in enumerate(texts) for _ in sentences(text)]
    by_sentence = by_the_formula(
        [sentence for text in texts for sentence in sentences(text)], query, ngrams_in
    )
    parts = {
        "words": by_the_formula(texts, query), "pieces": by_the_formula(texts, query, ngrams_in),
        "pairs": by_the_formula(texts, query, pairs_in),
        "sentence": np.array([max(by_sentence[np.array(owners) == n]) for n in range(len(texts))]),
    }  # fmt: skip
    expected = sum(LEXICAL_WEIGHTS[name] * scores for name, scores in parts.items())
    assert (
        LexicalRetriever(LEXICAL_PASSAGES).rank([query], 5)[0]
        == np.argsort(-expected, kind="stable").tolist()
    )


def test_other_forms_of_a_word_are_found_by_their_ngrams():
    assert LexicalRetriever(LEXICAL_PASSAGES).rank(["miller"], 1) == [[4]]
    assert LexicalRetriever([Passage("p", "d", 0, 1, "?")]).rank(["miller"], 1) == [
        [0]
    ]  # no word at all


@pytest.mark.parametrize(
    ("texts", "query"),
    [
        (["東京の塔は赤い。", "京都の寺は古い。", "大阪の城は白い。"], "京都には何がありますか。"),
        (["แม่น้ำยาวมาก", "ภูเขาสูงมาก", "ทะเลลึกมาก"], "ภูเขาสูงเท่าไร"),
        (["한강은 길다.", "설악산은 높다.", "동해는 깊다."], "설악산의 높이는?"),
        (["नदी लंबी है।", "पहाड़ ऊँचा है।", "सागर गहरा है।"], "क्या पहाड़ ऊँचा है?"),
        (["Die Muhle.", "Die Mu\u0308hle.", "Das Haus."], "Mühle"),
    ],
)
@pytest.mark.parametrize("kind", ["bm25", "lexical"])
def test_words_are_found_in_scripts_without_spaces_or_with_marks(kind, texts, query):
    passages = [Passage(f"p{i}", "d", 0, len(text), text) for i, text in enumerate(texts)]
    section = RetrievalSection(documents=(), kind=kind)
    scores = make_retriever(section, passages).scores(query)
    assert scores[1] > max(scores[0], scores[2])


def test_recall_counts_questions_that_name_a_document():
    two = [Passage(f"p{i}", f"d{i}", 0, 1, "x") for i in range(2)]
    contexts = [two, two, two, two]
    questions = [ask("?", document) for document in ("d0", "d1", "d4", "")]
    first, both = (measure_recall("set", questions, contexts, k) for k in (1, 2))
    assert (first.n_found, first.n) == (1, 3)
    assert (both.n_found, both.n) == (2, 3)


def test_a_document_in_two_files_is_searched_once(write_rows):
    rows = [{"id": "d", "text": "Bryn was born in Farrow. She lives in Kelm."}]
    paths = [write_rows("a.jsonl", rows), write_rows("b.jsonl", rows)]
    assert [
        passage.document_id
        for passage in read_passages(RetrievalSection(documents=tuple(map(str, paths))))
    ] == ["d"]


def test_retention_sets_get_passages_only_where_the_recipe_asks():
    sets = {
        "new": QuestionSetSection(path="q"), "known": QuestionSetSection(path="q", role="retention"),
        "asked": QuestionSetSection(path="q", role="retention", retrieval=True),
        "without": QuestionSetSection(path="q", retrieval=False),
    }  # fmt: skip
    section = EvalSection(
        models={"base": "m"},
        control=False,
        questions=sets,
        formats=("texts",),
        retrieval=RetrievalSection(documents=("d",), k=(2,)),
    )
    ks = {name: [arm.k for arm in expand_arms(section, item)] for name, item in sets.items()}
    assert ks == {"new": [0, 2], "known": [0], "asked": [0, 2], "without": [0]}
