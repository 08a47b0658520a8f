"""The database is empty, older, or somebody else's: live Pods stay, rows are made anew, nothing is swept."""

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.processes import free_ports
from tests.chaos.world import CLOUD, QUICK, World
from tests.support.clouds import FakeCloud


@pytest.mark.field_case("FC-010")
async def test_an_empty_database_gets_the_rows_of_live_pods_anew_and_holds_sweeps(world: World):
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("one", "two")
    await world.until_ready("one", "two")
    await world.stop(controller)
    before = await _statuses(world)

    world.database = await world.empty_database()
    await world.start(world.controller("fresh"))
    await world.until("each machine has its row", lambda: _runs(world, 2))

    assert await _held(world)
    assert await _statuses(world) == before
    await world.one_machine_for_each_pod(ever=2)
    await world.delete_pods("one", "two")
    await world.until_nothing_is_left()


async def test_an_empty_database_and_another_account_of_the_cloud_lose_no_pod(world: World, tmp_path: Path):
    """What the other account does not show is no proof: the claims' marks tell whose the machines are."""
    controller = world.controller()
    await world.start(controller)
    await world.create_pods("kept", "deleted")
    await world.until_ready("kept", "deleted")
    await world.stop(controller)
    before, database = (await world.pod("kept"))["status"], world.database

    world.database = await world.empty_database()
    async with FakeCloud.running(tmp_path / "other", scenario=CLOUD | {"account": "acct-2"}) as other:
        stray = world.controller("stray", cloud=other)
        await world.start(stray)
        await world.delete_pods("deleted")
        await world.until("the Pod says why it stays", lambda: _is_told(world, "acct-1"))
        lists = (await other.truth())["calls"]["list"]
        await other.until(
            lambda truth: truth["calls"]["list"] > lists + 8, within_s=60, what="eight more lists"
        )

        assert (await world.pod("kept"))["status"] == before
        assert len(await world.claims()) == len(await world.cloud.alive()) == 2
        assert await other.machines() == []
        await world.stop(stray)

    world.database = database
    await world.start(controller)
    await world.until("the deleted one is gone", lambda: _claims_are(world, 1))
    assert (await world.pod("kept"))["status"] == before
    await world.one_machine_for_each_pod(ever=2)


@pytest.mark.parametrize("how", ["emptied", "older"])
async def test_rows_lost_under_a_running_leader_are_made_anew_and_a_new_epoch_is_settled(
    world: World, how: str
):
    controller = world.controller(options=QUICK)
    await world.start(controller)
    await world.create_pod("old")
    await world.until_ready("old")
    await world.stop(controller)
    backup = await (world.empty_database() if how == "emptied" else world.copy_database("backup"))
    await world.start(controller)
    await world.create_pod("forgotten")
    await world.until_ready("forgotten")
    before, epoch = await _statuses(world), await world.lease_epoch()

    await world.put_back(backup)

    await world.until("each machine has its row again", lambda: _runs(world, 2))
    await world.until("one epoch on both sides", world.epoch_is_settled)
    assert await world.lease_epoch() > epoch
    assert await _held(world)
    await world.create_pod("new")
    await world.until_ready("new")
    after = await _statuses(world)
    assert {name: after[name] for name in before} == before
    await world.one_machine_for_each_pod(ever=3)
    assert controller.log.read_text().count('"event":"leading"') == 2  # the second start's term goes on
    await world.delete_pods("old", "forgotten", "new")
    await world.until_nothing_is_left()


async def test_an_epoch_that_the_store_lost_is_settled_again_in_the_same_term(world: World):
    controller = world.controller(options=QUICK)
    await world.start(controller)
    await world.create_pod("old")
    await world.until_ready("old")
    epoch = await world.lease_epoch()

    await world.rows("update installation set epoch = 0 returning epoch")

    await world.until("one epoch on both sides", world.epoch_is_settled)
    assert await world.lease_epoch() > epoch
    await world.create_pod("new")
    await world.until_ready("new")
    await world.one_machine_for_each_pod(ever=2)
    assert not await _held(world)
    assert controller.log.read_text().count('"event":"leading"') == 1


