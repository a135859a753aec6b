"""Mails, alone, in mailboxes, and saved by Outlook (MSG); an attachment is its own document."""

from __future__ import annotations

import base64
import codecs
import email
import email.policy
import email.utils
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from email.message import Message
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Protocol

from kinject.disk import content_id, read_bytes, read_lines
from kinject.documents.charsets import (
    WESTERN_CODECS,
    code_page_codec,
    declared_charset,
    is_mostly_high,
)
from kinject.documents.html import page_of
from kinject.documents.readers import (
    MOST_WITHIN,
    LocatedDocument,
    ReadOptions,
    read_member,
    reader_of,
)
from kinject.documents.text import (
    decode,
    import_extra,
    is_utf16,
    library_errors,
    one_line,
)
from kinject.errors import InputError
from kinject.types import Document

_HEADERS = ("From", "To", "Subject", "Date", "Received", "Message-ID", "MIME-Version")
_SURROGATE = re.compile("[\ud800-\udfff]")
_BODIES = frozenset({"text/plain", "text/html"})
_NO_TEXTS = frozenset({"text/rfc822-headers", "text/css", "text/javascript"})
"""What a report says of a mail that was not delivered, and the look of a saved page."""
_LEAST_OF_PAGE = 0.3
"""The fraction of the words of a mail's web page that its plain text has at least, if it is one."""
_SAME = 0.9
"""The fraction of the words that two parts which say the same have in common."""
_QUOTES = re.compile(">+")
_QUOTED_MAIL = "div.gmail_quote, blockquote.gmail_quote, blockquote[type=cite]"
"""The mail that Gmail, Apple Mail and Thunderbird quote in a web page."""
_QUOTE_HEAD = "div.moz-cite-prefix, div.gmail_attr"
"""Who wrote it and when, which may stand above it."""
_SIGNATURE = "-- "
"""The line above a signature, which is never continued."""
_PROPERTIES = "__properties_version1.0"
_SUBJECT, _SENDER, _BODY, _RICH_TEXT, _PAGE = "0037", "0C1A", "1000", "1009", "1013"
_ATTACHED, _SHORT_NAME, _LONG_NAME = "3701", "3704", "3707"
_MESSAGE_PAGE, _INTERNET_PAGE = 0x3FFD, 0x3FDE
"""Numbers of Outlook's properties of a mail and of an attachment."""
_QUOTE = re.compile(r"^\s*>")
_INTRODUCES = re.compile(
    r"^.{0,200}(?:(?:wrote|writes|schrieb|a écrit|escribió|ha scritto|escreveu|schreef|skrev"
    r"|napisał|написала?|пишет)\b|写道|寫道|書きました|のメール|님이 작성).{0,80}[:：]\s*$",
    re.IGNORECASE,
)

_ORIGINAL = re.compile(
    r"^(?:[-_]{5,}[^\n]*\n\s*)?"
    r"\**(?:From|Von|De|Da|Van)\**\s?:[^\n]+\n"
    r"\**(?:Sent|Gesendet|Envoyé|Enviad[oa](?: el| em)?|Inviato|Verzonden)\**\s?:[^\n]+\n"
    r"(?:[^\n]+\n){0,3}\**(?:Subject|Betreff|Objet|Asunto|Assunto|Oggetto|Onderwerp)\**\s?:",
    re.MULTILINE,
)
"""What Outlook puts above the mail that it quotes, whose lines it does not mark."""
_REPLY = re.compile(r"(?:re|aw|antw|sv|r|rif|res)\s?:", re.IGNORECASE)
_ANSWERS_WITHIN = re.compile(r"\b(?:below|inline|unten|ci-dessous|abajo|sotto)\b", re.IGNORECASE)
"""Words of a writer whose answers stand inside the quoted mail."""


