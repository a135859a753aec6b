"""Make a folder of the wheels that a Python with torch lacks for kinject's training and scoring on a machine without network.

    python benchmarks/gpu/packages.py DIR [--python 3.12] [--have pip-list.txt] [--cuda 130] [--with lm_eval ...]

Downloads the wheels of constraints.txt for that Python on Linux (x86-64), less torch with what it brings, and less what --have
lists in a version that suffices (`pip list --format=freeze` on that machine). Takes out of the wheels what is not
needed there, packs each more tightly (NAME-VERSION-....tar.xz), and prints the sizes. benchmarks/gpu/run.py --packages DIR
unpacks them.
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOTS = (
    "transformers",
    "trl",
    "peft",
    "datasets",
    "accelerate",
    "bitsandbytes",
    "pydantic",
    "pycld2",
    "pyyaml",
    "rich",
    "scipy",
    "jinja2",
    "msgpack",
    "pandas",
    "bm25s",
    "babel",
    "wordfreq",
    "gguf",
)
"""What kinject's training and scoring import, its checks of paraphrases and its reader of the real model, less what these
need."""
LEFT_OUT = re.compile(
    r"torch|triton|nvidia-.*|cuda-.*|sympy|mpmath|networkx|setuptools|hf-xet|ftfy|langcodes|locate|wcwidth"
    r"|evaluate|more-itertools|pytablewriter|rouge-score|sacrebleu|scikit-learn|sqlitedict|word2number"
)
"""What comes with torch and is large; what only downloads need; what wordfreq's own code needs, of which kinject reads the lists
alone; and what the tasks of lm-evaluation-harness need, of which some have no wheel, beside its model."""
NEEDLESS = (
    r"(^|/)tests?/|\.(pyx|pxd|pxi|h|hpp|lib|a|exe)$|^pyarrow/(include|src)/|^pyarrow/.*(flight|_s3)"
    r"|^bitsandbytes/libbitsandbytes_(?!cpu|cuda@\.).*\.so|^scipy/.*/_?test|^transformers/.*\.cu"
    r"|^bitsandbytes/.*\.(dll|dylib)$|^wordfreq/data/(?!small_)|^lm_eval/tasks/[^/]+/"
)
"""Files that are not unpacked; @ is the version of CUDA."""
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34)] + [
    "manylinux2014_x86_64", "manylinux1_x86_64", "manylinux2010_x86_64", "linux_x86_64",
]  # fmt: skip


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _target(python: str) -> list[str]:
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    return ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", *platforms]


def to_fetch(requirements: Iterable[str], have: Mapping[str, str], python: str) -> dict[str, str]:
    """Return name -> requirement of what is neither torch's nor in `have` in a version that satisfies it."""
    from packaging.requirements import Requirement

    environment = {
        "extra": "",
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": "linux",
    }
    wheels = {}
    for requirement in map(Requirement, requirements):
        name = _canonical(requirement.name)
        if requirement.marker is not None and not requirement.marker.evaluate(environment):
            continue
        is_there = name in have and requirement.specifier.contains(
            have[name].partition("+")[0], prereleases=True
        )
        if not LEFT_OUT.fullmatch(name) and not is_there:
            wheels[name] = f"{name}{requirement.specifier}"
    return wheels


def fetch(folder: Path, roots: Iterable[str], have: Mapping[str, str], python: str) -> None:
    """Download `roots` and, in rounds, what they need beside torch and `have`, as constraints.txt pins it."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "--quiet",
        "--disable-pip-version-check",
        "download",
        "--no-deps",
        "-d",
    ]
    command += [str(folder), *_target(python), "-c", str(ROOT / "constraints.txt")]
    seen: set[str] = set()
    wanted = to_fetch(roots, have, python)
    while wanted:
        subprocess.run([*command, *wanted.values()], check=True)
        seen |= wanted.keys()
        needs = [line for wheel in folder.glob("*.whl") for line in _needs(wheel)]
        wanted = {
            name: line for name, line in to_fetch(needs, have, python).items() if name not in seen
        }


def _needs(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(
            name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)
        )
        return message_from_bytes(archive.read(name)).get_all("Requires-Dist") or []


def kinjects_requirements() -> list[str]:
    """Return the requirements of pyproject.toml that ROOTS names."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["gguf"]]
    return [line for line in lines if re.split(r"[^\w.-]", line)[0] in ROOTS]


def shrink(wheel: Path, cuda: str) -> None:
    """Pack what is needed of a wheel as one stream (.tar.xz) in its place.

    One stream finds what files have in common, as the models of transformers do. A filter turns the addresses of x86's jumps
    into ones that repeat.
    """
    packed = wheel.with_suffix(".tar.xz")
    # Under another name until it is whole: half a file would end a run on a lent GPU.
    part = wheel.with_suffix(".part")
    needless = re.compile(NEEDLESS.replace("@", cuda))
    with (
        zipfile.ZipFile(wheel) as source,
        lzma.open(part, "wb", filters=FILTERS) as stream,
        tarfile.open(fileobj=stream, mode="w") as target,
    ):
        names = [
            item.filename
            for item in source.infolist()
            if not (item.is_dir() or needless.search(item.filename))
        ]
        for name in sorted(names, key=lambda name: (Path(name).suffix, name)):
            entry, content = tarfile.TarInfo(name), source.read(name)
            entry.size = len(content)
            target.addfile(entry, io.BytesIO(content))
    part.replace(packed)
    wheel.unlink()


def main() -> int:
    """Download, shrink, and print the sizes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the Python on that machine")
    parser.add_argument("--have", type=Path, help="its packages, NAME==VERSION on a line")
    parser.add_argument("--cuda", default="130", help="its torch's CUDA, without the dot")
    parser.add_argument(
        "--with",
        dest="extra",
        nargs="+",
        default=[],
        help="further packages: lm_eval, liger-kernel, torchao",
    )
    options = parser.parse_args()
    lines = options.have.read_text("utf-8").split() if options.have else []
    have = {
        _canonical(name): version
        for name, _, version in (line.partition("==") for line in lines)
        if version
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    fetch(options.folder, [*kinjects_requirements(), *options.extra], have, options.python)
    total = pack(options.folder, options.cuda)
    print(f"{total / 2**20:.1f} MiB in all")
    return 0


def pack(folder: Path, cuda: str) -> int:
    """Shrink the wheels in `folder` that are not packed there yet, remove what is packed of others; return the bytes of all."""
    wheels = sorted(folder.glob("*.whl"))
    packed = [wheel.with_suffix(".tar.xz") for wheel in wheels]
    for path in folder.glob("*.tar.xz"):
        if path not in packed:
            path.unlink()  # of two versions the older one might be unpacked
    for wheel, path in zip(wheels, packed, strict=True):
        before = wheel.stat().st_size
        if path.exists():
            wheel.unlink()
        else:
            shrink(wheel, cuda)
        after = path.stat().st_size
        print(f"{wheel.name:90} {before / 2**20:7.2f} MiB, packed {after / 2**20:6.2f}", flush=True)
    return sum(path.stat().st_size for path in packed)


if __name__ == "__main__":
    sys.exit(main())
