"""Facts of a sweep, with good defaults: a fake cloud, one account, one place, at noon."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from app.inventory.identity import Identity
from app.sweep.model import (
    Bounds,
    ClaimFact,
    Facts,
    Memory,
    PlaceFact,
    RentalFact,
    RunFact,
    Sighting,
)
from providers.base import ClaimUid, MachineState, Ref, ResourceId

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
US, THEM = "aaaaaaaaaa", "bbbbbbbbbb"
KEY = ("fake", "default")
BOUNDS = Bounds(grace_s=600, interval_s=60, launch_s=300, ending_s=600, terminate_s=60, part_grace_s=86_400)
HOUR = timedelta(hours=1)


def uid_of(number: int) -> ClaimUid:
    return ClaimUid(str(UUID(int=number)))


def ref_of(resource: str, region: str = "r1") -> Ref:
    return Ref(provider="fake", account="default", region=region, resource_id=ResourceId(resource))


def a_machine(
    resource: str = "m-1",
    *,
    claim: int | None = 1,
    installation: str = US,
    attempt: int = 1,
    age: timedelta = HOUR,
    said: timedelta | None = HOUR,
    raw: str | None = None,
    state: MachineState = MachineState.RUNNING,
    usd: str | None = "3.00",
    was_ours: int | None = None,
) -> Sighting:
    """A machine first seen ``age`` ago, which the cloud says is ``said`` old (None: it does not say)."""
    identity = (
        None
        if claim is None
        else Identity(installation=installation, claim_uid=uid_of(claim), attempt=attempt, sequence=7)
    )
    return Sighting(
        ref=ref_of(resource),
        raw_identity=str(identity) if identity else raw,
        identity=identity,
        state=state,
        provider_created_at=None if said is None else NOON - said,
        first_seen_at=NOON - age,
        usd_per_hour=None if usd is None else Decimal(usd),
        listed_at=NOON - timedelta(seconds=1),
        was_ours=None if was_ours is None else uid_of(was_ours),
    )


def a_claim(number: int = 1, **changes: Any) -> ClaimFact:
    values: dict[str, Any] = {
        "uid": uid_of(number),
        "name": f"ns-p{number}",
        "namespace": "ns",
        "pod": f"p{number}",
        "provider": "fake",
        "account": "default",
        "created_at": NOON - HOUR,
        "pod_exists": True,
    }
    return ClaimFact(**(values | changes))


def a_rental(number: int = 1, state: str = "live", **changes: Any) -> RentalFact:
    values: dict[str, Any] = {
        "uid": uid_of(number),
        "name": f"ns-p{number}",
        "namespace": "ns",
        "pod": f"p{number}",
        "provider": "fake",
        "account": "default",
        "state": state,
        "created_at": NOON - HOUR,
        "resource_id": ResourceId("m-1") if state == "live" else None,
        "attempt": 1 if state == "live" else None,
        "ending_at": NOON - HOUR if state in ("ending", "ended") else None,
    }
    return RentalFact(**(values | changes))


def a_run(number: int = 1, resource: str = "m-1", **changes: Any) -> RunFact:
    values: dict[str, Any] = {
        "uid": uid_of(number),
        "ref": ref_of(resource),
        "usd_per_hour": Decimal("3.00"),
        "namespace": "ns",
        "pod": f"p{number}",
        "accepted_at": NOON - HOUR,
    }
    return RunFact(**(values | changes))


def a_place(unknown: str | None = None, region: str = "r1") -> PlaceFact:
    return PlaceFact(provider="fake", account="default", region=region, unknown=unknown)


def facts(*machines: Sighting, **changes: Any) -> Facts:
    values: dict[str, Any] = {
        "installation": US,
        "now": NOON,
        "places": {KEY: (a_place(),)},
        "machines": machines,
        "claims": {one.uid: one for one in changes.pop("claims", ())},
        "rentals": {one.uid: one for one in changes.pop("rentals", ())},
        "runs": {one.key: one for one in changes.pop("runs", ())},
        "bounds": {KEY: BOUNDS},
    }
    return Facts(**(values | changes))


def seen_before(*findings: Any, ago: timedelta = timedelta(seconds=90), **changes: Any) -> dict[str, Memory]:
    """What an earlier sweep, ``ago``, has remembered of these findings."""
    return {
        one.key: Memory(
            **(
                {
                    "finding_id": number,
                    "kind": one.kind,
                    "mark": one.mark,
                    "first_seen_at": NOON - ago,
                    "marked_at": NOON - ago,
                    "sightings": 1,
                }
                | changes
            )
        )
        for number, one in enumerate(findings, start=1)
    }
