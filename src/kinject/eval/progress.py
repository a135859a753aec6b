"""How far one model on one question set is: kinject's progress, and one line on stderr when it is done."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kinject.terminal import Progress, show


@contextmanager
def show_progress(what: str, n_total: int, n_stored: int) -> Iterator[Progress]:
    """Yield a counter for `n_total` prompts, `n_stored` of which need no model; say the rate when the block ends."""
    start = time.monotonic()
    with Progress(what, n_total - n_stored, "questions") as progress:
        yield progress
    seconds = time.monotonic() - start
    stored = f", {n_stored} found in answers.jsonl" if n_stored else ""
    rate = f", {progress.done / seconds:.1f} a second" if progress.done and seconds else ""
    show(f"{what}: {n_total} prompts{stored}, {progress.done} scored in {seconds:.1f} s{rate}", file=sys.stderr)
