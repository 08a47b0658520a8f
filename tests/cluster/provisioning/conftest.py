"""Provisioning on real parts: NodeClaims on the API server, rows in Postgres, a cloud in its own process."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.api.crds import load_crds
from app.inventory.accounts import Account, Accounts
from app.inventory.budget import Urgency
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.claims import ClaimDoor, claim_spec
from app.kube.client import Kube
from app.kube.errors import KubeError
from app.provisioning.model import (
    ClaimSpec,
    Outcome,
    Policy,
    Refused,
    Release,
    Released,
    Releasing,
    Rented,
    Waiting,
)
from app.provisioning.service import Provisioning
from app.settings import Settings, load, parse_providers
from app.store.engine import create_engine
from app.store.installation import get_or_create, next_epoch
from catalog.offerings import Offerings
from catalog.refresh import follow
from hack.cluster import Cluster
from providers.base import Workload
from tests.support.clouds import SMALL, FakeCloud

WORKLOAD = Workload(image="nvidia/cuda:12.4.1-base-ubuntu22.04")
POLICY = Policy(block_ttl_s=30.0, template="owner/1")


@dataclass(slots=True)
class Leader:
    """Leadership that a test hands out and takes away."""

    epoch: int | None = None
    leads: bool = True

    def valid(self) -> bool:
        return self.leads


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        for crd in load_crds():
            await client.patch(paths.crd(crd["metadata"]["name"]), crd, kind="apply")
        await _served(client)
        yield client


async def _served(client: Kube) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if await client.find(paths.nodeclaims()) is not None:
                    return
            except KubeError as error:  # a kind that is just being made answers 404
                if error.status != 404:
                    raise
            await asyncio.sleep(0.05)


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=8)
    yield engine
    await engine.dispose()


@pytest.fixture
def scenario() -> dict[str, Any]:
    """What the cloud is like; a test overrides it by parametrizing or by its own fixture."""
    return SMALL


@pytest.fixture
async def cloud(tmp_path: Path, scenario: dict[str, Any]) -> AsyncIterator[FakeCloud]:
    async with FakeCloud.running(tmp_path / "cloud", scenario=scenario) as running:
        yield running


@dataclass(slots=True)
class Bench:
    """One controller's provisioning, and the hand on what surrounds it."""

    kube: Kube
    engine: AsyncEngine
    cloud: FakeCloud
    installation: str
    leader: Leader = field(default_factory=Leader)
    provisioning: Provisioning = field(init=False)
    accounts: Accounts = field(init=False)
    offerings: Offerings = field(init=False)

    @property
    def door(self) -> ClaimDoor:
        return ClaimDoor(self.kube.room("test"))

    async def claim(self, *, tier: str = "OnDemand", region: str = "r1", **spec: Any) -> ClaimSpec:
        """Create a NodeClaim for a Pod that need not exist."""
        name = f"ns-{uuid4().hex[:10]}"
        body = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "metadata": {"name": name, "finalizers": [keys.CLAIM_FINALIZER]},
            "spec": {
                "podRef": {"namespace": "ns", "name": name, "uid": str(uuid4())},
                "poolRef": "gpu",
                "provider": "fake",
                "region": region,
                "capacityType": tier,
                "accelerator": "H100:1",
                **spec,
            },
        }
        return claim_spec(await self.kube.create(paths.nodeclaims(), body))

    async def reread(self, claim: ClaimSpec) -> ClaimSpec:
        return claim_spec(await self.kube.get(paths.nodeclaim(claim.name)))

    async def ensure_once(self, claim: ClaimSpec, **workload: Any) -> Outcome:
        wanted = replace(WORKLOAD, **workload)
        return await self.provisioning.ensure(claim, wanted, port=self.door, policy=POLICY)

    async def ensure(self, claim: ClaimSpec, *, within_s: float = 30.0, **workload: Any) -> Outcome:
        """As a caller would: again until it is rented, refused or over."""
        async with asyncio.timeout(within_s):
            while True:
                outcome = await self.ensure_once(claim, **workload)
                if not isinstance(outcome, Waiting):
                    return outcome
                await asyncio.sleep(min(outcome.after_s, 0.3))

    async def release_once(self, claim: ClaimSpec) -> Release:
        return await self.provisioning.release(claim, port=self.door, reason="test")

    async def release(self, claim: ClaimSpec, *, within_s: float = 30.0) -> None:
        async with asyncio.timeout(within_s):
            while not isinstance(release := await self.release_once(claim), Released):
                assert isinstance(release, Releasing)
                await asyncio.sleep(min(release.after_s, 0.2))

    async def rented(self, claim: ClaimSpec, **workload: Any) -> Rented:
        outcome = await self.ensure(claim, **workload)
        assert isinstance(outcome, Rented), outcome
        return outcome

    async def refused(self, claim: ClaimSpec, **workload: Any) -> Refused:
        outcome = await self.ensure(claim, **workload)
        assert isinstance(outcome, Refused), outcome
        return outcome

    async def row(self, query: str, **values: Any) -> Any:
        async with self.engine.connect() as conn:
            return (await conn.execute(text(query), values)).first()

    async def rows(self, query: str, **values: Any) -> list[Any]:
        async with self.engine.connect() as conn:
            return list(await conn.execute(text(query), values))

    async def until(self, holds: Callable[[], bool], *, within_s: float = 15.0) -> None:
        """Await what the running duties bring about."""
        async with asyncio.timeout(within_s):
            while not holds():
                await asyncio.sleep(0.02)

    async def until_row(self, query: str, *, within_s: float = 15.0, **values: Any) -> Any:
        async with asyncio.timeout(within_s):
            while (row := await self.row(query, **values)) is None:
                await asyncio.sleep(0.05)
            return row

    @asynccontextmanager
    async def running(
        self, *, clock: Callable[[], float] = time.monotonic, **changes: Any
    ) -> AsyncIterator["Bench"]:
        """A process's worth of provisioning; leave and enter again for a restart without memory."""
        settings = a_settings(self.cloud.url, **changes)
        accounts, offerings = Accounts(settings, self.installation), Offerings()
        self.offerings = offerings
        self.provisioning = Provisioning(
            accounts=accounts,
            offerings=offerings,
            engine=self.engine,
            settings=settings,
            installation=self.installation,
            leadership=self.leader,
            port=self.door,
            clock=clock,
        )
        self.accounts = accounts
        async with self.engine.begin() as conn:
            await get_or_create(conn, new_id=self.installation)
            self.leader.epoch = await next_epoch(conn, self.leader.epoch or 0)
        tasks: list[asyncio.Task[None]] = []

        def offer(account: Account) -> None:
            turn = account.budget.take
            tasks.append(
                asyncio.create_task(
                    follow(
                        offerings,
                        provider=account.provider,
                        account="default",
                        turn=lambda: turn(Urgency.LIST),
                    )
                )
            )

        accounts.on_open(offer)
        tasks.append(asyncio.create_task(accounts.run()))
        tasks.append(asyncio.create_task(self.provisioning.run()))
        try:
            await self.until(
                lambda: bool(offers := offerings.get("fake", "default")) and bool(offers.offerings)
            )
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def a_settings(url: str, **changes: Any) -> Settings:
    settings = load({"profile": "fast", "providers": f"fake=fake,url={url}"}, {})
    return settings.model_copy(update={"providers": parse_providers(f"fake=fake,url={url}"), **changes})


@pytest.fixture
async def bench(kube: Kube, engine: AsyncEngine, cloud: FakeCloud) -> Bench:
    return Bench(kube=kube, engine=engine, cloud=cloud, installation=new_installation())
