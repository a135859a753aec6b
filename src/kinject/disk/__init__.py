"""Files as kinject writes them: atomic, line-addressed, append-only where work is paid for, with a manifest beside."""

from kinject.disk.atomic import remove, write_json, write_text
from kinject.disk.format import FORMAT_VERSION, check_folder, check_version, settle_database
from kinject.disk.ids import content_id
from kinject.disk.inside import file_name, refuse_links_out
from kinject.disk.journal import Journal, read_journal
from kinject.disk.jsonl import Row, open_jsonl, read_jsonl, write_jsonl
from kinject.disk.lock import lock_dir
from kinject.disk.manifest import check_output, manifest_beside, read_manifest, write_manifest
from kinject.disk.places import Places
from kinject.disk.reading import is_there, open_to_read, read_bytes, read_lines
from kinject.disk.sealed import read_sealed, sealed, unsealed, write_sealed
from kinject.disk.sums import checked_hashes, file_hash, read_sums, tree_hash, write_sums

__all__ = [
    "FORMAT_VERSION",
    "Journal",
    "Places",
    "Row",
    "check_folder",
    "check_output",
    "check_version",
    "checked_hashes",
    "content_id",
    "file_hash",
    "file_name",
    "is_there",
    "lock_dir",
    "manifest_beside",
    "open_jsonl",
    "open_to_read",
    "read_bytes",
    "read_journal",
    "read_jsonl",
    "read_lines",
    "read_manifest",
    "read_sealed",
    "read_sums",
    "refuse_links_out",
    "remove",
    "sealed",
    "settle_database",
    "tree_hash",
    "unsealed",
    "write_json",
    "write_jsonl",
    "write_manifest",
    "write_sealed",
    "write_sums",
    "write_text",
]
