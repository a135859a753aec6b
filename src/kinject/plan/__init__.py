"""`kinject plan`: the memory and time that a training run will need."""

import sys

from kinject import VerbPackage

sys.modules[__name__].__class__ = VerbPackage
