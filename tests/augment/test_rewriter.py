import pytest

from kinject.augment.rewriter import AugmentProgress


def test_what_a_rerun_finds_does_not_count_for_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("kinject.terminal.time.monotonic", lambda: clock[0])
    with AugmentProgress(100) as meter:
        meter.watch(lambda: "9 tokens in")
        meter.count_stored(60)
        meter.count_refused()
        clock[0] = 20.0
        meter.advance(20)
    line = capsys.readouterr().err
    assert "augment: 80/100 rewritings" in line
    assert "1.0 rewritings/s" in line
    assert "1 refused, 9 tokens in" in line
    assert "ETA 20 s" in line
