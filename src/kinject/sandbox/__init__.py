"""The embedded fictional country Tarvenia: people, entries about them, questions, a small base model and its corpus."""

from kinject.sandbox.base import BASE_CORPUS, BASE_RUN, base_id, holds_shipped_base, write_base
from kinject.sandbox.build import write_base_corpus, write_sandbox, write_sentence_rows

__all__ = [
    "BASE_CORPUS", "BASE_RUN", "base_id", "holds_shipped_base", "write_base", "write_base_corpus", "write_sandbox",
    "write_sentence_rows",
]  # fmt: skip
