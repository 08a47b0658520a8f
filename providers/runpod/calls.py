"""Calls that may be made again at will: every way in which one can fail is an error of the contract."""

import asyncio
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from providers.base import Unavailable
from providers.runpod.client import NoAnswer, NotSent, Reply, RunPodClient
from providers.runpod.refusals import failure

Body = TypeVar("Body", bound=BaseModel)


class Garbled(Unavailable):
    """A success by its status, and a body that cannot be used."""


class InTime:
    """The time of one question, however many requests it takes; after it the answer is "could not ask"."""

    def __init__(self, for_s: float) -> None:
        self._timeout = asyncio.timeout(for_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise Unavailable("RunPod did not answer in time") from late


async def call(
    client: RunPodClient, method: str, path: str, *, query: Mapping[str, str] | None = None, body: Any = None
) -> Reply:
    """Any answer.

    Raises:
        Unavailable: there was none.
    """
    try:
        return await client.call(method, path, query=query, body=body)
    except (NotSent, NoAnswer) as error:
        raise Unavailable(str(error)) from error


async def read(client: RunPodClient, path: str, *, query: Mapping[str, str] | None = None) -> Reply:
    """A success.

    Raises:
        Unavailable, Throttled: there was none, or another answer.
    """
    return usable(await call(client, "GET", path, query=query))


def usable(reply: Reply) -> Reply:
    """Raises:
    Unavailable, Throttled: it is no success.
    """
    if reply.ok:
        return reply
    if 200 <= reply.status < 300:
        raise Garbled(f"the answer is an error: {reply.said}")
    raise failure(reply)


def parsed(kind: type[Body], reply: Reply) -> Body:
    """Raises:
    Garbled: the body is not what it should be; the message names the fields, never their content.
    """
    try:
        return kind.model_validate_json(reply.raw)
    except ValidationError as error:
        fields = ", ".join(".".join(map(str, item["loc"])) or "the body" for item in error.errors()[:3])
        raise Garbled(f"the answer cannot be read: {fields}") from None
