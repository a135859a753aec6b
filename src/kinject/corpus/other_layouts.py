"""Rows in the layouts of other trainers' data sets, as rows with `messages`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kinject.disk import Row
from kinject.errors import InputError

_OWN = frozenset({"text", "messages", "completion"})
"""Keys of which a row that has one is read as it is."""
_ALPACA: tuple[str, ...] = ("instruction", "input", "output", "system", "history")
_SHAREGPT = ("conversations", "system")
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


def as_messages(row: Row) -> Row:
    """Return a row with `messages` for one in Alpaca's layout (`instruction` and `output`) or
    ShareGPT's (`conversations`, or `messages` with its turns), and any other row as it is.

    As in LLaMA-Factory, Alpaca's `input` is a second line of the user's turn, and `history` holds
    earlier turns in pairs. Other keys are kept. Raises `InputError` for values that do not fit.
    """
    turns = row.get("messages")
    if isinstance(turns, list) and any(isinstance(turn, dict) and "from" in turn for turn in turns):
        return {**row, "messages": list(_turns(turns, "messages"))}
    if not _OWN.isdisjoint(row):
        return row
    if "instruction" in row and "output" in row:
        messages, read = list(_of_alpaca(row)), _ALPACA
    elif "conversations" in row:
        messages, read = list(_of_sharegpt(row)), _SHAREGPT
    else:
        return row
    others = {key: value for key, value in row.items() if key not in read}
    return {**others, "messages": messages}


def _of_alpaca(row: Row) -> Iterator[Row]:
    yield from _system(row)
    for number, pair in enumerate(_list(row, "history"), 1):
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(part, str) for part in pair):
            raise InputError(f"history: pair {number}: expected [instruction, answer].")
        yield _message("user", pair[0])
        yield _message("assistant", pair[1])
    parts = (_text(row, "instruction"), _text(row, "input"))
    yield _message("user", "\n".join(part for part in parts if part))
    yield _message("assistant", _text(row, "output"))


def _of_sharegpt(row: Row) -> Iterator[Row]:
    yield from _system(row)
    yield from _turns(_list(row, "conversations"), "conversations")


def _turns(turns: list[Any], key: str) -> Iterator[Row]:
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict) or ("from" not in turn and "role" not in turn):
            raise InputError(
                f'{key}: turn {number}: expected {{"from": "human" or "gpt", "value": ...}}.'
            )
        if "role" in turn:
            yield turn  # as in messages, under the older name
            continue
        speaker = turn["from"]
        if not isinstance(speaker, str) or speaker not in _ROLES:
            raise InputError(
                f"{key}: turn {number}: found from: {speaker!r:.40}, allowed: "
                f"{', '.join(_ROLES)}. Write calls of tools as messages with tool_calls."
            )
        # What else a turn holds, as its weight in the loss, is refused with the messages.
        others = {key: value for key, value in turn.items() if key not in ("from", "value")}
        yield {"role": _ROLES[speaker], "content": turn.get("value"), **others}


def _system(row: Row) -> Iterator[Row]:
    system = _text(row, "system")
    if system:
        yield _message("system", system)


def _message(role: str, content: str) -> Row:
    return {"role": role, "content": content}


def _text(row: Row, key: str) -> str:
    """Return the text at `key`; "" for none, and for the null of a data set with columns."""
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise InputError(f"{key}: found {type(value).__name__}, expected text.")
    return value


def _list(row: Row, key: str) -> list[Any]:
    value = row.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"{key}: found {type(value).__name__}, expected a list.")
    return value
