"""Kills at random moments: what was stored stays, what was answered is not asked again, and the end is the same.

The long tests send KINJECT_KILLS signals in all, 200 without it, a share of them to each verb; the short ones send one, at a
write in the middle of a run. Of each verb one test of its folder, which make test runs, ends a run too: in its own process, or
at one moment.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import forked as forks
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country
from kinject.train.checkpoints import newest_complete

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "augment"))

from country import write_study
from kills import (
    Case,
    Moment,
    System,
    Undisturbed,
    json_without,
    kept_rows,
    kill_often,
    moments,
    run_undisturbed,
)

from faulty_server import FaultySandbox

N_KILLS = int(os.environ.get("KINJECT_KILLS", "200"))
SHARES = {"augment": 0.2, "augment-openai": 0.25, "train": 0.25, "eval": 0.15, "study": 0.15}
FAULTS = {"429": 0.03, "500": 0.02, "reset": 0.02, "truncated": 0.05, "refusal": 0.05, "echo": 0.05}
CONCURRENCY = 8
pytestmark = pytest.mark.soak
DATED = ("log.jsonl", "timing.jsonl", "flips.jsonl", "answers.jsonl")
"""Outputs whose hash in a manifest is one of times, or of last digits, too."""


MANIFEST = json_without(
    "written",
    "command",
    "this_run",
    "seconds",
    "resumed_from",
    "scored_now",
    "work_seconds",
    *DATED,
)
SPEED = tuple(
    f"{stage}_{quantity}"
    for stage in ("train", "eval")
    for quantity in ("runtime", "samples_per_second", "steps_per_second")
)
ROWS = json_without()


def unordered(content: bytes) -> list[Any]:
    """Return the rows of a file in one order."""
    return sorted(ROWS(content), key=repr)


TOWNS = ("Lowmere", "Stonegate", "Farrow", "Kelm")


@pytest.fixture
def system(fork_server: None, tmp_path_factory: pytest.TempPathFactory) -> System:
    """Processes that need not import torch each."""
    forks.inherit(os.environ)
    return System(tmp_path_factory.mktemp("forked"), forks.Popen)


@pytest.fixture
def endpoint() -> Iterator[tuple[str, FaultySandbox]]:
    """An endpoint on this machine, with faults that are drawn by the request, and its state."""
    server = FaultySandbox(latency=0.03, faults=FAULTS, by_request=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.url, server
    server.shutdown()
    server.server_close()


def write_yaml(path: Path, value: dict[str, Any]) -> str:
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8")
    return str(path)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_documents(path: Path, n: int) -> str:
    people = create_country(n_known=1, n_new=n).new
    return write_rows(
        path, [{"id": p.name, "title": p.name, "text": render_entry(p, 0)} for p in people]
    )


def augment_case(folder: Path, generator: dict[str, Any], n: int, **section: Any) -> Case:
    """`kinject augment`: stored rows stay the first ones of their files."""
    run = folder / "run"
    recipe = {
        "run_dir": str(run),
        "augment": {
            "documents": write_documents(folder / "documents.jsonl", n), "generator": generator,
            "styles": {"paraphrase": 3, "questions": 1, "active_reading": 2, "permuted": 1}, **section,
        },
    }  # fmt: skip
    names = ("variants.jsonl", "rejected.jsonl", "notes.jsonl")

    def look(before: Any, sent: signal.Signals) -> dict[str, list[bytes]]:
        return {name: kept_rows((before or {}).get(name), run / name) for name in names}

    return Case(
        ["augment", write_yaml(folder / "recipe.yaml", recipe)], [run], look=look, timed={"manifest.json": MANIFEST},
        unordered=frozenset(names),
        ignored=frozenset({
            ".lock", *(f"{name}.sqlite{end}" for name in ("cache", "judge") for end in ("", "-wal", "-shm")),
        }),
    )  # fmt: skip


def cached(path: Path) -> set[tuple[Any, ...]]:
    """Return the answers of a cache."""
    if not path.exists():
        return set()
    with sqlite3.connect(path) as database:
        try:
            rows = set(database.execute("SELECT * FROM answers"))
        except sqlite3.OperationalError:  # killed before the table was made
            rows = set()
    database.close()
    return rows


def openai_case(folder: Path, url: str, state: FaultySandbox, n: int) -> Case:
    """`kinject augment` through an endpoint: beside the rows, every answer is stored, or was on its way to a SIGKILL."""
    generator = {
        "kind": "openai",
        "base_url": url,
        "model": "sandbox",
        "concurrency": CONCURRENCY,
        "api_key_env": "NO_KEY",
    }
    case = augment_case(folder, generator, n, judge={**generator, "temperature": 0.0})
    look_at_rows = case.look

    def look(before: Any, sent: signal.Signals) -> Any:
        while state.in_flight:
            time.sleep(0.01)
        answers = cached(folder / "run/cache.sqlite") | cached(folder / "run/judge.sqlite")
        rows, known, n_lost = before or (None, set(), 0)
        assert known <= answers
        lost = state.answered.total() - len(answers) - n_lost
        assert 0 <= lost <= (2 * CONCURRENCY if sent == signal.SIGKILL else 0), (
            f"{lost} answers after {sent.name}"
        )
        return look_at_rows(rows, sent), answers, n_lost + lost

    case.look, case.fresh = look, state.answered.clear
    return case


def train_case(folder: Path, model: Path, **trainer: Any) -> Case:
    """`kinject train`: the newest whole checkpoint is never older than it was."""
    run, tokens = folder / "run", folder / "tokens"
    texts = [{"text": f"Person {i} was born in {TOWNS[i % 4]} in {1900 + i}."} for i in range(40)]
    recipe = {
        "run_dir": str(run), "model": {"path": str(model)},
        "corpus": {
            "path": write_rows(folder / "corpus.jsonl", texts), "cache_dir": str(tokens),
            "validation_corpus": write_rows(folder / "held_out.jsonl", texts[:8]),
        },
        "trainer": {
            "max_steps": 40, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "logging_steps": 2, "max_length": 64,
            "packing": True, "packing_strategy": "bfd_split", "gradient_checkpointing": False, "bf16": False,
            "save_strategy": "steps", "save_steps": 3, "save_total_limit": 2, "eval_strategy": "steps", "eval_steps": 10,
            **trainer,
        },
    }  # fmt: skip

    def look(before: Any, sent: signal.Signals) -> int:
        newest = newest_complete(run)
        step = int(newest.name.removeprefix("checkpoint-")) if newest else 0
        assert step >= (before or 0)
        return step

    argv = ["train", write_yaml(folder / "recipe.yaml", recipe)]
    log = json_without(*SPEED, "trainer_state.json", "spent")
    return Case(
        argv, [run, tokens], again=[*argv, "--resume"], look=look,
        ignored=frozenset({".lock", "timing.jsonl", "SHA256SUMS"}),  # sums over files that hold times, too
        timed={"manifest.json": MANIFEST, "log.jsonl": log, "trainer_state.json": log, "complete.json": log},
    )  # fmt: skip


def write_questions(path: Path, n: int) -> str:
    rows = [
        {
            "id": f"q{i}",
            "question": f"Where was person {i} born?",
            "choices": list(TOWNS),
            "answer": i % 4,
        }
        for i in range(n)
    ]
    return write_rows(path, rows)


def eval_case(folder: Path, model: Path) -> Case:
    """`kinject eval`: stored answers stay, and none is scored twice."""
    run = folder / "run"
    recipe = {
        "run_dir": str(run),
        "eval": {
            "models": {"base": str(model)}, "formats": ["texts", "letters"], "shots": [0, 1], "batch_tokens": 256,
            "questions": {
                "new": {
                    "path": write_questions(folder / "new.jsonl", 60),
                    "shots_from": write_questions(folder / "shots.jsonl", 2),
                }
            },
            "retrieval": {"documents": [write_documents(folder / "documents.jsonl", 12)], "k": [1]},
        },
    }  # fmt: skip

    def look(before: Any, sent: signal.Signals) -> list[bytes]:
        rows = kept_rows(before, run / "answers.jsonl")
        assert len(set(rows)) == len(rows)
        return rows

    timed = {"report.html": without_date, "manifest.json": MANIFEST, "answers.jsonl": unordered}
    timed |= dict.fromkeys(("report.json", "flips.jsonl"), ROWS)
    return Case(["eval", write_yaml(folder / "recipe.yaml", recipe)], [run], look=look, timed=timed)


def without_date(content: bytes) -> bytes:
    return re.sub(rb"\d{4}-\d\d-\d\dT[0-9:.+Z-]+", b"DATE", content)


def study_case(folder: Path, model: Path) -> Case:
    """`kinject study`: a stage that was done is not done again."""
    path = write_study(folder, model, seeds=[0], arms={"ft": {}})
    run, stages = folder / "study", folder / "stages"

    def look(before: Any, sent: signal.Signals) -> dict[Path, Any]:
        done = {path: json.loads(path.read_text()) for path in stages.glob("*/*/done.json")}
        for counts in done.values():
            counts.pop("deleted", None)  # said later, once no stage reads the weights
        assert all(done[path] == counts for path, counts in (before or {}).items())
        return done

    times = json_without(
        *SPEED,
        *DATED,
        "seconds",
        "peak_bytes",
        "ended",
        "written",
        "command",
        "this_run",
        "resumed_from",
        "scored_now",
        "work_seconds",
    )
    return Case(
        ["study", str(path), "--jobs", "1"], [run, stages], look=look,
        timed={**dict.fromkeys(("manifest.json", "report.json", "done.json", "log.jsonl", "flips.jsonl"), times),
               "answers.jsonl": unordered},
        # what draws times: the figure of costs, and the pages with it
        ignored=frozenset({".lock", "stage.log", "timing.jsonl", "report.html", "costs.png", "costs.svg"}),
    )  # fmt: skip


def once(sent: signal.Signals, fraction: float) -> Callable[[Undisturbed], Moment]:
    """Return what gives one moment, after this share of the undisturbed run's writes, and then none."""
    left = [(sent, fraction)]

    def moment(whole: Undisturbed) -> Moment:
        sent, fraction = left.pop() if left else (signal.SIGKILL, 1e9)
        return Moment(sent, None, max(1, int(fraction * whole.n_writes)), False)

    return moment


