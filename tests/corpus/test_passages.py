from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinject.corpus.passages import heading_path, sentence_ends, sentences, split_passages, token_spans, word_spans
from kinject.errors import InputError
from kinject.types import Document

words = st.lists(
    st.sampled_from(["Dr.", "ab", "I", "3.5", "(x)", "U.S.", "end.", "Is?", "。", "日本", "\n\n", "\t", "🙂", "x" * 80])
)
texts = st.one_of(st.text(min_size=1, max_size=300), words.map(" ".join), words.map("".join))


def document(text: str) -> Document:
    return Document("d", "", text, "test")


def byte_spans(text: str) -> list[tuple[int, int]]:
    """A byte-level tokenizer: characters beyond ASCII are several tokens that share one span."""
    return [(at, at + 1) for at, character in enumerate(text) for _ in character.encode("utf-8", "surrogatepass")]


@given(texts, st.integers(1, 20))
def test_passages_are_exact_slices_that_cover_all_but_space_and_fit(text: str, n_tokens: int) -> None:
    passages = split_passages(document(text), n_tokens, word_spans)
    at = 0
    for passage in passages:
        assert passage.text == text[passage.start : passage.end]
        assert passage.text == passage.text.strip() != ""
        assert text[at : passage.start].strip() == ""
        assert 0 <= len(word_spans(passage.text)) <= n_tokens
        at = passage.end
    assert text[at:].strip() == ""


@given(texts, st.integers(4, 20))
def test_tokens_that_share_a_character_are_never_parted(text: str, n_tokens: int) -> None:
    passages = split_passages(document(text), n_tokens, byte_spans)
    assert "".join("".join(p.text for p in passages).split()) == "".join(text.split())
    assert all(len(byte_spans(p.text)) <= n_tokens for p in passages)


def test_a_cut_falls_at_the_last_sentence_end_that_fits() -> None:
    text = "One two three. Four five six. Seven eight nine."
    assert [p.text for p in split_passages(document(text), 10, word_spans)] == [
        "One two three. Four five six.",
        "Seven eight nine.",
    ]


def test_without_a_sentence_end_a_cut_falls_between_words() -> None:
    text = "one two-three four five"
    assert [p.text for p in split_passages(document(text), 3, word_spans)] == ["one", "two-three", "four five"]


def test_a_change_leaves_the_passages_before_it_as_they_were() -> None:
    before = "One two three. Four five six. Seven eight nine. Ten eleven."
    first = split_passages(document(before), 8, word_spans)
    second = split_passages(document(before + " And much more that was added later on."), 8, word_spans)
    assert [p.id for p in first[:-1]] == [p.id for p in second[: len(first) - 1]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dr. Wu met J. R. Hill at 3.5 km. They left.", ["Dr. Wu met J. R. Hill at 3.5 km.", "They left."]),
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


@given(texts)
def test_sentence_ends_ascend_and_reach_the_end(text: str) -> None:
    ends = sentence_ends(text)
    assert ends == sorted(set(ends))
    assert (ends[-1:] or [0]) == [len(text.rstrip())]


def test_a_tokenizer_folder_gives_its_own_spans(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_spans(str(tmp_path))("a bc  d") == [(0, 1), (2, 4), (6, 7)]


def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no tokenizer can be loaded"):
        token_spans(str(tmp_path))


def test_a_heading_stays_with_what_follows_it_and_rows_are_not_torn() -> None:
    text = "# Works\n\nShe built one bridge.\n\n## Years\n\n| year | bridge |\n| 1931 | Falk |\n| 1940 | Lind |"
    assert [p.text for p in split_passages(document(text), 14, word_spans)] == [
        "# Works\n\nShe built one bridge.",
        "## Years\n\n| year | bridge |\n| 1931 | Falk |",
        "| 1940 | Lind |",
    ]


def test_the_headings_above_a_passage_are_its_path() -> None:
    text = "# A\n\none\n\n## B ##\n\ntwo\n\n```\n# no heading\n```\n\n### C\n\nthree\n\n## D\n\nfour"
    at = {word: heading_path(text, text.index(word)) for word in ("one", "two", "three", "four", "## D", "# A")}
    assert at == {
        "one": ("A",), "two": ("A", "B"), "three": ("A", "B", "C"), "four": ("A", "D"), "## D": ("A",), "# A": (),
    }  # fmt: skip
