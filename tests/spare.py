"""What the libraries do anew in each training and change nothing by: in tests they do it once, or not at all.

A training of the tests takes a second, of which this was up to a quarter (profiles of tests/train/test_loss.py). Processes
that a test starts (the fixture `forked`) do all of it, as for a user.
"""

from __future__ import annotations

import functools
import os

ONE_THREAD = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable that lets transformers read weights without threads: 5 for each load of a model of two layers, 8%."""


def spare_libraries() -> None:
    """Change the libraries of this process so."""
    import torch
    from accelerate.utils import imports
    from datasets import arrow_dataset
    from datasets.fingerprint import generate_random_fingerprint
    from transformers import GenerationConfig

    os.environ[ONE_THREAD] = "1"
    # Is peft installed? Asked of each model, and read from the package's metadata each time: 5%.
    imports._is_package_available = functools.cache(imports._is_package_available)
    # Texts for lines of the log, made whether the lines are written or not: 6% with those of a model's config,
    # which stay: by them a plan knows one config from another (kinject.plan.estimate.read_shapes).
    GenerationConfig.__repr__ = object.__repr__
    # A hash of all rows, by which `map` would find its own results again: 4%.
    arrow_dataset.generate_fingerprint = lambda dataset: generate_random_fingerprint()
    # Each seed is kept for a device that may be there later, with the lines of code that set it: 3%.
    for name in ("cuda", "xpu", "mtia"):
        device = getattr(torch, name)
        if not device.is_available():
            device._lazy_call = _forget


def _forget(call: object, **_: object) -> None:
    """Take the place of `_lazy_call`, which keeps `call` until its device is first used."""
