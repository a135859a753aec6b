"""Requests to generators: endpoints, batches, local models; limits, retries and the cache of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from kinject.augment.requests.chat import sampling_options
from kinject.augment.requests.generator import Generator, Stopped, Structure, Transient
from kinject.errors import EndpointError
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message

__all__ = ["Generator", "Stopped", "Structure", "Transient", "generator_identity", "open_generator"]


def generator_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return everything besides messages and seed that shapes the answers of `section`'s generator.

    Of an endpoint that is the model, not the address: a model may move, or be at several addresses. Of several models, any
    may write an answer: the identity lists them.
    """
    if section.kind in ("sandbox", "file"):
        return {"kind": section.kind}
    if section.kind == "transformers":
        from kinject.augment.requests.transformers import model_identity

        return model_identity(section)
    models = sorted({str(part.model) for part in section.parts().values()})
    identity = {name: getattr(section, name) for name in ("kind", "temperature", "max_tokens")}
    return {**identity, "model": models[0] if len(models) == 1 else models, **sampling_options(section)}


def open_generator(section: GeneratorSection, run_dir: Path) -> AbstractAsyncContextManager[Generator]:
    """Return the generator of `section`, ready inside ``async with``.

    Raises `EndpointError` (fatal) if the key is missing.
    """
    return _OPENERS[section.kind](section, run_dir)


@asynccontextmanager
async def _open_sandbox(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    from kinject.augment.sandbox import generate_answer

    async def ask(messages: list[Message], seed: int) -> Completion:
        return generate_answer(messages, seed)

    yield Generator("sandbox", generator_identity(section), False, ask)


@asynccontextmanager
async def _open_openai(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    from kinject.augment.requests.endpoint import Endpoint

    name, identity = f"openai:{section.model}", generator_identity(section)
    if section.batch:
        from kinject.augment.requests.batch import BatchEndpoint

        async with BatchEndpoint(section, identity, run_dir) as batches:
            yield Generator(name, identity, True, batches.ask, batches.abandon)
        return
    async with Endpoint(section) as endpoint:
        yield Generator(name, identity, True, endpoint.ask, structured=section.structured_output)


@asynccontextmanager
async def _open_transformers(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    from kinject.augment.requests.transformers import LocalModel

    async with LocalModel(section) as model:
        yield Generator(f"transformers:{section.model}", generator_identity(section), True, model.ask)


@asynccontextmanager
async def _open_file(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    async def ask(messages: list[Message], seed: int) -> Completion:
        raise EndpointError(f"{section.path}: a file of variants cannot answer requests.", fatal=True)

    yield Generator(f"file:{section.path}", generator_identity(section), False, ask)


_OPENERS: Mapping[str, Callable[[GeneratorSection, Path], AbstractAsyncContextManager[Generator]]] = {
    "sandbox": _open_sandbox,
    "openai": _open_openai,
    "transformers": _open_transformers,
    "file": _open_file,
}