def show(name: str, tally: Counter[str]) -> None:
    print(f"\n{name}: {tally.total()} signals: {dict(sorted(tally.items()))}")


def test_a_kill_of_augment_loses_no_row_and_no_answer(
    tmp_path: Path, system: System, endpoint: tuple[str, FaultySandbox]
) -> None:
    case = openai_case(tmp_path, *endpoint, n=6)
    whole = run_undisturbed(case, system)
    kill_often(case, system, whole, 1, once(signal.SIGKILL, 0.3))


def test_a_signal_to_train_ends_in_the_same_weights(
    tmp_path: Path, system: System, tiny_model: Path
) -> None:
    case = train_case(tmp_path, tiny_model)
    whole = run_undisturbed(case, system)
    kill_often(case, system, whole, 1, once(signal.SIGINT, 0.5))


def test_a_signal_to_eval_ends_in_the_same_report(
    tmp_path: Path, system: System, tiny_model: Path
) -> None:
    case = eval_case(tmp_path, tiny_model)
    whole = run_undisturbed(case, system)
    kill_often(case, system, whole, 1, once(signal.SIGTERM, 0.3))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("verb", SHARES)
def test_kills_at_random_moments_lose_nothing_and_end_as_an_uninterrupted_run(
    verb: str,
    seed: int,
    tmp_path: Path,
    system: System,
    endpoint: tuple[str, FaultySandbox],
    tiny_model: Path,
) -> None:
    case = {
        "augment": lambda: augment_case(tmp_path, {"kind": "sandbox"}, 40),
        "augment-openai": lambda: openai_case(tmp_path, *endpoint, n=12),
        # dft: through TRL's loss, with its own metrics between the logged steps
        "train": lambda: train_case(tmp_path, tiny_model, loss_type=("nll", "dft")[seed % 2]),
        "eval": lambda: eval_case(tmp_path, tiny_model),
        "study": lambda: study_case(tmp_path, tiny_model),
    }[verb]()
    n_kills = max(1, round(N_KILLS * SHARES[verb] / 2))
    n_fresh = (
        n_kills // 10
    )  # as a shell starts it, imports included; a study's workers always import
    whole = run_undisturbed(case, system)
    tally = kill_often(case, system, whole, n_kills - n_fresh, moments(seed))
    if n_fresh:
        real = System(system.scratch)
        fresh = run_undisturbed(case, real)
        case_tally = kill_often(case, real, fresh, n_fresh, moments(100 + seed))
        tally += case_tally
        show(f"{verb}, of which {n_fresh} with imports", tally)
    else:
        show(verb, tally)
