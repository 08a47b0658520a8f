"""Serves the endpoint on one replica: certificate and client CA first, then the port.

The certificate is of a CA of ours, in a Secret beside the webhooks' and kept in the same way: rotated while
running, or somebody else's where one is given. Clients that show no certificate may show a token; nobody
else gets an answer.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog
import uvicorn
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.accounts import Accounts
from app.kube.certificates import BadCertificates, Certificates
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.kubelet.callers import Callers, ClientAuthority
from app.kubelet.find import Finder
from app.kubelet.handover import HandoverProtocol
from app.kubelet.open import Sessions
from app.kubelet.output import Outputs
from app.kubelet.routes import Routes
from app.kubelet.usage import Meterer
from app.settings import Settings
from app.telemetry.health import bind, serve

log = structlog.get_logger()
SECRET = "nebula-kubelet-server-cert"
KEEPALIVE_S = 120  # clients keep idle connections for 90 s: they must be first to close
DRAIN_S = 5


class Kubelet:
    """One replica's endpoint. `run` serves it until it is cancelled."""

    def __init__(self, *, kube: Kube, settings: Settings, accounts: Accounts, engine: AsyncEngine) -> None:
        """Binds the port of ``settings.kubelet_bind``.

        Raises:
            OSError: the address cannot be bound.
        """
        assert settings.kubelet_address is not None, "the endpoint is off"
        self._settings = settings
        names = [settings.kubelet_address, "127.0.0.1", "localhost"]
        self.certificates = Certificates(
            kube, namespace=settings.namespace, names=list(dict.fromkeys(names)), secret=SECRET
        )
        self._authority = ClientAuthority(
            kube, self.certificates.context, file=settings.kubelet_client_ca_file
        )
        self._socket = bind(settings.kubelet_bind)
        self._socket.listen(512)
        self.port: int = self._socket.getsockname()[1]
        finder = Finder(kube, accounts=accounts, engine=engine)
        self.sessions = Sessions(kube, idle_s=settings.kubelet_idle_s)
        self._routes = Routes(
            callers=Callers(kube),
            finder=finder,
            outputs=Outputs(finder=finder, engine=engine),
            meterer=Meterer(kube, accounts=accounts, finder=finder),
            sessions=self.sessions,
        )

    async def run(self) -> None:
        """Serve until cancelled; then every session is told and ended.

        Raises:
            NobodyKnown: there is no CA by which callers could be known.
        """
        try:
            await self._insist(self.certificates.refresh, what="no certificate for the kubelet endpoint")
            await self._insist(self._authority.load, what="no client CA for the kubelet endpoint")
            server = uvicorn.Server(self._config())
            log.info("kubelet endpoint served", port=self.port, callers=self._authority.where)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self.certificates.run(), name="kubelet-certificates")
                tasks.create_task(self._authority.run(), name="kubelet-client-ca")
                tasks.create_task(self.sessions.run(), name="kubelet-sessions")
                tasks.create_task(self._serve(server), name="kubelet-server")
        finally:
            self._socket.close()

    async def _serve(self, server: uvicorn.Server) -> None:
        serving = asyncio.create_task(serve(server, self._socket), name="kubelet-uvicorn")
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            self.sessions.end_all("this replica is stopping")
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            raise

    async def _insist(self, step: Callable[[], Awaitable[None]], *, what: str) -> None:
        wait_s = self._settings.backoff_base_s
        while True:
            try:
                return await step()
            except (KubeError, BadCertificates) as error:
                log.warning("kubelet endpoint not ready", reason=what, error=str(error))
            await asyncio.sleep(wait_s * random.uniform(0.8, 1.2))
            wait_s = min(self._settings.backoff_max_s, wait_s * 2)

    def _config(self) -> uvicorn.Config:
        return uvicorn.Config(
            self._routes.application(),
            http=HandoverProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEPALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
            backlog=512,
            ssl_context_factory=lambda _config, _default: self.certificates.context,
        )
