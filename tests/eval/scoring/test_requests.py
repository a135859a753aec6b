from __future__ import annotations

import pytest

from kinject.eval.scoring.requests import show_progress


def test_without_a_terminal_there_is_one_line_on_stderr(capsys):
    with show_progress("base on new", 10, 4) as progress:
        for _ in range(6):
            progress.advance()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("base on new: 10 prompts, 4 found in answers.jsonl, 6 scored in ")
    assert err.endswith(" a second\n")
    assert err.count("\n") == 1


def test_an_interrupted_count_claims_nothing(capsys):
    with pytest.raises(KeyboardInterrupt), show_progress("base on new", 10, 0):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_on_a_terminal_a_bar_counts_the_questions(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress("base on new", 2, 0) as progress:
        progress.advance()
        progress.advance()
    err = capsys.readouterr().err
    assert "2/2" in err
    assert progress.done == 2
