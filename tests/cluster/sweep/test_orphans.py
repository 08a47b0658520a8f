"""Machines of ours without an owner: found, told, held back by each rail, and ended. Nobody else's ever."""

from dataclasses import replace
from datetime import timedelta
from decimal import Decimal

import pytest
from sqlalchemy import text

from app.inventory.identity import new_installation
from app.kube import paths
from app.kube.claims import claim_spec
from app.provisioning.model import Policy, Rented
from app.store import findings
from app.store.engine import begin
from app.store.installation import get_or_create, next_epoch
from app.sweep.sweeper import AT_ONCE
from tests.cluster.sweep.conftest import KNOWN, QUICK, World
from tests.support import composed
from tests.support.clouds import SMALL
from tests.support.composed import WORKLOAD, until

SLOW_LISTS = {**SMALL, "lag": {"list_create_s": 2.0, "get_create_s": 0.0}}


async def test_an_orphan_is_found_explained_ended_and_its_end_is_proven(world: World):
    """The claim and every row are gone: somebody removed the finalizer after the store was restored."""
    async with world.leading(books=True) as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        await until(lambda: world.rows("select 1 from claim"), what="the claim is mirrored")
    await world.lose_rows()
    await world.remove_claim(claim)

    async with world.leading(books=True) as term:
        row = await world.blocked(machine, "fence")
        assert (row["kind"], row["decision"]) == ("no-claim", "blocked")
        await term.some_sweeps(5)
        assert machine in await world.alive()

        await world.confirm(machine)
        await world.until_gone(machine)
        closed = await world.finding(machine, open_=False)
        await until(lambda: world.rows("select 1 from ledger_run where billed_at is not null"), what="billed")

    assert closed["resolved_as"] == "gone"
    assert closed["executed_at"] < closed["gone_confirmed_at"] <= closed["resolved_at"]
    assert closed["cost_so_far"] > 0
    history = await world.rows(
        "select what from orphan_event where finding_id = :id order by id", id=closed["id"]
    )
    told = [event["what"] for event in history]
    assert told[0] == "found"
    assert told[-3:] == ["executing", "executed", "resolved"]
    (run,) = await world.rows("select * from run where resource_id = :id", id=machine)
    assert run["gone_at"] is not None
    (rental,) = await world.rows("select * from rental")
    assert rental["state"] == "ended"
    assert rental["ending_reason"] == f"orphan: finding {closed['id']}"
    # What it cost, to the cloud's own cent, is waste of the namespace that it belonged to.
    (lost,) = await world.rows("select reason, namespace, cost, instances from waste")
    (books,) = [one for one in await world.cloud.machines() if one["id"] == machine]
    assert (lost["reason"], lost["namespace"], lost["instances"]) == ("orphan", "sweep", 1)
    assert Decimal(books["bill_usd"]) > 0
    assert abs(lost["cost"] - Decimal(books["bill_usd"])) < Decimal("1e-15")  # a view divides, the ledger not


async def test_fc_016_orphans_07_two_installations_in_one_account_never_touch_each_other(world: World):
    """Same cluster name, namespaces and Pods; only the installation differs."""
    other = new_installation()
    theirs = await world.orphan(name=world.identity(installation=other))
    ours = await world.orphan()

    async with world.leading() as term:
        await world.until_gone(ours["id"])
        await term.some_sweeps()

        assert theirs["id"] in await world.alive()
        assert not await world.held()
        (run,) = await world.rows("select others from sweep_run order by id desc limit 1")
    assert other in {each["installation"] for each in run["others"]}
    assert not await world.rows("select 1 from orphan_finding where resource_id = :id", id=theirs["id"])


_FAULTS = [
    {"kind": "status", "status": 500, "verb": "list"},
    {"kind": "error_body", "verb": "list"},
]
_MORE_FAULTS = [
    {"kind": "truncate", "verb": "list", "keep": 1},
    {"kind": "garbage", "verb": "list"},
    {"kind": "missing_total", "verb": "list"},
    {"kind": "repeat_page", "verb": "list"},
    {"kind": "foreign", "verb": "list"},
    {"kind": "expired"},
]


