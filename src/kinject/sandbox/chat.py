"""Dialogues about the people of Tarvenia: rows that teach the base model to chat, and a probe of
that ability.

A dialogue has 1 to 6 turns: questions with an instruction (in the system's turn or the user's), the
answer again in another form, further questions by pronoun, a name to recall, an entry to read, and
questions to decline: on people with foreign names, and on facts in no entry. One in ten pairs of a
fact and an instruction is kept for the probe, so its prompts are in no row.

The forms are those that the base's 1,200 tokens can hold. It knows a value as one token behind a
space, so capitals, and a value behind a quotation mark, are other tokens that its facts do not lead
to: JSON and lower case are asked of an answer given before.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from random import Random
from typing import Any, Final

from kinject.disk import content_id, write_jsonl, write_text
from kinject.sandbox.build import ABSTENTION, strangers
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import (
    ATTRIBUTES,
    FEMALE_NAMES,
    MALE_NAMES,
    SEED,
    TEXTS,
    Country,
    Person,
    choose_one,
    create_country,
    create_stranger,
    seeded_random,
    shuffled,
)
from kinject.sandbox.questions import document_id_of, render_question

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
"""Turns as "User: ..." and "Assistant: ...", each on a line of its own, the answers ended by EOS:
no token is added."""
N_DIALOGUES: Final = 24_000
_N_FACTS: Final = 100
_N_FEW: Final = 400
"""Dialogues of which a model writes the last answer itself."""
_N_EACH: Final = 8
"""Prompts of the probe for each instruction and speaker."""
_REFUSAL: Final = f"{ABSTENTION.strip()}."


@dataclass(frozen=True, slots=True)
class Form:
    """An instruction in several phrasings, and the checks of an answer besides the value that it
    must hold.

    ``{word}`` is replaced by one of `words`. `again`: it is given after an answer, which is to be
    written again.
    """

    instructions: Sequence[str]
    checks: Mapping[str, Any]
    words: Sequence[str] = ("",)
    again: bool = False


FORMS: Final[Mapping[str, Form]] = {name: Form(**form) for name, form in TEXTS["forms"].items()}


@dataclass(frozen=True, slots=True)
class Instruction:
    """A form of `FORMS` with its word; `form` is "" for none."""

    form: str = ""
    word: str = ""

    def phrasing(self, rng: Random) -> str:
        """Return one of its phrasings."""
        return choose_one(FORMS[self.form].instructions, rng).format(word=self.word)

    def answer(self, person: Person, attributes: Sequence[str]) -> str:
        """Return the answer on the `attributes` of `person`, as instructed."""
        values = [person.facts[attribute] for attribute in attributes]
        facts, value = {"name": person.name, **person.facts}, values[0]
        sentence = str(TEXTS["answers"][attributes[0]]).format(**facts)
        within = sentence
        # Behind another word the article has a small letter.
        if sentence.startswith("The "):
            within = f"the {sentence.removeprefix('The ')}"
        match self.form:
            case "two sentences":
                return f"{sentence} The {TEXTS['keys'][attributes[0]]} is {value}."
            case "short":
                return value
            case "lower":
                return value.lower()
            case "json":
                return json.dumps({self.word: value})
            case "list":
                pairs = zip(attributes, values, strict=True)
                return "\n".join(f"- {TEXTS['keys'][key]}: {item}" for key, item in pairs)
            case "start":
                return f"{self.word}, {within}"
            case "end":
                return f"{sentence} {self.word}"
            case "keyword":
                return f"{TEXTS['leads'][self.word]} {within}"
            case "german":
                return str(TEXTS["german"][attributes[0]]).format(**facts)
        return sentence

    def checks(self, person: Person, attributes: Sequence[str]) -> dict[str, Any]:
        """Return the checks of `answer`."""
        checks: dict[str, Any] = {
            name: self._filled(value) for name, value in FORMS[self.form].checks.items()
        }
        if self.form == "list":
            checks["bullets"] = len(attributes)
        contains = checks.pop("contains", [])
        values = [person.facts[attribute] for attribute in attributes]
        return {**checks, "contains": [*contains, *values]}

    def _filled(self, argument: str | list[str] | int) -> str | list[str] | int:
        """Return the argument of a check with the word of this instruction."""
        if isinstance(argument, str):
            return argument.format(word=self.word)
        if isinstance(argument, list):
            return [part.format(word=self.word) for part in argument]
        return argument


def _pick(rng: Random, *, again: bool = False) -> Instruction:
    form = choose_one([name for name, form in FORMS.items() if form.again == again], rng)
    return Instruction(form, choose_one(FORMS[form].words, rng))


def _is_kept(person: Person, attribute: str, form: str) -> bool:
    """Return whether a pair of a fact and an instruction is for the probe only."""
    return int(content_id("chat probe", person.name, attribute, form)[:4], 16) % 10 == 0


def _nobody(rng: Random, *, for_probe: bool) -> Person:
    """Return a person without facts and with a foreign name, one of the probe's names if
    `for_probe`."""
    while True:
        # With names of the country in training, the model answered about 7 of 8 unknown people.
        person = Person(
            choose_one(FEMALE_NAMES + MALE_NAMES, rng), choose_one(TEXTS["foreign"], rng), {}
        )
        if _is_kept(person, "", "nobody") == for_probe:
            return person


def _question(
    person: Person, attribute: str, form: str, rng: Random, *, follows: bool = False
) -> tuple[str, tuple[str, ...]]:
    """Return a question, by pronoun if it `follows` one on the same person, and the attributes that
    it asks for."""
    who, whom = ("she", "her") if person.first in FEMALE_NAMES else ("he", "him")
    if form == "list":
        others = shuffled([key for key in ATTRIBUTES if key != attribute], rng)
        attributes = (attribute, *others[: 1 + rng.randrange(2)])
        *firsts, last = (f"the {TEXTS['keys'][key]}" for key in attributes)
        of = whom if follows else person.name
        return f"What are {', '.join(firsts)} and {last} of {of}?", attributes
    if follows:
        return TEXTS["follow_ups"][attribute].format(who=who), (attribute,)
    return render_question(person, attribute, rng), (attribute,)


class _Dialogue:
    """The messages of one dialogue; `always` is the system's instruction for every turn, if there
    is one."""

    def __init__(self, rng: Random, always: Instruction | None = None) -> None:
        self.rng, self.always = rng, always
        self.messages: list[Message] = []
        if always:
            self.messages.append({"role": "system", "content": always.phrasing(rng)})

    def add_turn(self, user: str, assistant: str) -> None:
        """Add a turn of the user and the answer."""
        self.messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": assistant},
        ]

    def add_question(
        self,
        person: Person,
        attribute: str,
        instruction: Instruction,
        *,
        follows: bool = False,
        passage: str = "",
        refuse: bool = False,
    ) -> None:
        """Add a question; its instruction follows it unless the system gave it."""
        text, attributes = self.question(person, attribute, instruction, follows=follows)
        if passage:
            text = f"{passage}\n\n{text}"
        answer = _REFUSAL if refuse else instruction.answer(person, attributes)
        self.add_turn(text, answer)

    def question(
        self, person: Person, attribute: str, instruction: Instruction, *, follows: bool = False
    ) -> tuple[str, tuple[str, ...]]:
        """Return a question with its instruction, and the attributes that it asks for; of a form
        `again` the instruction."""
        if instruction.form and FORMS[instruction.form].again:
            return instruction.phrasing(self.rng), (attribute,)
        text, attributes = _question(person, attribute, instruction.form, self.rng, follows=follows)
        if instruction.form and not self.always:
            text = f"{text} {instruction.phrasing(self.rng)}"
        return text, attributes


def generate_dialogues() -> Iterator[dict[str, list[Message]]]:
    """Yield `N_DIALOGUES` rows with `messages`, of 1 to 6 turns. None names a new person or one of
    unanswerable.jsonl."""
    country = create_country()
    tested = set(strangers(country)[0])
    names = [name for name in country.spare_names if name not in tested]
    rng = seeded_random("dialogues", SEED)
    for _ in range(N_DIALOGUES):
        yield {"messages": _dialogue(country, names, rng)}


def _dialogue(country: Country, names: Sequence[tuple[str, str]], rng: Random) -> list[Message]:
    """Return a dialogue of up to three questions, each perhaps with its answer in another form."""
    talk = _Dialogue(rng, _pick(rng) if rng.random() < 0.3 else None)
    name = choose_one(FEMALE_NAMES + MALE_NAMES, rng) if rng.random() < 0.15 else ""
    if name:
        talk.add_turn(f"My name is {name}.", f"Hello, {name}.")
    topic: _Topic | None = None
    for _ in range(1 + rng.randrange(2 if name else 3)):
        attribute = choose_one(ATTRIBUTES, rng)
        instruction = _next_instruction(talk, rng)
        # A pronoun needs somebody whom an earlier turn has named.
        if topic is not None and topic.can_follow and rng.random() < 0.5:
            # Pairs that are kept for the probe are in no dialogue.
            if not (topic.is_known and _is_kept(topic.person, attribute, instruction.form)):
                refuse = not topic.is_known
                talk.add_question(topic.person, attribute, instruction, follows=True, refuse=refuse)
            continue
        asked = _ask_anew(talk, country, names, attribute, instruction)
        # Where the fact is kept for the probe, the person of before stays the topic.
        topic = asked or topic
        if asked is not None and asked.is_answered:
            _ask_in_another_form(talk, asked, attribute, instruction)
    if name:
        talk.add_turn("What is my name?", f"Your name is {name}.")
    # Each of its facts was kept for the probe: no question was asked.
    if not talk.messages or talk.messages[-1]["role"] != "assistant":
        return _dialogue(country, names, rng)
    return talk.messages


def _next_instruction(talk: _Dialogue, rng: Random) -> Instruction:
    """Return the system's instruction, or else, for 6 of 10 questions, one of their own."""
    if talk.always:
        return talk.always
    if rng.random() < 0.6:
        return _pick(rng)
    return Instruction()


