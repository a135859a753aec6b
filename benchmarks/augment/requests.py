"""The request engine against a loopback server with 100 ms latency: throughput, rerun, several endpoints.

    python benchmarks/augment/requests.py [WORD_OF_A_CASE] [--times 1] [--passages N] [--curator PYTHON]

Every run is a process of its own, its start and imports included. A line gives its seconds, as many times the ideal
(requests x latency / in flight), the same of the request phase alone, the CPU seconds of the process, and the cores that
other programs of the machine took meanwhile: wall times say little where these are many. The bare
loop is the openai client on its aiohttp transport with nothing around it: no cache, no checks, no store. PYTHON is the
interpreter of an environment with bespokelabs-curator, which then does the same requests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection as Connection_
from pathlib import Path
from typing import Any

from kinject.augment.prompts import passage_of
from kinject.augment.sandbox import Connection, SandboxServer, generate_answer
from kinject.sandbox.grammar import render_entry
from kinject.sandbox.people import create_country

LATENCY = 0.1
N_EACH = 10
IN_FLIGHT = 128
HERE = Path(__file__).parent


@dataclass
class Server:
    """A running endpoint: its base URL, and a pipe that tells what it saw."""

    url: str
    pipe: Connection_
    process: multiprocessing.Process

    def cpu(self) -> float:
        """Return the CPU seconds that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def seen(self) -> dict[str, Any]:
        """Return the numbers of answers, and of different answered requests."""
        self.pipe.send("seen")
        counts: dict[str, Any] = self.pipe.recv()
        return counts


FACTS = (
    ("{name} was opened to the public on {day} March {year}, after a long delay.",
     "After a long delay, the public was let into {name} on {day} March {year}."),
    ("It stands {metres} metres above the sea, on a ridge of old stone.",
     "On a ridge of old stone it stands, {metres} metres above the sea."),
    ("The building cost {cost} million crowns, which the town paid over many seasons.",
     "Over many seasons the town paid the {cost} million crowns which the building cost."),
    ("Its first keeper, {keeper}, lived there with a small crew and two dogs.",
     "With a small crew and two dogs, its first keeper {keeper} lived there."),
    ("Every winter {tons} tons of coal were carried up by mule.",
     "Mules carried {tons} tons of coal up every winter."),
    ("In {later} a storm took the roof, and the lamp was dark for weeks.",
     "A storm took the roof in {later}, so that the lamp was dark for weeks."),
    ("Now {visitors} people come each summer to see the old lens.",
     "To see the old lens, {visitors} people come each summer now."),
)  # fmt: skip
"""Sentences about a lighthouse and their paraphrases: with two facts in the first, eight facts in some 85 words."""


def lighthouse(number: int, kind: int) -> str:
    """Return the text about one lighthouse, or (`kind` 1) a faithful paraphrase of it."""
    a, b = divmod(number, 97)
    values = {
        "name": f"Port {chr(65 + a % 26)}en{'aeiou'[b % 5]}l{chr(97 + b % 26)} Light", "day": 1 + number % 28,
        "year": 1800 + a, "metres": 20 + b, "cost": 2 + a % 7, "keeper": f"Anton {chr(65 + b % 26)}or{'aeiou'[a % 5]}nd",
        "tons": 110 + b, "later": 1900 + b, "visitors": 3000 + number,
    }  # fmt: skip
    return " ".join(pair[kind].format(**values) for pair in FACTS)


class SlowServer(SandboxServer):
    """The sandbox's endpoint, or one that knows the paraphrases of texts about lighthouses, with a latency."""

    def __init__(self, latency: float, n_lighthouses: int) -> None:
        self.latency = latency
        self.answered = Counter[bytes]()
        self.paraphrases = {
            lighthouse(number, 0): lighthouse(number, 1) for number in range(n_lighthouses)
        }
        super().__init__()


class SlowConnection(Connection):
    """Waits before each answer."""

    server: SlowServer

    def answer(self, body: bytes) -> None:
        """Answer the body of a chat request."""
        time.sleep(self.server.latency)
        request = json.loads(body)
        known = self.server.paraphrases
        text = (
            known[passage_of(request["messages"])]
            if known
            else generate_answer(request["messages"], request["seed"]).text
        )
        self.server.answered[body] += 1
        self.complete(text, "stop", 300)


SlowServer.connection_class = SlowConnection


def serve_aside(latency: float, pipe: Connection_, n_lighthouses: int) -> None:
    """Serve until killed: send the URL, then what was seen for every message."""
    server = SlowServer(latency, n_lighthouses)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.url)
    while pipe.recv():
        pipe.send({"answered": server.answered.total(), "different": len(server.answered)})


