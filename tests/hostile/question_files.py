"""Question files with one fault each, in every format, made from questions whose text, choices and gold are known."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

Known = list[tuple[str, tuple[str, ...], int]]
"""(question, choices, gold) in the order of the file."""

_WORDS = [
    "Farrow",
    "Kelm",
    "Lowmere",
    "Arden",
    "Malmö",
    "東京",
    "x",
    "3.50",
    "007",
    "NA",
    "true",
    "1",
    "São Tomé",
    "a b",
]
_TAILS = ["", ", and why", ' "so called"', "\nor not", " é", ", or both"]


@dataclass(frozen=True)
class Drawn:
    """One damaged file: `known` is what it held before, `read` reads it at a path, `harmless` if it must still be read."""

    format: str
    fault: str
    file: str
    data: bytes
    known: Known
    read: Callable[[Path], Known]
    harmless: bool


def draw_questions(random: Random) -> Known:
    """Return 3 to 6 questions of four choices."""
    known = []
    for number in range(random.randint(3, 6)):
        words = random.sample(_WORDS, 4)
        choices = tuple(f"{word}{random.choice(_TAILS)}" for word in words)
        known.append((f"Where, in {number}{random.choice(_TAILS)}?", choices, random.randrange(4)))
    return known


# Writers: Python's own csv and json.


def as_csv(rows: list[list[Any]], random: Random) -> str:
    """Return rows as CSV, with few quotes or with all of them."""
    out = io.StringIO()
    quoting = random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    csv.writer(out, quoting=quoting, lineterminator="\n").writerows(rows)
    return out.getvalue()


def as_lines(rows: list[Any]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def mmlu_cells(known: Known) -> list[list[Any]]:
    """Return the cells of MMLU's CSV."""
    return [[question, *choices, "ABCD"[gold]] for question, choices, gold in known]


def native(known: Known) -> list[Any]:
    """Return rows as kinject's own."""
    return [{"id": f"q{i}", "question": q, "choices": list(c), "answer": gold} for i, (q, c, gold) in enumerate(known)]


def mmlu_rows(known: Known) -> list[Any]:
    """Return rows of MMLU's JSON lines, the gold as a letter."""
    return [{"question": q, "choices": list(c), "answer": "ABCD"[gold]} for q, c, gold in known]


def arc(known: Known) -> list[Any]:
    """Return rows as ARC has them on the hub."""
    return [
        {"id": f"q{i}", "question": q, "choices": {"text": list(c), "label": list("ABCD")}, "answerKey": "ABCD"[gold]}
        for i, (q, c, gold) in enumerate(known)
    ]


def published_arc(known: Known) -> list[Any]:
    """Return rows as ARC's authors publish them, labelled by numbers."""
    return [
        {"id": f"q{i}", "answerKey": "1234"[gold],
         "question": {"stem": q, "choices": [{"text": t, "label": n} for t, n in zip(c, "1234", strict=True)]}}
        for i, (q, c, gold) in enumerate(known)
    ]  # fmt: skip


def squad(known: Known) -> list[Any]:
    """Return rows as SQuAD has them on the hub: correct answers, no options."""
    return [
        {"id": f"q{i}", "question": q, "title": "T", "answers": {"text": [f"{i} {c[gold]}"], "answer_start": [i]}}
        for i, (q, c, gold) in enumerate(known)
    ]


def bad_answers(row: dict[str, Any], random: Random) -> bool:
    """Write answers that are no list of texts, or a choice beside them."""
    row["answers"] = random.choice(
        [5, "x", None, {"text": "x"}, {"text": [5]}, {"text": ["x", ""]}, [None], [["x"]], {}, True]
    )
    if random.random() < 0.3:
        row.update(answers=["a", "b"], answer=random.choice([0, 1, "c", True]))
    return True


# Faults of text. Each returns another text, or bytes; "" in the table's second column: it must still be read.


def _outside_quotes(text: str, character: str) -> list[int]:
    """Return where `character` stands outside quotes."""
    quoted, positions = False, []
    for index, value in enumerate(text):
        quoted ^= value == '"'
        if value == character and not quoted:
            positions.append(index)
    return positions


