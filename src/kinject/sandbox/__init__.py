"""The embedded fictional country Tarvenia: people, entries about them, questions, a small base model and its corpus."""

from kinject.sandbox.base import BASE_CORPUS, BASE_RUN, REPLAY_CORPUS, base_id, holds_shipped_base, write_base
from kinject.sandbox.build import write_base_corpus, write_replay_corpus, write_sandbox, write_sentence_rows
from kinject.sandbox.chat import CHAT_CORPUS, write_chat_questions, write_dialogues

__all__ = [
    "BASE_CORPUS", "BASE_RUN", "CHAT_CORPUS", "REPLAY_CORPUS", "base_id", "holds_shipped_base", "write_base",
    "write_base_corpus", "write_chat_questions", "write_dialogues", "write_replay_corpus", "write_sandbox", "write_sentence_rows",
]  # fmt: skip