@pytest.mark.parametrize(
    "fault",
    [*_FAULTS, *(pytest.param(fault, marks=pytest.mark.slow) for fault in _MORE_FAULTS)],
    ids=lambda fault: fault["kind"],
)
async def test_fc_013_orphans_05_a_list_that_is_not_whole_ends_nothing(
    world: World, fault: dict[str, object]
):
    async with world.leading() as term:
        await world.hold()
        orphan = await world.orphan()
        await world.finding(orphan["id"])
        broken = await world.cloud.add_fault(unlimited=True, **fault)
        await until(lambda: any(each.unknown for each in term.sweeper._lists.newest.values()))
        await world.confirm()
        await term.some_sweeps(10)
        assert orphan["id"] in await world.alive()
        assert (await world.finding(orphan["id"]))["blocked_by"] == "list"

        await world.cloud.clear_faults(broken)
        await world.until_gone(orphan["id"])


@pytest.mark.slow
async def test_orphans_06_an_empty_list_while_claims_exist_is_a_symptom(world: World):
    async with world.leading() as term:
        machines = [await term.parts.rent(await world.claim()) for _ in range(3)]
        await until(lambda: len(term.sweeper._lists.ids()) >= 3)
        empty = await world.cloud.add_fault("shrink", verb="list", keep=0, unlimited=True)
        await until(lambda: any(each.unknown for each in term.sweeper._lists.newest.values()))
        await term.some_sweeps()

        assert set(machines) <= await world.alive()
        assert not await world.rows("select 1 from orphan_finding where kind = 'claim-without-machine'")
        assert not await world.rows("select 1 from run where gone_at is not null")
        await world.cloud.clear_faults(empty)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [SLOW_LISTS], ids=["lists lag two seconds"])
async def test_fc_014_orphans_04_a_lagging_list_is_no_finding(world: World):
    async with world.leading(settle_after_s=3.0) as term:
        machine = await term.parts.rent(await world.claim())
        await term.some_sweeps(25)

        assert machine in await world.alive()
        assert not await world.rows("select 1 from orphan_finding where kind <> 'claim-without-pod'")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario", [{**SMALL, "lag": {"list_terminate_s": 2.0}}], ids=["lists lag behind terminate"]
)
async def test_orphans_04b_a_machine_that_is_gone_and_still_listed_is_no_finding(world: World):
    async with world.leading() as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        await world.remove_claim(claim)

        async def ended() -> bool:
            return bool(await world.rows("select 1 from rental where state = 'ended'"))

        await until(ended)
        await term.some_sweeps(10)
        assert not await world.rows("select 1 from orphan_finding where decided_by = 'sweep'")
        (run,) = await world.rows(
            "select terminate_asked_at, gone_at from run where resource_id = :m", m=machine
        )
        assert run["gone_at"] > run["terminate_asked_at"]


async def test_orphans_09_a_clone_of_cluster_and_database_only_reports(world: World):
    """The copy has the same installation id in its Secret and in its database: only the cluster differs."""
    async with begin(world.engine) as conn:
        await get_or_create(conn, new_id=world.installation)
        await conn.execute(text("update installation set cluster_uid = 'the-first-cluster'"))

    async with world.leading() as term:
        await until(world.held, what="the copy holds its sweeps")
        (held,) = await world.rows("select held_reason from installation")
        orphan = await world.orphan()
        row = await world.blocked(orphan["id"], "fence")
        await term.some_sweeps()

        assert row["decision"] == "blocked"
        assert "the-first-cluster" in held["held_reason"]
        assert orphan["id"] in await world.alive()

        await world.confirm()
        await world.until_gone(orphan["id"])


@pytest.mark.parametrize(
    ("verb", "when"),
    [
        pytest.param("get", "before", marks=pytest.mark.slow),
        pytest.param("terminate", "before", marks=pytest.mark.slow),
        ("terminate", "after"),
    ],
    ids=["before its rental is written", "before the terminate", "after the terminate"],
)
async def test_orphans_01_what_a_controller_that_dies_was_ending_the_next_one_ends(
    world: World, verb: str, when: str
):
    """The machine was decided upon, and that is on record; leaving a term forgets everything at once."""
    orphan = await world.orphan()
    held = await world.cloud.pause(verb=verb, when=when)
    async with world.leading():

        async def begun() -> bool:
            query = "select 1 from orphan_finding where executed_at is not null"
            return bool(await world.rows(query)) and verb in (await world.cloud.truth())["calls"]

        await until(begun, what="its end has begun")
    await world.cloud.resume(held)

    async with world.leading():
        await world.until_gone(orphan["id"])
        closed = await world.finding(orphan["id"], open_=False)
        assert closed["resolved_as"] == "gone"
    (run,) = await world.rows("select gone_at from run")
    assert run["gone_at"] is not None


