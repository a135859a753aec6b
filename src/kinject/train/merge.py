"""Averaging a tuned model with its base, weight by weight (WiSE-FT, arXiv 2109.01903): less learned, less forgotten."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kinject.disk import verified_hashes, write_manifest, write_sha256sums
from kinject.errors import InputError
from kinject.models import check_finite_in, check_model, not_finite_in, weight_files


def merge(base: str, tuned: str, alphas: Sequence[float], out: Path) -> dict[float, Path]:
    """Write ``(1 - alpha) * base + alpha * tuned`` for each of `alphas` (0 to 1) below `out`; return alpha -> folder.

    Both are folders with safetensors; `tuned` may be a peft adapter, which is folded into its base first. One shard is
    in memory at a time; the sum is made in float32 and kept in the tuned model's dtype. Raises `InputError` for a folder
    without weights, when the two do not hold the same tensors, or if a value of theirs or of the result is not finite.
    """
    invalid = [alpha for alpha in alphas if not 0 <= alpha <= 1]
    if invalid:
        raise InputError(f"--alpha: found {invalid[0]}, allowed: 0 (the base) to 1 (the tuned model).")
    done: dict[float, Path] = {}
    with TemporaryDirectory(prefix="kinject-merge-") as scratch:
        for folder in (Path(base), Path(tuned)):
            if not folder.is_dir():
                raise InputError(
                    f"{folder}: no *.safetensors: no such folder. Give folders that save_pretrained wrote."
                )
            check_model(folder)
            verified_hashes(folder)
        tuned_dir = _full_weights(Path(tuned), Path(scratch))
        _check_same_tensors(Path(base), tuned_dir)
        for folder in (Path(base), tuned_dir):
            check_finite_in(folder)
        for alpha in alphas:
            final = out / f"alpha-{alpha:g}"
            part = out / f".alpha-{alpha:g}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            _write(Path(base), tuned_dir, alpha, part)
            found = not_finite_in(part).rpartition(": ")[2]
            if found:
                shutil.rmtree(part)
                raise InputError(
                    f"{tuned}: {found} averaged with {base} at alpha {alpha:g} is out of its dtype's range. Save TUNED in the "
                    "dtype of BASE, or in float32."
                )
            counts = {"finished": True, "alpha": alpha}
            write_manifest(
                part / "merge.json", stage="merge", inputs={"base": base, "tuned": tuned}, recipe={}, counts=counts
            )
            write_sha256sums(part)
            if final.exists():
                shutil.rmtree(final)
            os.replace(part, final)
            done[alpha] = final
    return done


def _full_weights(tuned: Path, scratch: Path) -> Path:
    """Return the folder of full weights: `tuned` itself, or its adapter folded into the base that it names."""
    if not (tuned / "adapter_config.json").exists():
        return tuned
    from kinject.models import load_model

    loaded = load_model(str(tuned), dtype="float32", device="cpu")
    loaded.model.merge_and_unload().save_pretrained(str(scratch))
    loaded.tokenizer.save_pretrained(str(scratch))
    return scratch


@contextmanager
def _tensors(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield tensor name -> the open file that holds it."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for shard in weight_files(folder):
            file = stack.enter_context(safe_open(str(shard), framework="pt"))
            files.update(dict.fromkeys(file.keys(), file))
        yield files


def _check_same_tensors(base: Path, tuned: Path) -> None:
    with _tensors(base) as ours, _tensors(tuned) as theirs:
        different = sorted(ours.keys() ^ theirs.keys())
        if not different:
            different = [n for n in ours if ours[n].get_slice(n).get_shape() != theirs[n].get_slice(n).get_shape()]
    if different:
        raise InputError(
            f"{tuned}: {different[0]} differs from {base} in name or shape, so it was not trained from it. Give the base "
            "model of this run."
        )


def _write(base: Path, tuned: Path, alpha: float, part: Path) -> None:
    """Write every shard of `tuned` averaged, and the other files of a model folder."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    with _tensors(base) as ours:
        for path in sorted(tuned.iterdir()):
            if path.suffix == ".safetensors":
                averaged: dict[str, torch.Tensor] = {}
                with safe_open(str(path), framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                        theirs = file.get_tensor(name)
                        mixed = torch.lerp(ours[name].get_tensor(name).float(), theirs.float(), alpha)
                        averaged[name] = mixed.to(theirs.dtype).contiguous()
                save_file(averaged, part / path.name, metadata={"format": "pt"})
            elif path.suffix in (".json", ".jinja", ".model", ".txt") and path.name != "complete.json":
                shutil.copy(path, part / path.name)
