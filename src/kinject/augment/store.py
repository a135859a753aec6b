"""The variants, refused answers and notes of a run folder, each in an append-only file."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kinject.augment.checks.checker import Verdict
from kinject.augment.plan import Group, VariantRequest
from kinject.augment.styles import Style
from kinject.disk import Journal, Row, RowLike, content_id, read_jsonl, write_jsonl
from kinject.errors import InputError
from kinject.llm.sender import Sender
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
        names = (
            "n_documents", "n_passages", "n_cut", "asked", "got", "refused", "failed", "tokens_in", "tokens_out",
            "tokens_thinking", "cost", "out_of_budget", *more,
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def render_failed(self, what: str) -> list[str]:
        """Return lines about what got no answer, under the heading `what`; none if all did."""
        return (
            ["", what, *(f"{n:>8}  {error}" for error, n in self.failed.items())]
            if self.failed
            else []
        )

    def render_requests(self) -> list[str]:
        """Return a line about requests and tokens."""
        line = f"{self.n_sent} requests sent in this run, {self.n_cached} answered from the cache"
        if self.tokens_in or self.tokens_out:
            thinking = (
                f", {self.tokens_thinking:,} of them thinking" if self.tokens_thinking else ""
            )
            line += f"; {self.tokens_in:,} tokens in, {self.tokens_out:,} out{thinking}"
        return [line]

    def render_cost(self) -> list[str]:
        """Return lines about cost and budget; none where there are no prices."""
        cost = f"cost {self.cost:.4f}, everything answered into {self.run_dir} included"
        stopped = "Stopped before the budget was exceeded."
        return [*[cost] * bool(self.cost), *[stopped] * self.out_of_budget]


TOKENS = ("tokens_in", "tokens_out", "tokens_thinking")


def common_fields(
    sender: Sender, passages: Mapping[str, int], tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the fields of a `WritingResult` that follow from its sender, from counts of passages
    and from those of tokens."""
    traffic = sender.traffic
    return {
        **{f"n_{name}": n for name, n in passages.items()}, **{name: tokens.get(name, 0) for name in TOKENS},
        "n_sent": traffic.n_sent, "n_cached": traffic.n_cached, "cost": sender.budget.spent,
        "out_of_budget": sender.out_of_budget,
    }  # fmt: skip


DECISIONS = "decisions.jsonl"
"""The file of a run folder in which a person keeps, drops and edits single texts or questions."""


def read_decisions(run_dir: Path) -> dict[str, Row]:
    """Return the decisions on the texts or questions of a run by id; of two on one the last counts.

    Raises `InputError` (file:line) for a row without an id, of another decision, or that edits
    without a text or question.
    """
    path, rows = run_dir / DECISIONS, dict[str, Row]()
    for number, row in read_jsonl(path) if path.exists() else ():
        edited = [row.get(key) for key in ("text", "question", "answer") if key in row] + row.get(
            "wrong", []
        )
        if not isinstance(row.get("id"), str) or row.get("decision") not in (
            "keep",
            "drop",
            "edit",
        ):
            raise InputError(
                f"{path}:{number}: expected an id, and keep, drop or edit as its decision."
            )
        if row["decision"] == "edit" and (
            not edited or not all(isinstance(text, str) and text.strip() for text in edited)
        ):
            raise InputError(
                f"{path}:{number}: an edit needs a text that is not empty, or question, answer and wrong."
            )
        rows[row["id"]] = row
    return rows


def write_decision(run_dir: Path, row: Row) -> None:
    """Add a decision, or take back the one on the same id (``undo``). Raises as `read_decisions`,
    before it writes."""
    rows = read_decisions(run_dir)
    rows.pop(row["id"], None)
    if row["decision"] != "undo":
        rows[row["id"]] = row
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
    return ["", f"decisions of {DECISIONS}: {', '.join(words)}"] if words else []


def text_id(variant_id: str, index: int) -> str:
    """Return the id of one text of an answer: that of its variant for the first."""
    return content_id(variant_id, index) if index else variant_id


class IndexedRows(Journal):
    """An append-only file of rows that are found by the text in their field `key`, none in memory."""

    def __init__(self, path: Path, key: str, required: str, fix: str = "") -> None:
        """Open it. Raises `InputError` for a row without `key` or the field `required`, `DiskError`
        on I/O."""
        self._offsets: dict[str, list[int]] = defaultdict(list)

        def index(offset: int, row: Row) -> None:
            for name in (key, required):
                if not isinstance(row.get(name), str):
                    raise InputError(
                        f"{path}: a row without {name!r}. The file was changed by hand; move it away."
                    )
            self._offsets[row[key]].append(offset)

        super().__init__(path, sync=False, on_row=index, fix=fix)

    def get(self, name: str) -> list[Row]:
        """Return the rows with this text."""
        return [self.row_at(offset) for offset in self._offsets.get(name, ())]

    def add(self, name: str, row: RowLike) -> None:
        """Store a row (a mapping or a dataclass) with this text."""
        self._offsets[name].append(self.append(row))

    def __len__(self) -> int:
        return len(self._offsets)


_FIX = (
    "Move variants.jsonl, rejected.jsonl and notes.jsonl away and run again: they are written again from the answers in "
    "cache.sqlite, where there is one, and nothing is paid twice."
)


