"""Checks of an answer, before it may enter the corpus.

`checker` runs the deterministic checks in order and gives the reason of a refusal. `facts` compares languages, numbers,
dates, units, quotations and names, with `quantities` and `names` reading them. `prompt_injection` finds text that speaks to
a language model. `judge` asks a model for a verdict, and is itself tried on `planted_errors` first.
"""
