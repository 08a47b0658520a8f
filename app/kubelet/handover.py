"""A connection that uvicorn has taken and that then speaks another protocol: how it changes hands.

A request to upgrade goes through routing, authentication and every refusal like any other. A route that
accepts it calls `hand_over`, which writes the 101 itself and gives the transport, with whatever bytes came
behind the request, to the protocol of the route; uvicorn knows the connection no more. The route awaits its
session and sends no answer. Names of uvicorn's that are not public are used here alone; a test over loopback
shows that they still mean the same.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 1 << 20  # of a request, before anybody knows whose it is; a kubelet allows as much
_EXTENSION = "nebula.kubelet"


class Gone(Exception):
    """The client has closed the connection."""


class HandoverProtocol(HttpToolsProtocol):
    """uvicorn's own, but for what a request to upgrade leads to."""

    _rest: bytes = b""
    _in_head = True
    _head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        scope: Any = self.scope
        scope["extensions"] = {_EXTENSION: self}

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self.send_400_response("The head of the request is too large.")
                return
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Nothing more is read until somebody takes over; a refusal closes the connection.
            self._rest = data[upgrade.args[0] :]
            self.cycle.keep_alive = False
            self.flow.pause_reading()
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def take(self, head: bytes, protocol: asyncio.Protocol) -> None:
        if self.transport.is_closing():
            raise Gone
        self.cycle.response_started = self.cycle.response_complete = True
        self.connections.discard(self)
        self._unset_keepalive_if_required()
        transport, rest = self.transport, self._rest
        transport.write(head)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self.flow.resume_reading()
        if rest:
            protocol.data_received(rest)


def hand_over(scope: Scope, protocol: asyncio.Protocol, *, headers: Mapping[str, str]) -> None:
    """Answer 101 with ``headers`` and give the connection to ``protocol``.

    Raises:
        Gone: nobody is there any more.
    """
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\n{lines}\r\n"
    _of(scope).take(head.encode("latin-1"), protocol)


def client_certificate(scope: Scope) -> dict[str, Any] | None:
    """What the client's certificate says, as ``ssl`` gives it; None without one that was verified."""
    tls = _of(scope).transport.get_extra_info("ssl_object")
    found: dict[str, Any] | None = tls.getpeercert() if tls is not None else None
    return found or None


def break_off(scope: Scope) -> None:
    """Cut an answer short so that the client sees that it is not whole."""
    _of(scope).transport.abort()


def _of(scope: Scope) -> HandoverProtocol:
    found: HandoverProtocol = scope["extensions"][_EXTENSION]
    return found


class Taken:
    """The answer of a route whose connection was handed over: none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return None


Handover = Callable[[asyncio.Protocol], None]
