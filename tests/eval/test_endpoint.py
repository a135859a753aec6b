"""Models behind endpoints: the chats that are sent, their cost, and that no answer is paid twice."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chat_server import Served, serve

from kinject.disk import write_jsonl
from kinject.errors import EndpointError, InputError
from kinject.eval import evaluate
from kinject.eval.run import preview, show_prompts
from kinject.eval.scoring.answers import read_answers
from kinject.recipe import read_recipe
from kinject.results import Report
from kinject.types import Answer

QUESTIONS = [
    {"id": "q1", "question": "Where was Arden born?", "choices": ["Lowmere", "the mill", "Farrow"], "answer": 0},
    {"id": "q2", "question": "Where was Bryn  born? ", "choices": ["Kelm", "town of Farrow"], "answer": 1},
    {"id": "q3", "question": "¿Dónde nació Kelm? 在", "choices": ["1987", "school – é", "x"], "answer": 2},
]
Run = Callable[..., Report]


def nested(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a model whose `endpoint` holds the keys that are a generator's; here its address."""
    own = ("revision", "chat")
    generator = {key: value for key, value in table.items() if key not in (*own, "endpoint")}
    return {"endpoint": {"base_url": table["endpoint"], **generator}, **{k: v for k, v in table.items() if k in own}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Evaluate `models` in the run folder `name`."""
    write_jsonl(tmp_path / "q.jsonl", QUESTIONS)

    def _run(models: dict[str, Any], name: str = "run", **section: Any) -> Report:
        models = {arm: nested(table) if isinstance(table, dict) else table for arm, table in models.items()}
        section = {"models": models, "questions": {"new": str(tmp_path / "q.jsonl")}, **section}
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / name), "eval": section}, sort_keys=False))
        return evaluate(read_recipe(path, (), "eval"))

    return _run


@pytest.fixture
def served() -> Iterator[Served]:
    with serve() as server:
        yield server


def answers(folder: Path, arm: str) -> dict[tuple[str, str, int, int], Answer]:
    """Return the stored answers of an arm by format, question, rotation and number of shots."""
    stored = read_answers(folder / "run" / "answers.jsonl")
    return {(a.format, a.question_id, a.rotation, a.shots): a for a in stored if a.arm == arm}


def test_chats_write_sentences_in_the_turns_of_the_recipe(run, tmp_path, served):
    table = {
        "endpoint": served.url, "model": "tiny", "price": [1.0, 10.0],
        "chat": {"system": "Be brief.", "chat_template_kwargs": {"enable_thinking": False}},
        "extra_body": {"top_a": 1, "reasoning_effort": "low"},
    }  # fmt: skip
    served.chat = "<think>Arden is in the north.</think>Lowmere, I think."
    report = run({"served": table}, formats=["generate"], budget=1.0)
    assert [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Question: Where was Arden born?\nAnswer:"},
    ] in [body["messages"] for body in served.bodies]  # several at once: any may come first
    assert {key: served.bodies[0][key] for key in ("chat_template_kwargs", "reasoning_effort", "top_a", "max_tokens")} == {
        "chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low", "top_a": 1, "max_tokens": 32,
    }  # fmt: skip
    assert "stop" not in served.bodies[0]
    stored = answers(tmp_path, "served")["generate", "q1", 0, 0]
    assert (stored.text, stored.n_thinking > 0, report.results[0].n_correct) == ("Lowmere, I think.", True, 1)
    counts = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["endpoints"]["served"]
    assert (counts["tokens_in"], counts["tokens_out"], counts["cost"]) == (33, 15, pytest.approx(183e-6))
    assert any("33 tokens in, 15 out, cost 0.0002" in note and "cannot be hashed" in note for note in report.notes)
    assert report.model_sources == {"served": f"tiny (chat) at {served.url}"}


@pytest.mark.parametrize("system", ["Answer in capitals.", ""])
def test_the_turns_before_a_question_reach_a_chat_endpoint_as_turns(run, tmp_path, served, system):
    turns = [("user", "My name is Arden."), ("assistant", "Good day, Arden.")]
    before = [{"role": role, "content": text} for role, text in ([("system", system)] if system else []) + turns]
    contents = {
        "id": "q",
        "question": "What is my name?",
        "messages": before,
        "checks": {"upper": True, "contains": ["Arden"]},
    }
    write_jsonl(tmp_path / "chat.jsonl", [contents])
    served.chat = "ARDEN"
    table = {"endpoint": served.url, "model": "tiny"}
    sets = {"chat": {"path": str(tmp_path / "chat.jsonl"), "role": "retention"}}
    report = run({"served": table}, formats=["generate"], questions=sets)
    sent = [body["messages"] for body in served.bodies]
    assert [*before, {"role": "user", "content": "What is my name?"}] in sent
    assert {tuple(message["role"] for message in messages) for messages in sent if len(messages) > 1} == {
        tuple(message["role"] for message in [*before, {"role": "user"}])
    }
    (result,) = report.results
    assert (result.role, result.n_correct, result.n) == ("retention", 1, 1)


def test_a_killed_run_pays_no_answer_twice(run, tmp_path, served):
    table = {"endpoint": served.url, "model": "tiny", "concurrency": 1}
    served.fails_after = 1
    with pytest.raises(EndpointError, match=r"eval\.models\.served: .* the same command resumes"):
        run({"served": table}, formats=["generate"])
    assert len(read_answers(tmp_path / "run" / "answers.jsonl")) == 1
    served.fails_after = None
    n_before = len(served.bodies)
    run({"served": table}, formats=["generate"])
    paid = [json.dumps(body) for body in (*served.bodies[:1], *served.bodies[n_before:])]
    assert len(paid) == len(set(paid)) == 3


def test_answers_are_kept_apart_by_model_name_revision_and_parameters(run, tmp_path, served):
    def n_requests(**changes: Any) -> int:
        before = len(served.bodies)
        run({"served": {"endpoint": served.url, "model": "tiny", **changes}}, formats=["generate"])
        return len(served.bodies) - before

    assert [
        n_requests(),
        n_requests(),
        n_requests(revision="2026-11"),
        n_requests(model="small"),
        n_requests(temperature=0.5),
    ] == [
        3,
        0,
        3,
        3,
        3,
    ]
    assert n_requests(timeout=30.0, concurrency=2, price=[1.0, 0]) == 0


def test_the_budget_ends_a_run_before_it_is_exceeded(run, tmp_path, served):
    table = {"endpoint": served.url, "model": "tiny", "price": [0, 1e6], "concurrency": 1}
    with pytest.raises(InputError, match=r"eval\.budget: 40\.0 are spent \(eval\.models\.served\)"):
        run({"served": table}, formats=["generate"], budget=40.0)
    assert len(served.bodies) == 2  # 5 each, and 32 that the next may cost
    run({"served": table}, formats=["generate"], budget=50.0)
    assert len(served.bodies) == 3


def test_several_processes_do_not_share_an_endpoint(run, monkeypatch):
    monkeypatch.setattr("kinject.eval.run.world_size", lambda: 2)
    with pytest.raises(InputError, match=r"2 processes would ask eval\.models\.served\. Start one"):
        run({"served": {"endpoint": "http://127.0.0.1:9/v1", "model": "m"}}, formats=["generate"])


def test_a_dry_run_counts_the_requests_that_the_run_then_sends(run, tmp_path, tiny_model, served):
    models = {"local": str(tiny_model), "served": {"endpoint": served.url, "model": "tiny", "price": [0, 1e6]}}
    section = {"formats": ["generate"], "max_new_tokens": 5}
    with pytest.raises(InputError):
        run(models, budget=0.0, **section)  # writes the recipe

    def planned() -> list[str]:
        local, line = preview(read_recipe(tmp_path / "recipe.yaml", (), "eval"))
        assert local == f"local: {tiny_model}: 3 prompts, scored here"
        match = re.search(r"; (\d+) requests .* at most (\d+) out, at most (\S+)", line)
        assert match is not None
        return list(match.groups())

    assert planned() == ["3", "15", "15.0000"]
    assert served.bodies == []
    run(models, **section)
    assert len(served.bodies) == 3
    assert planned() == ["0", "0", "0.0000"]


def test_prompts_of_an_endpoint_are_shown_and_not_sent(tmp_path, run):
    path = tmp_path / "recipe.yaml"
    table = {"endpoint": "http://127.0.0.1:9/v1", "model": "m"}
    section = {
        "models": {"served": nested(table)},
        "questions": {"new": str(tmp_path / "q.jsonl")},
        "formats": ["generate"],
    }
    path.write_text(yaml.safe_dump({"run_dir": str(tmp_path / "run"), "eval": section}))
    shown = list(show_prompts(read_recipe(path, (), "eval"), 1))
    assert shown == [
        "served on new: generate, 0 shots, K 0, question q1\n  user: 'Question: Where was Arden born?\\nAnswer:'"
    ]
