"""`kinject bench`: training strategies measured side by side."""

import sys

from kinject import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
