"""`kinject doctor`: what this machine has, what each recipe would do on it, and a cure for each complaint."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from urllib.parse import urlsplit

from kinject.doctor.findings import Complaint, Finding
from kinject.doctor.recipes import RecipeFinding, look_at

_OPTIONAL = {
    "flash_attn": ("flash-attn", "faster attention on NVIDIA GPUs; torch's own does as well"),
    "bitsandbytes": ("bitsandbytes", "8-bit optimizers, 4-bit and 8-bit weights"),
    "sentence_transformers": ("sentence-transformers", "dense retrieval"),
    "faiss": ("faiss", "dense retrieval"),
    "ray": ("ray", "studies on a cluster"),
    "pypdf": ("pypdf", "PDF documents"),
    "selectolax": ("selectolax", "HTML documents"),
    "deepspeed": ("deepspeed", "ZeRO"),
}
"""Module -> (name, what it is for)."""
_LEAST_DISK = 5 * 2**30
_SECONDS = 3.0
"""Longest wait for an answer from the network."""


@dataclass(frozen=True)
class Checkup:
    """What was found: about the machine, and about each recipe."""

    machine: tuple[Finding, ...]
    recipes: tuple[RecipeFinding, ...]

    @property
    def complaints(self) -> list[Complaint]:
        """Every complaint, the machine's first."""
        machine = [item for held in self.machine for item in held.complaints]
        return [*machine, *(item for held in self.recipes for item in held.complaints)]


def examine(recipes: Sequence[Path], *, offline: bool) -> Checkup:
    """Look at this machine and at the recipe files. With `offline`, nothing is asked over the network.

    Keys are looked for in the environment and only their presence is told.
    """
    hub, reachable = _hub(offline)
    found = tuple(look_at(recipes, hub_reachable=reachable, offline=offline, answers=answers))
    keys = {"HF_TOKEN", "OPENAI_API_KEY", *(key for item in found for key in item.keys)}
    machine = [*_system(), *_devices(), *_packages(), *_optional(), hub, _keys(sorted(keys))]
    return Checkup(tuple(machine), found)


def answers(url: str) -> bool:
    """Return whether something listens at the host and port of `url`; waits for a few seconds at most, sends nothing."""
    try:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        if not parts.hostname:  # "" would be this machine
            return False
        with socket.create_connection((parts.hostname, port), timeout=_SECONDS):
            return True
    except (OSError, ValueError):  # nobody there, or no address that can be
        return False


def _system() -> Iterator[Finding]:
    from kinject.process import machine_memory

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "system", f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {cores} cores"
    )
    yield Finding("memory", f"{machine_memory() / 2**30:.1f} GiB")
    free = shutil.disk_usage(".").free
    small = Complaint(
        "disk",
        f"{free / 2**30:.1f} GiB free in this folder",
        "Free some: a checkpoint of a 7B model takes tens of GiB.",
    )
    yield Finding("disk", f"{free / 2**30:.1f} GiB free in this folder", (small,) if free < _LEAST_DISK else ())


def _devices() -> Iterator[Finding]:
    import torch

    from kinject.models import choose_device, has_fast_bf16, varlen_unavailable_reason

    for number in range(torch.cuda.device_count()):
        held = torch.cuda.get_device_properties(number)
        yield Finding(f"GPU {number}", f"{held.name}, {held.total_memory / 2**30:.0f} GiB")
    device = choose_device("auto")
    words = {"cuda": "NVIDIA GPU", "mps": "Apple GPU", "cpu": "CPU (no GPU found)"}
    yield Finding(
        "device", f"{words[device]}; bfloat16 multiplied in hardware: {'yes' if has_fast_bf16(device) else 'no'}"
    )
    missing = varlen_unavailable_reason(device)
    yield Finding("attention", f"torch's variable-length attention: {missing or 'yes'}")
    if device == "cpu" and shutil.which("nvidia-smi"):
        cure = "Install a torch that is built for CUDA (pip install torch, without the CPU index)."
        complaint = Complaint("torch", f"an NVIDIA driver is here, but torch {torch.__version__} sees no GPU", cure)
        yield Finding("torch", "sees no GPU", (complaint,))