@pytest.mark.slow
async def test_orphans_02_a_create_that_failed_and_made_a_machine_is_nobodys_orphan(world: World):
    async with world.leading() as term:
        await world.cloud.add_fault("status", verb="create", status=500, when="after")
        machine = await term.parts.rent(await world.claim())
        await term.some_sweeps()

        assert await world.alive() == {machine}
        assert not await world.rows("select 1 from orphan_finding where kind in ('no-claim', 'duplicate')")


@pytest.mark.slow
async def test_orphans_03_an_id_that_never_appears_is_told_and_rents_nothing_more(world: World):
    async with world.leading() as term:
        await world.cloud.add_fault("phantom", verb="create")
        claim = await world.claim()
        await term.parts.rent(claim)

        async def told() -> bool:
            return bool(await world.rows("select 1 from orphan_finding where kind = 'claim-without-machine'"))

        await until(told)
        assert await world.alive() == set()
        assert list((await world.cloud.creates()).values()) == [1]


async def test_orphans_08_a_database_from_an_hour_ago_holds_every_sweep(world: World):
    async with world.leading() as term:
        machines = [await term.parts.rent(await world.claim()) for _ in range(2)]
    await world.lose_rows()

    async with world.leading() as term:
        orphan = await world.orphan()
        await world.blocked(orphan["id"], "fence")
        await term.some_sweeps()

        assert {*machines, orphan["id"]} <= await world.alive()


async def test_an_orphan_whose_row_a_restore_has_lost_under_a_leader_ends_after_its_grace(world: World):
    """Its leader has told the store of it, and tells it again."""
    async with world.leading(sweep_margin_s=2.0) as term:
        orphan = await world.orphan()
        await world.blocked(orphan["id"], "grace")
        async with begin(world.engine) as conn:
            await conn.execute(text("delete from instance_seen"))
            term.parts.leader.epoch = await next_epoch(conn, term.parts.leader.epoch or 0)

        await world.until_gone(orphan["id"])


async def test_a_hold_that_a_person_has_lifted_stays_lifted_for_the_next_leader(world: World):
    """The machine that it was about is there still, and still has no row."""
    orphan = await world.orphan(name=world.identity(attempt=KNOWN + 1))
    async with world.leading(sweep_margin_s=60.0):
        await world.blocked(orphan["id"], "fence")
        await world.confirm(orphan["id"])

    async with world.leading(sweep_margin_s=60.0) as term:
        await world.blocked(orphan["id"], "grace")
        await term.some_sweeps(10)
        assert not await world.held()

        newer = await world.orphan(name=world.identity(attempt=KNOWN + 2))
        await until(world.held, what=f"the fence holds for {newer['id']}")


@pytest.mark.slow
async def test_orphans_11_a_hundred_at_once_wait_for_a_person_and_then_all_go(world: World):
    ids = [(await world.orphan(accelerator=None))["id"] for _ in range(100)]

    async with world.leading() as term:
        await world.blocked(ids[0], "ceiling")
        await term.some_sweeps()
        assert set(ids) <= await world.alive()

        async with begin(world.engine) as conn:
            open_ = await findings.history(conn)
            await findings.approve(conn, [row["id"] for row in open_], by="ada")
        await world.until_gone(*ids)

    approved = await world.rows(
        "select distinct approved_by from orphan_finding where resource_id = any(:i)", i=ids
    )
    assert [row["approved_by"] for row in approved] == ["ada"]


@pytest.mark.slow
async def test_orphans_11_an_approval_that_is_too_old_ends_nothing(world: World):
    ids = [(await world.orphan(accelerator=None))["id"] for _ in range(7)]
    async with world.leading() as term:
        await world.blocked(ids[0], "ceiling")
        async with begin(world.engine) as conn:
            await conn.execute(text("update orphan_finding set approved_at = now() - interval '61 minutes'"))
        await term.some_sweeps()

        assert set(ids) <= await world.alive()


@pytest.mark.parametrize(
    "name",
    [None, pytest.param("renamed", marks=pytest.mark.slow), pytest.param("cut", marks=pytest.mark.slow)],
    ids=["tag removed", "name edited", "cut to 20"],
)
async def test_orphans_12_13_a_machine_whose_identity_is_damaged_is_told_and_left(
    world: World, name: str | None
):
    async with world.leading() as term:
        await world.hold()
        orphan = await world.orphan()
        await world.finding(orphan["id"])
        await until(
            lambda: world.rows("select 1 from instance_seen where resource_id = :id", id=orphan["id"]),
            what="it was written down as ours",
        )
        await term.some_sweeps()
        await world.cloud.rename(orphan["id"], orphan["name"][:20] if name == "cut" else name)

        async def told() -> bool:
            rows = await world.rows(
                "select kind from orphan_finding where resource_id = :id", id=orphan["id"]
            )
            return "identity-damaged" in {row["kind"] for row in rows}

        await until(told)
        await world.confirm()
        await term.some_sweeps()
        assert orphan["id"] in await world.alive()