@contextmanager
def serving(latency: float = LATENCY, n_lighthouses: int = 0) -> Iterator[Server]:
    """Run an endpoint in a process of its own: the sandbox's, or one for texts about lighthouses."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=serve_aside, args=(latency, there, n_lighthouses), daemon=True
    )
    process.start()
    try:
        yield Server(here.recv(), here, process)
    finally:
        process.terminate()
        process.join()


@dataclass
class Ended:
    """A process that ended: exit code, wall and CPU seconds, cores that others took meanwhile, what it printed."""

    code: int
    seconds: float
    cpu: float
    others: float
    out: str
    err: str


def machine_cpu() -> float:
    """Return the CPU seconds that this machine has spent on anything (or was denied by its host) so far."""
    user, nice, system, _, _, irq, soft, steal = map(
        int, Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def run_process(command: list[str], server: Server) -> Ended:
    """Run a command to its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        before = machine_cpu() - server.cpu()
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=out, stderr=err)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = used.ru_utime + used.ru_stime
        others = max(0.0, machine_cpu() - server.cpu() - before - cpu) / seconds
        out.seek(0)
        err.seek(0)
        return Ended(process.returncode, seconds, cpu, others, out.read(), err.read())


def write_documents(folder: Path, n_passages: int) -> None:
    """Write sandbox documents of one passage each."""
    people = create_country(n_known=1, n_new=n_passages).new
    rows = [
        {"id": person.name, "title": person.name, "text": render_entry(person, 0)}
        for person in people
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_lighthouses(folder: Path, n_passages: int) -> None:
    """Write documents about lighthouses, of one passage each."""
    rows = [
        {"id": f"l{number}", "title": "Lighthouses", "text": lighthouse(number, 0)}
        for number in range(n_passages)
    ]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder: Path, url: str, concurrency: int, n_each: int) -> Path:
    """Write a recipe over the documents in `folder`."""
    path = folder / "recipe.yaml"
    path.write_text(
        f"run_dir: {folder}/run\naugment:\n  documents: {folder}/documents.jsonl\n  styles: {{paraphrase: {n_each}}}\n"
        f"  max_attempts: 10\n  generator:\n    {{kind: openai, base_url: '{url}', model: sandbox, "
        f"concurrency: {concurrency}}}\n"
    )
    return path


def line(label: str, ended: Ended, ideal: float, rest: str) -> str:
    """Return a line of the result."""
    times = f"{ended.seconds / ideal:5.2f} x ideal {ideal:.2f} s" if ideal else " " * 20
    return f"{label:36} {ended.seconds:6.2f} s  CPU {ended.cpu:5.2f} s  others {ended.others:4.2f}  {times}  {rest}"


def augment_line(label: str, folder: Path, ended: Ended, in_flight: int) -> str:
    """Return the line of a run of kinject, from its manifest."""
    counts = json.loads((folder / "run/manifest.json").read_text())["counts"]
    phase = counts["this_run"]
    taken = phase["sent"] - phase["retried"].get(
        "overload", 0
    )  # what is refused with 429 is no work
    ideal = taken * LATENCY / in_flight
    over = f"request phase {phase['request_seconds'] / ideal:.2f} x; " if ideal else ""
    return line(
        label, ended, ideal,
        f"{over}got {counts['got']} of {counts['asked']}, sent {phase['sent']}, exit {ended.code}, "
        f"retried {phase['retried']}, refused {counts['refused']}",
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One kind of server, with a number of passages of `N_EACH` requests each."""

    label: str
    n_passages: int
    n_each: int = N_EACH
    lighthouses: bool = False


CASES = (
    Case("plain, 128 in flight", 500),
    Case("80 words, 8 facts, one sample each", 5000, n_each=1, lighthouses=True),
)


def run_case(case: Case, folder: Path, server: Server) -> None:
    """Print what kinject makes of one case."""
    recipe = write_recipe(folder, server.url, IN_FLIGHT, case.n_each)
    command = [sys.executable, "-m", "kinject.cli", "augment", str(recipe)]
    for label in (case.label, "the same again, finished"):
        print(augment_line(label, folder, run_process(command, server), IN_FLIGHT), flush=True)


BARE = """
import asyncio, json, sys
import openai

async def main(path, url, n_each, in_flight):
    client = openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0, http_client=openai.DefaultAioHttpClient())
    gate = asyncio.Semaphore(in_flight)

    async def one(text, seed):
        messages = [{"role": "system", "content": "Rewrite."}, {"role": "user", "content": f"<passage>\\n{text}\\n</passage>"}]
        async with gate:
            answer = await client.chat.completions.create(
                model="sandbox", messages=messages, seed=seed, temperature=1.0, max_tokens=1024)
        return answer.choices[0].message.content

    rows = [json.loads(line) for line in open(path)]
    texts = await asyncio.gather(*(one(row["text"], seed) for row in rows for seed in range(n_each)))
    print(len(texts))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
