"""The sweep on a real API server, a real Postgres and a fake cloud in which strangers have machines, too."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.api import keys
from app.inventory.identity import Identity, new_installation
from app.kube import paths
from app.kube.client import Kube, Obj
from app.ledger.duty import Ledger
from app.mirror.mirror import Mirror
from app.store.engine import begin, create_engine
from app.store.installation import get_or_create, hold, release_hold
from app.sweep.sweeper import Sweeper
from hack.cluster import Cluster
from providers.base import ClaimUid
from tests.support import composed
from tests.support.clouds import SMALL, FakeCloud
from tests.support.composed import Composed, until

# The grace is then little more than a second: what ends, ends soon, and what must stay is given longer.
QUICK: dict[str, Any] = {
    "settle_after_s": 0.2,
    "call_timeout_s": 1.0,
    "sweep_margin_s": 0.05,
    "sweep_every_s": 0.2,
    "list_rest_s": 0.2,
    "sweep_ending_s": 1.0,
    "sweep_launch_s": 1.0,
}
KNOWN = 100  # a person has confirmed attempts up to here: what carries a lower one is an orphan, no riddle
SWEEPS_MEANWHILE = 20  # so many sweeps must leave alone what is to stay


@pytest.fixture(scope="session")
async def kube(cluster: Cluster) -> AsyncIterator[Kube]:
    async with await Kube.connect(kubeconfig=str(cluster.kubeconfig)) as client:
        await composed.serve_our_kinds(client)
        yield client.room("tests")


@pytest.fixture
async def engine(database_url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(database_url, pool_size=8)
    yield engine
    await engine.dispose()


@pytest.fixture
def scenario() -> dict[str, Any]:
    """What the cloud is like; a test overrides it by parametrizing."""
    return SMALL


@pytest.fixture
async def cloud(tmp_path: Path, scenario: dict[str, Any]) -> AsyncIterator[FakeCloud]:
    async with FakeCloud.running(tmp_path / "cloud", scenario=scenario) as running:
        yield running


@dataclass(slots=True, kw_only=True)
class Term:
    """One leader's parts, the sweep among them."""

    parts: Composed
    sweeper: Sweeper
    sweeps: int = 0

    async def some_sweeps(self, count: int = SWEEPS_MEANWHILE) -> None:
        """Wait until so many more have been made."""
        wanted = self.sweeps + count
        await until(lambda: self.sweeps >= wanted, what="sweeps")


