"""Rows that others write often: only differences are written, and nothing goes back in time."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from app.store import decisions, installation, mirrored, rounds, seen
from app.store.decisions import Decision
from app.store.engine import begin
from app.store.installation import NotInstalled
from app.store.mirrored import BindingRow, ClaimRow
from app.store.rounds import Round
from app.store.seen import Seen

T0 = datetime(2026, 1, 1, tzinfo=UTC)


async def rows(engine: AsyncEngine, table: str, columns: str = "*") -> list[dict[str, Any]]:
    async with begin(engine) as conn:
        found = await conn.execute(
            text(f"select xmin::text as xmin, {columns} from {table} order by 2, 3, 4")
        )
        return [dict(row) for row in found.mappings()]


def a_claim(uid: str = "c-1", version: int = 10, **changes: Any) -> ClaimRow:
    row = ClaimRow(
        uid=uid,
        name=f"default-{uid}",
        pod_namespace="default",
        pod_name="p",
        pod_uid="p-1",
        pool="gpu",
        provider="modal",
        account="default",
        region="us",
        tier="Spot",
        accelerator="H100:8",
        phase="Provisioning",
        instance_id=None,
        resource_version=version,
        created_at=T0,
        deleting_since=None,
    )
    return replace(row, **changes)


def a_binding(uid: str = "b-1", version: int = 10, **changes: Any) -> BindingRow:
    row = BindingRow(
        uid=uid,
        namespace="default",
        name=uid,
        claim_name="default-c-1",
        pod_uid="p-1",
        provider="modal",
        account="default",
        region="us",
        tier="Spot",
        external_name=None,
        phase="Provisioning",
        instance_id=None,
        endpoint=None,
        usd_per_hour=Decimal("1.10"),
        conditions=({"type": "Ready", "status": "False"},),
        resource_version=version,
        created_at=T0,
    )
    return replace(row, **changes)


async def upsert(engine: AsyncEngine, *given: ClaimRow) -> list[str]:
    async with begin(engine) as conn:
        return await mirrored.upsert_claims(conn, given)


async def test_a_newer_version_is_written_and_an_older_never(engine: AsyncEngine) -> None:
    assert await upsert(engine, a_claim(version=10)) == ["c-1"]
    assert await upsert(engine, a_claim(version=12, phase="Bound")) == ["c-1"]
    assert await upsert(engine, a_claim(version=11, phase="Provisioning")) == []

    [row] = await rows(engine, "claim")
    assert (row["phase"], row["resource_version"]) == ("Bound", 12)


async def test_an_unchanged_claim_is_not_written_at_all(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim(), a_claim("c-2"))
    before = await rows(engine, "claim")

    assert await upsert(engine, a_claim(), a_claim("c-2")) == []

    assert await rows(engine, "claim") == before


async def test_versions_are_numbers_and_not_texts(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim(version=999))
    assert await upsert(engine, a_claim(version=1000)) == ["c-1"]


async def test_of_one_claim_twice_in_a_batch_the_newest_is_written(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim(version=12, phase="Bound"), a_claim(version=11))

    [row] = await rows(engine, "claim")
    assert row["phase"] == "Bound"


async def test_a_batch_writes_only_its_differences(engine: AsyncEngine) -> None:
    many = [a_claim(f"c-{n:04}", version=10) for n in range(1500)]
    await upsert(engine, *many)
    many[7] = replace(many[7], phase="Bound", resource_version=11)
    many.append(a_claim("new"))

    assert sorted(await upsert(engine, *many)) == ["c-0007", "new"]


async def test_a_gone_claim_keeps_its_row_and_its_first_moment(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim())
    assert await upsert(engine, a_claim(gone=True)) == ["c-1"]
    [first] = await rows(engine, "claim")

    assert await upsert(engine, a_claim(gone=True)) == []
    assert await upsert(engine, a_claim(version=11, gone=True, phase="Terminated")) == ["c-1"]

    [second] = await rows(engine, "claim")
    assert first["gone_at"] not in (None, T0)
    assert second["gone_at"] == first["gone_at"]


async def test_a_claim_that_came_and_went_unseen_is_still_recorded(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim(gone=True))

    [row] = await rows(engine, "claim")
    assert row["gone_at"] is not None


async def test_what_a_complete_list_lacks_is_marked_gone_once(engine: AsyncEngine) -> None:
    await upsert(engine, a_claim(), a_claim("c-2"), a_claim("c-3", gone=True))
    async with begin(engine) as conn:
        assert await mirrored.present_claims(conn) == {"c-1", "c-2"}
        assert await mirrored.mark_claims_gone(conn, ["c-2", "c-3", "unheard-of"]) == ["c-2"]
        assert await mirrored.mark_claims_gone(conn, []) == []
        assert await mirrored.present_claims(conn) == {"c-1"}


async def test_bindings_are_guarded_like_claims(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        assert await mirrored.upsert_bindings(conn, [a_binding()]) == ["b-1"]
        assert await mirrored.upsert_bindings(conn, [a_binding()]) == []
        assert await mirrored.upsert_bindings(conn, [a_binding(version=9, phase="old")]) == []
        newer = a_binding(version=11, conditions=({"type": "Ready", "status": "True"},))
        assert await mirrored.upsert_bindings(conn, [newer]) == ["b-1"]
        assert await mirrored.present_bindings(conn) == {"b-1"}
        assert await mirrored.mark_bindings_gone(conn, ["b-1"]) == ["b-1"]

    [row] = await rows(engine, "binding")
    assert row["conditions"] == [{"type": "Ready", "status": "True"}]
    assert row["usd_per_hour"] == Decimal("1.10")


async def test_writers_in_opposite_order_do_not_deadlock(engine: AsyncEngine) -> None:
    many = [a_claim(f"c-{n:04}", version=1) for n in range(300)]
    await upsert(engine, *many)

    async def writer(n: int) -> None:
        batch = [replace(row, resource_version=n + 2, phase=str(n)) for row in many]
        await upsert(engine, *(batch if n % 2 else reversed(batch)))

    await asyncio.gather(*(writer(n) for n in range(6)))

    assert {row["resource_version"] for row in await rows(engine, "claim")} == {7}


# --- machines that clouds have shown ---


def a_machine(resource_id: str = "i-1", **changes: Any) -> Seen:
    machine = Seen(
        provider="aws", account="default", resource_id=resource_id, region="eu-west-1", state="booting"
    )
    return replace(machine, **changes)


async def see(engine: AsyncEngine, *machines: Seen) -> list[str]:
    async with begin(engine) as conn:
        return [key[2] for key in await seen.record(conn, machines)]


async def test_a_machine_is_written_only_when_it_changes(engine: AsyncEngine) -> None:
    assert await see(engine, a_machine(), a_machine("i-2")) == ["i-1", "i-2"]
    before = await rows(engine, "instance_seen")

    assert await see(engine, a_machine(), a_machine("i-2")) == []
    assert await rows(engine, "instance_seen") == before
    assert await see(engine, a_machine(state="running"), a_machine("i-2")) == ["i-1"]

    [first, second] = await rows(engine, "instance_seen")
    assert first["state"] == "running"
    assert first["first_seen_at"] == before[0]["first_seen_at"] < first["changed_at"]
    assert second == before[1]


async def test_what_says_whose_a_machine_is_is_never_forgotten(engine: AsyncEngine) -> None:
    """A list that leaves the tag out for a while shows the same machine."""
    ours = a_machine(identity="nb-x", claim_uid="c-1", attempt=1, sequence=7, host="h", endpoint="1.2.3.4")
    await see(engine, ours)

    assert await see(engine, a_machine(endpoint="1.2.3.4")) == []
    assert await see(engine, a_machine(endpoint=None)) == ["i-1"]

    async with begin(engine) as conn:
        assert await seen.of_claim(conn, "c-1") == [replace(ours, endpoint=None)]


async def test_a_tag_that_comes_late_is_taken_on(engine: AsyncEngine) -> None:
    await see(engine, a_machine())
    assert await see(engine, a_machine(identity="nb-x", claim_uid="c-1")) == ["i-1"]


async def test_absence_has_a_first_moment_and_ends_when_the_machine_is_shown(engine: AsyncEngine) -> None:
    await see(engine, a_machine(), a_machine("i-2"))

    async def absent(since: datetime, *ids: str) -> list[str]:
        async with begin(engine) as conn:
            return await seen.mark_absent(
                conn, provider="aws", account="default", resource_ids=ids, since=since
            )

    assert await absent(T0, "i-2", "i-9") == ["i-2"]
    assert await absent(T0 + timedelta(hours=1), "i-2") == []
    assert await absent(T0) == []
    async with begin(engine) as conn:
        [left] = await seen.present(conn, provider="aws", account="default")
    assert left.resource_id == "i-1"
    assert [row["absent_since"] for row in await rows(engine, "instance_seen")] == [None, T0]

    assert await see(engine, a_machine("i-2")) == ["i-2"]

    async with begin(engine) as conn:
        assert len(await seen.present(conn, provider="aws", account="default")) == 2


# --- rounds ---


def a_round(minute: int, **changes: Any) -> Round:
    began = T0 + timedelta(minutes=minute)
    made = Round(
        provider="aws",
        account="default",
        region="eu",
        complete=True,
        reason=None,
        account_id="1",
        machines=3,
        began_at=began,
        ended_at=began + timedelta(seconds=1),
    )
    return replace(made, **changes)


async def test_like_rounds_are_one_stretch_and_a_change_begins_another(engine: AsyncEngine) -> None:
    unknown = {"complete": False, "reason": "page 2 failed"}
    async with begin(engine) as conn:
        await rounds.record(conn, [a_round(2), a_round(1), a_round(0), a_round(0, region="us")])
        await rounds.record(conn, [a_round(3), a_round(4, **unknown)])
        await rounds.record(conn, [a_round(5, **unknown), a_round(6)])
        await rounds.record(conn, [])
        newest = await rounds.latest(conn, provider="aws", account="default")

    found = [row for row in await rows(engine, "list_round", "id, *") if row["region"] == "eu"]
    assert [(row["complete"], row["rounds"]) for row in found] == [(True, 4), (False, 2), (True, 1)]
    assert (found[0]["began_at"], found[0]["last_began_at"]) == (T0, T0 + timedelta(minutes=3))
    assert found[0]["last_ended_at"] == T0 + timedelta(minutes=3, seconds=1)
    assert [(stretch.region, stretch.rounds) for stretch in newest] == [("eu", 1), ("us", 1)]


async def test_the_newest_stretch_of_a_place_is_kept_however_old(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await rounds.record(conn, [a_round(0), a_round(1, machines=4), a_round(0, region="us")])
        assert await rounds.prune(conn, older_than_s=0) == 1
        assert await rounds.prune(conn, older_than_s=0) == 0
        newest = await rounds.latest(conn, provider="aws", account="default")
    assert [(stretch.region, stretch.machines) for stretch in newest] == [("eu", 4), ("us", 3)]


# --- decisions ---

CANDIDATES = ({"provider": "modal", "usd_per_hour": Decimal("0.10"), "skip": "blocked"},)


def a_decision(**changes: Any) -> Decision:
    made = Decision(
        pod_namespace="default",
        pod_name="p",
        pod_uid="p-1",
        outcome="no_capacity",
        pool="gpu",
        candidates=CANDIDATES,
    )
    return replace(made, **changes)


async def test_a_character_that_no_column_takes_costs_no_other_pod_its_look(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await decisions.record(conn, [a_decision(message="a\0b"), a_decision(pod_uid="p-2")])
        odd, other = await decisions.latest(conn, "p-1"), await decisions.latest(conn, "p-2")

    assert odd is not None
    assert odd.decision.message == "ab"
    assert other is not None


async def test_equal_looks_in_a_row_are_one_row(engine: AsyncEngine) -> None:
    placed = a_decision(outcome="placed", claim_uid="c-1", provider="modal", usd_per_hour=Decimal("0.10"))
    async with begin(engine) as conn:
        await decisions.record(conn, [a_decision(), a_decision(), a_decision(pod_uid="p-2")])
        await decisions.record(conn, [a_decision()])
        await decisions.record(conn, [placed])
        await decisions.record(conn, [a_decision()])
        await decisions.record(conn, [])
        found = await decisions.history(conn, "p-1")
        latest = await decisions.latest(conn, "p-1")

    assert [(it.decision.outcome, it.looks) for it in found] == [
        ("no_capacity", 1),
        ("placed", 1),
        ("no_capacity", 3),
    ]
    assert latest == found[0]
    assert found[1].decision.usd_per_hour == Decimal("0.10")
    assert found[2].decision.candidates == [{"provider": "modal", "usd_per_hour": "0.10", "skip": "blocked"}]
    assert found[2].decided_at < found[2].last_decided_at < found[1].decided_at


async def test_another_price_is_another_decision(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await decisions.record(conn, [a_decision()])
        dearer = ({**CANDIDATES[0], "usd_per_hour": Decimal("0.11")},)
        await decisions.record(conn, [a_decision(candidates=dearer)])
        assert len(await decisions.history(conn, "p-1")) == 2


async def test_a_pod_never_looked_at_has_no_decision(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        assert await decisions.latest(conn, "p-1") is None


async def test_old_decisions_are_forgotten_in_batches(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await decisions.record(conn, [a_decision(pod_uid=f"p-{n}") for n in range(3)])
    async with begin(engine) as conn:
        assert await decisions.prune(conn, older_than_s=3600) == 0
        assert await decisions.prune(conn, older_than_s=0, batch=2) == 2
        assert await decisions.prune(conn, older_than_s=0, batch=2) == 1


# --- the installation ---


async def test_of_two_that_begin_at_once_both_get_one_installation(engine: AsyncEngine) -> None:
    async def begins(new_id: str) -> str:
        async with begin(engine) as conn:
            return (await installation.get_or_create(conn, new_id=new_id)).id

    found = await asyncio.gather(*(begins(f"id{n:08}") for n in range(5)))

    assert len(set(found)) == 1
    assert await begins("another") == found[0]


async def test_the_epoch_is_above_the_leases_and_the_stores(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="a")
        assert await installation.next_epoch(conn, 0) == 1
        assert await installation.next_epoch(conn, 7) == 8
        assert await installation.next_epoch(conn, 2) == 9
        assert await installation.set_epoch_at_least(conn, 3) == 9
        assert await installation.set_epoch_at_least(conn, 12) == 12
        found = await installation.get(conn)
    assert found is not None
    assert found.epoch == 12


async def test_no_two_leaders_get_one_epoch(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="a")

    async def lead() -> int:
        async with begin(engine) as conn:
            return await installation.next_epoch(conn, 0)

    assert sorted(await asyncio.gather(*(lead() for _ in range(20)))) == list(range(1, 21))


async def test_an_epoch_without_an_installation_is_refused(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        assert await installation.get(conn) is None
        for call in (
            installation.next_epoch(conn, 1),
            installation.set_epoch_at_least(conn, 1),
            installation.hold(conn, "x"),
            installation.held(conn),
        ):
            with pytest.raises(NotInstalled):
                await call


async def test_the_first_reason_to_hold_stays_until_a_person_confirms(engine: AsyncEngine) -> None:
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="a")
        assert await installation.held(conn) is None
        first = await installation.hold(conn, "sequence 9 above 7")
        assert await installation.hold(conn, "another") == first
        assert await installation.held(conn) == first
        assert first is not None
        assert first.reason == "sequence 9 above 7"
        assert await installation.release_hold(conn) is True
        assert await installation.release_hold(conn) is False
        assert await installation.held(conn) is None


async def test_what_a_person_has_confirmed_holds_nothing_again_and_what_comes_after_it_does(
    engine: AsyncEngine,
):
    shown = Seen(
        provider="modal", account="default", resource_id="m", region="r1", state="running", sequence=12
    )
    async with begin(engine) as conn:
        await installation.get_or_create(conn, new_id="7fq3ab5c2x")
        assert await installation.hold(conn, "machine m carries 9", sequence=9) is not None
        await installation.hold(conn, "machine n carries 7", sequence=7)
        await seen.record(conn, [shown])  # listed when the person looks
        assert await installation.release_hold(conn)

        for confirmed in (7, 9, 12):
            assert await installation.hold(conn, "seen again", sequence=confirmed) is None
        assert await installation.held(conn) is None
        assert await installation.hold(conn, "never seen before", sequence=13) is not None
        assert await installation.release_hold(conn)
        assert await installation.hold(conn, "no number was named") is not None


@pytest.mark.parametrize("table", ["claim", "binding", "instance_seen"])
async def test_a_batch_is_a_few_statements_and_not_one_a_row(engine: AsyncEngine, table: str) -> None:
    """A parameter outside VALUES would make SQLAlchemy send each row alone, twenty times slower."""
    sent: list[str] = []

    @event.listens_for(engine.sync_engine, "before_cursor_execute")
    def count(conn: Any, cursor: Any, statement: str, *_: Any) -> None:
        sent.append(statement)

    async with begin(engine) as conn:
        match table:
            case "claim":
                await mirrored.upsert_claims(conn, [a_claim(f"c-{n}") for n in range(1000)])
            case "binding":
                await mirrored.upsert_bindings(conn, [a_binding(f"b-{n}") for n in range(1000)])
            case _:
                await seen.record(conn, [a_machine(f"i-{n}") for n in range(1000)])

    assert 1 <= len(sent) <= 3
