"""Files as kinject writes them: atomic, one process per run folder, a manifest beside each
output."""

from kinject.disk.files import (
    LARGEST_FILE,
    LOCK,
    LONGEST_LINE,
    SHA256SUMS,
    atomic_file,
    causes,
    check_regular,
    check_sha256sums,
    content_id,
    delete_file,
    file_hash,
    file_stamp,
    fix_for,
    folder_hash,
    format_size,
    is_file,
    is_folder,
    open_regular,
    open_to_read,
    part_path,
    path_exists,
    read_bytes,
    read_lines,
    refuse_existing,
    system_failure,
    unreadable,
    unwritable,
    verified_hashes,
    write_json,
    write_sha256sums,
    write_text,
)
from kinject.disk.folders import cached_folder, file_lock, replace_folder
from kinject.disk.journal import Journal, read_journal
from kinject.disk.jsonl import (
    FORMAT_VERSION,
    Row,
    RowLike,
    check_version,
    open_jsonl,
    parse_fields,
    parse_json,
    parse_row,
    read_json,
    read_jsonl,
    write_jsonl,
)
from kinject.disk.offsets import OffsetIndex
from kinject.disk.run_folder import (
    MANIFEST_FIX,
    FoundRun,
    check_output,
    file_name,
    find_runs,
    lock_dir,
    read_manifest_beside,
    read_manifest_fields,
    refuse_outside_links,
    write_manifest,
)
