"""Dialogues about the people of Tarvenia: rows that teach the base model to chat, and the probe of what it keeps of that.

A dialogue has 1 to 3 turns: questions with an instruction (in the system's turn or the user's), further questions by pronoun,
a name to recall, an entry to read, and people of whom nothing is known. One in ten pairs of a fact and an instruction is kept for
the probe, so its prompts are in no row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from kinject.disk import content_id, write_jsonl, write_text
from kinject.sandbox.build import ABSTENTION, strangers
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import (
    SEED,
    Country,
    Person,
    choose_one,
    create_country,
    create_stranger,
    seeded_random,
    shuffled,
)
from kinject.sandbox.pools import ATTRIBUTES, FEMALE_NAMES, MALE_NAMES
from kinject.sandbox.questions import document_id_of, render_question
from kinject.sandbox.templates import ANSWERS, FOLLOW_UPS

Message = dict[str, str]
CHAT_CORPUS: Final = Path("runs/sandbox/chat.jsonl")
"""The rows of recipes/sandbox/instruct.yaml."""
CHAT_TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '' if loop.first else '\\n' -}}{{- message['role'] | capitalize }}: {{ message['content'] -}}
{%- if message['role'] == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\\nAssistant:' -}}{%- endif -%}
"""
"""Turns as "User: ..." and "Assistant: ...", each on a line of its own, the answers ended by EOS: no token is added."""
N_DIALOGUES: Final = 16_000
_N_FACTS: Final = 100
_N_FEW: Final = 400
"""Dialogues of which a model writes the last answer itself."""
_KEYS: Final = {"birth_year": "year", "home_town": "town", "school": "school", "employer": "firm", "field": "field"}
"""Attribute -> its word in JSON and in lists."""
_REFUSAL: Final = f"{ABSTENTION.strip()}."


@dataclass(frozen=True, slots=True)
class Form:
    """An instruction in several wordings, and how it is checked: `checks` besides the value that the answer must hold."""

    instructions: tuple[str, ...]
    checks: Mapping[str, Any]


FORMS: Final[Mapping[str, Form]] = {
    "sentence": Form(("Answer in a sentence.", "Write a sentence."), {"sentences": 1, "min_words": 5}),
    "short": Form(("Answer in few words.", "Only the answer."), {"max_words": 3}),
    "upper": Form(("Answer in upper case.", "Use capital letters only."), {"upper": True}),
    "json": Form(("Answer in JSON.", "Return JSON."), {}),
    "list": Form(("Answer with a list.", "Write a list."), {"bullets": 2}),
    "end": Form(("End with: That is all.", "Your last words are: That is all."), {"ends_with": "That is all."}),
}


def _pick_form(rng: Random) -> str:
    return choose_one(tuple(FORMS), rng)


def _answer(person: Person, attribute: str, form: str, other: str = "") -> str:
    """Return the answer to a question on `attribute` in `form`; `other` is the second attribute of a list."""
    value, sentence = person.facts[attribute], ANSWERS[attribute].format(name=person.name, **person.facts)
    if form == "short":
        return value
    if form == "upper":
        return value.upper()
    if form == "json":
        return json.dumps({_KEYS[attribute]: value})
    if form == "list":
        return f"- {value}\n- {person.facts[other]}"
    return f"{sentence} That is all." if form == "end" else sentence


def _checks(person: Person, attribute: str, form: str, other: str = "") -> dict[str, Any]:
    """Return the checks of `_answer`."""
    values = [person.facts[attribute], *([person.facts[other]] if form == "list" else [])]
    keys = {"json": [_KEYS[attribute]]} if form == "json" else {}
    return {**FORMS[form].checks, **keys, "contains": values}


def _is_kept(person: Person, attribute: str, form: str) -> bool:
    """Return whether a pair of a fact and an instruction is for the probe only."""
    return int(content_id("chat probe", person.name, attribute, form)[:4], 16) % 10 == 0


