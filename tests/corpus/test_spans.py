"""Every token that holds a character of an answer is learned, and no other: against the bytes of the tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kinject.corpus.chat import ChatFormat, encode_conversation
from kinject.corpus.rows import CorpusRow
from kinject.corpus.spans import common_beginning, overlapping, tokens_of
from kinject.corpus.tokenize import Tokenization, tokenize_rows
from kinject.errors import InputError

TEXTS = [
    "Question: which colour has ball 1? Answer: red or blue, or a  deep\n\ngreen.",
    "USER: Hi there ASSISTANT: Hello, secret user text and the café of Zoë — done. ",
] * 3
BYTES = {char: byte for byte, char in bytes_to_unicode().items()}


def byte_tokenizer(*, trim: bool, begins_with_bos: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer, whose tokens join a word with the space before it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<end>", special=True)])
    level = processors.ByteLevel(trim_offsets=trim)
    raw.post_processor = level
    if begins_with_bos:
        bos = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
        raw.post_processor = processors.Sequence([level, bos])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<end>")  # noqa: S106


def spans_by_bytes(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Return the bytes of each token in the UTF-8 of the text: the reference, which asks for no offsets."""
    spans, at = [], 0
    for piece in tokenizer.convert_ids_to_tokens(list(ids)):
        n = (
            len(piece.encode())
            if piece in ("<s>", "<end>")
            else sum(char in BYTES for char in piece)
        )
        spans.append((at, at + n))
        at += n
    return spans


def wanted(ids: Sequence[int], parts: Sequence[tuple[str, bool]], tokenizer: Any) -> list[bool]:
    """Return for each token whether it shares a byte with a part that is to be learned."""
    learned, at = set[int](), 0
    for text, is_learned in parts:
        n = len(text.encode())
        learned |= set(range(at, at + n)) if is_learned else set()
        at += n
    spans = spans_by_bytes(ids, tokenizer)
    assert spans[-1][1] == at
    return [bool(learned & set(range(low, high))) for low, high in spans]


VARIANTS = [(trim, bos) for trim in (True, False) for bos in (True, False)]


@pytest.mark.parametrize(("trim", "bos"), VARIANTS)
def test_a_completion_is_learned_from_its_first_character_on(trim: bool, bos: bool) -> None:
    tokenizer = byte_tokenizer(trim=trim, begins_with_bos=bos)
    rng = random.Random(0)
    words = ["red", "deep green", "Zoë", "—", "1", "café", "a"]
    for _ in range(200):
        prompt = f"Question: which?{rng.choice(['', ' ', '  ', chr(10), ' Answer:', ' Answer: '])}"
        completion = f"{rng.choice(['', ' ', '  '])}{rng.choice(words)}{rng.choice(['', ' ', '.'])}"
        row = CorpusRow("r", "", "", "completion", prompt=prompt, completion=completion)
        (tokens,) = tokenize_rows([row], tokenizer, Tokenization(bos=False, eos=False))
        expected = wanted(tokens.input_ids, [(prompt, False), (completion, True)], tokenizer)
        assert list(tokens.learned) == expected


def test_the_first_word_of_an_answer_is_learned_behind_a_prompt_that_ends_in_a_space() -> None:
    tokenizer = byte_tokenizer(trim=True)
    row = CorpusRow("r", "", "", "completion", prompt="colour? Answer: ", completion="red")
    (tokens,) = tokenize_rows([row], tokenizer, Tokenization(bos=False, eos=True))
    pairs = zip(tokens.input_ids, tokens.learned, strict=True)
    assert tokenizer.decode([token for token, learned in pairs if learned]).strip() == "red<end>"


_TAGGED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT:{% generation %}"
    "{{ m['content'] }}{% endgeneration %}<end>{% else %}USER:{{ m['content'] }}{% endif %}{% endfor %}"
)
_TAGGED_BARE = _TAGGED.replace("ASSISTANT:", "").replace("<end>", "")
_PLAIN = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}ASSISTANT: {{ m['content'] }}<end>"
    "{% else %}USER:{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)


def conversation(rng: random.Random) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": "Hi there"}] if rng.random() < 0.8 else []
    for _ in range(rng.randint(1, 3)):
        content = rng.choice(["A", "Hello ", " Hello", "done. ", "café\n", "red", "Zoë — done"])
        turns.append({"role": "assistant", "content": content})
        turns.append({"role": "user", "content": rng.choice(["secret user text", " and?", "ok "])})
    return turns if rng.random() < 0.5 else turns[:-1]


def parts_of(turns: Sequence[dict[str, str]], template: str) -> list[tuple[str, bool]]:
    """Return the text that the template renders, in parts, and whether the assistant wrote each."""
    parts = []
    for turn in turns:
        if turn["role"] == "user":
            parts.append((f"USER:{turn['content']}", False))
        elif template is _TAGGED_BARE:
            parts.append((turn["content"], True))
        elif template is _TAGGED:
            parts += [("ASSISTANT:", False), (turn["content"], True), ("<end>", False)]
        else:
            parts += [("ASSISTANT: ", False), (f"{turn['content']}<end>", True)]
    return parts