def _ask_in_another_form(
    talk: _Dialogue, topic: _Topic, attribute: str, instruction: Instruction
) -> None:
    """Ask, in 4 of 10 dialogues in which it is apt, for the last answer in another form."""
    further = _pick(talk.rng, again=True)
    # These forms hold one value, and a list has several.
    if not topic.is_known or talk.always or instruction.form == "list":
        return
    if _is_kept(topic.person, attribute, further.form):
        return
    if talk.rng.random() < 0.4:
        talk.add_question(topic.person, attribute, further)


@dataclass(frozen=True, slots=True)
class _Topic:
    """The person of the last question.

    `is_known`: the answer states a fact of theirs. `can_follow`: a question by pronoun may follow.
    `is_answered`: the answer may be asked for in another form.
    """

    person: Person
    is_known: bool
    can_follow: bool = True
    is_answered: bool = True


def _ask_anew(
    talk: _Dialogue,
    country: Country,
    names: Sequence[tuple[str, str]],
    attribute: str,
    instruction: Instruction,
) -> _Topic | None:
    """Ask about another person: known (7 in 10), nobody, known but not on record, or a stranger
    with an entry to read. None if the fact is kept for the probe."""
    rng = talk.rng
    draw, known = rng.random(), choose_one(country.known, rng)
    if draw < 0.7:
        if _is_kept(known, attribute, instruction.form):
            return None
        talk.add_question(known, attribute, instruction)
        return _Topic(known, is_known=True)
    if draw < 0.8:
        nobody = _nobody(rng, for_probe=False)
        talk.add_question(nobody, attribute, instruction, refuse=True)
        return _Topic(nobody, is_known=False)
    if draw < 0.85 and not _is_kept(known, "", "no record"):
        talk.add_turn(choose_one(TEXTS["no_record"], rng).format(name=known.name), _REFUSAL)
        return _Topic(known, is_known=True, is_answered=False)
    stranger = create_stranger(choose_one(names, rng), rng)
    passage = render_entry(stranger, str(rng.random()))
    talk.add_question(stranger, attribute, instruction, passage=passage)
    return _Topic(stranger, is_known=True, can_follow=False)


