"""Mails, alone, in mailboxes, and saved by Outlook (MSG); an attachment is its own document."""

from __future__ import annotations

import email
import email.policy
import email.utils
import re
from collections.abc import Iterator
from dataclasses import replace
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kinject.disk import content_id, read_bytes, read_lines
from kinject.documents.html import page_of
from kinject.documents.readers import MOST_WITHIN, LocatedDocument, ReadOptions, read_member
from kinject.documents.text import decode, import_extra, library_errors
from kinject.errors import InputError
from kinject.types import Document

_HEADERS = ("From", "To", "Subject", "Date", "Received", "Message-ID")
_QUOTE = re.compile(r"^\s*>")
_INTRODUCES = re.compile(
    r"^.{0,200}(?:wrote|writes|schrieb|a écrit|escribió|ha scritto)\b.{0,80}:\s*$", re.IGNORECASE
)


def read_eml(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a mail, then the documents of its attachments."""
    yield from _mail(path, str(path), read_bytes(path, options.largest, stream), options)


def read_mbox(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the mails of a mailbox, each with its attachments; a line ``From `` after a blank one
    begins a mail."""
    message = bytearray()
    number, n_dropped, blank = 0, 0, True
    for _, line in read_lines(path, stream):
        if blank and line.startswith(b"From "):
            if number:
                yield from _boxed(path, number, message, n_dropped, options)
            number, n_dropped = number + 1, 0
            message.clear()
        elif len(message) + len(line) > options.largest:
            n_dropped += len(line)
        else:
            message += line[1:] if re.match(rb">+From ", line) else line
        blank = not line.strip()
    if number:
        yield from _boxed(path, number, message, n_dropped, options)


def _boxed(
    path: Path, number: int, message: bytearray, n_dropped: int, options: ReadOptions
) -> Iterator[LocatedDocument]:
    location = f"{path}: message {number}"
    if n_dropped:
        fault = f"a mail of more than {options.largest:,} bytes. Split the mailbox."
        yield location, InputError(f"{location}: {fault}")
    else:
        yield from _mail(path, location, bytes(message), options)


def _mail(
    path: Path, location: str, data: bytes, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the mail in `data`; its attachments are read or reported one by one."""
    try:
        with library_errors(path, "mail", "Export it again."):
            mail = email.message_from_bytes(data, policy=email.policy.default)
            if not any(map(mail.get, _HEADERS)):
                raise InputError(
                    f"{location}: not a mail: none of its first lines is From, To, Subject or Date."
                )
            text, attachments = _parts(path, mail)
            title = " ".join(str(_header(mail, "Subject")).split())
            meta = _meta(mail)
    except InputError as error:
        yield location, error
        return
    body = f"# {title}\n\n{text}" if title and text else text
    if body or not attachments:
        identity = content_id(title or location, body)
        yield location, Document(identity, title or path.stem, body, location, meta)
    for index, attachment in enumerate(attachments, start=1):
        yield from _attachment(path, location, attachment, index, options)


def _parts(path: Path, mail: Message) -> tuple[str, list[Message]]:
    """Return the text of a mail (its plain text, else its HTML) without the quotation at its end,
    and its attachments."""
    plain: list[str] = []
    pages: list[str] = []
    attachments: list[Message] = []
    stack: list[Message] = [mail]
    while stack:
        part = stack.pop()
        kind = part.get_content_type()
        if part.is_multipart() and kind != "message/rfc822":
            stack += reversed(_children(part))
        elif (
            kind == "message/rfc822"
            or part.get_content_disposition() == "attachment"
            or part.get_filename()
        ):
            attachments.append(part)
        elif kind in ("text/plain", "text/html"):
            content = part.get_payload(decode=True)
            if isinstance(content, bytes):
                source, _ = decode(path, content, str(part.get_content_charset() or ""))
                (plain if kind == "text/plain" else pages).append(source)
    # The HTML of a mail repeats its plain text.
    if not any(text.strip() for text in plain):
        plain = [page_of(path, page, whole_page=True)[1] for page in pages]
    return _without_quotes("\n\n".join(plain)), attachments


def _children(part: Message) -> list[Message]:
    """Return the parts of a part; a damaged one may have a text in place of them."""
    inner = part.get_payload()
    if not isinstance(inner, list):
        return []
    return [child for child in inner if isinstance(child, Message)]


def _without_quotes(text: str) -> str:
    """Return the text of a mail without the quoted mail that ends it; text answered line by line
    stays."""
    lines = text.replace("\r\n", "\n").rstrip().split("\n")
    end = len(lines)
    while end and (_QUOTE.match(lines[end - 1]) or not lines[end - 1].strip()):
        end -= 1
    if end == len(lines) or not end:
        return "\n".join(lines).strip()
    for first in (end - 1, end - 2):
        if first > 0 and _INTRODUCES.match(" ".join(lines[first:end])):
            end = first
            break
    return "\n".join(lines[:end]).strip()


def _attachment(
    path: Path, location: str, part: Message, index: int, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the documents of an attachment: a mail that was forwarded, or a file."""
    name = Path(str(part.get_filename() or f"attachment-{index}")).name
    if part.get_content_type() == "message/rfc822":
        inner = part.get_payload()
        forwarded = inner[0] if isinstance(inner, list) and inner else None
        if isinstance(forwarded, Message) and options.within < MOST_WITHIN:
            deeper = replace(options, within=options.within + 1)
            yield from _mail(path, f"{location}/{name}", forwarded.as_bytes(), deeper)
        return
    data = part.get_payload(decode=True)
    if isinstance(data, bytes):
        yield from read_member(Path(f"{location}/{name}"), data, options)


def _header(mail: Message, name: str) -> str:
    try:
        return str(mail.get(name) or "")
    # The library raises whatever a damaged header leads to; a mail without it is a mail.
    except Exception:  # noqa: BLE001
        return ""


def _meta(mail: Message) -> dict[str, Any]:
    """Return author and date of a mail."""
    try:
        date = email.utils.parsedate_to_datetime(_header(mail, "Date")).isoformat()
    except (ValueError, TypeError, OverflowError):
        date = _header(mail, "Date")
    meta = {"author": _header(mail, "From"), "date": date}
    return {key: value for key, value in meta.items() if value}


def read_msg(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a mail that Outlook saved, then the documents of its attachments."""
    olefile = import_extra("olefile", path)
    with library_errors(path, "Outlook mail", "Save it as .eml."):
        mail = olefile.OleFileIO(BytesIO(read_bytes(path, options.largest, stream)))
        subject, sender, body = (_property(mail, "", name) for name in ("0037", "0C1A", "1000"))
        folders = sorted({entry[0] for entry in mail.listdir() if entry[0].startswith("__attach")})
        attachments = []
        for folder in folders:
            content = f"{folder}/__substg1.0_37010102"
            if mail.exists(content):
                long_name = _property(mail, f"{folder}/", "3707")
                name = long_name or _property(mail, f"{folder}/", "3704") or folder
                attachments.append((name, mail.openstream(content).read()))
    title = " ".join(subject.split())
    text = body.strip()
    if title and text:
        text = f"# {title}\n\n{text}"
    meta = {"author": sender} if sender else {}
    identity = content_id(title, text)
    text = text.replace("\r\n", "\n")
    yield str(path), Document(identity, title or path.stem, text, str(path), meta)
    for name, data in attachments:
        yield from read_member(Path(f"{path}/{Path(name).name}"), data, options)


class OleFile(Protocol):
    """The part of olefile's class for files that is used; the library has no types."""

    def exists(self, filename: str) -> bool: ...

    def openstream(self, filename: str) -> BinaryIO: ...


def _property(mail: OleFile, folder: str, name: str) -> str:
    """Return a text of a mail, "" without one: in UTF-16, else in the encoding of Windows."""
    for kind, charset in (("001F", "utf-16-le"), ("001E", "cp1252")):
        stream = f"{folder}__substg1.0_{name}{kind}"
        if mail.exists(stream):
            return str(mail.openstream(stream).read().decode(charset, "replace")).rstrip("\0")
    return ""
