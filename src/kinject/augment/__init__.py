"""Documents to passages to rewritings to a corpus: `augment` asks a generator, checks each answer, and stores it."""

import sys

from kinject import VerbPackage
from kinject.augment.corpus_writer import AugmentResult, StyleCount, render_summary
from kinject.augment.preview import Preview, preview, render_preview
from kinject.augment.run import augment

__all__ = [
    "AugmentResult",
    "Preview",
    "StyleCount",
    "augment",
    "preview",
    "render_preview",
    "render_summary",
]

sys.modules[__name__].__class__ = VerbPackage
