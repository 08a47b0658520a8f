"""How long a claim lives, and that its finalizer outlives its machine."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from app.api.keys import CLAIM_FINALIZER, ENABLED_LABEL
from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.client import Kube, Obj
from app.store.devserver import DevPostgres
from app.store.engine import create_engine
from app.store.migrate import migrate
from tests.cluster.claims.conftest import World, conditions
from tests.support import composed, postgres
from tests.support.clouds import SMALL, FakeCloud
from tests.support.composed import Composed, until


async def bound(world: World, term: Composed, name: str) -> tuple[Obj, Obj]:
    """A Pod and its claim, with a machine."""
    pod = await world.pod(name)
    claim = await world.claim(pod)
    await term.rent(claim)
    await world.until_phase(claim, "Bound")
    return pod, claim


@pytest.mark.behaviour(286, 299)
async def test_a_pod_that_is_gone_takes_its_machine_claim_and_binding_with_it(world: World):
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")

        await world.remove_pod(pod)

        await world.until_gone(claim)
        assert await world.cloud.alive() == []
        name = claim["metadata"]["name"]

        async def collected() -> bool:
            return await world.kube.find(paths.cloudpodbinding(world.namespace, name)) is None

        await until(collected)


@pytest.mark.behaviour(279)
async def test_one_life_costs_four_writes_and_no_more(world: World):
    """Bound on claim and binding, then the claim's deletion and its finalizer, and no status of an ending."""
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
        await until(lambda: len(world.written.writes) == 2)

        await world.remove_pod(pod)
        await world.until_gone(claim)

    name = claim["metadata"]["name"]
    assert world.written.writes == [
        f"PATCH nodeclaims/{name}/status",
        f"PATCH namespaces/{world.namespace}/cloudpodbindings/{name}/status",
        f"DELETE nodeclaims/{name}",
        f"PATCH nodeclaims/{name}",
    ]
    assert world.written.pods_read == []  # the watch has shown the Pod's last state


@pytest.mark.behaviour(281)
@pytest.mark.field_case("FC-028")
async def test_a_pod_of_the_same_name_takes_over_nothing_and_loses_nothing(world: World):
    """It was replaced while nobody looked: under the old Pod's name there is a Pod, but another one."""
    async with world.leading() as term:
        old_pod, old = await bound(world, term, "a")
    await world.remove_pod(old_pod)
    new_pod = await world.pod("a")

    async with world.leading() as term:
        new = await world.claim(new_pod, name=f"{old['metadata']['name']}-2")
        machine = await term.rent(new)
        await world.until_phase(new, "Bound")

        await world.until_gone(old)
        assert [each["id"] for each in await world.cloud.alive()] == [machine]
        assert (await world.status(new))["phase"] == "Bound"


async def test_a_label_taken_off_a_pod_releases_nothing_and_its_later_end_is_seen(world: World):
    """The watch of opted-in Pods tells of a deletion; only the server knows better."""
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
        uid = pod["metadata"]["uid"]

        no_label = {"metadata": {"labels": {ENABLED_LABEL: None}}}
        await world.kube.patch(paths.pod(world.namespace, "a"), no_label, kind="merge")
        await until(lambda: term.pods.by_uid(uid) is None)
        _, other = await bound(world, term, "b")  # whoever was woken has been looked at since
        assert "deletionTimestamp" not in (await world.live(claim) or {"metadata": {}})["metadata"]
        assert len(await world.cloud.alive()) == 2

        await world.remove_pod(pod)  # nothing is watched that could tell
        await world.until_gone(claim)
        assert (await world.status(other))["phase"] == "Bound"


async def test_a_label_taken_off_a_gated_pod_gives_its_machine_back(world: World):
    """Nobody lifts its gate any more, so the machine that Reserve has rented for it would wait for ever."""
    async with world.leading() as term:
        pod = await world.pod("a", node=None)
        claim = await world.claim(pod)
        await term.rent(claim)

        no_label = {"metadata": {"labels": {ENABLED_LABEL: None}}}
        await world.kube.patch(paths.pod(world.namespace, "a"), no_label, kind="merge")

        await world.until_gone(claim)
        assert await world.cloud.alive() == []
        assert await world.kube.find(paths.pod(world.namespace, "a")) is not None


@pytest.mark.behaviour(287, 288)
async def test_a_claim_whose_pod_was_never_seen_waits_for_it_and_then_goes(world: World):
    pod = await world.pod("a")
    await world.remove_pod(pod)
    async with world.leading(first_seen_grace_s=3600.0):
        early = await world.claim(pod, bound=False)
        marker = await world.claim(await world.pod("b"), name=f"{world.namespace}-marker")
        await world.kube.delete(paths.nodeclaim(marker["metadata"]["name"]))
        await world.until_gone(marker)  # made after it, and already dealt with
        assert "deletionTimestamp" not in (await world.live(early) or {})["metadata"]

    async with world.leading(first_seen_grace_s=0.1):
        await world.until_gone(early)


