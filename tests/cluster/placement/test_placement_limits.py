"""Limits, prices, shares and who may spend, against a real API server and Postgres."""

import asyncio
from decimal import Decimal

import pytest
from placement_world import H100X8, World, path_of, uid_of, until
from sqlalchemy import text

from app.api import keys
from app.kube import paths
from app.kube.client import Obj
from app.placement import objects
from app.placement.desk import Desk, Seen
from app.placement.rank import Candidate
from app.placement.request import PlacementRequest
from app.store import decisions, reservations
from app.store.engine import begin, connect
from app.store.reservations import Reservation
from providers.base import PodUid, Tier, Traits

MAX_PRICE = "cloud.aibrix.ai/max-price"


async def rows(world: World) -> list[Reservation]:
    async with connect(world.engine) as conn:
        return list(await reservations.load(conn, pool=world.pool))


async def taken_by(world: World, pods: list[Obj]) -> int:
    """GPUs of all claims that these Pods have."""
    claims = [claim for pod in pods for claim in await world.claims_of(pod)]
    return sum(objects.reservation_of(claim).gpus for claim in claims)


async def placed(world: World, pods: list[Obj]) -> list[Obj]:
    """Those whose gate is off."""
    living = [await world.read(pod) for pod in pods]
    return [pod for pod in living if not pod["spec"].get("schedulingGates")]


async def settled(world: World, pods: list[Obj]) -> list[Obj]:
    """The Pods that were placed, once each of the others has been told why it waits."""

    async def all_looked_at() -> list[Obj] | None:
        lifted = await placed(world, pods)
        waiting = [pod for pod in pods if uid_of(pod) not in {uid_of(each) for each in lifted}]
        for pod in waiting:
            conditions = (await world.read(pod)).get("status", {}).get("conditions") or ()
            if not any(each.get("reason") == "NoCandidate" for each in conditions):
                return None
        return lifted

    found: list[Obj] = await until(all_looked_at)
    return found


# --- limits --------------------------------------------------------------------------------------


@pytest.mark.field_case("FC-075")
async def test_500_pods_at_once_do_not_pass_a_limit_whoever_leads(world: World):
    """Two leaders of one epoch, which is more than there can be, decide for 500 Pods side by side."""

    class Leads:
        epoch = world.epoch

        def valid(self) -> bool:
            return True

    limit, first = (
        20 * 8,
        Candidate(provider="acme", account="default", region="", tier=Tier.SPOT, accelerator=H100X8),
    )

    async def decide(desk: Desk, number: int) -> bool:
        uid = PodUid(f"u-{number}")
        request = PlacementRequest(namespace="team", name=f"p-{number}", uid=uid, accelerator=H100X8)

        def judge(seen: Seen) -> tuple[bool, None]:
            if seen.promises.usage(world.pool).gpus + 8 > limit:
                return False, None
            promise = objects.promised(request, first, pool=world.pool, name=f"team-p-{number}")
            seen.promises.reserve(promise)
            return True, None

        return await desk.look(judge, pool=world.pool)

    desks = [Desk(world.engine, term=Leads(), renewed=lambda: None) for _ in range(2)]
    working = [asyncio.create_task(desk.run()) for desk in desks]
    try:
        said = await asyncio.gather(*(decide(desks[number % 2], number) for number in range(500)))
    finally:
        for task in working:
            task.cancel()

    assert said.count(True) == 20
    assert sum(row.gpus for row in await rows(world)) == limit


@pytest.mark.field_case("FC-075")
async def test_pods_that_come_at_once_stay_within_the_gpus_of_the_pool(world: World):
    await world.make_pool(await world.provider(), limits={"gpus": 24})

    async with world.placing():
        pods = await asyncio.gather(*(world.pod(f"many-{n}") for n in range(8)))
        lifted = await settled(world, list(pods))

        assert len(lifted) == 3
        assert await taken_by(world, list(pods)) == 24
        waiting = next(pod for pod in pods if uid_of(pod) not in {uid_of(each) for each in lifted})
        condition = await world.told(waiting, "NoCandidate")
        assert "24 GPUs of limits.gpus 24 are taken, and it asks for 8" in condition["message"]