def _without(text: str, index: int) -> str:
    return text[:index] + text[index + 1 :]


def _put(text: str, index: int, more: str) -> str:
    return text[:index] + more + text[index:]


def _line_starts(text: str) -> list[int]:
    return [index + 1 for index in _outside_quotes(text, "\n")][:-1]


def drop_quote(text: str, random: Random) -> str:
    """Take one quote out, or put one in where there is none."""
    positions = [index for index, value in enumerate(text) if value == '"']
    return _without(text, random.choice(positions)) if positions else add_quote(text, random)


def add_quote(text: str, random: Random) -> str:
    """Put a quote somewhere."""
    return _put(text, random.randrange(len(text)), '"')


def open_quote(text: str, random: Random) -> str:
    """Open a quote at the beginning of a row that has none."""
    return _put(text, random.choice([0, *_line_starts(text)]), '"')


def text_after_quote(text: str, random: Random) -> str:
    """Put a letter behind the quote that ends a cell."""
    positions = [i + 1 for i in range(len(text) - 1) if text[i] == '"' and text[i + 1] in ",\n"]
    positions = [position for position in positions if position - 1 not in _outside_quotes(text, ",")]
    quoted = [
        position for position in positions if position in _outside_quotes(text, ",") + _outside_quotes(text, "\n")
    ]
    return _put(text, random.choice(quoted), "x") if quoted else open_quote(text, random)


def drop_comma(text: str, random: Random) -> str:
    """Take a delimiter out."""
    return _without(text, random.choice(_outside_quotes(text, ",")))


def add_comma(text: str, random: Random) -> str:
    """Double a delimiter."""
    return _put(text, random.choice(_outside_quotes(text, ",")), ",")


def other_delimiter(text: str, random: Random) -> str:
    """Write semicolons or tabs for commas."""
    positions, mark = set(_outside_quotes(text, ",")), random.choice(";\t|")
    return "".join(mark if index in positions else value for index, value in enumerate(text))


def break_row(text: str, random: Random) -> str:
    """Break a row at a delimiter."""
    index = random.choice(_outside_quotes(text, ","))
    return text[:index] + "\n" + text[index + 1 :]


def join_rows(text: str, random: Random) -> str:
    """Take the end of a row out."""
    return _without(text, random.choice(_outside_quotes(text, "\n")[:-1]))


def header(text: str, _random: Random) -> str:
    """Put a header above MMLU's rows."""
    return "question,A,B,C,D,answer\n" + text


def cut(text: str, random: Random) -> str:
    """End the file in the middle of its last row."""
    start = [0, *_line_starts(text)][-1]
    return text[: random.randrange(start + 1, len(text) - 2)]


def nul(text: str, random: Random) -> str:
    """Put a NUL somewhere."""
    return _put(text, random.randrange(len(text)), "\0")


def inner_mark(text: str, random: Random) -> str:
    """Put a byte-order mark before a later row."""
    return _put(text, random.choice(_line_starts(text)), "\ufeff")


def second_mark(text: str, _random: Random) -> str:
    """Put two byte-order marks before the file."""
    return "\ufeff\ufeff" + text


def utf_16(text: str, random: Random) -> bytes:
    """Write UTF-16, with or without its mark."""
    return text.encode(random.choice(["utf-16", "utf-16-le", "utf-16-be"]))


def latin_1(text: str, random: Random) -> bytes:
    """Write Latin-1, with a letter that it writes otherwise than UTF-8."""
    return _put(text, random.choice([0, *_line_starts(text)]) + 2, "ö").encode("latin-1", "replace")


def carriage_returns(text: str, _random: Random) -> str:
    """End rows by CR alone, as old Macs."""
    positions = set(_outside_quotes(text, "\n"))
    return "".join("\r" if index in positions else value for index, value in enumerate(text))