async def test_a_replica_whose_database_is_another_installations_says_so_and_takes_no_duties(
    world: World, tmp_path: Path
):
    await _make_foreign(world, foreign := await world.copy_database("foreign"))
    leader = world.controller("leader", options=QUICK)
    await world.start(leader)
    await world.until("it leads", lambda: world.leads("leader"))
    await world.create_pod("one")
    await world.until_ready("one")
    configured = await _configurations(world)

    async with FakeCloud.running(tmp_path / "other", scenario=CLOUD | {"account": "acct-2"}) as other:
        address = f"127.0.0.1:{free_ports(1)[0]}"
        stray = world.controller(
            "stray",
            webhook=address,
            options=QUICK | {"NEBULA_WEBHOOK_URL": f"https://{address}"},
            cloud=other,
            url=world.postgres.url_of(foreign),
        )
        await world.start(stray, wait=False)
        await world.until("it says whose database it has", lambda: _unready(stray.health_url, "abcdefghij"))
        await world.stop(leader)
        lists = (await world.cloud.truth())["calls"]["list"]
        await other.until(lambda truth: truth["calls"].get("offers", 0) > 8, within_s=60, what="eight offers")

        assert not await world.leads("stray")
        assert await _configurations(world) == configured
        assert '"event":"leading"' not in stray.log.read_text()
        assert '"level":"error"' in stray.log.read_text()
        assert (await other.truth())["calls"].get("list", 0) == 0
        assert (await world.cloud.truth())["calls"]["list"] == lists
        await world.start(leader)
        await world.until("the leader leads again", lambda: world.leads("leader"))
    await world.one_machine_for_each_pod(ever=1)


async def test_a_leader_whose_database_becomes_another_installations_stops_its_duties_until_it_is_ours(
    world: World,
):
    leader = world.controller("leader", options=QUICK)
    await world.start(leader)
    await world.create_pod("one")
    await world.until_ready("one")
    before = (await world.pod("one"))["status"]
    (ours,) = await world.rows("select id from installation")

    await world.rows("update installation set id = 'abcdefghij' returning id")
    await world.until("it does not lead", lambda: _leads_nobody(world))
    await world.create_pod("two")
    assert await _unready(leader.health_url, "abcdefghij")
    assert len(await world.cloud.creates()) == 1

    await world.rows(f"update installation set id = '{ours['id']}' returning id")
    await world.until_ready("one", "two")
    assert (await world.pod("one"))["status"] == before
    await world.one_machine_for_each_pod(ever=2)


async def _make_foreign(world: World, database: str) -> None:
    ours, world.database = world.database, database
    try:
        await world.rows("insert into installation (id, epoch) values ('abcdefghij', 7) returning id")
    finally:
        world.database = ours


async def _unready(health_url: str, word: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{health_url}/readyz") as answer:
            text = await answer.text()
            return answer.status == 503 and word in text
    except aiohttp.ClientError:
        return False


async def _leads_nobody(world: World) -> bool:
    lease = await world.kube.get(paths.lease(world.system, keys.LEASE_NAME))
    return not (lease.get("spec") or {}).get("holderIdentity")


async def _configurations(world: World) -> list[Any]:
    found = [
        await world.kube.get(path)
        for path in (
            paths.mutating_webhook(keys.MUTATING_WEBHOOK_CONFIGURATION),
            paths.validating_webhook(keys.VALIDATING_WEBHOOK_CONFIGURATION),
        )
    ]
    return [(each["metadata"]["uid"], each["webhooks"]) for each in found]


async def _is_told(world: World, word: str) -> bool:
    query = "involvedObject.name=deleted,reason=TerminateRetrying"
    events = await world.kube.get(paths.events(world.namespace), fieldSelector=query)
    return any(word in each.get("message", "") or word in each.get("note", "") for each in events["items"])


async def _held(world: World) -> bool:
    return bool(await world.rows("select 1 from installation where held_since is not null"))


async def _runs(world: World, count: int) -> bool:
    try:
        return len(await world.rows("select 1 from run")) == count
    except Exception:  # not migrated yet
        return False


async def _claims_are(world: World, count: int) -> bool:
    return len(await world.claims()) == count


async def _statuses(world: World) -> dict[str, Obj]:
    return {pod["metadata"]["name"]: pod["status"] for pod in await world.pods()}
