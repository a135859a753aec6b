from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kinject.augment.question_outcomes import is_validation
from kinject.augment.questions import make_questions, render_questions
from kinject.augment.sandbox import answer_as_sandbox
from kinject.cli import main
from kinject.corpus.questions import read_questions
from kinject.disk import content_id, read_jsonl, read_manifest_fields, write_jsonl
from kinject.errors import EndpointError, InputError
from kinject.recipe import Recipe, read_recipe
from kinject.sandbox.grammar import parse_entry
from kinject.types import Completion, Message

Make = Callable[..., Recipe]


@pytest.fixture
def make(tmp_path: Path, documents: Path) -> Make:
    """A recipe over twelve entries: make(url or None, key=value, ...)."""

    def recipe(url: str | None = None, **overrides: Any) -> Recipe:
        kind = f"{{kind: openai, base_url: '{url}', model: sandbox}}" if url else "{kind: sandbox}"
        path = tmp_path / "questions.yaml"
        path.write_text(
            f"run_dir: {tmp_path}/run\nquestions:\n  documents: {documents}\n  generator: {kind}\n"
        )
        settings = [
            f"questions.{key.replace('__', '.')}={json.dumps(value)}"
            for key, value in overrides.items()
        ]
        return read_recipe(path, settings, verb="questions")

    return recipe


