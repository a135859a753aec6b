"""The recipe's `adapter:` section against peft's LoraConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kinject.recipe.check import Checker, suggestion

MERGE = "merge"
"""The one key of kinject's own: fold the adapter into its base when training ends."""


def check_adapter(adapter: Mapping[str, Any], checker: Checker) -> None:
    """Report every key that LoraConfig does not have. peft judges the values when the adapter is built.

    Imports peft (some seconds), so it runs only where a recipe has an adapter and trains.
    """
    from peft import LoraConfig

    known = {field.name for field in fields(LoraConfig) if field.init} | {MERGE}
    for key in adapter:
        if key not in known:
            checker.report(("adapter", key), f"unknown key of peft's LoraConfig.{suggestion(key, known)}")
