"""Documents, passages, question files, corpus rows, tokens, packing and mixing. Imports neither torch nor transformers."""

from kinject.corpus.corpus_file import CorpusFile
from kinject.corpus.laid_rows import LaidRows, TrainingRow
from kinject.corpus.mixture import Joined, draw, wanted_tokens
from kinject.corpus.packing import Layout, lay_out
from kinject.corpus.rows import CorpusRow, read_corpus
from kinject.corpus.token_store import TokenStore, entry_key, stored
from kinject.corpus.tokens import IGNORED, TokenAccount, Tokenization, TokenRow, tokenize_rows

__all__ = [
    "IGNORED",
    "CorpusFile",
    "CorpusRow",
    "Joined",
    "LaidRows",
    "Layout",
    "TokenAccount",
    "TokenRow",
    "TokenStore",
    "Tokenization",
    "TrainingRow",
    "draw",
    "entry_key",
    "lay_out",
    "read_corpus",
    "stored",
    "tokenize_rows",
    "wanted_tokens",
]
