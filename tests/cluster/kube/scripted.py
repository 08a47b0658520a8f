"""A small server that speaks the list and watch protocol as a test tells it to: for what a healthy API server
will not do on demand. It keeps ConfigMap-like objects, numbers their versions, and remembers its requests.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

from tests.cluster.kube.waiting import until

PATH = "/api/v1/configmaps"


@dataclass
class Request:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass
class ScriptedServer:
    version: int = 100
    objects: dict[str, dict[str, Any]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    refusals: list[web.Response] = field(default_factory=list)  # answers to the next requests of any kind
    watch_refusals: list[web.Response] = field(default_factory=list)
    page_refusals: dict[str, web.Response] = field(default_factory=dict)  # by continue token, once each
    refuse_every_watch: int = 0  # a status
    token: str = ""  # when set, what every request must carry
    slow: asyncio.Event | None = None  # when set, requests for one object wait for it
    port: int = 0
    _watches: list[asyncio.Queue[bytes | None]] = field(default_factory=list)

    def put(self, name: str, *, uid: str | None = None, **data: str) -> dict[str, Any]:
        """Write an object without telling the watches."""
        self.version += 1
        metadata = {"name": name, "namespace": "default", "uid": uid or f"uid-of-{name}"}
        metadata |= {"resourceVersion": str(self.version), "managedFields": [{"manager": "x"}]}
        self.objects[name] = {"metadata": metadata, "data": data}
        return self.objects[name]

    def remove(self, name: str) -> dict[str, Any]:
        self.version += 1
        gone = self.objects.pop(name)
        gone["metadata"]["resourceVersion"] = str(self.version)
        return gone

    def say(self, kind: str, obj: dict[str, Any]) -> None:
        """Send an event to every open watch."""
        self.say_raw(json.dumps({"type": kind, "object": obj}).encode())

    def say_raw(self, line: bytes) -> None:
        for watch in self._watches:
            watch.put_nowait(line + b"\n")

    def end_watches(self) -> None:
        for watch in self._watches:
            watch.put_nowait(None)

    async def watched(self, *, times: int = 1) -> None:
        """Wait for the watch number ``times`` to be open."""
        await until(lambda: len(self.watch_requests) >= times and bool(self._watches))

    @property
    def watch_requests(self) -> list[Request]:
        return [each for each in self.requests if "watch" in each.query]

    @property
    def list_requests(self) -> list[Request]:
        return [each for each in self.requests if each.path == PATH and "watch" not in each.query]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        seen = Request(
            request.method,
            request.path,
            dict(request.query),
            dict(request.headers),
            await request.read(),
        )
        self.requests.append(seen)
        if self.token and request.headers.get("Authorization") != f"Bearer {self.token}":
            return refusal(401, "Unauthorized")
        if self.refusals:
            return self.refusals.pop(0)
        if request.path != PATH or request.method != "GET":
            if self.slow:
                await self.slow.wait()
            return web.json_response({"kind": "ConfigMap", "metadata": {"name": "one", "uid": "u"}})
        if "watch" not in request.query:
            return self._page(request)
        if self.watch_refusals:
            return self.watch_refusals.pop(0)
        if self.refuse_every_watch:
            return refusal(self.refuse_every_watch, "Refused")
        return await self._stream(request)

    def _page(self, request: web.Request) -> web.Response:
        token = request.query.get("continue", "")
        if token in self.page_refusals:
            return self.page_refusals.pop(token)
        start, limit = int(token or 0), int(request.query["limit"])
        items = list(self.objects.values())
        metadata = {"resourceVersion": str(self.version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        page = {"kind": "ConfigMapList", "apiVersion": "v1", "metadata": metadata}
        return web.json_response(page | {"items": items[start : start + limit]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watches.append(lines)
        try:
            while (line := await lines.get()) is not None:
                await response.write(line)
        finally:
            self._watches.remove(lines)
        return response


def refusal(code: int, reason: str, *, message: str = "", retry_after: str = "") -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason}
    headers = {"Retry-After": retry_after} if retry_after else {}
    return web.json_response(status | {"message": message}, status=code, headers=headers)


@asynccontextmanager
async def serving() -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer()
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        server.end_watches()
        await runner.cleanup()


def kubeconfig_for(server: ScriptedServer, folder: Path, *, user: dict[str, Any] | None = None) -> Path:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.port}"}}],
        "users": [{"name": "u", "user": user or {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    }
    path = folder / "scripted.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path
