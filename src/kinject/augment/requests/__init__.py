"""Who writes: a table of generators, each from messages and a seed to a `Completion`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from kinject.augment.requests.generator import Generator, Stopped, Transient
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection, Recipe
from kinject.types import Completion, Message

__all__ = ["Generator", "Stopped", "Transient", "generator_identity", "open_generator"]


def generator_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return what besides messages and seed shapes the answers of `section`'s generator."""
    if section.kind in ("sandbox", "file"):
        return {"kind": section.kind}
    if section.kind == "transformers":
        from kinject.augment.requests.transformers import identity_of

        return dict(identity_of(section))
    names = ("kind", "model", "base_url", "temperature", "max_tokens")
    return {name: getattr(section, name) for name in names}


def open_generator(recipe: Recipe, section: GeneratorSection) -> AbstractAsyncContextManager[Generator]:
    """Return the generator of `section`, ready inside ``async with``.

    Raises `EndpointError` (fatal) where the key is missing.
    """
    return _OPENERS[section.kind](recipe, section)


@asynccontextmanager
async def _open_sandbox(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Generator]:
    from kinject.augment.sandbox import generate_answer

    async def ask(messages: list[Message], seed: int) -> Completion:
        return generate_answer(messages, seed)

    yield Generator("sandbox", generator_identity(section), False, ask)


@asynccontextmanager
async def _open_openai(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Generator]:
    from kinject.augment.requests.endpoint import Endpoint

    identity = generator_identity(section)
    if section.batch:
        from kinject.augment.requests.batch import BatchEndpoint

        async with BatchEndpoint(section, identity, recipe.run_dir) as batches:
            yield Generator(f"openai:{section.model}", identity, True, batches.ask, batches.abandon)
        return
    async with Endpoint(section) as endpoint:
        yield Generator(f"openai:{section.model}", identity, True, endpoint.ask)


@asynccontextmanager
async def _open_transformers(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Generator]:
    from kinject.augment.requests.transformers import LocalModel

    async with LocalModel(section) as model:
        yield Generator(f"transformers:{section.model}", generator_identity(section), True, model.ask)


@asynccontextmanager
async def _open_given(recipe: Recipe, section: GeneratorSection) -> AsyncIterator[Generator]:
    async def ask(messages: list[Message], seed: int) -> Completion:
        raise EndpointError(f"{section.path}: a file answers no requests; it only gives what it holds.", fatal=True)

    yield Generator(f"given:{section.path}", generator_identity(section), False, ask)


_OPENERS: Mapping[str, Callable[[Recipe, GeneratorSection], AbstractAsyncContextManager[Generator]]] = {
    "sandbox": _open_sandbox,
    "openai": _open_openai,
    "transformers": _open_transformers,
    "file": _open_given,
}