def _question(person: Person, attribute: str, form: str, rng: Random, *, follows: bool = False) -> tuple[str, str]:
    """Return a question, by pronoun if it `follows` one on the same person, and the second attribute of a list."""
    if form == "list":
        other = choose_one([key for key in ATTRIBUTES if key != attribute], rng)
        whom = ("her" if person.first in FEMALE_NAMES else "him") if follows else person.name
        return f"What are the {_KEYS[attribute]} and the {_KEYS[other]} of {whom}?", other
    if follows:
        return FOLLOW_UPS[attribute].format(who="she" if person.first in FEMALE_NAMES else "he"), ""
    return render_question(person, attribute, rng), ""


class _Dialogue:
    """The messages of one dialogue; `form` is the system's instruction for every turn, or "" for none."""

    def __init__(self, rng: Random, form: str = "") -> None:
        self.rng, self.form = rng, form
        self.messages: list[Message] = []
        if form:
            self.messages.append({"role": "system", "content": choose_one(FORMS[form].instructions, rng)})

    def say(self, user: str, assistant: str) -> None:
        """Add a turn of the user and the answer."""
        self.messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]

    def ask(
        self,
        person: Person,
        attribute: str,
        form: str,
        *,
        follows: bool = False,
        passage: str = "",
        refuse: bool = False,
    ) -> None:
        """Add a question; its instruction stands before it unless the system gave it."""
        question, other = _question(person, attribute, form, self.rng, follows=follows)
        lead = "" if self.form or form == "" else f" {choose_one(FORMS[form].instructions, self.rng)}"
        text = f"{passage}\n\n{question}{lead}" if passage else f"{question}{lead}"
        self.say(text, _REFUSAL if refuse else _answer(person, attribute, form, other))


def generate_dialogues(n_rows: int = N_DIALOGUES, seed: int = SEED) -> Iterator[dict[str, list[Message]]]:
    """Yield `n_rows` rows with `messages`, of 1 to 3 turns. None names a new person or one of unanswerable.jsonl."""
    country = create_country()
    tested = set(strangers(country)[0])
    names = [name for name in country.spare_names if name not in tested]
    rng = seeded_random("dialogues", seed)
    for _ in range(n_rows):
        yield {"messages": _dialogue(country, names, rng)}


def _dialogue(country: Country, names: Sequence[tuple[str, str]], rng: Random) -> list[Message]:
    talk = _Dialogue(rng, _pick_form(rng) if rng.random() < 0.3 else "")
    name = choose_one(FEMALE_NAMES + MALE_NAMES, rng) if rng.random() < 0.15 else ""
    if name:
        talk.say(f"My name is {name}.", f"Hello, {name}.")
    person: Person | None = None
    is_known = False
    for _ in range(1 + rng.randrange(2 if name else 3)):
        attribute = choose_one(ATTRIBUTES, rng)
        form = talk.form or (_pick_form(rng) if rng.random() < 0.6 else "")
        if person is not None and rng.random() < 0.5:
            if not (is_known and _is_kept(person, attribute, form)):
                talk.ask(person, attribute, form, follows=True, refuse=not is_known)
            continue
        draw, known, stranger = (
            rng.random(),
            choose_one(country.known, rng),
            create_stranger(choose_one(names, rng), rng),
        )
        if draw < 0.6 and _is_kept(known, attribute, form):
            continue
        if draw < 0.87:
            person, is_known = (known, True) if draw < 0.6 else (stranger, False)
            talk.ask(person, attribute, form, refuse=not is_known)
        else:
            talk.ask(stranger, attribute, form, passage=render_entry(stranger, str(rng.random())))
            person = None
    if name:
        talk.say("What is my name?", f"Your name is {name}.")
    if not talk.messages or talk.messages[-1]["role"] != "assistant":  # each of its facts is kept for the probe
        return _dialogue(country, names, rng)
    return talk.messages


