"""Files as kinject writes them: atomic, with checksums, one process per run folder, a manifest beside each output."""

from kinject.disk.checksums import (
    SHA256SUMS,
    check_sha256sums,
    content_id,
    file_hash,
    folder_hash,
    parse_checked_json,
    read_checked_json,
    row_checksum,
    verified_hashes,
    with_checksum,
    write_checked_json,
    write_sha256sums,
)
from kinject.disk.database import OffsetIndex, open_database, write_rows
from kinject.disk.files import (
    LARGEST_FILE,
    LONGEST_LINE,
    atomic_file,
    check_regular,
    delete_file,
    fix_for,
    format_size,
    is_file,
    is_folder,
    is_system_failure,
    open_regular,
    open_to_read,
    path_exists,
    read_bytes,
    read_lines,
    unreadable,
    unwritable,
    write_json,
    write_text,
)
from kinject.disk.format import FORMAT_VERSION, check_folder, check_version
from kinject.disk.journal import Journal, read_journal
from kinject.disk.jsonl import Row, open_jsonl, parse_json, parse_row, read_jsonl, write_jsonl
from kinject.disk.manifest import check_output, manifest_beside, read_manifest, write_manifest
from kinject.disk.run_folder import file_name, lock_dir, refuse_outside_links

__all__ = [
    "FORMAT_VERSION", "LARGEST_FILE", "LONGEST_LINE", "SHA256SUMS", "Journal", "OffsetIndex", "Row", "atomic_file",
    "check_folder", "check_output", "check_regular", "check_sha256sums", "check_version", "content_id", "delete_file",
    "file_hash", "file_name", "fix_for", "folder_hash", "format_size", "is_file", "is_folder", "is_system_failure",
    "lock_dir", "manifest_beside", "open_database", "open_jsonl", "open_regular", "open_to_read", "parse_checked_json",
    "parse_json", "parse_row", "path_exists", "read_bytes", "read_checked_json", "read_journal", "read_jsonl",
    "read_lines", "read_manifest", "refuse_outside_links", "row_checksum", "unreadable", "unwritable",
    "verified_hashes", "with_checksum", "write_checked_json", "write_json", "write_jsonl", "write_manifest",
    "write_rows", "write_sha256sums", "write_text",
]  # fmt: skip
