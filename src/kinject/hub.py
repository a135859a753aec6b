"""Names on the Hugging Face hub: reached, found in the local cache, or refused within two seconds.

The libraries try an unreachable hub six times for each file, most of a minute in all. So kinject
tries a connection first. `HF_HUB_ETAG_TIMEOUT` (seconds) gives a slow one more time; once
connected, the libraries' own limits hold.
"""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from kinject.errors import InputError
from kinject.gguf import converted_folder
from kinject.gguf_files import PACKAGE, gguf_file, model_folder, package_command

_SECONDS = 1.5
OFFLINE = "the hub is switched off (HF_HUB_OFFLINE)"
_CACHED = (
    "config.json",
    "adapter_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "modules.json",
)
"""A model or tokenizer has one of these."""


def is_hub_name(name: str) -> bool:
    """Return whether something on the hub can have this name (OWNER/NAME, or NAME)."""
    from huggingface_hub.utils._validators import validate_repo_id

    try:
        validate_repo_id(name)
    except ValueError:
        return False
    return True


def find_source(name: str, kind: str, revision: str | None = None) -> str:
    """Return `name` if it is a path that exists or the hub can be reached, else its folder in the
    local cache.

    A GGUF file, or a folder with one, is converted first: the result is the folder of the
    conversion.

    Raises `InputError` if `kind` (model, tokenizer) is in none of the three.
    """
    folder = name
    if name.startswith(PACKAGE):
        folder = str(model_folder(name))
        if folder == name:
            raise InputError(f"{name}: no such package. Install it: {package_command(name)}")
    if folder and os.path.exists(folder):
        file = gguf_file(folder)
        return folder if file is None else str(converted_folder(file))
    if not is_hub_name(name):
        raise InputError(
            f"{name[:300]!r}: no such folder, and no name of a {kind} on the hub (OWNER/NAME). "
            "Check the path."
        )
    reason = unreachable_reason()
    if not reason:
        return name
    cached = _cached_folder(name, revision)
    if cached is None:
        raise InputError(
            f"{name}: no {kind} of this name: no such folder, not in the local cache of the hub, "
            f"and {reason}. Check the "
            f"name, give a folder, or download it where there is a network: hf download {name}"
        )
    return cached


def local_folder(name: str, revision: str | None = None) -> Path:
    """Return the folder of a model, downloaded if `name` is on the hub and not here. Raises
    `InputError` as `find_source`."""
    from huggingface_hub import snapshot_download

    source = find_source(name, "model", revision)
    if os.path.isdir(source):
        return Path(source)
    # No pickles: kinject reads safetensors alone.
    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


def upload_fault() -> str:
    """Return why nothing can be uploaded, and the fix, without a connection to the hub; "" if
    nothing is known against it."""
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        return f"{OFFLINE}. Unset that variable"
    if get_token() is None:
        return "there is no token. Set the environment variable HF_TOKEN, or run hf auth login"
    return ""


def unreachable_reason() -> str:
    """Return why the hub, or the proxy before it, accepts no connection; "" if it does."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    endpoint = urlsplit(constants.ENDPOINT)
    proxy = _proxy_for(endpoint)
    seconds = _SECONDS
    if os.environ.get("HF_HUB_ETAG_TIMEOUT"):
        seconds = float(constants.HF_HUB_ETAG_TIMEOUT)
    fault = _connection_fault(proxy or endpoint, seconds)
    if not fault:
        return ""
    via = "" if proxy is None else f" through the proxy {proxy.hostname}"
    return f"the hub ({endpoint.hostname or ''}) cannot be reached{via} ({fault})"


def _proxy_for(endpoint: SplitResult) -> SplitResult | None:
    """Return the proxy that the environment sets for `endpoint`, None if it sets none."""
    if proxy_bypass(endpoint.hostname or ""):
        return None
    proxies = getproxies()
    address = proxies.get(endpoint.scheme) or proxies.get("all")
    if not address:
        return None
    # Proxies are often set without a scheme, as HOST:PORT.
    return urlsplit(address if "//" in address else f"//{address}")


def _connection_fault(target: SplitResult, seconds: float) -> str:
    """Return why no connection to `target` can be made within so many seconds, "" if it can."""
    faults = ["no answer"]

    def connect() -> None:
        try:
            port = target.port or (80 if target.scheme == "http" else 443)
            socket.create_connection((target.hostname or "", port), timeout=seconds).close()
            faults.clear()
        except (OSError, ValueError, OverflowError) as error:
            faults[:] = [getattr(error, "strerror", None) or str(error) or "no answer"]

    # In a thread, since looking up a name has no limit of its own.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return faults[0] if faults else ""


def _cached_folder(name: str, revision: str | None) -> str | None:
    from huggingface_hub import try_to_load_from_cache

    cached = (try_to_load_from_cache(name, file, revision=revision) for file in _CACHED)
    # A path where the file is cached, else None or a mark of its absence.
    return next((str(Path(path).parent) for path in cached if isinstance(path, str)), None)
