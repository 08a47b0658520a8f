"""A thin client of the API server: paths and plain dicts over one aiohttp session.

Every request has a time-out and the user agent ``nebula/VERSION (ROOM)``. What the server certainly did not
do (429, or 401 after which the credentials were read again) is repeated here; a read whose answer was lost is
repeated once; a write never is: its outcome is unknown, and the caller gets `Unreachable`.

Ordinary requests share a bounded number of places, so that a burst queues up in the client and not in the
server. Watches and ``urgent`` views (Leases) take none, so a burst never delays a heartbeat.
"""

import asyncio
import contextlib
import functools
import importlib.metadata
import os
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Literal, Self
from urllib.parse import urlencode

import aiohttp
import orjson
import structlog
from yarl import URL

from app.kube import auth
from app.kube.errors import Conflict, KubeError, Replaced, Unreachable, from_response
from app.kube.servertime import ServerTime

log = structlog.get_logger()

Obj = dict[str, Any]
"""An object as the API server sent it."""

PatchKind = Literal["strategic", "merge", "json", "apply"]

TIMEOUT_S = 30.0  # the server itself gives up a request after 60 s
CONNECT_S = 10.0
KEEPALIVE_S = 60.0  # the server closes idle connections after 90 s: be first
PARALLEL = 64  # ordinary requests under way; with 32 a drain took a fifth longer and more of our CPU
PAGE = 500  # objects per list request: a page of Pods keeps the event loop for about 0.1 s
REFUSALS = 6  # how often a 429 is repeated
REFUSAL_MAX_S = 10.0
WATCH_BUFFER_BYTES = 256 * 1024

_PATCH_TYPES: dict[PatchKind, str] = {
    "strategic": "application/strategic-merge-patch+json",
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}
_JSON = "application/json"
_METADATA_ONLY = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_LOST = (aiohttp.ClientError, TimeoutError, OSError)
_pause = asyncio.sleep