def repeat_row(text: str, random: Random) -> str:
    """Write a row twice."""
    bounds = [0, *_line_starts(text), len(text)]
    index = random.randrange(len(bounds) - 1)
    return text + text[bounds[index] : bounds[index + 1]]


def blank_lines(text: str, random: Random) -> str:
    """Put blank lines between rows and behind them."""
    return _put(text, random.choice([len(text), *_line_starts(text)]), "\n" * random.randint(1, 3))


def windows(text: str, _random: Random) -> str:
    """End every line by CR and LF, those in quotes too."""
    return text.replace("\n", "\r\n")


def mixed_ends(text: str, random: Random) -> str:
    """End some rows by CR and LF."""
    positions = {index for index in _outside_quotes(text, "\n") if random.random() < 0.5}
    return "".join("\r\n" if index in positions else value for index, value in enumerate(text))


def mark(text: str, _random: Random) -> str:
    """Put a byte-order mark before the file."""
    return "\ufeff" + text


def no_last_end(text: str, _random: Random) -> str:
    """Leave out the last line's end."""
    return text.removesuffix("\n")


Text = Callable[[str, Random], "str | bytes"]
BOTH: list[Text] = [cut, nul, inner_mark, second_mark, utf_16, latin_1]
OF_CSV: list[Text] = [
    *BOTH, drop_quote, add_quote, open_quote, text_after_quote, drop_comma, add_comma, other_delimiter, break_row, join_rows,
    carriage_returns,
]  # fmt: skip
HARMLESS: list[Text] = [blank_lines, mixed_ends, mark, no_last_end]


def break_line(text: str, random: Random) -> str:
    """Break a JSON object over two lines."""
    return _put(text, random.choice([0, *_line_starts(text)]) + 1, "\n")


def array(text: str, _random: Random) -> str:
    """Write one array over all lines."""
    return "[" + text.rstrip("\n").replace("}\n{", "},\n{") + "]\n"


def single_quotes(text: str, random: Random) -> str:
    """Write a key in single quotes, as Python does."""
    return text.replace('"question"', "'question'", random.randint(1, 2))


def repeated_key(text: str, random: Random) -> str:
    """Give an object a key twice, the second with another value."""
    keys = ["question", "choices", "answer", "answerKey", "text", "label"]
    positions = [(text.index(f'"{key}": '), key) for key in keys if f'"{key}": ' in text]
    position, key = random.choice(positions)
    value = random.choice(['"x"', "1", "null", '["a", "b", "c", "d"]'])
    name = key if random.random() < 0.6 else f"\\u{ord(key[0]):04x}{key[1:]}"
    return _put(text, position, f'"{name}"{random.choice(["", " "])}: {value}, ')


def escaped_nul(text: str, random: Random) -> str:
    """Put an escaped NUL into a text."""
    return text.replace("Where", "Wh\\u0000ere", 1) if random.random() < 0.5 else text.replace('["', '["\\u0000', 1)


OF_LINES: list[Text] = [*BOTH, join_rows, break_line, array, single_quotes, repeated_key, escaped_nul]

# Faults of values: one row of the tree is changed. Each returns False where it does not apply.

Change = Callable[[dict[str, Any], Random], bool]


def _choice_list(row: dict[str, Any]) -> list[Any]:
    choices = row["question"]["choices"] if isinstance(row["question"], dict) else row["choices"]
    return list(choices["text"]) if isinstance(choices, dict) else choices


def _set_text(row: dict[str, Any], index: int, text: Any) -> None:
    choices = row["question"]["choices"] if isinstance(row["question"], dict) else row["choices"]
    if isinstance(choices, dict):
        choices["text"][index] = text
    elif isinstance(choices[index], dict):
        choices[index]["text"] = text
    else:
        choices[index] = text


