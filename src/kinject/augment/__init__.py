"""Documents to passages to rewritings to a corpus: `augment` asks a generator, checks each answer, and stores it."""

import sys

from kinject import VerbPackage
from kinject.augment.preview import Preview, preview, render_preview
from kinject.augment.run import augment
from kinject.augment.tally import AugmentResult, StyleCount, render_summary

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
