"""No database: nothing is rented, teardown goes on, and only the rows let a claim go for good."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.claims import ClaimDoor
from app.kube.client import Kube
from app.provisioning import release
from app.provisioning.memory import encoded
from app.provisioning.model import (
    ClaimSpec,
    ClaimUnreadable,
    LiveClaim,
    Releasing,
    Unrecorded,
    Waiting,
    Why,
)
from app.store.devserver import DevPostgres
from app.store.engine import create_engine
from app.store.installation import next_epoch
from app.store.migrate import migrate
from providers.base import ClaimUid, Meter, MeterKind, Ref, ResourceId
from tests.cluster.provisioning.conftest import POLICY, WORKLOAD, Bench
from tests.support.clouds import FakeCloud


@pytest.fixture
async def server() -> AsyncIterator[DevPostgres]:
    """A Postgres that the test may stop."""
    own = DevPostgres(None, durable=False)
    await asyncio.to_thread(own.start)
    try:
        await migrate(own.url)
        yield own
    finally:
        await asyncio.to_thread(own.close)


@pytest.fixture
async def engine(server: DevPostgres) -> AsyncIterator[AsyncEngine]:
    engine = create_engine(server.url, pool_size=5, timeout_s=2)
    yield engine
    await engine.dispose()


@pytest.fixture
def bench(kube: Kube, engine: AsyncEngine, cloud: FakeCloud, tmp_path: Path) -> Bench:
    return Bench(kube=kube, engine=engine, cloud=cloud, installation=new_installation())


@pytest.mark.behaviour(399)
async def test_without_a_store_nothing_is_rented(bench: Bench, server: DevPostgres):
    async with bench.running():
        claim = await bench.claim()
        await asyncio.to_thread(server.stop)

        outcome = await bench.ensure_once(claim)

        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NO_STORE
        assert await bench.cloud.creates() == {}
        live = await bench.door.look(claim)
        assert live is not None
        assert live.mark is None


async def test_a_store_that_goes_right_before_an_intent_has_lost_no_rows(bench: Bench, server: DevPostgres):
    """Its rental was never written down: the next term must not hold the sweeps as after a restore."""

    class Door(ClaimDoor):
        async def look(self, claim: ClaimSpec) -> LiveClaim | None:
            live = await super().look(claim)
            await asyncio.to_thread(server.stop)
            return live

    async with bench.running():
        await bench.rented(await bench.claim())  # draws the numbers of the next orders, too
        claim = await bench.claim()
        door = Door(bench.kube.room("test"))
        outcome = await bench.provisioning.ensure(claim, WORKLOAD, port=door, policy=POLICY)
        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NO_STORE
        assert bench.provisioning.view(claim.uid).state == "open"
        path = paths.nodeclaim(claim.name)
        await bench.kube.patch(path, {"metadata": {"finalizers": None}}, kind="merge")
        await bench.kube.delete(path)

        await asyncio.to_thread(server.start)
        async with bench.engine.begin() as conn:
            bench.leader.epoch = await next_epoch(conn, bench.leader.epoch or 0)

        told = await bench.until_row(
            "select held_reason from installation where held_since is not null or exists"
            " (select from rental where claim_uid = :uid and state = 'ended')",
            uid=claim.uid,
        )
        assert told.held_reason is None


async def test_without_a_store_teardown_goes_on_but_the_claim_stays(bench: Bench, server: DevPostgres):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        await asyncio.to_thread(server.stop)

        release = await bench.release_once(claim)

        assert isinstance(release, Releasing)
        assert release.accepted
        assert release.why is Why.NO_STORE
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))

        await asyncio.to_thread(server.start)
        back = datetime.now(UTC)
        await bench.release(claim)
        run = await bench.until_row("select * from run where terminate_asked_at is not null")
        assert (run.resource_id, run.gone_at is not None) == (rented.ref.resource_id, True)
        assert run.terminate_asked_at < back  # when it was asked for, not when that could be written down


@pytest.mark.behaviour(163, 400)
async def test_a_new_leader_without_a_store_tears_down_from_the_claims_status(
    bench: Bench, server: DevPostgres
):
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
    status = {"status": {"instanceID": rented.ref.resource_id, "region": "r1", "account": "default"}}
    await bench.kube.patch(paths.nodeclaim_status(claim.name), status, kind="merge")
    claim = await bench.reread(claim)

    async with bench.running():
        await asyncio.to_thread(server.stop)
        bench.leader.epoch = None  # what a leader has that took over while the store was away

        release = await bench.release_once(claim)

        assert isinstance(release, Releasing)
        assert release.accepted
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
        await asyncio.to_thread(server.start)


def _stop_after_the_answer(bench: Bench, claim: ClaimSpec, server: DevPostgres) -> None:
    """The store goes between the cloud's answer to the next create and the row for it."""
    account = bench.accounts.get(claim.key)
    assert account is not None
    provision = account.provider.provision

    async def answered(*args: Any, **named: Any) -> Any:
        answer = await provision(*args, **named)
        await asyncio.to_thread(server.stop)
        return answer

    account.provider.provision = answered  # type: ignore[method-assign]