class Kube:
    """The API server, as seen from one room of the program. Views share one session; close the first one."""

    def __init__(self, connection: auth.Connection, *, room: str = "main", parallel: int = PARALLEL) -> None:
        """Must be made inside the running event loop. Prefer `connect`."""
        self._transport = _Transport(connection, parallel=parallel)
        self._set(room, urgent=False, timeout_s=TIMEOUT_S)

    @classmethod
    async def connect(cls, *, kubeconfig: str | None = None, context: str | None = None) -> Self:
        """Find the API server as `auth.connect` does.

        Raises:
            auth.NoCluster: there is no usable configuration.
        """
        return cls(await auth.connect(kubeconfig=kubeconfig, context=context))

    def room(self, name: str, *, urgent: bool = False, timeout_s: float = TIMEOUT_S) -> "Kube":
        """A view that calls itself ``name``. ``urgent`` ones never queue behind ordinary requests."""
        view = object.__new__(Kube)
        view._transport = self._transport
        view._set(name, urgent=urgent, timeout_s=timeout_s)
        return view

    def _set(self, room: str, *, urgent: bool, timeout_s: float) -> None:
        self._agent = f"nebula/{_version()} ({room})"
        self._urgent = urgent
        self._timeout_s = timeout_s

    @property
    def server(self) -> str:
        """The API server's address, for people."""
        return self._transport.server

    def now(self) -> datetime:
        """The API server's time, aware, UTC: for what is measured against moments that it wrote down."""
        return self._transport.time.now()

    async def close(self) -> None:
        """Close the shared session: every view is unusable afterwards."""
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str, **query: Any) -> Obj:
        """One object as it is now.

        Raises:
            Replaced: there is no such object (status 404).
            KubeError: any other refusal; `Unreachable` when no answer came, twice.
        """
        return _parsed(await self._send("GET", path, query=query))

    async def find(self, path: str, **query: Any) -> Obj | None:
        """One object, or None when the server says that there is none of that name."""
        try:
            return await self.get(path, **query)
        except Replaced:
            return None

    async def list_pages(self, path: str, *, limit: int = PAGE, **query: Any) -> AsyncIterator[Obj]:
        """The pages of a list, each with ``metadata`` and ``items``, all of one resource version.

        Raises:
            Expired: the list took so long that the server forgot it; start again.
        """
        token = ""
        while True:
            page = await self.get(path, limit=limit, **query, **({"continue": token} if token else {}))
            yield page
            token = page["metadata"].get("continue", "")
            if not token:
                return

    async def create(
        self, path: str, obj: Obj, *, params: Mapping[str, Any] | None = None, metadata_only: bool = False
    ) -> Obj:
        """Create ``obj`` in the collection ``path`` and return it as stored.

        Raises:
            Exists: the name is taken.
            Unreachable: no answer; it may have been created.
        """
        return _parsed(await self._send("POST", path, query=params, body=obj, metadata_only=metadata_only))

    async def replace(self, path: str, obj: Obj, *, params: Mapping[str, Any] | None = None) -> Obj:
        """Write the whole object; its resourceVersion, if it has one, must be the stored one's.

        Raises:
            Conflict: it has changed. Replaced: it is gone or another one.
        """
        try:
            return _parsed(await self._send("PUT", path, query=params, body=obj))
        except Conflict as error:
            raise await self._explained(path, error, uid=obj["metadata"].get("uid")) from error

    async def patch(
        self,
        path: str,
        body: Any,
        *,
        kind: PatchKind,
        params: Mapping[str, Any] | None = None,
        metadata_only: bool = False,
    ) -> Obj:
        """Change parts of one object and return it, or only its metadata, as stored.

        ``apply`` is forced and owned by field manager ``nebula`` unless ``params`` say otherwise.

        Raises:
            Replaced: the UID in the patch, or tested by it, is not the living object's, or there is none.
            Conflict: it has changed (a resourceVersion in the patch, or a failed JSON patch ``test``).
        """
        if kind == "apply":
            params = {"fieldManager": "nebula", "force": "true", **(params or {})}
        try:
            raw = await self._send(
                "PATCH",
                path,
                query=params,
                body=body,
                content_type=_PATCH_TYPES[kind],
                metadata_only=metadata_only,
            )
        except KubeError as error:
            if kind == "json" and error.status == 422 and not error.details:
                # The answer does not say which test failed, nor whether it was a test.
                tests = {op["path"]: op.get("value") for op in body if op["op"] == "test"}
                uid = tests.pop("/metadata/uid", None)
                raise await self._explained(path, error, uid=uid, tests=tests) from error
            if kind != "json" and isinstance(error, Conflict):
                uid = (body.get("metadata") or {}).get("uid")
                raise await self._explained(path, error, uid=uid) from error
            raise
        return _parsed(raw)

    async def delete(
        self,
        path: str,
        *,
        uid: str | None = None,
        grace_s: int | None = None,
        resource_version: str | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] | None = None,
    ) -> Obj:
        """Ask for one object's deletion, on condition that it is the one of ``uid`` and ``resource_version``.

        Returns the object if it lives on for a while, else a Status.

        Raises:
            Replaced: it is gone already, or another one has its name.
            Conflict: it has changed since ``resource_version``.
        """
        options: Obj = {}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if propagation is not None:
            options["propagationPolicy"] = propagation
        conditions = {"uid": uid, "resourceVersion": resource_version}
        if known := {key: value for key, value in conditions.items() if value is not None}:
            options["preconditions"] = known
        return _parsed(await self._send("DELETE", path, body=options or None))

    def watch_lines(
        self, path: str, *, silence_s: float, query: Mapping[str, Any]
    ) -> AsyncGenerator[list[bytes], None]:
        """The events of a watch as raw JSON lines, as many at once as have arrived, until the server ends it.

        Wrap it in `contextlib.aclosing`: the connection is held until it is closed.

        Raises:
            Unreachable: the connection broke, or nothing came for ``silence_s``.
            KubeError: the watch was refused.
        """
        text = _query({"watch": "true", **query})
        return self._transport.lines(path, text, agent=self._agent, silence_s=silence_s)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = _JSON,
        metadata_only: bool = False,
    ) -> bytes:
        return await self._transport.send(
            method,
            path + _query(query),
            data=None if body is None else orjson.dumps(body),
            headers={
                "User-Agent": self._agent,
                "Accept": _METADATA_ONLY if metadata_only else _JSON,
                "Accept-Encoding": "identity",  # compressing costs both sides more than a cluster's network
                "Content-Type": content_type,
            },
            timeout_s=self._timeout_s,
            urgent=self._urgent,
        )

    async def _explained(
        self, path: str, refused: KubeError, *, uid: str | None, tests: Mapping[str, Any] | None = None
    ) -> KubeError:
        """Why a guarded write was refused: a wrong UID is hidden behind an old version, or a bare 422."""
        if uid is None and not tests:
            return refused
        try:
            living = await self.find(path.removesuffix("/status").removesuffix("/scale"))
        except KubeError:
            return refused  # nothing was written, which is all that is known
        about: dict[str, Any] = {"reason": refused.reason, "details": refused.details}
        if living is None:
            return Replaced(refused.status, message="the object is gone", **about)
        if uid is not None and living["metadata"]["uid"] != uid:
            text = f"the object now has UID {living['metadata']['uid']}, not {uid}"
            return Replaced(refused.status, message=text, **about)
        if tests:
            return Conflict(refused.status, message=f"a test failed: {', '.join(sorted(tests))}", **about)
        return refused


