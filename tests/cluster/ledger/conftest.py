"""The ledger beside all that it reads: claims, rows, and a cloud in its own process with its true bill."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.identity import new_installation
from app.kube.claims import claim_spec
from app.kube.client import Kube, Obj
from app.ledger.duty import Ledger
from app.mirror.mirror import Mirror
from app.provisioning.model import Released
from app.store.engine import begin, create_engine
from hack.cluster import Cluster
from tests.support import bill, composed
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
    """Prices that do not divide evenly, and a reclaim that is free when it comes early."""
    offers = [
        {
            "accelerator": "H100",
            "counts": [1, 8],
            "usd_per_hour": {"Spot": "2.4901", "OnDemand": "4.1999"},
            "machine_usd_per_hour": "0.0137",
        }
    ]
    return SMALL | {"offers": offers, "life": {"boot_s": 0.3}}


@pytest.fixture
async def cloud(tmp_path: Path, scenario: dict[str, Any]) -> AsyncIterator[FakeCloud]:
    async with FakeCloud.running(tmp_path / "cloud", scenario=scenario) as running:
        yield running


@dataclass(slots=True, kw_only=True)
class World:
    """One namespace and one cloud named ``modal``."""

    kube: Kube
    engine: AsyncEngine
    cloud: FakeCloud
    namespace: str
    installation: str = field(default_factory=new_installation)
    made: int = 0

    @asynccontextmanager
    async def running(self, *, ledger: bool = True, **changes: Any) -> AsyncIterator[Composed]:
        """A term of a leader, with its ledger."""
        async with composed.composed(
            self.kube,
            self.engine,
            clouds={"modal": self.cloud},
            installation=self.installation,
            **changes,
        ) as parts:
            mirror = Mirror(engine=self.engine, claims=parts.claims, bindings=parts.bindings)
            parts.start(mirror.run())
            if ledger:
                self.keep_books(parts)
            yield parts

    def keep_books(self, parts: Composed) -> asyncio.Task[Any]:
        duty = Ledger(
            engine=self.engine,
            accounts=parts.accounts,
            offerings=parts.offerings,
            settings=parts.settings,
            installation=self.installation,
            leadership=parts.leader,
        )
        return parts.start(duty.run())

    async def claim(self, **spec: Any) -> Obj:
        self.made += 1
        pod = await composed.a_pod(self.kube, self.namespace, name=f"p-{self.made}")
        return await composed.a_claim(
            self.kube, pod, installation=self.installation, provider="modal", bound=False, **spec
        )

    async def release(self, parts: Composed, claim: Obj) -> None:
        spec = claim_spec(claim)

        async def released() -> bool:
            outcome = await parts.provisioning.release(spec, port=parts.door, reason="test")
            return isinstance(outcome, Released)

        await until(released, what="release")

    async def rows(self, query: str, **values: Any) -> list[dict[str, Any]]:
        async with begin(self.engine) as conn:
            found = await conn.execute(text(query), values)
            return [dict(row) for row in found.mappings()]

    async def billed(self) -> None:
        """Every run is closed, and its cloud's bill was compared with it."""
        await until(lambda: bill.is_settled(self.engine), what="every run's bill")

    async def cost(self) -> Decimal:
        """Dollars in the ledger: each machine's divided once, as a cloud bills each machine."""
        return sum((await bill.ledger_costs(self.engine)).values(), Decimal(0))


@pytest.fixture
async def world(kube: Kube, engine: AsyncEngine, cloud: FakeCloud) -> AsyncIterator[World]:
    namespace = await composed.a_namespace(kube, "ledger")
    yield World(kube=kube, engine=engine, cloud=cloud, namespace=namespace)
    await composed.purge_claims(kube)
