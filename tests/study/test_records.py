"""A study's answers by seed and setting."""

from __future__ import annotations

import math

from kinject.eval.scoring.answers import AnswerStore
from kinject.study.records import AskSetting, Records
from kinject.types import Answer


def test_a_seed_that_diverged_is_no_seed_and_a_question_it_has_no_score_for_is_left_out(tmp_path):
    def write(seed, *log_probs):
        folder = tmp_path / str(seed)
        folder.mkdir()
        with AnswerStore(folder / "answers.jsonl") as store:
            for i, value in enumerate(log_probs):
                answer = Answer(
                    f"q{i}", "set", "ft", "texts", 0, 0, (), 0, (value, -1.0), (1, 1), (1, 1), n_chars=(1, 1)
                )
                store.add(f"k{i}", answer)
        records.read("m", "ft", seed, folder)

    records, setting = Records("sum"), AskSetting("set", "texts", 0, 0)
    write(0, -0.5, math.nan, -2.0)
    write(1, -0.5, -0.5, -0.5)
    write(2, math.nan, math.nan, math.nan)
    assert records.seeds("m", "ft") == [0, 1]
    assert records.settings("m", "ft") == [setting]
    assert records.matrix("m", "ft", setting).correct.tolist() == [[1.0, 0.0], [1.0, 1.0]]
    assert [answer.question_id for answer in records.answers("m", "ft", setting)] == ["q0", "q2"]
    assert records.n_asked("m", "ft", setting) == 3
    assert records.unscored == [("m", "ft", 2, setting, 3)]
