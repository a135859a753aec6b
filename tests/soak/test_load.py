"""Memory grows no faster than what is read: what a thing more costs from 10x to 100x is not above what it cost before.

Sizes are a tenth of those of benchmarks/load.py, whose table docs/reliability.md prints. Times are not asserted.
"""

from __future__ import annotations

import pytest

from small import load_benchmark

pytestmark = pytest.mark.soak


@pytest.mark.parametrize(
    ("load", "sizes", "most_bytes"),
    [
        ("augment", (1_000, 10_000, 100_000), 1_000),
        ("file", (1_000, 10_000, 100_000), 600),
        ("packing", (10_000, 100_000, 1_000_000), 500),
        ("eval", (500, 5_000, 50_000), 16_000),
        ("inference", (500, 5_000, 50_000), 16_000),
        ("report", (3, 15, 75), 4 << 20),
    ],
)
def test_a_thing_more_costs_no_more_memory_than_the_one_before(
    load: str, sizes: tuple[int, ...], most_bytes: int
) -> None:
    measures = [load_benchmark("load.py").measure_apart(load, n) for n in sizes]
    growth = (measures[2].peak - measures[1].peak) * (1 << 20)
    assert growth / (sizes[2] - sizes[1]) <= most_bytes, measures
    # a quadratic part would make it a hundred times as much from 10x to 100x as from 1x to 10x, a linear one ten times
    before = max(
        (measures[1].peak - measures[0].peak) * (1 << 20), 16 << 20
    )  # 16 MiB: what caches and pages make of nothing
    assert growth <= 2 * (sizes[2] - sizes[1]) / (sizes[1] - sizes[0]) * before, measures