class Store:
    """variants.jsonl, rejected.jsonl and notes.jsonl (of styles with a preparation) of one run
    folder, none in memory.

    Rows of earlier recipes stay there unused. `decisions` are a person's: what `variants` returns
    follows them.
    """

    def __init__(self, run_dir: Path, catalog: Mapping[str, Style]) -> None:
        """Open them. Raises `InputError` if a file is damaged, `DiskError` if it cannot be written."""
        self._catalog = catalog
        self.decisions, self.applied = read_decisions(run_dir), set[str]()
        self.variants_path = run_dir / "variants.jsonl"
        self.rejected_path = run_dir / "rejected.jsonl"
        with contextlib.ExitStack() as stack:
            # A power cut may take the last rows; the answers in them are in the cache.
            self._variants = stack.enter_context(
                IndexedRows(self.variants_path, "id", "text", _FIX)
            )
            self._rejected = stack.enter_context(
                IndexedRows(self.rejected_path, "variant_id", "reason", _FIX)
            )
            self._notes = stack.enter_context(
                IndexedRows(run_dir / "notes.jsonl", "id", "style", _FIX)
            )
            self._open = stack.pop_all()

    @property
    def n_variants(self) -> int:
        """The number of stored variants."""
        return len(self._variants)

    def variants(self, requests: Sequence[VariantRequest]) -> dict[str, Variant]:
        """Return the stored variants of `requests` by id, read from the file; of several with one
        id the last."""
        matching = ((request, self._variants.get(request.id)) for request in requests)
        stored = (
            (request, self._variant(rows[-1]) if rows else None) for request, rows in matching
        )
        if self.decisions:
            stored = ((request, self._decided(request, variant)) for request, variant in stored)
        return {request.id: variant for request, variant in stored if variant is not None}

    def _decided(self, request: VariantRequest, variant: Variant | None) -> Variant | None:
        """Return a variant without the texts that were dropped, with the edited ones, and the
        refused ones that were kept.

        Its checks then have the `ids` of its texts; the facts of a text that a person decided on
        are None: not counted yet.
        """
        texts: list[tuple[str, str, Any]] = []
        for index, text in enumerate(variant.texts if variant else ()):
            texts.append(
                (
                    text_id(request.id, index),
                    text,
                    variant.checks["facts"][index] if variant else None,
                )
            )
        refused = [row for row in self.refusals([request]) if row["id"] in self.decisions]
        for row in refused:
            decision = self.decisions[row["id"]]["decision"]
            read = (
                self._catalog[row["style"]].read(row["text"], "", "").texts
                if decision == "keep"
                else ()
            )
            texts += [
                (text_id(row["id"], index), text, None)
                for index, text in enumerate(read or (row["text"],))
            ]
        found = {name: self.decisions[name] for name, *_ in texts if name in self.decisions}
        if not found:
            return variant
        self.applied.update(found)
        kept = [
            (name, found[name]["text"], None) if found.get(name, {}).get("text") else (name, text, facts)
            for name, text, facts in texts if name not in found or found[name]["decision"] != "drop"
        ]  # fmt: skip
        if variant is None and not kept:
            return None  # a refused text that was dropped: as before
        if variant is None:
            row = refused[0]
            variant = Variant(request.id, row["passage_id"], row["document_id"], row["style"], request.sample, "", "",
                              request.prompt_hash, Usage())  # fmt: skip
        left = [text for _, text, _ in kept]
        decided = {"ids": [name for name, *_ in kept], "facts": [facts for *_, facts in kept]}
        return replace(
            variant,
            text=left[0] if left else "",
            more=tuple(left[1:]),
            checks={**variant.checks, **decided},
        )

    def _variant(self, row: Row) -> Variant:
        try:
            return Variant(
                **{**row, "usage": Usage(**row["usage"]), "more": tuple(row.get("more", ()))}
            )
        except (TypeError, KeyError) as error:
            raise InputError(
                f"{self.variants_path}: a row is no variant ({error}). {_FIX}"
            ) from error

    def refusals(self, requests: Sequence[VariantRequest]) -> list[Row]:
        """Return the refused answers of `requests`, each once."""
        rows = (row for request in requests for row in self._rejected.get(request.id))
        return list({row["id"]: row for row in rows}.values())

    def accept(
        self, group: Group, request: VariantRequest, attempt: int, completion: Completion, generator: str,
        texts: Sequence[str], measures: Mapping[str, Any],
    ) -> None:  # fmt: skip
        """Store the accepted `texts` of an answer, none for NONE; `attempt` answers were refused
        before it."""
        variant = Variant(
            id=request.id, passage_id=group.passage.id, document_id=group.passage.document_id, style=group.style.name,
            sample=request.sample, text=texts[0] if texts else "", generator=generator, prompt_hash=request.prompt_hash,
            usage=completion.usage, checks=measures, attempt=attempt,
            more=tuple(texts[1:]),
        )  # fmt: skip
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

    def add_notes(
        self, notes_id: str, group: Group, style: str, name: str, notes: tuple[str, ...]
    ) -> None:
        """Store the items that the preparation `name` of a style ("": of every style) made of one
        answer."""
        row: Row = {
            "id": notes_id, "passage_id": group.passage.id, "document_id": group.passage.document_id,
            "style": style, "preparation": name, "notes": list(notes),
        }  # fmt: skip
        self._notes.add(notes_id, row)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
