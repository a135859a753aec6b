"""Prompts as chats, and thinking: TRL's templates of real models, against transformers' own rendering and generation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from kinject.eval.prompts import ChatStyle, Generation, PromptRequest, render_prompt
from kinject.eval.scoring.encode import Encoder, encode_requests
from kinject.eval.scoring.generate import AnswerGenerator
from kinject.eval.scoring.scorer import Scorer
from kinject.llm.thinking import split_thinking
from kinject.types import Question

ASKED = Question("q1", "Which bone is longest?", ("Rib", "Femur", "Ulna"), 1, subject="anatomy")
SHOT = Question("s1", "Which organ pumps?", ("Heart", "Lung"), 0, subject="anatomy")
HEADER = "The following are multiple choice questions (with answers) about anatomy.\n\n"
FIRST = (
    "Which organ pumps?\nA. Heart\nB. Lung\nAnswer with the letter of the correct option.\nAnswer:"
)
LAST = "Which bone is longest?\nA. Rib\nB. Femur\nC. Ulna\nAnswer with the letter of the correct option.\nAnswer:"


def make_tokenizer(template: str) -> Any:
    """Return a tokenizer of bytes with the chat template of a model; the tokens that it writes are tokens here too."""
    text = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner)
    made.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    marks = re.findall(
        r"<[|｜][^<>|｜\s{}]*[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_turn>|</?think>", text
    )
    made.add_special_tokens({"additional_special_tokens": sorted(set(marks))})
    made.chat_template = text
    return made


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("qwen3", {"enable_thinking": False}), ("qwen3", {}), ("llama3", {}), ("gemma", {}), ("gemma3", {}), ("phi3", {}),
        ("gptoss", {"reasoning_effort": "low"}), ("deepseekv3", {}), ("glm4moe", {"enable_thinking": False}),
    ],
)  # fmt: skip
def test_a_prompt_has_the_tokens_of_transformers_own_rendering(template, arguments):
    tokenizer = make_tokenizer(template)
    encoder = Encoder(tokenizer, chat=ChatStyle("Be brief.", arguments))
    (encoded,) = encode_requests(encoder, [PromptRequest(ASKED, "letters-written", (SHOT,))], None)
    turns = [f"{FIRST} A\n\n{LAST}"]
    system = f"Be brief.\n\n{HEADER}"
    if template == "gemma":  # it refuses a system turn
        assert encoder.notes == [
            "the chat template takes no system turn; its text is part of the user's"
        ]
        turns[0] = system + turns[0]
    messages = [] if template == "gemma" else [{"role": "system", "content": system}]
    messages += [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
    ]
    expected = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **arguments
    )
    assert encoded.contexts[0].tolist() == expected


@pytest.mark.parametrize(
    ("question", "system", "text"),
    [
        (Question("q1", "Who ferries?", ("Ulf", "Ada"), 0), "Use one word.", "Use one word.\n\nQuestion: Who ferries?\nAnswer:"),
        (
            Question("q2", "And now?", (), 0, answers=("Ada",), messages=({"role": "system", "content": "You know boats."},)),
            "", "You know boats.\n\nAnd now?",
        ),
    ],
)  # fmt: skip
def test_a_system_text_that_a_template_refuses_stays_apart_from_the_question(
    question, system, text
):
    encoder = Encoder(make_tokenizer("gemma"), chat=ChatStyle(system))
    request = PromptRequest(question, "generate", generation=Generation(4))
    assert encoder.apply_chat_template(render_prompt(request)).context == (
        f"<s><start_of_turn>user\n{text}<end_of_turn>\n<start_of_turn>model\n"
    )


def scripted(tokenizer: Any, n_prompt: int, script: list[int]) -> Any:
    """Return a GPT-2 that writes `script` after a prompt of `n_prompt` tokens: its positions alone decide."""
    size = len(tokenizer)
    config = GPT2Config(
        vocab_size=size, n_embd=size, n_layer=1, n_head=1, n_positions=n_prompt + len(script) + 64, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "ln_" in name and name.endswith("weight") else 0.0)
        model.lm_head.weight.copy_(torch.eye(size))
        for i, token in enumerate(script):
            model.transformer.wpe.weight[n_prompt - 1 + i, token] = 1.0
    return model


THOUGHTS = "Legs, then arms."
WRITTEN = {
    "qwen3": f"<think>\n{THOUGHTS}\n</think>\n\nThe answer is B.",
    "deepseekv3": f"{THOUGHTS}\n</think>\n\nThe answer is B.",  # its template opens the thinking
    "gptoss": f"<|channel|>analysis<|message|>{THOUGHTS}<|end|><|start|>assistant<|channel|>final<|message|>The answer is B.",
    "gemma4": f"<|channel>thought\n{THOUGHTS}\n<channel|>The answer is B.",
    "llama3": "The answer is B.",
}


def encoded_and_model(template: str, generation: Generation) -> Any:
    tokenizer = make_tokenizer(template)
    requests = [PromptRequest(ASKED, "letters-written", generation=generation)] * 2
    prompts = encode_requests(Encoder(tokenizer, chat=ChatStyle()), requests, None)
    script = tokenizer(WRITTEN[template], add_special_tokens=False).input_ids
    return (
        tokenizer,
        prompts,
        script,
        scripted(tokenizer, len(prompts[0].contexts[0]), [*script, tokenizer.eos_token_id]),
    )


@pytest.mark.parametrize(
    ("template", "uses_tree"), [*((name, True) for name in WRITTEN), ("qwen3", False)]
)
def test_thinking_is_taken_off_what_transformers_generates_and_counted(template, uses_tree):
    tokenizer, prompts, script, model = encoded_and_model(template, Generation(80))
    config = GenerationConfig(
        max_new_tokens=80, eos_token_id=tokenizer.eos_token_id, pad_token_id=0
    )
    ids = torch.tensor(np.array([prompts[0].contexts[0]], dtype=np.int64))
    whole = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[
        0, ids.shape[1] :
    ]
    assert whole.tolist() == [*script, tokenizer.eos_token_id]
    thinking, answer = split_thinking(tokenizer.decode(whole[:-1]))
    scorer = Scorer(model, 512)
    assert scorer.uses_tree
    scorer.__dict__["uses_tree"] = uses_tree
    for _, score in AnswerGenerator(scorer, tokenizer).score(prompts):
        assert score.text == answer == "The answer is B."
        assert (score.n_thinking > 0) == bool(thinking) == (template != "llama3")
        assert score.n_thinking + score.n_tokens == len(script)
        assert tokenizer.decode(script[score.n_thinking :]).strip() == answer
        assert not score.thinking_cut


def test_thinking_that_never_ends_leaves_no_answer_and_is_counted_as_cut():
    tokenizer, prompts, _, model = encoded_and_model("qwen3", Generation(12))
    ((_, score), _) = AnswerGenerator(Scorer(model, 512), tokenizer).score(prompts)
    assert (score.text, score.n_tokens, score.n_thinking, score.thinking_cut) == ("", 0, 12, True)


def test_stop_strings_are_looked_for_after_the_thinking():
    tokenizer, prompts, _, model = encoded_and_model("qwen3", Generation(80, ("\n", " is")))
    ((_, score), _) = AnswerGenerator(Scorer(model, 512), tokenizer).score(prompts)
    assert score.text == ""  # "\n\n" follows </think>
    tokenizer, prompts, _, model = encoded_and_model("qwen3", Generation(80, (" is", "legs")))
    ((_, score), _) = AnswerGenerator(Scorer(model, 512), tokenizer).score(prompts)
    assert score.text == "The answer"


@pytest.mark.parametrize("uses_tree", [True, False])
def test_a_special_token_ends_an_answer_as_a_stop_text_but_no_thinking(uses_tree, monkeypatch):
    written = "<think>\nTurns end in <|im_end|>.\n</think>\n\nUlna<|im_end|>\n<|im_start|>user\nAnd"
    monkeypatch.setitem(WRITTEN, "qwen3", written)
    tokenizer, prompts, _, model = encoded_and_model("qwen3", Generation(90, ("Z", "<|im_end|>")))
    scorer = Scorer(model, 512)
    scorer.__dict__["uses_tree"] = uses_tree
    for _, score in AnswerGenerator(scorer, tokenizer).score(prompts):
        assert score.text == "Ulna"
        before, thinking = written.split("<|im_end|>\n<|im")[0], written.split("\n\nUlna")[0]
        lengths = [len(tokenizer(text).input_ids) for text in (thinking, before)]
        assert [score.n_thinking, score.n_tokens] == [lengths[0], lengths[1] - lengths[0]]


def test_choices_scored_after_an_opened_thinking_are_noted():
    for template, notes in (("deepseekv3", 1), ("qwen3", 0)):
        encoder = Encoder(make_tokenizer(template), chat=ChatStyle())
        encode_requests(encoder, [PromptRequest(ASKED, "letters")], None)
        assert (
            len([note for note in encoder.notes if "opens the model's thinking" in note]) == notes
        )