def wrong_gold(row: dict[str, Any], random: Random) -> bool:
    """Write a gold that is no choice, or is not clear."""
    key = "answerKey" if "answerKey" in row else "answer"
    values = [
        -1,
        4,
        99,
        True,
        False,
        1.0,
        0.5,
        None,
        "",
        "E",
        "Z",
        "-1",
        [1],
        {"a": 1},
        10**30,
        float("nan"),
        float("inf"),
    ]
    values += ["AB", "b", 3, 0] if row.get(key) in list("ABCD") else []
    values += ["0", 0, 5, "5", "A"] if row.get(key) in list("1234") else []
    values += ["B", "1", " 1"] if isinstance(row.get(key), int) else []
    row[key] = random.choice(values)
    return True


def no_gold(row: dict[str, Any], random: Random) -> bool:
    """Leave a key out, or write it in capitals."""
    key = random.choice([key for key in ("question", "choices", "answer", "answerKey") if key in row])
    value = row.pop(key)
    if random.random() < 0.5:
        row[random.choice([key.upper(), f" {key}", f"{key}s_"])] = value
    return True


def equal_choices(row: dict[str, Any], random: Random) -> bool:
    """Write one choice twice, as it is or as it reads."""
    one, other = random.sample(range(4), 2)
    item = _choice_list(row)[one]
    text = item["text"] if isinstance(item, dict) else item
    _set_text(row, other, random.choice([text, f" {text}", f"{text} ", f"{text}\u200b", text.replace(" ", "  ")]))
    return True


def wrong_choice(row: dict[str, Any], random: Random) -> bool:
    """Write a choice that is no text."""
    _set_text(
        row, random.randrange(4), random.choice(["", "  ", "\t", None, 5, 1.5, True, ["a"], {"text": "a"}, "\u200b"])
    )
    return True


def other_labels(row: dict[str, Any], random: Random) -> bool:
    """Write fewer labels than texts, more, or equal ones."""
    choices = row.get("choices")
    if isinstance(choices, dict) and "label" in choices:
        choices["label"] = random.choice(
            [["A", "B", "C"], list("ABCDE"), ["A", "B", "B", "D"], ["A"] * 4, ["A", "B", None, "D"], [], None, "ABCD",
             [True, "B", "C", "D"], ["A", " A", "C", "D"]]
        )  # fmt: skip
        return True
    if isinstance(row["question"], dict):
        row["question"]["choices"][random.randrange(4)]["label"] = random.choice(["9", None, "", True, 1.5, ["1"]])
        if random.random() < 0.5:
            for item in row["question"]["choices"][:2]:
                item["label"] = "1"
        return row["answerKey"] not in [item["label"] for item in row["question"]["choices"]] or True
    return False


def fewer_texts(row: dict[str, Any], random: Random) -> bool:
    """Take a text out and leave its label."""
    choices = row.get("choices")
    if not isinstance(choices, dict):
        return False
    choices["text"].pop(random.randrange(4))
    return True


def two_golds(row: dict[str, Any], random: Random) -> bool:
    """Name a second gold that differs."""
    if "answerKey" not in row:
        row["answerKey"] = random.choice(["A", "B", 1])
    else:
        row["answer"] = random.choice([7, "E", True, 1.5])
    return True


def bad_texts(row: dict[str, Any], random: Random) -> bool:
    """Write a question that is no text."""
    value = random.choice(["", " ", None, 5, True, ["Where?"]])
    if isinstance(row["question"], dict):
        row["question"]["stem"] = value
    else:
        row["question"] = value
    return True


OF_ROWS: list[Change] = [
    wrong_gold,
    no_gold,
    equal_choices,
    wrong_choice,
    other_labels,
    fewer_texts,
    two_golds,
    bad_texts,
]


def add_conflict(rows: list[Any], known: Known, random: Random) -> bool:
    """Ask a question again with another gold, the choices in another order."""
    index = random.randrange(len(rows))
    row = json.loads(json.dumps(rows[index]))
    question, choices, gold = known[index]
    order = random.sample(range(4), 4)
    moved = [choices[i] for i in order]
    new = random.choice([i for i in range(4) if order[i] != gold])
    for position, text in enumerate(moved):
        _set_text(row, position, text)
    if "answerKey" in row:
        row["answerKey"] = ("1234" if isinstance(row["question"], dict) else "ABCD")[new]
    else:
        row["answer"] = new if isinstance(row["answer"], int) else "ABCD"[new]
    if "id" in row:
        row["id"] = "again"
    rows.append(row)
    return bool(question)


