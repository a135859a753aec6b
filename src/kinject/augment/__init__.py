"""Documents to passages to variants to a corpus: a generator rewrites each passage, the checks
accept or refuse it."""

from kinject.augment.corpus_counts import StyleCount
from kinject.augment.run import AugmentResult, augment, render_summary

__all__ = ["AugmentResult", "StyleCount", "augment", "render_summary"]