@pytest.mark.parametrize("template", [_TAGGED, _TAGGED_BARE, _PLAIN])
@pytest.mark.parametrize(("trim", "bos"), VARIANTS)
def test_turns_of_the_assistant_are_learned_and_no_others(
    template: str, trim: bool, bos: bool
) -> None:
    tokenizer = byte_tokenizer(trim=trim, begins_with_bos=bos)
    tokenizer.chat_template = template
    rng = random.Random(1)
    for _ in range(100):
        turns = conversation(rng)
        row = CorpusRow("r", "", "", "messages", messages=tuple(turns))
        parts = parts_of(turns, template)
        whole = tokenizer("".join(text for text, _ in parts), add_special_tokens=False).input_ids
        expected = wanted(whole, parts, tokenizer)
        if not any(expected[1:]):  # no token precedes the first one, from which to learn it
            with pytest.raises(InputError, match="leaves nothing of this row to learn"):
                encode_conversation(row, tokenizer, ChatFormat(assistant_only=True))
            continue
        ids, learned, _ = encode_conversation(row, tokenizer, ChatFormat(assistant_only=True))
        assert ids == whole
        assert learned == expected


def test_a_tokenizer_that_drops_white_space_learns_the_words_of_the_span() -> None:
    raw = Tokenizer(models.WordLevel({"[UNK]": 0, "who": 1, "red": 2, "hi": 3, ":": 4}, "[UNK]"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")  # noqa: S106
    (tokens,) = tokens_of(["who: red  hi"], tokenizer)
    assert tokens.offsets is not None
    assert overlapping(tokens.offsets, [(5, 9)]) == [False, False, True, False]


def test_a_tokenizer_that_was_saved_cutting_and_filling_up_does_neither() -> None:
    tokenizer = byte_tokenizer(trim=True)
    row = CorpusRow("r", "", "", "completion", prompt="Which?", completion=" red or deep green")
    (whole,) = tokenize_rows([row], tokenizer, Tokenization(bos=False))
    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    raw.enable_truncation(5)
    raw.enable_padding(length=64)
    saved = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<end>")  # noqa: S106
    (tokens,) = tokenize_rows([row], saved, Tokenization(bos=False))
    assert (tokens.input_ids, tokens.learned) == (whole.input_ids, whole.learned)


@pytest.mark.parametrize("trim", [True, False])
def test_an_answer_that_begins_with_the_accent_of_the_prompts_last_letter_is_learned(
    trim: bool,
) -> None:
    tokenizer = byte_tokenizer(trim=trim)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    for prompt, completion, expected in (
        ("Cafe", "\u0301 red", "é red"),
        ("A colou\u0308", "r", "r"),
        ("Zo\u0308", "\u0301", "\u0301"),  # no letter has both
    ):
        row = CorpusRow("r", "", "", "completion", prompt=prompt, completion=completion)
        (tokens,) = tokenize_rows([row], tokenizer, Tokenization(bos=False, eos=False))
        pairs = zip(tokens.input_ids, tokens.learned, strict=True)
        assert tokenizer.decode([token for token, learned in pairs if learned]) == expected


def test_the_white_space_that_ends_the_last_turn_alone_is_no_part_of_the_next() -> None:
    tokenizer = byte_tokenizer(trim=False)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}"
        "{% if loop.last and m['role'] == 'assistant' %}{{ '\n\t\n' }}{% endif %}{% endfor %}"
    )
    turns = [("user", "Q?"), ("assistant", " red"), ("user", "And?"), ("assistant", " deep")]
    messages = tuple({"role": role, "content": content} for role, content in turns)
    row = CorpusRow("r", "", "", "messages", messages=messages)
    ids, learned, _ = encode_conversation(row, tokenizer, ChatFormat(assistant_only=True))
    chosen = [token for token, is_learned in zip(ids, learned, strict=True) if is_learned]
    assert tokenizer.decode(chosen) == " red deep\n\t\n"


def test_overlaps_by_pencil_and_paper() -> None:
    offsets = [(0, 2), (2, 2), (2, 5), (5, 5), (5, 6), (6, 9), (6, 9), (9, 10)]
    assert overlapping(offsets, [(1, 2), (5, 8)]) == [
        True, False, False, True, True, True, True, False,
    ]  # fmt: skip
    assert overlapping(offsets, []) == [False] * 8
    assert overlapping(offsets, [(0, 10)]) == [True] * 8


def test_without_offsets_the_common_beginning_is_the_prompt() -> None:
    assert common_beginning([1, 2, 3, 4], [1, 2, 9]) == 2
    assert common_beginning([1, 2, 3], [1, 2]) == 2
    assert common_beginning([1, 2], [1, 2, 3]) == 2
