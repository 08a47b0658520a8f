"""Serves the webhooks on one replica: certificate first, then the port, then the configurations.

In that order the API server never calls a port that does not answer, or one whose certificate it does not
trust. All replicas serve; only the leader keeps the configurations (`Admission.keep`), and every replica is
ready once they are there. They stay when the last replica goes: an opted-in Pod created meanwhile is refused,
never let through without its gate.
"""

import asyncio
import contextlib
import random
import socket
from asyncio import sslproto
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import structlog
import uvicorn
from starlette.types import ASGIApp

from app.admission.configurations import certificate_names, configurations, with_port
from app.admission.reviews import application
from app.kube.certificates import BadCertificates, Certificates
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.kube.webhooks import WebhookKeeper
from app.settings import Settings
from catalog.stock import Stock

log = structlog.get_logger()

KEEPALIVE_S = 120  # the API server drops idle connections after 90 s: it must be first
DRAIN_S = 15  # more than the time-out of any review under way
_TLS_BUFFER_BYTES = (
    32 * 1024
)  # a burst opens a hundred connections, each with a buffer; the default is 256 KiB


class Admission:
    """One replica's webhooks. `run` serves them until it is cancelled."""

    def __init__(
        self,
        *,
        kube: Kube,
        settings: Settings,
        stock: Stock,
        certificates: Certificates | None = None,
    ) -> None:
        """Binds the port of ``settings.webhook_bind``; port 0 there is any free one.

        Port 0 in ``settings.webhook_url`` stands for the port that was bound. ``stock`` is what could be
        rented. ``certificates`` are by default those of the Secret in ``settings.namespace``.

        Raises:
            OSError: the address cannot be bound.
            ValueError: the URL names no host.
        """
        names = certificate_names(
            namespace=settings.namespace, url=settings.webhook_url, service=settings.webhook_service
        )
        self.certificates = certificates or Certificates(kube, namespace=settings.namespace, names=names)
        self._socket = bind(settings.webhook_bind)
        self.port: int = self._socket.getsockname()[1]
        self.url = settings.webhook_url and with_port(settings.webhook_url, self.port)
        self._keeper = WebhookKeeper(
            kube,
            configurations(namespace=settings.namespace, url=self.url, service=settings.webhook_service),
            namespace=settings.namespace,
            ca_bundle=lambda: self.certificates.ca_bundle,
        )
        self._application = application(stock=stock)
        self._settings = settings
        self._serving, self._up = asyncio.Event(), asyncio.Event()
        self._trouble = "the webhooks are not served yet"

    @property
    def ready(self) -> bool:
        """Whether reviews are answered with a valid certificate and the API server was told to ask us."""
        return self._up.is_set() and self.certificates.ready

    @property
    def trouble(self) -> str:
        """Why it is not `ready`, for people; empty when it is."""
        if self._up.is_set():
            return "" if self.certificates.ready else "the webhooks' certificate has ended"
        return self._trouble

    async def wait_ready(self) -> None:
        """Return once the webhooks are served and configured."""
        await self._up.wait()

    async def run(self) -> None:
        """Serve until cancelled; then answer what is under way, and stop. Can be run once."""
        sslproto.SSLProtocol.max_size = _TLS_BUFFER_BYTES
        self.certificates.on_change(self._keeper.wake)
        try:
            await self._insist(self.certificates.refresh, what="no certificate for the webhooks")
            async with self._served() as serving, asyncio.TaskGroup() as tasks:
                tasks.create_task(_too_early(serving), name="webhook-server-ended")
                tasks.create_task(self.certificates.run(), name="webhook-certificates")
                self._serving.set()
                await self._configured()
                self._up.set()
                log.info("webhooks served", port=self.port)
        finally:
            self._socket.close()

    async def keep(self) -> None:
        """Keep the webhook configurations as they should be, until cancelled. For the leader alone."""
        await self._serving.wait()
        await self._keeper.run()

    async def _configured(self) -> None:
        """Return once the API server was told, by whoever leads, to ask the webhooks."""
        wait_s = self._settings.backoff_base_s
        while not self._keeper.in_place:
            try:
                missing = await self._keeper.missing()
            except KubeError as error:
                missing = str(error)
            if missing is None:
                return
            trouble = f"the webhook configurations are not in place: {missing}"
            if trouble != self._trouble:
                self._trouble = trouble
                log.info("webhooks not ready", reason=trouble)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s * random.uniform(0.8, 1.2)):
                    await self._keeper.applied.wait()
            wait_s = min(self._settings.backoff_max_s, wait_s * 2)

    async def _insist(self, step: Callable[[], Awaitable[None]], *, what: str) -> None:
        """Repeat ``step`` until the API server lets it through: there is nothing to serve before."""
        wait_s = self._settings.backoff_base_s
        while True:
            try:
                return await step()
            except (KubeError, BadCertificates) as error:
                self._trouble = f"{what}: {error}"
                log.warning("webhooks not ready", reason=what, error=str(error))
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(self._settings.backoff_max_s, wait_s * 2)

    @asynccontextmanager
    async def _served(self) -> AsyncIterator[asyncio.Task[None]]:
        """The server's task, inside the block; on leaving it, what is under way is answered."""
        server = _Server(_config(self._application, self.certificates))
        serving = asyncio.create_task(server.serve(sockets=[self._socket]), name="webhook-server")
        try:
            yield serving
        finally:
            self._up.clear()  # before the draining: nothing new is to be sent here
            self._trouble = "the webhooks are not served any more"
            server.should_exit = True
            await serving


async def _too_early(serving: asyncio.Task[None]) -> None:
    """Raise when the server ends; being cancelled does not end it."""
    await asyncio.shield(serving)
    raise RuntimeError("the webhook server has ended by itself")


class _Server(uvicorn.Server):
    """uvicorn, with the process's signals left to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _config(app: ASGIApp, certificates: Certificates) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEPALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
        backlog=512,
        # The context is the one that renewals are loaded into: new connections get the new certificate.
        ssl_context_factory=lambda _config, _default: certificates.context,
    )


def bind(address: str) -> socket.socket:
    """A listening-to-be TCP socket for ``HOST:PORT``; without a host, on every address of both families.

    Raises:
        OSError: it cannot be bound.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    both = host in ("", "::") and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
    listening = socket.create_server((host, int(port)), family=family, dualstack_ipv6=both)
    # asyncio sets this only on sockets made with an explicit protocol number. Without it each answer, sent as
    # head and body, waits some 40 ms for the client's delayed acknowledgement. Accepted sockets inherit it.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
