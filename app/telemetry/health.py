"""``/healthz``, ``/readyz`` and ``/metrics`` on one plain HTTP port.

Ready means that admission works here. The store is no part of it: without it renting waits, and restarting
the process would not bring it back. ``/healthz`` fails for what a restart mends: a part that stands still.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

log = structlog.get_logger()

Check = Callable[[], str | None]
"""What is wrong, or None."""


class Health:
    """Answers for as long as `run` does.

    ``checks`` gate readiness, ``live`` liveness; ``shown`` are only reported.
    """

    def __init__(
        self,
        address: str,
        *,
        checks: Mapping[str, Check],
        shown: Mapping[str, Check],
        live: Mapping[str, Check],
    ) -> None:
        self._address = address
        self._checks, self._shown, self._live = dict(checks), dict(shown), dict(live)

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            OSError: the address cannot be had.
        """
        app = Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics),
            ]
        )
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
        )
        sock = bind(self._address)
        log.info("health listens", port=sock.getsockname()[1])
        await serve(uvicorn.Server(config), sock)

    async def _healthz(self, _request: Request) -> Response:
        wrong = [f"{name}: {why}" for name, check in self._live.items() if (why := check()) is not None]
        if wrong:
            log.error("not alive", why=wrong)
        return PlainTextResponse("\n".join(wrong or ["ok"]) + "\n", status_code=503 if wrong else 200)

    async def _readyz(self, _request: Request) -> Response:
        wrong = {name: why for name, check in self._checks.items() if (why := check()) is not None}
        lines = [
            f"[-] {name}: {wrong[name]}" if name in wrong else f"[+] {name}: ok" for name in self._checks
        ]
        lines += [f"[.] {name}: {check() or 'ok'}" for name, check in self._shown.items()]
        return PlainTextResponse("\n".join(lines) + "\n", status_code=503 if wrong else 200)

    async def _metrics(self, _request: Request) -> Response:
        # In a thread: a scrape of thousands of lines would block the loop for a tenth of a second.
        body = await asyncio.to_thread(generate_latest, REGISTRY)
        return Response(body, media_type=CONTENT_TYPE_LATEST)


async def serve(server: uvicorn.Server, sock: socket.socket) -> None:
    """Run a uvicorn server on a bound socket inside the caller's task; cancelled, it drains and ends.

    uvicorn's own entry installs signal handlers and exits the process when it cannot bind: neither is ours to
    leave to a library.
    """
    config = server.config
    if not config.loaded:
        config.load()
    server.lifespan = config.lifespan_class(config)
    task = asyncio.create_task(_serve(server, sock), name="uvicorn")
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        server.should_exit = True
        await task
        raise


async def _serve(server: uvicorn.Server, sock: socket.socket) -> None:
    await server.startup(sockets=[sock])
    await server.main_loop()
    await server.shutdown(sockets=[sock])


def bind(address: str) -> socket.socket:
    """A socket bound to ``:8081``, ``127.0.0.1:0`` or ``[::1]:8081``; no host: every address, IPv6 too.

    Raises:
        OSError: the address cannot be had; the message names it.
    """
    sock = _bound(address)
    sock.set_inheritable(False)
    # As for the webhooks: asyncio sets it only on sockets of a named protocol, and what is accepted inherits
    # it. Without it each answer of two packets waits 40 ms, and `kubectl exec` with it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not host:
        with suppress(OSError, ValueError):  # a machine without IPv6
            return socket.create_server(("", int(port)), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, int(port)))
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}: {error.strerror}") from error
    return sock