async def test_the_end_of_a_claim_lets_the_next_pod_in_at_once(world: World):
    await world.make_pool(await world.provider(usd="10"), limits={"usdPerHour": "25"})

    async with world.placing():
        pods = [await world.pod(f"queued-{n}") for n in range(3)]
        lifted = await settled(world, pods)
        assert len(lifted) == 2
        claim = await world.claim_of(lifted[0])
        assert claim["spec"]["maxPrice"] == "10.00"
        await world.kube.delete(path_of(lifted[0]), grace_s=0)
        await world.release(claim)

        async def third() -> bool:
            left = [pod for pod in pods if uid_of(pod) != uid_of(lifted[0])]
            return len(await placed(world, left)) == 2

        await until(third)
        assert sum((row.usd_per_hour or 0) for row in await rows(world)) == Decimal(20)


async def test_a_machine_that_turned_out_cheaper_leaves_room_at_once(world: World):
    provider = await world.provider(usd="10")
    await world.make_pool(provider, maxPrice="20")

    async with world.placing():
        first = await world.pod("dear-in-theory")
        await world.lifted(first)
        claim = await world.claim_of(first)
        assert claim["spec"]["maxPrice"] == "20.00"
        limit = {"spec": {"limits": {"usdPerHour": "25"}}}
        await world.kube.patch(paths.nodepool(world.pool), limit, kind="merge")
        second = await world.pod("next")
        condition = await world.told(second, "NoCandidate")
        assert "$20.00 of limits.usdPerHour $25.00 are taken" in condition["message"]

        await rented_at(world, claim, usd="9")
        status = {"status": {"phase": "Bound"}}
        path = f"{paths.nodeclaim(claim['metadata']['name'])}/status"
        await world.kube.patch(path, status, kind="merge")
        await world.lifted(second)


async def rented_at(world: World, claim: Obj, *, usd: str) -> None:
    """What provisioning writes when it has the machine."""
    spec, uid = claim["spec"], uid_of(claim)
    values = {
        "uid": uid,
        "name": claim["metadata"]["name"],
        "pod": spec["podRef"]["uid"],
        "pool": world.pool,
        "provider": spec["provider"],
        "usd": Decimal(usd),
    }
    async with begin(world.engine) as conn:
        await conn.execute(
            text("""
                insert into rental (claim_uid, claim_name, pod_namespace, pod_name, pod_uid, pool, provider,
                    account, region, tier, accelerator, state, epoch, resource_id)
                values (:uid, :name, 'n', 'p', :pod, :pool, :provider, 'default', '', 'Spot', 'h100:8',
                    'live', 1, 'i-1')
            """),
            values,
        )
        await conn.execute(
            text("""
                insert into run (claim_uid, attempt, provider, account, resource_id, region, tier,
                    accelerator, pool, pod_namespace, pod_name, pod_uid, usd_per_hour)
                values (:uid, 1, :provider, 'default', 'i-1', '', 'Spot', 'h100:8', :pool, 'n', 'p', :pod,
                    :usd)
            """),
            values,
        )


async def test_a_raised_limit_wakes_the_pods_that_wait_for_it(world: World):
    await world.make_pool(await world.provider(), limits={"gpus": 4})

    async with world.placing():
        pod = await world.pod("too-large")
        condition = await world.told(pod, "NoCandidate")
        assert condition["message"].endswith(
            "the NodePool can never serve this Pod as both are now: change one of them"
        )
        limit = {"spec": {"limits": {"gpus": 8}}}
        await world.kube.patch(paths.nodepool(world.pool), limit, kind="merge")
        await world.lifted(pod)


@pytest.mark.parametrize("after_effect", [False, True], ids=["not-made", "made-unheard"])
async def test_a_crash_between_the_promise_and_the_claim_takes_no_more_than_the_claim(
    world: World, after_effect: bool
):
    await world.make_pool(await world.provider(), limits={"gpus": 8})
    async with world.placing() as running:
        running.wire.break_at(1, after_effect=after_effect)
        pod = await world.pod("crashed")
        await asyncio.wait_for(running.wire.broken.wait(), timeout=20)
    assert len(await rows(world)) == 1

    async with world.placing():
        await world.lifted(pod)
        second = await world.pod("second")
        await world.told(second, "NoCandidate")

    (row,) = await rows(world)
    assert row.key == objects.reservation_of(await world.claim_of(pod)).key


