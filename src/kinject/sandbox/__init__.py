"""The embedded fictional country Tarvenia: people, entries about them, questions, and a corpus for a small base model."""

from kinject.sandbox.build import write_base_corpus, write_sandbox

__all__ = ["write_base_corpus", "write_sandbox"]
