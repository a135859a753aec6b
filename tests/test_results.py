"""Results as Python shows them."""

from __future__ import annotations

from kinject.results import ArmInfo, ArmResult, Report


def _result(arm: str, question_set: str, accuracy: float, **more: object) -> ArmResult:
    values = {"format": "texts", "shots": 0, "k": 0, "chance": 0.25, "interval": "Wilson", **more}
    return ArmResult(
        model="m",
        arm=arm,
        question_set=question_set,
        role="learning",
        n=20,
        by_seed=(accuracy,),
        accuracy=accuracy,
        low=0.0,
        high=1.0,
        to_base=None,
        **values,  # type: ignore[arg-type]
    )


def test_a_report_is_five_lines_whatever_its_names_hold() -> None:
    results = (
        _result("base", "facts", 0.3),
        _result("base", "facts", 0.9, k=3),
        _result("taught", "facts", 0.55),
        _result("taught", "facts", 0.1, format="letters"),
        _result("taught", "facts", 0.2, subject="rivers"),
        _result("base", "old", 0.8),
    )
    arms = tuple(ArmInfo(f"arm{n}", "m", "", n > 0) for n in range(8))
    report = Report("evaluation", "Two\nlines", ("m",), arms, results)
    assert repr(report).splitlines() == [
        "evaluation: Two lines",
        "models: m",
        "arms: arm0, arm1, arm2, arm3, arm4, 3 more",
        "sets: facts (base 30.0%, taught 55.0%); old (base 80.0%)",
        "6 results, 0 failures; to_frame() has each",
    ]
    empty = Report("study", "", (), (), ())
    assert len(repr(empty).splitlines()) == 5
    assert f"{report}" == repr(report)