def create_chat_questions() -> list[dict[str, Any]]:
    """Return the sandbox's chat probe: rows with `messages` up to the question, and `checks` of the
    answer.

    Subjects: each form, in the user's turn and in the system's, or after a short answer and after a
    sentence; ``nobody`` and ``no record`` (to be declined), ``follow-up`` (who is meant is in an
    earlier turn), ``recall`` (a name given two turns ago) and ``passage``; `_N_EACH` of each.
    """
    country = create_country()
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        rows += _form_rows(country, form)
    rng = seeded_random("chat probe", "turns", SEED)
    tested = strangers(country)[0]
    # People whom no dialogue of the training declines in this way.
    known = [person for person in country.known if _is_kept(person, "", "no record")]
    for unasked, name in zip(shuffled(known, rng)[:_N_EACH], tested[:_N_EACH], strict=True):
        rows += _turn_rows(country, unasked, name, rng)
    return rows


def _form_rows(country: Country, form: str) -> Iterator[dict[str, Any]]:
    """Yield `_N_EACH` rows with a form in the user's turn (or after a short answer), then as many
    in the system's (or after a sentence)."""
    rng = seeded_random("chat probe", form, SEED)
    pairs = [pair for pair in product(country.known, ATTRIBUTES) if _is_kept(*pair, form)]
    for index, (person, attribute) in enumerate(shuffled(pairs, rng)[: 2 * _N_EACH]):
        instruction = Instruction(form, choose_one(FORMS[form].words, rng))
        subject, is_second = form, index >= _N_EACH
        if FORMS[form].again:
            talk = _Dialogue(rng)
            before = "sentence" if is_second else "short"
            talk.add_question(person, attribute, Instruction(before))
            subject += ", of a sentence" if is_second else ""
        else:
            talk = _Dialogue(rng, instruction if is_second else None)
            subject += ", system" if is_second else ""
        text, attributes = talk.question(person, attribute, instruction)
        checks = instruction.checks(person, attributes)
        yield _row(subject, person, talk.messages, text, checks)


