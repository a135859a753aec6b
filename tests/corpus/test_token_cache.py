"""Tokenised corpora are kept by content, whole or not at all, and need less memory than their tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization, TokenRow, cached_tokens, entry_key
from kinject.models import train_tokenizer

ROWS = [
    TokenRow("0", "d", "original", (5, 70_000, 7), (False, True, True)),
    TokenRow("1", "", "original", (8,), (False,)),
    TokenRow("2", "d", "original", (9, 10), (False, False)),
]


def _entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    store = cached_tokens(tmp_path, "key", lambda: ROWS, "replay")
    assert [(list(row.input_ids), list(row.learned)) for row in store] == [
        (list(row.input_ids), list(row.learned)) for row in ROWS
    ]
    assert [row.document_id for row in store] == ["d", "", "d"]
    assert {row.origin for row in store} == {"replay"}
    assert len(store[1:]) == 2
    assert list(cached_tokens(tmp_path, "none", lambda: [], "")) == []


def test_an_entry_is_made_once_and_read_by_whoever_needs_it(tmp_path: Path) -> None:
    made = []

    def make() -> Iterator[TokenRow]:
        made.append(1)
        yield from ROWS

    threads = [
        threading.Thread(target=cached_tokens, args=(tmp_path, "key", make, "")) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_work_that_is_cut_short_leaves_no_entry(tmp_path: Path) -> None:
    def torn() -> Iterator[TokenRow]:
        yield ROWS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_tokens(tmp_path, "key", torn, "")
    assert _entries(tmp_path) == []
    assert len(cached_tokens(tmp_path, "key", lambda: ROWS, "")) == 3


def test_a_full_disk_is_one_line_and_leaves_no_entry(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom kinject.corpus.tokenize import TokenRow, cached_tokens\n"
        "from kinject.errors import DiskError\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "rows = (TokenRow('0', '', '', [1] * 1000, [True] * 1000) for _ in range(1000))\n"
        "try: cached_tokens(Path(sys.argv[1]), 'key', lambda: rows, '')\n"
        "except DiskError as error: print(error)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert "the tokenised corpus cannot be written" in process
    assert "corpus.cache_dir" in process
    assert _entries(tmp_path) == []


def test_the_key_depends_on_corpus_tokenizer_and_settings(
    tmp_path: Path, tiny_tokenizer: Any
) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text(json.dumps({"text": "Arden was born in Lowmere."}) + "\n")
    tokenization = Tokenization()
    key = entry_key(CorpusFile(corpus).cache_key, tiny_tokenizer, tokenization)
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    assert entry_key(CorpusFile(copy).cache_key, tiny_tokenizer, tokenization) == key
    tiny_tokenizer.save_pretrained(tmp_path / "t")
    from kinject.models import load_tokenizer

    assert (
        entry_key(CorpusFile(corpus).cache_key, load_tokenizer(str(tmp_path / "t")), tokenization)
        == key
    )
    other = [
        entry_key(CorpusFile(corpus).cache_key, tiny_tokenizer, Tokenization(bos=False)),
        entry_key(CorpusFile(corpus).cache_key, tiny_tokenizer, tokenization, "drawn"),
    ]
    other.append(
        entry_key(
            CorpusFile(corpus).cache_key,
            train_tokenizer(["Other words entirely."] * 3, 300),
            tokenization,
        )
    )
    tiny_tokenizer.chat_template = "{{ messages }}"
    other.append(entry_key(CorpusFile(corpus).cache_key, tiny_tokenizer, tokenization))
    tiny_tokenizer.chat_template = None
    corpus.write_text(json.dumps({"text": "Arden was born in Farrow."}) + "\n")
    other.append(entry_key(CorpusFile(corpus).cache_key, tiny_tokenizer, tokenization))
    assert len({key, *other}) == 6


def test_a_damaged_entry_is_reported_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cached_tokens(tmp_path, "key", lambda: ROWS, "")
    (tmp_path / "key" / "ends.bin").unlink()
    assert [list(row.input_ids) for row in cached_tokens(tmp_path, "key", lambda: ROWS, "")] == [
        list(row.input_ids) for row in ROWS
    ]
    assert (
        "ends.bin: is missing, but SHA256SUMS beside it names it. It is made again." in caplog.text
    )


PREPARE = """
import resource, sys
from pathlib import Path
from kinject.corpus.packing import PackingConfig
from kinject.corpus import tokenize
from kinject.corpus.rows import CorpusFile
from kinject.corpus.tokenize import Tokenization
from kinject.train.data import CorpusPacker

class Words:
    bos_token_id, eos_token_id, bos_token, eos_token, chat_template = 901, 902, "a", "b", None
    def __call__(self, texts, **options):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}
    def save_pretrained(self, folder):
        (Path(folder) / "words").write_text("")

corpus, cache = Path(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2] else None
held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 24 * 2**20,) * 2)
data = CorpusPacker(Words(), Tokenization(), PackingConfig(512, "bfd_split"), 0, cache).pack(CorpusFile(corpus))
n = sum(len(data.rows[i].input_ids) for i in range(0, len(data.rows), 50))
print(data.account.source, data.account.lost, n > 0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mapped memory elsewhere")
@pytest.mark.usefixtures("forked")
def test_a_corpus_is_prepared_in_less_memory_than_its_tokens(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    text = " ".join(str(1000 + i) for i in range(1000))
    with path.open("w") as file:
        for number in range(700):
            file.write(
                json.dumps({"text": f"{number} {text}", "document_id": str(number % 300)}) + "\n"
            )

    def _run(cache: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", PREPARE, str(path), cache], capture_output=True, text=True
        )

    streamed = _run(str(tmp_path / "tokens"))
    assert streamed.stdout.split() == [str(700 * 1003), "0", "True"], streamed.stderr[-2000:]
    assert (
        "MemoryError" in _run("").stderr
    )  # the same with the tokens in memory: the limit is one that binds