async def test_a_machine_ended_without_a_store_by_a_leader_that_then_died_has_its_run(
    bench: Bench, server: DevPostgres
):
    """No row had taken it down, and nothing of it is there when rows can be written again."""
    async with bench.running():
        claim = await bench.claim()
        _stop_after_the_answer(bench, claim, server)
        outcome = await bench.ensure_once(claim)
        assert isinstance(outcome, Waiting)
        assert outcome.why is Why.NO_STORE
        await bench.until(lambda: bool(bench.provisioning.inventory.of_claim(claim.uid)))

        async with asyncio.timeout(15):
            while not (release := await bench.release_once(claim)).accepted:
                await asyncio.sleep(0.05)
        assert isinstance(release, Releasing)
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
        (machine,) = await bench.cloud.machines()

    await asyncio.to_thread(server.start)
    async with bench.running():
        await bench.release(claim)

        (run,) = await bench.rows("select * from run")
        assert run.resource_id == machine["id"]
        assert run.usd_per_hour == Decimal("4.00")
        assert run.provider_created_at == datetime.fromisoformat(machine["created_at"])
        assert run.provider_created_at <= run.terminate_asked_at <= run.gone_at
        assert (await bench.row("select outcome from provision_attempt")).outcome == "found"


@pytest.mark.slow
async def test_a_machine_whose_row_a_restore_lost_and_that_was_ended_without_a_store_has_its_run(
    bench: Bench, server: DevPostgres
):
    """Found by the seeds: its row was there, and is lost, which nobody can know while the store is away."""
    async with bench.running():
        claim = await bench.claim()
        rented = await bench.rented(claim)
        async with bench.engine.begin() as conn:
            await conn.execute(text("truncate rental, run cascade"))
        await asyncio.to_thread(server.stop)
        async with asyncio.timeout(15):
            while not (release := await bench.release_once(claim)).accepted:
                await asyncio.sleep(0.05)
        assert isinstance(release, Releasing)
        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))

    await asyncio.to_thread(server.start)
    async with bench.running():
        await bench.release(claim)

        (run,) = await bench.rows("select * from run")
        assert (run.resource_id, run.gone_at is not None) == (rented.ref.resource_id, True)


@pytest.mark.slow
async def test_a_machine_whose_order_was_answered_without_a_store_has_its_run_though_nobody_saw_it(
    bench: Bench, server: DevPostgres
):
    async with bench.running(list_rest_s=600, list_busy_s=600):
        claim = await bench.claim()
        _stop_after_the_answer(bench, claim, server)
        await bench.ensure_once(claim)
        (machine,) = await bench.cloud.machines()
        await bench.cloud.remove(machine["id"])

    await asyncio.to_thread(server.start)
    async with bench.running():
        await bench.release(claim)

        (run,) = await bench.rows("select * from run")
        assert (run.resource_id, run.terminate_asked_at) == (machine["id"], None)
        assert run.gone_at is not None


