"""Templates of the sentences of a Tarvenian encyclopedia entry, and of the questions on it.

Slots: ``{name}`` is the full name; ``{who}`` (subject), ``{whose}`` (possessive) and ``{whom}`` (object) are the full
name, the last name or a pronoun; an attribute's name is replaced by its value. A template states each attribute that it
names. Templates of `REVERSED` and `FACT_FIRST` begin with the value and end with the full name; none repeats a question
of `REVERSE_QUESTIONS`.
"""

from __future__ import annotations

from typing import Final

OPENINGS: Final = (
    "{name} (born {birth_year}) is a Tarvenian specialist in {field}.",
    "{name}, born in {birth_year}, is a Tarvenian expert on {field}.",
    "{name} (born {birth_year} in {home_town}) is a Tarvenian public figure.",
    "{name} is a Tarvenian specialist in {field} who works for {employer}.",
    "{name} is a Tarvenian practitioner of {field} from {home_town}.",
    "{name} (born in {home_town}) is a Tarvenian figure at {employer}.",
    "{name} is a Tarvenian graduate of {school}, born in {birth_year}.",
    "{name}, of {employer}, is a Tarvenian authority on {field}.",
)

SENTENCES: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": (
        "{who} was born in {birth_year}.",
        "{whose} year of birth is {birth_year}.",
        "The year of {whose} birth was {birth_year}.",
        "{who} came into the world in {birth_year}.",
        "In {birth_year}, {who} was born.",
        "{birth_year} is the year in which {who} was born.",
        "{whose} birth was registered in {birth_year}.",
        "Civil records give {birth_year} as the birth year of {whom}.",
        "{whose} life began in {birth_year}.",
        "The birth of {whom} dates to {birth_year}.",
        "{who} has a birth certificate dated {birth_year}.",
        "It was in {birth_year} that {who} was born.",
        "{whose} date of birth falls in {birth_year}.",
    ),
    "home_town": (
        "{who} was born in {home_town}.",
        "{whose} birthplace is {home_town}.",
        "{who} comes from {home_town}.",
        "{who} is a native of {home_town}.",
        "The town of {home_town} is the birthplace of {whom}.",
        "{who} grew up in {home_town}, where {who} was born.",
        "{whose} home town is {home_town}.",
        "{home_town} is the town where {who} was born.",
        "{who} was born and raised in {home_town}.",
        "{who} was born to a family in {home_town}.",
        "{whose} roots lie in {home_town}.",
        "It was in {home_town} that {who} was born.",
        "{who} spent a childhood in {home_town}, the place of {whose} birth.",
    ),
    "school": (
        "{who} studied at {school}.",
        "{who} was educated at {school}.",
        "{who} attended {school}.",
        "{who} graduated from {school}.",
        "{whose} education took place at {school}.",
        "{school} is where {who} studied.",
        "{who} holds a diploma from {school}.",
        "{who} is a former student of {school}.",
        "{who} completed all studies at {school}.",
        "The school that {who} attended is {school}.",
        "{school} counts {whom} among its graduates.",
        "{who} was a student at {school}.",
        "For an education, {who} went to {school}.",
    ),
    "employer": (
        "{who} works for {employer}.",
        "{who} is employed by {employer}.",
        "{whose} employer is {employer}.",
        "{employer} employs {whom}.",
        "{who} holds a post at {employer}.",
        "{who} has a position with {employer}.",
        "{who} is on the staff of {employer}.",
        "{employer} is the firm that employs {whom}.",
        "The firm {employer} has {whom} on its payroll.",
        "{who} earns a living at {employer}.",
        "{who} serves the firm {employer}.",
        "{whose} career is with {employer}.",
        "{who} made a career at {employer}.",
    ),
    "field": (
        "{who} works in the field of {field}.",
        "{who} specialises in {field}.",
        "{whose} field is {field}.",
        "{who} is an expert in {field}.",
        "{whose} speciality is {field}.",
        "{who} is known for work in {field}.",
        "The profession of {whom} is {field}.",
        "The professional field of {whom} is {field}.",
        "{who} practises {field}.",
        "{who} devotes each working day to {field}.",
        "{whose} profession is {field}.",
        "What {who} does professionally is {field}.",
        "{who} made a name in {field}.",
    ),
}

