"""A study's answers by seed and setting."""

from __future__ import annotations

import math

from kinject.eval.scoring.answers import AnswerStore
from kinject.eval.statistics import moderated
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


def test_seeds_of_an_arm_are_informed_by_the_other_arms_of_its_base_model_and_setting(tmp_path):
    records, setting = Records("sum"), AskSetting("set", "texts", 0, 0)
    right = {"a": (12, 13, 11), "b": (10, 16, 4), "alone": (12,)}
    for arm, counts in right.items():
        for seed, n_right in enumerate(counts):
            folder = tmp_path / f"{arm}-{seed}"
            folder.mkdir()
            with AnswerStore(folder / "answers.jsonl") as store:
                for i in range(20):
                    value = -0.5 if i < n_right else -2.0
                    store.add(f"k{i}", Answer(f"q{i}", "set", arm, "texts", 0, 0, (), 0, (value, -1.0), (1, 1), (1, 1)))
            records.read("m", arm, seed, folder)
    a, b, alone = (records.matrix("m", arm, setting) for arm in right)
    assert [a.pooled, b.pooled] == moderated([a.seed_variance, b.seed_variance])
    assert a.seed_variance[0] < a.pooled[0] < b.pooled[0] < b.seed_variance[0]
    assert alone.pooled is None
    assert a.chances == (0.5,) * 20
    assert records.matrix("m", "a", setting, "nothing").pooled is None
