"""Placement against a real API server, scheduler and Postgres."""

import asyncio
from uuid import uuid4

import pytest
from placement_world import FAST, INSTALLATION, UNTIL_CALLED, World, path_of, uid_of, until
from sqlalchemy import text

from app.api import keys
from app.api.binding import CloudPodBinding
from app.api.nodeclaim import NodeClaim
from app.kube import paths
from app.kube.client import Obj
from app.placement.objects import external_name
from app.store import blocks, decisions, installation, reservations
from app.store.engine import begin, connect, create_engine

ONE_PLACEMENT = ["POST nodeclaims", "POST cloudpodbindings", "PATCH pods"]


async def block(world: World, provider: str, *, ttl_s: float = UNTIL_CALLED, **axes: str) -> None:
    scope = blocks.Scope(provider=provider, account="default", everything=not axes, **axes)
    cause = blocks.Cause(
        kind="capacity", message="no", pool=world.pool, pod_namespace="n", pod_name="p", claim_uid="u"
    )
    async with begin(world.engine) as conn:
        await blocks.record(conn, scope, cause, ttl_s=ttl_s)


async def cordon(world: World, provider: str, *, on: bool) -> None:
    node = paths.node(keys.node_name(provider))
    await world.kube.patch(node, {"spec": {"unschedulable": on}}, kind="merge")


async def assert_placed_once(world: World, pod: Obj) -> None:
    """One claim, its binding, and a Pod that selects what the claim records."""
    living = await world.read(pod)
    claim = NodeClaim.model_validate(await world.claim_of(pod))
    (stored,) = await world.bindings_of(pod)
    binding = CloudPodBinding.model_validate(stored)

    assert living["spec"]["nodeSelector"] == keys.placement_labels(claim.spec.provider)
    assert not living["spec"].get("schedulingGates")
    assert keys.CLAIM_FINALIZER in claim.metadata.finalizers
    assert binding.spec.claim_name == claim.metadata.name
    assert stored["metadata"]["ownerReferences"][0]["uid"] == claim.metadata.uid
    assert binding.spec.provider == claim.spec.provider
    assert binding.spec.external_name == external_name(INSTALLATION, claim.metadata.uid)


# --- the plain way -------------------------------------------------------------------------------


@pytest.mark.behaviour(31, 60, 85, 86, 96)
async def test_a_placed_pod_is_bound_to_the_providers_node_for_three_writes(world: World):
    provider = await world.provider("r1")
    await world.make_pool(provider)

    async with world.placing() as running:
        pod = await world.pod("plain")
        living = await world.lifted(pod)

        async def bound() -> str | None:
            return (await world.read(pod))["spec"].get("nodeName")

        assert await until(bound) == keys.node_name(provider)
        assert running.wire.writes == ONE_PLACEMENT

    await assert_placed_once(world, pod)
    claim = NodeClaim.model_validate(await world.claim_of(pod))
    assert claim.spec.pod_ref.uid == uid_of(pod)
    assert (claim.spec.region, claim.spec.capacity_type, claim.spec.accelerator) == ("r1", "Spot", "h100:8")
    assert claim.metadata.labels == keys.claim_labels(
        pool=world.pool, provider=provider, account="default", installation=INSTALLATION
    )
    annotations = living["metadata"]["annotations"]
    assert annotations == {keys.CAPACITY_TYPE_ANNOTATION: "Spot", keys.REGION_ANNOTATION: "r1"}
    async with connect(world.engine) as conn:
        recorded = await decisions.latest(conn, uid_of(pod))
    assert recorded is not None
    assert (recorded.decision.outcome, recorded.decision.provider) == ("placed", provider)
    assert [row["tier"] for row in recorded.decision.candidates] == ["Spot", "OnDemand"]


@pytest.mark.behaviour(97, 98)
async def test_other_gates_and_selectors_of_the_pod_stay(world: World):
    provider = await world.provider()
    await world.make_pool(provider)
    await world.kube.patch(
        paths.node(keys.node_name(provider)), {"metadata": {"labels": {"disk": "ssd"}}}, kind="merge"
    )

    async with world.placing():
        pod = await world.pod(
            "gated", gates=("example.com/quota", keys.SCHEDULING_GATE), nodeSelector={"disk": "ssd"}
        )
        living = await world.lifted(pod)

    assert [gate["name"] for gate in living["spec"]["schedulingGates"]] == ["example.com/quota"]
    assert living["spec"]["nodeSelector"] == {"disk": "ssd", **keys.placement_labels(provider)}


