"""Sends requests within the limits, answers them from the cache, retries passing faults; runs many
workers on one sender."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import threading
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from kinject.errors import EndpointError
from kinject.llm import Generator, JsonValue, Stopped, Transient
from kinject.llm.cache import AnswerCache, request_key
from kinject.llm.limits import Budget, EndpointState, Limits, LoadBalancer
from kinject.llm.thinking import with_thinking
from kinject.process import handled_by, interruption
from kinject.recipe import GeneratorSection
from kinject.terminal import format_count
from kinject.types import Completion, Message, Usage

if TYPE_CHECKING:
    from kinject.llm.endpoint import Endpoint
    from kinject.llm.transformers import LocalModel

log = logging.getLogger(__name__)

N_TRIES = 8
"""Times that one request is sent before it counts as failed; refusals for overload do not count."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the first retry and the maximum: doubled at each retry, with a jitter of half to
whole."""
MAX_SILENCE = 600.0
"""Seconds without any answer, from an endpoint that is overloaded or unreachable, before the run
stops."""
LONGEST_WAIT = 120.0
"""Most seconds of a pause that the endpoint asks for."""
N_FAILURES_IN_A_ROW = 20
"""Requests that fail for good, without an answer in between, before the run stops."""
_PRESSURE = ("overload", "timeout", "connection")
_ASCII_PER_TOKEN, _BYTES_PER_TOKEN = 3.0, 2.0
"""Low estimates, so that the cost reserved for a request is rather too high than too low: ASCII
characters, and bytes of all others, of which a Chinese character has three."""


def estimate_tokens(text: str) -> int:
    """Return the tokens of a text, rather too many."""
    n_ascii = len(text.encode("ascii", "ignore"))
    n_bytes = len(text.encode("utf-8", "surrogatepass"))
    return math.ceil(n_ascii / _ASCII_PER_TOKEN + (n_bytes - n_ascii) / _BYTES_PER_TOKEN)


@dataclass
class Traffic:
    """Counts of the requests of this run. `n_lost` answers were interrupted and may have been
    charged."""

    n_sent: int = 0
    n_answered: int = 0
    n_cached: int = 0
    n_retried: Counter[str] = field(default_factory=Counter)
    n_lost: int = 0
    used: Usage = Usage()
    seconds: float = 0.0

    def counts(self) -> dict[str, object]:
        """Return the manifest's entry."""
        return {
            "sent": self.n_sent,
            "answered": self.n_answered,
            "from_cache": self.n_cached,
            "retried": dict(self.n_retried),
            "lost": self.n_lost,
            "request_seconds": round(self.seconds, 3),
        }