async def test_what_was_promised_to_a_pod_that_is_gone_is_given_back(world: World):
    await world.make_pool(await world.provider(), limits={"gpus": 8})

    async with world.placing() as running:
        running.wire.break_at(1, after_effect=False)
        gone = await world.pod("gone")
        await asyncio.wait_for(running.wire.broken.wait(), timeout=20)
        next_one = await world.pod("next")

        async def looked_at() -> bool:
            async with connect(world.engine) as conn:
                return bool(await decisions.history(conn, uid_of(next_one)))

        await until(looked_at)
        await world.kube.delete(path_of(gone), grace_s=0)

        async def given_back() -> bool:
            return uid_of(gone) not in [row.pod_uid for row in await rows(world)]

        await until(given_back)
        running.wire.mend()
        await world.lifted(next_one)

    assert [row.pod_uid for row in await rows(world)] == [uid_of(next_one)]


async def test_claims_count_again_for_a_database_that_has_lost_their_rows(world: World):
    await world.make_pool(await world.provider(), limits={"gpus": 16})
    async with world.placing():
        first = await world.pod("first")
        await world.lifted(first)
    async with begin(world.engine) as conn:
        assert await reservations.keep_only(conn, set()) == 1

    async with world.placing():
        pods = [await world.pod(f"later-{n}") for n in range(2)]
        assert len(await settled(world, pods)) == 1


async def test_a_claim_that_comes_to_light_counts(world: World):
    """A former leader's last create arrives after the list that the new one began with."""
    provider = await world.provider()
    await world.make_pool(provider, limits={"gpus": 8})

    async with world.placing():
        name = keys.claim_name(world.namespace, "former")
        ref = {"namespace": world.namespace, "name": "former", "uid": "u-former"}
        claim = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "metadata": {"name": name, "finalizers": [keys.CLAIM_FINALIZER]},
            "spec": {"podRef": ref, "poolRef": world.pool, "provider": provider, "accelerator": "h100:8"},
        }
        made = await world.kube.create(paths.nodeclaims(), claim)

        async def counted() -> bool:
            return [row.claim_uid for row in await rows(world)] == [uid_of(made)]

        await until(counted)
        pod = await world.pod("latter")
        await world.told(pod, "NoCandidate")
        await world.release(made)
        await world.lifted(pod)


# --- prices --------------------------------------------------------------------------------------


@pytest.mark.behaviour(64)
async def test_lowest_price_goes_where_it_is_cheapest_now(world: World):
    first, second = await world.provider(usd="20"), await world.provider(usd="30")
    await world.make_pool(first, second, strategy="LowestPrice")

    async with world.placing():
        before = await world.pod("before")
        await world.lifted(before)
        world.offer(first, usd="31")
        after = await world.pod("after")
        await world.lifted(after)

    claims = [await world.claim_of(pod) for pod in (before, after)]
    assert [claim["spec"]["provider"] for claim in claims] == [first, second]
    async with connect(world.engine) as conn:
        row = await decisions.latest(conn, uid_of(after))
    assert row is not None
    prices = [(place["provider"], place["tier"], place["price"]) for place in row.decision.candidates]
    assert prices == [
        (name, tier, usd) for tier in ("Spot", "OnDemand") for name, usd in ((second, "30"), (first, "31"))
    ]


@pytest.mark.behaviour(66)
async def test_the_pods_own_ceiling_is_frozen_on_the_claim_and_never_raises_the_pools(world: World):
    await world.make_pool(await world.provider(usd="10"), maxPrice="25")

    async with world.placing():
        lower = await world.pod("lower", annotations={MAX_PRICE: "12.5"})
        higher = await world.pod("higher", annotations={MAX_PRICE: "90"})
        for pod in (lower, higher):
            await world.lifted(pod)

    assert (await world.claim_of(lower))["spec"]["maxPrice"] == "12.50"
    assert (await world.claim_of(higher))["spec"]["maxPrice"] == "25.00"


@pytest.mark.behaviour(66)
async def test_a_pod_waits_for_a_price_and_goes_when_it_falls(world: World):
    provider = await world.provider(usd="30")
    await world.make_pool(provider, maxPrice="25")

    async with world.placing():
        pod = await world.pod("patient")
        condition = await world.told(pod, "NoCandidate")
        assert "$30.00 an hour, at most $25.00 by the pool's maxPrice" in condition["message"]
        world.offer(provider, usd="24.99")
        await world.lifted(pod)


async def test_a_ceiling_that_its_author_raises_while_the_pod_waits_is_looked_at_at_once(world: World):
    await world.make_pool(await world.provider(usd="10"))

    async with world.placing():
        pod = await world.pod("stingy", annotations={MAX_PRICE: "1"})
        condition = await world.told(pod, "NoCandidate")
        assert f"at most $1.00 by annotation {MAX_PRICE}" in condition["message"]
        await world.kube.patch(path_of(pod), {"metadata": {"annotations": {MAX_PRICE: "10"}}}, kind="merge")
        await world.lifted(pod)


