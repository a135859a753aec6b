"""Requests to generators: endpoints and local models; limits, retries and the cache of answers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from kinject.errors import EndpointError
from kinject.llm.chat import sampling_options
from kinject.llm.generator import Generator, Stopped, Transient
from kinject.recipe import GeneratorSection
from kinject.types import Completion, Message

SandboxWriter = Callable[[list[Message], int], Completion]
"""Answers messages without a model: (messages, seed) -> the answer."""

__all__ = ["Generator", "SandboxWriter", "Stopped", "Transient", "generator_identity", "open_generator"]


def generator_identity(section: GeneratorSection) -> dict[str, Any]:
    """Return everything besides messages and seed that shapes the answers of `section`'s generator.

    Of an endpoint that is the model, not the address: a model may move, or be at several addresses.
    """
    if section.kind in ("sandbox", "file"):
        return {"kind": section.kind}
    if section.kind == "transformers":
        from kinject.llm.transformers import model_identity

        return model_identity(section)
    return {
        "kind": section.kind, "temperature": section.sampling_temperature, "max_tokens": section.max_tokens,
        "model": str(section.model), **sampling_options(section),
    }  # fmt: skip


def open_generator(
    section: GeneratorSection, run_dir: Path, sandbox: SandboxWriter | None = None, *, completions: bool = False
) -> AbstractAsyncContextManager[Generator]:
    """Return the generator of `section`, ready inside ``async with``; `sandbox` writes the answers of kind sandbox.

    With `completions` an endpoint is asked by that route (`kinject.llm.completions`), not in a chat. Raises
    `EndpointError` (fatal) if the key is missing, or for kind sandbox without a `sandbox`.
    """
    if section.kind == "sandbox":
        return _open_sandbox(section, sandbox)
    if completions:
        return _open_completions(section)
    return _OPENERS[section.kind](section, run_dir)


@asynccontextmanager
async def _open_sandbox(section: GeneratorSection, sandbox: SandboxWriter | None) -> AsyncIterator[Generator]:
    if sandbox is None:
        raise EndpointError(
            "kind sandbox writes paraphrases and questions only. Take openai or transformers.", fatal=True
        )

    async def complete(messages: list[Message], seed: int) -> Completion:
        return sandbox(messages, seed)

    yield Generator("sandbox", generator_identity(section), False, complete)


@asynccontextmanager
async def _open_openai(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    from kinject.llm.endpoint import Endpoint

    name, identity = f"openai:{section.model}", generator_identity(section)
    async with Endpoint(section) as endpoint:
        yield Generator(name, identity, True, endpoint.complete)


@asynccontextmanager
async def _open_completions(section: GeneratorSection) -> AsyncIterator[Generator]:
    from kinject.llm.completions import CompletionsEndpoint

    async with CompletionsEndpoint(section) as endpoint:
        yield Generator(f"openai:{section.model}", generator_identity(section), True, endpoint.complete)


@asynccontextmanager
async def _open_transformers(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    from kinject.llm.transformers import LocalModel

    async with LocalModel(section) as model:
        yield Generator(f"transformers:{section.model}", generator_identity(section), True, model.complete)


@asynccontextmanager
async def _open_file(section: GeneratorSection, run_dir: Path) -> AsyncIterator[Generator]:
    async def complete(messages: list[Message], seed: int) -> Completion:
        raise EndpointError(f"{section.path}: a file of variants cannot answer requests.", fatal=True)

    yield Generator(f"file:{section.path}", generator_identity(section), False, complete)


_OPENERS: Mapping[str, Callable[[GeneratorSection, Path], AbstractAsyncContextManager[Generator]]] = {
    "openai": _open_openai,
    "transformers": _open_transformers,
    "file": _open_file,
}
