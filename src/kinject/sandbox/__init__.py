"""The embedded fictional country Tarvenia: people, entries about them, questions, a small base
model and its corpus."""

from kinject.sandbox.build import (
    write_base_corpus,
    write_missing_inputs,
    write_sandbox,
    write_sentence_rows,
)
from kinject.sandbox.chat import CHAT_CORPUS, write_chat_questions, write_dialogues
from kinject.sandbox.shipped import BASE, BASE_CORPUS, INSTRUCT, ShippedRun

__all__ = [
    "BASE",
    "BASE_CORPUS",
    "CHAT_CORPUS",
    "INSTRUCT",
    "ShippedRun",
    "write_base_corpus",
    "write_chat_questions",
    "write_dialogues",
    "write_missing_inputs",
    "write_sandbox",
    "write_sentence_rows",
]
