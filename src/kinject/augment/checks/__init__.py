"""Checks of an answer, before it may enter the corpus.

`checker` runs the deterministic checks in order and gives the reason of a refusal. `additions` finds the numbers, dates, units,
quotations and names that a text adds, with `names` reading the latter, and `coverage` the facts that it carries. `judge` asks a
model for a verdict, and is itself tried on `planted_errors` first.
"""
