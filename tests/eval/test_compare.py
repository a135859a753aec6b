from __future__ import annotations

import itertools
from dataclasses import asdict, replace

import pytest

import kinject
from kinject.cli import main
from kinject.disk import Journal
from kinject.errors import InputError
from kinject.eval.compare import compare_runs, read_run, render_comparison
from kinject.types import Answer


def answer(i: int, right: bool, arm: str = "base", **change) -> Answer:
    values = (-1.0, -2.0) if right else (-2.0, -1.0)
    return Answer(
        f"q{i}",
        "set",
        arm,
        "texts",
        0,
        0,
        (),
        0,
        values,
        (1, 1),
        (1, 1),
        document_id=f"d{i // 2}",
        **change,
    )


@pytest.fixture
def folder(tmp_path):
    """Write answers as a run folder."""

    def _folder(name: str, *answers: Answer):
        path = tmp_path / name
        path.mkdir()
        rows = ({"key": str(i), **asdict(item)} for i, item in enumerate(answers))
        with Journal(path / "answers.jsonl") as journal:
            for row in rows:
                journal.append(row)
        return path

    return _folder


def flips_by_document(changes: list[int]) -> float:
    """Return how many assignments of signs to the documents' changes sum to as much as they do, either way."""
    sums = [sum(signs) for signs in itertools.product(*((change, -change) for change in changes))]
    return sum(abs(value) >= abs(sum(changes)) for value in sums) / len(sums)


def test_two_runs_are_paired_by_question(folder):
    before = folder("before", *(answer(i, i < 4) for i in range(12)))
    after = folder("after", *(answer(i, i > 1, arm="tuned") for i in range(13)))
    (pair,) = compare_runs([read_run(before), read_run(after)])
    assert (pair.name, pair.base_name, pair.n_left_out) == ("after: tuned", "before: base", 1)
    difference = pair.contrast
    assert (pair.result.n, difference.wrong_to_right, difference.right_to_wrong) == (12, 8, 2)
    # Above that of the signs: the one document that lost is further from the others.
    assert flips_by_document([-2, 0, 2, 2, 2, 2]) < difference.p < 0.5
    assert difference.delta == pytest.approx(0.5)
    assert not difference.can_lose  # base is not shown to be above chance
    assert difference.low < 0.5 < difference.high
    text = render_comparison([pair])
    assert "up to 1 question left out, in one run only" in text
    assert "in these models" in text


def test_questions_of_either_run_alone_are_all_counted_as_left_out(folder):
    before = folder("before", *(answer(i, i < 9) for i in range(3, 15)))
    after = folder("after", *(answer(i, i > 5) for i in range(8)))
    (pair,) = compare_runs([read_run(before), read_run(after)])
    assert (pair.result.n, pair.n_left_out) == (5, 10)


def test_a_run_without_a_manifest_is_said_to_be_unfinished(folder, capsys):
    path = folder("stopped", *(answer(i, i < 4) for i in range(5)))
    read_run(path / "answers.jsonl")
    assert not capsys.readouterr().err
    read_run(path)
    assert "stopped: its evaluation was not finished (no manifest.json)" in capsys.readouterr().err


def test_runs_of_one_name_are_named_by_their_paths(folder, tmp_path):
    paths = []
    for name, n_right in (("x", 2), ("y", 5), ("z", 8)):
        (tmp_path / name).mkdir()
        paths.append(folder(f"{name}/eval", *(answer(i, i < n_right) for i in range(10))))
    last = paths[2].rename(tmp_path / "later")
    pairs = compare_runs([read_run(path) for path in (*paths[:2], last)])
    assert [(pair.name, pair.base_name) for pair in pairs] == [
        (f"{paths[1]}: base", f"{paths[0]}: base"),
        ("later: base", f"{paths[0]}: base"),
    ]


def test_several_runs_are_one_family_and_one_run_compares_nothing(folder):
    runs = [
        read_run(folder(name, *(answer(i, i < n, "ft") for i in range(10))))
        for name, n in (("x", 2), ("y", 6), ("z", 9))
    ]
    pairs = compare_runs(runs)
    assert [(pair.name, pair.base_name) for pair in pairs] == [
        ("y: ft", "x: ft"),
        ("z: ft", "x: ft"),
    ]
    assert [pair.contrast.p for pair in pairs] >= [
        flips_by_document([2, 2]),
        flips_by_document([2, 2, 2, 1]),
    ]
    assert [pair.contrast.p_holm for pair in pairs] == pytest.approx(
        [pairs[0].contrast.p, 2 * pairs[1].contrast.p]
    )
    with pytest.raises(InputError, match="found one run; give two or more"):
        compare_runs(runs[:1])


@pytest.mark.parametrize(
    ("p", "text"), [(0.04996, "< 0.05"), (0.05004, "> 0.05"), (0.05, "0.050"), (0.0486, "0.049")]
)
def test_a_p_beside_the_threshold_tells_on_which_side_it_lies(folder, p, text):
    runs = [folder(name, *(answer(i, i > 3) for i in range(12))) for name in ("old", "new")]
    (pair,) = compare_runs([read_run(run) for run in runs])
    near = replace(pair, contrast=replace(pair.contrast, p=p, p_holm=p))
    (row,) = (line for line in render_comparison([near]).splitlines() if "new: base" in line)
    assert " ".join(row.split()).endswith(f" 0 0 {text} {text}")