def read_eml(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a mail, then the documents of its attachments."""
    yield from _read(path, str(path), read_bytes(path, options.largest, stream), options)


def read_mbox(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield the mails of a mailbox, each with its attachments; a line ``From `` after a blank one
    begins a mail."""
    message = bytearray()
    number, n_dropped, blank = 0, 0, True
    is_kept_as_text = _is_kept_as_text(stream.read(4))
    stream.seek(0)
    if is_kept_as_text:
        stream = BytesIO(_in_utf8(path, read_bytes(path, options.largest, stream)))
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
        yield from _read(path, location, bytes(message), options)


def _read(
    path: Path, location: str, data: bytes, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the mail in `data`; its attachments are read or reported one by one."""
    try:
        with library_errors(path, "mail", "Export it again."):
            mail = _parsed(_in_utf8(path, data))
            if not any(map(mail.get, _HEADERS)):
                raise InputError(
                    f"{location}: not a mail: none of its first lines is From, To, Subject or Date."
                )
    except InputError as error:
        yield location, error
        return
    yield from _mail(path, location, mail, options)


def _is_kept_as_text(data: bytes) -> bool:
    """Return whether mails begin as programs write them that keep them as text: in UTF-16, or with
    the mark of UTF-8."""
    return is_utf16(data) or data.startswith(codecs.BOM_UTF8)


def _in_utf8(path: Path, data: bytes) -> bytes:
    """Return mails without such a mark, in which the library finds no header."""
    if not _is_kept_as_text(data):
        return data
    return decode(path, data)[0].encode("utf-8")


def _parsed(data: bytes) -> Message:
    return email.message_from_bytes(data, policy=email.policy.default)


def _mail(
    path: Path, location: str, mail: Message, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield a mail, then the documents of its attachments."""
    attachments: list[Message] = []
    try:
        with library_errors(path, "mail", "Export it again."):
            text = _text_of(path, mail, attachments)
            if _is_other_text(mail):
                declared = str(mail.get_content_charset() or "")
                text, attachments = decode(path, _payload(mail), declared)[0].strip(), []
            text = text.replace("\0", "")
            title = " ".join(_header(path, mail, "Subject").replace("\0", " ").split())
            text = _without_original(text, title)
            meta = _meta(path, mail)
    except InputError as error:
        yield location, error
        return
    if text or not attachments:
        yield location, _document(path, location, title, text, meta)
    for index, attachment in enumerate(attachments, start=1):
        yield from _attachment(path, location, attachment, index, options)


def _document(
    path: Path, location: str, title: str, text: str, meta: Mapping[str, str]
) -> Document:
    body = text
    if title and text:
        body = f"# {title}\n\n{text}"
    identity = content_id(title or location, body)
    return Document(identity, title or path.stem, body, location, meta)


def _text_of(path: Path, part: Message, attachments: list[Message]) -> str:
    """Return the text of a part of a mail, and add the attachments in it to `attachments`."""
    kind = part.get_content_type()
    if part.is_multipart() and kind != "message/rfc822":
        return _text_of_parts(path, part, attachments)
    is_attached = part.get_content_disposition() == "attachment" or part.get_filename()
    if kind == "message/rfc822" or is_attached or _is_other_text(part):
        attachments.append(part)
        return ""
    if kind not in _BODIES:
        return ""
    content = _payload(part)
    declared = str(part.get_content_charset() or "")
    if kind == "text/html":
        page, _ = decode(path, content, declared or declared_charset(content))
        return page_of(path, _page_without_quotes(path, page), whole_page=True)[1]
    text, _ = decode(path, content, declared)
    if str(part.get_param("format", "")).lower() == "flowed":
        text = _unwrapped(text, str(part.get_param("delsp", "")).lower() == "yes")
    return _without_quotes(text)


def _text_of_parts(path: Path, mail: Message, attachments: list[Message]) -> str:
    """Return the text of a part that consists of others."""
    children = _children(mail)
    # What follows is the signature, in letters that say nothing.
    if mail.get_content_type() == "multipart/signed":
        children = children[:1]
    if mail.get_content_type() != "multipart/alternative":
        texts = [_text_of(path, child, attachments) for child in children]
        return _joined(children, texts)
    # The same text as a calendar or for a watch has nothing new in it.
    children = [child for child in children if not _is_other_text(child)] or children
    return _alternative(children, [_text_of(path, child, attachments) for child in children])


def _is_other_text(part: Message) -> bool:
    """Return whether a part without a name is a text of another kind: a patch, a calendar."""
    kind = part.get_content_type()
    is_text = kind.startswith("text/") and kind not in _BODIES | _NO_TEXTS
    return is_text and not part.get_filename()


def _payload(part: Message) -> bytes:
    content = part.get_payload(decode=True)
    if not isinstance(content, bytes):
        return b""
    return content


def _children(part: Message) -> list[Message]:
    """Return the parts of a part; a damaged one may have a text in place of them."""
    inner = part.get_payload()
    if not isinstance(inner, list):
        return []
    return [child for child in inner if isinstance(child, Message)]


def _alternative(children: Sequence[Message], texts: Sequence[str]) -> str:
    """Return one of the texts that say the same: the plain one, unless it only says that the mail
    is a web page."""
    longest = max(texts, key=_n_words, default="")
    for child, text in zip(children, texts, strict=True):
        is_plain = child.get_content_type() == "text/plain"
        if is_plain and text and _n_words(text) >= _LEAST_OF_PAGE * _n_words(longest):
            return text
    return longest


def _n_words(text: str) -> int:
    return len(text.split())


def _joined(children: Sequence[Message], texts: Sequence[str]) -> str:
    """Return the texts of parts that follow one another."""
    kept: list[str] = []
    earlier: list[tuple[str, Counter[str]]] = []
    for child, text in zip(children, texts, strict=True):
        said = child.get_content_type(), Counter(re.findall(r"\w+", text.lower()))
        if text and not any(_says_the_same(said, other) for other in earlier):
            kept.append(text)
            earlier.append(said)
    return "\n\n".join(kept)


def _says_the_same(said: tuple[str, Counter[str]], other: tuple[str, Counter[str]]) -> bool:
    """Return whether a part says what another one did: some mailers send a text and the same text
    as a web page as if one followed the other."""
    (kind, words), (other_kind, others) = said, other
    # Of two texts one may be the other with another day in it.
    if kind == other_kind:
        return words == others
    return (words & others).total() >= _SAME * max(words.total(), others.total())


def _unwrapped(text: str, is_space_dropped: bool) -> str:
    """Return text of format=flowed (RFC 3676) with each paragraph on one line."""
    lines: list[str] = []
    depth_before, is_open = 0, False
    for line in text.split("\n"):
        quotes = _QUOTES.match(line)
        depth = 0
        if quotes:
            depth = len(quotes[0])
        # A space is put before lines that would be taken for something else.
        content = line[depth:].removeprefix(" ")
        is_flowed = content.endswith(" ") and content != _SIGNATURE
        if is_flowed and is_space_dropped:
            content = content[:-1]
        if is_open and depth == depth_before and content != _SIGNATURE:
            lines[-1] += content
        else:
            lines.append(f"{'>' * depth} {content}".removeprefix(" "))
        depth_before, is_open = depth, is_flowed
    return "\n".join(line.rstrip() for line in lines)


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


def _without_original(text: str, subject: str) -> str:
    """Return the text of a reply without the mail that Outlook quotes below it; of a mail that was
    passed on, it is what the mail is about."""
    head = _ORIGINAL.search(text)
    if head is None or not _REPLY.match(subject):
        return text
    own = text[: head.start()].strip()
    if not own or _ANSWERS_WITHIN.search(own):
        return text
    return own


def _page_without_quotes(path: Path, page: str) -> str:
    """Return the web page of a mail without the quoted mail that ends it."""
    tree = import_extra("selectolax.lexbor", path).LexborHTMLParser(page)
    whole = one_line(tree.text())
    for quote in tree.css(_QUOTED_MAIL):
        quoted = one_line(quote.text())
        is_all = quoted == whole
        # Of a mail that was passed on, it is what the mail is about.
        if quoted and whole.endswith(quoted) and not is_all and "-----" not in quoted:
            for head in tree.css(_QUOTE_HEAD):
                head.decompose()
            quote.decompose()
            return tree.html or ""
    return page


def _attachment(
    path: Path, location: str, part: Message, index: int, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the documents of an attachment: a mail that was forwarded, or a file."""
    try:
        with library_errors(path, "attachment", "Export the mail again."):
            name = Path(str(part.get_filename() or f"attachment-{index}")).name
            forwarded = None
            if part.get_content_type() == "message/rfc822":
                forwarded = next(iter(_children(part)), None)
            data = part.get_payload(decode=True)
            # Against the standard, which allows no such encoding of a mail.
            if forwarded is not None and not forwarded.keys():
                encoded = forwarded.get_payload()
                if part.get("Content-Transfer-Encoding", "").lower() == "base64":
                    forwarded = _parsed(base64.b64decode(str(encoded)))
    except InputError as error:
        yield f"{location}/attachment-{index}", error
        return
    if forwarded is not None:
        yield from _within(f"{location}/{name}", path, forwarded, options)
    elif isinstance(data, bytes):
        yield from read_member(Path(f"{location}/{name}"), data, options)


def _within(
    location: str, path: Path, mail: Message, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield a mail that lies in another, and its attachments."""
    if options.within >= MOST_WITHIN:
        yield location, _too_deep(location)
    else:
        yield from _mail(path, location, mail, replace(options, within=options.within + 1))


def _too_deep(location: str) -> InputError:
    return InputError(
        f"{location}: lies in more than {MOST_WITHIN} mails and archives, allowed: {MOST_WITHIN}. "
        "Unpack it."
    )


def _header(path: Path, mail: Message, name: str) -> str:
    try:
        value = str(mail.get(name) or "")
    # The library raises whatever a damaged header leads to; a mail without it is a mail.
    except Exception:  # noqa: BLE001
        return ""
    if "\ufffd" not in value and _SURROGATE.search(value) is None:
        return value
    # Bytes above ASCII, of which the library does not know the charset.
    for key, raw in mail.raw_items():
        if key.lower() == name.lower():
            return decode(path, str(raw).encode("utf-8", "surrogateescape"))[0]
    return value


def _meta(path: Path, mail: Message) -> dict[str, str]:
    """Return author and date of a mail."""
    stated = _header(path, mail, "Date")
    try:
        date = email.utils.parsedate_to_datetime(stated).isoformat()
    except (ValueError, TypeError, OverflowError):
        date = stated
    meta = {"author": _header(path, mail, "From"), "date": date}
    return {key: value for key, value in meta.items() if value}


class OleFile(Protocol):
    """The part of olefile's class for files that is used; the library has no types."""

    def exists(self, filename: str) -> bool: ...

    def listdir(self) -> list[list[str]]: ...

    def openstream(self, filename: str) -> BinaryIO: ...


def read_msg(path: Path, stream: BinaryIO, options: ReadOptions) -> Iterator[LocatedDocument]:
    """Yield a mail that Outlook saved, then the documents of its attachments."""
    olefile = import_extra("olefile", path)
    with library_errors(path, "Outlook mail", "Save it as .eml."):
        file = olefile.OleFileIO(BytesIO(read_bytes(path, options.largest, stream)))
    yield from _outlook_mail(path, str(path), file, "", options)


def _outlook_mail(
    path: Path, location: str, file: OleFile, folder: str, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the mail in a folder of an Outlook file ("": the file's own), then its attachments."""
    mail = _OutlookFolder(path, file, folder)
    try:
        with library_errors(path, "Outlook mail", "Save it as .eml."):
            title = " ".join(mail.text(_SUBJECT).split())
            text = _without_original(mail.body(location, options), title)
            sender = mail.text(_SENDER)
    except InputError as error:
        yield location, error
        return
    meta = {}
    if sender:
        meta["author"] = sender
    attachments = mail.attachments()
    if text or not attachments:
        yield location, _document(path, location, title, text, meta)
    for attached in attachments:
        attachment = _OutlookFolder(path, file, attached, mail.codec)
        yield from _outlook_attachment(path, location, file, attachment, options)


def _outlook_attachment(
    path: Path, location: str, file: OleFile, attachment: _OutlookFolder, options: ReadOptions
) -> Iterator[LocatedDocument]:
    """Yield the documents of an attachment: a file, or a mail within the mail."""
    data, name, folder = b"", "", attachment.folder
    try:
        with library_errors(path, "attachment", "Save the mail as .eml."):
            name = attachment.text(_LONG_NAME) or attachment.text(_SHORT_NAME)
            data = attachment.read(f"{_ATTACHED}0102")
    except InputError as error:
        yield f"{location}/{name}", error
        return
    name = Path(name or folder.rstrip("/")).name
    inner = f"{folder}__substg1.0_{_ATTACHED}000D/"
    if data:
        yield from read_member(Path(f"{location}/{name}"), data, options)
    elif file.exists(f"{inner}{_PROPERTIES}") and options.within >= MOST_WITHIN:
        yield f"{location}/{name}", _too_deep(f"{location}/{name}")
    elif file.exists(f"{inner}{_PROPERTIES}"):
        deeper = replace(options, within=options.within + 1)
        yield from _outlook_mail(path, f"{location}/{name}", file, inner, deeper)


def _without_nul(text: str) -> str:
    """Return a text of Outlook without what ends it, and a space for what is left of others."""
    return text.rstrip("\0").replace("\0", " ")


class _OutlookFolder:
    """A mail or an attachment in an Outlook file: properties that have a number and a type.

    `codec` is that of texts in 8 bits, of an attachment its mail's; None: found from the texts.
    """

    def __init__(self, path: Path, file: OleFile, folder: str, codec: str | None = None) -> None:
        self._path = path
        self._file = file
        self.folder = folder
        self.codec = codec

    def read(self, name: str) -> bytes:
        """Return the bytes of a property, b"" without it."""
        stream = f"{self.folder}__substg1.0_{name}"
        if not self._file.exists(stream):
            return b""
        return self._file.openstream(stream).read()

    def text(self, name: str) -> str:
        """Return a text, "" without it: in UTF-16, else in the code page of the mail."""
        wide = self.read(f"{name}001F")
        if wide:
            return _without_nul(wide.decode("utf-16-le", "replace"))
        narrow = self.read(f"{name}001E")
        if not narrow:
            return ""
        if self.codec is None:
            self.codec = self._codec_of_texts(narrow)
        return _without_nul(narrow.decode(self.codec, "replace"))

    def body(self, location: str, options: ReadOptions) -> str:
        """Return the text of a mail: its plain text, else its web page, else its rich text."""
        plain = self.text(_BODY).replace("\r\n", "\n").strip()
        if plain:
            return _without_quotes(plain)
        page = self.text(_PAGE)
        data = self.read(f"{_PAGE}0102")
        if data:
            declared = self._codecs().get(_INTERNET_PAGE) or declared_charset(data)
            page, _ = decode(self._path, data, declared)
        text = ""
        if page.strip():
            page = _page_without_quotes(self._path, page)
            text = page_of(self._path, page, whole_page=True)[1]
        packed = self.read(f"{_RICH_TEXT}0102")
        if text or not packed:
            return text
        rich = import_extra("compressed_rtf", self._path).decompress(packed)
        name = Path(f"{location}/body.rtf")
        documents = [document for _, document in reader_of("rtf")(name, BytesIO(rich), options)]
        return "\n\n".join(one.text for one in documents if isinstance(one, Document))

    def attachments(self) -> list[str]:
        """Return the folders of the attachments."""
        above = self.folder.split("/")[:-1]
        names = set()
        for entry in self._file.listdir():
            is_below = entry[: len(above)] == above and len(entry) > len(above) + 1
            if is_below and entry[len(above)].startswith("__attach"):
                names.add(entry[len(above)])
        return [f"{self.folder}{name}/" for name in sorted(names)]

    def _codec_of_texts(self, text: bytes) -> str:
        """Return the codec of the texts in 8 bits, found from all of them: a short one may be valid
        in several."""
        known = self._codecs()
        declared = known.get(_MESSAGE_PAGE) or known.get(_INTERNET_PAGE, "")
        texts = [self.read(f"{name}001E") for name in (_BODY, _SUBJECT, _SENDER, _PAGE)]
        data = b"\n".join(filter(None, texts)) or text
        # The one of the message is that of the computer, which may not be that of the text.
        if is_mostly_high(data) and declared in WESTERN_CODECS:
            declared = known.get(_INTERNET_PAGE, declared)
        return decode(self._path, data, declared)[1].get("encoding", "utf-8")

    def _codecs(self) -> dict[int, str]:
        """Return the codecs that the mail states, by the number of the property."""
        properties = f"{self.folder}{_PROPERTIES}"
        if not self._file.exists(properties):
            return {}
        data = self._file.openstream(properties).read()
        found = {}
        # Rows of 16 bytes below a head of 32, in a mail within a mail of 24, which is no multiple.
        first = 24 if self.folder else 32
        for start in range(first, len(data) - 15, 16):
            _, number, _, value = struct.unpack("<HHIQ", data[start : start + 16])
            if number in (_MESSAGE_PAGE, _INTERNET_PAGE):
                found[number] = code_page_codec(value & 0xFFFFFFFF)
        return found
