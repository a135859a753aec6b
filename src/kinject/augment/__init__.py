"""Documents to passages to variants to a corpus: a generator rewrites each passage, the checks accept or refuse it."""

from kinject.augment.corpus_writer import StyleCount
from kinject.augment.preview import Preview, preview, render_preview
from kinject.augment.run import augment
from kinject.augment.summary import AugmentResult, render_summary

__all__ = [
    "AugmentResult", "Preview", "StyleCount", "augment", "preview", "render_preview", "render_summary",
]  # fmt: skip