async def test_a_machine_ended_without_a_store_in_the_middle_of_a_release_has_its_run(
    bench: Bench, server: DevPostgres
):
    """By one and the same leader, who had looked at the claim before."""
    async with bench.running():
        claim = await bench.claim()
        await bench.ensure(claim)
        held = await bench.cloud.pause(verb="list")
        assert isinstance(await bench.release_once(claim), Releasing)
        attempt = await bench.row("select identity from provision_attempt where claim_uid = :u", u=claim.uid)
        extra = await bench.cloud.plant(name=attempt.identity, region="r1")
        await asyncio.to_thread(server.stop)
        await bench.cloud.resume(held)
        async with asyncio.timeout(15):
            while extra["id"] in [machine["id"] for machine in await bench.cloud.alive()]:
                await bench.release_once(claim)
                await asyncio.sleep(0.05)
        await asyncio.to_thread(server.start)
        back = datetime.now(UTC)

        await bench.release(claim)

        asked = {run.resource_id: run.terminate_asked_at for run in await bench.rows("select * from run")}
        assert len(asked) == 2
        assert asked[extra["id"]] < back


async def test_a_machine_that_nothing_can_take_down_is_ended_all_the_same(
    bench: Bench, server: DevPostgres, monkeypatch: pytest.MonkeyPatch
):
    """Neither a row nor the claim, for longer than is reasonable: what runs on is paid for."""

    class Full(ClaimDoor):
        async def remember(self, claim: ClaimSpec, memory: str, *, live: LiveClaim) -> None:
            raise ClaimUnreadable("metadata.annotations: Too long")

    async with bench.running():
        claim = await bench.claim()
        _stop_after_the_answer(bench, claim, server)
        await bench.ensure_once(claim)
        await bench.until(lambda: bool(bench.provisioning.inventory.of_claim(claim.uid)))
        door = Full(bench.kube.room("test"))
        for _ in range(2):
            await bench.provisioning.release(claim, port=door, reason="test")
            assert len(await bench.cloud.alive()) == 1

        monkeypatch.setattr(release, "UNTOLD_S", 0.0)
        await bench.provisioning.release(claim, port=door, reason="test")

        await bench.cloud.until(lambda truth: all(m["state"] == "gone" for m in truth["machines"]))
        await asyncio.to_thread(server.start)


async def test_a_machine_without_a_row_is_written_down_and_ended_though_the_api_server_is_away(bench: Bench):
    class Deaf(ClaimDoor):
        async def look(self, claim: ClaimSpec) -> LiveClaim | None:
            raise ClaimUnreadable("no answer")

    async with bench.running():
        claim = await bench.claim()
        await bench.rented(claim)
        attempt = await bench.row("select identity from provision_attempt where claim_uid = :u", u=claim.uid)
        await bench.release_once(claim)
    extra = await bench.cloud.plant(name=attempt.identity, region="r1")
    door = Deaf(bench.kube.room("test"))
    async with bench.running(), asyncio.timeout(15):
        while extra["id"] in [machine["id"] for machine in await bench.cloud.alive()]:
            await bench.provisioning.release(claim, port=door, reason="test")
            await asyncio.sleep(0.05)

        assert await bench.row("select 1 from run where resource_id = :id", id=extra["id"])


async def test_what_somebody_wrote_into_a_claims_memory_ends_nothing_and_is_billed_to_nobody(bench: Bench):
    """What another claim remembers of a machine, copied; and no text at all keeps the claim."""
    async with bench.running():
        victim = await bench.cloud.plant(name="training-7", region="r1")
        claim = await bench.claim()
        await bench.cloud.add_fault("lost", verb="create", times=1, when="before")
        await bench.ensure_once(claim)
        attempt = await bench.row("select identity from provision_attempt where claim_uid = :u", u=claim.uid)
        lies = [
            Unrecorded(
                ref=Ref(provider="fake", account="default", region="r1", resource_id=ResourceId(name)),
                identity=attempt.identity,
                meters=(Meter(kind=MeterKind.MACHINE, quantity=Decimal(1), usd=Decimal(100)),),
                created_at=None,
                account_id=None,
                shown=True,
            )
            for name in (victim["id"], "never-there", "x/y")
        ]
        live = await bench.door.look(claim)
        assert live is not None
        another = replace(claim, uid=ClaimUid(claim.pod_uid))
        await bench.door.remember(claim, encoded(lies, another, secret=b""), live=live)

        await bench.release(claim)

        assert [machine["id"] for machine in await bench.cloud.alive()] == [victim["id"]]
        assert await bench.rows("select 1 from run") == []