async def test_orphans_12_a_recorded_machine_whose_tag_is_gone_still_ends_with_its_claim(world: World):
    async with world.leading() as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        await until(lambda: machine in term.sweeper._lists.ids())
        await world.cloud.rename(machine, None)
        row = await world.finding(machine)
        assert (row["kind"], row["decided_by"]) == ("identity-damaged", "provisioning")

        await world.remove_claim(claim)
        await world.until_gone(machine)


async def test_orphans_15_a_claim_whose_finalizer_was_removed_by_hand_gives_its_machine_back(world: World):
    async with world.leading() as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        await world.remove_claim(claim)

        await world.until_gone(machine)
        await term.some_sweeps(5)
        assert not await world.rows("select 1 from orphan_finding where decided_by = 'sweep'")


@pytest.mark.slow
async def test_orphans_15_while_the_kind_itself_is_gone_no_machine_ends_and_afterwards_each_does(
    world: World,
):
    """Somebody has deleted the CRD, finalizers and all: that no claim can be read says nothing of any."""
    async with world.leading() as term:
        claim = await world.claim()
        machine, orphan = await term.parts.rent(claim), await world.orphan()
        try:
            path = paths.crd("nodeclaims.nebula.inftyai.com")
            await world.kube.patch(
                paths.nodeclaim(claim["metadata"]["name"]), {"metadata": {"finalizers": None}}, kind="merge"
            )
            await world.kube.delete(path)
            await until(lambda: _is_gone(world, path), what="the CRD is gone")
            await term.some_sweeps()
            assert {machine, orphan["id"]} <= await world.alive()
        finally:
            await composed.serve_our_kinds(world.kube)

        await world.until_gone(machine, orphan["id"])


async def _is_gone(world: World, path: str) -> bool:
    return await world.kube.find(path) is None


@pytest.mark.slow
@pytest.mark.field_case("FX-01")
async def test_orphans_16_a_terminate_that_fails_for_long_is_told_and_never_given_up(world: World):
    async with world.leading() as term:
        claim = await world.claim()
        machine = await term.parts.rent(claim)
        broken = await world.cloud.add_fault("status", verb="terminate", status=500, unlimited=True)
        await world.remove_claim(claim)

        row = await world.finding(machine)
        assert (row["kind"], row["why"]) == ("terminating-slow", "no terminate has been accepted yet")
        assert not await world.rows("select 1 from run where gone_at is not null")
        await world.cloud.clear_faults(broken)
        await world.until_gone(machine)
        assert (await world.finding(machine, open_=False))["resolved_as"] == "gone"


@pytest.mark.parametrize(
    "how",
    ["exit", pytest.param("preempt", marks=pytest.mark.slow)],
    ids=["17 stopped", "18 outbid"],
)
async def test_orphans_17_18_a_machine_that_stopped_and_still_bills_is_told(world: World, how: str):
    async with world.leading() as term:
        machine = await term.parts.rent(await world.claim())
        await (world.cloud.preempt(machine) if how == "preempt" else world.cloud.exit(machine, code=0))

        row = await world.finding(machine)
        assert row["kind"] == "stopped-billing"
        assert row["usd_per_hour"] == 4


