"""The variants, refused answers and notes of a run folder, each in an append-only file."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kinject.augment.checks.checker import Verdict
from kinject.augment.plan import Group, VariantRequest
from kinject.disk import Journal, Row, content_id
from kinject.errors import InputError
from kinject.llm.limits import render_endpoints
from kinject.llm.sender import Sender
from kinject.types import Completion, Tabular, Usage, Variant


@dataclass(frozen=True, kw_only=True)
class WritingResult(Tabular):
    """What a run of a writer came to.

    `refused` counts by reason, `failed` what got no answer by error. `tokens_in` and `tokens_out` are those of every stored
    answer, refused ones too; `tokens_thinking` is the part of `tokens_out` that a reasoning model's thinking took. `n_sent`
    and `n_cached` are of this run alone. `cost` is that of everything ever answered into the run folder, in the currency of
    the prices. `endpoints` counts this run's answers by endpoint, where there are several. `n_cut` counts the passages that
    end inside a sentence, a table row or a code block.
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
    endpoints: Mapping[str, Any]

    def counts(self, *more: str) -> dict[str, Any]:
        """Return the manifest's counts, with the fields `more`."""
        names = (
            "n_documents", "n_passages", "n_cut", "asked", "got", "refused", "failed", "tokens_in", "tokens_out",
            "tokens_thinking", "cost", "out_of_budget", *more,
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def render_failed(self, what: str) -> list[str]:
        """Return lines about what got no answer, under the heading `what`; none if all did."""
        return ["", what, *(f"{n:>8}  {error}" for error, n in self.failed.items())] if self.failed else []

    def render_requests(self) -> list[str]:
        """Return lines about requests, tokens and endpoints."""
        line = f"{self.n_sent} requests sent in this run, {self.n_cached} answered from the cache"
        if self.tokens_in or self.tokens_out:
            thinking = f", {self.tokens_thinking:,} of them thinking" if self.tokens_thinking else ""
            line += f"; {self.tokens_in:,} tokens in, {self.tokens_out:,} out{thinking}"
        return [line, *render_endpoints(self.endpoints)]

    def render_cost(self) -> list[str]:
        """Return lines about cost and budget; none where there are no prices."""
        cost = f"cost {self.cost:.4f}, everything answered into {self.run_dir} included"
        stopped = "Stopped before the budget was exceeded."
        return [*[cost] * bool(self.cost), *[stopped] * self.out_of_budget]


def sent_by(sender: Sender) -> dict[str, Any]:
    """Return the fields of a `WritingResult` that its sender knows."""
    traffic = sender.traffic
    return {
        "n_sent": traffic.n_sent, "n_cached": traffic.n_cached, "cost": sender.budget.spent,
        "out_of_budget": sender.out_of_budget, "endpoints": traffic.endpoints(),
    }  # fmt: skip


class IndexedRows:
    """An append-only file of rows that are found by the text in their field `key`, none in memory."""

    def __init__(self, path: Path, key: str, required: str, fix: str = "") -> None:
        """Open it. Raises `InputError` for a row without `key` or the field `required`, `DiskError` on I/O."""
        self._offsets: dict[str, list[int]] = defaultdict(list)

        def index(offset: int, row: Row) -> None:
            for name in (key, required):
                if not isinstance(row.get(name), str):
                    raise InputError(f"{path}: a row without {name!r}. The file was changed by hand; move it away.")
            self._offsets[row[key]].append(offset)

        self._journal = Journal(path, sync=False, on_row=index, fix=fix)

    def get(self, name: str) -> list[Row]:
        """Return the rows with this text."""
        return [self._journal.row_at(offset) for offset in self._offsets.get(name, ())]

    def add(self, name: str, row: object) -> None:
        """Store a row (a mapping or a dataclass) with this text."""
        self._offsets[name].append(self._journal.append(row))

    def __len__(self) -> int:
        return len(self._offsets)

    def __enter__(self) -> IndexedRows:
        self._journal.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._journal.__exit__(None, None, None)


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
            self._variants = stack.enter_context(IndexedRows(self.variants_path, "id", "text", _FIX))
            self._rejected = stack.enter_context(IndexedRows(self.rejected_path, "variant_id", "reason", _FIX))
            self._notes = stack.enter_context(IndexedRows(run_dir / "notes.jsonl", "id", "style", _FIX))
            self._open = stack.pop_all()

    @property
    def n_variants(self) -> int:
        """The number of stored variants."""
        return len(self._variants)

    def variants(self, requests: Sequence[VariantRequest]) -> dict[str, Variant]:
        """Return the stored variants of `requests` by id, read from the file; of several with one id the last."""
        matching = ((request.id, self._variants.get(request.id)) for request in requests)
        return {name: self._variant(rows[-1]) for name, rows in matching if rows}

    def _variant(self, row: Row) -> Variant:
        try:
            return Variant(**{**row, "usage": Usage(**row["usage"]), "more": tuple(row.get("more", ()))})
        except (TypeError, KeyError) as error:
            raise InputError(f"{self.variants_path}: a row is no variant ({error}). {_FIX}") from error

    def refusals(self, requests: Sequence[VariantRequest]) -> list[Row]:
        """Return the refused answers of `requests`, each once."""
        rows = (row for request in requests for row in self._rejected.get(request.id))
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
        self._variants.add(variant.id, variant)

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
        self._rejected.add(request.id, row)

    def notes(self, notes_id: str) -> tuple[str, ...] | None:
        """Return the items stored under an id of `Plan.notes_id`, None if there is no answer yet."""
        rows = self._notes.get(notes_id)
        return tuple(rows[-1]["notes"]) if rows else None

    def add_notes(self, notes_id: str, group: Group, style: str, name: str, notes: tuple[str, ...]) -> None:
        """Store the items that the preparation `name` of a style ("": of every style) made of one answer."""
        row: Row = {
            "id": notes_id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": style, "preparation": name, "notes": list(notes),
        }  # fmt: skip
        self._notes.add(notes_id, row)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