@pytest.mark.behaviour(406, 407)
async def test_annotations_that_only_we_may_set_do_not_survive_placement(world: World):
    await world.make_pool(await world.provider())
    pod = await world.pod("dressed")
    forged = dict.fromkeys(keys.OWN_POD_ANNOTATIONS, "forged") | {"theirs": "kept"}
    await world.kube.patch(path_of(pod), {"metadata": {"annotations": forged}}, kind="merge")

    async with world.placing():
        living = await world.lifted(pod)

    assert living["metadata"]["annotations"] == {keys.CAPACITY_TYPE_ANNOTATION: "Spot", "theirs": "kept"}


@pytest.mark.behaviour(100, 101, 410)
async def test_what_a_user_edits_after_placement_changes_nothing(world: World):
    await world.make_pool(await world.provider("r1", "r2"))

    async with world.placing() as running:
        pod = await world.pod("edited")
        await world.lifted(pod)
        before = await world.claim_of(pod)
        edits = {
            "annotations": {keys.REGION_ANNOTATION: "r2", keys.CAPACITY_TYPE_ANNOTATION: "OnDemand"},
            "labels": {keys.NODE_POOL_LABEL: "elsewhere", keys.ACCELERATOR_TYPE_LABEL: "a100"},
        }
        await world.kube.patch(path_of(pod), {"metadata": edits}, kind="merge")
        await world.lifted(await world.pod("later"))  # its turn comes after the edit was seen

        assert running.wire.writes == ONE_PLACEMENT * 2
        assert await world.claim_of(pod) == before


# --- crashes -------------------------------------------------------------------------------------


