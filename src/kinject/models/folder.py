"""The files of a model folder, checked before a library reads them: their kinds, config.json, the
weights' headers.

That reads a few kilobytes, needs no torch and allocates nothing of the model's size;
`kinject.models.load.check_model` checks the whole folder. `check_buffers` checks what a loaded
model has computed from config.json. Jinja's sandbox keeps a chat template from the machine, but not
from its memory and time: `check_cost` tries it once in a process that has little of both.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kinject.disk import (
    check_regular,
    file_hash,
    is_file,
    path_exists,
    read_json,
    read_manifest_beside,
    verified_hashes,
)
from kinject.errors import InputError
from kinject.gguf_files import gguf_file, model_folder
from kinject.models.hardware import own_part
from kinject.terminal import format_number

if TYPE_CHECKING:
    import torch

ADAPTER_CONFIG = "adapter_config.json"
CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
_WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OBJECTS = (
    CONFIG,
    GENERATION_CONFIG,
    ADAPTER_CONFIG,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files that hold one JSON object, read by every library that loads the folder."""
_OTHERS = (
    "adapter_model.safetensors",
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "tekken.json",
    "processor_config.json",
    "preprocessor_config.json",
)
_NAMED_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers keeps chat templates beside the default one, as for calls of
tools."""
_SUFFIXES = (".model", ".tiktoken")
"""Of tokenizers, under any name."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_NUMBERS = frozenset(
    ("temperature", "top_k", "top_p", "min_p", "typical_p", "num_beams", "repetition_penalty")
)
"""Of generation_config.json."""
_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_FIX = "It must be a folder that save_pretrained wrote; make the model again."
_LONGEST_CHAT = 2**24
"""Most characters that a template may write."""
_CHAT_MEMORY, _CHAT_SECONDS = 2**30, 2
_CHAT_REFUSED = 3
_RENDER = """
import json, re, resource, sys
source, longest, memory, seconds, refused = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
from jinja2.sandbox import ImmutableSandboxedEnvironment
def refuse(text):
    raise ValueError(text)
environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
)
environment.globals.update(raise_exception=refuse, strftime_now=lambda form: form)
turns = [dict(role=role, content="Hello.") for role in ("system", "user", "assistant", "user")]
values = dict(add_generation_prompt=True, bos_token="", eos_token="")
try:
    template = environment.from_string(re.sub(r"{%-?\\s*(end)?generation\\s*-?%}", "", source))
    for messages in (turns, turns[1:]):
        n = 0
        for part in template.generate(messages=messages, **values):
            n += len(part)
            if n > longest:
                sys.exit(refused)
except MemoryError:
    sys.exit(refused)
except Exception:
    pass
"""


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: its dtype as the format names it, and its shape."""

    dtype: str
    shape: list[int]


Header = dict[str, StoredTensor]
"""The tensors of a file or a folder by name."""


def check_files(folder: Path) -> None:
    """Raise `InputError` or `DiskError` if a file of a model or tokenizer in `folder` is no file,
    or no good JSON."""
    if not folder.is_dir():
        check_regular(folder)
        raise InputError(
            f"{folder}: a file, but a model is a folder. Give the folder that holds {CONFIG}."
        )
    for name in _named_files(folder):
        check_regular(folder / name)
        if name in _OBJECTS:
            value = read_object(folder / name)
            numbers = _NUMBERS & value.keys() if name == GENERATION_CONFIG else set[str]()
            for key in numbers:
                # A bool is an int to isinstance, and no number here.
                if value[key] is not None and type(value[key]) not in (int, float):
                    raise InputError(
                        f"{folder / name}: {key}: found {value[key]!r:.60}, a number is needed. "
                        f"{_FIX}"
                    )


FileState = tuple[str, int, int, int]
"""A file's name, inode, size and time of its last change: of its bytes, or of who may read it."""


def file_states(folder: Path) -> list[FileState]:
    """Return the state of every file in `folder`, by which a change of one is seen."""
    states = []
    for path in sorted(folder.iterdir()):
        try:
            state = path.stat()
        except OSError:  # a link to nothing, or to itself
            state = path.lstat()
        states.append((path.name, state.st_ino, state.st_size, state.st_ctime_ns))
    return states