class _Transport:
    """The session and the rules of repetition; one for all views."""

    def __init__(self, connection: auth.Connection, *, parallel: int) -> None:
        self._connection = connection
        self.time = ServerTime()
        self._places = asyncio.Semaphore(parallel)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # reads ~/.netrc and the environment at each request
        )

    @property
    def server(self) -> str:
        return self._connection.base_url

    async def close(self) -> None:
        await self._session.close()

    async def send(
        self,
        method: str,
        path: str,
        *,
        data: bytes | None,
        headers: dict[str, str],
        timeout_s: float,
        urgent: bool,
    ) -> bytes:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        refusals, lost, renewed = 0, 0, False
        while True:
            credentials = await self._connection.headers()
            delay_s = random.uniform(0.1, 0.3)
            try:
                async with contextlib.nullcontext() if urgent else self._places:
                    response = await self._request(method, path, data, headers | credentials, timeout)
                    async with response:
                        body = await response.read()
                        self.time.hear(response.headers.get("Date"))
            except _LOST as error:
                if method != "GET" or lost:
                    raise Unreachable(f"{method} {path}: {_text(error)}") from error
                lost += 1
            else:
                if response.status < 300:
                    return body
                refusal = from_response(method, response.status, body)
                match response.status:
                    case 401 if not renewed:
                        await self._connection.renew(credentials)
                        renewed, delay_s = True, 0.0
                    case 429 if refusals < REFUSALS:
                        refusals += 1  # not begun: too many requests, or the storage of a CRD is not ready
                        delay_s = _patience_s(response.headers.get("Retry-After"))
                    case 500 | 502 | 503 | 504 if method == "GET" and not lost:
                        lost += 1
                    case _:
                        raise refusal
            await _pause(delay_s)

    async def lines(
        self, path: str, query: str, *, agent: str, silence_s: float
    ) -> AsyncGenerator[list[bytes], None]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=silence_s)
        headers = {"User-Agent": agent, "Accept": _JSON, "Accept-Encoding": "identity"}
        try:
            async with self._opened(path + query, headers, timeout) as response:
                rest: list[bytes] = []
                async for chunk in response.content.iter_any():
                    # Not readline: it refuses lines above its limit, and objects may be large.
                    first, *others = chunk.split(b"\n")
                    rest.append(first)
                    if others:
                        lines = [b"".join(rest), *others[:-1]]
                        rest = [others[-1]]
                        yield lines
        except _LOST as error:
            raise Unreachable(f"GET {path}: {_text(error)}") from error

    @asynccontextmanager
    async def _opened(
        self, path: str, headers: dict[str, str], timeout: aiohttp.ClientTimeout
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        for last in (False, True):
            credentials = await self._connection.headers()
            response = await self._request("GET", path, None, headers | credentials, timeout)
            async with response:
                if response.status < 300:
                    yield response
                    return
                refusal = from_response("GET", response.status, await response.read())
            if response.status != 401 or last:
                raise refusal
            await self._connection.renew(credentials)

    async def _request(
        self,
        method: str,
        path: str,
        data: bytes | None,
        headers: dict[str, str],
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        connection = self._connection
        return await self._session.request(
            method,
            URL(connection.base_url + path, encoded=True),
            data=data,
            headers=headers,
            timeout=timeout,
            ssl=connection.ssl or True,
            server_hostname=connection.server_hostname,
            proxy=connection.proxy,
            allow_redirects=False,
            read_bufsize=WATCH_BUFFER_BYTES,
        )


@functools.cache
def _version() -> str:
    return importlib.metadata.version("nebula")


def _query(query: Mapping[str, Any] | None) -> str:
    """``?a=b``, without what is empty or None."""
    known = {key: value for key, value in (query or {}).items() if value not in (None, "")}
    return "?" + urlencode(known) if known else ""


def _parsed(body: bytes) -> Obj:
    try:
        parsed: Obj = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unreachable(f"an answer that is not JSON: {body[:64]!r}") from error
    return parsed


def _patience_s(header: str | None) -> float:
    try:
        asked_s = float(header) if header else 1.0
    except ValueError:
        asked_s = 1.0  # an HTTP date, which the API server never sends
    return min(asked_s, REFUSAL_MAX_S) * random.uniform(1.0, 1.5)


def _text(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):  # its own words tell of our TLS objects
        cause = error.os_error
        if isinstance(cause, ssl.SSLError):  # whose number is none of the operating system's
            return f"cannot connect to {error.host}:{error.port}: {cause}"
        known = isinstance(cause.errno, int) and cause.errno > 0
        why = os.strerror(cause.errno) if known and cause.errno else cause.strerror or str(cause)
        return f"cannot connect to {error.host}:{error.port}: {why}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
