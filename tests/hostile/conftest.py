"""Makes the modules beside it, and the faulty endpoint, importable: pytest's importlib mode leaves sys.path alone."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "augment")]