def model_files(folder: Path) -> list[Path]:
    """Return the files that a model consists of: configuration, tokenizer, and the weights by their
    index, sorted."""
    names = set(_named_files(folder))
    if INDEX in names and _WEIGHTS not in names:
        names |= {path.name for path in weight_files(folder)}
    elif not names & {_WEIGHTS, "adapter_model.safetensors"}:
        names |= {path.name for path in folder.glob("*.safetensors")}
    templates = (folder / _NAMED_TEMPLATES).glob("*.jinja")
    names |= {f"{_NAMED_TEMPLATES}/{path.name}" for path in templates}
    return [folder / name for name in sorted(names)]


def copy_model_file(path: Path, folder: Path, out: Path) -> Path:
    """Copy one of the `model_files` of `folder` to its place in the folder `out`; return the
    copy."""
    copy = out / path.relative_to(folder)
    copy.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, copy)
    return copy


def model_hash(folder: Path) -> str:
    """Return the SHA-256 of the names and bytes of `model_files`, or of the GGUF file.

    Raises `InputError` if its SHA256SUMS disagrees.
    """
    file = gguf_file(folder)
    if file is not None:
        return file_hash(file)
    folder = model_folder(folder)
    known = verified_hashes(folder)
    digest = hashlib.sha256()
    for path in model_files(folder):
        name = path.relative_to(folder).as_posix()
        line = f"{name}\0{known.get(name) or file_hash(path)}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _named_files(folder: Path) -> Iterator[str]:
    with os.scandir(folder) as entries:
        names = (*_OBJECTS, *_OTHERS, _WEIGHTS, INDEX)
        yield from sorted(
            entry.name for entry in entries if entry.name in names or entry.name.endswith(_SUFFIXES)
        )


def check_config(folder: Path) -> None:
    """Raise `InputError` if a folder has no config.json."""
    if not (folder / CONFIG).exists():
        fix = run_fix(folder) or _FIX
        raise InputError(f"{folder}: no {CONFIG} in this folder, so it is no model. {fix}")


def run_fix(folder: Path) -> str:
    """Return what to give instead of the folder of a training run; "" for another folder."""
    model = folder / "model"
    if not any((model / name).exists() for name in (CONFIG, ADAPTER_CONFIG)):
        return ""
    return f"It is the folder of a run, whose model is {model}: give that."


def weight_files(folder: Path) -> list[Path]:
    """Return the files of the weights, as transformers chooses them: one file, else those that the
    index names.

    Raises `InputError` if there are none, or the index is damaged or names a file that is missing
    or elsewhere.
    """
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        raise InputError(
            f"{folder}: no *.safetensors in this folder ({_WEIGHTS}). {pickle_fix(folder) or _FIX}"
        )
    names = read_object(index).get("weight_map")
    if (
        not isinstance(names, dict)
        or not names
        or not all(isinstance(name, str) for name in names.values())
    ):
        raise InputError(
            f"{index}: weight_map: expected an object of tensors and the files that hold them. "
            f"{_FIX}"
        )
    for tensor, name in names.items():
        # transformers follows an index that names .bin files.
        if name.endswith(_PICKLES):
            raise InputError(
                f"{index}: some of its weights are pickles ({name[:80]}), which can run code as "
                f"they load. {_FIX}"
            )
        # A path would lead out of the folder, whose hashes then mean nothing.
        if name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise InputError(
                f"{index}: {tensor}: names {name!r:.80}, which is no safetensors file in this "
                f"folder. {_FIX}"
            )
        if not path_exists(folder / name):
            raise InputError(
                f"{index}: names {name}, which is missing. Copy the whole folder again."
            )
    return [folder / name for name in sorted(set(names.values()))]


def read_headers(folder: Path) -> Header:
    """Return the header of every tensor of the weights in `folder`.

    Raises `InputError` if a file is damaged, the index names a tensor that its file lacks,
    config.json declares more layers than there are tensors (all of them would be allocated), or
    dtypes and quantization do not fit.
    """
    headers: Header = {}
    for path in weight_files(folder):
        header = read_header(path)
        twice = headers.keys() & header.keys()
        if twice:
            raise InputError(
                f"{path}: {min(twice)} is in another file of the weights as well. {_FIX}"
            )
        headers |= header
    if (folder / INDEX).exists() and not (folder / _WEIGHTS).exists():
        lacking = read_object(folder / INDEX)["weight_map"].keys() - headers.keys()
        if lacking:
            raise InputError(
                f"{folder / INDEX}: names {min(lacking)}, which its file lacks. {_FIX}"
            )
    if (folder / CONFIG).exists():
        _check_against(folder / CONFIG, read_object(folder / CONFIG), headers)
    return headers


