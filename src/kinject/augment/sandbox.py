"""The sandbox's generator, which parses its country's entries by their grammar, without a model;
and its endpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

from kinject.augment.answers import pairs_of
from kinject.augment.prompts import first_words, passage_of, rewriting_of, shared_texts
from kinject.augment.question_prompts import is_question_prompt
from kinject.augment.styles import STYLES
from kinject.errors import DiskError, InputError
from kinject.language.sentences import sentences
from kinject.llm import Generator, sender
from kinject.llm.endpoint import is_loopback
from kinject.llm.judges import graded_in
from kinject.recipe import GeneratorSection
from kinject.sandbox.grammar import (
    SENTENCES,
    paraphrase,
    parse_entry,
    parse_rewriting,
    render_sentence,
    rewrite_as_dialogue,
    rewrite_as_questions,
    rewrite_fact_first,
    rewrite_reversed,
)
from kinject.sandbox.people import DEMONYM, POOLS, Person, choose_one, seeded_random, shuffled
from kinject.sandbox.questions import render_question
from kinject.types import Completion, Message

_DRAWS = 64


def generate_answer(messages: list[Message], seed: int) -> Completion:
    """Return the answer to `messages`: questions, an answer to one, a verdict or a grade (by the
    grammar), or a rewriting.

    Raises as `generate_rewriting`.
    """
    graded = graded_in(messages)
    if graded is not None:
        _, accepted, text = graded
        return Completion(_grade(accepted, text))
    if is_question_prompt(messages):
        return answer_as_sandbox(messages, seed)
    told = _TOLD.search(messages[-1]["content"])
    if told is not None:
        return Completion(_told(told["text"], told["statements"]))
    rewriting = rewriting_of(messages)
    if rewriting is None:
        return generate_rewriting(messages, seed)
    source = parse_entry(passage_of(messages))
    if source is None or parse_rewriting(rewriting) != source:
        return Completion("UNFAITHFUL: a fact")
    return Completion("FAITHFUL")


def open_generator(section: GeneratorSection) -> AbstractAsyncContextManager[Generator]:
    """Open the generator of a section, this one for kind sandbox. Raises as that of the sender."""
    return sender.open_generator(section, generate_answer)


def generate_rewriting(messages: list[Message], seed: int) -> Completion:
    """Return a rewriting of the sandbox entry in `messages`, drawn by `seed`, or the answer to a
    preparation.

    Raises `InputError` if the passage is not an entry of the sandbox.
    """
    passage = passage_of(messages)
    task = messages[-1]["content"].rpartition("</passage>")[2]
    request = _request_in(task)
    rewrite = _ANSWERS.get(request)
    if rewrite is not None:
        return Completion(rewrite(passage, seed))
    return Completion(_answer(request, passage, task, seed))


def _request_in(task: str) -> tuple[str, str]:
    """Return (style, preparation) of a prompt, by its first line; a paraphrase for an unknown
    one."""
    if first_words(shared_texts()["statements"]) in task:
        return "judge", "statement"
    for line, request in _first_lines():
        if line in task:
            return request
    return "paraphrase", ""


def _first_lines() -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield the first line of each shipped prompt and (style, its preparation, "verify", or "" for
    the variants).

    A style's file is read when it is the next.
    """
    for name in STYLES:
        yield from _first_lines_of(name)


@cache
def _first_lines_of(name: str) -> Sequence[tuple[str, tuple[str, str]]]:
    style = STYLES[name]
    templates = [("", style.user), ("verify", style.verify)]
    templates += [(step.name, step.prompt) for step in style.prepare]
    return [(first_words(template), (name, step)) for step, template in templates if template]


def _quoted_questions(passage: str, seed: int) -> str:
    """Return questions on the entry, each with the sentence that answers it."""
    stated = sentences(passage)
    blocks = []
    for question, answer in pairs_of(rewrite_as_questions(passage, seed)):
        sentence = next(sentence for sentence in stated if answer in sentence)
        blocks.append(f"Q: {question}\nQUOTE: {sentence}\nA: {answer}")
    return "\n\n".join(blocks)


_ANSWERS: Mapping[tuple[str, str], Callable[[str, int], str]] = {
    ("reversed", ""): rewrite_reversed,
    ("fact_first", ""): rewrite_fact_first,
    ("dialogue", ""): rewrite_as_dialogue,
    ("questions", ""): rewrite_as_questions,
    ("raft", ""): _quoted_questions,
}
"""(style, preparation) -> function of the passage and the seed. Other prompts are about a part of
it, or paraphrases."""
_STRATEGIES = (
    "## Timeline\nTell the facts in their order.\n\n"
    "## Portrait\nTell who the person is.\n\n## List\nName each fact."
)


