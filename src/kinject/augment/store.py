"""The variants, refused answers and notes of a run folder, each in an append-only file."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kinject.augment.checks.checker import Verdict
from kinject.augment.groups import Group
from kinject.augment.stored_rows import (
    Fields,
    IndexedRows,
    are_checks,
    is_count,
    is_text,
    is_texts,
    is_usage,
)
from kinject.augment.styles import Style
from kinject.augment.variant_requests import VariantRequest
from kinject.disk import (
    Row,
    content_id,
    file_lock,
    read_jsonl,
    write_jsonl,
)
from kinject.errors import InputError
from kinject.llm.sender import Sender
from kinject.terminal import CURRENCY, format_count
from kinject.types import Completion, Tabular, Usage, Variant


@dataclass(frozen=True, kw_only=True)
class WritingResult(Tabular):
    """What a run of a writer came to.

    `refused` counts by reason, `failed` what got no answer by error. `tokens_in` and `tokens_out`
    are those of every stored answer, refused ones too; `tokens_thinking` is the part of
    `tokens_out` that a reasoning model's thinking took. `n_sent` and `n_cached` are of this run
    alone. `cost` is that of everything ever answered into the run folder, in the currency of the
    prices. `n_cut` counts the passages that end inside a sentence, a table row or a code block.
    """

    run_dir: Path
    rejected_path: Path
    manifest_path: Path
    n_documents: int
    n_passages: int
    n_cut: int
    asked: int
    got: int
    refused: Mapping[str, int]
    failed: Mapping[str, int]
    tokens_in: int
    tokens_out: int
    tokens_thinking: int
    n_sent: int
    n_cached: int
    cost: float
    out_of_budget: bool

    def counts(self, *more: str) -> dict[str, Any]:
        """Return the manifest's counts, with the fields `more`."""
        return {name: getattr(self, name) for name in (*_COUNTS, *more)}

    def render_failed(self, what: str) -> list[str]:
        """Return lines about what got no answer, under the heading `what`; none if all did."""
        if not self.failed:
            return []
        return ["", what, *(f"{n:>8}  {error}" for error, n in self.failed.items())]

    def render_requests(self) -> list[str]:
        """Return a line about requests and tokens."""
        sent = format_count(self.n_sent, "request")
        line = f"{sent} sent in this run, {self.n_cached} answered from the cache"
        if self.tokens_in or self.tokens_out:
            line += f"; {format_count(self.tokens_in, 'token')} in, {self.tokens_out:,} out"
            if self.tokens_thinking:
                line += f", {self.tokens_thinking:,} of them thinking"
        return [line]

    def render_cost(self) -> list[str]:
        """Return lines about cost and budget; none where there are no prices."""
        lines = []
        if self.cost:
            cost = f"cost {self.cost:.4f} {CURRENCY}"
            lines.append(f"{cost}, everything answered into {self.run_dir} included")
        if self.out_of_budget:
            lines.append("Stopped before the budget was exceeded.")
        return lines


_COUNTS = (
    "n_documents",
    "n_passages",
    "n_cut",
    "asked",
    "got",
    "refused",
    "failed",
    "tokens_in",
    "tokens_out",
    "tokens_thinking",
    "cost",
    "out_of_budget",
)
"""The fields of a `WritingResult` that every manifest has."""
"""Of every cost: prices are numbers alone."""
TOKENS = ("tokens_in", "tokens_out", "tokens_thinking")