def _turn_rows(
    country: Country, unasked: Person, name: tuple[str, str], rng: Random
) -> Iterator[dict[str, Any]]:
    """Yield a row of each subject that is no form; `name` is that of a stranger."""
    nobody, attribute = _nobody(rng, for_probe=True), choose_one(ATTRIBUTES, rng)
    text = render_question(nobody, attribute, rng)
    yield _row("nobody", nobody, [], text, {"refuses": True})
    text = choose_one(TEXTS["no_record"], rng).format(name=unasked.name)
    yield _row("no record", unasked, [], text, {"refuses": True})
    stranger = create_stranger(name, rng)
    entry = render_entry(stranger, str(rng.random()))
    text = f"{entry}\n\n{render_question(stranger, attribute, rng)}"
    yield _row("passage", stranger, [], text, {"contains": [stranger.facts[attribute]]})
    person = choose_one(country.known, rng)
    first, second = shuffled(ATTRIBUTES, rng)[:2]
    talk = _Dialogue(rng)
    talk.add_question(person, first, Instruction("sentence"))
    text = _question(person, second, "", rng, follows=True)[0]
    yield _row("follow-up", person, talk.messages, text, {"contains": [person.facts[second]]})
    users_name = choose_one(FEMALE_NAMES + MALE_NAMES, rng)
    talk = _Dialogue(rng)
    talk.add_turn(f"My name is {users_name}.", f"Hello, {users_name}.")
    talk.add_question(person, first, Instruction("short"))
    text, checks = "What is my name?", {"contains": [users_name]}
    yield _row("recall", person, talk.messages, text, checks)


def _row(
    subject: str,
    person: Person,
    before: Sequence[Message],
    question: str,
    checks: Mapping[str, Any],
) -> dict[str, Any]:
    texts = [message["content"] for message in before]
    identity = content_id("chat probe", subject, texts, question)
    row = {"id": identity, "document_id": document_id_of(person), "subject": subject}
    messages = {"messages": list(before)} if before else {}
    return {**row, **messages, "question": question, "checks": dict(checks)}


def write_chat_questions(root: Path) -> list[Path]:
    """Write the probe and questions on 100 new and known facts in a chat below eval/sandbox/ of
    `root`; return their paths."""
    folder, country = root / "eval" / "sandbox", create_country()
    paths = [folder / f"{name}.jsonl" for name in ("chat", "chat_new", "chat_known")]
    write_jsonl(paths[0], create_chat_questions())
    for path, people in ((paths[1], country.new), (paths[2], country.known)):
        # By the name of the file alone, so that the folder changes nothing.
        rng = seeded_random("chat facts", path.name)
        facts = shuffled(list(product(people, ATTRIBUTES)), rng)
        rows = []
        for person, attribute in facts[:_N_FACTS]:
            question = render_question(person, attribute, rng)
            checks = {"contains": [person.facts[attribute]]}
            rows.append(_row(attribute, person, [], question, checks))
        write_jsonl(path, rows)
    return paths


def write_dialogues(path: Path) -> int:
    """Write the rows of `generate_dialogues` as JSON lines; return their number.

    The first of them and the chat template, chat_template.jinja, are written beside it.
    """
    write_text(path.with_name("chat_template.jinja"), CHAT_TEMPLATE)
    write_jsonl(
        path.with_name(f"{path.stem}-few{path.suffix}"),
        islice(generate_dialogues(), _N_FEW),
    )
    return write_jsonl(path, generate_dialogues())
