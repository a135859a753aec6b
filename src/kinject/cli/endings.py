"""How a command ends when it is told to: Ctrl-C (SIGINT) and what a batch system sends before it kills (SIGTERM)."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence

from kinject.errors import Terminated
from kinject.process import is_launched


def exit_code(stop: KeyboardInterrupt) -> int:
    """Return the code that a shell gives for the signal behind `stop`: 128 and its number."""
    return 128 + (signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)


def render_how_to_go_on(verb: str, words: Sequence[str], stop: KeyboardInterrupt) -> str:
    """Return what to tell a user whose command, `words` behind ``kinject``, was stopped."""
    ended = "terminated" if isinstance(stop, Terminated) else "interrupted"
    again = list(words)
    if verb == "train":
        again = [*(word for word in again if word not in ("--overwrite", "--resume")), "--resume"]
    launched = " (under the same launcher)" if is_launched() else ""
    return f"{ended}. What was stored is kept; go on with{launched}: {shlex.join(['kinject', *again])}"
