from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from kinject.disk import Journal
from kinject.errors import InputError
from kinject.eval.scoring.answers import AnswerStore, hash_model, prompt_key, read_answers
from kinject.eval.scoring.encode import Encoded
from kinject.types import Answer

ANSWER = Answer(
    "q1", "new", "base", "texts", 0, 0, (), 1, (-2.0, -1.5), (1, 2), (3, 4), greedy=(False, True)
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PROMPT = Encoded((ids(1, 2), ids(1, 2)), (ids(3), ids(4, 5)))


def test_answers_come_back_as_they_were(tmp_path):
    path = tmp_path / "answers.jsonl"
    odd = replace(
        ANSWER, question_id="q2", log_probs=(math.nan, -math.inf), context_ids=("p1", "p2")
    )
    with AnswerStore(path) as book:
        book.add("k1", ANSWER)
        book.add("k2", odd)
    first, second = read_answers(path)
    assert first == ANSWER
    assert second.context_ids == ("p1", "p2")
    assert not any(map(math.isfinite, second.log_probs))


def test_a_stored_answer_is_found_by_its_key_and_not_written_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerStore(path) as book:
        assert book.find("k1") is None
        book.add("k1", ANSWER)
    with AnswerStore(path) as book:
        stored = book.find("k1")
        assert stored is not None
        assert stored.log_probs == ANSWER.log_probs
        book.add("k1", ANSWER)
    assert len(path.read_text().splitlines()) == 1


def test_the_last_answer_of_an_arm_and_question_counts(tmp_path):
    path = tmp_path / "answers.jsonl"
    retrained = replace(ANSWER, log_probs=(-1.0, -9.0))
    with AnswerStore(path) as book:
        book.add("old weights", ANSWER)
        book.add("new weights", retrained)
    assert read_answers(path) == [retrained]
    with AnswerStore(path) as book:
        book.add("old weights", ANSWER)  # the old checkpoint is back at its path
    assert read_answers(path) == [ANSWER]


@pytest.mark.parametrize(
    "corrected",
    [{"gold": 0}, {"accepted": ("Kelm",)}, {"subject": "towns"}, {"checks": {"words": [1, 9]}}],
)
def test_what_a_question_gives_now_is_stored_beside_an_old_score(tmp_path, corrected):
    path = tmp_path / "answers.jsonl"
    written = replace(ANSWER, log_probs=(), n_tokens=(3,), n_bytes=(), greedy=(), text="Kelm?")
    written = replace(written, format="generate", gold=0, choices=("Kelm", "Farrow"))
    before = ANSWER if "gold" in corrected else written
    after = replace(before, **corrected)
    with AnswerStore(path) as book:
        book.add("k1", before)
        book.add("k1", after)
    with AnswerStore(path) as book:
        book.add("k1", after)
        assert book.n_rows == 2
    assert read_answers(path) == [after]


def test_answers_that_a_run_does_not_add_are_left_out_until_one_does(tmp_path):
    path = tmp_path / "answers.jsonl"
    other = replace(ANSWER, question_id="q2")
    with AnswerStore(path) as book:
        book.add("k1", ANSWER)
        book.add("k2", other)
        book.leave_out_others()
    assert read_answers(path) == [ANSWER, other]
    for _ in range(2):
        with AnswerStore(path) as book:
            book.add("k2", other)
            book.leave_out_others()
            assert book.n_rows == 3
            assert book.find("k1").log_probs == ANSWER.log_probs
        assert read_answers(path) == [other]
    with AnswerStore(path) as book:
        book.add("k1", ANSWER)
    assert read_answers(path) == [ANSWER, other]


def test_a_torn_last_line_costs_that_answer_only(tmp_path):
    path = tmp_path / "answers.jsonl"
    with AnswerStore(path) as book:
        book.add("k1", ANSWER)
        book.add("k2", replace(ANSWER, question_id="q2"))
    path.write_bytes(path.read_bytes()[:-20])
    with AnswerStore(path) as book:
        assert book.find("k1") is not None
        assert book.find("k2") is None


def test_a_row_that_is_no_answer_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    journal = Journal(path)
    journal.append({"question_id": "q1"})
    journal.close()
    with pytest.raises(InputError, match=r"answers\.jsonl: row 1: question_set: Field required"):
        AnswerStore(path)


@pytest.mark.parametrize(
    "other",
    [
        prompt_key("weights 2", "float32", PROMPT),
        prompt_key("weights", "bfloat16", PROMPT),
        prompt_key("weights", "float32", Encoded((ids(1, 9), ids(1, 9)), PROMPT.continuations)),
        prompt_key("weights", "float32", Encoded(PROMPT.contexts, (ids(3), ids(4, 9)))),
        prompt_key("weights", "float32", Encoded(PROMPT.contexts, (ids(3, 4), ids(5)))),
    ],
)
def test_keys_depend_on_weights_dtype_prompt_and_choices(other):
    assert other != prompt_key("weights", "float32", PROMPT)


def test_keys_do_not_depend_on_what_was_cut_to_get_there():
    assert prompt_key("w", "d", replace(PROMPT, truncated=7)) == prompt_key("w", "d", PROMPT)


def test_a_models_hash_depends_on_weights_tokenizer_and_base(tmp_path):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    base.mkdir()
    adapter.mkdir()
    (base / "model.safetensors").write_bytes(b"1")
    (base / "tokenizer.json").write_text("{}")
    (adapter / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{base}"}}')
    before = hash_model(str(base), None), hash_model(str(adapter), None)
    (base / "notes.md").write_text("not part of the model")
    assert (hash_model(str(base), None), hash_model(str(adapter), None)) == before
    (base / "model.safetensors").write_bytes(b"2")
    weights = hash_model(str(base), None), hash_model(str(adapter), None)
    (base / "tokenizer.json").write_text("[]")
    tokenizer = hash_model(str(base), None), hash_model(str(adapter), None)
    assert len({*before, *weights, *tokenizer}) == 6


def test_hub_models_are_told_apart_by_commit():
    assert hash_model("org/name", "a1") != hash_model("org/name", "b2")