@dataclass(slots=True, kw_only=True)
class World:
    """An installation in an account that others use as well."""

    kube: Kube
    engine: AsyncEngine
    cloud: FakeCloud
    database_url: str
    installation: str = field(default_factory=new_installation)
    strangers: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def leading(
        self,
        *,
        clouds: Mapping[str, FakeCloud] | None = None,
        books: bool = False,
        **changes: Any,
    ) -> AsyncIterator[Term]:
        """A term with the sweep in it, and with ``books`` the ledger; ``changes`` are settings."""
        ours = self.installation
        async with composed.composed(
            self.kube,
            self.engine,
            clouds={"fake": self.cloud} if clouds is None else clouds,
            installation=ours,
            **(QUICK | changes),
        ) as parts:
            sweeper = Sweeper(
                kube=self.kube,
                claims=parts.claims,
                pods=parts.pods,
                pools=parts.pools,
                accounts=parts.accounts,
                provisioning=parts.provisioning,
                engine=self.engine,
                settings=parts.settings,
                installation=ours,
                leadership=parts.leader,
                events=parts.events,
                leader="test",
                clock=time.monotonic,
            )
            term = Term(parts=parts, sweeper=sweeper)
            sweep = sweeper.sweep

            async def counted() -> Any:
                result = await sweep()
                term.sweeps += result is not None
                return result

            sweeper.sweep = counted  # type: ignore[method-assign]
            parts.start(sweeper.run())
            if books:
                mirror = Mirror(engine=self.engine, claims=parts.claims, bindings=parts.bindings)
                ledger = Ledger(
                    engine=self.engine,
                    accounts=parts.accounts,
                    offerings=parts.offerings,
                    settings=parts.settings,
                    installation=ours,
                    leadership=parts.leader,
                )
                parts.start(mirror.run())
                parts.start(ledger.run())
            yield term

    # --- what is there -----------------------------------------------------------------------------

    def identity(self, uid: str | None = None, *, installation: str | None = None, attempt: int = 1) -> str:
        """A machine's name, of a claim that nobody knows unless ``uid`` says which."""
        return str(
            Identity(
                installation=installation or self.installation,
                claim_uid=ClaimUid(uid or str(uuid4())),
                attempt=attempt,
                sequence=attempt,
            )
        )

    async def orphan(self, **fields: Any) -> dict[str, Any]:
        """A machine of ours that no claim and no row knows."""
        known = {"name": self.identity(), "region": "r1", "accelerator": "H100"}
        return await self.cloud.plant(**(known | fields))

    async def plant_strangers(self) -> None:
        """A person's machine, one with a look-alike name, and another installation's."""
        names = ("by-hand", None, f"nb-{self.installation}", self.identity(installation=new_installation()))
        for name in names:
            planted = await self.cloud.plant(name=name, region="r1", accelerator="T4")
            self.strangers.add(planted["id"])

    async def claim(self, **spec: Any) -> Obj:
        """A claim of a Pod that need not exist."""
        name = f"p-{uuid4().hex[:8]}"
        pod: Obj = {
            "metadata": {
                "namespace": "sweep",
                "name": name,
                "uid": str(uuid4()),
                "labels": {keys.NODE_POOL_LABEL: "gpu"},
            }
        }
        return await composed.a_claim(
            self.kube, pod, installation=self.installation, provider="fake", bound=False, **spec
        )

    async def remove_claim(self, claim: Obj) -> None:
        """By hand, finalizer and all."""
        path = paths.nodeclaim(claim["metadata"]["name"])
        await self.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
        await self.kube.delete(path)

    async def remember(self, *, sequence: int, region: str = "r1") -> None:
        """An earlier leader has written an attempt of this number down, and its claim has ended."""
        uid = str(uuid4())
        async with begin(self.engine) as conn:
            await conn.execute(
                text("""
                    with gone as (
                        insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool,
                            provider, account, region, tier, accelerator, state, epoch, ended_at)
                        values (:uid, 'earlier', 'sweep', 'earlier', 'p', 'gpu', 'fake', 'default', :region,
                            'OnDemand', 'H100:1', 'ended', 0, now())
                    )
                    insert into provision_attempt (claim_uid, number, sequence, identity, provider, account,
                        region, tier, accelerator, epoch, send_by, outcome, settled_at)
                    values (:uid, 1, :sequence, :uid, 'fake', 'default', :region, 'OnDemand', 'H100:1', 0,
                        now(), 'absent', now())
                """),
                {"uid": uid, "sequence": sequence, "region": region},
            )

    async def lose_rows(self) -> None:
        """The store is put back to before everything."""
        async with begin(self.engine) as conn:
            await conn.execute(text("truncate run cascade"))  # and the ledger's rows of it
            for table in ("rental", "instance_seen"):
                await conn.execute(text(f"delete from {table}"))
            await conn.execute(text("update installation set confirmed_sequence = 0"))

    async def confirm(self, *ids: str) -> None:
        """A person has looked, saw these machines in the lists, and lifts the hold."""
        await until(self.held, what="the sweeps are held")

        async def listed() -> bool:
            rows = await self.rows("select 1 from instance_seen where resource_id = any(:ids)", ids=list(ids))
            return len(rows) == len(ids)

        await until(listed, what="they are listed")
        async with begin(self.engine) as conn:
            assert await release_hold(conn)

    async def held(self) -> bool:
        return bool(await self.rows("select 1 from installation where held_since is not null"))

    async def hold(self) -> None:
        async with begin(self.engine) as conn:
            await hold(conn, "a test")

    # --- what is known of it --------------------------------------------------------------------------

    async def rows(self, query: str, **values: Any) -> list[Any]:
        async with self.engine.connect() as conn:
            return list((await conn.execute(text(query), values)).mappings())

    async def finding(self, resource_id: str, *, open_: bool = True) -> Any:
        """The newest finding about a machine, once there is one."""
        query = "select * from orphan_finding where resource_id = :id order by id desc limit 1"

        async def found() -> Any:
            rows = await self.rows(query, id=resource_id)
            return rows[0] if rows and (rows[0]["resolved_at"] is None) == open_ else None

        return await until(found, what=f"a finding about {resource_id}, open: {open_}")

    async def blocked(self, resource_id: str, by: str) -> Any:
        """The finding, once that rail holds it back."""

        async def found() -> Any:
            row = await self.finding(resource_id)
            return row if row["blocked_by"] == by else None

        return await until(found, what=f"{resource_id} is held back by {by}")

    async def alive(self) -> set[str]:
        """The ids of the machines that are there, those of strangers left out."""
        return {machine["id"] for machine in await self.cloud.alive()} - self.strangers

    async def until_gone(self, *ids: str) -> None:
        async def gone() -> bool:
            return not set(ids) & await self.alive()

        await until(gone, what=f"gone: {', '.join(ids)}")


@pytest.fixture
async def world(kube: Kube, engine: AsyncEngine, cloud: FakeCloud, database_url: str) -> AsyncIterator[World]:
    """Whatever a test does, the strangers' machines are there at its end as they were at its beginning."""
    await composed.purge_claims(kube)
    made = World(kube=kube, engine=engine, cloud=cloud, database_url=database_url)
    await made.plant_strangers()
    async with begin(engine) as conn:
        await get_or_create(conn, new_id=made.installation)
        await conn.execute(text(f"update installation set confirmed_sequence = {KNOWN}"))
    yield made
    await composed.purge_claims(kube)
    if cloud.runs:
        await cloud.clear_faults()
        there = {machine["id"]: machine for machine in await cloud.alive()}
        assert made.strangers <= there.keys()
        assert all(there[each]["terminates"] == there[each]["stops"] == 0 for each in made.strangers)