class Sender:
    """Sends the requests of one run to its endpoints. `stop` lets those in flight finish and
    refuses all others."""

    def __init__(
        self,
        generators: Sequence[Generator],
        cache: AnswerCache | None,
        limits: Limits,
        partner: Sender | None = None,
    ) -> None:
        """`generators` are endpoints of the same model. With a `partner` it shares the budget and
        the stop.

        The cost of the run folder so far is read from `cache`, at today's prices.
        """
        self.generator = generators[0]
        self.traffic = Traffic()
        self.budget, self._stopping = Budget(limits.budget), asyncio.Event()
        if partner is not None:
            self.budget, self._stopping = partner.budget, partner._stopping
        self._cache = cache
        self._limits = limits
        most = limits.concurrency // len(generators)
        self._balancer = LoadBalancer([EndpointState(one, most) for one in generators])
        if cache is not None:
            earlier = cache.usage()
            self.budget.spent += limits.cost(earlier.tokens_in, earlier.tokens_out)
        self._in_flight: dict[bytes, asyncio.Future[Completion]] = {}
        self._n_failures = 0
        self._silent_since: float | None = None  # the first refusal since the last answer

    @property
    def stopping(self) -> bool:
        """Whether the run is ending."""
        return self._stopping.is_set()

    @property
    def out_of_budget(self) -> bool:
        """Whether the budget, shared with a partner, ended the run."""
        return self.budget.empty

    def stop(self) -> None:
        """Send nothing more. Requests in flight may finish."""
        self._stopping.set()
        self.budget.line.wake(everyone=True)
        self._balancer.line.wake(everyone=True)

    def status(self) -> str:
        """Return the text beside the progress bar: tokens of this run and cost of the run
        folder."""
        if not self.traffic.n_answered or not self.generator.remote:
            return ""
        used = self.traffic.used
        status = f"{format_count(used.tokens_in, 'token')} in, {used.tokens_out:,} out"
        if used.tokens_thinking:
            status += f" ({used.tokens_thinking:,} thinking)"
        if self.budget.spent:
            status += f", cost {self.budget.spent:.4f} as priced"
        return status

    async def send(self, messages: list[Message], seed: int) -> Completion:
        """Return the answer from the cache or from a generator.

        Raises `EndpointError` if there is none (fatal: nor for any other request) and `Stopped`
        where the run is ending.
        """
        if self._cache is None:
            return await self._request(messages, seed)
        key = request_key(self.generator.identity, messages, seed)
        stored = self._cache.get(key)
        if stored is not None:
            self.traffic.n_cached += 1
            return stored
        if key in self._in_flight:  # two equal passages share one request
            return await asyncio.shield(self._in_flight[key])
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._in_flight[key] = future
        try:
            completion = await self._request(messages, seed)
            self._cache.put(key, completion)
        except BaseException as error:
            future.set_exception(error if isinstance(error, Exception) else Stopped())
            future.exception()  # retrieved: there may be no other waiter
            raise
        finally:
            del self._in_flight[key]
        future.set_result(completion)
        return completion

    async def _request(self, messages: list[Message], seed: int) -> Completion:
        """Send until answered.

        Endpoints that are overloaded, or unreachable after they answered, are tried again for
        `MAX_SILENCE`.
        """
        tries = n_waits = 0
        n_answered = self.traffic.n_answered
        while True:
            try:
                return await self._try(messages, seed)
            except Transient as fault:
                failure = fault
            except EndpointError as error:
                raise self._failed(error) from error
            if failure.kind == "timeout" and not self.traffic.n_retried["timeout"]:
                log.warning(
                    f"{failure} It is sent again, up to {N_TRIES} times; "
                    "raise timeout for a slow server."
                )
            self.traffic.n_retried[failure.kind] += 1
            # Gone: it answered before, but nothing since this request's last fault. Else this
            # request causes the fault.
            unreachable = failure.kind == "connection" and 0 < self.traffic.n_answered == n_answered
            n_answered = self.traffic.n_answered
            # An outage of 30 s used up eight tries, and ended a run of days.
            if failure.kind == "overload" or unreachable:
                n_waits += 1
                if self._silent_too_long():
                    raise self._failed(failure, everyone=failure.kind == "overload") from failure
            else:
                tries += 1
                if tries >= N_TRIES:
                    raise self._failed(failure) from failure
            # An endpoint that waits needs no long pauses: as few requests are in flight as it
            # bears.
            await self._pause(tries + min(n_waits, 3), failure.retry_after)

    def _silent_too_long(self) -> bool:
        """Return whether the first refusal since the last answer is longer ago than
        `MAX_SILENCE`."""
        now = monotonic()
        if self._silent_since is None:
            self._silent_since = now
        return now - self._silent_since > MAX_SILENCE

    async def _try(self, messages: list[Message], seed: int) -> Completion:
        """Send once, within all limits."""
        endpoint = await self._balancer.enter(self._stopping.is_set)
        if endpoint is None:
            raise Stopped
        overloaded = False
        n_in = sum(estimate_tokens(message["content"]) for message in messages)
        most = Usage(n_in, self.generator.longest_answer)
        reserved = self._limits.cost(most.tokens_in, most.tokens_out)
        try:
            if not await self.budget.reserve(reserved, self._stopping.is_set):
                self.stop()
                raise Stopped
            self.traffic.n_sent += 1
            used, start = Usage(), monotonic()
            try:
                answer = await endpoint.generator.complete(messages, seed)
                completion = self._with_usage(answer, n_in)
                used = completion.usage
            except Transient as fault:
                overloaded = fault.kind in _PRESSURE
                endpoint.record_fault(fault)
                # The endpoint may charge an answer that did not arrive whole: it counts at the most
                # that it can cost.
                if fault.lost:
                    self.traffic.n_lost += 1
                    used = most
                raise
            finally:
                self.budget.settle(reserved, self._limits.cost(used.tokens_in, used.tokens_out))
        finally:
            self._balancer.leave(endpoint, overloaded=overloaded)
        endpoint.record_answer(monotonic() - start)
        self.traffic.n_answered += 1
        self.traffic.used = self.traffic.used + used
        self._n_failures = 0
        self._silent_since = None
        return completion

    def _with_usage(self, completion: Completion, n_in: int) -> Completion:
        """Return a completion with its tokens, estimated where it does not report them: the budget
        must count every answer."""
        usage, thinking, text = completion.usage, completion.thinking, completion.text
        if not self.generator.remote or (usage.tokens_in and (usage.tokens_out or not text)):
            return completion
        n_out = usage.tokens_out or estimate_tokens(thinking + text)
        used = Usage(usage.tokens_in or n_in, n_out, usage.tokens_thinking)
        return replace(completion, usage=with_thinking(used, len(thinking), len(text)))

    def _failed(self, error: EndpointError, *, everyone: bool = False) -> EndpointError:
        """Return the error of a failed request, fatal where many in a row or all (`everyone`) fail.
        A fatal one stops the run."""
        self._n_failures += 1
        if everyone:
            self.stop()
            return EndpointError(f"{error} Nothing else came for {MAX_SILENCE:.0f} s.", fatal=True)
        if not error.fatal and self._n_failures < N_FAILURES_IN_A_ROW:
            return error
        self.stop()  # at once, before another request is sent
        if error.fatal:
            return error
        return EndpointError(
            f"{error} So did the {self._n_failures - 1} requests before it; the run stops here.",
            fatal=True,
        )

    async def _pause(self, tries: int, retry_after: float | None) -> None:
        pause = min(FIRST_PAUSE * 2 ** min(tries - 1, 16), LONGEST_PAUSE) * random.uniform(0.5, 1.0)
        if retry_after is not None:
            # A hostile server asked for 8,640,000 s, which a run would have obeyed.
            pause = max(pause, min(retry_after, LONGEST_WAIT) * random.uniform(1.0, 1.1))
        try:
            await asyncio.wait_for(self._stopping.wait(), pause)
        except TimeoutError:
            return
        raise Stopped


