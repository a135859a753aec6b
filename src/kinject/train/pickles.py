"""Pickles in a checkpoint, which transformers and torch write: read as numbers only, or refused before anything in them runs."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kinject.errors import TrainingError

_METADATA = frozenset({
    ("collections", "OrderedDict"), ("builtins", "set"), ("torch", "Size"), ("torch", "device"),
    ("torch.serialization", "_get_layout"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
})  # fmt: skip
_METADATA_CLASSES = "torch.distributed.checkpoint.metadata"


class _Metadata(pickle.Unpickler):
    """Reads what torch's distributed checkpoints say of their tensors, and no name outside of that."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the metadata. Raises `pickle.UnpicklingError` for everything else."""
        import torch

        of_torch = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        plain = "." not in name and not name.startswith("__")
        if (module, name) in _METADATA or of_torch or (module == _METADATA_CLASSES and plain):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


@contextlib.contextmanager
def numbers_only(checkpoint: Path | None) -> Iterator[None]:
    """Go on from `checkpoint` inside the block: a file in it that holds more than numbers is refused, and nothing of it runs.

    transformers reads optimizer, scheduler, scaler and random states with ``weights_only``, which refuses by itself;
    what torch reads without (the ``.metadata`` of a sharded checkpoint) is looked through first. DeepSpeed reads its own
    files as it will. Raises `TrainingError`.
    """
    if checkpoint is None:
        yield
        return
    for path in sorted(checkpoint.rglob(".metadata")):
        try:
            with path.open("rb") as file:
                _Metadata(file).load()
        except Exception as error:  # a damaged pickle raises anything
            raise _refused(checkpoint, path.name, error) from error
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _refused(checkpoint, "its optimizer's, scheduler's or random state", error) from error


def _refused(checkpoint: Path, what: str, error: Exception) -> TrainingError:
    said = next((line.strip() for line in str(error).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
    said = said or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return TrainingError(
        f"{checkpoint}: {what} holds more than numbers, or is damaged ({said[:200]}). Loading it could run code, so it "
        f"is not loaded. Delete {checkpoint.name} and go on with --resume from an older one, or start over with --overwrite."
    )