@pytest.fixture
def question_server(
    serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """An endpoint with the sandbox's question generator behind it, or with what `answer` makes of its answers."""

    def start(
        answer: Callable[[list[Message], Completion], str] | None = None, **options: Any
    ) -> Any:
        def reply(messages: list[Message], seed: int) -> Completion:
            completion = answer_as_sandbox(messages, seed)
            return completion if answer is None else Completion(answer(messages, completion))

        monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_answer", reply)
        return serving(**options)

    return start


def rows(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_jsonl(path)]


def test_each_passage_gets_its_questions_in_the_question_format_and_they_are_right(
    make: Make, documents: Path
) -> None:
    result = make_questions(make())
    assert (result.asked, result.got, result.short, result.n_passages) == (24, 24, False, 12)
    people = {row["id"]: parse_entry(row["text"]) for row in rows(documents)}
    questions = read_questions(result.questions_path)
    assert [question.document_id for question in questions] == [
        name for name in people for _ in range(2)
    ]
    for question in questions:
        person = people[question.document_id]
        assert person is not None
        is_value = [choice in person.facts.values() for choice in question.choices]
        assert is_value == [index == question.answer for index in range(4)]
        assert person.last in question.question
    for row in rows(result.questions_path):
        assert row["choices"][row["answer"]] in row["sentence"]
    assert (
        len({question.fact_id for question in questions})
        == len({question.id for question in questions})
        == 24
    )


def test_the_two_sets_split_the_questions_by_document_and_stay_as_documents_come(
    make: Make, documents: Path
) -> None:
    result = make_questions(make(validation=0.5))
    sets = [rows(result.run_dir / f"{name}.jsonl") for name in ("validation", "test")]
    assert [len(part) for part in sets] == [result.n_validation, result.n_test]
    assert all(sets)
    names = [{row["document_id"] for row in part} for part in sets]
    assert not names[0] & names[1]
    assert sorted(row["id"] for part in sets for row in part) == sorted(
        row["id"] for row in rows(result.questions_path)
    )
    assert names[0] == {
        name for name in names[0] | names[1] if int(content_id("split", name), 16) / 2**64 < 0.5
    }
    kept = documents.read_text().splitlines()[3:]
    documents.write_text("\n".join(kept) + "\n")
    fewer = make_questions(make(validation=0.5))
    for name, part in zip(("validation", "test"), sets, strict=True):
        left = [row["id"] for row in rows(fewer.run_dir / f"{name}.jsonl")]
        assert [row["id"] for row in part if row["id"] in left] == left, (
            "their wrong choices are those of the set"
        )
    fractions = [
        sum(is_validation(f"d{number}", fraction) for number in range(2000)) / 2000
        for fraction in (0.0, 0.2, 1.0)
    ]
    assert fractions[0] == 0
    assert fractions[1] == pytest.approx(0.2, abs=0.04)
    assert fractions[2] == 1


def test_the_endpoint_and_the_sandbox_in_process_give_the_same_questions_and_a_rerun_asks_nothing(
    make: Make, question_server: Callable[..., Any], tmp_path: Path
) -> None:
    server = question_server()
    first = make_questions(make(server.url))
    before = {
        name: (tmp_path / "run" / name).read_bytes()
        for name in ("questions.jsonl", "rejected.jsonl", "test.jsonl")
    }
    again = make_questions(make(server.url))
    # a proposal, four answers with the passage, and two each without
    assert (first.n_sent, again.n_sent, server.n_requests) == (12 * 13, 0, 12 * 13)
    assert before == {name: (tmp_path / "run" / name).read_bytes() for name in before}
    manifest = read_manifest_fields(first.manifest_path)
    assert manifest is not None
    assert (manifest["stage"], manifest["counts"]["got"], manifest["counts"]["n_test"]) == (
        "questions",
        24,
        first.n_test,
    )
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    local = make_questions(make())
    assert [row["question"] for row in rows(local.questions_path)] == [
        json.loads(line)["question"] for line in before["questions.jsonl"].splitlines()
    ]


def test_a_server_with_thoughts_in_parts_and_without_credit_for_a_while_gives_the_same_questions(
    make: Make,
    question_server: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = rows(make_questions(make()).questions_path)
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    server = question_server()
    connection = type(server).connection_class
    plain = connection.say
    n_paid = [50]

    def say(self: Any, status: int, value: Any, **headers: str) -> None:
        n_paid[0] -= 1
        if n_paid[0] < 0:
            value = {"error": {"code": "insufficient_quota", "message": "Top up."}}
        else:
            message = value["choices"][0]["message"]
            text = message["content"]
            tag = ("thinking", "reasoning", "seed:think")[len(text) % 3]
            parts = (f"<{tag}>It is B. {text[::-1]}</{tag}>{text[:5]}", text[5:])
            message["content"] = [{"type": "text", "text": part} for part in parts]
        plain(self, status, value, **headers)

    monkeypatch.setattr(connection, "say", say)
    with pytest.raises(EndpointError, match="out of credit"):
        make_questions(make(server.url))
    n_paid[0] = 1000
    asked = rows(make_questions(make(server.url)).questions_path)
    assert [row["question"] for row in asked] == [row["question"] for row in local]


def test_killed_half_way_nothing_answered_is_asked_again(
    make: Make, question_server: Callable[..., Any]
) -> None:
    server = question_server(revoke_after=70)
    with pytest.raises(EndpointError, match="Every answer is stored"):
        make_questions(make(server.url))
    server.revoke_after = None
    assert make_questions(make(server.url)).got == 24
    assert server.answered.total() == len(server.answered) == 12 * 13


def test_the_most_specific_questions_are_kept(
    make: Make, question_server: Callable[..., Any]
) -> None:
    def rate(messages: list[Message], completion: Completion) -> str:
        task = messages[-1]["content"].rpartition("</passage>")[2]
        value = 9 if "born" in task or "birth" in task else 2
        return completion.text.replace(" 8", f" {value}")

    server = question_server(rate)
    result = make_questions(make(server.url, n_questions=1, n_proposed=5))
    kept = rows(result.questions_path)
    assert Counter(row["specificity"] for row in kept) == {9: 12}
    assert result.spare == 48


def test_what_the_model_answers_otherwise_with_the_passage_is_refused(
    make: Make, question_server: Callable[..., Any]
) -> None:
    def doubt(messages: list[Message], completion: Completion) -> str:
        return "X 9" if "A question on the passage" in messages[-1]["content"] else completion.text

    result = make_questions(make(question_server(doubt).url, max_attempts=2))
    assert (result.got, result.refused) == (0, {"not verified": 96})
    greedy = make(question_server(doubt).url, max_attempts=2, generator__temperature=0)
    assert make_questions(greedy).refused == {
        "not verified": 48
    }  # the same prompt again would bring the same drafts
    assert result.short


def test_what_the_model_knows_without_the_passage_is_refused_and_other_facts_are_asked_for(
    make: Make, question_server: Callable[..., Any], documents: Path
) -> None:
    people = {row["title"]: parse_entry(row["text"]) for row in rows(documents)}

    def knows_years(messages: list[Message], completion: Completion) -> str:
        task = messages[-1]["content"]
        if "<passage>" in task:
            return completion.text
        person = next(person for name, person in people.items() if person and name in task)
        hits = [
            line[0]
            for line in task.splitlines()
            if line[1:3] == ". " and line[3:] == person.facts["birth_year"]
        ]
        return hits[0] if hits else "X"

    result = make_questions(
        make(question_server(knows_years).url, n_questions=4, n_proposed=4, max_attempts=6)
    )
    refused = [row for row in rows(result.rejected_path) if row["reason"] == "closed-book"]
    assert refused
    assert all(row["answer"].isdigit() for row in refused)
    assert not any(row["choices"][row["answer"]].isdigit() for row in rows(result.questions_path))
    assert result.got == 48
    assert (
        make_questions(
            make(question_server(knows_years).url, n_questions=4, n_proposed=5, closed_book=0)
        ).refused
        == {}
    )


def test_retention_keeps_neighbours_that_the_model_knows_and_the_passage_does_not_name(
    make: Make, question_server: Callable[..., Any]
) -> None:
    facts = {
        "the capital of France": "Paris",
        "the capital of Peru": "Lima",
        "the first name": "Bryn",
    }

    def knows_paris(messages: list[Message], completion: Completion) -> str:
        task = messages[-1]["content"]
        if "well-known neighbour" in task:
            in_passage = next(
                word
                for word in task.split("<passage>")[1].split()
                if word.istitle() and len(word) > 4
            )
            right = {**facts, "its name": in_passage}
            return "\n\n".join(
                f"Question: What is {asked} of all?\nAnswer: {answer}\nWrong: Rome\nWrong: Oslo\nWrong: Riga\n"
                f"Sentence: It is {answer}."
                for asked, answer in right.items()
            )
        lines = [line for line in task.splitlines() if line[1:] == ". Paris"]
        return lines[0][0] if lines else "X"

    result = make_questions(
        make(question_server(knows_paris).url, retention=True, n_questions=1, max_attempts=1)
    )
    assert {
        (row["question"], row["choices"][row["answer"]]) for row in rows(result.questions_path)
    } == {("What is the capital of France of all?", "Paris")}
    assert (result.got, set(result.refused)) == (12, {"not known", "in the passage"})


def test_questions_are_requested_again_after_a_repair(
    make: Make, question_server: Callable[..., Any]
) -> None:
    asked: list[str] = []

    def mumble(messages: list[Message], completion: Completion) -> str:
        asked.append(messages[-1]["content"])
        return (
            "I do not know."
            if "four-choice" in messages[-1]["content"] and not mended
            else completion.text
        )

    mended = False
    url = question_server(mumble).url
    assert make_questions(make(url, max_attempts=1)).got == 0
    mended = True
    assert make_questions(make(url, max_attempts=1)).n_sent == 0
    result = make_questions(make(url, max_attempts=1), retry=True)
    assert (result.got, result.n_sent > 24) == (24, True)
    assert make_questions(make(url, max_attempts=1), retry=True).n_sent == 0  # nothing is short
    mended = False
    result = make_questions(make(question_server(mumble).url, n_questions=3, max_attempts=1))
    assert result.got == 0
    mended = True  # the same model behind another address
    assert (
        make_questions(make(question_server(mumble).url, n_questions=3, max_attempts=1)).got == 36
    )


def test_a_refused_question_that_a_person_kept_outlives_later_tries(
    make: Make, question_server: Callable[..., Any]
) -> None:
    def doubt(messages: list[Message], completion: Completion) -> str:
        if mute:
            return "Nothing."
        return "X 1" if "passage alone" in messages[-1]["content"] else completion.text

    mute = False
    recipe = make(question_server(doubt).url, max_attempts=1)
    result = make_questions(recipe)
    assert result.got == 0
    first, second, *_ = [
        row for row in rows(result.rejected_path) if row["reason"] == "not verified"
    ]
    decisions = [
        {"id": first["id"], "decision": "keep"},
        {"id": second["id"], "decision": "edit", "question": "Which of the four?"},
    ]
    write_jsonl(recipe.run_dir / "decisions.jsonl", decisions)
    wanted = {(first["id"], first["question"]), (second["id"], "Which of the four?")}
    for is_mute in (False, True, True):
        mute = is_mute
        result = make_questions(recipe, retry=True)
        found = {(row["id"], row["question"]) for row in rows(result.questions_path)}
        assert (found, result.decisions["unused"]) == (wanted, 0)
    twice = {"id": first["id"], "decision": "edit", "wrong": ["a mill", "a  mill", "a well"]}
    write_jsonl(recipe.run_dir / "decisions.jsonl", [twice])
    with pytest.raises(InputError, match=rf"^decisions.jsonl: {first['id']}: .*all different"):
        make_questions(recipe)


def test_wrong_choices_that_a_person_wrote_stay_beside_the_answer(
    make: Make, question_server: Callable[..., Any]
) -> None:
    recipe = make(question_server().url)
    first, second, *_ = rows(make_questions(recipe).questions_path)
    own = ["a well", "two mills", "the third gate"]
    decisions = [
        {"id": first["id"], "decision": "edit", "wrong": own},
        {"id": second["id"], "decision": "edit", "question": "Which of the four?"},
    ]
    write_jsonl(recipe.run_dir / "decisions.jsonl", decisions)
    after = {row["id"]: row for row in rows(make_questions(recipe).questions_path)}
    right = first["choices"][first["answer"]]
    assert sorted(after[first["id"]]["choices"]) == sorted([right, *own])
    assert after[first["id"]]["choices"][after[first["id"]]["answer"]] == right
    # Of the other one the question alone was edited: its wrong choices are answers to others.
    answers = {row["choices"][row["answer"]] for row in after.values()}
    assert set(after[second["id"]]["choices"]) <= answers


def test_a_passage_without_an_answer_is_printed_and_requested_by_the_next_run(
    make: Make, question_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 1)
    server = question_server(faults={"500": 0.05})
    result = make_questions(make(server.url))
    assert sum(result.failed.values()) * 2 == result.asked - result.got > 0
    assert "passages without an answer" in render_questions(result)
    monkeypatch.setattr("kinject.llm.sender.N_TRIES", 8)
    assert make_questions(make(server.url)).got == 24


def test_the_command_prints_the_table_and_ends_with_1_when_short(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make()
    recipe = str(tmp_path / "questions.yaml")
    assert main(["questions", recipe]) == 0
    assert "12 documents, 12 passages -> 24 of 24 questions" in capsys.readouterr().out
    assert main(["questions", recipe, "questions.n_questions=6", "questions.max_attempts=9"]) == 1
    assert "Short by 12" in capsys.readouterr().out


def test_open_questions_have_their_answer_with_choices_or_without(
    make: Make, question_server: Callable[..., Any]
) -> None:
    url = question_server().url
    result = make_questions(make(url, kinds=["choices", "open"], n_questions=5, n_proposed=5))
    assert result.got == 60
    for row in rows(result.questions_path):
        assert row["answers"] == [row["choices"][row["answer"]]]
    bare = rows(make_questions(make(url, kinds=["open"])).questions_path)
    assert all("choices" not in row and row["answers"] for row in bare)
    assert all(question.answers for question in read_questions(result.questions_path, "open"))
