"""The paths of the endpoint: the caller is checked first; what cannot be done is told in a kubelet's words.

What was done, by whom and to which Pod is logged; commands, output and input never are.
"""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import orjson
import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.inventory.budget import Urgency
from app.kube.errors import KubeError
from app.kubelet import channels, forward, options, session, usage, ways, websocket
from app.kubelet.callers import STREAM_VERB, Caller, Callers, Unanswered
from app.kubelet.channels import SpdyChannels, Wanted, WebSocketChannels
from app.kubelet.find import Finder, Target
from app.kubelet.handover import Gone, Taken, client_certificate, hand_over
from app.kubelet.open import Sessions
from app.kubelet.output import NoLog, Outputs
from app.kubelet.peers import Lost, SpdyPeer
from app.kubelet.usage import Meterer
from app.kubelet.ways import Way
from providers.base import NotOffered, ProviderError
from providers.capabilities import Attaches, Executes, ReachableBySsh, Session, SshAddress

log = structlog.get_logger()
START_S = 30.0  # a cloud that has not started a command by then has not started it
_TRUE = ("1", "true")
Start = Callable[[], Awaitable[Session | None]]


class _Refused(Exception):
    """The answer is this, and nothing was done."""

    def __init__(self, status: int, message: str, *, reason: str = "", headers: dict[str, str] | None = None):
        super().__init__(message)
        self.status, self.reason, self.headers = status, reason, headers


