"""Files as kinject writes them: atomic, line-addressed, append-only where work is paid for, with a manifest beside."""

from kinject.disk.atomic import write_json, write_text
from kinject.disk.format import FORMAT_VERSION, check_folder, check_version, settle_database
from kinject.disk.inside import file_name, refuse_links_out
from kinject.disk.journal import Journal, lock_dir
from kinject.disk.jsonl import Row, read_jsonl, write_jsonl
from kinject.disk.manifest import content_id, file_hash, read_manifest, tree_hash, write_manifest
from kinject.disk.places import Places
from kinject.disk.reading import is_there, open_to_read, read_bytes, read_lines

__all__ = [
    "FORMAT_VERSION",
    "Journal",
    "Places",
    "Row",
    "check_folder",
    "check_version",
    "content_id",
    "file_hash",
    "file_name",
    "is_there",
    "lock_dir",
    "open_to_read",
    "read_bytes",
    "read_jsonl",
    "read_lines",
    "read_manifest",
    "refuse_links_out",
    "settle_database",
    "tree_hash",
    "write_json",
    "write_jsonl",
    "write_manifest",
    "write_text",
]