def _answer(request: tuple[str, str], passage: str, task: str, seed: int) -> str:
    """Return the answer to a preparation, to a task about some facts of the passage, or a
    paraphrase."""
    person = parse_entry(passage)
    if person is None:
        return _paraphrase(passage, seed)
    values = {value: attribute for attribute, value in person.facts.items()}
    match request:
        case (_, "entities" | "entity"):
            return "\n".join([person.name, *values])
        case (_, "strategy"):
            return _STRATEGIES
        case (_, "fact" | "statement"):
            named = [values[value] for value in values if value in task] or list(person.facts)
            return "\n".join(_sentence(person, attribute, passage, seed=0) for attribute in named)
        case ("atomic_facts" | "knowledge_instruct", ""):
            value = next(value for value in values if value in task)
            return _sentence(person, values[value], passage, seed)
        case ("implications", ""):
            drawn = shuffled(list(person.facts), seeded_random("drawn", passage, seed))
            return _sentence(person, drawn[0], passage, seed)
        case (_, "verify"):
            # Between the first lines of the prompt in implications.yaml and its last two.
            statements = [parse_entry(line) for line in task.splitlines()[3:-2]]
            supported = (
                drawn is not None and drawn.facts.items() <= person.facts.items()
                for drawn in statements
            )
            return "Yes." if statements and all(supported) else "No."
        case ("entigraph", ""):
            named = [values[value] for value in values if value in task]
            told = (_sentence(person, attribute, passage, seed) for attribute in named)
            return " ".join(told) or "NONE"
        case _:
            return _paraphrase(passage, seed)


def _sentence(person: Person, attribute: str, passage: str, seed: int) -> str:
    """Return a sentence that states one fact of the entry."""
    rng = seeded_random("fact", passage, attribute, seed)
    return render_sentence(choose_one(SENTENCES[attribute], rng), person)


def _paraphrase(passage: str, seed: int) -> str:
    """Return a paraphrase that names the person's country if and only if `passage` does.

    The grammar may leave it out or add it. It is a fact, so paraphrases are drawn until it matches
    the passage.
    """
    text = paraphrase(passage, seed)
    for draw in range(1, _DRAWS):
        if (DEMONYM in text) == (DEMONYM in passage):
            break
        text = paraphrase(passage, f"{seed}.{draw}")
    return text


# The words of `told` in shared.yaml.
_TOLD = re.compile(
    r"<text>\n(?P<text>.*)\n</text>\n\nThese statements are numbered:\n(?P<statements>.*?)\n\n",
    re.DOTALL,
)


def _told(text: str, statements: str) -> str:
    """Return the numbers of the statements whose values a text has."""
    told = []
    for line in statements.splitlines():
        number, _, statement = line.partition(". ")
        person = parse_entry(statement)
        if person and all(value in text for value in person.facts.values()):
            told.append(number)
    return ", ".join(told) or "0"


_YEAR = re.compile(r"\b\d{4}\b")


def _grade(accepted: Sequence[str], text: str) -> str:
    """Return the grade of a written answer by the country's values in it: the accepted one alone is
    correct."""
    lowered = text.lower()
    values = set(_YEAR.findall(text))
    for pool in POOLS.values():
        values |= {value.lower() for value in pool if value.lower() in lowered}
    if not values:
        return "ABSTAINED"
    if values <= {answer.lower() for answer in accepted}:
        return "CORRECT"
    return "WRONG"


# The words of questions.yaml.
_WANTED = re.compile(r"^Write at most (\d+) four-choice questions", re.MULTILINE)
_OPTION = re.compile(r"^([A-D])\. (.+)$", re.MULTILINE)
_SPECIFICITY = 8


def answer_as_sandbox(messages: list[Message], seed: int) -> Completion:
    """Return questions on the entry in `messages`, or the letter of its answer by the entry; ``X``
    without an entry.

    Raises `InputError` if the passage is not an entry of the sandbox.
    """
    task = messages[-1]["content"]
    if "<passage>" not in task:
        return Completion("X")
    passage = passage_of(messages)
    person = parse_entry(passage)
    if person is None:
        raise InputError(
            f"the sandbox generator cannot read {passage[:57]!r}...: it only reads entries of its "
            "own country (data/sandbox). Use generator `openai` for other texts."
        )
    task = task.rpartition("</passage>")[2]
    match = _WANTED.search(task)
    if match is not None:
        return Completion(_drafts(person, passage, task, int(match[1]), seed))
    options = _OPTION.findall(task)
    correct = [letter for letter, choice in options if choice in person.facts.values()]
    if len(correct) != 1:
        return Completion("X 1")
    return Completion(f"{correct[0]} {_SPECIFICITY}")


