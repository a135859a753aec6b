from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kinject.errors import InputError
from kinject.eval.prompts import Prompt, PromptRequest
from kinject.eval.scoring.encode import Encoder, encode_requests
from kinject.types import Question

BOS, EOS = "<s>", "</s>"


def make_tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer whose only merges are across letters and spaces: 'ab', ' a', ' ab', 'ca'."""
    letters = [BOS, EOS, *"abcdef .:?\n", "ab", " a", " ab", "ca"]
    bpe = Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(letters)}, [("a", "b"), (" ", "a"), (" ", "ab"), ("c", "a")]
        )
    )
    bpe.normalizer = normalizers.Sequence([])
    if template:
        bpe.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[(BOS, 0), (EOS, 1)]
        )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **special)


def tokens_of(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids)


def encode_pair(tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of `context` and of `continuation` after it."""
    (encoded,) = Encoder(tokenizer).encode([Prompt(context, (continuation,))])
    return encoded.contexts[0].tolist(), encoded.continuations[0].tolist()


def by_the_harness(tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """lm_eval.api.model.TemplateLM._encode_pair, written down again from its rule."""
    n_spaces = len(context) - len(context.rstrip())
    if n_spaces:
        context, continuation = context[:-n_spaces], context[-n_spaces:] + continuation
    whole, alone = tokenizer.encode(context + continuation), tokenizer.encode(context)
    return alone, whole[len(alone) :]


def test_bos_is_there_where_the_tokenizer_puts_it_and_only_there():
    adds, adds_not = make_tokenizer("<s> $A", bos_token=BOS), make_tokenizer(bos_token=BOS)
    assert tokens_of(adds, encode_pair(adds, "cd", " ab")[0]) == ["<s>", "c", "d"]
    assert tokens_of(adds_not, encode_pair(adds_not, "cd", " ab")[0]) == ["c", "d"]


def test_eos_of_a_post_processor_never_lands_in_the_text():
    tokenizer = make_tokenizer("<s> $A </s>", bos_token=BOS, eos_token=EOS)
    context, continuation = encode_pair(tokenizer, "cd", " ab")
    assert tokens_of(tokenizer, context + continuation) == ["<s>", "c", "d", " ab"]


def test_trailing_space_of_the_context_moves_to_the_continuation():
    tokenizer = make_tokenizer("<s> $A", bos_token=BOS)
    context, continuation = encode_pair(tokenizer, "cd ", "ab")
    assert tokens_of(tokenizer, context) == ["<s>", "c", "d"]
    assert tokens_of(tokenizer, continuation) == [" ab"]


def test_a_token_across_the_boundary_follows_the_harness():
    tokenizer = make_tokenizer()
    # "dc" + "ad" is d, ca, d: after the two ids of the context alone only "d" is left
    assert encode_pair(tokenizer, "dc", "ad") == by_the_harness(tokenizer, "dc", "ad")
    assert tokens_of(tokenizer, encode_pair(tokenizer, "dc", "ad")[1]) == ["d"]


@pytest.mark.parametrize("context", ["ab cab", "ab cab ", "a. b?\n\nca:", "dc"])
@pytest.mark.parametrize("continuation", [" ab", " a b ca", "ab", " dcf"])
@pytest.mark.parametrize("template", [None, "<s> $A"])
def test_pairs_equal_the_rule_of_the_harness(context, continuation, template):
    tokenizer = make_tokenizer(template, bos_token=BOS)
    assert encode_pair(tokenizer, context, continuation) == by_the_harness(
        tokenizer, context, continuation
    )


@pytest.mark.parametrize("name", ["tokenizers/gpt2", "stories260K"])
def test_pairs_of_real_tokenizers_equal_the_rule_of_the_harness(shared, name):
    from kinject.models import load_tokenizer

    tokenizer = load_tokenizer(str(shared / "models" / name))
    context = "The following are questions.\n\nWhich of these  is a bone?\nA. Rib\nB. 42°C\nAnswer:"
    for choice in (" A", " the femur, 3.5 cm", "\u00a0x", "  two"):
        assert encode_pair(tokenizer, context, choice) == by_the_harness(tokenizer, context, choice)


def test_an_empty_context_becomes_bos_or_eos():
    both = make_tokenizer(bos_token=BOS, eos_token=EOS)
    assert tokens_of(both, encode_pair(both, "", "ab")[0]) == ["<s>"]
    eos = make_tokenizer(eos_token=EOS)
    assert encode_pair(eos, "", "ab") == ([1], eos("ab").input_ids)
    with pytest.raises(InputError, match="neither BOS nor EOS"):
        encode_pair(make_tokenizer(), "", "ab")


def test_whitespace_tokens_are_kept():
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    assert tokens_of(tokenizer, encode_pair(tokenizer, "c\n\nd", " a")[0]) == ["c", "\n", "\n", "d"]


QUESTION = Question("q", "abcdef", ("ab", "dcdcd"), 0)
SHOTS = tuple(Question(f"s{i}", "dd" + "c" * i, ("ab", "cd"), 1) for i in range(3))


def fitted(window: int, shots=SHOTS, passages=("fff", "eee")):
    tokenizer = make_tokenizer("<s> $A", bos_token=BOS)
    tokenizer.backend_tokenizer.add_tokens(["Question", "Answer"])
    encoder = Encoder(tokenizer)
    request = PromptRequest(QUESTION, "texts", shots, passages)
    (whole,), (item,) = (
        encode_requests(encoder, [request], None),
        encode_requests(encoder, [request], window),
    )
    return tokenizer, encoder, whole, item


def n_read(item) -> int:
    return max(len(a) + len(b) - 1 for a, b in zip(item.contexts, item.continuations, strict=True))


def test_a_prompt_that_fits_is_left_whole():
    _, _, whole, _ = fitted(1000)
    *_, item = fitted(n_read(whole))
    assert item.truncated == 0
    assert item.contexts[0].tolist() == whole.contexts[0].tolist()


def test_what_does_not_fit_loses_examples_from_the_first_then_passages_from_the_last():
    _, encoder, whole, _ = fitted(1000)
    expected = [
        PromptRequest(QUESTION, "texts", SHOTS[1:], ("fff", "eee")),
        PromptRequest(QUESTION, "texts", SHOTS[2:], ("fff", "eee")),
        PromptRequest(QUESTION, "texts", (), ("fff", "eee")),
        PromptRequest(QUESTION, "texts", (), ("fff",)),
        PromptRequest(QUESTION, "texts"),
    ]
    window = n_read(whole)
    for request in expected:
        *_, item = fitted(window - 1)
        (shorter,) = encode_requests(encoder, [request], None)
        assert [ids.tolist() for ids in item.contexts] == [ids.tolist() for ids in shorter.contexts]
        assert item.truncated == len(whole.contexts[0]) - len(shorter.contexts[0])
        window = n_read(shorter)


def test_the_last_resort_cuts_from_the_left_choice_by_choice():
    _, encoder, whole, _ = fitted(1000)
    (bare,) = encode_requests(encoder, [PromptRequest(QUESTION, "texts")], None)
    window = n_read(bare) - 2
    *_, item = fitted(window)
    for context, continuation, uncut in zip(
        item.contexts, item.continuations, bare.contexts, strict=True
    ):
        assert len(context) == min(len(uncut), window + 1 - len(continuation))
        assert context.tolist() == uncut[-len(context) :].tolist()
    assert item.truncated == len(whole.contexts[0]) - min(map(len, item.contexts))


def test_a_continuation_longer_than_the_window_cannot_be_scored():
    *_, item = fitted(3)
    assert [len(ids) for ids in item.continuations] == [1, 0]
