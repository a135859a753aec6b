"""Models in GGUF, llama.cpp's file format: dequantised once into a folder that transformers reads like any other.

The folder lies in the user's cache under the hash of the file, so the same file is converted once on a machine. Weights
are stored in float32, which loses nothing; the dtype of a run is chosen when the folder is loaded.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kinject.disk import file_hash, unwritable
from kinject.errors import InputError

_SUFFIX = ".gguf"
_LEFT_OUT = ("quantization_config", "_name_or_path", "transformers_version")
"""Of the config that transformers makes: with the first, a model refuses to be saved."""


def gguf_file(path: str | Path) -> Path | None:
    """Return the GGUF file that `path` is, or the one in a folder without a config.json; None for any other path.

    Raises `InputError` if the folder holds several.
    """
    place = Path(path)
    if place.suffix == _SUFFIX and place.is_file():
        return place
    if not place.is_dir() or (place / "config.json").exists():
        return None
    files = sorted(place.glob(f"*{_SUFFIX}"))
    if len(files) > 1:
        raise InputError(f"{place}: holds {len(files)} GGUF files. Give the path of one, such as {files[0]}.")
    return files[0] if files else None


def converted_folder(file: Path) -> Path:
    """Return the folder with the dequantised model and tokenizer of a GGUF file; convert it if it is not in the cache.

    Raises `InputError` if the package gguf is missing or transformers cannot convert the file, `DiskError` if the folder
    cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kinject" / "gguf"
    folder = root / f"{file.stem}-{file_hash(file)[:16]}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
        try:
            _convert(file, part)
            part.chmod(0o755)
            if not folder.is_dir():  # another process may have been faster
                part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise unwritable(root, error) from error
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write the model, tokenizer and generation settings of a GGUF file to `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder_of_file = str(file.parent)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder_of_file, gguf_file=file.name, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            folder_of_file, gguf_file=file.name, dtype=torch.float32, trust_remote_code=False
        )
    except ImportError as error:
        raise InputError(f"{file}: needs the package gguf. Install it: pip install 'kinject[gguf]'.") from error
    except Exception as error:  # a damaged file, or an architecture that it cannot convert, raises any exception
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        raise InputError(
            f"{file}: transformers cannot convert this GGUF file ({reason}). Take the model's safetensors instead."
        ) from error
    config = type(model.config).from_dict({k: v for k, v in model.config.to_dict().items() if k not in _LEFT_OUT})
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    _complete_special_tokens(file, tokenizer, plain.generation_config)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _complete_special_tokens(file: Path, tokenizer: Any, generation_config: Any) -> None:
    """Take over what transformers leaves in the file: whether a text begins with BOS, and the end of a chat turn."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    adds_bos = fields.get("tokenizer.ggml.add_bos_token")
    if adds_bos is not None and adds_bos.contents() and tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id:
        tokenizer.add_bos_token = True
    turn_end = fields.get("tokenizer.ggml.eot_token_id")
    if turn_end is not None:
        ends = [tokenizer.eos_token_id, int(turn_end.contents())]
        generation_config.eos_token_id = list(dict.fromkeys(ends))