SandboxWriter = Callable[[list[Message], int], Completion]
"""Answers messages without a model: (messages, seed) -> the answer."""


def generator_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return everything besides messages and seed that shapes the answers of `section`'s generator.

    Of an endpoint that is the model, not the address: a model may move, or be at several addresses.
    """
    if section.kind in ("sandbox", "file"):
        return {"kind": section.kind}
    weights = {}
    if section.kind in ("transformers", "vllm"):
        from kinject.llm.transformers import weights_identity

        weights = {"weights": weights_identity(section.model or "")}
    identity = {
        "kind": section.kind,
        "model": str(section.model),
        **weights,
        "temperature": section.sampling_temperature,
        "max_tokens": section.max_tokens,
    }
    for name in ("stop", "chat_template_kwargs", "extra_body"):
        value = getattr(section, name)
        if value:  # a parameter of the default, or an empty one, leaves ids as they are
            identity[name] = _one_spelling(value)
    return identity


def _one_spelling(value: JsonValue) -> JsonValue:
    """Return a value of a recipe in one spelling: 1.0 is 1, and must not be paid again."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _one_spelling(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_one_spelling, value))
    return value


@contextlib.asynccontextmanager
async def open_generator(
    section: GeneratorSection,
    sandbox: SandboxWriter | None = None,
    *,
    completions: bool = False,
    label: Mapping[str, Any] | None = None,
) -> AsyncIterator[Generator]:
    """Yield the generator of `section`; `sandbox` writes the answers of kind sandbox.

    With `completions` an endpoint is asked by that route (`CompletionsEndpoint`), not in a chat.
    `label` (a revision) separates answers that the section does not.

    Raises `EndpointError` (fatal) if the key is missing, or for kind sandbox without a `sandbox`.
    """
    identity = {**generator_identity(section), **(label or {})}
    if section.kind == "sandbox":
        if sandbox is None:
            message = (
                "kind sandbox writes paraphrases and questions only. Take openai or transformers."
            )
            raise EndpointError(message, fatal=True)

        async def write(messages: list[Message], seed: int) -> Completion:
            return sandbox(messages, seed)

        yield Generator("sandbox", identity, False, write)
    elif section.kind == "file":

        async def refuse(messages: list[Message], seed: int) -> Completion:
            raise EndpointError(
                f"{section.path}: a file of variants cannot answer requests.", fatal=True
            )

        yield Generator(f"file:{section.path}", identity, False, refuse)
    else:
        async with _open_model(section, completions) as model:
            yield Generator(f"{section.kind}:{section.model}", identity, True, model.complete)


def _open_model(section: GeneratorSection, completions: bool) -> LocalModel | Endpoint:
    """Return the model of a section, or its endpoint, not open yet. Their imports take seconds."""
    if section.kind in ("transformers", "vllm"):
        from kinject.llm.transformers import LocalModel, VllmModel

        if section.kind == "vllm":
            return VllmModel(section)
        return LocalModel(section)
    from kinject.llm.completions import CompletionsEndpoint
    from kinject.llm.endpoint import Endpoint

    if completions:
        return CompletionsEndpoint(section)
    return Endpoint(section)


