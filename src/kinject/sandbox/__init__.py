"""The embedded fictional country: people, entries about them, questions on them, and a corpus for a small base model."""

from kinject.sandbox.base import MIXTURE, Mixture, generate_base_corpus, render_prompt, write_base_corpus
from kinject.sandbox.build import write_sandbox
from kinject.sandbox.facts import Country, Person, create_country
from kinject.sandbox.grammar import STYLE, Style, paraphrase, parse_entry, render_entry
from kinject.sandbox.pools import ATTRIBUTES, POOLS
from kinject.sandbox.questions import create_questions, create_reverse_questions

__all__ = [
    "ATTRIBUTES",
    "MIXTURE",
    "POOLS",
    "STYLE",
    "Country",
    "Mixture",
    "Person",
    "Style",
    "create_country",
    "create_questions",
    "create_reverse_questions",
    "generate_base_corpus",
    "paraphrase",
    "parse_entry",
    "render_entry",
    "render_prompt",
    "write_base_corpus",
    "write_sandbox",
]
