"""Questions on the people of Tarvenia: four choices with balanced distractors, open ones, and ones
without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

from kinject.disk import content_id
from kinject.sandbox.people import (
    ATTRIBUTES,
    BIRTH_YEARS,
    POOLS,
    TEXTS,
    Person,
    choose_one,
    deal_evenly,
    seeded_random,
    shuffled,
)
from kinject.types import Question

N_CHOICES = 4


def document_id_of(person: Person) -> str:
    """Return the id of the encyclopedia entry on `person`."""
    return content_id("sandbox document", person.name)


def fact_id_of(person: Person, attribute: str) -> str:
    """Return the id of one fact; forward and reverse questions on it share it."""
    return content_id("sandbox fact", person.name, attribute, person.facts[attribute])


def render_question(person: Person, attribute: str, rng: Random) -> str:
    """Return a question on `attribute` of `person`, from a random template."""
    return str(choose_one(TEXTS["questions"][attribute], rng)).format(name=person.name)


def create_question(
    person: Person, attribute: str, text: str, gold: str, distractors: Sequence[str], answer: int
) -> Question:
    """Return the question `text` with `gold` at index `answer` among the `distractors`."""
    choices = list(distractors)
    choices.insert(answer, gold)
    return Question(
        id=content_id("sandbox question", text, *choices, str(answer)),
        question=text,
        choices=tuple(choices),
        answer=answer,
        subject=attribute,
        document_id=document_id_of(person),
        fact_id=fact_id_of(person, attribute),
    )


def create_questions(people: Sequence[Person], seed: int) -> list[Question]:
    """Return one question for each person and attribute; its choices are values of that attribute.

    If the values are dealt evenly, each is a distractor exactly three times as often as it is the
    answer, so always preferring the same values scores chance. Each position holds the answer
    equally often.
    """
    questions = []
    for attribute in ATTRIBUTES:
        rng = seeded_random("questions", attribute, seed)
        pool = shuffled(POOLS[attribute], rng)
        index_of = {value: index for index, value in enumerate(pool)}
        positions = deal_evenly([str(index) for index in range(N_CHOICES)], len(people), rng)
        times_used: Counter[str] = Counter()
        shifts: list[list[int]] = []
        for person, position in zip(people, positions, strict=True):
            gold = person.facts[attribute]
            # The n-th person of each value gets the n-th shifts: every value is wrong equally
            # often.
            if times_used[gold] == len(shifts):
                shifts.append(shuffled(range(1, len(pool)), rng)[: N_CHOICES - 1])
            distractors = [
                pool[(index_of[gold] + shift) % len(pool)] for shift in shifts[times_used[gold]]
            ]
            times_used[gold] += 1
            text = render_question(person, attribute, rng)
            questions.append(
                create_question(
                    person, attribute, text, gold, shuffled(distractors, rng), int(position)
                )
            )
    return questions


def create_reverse_questions(people: Sequence[Person], seed: int) -> list[Question]:
    """Return one question for each person and attribute that asks for the person ("Who was born in
    ...?").

    The distractors are people of the same group with another value, so exactly one choice is
    correct.
    """
    questions = []
    for attribute in ATTRIBUTES:
        rng = seeded_random("reverse questions", attribute, seed)
        positions = deal_evenly([str(index) for index in range(N_CHOICES)], len(people), rng)
        for person, position in zip(people, positions, strict=True):
            others = [
                other.name for other in people if other.facts[attribute] != person.facts[attribute]
            ]
            distractors = shuffled(others, rng)[: N_CHOICES - 1]
            text = TEXTS["reverse_questions"][attribute].format(**person.facts)
            questions.append(
                create_question(person, attribute, text, person.name, distractors, int(position))
            )
    return questions


def infer_answer(attribute: str, value: str) -> str:
    """Return the inference from `value`: the decade of a year, the last word of a school's or
    firm's name.

    >>> infer_answer("birth_year", "1947"), infer_answer("employer", "Redwing Bank")
    ('the 1940s', 'Bank')
    """
    return f"the {value[:3]}0s" if attribute == "birth_year" else value.split()[-1]


def create_inferred_questions(
    people: Sequence[Person], seed: int, n_per_subject: int
) -> list[Question]:
    """Return questions whose answers follow from a fact of `people` and are in no text, on each
    subject as many as allowed.

    On each subject every answer is correct for equally many people, at most `n_per_subject` in all.
    Of schools and firms there are four choices, dealt as in `create_questions`; of decades three,
    so a decade in which few were born is not asked.
    """
    questions = []
    for attribute, template in TEXTS["inferred_questions"].items():
        rng = seeded_random("inferred questions", attribute, seed)
        of_answer: dict[str, list[Person]] = {}
        for person in shuffled(people, rng):
            of_answer.setdefault(infer_answer(attribute, person.facts[attribute]), []).append(
                person
            )
        # Of the last decade there is one year.
        if attribute == "birth_year":
            del of_answer[infer_answer(attribute, BIRTH_YEARS[-1])]
        pool = shuffled(sorted(of_answer), rng)
        n_each = min(*(len(group) for group in of_answer.values()), n_per_subject // len(pool))
        n_wrong = min(N_CHOICES, len(pool)) - 1
        positions = iter(
            deal_evenly([str(index) for index in range(n_wrong + 1)], n_each * len(pool), rng)
        )
        for nth in range(n_each):
            # The same shifts for every answer: each is a wrong choice equally often.
            shifts = shuffled(range(1, len(pool)), rng)[:n_wrong]
            for index, gold in enumerate(pool):
                person = of_answer[gold][nth]
                wrong = shuffled([pool[(index + shift) % len(pool)] for shift in shifts], rng)
                text = template.format(name=person.name)
                questions.append(
                    create_question(person, attribute, text, gold, wrong, int(next(positions)))
                )
    return questions


def to_open_questions(questions: Sequence[Question]) -> list[Question]:
    """Return `questions` as open ones: no choices; the value, which entries write in one way only,
    is the accepted answer."""
    return [
        replace(
            question,
            id=content_id("sandbox open question", question.question, *question.accepted),
            choices=(),
            answer=0,
            answers=question.accepted,
        )
        for question in questions
    ]


def create_unanswerable_questions(
    strangers: Sequence[tuple[str, str]], seed: int
) -> list[Question]:
    """Return a question for each name and attribute that no entry answers; to abstain is correct.

    `document_id` is that of the entry which the person does not have: the questions on one person
    share it.
    """
    questions = []
    for attribute in ATTRIBUTES:
        rng = seeded_random("unanswerable questions", attribute, seed)
        for first, last in strangers:
            person = Person(first, last, {})
            text = render_question(person, attribute, rng)
            identity = content_id("sandbox open question", text)
            questions.append(Question(identity, text, (), 0, attribute, document_id_of(person)))
    return questions


def sample_questions(
    questions: Sequence[Question], n_per_subject: int, seed: int
) -> list[Question]:
    """Return `n_per_subject` random questions of every subject, in the order of `questions`."""
    sampled: set[str] = set()
    for attribute in ATTRIBUTES:
        ids = [question.id for question in questions if question.subject == attribute]
        sampled |= set(shuffled(ids, seeded_random("sample", attribute, seed))[:n_per_subject])
    return [question for question in questions if question.id in sampled]