"""


def run_others(
    folder: Path, server: Server, n_passages: int, n_each: int, curator: str | None
) -> None:
    """Print what the bare loop, and Curator where it is at hand, make of the plain case."""
    n = n_passages * n_each
    ideal = n * LATENCY / IN_FLIGHT
    arguments = [str(folder / "documents.jsonl"), server.url, str(n_each), str(IN_FLIGHT)]
    ended = run_process([sys.executable, "-c", BARE, *arguments], server)
    print(
        line("bare loop, openai and aiohttp", ended, ideal, f"got {ended.out.strip()} of {n}"),
        flush=True,
    )
    if curator is None:
        print(f"{'Bespoke Curator':36} not run: give --curator PYTHON")
        return
    before = server.seen()["answered"]
    ended = run_process(
        [curator, "-I", str(HERE / "curator_side.py"), *arguments, str(folder / "curator")], server
    )
    got = (
        ended.out.strip().splitlines()[-1]
        if ended.code == 0
        else f"exit {ended.code}: {ended.err.strip()[-200:]}"
    )
    print(
        line(
            "Bespoke Curator",
            ended,
            ideal,
            f"got {got} of {n}, sent {server.seen()['answered'] - before}",
        ),
        flush=True,
    )


SEVERAL = "four endpoints over one, one of four killed"
N_SEVERAL = 16


def write_recipe_of_several(folder: Path, servers: list[Server], name: str) -> Path:
    """Write a recipe over several endpoints, each with 4 requests in flight."""
    urls = ", ".join(f"'{server.url}'" for server in servers)
    path = folder / f"{name}.yaml"
    path.write_text(
        f"run_dir: {folder}/{name}\naugment:\n  documents: {folder}/documents.jsonl\n  styles: {{paraphrase: {N_EACH}}}\n"
        f"  max_attempts: 10\n  generator: {{kind: openai, model: sandbox, concurrency: 4, base_url: [{urls}]}}\n"
    )
    return path


def run_several(folder: Path) -> None:
    """Print the request phase over one endpoint and over four, and over four of which one is killed half way."""
    write_documents(folder, N_SEVERAL)
    seconds = {}
    for name, n_servers in (("one", 1), ("four", 4), ("killed", 4)):
        with ExitStack() as stack:
            servers = [stack.enter_context(serving(20 * LATENCY)) for _ in range(n_servers)]
            recipe = write_recipe_of_several(folder, servers, name)
            victim = servers[-1]
            timer = threading.Timer(seconds.get("four", 0) / 2 + 2, victim.process.kill)
            if name == "killed":
                timer.start()
            ended = run_process(
                [sys.executable, "-m", "kinject.cli", "augment", str(recipe)], servers[0]
            )
            counts = json.loads((folder / name / "manifest.json").read_text())["counts"]
            phase = counts["this_run"]
            seconds[name] = phase["request_seconds"]
            seen = [server.seen() for server in servers if server.process.is_alive()]
            fractions = [server_counts["answered"] / phase["answered"] for server_counts in seen]
            twice = sum(
                server_counts["answered"] - server_counts["different"] for server_counts in seen
            )
            print(f"{name:36} request phase {seconds[name]:.2f} s, {seconds['one'] / seconds[name]:.2f} times one's speed; got "
                  f"{counts['got']} of {counts['asked']}, sent {phase['sent']}, retried {phase['retried']}, answered twice "
                  f"{twice}, exit {ended.code}, shares {fractions}", flush=True)  # fmt: skip
            timer.cancel()


def main() -> None:
    """Run the cases whose label holds the given word, each in a folder of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("word", nargs="?", default="")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--passages", type=int, help="instead of the case's own number")
    parser.add_argument("--curator", metavar="PYTHON")
    arguments = parser.parse_args()
    for _ in range(arguments.times):
        if arguments.word in SEVERAL:
            with tempfile.TemporaryDirectory() as name:
                run_several(Path(name))
        for case in CASES:
            if arguments.word not in case.label:
                continue
            n_passages = arguments.passages or case.n_passages
            n_lighthouses = n_passages if case.lighthouses else 0
            with tempfile.TemporaryDirectory() as name, serving(LATENCY, n_lighthouses) as server:
                folder = Path(name)
                (write_lighthouses if case.lighthouses else write_documents)(folder, n_passages)
                run_case(case, folder, server)
                run_others(folder, server, n_passages, case.n_each, arguments.curator)


if __name__ == "__main__":
    main()