@pytest.mark.field_case("FC-021")
async def test_orphans_19_machines_deleted_in_the_console_in_any_phase_are_told_and_their_runs_closed(
    world: World,
):
    async with world.leading() as term:
        machines = {}
        for phase, life in (
            ("booting", {"boot_s": 3600.0}),
            ("running", {"boot_s": 0.0}),
            ("exited", {"boot_s": 0.0}),
            ("ending", {"boot_s": 0.0}),
        ):
            await world.cloud.set_life(**life)
            claim = await world.claim()
            machines[phase] = await term.parts.rent(claim)
        await until(lambda: set(machines.values()) <= term.sweeper._lists.ids())
        await world.cloud.exit(machines["exited"], code=0)
        broken = await world.cloud.add_fault("status", verb="terminate", status=500, unlimited=True)
        await world.remove_claim(claim)  # the last one's
        await until(lambda: world.rows("select 1 from rental where state = 'ending'"), what="it is ending")
        for machine in machines.values():
            await world.cloud.remove(machine)
        await world.cloud.clear_faults(broken)

        async def told() -> bool:
            gone = await world.rows("select resource_id from run where gone_at is not null")
            lost = await world.rows("select 1 from orphan_finding where kind = 'claim-without-machine'")
            return {row["resource_id"] for row in gone} == set(machines.values()) and len(lost) == 3

        await until(told, what="every run is closed, and the three that have a claim are told")
        assert await world.rows("select state from rental where state = 'ending'") == []
        assert sum((await world.cloud.creates()).values()) == 4


@pytest.mark.parametrize(
    "scenario",
    [{**SMALL, "offers": [{**offer, "regions": ["r1"]} for offer in SMALL["offers"]]}],
    ids=["all is in r1"],
)
@pytest.mark.slow
async def test_orphans_in_a_region_that_nothing_offers_any_more_are_found(world: World):
    """Machines of ours were there once: so it is listed, whatever the pools may use now. And the rows know
    a later attempt, so that nobody has to confirm anything.
    """
    await world.remember(sequence=KNOWN + 2, region="r2")
    orphan = await world.orphan(region="r2", name=world.identity(attempt=KNOWN + 1))
    async with world.leading():
        await world.until_gone(orphan["id"])
        assert not await world.held()


@pytest.mark.slow
async def test_fc_017_what_no_row_remembers_is_found_in_the_clouds_own_list(world: World):
    async with world.leading() as term:
        claims = [await world.claim() for _ in range(5)]
        machines = [await term.parts.rent(claim) for claim in claims]
    await world.lose_rows()
    for claim in claims:
        await world.remove_claim(claim)

    async with world.leading():
        for machine in machines:
            await world.finding(machine)
        await world.confirm(*machines)
        await world.until_gone(*machines)


async def test_fc_018_a_machine_that_is_just_starting_is_left_alone(world: World):
    """Its claim, and every row of it, come late; the grace is longer than that."""
    async with world.leading(sweep_margin_s=30.0) as term:
        uid_claim = await world.claim()
        young = await world.orphan(name=world.identity(uid_claim["metadata"]["uid"]), state="booting")
        stranger = await world.orphan(state="booting")
        await world.blocked(stranger["id"], "grace")
        await term.some_sweeps()

        assert {young["id"], stranger["id"]} <= await world.alive()
        assert not await world.rows("select 1 from orphan_finding where resource_id = :id", id=young["id"])


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [{**SMALL, "page_size": 7}], ids=["pages of seven"])
async def test_fc_015_orphans_on_the_last_page_are_found(world: World):
    ids = [(await world.orphan(accelerator=None))["id"] for _ in range(25)]

    async with world.leading(sweep_max_machines=100):
        await world.until_gone(*ids)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", [{**SMALL, "quota_gpus": 8}], ids=["a quota of eight"])
async def test_fc_076_an_orphan_that_holds_the_quota_is_told_and_swept_and_the_next_claim_runs(world: World):
    async with world.leading() as term:
        await world.hold()
        orphan = await world.orphan()  # four GPUs are strangers', one is its
        claims = [await world.claim() for _ in range(4)]
        for claim in claims[:3]:
            await term.parts.rent(claim)
        refused = await term.parts.ensure(claims[3], ttl_s=0.1)
        assert getattr(refused, "kind", None) == "quota"
        await world.finding(orphan["id"])

        await world.confirm()
        await world.until_gone(orphan["id"])
        await term.parts.rent(await world.claim())


async def test_report_mode_ends_nothing_that_is_not_approved(world: World):
    orphan = await world.orphan()
    async with world.leading(sweep_mode="report") as term:
        row = await world.blocked(orphan["id"], "report")
        await term.some_sweeps()
        assert orphan["id"] in await world.alive()

        async with begin(world.engine) as conn:
            await findings.approve(conn, [row["id"]], by="ada")
        await world.until_gone(orphan["id"])


@pytest.mark.slow
async def test_the_first_time_after_an_install_only_tells(world: World):
    orphan = await world.orphan()
    async with world.leading(sweep_report_only_s=3600.0) as term:
        await world.blocked(orphan["id"], "report")
        await term.some_sweeps()

        assert orphan["id"] in await world.alive()


