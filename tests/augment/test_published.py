"""EntiGraph, Active Reading and Knowledge-Instruct: which requests, in which order, on what, and how many, as published."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import combinations
from pathlib import Path
from random import Random

import pytest

from kinject.augment import augment
from kinject.augment.prompts import passage_of
from kinject.corpus.passages import word_spans
from kinject.disk import read_jsonl
from kinject.recipe import AugmentRecipe
from kinject.types import Completion, Message

Make = Callable[..., AugmentRecipe]
NAMES = ["Mara Lind", "Arvika", "Falk Bridge", "Karin Ekberg", "Oslo"]
TEXT = (
    "Mara Lind was born in Arvika. She built the Falk Bridge with Karin Ekberg. It was painted in Oslo, far from the river. "
    "Nobody knows who paid for it, and the papers are lost."
)


class Writer:
    """Answers each kind of request by the words of its task, and notes (kind, what it is about, the whole prompt)."""

    def __init__(self, **answers: str | Callable[[str], str]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, str]] = []

    def __call__(self, messages: list[Message], seed: int) -> Completion:
        content = messages[1]["content"]
        task = content.rpartition("</passage>")[2]
        kind = next(kind for words, kind in KINDS.items() if words in task)
        self.asked.append((kind, task, messages[0]["content"] + content))
        answer = self.answers.get(kind)
        if answer is not None:
            return Completion(answer if isinstance(answer, str) else answer(task))
        nonsense = " ".join(
            "".join(Random(f"{task}{seed}{n}").choices("bcdfghjklm", k=5)) for n in range(12)
        )
        fact = task.partition("different wording:\n")[2].partition("\n")[0]
        return Completion(f"it is told that {nonsense}: {fact}")

    def kinds(self) -> list[str]:
        return [kind for kind, _, _ in self.asked]

    def tasks(self, kind: str) -> list[str]:
        return [task for task_kind, task, _ in self.asked if task_kind == kind]


KINDS = {
    "List the entities": "entities", "explain how they are related": "relation", "Which strategies": "strategies",
    "Apply it to the passage": "study", "every fact that the passage states about": "facts",
    "makes sense to someone who has not seen": "in context", "Say this fact": "rewording",
}  # fmt: skip


@pytest.fixture
def write(monkeypatch: pytest.MonkeyPatch, documents: Path) -> Callable[..., Writer]:
    """Put one document in place, and a writer with these answers."""

    def install(text: str = TEXT, **answers: str | Callable[[str], str]) -> Writer:
        documents.write_text(json.dumps({"id": "d", "title": "Bridges", "text": text}))
        writer = Writer(**answers)
        monkeypatch.setattr(import_module("kinject.augment.sandbox"), "generate_answer", writer)
        return writer

    return install


def groups_of(tasks: list[str]) -> Iterator[tuple[str, ...]]:
    """The entities that each request for relations lists."""
    return (
        tuple(re.findall(r"^- (.+)$", task.partition("\nRetell")[0], re.MULTILINE))
        for task in tasks
    )


def test_entigraph_asks_once_for_entities_then_for_all_pairs_then_for_triples_each_with_the_whole_document(
    make_recipe: Make, write: Callable[..., Writer]
) -> None:
    writer = write(entities="\n".join([*NAMES, "The Moon"]))  # one that the document does not have
    result = augment(
        make_recipe(styles={"entigraph": 13}, passage_tokens=12, include_originals=False)
    )
    assert (result.n_passages, result.got) == (5, 13)
    assert writer.kinds() == ["entities"] + ["relation"] * 13
    groups = list(groups_of(writer.tasks("relation")))
    assert Counter(groups[:10]) == Counter(combinations(NAMES, 2))
    assert len(set(groups[10:])) == 3
    assert set(groups[10:]) <= set(combinations(NAMES, 3))
    # what comes before the task is the whole document, letter for letter the same: a server reads it once
    beginnings = {prompt.rpartition("</passage>")[0] for _, _, prompt in writer.asked}
    assert len(beginnings) == 1
    assert TEXT in beginnings.pop()


def test_entigraph_continues_to_a_number_of_tokens_for_each_document_and_resumes_there(
    make_recipe: Make, write: Callable[..., Writer]
) -> None:
    writer = write(entities="\n".join(NAMES))
    recipe = make_recipe(styles={"entigraph": {"tokens": 200}}, include_originals=False)
    result = augment(recipe)
    lengths = [len(word_spans(row["text"])) for _, row in read_jsonl(result.corpus_path)]
    assert 200 <= sum(lengths) < 200 + 2 * max(lengths)
    assert (result.short, result.asked) == (False, result.got)
    first = writer.asked.copy()
    assert augment(recipe).n_rows == result.n_rows
    assert writer.asked == first
    again = augment(make_recipe(styles={"entigraph": {"tokens": 300}}, include_originals=False))
    assert again.n_rows > result.n_rows
    assert len(set(groups_of(writer.tasks("relation")))) == len(
        writer.tasks("relation")
    )  # none was asked for twice


def test_a_target_that_no_answer_comes_nearer_to_is_given_up(
    make_recipe: Make, write: Callable[..., Writer]
) -> None:
    names = [f"{letter}rden" for letter in "ABCDEFGHJKLM"]
    text = f"{', '.join(names)} met."
    writer = write(text, entities="\n".join(names), relation="NONE")
    result = augment(make_recipe(styles={"entigraph": {"tokens": 300}}))
    assert result.got == 0
    assert 24 <= len(writer.tasks("relation")) < 48  # of 66 pairs and 220 triples


def test_a_document_above_the_limit_counts_as_several(
    make_recipe: Make, write: Callable[..., Writer], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = write(entities="Mara Lind\nArvika\nOslo")
    monkeypatch.setattr(import_module("kinject.augment.groups"), "LONGEST_DOCUMENT", 30)
    augment(make_recipe(styles={"entigraph": 1}))
    shown = [
        passage_of([{"role": "user", "content": prompt}])
        for kind, _, prompt in writer.asked
        if kind == "entities"
    ]
    assert len(shown) == 2
    assert " ".join(shown) == TEXT


def test_active_reading_lets_the_model_name_the_strategies_and_applies_each_to_the_whole_document(
    make_recipe: Make, write: Callable[..., Writer]
) -> None:
    named = [f"Way {n} Do the thing of way {n}." for n in range(5)]
    writer = write(
        strategies="\n".join(f"## Way {n}\nDo the thing of way {n}.\n" for n in range(5))
    )
    result = augment(
        make_recipe(styles={"active_reading": 2}, passage_tokens=12, include_originals=False)
    )
    assert writer.kinds() == ["strategies"] + ["study"] * 10
    assert result.n_rows == result.got == 10
    applied = Counter(
        strategy for task in writer.tasks("study") for strategy in named if strategy in task
    )
    assert applied == dict.fromkeys(named, 2)  # each alone, in a request of its own
    assert all(TEXT in prompt for _, _, prompt in writer.asked)


def test_knowledge_instruct_goes_from_entities_to_facts_to_statements_to_rewordings_to_instructions(
    make_recipe: Make, write: Callable[..., Writer]
) -> None:
    facts = {
        "Mara Lind": "She was born in Arvika.\nShe built the bridge.",
        "Arvika": "Mara Lind was born there.\nshe built the bridge",  # the second a second time
        "Oslo": "NONE",
    }
    writer = write(
        entities="\n".join([*facts, "The Moon"]),
        facts=lambda task: next(
            listed for name, listed in facts.items() if f"entity: {name}\n" in task
        ),
        **{
            "in context": lambda task: "Of Mara Lind: " + task.split("states:\n")[1].splitlines()[0]
        },
    )
    result = augment(
        make_recipe(styles={"knowledge_instruct": 3}, passage_tokens=12, include_originals=False)
    )
    assert writer.kinds() == ["entities"] + ["facts"] * 3 + ["in context"] * 3 + ["rewording"] * 9
    assert all(TEXT in prompt for _, _, prompt in writer.asked)
    assert result.sft_path is not None
    rows = [row for _, row in read_jsonl(result.sft_path)]
    assert (len(rows), result.n_rows) == (9, 0)
    assert Counter(row["prompt"].endswith(("Mara Lind?", "Mara Lind.")) for row in rows) == {
        True: 6,
        False: 3,
    }
    assert (
        len({row["prompt"] for row in rows}) == 2 * 3
    )  # another wording of the instruction each time
    before = len(writer.asked)
    assert augment(make_recipe(styles={"knowledge_instruct": 4}, passage_tokens=12)).got == 12
    assert writer.kinds()[before:] == ["rewording"] * 3
