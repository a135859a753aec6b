"""Data sets that the library `datasets` loads: by a name on the Hugging Face hub, or a folder.

The library reads; this module has the form of their names, and what its faults mean to a user. Rows
are streamed, so that a data set may be larger than the disk: the first rows of it can be taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import cast

from kinject import hub
from kinject.disk import Row, is_file, is_folder, path_exists
from kinject.errors import InputError
from kinject.terminal import format_count

FORM = "OWNER/NAME[@REVISION][:CONFIGURATION[:SPLIT[:COLUMN]]]"
_NAME = r"[A-Za-z0-9][\w.-]*"
_REVISION = r"(?:@(?P<revision>[\w.-]+))?"
_PART = (
    r"(?::(?P<config>[\w.-]*))?(?::(?P<split>\w+)(?:\[:(?P<first>\d{1,18})\])?)?"
    r"(?::(?P<column>\w+))?"
)
_OF_HUB = re.compile(rf"(?P<name>{_NAME}/{_NAME}|{_NAME}(?=[@:])){_REVISION}{_PART}")
_OF_FOLDER = re.compile(rf"(?P<name>[^:]+)(?=:){_PART}")


@dataclass(frozen=True)
class HubDataSet:
    """One split of a data set: `name` is its name on the hub or a folder of the same layout.

    `revision` is a commit, tag or branch; `config` one of the configurations that its card lists;
    `column` the column that holds the text, "" if it has a common name. Only the `first` rows are
    read, all without it.
    """

    name: str
    revision: str | None = None
    config: str | None = None
    split: str = "train"
    column: str = ""
    first: int | None = None
    text: str = field(default="", compare=False)
    """The name as the recipe has it, for messages."""

    @property
    def is_folder(self) -> bool:
        """Whether it is in a folder of this machine."""
        return is_folder(self.name)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the split. Raises `InputError` if the library cannot read them."""
        n_read = 0
        try:
            for row in islice(self._load(), self.first):
                yield dict(row)
                n_read += 1
        except InputError:
            raise
        except Exception as error:  # the library raises whatever its readers and the network raise
            raise InputError(
                f"{self.text or self.name}: as a data set, split {self.split!r}, it cannot be read "
                f"after {format_count(n_read, 'row')} ({_first_line(error)}). Write it as {FORM}."
            ) from error

    def commit(self) -> str:
        """Return the commit of the data set on the hub. Raises `InputError` when the hub does not
        report it."""
        from huggingface_hub import HfApi

        self._refuse(hub.unreachable_reason())
        try:
            return str(HfApi().dataset_info(self.name, revision=self.revision).sha)
        except Exception as error:  # as above
            raise InputError(
                f"{self.text or self.name}: the hub does not report its revision "
                f"({_first_line(error)})."
            ) from error

    def pinned(self) -> HubDataSet:
        """Return the data set at its commit of now; itself if it is a folder, or the hub is
        switched off. Raises as `commit`."""
        # With the hub switched off it would report no commit; a folder has none.
        if self.is_folder or hub.unreachable_reason() == hub.OFFLINE:
            return self
        return replace(self, revision=self.commit())

    def _load(self) -> Iterable[Row]:
        import datasets

        if self.is_folder and is_saved(Path(self.name)):
            return self._saved_split()
        reason = "" if self.is_folder else hub.unreachable_reason()
        if reason != hub.OFFLINE:
            self._refuse(reason)
        # With the hub switched off the library still finds what an earlier run has loaded whole.
        rows = datasets.load_dataset(
            self.name,
            self.config,
            split=self.split,
            streaming=not reason,
            revision=self.revision,
        )
        return cast("Iterable[Row]", rows)

    def _saved_split(self) -> Iterable[Row]:
        import datasets

        loaded = datasets.load_from_disk(self.name)
        if not isinstance(loaded, Mapping):
            return cast("Iterable[Row]", loaded)
        if self.split not in loaded:
            raise InputError(
                f"{self.text or self.name}: no split {self.split!r}. It has "
                f"{', '.join(map(str, loaded))}."
            )
        return cast("Iterable[Row]", loaded[self.split])

    def _refuse(self, reason: str) -> None:
        """Raise `InputError` if there is a reason why the hub cannot be reached."""
        if reason:
            raise InputError(
                f"{self.text or self.name}: no such file or folder, and {reason}. Check the path, "
                "or give a file or a folder."
            )


def parse_data_set(text: str) -> HubDataSet | None:
    """Return the data set that `text` names in the form `FORM`, None if it has another form.

    NAME alone, without its owner, needs a colon after it, and so does a folder, in place of
    OWNER/NAME. `SPLIT[:1000]` are its first 1000 rows.
    """
    # A folder that is there comes before a name on the hub, as with models.
    match = _OF_FOLDER.fullmatch(text)
    if match is None or not is_folder(match["name"]):
        match = _OF_HUB.fullmatch(text)
    if match is None:
        return None
    parts = match.groupdict()
    return HubDataSet(
        parts["name"],
        parts.get("revision"),
        parts["config"] or None,
        parts["split"] or "train",
        parts["column"] or "",
        int(parts["first"]) if parts["first"] else None,
        text,
    )


def find_data_set(text: str) -> HubDataSet | None:
    """Return the data set that `text` names, None if it is a path: one that exists, a misspelt
    file, or one in an existing folder."""
    path = Path(text)
    if path_exists(path):
        return None
    data = parse_data_set(text)
    if data is None or data.is_folder or ":" in text:
        return data
    is_path = path.suffix[1:].isalpha() or (path.parent != Path() and is_folder(path.parent))
    return None if is_path else data


def is_saved(folder: Path) -> bool:
    """Return whether `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote `folder`."""
    return is_file(folder / "state.json") or is_file(folder / "dataset_dict.json")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
