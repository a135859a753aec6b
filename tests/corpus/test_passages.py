import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinject.corpus.passages import split_passages, word_spans
from kinject.language.sentences import sentences
from kinject.types import Document

words = st.lists(
    st.sampled_from(
        [
            "Dr.",
            "ab",
            "I",
            "3.5",
            "(x)",
            "U.S.",
            "end.",
            "Is?",
            "。",
            "日本",
            "\n\n",
            "\t",
            "🙂",
            "x" * 80,
        ]
    )
)
texts = st.one_of(st.text(min_size=1, max_size=300), words.map(" ".join), words.map("".join))


def document(text: str) -> Document:
    return Document("d", "", text, "test")


def byte_spans(text: str) -> list[tuple[int, int]]:
    """A byte-level tokenizer: characters beyond ASCII are several tokens that share one span."""
    return [
        (index, index + 1)
        for index, character in enumerate(text)
        for _ in character.encode("utf-8", "surrogatepass")
    ]


@given(texts, st.integers(1, 20))
def test_passages_are_exact_slices_that_cover_all_but_space_and_fit(
    text: str, n_tokens: int
) -> None:
    passages = split_passages(document(text), n_tokens, word_spans)
    position = 0
    for passage in passages:
        assert passage.text == text[passage.start : passage.end]
        assert passage.text == passage.text.strip() != ""
        assert text[position : passage.start].strip() == ""
        assert 0 <= len(word_spans(passage.text)) <= n_tokens
        position = passage.end
    assert text[position:].strip() == ""


def test_a_cut_falls_at_the_last_sentence_end_that_fits() -> None:
    text = "One two three. Four five six. Seven eight nine."
    assert [p.text for p in split_passages(document(text), 10, word_spans)] == [
        "One two three. Four five six.",
        "Seven eight nine.",
    ]


