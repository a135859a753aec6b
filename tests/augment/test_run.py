import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kinject.augment import augment, render_summary
from kinject.disk import read_jsonl
from kinject.errors import DiskError, EndpointError, InputError
from kinject.recipe import Recipe
from kinject.sandbox.grammar import parse_entry

Make = Callable[..., Recipe]
pytestmark = pytest.mark.usefixtures("exact_copies_only", "forked")


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_every_passage_gets_its_paraphrases_in_the_order_of_documents(
    make_recipe: Make, documents: Path
) -> None:
    result = augment(make_recipe())
    assert (result.asked, result.got, result.short, result.n_documents, result.n_passages) == (
        36,
        36,
        False,
        12,
        12,
    )
    corpus = rows(result.corpus_path)
    assert [row["origin"] for row in corpus] == ["original", "variant", "variant", "variant"] * 12
    sources = rows(documents)
    assert [row["document_id"] for row in corpus] == [
        source["id"] for source in sources for _ in range(4)
    ]
    assert len({row["id"] for row in corpus}) == len({row["text"] for row in corpus}) == 48
    for row in corpus:
        source = next(source for source in sources if source["id"] == row["document_id"])
        assert parse_entry(row["text"]) == parse_entry(source["text"])


def test_a_rerun_asks_for_nothing_and_writes_the_same_corpus(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving()
    first = augment(make_recipe(server.url))
    before = first.corpus_path.read_bytes()
    again = augment(make_recipe(server.url))
    assert (first.n_sent, again.n_sent, server.n_requests) == (36, 0, 36)
    assert again.corpus_path.read_bytes() == before


def test_neither_concurrency_nor_latency_changes_the_corpus(
    make_recipe: Make, serving: Callable[..., Any], tmp_path: Path
) -> None:
    first = augment(make_recipe(serving().url, generator__concurrency=1)).corpus_path.read_bytes()
    second = augment(make_recipe(None)).corpus_path.read_bytes()
    texts = [
        [json.loads(line)["text"] for line in corpus.splitlines()] for corpus in (first, second)
    ]
    assert texts[0] == texts[1]


def test_refused_answers_are_kept_apart_with_a_reason_and_asked_for_again(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    seen = {"truncated": "truncated", "null": "no answer", "filtered": "filtered", "refusal": "refusal",
            "echo": "echo", "no_choices": "no answer", "changed": "number"}  # fmt: skip
    faults = dict.fromkeys((*seen, "wrapped", "trailing"), 0.06)
    server = serving(faults=faults)
    result = augment(make_recipe(server.url, max_attempts=40))
    assert result.got == 36
    expected: dict[str, int] = {}
    for fault, n in server.met.items():
        if fault in seen:  # what surrounds a text is taken off
            expected[seen[fault]] = expected.get(seen[fault], 0) + n
    assert result.refused == expected
    assert result.repairs == {"preamble": server.met["wrapped"], "closing": server.met["trailing"]}
    rejected = rows(result.rejected_path)
    assert len(rejected) == sum(expected.values())
    assert all(row["reason"] and "text" in row and row["variant_id"] for row in rejected)
    assert all(parse_entry(row["text"]) for row in rows(result.corpus_path))


def test_a_paraphrase_that_is_never_good_is_given_up_and_the_result_is_short(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving(faults={"refusal": 1.0})
    result = augment(make_recipe(server.url, max_attempts=2, styles={"paraphrase": 2}))
    assert (result.got, result.short, result.refused) == (0, True, {"refusal": 48})
    assert server.n_requests == 48
    summary = render_summary(result)
    assert "paraphrase            24       0       0       48       0" in summary
    assert "      48  refusal" in summary
    assert "Short by 24: refusal: read " in summary
    # What was cut is cut again: its limit comes before anything else, however rare it is.
    weak = replace(result, refused={"name": 40, "truncated": 3})
    assert (
        "Short by 24: truncated: raise augment.generator.max_tokens first; name: read "
        in render_summary(weak)
    )
    assert render_summary(replace(result, refused={"truncated": 3})).endswith("max_tokens first.")
    assert augment(make_recipe(server.url, max_attempts=2, styles={"paraphrase": 2})).n_sent == 0
    greedy = make_recipe(
        server.url, max_attempts=2, styles={"paraphrase": 2}, generator__temperature=0
    )
    assert augment(greedy).refused == {
        "refusal": 24
    }  # the same prompt again would bring the same text


def test_faults_that_pass_are_tried_again_until_all_is_there(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving(faults={"429": 0.1, "500": 0.1, "reset": 0.1, "malformed": 0.1})
    result = augment(make_recipe(server.url))
    assert (result.got, result.refused) == (36, {})
    assert {"429", "500", "reset", "malformed"} == set(server.met)


def test_a_request_that_fails_for_good_is_reported_and_asked_again_by_the_next_run(
    make_recipe: Make, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 1)
    server = serving(faults={"500": 0.3})
    result = augment(make_recipe(server.url))
    missing = result.asked - result.got
    assert missing == sum(result.failed.values()) == server.met["500"] > 0
    assert "answered 500" in next(iter(result.failed))
    failures = rows(result.failures_path)
    assert len(failures) == missing
    assert all(
        "answered 500" in row["error"] and row["variant_id"] and row["document_id"]
        for row in failures
    )
    assert "500" in render_summary(result)
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 8)
    again = augment(make_recipe(server.url))
    assert (again.got, again.n_sent > missing - 1, rows(again.failures_path)) == (36, True, [])


def test_a_refused_key_stops_the_run_and_names_its_variable(
    make_recipe: Make, serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = serving(key="right")
    recipe = make_recipe(server.url, generator__concurrency=4, generator__api_key_env="MY_KEY")
    monkeypatch.setenv("MY_KEY", "sk-secret-wrong")
    with pytest.raises(EndpointError, match=r"the key is refused.*variable MY_KEY") as caught:
        augment(recipe)
    assert server.n_requests <= 4
    assert "sk-secret" not in str(caught.value)
    assert not any(
        "sk-secret" in file.read_text(errors="replace") for file in (tmp_path / "run").iterdir()
    )


def test_a_key_revoked_half_way_keeps_what_was_answered(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving(revoke_after=15, latency=0.01)
    with pytest.raises(EndpointError, match="rewritings are stored; the same command resumes"):
        augment(make_recipe(server.url, generator__concurrency=4))
    assert server.n_requests - server.answered.total() <= 4
    server.revoke_after = None
    result = augment(make_recipe(server.url, generator__concurrency=4))
    assert result.got == 36
    assert server.answered.total() == len(server.answered) == 36


def test_a_text_that_the_sandbox_cannot_read_is_reported_with_its_line(
    make_recipe: Make, documents: Path
) -> None:
    with documents.open("a") as file:
        file.write('{"text": "Something else entirely."}\n')
    with pytest.raises(InputError, match=r"documents\.jsonl:13: the sandbox generator cannot read"):
        augment(make_recipe())


def test_a_bad_document_costs_nothing(
    make_recipe: Make, documents: Path, serving: Callable[..., Any]
) -> None:
    server = serving()
    with documents.open("a") as file:
        file.write('{"text": ""}\n')
    with pytest.raises(InputError, match=r"documents\.jsonl:13: empty document"):
        augment(make_recipe(server.url))
    assert server.n_requests == 0


def test_a_run_folder_in_use_is_refused(make_recipe: Make, serving: Callable[..., Any]) -> None:
    held = threading.Event()
    server = serving(held=held)
    recipe = make_recipe(server.url)
    first = threading.Thread(target=augment, args=(recipe,))
    first.start()
    while not server.n_requests:
        time.sleep(0.01)
    try:
        with pytest.raises(DiskError, match="in use by process"):
            augment(recipe)
    finally:
        held.set()
        first.join()


SCRIPT = """
import sys
from pathlib import Path
from kinject.augment import augment
from kinject.augment.checks import checker
from kinject.recipe import read_recipe
checker.MAX_OVERLAP = 0.99
try:
    augment(read_recipe(Path(sys.argv[1]), ["augment.styles.paraphrase=6"], verb="augment"))
except KeyboardInterrupt:
    sys.exit(130)
"""


def started(recipe: Recipe) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SCRIPT, str(recipe.path)])


def wait_for(server: Any, n: int) -> None:
    deadline = time.monotonic() + 1200
    while server.answered.total() < n and time.monotonic() < deadline:
        time.sleep(0.002)


def test_killed_and_rerun_nothing_stored_is_lost_or_asked_for_again(
    make_recipe: Make, serving: Callable[..., Any], tmp_path: Path
) -> None:
    undisturbed = serving()
    recipe = make_recipe(undisturbed.url, styles={"paraphrase": 6})
    expected = [row["text"] for row in rows(augment(recipe).corpus_path)]
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    server = serving(latency=0.01)
    recipe = make_recipe(server.url, styles={"paraphrase": 6})
    process = started(recipe)
    wait_for(server, 20)
    process.send_signal(signal.SIGKILL)
    process.wait(1200)
    result = augment(recipe)
    assert [row["text"] for row in rows(result.corpus_path)] == expected
    # What was on the wire when the process died may have been answered to nobody: 8 requests at most.
    assert len(server.answered) == 72
    assert server.answered.total() <= 72 + 8


def test_ctrl_c_ends_the_run_with_everything_answered_kept(
    make_recipe: Make, serving: Callable[..., Any]
) -> None:
    server = serving(latency=0.25)
    recipe = make_recipe(server.url, styles={"paraphrase": 6})
    process = started(recipe)
    wait_for(server, 10)
    process.send_signal(signal.SIGINT)
    assert process.wait(1200) == 130
    assert augment(recipe).got == 72
    assert server.answered.total() == 72