# Drawing.


def read_plain(layout: str) -> Callable[[Path], Known]:
    """Return a reader of a question file."""

    def read(path: Path) -> Known:
        from kinject.corpus.questions import read_questions

        return [(q.question, q.choices, q.answer) for q in read_questions(path, layout)]  # type: ignore[arg-type]

    return read


def read_squad(path: Path) -> Known:
    """Read a file of answers as its correct ones: the options are drawn."""
    return [(question, (choices[gold],), 0) for question, choices, gold in read_plain("auto")(path)]


FORMATS: dict[str, tuple[Callable[[Known], list[Any]], str, Callable[[Path], Known]]] = {
    "native": (native, "q.jsonl", read_plain("auto")),
    "mmlu json": (mmlu_rows, "q.jsonl", read_plain("mmlu")),
    "arc": (arc, "q.jsonl", read_plain("auto")),
    "published arc": (published_arc, "q.jsonl", read_plain("auto")),
    "squad": (squad, "q.jsonl", read_squad),
}


def of_squad(known: Known) -> Known:
    """Return what is known of the questions in `squad`."""
    return [(question, (f"{i} {choices[gold]}",), 0) for i, (question, choices, gold) in enumerate(known)]


def draw(random: Random) -> Drawn:
    """Return a file with one fault."""
    while True:
        known = draw_questions(random)
        format = random.choice([*FORMATS, "mmlu csv", "mmlu csv"])
        drawn = _draw_csv(format, known, random) if format.endswith("csv") else _draw_rows(format, known, random)
        if drawn is not None:
            return drawn


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


def _draw_csv(format: str, known: Known, random: Random) -> Drawn | None:
    read = read_plain("auto")
    rows = mmlu_cells(known)
    cell_fault = random.random() < 0.3
    name = "a cell"
    if cell_fault:
        row = rows[random.randrange(len(rows))]
        name = random.choice(["gold", "empty", "equal", "short", "long", "conflict"])
        if name == "gold":
            row[-1] = random.choice(["E", "b", "", "AB", "-1", "4", "1.0", "x", "True"])
        elif name == "empty":
            row[random.randrange(1, 5)] = random.choice(["", " "])
        elif name == "equal":
            row[1], row[2] = row[3], row[3]
        elif name == "short":
            row.pop(random.randrange(6))
        elif name == "long":
            row.insert(random.randrange(6), "more")
        elif name == "conflict":
            rows.append([*row[:-1], "ABCD"[("ABCD".index(row[-1]) + 1) % 4]])
    text = as_csv(rows, random)
    if cell_fault:
        return Drawn(format, name, "q.csv", text.encode(), known, read, harmless=False)
    faults = [*OF_CSV, *HARMLESS, header, repeat_row, windows]
    fault = random.choice(faults)
    harmless = fault in HARMLESS or fault is windows
    return Drawn(format, fault.__name__, "q.csv", _bytes(fault(text, random)), known, read, harmless=harmless)


def _draw_rows(format: str, known: Known, random: Random) -> Drawn | None:
    make, file, read = FORMATS[format]
    rows = make(known)
    changes = OF_ROWS
    if format == "squad":
        known, changes = of_squad(known), [bad_answers]
    of_rows = random.random() < 0.55
    if not of_rows:
        fault = random.choice([*OF_LINES, *HARMLESS, repeat_row])
        data = _bytes(fault(as_lines(rows), random))
        return Drawn(format, fault.__name__, file, data, known, read, harmless=fault in HARMLESS)
    name = "conflict"
    if random.random() < 0.15 and changes is OF_ROWS:
        add_conflict(rows, known, random)
    else:
        change = random.choice(changes)
        name = change.__name__
        if not change(rows[random.randrange(len(rows))], random):
            return None
    return Drawn(format, name, file, as_lines(rows).encode(), known, read, harmless=False)