def test_a_change_leaves_the_passages_before_it_as_they_were() -> None:
    before = "One two three. Four five six. Seven eight nine. Ten eleven."
    first = split_passages(document(before), 8, word_spans)
    second = split_passages(
        document(before + " And much more that was added later on."), 8, word_spans
    )
    assert [p.id for p in first[:-1]] == [p.id for p in second[: len(first) - 1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Dr. Wu met J. R. Hill at 3.5 km. They left.",
            ["Dr. Wu met J. R. Hill at 3.5 km.", "They left."],
        ),
        ('She said "Go." He went!', ['She said "Go."', "He went!"]),
        ("The U.S. army (est. 1775) won. Then", ["The U.S. army (est. 1775) won.", "Then"]),
        ("Heading\n\nBody text", ["Heading", "Body text"]),
        ("一つ。二つ。", ["一つ。", "二つ。"]),
        ("no end", ["no end"]),
        (" ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_a_heading_stays_with_what_follows_it_and_rows_are_not_torn() -> None:
    text = "# Works\n\nShe built one bridge.\n\n## Years\n\n| year | bridge |\n| 1931 | Falk |\n| 1940 | Lind |"
    assert [p.text for p in split_passages(document(text), 14, word_spans)] == [
        "# Works\n\nShe built one bridge.",
        "## Years\n\n| year | bridge |\n| 1931 | Falk |",
        "| 1940 | Lind |",
    ]


def test_the_headings_above_a_passage_are_its_path() -> None:
    text = (
        "# A\n\none\n\n## B ##\n\ntwo\n\n```\n# no heading\n```\n\n### C\n\nthree\n\n## D\n\nfour"
    )
    paths = {
        passage.text: passage.path for passage in split_passages(document(text), 1, word_spans)
    }
    assert [paths[word] for word in ("one", "two", "three", "four")] == [
        ("A",),
        ("A", "B"),
        ("A", "B", "C"),
        ("A", "D"),
    ]
    assert split_passages(document("# A\n\none\n\n## D\n\nfour"), 4, word_spans)[-1].path == (
        "A",
    )  # its own heading is inside
    (whole,) = split_passages(Document("d", "Title", text, "s"), 99, word_spans)
    assert whole.path == ("Title",)
    titled = split_passages(Document("d", "A", text, "s"), 1, word_spans)
    assert titled[-1].path == ("A", "D")  # the title is not repeated


PIECES = [
    "# One\n\n", "## Two. It goes on\n\n", "- item one\n- item two. More.\n\n", "1. first\n2. second\n\n", "Say:\n\n",
    "```\nx = 1. Y\n\nz\n```\n\n", "~~~~ py\n```\na b c\n~~~~\n\n", "| no | head |\n\n", "It rained. He left\nearly. Then",
    "| a | b |\n|---|:-:|\n| 1 | 2 |\n| 3 | 4. Five |\n| 6 | 7 |\n\n", " on and on and on", "\n", "\n\n", "Dr. Wu came.\n",
    "```\nopen\n",
]  # fmt: skip
MARKDOWN = st.lists(
    st.one_of(st.sampled_from(PIECES), st.text(alphabet="ab. \n#|-`1", max_size=12)), max_size=14
).map("".join)


@given(MARKDOWN, st.integers(1, 40), st.booleans())
def test_passages_of_markdown_are_true_slices_that_cover_all_and_show_no_more_than_fits(
    text: str, n_tokens: int, is_byte_level: bool
) -> None:
    count = byte_spans if is_byte_level else word_spans
    passages = split_passages(document(text), n_tokens, count)
    reached = 0
    for passage in passages:
        assert passage.text == text[passage.start : passage.end] == passage.text.strip() != ""
        assert passage.start >= reached
        assert text[reached : passage.start].strip() == ""
        assert len(count(passage.text)) + len(count(passage.header)) <= n_tokens
        assert passage.header == "" or passage.header in text[: passage.start]
        reached = passage.end
    assert text[reached:].strip() == ""


def texts_of(text: str, n_tokens: int) -> list[str]:
    return [passage.shown for passage in split_passages(document(text), n_tokens, word_spans)]


def test_code_that_fits_is_never_cut() -> None:
    code = "```python\nfirst = 1. Then\n\n# second\nthird = 3\n```"
    text = f"Here it is. Look\n\n{code}\n\nThat was it. The end."
    n_tokens = len(word_spans(code))
    for more in range(6):
        passages = split_passages(document(text), n_tokens + more, word_spans)
        assert [code in passage.text for passage in passages].count(True) == 1
        assert not any(passage.cut for passage in passages)


def test_code_that_does_not_fit_is_cut_at_lines_and_counted() -> None:
    text = "Run this.\n\n```\na = one\nb = two\nc = three\n```\n\nDone. It works."
    passages = split_passages(document(text), 9, word_spans)
    assert [passage.text for passage in passages] == [
        "Run this.", "```\na = one\nb = two", "c = three\n```\n\nDone.", "It works.",
    ]  # fmt: skip
    assert [passage.cut for passage in passages] == [False, True, False, False]


def test_list_items_stay_whole_and_a_marker_ends_no_sentence() -> None:
    text = "You need:\n\n1. A form\n2. A signature of the manager\n3. Patience\n\nSend it. Wait."
    assert texts_of(text, 13) == [
        "You need:\n\n1. A form", "2. A signature of the manager\n3. Patience\n\nSend it.", "Wait.",
    ]  # fmt: skip
    assert texts_of("- one two\n- three four\n  five\n- six", 8) == [
        "- one two\n- three four\n  five",
        "- six",
    ]


def test_a_table_is_cut_between_rows_and_repeats_its_header() -> None:
    head = "| Town | Mill |\n|---|---|"
    rows = [f"| Town{n} | {n}. Old |" for n in range(6)]
    text = "Mills. All of them.\n\n" + "\n".join([head, *rows]) + "\n\nThat is all."
    passages = split_passages(document(text), 40, word_spans)
    assert "".join(passage.text for passage in passages).replace("\n", "") == text.replace("\n", "")
    for passage in passages[1:-1]:
        assert passage.header == head
        assert passage.shown == f"{head}\n{passage.text}"
        assert all(line in rows for line in passage.text.split("\n"))
    assert passages[0].header == ""
    assert passages[0].text.startswith("Mills.")
    assert not any(passage.cut for passage in passages)