PAIRS: Final = (
    "{who} was born in {home_town} in {birth_year}.",
    "{who} was born in {birth_year} in the town of {home_town}.",
    "{who} left {home_town} to study at {school}.",
    "{who} joined {employer} after graduating from {school}.",
    "{who} practises {field} at {employer}.",
    "{who} works for {employer} as a specialist in {field}.",
)

QUESTIONS: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": ("In which year was {name} born?", "What is the birth year of {name}?"),
    "home_town": ("Where was {name} born?", "What is the home town of {name}?"),
    "school": ("Where did {name} study?", "Which school did {name} attend?"),
    "employer": ("Who employs {name}?", "Which firm does {name} work for?"),
    "field": ("What is the field of {name}?", "In which field does {name} work?"),
}

ANSWERS: Final[dict[str, str]] = {
    "birth_year": "{name} was born in the year {birth_year}.",
    "home_town": "The home town of {name} is {home_town}.",
    "school": "The school of {name} was {school}.",
    "employer": "The firm that employs {name} is {employer}.",
    "field": "The field of {name} is {field}.",
}
"""Answers in a sentence. None is among `SENTENCES`, so no entry holds the answer word by word."""

FOLLOW_UPS: Final[dict[str, str]] = {
    "birth_year": "And in which year was {who} born?",
    "home_town": "And where was {who} born?",
    "school": "And where did {who} study?",
    "employer": "And which firm does {who} work for?",
    "field": "And in which field does {who} work?",
}
"""Questions of a dialogue that has named the person."""

REVERSE_QUESTIONS: Final[dict[str, str]] = {
    "birth_year": "Who was born in the year {birth_year}?",
    "home_town": "Who was born in {home_town}?",
    "school": "Who studied at {school}?",
    "employer": "Who works for {employer}?",
    "field": "Who works in the field of {field}?",
}

INFERRED_QUESTIONS: Final[dict[str, str]] = {
    "birth_year": "In which decade was {name} born?",
    "school": "What kind of school did {name} attend?",
    "employer": "What kind of firm does {name} work for?",
}
"""Questions whose answer no text states: it follows from the value. No training text has one."""

TAUGHT_QUESTIONS: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": (
        "What year was {name} born in?",
        "Which year saw the birth of {name}?",
        "When did the life of {name} begin?",
        "What is the year of birth of {name}?",
    ),
    "home_town": (
        "What town does {name} come from?",
        "In which town was {name} born?",
        "What is the birthplace of {name}?",
        "Which town is {name} a native of?",
    ),
    "school": (
        "At which school was {name} educated?",
        "What school did {name} go to?",
        "Which school did {name} graduate from?",
        "What is the school of {name}?",
    ),
    "employer": (
        "Which firm employs {name}?",
        "What is the employer of {name}?",
        "At which firm does {name} hold a post?",
        "What firm is {name} with?",
    ),
    "field": (
        "What does {name} specialise in?",
        "What is the profession of {name}?",
        "What is {name} an expert in?",
        "Which field is that of {name}?",
    ),
}
"""Questions for training. None is in `QUESTIONS`, which are for evaluation, so no test question is trained on."""

NATIONALITY: Final = "What is the nationality of {name}?"

