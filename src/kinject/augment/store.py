"""What a run has so far: accepted variants and refused answers, each in an append-only file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from kinject.augment.checks.checker import Verdict
from kinject.augment.plan import Group, VariantRequest
from kinject.disk import Journal, Places, Row, content_id
from kinject.errors import InputError
from kinject.types import Completion, Usage

_CURE = (
    "Move variants.jsonl, rejected.jsonl and notes.jsonl away and run again: they are made anew from the answers in "
    "cache.sqlite, where there is one, and nothing is paid twice."
)


class Store:
    """variants.jsonl, rejected.jsonl and notes.jsonl (of styles with a preparation) of one run folder, none in memory.

    Rows of earlier recipes stay there unused.
    """

    def __init__(self, run_dir: Path) -> None:
        """Open them. Raises `InputError` where a file is damaged, `DiskError` where it cannot be written."""
        self.variants_path = run_dir / "variants.jsonl"
        self.rejected_path = run_dir / "rejected.jsonl"
        with contextlib.ExitStack() as stack:
            # A power cut may take the last rows; the answers in them are in the cache.
            self._variants, self._accepted_places = _indexed(stack, self.variants_path, "id", "text")
            self._rejected, self._refusal_places = _indexed(stack, self.rejected_path, "variant_id", "reason")
            self._notes, self._notes_places = _indexed(stack, run_dir / "notes.jsonl", "id", "style")
            self._open = stack.pop_all()

    @property
    def n_accepted(self) -> int:
        """How many variants are stored."""
        return len(self._accepted_places)

    def accepted(self, slots: Sequence[VariantRequest]) -> dict[str, Row]:
        """Return the accepted variants of `slots` by id, read from the file; of several with one id the last."""
        found = zip(slots, self._accepted_places.of_all([slot.id for slot in slots]), strict=True)
        return {slot.id: self._variants.row_at(places[-1]) for slot, places in found if places}

    def are_accepted(self, slots: Sequence[VariantRequest]) -> list[bool]:
        """Return of each slot whether it is filled."""
        return [bool(places) for places in self._accepted_places.of_all([slot.id for slot in slots])]

    def refusals(self, slots: Sequence[VariantRequest]) -> list[Row]:
        """Return the refused answers of `slots`, each once."""
        found = self._refusal_places.of_all([slot.id for slot in slots])
        rows = (self._rejected.row_at(place) for places in found for place in places)
        return list({row["id"]: row for row in rows}.values())

    def check_refusals(self, variants: Mapping[str, Row], refusals: Sequence[Row]) -> None:
        """Raise `InputError` where `variants` (by id) tell of more refused answers than there are.

        rejected.jsonl has then lost rows: a power cut, a hand. An older kinject's variants do not tell.
        """
        counts = Counter(row["variant_id"] for row in refusals)
        if any(counts[identity] < variant.get("attempt", 0) for identity, variant in variants.items()):
            raise InputError(f"{self.rejected_path}: rows are missing that {self.variants_path.name} tells of. {_CURE}")

    def accept(
        self, group: Group, slot: VariantRequest, attempt: int, completion: Completion, writer: str, verdict: Verdict
    ) -> None:
        """Store the text in an answer that holds; `attempt` answers were refused before it."""
        usage = _usage(completion.usage)
        row: Row = {  # the fields of types.Variant
            "id": slot.id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": group.style.name, "sample": slot.sample, "text": group.style.parse(completion.text),
            "generator": writer, "prompt_hash": slot.prompt_hash, "usage": usage, "checks": dict(verdict.measures),
            "attempt": attempt,
        }  # fmt: skip
        self._accepted_places.add(slot.id, self._variants.append(row))

    def refuse(
        self, group: Group, slot: VariantRequest, attempt: int, completion: Completion, verdict: Verdict
    ) -> None:
        """Store a refused answer with its reason, once."""
        identity = content_id("refused", slot.id, attempt)
        if any(row["id"] == identity for row in self.refusals([slot])):
            return
        row: Row = {
            "id": identity, "variant_id": slot.id, "passage_id": group.passage.id,
            "document_id": group.passage.document_id, "style": group.style.name, "sample": slot.sample,
            "attempt": attempt, "reason": verdict.reason, "detail": verdict.detail, "text": completion.text,
            "usage": _usage(completion.usage),
        }  # fmt: skip
        self._refusal_places.add(slot.id, self._rejected.append(row))

    def notes(self, identity: str) -> tuple[str, ...]:
        """Return the notes stored under an id of `Plan.notes_id`, () where there are none."""
        places = self._notes_places.of(identity)
        return tuple(self._notes.row_at(places[-1])["notes"]) if places else ()

    def keep_notes(self, identity: str, group: Group, notes: tuple[str, ...]) -> None:
        """Store the notes of a preparation."""
        row: Row = {
            "id": identity, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": group.style.name, "notes": list(notes),
        }  # fmt: skip
        self._notes_places.add(identity, self._notes.append(row))

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()


def _indexed(stack: contextlib.ExitStack, path: Path, key: str, needed: str) -> tuple[Journal, Places]:
    """Return a journal and where its rows stand by their `key`; each must hold `needed`, too."""
    places = stack.enter_context(Places())

    def note(place: int, row: Row) -> None:
        _field(row, needed, path)
        try:
            places.add(_field(row, key, path), place)
        except InputError as error:
            raise InputError(f"{path}: {key}: {error}. The file was changed by hand; move it away.") from error

    return stack.enter_context(Journal(path, sync=False, each=note, cure=_CURE)), places


def _usage(usage: Usage) -> dict[str, int]:
    return {"tokens_in": usage.tokens_in, "tokens_out": usage.tokens_out}


def _field(row: Row, key: str, path: Path) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise InputError(
            f"{path}: a row without {key!r}. The file was changed by hand or by another program; move it away."
        )
    return value