def test_beyond_the_choices_alone_arms_with_passages_use_the_control_of_those_without(folder):
    """The controls prefer the second choice, so that sums are wrong and pmi is right."""

    def asked(i: int, form: str, k: int, log_probs: tuple[float, float], arm: str) -> Answer:
        return replace(answer(i, True, arm), format=form, k=k, log_probs=log_probs)

    def run(name: str, n_right: int):
        rows = []
        for i in range(8):
            rows.append(asked(i, "texts-no-question", 0, (-5.0, -1.0), "m"))
            rows.append(asked(i, "texts", 0, (-4.0, -2.0) if i < n_right else (-9.0, -2.0), "m"))
            rows.append(asked(i, "texts", 1, (-3.0, -2.0), "m+rag"))
            rows.append(asked(i, "letters", 0, (-1.0, -2.0), "m"))
        return folder(name, *rows)

    runs = [read_run(run(name, n), "pmi") for name, n in (("a", 2), ("b", 7))]
    pairs = {(pair.result.format, pair.result.k): pair for pair in compare_runs(runs)}
    assert sorted(pairs) == [("letters", 0), ("texts", 0), ("texts", 1)]
    accuracies = [pairs[key].result.accuracy for key in sorted(pairs)]
    assert accuracies == [1.0, 7 / 8, 1.0]
    assert pairs["texts", 0].contrast.delta == pytest.approx(5 / 8)
    assert pairs["texts", 0].result.control is None  # pmi is net of it already


def test_passages_that_one_run_alone_had_are_compared_with_the_same_arm_without(folder):
    def run(name: str, k: int):
        suffix = "+rag" if k else ""
        rows = [
            replace(answer(i, i % 3 > n, f"{arm}{suffix}"), k=k)
            for n, arm in enumerate(("base", "cpt"))
            for i in range(6)
        ]
        return folder(name, *rows)

    plain, with_passages = read_run(run("plain", 0)), read_run(run("passages", 4))
    pairs = compare_runs([plain, with_passages])
    assert [(pair.name, pair.base_name) for pair in pairs] == [
        ("passages: base+rag", "plain: base"),
        ("passages: cpt+rag", "plain: cpt"),
    ]


def test_what_is_no_run_is_reported(tmp_path, capsys):
    assert main(["compare", str(tmp_path)]) == 2
    assert "no run. Expected a run folder of kinject eval" in capsys.readouterr().err


def test_runs_with_nothing_in_common_are_reported(folder):
    other = Answer("q0", "other", "base", "texts", 0, 0, (), 0, (-1.0, -2.0), (1, 1), (1, 1))
    runs = [read_run(folder("a", answer(0, True))), read_run(folder("b", other))]
    with pytest.raises(InputError, match="nothing to compare"):
        compare_runs(runs)
    more_shots = folder("c", replace(answer(0, True), shots=3))
    with pytest.raises(InputError, match="a: set, texts, 0 shots; c: set, texts, 3 shots"):
        compare_runs([runs[0], read_run(more_shots)])


def test_questions_with_other_choices_are_no_pair(folder):
    log_probs = (-1.0,) * 9 + (-2.0,)
    ten = replace(answer(0, True), log_probs=log_probs, n_tokens=(1,) * 10)
    runs = [read_run(folder("a", answer(0, True))), read_run(folder("b", ten))]
    with pytest.raises(InputError, match="'q0' of set has 10 choices in one and 2 in the other"):
        compare_runs(runs)


@pytest.mark.parametrize(
    ("lengths", "gold", "is_same"),
    [((7, 3), 1, True), ((3, 7), 1, False), ((3, 8), 0, False), ((3, 7), 0, True)],
)
def test_choices_of_other_lengths_or_with_another_right_one_are_no_pair(
    folder, lengths, gold, is_same
):
    # In another order they are the same; edited ones under the old id read as a loss of all.
    first = replace(answer(0, True), n_bytes=(3, 7))
    other = replace(first, n_bytes=lengths, gold=gold)
    runs = [read_run(folder("a", first)), read_run(folder("b", other))]
    if is_same:
        assert len(compare_runs(runs)) == 1
        return
    with pytest.raises(InputError, match="'q0' of set has other choices, or another right one"):
        compare_runs(runs)


@pytest.mark.parametrize("score", ["match", "contains", "judge"])
def test_a_score_of_written_answers_is_refused_for_a_run_of_choices(folder, score: str) -> None:
    run = folder("run", *(answer(i, i > 2) for i in range(6)))
    with pytest.raises(InputError, match=f"--score {score}: is for written answers, and .*run"):
        read_run(run, score)


@pytest.mark.parametrize("score", ["chars", "bytes", "pmi"])
def test_a_score_of_choices_is_refused_for_a_run_of_written_answers(folder, score: str) -> None:
    plain = {"format": "generate", "text": "Kelm", "accepted": ("Kelm",), "log_probs": ()}
    plain |= {"n_tokens": (2,), "n_bytes": ()}
    written = [replace(answer(i, True), **plain) for i in range(4)]
    run = folder("run", *written)
    with pytest.raises(InputError, match=f"--score {score}: is for choices, and .*written"):
        read_run(run, score)
    both = folder("both", *written, *(answer(i, i > 2) for i in range(6)))
    assert len(read_run(both, "match").settings) == 2


def test_a_score_that_there_is_not_is_refused_in_python_too(folder) -> None:
    run = folder("run", *(answer(i, i > 1) for i in range(4)))
    with pytest.raises(InputError, match="--score: found 'char', allowed: sum, chars, bytes"):
        kinject.compare(run, run, score="char")
