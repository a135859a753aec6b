"""A seeded sample of what `make soak` gives to every reader: damaged inputs end in success or in a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from judge import break_all, fault_of, table_of
from kinds import good_inputs, kinds

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name their inputs from the repository's root."""
    monkeypatch.chdir(ROOT)


def test_undamaged_inputs_are_read_so_that_a_refusal_means_the_damage(tmp_path: Path) -> None:
    for kind, data in good_inputs():
        path = tmp_path / kind.file
        path.write_bytes(data)
        assert fault_of(kind, path) == ("read", ""), (kind.name, data[:300])


@pytest.mark.filterwarnings("ignore")  # what libraries say of broken files is not the claim
def test_damaged_inputs_are_read_or_refused_with_their_place_and_the_cure(tmp_path: Path) -> None:
    pytest.importorskip("selectolax")
    counts, faults = break_all(kinds(), 500, 8, tmp_path)
    assert not faults, "\n\n".join(faults[:5])
    assert {outcome for _, outcome in counts} == {"read", "refused"}, table_of(counts)
    for kind, _ in kinds():
        assert counts[kind.name, "refused"], f"{kind.name}: nothing was broken enough"
