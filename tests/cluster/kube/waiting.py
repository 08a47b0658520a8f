"""Waiting for what another process does, with a deadline that only a failure ever reaches."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable

DEADLINE_S = 20.0


async def until(condition: Callable[[], bool | Awaitable[bool]], *, within_s: float = DEADLINE_S) -> None:
    async with asyncio.timeout(within_s):
        while True:
            held = condition()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.01)
