"""Files of files: zip, tar, gzip."""

from __future__ import annotations

import gzip
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, TypeVar

from kinject.disk import format_size
from kinject.documents.readers import LocatedDocument, ReadOptions, read_member
from kinject.documents.text import DAMAGED_ARCHIVE, MOST_MEMBERS
from kinject.errors import InputError
from kinject.terminal import format_count

Member = TypeVar("Member", zipfile.ZipInfo, tarfile.TarInfo)
_MOST_IN_ALL = 16
"""How many times the largest file an archive may hold in all."""


def read_zip(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents in each member of a zip; hidden ones are left out, archives in it are
    errors."""
    try:
        with zipfile.ZipFile(stream) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
            members.sort(key=attrgetter("filename"))
            if len(members) > MOST_MEMBERS:
                raise InputError(
                    f"{path}: holds {format_count(len(members), 'file')}, allowed: "
                    f"{MOST_MEMBERS:,}. Split it."
                )
            files = ((member.filename, member.file_size, member) for member in members)
            for location, member in _wanted(path, files, options):
                yield from _zip_member(archive, member, location, options)
    except DAMAGED_ARCHIVE as error:
        raise InputError(
            f"{path}: damaged: not a readable zip ({str(error)[:100]}). Pack it again."
        ) from error


def _wanted(
    path: Path, members: Iterable[tuple[str, int, Member]], options: ReadOptions
) -> Iterator[tuple[Path, Member]]:
    """Yield (location, member) of those that are not hidden. Raises `InputError` if they unpack to
    too much."""
    most = _MOST_IN_ALL * options.largest
    bytes_left = most
    for name, size, member in members:
        # No member is outside the archive, whatever its name.
        parts = [part for part in name.split("/") if part not in ("", "..", ".")]
        if any(part.startswith(".") for part in parts) or parts[:1] in ([], ["__MACOSX"]):
            continue
        bytes_left -= size
        if bytes_left < 0:
            raise InputError(
                f"{path}: unpacks to more than {format_size(most)}. Unpack it, and give the folder."
            )
        yield path.joinpath(*parts), member


def _zip_member(
    archive: zipfile.ZipFile, member: zipfile.ZipInfo, location: Path, options: ReadOptions
) -> Iterator[LocatedDocument]:
    fault = ""
    data = b""
    # The first bit marks an encrypted member.
    if member.flag_bits & 1:
        fault = "locked with a password. Pack it without one."
    elif member.file_size > options.largest:
        size, largest = format_size(member.file_size), format_size(options.largest)
        fault = f"unpacks to {size}, allowed: {largest}. Split it."
    else:
        try:
            data = archive.read(member)
        except DAMAGED_ARCHIVE as error:
            fault = f"damaged: cannot be unpacked ({str(error)[:100]}). Pack it again."
    if fault:
        yield str(location), InputError(f"{location}: {fault}")
    else:
        yield from read_member(location, data, options)


def read_tar(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents in each member of a tar, packed by gzip, bzip2, xz or not at all; hidden
    ones are left out."""
    try:
        with tarfile.open(fileobj=stream) as archive:
            files = ((member.name, member.size, member) for member in archive if member.isfile())
            for location, member in _wanted(path, files, options):
                content = archive.extractfile(member)
                yield from read_member(location, content.read() if content else b"", options)
    except (tarfile.TarError, *DAMAGED_ARCHIVE) as error:
        raise InputError(
            f"{path}: damaged: not a readable tar ({str(error)[:100]}). Pack it again."
        ) from error


def read_gzip(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the documents in a gzip file, whose kind is found by its name without ``.gz``."""
    try:
        # One byte more than allowed: a small file may unpack to a huge one.
        data = gzip.GzipFile(fileobj=stream).read(options.largest + 1)
    except DAMAGED_ARCHIVE as error:
        raise InputError(
            f"{path}: damaged: not readable as gzip ({str(error)[:100]}). Pack it again."
        ) from error
    if len(data) > options.largest:
        raise InputError(
            f"{path}: unpacks to more than {format_size(options.largest)}. Unpack and split it."
        )
    is_gz = path.suffix.lower() == ".gz"
    name = path.stem if is_gz else path.name
    yield from read_member(path / name, data, options)
