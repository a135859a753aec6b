"""The recipe's `bench:` section: strategies of the user's own beside those that `kinject bench` brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kinject.recipe.sections import option


@dataclass(frozen=True)
class BenchSection:
    """What `kinject bench` measures beside, or instead of, its own list."""

    strategies: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict,
        metadata={
            "help": "Name -> what it changes, as section.key: value on top of vanilla (adapter: the whole section)."
        },
    )
    built_in: bool = option(True, help="Measure bench's own strategies, too; vanilla is always measured.")