class Routes:
    """Everything behind the paths. Each method is one request."""

    def __init__(
        self,
        *,
        callers: Callers,
        finder: Finder,
        outputs: Outputs,
        meterer: Meterer,
        sessions: Sessions,
    ) -> None:
        self._callers, self._finder, self._outputs = callers, finder, outputs
        self._meterer, self._sessions = meterer, sessions

    def application(self) -> Starlette:
        both = ["GET", "POST"]
        pod, container = "/{namespace}/{pod}", "/{container}"
        return Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/containerLogs" + pod + container, _text(self._logs)),
                Route("/exec" + pod + container, _status(self._exec), methods=both),
                Route("/exec" + pod + "/{uid}" + container, _status(self._exec), methods=both),
                Route("/attach" + pod + container, _status(self._attach), methods=both),
                Route("/attach" + pod + "/{uid}" + container, _status(self._attach), methods=both),
                Route("/portForward" + pod, _status(self._port_forward), methods=both),
                Route("/portForward" + pod + "/{uid}", _status(self._port_forward), methods=both),
                Route("/metrics/resource", _text(self._metrics)),
                Route("/stats/summary", _text(self._summary)),
                Route("/nodes/{node}/metrics/resource", _text(self._metrics)),
                Route("/nodes/{node}/stats/summary", _text(self._summary)),
            ]
        )

    async def _healthz(self, _request: Request) -> Response:
        return PlainTextResponse("ok")

    # --- who and what ---

    async def _admit(self, request: Request, *, verb: str, subresource: str, node: str = "") -> Caller:
        try:
            caller = await self._callers.known(
                client_certificate(request.scope), request.headers.get("authorization", "")
            )
            if caller is None:
                raise _Refused(401, "Unauthorized", reason="Unauthorized")
            if await self._callers.may(caller, verb=verb, subresource=subresource, node=node):
                return caller
        except Unanswered as error:
            log.warning("caller not checked", error=str(error))
            raise _Refused(500, "the caller could not be checked", reason="InternalError") from error
        raise _Refused(
            403,
            f"Forbidden (user={caller.name}, verb={verb}, resource=nodes, subresource(s)=[{subresource}])",
            reason="Forbidden",
        )

    async def _target(self, request: Request, *, missing: str) -> Target:
        params = request.path_params
        target = await self._finder.pod(params["namespace"], params["pod"])
        if target is None or params.get("uid", target.uid) != target.uid:
            raise _Refused(404, missing, reason="NotFound")
        return target

    # --- output ---

    async def _logs(self, request: Request) -> ASGIApp:
        caller = await self._admit(request, verb="get", subresource="proxy")
        query = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            wanted = options.parse(query, now=datetime.now(UTC))
        except options.Undecodable:
            raise _Refused(400, '{"message": "Unable to decode query."}') from None
        except options.Invalid:
            raise _Refused(422, '{"message": "Invalid request."}') from None
        pod, container = request.path_params["pod"], request.path_params["container"]
        target = await self._target(request, missing=f'pod "{pod}" does not exist')
        try:
            answer = await self._outputs.open(target, container, wanted)
        except NoLog as error:
            raise _Refused(error.status, str(error)) from None
        except ProviderError as error:
            which = target.ref.resource_id if target.ref is not None else target.name
            raise _Refused(500, f"the output of {which} could not be read: {error}") from None
        _did("logs", caller, target, container=container, follow=wanted.follow)

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            with self._sessions.kept(target, ended=answer.ended):
                await answer(scope, receive, send)

        return serve

    # --- commands ---

    async def _exec(self, request: Request) -> ASGIApp:
        caller = await self._admit(request, verb=STREAM_VERB, subresource="proxy")
        command = request.query_params.getlist("command")
        if not command or not command[0]:
            raise _Refused(400, "you must specify a command", reason="BadRequest")
        target, wanted, container = await self._session(request)
        provider, ref = target.provider, target.ref
        if isinstance(provider, ReachableBySsh):
            address = await self._sshd(target)

            async def start() -> Session | None:
                return await ways.command(
                    target, address, command, stdin=wanted.stdin, terminal=wanted.terminal
                )
        elif isinstance(provider, Executes):

            async def start() -> Session | None:
                assert ref is not None
                return await provider.exec(ref, command, stdin=wanted.stdin, terminal=wanted.terminal)
        else:
            raise self._unable(target, "runs no further commands in its machines: kubectl exec does not work")

        _did("exec", caller, target, container=container, stdin=wanted.stdin, tty=wanted.terminal)
        return await self._serve(request, target, wanted, start, attached=False)

    async def _sshd(self, target: Target) -> SshAddress | None:
        try:
            async with asyncio.timeout(START_S):
                return await ways.address_of(target)
        except NotOffered as error:
            name = target.ref.provider if target.ref is not None else "?"
            raise _Refused(404, f'provider "{name}": {error}', reason="NotFound") from None
        except (ProviderError, TimeoutError) as error:
            text = str(error) or f"no answer within {START_S:g} s"
            raise _Refused(
                500, f"error executing command in container: {text}", reason="InternalError"
            ) from None

    async def _attach(self, request: Request) -> ASGIApp:
        caller = await self._admit(request, verb=STREAM_VERB, subresource="proxy")
        target, wanted, container = await self._session(request)
        provider, ref = target.provider, target.ref
        if not isinstance(provider, Attaches):
            raise self._unable(target, "lets nobody attach to its machines: kubectl attach does not work")

        async def start() -> Session | None:
            assert ref is not None
            return await provider.attach(ref, stdin=wanted.stdin, terminal=wanted.terminal)

        _did("attach", caller, target, container=container, stdin=wanted.stdin, tty=wanted.terminal)
        return await self._serve(request, target, wanted, start, attached=True)

    async def _session(self, request: Request) -> tuple[Target, Wanted, str]:
        """What exec and attach have in common, checked."""
        query = request.query_params

        def on(name: str) -> bool:
            return query.get(name, "") in _TRUE

        terminal = on("tty")
        wanted = Wanted(
            stdin=on("input"), stdout=on("output"), stderr=on("error") and not terminal, terminal=terminal
        )
        if not (wanted.stdin or wanted.stdout or wanted.stderr):
            message = "you must specify at least 1 of stdin, stdout, stderr"
            raise _Refused(400, message, reason="BadRequest")
        target, container = (
            await self._target(request, missing="pod does not exist"),
            request.path_params["container"],
        )
        if not target.has(container):
            raise _Refused(500, f'container not found ("{container}")', reason="InternalError")
        if "running" not in target.state(container) or target.ref is None or target.account is None:
            state = target.state(container)
            why = "its machine does not run yet" if not target.over else "the pod is over"
            if "running" in state and target.ref is not None:
                why = "the account of its machine is not open on this replica"
            raise _Refused(500, f'container not found ("{container}"): {why}', reason="InternalError")
        return target, wanted, container

    def _unable(self, target: Target, what: str) -> _Refused:
        name = target.ref.provider if target.ref is not None else "?"
        return _Refused(404, f'provider "{name}" {what} there', reason="NotFound")

    async def _serve(
        self, request: Request, target: Target, wanted: Wanted, start: Start, *, attached: bool
    ) -> ASGIApp:
        """Upgrade the connection, start, carry. Whatever happens then is told on the error channel."""
        peer: SpdyPeer | WebSocketChannels
        if _upgrade(request) == "websocket":
            version, headers = _websocket(request, channels.WEBSOCKET_VERSIONS, default="channel.k8s.io")
            peer = WebSocketChannels(wanted, version=version)
        else:
            version, headers = _spdy(request, channels.SPDY_VERSIONS)
            peer = SpdyPeer()
        try:
            hand_over(request.scope, peer, headers=headers)
        except Gone:
            return Taken()
        with self._sessions.kept(target, peer=peer) as kept:
            try:
                if isinstance(peer, WebSocketChannels):
                    peer.begin()
                    both: SpdyChannels | WebSocketChannels = peer
                else:
                    both = await SpdyChannels.open(peer, wanted, version=version)
                await self._carry(both, target, wanted, start, attached=attached, ended=kept.ended)
            except Lost:
                pass
            except Exception:  # the connection is no HTTP any more: nobody above can answer
                log.exception("session failed", pod=target.name)
            finally:
                peer.close()
        return Taken()

    async def _carry(
        self,
        both: SpdyChannels | WebSocketChannels,
        target: Target,
        wanted: Wanted,
        start: Start,
        *,
        attached: bool,
        ended: "asyncio.Future[str]",
    ) -> None:
        assert target.account is not None
        starting = asyncio.create_task(_started(target, start))
        watched: set[asyncio.Future[Any]] = {starting, both.peer.lost}
        try:
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return  # the client has left; the command, if it starts, is let go below
            try:
                begun = starting.result()
            except (ProviderError, TimeoutError) as error:
                text = str(error) or f"no answer within {START_S:g} s"
                await both.finish(session.failed(f"error executing command in container: {text}"))
                return
        finally:
            if not starting.done():
                starting.add_done_callback(_let_go)
        if begun is None:
            await both.finish(session.failed("error executing command in container: the machine is gone"))
            return
        await session.serve(begun, both, wanted, attached=attached, ended=ended)

    # --- ports ---

    async def _port_forward(self, request: Request) -> ASGIApp:
        caller = await self._admit(request, verb=STREAM_VERB, subresource="proxy")
        target = await self._target(request, missing="pod does not exist")
        if target.ref is None or target.account is None or target.over:
            name = target.pod["metadata"]["name"]
            raise _Refused(500, f'pod not found ("{name}"): its machine does not run', reason="InternalError")

        connect = Way(target).dial
        peer: SpdyPeer | forward.TunnelPeer | forward.ChannelsPeer
        if _upgrade(request) == "websocket":
            known = (forward.TUNNEL, *forward.WEBSOCKET_VERSIONS)
            version, headers = _websocket(request, known, default=forward.WEBSOCKET_VERSIONS[0])
            if version == forward.TUNNEL:
                peer = forward.TunnelPeer()
            else:
                ports = forward.ports(request.query_params.getlist("port"))
                if ports is None or len(ports) > 100:
                    message = 'query parameter "port" must be one or more ports from 1 to 65535'
                    raise _Refused(400, message, reason="BadRequest")
                peer = forward.ChannelsPeer(ports, version=version)
        else:
            _, headers = _spdy(request, (forward.VERSION,))
            peer = SpdyPeer()
        _did("port-forward", caller, target)
        try:
            hand_over(request.scope, peer, headers=headers)
        except Gone:
            return Taken()
        with self._sessions.kept(target, peer=peer) as kept:
            try:
                if isinstance(peer, forward.ChannelsPeer):
                    await forward.serve_channels(peer, connect, pod=target.name, ended=kept.ended)
                else:
                    inner = peer.inner if isinstance(peer, forward.TunnelPeer) else peer
                    await forward.serve(inner, connect, pod=target.name, ended=kept.ended)
            except Exception:
                log.exception("port-forward failed", pod=target.name)
            finally:
                peer.close()
        return Taken()

    # --- usage ---

    async def _metrics(self, request: Request) -> ASGIApp:
        node = await self._node(request, subresource="metrics")
        text = usage.exposition(await self._meterer.node(node))
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _summary(self, request: Request) -> ASGIApp:
        node = await self._node(request, subresource="stats")
        body = usage.summary(node, await self._meterer.node(node))
        return Response(orjson.dumps(body), media_type="application/json")

    async def _node(self, request: Request, *, subresource: str) -> str:
        """The node that a path is about: all nodes share one address, so the path must tell them apart."""
        named = request.path_params.get("node")
        await self._admit(request, verb="get", subresource=subresource, node=named or "")
        names = self._meterer.names()
        if named is None and len(names) == 1:
            return names[0]
        if named not in names:
            some = ", ".join(
                f"/nodes/{name}{request.url.path.removeprefix(f'/nodes/{named}')}" for name in names
            )
            raise _Refused(
                404, f"several nodes are served here: ask {some}" if some else "no node is served yet"
            )
        return str(named)