@pytest.mark.slow
async def test_orphans_10_a_leader_that_loses_the_lead_in_a_sweep_ends_nothing_more(world: World):
    ids = [(await world.orphan(accelerator=None))["id"] for _ in range(8)]
    async with world.leading(sweep_max_machines=20) as term:
        held = await world.cloud.pause(verb="terminate")
        await world.cloud.until(lambda truth: truth["calls"].get("terminate", 0) >= 1)
        term.parts.leader.leads = False
        await world.cloud.resume(held)

        async def some_ended() -> bool:
            return len(await world.alive()) <= 7

        await until(some_ended)
        begun = await world.rows("select 1 from orphan_finding where executed_at is not null")
        assert 1 <= len(begun) <= AT_ONCE
        assert len(await world.alive()) >= 8 - AT_ONCE

    async with world.leading(sweep_max_machines=20):
        await world.until_gone(*ids)


async def test_a_protected_machine_stays_and_is_shown_until_its_time_is_over(world: World):
    orphan = await world.orphan()
    async with begin(world.engine) as conn:
        await conn.execute(
            text("""
                insert into protection (provider, account, resource_id, until, reason, by)
                values ('fake', 'default', :id, now() + interval '1 hour', 'debugging', 'ada')
            """),
            {"id": orphan["id"]},
        )
    async with world.leading() as term:
        row = await world.blocked(orphan["id"], "protect")
        assert row["decision"] == "protect"
        await term.some_sweeps()
        assert orphan["id"] in await world.alive()

        async with begin(world.engine) as conn:
            await conn.execute(
                text(
                    "insert into protection (provider, account, resource_id, until, reason, by)"
                    " select provider, account, resource_id, now(), 'over', 'ada' from protection"
                )
            )
        await world.until_gone(orphan["id"])


async def test_the_history_of_a_finding_cannot_be_changed(world: World):
    orphan = await world.orphan()
    await world.hold()
    async with world.leading():
        await world.finding(orphan["id"])
    for statement in ("delete from orphan_event", "update orphan_event set what = 'nothing'"):
        with pytest.raises(Exception, match="append-only"):
            async with begin(world.engine) as conn:
                await conn.execute(text(statement))


async def test_the_bound_is_written_down_for_every_account(world: World):
    async with world.leading() as term:
        await term.some_sweeps(1)
        (run,) = await world.rows("select bounds from sweep_run order by id limit 1")

    grace = QUICK["call_timeout_s"] + QUICK["settle_after_s"] + QUICK["sweep_margin_s"]
    assert run["bounds"] == {
        "fake/default": pytest.approx(
            grace + 2 * QUICK["sweep_every_s"] + 2 * QUICK["list_rest_s"] + QUICK["call_timeout_s"]
        )
    }


@pytest.mark.slow
async def test_orphans_21_after_the_faults_ours_are_gone_within_the_bound_that_is_printed(world: World):
    """By the database's clock, from when the faults stop. Strangers' machines are `world`'s to look at."""
    async with world.leading(call_timeout_s=3.0, sweep_every_s=1.0) as term:
        ids = [(await world.orphan())["id"] for _ in range(4)]
        for fault in (
            {"kind": "status", "status": 500, "verb": "terminate"},
            {"kind": "garbage", "verb": "get"},
            {"kind": "truncate", "verb": "list", "keep": 2},
        ):
            await world.cloud.add_fault(unlimited=True, **fault)
        await until(lambda: any(each.unknown for each in term.sweeper._lists.newest.values()))
        await term.some_sweeps()
        assert set(ids) <= await world.alive()

        (calm,) = await world.rows("select clock_timestamp() as at")
        await world.cloud.clear_faults()
        gone = [(await world.finding(one, open_=False))["gone_confirmed_at"] for one in ids]

    (run,) = await world.rows("select bounds from sweep_run where bounds::text <> '{}' order by id limit 1")
    assert max(gone) - calm["at"] <= timedelta(seconds=run["bounds"]["fake/default"])


async def test_a_machines_own_limit_is_put_off_for_as_long_as_its_claim_lives(world: World):
    async with world.leading() as term:
        spec = claim_spec(await world.claim())
        outcome = await term.parts.provisioning.ensure(
            spec, replace(WORKLOAD, dead_man=True), port=term.parts.door, policy=Policy(block_ttl_s=30.0)
        )
        assert isinstance(outcome, Rented)

        await world.cloud.until(lambda truth: truth["calls"].get("extend", 0) >= 1, what="it is extended")
