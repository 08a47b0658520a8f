"""Running a cache for the length of a block, and a diary of what it told its handlers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.kube.cache import Cache
from app.kube.client import Obj


@asynccontextmanager
async def running(cache: Cache) -> AsyncIterator[Cache]:
    """The cache, followed and synced."""
    task = asyncio.create_task(cache.run())
    try:
        await asyncio.wait_for(cache.synced(), timeout=20)
        yield cache
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            await task


class Diary:
    """What handlers were told, as ``+name``, ``~name`` and ``-name``."""

    def __init__(self, cache: Cache) -> None:
        self.lines: list[str] = []
        self.uids: list[str] = []
        cache.on_change(self._write)

    def _write(self, old: Obj | None, new: Obj | None) -> None:
        sign = "~" if old and new else "+" if new else "-"
        obj = new or old
        assert obj
        self.lines.append(sign + obj["metadata"]["name"])
        self.uids.append(sign + obj["metadata"]["uid"])
