"""The prompts of the shipped styles, in files that a person can read. Run this file as a script to write them again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kinject.augment.prompts import Source, judge_messages
from kinject.augment.question_prompts import closed_book_messages, propose_messages, verify_messages
from kinject.augment.styles import STYLES
from kinject.llm.judges import grading_request
from kinject.types import Message

FOLDER = Path(__file__).parent / "prompts"
PROSE = Source(
    "The Falk Bridge",
    "Mara Lind was born in Arvika. She built the Falk Bridge with Karin Ekberg in 1931. “It stands,” said the mayor.",
    ("Bridges", "North"),
)
TABLE = Source(
    "Brücken",
    "## Maße\n\nDie Brücke ist für die Stadt und das Land nicht zu lang.\n\n| Länge | Jahr |\n|---|---|\n| 120 m | 1931 |",
)
CODE = Source("", "`F2` → 12 V\n\n```\nkinject augment\n```")


def _prompts() -> dict[str, str]:
    """Name of a file -> its text."""
    prompts = {}
    for name, style in STYLES.items():
        if style.mechanical:
            continue
        parts = []
        for label, source in (
            ("prose", PROSE),
            ("a table, in German", TABLE),
            ("code, no title, no language", CODE),
        ):
            item: dict[str, Any] = {"entity": "ENTITY"} if style.scope == "pair" else {}
            for step in style.prepare:
                parts.append(
                    (f"{label}: preparation, {step.name}", style.preparation(step, source, item))
                )
                item[step.name] = ("ENTITY 1", "ENTITY 2") if style.combine else step.name.upper()
            missing = style.missing_need(source)
            messages = style.messages(source, 0, item)
            parts.append(
                (
                    f"{label}: skipped, for it lacks {missing}" if missing else f"{label}: variant",
                    messages,
                )
            )
            if style.verify:
                parts.append((f"{label}: verification", style.verification(source, item, "TEXT")))
        prompts[f"{name}.txt"] = "\n".join(_show(title, messages) for title, messages in parts)
    question, choices = (
        "Who built the Falk Bridge?",
        ("Mara Lind", "Jon Berg", "Ida Holm", "Per Dahl"),
    )
    exam = (
        ("propose", propose_messages(PROSE, 4, ["When was it built?"])),
        ("verify", verify_messages(PROSE, question, choices)),
        ("closed book", closed_book_messages(question, choices)),
        ("propose, open", propose_messages(PROSE, 4, [], ("open",))),
        ("propose, retention", propose_messages(PROSE, 4, [], retention=True)),
    )
    prompts["questions-for-tests.txt"] = "\n".join(
        _show(title, messages) for title, messages in exam
    )
    grades = (
        ("grade", grading_request("Who built it?", ["Mara Lind", "M. Lind"], "ANSWER")),
        ("none accepted", grading_request("Who?", [], "ANSWER")),
    )
    prompts["grades.txt"] = "\n".join(_show(title, messages) for title, messages in grades)
    prompts["judge.txt"] = _show("judge", judge_messages(PROSE.title, PROSE.text, "REWRITING"))
    prompts["judge_part.txt"] = _show(
        "judge", judge_messages(PROSE.title, PROSE.text, "REWRITING", STYLES["questions"].rules)
    )
    return prompts


def _show(title: str, messages: list[Message]) -> str:
    lines = [f"######## {title}"]
    for message in messages:
        lines += [f"---- {message['role']}", message["content"]]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", sorted(_prompts()))
def test_the_prompts_are_those_in_the_files(name: str) -> None:
    path = FOLDER / name
    assert path.exists(), f"run: python {Path(__file__).name}"
    assert _prompts()[name] == path.read_text("utf-8"), (
        f"run: python tests/augment/{Path(__file__).name}, and read the diff"
    )


def test_no_file_is_left_of_a_prompt_that_is_gone() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(_prompts())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for name, text in _prompts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