def read_header(path: Path) -> Header:
    """Return the header of each tensor in a safetensors file. Raises `InputError` if it is
    damaged."""
    from safetensors import SafetensorError, safe_open

    check_regular(path)
    try:
        # The library checks the header.
        with safe_open(path, framework="numpy"), open(path, "rb") as file:
            entries: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    except (SafetensorError, OSError, ValueError, MemoryError, RecursionError) as error:
        raise InputError(
            f"{path}: damaged, or no safetensors file ({first_line(error)}). {_FIX}"
        ) from error
    entries.pop("__metadata__", None)
    return {name: StoredTensor(entry["dtype"], entry["shape"]) for name, entry in entries.items()}


def _check_against(path: Path, config: Mapping[str, Any], header: Header) -> None:
    """Raise `InputError` if config.json at `path` contradicts the weights with `header`."""
    n_layers = config.get("num_hidden_layers")
    # A layer has one tensor at least.
    if isinstance(n_layers, int) and n_layers > len(header):
        raise InputError(
            f"{path}: num_hidden_layers: declares {format_number(n_layers)} layers, the files hold "
            f"{len(header)} weights. {_FIX}"
        )
    stored = {tensor.dtype for tensor in header.values()}
    if config.get("quantization_config") is not None:
        if stored <= _FLOATS:
            raise InputError(
                f"{path}: quantization_config: declares quantised weights, but the files hold "
                f"plain {', '.join(sorted(stored))}. "
                "Take the key out; model.quantization of a recipe quantises a plain model."
            )
        return
    for name, (dtype, *_) in header.items():
        if name.endswith(".weight") and dtype not in _FLOATS:
            raise InputError(
                f"{path.parent}: {name} is stored as {dtype}, but {path.name} has no "
                f"quantization_config. Expected {', '.join(sorted(_FLOATS))}. {_FIX}"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model folder. Raises `InputError` if it holds none."""
    return read_json(path, _FIX)


def base_of_adapter(adapter: Path) -> str:
    """Return the base model that an adapter_config.json names. Raises `InputError` when it names
    none."""
    try:
        base = read_object(adapter)["base_model_name_or_path"]
    except KeyError as error:
        raise InputError(
            f"{adapter}: names no base model ({first_line(error)}). Train the adapter again."
        ) from error
    if not isinstance(base, str) or not base or "\0" in base or _leads_back(base, adapter.parent):
        raise InputError(
            f"{adapter}: names {base!r:.80} as its base model. Train the adapter again."
        )
    return base


def revision_of_base(adapter: Path) -> str | None:
    """Return the revision on the hub of the base that an adapter_config.json names, None for the
    newest."""
    revision = read_object(adapter).get("revision")
    return revision if isinstance(revision, str) else None


def check_trained_base(adapter: Path) -> None:
    """Raise `InputError` if `adapter` is the folder of one, and its base is not the model on which
    a training of kinject made it.

    That may be the model of another training that was done again since, and an adapter on other
    weights is a model that nobody trained. Of an adapter of elsewhere nothing is known.
    """
    if not is_file(adapter / ADAPTER_CONFIG):
        return
    manifest = read_manifest_beside(adapter)
    if manifest is None or manifest["stage"] != "train":
        return
    base = base_of_adapter(adapter / ADAPTER_CONFIG)
    trained_on = str(manifest["inputs"].get("model", ""))
    # A name on the hub has its revision.
    if trained_on.startswith("hub:") or not model_folder(base).exists():
        return
    if trained_on and trained_on != model_hash(model_folder(base)):
        raise InputError(
            f"{base}: has changed since {adapter} was trained on it, and on other weights the "
            "adapter is another model. Put that base back, or train the adapter again. If other "
            "files than weights have changed, use a copy of the adapter outside of its run."
        )


def hash_with_base(folder: Path) -> str:
    """Return `model_hash`; of an adapter, which is no model by itself, a hash of it and its base.

    Raises `InputError` as `check_trained_base` does.
    """
    digest = model_hash(folder)
    config = folder / ADAPTER_CONFIG
    if not is_file(config):
        return digest
    check_trained_base(folder)
    base = model_folder(base_of_adapter(config))
    if not base.exists():  # a name on the hub, whose revision is in the adapter's files
        return digest
    return hashlib.sha256(f"{digest}{hash_with_base(base)}".encode()).hexdigest()


def _leads_back(base: str, folder: Path) -> bool:
    """Return whether the base of the adapter in `folder` is that adapter again, itself or by way
    of others: it would be followed for ever."""
    seen = {os.path.realpath(folder)}
    while True:
        place = os.path.realpath(base)
        if place in seen:
            return True
        seen.add(place)
        config = Path(base) / ADAPTER_CONFIG
        if not is_file(config):
            return False
        base = str(read_object(config).get("base_model_name_or_path")).replace("\0", "")


def pickle_fix(folder: Path) -> str:
    """Return the fix for pickled weights in `folder`, or "" if there are none."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if not pickles:
        return ""
    return (
        f"It has {pickles[0]}, a pickle, which can run code as it loads: kinject reads safetensors "
        "only. Ask its author "
        "for safetensors, or convert it on a machine where nothing is at stake."
    )


def first_line(error: BaseException) -> str:
    """Return an error's message in one line without its full stop, its class if the message is
    empty."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200].rstrip(".")


def check_buffers(model: torch.nn.Module, location: str, source: str) -> None:
    """Raise `InputError` if a tensor that is computed from the config holds a NaN or +inf (a mask
    may hold -inf).

    Torch's attention on the CPU hides that in rows of less than 16 tokens: it writes 0 where all
    scores are NaN.
    """
    for name, buffer in model.named_buffers():
        if (
            buffer.is_floating_point()
            and not buffer.is_meta
            and not bool((buffer.float() < math.inf).all())
        ):
            raise InputError(
                f"{location}: {name}, which is computed from {source}, is not finite. Check the "
                "numbers there (rope_theta, rope_parameters, scaling factors)."
            )


def not_finite(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return the name of the first floating-point tensor that holds a NaN or an infinity, "" if all
    are finite.

    A tensor is read once: its sum is not finite if a value is not. Of a sharded tensor this
    process's part is checked.
    """
    import torch

    for name, tensor in tensors:
        values = own_part(tensor)
        if not values.is_floating_point() or values.is_meta or not values.numel():
            continue
        if values.element_size() == 1:
            values = values.to(torch.float16)  # float8 cannot be summed
        if bool(values.sum().isfinite()):
            continue
        # Finite values may overflow in a sum.
        if not all(bool(value.isfinite()) for value in torch.aminmax(values)):
            return name
    return ""


def not_finite_in(folder: Path) -> str:
    """Return ``FILE: TENSOR`` of the first tensor in a folder's safetensors that is not finite; ""
    if all are finite.

    Raises `InputError` if a file cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()  # the file itself is no mapping
                name = not_finite((key, file.get_tensor(key)) for key in names)
        except (SafetensorError, OSError) as error:
            raise InputError(
                f"{path}: cannot be read ({first_line(error)}). Make the model again."
            ) from error
        if name:
            return f"{path}: {name}"
    return ""


def check_finite_in(folder: Path) -> None:
    """Raise `InputError` with the file and the tensor if the safetensors of a model folder are not
    all finite."""
    fault = not_finite_in(folder)
    if fault:
        raise InputError(
            f"{fault} holds a value that is not finite (NaN or an infinity), so no output of this "
            "model is a number. Make the model again, or take another copy."
        )


def saved_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and the saved buffers of `model` with their names, tied ones once."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def check_cost(source: str) -> None:
    """Raise `InputError` if the Jinja template `source` needs too much time or memory, or writes
    too much, for a short chat.

    What else is wrong with it shows where it is rendered.
    """
    if not _ends_well(source):
        raise InputError(
            f"template: takes more than {_CHAT_SECONDS} s, {_CHAT_MEMORY >> 20:,} MiB or "
            f"{_LONGEST_CHAT:,} characters for a short chat. Shorten it. Source: {source[:120]!r}"
        )


@lru_cache(maxsize=64)
def _ends_well(source: str) -> bool:
    """Return whether rendering `source` stays within the limits."""
    job = json.dumps([source, _LONGEST_CHAT, _CHAT_MEMORY, _CHAT_SECONDS, _CHAT_REFUSED])
    try:
        done = subprocess.run(
            # -I: neither the folder that it starts in nor the environment adds modules.
            [sys.executable, "-I", "-c", _RENDER],
            input=job,
            text=True,
            capture_output=True,
            # The kernel limits processor time alone, and a process may wait: for a core, too. On a
            # machine with ten programs a core, Python took 9 s to start for a template of 10 ms.
            timeout=150 * _CHAT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    # Below 0: the kernel ended it, at the limit of its processor time.
    return done.returncode != _CHAT_REFUSED and done.returncode >= 0