@contextlib.asynccontextmanager
async def open_cached(section: GeneratorSection) -> AsyncIterator[Generator]:
    """Yield the generator of `section` where all its answers are in the cache: asked for another
    one it fails."""

    async def refuse(messages: list[Message], seed: int) -> Completion:
        raise EndpointError("the shards lack an answer that the merge needs.")

    is_remote = section.kind not in ("sandbox", "file")
    yield Generator(
        f"{section.kind}:{section.model}", generator_identity(section), is_remote, refuse
    )


Opener = Callable[[GeneratorSection], contextlib.AbstractAsyncContextManager[Generator]]


@contextlib.asynccontextmanager
async def open_sender(
    section: GeneratorSection,
    run_dir: Path,
    limits: Limits,
    *,
    cache: str = "cache.sqlite",
    partner: Sender | None = None,
    opener: Opener = open_generator,
) -> AsyncIterator[Sender]:
    """Yield a sender to the generator of `section`, with a cache in `run_dir` where answers cost
    money or time.

    `opener` is `open_generator`, or that with some of its arguments. Raises as that and
    `AnswerCache`.
    """
    async with contextlib.AsyncExitStack() as stack:
        parts = section.parts().values()
        opened = [await stack.enter_async_context(opener(part)) for part in parts]
        answers: AnswerCache | None = None
        if opened[0].remote:
            answers = stack.enter_context(AnswerCache(run_dir / cache))
        yield Sender(opened, answers, limits, partner)


Item = TypeVar("Item")
Answer = TypeVar("Answer")


async def run_workers(
    items: Iterator[Item], work: Callable[[Item], Awaitable[None]], sender: Sender, n_workers: int
) -> None:
    """Do `work` on every item, `n_workers` at a time.

    Raises the first exception of `work` after the requests in flight have ended (`Stopped` ends the
    run without one), and `KeyboardInterrupt` as `graceful_shutdown` does.
    """
    errors: list[Exception] = []

    async def worker() -> None:
        try:
            for item in items:
                if sender.stopping:
                    return
                await work(item)
        except Stopped:
            return
        # Raised below, when the requests in flight have ended.
        except Exception as error:  # noqa: BLE001
            errors.append(error)
            sender.stop()

    with graceful_shutdown(sender):
        await asyncio.gather(*(worker() for _ in range(n_workers)))
        if errors:
            raise errors[0]


async def gather_answers(requests: Iterable[Awaitable[Answer]]) -> list[Answer | EndpointError]:
    """Return the answer to each request, or the error that only this request met, in order.

    Raises an error that ends the run when all requests have ended; `Stopped` only if there is no
    other.
    """
    results = await asyncio.gather(*requests, return_exceptions=True)
    # An error without `fatal` (a disk that is full) concerns every request, too.
    fatal = [
        result
        for result in results
        if isinstance(result, BaseException) and getattr(result, "fatal", True)
    ]
    if fatal:
        raise next((error for error in fatal if not isinstance(error, Stopped)), fatal[0])
    return [
        result
        for result in results
        if isinstance(result, EndpointError) or not isinstance(result, BaseException)
    ]


def run_event_loop(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of `work`, as `asyncio.run` does; in a thread of its own where a loop runs
    already, as in Jupyter."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Answer]]] = []

    async def cancellable() -> Answer:
        task = asyncio.ensure_future(work)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, cancellable())
        try:
            return future.result()
        except KeyboardInterrupt:  # the thread receives no signal
            for loop, task in tasks:
                loop.call_soon_threadsafe(task.cancel)
            raise


@contextlib.contextmanager
def graceful_shutdown(sender: Sender) -> Iterator[None]:
    """Turn the first signal that ends a verb into `sender.stop()`, so that answers in flight are
    received and stored.

    At the end of the block `KeyboardInterrupt` (`Terminated`) is raised. A second signal cancels
    the block.
    """
    # Python sets signal handlers in the main thread alone, and in Jupyter the loop runs in another.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals: list[int] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def interrupt() -> None:
        if not sender.stopping:
            log.warning(
                "stopping after the answers to the requests in flight; "
                "a second signal does not wait for them."
            )
        sender.stop()
        if len(signals) > 1 and task is not None:
            task.cancel()

    def receive(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        loop.call_soon_threadsafe(interrupt)

    # Not asyncio's handlers: removing one restores the system's default, not the handler of before.
    with handled_by(receive):
        try:
            yield
        except asyncio.CancelledError:
            if not signals:
                raise
    if signals:
        raise interruption(signals[0])