async def test_a_ceiling_that_is_no_price_is_an_invalid_request(world: World):
    await world.make_pool(await world.provider(usd="10"))

    async with world.placing():
        pod = await world.pod("odd", annotations={MAX_PRICE: "cheap"})
        condition = await world.told(pod, "InvalidRequest")

    assert MAX_PRICE in condition["message"]
    assert not await world.claims_of(pod)


# --- shares --------------------------------------------------------------------------------------


@pytest.mark.behaviour(64)
async def test_a_burst_of_pods_is_shared_out_by_weight(world: World):
    """None of the claims needs to have been seen for the next decision to count it."""
    heavy, light = await world.provider(), await world.provider()
    await world.make_pool({"name": light, "weight": 1}, {"name": heavy, "weight": 3}, strategy="Weighted")

    async with world.placing():
        pods = await asyncio.gather(*(world.pod(f"shared-{n}") for n in range(8)))
        for pod in pods:
            await world.lifted(pod)

    went = [(await world.claim_of(pod))["spec"]["provider"] for pod in pods]
    assert (went.count(heavy), went.count(light)) == (6, 2)


# --- who may spend -------------------------------------------------------------------------------


async def test_a_namespace_may_spend_once_its_labels_say_so(world: World):
    await world.make_pool(
        await world.provider(), namespaceSelector={"matchLabels": {"team": world.namespace}}
    )

    async with world.placing():
        pod = await world.pod("outsider")
        condition = await world.told(pod, "NoCandidate")
        assert f"does not select namespace {world.namespace}" in condition["message"]
        labels = {"metadata": {"labels": {"team": world.namespace}}}
        await world.kube.patch(paths.namespace(world.namespace), labels, kind="merge")
        await world.lifted(pod)


# --- what no place can serve ---------------------------------------------------------------------


@pytest.mark.behaviour(42, 57)
async def test_a_spot_only_pool_of_providers_without_spot_leaves_the_pod_gated_and_says_so(world: World):
    provider = await world.provider(traits=Traits(tiers=frozenset({Tier.ON_DEMAND})))
    await world.make_pool(provider, capacityTypes=["Spot"])

    async with world.placing():
        pod = await world.pod("spot-only")
        condition = await world.told(pod, "NoCandidate")

    assert "it sells no Spot machines" in condition["message"]
    assert not await world.claims_of(pod)


@pytest.mark.behaviour(308)
async def test_an_unknown_provider_in_the_list_does_not_stop_the_others(world: World):
    await world.make_pool("never-heard-of", await world.provider())

    async with world.placing():
        await world.lifted(await world.pod("served"))


@pytest.mark.behaviour(90)
async def test_a_claim_that_takes_the_name_and_vanishes_again_costs_no_more_than_a_look(world: World):
    provider = await world.provider()
    await world.make_pool(provider)
    name = keys.claim_name(world.namespace, "ghost")
    ref = {"namespace": world.namespace, "name": "ghost", "uid": "an-older-pod"}
    older = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.NODE_CLAIM,
        "metadata": {"name": name},
        "spec": {"podRef": ref, "provider": provider},
    }

    async with world.placing() as running:
        wire = running.wire

        async def appear(write: str) -> None:
            if write == "POST nodeclaims":
                wire.before = None
                await world.kube.create(paths.nodeclaims(), older)

        async def vanish(write: str) -> None:
            if write == "POST nodeclaims":
                wire.after = None
                await world.kube.delete(paths.nodeclaim(name))

        wire.before, wire.after = appear, vanish
        pod = await world.pod("ghost")
        await world.lifted(pod)

    assert (await world.claim_of(pod))["metadata"]["name"].startswith(name)
    assert len(await rows(world)) == 1


async def test_a_limit_that_is_reached_is_told_of_the_pool(world: World):
    provider = await world.provider()
    pool = await world.make_pool(provider, limits={"gpus": 8})
    pods = [await world.pod(name) for name in ("one", "two")]
    async with world.placing():
        await settled(world, pods)

        async def told() -> list[Obj]:
            query = f"involvedObject.uid={uid_of(pool)},reason=LimitReached"
            return (await world.kube.get(paths.events(), fieldSelector=query))["items"]

        (event,) = await until(told)

    assert event["type"] == "Warning"
    assert event["message"] == (
        "a Pod waits for the pool's limit: 8 GPUs of limits.gpus 8 are taken, and it asks for 8"
    )
