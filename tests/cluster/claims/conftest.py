"""The claims controller on a real API server, a real Postgres and a fake cloud."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.claims.controller import Claims
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.client import Kube, Obj
from app.store.engine import create_engine
from hack.cluster import Cluster
from tests.support import composed
from tests.support.clouds import SMALL, FakeCloud
from tests.support.composed import Composed, until


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        await composed.serve_our_kinds(client)
        await composed.a_node(client, "nebula-modal")
        yield client.room("tests")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=8)
    yield engine
    await engine.dispose()


@pytest.fixture
def scenario() -> dict[str, Any]:
    """What the cloud is like; a test overrides it."""
    return SMALL


@pytest.fixture
async def cloud(tmp_path: Path, scenario: dict[str, Any]) -> AsyncIterator[FakeCloud]:
    async with FakeCloud.running(tmp_path / "cloud", scenario=scenario) as running:
        yield running


class Written:
    """In front of a client's transport: notes reads of Pods; writes as ``PATCH nodeclaims/NAME/status``."""

    def __init__(self, kube: Kube) -> None:
        self.writes: list[str] = []
        self.pods_read: list[str] = []
        self._transport = kube._transport
        self.kube = kube.room("noted")
        self.kube._transport = self  # type: ignore[assignment]

    async def send(self, method: str, path: str, **request: Any) -> bytes:
        if method != "GET":
            self.writes.append(f"{method} {path.partition('?')[0].partition('/v1alpha1/')[2]}")
        elif "/pods/" in path:
            self.pods_read.append(path.rpartition("/")[2])
        return await self._transport.send(method, path, **request)


@dataclass(slots=True, kw_only=True)
class World:
    """One namespace, one cloud named ``modal``, and as many terms of the controller as a test wants."""

    kube: Kube
    engine: AsyncEngine
    cloud: FakeCloud
    namespace: str
    installation: str = field(default_factory=new_installation)
    written: Written = field(init=False)

    def __post_init__(self) -> None:
        self.written = Written(self.kube)

    @asynccontextmanager
    async def leading(
        self, *, clouds: Mapping[str, FakeCloud] | None = None, **changes: Any
    ) -> AsyncIterator[Composed]:
        """A term with the claims controller in it."""
        known = {"modal": self.cloud} if clouds is None else clouds
        async with composed.composed(
            self.kube, self.engine, clouds=known, installation=self.installation, **changes
        ) as term:
            term.start(
                Claims(
                    kube=self.written.kube,
                    claims=term.claims,
                    bindings=term.bindings,
                    pods=term.pods,
                    pools=term.pools,
                    provisioning=term.provisioning,
                    accounts_names=term.accounts.names,
                    settings=term.settings,
                    events=term.events,
                ).run()
            )
            yield term

    async def pod(self, name: str, *, node: str | None = "nebula-modal", **more: Any) -> Obj:
        return await composed.a_pod(self.kube, self.namespace, name=name, node=node, **more)

    async def claim(self, pod: Obj, *, provider: str = "modal", **more: Any) -> Obj:
        return await composed.a_claim(
            self.kube, pod, installation=self.installation, provider=provider, **more
        )

    async def live(self, claim: Obj) -> Obj | None:
        """The claim as the server has it, None if that name is free or another's."""
        found = await self.kube.find(paths.nodeclaim(claim["metadata"]["name"]))
        return found if found and found["metadata"]["uid"] == claim["metadata"]["uid"] else None

    async def status(self, claim: Obj) -> dict[str, Any]:
        live = await self.live(claim)
        assert live is not None, "the claim is gone"
        return live.get("status") or {}

    async def binding_status(self, claim: Obj) -> dict[str, Any]:
        name = keys.binding_name(claim["metadata"]["name"])
        found = await self.kube.get(paths.cloudpodbinding(self.namespace, name))
        return found.get("status") or {}

    async def until_phase(self, claim: Obj, phase: str) -> dict[str, Any]:
        """The claim's status once it has that phase."""

        async def shown() -> dict[str, Any] | None:
            status = await self.status(claim)
            return status if status.get("phase") == phase else None

        return await until(shown, what=f"phase {phase}")

    async def until_gone(self, claim: Obj) -> None:
        async def gone() -> bool:
            return await self.live(claim) is None

        await until(gone, what="the claim is gone")

    async def remove_pod(self, pod: Obj) -> None:
        """As the virtual node ends it: at once, and only this incarnation."""
        path = paths.pod(pod["metadata"]["namespace"], pod["metadata"]["name"])
        await self.kube.delete(path, uid=pod["metadata"]["uid"], grace_s=0)


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Type to status and reason."""
    return {each["type"]: (each["status"], each["reason"]) for each in status.get("conditions") or ()}


@pytest.fixture
async def world(kube: Kube, engine: AsyncEngine, cloud: FakeCloud) -> AsyncIterator[World]:
    await composed.purge_claims(kube)
    namespace = await composed.a_namespace(kube, "claims")
    yield World(kube=kube, engine=engine, cloud=cloud, namespace=namespace)
    await composed.purge_claims(kube)
    await kube.delete(paths.namespace(namespace))