def _drafts(person: Person, passage: str, task: str, n: int, seed: int) -> str:
    """Return `n` questions on an entry."""
    rng = seeded_random("examiner", passage, seed)
    blocks = []
    for attribute in shuffled(list(person.facts), rng)[:n]:
        gold = person.facts[attribute]
        wrong = [value for value in shuffled(POOLS[attribute], rng) if value != gold][:3]
        sentence = next(sentence for sentence in sentences(passage) if gold in sentence)
        lines = [f"Question: {render_question(person, attribute, rng)}", f"Answer: {gold}"]
        lines += [f"Wrong: {value}" for value in wrong]
        blocks.append("\n".join([*lines, f"Sentence: {sentence}"]))
    return "\n\n".join(blocks)


MODEL = "sandbox"
_MOST_BYTES = 2**28
"""Longest body of a request."""


class SandboxServer(ThreadingHTTPServer):
    """An OpenAI-compatible endpoint on this machine alone: /v1/chat/completions and /v1/models."""

    # Clients keep connections open, whose threads must not hold up the end.
    daemon_threads = True
    block_on_close = False
    # socketserver's default of 5 is far below what a run has in flight.
    request_queue_size = 1024
    connection_class: type[BaseHTTPRequestHandler]

    def __init__(self, port: int = 0) -> None:
        """Listen at `port` (0: any free one). Raises `DiskError` if it is taken."""
        try:
            super().__init__(("127.0.0.1", port), self.connection_class)
        except OSError as error:
            raise DiskError(
                f"127.0.0.1:{port}: cannot listen: {error.strerror}. Choose another port."
            ) from error
        self.url = f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(
        self, request: socket | tuple[bytes, socket], client_address: tuple[str, int]
    ) -> None:
        """Print nothing: the client has left."""


class Connection(BaseHTTPRequestHandler):
    """One connection of a `SandboxServer`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def do_GET(self) -> None:
        """List the models."""
        if self._is_from_here():
            models = {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "owned_by": "kinject"}],
            }
            if self.path.rstrip("/") == "/v1/models":
                self.say(200, models)
            else:
                self.fail(404, f"no such path: {self.path}")

    def do_POST(self) -> None:
        """Answer a chat request."""
        length = int(self.headers.get("content-length", "0"))
        if not 0 <= length <= _MOST_BYTES:
            raise ValueError(f"a body of {length} bytes")
        # Read in any case: on a connection that stays open the rest would be the next request.
        body = self.rfile.read(length)
        if self._is_from_here():
            if self.path == "/v1/chat/completions":
                self.answer(body)
            else:
                self.fail(404, f"no such path: {self.path}")

    def answer(self, body: bytes) -> None:
        """Answer the body of a chat request, or say what is wrong with it."""
        try:
            request = json.loads(body)
            messages, seed = request["messages"], int(request.get("seed") or 0)
            if request.get("model") != MODEL:
                return self.fail(404, f"The model {request.get('model')!r} does not exist.")
            completion = generate_answer(messages, seed)
            n_in = sum(len(message["content"]) for message in messages) // 4
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            InputError,
        ) as error:
            return self.fail(400, f"{type(error).__name__}: {error}")
        return self.complete(completion.text, completion.finish_reason, n_in)

    def complete(self, text: str | None, reason: str, n_in: int) -> None:
        """Send a completion."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": reason,
        }
        usage = {"prompt_tokens": n_in, "completion_tokens": len(text or "") // 4}
        self.say(
            200, {"object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}
        )

    def fail(
        self, status: int, message: str, code: str = "invalid_request_error", **headers: str
    ) -> None:
        """Send an error in OpenAI's form."""
        self.say(status, {"error": {"message": message, "code": code, "type": code}}, **headers)

    def say(self, status: int, value: Mapping[str, Any] | bytes, **headers: str) -> None:
        """Send a JSON value, or bytes as they are."""
        content = value
        if not isinstance(content, bytes):
            content = json.dumps(value).encode()
        self.send_response(status)
        length = str(len(content))
        sent = {"content-type": "application/json", "content-length": length, **headers}
        for name, text in sent.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        self.wfile.write(content)

    def _is_from_here(self) -> bool:
        """Return whether a request is for this machine and from no other machine's page; say so if
        it is not.

        Any page can direct a browser of this machine here, under the page's own name for this
        address (DNS rebinding).
        """
        hosts = [f"http://{host}" for host in self.headers.get_all("host", ())]
        urls = [*hosts, *self.headers.get_all("origin", ())]
        here = all(is_loopback(url) and "@" not in url for url in urls)
        if not here:
            self.fail(403, "This endpoint answers programs on its own machine.", "foreign_origin")
        return here

    def log_message(self, *args: object) -> None:
        """Print nothing."""


SandboxServer.connection_class = Connection
