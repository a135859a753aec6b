"""Models behind endpoints: the log-probs and texts of a server against those of the same weights here."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from completions_server import Served, Style, serve

from kinject.disk import write_jsonl
from kinject.errors import EndpointError, InputError
from kinject.eval import evaluate
from kinject.eval.run import preview
from kinject.eval.scoring.answers import read_answers
from kinject.recipe import read_recipe
from kinject.results import Report
from kinject.types import Answer

QUESTIONS = [
    {
        "id": "q1",
        "question": "Where was Arden born?",
        "choices": ["Lowmere", "the mill", "Farrow"],
        "answer": 0,
    },
    {
        "id": "q2",
        "question": "Where was Bryn  born? ",
        "choices": ["Kelm", "town of Farrow"],
        "answer": 1,
    },
    {
        "id": "q3",
        "question": "¿Dónde nació Kelm? 在",
        "choices": ["1987", "school – é", "x"],
        "answer": 2,
    },
]
Run = Callable[..., Report]


def nested(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of a model whose `endpoint` holds the keys that are a generator's; here its address."""
    own = ("api", "revision", "tokenizer", "chat")
    generator = {key: value for key, value in table.items() if key not in (*own, "endpoint")}
    return {
        "endpoint": {"base_url": table["endpoint"], **generator},
        **{k: v for k, v in table.items() if k in own},
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Evaluate `models` in the run folder `name`."""
    write_jsonl(tmp_path / "q.jsonl", QUESTIONS)

    def _run(models: dict[str, Any], name: str = "run", **section: Any) -> Report:
        models = {
            arm: nested(table) if isinstance(table, dict) else table
            for arm, table in models.items()
        }
        section = {"models": models, "questions": {"new": str(tmp_path / "q.jsonl")}, **section}
        path = tmp_path / "recipe.yaml"
        path.write_text(
            yaml.safe_dump(
                {"run_dir": str(tmp_path / name), "eval": {"control": False, **section}},
                sort_keys=False,
            )
        )
        return evaluate(read_recipe(path, (), "eval"))

    return _run


@pytest.fixture
def served(tiny_model: Path) -> Iterator[Served]:
    with serve(tiny_model) as server:
        yield server


def answers(folder: Path, arm: str) -> dict[tuple[str, str, int, int], Answer]:
    """Return the stored answers of an arm by format, question, rotation and number of shots."""
    stored = read_answers(folder / "run" / "answers.jsonl")
    return {(a.format, a.question_id, a.rotation, a.shots): a for a in stored if a.arm == arm}


@pytest.mark.parametrize("style", ["vllm", "sglang"])
def test_log_probs_through_an_endpoint_are_those_of_the_same_weights_here(
    run, tmp_path, tiny_model, style: Style
):
    shots = {
        "questions": {
            "new": {"path": str(tmp_path / "q.jsonl"), "shots_from": str(tmp_path / "q.jsonl")}
        }
    }
    section = {"formats": ["texts", "rotations"], "shots": [1], **shots}
    with serve(tiny_model, style) as served:
        table = {
            "endpoint": served.url,
            "model": "tiny",
            "api": "completions",
            "tokenizer": str(tiny_model),
        }
        run({"local": str(tiny_model), "served": table}, **section)
        n_requests = len(served.bodies)
        run({"local": str(tiny_model), "served": table}, **section)
        assert len(served.bodies) == n_requests  # nothing is asked twice
    mine, other = answers(tmp_path, "local"), answers(tmp_path, "served")
    assert mine.keys() == other.keys()
    assert len(mine) == 3 + 8
    for key, answer in mine.items():
        assert other[key].log_probs == pytest.approx(answer.log_probs, abs=1e-3)
        assert other[key].log_probs.index(max(other[key].log_probs)) == answer.log_probs.index(
            max(answer.log_probs)
        )
        assert other[key].n_tokens == answer.n_tokens
        assert other[key].greedy == answer.greedy


@pytest.mark.parametrize("in_tokens", [True, False])
def test_completions_write_the_texts_that_the_same_weights_write_here(
    run, tmp_path, tiny_model, served, in_tokens
):
    table = {"endpoint": served.url, "model": "tiny", "api": "completions"}
    table |= {"tokenizer": str(tiny_model)} if in_tokens else {}
    run(
        {"local": str(tiny_model), "served": table},
        formats=["generate"],
        max_new_tokens=6,
        stop=["\n", "z"],
    )
    mine, other = answers(tmp_path, "local"), answers(tmp_path, "served")
    assert [other[key].text for key in mine] == [answer.text for answer in mine.values()]
    assert {body["max_tokens"] for body in served.bodies} == {6}
    assert all(body["stop"] == ["\n", "z"] and body["temperature"] == 0 for body in served.bodies)


@pytest.mark.parametrize(
    ("written", "reason", "text", "is_cut"),
    [
        ("Farrow or Lowmere? North.\n</think>\n\nLowmere.", "stop", "Lowmere.", False),
        ("Farrow or Lowmere? It was in the", "length", "", True),
    ],
)
def test_thinking_is_no_part_of_an_answer_by_completions(
    run, tmp_path, tiny_model, monkeypatch, written, reason, text, is_cut
):
    template = tiny_model / "chat_template.jinja"
    template.write_text("{{ messages[-1].content }}<think>\n{# </think> #}")
    choice = {"text": written, "finish_reason": reason}
    usage = {"prompt_tokens": 9, "completion_tokens": 8}
    with serve(tiny_model) as served:
        reply = {"model": "tiny", "choices": [choice], "usage": usage}
        monkeypatch.setattr(served, "reply", lambda path, body: (200, reply))
        table = {"endpoint": served.url, "model": "tiny", "api": "completions", "chat": True}
        run({"served": table | {"tokenizer": str(tiny_model)}}, formats=["generate"])
    answer = answers(tmp_path, "served")["generate", "q1", 0, 0]
    assert (answer.text, answer.thinking_cut, answer.n_thinking > 0) == (text, is_cut, True)


def test_chats_write_sentences_in_the_turns_of_the_recipe(run, tmp_path, served):
    table = {
        "endpoint": served.url, "model": "tiny", "api": "chat", "price": [1.0, 10.0],
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
    assert (stored.text, stored.n_thinking > 0, report.results[0].n_correct) == (
        "Lowmere, I think.",
        True,
        1,
    )
    counts = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["endpoints"][
        "served"
    ]
    assert (counts["tokens_in"], counts["tokens_out"], counts["cost"]) == (
        33,
        15,
        pytest.approx(183e-6),
    )
    assert any(
        "33 tokens in, 15 out, cost 0.0002" in note and "cannot be hashed" in note
        for note in report.notes
    )
    assert report.model_sources == {"served": f"tiny (chat) at {served.url}"}


@pytest.mark.parametrize("system", ["Answer in capitals.", ""])
def test_the_turns_before_a_question_reach_a_chat_endpoint_as_turns(run, tmp_path, served, system):
    turns = [("user", "My name is Arden."), ("assistant", "Good day, Arden.")]
    before = [
        {"role": role, "content": text}
        for role, text in ([("system", system)] if system else []) + turns
    ]
    contents = {
        "id": "q",
        "question": "What is my name?",
        "messages": before,
        "checks": {"upper": True, "contains": ["Arden"]},
    }
    write_jsonl(tmp_path / "chat.jsonl", [contents])
    served.chat = "ARDEN"
    table = {"endpoint": served.url, "model": "tiny", "api": "chat"}
    sets = {"chat": {"path": str(tmp_path / "chat.jsonl"), "role": "retention"}}
    report = run({"served": table}, formats=["generate"], questions=sets)
    sent = [body["messages"] for body in served.bodies]
    assert [*before, {"role": "user", "content": "What is my name?"}] in sent
    assert {
        tuple(message["role"] for message in messages) for messages in sent if len(messages) > 1
    } == {tuple(message["role"] for message in [*before, {"role": "user"}])}
    (result,) = report.results
    assert (result.role, result.n_correct, result.n) == ("retention", 1, 1)


def test_a_killed_run_pays_no_answer_twice(run, tmp_path, tiny_model, served):
    table = {
        "endpoint": served.url,
        "model": "tiny",
        "api": "completions",
        "tokenizer": str(tiny_model),
        "concurrency": 1,
    }
    served.fails_after = 5
    with pytest.raises(EndpointError, match=r"eval\.models\.served: .* the same command resumes"):
        run({"served": table})
    n_stored = len(read_answers(tmp_path / "run" / "answers.jsonl"))
    assert n_stored == 1
    served.fails_after = None
    n_before = len(served.bodies)
    run({"served": table})
    paid = [json.dumps(body) for body in (*served.bodies[:5], *served.bodies[n_before:])]
    assert len(paid) == len(set(paid)) == 1 + 8  # one asks whether there are log-probs


def test_answers_are_kept_apart_by_model_name_revision_and_parameters(run, tmp_path, served):
    def n_requests(**changes: Any) -> int:
        before = len(served.bodies)
        run(
            {"served": {"endpoint": served.url, "model": "tiny", "api": "chat", **changes}},
            formats=["generate"],
        )
        return len(served.bodies) - before

    changes = ({}, {}, {"revision": "2026-11"}, {"model": "small"}, {"temperature": 0.5})
    assert [n_requests(**change) for change in changes] == [3, 0, 3, 3, 3]
    assert n_requests(timeout=30.0, concurrency=2, price=[1.0, 0]) == 0


def test_the_budget_ends_a_run_before_it_is_exceeded(run, tmp_path, served):
    table = {
        "endpoint": served.url,
        "model": "tiny",
        "api": "chat",
        "price": [0, 1e6],
        "concurrency": 1,
    }
    with pytest.raises(InputError, match=r"eval\.budget: 40\.0 are spent \(eval\.models\.served\)"):
        run({"served": table}, formats=["generate"], budget=40.0)
    assert len(served.bodies) == 2  # 5 each, and 32 that the next may cost
    run({"served": table}, formats=["generate"], budget=50.0)
    assert len(served.bodies) == 3


@pytest.mark.parametrize("style", ["llama-server", "ignores-echo", "absurd", "transformers"])
def test_an_endpoint_without_log_probs_of_the_prompt_is_refused_at_the_first_request(
    run, tiny_model, style: Style
):
    with serve(tiny_model, style) as served:
        table = {
            "endpoint": served.url,
            "model": "tiny",
            "api": "completions",
            "tokenizer": str(tiny_model),
        }
        about_log_probs = r"no log-probs of the prompt \(echo with logprobs\).*\(vLLM, SGLang"
        match = (
            "takes no token ids: leave out the tokenizer"
            if style == "transformers"
            else about_log_probs
        )
        with pytest.raises(EndpointError, match=match):
            run({"served": table})
        assert len(served.scored()) == 1
        del table["tokenizer"]
        run({"served": table}, "other", formats=["generate"])  # it writes answers


def test_a_dry_run_counts_the_requests_that_the_run_then_sends(run, tmp_path, tiny_model, served):
    table = {
        "endpoint": served.url,
        "model": "tiny",
        "api": "completions",
        "price": [1e6, 1e6],
        "tokenizer": str(tiny_model),
    }

    def planned() -> dict[str, int]:
        local, line = preview(read_recipe(tmp_path / "recipe.yaml", (), "eval"))
        assert local == f"local: {tiny_model}: 6 prompts, scored here"
        numbers = r"(\d+) without a stored answer; (\d+) requests, about (\d+) .* at most (\d+) out, at most (\S+)"
        match = re.search(numbers, re.sub(r"(?<=\d),(?=\d)", "", line))
        assert match is not None
        names = ("missing", "requests", "tokens_in", "tokens_out", "cost")
        return dict(zip(names, map(int, map(float, match.groups())), strict=True))

    section = {"formats": ["texts", "generate"], "max_new_tokens": 4}
    models = {"local": str(tiny_model), "served": table}
    with pytest.raises(InputError):
        run(models, budget=0.0, **section)  # writes the recipe
    before = planned()
    assert served.bodies == []
    run(models, **section)
    usage = json.loads((tmp_path / "run" / "manifest.json").read_text())["counts"]["endpoints"][
        "served"
    ]
    assert before["missing"] == 6
    assert before["requests"] == len(served.bodies) - 1  # whether there are log-probs
    n_probe = len(served.tokenizer("One, two, three").input_ids)
    assert before["tokens_in"] == usage["tokens_in"] - n_probe
    assert before["tokens_out"] >= usage["tokens_out"] - 1
    assert before["cost"] == before["tokens_in"] + before["tokens_out"]
    assert planned() == dict.fromkeys(before, 0)
