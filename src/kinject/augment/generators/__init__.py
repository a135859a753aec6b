"""Who writes: a table of generators, each from messages and a seed to a `Completion`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Completion, Message

AsyncGenerator = Callable[[list[Message], int], Awaitable[Completion]]
"""(messages, seed) -> completion, without blocking. Raises `EndpointError` (`Transient`: may pass)."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Writer:
    """An open generator.

    `identity` holds everything besides messages and seed that shapes an answer; it goes into ids and cache keys, so it
    holds no key and no timeout. `remote` answers cost money or time: they are cached and limited. `abandon` ends all
    waiting for answers that would take hours; seconds are waited for.
    """

    name: str
    identity: Mapping[str, Any]
    remote: bool
    ask: AsyncGenerator
    abandon: Callable[[], None] = _nothing


def writer_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return what besides messages and seed shapes the answers of `section`'s generator."""
    if section.kind in ("sandbox", "file"):
        return {"kind": section.kind}
    if section.kind == "transformers":
        from kinject.augment.generators.transformers import identity_of

        return dict(identity_of(section))
    names = ("kind", "model", "base_url", "temperature", "max_tokens")
    return {name: getattr(section, name) for name in names}


def open_writer(recipe: Recipe, section: GeneratorSection) -> AbstractAsyncContextManager[Writer]:
    """Return the generator of `section`, ready inside ``async with``.

    Raises `EndpointError` (fatal) where the key is missing.
    """
    return _OPENERS[section.kind](recipe, section)


@asynccontextmanager
async def _open_sandbox(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Writer]:
    from kinject.augment.generators.sandbox import generate_answer

    async def ask(messages: list[Message], seed: int) -> Completion:
        return generate_answer(messages, seed)

    yield Writer("sandbox", writer_identity(section), False, ask)


@asynccontextmanager
async def _open_openai(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Writer]:
    from kinject.augment.generators.openai import Endpoint

    identity = writer_identity(section)
    if section.batch:
        from kinject.augment.generators.batch import BatchEndpoint

        async with BatchEndpoint(section, identity, recipe.run_dir) as batches:
            yield Writer(f"openai:{section.model}", identity, True, batches.ask, batches.abandon)
        return
    async with Endpoint(section) as endpoint:
        yield Writer(f"openai:{section.model}", identity, True, endpoint.ask)


@asynccontextmanager
async def _open_transformers(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Writer]:
    from kinject.augment.generators.transformers import LocalModel

    async with LocalModel(section) as model:
        yield Writer(f"transformers:{section.model}", writer_identity(section), True, model.ask)


@asynccontextmanager
async def _open_given(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Writer]:
    async def ask(messages: list[Message], seed: int) -> Completion:
        raise EndpointError(f"{section.path}: a file answers no requests; it only gives what it holds.", fatal=True)

    yield Writer(f"given:{section.path}", writer_identity(section), False, ask)


_OPENERS: Mapping[str, Callable[[Recipe, GeneratorSection], AbstractAsyncContextManager[Writer]]] = {
    "sandbox": _open_sandbox,
    "openai": _open_openai,
    "transformers": _open_transformers,
    "file": _open_given,
}