async def _started(target: Target, start: Start) -> Session | None:
    assert target.account is not None
    async with asyncio.timeout(START_S):
        await target.account.budget.take(Urgency.RENT)
        return await start()


def _let_go(starting: "asyncio.Task[Session | None]") -> None:
    """Nobody waits for it any more."""
    if starting.cancelled() or starting.exception() is not None:
        return
    if (late := starting.result()) is not None:
        task = asyncio.ensure_future(late.aclose())
        _LATE.add(task)
        task.add_done_callback(_LATE.discard)


_LATE: set["asyncio.Future[None]"] = set()


def _did(what: str, caller: Caller, target: Target, **facts: Any) -> None:
    log.info(f"kubelet {what}", user=caller.name, pod=target.name, pod_uid=target.uid, **facts)


def _upgrade(request: Request) -> str:
    return request.headers.get("upgrade", "").lower()


def _spdy(request: Request, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """The version that is spoken, and the headers of the 101."""
    if _upgrade(request) != "spdy/3.1" or "upgrade" not in request.headers.get("connection", "").lower():
        raise _Refused(400, "unable to upgrade: missing upgrade headers in request", reason="BadRequest")
    name = "X-Stream-Protocol-Version"
    offered = [word.strip() for line in request.headers.getlist(name) for word in line.split(",")]
    if not any(offered):
        raise _Refused(400, f"{name} is required", reason="BadRequest")
    version = channels.chosen(offered, known)
    if version is None:
        message = f"unable to negotiate protocol: client supports {offered}, server accepts {list(known)}"
        accepted = {"X-Accepted-Stream-Protocol-Versions": ", ".join(known)}
        raise _Refused(403, message, reason="Forbidden", headers=accepted)
    return version, {"Upgrade": "SPDY/3.1", name: version}


def _websocket(request: Request, known: tuple[str, ...], *, default: str) -> tuple[str, dict[str, str]]:
    key = request.headers.get("sec-websocket-key", "")
    if not key or request.headers.get("sec-websocket-version") != "13":
        raise _Refused(400, "unable to upgrade: not a WebSocket of version 13", reason="BadRequest")
    lines = request.headers.getlist("sec-websocket-protocol")
    offered = [word.strip() for line in lines for word in line.split(",") if word.strip()]
    headers = {"Upgrade": "websocket", "Sec-WebSocket-Accept": websocket.accept_key(key)}
    if not offered:
        return default, headers
    version = channels.chosen(offered, known)
    if version is None:
        message = f"unable to negotiate protocol: client supports {offered}, server accepts {list(known)}"
        raise _Refused(403, message, reason="Forbidden")
    return version, headers | {"Sec-WebSocket-Protocol": version}


Endpoint = Callable[[Request], Awaitable[ASGIApp]]


def _text(endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    """Refusals as a kubelet words them: plain text, which the API server passes on."""

    async def asked(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except _Refused as error:
            return PlainTextResponse(str(error), status_code=error.status)
        except KubeError as error:
            return PlainTextResponse(f"the API server could not be asked: {error}", status_code=500)

    return asked


def _status(endpoint: Endpoint) -> Callable[[Request], Awaitable[Any]]:
    """Refusals as a Status object, which the API server reads where a connection is not upgraded."""

    async def asked(request: Request) -> ASGIApp:
        try:
            return await endpoint(request)
        except _Refused as error:
            return _as_status(error.status, str(error), error.reason, error.headers)
        except KubeError as error:
            return _as_status(500, f"the API server could not be asked: {error}", "InternalError", None)

    return asked


def _as_status(status: int, message: str, reason: str, headers: dict[str, str] | None) -> Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": status,
    }
    return Response(orjson.dumps(body), status_code=status, media_type="application/json", headers=headers)
