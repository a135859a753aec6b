"""Requirements on an evaluation: what an interval holds is met, and CI learns the rest by exit code and files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.report.study_samples import first, make_evaluation, make_result

from kinject.errors import InputError
from kinject.eval.require import (
    Check,
    check_requirements,
    exit_code,
    read_requirements,
    write_checks,
)
from kinject.results import Control
from kinject.stats.comparisons import make_contrast
from kinject.stats.matrix import CorrectnessMatrix

SETS = ["new", "known"]
BASE = make_result("base", first(150, 600), None)
ARM = make_result("cpt", first(500, 600), first(150, 600))  # 83.3%, 58.3 points more than the base
REPORT = make_evaluation([BASE, ARM, make_result("cpt", first(560, 600), first(150, 600), k=1)])


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("new>=0.78", "met"),
        (" new >= .8", "met"),
        ("new>=0.82", "cannot be told"),
        ("cpt:new>=0.9", "not met"),
        ("new>=+0.5", "met"),
        ("new>=+0.58", "cannot be told"),
        ("new>=+0.7", "not met"),
        ("new>=-0.02", "met"),
        ("base:new>=0.2", "met"),
        ("cpt+rag:new>=0.9", "met"),
    ],
)
def test_the_interval_decides(text: str, verdict: str) -> None:
    checks = check_requirements(read_requirements([text], SETS), REPORT)
    assert [check.verdict for check in checks] == [verdict]


@pytest.mark.parametrize(
    ("texts", "needs_evidence", "code"),
    [
        (["new>=0.78", "new>=+0.5"], False, 0),
        (["new>=0.78", "new>=+0.5"], True, 0),
        (["new>=0.78", "new>=0.82"], False, 3),
        (["new>=0.78", "new>=0.82"], True, 1),
        (["new>=0.82", "cpt:new>=0.9"], False, 1),
    ],
)
def test_what_cannot_be_told_has_an_exit_code_of_its_own(
    texts: list[str], needs_evidence: bool, code: int
) -> None:
    checks = check_requirements(read_requirements(texts, SETS), REPORT)
    assert exit_code(checks, needs_evidence=needs_evidence) == code


def test_how_many_questions_would_tell_is_what_the_normal_distribution_says() -> None:
    """An accuracy of 5/6 against a bound 1/3 of a point below: 80% power takes (1.96 + 0.84)^2 p (1 - p) / d^2."""
    check = check_requirements(read_requirements(["new>=0.82"], SETS), REPORT)[0]
    by_hand = (1.95996 + 0.84162) ** 2 * (5 / 6) * (1 / 6) / (5 / 6 - 0.82) ** 2
    assert check.n_needed == pytest.approx(by_hand, rel=0.02)
    assert f"; some {check.n_needed:,} questions would tell" in str(check)


def test_questions_of_documents_are_counted_with_these() -> None:
    check = Check("a", "cpt", "texts", "cannot be told", 0.8, 0.7, 0.9, 600, 150, 400)
    assert str(check).endswith("; some 1,600 questions on 400 documents would tell")
    assert str(replace(check, n_needed=None)).endswith(
        "too near for any number of questions to tell"
    )


def test_questions_without_a_score_are_counted_beside_the_numbers_that_lack_them() -> None:
    assert ARM.to_base is not None
    both = replace(ARM.to_base, n=570)  # the base has no score of 30 more
    arm = replace(ARM, n=1640, n_unscored=1040, to_base=both)
    report = make_evaluation([BASE, arm])
    checks = check_requirements(read_requirements(["new>=0.78", "new>=+0.5"], SETS), report)
    assert [(check.n, check.n_unscored) for check in checks] == [(600, 1040), (570, 1070)]
    assert "600 questions, 1,040 more without a score)" in str(checks[0])
    assert "570 questions, 1,070 more without a score)" in str(checks[1])


def test_few_documents_meet_no_requirement_however_narrow_the_interval() -> None:
    for n_documents, verdict in ((9, "cannot be told"), (10, "met")):
        few = replace(ARM, n_documents=n_documents, n_effective=float(n_documents))
        report = make_evaluation([BASE, few])
        checks = check_requirements(read_requirements(["new>=0.5"], SETS), report)
        assert [check.verdict for check in checks] == [verdict]


def test_every_arm_without_retrieval_is_meant_unless_one_is_named() -> None:
    report = make_evaluation(
        [*REPORT.results, make_result("repeat", first(300, 600), first(150, 600))]
    )
    checks = check_requirements(read_requirements(["new>=0.6", "repeat:new>=0.4"], SETS), report)
    assert [(check.arm, check.verdict) for check in checks] == [
        ("cpt", "met"), ("repeat", "not met"), ("repeat", "met"),
    ]  # fmt: skip


def test_controls_are_not_gated_and_each_way_of_asking_is_named() -> None:
    control = Control("texts-no-question", (0.4,), 0.4, 0.36, 0.44, net=ARM.to_base)
    asked = replace(ARM, control=control, shots=2, score="bytes")
    alone = replace(
        ARM, format="texts-no-question", role="baseline", accuracy=0.4, low=0.36, high=0.44
    )
    report = make_evaluation([BASE, asked, replace(ARM, score="pmi"), alone])
    checks = check_requirements(read_requirements(["new>=0.7", "new>=+0.3 net"], SETS), report)
    assert [(check.verdict, check.way) for check in checks] == [
        ("met", "texts by bytes, 2 shots"),
        ("met", "texts by pmi"),
        ("met", "texts by bytes, 2 shots"),
    ]


def test_numbers_of_passages_are_told_apart() -> None:
    others = [replace(REPORT.results[2], k=k) for k in (2, 6)]
    report = make_evaluation([BASE, *others])
    checks = check_requirements(read_requirements(["cpt+rag:new>=0.8"], SETS), report)
    assert [check.way for check in checks] == ["texts, K 2", "texts, K 6"]


@pytest.mark.parametrize(
    "text", ["old>=0.5", "new>0.5", "new>=50", "new>=1.5", "new", "new>=", ">=0.5", "a:b:new>=0.5"]
)
def test_what_is_no_requirement_is_named_with_the_sets(text: str) -> None:
    with pytest.raises(InputError, match=r"expected .ARM:.SET>=NUMBER with a SET of new, known"):
        read_requirements([text], SETS)


def test_a_net_gain_is_wanted_of_compared_choices_alone() -> None:
    control = Control("hybrid-no-question", (0.3,), 0.3, 0.26, 0.34, net=ARM.to_base)
    compared = replace(ARM, format="hybrid", control=control)
    written = replace(ARM, format="generate")
    requirements = read_requirements(["new>=+0.2 net"], SETS)
    checks = check_requirements(requirements, make_evaluation([BASE, written, compared]))
    assert [(check.format, check.verdict) for check in checks] == [("hybrid", "met")]
    with pytest.raises(InputError, match=r"net gain .* which needs a format that compares choices"):
        check_requirements(requirements, make_evaluation([BASE, written]))
    with pytest.raises(InputError, match="cpt was not asked without the question"):
        check_requirements(requirements, make_evaluation([BASE, replace(compared, control=None)]))


def test_a_requirement_that_cannot_be_about_an_arm_is_explained() -> None:
    for text, report, message in (
        ("new>=0.4", make_evaluation([BASE]), r"about each model but the base.* Arms: base\."),
        ("cpt+rag:new>=+0.4 net", REPORT, r"cpt\+rag has passages, and no control"),
    ):
        with pytest.raises(InputError, match=message):
            check_requirements(read_requirements([text], SETS), report)


def test_an_arm_without_scores_and_a_base_without_another_are_named() -> None:
    for text, message in (
        ("gone:new>=0.5", "no arm has scores"),
        ("base:new>=-0.1", "base is not compared"),
    ):
        with pytest.raises(InputError, match=message):
            check_requirements(read_requirements([text], SETS), REPORT)


def test_an_unchanged_model_passes_and_a_loss_of_five_points_does_not() -> None:
    """600 questions on 200 documents, 90% right; of an unchanged model's answers 1% differ at random."""
    draw = np.random.default_rng(7)
    ids, documents = tuple(map(str, range(600))), tuple(str(index // 3) for index in range(600))
    requirements = read_requirements(["new>=-0.02"], SETS)

    def fraction_met(lost: float, gained: float) -> float:
        met = 0
        for _ in range(200):
            base = draw.random(600) < 0.9
            right = np.where(base, draw.random(600) >= lost / 0.9, draw.random(600) < gained / 0.1)
            matrices = [
                CorrectnessMatrix(values[None].astype(float), ids, documents)
                for values in (right, base)
            ]
            arm = replace(ARM, to_base=make_contrast(*matrices, "base", scope="these models"))
            met += (
                check_requirements(requirements, make_evaluation([BASE, arm]))[0].verdict == "met"
            )
        return met / 200

    assert fraction_met(0.005, 0.005) >= 0.95
    assert fraction_met(0.07, 0.02) <= 0.2


def test_ci_reads_the_checks(tmp_path: Path) -> None:
    write_checks(
        check_requirements(
            read_requirements(["new>=0.78", "new>=0.82", "cpt:new>=0.9"], SETS), REPORT
        ),
        tmp_path,
    )
    suite = ElementTree.parse(tmp_path / "requirements.xml").getroot()  # noqa: S314 (our own file)
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert str(failure.get("message")).startswith("not met: cpt:new>=0.9 (cpt, texts: +0.833")
    assert [
        row["verdict"] for row in json.loads((tmp_path / "requirements.json").read_text())
    ].count("met") == 1


def test_a_name_with_control_characters_leaves_the_file_of_ci_readable(tmp_path: Path) -> None:
    check = Check("a\x0bb>=0.5", "c\x1bpt", "texts", "not met", 0.5, 0.1, 0.4, 50, 50)
    write_checks([check], tmp_path)
    (case,) = ElementTree.parse(tmp_path / "requirements.xml").getroot()  # noqa: S314
    assert case.attrib["classname"] == "c\ufffdpt"