def common_fields(
    sender: Sender, passages: Mapping[str, int], tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the fields of a `WritingResult` that follow from its sender, from counts of passages
    and from those of tokens."""
    traffic = sender.traffic
    return {
        **{f"n_{name}": n for name, n in passages.items()},
        **{name: tokens.get(name, 0) for name in TOKENS},
        "n_sent": traffic.n_sent,
        "n_cached": traffic.n_cached,
        # The sum of one run, and that of its stored answers, differ in the last digits.
        "cost": round(sender.budget.spent, 12),
        "out_of_budget": sender.out_of_budget,
    }


DECISIONS = "decisions.jsonl"
"""The file of a run folder in which a person keeps, drops and edits single texts or questions."""
VARIANTS, REJECTED, NOTES = "variants.jsonl", "rejected.jsonl", "notes.jsonl"
JOURNALS = (VARIANTS, REJECTED, NOTES)
"""The files of a run's `Store`."""


def read_decisions(run_dir: Path) -> dict[str, Row]:
    """Return the decisions on the texts or questions of a run by id; of two on one the last counts.

    Raises `InputError` (file:line) for a row without an id, of another decision, that edits without
    a text or question, or whose texts are none.
    """
    path, rows = run_dir / DECISIONS, dict[str, Row]()
    if not path.exists():
        return rows
    for number, row in read_jsonl(path):
        decision, texts = row.get("decision"), _decided_texts(row)
        if not isinstance(row.get("id"), str) or decision not in ("keep", "drop", "edit"):
            raise InputError(
                f"{path}:{number}: expected an id, and keep, drop or edit as its decision."
            )
        if not all(isinstance(text, str) for text in texts):
            raise InputError(
                f"{path}:{number}: text, question and answer must be texts, and wrong a list of "
                "texts."
            )
        if decision == "edit" and not (texts and all(map(str.strip, texts))):
            raise InputError(
                f"{path}:{number}: an edit needs a text that is not empty, "
                "or question, answer and wrong."
            )
        rows[row["id"]] = row
    return rows


def _decided_texts(row: Row) -> list[Any]:
    """Return the values of a decision that are to be texts; a `wrong` that is no list is one."""
    texts = [row[key] for key in ("text", "question", "answer") if key in row]
    wrong = row.get("wrong", [])
    if not isinstance(wrong, list):
        return [*texts, None]
    return [*texts, *wrong]


def write_decision(run_dir: Path, row: Row) -> None:
    """Add a decision, or take back the one on the same id (``undo``), as one step of this process
    among others.

    Raises as `read_decisions`, before it writes, and `DiskError`.
    """
    # Not the lock of the run folder: a person decides while the run writes.
    with file_lock(run_dir / f".{DECISIONS}.lock"):
        rows = read_decisions(run_dir)
        rows.pop(row["id"], None)
        if row["decision"] != "undo":
            rows[row["id"]] = row
        write_jsonl(run_dir / DECISIONS, rows.values())


def merge_decisions(run_dir: Path, folders: Iterable[Path]) -> None:
    """Add the decisions that a person made in the shards in `folders` to those of their merge,
    which stay. Raises as `write_decision`."""
    made = dict[str, Row]()
    for folder in folders:
        made |= read_decisions(folder)
    # A file without a decision would keep the merge from copying rows.
    if not made:
        return
    with file_lock(run_dir / f".{DECISIONS}.lock"):
        rows = made | read_decisions(run_dir)
        write_jsonl(run_dir / DECISIONS, rows.values())


def count_decisions(decisions: Mapping[str, Row], applied: Iterable[str]) -> dict[str, int]:
    """Return the manifest's entry: the applied decisions by kind, and those on texts that this run
    does not have."""
    names = [name for name in dict.fromkeys(applied) if name in decisions]
    counts = Counter(decisions[name]["decision"] for name in names)
    return {
        **dict.fromkeys(("keep", "drop", "edit"), 0),
        **counts,
        "unused": len(decisions) - len(names),
    }


def render_decisions(counts: Mapping[str, int]) -> list[str]:
    """Return a line with the applied decisions; none without any."""
    words = [f"{n} {kind}" for kind, n in counts.items() if n]
    if not words:
        return []
    return ["", f"decisions of {DECISIONS}: {', '.join(words)}"]


def text_id(variant_id: str, index: int) -> str:
    """Return the id of one text of an answer: that of its variant for the first."""
    if index == 0:
        return variant_id
    return content_id(variant_id, index)


_FIX = (
    "Move variants.jsonl, rejected.jsonl and notes.jsonl away and run again: they are written "
    "again from the answers in cache.sqlite, where there is one, and nothing is paid twice."
)


_OF_A_PASSAGE: Fields = {
    "id": is_text,
    "passage_id": is_text,
    "document_id": is_text,
    "style": is_text,
}
_VARIANT: Fields = {
    **_OF_A_PASSAGE,
    "sample": is_count,
    "text": is_text,
    "generator": is_text,
    "prompt_hash": is_text,
    "usage": is_usage,
    "checks": are_checks,
    "attempt": is_count,
    "more": is_texts,
}
_REFUSED: Fields = {
    **_OF_A_PASSAGE,
    "variant_id": is_text,
    "reason": is_text,
    "text": is_text,
    "usage": is_usage,
}
_NOTES: Fields = {**_OF_A_PASSAGE, "notes": is_texts}


@dataclass(frozen=True, slots=True)
class _Text:
    """A text that a person may decide on; `facts` are None where they are not counted yet."""

    id: str
    text: str
    facts: list[str] | None = None


class Store:
    """variants.jsonl, rejected.jsonl and notes.jsonl (of styles with a preparation) of one run
    folder, none in memory.

    Rows of earlier recipes stay there unused. `decisions` are a person's: what `variants` returns
    follows them.
    """

    def __init__(self, run_dir: Path, catalog: Mapping[str, Style]) -> None:
        """Open them. Raises `InputError` if a file is damaged, `DiskError` if it cannot be
        written."""
        self._catalog = catalog
        self.decisions, self.applied = read_decisions(run_dir), set[str]()
        self.variants_path = run_dir / VARIANTS
        self.rejected_path = run_dir / REJECTED
        with contextlib.ExitStack() as stack:
            # A power cut may take the last rows; the answers in them are in the cache.
            variants = IndexedRows(self.variants_path, "id", _VARIANT, _FIX)
            self._variants = stack.enter_context(variants)
            rejected = IndexedRows(self.rejected_path, "variant_id", _REFUSED, _FIX)
            self._rejected = stack.enter_context(rejected)
            notes = IndexedRows(run_dir / NOTES, "id", _NOTES, _FIX)
            self._notes = stack.enter_context(notes)
            self._open = stack.pop_all()

    @property
    def n_variants(self) -> int:
        """The number of stored variants."""
        return len(self._variants)

    def variants(self, requests: Sequence[VariantRequest]) -> dict[str, Variant]:
        """Return the stored variants of `requests` by id, read from the file; of several with one
        id the last."""
        found: dict[str, Variant] = {}
        for request in requests:
            variant: Variant | None = None
            rows = self._variants.get(request.id)
            if rows:
                variant = self._variant(rows[-1])
            if self.decisions:
                variant = self._decided(request, variant)
            if variant is not None:
                found[request.id] = variant
        return found

    def _decided(self, request: VariantRequest, variant: Variant | None) -> Variant | None:
        """Return a variant without the texts that were dropped, with the edited ones, and the
        refused ones that were kept.

        Its checks then have the `ids` of its texts; the facts of a text that a person decided on
        are None: not counted yet.
        """
        texts = self._decidable_texts(request, variant)
        decided = {text.id for text in texts if text.id in self.decisions}
        if not decided:
            return variant
        self.applied.update(decided)
        kept = []
        for text in texts:
            decision = self.decisions.get(text.id, {})
            if decision.get("text"):
                text = _Text(text.id, decision["text"])
            if decision.get("decision") != "drop":
                kept.append(text)
        if variant is None:
            if not kept:
                return None  # a refused text that was dropped: as before
            variant = self._kept_variant(request)
        return replace(
            variant,
            text="".join(text.text for text in kept[:1]),
            more=tuple(text.text for text in kept[1:]),
            checks={
                **variant.checks,
                "ids": [text.id for text in kept],
                "facts": [text.facts for text in kept],
            },
        )

    def _decidable_texts(self, request: VariantRequest, variant: Variant | None) -> list[_Text]:
        """Return the texts of a variant, and the refused ones that a person decided on."""
        texts: list[_Text] = []
        if variant is not None:
            for index, text in enumerate(variant.texts):
                facts = variant.checks["facts"][index]
                texts.append(_Text(text_id(request.id, index), text, facts))
        for row in self.refusals([request]):
            if row["id"] not in self.decisions:
                continue
            parts: tuple[str, ...] = ()
            if self.decisions[row["id"]]["decision"] == "keep":
                parts = self._catalog[row["style"]].read(row["text"], "", "").texts
            # What the parser finds nothing in is kept as it came.
            for index, part in enumerate(parts or (row["text"],)):
                texts.append(_Text(text_id(row["id"], index), part))
        return texts

    def _kept_variant(self, request: VariantRequest) -> Variant:
        """Return an empty variant for a request all of whose answers were refused."""
        row = next(row for row in self.refusals([request]) if row["id"] in self.decisions)
        return Variant(
            id=request.id,
            passage_id=row["passage_id"],
            document_id=row["document_id"],
            style=row["style"],
            sample=request.sample,
            text="",
            generator="",
            prompt_hash=request.prompt_hash,
            # The tokens of its answers are counted with the refused ones.
            usage=Usage(),
        )

    def _variant(self, row: Row) -> Variant:
        try:
            typed = {"usage": Usage(**row["usage"]), "more": tuple(row["more"])}
            variant = Variant(**{**row, **typed})
            n_facts = len(variant.checks.get("facts", ()))
            if n_facts != len(variant.texts):
                raise TypeError(f"texts: {len(variant.texts)}, with facts: {n_facts}")
        except TypeError as error:
            raise InputError(
                f"{self.variants_path}: a row is no variant ({error}). {_FIX}"
            ) from error
        return variant

    def refusals(self, requests: Sequence[VariantRequest]) -> list[Row]:
        """Return the refused answers of `requests`, each once."""
        rows: dict[str, Row] = {}
        for request in requests:
            for row in self._rejected.get(request.id):
                rows[row["id"]] = row
        return list(rows.values())

    def accept(self, variant: Variant) -> None:
        """Store a variant whose texts passed the checks."""
        self._variants.add(variant.id, variant)

    def refuse(
        self,
        group: Group,
        request: VariantRequest,
        attempt: int,
        completion: Completion,
        verdict: Verdict,
    ) -> None:
        """Store a refused answer with its reason, once."""
        identity = content_id("refused", request.id, attempt)
        # A rerun after a kill may read the same answer from the cache again.
        if any(row["id"] == identity for row in self.refusals([request])):
            return
        row: Row = {
            "id": identity,
            "variant_id": request.id,
            "passage_id": group.passage.id,
            "document_id": group.passage.document_id,
            "style": group.style.name,
            "sample": request.sample,
            "attempt": attempt,
            "reason": verdict.reason,
            "detail": verdict.detail,
            "text": completion.text,
            "usage": asdict(completion.usage),
        }
        self._rejected.add(request.id, row)

    def add_all(self, others: Store) -> None:
        """Store what the store of a shard has, once."""
        self._variants.add_all(others._variants)
        self._rejected.add_all(others._rejected)
        self._notes.add_all(others._notes)

    def notes(self, notes_id: str) -> tuple[str, ...] | None:
        """Return the items stored under an id of `notes_id`, None if there is no answer yet."""
        rows = self._notes.get(notes_id)
        if not rows:
            return None
        return tuple(rows[-1]["notes"])

    def add_notes(
        self, notes_id: str, group: Group, style: str, name: str, notes: tuple[str, ...]
    ) -> None:
        """Store the items that the preparation `name` of a style ("": of every style) made of one
        answer."""
        row: Row = {
            "id": notes_id,
            "passage_id": group.passage.id,
            "document_id": group.passage.document_id,
            "style": style,
            "preparation": name,
            "notes": list(notes),
        }
        self._notes.add(notes_id, row)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