@pytest.mark.behaviour(87, 88, 91, 99)
@pytest.mark.parametrize("after_effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("nth", [1, 2, 3], ids=["claim", "binding", "ungate"])
async def test_a_crash_at_any_write_leaves_one_claim_and_the_next_replica_goes_on_from_it(
    world: World, nth: int, after_effect: bool
):
    first, second = await world.provider(), await world.provider()
    await world.make_pool(first, second)
    async with world.placing() as running:
        running.wire.break_at(nth, after_effect=after_effect)
        pod = await world.pod("crashed")
        await asyncio.wait_for(running.wire.broken.wait(), timeout=20)
    claimed = bool(await world.claims_of(pod))
    await block(world, first)  # a ranking of the next replica would now choose the second provider

    async with world.placing():
        await world.lifted(pod)

    await assert_placed_once(world, pod)
    claim = await world.claim_of(pod)
    assert claim["spec"]["provider"] == (first if claimed else second)


async def test_a_lost_answer_makes_no_second_claim(world: World):
    await world.make_pool(await world.provider())

    async with world.placing() as running:
        running.wire.break_at(1, after_effect=True)
        pod = await world.pod("unanswered")
        await asyncio.wait_for(running.wire.broken.wait(), timeout=20)
        running.wire.broken.clear()
        await world.lifted(pod)

    await assert_placed_once(world, pod)


@pytest.mark.behaviour(61, 63)
@pytest.mark.field_case("FC-011", "FC-121")
async def test_two_replicas_that_both_believe_to_lead_place_each_pod_once(world: World):
    await world.make_pool(await world.provider(), await world.provider())

    async with world.placing(), world.placing():
        pods = await asyncio.gather(*(world.pod(f"contested-{n}") for n in range(8)))
        for pod in pods:
            await world.lifted(pod)

    for pod in pods:
        await assert_placed_once(world, pod)


async def test_of_two_claims_of_one_waiting_pod_the_younger_is_given_up(world: World):
    provider = await world.provider()
    await world.make_pool(provider)
    pod = await world.pod("twice")
    for name in ("a", "b"):
        ref = {"namespace": world.namespace, "name": "twice", "uid": uid_of(pod)}
        claim = {
            "apiVersion": keys.API_VERSION,
            "kind": keys.NODE_CLAIM,
            "metadata": {"name": f"{world.namespace}-{name}", "finalizers": [keys.CLAIM_FINALIZER]},
            "spec": {"podRef": ref, "provider": provider, "capacityType": "Spot"},
        }
        await world.kube.create(paths.nodeclaims(), claim)

    async with world.placing():
        await world.lifted(pod)

    leaving = {
        claim["metadata"]["name"]: "deletionTimestamp" in claim["metadata"]
        for claim in await world.claims_of(pod)
    }
    assert leaving == {f"{world.namespace}-a": False, f"{world.namespace}-b": True}


async def test_a_binding_of_an_earlier_claim_of_the_name_is_replaced(world: World):
    await world.make_pool(await world.provider())
    name = keys.claim_name(world.namespace, "again")
    spec = {"podRef": {"name": "again", "uid": "old"}, "claimName": name, "provider": "old"}
    left_over = {
        "apiVersion": keys.API_VERSION,
        "kind": keys.CLOUD_POD_BINDING,
        "metadata": {"name": name},
        "spec": spec,
    }
    await world.kube.create(paths.cloudpodbindings(world.namespace), left_over)

    async with world.placing():
        pod = await world.pod("again")
        await world.lifted(pod)

    await assert_placed_once(world, pod)


# --- names and incarnations ----------------------------------------------------------------------


@pytest.mark.behaviour(94, 95)
async def test_two_pods_whose_names_join_to_one_get_a_claim_each(world: World):
    await world.make_pool(await world.provider())
    short = f"j{uuid4().hex[:8]}"
    for name in (short, f"{short}-b"):
        world.extra_namespaces.append(name)
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
        await world.kube.create(paths.namespaces(), namespace)

    async with world.placing(everywhere=True):
        first = await world.pod("c", namespace=f"{short}-b")
        await world.lifted(first)
        second = await world.pod("b-c", namespace=short)
        await world.lifted(second)

    names = [(await world.claim_of(pod))["metadata"]["name"] for pod in (first, second)]
    assert names[0] == f"{short}-b-c"
    assert names[1].startswith(f"{short}-b-c-")
    await assert_placed_once(world, first)
    await assert_placed_once(world, second)


@pytest.mark.behaviour(89)
@pytest.mark.field_case("FC-028", "FC-062")
async def test_a_new_pod_of_the_name_waits_until_the_older_ones_claim_is_gone(world: World):
    await world.make_pool(await world.provider())

    async with world.placing():
        older = await world.pod("ordinal-0")
        await world.lifted(older)
        claim = await world.claim_of(older)
        await world.kube.delete(path_of(older), grace_s=0)
        newer = await world.pod("ordinal-0")
        condition = await world.told(newer, "StaleClaim")

        assert claim["metadata"]["name"] in condition["message"]
        assert not await world.claims_of(newer)
        await world.release(claim)
        await world.lifted(newer)

    await assert_placed_once(world, newer)


# --- waiting and waking --------------------------------------------------------------------------


@pytest.mark.behaviour(54)
async def test_a_blocked_provider_is_passed_over(world: World):
    first, second = await world.provider(), await world.provider()
    await world.make_pool(first, second)
    await block(world, first, tier="Spot")

    async with world.placing():
        pod = await world.pod("moved")
        await world.lifted(pod)

    claim = await world.claim_of(pod)
    assert (claim["spec"]["provider"], claim["spec"]["capacityType"]) == (second, "Spot")


@pytest.mark.behaviour(55, 83)
async def test_a_pod_whose_places_are_all_blocked_says_so_and_goes_on_when_a_person_clears_them(world: World):
    provider = await world.provider()
    await world.make_pool(provider)
    await block(world, provider)

    async with world.placing() as running:
        pod = await world.pod("blocked")
        condition = await world.told(pod, "AllBlocked")
        assert condition["status"] == "False"
        assert condition["message"].startswith("0 of 2 candidates: 2 blocked until ")
        async with begin(world.engine) as conn:
            await blocks.clear(conn, provider=provider)
        living = await world.lifted(pod)

        assert running.wire.writes == [
            "PATCH pods/status",
            *ONE_PLACEMENT[:2],
            "PATCH pods/status",
            "PATCH pods",
        ]
    conditions = {each["type"]: each for each in living["status"]["conditions"]}
    assert conditions["nebula.inftyai.com/Placed"]["status"] == "True"


@pytest.mark.behaviour(55)
async def test_a_block_that_lapses_frees_the_pod_without_any_event(world: World):
    provider = await world.provider()
    await world.make_pool(provider)

    async with world.placing():
        await world.lifted(await world.pod("first"))  # so that the block is not over before anybody looks
        await block(world, provider, ttl_s=1.5)
        pod = await world.pod("patient")
        await world.lifted(pod)

    async with connect(world.engine) as conn:
        outcomes = [row.decision.outcome for row in await decisions.history(conn, uid_of(pod))]
    assert outcomes == ["placed", "all_blocked"]


@pytest.mark.behaviour(33, 35)
async def test_a_pool_that_comes_later_wakes_the_pods_that_name_it(world: World):
    provider = await world.provider()

    async with world.placing():
        pod = await world.pod("early")
        await world.told(pod, "NoPool")
        await world.make_pool(provider)
        await world.lifted(pod)


@pytest.mark.behaviour(36, 40)
async def test_an_edited_pool_wakes_its_pods(world: World):
    served, unknown = await world.provider(), f"p-{uuid4().hex[:8]}"
    await world.make_pool(unknown)

    async with world.placing():
        pod = await world.pod("stuck")
        condition = await world.told(pod, "NoCandidate")
        assert f"{unknown} Spot: no such account is open" in condition["message"]
        entries = {"spec": {"providers": [{"name": served}]}}
        await world.kube.patch(paths.nodepool(world.pool), entries, kind="merge")
        await world.lifted(pod)


async def test_a_cordoned_node_stops_its_provider_until_it_is_uncordoned(world: World):
    first, second = await world.provider(), await world.provider()
    await world.make_pool(first, second)
    await cordon(world, first, on=True)

    async with world.placing():
        pod = await world.pod("diverted")
        await world.lifted(pod)
        assert (await world.claim_of(pod))["spec"]["provider"] == second
        await cordon(world, second, on=True)
        waiting = await world.pod("waiting")
        condition = await world.told(waiting, "NoCandidate")
        assert "is cordoned" in condition["message"]
        await cordon(world, first, on=False)
        await world.lifted(waiting)

    assert (await world.claim_of(waiting))["spec"]["provider"] == first


@pytest.mark.behaviour(58)
async def test_an_account_that_opens_later_wakes_the_pods(world: World):
    provider = await world.provider()
    (known,) = world.offerings
    world.offerings.drop(provider, "default")
    await world.make_pool(provider)

    async with world.placing():
        pod = await world.pod("hopeful")
        await world.told(pod, "NoCandidate")
        world.offerings.put(provider, "default", traits=known.traits, offerings=known.offerings)
        await world.lifted(pod)


async def test_an_invalid_request_is_told_and_never_placed(world: World):
    await world.make_pool(await world.provider())

    async with world.placing():
        pod = await world.pod("typeless", labels={keys.ACCELERATOR_TYPE_LABEL: ""})
        condition = await world.told(pod, "InvalidRequest")

    assert keys.ACCELERATOR_TYPE_LABEL in condition["message"]
    assert not await world.claims_of(pod)


@pytest.mark.behaviour(411)
async def test_a_pod_that_is_opted_out_while_it_waits_gets_an_event(world: World):
    async with world.placing():
        pod = await world.pod("deserter")
        await world.told(pod, "NoPool")
        await world.kube.patch(
            path_of(pod), {"metadata": {"labels": {keys.ENABLED_LABEL: None}}}, kind="merge"
        )

        await until(lambda: event(world, pod, "OptedOut"))


async def event(world: World, pod: Obj, reason: str) -> Obj | None:
    page = await world.kube.get(paths.events(world.namespace))
    return next(
        (
            each
            for each in page["items"]
            if each["reason"] == reason and each["involvedObject"]["uid"] == uid_of(pod)
        ),
        None,
    )


# --- who may place -------------------------------------------------------------------------------


@pytest.mark.parametrize("claimed", [False, True], ids=["nothing-yet", "claim-exists"])
async def test_without_the_database_no_claim_is_made_and_no_gate_lifted(world: World, claimed: bool):
    await world.make_pool(await world.provider())
    pod = await world.pod("offline")
    if claimed:
        async with world.placing() as running:
            running.wire.break_at(2, after_effect=False)
            await asyncio.wait_for(running.wire.broken.wait(), timeout=20)
    nowhere = create_engine("postgresql://nobody@127.0.0.1:1/nothing")

    async with world.placing(engine=nowhere) as running:
        condition = await world.told(pod, "OnHold")
        assert "database" in condition["message"]
        assert running.wire.writes == ["PATCH pods/status"]
    await nowhere.dispose()

    async with world.placing():
        await world.lifted(pod)
    await assert_placed_once(world, pod)


async def test_nothing_is_placed_at_an_epoch_that_the_database_does_not_know(world: World):
    await world.make_pool(await world.provider())

    async with world.placing() as running:
        running.term.epoch = None
        pod = await world.pod("early-leader")
        await world.told(pod, "OnHold")
        assert not await world.claims_of(pod)
        running.term.epoch = world.epoch + 1  # of the Lease; the store comes after
        async with begin(world.engine) as conn:
            await installation.set_epoch_at_least(conn, running.term.epoch)
        await world.lifted(pod)


async def test_a_store_that_was_emptied_gets_the_decisions_on_gated_pods_and_what_claims_take_again(
    world: World,
):
    provider = await world.provider()
    await world.make_pool(provider, limits={"gpus": 8})
    async with world.placing() as running:
        holder = await world.pod("holder")
        await world.lifted(holder)
        pods = {
            "waits": await world.pod("waits"),
            "lost": await world.pod("lost", labels={keys.NODE_POOL_LABEL: "nowhere"}),
        }
        await world.told(pods["waits"], "NoCandidate")
        await world.told(pods["lost"], "NoPool")

        async with begin(world.engine) as conn:
            await conn.execute(text("truncate placement_decision, reservation"))
            running.term.epoch = await installation.next_epoch(conn, world.epoch)

        async def known() -> dict[str, tuple[str, str]] | None:
            found = {}
            async with connect(world.engine) as conn:
                for name, pod in pods.items():
                    row = await decisions.latest(conn, uid_of(pod))
                    if row is None:
                        return None
                    found[name] = (row.decision.outcome, row.decision.message)
            return found

        assert await until(known) == {
            "waits": ("no_candidate", ""),
            "lost": ("no_pool", "NodePool nowhere does not exist"),
        }
        async with connect(world.engine) as conn:
            taken = await reservations.load(conn, pool=world.pool)
        assert [row.pod_uid for row in taken] == [uid_of(holder)]


async def test_a_hold_stops_sweeps_and_not_placement(world: World):
    await world.make_pool(await world.provider())
    async with begin(world.engine) as conn:
        await installation.hold(conn, "rows are missing")

    async with world.placing():
        await world.lifted(await world.pod("placed"))


async def test_a_replica_whose_term_is_over_writes_nothing(world: World):
    await world.make_pool(await world.provider())

    async with world.placing() as deposed:
        deposed.term.leads = False
        pod = await world.pod("not-mine")
        async with world.placing():
            await world.lifted(pod)
        assert deposed.wire.writes == []


async def test_a_term_that_may_not_act_for_a_while_goes_on_afterwards(world: World):
    await world.make_pool(await world.provider())

    async with world.placing() as running:
        running.term.leads = False
        pod = await world.pod("suspended")
        await until(running.term.was_asked)
        running.term.leads = True
        await world.lifted(pod)
        assert running.wire.writes == ONE_PLACEMENT


async def test_the_first_moments_of_a_term_without_an_epoch_are_no_news_to_pods(world: World):
    await world.make_pool(await world.provider())
    pod = await world.pod("fresh")

    async with world.placing() as running:
        running.term.epoch = None
        await until(running.term.was_asked)
        running.term.epoch = world.epoch
        await world.lifted(pod)
        assert running.wire.writes == ONE_PLACEMENT


# --- placed and not bound ------------------------------------------------------------------------


async def test_an_owned_pod_that_is_never_bound_makes_way_and_its_claim_is_released(world: World):
    await world.make_pool(await world.provider())
    async with world.placing(settings=FAST.model_copy(update={"unbound_after_s": 0.5})):
        pod = await world.pod("too-large", cpu="5000")

        async def gone() -> bool:
            return await world.kube.find(path_of(pod)) is None

        await until(gone)

        async def leaving() -> bool:
            return "deletionTimestamp" in (await world.claim_of(pod))["metadata"]

        await until(leaving)
        told = await until(lambda: event(world, pod, "NotBound"))
        assert "not bound within 0.5 s" in told["message"]
