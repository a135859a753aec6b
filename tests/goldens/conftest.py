"""Makes the modules beside this file importable (pytest's importlib mode leaves sys.path alone), and those of a study's tests."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "report")]
