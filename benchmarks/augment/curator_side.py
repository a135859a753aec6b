"""Bespoke Curator on the requests of requests.py; run by it, in an environment of Curator's own.

    PYTHON benchmarks/augment/curator_side.py DOCUMENTS URL N_EACH IN_FLIGHT FOLDER

Its token counter is replaced by a quarter of the characters: the real one fetches its table from the net, and is slower.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

documents, url, n_each, in_flight, folder = sys.argv[1:]
os.environ.update(
    OPENAI_API_KEY="none", CURATOR_CACHE_DIR=folder, TELEMETRY_ENABLED="false", CURATOR_VIEWER="0",
    CURATOR_DISABLE_RICH_DISPLAY="1", HF_DATASETS_CACHE=f"{folder}/datasets", HF_HUB_OFFLINE="1",
)  # fmt: skip

import tiktoken  # noqa: E402


class _Quarter:
    def encode(self, text: str, **options: Any) -> range:
        return range(len(text) // 4)


tiktoken.get_encoding = lambda name: _Quarter()
tiktoken.encoding_for_model = lambda name: _Quarter()

from bespokelabs import curator  # noqa: E402


class Rewriter(curator.LLM):
    """One rewriting of a passage."""

    def prompt(self, row: dict[str, Any]) -> list[dict[str, str]]:
        """Return the messages."""
        return [
            {"role": "system", "content": "Rewrite."},
            {"role": "user", "content": f"<passage>\n{row['text']}\n</passage>\n\n{row['sample']}"},
        ]

    def parse(self, row: dict[str, Any], response: str) -> dict[str, str]:
        """Return the row of the result."""
        return {"text": response}


rows = [json.loads(line) for line in Path(documents).read_text().splitlines()]
requests = [
    {"text": row["text"], "sample": sample} for row in rows for sample in range(int(n_each))
]
rewriter = Rewriter(
    model_name="sandbox", backend="openai",
    backend_params={"base_url": url, "max_requests_per_minute": 10_000_000, "max_tokens_per_minute": 10**10,
                    "max_concurrent_requests": int(in_flight)},
)  # fmt: skip
result = rewriter(requests)
print(len(getattr(result, "dataset", result)))
