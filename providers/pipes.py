"""A plain TCP connection as a `Pipe`, for whoever leads to a port over one."""

import asyncio
import contextlib

from providers.base import Unavailable
from providers.capabilities import Pipe

PIECE_BYTES = 64 * 1024


class TcpPipe:
    """Takes the connection over, and closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read(self) -> bytes:
        try:
            return await self._reader.read(PIECE_BYTES)
        except OSError as error:
            raise Unavailable("the connection broke") from error

    async def write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise Unavailable("the connection broke") from error

    async def end_output(self) -> None:
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    async def aclose(self) -> None:
        self._writer.close()


_pipe: type[Pipe] = TcpPipe