@pytest.mark.behaviour(292, 300)
async def test_a_claim_deleted_by_hand_ends_its_machine_while_its_pod_lives(world: World):
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")

        await world.kube.delete(paths.nodeclaim(claim["metadata"]["name"]))

        await world.until_gone(claim)
        assert await world.cloud.alive() == []
        assert await world.kube.find(paths.pod(world.namespace, "a"))
        assert term.provisioning.view(claim["metadata"]["uid"]).state is None  # forgotten: nothing asks again
        del pod


@pytest.mark.behaviour(294, 296)
async def test_the_finalizer_stays_while_the_cloud_cannot_end_the_machine(world: World):
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
        await world.cloud.add_fault("status", verb="terminate", status=500, unlimited=True)

        await world.remove_pod(pod)
        await world.until_phase(claim, "Terminating")  # it lasts, so it shows
        live = await world.live(claim)
        assert live is not None
        assert live["metadata"]["finalizers"] == [CLAIM_FINALIZER]
        assert len(await world.cloud.alive()) == 1

        await world.cloud.clear_faults()
        await world.until_gone(claim)
        assert await world.cloud.alive() == []


@pytest.mark.behaviour(297)
@pytest.mark.field_case("FC-024")
async def test_a_claim_of_a_provider_not_configured_any_more_is_kept_and_says_so(
    world: World, tmp_path: Path
):
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
    async with (
        FakeCloud.running(tmp_path / "other", scenario=SMALL) as other,
        world.leading(clouds={"aws": other}),
    ):
        await world.remove_pod(pod)

        async def told() -> tuple[str, str] | None:
            return conditions(await world.status(claim)).get("Released")

        assert await until(told) == ("False", "ProviderNotConfigured")
        live = await world.live(claim)
        assert live is not None
        assert live["metadata"]["finalizers"] == [CLAIM_FINALIZER]
        assert len(await world.cloud.alive()) == 1

        async def event() -> bool:
            query = f"involvedObject.uid={claim['metadata']['uid']},reason=ProviderNotConfigured"
            return bool((await world.kube.get(paths.events(), fieldSelector=query))["items"])

        await until(event)

    async with world.leading():  # configured again
        await world.until_gone(claim)
        assert await world.cloud.alive() == []


@pytest.mark.field_case("FC-065")
async def test_a_claim_that_cannot_be_read_keeps_its_finalizer(world: World):
    async with world.leading():
        claim = await world.claim(await world.pod("a"), accelerator="many H100s")
        await world.kube.delete(paths.nodeclaim(claim["metadata"]["name"]))

        async def event() -> bool:
            query = f"involvedObject.uid={claim['metadata']['uid']},reason=UnreadableClaim"
            return bool((await world.kube.get(paths.events(), fieldSelector=query))["items"])

        await until(event)
        live = await world.live(claim)
        assert live is not None
        assert live["metadata"]["finalizers"] == [CLAIM_FINALIZER]


# --- without a database ---------------------------------------------------------------------------


@pytest.fixture
def own_postgres() -> Iterator[DevPostgres]:
    """A server that the test may stop."""
    with postgres.server() as started:
        yield started


@pytest.fixture
async def apart(
    kube: Kube, own_postgres: DevPostgres, cloud: FakeCloud
) -> AsyncIterator[tuple[World, DevPostgres]]:
    """As ``world``, on a database of its own."""
    await migrate(own_postgres.url)
    engine = create_engine(own_postgres.url, pool_size=8)
    await composed.purge_claims(kube)
    namespace = await composed.a_namespace(kube, "claims")
    world = World(kube=kube, engine=engine, cloud=cloud, namespace=namespace, installation=new_installation())
    yield world, own_postgres
    await composed.purge_claims(kube)
    await kube.delete(paths.namespace(namespace))
    await engine.dispose()


async def test_without_a_store_the_machine_ends_and_the_finalizer_waits(apart: tuple[World, DevPostgres]):
    world, store = apart
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
        store.stop()

        await world.remove_pod(pod)

        await world.cloud.until(lambda truth: all(each["state"] == "gone" for each in truth["machines"]))
        await world.until_phase(claim, "Terminating")
        live = await world.live(claim)
        assert live is not None
        assert live["metadata"]["finalizers"] == [CLAIM_FINALIZER]

        store.start()
        await world.until_gone(claim)


async def test_a_leader_that_starts_without_a_store_ends_machines_by_the_claims_status(
    apart: tuple[World, DevPostgres],
):
    world, store = apart
    async with world.leading() as term:
        pod, claim = await bound(world, term, "a")
    store.stop()
    await world.remove_pod(pod)

    async with world.leading(epoch=False):
        await world.cloud.until(lambda truth: all(each["state"] == "gone" for each in truth["machines"]))
        assert (await world.live(claim) or {})["metadata"]["finalizers"] == [CLAIM_FINALIZER]
    store.start()
    async with world.leading():
        await world.until_gone(claim)
