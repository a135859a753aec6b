"""What the batch API is asked over the wire, one call each; its answers are untrusted and read field by field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai


async def upload(client: openai.AsyncOpenAI, content: bytes) -> str:
    """Return the name of a new file of requests."""
    raw = await client.files.with_raw_response.create(file=("requests.jsonl", content), purpose="batch")
    return str(_object(raw)["id"])


async def make_batch(client: openai.AsyncOpenAI, submission: str, file: str) -> str:
    """Return the name of a new batch over a file of requests, with our name for it in its metadata."""
    raw = await client.batches.with_raw_response.create(
        input_file_id=file, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"submission": submission},
    )  # fmt: skip
    return str(_object(raw)["id"])


async def find_batch(client: openai.AsyncOpenAI, submission: str) -> str | None:
    """Return the name of the batch with our `submission` in its metadata, None where there is none."""
    after: dict[str, Any] = {}
    seen: set[str] = set()
    while True:
        page = _object(await client.batches.with_raw_response.list(limit=100, **after))
        names = [str(batch["id"]) for batch in page["data"]]
        for name, batch in zip(names, page["data"], strict=True):
            metadata = batch.get("metadata")
            if isinstance(metadata, dict) and metadata.get("submission") == submission:
                return name
        if not page.get("has_more") or not names or names[-1] in seen:
            return None
        seen.update(names)
        after = {"after": names[-1]}


async def look_at_batch(client: openai.AsyncOpenAI, name: str) -> dict[str, Any]:
    """Return a batch as the endpoint describes it; its status is ``gone`` where the endpoint does not know it."""
    import openai

    try:
        found = _object(await client.batches.with_raw_response.retrieve(name))
    except openai.NotFoundError:
        return {"status": "gone"}
    return {**found, "status": str(found["status"])}


async def content_of(client: openai.AsyncOpenAI, file: str) -> bytes:
    """Return what a file of results holds."""
    content = bytes((await client.files.content(file)).content)
    if content.lstrip()[:1] not in (b"{", b""):
        raise ValueError("no file of results, but a page")  # of something in between: the results are still there
    return content


def _object(raw: Any) -> dict[str, Any]:
    """Return the JSON object in a raw response. Raises `ValueError` where there is none."""
    value = json.loads(raw.http_response.content)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def errors_of(batch: Mapping[str, Any]) -> str:
    """Return what a batch says went wrong."""
    errors = batch.get("errors")
    rows = errors.get("data") if isinstance(errors, dict) else None
    said = [str(row.get("message")) for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return "; ".join(said) or "it does not say why"
