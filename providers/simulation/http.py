"""How a simulator speaks HTTP: one way through faults, effect and journal for every call, and the server.

A call is read whole, meets its faults, has its effect, and is answered only once the journal is on disk. The
handlers are plain functions over the engine; the words of errors are the simulator's own (`Shape`).
"""

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import orjson
import uvicorn
from starlette.requests import Request
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from providers.simulation.clock import as_http_date
from providers.simulation.engine import Engine
from providers.simulation.faults import Call, Fault
from providers.simulation.orders import Refusal, Refused
from providers.simulation.sockets import LOOPBACK, listening

_TRANSPORT = "simulation.transport"
_HELD_CHECK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request as a handler sees it. ``faults`` are those that the handler itself must act out."""

    call: Call
    method: str
    path: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    json: Any
    faults: tuple[Fault, ...]
    now: int

    def fault(self, kind: str) -> Fault | None:
        return next((fault for fault in self.faults if fault.kind == kind), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``body`` is sent as JSON unless it is bytes. ``stream`` is sent in its place while the client stays."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"
    stream: AsyncIterator[bytes] | None = None


class Shape(Protocol):
    """How one cloud says things: which machine a request is about, and its errors."""

    def about(self, asked: Request, json: Any) -> tuple[str, str]:
        """Region and machine name of a request, "" where it tells none."""
        ...

    def refused(self, error: Refused) -> Answer: ...

    def error_body(self, message: str) -> Answer:
        """A success by its status, an error by its body."""
        ...

    def throttled(self, retry_after_s: float | None) -> Answer: ...


Handler = Callable[[Asked], Answer]


class Front:
    """Makes routes whose calls pass the faults of one engine."""

    def __init__(self, engine: Engine, shape: Shape) -> None:
        self._engine = engine
        self._shape = shape

    def route(
        self, method: str, path: str, verb: str, handler: Handler, *, needs_credential: bool = True
    ) -> BaseRoute:
        """``verb`` is a word of `Fault.verb`."""
        return Route(
            path, _Endpoint(self._engine, self._shape, verb, handler, needs_credential), methods=[method]
        )


class _Endpoint:
    def __init__(
        self, engine: Engine, shape: Shape, verb: str, handler: Handler, needs_credential: bool
    ) -> None:
        self._engine = engine
        self._shape = shape
        self._verb = verb
        self._handler = handler
        self._needs_credential = needs_credential

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        engine, request = self._engine, Request(scope, receive)
        body = await request.body()
        json = _parsed(body)
        region, name = self._shape.about(request, json)
        call = Call(verb=self._verb, path=request.url.path, region=region, name=name)
        now = engine.advance()
        engine.calls[self._verb] += 1
        if self._verb == "create":
            token = json.get("token") if isinstance(json, dict) else None
            engine.note_create(name=name, token=str(token or ""), now=now)
        faults = engine.faults.take(call, now=now)
        for fault in faults:
            if not fault.after:
                await self._wait(fault)
        early = next((fault for fault in faults if not fault.after and fault.kind in _STOPPING), None)
        if early is not None:
            answer = self._broken(early)
        else:
            asked = Asked(
                call=call,
                method=request.method,
                path=scope.get("path_params", {}),
                query=request.query_params,
                headers=request.headers,
                body=body,
                json=json,
                faults=tuple(faults),
                now=engine.advance(),
            )
            answer = self._handle(asked)
        await engine.journal.commit()
        for fault in faults:
            if fault.after:
                await self._wait(fault)
                if fault.kind in _STOPPING:
                    early = early or fault
                    answer = self._broken(fault)
        if early is not None and early.kind == "lost":
            await _hang_up(scope, receive)
        else:
            cut = early is not None and early.kind == "cut"
            await _send(answer, scope, receive, send, date=as_http_date(engine.clock.now()), cut=cut)

    def _handle(self, asked: Asked) -> Answer:
        credential = self._engine.scenario.credential
        try:
            if (
                credential
                and self._needs_credential
                and asked.headers.get("authorization") != f"Bearer {credential}"
            ):
                raise Refused(Refusal.AUTH, "the credential is not accepted")
            return self._handler(asked)
        except Refused as error:
            return self._shape.refused(error)

    async def _wait(self, fault: Fault) -> None:
        if fault.kind == "hold":
            while self._engine.faults.active(fault, now=self._engine.clock.now()):  # noqa: ASYNC110 (a fault may end by the clock, too)
                await asyncio.sleep(_HELD_CHECK_S)
        elif fault.delay_s:
            await asyncio.sleep(fault.delay_s)

    def _broken(self, fault: Fault) -> Answer:
        match fault.kind:
            case "status":
                return Answer(status=fault.status, body=fault.message.encode(), media_type="text/plain")
            case "garbage" | "cut" | "lost":
                return Answer(body=b'{"items": [' + b" " * 64, media_type="application/json")
            case "error_body":
                return self._shape.error_body(fault.message)
            case "throttle":
                return self._shape.throttled(fault.retry_after_s)
            case "expired":
                return self._shape.refused(Refused(Refusal.AUTH, "the credential has expired"))
            case _:
                return self._shape.refused(Refused(Refusal(fault.code), fault.message, host=fault.host))


_STOPPING = frozenset({"lost", "cut", "status", "garbage", "error_body", "throttle", "refuse", "expired"})


def _parsed(body: bytes) -> Any:
    if not body:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


async def _hang_up(scope: Scope, receive: Receive) -> None:
    scope[_TRANSPORT].close()
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send(answer: Answer, scope: Scope, receive: Receive, send: Send, *, date: str, cut: bool) -> None:
    if answer.stream is not None and not cut:
        await _send_stream(answer, answer.stream, receive, send, date=date)
        return
    body = (
        answer.body
        if isinstance(answer.body, bytes)
        else b""
        if answer.body is None
        else orjson.dumps(answer.body)
    )
    length = len(body) + (1000 if cut else 0)
    headers = [(b"date", date.encode()), (b"content-length", str(length).encode())]
    if body:
        headers.append((b"content-type", answer.media_type.encode()))
    headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": cut})
    if cut:
        await _hang_up(scope, receive)


async def _send_stream(
    answer: Answer, stream: AsyncIterator[bytes], receive: Receive, send: Send, *, date: str
) -> None:
    headers = [(b"date", date.encode()), (b"content-type", answer.media_type.encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def pour() -> None:
        async for chunk in stream:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    pouring, left = asyncio.ensure_future(pour()), asyncio.ensure_future(_left(receive))
    await asyncio.wait({pouring, left}, return_when=asyncio.FIRST_COMPLETED)
    for task in (pouring, left):
        task.cancel()
    await asyncio.gather(pouring, left, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def json_endpoint(engine: Engine, handler: Callable[[Request, Any], Answer]) -> ASGIApp:
    """A route of the control API: no faults, but the journal before the answer."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        json = _parsed(await request.body())
        engine.advance()
        try:
            answer = handler(request, json)
        except (ValueError, KeyError, TypeError, Refused) as error:
            answer = Answer(status=400, body={"error": str(error)})
        await engine.journal.commit()
        await _send(answer, scope, receive, send, date=as_http_date(engine.clock.now()), cut=False)

    class _Plain:  # an instance, so that Starlette takes it for the ASGI application that it is
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            await endpoint(scope, receive, send)

    return _Plain()


class _Protocol(HttpToolsProtocol):
    """Lets the application close a connection without an answer."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Scope, self.scope)[_TRANSPORT] = self.transport


class _Server(uvicorn.Server):
    """Says where it listens, once it does; ends on SIGTERM and Ctrl-C without waiting for idle clients."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        for sock in sockets or ():
            host, port = sock.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            sys.stdout.write(f"listening on http://{host}:{port}\n")
            sys.stdout.flush()


async def serve(app: ASGIApp, *, port: int, host: str = LOOPBACK) -> None:
    """Serve until SIGTERM or Ctrl-C; port 0 takes a free one. Prints ``listening on http://HOST:PORT``.

    Raises:
        OSError: the port is taken.
    """
    sock = listening(host, port)
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=1,
        backlog=1024,
    )
    server = _Server(config)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, _ask_to_end, server)
    await server._serve(
        [sock]
    )  # serve() would install signal handlers of its own, and raise the signal again


def _ask_to_end(server: uvicorn.Server) -> None:
    server.should_exit = True