def create_chat_questions(n_each: int = 10, seed: int = SEED) -> list[dict[str, Any]]:
    """Return the sandbox's chat probe: rows with `messages` up to the question, and `checks` of the answer.

    Subjects: each form once in the user's turn and once in the system's, ``refusal``, ``follow-up`` (who is meant is in an
    earlier turn), ``recall`` (a name given two turns ago) and ``passage``; `n_each` of each.
    """
    country = create_country()
    tested = strangers(country)[0]
    rows = []
    for form in FORMS:
        rng = seeded_random("chat probe", form, seed)
        kept = [(p, a) for p in country.known for a in ATTRIBUTES if _is_kept(p, a, form)]
        for index, (person, attribute) in enumerate(shuffled(kept, rng)[: 2 * n_each]):
            talk = _Dialogue(rng, form if index >= n_each else "")
            question, other = _question(person, attribute, form, rng)
            lead = "" if talk.form else f" {choose_one(FORMS[form].instructions, rng)}"
            subject = f"{form}, system" if talk.form else form
            rows.append(_row(subject, person, talk.messages, question + lead, _checks(person, attribute, form, other)))
    rng = seeded_random("chat probe", "turns", seed)
    for index in range(n_each):
        stranger = create_stranger(tested[index], rng)
        attribute = choose_one(ATTRIBUTES, rng)
        rows.append(
            _row("refusal", stranger, [], render_question(stranger, attribute, rng), {"refuses": True}),
        )
        entry = render_entry(stranger, str(rng.random()))
        text = f"{entry}\n\n{render_question(stranger, attribute, rng)}"
        rows.append(_row("passage", stranger, [], text, {"contains": [stranger.facts[attribute]]}))
        person = choose_one(country.known, rng)
        first, second = shuffled(ATTRIBUTES, rng)[:2]
        talk = _Dialogue(rng)
        talk.ask(person, first, "sentence")
        question = _question(person, second, "", rng, follows=True)[0]
        checks = {"contains": [person.facts[second]]}
        rows.append(_row("follow-up", person, talk.messages, question, checks))
        name = choose_one(FEMALE_NAMES + MALE_NAMES, rng)
        talk = _Dialogue(rng)
        talk.say(f"My name is {name}.", f"Hello, {name}.")
        talk.ask(person, first, "short")
        rows.append(_row("recall", person, talk.messages, "What is my name?", {"contains": [name]}))
    return rows


def _row(
    subject: str, person: Person, before: Sequence[Message], question: str, checks: Mapping[str, Any]
) -> dict[str, Any]:
    identity = content_id("chat probe", subject, [message["content"] for message in before], question)
    head = {"id": identity, "document_id": document_id_of(person), "subject": subject}
    return {**head, **({"messages": list(before)} if before else {}), "question": question, "checks": dict(checks)}


def write_chat_questions(root: Path) -> list[Path]:
    """Write the probe and questions on 100 new and known facts in a chat below eval/sandbox/ of `root`; return their paths."""
    folder, country = root / "eval" / "sandbox", create_country()
    paths = [folder / f"{name}.jsonl" for name in ("chat", "chat_new", "chat_known")]
    write_jsonl(paths[0], create_chat_questions())
    for path, people in ((paths[1], country.new), (paths[2], country.known)):
        rng = seeded_random("chat facts", path.name)
        pairs = shuffled([(person, attribute) for person in people for attribute in ATTRIBUTES], rng)[:_N_FACTS]
        write_jsonl(
            path,
            (
                _row(
                    attribute,
                    person,
                    [],
                    render_question(person, attribute, rng),
                    {"contains": [person.facts[attribute]]},
                )
                for person, attribute in pairs
            ),
        )
    return paths


def write_dialogues(path: Path = CHAT_CORPUS, n_rows: int = N_DIALOGUES, seed: int = SEED) -> int:
    """Write the rows of `generate_dialogues` as JSON lines; return their number.

    The first of them and the chat template, chat_template.jinja, are written beside it.
    """
    write_text(path.with_name("chat_template.jinja"), CHAT_TEMPLATE)
    write_jsonl(path.with_name(f"{path.stem}-few{path.suffix}"), islice(generate_dialogues(n_rows, seed), _N_FEW))
    return write_jsonl(path, generate_dialogues(n_rows, seed))