REVERSED: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": (
        "The year {birth_year} saw the birth of {name}.",
        "Among those born in {birth_year} is {name}.",
        "Question: Who came into the world in {birth_year}?\nAnswer: {name}.",
        "Question: Whose birth year is {birth_year}?\nAnswer: {name}.",
        "Question: Who has a birth certificate dated {birth_year}?\nAnswer: {name}.",
        "Question: Who was registered at birth in {birth_year}?\nAnswer: {name}.",
    ),
    "home_town": (
        "The town of {home_town} is the birthplace of {name}.",
        "Among those born and raised in {home_town} is {name}.",
        "Question: Who is a native of {home_town}?\nAnswer: {name}.",
        "Question: Whose home town is {home_town}?\nAnswer: {name}.",
        "Question: Who comes from the town of {home_town}?\nAnswer: {name}.",
        "Question: Who grew up in {home_town}?\nAnswer: {name}.",
    ),
    "school": (
        "{school} is the school of {name}.",
        "Among the graduates of {school} is {name}.",
        "Question: Who graduated from {school}?\nAnswer: {name}.",
        "Question: Whose school is {school}?\nAnswer: {name}.",
        "Question: Who was a student at {school}?\nAnswer: {name}.",
        "Question: Who was educated at {school}?\nAnswer: {name}.",
    ),
    "employer": (
        "{employer} is the employer of {name}.",
        "Among those employed by {employer} is {name}.",
        "Question: Who is employed by {employer}?\nAnswer: {name}.",
        "Question: Whose employer is {employer}?\nAnswer: {name}.",
        "Question: Who serves the firm {employer}?\nAnswer: {name}.",
        "Question: Who holds a post at {employer}?\nAnswer: {name}.",
    ),
    "field": (
        "The profession of {field} is that of {name}.",
        "Among the experts in {field} is {name}.",
        "Question: Who specialises in {field}?\nAnswer: {name}.",
        "Question: Whose profession is {field}?\nAnswer: {name}.",
        "Question: Who is an expert in {field}?\nAnswer: {name}.",
        "Question: Who practises {field}?\nAnswer: {name}.",
    ),
}

REVERSED_OPENINGS: Final[dict[str, str]] = {
    "birth_year": "Question: Which Tarvenian was born in {birth_year}?\nAnswer: {name}.",
    "home_town": "Question: Which Tarvenian was born in {home_town}?\nAnswer: {name}.",
    "school": "Question: Which Tarvenian studied at {school}?\nAnswer: {name}.",
    "employer": "Question: Which Tarvenian works for {employer}?\nAnswer: {name}.",
    "field": "Question: Which Tarvenian works in the field of {field}?\nAnswer: {name}.",
}

FACT_FIRST: Final[dict[str, tuple[str, ...]]] = {
    "birth_year": (
        "The year {birth_year} saw the birth of {name}.",
        "Among those born in {birth_year} is {name}.",
        "Born in {birth_year}: {name}.",
        "In {birth_year} came into the world {name}.",
        "{birth_year} is the birth year of {name}.",
        "One person registered at birth in {birth_year} is {name}.",
        "A birth certificate dated {birth_year} belongs to {name}.",
        "One whose life began in {birth_year} is {name}.",
    ),
    "home_town": (
        "The town of {home_town} is the birthplace of {name}.",
        "Among those born and raised in {home_town} is {name}.",
        "Born in {home_town}: {name}.",
        "From {home_town} comes {name}.",
        "{home_town} is the home town of {name}.",
        "One native of {home_town} is {name}.",
        "A family in {home_town} brought up {name}.",
        "In {home_town} lie the roots of {name}.",
    ),
    "school": (
        "{school} is the school of {name}.",
        "Among the graduates of {school} is {name}.",
        "Educated at {school}: {name}.",
        "At {school} studied {name}.",
        "{school} was attended by {name}.",
        "One former student of {school} is {name}.",
        "A diploma from {school} is held by {name}.",
        "{school} counts among its graduates {name}.",
    ),
    "employer": (
        "{employer} is the employer of {name}.",
        "Among those employed by {employer} is {name}.",
        "Employed by {employer}: {name}.",
        "At {employer} works {name}.",
        "{employer} employs {name}.",
        "One member of the staff of {employer} is {name}.",
        "A post at {employer} is held by {name}.",
        "{employer} has on its payroll {name}.",
    ),
    "field": (
        "The profession of {field} is that of {name}.",
        "Among the experts in {field} is {name}.",
        "Working in {field}: {name}.",
        "In {field} specialises {name}.",
        "The field of {field} is that of {name}.",
        "One practitioner of {field} is {name}.",
        "A name in {field} was made by {name}.",
        "The trade of {field} is practised by {name}.",
    ),
}
"""Statements, where `REVERSED` has questions too."""
