"""The variants, refused answers and notes of a run folder, each in an append-only file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from kinject.augment.checks.checker import Verdict
from kinject.augment.plan import Group, VariantRequest
from kinject.disk import Journal, OffsetIndex, Row, content_id
from kinject.errors import InputError
from kinject.types import Completion, Usage, Variant

_FIX = (
    "Move variants.jsonl, rejected.jsonl and notes.jsonl away and run again: they are written again from the answers in "
    "cache.sqlite, where there is one, and nothing is paid twice."
)


class Store:
    """variants.jsonl, rejected.jsonl and notes.jsonl (of styles with a preparation) of one run folder, none in memory.

    Rows of earlier recipes stay there unused.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open them. Raises `InputError` if a file is damaged, `DiskError` if it cannot be written."""
        self.variants_path = run_dir / "variants.jsonl"
        self.rejected_path = run_dir / "rejected.jsonl"
        with contextlib.ExitStack() as stack:
            # A power cut may take the last rows; the answers in them are in the cache.
            self._variants, self._variant_offsets = _indexed(stack, self.variants_path, "id", "text")
            self._rejected, self._rejected_offsets = _indexed(stack, self.rejected_path, "variant_id", "reason")
            self._notes, self._notes_offsets = _indexed(stack, run_dir / "notes.jsonl", "id", "style")
            self._open = stack.pop_all()

    @property
    def n_variants(self) -> int:
        """The number of stored variants."""
        return len(self._variant_offsets)

    def variants(self, requests: Sequence[VariantRequest]) -> dict[str, Variant]:
        """Return the stored variants of `requests` by id, read from the file; of several with one id the last."""
        matching = zip(requests, [self._variant_offsets.offsets_of(request.id) for request in requests], strict=True)
        return {
            request.id: self._variant(self._variants.row_at(offsets[-1])) for request, offsets in matching if offsets
        }

    def _variant(self, row: Row) -> Variant:
        try:
            return Variant(**{**row, "usage": Usage(**row["usage"]), "more": tuple(row.get("more", ()))})
        except (TypeError, KeyError) as error:
            raise InputError(f"{self.variants_path}: a row is no variant ({error}). {_FIX}") from error

    def refusals(self, requests: Sequence[VariantRequest]) -> list[Row]:
        """Return the refused answers of `requests`, each once."""
        matching = [self._rejected_offsets.offsets_of(request.id) for request in requests]
        rows = (self._rejected.row_at(offset) for offsets in matching for offset in offsets)
        return list({row["id"]: row for row in rows}.values())

    def check_refusals(self, variants: Mapping[str, Variant], refusals: Sequence[Row]) -> None:
        """Raise `InputError` if `variants` count more refused answers than there are.

        Then rejected.jsonl has lost rows, to a power cut or to an editor.
        """
        counts = Counter(row["variant_id"] for row in refusals)
        if any(counts[variant_id] < variant.attempt for variant_id, variant in variants.items()):
            raise InputError(f"{self.rejected_path}: rows are missing that {self.variants_path.name} counts. {_FIX}")

    def accept(
        self, group: Group, request: VariantRequest, attempt: int, completion: Completion, generator: str,
        texts: Sequence[str], measures: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store the accepted `texts` of an answer, none for NONE; `attempt` answers were refused before it."""
        variant = Variant(
            id=request.id, passage_id=group.passage.id, document_id=group.passage.document_id, style=group.style.name,
            sample=request.sample, text=texts[0] if texts else "", generator=generator, prompt_hash=request.prompt_hash,
            usage=completion.usage, checks=measures, attempt=attempt,
            more=tuple(texts[1:]),
        )  # fmt: skip
        self._variant_offsets.add(variant.id, self._variants.append(variant))

    def refuse(
        self, group: Group, request: VariantRequest, attempt: int, completion: Completion, verdict: Verdict
    ) -> None:
        """Store a refused answer with its reason, once."""
        identity = content_id("refused", request.id, attempt)
        if any(row["id"] == identity for row in self.refusals([request])):
            return
        row: Row = {
            "id": identity, "variant_id": request.id, "passage_id": group.passage.id,
            "document_id": group.passage.document_id, "style": group.style.name, "sample": request.sample,
            "attempt": attempt, "reason": verdict.reason, "detail": verdict.detail, "text": completion.text,
            "usage": asdict(completion.usage),
        }  # fmt: skip
        self._rejected_offsets.add(request.id, self._rejected.append(row))

    def notes(self, notes_id: str) -> tuple[str, ...] | None:
        """Return the items stored under an id of `Plan.notes_id`, None if there is no answer yet."""
        offsets = self._notes_offsets.offsets_of(notes_id)
        return tuple(self._notes.row_at(offsets[-1])["notes"]) if offsets else None

    def add_notes(self, notes_id: str, group: Group, style: str, name: str, notes: tuple[str, ...]) -> None:
        """Store the items that the preparation `name` of a style ("": of every style) made of one answer."""
        row: Row = {
            "id": notes_id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": style, "preparation": name, "notes": list(notes),
        }  # fmt: skip
        self._notes_offsets.add(notes_id, self._notes.append(row))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _indexed(stack: contextlib.ExitStack, path: Path, key: str, required: str) -> tuple[Journal, OffsetIndex]:
    """Return a journal and the offsets of its rows by their `key`. Each row must have the field `required`, too."""
    offsets = OffsetIndex()

    def index(offset: int, row: Row) -> None:
        _field(row, required, path)
        try:
            offsets.add(_field(row, key, path), offset)
        except InputError as error:
            raise InputError(f"{path}: {key}: {error}. The file was changed by hand; move it away.") from error

    return stack.enter_context(Journal(path, sync=False, on_row=index, fix=_FIX)), offsets


def _field(row: Row, key: str, path: Path) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise InputError(
            f"{path}: a row without {key!r}. The file was changed by hand or by another program; move it away."
        )
    return value