def _packages() -> Iterator[Finding]:
    """Yield the versions of what kinject requires, with a complaint for each that is outside its range."""
    from packaging.requirements import Requirement

    complaints = []
    shown = []
    for line in requires("kinject") or ():
        needed = Requirement(line)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        try:
            have = version(needed.name)
        except PackageNotFoundError:
            complaints.append(Complaint(needed.name, "is not installed", f"pip install '{needed}'"))
            continue
        if not needed.specifier.contains(have, prereleases=True):
            complaints.append(
                Complaint(
                    needed.name, f"{have} is installed, kinject needs {needed.specifier}", f"pip install '{needed}'"
                )
            )
        if needed.name in ("torch", "transformers", "trl", "peft", "accelerate", "datasets"):
            shown.append(f"{needed.name} {have}")
    yield Finding("packages", ", ".join(shown), tuple(complaints))
    constraints = Path("constraints.txt")
    if constraints.is_file():
        others = list(_other_versions(constraints.read_text("utf-8").splitlines()))
        said = f"{len(others)} differ: {', '.join(others[:4])}" if others else "all as pinned"
        yield Finding("constraints", f"{said} (constraints.txt; its versions are those that the tests ran with)")


def _other_versions(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        name, pinned, asked = line.strip().partition("==")
        if not pinned or name.startswith("#"):
            continue
        try:
            have = version(name)
        except PackageNotFoundError:
            continue
        if have.partition("+")[0] != asked:
            yield f"{name} {have} (pinned {asked})"


def _optional() -> Iterator[Finding]:
    for module, (name, use) in _OPTIONAL.items():
        there = importlib.util.find_spec(module) is not None
        yield Finding(name, f"{'installed' if there else 'not installed'} ({use})")


def _hub(offline: bool) -> tuple[Finding, bool]:
    """Return what to say of the hub, and whether models may come from it."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Finding("hub", "switched off (HF_HUB_OFFLINE): models come from folders and the cache"), False
    if offline:
        return Finding("hub", "not asked (--offline)"), False
    shown = constants.ENDPOINT.rpartition("@")[2] if "@" in constants.ENDPOINT else constants.ENDPOINT  # no password
    if answers(constants.ENDPOINT):
        return Finding("hub", f"{shown} answers"), True
    return Finding("hub", f"{shown} does not answer: models come from folders and the cache"), False


def _keys(names: Sequence[str]) -> Finding:
    told = ", ".join(f"{name} {'set' if os.environ.get(name) else 'not set'}" for name in names)
    return Finding("keys", told)


def render(checkup: Checkup) -> str:
    """Return the findings as lines for a terminal, complaints with their cures last."""
    width = max(len(item.name) for item in checkup.machine) + 2
    lines = [f"{item.name:<{width}}{item.value}" for item in checkup.machine]
    if checkup.recipes:
        longest = max(len(item.name) for item in checkup.recipes) + 2
        lines.append("")
        for item in checkup.recipes:
            mark = "ok" if not item.complaints else f"{len(item.complaints)} to mend"
            lines.append(f"{item.name:<{longest}}{mark:<11}{item.value}")
    if not checkup.complaints:
        return "\n".join([*lines, "", "Nothing to complain of."])
    lines += ["", f"{len(checkup.complaints)} complaints:"]
    by_cure: dict[str, list[Complaint]] = {}
    for complaint in checkup.complaints:
        by_cure.setdefault(complaint.cure, []).append(complaint)
    for cure, held in by_cure.items():
        lines.append(f"- {_some(held, 'what', '; ')}")
        lines.append(f"  where: {_some(held, 'where', ', ')}")
        lines.append(f"  cure:  {cure}")
    return "\n".join(lines)


def _some(complaints: Sequence[Complaint], field: str, between: str) -> str:
    """Return the first few different values of a field, and how many more there are."""
    values = list(dict.fromkeys(getattr(item, field) for item in complaints))
    more = f" and {len(values) - 3} more" if len(values) > 3 else ""
    return between.join(values[:3]) + more
